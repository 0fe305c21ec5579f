/* config.c - the defaults of a training's configuration, and what it may not be. */
#include "train/trainer.h"
#include <math.h>
#include <string.h>

void ps_train_config_init(ps_train_config *cfg) {
  memset(cfg, 0, sizeof *cfg);
  cfg->struct_bytes = sizeof *cfg;
  cfg->lr = cfg->beta1 = cfg->beta2 = cfg->eps = cfg->momentum = cfg->weight_decay = NAN;
  cfg->max_skips = 10;
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
    return ps__fail(PS_EINVAL,
                    "%s wsd needs %s: how many of the last steps "
                    "lower the learning rate",
                    ps__field("lr_kind"), ps__field("decay_steps"));
  if (c->lr_kind != PS_LR_KIND_WSD && c->decay_steps)
    return ps__fail(PS_EINVAL, "%s %llu is for %s wsd alone: leave it out, or choose wsd",
                    ps__field("decay_steps"), (unsigned long long)c->decay_steps,
                    ps__field("lr_kind"));
  if (c->lr_kind == PS_LR_KIND_CONSTANT && c->min_lr > 0)
    return ps__fail(PS_EINVAL,
                    "%s %g is never reached by %s constant: leave it out, or "
                    "choose another schedule",
                    ps__field("min_lr"), c->min_lr, ps__field("lr_kind"));
  if (c->total_steps && c->decay_steps > c->total_steps)
    return ps__fail(PS_EINVAL, "%s %llu is more than the run's %llu steps: lower it",
                    ps__field("decay_steps"), (unsigned long long)c->decay_steps,
                    (unsigned long long)c->total_steps);
  if (c->total_steps && c->warmup_steps > c->total_steps)
    ps__log(PS_LOG_WARN,
            "%s %llu is more than the run's %llu steps: the learning rate reaches only "
            "%g of %s",
            ps__field("warmup_steps"), (unsigned long long)c->warmup_steps,
            (unsigned long long)c->total_steps,
            (double)c->total_steps / (double)(c->warmup_steps + 1), ps__field("lr"));
  return PS_OK;
}

/* Checks the hyperparameters and fills in the optimizer's defaults. */
ps_status ps__trainer_resolve_hypers(ps_train_config *c, uint32_t optimizer) {
  double h[PS_N_HYPERS] = {[PS_HYPER_LR] = c->lr,
                           [PS_HYPER_BETA1] = c->beta1,
                           [PS_HYPER_BETA2] = c->beta2,
                           [PS_HYPER_EPS] = c->eps,
                           [PS_HYPER_MOMENTUM] = c->momentum,
                           [PS_HYPER_NESTEROV] = c->nesterov ? 1 : NAN,
                           [PS_HYPER_WEIGHT_DECAY] = c->weight_decay};
  if (optimizer >= PS_N_OPTIMIZERS)
    return ps__fail(PS_EINVAL, "optimizer %u is unknown: use " PS__OPTIMIZER_NAMES, optimizer);
  PS_TRY(ps__hypers_resolve((ps_optimizer)optimizer, h));
  c->lr = h[PS_HYPER_LR];
  c->beta1 = h[PS_HYPER_BETA1];
  c->beta2 = h[PS_HYPER_BETA2];
  c->eps = h[PS_HYPER_EPS];
  c->momentum = h[PS_HYPER_MOMENTUM];
  c->weight_decay = h[PS_HYPER_WEIGHT_DECAY];
  return PS_OK;
}

ps_status ps_train_config_check(const ps_train_config *cfg, ps_optimizer optimizer) {
  if (!cfg)
    return ps__fail(PS_EINVAL, "ps_train_config_check: cfg must be given");
  if (cfg->struct_bytes != sizeof *cfg)
    return ps__fail(PS_EINVAL, "ps_train_config.struct_bytes is %u, %zu expected",
                    cfg->struct_bytes, sizeof *cfg);
  if (cfg->no_decay > PS_NO_DECAY_ALL)
    return ps__fail(PS_EINVAL, "no_decay is %u: PS_NO_DECAY_ALL is %d", cfg->no_decay,
                    PS_NO_DECAY_ALL);
  ps_train_config c = *cfg;
  PS_TRY(ps__trainer_resolve_hypers(&c, optimizer));
  if (!(c.lr >= 0) || !isfinite(c.lr) || !(c.min_lr >= 0) || c.min_lr > c.lr)
    return ps__fail(
        PS_EINVAL, "%s %g and %s %g must be finite and not negative, and %s not above %s",
        ps__field("lr"), c.lr, ps__field("min_lr"), c.min_lr, ps__field("min_lr"), ps__field("lr"));
  if (c.replan >= PS_N_REPLANS)
    return ps__fail(PS_EINVAL, "replan is %u: ps_replan ends at %d", c.replan, PS_N_REPLANS - 1);
  return check_schedule(&c);
}

ps_status ps__trainer_check_config(const ps_plan *plan, const ps_train_config *c) {
  PS_TRY(ps_train_config_check(c, (ps_optimizer)plan->cfg.optimizer));
  if (!c->dataset == !c->batch_fn)
    return ps__fail(PS_EINVAL, "exactly one of dataset and batch_fn must be given");
  if (plan->cfg.n_hosts > 1 && !plan->cfg.hosts)
    return ps__fail(PS_EINVAL, "the plan is for %u hosts that are not here: plan with hosts",
                    plan->cfg.n_hosts);
  if (plan->cfg.hosts && c->batch_fn)
    return ps__fail(PS_EINVAL, "several hosts read a dataset, of which each knows its part: "
                               "batch_fn must not be given");
  if (plan->at->n_devices > 1 && plan->hw.backend == PS_BACKEND_CUDA)
    PS_TRY(ps_hardware_gpus_check(plan->hw.device, plan->at->n_devices));
  if (c->lr_kind != PS_LR_KIND_CONSTANT && c->total_steps == 0)
    return ps__fail(PS_EINVAL, "total_steps must be given for a schedule that decays");
  if (ps__clips_by_previous(plan) && c->total_steps == 1)
    return ps__fail(PS_EINVAL,
                    "%s previous clips a step by the norm of the step before, and a run of 1 step "
                    "has none: raise %s, or leave %s out",
                    ps__field("clip_by"), ps__field("total_steps"), ps__field("clip_by"));
  if (c->trace_to && c->trace_to <= c->trace_from)
    return ps__fail(PS_EINVAL, "trace_to is %llu, but trace_from is %llu: give a later step, or 0",
                    (unsigned long long)c->trace_to, (unsigned long long)c->trace_from);
  if (c->adapter_dir && !plan->model->lora.rank)
    return ps__fail(PS_EINVAL,
                    "an adapter is given, but the plan was made without LoRA: plan with its rank, "
                    "alpha and targets (ps_adapter_read)");
  if (!c->disk != (plan->at->disk == PS__NO_PLACE))
    return ps__fail(PS_EINVAL,
                    c->disk ? "%s is given, but the plan has no disk: plan with %s"
                            : "the plan has optimizer state on a disk: give %s, or plan without %s",
                    ps__field("disk"), ps__field("disk_mem_bytes"));
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
  if (c->dataset)
    PS_TRY(ps__check_labels(plan, c->dataset, "the data"));
  return c->val_dataset ? ps__validation_check(plan, c->val_dataset) : PS_OK;
}
