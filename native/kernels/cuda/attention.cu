/* attention.cu - attention on CUDA: choosing a provider for each shape, and asking it. */
#include "kernels/cuda/attention_cuda.h"
#include "kernels/cuda/cuda_common.cuh"
#include <atomic>
#include <math.h>
#include <mutex>
#include <stdio.h>
#include <string.h>

#ifdef PS_CUDNN
static const ps_att_provider *const cudnn = &ps_att_cudnn;
#else
static const ps_att_provider *const cudnn = NULL;
#endif
#ifdef PS_FLASH_ATTN
static const ps_att_provider *const flash = &ps_att_flash;
#else
static const ps_att_provider *const flash = NULL;
#endif
#ifdef PS_FLASH4
static const ps_att_provider *const flash4 = &ps_att_flash4;
#else
static const ps_att_provider *const flash4 = NULL;
#endif
enum { N_PROVIDERS = 4 };
typedef const ps_att_provider *const order[N_PROVIDERS];
/* In the order of asking. On 9.0 flash-attn-4 is the fastest, except where cudnn_is_faster(). From
 * 9.0 on cuDNN is faster than flash-attn; before 9.0 cuDNN has no packed documents. */
static order newer = {flash4, cudnn, flash, &ps_att_plain},
             wide = {cudnn, flash4, flash, &ps_att_plain},
             ampere = {flash, cudnn, &ps_att_plain, NULL};
static const ps_att_provider *only; /* ps__cuda_attention_only() */

/* Plans, one for each shape; only ever appended to, so launches read without a lock. */
struct entry {
  ps_att_shape shape;
  const ps_att_provider *provider;
  void *plan;
  size_t scratch_bytes;
};
enum { MAX_PLANS = 1024 };
static entry plans[MAX_PLANS];
static std::atomic<int> n_plans;
static std::mutex plans_lock;

static bool same_shape(const ps__args_attention *a, const ps__args_attention *b) {
  return a->n_tokens == b->n_tokens && a->row0 == b->row0 && a->n_heads == b->n_heads &&
         a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim &&
         ps__attention_documents(a) == ps__attention_documents(b) &&
         ps_att_window(a) == ps_att_window(b) && a->softcap == b->softcap &&
         ps__attention_scale(a) == ps__attention_scale(b);
}

static const entry *find(const ps__args_attention *a, bool backward, bool deterministic,
                         int device) {
  const int n = n_plans.load(std::memory_order_acquire);
  for (int i = 0; i < n; i++) {
    const ps_att_shape *s = &plans[i].shape;
    if (s->backward == backward && s->deterministic == deterministic && s->device == device &&
        same_shape(&s->args, a))
      return &plans[i];
  }
  return NULL;
}

/* What no provider has. */
static ps_status check_shape(const ps__args_attention *a, const char *op) {
  if (a->head_dim % 8)
    return ps__fail(PS_EINVAL, "%s: head_dim is %u: a multiple of 8 on CUDA", op, a->head_dim);
  if (a->dt != PS_BF16)
    return ps__fail(PS_EINVAL, "%s: attention on CUDA needs bf16 storage: choose a bf16 recipe",
                    op);
  return PS_OK;
}

/* Backward, heads of 256, 8,192 rows: cuDNN reaches 418 TFLOP/s, flash-attn-4 361. After a prefix
 * of 8,192 rows they reach 258 and 380. When deterministic, cuDNN takes six times the scratch
 * (bench/log/2026-11-21-attention-cuda.md). */
static bool cudnn_is_faster(const ps_att_shape *s) {
  return s->backward && s->args.head_dim > 128 && !s->args.row0 && !s->deterministic;
}

/* The first provider that takes the shape; otherwise says why each did not, and what to do. */
static ps_status choose(const ps_att_shape *s, const char *op, const ps_att_provider **out) {
  char reasons[400] = "";
  order *const asked = s->sm < 90 ? &ampere : cudnn_is_faster(s) ? &wide : &newer;
  for (int i = 0; i < N_PROVIDERS; i++) {
    const ps_att_provider *p = (*asked)[i];
    if (!p || (only && p != only && p != &ps_att_plain))
      continue;
    const char *why = p->refuses(s);
    if (!why) {
      *out = p;
      return PS_OK;
    }
    const size_t n = strlen(reasons);
    snprintf(reasons + n, sizeof reasons - n, "%s%s: %s", n ? "; " : "", p->name, why);
  }
  return ps__fail(PS_EDEVICE,
                  "%s: nothing here computes attention for %u rows at %u, head_dim %u, window %u, "
                  "soft cap %g (%s): "
                  "install or update cuDNN 9 (pip install -U nvidia-cudnn-cu%d, or "
                  "name libcudnn.so.9 in PENSTOCK_CUDNN), or build with FLASH_ATTN=1",
                  op, s->args.n_tokens, s->args.row0, s->args.head_dim, s->args.window,
                  (double)s->args.softcap, reasons, CUDART_VERSION / 1000);
}

static ps_status prepare(const ps__args_attention *args, bool backward, bool deterministic,
                         size_t *scratch_bytes) {
  ps_att_shape s = {*args, backward, deterministic, 0, 0};
  const char *op = s.backward ? "attention_bwd" : "attention_fwd";
  const ps_status valid = check_shape(args, op);
  if (valid != PS_OK)
    return valid;
  int major = 0, minor = 0;
  cudaError_t e = cudaGetDevice(&s.device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, s.device);
  if (e == cudaSuccess)
    e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, s.device);
  if (e != cudaSuccess)
    return ps__fail(PS_EDEVICE, "%s: no CUDA device: %s", op, cudaGetErrorString(e));
  s.sm = 10 * major + minor;
  const std::lock_guard<std::mutex> hold(plans_lock);
  const entry *known = find(args, s.backward, deterministic, s.device);
  if (!known) {
    const int n = n_plans.load(std::memory_order_relaxed);
    if (n == MAX_PLANS)
      return ps__fail(PS_ENOMEM, "%s: more than %d shapes of attention in one process", op,
                      MAX_PLANS);
    entry *made = &plans[n];
    ps_status st = choose(&s, op, &made->provider);
    if (st == PS_OK)
      st = made->provider->prepare(&s, &made->plan, &made->scratch_bytes);
    if (st != PS_OK)
      return st;
    made->shape = s;
    n_plans.store(n + 1, std::memory_order_release);
    known = made;
  }
  *scratch_bytes = known->scratch_bytes;
  return PS_OK;
}

extern "C" ps_status ps__cuda_prepare_attention_fwd(const void *args, void *exec,
                                                    size_t *scratch_bytes) {
  return prepare((const ps__args_attention *)args, false, ((ps__cuda_exec *)exec)->deterministic,
                 scratch_bytes);
}
extern "C" ps_status ps__cuda_prepare_attention_bwd(const void *args, void *exec,
                                                    size_t *scratch_bytes) {
  return prepare((const ps__args_attention *)args, true, ((ps__cuda_exec *)exec)->deterministic,
                 scratch_bytes);
}

extern "C" bool ps__cuda_attention_only(const char *provider) {
  const std::lock_guard<std::mutex> hold(plans_lock);
  const ps_att_provider *found = NULL;
  for (const ps_att_provider *p : newer)
    if (provider && p && !strcmp(p->name, provider))
      found = p;
  if (provider && !found)
    return false;
  only = found;
  n_plans.store(0, std::memory_order_release);
  return true;
}

extern "C" uint32_t ps__cuda_cudnn_version(void) {
#ifdef PS_CUDNN
  return ps_att_cudnn_version();
#else
  return 0;
#endif
}

extern "C" uint32_t ps__cuda_flash4_version(void) {
#ifdef PS_FLASH4
  return ps_att_flash4_version();
#else
  return 0;
#endif
}

static ps_status launch(const ps_launch *l, bool backward) {
  const char *op = backward ? "attention_bwd" : "attention_fwd";
  const ps__args_attention *a = (const ps__args_attention *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  ps_status st = check_shape(a, op);
  if (st != PS_OK)
    return st;
  const entry *e = find(a, backward, exec->deterministic, exec->device);
  if (!e)
    return ps__fail(PS_EINVAL,
                    "%s: %u rows at %u, %u/%u heads of %u were not prepared before the first step",
                    op, a->n_tokens, a->row0, a->n_heads, a->n_kv_heads, a->head_dim);
  const uint32_t n_ptr = backward ? 8 : 5;
  st = ps_check(l, op, n_ptr, a->dt, e->scratch_bytes);
  if (st != PS_OK)
    return st;
  for (uint32_t i = 0; i < n_ptr; i++)
    if (!ps_aligned(l->ptr[i]) && i != 2 && i != 4)
      return ps__fail(PS_EINVAL, "%s: address %u is %p: not aligned to 16 bytes", op, i, l->ptr[i]);
  st = e->provider->launch(l, &e->shape, e->plan);
  return st == PS_OK ? ps_launched(op, cudaSuccess) : st;
}

/* attention_fwd, attention_bwd
 * math    ops.h; the providers' comments say how.   flops  4*head_dim for each visible pair and
 *         head forward, 10*head_dim backward
 * determinism  forward bitwise; backward with exec->deterministic.   reference  the cpu
 *              backend's, tests/native/test_cuda_attention.c */
extern "C" ps_status ps__cuda_attention_fwd(const ps_launch *l) { return launch(l, false); }
extern "C" ps_status ps__cuda_attention_bwd(const ps_launch *l) { return launch(l, true); }
