/* fake_nccl.c - a stand-in for libnccl.so.2 whose ranks are threads of one process, for
 * test_hosts_net. It queues on lanes of that test in place of CUDA streams, and its communicators
 * never block: calls are in progress until they were asked for once.
 * FAKE_NCCL_VERSION: what ncclGetVersion() says. */
#include "fake_nccl.h"
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, REMOTE_ERROR = 6, IN_PROGRESS = 7, ID_BYTES = 128, MAX_OPS = 256 };

typedef struct id {
  char internal[ID_BYTES];
} id;

typedef struct comm {
  struct comm *next; /* of those that were aborted */
  uint64_t key;
  int n, rank, asked; /* asked: looks left until a call is over */
  bool aborted;
} comm;

typedef struct op {
  comm *c;
  bool send;
  void *data;
  size_t bytes;
  int peer;
  fake_lane *lane;
} op;

typedef struct letter {
  struct letter *next;
  uint64_t key;
  int from, to;
  size_t bytes;
  char data[];
} letter;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static letter *letters; /* oldest first */
static comm *aborted;
static uint64_t n_ids, joined[64], n_aborts;
static int failing_rank = -1;
static _Thread_local op group[MAX_OPS];
static _Thread_local int n_group;

/* From now on sends of @rank are errors; -1: of none. */
EXPORT void fake_nccl_fail(int rank) { failing_rank = rank; }
EXPORT uint64_t fake_nccl_aborts(void) {
  pthread_mutex_lock(&lock);
  const uint64_t n = n_aborts;
  pthread_mutex_unlock(&lock);
  return n;
}

EXPORT int ncclGetVersion(int *version) {
  const char *said = getenv("FAKE_NCCL_VERSION");
  *version = said ? atoi(said) : 22907;
  return OK;
}

EXPORT const char *ncclGetErrorString(int error) {
  return error == REMOTE_ERROR ? "remote error" : "unhandled";
}
EXPORT const char *ncclGetLastError(void *c) {
  (void)c;
  return "as it was told";
}

EXPORT int ncclGetUniqueId(id *out) {
  pthread_mutex_lock(&lock);
  const uint64_t key = ++n_ids;
  pthread_mutex_unlock(&lock);
  memset(out, 7, sizeof *out);
  memcpy(out, &key, sizeof key);
  return OK;
}

EXPORT int ncclCommInitRankConfig(void **out, int n, id of, int rank, const int *config) {
  comm *c = calloc(1, sizeof *c);
  if (!c || config[2] != (int)0xcafebeef || config[4] != 0)
    abort(); /* another layout than NCCL's, or a communicator that blocks */
  memcpy(&c->key, &of, sizeof c->key);
  c->n = n;
  c->rank = rank;
  pthread_mutex_lock(&lock);
  joined[c->key % 64]++;
  pthread_mutex_unlock(&lock);
  *out = c;
  return IN_PROGRESS;
}

EXPORT int ncclCommGetAsyncError(comm *c, int *error) {
  pthread_mutex_lock(&lock);
  *error = c->asked > 0 || joined[c->key % 64] < (uint64_t)c->n ? IN_PROGRESS : OK;
  c->asked -= c->asked > 0;
  pthread_mutex_unlock(&lock);
  return OK;
}

EXPORT int ncclCommFinalize(comm *c) {
  pthread_mutex_lock(&lock);
  c->asked = 1;
  pthread_mutex_unlock(&lock);
  return IN_PROGRESS;
}
EXPORT int ncclCommDestroy(comm *c) {
  free(c);
  return OK;
}

/* It frees nothing: exchanges that it ends may be at work. */
EXPORT int ncclCommAbort(comm *c) {
  pthread_mutex_lock(&lock);
  c->aborted = true;
  c->next = aborted;
  aborted = c;
  n_aborts++;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return OK;
}

/* ---- exchanges ------------------------------------------------------------------------------- */

EXPORT int ncclGroupStart(void) {
  n_group = 0;
  return OK;
}

static int add(bool send, void *data, size_t n, int type, int peer, comm *c, fake_lane *lane) {
  if (type != 0 || n_group == MAX_OPS)
    abort();
  if (send && failing_rank == c->rank)
    return REMOTE_ERROR;
  group[n_group++] =
      (op){.c = c, .send = send, .data = data, .bytes = n, .peer = peer, .lane = lane};
  return OK;
}
EXPORT int ncclSend(const void *data, size_t n, int type, int peer, comm *c, fake_lane *lane) {
  return add(true, (void *)data, n, type, peer, c, lane);
}
EXPORT int ncclRecv(void *data, size_t n, int type, int peer, comm *c, fake_lane *lane) {
  return add(false, data, n, type, peer, c, lane);
}

typedef struct exchange {
  int n;
  op ops[];
} exchange;

static void post(const op *o) {
  letter *l = malloc(sizeof *l + o->bytes), **end = &letters;
  *l = (letter){.key = o->c->key, .from = o->c->rank, .to = o->peer, .bytes = o->bytes};
  memcpy(l->data, o->data, o->bytes);
  while (*end)
    end = &(*end)->next;
  *end = l;
}

/* The oldest letter from the peer; false: the communicator was aborted. */
static bool receive(const op *o) {
  for (;;) {
    letter **at = &letters;
    if (o->c->aborted)
      return false;
    while (*at && ((*at)->key != o->c->key || (*at)->from != o->peer || (*at)->to != o->c->rank))
      at = &(*at)->next;
    if (!*at) {
      pthread_cond_wait(&changed, &lock);
      continue;
    }
    letter *l = *at;
    if (l->bytes != o->bytes)
      abort(); /* the two sides disagree */
    memcpy(o->data, l->data, l->bytes);
    *at = l->next;
    free(l);
    return true;
  }
}

static void run(void *arg) {
  exchange *e = arg;
  bool alive = true;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < e->n; i++)
    if (e->ops[i].send)
      post(&e->ops[i]);
  pthread_cond_broadcast(&changed);
  for (int i = 0; i < e->n && alive; i++)
    if (!e->ops[i].send)
      alive = receive(&e->ops[i]);
  pthread_mutex_unlock(&lock);
  free(e);
}

EXPORT int ncclGroupEnd(void) {
  if (!n_group)
    return OK;
  exchange *e = malloc(sizeof *e + (size_t)n_group * sizeof *e->ops);
  e->n = n_group;
  memcpy(e->ops, group, (size_t)n_group * sizeof *group);
  pthread_mutex_lock(&lock);
  group[0].c->asked = 1;
  pthread_mutex_unlock(&lock);
  group[0].lane->queue(group[0].lane, run, e);
  n_group = 0;
  return IN_PROGRESS;
}
