/* test_cuda_places.c - one process trains on N devices, N of 1 to 4, which take the visible GPUs in
 * turn. Losses, norms, parameters and state have the same bits for every N, whether units are cut
 * into pieces that GPUs send to each other or each device reads all from the host; also without
 * stream memory operations, and after a step that was given up. Arguments: "short" one recipe of
 * two; "cpu" the same on the CPU backend, which shows that the test holds. */
#include "cuda_trainings.h"
#ifdef PS_CUDA
void ps__cuda_share_gpu(bool share);
void ps__cuda_without_mem_ops(bool without);
#endif

enum { SEQUENCES = 7, MOST_DEVICES = 4 }; /* rounds: no multiple of 2, 3 or 4 */

typedef struct how {
  uint32_t recipe, n_devices;
  bool clip, pieces, stay; /* stay: the pieces of totals, on their devices */
} how;

static void decide(ps__spec *s, const void *how_) {
  const how *h = how_;
  s->n_devices = h->n_devices;
  s->param_lead = s->saved_lead = s->saved_lag = s->grad_lag = s->sum_lag = 1;
  memset(s->in_pieces, h->pieces && h->n_devices > 1, s->n_units);
  memset(s->grad_resident, h->stay && h->n_devices > 1, s->n_units);
}

static ps_plan *make_plan(how h) {
  return make_plan_of((ps_plan_config){PLAN_DEFAULTS, .recipe = h.recipe, .chunks_per_round = 1,
                                       .clip_norm = h.clip ? 0.5 : 0, .n_devices = h.n_devices},
                      SEQUENCES, decide, &h);
}

static void say(how h, const char *what) {
  printf("%s: %u devices, recipe %s, clipping %s, %s\n", what, h.n_devices,
         ps_recipe_name((ps_recipe)h.recipe), h.clip ? "on" : "off",
         h.stay     ? "in pieces, totals stay"
         : h.pieces ? "in pieces"
                    : "all from the host");
}

static void test_devices(how h) {
  h.n_devices = 1;
  ps_plan *plan = make_plan(h);
  const outcome whole = train(plan, N_STEPS, 0), cut = train(plan, FAILS_AT, 0);
  ps_plan_destroy(plan);
  CHECK(whole.parameters != cut.parameters && whole.state && whole.loss[0] != whole.loss[1]);
  for (h.n_devices = 2; h.n_devices <= MOST_DEVICES; h.n_devices++)
    for (int way = 0; way < 3; way++) {
      h.pieces = way > 0;
      h.stay = way > 1;
      plan = make_plan(h);
      const outcome got = train(plan, N_STEPS, 0);
      const bool ok = same(&got, &whole);
      if (!ok)
        say(h, "not as one device");
      const outcome stopped = train(plan, FAILS_AT, 3);
      const bool kept = same(&stopped, &cut);
      if (!kept)
        say(h, "after an error");
      CHECK(ok && kept);
      ps_plan_destroy(plan);
    }
  printf("ok recipe %s, clipping %s: 1 to %d devices give the same bits, also after a step that is "
         "given up\n",
         ps_recipe_name((ps_recipe)h.recipe), h.clip ? "on" : "off", MOST_DEVICES);
}

static void all(bool brief, bool cpu) {
#ifdef PS_CUDA
  ps__cuda_share_gpu(true);
#endif
  /* attention on a GPU is in bf16 */
  for (int clip = 0; clip < 2; clip++)
    test_devices((how){.recipe = PS_RECIPE_BF16, .clip = clip});
  if (!brief)
    test_devices((how){.recipe = PS_RECIPE_FP32_MASTER, .clip = true});
#ifdef PS_CUDA
  if (!cpu) {
    ps__cuda_without_mem_ops(true);
    test_devices((how){.recipe = PS_RECIPE_BF16, .clip = true});
  }
#else
  (void)cpu;
#endif
}

int main(int argc, char **argv) { return run_trainings(argc, argv, all); }
