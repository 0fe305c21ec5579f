/* layout.h - how a step's tokens are cut: sequences into chunks, chunks into attention groups and
 * rounds; and how gradients are summed over them. */
#ifndef PS_STEP_LAYOUT_H
#define PS_STEP_LAYOUT_H
#include "core/core.h"
#include "model/model.h"
#include <penstock/plan.h>

typedef struct ps__chunk {
  uint64_t first_token; /* of the step's tokens, sequence after sequence */
  uint32_t n_tokens;
  uint32_t row0; /* row of its first token in the group */
  uint32_t group;
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
  /* The first first_rounds rounds may be larger than the others, the last one smaller. Where they
   * are not larger, first_rounds is 1. */
  uint32_t chunks_per_round, first_round_chunks, first_rounds;
  uint32_t max_round_chunks;
  uint32_t max_chunk_tokens;
  /* rounds of the usual size that this layout lacks of the step that it stands for:
   * ps__search_space_shorten() */
  uint32_t n_left_out;
  ps__chunk *chunk;
  ps__attention_group *group;
  ps__round *round;
} ps__layout;

/* ps__layout_init() - cut a step of @n_sequences sequences of @seq_len tokens.
 * @chunk_tokens        a multiple of seq_len: whole sequences are packed; less than it: slices of a
 *                      sequence, the last one shorter.
 * @chunks_per_round    rounds hold whole groups: as many as fit into so many chunks, at least one.
 * @first_round_chunks  chunks_per_round of each of the first rounds, which are at least as large as
 *                      the others. 0: like the others.
 * @first_rounds        how many first rounds there are. 0: one.
 * Errors: PS_EINVAL, PS_ENOMEM. Freed by ps__layout_free(). */
ps_status ps__layout_init(ps__layout *l, uint64_t seq_len, uint64_t n_sequences,
                          uint64_t chunk_tokens, uint64_t chunks_per_round,
                          uint64_t first_round_chunks, uint64_t first_rounds);
void ps__layout_free(ps__layout *l);

/* ---- how gradients are summed ----------------------------------------------------------------
 * A CONTRIBUTION is a unit's gradient over chunks of a round that follow each other; for the
 * lm_head, over slices of the head. Its parts are added in the dtype of gradients: in bf16 at most
 * PS__MOST_ADDITIONS of them, so that a round may have several contributions. The step's TOTAL is
 * the sum of its contributions. How a bf16 total is kept depends on their number (kernels/ops.h):
 *   up to PS__MOST_NEAREST    each sum is rounded to nearest
 *   up to PS__MOST_DITHERED   each sum is dithered: no more memory or traffic
 *   more                      low bytes: 3 bytes an element instead of 2; 7 or 8 to add, not 6
 * So the relative error of a total does not grow with the tokens of a step. Let r be what one
 * rounding to bf16 leaves in the mean: 0.16%. The error of a sum of n equal terms, rounded
 * independently:
 *   to nearest       r sqrt(sum of (k/n)^2, k = 2..n): 1.8 r for n = 8, 1.3 r for n = 4
 *   dithered         r sqrt(2n/3): 3.3 r for n = 16
 *   with low bytes   r
 * tests/test_totals.py measures what this adds to the error of bf16 forward and backward passes.
 * All of it follows from chunks, rounds and slices, never from a cap. */
enum { PS__MOST_ADDITIONS = 8, PS__MOST_NEAREST = 4, PS__MOST_DITHERED = 16 };
typedef struct ps__contributions {
  uint32_t additions; /* chunks or slices of a contribution, at most */
  /* contributions of a step: to units that every chunk adds to; to the lm_head's unit */
  uint32_t by_chunk, by_slice;
} ps__contributions;
/* ps__contributions_of() - of this layout; with @left_out, of the step that it stands for.
 * @dt: of gradients. */
ps__contributions ps__contributions_of(const ps__layout *l, uint64_t head_slice, ps_dtype dt,
                                       bool left_out);
/* ps__unit_contributions() - of one unit. With tied embeddings unit 0 has the lm_head's
 * contributions and its own. */
static inline uint32_t ps__unit_contributions(const ps_model *m, const ps__contributions *c,
                                              uint32_t unit) {
  return (m->unit[unit].by_slice ? c->by_slice : 0) + (m->unit[unit].by_chunk ? c->by_chunk : 0);
}
/* ps__sum_mode() - how contribution @i > 0 of @n, counted from 0, is added: PS_DITHER and
 * PS_LOW_* of kernels/ops.h. @of_step: contributions of the step that the layout stands for. */
uint32_t ps__sum_mode(uint32_t i, uint32_t n, uint32_t of_step, ps_dtype dt);
/* ps__sum_bytes() - BYTES of memory, read and written, that it takes to add @n contributions of
 * @elements. */
double ps__sum_bytes(double elements, uint32_t n, uint32_t of_step, ps_dtype dt);
#endif
