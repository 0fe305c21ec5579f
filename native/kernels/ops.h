/* ops.h - the op table: every kernel of the model with its arguments, the order of its accesses and
 * its math; and how an op describes itself.
 *
 * Each op is one const ps_kernel, ps__k_<op>, in a row of native/kernels/ops/<family>.c: the check
 * of its arguments, its description and both functions. The arithmetic is ps__cpu_<op> in
 * native/kernels/cpu/ and ps__cuda_<op> in native/kernels/cuda/.
 *   - Argument blocks are plain structs of shapes without padding: equal ops have equal bytes.
 *   - Addresses arrive in ps_launch.ptr in the order listed after "ptr:". R: the op reads, W: it
 *     writes, RW: both. W|RW: RW where the op accumulates, else W.
 *   - T tokens (rows), D model dim, A = heads*head_dim, K = kv_heads*head_dim, F ffn dim, V vocab.
 *   - All matrices are row-major. dt is the storage dtype.
 *   - Arithmetic is fp32 inside (fp64 where said), with one rounding (to nearest even) at the
 *     store.
 *   - Every kernel gives the same bits for any number of threads and any address alignment of 16
 *     bytes. */
#ifndef PS_KERNELS_OPS_H
#define PS_KERNELS_OPS_H
#include "core/dtype.h"
#include <penstock/engine.h>
#include <math.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Every op: a new one is a line here. */
#define PS__OPS(X)                                                                                 \
  X(fill_zero)                                                                                     \
  X(copy_bytes)                                                                                    \
  X(dequantize)                                                                                    \
  X(accumulate)                                                                                    \
  X(accumulate_host)                                                                               \
  X(embed_fwd)                                                                                     \
  X(embed_bwd)                                                                                     \
  X(embed_bwd_host)                                                                                \
  X(rmsnorm_fwd)                                                                                   \
  X(rmsnorm_bwd)                                                                                   \
  X(gemm)                                                                                          \
  X(gemm_rows)                                                                                     \
  X(gemm_fp8)                                                                                      \
  X(fp8_scale)                                                                                     \
  X(quantize)                                                                                      \
  X(rmsnorm_quantize)                                                                              \
  X(qkv_split_fwd)                                                                                 \
  X(qkv_split_bwd)                                                                                 \
  X(mla_turn)                                                                                      \
  X(mla_kv_fwd)                                                                                    \
  X(mla_kv_bwd)                                                                                    \
  X(mla_cut)                                                                                       \
  X(mla_pad)                                                                                       \
  X(layer_scale_fwd)                                                                               \
  X(layer_scale_bwd)                                                                               \
  X(attention_fwd)                                                                                 \
  X(attention_bwd)                                                                                 \
  X(attention_cached)                                                                              \
  X(attention_sink)                                                                                \
  X(attention_sink_bwd)                                                                            \
  X(glu_fwd)                                                                                       \
  X(glu_bwd)                                                                                       \
  X(glu_quantize)                                                                                  \
  X(glu_bwd_quantize)                                                                              \
  X(moe_route)                                                                                     \
  X(moe_route_bwd)                                                                                 \
  X(moe_index)                                                                                     \
  X(moe_gather)                                                                                    \
  X(gemm_grouped)                                                                                  \
  X(gemm_grouped_rows)                                                                             \
  X(gemm_grouped_slots)                                                                            \
  X(moe_fetch)                                                                                     \
  X(moe_glu)                                                                                       \
  X(moe_glu_bwd)                                                                                   \
  X(moe_combine)                                                                                   \
  X(moe_scale)                                                                                     \
  X(moe_scale_bwd)                                                                                 \
  X(add_bias)                                                                                      \
  X(moe_clamp_glu)                                                                                 \
  X(moe_clamp_glu_bwd)                                                                             \
  X(moe_bias_dot)                                                                                  \
  X(moe_bias_sum)                                                                                  \
  X(conv_fwd)                                                                                      \
  X(conv_bwd)                                                                                      \
  X(conv_cached)                                                                                   \
  X(delta_fwd)                                                                                     \
  X(delta_bwd)                                                                                     \
  X(delta_cached)                                                                                  \
  X(gated_norm_fwd)                                                                                \
  X(gated_norm_bwd)                                                                                \
  X(heads_split)                                                                                   \
  X(heads_join)                                                                                    \
  X(sigmoid_gate_fwd)                                                                              \
  X(sigmoid_gate_bwd)                                                                              \
  X(colsum)                                                                                        \
  X(cross_entropy)                                                                                 \
  X(score_loss)                                                                                    \
  X(sumsq)                                                                                         \
  X(sumsq_host)                                                                                    \
  X(accumulate_sumsq_host)                                                                         \
  X(round_sumsq_host)

#define PS__DECLARE_OP(op) extern const ps_kernel ps__k_##op;
PS__OPS(PS__DECLARE_OP)
#undef PS__DECLARE_OP

/* A CUDA function, for the entry of PS_BACKEND_CUDA; NULL in a build without CUDA. */
#ifdef PS_CUDA
#  define PS_CUDA_FN(op) ps__cuda_##op
#else
#  define PS_CUDA_FN(op) NULL
#endif

/* ---- how an op describes itself -----------------------------------------------------------------
 * ps_kernel.info of every op in this header. A reader asks the kernel and compares no kernels. */

/* Which of a machine's measured rates prices the op; native/plan/cost.c has the rates. */
typedef enum ps__rate {
  PS__RATE_MEMORY = 0,    /* bytes through the memory of the unit that runs it */
  PS__RATE_GEMM,          /* FLOPs, by role and rows; arguments: ps__args_gemm */
  PS__RATE_GEMM_FP8,      /* the same of fp8 operands; arguments: ps__args_gemm_fp8 */
  PS__RATE_GEMM_GROUPED,  /* FLOPs, by role and rows an expert; ps__args_gemm_grouped */
  PS__RATE_ATTENTION_FWD, /* FLOPs, by rows, keys and documents; arguments: ps__args_attention */
  PS__RATE_ATTENTION_BWD,
  PS__RATE_DELTA_FWD, /* elements of states, by value heads; arguments: ps__args_delta */
  PS__RATE_DELTA_BWD,
  /* on host threads; on a GPU all of these are priced as PS__RATE_MEMORY */
  PS__RATE_OPTIMIZER,
  PS__RATE_OPTIMIZER_WEIGHTS, /* an update's parts */
  PS__RATE_OPTIMIZER_STATE,
  PS__RATE_ACCUMULATE, /* host sums, which contend for host memory as sums: from here on */
  PS__RATE_SUMSQ,
  PS__RATE_ACCUMULATE_SUMSQ
} ps__rate;

/* What scratch on a backend depends on besides the arguments; the CPU functions ignore it. */
typedef struct ps__scratch_target {
  bool deterministic;
  uint32_t cudnn_version; /* as cudnnGetVersion() gives it, 0: none */
} ps__scratch_target;

/* What a chunk of a layer's rows decides of an op's arguments. */
typedef struct ps__chunk_shape {
  uint32_t n_tokens, row0; /* row0: the chunk's first row in its attention group */
  bool first_grad;         /* the first that writes a contribution to the unit's gradient */
  bool first_dkv;          /* first chunk of the attention group in backward order */
  uint32_t document_rows;  /* as in ps__args_attention */
  uint32_t step_tokens;    /* of the whole step, on all devices and hosts; 0 outside training */
  bool again;              /* a forward op that runs again: it counts nothing */
} ps__chunk_shape;

typedef struct ps__op_info {
  ps__rate rate;
  /* What computes the op in generation: of the same arguments, with the same pointers first. NULL:
   * the op itself. On the CPU a row of what it writes does not depend on the other rows. */
  const ps_kernel *in_generation;
  /* Such a kernel may keep a cache of the sequences, their keys and values or a state: BYTES of a
   * sequence's. In the place of doc_start it gets the rows' sequences, and after the other pointers
   * their positions and the cache. It gets no operands that pass from a chunk to the next: the
   * cache has them. NULL: it keeps nothing. */
  uint64_t (*cache_bytes)(const void *args);
  /* Experts on demand: what computes the product with the slots of a cache in the place of W
   * (ps__args_grouped_slots). NULL: the op is no product of experts. */
  const ps_kernel *from_slots;
  /* Fill in what the chunk decides; the rest of @args is complete. NULL: the op is in no layer. */
  void (*bind)(void *args, const ps__chunk_shape *chunk);
  /* FLOPs and bytes of a launch, from its arguments alone. Model FLOPs count as in a first pass:
   * the builder of a recomputed op sets them to 0. */
  ps_work (*work)(const void *args);
  /* BYTES of scratch of a launch, by backend: of each worker on the CPU, of the stream on CUDA.
   * Pure, in every build: plans for a GPU are made on any machine. NULL: none. Where a library
   * decides on the GPU, an upper bound: prepare() gives the true figure. */
  size_t (*scratch[PS_N_BACKENDS])(const void *args, const ps__scratch_target *target);
  /* CPU: the function multiplies with OpenBLAS, whose buffers the backend holds for every thread
   * of the stream before the first step. */
  bool blas;
  /* CUDA, before the first step: load, build or choose what launches of @args on @exec need; may
   * take seconds, and is cheap the second time. *@scratch_bytes: the true figure. NULL: nothing to
   * prepare, and scratch() is true. */
  ps_status (*prepare)(const void *args, void *exec, size_t *scratch_bytes);
  /* CUDA, both or neither: tune() times the algorithms for the launch on its operands, which hold
   * realistic values, and keeps the fastest; tuned(): there is nothing left to time. */
  bool (*tuned)(const ps_launch *launch);
  ps_status (*tune)(const ps_launch *launch);
} ps__op_info;

/* What a kernel without a description is taken for: a caller's own, or a trainer's host op. */
static inline ps__rate ps__op_rate(const ps_kernel *k) {
  return k && k->info                             ? k->info->rate
         : k && k->op_class == PS_CLASS_OPTIMIZER ? PS__RATE_OPTIMIZER
                                                  : PS__RATE_MEMORY;
}
static inline size_t ps__op_scratch(const ps_kernel *k, uint32_t backend, const void *args,
                                    const ps__scratch_target *target) {
  return k->info && k->info->scratch[backend] ? k->info->scratch[backend](args, target) : 0;
}

static inline ps_work ps__bytes_work(double bytes) {
  ps_work work;
  work.flops = work.model_flops = 0;
  work.bytes = bytes;
  return work;
}

/* Op @i of PS__OPS; the op called @name; NULL when there is none. For tests and benchmarks. */
const ps_kernel *ps__op_at(uint32_t i);
const ps_kernel *ps__op_by_name(const char *name);

/* ---- the ops --------------------------------------------------------------------------------- */

typedef struct ps__args_fill {
  uint64_t bytes;
} ps__args_fill;
/* fill_zero            ptr: W dst[bytes]
 * copy_bytes           within one place, where no link can copy.  ptr: R src[bytes],
 *                      W dst[bytes] */

/* dequantize           Weights in blocks (core/blocks.h), n a multiple of PS__SPAN_ALIGN:
 *                      w[i] = q[i] * scale of its block, in fp32, rounded once.
 *                      ptr: R blocks, W w[n] dt */
typedef struct ps__args_dequantize {
  uint64_t n;
  uint32_t base, dt; /* ps_base, but for PS_BASE_PLAIN */
} ps__args_dequantize;

/* How a contribution is added to a total, total[i] += g[i]. A bf16 total that gets many additions,
 * each rounded to nearest, would stall: an addition of less than half an ulp of it vanishes. Let
 * f = total + g in fp32, and dither = (37345 (first + i) + 40503 index) mod 2^16.
 *   0          total[i] = f rounded to nearest even.
 *   PS_DITHER  total[i] = the upper 16 bits of (bits of f + dither): unbiased. 40503/2^16 is the
 *              golden ratio, so the dithers of consecutive additions cancel: equal terms leave
 *              about an ulp, however many there are, and others the square root of their number.
 *   PS_LOW_*   The total is an fp32 number cut to 24 bits (16 of significand), the upper 16 in
 *              total[], the next 8 in low[]: bits = (bits of f + dither / 2^8) & ~255.
 *     PS_LOW_READ   low[] is read; without it, low[] counts as 0 (the first addition).
 *     PS_LOW_WRITE  bits are stored in total[] and low[]; without it, they are rounded to bf16 in
 *                   total[] (the last addition).
 * All modes but 0 are for bf16 alone. */
enum { PS_LOW_READ = 1, PS_LOW_WRITE = 2, PS_DITHER = 4 };
enum { PS_DITHER_ELEMENT = 37345, PS_DITHER_INDEX = 40503 };
static inline uint32_t ps__dither(uint64_t element, uint32_t index) {
  return ((uint32_t)element * PS_DITHER_ELEMENT + index * PS_DITHER_INDEX) & 0xffff;
}

typedef struct ps__args_accumulate {
  uint64_t n, first; /* first: of element 0 in its unit, for the dither */
  /* n_threads: at most so many of a host stream's, so that copies get more of the memory; 0:
   * all */
  uint32_t dt, n_threads;
  /* mode: as above; index: 1 for the first addition to the total, and so on */
  uint32_t mode, index;
} ps__args_accumulate;
/* accumulate           as above.  ptr: R g[n] dt, RW total[n] dt, then with PS_LOW_*: R|W|RW low
 *                      u8[n].
 * Runs on the device (class ELEMENTWISE) and, as accumulate_host (class OPTIMIZER), on host
 * streams: same bits. */

typedef struct ps__args_embed {
  uint32_t n_tokens, vocab, dim, dt, accumulate;
  float scale; /* 0 stands for 1. Of dt's precision where transformers rounds it (Gemma) */
  int32_t pad; /* backward: tokens of this id add nothing; -1: no such id */
} ps__args_embed;
static inline float ps__embed_scale(const ps__args_embed *a) {
  return a->scale == 0.0f ? 1.0f : a->scale;
}
/* A row of the table as embed_fwd computes it, for code that gathers rows in another way. */
void ps__embed_row(void *out, const void *row, uint32_t dt, size_t dim, float scale);
/* embed_fwd            out[t,:] = scale table[id[t],:], one rounding.  ptr: R id i32[T], R
 *                      table[V,D], W out[T,D]. An id out of range is PS_EFORMAT. */
/* embed_bwd            dtable[v,:] (+)= scale times the sum over t with id[t]=v, in order of t,
 *                      of dx[t,:] (fp32 sum and product, one rounding when added). The row of pad
 *                      counts as a row without tokens.
 *                      accumulate 0 writes every row (zeros where no token).  ptr: R id[T], R
 *                      dx[T,D], W|RW dtable[V,D]. */
/* embed_bwd_host       The host's embed_bwd: it adds one contribution to the total, with the bits
 *                      of embed_bwd and accumulate on the device. For host streams alone (class
 *                      OPTIMIZER).
 *                      The row of pad counts as a row without tokens.
 *                      Rows with tokens: contribution[v,:] = round(scale times the first chunk's
 *                      sum), then round(contribution + scale times its sum) for each further chunk.
 *                      total[v,:] = contribution (rows.accumulate 0), or as accumulate adds it (1;
 *                      mode and index as there).
 *                      Other rows: zero (0), or not touched (1); where low[] is written but not
 *                      read, the row of low[] becomes zero. These are the same bits, since x + 0 =
 *                      x. One exception: -0, which a sum of embed_bwd is only when it underflows in
 *                      bf16, stays -0.
 *                      Order of tokens: the T tokens (rows.n_tokens) lie chunk by chunk in the
 *                      order of their backward passes: groups of group_tokens, in each a chunk of
 *                      short_tokens (the sequence's last slice), then chunks of chunk_tokens.
 *                      skip_tokens: tokens of whole chunks of the round that came before these.
 *                      ptr: R id[T], R dx[T,D], W|RW total[V,D], then with PS_LOW_*: W|RW low
 *                      u8[V,D]. */
typedef struct ps__args_embed_host {
  ps__args_embed rows;
  uint32_t chunk_tokens, short_tokens, group_tokens, skip_tokens, mode, index;
} ps__args_embed_host;

typedef struct ps__args_rmsnorm {
  uint32_t rows, cols, dt, accumulate_dw, add_dx;
  float eps, weight_offset; /* weight_offset: what is added to w, in fp32 (Gemma: 1) */
  uint32_t has_residual;    /* forward */
} ps__args_rmsnorm;
/* rmsnorm_fwd          y = x * rstd * (w + weight_offset) (+ residual), rstd =
 *                      1/sqrt(mean(x^2)+eps).  ptr: R x[rows,cols], R w[cols], W y[rows,cols],
 *                      then R residual[rows,cols] if has_residual. */
/* rmsnorm_bwd          dy is the gradient of y, and of the residual as it stands. xh = x*rstd; g =
 *                      dy*(w + weight_offset); d = rstd*(g - xh*mean(g*xh)); dx = add_dx ? dx + d
 *                      : d; dw (+)= sum_rows dy*xh.
 *                      ptr: R x, R w, R dy, W|RW dx, W|RW dw[cols] (RW with accumulate_dw). dx
 *                      does not alias dy or x. */

/* gemm                 C[M,N] = (C +) alpha op(A) op(B) (+ bias[N]) (+ residual[M,N]), added in
 *                      this order in fp32, with one rounding. C is a term with accumulate.
 *                      trans_a: A is stored [K,M]; trans_b: B is stored [N,K]. ld* are in elements;
 *                      residual has ldc. Bias and residual are of dt_c.
 *                      ptr: R A, R B, W|RW C (RW with accumulate), then R bias if has_bias, then
 *                      R residual if has_residual. */
typedef struct ps__args_gemm {
  uint32_t m, n, k, lda, ldb, ldc;
  uint8_t trans_a, trans_b, accumulate, has_bias, has_residual, dt_a, dt_b, dt_c;
  float alpha; /* 0 stands for 1 */
} ps__args_gemm;
/* ps__gemm_args() - C[m,n] = op(A) op(B), without gaps between rows. */
ps__args_gemm ps__gemm_args(uint32_t m, uint32_t n, uint32_t k, bool trans_a, bool trans_b,
                            uint32_t dt);
/* gemm_rows            gemm of trans_a 0, trans_b 1, dt_a = dt_b, for generation. On the CPU a row
 *                      of C does not depend on the other rows, nor on their number. On CUDA it is
 *                      gemm.  ptr: as gemm. */
static inline float ps__gemm_alpha(const ps__args_gemm *a) {
  return a->alpha == 0.0f ? 1.0f : a->alpha;
}

/* ---- FP8 ----------------------------------------------------------------------------------------
 * A quantized tensor is an array of PS__E4M3 or PS__E5M2 (core/dtype.h) and its scale: f32[2],
 *   scale[0]  s, a power of two: ps__fp8_scale_bits() of amax
 *   scale[1]  amax, the largest |x| of the whole tensor, by its bits (so NaN is above infinity)
 * The tensor stands for s*q[i], with q[i] = x[i]/s rounded to nearest even and saturated. x is of
 * bf16 or fp32 (dt). What an op computes is first rounded to dt, as where it is stored: so an op
 * that computes and quantizes gives the bits of the op that stores, followed by `quantize`.
 *   - amax is that of exactly what the launch quantizes: one chunk's tensor, one span of weights.
 *     It is a maximum of bits, so it depends on no order.
 *   - Nothing saturates: amax/s is at most the largest number. Only a quantize with a given scale
 *     may saturate.
 *   - Numbers below half of the least are flushed to zero, those of a tensor with an outlier. An op
 *     with count k > 0 adds to flushed[k - 1], u64, the number of elements that are not 0 and whose
 *     q is. Each element counts once, also where both forms are written. A sum of integers depends
 *     on no order.
 *   - An x that is not finite makes s NaN, and with it every product that reads s. The step's loss
 *     or norm is then NaN, which the trainer sees.
 * FORMS. Products take both operands with their summed dimension contiguous (gemm_fp8).
 * PS_FORM_ROWS is [rows,cols], as x is stored. PS_FORM_COLS is its transpose [cols,rows], of the
 * same q and s. An op may write either or both. On CUDA rows and cols are multiples of 16. */
enum { PS_FORM_ROWS = 1, PS_FORM_COLS = 2 };

/* Powers of two by which all scales are too large: 0, but in the build whose FP8 is broken on
 * purpose, which bench/curve.py must find to be worse. */
#ifndef PS_FP8_COARSER
#  define PS_FP8_COARSER 0
#endif

/* Bits of the scale of a tensor of dtype @dt (PS__E4M3, PS__E5M2), from those of its amax: the
 * least power of two s from 2^-126 on with amax/s at most the dtype's largest number (1.75 * 2^8,
 * 1.75 * 2^15); 1 where amax is 0; NaN where it is not finite. x/s and x*(1/s) are then exact but
 * for underflow. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline uint32_t ps__fp8_scale_bits(uint32_t amax_bits, uint32_t dt) {
  if (amax_bits >= 0x7f800000u)
    return 0x7fc00000u;
  if (amax_bits == 0)
    return 0x3f800000u;
  const int32_t e = (int32_t)(amax_bits >> 23) - (dt == PS__E4M3 ? 8 : 15) +
                    ((amax_bits & 0x7fffffu) > 0x600000u) + PS_FP8_COARSER;
  return (uint32_t)(e < 1 ? 1 : e) << 23;
}

/* fp8_scale            The scale alone, as quantize computes it first.  ptr: R x[rows,cols] dt, W
 *                      scale f32[2]. scale[0] is that of headroom * amax, for values that are at
 *                      most so many times larger than those of x; scale[1] is amax.
 *                      rows 0 in a definition: the chunk's tokens.  bytes: x once. */
typedef struct ps__args_fp8_scale {
  uint32_t rows, cols, dt, dt_q;
  float headroom; /* a power of two; 0 stands for 1 */
} ps__args_fp8_scale;
/* quantize             ptr: R x[rows,cols] dt, W scale f32[2] (R with given), then W q[rows,cols]
 *                      if forms has ROWS, then W qt[cols,rows] if it has COLS (both u8, of dt_q),
 *                      then RW flushed u64[] if count.
 *                      given: scale[0] is taken as it is, and x is read once.
 *                      rows 0 in a definition: the chunk's tokens, or the head slice's.
 *                      bytes: x twice (amax, then values), each form once.
 *                      deterministic: elementwise, a maximum, and sums of integers. */
typedef struct ps__args_quantize {
  uint32_t rows, cols, dt, dt_q, forms, given, count;
} ps__args_quantize;

/* rmsnorm_quantize     y of rmsnorm_fwd (without a residual), rounded to norm.dt, quantized to
 *                      dt_q.
 *                      ptr: R x[rows,cols], R w[cols], W scale f32[2], then W q[rows,cols] if
 *                      forms has ROWS, then W qt[cols,rows] if it has COLS, then RW flushed u64[]
 *                      if count.
 *                      bytes: x twice, each form once; y is stored nowhere. */
typedef struct ps__args_rmsnorm_quantize {
  ps__args_rmsnorm norm;
  uint32_t dt_q, forms, count;
} ps__args_rmsnorm_quantize;
/* glu_quantize         s of glu_fwd, rounded to glu.dt, quantized to dt_q.
 *                      ptr: R gu[T,2F], W scale f32[2], then W q[T,F] if forms has ROWS, then W
 *                      qt[F,T] if it has COLS, then RW flushed u64[] if count.
 *                      bytes: gu twice, each form once. */
/* glu_bwd_quantize     What glu_bwd leaves, each rounded to dt and quantized with a scale of its
 *                      own: the gradient of gu to dt_q in both forms, s to PS__E4M3 in the form
 *                      COLS (what dW of down reads). Neither ds nor gu changes. forms says nothing.
 *                      ptr: R ds[T,F], R gu[T,2F], W scale_gu f32[2], W dgu[T,2F] u8, W
 *                      dgut[2F,T] u8, W scale_s f32[2], W st[F,T] u8, then RW flushed u64[] if
 *                      count: flushed[count - 1] counts the gradient, flushed[count] counts s.
 *                      bytes: ds and gu twice, each result once. */
typedef struct ps__args_glu_quantize {
  uint32_t n_tokens, ffn_dim, dt, activation, dt_q, forms, count; /* four as ps__args_glu */
} ps__args_glu_quantize;

/* gemm_fp8             C[M,N] = (C +) alpha sA sB A B^T (+ bias[N]) (+ residual[M,N]), added in
 *                      this order in fp32, with one rounding. A[M,K] and B[N,K] are quantized
 *                      tensors, row-major without gaps (cuBLASLt's TN, the one that compute
 *                      capability 9.0 has for fp8). C, residual [M,N] and bias [N] are of dt_c,
 *                      without gaps.
 *                      role, and what A and B are:
 *                        FORWARD  Y = X W^T    X rows e4m3, W rows e4m3       rows bind M
 *                        DGRAD    dX = dY W    dY rows e5m2, W cols e4m3      rows bind M
 *                        WGRAD    dW = dY^T X  dY cols e5m2, X cols e4m3      rows bind K
 *                      Products of two fp8 numbers are exact in fp32. On CUDA FORWARD sums with
 *                      fast accumulation if fast is set; DGRAD and WGRAD never do. M, N and K are
 *                      multiples of 16 there.
 *                      ptr: R A, R scale_a f32[2], R B, R scale_b f32[2], W|RW C (RW with
 *                      accumulate), then R bias if has_bias, then R residual if has_residual.
 *                      Only scale[0] is read. accumulate and has_residual exclude each other. */
enum { PS_GEMM_FORWARD = 0, PS_GEMM_DGRAD = 1, PS_GEMM_WGRAD = 2 };
typedef struct ps__args_gemm_fp8 {
  uint32_t m, n, k;
  uint8_t role, accumulate, has_bias, has_residual, dt_a, dt_b, dt_c, fast;
  float alpha; /* 0 stands for 1 */
} ps__args_gemm_fp8;
/* The product of the same operands as gemm describes it, but for alpha. */
ps__args_gemm ps__gemm_of_fp8(const ps__args_gemm_fp8 *a);

/* RoPE rotates the first rotary_dim elements of a head, in Hugging Face's layout: element i pairs
 * with i + rotary_dim/2, and its angle is position * inv_freq[i], the product and its range
 * reduction in fp64. Cosine and sine are multiplied by attention_factor (YaRN, longrope; else
 * 1). native/model/rope.h fills the table. */
/* qk_norm: none; over each head, with weights of head_dim elements (Qwen3); over all heads of q
 * together, and over all of k, with weights of A and of K elements (OLMo 2); over each head, but
 * after RoPE (Hunyuan). */
enum { PS_QK_NORM_NONE = 0, PS_QK_NORM_HEAD = 1, PS_QK_NORM_ROW = 2, PS_QK_NORM_LATE = 3 };
/* Elements of the weights of q's and of k's norm. */
#define ps__q_norm_elements(a)                                                                     \
  ((a)->qk_norm == PS_QK_NORM_ROW ? (a)->n_heads * (a)->head_dim : (a)->head_dim)
#define ps__k_norm_elements(a)                                                                     \
  ((a)->qk_norm == PS_QK_NORM_ROW ? (a)->n_kv_heads * (a)->head_dim : (a)->head_dim)
typedef struct ps__args_qkv {
  uint32_t n_tokens, n_heads, n_kv_heads, head_dim, dt, qk_norm, accumulate_dw;
  uint32_t rotary_dim; /* even, at most head_dim and 2 * PS_ROPE_PAIRS; 0: no RoPE */
  float eps, attention_factor;
  float norm_offset;             /* what is added to the norms' weights, in fp32 (Gemma: 1) */
  float inv_freq[PS_ROPE_PAIRS]; /* rotary_dim/2 of them, then zeros */
  uint32_t interleaved;          /* RoPE turns elements 2i and 2i+1, not i and i + rotary_dim/2 */
  /* beta > 0: q is multiplied by 1 + beta ln(1 + pos / original), the quotient rounded down */
  uint32_t position_original;
  float position_beta;
  uint32_t whole_head;  /* RoPE turns i and i + head_dim/2, whatever rotary_dim is (Gemma 4) */
  uint32_t value_norm;  /* v is normed over each head, without weights; with PS_QK_NORM_HEAD */
  uint32_t shared_keys; /* k is v too: qkv is [T,A+K]; with value_norm */
} ps__args_qkv;
/* Whether it is more than what most models have: the norm before RoPE, RoPE of halves. */
#define ps__qkv_is_plain(a)                                                                        \
  ((a)->qk_norm != PS_QK_NORM_LATE && !(a)->interleaved && !((a)->position_beta > 0.0f) &&         \
   !(a)->whole_head && !(a)->value_norm)
/* Pointers of the forward, of the backward pass. */
#define ps__qkv_pointers(a) (((a)->qk_norm ? 6 : 4) - ((a)->n_kv_heads ? 0 : (a)->qk_norm ? 2 : 1))
#define ps__qkv_grad_pointers(a)                                                                   \
  (((a)->qk_norm ? 9 : 4) - ((a)->n_kv_heads ? 0 : (a)->qk_norm ? 3 : 1))
/* Elements of a row of qkv. */
#define ps__qkv_elements(a)                                                                        \
  (((a)->n_heads + ((a)->shared_keys ? 1 : 2) * (a)->n_kv_heads) * (a)->head_dim)
/* qkv_split_fwd        qkv[T,A+2K] -> q[T,A] and kv[T,2K] (row: K heads then V heads), q and k
 *                      after optional RMSNorm (one rounding after norm, then RoPE, one rounding)
 *                      and RoPE at pos[t]. With PS_QK_NORM_LATE RoPE comes first, one rounding
 *                      after each. With value_norm v = round(x rstd) of v's columns or, with
 *                      shared_keys, of k's.
 *                      ptr: R qkv, R pos i32[T], W q, W kv, then with qk_norm R wq, R wk
 *                      (ps__q_norm_elements, ps__k_norm_elements). n_kv_heads 0: q alone, and kv
 *                      and wk are left out. */
/* qkv_split_bwd        dqkv[T,A+2K] from dq[T,A] (dt) and dkv fp32 [T,2K]: inverse RoPE, norm
 *                      backward. With shared_keys k's columns get both gradients, added in fp32.
 *                      ptr: R dq, R dkv f32, R pos, W dqkv, then with qk_norm R qkv (raw), R wq,
 *                      R wk, W|RW dwq, W|RW dwk. n_kv_heads 0: dkv, wk and dwk are left out. */

/* Multi-head latent attention: H heads, dn = nope_dim elements of a key that have no position, dr =
 * rotary_dim elements that RoPE turns, dv = value_dim <= d = dn + dr. Keys share one rotated part.
 * Values are padded with zeros to d, so that attention has one width. */
typedef struct ps__args_mla {
  uint32_t n_tokens, n_heads, nope_dim, rotary_dim, value_dim, dt;
  uint32_t interleaved; /* as ps__args_qkv, as are the factor and the frequencies */
  uint32_t inverse;     /* mla_turn alone */
  float attention_factor;
  float inv_freq[PS_ROPE_PAIRS];
} ps__args_mla;
/* mla_turn             y[t,h] = [x's dn elements | RoPE of its dr, with inverse turned back]; one
 *                      rounding.  ptr: R x[T,H d], R pos i32[T], W y[T,H d].
 * mla_kv_fwd           k[t,h] = [kvb's dn elements | RoPE of kr[t]], v[t,h] = [kvb's dv elements |
 *                      zeros]; one rounding.
 *                      ptr: R kvb[T,H (dn+dv)], R kr[T,dr], R pos i32[T], W kv[T,2 H d] (row: H
 *                      keys, then H values).
 * mla_kv_bwd           dkr[t] is the sum over the heads, in order, turned back.
 *                      ptr: R dkv f32[T,2 H d], R pos i32[T], W dkvb[T,H (dn+dv)], W dkr[T,dr].
 * mla_cut              y[t,h] = the first dv elements of o[t,h].  ptr: R o[T,H d], W y[T,H dv].
 * mla_pad              its backward pass, with zeros.  ptr: R dy[T,H dv], W d_o[T,H d]. */
/* A block's output times a number that is not trained (Gemma 4's layer_scalar). */
typedef struct ps__args_layer_scale {
  uint32_t rows, cols, dt, accumulate_ds;
} ps__args_layer_scale;
/* layer_scale_fwd      x[rows,cols] = x * s[1], in place.   ptr: RW x, R s */
/* layer_scale_bwd      dx = dx * s, in place; ds = 0.   ptr: RW dx, R s, W|RW ds */

/* Attention over the rows of an attention group (a long sequence, or the sequences packed in a
 * chunk). Query row i of this chunk is group row row0+i. It sees keys doc_start[i] .. row0+i
 * (inclusive), where doc_start[i] is the group row at which its document begins; with a window at
 * most the last `window` of them, its own included. s = scale * q k, with a soft cap softcap *
 * tanh(s / softcap), and then the softmax. Tiles with an online softmax: no (T,T) tensor exists. */
typedef struct ps__args_attention {
  uint32_t n_tokens; /* query rows of this chunk */
  uint32_t row0;     /* group row of the first of them; keys: group rows [0, row0 + n_tokens) */
  uint32_t n_heads, n_kv_heads, head_dim, dt, accumulate_dkv;
  /* d > 0: the caller knows that every document has d rows: doc_start[i] = (row0+i)/d*d. Either
   * d >= row0+n_tokens, or row0 is 0 and n_tokens a multiple of d; other values say nothing, as
   * 0 does, which is always right. Some backends are faster by it */
  uint32_t document_rows;
  /* rows of a sequence, by which FLOPs are counted whatever documents it has; 0, or as many as
   * n_tokens or more: the chunk is one sequence, or a slice of one */
  uint32_t sequence_rows;
  uint32_t window;      /* keys; 0: no window */
  float scale, softcap; /* scale 0: 1/sqrt(head_dim); softcap 0: none */
  /* elements of a value before padding, by which model FLOPs are counted; 0: head_dim */
  uint32_t value_dim;
} ps__args_attention;
static inline float ps__attention_scale(const ps__args_attention *a) {
  return a->scale != 0.0f ? a->scale : (float)(1.0 / sqrt((double)a->head_dim));
}
/* What document_rows says: documents of n_tokens / n rows each that the rows of the chunk are in
 * (with n > 1, row0 is 0); 0: doc_start alone says it. */
static inline uint32_t ps__attention_documents(const ps__args_attention *a) {
  const uint32_t d = a->document_rows;
  if (d >= (uint64_t)a->row0 + a->n_tokens)
    return 1;
  return !d || a->row0 || a->n_tokens % d ? 0 : a->n_tokens / d;
}
/* attention_fwd        ptr: R q[T,A], R kv[row0+T,2K], R doc_start i32[T], W o[T,A], W lse
 *                      f32[T,n_heads]. */
/* attention_bwd        All rows of dkv are written (accumulate_dkv 0) or added to (1), in an order
 *                      that does not depend on threads.
 *                      ptr: R q, R kv, R doc_start, R o, R lse, R d_o[T,A], W dq[T,A], W|RW dkv
 *                      f32[row0+T,2K]. */

/* attention_cached     Attention of T rows of several sequences against each one's keys and values
 *                      so far, which the cache holds: sequence_rows rows a sequence. Row t is
 *                      position pos[t] of sequence sequence[t]: cache[sequence, pos] = kv[t], for
 *                      all rows first. Then it sees the keys up to its own, with a window at most
 *                      the last `window` of them. pos -1: no row; o and lse become 0. No two rows
 *                      have the same place. row0, document_rows and accumulate_dkv say nothing.
 *                      ptr: R q[T,A], R kv[T,2K], R sequence i32[T], W o[T,A], W lse
 *                      f32[T,n_heads], R pos i32[T], RW cache[sequences,sequence_rows,2K]. */
enum { PS_CACHED_GROUP = 64 }; /* most heads that share a kv head */

/* attention_sink       A sink is one more key of every row, with the logit sink[h] and a value of 0
 *                      (gpt-oss). What attention over the other keys wrote is corrected in place,
 *                      whatever computed it:
 *                        o[t,h,:] *= 1 / (1 + exp(sink[h] - lse[t,h]))
 *                        lse[t,h]  = log(exp(lse[t,h]) + exp(sink[h]))
 *                      attention_bwd needs no more: of the corrected lse and o it computes the
 *                      probabilities with the sink, and its D_t = sum d_o o is that of all keys.
 *                      ptr: RW o[T,A], RW lse f32[T,n_heads], R sink[n_heads].
 * attention_sink_bwd   dsink[h] (+)= - sum_t exp(sink[h] - lse[t,h]) sum d_o[t,h,:] o[t,h,:],
 *                      of the corrected o and lse.
 *                      ptr: R o, R lse, R d_o[T,A], R sink, W|RW dsink[n_heads]. */
typedef struct ps__args_sink {
  uint32_t n_tokens, n_heads, head_dim, dt;
  uint32_t accumulate; /* attention_sink_bwd alone */
} ps__args_sink;

/* activation: ps_activation. SwiGLU has silu, GeGLU gelu in torch's approximate="tanh" (Gemma). */
typedef struct ps__args_glu {
  uint32_t n_tokens, ffn_dim, dt, activation;
} ps__args_glu;
/* glu_fwd              s = act(g)*u, gu[T,2F]: g = gu[:, :F], u = gu[:, F:].  ptr: R gu[T,2F],
 *                      W s[T,F]. */
/* glu_bwd              ptr: RW ds[T,F], RW gu[T,2F]: gu is replaced by its gradient, and then ds
 *                      by s. */

/* ---- experts: ops_experts.h ------------------------------------------------------------------ */

#include "kernels/ops_experts.h"

/* ---- the gated delta rule -----------------------------------------------------------------------
 * Linear attention with a state for each value head (Yang et al. 2024, arXiv 2412.06464), as
 * Qwen3-Next and Qwen3.5 have it. Rows are those of an attention group, cut into chunks: row0 is
 * the group row of the chunk's first, and doc_start[t] the group row with which the document of row
 * t begins. Nothing passes from one document to the next. What passes from one chunk to the next is
 * an operand: `before` is what the chunk before it left in `after`, and is not read where row0 is
 * 0; in the backward pass, from the last chunk to the first, `carry` is the gradient of `after`,
 * not read where accumulate_carry is 0, and becomes the gradient of `before`.
 *   - nk key heads of dk, nv value heads of dv, nv a multiple of nk: value head h has the keys and
 *     queries of key head h / (nv / nk). C = 2 nk dk + nv dv channels: q, k and v, heads in order.
 *   - dk, dv <= PS_MAX_DELTA_DIM, nv / nk <= PS_MAX_DELTA_SHARE, W = 2 .. PS_MAX_CONV. */
enum { PS_MAX_DELTA_DIM = 256, PS_MAX_DELTA_SHARE = 64, PS_MAX_CONV = 8 };

typedef struct ps__args_conv {
  uint32_t n_tokens, row0, channels, width, dt;
  uint32_t accumulate_dw, accumulate_carry; /* conv_bwd alone */
} ps__args_conv;
/* conv_fwd             Causal convolution of each channel over the rows, then SiLU:
 *                        p[t,c] = sum_j w[c,j] x[t-(W-1)+j,c], rows before doc_start[t] count as 0
 *                        y[t,c] = silu(p[t,c])
 *                      before, after: the W-1 rows of x before and up to the chunk's end.
 *                      ptr: R x[T,C], R w[C,W], R doc_start i32[T], R before[W-1,C], W y[T,C], W
 *                      after[W-1,C].
 * conv_bwd             ptr: R x, R w, R doc_start, R before, R dy[T,C], W|RW carry f32[W-1,C], W
 *                      dx[T,C], W|RW dw[C,W].
 * conv_cached          conv_fwd of T rows of several sequences, with the rows before them in the
 *                      cache. Row t is position pos[t] of sequence sequence[t]; rows before
 *                      position 0 count as 0. A sequence's rows stand one after the other, in order
 *                      of position; they then enter its cache at the end, and as many leave it at
 *                      the start. pos -1: no row; y becomes 0. row0 says nothing.
 *                      ptr: R x, R w, R sequence i32[T], W y[T,C], R pos i32[T], RW
 *                      cache[sequences,W-1,C]. */

typedef struct ps__args_delta {
  uint32_t n_tokens, row0, n_key_heads, n_value_heads, key_dim, value_dim, dt;
  uint32_t accumulate_dw, accumulate_carry; /* delta_bwd alone */
} ps__args_delta;
/* delta_fwd            For each value head, with a state S[dk,dv] that is 0 at a document's start:
 *                        q = x_q / sqrt(sum x_q^2 + 1e-6) / sqrt(dk), k = x_k / sqrt(sum x_k^2 +
 *                        1e-6), beta = sigmoid(b), g = -exp(a_log) softplus(a + dt_bias)
 *                        S <- e^g S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q
 *                      qkv[T,C] has x_q, x_k and v; ba[T,2nv] has b of all heads, then a.
 *                      before, after: f32[nv,dk,dv], the states.
 *                      ptr: R qkv[T,C], R ba[T,2nv], R a_log[nv], R dt_bias[nv], R doc_start
 *                      i32[T], R before, W o[T,nv dv], W after.
 * delta_bwd            ptr: R qkv, R ba, R a_log, R dt_bias, R doc_start, R before, R d_o[T,nv dv],
 *                      W|RW carry f32[nv,dk,dv], W dqkv[T,C], W dba[T,2nv], W|RW da_log[nv], W|RW
 *                      ddt_bias[nv].
 * delta_cached         delta_fwd of T rows of several sequences, whose states the cache holds. Rows
 *                      are as in conv_cached; a sequence's state is 0 at position 0.
 *                      ptr: R qkv, R ba, R a_log, R dt_bias, R sequence i32[T], W o[T,nv dv], R pos
 *                      i32[T], RW cache f32[sequences,nv,dk,dv]. */

typedef struct ps__args_gated_norm {
  uint32_t n_tokens, n_heads, head_dim, dt, accumulate_dw;
  float eps;
} ps__args_gated_norm;
/* gated_norm_fwd       y = w x rstd silu(z) over each head of d = head_dim, rstd = 1/sqrt(mean(x^2)
 *                      + eps); w is shared by the heads. n = n_heads d.
 *                      ptr: R x[T,n], R z[T,n], R w[d], W y[T,n].
 * gated_norm_bwd       ptr: R x, R z, R w, R dy, W dx[T,n], W dz[T,n], W|RW dw[d]. */

/* Rows of projections whose columns are grouped by head: n_groups groups of up to PS_HEAD_PARTS
 * parts, of width[] columns (0: no such part), then `tail` columns of no group. The first n_first
 * parts go to one tensor, part by part and in each the groups in order, with the tail after them;
 * the others go to a second tensor, alike.
 * heads_split          ptr: R all[T,N], W first[T,N1], then W second[T,N-N1] unless N1 = N.
 * heads_join           The inverse. ptr: R first[T,N1], then R second unless N1 = N, W all. */
enum { PS_HEAD_PARTS = 4 };
typedef struct ps__args_heads {
  uint32_t n_tokens, n_groups, width[PS_HEAD_PARTS], n_first, tail, dt;
} ps__args_heads;
/* Columns of parts [first, end) of all groups. */
static inline uint64_t ps__heads_columns(const ps__args_heads *a, uint32_t first, uint32_t end) {
  uint64_t n = 0;
  for (uint32_t p = first; p < end; p++)
    n += (uint64_t)a->n_groups * a->width[p];
  return n;
}

/* sigmoid_gate_fwd     y[t,c] = x[t,c] sigmoid(g[t, c / (n / m)]) (+ residual[t,c]); n = cols, a
 *                      multiple of m = n_gates: a gate is of n / m columns.
 *                      ptr: R x[T,n], R g[T,m], W y[T,n], then R residual[T,n] if has_residual.
 * sigmoid_gate_bwd     ptr: R x, R g, R dy[T,n], W dx[T,n], W dg[T,m]. */
typedef struct ps__args_sigmoid_gate {
  uint32_t n_tokens, cols, n_gates, dt, has_residual;
} ps__args_sigmoid_gate;

typedef struct ps__args_colsum {
  uint32_t rows, cols, ld, dt, accumulate;
} ps__args_colsum;
/* colsum               db[c] (+)= sum_r dy[r,c].  ptr: R dy[rows, ld], W|RW db[cols] (dt). Bias
 *                      gradients. */

typedef struct ps__args_cross_entropy {
  uint32_t rows, vocab, dt;
  float softcap;                 /* 0: none */
  float z_loss, label_smoothing; /* coefficients; 0: none */
} ps__args_cross_entropy;
/* Columns of the loss: 1, with z-loss or label smoothing 3. */
static inline uint32_t ps__loss_columns(float z_loss, float label_smoothing) {
  return z_loss > 0 || label_smoothing > 0 ? 3 : 1;
}
/* cross_entropy        loss[r] = logsumexp(y[r]) - y[r,target]; y = z, or softcap * tanh(z /
 *                      softcap); z becomes dz = (softmax(y) - onehot)*inv_valid, with a cap times
 *                      1 - (y / softcap)^2. A z of -inf stays -inf. target -1: loss 0, dz 0.
 *                      inv_valid = *scale (f32, device memory).
 *                      z-loss (PaLM, arXiv 2204.02311, 5.1), label smoothing (arXiv 1512.00567, 7;
 *                      torch.nn.CrossEntropyLoss): with e = label_smoothing, l = logsumexp(y[r])
 *                      the gradient is that of
 *                        (1 - e)*loss[r] + e*(l - mean(y[r])) + z_loss*l^2
 *                      and dz = ((1 + 2*z_loss*l)*softmax(y) - (1 - e)*onehot - e/V)*inv_valid,
 *                      with a cap times 1 - (y / softcap)^2. The columns of a row's loss are then
 *                      loss[r], l^2 and l - mean(y[r]).
 *                      ptr: RW z[rows,V] dt, R target i32[rows], R scale f32[1], W loss
 *                      f32[rows, ps__loss_columns()]. */

typedef struct ps__args_score_loss {
  uint32_t rows, cols, dt, problem; /* problem: ps_problem, no language model's */
} ps__args_score_loss;
/* score_loss           Loss of the scores z[r,:] of the rows that a target marks, for a problem of
 *                      ps_problem (penstock/model.h), which says what targets are; dz is the
 *                      gradient times inv_valid = *scale. p = sigmoid(z):
 *                        SINGLE_LABEL  logsumexp(z[r]) - z[r,t];   dz = softmax(z[r]) - onehot
 *                        MULTI_LABEL   mean_v of -y log p - (1 - y) log(1 - p), y = bit v of t;
 *                                      dz = (p - y) / cols
 *                        REGRESSION    (z[r] - t)^2;               dz = 2 (z[r] - t)
 *                        PAIRS         t > 0: -log sigmoid(m), m = z[r - t] - z[r];
 *                                      dz = sigmoid(-m)
 *                                      t < -1, which is -1 - d: loss 0, and with the rejected row
 *                                      r + d in place of r: dz = -sigmoid(-m)
 *                      Rows with target -1: loss 0, dz 0. Column 1 of a row's loss is what of it
 *                      is right: 1 where the label has the largest score (the first of equal
 *                      ones), the part of the labels on whose side of 0 the score is, |z - t|,
 *                      1 where m > 0. fp64 inside.
 *                      EMBEDDING: the loss is 0, and there is no dz.
 *                      ptr: R z[rows,cols] dt, R target i32[rows], R scale f32[1], W loss
 *                      f32[rows,2], W dz[rows,cols] dt. */

/* n_threads: as accumulate's */
typedef struct ps__args_sumsq {
  uint64_t n;
  uint32_t dt, n_threads;
} ps__args_sumsq;
/* sumsq                Sum of squares in fp64, in one order:
 *                      1. g is cut into tiles of ps__sumsq_tile(n) elements. A tile has 1024 lanes;
 *                         lane j adds the squares of the tile's elements j, j+1024, ... in order.
 *                      2. The lanes are added as a binary tree: j += j+512, then j+256, ...
 *                      3. The tiles' sums are added in order.
 *                      Products are exact, so FMA does not change it. There are at most 256 tiles,
 *                      so that a device works on all of them and a chain is n/2^18 additions long.
 *                      ptr: R g[n], W out f64[1]. sumsq_host is the same on host streams (class
 *                      OPTIMIZER).
 * accumulate_sumsq_host  accumulate_host, then sumsq_host of the total, in one pass and with
 * their bits; args: ps__args_accumulate without PS_LOW_WRITE.
 *                      ptr: R g[n], RW total[n], W out f64[1], then with PS_LOW_READ: R low u8[n].
 * round_sumsq_host     a total with low bytes rounded to bf16, then sumsq_host of it; args:
 *                      ps__args_accumulate, mode PS_LOW_READ.
 *                      ptr: RW total[n], W out f64[1], R low u8[n]. */
enum { PS_SQ_LANES = 1024, PS_SQ_TILES = 256 };
static inline uint64_t ps__sumsq_tile(uint64_t n) {
  const uint64_t each = (n + PS_SQ_TILES - 1) / PS_SQ_TILES,
                 whole = (each + PS_SQ_LANES - 1) / PS_SQ_LANES * PS_SQ_LANES;
  return whole < 65536 ? 65536 : whole;
}

#ifdef __cplusplus
}
#endif
#endif
