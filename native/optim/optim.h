/* optim.h - the optimizer on the host (cuda_adamw.h: on the device): AdamW with decoupled decay
 * over one unit's state, fused, by segments.
 *
 * math (Loshchilov & Hutter 2019, arXiv 1711.05101, with bias correction), all in fp32, no FMA
 * contraction, in this order:
 *   g  = grad * grad_scale
 *   m' = beta1*m + (1-beta1)*g;   v' = beta2*v + (1-beta2)*(g*g)
 *   d  = (m' * c1) / (sqrt(v' * c2) + eps),  c1 = 1/(1-beta1^t), c2 = 1/(1-beta2^t) computed in
 *      double, rounded once
 *   w' = (w - (lr*decay)*w) - lr*d
 * recipe fp32         w, m, v, grad fp32
 * recipe fp32-master  w, m, v fp32, grad bf16; the bf16 copy of w is rounded to nearest even
 * recipe bf16         w, m, v, grad bf16; w', m', v' rounded stochastically: (bits + (r &
 *                     0xffff)) >> 16 where r is the
 *                     counter-based generator below (not applied to infinities and NaN)
 * AVX-512, AVX2, scalar and CUDA give the same bits for every input; which host variant runs is
 * chosen once by the CPU, and can be forced for tests. Denormals are computed with, never
 * flushed, whatever the calling thread's mode (it is set for the call and put back). Infinities
 * follow IEEE 754. A NaN is stored as the one quiet NaN 0x7fc00000 (0x7fc0 in bf16), whatever
 * its origin. A finite value beyond the largest bf16 may round to infinity. generator:
 * ps__sr_random(seed, step, element): splitmix64's finalizer over a Weyl sequence, two words for
 * four elements and their exclusive or (formula in adamw.c); bits 0-15 for w, 16-31 for m, 32-47
 * for v. element is the global element index: unit_base + offset. */
#ifndef PS_OPTIM_H
#define PS_OPTIM_H
#include <penstock/engine.h>
#include <penstock/model.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps__pool ps__pool; /* core.h, which C++ cannot read */

typedef enum ps__simd { PS_SIMD_SCALAR = 0, PS_SIMD_AVX2 = 1, PS_SIMD_AVX512 = 2 } ps__simd;
PS_API ps__simd ps__simd_best(void); /* what this CPU runs */

/* The 48 random bits of one element. */
PS_API uint64_t ps__sr_random(uint64_t seed, uint64_t step, uint64_t element);

/* Scalars of one update. */
typedef struct ps__adamw_scalars {
  float lr, beta1, beta2, eps, grad_scale;
  float c1, c2;        /* bias corrections, see above */
  uint64_t seed, step; /* key of the stochastic rounding */
} ps__adamw_scalars;

/* Bias corrections at step t (1 for the first): fills c1 and c2 from beta1 and beta2. */
PS_API void ps__adamw_bias_correction(ps__adamw_scalars *s, uint64_t t);

/* What of an update is made: w (and its bf16 copy), m and v in one pass; or w alone, which is
 * what a forward pass waits for, and m and v later from the same gradient. Both parts, w's
 * first, leave the bits of the whole: m' and v' do not depend on w, and the random bits are a
 * function of the element. */
typedef enum ps__adamw_part {
  PS_ADAMW_WHOLE = 0,
  PS_ADAMW_WEIGHTS = 1,
  PS_ADAMW_MOMENTS = 2,
  PS_N_ADAMW_PARTS = 3
} ps__adamw_part;
/* BYTES of memory that an element takes, read and written:   whole  weights  moments
 *   fp32         w, m, v, grad of 4                             28       20       20
 *   fp32-master  w, m, v of 4, grad and the copy of 2           28       20       18
 *   bf16         w, m, v, grad of 2                             14       10       10 */
PS_API double ps__adamw_bytes(ps_recipe recipe, ps__adamw_part part);

/* Update elements [0, n) of arrays already offset to the segment's first element, whose global
 * index is element0. decay is this segment's weight decay. w_bf16 only for fp32-master (else
 * NULL). Types by recipe as above. n any; arrays aligned to 4 bytes (2 for bf16).
 * PS_ADAMW_WEIGHTS only reads m and v; PS_ADAMW_MOMENTS touches neither w nor w_bf16, which may
 * be NULL. Single-threaded: callers split. */
PS_API void ps__adamw_update(ps__simd simd, ps_recipe recipe, ps__adamw_part part, uint64_t n,
                             void *w, uint16_t *w_bf16, const void *grad, void *m, void *v,
                             float decay, uint64_t element0, const ps__adamw_scalars *s);

/* The same over a unit on a pool: segments[i] = {first, n, decay}; work is cut in blocks of
 * 16384 elements. */
typedef struct ps__adamw_segment {
  uint64_t first, n;
  float decay;
} ps__adamw_segment;
PS_API void ps__adamw_unit(ps__pool *pool, ps_recipe recipe, ps__adamw_part part,
                           const ps__adamw_segment *segments, uint32_t n_segments, void *w,
                           uint16_t *w_bf16, const void *grad, void *m, void *v,
                           uint64_t unit_element0, const ps__adamw_scalars *s);

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

/* Kernel of the model's optimizer op lives in native/train, which owns the scalars. */
#ifdef __cplusplus
}
#endif
#endif
