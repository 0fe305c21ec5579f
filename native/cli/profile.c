/* profile.c - `penstock profile`: measure this machine and cache the rates that plans rest on. */
#include "cli/cli.h"
#include <stdlib.h>

int cli_profile(int argc, char **argv) {
  cli_device device = {0};
  double seconds = 0;
  bool json = false, quick = false;
  const cli_option options[] = {
      {.name = "backend",
       .kind = CLI_CHOICE,
       .out = &device.backend,
       .value = "NAME",
       .choices = cli_backends,
       .help = "cuda, cpu or auto: cuda where there is a GPU (default)"},
      {.name = "gpu",
       .kind = CLI_COUNT,
       .out = &device.gpu,
       .given = &device.gpu_given,
       .value = "N",
       .most = CLI_MAX_GPU,
       .help = "which of the visible GPUs (default 0)"},
      {.name = "threads",
       .kind = CLI_COUNT,
       .out = &device.threads,
       .value = "N",
       .least = 1,
       .most = PS_MAX_THREADS,
       .help = "threads of host ops (default: all CPUs, beside a GPU two less)"},
      {.name = "seconds",
       .kind = CLI_NUMBER,
       .out = &seconds,
       .value = "X",
       .least = 0.05,
       .most = 86400,
       .help =
           "how long to measure in all (default 5, a GPU 125: 2.6 s a case; quick: 1, a GPU 16)"},
      {.name = "quick",
       .kind = CLI_FLAG,
       .out = &quick,
       .help = "only what plans rest on, in short: what train does on first use"},
      {.name = "json", .kind = CLI_FLAG, .out = &json, .help = "one JSON object on stdout"},
      {.name = NULL},
  };
  const cli_command command = {
      .usage = "profile [OPTIONS]",
      .about =
          "Measures an idle machine under load: products and attention in the shapes of chunks, "
          "forward and backward, memory, copies\n"
          "each way, together and beside products, the optimizer by threads, host memory. Prints "
          "them with their share of what the\n"
          "device could do at most, and keeps them in $XDG_CACHE_HOME/penstock (or "
          "~/.cache/penstock), where plan and train find them\n"
          "as long as the machine, the driver and the libraries are the same. Beside a GPU it "
          "takes three quarters of the free host\n"
          "memory for the time, since memory is not equally fast everywhere; --quick takes 4 GiB.",
      .example = "penstock profile --seconds 20",
      .options = options,
  };
  int code = cli_parse(&command, argc, argv);
  if (code != CLI_OK)
    return code < 0 ? CLI_OK : code;
  ps_hardware hw;
  char *cached_at = NULL;
  code = cli_hardware_measure(&hw, &device, !quick, seconds, &cached_at);
  if (code != CLI_OK)
    return code;
  if (json) {
    cli_json j = {.out = stdout};
    cli_hardware_json(&j, NULL, &hw);
    putchar('\n');
  } else {
    cli_hardware_table(stdout, &hw);
    if (cached_at)
      printf("cached in %s\n", cached_at);
  }
  free(cached_at);
  return CLI_OK;
}
