/* measure.c - the network's rate, before a plan is made: sums that take the way of a step's totals.
 *
 * Each sum is twice as large as the one before until one takes long enough: they warm the way up.
 * Sums of the last size are timed. All tasks know how long the slowest one took for each sum, so
 * all do the same and find the same rate. */
#include "hosts/hosts.h"
#include "hosts/net.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A step exchanges units, which have 100 to 400 MB in bf16 where there is much to send. */
enum { LEAST_BYTES = 1 << 20, MOST_BYTES = 256 << 20, LEAST_SUMS = 3, MOST_SUMS = 31 };
static const uint64_t LARGE_NS = 60000000, TIMED_NS = 300000000; /* of a sum; of all that count */
static const char what[] = "measuring the network";

/* The rate that a task gives, and the BYTES that the task may take. */
typedef struct offer {
  double bytes_per_s;
  uint64_t room_bytes;
} offer;

/* The less of two rates, of which 0 is none; so is @b where it is no rate: another task may say
 * anything. */
static double less_of(double a, double b) {
  b = b > 0 && isfinite(b) ? b : 0;
  return a > 0 && !(b > 0 && b < a) ? a : b;
}

ps_status ps_hosts_stated(ps_hosts *h, double *bytes_per_s) {
  double all[PS_MAX_HOSTS], least = 0;
  if (!h || !bytes_per_s || !(*bytes_per_s >= 0) || !isfinite(*bytes_per_s))
    return ps__fail(PS_EINVAL, "ps_hosts_stated: hosts must be given, and bytes_per_s: 0, or what "
                               "this machine's description states");
  PS_TRY(ps__hosts_gather(h, "comparing the network's rates", bytes_per_s, all, sizeof *all));
  for (uint32_t r = 0; r < h->n; r++)
    least = less_of(least, all[r]);
  *bytes_per_s = least;
  return PS_OK;
}

ps_status ps__hosts_known_rate(ps_hosts *h, double given, uint64_t room_bytes, double *out,
                               uint64_t *most_bytes) {
  const offer mine = {given, room_bytes};
  offer all[PS_MAX_HOSTS];
  double least = 0;
  PS_TRY(ps__hosts_gather(h, what, &mine, all, sizeof mine));
  *most_bytes = MOST_BYTES;
  for (uint32_t r = 0; r < h->n; r++) {
    least = less_of(least, all[r].bytes_per_s);
    while (*most_bytes > LEAST_BYTES && *most_bytes > all[r].room_bytes)
      *most_bytes /= 2;
  }
  *out = least > 0 ? least : h->network_bytes_per_s;
  return PS_OK;
}

/* How long the slowest task takes for a sum of @bytes of @data. */
static ps_status time_sum(ps_hosts *h, void *data, uint64_t bytes, uint64_t *out_ns) {
  uint64_t all[PS_MAX_HOSTS];
  const uint64_t begin = ps__now_ns();
  PS_TRY(ps__hosts_sum(h, what, data, bytes / ps_dtype_bytes(PS_BF16), PS_BF16));
  const uint64_t mine = ps__now_ns() - begin;
  PS_TRY(ps__hosts_gather(h, what, &mine, all, sizeof mine));
  *out_ns = 0;
  for (uint32_t r = 0; r < h->n; r++)
    *out_ns = all[r] > *out_ns ? all[r] : *out_ns;
  return PS_OK;
}

static int by_value(const void *a, const void *b) {
  const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return (x > y) - (x < y);
}

/* @data: @most_bytes. It is filled with zeros, of which sums are zeros, as far as it is used. */
static ps_status time_sums(ps_hosts *h, char *data, uint64_t most_bytes, double *out) {
  uint64_t bytes = 0, ns = 0, ns_of[MOST_SUMS], total_ns = 0;
  uint32_t n = 0;
  do {
    const uint64_t larger = bytes ? 2 * bytes : LEAST_BYTES;
    memset(data + bytes, 0, larger - bytes);
    bytes = larger;
    PS_TRY(time_sum(h, data, bytes, &ns));
  } while (ns < LARGE_NS && 2 * bytes <= most_bytes);
  while (n < LEAST_SUMS || (n < MOST_SUMS && total_ns < TIMED_NS)) {
    PS_TRY(time_sum(h, data, bytes, &ns_of[n]));
    total_ns += ns_of[n++];
  }
  qsort(ns_of, n, sizeof *ns_of, by_value);
  const double hosts = h->n, sent = 2 * (hosts - 1) / hosts * (double)bytes;
  *out = sent / ((double)(ns_of[n / 2] + 1) * 1e-9);
  return PS_OK;
}

static ps_status measure_tcp(ps_hosts *h, uint64_t most_bytes, double *out) {
  char *data = ps__malloc(most_bytes);
  if (!data)
    return ps__fail(PS_ENOMEM, "out of memory for measuring the network");
  const ps_status st = time_sums(h, data, most_bytes, out);
  ps__free(data);
  return st;
}

/* After an error lanes may still use the memory: it is kept until NCCL is closed. */
static ps_status measure_nccl(ps_hosts *h, uint64_t most_bytes, double *out) {
  const ps__net_device *d = ps__hosts_net(h);
  void *data = NULL;
  PS_TRY(d->api->enter(d->user));
  ps_status st = d->api->reserve(d->user, true, most_bytes, &data);
  d->api->leave(d->user);
  if (st == PS_OK)
    st = time_sums(h, data, most_bytes, out);
  if (st == PS_OK && (st = d->api->enter(d->user)) == PS_OK) {
    d->api->release(d->user, data);
    d->api->leave(d->user);
  }
  return st;
}

ps_status ps__hosts_measure(ps_hosts *h, uint64_t most_bytes, double *out) {
  PS_TRY(ps__hosts_net(h) ? measure_nccl(h, most_bytes, out) : measure_tcp(h, most_bytes, out));
  h->network_bytes_per_s = *out;
  return PS_OK;
}
