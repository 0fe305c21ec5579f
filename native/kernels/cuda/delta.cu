/* delta.cu - the gated delta rule in its chunk form (Yang et al. 2024, arXiv 2406.06484 and
 * 2412.06464): rows come in pieces of 64, and what is sequential in a piece becomes products of
 * matrices.
 *
 * Of a piece that begins with the state S, with G_i the sum of g up to row i, where rows i and j
 * are of one document:  M_ij = e^(G_i - G_j) for j <= i;  start_i = e^(G_i), 0 where the document
 * begins inside the piece;  end_j = M_last,j;  keep = start_last:
 *   L_ij = beta_i (k_i . k_j) M_ij for j < i,  P_ij = (q_i . k_j) M_ij for j <= i
 *   I = (1 + L)^-1,  D = I beta V - (I beta start K) S
 *   O = start Q S + P D,  S' = keep S + K^T end D
 * and backward, from the gradient dS' of S':
 *   dY = I^T P^T dO + (I^T end K) dS',  dR = -beta dY,  dV = beta dY
 *   dS = keep dS' + Q^T start dO + K^T start dR,  dP = dO D^T,  dL = -dY D^T
 *   dQ = start dO S^T + (dP M) K
 *   dK = start dR S^T + end D dS'^T + (dP M)^T Q + (B + B^T) K,  B = dL beta M
 * Both chains are X = U + W S, S <- keep S (+ H) + K^T factor X, of which only S goes from piece to
 * piece: all else is of each piece alone.
 *
 * Pieces come in segments, so that scratch does not grow with the rows. Of a segment:
 *   prepare_k   a block for each piece and key head: I, P, decays, lengths of q and k; U, W
 *   chain_k     a block for each value head and SLICE columns of its state, piece after piece: D, S
 *   output_k    a block for each piece, value head and 64 columns: O
 *   reverse_k   a block for each piece and value head: U, W, H of the backward chain
 *   chain_k     from the last piece to the first: dY, dS
 *   gradient_k  a block for each piece and key head: dqkv, dba
 * The backward pass first finds the states with which segments begin, then takes the segments from
 * the last to the first. */
#include "kernels/cuda/delta_gradient.cuh"
#include "kernels/cuda/delta_mma.h"

namespace {

/* ---- prepare --------------------------------------------------------------------------------- */

/* norms[which][row] = 1/|x|: of four rows at a time by a warp. */
template <typename T>
__device__ void find_norms(float *norms, const delta_job<T> &j, uint32_t piece, uint32_t key) {
  enum { EACH = 4 };
  static_assert(ROWS % (EACH * WARPS) == 0, "rows of q or of k");
  const uint32_t lane = threadIdx.x % 32, n = j.n_rows(piece);
  for (uint32_t i = threadIdx.x / 32; i < 2 * ROWS; i += EACH * WARPS) {
    const uint32_t which = i / ROWS, r = i % ROWS;
    const T *x = j.keys(which, key) + j.row0(piece) * j.ld;
    float sum[EACH] = {};
#pragma unroll 2
    for (uint32_t c = lane; c < j.a.key_dim; c += 32)
#pragma unroll
      for (uint32_t u = 0; u < EACH; u++) {
        const float v = r + u * WARPS < n ? ps_to_f32(x[(r + u * WARPS) * j.ld + c]) : 0.0f;
        sum[u] = fmaf(v, v, sum[u]);
      }
#pragma unroll
    for (uint32_t u = 0; u < EACH; u++) {
      const float all = ps_warp_sum(sum[u]);
      if (lane == 0)
        norms[i + u * WARPS] = r + u * WARPS < n ? 1.0f / sqrtf(all + 1e-6f) : 0.0f;
    }
  }
}

/* kk = k k^T, qk = q k^T of a piece and key head. */
template <typename T>
__device__ void find_products(tile_stage<ROWS> &stage, uint32_t dk, const unit_rows<T> &q,
                              const unit_rows<T> &k, tile<ROWS> &kk, tile<ROWS> &qk) {
  const auto across = [&](uint32_t c, uint32_t r) { return k.raw(r, c); };
  kk.clear();
  qk.clear();
  kk.template add<true, false>(
      stage, dk, [&](uint32_t r, uint32_t c) { return k.raw(r, c); }, across);
  qk.template add<true, false>(
      stage, dk, [&](uint32_t r, uint32_t c) { return q.raw(r, c); }, across);
  kk.each([&](uint32_t r, uint32_t c, float &x) { x *= k.factor(r) * k.factor(c); });
  qk.each([&](uint32_t r, uint32_t c, float &x) { x *= q.factor(r) * k.factor(c); });
}

struct prepare_shared {
  tile_stage<ROWS> stage;
  float l[ROWS][LD], t[ROWS][LD], norms[2 * ROWS];
  piece_gates gates;
};

/* U and W of the forward chain. */
template <typename T>
__device__ void begin_chain(prepare_shared &s, const delta_job<T> &j, uint32_t piece, uint32_t head,
                            const unit_rows<T> &k) {
  const uint32_t n = j.n_rows(piece), dk = j.a.key_dim, dv = j.a.value_dim;
  const size_t at = j.at(piece, head) * ROWS, w_ld = j.w_ld();
  const T *v = j.qkv + j.row0(piece) * j.ld + j.values(head);
  tile<ROWS> x;
  for (uint32_t first = 0; first < dv; first += ROWS) {
    x.clear();
    x.template add<true, true>(
        s.stage, ROWS, [&](uint32_t r, uint32_t i) { return s.t[r][i] * (float)s.gates.beta[i]; },
        [&](uint32_t i, uint32_t c) {
          return i < n && first + c < dv ? ps_to_f32(v[i * j.ld + first + c]) : 0.0f;
        });
    x.each([&](uint32_t r, uint32_t c, float u) {
      if (first + c < dv)
        j.d[(at + r) * dv + first + c] = u;
    });
  }
  for (uint32_t first = 0; first < dk; first += ROWS) {
    x.clear();
    x.template add<true, true>(
        s.stage, ROWS,
        [&](uint32_t r, uint32_t i) {
          return s.t[r][i] * (-(float)s.gates.beta[i] * s.gates.start[i] * k.factor(i));
        },
        [&](uint32_t i, uint32_t c) { return first + c < dk ? k.raw(i, first + c) : 0.0f; });
    x.each([&](uint32_t r, uint32_t c, float w) { j.w[(at + r) * w_ld + first + c] = w; });
  }
}

template <typename T>
__global__ void __launch_bounds__(TILE_THREADS, 2) prepare_k(const delta_job<T> j) {
  extern __shared__ uint4 dynamic[];
  prepare_shared &s = *(prepare_shared *)dynamic;
  const uint32_t piece = blockIdx.x, key = blockIdx.y, dk = j.a.key_dim;
  tile<ROWS> kk, qk;
  find_norms(s.norms, j, piece, key);
  __syncthreads();
  if (threadIdx.x < 2 * ROWS)
    j.norms[j.key_at(piece, key) * 2 * ROWS + threadIdx.x] = s.norms[threadIdx.x];
  const unit_rows<T> q(j, piece, key, 0, s.norms), k(j, piece, key, 1, s.norms);
  find_products<T>(s.stage, dk, q, k, kk, qk);
  if (j.products)
    kk.each([&](uint32_t r, uint32_t c, float x) {
      j.products[(j.key_at(piece, key) * ROWS + r) * ROWS + c] = x;
    });
  for (uint32_t h = key * j.share; h < (key + 1) * j.share; h++) {
    float *pairs = j.pairs + j.at(piece, h) * ROWS * ROWS,
          *rows = j.rows + j.at(piece, h) * FACTORS * ROWS;
    find_gates(threadIdx.x < ROWS ? &s.gates : nullptr, j, piece, h, threadIdx.x);
    if (threadIdx.x < ROWS) {
      const uint32_t i = threadIdx.x;
      const float beta = (float)s.gates.beta[i], start = s.gates.start[i], end = s.gates.end[i];
      rows[BETA * ROWS + i] = beta;
      rows[START * ROWS + i] = start;
      rows[END * ROWS + i] = end;
      rows[FORWARD * ROWS + i] = end * k.factor(i);
      rows[BACKWARD * ROWS + i] = -beta * start * k.factor(i);
    }
#pragma unroll
    for (int i = 0; i < kk.EACH; i++) {
      const uint32_t r = kk.row(i), c = kk.col(i);
      const float m = c <= r ? s.gates.decay(r, c) : 0.0f;
      s.l[r][c] = c < r ? (float)s.gates.beta[r] * kk.x[i] * m : 0.0f;
      s.t[r][c] = 0.0f;
      pairs[r * ROWS + c] = qk.x[i] * m;
    }
    __syncthreads();
    invert(s.t, s.l);
    if (j.inverse)
      for (uint32_t i = threadIdx.x; i < ROWS * ROWS; i += TILE_THREADS)
        j.inverse[j.at(piece, h) * ROWS * ROWS + i] = s.t[i / ROWS][i % ROWS];
    begin_chain<T>(s, j, piece, h, k);
    __syncthreads();
  }
}

/* ---- piece after piece ----------------------------------------------------------------------- */

/* 64 x 64 elements of W or of the keys, on their way to shared memory while those before them are
 * multiplied. */
enum { W_LD = ROWS + 4, K_LD = ROWS + 8, S_LD = SLICE + 8, MAX_RING = 3 };
struct alignas(16) chain_chunk {
  float x[ROWS * K_LD];
};
/* Then the chunks. */
struct alignas(16) chain_shared {
  float y[ROWS][S_LD];
  float state[1][S_LD]; /* [dk in whole ROWS] */
};
/* Chunks in shared memory: three, or two beside a state of more than 128 rows. */
__host__ __device__ inline uint32_t chain_ring(uint32_t dk) { return dk <= 128 ? MAX_RING : 2; }
__host__ __device__ inline size_t chain_state(uint32_t dk) {
  return sizeof(float) * S_LD * (ROWS + (dk + ROWS - 1) / ROWS * ROWS);
}
size_t chain_bytes(uint32_t dk) { return chain_state(dk) + chain_ring(dk) * sizeof(chain_chunk); }

/* The chain's work in its order: of each piece the chunks of W, then those of the keys. */
template <typename T> struct chain_stream {
  const delta_job<T> &j;
  chain_chunk *ring;
  uint32_t head, n_ring, chunks, next, total;
  size_t w_ld;
  __device__ chain_stream(const delta_job<T> &job, chain_chunk *at, uint32_t of_head)
      : j(job), ring(at), head(of_head), n_ring(chain_ring(job.a.key_dim)),
        chunks((job.a.key_dim + ROWS - 1) / ROWS), next(0), total(2 * chunks * job.n_pieces),
        w_ld(job.w_ld()) {}
  __device__ uint32_t piece(uint32_t i) const { return j.backward ? j.n_pieces - 1 - i : i; }
  __device__ chain_chunk &chunk(uint32_t step) const { return ring[step % n_ring]; }
  /* Every thread: begins to load the next chunk. */
  __device__ __forceinline__ void load() {
    if (next < total) {
      const uint32_t c = next % (2 * chunks), of = piece(next / (2 * chunks));
      if (c < chunks)
        load_w((float *)chunk(next).x, of, c * ROWS);
      else
        load_keys((T *)chunk(next).x, of, (c - chunks) * ROWS);
    }
    next++;
    ps_copy_commit();
  }
  __device__ __forceinline__ void load_w(float *to, uint32_t of, uint32_t first) const {
    const float *w = j.w + j.at(of, head) * ROWS * w_ld + first;
#pragma unroll
    for (uint32_t i = threadIdx.x; i < ROWS * ROWS / 4; i += TILE_THREADS) {
      const uint32_t r = i / (ROWS / 4), c = i % (ROWS / 4) * 4;
      ps_copy_async(to + r * W_LD + c, w + r * w_ld + c);
    }
  }
  __device__ __forceinline__ void load_keys(T *to, uint32_t of, uint32_t first) const {
    constexpr uint32_t V = ps_full<T>;
    const uint32_t n = j.n_rows(of), dk = j.a.key_dim;
    const T *k = j.keys(1, head / j.share) + j.row0(of) * j.ld;
    if (j.whole) {
#pragma unroll
      for (uint32_t i = threadIdx.x; i < ROWS * ROWS / V; i += TILE_THREADS) {
        const uint32_t r = i / (ROWS / V), c = i % (ROWS / V) * V;
        const bool there = r < n && first + c < dk;
        ps_copy_async(to + r * K_LD + c, there ? k + r * j.ld + first + c : k, there);
      }
      return;
    }
    for (uint32_t i = threadIdx.x; i < ROWS * ROWS; i += TILE_THREADS) {
      const uint32_t r = i / ROWS, c = i % ROWS;
      to[r * K_LD + c] = r < n && first + c < dk ? k[r * j.ld + first + c] : ps_from_f32<T>(0.0f);
    }
  }
  /* Every thread: chunk @step is there; that before it is free, and what comes next is loaded. */
  __device__ __forceinline__ void enter() {
    if (n_ring == MAX_RING)
      ps_copy_wait<MAX_RING - 2>();
    else
      ps_copy_wait<0>();
    __syncthreads();
    load();
  }
};

/* Columns [first, first + n) of a value head's state, or of its gradient, all pieces long. */
template <typename T>
__global__ void __launch_bounds__(TILE_THREADS) chain_k(const delta_job<T> j) {
  extern __shared__ uint4 dynamic[];
  chain_shared &s = *(chain_shared *)dynamic;
  const uint32_t head = blockIdx.y, col0 = blockIdx.x * SLICE, dk = j.a.key_dim, dv = j.a.value_dim,
                 n = min((uint32_t)SLICE, dv - col0);
  chain_stream<T> stream(j, (chain_chunk *)((char *)dynamic + chain_state(dk)), head);
  const uint32_t chunks = stream.chunks;
  float *const xs = j.backward ? j.dy : j.d, *const kept = j.backward ? j.dstates : j.states;
  const auto state_at = [&](uint32_t r, uint32_t c) {
    return ((size_t)head * dk + r) * dv + col0 + c;
  };
  for (uint32_t i = 1; i < stream.n_ring; i++)
    stream.load();
  for (uint32_t i = threadIdx.x; i < chunks * ROWS * SLICE; i += TILE_THREADS) {
    const uint32_t r = i / SLICE, c = i % SLICE;
    s.state[r][c] = j.from && r < dk && c < n ? j.from[state_at(r, c)] : 0.0f;
  }
  uint32_t step = 0;
  for (uint32_t i = 0; i < j.n_pieces; i++) {
    const uint32_t piece = stream.piece(i);
    const float *factor = j.factors(piece, head, j.backward ? BACKWARD : FORWARD),
                keep = j.factors(piece, head, START)[j.n_rows(piece) - 1];
    float *const x = xs + j.at(piece, head) * ROWS * dv + col0;
    float *const state = kept ? kept + piece * (size_t)j.a.n_value_heads * dk * dv : nullptr;
    tile<SLICE> a, u;
    float f[u.EACH];
#pragma unroll
    for (int e = 0; e < u.EACH; e++) {
      u.x[e] = (uint32_t)u.col(e) < n ? x[(size_t)u.row(e) * dv + u.col(e)] : 0.0f;
      f[e] = factor[u.row(e)];
    }
    a.clear();
    for (uint32_t first = 0; first < chunks * ROWS; first += ROWS, step++) {
      stream.enter();
      const float *w = stream.chunk(step).x;
      a.template add_shared<ROWS>([&](uint32_t r, uint32_t k) { return w[r * W_LD + k]; },
                                  [&](uint32_t k, uint32_t c) { return s.state[first + k][c]; });
    }
#pragma unroll
    for (int e = 0; e < u.EACH; e++) {
      const uint32_t r = u.row(e), c = u.col(e);
      const float v = u.x[e] + a.x[e];
      if (c < n)
        x[(size_t)r * dv + c] = v;
      s.y[r][c] = f[e] * v;
    }
    for (uint32_t first = 0; first < chunks * ROWS; first += ROWS, step++) {
      if (j.backward)
#pragma unroll
        for (int e = 0; e < u.EACH; e++) {
          const uint32_t r = first + u.row(e), c = u.col(e);
          u.x[e] = r < dk && c < n ? state[state_at(r, c)] : 0.0f;
        }
      stream.enter();
      const T *k = (const T *)stream.chunk(step).x;
      a.clear();
      a.template add_shared<ROWS>(
          [&](uint32_t r, uint32_t i) { return ps_to_f32(k[i * K_LD + r]); },
          [&](uint32_t i, uint32_t c) { return s.y[i][c]; });
#pragma unroll
      for (int e = 0; e < u.EACH; e++) {
        const uint32_t r = first + u.row(e), c = u.col(e);
        const float before = s.state[r][c];
        if (state && r < dk && c < n)
          state[state_at(r, c)] = before;
        s.state[r][c] = fmaf(keep, before, j.backward ? a.x[e] + u.x[e] : a.x[e]);
      }
    }
  }
  __syncthreads();
  if (j.to)
    for (uint32_t i = threadIdx.x; i < dk * SLICE; i += TILE_THREADS)
      if (i % SLICE < n)
        j.to[state_at(i / SLICE, i % SLICE)] = s.state[i / SLICE][i % SLICE];
}

template <typename T>
__global__ void __launch_bounds__(TILE_THREADS, 2) output_k(const delta_job<T> j) {
  extern __shared__ uint4 dynamic[];
  tile_stage<ROWS> &stage = *(tile_stage<ROWS> *)dynamic;
  const uint32_t piece = blockIdx.x % j.n_pieces, first = blockIdx.x / j.n_pieces * ROWS,
                 head = blockIdx.y, key = head / j.share, dk = j.a.key_dim, dv = j.a.value_dim,
                 n = j.n_rows(piece);
  const size_t at = j.at(piece, head);
  const float *pairs = j.pairs + at * ROWS * ROWS, *start = j.factors(piece, head, START),
              *d = j.d + at * ROWS * dv + first, *state = j.states + at * dk * dv + first;
  const unit_rows<T> q(j, piece, key, 0, j.norms + j.key_at(piece, key) * 2 * ROWS);
  T *o = j.o + ((size_t)j.row0(piece) * j.a.n_value_heads + head) * dv + first;
  const auto columns = [&](const float *x) {
    return [=](uint32_t i, uint32_t c) { return first + c < dv ? x[(size_t)i * dv + c] : 0.0f; };
  };
  tile<ROWS> x;
  x.clear();
  x.template add<true, true>(
      stage, dk, [&](uint32_t r, uint32_t c) { return q.raw(r, c); }, columns(state));
  x.each([&](uint32_t r, uint32_t, float &v) { v *= start[r] * q.factor(r); });
  x.template add<true, true>(
      stage, ROWS, [&](uint32_t r, uint32_t i) { return pairs[r * ROWS + i]; }, columns(d));
  x.each([&](uint32_t r, uint32_t c, float v) {
    if (r < n && first + c < dv)
      o[(size_t)r * j.a.n_value_heads * dv + c] = ps_from_f32<T>(v);
  });
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T> delta_job<T> job_of(const ps_launch *l, const ps_delta_scratch &at) {
  delta_job<T> j = {};
  char *scratch = (char *)((const ps__cuda_exec *)l->exec)->scratch;
  fill_rows(j, l);
  j.pairs = (float *)(scratch + at.pairs);
  j.rows = (float *)(scratch + at.rows);
  j.norms = (float *)(scratch + at.norms);
  j.w = (float *)(scratch + at.w);
  j.d = (float *)(scratch + at.d);
  j.whole = ps_aligned(j.qkv) && j.ld * sizeof(T) % 16 == 0 && j.a.key_dim * sizeof(T) % 16 == 0;
  return j;
}

template <typename T>
cudaError_t launch_by_piece(void (*kernel)(const delta_job<T>), const delta_job<T> &j,
                            uint32_t heads, size_t bytes, cudaStream_t stream) {
  return launch(kernel, j, j.n_pieces, heads, TILE_THREADS, bytes, stream);
}
template <typename T>
cudaError_t launch_chain(delta_job<T> &j, const float *from, float *to, bool backward,
                         cudaStream_t stream) {
  j.from = from;
  j.to = to;
  j.backward = backward;
  return launch(chain_k<T>, j, ps_ceil_div(j.a.value_dim, SLICE), j.a.n_value_heads, TILE_THREADS,
                chain_bytes(j.a.key_dim), stream);
}

/* Segment @i of @j, as far as D and the state behind it. */
template <typename T>
cudaError_t forward(delta_job<T> &j, uint32_t i, const float *from, float *to,
                    cudaStream_t stream) {
  enter(j, i, PS_DELTA_SEGMENT);
  const cudaError_t e =
      launch_by_piece(prepare_k<T>, j, j.a.n_key_heads, sizeof(prepare_shared), stream);
  return e != cudaSuccess ? e : launch_chain(j, from, to, false, stream);
}

template <typename T> cudaError_t run_fwd(const ps_launch *l, const ps_delta_scratch &at) {
  delta_job<T> j = job_of<T>(l, at);
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  float *const before = j.a.row0 ? (float *)l->ptr[5] : nullptr, *const after = (float *)l->ptr[7];
  cudaError_t e = cudaSuccess;
  j.o = (T *)l->ptr[6];
  j.states = (float *)((char *)exec->scratch + at.states);
  for (uint32_t i = 0; i < n_segments(j.a, PS_DELTA_SEGMENT) && e == cudaSuccess; i++) {
    e = forward(j, i, i ? after : before, after, exec->stream);
    if (e == cudaSuccess)
      e = launch(output_k<T>, j, j.n_pieces * ps_ceil_div(j.a.value_dim, ROWS), j.a.n_value_heads,
                 TILE_THREADS, sizeof(tile_stage<ROWS>), exec->stream);
  }
  return e;
}

/* Segment @i of the backward pass, after those behind it. */
template <typename T>
cudaError_t backward(delta_job<T> &j, uint32_t i, const float *from, float *carry, bool has_carry,
                     cudaStream_t stream) {
  cudaError_t e = forward(j, i, from, nullptr, stream);
  if (e == cudaSuccess)
    e = launch_by_piece(reverse_k<T>, j, j.a.n_value_heads, sizeof(reverse_shared), stream);
  if (e == cudaSuccess)
    e = launch_chain(j, has_carry ? carry : nullptr, carry, true, stream);
  return e != cudaSuccess
             ? e
             : launch_by_piece(gradient_k<T>, j, j.a.n_key_heads, sizeof(gradient_shared), stream);
}

template <typename T> cudaError_t run_bwd(const ps_launch *l, const ps_delta_scratch &at) {
  delta_job<T> j = job_of<T>(l, at), first;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  char *scratch = (char *)((const ps__cuda_exec *)l->exec)->scratch;
  float *const carry = (float *)l->ptr[7];
  j.d_o = (const T *)l->ptr[6];
  j.dqkv = (T *)l->ptr[8];
  j.dba = (T *)l->ptr[9];
  j.weights = (double *)(scratch + at.weights);
  first = j;
  j.inverse = (float *)(scratch + at.inverse);
  j.products = (float *)(scratch + at.products);
  j.dy = (float *)(scratch + at.dy);
  j.states = (float *)(scratch + at.states);
  j.dstates = (float *)(scratch + at.dstates);
  j.dq = (float *)(scratch + at.dq);
  j.dk = (float *)(scratch + at.dk);
  const cudaError_t e = run_segments(
      j, l, (float *)(scratch + at.borders),
      [&](uint32_t i, const float *from, float *to) { return forward(first, i, from, to, stream); },
      [&](uint32_t i, const float *from, bool has_carry) {
        return backward(j, i, from, carry, has_carry, stream);
      });
  return e != cudaSuccess ? e : add_weights(j, l, stream);
}

} // namespace

/* delta_fwd
 * math    above
 * shapes  as the cpu backend's; any dk, dv up to PS_MAX_DELTA_DIM, any number of rows
 * bytes   qkv twice, o once; scratch, written once and read once or twice (W by each slice of 32
 *         columns): 146 KB for each value head of a segment's 32 pieces where dk = dv = 128
 * determinism  bitwise: each sum is one block's, in order.
 * reference    the cpu backend's, row by row: the errors of a chain of states */
extern "C" ps_status ps__cuda_delta_fwd(const ps_launch *l) {
  const ps__args_delta *a = (const ps__args_delta *)l->args;
  const ps_status st = ps_check(l, "delta_fwd", 8, a->dt, ps_delta_bytes(a, false));
  if (st != PS_OK)
    return st;
  const ps_delta_scratch at = ps_delta_layout(a, false);
  cudaError_t e = cudaSuccess;
  if (ps_delta_mma_takes(l, false))
    e = ps_delta_mma_fwd(l);
  else
    PS_BY_TYPE(a->dt, e = run_fwd<T>(l, at));
  return ps_launched("delta_fwd", e);
}

/* delta_bwd
 * math    above, then through sigmoid, softplus and the norms of q and k
 * shapes  as delta_fwd
 * bytes   the forward pass twice; scratch: 300 KB for each value head of a segment's pieces where
 *         dk = dv = 128 and two heads share a key head, a state a segment
 * determinism  bitwise: value heads of a key head in order; pieces' terms of weights in a fixed
 *              order, in double.
 * reference    the cpu backend's */
extern "C" ps_status ps__cuda_delta_bwd(const ps_launch *l) {
  const ps__args_delta *a = (const ps__args_delta *)l->args;
  const ps_status st = ps_check(l, "delta_bwd", 12, a->dt, ps_delta_bytes(a, true));
  if (st != PS_OK)
    return st;
  const ps_delta_scratch at = ps_delta_layout(a, true);
  cudaError_t e = cudaSuccess;
  if (ps_delta_mma_takes(l, true))
    e = ps_delta_mma_bwd(l);
  else
    PS_BY_TYPE(a->dt, e = run_bwd<T>(l, at));
  return ps_launched("delta_bwd", e);
}
