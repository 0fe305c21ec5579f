/* plan_text.c - a plan for a person, and as JSON for scripts. */
#include "generate/generate.h"
#include "plan/plan_impl.h"
#include <stdarg.h>
#include <string.h>

typedef struct text {
  char *p;
  size_t n, cap;
  bool failed;
} text;

__attribute__((format(printf, 2, 3))) static void say(text *t, const char *fmt, ...) {
  char line[512];
  va_list ap;
  va_start(ap, fmt);
  const int n = vsnprintf(line, sizeof line, fmt, ap);
  va_end(ap);
  if (t->failed || n < 0)
    return;
  if (t->n + (size_t)n + 1 > t->cap) {
    const size_t cap = (t->cap + (size_t)n + 1) * 2;
    char *p = ps__realloc(t->p, cap);
    if (!p) {
      t->failed = true;
      return;
    }
    t->p = p;
    t->cap = cap;
  }
  memcpy(t->p + t->n, line, (size_t)n + 1);
  t->n += (size_t)n;
}

static void say_memory(text *t, const ps_plan_report *r) {
  char a[32], b[32], c[32], d[32], e[32];
  if (r->device_mem_bytes)
    say(t, "device memory    %s of %s", ps__format_bytes(a, r->device_used_bytes),
        ps__format_bytes(b, r->device_mem_bytes));
  else
    say(t, "device memory    %s (no cap)", ps__format_bytes(a, r->device_used_bytes));
  if (r->device_overhead_bytes)
    say(t,
        ": arena %s, scratch %s,\n                 context and libraries %s, page tables of host "
        "memory %s",
        ps__format_bytes(a, r->device_arena_bytes), ps__format_bytes(b, r->device_scratch_bytes),
        ps__format_bytes(c, r->device_overhead_bytes), ps__format_bytes(d, r->device_tables_bytes));
  say(t, "\n");
  ps__format_bytes(a, r->host_used_bytes);
  ps__format_bytes(c, r->host_arena_bytes);
  ps__format_bytes(d, r->scratch_bytes + r->trace_bytes);
  ps__format_bytes(e, r->reserve_bytes);
  if (r->host_mem_bytes)
    say(t, "host memory      %s of %s: arena %s, scratch and trace %s, process %s\n", a,
        ps__format_bytes(b, r->host_mem_bytes), c, d, e);
  else
    say(t, "host memory      %s (no cap): arena %s, scratch and trace %s, process %s\n", a, c, d,
        e);
}

/* What is pinned, what is not, and what that costs. */
static void say_pinned(text *t, const ps_plan_report *r) {
  char a[32], b[32], c[32];
  if (!r->pinned_mem_bytes)
    return;
  say(t, "pinned memory    %s of %s; %s of the arena are not pinned",
      ps__format_bytes(a, r->pinned_bytes), ps__format_bytes(b, r->pinned_mem_bytes),
      ps__format_bytes(c, r->pageable_bytes));
  if (r->staged_bytes)
    say(t,
        ":\n                 totals of %llu units and weights of %llu are staged, %s more to copy "
        "a "
        "step",
        (unsigned long long)r->staged_total_units, (unsigned long long)r->staged_weight_units,
        ps__format_bytes(a, r->staged_bytes));
  if (r->all_pinned_step_s > 0 && r->step_s > 0)
    say(t, "\n                 if all could be pinned: %.0f tokens/s, %.1f%% more",
        (double)r->tokens_per_step / r->all_pinned_step_s,
        r->all_pinned_step_s < r->step_s ? 100 * (r->step_s / r->all_pinned_step_s - 1) : 0.0);
  say(t, "\n");
}

/* Where all rates are estimates, the predicted time says so. */
static void say_estimates(text *t, const ps_plan *p) {
  const ps_model_config *c = &p->model->cfg;
  const bool wide = c->head_dim > 256 || c->global_head_dim > 256;
  if (wide && p->hw.backend == PS_BACKEND_CUDA && p->hw.measured &&
      !(p->hw.heads512_attention_flops_per_s > 0))
    say(t, "attention        the rate of heads above 256 is an estimate: penstock profile measures "
           "it\n");
  if (c->linear_key_heads && p->hw.measured && !p->hw.delta[0].heads)
    say(t,
        "delta-nets       the rate of their delta rule is an estimate: penstock profile measures "
        "it\n");
}

static void say_experts(text *t, const ps_model *m) {
  say(t,
      "experts          %u in each of %u blocks, %u a token; auxiliary loss %g, router z-loss %g\n",
      m->cfg.n_experts, ps__n_sparse(&m->cfg), m->cfg.n_experts_used, (double)m->loss.router_aux,
      (double)m->loss.router_z);
}

static void say_validation(text *t, const ps_plan *p) {
  const ps_plan_report *r = &p->report;
  if (p->guests.val)
    say(t,
        "validation       %llu tokens in %llu step%s of %u round%s, in the same memory; predicted "
        "%.3f s\n",
        (unsigned long long)r->val_tokens, (unsigned long long)p->guests.val->n_steps,
        p->guests.val->n_steps == 1 ? "" : "s", p->guests.val->guest.layout.n_rounds,
        p->guests.val->guest.layout.n_rounds == 1 ? "" : "s", r->val_s);
}

static void say_sampling(text *t, const ps_plan *p) {
  if (!p->sampling)
    return;
  const ps_generate_report *g = &p->sampling->plan.report;
  char cache[32], streamed[32];
  say(t,
      "samples          %llu x %llu tokens, in the same memory: KV cache %s; a token streams %s\n",
      (unsigned long long)p->cfg.sample_sequences, (unsigned long long)p->cfg.sample_context,
      ps__format_bytes(cache, g->cache_bytes), ps__format_bytes(streamed, g->streamed_bytes));
}

static void say_documents(text *t, const ps_plan *p) {
  char lack[PS__DOCUMENTS_TEXT];
  const char *why = ps__documents_lack(lack, p, NULL);
  if (why)
    say(t, "                 %s\n", why);
}

static const char *where(uint64_t some, uint64_t all) {
  return some == all ? "resident" : some ? "partly resident" : "streamed";
}

static void say_hosts(text *t, const ps_plan *p) {
  char net[32];
  const ps_plan_report *r = &p->report;
  say(t, "hosts            %u, each with %llu of the step's %llu tokens; ", r->n_hosts,
      (unsigned long long)(r->tokens_per_step / r->n_hosts),
      (unsigned long long)r->tokens_per_step);
  if (p->hw.link[PS_LINK_NETWORK].bytes_per_s > 0)
    say(t, "%.3f GB a step each way at %.3g GB/s: %.3f s\n", r->exchange_bytes * 1e-9,
        p->hw.link[PS_LINK_NETWORK].bytes_per_s * 1e-9,
        r->exchange_bytes / p->hw.link[PS_LINK_NETWORK].bytes_per_s);
  else
    say(t,
        "%.3f GB a step each way, for which no time is taken\n"
        "                 the rate is not known: train measures it; for other plans state "
        "network_bytes_per_s in the file of %s\n",
        r->exchange_bytes * 1e-9, ps__field("hardware"));
  if (p->hw.backend == PS_BACKEND_CUDA && p->cfg.transport == PS_TRANSPORT_TCP)
    say(t, "                 gradients go over TCP; no device memory is counted for NCCL\n");
  else if (p->hw.backend == PS_BACKEND_CUDA)
    say(t, "                 gradients go over NCCL%s, for which %s of device memory are counted\n",
        p->cfg.transport == PS_TRANSPORT_AUTO ? " where all tasks have it" : "",
        ps__format_bytes(net, ps__net_memory(p)));
}

/* Stage @i of the batch ramp. Its steps may have fewer rounds, or chunks in a ring, than GPUs. */
static void say_stage(text *t, const ps_plan *p, uint32_t i) {
  const ps__layout *l = &p->guests.ramp[i].guest.layout;
  const uint32_t parts = p->report.layout == PS_LAYOUT_RING ? l->n_chunks : l->n_rounds;
  say(t, "batch ramp       %llu steps of %llu tokens: %u round%s; predicted %.3f s a step",
      (unsigned long long)p->guests.ramp[i].n_steps,
      (unsigned long long)(p->report.n_hosts * l->n_tokens), l->n_rounds,
      l->n_rounds == 1 ? "" : "s", p->guests.ramp[i].guest.step_s);
  if (parts < p->report.n_devices)
    say(t, ", with %u of %u GPUs idle", p->report.n_devices - parts, p->report.n_devices);
  say(t, "\n");
}

/* A frozen base that stays quantized. */
static void say_base(text *t, const ps_model *m) {
  const ps__storage as = ps__base_storage(m->lora.base, m->dt);
  uint64_t n = 0;
  char bytes[32];
  for (uint32_t u = 0; u < m->n_units; u++)
    n += m->unit[u].base ? m->unit[u].n : 0;
  if (m->lora.base)
    say(t, "frozen base      %s: %.4g bits a weight of %.3g billion in the blocks' matrices, %s\n",
        ps_base_name((ps_base)m->lora.base), 8 * ps__stored_each(as), 1e-9 * (double)n,
        ps__format_bytes(bytes, ps__stored_bytes(as, n)));
}

/* Of what all units have between two steps. */
static void say_parameter(text *t, const ps_plan *p) {
  const ps_plan_report *r = &p->report;
  const double n = (double)p->model->n_elements, weights = (double)r->weight_bytes / n,
               grads = (double)r->grad_bytes / n, state = (double)r->state_bytes / n;
  say(t, "a parameter      takes %.3g bytes: weights %.3g, gradients %.3g, optimizer state %.3g\n",
      weights + grads + state, weights, grads, state);
  if (r->passing_grad_units)
    say(t,
        "                 gradients of %llu units have no memory of their own: each lives "
        "until its update\n",
        (unsigned long long)r->passing_grad_units);
  if (r->input_again_blocks)
    say(t,
        "                 inputs of %llu blocks are not saved: the block below makes each again\n",
        (unsigned long long)r->input_again_blocks);
}

/* Where state is on the disk, what that takes and how it wears the drives. */
static void say_disk(text *t, const ps_plan *p) {
  const ps_plan_report *r = &p->report;
  char a[32], b[32], c[32];
  if (!r->disk_mem_bytes)
    return;
  say(t, "disk             %s of %s: ", ps__format_bytes(a, r->disk_arena_bytes),
      ps__format_bytes(b, r->disk_mem_bytes));
  if (!r->disk_units) {
    say(t, "nothing is on it, as memory is enough\n");
    return;
  }
  say(t, "the optimizer state of %llu units; a step reads %s and writes %s%s\n",
      (unsigned long long)r->disk_units, ps__format_bytes(a, r->disk_read_bytes),
      ps__format_bytes(c, r->disk_write_bytes),
      p->hw.link[PS_LINK_DISK_READ].bytes_per_s > 0 ? "" : " (estimated rates)");
  const double a_year = r->step_s > 0 ? (double)r->disk_write_bytes / r->step_s * 365 * 86400 : 0;
  say(t, "                 %.0f TB are written a year of training", a_year * 1e-12);
  if (p->cfg.disk_tbw > 0 && a_year > 0)
    say(t, ": the %.0f TB that the drives are rated for last %.3g days", p->cfg.disk_tbw,
        p->cfg.disk_tbw * 1e12 / a_year * 365);
  say(t, "\n");
}

static void write_text(text *t, const ps_plan *p) {
  const ps_plan_report *r = &p->report;
  char a[32], b[32], c[32];
  if (p->hw.backend == PS_BACKEND_CUDA)
    say(t, "machine          %s; host: %s, %u threads\n", p->hw.device_name, p->hw.name,
        p->hw.n_threads);
  else
    say(t, "machine          %s, %u threads; no GPU is used\n", p->hw.name, p->hw.n_threads);
  say(t, "step             %llu tokens: %u round%s of %u chunk%s of %llu tokens",
      (unsigned long long)r->tokens_per_step, r->n_rounds, r->n_rounds == 1 ? "" : "s",
      r->chunks_per_round, r->chunks_per_round == 1 ? "" : "s",
      (unsigned long long)r->chunk_tokens);
  if (r->first_rounds > 1)
    say(t, ", the first %u of %u each", r->first_rounds, r->first_round_chunks);
  else if (r->first_round_chunks > r->chunks_per_round)
    say(t, ", the first of %u", r->first_round_chunks);
  say(t, "; head and loss in slices of %llu tokens\n", (unsigned long long)r->head_slice_tokens);
  say_documents(t, p);
  if (ps__is_ring(p))
    say(t, "devices          %u in a ring of layers; activations go from one to the next%s\n",
        r->n_devices, p->spec.ring_by_host ? " through host memory" : "");
  else if (r->n_devices > 1)
    say(t, "devices          %u, of which %u have rounds; %s", r->n_devices,
        r->n_rounds < r->n_devices ? r->n_rounds : r->n_devices,
        p->step.copied_bytes[PS__TO_PEERS]
            ? "each fetches and adds a piece of most units, and they copy the rest to each other"
            : "each fetches all from the host, which adds their gradients");
  if (r->n_devices > 1 && r->resident_grad_units)
    say(t, ";\n                 the totals of %llu units stay on the devices, a piece on each",
        (unsigned long long)r->resident_grad_units);
  if (r->n_devices > 1 && !ps__is_ring(p))
    say(t, "\n");
  if (r->n_hosts > 1)
    say_hosts(t, p);
  say_memory(t, r);
  say_pinned(t, r);
  say_disk(t, p);
  uint64_t n_trained = 0;
  for (uint32_t u = 0; u < p->spec.n_units; u++)
    n_trained += !p->model->unit[u].frozen;
  char kept[64] = "", state[64] = "on the host";
  if (r->disk_units)
    snprintf(state, sizeof state, "on the disk%s",
             r->disk_units < n_trained ? " of some units" : "");
  if (r->resident_update_units + r->held_state_units)
    snprintf(state, sizeof state, "on the device%s",
             r->resident_update_units + r->held_state_units < n_trained ? " of some units" : "");
  if (r->units_kept)
    snprintf(kept, sizeof kept, ", %llu more kept from a round to the next",
             (unsigned long long)r->units_kept);
  say(t, "parameters       %s (%llu of %llu units%s),%sgradients %s, optimizer state %s (%s)\n",
      where(r->resident_param_units, r->n_units), (unsigned long long)r->resident_param_units,
      (unsigned long long)r->n_units, kept, *kept ? "\n                 " : " ",
      where(r->resident_grad_units, r->n_units), state, ps_recipe_name((ps_recipe)p->cfg.recipe));
  if (p->model->cfg.n_experts)
    say_experts(t, p->model);
  say_estimates(t, p);
  if (p->model->fp8.on)
    say(t,
        "FP8              products of %u of %u blocks%s%s%s%s; the first %u and the last %u in "
        "bf16\n",
        p->model->cfg.n_layers - p->cfg.fp8_bf16_first - p->cfg.fp8_bf16_last,
        p->model->cfg.n_layers, p->model->fp8.bf16_down ? " but for the down projections" : "",
        p->model->cfg.n_experts ? " but for routers and experts" : "",
        p->model->fp8.head ? " and of the head" : "",
        p->model->fp8.fast ? ", with fast accumulation" : "", p->cfg.fp8_bf16_first,
        p->cfg.fp8_bf16_last);
  if (p->cfg.n_frozen_layers)
    say(t, "frozen           the first %u of %u layers, %.3g of %.3g billion parameters\n",
        p->cfg.n_frozen_layers, p->model->n_layers,
        1e-9 * (double)(p->model->n_elements - p->model->n_trained),
        1e-9 * (double)p->model->n_elements);
  if (p->model->lora.rank) {
    char names[PS_LORA_NAMES_BYTES];
    (void)ps_lora_targets_text(names, sizeof names, p->model->lora.targets);
    say(t, "adapters         LoRA of rank %u, alpha %g, %.3g million parameters: %s\n",
        p->model->lora.rank, p->model->lora.alpha, 1e-6 * (double)p->model->n_trained, names);
    say_base(t, p->model);
  }
  const bool assumed =
      p->cfg.state_bits && p->hw.measured && !(p->hw.optimizer_8_bits_bytes_per_s > 0);
  say(t, "optimizer        %s: %.3g bytes of state a parameter%s, %s%s\n",
      ps_optimizer_name(p->spec.optimizer), ps__state_each(p->spec.optimizer, p->spec.recipe),
      p->cfg.state_bits ? " (8 bits)" : "",
      ps__format_bytes(a, ps__state_bytes(p->spec.optimizer, p->spec.recipe, p->model->n_trained)),
      assumed ? "; how fast its updates are is assumed: penstock profile measures it" : "");
  say_parameter(t, p);
  if (p->spec.sum_threads && p->spec.sum_threads < p->hw.n_threads && p->layout.n_rounds > 1)
    say(t,
        "gradients        added on the host by %u of %u threads: copies get more of the host's "
        "memory\n",
        p->spec.sum_threads, p->hw.n_threads);
  if (r->streamed_update_units > r->held_state_units)
    say(t,
        "updates          %llu units on the device, their state coming from the host and going "
        "back\n",
        (unsigned long long)(r->streamed_update_units - r->held_state_units));
  if (r->held_state_units)
    say(t, "%s %llu units on the device, their state staying there\n",
        r->streamed_update_units > r->held_state_units ? "                " : "updates         ",
        (unsigned long long)r->held_state_units);
  if (r->split_update_units)
    say(t,
        "%s %llu unit%s on the host in two parts: the weights first, the state after all "
        "weights\n",
        r->streamed_update_units ? "                " : "updates         ",
        (unsigned long long)r->split_update_units, r->split_update_units == 1 ? "" : "s");
  if (p->spec.embed_on_host)
    say(t, "embedding        gathered on the host, its gradient added there\n");
  say(t, "activations      first round: %s on the device, %s offloaded, %s recomputed\n",
      ps__format_bytes(a, r->saved_device_bytes), ps__format_bytes(b, r->saved_host_bytes),
      ps__format_bytes(c, r->saved_recompute_bytes));
  say(t, "traffic          a step: %s to the device%s, %s to the host",
      ps__format_bytes(a, r->h2d_bytes), r->n_devices > 1 ? "s" : "",
      ps__format_bytes(b, r->d2h_bytes));
  if (r->n_devices > 1)
    say(t, ", %s between devices", ps__format_bytes(a, p->step.copied_bytes[PS__TO_PEERS]));
  say(t, "\n");
  for (uint32_t i = 0; i < p->guests.n_ramp; i++)
    say_stage(t, p, i);
  say_validation(t, p);
  say_sampling(t, p);
  say(t,
      "work             %.3g model FLOPs a step, %.1f%% of that again to recompute (attention "
      "always "
      "recomputes its scores)\n",
      r->model_flops, r->model_flops > 0 ? 100 * r->recompute_flops / r->model_flops : 0);
  say(t,
      "predicted        %.3f s a step, %.0f tokens/s; busiest stream: %s, %.0f%% of the step (%s "
      "rates)\n",
      r->step_s, r->step_s > 0 ? (double)r->tokens_per_step / r->step_s : 0,
      ps_plan_stream_name(p, r->bottleneck_stream),
      r->step_s > 0 ? 100 * r->stream_busy_s[r->bottleneck_stream] / r->step_s : 0,
      p->hw.measured ? "measured" : "estimated");
  say(t, "                 %.0f tokens/s where host memory has three quarters of its rates\n",
      r->slow_host_step_s > 0 ? (double)r->tokens_per_step / r->slow_host_step_s : 0);
  if (p->hw.other_work_percent)
    say(t,
        "                 other work took %u%% of the CPUs while the rates were measured: they are "
        "those beside that work\n",
        p->hw.other_work_percent);
  for (uint32_t i = 0; i < p->at->n_streams; i++)
    say(t, "  %-14s %8.3f s busy (%3.0f%%)\n", ps_plan_stream_name(p, i), r->stream_busy_s[i],
        r->step_s > 0 ? 100 * r->stream_busy_s[i] / r->step_s : 0);
  say(t,
      "%llu ops and %llu waits a step; %u candidates, of which %u were evaluated and fit the "
      "caps\n",
      (unsigned long long)r->n_ops, (unsigned long long)r->n_waits, r->n_candidates, r->n_feasible);
}

const char *ps_plan_text(ps_plan *plan) {
  if (!plan)
    return NULL;
  if (!plan->text) {
    text t = {0};
    write_text(&t, plan);
    if (t.failed) {
      ps__free(t.p);
      (void)ps__fail(PS_ENOMEM, "out of memory for the plan's text");
    } else
      plan->text = t.p;
  }
  return plan->text;
}

static const char *const layouts[PS_N_LAYOUTS] = {"auto", "data-parallel", "ring"};

const char *ps_layout_name(ps_plan_layout layout) {
  return (unsigned)layout < PS_N_LAYOUTS ? layouts[layout] : "unknown";
}

ps_status ps_layout_parse(ps_plan_layout *out, const char *name) {
  for (int i = 0; name && i < PS_N_LAYOUTS; i++)
    if (!strcmp(name, layouts[i])) {
      *out = (ps_plan_layout)i;
      return PS_OK;
    }
  return ps__fail(PS_EINVAL, "the layout \"%.40s\" is unknown: use auto, data-parallel or ring",
                  name ? name : "");
}

static void json_sizes(ps__jsonw *w, const ps_plan *p) {
  const ps_plan_report *r = &p->report;
  const struct {
    const char *name;
    uint64_t value;
  } field[] = {{"seq_len", p->cfg.seq_len},
               {"tokens_per_step", r->tokens_per_step},
               {"n_sequences", r->n_sequences},
               {"n_rounds", r->n_rounds},
               {"chunks_per_round", r->chunks_per_round},
               {"first_round_chunks", r->first_round_chunks},
               {"n_chunks", r->n_chunks},
               {"chunk_tokens", r->chunk_tokens},
               {"n_devices", r->n_devices},
               {"head_slice_tokens", r->head_slice_tokens},
               {"device_used_bytes", r->device_used_bytes},
               {"device_arena_bytes", r->device_arena_bytes},
               {"device_scratch_bytes", r->device_scratch_bytes},
               {"device_overhead_bytes", r->device_overhead_bytes},
               {"device_tables_bytes", r->device_tables_bytes},
               {"device_mem_bytes", r->device_mem_bytes},
               {"host_used_bytes", r->host_used_bytes},
               {"host_mem_bytes", r->host_mem_bytes},
               {"host_arena_bytes", r->host_arena_bytes},
               {"scratch_bytes", r->scratch_bytes},
               {"trace_bytes", r->trace_bytes},
               {"reserve_bytes", r->reserve_bytes},
               {"resident_param_units", r->resident_param_units},
               {"resident_grad_units", r->resident_grad_units},
               {"resident_update_units", r->resident_update_units},
               {"streamed_update_units", r->streamed_update_units},
               {"split_update_units", r->split_update_units},
               {"units_kept", r->units_kept},
               {"n_units", r->n_units},
               {"saved_device_bytes", r->saved_device_bytes},
               {"saved_host_bytes", r->saved_host_bytes},
               {"saved_recompute_bytes", r->saved_recompute_bytes},
               {"h2d_bytes", r->h2d_bytes},
               {"d2h_bytes", r->d2h_bytes},
               {"sum_threads", p->spec.sum_threads},
               {"n_ops", r->n_ops},
               {"n_waits", r->n_waits},
               {"n_candidates", r->n_candidates},
               {"n_feasible", r->n_feasible}};
  for (size_t i = 0; i < sizeof field / sizeof *field; i++)
    ps__jsonw_uint(w, field[i].name, field[i].value);
  if (r->n_hosts > 1) {
    ps__jsonw_uint(w, "n_hosts", r->n_hosts);
    ps__jsonw_number(w, "exchange_bytes", r->exchange_bytes);
    ps__jsonw_number(w, "network_bytes_per_s", p->hw.link[PS_LINK_NETWORK].bytes_per_s);
  }
  if (r->first_rounds > 1)
    ps__jsonw_uint(w, "first_rounds", r->first_rounds);
  if (r->pinned_mem_bytes) {
    ps__jsonw_uint(w, "pinned_mem_bytes", r->pinned_mem_bytes);
    ps__jsonw_uint(w, "pinned_bytes", r->pinned_bytes);
    ps__jsonw_uint(w, "pageable_bytes", r->pageable_bytes);
    ps__jsonw_uint(w, "staged_total_units", r->staged_total_units);
    ps__jsonw_uint(w, "staged_weight_units", r->staged_weight_units);
    ps__jsonw_uint(w, "staged_bytes", r->staged_bytes);
    ps__jsonw_number(w, "all_pinned_tokens_per_s",
                     r->all_pinned_step_s > 0 ? (double)r->tokens_per_step / r->all_pinned_step_s
                                              : 0);
  }
  if (r->held_state_units)
    ps__jsonw_uint(w, "held_state_units", r->held_state_units);
  if (r->passing_grad_units)
    ps__jsonw_uint(w, "passing_grad_units", r->passing_grad_units);
  if (r->input_again_blocks)
    ps__jsonw_uint(w, "input_again_blocks", r->input_again_blocks);
  if (r->n_devices > 1)
    ps__jsonw_string(w, "layout", ps_layout_name((ps_plan_layout)p->cfg.layout));
  ps__jsonw_string(w, "recipe", ps_recipe_name((ps_recipe)p->cfg.recipe));
  if (p->model->fp8.on) {
    ps__jsonw_uint(w, "fp8_bf16_first", p->cfg.fp8_bf16_first);
    ps__jsonw_uint(w, "fp8_bf16_last", p->cfg.fp8_bf16_last);
    ps__jsonw_bool(w, "fp8_bf16_down", p->model->fp8.bf16_down);
    ps__jsonw_bool(w, "fp8_head", p->model->fp8.head);
    ps__jsonw_bool(w, "fp8_fast_accumulation", p->model->fp8.fast);
  }
  if (p->cfg.state_bits)
    ps__jsonw_uint(w, "state_bits", p->cfg.state_bits);
  ps__jsonw_string(w, "optimizer", ps_optimizer_name(p->spec.optimizer));
  ps__jsonw_bool(w, "clip", ps__waits_for_norm(p));
  if (ps__clips_by_previous(p))
    ps__jsonw_string(w, "clip_by", "previous");
  ps__jsonw_bool(w, "embed_on_host", p->spec.embed_on_host);
  ps__jsonw_number(w, "model_flops", r->model_flops);
  ps__jsonw_number(w, "recompute_flops", r->recompute_flops);
  ps__jsonw_number(w, "predicted_step_s", r->step_s);
  ps__jsonw_number(w, "predicted_tokens_per_s",
                   r->step_s > 0 ? (double)r->tokens_per_step / r->step_s : 0);
  ps__jsonw_number(w, "slow_host_tokens_per_s",
                   r->slow_host_step_s > 0 ? (double)r->tokens_per_step / r->slow_host_step_s : 0);
  if (p->guests.val) {
    ps__jsonw_uint(w, "val_tokens", r->val_tokens);
    ps__jsonw_uint(w, "val_step_tokens", r->val_step_tokens);
    ps__jsonw_uint(w, "val_chunks_per_round", p->guests.val->guest.layout.chunks_per_round);
    ps__jsonw_uint(w, "val_h2d_bytes", p->guests.val->guest.step.copied_bytes[0]);
    ps__jsonw_number(w, "predicted_val_s", r->val_s);
  }
  if (r->disk_mem_bytes) {
    ps__jsonw_uint(w, "disk_units", r->disk_units);
    ps__jsonw_uint(w, "disk_arena_bytes", r->disk_arena_bytes);
    ps__jsonw_uint(w, "disk_mem_bytes", r->disk_mem_bytes);
    ps__jsonw_uint(w, "disk_read_bytes", r->disk_read_bytes);
    ps__jsonw_uint(w, "disk_write_bytes", r->disk_write_bytes);
  }
  if (p->sampling) {
    const ps_generate_report *g = &p->sampling->plan.report;
    ps__jsonw_uint(w, "sample_sequences", p->cfg.sample_sequences);
    ps__jsonw_uint(w, "sample_context", p->cfg.sample_context);
    ps__jsonw_uint(w, "sample_cache_bytes", g->cache_bytes);
    ps__jsonw_uint(w, "sample_streamed_bytes", g->streamed_bytes);
    ps__jsonw_uint(w, "sample_expert_slots", g->n_slots);
  }
  if (p->guests.n_ramp) {
    ps__jsonw_array(w, "batch_ramp");
    for (uint32_t i = 0; i < p->guests.n_ramp; i++) {
      ps__jsonw_object(w, NULL);
      ps__jsonw_uint(w, "steps", p->guests.ramp[i].n_steps);
      ps__jsonw_uint(w, "tokens_per_step", r->n_hosts * p->guests.ramp[i].guest.layout.n_tokens);
      ps__jsonw_uint(w, "n_rounds", p->guests.ramp[i].guest.layout.n_rounds);
      ps__jsonw_number(w, "predicted_step_s", p->guests.ramp[i].guest.step_s);
      ps__jsonw_end(w);
    }
    ps__jsonw_end(w);
  }
  ps__jsonw_string(w, "bottleneck_stream", ps_plan_stream_name(p, r->bottleneck_stream));
  ps__jsonw_object(w, "stream_busy_s");
  for (uint32_t i = 0; i < p->at->n_streams; i++)
    ps__jsonw_number(w, ps_plan_stream_name(p, i), r->stream_busy_s[i]);
  ps__jsonw_end(w);
}

static void json_policies(ps__jsonw *w, const ps_plan *p) {
  static const char *const policy_name[PS_N_POLICIES] = {"device", "host", "recompute",
                                                         "host in the first round"};
  ps__jsonw_array(w, "layers");
  for (uint32_t layer = 0; layer < p->spec.n_layers; layer++) {
    const ps__layer_def *d = ps__layer_of(p->model, layer + 1);
    ps__jsonw_array(w, NULL);
    for (uint32_t c = 0; c < p->spec.n_chunks; c++) {
      ps__jsonw_object(w, NULL);
      for (uint32_t i = 0; i < d->n_saved; i++)
        ps__jsonw_string(w, d->saved[i].name, policy_name[*ps__spec_policy(&p->spec, layer, c, i)]);
      ps__jsonw_end(w);
    }
    ps__jsonw_end(w);
  }
  ps__jsonw_end(w);
}

static void json_units(ps__jsonw *w, const ps_plan *p) {
  ps__jsonw_array(w, "units");
  for (uint32_t u = 0; u < p->spec.n_units; u++) {
    ps__jsonw_object(w, NULL);
    ps__jsonw_uint(w, "elements", p->step.unit_host[u].n);
    const char *const streamed = u == 0 && p->spec.embed_on_host ? "host" : "streamed";
    ps__jsonw_string(w, "parameters", p->spec.param_resident[u] ? "resident" : streamed);
    if (!p->model->unit[u].frozen) {
      ps__jsonw_string(w, "gradients",
                       p->spec.grad_resident[u]       ? "resident"
                       : ps__grad_passes(&p->spec, u) ? "passing"
                                                      : streamed);
      ps__jsonw_string(w, "optimizer_state",
                       ps__state_on_device(&p->spec, u) ? "device"
                       : p->spec.state_on_disk[u]       ? "disk"
                                                        : "host");
      ps__jsonw_string(w, "update",
                       ps__updated_on_device(&p->spec, u) ? "device"
                       : p->spec.update_split[u]          ? "host, weights first"
                                                          : "host");
    }
    ps__jsonw_end(w);
  }
  ps__jsonw_end(w);
}

const char *ps_plan_json(ps_plan *plan) {
  if (!plan || plan->json)
    return plan ? plan->json : NULL;
  ps__jsonw *w = NULL;
  if (ps__jsonw_create(&w) != PS_OK)
    return NULL;
  ps__jsonw_object(w, NULL);
  json_sizes(w, plan);
  ps__jsonw_object(w, "hardware");
  ps__jsonw_string(w, "name", plan->hw.name);
  ps__jsonw_string(w, "device_name", plan->hw.device_name);
  ps__jsonw_uint(w, "n_threads", plan->hw.n_threads);
  ps__jsonw_bool(w, "measured", plan->hw.measured != 0);
  if (plan->hw.other_work_percent)
    ps__jsonw_uint(w, "other_work_percent", plan->hw.other_work_percent);
  ps__jsonw_end(w);
  json_units(w, plan);
  json_policies(w, plan);
  ps__jsonw_end(w);
  size_t n;
  const char *made = ps__jsonw_text(w, &n);
  if (made)
    plan->json = ps__strdup(made);
  if (!plan->json)
    (void)ps__fail(PS_ENOMEM, "out of memory for the plan's JSON");
  ps__jsonw_free(w);
  return plan->json;
}
