/* hardware.c - this machine's rates: measured once, kept in the user's cache folder. */
#include "cli.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* $XDG_CACHE_HOME/penstock or ~/.cache/penstock; NULL when there is neither. */
static char *cache_folder(void) {
  const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  if (xdg && xdg[0])
    return cli_path_join(xdg, "penstock");
  return home && home[0] ? cli_path_join(home, ".cache/penstock") : NULL;
}

/* hardware-NAME-THREADS.json in the cache folder, so that machines that share a home do not share figures. */
static char *cache_file(const ps_hardware *hw) {
  char name[128] = "hardware-";
  size_t n = strlen(name);
  for (const char *c = hw->name; *c && n < 90; c++)
    if (isalnum((unsigned char)*c))
      name[n++] = *c;
    else if (name[n - 1] != '-' || c == hw->name)
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

int cli_hardware_measure(ps_hardware *out, uint32_t n_threads, double seconds, char **cached_at) {
  out->struct_bytes = sizeof *out;
  ps_status st = ps_hardware_measure(out, n_threads, seconds);
  if (st != PS_OK)
    return cli_fail_status(st, false);
  *cached_at = keep(out);
  return CLI_OK;
}

int cli_hardware_get(ps_hardware *out, uint32_t n_threads, bool quiet) {
  out->struct_bytes = sizeof *out;
  ps_status st = ps_hardware_estimate(out, n_threads); /* names the machine */
  if (st != PS_OK)
    return cli_fail_status(st, false);
  char *path = cache_file(out);
  bool known = path && ps_hardware_read(out, path, n_threads) == PS_OK;
  free(path);
  if (known)
    return CLI_OK;
  if (!quiet)
    fprintf(stderr, "penstock: measuring this machine, once, for about a second\n");
  char *cached_at = NULL;
  int code = cli_hardware_measure(out, n_threads, 1.0, &cached_at);
  if (code == CLI_OK && !cached_at && !quiet)
    fprintf(stderr, "penstock: the figures could not be cached (set XDG_CACHE_HOME to a writable folder)\n");
  free(cached_at);
  return code;
}

void cli_hardware_print(FILE *out, const ps_hardware *hw) {
  char memory[32];
  fprintf(out, "%s, %u threads of %u CPUs, %s of memory (%s)\n", hw->name, hw->n_threads, hw->n_cpus,
          cli_bytes(memory, hw->host_memory_bytes), hw->measured ? "rates measured" : "rates estimated");
  fprintf(out, "  GEMM          %8.1f GFLOP/s fp32  %8.1f bf16\n", hw->gemm_flops_per_s[PS_F32] / 1e9, hw->gemm_flops_per_s[PS_BF16] / 1e9);
  fprintf(out, "  attention     %8.1f GFLOP/s fp32  %8.1f bf16\n", hw->attention_flops_per_s[PS_F32] / 1e9,
          hw->attention_flops_per_s[PS_BF16] / 1e9);
  fprintf(out, "  elementwise   %8.1f GB/s\n  copy          %8.1f GB/s each way\n", hw->elementwise_bytes_per_s / 1e9,
          hw->copy_bytes_per_s / 1e9);
  fprintf(out, "  optimizer     %8.1f GB/s\n  memory        %8.1f GB/s shared by all\n", hw->optimizer_bytes_per_s / 1e9,
          hw->memory_bytes_per_s / 1e9);
  fprintf(out, "  cost of an op %8.1f us\n", hw->op_ns / 1e3);
}

void cli_hardware_json(cli_json *j, const char *key, const ps_hardware *hw) {
  cli_json_open(j, key, '{');
  cli_json_text(j, "name", hw->name);
  cli_json_count(j, "n_threads", hw->n_threads);
  cli_json_count(j, "n_cpus", hw->n_cpus);
  cli_json_bool(j, "measured", hw->measured != 0);
  cli_json_count(j, "host_memory_bytes", hw->host_memory_bytes);
  cli_json_number(j, "gemm_fp32_flops_per_s", hw->gemm_flops_per_s[PS_F32]);
  cli_json_number(j, "gemm_bf16_flops_per_s", hw->gemm_flops_per_s[PS_BF16]);
  cli_json_number(j, "attention_fp32_flops_per_s", hw->attention_flops_per_s[PS_F32]);
  cli_json_number(j, "attention_bf16_flops_per_s", hw->attention_flops_per_s[PS_BF16]);
  cli_json_number(j, "elementwise_bytes_per_s", hw->elementwise_bytes_per_s);
  cli_json_number(j, "copy_bytes_per_s", hw->copy_bytes_per_s);
  cli_json_number(j, "optimizer_bytes_per_s", hw->optimizer_bytes_per_s);
  cli_json_number(j, "memory_bytes_per_s", hw->memory_bytes_per_s);
  cli_json_number(j, "op_ns", hw->op_ns);
  cli_json_number(j, "peak_flops_per_s", hw->peak_flops_per_s);
  cli_json_close(j, '}');
}
