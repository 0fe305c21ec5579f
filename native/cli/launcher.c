/* launcher.c - which of several hosts this task runs on, as torchrun, srun or mpirun says in the
 * environment; and the meeting of the tasks. Nothing else reads these variables. */
#include "cli/cli.h"
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* What a launcher sets. local: tasks on this host, or the number of this one there. */
typedef struct launcher {
  const char *name;
  const char *rank, *n;        /* both are set by this launcher alone, or by it first */
  const char *n_local, *local; /* NULL: it sets none */
  const char *one_a_host;      /* the words that start one task a host */
} launcher;

/* In this order, because launchers start each other: mpirun starts tasks by srun, and srun starts
 * torchrun. In a batch script SLURM sets the number of tasks too, without a step: there is one
 * task then. */
static const launcher launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK",
     "torchrun --nproc-per-node 1"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "mpirun -N 1"},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", NULL, "SLURM_LOCALID",
     "srun --ntasks-per-node 1"},
    {"mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "mpiexec -ppn 1"},
};

/* A whole number from the environment; false: there is none. */
static bool number(const char *name, uint64_t *out) {
  const char *text = name ? getenv(name) : NULL;
  char *end;
  if (!text || !isdigit((unsigned char)*text))
    return false;
  errno = 0;
  *out = strtoull(text, &end, 10);
  return *end == 0 && errno == 0;
}

/* The tasks that a line such as "2(x3),1" gives to hosts: the most on one. */
static uint64_t most_of(const char *text) {
  uint64_t most = 0;
  while (text && *text) {
    const uint64_t n = strtoull(text, NULL, 10);
    most = n > most ? n : most;
    text = strchr(text, ',');
    text += text != NULL;
  }
  return most;
}

/* The first of the hosts that SLURM lists: "node[08-10,12],gpu3" is node08. */
static void first_host(const char *list, char out[CLI_ADDRESS]) {
  const size_t name = strcspn(list, "[,");
  const char *in = list + name + (list[name] == '[');
  const size_t digits = list[name] == '[' ? strcspn(in, "-,]") : 0;
  snprintf(out, CLI_ADDRESS, "%.*s%.*s", (int)name, list, (int)digits, in);
}

enum { PORT = 29500, PORTS_OF_JOBS = 20000, N_JOB_PORTS = 10000 };

/* Where rank 0 listens. torchrun's own agent has the port that it names, so the next one is
 * taken. */
static int find_address(const launcher *l, cli_task *t) {
  const char *address = getenv("MASTER_ADDR"), *nodes = getenv("SLURM_STEP_NODELIST"),
             *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
  const bool slurm = strcmp(l->name, "srun") == 0;
  uint64_t port = PORT, job = 0;
  if (!address && slurm && nodes) {
    first_host(nodes, t->address);
    (void)number("SLURM_JOB_ID", &job);
    port = PORTS_OF_JOBS + job % N_JOB_PORTS;
  } else if (!address) {
    return cli_fail(CLI_REFUSED,
                    "%s started %u tasks, and does not say where rank 0 runs: set MASTER_ADDR to "
                    "its host's name in the environment of all tasks",
                    l->name, t->n);
  } else
    snprintf(t->address, sizeof t->address, "%s", address);
  if (getenv("MASTER_PORT") && (!number("MASTER_PORT", &port) || port == 0 || port > 65534))
    return cli_fail(CLI_REFUSED, "MASTER_PORT is %s: it must be a port from 1 to 65534",
                    getenv("MASTER_PORT"));
  t->port = (uint32_t)port + (agent && strcmp(agent, "True") == 0);
  return CLI_OK;
}

static uint64_t tasks_here(const launcher *l) {
  uint64_t n = 1, local = 0;
  if (strcmp(l->name, "srun") == 0)
    n = most_of(getenv("SLURM_STEP_TASKS_PER_NODE"));
  else
    (void)number(l->n_local, &n);
  (void)number(l->local, &local);
  return local + 1 > n ? local + 1 : n;
}

int cli_task_read(cli_task *t) {
  *t = (cli_task){.n = 1};
  for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
    const launcher *l = &launchers[i];
    uint64_t rank, n, local;
    const bool hydra = number("MPI_LOCALNRANKS", &local) && number("PMI_RANK", &rank);
    if (!number(l->rank, &rank) || !number(l->n, &n) ||
        (strcmp(l->name, "srun") == 0 && hydra)) /* which has started mpiexec's own tasks */
      continue;
    local = tasks_here(l);
    if (local > 1)
      return cli_fail(CLI_REFUSED,
                      "%s started %llu tasks on this host, and penstock takes one a host, which "
                      "drives all its GPUs: type %s penstock train --gpus %llu ...",
                      l->name, (unsigned long long)local, l->one_a_host,
                      (unsigned long long)(local < PS_MAX_DEVICES ? local : PS_MAX_DEVICES));
    if (n < 2)
      return CLI_OK;
    if (n > PS_MAX_HOSTS || rank >= n)
      return cli_fail(CLI_REFUSED,
                      "%s says rank %llu of %llu: ranks are below the number of "
                      "tasks, which is at most %d",
                      l->name, (unsigned long long)rank, (unsigned long long)n, PS_MAX_HOSTS);
    t->rank = (uint32_t)rank;
    t->n = (uint32_t)n;
    return find_address(l, t);
  }
  return CLI_OK;
}

/* ---- the meeting ----------------------------------------------------------------------------- */

/* Options that may differ between hosts: where files are, caps, the machine, what is printed. */
static const char *const of_one_host[] = {"config",         "model",       "data",    "device-mem",
                                          "host-mem",       "backend",     "gpu",     "gpus",
                                          "threads",        "peak-tflops", "val",     "adapter",
                                          "json",           "quiet",       "out",     "force",
                                          "save-wait",      "resume",      "run-dir", "trace-steps",
                                          "sample-prompts", "hosts-wait",  "layout",  NULL};

int cli_task_meet(cli_job *job) {
  const cli_task *t = &job->task;
  const ps_hosts_config cfg = {.struct_bytes = sizeof cfg,
                               .rank = t->rank,
                               .n_hosts = t->n,
                               .port = t->port,
                               .address = t->address,
                               .wait_s = job->hosts_wait};
  if (t->n < 2)
    return CLI_OK;
  ps_status st = ps_hosts_open(&job->hosts, &cfg);
  char *text = st == PS_OK ? cli_options_text(job, of_one_host) : NULL;
  if (st == PS_OK && !text)
    return cli_fail(CLI_FAILED, "out of memory for the options");
  if (st == PS_OK)
    st = ps_hosts_agree(job->hosts, text);
  free(text);
  if (st == PS_OK)
    st = ps_hosts_choose(job->hosts, job->transport, cli_on_gpu(&job->device),
                         &job->chosen_transport);
  return st == PS_OK ? CLI_OK : cli_fail_status(st, true);
}

void cli_task_follow(cli_job *job) {
  if (job->task.rank == 0)
    return;
  job->quiet = true;
  job->json = false;
  job->out = NULL;
  job->val.n = 0;
  job->val_tokens = job->val_every = 0;
  job->sample_every = 0;
  job->sample_ids.n = job->sample_prompt.n = 0;
  job->sample_prompts = NULL;
  job->checkpoint_every = (cli_every){0};
  job->trace_steps = 0;
}

/* What rank 0 decides of the step's cut, which must be the same on all hosts. */
int cli_task_share_plan(cli_job *job, int code) {
  if (!job->hosts || code != CLI_OK)
    return code;
  uint64_t cut[4] = {0};
  if (job->task.rank == 0) {
    const ps_plan_report *r = &job->report;
    const uint64_t mine[4] = {r->chunk_tokens, r->chunks_per_round, r->first_round_chunks,
                              r->head_slice_tokens};
    memcpy(cut, mine, sizeof cut);
  }
  const ps_status st = ps_hosts_share(job->hosts, cut, sizeof cut);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  job->chunk_tokens = cut[0];
  job->chunks_per_round = cut[1];
  job->first_round_chunks = cut[2];
  job->head_slice_tokens = cut[3];
  return CLI_OK;
}

void cli_task_end(cli_job *job, int code) {
  /* After Ctrl-C all have stopped, or were told by the trainer: rank 0 may still save. */
  if (job->hosts && code != CLI_OK && code != CLI_INTERRUPTED)
    ps_hosts_fail(job->hosts, code == CLI_REFUSED ? PS_EINVAL : PS_EIO, cli_last_words());
  ps_hosts_close(job->hosts);
  job->hosts = NULL;
}
