/* qkv_bwd.cu - the backward pass of the qkv split; qkv.cu has math, shapes, bytes and speed. */
#include "kernels/cuda/qkv.cuh"

/* What a thread reads of a token, 16 bytes at a time: its V pairs of dq, or of the fp32 dkv, in
 * v[0] to v[N_GRAD-1], first halves first; with a norm those of the raw product behind them, not
 * of v. */
template <int V> constexpr int n_grad = V == 8 ? 4 : 2;
template <int V, bool NORM> constexpr int n_in = n_grad<V> + (NORM ? 2 : 0);
template <typename T, int V, bool NORM, typename Take>
__device__ __forceinline__ void each_vector(const qkv_job<T> &j, uint32_t t, uint32_t head,
                                            uint32_t lower, uint32_t upper, Take take) {
  const uint32_t d = j.head_dim;
  if (head < j.n_q) {
    const T *p = j.dq + ((size_t)t * j.n_q + head) * d;
    take(0, p + lower);
    take(1, p + upper);
  } else {
    const float *p = j.dkv + ((size_t)t * 2 * j.n_k + head - j.n_q) * d;
#pragma unroll
    for (int k = 0; k < V / 4; k++) {
      take(k, p + lower + 4 * k);
      take(V / 4 + k, p + upper + 4 * k);
    }
  }
  if (NORM && head < j.n_q + j.n_k) {
    const T *p = j.qkv + ((size_t)t * (j.n_q + 2 * j.n_k) + head) * d;
    take(n_grad<V>, p + lower);
    take(n_grad<V> + 1, p + upper);
  }
}
/* a and b: the first and the second half of the pairs. */
template <typename T, int V>
__device__ __forceinline__ void unpack_grads(float (&a)[V], float (&b)[V], const uint4 *in,
                                             bool is_q) {
  if (is_q) {
    unpack<T, V>(a, in[0]);
    unpack<T, V>(b, in[1]);
    return;
  }
#pragma unroll
  for (int k = 0; k < V / 4; k++) {
    float lo[4], hi[4];
    unpack<float, 4>(lo, in[k]);
    unpack<float, 4>(hi, in[V / 4 + k]);
#pragma unroll
    for (int e = 0; e < 4; e++)
      a[4 * k + e] = lo[e], b[4 * k + e] = hi[e];
  }
}

/* dw of one head of each kind's threads of the block, added in the order of heads. */
template <int V>
__device__ __forceinline__ void store_dw(float *to, const float *sums, uint32_t first, uint32_t end,
                                         uint32_t d, uint32_t turned) {
  const uint32_t half = d / 2, g = half / V;
  for (uint32_t e = threadIdx.x; e < d; e += blockDim.x) {
    const uint32_t i = e % half;
    float sum = 0.0f;
    for (uint32_t h = first; h < end; h++)
      sum += sums[(h * g + i / V) * 2 * V + i % V + (e < half ? 0 : V)];
    to[e < half ? lower_of(i, turned) : upper_of(i, turned, half)] = sum;
  }
}

/* A block a tile of tokens (one token without NORM) and a slice of `each` heads, q, k and v
 * alike; half/V neighbouring threads a head, each with V pairs, always the same, so that it
 * keeps their dw. With NORM the next token is copied to shared memory while one is worked on,
 * each vector by the thread that reads it, and the angles are made for as many tokens at once as
 * there are threads. */
template <typename T, int V, bool NORM>
__global__ void __launch_bounds__(SLICE_THREADS, NORM ? 2 : 3)
    qkv_bwd_k(const qkv_job<T> j, const rope_table rope, uint32_t each) {
  constexpr int N = n_in<V, NORM>;
  extern __shared__ uint4 ring[]; /* NORM: [2][N][SLICE_THREADS]; in the end the sums of dw */
  __shared__ alignas(16) float cosines[SLICE_THREADS], sines[SLICE_THREADS],
      weights[NORM ? 2 : 1][NORM ? 2 * MAX_HALF : 1];
  const uint32_t d = j.head_dim, half = d / 2, g = half / V,
                 first = NORM ? blockIdx.x * j.tile : blockIdx.x;
  const uint32_t end = NORM ? min(first + j.tile, j.n_tokens) : first + 1;
  const uint32_t head0 = blockIdx.y * each, heads = min(each, j.n_q + 2 * j.n_k - head0),
                 i = threadIdx.x % g * V, lower = lower_of(i, rope.turned),
                 upper = upper_of(i, rope.turned, half);
  const bool ok = threadIdx.x / g < heads;
  const uint32_t head = ok ? head0 + threadIdx.x / g : head0;
  const bool is_q = head < j.n_q, is_v = head >= j.n_q + j.n_k, turned = i < rope.turned;
  float dw[NORM ? 2 * V : 1] = {};
  uint4 in[N];
  auto slot = [&](uint32_t t, int k) {
    return &ring[((t - first) % 2 * N + k) * SLICE_THREADS + threadIdx.x];
  };
  auto fetch = [&](uint32_t t) {
    if constexpr (NORM) {
      if (t < end)
        each_vector<T, V, NORM>(j, t, head, lower, upper,
                                [&](int k, const void *p) { ps_copy_async(slot(t, k), p); });
      ps_copy_commit();
    } else {
      each_vector<T, V, NORM>(j, t, head, lower, upper,
                              [&](int k, const void *p) { in[k] = *(const uint4 *)p; });
    }
  };
  const uint32_t at_once = NORM ? max(1u, blockDim.x / half) : 1; /* tokens */
  auto angles = [&](uint32_t t) {
    for (uint32_t k = threadIdx.x; k < at_once * half && t + k / half < end; k += blockDim.x)
      if (k % half < rope.turned)
        angle_of(cosines[k], sines[k], rope, k % half, j.pos[t + k / half]);
  };
  fetch(first);
  if constexpr (NORM) {
    for (uint32_t k = threadIdx.x; k < d; k += blockDim.x) {
      weights[0][k] = ps_to_f32(j.wq[k]) + j.offset;
      weights[1][k] = ps_to_f32(j.wk[k]) + j.offset;
    }
  }
  angles(first);
  __syncthreads();
  for (uint32_t t = first, turn = 0; t < end; t++, turn++) {
    float a[V], b[V];
    if constexpr (NORM) {
      fetch(t + 1);
      if (turn == at_once) {
        turn = 0;
        __syncthreads();
        angles(t);
        __syncthreads();
      }
      ps_copy_wait<1>();
#pragma unroll
      for (int k = 0; k < N; k++)
        in[k] = *slot(t, k);
    }
    unpack_grads<T, V>(a, b, in, is_q);
    if (!is_v && turned) {
      float c[V], s[V];
      read_f32<V>(c, cosines + turn * half + i);
      read_f32<V>(s, sines + turn * half + i);
#pragma unroll
      for (int k = 0; k < V; k++) {
        const float lo = a[k] * c[k] + b[k] * s[k];
        b[k] = b[k] * c[k] - a[k] * s[k];
        a[k] = lo;
      }
    }
    if constexpr (NORM) {
      float xl[V], xh[V], wl[V], wh[V], ss = 0.0f, sg = 0.0f;
      unpack<T, V>(xl, in[n_grad<V>]);
      unpack<T, V>(xh, in[n_grad<V> + 1]);
      read_f32<V>(wl, weights[!is_q] + lower);
      read_f32<V>(wh, weights[!is_q] + upper);
#pragma unroll
      for (int k = 0; k < V; k++) {
        ss += xl[k] * xl[k] + xh[k] * xh[k];
        sg += a[k] * wl[k] * xl[k] + b[k] * wh[k] * xh[k];
      }
      const float rstd = 1.0f / sqrtf(head_sum(ss, g) / (float)d + j.eps),
                  mean = head_sum(sg, g) * rstd / (float)d;
      if (!is_v) {
#pragma unroll
        for (int k = 0; k < V; k++) {
          xl[k] *= rstd;
          xh[k] *= rstd;
          dw[k] += a[k] * xl[k];
          dw[V + k] += b[k] * xh[k];
          a[k] = (a[k] * wl[k] - xl[k] * mean) * rstd;
          b[k] = (b[k] * wh[k] - xh[k] * mean) * rstd;
        }
      }
    }
    if (ok) {
      T *out = j.dqkv + ((size_t)t * (j.n_q + 2 * j.n_k) + head) * d;
      ps_store<T, V>(out + lower, a);
      ps_store<T, V>(out + upper, b);
    }
  }
  if constexpr (NORM) {
    float *sums = (float *)ring;
    const size_t at = ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * d;
    auto local = [&](uint32_t h) { return min(max(h, head0) - head0, heads); };
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 2 * V; k++)
      sums[threadIdx.x * 2 * V + k] = dw[k];
    __syncthreads();
    store_dw<V>(j.partial_q + at, sums, 0, local(j.n_q), d, rope.turned);
    store_dw<V>(j.partial_k + at, sums, local(j.n_q), local(j.n_q + j.n_k), d, rope.turned);
  }
}

/* dx of v's norm for a head of v, by a warp. */
template <typename T>
__device__ __forceinline__ void value_norm_bwd(T *out, const T *x, const float *g, uint32_t d,
                                               float eps) {
  const uint32_t lane = threadIdx.x % 32;
  float ss = 0.0f, sg = 0.0f;
  for (uint32_t i = lane; i < d; i += 32) {
    const float v = ps_to_f32(x[i]);
    ss += v * v;
    sg += g[i] * v;
  }
  const float rstd = 1.0f / sqrtf(ps_warp_sum(ss) / (float)d + eps),
              mean = ps_warp_sum(sg) * rstd / (float)d;
  for (uint32_t i = lane; i < d; i += 32)
    out[i] = ps_from_f32<T>((g[i] - ps_to_f32(x[i]) * rstd * mean) * rstd);
}

/* @MODE: as qk_norm, but not over all heads. With shared keys k's columns get the gradient of both
 * norms, which are of the same rows. */
template <typename T, uint32_t MODE>
__global__ void __launch_bounds__(THREADS)
    qkv_bwd_any_k(const qkv_job<T> j, const rope_table rope) {
  constexpr bool NORM = MODE != PS_QK_NORM_NONE, LATE = MODE == PS_QK_NORM_LATE;
  __shared__ float cosines[MAX_HALF], sines[MAX_HALF];
  __shared__ float sums[NORM ? THREADS / 32 : 1][NORM ? 2 * MAX_HALF : 1];
  const uint32_t d = j.head_dim, half = d / 2, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t first = blockIdx.x * j.tile, end = min(first + j.tile, j.n_tokens);
  float dw[NORM ? 2 : 1][PAIRS][2] = {};
  auto turn_back = [&](uint32_t i, float &lo, float &hi) {
    if (i >= rope.turned)
      return;
    const float a = lo * cosines[i] + hi * sines[i];
    hi = hi * cosines[i] - lo * sines[i];
    lo = a;
  };
  for (uint32_t t = first; t < end; t++) {
    const size_t at = (size_t)t * j.width;
    const float *dkv = j.dkv + (size_t)t * 2 * j.n_k * d;
    __syncthreads();
    fill_angles(cosines, sines, rope, j.pos[t]);
    __syncthreads();
    const float scale = position_scale(rope, j.pos[t]);
    /* what the norm was of */
    auto read = [&](const T *x, uint32_t i, float &lo, float &hi) {
      lo = ps_to_f32(x[lower_in(i, rope)]);
      hi = ps_to_f32(x[upper_in(i, rope, half)]);
      if constexpr (LATE) {
        const bool turned = i < rope.turned;
        const float c = turned ? cosines[i] : 1.0f, s = turned ? sines[i] : 0.0f, x0 = lo;
        lo = x0 * c - hi * s;
        hi = hi * c + x0 * s;
      }
    };
    for (uint32_t head = warp; head < j.n_q + j.n_k; head += THREADS / 32) {
      const bool is_q = head < j.n_q;
      const T *w = is_q ? j.wq : j.wk, *x = j.qkv + at + head * d,
              *dq = j.dq + ((size_t)t * j.n_q + head) * d;
      T *out = j.dqkv + at + head * d;
      const bool shared = MODE == PS_QK_NORM_HEAD && j.shared_keys && !is_q;
      const float *dv = dkv + (shared ? j.n_k + head - j.n_q : 0) * d;
      float a[PAIRS], b[PAIRS], ss = 0.0f, sg = 0.0f, sv = 0.0f;
#pragma unroll
      for (int k = 0; k < PAIRS; k++) {
        const uint32_t i = lane + 32 * k;
        if (i >= half)
          break;
        const uint32_t lower = lower_in(i, rope), upper = upper_in(i, rope, half);
        a[k] = is_q ? ps_to_f32(dq[lower]) * scale : dkv[(head - j.n_q) * d + lower];
        b[k] = is_q ? ps_to_f32(dq[upper]) * scale : dkv[(head - j.n_q) * d + upper];
        if constexpr (!LATE)
          turn_back(i, a[k], b[k]);
        if constexpr (NORM) {
          float xl, xh;
          read(x, i, xl, xh);
          ss += xl * xl + xh * xh;
          sg += a[k] * (ps_to_f32(w[lower]) + j.offset) * xl +
                b[k] * (ps_to_f32(w[upper]) + j.offset) * xh;
          if (shared)
            sv += dv[lower] * xl + dv[upper] * xh;
        }
      }
      float rstd = 1.0f, mean = 0.0f, mean_v = 0.0f;
      if constexpr (NORM) {
        rstd = 1.0f / sqrtf(ps_warp_sum(ss) / (float)d + j.eps);
        mean = ps_warp_sum(sg) * rstd / (float)d;
        mean_v = shared ? ps_warp_sum(sv) * rstd / (float)d : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < PAIRS; k++) {
        const uint32_t i = lane + 32 * k;
        if (i >= half)
          break;
        const uint32_t lower = lower_in(i, rope), upper = upper_in(i, rope, half);
        if constexpr (NORM) {
          float xl, xh;
          read(x, i, xl, xh);
          xl *= rstd;
          xh *= rstd;
          dw[0][k][0] += is_q ? a[k] * xl : 0.0f;
          dw[0][k][1] += is_q ? b[k] * xh : 0.0f;
          dw[1][k][0] += is_q ? 0.0f : a[k] * xl;
          dw[1][k][1] += is_q ? 0.0f : b[k] * xh;
          a[k] = (a[k] * (ps_to_f32(w[lower]) + j.offset) - xl * mean) * rstd;
          b[k] = (b[k] * (ps_to_f32(w[upper]) + j.offset) - xh * mean) * rstd;
          if (shared) {
            a[k] += (dv[lower] - xl * mean_v) * rstd;
            b[k] += (dv[upper] - xh * mean_v) * rstd;
          }
        }
        if constexpr (LATE)
          turn_back(i, a[k], b[k]);
        out[lower] = ps_from_f32<T>(a[k]);
        out[upper] = ps_from_f32<T>(b[k]);
      }
    }
    const size_t at_v = at + (j.n_q + j.n_k) * d;
    for (uint32_t i = threadIdx.x; !j.value_norm && i < j.n_k * d; i += THREADS)
      j.dqkv[at_v + i] = ps_from_f32<T>(dkv[j.n_k * d + i]);
    for (uint32_t head = warp; j.value_norm && !j.shared_keys && head < j.n_k; head += THREADS / 32)
      value_norm_bwd<T>(j.dqkv + at_v + head * d, j.qkv + at_v + head * d, dkv + (j.n_k + head) * d,
                        d, j.eps);
  }
  if constexpr (NORM) {
#pragma unroll
    for (int which = 0; which < 2; which++) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < PAIRS; k++) {
        const uint32_t i = lane + 32 * k;
        if (i >= half)
          break;
        sums[warp][lower_in(i, rope)] = dw[which][k][0];
        sums[warp][upper_in(i, rope, half)] = dw[which][k][1];
      }
      __syncthreads();
      float *to = (which ? j.partial_k : j.partial_q) + (size_t)blockIdx.x * d;
      for (uint32_t e = threadIdx.x; e < d; e += THREADS) {
        float sum = 0.0f;
        for (int r = 0; r < THREADS / 32; r++)
          sum += sums[r][e];
        to[e] = sum;
      }
    }
  }
}

/* With a norm over all heads, a block a tile of tokens: twice over a token's dq and dk, the second
 * time from cache; dw in the partial sums themselves, each element of which only its thread
 * touches. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    qkv_bwd_row_k(const qkv_job<T> j, const rope_table rope) {
  __shared__ float cosines[PS_ROPE_PAIRS], sines[PS_ROPE_PAIRS], shared[4][32];
  const uint32_t d = j.head_dim, half = d / 2, n_q = j.n_q * d, n_k = j.n_k * d,
                 pairs = (j.n_q + j.n_k) * half;
  const uint32_t first = blockIdx.x * j.tile, end = min(first + j.tile, j.n_tokens);
  float *dwq = j.partial_q + (size_t)blockIdx.x * n_q,
        *dwk = j.partial_k + (size_t)blockIdx.x * n_k;
  /* the gradients of a pair before the norm's backward pass */
  auto grads = [&](const row_pair &at, uint32_t t, float &a, float &b) {
    const T *dq = j.dq + (size_t)t * n_q;
    const float *dkv = j.dkv + (size_t)t * 2 * n_k - n_q;
    const float lo = at.is_q ? ps_to_f32(dq[at.lower]) : dkv[at.lower];
    const float hi = at.is_q ? ps_to_f32(dq[at.upper]) : dkv[at.upper];
    a = at.turned ? lo * cosines[at.i] + hi * sines[at.i] : lo;
    b = at.turned ? hi * cosines[at.i] - lo * sines[at.i] : hi;
  };
  for (uint32_t t = first; t < end; t++) {
    const size_t row = (size_t)t * (n_q + 2 * n_k);
    const T *x = j.qkv + row;
    T *out = j.dqkv + row;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, a, b; /* sum x^2 and sum g*x, of q and of k */
    __syncthreads();
    fill_angles(cosines, sines, rope, j.pos[t]);
    __syncthreads();
    for (uint32_t p = threadIdx.x; p < pairs; p += THREADS) {
      const row_pair at(p, half, d, j.n_q, rope.turned);
      const T *w = at.is_q ? j.wq : j.wk - n_q;
      const float xl = ps_to_f32(x[at.lower]), xh = ps_to_f32(x[at.upper]);
      grads(at, t, a, b);
      const float ss = xl * xl + xh * xh, sg = a * (ps_to_f32(w[at.lower]) + j.offset) * xl +
                                               b * (ps_to_f32(w[at.upper]) + j.offset) * xh;
      sum[0] += at.is_q ? ss : 0.0f;
      sum[1] += at.is_q ? sg : 0.0f;
      sum[2] += at.is_q ? 0.0f : ss;
      sum[3] += at.is_q ? 0.0f : sg;
    }
    ps_block_sum<4>(sum, shared);
    const float rstd_q = 1.0f / sqrtf(sum[0] / (float)n_q + j.eps),
                rstd_k = 1.0f / sqrtf(sum[2] / (float)n_k + j.eps);
    for (uint32_t p = threadIdx.x; p < pairs; p += THREADS) {
      const row_pair at(p, half, d, j.n_q, rope.turned);
      const T *w = at.is_q ? j.wq : j.wk - n_q;
      float *dw = at.is_q ? dwq : dwk - n_q;
      const float rstd = at.is_q ? rstd_q : rstd_k,
                  mean = at.is_q ? sum[1] * rstd_q / (float)n_q : sum[3] * rstd_k / (float)n_k,
                  xl = ps_to_f32(x[at.lower]) * rstd, xh = ps_to_f32(x[at.upper]) * rstd;
      grads(at, t, a, b);
      dw[at.lower] = (t == first ? 0.0f : dw[at.lower]) + a * xl;
      dw[at.upper] = (t == first ? 0.0f : dw[at.upper]) + b * xh;
      a = (a * (ps_to_f32(w[at.lower]) + j.offset) - xl * mean) * rstd;
      b = (b * (ps_to_f32(w[at.upper]) + j.offset) - xh * mean) * rstd;
      out[at.lower] = ps_from_f32<T>(a);
      out[at.upper] = ps_from_f32<T>(b);
    }
    for (uint32_t i = threadIdx.x; i < n_k; i += THREADS)
      out[n_q + n_k + i] = ps_from_f32<T>(j.dkv[(size_t)t * 2 * n_k + n_k + i]);
  }
}

/* The partial sums of dw that each weight gets: one a block. */
static uint32_t n_partials(const ps__args_qkv *a, bool fit) {
  return ps_n_row_tiles(a->n_tokens, PS_NORM_TILES) * (fit ? ps_qkv_slices(a) : 1);
}

template <typename T>
static cudaError_t launch_bwd(const ps_launch *l, const ps__args_qkv *a, const rope_table &rope,
                              bool fit) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  constexpr int V = ps_full<T>;
  const uint32_t n = a->qk_norm ? ps_n_row_tiles(a->n_tokens, PS_NORM_TILES) : a->n_tokens;
  qkv_job<T> j = job_of<T>(a);
  j.tile = a->qk_norm ? ps_row_tile_rows(a->n_tokens, PS_NORM_TILES) : 1;
  j.dq = (const T *)l->ptr[0];
  const uint32_t kv = a->n_kv_heads ? 1 : 0;
  if (kv)
    j.dkv = (const float *)l->ptr[1];
  j.pos = (const int32_t *)l->ptr[kv + 1];
  j.dqkv = (T *)l->ptr[kv + 2];
  if (a->qk_norm) {
    j.qkv = (const T *)l->ptr[kv + 3];
    j.wq = (const T *)l->ptr[kv + 4];
    j.wk = kv ? (const T *)l->ptr[6] : j.wq; /* read, and of no use */
    j.partial_q = (float *)exec->scratch;
    j.partial_k = j.partial_q + (size_t)n_partials(a, fit) * ps__q_norm_elements(a);
  }
  if (fit) {
    const uint32_t each = ps_qkv_heads_each(a), threads = slice_threads<V>(a);
    const dim3 grid(n, ps_qkv_slices(a));
    constexpr uint32_t bytes = 2 * n_in<V, true> * SLICE_THREADS * 16;
    if (!a->qk_norm) {
      qkv_bwd_k<T, V, false><<<grid, threads, 0, exec->stream>>>(j, rope, each);
    } else {
      /* of this device */
      const cudaError_t e = cudaFuncSetAttribute(
          qkv_bwd_k<T, V, true>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      if (e != cudaSuccess)
        return e;
      qkv_bwd_k<T, V, true><<<grid, threads, bytes, exec->stream>>>(j, rope, each);
    }
  } else if (a->qk_norm == PS_QK_NORM_ROW) {
    qkv_bwd_row_k<T><<<n, THREADS, 0, exec->stream>>>(j, rope);
  } else if (a->qk_norm == PS_QK_NORM_LATE) {
    qkv_bwd_any_k<T, PS_QK_NORM_LATE><<<n, THREADS, 0, exec->stream>>>(j, rope);
  } else if (a->qk_norm) {
    qkv_bwd_any_k<T, PS_QK_NORM_HEAD><<<n, THREADS, 0, exec->stream>>>(j, rope);
  } else {
    qkv_bwd_any_k<T, PS_QK_NORM_NONE><<<n, THREADS, 0, exec->stream>>>(j, rope);
  }
  return cudaGetLastError();
}

extern "C" ps_status ps__cuda_qkv_split_bwd(const ps_launch *l) {
  const ps__args_qkv *a = (const ps__args_qkv *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const ps_status st =
      check_shape(l, "qkv_split_bwd", ps__qkv_grad_pointers(a), ps_scratch_qkv_split_bwd(a, NULL));
  if (st != PS_OK)
    return st;
  const rope_table rope = rope_of(a);
  const uint32_t dw = a->n_kv_heads ? 7 : 5;
  const bool fit = vectors_fit(l, a, a->qk_norm ? dw : ps__qkv_grad_pointers(a));
  cudaError_t e = cudaSuccess;
  if (a->n_tokens)
    PS_BY_TYPE(a->dt, e = launch_bwd<T>(l, a, rope, fit));
  const float *partial = (const float *)exec->scratch;
  for (int which = 0; which < (a->n_kv_heads ? 2 : 1) && a->qk_norm && e == cudaSuccess; which++) {
    const uint32_t n = n_partials(a, fit),
                   cols = which ? ps__k_norm_elements(a) : ps__q_norm_elements(a);
    e = ps_add_partials(exec->stream, l->ptr[dw + which], a->dt, partial, n, cols, cols,
                        a->accumulate_dw != 0);
    partial += (size_t)n * cols;
  }
  return ps_launched("qkv_split_bwd", e);
}
