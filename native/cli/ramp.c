/* ramp.c - --batch-ramp TOKENS:STEPS...: the stages in which a training's steps grow. */
#include "cli/cli.h"

/* A whole number of up to 18 digits that @end ends. */
static bool parse_count(const char **at, char end, uint64_t *out) {
  const char *first = *at;
  for (*out = 0; **at >= '0' && **at <= '9' && *at - first < 18; ++*at)
    *out = 10 * *out + (uint64_t)(**at - '0');
  return *at > first && *(*at)++ == end;
}

int cli_ramp_parse(cli_job *job) {
  const cli_texts *texts = &job->batch_ramp;
  if (texts->n > PS_MAX_RAMP)
    return cli_fail(CLI_REFUSED, "--batch-ramp: %u stages given, at most %d are taken", texts->n,
                    PS_MAX_RAMP);
  for (uint32_t i = 0; i < texts->n; i++) {
    ps_ramp_stage *s = &job->ramp[i];
    const char *at = texts->item[i];
    if (!parse_count(&at, ':', &s->tokens_per_step) || !parse_count(&at, 0, &s->n_steps))
      return cli_fail(CLI_REFUSED,
                      "--batch-ramp %s: give TOKENS:STEPS, such as 65536:1000, for each stage",
                      texts->item[i]);
  }
  return CLI_OK;
}
