/* speeds.c - the speeds of a step's ops, from its marks. */
#include "plan/speeds.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 3, MIDDLE = 1, ROUNDS = 100, NONE = PS__N_SPEEDS };

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

static uint32_t device_resource(const ps_hardware *hw, const ps__vop *op) {
  switch (ps__op_rate(op->kernel)) {
  case PS__RATE_GEMM: return PS__SPEED_GEMM;
  case PS__RATE_GEMM_FP8: return PS__SPEED_GEMM_FP8;
  /* until they have rates of their own they are priced as other products */
  case PS__RATE_GEMM_GROUPED:
    return hw->gemm_grouped[0].rows ? PS__SPEED_GEMM_GROUPED : PS__SPEED_GEMM;
  case PS__RATE_ATTENTION_FWD: return PS__SPEED_ATTENTION_FWD;
  case PS__RATE_ATTENTION_BWD: return PS__SPEED_ATTENTION_BWD;
  default:
    return hw->backend == PS_BACKEND_CPU && op->kernel->op_class == PS_CLASS_OPTIMIZER
               ? PS__SPEED_UPDATES
               : PS__SPEED_ELEMENTWISE;
  }
}

/* NONE: the op's time says nothing of the machine, as it reads files or waits for other hosts. */
static uint32_t resource_of(const ps__places *at, const ps_hardware *hw, const ps__vop *op) {
  if (ps__link_of(at, op->stream))
    switch (ps__direction(at, op->stream)) {
    case PS__TO_DEVICE: return PS__SPEED_H2D;
    case PS__TO_HOST: return PS__SPEED_D2H;
    default: return PS__SPEED_PEERS;
    }
  if (op->stream == at->net)
    return NONE;
  if (op->stream == at->io)
    return op->tag.layer >= 0 ? PS__SPEED_GATHER : NONE;
  return ps__stream_on_host(at, op->stream) ? host_resource(op) : device_resource(hw, op);
}

/* Which bit of a set says that the resource is in use; 0: none does. */
static uint32_t bit_of(uint32_t resource) {
  if (resource == PS__SPEED_H2D)
    return PS_CONTENTION_H2D;
  if (resource == PS__SPEED_D2H)
    return PS_CONTENTION_D2H;
  if (resource >= PS__SPEED_UPDATES && resource <= PS__SPEED_UPDATES_STATE)
    return PS_CONTENTION_OPTIMIZER;
  if (resource >= PS__SPEED_ACCUMULATE && resource <= PS__SPEED_ACCUMULATE_SUMSQ)
    return PS_CONTENTION_SUMS;
  return 0;
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
    if (s->n == s->cap && !ps__grow((void **)&s->piece, s->n, &s->cap, sizeof *s->piece)) {
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
    t.set |= bit_of(s->resource[op]);
    t.kinds |= c->kind;
    for (int d = 0; d < PS_SIM_DEMANDS && c->demand[d] > 0; d++)
      t.demand[c->resource[d]] += c->demand[d];
  }
  return t;
}

static double slowed(const together *t, const ps_sim_cost *c) {
  double worst = 1;
  for (int d = 0; d < PS_SIM_DEMANDS && c->demand[d] > 0; d++)
    worst = fmax(worst, t->demand[c->resource[d]]);
  return c->slower ? fmax(worst, c->slower[t->kinds]) : worst;
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
    s->open[i].ns += ns / slowed(&t, c) * (1 + fmin(c->idle_most, c->idle_gain * s->idle[i]));
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
 * says of its work. */
typedef struct fit {
  const sweep *s;
  double op_ns;
  double *done; /* [n_ops]: ns of the pieces together; then what the speeds say of them */
  ps__speeds *out;
} fit;

static ps__speed *speed_at(const fit *f, const piece *p) {
  return &f->out->of[f->s->resource[p->op]][p->set];
}

/* The fixed cost of an op is no matter of its resource's speed: it is taken from all its pieces in
 * proportion. */
static void begin_fit(fit *f) {
  const sweep *s = f->s;
  for (size_t i = 0; i < s->n; i++)
    f->done[s->piece[i].op] += s->piece[i].ns;
  for (size_t i = 0; i < s->n; i++) {
    piece *p = &s->piece[i];
    const double all = f->done[p->op];
    p->ns *= all > f->op_ns && s->cost[p->op].ns > f->op_ns ? 1 - f->op_ns / all : 0;
    ps__speed *v = speed_at(f, p);
    v->speed = 1;
    v->ns += p->ns;
    v->n += p->ns > 0;
  }
}

/* How far the work of the op of @p is from what the speeds say. */
static double ratio_of(const fit *f, const piece *p) {
  return f->done[p->op] > 0 ? (f->s->cost[p->op].ns - f->op_ns) / f->done[p->op] : 1;
}

static void predict(const fit *f) {
  memset(f->done, 0, f->s->n_ops * sizeof *f->done);
  for (size_t i = 0; i < f->s->n; i++)
    f->done[f->s->piece[i].op] += f->s->piece[i].ns * speed_at(f, &f->s->piece[i])->speed;
}

/* Each speed times the mean ratio of its pieces: the step of Richardson and Lucy, which keeps
 * speeds positive. */
static void improve(const fit *f) {
  double sum[PS__N_SPEEDS][PS__SPEED_SETS] = {{0}};
  predict(f);
  for (size_t i = 0; i < f->s->n; i++) {
    const piece *p = &f->s->piece[i];
    sum[f->s->resource[p->op]][p->set] += p->ns * ratio_of(f, p);
  }
  for (int r = 0; r < PS__N_SPEEDS; r++)
    for (int k = 0; k < PS__SPEED_SETS; k++) {
      ps__speed *v = &f->out->of[r][k];
      if (v->ns > 0)
        v->speed *= sum[r][k] / v->ns;
    }
}

/* By the scatter of the ops: the error of their mean. */
static void set_errors(const fit *f) {
  predict(f);
  for (size_t i = 0; i < f->s->n; i++) {
    const piece *p = &f->s->piece[i];
    const double off = p->ns * (ratio_of(f, p) - 1);
    speed_at(f, p)->error += off * off;
  }
  for (int r = 0; r < PS__N_SPEEDS; r++)
    for (int k = 0; k < PS__SPEED_SETS; k++) {
      ps__speed *v = &f->out->of[r][k];
      v->error = v->ns > 0 ? sqrt(v->error) / v->ns : 0;
    }
}

static void solve(const sweep *s, double op_ns, double *done, ps__speeds *out) {
  fit f = {.s = s, .op_ns = op_ns, .done = done, .out = out};
  *out = (ps__speeds){.dt = (uint32_t)s->plan->model->dt};
  begin_fit(&f);
  for (int i = 0; i < ROUNDS; i++)
    improve(&f);
  set_errors(&f);
}

/* Memory that a measurement takes. */
typedef struct room {
  ps_sim_cost *cost;
  uint8_t *resource;
  uint32_t *point;
  double *done;
} room;

static void measure(sweep *s, const room *m, const ps_hardware *hw, ps__speeds *out) {
  const ps_plan *p = s->plan;
  ps__cost_model model =
      ps__cost_model_of(hw, p->model->fp8.on, p->step.at, hw->n_threads, p->spec.sum_threads);
  ps__step_costs(&p->step, &model, false, m->cost);
  for (size_t i = 0; i < s->n_ops; i++)
    m->resource[i] = (uint8_t)resource_of(p->step.at, hw, &p->step.op[i]);
  for (uint32_t i = 0; i < 2 * STEPS * s->n_ops; i++)
    m->point[i] = i;
  qsort_r(m->point, 2 * STEPS * s->n_ops, sizeof *m->point, by_time, (void *)s->events);
  walk(s);
  if (!s->out_of_memory)
    solve(s, hw->op_ns, m->done, out);
}

ps_status ps__speeds_measure(ps__speeds *out, const ps_plan *p, const ps_hardware *hw,
                             const ps_trace_event *events) {
  const uint64_t n = p->step.n_op;
  const room m = {.cost = ps__malloc((n + 1) * sizeof *m.cost),
                  .resource = ps__malloc(n + 1),
                  .point = ps__malloc((2 * STEPS * n + 1) * sizeof *m.point),
                  .done = ps__calloc(n + 1, sizeof *m.done)};
  sweep s = {.plan = p,
             .events = events,
             .cost = m.cost,
             .resource = m.resource,
             .n_ops = n,
             .point = m.point};
  const bool there = m.cost && m.resource && m.point && m.done;
  if (there)
    measure(&s, &m, hw, out);
  ps__free(m.cost);
  ps__free(m.resource);
  ps__free(m.point);
  ps__free(m.done);
  ps__free(s.piece);
  return there && !s.out_of_memory ? PS_OK
                                   : ps__fail(PS_ENOMEM, "out of memory for the speeds of %llu ops",
                                              (unsigned long long)n);
}

/* ---- of several steps ------------------------------------------------------------------------ */

enum { MOST = 16 };

static int by_speed(const void *pa, const void *pb) {
  const double a = ((const ps__speed *)pa)->speed, b = ((const ps__speed *)pb)->speed;
  return a < b ? -1 : a > b;
}

static ps__speed median(const ps__speeds *of, uint32_t n, int r, int k) {
  ps__speed seen[MOST], out = {0};
  uint32_t m = 0;
  for (uint32_t i = 0; i < n && m < MOST; i++)
    if (of[i].of[r][k].ns > 0) {
      seen[m++] = of[i].of[r][k];
      out.ns += of[i].of[r][k].ns;
      out.n += of[i].of[r][k].n;
    }
  if (!m)
    return out;
  qsort(seen, m, sizeof *seen, by_speed);
  out.speed = (seen[m / 2].speed + seen[(m - 1) / 2].speed) / 2;
  out.error = m > 1 ? (seen[m - 1].speed - seen[0].speed) / 2 / out.speed : seen[0].error;
  return out;
}

void ps__speeds_median(ps__speeds *out, const ps__speeds *of, uint32_t n) {
  ps__speeds s = {.dt = of[0].dt};
  for (int r = 0; r < PS__N_SPEEDS; r++)
    for (int k = 0; k < PS__SPEED_SETS; k++)
      s.of[r][k] = median(of, n, r, k);
  *out = s;
}

/* ---- a description --------------------------------------------------------------------------- */

enum { ANY_SET = -1 };

/* Of resources @first to @last in a set, or in all: the mean by time. 0: none ran. A set counts
 * where at least a fiftieth of the resources' time was spent in it. */
static double mean_speed(const ps__speeds *s, int first, int last, int set) {
  double ns = 0, work = 0, all = 0;
  for (int r = first; r <= last; r++)
    for (int k = 0; k < PS__SPEED_SETS; k++) {
      const ps__speed *v = &s->of[r][k];
      all += v->ns;
      if (set != ANY_SET && k != set)
        continue;
      ns += v->ns;
      work += v->ns * v->speed;
    }
  return ns > 0 && ns >= all / 50 ? work / ns : 0;
}

/* In the set where it ran in that, else in all; 1: it did not run. */
static double factor(const ps__speeds *s, int first, int last, int set) {
  const double here = set == ANY_SET ? 0 : mean_speed(s, first, last, set),
               any = mean_speed(s, first, last, ANY_SET);
  return here > 0 ? here : any > 0 ? any : 1;
}

static void apply_contention(ps_contention_rate *table, const ps__speeds *s) {
  for (ps_contention_rate *e = table; e < table + PS_MAX_CONTENTION_RATES && e->kinds; e++) {
    const int set = (int)e->kinds;
    e->h2d_bytes_per_s *= factor(s, PS__SPEED_H2D, PS__SPEED_H2D, set);
    e->d2h_bytes_per_s *= factor(s, PS__SPEED_D2H, PS__SPEED_D2H, set);
    e->host_bytes_per_s *= e->kinds & PS_CONTENTION_SUMS
                               ? factor(s, PS__SPEED_ACCUMULATE, PS__SPEED_ACCUMULATE_SUMSQ, set)
                               : factor(s, PS__SPEED_UPDATES, PS__SPEED_UPDATES_STATE, set);
  }
}

static void apply_products(ps_hardware *hw, const ps__speeds *s) {
  const double gemm = factor(s, PS__SPEED_GEMM, PS__SPEED_GEMM, ANY_SET),
               fp8 = factor(s, PS__SPEED_GEMM_FP8, PS__SPEED_GEMM_FP8, ANY_SET),
               grouped = factor(s, PS__SPEED_GEMM_GROUPED, PS__SPEED_GEMM_GROUPED, ANY_SET),
               forward = factor(s, PS__SPEED_ATTENTION_FWD, PS__SPEED_ATTENTION_FWD, ANY_SET),
               backward = factor(s, PS__SPEED_ATTENTION_BWD, PS__SPEED_ATTENTION_BWD, ANY_SET);
  hw->gemm_flops_per_s[s->dt] *= gemm;
  hw->gemm_fp8_flops_per_s *= fp8;
  for (int i = 0; i < PS_MAX_GEMM_RATES; i++) {
    ps_gemm_rate *of[] = {&hw->gemm[s->dt][i], &hw->gemm_fp8[i], &hw->gemm_grouped[i]};
    const double by[] = {gemm, fp8, grouped};
    for (int k = 0; k < 3; k++) {
      of[k]->forward_flops_per_s *= by[k];
      of[k]->dgrad_flops_per_s *= by[k];
      of[k]->wgrad_flops_per_s *= by[k];
    }
  }
  hw->attention_flops_per_s[s->dt] *= forward;
  hw->attention_bwd_flops_per_s[s->dt] *= backward;
  for (int i = 0; i < PS_MAX_ATTENTION_RATES; i++) {
    hw->attention[s->dt][i].forward_flops_per_s *= forward;
    hw->attention[s->dt][i].backward_flops_per_s *= backward;
  }
}

void ps__speeds_apply(ps_hardware *hw, const ps__speeds *s) {
  const struct {
    double *rate;
    int resource, set;
  } rates[] = {
      {&hw->link[PS_LINK_H2D].bytes_per_s, PS__SPEED_H2D, PS_CONTENTION_H2D},
      {&hw->link[PS_LINK_D2H].bytes_per_s, PS__SPEED_D2H, PS_CONTENTION_D2H},
      {&hw->optimizer_bytes_per_s, PS__SPEED_UPDATES, PS_CONTENTION_OPTIMIZER},
      {&hw->optimizer_weights_bytes_per_s, PS__SPEED_UPDATES_WEIGHTS, PS_CONTENTION_OPTIMIZER},
      {&hw->optimizer_state_bytes_per_s, PS__SPEED_UPDATES_STATE, PS_CONTENTION_OPTIMIZER},
      {&hw->accumulate_bytes_per_s, PS__SPEED_ACCUMULATE, PS_CONTENTION_SUMS},
      {&hw->sumsq_bytes_per_s, PS__SPEED_SUMSQ, PS_CONTENTION_SUMS},
      {&hw->accumulate_sumsq_bytes_per_s, PS__SPEED_ACCUMULATE_SUMSQ, PS_CONTENTION_SUMS},
      {&hw->gather_bytes_per_s, PS__SPEED_GATHER, ANY_SET},
      {&hw->link[PS_LINK_PEER].bytes_per_s, PS__SPEED_PEERS, ANY_SET},
      {&hw->elementwise_bytes_per_s, PS__SPEED_ELEMENTWISE, ANY_SET},
  };
  for (size_t i = 0; i < sizeof rates / sizeof *rates; i++)
    *rates[i].rate *= factor(s, rates[i].resource, rates[i].resource, rates[i].set);
  hw->link[PS_LINK_H2D].duplex_bytes_per_s *=
      factor(s, PS__SPEED_H2D, PS__SPEED_D2H, PS_CONTENTION_H2D | PS_CONTENTION_D2H);
  hw->memory_bytes_per_s *= factor(s, PS__SPEED_H2D, PS__SPEED_ACCUMULATE_SUMSQ, ANY_SET);
  apply_contention(hw->contention, s);
  apply_contention(hw->gpus_contention, s);
  apply_products(hw, s);
}
