/* grid.c - `penstock plan --grid-device ... --grid-host ...`: predicted tokens per second over
 * caps of device and host memory. */
#include "cli/cli.h"
#include <math.h>
#include <string.h>

enum { MAX_SIDE = 16 };

typedef struct grid {
  uint64_t device[MAX_SIDE], host[MAX_SIDE]; /* as given */
  uint32_t n_device, n_host;
  cli_cell cell[MAX_SIDE * MAX_SIDE]; /* a row for each of host */
} grid;

static const cli_cell *shown(const grid *g, uint32_t h, uint32_t d) {
  return &g->cell[g->cell[h * g->n_device + d].idx_from];
}

static int parse_side(const cli_texts *texts, const char *option, uint64_t out[MAX_SIDE]) {
  if (texts->n > MAX_SIDE)
    return cli_fail(CLI_REFUSED, "--%s: %u sizes given, at most %d are taken", option, texts->n,
                    MAX_SIDE);
  char label[32];
  int code = CLI_OK;
  snprintf(label, sizeof label, "--%s", option);
  for (uint32_t i = 0; i < texts->n && code == CLI_OK; i++)
    code = cli_parse_size(label, texts->item[i], &out[i]);
  return code;
}

/* Search a plan under a cell's caps. */
static int search(const cli_job *job, ps_evaluations *shared, cli_cell *cell) {
  ps_plan_report report;
  ps_plan *plan = NULL;
  const ps_status st =
      cli_plan_under(job, shared, cell->device_mem_bytes, cell->host_mem_bytes, &plan, &report);
  if (st == PS_EBUDGET)
    return CLI_OK;
  ps_plan_destroy(plan);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  cell->searched = report.step_s > 0 ? (double)report.tokens_per_step / report.step_s : 0;
  return CLI_OK;
}

/* The model and the machine of the figures. A picture drawn from them names both. */
void cli_subject_json(cli_json *j, const cli_job *job) {
  char model[256];
  snprintf(model, sizeof model, "%s", job->model);
  for (size_t n = strlen(model); n > 1 && model[n - 1] == '/'; n--)
    model[n - 1] = 0;
  const char *slash = strrchr(model, '/');
  cli_json_text(j, "model", slash && slash[1] ? slash + 1 : model);
  cli_json_text(j, "machine",
                job->hardware.device_name[0] ? job->hardware.device_name : job->hardware.name);
  cli_json_count(j, "seq_len", job->plan_config.seq_len);
  if (job->plan_config.n_hosts > 1) {
    cli_json_count(j, "n_hosts", job->plan_config.n_hosts);
    cli_json_number(j, "network_bytes_per_s", job->hardware.link[PS_LINK_NETWORK].bytes_per_s);
  }
}

static void found_under_json(cli_json *j, const cli_cell *cell) {
  if (cell->searched <= 0) {
    cli_json_number(j, NULL, NAN); /* null */
    return;
  }
  cli_json_open(j, NULL, '{');
  cli_json_count(j, "device_mem_bytes", cell->device_mem_bytes);
  cli_json_count(j, "host_mem_bytes", cell->host_mem_bytes);
  cli_json_close(j, '}');
}

static void print_json(const cli_job *job, const grid *g) {
  cli_json j = {.out = stdout};
  cli_json_open(&j, NULL, '{');
  cli_subject_json(&j, job);
  cli_json_open(&j, "device_mem_bytes", '[');
  for (uint32_t d = 0; d < g->n_device; d++)
    cli_json_count(&j, NULL, g->device[d]);
  cli_json_close(&j, ']');
  cli_json_open(&j, "host_mem_bytes", '[');
  for (uint32_t h = 0; h < g->n_host; h++)
    cli_json_count(&j, NULL, g->host[h]);
  cli_json_close(&j, ']');
  cli_json_open(&j, "tokens_per_s", '['); /* a row for each cap of host memory; 0: no plan fits */
  for (uint32_t h = 0; h < g->n_host; h++) {
    cli_json_open(&j, NULL, '[');
    for (uint32_t d = 0; d < g->n_device; d++)
      cli_json_number(&j, NULL, shown(g, h, d)->searched);
    cli_json_close(&j, ']');
  }
  cli_json_close(&j, ']');
  /* under these caps `penstock plan` finds the same plan again */
  cli_json_open(&j, "found_under", '[');
  for (uint32_t h = 0; h < g->n_host; h++) {
    cli_json_open(&j, NULL, '[');
    for (uint32_t d = 0; d < g->n_device; d++)
      found_under_json(&j, shown(g, h, d));
    cli_json_close(&j, ']');
  }
  cli_json_close(&j, ']');
  cli_json_close(&j, '}');
  putchar('\n');
}

static void print_head(const grid *g) {
  char text[32];
  printf("predicted tokens/s (columns: --device-mem, rows: --host-mem)\n%14s", "");
  for (uint32_t d = 0; d < g->n_device; d++)
    printf("%12s", cli_bytes(text, g->device[d]));
  putchar('\n');
}

static void print_row(const grid *g, uint32_t h) {
  char text[32];
  printf("%14s", cli_bytes(text, g->host[h]));
  for (uint32_t d = 0; d < g->n_device; d++)
    if (shown(g, h, d)->searched > 0)
      printf("%12.0f", shown(g, h, d)->searched);
    else
      printf("%12s", "-");
  putchar('\n');
  fflush(stdout);
}

/* Searches rows from the least host memory to the most. A row's cells are then final once the row
 * is searched. */
static void order_rows(const grid *g, uint32_t row[MAX_SIDE]) {
  for (uint32_t h = 0; h < g->n_host; h++) {
    uint32_t at = h;
    for (; at > 0 && g->host[row[at - 1]] > g->host[h]; at--)
      row[at] = row[at - 1];
    row[at] = h;
  }
}

int cli_plan_grid(cli_job *job, const cli_texts *devices, const cli_texts *hosts) {
  grid g = {.n_device = devices->n, .n_host = hosts->n};
  uint32_t row[MAX_SIDE], n_printed = 0;
  bool done[MAX_SIDE] = {false};
  if (!devices->n || !hosts->n)
    return cli_fail(CLI_REFUSED,
                    "--grid-device and --grid-host go together: give the sizes of both");
  int code = parse_side(devices, "grid-device", g.device);
  if (code == CLI_OK)
    code = parse_side(hosts, "grid-host", g.host);
  if (code != CLI_OK)
    return code;
  for (uint32_t i = 0; i < g.n_host * g.n_device; i++)
    g.cell[i] = (cli_cell){.device_mem_bytes = g.device[i % g.n_device],
                           .host_mem_bytes = g.host[i / g.n_device]};
  order_rows(&g, row);
  ps_evaluations *shared = NULL;
  if (ps_evaluations_create(&shared) != PS_OK)
    return cli_fail_status(PS_ENOMEM, true);
  cli_progress p;
  cli_progress_begin(&p, job);
  if (!job->json)
    print_head(&g);
  for (uint32_t i = 0; code == CLI_OK && i < g.n_host; i++) {
    for (uint32_t d = 0; code == CLI_OK && d < g.n_device; d++) {
      cli_progress_count(&p, "plan", i * g.n_device + d + 1, g.n_device * g.n_host);
      code = search(job, shared, &g.cell[row[i] * g.n_device + d]);
    }
    cli_progress_clear(&p);
    cli_cells_choose(g.cell, g.n_host * g.n_device);
    done[row[i]] = code == CLI_OK;
    for (; !job->json && n_printed < g.n_host && done[n_printed]; n_printed++)
      print_row(&g, n_printed);
  }
  ps_evaluations_destroy(shared);
  if (code == CLI_OK && job->json)
    print_json(job, &g);
  return code;
}
