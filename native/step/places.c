/* places.c - the places that a step may have: one device or several beside the host. */
#include "step/places.h"
#include <stdarg.h>
#include <stdio.h>

enum { ONE_HOST, SEVERAL_HOSTS, N_KINDS };
static ps__places table[2][N_KINDS][PS_MAX_DEVICES + 1]; /* [disk]; by n_devices, from 1 on */

/* Each returns the number of what it adds. */
static uint32_t add_place(ps__places *p, uint32_t kind) {
  p->kind[p->n_places] = kind;
  return p->n_places++;
}

__attribute__((format(printf, 3, 4))) static uint32_t add_stream(ps__places *p, uint32_t place,
                                                                 const char *name, ...) {
  va_list args;
  va_start(args, name);
  vsnprintf(p->stream[p->n_streams].name, PS_NAME_BYTES, name, args);
  va_end(args);
  p->stream[p->n_streams].place = place;
  return p->n_streams++;
}

static void add_link(ps__places *p, uint32_t from, uint32_t to, uint32_t stream,
                     uint32_t resource) {
  p->link[p->n_links++] = (ps_link){from, to, stream, resource};
}

/* Copies both ways between a device and the host share a bus, which has the device's number. */
static void add_devices(ps__places *p, uint32_t n) {
  for (uint32_t d = 0; d < n; d++) {
    char number[16] = "";
    if (n > 1)
      snprintf(number, sizeof number, " %u", d);
    ps__device_at *at = &p->dev[d];
    at->place = add_place(p, PS_PLACE_DEVICE);
    at->compute = add_stream(p, at->place, "compute%s", number);
    at->to_device = add_stream(p, at->place, "h2d%s", number);
    at->to_host = add_stream(p, at->place, "d2h%s", number);
    at->to_peers = at->sums = PS__NO_STREAM;
  }
  p->n_devices = n;
}

static void add_host(ps__places *p) {
  p->host = add_place(p, PS_PLACE_HOST);
  p->host_ops = add_stream(p, p->host, "host");
  p->io = add_stream(p, p->host, "io");
  for (uint32_t d = 0; d < p->n_devices; d++) {
    add_link(p, p->host, d, p->dev[d].to_device, d);
    add_link(p, d, p->host, p->dev[d].to_host, d);
  }
}

/* All copies from a device to other devices are of one stream, and share what they go out by. */
static void add_peers(ps__places *p) {
  const uint32_t n = p->n_devices;
  for (uint32_t d = 0; d < n; d++)
    p->dev[d].to_peers = add_stream(p, d, "p2p %u", d);
  for (uint32_t d = 0; d < n; d++)
    p->dev[d].sums = add_stream(p, d, "sums %u", d);
  for (uint32_t b = 1; b < n; b++)
    for (uint32_t a = 0; a < b; a++) {
      add_link(p, a, b, p->dev[a].to_peers, n + a);
      add_link(p, b, a, p->dev[b].to_peers, n + b);
    }
}

/* Reads and writes share the drives. The streams are threads of the host. */
static void add_disk(ps__places *p) {
  const uint32_t n = p->n_devices, resource = n > 1 ? 2 * n : 1;
  p->disk = add_place(p, PS_PLACE_DISK);
  p->disk_read = add_stream(p, p->host, "disk read");
  p->disk_write = add_stream(p, p->host, "disk write");
  add_link(p, p->disk, p->host, p->disk_read, resource);
  add_link(p, p->host, p->disk, p->disk_write, resource);
}

/* When the library is loaded: a search asks for them from many threads. */
__attribute__((constructor)) static void fill(void) {
  for (uint32_t i = 0; i < 2 * N_KINDS; i++)
    for (uint32_t n = 1; n <= PS_MAX_DEVICES; n++) {
      ps__places *p = &table[i / N_KINDS][i % N_KINDS][n];
      add_devices(p, n);
      add_host(p);
      if (n > 1)
        add_peers(p);
      p->net = i % N_KINDS == SEVERAL_HOSTS ? add_stream(p, p->host, "net") : PS__NO_STREAM;
      p->disk = PS__NO_PLACE;
      p->disk_read = p->disk_write = PS__NO_STREAM;
      if (i / N_KINDS)
        add_disk(p);
    }
}

const ps__places *ps__places_with(uint32_t n_devices, uint32_t n_hosts, bool disk) {
  return &table[disk][n_hosts > 1 ? SEVERAL_HOSTS : ONE_HOST][n_devices];
}

const ps__places *ps__places_of(uint32_t n_devices, uint32_t n_hosts) {
  return ps__places_with(n_devices, n_hosts, false);
}

/* Of a device: compute, h2d, d2h, p2p, sums; of the host: host, io, net, disk read, disk write. */
_Static_assert(PS_MAX_DEVICES + 2 <= PS_MAX_PLACES && PS_MAX_DEVICES + 2 <= PS_MAX_SPACES &&
                   PS_MAX_DEVICES * (PS_MAX_DEVICES + 1) + 2 <= PS_MAX_LINKS &&
                   5 * PS_MAX_DEVICES + 5 <= PS_MAX_STREAMS,
               "an engine has too few places, links or streams for so many devices");
