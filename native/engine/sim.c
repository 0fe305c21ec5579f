/* sim.c - execute a schedule on a virtual clock.
 *
 * A fluid model: between two events every running op advances at a constant rate.
 * - An op that uses a resource, the demands on which add up to D > 1, advances at 1/D of its own
 *   speed.
 * - An op that ops of other kinds slow advances at the speed that its table gives. The slowest of
 *   all speeds counts.
 * An event is the end of an op. After an event each stream whose next op's waits are satisfied
 * starts that op, shortened by the op's idle_gain; then the rates are computed anew.
 * Deterministic: streams are always taken in their order, and no clock or random number is read.
 * Cost: an event reads the streams that run an op. A stream that must wait is read again when the
 * stream that it awaits gets there. What an op needs lies in the order of its stream, so that a
 * stream reads its ops one after the other. */
#include "engine/sim.h"
#include "engine/schedule.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct sim_op {
  ps_sim_cost cost;
  uint32_t idx; /* in the schedule */
  uint32_t n_wait;
  const ps_wait *wait; /* [n_wait] */
} sim_op;

struct ps__sim {
  const ps_schedule *schedule;
  sim_op *op;                     /* [n_ops], one stream after the other */
  ps_wait *wait;                  /* those of all ops, in the same order */
  size_t first[PS_MAX_STREAMS];   /* place in op of each stream's first one */
  double longest[PS_MAX_STREAMS]; /* ns of each stream's ops in a step, each at its slowest */
  uint64_t rests;                 /* bit s: some of stream s's ops are shortened by idle_gain */
  uint32_t n_resources;           /* that ops use */
};

typedef struct sim_stream {
  const sim_op *ops;       /* [n_ops] in the stream's order */
  uint64_t step, at;       /* of the next op, or of the running one */
  const ps_sim_cost *cost; /* of the running op, NULL: none runs */
  uint64_t awaits;         /* of a stream that waits: ops that the awaited one must have done */
  uint64_t awaited_by;     /* bit s: stream s waits for this one */
  double queued, start;
  /* of a stream that rests: its share of time without an op, older time counting less; and the time
   * of its last update, which is an op's start or end */
  double idle, idle_at;
} sim_stream;

/* A run of a simulation. */
typedef struct run {
  const ps__sim *sim;
  uint64_t n_steps, n_told; /* to simulate; of which events and ends are asked for */
  uint64_t n_left;          /* ops of the told steps that have not ended */
  const ps__sim_told *told;
  double now;
  double demand[PS_SIM_RESOURCES];     /* [n_resources]: of the running ops together */
  uint8_t n_sharing[PS_SIM_RESOURCES]; /* running ops that use it */
  uint32_t kinds;                      /* of the running ops */
  /* bit s: stream s runs an op; runs one that uses resources or has a kind; its next op may
   * start, or is yet to wait */
  uint64_t running, sharing, ready;
  bool shared_anew; /* an op that shares a resource or has a kind has begun or ended since then */
  /* of each stream's running op: what is left of its ns, and how much longer than alone it takes */
  double left[PS_MAX_STREAMS], slow[PS_MAX_STREAMS];
  /* of each stream: ops of a step; ops done, which is step * n_ops + at */
  uint64_t n_ops[PS_MAX_STREAMS], n_done[PS_MAX_STREAMS];
  sim_stream stream[PS_MAX_STREAMS];
} run;

/* How many times longer than alone an op may take at most: at most one op a stream uses a
 * resource. */
static double worst_slowdown(const ps__sim *m, const double *slower) {
  double worst = m->schedule->list.n_streams;
  for (int k = 0; slower && k < 1 << PS_SIM_KINDS; k++)
    worst = slower[k] > worst ? slower[k] : worst;
  return worst;
}

static bool is_slowdown(const double *slower) {
  bool ok = true;
  for (int k = 0; slower && k < 1 << PS_SIM_KINDS; k++)
    ok = ok && slower[k] >= 1 && isfinite(slower[k]);
  return ok;
}

/* The field of @c that is out of range, its value and the range go into @why. false: none is. */
static bool is_wrong(const ps_sim_cost *c, bool slowdown_ok, char why[96]) {
  if (!(isfinite(c->ns) && c->ns >= 0))
    return snprintf(why, 96, "ns is %g: give a finite number from 0 on", c->ns) > 0;
  if (!(c->idle_gain >= 0 && c->idle_gain <= 1))
    return snprintf(why, 96, "idle_gain is %g: give 0 to 1", c->idle_gain) > 0;
  if (!(c->idle_most >= 0 && c->idle_most <= 1))
    return snprintf(why, 96, "idle_most is %g: give 0 to 1", c->idle_most) > 0;
  for (int d = 0; d < PS_SIM_DEMANDS; d++) {
    if (!(c->demand[d] >= 0 && c->demand[d] <= 1))
      return snprintf(why, 96, "demand[%d] is %g: give 0 to 1", d, c->demand[d]) > 0;
    if (c->resource[d] >= PS_SIM_RESOURCES)
      return snprintf(why, 96, "resource[%d] is %u: give a number below %d", d, c->resource[d],
                      PS_SIM_RESOURCES) > 0;
  }
  if (c->kind >= 1 << PS_SIM_KINDS)
    return snprintf(why, 96, "kind is %u: give a number below %d", c->kind, 1 << PS_SIM_KINDS) > 0;
  return !slowdown_ok &&
         snprintf(why, 96, "slower has a factor that is not a finite number from 1 on") > 0;
}

static ps_status check(const ps__sim *m, uint64_t i, const ps_sim_cost *c, bool slowdown_ok) {
  char why[96];
  return is_wrong(c, slowdown_ok, why)
             ? ps__fail(PS_EINVAL, "sim: the cost of op %llu (%s): %s", (unsigned long long)i,
                        ps__op_name(&m->schedule->list.ops[i]), why)
             : PS_OK;
}

ps_status ps__sim_set_costs(ps__sim *m, const ps_sim_cost *cost, uint64_t streams) {
  const ps__oplist *l = &m->schedule->list;
  const double *slower = NULL; /* most ops have the table of the one before */
  double worst = worst_slowdown(m, slower);
  bool ok = true;
  for (uint32_t s = 0; s < l->n_streams; s++)
    if (streams >> s & 1)
      m->longest[s] = 0;
  m->rests &= ~streams;
  for (uint64_t i = 0; i < l->n_ops; i++) {
    const ps__op *of = &l->ops[i];
    const ps_sim_cost *c = &cost[i];
    if (!(streams >> of->stream & 1))
      continue;
    if (c->slower != slower) {
      slower = c->slower;
      worst = worst_slowdown(m, slower);
      ok = is_slowdown(slower);
    }
    PS_TRY(check(m, i, c, ok));
    m->op[m->first[of->stream] + of->position].cost = *c;
    for (int d = 0; d < PS_SIM_DEMANDS && c->demand[d] > 0; d++)
      if (c->resource[d] >= m->n_resources)
        m->n_resources = c->resource[d] + 1u;
    m->longest[of->stream] += c->ns * worst;
    if (c->idle_gain > 0)
      m->rests |= 1ull << of->stream;
  }
  return PS_OK;
}

/* Whether the clock holds @n_steps: all ops one after the other, each at its slowest. An op runs at
 * every moment, so the virtual clock stays below. */
static ps_status check_clock(const ps__sim *m, uint64_t n_steps) {
  const ps__oplist *l = &m->schedule->list;
  double longest = 0;
  for (uint32_t s = 0; s < l->n_streams; s++)
    longest += m->longest[s];
  if (longest * (double)n_steps <= 9e18) /* of 2^64 that a trace's clock has */
    return PS_OK;
  uint64_t slowest = 0;
  double most = 0;
  for (uint64_t i = 0; i < l->n_ops; i++) {
    const double ns = m->op[m->first[l->ops[i].stream] + l->ops[i].position].cost.ns;
    if (ns > most) {
      most = ns;
      slowest = i;
    }
  }
  return ps__fail(
      PS_EINVAL,
      "sim: op %llu (%s) takes %g s, and %llu steps more than the 285 years of the "
      "clock: its cost or, in a plan, a rate of the hardware description is out of range",
      (unsigned long long)slowest, ps__op_name(&l->ops[slowest]), most * 1e-9,
      (unsigned long long)n_steps);
}

ps_status ps__sim_create(ps__sim **out, const ps_schedule *schedule) {
  const ps__oplist *l = &schedule->list;
  ps__sim *m = ps__calloc(1, sizeof *m);
  if (m) {
    m->op = ps__malloc((l->n_ops + 1) * sizeof *m->op);
    m->wait = ps__malloc((schedule->n_waits + 1) * sizeof *m->wait);
  }
  if (!m || !m->op || !m->wait) {
    ps__sim_destroy(m);
    return ps__fail(PS_ENOMEM, "sim: out of memory for %zu ops", l->n_ops);
  }
  m->schedule = schedule;
  for (uint32_t s = 0; s + 1 < l->n_streams; s++)
    m->first[s + 1] = m->first[s] + l->stream_n_ops[s];
  for (uint64_t i = 0; i < l->n_ops; i++) {
    sim_op *op = &m->op[m->first[l->ops[i].stream] + l->ops[i].position];
    op->idx = (uint32_t)i;
    op->n_wait = l->ops[i].n_wait;
  }
  ps_wait *wait = m->wait;
  for (sim_op *op = m->op; op < m->op + l->n_ops; op++) {
    const ps_wait *from = schedule->waits + l->ops[op->idx].wait;
    op->wait = wait;
    for (uint32_t k = 0; k < op->n_wait; k++)
      *wait++ = from[k];
  }
  *out = m;
  return PS_OK;
}

void ps__sim_destroy(ps__sim *m) {
  if (!m)
    return;
  ps__free(m->op);
  ps__free(m->wait);
  ps__free(m);
}

_Static_assert(PS_MAX_STREAMS <= 64, "a set of streams is a word");

/* Takes the lowest stream out of a set that is not empty. */
static uint32_t take(uint64_t *set) {
  const uint32_t s = (uint32_t)__builtin_ctzll(*set);
  *set &= *set - 1;
  return s;
}

/* Whether an op of stream @i may start. If not, the stream is noted at the one that it awaits. */
static bool satisfied(run *m, uint32_t i, const sim_op *op, uint64_t step) {
  for (const ps_wait *w = op->wait; w < op->wait + op->n_wait; w++) {
    if (w->steps_back > step)
      continue;
    const uint64_t value = (step - w->steps_back) * m->n_ops[w->stream] + w->value;
    if (m->n_done[w->stream] >= value)
      continue;
    m->stream[i].awaits = value;
    m->stream[w->stream].awaited_by |= 1ull << i;
    return false;
  }
  return true;
}

/* Brings the share of idle time of a stream that rests up to now. @idle: the stream has had no op
 * since the last update. */
static void note_idle(run *m, uint32_t i, bool idle) {
  sim_stream *s = &m->stream[i];
  if (!(m->sim->rests >> i & 1))
    return;
  const double keep = exp((s->idle_at - m->now) / PS_SIM_IDLE_NS);
  s->idle = s->idle * keep + (idle ? 1 - keep : 0);
  s->idle_at = m->now;
}

static bool shares(const ps_sim_cost *c) { return c->demand[0] > 0 || c->kind || c->slower; }

/* Adds a running op to those that use its resources; @by -1 takes it away. True: other running ops
 * use the same, so that their speeds and its own change. */
static bool count_sharing(run *m, const ps_sim_cost *c, int by) {
  bool with_others = c->kind || c->slower;
  for (int d = 0; d < PS_SIM_DEMANDS && c->demand[d] > 0; d++) {
    uint8_t *n = &m->n_sharing[c->resource[d]];
    with_others |= *n > (by < 0);
    *n = (uint8_t)(*n + by);
  }
  return with_others;
}

/* Start the next op of every idle stream that may. */
static void start_ready(run *m) {
  for (uint64_t set = m->ready; set;) {
    const uint32_t i = take(&set);
    sim_stream *s = &m->stream[i];
    if (m->n_ops[i] == 0 || s->step == m->n_steps)
      continue;
    const sim_op *op = &s->ops[s->at];
    if (!satisfied(m, i, op, s->step))
      continue;
    s->cost = &op->cost;
    note_idle(m, i, true);
    m->left[i] = s->cost->ns;
    if (s->cost->idle_gain > 0)
      m->left[i] /= 1 + fmin(s->cost->idle_most, s->cost->idle_gain * s->idle);
    s->start = m->now;
    m->slow[i] = 1;
    m->running |= 1ull << i;
    if (shares(s->cost)) {
      m->sharing |= 1ull << i;
      m->shared_anew |= count_sharing(m, s->cost, 1);
    }
  }
  m->ready = 0;
}

/* How much longer than alone a running op takes now. */
static double slowdown(const run *m, const ps_sim_cost *c) {
  double worst = 1;
  for (int d = 0; d < PS_SIM_DEMANDS && c->demand[d] > 0; d++)
    if (m->demand[c->resource[d]] > worst)
      worst = m->demand[c->resource[d]];
  if (c->slower && c->slower[m->kinds] > worst)
    worst = c->slower[m->kinds];
  return worst;
}

/* Hands the running op of stream @i over to who asked for it. */
static void tell(const run *m, uint32_t i) {
  const sim_stream *s = &m->stream[i];
  const ps__sim_told *told = m->told;
  const uint32_t idx = s->ops[s->at].idx;
  if (told->events)
    told->events[s->step * m->sim->schedule->list.n_ops + idx] =
        (ps_trace_event){.step = s->step,
                         .op = idx,
                         .queued_ns = (uint64_t)(s->queued + 0.5),
                         .start_ns = (uint64_t)(s->start + 0.5),
                         .end_ns = (uint64_t)(m->now + 0.5),
                         .stream = i};
  if (told->step_end_ns)
    told->step_end_ns[s->step] = m->now;
  for (uint32_t k = 0; k < told->n_starts; k++)
    if (told->start[k].op == idx && told->start[k].step == s->step)
      told->start[k].ns = (uint64_t)(s->start + 0.5);
}

static void finish(run *m, uint32_t i) {
  sim_stream *s = &m->stream[i];
  if (s->step < m->n_told) {
    m->n_left--;
    tell(m, i);
  }
  note_idle(m, i, false);
  m->n_done[i]++;
  if (++s->at == m->n_ops[i]) {
    s->at = 0;
    s->step++;
  }
  if (m->sharing >> i & 1)
    m->shared_anew |= count_sharing(m, s->cost, -1);
  s->cost = NULL;
  s->queued = m->now;
  m->running &= ~(1ull << i);
  m->sharing &= ~(1ull << i);
  m->ready |= 1ull << i;
  for (uint64_t set = s->awaited_by; set;) {
    const uint32_t k = take(&set);
    if (m->n_done[i] < m->stream[k].awaits)
      continue;
    m->ready |= 1ull << k;
    s->awaited_by &= ~(1ull << k);
  }
}

/* How much longer than alone each running op takes. An op that uses no resource takes no longer. */
static void share(run *m) {
  memset(m->demand, 0, m->sim->n_resources * sizeof *m->demand);
  m->kinds = 0;
  for (uint64_t set = m->sharing; set;) {
    const ps_sim_cost *c = m->stream[take(&set)].cost;
    m->kinds |= c->kind;
    for (int d = 0; d < PS_SIM_DEMANDS && c->demand[d] > 0; d++)
      m->demand[c->resource[d]] += c->demand[d];
  }
  for (uint64_t set = m->sharing; set;) {
    const uint32_t i = take(&set);
    m->slow[i] = slowdown(m, m->stream[i].cost);
  }
  m->shared_anew = false;
}

/* Advance to the next end of an op. False when nothing runs. */
static bool advance(run *m) {
  double ns[PS_MAX_STREAMS], dt = INFINITY;
  if (m->shared_anew)
    share(m);
  for (uint64_t set = m->running; set;) {
    const uint32_t i = take(&set);
    ns[i] = m->left[i] * m->slow[i];
    dt = ns[i] < dt ? ns[i] : dt;
  }
  if (isinf(dt))
    return false;
  m->now += dt;
  const double until = dt * (1 + 1e-12); /* ops that end together but for rounding end together */
  uint64_t ends = 0;
  for (uint64_t set = m->running; set;) {
    const uint32_t i = take(&set);
    ends |= (uint64_t)(ns[i] <= until) << i;
    m->left[i] -= m->slow[i] > 1 ? dt / m->slow[i] : dt;
  }
  while (ends)
    finish(m, take(&ends));
  return true;
}

static void begin(run *m, const ps__sim *sim) {
  const ps__oplist *l = &sim->schedule->list;
  m->sim = sim;
  for (uint32_t s = 0; s < l->n_streams; s++) {
    m->n_ops[s] = l->stream_n_ops[s];
    m->stream[s].ops = sim->op + sim->first[s];
  }
  m->ready = l->n_streams < 64 ? (1ull << l->n_streams) - 1 : UINT64_MAX;
}

ps_status ps__sim_steps(const ps__sim *sim, uint64_t n_steps, uint64_t n_after,
                        const ps__sim_told *told) {
  const ps__oplist *l = &sim->schedule->list;
  run m = {
      .n_steps = n_steps + n_after, .n_told = n_steps, .n_left = n_steps * l->n_ops, .told = told};
  PS_TRY(check_clock(sim, m.n_steps));
  begin(&m, sim);
  for (uint64_t i = 0; told->step_end_ns && i < n_steps; i++)
    told->step_end_ns[i] = 0;
  do
    start_ready(&m);
  while (m.n_left > 0 && advance(&m));
  for (uint32_t i = 0; i < l->n_streams; i++)
    if (m.n_done[i] < m.n_ops[i] * n_steps)
      return ps__fail(PS_EINTERNAL, "sim: stream %u stands at op %llu", i,
                      (unsigned long long)m.n_done[i]);
  return PS_OK;
}

ps_status ps__sim_run(const ps_schedule *schedule, const ps_sim_cost *cost, uint64_t n_steps,
                      uint64_t n_after, ps_trace_event *events, double *step_end_ns) {
  const ps__sim_told told = {.events = events, .step_end_ns = step_end_ns};
  ps__sim *sim;
  PS_TRY(ps__sim_create(&sim, schedule));
  ps_status st = ps__sim_set_costs(sim, cost, UINT64_MAX);
  if (st == PS_OK)
    st = ps__sim_steps(sim, n_steps, n_after, &told);
  ps__sim_destroy(sim);
  return st;
}

ps_status ps_sim_run(const ps_schedule *schedule, ps_sim_cost_fn cost, void *user, uint64_t n_steps,
                     ps_trace_event *events, double *step_end_ns) {
  const size_t n_ops = schedule->list.n_ops;
  if (!cost)
    return ps__fail(PS_EINVAL, "sim: cost is NULL");
  ps_sim_cost *costs = ps__calloc(n_ops + 1, sizeof *costs);
  ps_status st = costs ? PS_OK : ps__fail(PS_ENOMEM, "sim: out of memory for %zu ops", n_ops);
  for (uint64_t i = 0; st == PS_OK && i < n_ops; i++) {
    ps_op_view view;
    st = ps_schedule_op(schedule, i, &view);
    if (st == PS_OK)
      cost(user, &view, &costs[i]);
  }
  if (st == PS_OK)
    st = ps__sim_run(schedule, costs, n_steps, 0, events, step_end_ns);
  ps__free(costs);
  return st;
}
