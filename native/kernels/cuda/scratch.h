/* scratch.h - how much scratch an op needs on CUDA, for its description (ps__op_info.scratch).
 * Plain C without CUDA's headers: plans for a GPU are made on any machine. */
#ifndef PS_KERNELS_CUDA_SCRATCH_H
#define PS_KERNELS_CUDA_SCRATCH_H
#include "kernels/ops.h"
#include <stdbool.h>

static inline size_t ps_round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Sums over rows are cut in tiles of at least 8 rows, by shape alone: at most `most`. A block
 * sums a tile, and what it leaves is read again: colsum, which does little else, makes fewer. */
enum { PS_NORM_TILES = 256, PS_COLSUM_TILES = 128 };
static inline uint32_t ps_row_tile_rows(uint32_t rows, uint32_t most) {
  return rows <= 8 * most ? 8 : (rows + most - 1) / most;
}
static inline uint32_t ps_n_row_tiles(uint32_t rows, uint32_t most) {
  const uint32_t g = ps_row_tile_rows(rows, most);
  return (rows + g - 1) / g;
}

/* Elements of a full vector, of 16 bytes. */
static inline uint32_t ps_vector_elements(uint32_t dt) { return 16 / ps__dtypes[dt].bytes; }

/* Heads that a block of qkv_split takes, q, k and v counted alike: at most 384 threads, of which
 * each has 16 bytes of half a head. */
static inline uint32_t ps_qkv_heads_each(const ps__args_qkv *a) {
  const uint32_t v = ps_vector_elements(a->dt),
                 threads = a->head_dim / 2 < v ? 1 : a->head_dim / 2 / v,
                 heads = a->n_heads + 2 * a->n_kv_heads;
  const uint32_t n = (heads + 384 / threads - 1) / (384 / threads);
  return (heads + n - 1) / n;
}
static inline uint32_t ps_qkv_slices(const ps__args_qkv *a) {
  const uint32_t each = ps_qkv_heads_each(a);
  return (a->n_heads + 2 * a->n_kv_heads + each - 1) / each;
}

/* The products' workspace: what cuBLASLt's kernels for Hopper and later like, and those for
 * others. */
static inline size_t ps__cuda_workspace_bytes(uint32_t compute_capability) {
  return (size_t)(compute_capability >= 90 ? 32 : 4) << 20;
}

/* The GPU's page tables of pinned host memory, which lie in device memory: at most 8 bytes for each
 * page of 4 KiB, and 16 for each 2 MiB of them (NVIDIA, "Pascal MMU Format Changes", open-gpu-doc;
 * later GPUs' entries have the same sizes). In units of 2 MiB. */
static inline uint64_t ps__cuda_table_bytes(uint64_t pinned_bytes) {
  const uint64_t unit = 2u << 20, bytes = pinned_bytes / 4096 * 8 + pinned_bytes / unit * 16;
  return (bytes + unit - 1) / unit * unit;
}

static inline size_t ps_scratch_embed_bwd(const void *args, const ps__scratch_target *target) {
  const ps__args_embed *a = (const ps__args_embed *)args;
  (void)target;
  return ps_round_up((2 * (size_t)a->vocab + 2 + 4 * (size_t)a->n_tokens) * sizeof(uint32_t), 256);
}
static inline size_t ps_scratch_rmsnorm_bwd(const void *args, const ps__scratch_target *target) {
  const ps__args_rmsnorm *a = (const ps__args_rmsnorm *)args;
  (void)target;
  return ps_round_up((size_t)ps_n_row_tiles(a->rows, PS_NORM_TILES) * a->cols * sizeof(float), 256);
}
/* rstd of each row */
static inline size_t ps_scratch_rmsnorm_quantize(const void *args,
                                                 const ps__scratch_target *target) {
  const ps__args_rmsnorm_quantize *a = (const ps__args_rmsnorm_quantize *)args;
  (void)target;
  return ps_round_up((size_t)a->norm.rows * sizeof(float), 256);
}
/* Partial sums of dw that each norm weight gets, at most; with PS_QK_NORM_ROW one a tile. */
static inline size_t ps_scratch_qkv_split_bwd(const void *args, const ps__scratch_target *target) {
  const ps__args_qkv *a = (const ps__args_qkv *)args;
  (void)target;
  if (!a->qk_norm)
    return 0;
  const size_t n = (size_t)ps_n_row_tiles(a->n_tokens, PS_NORM_TILES) *
                   (a->qk_norm == PS_QK_NORM_ROW ? 1 : ps_qkv_slices(a));
  return ps_round_up(n * ((size_t)ps__q_norm_elements(a) + ps__k_norm_elements(a)) * sizeof(float),
                     256);
}
static inline size_t ps_scratch_colsum(const void *args, const ps__scratch_target *target) {
  const ps__args_colsum *a = (const ps__args_colsum *)args;
  (void)target;
  return ps_round_up((size_t)ps_n_row_tiles(a->rows, PS_COLSUM_TILES) * a->cols * sizeof(float),
                     256);
}
static inline size_t ps_scratch_sumsq(const void *args, const ps__scratch_target *target) {
  return (void)args, (void)target, PS_SQ_TILES * sizeof(double);
}

/* moe_index: choices of a tile, by their number alone: at most PS_MOE_TILES tiles, each of whole
 * vectors of 32 choices for 8 warps. */
enum { PS_MOE_TILES = 128, PS_MOE_TILE_UNIT = 256 };
static inline uint32_t ps_moe_tile(uint32_t n) {
  const uint32_t each =
      (uint32_t)ps_round_up(((size_t)n + PS_MOE_TILES - 1) / PS_MOE_TILES, PS_MOE_TILE_UNIT);
  return each < 4 * PS_MOE_TILE_UNIT ? 4 * PS_MOE_TILE_UNIT : each;
}
static inline size_t ps_scratch_moe_index(const void *args, const ps__scratch_target *target) {
  const ps__args_moe_index *a = (const ps__args_moe_index *)args;
  const uint32_t n = a->n_tokens * a->n_used, each = ps_moe_tile(n);
  (void)target;
  return ps_round_up((size_t)((n + each - 1) / each) * a->n_experts * sizeof(uint32_t), 256);
}

/* the version from which cuDNN's deterministic backward needs linear workspace */
enum { PS_CUDNN_LINEAR_DETERMINISTIC = 92500 };

/* Scratch that attention takes at most, before a library is asked:
 * - documents, and log-sum-exp transposed;
 * - backward: dK and dV in bf16;
 * - backward, the library's own: fp32 dQ with softmax sums, dK and dV of every query head;
 * - found documents: dQ's padding (flash-attn 2.8), or dK and dV once more (cuDNN 9.19);
 * - several known documents: the rows of their last tiles;
 * - a score a pair where cuDNN's deterministic backward is the old one.
 * flash-attn's deterministic backward may take more. Checked by
 * tests/native/test_cuda_attention.c. */
static inline size_t ps_scratch_attention(const ps__args_attention *a, bool backward,
                                          const ps__scratch_target *target) {
  const size_t t = a->n_tokens, keys = (size_t)a->row0 + a->n_tokens,
               width = (size_t)a->n_heads * a->head_dim;
  const uint32_t documents = ps__attention_documents(a);
  const size_t pad = documents > 1 ? documents * ps_round_up(t / documents, 128) - t : 0;
  size_t n = ((size_t)1 << 20) + t * a->n_heads * 4;
  if (backward)
    n += 4 * keys * a->n_kv_heads * a->head_dim + (t + pad + 128) * width * 4 +
         (keys + pad + 128) * width * 4 + 3 * (t + pad + 128) * a->n_heads * 4;
  if (backward && documents != 1)
    n += (keys > 1024 ? keys : 1024) * width * 4;
  if (backward && target->deterministic && target->cudnn_version < PS_CUDNN_LINEAR_DETERMINISTIC)
    n += (t + pad) * (documents > 1 ? (t + pad) / documents : keys) * a->n_heads * 2;
  return ps_round_up(n, 256);
}
static inline size_t ps_scratch_attention_fwd(const void *args, const ps__scratch_target *target) {
  return ps_scratch_attention((const ps__args_attention *)args, false, target);
}
static inline size_t ps_scratch_attention_bwd(const void *args, const ps__scratch_target *target) {
  return ps_scratch_attention((const ps__args_attention *)args, true, target);
}

/* attention_cached: parts that the keys of a row are cut in, by shape alone, so that a GPU has
 * enough blocks; and the parts' sums. */
enum {
  PS_CACHED_HEADS = 8,
  PS_CACHED_BLOCKS = 512,
  PS_CACHED_PARTS = 64,
  PS_CACHED_PART_ROWS = 64,
  PS_CACHED_WIDE = 256 /* above it a lane has twice the elements, and a block half the heads */
};
static inline uint32_t ps_cached_heads(const ps__args_attention *a) {
  return a->head_dim > PS_CACHED_WIDE ? PS_CACHED_HEADS / 2 : PS_CACHED_HEADS;
}
static inline uint32_t ps_cached_tiles(
    const ps__args_attention *a) { /* heads that share a kv head */
  return (a->n_heads / a->n_kv_heads + ps_cached_heads(a) - 1) / ps_cached_heads(a);
}
static inline uint32_t ps_cached_parts(const ps__args_attention *a) {
  const uint64_t blocks = (uint64_t)a->n_tokens * a->n_kv_heads * ps_cached_tiles(a);
  const uint32_t rows = a->window && a->window < a->sequence_rows ? a->window : a->sequence_rows,
                 most = (rows + PS_CACHED_PART_ROWS - 1) / PS_CACHED_PART_ROWS,
                 n = blocks >= PS_CACHED_BLOCKS ? 1 : (uint32_t)(PS_CACHED_BLOCKS / blocks),
                 cut = n < most ? n : most;
  return cut < PS_CACHED_PARTS ? cut : PS_CACHED_PARTS;
}
static inline size_t ps_scratch_attention_cached(const void *args,
                                                 const ps__scratch_target *target) {
  const ps__args_attention *a = (const ps__args_attention *)args;
  (void)target;
  if (!a->n_tokens || !a->n_kv_heads || a->n_heads < a->n_kv_heads)
    return 0; /* the launch refuses it */
  const uint32_t parts = ps_cached_parts(a);
  return parts < 2 ? 0
                   : ps_round_up((size_t)parts * a->n_tokens * a->n_heads *
                                     ((size_t)a->head_dim + 2) * sizeof(float),
                                 256);
}

/* moe_bias_sum: parts that each expert's rows are cut in, so that a GPU has enough blocks. Their
 * sums, and the rows' weights. */
enum { PS_MOE_BIAS_PARTS = 512 };
static inline uint32_t ps_moe_bias_parts(uint32_t n_experts) {
  return n_experts < PS_MOE_BIAS_PARTS ? PS_MOE_BIAS_PARTS / n_experts : 1;
}
static inline size_t ps_scratch_moe_bias_sum(const void *args, const ps__scratch_target *target) {
  const ps__args_moe_bias *a = (const ps__args_moe_bias *)args;
  const size_t parts = (size_t)a->n_experts * ps_moe_bias_parts(a->n_experts);
  (void)target;
  return ps_round_up((parts * a->cols + (size_t)a->n_tokens * a->n_used) * sizeof(float), 256);
}
/* attention_sink_bwd: terms of a tile of rows, at most one an element of a head. */
enum { PS_SINK_TILES = 256 };
static inline size_t ps_scratch_sink_bwd(const void *args, const ps__scratch_target *target) {
  const ps__args_sink *a = (const ps__args_sink *)args;
  (void)target;
  return ps_round_up((size_t)ps_n_row_tiles(a->n_tokens, PS_SINK_TILES) * a->n_heads * a->head_dim *
                         sizeof(double),
                     256);
}

/* The gated delta rule (delta.cu): rows come in pieces of PS_DELTA_ROWS, pieces in segments. What
 * follows is of a segment, but `borders` and `weights`. Offsets in bytes; n: pieces; dk': dk in
 * whole PS_DELTA_ROWS. */
enum { PS_DELTA_ROWS = 64, PS_DELTA_SEGMENT = 32, PS_DELTA_FACTORS = 5 };
typedef struct ps_delta_scratch {
  size_t pairs;       /* f32 [n,nv,64,64]: q k^T with its decay */
  size_t rows, norms; /* f32 [n,nv,5,64]: beta, decays; f32 [n,nk,2,64]: 1/|q|, 1/|k| */
  size_t w, d;        /* f32 [n,nv,64,dk']; f32 [n,nv,64,dv] */
  size_t states;      /* f32 [n,nv,dk,dv]: with which pieces begin */
  /* backward: f32 [n,nv,64,64] (1 + L)^-1; [n,nk,64,64] k k^T; [n,nv,64,dv]; [n,nv,dk,dv];
   * [n,nk,64,dk] */
  size_t inverse, products, dy, dstates, dq, dk;
  size_t borders; /* f32 [segments,nv,dk,dv]: states with which segments begin, the first unused */
  size_t weights; /* f64 [pieces,nv,2]: terms of da_log, ddt_bias */
  size_t bytes;
} ps_delta_scratch;
static inline size_t ps_delta_take(size_t *at, size_t bytes) {
  const size_t here = *at;
  *at += ps_round_up(bytes, 256);
  return here;
}
static inline ps_delta_scratch ps_delta_layout(const ps__args_delta *a, bool backward) {
  const size_t all = ((size_t)a->n_tokens + PS_DELTA_ROWS - 1) / PS_DELTA_ROWS,
               n = all < PS_DELTA_SEGMENT ? all : PS_DELTA_SEGMENT, f = sizeof(float),
               heads = n * a->n_value_heads, keys = n * a->n_key_heads, r = PS_DELTA_ROWS,
               state = (size_t)a->key_dim * a->value_dim;
  ps_delta_scratch s = {0};
  size_t at = 0;
  s.pairs = ps_delta_take(&at, heads * r * r * f);
  s.rows = ps_delta_take(&at, heads * PS_DELTA_FACTORS * r * f);
  s.norms = ps_delta_take(&at, keys * 2 * r * f);
  s.w = ps_delta_take(&at, heads * r * ps_round_up(a->key_dim, PS_DELTA_ROWS) * f);
  s.d = ps_delta_take(&at, heads * r * a->value_dim * f);
  s.states = ps_delta_take(&at, heads * state * f);
  if (backward) {
    s.inverse = ps_delta_take(&at, heads * r * r * f);
    s.products = ps_delta_take(&at, keys * r * r * f);
    s.dy = ps_delta_take(&at, heads * r * a->value_dim * f);
    s.dstates = ps_delta_take(&at, heads * state * f);
    s.dq = ps_delta_take(&at, keys * r * a->key_dim * f);
    s.dk = ps_delta_take(&at, keys * r * a->key_dim * f);
    s.borders = ps_delta_take(&at, (all + PS_DELTA_SEGMENT - 1) / PS_DELTA_SEGMENT *
                                       a->n_value_heads * state * f);
    s.weights = ps_delta_take(&at, all * a->n_value_heads * 2 * sizeof(double));
  }
  s.bytes = at;
  return s;
}
/* On the tensor cores (delta_mma.cu) another layout: bf16 of at most PS_DELTA_MMA_KEYS columns of
 * keys, in rows of whole 16 bytes. `pairs` and `terms` are of a group of PS_DELTA_MMA_SEGMENT
 * pieces, which forward is the segment; backward a segment has PS_DELTA_SEGMENT. */
enum {
  PS_DELTA_MMA_KEYS = 128,
  PS_DELTA_MMA_COLUMNS = 32,
  PS_DELTA_MMA_SEGMENT = 128,
  PS_DELTA_PAIR_BYTES = 4 * 10 * 512, /* triangular matrices of a piece and value head */
  PS_DELTA_TERM_BYTES = 4368,         /* its gates */
  /* of 16 columns of values in pairs of bf16: a piece's rows, a state */
  PS_DELTA_ROW_BYTES = 2 * PS_DELTA_ROWS * 16 * 2,
  PS_DELTA_STATE_BYTES = 2 * PS_DELTA_MMA_KEYS * 16 * 2
};
typedef struct ps_delta_mma_scratch {
  size_t pairs, terms;           /* [pieces of a group,nv] */
  size_t d, dy, states, dstates; /* backward: [n,nv,dv / 16] */
  size_t sums;                   /* f32 [n,nk,2,64,PS_DELTA_MMA_KEYS]: dq, dk */
  size_t borders, weights;       /* as in ps_delta_scratch */
  size_t bytes;
} ps_delta_mma_scratch;
static inline bool ps_delta_on_mma(const ps__args_delta *a) {
  return a->dt == PS_BF16 && a->key_dim <= PS_DELTA_MMA_KEYS && a->key_dim % 8 == 0 &&
         a->value_dim % 8 == 0;
}
static inline ps_delta_mma_scratch ps_delta_mma_layout(const ps__args_delta *a, bool backward) {
  const size_t all = ((size_t)a->n_tokens + PS_DELTA_ROWS - 1) / PS_DELTA_ROWS,
               group = all < PS_DELTA_MMA_SEGMENT ? all : PS_DELTA_MMA_SEGMENT,
               n = all < PS_DELTA_SEGMENT ? all : PS_DELTA_SEGMENT,
               tiles =
                   n * a->n_value_heads * (ps_round_up(a->value_dim, PS_DELTA_MMA_COLUMNS) / 16);
  ps_delta_mma_scratch s = {0};
  size_t at = 0;
  s.pairs = ps_delta_take(&at, group * a->n_value_heads * PS_DELTA_PAIR_BYTES);
  s.terms = ps_delta_take(&at, group * a->n_value_heads * PS_DELTA_TERM_BYTES);
  if (backward) {
    s.d = ps_delta_take(&at, tiles * PS_DELTA_ROW_BYTES);
    s.dy = ps_delta_take(&at, tiles * PS_DELTA_ROW_BYTES);
    s.states = ps_delta_take(&at, tiles * PS_DELTA_STATE_BYTES);
    s.dstates = ps_delta_take(&at, tiles * PS_DELTA_STATE_BYTES);
    s.sums = ps_delta_take(&at, n * a->n_key_heads * 2 * PS_DELTA_ROWS * PS_DELTA_MMA_KEYS *
                                    sizeof(float));
    s.borders =
        ps_delta_take(&at, (all + PS_DELTA_SEGMENT - 1) / PS_DELTA_SEGMENT * a->n_value_heads *
                               a->key_dim * a->value_dim * sizeof(float));
    s.weights = ps_delta_take(&at, all * a->n_value_heads * 2 * sizeof(double));
  }
  s.bytes = at;
  return s;
}
/* Enough for both, as addresses may be aligned or not. */
static inline size_t ps_delta_bytes(const ps__args_delta *a, bool backward) {
  const size_t any = ps_delta_layout(a, backward).bytes,
               mma = ps_delta_on_mma(a) ? ps_delta_mma_layout(a, backward).bytes : 0;
  return any > mma ? any : mma;
}
static inline size_t ps_scratch_delta_fwd(const void *args, const ps__scratch_target *target) {
  return (void)target, ps_delta_bytes((const ps__args_delta *)args, false);
}
static inline size_t ps_scratch_delta_bwd(const void *args, const ps__scratch_target *target) {
  return (void)target, ps_delta_bytes((const ps__args_delta *)args, true);
}
/* dw of each tile of rows */
enum { PS_CONV_TILES = 64, PS_GATED_NORM_TILES = 1024 };
static inline size_t ps_scratch_conv_bwd(const void *args, const ps__scratch_target *target) {
  const ps__args_conv *a = (const ps__args_conv *)args;
  (void)target;
  return ps_round_up((size_t)ps_n_row_tiles(a->n_tokens, PS_CONV_TILES) * a->channels * a->width *
                         sizeof(float),
                     256);
}
static inline size_t ps_scratch_gated_norm_bwd(const void *args, const ps__scratch_target *target) {
  const ps__args_gated_norm *a = (const ps__args_gated_norm *)args;
  (void)target;
  return ps_round_up((size_t)ps_n_row_tiles(a->n_tokens * a->n_heads, PS_GATED_NORM_TILES) *
                         a->head_dim * sizeof(float),
                     256);
}

#endif
