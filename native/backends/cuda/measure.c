/* measure.c - a GPU's rates by running the kernels on realistic values, in the shapes of an 8B
 * model's chunks. */
#include "backends/cuda/driver.h"
#include "backends/cuda/probe.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/scratch.h"
#include <string.h>
#include <time.h>

enum { TOKENS = 8192, DIM = 4096, HEADS = 32, KV_HEADS = 8, HEAD_DIM = 128 };

/* Products of a block as [out, in] weights: q with k and v, attention's output, gate (up is
 * alike), down. */
static const struct {
  uint32_t out, in;
} products[] = {{6144, DIM}, {DIM, DIM}, {14336, DIM}, {DIM, 14336}};
static const uint32_t gemm_rows[] = {256, 1024, 4096, 16384};
static const ps_attention_rate attention_shapes[] = {
    {2048, 2048, 1, 0, 0, 0},   {8192, 8192, 1, 0, 0, 0}, {32768, 32768, 1, 0, 0, 0},
    {16384, 16384, 2, 0, 0, 0}, {8192, 8192, 8, 0, 0, 0}, {8192, 8192, 16, 0, 0, 0},
    {16384, 16384, 2, 1, 0, 0}, {8192, 8192, 8, 1, 0, 0}, {8192, 16384, 1, 0, 0, 0},
    {8192, 32768, 1, 0, 0, 0},  {8192, 65536, 1, 0, 0, 0}};
enum {
  N_PRODUCTS = sizeof products / sizeof *products,
  N_GEMM = sizeof gemm_rows / sizeof *gemm_rows,
  N_ATTENTION = sizeof attention_shapes / sizeof *attention_shapes,
  ATTENTION_USUAL = 1,
  GEMM_USUAL = 2
};
enum { FORWARD, DGRAD, WGRAD, MAX_PARTS };
/* Of the other's time: about a block's at a sequence of 8192. */
static const double PRODUCTS_SHARE = 1.5, FP8_PRODUCTS_SHARE = 0.8, ATTENTION_SHARE = 0.6;
/* of the time: about a streamed step's */
static const double COPIES_SHARE = 0.5;

/* Device memory: VALUES of bf16, of which what lies before OUT is only read; SUMS of fp32
 * results and ids. Places in MiB. */
static const uint64_t MIB = 1u << 20, VALUES = 1664ull << 20, SUMS = 544ull << 20,
                      COPY = PS__COPY_BYTES, MARGIN = 64ull << 20;
/* operands before OUT, of up to 16384 rows; results; what copies bring */
enum { X = 0, W = 448, Y = 560, OUT = 1008, COPIED = 1536 };
/* FP8 operands meanwhile, of the places that attention of the usual shape does not read: e5m2 up to
 * E5M2_END, of which dW of 16384 rows takes most, and e4m3 up to OUT */
enum { E5M2 = 288, E5M2_END = 560, E4M3 = 624 };
/* of up to 32768 rows and 65536 keys */
enum { Q = 0, KV = 256, D_O = 560, O = 1008, DQ = 1264 };
enum { DKV = 0, LSE = 512, DOC_START = 528, SCALE = 536 }; /* in SUMS */

typedef struct bench {
  const ps__cuda_driver *cu;
  ps_hardware *hw;
  CUstream in, out; /* of copies; exec.stream computes */
  CUevent event[2][MAX_PARTS + 1];
  CUdeviceptr memory; /* values, sums, scratch, workspace */
  char *values, *sums;
  const ps__host_work *host;
  uint32_t n_pinned;    /* of its places */
  uint32_t n_copied[2]; /* to the device, to the host */
  uint32_t n_products;  /* that ran */
  ps__cuda_exec exec;
} bench;

static void *value(const bench *b, int at_mib) { return b->values + (uint64_t)at_mib * MIB; }
static void *sum(const bench *b, int at_mib) { return b->sums + (uint64_t)at_mib * MIB; }
static char *place(const bench *b, uint32_t i) {
  return b->host->places.first + i % b->host->places.n * b->host->places.stride;
}

static ps_status launch(bench *b, const ps_kernel *k, const void *args, void *const *ptr,
                        uint32_t n) {
  const ps_launch l = {.args = args, .ptr = ptr, .n_ptr = n, .exec = &b->exec};
  return k->fn[PS_BACKEND_CUDA](&l);
}

static ps_status settle(bench *b) {
  CUresult r = b->cu->StreamSynchronize(b->exec.stream);
  if (r == CUDA_SUCCESS)
    r = b->cu->StreamSynchronize(b->in);
  if (r == CUDA_SUCCESS)
    r = b->cu->StreamSynchronize(b->out);
  return r == CUDA_SUCCESS ? PS_OK : ps__cuda_fail(b->cu, r, "cuStreamSynchronize");
}

static double seconds_since(uint64_t t) { return (double)(ps__now_ns() - t) * 1e-9; }

/* ---- timing ---------------------------------------------------------------------------------- */

typedef ps_status (*case_fn)(bench *b);

/* Seconds of a call by the host's clock, over the second half of the time: a few calls in
 * flight, so that the GPU never waits for the host. */
static ps_status time_case(bench *b, case_fn fn, double seconds, double *out) {
  uint64_t n = 0, half = 0;
  PS_TRY(fn(b));
  PS_TRY(settle(b));
  const uint64_t begin = ps__now_ns();
  uint64_t at_half = begin;
  while (n - half < 4 || seconds_since(begin) < seconds) {
    for (int i = 0; i < 4; i++, n++)
      PS_TRY(fn(b));
    PS_TRY(settle(b));
    if (!half && seconds_since(begin) >= seconds / 2) {
      half = n;
      at_half = ps__now_ns();
    }
  }
  *out = seconds_since(at_half) / (double)(n - half);
  return PS_OK;
}

static ps_status case_both(bench *b);

/* A case of one or several parts, timed by events on exec.stream. Each turn of the parts is
 * followed by @between, untimed, for about @share of the turn's time. The reason: a GPU that is
 * bound by its power sets its clock by the last tenths of a second, and in a step products and
 * attention alternate. With a @between, copies run both ways meanwhile, for COPIES_SHARE of the
 * time. */
typedef struct timed {
  ps_status (*part)(bench *b, const void *arg, uint32_t part);
  const void *arg;
  uint32_t n_parts;
  case_fn between; /* NULL: nothing */
  double share;
} timed;

typedef struct counts {
  uint32_t part[MAX_PARTS], between, copies;
} counts;

static ps_status submit_turn(bench *b, const timed *t, const counts *n, const CUevent *event) {
  for (uint32_t i = 0; i < n->copies; i++)
    PS_TRY(case_both(b));
  PS__CUDA_TRY(b->cu, EventRecord(event[0], b->exec.stream));
  for (uint32_t p = 0; p < t->n_parts; p++) {
    for (uint32_t i = 0; i < n->part[p]; i++)
      PS_TRY(t->part(b, t->arg, p));
    PS__CUDA_TRY(b->cu, EventRecord(event[p + 1], b->exec.stream));
  }
  for (uint32_t i = 0; i < n->between; i++)
    PS_TRY(t->between(b));
  return PS_OK;
}

static ps_status add_elapsed(const bench *b, CUevent from, CUevent to, double *seconds) {
  float ms = 0;
  PS__CUDA_TRY(b->cu, EventElapsedTime(&ms, from, to));
  *seconds += ms * 1e-3;
  return PS_OK;
}

/* How often a turn repeats each part, so that a part is long beside an event, and what runs between
 * turns. The first call of each kernel loads what the kernel needs. */
static ps_status choose_counts(bench *b, const timed *t, counts *n) {
  static const double least = 5e-3, shortest = 1e-5;
  double turn = 0, s = 0;
  *n = (counts){0};
  for (uint32_t p = 0; p < t->n_parts + 2u * (t->between != NULL); p++) {
    for (int i = 0; i < 2; i++) {
      const uint64_t t0 = ps__now_ns();
      PS_TRY(p < t->n_parts    ? t->part(b, t->arg, p)
             : p == t->n_parts ? t->between(b)
                               : case_both(b));
      PS_TRY(settle(b));
      s = seconds_since(t0) > shortest ? seconds_since(t0) : shortest;
    }
    if (p < t->n_parts) {
      n->part[p] = s < least ? (uint32_t)(least / s) + 1 : 1;
      turn += n->part[p] * s;
    } else if (p == t->n_parts) {
      n->between = (uint32_t)(t->share * turn / s + 0.5) + (t->share * turn < s / 2);
      turn += n->between * s;
    } else {
      n->copies = (uint32_t)(COPIES_SHARE * turn / s + 0.5);
    }
  }
  return PS_OK;
}

/* Seconds of each part, over the second half of the time. While a turn runs the next is queued:
 * the GPU never rests. */
static ps_status time_parts(bench *b, const timed *t, double seconds, double out[MAX_PARTS]) {
  double total[MAX_PARTS] = {0};
  uint32_t counted = 0;
  counts c;
  PS_TRY(choose_counts(b, t, &c));
  const uint64_t begin = ps__now_ns();
  PS_TRY(submit_turn(b, t, &c, b->event[0]));
  for (uint64_t n = 1; counted < 2 || seconds_since(begin) < seconds; n++) {
    const CUevent *last = b->event[(n - 1) & 1];
    PS_TRY(submit_turn(b, t, &c, b->event[n & 1]));
    PS__CUDA_TRY(b->cu, EventSynchronize(last[t->n_parts]));
    if (seconds_since(begin) < seconds / 2)
      continue;
    for (uint32_t p = 0; p < t->n_parts; p++)
      PS_TRY(add_elapsed(b, last[p], last[p + 1], &total[p]));
    counted++;
  }
  for (uint32_t p = 0; p < t->n_parts; p++)
    out[p] = total[p] / counted / c.part[p];
  return settle(b);
}

/* ---- products -------------------------------------------------------------------------------- */

/* A place for @bytes between two others in MiB, another one each time: a step's operands come from
 * memory, not from the GPU's cache. */
static void *next_place(bench *b, uint64_t from, uint64_t to, uint64_t bytes) {
  const uint64_t room = ((to - from) * MIB - bytes) / MIB,
                 at = room ? b->n_products * 97ull % (room + 1) : 0;
  return b->values + (from + at) * MIB;
}

/* Product @i over @rows rows: Y = X W^T (attention's and down's with the residual added), dX = dY W
 * or dW = dY^T X. Gives the addresses of the operands and their number. */
static ps__args_gemm product_args(bench *b, int i, uint32_t rows, uint32_t part, void *ptr[4],
                                  uint32_t *n_ptr) {
  const uint32_t out = products[i].out, in = products[i].in;
  const bool ta = part == WGRAD, tb = part == FORWARD, residual = tb && i % 2 == 1;
  const uint32_t m = ta ? out : rows, n = tb ? out : in, k = ta ? rows : tb ? in : out;
  ptr[0] = next_place(b, X, OUT, 2ull * m * k);
  ptr[1] = next_place(b, X, OUT, 2ull * n * k);
  ptr[2] = next_place(b, OUT, COPIED, 2ull * m * n);
  ptr[3] = next_place(b, X, OUT, 2ull * m * n);
  b->n_products++;
  *n_ptr = 3 + residual;
  ps__args_gemm g = ps__gemm_args(m, n, k, ta, tb, PS_BF16);
  g.has_residual = residual;
  return g;
}

static ps_status run_products(bench *b, const void *rows, uint32_t part) {
  for (int i = 0; i < N_PRODUCTS; i++) {
    void *ptr[4];
    uint32_t n;
    const ps__args_gemm g = product_args(b, i, *(const uint32_t *)rows, part, ptr, &n);
    PS_TRY(launch(b, &ps__k_gemm, &g, ptr, n));
  }
  return PS_OK;
}

/* The same of FP8 operands, as in a step: in each the summed dimension is contiguous. */
static ps__args_gemm_fp8 product_args_fp8(bench *b, int i, uint32_t rows, uint32_t part,
                                          void *ptr[6], uint32_t *n_ptr) {
  const uint32_t out = products[i].out, in = products[i].in;
  const bool forward = part == FORWARD, residual = forward && i % 2 == 1;
  const ps__args_gemm_fp8 g = {.m = part == WGRAD ? out : rows,
                               .n = forward ? out : in,
                               .k = forward         ? in
                                    : part == DGRAD ? out
                                                    : rows,
                               .role = (uint8_t)part,
                               .has_residual = residual,
                               .dt_a = forward ? PS__E4M3 : PS__E5M2,
                               .dt_b = PS__E4M3,
                               .dt_c = PS_BF16};
  ptr[0] = next_place(b, forward ? E4M3 : E5M2, forward ? OUT : E5M2_END, (uint64_t)g.m * g.k);
  ptr[1] = ptr[3] = sum(b, SCALE);
  ptr[2] = next_place(b, E4M3, OUT, (uint64_t)g.n * g.k);
  ptr[4] = next_place(b, OUT, COPIED, 2ull * g.m * g.n);
  if (residual)
    ptr[5] = next_place(b, X, E5M2, 2ull * g.m * g.n);
  b->n_products++;
  *n_ptr = 5 + residual;
  return g;
}

static ps_status run_products_fp8(bench *b, const void *rows, uint32_t part) {
  for (int i = 0; i < N_PRODUCTS; i++) {
    void *ptr[6];
    uint32_t n;
    const ps__args_gemm_fp8 g = product_args_fp8(b, i, *(const uint32_t *)rows, part, ptr, &n);
    PS_TRY(launch(b, &ps__k_gemm_fp8, &g, ptr, n));
  }
  return PS_OK;
}

static double product_flops(uint32_t rows) {
  double n = 0;
  for (int i = 0; i < N_PRODUCTS; i++)
    n += 2.0 * products[i].out * products[i].in;
  return n * rows;
}

static ps_status tune_product(bench *b, int i, uint32_t rows, uint32_t part, bool fp8) {
  void *ptr[6];
  uint32_t n;
  if (fp8) {
    const ps__args_gemm_fp8 g = product_args_fp8(b, i, rows, part, ptr, &n);
    return ps__cuda_tune_gemm_fp8(
        &(ps_launch){.args = &g, .ptr = ptr, .n_ptr = n, .exec = &b->exec});
  }
  const ps__args_gemm g = product_args(b, i, rows, part, ptr, &n);
  return ps__cuda_tune_gemm(&(ps_launch){.args = &g, .ptr = ptr, .n_ptr = n, .exec = &b->exec});
}

/* As a run does it before its first step: each shape's fastest algorithm, kept on disk. */
static ps_status tune_products(bench *b, bool fp8) {
  PS_TRY(ps__cuda_blas_use_cache(b->exec.blas, NULL));
  for (int r = 0; r < N_GEMM; r++)
    for (uint32_t part = FORWARD; part < MAX_PARTS; part++)
      for (int i = 0; i < N_PRODUCTS; i++)
        PS_TRY(tune_product(b, i, gemm_rows[r], part, fp8));
  PS_TRY(settle(b));
  ps__cuda_blas_save_cache(b->exec.blas);
  return PS_OK;
}

static ps_status run_fp32(bench *b, const void *arg, uint32_t part) {
  const ps__args_gemm g = {.m = TOKENS,
                           .n = DIM,
                           .k = DIM,
                           .lda = DIM,
                           .ldb = DIM,
                           .ldc = DIM,
                           .trans_b = 1,
                           .dt_a = PS_F32,
                           .dt_b = PS_F32,
                           .dt_c = PS_F32};
  void *ptr[3] = {value(b, X), value(b, W), sum(b, DKV)};
  return launch(b, &ps__k_gemm, &g, ptr, 3);
}

static ps_status usual_products(bench *b) {
  for (uint32_t part = FORWARD; part < MAX_PARTS; part++)
    PS_TRY(run_products(b, &gemm_rows[GEMM_USUAL], part));
  return PS_OK;
}

/* ---- attention ------------------------------------------------------------------------------- */

static ps__args_attention attention_args(const ps_attention_rate *r) {
  return (ps__args_attention){.n_tokens = r->rows,
                              .row0 = r->kv_rows - r->rows,
                              .n_heads = HEADS,
                              .n_kv_heads = KV_HEADS,
                              .head_dim = HEAD_DIM,
                              .dt = PS_BF16,
                              .document_rows = r->found ? 0 : r->kv_rows / r->packed};
}

/* Part 0 forward, part 1 backward on its output and log-sum-exp. */
static ps_status run_attention(bench *b, const void *args, uint32_t part) {
  void *q = value(b, Q), *kv = value(b, KV), *doc = sum(b, DOC_START), *o = value(b, O),
       *lse = sum(b, LSE);
  void *fwd[5] = {q, kv, doc, o, lse},
       *bwd[8] = {q, kv, doc, o, lse, value(b, D_O), value(b, DQ), sum(b, DKV)};
  return part == 0 ? launch(b, &ps__k_attention_fwd, args, fwd, 5)
                   : launch(b, &ps__k_attention_bwd, args, bwd, 8);
}

static ps_status usual_attention(bench *b) {
  const ps__args_attention a = attention_args(&attention_shapes[ATTENTION_USUAL]);
  PS_TRY(run_attention(b, &a, 0));
  return run_attention(b, &a, 1);
}

/* Plans for the shape, and its documents on the device. @fits: the scratch is no more than plans
 * foresee, and a library finds the documents where they are to be found. */
static ps_status prepare_attention(bench *b, const ps_attention_rate *r, bool *fits) {
  const ps__args_attention a = attention_args(r);
  int32_t *doc_start = (int32_t *)(void *)(place(b, 0) + COPY);
  const uint32_t length = r->rows / r->packed;
  size_t scratch[2] = {0};
  ps_status st = ps__cuda_prepare_attention_fwd(&a, &b->exec, &scratch[0]);
  if (st == PS_OK)
    st = ps__cuda_prepare_attention_bwd(&a, &b->exec, &scratch[1]);
  *fits = false;
  if (st == PS_EDEVICE && r->found)
    return PS_OK;
  PS_TRY(st);
  *fits = scratch[0] <= b->exec.scratch_bytes && scratch[1] <= b->exec.scratch_bytes;
  for (uint32_t i = 0; i < r->rows; i++)
    doc_start[i] = (int32_t)(i / length * length);
  PS__CUDA_TRY(b->cu,
               MemcpyAsync((CUdeviceptr)(uintptr_t)sum(b, DOC_START),
                           (CUdeviceptr)(uintptr_t)doc_start, 4ull * r->rows, b->exec.stream));
  return settle(b);
}

/* Measure into the next free entry of the table. A shape that takes more scratch than plans
 * foresee, or that no library takes, is left out: runs do not have it either. */
static ps_status measure_attention(bench *b, int which, double seconds) {
  ps_hardware *hw = b->hw;
  ps_attention_rate r = attention_shapes[which];
  const ps__args_attention a = attention_args(&r);
  const timed t = {run_attention, &a, 2, usual_products, PRODUCTS_SHARE};
  const double pairs = (double)r.rows * (0.5 * r.rows / r.packed + a.row0) * HEADS * HEAD_DIM;
  double s[MAX_PARTS];
  bool fits;
  uint32_t i = 0;
  PS_TRY(prepare_attention(b, &r, &fits));
  if (!fits) {
    ps__log(PS_LOG_WARN, "attention of %u rows on %u keys, %u packed, %s: not measured", r.rows,
            r.kv_rows, r.packed,
            r.found ? "documents to be found, has no library or takes more scratch than foreseen"
                    : "takes more scratch than foreseen");
    return PS_OK;
  }
  PS_TRY(time_parts(b, &t, seconds, s));
  r.forward_flops_per_s = 4 * pairs / s[0];
  r.backward_flops_per_s = 10 * pairs / s[1];
  while (hw->attention[PS_BF16][i].rows)
    i++;
  hw->attention[PS_BF16][i] = r;
  for (int dt = 0; which == ATTENTION_USUAL && dt < PS_N_DTYPES; dt++) {
    hw->attention_flops_per_s[dt] = r.forward_flops_per_s;
    hw->attention_bwd_flops_per_s[dt] = r.backward_flops_per_s;
  }
  return PS_OK;
}

/* Seconds of the usual shape, forward and backward, between products in bf16. */
static double usual_attention_s(const ps_hardware *hw) {
  const double pairs = 0.5 * TOKENS * TOKENS * HEADS * HEAD_DIM;
  return 4 * pairs / hw->attention_flops_per_s[PS_BF16] +
         10 * pairs / hw->attention_bwd_flops_per_s[PS_BF16];
}

/* ---- products between attention -------------------------------------------------------------- */

/* The rates of a table, by rows. */
static ps_status measure_rows(bench *b, double seconds, timed t, ps_gemm_rate *gemm) {
  double s[MAX_PARTS];
  for (int i = 0; i < N_GEMM; i++) {
    const double flops = product_flops(gemm_rows[i]);
    t.arg = &gemm_rows[i];
    PS_TRY(time_parts(b, &t, seconds, s));
    gemm[i] =
        (ps_gemm_rate){gemm_rows[i], 0, flops / s[FORWARD], flops / s[DGRAD], flops / s[WGRAD]};
  }
  return PS_OK;
}

/* @full: seconds of the usual products, the three of them. */
static ps_status measure_products(bench *b, double seconds, double *full) {
  ps_hardware *hw = b->hw;
  ps_gemm_rate *gemm = hw->gemm[PS_BF16];
  double s[MAX_PARTS];
  const timed t = {run_products, &gemm_rows[GEMM_USUAL], MAX_PARTS, usual_attention,
                   ATTENTION_SHARE};
  PS_TRY(tune_products(b, false));
  PS_TRY(time_parts(b, &t, 2 * seconds, s)); /* not counted: the clock falls */
  PS_TRY(measure_rows(b, seconds, t, gemm));
  hw->gemm_flops_per_s[PS_BF16] = gemm[N_GEMM - 1].forward_flops_per_s;
  *full = product_flops(gemm_rows[GEMM_USUAL]) *
          (1 / gemm[GEMM_USUAL].forward_flops_per_s + 1 / gemm[GEMM_USUAL].dgrad_flops_per_s +
           1 / gemm[GEMM_USUAL].wgrad_flops_per_s);
  PS_TRY(time_parts(b, &(timed){.part = run_fp32, .n_parts = 1}, seconds / 2, s));
  hw->gemm_flops_per_s[PS_F32] = 2.0 * TOKENS * DIM * DIM / s[0];
  return PS_OK;
}

static ps_status fill_values(bench *b);

static ps_status usual_products_fp8(bench *b) {
  for (uint32_t part = FORWARD; part < MAX_PARTS; part++)
    PS_TRY(run_products_fp8(b, &gemm_rows[GEMM_USUAL], part));
  return PS_OK;
}

/* @attention_s: of attention of the usual shape between the products, forward and backward. */
static ps_status time_fp8(bench *b, double seconds, ps_gemm_rate *gemm, double *attention_s) {
  static const float scale[2] = {1.0f / 64, 7.0f};
  float *staged = (float *)(void *)(place(b, 0) + COPY);
  const timed t = {run_products_fp8, &gemm_rows[GEMM_USUAL], MAX_PARTS, usual_attention,
                   ATTENTION_SHARE};
  memcpy(staged, scale, sizeof scale);
  PS__CUDA_TRY(b->cu, MemcpyAsync((CUdeviceptr)(uintptr_t)sum(b, SCALE),
                                  (CUdeviceptr)(uintptr_t)staged, sizeof scale, b->exec.stream));
  PS_TRY(ps__cuda_draw_fp8(&b->exec, value(b, E5M2), (E5M2_END - E5M2) * MIB, PS__E5M2));
  PS_TRY(ps__cuda_draw_fp8(&b->exec, value(b, E4M3), (OUT - E4M3) * MIB, PS__E4M3));
  PS_TRY(tune_products(b, true));
  PS_TRY(measure_rows(b, seconds, t, gemm));
  const ps__args_attention a = attention_args(&attention_shapes[ATTENTION_USUAL]);
  double s[MAX_PARTS];
  PS_TRY(time_parts(b, &(timed){run_attention, &a, 2, usual_products_fp8, FP8_PRODUCTS_SHARE},
                    seconds, s));
  *attention_s = s[0] + s[1];
  return PS_OK;
}

/* The same of FP8 operands, whose codes lie in the place of values meanwhile. A GPU whose cuBLASLt
 * lacks one of the products is used without FP8: its rates stay estimates. */
static ps_status measure_fp8(bench *b, double seconds, double *attention_s) {
  ps_hardware *hw = b->hw;
  *attention_s = 0;
  ps_gemm_rate gemm[N_GEMM] = {{0}};
  if (hw->compute_capability < 89)
    return PS_OK;
  const ps_status st = time_fp8(b, seconds, gemm, attention_s);
  PS_TRY(fill_values(b));
  if (st == PS_EDEVICE) {
    ps__log(PS_LOG_WARN, "FP8 products are not measured, their rates are estimates: %s",
            ps_last_error());
    ps__clear_error();
    *attention_s = 0;
    return PS_OK;
  }
  PS_TRY(st);
  memcpy(hw->gemm_fp8, gemm, sizeof gemm);
  hw->gemm_fp8_flops_per_s = gemm[N_GEMM - 1].forward_flops_per_s;
  return PS_OK;
}

/* ---- idle time ------------------------------------------------------------------------------- */

/* The gain of idle time. Products of the usual rows and then attention run beside copies, and after
 * each such turn the GPU pauses for @pause of the turn's time. Measured over the second half of the
 * time: how much faster the products are than @full, their seconds on a GPU that never pauses, and
 * the share of time that the GPU idled. */
static ps_status rest(bench *b, double seconds, double full, double pause, double *gain,
                      double *rested) {
  const CUevent *e = b->event[0];
  uint64_t begin = ps__now_ns(), counted_from = 0;
  double products = 0, busy = 0, last = 0, copies = 0;
  uint32_t n = 0;
  PS_TRY(case_both(b));
  PS_TRY(settle(b));
  const double copy_s = seconds_since(begin);
  begin = ps__now_ns();
  while (n < 2 || seconds_since(begin) < seconds) {
    double turn = 0, of_products = 0;
    for (; copies * copy_s < COPIES_SHARE * seconds_since(begin); copies++)
      PS_TRY(case_both(b));
    PS__CUDA_TRY(b->cu, EventRecord(e[0], b->exec.stream));
    PS_TRY(usual_products(b));
    PS__CUDA_TRY(b->cu, EventRecord(e[1], b->exec.stream));
    PS_TRY(usual_attention(b));
    PS__CUDA_TRY(b->cu, EventRecord(e[2], b->exec.stream));
    PS__CUDA_TRY(b->cu, EventSynchronize(e[2]));
    PS_TRY(add_elapsed(b, e[0], e[1], &of_products));
    PS_TRY(add_elapsed(b, e[0], e[2], &turn));
    nanosleep(&(struct timespec){.tv_nsec = (long)(pause * turn * 1e9)}, NULL);
    if (!counted_from && seconds_since(begin) >= seconds / 2)
      counted_from = ps__now_ns();
    else if (counted_from) {
      products += of_products;
      busy += turn;
      n++;
      last = seconds_since(counted_from);
    }
  }
  *rested = 1 - busy / last;
  *gain = full / (products / n) - 1;
  return settle(b);
}

static double within_1(double x) { return x < 0 ? 0 : x < 1 ? x : 1; }

/* With short pauses the gain is proportional to them. With pauses as long as the work the clock is
 * at its highest. */
static ps_status measure_idle(bench *b, double seconds, double full) {
  double gain, rested;
  PS_TRY(rest(b, seconds, full, 1.0 / 12, &gain, &rested));
  b->hw->idle_gain = rested > 0 ? within_1(gain / rested) : 0;
  PS_TRY(rest(b, seconds, full, 1, &gain, &rested));
  b->hw->idle_most = within_1(gain);
  return PS_OK;
}

/* ---- memory and link ------------------------------------------------------------------------- */

/* One place after another, so that no cache of the GPU holds what is read next. */
enum { N_NORMS = 3, FFN_DIM = 14336 };
static const double NORMS_BYTES = N_NORMS * 4.0 * TOKENS * DIM + 6.0 * TOKENS * FFN_DIM;
static ps_status run_norms(bench *b, const void *arg, uint32_t part) {
  const ps__args_rmsnorm a = {.rows = TOKENS, .cols = DIM, .dt = PS_BF16, .eps = 1e-5f};
  const ps__args_glu g = {.n_tokens = TOKENS, .ffn_dim = FFN_DIM, .dt = PS_BF16};
  for (int i = 0; i < N_NORMS; i++) {
    void *ptr[3] = {value(b, X + 128 * i), value(b, W), value(b, OUT + 128 * i)};
    PS_TRY(launch(b, &ps__k_rmsnorm_fwd, &a, ptr, 3));
  }
  return launch(b, &ps__k_glu_fwd, &g, (void *[]){value(b, X), value(b, OUT)}, 2);
}
static ps_status case_small(bench *b) {
  const ps__args_rmsnorm a = {.rows = 1, .cols = 1024, .dt = PS_BF16, .eps = 1e-5f};
  void *ptr[3] = {value(b, X), value(b, W), value(b, OUT)};
  for (int i = 0; i < 100; i++)
    PS_TRY(launch(b, &ps__k_rmsnorm_fwd, &a, ptr, 3));
  return PS_OK;
}

static ps_status copy(bench *b, CUstream stream, void *dst, const void *src) {
  PS__CUDA_TRY(b->cu,
               MemcpyAsync((CUdeviceptr)(uintptr_t)dst, (CUdeviceptr)(uintptr_t)src, COPY, stream));
  return PS_OK;
}
static ps_status case_h2d(bench *b) {
  return copy(b, b->in, value(b, COPIED), place(b, b->n_copied[0]++));
}
static ps_status case_d2h(bench *b) {
  return copy(b, b->out, place(b, b->n_copied[1]++) + COPY, value(b, Y));
}
static ps_status case_both(bench *b) {
  PS_TRY(case_h2d(b));
  return case_d2h(b);
}

static ps_status measure_bandwidths(bench *b, double seconds) {
  ps_hardware *hw = b->hw;
  double s[MAX_PARTS];
  PS_TRY(time_parts(b, &(timed){.part = run_norms, .n_parts = 1}, seconds, s));
  hw->elementwise_bytes_per_s = NORMS_BYTES / s[0];
  PS_TRY(time_case(b, case_small, seconds / 2, s));
  hw->op_ns = s[0] * 1e7;
  PS_TRY(time_case(b, case_h2d, seconds, s));
  hw->h2d_bytes_per_s = (double)COPY / s[0];
  PS_TRY(time_case(b, case_d2h, seconds, s));
  hw->d2h_bytes_per_s = (double)COPY / s[0];
  PS_TRY(time_case(b, case_both, seconds, s));
  hw->duplex_bytes_per_s = (double)COPY / s[0];
  return PS_OK;
}

/* Copies one way, a few in flight at any time. */
typedef struct flow {
  CUstream stream;
  const CUevent *event;
  case_fn copy;
  uint64_t n_issued, n_done;
} flow;
enum { IN_FLIGHT = MAX_PARTS + 1 };

static ps_status keep_flowing(bench *b, flow *f) {
  while (f->n_done < f->n_issued) {
    const CUresult r = b->cu->EventQuery(f->event[f->n_done % IN_FLIGHT]);
    if (r == CUDA_ERROR_NOT_READY)
      break;
    if (r != CUDA_SUCCESS)
      return ps__cuda_fail(b->cu, r, "cuEventQuery");
    f->n_done++;
  }
  for (; f->n_issued < f->n_done + IN_FLIGHT; f->n_issued++) {
    PS_TRY(f->copy(b));
    PS__CUDA_TRY(b->cu, EventRecord(f->event[f->n_issued % IN_FLIGHT], f->stream));
  }
  return PS_OK;
}

/* What a host op and @copies get of the host's memory bandwidth while all of them run. Each flows
 * at its own rate, counted over the second half of the time. */
static ps_status measure_share(bench *b, double seconds, const ps__host_load *load, uint32_t copies,
                               ps_contention_rate *out) {
  flow flows[2] = {{.stream = b->in, .event = b->event[0], .copy = case_h2d},
                   {.stream = b->out, .event = b->event[1], .copy = case_d2h}};
  const uint32_t wanted[2] = {copies & PS_CONTENTION_H2D, copies & PS_CONTENTION_D2H};
  uint64_t at_half[2] = {0}, half = 0;
  double host = 0;
  ps_status st = PS_OK;
  PS_TRY(load->start(load->arg));
  for (const uint64_t begin = ps__now_ns(); st == PS_OK;) {
    bool enough = half && seconds_since(begin) >= seconds;
    for (int i = 0; st == PS_OK && i < 2; i++) {
      if (!wanted[i])
        continue;
      st = keep_flowing(b, &flows[i]);
      enough &= flows[i].n_done >= at_half[i] + 8;
    }
    if (enough)
      break;
    if (half || seconds_since(begin) < seconds / 2)
      continue;
    half = ps__now_ns();
    host = load->bytes(load->arg);
    for (int i = 0; i < 2; i++)
      at_half[i] = flows[i].n_done;
  }
  const double s = seconds_since(half);
  host = load->bytes(load->arg) - host;
  load->stop(load->arg);
  PS_TRY(st);
  PS_TRY(settle(b));
  double rate[2] = {b->hw->h2d_bytes_per_s, b->hw->d2h_bytes_per_s};
  for (int i = 0; i < 2; i++)
    if (wanted[i])
      rate[i] = (double)((flows[i].n_done - at_half[i]) * COPY) / s;
  *out = (ps_contention_rate){.kinds = copies | load->kind,
                              .threads = load->threads,
                              .h2d_bytes_per_s = rate[0],
                              .d2h_bytes_per_s = rate[1],
                              .host_bytes_per_s = host / s};
  return PS_OK;
}

/* Each load alone and beside every set of copies. */
static ps_status measure_memory(bench *b, double seconds) {
  static const uint32_t copies[PS__CUDA_CASES_A_LOAD] = {0, PS_CONTENTION_H2D, PS_CONTENTION_D2H,
                                                         PS_CONTENTION_H2D | PS_CONTENTION_D2H};
  ps_contention_rate *s = b->hw->contention;
  for (uint32_t i = 0;
       i < b->host->n_loads && (i + 1) * PS__CUDA_CASES_A_LOAD <= PS_MAX_CONTENTION_RATES; i++)
    for (int k = 0; k < PS__CUDA_CASES_A_LOAD; k++)
      PS_TRY(measure_share(b, seconds, &b->host->load[i], copies[k], s++));
  const ps_contention_rate *all = &b->hw->contention[PS__CUDA_CASES_A_LOAD - 1];
  b->hw->memory_bytes_per_s = all->h2d_bytes_per_s + all->d2h_bytes_per_s + all->host_bytes_per_s;
  return PS_OK;
}

/* ---- for people ------------------------------------------------------------------------------ */

/* Products and copies both ways at once, each as many as take equally long by its own rate; each
 * stream is timed by its own events. */
static ps_status loaded_turn(bench *b, uint32_t n_products, uint32_t n_copies, double total[3]) {
  CUevent *compute = b->event[0], *in = b->event[0] + 2, *out = b->event[1];
  PS__CUDA_TRY(b->cu, EventRecord(compute[0], b->exec.stream));
  PS__CUDA_TRY(b->cu, EventRecord(in[0], b->in));
  PS__CUDA_TRY(b->cu, EventRecord(out[0], b->out));
  for (uint32_t i = 0; i < n_products; i++)
    PS_TRY(run_products(b, &gemm_rows[GEMM_USUAL], FORWARD));
  for (uint32_t i = 0; i < n_copies; i++)
    PS_TRY(case_both(b));
  PS__CUDA_TRY(b->cu, EventRecord(compute[1], b->exec.stream));
  PS__CUDA_TRY(b->cu, EventRecord(in[1], b->in));
  PS__CUDA_TRY(b->cu, EventRecord(out[1], b->out));
  PS_TRY(settle(b));
  PS_TRY(add_elapsed(b, compute[0], compute[1], &total[0]));
  PS_TRY(add_elapsed(b, in[0], in[1], &total[1]));
  return add_elapsed(b, out[0], out[1], &total[2]);
}

static ps_status measure_loaded(bench *b, double seconds) {
  ps_hardware *hw = b->hw;
  const double flops = product_flops(gemm_rows[GEMM_USUAL]), bytes = (double)COPY;
  const uint32_t n_products = 16,
                 n_copies = 1 + (uint32_t)(n_products * flops /
                                           hw->gemm[PS_BF16][GEMM_USUAL].forward_flops_per_s *
                                           hw->duplex_bytes_per_s / bytes);
  double total[3] = {0};
  uint32_t n = 0;
  PS_TRY(loaded_turn(b, n_products, n_copies, total));
  memset(total, 0, sizeof total);
  for (const uint64_t begin = ps__now_ns(); n < 2 || seconds_since(begin) < seconds; n++)
    PS_TRY(loaded_turn(b, n_products, n_copies, total));
  hw->loaded_gemm_flops_per_s = n * n_products * flops / total[0];
  hw->loaded_h2d_bytes_per_s = n * n_copies * bytes / total[1];
  hw->loaded_d2h_bytes_per_s = n * n_copies * bytes / total[2];
  return PS_OK;
}

/* Memory that is not pinned, 1 GiB as the engine asks for it: copies by the driver's staging,
 * then how long pinning takes. Where pinning is refused it stays 0. */
static ps_status measure_pageable(bench *b, double seconds) {
  static const uint64_t bytes = 1ull << 30;
  ps_hardware *hw = b->hw;
  void *p = NULL;
  double s[2] = {0};
  uint32_t n = 0;
  PS_TRY(ps__map(&p, bytes, "measuring the machine"));
  ps__cuda_place(hw->device, p, bytes);
  memset(p, 1, bytes);
  ps_status st = PS_OK;
  for (const uint64_t begin = ps__now_ns();
       st == PS_OK && (n < 2 || seconds_since(begin) < seconds); n++) {
    char *part = (char *)p + n % 8 * COPY;
    for (int home = 0; st == PS_OK && home < 2; home++) {
      const uint64_t t0 = ps__now_ns();
      st = home ? copy(b, b->out, part, value(b, Y)) : copy(b, b->in, value(b, OUT), part);
      if (st == PS_OK)
        st = settle(b);
      s[home] += seconds_since(t0);
    }
  }
  if (st == PS_OK) {
    hw->pageable_h2d_bytes_per_s = n * (double)COPY / s[0];
    hw->pageable_d2h_bytes_per_s = n * (double)COPY / s[1];
    const uint64_t t0 = ps__now_ns();
    if (b->cu->MemHostRegister(
            p, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP) == CUDA_SUCCESS) {
      hw->pin_bytes_per_s = (double)bytes / seconds_since(t0);
      b->cu->MemHostUnregister(p);
    }
  }
  ps__unmap(p, bytes);
  return st;
}

/* ---- all of it ------------------------------------------------------------------------------- */

/* Values as in a model: about N(0, 0.02) in bf16, from the sum of four uniform numbers. */
static ps_status fill(bench *b) {
  uint16_t *p = (uint16_t *)(void *)place(b, 0);
  uint64_t x = 88172645463325252ull;
  for (uint64_t i = 0; i < COPY / 2; i++) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    const float four =
        (float)((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48)) / 65536.0f -
        2.0f;
    p[i] = ps__f32_to_bf16(0.035f * four);
  }
  for (uint32_t i = 1; i < b->host->places.n; i++)
    memcpy(place(b, i), p, COPY);
  return fill_values(b);
}

/* The device's, from the first place. */
static ps_status fill_values(bench *b) {
  for (uint64_t at = 0; at < VALUES; at += COPY)
    PS_TRY(copy(b, b->exec.stream, b->values + at, place(b, 0)));
  return settle(b);
}

/* The ops of a usual step come first, attention between products: what the GPU loses for them is
 * device_overhead_bytes. Plans count @bytes and the page tables of pinned memory themselves. */
static ps_status measure(bench *b, double seconds, bool profile, uint64_t bytes) {
  const uint64_t planned = bytes + ps__cuda_table_bytes((uint64_t)b->n_pinned * 2 * COPY);
  uint64_t used = 0;
  double full, beside_fp8;
  bool fits;
  PS_TRY(fill(b));
  PS_TRY(prepare_attention(b, &attention_shapes[ATTENTION_USUAL], &fits));
  if (!fits)
    return ps__fail(PS_EINTERNAL, "attention of %d rows takes more scratch than foreseen", TOKENS);
  PS_TRY(measure_products(b, seconds, &full));
  PS_TRY(measure_idle(b, seconds, full));
  PS_TRY(measure_fp8(b, seconds, &beside_fp8));
  PS_TRY(measure_bandwidths(b, seconds));
  if (profile)
    PS_TRY(measure_loaded(b, seconds));
  PS_TRY(ps__cuda_memory_used(b->hw->device, &used));
  b->hw->device_overhead_bytes =
      ps_round_up((used > planned ? used - planned : 0) + MARGIN, 2u << 20);
  for (int i = 0; i < N_ATTENTION; i++)
    PS_TRY(measure_attention(b, i, seconds));
  if (beside_fp8 > 0)
    b->hw->fp8_attention_speed = usual_attention_s(b->hw) / beside_fp8;
  PS_TRY(measure_memory(b, seconds));
  return profile ? measure_pageable(b, seconds) : PS_OK;
}

static uint64_t scratch_needed(const ps_hardware *hw) {
  uint64_t most = 0;
  for (int i = 0; i < 2 * N_ATTENTION; i++) {
    const ps__args_attention a = attention_args(&attention_shapes[i / 2]);
    const uint64_t n =
        ps_scratch_attention(&a, i % 2, &(ps__scratch_target){.cudnn_version = hw->cudnn_version});
    if (n > most)
      most = n;
  }
  return most;
}

static ps_status reserve(bench *b, uint64_t *bytes) {
  const size_t workspace = ps__cuda_workspace_bytes(b->hw->compute_capability);
  const uint64_t scratch = scratch_needed(b->hw);
  *bytes = ps_round_up(VALUES + SUMS + scratch + workspace, 2u << 20);
  CUresult r = b->cu->MemAlloc(&b->memory, *bytes);
  for (; r == CUDA_SUCCESS && b->n_pinned < b->host->places.n; b->n_pinned += r == CUDA_SUCCESS)
    r = b->cu->MemHostRegister(place(b, b->n_pinned), 2 * COPY,
                               CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  if (r == CUDA_SUCCESS)
    r = b->cu->StreamCreate(&b->exec.stream, CU_STREAM_NON_BLOCKING);
  if (r == CUDA_SUCCESS)
    r = b->cu->StreamCreate(&b->in, CU_STREAM_NON_BLOCKING);
  if (r == CUDA_SUCCESS)
    r = b->cu->StreamCreate(&b->out, CU_STREAM_NON_BLOCKING);
  for (int i = 0; r == CUDA_SUCCESS && i < 2 * (MAX_PARTS + 1); i++)
    r = b->cu->EventCreate(&b->event[0][0] + i, CU_EVENT_DEFAULT);
  if (r != CUDA_SUCCESS)
    return ps__cuda_fail(b->cu, r, "measuring the GPU");
  b->values = (char *)(uintptr_t)b->memory;
  b->sums = b->values + VALUES;
  b->exec.scratch = b->sums + SUMS;
  b->exec.scratch_bytes = scratch;
  b->exec.device = (int)b->hw->device;
  b->exec.n_sms = (int)b->hw->n_sms;
  PS_TRY(ps__cublaslt_open());
  return ps__cuda_blas_create(&b->exec.blas, b->sums + SUMS + scratch, workspace);
}

static void release(bench *b) {
  ps__cuda_blas_destroy(b->exec.blas);
  for (int i = 0; i < 2 * (MAX_PARTS + 1); i++)
    if ((&b->event[0][0])[i])
      b->cu->EventDestroy((&b->event[0][0])[i]);
  if (b->exec.stream)
    b->cu->StreamDestroy(b->exec.stream);
  if (b->in)
    b->cu->StreamDestroy(b->in);
  if (b->out)
    b->cu->StreamDestroy(b->out);
  for (uint32_t i = 0; i < b->n_pinned; i++)
    b->cu->MemHostUnregister(place(b, i));
  if (b->memory)
    b->cu->MemFree(b->memory);
}

ps_status ps__cuda_measure(ps_hardware *hw, double seconds, bool profile,
                           const ps__host_work *host) {
  bench b = {.hw = hw, .host = host};
  CUdevice dev;
  CUcontext ctx, old;
  uint64_t bytes = 0;
  PS_TRY(ps__cuda_driver_open(&b.cu));
  CUresult r = b.cu->DeviceGet(&dev, (int)hw->device);
  /* kept: a context that is made again would load its kernels again */
  if (r == CUDA_SUCCESS)
    r = b.cu->DevicePrimaryCtxRetain(&ctx, dev);
  if (r == CUDA_SUCCESS)
    r = b.cu->CtxPushCurrent(ctx);
  if (r != CUDA_SUCCESS)
    return ps__cuda_fail(b.cu, r, "cuDevicePrimaryCtxRetain");
  ps_status st = reserve(&b, &bytes);
  if (st == PS_OK)
    st = measure(&b, seconds, profile, bytes);
  release(&b);
  b.cu->CtxPopCurrent(&old);
  return st;
}
