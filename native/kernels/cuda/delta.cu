/* delta.cu - the gated delta rule in its chunk form (Yang et al. 2024, arXiv 2406.06484 and
 * 2412.06464): rows come in pieces of 64, and what is sequential in a piece becomes products of
 * matrices.
 *
 * Of a piece that begins with the state S, with G_i the sum of g up to row i, where rows i and j
 * are of one document:  M_ij = e^(G_i - G_j) for j <= i;  start_i = e^(G_i), 0 where the document
 * begins inside the piece;  end_j = M_last,j;  keep = start_last:
 *   L_ij = beta_i (k_i . k_j) M_ij for j < i,  P_ij = (q_i . k_j) M_ij for j <= i
 *   D = (I + L)^-1 beta (V - start K S),  O = start Q S + P D,  S' = keep S + K^T end D
 * and backward, from the gradient dS' of S':
 *   dD = P^T dO + end K dS',  dY = (I + L)^-T dD,  dR = -beta dY,  dV = beta dY
 *   dS = keep dS' + Q^T start dO + K^T start dR,  dP = dO D^T,  dL = -dY D^T
 *   dQ = start dO S^T + (dP M) K
 *   dK = start dR S^T + end D dS'^T + (dP M)^T Q + (B + B^T) K,  B = dL beta M
 *
 * Pieces come in segments, so that scratch does not grow with the rows. Of a segment:
 *   prepare_k   a block for each piece and key head: (I + L)^-1, P, decays, lengths of q and k
 *   forward_k   a block for each value head and SLICE columns of its state: piece after piece
 *   backward_k  the same, from the last piece to the first
 *   gradient_k  a block for each piece and key head: dq, dk, dba
 * The backward pass first finds the states with which segments begin, then takes the segments from
 * the last to the first. */
#include "kernels/cuda/tile.cuh"

namespace {

enum { ROWS = PS_DELTA_ROWS, SLICE = 32, WARPS = TILE_THREADS / 32, LD = ROWS + 1 };
static_assert((int)ROWS == (int)TILE_ROWS, "a piece is a tile's rows");

/* A segment's work. @first: its first row in the operands. */
template <typename T> struct delta_job {
  ps__args_delta a;
  uint32_t first, n_pieces, piece0; /* piece0: of all */
  uint32_t share;
  size_t ld; /* elements of a row of qkv */
  float scale;
  const T *qkv, *ba, *a_log, *dt_bias, *d_o;
  const int32_t *doc_start;
  const float *from; /* states or their gradients before the segment; NULL: zeros */
  float *to;         /* and after it */
  T *o, *dqkv, *dba; /* o NULL: forward_k has no output */
  float *inverse, *pairs, *rows, *norms;
  float *d, *dy, *states, *dstates, *dq, *dk; /* d, states NULL: forward_k keeps nothing */
  double *weights;

  __device__ uint32_t row0(uint32_t piece) const { return first + piece * ROWS; }
  __device__ uint32_t n_rows(uint32_t piece) const {
    return min((uint32_t)ROWS, a.n_tokens - row0(piece));
  }
  /* Element @c of the queries' (which = 0) or keys' (1) columns of key head @key. */
  __device__ const T *keys(uint32_t which, uint32_t key) const {
    return qkv + (which * a.n_key_heads + key) * (size_t)a.key_dim;
  }
  __device__ size_t values(uint32_t head) const {
    return 2 * (size_t)a.n_key_heads * a.key_dim + (size_t)head * a.value_dim;
  }
  __device__ size_t at(uint32_t piece, uint32_t head) const {
    return (size_t)piece * a.n_value_heads + head;
  }
  __device__ size_t key_at(uint32_t piece, uint32_t key) const {
    return (size_t)piece * a.n_key_heads + key;
  }
};

/* q (which = 0) or k of a piece: normalized, and q scaled. Rows beyond the last are zeros. */
template <typename T> struct unit_rows {
  const T *x;
  const float *norm;
  size_t ld;
  uint32_t n;
  float scale;
  __device__ unit_rows(const delta_job<T> &j, uint32_t piece, uint32_t key, uint32_t which,
                       const float *norms)
      : x(j.keys(which, key) + j.row0(piece) * j.ld), norm(norms + which * ROWS), ld(j.ld),
        n(j.n_rows(piece)), scale(which ? 1.0f : j.scale) {}
  __device__ __forceinline__ float operator()(uint32_t r, uint32_t c) const {
    return r < n ? ps_to_f32(x[r * ld + c]) * norm[r] * scale : 0.0f;
  }
};

/* ---- gates ----------------------------------------------------------------------------------- */

/* Of a piece and value head, in shared memory; double as in the cpu backend: g is summed. Rows
 * beyond the last have no beta and no decay. */
struct piece_gates {
  double g[ROWS], slope[ROWS], beta[ROWS], sum[ROWS];
  float start[ROWS], end[ROWS];
  int32_t doc[ROWS]; /* with which row of the piece the document begins, below 0: before it */
  /* M_ij, j <= i */
  __device__ __forceinline__ float decay(uint32_t i, uint32_t j) const {
    return doc[i] <= (int32_t)j ? expf((float)(sum[i] - sum[j])) : 0.0f;
  }
};

/* Every thread calls it; a barrier before it where the gates are in use. */
template <typename T>
__device__ void find_gates(piece_gates &s, const delta_job<T> &j, uint32_t piece, uint32_t head) {
  const uint32_t i = threadIdx.x, n = j.n_rows(piece), nv = j.a.n_value_heads;
  if (i < ROWS) {
    const uint32_t t = j.row0(piece) + i;
    double g = 0, slope = 0, beta = 0;
    int64_t doc = 0;
    if (i < n) {
      const size_t at = (size_t)t * 2 * nv + head;
      const double b = (double)ps_to_f32(j.ba[at]),
                   x = (double)ps_to_f32(j.ba[at + nv]) + (double)ps_to_f32(j.dt_bias[head]),
                   rate = exp((double)ps_to_f32(j.a_log[head]));
      beta = 1 / (1 + exp(-b));
      slope = -rate / (1 + exp(-x));
      g = -rate * (x > 40 ? x : log1p(exp(x)));
      doc = (int64_t)j.doc_start[t] - j.a.row0 - j.row0(piece);
    }
    s.g[i] = g, s.slope[i] = slope, s.beta[i] = beta;
    s.doc[i] = doc < 0 ? -1 : (int32_t)doc;
  }
  __syncthreads();
  if (i == 0) {
    double sum = 0;
    for (uint32_t r = 0; r < ROWS; r++)
      s.sum[r] = sum += s.g[r];
  }
  __syncthreads();
  if (i < ROWS) {
    s.start[i] = i < n && s.doc[i] < 0 ? expf((float)s.sum[i]) : 0.0f;
    s.end[i] = i < n ? s.decay(n - 1, i) : 0.0f;
  }
  __syncthreads();
}

/* ---- prepare --------------------------------------------------------------------------------- */

/* t = (I + l)^-1, l strictly lower triangular, [64][LD]: blocks of 16 on the diagonal by
 * substitution, the others from those left of and above them. */
__device__ void invert(float (*t)[LD], const float (*l)[LD]) {
  enum { B = 16, N = ROWS / B };
  const uint32_t r = threadIdx.x / B, c = threadIdx.x % B;
  for (uint32_t i = threadIdx.x; i < ROWS * ROWS; i += TILE_THREADS)
    t[i / ROWS][i % ROWS] = 0.0f;
  __syncthreads();
  if (threadIdx.x < ROWS) { /* r: the block, c: its column */
    float x[B];
#pragma unroll
    for (int i = 0; i < B; i++) {
      x[i] = i == (int)c ? 1.0f : 0.0f;
#pragma unroll
      for (int k = 0; k < i; k++)
        x[i] = fmaf(-l[r * B + i][r * B + k], x[k], x[i]);
      t[r * B + i][r * B + c] = x[i];
    }
  }
  __syncthreads();
  for (uint32_t off = 1; off < N; off++) {
    for (uint32_t i = off; i < N; i++) { /* the sum of l_ik t_kj, j = i - off, in place of t_ij */
      const uint32_t j = i - off;
      float sum = 0.0f;
      for (uint32_t k = j * B; k < i * B; k++)
        sum = fmaf(l[i * B + r][k], t[k][j * B + c], sum);
      t[i * B + r][j * B + c] = sum;
    }
    __syncthreads();
    float x[N];
#pragma unroll
    for (uint32_t i = 1; i < N; i++) {
      x[i] = 0.0f;
      if (i >= off)
        for (uint32_t k = 0; k < B; k++)
          x[i] = fmaf(-t[i * B + r][i * B + k], t[i * B + k][(i - off) * B + c], x[i]);
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 1; i < N; i++)
      if (i >= off)
        t[i * B + r][(i - off) * B + c] = x[i];
    __syncthreads();
  }
}

/* norms[which][row] = 1/|x|, by warps. */
template <typename T>
__device__ void find_norms(float *norms, const delta_job<T> &j, uint32_t piece, uint32_t key) {
  const uint32_t lane = threadIdx.x % 32, n = j.n_rows(piece);
  for (uint32_t i = threadIdx.x / 32; i < 2 * ROWS; i += WARPS) {
    const uint32_t which = i / ROWS, r = i % ROWS;
    const T *x = j.keys(which, key) + (j.row0(piece) + (size_t)r) * j.ld;
    float sum = 0.0f;
    for (uint32_t c = lane; r < n && c < j.a.key_dim; c += 32) {
      const float v = ps_to_f32(x[c]);
      sum = fmaf(v, v, sum);
    }
    sum = ps_warp_sum(sum);
    if (lane == 0)
      norms[i] = r < n ? 1.0f / sqrtf(sum + 1e-6f) : 0.0f;
  }
}

struct prepare_shared {
  tile_stage<ROWS> stage;
  float l[ROWS][LD], t[ROWS][LD], norms[2 * ROWS];
  piece_gates gates;
};

template <typename T, bool MMA>
__global__ void __launch_bounds__(TILE_THREADS) prepare_k(const delta_job<T> j) {
  extern __shared__ uint4 dynamic[];
  prepare_shared &s = *(prepare_shared *)dynamic;
  const uint32_t piece = blockIdx.x, key = blockIdx.y, dk = j.a.key_dim;
  tile<ROWS, MMA> kk, qk;
  find_norms(s.norms, j, piece, key);
  __syncthreads();
  if (threadIdx.x < 2 * ROWS)
    j.norms[j.key_at(piece, key) * 2 * ROWS + threadIdx.x] = s.norms[threadIdx.x];
  const unit_rows<T> q(j, piece, key, 0, s.norms), k(j, piece, key, 1, s.norms);
  const auto across = [&](uint32_t c, uint32_t r) { return k(r, c); };
  kk.clear();
  qk.clear();
  kk.template add<true, false>(s.stage, dk, k, across);
  qk.template add<true, false>(s.stage, dk, q, across);
  for (uint32_t h = key * j.share; h < (key + 1) * j.share; h++) {
    float *inverse = j.inverse + j.at(piece, h) * ROWS * ROWS,
          *pairs = j.pairs + j.at(piece, h) * ROWS * ROWS,
          *rows = j.rows + j.at(piece, h) * 3 * ROWS;
    find_gates(s.gates, j, piece, h);
    if (threadIdx.x < ROWS) {
      rows[threadIdx.x] = (float)s.gates.beta[threadIdx.x];
      rows[ROWS + threadIdx.x] = s.gates.start[threadIdx.x];
      rows[2 * ROWS + threadIdx.x] = s.gates.end[threadIdx.x];
    }
#pragma unroll
    for (int i = 0; i < kk.EACH; i++) {
      const uint32_t r = kk.row(i), c = kk.col(i);
      const float m = c <= r ? s.gates.decay(r, c) : 0.0f;
      s.l[r][c] = c < r ? (float)s.gates.beta[r] * kk.x[i] * m : 0.0f;
      pairs[r * ROWS + c] = qk.x[i] * m;
    }
    __syncthreads();
    invert(s.t, s.l);
    for (uint32_t i = threadIdx.x; i < ROWS * ROWS; i += TILE_THREADS)
      inverse[i] = s.t[i / ROWS][i % ROWS];
    __syncthreads();
  }
}

/* ---- piece after piece ----------------------------------------------------------------------- */

/* A value head's state, or its gradient: columns [first, first + n) of it, in shared memory. */
struct slice_shared {
  tile_stage<SLICE> stage;
  float y[ROWS][SLICE];
  float state[1][SLICE]; /* [dk] */
};

template <typename T> struct slice_of {
  uint32_t head, key, first, n;
  __device__ slice_of(const delta_job<T> &j)
      : head(blockIdx.y), key(head / j.share), first(blockIdx.x * SLICE),
        n(min((uint32_t)SLICE, j.a.value_dim - first)) {}
  /* Between shared memory and [nv,dk,dv] at @p; p NULL: zeros. */
  __device__ void load(const delta_job<T> &j, float (*s)[SLICE], const float *p) const {
    for (uint32_t i = threadIdx.x; i < j.a.key_dim * SLICE; i += TILE_THREADS) {
      const uint32_t r = i / SLICE, c = i % SLICE;
      s[r][c] = p && c < n ? p[((size_t)head * j.a.key_dim + r) * j.a.value_dim + first + c] : 0.0f;
    }
  }
  __device__ void store(const delta_job<T> &j, float (*s)[SLICE], float *p) const {
    for (uint32_t i = threadIdx.x; i < j.a.key_dim * SLICE; i += TILE_THREADS) {
      const uint32_t r = i / SLICE, c = i % SLICE;
      if (c < n)
        p[((size_t)head * j.a.key_dim + r) * j.a.value_dim + first + c] = s[r][c];
    }
  }
};

template <typename T, bool MMA>
__global__ void __launch_bounds__(TILE_THREADS) forward_k(const delta_job<T> j) {
  extern __shared__ uint4 dynamic[];
  slice_shared &s = *(slice_shared *)dynamic;
  const slice_of<T> of(j);
  const uint32_t dk = j.a.key_dim, dv = j.a.value_dim;
  const size_t states = (size_t)j.a.n_value_heads * dk * dv;
  const auto state = [&](uint32_t r, uint32_t c) { return s.state[r][c]; };
  const auto y = [&](uint32_t r, uint32_t c) { return s.y[r][c]; };
  of.load(j, s.state, j.from);
  __syncthreads();
  for (uint32_t piece = 0; piece < j.n_pieces; piece++) {
    const uint32_t n = j.n_rows(piece), t0 = j.row0(piece);
    const size_t at = j.at(piece, of.head);
    const float *inverse = j.inverse + at * ROWS * ROWS, *pairs = j.pairs + at * ROWS * ROWS,
                *beta = j.rows + at * 3 * ROWS, *start = beta + ROWS, *end = start + ROWS,
                *norms = j.norms + j.key_at(piece, of.key) * 2 * ROWS;
    const unit_rows<T> q(j, piece, of.key, 0, norms), k(j, piece, of.key, 1, norms);
    const T *v = j.qkv + t0 * j.ld + j.values(of.head) + of.first;
    tile<SLICE, MMA> a, o;
    if (j.states)
      of.store(j, s.state, j.states + piece * states);
    a.clear();
    a.template add<true, true>(s.stage, dk, k, state);
    a.each([&](uint32_t r, uint32_t c, float x) {
      const float value = r < n && c < of.n ? ps_to_f32(v[r * j.ld + c]) : 0.0f;
      s.y[r][c] = beta[r] * (value - start[r] * x);
    });
    o.clear();
    if (j.o) {
      o.template add<true, true>(s.stage, dk, q, state);
      o.each([&](uint32_t r, uint32_t, float &x) { x *= start[r]; });
    }
    __syncthreads();
    a.clear();
    a.template add<true, true>(
        s.stage, ROWS, [&](uint32_t r, uint32_t c) { return inverse[r * ROWS + c]; }, y);
    a.each([&](uint32_t r, uint32_t c, float x) {
      s.y[r][c] = x;
      if (j.d && c < of.n)
        j.d[(at * ROWS + r) * dv + of.first + c] = x;
    });
    __syncthreads();
    if (j.o) {
      T *out = j.o + ((size_t)t0 * j.a.n_value_heads + of.head) * dv + of.first;
      o.template add<true, true>(
          s.stage, ROWS, [&](uint32_t r, uint32_t c) { return pairs[r * ROWS + c]; }, y);
      o.each([&](uint32_t r, uint32_t c, float x) {
        if (r < n && c < of.n)
          out[(size_t)r * j.a.n_value_heads * dv + c] = ps_from_f32<T>(x);
      });
    }
    const float keep = start[n - 1];
    for (uint32_t first = 0; first < dk; first += ROWS) {
      a.clear();
      a.template add<false, true>(
          s.stage, ROWS,
          [&](uint32_t r, uint32_t i) { return first + r < dk ? k(i, first + r) * end[i] : 0.0f; },
          y);
      a.each([&](uint32_t r, uint32_t c, float x) {
        if (first + r < dk)
          s.state[first + r][c] = fmaf(keep, s.state[first + r][c], x);
      });
    }
    __syncthreads();
  }
  if (j.to)
    of.store(j, s.state, j.to);
}

template <typename T, bool MMA>
__global__ void __launch_bounds__(TILE_THREADS) backward_k(const delta_job<T> j) {
  extern __shared__ uint4 dynamic[];
  slice_shared &s = *(slice_shared *)dynamic;
  const slice_of<T> of(j);
  const uint32_t dk = j.a.key_dim, dv = j.a.value_dim;
  const size_t states = (size_t)j.a.n_value_heads * dk * dv;
  const auto state = [&](uint32_t r, uint32_t c) { return s.state[r][c]; };
  const auto y = [&](uint32_t r, uint32_t c) { return s.y[r][c]; };
  of.load(j, s.state, j.from);
  __syncthreads();
  for (uint32_t piece = j.n_pieces; piece-- > 0;) {
    const uint32_t n = j.n_rows(piece), t0 = j.row0(piece);
    const size_t at = j.at(piece, of.head);
    const float *inverse = j.inverse + at * ROWS * ROWS, *pairs = j.pairs + at * ROWS * ROWS,
                *beta = j.rows + at * 3 * ROWS, *start = beta + ROWS, *end = start + ROWS,
                *norms = j.norms + j.key_at(piece, of.key) * 2 * ROWS;
    const unit_rows<T> q(j, piece, of.key, 0, norms), k(j, piece, of.key, 1, norms);
    const T *d_o = j.d_o + ((size_t)t0 * j.a.n_value_heads + of.head) * dv + of.first;
    const auto out = [&](uint32_t r, uint32_t c) {
      return r < n && c < of.n ? ps_to_f32(d_o[(size_t)r * j.a.n_value_heads * dv + c]) : 0.0f;
    };
    T *d_v = j.dqkv + t0 * j.ld + j.values(of.head) + of.first;
    tile<SLICE, MMA> a;
    of.store(j, s.state, j.dstates + piece * states);
    a.clear();
    a.template add<true, true>(s.stage, dk, k, state);
    a.each([&](uint32_t r, uint32_t, float &x) { x *= end[r]; });
    a.template add<false, true>(
        s.stage, ROWS, [&](uint32_t r, uint32_t i) { return pairs[i * ROWS + r]; }, out);
    a.each([&](uint32_t r, uint32_t c, float x) { s.y[r][c] = x; });
    __syncthreads();
    a.clear();
    a.template add<false, true>(
        s.stage, ROWS, [&](uint32_t r, uint32_t i) { return inverse[i * ROWS + r]; }, y);
    a.each([&](uint32_t r, uint32_t c, float x) {
      const float back = beta[r] * x;
      s.y[r][c] = -back;
      if (c < of.n)
        j.dy[(at * ROWS + r) * dv + of.first + c] = x;
      if (r < n && c < of.n)
        d_v[r * j.ld + c] = ps_from_f32<T>(back);
    });
    __syncthreads();
    const float keep = start[n - 1];
    for (uint32_t first = 0; first < dk; first += ROWS) {
      const auto across = [&](const unit_rows<T> &x) {
        return [=](uint32_t r, uint32_t i) {
          return first + r < dk ? x(i, first + r) * start[i] : 0.0f;
        };
      };
      a.clear();
      a.template add<false, true>(s.stage, ROWS, across(q), out);
      a.template add<false, true>(s.stage, ROWS, across(k), y);
      a.each([&](uint32_t r, uint32_t c, float x) {
        if (first + r < dk)
          s.state[first + r][c] = fmaf(keep, s.state[first + r][c], x);
      });
    }
    __syncthreads();
  }
  of.store(j, s.state, j.to);
}

/* ---- gradients of a piece -------------------------------------------------------------------- */

struct gradient_shared {
  tile_stage<ROWS> stage;
  piece_gates gates;
  float dp[ROWS][LD], dl[ROWS][LD];            /* dP M, dL beta M; then B + B^T */
  float x[ROWS][LD], f[ROWS][LD];              /* dM M; the terms of dbeta by L */
  float qs[ROWS][2], ks[ROWS][2], ke[ROWS][2]; /* q . S dO, k . S dY, k . dS' D */
  float vy[ROWS], warp[1][32];
  double dg[ROWS], dbeta[ROWS], column[ROWS];
};

/* The piece's matrices of a value head, and what dM and L give to dg and dbeta. */
template <typename T, bool MMA>
__device__ void find_pairs(gradient_shared &s, const delta_job<T> &j, uint32_t piece, uint32_t head,
                           const tile<ROWS, MMA> &kk, const tile<ROWS, MMA> &qk) {
  const uint32_t n = j.n_rows(piece), dv = j.a.value_dim, tid = threadIdx.x;
  const size_t at = j.at(piece, head) * ROWS;
  const float *d = j.d + at * dv, *dy = j.dy + at * dv;
  const size_t ld = (size_t)j.a.n_value_heads * dv;
  const T *d_o = j.d_o + (size_t)j.row0(piece) * ld + (size_t)head * dv;
  const auto across = [&](uint32_t c, uint32_t r) { return d[(size_t)r * dv + c]; };
  tile<ROWS, MMA> dp, dl;
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
                by_p = dp.x[i] * m, by_l = c < r ? dl.x[i] * m : 0.0f;
    s.dp[r][c] = by_p;
    s.dl[r][c] = by_l * beta;
    s.f[r][c] = by_l * kk.x[i];
    s.x[r][c] = by_p * qk.x[i] + beta * (by_l * kk.x[i]);
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
template <typename T, bool MMA>
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
    tile<ROWS, MMA> dq, by_s, by_ds;
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
    dq.clear();
    by_s.clear();
    by_ds.clear();
    dq.template add<true, false>(
        s.stage, dv,
        [&](uint32_t r, uint32_t c) { return r < n ? ps_to_f32(d_o[r * ld + c]) : 0.0f; },
        across(state));
    by_s.template add<true, false>(s.stage, dv, row(dy), across(state));
    by_ds.template add<true, false>(s.stage, dv, row(d), across(dstate));
    const auto with = [&](const unit_rows<T> &x) {
      return [=](uint32_t r, uint32_t c, float v) { return part(x)(r, c) * v; };
    };
    dq.row_sums(s.qs, first != 0, with(q));
    by_s.row_sums(s.ks, first != 0, with(k));
    by_ds.row_sums(s.ke, first != 0, with(k));
#pragma unroll
    for (int i = 0; i < dq.EACH; i++) {
      const uint32_t r = dq.row(i);
      const float start = s.gates.start[r];
      dq.x[i] *= start;
      by_s.x[i] = s.gates.end[r] * by_ds.x[i] - (float)s.gates.beta[r] * start * by_s.x[i];
    }
    dq.template add<true, true>(
        s.stage, ROWS, [&](uint32_t r, uint32_t i) { return s.dp[r][i]; }, part(k));
    by_s.template add<false, true>(
        s.stage, ROWS, [&](uint32_t r, uint32_t i) { return s.dp[i][r]; }, part(q));
    by_s.template add<true, true>(
        s.stage, ROWS, [&](uint32_t r, uint32_t i) { return s.dl[r][i] + s.dl[i][r]; }, part(k));
#pragma unroll
    for (int i = 0; i < dq.EACH; i++) {
      const uint32_t r = dq.row(i), c = first + dq.col(i);
      if (c >= dk)
        continue;
      float *const to_q = dq_at + (size_t)r * dk + c, *const to_k = dk_at + (size_t)r * dk + c;
      *to_q = begins ? dq.x[i] : *to_q + dq.x[i];
      *to_k = begins ? by_s.x[i] : *to_k + by_s.x[i];
    }
  }
}

/* dba of a value head, and the piece's terms of da_log and ddt_bias. */
template <typename T>
__device__ void find_gate_gradients(gradient_shared &s, const delta_job<T> &j, uint32_t piece,
                                    uint32_t head) {
  const uint32_t n = j.n_rows(piece), dk = j.a.key_dim, dv = j.a.value_dim, tid = threadIdx.x,
                 lane = tid % 32, t0 = j.row0(piece), nv = j.a.n_value_heads;
  const size_t at = j.at(piece, head);
  const float *dy = j.dy + at * ROWS * dv, *state = j.states + at * dk * dv,
              *dstate = j.dstates + at * dk * dv;
  const T *v = j.qkv + t0 * j.ld + j.values(head);
  for (uint32_t r = tid / 32; r < ROWS; r += WARPS) {
    float sum = 0.0f;
    for (uint32_t c = lane; r < n && c < dv; c += 32)
      sum = fmaf(dy[(size_t)r * dv + c], ps_to_f32(v[r * j.ld + c]), sum);
    sum = ps_warp_sum(sum);
    if (lane == 0)
      s.vy[r] = sum;
  }
  float kept[1] = {0.0f};
  for (uint32_t i = tid; i < dk * dv; i += TILE_THREADS)
    kept[0] = fmaf(state[i], dstate[i], kept[0]);
  ps_block_sum<1>(kept, s.warp);
  __syncthreads();
  if (tid < ROWS) {
    const double start = (double)s.gates.start[tid], ks = (double)s.ks[tid][0] + s.ks[tid][1],
                 ke = (double)s.gates.end[tid] * ((double)s.ke[tid][0] + s.ke[tid][1]),
                 qs = (double)s.qs[tid][0] + s.qs[tid][1];
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

template <typename T, bool MMA>
__global__ void __launch_bounds__(TILE_THREADS) gradient_k(const delta_job<T> j) {
  extern __shared__ uint4 dynamic[];
  gradient_shared &s = *(gradient_shared *)dynamic;
  const uint32_t piece = blockIdx.x, key = blockIdx.y, dk = j.a.key_dim;
  const float *norms = j.norms + j.key_at(piece, key) * 2 * ROWS;
  const unit_rows<T> q(j, piece, key, 0, norms), k(j, piece, key, 1, norms);
  const auto across = [&](uint32_t c, uint32_t r) { return k(r, c); };
  tile<ROWS, MMA> kk, qk;
  kk.clear();
  qk.clear();
  kk.template add<true, false>(s.stage, dk, k, across);
  qk.template add<true, false>(s.stage, dk, q, across);
  for (uint32_t h = key * j.share; h < (key + 1) * j.share; h++) {
    find_gates(s.gates, j, piece, h);
    find_pairs<T, MMA>(s, j, piece, h, kk, qk);
    add_keys<T, MMA>(s, j, piece, h, q, k);
    __syncthreads();
    find_gate_gradients(s, j, piece, h);
  }
  store_keys(j, piece, key, q, k);
}

/* A warp a value head: the pieces' terms by turns to the lanes, then a tree. */
template <typename T>
__global__ void __launch_bounds__(32)
    weights_k(const double *terms, uint32_t n_pieces, T *da_log, T *ddt_bias, bool accumulate) {
  const uint32_t head = blockIdx.x, nv = gridDim.x;
  double sum[2] = {0, 0};
  for (uint32_t p = threadIdx.x; p < n_pieces; p += 32)
    for (int i = 0; i < 2; i++)
      sum[i] += terms[((size_t)p * nv + head) * 2 + i];
  for (int i = 0; i < 2; i++)
    for (int w = 16; w > 0; w /= 2)
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], w);
  if (threadIdx.x)
    return;
  T *const to[] = {da_log + head, ddt_bias + head};
  for (int i = 0; i < 2; i++)
    *to[i] = ps_from_f32<T>((float)(sum[i] + (accumulate ? (double)ps_to_f32(*to[i]) : 0)));
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T> delta_job<T> job_of(const ps_launch *l, const ps_delta_scratch &at) {
  delta_job<T> j = {};
  char *scratch = (char *)((const ps__cuda_exec *)l->exec)->scratch;
  j.a = *(const ps__args_delta *)l->args;
  j.share = j.a.n_value_heads / j.a.n_key_heads;
  j.ld = 2 * (size_t)j.a.n_key_heads * j.a.key_dim + (size_t)j.a.n_value_heads * j.a.value_dim;
  j.scale = (float)(1 / sqrt((double)j.a.key_dim));
  j.qkv = (const T *)l->ptr[0];
  j.ba = (const T *)l->ptr[1];
  j.a_log = (const T *)l->ptr[2];
  j.dt_bias = (const T *)l->ptr[3];
  j.doc_start = (const int32_t *)l->ptr[4];
  j.inverse = (float *)(scratch + at.inverse);
  j.pairs = (float *)(scratch + at.pairs);
  j.rows = (float *)(scratch + at.rows);
  j.norms = (float *)(scratch + at.norms);
  return j;
}

uint32_t n_pieces(const ps__args_delta &a) { return ps_ceil_div(a.n_tokens, ROWS); }
uint32_t n_segments(const ps__args_delta &a) { return ps_ceil_div(n_pieces(a), PS_DELTA_SEGMENT); }

/* @j becomes segment @i. */
template <typename T> void enter(delta_job<T> &j, uint32_t i) {
  const uint32_t all = n_pieces(j.a);
  j.piece0 = i * PS_DELTA_SEGMENT;
  j.first = j.piece0 * ROWS;
  j.n_pieces = all - j.piece0 < PS_DELTA_SEGMENT ? all - j.piece0 : PS_DELTA_SEGMENT;
}

/* On a block for each of @across and @heads, with shared memory above 48 KB too. */
template <typename T>
cudaError_t launch(void (*kernel)(const delta_job<T>), const delta_job<T> &j, uint32_t across,
                   uint32_t heads, size_t bytes, cudaStream_t stream) {
  const cudaError_t e = /* of this device's context */
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
  if (e != cudaSuccess)
    return e;
  kernel<<<dim3(across, heads), TILE_THREADS, bytes, stream>>>(j);
  return cudaGetLastError();
}
template <typename T>
cudaError_t launch_by_piece(void (*kernel)(const delta_job<T>), const delta_job<T> &j, size_t bytes,
                            cudaStream_t stream) {
  return launch(kernel, j, j.n_pieces, j.a.n_key_heads, bytes, stream);
}
template <typename T>
cudaError_t launch_by_slice(void (*kernel)(const delta_job<T>), const delta_job<T> &j,
                            cudaStream_t stream) {
  return launch(kernel, j, ps_ceil_div(j.a.value_dim, SLICE), j.a.n_value_heads,
                sizeof(slice_shared) + (j.a.key_dim - 1) * SLICE * sizeof(float), stream);
}

/* prepare_k and forward_k of segment @i of @j. */
template <typename T, bool MMA>
cudaError_t forward(delta_job<T> &j, uint32_t i, const float *from, float *to,
                    cudaStream_t stream) {
  enter(j, i);
  j.from = from;
  j.to = to;
  const cudaError_t e = launch_by_piece<T>(prepare_k<T, MMA>, j, sizeof(prepare_shared), stream);
  return e != cudaSuccess ? e : launch_by_slice<T>(forward_k<T, MMA>, j, stream);
}

template <typename T, bool MMA>
cudaError_t run_fwd(const ps_launch *l, const ps_delta_scratch &at) {
  delta_job<T> j = job_of<T>(l, at);
  float *const before = j.a.row0 ? (float *)l->ptr[5] : nullptr, *const after = (float *)l->ptr[7];
  cudaError_t e = cudaSuccess;
  j.o = (T *)l->ptr[6];
  for (uint32_t i = 0; i < n_segments(j.a) && e == cudaSuccess; i++)
    e = forward<T, MMA>(j, i, i ? after : before, after, ((const ps__cuda_exec *)l->exec)->stream);
  return e;
}

/* Segment @i of the backward pass, after those behind it. */
template <typename T, bool MMA>
cudaError_t backward(delta_job<T> &j, uint32_t i, const float *from, float *carry, bool has_carry,
                     cudaStream_t stream) {
  cudaError_t e = forward<T, MMA>(j, i, from, nullptr, stream);
  j.from = has_carry ? carry : nullptr;
  j.to = carry;
  if (e == cudaSuccess)
    e = launch_by_slice<T>(backward_k<T, MMA>, j, stream);
  return e != cudaSuccess
             ? e
             : launch_by_piece<T>(gradient_k<T, MMA>, j, sizeof(gradient_shared), stream);
}

template <typename T, bool MMA>
cudaError_t run_bwd(const ps_launch *l, const ps_delta_scratch &at) {
  delta_job<T> j = job_of<T>(l, at);
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  char *scratch = (char *)((const ps__cuda_exec *)l->exec)->scratch;
  const size_t states = (size_t)j.a.n_value_heads * j.a.key_dim * j.a.value_dim;
  float *const borders = (float *)(scratch + at.borders), *const carry = (float *)l->ptr[7];
  const auto border = [&](uint32_t i) {
    return i ? borders + i * states : j.a.row0 ? (float *)l->ptr[5] : nullptr;
  };
  const uint32_t n = n_segments(j.a);
  cudaError_t e = cudaSuccess;
  for (uint32_t i = 0; i + 1 < n && e == cudaSuccess; i++)
    e = forward<T, MMA>(j, i, border(i), border(i + 1), stream);
  j.d_o = (const T *)l->ptr[6];
  j.dqkv = (T *)l->ptr[8];
  j.dba = (T *)l->ptr[9];
  j.d = (float *)(scratch + at.d);
  j.dy = (float *)(scratch + at.dy);
  j.states = (float *)(scratch + at.states);
  j.dstates = (float *)(scratch + at.dstates);
  j.dq = (float *)(scratch + at.dq);
  j.dk = (float *)(scratch + at.dk);
  j.weights = (double *)(scratch + at.weights);
  for (uint32_t i = n; i-- > 0 && e == cudaSuccess;)
    e = backward<T, MMA>(j, i, border(i), carry, i + 1 < n || j.a.accumulate_carry, stream);
  if (e != cudaSuccess)
    return e;
  weights_k<T><<<j.a.n_value_heads, 32, 0, stream>>>(j.weights, n_pieces(j.a), (T *)l->ptr[10],
                                                     (T *)l->ptr[11], j.a.accumulate_dw != 0);
  return cudaGetLastError();
}

} // namespace

/* delta_fwd
 * math    above
 * shapes  as the cpu backend's; any dk, dv up to PS_MAX_DELTA_DIM, any number of rows
 * bytes   qkv and o by each slice of 32 columns; scratch: 33 KB for each value head of a segment's
 *         16 pieces at most
 * determinism  bitwise: each sum is one block's, in order.
 * reference    the cpu backend's, row by row: the errors of a chain of states */
extern "C" ps_status ps__cuda_delta_fwd(const ps_launch *l) {
  const ps__args_delta *a = (const ps__args_delta *)l->args;
  const ps_delta_scratch at = ps_delta_layout(a, false);
  const ps_status st = ps_check(l, "delta_fwd", 8, a->dt, at.bytes);
  if (st != PS_OK)
    return st;
  cudaError_t e = cudaSuccess;
  PS_BY_TYPE(a->dt, e = run_fwd<T, false>(l, at));
  return ps_launched("delta_fwd", e);
}

/* delta_bwd
 * math    above, then through sigmoid, softplus and the norms of q and k
 * shapes  as delta_fwd
 * bytes   scratch: matrices, states and their gradients of a segment, a state a segment
 * determinism  bitwise: value heads of a key head in order; pieces' terms of weights in a fixed
 *              order, in double.
 * reference    the cpu backend's */
extern "C" ps_status ps__cuda_delta_bwd(const ps_launch *l) {
  const ps__args_delta *a = (const ps__args_delta *)l->args;
  const ps_delta_scratch at = ps_delta_layout(a, true);
  const ps_status st = ps_check(l, "delta_bwd", 12, a->dt, at.bytes);
  if (st != PS_OK)
    return st;
  cudaError_t e = cudaSuccess;
  PS_BY_TYPE(a->dt, e = run_bwd<T, false>(l, at));
  return ps_launched("delta_bwd", e);
}
