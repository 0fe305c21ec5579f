/* cache.c - this machine's rates: measured once, and kept in the user's cache. */
#include "hardware/hardware_impl.h"
#include <ctype.h>
#include <string.h>

/* hardware-CPU[-GPU]-THREADS.json */
ps_status ps_hardware_cache_path(char *out, uint64_t room, const ps_hardware *hw) {
  if (!hw)
    return ps__fail(PS_EINVAL, "ps_hardware_cache_path: hw is NULL");
  char machine[sizeof hw->name + sizeof hw->device_name], name[192] = "hardware-";
  size_t n = strlen(name);
  snprintf(machine, sizeof machine, "%s%s%s", hw->name, hw->device_name[0] ? " " : "",
           hw->device_name);
  for (const char *c = machine; *c && n < 160; c++)
    if (isalnum((unsigned char)*c))
      name[n++] = *c;
    else if (name[n - 1] != '-' || c == machine)
      name[n++] = '-';
  snprintf(name + n, sizeof name - n, "-%u.json", hw->n_threads);
  return ps_cache_path(out, room, name);
}

typedef struct getting {
  const ps_hardware_ask *ask;
  ps_hardware hw;
  char path[PS__CACHE_PATH]; /* "": there is no cache */
  bool not_kept;             /* and the caller was told so */
} getting;

/* With the measurements of before, and with this one where @measured: g->hw follows all of them. */
static ps_status write_file(getting *g, bool measured) {
  ps__jsonw *w = NULL;
  ps_hardware hw = g->hw, before;
  ps__kept *k = ps__calloc(1, sizeof *k);
  if (!k)
    return ps__fail(PS_ENOMEM, "out of memory for this machine's measurements");
  if (ps_hardware_read(&before, g->path, hw.backend, hw.device, hw.n_threads) == PS_OK)
    ps__kept_read(k, g->path, &before);
  if (measured && hw.measured == PS_MEASURED) {
    ps__kept_add(k, &hw, PS_RATES_QUIET);
    ps__kept_rates(k, &hw);
    g->hw = hw;
  }
  ps_status st = ps__hardware_text(&w, &hw, k);
  if (st == PS_OK)
    st = ps__jsonw_cache(w, g->path);
  ps__free(k);
  return st;
}

/* Where the file cannot be written, the run goes on. */
static void keep(getting *g, bool measured) {
  if (g->not_kept || (g->path[0] && write_file(g, measured) == PS_OK))
    return;
  g->not_kept = true;
  if (g->path[0])
    ps__hardware_note(g->ask, PS_HARDWARE_NOT_KEPT,
                      "%s; this machine's rates are not cached: set XDG_CACHE_HOME to a folder "
                      "that can be written",
                      ps_last_error());
  else
    ps__hardware_note(g->ask, PS_HARDWARE_NOT_KEPT,
                      "this machine's rates are not cached: set XDG_CACHE_HOME to a folder for the "
                      "cache");
}

/* Whether the rates are those of the file. */
static bool read_file(getting *g) {
  const ps_hardware_ask *ask = g->ask;
  ps_hardware hw;
  if (!g->path[0] || ask->how != PS_HARDWARE_ONCE ||
      ps_hardware_read(&hw, g->path, ask->backend, ask->device, ask->n_threads) != PS_OK)
    return false;
  g->hw = hw;
  return true;
}

/* PS_EBUDGET leaves the rates as they are: the file's, else estimates. */
static ps_status measure(getting *g, bool from_file) {
  ps_hardware hw;
  const ps_status st = ps__hardware_measure(&hw, g->ask);
  if (st == PS_EBUDGET && g->ask->how == PS_HARDWARE_ONCE) {
    if (!from_file)
      ps__hardware_note(g->ask, PS_HARDWARE_ESTIMATES,
                        "%s: rates are estimated; penstock profile measures them without a cap",
                        ps_last_error());
    return PS_OK;
  }
  PS_TRY(st);
  g->hw = hw;
  if (hw.other_work_percent)
    ps__hardware_note(
        g->ask, PS_HARDWARE_OTHER_WORK,
        "other work took %u%% of this machine's CPUs while it was measured: its rates "
        "are those beside that work",
        hw.other_work_percent);
  keep(g, true);
  return PS_OK;
}

/* After rates were measured because they are first needed: @before are those without. */
static void keep_more(getting *g, const ps_hardware *before) {
  if (g->hw.measured && memcmp(before, &g->hw, sizeof *before) != 0)
    keep(g, false);
}

static ps_status add(getting *g, ps_status (*more)(ps_hardware *, const ps_hardware_ask *)) {
  const ps_hardware before = g->hw;
  PS_TRY(more(&g->hw, g->ask));
  keep_more(g, &before);
  return PS_OK;
}

static ps_status add_extra(getting *g, ps__extra extra) {
  const ps_hardware before = g->hw;
  PS_TRY(ps__hardware_extra(&g->hw, g->ask, extra));
  keep_more(g, &before);
  return PS_OK;
}

static ps_status get(getting *g) {
  const ps_hardware_ask *ask = g->ask;
  PS_TRY(ps_hardware_estimate(&g->hw, ask->backend, ask->device, ask->n_threads));
  if (ps_hardware_cache_path(g->path, sizeof g->path, &g->hw) != PS_OK)
    g->path[0] = 0;
  const bool from_file = read_file(g);
  if (!from_file ||
      (g->hw.measured == PS_MEASURED_TIGHT && ps__hardware_ample(&g->hw, ask->host_mem_bytes)))
    PS_TRY(measure(g, from_file));
  const ps_model_config *m = ask->model;
  const bool needs[PS__N_EXTRAS] = {[PS__EXTRA_FP8] = ask->fp8,
                                    [PS__EXTRA_EXPERTS] = m && m->n_experts,
                                    [PS__EXTRA_DELTA] = m && m->linear_key_heads,
                                    [PS__EXTRA_HEADS512] =
                                        m && (m->head_dim > 256 || m->global_head_dim > 256)};
  for (int e = 0; e < PS__N_EXTRAS; e++)
    if (needs[e])
      PS_TRY(add_extra(g, (ps__extra)e));
  if (ask->disk)
    PS_TRY(add(g, ps__hardware_disk));
  return add(g, ps__hardware_peers);
}

ps_status ps_hardware_get(ps_hardware *out, const ps_hardware_ask *ask) {
  if (!out || !ask)
    return ps__fail(PS_EINVAL, "ps_hardware_get: out and ask must be given");
  if (ask->struct_bytes != sizeof *ask)
    return ps__fail(PS_EINVAL, "ps_hardware_ask has %u bytes, this library's has %zu",
                    ask->struct_bytes, sizeof *ask);
  if (ask->how >= PS_N_HARDWARE_HOWS || !(ask->seconds >= 0))
    return ps__fail(PS_EINVAL,
                    "ps_hardware_get: how %u with %g s: give 0 to %d, and no less than 0", ask->how,
                    ask->seconds, PS_N_HARDWARE_HOWS - 1);
  getting g = {.ask = ask};
  PS_TRY(get(&g));
  *out = g.hw;
  return PS_OK;
}

static ps_status remember(ps__kept *k, ps_hardware *file, const char *path,
                          const ps_hardware *rates, ps_rates_of of) {
  ps__jsonw *w = NULL;
  ps__kept_read(k, path, file);
  ps__kept_add(k, rates, of);
  ps__kept_rates(k, file);
  PS_TRY(ps__hardware_text(&w, file, k));
  return ps__jsonw_cache(w, path);
}

ps_status ps_hardware_remember(const ps_hardware *rates, ps_rates_of of) {
  char path[PS__CACHE_PATH];
  ps_hardware file;
  if (!rates || of >= PS_N_RATES_OF || of < 0)
    return ps__fail(PS_EINVAL, "ps_hardware_remember: rates and what they are of must be given");
  if (rates->measured == PS_ESTIMATED ||
      ps_hardware_cache_path(path, sizeof path, rates) != PS_OK ||
      ps_hardware_read(&file, path, rates->backend, rates->device, rates->n_threads) != PS_OK)
    return PS_OK;
  ps__kept *k = ps__malloc(sizeof *k);
  if (!k)
    return ps__fail(PS_ENOMEM, "out of memory for this machine's measurements");
  const ps_status st = remember(k, &file, path, rates, of);
  ps__free(k);
  return st;
}
