/* lora.c - the options of LoRA: what they leave out follows from the adapter or has a default. */
#include "cli/cli.h"
#include <math.h>

static int differs(const cli_job *j, const char *option, double given, double has) {
  return cli_fail(CLI_REFUSED, "--%s is %g, but the adapter %s has %g: leave --%s out", option,
                  given, j->adapter, has, option);
}

static bool has_all(uint32_t targets, uint32_t wanted) { return (targets & wanted) == wanted; }

/* Every projection of a block, apart or fused. */
static bool all_linear(uint32_t t) {
  return (has_all(t, PS_LORA_Q_PROJ | PS_LORA_K_PROJ | PS_LORA_V_PROJ) || t & PS_LORA_QKV_PROJ) &&
         (has_all(t, PS_LORA_GATE_PROJ | PS_LORA_UP_PROJ) || t & PS_LORA_GATE_UP_PROJ) &&
         has_all(t, PS_LORA_O_PROJ | PS_LORA_DOWN_PROJ);
}

static int check_given(const cli_job *j, const ps_lora *has) {
  uint32_t targets = has->targets;
  if (j->lora_rank && j->lora_rank != has->rank)
    return differs(j, "lora-rank", (double)j->lora_rank, has->rank);
  if (!isnan(j->lora_alpha) && j->lora_alpha != has->alpha)
    return differs(j, "lora-alpha", j->lora_alpha, has->alpha);
  if (j->lora_rslora && !has->rslora)
    return cli_fail(
        CLI_REFUSED,
        "--lora-rslora is given, but the adapter %s was trained without it: leave it out",
        j->adapter);
  if (j->lora_targets && ps_lora_targets_parse(&targets, j->lora_targets) != PS_OK)
    return cli_fail_status(PS_EINVAL, true);
  if (targets != has->targets && !(targets == PS_LORA_ALL && all_linear(has->targets)))
    return cli_fail(CLI_REFUSED,
                    "--lora-targets %s differs from the adapter %s: leave --lora-targets out",
                    j->lora_targets, j->adapter);
  return CLI_OK;
}

static int of_adapter(cli_job *j) {
  ps_lora has;
  const ps_status st = ps_adapter_read(&has, j->adapter);
  const int code = st == PS_OK ? check_given(j, &has) : cli_fail_given("--adapter", st);
  if (code == CLI_OK)
    j->lora = has;
  return code;
}

static int of_options(cli_job *j) {
  j->lora = (ps_lora){.rank = (uint32_t)j->lora_rank,
                      .rslora = j->lora_rslora,
                      .alpha = isnan(j->lora_alpha) ? 2.0 * (double)j->lora_rank : j->lora_alpha};
  const ps_status st =
      ps_lora_targets_parse(&j->lora.targets, j->lora_targets ? j->lora_targets : "all-linear");
  return st == PS_OK ? CLI_OK : cli_fail_status(st, true);
}

int cli_lora_resolve(cli_job *j) {
  j->lora = (ps_lora){0};
  if (!j->adapter && !j->lora_rank)
    return isnan(j->lora_alpha) && !j->lora_targets && !j->lora_rslora
               ? CLI_OK
               : cli_fail(CLI_REFUSED, "--lora-%s needs --lora-rank: give the adapters' rank",
                          j->lora_targets  ? "targets"
                          : j->lora_rslora ? "rslora"
                                           : "alpha");
  const int code = j->adapter ? of_adapter(j) : of_options(j);
  if (code == CLI_OK && !j->recipe_given)
    j->recipe = PS_RECIPE_FP32_MASTER;
  if (code == CLI_OK && !j->save_dtype_given)
    j->save_dtype = PS_F32;
  return code;
}
