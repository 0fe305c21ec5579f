/* problem.c - the names of what models are for. */
#include <penstock/model.h>

const char *ps_problem_name(uint32_t problem) {
  static const char *const names[] = {"language",   "single-label", "multi-label",
                                      "regression", "pairs",        "embedding"};
  return problem < PS_N_PROBLEMS ? names[problem] : NULL;
}

const char *ps_problem_figure(uint32_t problem) {
  return problem == PS_PROBLEM_LANGUAGE || problem >= PS_PROBLEM_EMBEDDING ? NULL
         : problem == PS_PROBLEM_REGRESSION                                ? "mean_absolute_error"
                                                                           : "accuracy";
}
