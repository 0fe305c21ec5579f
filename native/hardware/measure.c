/* measure.c - the host's rates, timed with the kernels themselves on realistic values. The GPU's
 * are timed by native/backends/cuda/measure.c. */
#include "hardware/hardware_impl.h"
#include "hardware/loads.h"
#include <stdlib.h>
#include <string.h>

typedef ps__host_bench bench;

/* Beside a GPU the host's ops are measured on buffers that no cache holds. A profile uses many sets
 * of them in turn: a machine's memory is not equally fast everywhere, and a run takes most of it.
 * On the CPU backend a profile is quick. */
enum { BUFFER = 48 << 20, LARGE_BUFFER = 1 << 30, SCRATCH = 96 << 20 };
/* Where memory is short, buffers are smaller. The least hold every case: gathered rows, and in one
 * half the fp32 gradients of 4,096 rows of keys and values. */
enum { LEAST_BUFFER = 8 << 20, LEAST_LARGE_BUFFER = 256 << 20 };

static uint64_t full_bytes(bool beside_gpu) { return beside_gpu ? LARGE_BUFFER : BUFFER; }

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

typedef ps__host_case_fn case_fn;

/* Seconds of a call. After one call to warm up, the sets are used in turn: as many calls as fit in
 * the time, at least three, and as many of each set. Of one set the median; of several, whose
 * memory may differ, the mean. */
static double time_case(bench *b, case_fn fn, const void *args) {
  double t[64], sum = 0;
  uint32_t n = 0;
  fn(b, args);
  const uint64_t begin = ps__now_ns();
  while (n < 64 && (n < 3 || n % b->n_sets || (double)(ps__now_ns() - begin) < b->seconds * 1e9)) {
    ps__host_use_set(b, n);
    const uint64_t t0 = ps__now_ns();
    fn(b, args);
    t[n] = (double)(ps__now_ns() - t0) * 1e-9;
    sum += t[n++];
  }
  ps__host_use_set(b, 0);
  qsort(t, n, sizeof *t, by_value);
  return b->n_sets > 1 ? sum / n : t[n / 2];
}

/* ---- the CPU backend's compute --------------------------------------------------------------- */

enum {
  OUT = 1536,
  IN = 512,
  HEADS = 4,
  KV_HEADS = 2,
  HEAD_DIM = 64,
  NORM_ROWS = 2048,
  NORM_COLS = 1024
};
static const uint32_t gemm_rows[] = {32, 128, 512, 1024};
static const ps_attention_rate attention_shapes[] = {
    {128, 128, 1, 0, 0, 0},   {512, 512, 1, 0, 0, 0},   {2048, 2048, 1, 0, 0, 0},
    {1024, 1024, 2, 0, 0, 0}, {1024, 1024, 8, 0, 0, 0}, {1024, 1024, 16, 0, 0, 0},
    {512, 1024, 1, 0, 0, 0},  {512, 2048, 1, 0, 0, 0},  {512, 4096, 1, 0, 0, 0}};
enum {
  N_GEMM = sizeof gemm_rows / sizeof *gemm_rows,
  N_ATTENTION = sizeof attention_shapes / sizeof *attention_shapes
};

static void case_gemm(bench *b, const void *args) {
  void *ptr[3] = {b->a, b->b, b->c};
  ps__host_launch(&b->exec, &ps__k_gemm, args, ptr, 3);
}

static double gemm_rate(bench *b, uint32_t m, uint32_t n, uint32_t k, bool trans_a, bool trans_b,
                        uint32_t dt) {
  const ps__args_gemm g = ps__gemm_args(m, n, k, trans_a, trans_b, dt);
  return 2.0 * m * n * k / time_case(b, case_gemm, &g);
}

/* q is in a, kv in b, documents and d_o in d, o and its log-sum-exp in c; gradients are in the
 * second halves of a and b. */
static void case_attention_fwd(bench *b, const void *args) {
  void *ptr[5] = {b->a, b->b, b->d, b->c, b->c + b->bytes / 2};
  ps__host_launch(&b->exec, &ps__k_attention_fwd, args, ptr, 5);
}
static void case_attention_bwd(bench *b, const void *args) {
  void *ptr[8] = {b->a,
                  b->b,
                  b->d,
                  b->c,
                  b->c + b->bytes / 2,
                  b->d + b->bytes / 2,
                  b->a + b->bytes / 2,
                  b->b + b->bytes / 2};
  ps__host_launch(&b->exec, &ps__k_attention_bwd, args, ptr, 8);
}

static void measure_attention(bench *b, ps_attention_rate *r, uint32_t dt) {
  const ps__args_attention a = {.n_tokens = r->rows,
                                .row0 = r->kv_rows - r->rows,
                                .n_heads = HEADS,
                                .n_kv_heads = KV_HEADS,
                                .head_dim = HEAD_DIM,
                                .dt = dt,
                                .document_rows = r->kv_rows / r->packed};
  const double length = (double)r->rows / r->packed, pairs = r->rows * (length / 2 + a.row0);
  int32_t *doc_start = (int32_t *)(void *)b->d;
  for (uint32_t i = 0; i < r->rows; i++)
    doc_start[i] = (int32_t)(i / (r->rows / r->packed) * (r->rows / r->packed));
  r->forward_flops_per_s = 4.0 * HEADS * HEAD_DIM * pairs / time_case(b, case_attention_fwd, &a);
  r->backward_flops_per_s = 10.0 * HEADS * HEAD_DIM * pairs / time_case(b, case_attention_bwd, &a);
}

/* Rows of as many key heads as there are threads, each with a value head, so that none waits: their
 * q, k and v are in a, the weights and d_o in b, one document in d. In c are o and the state, or
 * dqkv and the other gradients; in the second half of a the state's gradient. The backward pass
 * keeps 67 states in scratch, which with values of 64 take no more of it than products do. */
enum { DELTA_ROWS = 64, DELTA_KEY = 128, DELTA_VALUE = 64, DELTA_HEADS = 64 };
static void case_delta_fwd(bench *b, const void *args) {
  void *ptr[8] = {b->a, b->b, b->b, b->b, b->d, NULL, b->c, b->c + b->bytes / 2};
  ps__host_launch(&b->exec, &ps__k_delta_fwd, args, ptr, 8);
}
static void case_delta_bwd(bench *b, const void *args) {
  char *small = b->c + b->bytes / 2;
  void *ptr[12] = {b->a,
                   b->b,
                   b->b,
                   b->b,
                   b->d,
                   NULL,
                   b->b,
                   b->a + b->bytes / 2,
                   b->c,
                   small,
                   small + (1 << 20),
                   small + (2 << 20)};
  ps__host_launch(&b->exec, &ps__k_delta_bwd, args, ptr, 12);
}

/* Elements of states a second, of all threads. */
static double delta_rate(bench *b, uint32_t n_threads, case_fn run) {
  const uint32_t heads = n_threads < DELTA_HEADS ? n_threads : DELTA_HEADS;
  const ps__args_delta a = {.n_tokens = DELTA_ROWS,
                            .n_key_heads = heads,
                            .n_value_heads = heads,
                            .key_dim = DELTA_KEY,
                            .value_dim = DELTA_VALUE,
                            .dt = PS_BF16};
  memset(b->d, 0, DELTA_ROWS * sizeof(int32_t));
  return (double)DELTA_ROWS * n_threads * DELTA_KEY * DELTA_VALUE / time_case(b, run, &a);
}

static void case_elementwise(bench *b, const void *args) {
  void *ptr[3] = {b->a, b->b, b->c};
  ps__host_launch(&b->exec, &ps__k_rmsnorm_fwd, args, ptr, 3);
}

static void case_copy(bench *b, const void *args) { memcpy(b->c, b->a, b->bytes); }

static void measure_compute(bench *b, ps_hardware *hw) {
  const ps__args_rmsnorm norm = {.rows = NORM_ROWS, .cols = NORM_COLS, .dt = PS_F32, .eps = 1e-5f};
  ps_gemm_rate *gemm = hw->gemm[PS_BF16];
  ps_attention_rate *attention = hw->attention[PS_BF16];
  for (uint32_t i = 0; i < N_GEMM; i++) {
    const uint32_t rows = gemm_rows[i];
    gemm[i] = (ps_gemm_rate){rows, 0, gemm_rate(b, rows, OUT, IN, false, true, PS_BF16),
                             gemm_rate(b, rows, IN, OUT, false, false, PS_BF16),
                             gemm_rate(b, OUT, IN, rows, true, false, PS_BF16)};
  }
  hw->gemm_flops_per_s[PS_BF16] = gemm[N_GEMM - 1].forward_flops_per_s;
  hw->gemm_flops_per_s[PS_F32] = gemm_rate(b, 512, OUT, IN, false, true, PS_F32);
  for (uint32_t i = 0; i < N_ATTENTION; i++) {
    attention[i] = attention_shapes[i];
    measure_attention(b, &attention[i], PS_BF16);
  }
  ps_attention_rate fp32 = {512, 512, 1, 0, 0, 0};
  measure_attention(b, &fp32, PS_F32);
  hw->attention_flops_per_s[PS_F32] = fp32.forward_flops_per_s;
  hw->attention_bwd_flops_per_s[PS_F32] = fp32.backward_flops_per_s;
  hw->attention_flops_per_s[PS_BF16] = attention[1].forward_flops_per_s;
  hw->attention_bwd_flops_per_s[PS_BF16] = attention[1].backward_flops_per_s;
  hw->delta[0] = (ps_delta_rate){hw->n_threads, 0, delta_rate(b, hw->n_threads, case_delta_fwd),
                                 delta_rate(b, hw->n_threads, case_delta_bwd)};
  hw->elementwise_bytes_per_s = 8.0 * NORM_ROWS * NORM_COLS / time_case(b, case_elementwise, &norm);
  hw->link[PS_LINK_H2D].bytes_per_s = hw->link[PS_LINK_D2H].bytes_per_s =
      hw->link[PS_LINK_H2D].duplex_bytes_per_s = (double)b->bytes / time_case(b, case_copy, NULL);
  hw->op_ns = 3000;
}

/* ---- host ops, beside a GPU too -------------------------------------------------------------- */

static void copy_slice(void *arg, int64_t task, uint32_t worker) {
  const bench *b = arg;
  memcpy(b->c + (uint64_t)task * (b->bytes / 64), b->a + (uint64_t)task * (b->bytes / 64),
         b->bytes / 64);
}
static void case_memory(bench *b, const void *args) {
  ps__pool_run(b->exec.pool, 64, copy_slice, b);
}

static void case_optimizer(bench *b, const void *args) { ps__host_update(b, PS_UPDATE_WHOLE, 0); }
static void case_weights(bench *b, const void *args) { ps__host_update(b, PS_UPDATE_WEIGHTS, 0); }
static void case_state(bench *b, const void *args) { ps__host_update(b, PS_UPDATE_STATE, 0); }
static void case_8_bits(bench *b, const void *args) { ps__host_update(b, PS_UPDATE_WHOLE, 8); }
static double update_rate(bench *b, ps__update_part part, uint32_t state_bits, case_fn run) {
  const uint64_t n = b->bytes / ps_dtype_bytes(ps__host_dtype(b));
  const uint32_t row = ps__row_of(ps__host_recipe(b), state_bits);
  memset(b->c, 0, b->bytes); /* moments */
  memset(b->d, 0, b->bytes);
  return ps__update_bytes(PS_OPTIMIZER_ADAMW, row, part) * (double)n / time_case(b, run, NULL);
}

static void case_accumulate_sumsq(bench *b, const void *args) {
  void *ptr[3] = {b->b, b->a, b->c};
  ps__host_launch(&b->exec, &ps__k_accumulate_sumsq_host, args, ptr, 3);
}
static void case_sumsq(bench *b, const void *args) {
  void *ptr[2] = {b->b, b->c};
  ps__host_launch(&b->exec, &ps__k_sumsq_host, args, ptr, 2);
}
/* ---- rows gathered --------------------------------------------------------------------------- */

static void case_gather(bench *b, const void *args) {
  const ps__cpu_exec exec = {.pool = b->io};
  void *ptr[3] = {(void *)(uintptr_t)b->ids, b->a, b->c};
  ps__host_launch(&exec, &ps__k_embed_fwd, args, ptr, 3);
}

/* Random rows of a table that fills half a buffer. Beside a GPU the optimizer runs meanwhile, as it
 * does when the next step's rows are gathered, and its threads help. On the CPU backend the
 * simulator divides the CPUs. */
static ps_status measure_gather(bench *b, ps_hardware *hw) {
  const uint32_t dim = b->beside_gpu ? 4096 : 512, dt = ps__host_dtype(b);
  const uint64_t row = dim * ps_dtype_bytes((ps_dtype)dt);
  const ps__args_embed a = {.n_tokens = b->beside_gpu ? 8192 : 4096,
                            .vocab = (uint32_t)(b->bytes / 2 / row),
                            .dim = dim,
                            .dt = dt,
                            .pad = -1};
  int32_t *id = (int32_t *)(void *)b->d;
  uint64_t x = 1;
  for (uint32_t i = 0; i < a.n_tokens; i++) {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    id[i] = (int32_t)((x >> 33) % a.vocab);
  }
  b->ids = id;
  ps__load_loop l = {.whole = *b, .run = case_optimizer};
  if (b->beside_gpu) {
    ps__pool_share(b->io);
    ps__pool_help_first(b->exec.pool, b->io);
    PS_TRY(ps__load_start(&l));
  }
  hw->gather_bytes_per_s = 2.0 * a.n_tokens * (double)row / time_case(b, case_gather, &a);
  if (b->beside_gpu) {
    ps__load_stop(&l);
    ps__pool_help_first(b->exec.pool, NULL);
  }
  return PS_OK;
}

static ps_status measure_host(bench *b, ps_hardware *hw) {
  const uint32_t dt = ps__host_dtype(b);
  const uint64_t n = b->bytes / ps_dtype_bytes((ps_dtype)dt);
  const ps__args_accumulate sum = {.n = n, .dt = dt};
  const ps__args_sumsq squares = {.n = n, .dt = dt};
  if (!b->beside_gpu)
    hw->memory_bytes_per_s = 2.0 * (double)b->bytes / time_case(b, case_memory, NULL);
  PS_TRY(measure_gather(b, hw));
  hw->sumsq_bytes_per_s = (double)b->bytes / time_case(b, case_sumsq, &squares);
  hw->accumulate_bytes_per_s = 3.0 * (double)b->bytes / time_case(b, ps__host_accumulate, &sum);
  hw->accumulate_sumsq_bytes_per_s =
      3.0 * (double)b->bytes / time_case(b, case_accumulate_sumsq, &sum);
  hw->optimizer_8_bits_bytes_per_s = update_rate(b, PS_UPDATE_WHOLE, 8, case_8_bits);
  hw->optimizer_bytes_per_s = update_rate(b, PS_UPDATE_WHOLE, 0, case_optimizer);
  hw->optimizer_weights_bytes_per_s = update_rate(b, PS_UPDATE_WEIGHTS, 0, case_weights);
  hw->optimizer_state_bytes_per_s = update_rate(b, PS_UPDATE_STATE, 0, case_state);
  return PS_OK;
}

/* ---- all of it ------------------------------------------------------------------------------- */

/* Values as in a model, not zeros: like N(0, 0.02), from a small generator. A 32-bit word is a
 * small number in fp32 and two of them in bf16: its halves are equal. */
static void fill(char *p, uint64_t bytes, uint32_t seed) {
  uint32_t *word = (uint32_t *)(void *)p, x = seed * 2654435761u + 1;
  for (size_t i = 0; i < bytes / 4; i++) {
    x = x * 1664525u + 1013904223u;
    word[i] = 0x10001u * ps__f32_to_bf16(((float)(x >> 8) / 16777216.0f - 0.5f) * 0.07f);
  }
}

/* Cases that divide the time: the host's; on the CPU backend, those of its compute; with CUDA, the
 * GPU's. */
enum { HOST_CASES = 8, COMPUTE_CASES = 3 * N_GEMM + 1 + 2 * N_ATTENTION + 2 + 2 + 3 };

#ifdef PS_CUDA
/* Plans divide by what is left of the load's rate beside copies (cost.c), so the optimizer's rate
 * is that of the load alone. In two profiles of one machine the rate by itself was 6% below it and
 * 8% above it. */
static void optimizer_under_load(ps_hardware *hw) {
  for (const ps_contention_rate *r = hw->contention;
       r < hw->contention + PS_MAX_CONTENTION_RATES && r->kinds; r++)
    if (r->kinds == PS_CONTENTION_OPTIMIZER && r->host_bytes_per_s > 0) {
      const double longer = r->host_bytes_per_s / hw->optimizer_bytes_per_s;
      hw->optimizer_bytes_per_s *= longer;
      hw->optimizer_weights_bytes_per_s *= longer;
      hw->optimizer_state_bytes_per_s *= longer;
    }
}

/* The GPU's rates; and contention: what copies get of the host's memory beside each load. */
static ps_status measure_gpu(bench *b, ps_hardware *hw, bool profile) {
  ps__host_loads l;
  ps_status st = ps__host_loads_create(&l, b, hw->n_threads, PS__SUM_THREADS);
  const ps__host_work work = {{b->memory + 4 * b->bytes, b->set_bytes, b->n_sets}, l.load, l.n};
  if (st == PS_OK)
    st = ps__cuda_measure(hw, b->seconds, profile, &work);
  ps__host_loads_destroy(&l);
  if (st == PS_OK)
    optimizer_under_load(hw);
  return st;
}
#endif

static ps_status measure(bench *b, ps_hardware *hw, bool profile) {
  if (!b->beside_gpu)
    measure_compute(b, hw);
  PS_TRY(measure_host(b, hw));
#ifdef PS_CUDA
  if (b->beside_gpu)
    PS_TRY(measure_gpu(b, hw, profile));
#endif
  hw->measured = b->bytes < full_bytes(b->beside_gpu) ? PS_MEASURED_TIGHT : PS_MEASURED;
  return PS_OK;
}

/* Of a profile. Each pass measures everything, so that what other work does to a rate shows in one
 * pass and not in the median. */
enum { PASSES = 3 };

static ps_status measure_in_passes(bench *b, ps_hardware *hw, const ps_hardware_ask *ask) {
  const ps_hardware *of[PASSES];
  ps_hardware *pass = ps__calloc(PASSES, sizeof *pass);
  const char *key = "";
  ps_status st = pass ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for a machine's rates");
  for (int i = 0; st == PS_OK && i < PASSES; i++) {
    pass[i] = *hw;
    of[i] = &pass[i];
    st = measure(b, &pass[i], true);
  }
  if (st == PS_OK) {
    *hw = pass[PASSES - 1];
    ps__hardware_median(hw, of, PASSES);
    hw->moved_percent = (uint32_t)(100 * ps__hardware_moved(hw, pass, PASSES, &key) + 0.5);
    ps__hardware_note(ask, PS_HARDWARE_MOVED,
                      "rates moved by up to %u%% while they were measured (%s): the median of %d "
                      "passes counts",
                      hw->moved_percent, key, PASSES);
  }
  ps__free(pass);
  return st;
}

static double seconds_a_case(double seconds, bool beside_gpu, bool profile) {
  double cases = HOST_CASES;
#ifdef PS_CUDA
  if (beside_gpu)
    cases += PS__CUDA_CASES + PS__CUDA_CASES_A_LOAD * (PS__SUM_THREADS + 1) +
             (profile ? PS__CUDA_MORE_CASES : 0);
#endif
  return seconds / (profile ? PASSES : 1) / (beside_gpu ? cases : cases + COMPUTE_CASES);
}

/* ---- memory to measure in -------------------------------------------------------------------- */

enum { SET_PARTS = 64 };

/* Fills a part of a set after the first one: values as in the first, moments zero. */
static void fill_part(void *arg, int64_t task, uint32_t worker) {
  const bench *b = arg;
  const uint64_t part = 2 * b->bytes / SET_PARTS, at = (uint64_t)task % SET_PARTS * part;
  char *set = b->memory + (1 + (uint64_t)task / SET_PARTS) * b->set_bytes;
  (void)worker;
  memcpy(set + at, b->memory + at, part);
  memset(set + 2 * b->bytes + at, 0, part);
}

/* A profile beside a GPU takes three quarters of the memory that is free now; else one set is
 * taken. */
static uint32_t sets_of(const bench *b, bool profile) {
  if (!b->beside_gpu || !profile)
    return 1;
  const uint64_t n = ps__host_memory_free() / 4 * 3 / b->set_bytes;
  return n < 1 ? 1 : n > 63 ? 63 : (uint32_t)n; /* time_case() keeps 64 times */
}

static ps_status map_sets(bench *b, uint32_t device, bool profile) {
  b->set_bytes = 4 * b->bytes;
#ifdef PS_CUDA
  if (b->beside_gpu)
    b->set_bytes += 2ull * PS__COPY_BYTES;
#endif
  b->n_sets = sets_of(b, profile);
  PS_TRY(ps__map((void **)&b->memory, b->n_sets * b->set_bytes, "measuring the machine"));
#ifdef PS_CUDA
  if (b->beside_gpu)
    ps__cuda_place(device, b->memory, b->n_sets * b->set_bytes);
#else
  (void)device;
#endif
  ps__host_use_set(b, 0);
  fill(b->a, b->bytes, 1);
  fill(b->b, b->bytes, 2);
  fill(b->d, b->bytes < BUFFER ? b->bytes : BUFFER, 3);
  ps__pool_run(b->exec.pool, (int64_t)(b->n_sets - 1) * SET_PARTS, fill_part, b);
  return PS_OK;
}

enum { N_BUFFERS = 4 };

/* BYTES that measuring takes for buffers of @bytes each. Besides the buffers: packed panels and
 * the stack of each compute thread, and code that is touched first (7, 12 and 38 MB on 1, 2 and 8
 * threads). */
static uint64_t taken(const ps_hardware *hw, uint64_t bytes) {
  uint64_t sum = N_BUFFERS * bytes + (4 << 20) + hw->n_threads * (5ull << 20);
#ifdef PS_CUDA
  if (hw->backend == PS_BACKEND_CUDA)
    sum += 2ull * PS__COPY_BYTES;
#endif
  return sum;
}

static uint64_t in_full(const ps_hardware *hw) {
  return taken(hw, full_bytes(hw->backend == PS_BACKEND_CUDA));
}

uint64_t ps__hardware_room(uint64_t host_mem_bytes) {
  const uint64_t held = ps__resident_bytes(), free = ps__host_memory_free(),
                 within = host_mem_bytes > held ? host_mem_bytes - held : 0;
  return host_mem_bytes && within < free ? within : free;
}

bool ps__hardware_ample(const ps_hardware *hw, uint64_t host_mem_bytes) {
  return in_full(hw) <= ps__hardware_room(host_mem_bytes);
}

/* The full size where there is room, else what there is room for. */
static ps_status choose_buffer(uint64_t *bytes, const ps_hardware *hw, uint64_t host_mem_bytes) {
  const bool gpu = hw->backend == PS_BACKEND_CUDA;
  const uint64_t have = ps__hardware_room(host_mem_bytes), mib = 1 << 20,
                 least = gpu ? LEAST_LARGE_BUFFER : LEAST_BUFFER;
  char need[32], there[32];
  *bytes = full_bytes(gpu);
  if (in_full(hw) <= have)
    return PS_OK;
  if (taken(hw, least) > have)
    return ps__fail(PS_EBUDGET,
                    "measuring this machine takes %s of host memory at least, %s are left of what "
                    "is given or free",
                    ps__format_bytes(need, taken(hw, least)), ps__format_bytes(there, have));
  const uint64_t fits = (have - taken(hw, 0)) / N_BUFFERS / mib * mib;
  if (fits < *bytes)
    *bytes = fits;
  /* there is no room for all that is besides the buffers */
  if (*bytes == full_bytes(gpu))
    *bytes -= mib;
  return PS_OK;
}

uint64_t ps_hardware_measure_bytes(const ps_hardware *hw) {
#ifdef PS_CUDA
  if (hw && hw->backend == PS_BACKEND_CUDA)
    return ps__cuda_measure_bytes(hw);
#endif
  (void)hw;
  return 0;
}

static ps_status check_device(const ps_hardware *hw, uint64_t device_mem_bytes) {
  const uint64_t takes = ps_hardware_measure_bytes(hw);
  char need[32], given[32];
  if (ps__hardware_fits(takes, device_mem_bytes))
    return PS_OK;
  return ps__fail(PS_EBUDGET, "measuring this machine takes %s of device memory, %s are given",
                  ps__format_bytes(need, takes), ps__format_bytes(given, device_mem_bytes));
}

ps_status ps__hardware_measure(ps_hardware *out, const ps_hardware_ask *ask) {
  const bool profile = ask->how == PS_HARDWARE_IN_FULL;
  double seconds = ask->seconds;
  if (!out || !(seconds >= 0))
    return ps__fail(PS_EINVAL, "measuring a machine: out must be given and seconds not negative");
  ps_hardware hw;
  const ps__cpu_use before = ps__cpu_use_now();
  PS_TRY(ps__hardware_facts(&hw, ask->backend, ask->device, ask->n_threads));
  bench b = {.beside_gpu = ask->backend == PS_BACKEND_CUDA};
  if (!profile)
    PS_TRY(check_device(&hw, ask->device_mem_bytes));
  PS_TRY(choose_buffer(&b.bytes, &hw, ask->host_mem_bytes));
  if (ask->how == PS_HARDWARE_ONCE)
    ps__hardware_note(ask, PS_HARDWARE_MEASURES,
                      "measuring this machine once, which takes %s; penstock profile measures more",
                      b.beside_gpu ? "20 s to 2 minutes" : "a second or two");
  if (seconds == 0)
    seconds = b.beside_gpu ? (profile ? 125 : 16) : profile ? 5 : 1;
  b.seconds = seconds_a_case(seconds, b.beside_gpu, profile);
  char *scratch = NULL;
  const size_t scratch_bytes = (size_t)SCRATCH * hw.n_threads;
  ps_status st = ps__pool_create(&b.exec.pool, hw.n_threads, "measure");
  if (st == PS_OK)
    st = ps__pool_create(&b.io, ps__io_threads(hw.n_threads), "measure");
  if (st == PS_OK)
    st = ps__map((void **)&scratch, scratch_bytes, "measuring the machine");
  b.exec.scratch = scratch;
  b.exec.scratch_bytes = SCRATCH;
  if (st == PS_OK && !b.beside_gpu)
    st = ps__cpu_blas_ready(hw.n_threads);
  if (st == PS_OK)
    st = map_sets(&b, ask->device, profile);
  if (st == PS_OK)
    st = profile ? measure_in_passes(&b, &hw, ask) : measure(&b, &hw, false);
  hw.other_work_percent = ps__other_work_percent(&before);
  ps__hardware_complete(&hw); /* as a file of it is, read again */
  if (st == PS_OK)
    *out = hw;
  if (scratch)
    ps__unmap(scratch, scratch_bytes);
  if (b.memory)
    ps__unmap(b.memory, b.n_sets * b.set_bytes);
  ps__pool_destroy(b.exec.pool); /* first: its threads may still look at io's */
  ps__pool_destroy(b.io);
  return st;
}

/* ---- several GPUs ---------------------------------------------------------------------------- */

#ifdef PS_CUDA
/* For each GPU. Together more than a large cache holds. */
enum { GPU_PLACES = 4 };
static const double SECONDS_OF_GPUS = 0.4; /* of a case */

enum { TOUCH_TASKS = 64 };

typedef struct touch {
  char *p;
  uint64_t bytes;
} touch;

static void touch_task(void *arg, int64_t task, uint32_t worker) {
  const touch *t = arg;
  char *p = t->p + (uint64_t)task * (t->bytes / TOUCH_TASKS);
  for (uint64_t at = 0; at < t->bytes / TOUCH_TASKS; at += 4096)
    *(volatile char *)(p + at) = 0;
}

static void fill_places(const bench *b, const ps__host_places *at) {
  ps__pool_run(b->exec.pool, TOUCH_TASKS, touch_task, &(touch){at->first, at->n * at->stride});
  fill(at->first, at->stride, 4);
  for (uint32_t i = 1; i < at->n; i++)
    memcpy(at->first + i * at->stride, at->first, at->stride);
}

ps_status ps__hardware_measure_gpus(ps_hardware *hw, const ps_hardware_ask *ask) {
  const uint32_t n = ask->n_devices;
  ps__host_places at = {.stride = 2ull * PS__COPY_BYTES, .n = n * GPU_PLACES};
  const uint64_t places = at.n * at.stride, have = ps__hardware_room(ask->host_mem_bytes);
  char need[32], there[32];
  if (in_full(hw) + places > have) {
    ps__log(PS_LOG_WARN,
            "measuring %u GPUs at once takes %s of host memory, %s are left of what "
            "is given or free: plans take what is known of one GPU",
            n, ps__format_bytes(need, in_full(hw) + places), ps__format_bytes(there, have));
    return PS_OK;
  }
  ps__hardware_note(ask, PS_HARDWARE_MEASURES, "measuring %u GPUs at once, which takes up to 15 s",
                    n);
  bench b = {.beside_gpu = true, .bytes = full_bytes(true), .seconds = SECONDS_OF_GPUS};
  ps__host_loads l = {.n = 0};
  ps_status st = ps__pool_create(&b.exec.pool, hw->n_threads, "measure");
  if (st == PS_OK)
    st = map_sets(&b, hw->device, false);
  if (st == PS_OK)
    st = ps__map((void **)&at.first, places, "measuring the machine");
  if (st == PS_OK) {
    ps__cuda_place(hw->device, at.first, places);
    fill_places(&b, &at);
  }
  if (st == PS_OK)
    st = ps__host_loads_create(&l, &b, hw->n_threads, PS__SUM_THREADS);
  const ps__host_work work = {at, l.load, l.n};
  if (st == PS_OK)
    st = ps__cuda_measure_gpus(hw, n, b.seconds, &work);
  if (l.n)
    ps__host_loads_destroy(&l);
  if (at.first)
    ps__unmap(at.first, places);
  if (b.memory)
    ps__unmap(b.memory, b.n_sets * b.set_bytes);
  ps__pool_destroy(b.exec.pool);
  return st;
}
#endif

ps_status ps_hardware_measure(ps_hardware *out, uint32_t backend, uint32_t device,
                              uint32_t n_threads, uint64_t device_mem_bytes,
                              uint64_t host_mem_bytes, double seconds) {
  return ps__hardware_measure(out, &(ps_hardware_ask){.backend = backend,
                                                      .device = device,
                                                      .n_threads = n_threads,
                                                      .how = PS_HARDWARE_ANEW,
                                                      .device_mem_bytes = device_mem_bytes,
                                                      .host_mem_bytes = host_mem_bytes,
                                                      .seconds = seconds});
}

ps_status ps_hardware_profile(ps_hardware *out, uint32_t backend, uint32_t device,
                              uint32_t n_threads, uint64_t host_mem_bytes, double seconds) {
  return ps__hardware_measure(out, &(ps_hardware_ask){.backend = backend,
                                                      .device = device,
                                                      .n_threads = n_threads,
                                                      .how = PS_HARDWARE_IN_FULL,
                                                      .host_mem_bytes = host_mem_bytes,
                                                      .seconds = seconds});
}
