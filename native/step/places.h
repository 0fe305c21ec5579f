/* places.h - where a step's memory is and what runs its ops, counted as an engine's configuration
 * counts them (penstock/engine.h), and who does what in a step. */
#ifndef PS_STEP_PLACES_H
#define PS_STEP_PLACES_H
#include <penstock/engine.h>
#include <stdbool.h>

enum { PS__MAX_PLACES = 2 }; /* of a step, for arrays by place */

typedef struct ps__places {
  uint32_t n_places, n_links, n_streams;
  uint32_t kind[PS_MAX_PLACES]; /* ps_place_kind; the space of a place has its number */
  ps_link link[PS_MAX_LINKS];
  struct {
    const char *name;
    uint32_t place;
  } stream[PS_MAX_STREAMS];
  /* who does what in a step: places, and streams */
  uint32_t device, host;
  uint32_t compute, to_device, to_host, host_ops, io;
} ps__places;

/* The host, one device and the bus between them. */
extern const ps__places ps__one_device;

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
#endif
