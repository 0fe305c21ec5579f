/* samples.c - text of `penstock train`: its prompts, how often it comes, samples.jsonl.
 *
 * The binary knows no tokenizer. Prompts come as token ids, from the Python package's `penstock
 * train`, and the ids of the texts are written. Their prompts' texts are only copied. */
#include "cli/cli.h"
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { AT_ONCE = 8 };

struct cli_samples {
  cli_ids *prompt, *text; /* [n] */
  ps_generate_request *request;
  uint32_t n;
  int32_t stop; /* eos_token_id of the model, or -1 */
  FILE *file;
  char *path;
  uint64_t n_texts, n_times;
  double seconds;
};

static uint64_t at_once(const struct cli_samples *s) { return s->n < AT_ONCE ? s->n : AT_ONCE; }

static uint64_t longest(const struct cli_samples *s) {
  uint64_t n = 0;
  for (uint32_t i = 0; i < s->n; i++)
    n = s->prompt[i].n > n ? s->prompt[i].n : n;
  return n;
}

/* ---- prompts --------------------------------------------------------------------------------- */

static int check_options(const cli_job *job) {
  const uint32_t ids = job->sample_ids.n, texts = job->sample_prompt.n;
  if (!ids && (texts || job->sample_prompts))
    return cli_fail(
        CLI_REFUSED,
        "--sample-prompt%s is text, and this program knows no tokenizer: run the Python "
        "package's penstock train, or give token ids by --sample-ids",
        texts ? "" : "s");
  if (ids && !job->sample_every)
    return cli_fail(CLI_REFUSED,
                    "prompts are given without --sample-every N: say after how many steps");
  if (texts && texts != ids)
    return cli_fail(CLI_REFUSED, "--sample-prompt has %u texts, --sample-ids %u: give one each",
                    texts, ids);
  return ids ? CLI_OK
             : cli_fail(CLI_REFUSED,
                        "--sample-every %" PRIu64 " is given without a prompt: give "
                        "--sample-prompt TEXT",
                        job->sample_every);
}

static int read_prompt(const cli_job *job, struct cli_samples *s, uint32_t i) {
  cli_ids *p = &s->prompt[i];
  const int code = cli_ids_parse(job->sample_ids.item[i], "--sample-ids", p);
  if (code != CLI_OK)
    return code;
  if (!p->n)
    return cli_fail(CLI_REFUSED, "prompt %u of --sample-ids has no token: give at least one",
                    i + 1);
  for (uint64_t k = 0; k < p->n; k++)
    if ((uint32_t)p->id[k] >= job->config.vocab_size)
      return cli_fail(CLI_REFUSED,
                      "prompt %u of --sample-ids: token %d is not in the vocabulary: 0 to %u are",
                      i + 1, p->id[k], job->config.vocab_size - 1);
  s->request[i] = (ps_generate_request){.tokens = p->id,
                                        .n_tokens = p->n,
                                        .max_new_tokens = job->sample_tokens,
                                        .temperature = job->sample_temperature,
                                        .top_p = job->sample_top_p,
                                        .top_k = job->sample_top_k,
                                        .seed = job->sample_seed,
                                        .stop_tokens = &s->stop,
                                        .n_stop_tokens = s->stop >= 0};
  return CLI_OK;
}

int cli_samples_open(cli_job *job) {
  const uint32_t n = job->sample_ids.n;
  if (!job->sample_every && !n && !job->sample_prompt.n && !job->sample_prompts)
    return CLI_OK;
  int code = check_options(job);
  if (code != CLI_OK)
    return code;
  job->sample_prompts = NULL; /* its prompts have come as --sample-prompt and --sample-ids */
  struct cli_samples *s = job->samples = calloc(1, sizeof *s);
  if (s)
    *s = (struct cli_samples){.n = n,
                              .stop = job->config.eos_token_id,
                              .prompt = calloc(n, sizeof *s->prompt),
                              .text = calloc(n, sizeof *s->text),
                              .request = calloc(n, sizeof *s->request)};
  if (!s || !s->prompt || !s->text || !s->request)
    return cli_fail(CLI_FAILED, "out of memory for %u prompts", n);
  for (uint32_t i = 0; i < n && code == CLI_OK; i++)
    code = read_prompt(job, s, i);
  return code;
}

void cli_samples_free(cli_job *job) {
  struct cli_samples *s = job->samples;
  job->samples = NULL;
  if (!s)
    return;
  for (uint32_t i = 0; i < s->n; i++) {
    if (s->prompt)
      free(s->prompt[i].id);
    if (s->text)
      free(s->text[i].id);
  }
  if (s->file)
    fclose(s->file);
  free(s->prompt);
  free(s->text);
  free(s->request);
  free(s->path);
  free(s);
}

void cli_samples_plan(const cli_job *job, ps_plan_config *cfg) {
  if (!job->samples)
    return;
  cfg->sample_sequences = at_once(job->samples);
  cfg->sample_context = longest(job->samples) + job->sample_tokens;
}

/* ---- when ------------------------------------------------------------------------------------ */

void cli_samples_note(const cli_job *job, cli_progress *p) {
  const struct cli_samples *s = job->samples;
  if (s)
    cli_progress_note(p,
                      "%u text%s of at most %" PRIu64 " tokens every %" PRIu64
                      " steps and at the end, into samples.jsonl",
                      s->n, s->n == 1 ? "" : "s", job->sample_tokens, job->sample_every);
}

uint64_t cli_samples_next(const cli_job *job, uint64_t step) {
  return job->samples ? step / job->sample_every * job->sample_every + job->sample_every
                      : UINT64_MAX;
}

bool cli_samples_due(const cli_job *job, uint64_t step) {
  return job->samples && (step % job->sample_every == 0 || step == job->train_config.total_steps);
}

/* ---- samples.jsonl --------------------------------------------------------------------------- */

int cli_samples_begin(cli_job *job) {
  struct cli_samples *s = job->samples;
  char *path = cli_path_join(job->run_dir, "samples.jsonl");
  if (!path)
    return cli_fail(CLI_FAILED, "out of memory");
  if (!s) {
    if (!job->first_step)
      unlink(path); /* an earlier run's */
    free(path);
    return CLI_OK;
  }
  s->path = path;
  /* a line's step is how many steps were done: those of a resumed run's start stay */
  return cli_metrics_keep(path, job->first_step ? job->first_step + 1 : 0, &s->file);
}

static void write_ids(cli_json *j, const char *key, const cli_ids *ids) {
  cli_json_open(j, key, '[');
  for (uint64_t i = 0; i < ids->n; i++)
    cli_json_count(j, NULL, (uint64_t)ids->id[i]);
  cli_json_close(j, ']');
}

static int write_texts(const cli_job *job, struct cli_samples *s, uint64_t step) {
  const long before = ftell(s->file);
  for (uint32_t i = 0; i < s->n; i++) {
    cli_json j = {.out = s->file};
    cli_json_open(&j, NULL, '{');
    cli_json_count(&j, "step", step);
    if (job->sample_prompt.n)
      cli_json_text(&j, "prompt", job->sample_prompt.item[i]);
    write_ids(&j, "prompt_tokens", &s->prompt[i]);
    write_ids(&j, "tokens", &s->text[i]);
    cli_json_close(&j, '}');
    fputc('\n', s->file);
  }
  if (fflush(s->file) == 0 && !ferror(s->file))
    return CLI_OK;
  const int code = cli_fail(CLI_FAILED, "%s cannot be written: %s", s->path, strerror(errno));
  return before < 0 || ftruncate(fileno(s->file), before) != 0 ? CLI_FAILED : code;
}

/* Ctrl-C ends the texts, and the run goes on to its own end. */
static int take_token(void *user, uint64_t request, int32_t token) {
  struct cli_samples *s = user;
  return cli_interrupts() || !cli_ids_add(&s->text[request], token) ? -1 : 0;
}

int cli_sample(cli_job *job, ps_trainer *t, cli_progress *p, uint64_t step) {
  struct cli_samples *s = job->samples;
  const double start = cli_now_s();
  ps_generate_stats stats;
  for (uint32_t i = 0; i < s->n; i++)
    s->text[i].n = 0;
  const ps_status st = ps_trainer_sample(t, s->request, s->n, take_token, s, &stats);
  if (st == PS_ENUMERIC) {
    cli_progress_note(p, "step %" PRIu64 ": no text is sampled: %s", step, ps_last_error());
    return CLI_OK;
  }
  if (st == PS_ECANCELLED)
    return cli_interrupts() > 1 ? CLI_INTERRUPTED
           : cli_interrupts()   ? CLI_OK
                                : cli_fail(CLI_FAILED, "out of memory for a text");
  if (st != PS_OK) {
    cli_progress_end(p);
    return cli_fail_status(st, false);
  }
  const double seconds = cli_now_s() - start;
  s->n_texts += s->n;
  s->n_times++;
  s->seconds += seconds;
  cli_progress_note(p, "step %" PRIu64 ": %u text%s sampled, %" PRIu64 " tokens in %.1f s", step,
                    s->n, s->n == 1 ? "" : "s", stats.new_tokens, seconds);
  return write_texts(job, s, step);
}

/* ---- summary --------------------------------------------------------------------------------- */

void cli_samples_summary_print(FILE *out, const cli_job *job, double wall_s) {
  const struct cli_samples *s = job->samples;
  if (s && s->n_texts)
    fprintf(out, "samples         %" PRIu64 " text%s in %.1f s, %.1f%% of the run\n", s->n_texts,
            s->n_texts == 1 ? "" : "s", s->seconds, wall_s > 0 ? 100 * s->seconds / wall_s : 0);
}

void cli_samples_summary_json(cli_json *j, const cli_job *job, double wall_s) {
  const struct cli_samples *s = job->samples;
  if (!s || !s->n_texts)
    return;
  cli_json_count(j, "samples", s->n_texts);
  cli_json_number(j, "sample_total_s", s->seconds);
  cli_json_number(j, "sample_share", wall_s > 0 ? s->seconds / wall_s : 0);
}
