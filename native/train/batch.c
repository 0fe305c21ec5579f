/* batch.c - the batch of a step: reads it, checks it, and fills in what the device gets. */
#include "train/trainer.h"
#include <math.h>
#include <string.h>

enum { NOT_COUNTED = -1, TORCH_NOT_COUNTED = -100 /* ignore_index of torch.nn.CrossEntropyLoss */ };

void ps__batch_uncount(const ps_trainer *t, uint64_t i) {
  const uint64_t s = t->plan->cfg.seq_len;
  for (uint64_t k = i * s; k < (i + 1) * s; k++)
    t->targets[k] = NOT_COUNTED;
}

/* A plan that trains nothing measures the data. A pass over it begins with a step, and counts each
 * sequence once: its last step reads what it lacks from the data's beginning, and does not count
 * it. A mix has no end. Gives the place in the order of reading of sequence @pos of the steps. */
static uint64_t place_of(const ps_trainer *t, uint64_t pos, bool *counts) {
  const uint64_t of_step = t->plan->layout.n_sequences * t->plan->cfg.n_hosts,
                 n = ps_dataset_n_sequences(t->cfg.dataset, t->plan->cfg.seq_len),
                 of_pass = (n + of_step - 1) / of_step * of_step;
  *counts = true;
  if (!t->plan->cfg.forward_only || ps_dataset_n_weighted(t->cfg.dataset))
    return pos;
  *counts = pos % of_pass < n;
  return pos / of_pass * n + pos % of_pass % n;
}

static ps_status read_dataset(ps_trainer *t, uint64_t step, uint64_t n) {
  /* of the step's sequences the first are rank 0's */
  const uint64_t s = t->plan->cfg.seq_len,
                 first = ps_plan_sequences_before(t->plan, step) + t->rank * n;
  for (uint64_t i = 0; i < n; i++) {
    bool counts;
    const uint64_t pos = place_of(t, first + i, &counts),
                   window = ps_dataset_at(t->cfg.dataset, s, pos, t->cfg.seed, (int)t->cfg.shuffle);
    PS_TRY(ps_dataset_read(t->cfg.dataset, s, window, t->tokens + i * s, t->targets + i * s,
                           t->begins + i * s));
    if (!counts)
      ps__batch_uncount(t, i);
  }
  return PS_OK;
}

/* Whether @target is one of the model's problem (ps_problem), at token @i of sequences of @s. */
static bool fits(const ps_model_config *m, const int32_t *target, uint64_t i, uint64_t s) {
  const int64_t t = target[i], at = (int64_t)(i % s), other = t > 0 ? at - t : at - 1 - t;
  float number;
  switch (m->problem) {
  case PS_PROBLEM_SINGLE_LABEL: return t >= 0 && t < m->n_labels;
  case PS_PROBLEM_MULTI_LABEL: return t >= 0 && t >> m->n_labels == 0;
  case PS_PROBLEM_REGRESSION: memcpy(&number, &target[i], sizeof number); return isfinite(number);
  default:
    return t != 0 && other >= 0 && other < (int64_t)s && target[(int64_t)i + other - at] == -1 - t;
  }
}

/* As check_batch(), of a model with another head than a language model's. */
static ps_status check_scored(const ps_trainer *t, const char *what, uint64_t n, uint64_t *valid) {
  const ps_model_config *m = &t->plan->model->cfg;
  const uint64_t s = t->plan->cfg.seq_len;
  *valid = 0;
  for (uint64_t i = 0; i < n; i++) {
    const int32_t token = t->tokens[i], target = t->targets[i];
    if (token < 0 || (uint32_t)token >= m->vocab_size)
      return ps__fail(
          PS_EFORMAT, "%s, sequence %llu, position %llu: token %d is no id of the vocabulary of %u",
          what, (unsigned long long)(i / s), (unsigned long long)(i % s), token, m->vocab_size);
    if (m->problem == PS_PROBLEM_EMBEDDING)
      t->targets[i] = NOT_COUNTED;
    else if (target != NOT_COUNTED && !fits(m, t->targets, i, s))
      return ps__fail(PS_EFORMAT,
                      "%s, sequence %llu, position %llu: target %d is none of %s with %u label%s: "
                      "-1 says that there is none",
                      what, (unsigned long long)(i / s), (unsigned long long)(i % s), target,
                      ps_problem_name(m->problem), m->n_labels, m->n_labels == 1 ? "" : "s");
    else
      *valid += target != NOT_COUNTED && (m->problem != PS_PROBLEM_PAIRS || target > 0);
  }
  return PS_OK;
}

/* Checks the first @n tokens and targets, and brings the targets that are not counted to the one
 * value that kernels know. @what: the batch's name. */
static ps_status check_batch(const ps_trainer *t, const char *what, uint64_t n, uint64_t *valid) {
  const uint64_t s = t->plan->cfg.seq_len;
  const int32_t vocab = (int32_t)t->plan->model->cfg.vocab_size;
  if (t->plan->model->cfg.problem)
    return check_scored(t, what, n, valid);
  *valid = 0;
  for (uint64_t i = 0; i < n; i++) {
    const int32_t token = t->tokens[i],
                  target = t->targets[i] == TORCH_NOT_COUNTED ? NOT_COUNTED : t->targets[i];
    if (token < 0 || token >= vocab)
      return ps__fail(PS_EFORMAT,
                      "%s, sequence %llu, position %llu: token %d is no id of the vocabulary of %d",
                      what, (unsigned long long)(i / s), (unsigned long long)(i % s), token, vocab);
    if (target < NOT_COUNTED || target >= vocab)
      return ps__fail(PS_EFORMAT,
                      "%s, sequence %llu, position %llu: target %d is no id of the vocabulary of "
                      "%d: -1 or -100 says that a target is not counted",
                      what, (unsigned long long)(i / s), (unsigned long long)(i % s), target,
                      vocab);
    t->targets[i] = target;
    *valid += target >= 0;
  }
  return PS_OK;
}

/* A document begins at token @i of the batch: at its sequence's start, where a mask says so, at a
 * document token, and after a document end token. */
static bool document_begins(const ps_trainer *t, uint64_t i) {
  return i % t->plan->cfg.seq_len == 0 || t->begins[i] ||
         t->tokens[i] == t->plan->cfg.document_token ||
         t->tokens[i - 1] == t->plan->cfg.document_end_token;
}

/* Where each token's document begins, in rows of its group. */
static void fill_block(const ps_trainer *t, const ps__chunk *k, float scale, char *block) {
  const ps__batch_chunk at = ps__batch_chunk_of(k->n_tokens);
  int32_t *doc = (int32_t *)(void *)(block + at.doc_start),
          *pos = (int32_t *)(void *)(block + at.position);
  memcpy(block + at.tokens, t->tokens + k->first_token, 4ull * k->n_tokens);
  memcpy(block + at.targets, t->targets + k->first_token, 4ull * k->n_tokens);
  memcpy(block + at.scale, &scale, sizeof scale);
  int64_t start = k->row0;
  /* a slice: the document may have begun before */
  for (uint64_t i = k->first_token; k->row0 && i-- > k->first_token - k->row0;) {
    if (!document_begins(t, i))
      continue;
    start = (int64_t)(i - (k->first_token - k->row0));
    break;
  }
  for (uint32_t i = 0; i < k->n_tokens; i++) {
    if (document_begins(t, k->first_token + i))
      start = (int64_t)k->row0 + i;
    doc[i] = (int32_t)start;
    pos[i] = (int32_t)((int64_t)k->row0 + i - start);
  }
}

void ps__batch_scale(const ps__step *s, uint64_t valid, void *batch) {
  const float scale = valid ? (float)(1.0 / (double)valid) : 0;
  for (uint32_t i = 0; i < s->layout->n_chunks; i++)
    memcpy((char *)batch + s->batch_offset[i] +
               ps__batch_chunk_of(s->layout->chunk[i].n_tokens).scale,
           &scale, sizeof scale);
}

void ps__batch_fill_part(const ps_trainer *t, const ps__step *s, uint64_t first, uint64_t valid,
                         void *batch) {
  const float scale = valid ? (float)(1.0 / (double)valid) : 0;
  for (uint32_t i = 0; i < s->layout->n_chunks; i++) {
    ps__chunk k = s->layout->chunk[i];
    k.first_token += first;
    fill_block(t, &k, scale, (char *)batch + s->batch_offset[i]);
  }
}

ps_status ps__batch_fill(const ps_trainer *t, const char *what, const ps__step *s, void *batch,
                         uint64_t *valid) {
  PS_TRY(check_batch(t, what, s->layout->n_tokens, valid));
  ps__batch_fill_part(t, s, 0, *valid, batch);
  return PS_OK;
}

static void name_step(const ps_trainer *t, uint64_t run_step, char what[32]) {
  snprintf(what, 32, "step %llu", /* as in the log */
           (unsigned long long)(t->cfg.first_step + run_step + 1));
}

static ps_status read_batch(ps_trainer *t, uint64_t run_step, const ps__layout *l) {
  const uint64_t step = t->cfg.first_step + run_step;
  return t->cfg.batch_fn
             ? t->cfg.batch_fn(t->cfg.batch_user, step, t->tokens, t->targets, l->n_tokens)
             : read_dataset(t, step, l->n_sequences);
}

ps_status ps__batch_read(ps_trainer *t, uint64_t run_step, const ps__layout *l, uint64_t *valid) {
  char what[32];
  name_step(t, run_step, what);
  PS_TRY(read_batch(t, run_step, l));
  return check_batch(t, what, l->n_tokens, valid);
}

ps_status ps__batch_check_valid(const ps_trainer *t, uint64_t run_step, uint64_t valid) {
  char what[32];
  name_step(t, run_step, what);
  return valid || (t->plan->cfg.forward_only && t->cfg.dataset)
             ? PS_OK
             : ps__fail(PS_ENUMERIC,
                        "%s has no valid target: its loss is undefined; mask fewer of its "
                        "tokens, or raise %s",
                        what, ps__field("tokens_per_step"));
}

double ps__sum_rows(const float *row, uint64_t n, uint64_t n_columns) {
  double sum = 0;
  for (uint64_t i = 0; i < n; i++)
    sum += row[i * n_columns];
  return sum;
}
