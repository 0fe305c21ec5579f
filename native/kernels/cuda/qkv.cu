/* qkv.cu - the fused q, k, v product split by use: optional RMSNorm over each head (Qwen3) or over
 * all heads together (OLMo 2), and RoPE. The backward pass (qkv_bwd.cu) has its math here too.
 *
 * math    y = round(x * rstd * (w + norm_offset)), rstd = 1/sqrt(mean(x^2) + eps) (with qk_norm,
 *         else y = x); at angle a = pos * inv_freq[i], c = attention_factor * cos a,
 *         s = attention_factor * sin a:
 *         out[i] = y[i] c - y[i+h] s,  out[i+h] = y[i+h] c + y[i] s,  i < h = rotary_dim/2;
 *         out[i] = y[i] for i >= rotary_dim. Interleaved, the pair is 2i and 2i+1. With
 *         PS_QK_NORM_LATE the norm is of what RoPE gives. With position_beta q is multiplied by
 *         1 + position_beta ln(1 + floor(pos / position_original)) at the end. With whole_head h is
 *         head_dim/2. With value_norm v = x * rstd; with shared_keys it is of k's x. The last
 *         six by the kernels for any head_dim alone.
 *         Backward: dy by the inverse rotation; xh = x*rstd, g = dy*(w + norm_offset),
 *         dx = rstd*(g - xh*mean(g*xh)), dw = sum of dy*xh over rows, and over heads where they
 *         share a weight.
 * angles  the frequencies are the argument block's, as on the cpu backend; product and reduction
 *         in fp64, as there
 * shapes  qkv [T, A+2K], with shared_keys [T, A+K]; q [T,A], kv [T,2K] in dt; dkv [T,2K] fp32;
 *         pos i32 [T]; wq, wk [head_dim]; head_dim even, at most 512
 * bytes   forward 2*T*(A+2K)*sizeof(dt); backward (2*T*A + T*2K)*sizeof(dt) + T*2K*4, with
 *         qk_norm T*(A+K)*sizeof(dt) more;
 *         8192 x (4096 + 2*1024) bf16 -> forward 201 MB, 42 us at 4.8 TB/s; backward 235 MB, 49
 *         us. Measured on an H200, of copy bandwidth:
 *         forward 91%, 52 us, with qk_norm 86%, 55 us; backward 94%, 59 us, with qk_norm 74%,
 *         102 us
 * determinism  bitwise: a head is made by fixed threads; dw: tiles of rows by shape, in order,
 *              then fixed trees.
 * reference    the cpu backend's: 1 ulp of bf16; fp32 within 4e-7 of the head's largest, 1e-5
 *              with the norm */
#include "kernels/cuda/qkv.cuh"

/* A block has TOKENS tokens and a slice of `each` heads, q, k and v alike. half/V neighbouring
 * threads (with NORM a power of two up to 32) have a head, and each thread V pairs of each token.
 * The data is on its way while the angles are made. */
template <typename T, int V, uint32_t TOKENS, bool NORM>
__global__ void __launch_bounds__(SLICE_THREADS, NORM ? 3 : 4)
    qkv_fwd_k(const qkv_job<T> j, const rope_table rope, uint32_t each) {
  __shared__ alignas(16) float cosines[TOKENS][MAX_HALF], sines[TOKENS][MAX_HALF];
  const uint32_t d = j.head_dim, half = d / 2, g = half / V, t0 = blockIdx.x * TOKENS,
                 tokens = min(TOKENS, j.n_tokens - t0), head0 = blockIdx.y * each,
                 i = threadIdx.x % g * V, lower = lower_of(i, rope.turned),
                 upper = upper_of(i, rope.turned, half);
  const uint32_t heads = min(each, j.n_q + 2 * j.n_k - head0),
                 head = head0 + min(threadIdx.x / g, heads - 1);
  const bool is_q = head < j.n_q, is_v = head >= j.n_q + j.n_k, turn = !is_v && i < rope.turned;
  uint4 raw[TOKENS][2];
  ps_vec<T, V> weights[2];
#pragma unroll
  for (uint32_t n = 0; n < TOKENS; n++) {
    const T *in = j.qkv + ((size_t)min(t0 + n, j.n_tokens - 1) * (j.n_q + 2 * j.n_k) + head) * d;
    raw[n][0] = *(const uint4 *)(in + lower);
    raw[n][1] = *(const uint4 *)(in + upper);
  }
  for (uint32_t k = threadIdx.x; k < tokens * rope.turned; k += blockDim.x) {
    const uint32_t n = k / rope.turned, p = k % rope.turned;
    angle_of(cosines[n][p], sines[n][p], rope, p, j.pos[t0 + n]);
  }
  if constexpr (NORM) {
    const T *w = is_q ? j.wq : j.wk;
    weights[0] = ps_load<T, V>(w + lower);
    weights[1] = ps_load<T, V>(w + upper);
  }
  __syncthreads();
#pragma unroll
  for (uint32_t n = 0; n < TOKENS; n++) {
    float lo[V], hi[V], c[V], s[V], a[V], b[V];
    unpack<T, V>(lo, raw[n][0]);
    unpack<T, V>(hi, raw[n][1]);
    if constexpr (NORM) {
      float ss = 0.0f, wl[V], wh[V];
#pragma unroll
      for (int k = 0; k < V; k++)
        ss += lo[k] * lo[k] + hi[k] * hi[k];
      const float rstd = 1.0f / sqrtf(head_sum(ss, g) / (float)d + j.eps);
      if (!is_v) {
        ps_unpack<T, V>(wl, weights[0]);
        ps_unpack<T, V>(wh, weights[1]);
#pragma unroll
        for (int k = 0; k < V; k++) {
          lo[k] = lo[k] * rstd * (wl[k] + j.offset);
          hi[k] = hi[k] * rstd * (wh[k] + j.offset);
        }
        round_all<T, V>(lo);
        round_all<T, V>(hi);
      }
    }
    read_f32<V>(c, cosines[n] + i);
    read_f32<V>(s, sines[n] + i);
#pragma unroll
    for (int k = 0; k < V; k++) {
      a[k] = turn ? lo[k] * c[k] - hi[k] * s[k] : lo[k];
      b[k] = turn ? hi[k] * c[k] + lo[k] * s[k] : hi[k];
    }
    if (threadIdx.x / g >= heads || n >= tokens)
      continue;
    const size_t t = t0 + n;
    T *out = is_q ? j.q + (t * j.n_q + head) * d : j.kv + (t * 2 * j.n_k + head - j.n_q) * d;
    ps_store<T, V>(out + lower, a);
    ps_store<T, V>(out + upper, b);
  }
}

/* The same for any even head_dim and rotary_dim: a warp a head, pairs lane, lane + 32, ... NORM: as
 * qk_norm, but not over all heads. */
template <typename T, uint32_t NORM>
__global__ void __launch_bounds__(THREADS)
    qkv_fwd_any_k(const qkv_job<T> j, const rope_table rope) {
  constexpr bool LATE = NORM == PS_QK_NORM_LATE;
  __shared__ float cosines[MAX_HALF], sines[MAX_HALF];
  const uint32_t d = j.head_dim, half = d / 2, t = blockIdx.x, lane = threadIdx.x % 32;
  const T *in = j.qkv + (size_t)t * j.width;
  T *q = j.q + (size_t)t * j.n_q * d, *kv = j.kv + (size_t)t * 2 * j.n_k * d;
  fill_angles(cosines, sines, rope, j.pos[t]);
  __syncthreads();
  const float scale = position_scale(rope, j.pos[t]);
  auto turn = [&](uint32_t i, float &lo, float &hi) {
    if (i >= rope.turned)
      return;
    const float a = lo * cosines[i] - hi * sines[i];
    hi = hi * cosines[i] + lo * sines[i];
    lo = a;
  };
  for (uint32_t head = threadIdx.x / 32; head < j.n_q + j.n_k; head += THREADS / 32) {
    const T *x = in + head * d, *w = head < j.n_q ? j.wq : j.wk;
    T *out = head < j.n_q ? q + head * d : kv + (head - j.n_q) * d;
    const float by = head < j.n_q ? scale : 1.0f;
    float rstd = 1.0f;
    auto read = [&](uint32_t i, float &lo, float &hi) {
      lo = ps_to_f32(x[lower_in(i, rope)]);
      hi = ps_to_f32(x[upper_in(i, rope, half)]);
      if constexpr (LATE) {
        turn(i, lo, hi);
        lo = rounded<T>(lo);
        hi = rounded<T>(hi);
      }
    };
    if constexpr (NORM != PS_QK_NORM_NONE) {
      float ss = 0.0f;
      if constexpr (LATE) {
        for (uint32_t i = lane; i < half; i += 32) {
          float lo, hi;
          read(i, lo, hi);
          ss += lo * lo + hi * hi;
        }
      } else {
        for (uint32_t i = lane; i < d; i += 32)
          ss += ps_to_f32(x[i]) * ps_to_f32(x[i]);
      }
      rstd = 1.0f / sqrtf(ps_warp_sum(ss) / (float)d + j.eps);
    }
    for (uint32_t i = lane; i < half; i += 32) {
      const uint32_t lower = lower_in(i, rope), upper = upper_in(i, rope, half);
      float lo, hi;
      read(i, lo, hi);
      if constexpr (NORM != PS_QK_NORM_NONE) {
        lo = lo * rstd * (ps_to_f32(w[lower]) + j.offset);
        hi = hi * rstd * (ps_to_f32(w[upper]) + j.offset);
      }
      if constexpr (NORM == PS_QK_NORM_HEAD) {
        lo = rounded<T>(lo);
        hi = rounded<T>(hi);
      }
      if constexpr (!LATE)
        turn(i, lo, hi);
      out[lower] = ps_from_f32<T>(lo * by);
      out[upper] = ps_from_f32<T>(hi * by);
    }
  }
  const T *v = in + j.width - j.n_k * d;
  for (uint32_t i = threadIdx.x; !j.value_norm && i < j.n_k * d; i += THREADS)
    kv[j.n_k * d + i] = v[i];
  for (uint32_t head = threadIdx.x / 32; j.value_norm && head < j.n_k; head += THREADS / 32) {
    float ss = 0.0f;
    for (uint32_t i = lane; i < d; i += 32)
      ss += ps_to_f32(v[head * d + i]) * ps_to_f32(v[head * d + i]);
    const float rstd = 1.0f / sqrtf(ps_warp_sum(ss) / (float)d + j.eps);
    for (uint32_t i = lane; i < d; i += 32)
      kv[(j.n_k + head) * d + i] = ps_from_f32<T>(ps_to_f32(v[head * d + i]) * rstd);
  }
}

/* With a norm over all heads, a block a token: twice over its q and k, the second time from
 * cache. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    qkv_fwd_row_k(const qkv_job<T> j, const rope_table rope) {
  __shared__ float cosines[PS_ROPE_PAIRS], sines[PS_ROPE_PAIRS], shared[2][32];
  const uint32_t d = j.head_dim, half = d / 2, t = blockIdx.x, n_q = j.n_q * d, n_k = j.n_k * d;
  const T *in = j.qkv + (size_t)t * (n_q + 2 * n_k);
  T *q = j.q + (size_t)t * n_q, *kv = j.kv + (size_t)t * 2 * n_k;
  float ss[2] = {0.0f, 0.0f};
  fill_angles(cosines, sines, rope, j.pos[t]);
  for (uint32_t i = threadIdx.x; i < n_q + n_k; i += THREADS) {
    const float x = ps_to_f32(in[i]);
    ss[i < n_q ? 0 : 1] += x * x;
  }
  ps_block_sum<2>(ss, shared); /* a barrier for the angles too */
  const float rstd_q = 1.0f / sqrtf(ss[0] / (float)n_q + j.eps),
              rstd_k = 1.0f / sqrtf(ss[1] / (float)n_k + j.eps);
  for (uint32_t p = threadIdx.x; p < (j.n_q + j.n_k) * half; p += THREADS) {
    const row_pair at(p, half, d, j.n_q, rope.turned);
    const T *w = at.is_q ? j.wq : j.wk - n_q;
    T *out = at.is_q ? q : kv - n_q;
    const float rstd = at.is_q ? rstd_q : rstd_k;
    const float lo =
        rounded<T>(ps_to_f32(in[at.lower]) * rstd * (ps_to_f32(w[at.lower]) + j.offset));
    const float hi =
        rounded<T>(ps_to_f32(in[at.upper]) * rstd * (ps_to_f32(w[at.upper]) + j.offset));
    const float c = at.turned ? cosines[at.i] : 1.0f, s = at.turned ? sines[at.i] : 0.0f;
    out[at.lower] = ps_from_f32<T>(at.turned ? lo * c - hi * s : lo);
    out[at.upper] = ps_from_f32<T>(at.turned ? hi * c + lo * s : hi);
  }
  for (uint32_t i = threadIdx.x; i < n_k; i += THREADS)
    kv[n_k + i] = in[n_q + n_k + i];
}

template <typename T>
static void launch_fwd(const ps_launch *l, const ps__args_qkv *a, const rope_table &rope) {
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  constexpr int V = ps_full<T>;
  qkv_job<T> j = job_of<T>(a);
  j.qkv = (const T *)l->ptr[0];
  j.pos = (const int32_t *)l->ptr[1];
  j.q = (T *)l->ptr[2];
  if (a->n_kv_heads)
    j.kv = (T *)l->ptr[3];
  if (a->qk_norm) {
    j.wq = (const T *)l->ptr[a->n_kv_heads ? 4 : 3];
    j.wk = a->n_kv_heads ? (const T *)l->ptr[5] : j.wq; /* read, and of no use */
  }
  const bool fit = vectors_fit(l, a, ps__qkv_pointers(a));
  const uint32_t each = ps_qkv_heads_each(a);
  const uint32_t slices = ps_qkv_slices(a);
  if (fit && a->qk_norm)
    qkv_fwd_k<T, V, 2, true>
        <<<dim3(ps_ceil_div(a->n_tokens, 2), slices), slice_threads<V>(a), 0, stream>>>(j, rope,
                                                                                        each);
  else if (fit)
    qkv_fwd_k<T, V, 1, false>
        <<<dim3(a->n_tokens, slices), slice_threads<V>(a), 0, stream>>>(j, rope, each);
  else if (a->qk_norm == PS_QK_NORM_ROW)
    qkv_fwd_row_k<T><<<a->n_tokens, THREADS, 0, stream>>>(j, rope);
  else if (a->qk_norm == PS_QK_NORM_LATE)
    qkv_fwd_any_k<T, PS_QK_NORM_LATE><<<a->n_tokens, THREADS, 0, stream>>>(j, rope);
  else if (a->qk_norm)
    qkv_fwd_any_k<T, PS_QK_NORM_HEAD><<<a->n_tokens, THREADS, 0, stream>>>(j, rope);
  else
    qkv_fwd_any_k<T, PS_QK_NORM_NONE><<<a->n_tokens, THREADS, 0, stream>>>(j, rope);
}

extern "C" ps_status ps__cuda_qkv_split_fwd(const ps_launch *l) {
  const ps__args_qkv *a = (const ps__args_qkv *)l->args;
  const ps_status st = check_shape(l, "qkv_split_fwd", ps__qkv_pointers(a), 0);
  if (st != PS_OK || !a->n_tokens)
    return st;
  const rope_table rope = rope_of(a);
  PS_BY_TYPE(a->dt, launch_fwd<T>(l, a, rope));
  return ps_launched("qkv_split_fwd", cudaSuccess);
}
