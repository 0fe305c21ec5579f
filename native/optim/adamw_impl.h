/* adamw_impl.h - between adamw.c and its variants (three here, one in cuda/): the constants of
 * one update and the table of functions. */
#ifndef PS_ADAMW_IMPL_H
#define PS_ADAMW_IMPL_H
#include "optim/optim.h"

/* splitmix64: the Weyl increment and the finalizer's two multipliers (Steele, Lea & Flood 2014). */
#define PS__SR_GAMMA  UINT64_C(0x9e3779b97f4a7c15)
#define PS__SR_MUL1   UINT64_C(0xbf58476d1ce4e5b9)
#define PS__SR_MUL2   UINT64_C(0x94d049bb133111eb)
#define PS__QUIET_NAN 0x7fc00000u
#ifdef __CUDACC__
#  define PS__ANYWHERE __host__ __device__ /* CUDA: for the device too */
#else
#  define PS__ANYWHERE
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* What is the same for every element of a call; each field is rounded to fp32 once, so that all
 * variants start alike. */
typedef struct ps__adamw_k {
  float lr, lr_decay, beta1, beta1_rest, beta2, beta2_rest, eps, grad_scale, c1, c2;
  uint64_t sr_key;  /* of seed and step */
  uint64_t element; /* global index of the first element */
} ps__adamw_k;
/* The constants of elements with @decay, the first of which is @element0; whatever the calling
 * thread's floating-point mode. */
ps__adamw_k ps__adamw_constants(const ps__adamw_scalars *s, float decay, uint64_t element0);

PS__ANYWHERE static inline uint64_t ps__sr_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * PS__SR_MUL1;
  z = (z ^ (z >> 27)) * PS__SR_MUL2;
  return z ^ (z >> 31);
}

/* The words of the group of four elements that @element is in: word[0] for w, [1] for m, [2] for
 * v; the element's 16 bits start at bit 16 * (element % 4). */
PS__ANYWHERE static inline void ps__sr_words(uint64_t word[3], uint64_t key, uint64_t element) {
  for (uint64_t a = 0; a < 2; a++)
    word[a] = ps__sr_mix(key + (2 * (element / 4) + a + 1) * PS__SR_GAMMA);
  word[2] = word[0] ^ word[1];
}

/* What the vector variants will read a little later: the processor's own prefetching follows
 * four arrays at once less far than its memory allows. On 14 threads of a Xeon the update of
 * bf16 went from 125 to 139 GB/s with it, and with a word less to mix to 154; the weights' part
 * from 125 to 147 at twice the distance (bench/LOG.md). */
enum { PS__ADAMW_AHEAD = 2048 }; /* BYTES */
static inline void ps__adamw_prefetch(ps__adamw_part part, const void *w, const void *m,
                                      const void *v, const void *grad) {
#if defined(__x86_64__) && !defined(__CUDACC__)
  if (part != PS_ADAMW_MOMENTS)
    __builtin_prefetch((const char *)w + PS__ADAMW_AHEAD);
  __builtin_prefetch((const char *)m + PS__ADAMW_AHEAD);
  __builtin_prefetch((const char *)v + PS__ADAMW_AHEAD);
  __builtin_prefetch((const char *)grad + PS__ADAMW_AHEAD);
#endif
}

/* A function for each part from one that has the part as its last argument: inlined, so that
 * what a part does not need is not computed. */
#define PS__ADAMW_INLINE static inline __attribute__((always_inline))
#define PS__ADAMW_PART(attributes, name, suffix, part)                                             \
  attributes static void name##_##suffix(uint64_t n, void *w, uint16_t *w_bf16, const void *grad,  \
                                         void *m, void *v, const ps__adamw_k *k) {                 \
    name(n, w, w_bf16, grad, m, v, k, part);                                                       \
  }
#define PS__ADAMW_PARTS(attributes, name)                                                          \
  PS__ADAMW_PART(attributes, name, whole, PS_ADAMW_WHOLE)                                          \
  PS__ADAMW_PART(attributes, name, weights, PS_ADAMW_WEIGHTS)                                      \
  PS__ADAMW_PART(attributes, name, moments, PS_ADAMW_MOMENTS)
#define PS__ADAMW_ROW(name) {name##_whole, name##_weights, name##_moments}

/* One contiguous piece, by recipe and part. w_bf16 is used by fp32-master only. */
typedef void (*ps__adamw_fn)(uint64_t n, void *w, uint16_t *w_bf16, const void *grad, void *m,
                             void *v, const ps__adamw_k *k);
extern const ps__adamw_fn ps__adamw_scalar[PS_N_RECIPES][PS_N_ADAMW_PARTS];
#if defined(__x86_64__)
extern const ps__adamw_fn ps__adamw_avx2[PS_N_RECIPES][PS_N_ADAMW_PARTS];
extern const ps__adamw_fn ps__adamw_avx512[PS_N_RECIPES][PS_N_ADAMW_PARTS];
#endif
#ifdef __cplusplus
}
#endif
#endif
