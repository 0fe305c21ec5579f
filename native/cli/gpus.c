/* gpus.c - `penstock plan --gpus N,N,...`: a plan for each number of GPUs, as a table or as JSON.
 *
 * A row's share is its tokens/s over N times those of one GPU, both with the same tokens a step.
 * The fewest tokens for a share of ENOUGH are searched by doublings of the tokens a step. */
#include "cli/cli.h"
#include <stdlib.h>
#include <string.h>

#define ENOUGH 0.95
/* A doubling that adds less than this to the share is the last: the share has its limit. */
#define LEAST_GAIN 0.005
/* Copies that run at less than this part of the link's rate share the host's memory. */
#define SLOWED 0.9
enum { DOUBLINGS = 6 };

typedef struct row {
  uint32_t n_gpus;
  double tokens_per_s, share; /* 0: no plan fits, or none of one GPU does */
  const char *binds;          /* static */
  double busy;                /* of the busiest stream, a part of the step */
  ps_plan_report report;
  uint64_t enough_tokens; /* a step; 0: none was found */
  char refused[512];      /* why no plan fits */
} row;

typedef struct table {
  cli_job *job;
  uint64_t tokens; /* a step, in whole sequences */
  /* tokens/s of one GPU by doublings of tokens, from -DOUBLINGS on; below 0: not planned yet */
  double one[2 * DOUBLINGS + 1];
  uint32_t n;
  row row[CLI_MAX_GPU_ROWS];
} table;

/* ---- the option ------------------------------------------------------------------------------ */

int cli_gpus_parse(const cli_texts *texts, uint32_t *out, uint32_t *n) {
  *n = 0;
  for (uint32_t i = 0; i < texts->n; i++)
    for (const char *at = texts->item[i], *end; at; at = *end ? end + 1 : NULL) {
      char word[32];
      uint64_t value = 0;
      const cli_option number = {
          .name = "gpus", .kind = CLI_COUNT, .out = &value, .least = 1, .most = PS_MAX_DEVICES};
      end = at + strcspn(at, ",");
      snprintf(word, sizeof word, "%.*s", (int)(end - at), at);
      const int code = cli_set_value(&number, "--gpus", word);
      if (code != CLI_OK)
        return code;
      if (*n == CLI_MAX_GPU_ROWS)
        return cli_fail(CLI_REFUSED, "--gpus: more than %d numbers given", CLI_MAX_GPU_ROWS);
      out[(*n)++] = (uint32_t)value;
    }
  return CLI_OK;
}

/* ---- planning -------------------------------------------------------------------------------- */

/* @tokens of a step, whole sequences. *out: owned by the caller, NULL on failure. */
static ps_status plan_with(const table *t, uint32_t n_gpus, uint64_t tokens, ps_plan **out,
                           ps_plan_report *report) {
  ps_plan_config cfg = t->job->plan_config;
  cfg.n_devices = n_gpus;
  if (n_gpus == 1)
    cfg.layout = PS_LAYOUT_AUTO;
  cfg.tokens_per_step = tokens;
  if (tokens != t->tokens)
    cfg.n_ramp = 0; /* its stages may have no more tokens than a step */
  *out = NULL;
  *report = (ps_plan_report){.struct_bytes = sizeof *report};
  ps_status st = ps_plan_create(out, &t->job->config, &cfg, &t->job->hardware);
  if (st == PS_OK && (st = ps_plan_get_report(*out, report)) != PS_OK) {
    ps_plan_destroy(*out);
    *out = NULL;
  }
  return st;
}

static double speed_of(const ps_plan_report *r) {
  return r->step_s > 0 ? (double)r->tokens_per_step / r->step_s : 0;
}

/* The tokens of a step after @doublings, in whole sequences. 0: fewer than @n_gpus sequences, which
 * would leave a GPU without work, or more than a step may have. */
static uint64_t doubled(const table *t, int doublings, uint32_t n_gpus) {
  const uint64_t seq_len = t->job->plan_config.seq_len;
  uint64_t sequences = t->tokens / seq_len;
  if (doublings < 0)
    sequences >>= -doublings;
  else
    sequences <<= doublings;
  return sequences < n_gpus || sequences > PS_MAX_STEP_TOKENS / seq_len ? 0 : sequences * seq_len;
}

/* tokens/s; 0: there is no plan. */
static double speed_with(const table *t, uint32_t n_gpus, uint64_t tokens) {
  ps_plan_report report;
  ps_plan *plan;
  const ps_status st = plan_with(t, n_gpus, tokens, &plan, &report);
  ps_plan_destroy(plan);
  return st == PS_OK ? speed_of(&report) : 0;
}

static double speed_of_one(table *t, int doublings) {
  double *one = &t->one[DOUBLINGS + doublings];
  if (*one < 0)
    *one = speed_with(t, 1, doubled(t, doublings, 1));
  return *one;
}

/* The share of @n_gpus with so many doublings; 0: there is no plan. */
static double share_of(table *t, uint32_t n_gpus, int doublings) {
  const uint64_t tokens = doubled(t, doublings, n_gpus);
  const double one = tokens ? speed_of_one(t, doublings) : 0;
  return one > 0 ? speed_with(t, n_gpus, tokens) / (n_gpus * one) : 0;
}

/* The fewest tokens of a step with which the row's share is ENOUGH; 0: none of those tried. */
static uint64_t search_tokens(table *t, const row *r) {
  int at = 0;
  if (r->share >= ENOUGH) {
    while (at > -DOUBLINGS && share_of(t, r->n_gpus, at - 1) >= ENOUGH)
      at--;
    return doubled(t, at, r->n_gpus);
  }
  double before, share = r->share;
  do {
    before = share;
    share = share_of(t, r->n_gpus, ++at);
  } while (at < DOUBLINGS && share < ENOUGH && share > before + LEAST_GAIN);
  return share >= ENOUGH ? doubled(t, at, r->n_gpus) : 0;
}

/* ---- what binds ------------------------------------------------------------------------------ */

static bool starts_with(const char *text, const char *with) {
  return strncmp(text, with, strlen(with)) == 0;
}

/* How long the streams of this name are busy, of all GPUs. */
static double busy_of(const ps_plan *plan, const ps_plan_report *r, const char *name) {
  double seconds = 0;
  const char *stream;
  for (uint32_t s = 0; (stream = ps_plan_stream_name(plan, s)); s++)
    seconds += starts_with(stream, name) ? r->stream_busy_s[s] : 0;
  return seconds;
}

/* Copies take longer than the link alone would, as they share the host's memory. */
static bool memory_shared(const ps_plan *plan, const ps_plan_report *r, const ps_hardware *hw) {
  const double to_device = busy_of(plan, r, "h2d"), to_host = busy_of(plan, r, "d2h");
  const double rate = hw->link[PS_LINK_H2D].duplex_bytes_per_s;
  return (to_device > 0 && (double)r->h2d_bytes / to_device < SLOWED * rate) ||
         (to_host > 0 && (double)r->d2h_bytes / to_host < SLOWED * rate);
}

static void find_what_binds(row *r, const ps_plan *plan, const ps_hardware *hw) {
  const ps_plan_report *report = &r->report;
  const char *stream = ps_plan_stream_name(plan, report->bottleneck_stream);
  r->busy =
      report->step_s > 0 ? report->stream_busy_s[report->bottleneck_stream] / report->step_s : 0;
  if (starts_with(stream, "compute"))
    r->binds = "products";
  else if (starts_with(stream, "p2p") || starts_with(stream, "sums"))
    r->binds = "other GPUs";
  else if (memory_shared(plan, report, hw))
    r->binds = "host memory";
  else
    r->binds = starts_with(stream, "h2d") || starts_with(stream, "d2h") ? "link" : "host ops";
}

/* ---- the table ------------------------------------------------------------------------------- */

static int fill_row(table *t, row *r) {
  ps_plan *plan;
  const ps_status st = plan_with(t, r->n_gpus, t->tokens, &plan, &r->report);
  if (st == PS_EBUDGET) {
    snprintf(r->refused, sizeof r->refused, "%s", ps_last_error());
    return CLI_OK;
  }
  if (st != PS_OK)
    return cli_fail_status(st, true);
  if (cli_too_few_sequences(t->job, &r->report, r->refused)) {
    ps_plan_destroy(plan);
    return CLI_OK;
  }
  find_what_binds(r, plan, &t->job->hardware);
  ps_plan_destroy(plan);
  r->tokens_per_s = speed_of(&r->report);
  if (r->n_gpus == 1)
    t->one[DOUBLINGS] = r->tokens_per_s;
  const double one = speed_of_one(t, 0);
  r->share = one > 0 ? r->tokens_per_s / (r->n_gpus * one) : 0;
  r->enough_tokens = r->n_gpus > 1 && one > 0 ? search_tokens(t, r) : 0;
  return CLI_OK;
}

static void print_head(const table *t) {
  const uint32_t hosts = t->job->plan_config.n_hosts;
  printf("%llu tokens a step, sequences of %llu\n", (unsigned long long)t->tokens,
         (unsigned long long)t->job->plan_config.seq_len);
  if (hosts > 1 && t->job->hardware.link[PS_LINK_NETWORK].bytes_per_s > 0)
    printf("%u hosts with so many GPUs each, which exchange gradients at %.3g GB/s\n", hosts,
           t->job->hardware.link[PS_LINK_NETWORK].bytes_per_s * 1e-9);
  else if (hosts > 1)
    printf("%u hosts with so many GPUs each; the exchange of gradients takes no time here:\n"
           "network_bytes_per_s, in the file of --hardware, states its rate\n",
           hosts);
  printf("%4s  %9s  %10s  %-16s  %10s  %12s  %11s  %10s\n", "GPUs", "tokens/s", "of N x one",
         "what binds", "recomputed", "memory a GPU", "host memory", "0.95 from");
}

/* FLOPs done twice, as a part of the model's. */
static double recomputed(const row *r) {
  return r->report.model_flops > 0 ? r->report.recompute_flops / r->report.model_flops : 0;
}

static void print_row(const row *r) {
  char binds[32], twice[16], device[32], host[32], share[16] = "-", enough[24] = "-";
  if (!r->tokens_per_s) {
    printf("%4u  %s%s\n", r->n_gpus,
           starts_with(r->refused, "no plan") ? "" : "no plan: ", r->refused);
    return;
  }
  snprintf(binds, sizeof binds, "%s %.0f%%", r->binds, 100 * r->busy);
  if (r->share > 0)
    snprintf(share, sizeof share, "%.2f", r->share);
  if (r->enough_tokens)
    snprintf(enough, sizeof enough, "%llu", (unsigned long long)r->enough_tokens);
  snprintf(twice, sizeof twice, "%.1f%%", 100 * recomputed(r));
  printf("%4u  %9.0f  %10s  %-16s  %10s  %12s  %11s  %10s\n", r->n_gpus, r->tokens_per_s, share,
         binds, twice, cli_bytes(device, r->report.device_used_bytes),
         cli_bytes(host, r->report.host_used_bytes), enough);
  fflush(stdout);
}

/* For the most GPUs that have a plan. */
static void find_advice(const table *t, cli_advice *a) {
  const row *most = NULL;
  for (const row *r = t->row; r < t->row + t->n; r++)
    if (r->tokens_per_s > 0 && (!most || r->n_gpus > most->n_gpus))
      most = r;
  a->n = 0;
  if (most)
    cli_advise(a, &t->job->config, &t->job->hardware, &t->job->plan_config, &most->report,
               most->n_gpus);
}

/* Which rows are rings, where the planner chose: --layout says it otherwise. */
static void print_rings(const table *t) {
  uint32_t n = 0;
  for (const row *r = t->row; r < t->row + t->n; r++)
    if (r->tokens_per_s > 0 && r->report.layout == PS_LAYOUT_RING &&
        t->job->plan_config.layout == PS_LAYOUT_AUTO)
      printf("%s %u",
             n++ ? "," : "in a ring of layers, which is faster than data-parallel:", r->n_gpus);
  if (n)
    puts(" GPUs");
}

static void print_notes(const table *t) {
  cli_advice a;
  printf("of N x one: tokens/s over N times those of one GPU%s, with the same tokens a step\n"
         "what binds: the busiest stream, and how much of the step it is busy\n"
         "recomputed: FLOPs done twice, beside the model's; more where copies are slow\n"
         "0.95 from: the fewest tokens a step for 0.95 of N x one, searched by doublings up to "
         "%llu\n",
         t->job->plan_config.n_hosts > 1 ? " a host" : "",
         (unsigned long long)doubled(t, DOUBLINGS, 1));
  print_rings(t);
  if (t->job->hardware.backend == PS_BACKEND_CUDA)
    puts("Rows of several GPUs are predictions. docs/gpus.md has measurements of two and "
         "four.");
  find_advice(t, &a);
  cli_advice_print(&a);
}

static void row_json(cli_json *j, const row *r) {
  cli_json_open(j, NULL, '{');
  cli_json_count(j, "gpus", r->n_gpus);
  if (!r->tokens_per_s) {
    cli_json_text(j, "refused", r->refused);
  } else {
    cli_json_number(j, "tokens_per_s", r->tokens_per_s);
    cli_json_number(j, "share", r->share);
    cli_json_number(j, "predicted_step_s", r->report.step_s);
    cli_json_text(j, "binds", r->binds);
    cli_json_number(j, "busy", r->busy);
    cli_json_number(j, "recomputed", recomputed(r));
    cli_json_text(j, "layout", ps_layout_name((ps_plan_layout)r->report.layout));
    cli_json_count(j, "n_rounds", r->report.n_rounds);
    cli_json_count(j, "device_used_bytes", r->report.device_used_bytes);
    cli_json_count(j, "host_used_bytes", r->report.host_used_bytes);
    cli_json_count(j, "enough_tokens_per_step", r->enough_tokens); /* 0: none was found */
  }
  cli_json_close(j, '}');
}

static void print_json(const table *t) {
  cli_json j = {.out = stdout};
  cli_json_open(&j, NULL, '{');
  cli_subject_json(&j, t->job);
  cli_json_count(&j, "tokens_per_step", t->tokens);
  cli_json_count(&j, "device_mem_bytes", t->job->plan_config.device_mem_bytes);
  cli_json_count(&j, "host_mem_bytes", t->job->plan_config.host_mem_bytes);
  cli_json_number(&j, "enough_share", ENOUGH);
  cli_json_open(&j, "rows", '[');
  for (uint32_t i = 0; i < t->n; i++)
    row_json(&j, &t->row[i]);
  cli_json_close(&j, ']');
  cli_advice a;
  find_advice(t, &a);
  cli_json_open(&j, "advice", '[');
  for (uint32_t i = 0; i < a.n; i++)
    cli_json_text(&j, NULL, a.line[i]);
  cli_json_close(&j, ']');
  cli_json_close(&j, '}');
  putchar('\n');
}

int cli_plan_gpus(cli_job *job, const uint32_t *n_gpus, uint32_t n) {
  table *t = calloc(1, sizeof *t);
  if (!t)
    return cli_fail(CLI_FAILED, "out of memory");
  t->job = job;
  t->tokens = cli_step_tokens(&job->plan_config);
  t->n = n;
  for (int i = 0; i <= 2 * DOUBLINGS; i++)
    t->one[i] = -1;
  cli_progress p;
  cli_progress_begin(&p, job);
  int code = CLI_OK;
  for (uint32_t i = 0; code == CLI_OK && i < n; i++) {
    t->row[i].n_gpus = n_gpus[i];
    cli_progress_count(&p, "row", i + 1, n);
    code = fill_row(t, &t->row[i]);
    cli_progress_clear(&p);
    if (code == CLI_OK && i == 0) { /* not before what the options say is refused */
      cli_note_left_out(job, &p);
      if (!job->json)
        print_head(t);
    }
    if (code == CLI_OK && !job->json)
      print_row(&t->row[i]);
  }
  if (code == CLI_OK && job->json)
    print_json(t);
  else if (code == CLI_OK)
    print_notes(t);
  free(t);
  return code;
}
