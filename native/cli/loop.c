/* loop.c - the steps of a training: two are in flight, and validations, samples, checkpoints and
 * profiles come between them. */
#include "cli/cli.h"
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* The median time of the steps after the warm-up; of all steps where there are no more. */
static double median_step(double *step_s, uint64_t n) {
  uint64_t skip = n > CLI_WARMUP_STEPS ? CLI_WARMUP_STEPS : 0, left = n - skip;
  if (!left)
    return 0;
  qsort(step_s + skip, left, sizeof *step_s, by_value);
  return left % 2 ? step_s[skip + left / 2]
                  : (step_s[skip + left / 2 - 1] + step_s[skip + left / 2]) / 2;
}

static void note_step(cli_run_result *r, const ps_step_metrics *m, double *step_s) {
  cli_note_loss(r, m->loss);
  step_s[r->n_done++] = m->step_s;
  r->tokens += m->tokens;
  r->n_skipped = m->n_skipped;
  r->predicted_step_s = m->predicted_step_s;
  r->device_peak_bytes = m->device_peak_bytes;
  r->host_peak_bytes = m->host_peak_bytes;
}

/* Prints once where each stream stands, when no step has ended for ten times the predicted step
 * time, or for 30 s if that is longer. The time of a switch to another plan does not count, and the
 * predicted time is that of the plan that runs. */
typedef struct watchdog {
  ps_trainer *t;
  _Atomic uint32_t patience_s;
  _Atomic uint64_t n_done;
  _Atomic bool over, paused; /* paused: while a checkpoint is written */
  pthread_t thread;
} watchdog;

static void *watch_steps(void *arg) {
  watchdog *w = arg;
  uint64_t n = 0;
  double since = cli_now_s();
  while (!atomic_load(&w->over)) {
    char text[2048];
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    if (atomic_load(&w->n_done) != n || atomic_load(&w->paused) || ps_trainer_switching(w->t)) {
      n = atomic_load(&w->n_done);
      since = cli_now_s();
    }
    const uint32_t patience_s = atomic_load(&w->patience_s);
    if (cli_now_s() - since < patience_s)
      continue;
    ps_trainer_where(w->t, text, sizeof text);
    fprintf(stderr, "penstock: no step has ended for %u s; the streams:\n%s\n", patience_s, text);
    break;
  }
  return NULL;
}

static void watch_plan(watchdog *w, const cli_job *job) {
  const double s = 10 * job->report.step_s;
  atomic_store(&w->patience_s, s < 30 ? 30 : s > 1e9 ? 1000000000 : (uint32_t)s);
}

static bool watch_begin(watchdog *w, ps_trainer *t, const cli_job *job) {
  *w = (watchdog){.t = t};
  watch_plan(w, job);
  return pthread_create(&w->thread, NULL, watch_steps, w) == 0;
}

static void watch_end(watchdog *w) {
  atomic_store(&w->over, true);
  pthread_join(w->thread, NULL);
}

/* Submits up to @most steps in all. A checkpoint is begun between its last step and the next.
 * @noted: the last step that metrics.jsonl has. */
static ps_status submit_steps(cli_job *job, ps_trainer *t, cli_progress *p, uint64_t *submitted,
                              uint64_t noted, uint64_t most) {
  ps_status st = PS_OK;
  while (st == PS_OK && *submitted < most) {
    const uint64_t step = job->first_step + *submitted,
                   n = cli_checkpoint_room(job, step, noted, most - *submitted);
    if (n == 0)
      break;
    st = ps_trainer_submit(t, n);
    *submitted += n;
    if (st == PS_OK)
      cli_checkpoint_due(job, t, p, step + n, false);
  }
  return st;
}

/* How many steps of @n may be submitted in all, after @n_done: two are in flight, but none is where
 * a validation or samples come, or where a profiler begins or ends its recording. */
static uint64_t submit_limit(const cli_job *job, uint64_t n_done, uint64_t n) {
  const uint64_t step = job->first_step + n_done, ahead = n - n_done < 2 ? n : n_done + 2,
                 stop[] = {cli_val_next(job, step), cli_samples_next(job, step),
                           cli_profile_next(job, step)};
  uint64_t most = job->first_step + ahead;
  for (size_t i = 0; i < sizeof stop / sizeof *stop; i++)
    most = stop[i] < most ? stop[i] : most;
  return most - job->first_step;
}

/* What comes after step @step, while no step is in flight. @v: NULL where no validation does. */
static int between_steps(cli_job *job, ps_trainer *t, cli_progress *p, watchdog *dog,
                         cli_run_result *r, uint64_t step, ps_validation *v) {
  atomic_store(&dog->paused, true);
  int code = v ? cli_validate(job, t, p, r, step, v) : CLI_OK;
  if (code == CLI_OK && cli_samples_due(job, step))
    code = cli_sample(job, t, p, step);
  atomic_store(&dog->paused, false);
  return code;
}

/* The plan of the steps that follow is that of the job, and of plan.json. */
static int follow_plan(cli_job *job, const ps_trainer *t, const cli_run_result *r) {
  ps_plan *plan = ps_trainer_plan(t);
  if (plan == job->plan)
    return CLI_OK;
  job->plan = plan;
  const ps_status st = ps_plan_get_report(plan, &job->report);
  if (st != PS_OK)
    return cli_fail_status(st, false);
  return r->plan_path ? cli_file_replace(r->plan_path, ps_plan_json(plan), NULL) : CLI_OK;
}

int cli_run_steps(cli_job *job, ps_trainer *t, cli_progress *p, FILE *metrics, cli_run_result *r) {
  const uint64_t n_steps = job->train_config.total_steps - job->first_step;
  uint64_t end = n_steps; /* the steps that are to run: fewer where another host's task stops */
  double *step_s = calloc(n_steps + 1, sizeof *step_s);
  if (!step_s)
    return cli_fail(CLI_FAILED, "out of memory for the times of %llu steps",
                    (unsigned long long)n_steps);
  int code = CLI_OK;
  uint64_t submitted = 0;
  watchdog dog = {0};
  cli_step s = {0};
  const bool watched = watch_begin(&dog, t, job);
  if (!job->follows_aloud)
    cli_warnings_over(p);
  for (;;) {
    r->interrupted = r->interrupted || cli_interrupts();
    const bool stops = r->interrupted || code != CLI_OK;
    if (stops && job->hosts)
      ps_trainer_ask_stop(t);
    ps_status st = PS_OK;
    if (r->n_done == submitted)
      st = cli_profile_at(job, t, job->first_step + r->n_done);
    if (st == PS_OK)
      st = submit_steps(job, t, p, &submitted, job->first_step + r->n_done,
                        stops && !job->hosts ? 0 : submit_limit(job, r->n_done, end));
    atomic_store(&dog.paused, ps_trainer_checkpoint_running(t) != 0);
    if (st == PS_OK && r->n_done == submitted)
      break;
    ps_step_metrics m = {0};
    if (st == PS_OK)
      st = ps_trainer_wait(t, &m);
    if (st != PS_OK) {
      cli_progress_end(p);
      r->failed = true;
      r->interrupted = r->interrupted || st == PS_ECANCELLED;
      code = st == PS_ECANCELLED ? CLI_INTERRUPTED : cli_fail_status(st, false);
      break;
    }
    m.loss = isnan(m.loss) ? NAN : m.loss; /* without a sign, which printf() would show */
    if (code == CLI_OK)
      code = follow_plan(job, t, r);
    watch_plan(&dog, job);
    note_step(r, &m, step_s);
    if (m.stop && end > r->n_done + 1) {
      end = r->n_done + 1; /* which all tasks know at the same step, and may have submitted */
      r->interrupted = true;
      if (m.stop - 1 != job->task.rank)
        cli_progress_note(p, "rank %llu asked to stop: the last step is %llu",
                          (unsigned long long)m.stop - 1,
                          (unsigned long long)(job->first_step + end));
    }
    atomic_fetch_add(&dog.n_done, 1);
    cli_step_note(&s, job, &m, cli_now_s() - p->started_s, r->n_done);
    cli_progress_step(p, &m, &s);
    ps_validation v;
    const uint64_t step = job->first_step + r->n_done;
    const bool due = code == CLI_OK && cli_val_due(job, step);
    const uint64_t before = r->n_validations;
    const int between =
        code == CLI_OK ? between_steps(job, t, p, &dog, r, step, due ? &v : NULL) : CLI_OK;
    if (code == CLI_OK && metrics)
      code = cli_metrics_write(job, metrics, r->metrics_path, &m, &s,
                               r->n_validations > before ? &v : NULL);
    code = code == CLI_OK ? between : code;
    cli_checkpoint_end(job, t, p, false);
  }
  if (watched)
    watch_end(&dog);
  job->checkpoints.run_over = true;
  if (code == CLI_OK && r->interrupted && r->n_done)
    cli_checkpoint_due(job, t, p, job->first_step + r->n_done, true);
  cli_checkpoint_end(job, t, p, true);
  if (r->interrupted && job->checkpoints.begun == job->first_step + r->n_done &&
      job->checkpoints.newest)
    cli_progress_note(p, "the same command with --resume auto goes on from there");
  cli_progress_end(p);
  if (!job->follows_aloud)
    cli_warnings(!p->quiet);
  /* The second Ctrl-C may come after the last step. It then skips what follows, the save too. */
  if (code == CLI_INTERRUPTED || (code == CLI_OK && cli_interrupts() > 1))
    code = cli_fail(CLI_INTERRUPTED, "stopped at once; nothing is saved");
  r->step_s_median = median_step(step_s, r->n_done);
  free(step_s);
  return code;
}
