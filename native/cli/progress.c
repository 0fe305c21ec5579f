/* progress.c - progress on stderr. A terminal shows one line that is redrawn and never wider than
 * the terminal. Elsewhere three lines come with every step, and at most once a second: what is
 * learned and how fast, the batch and memory, what the machine does. */
#include "cli/cli.h"
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

static const double every_s = 1; /* from line to line where stderr is no terminal */

double cli_now_s(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

void cli_progress_begin(cli_progress *p, const cli_job *job) {
  *p = (cli_progress){
      .quiet = job->quiet,
      .tty = isatty(STDERR_FILENO),
      .first_step = job->first_step,
      .device_mem_bytes = job->report.device_mem_bytes ? job->report.device_mem_bytes
                                                       : job->report.device_used_bytes,
      .host_mem_bytes =
          job->report.host_mem_bytes ? job->report.host_mem_bytes : job->report.host_used_bytes,
      .started_s = cli_now_s(),
      .printed_s = cli_now_s(),
      .val_loss = NAN,
  };
}

/* A line is due now. A terminal's line is redrawn at most ten times a second. */
static bool due(cli_progress *p, bool last) {
  double now = cli_now_s();
  if (p->quiet || ferror(stderr) || (!last && now - p->printed_s < (p->tty ? 0.1 : every_s)))
    return false;
  p->printed_s = now;
  if (p->tty)
    fputs("\r\033[K", stderr);
  p->line_open = p->tty;
  return true;
}

/* A part of a line. A narrow terminal shows the brief form, which may be empty. Where the brief
 * forms do not fit either, parts are left out, the highest rank first. */
enum { NOT_ON_TERMINAL = 100 }; /* the rank of a part that only a file's lines have */
typedef struct part {
  char text[64], brief[32];
  unsigned rank;
} part;

static unsigned columns(void) {
  struct winsize w;
  return ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col ? w.ws_col : 80;
}

/* Write the parts of ranks up to @rank to @line, two spaces apart. Returns the line's length. */
static size_t join(char *line, size_t room, const part *parts, unsigned n, bool brief,
                   unsigned rank) {
  size_t used = 0;
  line[0] = 0;
  for (unsigned i = 0; i < n; i++) {
    const char *text = brief ? parts[i].brief : parts[i].text;
    if (parts[i].rank <= rank && text[0] && used < room)
      used += (size_t)snprintf(line + used, room - used, "%s%s", used ? "  " : "", text);
  }
  return used;
}

/* A terminal's line. */
static void put_fitting(const part *parts, unsigned n) {
  char line[512];
  const size_t most = columns() - 1; /* a full last column wraps on some terminals */
  unsigned rank = n;
  bool fits = join(line, sizeof line, parts, n, false, n) <= most;
  while (!fits && rank-- > 0)
    fits = join(line, sizeof line, parts, n, true, rank) <= most;
  fprintf(stderr, "%.*s", (int)most, line);
}

/* @line_end: where the lines end that are no terminal's, as the number of their last part + 1. */
static void put_lines(const cli_progress *p, const part *parts, const unsigned *line_end,
                      unsigned n_lines) {
  char line[512];
  if (p->tty)
    put_fitting(parts, line_end[n_lines - 1]);
  for (unsigned i = 0, first = 0; i < n_lines && !p->tty; first = line_end[i++])
    if (join(line, sizeof line, parts + first, line_end[i] - first, false, NOT_ON_TERMINAL))
      fprintf(stderr, "%s%s\n", i ? "  " : "", line);
  fflush(stderr);
}

static void put_line(const cli_progress *p, const part *parts, unsigned n) {
  put_lines(p, parts, &n, 1);
}

void cli_progress_load(cli_progress *p, const char *what, uint64_t done_bytes,
                       uint64_t total_bytes) {
  char done[32], total[32];
  part parts[3] = {{.rank = 2}, {.rank = 0}, {.rank = 1}};
  /* The stage's first line, in a run that loads for long. Stages are static strings. */
  bool first = p->loading != what && cli_now_s() - p->started_s > 0.5;
  p->loading = what;
  if (!due(p, first))
    return;
  snprintf(parts[0].text, sizeof parts->text, "%5.1f s", cli_now_s() - p->started_s);
  if (total_bytes)
    snprintf(parts[1].text, sizeof parts->text, "%s: %s of %s", what, cli_bytes(done, done_bytes),
             cli_bytes(total, total_bytes));
  else
    snprintf(parts[1].text, sizeof parts->text, "%s", what);
  snprintf(parts[1].brief, sizeof parts->brief, "%s", what);
  if (total_bytes)
    snprintf(parts[2].brief, sizeof parts->brief, "%.0f%%",
             100.0 * (double)done_bytes / (double)total_bytes);
  put_line(p, parts, total_bytes ? 3 : 2);
}

/* "device 14.0/17.0 MiB"; "device 82%". */
static void memory_part(part *out, const char *name, uint64_t bytes, uint64_t cap) {
  char used[32], most[32];
  cli_bytes(used, bytes);
  const char *unit = strchr(used, ' '), *cap_unit = strchr(cli_bytes(most, cap), ' ');
  const bool same = unit && cap_unit && strcmp(unit, cap_unit) == 0;
  snprintf(out->text, sizeof out->text, "%s %.*s/%s", name,
           same ? (int)(unit - used) : (int)sizeof used, used, most);
  snprintf(out->brief, sizeof out->brief, "%s %.0f%%", name,
           cap ? 100.0 * (double)bytes / (double)cap : 100);
}

/* "5.24M" */
static const char *short_count(char buf[8], uint64_t n) {
  double x = (double)n;
  unsigned unit = 0;
  for (; x >= 1000 && unit < 4; unit++)
    x /= 1000;
  snprintf(buf, 8, unit ? "%.3g%c" : "%.0f", x < 1e6 ? x : 1e6, " kMGT"[unit]);
  return buf;
}

/* Set both forms of a part. */
static void say(part *out, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void say(part *out, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(out->text, sizeof out->text, fmt, ap);
  va_end(ap);
  memcpy(out->brief, out->text, sizeof out->brief - 1);
}

/* The parts of a step's lines, in their order. */
enum {
  STEP,
  LOSS,
  VAL,
  SKIPPED,
  GRAD,
  LR,
  SPEED,
  FLOPS,
  MFU,
  ETA,
  LEARNING_END,
  CONSUMED = LEARNING_END,
  BATCH,
  ELAPSED,
  DEVICE,
  HOST,
  MEMORY_END,
  TIME = MEMORY_END,
  H2D,
  D2H,
  UPDATES,
  GPU,
  N_PARTS
};
static const unsigned line_end[] = {LEARNING_END, MEMORY_END, N_PARTS};
static const unsigned ranks[N_PARTS] = {[STEP] = 0,
                                        [LOSS] = 1,
                                        [ETA] = 2,
                                        [SKIPPED] = 3,
                                        [VAL] = 4,
                                        [SPEED] = 5,
                                        [DEVICE] = 6,
                                        [HOST] = 7,
                                        [GRAD] = 8,
                                        [LR] = 9,
                                        [MFU] = 10,
                                        [FLOPS] = 11,
                                        [GPU] = 12,
                                        [CONSUMED] = 13,
                                        [ELAPSED] = 14,
                                        [BATCH] = 15,
                                        [TIME] = NOT_ON_TERMINAL,
                                        [H2D] = NOT_ON_TERMINAL,
                                        [D2H] = NOT_ON_TERMINAL,
                                        [UPDATES] = NOT_ON_TERMINAL};

/* "1410 MHz 685 W 61 C", without what is unknown; "2 GPUs 1410 MHz 1371 W 61 C". */
static void gpu_part(part *out, const ps_step_metrics *m) {
  const struct {
    double value;
    const char *unit;
  } seen[] = {{m->gpu_clock_mhz, "MHz"}, {m->gpu_power_w, "W"}, {m->gpu_temperature_c, "C"}};
  char text[sizeof out->brief] = "", of[32] = "";
  size_t used = 0;
  if (m->n_gpus_read > 1)
    snprintf(of, sizeof of, "%" PRIu64 " GPUs ", m->n_gpus_read);
  for (size_t i = 0; i < sizeof seen / sizeof *seen; i++)
    if (seen[i].value > 0 && used < sizeof text)
      used += (size_t)snprintf(text + used, sizeof text - used, "%s%.0f %s", used ? " " : of,
                               seen[i].value, seen[i].unit);
  say(out, "%s", text);
}

/* How fast the step was beside the plan, and what it moved a second. */
static void machine_parts(part *parts, const ps_step_metrics *m) {
  const double ratio = m->predicted_step_s > 0 ? m->step_s / m->predicted_step_s : 0;
  char rate[32];
  say(&parts[TIME], "step %.3f s, %.2f of predicted", m->step_s, ratio);
  say(&parts[H2D], "h2d %s", cli_rate(rate, m->h2d_bytes_per_s));
  say(&parts[D2H], "d2h %s", cli_rate(rate, m->d2h_bytes_per_s));
  if (m->update_bytes_per_s > 0)
    say(&parts[UPDATES], "updates %s", cli_rate(rate, m->update_bytes_per_s));
  gpu_part(&parts[GPU], m);
}

/* The factor before a figure of one GPU, such as "2 hosts x 8 x ". */
static const char *several(const cli_step *s, char text[64]) {
  char hosts[24] = "", gpus[16] = "";
  if (s->n_hosts > 1)
    snprintf(hosts, sizeof hosts, "%u hosts x ", s->n_hosts);
  if (s->n_gpus > 1)
    snprintf(gpus, sizeof gpus, "%u x ", s->n_gpus);
  snprintf(text, 64, "%s%s", hosts, gpus);
  return text;
}

void cli_progress_step(cli_progress *p, const ps_step_metrics *m, const cli_step *s) {
  char a[8], b[8], time[32], times[64];
  part parts[N_PARTS] = {0};
  const uint64_t step = m->step + 1;
  if (!due(p, step == p->first_step + 1 || step == s->total_steps))
    return;
  for (unsigned i = 0; i < N_PARTS; i++)
    parts[i].rank = ranks[i];
  say(&parts[STEP], "step %" PRIu64 "/%" PRIu64, step, s->total_steps);
  say(&parts[LOSS], "loss %.4f", m->loss);
  if (isfinite(p->val_loss))
    say(&parts[VAL], "val %.4f", p->val_loss);
  if (m->n_skipped)
    say(&parts[SKIPPED], "%" PRIu64 " skipped", m->n_skipped);
  say(&parts[GRAD], "grad norm %.3g", m->grad_norm);
  say(&parts[LR], "lr %.2e", m->lr);
  say(&parts[CONSUMED], "%s samples, %s tokens", short_count(a, s->consumed_samples),
      short_count(b, s->consumed_tokens));
  say(&parts[BATCH], "batch %" PRIu64 "x%" PRIu64, s->samples, m->tokens / s->samples);
  say(&parts[SPEED], "%.0f tok/s", m->tokens_per_s);
  say(&parts[FLOPS], "%s%.3g TFLOP/s", several(s, times), s->tflops);
  if (m->mfu > 0)
    say(&parts[MFU], "MFU %.1f%%", 100 * m->mfu);
  say(&parts[ELAPSED], "elapsed %s", cli_duration(time, s->elapsed_s));
  say(&parts[ETA], "ETA %s", cli_duration(time, s->eta_s));
  memory_part(&parts[DEVICE], "device", m->device_peak_bytes, p->device_mem_bytes);
  memory_part(&parts[HOST], "host", m->host_peak_bytes, p->host_mem_bytes);
  machine_parts(parts, m);
  put_lines(p, parts, line_end, sizeof line_end / sizeof *line_end);
}

void cli_progress_count(cli_progress *p, const char *what, uint64_t done, uint64_t total) {
  part parts[1] = {{.rank = 0}};
  if (!due(p, false))
    return;
  snprintf(parts[0].text, sizeof parts->text, "%s %" PRIu64 " of %" PRIu64 ", %.0f s", what, done,
           total, cli_now_s() - p->started_s);
  snprintf(parts[0].brief, sizeof parts->brief, "%" PRIu64 "/%" PRIu64, done, total);
  put_line(p, parts, 1);
}

void cli_progress_search(cli_progress *p, uint64_t n_evaluated, double best_tokens_per_s) {
  part parts[3] = {{.rank = 1}, {.rank = 2}, {.rank = 0}};
  const double now_s = cli_now_s();
  if ((p->tty ? now_s - p->started_s < 0.5 : now_s - p->printed_s < 5) || !due(p, false))
    return;
  snprintf(parts[0].text, sizeof parts->text, "searching a plan, %.0f s:", now_s - p->started_s);
  snprintf(parts[0].brief, sizeof parts->brief, "%.0f s", now_s - p->started_s);
  snprintf(parts[1].text, sizeof parts->text, "%" PRIu64 " evaluated", n_evaluated);
  if (best_tokens_per_s > 0)
    say(&parts[2], "best %.0f tokens/s", best_tokens_per_s);
  else
    say(&parts[2], "none fits yet");
  put_line(p, parts, 3);
}

void cli_progress_clear(cli_progress *p) {
  if (p->line_open)
    fputs("\r\033[K", stderr);
  p->line_open = false;
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
  char text[8192], shown[8192];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  fprintf(stderr, "penstock: %s\n", ps_printable(shown, sizeof shown, text));
}

static void note_warning(void *user, ps_log_level level, const char *message) {
  if (level >= PS_LOG_WARN)
    cli_progress_note(user, "%s", message);
}

void cli_warnings_over(cli_progress *p) { ps_log_set(note_warning, p); }
