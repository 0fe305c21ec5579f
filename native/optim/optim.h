/* optim.h - optimizers on the host (cuda_update.h: on the device): the update of one unit's
 * weights and state, fused, by segments.
 *
 * An optimizer is a row of PS__OPTIMIZERS and a step function, the arithmetic of one element. The
 * step function is written once, in a header of the optimizer's name (adamw.h), for scalar, AVX2,
 * AVX-512 and CUDA (steps.h says how). All in fp32, no FMA contraction, in the function's order:
 *   g        = grad * grad_scale
 *   w', s'   = step(g, w, s),  s = state[0 .. n_states - 1]
 * recipe fp32         w, state, grad fp32
 * recipe fp32-master  w, state fp32, grad bf16; the bf16 copy of w is rounded to nearest even
 * recipe bf16         w, state, grad bf16; w' and s' rounded stochastically: (bits + r) >> 16
 *                     with 16 random bits r of the counter-based generator below (not applied to
 *                     infinities and NaN)
 * recipe fp24-master  state, grad bf16; w has 24 bits: (bits + (r & 255)) & ~255. copy is w rounded
 *                     to bf16, ties away from zero, and the array w the difference, bits 8 to 15 of
 *                     it as a signed byte: (copy << 16) + (w << 8) gives it back
 * state in 8 bits     bits8.h; an update begins with a block
 * AVX-512, AVX2, scalar and CUDA give the same bits for every input. The CPU decides once which
 * host variant runs; tests can force one. Denormals are computed with, never flushed, whatever the
 * calling thread's mode (it is set for the call and put back). Infinities follow IEEE 754. A NaN is
 * stored as the one quiet NaN 0x7fc00000 (0x7fc0 in bf16), whatever its origin. A finite value
 * beyond the largest bf16 may round to infinity.
 * Generator: ps__sr_random(seed, step, element): splitmix64's finalizer over a Weyl sequence, two
 * words for four elements and their exclusive or (formula in update.c); bits 0-15 for w, 16-31
 * for state[0], 32-47 for state[1]. element is the global element index: unit_base + offset. */
#ifndef PS_OPTIM_H
#define PS_OPTIM_H
#include "optim/recipe.h"
#include <penstock/engine.h>
#include <penstock/optim.h>
#include <stdbool.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps__pool ps__pool; /* core.h, which C++ cannot read */

typedef enum ps__simd { PS_SIMD_SCALAR = 0, PS_SIMD_AVX2 = 1, PS_SIMD_AVX512 = 2 } ps__simd;
PS_API ps__simd ps__simd_best(void); /* what this CPU runs */

/* The 48 random bits of one element. */
PS_API uint64_t ps__sr_random(uint64_t seed, uint64_t step, uint64_t element);

/* ---- the table ------------------------------------------------------------------------------- */

/* The part of an update that is made. WHOLE: the weights (and their bf16 copy) and the state in one
 * pass. WEIGHTS: the weights alone, which a forward pass waits for. STATE: the state, later, from
 * the same gradient. Both parts, the weights' first, give the bits of the whole: the random bits
 * are a function of the element. For optimizers that split only. */
typedef enum ps__update_part {
  PS_UPDATE_WHOLE = 0,
  PS_UPDATE_WEIGHTS = 1,
  PS_UPDATE_STATE = 2,
  PS_N_UPDATE_PARTS = 3
} ps__update_part;

/* X(NAME, name, n_states, parts, state_op): PS_OPTIMIZER_NAME, which users and schedules call
 * "name", has the step step_name (steps.h). parts: SPLITS where new state does not depend on
 * weights, so that an update may be made in two parts, else WHOLE. state_op: the op's name of
 * PS_UPDATE_STATE. */
#define PS__OPTIMIZERS(X)                                                                          \
  X(ADAMW, adamw, 2, SPLITS, "adamw_moments")                                                      \
  X(LION, lion, 1, SPLITS, "lion_state")                                                           \
  X(SGD, sgd, 1, WHOLE, "")

#define PS__OPTIMIZER_NAMES "adamw, lion or sgd" /* for messages */

typedef struct ps__optimizer {
  const char *name;
  uint32_t n_states;
  bool splits;
} ps__optimizer;
extern const ps__optimizer ps__optimizers[PS_N_OPTIMIZERS];

/* BYTES of the state that @n parameters have; BYTES of their master copy, 0 without one. */
PS_API uint64_t ps__state_bytes(ps_optimizer optimizer, uint32_t recipe, uint64_t n);
PS_API uint64_t ps__master_bytes(uint32_t recipe, uint64_t n);
/* BYTES of state that one of many parameters has: a rate. */
PS_API double ps__state_each(ps_optimizer optimizer, uint32_t recipe);
/* BYTES of memory that an element's update takes, read and written. With n states of e bytes:
 *                     whole            weights          state
 *   fp32, e = 4       12 + 8 n         12 + 4 n         4 + 8 n      w and grad of 4
 *   fp32-master, 4    12 + 8 n         12 + 4 n         2 + 8 n      w of 4, grad and copy of 2
 *   bf16, e = 2        6 + 4 n          6 + 2 n         2 + 4 n      w and grad of 2
 * AdamW, n = 2: 28, 20, 20; 28, 20, 18; 14, 10, 10. Lion, SGD, n = 1: 20, 16, 12; 20, 16, 10;
 * 10, 8, 6. */
PS_API double ps__update_bytes(ps_optimizer optimizer, uint32_t recipe, ps__update_part part);

/* ps__hypers_resolve() - check the hyperparameters of an optimizer, NAN where none was given, and
 * put its defaults there. lr is left to who knows the schedule. PS_EINVAL names what is out of
 * range or not the optimizer's. */
PS_API ps_status ps__hypers_resolve(ps_optimizer optimizer, double hyper[PS_N_HYPERS]);

/* ---- an update ------------------------------------------------------------------------------- */

/* What is the same for all elements of an update but the weight decay. */
typedef struct ps__update {
  ps_optimizer optimizer;
  uint32_t recipe; /* a row without FP8: ps__recipe.arrays */
  ps__update_part part;
  float lr, beta1, beta2, eps, momentum, grad_scale;
  bool nesterov;
  float c1, c2;        /* AdamW's bias corrections: ps__update_correct() */
  uint64_t seed, step; /* key of the stochastic rounding */
} ps__update;

/* ps__update_correct() - c1 = 1/(1-beta1^t) and c2 = 1/(1-beta2^t), in double, rounded once: for
 * the t-th update of the state, 1 for the first. */
PS_API void ps__update_correct(ps__update *u, uint64_t t);

/* Conversions of @n elements, for files and for callers; no overlap. Single-threaded.
 * ps__stored_to_f32(), ps__stored_from_f32() - of an array from the beginning of a block on. The
 *   levels of 8 bits are rounded to nearest.
 * ps__master_merge(), ps__master_split() - of a master copy of 24 bits, to and from its high and
 *   low bits; rounded to nearest even. */
PS_API void ps__stored_to_f32(ps__storage as, float *dst, const void *src, uint64_t n);
PS_API void ps__stored_from_f32(ps__storage as, void *dst, const float *src, uint64_t n);
PS_API void ps__master_merge(float *dst, const void *high, const void *low, uint64_t n);
PS_API void ps__master_split(void *high, void *low, const float *src, uint64_t n);

/* A unit's arrays, or some elements of them. w: the weights that are updated, in recipe fp32-master
 * the master, whose copy in the recipe's `weights` is copy (else NULL); in fp24-master the master's
 * low bits. Of PS_UPDATE_STATE w and copy may be NULL. Aligned to their elements; types by recipe
 * as above. */
typedef struct ps__arrays {
  void *w;
  void *copy;
  const void *grad;
  void *state[PS_MAX_STATES];
} ps__arrays;
/* The same from element @first on. */
PS_API ps__arrays ps__arrays_from(const ps__arrays *a, uint32_t recipe, uint64_t first);

/* ps__update_elements() - update the first @n elements of @a, whose global index is @element0
 * and whose weight decay is @decay. PS_UPDATE_WEIGHTS only reads the state; PS_UPDATE_STATE
 * touches neither w nor copy. Single-threaded: callers split. */
PS_API void ps__update_elements(ps__simd simd, const ps__update *u, uint64_t n, const ps__arrays *a,
                                float decay, uint64_t element0);

/* The operands of an update as an op. The list of an op's operands is the order of its accesses:
 * the step builder declares them by it, and the launcher finds their addresses by it. GATE is
 * what the gate reads (below) but for HEADER, the batch header on the device. */
typedef enum ps__operand {
  PS_OPERAND_WEIGHTS, /* that are updated: the master where there is one */
  PS_OPERAND_STATE,   /* state[k]: PS_OPERAND_STATE + k */
  PS_OPERAND_GRAD = PS_OPERAND_STATE + PS_MAX_STATES,
  PS_OPERAND_COPY, /* of the master, in bf16 */
  PS_OPERAND_GATE,
  PS_OPERAND_HEADER,
  PS_N_OPERANDS
} ps__operand;
typedef struct ps__operand_access {
  uint32_t operand, mode; /* ps__operand; ps_access.mode */
} ps__operand_access;
/* Fills @out and returns how many there are. @header: whether the gate has one. */
PS_API uint32_t ps__update_operands(ps_optimizer optimizer, uint32_t recipe, ps__update_part part,
                                    bool header, ps__operand_access out[PS_N_OPERANDS]);
/* Of an op whose operand i is at ptr[i]: an operand, NULL where it has none; all its arrays. */
PS_API void *ps__operand_ptr(const ps__operand_access *operands, uint32_t n, uint32_t operand,
                             void *const *ptr);
PS_API ps__arrays ps__arrays_of(const ps__operand_access *operands, uint32_t n, void *const *ptr);

/* A part of a unit with one weight decay. */
typedef struct ps__segment {
  uint64_t first, n;
  float decay;
} ps__segment;

/* What an update checks before it writes. After a failure on the host, submitted work still runs on
 * stale data (engine/backend.h) and must leave the weights of the last complete step. All fields
 * are read when the update runs; on a GPU they point to device memory. */
typedef struct ps__update_gate {
  /* nothing is done unless *step == expected: the host lets steps pass by number; NULL: any */
  const uint64_t *step;
  uint64_t expected;
  /* the gradient's scale, instead of ps__update.grad_scale; NULL: that one */
  const float *scale;
  /* nothing is done unless these n_sumsq (at most 32) are finite; NULL: not checked */
  const double *sumsq;
  uint32_t n_sumsq;
} ps__update_gate;

/* Whether an update on the host may run. */
PS_API bool ps__gate_open(const ps__update_gate *gate);

/* ps__update_unit_fn - make the update @u of a unit's segments, the first element of whose arrays
 * @a has the global index @unit_element0, unless @gate is closed.
 * @exec  what the backend gives its ops: a ps__cpu_exec or a ps__cuda_exec.
 * ps__update_unit[backend] is the backend's; NULL in a build without it. On a GPU the update is
 * queued on exec->stream and borrows what @gate points to until it has run; part
 * PS_UPDATE_WHOLE alone. Segments, @u, @a and @gate are borrowed for the call. Allocates nothing.
 * Errors: PS_EINVAL; PS_EDEVICE the launch was refused. */
typedef ps_status (*ps__update_unit_fn)(void *exec, const ps__update *u,
                                        const ps__segment *segments, uint32_t n_segments,
                                        const ps__arrays *a, uint64_t unit_element0,
                                        const ps__update_gate *gate);
extern const ps__update_unit_fn ps__update_unit[PS_N_BACKENDS];

/* What the CPU's does once @gate is open, on a pool, in blocks of 16384 elements. */
PS_API void ps__update_on_pool(ps__pool *pool, const ps__update *u, const ps__segment *segments,
                               uint32_t n_segments, const ps__arrays *a, uint64_t unit_element0);

/* Learning rate of a schedule at step (0-based), in double. Formulas: lr.c. */
typedef enum ps__schedule_kind {
  PS_LR_CONSTANT = 0,
  PS_LR_COSINE = 1,
  PS_LR_LINEAR = 2,
  PS_LR_WSD = 3
} ps__schedule_kind;
typedef struct ps__lr_schedule {
  uint32_t kind;
  uint64_t warmup_steps, total_steps, decay_steps; /* decay_steps: WSD's last part */
  double peak_lr, min_lr;
} ps__lr_schedule;
PS_API double ps__lr_at(const ps__lr_schedule *s, uint64_t step);

#ifdef __cplusplus
}
#endif
#endif
