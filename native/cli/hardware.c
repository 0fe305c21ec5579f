/* hardware.c - measures this machine's rates once, and keeps them in the user's cache folder. There
 * rank 0 keeps the network's rate, too. */
#include "cli/cli.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* $XDG_CACHE_HOME/penstock or ~/.cache/penstock; NULL when there is neither. */
static char *cache_folder(void) {
  const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  if (xdg && xdg[0])
    return cli_path_join(xdg, "penstock");
  return home && home[0] ? cli_path_join(home, ".cache/penstock") : NULL;
}

/* The path of file @name in the cache folder; NULL: there is none. */
static char *path_in_cache(const char *name) {
  char *folder = cache_folder(), *path = folder ? cli_path_join(folder, name) : NULL;
  free(folder);
  return path;
}

/* hardware-CPU[-GPU]-THREADS.json in the cache folder. Machines that have one cache folder in
 * common thus keep their rates apart. */
static char *cache_file(const ps_hardware *hw) {
  char machine[sizeof hw->name + sizeof hw->device_name], name[192] = "hardware-";
  size_t n = strlen(name);
  snprintf(machine, sizeof machine, "%s%s%s", hw->name, hw->device_name[0] ? " " : "",
           hw->device_name);
  for (const char *c = machine; *c && n < 160; c++)
    if (isalnum((unsigned char)*c))
      name[n++] = *c;
    else if (name[n - 1] != '-' || c == machine)
      name[n++] = '-';
  snprintf(name + n, sizeof name - n, "-%u.json", hw->n_threads);
  return path_in_cache(name);
}

/* Say that @what, such as "the network's rate is", stays out of the cache, in which its file would
 * be @path. @failed: the errno of its folder, else 0, and ps_last_error() says why. */
static void warn_not_cached(const char *what, const char *path, int failed) {
  if (!path)
    fprintf(stderr, "penstock: %s not cached: set XDG_CACHE_HOME to a folder for the cache\n",
            what);
  else if (failed)
    fprintf(stderr,
            "penstock: %.*s: %s; %s not cached: set XDG_CACHE_HOME to a folder that can be "
            "written\n",
            (int)(strrchr(path, '/') - path), path, strerror(failed), what);
  else
    fprintf(stderr,
            "penstock: %s; %s not cached: set XDG_CACHE_HOME to a folder that can be written\n",
            ps_last_error(), what);
}

/* Write @hw to the cache, and return the file's path. Where that fails a line says why, and the run
 * goes on. */
static char *cache_rates(const ps_hardware *hw) {
  char *path = cache_file(hw);
  const int failed = path ? cli_folder_make_parent(path) : 0;
  if (path && !failed && ps_hardware_write(hw, path) == PS_OK)
    return path;
  warn_not_cached("this machine's rates are", path, failed);
  free(path);
  return NULL;
}

/* ---- the network ----------------------------------------------------------------------------- */

/* network-ID-TRANSPORT.json in the cache folder. */
static char *network_file(const char *id, uint32_t transport) {
  char name[64];
  snprintf(name, sizeof name, "network-%s-%s.json", id,
           transport == PS_TRANSPORT_NCCL ? "nccl" : "tcp");
  return path_in_cache(name);
}

double cli_network_kept(const char *id, uint32_t transport) {
  char *path = network_file(id, transport);
  double rate = 0;
  if (path)
    (void)ps_hosts_rate_read(&rate, path); /* a file that is broken or old is replaced later */
  free(path);
  return rate;
}

void cli_network_keep(const ps_hosts *h, const char *id, uint32_t transport, double bytes_per_s) {
  char *path = network_file(id, transport);
  const int failed = path ? cli_folder_make_parent(path) : 0;
  if (!path || failed || ps_hosts_rate_write(h, bytes_per_s, path) != PS_OK)
    warn_not_cached("the network's rate is", path, failed);
  free(path);
}

/* ---- this machine ---------------------------------------------------------------------------- */

const char *const cli_backends[] = {"auto", "cpu", "cuda", NULL};

static uint32_t backend_of(const cli_device *d, bool quiet) {
  if (d->backend == CLI_BACKEND_AUTO) {
    const char *why = ps_hardware_gpu_unused();
    if (why && !quiet)
      fprintf(stderr,
              "penstock: training on the CPU, as no GPU can be used: %s (--backend cpu leaves this "
              "line out)\n",
              why);
    return ps_hardware_n_gpus() ? PS_BACKEND_CUDA : PS_BACKEND_CPU;
  }
  return d->backend == CLI_BACKEND_CUDA ? PS_BACKEND_CUDA : PS_BACKEND_CPU;
}

bool cli_on_gpu(const cli_device *d) { return backend_of(d, true) == PS_BACKEND_CUDA; }

void cli_bound_threads(cli_device *d, uint32_t n_cpus, bool quiet) {
  if (d->threads <= n_cpus)
    return;
  if (!quiet)
    fprintf(stderr,
            "penstock: --threads %llu is more than the %u CPUs of this machine: %u are used\n",
            (unsigned long long)d->threads, n_cpus, n_cpus);
  d->threads = n_cpus;
}

int cli_gpus_check(const cli_device *d) {
  const unsigned long long n = d->n_gpus;
  if (n < 2 || d->backend == CLI_BACKEND_CPU)
    return CLI_OK;
  if (backend_of(d, true) == PS_BACKEND_CPU)
    return cli_fail(CLI_REFUSED,
                    "--gpus %llu: there is no GPU that can be used here: give --gpus 1, or "
                    "--backend cpu, which has an arena in place of each GPU",
                    n);
  if (d->gpu_given)
    return cli_fail(CLI_REFUSED,
                    "--gpu %llu and --gpus %llu exclude each other: several GPUs are the first "
                    "ones that CUDA_VISIBLE_DEVICES leaves visible",
                    (unsigned long long)d->gpu, n);
  const ps_status st = ps_hardware_gpus_check(0, (uint32_t)n);
  return st == PS_OK ? CLI_OK : cli_fail(CLI_REFUSED, "--gpus %llu: %s", n, ps_last_error());
}

/* Whether the cap of device memory allows measuring. */
static bool may_measure(const ps_hardware *hw, uint64_t device_bytes) {
  return !device_bytes || ps_hardware_measure_bytes(hw) <= device_bytes;
}

/* The rates of several GPUs together, measured once and kept like the others. */
static int add_peers(ps_hardware *hw, const cli_device *d, uint64_t device_bytes,
                     uint64_t host_bytes, bool quiet) {
  const double peers = hw->peer_bytes_per_s, speed = hw->gpus_compute_speed;
  const uint32_t n_gpus = hw->n_gpus;
  if (!quiet && may_measure(hw, device_bytes) && (n_gpus != d->n_gpus || !(speed > 0)))
    fprintf(stderr, "penstock: measuring %llu GPUs at once, which takes up to 15 s\n",
            (unsigned long long)d->n_gpus);
  const ps_status st = ps_hardware_peers(hw, (uint32_t)d->n_gpus, device_bytes, host_bytes);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  if (hw->measured &&
      (hw->peer_bytes_per_s != peers || hw->n_gpus != n_gpus || hw->gpus_compute_speed != speed))
    free(cache_rates(hw));
  return CLI_OK;
}

/* FP8's rates, measured when a plan first needs them and kept like the others. */
static int add_fp8(ps_hardware *hw, uint64_t device_bytes, uint64_t host_bytes, bool quiet) {
  if (!ps_hardware_lacks_fp8(hw))
    return CLI_OK;
  if (!quiet && may_measure(hw, device_bytes))
    fprintf(stderr,
            "penstock: measuring this GPU's FP8 products once, which takes 10 s to a minute\n");
  const ps_status st = ps_hardware_fp8(hw, device_bytes, host_bytes);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  if (!ps_hardware_lacks_fp8(hw))
    free(cache_rates(hw));
  return CLI_OK;
}

/* The machine's description with estimated rates. The device's options are checked against it. */
static int find_machine(ps_hardware *out, cli_device *d, bool quiet, uint32_t *backend) {
  out->struct_bytes = sizeof *out;
  *backend = backend_of(d, quiet);
  if (d->gpu_given && *backend == PS_BACKEND_CPU)
    return cli_fail(CLI_REFUSED,
                    d->backend == CLI_BACKEND_CPU
                        ? "--gpu %llu and --backend cpu exclude each other: leave one of them out"
                        : "--gpu %llu: there is no GPU that can be used here (%s): leave --gpu out "
                          "to train on the CPU",
                    (unsigned long long)d->gpu, ps_hardware_n_gpus() ? "" : ps_last_error());
  ps_status st = ps_hardware_estimate(out, *backend, (uint32_t)d->gpu, 0);
  if (st == PS_OK && d->threads) {
    cli_bound_threads(d, out->n_cpus, quiet);
    st = ps_hardware_estimate(out, *backend, (uint32_t)d->gpu, (uint32_t)d->threads);
  }
  return st == PS_OK ? CLI_OK : cli_fail_status(st, true);
}

/* ---- measuring ------------------------------------------------------------------------------- */

static void warn_of_other_work(const ps_hardware *hw) {
  if (hw->other_work_percent)
    fprintf(stderr,
            "penstock: other work took %u%% of this machine's CPUs while it was measured: its "
            "rates are too low, run penstock profile when it is idle\n",
            hw->other_work_percent);
}

static ps_status measure(ps_hardware *out, const cli_device *d, uint32_t backend,
                         uint64_t device_bytes, uint64_t host_bytes, bool full, double seconds,
                         bool quiet, char **cached_at) {
  out->struct_bytes = sizeof *out;
  const uint32_t gpu = (uint32_t)d->gpu, threads = (uint32_t)d->threads;
  const ps_status st =
      full ? ps_hardware_profile(out, backend, gpu, threads, host_bytes, seconds)
           : ps_hardware_measure(out, backend, gpu, threads, device_bytes, host_bytes, seconds);
  if (st == PS_OK && !quiet)
    warn_of_other_work(out);
  if (st == PS_OK)
    *cached_at = cache_rates(out);
  return st;
}

int cli_hardware_measure(ps_hardware *out, cli_device *d, bool full, double seconds,
                         char **cached_at) {
  uint32_t backend;
  int code = find_machine(out, d, false, &backend);
  if (code != CLI_OK)
    return code;
  const ps_status st = measure(out, d, backend, 0, 0, full, seconds, false, cached_at);
  return st == PS_OK ? CLI_OK : cli_fail_status(st, true);
}

/* Read this machine's rates from the cache. Rates that were measured with small buffers, for lack
 * of memory, count only while there is no more memory, or none may be measured. */
static bool cached_rates(ps_hardware *out, const cli_device *d, uint32_t backend,
                         uint64_t device_bytes, uint64_t host_bytes) {
  char *path = cache_file(out);
  ps_hardware hw = {.struct_bytes = sizeof hw};
  const bool ok =
      path &&
      ps_hardware_read(&hw, path, backend, (uint32_t)d->gpu, (uint32_t)d->threads) == PS_OK &&
      (hw.measured != PS_MEASURED_TIGHT || !ps_hardware_ample(&hw, host_bytes) ||
       !may_measure(&hw, device_bytes));
  if (ok)
    *out = hw;
  free(path);
  return ok;
}

int cli_hardware_get(ps_hardware *out, cli_device *d, uint64_t device_bytes, uint64_t host_bytes,
                     bool fp8, bool quiet) {
  uint32_t backend;
  int code = find_machine(out, d, quiet, &backend);
  if (code != CLI_OK)
    return code;
  if (!cached_rates(out, d, backend, device_bytes, host_bytes)) {
    char *cached_at = NULL;
    if (!quiet && may_measure(out, device_bytes))
      fprintf(
          stderr,
          "penstock: measuring this machine once, which takes %s; penstock profile measures more\n",
          backend == PS_BACKEND_CUDA ? "20 s to 2 minutes" : "a second or two");
    const ps_status st =
        measure(out, d, backend, device_bytes, host_bytes, false, 0, quiet, &cached_at);
    free(cached_at);
    if (st == PS_EBUDGET && !quiet) /* @out still has the estimated rates */
      fprintf(stderr,
              "penstock: %s: rates are estimated; penstock profile measures them without a cap\n",
              ps_last_error());
    if (st != PS_OK && st != PS_EBUDGET)
      return cli_fail_status(st, true);
  }
  if (fp8)
    code = add_fp8(out, device_bytes, host_bytes, quiet);
  if (code == CLI_OK && d->n_gpus > 1 && backend == PS_BACKEND_CUDA &&
      ps_hardware_gpus_check((uint32_t)d->gpu, (uint32_t)d->n_gpus) == PS_OK)
    code = add_peers(out, d, device_bytes, host_bytes, quiet);
  if (d->peak_tflops > 0)
    out->peak_flops_per_s = d->peak_tflops * 1e12;
  return code;
}
