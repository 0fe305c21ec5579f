/* plan.c - a plan from its configuration: the search, the memory map of the run, the report. */
#include "plan/plan_impl.h"
#include "engine/schedule.h"
#include "hardware/hardware_impl.h"
#include <string.h>

const char *ps_plan_stream_name(const ps_plan *plan, uint32_t stream) {
  return plan && stream < plan->at->n_streams ? plan->at->stream[stream].name : NULL;
}

void ps__plan_engine(const ps_plan *p, ps_engine_config *out) {
  const ps_plan_report *r = &p->report;
  const ps__caps cap = ps__plan_caps(p);
  const uint64_t beside[PS__N_MEMS] = {[PS__DEVICE_MEM] =
                                           r->device_used_bytes - r->device_arena_bytes,
                                       [PS__HOST_MEM] = r->host_used_bytes - r->host_arena_bytes};
  ps__engine_of(out, &p->hw, p->at, p->step.space_bytes, p->step.pageable_bytes, cap.given, beside,
                p->step.scratch_bytes);
  out->deterministic = p->cfg.deterministic;
}

static double exchanged_bytes(const ps__step *s) {
  double bytes = 0;
  for (size_t i = 0; i < s->n_op; i++)
    if (s->op[i].stream == s->at->net)
      bytes += s->op[i].work.bytes;
  return bytes;
}

static uint64_t vt_bytes(const ps__step *s, uint32_t vt) {
  return vt == PS__NO_VT ? 0 : s->vt[vt].bytes;
}

/* What the unit has between two steps. */
static void count_unit(const ps_plan *p, uint32_t unit, ps_plan_report *o) {
  const ps__unit_host *h = &p->step.unit_host[unit];
  const bool trained = !p->model->unit[unit].frozen;
  o->weight_bytes += vt_bytes(&p->step, h->weights) + vt_bytes(&p->step, h->master);
  o->grad_bytes += vt_bytes(&p->step, h->grad);
  for (uint32_t k = 0; k < PS_MAX_STATES; k++)
    o->state_bytes += vt_bytes(&p->step, h->state[k]);
  o->passing_grad_units += trained && ps__grad_passes(&p->spec, unit);
}

static void fill_report(ps_plan *p, const ps__search_result *r) {
  const ps__step *s = &p->step;
  const ps__layout *l = &p->layout;
  ps_plan_report *o = &p->report;
  o->struct_bytes = sizeof *o;
  o->n_devices = s->at->n_devices;
  o->n_hosts = p->cfg.n_hosts;
  o->layout = p->cfg.layout;
  o->exchange_bytes = exchanged_bytes(s);
  o->n_rounds = l->n_rounds;
  o->chunks_per_round = l->chunks_per_round;
  o->first_round_chunks = l->first_round_chunks;
  o->first_rounds = l->first_rounds;
  o->n_chunks = l->n_chunks;
  o->chunk_tokens = l->chunk_tokens;
  o->tokens_per_step = o->n_hosts * l->n_tokens;
  o->n_sequences = o->n_hosts * l->n_sequences;
  o->head_slice_tokens = p->spec.head_slice;
  uint64_t arena[PS_MAX_PLACES] = {0};
  for (uint32_t i = 0; i < s->at->n_places; i++)
    arena[i] = ps__plan_reserved(p, i);
  o->device_arena_bytes = ps__largest_device(s->at, arena);
  const uint64_t overhead = ps__device_overhead(&p->hw, p->model->fp8.on, s->at, s->scratch_bytes,
                                                &o->device_scratch_bytes) +
                            ps__net_memory(p);
  o->host_arena_bytes = arena[s->at->host];
  const uint64_t pinned = ps__pinned_bytes(o->host_arena_bytes, s->pageable_bytes);
  o->device_tables_bytes = ps__page_table_bytes(&p->hw, pinned);
  o->device_overhead_bytes = overhead - o->device_scratch_bytes;
  o->device_used_bytes = o->device_arena_bytes + overhead + o->device_tables_bytes;
  o->host_used_bytes =
      o->host_arena_bytes + ps__host_overhead(p, s, &p->guests, &o->scratch_bytes, &o->trace_bytes);
  o->reserve_bytes = p->cfg.reserve_bytes;
  o->device_mem_bytes = p->cfg.device_mem_bytes;
  o->host_mem_bytes = p->cfg.host_mem_bytes;
  if (p->cfg.pinned_mem_bytes) {
    o->pinned_mem_bytes = p->cfg.pinned_mem_bytes;
    o->pinned_bytes = pinned;
    o->pageable_bytes = o->host_arena_bytes - pinned;
    o->staged_bytes = s->staged_bytes;
    o->all_pinned_step_s = r->all_pinned_ns * 1e-9;
  }
  o->n_units = p->spec.n_units;
  for (uint32_t u = 0; u < p->spec.n_units; u++) {
    o->resident_param_units += p->spec.param_resident[u];
    o->resident_grad_units += p->spec.grad_resident[u];
    o->resident_update_units += p->spec.update_resident[u];
    o->streamed_update_units += p->spec.update_streamed[u];
    o->held_state_units += p->spec.state_held[u];
    o->split_update_units += p->spec.update_split[u];
    o->staged_weight_units += p->spec.stage_weights[u];
    o->staged_total_units += s->unit_host[u].grad != PS__NO_VT && ps__stages_total(&p->spec, u) &&
                             !(u == 0 && p->spec.embed_on_host);
    count_unit(p, u, o);
    o->disk_units += p->spec.state_on_disk[u];
    const uint32_t layer = p->model->unit[u].layer;
    o->units_kept += p->layout.n_rounds > 1 && layer > 0 && layer <= p->spec.blocks_kept &&
                     !p->spec.param_resident[u];
  }
  for (uint32_t block = 1; block <= p->spec.n_layers; block++)
    o->input_again_blocks += ps__input_again(&p->spec, block);
  o->saved_device_bytes = s->saved_bytes[PS_POLICY_DEVICE];
  o->saved_host_bytes = s->saved_bytes[PS_POLICY_HOST] + s->saved_bytes[PS_POLICY_HOST_FIRST_ROUND];
  o->saved_recompute_bytes = s->saved_bytes[PS_POLICY_RECOMPUTE];
  o->h2d_bytes = s->copied_bytes[0];
  o->d2h_bytes = s->copied_bytes[1];
  o->disk_mem_bytes = p->cfg.disk_mem_bytes;
  o->disk_read_bytes = s->copied_bytes[PS__FROM_DISK];
  o->disk_write_bytes = s->copied_bytes[PS__TO_DISK];
  o->disk_arena_bytes = s->at->disk == PS__NO_PLACE ? 0 : arena[s->at->disk];
  o->model_flops = s->model_flops;
  o->recompute_flops = s->recompute_flops;
  p->hfu_flops = o->model_flops + o->recompute_flops;
  o->n_ops = ps_schedule_n_ops(p->schedule);
  o->n_waits = ps_schedule_n_waits(p->schedule);
  o->n_candidates = r->n_candidates;
  o->n_feasible = r->n_feasible;
  const ps__val *v = p->guests.val;
  if (!v)
    return;
  o->val_tokens = v->n_sequences * p->cfg.seq_len;
  o->val_step_tokens = v->guest.layout.n_tokens;
  o->val_s = (double)v->n_steps * v->guest.step_s;
}

static ps_status predict_slow_host(ps_plan *p) {
  ps_hardware slow = p->hw;
  double ns;
  ps__hardware_slow_host(&slow, PS__SLOW_HOST);
  ps__cost_model m =
      ps__cost_model_of(&slow, p->model->fp8.on, p->step.at, p->hw.n_threads, p->spec.sum_threads);
  PS_TRY(ps__step_predict(&p->step, p->schedule, &m, NULL, &ns));
  p->report.slow_host_step_s = ns * 1e-9;
  return PS_OK;
}

/* The predicted step time, and how long each stream works in a steady step. */
ps_status ps__plan_predict(ps_plan *p) {
  const uint64_t n = ps_schedule_n_ops(p->schedule);
  double step_ns, busiest = 0;
  ps_trace_event *events = ps__malloc((PS__SIM_STEADY + 1) * n * sizeof *events);
  if (!events)
    return ps__fail(PS_ENOMEM, "out of memory for the predicted trace");
  ps__cost_model m =
      ps__cost_model_of(&p->hw, p->model->fp8.on, p->step.at, p->hw.n_threads, p->spec.sum_threads);
  const ps_status st = ps__step_predict(&p->step, p->schedule, &m, events, &step_ns);
  if (st == PS_OK) {
    p->report.step_s = step_ns * 1e-9;
    for (uint64_t i = PS__SIM_STEADY * n; i < (PS__SIM_STEADY + 1) * n; i++)
      p->report.stream_busy_s[events[i].stream] +=
          (double)(events[i].end_ns - events[i].start_ns) * 1e-9;
    for (uint32_t i = 0; i < p->step.at->n_streams; i++)
      if (p->report.stream_busy_s[i] > busiest) {
        busiest = p->report.stream_busy_s[i];
        p->report.bottleneck_stream = i;
      }
  }
  ps__free(events);
  return st == PS_OK ? predict_slow_host(p) : st;
}

ps_status ps__plan_compile(ps_plan *p, const ps__search_result *r) {
  PS_TRY(ps__step_build(&p->step, p->model, &p->layout, &p->spec, &p->hooks));
  ps_program *program = NULL;
  ps_status st = ps__step_program(&p->step, &program);
  if (st == PS_OK)
    st = ps_schedule_compile(&p->schedule, program);
  ps_program_destroy(program);
  if (st == PS_OK)
    p->schedule->of_plan = true;
  const ps__over over = {p, &p->layout, &p->spec, &p->step, true};
  if (st == PS_OK)
    st = ps__plan_guests(&over, &p->guests);
  if (st == PS_OK && p->cfg.sample_sequences)
    st = ps__plan_sampling(p);
  PS_TRY(st);
  fill_report(p, r);
  PS_TRY(ps__plan_sampling_check(p));
  return ps__plan_predict(p);
}

ps_status ps__plan_undo(ps_plan *p) {
  PS_TRY(ps_schedule_destroy(p->schedule));
  p->schedule = NULL;
  ps__guests_free(&p->guests);
  ps__plan_sampling_free(p);
  ps__step_free(&p->step);
  ps__spec_free(&p->spec);
  ps__layout_free(&p->layout);
  p->report = (ps_plan_report){0};
  return PS_OK;
}

/* Where no plan fits: the fastest of those that hold state on the device. Where none does either,
 * @r stays as it was. */
static ps_status find_holding(ps_plan *p, const ps__memos *m, ps__search_result *r) {
  ps__search_result found = {0};
  if (!ps__may_hold(p))
    return PS_OK;
  p->holds = true;
  const ps_status st = ps__find_with_disk(p, m, &found);
  if (st == PS_OK && found.step_ns > 0)
    *r = found;
  else
    p->holds = false;
  return st;
}

/* Searches where ramp and validation count. @alone: training alone would fit. */
static ps_status plan_with_guests(ps_plan *p, bool alone) {
  ps__search_result r = {0};
  ps__memos m;
  PS_TRY(ps__memos_create(&m)); /* what the other searches know is without guests */
  p->counts_guests = true;
  ps_status st = alone ? ps__find_with_disk(p, &m, &r) : PS_OK;
  if (st == PS_OK && r.step_ns == 0)
    st = ps__find_smallest_in_layouts(p, &m, &r);
  if (st == PS_OK && r.step_ns == 0)
    st = find_holding(p, &m, &r);
  if (st == PS_OK && r.step_ns > 0) {
    st = ps__plan_compile(p, &r);
    if (st == PS_OK)
      st = ps__plan_beside_check(p);
  } else if (st == PS_OK) {
    st = alone ? ps__plan_refuse_guests(p, &r) : ps__plan_refuse(p, &m, &r);
  }
  ps__memos_destroy(&m);
  return st;
}

/* The fastest plan that fits; with ramp or validation the same, where it holds them. */
static ps_status make_plan(ps_plan *p, const ps__memos *m) {
  ps__search_result r;
  const uint32_t given = p->cfg.layout;
  PS_TRY(ps__find_with_disk(p, m, &r));
  const bool alone = r.step_ns > 0;
  if (alone) {
    PS_TRY(ps__plan_compile(p, &r));
    if (ps__plan_beside_check(p) == PS_OK)
      return PS_OK;
    PS_TRY(ps__plan_undo(p));
  }
  p->cfg.layout = given;
  if (ps__plan_has_guests(p))
    return plan_with_guests(p, alone);
  PS_TRY(ps__find_smallest_in_layouts(p, m, &r));
  if (r.step_ns == 0)
    PS_TRY(find_holding(p, m, &r));
  return r.step_ns > 0 ? ps__plan_compile(p, &r) : ps__plan_refuse(p, m, &r);
}

/* ---- evaluations that plans share ------------------------------------------------------------ */

struct ps_evaluations {
  ps__memos memo;
  bool used; /* the rest is set */
  ps_model_config model;
  ps_plan_config cfg; /* but for the caps */
  ps_hardware hw;
};

ps_status ps_evaluations_create(ps_evaluations **out) {
  if (!out)
    return ps__fail(PS_EINVAL, "ps_evaluations_create: out is NULL");
  ps_evaluations *e = ps__calloc(1, sizeof *e);
  if (!e)
    return ps__fail(PS_ENOMEM, "out of memory for shared evaluations");
  const ps_status st = ps__memos_create(&e->memo);
  if (st == PS_OK)
    *out = e;
  else
    ps__free(e);
  return st;
}

void ps_evaluations_destroy(ps_evaluations *e) {
  if (!e)
    return;
  ps__memos_destroy(&e->memo);
  ps__free(e);
}

/* PS_EINVAL where @p is of another model, batch or machine than the plans before. */
static ps_status share(ps_evaluations *e, const ps_plan *p) {
  ps_plan_config cfg = p->cfg;
  cfg.device_mem_bytes = cfg.host_mem_bytes = 0;
  cfg.progress = NULL;
  cfg.progress_user = NULL;
  if (!e->used) {
    e->model = p->model->cfg;
    e->cfg = cfg;
    e->hw = p->hw;
    e->used = true;
  }
  if (memcmp(&e->model, &p->model->cfg, sizeof e->model) || memcmp(&e->cfg, &cfg, sizeof cfg) ||
      memcmp(&e->hw, &p->hw, sizeof e->hw))
    return ps__fail(PS_EINVAL,
                    "plan: the shared evaluations are of another model, configuration or machine: "
                    "only the caps may differ");
  return PS_OK;
}

/* The rest of making a plan, which is destroyed on an error. */
static ps_status finish_plan(ps_plan **out, ps_plan *p, ps_evaluations *shared) {
  ps_status st = share(shared, p);
  if (st == PS_OK)
    st = make_plan(p, &shared->memo);
  p->cfg.ramp = NULL; /* the caller's */
  if (st != PS_OK)
    ps_plan_destroy(p);
  else
    *out = p;
  return st;
}

ps_status ps_plan_create_sharing(ps_plan **out, ps_evaluations *shared,
                                 const ps_model_config *model, const ps_plan_config *cfg,
                                 const ps_hardware *hw) {
  ps_plan *p = NULL;
  if (!out || !shared)
    return ps__fail(PS_EINVAL, "ps_plan_create: out and the shared evaluations must be given");
  PS_TRY(ps__plan_new(&p, model, cfg, hw));
  p->one_of_many = true;
  return finish_plan(out, p, shared);
}

ps_status ps__plan_of_model(ps_plan **out, ps_model *m, const ps_plan_config *cfg,
                            const ps_hardware *hw) {
  ps_evaluations *own = NULL;
  ps_plan *p = NULL;
  ps_status st = ps__plan_new_of(&p, m, cfg, hw);
  if (st == PS_OK)
    st = ps_evaluations_create(&own);
  if (st == PS_OK)
    st = finish_plan(out, p, own);
  else
    (void)ps_plan_destroy(p);
  ps_evaluations_destroy(own);
  return st;
}

ps_status ps_plan_create(ps_plan **out, const ps_model_config *model, const ps_plan_config *cfg,
                         const ps_hardware *hw) {
  ps_evaluations *own = NULL;
  ps_plan *p = NULL;
  if (!out)
    return ps__fail(PS_EINVAL, "ps_plan_create: out must be given");
  PS_TRY(ps_evaluations_create(&own));
  ps_status st = ps__plan_new(&p, model, cfg, hw);
  if (st == PS_OK)
    st = finish_plan(out, p, own);
  ps_evaluations_destroy(own);
  return st;
}

ps_status ps__plan_from_spec(ps_plan **out, const ps_model_config *model, const ps_plan_config *cfg,
                             const ps_hardware *hw, const ps__spec *spec) {
  ps_plan *p = NULL;
  const ps__search_result r = {0};
  PS_TRY(ps__plan_new(&p, model, cfg, hw));
  ps_status st = ps__layout_init(
      &p->layout, p->cfg.seq_len, p->cfg.tokens_per_step / p->cfg.seq_len, spec->chunk_tokens,
      spec->chunks_per_round, spec->first_round_chunks, spec->first_rounds);
  p->cfg.n_devices = spec->n_devices;
  p->cfg.layout = spec->ring_blocks ? PS_LAYOUT_RING : PS_LAYOUT_DATA_PARALLEL;
  p->at = ps__places_with(spec->n_devices, p->cfg.n_hosts, spec->disk);
  if (st == PS_OK)
    st = ps__spec_copy(&p->spec, spec);
  p->spec.model = p->model; /* that of @spec ends with its plan */
  if (st == PS_OK)
    st = ps__plan_compile(p, &r);
  p->cfg.ramp = NULL; /* the caller's */
  if (st != PS_OK)
    ps_plan_destroy(p);
  else
    *out = p;
  return st;
}

ps_status ps_plan_get_report(const ps_plan *plan, ps_plan_report *out) {
  if (!plan || !out)
    return ps__fail(PS_EINVAL, "ps_plan_get_report: plan and out must be given");
  *out = plan->report;
  return PS_OK;
}

ps_status ps_plan_smallest(const ps_model_config *model, const ps_plan_config *cfg,
                           const ps_hardware *hw, uint64_t *device_mem_bytes,
                           uint64_t *host_mem_bytes) {
  if (!device_mem_bytes || !host_mem_bytes)
    return ps__fail(PS_EINVAL,
                    "ps_plan_smallest: device_mem_bytes and host_mem_bytes must be given");
  if (cfg && cfg->sample_sequences)
    return ps__fail(PS_EINVAL, "the smallest caps are those of training alone: leave samples out");
  ps_plan *p = NULL;
  ps__search_result r;
  ps__memos m = {0};
  PS_TRY(ps__plan_new(&p, model, cfg, hw));
  p->counts_guests = ps__plan_has_guests(p);
  ps__disk_level_set(p, PS__DISK_LEVELS); /* without a disk nothing is on it */
  ps_status st = ps__memos_create(&m);
  if (st == PS_OK)
    st = ps__find_smallest_in_layouts(p, &m, &r);
  if (st == PS_OK && !r.smallest[PS__HOST_MEM] && p->hw.host_memory_bytes)
    st = ps__plan_least_host(p, &m, &r.smallest[PS__HOST_MEM]);
  ps__memos_destroy(&m);
  ps_plan_destroy(p);
  if (st != PS_OK)
    return st;
  *device_mem_bytes = r.smallest[PS__DEVICE_MEM];
  *host_mem_bytes = r.smallest[PS__HOST_MEM];
  return PS_OK;
}

const ps_model *ps_plan_model(const ps_plan *plan) { return plan ? plan->model : NULL; }

ps_schedule *ps_plan_schedule(ps_plan *plan) { return plan ? plan->schedule : NULL; }

ps_status ps_plan_simulate(const ps_plan *plan, uint64_t n_steps, ps_trace_event *events,
                           double *step_end_ns) {
  if (!plan)
    return ps__fail(PS_EINVAL, "ps_plan_simulate: plan is NULL");
  ps__cost_model m = ps__cost_model_of(&plan->hw, plan->model->fp8.on, plan->step.at,
                                       plan->hw.n_threads, plan->spec.sum_threads);
  return ps_sim_run(plan->schedule, ps__cost, &m, n_steps, events, step_end_ns);
}
