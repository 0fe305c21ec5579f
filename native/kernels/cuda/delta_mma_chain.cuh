/* delta_mma_chain.cuh - what goes from piece to piece on the tensor cores (delta_mma.cu): the state
 * and its gradient, and with them O.
 *
 * A block has COLUMNS columns of a value head, all pieces long: four warps that carry the state in
 * registers, 16 columns and half of the keys each, and four beside them that do what the state does
 * not wait for and bring the next pieces. All is computed by columns, S^T and D^T: sums of one
 * product are then the first factor of the next as they are, and the second factors are rows as
 * they lie in memory. K S is the sum of two halves of the keys, in either warp that has one. */
#ifndef PS_KERNELS_CUDA_DELTA_MMA_CHAIN_CUH
#define PS_KERNELS_CUDA_DELTA_MMA_CHAIN_CUH
#include "kernels/cuda/delta_mma.cuh"

namespace {

enum { HALVES = 2, HALF_KEYS = KEY_TILES / HALVES, HALF_ROWS = ROW_TILES / HALVES };
enum { ASIDE_THREADS = 32 * HALVES * COLUMN_TILES, CHAIN_THREADS = 2 * ASIDE_THREADS };

struct chain_stage {
  frag_tile k[ROW_TILES][KEY_TILES], q[ROW_TILES][KEY_TILES];
  piece_pairs pairs;
  frag_tile v[ROW_TILES][COLUMN_TILES]; /* backward: the gradient of O */
  chain_gates gates;
};
/* Between the warps of 16 columns. */
struct chain_exchange {
  uint4 state[COLUMN_TILES][2 * KEY_TILES][32]; /* S as a factor; backward: Q^T start dO */
  uint4 rows[COLUMN_TILES][2 * ROW_TILES][32];  /* D; backward: P^T dO */
};
/* K S, or K dS, of each half of the keys. */
struct chain_halves {
  uint4 x[COLUMN_TILES][HALVES][2 * ROW_TILES][32];
};
struct chain_shared {
  chain_exchange with;
  chain_stage stage[1]; /* j.ring of them; SMALL: two, of the second the keys alone */
};
enum { CHAIN_MAX_RING = 3 };
constexpr size_t chain_bytes(uint32_t ring) {
  return sizeof(chain_exchange) + ring * sizeof(chain_stage) + sizeof(chain_halves);
}
constexpr size_t chain_small_bytes =
    sizeof(chain_exchange) + sizeof(chain_stage) + sizeof(chain_stage::k);
static_assert(offsetof(chain_stage, k) == 0, "keys begin a stage");
static_assert(sizeof(chain_halves) <= sizeof(chain_stage::k), "SMALL: halves in keys");

/* Forward with O, with all that the backward pass needs of it, for the last state alone; then
 * backward. */
enum chain_kind { CHAIN_OUTPUT, CHAIN_KEEP, CHAIN_STATE, CHAIN_REVERSE };
template <chain_kind KIND>
constexpr bool has_queries = KIND == CHAIN_OUTPUT || KIND == CHAIN_REVERSE;

/* Parts of a stage, which SMALL loads one by one. A barrier cuts a step in two. Keys are read in
 * both halves, so that SMALL has two places for them; all else is read in one half and loaded in
 * the other. READ_FIRST: P, forward in the step after its piece's; the gradient of O. READ_SECOND:
 * q, (1 + L)^-1, gates; V. */
enum : uint32_t { KEYS = 1, READ_FIRST = 2, READ_SECOND = 4, WHOLE = 7 };

/* Threads aside: begin to load PARTS of @step's piece, if there is one. */
template <chain_kind KIND, uint32_t PARTS>
__device__ __forceinline__ void load_stage(chain_stage &to, const mma_job &j, uint32_t step,
                                           uint32_t head, uint32_t col0, uint32_t tid) {
  if (step < j.n_pieces) {
    const uint32_t piece = KIND == CHAIN_REVERSE ? j.n_pieces - 1 - step : step,
                   n = j.n_rows(piece), key = head / j.share;
    const size_t row0 = j.row0(piece), at = j.at(piece, head);
    constexpr bool t = PARTS & READ_SECOND, p = has_queries<KIND> && PARTS & READ_FIRST;
    if constexpr (PARTS & KEYS)
      load_tiles<2 * KEY_TILES, ASIDE_THREADS>(to.k[0], j.keys(1, key) + row0 * j.ld, j.ld, n,
                                               j.a.key_dim, tid);
    if constexpr (has_queries<KIND> && PARTS & READ_SECOND)
      load_tiles<2 * KEY_TILES, ASIDE_THREADS>(to.q[0], j.keys(0, key) + row0 * j.ld, j.ld, n,
                                               j.a.key_dim, tid);
    if constexpr (t || p)
      load_bytes<(t + p) * sizeof to.pairs.t, ASIDE_THREADS>(
          t ? to.pairs.t : to.pairs.p, t ? j.pairs[at].t : j.pairs[at].p, tid);
    if constexpr (PARTS & (KIND == CHAIN_REVERSE ? READ_FIRST : READ_SECOND)) {
      const size_t ld = KIND == CHAIN_REVERSE ? (size_t)j.a.n_value_heads * j.a.value_dim : j.ld;
      const bf16 *v =
          KIND == CHAIN_REVERSE ? j.d_o + (size_t)head * j.a.value_dim : j.qkv + j.values(head);
      load_tiles<2 * COLUMN_TILES, ASIDE_THREADS>(to.v[0], v + row0 * ld + col0, ld, n,
                                                  j.a.value_dim - col0, tid);
    }
    if constexpr (PARTS & READ_SECOND)
      load_bytes<sizeof to.gates, ASIDE_THREADS>(&to.gates, &j.terms[at].chain, tid);
  }
  ps_copy_commit();
}
/* Where in the ring a step's piece is, and the one before it; there the piece comes that is
 * j.ring - 1 after it. */
struct chain_place {
  uint32_t at, before;
  __device__ explicit chain_place(const mma_job &j) : at(0), before(j.ring - 1) {}
  __device__ __forceinline__ void next(const mma_job &j) {
    before = at;
    at = at + 1 == j.ring ? 0 : at + 1;
  }
};
/* All but the j.ring - 2 latest have landed. */
__device__ __forceinline__ void wait_stage(const mma_job &j) {
  if (j.ring == CHAIN_MAX_RING)
    ps_copy_wait<CHAIN_MAX_RING - 2>();
  else
    ps_copy_wait<0>();
}

/* What has place @at in the ring, but the keys, which are s.stage[at].k. */
template <bool SMALL>
__device__ __forceinline__ chain_stage &stage_at(chain_shared &s, uint32_t at) {
  return s.stage[SMALL ? 0 : at];
}
/* The halves: behind the ring; SMALL: where the keys of the step before were, until others come. */
template <bool SMALL>
__device__ __forceinline__ chain_halves &halves_at(chain_shared &s, const mma_job &j,
                                                   const chain_place &place) {
  return *(chain_halves *)&s.stage[SMALL ? place.before : j.ring];
}
/* What threads aside begin to load before the first step, and in the halves of @step. Where not
 * SMALL the second half takes a whole piece, j.ring - 1 steps ahead. */
template <chain_kind KIND, bool SMALL>
__device__ __forceinline__ void load_ahead(chain_shared &s, const mma_job &j, uint32_t head,
                                           uint32_t col0, uint32_t tid) {
  for (uint32_t i = 0; i + 1 < j.ring; i++)
    load_stage<KIND, SMALL ? KEYS | READ_FIRST : WHOLE>(s.stage[i], j, i, head, col0, tid);
  wait_stage(j);
}
template <chain_kind KIND, bool SMALL>
__device__ __forceinline__ void load_first(chain_shared &s, const mma_job &j, uint32_t step,
                                           uint32_t head, uint32_t col0, uint32_t tid) {
  if constexpr (SMALL)
    load_stage<KIND, READ_SECOND>(s.stage[0], j, step, head, col0, tid);
}
template <chain_kind KIND, bool SMALL>
__device__ __forceinline__ void load_second(chain_shared &s, const mma_job &j,
                                            const chain_place &place, uint32_t step, uint32_t head,
                                            uint32_t col0, uint32_t tid) {
  if constexpr (SMALL) {
    load_stage<KIND, KEYS>(s.stage[place.before], j, step + 1, head, col0, tid);
    load_stage<KIND, READ_FIRST>(s.stage[0], j, KIND == CHAIN_REVERSE ? step + 1 : step, head, col0,
                                 tid);
  } else
    load_stage<KIND, WHOLE>(s.stage[place.before], j, step + j.ring - 1, head, col0, tid);
}

/* f(element of @s, index in [dk,dv] of a head's state), for those that are there. @first: the first
 * tile of keys. */
template <typename F>
__device__ __forceinline__ void each_of_state(frag_sum (&s)[HALF_KEYS], const mma_job &j,
                                              uint32_t first, uint32_t col, F f) {
#pragma unroll
  for (int i = 0; i < HALF_KEYS; i++)
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const uint32_t k = (first + i) * 16 + frag_col(e / 4, e % 4), c = col + frag_row(e % 4);
      if (k < j.a.key_dim && c < j.a.value_dim)
        f(s[i][e / 4][e % 4], (size_t)k * j.a.value_dim + c);
    }
}

/* x = (k s)^T over the keys of @s, whose first tile is @first; visit(tile, nearest, rest) of s. */
template <typename F>
__device__ __forceinline__ void times_state(frag_sum (&x)[ROW_TILES],
                                            const frag_sum (&s)[HALF_KEYS],
                                            const frag_tile (*k)[KEY_TILES], uint32_t first,
                                            F visit) {
  frag_clear(x);
#pragma unroll
  for (int i = 0; i < HALF_KEYS; i++) {
    frag high, low, b[ROW_TILES];
    frag_split(high, low, s[i]);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
      frag_load<FRAG_B>(b[r], k[r][first + i]);
    visit(first + i, high, low);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
      frag_add(x[r], high, b[r]);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
      frag_add(x[r], low, b[r]);
  }
}
/* u = (k^T x)^T, of @N tiles of keys from @first on; x: the sum of its PARTS. */
template <int PARTS, int N>
__device__ __forceinline__ void times_rows(frag_sum (&u)[N], const frag (&x)[PARTS][ROW_TILES],
                                           const frag_tile (*k)[KEY_TILES], uint32_t first) {
  frag_sum rest[N];
  frag_clear(u);
  frag_clear(rest);
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++) {
    frag b[N];
#pragma unroll
    for (int i = 0; i < N; i++)
      frag_load<FRAG_BT>(b[i], k[r][first + i]);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int i = 0; i < N; i++)
        frag_add(part ? rest[i] : u[i], x[part][r], b[i]);
  }
#pragma unroll
  for (int i = 0; i < N; i++)
#pragma unroll
    for (int e = 0; e < 8; e++)
      u[i][e / 4][e % 4] += rest[i][e / 4][e % 4];
}
/* s = keep s + (k^T x)^T, x in two parts or three. */
template <int PARTS>
__device__ __forceinline__ void add_rows(frag_sum (&s)[HALF_KEYS], float keep,
                                         const frag_sum (&x)[ROW_TILES],
                                         const frag_tile (*k)[KEY_TILES], uint32_t first) {
  frag part[PARTS][ROW_TILES];
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
    if constexpr (PARTS == 2)
      frag_split(part[0][r], part[1][r], x[r]);
    else
      frag_split(part[0][r], part[1][r], part[2][r], x[r]);
#pragma unroll
  for (int i = 0; i < HALF_KEYS; i += 2) {
    frag_sum u[2];
    times_rows(u, part, k, first + i);
#pragma unroll
    for (int e = 0; e < 16; e++) {
      float &y = s[i + e / 8][e / 4 % 2][e % 4];
      y = fmaf(keep, y, u[e / 8][e / 4 % 2][e % 4]);
    }
  }
}
/* x f, of rows: f(element, its row of the piece). */
template <typename F> __device__ __forceinline__ void each_row(frag_sum (&x)[ROW_TILES], F f) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
    for (int e = 0; e < 8; e++)
      f(x[r][e / 4][e % 4], r * 16 + frag_col(e / 4, e % 4));
}
__device__ __forceinline__ void split_rows(frag (&part)[2][ROW_TILES],
                                           const frag_sum (&x)[ROW_TILES]) {
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
    frag_split(part[0][r], part[1][r], x[r]);
}
/* Which tiles of rows a warp has of both halves' results: triangles of 5 tiles in all. */
struct half_rows {
  uint32_t half, at[HALF_ROWS];
  __device__ explicit half_rows(uint32_t half) : half(half), at{half ? 1u : 0u, half ? 2u : 3u} {}
  __device__ __forceinline__ void pick(frag_sum (&y)[HALF_ROWS],
                                       const frag_sum (&x)[ROW_TILES]) const {
#pragma unroll
    for (int e = 0; e < 8; e++) {
      y[0][e / 4][e % 4] = half ? x[1][e / 4][e % 4] : x[0][e / 4][e % 4];
      y[1][e / 4][e % 4] = half ? x[2][e / 4][e % 4] : x[3][e / 4][e % 4];
    }
  }
};
__device__ __forceinline__ void keep_rows(value_rows &to, const frag_sum (&x)[HALF_ROWS],
                                          const half_rows &own) {
#pragma unroll
  for (int i = 0; i < HALF_ROWS; i++) {
    frag high, low;
    frag_split(high, low, x[i]);
    frag_store(to.x[0][own.at[i]], high);
    frag_store(to.x[1][own.at[i]], low);
  }
}
/* Products of triangles, of a warp's rows. */
template <bool BACK, int PARTS>
__device__ __forceinline__ void add_triangle(frag_sum (&y)[HALF_ROWS],
                                             const frag (&x)[PARTS][ROW_TILES],
                                             const frag_tile (*m)[FRAG_TRIANGLE],
                                             const half_rows &own) {
  if (own.half)
    frag_add_triangle<BACK, 1, 2>(y, x, m);
  else
    frag_add_triangle<BACK, 0, 3>(y, x, m);
}
__device__ __forceinline__ void give(uint4 &to, const frag &x) {
  to = make_uint4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void take(frag &x, const uint4 &from) {
  x[0] = from.x, x[1] = from.y, x[2] = from.z, x[3] = from.w;
}
__device__ __forceinline__ void give(uint4 &to, const float (&x)[4]) {
  to = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                  __float_as_uint(x[3]));
}
__device__ __forceinline__ void take_sum(float (&x)[4], const uint4 &from) {
  x[0] += __uint_as_float(from.x), x[1] += __uint_as_float(from.y);
  x[2] += __uint_as_float(from.z), x[3] += __uint_as_float(from.w);
}

__device__ __forceinline__ void give_rows(uint4 (*to)[32], const frag_sum (&x)[ROW_TILES]) {
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; i++)
    give(to[i][threadIdx.x % 32], x[i / 2][i % 2]);
}
__device__ __forceinline__ void give_rows(uint4 (*to)[32], const frag_sum (&x)[HALF_ROWS],
                                          const half_rows &own) {
#pragma unroll
  for (int i = 0; i < 2 * HALF_ROWS; i++)
    give(to[2 * own.at[i / 2] + i % 2][threadIdx.x % 32], x[i / 2][i % 2]);
}
__device__ __forceinline__ void take_rows(frag_sum (&x)[ROW_TILES], const uint4 (*from)[32]) {
#pragma unroll
  for (int i = 0; i < 2 * ROW_TILES; i++)
    take_sum(x[i / 2][i % 2], from[i][threadIdx.x % 32]);
}

/* Warps of the state: the first half of a step ends, and @x becomes the sum over all keys. */
template <bool SMALL>
__device__ __forceinline__ void add_other_half(frag_sum (&x)[ROW_TILES], chain_shared &s,
                                               const mma_job &j, const chain_place &place,
                                               uint32_t w, uint32_t half) {
  chain_halves &halves = halves_at<SMALL>(s, j, place);
  give_rows(halves.x[w][half], x);
  __syncthreads();
  take_rows(x, halves.x[w][1 - half]);
  if (SMALL)
    __syncthreads(); /* the next keys come there */
}
/* ---- forward --------------------------------------------------------------------------------- */

/* A warp's rows of O of a piece, from start Q S in @o: P D is added. */
__device__ __forceinline__ void finish_output(frag_sum (&o)[HALF_ROWS], const chain_stage &at,
                                              const chain_exchange &with, const mma_job &j,
                                              uint32_t piece, uint32_t head, uint32_t col0,
                                              uint32_t w, const half_rows &own) {
  const uint32_t lane = threadIdx.x % 32, n = j.n_rows(piece), dv = j.a.value_dim;
  frag d[3][ROW_TILES];
  frag_sum x[ROW_TILES];
  frag_clear(x);
  take_rows(x, with.rows[w]);
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
    frag_split(d[0][r], d[1][r], d[2][r], x[r]);
  add_triangle<false>(o, d, at.pairs.p, own);
  const size_t ld = (size_t)j.a.n_value_heads * dv;
  const uint32_t c = col0 + w * 16 + lane % 4 * 2;
  bf16 *to = j.o + j.row0(piece) * ld + (size_t)head * dv + c;
#pragma unroll
  for (int e = 0; e < 4 * HALF_ROWS; e++) { /* eight rows and eight columns */
    const float *x = &o[e / 4][e / 2 % 2][2 * (e % 2)];
    const uint32_t word = frag_transposed(frag_pack(x[0], x[1])),
                   row = own.at[e / 4] * 16 + e / 2 % 2 * 8 + lane / 4, right = e % 2 * 8;
    if (row < n && c + right < dv)
      *(uint32_t *)(to + row * ld + right) = word;
  }
}

/* D and the state, in pieces' order: with O, or kept for the backward pass. */
template <chain_kind KIND, bool SMALL>
__global__ void __launch_bounds__(CHAIN_THREADS, 1) mma_chain_k(const mma_job j) {
  constexpr bool OUTPUT = KIND == CHAIN_OUTPUT, KEEP = KIND == CHAIN_KEEP;
  extern __shared__ uint4 dynamic[];
  chain_shared &s = *(chain_shared *)dynamic;
  const uint32_t head = blockIdx.y, col0 = blockIdx.x * COLUMNS, lane = threadIdx.x % 32,
                 w = threadIdx.x / 32 % COLUMN_TILES, col = col0 + w * 16,
                 half = threadIdx.x / 32 / COLUMN_TILES % HALVES, first = half * HALF_KEYS,
                 tid = threadIdx.x - ASIDE_THREADS;
  const half_rows own(half);
  chain_exchange &with = s.with;
  chain_place place(j);
  const size_t of_state = (size_t)head * j.a.key_dim * j.a.value_dim;
  if (threadIdx.x >= CHAIN_THREADS - ASIDE_THREADS) {
    frag_sum o[HALF_ROWS];
    load_ahead<KIND, SMALL>(s, j, head, col0, tid);
    __syncthreads();
    for (uint32_t i = 0; i < j.n_pieces; i++, place.next(j)) {
      load_first<KIND, SMALL>(s, j, i, head, col0, tid);
      if (OUTPUT && i)
        finish_output(o, stage_at<SMALL>(s, place.before), with, j, i - 1, head, col0, w, own);
      if (SMALL)
        wait_stage(j);
      __syncthreads(); /* S and K S are there; the stage of the piece before is free */
      if (SMALL)
        __syncthreads(); /* as are the halves */
      load_second<KIND, SMALL>(s, j, place, i, head, col0, tid);
      if (OUTPUT) {
        const chain_stage &at = stage_at<SMALL>(s, place.at);
        frag_clear(o);
#pragma unroll
        for (int k = 0; k < KEY_TILES; k++) {
          frag high, low, b[HALF_ROWS];
          take(high, with.state[w][2 * k][lane]);
          take(low, with.state[w][2 * k + 1][lane]);
#pragma unroll
          for (int r = 0; r < HALF_ROWS; r++)
            frag_load<FRAG_B>(b[r], at.q[own.at[r]][k]);
#pragma unroll
          for (int r = 0; r < HALF_ROWS; r++)
            frag_add(o[r], high, b[r]);
#pragma unroll
          for (int r = 0; r < HALF_ROWS; r++)
            frag_add(o[r], low, b[r]);
        }
#pragma unroll
        for (int r = 0; r < HALF_ROWS; r++)
#pragma unroll
          for (int e = 0; e < 8; e++)
            o[r][e / 4][e % 4] *= at.gates.q_start[own.at[r] * 16 + frag_col(e / 4, e % 4)];
      }
      wait_stage(j);
      __syncthreads(); /* D and the next stage are there; S may be overwritten */
    }
    if (OUTPUT)
      finish_output(o, stage_at<SMALL>(s, place.before), with, j, j.n_pieces - 1, head, col0, w,
                    own);
    return;
  }
  frag_sum state[HALF_KEYS], x[ROW_TILES];
  frag_clear(state);
  if (j.from)
    each_of_state(state, j, first, col, [&](float &v, size_t at) { v = j.from[of_state + at]; });
  __syncthreads();
  for (uint32_t i = 0; i < j.n_pieces; i++, place.next(j)) {
    const chain_stage &at = stage_at<SMALL>(s, place.at);
    const auto &keys = s.stage[place.at].k;
    const size_t tile = j.column_at(i, head, col / 16);
    times_state(x, state, keys, first, [&](int k, const frag &high, const frag &low) {
      if (OUTPUT) {
        give(with.state[w][2 * k][lane], high);
        give(with.state[w][2 * k + 1][lane], low);
      } else if (KEEP) {
        frag_store(j.states[tile].x[0][k], high);
        frag_store(j.states[tile].x[1][k], low);
      }
    });
    add_other_half<SMALL>(x, s, j, place, w, half);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) { /* beta (V - start K S) */
      frag v;
      frag_load<FRAG_AT>(v, at.v[r][w]);
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const uint32_t row = r * 16 + frag_col(e / 4, e % 4), word = v[e / 2];
        float &y = x[r][e / 4][e % 4];
        y = at.gates.beta[row] *
            fmaf(-at.gates.k_start[row], y, e % 2 ? frag_high(word) : frag_low(word));
      }
    }
    frag part[2][ROW_TILES];
    split_rows(part, x);
    frag_add_triangle<false, 0, 1, 2, 3>(x, part, at.pairs.t); /* in both warps */
    if (OUTPUT || KEEP) {
      frag_sum d[HALF_ROWS];
      own.pick(d, x);
      if (OUTPUT)
        give_rows(with.rows[w], d, own);
      else
        keep_rows(j.d[tile], d, own);
    }
    each_row(x, [&](float &v, uint32_t r) { v *= at.gates.k_end[r]; });
    /* in fp32 a row's term may be all of a state: in three parts */
    add_rows<3>(state, at.gates.keep, x, keys, first);
    __syncthreads();
  }
  if (j.to)
    each_of_state(state, j, first, col, [&](float &v, size_t at) { j.to[of_state + at] = v; });
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dY and the state's gradient, from the last piece to the first. */
template <bool SMALL>
__global__ void __launch_bounds__(CHAIN_THREADS, 1) mma_reverse_k(const mma_job j) {
  extern __shared__ uint4 dynamic[];
  chain_shared &s = *(chain_shared *)dynamic;
  const uint32_t head = blockIdx.y, col0 = blockIdx.x * COLUMNS, lane = threadIdx.x % 32,
                 w = threadIdx.x / 32 % COLUMN_TILES, col = col0 + w * 16,
                 half = threadIdx.x / 32 / COLUMN_TILES % HALVES, first = half * HALF_KEYS,
                 tid = threadIdx.x - ASIDE_THREADS;
  const half_rows own(half);
  chain_exchange &with = s.with;
  chain_place place(j);
  const size_t of_state = (size_t)head * j.a.key_dim * j.a.value_dim;
  if (threadIdx.x >= CHAIN_THREADS - ASIDE_THREADS) {
    load_ahead<CHAIN_REVERSE, SMALL>(s, j, head, col0, tid);
    __syncthreads();
    for (uint32_t i = 0; i < j.n_pieces; i++, place.next(j)) {
      const chain_stage &at = stage_at<SMALL>(s, place.at);
      load_first<CHAIN_REVERSE, SMALL>(s, j, i, head, col0, tid);
      frag d_o[1][ROW_TILES], part[2][ROW_TILES];
      frag_sum y[HALF_ROWS], x[ROW_TILES];
      frag_clear(y);
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++)
        frag_load<FRAG_AT>(d_o[0][r], at.v[r][w]);
      add_triangle<true>(y, d_o, at.pairs.p, own);
      give_rows(with.rows[w], y, own);
      if (SMALL)
        wait_stage(j);
      __syncthreads(); /* P^T dO and K dS are there; the stage of the piece before is free */
      if (SMALL)
        __syncthreads(); /* as are the halves */
      load_second<CHAIN_REVERSE, SMALL>(s, j, place, i, head, col0, tid);
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int e = 0; e < 8; e++)
          x[r][e / 4][e % 4] = at.gates.q_start[r * 16 + frag_col(e / 4, e % 4)] *
                               (e % 2 ? frag_high(d_o[0][r][e / 2]) : frag_low(d_o[0][r][e / 2]));
      split_rows(part, x);
#pragma unroll
      for (int k = 0; k < HALF_KEYS; k += 2) {
        frag_sum u[2];
        times_rows(u, part, at.q, first + k);
#pragma unroll
        for (int e = 0; e < 4; e++)
          give(with.state[w][2 * (first + k) + e][lane], u[e / 2][e % 2]);
      }
      wait_stage(j);
      __syncthreads(); /* Q^T start dO and the next stage are there */
    }
    return;
  }
  frag_sum state[HALF_KEYS], x[ROW_TILES];
  frag_clear(state);
  if (j.from)
    each_of_state(state, j, first, col, [&](float &v, size_t at) { v = j.from[of_state + at]; });
  __syncthreads();
  for (uint32_t i = 0; i < j.n_pieces; i++, place.next(j)) {
    const chain_stage &at = stage_at<SMALL>(s, place.at);
    const auto &keys = s.stage[place.at].k;
    const size_t tile = j.column_at(j.n_pieces - 1 - i, head, col / 16);
    times_state(x, state, keys, first, [&](int k, const frag &high, const frag &low) {
      frag_store(j.dstates[tile].x[0][k], high);
      frag_store(j.dstates[tile].x[1][k], low);
    });
    add_other_half<SMALL>(x, s, j, place, w, half);
    each_row(x, [&](float &v, uint32_t r) { v *= at.gates.k_end[r]; });
    take_rows(x, with.rows[w]);
    frag part[2][ROW_TILES];
    split_rows(part, x);
    frag_add_triangle<true, 0, 1, 2, 3>(x, part, at.pairs.t); /* in both warps */
    frag_sum y[HALF_ROWS];
    own.pick(y, x);
    keep_rows(j.dy[tile], y, own);
    each_row(x, [&](float &v, uint32_t r) { v *= -at.gates.beta[r] * at.gates.k_start[r]; });
    add_rows<2>(state, at.gates.keep, x, keys, first);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 2 * HALF_KEYS; e++)
      take_sum(state[e / 2][e % 2], with.state[w][2 * first + e][lane]);
  }
  if (j.to)
    each_of_state(state, j, first, col, [&](float &v, size_t at) { j.to[of_state + at] = v; });
}

} // namespace
#endif
