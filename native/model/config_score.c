/* config_score.c - the `score` of classifiers and reward models in config.json: read from
 * architectures, problem_type and id2label, and written there in place of a language model's. */
#include "core/core.h"
#include "model/family.h"
#include "model/model.h"
#include <stdio.h>
#include <string.h>

static const char LANGUAGE[] = "ForCausalLM", CLASSIFIER[] = "ForSequenceClassification";
/* problem_type, by ps_problem; NULL: it has none */
static const char *const type_of[PS_N_PROBLEMS] = {
    [PS_PROBLEM_SINGLE_LABEL] = "single_label_classification",
    [PS_PROBLEM_MULTI_LABEL] = "multi_label_classification",
    [PS_PROBLEM_REGRESSION] = "regression"};

const char *ps__score_class(const ps__family *family, char name[PS__CLASS_BYTES]) {
  const char *stem = family->classifier_of ? family->classifier_of : family->architecture,
             *end = strstr(stem, LANGUAGE);
  if (!*stem)
    return NULL;
  const int n = end ? (int)(end - stem) : (int)strlen(stem);
  snprintf(name, PS__CLASS_BYTES, "%.*s%s", n, stem, CLASSIFIER);
  return name;
}

/* Whether architectures of @config names the family's classifier. */
static bool is_classifier(const ps__json *config, const ps__family *family) {
  char name[PS__CLASS_BYTES];
  const ps__json *a = ps__config_field(config, "architectures");
  const char *class = ps__json_string(a ? ps__json_at(a, 0) : NULL, NULL);
  return class && ps__score_class(family, name) && !strcmp(class, name);
}

/* ---- range ----------------------------------------------------------------------------------- */

static ps_status check_labels(const char *name, uint32_t problem, uint32_t n) {
  const uint32_t least = problem == PS_PROBLEM_LANGUAGE || problem == PS_PROBLEM_EMBEDDING ? 0 : 1,
                 most = problem == PS_PROBLEM_SINGLE_LABEL  ? PS_MAX_LABELS
                        : problem == PS_PROBLEM_MULTI_LABEL ? PS_MAX_LABEL_BITS
                                                            : least;
  if (n >= least && n <= most)
    return PS_OK;
  return ps__fail(PS_EINVAL, "%s: %u labels: %s has %u to %u", name, n, ps_problem_name(problem),
                  least, most);
}

ps_status ps__score_check(const ps_model_config *c, const char *name) {
  if (c->problem >= PS_N_PROBLEMS)
    return ps__fail(PS_EINVAL, "%s: problem is %u: ps_problem ends at %d", name, c->problem,
                    PS_N_PROBLEMS - 1);
  PS_TRY(check_labels(name, c->problem, c->n_labels));
  if (c->problem &&
      (c->tied_embeddings || c->multimodal || c->logit_softcap != 0 || c->logit_scale != 0))
    return ps__fail(PS_EINVAL,
                    "%s: the problem is %s, whose head is no table of the vocabulary: "
                    "tied_embeddings, multimodal, logit_softcap and logit_scale must be 0",
                    name, ps_problem_name(c->problem));
  return PS_OK;
}

static void take_head(ps_model_config *c, uint32_t problem, uint32_t n_labels) {
  c->problem = problem;
  c->n_labels = n_labels;
  c->tied_embeddings = 0;
  c->logit_softcap = c->logit_scale = 0;
}

/* What a `score` of n labels may be for: of one, a number or a reward; of several, labels. */
static bool may_be(const ps_model_config *c, uint32_t problem, uint32_t n) {
  const bool one = problem == PS_PROBLEM_REGRESSION || problem == PS_PROBLEM_PAIRS,
             was_one = c->problem == PS_PROBLEM_REGRESSION || c->problem == PS_PROBLEM_PAIRS;
  return one == was_one && (one || problem == c->problem || c->n_labels > 1) && n <= c->n_labels;
}

ps_status ps_model_config_score(ps_model_config *c, uint32_t problem, uint32_t n_labels) {
  char name[PS__CLASS_BYTES];
  const ps__family *family = c ? ps__family_at(c->family) : NULL;
  if (!family || problem == PS_PROBLEM_LANGUAGE || problem >= PS_N_PROBLEMS)
    return ps__fail(PS_EINVAL, "ps_model_config_score: a model and a problem must be given");
  const bool embeds = problem == PS_PROBLEM_EMBEDDING;
  PS_TRY(check_labels("the head", problem, n_labels));
  if (c->multimodal)
    return ps__fail(PS_EINVAL,
                    "the model is a vision-language model, whose text model alone would get a head "
                    "for %s: save the text model first, and give that",
                    ps_problem_name(problem));
  if (!embeds && !ps__score_class(family, name))
    return ps__fail(
        PS_EINVAL,
        "model_type \"%s\" has no class for sequence classification in transformers, so "
        "it has no head for %s",
        family->model_type, ps_problem_name(problem));
  if (!embeds && ps__has_score(c) && !may_be(c, problem, n_labels))
    return ps__fail(PS_EINVAL,
                    "the model has a head for %s with %u label%s, and the data is for %s with %u: "
                    "give data of the model's labels, or the language model that it was made of",
                    ps_problem_name(c->problem), c->n_labels, c->n_labels == 1 ? "" : "s",
                    ps_problem_name(problem), n_labels);
  take_head(c, problem, ps__has_score(c) && !embeds ? c->n_labels : n_labels);
  return check_labels("the head", problem, c->n_labels);
}

bool ps__is_idle_head(const ps_model_config *c, const char *name) {
  return (c->problem && !strcmp(name, "lm_head.weight")) ||
         (c->problem == PS_PROBLEM_EMBEDDING && !strcmp(name, PS__SCORE));
}

/* ---- reading --------------------------------------------------------------------------------- */

ps_status ps__score_read(const ps__config_reader *r, ps_model_config *c) {
  const ps__json *labels = ps__config_field(r->j, "id2label"),
                 *type = ps__config_field(r->j, "problem_type");
  const char *name = ps__json_string(type, NULL);
  uint32_t n = labels ? (uint32_t)ps__json_length(labels) : 2, problem = 0;
  if (r->outer || !is_classifier(r->j, ps__family_at(c->family)))
    return PS_OK;
  if (!labels)
    PS_TRY(ps__config_uint(r, r->j, "num_labels", 2, &n));
  for (uint32_t i = 1; name && i < PS_N_PROBLEMS; i++)
    if (type_of[i] && !strcmp(type_of[i], name))
      problem = i;
  if (type && !problem)
    return ps__fail(PS_EFORMAT,
                    "%s: problem_type is \"%.60s\": it must be regression, "
                    "single_label_classification, multi_label_classification or null",
                    r->path, name ? name : ps__config_kind(type));
  take_head(c, problem ? problem : n == 1 ? PS_PROBLEM_REGRESSION : PS_PROBLEM_SINGLE_LABEL, n);
  return PS_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

bool ps__score_is_new(const ps_model_config *c, const ps__json *config) {
  return ps__has_score(c) && !is_classifier(config, ps__family_at(c->family));
}

bool ps__score_key(const char *key) {
  static const char *const keys[] = {"architectures", "id2label", "label2id", "problem_type",
                                     "num_labels"};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
    if (!strcmp(key, keys[i]))
      return true;
  return false;
}

void ps__score_write(ps__jsonw *w, const ps_model_config *c) {
  char name[PS__CLASS_BYTES], key[16], label[24];
  ps__jsonw_array(w, "architectures");
  ps__jsonw_string(w, NULL, ps__score_class(ps__family_at(c->family), name));
  ps__jsonw_end(w);
  for (int back = 0; back < 2; back++) {
    ps__jsonw_object(w, back ? "label2id" : "id2label");
    for (uint32_t i = 0; i < c->n_labels; i++) {
      snprintf(key, sizeof key, "%u", i);
      snprintf(label, sizeof label, "LABEL_%u", i);
      if (back)
        ps__jsonw_uint(w, label, i);
      else
        ps__jsonw_string(w, key, label);
    }
    ps__jsonw_end(w);
  }
  if (type_of[c->problem])
    ps__jsonw_string(w, "problem_type", type_of[c->problem]);
}
