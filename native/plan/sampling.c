/* sampling.c - text that is sampled beside a training: programs of generation in the memory of the
 * plan's step, which run while no step of training is in flight.
 *
 * As with a validation, nothing of the plan follows from it. Weights are read where they are
 * between two steps: on the device those that stay there, all others on the host. */
#include "generate/generate.h"
#include "plan/plan_impl.h"

static ps__gen_at at_of(const ps__step *s, uint32_t vt) {
  return (ps__gen_at){s->vt[vt].space, s->vt[vt].offset};
}

static ps_status find_weights(const ps_plan *p, ps__gen_beside *b) {
  const uint32_t n = p->model->n_units;
  *b = (ps__gen_beside){.at = p->at, .n_units = n, .pageable = p->cfg.pinned_mem_bytes > 0};
  b->weights = ps__calloc(n, sizeof *b->weights);
  if (!b->weights)
    return ps__fail(PS_ENOMEM, "out of memory for the places of weights");
  for (uint32_t u = 0; u < n; u++) {
    const ps__unit_host *h = &p->step.unit_host[u];
    /* with several devices only frozen weights stay, and the host has these too */
    const bool there = ps__weights_stay(&p->spec, u) && h->device_weights[0] != PS__NO_VT;
    b->weights[u] = at_of(&p->step, there ? h->device_weights[0] : h->weights);
  }
  for (uint32_t i = 0; i < p->at->n_places; i++) {
    b->used[i] = ps__step_persistent_bytes(&p->step, i);
    b->arena[i] = p->room.given ? p->room.bytes[i] : p->step.space_bytes[i];
  }
  return PS_OK;
}

static ps_status check(const ps_plan_config *c) {
  if (c->forward_only)
    return ps__fail(PS_EINVAL,
                    "sample_sequences is %llu: a plan that trains nothing samples "
                    "nothing",
                    (unsigned long long)c->sample_sequences);
  return c->sample_context
             ? PS_OK
             : ps__fail(PS_EINVAL,
                        "sample_context is 0 with %llu sample_sequences: give the tokens of the "
                        "longest prompt and its text together",
                        (unsigned long long)c->sample_sequences);
}

ps_status ps__plan_sampling(ps_plan *p) {
  const ps_plan_config *c = &p->cfg;
  const ps_generate_config cfg = {.struct_bytes = sizeof cfg,
                                  .dtype = ps__recipes[c->recipe].weights.dtype,
                                  .n_sequences = c->sample_sequences,
                                  .context = c->sample_context,
                                  .deterministic = c->deterministic,
                                  .lora = p->model->lora};
  ps__gen_beside beside;
  PS_TRY(check(c));
  p->sampling = ps__calloc(1, sizeof *p->sampling);
  if (!p->sampling)
    return ps__fail(PS_ENOMEM, "out of memory for a plan");
  PS_TRY(find_weights(p, &beside));
  ps__gen_plan *g = &p->sampling->plan;
  PS_TRY(ps__gen_plan_beside(g, &p->model->cfg, &cfg, &p->hw, &beside));
  PS_TRY(ps__gen_compile(p->sampling));
  ps__step by = {.at = p->at};
  by.space_bytes[p->at->dev[0].place] = g->map.device.bytes;
  by.space_bytes[p->at->host] = g->map.host.bytes;
  for (uint32_t i = 0; i < p->at->n_streams; i++)
    by.scratch_bytes[i] = g->scratch_bytes[i];
  ps__step_widen(&p->step, &by);
  return PS_OK;
}

uint64_t ps__plan_sampling_ops(const ps_plan *p) {
  uint64_t n = 0;
  for (uint32_t i = 0; p->sampling && i < PS__GEN_PROGRAMS; i++)
    n += p->sampling->schedule[i] ? ps_schedule_n_ops(p->sampling->schedule[i]) : 0;
  return n;
}

void ps__plan_sampling_free(ps_plan *p) {
  if (p->sampling)
    ps__gen_setup_free(p->sampling);
  ps__free(p->sampling);
  p->sampling = NULL;
}

static ps_status refuse_device(const ps_plan *p, uint64_t cap) {
  const ps__gen_plan *g = &p->sampling->plan;
  const ps_generate_report *r = &g->report;
  char need[32], given[32], stays[32], head[32], blocks[32], cache[32], act[32];
  const uint64_t n = g->n_moved - g->n_kept ? (uint64_t)PS__GEN_SLOTS : g->n_kept;
  ps__format_bytes_apart(need, p->report.device_used_bytes, given, cap);
  return ps__fail(
      PS_EBUDGET,
      "with samples %s of device memory are needed, %s given: beside %s that training keeps there, "
      "%s for the head, %s for %llu blocks, %s for the KV cache of %llu x %llu tokens and %s for "
      "%u "
      "rows: raise %s, lower %s, or give fewer or shorter prompts",
      need, given, ps__format_bytes(stays, g->beside.used[p->at->dev[0].place]),
      ps__format_bytes(head, r->head_bytes),
      ps__format_bytes(blocks, n * r->block_bytes + r->dense_bytes), (unsigned long long)n,
      ps__format_bytes(cache, r->cache_bytes), (unsigned long long)g->cfg.n_sequences,
      (unsigned long long)g->cfg.context, ps__format_bytes(act, r->activation_bytes),
      g->rows[0] > g->rows[1] ? g->rows[0] : g->rows[1], ps__field("device_mem_bytes"),
      ps__field("sample_context"));
}

ps_status ps__plan_sampling_check(const ps_plan *p) {
  const ps_plan_report *r = &p->report;
  const ps__caps caps = ps__plan_caps(p);
  const uint64_t device = caps.holds[PS__DEVICE_MEM], host = caps.holds[PS__HOST_MEM];
  char need[32], cap[32], tables[32], drawn[32];
  if (!p->sampling)
    return PS_OK;
  if (device && r->device_used_bytes > device)
    return refuse_device(p, device);
  PS_TRY(ps__pinned_check(p, "with samples "));
  if (!host || r->host_used_bytes <= host)
    return PS_OK;
  const ps__gen_map *m = &p->sampling->plan.map;
  ps__format_bytes_apart(need, r->host_used_bytes, cap, host);
  return ps__fail(
      PS_EBUDGET,
      "with samples %s of host memory are needed, %s given: %s for programs, %s for "
      "drawing %llu texts at once: raise %s, or give fewer prompts",
      need, cap, ps__format_bytes(tables, 512 * ps__plan_sampling_ops(p)),
      ps__format_bytes(drawn, m->host.bytes - p->sampling->plan.beside.used[p->at->host]),
      (unsigned long long)p->cfg.sample_sequences, ps__field("host_mem_bytes"));
}
