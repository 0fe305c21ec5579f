/* pairs.c - `penstock plan --pairs DEVICE:HOST...`: the plan under each pair of caps, a JSON object
 * a line. A program reads each line while the next search runs. */
#include "cli/cli.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

typedef struct pair {
  uint64_t device, host; /* caps, BYTES; 0: none */
} pair;

static int parse_cap(const char *text, uint64_t *out) {
  *out = 0;
  return strcmp(text, "none") == 0 ? CLI_OK : cli_parse_size("--pairs", text, out);
}

static int parse_pair(const char *text, pair *out) {
  char *device = strdup(text);
  char *host = device ? strchr(device, ':') : NULL;
  int code = CLI_OK;
  if (!device)
    code = cli_fail(CLI_FAILED, "out of memory");
  else if (!host)
    code = cli_fail(CLI_REFUSED, "--pairs %s: give DEVICE:HOST, such as 24GiB:84GiB or 24GiB:none",
                    text);
  if (code == CLI_OK) {
    *host++ = 0;
    code = parse_cap(device, &out->device);
  }
  if (code == CLI_OK)
    code = parse_cap(host, &out->host);
  free(device);
  return code;
}

ps_status cli_plan_under(const cli_job *job, ps_evaluations *shared, uint64_t device_mem,
                         uint64_t host_mem, ps_plan **out, ps_plan_report *report) {
  ps_plan_config cfg = job->plan_config;
  ps_hardware hardware = job->hardware;
  cfg.device_mem_bytes = device_mem;
  cfg.host_mem_bytes = host_mem;
  /* the machine to plan for has at least the cap of host memory; 0: its memory is not checked */
  if (host_mem)
    hardware.host_memory_bytes = 0;
  else
    shared = NULL; /* the caps alone may differ */
  *report = (ps_plan_report){.struct_bytes = sizeof *report};
  ps_status st = shared ? ps_plan_create_sharing(out, shared, &job->config, &cfg, &hardware)
                        : ps_plan_create(out, &job->config, &cfg, &hardware);
  if (st == PS_OK && (st = ps_plan_get_report(*out, report)) != PS_OK) {
    ps_plan_destroy(*out);
    *out = NULL;
  }
  return st;
}

/* The line of a pair; @plan NULL: none fits, as ps_last_error() says. */
static int print_line(const cli_job *job, const pair *p, ps_plan *plan, const ps_plan_report *r) {
  const double most = r->step_s * r->n_devices * job->hardware.peak_flops_per_s;
  const char *text = plan ? ps_plan_json(plan) : "";
  cli_json j = {.out = stdout};
  if (!text)
    return cli_fail(CLI_FAILED, "out of memory");
  cli_json_open(&j, NULL, '{');
  cli_json_count(&j, "device_mem_bytes", p->device);
  cli_json_count(&j, "host_mem_bytes", p->host);
  if (!plan) {
    cli_json_text(&j, "refused", ps_last_error());
  } else {
    cli_json_number(&j, "predicted_mfu", most > 0 ? r->model_flops / most : 0);
    cli_json_number(&j, "predicted_hfu",
                    most > 0 ? (r->model_flops + r->recompute_flops) / most : 0);
    printf(", \"plan\": %s", text);
  }
  cli_json_close(&j, '}');
  putchar('\n');
  if (fflush(stdout) != 0)
    return cli_fail(CLI_FAILED, "stdout cannot be written: %s", strerror(errno));
  return CLI_OK;
}

static int plan_pair(const cli_job *job, ps_evaluations *shared, const pair *p) {
  ps_plan_report report;
  ps_plan *plan = NULL;
  const ps_status st = cli_plan_under(job, shared, p->device, p->host, &plan, &report);
  if (st != PS_OK && st != PS_EBUDGET)
    return cli_fail_status(st, true);
  const int code = print_line(job, p, plan, &report);
  ps_plan_destroy(plan);
  return code;
}

int cli_plan_pairs(cli_job *job, const cli_texts *pairs) {
  pair *p = calloc(pairs->n, sizeof *p);
  ps_evaluations *shared = NULL;
  int code = p ? CLI_OK : cli_fail(CLI_FAILED, "out of memory");
  for (uint32_t i = 0; code == CLI_OK && i < pairs->n; i++)
    code = parse_pair(pairs->item[i], &p[i]);
  if (code == CLI_OK && ps_evaluations_create(&shared) != PS_OK)
    code = cli_fail_status(PS_ENOMEM, true);
  for (uint32_t i = 0; code == CLI_OK && i < pairs->n; i++)
    code = plan_pair(job, shared, &p[i]);
  ps_evaluations_destroy(shared);
  free(p);
  return code;
}
