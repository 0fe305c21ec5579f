/* again.c - a second plan of a training that goes on: at other rates, in the arenas that are
 * reserved, and with the same cut of the batch.
 *
 * The search is that of a first plan whose chunks, rounds and slices are given, so its decisions
 * change no bits. The caps are what the first plan takes: no arena grows or shrinks. */
#include "plan/plan_impl.h"

/* Of threads at low priority, beside the training. */
enum { WORKERS = 2 };

static ps__room room_of(const ps_plan *p) {
  const ps_plan_report *o = &p->report;
  const uint64_t cap = p->cfg.host_mem_bytes;
  ps__room r = {.given = true,
                .used = {[PS__DEVICE_MEM] = o->device_used_bytes,
                         [PS__HOST_MEM] = o->host_used_bytes,
                         [PS__PINNED_MEM] = UINT64_MAX},
                .beside = o->host_used_bytes - o->host_arena_bytes,
                .spare = !cap                       ? INT64_MAX
                         : cap > o->host_used_bytes ? cap - o->host_used_bytes
                                                    : 0};
  for (uint32_t i = 0; i < p->at->n_places; i++)
    r.bytes[i] = ps__plan_reserved(p, i);
  for (uint32_t i = 0; i < p->at->n_streams; i++)
    r.scratch[i] = p->room.given ? p->room.scratch[i] : p->step.scratch_bytes[i];
  return r;
}

static bool fits(const ps_plan *p) {
  uint64_t bytes[PS__N_MEMS];
  ps__used_bytes(p, &p->step, &p->guests, p->step.space_bytes, bytes);
  return bytes[PS__DEVICE_MEM] <= p->room.used[PS__DEVICE_MEM] &&
         bytes[PS__HOST_MEM] <= p->room.used[PS__HOST_MEM];
}

/* ---- the search ------------------------------------------------------------------------------ */

/* What the user asked for, with the cut that the plan has; with @other_cut with the cut that the
 * user asked for. @stage: room for the batch ramp. */
static ps_plan_config config_of(const ps_plan *p, bool other_cut,
                                ps_ramp_stage stage[PS_MAX_RAMP]) {
  ps_plan_config c = p->cfg;
  c.tokens_per_step *= c.n_hosts;
  c.chunk_tokens = other_cut ? p->asked.chunk_tokens : p->layout.chunk_tokens;
  c.chunks_per_round = other_cut ? p->asked.chunks_per_round : p->layout.chunks_per_round;
  c.first_round_chunks = other_cut ? p->asked.first_round_chunks : p->layout.first_round_chunks;
  c.first_rounds = other_cut ? p->asked.first_rounds : p->layout.first_rounds;
  c.head_slice_tokens = other_cut ? p->asked.head_slice_tokens : p->spec.head_slice;
  for (uint32_t i = 0; i < p->guests.n_ramp; i++)
    stage[i] = (ps_ramp_stage){p->guests.ramp[i].n_sequences * c.seq_len * c.n_hosts,
                               p->guests.ramp[i].n_steps};
  c.ramp = stage;
  c.progress = NULL;
  return c;
}

/* The machine of @p at other rates: what it has does not change while it trains. */
static ps_hardware machine_of(const ps_plan *p, const ps_hardware *rates) {
  ps_hardware hw = *rates;
  hw.backend = p->hw.backend;
  hw.device = p->hw.device;
  hw.n_threads = p->hw.n_threads;
  hw.n_cpus = p->hw.n_cpus;
  hw.host_memory_bytes = p->hw.host_memory_bytes;
  hw.device_memory_bytes = p->hw.device_memory_bytes;
  hw.device_overhead_bytes = p->hw.device_overhead_bytes;
  hw.fp8_overhead_bytes = p->hw.fp8_overhead_bytes;
  return hw;
}

static ps_status search(ps_plan *p, const ps__memos *m) {
  ps__search_result r;
  PS_TRY(ps__find_in_layouts(p, m, 0, &r));
  if (r.step_ns == 0)
    return ps__fail(PS_EBUDGET, "no other plan fits in the arenas that are reserved");
  return ps__plan_compile(p, &r);
}

static ps_status find(ps_plan *p) {
  ps__memos m;
  PS_TRY(ps__memos_create(&m));
  ps_status st = search(p, &m);
  ps__memos_destroy(&m);
  if (st != PS_OK || fits(p))
    return st;
  PS_TRY(ps__plan_undo(p));
  p->counts_guests = true; /* what is known of candidates is without them */
  PS_TRY(ps__memos_create(&m));
  st = search(p, &m);
  ps__memos_destroy(&m);
  if (st == PS_OK && !fits(p))
    st = ps__fail(PS_EBUDGET, "no other plan fits in the arenas that are reserved");
  return st;
}

ps_status ps__plan_again(ps_plan **out, const ps_plan *plan, const ps_hardware *rates,
                         bool other_cut, const _Atomic uint32_t *abandon) {
  ps_ramp_stage stage[PS_MAX_RAMP];
  ps_plan *p = NULL;
  if (plan->cfg.pinned_mem_bytes)
    return ps__fail(PS_EBUDGET, "no other plan is looked for, as host memory is pinned in part: "
                                "what another plan copies may not be");
  const ps_plan_config cfg = config_of(plan, other_cut, stage);
  const ps_hardware hw = machine_of(plan, rates);
  PS_TRY(ps__plan_new(&p, &plan->model->cfg, &cfg, &hw));
  p->asked = plan->asked;
  p->room = room_of(plan);
  p->holds = plan->holds;
  ps__disk_level_set(p, plan->disk_level); /* nothing moves to or from the disk */
  p->most_workers = WORKERS;
  p->abandon = abandon;
  const ps_status st = find(p);
  p->cfg.ramp = NULL; /* this call's, as is the next */
  p->abandon = NULL;
  if (st != PS_OK)
    ps_plan_destroy(p);
  else
    *out = p;
  return st;
}

ps_status ps_plan_again(ps_plan **out, const ps_plan *plan, const ps_hardware *rates,
                        uint32_t other_cut) {
  if (!out || !plan || !rates || rates->struct_bytes != sizeof *rates)
    return ps__fail(PS_EINVAL, "ps_plan_again: out, plan and rates must be given, rates with its "
                               "struct_bytes set");
  return ps__plan_again(out, plan, rates, other_cut != 0, NULL);
}

ps_status ps_plan_step_at(const ps_plan *p, const ps_hardware *rates, double *step_s) {
  if (!p || !rates || !step_s || rates->struct_bytes != sizeof *rates)
    return ps__fail(PS_EINVAL, "ps_plan_step_at: plan, rates and step_s must be given, rates with "
                               "its struct_bytes set");
  const ps_hardware hw = machine_of(p, rates);
  double ns;
  ps__cost_model m =
      ps__cost_model_of(&hw, p->model->fp8.on, p->step.at, hw.n_threads, p->spec.sum_threads);
  PS_TRY(ps__step_predict(&p->step, p->schedule, &m, NULL, &ns));
  *step_s = ns * 1e-9;
  return PS_OK;
}

bool ps__same_cut(const ps_plan *a, const ps_plan *b) {
  const ps__layout *x = &a->layout, *y = &b->layout;
  return x->chunk_tokens == y->chunk_tokens && x->chunks_per_round == y->chunks_per_round &&
         x->first_round_chunks == y->first_round_chunks && x->first_rounds == y->first_rounds &&
         x->n_rounds == y->n_rounds && a->spec.head_slice == b->spec.head_slice;
}
