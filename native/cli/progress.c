/* progress.c - live progress on stderr: one line redrawn on a terminal, a line every few seconds otherwise. */
#include "cli.h"
#include <inttypes.h>
#include <stdarg.h>
#include <time.h>
#include <unistd.h>

static const double every_s = 5; /* between lines where stderr is no terminal */

double cli_now_s(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

void cli_progress_begin(cli_progress *p, const cli_job *job) {
  *p = (cli_progress){
      .quiet = job->quiet,
      .tty = isatty(STDERR_FILENO),
      .n_steps = job->steps,
      .device_cap_bytes = job->report.device_cap_bytes ? job->report.device_cap_bytes : job->report.device_bytes,
      .host_cap_bytes = job->report.host_cap_bytes ? job->report.host_cap_bytes : job->report.host_bytes,
      .started_s = cli_now_s(),
      .printed_s = cli_now_s(),
  };
}

/* Whether a line is due; a terminal's line is redrawn in place at most ten times a second. */
static bool due(cli_progress *p, bool last) {
  double now = cli_now_s();
  if (p->quiet || (!last && now - p->printed_s < (p->tty ? 0.1 : every_s)))
    return false;
  p->printed_s = now;
  if (p->tty)
    fputs("\r\033[K", stderr);
  p->line_open = p->tty;
  return true;
}

static void end_line(const cli_progress *p) {
  if (!p->tty)
    fputc('\n', stderr);
  fflush(stderr);
}

void cli_progress_load(void *progress, const char *what, uint64_t done_bytes, uint64_t total_bytes) {
  cli_progress *p = progress;
  char done[32], total[32];
  bool first = p->loading != what && cli_now_s() - p->started_s > 0.5; /* of its stage (the strings are the library's own), in a run that takes its time */
  p->loading = what;
  if (!due(p, first))
    return;
  fprintf(stderr, "%5.1f s  %s: %s of %s", cli_now_s() - p->started_s, what, cli_bytes(done, done_bytes), cli_bytes(total, total_bytes));
  end_line(p);
}

void cli_progress_step(cli_progress *p, const ps_step_metrics *m, uint64_t n_done) {
  char eta[32], device[32], device_cap[32], host[32], host_cap[32];
  if (!due(p, n_done == 1 || n_done == p->n_steps))
    return;
  double per_step = (cli_now_s() - p->started_s) / (double)n_done;
  fprintf(stderr, "step %" PRIu64 "/%" PRIu64 "  loss %.4f  %.0f tok/s  ETA %s  device %s/%s  host %s/%s", n_done, p->n_steps, m->loss,
          m->tokens_per_s, cli_duration(eta, per_step * (double)(p->n_steps - n_done)), cli_bytes(device, m->device_peak_bytes),
          cli_bytes(device_cap, p->device_cap_bytes), cli_bytes(host, m->host_peak_bytes), cli_bytes(host_cap, p->host_cap_bytes));
  end_line(p);
}

void cli_progress_end(cli_progress *p) {
  if (p->line_open)
    fputc('\n', stderr);
  p->line_open = false;
}

void cli_progress_note(cli_progress *p, const char *fmt, ...) {
  if (p->quiet)
    return;
  cli_progress_end(p);
  va_list ap;
  va_start(ap, fmt);
  fputs("penstock: ", stderr);
  vfprintf(stderr, fmt, ap);
  fputc('\n', stderr);
  va_end(ap);
}
