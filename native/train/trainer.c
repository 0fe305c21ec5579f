/* trainer.c - creates, steps and destroys a trainer. */
#include "train/trainer.h"
#include "engine/disk.h"
#include "generate/generate.h"
#include "hosts/hosts.h"
#include "io/io.h"
#include "train/adapter.h"
#include "train/observed.h"
#include "train/replan.h"
#include "train/pace.h"
#include "train/resume.h"
#include "train/routing.h"
#include <errno.h>
#include <string.h>
#include <sys/random.h>

static bool decays(const ps_trainer *t, const ps_param_info *p) {
  const uint32_t none = t->cfg.no_decay;
  if (p->role == PS_PARAM_CONSTANT)
    return false;
  if (p->role == PS_PARAM_NORM)
    return !(none & PS_NO_DECAY_NORM);
  if (p->role == PS_PARAM_BIAS)
    return !(none & PS_NO_DECAY_BIAS);
  return t->plan->model->unit[p->unit].layer != 0 || !(none & PS_NO_DECAY_EMBEDDING);
}

static ps_status make_segments(ps_trainer *t) {
  const ps_model *m = t->plan->model;
  const uint32_t n_units = m->n_units;
  PS_TRY(ps__hold_create(&t->hold, n_units));
  t->segments = ps__calloc(m->n_params, sizeof *t->segments);
  t->first_segment = ps__calloc(n_units + 1, sizeof *t->first_segment);
  t->first_element = ps__calloc(n_units, sizeof *t->first_element);
  if (!t->segments || !t->first_segment || !t->first_element)
    return ps__fail(PS_ENOMEM, "out of memory for the optimizer's table");
  uint32_t n = 0;
  uint64_t element = 0;
  for (uint32_t u = 0; u < n_units; u++) {
    t->first_segment[u] = n;
    t->first_element[u] = element;
    element += m->unit[u].n;
    for (uint32_t i = 0; i < m->unit[u].n_params; i++) {
      const ps_param_info *p = &m->param[m->unit[u].first_param + i];
      t->segments[n++] =
          (ps__segment){p->offset, p->n, decays(t, p) ? (float)t->cfg.weight_decay : 0.0f};
    }
  }
  t->first_segment[n_units] = n;
  return t->plan->spec.embed_on_host ? ps__rows_create(&t->rows, ps__embed_args_of(m),
                                                       t->plan->step.recipe->state[0].block, 0)
                                     : PS_OK;
}

static ps_status open_engine(ps_trainer *t) {
  const ps_plan *p = t->plan;
  ps_engine_config e;
  char *drives = NULL;
  ps__plan_engine(p, &e);
  if (p->at->disk != PS__NO_PLACE)
    PS_TRY(ps__disk_dirs(t->cfg.disk, &drives, e.drive, &e.n_drives));
  const ps_status st = ps_engine_create(&t->engine, &e);
  ps__free(drives);
  PS_TRY(st);
  PS_TRY(ps__pace_attach(t));
  t->turns.engine = t->engine;
  t->host = ps_engine_space(t->engine, p->at->host);
  return PS_OK;
}

/* Device memory that one GPU has lost to this process, the most of all of them. */
static ps_status read_memory(const ps_trainer *t, uint64_t *most, uint32_t *device) {
  const ps__places *at = t->plan->at;
  *most = 0;
  *device = 0;
  for (uint32_t d = 0; d < at->n_devices; d++) {
    uint64_t now = 0;
    PS_TRY(ps__engine_memory(t->engine, at->dev[d].place, &now));
    if (now > *most) {
      *most = now;
      *device = d;
    }
  }
  return PS_OK;
}

/* Compares the device memory that each GPU has lost to this process with the cap. The plan knows
 * what kernels and libraries took when the machine was measured, not what they take now. */
static ps_status note_memory(ps_trainer *t, bool opening) {
  char used[32], cap[32], planned[32], which[24] = "the GPU";
  uint64_t now;
  uint32_t device;
  const uint64_t given = t->plan->cfg.device_mem_bytes;
  PS_TRY(read_memory(t, &now, &device));
  if (now > t->device_peak)
    t->device_peak = now;
  if (!given || now <= given || t->warned)
    return PS_OK;
  if (t->plan->at->n_devices > 1)
    snprintf(which, sizeof which, "GPU %u", t->plan->hw.device + device);
  ps__format_bytes_apart(used, now, cap, given);
  ps__format_bytes(planned, t->plan->report.device_used_bytes);
  if (opening)
    return ps__fail(
        PS_EBUDGET,
        "before the first step the memory in use of %s has grown by %s since this process began, "
        "which is more than the cap of %s (%s planned): run penstock profile, which measures what "
        "driver and libraries take, end what else has begun to use the GPU, or raise %s",
        which, used, cap, planned, ps__field("device_mem_bytes"));
  t->warned = true;
  ps__log(
      PS_LOG_WARN,
      "the memory in use of %s has grown by %s since this process began, which is more than the "
      "cap of %s (%s planned)",
      which, used, cap, planned);
  return PS_OK;
}

static ps_status check_model(const ps_trainer *t) {
  ps_model_config m;
  PS_TRY(ps__model_config_read(&m, t->model_dir, false));
  PS_TRY(ps__trainer_match_head(t, &m));
  if (memcmp(&m, &t->plan->model->cfg, sizeof m) != 0)
    return ps__fail(PS_EINVAL,
                    "%s: its config.json describes another model than the plan: make a plan for it",
                    t->model_dir);
  if (m.multimodal && t->cfg.init_weights)
    return ps__fail(PS_EINVAL,
                    "%s: its config.json is of a multimodal model, and %s draws the text model "
                    "alone: give the text model's config, or no %s",
                    t->model_dir, ps__field("init_weights"), ps__field("init_weights"));
  return PS_OK;
}

/* What the disk lacks is said before weights are opened. */
static ps_status check_disk(const ps_trainer *t) {
  const char *dir[PS_MAX_DRIVES];
  char *own;
  uint32_t n;
  if (t->plan->at->disk == PS__NO_PLACE)
    return PS_OK;
  PS_TRY(ps__disk_dirs(t->cfg.disk, &own, dir, &n));
  const ps_status st = ps__disk_check(dir, n, t->plan->report.disk_arena_bytes);
  ps__free(own);
  return st;
}

static ps_status open_sampler(ps_trainer *t) {
  ps__gen_setup *s = t->plan->sampling;
  for (uint32_t i = 0; s && i < PS__GEN_PROGRAMS; i++)
    if (s->schedule[i])
      PS_TRY(ps__engine_warm(t->engine, s->schedule[i]));
  if (s)
    PS_TRY(ps__generator_beside(&t->sampler, s, &t->turns));
  return PS_OK;
}

/* @weights and @adapters are NULL where they are drawn from the seed; @c where the state begins at
 * zero. */
static ps_status reserve_and_load(ps_trainer *t, ps_tensor_file *weights, ps_tensor_file *adapters,
                                  const ps_checkpoint *c, ps_progress_fn progress,
                                  void *progress_user) {
  /* memory that measuring the machine and planning took does not count as this run's */
  ps__resident_peak_reset();
  const uint64_t bytes = t->plan->report.device_arena_bytes + t->plan->report.host_arena_bytes;
  if (progress)
    progress(progress_user, "reserving memory", 0, bytes);
  PS_TRY(open_engine(t));
  ps__trainer_measure_arena(t);
  if (progress)
    progress(progress_user,
             t->plan->hw.backend == PS_BACKEND_CUDA ? "preparing and timing kernels"
                                                    : "preparing kernels",
             0, 0);
  PS_TRY(ps__engine_warm(t->engine, t->plan->schedule));
  const ps__guest *guest;
  for (uint32_t i = 0; (guest = ps__guest_at(&t->plan->guests, i)); i++)
    PS_TRY(ps__engine_warm(t->engine, guest->schedule));
  PS_TRY(open_sampler(t));
  PS_TRY(ps__trainer_open_net(t));
  PS_TRY(note_memory(t, true));
  PS_TRY(weights ? ps__trainer_load(t, weights, adapters, progress, progress_user)
                 : ps__trainer_init(t, false, progress, progress_user));
  if (ps__has_adapters(t))
    PS_TRY(adapters ? ps__adapter_load(t, adapters)
                    : ps__trainer_init(t, true, progress, progress_user));
  if (ps__has_adapters(t) && weights && !adapters) /* the head is one of them */
    PS_TRY(ps__trainer_load_score(t, weights));
  if (c)
    PS_TRY(ps__resume_load(t, c, progress, progress_user));
  ps__clip_begin(t, c ? c->of.info.grad_norm : NAN);
  return ps__replan_create(t);
}

/* Errors of the model directory and of the checkpoint are found before any memory is reserved. */
static ps_status open_trainer(ps_trainer *t, const ps_checkpoint *from, ps_progress_fn progress,
                              void *progress_user) {
  const ps_train_config *c = &t->cfg;
  t->lr = (ps__lr_schedule){.kind = c->lr_kind,
                            .warmup_steps = c->warmup_steps,
                            .total_steps = c->total_steps,
                            .decay_steps = c->decay_steps,
                            .peak_lr = c->lr,
                            .min_lr = c->min_lr};
  t->tokens = ps__calloc(t->plan->layout.n_tokens, sizeof *t->tokens);
  t->targets = ps__calloc(t->plan->layout.n_tokens, sizeof *t->targets);
  t->begins = ps__calloc(t->plan->layout.n_tokens, 1);
  const bool logits = t->plan->cfg.logits_fn != NULL;
  if (logits)
    t->logits = ps__calloc(ps__head_columns(&t->plan->model->cfg), sizeof *t->logits);
  if (!t->tokens || !t->targets || !t->begins || (logits && !t->logits))
    return ps__fail(PS_ENOMEM, "out of memory for a batch");
  PS_TRY(ps__routing_create(t));
  PS_TRY(check_disk(t));
  PS_TRY(check_model(t));
  PS_TRY(make_segments(t));
  ps_tensor_file *weights = NULL, *adapters = NULL;
  const char *adapter_dir = from && ps__has_adapters(t) ? from->dir : c->adapter_dir;
  if (!from && getrandom(&t->run_id, sizeof t->run_id, 0) != sizeof t->run_id)
    return ps__fail(PS_EIO, "the system has no random numbers: %s", strerror(errno));
  if (from) {
    PS_TRY(ps__resume_check(t, from));
    t->resumed = true;
    t->cfg.first_step = from->of.info.step;
    t->n_updates = from->of.info.n_updates;
    atomic_store(&t->skips.n, from->of.info.n_skipped);
    t->serial = from->serial;
    t->run_id = from->run_id;
  }
  t->size = ps__step_size_at(t->plan, t->cfg.first_step);
  PS_TRY(ps__trainer_agree(t));
  ps_status st = PS_OK;
  if (!c->init_weights)
    st = ps__trainer_open_weights(t, from && !ps__has_adapters(t) ? from->dir : t->model_dir,
                                  &weights);
  if (st == PS_OK && ps__has_adapters(t))
    st = ps__adapter_open(t, adapter_dir, from ? NULL : weights, weights, &adapters);
  if (st == PS_OK)
    st = reserve_and_load(t, weights, adapters, from, progress, progress_user);
  if (st == PS_OK)
    st = ps__trainer_agree_weights(t);
  if (st == PS_OK)
    st = ps__observer_create(&t->observer, t);
  ps_tensors_close(weights);
  ps_tensors_close(adapters);
  return st;
}

static ps_status create(ps_trainer **out, const char *model_dir, ps_plan *plan,
                        const ps_train_config *cfg, const ps_checkpoint *from,
                        ps_progress_fn progress, void *progress_user) {
  if (!out || !model_dir || !plan || !cfg)
    return ps__fail(PS_EINVAL, "ps_trainer_create: out, model_dir, plan and cfg must be given");
  PS_TRY(ps__trainer_check_config(plan, cfg));
  ps_trainer *t = ps__calloc(1, sizeof *t);
  if (!t)
    return ps__fail(PS_ENOMEM, "out of memory for a trainer");
  uint32_t free_plan = 0;
  if (!atomic_compare_exchange_strong(&plan->in_use, &free_plan, 1)) {
    ps__free(t);
    return ps__fail(PS_EBUSY, "ps_trainer_create: another trainer runs this plan: destroy that "
                              "trainer, or make another plan");
  }
  ps_hosts *const hosts = plan->cfg.hosts;
  if (hosts && atomic_exchange(&hosts->in_use, 1)) {
    atomic_store(&plan->in_use, 0);
    ps__free(t);
    return ps__fail(PS_EBUSY, "ps_trainer_create: another trainer uses these hosts: destroy that "
                              "trainer first");
  }
  t->plan = plan;
  t->cfg = *cfg;
  (void)ps__trainer_resolve_hypers(&t->cfg, plan->cfg.optimizer); /* checked above */
  t->rank = hosts ? hosts->rank : 0;
  ps__trainer_join_hosts(t);
  ps__dataset_use(cfg->dataset);
  ps__dataset_use(cfg->val_dataset);
  ps__trainer_join_plan(t);
  t->model_dir = ps__strdup(model_dir);
  t->run_text = cfg->run ? ps__strdup(cfg->run) : NULL;
  const ps_status st = t->model_dir && !t->run_text == !cfg->run
                           ? open_trainer(t, from, progress, progress_user)
                           : ps__fail(PS_ENOMEM, "out of memory for a trainer");
  t->cfg.adapter_dir = t->cfg.disk = NULL; /* they were borrowed for this call */
  if (st != PS_OK)
    ps_trainer_destroy(t);
  else
    *out = t;
  return st;
}

ps_status ps_trainer_create(ps_trainer **out, const char *model_dir, ps_plan *plan,
                            const ps_train_config *cfg, ps_progress_fn progress,
                            void *progress_user) {
  return create(out, model_dir, plan, cfg, NULL, progress, progress_user);
}

ps_status ps_trainer_resume(ps_trainer **out, const char *model_dir, ps_plan *plan,
                            const ps_train_config *cfg, const ps_checkpoint *c,
                            ps_progress_fn progress, void *progress_user) {
  if (!c)
    return ps__fail(PS_EINVAL, "ps_trainer_resume: a checkpoint must be given");
  if (plan)
    PS_TRY(ps__resume_check_names(plan, c, cfg && cfg->convert_state));
  return create(out, model_dir, plan, cfg, c, progress, progress_user);
}

ps_status ps_trainer_destroy(ps_trainer *t) {
  if (!t)
    return PS_OK;
  ps__trainer_leave_hosts(t);
  if (t->n_submitted != t->n_reported) /* steps in flight, which wait for other hosts */
    ps_hosts_fail(t->plan->cfg.hosts, PS_ECANCELLED, "its training was ended");
  if (t->run && !ps__engine_drives(t->engine))
    ps__trainer_await_written_steps(t);
  PS_TRY(ps__turns_close(&t->turns));
  t->run = NULL;
  ps__replan_destroy(t);
  ps__observer_destroy(t->observer);
  ps__trainer_end_writing(t);
  ps__replay_destroy(t->replay);
  ps_generator_destroy(t->sampler);
  ps__trainer_close_net(t);
  (void)ps_engine_close(t->engine);
  ps__pace_free(t);
  if (t->plan->cfg.hosts)
    atomic_store(&t->plan->cfg.hosts->in_use, 0);
  ps__trainer_leave_plan(t);
  ps__dataset_leave(t->cfg.dataset);
  ps__dataset_leave(t->cfg.val_dataset);
  ps__free(t->model_dir);
  ps__free(t->run_text);
  ps__free(t->data_marks);
  ps__free(t->tokens);
  ps__free(t->targets);
  ps__free(t->begins);
  ps__free(t->logits);
  ps__free(t->unused);
  ps__free(t->segments);
  ps__free(t->first_segment);
  ps__free(t->first_element);
  ps__rows_destroy(t->rows);
  ps__hold_destroy(t->hold);
  ps__free(t->arena_rates);
  ps__free(t);
  return PS_OK;
}

/* ---- stepping -------------------------------------------------------------------------------- */

/* Says why the step that is reported next was skipped. Steps in flight end first. */
static ps_status say_skipped(ps_trainer *t) {
  const uint64_t step = t->n_reported;
  const ps__step_record *r = &t->ring[step % PS__RING];
  char where[PS__ADDED_BYTES] = "";
  /* where a step in flight fails, the wait for it says so */
  const bool paused = r->gradient_bad && ps__run_pause(t->run) == PS_OK;
  if (paused)
    ps__replay_say(t, step, t->n_started - step - 1, where, sizeof where);
  ps__log(PS_LOG_WARN, "step %llu is skipped: %s%s; %llu skipped so far",
          (unsigned long long)(t->cfg.first_step + step + 1), r->why, where,
          (unsigned long long)r->n_skipped);
  return paused ? ps__trainer_go_on(t) : PS_OK;
}

/* Warns of outliers, again when twice as much is flushed. */
static void say_flushed(ps_trainer *t) {
  char advice[96];
  const ps__step_record *r = &t->ring[t->n_reported % PS__RING];
  if (r->flushed_most < PS_FLUSHED_WARNS || r->flushed_most < 2 * t->flushed_said)
    return;
  t->flushed_said = r->flushed_most;
  if (strcmp(r->flushed_in->what, "the gated product") != 0)
    snprintf(advice, sizeof advice, "lower %s, or give a recipe without FP8", ps__field("lr"));
  else
    snprintf(advice, sizeof advice, "%s keeps its product in bf16", ps__field("fp8_bf16_down"));
  ps__log(PS_LOG_WARN,
          "step %llu: %.1f%% of %s in block %u became 0 in FP8, as others are more than 2^18 times "
          "larger: %s",
          (unsigned long long)(t->cfg.first_step + t->n_reported + 1), 100 * r->flushed_most,
          r->flushed_in->what, r->flushed_layer - 1, advice);
}

ps_status ps_trainer_submit(ps_trainer *t, uint64_t n) {
  if (!t)
    return ps__fail(PS_EINVAL, "ps_trainer_submit: no trainer");
  PS_TRY(ps__trainer_outside_ops(t));
  if (t->sticky != PS_OK)
    return ps__trainer_stop(t, t->sticky);
  if (n > PS__RING || t->n_submitted + n - t->n_reported > PS__RING)
    return ps__fail(PS_EBUSY,
                    "%llu steps are in flight and %llu more are submitted: at most %d may be in "
                    "flight, wait for "
                    "some first",
                    (unsigned long long)(t->n_submitted - t->n_reported), (unsigned long long)n,
                    PS__RING);
  ps__hold_seen(t->hold, t->n_reported);
  if (!t->n_submitted)
    ps__sensors_start(t);
  ps_status st = ps__trainer_go_on(t);
  for (uint64_t i = 0; i < n; i++)
    t->ring[(t->n_submitted + i) % PS__RING].submit_ns = ps__engine_now(t->engine, PS__CALLER);
  t->n_submitted += n;
  if (st == PS_OK)
    st = ps__trainer_start_steps(t);
  if (st != PS_OK)
    t->n_submitted -= n;
  /* Where earlier steps are not reported yet, the wait for the failed step returns the error. */
  if (st != PS_OK && t->n_reported == t->n_submitted)
    return ps__trainer_stop(t, st);
  return PS_OK;
}

static void fill_metrics(ps_trainer *t, ps_step_metrics *m) {
  const ps_plan *p = t->plan;
  const ps__step_record *r = &t->ring[t->n_reported % PS__RING];
  const ps__step_size size = ps__step_size_at(p, t->cfg.first_step + t->n_reported);
  const double part = (double)size.layout->n_tokens / (double)p->layout.n_tokens;
  const uint64_t begin = r->submit_ns > t->last_end_ns ? r->submit_ns : t->last_end_ns;
  *m = (ps_step_metrics){.step = t->cfg.first_step + t->n_reported,
                         .loss = r->loss,
                         .objective = r->objective,
                         .right = r->right,
                         .z_loss = r->z_loss,
                         .tokens = p->cfg.n_hosts * size.layout->n_tokens,
                         .valid_tokens = r->valid_tokens,
                         .grad_norm = r->norm,
                         .skipped = r->skipped,
                         .stop = r->stop,
                         .n_skipped = r->n_skipped,
                         .fp8_flushed = r->flushed,
                         .fp8_flushed_most = r->flushed_most,
                         .expert_load = r->routing.load,
                         .expert_entropy = r->routing.entropy,
                         .experts_unused = r->routing.n_unused,
                         .lr = r->lr,
                         .predicted_step_s = size.step_s,
                         .n_switches = t->n_switches,
                         .switch_s = t->switch_s};
  m->step_s = (double)(r->end_ns - begin) * 1e-9;
  m->tokens_per_s = (double)m->tokens / m->step_s;
  const double peak_flops = p->at->n_devices * p->hw.peak_flops_per_s;
  if (peak_flops > 0) {
    m->mfu = part * p->report.model_flops / m->step_s / peak_flops;
    m->hfu = part * p->hfu_flops / m->step_s / peak_flops;
  }
  m->h2d_bytes_per_s = (double)size.step->copied_bytes[0] / m->step_s;
  m->d2h_bytes_per_s = (double)size.step->copied_bytes[1] / m->step_s;
  m->update_bytes_per_s = size.step->update_bytes / m->step_s;
  ps__sensors_read(t, m);
  (void)note_memory(t, false);
  uint64_t arenas = 0;
  for (uint32_t d = 0; d < p->at->n_devices; d++) {
    uint64_t peak = 0;
    (void)ps_engine_space_peak(t->engine, p->at->dev[d].place, &peak);
    arenas += peak;
    if (peak > m->device_peak_bytes)
      m->device_peak_bytes = peak;
  }
  (void)ps_engine_space_peak(t->engine, p->at->host, &m->host_arena_peak_bytes);
  const uint64_t peak = ps__resident_peak_bytes(),
                 arena = p->hw.backend == PS_BACKEND_CPU ? arenas : 0;
  m->host_peak_bytes = peak > arena ? peak - arena : 0;
  if (t->device_peak)
    m->device_peak_bytes = t->device_peak;
  ps__observer_step(t, m->step_s);
  if (size.schedule == p->schedule)
    m->expected_step_s = ps__observed_expected_s(t);
}

ps_status ps_trainer_wait(ps_trainer *t, ps_step_metrics *out) {
  if (!t || !out)
    return ps__fail(PS_EINVAL, "ps_trainer_wait: trainer and out must be given");
  PS_TRY(ps__trainer_outside_ops(t));
  if (t->sticky != PS_OK)
    return ps__trainer_stop(t, t->sticky);
  if (t->n_reported == t->n_submitted)
    return ps__fail(PS_ESTATE, "ps_trainer_wait: no step was submitted");
  ps__hold_seen(t->hold, t->n_reported);
  const ps_status st = ps__trainer_run_wait(t, t->n_reported + 1);
  if (st != PS_OK) {
    (void)ps__trainer_hosts_failed(t, st); /* ops that wait for other hosts end */
    if (t->run)                            /* a switch that failed has none */
      ps__run_rest(t->run); /* ops that were running have ended; the report may be one */
  }
  /* Once its report ran, all weights of a step are in host memory. What was stopped after that is
   * only moments, and copies that nobody reads any more. */
  if (st != PS_OK && atomic_load(&t->ended) <= t->n_reported)
    return ps__trainer_stop(t, st);
  if (st == PS_OK && t->ring[t->n_reported % PS__RING].skipped) {
    const ps_status said = say_skipped(t);
    if (said != PS_OK)
      return ps__trainer_stop(t, said);
  }
  say_flushed(t);
  ps__routing_say(t, &t->ring[t->n_reported % PS__RING]);
  fill_metrics(t, out);
  t->last_end_ns = t->ring[t->n_reported % PS__RING].end_ns;
  t->n_changed += !out->skipped;
  t->n_reported++;
  t->switch_s = 0;
  ps__replan_step(t);
  return PS_OK;
}

void ps_trainer_ask_stop(ps_trainer *t) {
  if (t)
    atomic_store(&t->stop_asked, 1);
}

void ps_trainer_cancel(ps_trainer *t) {
  if (!t)
    return;
  ps__turns_cancel(&t->turns);
  ps__hold_stop(t->hold, true);
}

uint64_t ps_trainer_steps_done(const ps_trainer *t) { return t ? t->n_reported : 0; }

int ps_trainer_at_rest(const ps_trainer *t) {
  return !t || ps__turns_at_rest((ps__turns *)&t->turns);
}

int ps_trainer_switching(const ps_trainer *t) { return t && atomic_load(&t->switching); }

void ps_trainer_where(const ps_trainer *t, char *text, uint64_t bytes) {
  if (t)
    ps__turns_where((ps__turns *)&t->turns, text, bytes);
  else if (bytes)
    text[0] = 0;
}

ps_status ps_trainer_profile(ps_trainer *t, int on) {
  if (!t)
    return ps__fail(PS_EINVAL, "ps_trainer_profile: trainer must be given");
  PS_TRY(ps__trainer_idle(t));
  return ps__engine_profile(t->engine, on != 0);
}

ps_status ps_trainer_trace(const ps_trainer *t, ps_trace_event *events, uint64_t room,
                           uint64_t *n) {
  if (!t || !n)
    return ps__fail(PS_EINVAL, "ps_trainer_trace: trainer and n must be given");
  if (!t->run)
    return ps__fail(PS_ESTATE, "no step was submitted yet");
  *n = 0; /* the plan's schedule is that of the steps after a batch ramp */
  return t->size.schedule == t->plan->schedule ? ps_run_trace(t->run, events, room, n) : PS_OK;
}
