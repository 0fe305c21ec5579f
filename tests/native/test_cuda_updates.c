/* test_cuda_updates.c - where a unit is updated makes no difference on a GPU: on the host, on the
 * device with all its state, on the device with state that comes and goes. Every optimizer gives
 * the same losses, norms, parameters and state, and after a step that was given up those of the
 * step before: work that was submitted runs on stale data and must leave no trace on the host.
 * Arguments: "short" two of four cases of each optimizer; "cpu" the same on the CPU backend, which
 * shows that the test holds. */
#include "cuda_trainings.h"

enum { SEQUENCES = 6, N_FAILURES = 2 };

typedef enum variant {
  AT_HOME,
  IN_PARTS,
  RESIDENT,
  JUST_IN_TIME,
  AHEAD,
  PARAMETERS_STAY,
  TOTALS_STAY,
  MIXED,
  N_VARIANTS
} variant;
static const char *const variant_name[] = {
    "on the host",
    "on the host in parts",
    "resident",
    "streamed, just in time",
    "streamed, ahead",
    "streamed, parameters stay",
    "streamed, totals stay",
    "every other streamed and the others in parts, embedding on the host"};

static void decide(ps__spec *s, const void *how) {
  const variant which = *(const variant *)how;
  const bool split = s->clip && ps__optimizers[s->optimizer].splits;
  if (which == IN_PARTS && split)
    memset(s->update_split, 1, s->n_units);
  const bool streamed =
      which == JUST_IN_TIME || which == AHEAD || which == PARAMETERS_STAY || which == TOTALS_STAY;
  s->param_lead = s->saved_lead = s->saved_lag = s->grad_lag = s->sum_lag =
      which == JUST_IN_TIME ? 0 : 2;
  memset(s->param_resident, which == RESIDENT || which == PARAMETERS_STAY, s->n_units);
  memset(s->grad_resident, which == RESIDENT || which == PARAMETERS_STAY || which == TOTALS_STAY,
         s->n_units);
  memset(s->update_resident, which == RESIDENT, s->n_units);
  memset(s->update_streamed, streamed, s->n_units);
  if (which != MIXED)
    return;
  s->embed_on_host = true;
  for (uint32_t u = 1; u < s->n_units; u++) {
    s->update_streamed[u] = u % 2;
    s->update_split[u] = split && u % 2 == 0;
  }
}

static ps_plan *make_plan(ps_optimizer optimizer, uint32_t recipe, bool clip, variant which) {
  const ps_plan_config cfg = {PLAN_DEFAULTS, .recipe = recipe, .optimizer = optimizer,
                              .chunks_per_round = 2, .clip_norm = clip ? 0.5 : 0};
  return make_plan_of(cfg, SEQUENCES, decide, &which);
}

static void test_variants(ps_optimizer optimizer, uint32_t recipe, bool clip) {
  outcome whole, cut;
  for (variant which = 0; which < N_VARIANTS; which++) {
    ps_plan *plan = make_plan(optimizer, recipe, clip, which);
    const outcome got = train(plan, N_STEPS, 0);
    if (which == AT_HOME)
      whole = got, cut = train(plan, FAILS_AT, 0);
    const bool ok = same(&got, &whole);
    if (!ok)
      printf("%s, %s, recipe %s, clipping %s\n", variant_name[which], ps_optimizer_name(optimizer),
             ps_recipe_name((ps_recipe)recipe), clip ? "on" : "off");
    CHECK(ok && whole.parameters != cut.parameters);
    for (int i = 0; i < N_FAILURES; i++) {
      const outcome stopped = train(plan, FAILS_AT, 1 + 2 * (uint64_t)i);
      const bool kept = same(&stopped, &cut);
      if (!kept)
        printf("after an error: %s, %s, recipe %s, clipping %s\n", variant_name[which],
               ps_optimizer_name(optimizer), ps_recipe_name((ps_recipe)recipe),
               clip ? "on" : "off");
      CHECK(kept);
    }
    ps_plan_destroy(plan);
  }
  printf("ok %s, recipe %s, clipping %s: the same bits wherever updates run, also after a step "
         "that is given up\n",
         ps_optimizer_name(optimizer), ps_recipe_name((ps_recipe)recipe), clip ? "on" : "off");
}

static void all(bool brief, bool cpu) {
  (void)cpu;
  /* attention on a GPU is in bf16 */
  static const uint32_t recipes[] = {PS_RECIPE_BF16, PS_RECIPE_FP32_MASTER};
  for (int optimizer = 0; optimizer < PS_N_OPTIMIZERS; optimizer++)
    for (int i = 0; i < 4; i++)
      if (!brief || i == 1 || i == 2)
        test_variants((ps_optimizer)optimizer, recipes[i / 2], i & 1);
}

int main(int argc, char **argv) { return run_trainings(argc, argv, all); }
