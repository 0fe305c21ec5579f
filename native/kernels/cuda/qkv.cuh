/* qkv.cuh - what the forward and the backward pass of the qkv split share (qkv.cu, qkv_bwd.cu): the
 * job, angles of RoPE, pairs of elements, checks of a launch. */
#ifndef PS_KERNELS_CUDA_QKV_CUH
#define PS_KERNELS_CUDA_QKV_CUH
#include "kernels/cuda/cuda_common.cuh"
#include <string.h>

enum { THREADS = 256, SLICE_THREADS = 384, MAX_HALF = 256, PAIRS = MAX_HALF / 32 };

/* @turned: pairs of a head that RoPE turns, rotary_dim/2. */
typedef struct rope_table {
  float inv_freq[PS_ROPE_PAIRS], by, beta; /* beta, original: as position_beta of the arguments */
  uint32_t turned, original, interleaved, whole; /* whole: whole_head of the arguments */
} rope_table;

/* The two elements of pair i of a head of 2 * half elements: those that RoPE turns, then the
 * others, paired likewise so that a thread has as many of each. */
__device__ __forceinline__ uint32_t lower_of(uint32_t i, uint32_t turned) {
  return i < turned ? i : i + turned;
}
__device__ __forceinline__ uint32_t upper_of(uint32_t i, uint32_t turned, uint32_t half) {
  return i < turned ? i + turned : i + half;
}

/* The same by the table, where RoPE may turn neighbours, or halves of the whole head. */
__device__ __forceinline__ uint32_t lower_in(uint32_t i, const rope_table &rope) {
  if (rope.whole)
    return i;
  return rope.interleaved && i < rope.turned ? 2 * i : lower_of(i, rope.turned);
}
__device__ __forceinline__ uint32_t upper_in(uint32_t i, const rope_table &rope, uint32_t half) {
  if (rope.whole)
    return i + half;
  return rope.interleaved && i < rope.turned ? 2 * i + 1 : upper_of(i, rope.turned, half);
}
/* What q is multiplied by at a position. */
__device__ __forceinline__ float position_scale(const rope_table &rope, int32_t pos) {
  return rope.beta > 0.0f
             ? 1.0f + rope.beta * logf(1.0f + floorf((float)pos / (float)rope.original))
             : 1.0f;
}

/* What the kernels take; offsets of rows are derived. */
template <typename T> struct qkv_job {
  const T *qkv, *dq, *wq, *wk;
  const float *dkv;
  const int32_t *pos;
  T *q, *kv, *dqkv;
  float *partial_q, *partial_k;                /* [tiles][slices][head_dim], or [tiles][A], [K] */
  uint32_t n_tokens, tile, n_q, n_k, head_dim; /* n_q, n_k: heads */
  uint32_t width;                              /* elements of a row of qkv */
  bool value_norm, shared_keys;
  float eps, offset;
};

/* Cosine and sine of pos * inv_freq[i], times the attention factor: the polynomials and the
 * reduction of the cpu backend (qkv.c there says why they suffice). */
__device__ __forceinline__ void angle_of(float &cosine, float &sine, const rope_table &rope,
                                         uint32_t i, int32_t pos) {
  const float f = rope.inv_freq[i];
  const double x = (double)f * (double)pos, k = rint(x * 0.63661977236758134);
  const double r = fma(-k, 6.07710050650619224932e-11, fma(-k, 1.57079632673412561417, x)),
               z = r * r;
  double s = z * (-1.0 / 39916800) + 1.0 / 362880, c = z * (-1.0 / 3628800) + 1.0 / 40320;
  s = ((((s * z - 1.0 / 5040) * z + 1.0 / 120) * z - 1.0 / 6) * z) * r + r;
  c = (((c * z - 1.0 / 720) * z + 1.0 / 24) * z - 0.5) * z + 1.0;
  const int64_t quadrant = (int64_t)k;
  const float sf = (float)((quadrant & 1) ? c : s), cf = (float)((quadrant & 1) ? s : c);
  sine = ((quadrant & 2) ? -sf : sf) * rope.by;
  cosine = (((quadrant + 1) & 2) ? -cf : cf) * rope.by;
}
__device__ __forceinline__ void fill_angles(float *cosines, float *sines, const rope_table &rope,
                                            int32_t pos) {
  for (uint32_t i = threadIdx.x; i < rope.turned; i += THREADS)
    angle_of(cosines[i], sines[i], rope, i, pos);
}

/* Sum over the g neighbouring lanes of a head, g a power of two, in each of them. */
__device__ __forceinline__ float head_sum(float x, uint32_t g) {
  for (uint32_t w = g / 2; w > 0; w /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, w);
  return x;
}
template <int V> __device__ __forceinline__ void read_f32(float (&x)[V], const float *p) {
  if constexpr (V == 8) {
    float a[4], b[4];
    ps_read<float, 4>(a, p);
    ps_read<float, 4>(b, p + 4);
#pragma unroll
    for (int i = 0; i < 4; i++)
      x[i] = a[i], x[i + 4] = b[i];
  } else {
    ps_read<float, V>(x, p);
  }
}
template <typename T> __device__ __forceinline__ float rounded(float x) {
  return ps_to_f32(ps_from_f32<T>(x));
}

/* Round @x to bf16 two at a time: the unit for exponentials and roots converts one alone. */
template <typename T, int V> __device__ __forceinline__ void round_all(float (&x)[V]) {
  if constexpr (sizeof(T) == 2) {
    ps_vec<__nv_bfloat162, V / 2> v;
#pragma unroll
    for (int i = 0; i < V / 2; i++)
      v.e[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < V; i++)
      x[i] = __bfloat162float(i % 2 ? v.e[i / 2].y : v.e[i / 2].x);
  }
}

template <typename T, int V>
__device__ __forceinline__ void unpack(float (&x)[V], const uint4 &raw) {
  const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int k = 0; k < V; k++) {
    if constexpr (sizeof(T) == 4)
      x[k] = __uint_as_float(w[k]);
    else
      x[k] = __uint_as_float(k % 2 ? w[k / 2] & 0xffff0000u : w[k / 2] << 16);
  }
}

/* One of q's and k's pairs of a token, numbered through heads and pairs: where its elements lie
 * in a row of qkv, in the norm's weights (q's, then k's), and its place among angles. */
struct row_pair {
  uint32_t head, i, lower, upper;
  bool is_q, turned;
  __device__ row_pair(uint32_t p, uint32_t half, uint32_t d, uint32_t n_q, uint32_t turned_pairs) {
    head = p / half;
    i = p % half;
    is_q = head < n_q;
    turned = i < turned_pairs;
    lower = head * d + lower_of(i, turned_pairs);
    upper = head * d + upper_of(i, turned_pairs, half);
  }
};

/* ---- launches -------------------------------------------------------------------------------- */

static inline ps_status check_shape(const ps_launch *l, const char *op, uint32_t n_ptr,
                                    size_t scratch) {
  const ps__args_qkv *a = (const ps__args_qkv *)l->args;
  if (a->head_dim > 2 * MAX_HALF)
    return ps__fail(PS_EINVAL, "%s: head_dim is %u: at most %d on a GPU", op, a->head_dim,
                    2 * MAX_HALF);
  return ps_check(l, op, n_ptr, a->dt, scratch);
}

/* May threads take whole vectors of pairs? With a norm, a head's threads must be a power of two
 * inside a warp. */
static inline bool vectors_fit(const ps_launch *l, const ps__args_qkv *a, uint32_t n_aligned) {
  const uint32_t half = a->head_dim / 2, v = ps_vector_elements(a->dt), g = half / v,
                 turned = a->rotary_dim / 2;
  for (uint32_t i = 0; i < n_aligned; i++)
    if (!ps_aligned(l->ptr[i]))
      return false;
  return ps__qkv_is_plain(a) && a->qk_norm != PS_QK_NORM_ROW && half % v == 0 && turned % v == 0 &&
         (!a->qk_norm || ((g & (g - 1)) == 0 && g <= 32));
}

template <typename T> static inline qkv_job<T> job_of(const ps__args_qkv *a) {
  qkv_job<T> j = {};
  j.n_tokens = a->n_tokens;
  j.n_q = a->n_heads;
  j.n_k = a->n_kv_heads;
  j.head_dim = a->head_dim;
  j.width = ps__qkv_elements(a);
  j.value_norm = a->value_norm;
  j.shared_keys = a->shared_keys;
  j.eps = a->eps;
  j.offset = ps_offset(a->norm_offset);
  return j;
}

static inline rope_table rope_of(const ps__args_qkv *a) {
  rope_table rope;
  memcpy(rope.inv_freq, a->inv_freq, sizeof rope.inv_freq);
  rope.by = a->attention_factor;
  rope.turned = a->rotary_dim / 2;
  rope.interleaved = a->interleaved;
  rope.whole = a->whole_head;
  rope.beta = a->position_beta;
  rope.original = a->position_original;
  return rope;
}

/* Threads of a slice of heads, whole warps. */
template <int V> static inline uint32_t slice_threads(const ps__args_qkv *a) {
  return (ps_qkv_heads_each(a) * (a->head_dim / 2 / V) + 31) / 32 * 32;
}

#endif
