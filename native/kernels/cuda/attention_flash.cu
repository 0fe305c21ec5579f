/* attention_flash.cu - attention through flash-attn's FA2 kernels, compiled with `make
 * FLASH_ATTN=1` from its source package (flash/).
 *
 * math    as in ops.h; bf16 in and out, fp32 softmax. dK and dV leave in bf16 for every query head
 *         (one rounding) and are added over a group's heads and to fp32 dkv by us; dQ is summed in
 *         fp32.
 * shapes  head_dim 64 or 128, any rows: K and V are strided views of the interleaved kv rows. One
 *         document is a batch of 1; several are a batch of ps_att_max_documents(), found on the
 *         device (ps_att_find_documents, in rows), those after them go to the plain kernels.
 *         Log-sum-exp is [heads, T] there and transposed by us.
 * scratch log-sum-exp and documents; backward also 4*heads*(T+128*max_documents)*(head_dim+1)
 *         bytes for dQ and the rows' sums (dQ once for each of ceil(SMs/heads) splits when
 *         deterministic), 4*(row0+T)*heads*head_dim bytes for dK and dV.
 * time    H200, 32/8 heads of 128, T = 8192, TFLOP/s forward / backward: one document 352 / 301
 *         (deterministic 187), found on the device 346 / 295, after a prefix of 8192 380 / 327, 8
 *         documents of 1024 235 / 186 (the log of 2026-11-21).
 * determinism  forward always; backward with exec->deterministic, else dQ is added with atomics.
 * reference    the cpu backend's, tests/native/test_cuda_attention.c */
#include "kernels/attention_documents.h"
#include "kernels/cuda/attention_cuda.h"
#include "kernels/cuda/flash/flash_launch.h"
#include <math.h>
#include <new>

namespace {

struct plan {
  uint32_t max_documents; /* 0: one document; several are found, known or not */
  int splits;
  bool narrow;
  size_t documents, lse, sums, accum, accum_bytes, dk, dv; /* offsets in scratch */
};

const char *refuses(const ps_att_shape *s) {
  if (s->sm < 80)
    return "needs compute capability 8.0";
  if (!ps__flash_runs(PS_FLASH_ARCH, (uint32_t)s->sm))
    return "was compiled for compute capability " PS_FLASH_ARCH;
  const bool window = ps_att_window(&s->args), softcap = s->args.softcap > 0.0f;
  if (ps__flash_takes(s->args.head_dim, window, softcap))
    return NULL;
  return window || softcap ? "windows and soft caps are left to cuDNN"
                           : "head_dim is not 64 or 128";
}

uint32_t batch(const plan *p) { return p->max_documents ? p->max_documents : 1; }
size_t padded_rows(const ps__args_attention *a, const plan *p) {
  return a->n_tokens + (size_t)PS_FLASH_PAD * batch(p);
}

/* Enough blocks for all SMs, no more than there are tiles of keys. */
int splits_of(const ps__args_attention *a, int n_sms) {
  const int splits = (n_sms + (int)a->n_heads - 1) / (int)a->n_heads,
            tiles = (int)((a->row0 + a->n_tokens + 63) / 64);
  return splits < tiles ? splits : tiles;
}

void lay_out(plan *p, const ps_att_shape *s, size_t *bytes) {
  const ps__args_attention *a = &s->args;
  const size_t one = ps_att_round(2 * ((size_t)a->row0 + a->n_tokens) * a->n_heads * a->head_dim);
  size_t at = 0;
  p->documents = at;
  if (p->max_documents)
    at += ps_att_round(ps_att_documents_bytes(p->max_documents));
  p->lse = at;
  at += ps_att_round((size_t)a->n_tokens * a->n_heads * 4);
  if (s->backward) {
    p->sums = at;
    at += ps_att_round(padded_rows(a, p) * a->n_heads * 4);
    p->accum = at;
    p->accum_bytes = p->splits * padded_rows(a, p) * a->n_heads * a->head_dim * 4;
    at += ps_att_round(p->accum_bytes);
    p->dk = at;
    p->dv = at + one;
    at += 2 * one;
  }
  *bytes = at;
}

ps_status prepare(const ps_att_shape *s, void **out, size_t *scratch_bytes) {
  int n_sms = 0, shared = 0;
  cudaError_t e = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, s->device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, s->device);
  if (e != cudaSuccess)
    return ps__fail(PS_EDEVICE, "attention: device %d: %s", s->device, cudaGetErrorString(e));
  plan *p = new (std::nothrow) plan();
  if (!p)
    return ps__fail(PS_ENOMEM, "attention: no memory for a plan");
  p->max_documents =
      ps__attention_documents(&s->args) == 1 ? 0 : ps_att_max_documents(s->args.n_tokens);
  p->splits = s->backward && s->deterministic ? splits_of(&s->args, n_sms) : 1;
  p->narrow = shared < 144 * 1024;
  lay_out(p, s, scratch_bytes);
  *out = p;
  return PS_OK;
}

/* What forward and backward have in common. Strides are in elements. */
void describe(ps_flash::Flash_fwd_params *f, const ps_launch *l, const ps_att_shape *s,
              const plan *p, int32_t *documents, float *lse) {
  const ps__args_attention *a = &s->args;
  const float scale = ps__attention_scale(a);
  f->q_ptr = l->ptr[0];
  f->k_ptr = l->ptr[1];
  f->v_ptr = (char *)l->ptr[1] + 2 * (size_t)a->n_kv_heads * a->head_dim;
  f->o_ptr = l->ptr[3];
  f->softmax_lse_ptr = lse;
  f->q_row_stride = f->o_row_stride = (int64_t)a->n_heads * a->head_dim;
  f->k_row_stride = f->v_row_stride = 2 * (int64_t)a->n_kv_heads * a->head_dim;
  f->q_head_stride = f->k_head_stride = f->v_head_stride = f->o_head_stride = a->head_dim;
  f->b = (int)batch(p);
  f->h = (int)a->n_heads;
  f->h_k = (int)a->n_kv_heads;
  f->h_h_k_ratio = f->h / f->h_k;
  f->seqlen_q = f->seqlen_q_rounded = f->total_q = (int)a->n_tokens;
  f->seqlen_k = f->seqlen_k_rounded = (int)(a->row0 + a->n_tokens);
  f->d = f->d_rounded = (int)a->head_dim;
  f->scale_softmax = f->scale_softmax_rp_dropout = scale;
  f->scale_softmax_log2 = scale * (float)M_LOG2E;
  f->p_dropout = f->rp_dropout = 1.0f; /* the probability of keeping */
  f->window_size_left = -1;
  f->is_bf16 = f->is_causal = f->is_seqlens_k_cumulative = f->unpadded_lse = true;
  f->rng_state = (uint64_t *)lse; /* read, never used */
  if (documents) {
    f->cu_seqlens_q = ps_att_array(documents, p->max_documents, PS_ATT_OFF_Q);
    f->cu_seqlens_k = ps_att_array(documents, p->max_documents, PS_ATT_OFF_KV);
  }
}

ps_status forward(const ps_launch *l, const ps_att_shape *s, const plan *p, int32_t *documents,
                  float *lse) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  ps_flash::Flash_fwd_params f = {};
  describe(&f, l, s, p, documents, lse);
  const cudaError_t e = f.d == 64 ? ps_flash_fwd<64>(f, p->narrow, exec->stream)
                                  : ps_flash_fwd<128>(f, p->narrow, exec->stream);
  if (e != cudaSuccess)
    return ps__fail(PS_EDEVICE, "attention_fwd: flash-attn: %s", cudaGetErrorString(e));
  ps_att_transpose(exec->stream, (float *)l->ptr[4], lse, 1, s->args.n_heads, s->args.n_tokens);
  if (documents)
    ps_att_plain_fwd(exec->stream, l, documents, exec->n_sms);
  return PS_OK;
}

ps_status backward(const ps_launch *l, const ps_att_shape *s, const plan *p, int32_t *documents,
                   float *lse) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  char *scratch = (char *)exec->scratch;
  ps_flash::Flash_bwd_params f = {};
  describe(&f, l, s, p, documents, lse);
  f.do_ptr = l->ptr[5];
  f.dq_ptr = l->ptr[6];
  f.dk_ptr = scratch + p->dk;
  f.dv_ptr = scratch + p->dv;
  f.do_row_stride = f.dq_row_stride = f.dk_row_stride = f.dv_row_stride = f.q_row_stride;
  f.do_head_stride = f.dq_head_stride = f.dk_head_stride = f.dv_head_stride = f.d;
  f.dsoftmax_sum = scratch + p->sums;
  f.dq_accum_ptr = scratch + p->accum;
  f.deterministic = s->deterministic;
  f.dq_accum_split_stride = s->deterministic ? (int64_t)padded_rows(&s->args, p) * f.h * f.d : 0;
  ps_att_transpose(exec->stream, lse, (const float *)l->ptr[4], 1, s->args.n_tokens,
                   s->args.n_heads);
  cudaError_t e = s->deterministic
                      ? cudaMemsetAsync(f.dq_accum_ptr, 0, p->accum_bytes, exec->stream)
                      : cudaSuccess;
  if (e == cudaSuccess)
    e = f.d == 64 ? ps_flash_bwd<64>(f, p->splits, p->narrow, exec->stream)
                  : ps_flash_bwd<128>(f, p->splits, p->narrow, exec->stream);
  if (e != cudaSuccess)
    return ps__fail(PS_EDEVICE, "attention_bwd: flash-attn: %s", cudaGetErrorString(e));
  ps_att_finish_dkv(exec->stream, (const ps__args_attention *)l->args, documents, f.dk_ptr,
                    f.dv_ptr, s->args.n_heads, (float *)l->ptr[7]);
  if (documents)
    ps_att_plain_bwd(exec->stream, l, documents, exec->n_sms);
  return PS_OK;
}

ps_status launch(const ps_launch *l, const ps_att_shape *s, void *made) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const plan *p = (const plan *)made;
  int32_t *documents = p->max_documents ? (int32_t *)((char *)exec->scratch + p->documents) : NULL;
  float *lse = (float *)((char *)exec->scratch + p->lse);
  if (documents)
    ps_att_find_documents(exec->stream, &s->args, (const int32_t *)l->ptr[2], p->max_documents,
                          true, documents);
  return (s->backward ? backward : forward)(l, s, p, documents, lse);
}

} // namespace

extern const ps_att_provider ps_att_flash = {"flash-attn", refuses, prepare, launch};
