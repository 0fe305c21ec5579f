/* hosts.c - a trainer among those of other hosts: what steps exchange and how fast, what must be
 * the same in all tasks, and how a failure of one ends all. */
#include "backends/list.h"
#include "core/hash64.h"
#include "core/sha256.h"
#include "hardware/hardware_impl.h"
#include "hosts/hosts.h"
#include "hosts/net.h"
#include "io/io.h"
#include "train/resume.h"
#include "train/trainer.h"
#include <math.h>

/* ---- host ops -------------------------------------------------------------------------------- */

static void name_call(const ps_trainer *t, const ps_launch *l, const char *what,
                      char text[PS__HOSTS_WHAT]) {
  snprintf(text, PS__HOSTS_WHAT, "%s of step %llu", what,
           (unsigned long long)(t->cfg.first_step + l->step + 1));
}

ps_status ps__count_targets(ps_trainer *t, const ps_launch *l) {
  ps__batch_header *batch = l->ptr[0];
  const uint64_t mine[3] = {batch->valid_tokens, atomic_load(&t->stop_asked),
                            atomic_load(&t->border.state)};
  uint64_t all[PS_MAX_HOSTS][3], replan[PS_MAX_HOSTS], valid = 0, stop = 0;
  char what[PS__HOSTS_WHAT];
  ps__hosts_begin(t->plan->cfg.hosts);
  name_call(t, l, "counting the targets", what);
  PS_TRY(ps__hosts_gather(t->plan->cfg.hosts, what, mine, all, sizeof mine));
  for (uint32_t r = 0; r < t->plan->cfg.n_hosts; r++) {
    valid += all[r][0];
    if (all[r][1] && !stop)
      stop = 1 + r;
    replan[r] = all[r][2];
  }
  ps__border_said(t, l->step, replan, t->plan->cfg.n_hosts);
  t->ring[l->step % PS__RING].stop = stop;
  PS_TRY(ps__batch_check_valid(t, l->step, valid));
  ps__batch_scale(t->size.step, valid, batch);
  batch->valid_tokens = valid;
  return PS_OK;
}

ps_status ps__exchange_totals(ps_trainer *t, uint32_t unit, const ps_launch *l) {
  char layer[32], of[64], what[PS__HOSTS_WHAT];
  snprintf(of, sizeof of, "adding the gradients of %s",
           ps__layer_name(t, t->plan->model->unit[unit].layer, layer));
  name_call(t, l, of, what);
  return ps__hosts_sum(t->plan->cfg.hosts, what, l->ptr[0], t->plan->model->unit[unit].n,
                       (ps_dtype)t->plan->step.recipe->grad.dtype);
}

static ps_status open_net(ps_hosts *h, uint32_t backend, uint32_t device) {
  ps__net_device d;
  if (ps__hosts_net(h))
    return PS_OK;
  PS_TRY(ps__backend_net(backend, device, &d));
  return ps__hosts_open_net(h, &d);
}

ps_status ps_hosts_measure(ps_hosts *h, uint32_t device, uint64_t host_mem_bytes,
                           double *bytes_per_s) {
  if (!h || !bytes_per_s || !(*bytes_per_s >= 0) || !isfinite(*bytes_per_s))
    return ps__fail(PS_EINVAL, "ps_hosts_measure: hosts must be given, and bytes_per_s: 0, or "
                               "the rate that is known");
  double rate;
  uint64_t most_bytes;
  PS_TRY(
      ps__hosts_known_rate(h, *bytes_per_s, ps__hardware_room(host_mem_bytes), &rate, &most_bytes));
  if (!(rate > 0)) {
    if (atomic_load(&h->in_use))
      return ps__fail(PS_EBUSY, "ps_hosts_measure: a trainer uses these hosts: destroy it first");
    if (ps__hosts_wants_net(h))
      PS_TRY(open_net(h, PS_BACKEND_CUDA, device));
    PS_TRY(ps__hosts_measure(h, most_bytes, &rate));
  }
  *bytes_per_s = rate;
  return PS_OK;
}

ps_status ps__trainer_open_net(ps_trainer *t) {
  const ps_hardware *hw = &t->plan->hw;
  if (!ps__hosts_wants_net(t->plan->cfg.hosts) || !ps__exchanges(&t->plan->spec))
    return PS_OK;
  PS_TRY(open_net(t->plan->cfg.hosts, hw->backend, hw->device));
  return ps__engine_net(t->engine, ps__hosts_net(t->plan->cfg.hosts));
}

void ps__trainer_close_net(ps_trainer *t) {
  if (t->plan->cfg.hosts)
    ps__hosts_close_net(t->plan->cfg.hosts);
}

ps_status ps__sum_losses(ps_trainer *t, const ps_launch *l, double sum[3]) {
  double all[PS_MAX_HOSTS][3];
  char what[PS__HOSTS_WHAT];
  if (!t->plan->cfg.hosts)
    return PS_OK;
  name_call(t, l, "adding the losses", what);
  PS_TRY(ps__hosts_gather(t->plan->cfg.hosts, what, sum, all, sizeof all[0]));
  for (int c = 0; c < 3; c++) {
    sum[c] = 0;
    for (uint32_t r = 0; r < t->plan->cfg.n_hosts; r++)
      sum[c] += all[r][c];
  }
  return PS_OK;
}

/* ---- failures -------------------------------------------------------------------------------- */

/* Runs stop at once. A checkpoint of complete steps is written to its end. */
static void on_failure(void *user) {
  ps_trainer *t = user;
  ps__turns_stop(&t->turns);
}

void ps__trainer_join_hosts(ps_trainer *t) {
  if (t->plan->cfg.hosts)
    ps__hosts_watch(t->plan->cfg.hosts, on_failure, t);
}

void ps__trainer_leave_hosts(ps_trainer *t) {
  if (t->plan->cfg.hosts)
    ps__hosts_watch(t->plan->cfg.hosts, NULL, NULL);
}

ps_status ps__trainer_hosts_failed(ps_trainer *t, ps_status st) {
  char own[PS__HOSTS_MESSAGE];
  if (!t->plan->cfg.hosts || st == PS_OK)
    return st;
  snprintf(own, sizeof own, "%s", ps_last_error());
  const ps_status other = ps__hosts_failure(t->plan->cfg.hosts);
  if (other != PS_OK)
    return other;
  ps_hosts_fail(t->plan->cfg.hosts, st, own);
  return ps__fail(st, "%s", own);
}

/* ---- what all tasks agree on ----------------------------------------------------------------- */

enum { TEXT_BYTES = 8192 };

static void hash_text(const void *data, size_t bytes, char hex[65]) {
  ps__sha256 h;
  ps__sha256_begin(&h);
  ps__sha256_add(&h, data, bytes);
  ps__sha256_end(&h, hex);
  hex[16] = 0; /* enough to tell two from each other */
}

/* The exchanges of a step, in their order. */
static void hash_exchanges(const ps_trainer *t, char hex[65]) {
  const ps__step *s = &t->plan->step;
  ps__sha256 h;
  ps__sha256_begin(&h);
  for (size_t i = 0; i < s->n_op; i++) {
    const ps__args_hook *a = (const void *)(s->args + s->op[i].args);
    const uint32_t what[2] = {a->what, a->unit};
    if (s->op[i].stream == s->at->net)
      ps__sha256_add(&h, what, sizeof what);
  }
  ps__sha256_end(&h, hex);
  hex[16] = 0;
}

/* A line a setting that a manifest has; returns the bytes of @text so far. */
static size_t add_settings(const ps__settings *of, const ps__setting *s, char text[TEXT_BYTES],
                           size_t at) {
  for (; s->key; s++) {
    char value[PS__SETTING_TEXT];
    ps__setting_text(value, s, of);
    const int n = snprintf(text + at, TEXT_BYTES - at, "%s = %s\n", s->option, value);
    at += (size_t)n < TEXT_BYTES - at ? (size_t)n : TEXT_BYTES - at - 1;
  }
  return at;
}

/* As add_settings(): how many sequences the first steps have. */
static size_t add_ramp(const ps_trainer *t, char text[TEXT_BYTES], size_t at) {
  const ps__guests *g = &t->plan->guests;
  at += (size_t)snprintf(text + at, TEXT_BYTES - at, "batch-ramp = %u stages\n", g->n_ramp);
  for (uint32_t i = 0; i < g->n_ramp; i++)
    at += (size_t)snprintf(
        text + at, TEXT_BYTES - at, "stage %u of batch-ramp = %llu sequences a host, %llu steps\n",
        i + 1, (unsigned long long)g->ramp[i].n_sequences, (unsigned long long)g->ramp[i].n_steps);
  return at;
}

/* All that changes the bits, and what decides which exchanges there are. A manifest's settings are
 * those that change the math, so a new one is compared too. */
ps_status ps__trainer_agree(ps_trainer *t) {
  const ps_plan *p = t->plan;
  char text[TEXT_BYTES], model[65], exchanges[65];
  uint64_t data, data_bytes;
  if (!t->plan->cfg.hosts)
    return PS_OK;
  const ps__settings own = ps__settings_of(t, 0);
  PS_TRY(ps__dataset_hash(t->cfg.dataset, &data, &data_bytes));
  hash_text(&p->model->cfg, sizeof p->model->cfg, model);
  hash_exchanges(t, exchanges);
  const int n = snprintf(
      text, sizeof text,
      "model's config.json = %s\ndata = %llu bytes with hash %016llx\nrecipe = %s%s\n"
      "optimizer = %s\nfp8 = %s\none_document = %s\nkeep_grads = %s\n"
      "step to go on from (--resume) = %llu\nupdates before = %llu\n",
      model, (unsigned long long)data_bytes, (unsigned long long)data,
      ps_recipe_name((ps_recipe)p->cfg.recipe), p->cfg.state_bits ? ", state in 8 bits" : "",
      ps_optimizer_name((ps_optimizer)p->cfg.optimizer), p->model->fp8.on ? "true" : "false",
      p->cfg.one_document ? "true" : "false", p->cfg.keep_grads ? "true" : "false",
      (unsigned long long)t->cfg.first_step, (unsigned long long)t->n_updates);
  size_t at = add_settings(&own, ps__batch_settings, text, (size_t)n);
  at = add_settings(&own, ps__train_settings, text, at);
  at = add_ramp(t, text, at);
  snprintf(text + at, sizeof text - at, "exchanges of a step = %s\n", exchanges);
  return ps_hosts_agree(t->plan->cfg.hosts, text);
}

static uint64_t hash_array(const ps_trainer *t, uint32_t unit, uint32_t what, uint64_t h) {
  const void *data = ps__array_at(t, unit, what, 0);
  return data ? ps__hash64(h, data, ps__array_bytes(t, unit, what, t->plan->step.unit_host[unit].n))
              : h;
}

/* What updates work on: the master copy where there is one, else the weights; and the state. */
ps_status ps__trainer_agree_weights(ps_trainer *t) {
  char text[64];
  uint64_t h = 0;
  if (!t->plan->cfg.hosts)
    return PS_OK;
  for (uint32_t u = 0; u < t->plan->spec.n_units; u++) {
    h = hash_array(t, u, PS__ARRAY_UPDATED, h);
    if (ps__in_halves(t->plan->spec.recipe))
      h = hash_array(t, u, PS__ARRAY_WEIGHTS, h);
    for (uint32_t k = 0; t->resumed && k < PS_MAX_STATES; k++)
      h = hash_array(t, u, PS__ARRAY_STATE + k, h);
  }
  snprintf(text, sizeof text, "%s = %016llx\n", t->resumed ? "weights and state" : "weights",
           (unsigned long long)h);
  return ps_hosts_agree(t->plan->cfg.hosts, text);
}
