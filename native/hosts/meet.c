/* meet.c - the tasks find each other. Rank 0 listens at the address that all know. Each other rank
 * listens at a port of its own, and tells rank 0 which. When all have come, rank 0 tells everybody
 * where the others are, and each rank connects to those before it. Where a task differs, rank 0
 * tells all why, and all end.
 *
 * So that tasks of two versions can tell each other that they differ, the following is the same in
 * all versions: the whole greeting (hello), and how an answer begins (status and message). A later
 * version adds to the greeting behind its end, and rank 0 reads that after it has compared the
 * versions. It changes what follows an answer's message as it likes. */
#include "hosts/hosts.h"
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CONTROL, DATA, KINDS };
static const char magic[16] = "penstock tasks 1";

/* The first words of each connection, from the higher rank to the lower. Never changed. */
typedef struct hello {
  char magic[16], version[32];
  uint32_t rank, n, kind, port; /* port: at which this rank listens; 0 for rank 0's */
} hello;

/* What rank 0 answers to each: where everybody is, or why they cannot train together. It always
 * begins with status and message. */
typedef struct answer {
  int32_t status;
  char message[256];
  struct sockaddr_storage at[PS_MAX_HOSTS];
} answer;

/* Somebody who has connected, until all of the greeting is there. */
typedef struct guest {
  int fd;
  size_t bytes; /* of @said */
  hello said;
  struct sockaddr_storage from;
} guest;

/* GUESTS: twice as many as all tasks' connections, so strangers who say nothing keep no task out.
 * REFUSED_S: how long rank 0 stays to tell the reason to tasks that have not come yet.
 * SILENT_S: how long a task waits before it logs for whom, and where. */
enum { GUESTS = 2 * KINDS * PS_MAX_HOSTS, REFUSED_S = 1, SILENT_S = 3 };

typedef struct meeting {
  ps_hosts *h;
  const ps_hosts_config *cfg;
  double until_s, say_s; /* say_s: when the wait is logged, once */
  const char *not_own;   /* not_own(), once it is known */
  int listener;
  guest *guest; /* GUESTS of them, the oldest first */
  uint32_t n_guests;
} meeting;

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ms_until(double then_s) {
  const double s = then_s - now_s();
  return s > 0 ? (int)(s * 1000) + 1 : 0;
}
static double earlier(double a, double b) { return a < b ? a : b; }
static int left_ms(const meeting *m) { return ms_until(m->until_s); }

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
                  "nobody answers at %s port %u within %g s: rank 0 must run there and wait for "
                  "this task, and the port must be open",
                  address, port, m->cfg->wait_s);
}

/* How many tasks have yet to connect to this one, and the first of them. */
static uint32_t n_missing(const ps_hosts *h, uint32_t *first) {
  uint32_t n = 0;
  for (uint32_t r = h->n - 1; r > h->rank; r--)
    if (h->control[r] < 0 || h->data[r] < 0) {
      *first = r;
      n++;
    }
  return n;
}

/* Whether a socket of this host can have @address. */
static bool is_of_this_host(const char *address) {
  const struct addrinfo want = {.ai_socktype = SOCK_STREAM};
  struct addrinfo *all = NULL;
  bool own = getaddrinfo(address, NULL, &want, &all) != 0; /* then it is not known whose it is */
  for (struct addrinfo *a = all; a && !own; a = a->ai_next) {
    const int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    own = fd < 0 || bind(fd, a->ai_addr, a->ai_addrlen) == 0 || errno != EADDRNOTAVAIL;
    if (fd >= 0)
      close(fd);
  }
  freeaddrinfo(all);
  return own;
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

/* What a user may have to mend where no task comes to rank 0's address. */
static const char *not_own(meeting *m) {
  if (!m->not_own)
    m->not_own = is_of_this_host(m->cfg->address) ? "" : ", which is no address of rank 0's host,";
  return m->not_own;
}

static void say_nothing_more(meeting *m) { m->say_s = m->until_s + SILENT_S; }

/* Logs once, after SILENT_S, for whom this task waits. */
static void say_wait(meeting *m) {
  const ps_hosts_config *c = m->cfg;
  if (ms_until(m->say_s) > 0)
    return;
  say_nothing_more(m);
  if (m->h->rank > 0) {
    ps__log(PS_LOG_INFO, "rank %u waits for rank 0 at %s port %u: %g s at most", m->h->rank,
            c->address, c->port, c->wait_s);
    return;
  }
  uint32_t first = 0;
  const uint32_t missing = n_missing(m->h, &first);
  char more[32] = "";
  if (missing > 1)
    snprintf(more, sizeof more, " and %u more", missing - 1);
  ps__log(PS_LOG_INFO, "rank 0 waits at %s port %u%s for rank %u%s: %g s at most", c->address,
          c->port, not_own(m), first, more, c->wait_s);
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

/* Whether rank 0 has answered, or has gone. */
static bool is_answered(const meeting *m) {
  struct pollfd p = {.fd = m->h->control[0], .events = POLLIN};
  return p.fd >= 0 && poll(&p, 1, 0) == 1;
}

/* Connects to rank 0, whose host or process may still be starting. Rank 0 may answer the first
 * connection before there is a second one, which then is not needed. */
static ps_status reach_first(meeting *m, uint32_t kind, uint32_t port) {
  const ps_hosts_config *c = m->cfg;
  const struct addrinfo want = {.ai_socktype = SOCK_STREAM};
  char service[16];
  snprintf(service, sizeof service, "%u", c->port);
  for (int fd = -1; left_ms(m) > 0 && !is_answered(m); pause_ms(fd < 0 ? 100 : 0)) {
    struct addrinfo *all = NULL;
    const int unknown = getaddrinfo(c->address, service, &want, &all);
    say_wait(m);
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
  return is_answered(m) ? PS_OK : nobody(m, c->address, c->port);
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

/* ---- guests ---------------------------------------------------------------------------------- */

static guest remove_guest(meeting *m, uint32_t i) {
  const guest g = m->guest[i];
  memmove(&m->guest[i], &m->guest[i + 1], (--m->n_guests - i) * sizeof g);
  return g;
}

/* Where there are too many, the oldest is hung up on. */
static void let_in(meeting *m) {
  guest g = {.fd = -1};
  socklen_t bytes = sizeof g.from;
  g.fd = accept4(m->listener, (struct sockaddr *)&g.from, &bytes, SOCK_CLOEXEC);
  if (g.fd < 0)
    return;
  if (m->n_guests == GUESTS)
    close(remove_guest(m, 0).fd);
  m->guest[m->n_guests++] = g;
}

/* Reads what guest @i says. A stranger is hung up on. True: all of the greeting is there, and the
 * guest is *out, whose socket the caller closes. */
static bool hear(meeting *m, uint32_t i, guest *out) {
  guest *g = &m->guest[i];
  const ssize_t n =
      recv(g->fd, (char *)&g->said + g->bytes, sizeof g->said - g->bytes, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
    return false;
  g->bytes += n > 0 ? (size_t)n : 0;
  if (n <= 0 ||
      memcmp(g->said.magic, magic, g->bytes < sizeof magic ? g->bytes : sizeof magic) != 0) {
    close(remove_guest(m, i).fd);
    return false;
  }
  if (g->bytes < sizeof g->said)
    return false;
  *out = remove_guest(m, i);
  out->said.version[sizeof out->said.version - 1] = 0;
  return true;
}

/* The next guest whose greeting is there; false: none comes in time. Guests who say nothing keep
 * nobody waiting. */
static bool next_guest(meeting *m, guest *out) {
  for (;;) {
    struct pollfd of[GUESTS + 1];
    uint32_t i = 0;
    for (; i < m->n_guests; i++)
      of[i] = (struct pollfd){.fd = m->guest[i].fd, .events = POLLIN};
    of[m->n_guests] = (struct pollfd){.fd = m->listener, .events = POLLIN};
    if (left_ms(m) == 0)
      return false;
    const int ready = poll(of, m->n_guests + 1, ms_until(earlier(m->say_s, m->until_s)));
    say_wait(m);
    if (ready < 0)
      return false;
    if (ready == 0)
      continue;
    for (i = 0; i < m->n_guests && !of[i].revents; i++)
      ;
    if (i == m->n_guests)
      let_in(m);
    else if (hear(m, i, out))
      return true;
  }
}

/* Accepts both connections of @n ranks. @at: their addresses by rank, for rank 0, else NULL.
 * @why: what is wrong with *refused, the first who differs, whose socket the caller closes. */
static ps_status accept_all(meeting *m, uint32_t n, struct sockaddr_storage *at, char why[256],
                            guest *refused) {
  for (uint32_t i = 0; i < KINDS * n; i++) {
    guest g;
    if (!next_guest(m, &g)) {
      uint32_t r = 0;
      (void)n_missing(m->h, &r);
      if (m->h->rank > 0)
        return ps__fail(PS_EIO, "rank %u did not connect to rank %u within %g s", r, m->h->rank,
                        m->cfg->wait_s);
      return ps__fail(PS_EIO,
                      "rank %u did not come to %s port %u%s within %g s: %u tasks were to be "
                      "started",
                      r, m->cfg->address, m->cfg->port, not_own(m), m->cfg->wait_s, m->h->n);
    }
    if (differs(m, &g.said, why)) {
      *refused = g;
      return PS_OK;
    }
    keep(m, g.said.rank, g.said.kind, g.fd);
    if (at && g.said.kind == CONTROL) {
      at[g.said.rank] = g.from;
      ((struct sockaddr_in *)&at[g.said.rank])->sin_port = htons((uint16_t)g.said.port);
    }
  }
  return PS_OK;
}

static uint32_t n_came(const ps_hosts *h) {
  uint32_t n = 0;
  for (uint32_t r = 1; r < h->n; r++)
    n += h->control[r] >= 0;
  return n;
}

/* Tells guest @g and all others that come within REFUSED_S why they are refused. It ends once all
 * have come that any of them knows of. A socket that is closed with unread bytes resets its
 * connection, and the other side may lose the answer: so each is read to its end. */
static void refuse(meeting *m, const answer *a, guest g) {
  int told[KINDS * PS_MAX_HOSTS];
  uint32_t n_told = 0, came = n_came(m->h), tasks = m->h->n;
  const double until_s = now_s() + REFUSED_S;
  char rest;
  m->until_s = earlier(until_s, m->until_s);
  say_nothing_more(m);
  do {
    if (send(g.fd, a, sizeof *a, MSG_NOSIGNAL | MSG_DONTWAIT) > 0)
      shutdown(g.fd, SHUT_WR);
    told[n_told++] = g.fd;
    came += g.said.kind == CONTROL;
    tasks = g.said.n > tasks ? g.said.n : tasks;
  } while (came + 1 < tasks && n_told < sizeof told / sizeof *told && next_guest(m, &g));
  for (uint32_t i = 0; i < n_told; i++) {
    while (left_ms(m) > 0 && receive(m, told[i], &rest, 1))
      ;
    close(told[i]);
  }
}

/* ---- both sides ------------------------------------------------------------------------------ */

static ps_status lead(meeting *m) {
  ps_hosts *h = m->h;
  uint32_t port;
  char why[256] = "";
  answer *a = ps__calloc(1, sizeof *a);
  if (!a)
    return ps__fail(PS_ENOMEM, "out of memory for the tasks of other hosts");
  guest refused = {.fd = -1};
  ps_status st = listen_at(m, m->cfg->port, &port);
  if (st == PS_OK)
    st = accept_all(m, h->n - 1, a->at, why, &refused);
  if (st == PS_OK && why[0])
    st = ps__fail(PS_EINVAL, "%s", why);
  a->status = st;
  snprintf(a->message, sizeof a->message, "%s", st == PS_OK ? "" : ps_last_error());
  for (uint32_t r = 1; r < h->n; r++)
    if (h->control[r] >= 0)
      (void)send_all(h->control[r], a, sizeof *a); /* a task that is gone is noticed later */
  if (refused.fd >= 0)
    refuse(m, a, refused);
  ps__free(a);
  return st;
}

/* Rank 0's answer. Of another version's only the beginning is known. */
static ps_status read_answer(const meeting *m, answer *a) {
  const int fd = m->h->control[0];
  const size_t begin = offsetof(answer, at);
  if (receive(m, fd, a, begin) && a->status != PS_OK)
    return ps__fail((ps_status)a->status, "%.255s", a->message);
  if (a->status == PS_OK && receive(m, fd, a->at, sizeof a->at))
    return PS_OK;
  if (left_ms(m) > 0)
    return ps__fail(PS_EIO,
                    "rank 0 has ended without an answer to rank %u: what rank 0 prints "
                    "says why",
                    m->h->rank);
  return ps__fail(PS_EIO, "rank 0 did not answer rank %u within %g s: it waits for other tasks",
                  m->h->rank, m->cfg->wait_s);
}

static ps_status follow(meeting *m) {
  ps_hosts *h = m->h;
  uint32_t port;
  char why[256] = "";
  PS_TRY(listen_at(m, 0, &port));
  for (uint32_t kind = 0; kind < KINDS; kind++)
    PS_TRY(reach_first(m, kind, port));
  say_nothing_more(m); /* rank 0 says for whom all wait */
  answer *a = ps__calloc(1, sizeof *a);
  if (!a)
    return ps__fail(PS_ENOMEM, "out of memory for the tasks of other hosts");
  guest refused = {.fd = -1};
  ps_status st = read_answer(m, a);
  for (uint32_t r = 1; st == PS_OK && r < h->rank; r++)
    st = reach(m, r, &a->at[r]);
  if (st == PS_OK)
    st = accept_all(m, h->n - 1 - h->rank, NULL, why, &refused);
  if (st == PS_OK && why[0])
    st = ps__fail(PS_EINVAL, "%s", why);
  if (refused.fd >= 0)
    close(refused.fd);
  ps__free(a);
  return st;
}

ps_status ps__hosts_meet(ps_hosts *h, const ps_hosts_config *cfg) {
  meeting m = {.h = h, .cfg = cfg, .listener = -1};
  m.until_s = now_s() + cfg->wait_s;
  m.say_s = now_s() + SILENT_S;
  m.guest = ps__calloc(GUESTS, sizeof *m.guest);
  if (!m.guest)
    return ps__fail(PS_ENOMEM, "out of memory for the tasks of other hosts");
  const ps_status st = h->rank == 0 ? lead(&m) : follow(&m);
  for (uint32_t i = 0; i < m.n_guests; i++)
    close(m.guest[i].fd);
  ps__free(m.guest);
  if (m.listener >= 0)
    close(m.listener);
  return st;
}
