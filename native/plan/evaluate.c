/* evaluate.c - a candidate's ops, memory and time. */
#include "engine/sim.h"
#include "engine/schedule.h"
#include "plan/evaluate.h"
#include <string.h>

/* On the CPU backend the devices' arenas are host memory too. */
uint64_t ps__host_taken(const ps__search *s, const uint64_t bytes[PS__N_MEMS]) {
  return bytes[PS__HOST_MEM] + (s->plan->hw.backend == PS_BACKEND_CPU
                                    ? s->plan->at->n_devices * bytes[PS__DEVICE_MEM]
                                    : 0);
}

uint64_t ps__budget(const ps__search *s, uint64_t ops) {
  const uint32_t layers = s->plan->model->cfg.n_layers < PS__BUDGET_LAYERS
                              ? s->plan->model->cfg.n_layers
                              : PS__BUDGET_LAYERS;
  return layers > 32 ? ops * layers / 32 : ops;
}

bool ps__fits_under(const ps__search *s, const uint64_t cap[PS__N_MEMS],
                    const uint64_t bytes[PS__N_MEMS]) {
  for (uint32_t i = 0; i < PS__N_MEMS; i++)
    if (bytes[i] > cap[i])
      return false;
  return ps__host_taken(s, bytes) <= s->machine;
}

bool ps__fits(const ps__search *s, const uint64_t bytes[PS__N_MEMS]) {
  return ps__fits_under(s, s->cap, bytes);
}

/* Where a round of the steady step begins on the compute stream of device 0, and the next one: of
 * the last two rounds of device 0 before its last. */
static void find_round(const ps__step *step, ps__sim_start start[2]) {
  const int32_t n = (int32_t)step->at->n_devices,
                from = ((int32_t)step->layout->n_rounds - 1) / n * n - 2 * n;
  for (int k = 0; k < 2; k++)
    start[k] = (ps__sim_start){.step = PS__SIM_STEADY, .op = UINT64_MAX};
  for (size_t i = step->n_op; i-- > 0;) {
    const int32_t k = step->op[i].tag.round - from;
    if (step->op[i].stream == step->at->dev[0].compute && (k == 0 || k == n))
      start[k > 0].op = i;
  }
}

/* What a simulation of a step needs and changes. */
typedef struct simulation {
  ps_schedule *schedule; /* borrows from the arrays */
  ps__sim *sim;
  ps_sim_cost *cost; /* [n_op], the arrays' */
} simulation;

static void simulation_free(simulation *r) {
  ps__sim_destroy(r->sim);
  (void)ps_schedule_destroy(r->schedule);
}

void ps__evaluation_arrays_free(ps__evaluation_arrays *p) {
  ps__step_arrays_free(&p->step);
  ps_program_destroy(p->bare_program);
  ps__free(p->cost);
  *p = (ps__evaluation_arrays){0};
}

static ps_status reserve_costs(ps__evaluation_arrays *arrays, size_t n) {
  if (n > arrays->n_cost) {
    ps__free(arrays->cost);
    arrays->cost = ps__malloc(n * sizeof *arrays->cost);
    arrays->n_cost = arrays->cost ? n : 0;
  }
  return arrays->cost ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for a simulation");
}

static ps_status simulation_init(simulation *r, const ps__step *step,
                                 ps__evaluation_arrays *arrays) {
  *r = (simulation){0};
  PS_TRY(reserve_costs(arrays, step->n_op));
  r->cost = arrays->cost;
  if (!arrays->bare_program)
    PS_TRY(ps_program_create(&arrays->bare_program, step->at->n_places, step->at->n_streams));
  PS_TRY(ps__step_bare_program(step, arrays->bare_program));
  PS_TRY(ps__schedule_borrow(&r->schedule, arrays->bare_program));
  return ps__sim_create(&r->sim, r->schedule);
}

/* The streams whose ops' costs depend on the number of threads for sums. */
static uint64_t streams_by_threads(const ps__cost_model *m) {
  uint64_t streams = 0;
  for (uint32_t i = 0; i < m->at->n_streams; i++)
    if (ps__costs_by_threads(m, i))
      streams |= 1ull << i;
  return streams;
}

/* The time with the best number of threads for sums. The number changes what ops cost and nothing
 * else.
 * @n_left_out  rounds that the step lacks of the one whose time is asked for
 * @from, @to   numbers to try, by their places (ps__sum_threads()); @to: the one after the last
 * @out         the best number's place */
static ps_status best_threads(const ps_hardware *hw, const ps__step *step, uint32_t n_left_out,
                              ps__evaluation_arrays *arrays, uint32_t from, uint32_t to,
                              uint8_t *out, double *out_ns) {
  simulation r;
  double end[PS__SIM_STEADY + 1];
  ps__sim_start start[2];
  const ps__sim_told told = {
      .step_end_ns = end, .start = start, .n_starts = n_left_out > 0 ? 2 : 0};
  find_round(step, start);
  ps__cost_model m; /* the simulation keeps pointers into it */
  ps_status st = simulation_init(&r, step, arrays);
  for (uint32_t i = from; st == PS_OK && i < to && (i == from || ps__sum_threads(hw, i)); i++) {
    m = ps__cost_model_of(hw, step->model->fp8.on, step->at, hw->n_threads, ps__sum_threads(hw, i));
    ps__step_costs(step, &m, i > from, r.cost);
    st = ps__sim_set_costs(r.sim, r.cost, i > from ? streams_by_threads(&m) : UINT64_MAX);
    if (st == PS_OK)
      st = ps__simulate_steady(r.sim, &told);
    if (st != PS_OK)
      break;
    double ns = ps__steady_ns(step, r.cost, end);
    if (n_left_out)
      ns += n_left_out / step->at->n_devices * ((double)start[1].ns - (double)start[0].ns);
    if (i > from && ns >= *out_ns)
      continue;
    *out_ns = ns;
    *out = (uint8_t)i;
  }
  simulation_free(&r);
  return st;
}

ps_status ps__least_ns(const ps_hardware *hw, const ps__step *step, ps__evaluation_arrays *arrays,
                       double *out_ns) {
  static const double no_waits[PS__SIM_STEADY + 1] = {0};
  PS_TRY(reserve_costs(arrays, step->n_op));
  for (uint32_t i = 0; i == 0 || ps__sum_threads(hw, i); i++) {
    ps__cost_model m =
        ps__cost_model_of(hw, step->model->fp8.on, step->at, hw->n_threads, ps__sum_threads(hw, i));
    ps__step_costs(step, &m, i > 0, arrays->cost);
    const double ns = ps__steady_ns(step, arrays->cost, no_waits);
    if (i == 0 || ns < *out_ns)
      *out_ns = ns;
  }
  return PS_OK;
}

/* ---- a candidate's exact memory -------------------------------------------------------------- */

/* An evaluation ended; @ns: a step of the candidate, 0 where it does not fit. */
static void tell_watch(ps__search_watch *w, double ns) {
  if (!w->fn)
    return;
  pthread_mutex_lock(&w->lock);
  w->n_evaluated++;
  if (ns > 0 && (w->best_ns == 0 || ns < w->best_ns))
    w->best_ns = ns;
  w->fn(w->user, w->n_evaluated, w->best_ns * 1e-9);
  pthread_mutex_unlock(&w->lock);
}

void ps__evaluation_end(ps__search *s, ps__evaluation *e) {
  tell_watch(s->watch, ps__fits(s, e->bytes) && e->mapped ? e->known.ns : 0);
  if (!e->emitted)
    return;
  ps__step_leave(&e->step, &s->arrays.step);
  ps__spec_free(&e->spec);
  e->emitted = false;
}

/* Host memory that a shortened step lacks: of the batch, and of what is kept for each op. */
static uint64_t missing_bytes(const ps__search *s, const ps__microbatch *microbatch,
                              const ps__layout *l, const ps__step *step) {
  /* as the source fills them, as the device gets them, losses */
  const uint64_t tokens = microbatch->layout.n_tokens - l->n_tokens,
                 a_token = 8 + 16 + ps__loss_row_bytes(s->plan->model);
  const double ops = (double)step->n_op * ((double)microbatch->layout.n_chunks / l->n_chunks - 1);
  return tokens * a_token + (uint64_t)ops * ps__bytes_an_op(s->plan);
}

/* Emits the candidate's ops where that was not done yet. */
static ps_status emit(ps__search *s, ps__evaluation *e) {
  const ps__microbatch *microbatch = &s->space.microbatch[e->candidate.microbatch];
  const ps__layout *l = s->whole ? &microbatch->layout : ps__microbatch_layout(microbatch);
  if (e->emitted)
    return PS_OK;
  PS_TRY(ps__candidate_spec(&s->space, &e->candidate, l, &e->spec));
  const ps_status st =
      ps__step_emit_in(&e->step, &s->arrays.step, s->plan->model, l, &e->spec, &s->plan->hooks);
  if (st != PS_OK) {
    ps__spec_free(&e->spec);
    return st;
  }
  e->emitted = true;
  e->n_left_out = l == &microbatch->shorter ? microbatch->n_left_out : 0;
  e->missing = missing_bytes(s, microbatch, l, &e->step);
  return PS_OK;
}

/* Whether the candidate's step is evaluated with all its rounds. */
static bool all_rounds(const ps__search *s, const ps__candidate *m) {
  return s->whole || s->space.microbatch[m->microbatch].n_left_out == 0;
}

static void remember(ps__search *s, const ps__evaluation *e) {
  ps__memo_put(s->memo, &e->candidate, all_rounds(s, &e->candidate), &e->known);
}

/* The same of a candidate. */
static void add_overhead(const ps__search *s, const ps__evaluation *e,
                         const uint64_t arena[PS_MAX_PLACES], uint64_t out[PS__N_MEMS]) {
  ps__used_bytes(s->plan, &e->step, &s->plan->guests, arena, out);
  out[PS__HOST_MEM] += e->missing;
}

static ps_status go_on(const ps__search *s) {
  return s->plan->abandon && atomic_load(s->plan->abandon)
             ? ps__fail(PS_ECANCELLED, "the search was ended")
             : PS_OK;
}

ps_status ps__evaluate_begin(ps__search *s, const ps__candidate *m, ps__evaluation *e) {
  *e = (ps__evaluation){.candidate = *m, .known = ps__memo_get(s->memo, m, all_rounds(s, m))};
  PS_TRY(go_on(s));
  if (!e->known.n_op) {
    uint64_t alive[PS_MAX_PLACES];
    PS_TRY(emit(s, e));
    for (uint32_t i = 0; i < s->plan->at->n_places; i++) {
      alive[i] = ps__memmap_bound(e->step.vt, e->step.n_vt, (uint32_t)e->step.n_op, i);
      if (alive[i] == UINT64_MAX) {
        ps__evaluation_end(s, e);
        return ps__fail(PS_ENOMEM, "out of memory for a plan's size");
      }
    }
    e->known.n_op = e->step.n_op;
    add_overhead(s, e, alive, e->known.at_least);
    const ps_status st =
        s->large ? PS_OK : ps__least_ns(&s->plan->hw, &e->step, &s->arrays, &e->known.least_ns);
    if (st != PS_OK) {
      ps__evaluation_end(s, e);
      return st;
    }
    remember(s, e);
  }
  s->n_ops += e->known.n_op;
  memcpy(e->bytes, e->known.at_least, sizeof e->bytes);
  return PS_OK;
}

/* The memory map of the emitted step. */
static ps_status map_step(ps__search *s, ps__evaluation *e) {
  PS_TRY(emit(s, e));
  if (!e->step_mapped)
    PS_TRY(ps__step_map(&e->step));
  e->step_mapped = true;
  return PS_OK;
}

ps_status ps__evaluate_map(ps__search *s, ps__evaluation *e) {
  if (!e->known.mapped) {
    uint64_t n_ops = 0;
    PS_TRY(map_step(s, e));
    const ps__over over = {s->plan, e->step.layout, &e->spec, &e->step, false};
    if (s->plan->counts_guests)
      PS_TRY(ps__plan_beside_bytes(&over, e->known.bytes, &n_ops));
    else
      add_overhead(s, e, e->step.space_bytes, e->known.bytes);
    s->n_ops += n_ops;
    e->known.mapped = true;
    remember(s, e);
  }
  memcpy(e->bytes, e->known.bytes, sizeof e->bytes);
  e->mapped = true;
  return PS_OK;
}

void ps__note_best(ps__search *s, double ns, const ps__candidate *m) {
  uint32_t i = PS__N_BEST;
  for (uint32_t k = 0; k < PS__N_BEST; k++)
    if (s->best[k].ns == ns && s->best[k].candidate.microbatch == m->microbatch)
      return; /* noted already */
  while (i > 0 && (s->best[i - 1].ns == 0 || ns < s->best[i - 1].ns))
    i--;
  if (i == PS__N_BEST)
    return;
  memmove(&s->best[i + 1], &s->best[i], (PS__N_BEST - 1 - i) * sizeof *s->best);
  s->best[i] = (ps__fastest){ns, *m};
}

/* Whether no simulation of the candidate can be faster than the best so far. */
static bool is_slower(const ps__search *s, const ps__evaluation *e) {
  return s->winners_only && s->best[0].ns > 0 && e->known.least_ns >= s->best[0].ns;
}

/* @out_ns: of a step, by simulation; 0 where it does not fit, or is slower than the best. */
ps_status ps__evaluate_time(ps__search *s, ps__candidate *m, ps__evaluation *e, double *out_ns) {
  *out_ns = 0;
  ps_status st = ps__fits(s, e->bytes) && !is_slower(s, e) ? ps__evaluate_map(s, e) : PS_OK;
  if (st != PS_OK || !e->mapped || !ps__fits(s, e->bytes))
    return st;
  s->out->n_feasible++;
  s->n_ops += e->known.n_op;
  if (!(e->known.ns > 0)) {
    st = map_step(s, e);
    if (st == PS_OK)
      st = best_threads(&s->plan->hw, &e->step, e->n_left_out, &s->arrays, 0, UINT32_MAX,
                        &e->known.threads, &e->known.ns);
    if (st == PS_OK)
      remember(s, e);
  }
  if (st != PS_OK)
    return st;
  *out_ns = e->known.ns;
  m->threads = e->known.threads;
  if (*out_ns > 0)
    ps__note_best(s, *out_ns, m);
  return PS_OK;
}

ps_status ps__evaluate_on(ps__search *s, const ps__candidate *m, const ps_hardware *hw,
                          double *out_ns) {
  ps__evaluation e = {.candidate = *m};
  uint8_t threads;
  PS_TRY(go_on(s));
  ps_status st = map_step(s, &e);
  if (st == PS_OK)
    st = best_threads(hw, &e.step, e.n_left_out, &s->arrays, m->threads, m->threads + 1u, &threads,
                      out_ns);
  if (e.emitted) {
    ps__step_leave(&e.step, &s->arrays.step);
    ps__spec_free(&e.spec);
  }
  return st;
}
