/* labels.c - a model's head and the data's labels: whether they go together. */
#include "train/trainer.h"

ps_status ps__trainer_match_head(const ps_trainer *t, ps_model_config *m) {
  const ps_model_config *plan = &t->plan->model->cfg;
  return plan->problem ? ps_model_config_score(m, plan->problem, plan->n_labels) : PS_OK;
}

ps_status ps__check_labels(const ps_plan *plan, const ps_dataset *ds, const char *what) {
  const ps_model_config *m = &plan->model->cfg;
  uint32_t n = 0;
  const uint32_t problem = ps_dataset_problem(ds, &n);
  if (m->problem == PS_PROBLEM_EMBEDDING || (problem == m->problem && n <= m->n_labels))
    return PS_OK;
  if (!problem)
    return ps__fail(PS_EINVAL,
                    "%s has no labels, and the model's head is for %s: write shards of labelled "
                    "texts with penstock data --problem %s",
                    what, ps_problem_name(m->problem), ps_problem_name(m->problem));
  return ps__fail(PS_EINVAL,
                  "%s has labels for %s, %u of them, and the plan is for %s with %u: plan for the "
                  "data's (ps_model_config_score)",
                  what, ps_problem_name(problem), n, ps_problem_name(m->problem), m->n_labels);
}
