/* plan.c - `penstock plan`: prints the plan that train would run under the given caps. */
#include "cli/cli.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* "least --device-mem under --host-mem 20.0 GiB: ..."; @bytes 0: no plan fits. */
static void print_least(const char *option, uint64_t bytes, const char *other, uint64_t cap) {
  char size[32], under[64];
  if (cap)
    snprintf(under, sizeof under, "under %s %s", other, cli_bytes(size, cap));
  else
    snprintf(under, sizeof under, "without %s", other);
  if (bytes)
    printf("least %s %s: %" PRIu64 " bytes (%s)\n", option, under, bytes, cli_bytes(size, bytes));
  else
    printf("least %s %s: no plan fits, whatever %s is\n", option, under, option);
}

static int print_smallest(cli_job *job) {
  uint64_t device, host;
  ps_status st = ps_plan_smallest(&job->config, &job->plan_config, &job->hardware, &device, &host);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  if (job->json) {
    cli_json j = {.out = stdout};
    cli_json_open(&j, NULL, '{');
    cli_json_count(&j, "smallest_device_bytes", device);
    cli_json_count(&j, "smallest_host_bytes", host);
    cli_json_close(&j, '}');
    putchar('\n');
  } else {
    print_least("--device-mem", device, "--host-mem", job->plan_config.host_mem_bytes);
    print_least("--host-mem", host, "--device-mem", job->plan_config.device_mem_bytes);
  }
  return CLI_OK;
}

/* What the plan needs of --data, and the share of targets. */
static int read_data(cli_job *job, double *targets) {
  ps_dataset *ds = NULL;
  int code = cli_open_data(job, &ds);
  job->records = job->data_marks_documents;
  if (code == CLI_OK)
    code = cli_defaults_tokens(job, ds);
  const ps_status st = code == CLI_OK ? ps_dataset_targets(ds, targets) : PS_OK;
  const int failed = st == PS_OK ? code : cli_fail_status(st, true);
  ps_dataset_close(ds);
  return failed;
}

/* What a single plan's search refuses, for tables of several. A ring takes any step. */
static int check_sequences(const cli_job *job) {
  const ps_plan_config *c = &job->plan_config;
  const bool ring = c->layout == PS_LAYOUT_RING ||
                    (c->layout == PS_LAYOUT_AUTO && job->config.n_layers >= c->n_devices);
  const ps_plan_report report = {.n_sequences = cli_step_tokens(c) / c->seq_len,
                                 .n_hosts = c->n_hosts,
                                 .n_devices = c->n_devices,
                                 .layout = ring ? PS_LAYOUT_RING : PS_LAYOUT_DATA_PARALLEL};
  char why[512];
  return cli_too_few_sequences(job, &report, why) ? cli_fail(CLI_REFUSED, "%s", why) : CLI_OK;
}

static const char about[] =
    "Searches for the fastest plan of a step under both caps and prints it: how the batch\n"
    "is cut, what stays on the device, what is streamed, what is recomputed, both memories,\n"
    "the predicted step time and what limits it. docs/plan.md explains each line. Reads\n"
    "only the model's config.json. Caps that are too small are refused, and the message\n"
    "says what is missing. A --host-mem above the machine's memory is planned for too.";

int cli_plan(int argc, char **argv) {
  cli_job job;
  cli_option options[CLI_MAX_OPTIONS];
  cli_job_init(&job);
  job.other_machine = true;
  const uint32_t n = cli_job_options(&job, options, false);
  cli_texts devices = {0}, hosts = {0}, pairs = {0}, gpus = {0};
  uint64_t n_hosts = 1;
  const cli_option own[] = {
      CLI_OPTION(CLI_H_TABLES, &job.smallest, .name = "smallest", .kind = CLI_FLAG,
                 .help = "print the least --device-mem that a plan fits in under --host-mem, and "
                         "the least --host-mem under --device-mem"),
      CLI_OPTION(CLI_H_MACHINE, &job.hardware_file, .name = "hardware", .kind = CLI_TEXT,
                 .value = "FILE",
                 .help = "plan for the machine that this file describes, such as "
                         "docs/hardware-h200.json; penstock profile writes such files"),
      CLI_OPTION(
          CLI_H_TABLES, &devices, .name = "grid-device", .kind = CLI_TEXTS, .value = "SIZE...",
          .help =
              "print a table of predicted tokens/s, with a column for each of these --device-mem; "
              "a cell shows the fastest plan found under its caps or smaller caps of the table"),
      CLI_OPTION(CLI_H_TABLES, &hosts, .name = "grid-host", .kind = CLI_TEXTS, .value = "SIZE...",
                 .help = "the --host-mem of the table's rows"),
      CLI_OPTION(CLI_H_MODEL, &job.data, .name = "data", .kind = CLI_TEXTS, .value = "SHARDS...",
                 .help = "plan for these token shards: whether masks mark documents in them; and "
                         "print how many of the tokens are targets"),
      CLI_OPTION(CLI_H_TABLES, &pairs, .name = "pairs", .kind = CLI_TEXTS,
                 .value = "DEVICE:HOST...",
                 .help = "print the plan under each pair of caps, such as 24GiB:84GiB or "
                         "none:84GiB, as one line of JSON each"),
      CLI_OPTION(
          CLI_H_HARDWARE, &gpus, .name = "gpus", .table = "run", .kind = CLI_TEXTS, .value = "N...",
          .help = "plan for N GPUs (default 1); of several numbers, such as 1,2,4,8, print a "
                  "table: tokens/s, what binds, memory, and the tokens a step that N GPUs need"),
      CLI_OPTION(CLI_H_MACHINE, &n_hosts, .name = "hosts", .kind = CLI_COUNT, .value = "M",
                 .least = 1, .most = PS_MAX_HOSTS,
                 .help = "plan for M hosts like this one, a task on each (default 1)"),
      CLI_OPTION(CLI_H_MACHINE, &job.gpu_model, .name = "gpu-model", .kind = CLI_TEXT,
                 .value = "NAME",
                 .help = "plan for a GPU that is not here: rtx3090, rtx4090, rtx5090, a100, h100 "
                         "or h200, by estimated rates; a GeForce is in a desktop with two channels "
                         "of DDR5, the others in a server"),
      {.name = NULL}};
  memcpy(options + n, own, sizeof own);
  const cli_command command = {
      .usage = "plan --model DIR --seq-len N [--device-mem SIZE] [--host-mem SIZE] [OPTIONS]",
      .about = about,
      .example =
          "penstock plan --model my_8B_model --seq-len 8192 --device-mem 24GiB --host-mem 96GiB",
      .options = options,
      .job = &job,
      .hint = cli_job_hint,
  };
  int code = cli_job_parse(&command, argc, argv);
  double targets = 0;
  uint32_t n_gpus[CLI_MAX_GPU_ROWS] = {1}, n_rows = 0;
  const bool other_table = job.smallest || devices.n || hosts.n || pairs.n;
  if (code == CLI_OK)
    code = cli_gpus_parse(&gpus, n_gpus, &n_rows);
  if (code == CLI_OK && n_rows > 1 && other_table)
    code = cli_fail(CLI_REFUSED, "--gpus with several numbers prints a table of its own: give one "
                                 "number, or leave out --smallest, --grid-* and --pairs");
  job.device.n_gpus = n_gpus[0];
  job.task.n_hosts = (uint32_t)n_hosts;
  if (code == CLI_OK)
    code = cli_job_check(&job);
  if (code == CLI_OK && job.data.n)
    code = read_data(&job, &targets);
  if (code == CLI_OK)
    code = cli_defaults_tokens(&job, NULL);
  if (code == CLI_OK)
    code = other_table || n_rows > 1 ? cli_job_prepare(&job) : cli_job_plan(&job);
  if (code == CLI_OK && other_table)
    code = check_sequences(&job);
  if (code == CLI_OK && n_rows > 1) {
    code = cli_plan_gpus(&job, n_gpus, n_rows);
  } else if (code == CLI_OK && pairs.n) {
    code = cli_plan_pairs(&job, &pairs);
  } else if (code == CLI_OK && (devices.n || hosts.n)) {
    code = cli_plan_grid(&job, &devices, &hosts);
  } else if (code == CLI_OK && job.smallest) {
    code = print_smallest(&job);
  } else if (code == CLI_OK && (job.json || !job.quiet)) {
    const char *text = job.json ? ps_plan_json(job.plan) : ps_plan_text(job.plan);
    code = text ? CLI_OK : cli_fail(CLI_FAILED, "out of memory");
    if (text && job.json)
      puts(text);
    else if (text)
      cli_put_lines(stdout, text);
    if (text && job.data.n && !job.json)
      printf("data             %.1f%% of the tokens are targets: %.0f of them a second\n",
             100 * targets, targets * job.report.tokens_per_step / job.report.step_s);
    if (text && job.device.n_gpus > 1 && !job.json) {
      cli_advice a;
      cli_advise(&a, &job.config, &job.hardware, &job.plan_config, &job.report, n_gpus[0]);
      cli_advice_print(&a);
    }
  }
  cli_job_free(&job);
  free(devices.item);
  free(hosts.item);
  free(pairs.item);
  free(gpus.item);
  return code < 0 ? CLI_OK : code;
}
