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

/* A segment's rows, of which the operands have all. @first: its first row in them. */
template <typename T> struct delta_rows {
  ps__args_delta a;
  uint32_t first, n_pieces, piece0; /* piece0: of all */
  uint32_t share;
  size_t ld; /* elements of a row of qkv */
  float scale;
  const T *qkv, *ba, *a_log, *dt_bias, *d_o;
  const int32_t *doc_start;
  const float *from; /* states or their gradients before the segment; NULL: zeros */
  float *to;         /* and after it; NULL: not kept */
  T *o, *dqkv, *dba;
  double *weights;

  __device__ uint32_t row0(uint32_t piece) const { return first + piece * ROWS; }
  __device__ uint32_t n_rows(uint32_t piece) const {
    return min((uint32_t)ROWS, a.n_tokens - row0(piece));
  }
  /* Columns of the queries (which = 0) or keys (1) of key head @key in a row of qkv. */
  __host__ __device__ size_t keys_at(uint32_t which, uint32_t key) const {
    return (which * a.n_key_heads + key) * (size_t)a.key_dim;
  }
  __device__ const T *keys(uint32_t which, uint32_t key) const { return qkv + keys_at(which, key); }
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

/* What the kernels for any shape need beside them. */
template <typename T> struct delta_job : delta_rows<T> {
  bool backward, whole; /* chain_k's direction; rows of keys are made of 16 aligned bytes */
  float *inverse, *products, *pairs, *rows, *norms, *w; /* the first two NULL: not kept */
  /* d and dy: U before their chain; dstates: H before it. states NULL: not kept */
  float *d, *dy, *states, *dstates, *dq, *dk;

  __device__ const float *factors(uint32_t piece, uint32_t head, uint32_t which) const {
    return rows + (this->at(piece, head) * FACTORS + which) * ROWS;
  }
  /* Elements of a row of w. */
  __device__ size_t w_ld() const { return (this->a.key_dim + ROWS - 1) / ROWS * ROWS; }
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

/* Of row @i, a thread a row; lanes of a warp have neighbouring rows of one head. Every thread calls
 * it, with NULL where it has no row; a barrier before it where the gates are in use. */
template <typename T>
__device__ void find_gates(piece_gates *s, const delta_rows<T> &j, uint32_t piece, uint32_t head,
                           uint32_t i) {
  const uint32_t n = j.n_rows(piece), nv = j.a.n_value_heads, lane = i % 32;
  double sum = 0;
  if (s) {
    double g = 0, slope = 0, beta = 0;
    int64_t doc = 0;
    if (i < n) {
      const uint32_t t = j.row0(piece) + i;
      const size_t at = (size_t)t * 2 * nv + head;
      const double b = (double)ps_to_f32(j.ba[at]),
                   x = (double)ps_to_f32(j.ba[at + nv]) + (double)ps_to_f32(j.dt_bias[head]),
                   rate = exp((double)ps_to_f32(j.a_log[head]));
      beta = 1 / (1 + exp(-b));
      slope = -rate / (1 + exp(-x));
      g = -rate * (x > 40 ? x : log1p(exp(x)));
      doc = (int64_t)j.doc_start[t] - j.a.row0 - j.row0(piece);
    }
    s->g[i] = g, s->slope[i] = slope, s->beta[i] = beta;
    s->doc[i] = doc < 0 ? -1 : (int32_t)doc;
    sum = g;
#pragma unroll
    for (uint32_t w = 1; w < 32; w *= 2) {
      const double before = __shfl_up_sync(0xffffffffu, sum, w);
      sum += lane >= w ? before : 0;
    }
    s->sum[i] = sum;
  }
  __syncthreads();
  if (s && i >= 32)
    s->sum[i] = sum + s->sum[31];
  __syncthreads();
  if (s) {
    s->start[i] = i < n && s->doc[i] < 0 ? expf((float)s->sum[i]) : 0.0f;
    s->end[i] = i < n ? s->decay(n - 1, i) : 0.0f;
  }
  __syncthreads();
}

/* ---- (I + l)^-1 ------------------------------------------------------------------------------ */

/* t = (I + l)^-1, l strictly lower triangular, [64][LD], by 256 threads: blocks of 16 on the
 * diagonal by substitution, those below it from the blocks left of and above them. Blocks above the
 * diagonal are left as they are. */
__device__ inline void invert(float (*t)[LD], const float (*l)[LD]) {
  enum { B = 16, N = ROWS / B, EACH = 4, THREADS = B * B / EACH };
  const uint32_t tid = threadIdx.x, block = tid / THREADS, r = tid % THREADS / EACH,
                 c = tid % EACH * EACH;
  static_assert(TILE_THREADS >= THREADS * (N - 1), "threads of the blocks below the diagonal");
  if (tid < ROWS) { /* a column */
    const uint32_t at = tid / B * B, col = tid % B;
    float x[B];
#pragma unroll
    for (int i = 0; i < B; i++) {
      x[i] = i == (int)col ? 1.0f : 0.0f;
#pragma unroll
      for (int k = 0; k < i; k++)
        x[i] = fmaf(-l[at + i][at + k], x[k], x[i]);
      t[at + i][tid] = x[i];
    }
  }
  __syncthreads();
  for (uint32_t off = 1; off < N; off++) {
    const bool mine = block < N - off;
    const uint32_t row = (off + block) * B, col = block * B + c;
    const auto add = [&](float4 &sum, float x, uint32_t k) {
      const float4 y = *(const float4 *)&t[k][col];
      sum.x = fmaf(x, y.x, sum.x);
      sum.y = fmaf(x, y.y, sum.y);
      sum.z = fmaf(x, y.z, sum.z);
      sum.w = fmaf(x, y.w, sum.w);
    };
    float4 sum = {};
    if (mine) { /* of l_ik t_kj, in place of t_ij */
#pragma unroll 16
      for (uint32_t k = block * B; k < row; k++)
        add(sum, l[row + r][k], k);
      *(float4 *)&t[row + r][col] = sum;
    }
    __syncthreads();
    sum = {};
    if (mine)
#pragma unroll
      for (uint32_t k = 0; k < B; k++)
        add(sum, -t[row + r][row + k], row + k);
    __syncthreads();
    if (mine)
      *(float4 *)&t[row + r][col] = sum;
    __syncthreads();
  }
}

/* ---- gradients of weights -------------------------------------------------------------------- */

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

/* ---- segments -------------------------------------------------------------------------------- */

template <typename T> void fill_rows(delta_rows<T> &j, const ps_launch *l) {
  j.a = *(const ps__args_delta *)l->args;
  j.share = j.a.n_value_heads / j.a.n_key_heads;
  j.ld = 2 * (size_t)j.a.n_key_heads * j.a.key_dim + (size_t)j.a.n_value_heads * j.a.value_dim;
  j.scale = (float)(1 / sqrt((double)j.a.key_dim));
  j.qkv = (const T *)l->ptr[0];
  j.ba = (const T *)l->ptr[1];
  j.a_log = (const T *)l->ptr[2];
  j.dt_bias = (const T *)l->ptr[3];
  j.doc_start = (const int32_t *)l->ptr[4];
}

inline uint32_t n_pieces(const ps__args_delta &a) { return ps_ceil_div(a.n_tokens, ROWS); }
inline uint32_t n_segments(const ps__args_delta &a, uint32_t segment) {
  return ps_ceil_div(n_pieces(a), segment);
}
/* @j becomes segment @i, of @segment pieces. */
template <typename T> void enter(delta_rows<T> &j, uint32_t i, uint32_t segment) {
  const uint32_t all = n_pieces(j.a);
  j.piece0 = i * segment;
  j.first = j.piece0 * ROWS;
  j.n_pieces = all - j.piece0 < segment ? all - j.piece0 : segment;
}

/* On @threads for each of @across and @heads, with shared memory above 48 KB too. */
template <typename J>
cudaError_t launch(void (*kernel)(const J), const J &j, uint32_t across, uint32_t heads,
                   uint32_t threads, size_t bytes, cudaStream_t stream) {
  const cudaError_t e = /* of this device's context */
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
  if (e != cudaSuccess)
    return e;
  kernel<<<dim3(across, heads), threads, bytes, stream>>>(j);
  return cudaGetLastError();
}

/* The gradients of weights from all pieces' terms. */
template <typename T>
cudaError_t add_weights(const delta_rows<T> &j, const ps_launch *l, cudaStream_t stream) {
  weights_k<T><<<j.a.n_value_heads, 32, 0, stream>>>(j.weights, n_pieces(j.a), (T *)l->ptr[10],
                                                     (T *)l->ptr[11], j.a.accumulate_dw != 0);
  return cudaGetLastError();
}

/* The backward pass: states with which segments begin, in @borders; then segments from the last to
 * the first. forward(segment, from, to); backward(segment, from, has_carry). */
template <typename T, typename F, typename B>
cudaError_t run_segments(const delta_rows<T> &j, const ps_launch *l, float *borders, F forward,
                         B backward) {
  const size_t states = (size_t)j.a.n_value_heads * j.a.key_dim * j.a.value_dim;
  const auto border = [&](uint32_t i) {
    return i ? borders + i * states : j.a.row0 ? (float *)l->ptr[5] : nullptr;
  };
  const uint32_t n = n_segments(j.a, PS_DELTA_SEGMENT);
  cudaError_t e = cudaSuccess;
  for (uint32_t i = 0; i + 1 < n && e == cudaSuccess; i++)
    e = forward(i, border(i), border(i + 1));
  for (uint32_t i = n; i-- > 0 && e == cudaSuccess;)
    e = backward(i, border(i), i + 1 < n || j.a.accumulate_carry);
  return e;
}

} // namespace
#endif
