/* search.c - the fastest plan under both caps, among a fixed family of plans (family.h) and, where that is large, near its fastest members.
 *
 * The family does not depend on the caps, so a larger cap only admits more members: where all of them are looked at, more memory never gives a slower plan. Members are
 * looked at best estimate first, after one of each size has told how far off its size's estimates are; looking is work that grows from one stage to the next, each ruling
 * members out before the next: the bounds, emission, the bytes alive at once, the memory map, the simulation. Where a bound is no better than the best simulated plan, the
 * member is passed over. Large families are looked at within a budget (MAX_OPS) and with fewer rounds a step, refined, and the fastest few looked at whole. */
#include "family.h"
#include "../core/core.h"
#include "../kernels/cuda/scratch.h"
#include <stdlib.h>
#include <string.h>

/* Ops emitted and simulated at most in one search, over all plans looked at: some seconds. A family that needs more (long steps of deep models on a machine where nothing is
 * hidden) gives the best of those looked at. */
static const uint64_t MAX_OPS = 2500000;
/* From so many ops in all members' steps on, steps are looked at with fewer of their rounds, and what lies between the members is looked at too. */
static const double LARGE_FAMILY_OPS = 2e8;
/* Beside MAX_OPS, for what lies between the members. */
static const uint64_t REFINE_OPS = 4000000;
enum { N_REFINED = 4 }; /* sizes that share them, side by side where there are CPUs */
/* From here on members are passed over that will not fit by what was seen of their like. */
static const uint64_t PRUNE_OPS = 400000;
enum { TRIES = 6 }; /* members of a size looked at for one that fits */

enum { N_BEST = 8 };
typedef struct fastest { double ns; ps__member member; } fastest;

typedef struct search {
  ps_plan *plan;
  ps__search_result *out;
  ps__family family;
  fastest best[N_BEST];                   /* ns 0: none yet */
  uint64_t device_cap, host_cap, machine; /* machine: host memory in all */
  uint64_t best_miss, n_ops;
  bool whole;                             /* look at steps with all their rounds, though shorter ones tell nearly the same */
  bool prune;                             /* by slack below, and never look twice */
  double factor[PS__MAX_SIZES];           /* by which a size's estimates are off */
  fastest fastest[PS__MAX_SIZES];         /* of each size; ns 0: none yet */
  uint64_t slack[PS__MAX_SIZES][PS__N_RESIDENCIES][PS__N_AHEADS][PS__N_SPACES]; /* least seen of what a member takes beyond its bound; 0: none seen */
} search;

uint32_t ps__stream_threads(const ps_plan *plan, uint32_t stream) {
  return stream == PS__S_HOST || (stream == PS__S_COMPUTE && plan->hw.backend == PS_BACKEND_CPU) ? plan->hw.n_threads : 1;
}

/* The scratch of a stream and the products' workspace are one allocation (native/backends/cuda/cuda.c), in the driver's units of 2 MiB. */
uint64_t ps__device_overhead(const ps_plan *plan, const ps__step *s, uint64_t *scratch) {
  *scratch = 0;
  if (plan->hw.backend != PS_BACKEND_CUDA) return 0;
  for (uint32_t i = 0; i < PS__N_STREAMS; i++) {
    const uint64_t blas = i == PS__S_COMPUTE ? ps__cuda_workspace_bytes(plan->hw.compute_capability) : 0;
    if (!ps__stream_on_host(i)) *scratch += ps__arena_round(s->scratch_bytes[i] + blas);
  }
  return *scratch + plan->hw.device_overhead_bytes;
}

uint64_t ps__host_overhead(const ps_plan *plan, const ps__step *s, uint64_t *scratch, uint64_t *trace) {
  *scratch = 0;
  for (uint32_t i = 0; i < PS__N_STREAMS; i++)
    if (plan->hw.backend == PS_BACKEND_CPU || ps__stream_on_host(i)) *scratch += (uint64_t)s->scratch_bytes[i] * ps__stream_threads(plan, i);
  /* the trace, and what the program, the schedule and the run keep for each op */
  *trace = s->n_op * ((uint64_t)plan->cfg.trace_steps * sizeof(ps_trace_event) + 512);
  /* tokens and targets of a batch as the source fills them */
  return *scratch + *trace + plan->cfg.reserve_bytes + 8 * s->layout->n_tokens;
}

double ps__steady_ns(const ps__step *s, ps__cost_model *m, const double end[PS__SIM_STEPS]) {
  double stream[PS__N_STREAMS] = {0}, resource[PS_SIM_RESOURCES] = {0}, most = end[PS__SIM_STEPS - 1] - end[PS__SIM_STEPS - 2];
  for (size_t i = 0; i < s->n_op; i++) {
    const ps_op_view view = {.kernel = s->op[i].kernel, .args = s->args + s->op[i].args, .stream = s->op[i].stream, .work = s->op[i].work};
    ps_sim_cost cost;
    ps__cost(m, &view, &cost);
    stream[view.stream] += cost.ns;
    for (int r = 0; r < PS_SIM_RESOURCES; r++) resource[r] += cost.ns * cost.demand[r];
  }
  for (int i = 0; i < PS__N_STREAMS; i++)
    if (stream[i] > most) most = stream[i];
  for (int r = 0; r < PS_SIM_RESOURCES; r++)
    if (resource[r] > most) most = resource[r];
  return most;
}

/* On the CPU backend the device's arena is host memory too. */
static uint64_t host_taken(const search *s, const uint64_t bytes[PS__N_SPACES]) {
  return bytes[PS__SPACE_HOST] + (s->plan->hw.backend == PS_BACKEND_CPU ? bytes[PS__SPACE_DEVICE] : 0);
}

static bool fits(const search *s, const uint64_t bytes[PS__N_SPACES]) {
  return bytes[PS__SPACE_DEVICE] <= s->device_cap && bytes[PS__SPACE_HOST] <= s->host_cap && host_taken(s, bytes) <= s->machine;
}

/* From one round's first op on the compute stream to the next one's, of the last two rounds before the last, in the last of the simulated steps. */
static double round_ns(const ps__step *step, const ps_trace_event *events) {
  const int32_t from = (int32_t)step->layout->n_rounds - 3;
  double start[2] = {0};
  for (size_t i = step->n_op; i-- > 0;) {
    const int32_t k = step->op[i].tag.round - from;
    if (step->op[i].stream == PS__S_COMPUTE && (k == 0 || k == 1)) start[k] = (double)events[(PS__SIM_STEPS - 1) * step->n_op + i].start_ns;
  }
  return start[1] - start[0];
}

/* @n_left_out: rounds that the step is shorter by than the one whose time is asked for. */
static ps_status simulate(const ps__step *step, uint32_t n_left_out, ps__cost_model *m, double *step_ns) {
  ps_program *program = NULL;
  ps_schedule *schedule = NULL;
  double end[PS__SIM_STEPS];
  ps_trace_event *events = n_left_out ? ps__malloc(PS__SIM_STEPS * step->n_op * sizeof *events) : NULL;
  ps_status st = n_left_out && !events ? ps__fail(PS_ENOMEM, "out of memory for a simulation") : ps__step_program(step, &program);
  if (st == PS_OK) st = ps_schedule_compile(&schedule, program);
  if (st == PS_OK) st = ps_sim_run(schedule, ps__cost, m, PS__SIM_STEPS, events, end);
  if (st == PS_OK) *step_ns = ps__steady_ns(step, m, end) + (n_left_out ? n_left_out * round_ns(step, events) : 0);
  ps__free(events);
  ps_program_destroy(program);
  (void)ps_schedule_destroy(schedule);
  return st;
}

/* ---- a member's exact size ------------------------------------------------------------------------------------------------------ */

typedef struct sized { ps__spec spec; ps__step step; uint64_t bytes[PS__N_SPACES], missing; uint32_t n_left_out; bool mapped; } sized;

static void sized_free(sized *z) {
  ps__step_free(&z->step);
  ps__spec_free(&z->spec);
}

/* Host memory that a shorter step takes less: of the batch and for ops. */
static uint64_t missing_bytes(const search *s, const ps__size *size, const ps__layout *l, const ps__step *step) {
  const uint64_t tokens = size->layout.n_tokens - l->n_tokens, a_token = 8 + 16 + 4; /* as the source fills them, as the device gets them, losses */
  const double ops = (double)step->n_op * ((double)size->layout.n_chunks / l->n_chunks - 1);
  return tokens * a_token + (uint64_t)ops * ((uint64_t)s->plan->cfg.trace_steps * sizeof(ps_trace_event) + 512);
}

/* Emission, and in bytes what no map goes below. */
static ps_status emit(search *s, const ps__member *m, sized *z) {
  const ps_plan *plan = s->plan;
  uint64_t scratch, trace;
  const ps__size *size = &s->family.size[m->size];
  const ps__layout *l = s->whole ? &size->layout : ps__size_layout(size);
  PS_TRY(ps__family_spec(&s->family, m, l, &z->spec));
  const ps_status st = ps__step_emit(&z->step, &plan->model, l, &z->spec, &s->plan->hooks);
  if (st != PS_OK) {
    ps__spec_free(&z->spec);
    return st;
  }
  s->n_ops += z->step.n_op;
  z->n_left_out = l == &size->shorter ? size->n_left_out : 0;
  z->missing = missing_bytes(s, size, l, &z->step);
  const uint64_t overhead[PS__N_SPACES] = {[PS__SPACE_DEVICE] = ps__device_overhead(plan, &z->step, &scratch),
                                           [PS__SPACE_HOST] = ps__host_overhead(plan, &z->step, &scratch, &trace)};
  for (uint32_t i = 0; i < PS__N_SPACES; i++) {
    const uint64_t alive = ps__memmap_bound(z->step.vt, z->step.n_vt, (uint32_t)z->step.n_op, i);
    if (alive == UINT64_MAX) {
      sized_free(z);
      return ps__fail(PS_ENOMEM, "out of memory for a plan's size");
    }
    z->bytes[i] = ps__arena_round(alive) + overhead[i] + (i == PS__SPACE_HOST ? z->missing : 0);
  }
  z->mapped = false;
  return PS_OK;
}

static ps_status map(search *s, sized *z) {
  uint64_t scratch, trace;
  PS_TRY(ps__step_map(&z->step));
  z->bytes[PS__SPACE_DEVICE] = ps__arena_round(z->step.space_bytes[PS__SPACE_DEVICE]) + ps__device_overhead(s->plan, &z->step, &scratch);
  z->bytes[PS__SPACE_HOST] = ps__arena_round(z->step.space_bytes[PS__SPACE_HOST]) + ps__host_overhead(s->plan, &z->step, &scratch, &trace) + z->missing;
  z->mapped = true;
  return PS_OK;
}

/* ---- the fastest ------------------------------------------------------------------------------------------------------------------ */

static int by_estimate(const void *pa, const void *pb) {
  const ps__member *a = pa, *b = pb;
  if (a->estimate_ns != b->estimate_ns) return a->estimate_ns < b->estimate_ns ? -1 : 1;
  if (a->size != b->size) return a->size < b->size ? -1 : 1;
  if (a->residency != b->residency) return a->residency < b->residency ? -1 : 1;
  if (a->ahead != b->ahead) return a->ahead > b->ahead ? -1 : 1;
  if (a->device != b->device) return a->device > b->device ? -1 : 1;
  return a->host < b->host ? -1 : a->host > b->host;
}

typedef struct ranked { double ns; uint32_t idx; } ranked;
static int by_rank(const void *pa, const void *pb) {
  const ranked *a = pa, *b = pb;
  if (a->ns != b->ns) return a->ns < b->ns ? -1 : 1;
  return a->idx < b->idx ? -1 : a->idx > b->idx;
}

/* What members that differ in their shares alone were seen to take beyond their bounds, within a few percent the same for all, to a bound. */
static void add_slack(const search *s, const ps__member *m, uint64_t bytes[PS__N_SPACES]) {
  for (uint32_t i = 0; s->prune && s->n_ops > PRUNE_OPS && i < PS__N_SPACES; i++) bytes[i] += s->slack[m->size][m->residency][m->ahead][i] / 20 * 19;
}

static bool cannot_fit(const search *s, const ps__member *m) {
  uint64_t bytes[PS__N_SPACES] = {m->bytes[0], m->bytes[1]};
  if (!fits(s, bytes)) return true;
  add_slack(s, m, bytes);
  return !fits(s, bytes);
}

static void note_slack(search *s, const ps__member *m, const sized *z) {
  const uint64_t *bytes = m->bytes;
  for (uint32_t i = 0; i < PS__N_SPACES; i++) {
    uint64_t *slack = &s->slack[m->size][m->residency][m->ahead][i], now = z->bytes[i] > bytes[i] ? z->bytes[i] - bytes[i] : 0;
    if (*slack == 0 || now < *slack) *slack = now;
  }
}

/* The fastest few, fastest first. */
static void note_best(search *s, double ns, const ps__member *m) {
  uint32_t i = N_BEST;
  for (uint32_t k = 0; k < N_BEST; k++)
    if (s->best[k].ns == ns && s->best[k].member.size == m->size) return; /* the same once more */
  while (i > 0 && (s->best[i - 1].ns == 0 || ns < s->best[i - 1].ns)) i--;
  if (i == N_BEST) return;
  memmove(&s->best[i + 1], &s->best[i], (N_BEST - 1 - i) * sizeof *s->best);
  s->best[i] = (fastest){ns, *m};
}

/* @out_ns: what its step takes by simulation; 0 where it does not fit. */
static ps_status time_of(search *s, const ps__member *m, sized *z, double *out_ns) {
  *out_ns = 0;
  ps_status st = fits(s, z->bytes) ? map(s, z) : PS_OK;
  if (st != PS_OK || !z->mapped || !fits(s, z->bytes)) return st;
  s->out->n_feasible++;
  s->n_ops += z->step.n_op;
  st = simulate(&z->step, z->n_left_out, &s->family.cost, out_ns);
  if (st == PS_OK && *out_ns > 0) note_best(s, *out_ns, m);
  return st;
}

static ps_status look_at(search *s, ps__member *m, double *out_ns) {
  sized z;
  m->seen = true;
  PS_TRY(emit(s, m, &z));
  note_slack(s, m, &z);
  const ps_status st = time_of(s, m, &z, out_ns);
  sized_free(&z);
  if (*out_ns > 0 && (s->fastest[m->size].ns == 0 || *out_ns < s->fastest[m->size].ns)) s->fastest[m->size] = (fastest){*out_ns, *m};
  return st;
}

/* Of each size the member of the best estimate that fits: it tells how far off the estimates of its size are. */
static ps_status look_at_sizes(search *s) {
  double factor[PS__MAX_SIZES] = {0}, worst = 1;
  uint32_t tries[PS__MAX_SIZES] = {0};
  for (size_t i = 0; i < s->family.n_members && s->n_ops < MAX_OPS / 2; i++) {
    ps__member *m = &s->family.member[i];
    double ns = 0;
    if (factor[m->size] > 0 || tries[m->size] == TRIES || cannot_fit(s, m)) continue;
    tries[m->size]++;
    PS_TRY(look_at(s, m, &ns));
    if (ns > 0) factor[m->size] = ns / m->estimate_ns;
    if (factor[m->size] > worst) worst = factor[m->size];
  }
  for (uint32_t i = 0; i < PS__MAX_SIZES; i++) s->factor[i] = factor[i] > 0 ? factor[i] : worst;
  return PS_OK;
}

/* The next member in an order that is worth a look; NULL: none is left. */
static ps__member *next_of(const search *s, const ranked *order, size_t *at) {
  const ps__family *f = &s->family;
  while (*at < f->n_members) {
    ps__member *m = &f->member[order[(*at)++].idx];
    if ((m->seen && s->prune) || (s->best[0].ns > 0 && m->bound_ns >= s->best[0].ns) || cannot_fit(s, m)) continue;
    return m;
  }
  return NULL;
}

/* By the estimates and, in turn, by those corrected for what their size was seen to take: where one is wrong the other may not be. */
static ps_status find_fastest(search *s) {
  ps__family *f = &s->family;
  ranked *order[2];
  size_t at[2] = {0};
  s->n_ops = 0;
  qsort(f->member, f->n_members, sizeof *f->member, by_estimate);
  PS_TRY(look_at_sizes(s));
  order[0] = ps__malloc(2 * (f->n_members + 1) * sizeof *order[0]);
  if (!order[0]) return ps__fail(PS_ENOMEM, "out of memory for the order of %zu plans", f->n_members);
  order[1] = order[0] + f->n_members;
  for (size_t i = 0; i < f->n_members; i++) {
    order[0][i] = (ranked){f->member[i].estimate_ns * s->factor[f->member[i].size], (uint32_t)i};
    order[1][i] = (ranked){f->member[i].estimate_ns, (uint32_t)i};
  }
  qsort(order[0], f->n_members, sizeof *order[0], by_rank);
  ps_status st = PS_OK;
  for (uint32_t turn = 0, idle = 0; st == PS_OK && idle < 2 && s->n_ops <= (s->best[0].ns > 0 ? MAX_OPS : 4 * MAX_OPS); turn ^= 1) {
    ps__member *m = next_of(s, order[turn], &at[turn]);
    double ns;
    idle = m ? 0 : idle + 1;
    if (m) st = look_at(s, m, &ns);
  }
  ps__free(order[0]);
  return st;
}

/* ---- between the members ------------------------------------------------------------------------------------------------------------ */

/* What refining changes, a part at a time: see ps__member. The share on the device follows: it takes what the cap leaves. */
enum { MOVE_HOST, MOVE_PARAMS, MOVE_GRADS, MOVE_EXTRA, MOVE_STREAMED, MOVE_SUMS, MOVE_HEAD, MOVE_AHEAD, N_MOVES };

static bool moved(const search *s, ps__member *m, int what, int by) {
  const bool cuda = s->plan->hw.backend == PS_BACKEND_CUDA; /* elsewhere the "device" has no processor of its own */
  const int layers = s->plan->model.n_layers < 255 ? (int)s->plan->model.n_layers : 255;
  const bool extras = s->family.size[m->size].layout.first_round_chunks > s->family.size[m->size].layout.chunks_per_round;
  uint8_t *const field[N_MOVES] = {&m->host, &m->keep.params, &m->keep.grads, &m->extra, &m->streamed, &m->sums, &m->keep.head, &m->ahead};
  const int most[N_MOVES] = {PS__SHARES, PS__UNIT_PARTS, m->keep.params, extras ? PS__SHARES : 0, cuda ? layers : 0, layers, 1, PS__N_AHEADS - 1};
  const int to = *field[what] + by;
  if (m->keep.state && what != MOVE_HOST && what != MOVE_AHEAD) return false;
  if (to < 0 || to > most[what]) return false;
  *field[what] = (uint8_t)to;
  if (m->keep.grads > m->keep.params) m->keep.grads = m->keep.params;
  return true;
}

/* Gives @m the largest share on the device that fits, as far as a few looks tell, beginning from one that should by what @z, a step like it, took. */
static ps_status fill_device(search *s, ps__member *m, uint64_t taken, double *out_ns, uint64_t *out_taken) {
  const double part = ps__family_share_bytes(&s->family, m);
  const uint64_t cap = s->device_cap;
  int room = cap == UINT64_MAX ? PS__SHARES : (int)(((double)cap - (double)taken) / part), share = m->device + room;
  *out_ns = 0;
  for (int tries = 0; tries < 4; tries++, share--) {
    sized z;
    if (share > PS__SHARES - m->host) share = PS__SHARES - m->host;
    if (share < 0) return PS_OK;
    m->device = (uint8_t)share;
    PS_TRY(emit(s, m, &z));
    const ps_status st = time_of(s, m, &z, out_ns);
    *out_taken = z.bytes[PS__SPACE_DEVICE];
    const bool host = z.bytes[PS__SPACE_HOST] <= s->host_cap;
    sized_free(&z);
    if (st != PS_OK || *out_ns > 0 || !host) return st;
  }
  return PS_OK;
}

/* From a size's fastest member on, to the next better plan near it, as long as there is one: each decision by larger and then smaller steps, up and down. */
static ps_status refine(search *s, fastest at, uint64_t max_ops) {
  static const int step[] = {6, 2, 1};
  const uint64_t end = s->n_ops + max_ops;
  uint64_t taken = 0;
  double ns;
  ps__member m = at.member;
  PS_TRY(fill_device(s, &m, s->device_cap, &ns, &taken)); /* as it is, for what it takes */
  if (taken == 0) return PS_OK;
  for (uint32_t i = 0; i < sizeof step / sizeof *step; i++)
    for (bool better = true; better && s->n_ops < end;) {
      better = false;
      for (int move = 0; move < 2 * N_MOVES && s->n_ops < end; move++) {
        const int what = move / 2, by = (move % 2 ? -1 : 1) * (what >= MOVE_HEAD ? 1 : step[i]);
        ps__member next = at.member;
        uint64_t now = 0;
        if ((what >= MOVE_HEAD && i > 0) || !moved(s, &next, what, by)) continue;
        const double units = (next.keep.params + next.keep.grads - at.member.keep.params - at.member.keep.grads) * ps__family_unit_part_bytes(&s->family);
        PS_TRY(fill_device(s, &next, (uint64_t)((double)taken + units), &ns, &now));
        if (ns <= 0 || ns >= at.ns) continue;
        at = (fastest){ns, next};
        taken = now;
        better = true;
      }
    }
  return PS_OK;
}

static int by_ns(const void *pa, const void *pb) {
  const fastest *a = pa, *b = pb;
  if ((a->ns > 0) != (b->ns > 0)) return a->ns > 0 ? -1 : 1;
  if (a->ns != b->ns) return a->ns < b->ns ? -1 : 1;
  return a->member.size < b->member.size ? -1 : a->member.size > b->member.size;
}

/* One size's refinement: a search of its own from there, so that sizes may be refined side by side and how many are at work changes nothing. */
typedef struct branch {
  search *s;
  ps__search_result out;
  ps_status status;
  char why[256];
} branch;

static void refine_branch(void *arg, int64_t task, uint32_t worker) {
  branch *b = (branch *)arg + task;
  (void)worker;
  b->status = refine(b->s, b->s->fastest[task], REFINE_OPS / N_REFINED);
  if (b->status != PS_OK) snprintf(b->why, sizeof b->why, "%s", ps_last_error());
}

static ps_status refine_all(search *s, branch *b, uint32_t n) {
  ps__pool *pool;
  const uint32_t n_cpus = ps__n_cpus();
  PS_TRY(ps__pool_create(&pool, n_cpus < n ? n_cpus : n, "search"));
  ps__pool_run(pool, n, refine_branch, b);
  ps__pool_destroy(pool);
  for (uint32_t i = 0; i < n; i++) {
    if (b[i].status != PS_OK) return ps__fail(b[i].status, "%s", b[i].why);
    s->out->n_feasible += b[i].out.n_feasible;
    for (uint32_t k = 0; k < N_BEST && b[i].s->best[k].ns > 0; k++)
      if (b[i].s->best[k].ns < s->best[0].ns) note_best(s, b[i].s->best[k].ns, &b[i].s->best[k].member);
  }
  return PS_OK;
}

/* The fastest sizes, as far as they are not slower by more than refining is likely to gain. */
static ps_status refine_fastest(search *s) {
  branch b[N_REFINED] = {0};
  uint32_t n = 0;
  ps_status st = PS_OK;
  qsort(s->fastest, PS__MAX_SIZES, sizeof *s->fastest, by_ns);
  for (; n < N_REFINED && s->fastest[n].ns > 0 && s->fastest[n].ns < 1.06 * s->best[0].ns; n++) {
    b[n].s = ps__malloc(sizeof *s);
    if (!b[n].s) {
      st = ps__fail(PS_ENOMEM, "out of memory for the search");
      break;
    }
    *b[n].s = *s; /* the family is shared and not written to */
    b[n].s->out = &b[n].out;
    b[n].s->n_ops = 0;
  }
  if (st == PS_OK) st = refine_all(s, b, n);
  for (uint32_t i = 0; i < n; i++) ps__free(b[i].s);
  return st;
}

/* The fastest that holds with all its rounds: what shorter steps tell of time and memory is nearly so, and the fastest of them may not fit by a hair. */
static ps_status hold_best(search *s) {
  fastest few[N_BEST];
  memcpy(few, s->best, sizeof few);
  memset(s->best, 0, sizeof s->best);
  s->whole = true;
  for (uint32_t i = 0, n_held = 0; i < N_BEST && few[i].ns > 0 && n_held < 2; i++) {
    sized z;
    double ns;
    PS_TRY(emit(s, &few[i].member, &z));
    const ps_status st = time_of(s, &few[i].member, &z, &ns);
    sized_free(&z);
    if (st != PS_OK) return st;
    n_held += ns > 0;
  }
  return PS_OK;
}

static ps_status keep_best(search *s) {
  ps_plan *plan = s->plan;
  const ps__layout *l = &s->family.size[s->best[0].member.size].layout;
  PS_TRY(ps__layout_init(&plan->layout, plan->cfg.seq_len, plan->cfg.tokens_per_step / plan->cfg.seq_len, l->chunk_tokens, l->chunks_per_round,
                         l->first_round_chunks));
  return ps__family_spec(&s->family, &s->best[0].member, &plan->layout, &plan->spec);
}

/* ---- the smallest ----------------------------------------------------------------------------------------------------------------- */

static uint64_t beyond(const search *s, const uint64_t bytes[PS__N_SPACES]) {
  const uint64_t d = bytes[PS__SPACE_DEVICE], h = bytes[PS__SPACE_HOST];
  return (d > s->device_cap ? d - s->device_cap : 0) + (h > s->host_cap ? h - s->host_cap : 0);
}

static void note_sizes(search *s, const uint64_t bytes[PS__N_SPACES]) {
  ps__search_result *r = s->out;
  const uint64_t device = bytes[PS__SPACE_DEVICE], host = bytes[PS__SPACE_HOST];
  const bool machine = host_taken(s, bytes) <= s->machine;
  if (machine && host <= s->host_cap && (r->smallest_device == 0 || device < r->smallest_device)) r->smallest_device = device;
  if (machine && device <= s->device_cap && (r->smallest_host == 0 || host < r->smallest_host)) r->smallest_host = host;
  if (r->any_device == 0 || beyond(s, bytes) < s->best_miss) {
    r->any_device = device;
    r->any_host = host;
    s->best_miss = beyond(s, bytes);
  }
}

/* Whether a member of at least these sizes could be the smallest in some way. */
static bool could_be_smallest(const search *s, const uint64_t bytes[PS__N_SPACES]) {
  const ps__search_result *r = s->out;
  const uint64_t device = bytes[PS__SPACE_DEVICE], host = bytes[PS__SPACE_HOST];
  const bool machine = host_taken(s, bytes) <= s->machine;
  return r->any_device == 0 || (machine && host <= s->host_cap && (r->smallest_device == 0 || device < r->smallest_device)) ||
         (machine && device <= s->device_cap && (r->smallest_host == 0 || host < r->smallest_host)) ||
         (!r->smallest_device && !r->smallest_host && beyond(s, bytes) < s->best_miss);
}

typedef struct small { uint64_t key; uint32_t idx; } small;
static int by_key(const void *pa, const void *pb) {
  const small *a = pa, *b = pb;
  if (a->key != b->key) return a->key < b->key ? -1 : 1;
  return a->idx < b->idx ? -1 : a->idx > b->idx;
}

static ps_status size_up(search *s, const ps__member *m) {
  sized z;
  uint64_t bytes[PS__N_SPACES] = {m->bytes[0], m->bytes[1]};
  add_slack(s, m, bytes);
  if (!could_be_smallest(s, bytes)) return PS_OK;
  PS_TRY(emit(s, m, &z));
  note_slack(s, m, &z);
  ps_status st = could_be_smallest(s, z.bytes) ? map(s, &z) : PS_OK;
  if (st == PS_OK && z.mapped) note_sizes(s, z.bytes);
  sized_free(&z);
  return st;
}

/* By each space in turn, the least first: what is found early rules out most of the rest. */
static ps_status find_smallest(search *s) {
  const size_t n = s->family.n_members;
  small *order = ps__malloc((n + 1) * sizeof *order);
  ps_status st = order ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for the smallest plan");
  for (uint32_t space = 0; st == PS_OK && space < PS__N_SPACES; space++) {
    for (size_t i = 0; i < n; i++) order[i] = (small){s->family.member[i].bytes[space], (uint32_t)i};
    qsort(order, n, sizeof *order, by_key);
    for (size_t i = 0; st == PS_OK && i < n && s->n_ops <= (space + 1) * 2 * MAX_OPS; i++) st = size_up(s, &s->family.member[order[i].idx]);
  }
  ps__free(order);
  return st;
}

/* Whether looking at all members is out of the question. */
static bool is_large(const search *s) {
  double ops = 0;
  for (size_t i = 0; i < s->family.n_members; i++) ops += (double)s->family.size[s->family.member[i].size].n_ops;
  return ops > LARGE_FAMILY_OPS;
}

static ps_status find(search *s) {
  const bool large = is_large(s);
  if (large) PS_TRY(ps__family_shorten(&s->family));
  for (int pass = 0; pass < 2 && s->best[0].ns == 0; pass++) {
    s->prune = pass == 0; /* what fits by a hair is found by the second */
    PS_TRY(find_fastest(s));
  }
  if (s->best[0].ns == 0 || !large) return PS_OK;
  PS_TRY(refine_fastest(s));
  PS_TRY(hold_best(s));
  return s->best[0].ns > 0 ? PS_OK : find_fastest(s); /* with all their rounds from here on */
}

ps_status ps__search(ps_plan *plan, bool sizes_only, ps__search_result *out) {
  memset(out, 0, sizeof *out);
  search *s = ps__calloc(1, sizeof *s);
  if (!s) return ps__fail(PS_ENOMEM, "out of memory for the search");
  const ps_hardware *hw = &plan->hw;
  s->plan = plan;
  s->out = out;
  s->device_cap = plan->cfg.device_bytes ? plan->cfg.device_bytes : UINT64_MAX;
  s->host_cap = plan->cfg.host_bytes ? plan->cfg.host_bytes : UINT64_MAX;
  s->machine = hw->host_memory_bytes ? hw->host_memory_bytes : UINT64_MAX;
  if (hw->backend == PS_BACKEND_CUDA && hw->device_memory_bytes && hw->device_memory_bytes < s->device_cap) s->device_cap = hw->device_memory_bytes;
  ps_status st = ps__family_init(&s->family, plan, &plan->hooks);
  out->n_candidates = (uint32_t)s->family.n_members;
  s->prune = true;
  if (st == PS_OK) st = sizes_only ? find_smallest(s) : find(s);
  if (st == PS_OK && s->best[0].ns > 0) st = keep_best(s);
  ps__family_free(&s->family);
  ps__free(s);
  return st;
}
