/* control.c - how tasks end: a thread reads the control connections of all others.
 *
 * A task that leaves says so, and its connections then end. A task that fails sends the reason to
 * all others, and each of them passes it on before it ends itself. So the first reason that a task
 * reads is the first one that there was. A connection that ends without a word is a task that was
 * killed, or a network that failed; the kernel's keepalive ends connections to hosts that are
 * gone. */
#include "hosts/hosts.h"
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LEAVES = 1, FAILS = 2 };
typedef struct frame {
  uint32_t kind;
  int32_t status;
  char message[PS__HOSTS_MESSAGE];
} frame;

/* Sends to all others, under the lock. What a full socket does not take is lost: the end of the
 * connection says the rest. */
static void tell(ps_hosts *h, uint32_t kind, ps_status status, const char *message) {
  frame f = {.kind = kind, .status = status};
  snprintf(f.message, sizeof f.message, "%s", message);
  for (uint32_t r = 0; r < h->n; r++)
    if (h->control[r] >= 0 && send(h->control[r], &f, sizeof f, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
      continue;
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

/* Reads what rank @r says; false: nothing more will come. */
static bool hear(ps_hosts *h, uint32_t r) {
  frame f;
  const ssize_t n = recv(h->control[r], &f, sizeof f, MSG_WAITALL);
  if (n < 0 && errno == EINTR)
    return true;
  if (n != sizeof f) {
    is_gone(h, r);
    return false;
  }
  f.message[sizeof f.message - 1] = 0;
  if (f.kind == FAILS)
    fail(h, (ps_status)f.status, false, f.message);
  return false;
}

static void *listen_to_all(void *arg) {
  ps_hosts *h = arg;
  struct pollfd of[PS_MAX_HOSTS + 1];
  for (uint32_t r = 0; r < h->n; r++)
    of[r] = (struct pollfd){.fd = h->control[r], .events = POLLIN};
  of[h->n] = (struct pollfd){.fd = h->wake[0], .events = POLLIN};
  for (;;) {
    if (poll(of, h->n + 1, -1) < 0 && errno != EINTR)
      return NULL;
    if (of[h->n].revents)
      return NULL;
    for (uint32_t r = 0; r < h->n; r++)
      if (of[r].fd >= 0 && of[r].revents && !hear(h, r))
        of[r].fd = -1;
  }
}

ps_status ps__hosts_start(ps_hosts *h) {
  if (pipe(h->wake) != 0)
    return ps__fail(PS_EIO, "the tasks of other hosts: no pipe: %s", strerror(errno));
  if (ps__fault_hit(PS_FAULT_THREAD) || pthread_create(&h->thread, NULL, listen_to_all, h) != 0)
    return ps__fail(PS_EDEVICE, "no thread can be started to hear the tasks of other hosts");
  h->has_thread = true;
  return PS_OK;
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
}

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
