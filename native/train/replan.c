/* replan.c - plans again while a training goes on, and says when to switch. */
#include "train/replan.h"
#include "step/moves.h"
#include "train/observed.h"
#include <malloc.h>
#include <string.h>

/* A switch must gain so much of a step, and its cost must be earned back within so many steps. */
static const double LEAST_GAIN = 0.02;
enum { EARNED_BACK = 50 };
/* Steps after a switch, and after a search that gained nothing, before the next search. The latter
 * doubles, up to MOST_WAIT. No search begins where fewer than LEAST_LEFT steps are left. */
enum { SETTLES = 10, FIRST_WAIT = 20, MOST_WAIT = 640, LEAST_LEFT = 10 };
/* Steps that pause lose what would have overlapped: about so much of one. */
static const double PAUSE = 0.3;

struct ps__replan {
  bool cut;            /* also to another cut */
  uint64_t not_before; /* reported steps, before which no search begins */
  uint64_t wait;       /* steps until the next search */
  bool said_room, said_cut;
  /* the search; its thread writes the rest of this part until over */
  ps__thread *thread;
  const ps_plan *of;
  ps_hardware rates;
  uint64_t space[PS_MAX_PLACES]; /* BYTES of the arenas */
  _Atomic uint32_t over, abandon;
  ps_status st;
  char why[256];
  double took_s;   /* SECONDS of the search */
  double now_s;    /* of a step of the plan that runs, at these rates */
  double cost_s;   /* of a switch to next */
  ps_plan *next;   /* NULL: none was found */
  double other_s;  /* of a step cut otherwise, where that is faster than next; 0: it is not */
  char other[128]; /* in words */
};

static ps_hardware injected;
static _Atomic uint32_t is_injected;

void ps__replan_inject(const ps_hardware *rates) {
  if (rates)
    injected = *rates;
  atomic_store(&is_injected, rates != NULL);
}

/* ---- the search, in the background ----------------------------------------------------------- */

/* Seconds of the switch, simulated. PS_EBUDGET where it has no room. */
static ps_status find_cost(ps__replan *r, const ps_plan *next, double *out) {
  ps__moves all, copies;
  ps_program *program = NULL;
  ps_schedule *schedule = NULL;
  double ns = 0;
  PS_TRY(ps__step_moves(&r->of->step, &next->step, &all));
  ps_status st = ps__moves_order(&all, next->at, r->space, PS__PIECE_BYTES, &copies);
  ps__moves_free(&all);
  PS_TRY(st);
  if (copies.n) {
    ps__cost_model m = ps__cost_model_of(&next->hw, next->model->fp8.on, next->at,
                                         next->hw.n_threads, next->spec.sum_threads);
    st = ps__moves_program(&copies, next->at, &program);
    if (st == PS_OK)
      st = ps_schedule_compile(&schedule, program);
    if (st == PS_OK)
      st = ps_sim_run(schedule, ps__cost, &m, 1, NULL, &ns);
  }
  ps__moves_free(&copies);
  ps_program_destroy(program);
  (void)ps_schedule_destroy(schedule);
  *out = ns * 1e-9 + PAUSE * r->now_s;
  return st;
}

/* A plan that is cut otherwise takes the place of next where it is faster and may. */
static ps_status look_at_cuts(ps__replan *r) {
  ps_plan *p = NULL;
  const ps_status st = ps__plan_again(&p, r->of, &r->rates, true, &r->abandon);
  double cost = 0;
  if (st == PS_EBUDGET)
    return PS_OK;
  PS_TRY(st);
  const double most = (1 - LEAST_GAIN) * (r->next ? r->next->report.step_s : r->now_s);
  if (ps__same_cut(p, r->of) || p->report.step_s >= most ||
      (r->cut && find_cost(r, p, &cost) != PS_OK)) {
    ps_plan_destroy(p);
    return PS_OK;
  }
  r->other_s = p->report.step_s;
  snprintf(r->other, sizeof r->other, "chunks of %llu tokens, %u a round, %u in the first",
           (unsigned long long)p->layout.chunk_tokens, p->layout.chunks_per_round,
           p->layout.first_round_chunks);
  if (!r->cut) {
    ps_plan_destroy(p);
    return PS_OK;
  }
  ps_plan_destroy(r->next);
  r->next = p;
  r->cost_s = cost;
  return PS_OK;
}

static ps_status search(ps__replan *r) {
  PS_TRY(ps_plan_step_at(r->of, &r->rates, &r->now_s));
  ps_status st = ps__plan_again(&r->next, r->of, &r->rates, false, &r->abandon);
  if (st == PS_OK)
    st = find_cost(r, r->next, &r->cost_s);
  if (st != PS_OK) {
    ps_plan_destroy(r->next);
    r->next = NULL;
  }
  if (st != PS_OK && st != PS_EBUDGET)
    return st;
  char why[sizeof r->why];
  snprintf(why, sizeof why, "%s", st == PS_OK ? "" : ps_last_error());
  PS_TRY(look_at_cuts(r));
  return r->next ? PS_OK : ps__fail(st, "%s", why);
}

static void search_beside(void *arg) {
  ps__replan *r = arg;
  if (!atomic_load(&is_injected)) /* a test waits for it */
    ps__thread_background();
  const uint64_t begin = ps__now_ns();
  r->st = search(r);
  r->took_s = (double)(ps__now_ns() - begin) * 1e-9;
  if (r->st != PS_OK)
    snprintf(r->why, sizeof r->why, "%s", ps_last_error());
  malloc_trim(0); /* a search takes more than it leaves */
  atomic_store(&r->over, 1);
}

/* ---- whether to search ----------------------------------------------------------------------- */

static unsigned long long step_of(const ps_trainer *t, uint64_t n) {
  return (unsigned long long)(t->cfg.first_step + n + 1);
}

static uint64_t steps_left(const ps_trainer *t) {
  const uint64_t done = t->cfg.first_step + t->n_reported, all = t->cfg.total_steps;
  return !all ? UINT64_MAX : all > done ? all - done : 0;
}

/* Host memory that the process has now, as the cap counts it. */
static uint64_t resident_now(const ps_trainer *t) {
  uint64_t devices = 0;
  for (uint32_t d = 0; t->plan->hw.backend == PS_BACKEND_CPU && d < t->plan->at->n_devices; d++) {
    uint64_t peak = 0;
    (void)ps_engine_space_peak(t->engine, t->plan->at->dev[d].place, &peak);
    devices += peak;
  }
  const uint64_t all = ps__resident_bytes();
  return all > devices ? all - devices : 0;
}

static bool has_memory(ps_trainer *t) {
  ps__replan *r = t->replan;
  const uint64_t given = t->plan->cfg.host_mem_bytes,
                 cap = given ? given : t->plan->hw.host_memory_bytes,
                 need = PS__SEARCH_BYTES + PS__SEARCH_BYTES_AN_OP * t->plan->report.n_ops,
                 now = cap ? resident_now(t) : 0;
  char more[32], there[32];
  if (!cap || now + need <= cap)
    return true;
  if (!r->said_room)
    ps__log(PS_LOG_WARN,
            "step %llu: steps are not as planned, but the host memory's cap leaves no room to plan "
            "again, which takes %s (%s are left): raise %s; it goes on as before",
            step_of(t, t->n_reported - 1), ps__format_bytes(more, need),
            ps__format_bytes(there, cap > now ? cap - now : 0), ps__field("host_mem_bytes"));
  r->said_room = true;
  return false;
}

/* Steps are not as planned, and why is known. */
static bool observe(const ps_trainer *t, ps_hardware *rates) {
  ps__notice n;
  if (t->n_reported < t->replan->not_before)
    return false;
  if (atomic_load(&is_injected)) {
    *rates = injected;
    return memcmp(rates, &t->plan->hw, sizeof *rates) != 0;
  }
  return ps__observed_notice(t, &n) && n.replan && ps__observed_hardware(t, rates) == PS_OK;
}

static void begin_search(ps_trainer *t) {
  ps__replan *r = t->replan;
  if (steps_left(t) < LEAST_LEFT || !observe(t, &r->rates) || !has_memory(t))
    return;
  r->of = t->plan;
  for (uint32_t i = 0; i < t->plan->at->n_places; i++)
    r->space[i] = ps_engine_space_bytes(t->engine, i);
  r->other_s = 0;
  atomic_store(&r->over, 0);
  if (ps__thread_start(&r->thread, search_beside, r, "ps-replan") == PS_OK)
    atomic_store(&t->border.state, PS__REPLAN_SEARCHES);
}

/* ---- what the search has found --------------------------------------------------------------- */

static void drop_found(ps_trainer *t) {
  ps__replan *r = t->replan;
  ps_plan_destroy(r->next);
  r->next = NULL;
  ps__border_set(t, UINT64_MAX);
  atomic_store(&t->border.state, PS__REPLAN_IDLE);
}

/* Nothing changes; the next search is later than this one was. */
static void go_on_as_before(ps_trainer *t) {
  ps__replan *r = t->replan;
  drop_found(t);
  r->not_before = t->n_reported + r->wait;
  r->wait = r->wait < MOST_WAIT ? 2 * r->wait : MOST_WAIT;
}

static void say_cut(ps_trainer *t) {
  ps__replan *r = t->replan;
  if (r->other_s == 0 || r->cut || r->said_cut)
    return;
  ps__log(PS_LOG_WARN,
          "step %llu: with %s a step is predicted to take %.3g s on the machine as it is now, "
          "instead of %.3g s; it would change the order of sums: %s cut does it",
          step_of(t, t->n_reported - 1), r->other, r->other_s,
          r->next ? r->next->report.step_s : r->now_s, ps__field("replan"));
  r->said_cut = true;
}

/* Steps that have not begun are by the new plan. While a checkpoint is written nothing moves. */
static void set_border(ps_trainer *t) {
  if (!ps_trainer_checkpoint_running(t))
    ps__border_set(t, t->n_started);
}

static bool is_worth(const ps_trainer *t) {
  const ps__replan *r = t->replan;
  const double gain = r->now_s - r->next->report.step_s;
  const uint64_t left = steps_left(t), n = left < EARNED_BACK ? left : EARNED_BACK;
  return gain > LEAST_GAIN * r->now_s && gain * (double)n > r->cost_s;
}

/* What became of the notice that began the search. */
static void say_stays(const ps_trainer *t) {
  const ps__replan *r = t->replan;
  ps__log(
      PS_LOG_INFO,
      "step %llu: the plan stays: by the rates of this run a step takes %.4g s, and %.4g s by "
      "the best other plan, which took %.2g s to find; a switch must gain %.0f%%, and earn back "
      "its %.2g s within %d steps",
      step_of(t, t->n_reported - 1), r->now_s, r->next->report.step_s, r->took_s, 100 * LEAST_GAIN,
      r->cost_s, EARNED_BACK);
}

static void end_search(ps_trainer *t) {
  ps__replan *r = t->replan;
  ps__thread_join(r->thread);
  r->thread = NULL;
  if (r->st != PS_OK) {
    ps__log(PS_LOG_WARN,
            "step %llu: no plan for the machine as it is now: %s; it goes on as before",
            step_of(t, t->n_reported - 1), r->why);
    go_on_as_before(t);
    return;
  }
  say_cut(t);
  if (!is_worth(t)) {
    say_stays(t);
    go_on_as_before(t);
    return;
  }
  if (t->plan->cfg.hosts)
    atomic_store(&t->border.state, PS__REPLAN_FOUND);
  else
    set_border(t);
}

void ps__replan_step(ps_trainer *t) {
  ps__replan *r = t->replan;
  if (!r)
    return;
  if (r->thread) {
    if (atomic_load(&r->over))
      end_search(t);
  } else if (!r->next)
    begin_search(t);
  else if (!t->plan->cfg.hosts && ps__border_at(t) == UINT64_MAX)
    set_border(t); /* it was put off */
}

/* ---- the switch ------------------------------------------------------------------------------ */

/* A line: of what, to what, at which cost. */
static void say_switched(const ps_trainer *t, double now_s) {
  ps__log(PS_LOG_WARN,
          "step %llu: from here on by a plan for the machine as it is now, with %.3g s a step "
          "predicted instead of %.3g s; the switch took %.2g s",
          step_of(t, t->n_started), t->plan->report.step_s, now_s, t->switch_s);
}

/* At the border. Errors are those that stop the trainer. */
static ps_status cross(ps_trainer *t) {
  ps__replan *r = t->replan;
  ps_plan *next = r->next;
  ps__border_set(t, UINT64_MAX);
  if (!next || t->n_reported != t->n_started || ps_trainer_checkpoint_running(t))
    return PS_OK; /* it is put off */
  const ps_status st = ps__trainer_switch(t, next);
  if (t->plan == next) {
    r->next = NULL; /* the trainer's */
    drop_found(t);
    r->wait = FIRST_WAIT;
    r->not_before = t->n_reported + SETTLES;
    r->said_cut = false;
  }
  if (t->sticky != PS_OK)
    return st;
  if (st == PS_OK)
    say_switched(t, r->now_s);
  if (st == PS_OK || st == PS_ECANCELLED) /* of a cancel the next steps tell */
    return PS_OK;
  ps__log(PS_LOG_WARN, "step %llu: %s; it goes on as before", step_of(t, t->n_started),
          ps_last_error());
  go_on_as_before(t);
  return PS_OK;
}

/* ---- its life -------------------------------------------------------------------------------- */

static void end_thread(ps__replan *r) {
  if (!r->thread)
    return;
  atomic_store(&r->abandon, 1);
  ps__thread_join(r->thread);
  r->thread = NULL;
  atomic_store(&r->abandon, 0);
}

static void forget(ps_trainer *t) {
  if (!t->replan)
    return;
  end_thread(t->replan);
  drop_found(t);
}

void ps__replan_destroy(ps_trainer *t) {
  if (!t->replan)
    return;
  forget(t);
  ps__free(t->replan);
  t->replan = NULL;
}

ps_status ps__replan_create(ps_trainer *t) {
  const ps_train_config *c = &t->cfg;
  const bool cut = c->replan == PS_REPLAN_CUT;
  if (c->replan == PS_REPLAN_OFF || t->plan->cfg.forward_only || !t->plan->model->family)
    return PS_OK;
  if (c->trace_to) { /* a profiler's steps are those of one plan */
    ps__log(PS_LOG_INFO, "steps are profiled: the plan stays, whatever steps take");
    return PS_OK;
  }
  if (cut && t->plan->cfg.hosts)
    ps__log(PS_LOG_WARN,
            "%s cut: of several hosts all would need the same cut, so it stays; "
            "plans that do not change it are taken, as by %s auto",
            ps__field("replan"), ps__field("replan"));
  t->replan = ps__calloc(1, sizeof *t->replan);
  if (!t->replan)
    return ps__fail(PS_ENOMEM, "out of memory for a second plan");
  t->replan->cut = cut && !t->plan->cfg.hosts;
  t->replan->wait = FIRST_WAIT;
  t->border.cross = cross;
  return PS_OK;
}

ps_status ps_trainer_switch(ps_trainer *t, ps_plan *plan) {
  if (!t || !plan)
    return ps__fail(PS_EINVAL, "ps_trainer_switch: trainer and plan must be given");
  PS_TRY(ps__trainer_outside_ops(t));
  if (t->sticky != PS_OK)
    return ps__trainer_stop(t, t->sticky);
  PS_TRY(ps__trainer_idle(t));
  forget(t); /* it is for the plan that ends here */
  return ps__trainer_switch(t, plan);
}

ps_plan *ps_trainer_plan(const ps_trainer *t) { return t ? t->plan : NULL; }

ps_plan *ps_trainer_take_plan(ps_trainer *t) {
  if (t)
    t->owns_plan = false;
  return ps_trainer_plan(t);
}
