/* observed.c - how long a run's steps take beside the plan, what they wait for, and at which rates
 * its ops run. */
#include "train/observed.h"
#include "plan/speeds.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* MARKED: steps whose marks are read together, of which the middle one tells speeds. QUIET: steps
 * from there to the next ones. COMPARED: steps of which the median counts. SURE: medians in a row
 * that are off before it is said. */
enum {
  MARKED = PS__MARKED_STEPS,
  QUIET = 5,
  COMPARED = 5,
  SURE = 3,
  KEPT = 16,
  WARMUP = 2,
  STALLS = 256
};
enum { DISK_TEXT = 128 };
static const double DISK_NOTICED = 0.2;      /* of its rates */
enum { FIRST_REST = 5, LONGEST_REST = 320 }; /* steps between two lines: twice as many each time */

struct ps__observer {
  uint64_t n_ops;
  ps_trace_event *events; /* [MARKED][n_ops]; NULL: no marks are read */
  uint64_t first_marked;  /* the trainer's step that the next marks begin with */
  uint32_t n_marked;      /* of them that are read */
  double marked_s[MARKED];
  /* of steps that took the same time; and the last step that they are of */
  ps__speeds seen[COMPARED + 1], speeds; /* one more, to measure into */
  double seen_s;
  uint32_t n_seen;
  uint64_t seen_step;
  double expected_s;
  /* what the streams that compute wait for, as planned, and as in the last marks */
  ps_stall planned[STALLS], measured[STALLS];
  uint64_t n_planned, n_measured;
  double planned_busy_s[PS_MAX_STREAMS], busy_s[PS_MAX_STREAMS];
  /* the last steps that compare, a ring */
  struct {
    uint64_t step;
    double s;
  } last[KEPT];
  uint64_t n_last;
  /* how far steps are from the plan, as last said; on which side of that the last medians are, how
   * many of them */
  double told;
  int side;
  uint32_t n_side;
  uint64_t rest, rests_until;
  bool asked;     /* marks were asked for since the medians went off */
  uint64_t since; /* the trainer's step that ps__notice.since is of */
  ps__notice notice;
};

/* ---- what the plan says ---------------------------------------------------------------------- */

static ps_status note_plan(ps__observer *o, const ps_plan *p) {
  memcpy(o->planned_busy_s, p->report.stream_busy_s, sizeof o->planned_busy_s);
  PS_TRY(ps_plan_simulate(p, MARKED, o->events, NULL));
  PS_TRY(ps_plan_stalls(p, o->events, MARKED * o->n_ops, o->planned, STALLS, &o->n_planned));
  o->n_planned = o->n_planned < STALLS ? o->n_planned : STALLS;
  return PS_OK;
}

/* A plan that is not made again does not count the marks: they are read where the host's cap has
 * room for them. */
static bool reads_marks(const ps_trainer *t) {
  const ps_plan *p = t->plan;
  const uint64_t bytes = MARKED * p->step.n_op * sizeof(ps_trace_event);
  return p->cfg.trace_steps >= 2 && !t->cfg.trace_to &&
         (p->cfg.replan || !p->cfg.host_mem_bytes ||
          p->report.host_used_bytes + bytes <= p->cfg.host_mem_bytes);
}

ps_status ps__observer_create(ps__observer **out, const ps_trainer *t) {
  ps__observer *o = ps__calloc(1, sizeof *o);
  if (!o)
    return ps__fail(PS_ENOMEM, "out of memory for what the run tells of its machine");
  o->n_ops = t->plan->step.n_op;
  o->rest = FIRST_REST;
  o->first_marked = t->n_reported + WARMUP;
  ps_status st = PS_OK;
  if (reads_marks(t)) {
    o->events = ps__calloc(MARKED * o->n_ops, sizeof *o->events);
    st = o->events ? note_plan(o, t->plan)
                   : ps__fail(PS_ENOMEM, "out of memory for marks of %llu ops",
                              (unsigned long long)o->n_ops);
  }
  if (st == PS_OK)
    *out = o;
  else
    ps__observer_destroy(o);
  return st;
}

void ps__observer_destroy(ps__observer *o) {
  if (!o)
    return;
  ps__free(o->events);
  ps__free(o);
}

/* ---- marks ----------------------------------------------------------------------------------- */

static ps_status predict(ps__observer *o, const ps_plan *p) {
  ps_hardware hw = p->hw;
  double ns;
  ps__speeds_apply(&hw, &o->speeds);
  ps__cost_model m =
      ps__cost_model_of(&hw, p->model->fp8.on, p->step.at, hw.n_threads, p->spec.sum_threads);
  PS_TRY(ps__step_predict(&p->step, p->schedule, &m, NULL, &ns));
  o->expected_s = ns * 1e-9;
  return PS_OK;
}

/* Speeds of steps that took another time are those of another machine. */
static ps_status learn(ps__observer *o, const ps_plan *p, uint64_t step) {
  ps__speeds *s = &o->seen[COMPARED];
  const double took = o->marked_s[MARKED / 2];
  PS_TRY(ps__speeds_measure(s, p, &p->hw, o->events));
  if (o->n_seen && fabs(took / o->seen_s - 1) > PS__NOTICED)
    o->n_seen = 0;
  if (o->n_seen == COMPARED)
    memmove(o->seen, o->seen + 1, --o->n_seen * sizeof *o->seen);
  o->seen[o->n_seen++] = *s;
  o->seen_s = took;
  ps__speeds_median(&o->speeds, o->seen, o->n_seen);
  PS_TRY(predict(o, p));
  PS_TRY(ps_plan_stalls(p, o->events, MARKED * o->n_ops, o->measured, STALLS, &o->n_measured));
  o->n_measured = o->n_measured < STALLS ? o->n_measured : STALLS;
  memset(o->busy_s, 0, sizeof o->busy_s);
  for (uint64_t i = o->n_ops; i < 2 * o->n_ops; i++)
    o->busy_s[o->events[i].stream] += (double)(o->events[i].end_ns - o->events[i].start_ns) * 1e-9;
  o->seen_step = step;
  return PS_OK;
}

/* Steps between two readings, such that they take a five hundredth of the run's time at most. */
static uint64_t quiet_steps(uint64_t spent_ns, double step_s) {
  const double most = (double)spent_ns * 1e-9 / (0.002 * step_s);
  return most > QUIET ? (uint64_t)fmin(most, 1e6) : QUIET;
}

/* Marks count where the steps ran one into the other, beside no checkpoint. */
static void read_marks(ps_trainer *t, bool compares, double step_s) {
  ps__observer *o = t->observer;
  const uint64_t step = t->n_reported, begin = ps__engine_now(t->engine, PS__CALLER);
  if (!o->events || step < o->first_marked)
    return;
  if (!compares && o->n_marked)
    o->n_marked = 0;
  ps_trace_event *to = o->events + o->n_marked * o->n_ops;
  ps_status st = ps__run_marks(t->run, step - t->run_first, to);
  o->marked_s[o->n_marked] = step_s;
  o->n_marked = st == PS_OK ? o->n_marked + 1 : 0;
  if (o->n_marked == MARKED) {
    st = learn(o, t->plan, step);
    o->n_marked = 0;
    o->first_marked = step + quiet_steps(ps__engine_now(t->engine, PS__CALLER) - begin, step_s);
  }
  if (st != PS_OK)
    ps__clear_error(); /* nothing is known; the training goes on */
}

/* ---- beside the plan ------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

static double median_s(const ps__observer *o) {
  double s[COMPARED];
  for (int i = 0; i < COMPARED; i++)
    s[i] = o->last[(o->n_last - 1 - (uint64_t)i) % KEPT].s;
  qsort(s, COMPARED, sizeof *s, by_value);
  return s[COMPARED / 2];
}

static int side_of(double off, double tolerated) {
  return off > tolerated ? 1 : off < -tolerated ? -1 : 0;
}

/* The first of the steps that are on the same side of @from as the last ones. */
static uint64_t since(const ps__observer *o, double planned_s, double from, int side) {
  const uint64_t n = o->n_last < KEPT ? o->n_last : KEPT;
  uint64_t first = o->last[(o->n_last - COMPARED / 2 - 1) % KEPT].step;
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t k = (o->n_last - 1 - i) % KEPT;
    if (i > COMPARED / 2 && side_of(o->last[k].s / planned_s - 1 - from, PS__NOTICED / 2) != side)
      break;
    if (i >= COMPARED / 2)
      first = o->last[k].step;
  }
  return first;
}

static double waited(const ps_stall *of, uint64_t n, uint32_t stream, const char *what) {
  double s = 0;
  for (uint64_t i = 0; i < n; i++)
    if (of[i].stream == stream && strcmp(of[i].what, what) == 0)
      s += of[i].seconds;
  return s;
}

static void consider(ps__notice *n, int side, uint32_t stream, const char *what, double is,
                     double was) {
  if (side * (is - was) <= side * (n->wait.seconds - n->wait_plan_s))
    return;
  n->wait = (ps_stall){.stream = stream, .awaited_stream = stream, .seconds = is};
  snprintf(n->wait.what, sizeof n->wait.what, "%s", what);
  n->wait_plan_s = was;
}

/* Of the streams that compute, the wait that is further from the plan than others; or their ops
 * themselves. */
static void find_wait(const ps__observer *o, const ps_plan *p, int side, ps__notice *n) {
  for (uint32_t d = 0; d < p->at->n_devices; d++) {
    const uint32_t s = p->at->dev[d].compute;
    consider(n, side, s, "computation", o->busy_s[s], o->planned_busy_s[s]);
    for (uint64_t i = 0; i < o->n_measured + o->n_planned; i++) {
      const ps_stall *w = i < o->n_measured ? &o->measured[i] : &o->planned[i - o->n_measured];
      if (w->stream == s)
        consider(n, side, s, w->what, waited(o->measured, o->n_measured, s, w->what),
                 waited(o->planned, o->n_planned, s, w->what));
    }
  }
}

/* No wait of the GPU is for the drive itself: updates wait for it, and weights for updates. */
static void say_disk(const ps__observer *o, const ps_plan *p, char text[DISK_TEXT]) {
  ps_hardware hw = p->hw;
  text[0] = 0;
  if (p->at->disk == PS__NO_PLACE || !o->n_seen)
    return;
  ps__speeds_apply(&hw, &o->speeds);
  const double read = ps__disk_rate(&hw, false), write = ps__disk_rate(&hw, true),
               of_read = ps__disk_rate(&p->hw, false), of_write = ps__disk_rate(&p->hw, true);
  if (fmax(fabs(read / of_read - 1), fabs(write / of_write - 1)) > DISK_NOTICED)
    snprintf(text, DISK_TEXT,
             "; the disk reads %.3g GB/s, planned %.3g GB/s, and writes %.3g GB/s, planned %.3g "
             "GB/s",
             read * 1e-9, of_read * 1e-9, write * 1e-9, of_write * 1e-9);
}

static void say(const ps__observer *o, const ps_plan *p) {
  const ps__notice *n = &o->notice;
  const double off = n->measured_s / n->planned_s - 1;
  char why[192] = "", expected[64] = "", disk[DISK_TEXT];
  if (n->wait.what[0])
    snprintf(why, sizeof why, ": %s %s %.3g s a step%s%s, planned %.3g s",
             ps_plan_stream_name(p, n->wait.stream),
             strcmp(n->wait.what, "computation") ? "waits" : "computes", n->wait.seconds,
             strcmp(n->wait.what, "computation") ? " for " : "",
             strcmp(n->wait.what, "computation") ? n->wait.what : "", n->wait_plan_s);
  if (n->expected_s > 0)
    snprintf(expected, sizeof expected, "; by the rates of this run a step takes %.4g s",
             n->expected_s);
  say_disk(o, p, disk);
  if (side_of(off, PS__NOTICED))
    ps__log(PS_LOG_WARN,
            "step %llu: steps take %.4g s, %.0f%% %s than the planned %.4g s, since step "
            "%llu%s%s%s",
            (unsigned long long)n->step + 1, n->measured_s, 100 * fabs(off),
            off > 0 ? "longer" : "shorter", n->planned_s, (unsigned long long)n->since + 1, why,
            disk, expected);
  else
    ps__log(PS_LOG_WARN, "step %llu: steps take %.4g s, as planned, since step %llu",
            (unsigned long long)n->step + 1, n->measured_s, (unsigned long long)n->since + 1);
}

/* Whether marks tell of the steps that are off. */
static bool marked_since(const ps__observer *o) {
  return o->expected_s > 0 && o->seen_step >= o->since + MARKED - 1;
}

/* Which medians are how far from what was said. */
static int count_side(ps__observer *o, double planned_s, double off) {
  const int side = side_of(off - o->told, PS__NOTICED);
  if (side != o->side) {
    o->side = side;
    o->n_side = 0;
    o->asked = false;
  }
  o->n_side++;
  if (side)
    o->since = since(o, planned_s, o->told, side);
  return side;
}

/* Marks of the steps from the next one on, once for each time that steps go off. */
static void ask(ps__observer *o, uint64_t step) {
  if (o->asked || o->n_marked)
    return;
  o->asked = true;
  if (o->first_marked > step + 1)
    o->first_marked = step + 1;
}

static void said(ps__observer *o, uint64_t step, double off) {
  o->told = side_of(off, PS__NOTICED) ? off : 0;
  o->side = 0;
  o->n_side = SURE;
  o->rests_until = step + o->rest;
  o->rest = o->rest < LONGEST_REST ? 2 * o->rest : LONGEST_REST;
}

static void note(ps_trainer *t) {
  ps__observer *o = t->observer;
  ps__notice *n = &o->notice;
  const uint64_t step = o->last[(o->n_last - 1) % KEPT].step;
  const double planned_s = t->size.step_s, measured_s = median_s(o),
               off = measured_s / planned_s - 1;
  const int side = count_side(o, planned_s, off), beside = side_of(off, PS__NOTICED);
  const bool known = marked_since(o);
  *n = (ps__notice){.step = t->cfg.first_step + step,
                    .since = t->cfg.first_step + o->since,
                    .planned_s = planned_s,
                    .measured_s = measured_s,
                    .expected_s = known ? o->expected_s : 0,
                    .replan = known && beside && o->n_side >= SURE &&
                              fabs(o->expected_s - measured_s) < fabs(measured_s - planned_s) / 2};
  if (known && beside)
    find_wait(o, t->plan, beside, n);
  if (!side || step < o->rests_until)
    return;
  if (!known && o->events)
    ask(o, step);
  /* a line without a cause comes late, where marks cannot be read */
  if (o->n_side >= (known || !beside || !o->events ? SURE : KEPT)) {
    say(o, t->plan);
    said(o, step, off);
  }
}

/* A step compares with the plan if it began while the step before ran. */
static bool compares(const ps_trainer *t) {
  const ps__step_record *r = &t->ring[t->n_reported % PS__RING];
  return t->n_reported > t->run_first && r->submit_ns < t->last_end_ns && !t->writing;
}

void ps__observer_step(ps_trainer *t, double step_s) {
  ps__observer *o = t->observer;
  if (t->size.schedule != t->plan->schedule || t->n_reported < WARMUP)
    return;
  const bool counts = compares(t);
  read_marks(t, counts, step_s);
  if (!counts)
    return;
  o->last[o->n_last % KEPT].step = t->n_reported;
  o->last[o->n_last++ % KEPT].s = step_s;
  if (o->n_last >= COMPARED)
    note(t);
}

/* ---- what is told ---------------------------------------------------------------------------- */

double ps__observed_expected_s(const ps_trainer *t) { return t->observer->expected_s; }

bool ps__observed_notice(const ps_trainer *t, ps__notice *out) {
  if (t->observer->n_last < COMPARED)
    return false;
  *out = t->observer->notice;
  return true;
}

ps_status ps__observed_hardware(const ps_trainer *t, ps_hardware *out) {
  if (!t->observer || !t->observer->n_seen)
    return ps__fail(PS_ESTATE, "the run has told no rates yet");
  ps_hardware hw = t->plan->hw;
  ps__speeds_apply(&hw, &t->observer->speeds);
  *out = hw;
  return PS_OK;
}

ps_status ps_trainer_rates(const ps_trainer *t, ps_hardware *out) {
  if (!t || !out)
    return ps__fail(PS_EINVAL, "ps_trainer_rates: trainer and out must be given");
  return ps__observed_hardware(t, out);
}
