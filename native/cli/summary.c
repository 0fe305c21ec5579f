/* summary.c - the summary of a run: predicted and measured times, how busy the streams were, memory
 * used, planned and allowed. */
#include "cli/cli.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The period that counts: from the end of compute's first traced step to the end of its last. Ops
 * of several steps run at once, and the trace lacks those of earlier steps, which run beside its
 * first step. Where the trace has one step alone, the period begins at that step's first op. */
static void counted_period(const ps_trace_event *events, uint64_t n, uint64_t *first,
                           uint64_t *last) {
  const uint64_t step = n ? events[0].step : 0;
  uint64_t start = UINT64_MAX, end = 0;
  *last = 0;
  for (uint64_t i = 0; i < n; i++) {
    const ps_trace_event *e = &events[i];
    if (e->stream != 0)
      continue;
    start = e->start_ns < start ? e->start_ns : start;
    end = e->step == step && e->end_ns > end ? e->end_ns : end;
    *last = e->end_ns > *last ? e->end_ns : *last;
  }
  *first = end < *last ? end : start;
}

/* ns of [from, to] that lie in the period. */
static double inside(uint64_t from, uint64_t to, uint64_t first, uint64_t last) {
  from = from > first ? from : first;
  to = to < last ? to : last;
  return to > from ? (double)(to - from) : 0;
}

void cli_stream_fractions(cli_run_result *r, const ps_trace_event *events, uint64_t n) {
  uint64_t first, last;
  double busy[PS_MAX_STREAMS] = {0}, wait[PS_MAX_STREAMS] = {0};
  counted_period(events, n, &first, &last);
  for (uint64_t i = 0; i < n; i++) {
    const ps_trace_event *e = &events[i];
    busy[e->stream] += inside(e->start_ns, e->end_ns, first, last);
    wait[e->stream] += inside(e->queued_ns, e->start_ns, first, last);
  }
  for (uint32_t s = 0; s < r->n_streams && last > first; s++) {
    r->busy[s] = busy[s] / (double)(last - first);
    r->wait[s] = wait[s] / (double)(last - first);
  }
}

static int op_times_of(const ps_plan *plan, const ps_trace_event *events, uint64_t n,
                       ps_op_time **out, uint64_t *n_out) {
  uint64_t n_times;
  ps_status st = ps_plan_op_times(plan, events, n, NULL, 0, &n_times);
  if (st != PS_OK)
    return cli_fail_status(st, false);
  *out = calloc(n_times + 1, sizeof **out);
  if (!*out)
    return cli_fail(CLI_FAILED, "out of memory for the times of %" PRIu64 " kinds of op", n_times);
  st = ps_plan_op_times(plan, events, n, *out, n_times, n_out);
  return st == PS_OK ? CLI_OK : cli_fail_status(st, false);
}

/* The plan's stalls and times are those of the last of three simulated steps: the first begins with
 * idle streams, unlike the steps of a long run, and the second tells what the last one awaited. */
int cli_beside_plan(cli_run_result *r, const ps_plan *plan, const ps_trace_event *events,
                    uint64_t n) {
  enum { SIMULATED = 3 };
  uint64_t n_ops = ps_schedule_n_ops(ps_plan_schedule((ps_plan *)plan));
  const uint64_t n_planned = (SIMULATED - 1) * n_ops;
  ps_trace_event *planned = malloc(SIMULATED * n_ops * sizeof *planned);
  if (!planned)
    return cli_fail(CLI_FAILED, "out of memory for the simulated trace of %" PRIu64 " ops",
                    SIMULATED * n_ops);
  ps_status st = ps_plan_stalls(plan, events, n, r->stall, CLI_MAX_STALLS, &r->n_stalls);
  if (st == PS_OK)
    st = ps_plan_throughput(plan, events, n, &r->throughput);
  if (st == PS_OK)
    st = ps_plan_simulate(plan, SIMULATED, planned, NULL);
  if (st == PS_OK)
    st = ps_plan_stalls(plan, planned + n_ops, n_planned, r->planned_stall, CLI_MAX_STALLS,
                        &r->n_planned_stalls);
  r->n_stalls = r->n_stalls < CLI_MAX_STALLS ? r->n_stalls : CLI_MAX_STALLS;
  r->n_planned_stalls = r->n_planned_stalls < CLI_MAX_STALLS ? r->n_planned_stalls : CLI_MAX_STALLS;
  int code = st == PS_OK ? CLI_OK : cli_fail_status(st, false);
  if (code == CLI_OK)
    code = op_times_of(plan, events, n, &r->op_time, &r->n_op_times);
  if (code == CLI_OK)
    code =
        op_times_of(plan, planned + n_ops, n_planned, &r->planned_op_time, &r->n_planned_op_times);
  free(planned);
  return code;
}

static bool is_alike(const ps_stall *a, const ps_stall *b) {
  return a->stream == b->stream && strcmp(a->what, b->what) == 0;
}

/* Seconds a step in which the stream of @s waited for the same, by @n stalls at @of. @from: of the
 * same stream alone. */
static double waited(const ps_stall *of, uint64_t n, const ps_stall *s, bool from) {
  double seconds = 0;
  for (uint64_t i = 0; i < n; i++)
    if (is_alike(&of[i], s) && (!from || of[i].awaited_stream == s->awaited_stream))
      seconds += of[i].seconds;
  return seconds;
}

static int longer_first(const void *pa, const void *pb) {
  const double a = ((const ps_stall *)pa)->seconds, b = ((const ps_stall *)pb)->seconds;
  return a > b ? -1 : a < b;
}

/* What @stream waited for, the longest first, each with all streams that it was awaited from. */
static uint32_t stalls_of(const cli_run_result *r, uint32_t stream, ps_stall out[CLI_MAX_STALLS]) {
  uint32_t n = 0;
  for (uint64_t i = 0; i < r->n_stalls; i++) {
    bool there = r->stall[i].stream != stream;
    for (uint32_t k = 0; k < n; k++)
      there |= is_alike(&out[k], &r->stall[i]);
    if (there)
      continue;
    out[n] = r->stall[i];
    out[n++].seconds = waited(r->stall, r->n_stalls, &r->stall[i], false);
  }
  qsort(out, n, sizeof *out, longer_first);
  return n;
}

enum { STREAMS_OF_DEVICE = 3 }; /* the first of them computes: ps_plan_stream_name() */

/* "compute waited 0.431 s a step: 0.201 s for parameters (planned 0.180), ...": the three longest
 * waits. */
static void print_stalls(FILE *out, const ps_plan *plan, const cli_run_result *r, uint32_t stream) {
  ps_stall stall[CLI_MAX_STALLS];
  const uint32_t n = stalls_of(r, stream, stall);
  double sum = 0;
  for (uint32_t i = 0; i < n; i++)
    sum += stall[i].seconds;
  fprintf(out, "%s waited %.3f s a step%s", ps_plan_stream_name(plan, stream), sum,
          sum > 0 ? ": " : "");
  for (uint32_t i = 0; i < n && i < 3; i++)
    fprintf(out, "%s%.3f s for %s (planned %.3f)", i ? ", " : "", stall[i].seconds, stall[i].what,
            waited(r->planned_stall, r->n_planned_stalls, &stall[i], false));
  fputc('\n', out);
}

/* Seconds a step that the plan expects of the same ops. */
static double planned_of(const cli_run_result *r, const ps_op_time *t) {
  for (uint64_t i = 0; i < r->n_planned_op_times; i++) {
    const ps_op_time *p = &r->planned_op_time[i];
    if (p->stream == t->stream && strcmp(p->op, t->op) == 0)
      return p->seconds;
  }
  return 0;
}

/* "compute ran 6.882 s a step (planned 6.645), furthest from the plan: 2.627 s of gemm_fp8 gate_up
 * (planned 2.511), ...": three kinds of op. */
static void print_op_times(FILE *out, const ps_plan *plan, const cli_run_result *r,
                           uint32_t stream) {
  enum { SHOWN = 3 };
  const ps_op_time *far[SHOWN + 1] = {NULL};
  double off[SHOWN + 1] = {0}, sum = 0, planned = 0;
  int n = 0;
  for (uint64_t i = 0; i < r->n_op_times; i++) {
    const ps_op_time *t = &r->op_time[i];
    if (t->stream != stream)
      continue;
    const double expected = planned_of(r, t), by = fabs(t->seconds - expected);
    int k = n;
    for (; k > 0 && off[k - 1] < by; k--) {
      off[k] = off[k - 1];
      far[k] = far[k - 1];
    }
    off[k] = by;
    far[k] = t;
    n += n < SHOWN;
    sum += t->seconds;
    planned += expected;
  }
  fprintf(out, "%s ran %.3f s a step (planned %.3f)%s", ps_plan_stream_name(plan, stream), sum,
          planned, n ? ", furthest from the plan: " : "");
  for (int i = 0; i < n; i++)
    fprintf(out, "%s%.3f s of %s (planned %.3f)", i ? ", " : "", far[i]->seconds, far[i]->op,
            planned_of(r, far[i]));
  fputc('\n', out);
}

/* "while they ran  h2d 48.2 GB/s, d2h 47.0 GB/s, updates on the host 96.1 GB/s" */
static void print_throughput(FILE *out, const ps_throughput *t) {
  const struct {
    const char *name;
    double bytes_per_s;
  } part[] = {{"h2d", t->h2d_bytes_per_s},
              {"d2h", t->d2h_bytes_per_s},
              {"updates on the host", t->update_bytes_per_s}};
  char rate[32];
  uint32_t n = 0;
  for (size_t i = 0; i < sizeof part / sizeof *part; i++)
    if (part[i].bytes_per_s > 0)
      fprintf(out, "%s%s %s", n++ ? ", " : "while they ran  ", part[i].name,
              cli_rate(rate, part[i].bytes_per_s));
  if (n)
    fputc('\n', out);
}

static void stalls_json(cli_json *j, const ps_plan *plan, const cli_run_result *r) {
  cli_json_open(j, "stalls", '[');
  for (uint64_t i = 0; i < r->n_stalls; i++) {
    cli_json_open(j, NULL, '{');
    cli_json_text(j, "stream", ps_plan_stream_name(plan, r->stall[i].stream));
    cli_json_text(j, "for", r->stall[i].what);
    cli_json_text(j, "from", ps_plan_stream_name(plan, r->stall[i].awaited_stream));
    cli_json_number(j, "seconds", r->stall[i].seconds);
    cli_json_number(j, "planned_seconds",
                    waited(r->planned_stall, r->n_planned_stalls, &r->stall[i], true));
    cli_json_close(j, '}');
  }
  cli_json_close(j, ']');
}

static void op_times_json(cli_json *j, const ps_plan *plan, const cli_run_result *r) {
  cli_json_open(j, "op_times", '[');
  for (uint64_t i = 0; i < r->n_op_times; i++) {
    cli_json_open(j, NULL, '{');
    cli_json_text(j, "stream", ps_plan_stream_name(plan, r->op_time[i].stream));
    cli_json_text(j, "op", r->op_time[i].op);
    cli_json_count(j, "n_ops", r->op_time[i].n_ops);
    cli_json_number(j, "seconds", r->op_time[i].seconds);
    cli_json_number(j, "planned_seconds", planned_of(r, &r->op_time[i]));
    cli_json_close(j, '}');
  }
  cli_json_close(j, ']');
}

void cli_note_loss(cli_run_result *r, double loss) {
  if (r->n_done == 0)
    r->loss_first = loss;
  r->loss_recent[r->n_done % CLI_RECENT_LOSSES] = loss;
}

/* The mean loss of the last tenth of the steps; *n: how many these are. The loss of a single batch
 * says little. */
static double mean_loss(const cli_run_result *r, uint64_t *n) {
  double sum = 0;
  *n = r->n_done / 10 < CLI_RECENT_LOSSES ? r->n_done / 10 : CLI_RECENT_LOSSES;
  *n += !*n;
  for (uint64_t i = 0; i < *n && i < r->n_done; i++)
    sum += r->loss_recent[(r->n_done - 1 - i) % CLI_RECENT_LOSSES];
  return sum / (double)*n;
}

/* Recommends to measure the machine anew where the measured step is far from the prediction. */
static void print_deviation(FILE *out, const cli_job *job, const cli_run_result *r) {
  const double tolerated = 0.15,
               ratio = r->predicted_step_s > 0 ? r->step_s_median / r->predicted_step_s : 1;
  const cli_device *d = &job->device;
  if (r->n_done <= CLI_WARMUP_STEPS || fabs(ratio - 1) <= tolerated)
    return;
  fprintf(out, "                a step took %.0f%% %s time than predicted: ", 100 * fabs(ratio - 1),
          ratio > 1 ? "more" : "less");
  if (job->hardware.other_work_percent)
    fprintf(out, "other work took %u%% of the CPUs while this machine was measured, so ",
            job->hardware.other_work_percent);
  else
    fprintf(out, "unless other work ran at the same time, ");
  fprintf(out, "measure this machine anew while it is idle:\n"
               "                penstock profile");
  if (d->backend != CLI_BACKEND_AUTO)
    fprintf(out, " --backend %s", cli_backends[d->backend]);
  if (d->gpu_given)
    fprintf(out, " --gpu %" PRIu64, d->gpu);
  if (d->threads)
    fprintf(out, " --threads %" PRIu64, d->threads);
  fputc('\n', out);
}

void cli_summary_print(FILE *out, const cli_job *job, const cli_run_result *r) {
  char a[32], b[32], c[32], path[8192];
  uint64_t n;
  const ps_plan_report *plan = &job->report;
  const double loss = mean_loss(r, &n);
  fprintf(out, "%" PRIu64 " of %" PRIu64 " steps, %" PRIu64 " tokens in %s", r->n_done, r->n_wanted,
          r->tokens, cli_duration(a, r->wall_s));
  if (plan->n_devices > 1)
    fprintf(out, " on %u devices", plan->n_devices);
  fprintf(out, ": %.0f tok/s\n", r->wall_s > 0 ? (double)r->tokens / r->wall_s : 0);
  if (r->n_done) {
    fprintf(out, "loss            %.4f in the first step, %.4f in the last ", r->loss_first, loss);
    fprintf(out, n > 1 ? "%" PRIu64 " (mean)\n" : "step\n", n);
  }
  cli_val_summary_print(job, out, r);
  cli_samples_summary_print(out, job, r->wall_s);
  if (r->n_skipped)
    fprintf(out, "skipped         %" PRIu64 " step%s, whose loss or gradient was not finite\n",
            r->n_skipped, r->n_skipped == 1 ? "" : "s");
  fprintf(out, "step time       predicted %.3f s  measured %.3f s (median)  ratio %.2f\n",
          r->predicted_step_s, r->step_s_median,
          r->predicted_step_s > 0 ? r->step_s_median / r->predicted_step_s : 0);
  print_deviation(out, job, r);
  fprintf(out, "device memory   plan %s  measured %s  cap %s%s\n",
          cli_bytes(a, plan->device_used_bytes), cli_bytes(b, r->device_peak_bytes),
          plan->device_mem_bytes ? cli_bytes(c, plan->device_mem_bytes) : "none",
          plan->n_devices > 1 ? ", a device" : "");
  fprintf(out, "host memory     plan %s  measured %s  cap %s\n",
          cli_bytes(a, plan->host_used_bytes), cli_bytes(b, r->host_peak_bytes),
          plan->host_mem_bytes ? cli_bytes(c, plan->host_mem_bytes) : "none");
  if (r->timeline_path) {
    fprintf(out, "stream        busy   waiting\n");
    for (uint32_t s = 0; s < r->n_streams; s++)
      fprintf(out, "  %-10s %5.1f%%   %5.1f%%\n", ps_plan_stream_name(job->plan, s),
              100 * r->busy[s], 100 * r->wait[s]);
    print_throughput(out, &r->throughput);
    for (uint32_t d = 0; d < plan->n_devices; d++) {
      print_op_times(out, job->plan, r, STREAMS_OF_DEVICE * d);
      print_stalls(out, job->plan, r, STREAMS_OF_DEVICE * d);
    }
  }
  fprintf(out, "metrics %s", ps_printable(path, sizeof path, r->metrics_path));
  fprintf(out, ", plan %s", ps_printable(path, sizeof path, r->plan_path));
  if (r->timeline_path)
    fprintf(out, ", timeline %s", ps_printable(path, sizeof path, r->timeline_path));
  fputc('\n', out);
  if (r->saved)
    fprintf(out, "%s saved in %s\n", job->plan_config.lora.rank ? "adapter" : "model",
            ps_printable(path, sizeof path, job->out));
  if (ferror(stderr))
    fprintf(out, "progress is incomplete: stderr could not be written\n");
}

static void summary_json(FILE *out, const cli_job *job, const cli_run_result *r) {
  cli_json j = {.out = out};
  cli_json_open(&j, NULL, '{');
  cli_json_count(&j, "steps", r->n_done);
  cli_json_count(&j, "steps_wanted", r->n_wanted);
  cli_json_bool(&j, "interrupted", r->interrupted);
  cli_json_count(&j, "tokens", r->tokens);
  cli_json_number(&j, "wall_s", r->wall_s);
  cli_json_number(&j, "loss_first", r->n_done ? r->loss_first : NAN);
  cli_json_number(&j, "loss_last",
                  r->n_done ? r->loss_recent[(r->n_done - 1) % CLI_RECENT_LOSSES] : NAN);
  uint64_t n;
  const double mean = r->n_done ? mean_loss(r, &n) : NAN;
  n = r->n_done ? n : 0;
  cli_json_number(&j, "loss_mean_last", mean);
  cli_json_count(&j, "loss_mean_steps", n);
  cli_val_summary_json(job, &j, r);
  cli_samples_summary_json(&j, job, r->wall_s);
  cli_json_count(&j, "n_skipped", r->n_skipped);
  cli_json_number(&j, "step_s_median", r->step_s_median);
  cli_json_number(&j, "predicted_step_s", r->predicted_step_s);
  cli_json_number(&j, "tokens_per_s", r->wall_s > 0 ? (double)r->tokens / r->wall_s : 0);
  cli_json_count(&j, "gpus", job->report.n_devices);
  cli_json_count(&j, "device_peak_bytes", r->device_peak_bytes);
  cli_json_count(&j, "device_used_bytes", job->report.device_used_bytes);
  cli_json_count(&j, "device_mem_bytes", job->report.device_mem_bytes);
  cli_json_count(&j, "host_peak_bytes", r->host_peak_bytes);
  cli_json_count(&j, "host_used_bytes", job->report.host_used_bytes);
  cli_json_count(&j, "host_mem_bytes", job->report.host_mem_bytes);
  cli_json_open(&j, "streams", '[');
  for (uint32_t s = 0; s < r->n_streams; s++) {
    cli_json_open(&j, NULL, '{');
    cli_json_text(&j, "name", ps_plan_stream_name(job->plan, s));
    cli_json_number(&j, "busy", r->busy[s]);
    cli_json_number(&j, "wait", r->wait[s]);
    cli_json_close(&j, '}');
  }
  cli_json_close(&j, ']');
  stalls_json(&j, job->plan, r);
  op_times_json(&j, job->plan, r);
  cli_json_open(&j, "while_busy", '{');
  cli_json_number(&j, "h2d_bytes_per_s", r->throughput.h2d_bytes_per_s);
  cli_json_number(&j, "d2h_bytes_per_s", r->throughput.d2h_bytes_per_s);
  cli_json_number(&j, "update_bytes_per_s", r->throughput.update_bytes_per_s);
  cli_json_close(&j, '}');
  if (r->metrics_path)
    cli_json_text(&j, "metrics", r->metrics_path);
  if (r->plan_path)
    cli_json_text(&j, "plan", r->plan_path);
  if (r->timeline_path)
    cli_json_text(&j, "timeline", r->timeline_path);
  if (r->saved)
    cli_json_text(&j, "model", job->out);
  cli_json_close(&j, '}');
  fputc('\n', out);
}

void cli_summary_remove(const cli_job *job) {
  char *path = cli_path_join(job->run_dir, "summary.json");
  if (path)
    unlink(path);
  free(path);
}

int cli_summary_write(const cli_job *job, const cli_run_result *r) {
  char *text = NULL, *path = cli_path_join(job->run_dir, "summary.json");
  size_t bytes = 0;
  FILE *f = path ? open_memstream(&text, &bytes) : NULL;
  if (f)
    summary_json(f, job, r);
  const bool ok = f && fclose(f) == 0 && bytes;
  int code = ok ? CLI_OK : cli_fail(CLI_FAILED, "out of memory for the summary");
  if (ok && job->json)
    fputs(text, stdout);
  if (ok) {
    text[bytes - 1] = 0; /* cli_file_replace() ends the line */
    code = cli_file_replace(path, text, NULL);
  }
  free(text);
  free(path);
  return code;
}

int cli_summary_show(const cli_job *job, const cli_run_result *r) {
  char buffer[4096], *path = cli_path_join(job->run_dir, "summary.json");
  FILE *f = path ? fopen(path, "rb") : NULL;
  free(path);
  if (!f) {
    summary_json(stdout, job, r);
    return CLI_OK;
  }
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, f)) > 0;)
    fwrite(buffer, 1, n, stdout);
  fclose(f);
  return CLI_OK;
}
