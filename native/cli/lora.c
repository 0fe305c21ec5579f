/* lora.c - the options of LoRA: what they leave out follows from the adapter or has a default. */
#include "cli/cli.h"
#include <math.h>

static int differs(const cli_job *j, const char *option, double given, double has) {
  return cli_fail(CLI_REFUSED, "--%s is %g, but the adapter %s has %g: leave --%s out", option,
                  given, j->train_config.adapter_dir, has, option);
}

static int check_given(const cli_job *j, const ps_lora *has) {
  uint32_t targets = has->targets;
  if (j->plan_config.lora.rank && j->plan_config.lora.rank != has->rank)
    return differs(j, "lora-rank", (double)j->plan_config.lora.rank, has->rank);
  if (!isnan(j->plan_config.lora.alpha) && j->plan_config.lora.alpha != has->alpha)
    return differs(j, "lora-alpha", j->plan_config.lora.alpha, has->alpha);
  if (j->plan_config.lora.rslora && !has->rslora)
    return cli_fail(
        CLI_REFUSED,
        "--lora-rslora is given, but the adapter %s was trained without it: leave it out",
        j->train_config.adapter_dir);
  ps_status st = j->lora_targets ? ps_lora_targets_parse(&targets, j->lora_targets) : PS_OK;
  if (st == PS_OK && targets == PS_LORA_ALL)
    st = ps_lora_targets_all(&targets, &j->config);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  if (targets != has->targets)
    return cli_fail(CLI_REFUSED,
                    "--lora-targets %s differs from the adapter %s: leave --lora-targets out",
                    j->lora_targets, j->train_config.adapter_dir);
  return CLI_OK;
}

static int of_adapter(cli_job *j) {
  ps_lora has;
  const ps_status st = ps_adapter_read(&has, j->train_config.adapter_dir);
  const int code = st == PS_OK ? check_given(j, &has) : cli_fail_given("--adapter", st);
  has.base = j->plan_config.lora.base;
  if (code == CLI_OK)
    j->plan_config.lora = has;
  return code;
}

static int of_options(cli_job *j) {
  ps_lora *l = &j->plan_config.lora;
  if (!l->rank && (!isnan(l->alpha) || j->lora_targets || l->rslora))
    return cli_fail(CLI_REFUSED, "--lora-%s needs --lora-rank: give the adapters' rank",
                    j->lora_targets ? "targets"
                    : l->rslora     ? "rslora"
                                    : "alpha");
  return !j->lora_targets || ps_lora_targets_parse(&l->targets, j->lora_targets) == PS_OK
             ? CLI_OK
             : cli_fail_status(PS_EINVAL, true);
}

int cli_lora_resolve(cli_job *j) {
  const int code = j->train_config.adapter_dir ? of_adapter(j) : of_options(j);
  if (code != CLI_OK)
    return code;
  ps_plan_config_resolve(&j->plan_config);
  if (j->save_dtype == PS_DEFAULT)
    j->save_dtype = j->plan_config.lora.rank ? PS_F32 : PS_BF16;
  if (j->save_dtype == CLI_MXFP4 && j->plan_config.lora.rank)
    return cli_fail(CLI_REFUSED,
                    "--save-dtype mxfp4 is for a whole model: adapters are saved in bf16 or fp32");
  const ps_status st = ps_model_config_saves_as(&j->config, cli_save_dtype(j));
  return st == PS_OK ? CLI_OK : cli_fail_given("--save-dtype", st);
}
