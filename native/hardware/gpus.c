/* gpus.c - what is known of GPUs by their names: peaks, and the shares of them that training
 * reaches. Plans for a GPU that is not here take it all from this table. */
#include "hardware/hardware_impl.h"
#include <ctype.h>
#include <string.h>
#include <strings.h>

/* A host to plan for. Rates in GB/s. */
typedef struct host {
  const char *name;
  uint32_t n_cpus, gib;
  double memory, optimizer, optimizer_weights, optimizer_state, accumulate, accumulate_sumsq, sumsq,
      gather; /* 0: filled from the others */
} host;

/* 89.6 GB/s by clock and width. 0.7 of it is taken for copies and host ops together, and 0.63 of
 * that for the optimizer: assumed. */
static const host desktop = {.name = "a desktop with DDR5-5600 in two channels",
                             .n_cpus = 16,
                             .gib = 96,
                             .memory = 62.7,
                             .optimizer = 39.5};
/* Measured beside an H200 (docs/hardware-h200.json). */
static const host server = {
    "a server with 16 Xeon CPUs", 16, 128, 184.4, 139.6, 126.4, 136.6, 105.6, 100.8, 67.0, 222.2};

/* Shares of the dense bf16 peak that products in bf16, products in FP8 and attention reach. */
typedef struct shares {
  double products, products_fp8, attention, attention_bwd;
} shares;

/* Of a power-bound H200, sustained (bench/LOG.md). They serve where a row has none. */
static const shares usual = {0.66, 1.155, 0.55, 0.45};

/* The first entry whose words are all in the driver's name counts. A chip that shares a name with
 * another one has peak 0, which is unknown.
 *
 * Peaks are dense, in TFLOP/s, with fp32 accumulation; memory and the PCIe link (each way, by clock
 * and encoding) in GB/s. Sources: NVIDIA's data sheets and architecture white papers (H100 and H200
 * SXM, H100 PCIe and NVL, A100, L40S, RTX 6000 Ada; GeForce: those of Blackwell, Ada and Ampere).
 *
 * Shares are fitted, so that plans have the speed that others published for their trainings of the
 * whole state beside host memory. bench/described_gpus.py has the rows and their sources, and
 * prints the ratio of each. Those of the H100 are not fitted: the H200's were measured, and its
 * chip is the same. */
typedef struct gpu {
  const char *a, *b;
  double bf16;
  /* NULL: no plans for it by name */
  const char *key, *device_name;
  const host *host;
  uint32_t compute_capability, n_sms, gib;
  double memory, link;
  shares shares;
} gpu;

#define PEAK_ALONE(words, more_words, tflops) {.a = words, .b = more_words, .bf16 = tflops}
#define PLANNED(words, tflops, ...)           {words, "", tflops, __VA_ARGS__}
static const gpu gpus[] = {
    PEAK_ALONE("Laptop", "", 0),
    PEAK_ALONE("H200", "NVL", 835),
    PLANNED("H200", 989, "h200", "NVIDIA H200", &server, 90, 132, 141, 4814, 63,
            {0.68, 1.21, 0.60, 0.49}),
    PEAK_ALONE("GH200", "", 989),
    PEAK_ALONE("H100", "PCIe", 756),
    PEAK_ALONE("H100", "NVL", 835),
    PLANNED("H100", 989, "h100", "NVIDIA H100 80GB HBM3", &server, 90, 132, 80, 3350, 63,
            {0.68, 1.21, 0.60, 0.49}),
    PLANNED("A100", 312, "a100", "NVIDIA A100-SXM4-80GB", &server, 80, 108, 80, 2039, 31.5,
            {0.60, 0, 0.50, 0.41}),
    PEAK_ALONE("L40S", "", 362),
    PEAK_ALONE("RTX 6000 Ada", "", 364),
    PEAK_ALONE("RTX 5090 D", "", 0),
    PLANNED("RTX 5090", 209.5, "rtx5090", "NVIDIA GeForce RTX 5090", &desktop, 120, 170, 32, 1792,
            63, {0.95, 1.90, 0.62, 0.51}),
    PEAK_ALONE("RTX 4090 D", "", 0),
    PLANNED("RTX 4090", 165.2, "rtx4090", "NVIDIA GeForce RTX 4090", &desktop, 89, 128, 24, 1008,
            31.5, {0.79, 1.62, 0.70, 0.57}),
    PEAK_ALONE("RTX 3090 Ti", "", 80),
    PLANNED("RTX 3090", 71.2, "rtx3090", "NVIDIA GeForce RTX 3090", &desktop, 86, 82, 24, 936, 31.5,
            {0.85, 0, 0.70, 0.57}),
};
enum { N_GPUS = sizeof gpus / sizeof *gpus };

/* Whole words: "A100" is not in "RTX A1000". */
static bool has_words(const char *name, const char *words) {
  const size_t n = strlen(words);
  for (const char *at = strstr(name, words); at; at = *at ? strstr(at + 1, words) : NULL)
    if (n == 0 ||
        ((at == name || !isalnum((unsigned char)at[-1])) && !isalnum((unsigned char)at[n])))
      return true;
  return false;
}

static const gpu *find(const char *device_name) {
  for (const gpu *g = gpus; device_name && g < gpus + N_GPUS; g++)
    if (has_words(device_name, g->a) && has_words(device_name, g->b))
      return g;
  return NULL;
}

double ps_hardware_peak(const char *device_name) {
  const gpu *g = find(device_name);
  return g ? g->bf16 * 1e12 : 0;
}

/* Where a ceiling is unknown: 4096 FLOP a cycle and SM at 1.5 GHz, 8 GB/s of memory an SM (Hopper:
 * 24), a link of the GPU's time. Norms take 0.65 of the memory's bandwidth, copies 0.87 of the
 * link's, and 0.9 of that both ways at once, as an H200 does. */
void ps__hardware_estimate_gpu(ps_hardware *hw) {
  const gpu *g = find(hw->device_name);
  const shares *s = g && g->shares.products > 0 ? &g->shares : &usual;
  const double peak = hw->peak_flops_per_s > 0 ? hw->peak_flops_per_s : 4096 * 1.5e9 * hw->n_sms;
  hw->gemm_flops_per_s[PS_BF16] = s->products * peak;
  hw->gemm_flops_per_s[PS_F32] = 0.04 * peak;
  hw->gemm_fp8_flops_per_s = s->products_fp8 * peak;
  hw->attention_flops_per_s[PS_BF16] = hw->attention_flops_per_s[PS_F32] = s->attention * peak;
  hw->attention_bwd_flops_per_s[PS_BF16] = hw->attention_bwd_flops_per_s[PS_F32] =
      s->attention_bwd * peak;
  hw->elementwise_bytes_per_s = 8e9 * hw->n_sms * (hw->compute_capability == 90 ? 3 : 1);
  if (hw->device_peak_bytes_per_s > 0)
    hw->elementwise_bytes_per_s = 0.65 * hw->device_peak_bytes_per_s;
  const double link = hw->link_peak_bytes_per_s > 0  ? 0.87 * hw->link_peak_bytes_per_s
                      : hw->compute_capability >= 90 ? 50e9
                                                     : 24e9;
  hw->link[PS_LINK_H2D].bytes_per_s = hw->link[PS_LINK_D2H].bytes_per_s = link;
  hw->link[PS_LINK_H2D].duplex_bytes_per_s = 0.9 * link;
  hw->op_ns = 4000;
  hw->device_overhead_bytes = 1ull << 30;
}

/* ---- a GPU that is not here ------------------------------------------------------------------ */

/* Equal but for case, spaces, '-' and '_': "RTX 4090" is "rtx4090". */
static bool same_key(const char *given, const char *key) {
  for (; *given; given++) {
    if (strchr(" -_", *given))
      continue;
    if (tolower((unsigned char)*given) != *key++)
      return false;
  }
  return !*key;
}

static void describe_host(ps_hardware *hw, const host *h) {
  snprintf(hw->name, sizeof hw->name, "%s", h->name);
  hw->n_cpus = h->n_cpus;
  hw->n_threads = h->n_cpus - 2; /* as of a machine: two feed the GPU */
  hw->host_memory_bytes = (uint64_t)h->gib << 30;
  hw->memory_bytes_per_s = 1e9 * h->memory;
  hw->optimizer_bytes_per_s = 1e9 * h->optimizer;
  hw->optimizer_weights_bytes_per_s = 1e9 * h->optimizer_weights;
  hw->optimizer_state_bytes_per_s = 1e9 * h->optimizer_state;
  hw->accumulate_bytes_per_s = 1e9 * h->accumulate;
  hw->accumulate_sumsq_bytes_per_s = 1e9 * h->accumulate_sumsq;
  hw->sumsq_bytes_per_s = 1e9 * h->sumsq;
  hw->gather_bytes_per_s = 1e9 * h->gather;
}

ps_status ps_hardware_of_gpu(ps_hardware *out, const char *name) {
  if (!out || !name)
    return ps__fail(PS_EINVAL, "ps_hardware_of_gpu: out and name must be given");
  char known[256] = "";
  const gpu *found = NULL;
  for (const gpu *g = gpus; g < gpus + N_GPUS; g++) {
    if (!g->key)
      continue;
    found = same_key(name, g->key) ? g : found;
    const size_t n = strlen(known);
    snprintf(known + n, sizeof known - n, "%s%s", n ? ", " : "", g->key);
  }
  if (!found)
    return ps__fail(PS_EINVAL,
                    "%.64s: no GPU is known by this name: give one of %s, or plan by the file that "
                    "penstock profile writes on a machine that has the GPU",
                    name, known);
  ps_hardware hw = {.struct_bytes = sizeof hw,
                    .backend = PS_BACKEND_CUDA,
                    .measured = PS_ESTIMATED,
                    .compute_capability = found->compute_capability,
                    .n_sms = found->n_sms,
                    .cudnn_version = 91900,
                    .device_memory_bytes = (uint64_t)found->gib << 30,
                    .device_peak_bytes_per_s = 1e9 * found->memory,
                    .link_peak_bytes_per_s = 1e9 * found->link,
                    .peak_flops_per_s = 1e12 * found->bf16};
  snprintf(hw.device_name, sizeof hw.device_name, "%s", found->device_name);
  describe_host(&hw, found->host);
  ps__hardware_estimate_gpu(&hw);
  ps__hardware_complete(&hw);
  *out = hw;
  return PS_OK;
}
