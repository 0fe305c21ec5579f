/* attention_flash4.cu - attention on compute capability 9.0 through flash-attn-4's kernels,
 * compiled ahead of time by `make FLASH_ATTN=4` (flash4/generate.py says from what, and with
 * which arguments).
 *
 * math    as in ops.h; bf16 in and out, fp32 softmax. dQ, and dK and dV of a group of query heads,
 *         are summed in fp32 by the kernels; dK and dV go from there to fp32 dkv without another
 *         rounding (finish_dkv_k). With one query head a kv head they leave in bf16.
 * shapes  head_dim and groups of generate.py; documents of known length, a batch: [n, T/n, heads,
 *         d] on [n, T/n, kv_heads, d] (with n = 1: row0+T keys), causal (aligned at the bottom
 *         right). Q, K, V, O and log-sum-exp are strided views of the op's tensors, nothing is
 *         gathered.
 * scratch backward: rows rounded up to tiles, 4*heads*(d+2) bytes each for dQ and the rows' sums;
 *         keys rounded up to tiles, 8*kv_heads*d bytes each for dK and dV (4*kv_heads*d, not
 *         rounded up, with one query head a kv head); deterministic: an int for each tile of dQ,
 *         and two of dK and dV.
 * time    H200, 32/8 heads of 128, TFLOP/s forward / backward: 8192 rows 686 / 525 (deterministic
 *         500), 2 x 8192 667 / 546, 8192 after 8192 702 / 586, after 57344 659 / 590. 16/4 heads of
 *         256: 8192 rows 804 / 361, 8192 after 8192 836 / 380. Beside cuDNN's:
 *         bench/log/2026-11-21-attention-cuda.md
 * determinism  forward always; backward with exec->deterministic: blocks take turns in adding to
 *              dQ, dK and dV. Else they add as they come.
 * reference    the cpu backend's, tests/native/test_cuda_attention.c */
#include "kernels/cuda/attention_cuda.h"
#include "kernels/cuda/cuda_common.cuh"
#include <flash4_table.h>
#include <math.h>
#include <new>

/* What a kernel's object offers, each taking the addresses of its arguments. */
#define DECLARE(kind, d, group, name, run)                                                         \
  extern "C" void _mlir_##name##_cuda_init(void **);                                               \
  extern "C" void _mlir_##name##_cuda_load_to_device(void **);                                     \
  extern "C" void run(void **, int32_t);
PS_FLASH4_KERNELS(DECLARE)
#undef DECLARE

namespace {

enum kind { PRE, POST, FWD, BWD, BWD_IN_ORDER };

struct kernel {
  kind what;
  uint32_t d, group; /* group 0: any */
  void (*init)(void **), (*load)(void **), (*run)(void **, int32_t);
};
#define ROW(kind, d, group, name, run)                                                             \
  {kind, d, group, _mlir_##name##_cuda_init, _mlir_##name##_cuda_load_to_device, run},
const kernel kernels[] = {PS_FLASH4_KERNELS(ROW)};
#undef ROW
enum { N_KERNELS = sizeof kernels / sizeof *kernels };
/* Query rows and keys that a block of the backward pass has at a time, by head_dim. */
struct tile {
  uint32_t d, rows, keys;
};
#define ROW(d, rows, keys) {d, rows, keys},
const tile tiles[] = {PS_FLASH4_TILES(ROW)};
#undef ROW
/* cudaLibrary_t, once loaded; prepare() is called by one thread at a time */
void *libraries[N_KERNELS];

struct plan {
  const kernel *pre, *main, *post;
  uint32_t n, rows, keys;                    /* documents; query rows and keys of each */
  uint32_t tiles_q, tile_q, tiles_k, tile_k; /* of a document */
  /* offsets in scratch; what must be zero lies together */
  size_t lse2, delta, dq, dk, dv, turns, zero, zero_bytes;
};

const kernel *find(kind what, uint32_t d, uint32_t group) {
  for (const kernel &k : kernels)
    if (k.what == what && k.d == d && (k.group == group || !k.group))
      return &k;
  return NULL;
}
uint32_t group_of(const ps__args_attention *a) { return a->n_heads / a->n_kv_heads; }

enum { DOCUMENT_ROWS = 128 }; /* the least; tiles of shorter documents would be mostly empty */

const char *refuses(const ps_att_shape *s) {
  const ps__args_attention *a = &s->args;
  const uint32_t n = ps__attention_documents(a);
  if (s->sm != 90)
    return "needs compute capability 9.0";
  if (ps_att_window(a) || a->softcap > 0.0f)
    return "windows and soft caps are left to cuDNN";
  if (!find(FWD, a->head_dim, group_of(a)))
    return "it was not built for that head_dim, or for that many query heads a kv head";
  if (!n)
    return "documents must be of known, equal length";
  if (n > 1 && a->document_rows < DOCUMENT_ROWS)
    return "documents are shorter than 128 rows";
  if (((uint64_t)a->row0 + a->n_tokens) * a->head_dim * 4 > INT32_MAX)
    return "the group has too many rows for offsets of 32 bits";
  return NULL;
}

/* ---- plans ----------------------------------------------------------------------------------- */

void lay_out(plan *p, const ps_att_shape *s, size_t *bytes) {
  const ps__args_attention *a = &s->args;
  const size_t sums = ps_att_round((size_t)p->n * a->n_heads * p->tiles_q * p->tile_q * 4),
               all_keys = (size_t)p->n * a->n_kv_heads * p->tiles_k;
  const bool summed = group_of(a) > 1;
  const size_t one =
      ps_att_round(summed ? all_keys * p->tile_k * a->head_dim * 4
                          : 2 * (size_t)p->n * p->keys * a->n_kv_heads * a->head_dim);
  p->lse2 = 0;
  p->delta = sums;
  p->dq = 2 * sums;
  p->dk = p->dq + sums * a->head_dim;
  p->dv = p->dk + one;
  p->turns = p->dv + one;
  p->zero = summed ? p->dk : p->turns;
  *bytes = p->turns;
  if (s->deterministic)
    *bytes += ps_att_round(((size_t)p->n * a->n_heads * p->tiles_q + 4 * all_keys) * 4);
  p->zero_bytes = *bytes - p->zero;
}

ps_status load(const kernel *k, int device) {
  int error = 0;
  void **library = &libraries[k - kernels];
  if (!*library) {
    void *args[] = {&library, &error};
    k->init(args);
  }
  void *args[] = {&library, &device, &error};
  if (!error)
    k->load(args);
  return error ? ps__fail(PS_EDEVICE,
                          "attention: a kernel of flash-attn-4 did not load on device %d: %s",
                          device, cudaGetErrorString((cudaError_t)error))
               : PS_OK;
}

ps_status prepare(const ps_att_shape *s, void **out, size_t *scratch_bytes) {
  const ps__args_attention *a = &s->args;
  plan *p = new (std::nothrow) plan();
  if (!p)
    return ps__fail(PS_ENOMEM, "attention: no memory for a plan");
  p->main = find(!s->backward       ? FWD
                 : s->deterministic ? BWD_IN_ORDER
                                    : BWD,
                 a->head_dim, group_of(a));
  p->n = ps__attention_documents(a);
  p->rows = a->n_tokens / p->n;
  p->keys = a->row0 + p->rows;
  size_t bytes = 0;
  ps_status st = load(p->main, s->device);
  if (s->backward) {
    p->pre = find(PRE, a->head_dim, 0);
    p->post = find(POST, a->head_dim, 0);
    for (const tile &t : tiles)
      if (t.d == a->head_dim) {
        p->tile_q = t.rows;
        p->tile_k = t.keys;
      }
    p->tiles_q = ps_ceil_div(p->rows, p->tile_q);
    p->tiles_k = ps_ceil_div(p->keys, p->tile_k);
    lay_out(p, s, &bytes);
    if (st == PS_OK)
      st = load(p->pre, s->device);
    if (st == PS_OK)
      st = load(p->post, s->device);
  }
  if (st != PS_OK) {
    delete p;
    return st;
  }
  *out = p;
  *scratch_bytes = bytes;
  return PS_OK;
}

/* ---- dK and dV of a group, in the order in which the kernel's threads hold them, to dkv ------ */

/* dkv[b, row, h] (+)= sums[b, h, row] of dk, by @scale, and of dv: heads h of dk and then of dv,
 * blockIdx.y. For heads of 64 and 128.
 * order   a tile of 128 keys is 2 halves of 64 (a warp group's), of d/8 columns j, of 128 threads,
 *         of 4: thread t of a half has of columns 8j + 2(t%4) and the next one first row t/32*16 +
 *         t%32/4, then the row 8 below (the accumulator of wgmma m64).
 * bytes   16*rows*kv_heads*d (24 when accumulating).   determinism  bitwise. */
template <int D, bool ACCUMULATE>
__global__ void __launch_bounds__(256)
    finish_dkv_k(const float4 *sums, float *dkv, uint32_t rows, uint32_t kv_heads, float scale) {
  constexpr uint32_t KEYS = 128;
  const uint32_t which = blockIdx.y / kv_heads, h = blockIdx.y % kv_heads, t = threadIdx.x;
  const uint32_t row = blockIdx.x * KEYS + t / 32 * 16 + t % 32 / 4;
  const float4 *from =
      sums +
      (((size_t)(which * gridDim.z + blockIdx.z) * kv_heads + h) * gridDim.x + blockIdx.x) *
          (KEYS * D / 4) +
      t / 128 * (16 * D) + t % 128;
  const size_t stride = (size_t)2 * kv_heads * D;
  float *to =
      dkv + ((size_t)blockIdx.z * rows + row) * stride + (size_t)blockIdx.y * D + 2 * (t % 4);
  const float by = which ? 1.0f : scale;
#pragma unroll 4
  for (int j = 0; j < D / 8; j++) {
    const float4 x = from[j * 128];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (row + 8 * half >= rows)
        continue;
      float2 *at = (float2 *)(to + half * 8 * stride + 8 * j);
      float2 y = ACCUMULATE ? *at : make_float2(0.0f, 0.0f);
      y.x += by * (half ? x.z : x.x);
      y.y += by * (half ? x.w : x.y);
      *at = y;
    }
  }
}

/* The same for heads of 256, whose sums are those of dK's and dV's transposes.
 * order   a tile of 48 keys is [2 warp groups w][2 halves i of the columns][6 groups j of 8 keys]
 *         [128 threads t][4]. Of keys 8j + 2(t%4) and the next one, thread t has first column
 *         128i + 64w + t/32*16 + t%32/4, then the column 8 to the right. The sums pass through
 *         shared memory, 24 keys at a time.
 * bytes   16*rows*kv_heads*d (24 when accumulating).   determinism  bitwise. */
template <bool ACCUMULATE>
__global__ void __launch_bounds__(256)
    finish_dkv_256_k(const float4 *sums, float *dkv, uint32_t rows, uint32_t kv_heads,
                     float scale) {
  /* 4 more columns a row, so that the keys of a warp's threads fall on different banks. */
  constexpr uint32_t D = 256, KEYS = 48, AT_ONCE = 24, LD = D + 4;
  __shared__ __align__(16) float part[AT_ONCE * LD];
  const uint32_t which = blockIdx.y / kv_heads, h = blockIdx.y % kv_heads, t = threadIdx.x % 128,
                 column = threadIdx.x / 128 * 64 + t / 32 * 16 + t % 32 / 4;
  const float4 *from =
      sums +
      (((size_t)(which * gridDim.z + blockIdx.z) * kv_heads + h) * gridDim.x + blockIdx.x) *
          (KEYS * D / 4) +
      threadIdx.x / 128 * (KEYS * D / 8) + t;
  const size_t stride = (size_t)2 * kv_heads * D;
  float *to = dkv + (size_t)blockIdx.z * rows * stride + (size_t)blockIdx.y * D;
  const float by = which ? 1.0f : scale;
  for (uint32_t first = 0; first < KEYS; first += AT_ONCE) {
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
#pragma unroll
      for (uint32_t j = 0; j < AT_ONCE / 8; j++) {
        const float4 x = from[(i * (KEYS / 8) + first / 8 + j) * 128];
        float *at = part + (8 * j + 2 * (t % 4)) * LD + 128 * i + column;
        at[0] = x.x;
        at[LD] = x.y;
        at[8] = x.z;
        at[LD + 8] = x.w;
      }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < AT_ONCE; i += 256 / (D / 4)) {
      const uint32_t key = i + threadIdx.x / (D / 4), c = threadIdx.x % (D / 4) * 4,
                     row = blockIdx.x * KEYS + first + key;
      if (row < rows) {
        const float4 x = *(const float4 *)(part + key * LD + c);
        float4 *at = (float4 *)(to + row * stride + c);
        float4 y = ACCUMULATE ? *at : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        y.x += by * x.x;
        y.y += by * x.y;
        y.z += by * x.z;
        y.w += by * x.w;
        *at = y;
      }
    }
    __syncthreads();
  }
}

void finish_dkv(cudaStream_t stream, const ps__args_attention *a, const plan *p, const void *sums,
                float *dkv, float scale) {
  const dim3 grid(p->tiles_k, 2 * a->n_kv_heads, p->n);
  const float4 *from = (const float4 *)sums;
  auto kernel = a->accumulate_dkv ? finish_dkv_256_k<true> : finish_dkv_256_k<false>;
  if (a->head_dim == 64)
    kernel = a->accumulate_dkv ? finish_dkv_k<64, true> : finish_dkv_k<64, false>;
  else if (a->head_dim == 128)
    kernel = a->accumulate_dkv ? finish_dkv_k<128, true> : finish_dkv_k<128, false>;
  kernel<<<grid, 256, 0, stream>>>(from, dkv, p->keys, a->n_kv_heads, scale);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* As the kernels take tensors: sizes, and the strides in elements but for that of 1. */
struct tensor {
  void *data;
  int32_t size[3];
  int64_t stride[3];
};

/* [n, rows, heads, d] in rows of @width elements. */
tensor heads_of(void *data, uint32_t n, uint32_t rows, uint32_t heads, uint32_t d, uint32_t width) {
  return {data, {(int32_t)n, (int32_t)rows, (int32_t)heads}, {(int64_t)rows * width, width, d}};
}
/* [n, heads, len] */
tensor packed(void *data, uint32_t n, uint32_t heads, uint32_t len) {
  return {data, {(int32_t)n, (int32_t)heads, (int32_t)len}, {(int64_t)heads * len, len}};
}
/* [n, heads, tiles, each] */
tensor turns_of(void *data, uint32_t n, uint32_t heads, uint32_t tiles, uint32_t each) {
  return {data,
          {(int32_t)n, (int32_t)heads, (int32_t)tiles},
          {(int64_t)heads * tiles * each, (int64_t)tiles * each, each}};
}

template <typename... A> cudaError_t run(const kernel *k, cudaStream_t stream, A *...args) {
  int32_t error = 0;
  void *all[] = {(void *)args..., &stream, &error};
  k->run(all, (int32_t)(sizeof all / sizeof *all));
  return (cudaError_t)error;
}

struct operands {
  tensor q, k, v, o, lse;
  float scale;
};

operands describe(const ps_launch *l, const ps__args_attention *a, const plan *p) {
  const uint32_t d = a->head_dim, width = a->n_heads * d, kv_width = a->n_kv_heads * d;
  operands x = {heads_of(l->ptr[0], p->n, p->rows, a->n_heads, d, width),
                heads_of(l->ptr[1], p->n, p->keys, a->n_kv_heads, d, 2 * kv_width),
                {},
                heads_of(l->ptr[3], p->n, p->rows, a->n_heads, d, width),
                {l->ptr[4],
                 {(int32_t)p->n, (int32_t)a->n_heads, (int32_t)p->rows},
                 {(int64_t)p->rows * a->n_heads, a->n_heads}},
                ps__attention_scale(a)};
  x.v = x.k;
  x.v.data = (char *)x.k.data + 2 * (size_t)kv_width;
  return x;
}

cudaError_t backward(const ps_launch *l, const ps__args_attention *a, const plan *p, operands *x,
                     char *scratch, cudaStream_t stream) {
  const uint32_t n = p->n, h = a->n_heads, kv = a->n_kv_heads, d = a->head_dim,
                 rows = p->tiles_q * p->tile_q, keys = p->tiles_k * p->tile_k;
  tensor d_o = x->o, dq = x->q, lse2 = packed(scratch + p->lse2, n, h, rows),
         delta = packed(scratch + p->delta, n, h, rows);
  tensor sums = packed(scratch + p->dq, n, h, rows * d), dk, dv;
  d_o.data = l->ptr[5];
  dq.data = l->ptr[6];
  const bool summed = group_of(a) > 1;
  dk = summed ? packed(scratch + p->dk, n, kv, keys * d)
              : heads_of(scratch + p->dk, n, p->keys, kv, d, kv * d);
  dv = dk;
  dv.data = scratch + p->dv;
  cudaError_t e =
      p->zero_bytes ? cudaMemsetAsync(scratch + p->zero, 0, p->zero_bytes, stream) : cudaSuccess;
  if (e == cudaSuccess)
    e = run(p->pre, stream, &x->o, &d_o, &delta, &x->lse, &lse2, &sums);
  if (e != cudaSuccess)
    return e;
  if (p->main->what == BWD) {
    e = run(p->main, stream, &x->q, &x->k, &x->v, &d_o, &lse2, &delta, &sums, &dk, &dv, &x->scale);
  } else {
    int32_t *turn = (int32_t *)(scratch + p->turns);
    tensor dq_turn = turns_of(turn, n, h, p->tiles_q, 1),
           dk_turn = turns_of(turn + (size_t)n * h * p->tiles_q, n, kv, p->tiles_k, 2);
    tensor dv_turn = dk_turn;
    dv_turn.data = (int32_t *)dk_turn.data + (size_t)n * kv * p->tiles_k * 2;
    e = run(p->main, stream, &x->q, &x->k, &x->v, &d_o, &lse2, &delta, &sums, &dk, &dv, &x->scale,
            &dq_turn, &dk_turn, &dv_turn);
  }
  if (e == cudaSuccess)
    e = run(p->post, stream, &sums, &dq, &x->scale);
  if (e != cudaSuccess)
    return e;
  if (summed)
    finish_dkv(stream, a, p, dk.data, (float *)l->ptr[7], x->scale);
  else
    ps_att_finish_dkv(stream, a, NULL, dk.data, dv.data, kv, (float *)l->ptr[7]);
  return cudaSuccess;
}

ps_status launch(const ps_launch *l, const ps_att_shape *s, void *made) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  /* says whether to accumulate */
  const ps__args_attention *a = (const ps__args_attention *)l->args;
  const plan *p = (const plan *)made;
  operands x = describe(l, a, p);
  const cudaError_t e = s->backward
                            ? backward(l, a, p, &x, (char *)exec->scratch, exec->stream)
                            : run(p->main, exec->stream, &x.q, &x.k, &x.v, &x.o, &x.lse, &x.scale);
  return e == cudaSuccess ? PS_OK
                          : ps__fail(PS_EDEVICE, "attention: flash-attn-4's launch failed: %s",
                                     cudaGetErrorString(e));
}

} // namespace

uint32_t ps_att_flash4_version(void) { return PS_FLASH4_VERSION; }

extern const ps_att_provider ps_att_flash4 = {"flash-attn-4", refuses, prepare, launch};
