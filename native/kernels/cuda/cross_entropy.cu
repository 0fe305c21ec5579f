/* cross_entropy.cu - loss and gradient of the logits, in place. */
#include "kernels/cuda/cuda_common.cuh"

/* BATCH vectors a thread, and the next as many in flight */
enum { THREADS = 1024, WARPS = THREADS / 32, BATCH = 2 };

__device__ __forceinline__ float exp2_of(float x) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x));
  return e;
}

/* Exponentials of differences: term(v, scaled(m)) is exp(v - m), ratio(m, to) exp(m - to). bf16
 * gradients keep 8 bits: exp(v - m) is 2^(v * log2 e - m * log2 e) with one rounding inside, |v
 * - m| 2^-23 of the term, and ex2.approx, 2^-22; that m * log2 e is itself rounded is one factor
 * for all terms of a row, the largest of which is not quite 1. fp32 takes expf. */
template <typename T> struct exps;
template <> struct exps<__nv_bfloat16> {
  static __device__ __forceinline__ float scaled(float m) { return m * 1.4426950408889634f; }
  static __device__ __forceinline__ float term(float v, float top) {
    return exp2_of(fmaf(v, 1.4426950408889634f, -top));
  }
  static __device__ __forceinline__ float ratio(float m, float to) {
    return exp2_of(scaled(m) - scaled(to));
  }
};
template <> struct exps<float> {
  static __device__ __forceinline__ float scaled(float m) { return m; }
  static __device__ __forceinline__ float term(float v, float top) { return expf(v - top); }
  static __device__ __forceinline__ float ratio(float m, float to) { return expf(m - to); }
};

/* (max, sum of terms) of two parts; a part that is empty or all -inf has max -inf and sum 0. */
template <typename T>
__device__ __forceinline__ void merge(float &m, float &s, float m2, float s2) {
  const float top = fmaxf(m, m2);
  s = (m == top ? s : s * exps<T>::ratio(m, top)) + (m2 == top ? s2 : s2 * exps<T>::ratio(m2, top));
  m = top;
}
template <typename T> __device__ __forceinline__ void merge_block(float &m, float &s) {
  __shared__ float shared_m[WARPS], shared_s[WARPS];
#pragma unroll
  for (int w = 16; w > 0; w /= 2)
    merge<T>(m, s, __shfl_xor_sync(0xffffffffu, m, w), __shfl_xor_sync(0xffffffffu, s, w));
  if (threadIdx.x % 32 == 0) {
    shared_m[threadIdx.x / 32] = m;
    shared_s[threadIdx.x / 32] = s;
  }
  __syncthreads();
  m = shared_m[threadIdx.x % WARPS];
  s = shared_s[threadIdx.x % WARPS];
#pragma unroll
  for (int w = WARPS / 2; w > 0; w /= 2)
    merge<T>(m, s, __shfl_xor_sync(0xffffffffu, m, w), __shfl_xor_sync(0xffffffffu, s, w));
}

/* The block's sum, in every thread, by a fixed tree. */
__device__ __forceinline__ float sum_block(float x) {
  __shared__ float part[WARPS];
#pragma unroll
  for (int w = 16; w > 0; w /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, w);
  if (threadIdx.x % 32 == 0)
    part[threadIdx.x / 32] = x;
  __syncthreads();
  x = part[threadIdx.x % WARPS];
#pragma unroll
  for (int w = WARPS / 2; w > 0; w /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, w);
  return x;
}

/* V elements as 32-bit words, so that in registers two bf16 share one. */
template <typename T, int V> struct words {
  uint32_t w[V == 1 ? 1 : 4];
};
template <typename T, int V>
__device__ __forceinline__ void unpack(float (&x)[V], const words<T, V> &from) {
#pragma unroll
  for (int k = 0; k < V; k++) {
    if constexpr (sizeof(T) == 4)
      x[k] = __uint_as_float(from.w[k]);
    else
      x[k] = __uint_as_float(k % 2 ? from.w[k / 2] & 0xffff0000u : from.w[k / 2] << 16);
  }
}

/* A soft cap on logits: tanh(z / cap), and cap times that. -inf, which stands after the end of a
 * row, stays -inf. */
__device__ __forceinline__ float tanh_of(float z, float cap) {
  return z == -INFINITY ? z : tanhf(z / cap);
}
__device__ __forceinline__ float capped(float z, float cap) {
  return z == -INFINITY ? z : cap * tanhf(z / cap);
}

/* Batch b of a row as a thread has it; -inf after the row's end. */
template <typename T, int V, bool CAP> struct batch {
  words<T, V> v[BATCH];
  static __device__ __forceinline__ uint32_t at(uint32_t b, int u) {
    return ((b * BATCH + u) * THREADS + threadIdx.x) * V;
  }
  __device__ __forceinline__ void load(const T *z, uint32_t b, uint32_t vocab) {
    constexpr uint32_t nothing = sizeof(T) == 4 ? 0xff800000u : 0xff80ff80u;
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      uint4 in = {nothing, nothing, nothing, nothing};
      if (at(b, u) < vocab) {
        if constexpr (V > 1)
          in = *(const uint4 *)(z + at(b, u));
        else if constexpr (sizeof(T) == 4)
          in.x = *(const uint32_t *)(z + at(b, u));
        else
          in.x = *(const uint16_t *)(z + at(b, u));
      }
      v[u].w[0] = in.x;
      if constexpr (V > 1)
        v[u].w[1] = in.y, v[u].w[2] = in.z, v[u].w[3] = in.w;
    }
  }
  __device__ __forceinline__ void add(float &m, float &s, float cap) const {
    float x[V], top = -INFINITY, sum[V] = {};
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      unpack<T, V>(x, v[u]);
#pragma unroll
      for (int k = 0; k < V; k++)
        top = fmaxf(top, x[k]);
    }
    if (CAP) /* which keeps the order of logits */
      top = capped(top, cap);
    top = fmaxf(m, top);
    s = m == top ? s : s * exps<T>::ratio(m, top);
    m = top;
    const float from = top == -INFINITY ? 0.0f : exps<T>::scaled(top); /* all -inf: terms of 0 */
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      unpack<T, V>(x, v[u]);
#pragma unroll
      for (int k = 0; k < V; k++)
        sum[k] += exps<T>::term(CAP ? capped(x[k], cap) : x[k], from);
    }
#pragma unroll
    for (int k = 1; k < V; k++)
      sum[0] += sum[k];
    s += sum[0];
  }
  /* Adds the logits of batch b to @total. */
  __device__ __forceinline__ void add_logits(float &total, uint32_t b, uint32_t vocab,
                                             float cap) const {
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      float x[V];
      if (at(b, u) >= vocab)
        break;
      unpack<T, V>(x, v[u]);
#pragma unroll
      for (int k = 0; k < V; k++)
        total += CAP ? capped(x[k], cap) : x[k];
    }
  }
  /* The gradient: terms times @inv less @less, which is 0 unless MORE. */
  template <bool MORE>
  __device__ __forceinline__ void store(T *z, uint32_t b, uint32_t vocab, float top, float inv,
                                        float less, float cap) const {
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      float x[V];
      const uint32_t i = at(b, u);
      if (i >= vocab)
        break;
      unpack<T, V>(x, v[u]);
#pragma unroll
      for (int k = 0; k < V; k++) {
        if (CAP) {
          const float t = tanh_of(x[k], cap), slope = t == -INFINITY ? 0.0f : 1.0f - t * t;
          if (MORE)
            x[k] = (exps<T>::term(cap * t, top) * inv - less) * slope;
          else
            x[k] = exps<T>::term(cap * t, top) * inv * slope;
        } else {
          x[k] = exps<T>::term(x[k], top) * inv;
          if (MORE)
            x[k] -= less;
        }
      }
      ps_store<T, V>(z + i, x);
    }
  }
};

/* A block a row. The first pass computes the maximum and the sum, which is rescaled whenever the
 * maximum grows. The second pass computes the gradient from the end of the row backwards: the last
 * batch is still in registers, and most of the rest in L2 (132 rows of 256 KB are 34 MB). The next
 * batch is in flight while one is worked on. */
template <typename T, int V, bool CAP, bool MORE>
__global__ void __launch_bounds__(THREADS, 1)
    cross_entropy_k(T *logits, const int32_t *target, const float *scale, float *losses,
                    uint32_t vocab, float cap, float z_loss, float smoothing) {
  T *z = logits + (size_t)blockIdx.x * vocab;
  float *loss = losses + (size_t)blockIdx.x * (MORE ? 3 : 1);
  const int32_t t = target[blockIdx.x];
  if (t < 0 || (uint32_t)t >= vocab) {
    const float zero[V] = {};
    for (uint32_t i = threadIdx.x * V; i < vocab; i += THREADS * V)
      ps_store<T, V>(z + i, zero);
    if (threadIdx.x < (MORE ? 3 : 1))
      loss[threadIdx.x] = t == -1 ? 0.0f : __int_as_float(0x7fc00000);
    return;
  }
  const float raw = ps_to_f32(z[t]), zt = CAP ? capped(raw, cap) : raw;
  const uint32_t n = (vocab + THREADS * V * BATCH - 1) / (THREADS * V * BATCH);
  batch<T, V, CAP> now, next;
  float m = -INFINITY, s = 0.0f, total = 0.0f;
  now.load(z, 0, vocab);
  for (uint32_t b = 0;; b++) {
    if (b + 1 < n)
      next.load(z, b + 1, vocab);
    now.add(m, s, cap);
    if (MORE)
      now.add_logits(total, b, vocab, cap);
    if (b + 1 == n)
      break;
    now = next;
  }
  merge_block<T>(m, s);
  const float top = exps<T>::scaled(m);
  float inv = *scale / s, less = 0.0f, pull = 0.0f;
  if (MORE) {
    const double lse = log((double)s / (double)exps<T>::term(m, top)) + (double)m;
    total = sum_block(total);
    pull = (float)(2.0 * (double)z_loss * lse);
    less = (float)((double)smoothing / (double)vocab * (double)*scale);
    if (threadIdx.x == 0) {
      loss[1] = (float)(lse * lse);
      loss[2] = (float)(lse - (double)total / (double)vocab);
    }
  }
  if (threadIdx.x == 0)
    loss[0] = (float)(log((double)s / (double)exps<T>::term(m, top)) + ((double)m - (double)zt));
  const float inv_one = inv;
  inv += MORE ? inv * pull : 0.0f;
  for (uint32_t b = n; b-- > 0;) {
    if (b > 0)
      next.load(z, b - 1, vocab);
    now.template store<MORE>(z, b, vocab, top, inv, less, cap);
    now = next;
  }
  /* At the target (term - s) * inv, by the thread that has just stored there: nothing cancels
   * but what the sum has. */
  if (threadIdx.x == t / V % THREADS) {
    const float slope = CAP ? 1.0f - tanh_of(raw, cap) * tanh_of(raw, cap) : 1.0f;
    const float e = exps<T>::term(zt, top);
    if (MORE)
      z[t] = ps_from_f32<T>(((e - s) * inv_one + pull * e * inv_one + (smoothing * *scale - less)) *
                            slope);
    else
      z[t] = ps_from_f32<T>((e - s) * inv_one * slope);
  }
}

/* cross_entropy
 * math    y = z, or softcap * tanh(z / softcap); loss[r] = log(sum_v exp(y[r,v] - max)) + max -
 *         y[r,t];
 *         z[r,v] becomes (softmax(y[r])[v] - [v = t]) * scale, with a soft cap that times
 *         1 - (y[r,v] / softcap)^2. A z of -inf stays -inf. target -1: loss 0, gradient 0; any
 *         other target out of range: loss NaN, gradient 0. fp32 inside, the loss put together in
 *         fp64. z-loss and label smoothing: ops.h.
 * shapes  z [rows,V] of dt, in place; target i32 [rows]; scale f32 [1] = 1 / valid tokens of the
 *         step; loss f32 [rows], with z-loss or label smoothing [rows,3]
 * bytes   2*rows*V*sizeof(dt) of HBM where the second read is from L2, else 3*rows*V*sizeof(dt);
 *         2048 x 128256 bf16 -> 1.05 GB, 219 us at 4.8 TB/s. Two exponentials an element, 16 a
 *         clock and SM, take 140 us.
 * time    H200, with the share of copy bandwidth: 2048 rows 344 us, 72%; 512 rows 89 us, 69%.
 *         Logits that a product has just left in L2: 128 rows 16.7 us, 92%; 64 rows, half the SMs,
 *         15.1 us, 51%.
 * determinism  bitwise: one block has a row; a thread's elements in order, then fixed trees
 * reference    the cpu backend's: loss within 4e-6 of 1 + |loss|; gradient 1 ulp of bf16, fp32
 *              within 4e-6 of scale */
extern "C" ps_status ps__cuda_cross_entropy(const ps_launch *l) {
  const ps__args_cross_entropy *a = (const ps__args_cross_entropy *)l->args;
  const ps_status st = ps_check(l, "cross_entropy", 4, a->dt, 0);
  if (st != PS_OK || !a->rows || !a->vocab)
    return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  const bool whole = ps_whole(a->dt, a->vocab) && ps_aligned(l->ptr[0]);
  const bool more = ps__loss_columns(a->z_loss, a->label_smoothing) > 1;
  PS_DISPATCH(a->dt, whole,
              const auto kernel = more ? (a->softcap > 0.0f ? cross_entropy_k<T, V, true, true>
                                                            : cross_entropy_k<T, V, false, true>)
                                  : a->softcap > 0.0f ? cross_entropy_k<T, V, true, false>
                                                      : cross_entropy_k<T, V, false, false>;
              kernel<<<a->rows, THREADS, 0, stream>>>(
                  (T *)l->ptr[0], (const int32_t *)l->ptr[1], (const float *)l->ptr[2],
                  (float *)l->ptr[3], a->vocab, a->softcap, a->z_loss, a->label_smoothing));
  return ps_launched("cross_entropy", cudaSuccess);
}
