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
#include <string.h>

const ps__att_isa *ps__att_of_this_cpu(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f"))
    return &ps__att_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return &ps__att_avx2;
#endif
  return &ps__att_base;
}

static size_t padded_dim(const ps__args_attention *a) { return ps__round_up(a->head_dim, 16); }

/* q', k, v, o and the scores */
size_t ps__cpu_scratch_attention_fwd(const void *args, const ps__scratch_target *target) {
  return (4 * ATT_TILE * padded_dim(args) + ATT_TILE * ATT_TILE) * sizeof(float);
}

/* k, v, k', v', q, do, dq, dk, dv; P and dS */
size_t ps__cpu_scratch_attention_bwd(const void *args, const ps__scratch_target *target) {
  return (9 * ATT_TILE * padded_dim(args) + 2 * ATT_TILE * ATT_TILE) * sizeof(float);
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

ps_status ps__cpu_attention_fwd(const ps_launch *l) {
  ps__att_job j = job_of(l);
  PS_TRY(ps__cpu_check_documents(j.doc_start, j.a.n_tokens, j.a.row0, "attention_fwd"));
  j.out = l->ptr[3];
  j.lse = l->ptr[4];
  ps__pool_run(j.exec->pool, att_n_tiles(&j.a) * j.a.n_heads, ps__att_of_this_cpu()->fwd, &j);
  return PS_OK;
}

static void zero_prefix(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const ps__att_job *j = arg;
  memset(j->dkv + (size_t)first * j->ldkv, 0, (size_t)(end - first) * j->ldkv * sizeof(float));
}

ps_status ps__cpu_attention_bwd(const ps_launch *l) {
  ps__att_job j = job_of(l);
  PS_TRY(ps__cpu_check_documents(j.doc_start, j.a.n_tokens, j.a.row0, "attention_bwd"));
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
    ps__pool_run(j.exec->pool, n_tiles * j.a.n_kv_heads, ps__att_of_this_cpu()->bwd, &j);
  if (!j.want_dq)
    ps__pool_run(j.exec->pool, n_tiles * j.a.n_heads, ps__att_of_this_cpu()->bwd_dq, &j);
  return PS_OK;
}
