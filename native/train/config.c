/* config.c - the defaults of a training's configuration, and what it may not be. */
#include "hosts/hosts.h"
#include "hosts/net.h"
#include "io/io.h"
#include "train/trainer.h"
#include <math.h>
#include <string.h>

void ps_train_config_init(ps_train_config *cfg) {
  memset(cfg, 0, sizeof *cfg);
  cfg->struct_bytes = sizeof *cfg;
  cfg->optimizer = PS_OPTIMIZER_ADAMW;
  cfg->lr = cfg->beta1 = cfg->beta2 = cfg->eps = cfg->momentum = cfg->weight_decay = NAN;
  cfg->clip_norm = 1.0;
  cfg->max_skips = 10;
  cfg->document_token = cfg->document_end_token = -1;
  cfg->no_decay = PS_NO_DECAY_NORM | PS_NO_DECAY_BIAS;
}

static ps_status check_schedule(const ps_train_config *c) {
  const struct {
    const char *name;
    uint64_t value;
  } field[] = {{"total_steps", c->total_steps},
               {"warmup_steps", c->warmup_steps},
               {"decay_steps", c->decay_steps},
               {"first_step", c->first_step}};
  for (size_t i = 0; i < sizeof field / sizeof *field; i++)
    if (field[i].value > PS_MAX_STEPS)
      return ps__fail(PS_EINVAL, "%s is %llu: at most %d is possible", field[i].name,
                      (unsigned long long)field[i].value, PS_MAX_STEPS);
  if (c->lr_kind > PS_LR_KIND_WSD)
    return ps__fail(PS_EINVAL, "lr_kind is %u: ps_lr_kind ends at %d", c->lr_kind, PS_LR_KIND_WSD);
  if (c->lr_kind == PS_LR_KIND_WSD && c->decay_steps == 0)
    return ps__fail(PS_EINVAL, "--lr-schedule wsd needs --decay-steps: how many of the last steps "
                               "lower the learning rate");
  if (c->lr_kind != PS_LR_KIND_WSD && c->decay_steps)
    return ps__fail(
        PS_EINVAL, "--decay-steps %llu is for --lr-schedule wsd alone: leave it out, or choose wsd",
        (unsigned long long)c->decay_steps);
  if (c->lr_kind == PS_LR_KIND_CONSTANT && c->min_lr > 0)
    return ps__fail(PS_EINVAL,
                    "--min-lr %g is never reached by --lr-schedule constant: leave it out, or "
                    "choose another schedule",
                    c->min_lr);
  if (c->total_steps && c->decay_steps > c->total_steps)
    return ps__fail(PS_EINVAL, "--decay-steps %llu is more than the run's %llu steps: lower it",
                    (unsigned long long)c->decay_steps, (unsigned long long)c->total_steps);
  if (c->total_steps && c->warmup_steps > c->total_steps)
    ps__log(PS_LOG_WARN,
            "--warmup-steps %llu is more than the run's %llu steps: the learning rate reaches only "
            "%g of --lr",
            (unsigned long long)c->warmup_steps, (unsigned long long)c->total_steps,
            (double)c->total_steps / (double)(c->warmup_steps + 1));
  return PS_OK;
}

static ps_status check_documents(const ps_train_config *c, uint32_t vocab_size) {
  const int32_t larger =
      c->document_token > c->document_end_token ? c->document_token : c->document_end_token;
  if (c->document_token >= 0 && c->document_end_token >= 0)
    return ps__fail(PS_EINVAL,
                    "--document-token %d and --document-end-token %d exclude each other: give the "
                    "first if the token begins documents, the second if it ends them",
                    c->document_token, c->document_end_token);
  if (larger >= 0 && (uint32_t)larger >= vocab_size)
    return ps__fail(PS_EINVAL,
                    "--document-%s %d is past the model's vocabulary of %u: give the id that its "
                    "tokenizer has for it",
                    c->document_token >= 0 ? "token" : "end-token", larger, vocab_size);
  return PS_OK;
}

/* Checks the hyperparameters and fills in the optimizer's defaults. */
ps_status ps__trainer_resolve_hypers(ps_train_config *c) {
  double h[PS_N_HYPERS] = {[PS_HYPER_LR] = c->lr,
                           [PS_HYPER_BETA1] = c->beta1,
                           [PS_HYPER_BETA2] = c->beta2,
                           [PS_HYPER_EPS] = c->eps,
                           [PS_HYPER_MOMENTUM] = c->momentum,
                           [PS_HYPER_NESTEROV] = c->nesterov ? 1 : NAN,
                           [PS_HYPER_WEIGHT_DECAY] = c->weight_decay};
  if (c->optimizer >= PS_N_OPTIMIZERS)
    return ps__fail(PS_EINVAL, "optimizer %u is unknown: use " PS__OPTIMIZER_NAMES, c->optimizer);
  PS_TRY(ps__hypers_resolve((ps_optimizer)c->optimizer, h));
  c->lr = h[PS_HYPER_LR];
  c->beta1 = h[PS_HYPER_BETA1];
  c->beta2 = h[PS_HYPER_BETA2];
  c->eps = h[PS_HYPER_EPS];
  c->momentum = h[PS_HYPER_MOMENTUM];
  c->weight_decay = h[PS_HYPER_WEIGHT_DECAY];
  return PS_OK;
}

/* Everything but what plan and data say; fills in defaults. */
static ps_status resolve_config(ps_train_config *c, const ps_model_config *model) {
  PS_TRY(ps__trainer_resolve_hypers(c));
  if (!(c->lr >= 0) || !isfinite(c->lr) || !(c->min_lr >= 0) || c->min_lr > c->lr)
    return ps__fail(
        PS_EINVAL,
        "--lr %g and --min-lr %g must be finite and not negative, and --min-lr not above --lr",
        c->lr, c->min_lr);
  if (c->replan >= PS_N_REPLANS)
    return ps__fail(PS_EINVAL, "replan is %u: ps_replan ends at %d", c->replan, PS_N_REPLANS - 1);
  if (c->non_finite > PS_NON_FINITE_SKIP)
    return ps__fail(PS_EINVAL, "non_finite is %u: ps_non_finite ends at %d", c->non_finite,
                    PS_NON_FINITE_SKIP);
  if (!(c->clip_norm >= 0))
    return ps__fail(PS_EINVAL, "clip_norm %g must not be negative; 0 means no clipping",
                    c->clip_norm);
  PS_TRY(check_schedule(c));
  return check_documents(c, model->vocab_size);
}

ps_status ps_train_config_check(const ps_train_config *c, const ps_model_config *model) {
  if (!c || !model)
    return ps__fail(PS_EINVAL, "ps_train_config_check: cfg and model must be given");
  if (c->struct_bytes != sizeof *c)
    return ps__fail(PS_EINVAL, "ps_train_config.struct_bytes is %u, %zu expected", c->struct_bytes,
                    sizeof *c);
  if (c->no_decay > PS_NO_DECAY_ALL)
    return ps__fail(PS_EINVAL, "no_decay is %u: PS_NO_DECAY_ALL is %d", c->no_decay,
                    PS_NO_DECAY_ALL);
  ps_train_config resolved = *c;
  return resolve_config(&resolved, model);
}

static ps_status check_hosts(const ps_plan *plan, const ps_train_config *c) {
  const uint32_t n = c->hosts ? c->hosts->n : 1;
  if (n != plan->cfg.n_hosts)
    return ps__fail(PS_EINVAL, "the trainer is one of %u hosts, and the plan is for %u: plan anew",
                    n, plan->cfg.n_hosts);
  if (ps__hosts_wants_net(c->hosts) && plan->cfg.transport == PS_TRANSPORT_TCP)
    return ps__fail(PS_EINVAL, "gradients go over NCCL, and the plan counts no memory for it: plan "
                               "with the transport that ps_hosts_choose() gave");
  if (c->hosts && c->batch_fn)
    return ps__fail(PS_EINVAL, "several hosts read a dataset, of which each knows its part: "
                               "batch_fn must not be given");
  return PS_OK;
}

ps_status ps__trainer_check_config(const ps_plan *plan, const ps_train_config *c) {
  PS_TRY(ps_train_config_check(c, &plan->model->cfg));
  if (!c->dataset == !c->batch_fn)
    return ps__fail(PS_EINVAL, "exactly one of dataset and batch_fn must be given");
  PS_TRY(check_hosts(plan, c));
  if (!c->logits_fn != !plan->cfg.keep_logits)
    return ps__fail(PS_EINVAL, "logits_fn is %s, but the plan was made %s keep_logits: plan anew",
                    c->logits_fn ? "given" : "missing", plan->cfg.keep_logits ? "with" : "without");
  if (plan->at->n_devices > 1 && plan->hw.backend == PS_BACKEND_CUDA)
    PS_TRY(ps_hardware_gpus_check(plan->hw.device, plan->at->n_devices));
  if (c->optimizer != plan->cfg.optimizer)
    return ps__fail(PS_EINVAL, "the optimizer is %s, but the plan was made for %s: plan anew",
                    ps_optimizer_name((ps_optimizer)c->optimizer),
                    ps_optimizer_name((ps_optimizer)plan->cfg.optimizer));
  if (c->non_finite == PS_NON_FINITE_SKIP && !plan->cfg.clip)
    return ps__fail(PS_EINVAL,
                    "steps that are not finite are to be skipped, but the plan was made "
                    "for no clipping: plan with clip, so that updates wait for the norm");
  if (c->non_finite != PS_NON_FINITE_SKIP && (c->clip_norm > 0) != (plan->cfg.clip != 0))
    return ps__fail(PS_EINVAL, "clip_norm is %g, but the plan was made for %s: plan anew",
                    c->clip_norm, plan->cfg.clip ? "clipping" : "no clipping");
  if (c->lr_kind != PS_LR_KIND_CONSTANT && c->total_steps == 0)
    return ps__fail(PS_EINVAL, "total_steps must be given for a schedule that decays");
  if (c->trace_steps > plan->cfg.trace_steps)
    return ps__fail(PS_EINVAL, "trace_steps is %u: the plan counted memory for at most %u",
                    c->trace_steps, plan->cfg.trace_steps);
  if (c->trace_to && c->trace_to <= c->trace_from)
    return ps__fail(PS_EINVAL, "trace_to is %llu, but trace_from is %llu: give a later step, or 0",
                    (unsigned long long)c->trace_to, (unsigned long long)c->trace_from);
  if (c->adapter_dir && !plan->model->lora.rank)
    return ps__fail(PS_EINVAL,
                    "an adapter is given, but the plan was made without LoRA: plan with its rank, "
                    "alpha and targets (ps_adapter_read)");
  if (plan->cfg.one_document && (c->document_token >= 0 || c->document_end_token >= 0))
    return ps__fail(PS_EINVAL,
                    "a document token is given, but the plan was made for one document a "
                    "sequence: plan without one_document");
  if (plan->cfg.one_document && c->dataset && ps_dataset_marks_documents(c->dataset))
    return ps__fail(PS_EINVAL,
                    "the data's masks say where documents begin, but the plan was made for one "
                    "document a sequence: plan without one_document");
  char lack[PS__DOCUMENTS_TEXT];
  const char *why = ps__documents_lack(lack, plan, NULL);
  if (why)
    return ps__fail(PS_EINVAL, "%s", why);
  if (c->dataset)
    PS_TRY(ps_dataset_check(c->dataset, plan->cfg.seq_len));
  return c->val_dataset ? ps__validation_check(plan, c->val_dataset) : PS_OK;
}
