/* launcher.c - which of several hosts this task runs on, as torchrun, srun or mpirun says in the
 * environment. Nothing else reads these variables. */
#include "hosts/hosts.h"
#include <ctype.h>
#include <errno.h>
#include <penstock/engine.h>
#include <stdlib.h>
#include <string.h>

/* What a launcher sets. local: tasks on this host, or the number of this one there. */
typedef struct launcher {
  const char *name;
  const char *rank, *n;        /* both are set by this launcher alone, or by it first */
  const char *n_local, *local; /* NULL: it sets none */
  const char *one_a_host;      /* the words that start one task a host */
  const char *binary, *script; /* more words, before a program, and before a Python script */
  const char *n_hosts;         /* more words, before the number of hosts; NULL: none */
  const char *address;         /* before that of rank 0, where hosts are several; NULL: none */
} launcher;

/* In this order, because launchers start each other: mpirun starts tasks by srun, and srun starts
 * torchrun. In a batch script SLURM sets the number of tasks too, without a step: there is one
 * task then. */
static const launcher launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK",
     "torchrun --nproc-per-node 1", " --no-python", "", NULL, NULL},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "mpirun -N 1", "", " python3", NULL, " -x MASTER_ADDR="},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", NULL, "SLURM_LOCALID",
     "srun --ntasks-per-node 1", "", " python3", " --ntasks ", NULL},
    {"mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "mpiexec -ppn 1", "",
     " python3", " -n ", " -genv MASTER_ADDR "},
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

/* Whether a launcher's own variables are both there; a value that is no number is refused. */
static ps_status find_rank(const launcher *l, uint64_t *rank, uint64_t *n, bool *there) {
  const char *of_rank = getenv(l->rank), *of_n = getenv(l->n);
  *there = of_rank && of_n;
  if (!*there || (number(l->rank, rank) && number(l->n, n)))
    return PS_OK;
  return ps__fail(
      PS_EINVAL,
      "%s is \"%.40s\" and %s \"%.40s\": both must be whole numbers, as %s sets them; to "
      "train on one host alone, unset them",
      l->rank, of_rank, l->n, of_n, l->name);
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

/* The first of the hosts that SLURM lists: "rack[0-1]n[08-10,12],gpu3" is rack0n08. */
static void first_host(const char *list, char out[PS_MAX_ADDRESS]) {
  size_t n = 0;
  while (*list && *list != ',') {
    const bool range = *list == '[';
    list += range;
    const size_t part = strcspn(list, range ? "-,]" : "[,");
    n += (size_t)snprintf(out + n, PS_MAX_ADDRESS - n, "%.*s", (int)part, list);
    if (n >= PS_MAX_ADDRESS)
      return;
    list += range ? strcspn(list, "]") : part;
    list += range && *list;
  }
}

enum { PORT = 29500, PORTS_OF_JOBS = 20000, N_JOB_PORTS = 10000 };

/* Where rank 0 listens. torchrun's own agent has the port that it names, so the next one is
 * taken. */
static ps_status find_address(const launcher *l, ps_hosts_task *t) {
  const char *address = getenv("MASTER_ADDR"), *nodes = getenv("SLURM_STEP_NODELIST"),
             *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
  const bool slurm = strcmp(l->name, "srun") == 0;
  uint64_t port = PORT, job = 0;
  if (!address && slurm && nodes) {
    first_host(nodes, t->address);
    (void)number("SLURM_JOB_ID", &job);
    port = PORTS_OF_JOBS + job % N_JOB_PORTS;
  } else if (!address) {
    return ps__fail(PS_EINVAL,
                    "%s started %u tasks, and does not say where rank 0 runs: set MASTER_ADDR to "
                    "its host's name in the environment of all tasks",
                    l->name, t->n_hosts);
  } else
    snprintf(t->address, sizeof t->address, "%s", address);
  if (getenv("MASTER_PORT") && (!number("MASTER_PORT", &port) || port == 0 || port > 65534))
    return ps__fail(PS_EINVAL, "MASTER_PORT is %s: it must be a port from 1 to 65534",
                    getenv("MASTER_PORT"));
  t->port = (uint32_t)port + (agent && strcmp(agent, "True") == 0);
  return PS_OK;
}

/* SLURM tells of all hosts, and others of this one. */
static const char *here(const launcher *l, uint64_t n) {
  uint64_t local = 0;
  (void)number(l->local, &local);
  return strcmp(l->name, "srun") == 0 && local + 1 < n ? "a host" : "this host";
}

static uint64_t tasks_on_a_host(const launcher *l) {
  uint64_t n = 1, local = 0;
  if (strcmp(l->name, "srun") == 0)
    n = most_of(getenv("SLURM_STEP_TASKS_PER_NODE"));
  else
    (void)number(l->n_local, &n);
  (void)number(l->local, &local);
  return local + 1 > n ? local + 1 : n;
}

/* Whether this process is Python and runs somebody's script. */
static bool is_script(void) { return strncmp(program_invocation_short_name, "python", 6) == 0; }

/* @n tasks, @local of them on a host, should be one a host. In a batch script srun takes the number
 * of tasks from the script unless it is given, and then ignores that of a host. mpiexec starts as
 * many tasks as a host has CPUs. */
static ps_status refuse(const launcher *l, uint64_t n, uint64_t local) {
  const char *address = getenv("MASTER_ADDR");
  const bool script = is_script();
  uint64_t hosts = (n + local - 1) / local;
  char count[32] = "";
  if (strcmp(l->name, "srun") == 0)
    (void)number("SLURM_STEP_NUM_NODES", &hosts);
  if (l->n_hosts)
    snprintf(count, sizeof count, "%s%llu", l->n_hosts, (unsigned long long)hosts);
  address = !l->address || hosts < 2 ? "" : address ? address : "HOST0";
  return ps__fail(PS_EINVAL,
                  "%s started %llu tasks on %s, and penstock takes one a host, which "
                  "drives all its GPUs: type %s%s%s%.255s%s %s%llu%s",
                  l->name, (unsigned long long)local, here(l, local), l->one_a_host, count,
                  *address ? l->address : "", address, script ? l->script : l->binary,
                  script ? "SCRIPT ..., with gpus=" : "penstock train --gpus ",
                  (unsigned long long)(local < PS_MAX_DEVICES ? local : PS_MAX_DEVICES),
                  script ? " in its Plan" : " ...");
}

ps_status ps_hosts_task_find(ps_hosts_task *out) {
  if (!out || out->struct_bytes != sizeof *out)
    return ps__fail(PS_EINVAL, "ps_hosts_task_find: out must be given, with its struct_bytes");
  ps_hosts_task t = {.struct_bytes = sizeof t, .n_hosts = 1};
  for (size_t i = 0; i < sizeof launchers / sizeof *launchers; i++) {
    const launcher *l = &launchers[i];
    uint64_t rank = 0, n = 1, local;
    bool there;
    const bool hydra = number("MPI_LOCALNRANKS", &local) && number("PMI_RANK", &rank);
    PS_TRY(find_rank(l, &rank, &n, &there));
    if (!there || (strcmp(l->name, "srun") == 0 && hydra)) /* which has started mpiexec's tasks */
      continue;
    local = tasks_on_a_host(l);
    if (local > 1)
      return refuse(l, n, local);
    if (n < 2)
      break;
    if (n > PS_MAX_HOSTS || rank >= n)
      return ps__fail(PS_EINVAL,
                      "%s says rank %llu of %llu: ranks are below the number of "
                      "tasks, which is at most %d",
                      l->name, (unsigned long long)rank, (unsigned long long)n, PS_MAX_HOSTS);
    t.rank = (uint32_t)rank;
    t.n_hosts = (uint32_t)n;
    PS_TRY(find_address(l, &t));
    break;
  }
  *out = t;
  return PS_OK;
}
