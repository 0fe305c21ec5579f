/* hardware.c - the device that the options choose, and the machine's rates with what is told of
 * them. */
#include "cli/cli.h"

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

/* The options of the device as @ask has them, once they are checked. */
static int choose_device(ps_hardware_ask *ask, cli_device *d, bool quiet) {
  ask->backend = backend_of(d, quiet);
  ask->device = (uint32_t)d->gpu;
  if (d->gpu_given && ask->backend == PS_BACKEND_CPU)
    return cli_fail(CLI_REFUSED,
                    d->backend == CLI_BACKEND_CPU
                        ? "--gpu %llu and --backend cpu exclude each other: leave one of them out"
                        : "--gpu %llu: there is no GPU that can be used here (%s): leave --gpu out "
                          "to train on the CPU",
                    (unsigned long long)d->gpu, ps_hardware_n_gpus() ? "" : ps_last_error());
  if (d->threads) {
    ps_hardware facts;
    const ps_status st = ps_hardware_estimate(&facts, ask->backend, ask->device, 0);
    if (st != PS_OK)
      return cli_fail_status(st, true);
    cli_bound_threads(d, facts.n_cpus, quiet);
  }
  ask->n_threads = (uint32_t)d->threads;
  if (d->n_gpus > 1 && ask->backend == PS_BACKEND_CUDA &&
      ps_hardware_gpus_check(ask->device, (uint32_t)d->n_gpus) == PS_OK)
    ask->n_devices = (uint32_t)d->n_gpus; /* else a plan for other GPUs than these */
  return CLI_OK;
}

typedef struct told {
  bool quiet, not_kept;
} told;

static void tell(void *user, ps_hardware_note note, const char *line) {
  told *t = user;
  t->not_kept |= note == PS_HARDWARE_NOT_KEPT;
  if (!t->quiet || note == PS_HARDWARE_NOT_KEPT)
    fprintf(stderr, "penstock: %s\n", line);
}

static int get(ps_hardware *out, ps_hardware_ask *ask, cli_device *d, told *t) {
  ask->struct_bytes = sizeof *ask;
  ask->note = tell;
  ask->disk = d->disk;
  ask->user = t;
  const int code = choose_device(ask, d, t->quiet);
  if (code != CLI_OK)
    return code;
  const ps_status st = ps_hardware_get(out, ask);
  if (st == PS_OK && d->peak_tflops > 0)
    out->peak_flops_per_s = d->peak_tflops * 1e12;
  return st == PS_OK ? CLI_OK : cli_fail_status(st, true);
}

int cli_hardware_get(ps_hardware *out, cli_device *d, uint64_t device_bytes, uint64_t host_bytes,
                     bool fp8, const ps_model_config *model, bool quiet) {
  return get(out,
             &(ps_hardware_ask){.fp8 = fp8,
                                .model = model,
                                .device_mem_bytes = device_bytes,
                                .host_mem_bytes = host_bytes},
             d, &(told){.quiet = quiet});
}

int cli_hardware_measure(ps_hardware *out, cli_device *d, bool full, double seconds, bool *kept) {
  told t = {.quiet = false};
  const int code = get(
      out,
      &(ps_hardware_ask){.how = full ? PS_HARDWARE_IN_FULL : PS_HARDWARE_ANEW, .seconds = seconds},
      d, &t);
  *kept = code == CLI_OK && !t.not_kept;
  return code;
}
