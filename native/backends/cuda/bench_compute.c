/* bench_compute.c - rates of products and attention, in turns as in a step. */
#include "backends/cuda/bench.h"
#include "kernels/cuda/scratch.h"
#include <string.h>
#include <time.h>

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
  ATTENTION_SHORT = 0,
  ATTENTION_USUAL = 1,
  ATTENTION_LONG = 2,
  GEMM_USUAL = 2
};
/* The time of what runs between, over that of what is measured: about a block's at a sequence of
 * 8192. LONG: for heads of 64 in long sequences. In 1B at 524,288 tokens products took 0.05 of
 * attention's time (bench/log/2026-11-25-long-sequences.md), so at 131,072 they take 0.2: attention
 * has a quarter of the keys there. */
static const double PRODUCTS_SHARE = 1.5, FP8_PRODUCTS_SHARE = 0.8, ATTENTION_SHARE = 0.6,
                    LONG_PRODUCTS_SHARE = 0.2;

/* ---- products -------------------------------------------------------------------------------- */

/* A place for @bytes between two others in MiB, another one each time: a step's operands come from
 * memory, not from the GPU's cache. */
static void *next_place(ps__bench *b, uint64_t from, uint64_t to, uint64_t bytes) {
  const uint64_t room = ((to - from) * MIB - bytes) / MIB,
                 at = room ? b->n_products * 97ull % (room + 1) : 0;
  return b->values + (from + at) * MIB;
}

/* Product @i over @rows rows: Y = X W^T (attention's and down's with the residual added), dX = dY W
 * or dW = dY^T X. Gives the addresses of the operands and their number. */
static ps__args_gemm product_args(ps__bench *b, int i, uint32_t rows, uint32_t part, void *ptr[4],
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

static ps_status run_products(ps__bench *b, const void *rows, uint32_t part) {
  for (int i = 0; i < N_PRODUCTS; i++) {
    void *ptr[4];
    uint32_t n;
    const ps__args_gemm g = product_args(b, i, *(const uint32_t *)rows, part, ptr, &n);
    PS_TRY(ps__bench_launch(b, &ps__k_gemm, &g, ptr, n));
  }
  return PS_OK;
}

/* The same of FP8 operands, as in a step: in each the summed dimension is contiguous. */
static ps__args_gemm_fp8 product_args_fp8(ps__bench *b, int i, uint32_t rows, uint32_t part,
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

static ps_status run_products_fp8(ps__bench *b, const void *rows, uint32_t part) {
  for (int i = 0; i < N_PRODUCTS; i++) {
    void *ptr[6];
    uint32_t n;
    const ps__args_gemm_fp8 g = product_args_fp8(b, i, *(const uint32_t *)rows, part, ptr, &n);
    PS_TRY(ps__bench_launch(b, &ps__k_gemm_fp8, &g, ptr, n));
  }
  return PS_OK;
}

static double product_flops(uint32_t rows) {
  double n = 0;
  for (int i = 0; i < N_PRODUCTS; i++)
    n += 2.0 * products[i].out * products[i].in;
  return n * rows;
}

static ps_status tune_product(ps__bench *b, int i, uint32_t rows, uint32_t part, bool fp8) {
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

/* As a run does it before its first step: each shape's fastest algorithm, kept on disk. Products of
 * @n numbers of rows. */
static ps_status tune_products(ps__bench *b, const uint32_t *rows, uint32_t n, bool fp8) {
  PS_TRY(ps__cuda_blas_use_cache(b->exec.blas, NULL));
  for (uint32_t r = 0; r < n; r++)
    for (uint32_t part = FORWARD; part < MAX_PARTS; part++)
      for (int i = 0; i < N_PRODUCTS; i++)
        PS_TRY(tune_product(b, i, rows[r], part, fp8));
  PS_TRY(ps__bench_settle(b));
  ps__cuda_blas_save_cache(b->exec.blas);
  return PS_OK;
}

static ps_status run_fp32(ps__bench *b, const void *arg, uint32_t part) {
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
  return ps__bench_launch(b, &ps__k_gemm, &g, ptr, 3);
}

static ps_status usual_products(ps__bench *b) {
  for (uint32_t part = FORWARD; part < MAX_PARTS; part++)
    PS_TRY(run_products(b, &gemm_rows[GEMM_USUAL], part));
  return PS_OK;
}

/* ---- attention ------------------------------------------------------------------------------- */

/* With heads of @head_dim, of which there are so many that all are as wide together. */
static ps__args_attention attention_args(const ps_attention_rate *r, uint32_t head_dim) {
  return (ps__args_attention){.n_tokens = r->rows,
                              .row0 = r->kv_rows - r->rows,
                              .n_heads = HEADS * HEAD_DIM / head_dim,
                              .n_kv_heads = KV_HEADS * HEAD_DIM / head_dim,
                              .head_dim = head_dim,
                              .dt = PS_BF16,
                              .document_rows = r->found ? 0 : r->kv_rows / r->packed};
}

/* Part 0 forward, part 1 backward on its output and log-sum-exp. */
static ps_status run_attention(ps__bench *b, const void *args, uint32_t part) {
  void *q = value(b, Q), *kv = value(b, KV), *doc = sum(b, DOC_START), *o = value(b, O),
       *lse = sum(b, LSE);
  void *fwd[5] = {q, kv, doc, o, lse},
       *bwd[8] = {q, kv, doc, o, lse, value(b, D_O), value(b, DQ), sum(b, DKV)};
  return part == 0 ? ps__bench_launch(b, &ps__k_attention_fwd, args, fwd, 5)
                   : ps__bench_launch(b, &ps__k_attention_bwd, args, bwd, 8);
}

static ps_status usual_attention(ps__bench *b) {
  const ps__args_attention a = attention_args(&attention_shapes[ATTENTION_USUAL], HEAD_DIM);
  PS_TRY(run_attention(b, &a, 0));
  return run_attention(b, &a, 1);
}

/* Plans for the shape, and its documents on the device. @fits: the scratch is no more than plans
 * foresee, and a library finds the documents where they are to be found, and has heads of 64. */
static ps_status prepare_attention(ps__bench *b, const ps_attention_rate *r, uint32_t head_dim,
                                   bool *fits) {
  const ps__args_attention a = attention_args(r, head_dim);
  int32_t *doc_start = (int32_t *)(void *)(place(b, 0) + COPY);
  const uint32_t length = r->rows / r->packed;
  size_t scratch[2] = {0};
  ps_status st = ps__cuda_prepare_attention_fwd(&a, &b->exec, &scratch[0]);
  if (st == PS_OK)
    st = ps__cuda_prepare_attention_bwd(&a, &b->exec, &scratch[1]);
  *fits = false;
  if (st == PS_EDEVICE && (r->found || head_dim != HEAD_DIM))
    return PS_OK;
  PS_TRY(st);
  *fits = scratch[0] <= b->exec.scratch_bytes && scratch[1] <= b->exec.scratch_bytes;
  for (uint32_t i = 0; i < r->rows; i++)
    doc_start[i] = (int32_t)(i / length * length);
  PS__CUDA_TRY(b->cu,
               MemcpyAsync((CUdeviceptr)(uintptr_t)sum(b, DOC_START),
                           (CUdeviceptr)(uintptr_t)doc_start, 4ull * r->rows, b->exec.stream));
  return ps__bench_settle(b);
}

/* The rates of @r's shape between products that take @share of its time; @fits as above. */
static ps_status time_attention(ps__bench *b, double seconds, uint32_t head_dim, double share,
                                ps_attention_rate *r, bool *fits) {
  const ps__args_attention a = attention_args(r, head_dim);
  const ps__timed t = {run_attention, &a, 2, usual_products, share};
  const double pairs = (double)r->rows * (0.5 * r->rows / r->packed + a.row0) * HEADS * HEAD_DIM;
  double s[MAX_PARTS];
  PS_TRY(prepare_attention(b, r, head_dim, fits));
  if (!*fits)
    return PS_OK;
  PS_TRY(ps__bench_time_parts(b, &t, seconds, s));
  r->forward_flops_per_s = 4 * pairs / s[0];
  r->backward_flops_per_s = 10 * pairs / s[1];
  return PS_OK;
}

/* Measure into the next free entry of the table. A shape that takes more scratch than plans
 * foresee, or that no library takes, is left out: runs do not have it either. */
static ps_status measure_attention(ps__bench *b, int which, double seconds) {
  ps_hardware *hw = b->hw;
  ps_attention_rate r = attention_shapes[which];
  bool fits;
  uint32_t i = 0;
  PS_TRY(time_attention(b, seconds, HEAD_DIM, PRODUCTS_SHARE, &r, &fits));
  if (!fits) {
    ps__log(PS_LOG_WARN, "attention of %u rows on %u keys, %u packed, %s: not measured", r.rows,
            r.kv_rows, r.packed,
            r.found ? "documents to be found, has no library or takes more scratch than foreseen"
                    : "takes more scratch than foreseen");
    return PS_OK;
  }
  while (hw->attention[PS_BF16][i].rows)
    i++;
  hw->attention[PS_BF16][i] = r;
  for (int dt = 0; which == ATTENTION_USUAL && dt < PS_N_DTYPES; dt++) {
    hw->attention_flops_per_s[dt] = r.forward_flops_per_s;
    hw->attention_bwd_flops_per_s[dt] = r.backward_flops_per_s;
  }
  return PS_OK;
}

/* The table's entry of shape @which, NULL where it was left out. */
static const ps_attention_rate *measured(const ps_hardware *hw, int which) {
  const ps_attention_rate *shape = &attention_shapes[which];
  for (const ps_attention_rate *r = hw->attention[PS_BF16]; r->rows; r++)
    if (r->rows == shape->rows && r->kv_rows == shape->kv_rows && r->packed == shape->packed &&
        r->found == shape->found)
      return r;
  return NULL;
}

/* Heads of 64 of shape @which, between products of @share, beside those of 128, whose rates are in
 * the table. */
static ps_status measure_heads64(ps__bench *b, double seconds, int which, double share,
                                 double *forward, double *backward) {
  const ps_attention_rate *of_128 = measured(b->hw, which);
  ps_attention_rate r = attention_shapes[which];
  bool fits = false;
  if (of_128)
    PS_TRY(time_attention(b, seconds, NARROW_HEAD_DIM, share, &r, &fits));
  if (!fits) {
    ps__log(PS_LOG_WARN, "attention of %u rows with heads of %d: not measured", r.rows,
            NARROW_HEAD_DIM);
    return PS_OK;
  }
  *forward = r.forward_flops_per_s / of_128->forward_flops_per_s;
  *backward = r.backward_flops_per_s / of_128->backward_flops_per_s;
  return PS_OK;
}

/* SECONDS of attention of the usual shape, forward and backward, between these products. */
static ps_status time_usual_attention(ps__bench *b, double seconds, ps__bench_fn products,
                                      double share, double *out) {
  const ps__args_attention a = attention_args(&attention_shapes[ATTENTION_USUAL], HEAD_DIM);
  const ps__timed t = {run_attention, &a, 2, products, share};
  double s[MAX_PARTS];
  PS_TRY(ps__bench_time_parts(b, &t, seconds, s));
  *out = s[0] + s[1];
  return PS_OK;
}

/* ---- products between attention -------------------------------------------------------------- */

/* The rates of a table, by rows. */
static ps_status measure_rows(ps__bench *b, double seconds, ps__timed t, ps_gemm_rate *gemm) {
  double s[MAX_PARTS];
  for (int i = 0; i < N_GEMM; i++) {
    const double flops = product_flops(gemm_rows[i]);
    t.arg = &gemm_rows[i];
    PS_TRY(ps__bench_time_parts(b, &t, seconds, s));
    gemm[i] =
        (ps_gemm_rate){gemm_rows[i], 0, flops / s[FORWARD], flops / s[DGRAD], flops / s[WGRAD]};
  }
  return PS_OK;
}

/* SECONDS of load before anything counts: a GPU that is bound by its power keeps its highest clock
 * for some seconds. Products ran at 730 TFLOP/s on two H100s that had rested, and at 691 after
 * 15 s. */
static double load_seconds(double seconds) {
  const double least = 2 * seconds, usual = 15 * seconds < 5 ? 15 * seconds : 5;
  return least > usual ? least : usual;
}

static const ps__timed bf16_products = {run_products, &gemm_rows[GEMM_USUAL], MAX_PARTS,
                                        usual_attention, ATTENTION_SHARE};

ps_status ps__bench_tune_usual(ps__bench *b) {
  return tune_products(b, &gemm_rows[GEMM_USUAL], 1, false);
}
ps_status ps__bench_usual_turn(ps__bench *b) {
  PS_TRY(usual_products(b));
  return usual_attention(b);
}

ps_status ps__bench_load(ps__bench *b, double seconds) {
  double s[MAX_PARTS];
  PS_TRY(ps__bench_tune_usual(b));
  return ps__bench_time_parts(b, &bf16_products, load_seconds(seconds), s);
}

/* @full: seconds of the usual products, the three of them. */
ps_status ps__bench_products(ps__bench *b, double seconds, double *full) {
  ps_hardware *hw = b->hw;
  ps_gemm_rate *gemm = hw->gemm[PS_BF16];
  double s[MAX_PARTS];
  PS_TRY(tune_products(b, gemm_rows, N_GEMM, false));
  PS_TRY(ps__bench_load(b, seconds));
  PS_TRY(measure_rows(b, seconds, bf16_products, gemm));
  hw->gemm_flops_per_s[PS_BF16] = gemm[N_GEMM - 1].forward_flops_per_s;
  *full = product_flops(gemm_rows[GEMM_USUAL]) *
          (1 / gemm[GEMM_USUAL].forward_flops_per_s + 1 / gemm[GEMM_USUAL].dgrad_flops_per_s +
           1 / gemm[GEMM_USUAL].wgrad_flops_per_s);
  PS_TRY(ps__bench_time_parts(b, &(ps__timed){.part = run_fp32, .n_parts = 1}, seconds / 2, s));
  hw->gemm_flops_per_s[PS_F32] = 2.0 * TOKENS * DIM * DIM / s[0];
  return PS_OK;
}

static ps_status usual_products_fp8(ps__bench *b) {
  for (uint32_t part = FORWARD; part < MAX_PARTS; part++)
    PS_TRY(run_products_fp8(b, &gemm_rows[GEMM_USUAL], part));
  return PS_OK;
}

/* @attention_s: of attention of the usual shape between the products, forward and backward. */
static ps_status time_fp8(ps__bench *b, double seconds, ps_gemm_rate *gemm, double *attention_s) {
  static const float scale[2] = {1.0f / 64, 7.0f};
  float *staged = (float *)(void *)(place(b, 0) + COPY);
  const ps__timed t = {run_products_fp8, &gemm_rows[GEMM_USUAL], MAX_PARTS, usual_attention,
                       ATTENTION_SHARE};
  memcpy(staged, scale, sizeof scale);
  PS__CUDA_TRY(b->cu, MemcpyAsync((CUdeviceptr)(uintptr_t)sum(b, SCALE),
                                  (CUdeviceptr)(uintptr_t)staged, sizeof scale, b->exec.stream));
  PS_TRY(ps__cuda_draw_fp8(&b->exec, value(b, E5M2), (E5M2_END - E5M2) * MIB, PS__E5M2));
  PS_TRY(ps__cuda_draw_fp8(&b->exec, value(b, E4M3), (OUT - E4M3) * MIB, PS__E4M3));
  PS_TRY(tune_products(b, gemm_rows, N_GEMM, true));
  PS_TRY(measure_rows(b, seconds, t, gemm));
  return time_usual_attention(b, seconds, usual_products_fp8, FP8_PRODUCTS_SHARE, attention_s);
}

/* The same of FP8 operands, whose codes lie in the place of values meanwhile. A GPU whose cuBLASLt
 * lacks one of the products is used without FP8: its rates stay estimates. */
ps_status ps__bench_fp8(ps__bench *b, double seconds) {
  ps_hardware *hw = b->hw;
  ps_gemm_rate gemm[N_GEMM] = {{0}};
  double beside_bf16, beside_fp8;
  if (hw->compute_capability < 89)
    return PS_OK;
  PS_TRY(time_usual_attention(b, seconds, usual_products, PRODUCTS_SHARE, &beside_bf16));
  const ps_status st = time_fp8(b, seconds, gemm, &beside_fp8);
  PS_TRY(ps__bench_fill_values(b));
  if (st == PS_EDEVICE) {
    ps__log(PS_LOG_WARN, "FP8 products are not measured, their rates are estimates: %s",
            ps_last_error());
    ps__clear_error();
    return PS_OK;
  }
  PS_TRY(st);
  memcpy(hw->gemm_fp8, gemm, sizeof gemm);
  hw->gemm_fp8_flops_per_s = gemm[N_GEMM - 1].forward_flops_per_s;
  hw->fp8_attention_speed = beside_bf16 / beside_fp8;
  return PS_OK;
}

/* ---- products of experts --------------------------------------------------------------------- */

/* Gate with up and down of some experts of Qwen3-30B-A3B; a random number of rows each. */
enum { EXPERTS = 32, EXPERTS_A_TOKEN = 8, EXPERT_IN = 2048, EXPERT_DIM = 768 };
static const uint32_t expert_rows[] = {64, 256, 1024, 4096}; /* on average */
enum { N_EXPERT_ROWS = sizeof expert_rows / sizeof *expert_rows };

static ps_status run_grouped(ps__bench *b, const void *rows_each, uint32_t part) {
  const uint32_t rows = *(const uint32_t *)rows_each * EXPERTS;
  for (int down = 0; down < 2; down++) {
    const ps__args_gemm_grouped g = {.n_tokens = rows / EXPERTS_A_TOKEN,
                                     .n_used = EXPERTS_A_TOKEN,
                                     .n_out = down ? EXPERT_IN : 2 * EXPERT_DIM,
                                     .n_in = down ? EXPERT_DIM : EXPERT_IN,
                                     .n_experts = EXPERTS,
                                     .dt = PS_BF16,
                                     .role = part};
    const uint64_t out = 2ull * rows * g.n_out, in = 2ull * rows * g.n_in,
                   w = 2ull * EXPERTS * g.n_out * g.n_in;
    void *ptr[4] = {next_place(b, X, OUT, part == FORWARD ? in : out),
                    next_place(b, X, OUT, part == WGRAD ? in : w), sum(b, OFFSETS),
                    next_place(b, OUT, COPIED,
                               part == FORWARD ? out
                               : part == DGRAD ? in
                                               : w)};
    b->n_products++;
    PS_TRY(ps__bench_launch(b, &ps__k_gemm_grouped, &g, ptr, 4));
  }
  return PS_OK;
}

/* The rows of each expert when every row chooses one at random. */
static ps_status draw_offsets(ps__bench *b, uint32_t rows) {
  int32_t *offsets = (int32_t *)(void *)(place(b, 0) + COPY);
  uint64_t x = 88172645463325252ull;
  memset(offsets, 0, (EXPERTS + 1) * sizeof *offsets);
  for (uint32_t i = 0; i < rows * EXPERTS; i++) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    offsets[1 + (x >> 32) % EXPERTS]++;
  }
  for (uint32_t e = 0; e < EXPERTS; e++)
    offsets[e + 1] += offsets[e];
  PS__CUDA_TRY(b->cu,
               MemcpyAsync((CUdeviceptr)(uintptr_t)sum(b, OFFSETS), (CUdeviceptr)(uintptr_t)offsets,
                           (EXPERTS + 1) * sizeof *offsets, b->exec.stream));
  return ps__bench_settle(b);
}

ps_status ps__bench_grouped(ps__bench *b, double seconds) {
  ps_gemm_rate *grouped = b->hw->gemm_grouped;
  for (int i = 0; i < N_EXPERT_ROWS; i++) {
    const uint32_t rows = expert_rows[i];
    const double flops = 2.0 * rows * EXPERTS * 3 * EXPERT_DIM * EXPERT_IN;
    const ps__timed t = {run_grouped, &expert_rows[i], MAX_PARTS, usual_attention, ATTENTION_SHARE};
    double s[MAX_PARTS];
    PS_TRY(draw_offsets(b, rows));
    PS_TRY(ps__bench_time_parts(b, &t, seconds, s));
    grouped[i] = (ps_gemm_rate){rows, 0, flops / s[FORWARD], flops / s[DGRAD], flops / s[WGRAD]};
  }
  return PS_OK;
}

/* ---- the delta rule -------------------------------------------------------------------------- */

/* Qwen3.5's layers, whose sizes differ in value heads alone: 16 in 2B, 32 in 4B to 35B, 64 in the
 * largest. Places in MiB, of 64 value heads: what is read lies before Y; results from OUT on. */
enum { DELTA_KEY_HEADS = 16, DELTA_DIM = 128, MOST_DELTA_HEADS = 64 };
enum { DELTA_BA = 192, DELTA_WEIGHT = 196, DELTA_D_O = 256, DELTA_CARRY = 16 };
enum { DELTA_DBA = OUT + 192, DELTA_DWEIGHT = OUT + 196 };
static const uint32_t delta_heads[] = {16, 32, MOST_DELTA_HEADS};
enum { N_DELTA = sizeof delta_heads / sizeof *delta_heads };

static ps__args_delta delta_args(uint32_t heads) {
  return (ps__args_delta){.n_tokens = TOKENS,
                          .n_key_heads = DELTA_KEY_HEADS,
                          .n_value_heads = heads,
                          .key_dim = DELTA_DIM,
                          .value_dim = DELTA_DIM,
                          .dt = PS_BF16};
}

/* Part 0 forward, part 1 backward. No state comes before: the rows are a sequence's first. */
static ps_status run_delta(ps__bench *b, const void *args, uint32_t part) {
  void *qkv = value(b, X), *ba = value(b, DELTA_BA), *w = value(b, DELTA_WEIGHT),
       *doc = sum(b, DOC_START), *state = sum(b, DKV), *carry = sum(b, DELTA_CARRY);
  void *fwd[8] = {qkv, ba, w, w, doc, state, value(b, OUT), state},
       *bwd[12] = {qkv,
                   ba,
                   w,
                   w,
                   doc,
                   state,
                   value(b, DELTA_D_O),
                   carry,
                   value(b, OUT),
                   value(b, DELTA_DBA),
                   value(b, DELTA_DWEIGHT),
                   value(b, DELTA_DWEIGHT + 1)};
  return part == 0 ? ps__bench_launch(b, &ps__k_delta_fwd, args, fwd, 8)
                   : ps__bench_launch(b, &ps__k_delta_bwd, args, bwd, 12);
}

/* On the documents of ps__bench_prepare(): one. */
ps_status ps__bench_delta(ps__bench *b, double seconds) {
  ps_delta_rate rate[N_DELTA];
  for (int i = 0; i < N_DELTA; i++) {
    const ps__args_delta a = delta_args(delta_heads[i]);
    const double elements = (double)TOKENS * a.n_value_heads * DELTA_DIM * DELTA_DIM;
    const ps__timed t = {run_delta, &a, 2, usual_products, PRODUCTS_SHARE};
    double s[MAX_PARTS];
    PS_TRY(ps__bench_time_parts(b, &t, seconds, s));
    rate[i] = (ps_delta_rate){delta_heads[i], 0, elements / s[0], elements / s[1]};
  }
  memcpy(b->hw->delta, rate, sizeof rate);
  return PS_OK;
}

/* ---- idle time ------------------------------------------------------------------------------- */

/* The gain of idle time. Products of the usual rows and then attention run beside copies, and after
 * each such turn the GPU pauses for @pause of the turn's time. Measured over the second half of the
 * time: how much faster the products are than @full, their seconds on a GPU that never pauses, and
 * the share of time that the GPU idled. */
static ps_status rest(ps__bench *b, double seconds, double full, double pause, double *gain,
                      double *rested) {
  const CUevent *e = b->event[0];
  uint64_t begin = ps__now_ns(), counted_from = 0;
  double products = 0, busy = 0, last = 0, copies = 0;
  uint32_t n = 0;
  PS_TRY(ps__bench_copy_both(b));
  PS_TRY(ps__bench_settle(b));
  const double copy_s = seconds_since(begin);
  begin = ps__now_ns();
  while (n < 2 || seconds_since(begin) < seconds) {
    double turn = 0, of_products = 0;
    for (; copies * copy_s < COPIES_SHARE * seconds_since(begin); copies++)
      PS_TRY(ps__bench_copy_both(b));
    PS__CUDA_TRY(b->cu, EventRecord(e[0], b->exec.stream));
    PS_TRY(usual_products(b));
    PS__CUDA_TRY(b->cu, EventRecord(e[1], b->exec.stream));
    PS_TRY(usual_attention(b));
    PS__CUDA_TRY(b->cu, EventRecord(e[2], b->exec.stream));
    PS__CUDA_TRY(b->cu, EventSynchronize(e[2]));
    PS_TRY(ps__bench_add_elapsed(b, e[0], e[1], &of_products));
    PS_TRY(ps__bench_add_elapsed(b, e[0], e[2], &turn));
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
  return ps__bench_settle(b);
}

static double within_1(double x) { return x < 0 ? 0 : x < 1 ? x : 1; }

/* With short pauses the gain is proportional to them. With pauses as long as the work the clock is
 * at its highest. */
ps_status ps__bench_idle(ps__bench *b, double seconds, double full) {
  double gain, rested;
  PS_TRY(rest(b, seconds, full, 1.0 / 12, &gain, &rested));
  b->hw->idle_gain = rested > 0 ? within_1(gain / rested) : 0;
  PS_TRY(rest(b, seconds, full, 1, &gain, &rested));
  b->hw->idle_most = within_1(gain);
  return PS_OK;
}

ps_status ps__bench_prepare(ps__bench *b) {
  bool fits;
  PS_TRY(prepare_attention(b, &attention_shapes[ATTENTION_USUAL], HEAD_DIM, &fits));
  return fits ? PS_OK
              : ps__fail(PS_EINTERNAL, "attention of %d rows takes more scratch than foreseen",
                         TOKENS);
}

ps_status ps__bench_attention(ps__bench *b, double seconds) {
  for (int i = 0; i < N_ATTENTION; i++)
    PS_TRY(measure_attention(b, i, seconds));
  PS_TRY(measure_heads64(b, seconds, ATTENTION_USUAL, PRODUCTS_SHARE,
                         &b->hw->heads64_attention_speed, &b->hw->heads64_attention_bwd_speed));
  return measure_heads64(b, seconds, ATTENTION_LONG, LONG_PRODUCTS_SHARE,
                         &b->hw->heads64_long_attention_speed,
                         &b->hw->heads64_long_attention_bwd_speed);
}

/* Heads above 256 have the plain kernels, which take so long that one short sequence serves. The
 * documents of the usual shape are written again. */
ps_status ps__bench_heads512(ps__bench *b, double seconds) {
  ps_attention_rate r = attention_shapes[ATTENTION_SHORT];
  bool fits = false;
  PS_TRY(time_attention(b, seconds, WIDE_HEAD_DIM, PRODUCTS_SHARE, &r, &fits));
  if (fits) {
    b->hw->heads512_attention_flops_per_s = r.forward_flops_per_s;
    b->hw->heads512_attention_bwd_flops_per_s = r.backward_flops_per_s;
  }
  return ps__bench_prepare(b);
}

uint64_t ps__bench_scratch(const ps_hardware *hw) {
  const ps__args_delta delta = delta_args(MOST_DELTA_HEADS);
  uint64_t most = ps_scratch_delta_bwd(&delta, NULL);
  for (int i = 0; i < 4 * N_ATTENTION; i++) {
    const ps__args_attention a =
        attention_args(&attention_shapes[i / 4], i / 2 % 2 ? NARROW_HEAD_DIM : HEAD_DIM);
    const uint64_t n =
        ps_scratch_attention(&a, i % 2, &(ps__scratch_target){.cudnn_version = hw->cudnn_version});
    if (n > most)
      most = n;
  }
  return most;
}
