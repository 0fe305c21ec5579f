/* launcher.c - the tasks of several hosts, which a launcher started: they meet, agree on the run,
 * and end together. */
#include "cli/cli.h"
#include <limits.h>
#include <stdlib.h>
#include <string.h>

int cli_task_read(ps_hosts_task *t) {
  *t = (ps_hosts_task){.struct_bytes = sizeof *t};
  const ps_status st = ps_hosts_task_find(t);
  return st == PS_OK ? CLI_OK : cli_fail_status(st, true);
}

/* ---- the meeting ----------------------------------------------------------------------------- */

/* Options that may differ between hosts: where files are, caps, the machine, what is printed. */
static const char of_one_host[] =
    "config model data device-mem host-mem disk disk-mem disk-tbw backend gpu gpus threads "
    "peak-tflops val adapter json quiet out force no-save save-wait resume run-dir trace-steps "
    "sample-prompts hosts-wait layout hosts-insecure";

/* @user: whether it is --quiet, which drops no warnings. */
static void print_line(void *user, ps_log_level level, const char *line) {
  if (level >= (*(const bool *)user ? PS_LOG_WARN : PS_LOG_INFO))
    fprintf(stderr, "penstock: %s\n", line);
}

/* After the meeting PS_EIO is a task that has ended, not wrong input. */
static int task_failed(ps_status st) { return cli_fail_status(st, st != PS_EIO); }

int cli_task_meet(cli_job *job) {
  const ps_hosts_task *t = &job->task;
  const ps_hosts_config cfg = {.struct_bytes = sizeof cfg,
                               .rank = t->rank,
                               .n_hosts = t->n_hosts,
                               .port = t->port,
                               .address = t->address,
                               .wait_s = job->hosts_wait,
                               .insecure = job->hosts_insecure};
  if (t->n_hosts < 2)
    return CLI_OK;
  ps_log_set(print_line, &job->quiet);
  ps_status st = ps_hosts_open(&job->hosts, &cfg);
  ps_log_set(NULL, NULL);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  char *text = cli_options_text(job, of_one_host);
  if (!text)
    return cli_fail(CLI_FAILED, "out of memory for the options");
  st = ps_hosts_agree(job->hosts, text);
  free(text);
  if (st == PS_OK)
    st = ps_hosts_choose(job->hosts, job->plan_config.transport, cli_on_gpu(&job->device),
                         &job->chosen_transport);
  return st == PS_OK ? CLI_OK : task_failed(st);
}

void cli_task_follow(cli_job *job) {
  if (job->task.rank == 0)
    return;
  job->follows_aloud = !job->quiet;
  job->quiet = true;
  job->json = false;
  job->out = NULL;
  job->val.n = 0;
  job->plan_config.val_tokens = job->val_every = 0;
  job->sample_every = 0;
  job->sample_ids.n = job->sample_prompt.n = 0;
  job->sample_prompts = NULL;
  job->checkpoint_every = (cli_every){0};
  job->checkpoint_given = true; /* no default */
}

/* ---- the network's rate ---------------------------------------------------------------------- */

/* network-ID-TRANSPORT.json in the cache. */
static ps_status network_file(char path[PATH_MAX], const char *id, uint32_t transport) {
  char name[64];
  snprintf(name, sizeof name, "network-%s-%s.json", id,
           transport == PS_TRANSPORT_NCCL ? "nccl" : "tcp");
  return ps_cache_path(path, PATH_MAX, name);
}

/* What the cache has for these machines and this transport, BYTES per second; 0: none. */
static double network_kept(const char *id, uint32_t transport) {
  char path[PATH_MAX];
  double rate = 0;
  if (network_file(path, id, transport) == PS_OK)
    (void)ps_hosts_rate_read(&rate, path); /* a file that is broken or old is replaced later */
  return rate;
}

/* Where it cannot be kept a line says why. */
static void network_keep(const ps_hosts *h, const char *id, uint32_t transport, double rate) {
  char path[PATH_MAX];
  const bool cache = network_file(path, id, transport) == PS_OK;
  if (!cache)
    fprintf(stderr, "penstock: the network's rate is not cached: set XDG_CACHE_HOME to a folder "
                    "for the cache\n");
  else if (ps_hosts_rate_write(h, rate, path) != PS_OK)
    fprintf(stderr,
            "penstock: %s; the network's rate is not cached: set XDG_CACHE_HOME to a folder that "
            "can be written\n",
            ps_last_error());
}

/* Where no description states a rate, rank 0 gives the one that it has kept. Where it has none, it
 * keeps the one that is measured now. */
static ps_status find_network_rate(cli_job *job) {
  double *rate = &job->hardware.link[PS_LINK_NETWORK].bytes_per_s;
  const bool first = job->task.rank == 0;
  char id[PS_HOSTS_ID_BYTES];
  ps_status st = ps_hosts_stated(job->hosts, rate);
  if (st == PS_OK)
    st = ps_hosts_id(job->hosts, id);
  if (st == PS_OK && first && !(*rate > 0))
    *rate = network_kept(id, job->chosen_transport);
  const bool known = *rate > 0;
  if (st == PS_OK)
    st = ps_hosts_measure(job->hosts, job->hardware.device, job->plan_config.host_mem_bytes, rate);
  if (st == PS_OK && first && !known)
    network_keep(job->hosts, id, job->chosen_transport, *rate);
  return st;
}

/* Rank 0 comes first: where equal hosts have one cache, the others find there what it measured. The
 * machine's rates come before the network's, because NCCL stays on the GPU. */
int cli_task_measure(cli_job *job) {
  const bool first = job->task.rank == 0;
  char turn = 0;
  if (!job->hosts)
    return CLI_OK;
  int code = first ? cli_job_machine(job) : CLI_OK;
  if (code != CLI_OK)
    return code;
  ps_status st = ps_hosts_share(job->hosts, &turn, sizeof turn);
  if (st == PS_OK && !first && (code = cli_job_machine(job)) != CLI_OK)
    return code;
  if (st == PS_OK)
    st = find_network_rate(job);
  return st == PS_OK ? CLI_OK : task_failed(st);
}

/* What rank 0 decides of the step's cut, which must be the same on all hosts. */
int cli_task_share_plan(cli_job *job, int code) {
  ps_plan_config *c = &job->plan_config;
  if (!job->hosts || code != CLI_OK)
    return code;
  uint64_t cut[6] = {0};
  if (job->task.rank == 0) {
    const ps_plan_report *r = &job->report;
    const uint64_t mine[6] = {r->chunk_tokens, r->chunks_per_round,  r->first_round_chunks,
                              r->first_rounds, r->head_slice_tokens, r->tokens_per_step};
    memcpy(cut, mine, sizeof cut);
  }
  const ps_status st = ps_hosts_share(job->hosts, cut, sizeof cut);
  if (st != PS_OK)
    return task_failed(st);
  c->chunk_tokens = cut[0];
  c->chunks_per_round = cut[1];
  c->first_round_chunks = cut[2];
  c->first_rounds = cut[3];
  c->head_slice_tokens = cut[4];
  c->tokens_per_step = c->tokens_per_step ? c->tokens_per_step : cut[5];
  return CLI_OK;
}

/* All wait until rank 0 has saved: where it fails, the others' exit codes must say so too. Rank 0
 * ignores what fails here: its files are written. */
static int await_rank_0(cli_job *job, int code) {
  char done = 0;
  cli_saving(CLI_SAVES_ELSEWHERE);
  const ps_status st = ps_hosts_share(job->hosts, &done, sizeof done);
  cli_saving(CLI_SAVES_NOTHING);
  if (st != PS_OK && job->task.rank > 0)
    return cli_fail_status(st, false);
  return cli_interrupts() ? CLI_INTERRUPTED : code;
}

int cli_task_end(cli_job *job, int code) {
  if (job->hosts && code != CLI_OK && code != CLI_INTERRUPTED)
    ps_hosts_fail(job->hosts, code == CLI_REFUSED ? PS_EINVAL : PS_EIO, cli_last_words());
  else if (job->hosts && cli_interrupts() > 1) /* the trainer has told all, if it still ran */
    ps_hosts_fail(job->hosts, PS_ECANCELLED, "it was stopped at once");
  else if (job->hosts)
    code = await_rank_0(job, code);
  ps_hosts_close(job->hosts);
  job->hosts = NULL;
  return code;
}
