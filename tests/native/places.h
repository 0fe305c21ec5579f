/* places.h - engines of several places, and ops for them. Who includes it defines before: HOST,
 * N_PLACES (the host is one, and spaces have their places' numbers), N_STREAMS, N_OPS_STREAMS (the
 * streams that are no links'), links[], N_LINKS and place_of[], the place of each stream. */
#ifndef PS_TESTS_PLACES_H
#define PS_TESTS_PLACES_H
#include "random_program.h"

static ps_engine_config places_config(void) {
  ps_engine_config cfg = {.struct_bytes = sizeof cfg,
                          .n_places = N_PLACES,
                          .n_links = N_LINKS,
                          .n_spaces = N_PLACES,
                          .n_streams = N_STREAMS};
  memcpy(cfg.link, links, sizeof links);
  for (uint32_t i = 0; i < N_PLACES; i++) {
    cfg.place[i].kind = i == HOST ? PS_PLACE_HOST : PS_PLACE_DEVICE;
    cfg.space[i] = (ps_space_config){.bytes = RP_SPACE_BYTES, .place = i};
  }
  for (uint32_t i = 0; i < N_STREAMS; i++)
    cfg.stream[i] = (ps_stream_config){.place = place_of[i], .n_threads = 1};
  return cfg;
}

static ps_access range(uint32_t space, uint32_t mode, uint64_t offset) {
  return (ps_access){space, mode, offset, 8};
}

static void add_copy(ps_program *p, uint32_t stream, ps_access from, ps_access to) {
  const ps_access access[] = {from, to};
  const ps_op op = {.stream = stream, .access = access, .n_access = 2};
  CHECK(ps_program_add(p, &op, NULL) == PS_OK);
}

static void add_mix(ps_program *p, uint32_t stream, uint32_t n, const ps_access *access) {
  rp_args args = {.n_access = n, .delay_seed = stream};
  for (uint32_t i = 0; i < n; i++) {
    args.mode[i] = (uint8_t)access[i].mode;
    args.bytes[i] = (uint8_t)access[i].bytes;
  }
  const ps_op op = {.kernel = &rp_kernel,
                    .args = &args,
                    .args_bytes = sizeof args,
                    .stream = stream,
                    .access = access,
                    .n_access = n};
  CHECK(ps_program_add(p, &op, NULL) == PS_OK);
}

static ps_program *empty(void) {
  ps_program *p;
  CHECK(ps_program_create(&p, N_PLACES, N_STREAMS) == PS_OK);
  return p;
}

/* A random op or copy where its stream may run it; none where the op's ranges overlap. */
static void add_random(ps_program *p, uint64_t *r) {
  if (rnd_below(r, 2)) {
    const ps_link *k = &links[rnd_below(r, N_LINKS)];
    ps_access from = rp_range(r, 8, PS_READ), to = rp_range(r, 8, PS_WRITE);
    from.space = k->from;
    to.space = k->to;
    from.bytes = to.bytes = from.bytes < to.bytes ? from.bytes : to.bytes;
    add_copy(p, k->stream, from, to);
    return;
  }
  const uint32_t stream = rnd_below(r, N_OPS_STREAMS);
  ps_access a[2] = {rp_range(r, 8, PS_READ), rp_range(r, 8, PS_READ_WRITE)};
  a[0].space = a[1].space = place_of[stream];
  if (rnd_below(r, 4) == 0)
    a[0].space = HOST;
  if (!rp_overlap(&a[0], &a[1]))
    add_mix(p, stream, 2, a);
}

/* What memory holds at first, a place after the other. */
static void fill(uint8_t memory[RP_SPACES][RP_SPACE_BYTES], uint64_t seed) {
  for (uint32_t i = 0; i < N_PLACES; i++)
    for (uint32_t b = 0; b < RP_SPACE_BYTES; b++)
      memory[i][b] = (uint8_t)mix64(seed + 1000 * i + b);
}

#endif
