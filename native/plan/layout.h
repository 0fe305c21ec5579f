/* layout.h - how a step's tokens are cut: sequences into chunks, chunks into groups and rounds. */
#ifndef PS_PLAN_LAYOUT_H
#define PS_PLAN_LAYOUT_H
#include "../core/core.h"
#include <penstock/plan.h>

typedef struct ps__chunk {
  uint64_t first_token; /* in the step's tokens, sequence after sequence */
  uint32_t n_tokens;
  uint32_t row0;        /* group row of its first token */
  uint32_t group;
  double pairs;         /* causal (query, key) pairs, counted as area: n^2/2 a sequence */
} ps__chunk;

typedef struct ps__group { uint32_t first_chunk, n_chunks, n_rows; } ps__group;
typedef struct ps__round { uint32_t first_chunk, n_chunks; } ps__round;

typedef struct ps__layout {
  uint64_t seq_len, n_sequences, n_tokens, chunk_tokens;
  uint32_t n_chunks, n_groups, n_rounds;
  uint32_t chunks_per_round, first_round_chunks; /* the first round may be larger than the others; the last may be smaller */
  uint32_t max_round_chunks;
  uint32_t max_chunk_tokens;
  ps__chunk *chunk;
  ps__group *group;
  ps__round *round;
} ps__layout;

/* ps__layout_init() - chunk_tokens is a multiple of seq_len (packing whole sequences) or less than it (a long sequence's slices,
 * the last one shorter). Rounds hold whole groups: as many as fit into chunks_per_round chunks, at least one; the first as many as fit into
 * first_round_chunks (0: like the others), at least as many as the others.
 * Errors: PS_EINVAL, PS_ENOMEM. Freed by ps__layout_free(). */
ps_status ps__layout_init(ps__layout *l, uint64_t seq_len, uint64_t n_sequences, uint64_t chunk_tokens, uint64_t chunks_per_round,
                          uint64_t first_round_chunks);
void ps__layout_free(ps__layout *l);
#endif
