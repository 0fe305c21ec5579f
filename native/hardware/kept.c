/* kept.c - the measurements of this machine that its file keeps, and the rates that follow. */
#include "hardware/hardware_impl.h"
#include <string.h>
#include <sys/stat.h>
#include <time.h>

/* So many of a kind count, the newest: what the machine was some weeks ago does not. */
enum { COUNTED = 5 };

void ps__kept_read(ps__kept *out, const char *path, const ps_hardware *hw) {
  struct stat s;
  if (ps__hardware_kept(out, path) || hw->measured != PS_MEASURED || stat(path, &s) != 0)
    return;
  out->entry[0] = (ps__measurement){(uint64_t)s.st_mtime, PS_RATES_QUIET, *hw};
  out->n = 1;
}

void ps__kept_add(ps__kept *k, const ps_hardware *hw, ps_rates_of of) {
  if (k->n == PS__KEPT) {
    memmove(&k->entry[0], &k->entry[1], (PS__KEPT - 1) * sizeof k->entry[0]);
    k->n--;
  }
  k->entry[k->n++] = (ps__measurement){(uint64_t)time(NULL), of, *hw};
}

void ps__kept_rates(const ps__kept *k, ps_hardware *hw) {
  const ps_hardware *of[COUNTED];
  uint32_t n = 0, first = 0;
  ps_rates_of best = PS_RATES_QUIET;
  for (uint32_t i = 0; i < k->n; i++)
    if (k->entry[i].of == PS_RATES_QUIET)
      first = i;
  for (uint32_t i = first; i < k->n; i++)
    if (k->entry[i].of > best)
      best = k->entry[i].of;
  for (uint32_t i = k->n; i-- > (best == PS_RATES_QUIET ? 0 : first) && n < COUNTED;)
    if (k->entry[i].of == best)
      of[n++] = &k->entry[i].hw;
  ps__hardware_median(hw, of, n);
}
