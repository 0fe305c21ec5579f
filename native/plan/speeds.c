/* speeds.c - the speeds of a step's ops, from its marks. */
#include "plan/speeds.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 3, MIDDLE = 1, NONE = PS__N_SPEEDS };

/* ---- what an op is --------------------------------------------------------------------------- */

/* Of an op on a host's threads. */
static uint32_t host_resource(const ps__vop *op) {
  if (!op->kernel || op->kernel->op_class != PS_CLASS_OPTIMIZER)
    return NONE;
  switch (ps__op_rate(op->kernel)) {
  case PS__RATE_OPTIMIZER_WEIGHTS: return PS__SPEED_UPDATES_WEIGHTS;
  case PS__RATE_OPTIMIZER_STATE: return PS__SPEED_UPDATES_STATE;
  case PS__RATE_ACCUMULATE: return PS__SPEED_ACCUMULATE;
  case PS__RATE_SUMSQ: return PS__SPEED_SUMSQ;
  case PS__RATE_ACCUMULATE_SUMSQ: return PS__SPEED_ACCUMULATE_SUMSQ;
  default: return PS__SPEED_UPDATES;
  }
}

static uint32_t device_resource(const ps_hardware *hw, const ps__vop *op, const void *args) {
  switch (ps__op_rate(op->kernel)) {
  case PS__RATE_GEMM: return PS__SPEED_GEMM;
  case PS__RATE_GEMM_FP8: return PS__SPEED_GEMM_FP8;
  /* until they have rates of their own they are priced as other products */
  case PS__RATE_GEMM_GROUPED:
    return hw->gemm_grouped[0].rows ? PS__SPEED_GEMM_GROUPED : PS__SPEED_GEMM;
  case PS__RATE_ATTENTION_FWD:
    return ps__plain_attention(hw, args) ? PS__SPEED_PLAIN_FWD : PS__SPEED_ATTENTION_FWD;
  case PS__RATE_ATTENTION_BWD:
    return ps__plain_attention(hw, args) ? PS__SPEED_PLAIN_BWD : PS__SPEED_ATTENTION_BWD;
  case PS__RATE_DELTA_FWD: return PS__SPEED_DELTA_FWD;
  case PS__RATE_DELTA_BWD: return PS__SPEED_DELTA_BWD;
  default:
    return hw->backend == PS_BACKEND_CPU && op->kernel->op_class == PS_CLASS_OPTIMIZER
               ? PS__SPEED_UPDATES
               : PS__SPEED_ELEMENTWISE;
  }
}

/* NONE: the op's time says nothing of the machine, as it reads files of tokens or waits for other
 * hosts. */
static uint32_t resource_of(const ps__places *at, const ps_hardware *hw, const ps__vop *op,
                            const void *args) {
  if (ps__link_of(at, op->stream))
    switch (ps__direction(at, op->stream)) {
    case PS__TO_DEVICE: return PS__SPEED_H2D;
    case PS__TO_HOST: return PS__SPEED_D2H;
    case PS__FROM_DISK: return PS__SPEED_DISK_READ;
    case PS__TO_DISK: return PS__SPEED_DISK_WRITE;
    default: return PS__SPEED_PEERS;
    }
  if (op->stream == at->net)
    return NONE;
  if (op->stream == at->io)
    return op->tag.layer >= 0 ? PS__SPEED_GATHER : NONE;
  return ps__stream_on_host(at, op->stream) ? host_resource(op) : device_resource(hw, op, args);
}

/* Which bit of a set says that the resource is in use; 0: none does. */
static uint32_t bit_of(const ps_hardware *hw, uint32_t resource) {
  if (resource == PS__SPEED_H2D)
    return PS_CONTENTION_H2D;
  if (resource == PS__SPEED_D2H)
    return PS_CONTENTION_D2H;
  if (resource >= PS__SPEED_UPDATES && resource <= PS__SPEED_UPDATES_STATE)
    return PS_CONTENTION_OPTIMIZER;
  if (resource >= PS__SPEED_ACCUMULATE && resource <= PS__SPEED_ACCUMULATE_SUMSQ)
    return PS_CONTENTION_SUMS;
  return resource == PS__SPEED_ELEMENTWISE && !hw->contention[0].kinds ? PS__SPEED_WITH_ELEMENTWISE
                                                                       : 0;
}

/* ---- what ran beside what -------------------------------------------------------------------- */

/* A part of an op's time in which one set ran: ns of the op that the description says were done. */
typedef struct piece {
  uint32_t op, set;
  double ns;
} piece;

typedef struct sweep {
  const ps_plan *plan;
  const ps_trace_event *events;
  const ps_sim_cost *cost;
  const uint8_t *resource; /* [n_ops] */
  uint64_t n_ops;
  uint32_t *point; /* [2 * STEPS * n_ops]: 2 * event, + 1: its end */
  /* of each stream: the event that runs, or UINT32_MAX; the piece that is made of it */
  uint32_t running[PS_MAX_STREAMS];
  piece open[PS_MAX_STREAMS];
  double idle[PS_MAX_STREAMS], idle_at[PS_MAX_STREAMS]; /* as in the simulator */
  piece *piece;
  size_t n, cap;
  bool out_of_memory;
  ps__speeds *out; /* gets what ran at once, as sums over the ns of took */
  double took[PS__N_SPEEDS][PS__SPEED_SETS];
} sweep;

static uint64_t time_of(const ps_trace_event *events, uint32_t point) {
  return point & 1 ? events[point / 2].end_ns : events[point / 2].start_ns;
}

/* Ends come before starts of the same time, but an op's own. */
static int by_time(const void *pa, const void *pb, void *user) {
  const uint32_t a = *(const uint32_t *)pa, b = *(const uint32_t *)pb;
  const uint64_t ta = time_of(user, a), tb = time_of(user, b);
  if (ta != tb)
    return ta < tb ? -1 : 1;
  if (a / 2 != b / 2 && (a & 1) != (b & 1))
    return a & 1 ? -1 : 1;
  return a < b ? -1 : a > b;
}

static void close_piece(sweep *s, uint32_t stream) {
  piece *p = &s->open[stream];
  if (p->ns > 0) {
    if (s->n == s->cap && !PS_GROW(s->piece, s->n, s->cap)) {
      s->out_of_memory = true;
      return;
    }
    s->piece[s->n++] = *p;
  }
  p->ns = 0;
}

/* What the running ops do together: the set that counts, the simulator's kinds, the demands. */
typedef struct together {
  uint32_t set, kinds;
  double demand[PS_SIM_RESOURCES];
} together;

static together what_runs(const sweep *s) {
  together t = {.set = 0};
  for (uint32_t i = 0; i < s->plan->at->n_streams; i++) {
    if (s->running[i] == UINT32_MAX)
      continue;
    const uint64_t op = s->running[i] % s->n_ops;
    const ps_sim_cost *c = &s->cost[op];
    t.set |= bit_of(&s->plan->hw, s->resource[op]);
    t.kinds |= c->kind;
    for (int d = 0; d < PS_SIM_DEMANDS && c->demand[d] > 0; d++)
      t.demand[c->resource[d]] += c->demand[d];
  }
  return t;
}

/* @but: a resource that does not count. */
static double slowed(const together *t, const ps_sim_cost *c, uint32_t but) {
  double worst = 1;
  for (int d = 0; d < PS_SIM_DEMANDS && c->demand[d] > 0; d++)
    if (c->resource[d] != but)
      worst = fmax(worst, t->demand[c->resource[d]]);
  return c->slower ? fmax(worst, c->slower[t->kinds]) : worst;
}

static void note_together(sweep *s, const together *t, uint32_t op, double ns) {
  const uint32_t memory = ps__memory_of(s->plan->at->host);
  ps__speed *v = &s->out->of[s->resource[op]][t->set];
  v->demand += ns * t->demand[memory];
  v->slowed += ns * slowed(t, &s->cost[op], PS_SIM_RESOURCES);
  v->slowed_by_others += ns * slowed(t, &s->cost[op], memory);
  s->took[s->resource[op]][t->set] += ns;
}

static void means_together(const sweep *s) {
  for (int r = 0; r < PS__N_SPEEDS; r++)
    for (int k = 0; k < PS__SPEED_SETS; k++)
      if (s->took[r][k] > 0) {
        s->out->of[r][k].demand /= s->took[r][k];
        s->out->of[r][k].slowed /= s->took[r][k];
        s->out->of[r][k].slowed_by_others /= s->took[r][k];
      }
}

/* @ns pass while the running ops run. */
static void pass(sweep *s, double ns) {
  const together t = what_runs(s);
  for (uint32_t i = 0; i < s->plan->at->n_streams; i++) {
    if (s->running[i] == UINT32_MAX || s->running[i] / s->n_ops != MIDDLE)
      continue;
    const uint32_t op = (uint32_t)(s->running[i] % s->n_ops);
    const ps_sim_cost *c = &s->cost[op];
    if (s->resource[op] == NONE)
      continue;
    if (s->open[i].set != t.set)
      close_piece(s, i);
    s->open[i].op = op;
    s->open[i].set = t.set;
    s->open[i].ns +=
        ns / slowed(&t, c, PS_SIM_RESOURCES) * (1 + fmin(c->idle_most, c->idle_gain * s->idle[i]));
    note_together(s, &t, op, ns);
  }
}

static void note_idle(sweep *s, uint32_t stream, uint64_t now, bool idle) {
  const double keep = exp((s->idle_at[stream] - (double)now) / PS_SIM_IDLE_NS);
  s->idle[stream] = s->idle[stream] * keep + (idle ? 1 - keep : 0);
  s->idle_at[stream] = (double)now;
}

static void walk(sweep *s) {
  uint64_t now = time_of(s->events, s->point[0]);
  for (uint32_t i = 0; i < PS_MAX_STREAMS; i++) {
    s->running[i] = UINT32_MAX;
    s->idle_at[i] = (double)now;
  }
  for (uint64_t k = 0; k < 2 * STEPS * s->n_ops; k++) {
    const uint32_t event = s->point[k] / 2, stream = s->events[event].stream;
    const uint64_t at = time_of(s->events, s->point[k]);
    if (at > now)
      pass(s, (double)(at - now));
    now = at;
    note_idle(s, stream, now, !(s->point[k] & 1));
    if (!(s->point[k] & 1)) {
      s->running[stream] = event;
    } else if (s->running[stream] == event) {
      close_piece(s, stream);
      s->running[stream] = UINT32_MAX;
    }
  }
}

/* ---- speeds ---------------------------------------------------------------------------------- */

/* What is solved for: for each op, the sum of speed x ns over its pieces is what the description
 * says of its work. Ops scatter, and most run in the same few sets, so that least squares alone
 * give some sets twice the speed and others none. Such speeds predict a step that is too long: the
 * fast ones are held back by the rate alone, and the slow ones are not. So a set's speed is taken
 * to be near the resource's mean speed, by so much of that, as far as the scatter leaves it open.
 */
static const double SPREAD = 0.15;

typedef double matrix[PS__SPEED_SETS][PS__SPEED_SETS];

typedef struct fit {
  const sweep *s;
  double op_ns;
  double *ns; /* [n_ops]: of the op's pieces together */
  ps__speeds *out;
  /* by resource: the sums of t[i] t[j] / ns over the ops, where t is an op's ns by set; its work
   * times t / ns; its work, and ops */
  matrix *tt; /* [PS__N_SPEEDS] */
  double tw[PS__N_SPEEDS][PS__SPEED_SETS], work[PS__N_SPEEDS];
  uint64_t n[PS__N_SPEEDS];
} fit;

static int by_op(const void *pa, const void *pb) {
  const piece *a = pa, *b = pb;
  return a->op < b->op ? -1 : a->op > b->op;
}

/* The fixed cost of an op is no matter of its resource's speed: it is taken from all its pieces in
 * proportion. */
static void take_fixed_cost(fit *f) {
  const sweep *s = f->s;
  for (size_t i = 0; i < s->n; i++)
    f->ns[s->piece[i].op] += s->piece[i].ns;
  for (size_t i = 0; i < s->n; i++) {
    piece *p = &s->piece[i];
    const double all = f->ns[p->op];
    p->ns *= all > f->op_ns && s->cost[p->op].ns > f->op_ns ? 1 - f->op_ns / all : 0;
    ps__speed *v = &f->out->of[s->resource[p->op]][p->set];
    v->ns += p->ns;
    v->n += p->ns > 0;
  }
}

/* The ns by set of the op whose pieces begin at @first, and their sum; returns the next op's. */
static size_t sets_of(const sweep *s, size_t first, double t[PS__SPEED_SETS], double *ns) {
  size_t i = first;
  memset(t, 0, PS__SPEED_SETS * sizeof *t);
  *ns = 0;
  for (; i < s->n && s->piece[i].op == s->piece[first].op; i++) {
    t[s->piece[i].set] += s->piece[i].ns;
    *ns += s->piece[i].ns;
  }
  return i;
}

static double work_of(const fit *f, size_t first) {
  return f->s->cost[f->s->piece[first].op].ns - f->op_ns;
}

static void add_up(fit *f) {
  double t[PS__SPEED_SETS], ns;
  for (size_t i = 0, next; i < f->s->n; i = next) {
    const uint32_t r = f->s->resource[f->s->piece[i].op];
    next = sets_of(f->s, i, t, &ns);
    if (!(ns > 0))
      continue;
    f->work[r] += work_of(f, i);
    f->n[r]++;
    for (int k = 0; k < PS__SPEED_SETS; k++) {
      f->tw[r][k] += work_of(f, i) * t[k] / ns;
      for (int j = 0; j < PS__SPEED_SETS; j++)
        f->tt[r][k][j] += t[k] * t[j] / ns;
    }
  }
}

/* x of (tt + hold) x = tw + hold * mean, by Gauss: the matrix has no negative eigenvalue. */
static void solve_near(const matrix tt, const double tw[PS__SPEED_SETS], double hold, double mean,
                       double x[PS__SPEED_SETS]) {
  matrix a;
  memcpy(a, tt, sizeof a);
  for (int k = 0; k < PS__SPEED_SETS; k++) {
    a[k][k] += hold;
    x[k] = tw[k] + hold * mean;
  }
  for (int k = 0; k < PS__SPEED_SETS; k++)
    for (int i = k + 1; i < PS__SPEED_SETS; i++) {
      const double by = a[i][k] / a[k][k];
      for (int j = k; j < PS__SPEED_SETS; j++)
        a[i][j] -= by * a[k][j];
      x[i] -= by * x[k];
    }
  for (int k = PS__SPEED_SETS - 1; k >= 0; k--) {
    for (int j = k + 1; j < PS__SPEED_SETS; j++)
      x[k] -= a[k][j] * x[j];
    x[k] /= a[k][k];
  }
}

/* The mean square by which the work of the ops of @r is off, by what they took. */
static double scatter(const fit *f, uint32_t r, const double x[PS__SPEED_SETS], int n_known) {
  double t[PS__SPEED_SETS], ns, sum = 0;
  for (size_t i = 0, next; i < f->s->n; i = next) {
    next = sets_of(f->s, i, t, &ns);
    if (f->s->resource[f->s->piece[i].op] != r || !(ns > 0))
      continue;
    double off = work_of(f, i);
    for (int k = 0; k < PS__SPEED_SETS; k++)
      off -= x[k] * t[k];
    sum += off * off / ns;
  }
  return sum / (double)(f->n[r] > (uint64_t)n_known ? f->n[r] - (uint64_t)n_known : 1);
}

static void solve_resource(const fit *f, uint32_t r) {
  double ns = 0, x[PS__SPEED_SETS], said = 0;
  int n_sets = 0;
  for (int k = 0; k < PS__SPEED_SETS; k++) {
    ns += f->out->of[r][k].ns;
    n_sets += f->out->of[r][k].ns > 0;
  }
  if (!(ns > 0))
    return;
  const double mean = f->work[r] / ns;
  solve_near(f->tt[r], f->tw[r], 1e-6 * ns, mean, x); /* as if nothing scattered */
  const double s = scatter(f, r, x, n_sets), hold = 1e-6 * ns + s / (SPREAD * SPREAD * mean * mean);
  solve_near(f->tt[r], f->tw[r], hold, mean, x);
  for (int k = 0; k < PS__SPEED_SETS; k++) {
    x[k] = fmax(x[k], mean / 10);
    said += x[k] * f->out->of[r][k].ns;
  }
  for (int k = 0; k < PS__SPEED_SETS; k++) {
    ps__speed *v = &f->out->of[r][k];
    if (!(v->ns > 0))
      continue;
    v->speed = x[k] * f->work[r] / said; /* all work is done, whatever was held */
    v->error = sqrt(s / (f->tt[r][k][k] + hold)) / x[k];
  }
}

static void solve(const sweep *s, double op_ns, double *ns, matrix *tt, ps__speeds *out) {
  fit f = {.s = s, .op_ns = op_ns, .ns = ns, .out = out, .tt = tt};
  qsort(s->piece, s->n, sizeof *s->piece, by_op);
  take_fixed_cost(&f);
  add_up(&f);
  for (uint32_t r = 0; r < PS__N_SPEEDS; r++)
    solve_resource(&f, r);
}

/* Memory that a measurement takes. */
typedef struct room {
  ps_sim_cost *cost;
  uint8_t *resource;
  uint32_t *point;
  double *ns;
  matrix *tt;
} room;

static void measure(sweep *s, const room *m, const ps_hardware *hw, ps__speeds *out) {
  const ps_plan *p = s->plan;
  ps__cost_model model =
      ps__cost_model_of(hw, p->model->fp8.on, p->step.at, hw->n_threads, p->spec.sum_threads);
  ps__step_costs(&p->step, &model, false, m->cost);
  for (size_t i = 0; i < s->n_ops; i++)
    m->resource[i] =
        (uint8_t)resource_of(p->step.at, hw, &p->step.op[i], p->step.args + p->step.op[i].args);
  for (uint32_t i = 0; i < 2 * STEPS * s->n_ops; i++)
    m->point[i] = i;
  qsort_r(m->point, 2 * STEPS * s->n_ops, sizeof *m->point, by_time, (void *)s->events);
  *out = (ps__speeds){.dt = (uint32_t)p->model->dt,
                      .n_devices = p->at->n_devices,
                      .sum_threads = p->spec.sum_threads};
  s->out = out;
  walk(s);
  means_together(s);
  if (!s->out_of_memory)
    solve(s, hw->op_ns, m->ns, m->tt, out);
}

ps_status ps__speeds_measure(ps__speeds *out, const ps_plan *p, const ps_hardware *hw,
                             const ps_trace_event *events) {
  const uint64_t n = p->step.n_op;
  const room m = {.cost = ps__malloc((n + 1) * sizeof *m.cost),
                  .resource = ps__malloc(n + 1),
                  .point = ps__malloc((2 * STEPS * n + 1) * sizeof *m.point),
                  .ns = ps__calloc(n + 1, sizeof *m.ns),
                  .tt = ps__calloc(PS__N_SPEEDS, sizeof *m.tt)};
  sweep s = {.plan = p,
             .events = events,
             .cost = m.cost,
             .resource = m.resource,
             .n_ops = n,
             .point = m.point};
  const bool there = m.cost && m.resource && m.point && m.ns && m.tt;
  if (there)
    measure(&s, &m, hw, out);
  ps__free(m.cost);
  ps__free(m.resource);
  ps__free(m.point);
  ps__free(m.ns);
  ps__free(m.tt);
  ps__free(s.piece);
  return there && !s.out_of_memory ? PS_OK
                                   : ps__fail(PS_ENOMEM, "out of memory for the speeds of %llu ops",
                                              (unsigned long long)n);
}

/* ---- of several steps ------------------------------------------------------------------------ */

enum { MOST = 16 };

static int by_value(const void *pa, const void *pb) {
  const double a = *(const double *)pa, b = *(const double *)pb;
  return a < b ? -1 : a > b;
}

static double median(double *of, uint32_t n) {
  qsort(of, n, sizeof *of, by_value);
  return (of[n / 2] + of[(n - 1) / 2]) / 2;
}

static ps__speed median_speed(const ps__speeds *of, uint32_t n, int r, int k) {
  double speed[MOST], error = 0;
  ps__speed out = {0};
  uint32_t m = 0;
  for (uint32_t i = 0; i < n && m < MOST; i++) {
    const ps__speed *v = &of[i].of[r][k];
    if (!(v->ns > 0))
      continue;
    speed[m++] = v->speed;
    error = v->error;
    out.ns += v->ns;
    out.n += v->n;
    out.demand += v->ns * v->demand;
    out.slowed += v->ns * v->slowed;
    out.slowed_by_others += v->ns * v->slowed_by_others;
  }
  if (!m)
    return out;
  out.demand /= out.ns;
  out.slowed /= out.ns;
  out.slowed_by_others /= out.ns;
  out.speed = median(speed, m);
  out.error = m > 1 ? (speed[m - 1] - speed[0]) / 2 / out.speed : error;
  return out;
}

/* Of all of a resource's ops together; 0: none ran. */
static double mean_speed(const ps__speeds *s, int r) {
  double ns = 0, work = 0;
  for (int k = 0; k < PS__SPEED_SETS; k++) {
    ns += s->of[r][k].ns;
    work += s->of[r][k].ns * s->of[r][k].speed;
  }
  return ns > 0 ? work / ns : 0;
}

/* Medians of sets, scaled to the median of the ops together: what one set's speed has too much in a
 * step another's has too little, and medians would not keep the sum. */
void ps__speeds_median(ps__speeds *out, const ps__speeds *of, uint32_t n) {
  ps__speeds s = of[0];
  for (int r = 0; r < PS__N_SPEEDS; r++) {
    double all[MOST];
    uint32_t m = 0;
    for (int k = 0; k < PS__SPEED_SETS; k++)
      s.of[r][k] = median_speed(of, n, r, k);
    for (uint32_t i = 0; i < n && m < MOST; i++) {
      all[m] = mean_speed(&of[i], r);
      m += all[m] > 0;
    }
    const double mean = mean_speed(&s, r), by = m && mean > 0 ? median(all, m) / mean : 1;
    for (int k = 0; k < PS__SPEED_SETS; k++)
      s.of[r][k].speed *= by;
  }
  *out = s;
}
