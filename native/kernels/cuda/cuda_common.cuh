/* cuda_common.cuh - what the CUDA kernels share: vectors of 16 bytes, sums over a block, row
 * groups, launch checks.
 *
 * Determinism: no floating-point atomics; how work is cut depends on shapes only (never on the
 * device), every sum has a fixed order. */
#ifndef PS_KERNELS_CUDA_COMMON_CUH
#define PS_KERNELS_CUDA_COMMON_CUH
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/scratch.h"
#include <cuda_bf16.h>
#include <cuda_runtime.h>

extern "C" ps_status ps__fail(ps_status code, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

static inline cudaStream_t ps_stream_of(const ps_launch *l) {
  return ((const ps__cuda_exec *)l->exec)->stream;
}

/* ---- 16 bytes at a time ---------------------------------------------------------------------- */

/* V elements of T as they lie in memory: 16 bytes (V = 8 bf16, 4 fp32) or one element (V = 1)
 * where a row is no multiple. */
template <typename T, int V> struct alignas(sizeof(T) * V) ps_vec {
  T e[V];
};
template <typename T> constexpr int ps_full = 16 / (int)sizeof(T);

__device__ __forceinline__ float ps_to_f32(float x) { return x; }
__device__ __forceinline__ float ps_to_f32(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T> __device__ __forceinline__ T ps_from_f32(float x);
template <> __device__ __forceinline__ float ps_from_f32<float>(float x) { return x; }
template <> __device__ __forceinline__ __nv_bfloat16 ps_from_f32<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

/* One load or store instruction of sizeof(T)*V bytes; p is aligned to them. */
template <typename T, int V> __device__ __forceinline__ ps_vec<T, V> ps_load(const T *p) {
  if constexpr (sizeof(T) * V == 16) {
    union {
      uint4 u;
      ps_vec<T, V> v;
    } c;
    static_assert(sizeof c == 16, "16 bytes");
    c.u = *(const uint4 *)p;
    return c.v;
  } else {
    return *(const ps_vec<T, V> *)p;
  }
}
/* One store instruction, to device memory: an assignment the compiler may take apart into words. */
template <typename T, int V> __device__ __forceinline__ void ps_put(T *p, const ps_vec<T, V> &v) {
  if constexpr (sizeof v == 16) {
    union {
      ps_vec<T, V> v;
      uint4 u;
    } c = {v};
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(c.u.x), "r"(c.u.y),
                 "r"(c.u.z), "r"(c.u.w)
                 : "memory");
  } else if constexpr (sizeof v == 8) {
    union {
      ps_vec<T, V> v;
      uint2 u;
    } c = {v};
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(c.u.x), "r"(c.u.y) : "memory");
  } else {
    *(ps_vec<T, V> *)p = v;
  }
}
template <typename T, int V> __device__ __forceinline__ void ps_store(T *p, const float (&x)[V]) {
  if constexpr (sizeof(T) == 2 && V > 1) { /* two a conversion */
    ps_vec<__nv_bfloat162, V / 2> v;
#pragma unroll
    for (int i = 0; i < V / 2; i++)
      v.e[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    ps_put<__nv_bfloat162, V / 2>((__nv_bfloat162 *)p, v);
  } else {
    ps_vec<T, V> v;
#pragma unroll
    for (int i = 0; i < V; i++)
      v.e[i] = ps_from_f32<T>(x[i]);
    ps_put<T, V>(p, v);
  }
}
/* Store V fp32 numbers. Where V is a multiple of 4, @p is aligned to 16 bytes. */
template <int V> __device__ __forceinline__ void ps_put_f32(float *p, const float (&x)[V]) {
  constexpr int N = V % 4 ? 1 : 4;
#pragma unroll
  for (int i = 0; i < V; i += N) {
    ps_vec<float, N> v;
#pragma unroll
    for (int k = 0; k < N; k++)
      v.e[k] = x[i + k];
    ps_put<float, N>(p + i, v);
  }
}
/* Of bf16 by words: taken out one by one, each number would have a register of its own. */
template <typename T, int V>
__device__ __forceinline__ void ps_unpack(float (&x)[V], const ps_vec<T, V> &v) {
  if constexpr (sizeof(T) == 2 && V % 2 == 0) {
    union {
      ps_vec<T, V> v;
      uint32_t word[V / 2];
    } c = {v};
#pragma unroll
    for (int i = 0; i < V; i++)
      x[i] = __uint_as_float(i % 2 ? c.word[i / 2] & 0xffff0000u : c.word[i / 2] << 16);
  } else {
#pragma unroll
    for (int i = 0; i < V; i++)
      x[i] = ps_to_f32(v.e[i]);
  }
}
template <typename T, int V> __device__ __forceinline__ void ps_read(float (&x)[V], const T *p) {
  ps_unpack<T, V>(x, ps_load<T, V>(p));
}

/* 16 bytes from device memory to shared memory in the background, or 16 zeros where not `there`;
 * `from` is a valid address all the same. A thread that waits sees what it copied itself:
 * without a barrier, others do not. ps_copy_wait<N>(): all but the N latest commits have landed.
 * (Compute capability 8.0.) */
__device__ __forceinline__ void ps_copy_async(void *shared, const void *from, bool there = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   (uint32_t)__cvta_generic_to_shared(shared)),
               "l"(from), "r"(there ? 16u : 0u)
               : "memory");
}
__device__ __forceinline__ void ps_copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void ps_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* What is added to a norm's weights: -0 where there is no offset, which leaves every bit of w,
 * those of -0 too. */
static inline float ps_offset(float offset) { return offset == 0.0f ? -0.0f : offset; }

/* ---- sums ------------------------------------------------------------------------------------ */

/* Sum over the warp, in every lane: a butterfly, the same tree in each. */
__device__ __forceinline__ float ps_warp_sum(float x) {
#pragma unroll
  for (int w = 16; w > 0; w /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, w);
  return x;
}

/* Sums of N values over the block, in every thread: warps, then their sums in a butterfly.
 * blockDim.x is a multiple of 32. Every thread calls it; between two calls on the same shared
 * array there is a barrier or another array. */
template <int N> __device__ __forceinline__ void ps_block_sum(float (&x)[N], float (*shared)[32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
#pragma unroll
  for (int i = 0; i < N; i++) {
    x[i] = ps_warp_sum(x[i]);
    if (lane == 0)
      shared[i][warp] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; i++)
    x[i] = ps_warp_sum(lane < n_warps ? shared[i][lane] : 0.0f);
}

/* out[c] = round(sum_g partial[g*ld + c]) or, when accumulate, round(out[c] + sum): defined in
 * reduce.cu. */
cudaError_t ps_add_partials(cudaStream_t stream, void *out, uint32_t dt, const float *partial,
                            uint32_t n_tiles, uint32_t ld, uint32_t cols, bool accumulate);

/* ---- launches -------------------------------------------------------------------------------- */

static inline uint32_t ps_ceil_div(uint64_t n, uint64_t by) {
  return (uint32_t)((n + by - 1) / by);
}
static inline bool ps_aligned(const void *p) { return (uintptr_t)p % 16 == 0; }
/* The same of the launch's first @n addresses. */
static inline bool ps_all_aligned(const ps_launch *l, uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    if (!ps_aligned(l->ptr[i]))
      return false;
  return true;
}

/* The status of the launches made so far, named for the op. */
static inline ps_status ps_launched(const char *op, cudaError_t e) {
  if (e == cudaSuccess)
    e = cudaGetLastError();
  return e == cudaSuccess
             ? PS_OK
             : ps__fail(PS_EDEVICE, "%s: the CUDA launch failed: %s", op, cudaGetErrorString(e));
}

/* Number of pointers, their alignment, the dtype and the scratch: what every launcher checks. */
static inline ps_status ps_check(const ps_launch *l, const char *op, uint32_t n_ptr, uint32_t dt,
                                 size_t scratch) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  if (l->n_ptr < n_ptr)
    return ps__fail(PS_EINVAL, "%s: %u addresses given, %u needed", op, l->n_ptr, n_ptr);
  if (dt >= PS_N_DTYPES)
    return ps__fail(PS_EINVAL, "%s: dtype %u is neither fp32 nor bf16", op, dt);
  for (uint32_t i = 0; i < n_ptr; i++)
    if (!l->ptr[i] || (uintptr_t)l->ptr[i] % 4)
      return ps__fail(PS_EINVAL, "%s: address %u is %p: not aligned", op, i, l->ptr[i]);
  if (exec->scratch_bytes < scratch || (scratch && !exec->scratch))
    return ps__fail(PS_EINVAL, "%s: %zu bytes of scratch given, %zu needed", op,
                    exec->scratch_bytes, scratch);
  return PS_OK;
}

/* Runs body with T the element type of dt. Each dtype is a case here. */
#define PS_BY_TYPE(dt, ...)                                                                        \
  do {                                                                                             \
    switch (dt) {                                                                                  \
    case PS_F32: {                                                                                 \
      using T = float;                                                                             \
      __VA_ARGS__;                                                                                 \
    } break;                                                                                       \
    case PS_BF16: {                                                                                \
      using T = __nv_bfloat16;                                                                     \
      __VA_ARGS__;                                                                                 \
    } break;                                                                                       \
    }                                                                                              \
  } while (0)
/* The same, with V a full vector where `whole`, else 1. */
#define PS_DISPATCH(dt, whole, ...)                                                                \
  PS_BY_TYPE(                                                                                      \
      dt,                                                                                          \
      if (whole) {                                                                                 \
        constexpr int V = ps_full<T>;                                                              \
        __VA_ARGS__;                                                                               \
      } else {                                                                                     \
        constexpr int V = 1;                                                                       \
        __VA_ARGS__;                                                                               \
      })
/* Are rows of n elements of dt, at aligned addresses, made of whole vectors? */
static inline bool ps_whole(uint32_t dt, uint64_t n) { return n % ps_vector_elements(dt) == 0; }

#endif
