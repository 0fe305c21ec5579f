/* meet.c - the tasks find each other. Rank 0 listens at the address that all know. Each other rank
 * listens at a port of its own, and tells rank 0 which. When all have come, rank 0 tells everybody
 * where the others are, and each rank connects to those before it. */
#include "hosts/hosts.h"
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CONTROL, DATA, KINDS };
static const char magic[16] = "penstock tasks 1";

/* The first words of each connection, from the higher rank to the lower. */
typedef struct hello {
  char magic[16], version[32];
  uint32_t rank, n, kind, port; /* port: at which this rank listens; 0 for rank 0's */
} hello;

/* What rank 0 answers to each: where everybody is, or why they cannot train together. */
typedef struct answer {
  int32_t status;
  char message[256];
  struct sockaddr_storage at[PS_MAX_HOSTS];
} answer;

typedef struct meeting {
  ps_hosts *h;
  const ps_hosts_config *cfg;
  double until_s;
  int listener;
} meeting;

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int left_ms(const meeting *m) {
  const double s = m->until_s - now_s();
  return s > 0 ? (int)(s * 1000) + 1 : 0;
}

/* ---- sockets --------------------------------------------------------------------------------- */

/* Keepalive ends a control connection to a host that is gone after about 20 s. */
static void set_options(int fd, uint32_t kind) {
  const int on = 1, idle_s = 5, between_s = 5, probes = 3, unanswered_ms = 20000;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (kind != CONTROL)
    return;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between_s, sizeof between_s);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof unanswered_ms);
}

/* All of @bytes; false: they did not come in time, or the connection has ended. */
static bool receive(const meeting *m, int fd, void *to, size_t bytes) {
  for (char *at = to; bytes;) {
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (poll(&p, 1, left_ms(m)) <= 0)
      return false;
    const ssize_t n = recv(fd, at, bytes, 0);
    if (n <= 0)
      return false;
    at += n;
    bytes -= (size_t)n;
  }
  return true;
}

static bool send_all(int fd, const void *from, size_t bytes) {
  for (const char *at = from; bytes;) {
    const ssize_t n = send(fd, at, bytes, MSG_NOSIGNAL);
    if (n <= 0)
      return false;
    at += n;
    bytes -= (size_t)n;
  }
  return true;
}

static ps_status listen_at(meeting *m, uint32_t port, uint32_t *got) {
  struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
  socklen_t bytes = sizeof at;
  const int on = 1, off = 0;
  m->listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (m->listener >= 0) {
    setsockopt(m->listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(m->listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off); /* IPv4 too */
  }
  int failed = m->listener < 0 || bind(m->listener, (struct sockaddr *)&at, bytes) != 0;
  if (m->listener < 0 && errno == EAFNOSUPPORT) { /* a kernel without IPv6 */
    struct sockaddr_in old = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    m->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    failed = m->listener < 0 || bind(m->listener, (struct sockaddr *)&old, sizeof old) != 0;
  }
  if (failed || listen(m->listener, 2 * PS_MAX_HOSTS) != 0 ||
      getsockname(m->listener, (struct sockaddr *)&at, &bytes) != 0)
    return ps__fail(PS_EIO, "rank %u cannot listen at port %u: %s: give another MASTER_PORT",
                    m->h->rank, port, strerror(errno));
  *got = ntohs(at.sin6_port); /* at the same place in both kinds of addresses */
  return PS_OK;
}

static ps_status nobody(const meeting *m, const char *address, uint32_t port) {
  return ps__fail(PS_EIO,
                  "nobody answers at %s port %u within %g s: rank 0 must run there, and the port "
                  "must be open",
                  address, port, m->cfg->wait_s);
}

/* A port of this machine that nobody listens at may connect to itself. */
static bool is_own(int fd) {
  struct sockaddr_storage own = {0}, other = {0};
  socklen_t a = sizeof own, b = sizeof other;
  (void)getsockname(fd, (struct sockaddr *)&own, &a);
  (void)getpeername(fd, (struct sockaddr *)&other, &b);
  return a == b && memcmp(&own, &other, a) == 0;
}

/* One try; -1: nobody listens there yet. */
static int try_connect(const struct sockaddr *at, socklen_t bytes, int most_ms) {
  const int fd = socket(at->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0)
    return -1;
  int error = connect(fd, at, bytes) == 0 ? 0 : errno;
  socklen_t n = sizeof error;
  struct pollfd p = {.fd = fd, .events = POLLOUT};
  if (error == EINPROGRESS && poll(&p, 1, most_ms) == 1)
    (void)getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &n);
  if (error == 0 && !is_own(fd) && fcntl(fd, F_SETFL, 0) == 0)
    return fd;
  close(fd);
  return -1;
}

static void pause_ms(long ms) {
  nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* ---- connections ----------------------------------------------------------------------------- */

static hello hello_of(const meeting *m, uint32_t kind, uint32_t port) {
  hello w = {.rank = m->h->rank, .n = m->h->n, .kind = kind, .port = port};
  memcpy(w.magic, magic, sizeof w.magic);
  snprintf(w.version, sizeof w.version, "%s", ps_version());
  return w;
}

static void keep(meeting *m, uint32_t rank, uint32_t kind, int fd) {
  set_options(fd, kind);
  (kind == CONTROL ? m->h->control : m->h->data)[rank] = fd;
}

/* Connects to rank 0, whose host or process may still be starting. */
static ps_status reach_first(meeting *m, uint32_t kind, uint32_t port) {
  const ps_hosts_config *c = m->cfg;
  const struct addrinfo want = {.ai_socktype = SOCK_STREAM};
  char service[16];
  snprintf(service, sizeof service, "%u", c->port);
  for (int fd = -1; left_ms(m) > 0; pause_ms(fd < 0 ? 100 : 0)) {
    struct addrinfo *all = NULL;
    const int unknown = getaddrinfo(c->address, service, &want, &all);
    if (unknown && unknown != EAI_AGAIN)
      return ps__fail(PS_EINVAL, "the address of rank 0, %s, is not known here: %s", c->address,
                      gai_strerror(unknown));
    for (struct addrinfo *a = all; a && fd < 0; a = a->ai_next)
      fd = try_connect(a->ai_addr, a->ai_addrlen, left_ms(m) < 2000 ? left_ms(m) : 2000);
    freeaddrinfo(all);
    const hello w = hello_of(m, kind, port);
    if (fd >= 0 && send_all(fd, &w, sizeof w)) {
      keep(m, 0, kind, fd);
      return PS_OK;
    }
    if (fd >= 0)
      close(fd);
    fd = -1;
  }
  return nobody(m, c->address, c->port);
}

static ps_status reach(meeting *m, uint32_t rank, const struct sockaddr_storage *at) {
  for (uint32_t kind = 0; kind < KINDS; kind++) {
    const hello w = hello_of(m, kind, 0);
    const int fd = try_connect((const struct sockaddr *)at, sizeof *at, left_ms(m));
    if (fd < 0 || !send_all(fd, &w, sizeof w))
      return ps__fail(PS_EIO,
                      "rank %u cannot connect to rank %u: their network must let all hosts "
                      "connect to each other",
                      m->h->rank, rank);
    keep(m, rank, kind, fd);
  }
  return PS_OK;
}

/* What is wrong with a task that says hello; false: nothing. */
static bool differs(const meeting *m, const hello *w, char why[256]) {
  const ps_hosts *h = m->h;
  why[0] = 0;
  if (strncmp(w->version, ps_version(), sizeof w->version) != 0)
    snprintf(why, 256, "rank %u is penstock %.31s, and rank 0 is %s: start the same on all hosts",
             w->rank, w->version, ps_version());
  else if (w->n != h->n)
    snprintf(why, 256, "rank %u was told of %u tasks, and rank 0 of %u: start all by one launcher",
             w->rank, w->n, h->n);
  else if (w->rank >= h->n || w->kind >= KINDS ||
           (w->kind == CONTROL ? h->control : h->data)[w->rank] >= 0)
    snprintf(why, 256, "two tasks have rank %u: each needs a rank of its own, from 0 to %u",
             w->rank, h->n - 1);
  return why[0] != 0;
}

/* Accepts both connections of @n ranks. @at: their addresses by rank, for rank 0, else NULL.
 * Strangers are hung up on. */
static ps_status accept_all(meeting *m, uint32_t n, struct sockaddr_storage *at, char why[256]) {
  for (uint32_t i = 0; i < KINDS * n && !why[0];) {
    struct pollfd p = {.fd = m->listener, .events = POLLIN};
    struct sockaddr_storage from;
    socklen_t bytes = sizeof from;
    hello w;
    if (poll(&p, 1, left_ms(m)) <= 0) {
      uint32_t r = 1;
      while (r + 1 < m->h->n && m->h->control[r] >= 0)
        r++;
      return ps__fail(PS_EIO, "rank %u did not come within %g s: %u tasks were to be started", r,
                      m->cfg->wait_s, m->h->n);
    }
    const int fd = accept4(m->listener, (struct sockaddr *)&from, &bytes, SOCK_CLOEXEC);
    if (fd < 0)
      continue;
    if (!receive(m, fd, &w, sizeof w) || memcmp(w.magic, magic, sizeof magic) != 0) {
      close(fd);
      continue;
    }
    w.version[sizeof w.version - 1] = 0;
    if (differs(m, &w, why)) {
      close(fd);
      return PS_OK;
    }
    keep(m, w.rank, w.kind, fd);
    i++;
    if (at && w.kind == CONTROL) {
      at[w.rank] = from;
      ((struct sockaddr_in *)&at[w.rank])->sin_port = htons((uint16_t)w.port);
    }
  }
  return PS_OK;
}

/* ---- both sides ------------------------------------------------------------------------------ */

static ps_status lead(meeting *m) {
  ps_hosts *h = m->h;
  uint32_t port;
  char why[256] = "";
  answer *a = ps__calloc(1, sizeof *a);
  if (!a)
    return ps__fail(PS_ENOMEM, "out of memory for the tasks of other hosts");
  ps_status st = listen_at(m, m->cfg->port, &port);
  if (st == PS_OK)
    st = accept_all(m, h->n - 1, a->at, why);
  if (st == PS_OK && why[0])
    st = ps__fail(PS_EINVAL, "%s", why);
  a->status = st;
  snprintf(a->message, sizeof a->message, "%s", st == PS_OK ? "" : ps_last_error());
  for (uint32_t r = 1; r < h->n; r++)
    if (h->control[r] >= 0)
      (void)send_all(h->control[r], a, sizeof *a); /* a task that is gone is noticed later */
  ps__free(a);
  return st;
}

static ps_status follow(meeting *m) {
  ps_hosts *h = m->h;
  uint32_t port;
  char why[256] = "";
  PS_TRY(listen_at(m, 0, &port));
  for (uint32_t kind = 0; kind < KINDS; kind++)
    PS_TRY(reach_first(m, kind, port));
  answer *a = ps__calloc(1, sizeof *a);
  if (!a)
    return ps__fail(PS_ENOMEM, "out of memory for the tasks of other hosts");
  ps_status st = PS_OK;
  if (!receive(m, h->control[0], a, sizeof *a))
    st = ps__fail(PS_EIO,
                  "rank 0 did not answer rank %u within %g s: it was ended, or waits for "
                  "other tasks",
                  h->rank, m->cfg->wait_s);
  else if (a->status != PS_OK)
    st = ps__fail((ps_status)a->status, "%.255s", a->message);
  for (uint32_t r = 1; st == PS_OK && r < h->rank; r++)
    st = reach(m, r, &a->at[r]);
  if (st == PS_OK)
    st = accept_all(m, h->n - 1 - h->rank, NULL, why);
  if (st == PS_OK && why[0])
    st = ps__fail(PS_EINVAL, "%s", why);
  ps__free(a);
  return st;
}

ps_status ps__hosts_meet(ps_hosts *h, const ps_hosts_config *cfg) {
  meeting m = {.h = h, .cfg = cfg, .until_s = now_s() + cfg->wait_s, .listener = -1};
  const ps_status st = h->rank == 0 ? lead(&m) : follow(&m);
  if (m.listener >= 0)
    close(m.listener);
  return st;
}
