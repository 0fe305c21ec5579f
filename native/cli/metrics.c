/* metrics.c - metrics.jsonl: an object a step. */
#include "cli/cli.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

void cli_step_note(cli_step *s, const cli_job *job, const ps_step_metrics *m, double elapsed_s,
                   uint64_t n_done) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (n_done == 1)
    s->consumed_tokens =
        ps_plan_sequences_before(job->plan, job->first_step) * job->plan_config.seq_len;
  s->total_steps = job->train_config.total_steps;
  s->samples = m->tokens / job->plan_config.seq_len;
  s->consumed_tokens += m->tokens;
  s->consumed_samples = s->consumed_tokens / job->plan_config.seq_len;
  s->elapsed_s = elapsed_s;
  s->eta_s = elapsed_s / (double)n_done *
             (double)(job->train_config.total_steps - job->first_step - n_done);
  const double flops =
      job->report.model_flops * ((double)m->tokens / (double)job->report.tokens_per_step);
  s->n_gpus = job->report.n_devices;
  s->n_hosts = job->report.n_hosts;
  s->tflops = m->step_s > 0 ? flops / m->step_s * 1e-12 / (double)s->n_gpus : 0;
  s->time_s = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void step_json(cli_json *j, const cli_step *s) {
  cli_json_count(j, "total_steps", s->total_steps);
  cli_json_count(j, "samples", s->samples);
  cli_json_count(j, "consumed_samples", s->consumed_samples);
  cli_json_count(j, "consumed_tokens", s->consumed_tokens);
  cli_json_number(j, "elapsed_s", s->elapsed_s);
  cli_json_number(j, "eta_s", s->eta_s);
  cli_json_count(j, "gpus", s->n_gpus);
  if (s->n_hosts > 1)
    cli_json_count(j, "hosts", s->n_hosts);
  cli_json_number(j, "tflops", s->tflops);
  cli_json_number(j, "time_s", s->time_s);
}

/* What no sensor says is left out. */
static void gpu_json(cli_json *j, const ps_step_metrics *m) {
  if (m->gpu_clock_mhz > 0)
    cli_json_number(j, "gpu_clock_mhz", m->gpu_clock_mhz);
  if (m->gpu_power_w > 0)
    cli_json_number(j, "gpu_power_w", m->gpu_power_w);
  if (m->gpu_temperature_c > 0)
    cli_json_number(j, "gpu_temperature_c", m->gpu_temperature_c);
  if (m->gpu_energy_j > 0)
    cli_json_number(j, "gpu_energy_j", m->gpu_energy_j);
  if (m->n_gpus_read > 1)
    cli_json_count(j, "n_gpus_read", m->n_gpus_read);
}

int cli_metrics_write(const cli_job *job, FILE *f, const char *path, const ps_step_metrics *m,
                      const cli_step *s, const ps_validation *v) {
  long before = ftell(f);
  cli_json j = {.out = f};
  cli_json_open(&j, NULL, '{');
  cli_json_count(&j, "step", m->step);
  cli_json_number(&j, "loss", m->loss);
  if (job->plan_config.z_loss > 0 || job->plan_config.label_smoothing > 0)
    cli_json_number(&j, "objective", m->objective);
  if (job->plan_config.z_loss > 0)
    cli_json_number(&j, "z_loss", m->z_loss);
  if (cli_right(job))
    cli_json_number(&j, cli_right(job), m->right);
  cli_json_count(&j, "tokens", m->tokens);
  cli_json_count(&j, "valid_tokens", m->valid_tokens);
  cli_json_number(&j, "step_s", m->step_s);
  cli_json_number(&j, "predicted_step_s", m->predicted_step_s);
  if (m->expected_step_s > 0)
    cli_json_number(&j, "expected_step_s", m->expected_step_s);
  cli_json_number(&j, "tokens_per_s", m->tokens_per_s);
  if (m->n_switches)
    cli_json_count(&j, "n_switches", m->n_switches);
  if (m->switch_s > 0)
    cli_json_number(&j, "switch_s", m->switch_s);
  cli_json_count(&j, "device_peak_bytes", m->device_peak_bytes);
  cli_json_count(&j, "host_peak_bytes", m->host_peak_bytes);
  cli_json_count(&j, "host_arena_peak_bytes", m->host_arena_peak_bytes);
  cli_json_number(&j, "grad_norm", m->grad_norm);
  cli_json_number(&j, "lr", m->lr);
  cli_json_count(&j, "n_skipped", m->n_skipped);
  cli_json_number(&j, "mfu", m->mfu);
  cli_json_number(&j, "hfu", m->hfu);
  cli_json_number(&j, "h2d_bytes_per_s", m->h2d_bytes_per_s);
  cli_json_number(&j, "d2h_bytes_per_s", m->d2h_bytes_per_s);
  cli_json_number(&j, "update_bytes_per_s", m->update_bytes_per_s);
  if (m->fp8_flushed > 0) {
    cli_json_number(&j, "fp8_flushed", m->fp8_flushed);
    cli_json_number(&j, "fp8_flushed_most", m->fp8_flushed_most);
  }
  if (m->expert_load > 0) {
    cli_json_number(&j, "expert_load", m->expert_load);
    cli_json_number(&j, "expert_entropy", m->expert_entropy);
    cli_json_count(&j, "experts_unused", m->experts_unused);
  }
  gpu_json(&j, m);
  step_json(&j, s);
  if (v)
    cli_val_metrics(job, &j, v);
  cli_json_close(&j, '}');
  fputc('\n', f);
  if (fflush(f) == 0 && !ferror(f))
    return CLI_OK;
  int code = cli_fail(CLI_FAILED, "%s cannot be written: %s", path, strerror(errno));
  return before < 0 || ftruncate(fileno(f), before) != 0 ? CLI_FAILED : code;
}

/* The lines of the steps before @first. What follows is trained again. */
static size_t whole_lines(const char *text, size_t bytes, uint64_t first) {
  size_t kept = 0;
  for (size_t at = 0; at < bytes;) {
    const char *end = memchr(text + at, '\n', bytes - at);
    unsigned long long step;
    if (!end || sscanf(text + at, "{\"step\": %llu,", &step) != 1 || step >= first)
      break;
    kept = at = (size_t)(end - text) + 1;
  }
  return kept;
}

int cli_metrics_keep(const char *path, uint64_t first_step, FILE **out) {
  struct stat sb;
  FILE *old = first_step ? fopen(path, "rb") : NULL;
  char *text = NULL;
  size_t n = 0;
  if (first_step && !old && errno != ENOENT)
    return cli_fail(CLI_FAILED, "%s cannot be read: %s", path, strerror(errno));
  if (old && fstat(fileno(old), &sb) == 0 && (text = malloc((size_t)sb.st_size + 1)))
    n = whole_lines(text, fread(text, 1, (size_t)sb.st_size, old), first_step);
  const bool failed = old && (!text || ferror(old));
  if (old)
    fclose(old);
  int code = failed ? cli_fail(CLI_FAILED, "%s cannot be read", path) : CLI_OK;
  if (n)
    text[n - 1] = 0; /* cli_file_replace() ends the last line */
  if (code == CLI_OK)
    code = cli_file_replace(path, n ? text : NULL, out);
  free(text);
  return code;
}
