/* control.c - how tasks end: a thread reads the control connections of all others.
 *
 * A task that leaves says so, and its connections then end. A task that fails sends the reason to
 * all others, and each of them passes it on before it ends itself. So the first reason that a task
 * reads is the first one that there was. A connection that ends without a word is a task that was
 * killed, or a network that failed; the kernel's keepalive ends connections to hosts that are
 * gone.
 *
 * The thread also says every few seconds that its task lives. A process that is stopped, or a
 * stranger, says nothing. Until the first step that ends all after the time that tasks wait for
 * each other. Later such a task is waited for, and a line says so. */
#include "hosts/greet.h"
#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LEAVES = 1, FAILS = 2, LIVES = 3 };
typedef struct frame {
  uint32_t kind;
  int32_t status;
  char message[PS__HOSTS_MESSAGE];
} frame;

/* The control thread's own. */
typedef struct ps__peer {
  frame f;
  size_t bytes;   /* of f that have come */
  double heard_s; /* when it last said something */
  bool silent;    /* it is logged that it says nothing */
} ps__peer;

/* Under the lock. What a full socket does not take is lost: the end of the connection says the
 * rest. */
static void tell_one(ps_hosts *h, uint32_t r, const frame *f) {
  if (h->control[r] < 0 || h->torn[r])
    return;
  const ssize_t n = send(h->control[r], f, sizeof *f, MSG_NOSIGNAL | MSG_DONTWAIT);
  h->torn[r] = n > 0 && n < (ssize_t)sizeof *f;
  if (h->torn[r])
    shutdown(h->control[r], SHUT_WR);
}

static void tell(ps_hosts *h, uint32_t kind, ps_status status, const char *message) {
  frame f = {.kind = kind, .status = status};
  snprintf(f.message, sizeof f.message, "%s", message);
  for (uint32_t r = 0; r < h->n; r++)
    tell_one(h, r, &f);
}

/* The first failure ends all calls on data. */
static void fail(ps_hosts *h, ps_status status, bool here, const char *message) {
  pthread_mutex_lock(&h->lock);
  if (h->failed == PS_OK) {
    char said[PS__HOSTS_MESSAGE];
    h->failed = status;
    h->here = here;
    snprintf(h->message, sizeof h->message, "%s", message);
    if (here)
      snprintf(said, sizeof said, "rank %u failed: %.960s", h->rank, message);
    else
      snprintf(said, sizeof said, "%s", message);
    tell(h, FAILS, status, said);
    for (uint32_t r = 0; r < h->n; r++)
      if (h->data[r] >= 0)
        shutdown(h->data[r], SHUT_RDWR);
    if (!here && h->on_failure)
      h->on_failure(h->user);
  }
  pthread_mutex_unlock(&h->lock);
}

void ps_hosts_fail(ps_hosts *h, ps_status status, const char *why) {
  if (h)
    fail(h, status == PS_OK ? PS_EINTERNAL : status, true, why ? why : "");
}

static void is_gone(ps_hosts *h, uint32_t rank) {
  char message[PS__HOSTS_MESSAGE], what[PS__HOSTS_WHAT];
  pthread_mutex_lock(&h->lock);
  snprintf(what, sizeof what, "%s", h->what);
  const bool inside = h->inside;
  pthread_mutex_unlock(&h->lock);
  snprintf(message, sizeof message,
           "rank %u is gone: its process was ended or its network failed, seen by rank %u %s %s",
           rank, h->rank, inside ? "during" : "after", what);
  fail(h, PS_EIO, false, message);
}

/* What rank @r said; false: nothing more will come. */
static bool heard(ps_hosts *h, uint32_t r) {
  frame *f = &h->peer[r].f;
  h->peer[r].bytes = 0;
  f->message[sizeof f->message - 1] = 0;
  if (f->kind == LIVES)
    return true;
  if (f->kind == FAILS)
    fail(h, ps__status_of(f->status), false, f->message);
  else if (f->kind != LEAVES)
    is_gone(h, r);
  return false;
}

/* Reads what rank @r says, but keeps no other one waiting; false: nothing more will come. */
static bool hear(ps_hosts *h, uint32_t r) {
  enum { AT_ONCE = 64 };
  ps__peer *p = &h->peer[r];
  for (int i = 0; i < AT_ONCE; i++) {
    const ssize_t n =
        recv(h->control[r], (char *)&p->f + p->bytes, sizeof p->f - p->bytes, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK))
      return true;
    if (n <= 0) {
      is_gone(h, r);
      return false;
    }
    p->heard_s = ps__now_s();
    p->silent = false;
    p->bytes += (size_t)n;
    if (p->bytes == sizeof p->f && !heard(h, r))
      return false;
  }
  return true;
}

/* Rank @r has said nothing for @s seconds. The first rank that is awake logs it. */
static void is_silent(ps_hosts *h, uint32_t r, double s) {
  char message[PS__HOSTS_MESSAGE], what[PS__HOSTS_WHAT];
  pthread_mutex_lock(&h->lock);
  snprintf(what, sizeof what, "%s", h->what);
  const bool inside = h->inside && h->failed == PS_OK;
  pthread_mutex_unlock(&h->lock);
  if (!inside)
    return;
  const bool ends = !atomic_load(&h->trains) && s >= h->wait_s;
  bool first = true;
  for (uint32_t i = 0; i < h->rank; i++)
    first &= ps__now_s() - h->peer[i].heard_s >= ps__hosts_times.silent_s;
  snprintf(message, sizeof message,
           "rank %u has said nothing for %.0f s, and rank %u waits for it during %s: its process "
           "may be stopped, or its machine busy",
           r, s, h->rank, what);
  if (ends)
    fail(h, PS_EIO, false, message);
  else if (first && !h->peer[r].silent)
    ps__log(PS_LOG_WARN, "%s", message);
  h->peer[r].silent |= first;
}

/* To those that listen: what a task that is stopped does not read would fill its socket. @of: by
 * rank, a socket below 0: nothing more comes from it. */
static void beat(ps_hosts *h, const struct pollfd *of, bool was_stopped) {
  const frame f = {.kind = LIVES};
  const double now = ps__now_s();
  for (uint32_t r = 0; r < h->n; r++) {
    const double s = was_stopped ? 0 : now - h->peer[r].heard_s;
    if (of[r].fd < 0)
      continue;
    if (was_stopped)
      h->peer[r].heard_s = now;
    pthread_mutex_lock(&h->lock);
    if (s < 3 * ps__hosts_times.silent_s)
      tell_one(h, r, &f);
    pthread_mutex_unlock(&h->lock);
    if (s >= ps__hosts_times.silent_s)
      is_silent(h, r, s);
  }
}

/* All have met: nobody else can come. */
static void turn_away(ps_hosts *h, const struct pollfd *of) {
  ps__stranger g;
  char why[200];
  if (!ps__door_look(h->door, of, &g))
    return;
  snprintf(why, sizeof why,
           "all %u tasks have met already, so that two have rank %u: each needs a rank of its own, "
           "or another MASTER_PORT",
           h->n, g.said.rank);
  ps__door_hang_up(h->door, &g, PS__DIFFERS, why);
}

static void *listen_to_all(void *arg) {
  ps_hosts *h = arg;
  struct pollfd of[PS_MAX_HOSTS + 1 + PS__DOOR_FDS];
  double last_s = ps__now_s(), beat_s = last_s;
  for (uint32_t r = 0; r < h->n; r++) {
    of[r] = (struct pollfd){.fd = h->control[r], .events = POLLIN};
    h->peer[r].heard_s = last_s;
  }
  of[h->n] = (struct pollfd){.fd = h->wake[0], .events = POLLIN};
  for (;;) {
    double until_s = beat_s;
    const uint32_t n = h->n + 1 + ps__door_poll(h->door, of + h->n + 1, &until_s);
    const int ready = poll(of, n, ps__ms_until(until_s));
    if ((ready < 0 && errno != EINTR) || (ready > 0 && of[h->n].revents))
      return NULL;
    for (uint32_t r = 0; ready > 0 && r < h->n; r++)
      if (of[r].fd >= 0 && of[r].revents && !hear(h, r))
        of[r].fd = -1;
    if (ready >= 0)
      turn_away(h, of + h->n + 1);
    const double now = ps__now_s();
    if (now >= beat_s) {
      beat(h, of, now - last_s > ps__hosts_times.beat_s + ps__hosts_times.silent_s / 2);
      beat_s = now + ps__hosts_times.beat_s;
    }
    last_s = now;
  }
}

ps_status ps__hosts_start(ps_hosts *h) {
  h->peer = ps__calloc(h->n, sizeof *h->peer);
  if (!h->peer)
    return ps__fail(PS_ENOMEM, "out of memory for the tasks of other hosts");
  if (pipe(h->wake) != 0)
    return ps__fail(PS_EIO, "the tasks of other hosts: no pipe: %s", strerror(errno));
  if (ps__fault_hit(PS_FAULT_THREAD) || pthread_create(&h->thread, NULL, listen_to_all, h) != 0)
    return ps__fail(PS_EDEVICE, "no thread can be started to hear the tasks of other hosts");
  h->has_thread = true;
  return PS_OK;
}

/* A socket that is closed with unread bytes resets its connection, and what this task said last may
 * be lost. */
static void read_the_rest(ps_hosts *h) {
  char rest[1024];
  for (uint32_t r = 0; r < h->n; r++) {
    if (h->control[r] < 0)
      continue;
    shutdown(h->control[r], SHUT_WR);
    while (recv(h->control[r], rest, sizeof rest, MSG_DONTWAIT) > 0)
      ;
  }
}

void ps__hosts_end(ps_hosts *h) {
  pthread_mutex_lock(&h->lock);
  if (h->failed == PS_OK)
    tell(h, LEAVES, PS_OK, "");
  pthread_mutex_unlock(&h->lock);
  if (!h->has_thread)
    return;
  const ssize_t woken = write(h->wake[1], "", 1);
  (void)woken; /* a pipe that is empty takes a byte */
  pthread_join(h->thread, NULL);
  read_the_rest(h);
}

void ps__hosts_begin(ps_hosts *h) { atomic_store(&h->trains, true); }

ps_status ps__hosts_lost(ps_hosts *h, uint32_t rank) {
  /* A task that fails says so before it ends the connection, but this task's thread may be late to
   * read it where the CPUs are busy. So only after 10 s without a word is it the network. */
  for (int i = 0; i < 1000 && ps__hosts_failure(h) == PS_OK; i++) {
    pthread_mutex_lock(&h->lock);
    const bool here = h->failed != PS_OK;
    pthread_mutex_unlock(&h->lock);
    if (here)
      return ps__fail(PS_ECANCELLED, "this task has failed");
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  }
  is_gone(h, rank);
  return ps__hosts_failure(h);
}

/* ---- what others ask ------------------------------------------------------------------------- */

void ps__hosts_watch(ps_hosts *h, void (*failed)(void *user), void *user) {
  pthread_mutex_lock(&h->lock);
  h->on_failure = failed;
  h->user = user;
  if (failed && h->failed != PS_OK && !h->here)
    failed(user);
  pthread_mutex_unlock(&h->lock);
}

ps_status ps__hosts_failure(ps_hosts *h) {
  pthread_mutex_lock(&h->lock);
  ps_status st = h->here ? PS_OK : h->failed;
  if (st != PS_OK)
    ps__fail(st == PS_ECANCELLED ? PS_EIO : st, "%s", h->message);
  pthread_mutex_unlock(&h->lock);
  return st == PS_ECANCELLED ? PS_EIO : st;
}

ps_status ps__hosts_check(ps_hosts *h) {
  pthread_mutex_lock(&h->lock);
  const ps_status st = h->failed;
  pthread_mutex_unlock(&h->lock);
  if (st == PS_OK)
    return PS_OK;
  const ps_status others = ps__hosts_failure(h);
  return others != PS_OK ? others : ps__fail(PS_ECANCELLED, "this task has failed");
}

ps_status ps__hosts_enter(ps_hosts *h, const char *what) {
  pthread_mutex_lock(&h->lock);
  h->inside = true;
  snprintf(h->what, sizeof h->what, "%s", what);
  pthread_mutex_unlock(&h->lock);
  return ps__hosts_check(h);
}

void ps__hosts_leave(ps_hosts *h) {
  pthread_mutex_lock(&h->lock);
  h->inside = false;
  pthread_mutex_unlock(&h->lock);
}
