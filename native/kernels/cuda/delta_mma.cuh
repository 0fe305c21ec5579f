/* delta_mma.cuh - the gated delta rule on the tensor cores (delta_mma.cu): a segment's work, and
 * what is of each piece alone before its chain. */
#ifndef PS_KERNELS_CUDA_DELTA_MMA_CUH
#define PS_KERNELS_CUDA_DELTA_MMA_CUH
#include "kernels/cuda/delta.cuh"
#include "kernels/cuda/fragment.cuh"
#include <type_traits>

namespace {

typedef __nv_bfloat16 bf16;

/* Tiles of a piece's rows, of the keys' columns; a head has at most KEYS of those. */
enum { ROW_TILES = ROWS / 16, KEY_TILES = PS_DELTA_MMA_KEYS / 16 };
/* Columns of values of a chain's block. */
enum { COLUMNS = PS_DELTA_MMA_COLUMNS, COLUMN_TILES = COLUMNS / 16 };

/* What the chains take of a piece and value head by row: beta; the decay from the piece's begin
 * with 1/|k|, that to its end with 1/|k|, the former with 1/|q| and the scale. */
struct alignas(16) chain_gates {
  float beta[ROWS], k_start[ROWS], k_end[ROWS], q_start[ROWS];
  float keep, unused[3]; /* decay of the state by the piece */
};
struct alignas(16) piece_terms {
  chain_gates chain;
  float norm_q[ROWS], norm_k[ROWS]; /* 1/|q| with the scale, 1/|k| */
  piece_gates gates;
};
/* (1 + L)^-1 - 1 and P, their nearest bf16 numbers and the rest. */
struct piece_pairs {
  frag_tile t[2][FRAG_TRIANGLE], p[2][FRAG_TRIANGLE];
};
/* Of 16 columns of values, by columns: [column][row or key], nearest and rest. */
struct value_rows {
  frag_tile x[2][ROW_TILES];
};
struct value_state {
  frag_tile x[2][KEY_TILES];
};
static_assert(sizeof(piece_pairs) == PS_DELTA_PAIR_BYTES &&
                  sizeof(piece_terms) == PS_DELTA_TERM_BYTES &&
                  sizeof(value_rows) == PS_DELTA_ROW_BYTES &&
                  sizeof(value_state) == PS_DELTA_STATE_BYTES,
              "what scratch.h counts");

struct mma_job : delta_rows<bf16> {
  piece_pairs *pairs; /* [piece][value head], as terms */
  piece_terms *terms;
  value_rows *d, *dy; /* [piece][value head][16 columns], as states */
  value_state *states, *dstates;
  float4 *sums; /* dq and dk of a key head, as gradient_k's threads have them */
  uint32_t ring;
  bool small, small_gradient; /* shared memory is: the SMALL of chains and of mma_gradient_k */

  /* Tiles of a value head's columns, in those of whole blocks of the chains. */
  __device__ uint32_t columns() const {
    return (a.value_dim + COLUMNS - 1) / COLUMNS * COLUMN_TILES;
  }
  __device__ size_t column_at(uint32_t piece, uint32_t head, uint32_t tile) const {
    return at(piece, head) * columns() + tile;
  }
};

/* Of shared memory, where SMALL: X lies elsewhere. */
struct alignas(16) elsewhere {};
template <bool SMALL, typename X> using unless_small = std::conditional_t<SMALL, elsewhere, X>;

/* CHUNKS chunks of 8 columns of 64 rows of @x, of which @n rows of @valid columns are there: to
 * tiles of shared memory, zeros elsewhere. By THREADS threads, of which this is @tid; eight rows of
 * WIDE chunks are neighbours'. */
template <uint32_t CHUNKS, uint32_t THREADS>
__device__ __forceinline__ void load_tiles(frag_tile *to, const bf16 *x, size_t ld, uint32_t n,
                                           uint32_t valid, uint32_t tid) {
  constexpr uint32_t WIDE = CHUNKS < 4 ? CHUNKS : 4, AT_ONCE = THREADS / WIDE,
                     STEPS = AT_ONCE < ROWS ? ROWS / AT_ONCE : 1,
                     ACROSS = AT_ONCE < ROWS ? WIDE : AT_ONCE / ROWS * WIDE;
  static_assert(ROWS * CHUNKS % THREADS == 0 && (STEPS == 1 || AT_ONCE % 16 == 0),
                "a thread's chunks are whole tiles apart");
  const uint32_t r = tid % 8 + tid / (8 * WIDE) % 8 * 8,
                 c = tid / 8 % WIDE + tid / (ROWS * WIDE) * WIDE;
  char *at = (char *)to + frag_chunk(CHUNKS / 2, r, c);
  const bool whole = n == ROWS && valid >= CHUNKS * 8;
#pragma unroll
  for (uint32_t i = 0; i < STEPS; i++) {
    const uint32_t row = r + i * AT_ONCE;
    const bf16 *of_row = x + (whole || row < n ? row * ld : 0);
    if (whole) {
#pragma unroll
      for (uint32_t e = 0; e < CHUNKS / ACROSS; e++)
        ps_copy_async(at + frag_chunk(CHUNKS / 2, i * AT_ONCE, e * ACROSS),
                      of_row + (c + e * ACROSS) * 8);
    } else {
#pragma unroll 1
      for (uint32_t e = 0; e < CHUNKS / ACROSS; e++) {
        const uint32_t col = (c + e * ACROSS) * 8;
        const bool there = row < n && col < valid;
        ps_copy_async(at + frag_chunk(CHUNKS / 2, i * AT_ONCE, e * ACROSS),
                      of_row + (there ? col : 0), there);
      }
    }
  }
}
/* BYTES, a multiple of 16. */
template <uint32_t BYTES, uint32_t THREADS>
__device__ __forceinline__ void load_bytes(void *to, const void *from, uint32_t tid) {
  static_assert(BYTES % 16 == 0, "whole vectors");
#pragma unroll
  for (uint32_t i = 0; i < BYTES; i += THREADS * 16)
    if (i + tid * 16 < BYTES)
      ps_copy_async((char *)to + i + tid * 16, (const char *)from + i + tid * 16);
}

/* M of tile (row, col) of a piece, at a lane's elements of a tile of sums. No element waits for
 * another, as they would with a branch each. */
__device__ __forceinline__ void tile_decays(frag_sum &x, const piece_gates &s, uint32_t row,
                                            uint32_t col) {
  double of_row[2], of_col[4];
  int32_t doc[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    of_row[i] = s.sum[row * 16 + frag_row(2 * i)];
    doc[i] = s.doc[row * 16 + frag_row(2 * i)];
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    of_col[i] = s.sum[col * 16 + frag_col(i / 2, i % 2)];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const uint32_t r = row * 16 + frag_row(e % 4), i = col * 16 + frag_col(e / 4, e % 4);
    const float decay = expf((float)(of_row[e / 2 % 2] - of_col[e / 4 * 2 + e % 2]));
    x[e / 4][e % 4] = i <= r && doc[e / 2 % 2] <= (int32_t)i ? decay : 0.0f;
  }
}

/* ---- prepare --------------------------------------------------------------------------------- */

enum { GATE_HEADS = 2 };
struct prepare_rows {
  frag_tile q[ROW_TILES][KEY_TILES], k[ROW_TILES][KEY_TILES];
};
/* l and t come where the rows and `part` were: the steps of an inverse wait for each other, so that
 * it is the number of heads that an SM has at once that counts. */
struct prepare_shared {
  float l[GATE_HEADS][ROWS][LD], t[GATE_HEADS][ROWS][LD], norms[2 * ROWS];
  piece_gates gates[GATE_HEADS];

  __device__ prepare_rows &rows() { return *(prepare_rows *)l; }
  __device__ float (*part())[2 * ROWS] { return (float (*)[2 * ROWS]) t[GATE_HEADS - 1]; }
};
static_assert(sizeof(prepare_rows) <= sizeof(prepare_shared::l) && GATE_HEADS == 2,
              "rows in l, part in t");
static_assert(3 * (sizeof(prepare_shared) + 1024) <= 228 << 10, "three blocks of an SM of 9.0");

/* invert() of @n heads at once: t = (I + l)^-1, the same sums. */
__device__ inline void invert_heads(prepare_shared &s, uint32_t n) {
  enum { B = 16, N = ROWS / B, EACH = 4, THREADS = B * B / EACH, UNITS = TILE_THREADS / THREADS };
  constexpr uint32_t MOST = (GATE_HEADS * (N - 1) + UNITS - 1) / UNITS;
  const uint32_t tid = threadIdx.x, r = tid % THREADS / EACH, c = tid % EACH * EACH;
  static_assert(TILE_THREADS >= GATE_HEADS * ROWS, "a thread for each column");
  if (tid < n * ROWS) {
    const uint32_t at = tid % ROWS / B * B, col = tid % B;
    const auto &l = s.l[tid / ROWS];
    float x[B];
#pragma unroll
    for (int i = 0; i < B; i++) {
      x[i] = i == (int)col ? 1.0f : 0.0f;
#pragma unroll
      for (int k = 0; k < i; k++)
        x[i] = fmaf(-l[at + i][at + k], x[k], x[i]);
      s.t[tid / ROWS][at + i][at + col] = x[i];
    }
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t off = 1; off < N; off++) {
    /* f(head, first row and column of a block below the diagonal, which of the thread's) */
    const auto each = [&](auto f) {
#pragma unroll
      for (uint32_t i = 0; i < MOST; i++) {
        const uint32_t unit = tid / THREADS + i * UNITS, head = unit / (N - off),
                       block = unit % (N - off);
        if (head < n)
          f(head, (off + block) * B, block * B, i);
      }
    };
    const auto add = [&](float4 &sum, uint32_t head, float x, uint32_t k, uint32_t col) {
      const float4 y = *(const float4 *)&s.t[head][k][col + c];
      sum.x = fmaf(x, y.x, sum.x);
      sum.y = fmaf(x, y.y, sum.y);
      sum.z = fmaf(x, y.z, sum.z);
      sum.w = fmaf(x, y.w, sum.w);
    };
    each([&](uint32_t head, uint32_t row, uint32_t col,
             uint32_t) { /* in place of t_ij */
                         float4 sum = {};
#pragma unroll 16
                         for (uint32_t k = col; k < row; k++)
                           add(sum, head, s.l[head][row + r][k], k, col);
                         *(float4 *)&s.t[head][row + r][col + c] = sum;
    });
    __syncthreads();
    float4 sums[MOST];
    each([&](uint32_t head, uint32_t row, uint32_t col, uint32_t i) {
      sums[i] = {};
#pragma unroll
      for (uint32_t k = 0; k < B; k++)
        add(sums[i], head, -s.t[head][row + r][row + k], row + k, col);
    });
    __syncthreads();
    each([&](uint32_t head, uint32_t row, uint32_t col, uint32_t i) {
      *(float4 *)&s.t[head][row + r][col + c] = sums[i];
    });
    __syncthreads();
  }
}

/* norms[row of q, then of k]: 1/|x|, times the scale of q. */
__device__ inline void find_norms(prepare_shared &s, float scale, uint32_t n) {
  const uint32_t row = threadIdx.x % (2 * ROWS), half = threadIdx.x / (2 * ROWS), r = row % ROWS;
  const char *x = (const char *)(row < ROWS ? s.rows().q : s.rows().k);
  float sum = 0.0f;
#pragma unroll
  for (uint32_t c = 0; c < KEY_TILES; c++) {
    const uint4 v = *(const uint4 *)(x + frag_chunk(KEY_TILES, r, half * KEY_TILES + c));
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
      sum = fmaf(frag_high(w[i]), frag_high(w[i]), fmaf(frag_low(w[i]), frag_low(w[i]), sum));
  }
  s.part()[half][row] = sum;
  __syncthreads();
  if (half == 0)
    s.norms[row] =
        r < n ? (row < ROWS ? scale : 1.0f) / sqrtf(sum + s.part()[1][row] + 1e-6f) : 0.0f;
  __syncthreads();
}

/* (1 + L)^-1 - 1 from @t to tiles of memory. */
__device__ inline void store_inverse(const float (*t)[LD], piece_pairs &to) {
  for (uint32_t i = threadIdx.x / 32; i < FRAG_TRIANGLE; i += WARPS) {
    const uint32_t row = i < 1 ? 0 : i < 3 ? 1 : i < 6 ? 2 : 3, col = i - frag_triangle(row, 0);
    frag_sum x;
    frag high, low;
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      const float2 v =
          *(const float2 *)&t[row * 16 + frag_row(e % 4)][col * 16 + frag_col(e / 4, 0)];
      const int32_t above = (int32_t)(frag_row(e % 4) - frag_col(e / 4, 0));
      x[e / 4][e % 4] = row == col && above == 0 ? 0.0f : v.x;
      x[e / 4][e % 4 + 1] = row == col && above == 1 ? 0.0f : v.y;
    }
    frag_split(high, low, x);
    frag_store(to.t[0][i], high);
    frag_store(to.t[1][i], low);
  }
}

/* A block for each piece and key head. */
__global__ void __launch_bounds__(TILE_THREADS, 3) mma_prepare_k(const mma_job j) {
  extern __shared__ uint4 dynamic[];
  prepare_shared &s = *(prepare_shared *)dynamic;
  prepare_rows &rows = s.rows();
  const uint32_t piece = blockIdx.x, key = blockIdx.y, n = j.n_rows(piece), tid = threadIdx.x,
                 m = tid / 32 % 4, c = tid / 128 * 2; /* the warp's row of tiles, its columns */
  const size_t row0 = j.row0(piece) * j.ld;
  load_tiles<2 * KEY_TILES, TILE_THREADS>(rows.q[0], j.keys(0, key) + row0, j.ld, n, j.a.key_dim,
                                          tid);
  load_tiles<2 * KEY_TILES, TILE_THREADS>(rows.k[0], j.keys(1, key) + row0, j.ld, n, j.a.key_dim,
                                          tid);
  ps_copy_commit();
  const auto gates_from = [&](uint32_t h) { /* of GATE_HEADS value heads */
                                            const uint32_t at = h + tid / ROWS;
                                            find_gates(tid / ROWS < GATE_HEADS && at < j.share
                                                           ? &s.gates[tid / ROWS]
                                                           : nullptr,
                                                       j, piece, key * j.share + at, tid % ROWS);
  };
  gates_from(0);
  ps_copy_wait<0>();
  __syncthreads();
  find_norms(s, j.scale, n);
  frag_sum kk[2], qk[2];
  frag_clear(kk);
  frag_clear(qk);
#pragma unroll
  for (int u = 0; u < 2; u++)
    if (c + u <= m)
#pragma unroll
      for (int i = 0; i < KEY_TILES; i++) {
        frag q, k, b;
        frag_load<FRAG_A>(q, rows.q[m][i]);
        frag_load<FRAG_A>(k, rows.k[m][i]);
        frag_load<FRAG_B>(b, rows.k[c + u][i]);
        frag_add(kk[u], k, b);
        frag_add(qk[u], q, b);
      }
  for (uint32_t first = 0; first < j.share; first += GATE_HEADS) {
    const uint32_t heads = min((uint32_t)GATE_HEADS, j.share - first);
    const size_t at = j.at(piece, key * j.share + first);
    __syncthreads(); /* nobody is in the rows, or in the gates and inverses of the heads before */
    if (first)
      gates_from(first);
    if (tid < heads * ROWS) {
      const uint32_t row = tid % ROWS;
      const piece_gates &gates = s.gates[tid / ROWS];
      piece_terms &terms = j.terms[at + tid / ROWS];
      const float q = s.norms[row], k = s.norms[ROWS + row];
      terms.chain.beta[row] = (float)gates.beta[row];
      terms.chain.k_start[row] = gates.start[row] * k;
      terms.chain.k_end[row] = gates.end[row] * k;
      terms.chain.q_start[row] = gates.start[row] * q;
      terms.norm_q[row] = q;
      terms.norm_k[row] = k;
      if (row == n - 1)
        terms.chain.keep = gates.start[row];
    }
#pragma unroll 1
    for (uint32_t h = 0; h < heads; h++) {
      const piece_gates &gates = s.gates[h];
      piece_pairs &pairs = j.pairs[at + h];
      for (uint32_t i = tid; i < sizeof gates / 16; i += TILE_THREADS)
        ((uint4 *)&j.terms[at + h].gates)[i] = ((const uint4 *)&gates)[i];
#pragma unroll
      for (int u = 0; u < 2; u++) {
        if (c + u > m)
          continue;
        frag_sum p, decays;
        frag high, low;
        tile_decays(decays, gates, m, c + u);
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const uint32_t r = m * 16 + frag_row(e % 4), i = (c + u) * 16 + frag_col(e / 4, e % 4);
          const float decay = decays[e / 4][e % 4] * s.norms[ROWS + i];
          p[e / 4][e % 4] = qk[u][e / 4][e % 4] * s.norms[r] * decay;
          s.l[h][r][i] =
              i < r ? (float)gates.beta[r] * (kk[u][e / 4][e % 4] * s.norms[ROWS + r] * decay)
                    : 0.0f;
        }
        frag_split(high, low, p);
        frag_store(pairs.p[0][frag_triangle(m, c + u)], high);
        frag_store(pairs.p[1][frag_triangle(m, c + u)], low);
      }
    }
    __syncthreads();
    invert_heads(s, heads);
    for (uint32_t h = 0; h < heads; h++)
      store_inverse(s.t[h], j.pairs[at + h]);
  }
}

} // namespace
#endif
