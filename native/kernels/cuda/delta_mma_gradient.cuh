/* delta_mma_gradient.cuh - the backward pass's gradients of a piece, on the tensor cores
 * (delta_mma.cu).
 *
 * Of keys and queries: by the rows of qkv as they are, x, with y = x norm. With A the gradient of y
 * times norm, that of x is A - x norm^2 (x . A): 1/|x| of the columns of P and L comes in before
 * their products, that of the rows too. */
#ifndef PS_KERNELS_CUDA_DELTA_MMA_GRADIENT_CUH
#define PS_KERNELS_CUDA_DELTA_MMA_GRADIENT_CUH
#include "kernels/cuda/delta_mma.cuh"

namespace {

/* Warps by fours: of 16 rows, and of 32 columns of keys or 16 rows of the other factor. GROUP:
 * tiles of 16 columns of values from one barrier to the next. */
enum { GRADIENT_THREADS = 512, ACROSS = 4, GRADIENT_GROUP = 2 };

/* Of 16 columns of values. */
struct gradient_stage {
  value_state s, ds;
  value_rows d, dy;
  frag_tile d_o[ROW_TILES], v[ROW_TILES];
};
/* dP M and dL beta M, both with norms. */
struct gradient_pairs {
  frag_tile dp[2][FRAG_TRIANGLE], dl[2][FRAG_TRIANGLE];
};
struct alignas(16) across_sums {
  float x[ROWS][ACROSS];
  __device__ __forceinline__ float (&operator[](uint32_t r)) [ACROSS] {
    return x[r];
  } __device__ __forceinline__ const float (&operator[](uint32_t r) const)[ACROSS] {
    return x[r];
  }
};
/* SMALL: two stages, and the pairs lie in the second. A head's tiles of columns are even in number,
 * so that its last are in that stage, and the next head's first are not. */
template <bool SMALL> struct gradient_shared {
  static constexpr uint32_t GROUP = SMALL ? 1 : GRADIENT_GROUP, RING = SMALL       ? 2
                                                                       : GROUP > 1 ? 2 * GROUP
                                                                                   : 3;
  gradient_stage ring[RING];
  frag_tile q[ROW_TILES][KEY_TILES], k[ROW_TILES][KEY_TILES];
  unless_small<SMALL, gradient_pairs> own;
  piece_terms terms[SMALL ? 1 : 2]; /* of a value head and the next */
  across_sums qs, ks, ke;           /* q . S dO, k . S dY, k . dS' D without norms */
  across_sums of_m, of_l;           /* rows of dM M and of dbeta by L */
  across_sums column;               /* columns of dM M, by rows of tiles */
  float vy[ROWS], kept[GRADIENT_THREADS / 32];

  __device__ piece_terms &terms_of(uint32_t head) { return terms[SMALL ? 0 : head % 2]; }
  __device__ gradient_pairs &pairs() {
    if constexpr (SMALL)
      return *(gradient_pairs *)&ring[1];
    else
      return own;
  }
};
static_assert(sizeof(gradient_pairs) <= sizeof(gradient_stage) && COLUMN_TILES % 2 == 0,
              "a head's pairs in the stage of its last columns");

/* Sums of a row of tiles: in every lane of the row's four. */
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float column_sum(float x) {
#pragma unroll
  for (int w = 4; w < 32; w *= 2)
    x += __shfl_xor_sync(0xffffffffu, x, w);
  return x;
}
/* to[row][c] = the sum over the row of x . of, tiles of which @of is in shared memory. */
__device__ __forceinline__ void dot_rows(across_sums &to, const frag_sum (&x)[2],
                                         const frag_tile *of, uint32_t m, uint32_t c) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t word = of[2 * c + i / 2].w[(half * 2 + i % 2) * 32 + lane];
      sum = fmaf(x[i / 2][i % 2][2 * half], frag_low(word), sum);
      sum = fmaf(x[i / 2][i % 2][2 * half + 1], frag_high(word), sum);
    }
    sum = row_sum(sum);
    if (lane % 4 == 0)
      to[m * 16 + frag_row(2 * half)][c] = sum;
  }
}

/* What a thread loads of 16 columns of values, tile after tile: those of the key head's value heads
 * in turn, whose tiles of states, D and dY follow each other in memory. */
struct gradient_stream {
  const char *s, *ds, *rows; /* 16 bytes of S, of dS', of D or dY */
  const bf16 *x;             /* of the gradient of O or of V: its row of a head, or NULL */
  uint32_t tile, heads, col, to_rows, to_x;
  bool in; /* the row is there */

  __device__ __forceinline__ gradient_stream(const mma_job &j, uint32_t piece, uint32_t key)
      : x(nullptr), tile(0), heads(j.share), col(0), to_x(0), in(false) {
    const uint32_t tid = threadIdx.x, head = key * j.share, r = tid % 8 + tid / 16 % 8 * 8,
                   c = tid / 8 % 2;
    const size_t at = j.column_at(piece, head, 0), row0 = j.row0(piece) + r;
    s = (const char *)&j.states[at] + tid * 16;
    ds = (const char *)&j.dstates[at] + tid * 16;
    rows = (const char *)(tid < 256 ? &j.d[at] : &j.dy[at]) + tid % 256 * 16;
    to_rows = (uint32_t)(tid < 256 ? offsetof(gradient_stage, d) : offsetof(gradient_stage, dy)) +
              tid % 256 * 16;
    if (tid < 256) {
      in = r < j.n_rows(piece);
      col = c * 8;
      to_x = (uint32_t)(tid < 128 ? offsetof(gradient_stage, d_o) : offsetof(gradient_stage, v)) +
             frag_chunk(1, r, c);
      x = tid < 128 ? j.d_o + (row0 * j.a.n_value_heads + head) * j.a.value_dim
                    : j.qkv + row0 * j.ld + j.values(head);
    }
  }
  /* Begins to load the next ones, if there are any. */
  __device__ __forceinline__ void load(gradient_stage &stage, const mma_job &j) {
    if (heads) {
      char *const to = (char *)&stage;
      ps_copy_async(to + offsetof(gradient_stage, s) + threadIdx.x * 16, s);
      ps_copy_async(to + offsetof(gradient_stage, ds) + threadIdx.x * 16, ds);
      ps_copy_async(to + to_rows, rows);
      s += sizeof(value_state);
      ds += sizeof(value_state);
      rows += sizeof(value_rows);
      if (threadIdx.x < 256) {
        const bool there = in && col < j.a.value_dim;
        ps_copy_async(to + to_x, there ? x + col : j.qkv, there);
        col += 16;
      }
      if (++tile == j.columns()) {
        tile = 0;
        heads--;
        x += j.a.value_dim;
        col = col % 16;
      }
    }
    ps_copy_commit();
  }
};
static_assert(sizeof(value_state) == 16 * GRADIENT_THREADS && sizeof(value_rows) == 16 * 256 &&
                  GRADIENT_THREADS == 512,
              "a thread's 16 bytes of each");

/* A thread's two columns of a row of dV, tile after tile of a value head. */
struct gradient_values {
  uint32_t y, v, half; /* where of dY and V its numbers are, and which of a word's dY */
  uint32_t col;
  float beta;
  bf16 *to;
  bool in;

  __device__ __forceinline__ gradient_values(const mma_job &j, const piece_terms &terms,
                                             uint32_t piece, uint32_t head) {
    const uint32_t r = threadIdx.x / 8, c = threadIdx.x % 8 * 2;
    y = r / 16 * 128 + frag_word(c, r % 16);
    v = r / 16 * 128 + frag_word(r % 16, c);
    half = r % 2 ? 0x3244 : 0x1044; /* of a word, as an fp32 number */
    col = c;
    beta = terms.chain.beta[r];
    in = r < j.n_rows(piece);
    to = j.dqkv + (j.row0(piece) + (size_t)r) * j.ld + j.values(head) + c;
  }
  /* Stores them; returns their part of v . dY. */
  __device__ __forceinline__ float store(const gradient_stage &at, const mma_job &j) {
    const uint32_t *const of_y = (const uint32_t *)&at.dy + y;
    constexpr uint32_t REST = sizeof at.dy.x[0] / 4;
    const auto number = [&](uint32_t i) {
      return __uint_as_float(__byte_perm(of_y[i], 0, half)) +
             __uint_as_float(__byte_perm(of_y[i + REST], 0, half));
    };
    const float y0 = number(0), y1 = number(4);
    const uint32_t of_v = ((const uint32_t *)&at.v)[v];
    if (in && col < j.a.value_dim)
      *(uint32_t *)to = frag_pack(beta * y0, beta * y1);
    col += 16;
    to += 16;
    return fmaf(y0, frag_low(of_v), y1 * frag_high(of_v));
  }
};
/* The thread's part of the sum of S dS'. */
__device__ __forceinline__ float states_dot(const gradient_stage &at) {
  const uint32_t *const s = (const uint32_t *)&at.s, *const ds = (const uint32_t *)&at.ds;
  constexpr uint32_t REST = sizeof at.s.x[0] / 4;
  float sum = 0.0f;
#pragma unroll
  for (uint32_t from = 0; from < REST; from += GRADIENT_THREADS) {
    const uint32_t i = from + threadIdx.x, high = s[i], low = s[i + REST], d_high = ds[i],
                   d_low = ds[i + REST];
    sum = fmaf(frag_low(high) + frag_low(low), frag_low(d_high) + frag_low(d_low), sum);
    sum = fmaf(frag_high(high) + frag_high(low), frag_high(d_high) + frag_high(d_low), sum);
  }
  return sum;
}

/* A value head's sums over the columns of values. */
struct gradient_sums {
  frag_sum q[2], y[2], d[2]; /* dO S^T, dY S^T, D dS'^T */
  frag_sum p, l;             /* dO D^T, dY D^T */
};
__device__ __forceinline__ void add_columns(gradient_sums &x, const gradient_stage &at, uint32_t m,
                                            uint32_t c) {
  frag o, y, y_low, d, d_low, b, b_low;
  frag_load<FRAG_A>(o, at.d_o[m]);
  frag_load<FRAG_AT>(y, at.dy.x[0][m]);
  frag_load<FRAG_AT>(y_low, at.dy.x[1][m]);
  frag_load<FRAG_AT>(d, at.d.x[0][m]);
  frag_load<FRAG_AT>(d_low, at.d.x[1][m]);
#pragma unroll
  for (int u = 0; u < 2; u++) {
    frag_load<FRAG_BT>(b, at.s.x[0][2 * c + u]);
    frag_load<FRAG_BT>(b_low, at.s.x[1][2 * c + u]);
    frag_add(x.q[u], o, b);
    frag_add(x.y[u], y, b);
    frag_add(x.q[u], o, b_low);
    frag_add(x.y[u], y, b_low);
    frag_add(x.y[u], y_low, b);
    frag_load<FRAG_BT>(b, at.ds.x[0][2 * c + u]);
    frag_load<FRAG_BT>(b_low, at.ds.x[1][2 * c + u]);
    frag_add(x.d[u], d, b);
    frag_add(x.d[u], d, b_low);
    frag_add(x.d[u], d_low, b);
  }
  if (c <= m) {
    frag_load<FRAG_BT>(b, at.d.x[0][c]);
    frag_load<FRAG_BT>(b_low, at.d.x[1][c]);
    frag_add(x.p, o, b);
    frag_add(x.l, y, b);
    frag_add(x.p, o, b_low);
    frag_add(x.l, y, b_low);
    frag_add(x.l, y_low, b);
  }
}

/* Tile (m, c) of dP M and dL beta M, and what dM and L give to dg and dbeta. */
template <bool SMALL>
__device__ __forceinline__ void find_pairs(gradient_shared<SMALL> &s, const piece_terms &terms,
                                           const gradient_sums &x, uint32_t m, uint32_t c) {
  gradient_pairs &to = s.pairs();
  const uint32_t lane = threadIdx.x % 32;
  frag_sum product[2], dp, dl; /* product: q k^T, k k^T of rows as they are */
  tile_decays(dp, terms.gates, m, c);
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const uint32_t r = m * 16 + frag_row(e % 4), i = c * 16 + frag_col(e / 4, e % 4);
    const float decay = dp[e / 4][e % 4] * terms.norm_k[i];
    dp[e / 4][e % 4] = x.p[e / 4][e % 4] * (decay * terms.norm_q[r]);
    dl[e / 4][e % 4] = i < r ? -x.l[e / 4][e % 4] * (decay * terms.norm_k[r]) : 0.0f;
  }
  frag_clear(product);
#pragma unroll
  for (int i = 0; i < KEY_TILES; i++) {
    frag q, k, b;
    frag_load<FRAG_A>(q, s.q[m][i]);
    frag_load<FRAG_A>(k, s.k[m][i]);
    frag_load<FRAG_B>(b, s.k[c][i]);
    frag_add(product[0], q, b);
    frag_add(product[1], k, b);
  }
  float of_m[2] = {}, of_l[2] = {}, column[4] = {};
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const float beta = terms.chain.beta[m * 16 + frag_row(e % 4)],
                l = dl[e / 4][e % 4] * product[1][e / 4][e % 4],
                all = fmaf(dp[e / 4][e % 4], product[0][e / 4][e % 4], beta * l);
    dl[e / 4][e % 4] *= beta;
    of_m[e / 2 % 2] += all;
    of_l[e / 2 % 2] += l;
    column[e / 4 * 2 + e % 2] += all;
  }
  frag high, low;
  frag_split(high, low, dp);
  frag_store(to.dp[0][frag_triangle(m, c)], high);
  frag_store(to.dp[1][frag_triangle(m, c)], low);
  frag_split(high, low, dl);
  frag_store(to.dl[0][frag_triangle(m, c)], high);
  frag_store(to.dl[1][frag_triangle(m, c)], low);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float row_m = row_sum(of_m[half]), row_l = row_sum(of_l[half]);
    if (lane % 4 == 0) {
      s.of_m[m * 16 + frag_row(2 * half)][c] = row_m;
      s.of_l[m * 16 + frag_row(2 * half)][c] = row_l;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float sum = column_sum(column[i]);
    if (lane < 4)
      s.column[c * 16 + frag_col(i / 2, i % 2)][m] = sum;
  }
}

/* x += of y: of tile (m, k) of a triangle as A, or of (k, m) as its transpose. */
template <frag_kind KIND>
__device__ __forceinline__ void add_pairs(frag_sum (&x)[2], const frag_tile (*of)[FRAG_TRIANGLE],
                                          uint32_t m, uint32_t k, const frag_tile *y) {
  const uint32_t at = KIND == FRAG_A ? frag_triangle(m, k) : frag_triangle(k, m);
  frag high, low, b[2];
  frag_load<KIND>(high, of[0][at]);
  frag_load<KIND>(low, of[1][at]);
  frag_load<FRAG_BT>(b[0], y[0]);
  frag_load<FRAG_BT>(b[1], y[1]);
  frag_add(x[0], high, b[0]);
  frag_add(x[1], high, b[1]);
  frag_add(x[0], low, b[0]);
  frag_add(x[1], low, b[1]);
}

/* Of a row: the sum of @first to @last across, in order. */
__device__ __forceinline__ double across_sum(const float (&x)[ACROSS], uint32_t first = 0,
                                             uint32_t last = ACROSS - 1) {
  static_assert(ACROSS == 4, "16 bytes");
  const float4 v = *(const float4 *)x;
  const float of[] = {v.x, v.y, v.z, v.w};
  double sum = 0;
#pragma unroll
  for (uint32_t c = 0; c < ACROSS; c++)
    sum += first <= c && c <= last ? (double)of[c] : 0;
  return sum;
}
/* A warp: dba of a value head, and the piece's terms of da_log and ddt_bias. A lane has two rows:
 * 2 lane and the next. */
template <bool SMALL>
__device__ __forceinline__ void find_gate_gradients(const gradient_shared<SMALL> &s,
                                                    const piece_terms &terms, const mma_job &j,
                                                    uint32_t piece, uint32_t head) {
  const uint32_t lane = threadIdx.x % 32, n = j.n_rows(piece), nv = j.a.n_value_heads;
  const piece_gates &gates = terms.gates;
  double dg[2], dbeta[2], ends = 0, kept = 0;
#pragma unroll
  for (int u = 0; u < 2; u++) {
    const uint32_t r = 2 * lane + u, m = r / 16;
    const double of_m = across_sum(s.of_m[r], 0, m), of_l = across_sum(s.of_l[r], 0, m),
                 column = across_sum(s.column[r], m, ACROSS - 1),
                 qs = across_sum(s.qs[r]) * (double)terms.chain.q_start[r],
                 ks = across_sum(s.ks[r]) * (double)terms.chain.k_start[r],
                 ke = across_sum(s.ke[r]) * (double)terms.chain.k_end[r];
    dg[u] = of_m - column + qs - gates.beta[r] * ks - ke;
    dbeta[u] = of_l + (double)s.vy[r] - ks;
    ends += ke;
  }
#pragma unroll
  for (int w = 16; w > 0; w /= 2)
    ends += __shfl_xor_sync(0xffffffffu, ends, w);
#pragma unroll
  for (int i = 0; i < GRADIENT_THREADS / 32; i++)
    kept += (double)s.kept[i];
  /* dg of a row: the sum of those of G from it on */
  double sum = dg[0] + dg[1], of_rate = 0, of_bias = 0;
#pragma unroll
  for (uint32_t w = 1; w < 32; w *= 2) {
    const double behind = __shfl_down_sync(0xffffffffu, sum, w);
    sum += lane + w < 32 ? behind : 0;
  }
  const double behind = __shfl_down_sync(0xffffffffu, sum, 1);
  sum = ends + (double)terms.chain.keep * kept + (lane < 31 ? behind : 0);
#pragma unroll
  for (int u = 1; u >= 0; u--) {
    const uint32_t r = 2 * lane + u;
    sum += dg[u];
    if (r >= n)
      continue;
    /* no decay where a document begins */
    const double g = gates.doc[r] == (int32_t)r ? 0 : sum, beta = gates.beta[r];
    const size_t to = (size_t)(j.row0(piece) + r) * 2 * nv + head;
    of_rate += g * gates.g[r];
    of_bias += g * gates.slope[r];
    j.dba[to] = ps_from_f32<bf16>((float)(dbeta[u] * beta * (1 - beta)));
    j.dba[to + nv] = ps_from_f32<bf16>((float)(g * gates.slope[r]));
  }
#pragma unroll
  for (int w = 16; w > 0; w /= 2) {
    of_rate += __shfl_xor_sync(0xffffffffu, of_rate, w);
    of_bias += __shfl_xor_sync(0xffffffffu, of_bias, w);
  }
  if (lane == 0) {
    double *to = j.weights + ((size_t)(j.piece0 + piece) * nv + head) * 2;
    to[0] = of_rate;
    to[1] = of_bias;
  }
}

/* The thread's tiles of dq or dk, through the norm, to dqkv. */
__device__ __forceinline__ void store_keys(const mma_job &j, uint32_t piece, uint32_t key,
                                           uint32_t which, const frag_sum (&x)[2],
                                           const frag_tile *of, const float *norm,
                                           const across_sums &dot, uint32_t m, uint32_t c) {
  const uint32_t lane = threadIdx.x % 32, n = j.n_rows(piece), dk = j.a.key_dim;
  const float scale = which ? 1.0f : j.scale;
  bf16 *to = j.dqkv + j.row0(piece) * j.ld + j.keys_at(which, key);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint32_t r = m * 16 + frag_row(2 * half);
    const float y = norm[r] / scale,
                f = y * y * ((dot[r][0] + dot[r][1]) + (dot[r][2] + dot[r][3]));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t word = of[2 * c + i / 2].w[(half * 2 + i % 2) * 32 + lane],
                     col = (2 * c + i / 2) * 16 + frag_col(i % 2, 0);
      if (r < n && col < dk)
        *(uint32_t *)(to + r * j.ld + col) =
            frag_pack(fmaf(-frag_low(word), f, x[i / 2][i % 2][2 * half]),
                      fmaf(-frag_high(word), f, x[i / 2][i % 2][2 * half + 1]));
    }
  }
}

/* A block for each piece and key head. */
template <bool SMALL>
__global__ void __launch_bounds__(GRADIENT_THREADS, 1) mma_gradient_k(const mma_job j) {
  extern __shared__ uint4 dynamic[];
  gradient_shared<SMALL> &s = *(gradient_shared<SMALL> *)dynamic;
  constexpr uint32_t RING = s.RING, GROUP = s.GROUP, AHEAD = RING - GROUP;
  const gradient_pairs &pairs = s.pairs();
  const uint32_t piece = blockIdx.x, key = blockIdx.y, n = j.n_rows(piece), tid = threadIdx.x,
                 lane = tid % 32, m = tid / 32 % 4, c = tid / 128, columns = j.columns();
  const size_t row0 = j.row0(piece) * j.ld;
  float4 *const kept = j.sums + j.key_at(piece, key) * 8 * GRADIENT_THREADS + tid;
  load_tiles<2 * KEY_TILES, GRADIENT_THREADS>(s.q[0], j.keys(0, key) + row0, j.ld, n, j.a.key_dim,
                                              tid);
  load_tiles<2 * KEY_TILES, GRADIENT_THREADS>(s.k[0], j.keys(1, key) + row0, j.ld, n, j.a.key_dim,
                                              tid);
  gradient_stream stream(j, piece, key);
  const auto load_terms = [&](uint32_t h) {
    load_bytes<sizeof(piece_terms), GRADIENT_THREADS>(
        &s.terms_of(h), &j.terms[j.at(piece, key * j.share + h)], tid);
  };
  uint32_t place = 0;
  if (!SMALL)
    load_terms(0);
#pragma unroll
  for (uint32_t i = 0; i < AHEAD; i++)
    stream.load(s.ring[i], j);
  for (uint32_t h = 0; h < j.share; h++) {
    const uint32_t head = key * j.share + h;
    gradient_sums x;
    float vy = 0.0f, dot = 0.0f;
    frag_clear(x.q);
    frag_clear(x.y);
    frag_clear(x.d);
#pragma unroll
    for (int e = 0; e < 8; e++)
      x.p[e / 4][e % 4] = x.l[e / 4][e % 4] = 0.0f;
    if (SMALL) {
      __syncthreads(); /* nobody is in the terms of the head before */
      load_terms(h);
    }
    const piece_terms &terms = s.terms_of(h);
    gradient_values values(j, j.terms[j.at(piece, head)], piece, head);
    for (uint32_t i = 0; i < columns; i += GROUP) {
      ps_copy_wait<AHEAD - GROUP>();
      __syncthreads();
      const uint32_t to = place < GROUP ? place + AHEAD : place - GROUP;
      if (!SMALL && i == 0 && h + 1 < j.share)
        load_terms(h + 1);
#pragma unroll
      for (uint32_t g = 0; g < GROUP; g++)
        stream.load(s.ring[to + g], j);
#pragma unroll
      for (uint32_t g = 0; g < GROUP; g++) {
        const gradient_stage &at = s.ring[place + g];
        add_columns(x, at, m, c);
        vy += values.store(at, j);
        dot += states_dot(at);
      }
      place = place + GROUP < RING ? place + GROUP : 0;
    }
    dot_rows(s.qs, x.q, s.q[m], m, c);
    dot_rows(s.ks, x.y, s.k[m], m, c);
    dot_rows(s.ke, x.d, s.k[m], m, c);
    if (SMALL)
      __syncthreads(); /* nobody is in the last stage, where pairs come */
    if (c <= m)
      find_pairs(s, terms, x, m, c);
#pragma unroll
    for (int w = 1; w < 8; w *= 2)
      vy += __shfl_xor_sync(0xffffffffu, vy, w);
    if (tid % 8 == 0)
      s.vy[tid / 8] = vy;
    dot = ps_warp_sum(dot);
    if (lane == 0)
      s.kept[tid / 32] = dot;
#pragma unroll
    for (int e = 0; e < 16; e++) {
      const uint32_t r = m * 16 + frag_row(e % 4);
      const chain_gates &gates = terms.chain;
      float &d = x.d[e / 8][e / 4 % 2][e % 4];
      x.q[e / 8][e / 4 % 2][e % 4] *= gates.q_start[r];
      d = gates.k_end[r] * d - gates.beta[r] * gates.k_start[r] * x.y[e / 8][e / 4 % 2][e % 4];
    }
    __syncthreads();
    if (tid / 32 == GRADIENT_THREADS / 32 - 1)
      find_gate_gradients(s, terms, j, piece, head);
    float4 before[8] = {}; /* of the value heads before, on its way */
    if (h)
#pragma unroll
      for (int i = 0; i < 8; i++)
        before[i] = kept[i * GRADIENT_THREADS];
#pragma unroll
    for (uint32_t k = 0; k < ROW_TILES; k++) {
      if (k <= m) {
        add_pairs<FRAG_A>(x.q, pairs.dp, m, k, &s.k[k][2 * c]);
        add_pairs<FRAG_A>(x.d, pairs.dl, m, k, &s.k[k][2 * c]);
      }
      if (k >= m) {
        add_pairs<FRAG_AT>(x.d, pairs.dp, m, k, &s.q[k][2 * c]);
        add_pairs<FRAG_AT>(x.d, pairs.dl, m, k, &s.k[k][2 * c]);
      }
    }
    /* value heads of a key head, in order */
#pragma unroll
    for (int i = 0; i < 8; i++) {
      float (&v)[4] = i < 4 ? x.q[i / 2][i % 2] : x.d[i / 2 - 2][i % 2];
      if (h) {
        v[0] = before[i].x + v[0], v[1] = before[i].y + v[1];
        v[2] = before[i].z + v[2], v[3] = before[i].w + v[3];
      }
      if (h + 1 < j.share)
        kept[i * GRADIENT_THREADS] = make_float4(v[0], v[1], v[2], v[3]);
    }
    if (h + 1 < j.share)
      continue;
    __syncthreads();
    dot_rows(s.qs, x.q, s.q[m], m, c);
    dot_rows(s.ks, x.d, s.k[m], m, c);
    __syncthreads();
    store_keys(j, piece, key, 0, x.q, s.q[m], terms.norm_q, s.qs, m, c);
    store_keys(j, piece, key, 1, x.d, s.k[m], terms.norm_k, s.ks, m, c);
  }
}

} // namespace
#endif
