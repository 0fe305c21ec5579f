/* delta_gradient.cuh - kernels of delta.cu's backward pass that are of each piece alone: what the
 * chain of gradients is made of, and what is made of it. */
#ifndef PS_KERNELS_CUDA_DELTA_GRADIENT_CUH
#define PS_KERNELS_CUDA_DELTA_GRADIENT_CUH
#include "kernels/cuda/delta.cuh"

namespace {

/* ---- U, W and H of the backward chain -------------------------------------------------------- */

struct reverse_shared {
  tile_stage<ROWS> stage;
  float y[ROWS][LD];
};

template <typename T>
__global__ void __launch_bounds__(TILE_THREADS, 2) reverse_k(const delta_job<T> j) {
  extern __shared__ uint4 dynamic[];
  reverse_shared &s = *(reverse_shared *)dynamic;
  const uint32_t piece = blockIdx.x, head = blockIdx.y, key = head / j.share, n = j.n_rows(piece),
                 dk = j.a.key_dim, dv = j.a.value_dim;
  const size_t at = j.at(piece, head), ld = (size_t)j.a.n_value_heads * dv, w_ld = j.w_ld();
  const float *inverse = j.inverse + at * ROWS * ROWS, *pairs = j.pairs + at * ROWS * ROWS,
              *norms = j.norms + j.key_at(piece, key) * 2 * ROWS,
              *start = j.factors(piece, head, START), *end = j.factors(piece, head, END);
  const unit_rows<T> q(j, piece, key, 0, norms), k(j, piece, key, 1, norms);
  const T *d_o = j.d_o + (size_t)j.row0(piece) * ld + (size_t)head * dv;
  const auto back = [&](uint32_t r, uint32_t i) { return inverse[i * ROWS + r]; };
  tile<ROWS> x;
  for (uint32_t first = 0; first < dv; first += ROWS) {
    const auto out = [&](uint32_t r, uint32_t c) {
      return r < n && first + c < dv ? ps_to_f32(d_o[r * ld + first + c]) : 0.0f;
    };
    x.clear();
    x.template add<false, true>(
        s.stage, ROWS, [&](uint32_t r, uint32_t i) { return pairs[i * ROWS + r]; }, out);
    x.each([&](uint32_t r, uint32_t c, float v) { s.y[r][c] = v; });
    __syncthreads();
    x.clear();
    x.template add<false, true>(s.stage, ROWS, back,
                                [&](uint32_t i, uint32_t c) { return s.y[i][c]; });
    x.each([&](uint32_t r, uint32_t c, float v) {
      if (first + c < dv)
        j.dy[(at * ROWS + r) * dv + first + c] = v;
    });
    for (uint32_t row = 0; row < dk; row += ROWS) {
      x.clear();
      x.template add<false, true>(
          s.stage, ROWS,
          [&](uint32_t r, uint32_t i) { return row + r < dk ? q(i, row + r) * start[i] : 0.0f; },
          out);
      x.each([&](uint32_t r, uint32_t c, float v) {
        if (row + r < dk && first + c < dv)
          j.dstates[(at * dk + row + r) * dv + first + c] = v;
      });
    }
  }
  for (uint32_t first = 0; first < dk; first += ROWS) {
    x.clear();
    x.template add<false, true>(
        s.stage, ROWS, [&](uint32_t r, uint32_t i) { return back(r, i) * (end[i] * k.factor(i)); },
        [&](uint32_t i, uint32_t c) { return first + c < dk ? k.raw(i, first + c) : 0.0f; });
    x.each([&](uint32_t r, uint32_t c, float w) { j.w[(at * ROWS + r) * w_ld + first + c] = w; });
  }
}

/* ---- gradients of a piece -------------------------------------------------------------------- */

struct gradient_shared {
  tile_stage<ROWS> stage;
  piece_gates gates;
  float dp[ROWS][LD], dl[ROWS][LD];   /* dP M, dL beta M; then B + B^T */
  float x[ROWS][LD], f[ROWS][LD];     /* dM M; the terms of dbeta by L */
  float qs[ROWS], ks[ROWS], ke[ROWS]; /* q . S dO, k . S dY, k . dS' D */
  float vy[ROWS], warp[1][32];
  double dg[ROWS], dbeta[ROWS], column[ROWS];
};

/* The piece's matrices of a value head, and what dM and L give to dg and dbeta. */
template <typename T>
__device__ void find_pairs(gradient_shared &s, const delta_job<T> &j, uint32_t piece,
                           uint32_t head) {
  const uint32_t n = j.n_rows(piece), dv = j.a.value_dim, tid = threadIdx.x;
  const size_t at = j.at(piece, head) * ROWS;
  const float *d = j.d + at * dv, *dy = j.dy + at * dv, *pairs = j.pairs + at * ROWS,
              *kk = j.products + j.key_at(piece, head / j.share) * ROWS * ROWS;
  const size_t ld = (size_t)j.a.n_value_heads * dv;
  const T *d_o = j.d_o + (size_t)j.row0(piece) * ld + (size_t)head * dv;
  const auto across = [&](uint32_t c, uint32_t r) { return d[(size_t)r * dv + c]; };
  tile<ROWS> dp, dl;
  dp.clear();
  dl.clear();
  dp.template add<true, false>(
      s.stage, dv,
      [&](uint32_t r, uint32_t c) { return r < n ? ps_to_f32(d_o[r * ld + c]) : 0.0f; }, across);
  dl.template add<true, false>(
      s.stage, dv, [&](uint32_t r, uint32_t c) { return -dy[(size_t)r * dv + c]; }, across);
#pragma unroll
  for (int i = 0; i < dp.EACH; i++) {
    const uint32_t r = dp.row(i), c = dp.col(i);
    const float m = c <= r ? s.gates.decay(r, c) : 0.0f, beta = (float)s.gates.beta[r],
                by_l = c < r ? dl.x[i] * m : 0.0f, of_l = by_l * kk[r * ROWS + c];
    s.dp[r][c] = dp.x[i] * m;
    s.dl[r][c] = by_l * beta;
    s.f[r][c] = of_l;
    s.x[r][c] = dp.x[i] * pairs[r * ROWS + c] + beta * of_l;
  }
  __syncthreads();
  if (tid < ROWS) {
    double sum = 0, of_l = 0;
    for (uint32_t i = 0; i < ROWS; i++) {
      sum += (double)s.x[tid][i];
      of_l += (double)s.f[tid][i];
    }
    s.dg[tid] = sum;
    s.dbeta[tid] = of_l;
  } else if (tid < 2 * ROWS) {
    double sum = 0;
    for (uint32_t i = 0; i < ROWS; i++)
      sum += (double)s.x[i][tid - ROWS];
    s.column[tid - ROWS] = sum;
  }
  __syncthreads();
}

/* dq and dk of a value head, added to those of its key head, and their rows' products. */
template <typename T>
__device__ void add_keys(gradient_shared &s, const delta_job<T> &j, uint32_t piece, uint32_t head,
                         const unit_rows<T> &q, const unit_rows<T> &k) {
  const uint32_t n = j.n_rows(piece), dk = j.a.key_dim, dv = j.a.value_dim, key = head / j.share;
  const size_t at = j.at(piece, head), ld = (size_t)j.a.n_value_heads * dv;
  const float *d = j.d + at * ROWS * dv, *dy = j.dy + at * ROWS * dv,
              *state = j.states + at * dk * dv, *dstate = j.dstates + at * dk * dv;
  const T *d_o = j.d_o + (size_t)j.row0(piece) * ld + (size_t)head * dv;
  float *dq_at = j.dq + j.key_at(piece, key) * ROWS * dk,
        *dk_at = j.dk + j.key_at(piece, key) * ROWS * dk;
  const bool begins = head % j.share == 0;
  for (uint32_t first = 0; first < dk; first += ROWS) {
    const auto across = [&](const float *of) {
      return [=](uint32_t c, uint32_t r) {
        return first + r < dk ? of[(size_t)(first + r) * dv + c] : 0.0f;
      };
    };
    const auto row = [&](const float *of) {
      return [=](uint32_t r, uint32_t c) { return of[(size_t)r * dv + c]; };
    };
    const auto part = [&](const unit_rows<T> &x) {
      return [=](uint32_t r, uint32_t c) { return first + c < dk ? x(r, first + c) : 0.0f; };
    };
    const auto raw = [&](const unit_rows<T> &x) {
      return [=](uint32_t r, uint32_t c) { return first + c < dk ? x.raw(r, first + c) : 0.0f; };
    };
    const auto with = [&](const unit_rows<T> &x) {
      return [=](uint32_t r, uint32_t c, float v) { return part(x)(r, c) * v; };
    };
    const auto put = [&](float *to, const tile<ROWS> &x) {
#pragma unroll
      for (int i = 0; i < x.EACH; i++) {
        const uint32_t r = x.row(i), c = first + x.col(i);
        if (c < dk)
          to[(size_t)r * dk + c] = begins ? x.x[i] : to[(size_t)r * dk + c] + x.x[i];
      }
    };
    tile<ROWS> a, b;
    a.clear(); /* dq */
    a.template add<true, false>(
        s.stage, dv,
        [&](uint32_t r, uint32_t c) { return r < n ? ps_to_f32(d_o[r * ld + c]) : 0.0f; },
        across(state));
    a.row_sums(s.qs, first != 0, with(q));
    a.each([&](uint32_t r, uint32_t, float &x) { x *= s.gates.start[r]; });
    a.template add<true, true>(
        s.stage, ROWS, [&](uint32_t r, uint32_t i) { return s.dp[r][i] * k.factor(i); }, raw(k));
    put(dq_at, a);
    a.clear(); /* dk */
    a.template add<true, false>(s.stage, dv, row(dy), across(state));
    a.row_sums(s.ks, first != 0, with(k));
    b.clear();
    b.template add<true, false>(s.stage, dv, row(d), across(dstate));
    b.row_sums(s.ke, first != 0, with(k));
#pragma unroll
    for (int i = 0; i < a.EACH; i++) {
      const uint32_t r = a.row(i);
      a.x[i] = s.gates.end[r] * b.x[i] - (float)s.gates.beta[r] * s.gates.start[r] * a.x[i];
    }
    a.template add<false, true>(
        s.stage, ROWS, [&](uint32_t r, uint32_t i) { return s.dp[i][r] * q.factor(i); }, raw(q));
    a.template add<true, true>(
        s.stage, ROWS,
        [&](uint32_t r, uint32_t i) { return (s.dl[r][i] + s.dl[i][r]) * k.factor(i); }, raw(k));
    put(dk_at, a);
  }
}

/* dba and dv of a value head, and the piece's terms of da_log and ddt_bias. */
template <typename T>
__device__ void find_gate_gradients(gradient_shared &s, const delta_job<T> &j, uint32_t piece,
                                    uint32_t head) {
  const uint32_t n = j.n_rows(piece), dk = j.a.key_dim, dv = j.a.value_dim, tid = threadIdx.x,
                 lane = tid % 32, t0 = j.row0(piece), nv = j.a.n_value_heads;
  const size_t at = j.at(piece, head);
  const float *dy = j.dy + at * ROWS * dv, *state = j.states + at * dk * dv,
              *dstate = j.dstates + at * dk * dv;
  const T *v = j.qkv + t0 * j.ld + j.values(head);
  T *d_v = j.dqkv + t0 * j.ld + j.values(head);
  float of_v[ROWS / WARPS] = {}; /* of a warp's rows, all loaded before one is stored */
  for (uint32_t c = lane; c < dv; c += 32) {
    float y[ROWS / WARPS];
#pragma unroll
    for (uint32_t u = 0; u < ROWS / WARPS; u++) {
      const uint32_t r = tid / 32 + u * WARPS;
      y[u] = r < n ? dy[(size_t)r * dv + c] : 0.0f;
      of_v[u] = fmaf(y[u], r < n ? ps_to_f32(v[r * j.ld + c]) : 0.0f, of_v[u]);
    }
#pragma unroll
    for (uint32_t u = 0; u < ROWS / WARPS; u++) {
      const uint32_t r = tid / 32 + u * WARPS;
      if (r < n)
        d_v[r * j.ld + c] = ps_from_f32<T>((float)s.gates.beta[r] * y[u]);
    }
  }
#pragma unroll
  for (uint32_t u = 0; u < ROWS / WARPS; u++) {
    of_v[u] = ps_warp_sum(of_v[u]);
    if (lane == 0)
      s.vy[tid / 32 + u * WARPS] = of_v[u];
  }
  float kept[1] = {0.0f};
#pragma unroll 8
  for (uint32_t i = tid; i < dk * dv; i += TILE_THREADS)
    kept[0] = fmaf(state[i], dstate[i], kept[0]);
  ps_block_sum<1>(kept, s.warp);
  __syncthreads();
  if (tid < ROWS) {
    const double start = (double)s.gates.start[tid], ks = (double)s.ks[tid],
                 ke = (double)s.gates.end[tid] * (double)s.ke[tid], qs = (double)s.qs[tid];
    s.dg[tid] += start * (qs - s.gates.beta[tid] * ks) - s.column[tid] - ke;
    s.dbeta[tid] += (double)s.vy[tid] - start * ks;
    s.column[tid] = ke;
  }
  __syncthreads();
  if (tid == 0) { /* dg of a row: the sum of those of G from it on */
    double sum = (double)s.gates.start[n - 1] * (double)kept[0], of_rate = 0, of_bias = 0;
    for (uint32_t i = 0; i < n; i++)
      sum += s.column[i];
    for (uint32_t i = n; i-- > 0;) {
      sum += s.dg[i];
      s.dg[i] = s.gates.doc[i] == (int32_t)i ? 0 : sum; /* no decay where a document begins */
      of_rate += s.dg[i] * s.gates.g[i];
      of_bias += s.dg[i] * s.gates.slope[i];
    }
    double *to = j.weights + ((size_t)(j.piece0 + piece) * nv + head) * 2;
    to[0] = of_rate;
    to[1] = of_bias;
  }
  __syncthreads();
  if (tid < n) {
    const size_t to = (size_t)(t0 + tid) * 2 * nv + head;
    const double beta = s.gates.beta[tid];
    j.dba[to] = ps_from_f32<T>((float)(s.dbeta[tid] * beta * (1 - beta)));
    j.dba[to + nv] = ps_from_f32<T>((float)(s.dg[tid] * s.gates.slope[tid]));
  }
  __syncthreads();
}

/* dq and dk of the piece through their norms: dx = norm (dy scale - y (y . dy) / scale). */
template <typename T>
__device__ void store_keys(const delta_job<T> &j, uint32_t piece, uint32_t key,
                           const unit_rows<T> &q, const unit_rows<T> &k) {
  const uint32_t n = j.n_rows(piece), dk = j.a.key_dim, lane = threadIdx.x % 32;
  for (uint32_t i = threadIdx.x / 32; i < 2 * ROWS; i += WARPS) {
    const uint32_t which = i / ROWS, r = i % ROWS;
    const unit_rows<T> &y = which ? k : q;
    const float *dy = (which ? j.dk : j.dq) + (j.key_at(piece, key) * ROWS + r) * dk;
    T *to =
        j.dqkv + (j.row0(piece) + (size_t)r) * j.ld + (which * j.a.n_key_heads + key) * (size_t)dk;
    float dot = 0.0f;
    if (r >= n)
      continue;
    for (uint32_t c = lane; c < dk; c += 32)
      dot = fmaf(y(r, c), dy[c], dot);
    dot = ps_warp_sum(dot) / y.scale;
    for (uint32_t c = lane; c < dk; c += 32)
      to[c] = ps_from_f32<T>((dy[c] * y.scale - y(r, c) * dot) * y.norm[r]);
  }
}

template <typename T>
__global__ void __launch_bounds__(TILE_THREADS, 2) gradient_k(const delta_job<T> j) {
  extern __shared__ uint4 dynamic[];
  gradient_shared &s = *(gradient_shared *)dynamic;
  const uint32_t piece = blockIdx.x, key = blockIdx.y, dk = j.a.key_dim;
  const float *norms = j.norms + j.key_at(piece, key) * 2 * ROWS;
  const unit_rows<T> q(j, piece, key, 0, norms), k(j, piece, key, 1, norms);
  for (uint32_t h = key * j.share; h < (key + 1) * j.share; h++) {
    find_gates(threadIdx.x < ROWS ? &s.gates : nullptr, j, piece, h, threadIdx.x);
    find_pairs<T>(s, j, piece, h);
    add_keys<T>(s, j, piece, h, q, k);
    __syncthreads();
    find_gate_gradients(s, j, piece, h);
  }
  store_keys(j, piece, key, q, k);
}

} // namespace
#endif
