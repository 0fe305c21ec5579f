/* layout.h - how a step's tokens are cut: sequences into chunks, chunks into groups and rounds. */
#ifndef PS_STEP_LAYOUT_H
#define PS_STEP_LAYOUT_H
#include <penstock/model.h>
#include "core/core.h"
#include <penstock/plan.h>

typedef struct ps__chunk {
  uint64_t first_token; /* in the step's tokens, sequence after sequence */
  uint32_t n_tokens;
  uint32_t row0; /* group row of its first token */
  uint32_t group;
  double pairs; /* causal (query, key) pairs, counted as area: n^2/2 a sequence */
} ps__chunk;

typedef struct ps__attention_group {
  uint32_t first_chunk, n_chunks, n_rows;
} ps__attention_group;
typedef struct ps__round {
  uint32_t first_chunk, n_chunks;
} ps__round;

typedef struct ps__layout {
  uint64_t seq_len, n_sequences, n_tokens, chunk_tokens;
  uint32_t n_chunks, n_groups, n_rounds;
  /* the first round may be larger than the others; the last may be smaller */
  uint32_t chunks_per_round, first_round_chunks;
  uint32_t max_round_chunks;
  uint32_t max_chunk_tokens;
  /* rounds, all alike, that this layout lacks of the step that it stands for: see
   * ps__search_space_shorten() */
  uint32_t n_left_out;
  ps__chunk *chunk;
  ps__attention_group *group;
  ps__round *round;
} ps__layout;

/* ps__layout_init() - chunk_tokens is a multiple of seq_len (packing whole sequences) or less
 * than it (a long sequence's slices, the last one shorter). Rounds hold whole groups: as many as
 * fit into chunks_per_round chunks, at least one; the first as many as fit into
 * first_round_chunks (0: like the others), at least as many as the others. Errors: PS_EINVAL,
 * PS_ENOMEM. Freed by ps__layout_free(). */
ps_status ps__layout_init(ps__layout *l, uint64_t seq_len, uint64_t n_sequences,
                          uint64_t chunk_tokens, uint64_t chunks_per_round,
                          uint64_t first_round_chunks);
void ps__layout_free(ps__layout *l);

/* ---- how gradients are summed -------------------------------------------------------------------
 * A CONTRIBUTION is a unit's gradient over the chunks (of the lm_head: over the head's slices)
 * of a round that come one after the other, added in the dtype of gradients, which in bf16 is
 * done PS__MOST_ADDITIONS times at most: the round then has several. The step's total is the sum
 * of its contributions. Where gradients are bf16, how it is kept depends on their number
 * (kernels/ops.h):
 *   up to PS__MOST_NEAREST      each sum rounded to nearest
 *   up to PS__MOST_DITHERED     each sum dithered: no more memory or traffic
 *   more                        low bytes: 3 bytes an element instead of 2, 8 instead of 6 to add
 * So the error of a total, relative to it, does not grow with the tokens of a step. In units of
 * r, what one rounding to bf16 leaves in the mean (0.16%), independent roundings of a sum of n
 * equal terms leave r sqrt(sum of (k/n)^2, k = 2..n) to nearest, 1.8 r for 8 and 1.3 r for 4,
 * and dithered r sqrt(2n/3), 3.3 r for 16; the rounding of a total with low bytes r.
 * tests/test_totals.py measures what all of it adds to the error of bf16 forward and backward
 * passes. Everything follows from chunks, rounds and slices, nothing from a cap. */
enum { PS__MOST_ADDITIONS = 8, PS__MOST_NEAREST = 4, PS__MOST_DITHERED = 16 };
typedef struct ps__contributions {
  uint32_t additions; /* chunks or slices of a contribution at most */
  /* of a step: of units whose gradient every chunk adds to; of the lm_head's unit */
  uint32_t by_chunk, by_slice;
} ps__contributions;
/* ps__contributions_of() - of this layout; with @left_out of the step that it stands for. dt: of
 * gradients. Errors: none. */
ps__contributions ps__contributions_of(const ps__layout *l, uint64_t head_slice, ps_dtype dt,
                                       bool left_out);
/* ps__unit_contributions() - of a unit: with tied embeddings unit 0 has the lm_head's and its
 * own. */
static inline uint32_t ps__unit_contributions(const ps_model_config *m, const ps__contributions *c,
                                              uint32_t unit) {
  if (m->tied_embeddings)
    return unit == 0 ? c->by_slice + c->by_chunk : c->by_chunk;
  return unit == m->n_layers + 1 ? c->by_slice : c->by_chunk;
}
/* ps__sum_mode() - how contribution @i (from 1 on) of @n is added, where the step that it stands
 * for has @of_step: of kernels/ops.h. */
uint32_t ps__sum_mode(uint32_t i, uint32_t n, uint32_t of_step, ps_dtype dt);
/* ps__sum_bytes() - BYTES of memory that adding up @n contributions of @elements takes, read and
 * written. */
double ps__sum_bytes(double elements, uint32_t n, uint32_t of_step, ps_dtype dt);
#endif
