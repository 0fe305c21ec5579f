/* delta.cuh - what the kernels of the gated delta rule share (delta.cu has the math): a segment's
 * work, its gates. */
#ifndef PS_KERNELS_CUDA_DELTA_CUH
#define PS_KERNELS_CUDA_DELTA_CUH
#include "kernels/cuda/tile.cuh"

namespace {

enum { ROWS = PS_DELTA_ROWS, SLICE = 32, WARPS = TILE_THREADS / 32, LD = ROWS + 4 };
/* Rows of `rows`: factors of chain_k forward and backward. */
enum { BETA, START, END, FORWARD, BACKWARD, FACTORS = PS_DELTA_FACTORS };
static_assert((int)ROWS == (int)TILE_ROWS, "a piece is a tile's rows");

/* A bf16 number is a TF32 number (tile::mma). */
template <typename T> constexpr int EXACT = sizeof(T) == 2;

/* A segment's work. @first: its first row in the operands. */
template <typename T> struct delta_job {
  ps__args_delta a;
  uint32_t first, n_pieces, piece0; /* piece0: of all */
  uint32_t share;
  bool backward, whole; /* chain_k's direction; rows of keys are made of 16 aligned bytes */
  size_t ld;            /* elements of a row of qkv */
  float scale;
  const T *qkv, *ba, *a_log, *dt_bias, *d_o;
  const int32_t *doc_start;
  const float *from; /* states or their gradients before the segment; NULL: zeros */
  float *to;         /* and after it */
  T *o, *dqkv, *dba;
  float *inverse, *products, *pairs, *rows, *norms, *w; /* the first two NULL: not kept */
  /* d and dy: U before their chain; dstates: H before it. states NULL: not kept */
  float *d, *dy, *states, *dstates, *dq, *dk;
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
  __device__ const float *factors(uint32_t piece, uint32_t head, uint32_t which) const {
    return rows + (at(piece, head) * FACTORS + which) * ROWS;
  }
  /* Elements of a row of w. */
  __device__ size_t w_ld() const { return (a.key_dim + ROWS - 1) / ROWS * ROWS; }
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
  /* As they are stored: their product with another takes this as a factor. */
  __device__ __forceinline__ float raw(uint32_t r, uint32_t c) const {
    return r < n ? ps_to_f32(x[r * ld + c]) : 0.0f;
  }
  __device__ __forceinline__ float factor(uint32_t r) const { return norm[r] * scale; }
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

} // namespace
#endif
