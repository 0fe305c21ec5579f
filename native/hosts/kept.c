/* kept.c - a measured rate of the network is kept for later starts: whose network it is; a file. */
#include "core/sha256.h"
#include "hosts/hosts.h"
#include <math.h>
#include <string.h>
#include <unistd.h>

/* LAYOUT: of a file. A later version that measures otherwise has another one, and measures anew. */
enum { NAME = 256, FILE_BYTES = 1 << 16, LAYOUT = 1 };

/* @name: a NUL ends it, and fills up what it leaves free. */
static void own_name(char name[NAME]) {
  memset(name, 0, NAME);
  if (gethostname(name, NAME - 1) != 0)
    name[0] = 0;
}

ps_status ps_hosts_id(ps_hosts *h, char out[PS_HOSTS_ID_BYTES]) {
  if (!h || !out)
    return ps__fail(PS_EINVAL, "ps_hosts_id: hosts and out must be given");
  char mine[NAME], all[PS_MAX_HOSTS][NAME], hex[65];
  ps__sha256 sum;
  own_name(mine);
  PS_TRY(ps__hosts_gather(h, "telling the machines' names", mine, all, sizeof mine));
  ps__sha256_begin(&sum);
  for (uint32_t r = 0; r < h->n; r++) /* the NUL says where a name ends */
    ps__sha256_add(&sum, all[r], strnlen(all[r], NAME - 1) + 1);
  ps__sha256_end(&sum, hex);
  snprintf(out, PS_HOSTS_ID_BYTES, "%.*s", PS_HOSTS_ID_BYTES - 1, hex);
  return PS_OK;
}

static bool is_rate(double bytes_per_s) { return bytes_per_s > 0 && isfinite(bytes_per_s); }

ps_status ps_hosts_rate_read(double *out, const char *path) {
  if (!out || !path)
    return ps__fail(PS_EINVAL, "ps_hosts_rate_read: out and path must be given");
  ps__json *j = NULL;
  PS_TRY(ps__json_read_file(&j, path, FILE_BYTES));
  const bool known = ps__json_number(ps__json_get(j, "layout"), 0) == LAYOUT;
  const double rate = ps__json_number(ps__json_get(j, "network_bytes_per_s"), 0);
  ps__json_free(j);
  if (!is_rate(rate))
    return ps__fail(PS_EFORMAT, "%s: network_bytes_per_s is missing or not positive", path);
  if (!known)
    return ps__fail(PS_ESTATE, "%s: measured by another version of penstock: measure anew", path);
  *out = rate;
  return PS_OK;
}

ps_status ps_hosts_rate_write(const ps_hosts *h, double bytes_per_s, const char *path) {
  if (!h || !path || !is_rate(bytes_per_s))
    return ps__fail(PS_EINVAL, "ps_hosts_rate_write: hosts, path and a rate must be given");
  char machine[NAME];
  ps__jsonw *w = NULL;
  PS_TRY(ps__jsonw_create(&w));
  own_name(machine);
  ps__jsonw_object(w, NULL);
  ps__jsonw_uint(w, "layout", LAYOUT);
  ps__jsonw_number(w, "network_bytes_per_s", bytes_per_s);
  ps__jsonw_string(w, "transport", h->transport == PS_TRANSPORT_NCCL ? "nccl" : "tcp");
  ps__jsonw_uint(w, "n_hosts", h->n);
  ps__jsonw_string(w, "machine", machine);
  ps__jsonw_end(w);
  return ps__jsonw_cache(w, path);
}
