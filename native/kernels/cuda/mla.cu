/* mla.cu - latent attention's queries, keys and values by head, and its values' padding. ops.h has
 * the math. A block a token; its angles are computed once, as in the qkv split (qkv.cuh).
 *
 * bytes    each operand once, an element a thread: neighbours' accesses are one transaction
 * determinism  bitwise: dkr's sum over the heads is a thread's, in order
 * reference    the cpu backend's: bf16 1 ulp */
#include "kernels/cuda/qkv.cuh"

namespace {

struct shape {
  uint32_t heads, nope, rope, value, d;
  bool inverse;
};

/* Element @r of x after RoPE, by the block's angles. */
template <typename GET>
__device__ __forceinline__ float turned(GET x, uint32_t r, const rope_table &rope,
                                        const float *cosines, const float *sines, bool inverse) {
  const uint32_t half = rope.turned, i = rope.interleaved ? r / 2 : r % half;
  const bool upper = rope.interleaved ? r % 2 : r >= half;
  const uint32_t lo = rope.interleaved ? 2 * i : i, hi = rope.interleaved ? 2 * i + 1 : i + half;
  const float a = x(lo), b = x(hi), c = cosines[i], s = inverse ? -sines[i] : sines[i];
  return upper ? b * c + a * s : a * c - b * s;
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    turn_k(const T *x, const int32_t *pos, T *y, const shape s, const rope_table rope) {
  __shared__ float cosines[PS_ROPE_PAIRS], sines[PS_ROPE_PAIRS];
  const size_t row = (size_t)blockIdx.x * s.heads * s.d;
  fill_angles(cosines, sines, rope, pos[blockIdx.x]);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < s.heads * s.d; i += THREADS) {
    const uint32_t c = i % s.d;
    const T *head = x + row + i - c + s.nope;
    y[row + i] = c < s.nope ? x[row + i]
                            : ps_from_f32<T>(turned([&](uint32_t e) { return ps_to_f32(head[e]); },
                                                    c - s.nope, rope, cosines, sines, s.inverse));
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) kv_fwd_k(const T *kvb, const T *kr, const int32_t *pos,
                                                    T *kv, const shape s, const rope_table rope) {
  __shared__ float cosines[PS_ROPE_PAIRS], sines[PS_ROPE_PAIRS];
  __shared__ T key[2 * PS_ROPE_PAIRS];
  const uint32_t width = s.heads * s.d, each = s.nope + s.value;
  const T *from = kvb + (size_t)blockIdx.x * s.heads * each, *k = kr + (size_t)blockIdx.x * s.rope;
  T *to = kv + (size_t)blockIdx.x * 2 * width;
  fill_angles(cosines, sines, rope, pos[blockIdx.x]);
  __syncthreads();
  for (uint32_t r = threadIdx.x; r < s.rope; r += THREADS)
    key[r] = ps_from_f32<T>(
        turned([&](uint32_t e) { return ps_to_f32(k[e]); }, r, rope, cosines, sines, false));
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < 2 * width; i += THREADS) {
    const uint32_t h = i % width / s.d, c = i % s.d;
    if (i < width)
      to[i] = c < s.nope ? from[h * each + c] : key[c - s.nope];
    else
      to[i] = c < s.value ? from[h * each + s.nope + c] : ps_from_f32<T>(0.0f);
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) kv_bwd_k(const float *dkv, const int32_t *pos, T *dkvb,
                                                    T *dkr, const shape s, const rope_table rope) {
  __shared__ float cosines[PS_ROPE_PAIRS], sines[PS_ROPE_PAIRS], sum[2 * PS_ROPE_PAIRS];
  const uint32_t width = s.heads * s.d, each = s.nope + s.value;
  const float *from = dkv + (size_t)blockIdx.x * 2 * width;
  fill_angles(cosines, sines, rope, pos[blockIdx.x]);
  for (uint32_t r = threadIdx.x; r < s.rope; r += THREADS) {
    float x = 0.0f;
    for (uint32_t h = 0; h < s.heads; h++)
      x += from[h * s.d + s.nope + r];
    sum[r] = x;
  }
  __syncthreads();
  for (uint32_t r = threadIdx.x; r < s.rope; r += THREADS)
    dkr[(size_t)blockIdx.x * s.rope + r] =
        ps_from_f32<T>(turned([&](uint32_t e) { return sum[e]; }, r, rope, cosines, sines, true));
  for (uint32_t i = threadIdx.x; i < s.heads * each; i += THREADS) {
    const uint32_t h = i / each, c = i % each;
    dkvb[(size_t)blockIdx.x * s.heads * each + i] =
        ps_from_f32<T>(c < s.nope ? from[h * s.d + c] : from[width + h * s.d + c - s.nope]);
  }
}

/* Heads of @n_from elements become heads of @n_to: cut, or with zeros at the end. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    width_k(const T *from, T *to, uint64_t n, uint32_t n_from, uint32_t n_to) {
  const uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i >= n)
    return;
  const uint32_t c = (uint32_t)(i % n_to);
  to[i] = c < n_from ? from[i / n_to * n_from + c] : ps_from_f32<T>(0.0f);
}

shape shape_of(const ps__args_mla *a) {
  return {a->n_heads,     a->nope_dim, a->rotary_dim, a->value_dim, a->nope_dim + a->rotary_dim,
          a->inverse != 0};
}
rope_table table_of(const ps__args_mla *a) {
  rope_table rope = {};
  memcpy(rope.inv_freq, a->inv_freq, sizeof rope.inv_freq);
  rope.by = a->attention_factor;
  rope.turned = a->rotary_dim / 2;
  rope.interleaved = a->interleaved;
  return rope;
}
cudaStream_t stream_of(const ps_launch *l) { return ((const ps__cuda_exec *)l->exec)->stream; }

ps_status change_width(const ps_launch *l, const char *op, bool pad) {
  const ps__args_mla *a = (const ps__args_mla *)l->args;
  const uint32_t d = a->nope_dim + a->rotary_dim, n_from = pad ? a->value_dim : d,
                 n_to = pad ? d : a->value_dim;
  const uint64_t n = (uint64_t)a->n_tokens * a->n_heads * n_to;
  const ps_status st = ps_check(l, op, 2, a->dt, 0);
  if (st != PS_OK || !n)
    return st;
  PS_BY_TYPE(a->dt, width_k<T><<<ps_ceil_div(n, THREADS), THREADS, 0, stream_of(l)>>>(
                        (const T *)l->ptr[0], (T *)l->ptr[1], n, n_from, n_to));
  return ps_launched(op, cudaSuccess);
}

} // namespace

extern "C" ps_status ps__cuda_mla_turn(const ps_launch *l) {
  const ps__args_mla *a = (const ps__args_mla *)l->args;
  const ps_status st = ps_check(l, "mla_turn", 3, a->dt, 0);
  if (st != PS_OK || !a->n_tokens)
    return st;
  PS_BY_TYPE(a->dt, turn_k<T><<<a->n_tokens, THREADS, 0, stream_of(l)>>>(
                        (const T *)l->ptr[0], (const int32_t *)l->ptr[1], (T *)l->ptr[2],
                        shape_of(a), table_of(a)));
  return ps_launched("mla_turn", cudaSuccess);
}

extern "C" ps_status ps__cuda_mla_kv_fwd(const ps_launch *l) {
  const ps__args_mla *a = (const ps__args_mla *)l->args;
  const ps_status st = ps_check(l, "mla_kv_fwd", 4, a->dt, 0);
  if (st != PS_OK || !a->n_tokens)
    return st;
  PS_BY_TYPE(a->dt, kv_fwd_k<T><<<a->n_tokens, THREADS, 0, stream_of(l)>>>(
                        (const T *)l->ptr[0], (const T *)l->ptr[1], (const int32_t *)l->ptr[2],
                        (T *)l->ptr[3], shape_of(a), table_of(a)));
  return ps_launched("mla_kv_fwd", cudaSuccess);
}

extern "C" ps_status ps__cuda_mla_kv_bwd(const ps_launch *l) {
  const ps__args_mla *a = (const ps__args_mla *)l->args;
  const ps_status st = ps_check(l, "mla_kv_bwd", 4, a->dt, 0);
  if (st != PS_OK || !a->n_tokens)
    return st;
  PS_BY_TYPE(a->dt, kv_bwd_k<T><<<a->n_tokens, THREADS, 0, stream_of(l)>>>(
                        (const float *)l->ptr[0], (const int32_t *)l->ptr[1], (T *)l->ptr[2],
                        (T *)l->ptr[3], shape_of(a), table_of(a)));
  return ps_launched("mla_kv_bwd", cudaSuccess);
}

extern "C" ps_status ps__cuda_mla_cut(const ps_launch *l) {
  return change_width(l, "mla_cut", false);
}
extern "C" ps_status ps__cuda_mla_pad(const ps_launch *l) {
  return change_width(l, "mla_pad", true);
}
