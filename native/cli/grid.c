/* grid.c - `penstock plan --grid-device ... --grid-host ...`: predicted tokens per second over caps of device and host memory. */
#include "cli.h"
#include <stdlib.h>
#include <string.h>

enum { MAX_SIDE = 16 };

static int parse_side(const cli_texts *texts, const char *option, uint64_t out[MAX_SIDE]) {
  if (texts->n > MAX_SIDE)
    return cli_fail(CLI_REFUSED, "--%s: %u sizes given, at most %d are taken", option, texts->n, MAX_SIDE);
  for (uint32_t i = 0; i < texts->n; i++)
    if (!cli_parse_bytes(texts->item[i], &out[i]) || out[i] == 0)
      return cli_fail(CLI_REFUSED, "--%s '%s' is no size: write 20GiB, 512MiB or 2e9", option, texts->item[i]);
  return CLI_OK;
}

/* Tokens per second of the fastest plan under both caps; 0 where none fits. */
static int predict(const cli_job *job, uint64_t device, uint64_t host, double *out) {
  ps_plan_config cfg = job->plan_config;
  ps_hardware hardware = job->hardware;
  ps_plan_report report = {.struct_bytes = sizeof report};
  ps_plan *plan = NULL;
  cfg.device_bytes = device;
  cfg.host_bytes = host;
  hardware.host_memory_bytes = 0; /* as for --host-mem: the machine planned for has what was given */
  ps_status st = ps_plan_create(&plan, &job->config, &cfg, &hardware);
  *out = 0;
  if (st == PS_EBUDGET)
    return CLI_OK;
  if (st == PS_OK)
    st = ps_plan_get_report(plan, &report);
  ps_plan_destroy(plan);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  *out = report.step_s > 0 ? (double)report.tokens_per_step / report.step_s : 0;
  return CLI_OK;
}

/* What the figures are of, for who sees the picture alone. */
static void subject_json(cli_json *j, const cli_job *job) {
  char model[256];
  snprintf(model, sizeof model, "%s", job->model);
  for (size_t n = strlen(model); n > 1 && model[n - 1] == '/'; n--)
    model[n - 1] = 0;
  const char *slash = strrchr(model, '/');
  cli_json_text(j, "model", slash && slash[1] ? slash + 1 : model);
  cli_json_text(j, "machine", job->hardware.device_name[0] ? job->hardware.device_name : job->hardware.name);
  cli_json_count(j, "seq_len", job->seq_len);
}

static void print_json(const cli_job *job, const double *rate, const uint64_t *device, uint32_t n_device, const uint64_t *host, uint32_t n_host) {
  cli_json j = {.out = stdout};
  cli_json_open(&j, NULL, '{');
  subject_json(&j, job);
  cli_json_open(&j, "device_bytes", '[');
  for (uint32_t d = 0; d < n_device; d++)
    cli_json_count(&j, NULL, device[d]);
  cli_json_close(&j, ']');
  cli_json_open(&j, "host_bytes", '[');
  for (uint32_t h = 0; h < n_host; h++)
    cli_json_count(&j, NULL, host[h]);
  cli_json_close(&j, ']');
  cli_json_open(&j, "tokens_per_s", '['); /* a row for each of host_bytes; 0: no plan fits */
  for (uint32_t h = 0; h < n_host; h++) {
    cli_json_open(&j, NULL, '[');
    for (uint32_t d = 0; d < n_device; d++)
      cli_json_number(&j, NULL, rate[h * n_device + d]);
    cli_json_close(&j, ']');
  }
  cli_json_close(&j, ']');
  cli_json_close(&j, '}');
  putchar('\n');
}

static void print_row(const char *head, uint32_t n_device, const double *rate) {
  printf("%14s", head);
  for (uint32_t d = 0; d < n_device; d++)
    if (rate[d] > 0)
      printf("%12.0f", rate[d]);
    else
      printf("%12s", "-");
  putchar('\n');
  fflush(stdout);
}

int cli_plan_grid(cli_job *job, const cli_texts *devices, const cli_texts *hosts) {
  uint64_t device[MAX_SIDE], host[MAX_SIDE];
  double rate[MAX_SIDE * MAX_SIDE];
  char text[32];
  if (!devices->n || !hosts->n)
    return cli_fail(CLI_REFUSED, "--grid-device and --grid-host go together: give the sizes of both");
  int code = parse_side(devices, "grid-device", device);
  if (code == CLI_OK)
    code = parse_side(hosts, "grid-host", host);
  cli_progress p;
  cli_progress_begin(&p, job);
  if (code == CLI_OK && !job->json) {
    printf("predicted tokens/s (columns: --device-mem, rows: --host-mem)\n%14s", "");
    for (uint32_t d = 0; d < devices->n; d++)
      printf("%12s", cli_bytes(text, device[d]));
    putchar('\n');
  }
  for (uint32_t h = 0; code == CLI_OK && h < hosts->n; h++) {
    for (uint32_t d = 0; code == CLI_OK && d < devices->n; d++) {
      cli_progress_count(&p, "plan", h * devices->n + d + 1, devices->n * hosts->n);
      code = predict(job, device[d], host[h], &rate[h * devices->n + d]);
    }
    cli_progress_clear(&p);
    if (code == CLI_OK && !job->json)
      print_row(cli_bytes(text, host[h]), devices->n, &rate[h * devices->n]);
  }
  if (code == CLI_OK && job->json)
    print_json(job, rate, device, devices->n, host, hosts->n);
  return code;
}
