/* hardware.c - this machine's rates: measured once, kept in the user's cache folder. */
#include "cli.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* A GPU reaches the clock that its power allows after some seconds of load. */
static const double CPU_SECONDS = 1, GPU_SECONDS = 8;

/* $XDG_CACHE_HOME/penstock or ~/.cache/penstock; NULL when there is neither. */
static char *cache_folder(void) {
  const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  if (xdg && xdg[0])
    return cli_path_join(xdg, "penstock");
  return home && home[0] ? cli_path_join(home, ".cache/penstock") : NULL;
}

/* hardware-CPU[-GPU]-THREADS.json in the cache folder, so that machines that share a home do not share figures. */
static char *cache_file(const ps_hardware *hw) {
  char machine[sizeof hw->name + sizeof hw->device_name], name[192] = "hardware-";
  size_t n = strlen(name);
  snprintf(machine, sizeof machine, "%s%s%s", hw->name, hw->device_name[0] ? " " : "", hw->device_name);
  for (const char *c = machine; *c && n < 160; c++)
    if (isalnum((unsigned char)*c))
      name[n++] = *c;
    else if (name[n - 1] != '-' || c == machine)
      name[n++] = '-';
  snprintf(name + n, sizeof name - n, "-%u.json", hw->n_threads);
  char *folder = cache_folder(), *path = folder ? cli_path_join(folder, name) : NULL;
  free(folder);
  return path;
}

/* Write @hw to the cache; where that fails the run goes on without. */
static char *keep(const ps_hardware *hw) {
  char *path = cache_file(hw), *folder = path ? strdup(path) : NULL;
  bool kept = false;
  if (folder) {
    *strrchr(folder, '/') = 0;
    kept = cli_folder_make(folder) == 0 && ps_hardware_write(hw, path) == PS_OK;
  }
  free(folder);
  if (kept)
    return path;
  free(path);
  return NULL;
}

const char *const cli_backends[] = {"auto", "cpu", "cuda", NULL};

static uint32_t backend_of(const cli_device *d) {
  if (d->backend == CLI_BACKEND_AUTO)
    return ps_hardware_n_gpus() ? PS_BACKEND_CUDA : PS_BACKEND_CPU;
  return d->backend == CLI_BACKEND_CUDA ? PS_BACKEND_CUDA : PS_BACKEND_CPU;
}

int cli_hardware_measure(ps_hardware *out, const cli_device *d, double seconds, char **cached_at) {
  out->struct_bytes = sizeof *out;
  uint32_t backend = backend_of(d);
  if (seconds <= 0)
    seconds = backend == PS_BACKEND_CUDA ? GPU_SECONDS : CPU_SECONDS;
  ps_status st = ps_hardware_measure(out, backend, (uint32_t)d->gpu, (uint32_t)d->threads, seconds);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  *cached_at = keep(out);
  return CLI_OK;
}

static int measure_quietly(ps_hardware *out, const cli_device *d, bool quiet) {
  char *cached_at = NULL;
  int code = cli_hardware_measure(out, d, 0, &cached_at);
  if (code == CLI_OK && !cached_at && !quiet)
    fprintf(stderr, "penstock: the figures could not be cached (set XDG_CACHE_HOME to a writable folder)\n");
  free(cached_at);
  return code;
}

int cli_hardware_get(ps_hardware *out, const cli_device *d, bool quiet) {
  out->struct_bytes = sizeof *out;
  uint32_t backend = backend_of(d);
  ps_status st = ps_hardware_estimate(out, backend, (uint32_t)d->gpu, (uint32_t)d->threads); /* names the machine */
  if (st != PS_OK)
    return cli_fail_status(st, true);
  char *path = cache_file(out);
  bool known = path && ps_hardware_read(out, path, backend, (uint32_t)d->gpu, (uint32_t)d->threads) == PS_OK;
  free(path);
  int code = CLI_OK;
  if (!known) {
    if (!quiet)
      fprintf(stderr, "penstock: measuring this machine, once, for about %.0f s\n", backend == PS_BACKEND_CUDA ? GPU_SECONDS : CPU_SECONDS);
    code = measure_quietly(out, d, quiet);
  }
  if (d->peak_tflops > 0)
    out->peak_flops_per_s = d->peak_tflops * 1e12;
  return code;
}

void cli_hardware_print(FILE *out, const ps_hardware *hw) {
  char memory[32], overhead[32];
  const bool gpu = hw->backend == PS_BACKEND_CUDA;
  if (gpu)
    fprintf(out, "%s, compute capability %u.%u, %u SMs, %s of memory, of which context and libraries take %s; %s\n", hw->device_name,
            hw->compute_capability / 10, hw->compute_capability % 10, hw->n_sms, cli_bytes(memory, hw->device_memory_bytes),
            cli_bytes(overhead, hw->device_overhead_bytes), hw->cudnn_version ? "with cuDNN" : "no cuDNN was found");
  fprintf(out, "%s, %u threads of %u CPUs, %s of memory (%s)\n", hw->name, hw->n_threads, hw->n_cpus,
          cli_bytes(memory, hw->host_memory_bytes), hw->measured ? "rates measured" : "rates estimated");
  fprintf(out, "  GEMM          %8.1f GFLOP/s fp32  %8.1f bf16\n", hw->gemm_flops_per_s[PS_F32] / 1e9, hw->gemm_flops_per_s[PS_BF16] / 1e9);
  fprintf(out, "  attention     %8.1f GFLOP/s forward, %8.1f backward in bf16\n", hw->attention_flops_per_s[PS_BF16] / 1e9,
          hw->attention_bwd_flops_per_s[PS_BF16] / 1e9);
  fprintf(out, "  elementwise   %8.1f GB/s\n  copies        %8.1f GB/s to the device, %.1f to the host, %.1f each way at once\n",
          hw->elementwise_bytes_per_s / 1e9, hw->h2d_bytes_per_s / 1e9, hw->d2h_bytes_per_s / 1e9, hw->duplex_bytes_per_s / 1e9);
  fprintf(out, "  optimizer     %8.1f GB/s\n  memory        %8.1f GB/s of the host, shared by copies and host ops\n", hw->optimizer_bytes_per_s / 1e9,
          hw->memory_bytes_per_s / 1e9);
  fprintf(out, "  cost of an op %8.1f us\n", hw->op_ns / 1e3);
  if (gpu && hw->peak_flops_per_s > 0)
    fprintf(out, "  peak          %8.1f TFLOP/s dense bf16, for MFU\n", hw->peak_flops_per_s / 1e12);
  else if (gpu)
    fprintf(out, "  peak          unknown for this GPU: MFU is not reported (--peak-tflops gives it)\n");
}

void cli_hardware_json(cli_json *j, const char *key, const ps_hardware *hw) {
  cli_json_open(j, key, '{');
  cli_json_text(j, "backend", hw->backend == PS_BACKEND_CUDA ? "cuda" : "cpu");
  cli_json_text(j, "name", hw->name);
  cli_json_text(j, "device_name", hw->device_name);
  cli_json_count(j, "n_threads", hw->n_threads);
  cli_json_count(j, "n_cpus", hw->n_cpus);
  cli_json_bool(j, "measured", hw->measured != 0);
  cli_json_count(j, "host_memory_bytes", hw->host_memory_bytes);
  cli_json_count(j, "device_memory_bytes", hw->device_memory_bytes);
  cli_json_count(j, "device_overhead_bytes", hw->device_overhead_bytes);
  cli_json_count(j, "compute_capability", hw->compute_capability);
  cli_json_count(j, "n_sms", hw->n_sms);
  cli_json_count(j, "cudnn_version", hw->cudnn_version);
  cli_json_number(j, "gemm_fp32_flops_per_s", hw->gemm_flops_per_s[PS_F32]);
  cli_json_number(j, "gemm_bf16_flops_per_s", hw->gemm_flops_per_s[PS_BF16]);
  cli_json_number(j, "attention_fp32_flops_per_s", hw->attention_flops_per_s[PS_F32]);
  cli_json_number(j, "attention_bf16_flops_per_s", hw->attention_flops_per_s[PS_BF16]);
  cli_json_number(j, "attention_bwd_bf16_flops_per_s", hw->attention_bwd_flops_per_s[PS_BF16]);
  cli_json_number(j, "elementwise_bytes_per_s", hw->elementwise_bytes_per_s);
  cli_json_number(j, "h2d_bytes_per_s", hw->h2d_bytes_per_s);
  cli_json_number(j, "d2h_bytes_per_s", hw->d2h_bytes_per_s);
  cli_json_number(j, "duplex_bytes_per_s", hw->duplex_bytes_per_s);
  cli_json_number(j, "optimizer_bytes_per_s", hw->optimizer_bytes_per_s);
  cli_json_number(j, "memory_bytes_per_s", hw->memory_bytes_per_s);
  cli_json_number(j, "op_ns", hw->op_ns);
  cli_json_number(j, "peak_flops_per_s", hw->peak_flops_per_s);
  cli_json_close(j, '}');
}
