/* matmul.cu - matrix products by cuBLASLt: one descriptor a launch, made on the stack; one
 * algorithm a shape, kept in a table.
 *
 * cuBLASLt is column-major: row-major C[M,N] = op(A) op(B) is its C'[N,M] = op(B)' op(A)', so B
 * comes first and what is stored as op() needs it is "not transposed" there. */
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/cuda_common.cuh"
#include "kernels/cuda/gemm_cache.h"
#include <cublasLt.h>
#include <cstring>

extern "C" void *ps__calloc(size_t n, size_t bytes);
extern "C" void ps__free(void *p);

enum { MAX_SHAPES = 256, MAX_CANDIDATES = 8, TIMED_RUNS = 4, MAX_HELD = 5, LOAD_ROUNDS = 2 };
static const float LOAD_MS = 120, LONG_MS = 0.2f, BURST_SLACK = 1.15f;

/* A shape, with what else an algorithm depends on, and whether the first candidate was asked
 * for. */
typedef struct shape_key {
  ps__gemm_key gemm;
  uint64_t deterministic;
} shape_key;
typedef struct shape_entry {
  shape_key key;
  cublasLtMatmulAlgo_t algo;
  /* was chosen by time, or is to be the first candidate: not just the one that a launch met
   * first */
  bool settled;
} shape_entry;
static_assert(sizeof(cublasLtMatmulAlgo_t) == 8 * PS_GEMM_ALGO_WORDS, "as gemm_cache.h stores it");

struct ps__cuda_blas {
  cublasLtHandle_t lt;
  void *workspace;
  size_t workspace_bytes;
  ps__gemm_cache *cache; /* NULL: none */
  uint32_t n_shapes;
  shape_entry shape[MAX_SHAPES];
};

extern "C" ps_status ps__cuda_blas_create(ps__cuda_blas **out, void *workspace,
                                          size_t workspace_bytes) {
  const ps_status opened = ps__cublaslt_open();
  if (opened != PS_OK)
    return opened;
  ps__cuda_blas *b = (ps__cuda_blas *)ps__calloc(1, sizeof *b);
  if (!b)
    return ps__fail(PS_ENOMEM, "no %zu bytes for the table of matrix shapes", sizeof *b);
  const cublasStatus_t st = cublasLtCreate(&b->lt);
  if (st != CUBLAS_STATUS_SUCCESS) {
    ps__free(b);
    return ps__fail(PS_EDEVICE, "cuBLASLt did not start: %s", cublasLtGetStatusString(st));
  }
  b->workspace = workspace;
  b->workspace_bytes = workspace ? workspace_bytes : 0;
  *out = b;
  return PS_OK;
}

extern "C" void ps__cuda_blas_destroy(ps__cuda_blas *b) {
  if (!b)
    return;
  (void)cublasLtDestroy(b->lt);
  ps__gemm_cache_close(b->cache);
  ps__free(b);
}

extern "C" ps_status ps__cuda_blas_use_cache(ps__cuda_blas *b, const char *folder) {
  cudaDeviceProp gpu;
  int device;
  cudaError_t e = cudaGetDevice(&device);
  if (e == cudaSuccess)
    e = cudaGetDeviceProperties(&gpu, device);
  if (e != cudaSuccess)
    return ps__fail(PS_EDEVICE, "the GPU does not say its name: %s", cudaGetErrorString(e));
  ps__gemm_cache *cache;
  const ps_status st = ps__gemm_cache_open(&cache, folder, gpu.name, cublasLtGetVersion());
  if (st != PS_OK)
    return st;
  ps__gemm_cache_close(b->cache);
  b->cache = cache;
  return PS_OK;
}

extern "C" void ps__cuda_blas_save_cache(ps__cuda_blas *b) {
  if (b->cache)
    ps__gemm_cache_save(b->cache);
}

/* ---- one product as cuBLASLt wants it -------------------------------------------------------- */

typedef struct product {
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t first, second, c; /* op(B)', op(A)', C' */
  const void *a, *b, *addend, *bias;             /* addend: C, the residual, or C unread (beta 0) */
  const void *scale_a, *scale_b;                 /* of FP8 operands, else NULL */
  void *out;
  float alpha, beta;
  shape_key key;
} product;

static cudaDataType_t type_of(uint32_t dt) {
  return dt == PS_F32     ? CUDA_R_32F
         : dt == PS_BF16  ? CUDA_R_16BF
         : dt == PS__E4M3 ? CUDA_R_8F_E4M3
                          : CUDA_R_8F_E5M2;
}
static uint32_t alignment(const void *p) {
  const uintptr_t at = (uintptr_t)p;
  return !at ? 0 : at % 256 == 0 ? 256 : (uint32_t)(at & (~at + 1));
}

/* What cuBLASLt has of gemm. */
static ps_status check_args(const ps__args_gemm *a) {
  if (a->dt_a >= PS_N_DTYPES || a->dt_b != a->dt_a || a->dt_c >= PS_N_DTYPES ||
      (a->dt_a == PS_F32 && a->dt_c != PS_F32))
    return ps__fail(PS_EINVAL,
                    "gemm: dtypes %u x %u -> %u are no product on CUDA: bf16 x bf16 -> bf16 or "
                    "fp32, and fp32 alone, are",
                    a->dt_a, a->dt_b, a->dt_c);
  if (a->accumulate && a->has_residual)
    return ps__fail(
        PS_EINVAL, "gemm: accumulate and a residual at once are not on CUDA: one addend a product");
  if (a->lda < (a->trans_a ? a->m : a->k) || a->ldb < (a->trans_b ? a->k : a->n) || a->ldc < a->n)
    return ps__fail(PS_EINVAL, "gemm: leading dimensions %u, %u, %u are too small for %u x %u x %u",
                    a->lda, a->ldb, a->ldc, a->m, a->n, a->k);
  if (!a->k)
    return ps__fail(PS_EINVAL, "gemm: k is 0");
  return PS_OK;
}

/* What cuBLASLt has of gemm_fp8. */
static ps_status check_args_fp8(const ps__args_gemm_fp8 *a) {
  if (a->m % 16 || a->n % 16 || a->k % 16 || !a->k)
    return ps__fail(PS_EINVAL, "gemm_fp8: %u x %u x %u: on CUDA all three are multiples of 16",
                    a->m, a->n, a->k);
  if (a->has_bias && a->dt_c != PS_BF16)
    return ps__fail(PS_EINVAL, "gemm_fp8: a bias of fp32 is not on CUDA, one of bf16 is");
  return PS_OK;
}

static cublasStatus_t set_desc(product *p, const ps__args_gemm *a) {
  const cublasOperation_t n = CUBLAS_OP_N, t = CUBLAS_OP_T;
  cublasStatus_t st = cublasLtMatmulDescInit(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  auto set = [&](cublasLtMatmulDescAttributes_t what, const void *value, size_t bytes) {
    if (st == CUBLAS_STATUS_SUCCESS)
      st = cublasLtMatmulDescSetAttribute(&p->desc, what, value, bytes);
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, a->trans_b ? &t : &n, sizeof n);
  set(CUBLASLT_MATMUL_DESC_TRANSB, a->trans_a ? &t : &n, sizeof n);
  if (a->has_bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const cudaDataType_t type = type_of(a->dt_c);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias, sizeof p->bias);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type);
  }
  if (p->scale_a) { /* scalars, as the library takes them where no mode is set */
    const int8_t fast = p->key.gemm.fast_accumulation != 0;
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &p->scale_b, sizeof p->scale_b);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &p->scale_a, sizeof p->scale_a);
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
  }
  if (st == CUBLAS_STATUS_SUCCESS)
    st = cublasLtMatrixLayoutInit(&p->first, type_of(a->dt_b), a->trans_b ? a->k : a->n,
                                  a->trans_b ? a->n : a->k, a->ldb);
  if (st == CUBLAS_STATUS_SUCCESS)
    st = cublasLtMatrixLayoutInit(&p->second, type_of(a->dt_a), a->trans_a ? a->m : a->k,
                                  a->trans_a ? a->k : a->m, a->lda);
  if (st == CUBLAS_STATUS_SUCCESS)
    st = cublasLtMatrixLayoutInit(&p->c, type_of(a->dt_c), a->n, a->m, a->ldc);
  return st;
}

/* What an algorithm depends on: the fields, not the padding, and not alpha. */
static ps__args_gemm clean(const ps__args_gemm *a) {
  ps__args_gemm c;
  memset(&c, 0, sizeof c);
  c.m = a->m, c.n = a->n, c.k = a->k, c.lda = a->lda, c.ldb = a->ldb, c.ldc = a->ldc;
  c.trans_a = a->trans_a != 0, c.trans_b = a->trans_b != 0, c.accumulate = a->accumulate != 0;
  c.has_bias = a->has_bias != 0, c.has_residual = a->has_residual != 0;
  c.dt_a = a->dt_a, c.dt_b = a->dt_b, c.dt_c = a->dt_c;
  return c;
}

/* What a launch multiplies. */
typedef struct operands {
  const void *a, *scale_a, *b, *scale_b; /* scales: NULL but for FP8 */
  void *c;
  const void *bias, *residual; /* NULL: none */
} operands;

/* @args were checked. */
static ps_status make_product(product *p, const ps__cuda_exec *exec, const ps__args_gemm *args,
                              const operands *o, float alpha, bool fast) {
  memset(p, 0, sizeof *p);
  p->a = o->a, p->b = o->b, p->out = o->c;
  p->scale_a = o->scale_a, p->scale_b = o->scale_b;
  p->bias = o->bias;
  p->addend = o->residual ? o->residual : o->c;
  p->alpha = alpha;
  p->beta = args->accumulate || o->residual ? 1.0f : 0.0f;
  p->key.gemm.args = clean(args);
  p->key.gemm.fast_accumulation = fast;
  p->key.gemm.workspace_bytes = exec->blas->workspace_bytes;
  p->key.deterministic = exec->deterministic;
  const void *operand[5] = {o->a, o->b, o->c, o->bias, o->residual};
  for (int i = 0; i < 5; i++)
    p->key.gemm.align[i] = alignment(operand[i]);
  const cublasStatus_t e = set_desc(p, &p->key.gemm.args);
  return e == CUBLAS_STATUS_SUCCESS
             ? PS_OK
             : ps__fail(PS_EDEVICE, "%s: cuBLASLt refused the description: %s",
                        o->scale_a ? "gemm_fp8" : "gemm", cublasLtGetStatusString(e));
}

static cublasStatus_t run(const ps__cuda_exec *exec, product *p, const cublasLtMatmulAlgo_t *algo) {
  return cublasLtMatmul(exec->blas->lt, &p->desc, &p->alpha, p->b, &p->first, p->a, &p->second,
                        &p->beta, p->addend, &p->c, p->out, &p->c, algo, exec->blas->workspace,
                        exec->blas->workspace_bytes, exec->stream);
}

/* ---- algorithms ------------------------------------------------------------------------------ */

/* cuBLASLt's candidates, best guess first. Sums over split K only in fp32 in the workspace: in
 * place their order is not fixed, and in the output's type each part would be rounded to bf16. */
static ps_status candidates(const ps__cuda_exec *exec, product *p, int wanted,
                            cublasLtMatmulHeuristicResult_t *found, int *n_found) {
  cublasLtMatmulPreferenceOpaque_t pref;
  cublasStatus_t st = cublasLtMatmulPreferenceInit(&pref);
  auto set = [&](cublasLtMatmulPreferenceAttributes_t what, const void *value, size_t bytes) {
    if (st == CUBLAS_STATUS_SUCCESS)
      st = cublasLtMatmulPreferenceSetAttribute(&pref, what, value, bytes);
  };
  const uint64_t workspace = exec->blas->workspace_bytes;
  const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
                 *align = p->key.gemm.align;
  const uint32_t align_c = align[4] && align[4] < align[2] ? align[4] : align[2];
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align[1], sizeof *align);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align[0], sizeof *align);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align_c, sizeof *align);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align[2], sizeof *align);
  *n_found = 0;
  if (st == CUBLAS_STATUS_SUCCESS)
    st = cublasLtMatmulAlgoGetHeuristic(exec->blas->lt, &p->desc, &p->first, &p->second, &p->c,
                                        &p->c, &pref, wanted, found, n_found);
  if (st == CUBLAS_STATUS_SUCCESS && *n_found > 0)
    return PS_OK;
  const ps__args_gemm *a = &p->key.gemm.args;
  return ps__fail(PS_EDEVICE,
                  "gemm: cuBLASLt has no algorithm for %u x %u x %u (dtypes %u -> %u, %zu bytes of "
                  "workspace): %s",
                  a->m, a->n, a->k, a->dt_a, a->dt_c, exec->blas->workspace_bytes,
                  cublasLtGetStatusString(st));
}

static shape_entry *find(ps__cuda_blas *b, const shape_key *key) {
  for (uint32_t i = 0; i < b->n_shapes; i++)
    if (memcmp(&b->shape[i].key, key, sizeof *key) == 0)
      return &b->shape[i];
  return NULL;
}
static void keep(ps__cuda_blas *b, const shape_key *key, const cublasLtMatmulAlgo_t *algo,
                 bool settled) {
  shape_entry *e = find(b, key);
  if (!e && b->n_shapes < MAX_SHAPES)
    e = &b->shape[b->n_shapes++];
  if (!e)
    return; /* a shape past the table asks for its candidates at every launch */
  e->key = *key;
  e->algo = *algo;
  e->settled = settled;
}

/* Is the shape settled, in the table or by what the cache has for it? cuBLASLt says whether it
 * takes what was stored. */
static bool settled(const ps__cuda_exec *exec, product *p) {
  ps__cuda_blas *b = exec->blas;
  const shape_entry *e = find(b, &p->key);
  if (e && e->settled)
    return true;
  const ps__gemm_choice *c =
      b->cache && !exec->deterministic ? ps__gemm_cache_find(b->cache, &p->key.gemm) : NULL;
  cublasLtMatmulHeuristicResult_t result;
  cublasLtMatmulAlgo_t algo;
  if (!c)
    return false;
  memcpy(&algo, c->algo, sizeof algo);
  if (cublasLtMatmulAlgoCheck(b->lt, &p->desc, &p->first, &p->second, &p->c, &p->c, &algo,
                              &result) != CUBLAS_STATUS_SUCCESS ||
      result.workspaceSize > b->workspace_bytes)
    return false;
  keep(b, &p->key, &algo, true);
  return true;
}

/* Milliseconds a run, of @n; negative when it does not run. */
static float time_runs(const ps__cuda_exec *exec, product *p, const cublasLtMatmulAlgo_t *algo,
                       cudaEvent_t from, cudaEvent_t to, int n) {
  float ms = -1.0f;
  if (cudaEventRecord(from, exec->stream) != cudaSuccess)
    return -1.0f;
  for (int i = 0; i < n; i++)
    if (run(exec, p, algo) != CUBLAS_STATUS_SUCCESS)
      return -1.0f;
  if (cudaEventRecord(to, exec->stream) != cudaSuccess || cudaEventSynchronize(to) != cudaSuccess)
    return -1.0f;
  return cudaEventElapsedTime(&ms, from, to) == cudaSuccess ? ms / (float)n : -1.0f;
}

/* The same of TIMED_RUNS runs after a first one that loads the kernel. One run more is enough where
 * it takes twice as long as @best (negative: none yet). */
static float time_of(const ps__cuda_exec *exec, product *p, const cublasLtMatmulAlgo_t *algo,
                     cudaEvent_t from, cudaEvent_t to, float best) {
  if (run(exec, p, algo) != CUBLAS_STATUS_SUCCESS)
    return -1.0f;
  const float once = time_runs(exec, p, algo, from, to, 1);
  return once < 0.0f || (best >= 0.0f && once > 2.0f * best)
             ? once
             : time_runs(exec, p, algo, from, to, TIMED_RUNS);
}

/* Milliseconds a run of each of @n candidates under load; negative when one does not run. A large
 * GPU is bound by its power. A burst does not show the fastest candidate: a tenth of a second later
 * the clock falls to what the candidate's own power allows. Each candidate runs for LOAD_MS, of
 * which the second half counts, immediately after the one before, and all candidates take several
 * turns. */
static cudaError_t time_under_load(const ps__cuda_exec *exec, product *p,
                                   const cublasLtMatmulHeuristicResult_t *found, const int *which,
                                   int n, float burst_ms, cudaEvent_t from, cudaEvent_t to,
                                   float *ms) {
  const int half = (int)(LOAD_MS / burst_ms / 2) + 1;
  for (int i = 0; i < n; i++)
    ms[i] = 0.0f;
  for (int round = 0; round < LOAD_ROUNDS; round++)
    for (int i = 0; i < n; i++) {
      const cublasLtMatmulAlgo_t *algo = &found[which[i]].algo;
      for (int k = 0; k < half; k++)
        if (run(exec, p, algo) != CUBLAS_STATUS_SUCCESS)
          return cudaErrorUnknown;
      const float a_run = time_runs(exec, p, algo, from, to, half);
      if (a_run < 0.0f)
        return cudaErrorUnknown;
      ms[i] += a_run / LOAD_ROUNDS;
    }
  return cudaSuccess;
}

/* The fastest of @n candidates in a burst, @ms each. Where the product is long enough to matter:
 * the fastest under load among those within BURST_SLACK of the burst's fastest. */
static cudaError_t fastest(const ps__cuda_exec *exec, product *p,
                           const cublasLtMatmulHeuristicResult_t *found, const float *ms, int n,
                           cudaEvent_t from, cudaEvent_t to, int *out) {
  int best = -1, held[MAX_HELD], n_held = 0;
  float loaded[MAX_HELD];
  /* a later candidate must be 3% faster: clocks move by that much between two timings, and the
   * order is cuBLASLt's own guess */
  for (int i = 0; i < n; i++)
    if (ms[i] >= 0.0f && (best < 0 || ms[i] < 0.97f * ms[best]))
      best = i;
  *out = best < 0 ? 0 : best;
  if (best < 0 || ms[best] < LONG_MS)
    return cudaSuccess;
  for (int i = 0; i < n && n_held < MAX_HELD; i++)
    if (ms[i] >= 0.0f && ms[i] < BURST_SLACK * ms[best])
      held[n_held++] = i;
  if (n_held < 2)
    return cudaSuccess;
  const cudaError_t e = time_under_load(exec, p, found, held, n_held, ms[best], from, to, loaded);
  if (e != cudaSuccess)
    return e;
  int first = 0;
  for (int i = 1; i < n_held; i++)
    if (loaded[i] < loaded[first])
      first = i;
  *out = held[first];
  return cudaSuccess;
}

typedef ps_status (*product_fn)(product *p, const ps_launch *l);

static ps_status check_launch(const ps_launch *l, const char *op, uint32_t n_ptr) {
  if (!((const ps__cuda_exec *)l->exec)->blas)
    return ps__fail(PS_EINVAL, "%s: no cuBLASLt handle given", op);
  if (l->n_ptr < n_ptr)
    return ps__fail(PS_EINVAL, "%s: %u addresses given, %u needed", op, l->n_ptr, n_ptr);
  return PS_OK;
}

static ps_status product_of(product *p, const ps_launch *l) {
  const ps__args_gemm *a = (const ps__args_gemm *)l->args;
  const uint32_t more = 3u + (a->has_bias != 0);
  ps_status st = check_launch(l, "gemm", more + (a->has_residual != 0));
  if (st == PS_OK)
    st = check_args(a);
  if (st != PS_OK)
    return st;
  const operands o = {l->ptr[0],
                      NULL,
                      l->ptr[1],
                      NULL,
                      l->ptr[2],
                      a->has_bias ? l->ptr[3] : NULL,
                      a->has_residual ? l->ptr[more] : NULL};
  return make_product(p, (const ps__cuda_exec *)l->exec, a, &o, ps__gemm_alpha(a), false);
}

static ps_status product_of_fp8(product *p, const ps_launch *l) {
  const ps__args_gemm_fp8 *a = (const ps__args_gemm_fp8 *)l->args;
  const uint32_t more = 5u + (a->has_bias != 0);
  ps_status st = check_launch(l, "gemm_fp8", more + (a->has_residual != 0));
  if (st == PS_OK)
    st = check_args_fp8(a);
  if (st != PS_OK)
    return st;
  const ps__args_gemm g = ps__gemm_of_fp8(a);
  const operands o = {l->ptr[0],
                      l->ptr[1],
                      l->ptr[2],
                      l->ptr[3],
                      l->ptr[4],
                      a->has_bias ? l->ptr[5] : NULL,
                      a->has_residual ? l->ptr[more] : NULL};
  return make_product(p, (const ps__cuda_exec *)l->exec, &g, &o, a->alpha == 0.0f ? 1.0f : a->alpha,
                      a->role == PS_GEMM_FORWARD && a->fast);
}

/* Times the candidates for @p, whose shape is not settled, and keeps the fastest. */
static ps_status tune(const ps__cuda_exec *exec, product *p) {
  cublasLtMatmulHeuristicResult_t found[MAX_CANDIDATES];
  int n = 0, best = 0;
  float ms[MAX_CANDIDATES], least = -1.0f;
  cudaEvent_t from = NULL, to = NULL;
  ps_status st = candidates(exec, p, exec->deterministic ? 1 : MAX_CANDIDATES, found, &n);
  if (st != PS_OK)
    return st;
  cudaError_t e = n > 1 ? cudaEventCreate(&from) : cudaSuccess;
  if (n > 1 && e == cudaSuccess)
    e = cudaEventCreate(&to);
  for (int i = 0; i < n && n > 1 && e == cudaSuccess; i++) {
    ms[i] = time_of(exec, p, &found[i].algo, from, to, least);
    if (ms[i] >= 0.0f && (least < 0.0f || ms[i] < least))
      least = ms[i];
  }
  if (n > 1 && e == cudaSuccess)
    e = fastest(exec, p, found, ms, n, from, to, &best);
  if (from)
    (void)cudaEventDestroy(from);
  if (to)
    (void)cudaEventDestroy(to);
  st = ps_launched("gemm tuning", e);
  if (st != PS_OK)
    return st;
  keep(exec->blas, &p->key, &found[best].algo, true);
  if (exec->deterministic || !exec->blas->cache)
    return PS_OK;
  ps__gemm_choice choice = {};
  choice.key = p->key.gemm;
  memcpy(choice.algo, &found[best].algo, sizeof choice.algo);
  return ps__gemm_cache_add(exec->blas->cache, &choice);
}

extern "C" ps_status ps__cuda_tune_gemm(const ps_launch *l) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  product p;
  const ps_status st = product_of(&p, l);
  return st != PS_OK || !p.key.gemm.args.m || !p.key.gemm.args.n || settled(exec, &p)
             ? st
             : tune(exec, &p);
}

extern "C" ps_status ps__cuda_tune_gemm_fp8(const ps_launch *l) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const ps__args_gemm_fp8 *a = (const ps__args_gemm_fp8 *)l->args;
  static const float scale[2] = {1.0f / 64, 448.0f / 64};
  product p;
  ps_status st = product_of_fp8(&p, l);
  if (st != PS_OK || !a->m || !a->n || settled(exec, &p))
    return st;
  st = ps__cuda_draw_fp8(exec, l->ptr[0], (uint64_t)a->m * a->k, a->dt_a);
  if (st == PS_OK)
    st = ps__cuda_draw_fp8(exec, l->ptr[2], (uint64_t)a->n * a->k, a->dt_b);
  cudaError_t e = cudaSuccess;
  for (int i = 1; st == PS_OK && e == cudaSuccess && i < 4; i += 2)
    e = cudaMemcpyAsync(l->ptr[i], scale, sizeof scale, cudaMemcpyHostToDevice, exec->stream);
  if (st == PS_OK)
    st = ps_launched("gemm_fp8 tuning", e);
  return st == PS_OK ? tune(exec, &p) : st;
}

static bool tuned(product_fn of, const ps_launch *l) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  product p;
  return of(&p, l) == PS_OK && (exec->deterministic || settled(exec, &p));
}
extern "C" bool ps__cuda_gemm_tuned(const ps_launch *l) { return tuned(product_of, l); }
extern "C" bool ps__cuda_gemm_fp8_tuned(const ps_launch *l) { return tuned(product_of_fp8, l); }

/* Queues the product with its shape's algorithm. */
static ps_status multiply(product_fn of, const ps_launch *l, const char *op) {
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  product p;
  ps_status st = of(&p, l);
  const ps__args_gemm *a = &p.key.gemm.args;
  if (st != PS_OK || !a->m || !a->n)
    return st;
  const shape_entry *known = find(exec->blas, &p.key);
  cublasLtMatmulHeuristicResult_t first;
  if (!known) {
    int n = 0;
    st = candidates(exec, &p, 1, &first, &n);
    if (st != PS_OK)
      return st;
    keep(exec->blas, &p.key, &first.algo, false);
  }
  const cublasStatus_t e = run(exec, &p, known ? &known->algo : &first.algo);
  return e == CUBLAS_STATUS_SUCCESS ? PS_OK
                                    : ps__fail(PS_EDEVICE, "%s: %u x %u x %u failed: %s", op, a->m,
                                               a->n, a->k, cublasLtGetStatusString(e));
}

/* gemm
 * math    C = round(alpha op(A) op(B) + addend + bias): fp32 products and sums; addend: C when
 *         accumulate, or the residual. One rounding for fp32 and for products alone; with an addend
 *         some of cuBLASLt's bf16 kernels round the product to bf16 before they add (seen on an
 *         H200 with cuBLASLt 13.0, as PyTorch does when it accumulates a bf16 gradient): tests/cuda
 *         allows for that half ulp
 * shapes  A [M,K] or [K,M] when trans_a, B [K,N] or [N,K] when trans_b, C and residual [M,N]; bias
 *         [N]; bf16 x bf16 -> bf16 or fp32, fp32 x fp32 -> fp32 (fp32 arithmetic, not TF32)
 * flops   2*M*N*K; bf16 at 8B shapes 690-800 TFLOP/s in a burst on an H200, 667 sustained (power)
 * bytes   the operands once at least; scratch: the workspace given to ps__cuda_blas_create
 * determinism  the same algorithm gives the same bits; which one is timed once a shape, under load
 *              where it is long (ps__cuda_tune_gemm), or the first candidate where
 *              exec->deterministic is set.
 * reference    fp64 on the host: K * 2^-24 * sum |a*b| and half an ulp of bf16 */
extern "C" ps_status ps__cuda_gemm(const ps_launch *l) { return multiply(product_of, l, "gemm"); }
extern "C" ps_status ps__cuda_gemm_rows(const ps_launch *l) {
  return multiply(product_of, l, "gemm_rows");
}

/* gemm_fp8
 * math    C = round(alpha sA sB A B^T + addend + bias): products of FP8 numbers, which are exact in
 *         fp32; addend and roundings as gemm's. FORWARD sums with fast accumulation if fast is
 *         set, and the others never do: on compute capability 9.0 the tensor cores keep 14 bits of
 *         a sum; without fast accumulation those of 128 products, which are added in fp32
 * shapes  A [M,K] e4m3 or e5m2, B [N,K] e4m3, C and residual [M,N] bf16 or fp32, bias [N] bf16; M,
 *         N and K multiples of 16, addresses too
 * flops   2*M*N*K; one scale a tensor, 16384 rows of 8B shapes on an H200 under load: 1,256-1,283
 *         TFLOP/s with fast accumulation, 1,183-1,220 without (measured by cuBLASLt alone; this
 *         function was not)
 * bytes   the operands once at least; scratch: as gemm's
 * determinism  as gemm's.   reference  the cpu backend's: K * 2^-24 * sum |a*b|, with fast
 *              accumulation 2^-13 of the largest, and half an ulp of bf16 */
extern "C" ps_status ps__cuda_gemm_fp8(const ps_launch *l) {
  return multiply(product_of_fp8, l, "gemm_fp8");
}
