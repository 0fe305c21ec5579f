/* profile.c - `penstock profile`: measures this machine and caches the rates for plans. */
#include "cli/cli.h"
#include <limits.h>

static const char about[] =
    "Measures this machine's rates under load: matrix products and attention in the shapes\n"
    "of chunks, forward and backward; memory; copies each way, both ways, and beside host\n"
    "ops; the optimizer. Prints each rate beside the hardware's peak, and keeps them in\n"
    "$XDG_CACHE_HOME/penstock (or ~/.cache/penstock).\n"
    "plan and train read them there while machine, driver and libraries are the same.\n"
    "Beside a GPU this takes three quarters of the free host memory, since memory is not\n"
    "equally fast everywhere; with --quick it takes 4 GiB.";

int cli_profile(int argc, char **argv) {
  cli_device device = {0};
  double seconds = 0;
  bool json = false, quick = false;
  const cli_option options[] = {
      CLI_OPTION(CLI_H_HARDWARE, &device.backend, .name = "backend", .kind = CLI_CHOICE,
                 .value = "NAME", .choices = cli_backends,
                 .help = "cuda, cpu or auto, which is cuda where there is a GPU (default)"),
      CLI_OPTION(CLI_H_HARDWARE, &device.gpu, .name = "gpu", .kind = CLI_COUNT, .value = "N",
                 .most = CLI_MAX_GPU, .given = &device.gpu_given,
                 .help = "which of the visible GPUs (default 0)"),
      CLI_OPTION(CLI_H_HARDWARE, &device.threads, .name = "threads", .kind = CLI_COUNT,
                 .value = "N", .least = 1, .most = PS_MAX_THREADS,
                 .help = "threads of host ops (default: all CPUs, two less with a GPU)"),
      CLI_OPTION(
          CLI_H_MEASURING, &seconds, .name = "seconds", .kind = CLI_NUMBER, .value = "X",
          .least = 0.05, .most = 86400,
          .help =
              "duration of all measurements (default 5, with a GPU 125; with --quick 1 and 16)"),
      CLI_OPTION(CLI_H_MEASURING, &quick, .name = "quick", .kind = CLI_FLAG,
                 .help = "measure only what plans in bf16 need, as train does on first use"),
      CLI_OPTION(CLI_H_MEASURING, &device.disk, .name = "disk", .kind = CLI_TEXT,
                 .value = "DIR,DIR...",
                 .help = "also the drives of these directories, for train --disk: up to 256 GiB "
                         "are written in 20 s, with --quick 8 GiB in 3 s"),
      CLI_OPTION(CLI_H_OUTPUT, &json, .name = "json", .kind = CLI_FLAG,
                 .help = "print one JSON object on stdout"),
      {.name = NULL}};
  const cli_command command = {
      .usage = "profile [OPTIONS]",
      .about = about,
      .example = "penstock profile --seconds 20",
      .options = options,
      .hint = cli_job_hint,
  };
  int code = cli_parse(&command, argc, argv);
  if (code != CLI_OK)
    return code < 0 ? CLI_OK : code;
  ps_hardware hw;
  char path[PATH_MAX];
  bool kept;
  code = cli_hardware_measure(&hw, &device, !quick, seconds, &kept);
  if (code != CLI_OK)
    return code;
  if (json) {
    cli_json j = {.out = stdout};
    code = cli_hardware_json(&j, NULL, &hw);
    putchar('\n');
  } else {
    cli_hardware_table(stdout, &hw);
    if (kept && ps_hardware_cache_path(path, sizeof path, &hw) == PS_OK)
      printf("cached in %s\n", path);
  }
  return code;
}
