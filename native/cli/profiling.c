/* profiling.c - --profile-steps A:B: a profiler records steps A to B, and timeline.json shows them.
 *
 * No step is in flight when the recording begins or ends, so that it holds whole steps. The other
 * steps are not traced. */
#include "cli/cli.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static bool number(const char *text, const char *end, uint64_t *out) {
  char *stop;
  if (text == end || strspn(text, "0123456789") < (size_t)(end - text))
    return false;
  *out = strtoull(text, &stop, 10);
  return stop == end && *out >= 1 && *out <= PS_MAX_STEPS;
}

int cli_profile_parse(cli_job *job) {
  const char *text = job->profile_steps, *colon = text ? strchr(text, ':') : NULL;
  if (!text)
    return CLI_OK;
  if (!colon || !number(text, colon, &job->profile_first) ||
      !number(colon + 1, text + strlen(text), &job->profile_last) ||
      job->profile_last < job->profile_first)
    return cli_fail(CLI_REFUSED,
                    "--profile-steps '%s': give the first and the last step as A:B, such as 4:5; "
                    "steps count from 1",
                    text);
  if (job->profile_last - job->profile_first >= PS_MAX_TRACE_STEPS)
    return cli_fail(CLI_REFUSED, "--profile-steps %s: at most %d steps are possible", text,
                    PS_MAX_TRACE_STEPS);
  job->plan_config.trace_steps = job->profile_last - job->profile_first + 1;
  return CLI_OK;
}

int cli_profile_check(const cli_job *job) {
  if (job->profile_steps && job->profile_first <= job->first_step)
    return cli_fail(CLI_REFUSED,
                    "--profile-steps %s: this run begins with step %" PRIu64 ": give later steps",
                    job->profile_steps, job->first_step + 1);
  if (job->profile_steps && job->profile_last > job->train_config.total_steps)
    return cli_fail(CLI_REFUSED,
                    "--profile-steps %s: the training has %" PRIu64 " steps: give earlier ones, or "
                    "raise --steps",
                    job->profile_steps, job->train_config.total_steps);
  return CLI_OK;
}

uint64_t cli_profile_next(const cli_job *job, uint64_t step) {
  return !job->profile_steps             ? UINT64_MAX
         : step < job->profile_first - 1 ? job->profile_first - 1
         : step < job->profile_last      ? job->profile_last
                                         : UINT64_MAX;
}

ps_status cli_profile_at(const cli_job *job, ps_trainer *t, uint64_t step) {
  if (!job->profile_steps)
    return PS_OK;
  return step == job->profile_first - 1 ? ps_trainer_profile(t, 1)
         : step == job->profile_last    ? ps_trainer_profile(t, 0)
                                        : PS_OK;
}
