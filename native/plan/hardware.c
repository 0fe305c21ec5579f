/* hardware.c - rates of this machine: measured by running the kernels themselves, kept as JSON, or estimated. */
#include "plan_impl.h"
#include "../optim/optim.h"
#ifdef PS_CUDA
#include "../backends/cuda/probe.h"
#endif
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#define PS__NO_CUDA "this library was built without CUDA: install the CUDA toolkit (12.4 or newer) and run make CUDA=1, or use the cpu backend"

static void cpu_name(char *out, size_t room) {
  snprintf(out, room, "unknown CPU");
  FILE *f = fopen("/proc/cpuinfo", "r");
  char line[256];
  while (f && fgets(line, sizeof line, f)) {
    const char *colon = strchr(line, ':');
    if (strncmp(line, "model name", 10) != 0 || !colon) continue;
    snprintf(out, room, "%s", colon + 2);
    out[strcspn(out, "\n")] = 0;
    break;
  }
  if (f) fclose(f);
}

static ps_status fill_facts(ps_hardware *hw, uint32_t backend, uint32_t device, uint32_t n_threads) {
  memset(hw, 0, sizeof *hw);
  hw->struct_bytes = sizeof *hw;
  hw->backend = backend;
  hw->device = device;
  hw->n_cpus = ps__n_cpus();
  hw->n_threads = n_threads ? n_threads : backend == PS_BACKEND_CUDA && hw->n_cpus >= 4 ? hw->n_cpus - 2 : hw->n_cpus;
  hw->host_memory_bytes = ps__host_memory_limit();
  cpu_name(hw->name, sizeof hw->name);
  if (backend == PS_BACKEND_CPU) return PS_OK;
  if (backend != PS_BACKEND_CUDA) return ps__fail(PS_EINVAL, "backend %u is unknown", backend);
#ifdef PS_CUDA
  PS_TRY(ps__cuda_facts(hw));
  hw->peak_flops_per_s = ps_hardware_peak(hw->device_name);
  return PS_OK;
#else
  return ps__fail(PS_EDEVICE, PS__NO_CUDA);
#endif
}

uint32_t ps_hardware_n_gpus(void) {
#ifdef PS_CUDA
  return ps__cuda_n_devices();
#else
  (void)ps__fail(PS_EDEVICE, PS__NO_CUDA);
  return 0;
#endif
}

/* Whole words: "A100" is not in "RTX A1000". */
static bool has_words(const char *name, const char *words) {
  const size_t n = strlen(words);
  for (const char *at = strstr(name, words); at; at = *at ? strstr(at + 1, words) : NULL)
    if (n == 0 || ((at == name || !isalnum((unsigned char)at[-1])) && !isalnum((unsigned char)at[n]))) return true;
  return false;
}

/* Dense bf16 with fp32 accumulation, TFLOP/s, from NVIDIA's data sheets and architecture white papers (H100 and H200 SXM, H100 PCIe and NVL, A100, L40S, RTX 6000
 * Ada; GeForce: the white papers of Blackwell, Ada and Ampere). The first entry whose words are all in the name counts; what shares a name with another chip is
 * there as unknown. */
double ps_hardware_peak(const char *device_name) {
  static const struct { const char *a, *b; double tflops; } table[] = {
      {"Laptop", "", 0},      {"H200", "NVL", 835},   {"H200", "", 989},         {"GH200", "", 989},       {"H100", "PCIe", 756},
      {"H100", "NVL", 835},   {"H100", "", 989},      {"A100", "", 312},         {"L40S", "", 362},        {"RTX 6000 Ada", "", 364},
      {"RTX 5090 D", "", 0},  {"RTX 5090", "", 209.5}, {"RTX 4090 D", "", 0},    {"RTX 4090", "", 165.2},  {"RTX 3090 Ti", "", 80},
      {"RTX 3090", "", 71.2}};
  for (size_t i = 0; device_name && i < sizeof table / sizeof *table; i++)
    if (has_words(device_name, table[i].a) && has_words(device_name, table[i].b)) return table[i].tflops * 1e12;
  return 0;
}

/* A core of the last ten years does some 50 GFLOP/s in fp32 GEMM; one memory channel a pair of cores some 10 GB/s. */
static void estimate_cpu(ps_hardware *hw) {
  const double t = hw->n_threads;
  hw->gemm_flops_per_s[PS_F32] = hw->peak_flops_per_s = 50e9 * t;
  hw->gemm_flops_per_s[PS_BF16] = 40e9 * t;
  hw->attention_flops_per_s[PS_F32] = hw->attention_bwd_flops_per_s[PS_F32] = 25e9 * t;
  hw->attention_flops_per_s[PS_BF16] = hw->attention_bwd_flops_per_s[PS_BF16] = 20e9 * t;
  hw->elementwise_bytes_per_s = 0.7 * hw->memory_bytes_per_s;
  hw->h2d_bytes_per_s = hw->d2h_bytes_per_s = hw->duplex_bytes_per_s = 5e9;
  hw->op_ns = 3000;
}

/* Shares of the peak that a power-bound H200 reaches (bench/LOG.md); where the peak is unknown, 4096 FLOP a cycle and SM at 1.5 GHz. */
static void estimate_cuda(ps_hardware *hw) {
  const double peak = hw->peak_flops_per_s > 0 ? hw->peak_flops_per_s : 4096 * 1.5e9 * hw->n_sms;
  hw->gemm_flops_per_s[PS_BF16] = 0.66 * peak;
  hw->gemm_flops_per_s[PS_F32] = 0.04 * peak;
  hw->attention_flops_per_s[PS_BF16] = hw->attention_flops_per_s[PS_F32] = 0.55 * peak;
  hw->attention_bwd_flops_per_s[PS_BF16] = hw->attention_bwd_flops_per_s[PS_F32] = 0.45 * peak;
  hw->elementwise_bytes_per_s = 8e9 * hw->n_sms * (hw->compute_capability == 90 ? 3 : 1);
  hw->h2d_bytes_per_s = hw->d2h_bytes_per_s = hw->compute_capability >= 90 ? 50e9 : 24e9;
  hw->duplex_bytes_per_s = 0.9 * hw->h2d_bytes_per_s;
  hw->op_ns = 4000;
  hw->device_overhead_bytes = 1ull << 30;
}

ps_status ps_hardware_estimate(ps_hardware *out, uint32_t backend, uint32_t device, uint32_t n_threads) {
  if (!out) return ps__fail(PS_EINVAL, "ps_hardware_estimate: out is NULL");
  ps_hardware hw;
  PS_TRY(fill_facts(&hw, backend, device, n_threads));
  hw.memory_bytes_per_s = 10e9 * (1 + hw.n_threads / 2.0);
  hw.optimizer_bytes_per_s = 0.7 * hw.memory_bytes_per_s;
  if (backend == PS_BACKEND_CUDA) estimate_cuda(&hw);
  else estimate_cpu(&hw);
  *out = hw;
  return PS_OK;
}

/* ---- measuring ---------------------------------------------------------------------------------------------------------------- */

typedef struct bench {
  ps__cpu_exec exec;
  char *a, *b, *c, *d; /* four buffers */
  uint64_t bytes;      /* of each */
  double seconds;      /* for each case */
} bench;

/* Beside a GPU the host's ops are measured on buffers that no cache holds; on the CPU backend a profile is quick. */
enum { BUFFER = 48 << 20, LARGE_BUFFER = 1 << 30, SCRATCH = 96 << 20 };

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

typedef void (*case_fn)(bench *b, int which);

/* Median seconds of a call: one to warm up, then as many as fit in the time, at least three. */
static double time_case(bench *b, case_fn fn, int which) {
  double t[64];
  int n = 0;
  fn(b, which);
  const uint64_t begin = ps__now_ns();
  while (n < 64 && (n < 3 || (double)(ps__now_ns() - begin) < b->seconds * 1e9)) {
    const uint64_t t0 = ps__now_ns();
    fn(b, which);
    t[n++] = (double)(ps__now_ns() - t0) * 1e-9;
  }
  qsort(t, (size_t)n, sizeof *t, by_value);
  return t[n / 2];
}

static void launch(bench *b, const ps_kernel *k, const void *args, void *const *ptr, uint32_t n) {
  const ps_launch l = {.args = args, .ptr = ptr, .n_ptr = n, .exec = &b->exec};
  (void)k->fn[PS_BACKEND_CPU](&l);
}

enum { GEMM_M = 512, GEMM_N = 1536, GEMM_K = 512, ATT_T = 512, ATT_HEADS = 8, ATT_DIM = 64, EL_ROWS = 2048, EL_COLS = 1024 };

static void case_gemm(bench *b, int dt) {
  const ps__args_gemm g = ps__gemm_args(GEMM_M, GEMM_N, GEMM_K, false, true, (uint32_t)dt);
  void *ptr[3] = {b->a, b->b, b->c};
  launch(b, &ps__k_gemm, &g, ptr, 3);
}

static void case_attention(bench *b, int dt) {
  const ps__args_attention a = {.n_tokens = ATT_T, .n_heads = ATT_HEADS, .n_kv_heads = ATT_HEADS / 2, .head_dim = ATT_DIM, .dt = (uint32_t)dt};
  void *fwd[5] = {b->a, b->b, b->d, b->c, b->c + (BUFFER / 2)};
  launch(b, &ps__k_attention_fwd, &a, fwd, 5);
  void *bwd[8] = {b->a, b->b, b->d, b->c, b->c + (BUFFER / 2), b->a + (BUFFER / 2), b->b + (BUFFER / 2), b->d + (BUFFER / 2)};
  launch(b, &ps__k_attention_bwd, &a, bwd, 8);
}

static void case_elementwise(bench *b, int which) {
  (void)which;
  const ps__args_rmsnorm a = {.rows = EL_ROWS, .cols = EL_COLS, .dt = PS_F32, .eps = 1e-5f};
  void *ptr[3] = {b->a, b->b, b->c};
  launch(b, &ps__k_rmsnorm_fwd, &a, ptr, 3);
}

static void case_copy(bench *b, int which) {
  (void)which;
  memcpy(b->c, b->a, BUFFER);
}

static void copy_slice(void *arg, int64_t task, uint32_t worker) {
  bench *b = arg;
  (void)worker;
  memcpy(b->c + (uint64_t)task * (b->bytes / 64), b->a + (uint64_t)task * (b->bytes / 64), b->bytes / 64);
}

static void case_memory(bench *b, int which) {
  (void)which;
  ps__pool_run(b->exec.pool, 64, copy_slice, b);
}

static void case_optimizer(bench *b, int recipe) {
  const uint64_t n = b->bytes / (recipe == PS_RECIPE_BF16 ? 2 : 4);
  const ps__adamw_segment seg = {0, n, 0.1f};
  const ps__adamw_scalars s = {.lr = 1e-4f, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .grad_scale = 1, .c1 = 1, .c2 = 1, .seed = 1};
  ps__adamw_unit(b->exec.pool, (ps_recipe)recipe, &seg, 1, b->a, NULL, b->b, b->c, b->d, 0, &s);
}

/* Values as in a model, not zeros: N(0, 0.02)-like from a small generator. A 32-bit word is a small number in fp32 and two of them in bf16: its halves are
 * the same. */
static void fill(char *p, uint64_t bytes, uint32_t seed) {
  uint32_t *word = (uint32_t *)(void *)p, x = seed * 2654435761u + 1;
  for (size_t i = 0; i < bytes / 4; i++) {
    x = x * 1664525u + 1013904223u;
    word[i] = 0x10001u * ps__f32_to_bf16(((float)(x >> 8) / 16777216.0f - 0.5f) * 0.07f);
  }
}

static void measure_cpu(bench *b, ps_hardware *hw) {
  const double gemm = 2.0 * GEMM_M * GEMM_N * GEMM_K;
  const double attention = 14.0 * 0.5 * ATT_T * ATT_T * ATT_HEADS * ATT_DIM;
  for (int dt = 0; dt < PS_N_DTYPES; dt++) {
    memset(b->d, 0, BUFFER / 2); /* doc_start: one document */
    hw->gemm_flops_per_s[dt] = gemm / time_case(b, case_gemm, dt);
    hw->attention_flops_per_s[dt] = hw->attention_bwd_flops_per_s[dt] = attention / time_case(b, case_attention, dt);
  }
  hw->elementwise_bytes_per_s = 8.0 * EL_ROWS * EL_COLS / time_case(b, case_elementwise, 0);
  hw->h2d_bytes_per_s = hw->d2h_bytes_per_s = hw->duplex_bytes_per_s = (double)BUFFER / time_case(b, case_copy, 0);
  hw->peak_flops_per_s = hw->gemm_flops_per_s[PS_F32];
  hw->op_ns = 3000;
}

static void measure_host(bench *b, ps_hardware *hw) {
  hw->memory_bytes_per_s = 2.0 * (double)b->bytes / time_case(b, case_memory, 0);
  memset(b->c, 0, b->bytes); /* moments */
  memset(b->d, 0, b->bytes);
  const int recipe = hw->backend == PS_BACKEND_CUDA ? PS_RECIPE_BF16 : PS_RECIPE_FP32;
  hw->optimizer_bytes_per_s = 7.0 * (double)b->bytes / time_case(b, case_optimizer, recipe);
}

#ifdef PS_CUDA
/* A sixteenth of the bf16 optimizer's case: long enough to keep all threads busy, short enough to be counted. */
static void load_optimizer(void *arg) {
  bench part = *(bench *)arg;
  part.bytes /= 16;
  case_optimizer(&part, PS_RECIPE_BF16);
}
#endif

static ps_status measure(bench *b, ps_hardware *hw) {
  if (hw->backend == PS_BACKEND_CPU) measure_cpu(b, hw);
  measure_host(b, hw);
#ifdef PS_CUDA
  const ps__host_load load = {load_optimizer, b, 7.0 * (double)b->bytes / 16};
  if (hw->backend == PS_BACKEND_CUDA) PS_TRY(ps__cuda_measure(hw, 6 * b->seconds, &load));
#endif
  hw->measured = 1;
  return PS_OK;
}

ps_status ps_hardware_measure(ps_hardware *out, uint32_t backend, uint32_t device, uint32_t n_threads, double seconds) {
  if (!out || !(seconds > 0)) return ps__fail(PS_EINVAL, "ps_hardware_measure: out must be given and seconds positive");
  ps_hardware hw;
  PS_TRY(fill_facts(&hw, backend, device, n_threads));
  bench b = {.seconds = seconds / 9, .bytes = backend == PS_BACKEND_CUDA ? LARGE_BUFFER : BUFFER};
  char *buffers = NULL, *scratch = NULL;
  const size_t scratch_bytes = (size_t)SCRATCH * hw.n_threads;
  ps_status st = ps__pool_create(&b.exec.pool, hw.n_threads, "measure");
  if (st == PS_OK) st = ps__map((void **)&buffers, 4 * b.bytes, "measuring the machine");
  if (st == PS_OK) st = ps__map((void **)&scratch, scratch_bytes, "measuring the machine");
  if (st == PS_OK) {
    b.a = buffers;
    b.b = buffers + b.bytes;
    b.c = buffers + 2 * b.bytes;
    b.d = buffers + 3 * b.bytes;
    b.exec.scratch = scratch;
    b.exec.scratch_bytes = SCRATCH;
    fill(b.a, b.bytes, 1);
    fill(b.b, b.bytes, 2);
    fill(b.d, BUFFER, 3);
    st = measure(&b, &hw);
  }
  if (st == PS_OK) *out = hw;
  if (scratch) ps__unmap(scratch, scratch_bytes);
  if (buffers) ps__unmap(buffers, 4 * b.bytes);
  ps__pool_destroy(b.exec.pool);
  return st;
}

/* ---- as JSON --------------------------------------------------------------------------------------------------------------------- */

typedef struct rate_field { const char *name; size_t offset; } rate_field;
#define RATE(name, member) {name, offsetof(ps_hardware, member)}
static const rate_field rates[] = {
    RATE("gemm_fp32_flops_per_s", gemm_flops_per_s[PS_F32]), RATE("gemm_bf16_flops_per_s", gemm_flops_per_s[PS_BF16]),
    RATE("attention_fp32_flops_per_s", attention_flops_per_s[PS_F32]), RATE("attention_bf16_flops_per_s", attention_flops_per_s[PS_BF16]),
    RATE("attention_bwd_fp32_flops_per_s", attention_bwd_flops_per_s[PS_F32]), RATE("attention_bwd_bf16_flops_per_s", attention_bwd_flops_per_s[PS_BF16]),
    RATE("elementwise_bytes_per_s", elementwise_bytes_per_s), RATE("h2d_bytes_per_s", h2d_bytes_per_s), RATE("d2h_bytes_per_s", d2h_bytes_per_s),
    RATE("duplex_bytes_per_s", duplex_bytes_per_s),
    RATE("optimizer_bytes_per_s", optimizer_bytes_per_s), RATE("memory_bytes_per_s", memory_bytes_per_s), RATE("op_ns", op_ns)};
enum { N_RATES = sizeof rates / sizeof *rates };
static double *rate_at(ps_hardware *hw, int i) { return (double *)(void *)((char *)hw + rates[i].offset); }

/* Facts that fill_facts() finds on this machine, for one that is only described. */
typedef struct fact_field { const char *name; size_t offset, bytes; } fact_field;
#define FACT(member) {#member, offsetof(ps_hardware, member), sizeof ((ps_hardware *)0)->member}
static const fact_field facts[] = {FACT(backend), FACT(n_threads), FACT(n_cpus), FACT(compute_capability), FACT(n_sms), FACT(cudnn_version),
                                   FACT(host_memory_bytes), FACT(device_memory_bytes), FACT(device_overhead_bytes)};
enum { N_FACTS = sizeof facts / sizeof *facts };

static uint64_t fact(const ps_hardware *hw, int i) {
  const char *at = (const char *)hw + facts[i].offset;
  uint32_t small;
  uint64_t large;
  memcpy(&small, at, sizeof small);
  if (facts[i].bytes == sizeof small) return small;
  memcpy(&large, at, sizeof large);
  return large;
}

static void set_fact(ps_hardware *hw, int i, uint64_t value) {
  const uint32_t small = (uint32_t)value;
  memcpy((char *)hw + facts[i].offset, facts[i].bytes == sizeof small ? (const void *)&small : (const void *)&value, facts[i].bytes);
}

static ps_status read_rates(ps_hardware *hw, const ps__json *j, const char *path) {
  for (int i = 0; i < N_RATES; i++) {
    *rate_at(hw, i) = ps__json_number(ps__json_get(j, rates[i].name), 0);
    if (!(*rate_at(hw, i) > 0)) return ps__fail(PS_EFORMAT, "%s: %s is missing or not positive: run penstock profile", path, rates[i].name);
  }
  return PS_OK;
}

ps_status ps_hardware_describe(ps_hardware *out, const char *path) {
  if (!out || !path) return ps__fail(PS_EINVAL, "ps_hardware_describe: out and path must be given");
  ps__json *j = NULL;
  PS_TRY(ps__json_read_file(&j, path, 1 << 20));
  ps_hardware hw = {.struct_bytes = sizeof hw, .measured = 1};
  ps_status st = read_rates(&hw, j, path);
  for (int i = 0; st == PS_OK && i < N_FACTS; i++) {
    uint64_t value = 0;
    if (!ps__json_uint64(ps__json_get(j, facts[i].name), &value)) st = ps__fail(PS_EFORMAT, "%s: %s is missing or no whole number", path, facts[i].name);
    set_fact(&hw, i, value);
  }
  const char *name = ps__json_string(ps__json_get(j, "name"), NULL), *device = ps__json_string(ps__json_get(j, "device_name"), NULL);
  snprintf(hw.name, sizeof hw.name, "%s", name ? name : "");
  snprintf(hw.device_name, sizeof hw.device_name, "%s", device ? device : "");
  hw.peak_flops_per_s = ps__json_number(ps__json_get(j, "peak_flops_per_s"), 0);
  if (st == PS_OK && hw.backend >= PS_N_BACKENDS) st = ps__fail(PS_EFORMAT, "%s: backend %u is unknown", path, hw.backend);
  ps__json_free(j);
  if (st == PS_OK) *out = hw;
  return st;
}

/* The machine that a file's rates are of is this one. */
static bool same_machine(const ps__json *j, const ps_hardware *hw) {
  uint64_t cpus = 0, threads = 0;
  const char *name = ps__json_string(ps__json_get(j, "name"), NULL), *device = ps__json_string(ps__json_get(j, "device_name"), NULL);
  return name && strcmp(name, hw->name) == 0 && device && strcmp(device, hw->device_name) == 0 &&
         ps__json_uint64(ps__json_get(j, "n_cpus"), &cpus) && cpus == hw->n_cpus &&
         ps__json_uint64(ps__json_get(j, "n_threads"), &threads) && threads == hw->n_threads;
}

ps_status ps_hardware_read(ps_hardware *out, const char *path, uint32_t backend, uint32_t device, uint32_t n_threads) {
  if (!out || !path) return ps__fail(PS_EINVAL, "ps_hardware_read: out and path must be given");
  ps__json *j = NULL;
  PS_TRY(ps__json_read_file(&j, path, 1 << 20));
  ps_hardware hw;
  ps_status st = fill_facts(&hw, backend, device, n_threads);
  if (st == PS_OK && !same_machine(j, &hw))
    st = ps__fail(PS_ESTATE, "%s: measured on another machine or with other threads: run penstock profile", path);
  if (st == PS_OK) st = read_rates(&hw, j, path);
  if (st == PS_OK && backend == PS_BACKEND_CPU) hw.peak_flops_per_s = hw.gemm_flops_per_s[PS_F32];
  if (st == PS_OK && backend == PS_BACKEND_CUDA && !ps__json_uint64(ps__json_get(j, "device_overhead_bytes"), &hw.device_overhead_bytes))
    st = ps__fail(PS_EFORMAT, "%s: device_overhead_bytes is missing: run penstock profile", path);
  hw.measured = 1;
  ps__json_free(j);
  if (st == PS_OK) *out = hw;
  return st;
}

ps_status ps_hardware_write(const ps_hardware *hw, const char *path) {
  if (!hw || !path) return ps__fail(PS_EINVAL, "ps_hardware_write: hw and path must be given");
  ps__jsonw *w = NULL;
  PS_TRY(ps__jsonw_create(&w));
  ps_hardware copy = *hw;
  ps__jsonw_object(w, NULL);
  ps__jsonw_string(w, "name", hw->name);
  ps__jsonw_string(w, "device_name", hw->device_name);
  for (int i = 0; i < N_FACTS; i++) ps__jsonw_uint(w, facts[i].name, fact(hw, i));
  ps__jsonw_number(w, "peak_flops_per_s", hw->peak_flops_per_s);
  for (int i = 0; i < N_RATES; i++) ps__jsonw_number(w, rates[i].name, *rate_at(&copy, i));
  ps__jsonw_end(w);
  size_t n;
  const char *text = ps__jsonw_text(w, &n);
  ps_status st = PS_OK;
  const int fd = text ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644) : -1;
  if (!text) st = ps__fail(PS_ENOMEM, "out of memory for %s", path);
  else if (fd < 0) st = ps__fail(PS_EIO, "%s: %s", path, strerror(errno));
  else st = ps__write_all(fd, path, text, n);
  if (fd >= 0) close(fd);
  ps__jsonw_free(w);
  return st;
}
