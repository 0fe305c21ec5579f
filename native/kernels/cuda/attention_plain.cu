/* attention_plain.cu - what the providers of attention share: finding documents on the device,
 * log-sum-exp layouts, adding bf16 dK and dV to fp32 dkv, and plain kernels for what no library
 * takes.
 *
 * determinism  everything here is bitwise the same in every run: no atomics, sums in a fixed
 *              order. */
#include "kernels/cuda/attention_cuda.h"
#include "kernels/cuda/cuda_common.cuh"
#include <math.h>

/* ---- documents ------------------------------------------------------------------------------- */

enum { FIND_THREADS = 1024 };

/* One block. Pass over the rows in pieces of FIND_THREADS: a row begins a document where
 * doc_start differs from the row before; its number is the count of begins before it (warp
 * ballots, then the warps' counts). Slot d's first row is kept in the q lengths until the end. */
__global__ void __launch_bounds__(FIND_THREADS)
    find_documents_k(const int32_t *doc_start, int32_t *documents, uint32_t n_rows, uint32_t row0,
                     uint32_t max_documents, uint32_t q_ld, uint32_t kv_ld, uint32_t dkv_ld,
                     uint32_t lse_ld) {
  __shared__ uint32_t begins[32], n_docs;
  const uint32_t stride = (max_documents + 1 + 31) / 32 * 32, lane = threadIdx.x % 32,
                 warp = threadIdx.x / 32;
  /* first row of each document; overwritten last */
  int32_t *first = documents + PS_ATT_HEADER + PS_ATT_OFF_LSE * stride;
  if (threadIdx.x == 0)
    n_docs = 0;
  for (uint32_t d = threadIdx.x; d <= max_documents; d += FIND_THREADS)
    first[d] = (int32_t)n_rows;
  __syncthreads();
  for (uint32_t base = 0; base < n_rows; base += FIND_THREADS) {
    const uint32_t row = base + threadIdx.x;
    const bool begin = row < n_rows && (row == 0 || doc_start[row] != doc_start[row - 1]);
    const uint32_t votes = __ballot_sync(0xffffffffu, begin);
    if (lane == 0)
      begins[warp] = __popc(votes);
    __syncthreads();
    uint32_t number = n_docs + __popc(votes & ((1u << lane) - 1));
    for (uint32_t w = 0; w < warp; w++)
      number += begins[w];
    if (begin && number <= max_documents)
      first[number] = (int32_t)row;
    __syncthreads();
    if (threadIdx.x == FIND_THREADS - 1)
      n_docs = number + begin;
    __syncthreads();
  }
  const uint32_t d = threadIdx.x; /* max_documents <= 64 < FIND_THREADS */
  int32_t q0 = (int32_t)n_rows, q1 = q0;
  if (d <= max_documents) {
    q0 = first[d];
    q1 = d < max_documents ? first[d + 1] : q0;
  }
  __syncthreads();
  if (d > max_documents)
    return;
  const bool used = d < max_documents && q0 < (int32_t)n_rows;
  const int32_t key0 = used ? doc_start[q0] : (int32_t)row0 + q0;
  int32_t *array = documents + PS_ATT_HEADER + d;
  if (d < max_documents) {
    array[PS_ATT_LEN_Q * stride] = used ? q1 - q0 : 0;
    array[PS_ATT_LEN_KV * stride] = used ? (int32_t)row0 + q1 - key0 : 0;
  } else {
    documents[PS_ATT_HEAD_PLAIN_ROW] = q0; /* the first row after the documents that have entries */
    documents[PS_ATT_HEAD_FIRST_KEY] = doc_start[0];
  }
  array[PS_ATT_OFF_Q * stride] = q0 * (int32_t)q_ld;
  array[PS_ATT_OFF_KV * stride] = key0 * (int32_t)kv_ld;
  array[PS_ATT_OFF_DKV * stride] = key0 * (int32_t)dkv_ld;
  array[PS_ATT_OFF_LSE * stride] = q0 * (int32_t)lse_ld;
}

void ps_att_find_documents(cudaStream_t stream, const ps__args_attention *a,
                           const int32_t *doc_start, uint32_t max_documents, bool in_rows,
                           int32_t *documents) {
  const uint32_t width = in_rows ? 1 : a->n_heads * a->head_dim,
                 kv_width = in_rows ? 1 : a->n_kv_heads * a->head_dim;
  find_documents_k<<<1, FIND_THREADS, 0, stream>>>(doc_start, documents, a->n_tokens, a->row0,
                                                   max_documents, width, in_rows ? 1 : 2 * kv_width,
                                                   kv_width, in_rows ? 1 : a->n_heads);
}

/* ---- log-sum-exp and dkv --------------------------------------------------------------------- */

/* A block a tile of 32 by 32 through shared memory; tiles are numbered along a row of the
 * source, matrix after matrix. */
__global__ void transpose_k(float *dst, const float *src, uint32_t rows, uint32_t cols) {
  __shared__ float tile[32][33];
  const uint32_t across = (cols + 31) / 32, tiles = (rows + 31) / 32 * across,
                 i = blockIdx.x % tiles, r0 = i / across * 32, c0 = i % across * 32;
  const size_t matrix = (size_t)(blockIdx.x / tiles) * rows * cols;
  src += matrix;
  dst += matrix;
  uint32_t r = r0 + threadIdx.y, c = c0 + threadIdx.x;
  for (uint32_t k = 0; k < 32; k += 8)
    if (r + k < rows && c < cols)
      tile[threadIdx.y + k][threadIdx.x] = src[(size_t)(r + k) * cols + c];
  __syncthreads();
  r = r0 + threadIdx.x;
  c = c0 + threadIdx.y;
  for (uint32_t k = 0; k < 32; k += 8)
    if (r < rows && c + k < cols)
      dst[(size_t)(c + k) * rows + r] = tile[threadIdx.x][threadIdx.y + k];
}

void ps_att_transpose(cudaStream_t stream, float *dst, const float *src, uint32_t n, uint32_t rows,
                      uint32_t cols) {
  transpose_k<<<n * ps_ceil_div(rows, 32) * ps_ceil_div(cols, 32), dim3(32, 8), 0, stream>>>(
      dst, src, rows, cols);
}

/* A thread 8 elements of a row of dkv, the sum over the @group heads of dk or dv that share
 * them. bytes: 4*rows*K*group of bf16 in, 8*rows*K of fp32 out (twice that when accumulating). */
template <bool ACCUMULATE>
__global__ void finish_dkv_k(const __nv_bfloat16 *dk, const __nv_bfloat16 *dv, float *dkv,
                             const int32_t *documents, uint32_t n_rows, uint32_t row0,
                             uint32_t width, uint32_t d, uint32_t group) {
  const uint32_t first = documents ? (uint32_t)documents[PS_ATT_HEAD_FIRST_KEY] : 0;
  const uint32_t end = documents ? row0 + (uint32_t)documents[PS_ATT_HEAD_PLAIN_ROW] : n_rows;
  const uint64_t i = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;
  const uint32_t row = (uint32_t)(i / (2 * width)), col = (uint32_t)(i % (2 * width));
  if (row >= end || (ACCUMULATE && row < first))
    return;
  /* head * d + element, elements of a head lie together */
  const uint32_t within = col < width ? col : col - width;
  const __nv_bfloat16 *from =
      (col < width ? dk : dv) + (size_t)row * width * group + (within / d * group) * d + within % d;
  float x[8] = {}, y[8];
  for (uint32_t g = 0; g < group && row >= first; g++) {
    ps_read<__nv_bfloat16, 8>(y, from + g * d);
#pragma unroll
    for (int e = 0; e < 8; e++)
      x[e] += y[e];
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float sum[4] = {};
    if (ACCUMULATE)
      ps_read<float, 4>(sum, dkv + i + 4 * h);
#pragma unroll
    for (int e = 0; e < 4; e++)
      sum[e] += x[4 * h + e];
    ps_store<float, 4>(dkv + i + 4 * h, sum);
  }
}

void ps_att_finish_dkv(cudaStream_t stream, const ps__args_attention *a, const int32_t *documents,
                       const void *dk, const void *dv, uint32_t heads, float *dkv) {
  const uint32_t rows = a->row0 + a->n_tokens, width = a->n_kv_heads * a->head_dim,
                 group = heads / a->n_kv_heads;
  const uint32_t blocks = ps_ceil_div((uint64_t)rows * 2 * width, 8 * 256);
  const __nv_bfloat16 *k = (const __nv_bfloat16 *)dk, *v = (const __nv_bfloat16 *)dv;
  if (a->accumulate_dkv)
    finish_dkv_k<true><<<blocks, 256, 0, stream>>>(k, v, dkv, documents, rows, a->row0, width,
                                                   a->head_dim, group);
  else
    finish_dkv_k<false><<<blocks, 256, 0, stream>>>(k, v, dkv, documents, rows, a->row0, width,
                                                    a->head_dim, group);
}

/* ---- plain kernels --------------------------------------------------------------------------- */

enum { PLAIN_WARPS = 8, PLAIN_BLOCKS = 8 };

/* What the plain kernels read; a warp holds a head's row, element e of lane e % 32. */
struct plain {
  const __nv_bfloat16 *q, *kv, *o, *d_o;
  const int32_t *doc_start, *documents;
  float *lse;
  uint32_t n_rows, row0, heads, kv_heads, d, window; /* window: UINT32_MAX where there is none */
  float scale, cap;                                  /* cap 0: none */
  __device__ uint32_t begin() const {
    return documents ? (uint32_t)documents[PS_ATT_HEAD_PLAIN_ROW] : 0;
  }
  /* first key that query row @row sees */
  __device__ uint32_t first(uint32_t row) const {
    const uint32_t end = row0 + row + 1, from = end > window ? end - window : 0;
    return max((uint32_t)doc_start[row], from);
  }
  __device__ float score(float product) const {
    return cap > 0.0f ? cap * tanhf(product * scale / cap) : product * scale;
  }
  __device__ const __nv_bfloat16 *key(uint32_t row, uint32_t head) const {
    return kv + ((size_t)row * 2 * kv_heads + head) * d;
  }
};

template <int N>
__device__ __forceinline__ void load_row(float (&x)[N], const __nv_bfloat16 *p, uint32_t d) {
#pragma unroll
  for (int i = 0; i < N; i++)
    x[i] = 32 * i + threadIdx.x % 32 < d ? __bfloat162float(p[32 * i + threadIdx.x % 32]) : 0.0f;
}
template <int N> __device__ __forceinline__ float dot(const float (&x)[N], const float (&y)[N]) {
  float s = 0.0f;
#pragma unroll
  for (int i = 0; i < N; i++)
    s += x[i] * y[i];
  return ps_warp_sum(s);
}
template <int N>
__device__ __forceinline__ void store_row(__nv_bfloat16 *p, const float (&x)[N], float by,
                                          uint32_t d) {
#pragma unroll
  for (int i = 0; i < N; i++)
    if (32 * i + threadIdx.x % 32 < d)
      p[32 * i + threadIdx.x % 32] = __float2bfloat16_rn(x[i] * by);
}

/* attention_fwd for the rows from begin() on: a warp a row and head, keys one by one with an
 * online softmax. */
template <int N> __global__ void plain_fwd_k(const plain p, __nv_bfloat16 *out) {
  const uint64_t n = (uint64_t)(p.n_rows - p.begin()) * p.heads,
                 step = (uint64_t)gridDim.x * PLAIN_WARPS;
  for (uint64_t i = (uint64_t)blockIdx.x * PLAIN_WARPS + threadIdx.x / 32; i < n; i += step) {
    const uint32_t row = p.begin() + (uint32_t)(i / p.heads), h = (uint32_t)(i % p.heads),
                   kh = h / (p.heads / p.kv_heads);
    float q[N], x[N], o[N] = {}, top = -INFINITY, sum = 0.0f;
    load_row<N>(q, p.q + ((size_t)row * p.heads + h) * p.d, p.d);
    for (uint32_t k = p.first(row); k <= p.row0 + row; k++) {
      load_row<N>(x, p.key(k, kh), p.d);
      const float s = p.score(dot<N>(q, x)), high = fmaxf(top, s), keep = expf(top - high),
                  w = expf(s - high);
      load_row<N>(x, p.key(k, p.kv_heads + kh), p.d);
#pragma unroll
      for (int e = 0; e < N; e++)
        o[e] = o[e] * keep + w * x[e];
      sum = sum * keep + w;
      top = high;
    }
    store_row<N>(out + ((size_t)row * p.heads + h) * p.d, o, 1.0f / sum, p.d);
    if (threadIdx.x % 32 == 0)
      p.lse[(size_t)row * p.heads + h] = top + logf(sum);
  }
}

/* P and dS of one query row, head and key: p = exp(s - lse), ds = p (d_o v - d_o o) scale, with a
 * soft cap times 1 - (s / cap)^2. */
template <int N>
__device__ __forceinline__ void pair(const plain &p, const float (&q)[N], const float (&g)[N],
                                     const float (&k)[N], const float (&v)[N], float lse,
                                     float delta, float *prob, float *ds) {
  const float s = p.score(dot<N>(q, k)),
              slope = p.cap > 0.0f ? 1.0f - s / p.cap * (s / p.cap) : 1.0f;
  *prob = expf(s - lse);
  *ds = *prob * (dot<N>(g, v) - delta) * p.scale * slope;
}

/* dq for the rows from begin() on: a warp a row and head. */
template <int N> __global__ void plain_dq_k(const plain p, __nv_bfloat16 *dq) {
  const uint64_t n = (uint64_t)(p.n_rows - p.begin()) * p.heads,
                 step = (uint64_t)gridDim.x * PLAIN_WARPS;
  for (uint64_t i = (uint64_t)blockIdx.x * PLAIN_WARPS + threadIdx.x / 32; i < n; i += step) {
    const uint32_t row = p.begin() + (uint32_t)(i / p.heads), h = (uint32_t)(i % p.heads),
                   kh = h / (p.heads / p.kv_heads);
    const size_t at = ((size_t)row * p.heads + h) * p.d;
    float q[N], g[N], k[N], v[N], sum[N] = {}, prob, ds;
    load_row<N>(q, p.q + at, p.d);
    load_row<N>(g, p.d_o + at, p.d);
    load_row<N>(v, p.o + at, p.d);
    const float delta = dot<N>(g, v), lse = p.lse[(size_t)row * p.heads + h];
    for (uint32_t r = p.first(row); r <= p.row0 + row; r++) {
      load_row<N>(k, p.key(r, kh), p.d);
      load_row<N>(v, p.key(r, p.kv_heads + kh), p.d);
      pair<N>(p, q, g, k, v, lse, delta, &prob, &ds);
#pragma unroll
      for (int e = 0; e < N; e++)
        sum[e] += ds * k[e];
    }
    store_row<N>(dq + at, sum, 1.0f, p.d);
  }
}

/* dkv for the keys of those rows' documents (all keys where begin() is 0): a warp a key and kv
 * head, over the query rows that see it in order, the heads of its group in order. */
template <int N> __global__ void plain_dkv_k(const plain p, float *dkv, bool accumulate) {
  const uint32_t key0 = p.begin() ? p.row0 + p.begin() : 0, group = p.heads / p.kv_heads,
                 lane = threadIdx.x % 32;
  const uint64_t n = (uint64_t)(p.row0 + p.n_rows - key0) * p.kv_heads,
                 step = (uint64_t)gridDim.x * PLAIN_WARPS;
  for (uint64_t i = (uint64_t)blockIdx.x * PLAIN_WARPS + threadIdx.x / 32; i < n; i += step) {
    const uint32_t key = key0 + (uint32_t)(i / p.kv_heads), kh = (uint32_t)(i % p.kv_heads);
    float k[N], v[N], q[N], g[N], o[N], dk[N] = {}, dv[N] = {}, prob, ds;
    load_row<N>(k, p.key(key, kh), p.d);
    load_row<N>(v, p.key(key, p.kv_heads + kh), p.d);
    for (uint32_t row = key > p.row0 ? key - p.row0 : 0; row < p.n_rows && p.first(row) <= key;
         row++)
      for (uint32_t h = kh * group; h < (kh + 1) * group; h++) {
        const size_t at = ((size_t)row * p.heads + h) * p.d;
        load_row<N>(q, p.q + at, p.d);
        load_row<N>(g, p.d_o + at, p.d);
        load_row<N>(o, p.o + at, p.d);
        pair<N>(p, q, g, k, v, p.lse[(size_t)row * p.heads + h], dot<N>(g, o), &prob, &ds);
#pragma unroll
        for (int e = 0; e < N; e++) {
          dk[e] += ds * q[e];
          dv[e] += prob * g[e];
        }
      }
    float *to = dkv + ((size_t)key * 2 * p.kv_heads + kh) * p.d,
          *to_v = to + (size_t)p.kv_heads * p.d;
#pragma unroll
    for (int e = 0; e < N; e++)
      if (32 * e + lane < p.d) {
        to[32 * e + lane] = (accumulate ? to[32 * e + lane] : 0.0f) + dk[e];
        to_v[32 * e + lane] = (accumulate ? to_v[32 * e + lane] : 0.0f) + dv[e];
      }
  }
}

static plain plain_of(const ps_launch *l, const int32_t *documents, bool backward) {
  const ps__args_attention *a = (const ps__args_attention *)l->args;
  return {(const __nv_bfloat16 *)l->ptr[0],
          (const __nv_bfloat16 *)l->ptr[1],
          (const __nv_bfloat16 *)l->ptr[3],
          backward ? (const __nv_bfloat16 *)l->ptr[5] : nullptr,
          (const int32_t *)l->ptr[2],
          documents,
          (float *)l->ptr[4],
          a->n_tokens,
          a->row0,
          a->n_heads,
          a->n_kv_heads,
          a->head_dim,
          a->window ? a->window : UINT32_MAX,
          ps__attention_scale(a),
          a->softcap};
}

void ps_att_plain_fwd(cudaStream_t stream, const ps_launch *l, const int32_t *documents,
                      int n_sms) {
  const plain p = plain_of(l, documents, false);
  const uint32_t blocks = PLAIN_BLOCKS * (uint32_t)n_sms;
  if (p.d <= 128)
    plain_fwd_k<4><<<blocks, 32 * PLAIN_WARPS, 0, stream>>>(p, (__nv_bfloat16 *)l->ptr[3]);
  else if (p.d <= 256)
    plain_fwd_k<8><<<blocks, 32 * PLAIN_WARPS, 0, stream>>>(p, (__nv_bfloat16 *)l->ptr[3]);
  else
    plain_fwd_k<16><<<blocks, 32 * PLAIN_WARPS, 0, stream>>>(p, (__nv_bfloat16 *)l->ptr[3]);
}

void ps_att_plain_bwd(cudaStream_t stream, const ps_launch *l, const int32_t *documents,
                      int n_sms) {
  const plain p = plain_of(l, documents, true);
  const uint32_t blocks = PLAIN_BLOCKS * (uint32_t)n_sms;
  const bool accumulate = ((const ps__args_attention *)l->args)->accumulate_dkv != 0;
  __nv_bfloat16 *dq = (__nv_bfloat16 *)l->ptr[6];
  float *dkv = (float *)l->ptr[7];
  if (p.d <= 128) {
    plain_dq_k<4><<<blocks, 32 * PLAIN_WARPS, 0, stream>>>(p, dq);
    plain_dkv_k<4><<<blocks, 32 * PLAIN_WARPS, 0, stream>>>(p, dkv, accumulate);
  } else if (p.d <= 256) {
    plain_dq_k<8><<<blocks, 32 * PLAIN_WARPS, 0, stream>>>(p, dq);
    plain_dkv_k<8><<<blocks, 32 * PLAIN_WARPS, 0, stream>>>(p, dkv, accumulate);
  } else {
    plain_dq_k<16><<<blocks, 32 * PLAIN_WARPS, 0, stream>>>(p, dq);
    plain_dkv_k<16><<<blocks, 32 * PLAIN_WARPS, 0, stream>>>(p, dkv, accumulate);
  }
}

/* As a provider: chunks of few rows, which libraries refuse, and heads above 256 (Gemma 4's full
 * layers), which no library takes. A warp a row makes no use of tensor cores, so that other long
 * chunks are left to libraries. */
enum { PLAIN_ROWS = 16, LIBRARY_HEAD_DIM = 256, PLAIN_HEAD_DIM = 512 };
static const char *plain_refuses(const ps_att_shape *s) {
  if (s->args.head_dim > PLAIN_HEAD_DIM)
    return "head_dim is above 512";
  return s->args.n_tokens > PLAIN_ROWS && s->args.head_dim <= LIBRARY_HEAD_DIM ? "more than 16 rows"
                                                                               : NULL;
}
static ps_status plain_prepare(const ps_att_shape *, void **plan, size_t *scratch_bytes) {
  *plan = NULL;
  *scratch_bytes = 0;
  return PS_OK;
}
static ps_status plain_launch(const ps_launch *l, const ps_att_shape *s, void *) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  if (s->backward)
    ps_att_plain_bwd(exec->stream, l, NULL, exec->n_sms);
  else
    ps_att_plain_fwd(exec->stream, l, NULL, exec->n_sms);
  return PS_OK;
}
extern const ps_att_provider ps_att_plain = {"plain", plain_refuses, plain_prepare, plain_launch};
