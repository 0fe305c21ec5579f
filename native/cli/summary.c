/* summary.c - what a run says when it ends: predicted beside measured, where the time went, memory against the plan. */
#include "cli.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

void cli_stream_shares(cli_run_result *r, const ps_trace_event *events, uint64_t n) {
  uint64_t first = UINT64_MAX, last = 0;
  double busy[PS_MAX_STREAMS] = {0}, wait[PS_MAX_STREAMS] = {0};
  for (uint64_t i = 0; i < n; i++) {
    const ps_trace_event *e = &events[i];
    first = e->start_ns < first ? e->start_ns : first;
    last = e->end_ns > last ? e->end_ns : last;
  }
  for (uint64_t i = 0; i < n; i++) { /* waiting counts inside the window only */
    const ps_trace_event *e = &events[i];
    uint64_t from = e->queued_ns > first ? e->queued_ns : first;
    busy[e->stream] += (double)(e->end_ns - e->start_ns);
    wait[e->stream] += e->start_ns > from ? (double)(e->start_ns - from) : 0;
  }
  for (uint32_t s = 0; s < r->n_streams && last > first; s++) {
    r->busy[s] = busy[s] / (double)(last - first);
    r->wait[s] = wait[s] / (double)(last - first);
  }
}

/* The plan's are those of its last two simulated steps of three, as if it had run for long. */
int cli_stalls(cli_run_result *r, const ps_plan *plan, const ps_trace_event *events, uint64_t n) {
  enum { SIMULATED = 3 };
  uint64_t n_ops = ps_schedule_n_ops(ps_plan_schedule((ps_plan *)plan));
  ps_trace_event *planned = malloc(SIMULATED * n_ops * sizeof *planned);
  if (!planned)
    return cli_fail(CLI_FAILED, "out of memory for the plan's trace of %" PRIu64 " ops", SIMULATED * n_ops);
  ps_status st = ps_plan_stalls(plan, events, n, r->stall, CLI_MAX_STALLS, &r->n_stalls);
  if (st == PS_OK)
    st = ps_plan_simulate(plan, SIMULATED, planned, NULL);
  if (st == PS_OK)
    st = ps_plan_stalls(plan, planned + n_ops, (SIMULATED - 1) * n_ops, r->planned_stall, CLI_MAX_STALLS, &r->n_planned_stalls);
  r->n_stalls = r->n_stalls < CLI_MAX_STALLS ? r->n_stalls : CLI_MAX_STALLS;
  r->n_planned_stalls = r->n_planned_stalls < CLI_MAX_STALLS ? r->n_planned_stalls : CLI_MAX_STALLS;
  free(planned);
  return st == PS_OK ? CLI_OK : cli_fail_status(st, false);
}

static double planned_of(const cli_run_result *r, const ps_stall *s) {
  double seconds = 0;
  for (uint64_t i = 0; i < r->n_planned_stalls; i++)
    if (r->planned_stall[i].stream == s->stream && strcmp(r->planned_stall[i].what, s->what) == 0)
      seconds += r->planned_stall[i].seconds;
  return seconds;
}

/* "compute waited 0.431 s a step: 0.201 s for parameters (planned 0.180), ...": the three largest reasons. */
static void print_stalls(FILE *out, const cli_run_result *r, uint32_t stream) {
  double sum = 0;
  uint32_t n = 0;
  for (uint64_t i = 0; i < r->n_stalls; i++)
    sum += r->stall[i].stream == stream ? r->stall[i].seconds : 0;
  fprintf(out, "%s waited %.3f s a step%s", ps_plan_stream_name(stream), sum, sum > 0 ? ": " : "");
  for (uint64_t i = 0; i < r->n_stalls && n < 3; i++)
    if (r->stall[i].stream == stream)
      fprintf(out, "%s%.3f s for %s (planned %.3f)", n++ ? ", " : "", r->stall[i].seconds, r->stall[i].what, planned_of(r, &r->stall[i]));
  fputc('\n', out);
}

static void stalls_json(cli_json *j, const cli_run_result *r) {
  cli_json_open(j, "stalls", '[');
  for (uint64_t i = 0; i < r->n_stalls; i++) {
    cli_json_open(j, NULL, '{');
    cli_json_text(j, "stream", ps_plan_stream_name(r->stall[i].stream));
    cli_json_text(j, "for", r->stall[i].what);
    cli_json_text(j, "from", ps_plan_stream_name(r->stall[i].awaited_stream));
    cli_json_number(j, "seconds", r->stall[i].seconds);
    cli_json_number(j, "planned_seconds", planned_of(r, &r->stall[i]));
    cli_json_close(j, '}');
  }
  cli_json_close(j, ']');
}

void cli_summary_print(FILE *out, const cli_job *job, const cli_run_result *r) {
  char a[32], b[32], c[32];
  const ps_plan_report *plan = &job->report;
  fprintf(out, "%" PRIu64 " of %" PRIu64 " steps, %" PRIu64 " tokens in %s: loss %.4f -> %.4f, %.0f tok/s\n", r->n_done, r->n_wanted, r->tokens,
          cli_duration(a, r->wall_s), r->loss_first, r->loss_last, r->wall_s > 0 ? (double)r->tokens / r->wall_s : 0);
  fprintf(out, "step time       predicted %.3f s  measured %.3f s (median)  ratio %.2f\n", r->predicted_step_s, r->step_s_median,
          r->predicted_step_s > 0 ? r->step_s_median / r->predicted_step_s : 0);
  fprintf(out, "device memory   plan %s  measured %s  cap %s\n", cli_bytes(a, plan->device_bytes), cli_bytes(b, r->device_peak_bytes),
          plan->device_cap_bytes ? cli_bytes(c, plan->device_cap_bytes) : "none");
  fprintf(out, "host memory     plan %s  measured %s  cap %s\n", cli_bytes(a, plan->host_bytes), cli_bytes(b, r->host_peak_bytes),
          plan->host_cap_bytes ? cli_bytes(c, plan->host_cap_bytes) : "none");
  if (r->timeline_path) {
    fprintf(out, "stream        busy   waiting\n");
    for (uint32_t s = 0; s < r->n_streams; s++)
      fprintf(out, "  %-10s %5.1f%%   %5.1f%%\n", ps_plan_stream_name(s), 100 * r->busy[s], 100 * r->wait[s]);
    print_stalls(out, r, 0);
  }
  fprintf(out, "metrics %s, plan %s%s%s\n", r->metrics_path, r->plan_path, r->timeline_path ? ", timeline " : "",
          r->timeline_path ? r->timeline_path : "");
  if (r->saved)
    fprintf(out, "model saved in %s\n", job->out);
}

void cli_summary_json(FILE *out, const cli_job *job, const cli_run_result *r) {
  cli_json j = {.out = out};
  cli_json_open(&j, NULL, '{');
  cli_json_count(&j, "steps", r->n_done);
  cli_json_count(&j, "steps_wanted", r->n_wanted);
  cli_json_bool(&j, "interrupted", r->interrupted);
  cli_json_count(&j, "tokens", r->tokens);
  cli_json_number(&j, "wall_s", r->wall_s);
  cli_json_number(&j, "loss_first", r->loss_first);
  cli_json_number(&j, "loss_last", r->loss_last);
  cli_json_number(&j, "step_s_median", r->step_s_median);
  cli_json_number(&j, "predicted_step_s", r->predicted_step_s);
  cli_json_number(&j, "tokens_per_s", r->wall_s > 0 ? (double)r->tokens / r->wall_s : 0);
  cli_json_count(&j, "device_peak_bytes", r->device_peak_bytes);
  cli_json_count(&j, "device_plan_bytes", job->report.device_bytes);
  cli_json_count(&j, "device_cap_bytes", job->report.device_cap_bytes);
  cli_json_count(&j, "host_peak_bytes", r->host_peak_bytes);
  cli_json_count(&j, "host_plan_bytes", job->report.host_bytes);
  cli_json_count(&j, "host_cap_bytes", job->report.host_cap_bytes);
  cli_json_open(&j, "streams", '[');
  for (uint32_t s = 0; s < r->n_streams; s++) {
    cli_json_open(&j, NULL, '{');
    cli_json_text(&j, "name", ps_plan_stream_name(s));
    cli_json_number(&j, "busy", r->busy[s]);
    cli_json_number(&j, "wait", r->wait[s]);
    cli_json_close(&j, '}');
  }
  cli_json_close(&j, ']');
  stalls_json(&j, r);
  cli_json_text(&j, "metrics", r->metrics_path);
  cli_json_text(&j, "plan", r->plan_path);
  if (r->timeline_path)
    cli_json_text(&j, "timeline", r->timeline_path);
  if (r->saved)
    cli_json_text(&j, "model", job->out);
  cli_json_close(&j, '}');
  fputc('\n', out);
}
