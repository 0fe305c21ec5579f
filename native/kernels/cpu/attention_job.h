/* attention_job.h - what the driver of the attention kernels (attention.c) and its tile
 * functions share.
 *
 * The tile functions exist three times, from one source (attention_isa.h, attention_fwd.h,
 * attention_bwd.h): for AVX-512, for AVX2 with FMA, and for any machine. A process uses one of
 * them throughout, so that its bits never depend on threads or time. */
#ifndef PS_KERNELS_ATTENTION_JOB_H
#define PS_KERNELS_ATTENTION_JOB_H
#include "kernels/cpu/cpu.h"

/* Rows of a query tile and of a key tile, and rows that a micro-kernel makes at once. */
enum { ATT_TILE = 64, ATT_ROWS = 4 };

typedef struct ps__att_job {
  ps__args_attention a;
  size_t hp;        /* head_dim rounded up to 16: columns of a tile in scratch, zeros at the end */
  size_t ldq, ldkv; /* elements of a row of q, o, d_o, dq, and of kv, dkv */
  /* q k times product_scale is the score times log2(e), or with a soft cap its tanh's argument,
   * and the score times log2(e) is then cap2 * tanh */
  float scale, product_scale, cap2;
  const void *q, *kv, *o, *d_o;
  const int32_t *doc_start;
  const float *lse_in;
  void *out; /* o of the forward pass, dq of the backward pass */
  float *lse, *dkv;
  const ps__cpu_exec *exec;
  int64_t phase; /* backward: distance of the key tile from the diagonal, in tiles */
  bool want_dq;  /* dq of each pair of tiles is added to fp32 storage in the same pass */
} ps__att_job;

typedef struct ps__att_isa {
  ps__task_fn fwd;    /* task = (query tile, head) */
  ps__task_fn bwd;    /* task = (query tile, kv head) of a phase: dk, dv and, with want_dq, dq */
  ps__task_fn bwd_dq; /* task = (query tile, head): dq alone, one rounding at the store */
  /* What products of experts share (matmul_experts.c): lanes of a vector; C = or with row_scale +=
   * A B, for ATT_ROWS rows of nv vectors; dst[c][r] = src[r][c] * scale for ATT_TILE rows. */
  uint32_t lanes;
  void (*mul)(int nv, int64_t n_k, const float *a, size_t lda, const float *b, size_t ldb, float *c,
              size_t ldc, const float *row_scale);
  void (*transpose)(float *dst, const float *src, size_t ld, size_t n_cols, float scale);
} ps__att_isa;
extern const ps__att_isa ps__att_avx512, ps__att_avx2, ps__att_base;
const ps__att_isa *ps__att_of_this_cpu(void);

static inline int64_t att_n_tiles(const ps__args_attention *a) {
  return ((int64_t)a->n_tokens + ATT_TILE - 1) / ATT_TILE;
}
/* First group row that chunk row i sees. Non-decreasing in i, as doc_start is. */
static inline int32_t att_start(const ps__args_attention *a, const int32_t *doc_start, int64_t i) {
  const int64_t first = a->window ? (int64_t)a->row0 + i + 1 - a->window : 0;
  return first > doc_start[i] ? (int32_t)first : doc_start[i];
}
static inline int64_t att_min(int64_t x, int64_t y) { return x < y ? x : y; }
static inline int64_t att_max(int64_t x, int64_t y) { return x > y ? x : y; }

#endif
