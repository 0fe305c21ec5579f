/* attention.c - attention over the rows of a group, forward and backward: shapes, phases and the
 * choice of instruction set.
 *
 * math    query i of the chunk is group row r = row0+i and sees keys doc_start[i] <= k <= r, with a
 *         window those with r - window < k.
 *         s = scale q k, with a soft cap softcap tanh(scale q k / softcap);
 *         o = sum_k softmax(s)_k v_k, lse = log sum_k exp(s_k); backward as in attention_bwd.h.
 *         fp32 inside.
 * shapes  q, o, d_o, dq [T, heads*head_dim], kv [row0+T, 2*kv_heads*head_dim] in dt; dkv likewise
 *         in fp32; lse [T, heads] fp32. Query head h uses kv head h / (heads/kv_heads): K and V are
 *         never expanded.
 * work    tiles of 64 queries by 64 keys, cut relative to the diagonal. Key tiles that no query of
 *         the tile sees are skipped. Inside a tile, blocks of 4 rows skip the keys that they do not
 *         see. No (T,T) tensor: scratch is a few tiles for each worker.
 * bytes   forward: q and o once, kv once for each query tile that sees it.
 * flops   for each visible pair and head: forward 4*head_dim; backward 10*head_dim (fp32) or
 *         14*head_dim (bf16, which makes dq in a second pass, so that dq is rounded once).
 * determinism  what a task computes and the order of additions to dq and dkv (phases) follow from
 *              shapes and doc_start alone.
 * reference    tests/test_attention.py, PyTorch in fp64 */
#include "kernels/cpu/attention_job.h"
#include "kernels/cuda/scratch.h"
#include <math.h>
#include <string.h>

static const ps__att_isa *isa(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f"))
    return &ps__att_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return &ps__att_avx2;
#endif
  return &ps__att_base;
}

static size_t padded_dim(const ps__args_attention *a) { return ps__round_up(a->head_dim, 16); }

static size_t scratch_attention_fwd(
    const void *args, const ps__scratch_target *target) { /* q', k, v, o and the scores */
  return (4 * ATT_TILE * padded_dim(args) + ATT_TILE * ATT_TILE) * sizeof(float);
}

/* k, v, k', v', q, do, dq, dk, dv; P and dS */
static size_t scratch_attention_bwd(const void *args, const ps__scratch_target *target) {
  return (9 * ATT_TILE * padded_dim(args) + 2 * ATT_TILE * ATT_TILE) * sizeof(float);
}

/* The shape, and doc_start: non-decreasing, within the group, at most the row itself. */
static ps_status check(const ps__args_attention *a, const int32_t *doc_start, const char *name) {
  PS_TRY(ps__check_attention(a, name));
  if (!a->n_tokens || !a->head_dim || !a->n_kv_heads || !a->n_heads || a->n_heads % a->n_kv_heads ||
      a->dt >= PS_N_DTYPES)
    return ps__fail(PS_EINVAL,
                    "%s: %u rows, %u heads, %u kv heads, head_dim %u, dtype %u is no valid shape",
                    name, a->n_tokens, a->n_heads, a->n_kv_heads, a->head_dim, a->dt);
  if ((uint64_t)a->row0 + a->n_tokens > INT32_MAX - 2 * ATT_TILE)
    return ps__fail(PS_EINVAL, "%s: a group of %llu rows is too long", name,
                    (unsigned long long)a->row0 + a->n_tokens);
  for (uint32_t i = 0; i < a->n_tokens; i++)
    if (doc_start[i] < (i ? doc_start[i - 1] : 0) || (uint32_t)doc_start[i] > a->row0 + i)
      return ps__fail(PS_EINVAL, "%s: doc_start[%u] = %d decreases or lies past its row %u", name,
                      i, doc_start[i], a->row0 + i);
  return PS_OK;
}

static ps__att_job job_of(const ps_launch *l) {
  const ps__args_attention *a = l->args;
  const float log2e = 1.44269504f, scale = ps__attention_scale(a);
  return (ps__att_job){.a = *a,
                       .hp = padded_dim(a),
                       .ldq = (size_t)a->n_heads * a->head_dim,
                       .ldkv = 2 * (size_t)a->n_kv_heads * a->head_dim,
                       .scale = scale,
                       .product_scale = a->softcap > 0.0f ? scale / a->softcap : scale * log2e,
                       .cap2 = a->softcap * log2e,
                       .q = l->ptr[0],
                       .kv = l->ptr[1],
                       .doc_start = l->ptr[2],
                       .exec = l->exec};
}

static ps_status attention_fwd(const ps_launch *l) {
  ps__att_job j = job_of(l);
  PS_TRY(check(&j.a, j.doc_start, "attention_fwd"));
  j.out = l->ptr[3];
  j.lse = l->ptr[4];
  ps__pool_run(j.exec->pool, att_n_tiles(&j.a) * j.a.n_heads, isa()->fwd, &j);
  return PS_OK;
}

static void zero_prefix(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const ps__att_job *j = arg;
  memset(j->dkv + (size_t)first * j->ldkv, 0, (size_t)(end - first) * j->ldkv * sizeof(float));
}

static ps_status attention_bwd(const ps_launch *l) {
  ps__att_job j = job_of(l);
  PS_TRY(check(&j.a, j.doc_start, "attention_bwd"));
  j.o = l->ptr[3];
  j.lse_in = l->ptr[4];
  j.d_o = l->ptr[5];
  j.out = l->ptr[6];
  j.dkv = l->ptr[7];
  j.want_dq = j.a.dt == PS_F32;
  if (!j.a.accumulate_dkv)
    ps__cpu_rows(j.exec, j.a.row0, 256, zero_prefix, &j);
  int64_t n_tiles = att_n_tiles(&j.a), n_phases = 1; /* how far back the query tiles look */
  for (int64_t i = 0; i < n_tiles; i++)
    n_phases = att_max(n_phases, 1 + ((int64_t)j.a.row0 + i * ATT_TILE -
                                      att_start(&j.a, j.doc_start, i * ATT_TILE) + ATT_TILE - 1) /
                                         ATT_TILE);
  for (j.phase = 0; j.phase < n_phases; j.phase++)
    ps__pool_run(j.exec->pool, n_tiles * j.a.n_kv_heads, isa()->bwd, &j);
  if (!j.want_dq)
    ps__pool_run(j.exec->pool, n_tiles * j.a.n_heads, isa()->bwd_dq, &j);
  return PS_OK;
}

static void bind_attention(void *args, const ps__chunk_shape *chunk) {
  ps__args_attention *a = args;
  a->n_tokens = chunk->n_tokens;
  a->row0 = chunk->row0;
  a->document_rows = chunk->document_rows;
}
static void bind_attention_bwd(void *args, const ps__chunk_shape *chunk) {
  bind_attention(args, chunk);
  ((ps__args_attention *)args)->accumulate_dkv = !chunk->first_dkv;
}

/* Pairs of the first @n rows of a sequence, each with @window keys at most. */
static double pairs_in_window(double n, double window) {
  return n <= window ? 0.5 * n * n : window * (n - 0.5 * window);
}
/* (Query, key) pairs under the causal mask, counted as area: n^2/2 a sequence of n rows. */
static double pairs(const ps__args_attention *a) {
  const double n = a->n_tokens;
  if (a->window) {
    const bool packed = a->sequence_rows && a->sequence_rows < a->n_tokens;
    const double s = a->sequence_rows, w = a->window, to = a->row0 + n;
    return packed ? n / s * pairs_in_window(s, w)
                  : pairs_in_window(to, w) - pairs_in_window(a->row0, w);
  }
  return a->sequence_rows && a->sequence_rows < a->n_tokens ? 0.5 * n * a->sequence_rows
                                                            : n * a->row0 + 0.5 * n * n;
}
/* A product takes 2 FLOP a pair and element of a head. Forward has two products. Backward has five;
 * the one that computes the scores again is not model work. */
static ps_work work_of(const ps__args_attention *a, double flops, double model_flops, double rows) {
  const double width = (double)a->n_heads * a->head_dim;
  return (ps_work){.flops = pairs(a) * width * flops,
                   .bytes = a->n_tokens * width * (double)ps__dt_bytes(a->dt) * rows,
                   .model_flops = pairs(a) * width * model_flops};
}
static ps_work work_attention_fwd(const void *args) { return work_of(args, 4.0, 4.0, 2.0); }
static ps_work work_attention_bwd(const void *args) { return work_of(args, 10.0, 8.0, 5.0); }

const ps_kernel ps__k_attention_fwd = {
    .name = "attention_fwd",
    .op_class = PS_CLASS_ATTENTION,
    .fn = {attention_fwd, PS_CUDA_FN(attention_fwd)},
    .info = &(const ps__op_info){.rate = PS__RATE_ATTENTION_FWD,
                                 .in_generation = &ps__k_attention_cached,
                                 .work = work_attention_fwd,
                                 .bind = bind_attention,
                                 .scratch = {scratch_attention_fwd, ps_scratch_attention_fwd},
                                 .prepare = PS_CUDA_FN(prepare_attention_fwd)},
};
const ps_kernel ps__k_attention_bwd = {
    .name = "attention_bwd",
    .op_class = PS_CLASS_ATTENTION,
    .fn = {attention_bwd, PS_CUDA_FN(attention_bwd)},
    .info = &(const ps__op_info){.rate = PS__RATE_ATTENTION_BWD,
                                 .work = work_attention_bwd,
                                 .bind = bind_attention_bwd,
                                 .scratch = {scratch_attention_bwd, ps_scratch_attention_bwd},
                                 .prepare = PS_CUDA_FN(prepare_attention_bwd)},
};
