/* places.h - where a step's memory is and what runs its ops, counted as an engine's configuration
 * counts them (penstock/engine.h), and who does what in a step. */
#ifndef PS_STEP_PLACES_H
#define PS_STEP_PLACES_H
#include <penstock/engine.h>
#include <stdbool.h>

enum { PS__NO_STREAM = UINT32_MAX, PS__NO_PLACE = UINT32_MAX };

/* One of a step's devices: its place, which is the number of its space too; its streams. A single
 * device lacks two of them: to_peers copies to the other devices, and sums adds what they send. On
 * a stream of its own a sum that waits for another device does not hold back the compute stream. */
typedef struct ps__device_at {
  uint32_t place, compute, to_device, to_host, to_peers, sums;
} ps__device_at;

typedef struct ps__places {
  uint32_t n_places, n_links, n_streams, n_devices;
  uint32_t kind[PS_MAX_PLACES]; /* ps_place_kind; the space of a place has its number */
  ps_link link[PS_MAX_LINKS];
  struct {
    char name[PS_NAME_BYTES];
    uint32_t place;
  } stream[PS_MAX_STREAMS];
  /* who does what in a step */
  ps__device_at dev[PS_MAX_DEVICES];
  uint32_t host, host_ops, io; /* the host's place, and its streams */
  uint32_t net; /* a stream of the host that talks to other hosts, or PS__NO_STREAM */
  /* the disk's place, and the host's streams that read and write it; PS__NO_PLACE, PS__NO_STREAM:
   * there is none */
  uint32_t disk, disk_read, disk_write;
} ps__places;

/* ps__places_of() - the host, @n_devices devices (1..PS_MAX_DEVICES), a bus between each of them
 * and the host, and links from each device to each other one. The devices come first, then the
 * host; the streams likewise. One device has streams "compute", "h2d", "d2h"; of several their
 * number follows: "compute 0". "p2p 0" and so on come last, then "sums 0". Where several hosts
 * train together, the host has one more stream, "net", the last. Threads: any.
 * ps__places_with() - the same and, with @disk, a disk after them: its place, the streams "disk
 * read" and "disk write", and a link each way to the host. All other numbers are the same. */
const ps__places *ps__places_of(uint32_t n_devices, uint32_t n_hosts);
const ps__places *ps__places_with(uint32_t n_devices, uint32_t n_hosts, bool disk);

/* ps__link_of() - the first link whose copies run on @stream; NULL: the stream runs ops. */
static inline const ps_link *ps__link_of(const ps__places *at, uint32_t stream) {
  for (uint32_t i = 0; i < at->n_links; i++)
    if (at->link[i].stream == stream)
      return &at->link[i];
  return NULL;
}
static inline bool ps__stream_on_host(const ps__places *at, uint32_t stream) {
  return at->kind[at->stream[stream].place] == PS_PLACE_HOST;
}
/* ps__direction() - of the copies of a stream of links. */
enum { PS__TO_DEVICE, PS__TO_HOST, PS__TO_PEERS, PS__FROM_DISK, PS__TO_DISK, PS__N_DIRECTIONS };
static inline uint32_t ps__direction(const ps__places *at, uint32_t stream) {
  const ps_link *l = ps__link_of(at, stream);
  if (stream == at->disk_read || stream == at->disk_write)
    return stream == at->disk_read ? PS__FROM_DISK : PS__TO_DISK;
  return l->to == at->host ? PS__TO_HOST : l->from == at->host ? PS__TO_DEVICE : PS__TO_PEERS;
}
/* ps__is_compute() - whether @stream is the compute stream of a device. */
static inline bool ps__is_compute(const ps__places *at, uint32_t stream) {
  return !ps__stream_on_host(at, stream) && !ps__link_of(at, stream);
}
#endif
