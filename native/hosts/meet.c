/* meet.c - the tasks find each other. Rank 0 listens at the address that all know. Each other rank
 * listens at a port of its own, at the address from which it reaches rank 0, and tells rank 0 the
 * port. When all have come, rank 0 tells everybody where the others are, and each rank connects to
 * those before it. Where a task that knows the secret differs, rank 0 tells all why, and all end.
 * Whoever else says something wrong is hung up on, and the others are awaited on.
 *
 * Each connection, of control or data, begins so. The higher rank connects. Numbers are
 * little-endian, as on all machines that Penstock runs on.
 *
 *   who       field        bytes  what
 *   connects  magic           16  "penstock tasks 2"
 *             version         32  of the program, with a NUL at the end
 *             rank, n          8  of this task; how many it was told of
 *             kind             4  0: control, 1: data
 *             port             4  where this rank listens, on control to rank 0; else 0
 *             has_secret       4  1: it has a secret
 *             task            16  random, the same on all connections of a task
 *             nonce           32  random, of this connection
 *   accepts   magic           16
 *             rank, has_secret 8
 *             nonce           32
 *             proof           32  HMAC("penstock accepts", all of the above)
 *   connects  proof           32  HMAC("penstock connect", all but that proof); zeros: it is wrong
 *   rank 0    status           4  on control, once all have come: 0, or a ps_status
 *             message        256  why not, with a NUL at the end
 *             addresses     8192  where status is 0: of all ranks, PS_MAX_HOSTS sockaddr_storages
 *
 * HMAC is HMAC-SHA-256 with the secret as its key, none being an empty one. Both nonces are in each
 * proof, so an old connection that is played again proves nothing, and the words at its beginning
 * keep one side's proof from being sent back. What follows is neither encrypted nor proved.
 *
 * So that tasks of two versions can tell each other that they differ, all of this up to the message
 * is the same in all versions. What a later one adds comes after that, or after the last proof. */
#include "hosts/greet.h"
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* REFUSED_S: how long rank 0 stays to tell the reason to tasks that have not come yet.
 * SILENT_S: how long a task waits before it logs for whom, and where. */
enum { REFUSED_S = 1, SILENT_S = 3 };

typedef struct meeting {
  ps_hosts *h;
  const ps_hosts_config *cfg;
  ps__door *door;
  double until_s, say_s; /* say_s: when the wait is logged, once */
  uint32_t port;         /* at which a rank above 0 listens; 0: not yet */
  bool stranger;         /* something else than a task answers at rank 0's address */
  uint8_t own[PS__TASK], task[PS_MAX_HOSTS][PS__TASK]; /* of this task; of those that came */
} meeting;

static int left_ms(const meeting *m) { return ps__ms_until(m->until_s); }

/* ---- sockets --------------------------------------------------------------------------------- */

/* Keepalive ends a control connection to a host that is gone after about 20 s. */
static void set_options(int fd, uint32_t kind) {
  const int on = 1, idle_s = 5, between_s = 5, probes = 3, unanswered_ms = 20000;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (kind != PS__CONTROL)
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

static void say_nothing_more(meeting *m) { m->say_s = m->until_s + SILENT_S; }

/* Logs once, after SILENT_S, for whom this task waits. */
static void say_wait(meeting *m) {
  const ps_hosts_config *c = m->cfg;
  if (ps__ms_until(m->say_s) > 0)
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
  ps__log(PS_LOG_INFO, "rank 0 waits at %s port %u for rank %u%s: %g s at most", c->address,
          c->port, first, more, c->wait_s);
}

static void pause_ms(long ms) {
  nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* ---- connections ----------------------------------------------------------------------------- */

static ps__hello hello_of(const meeting *m, uint32_t kind, uint32_t port) {
  ps__hello w = {.rank = m->h->rank,
                 .n = m->h->n,
                 .kind = kind,
                 .port = port,
                 .has_secret = m->door->secret.bytes > 0};
  memcpy(w.magic, ps__magic, sizeof w.magic);
  memcpy(w.task, m->own, sizeof w.task);
  snprintf(w.version, sizeof w.version, "%s", ps_version());
  return w;
}

static void keep(meeting *m, uint32_t rank, uint32_t kind, int fd) {
  set_options(fd, kind);
  (kind == PS__CONTROL ? m->h->control : m->h->data)[rank] = fd;
}

/* Whether rank 0 has answered, or has gone. */
static bool is_answered(const meeting *m) {
  struct pollfd p = {.fd = m->h->control[0], .events = POLLIN};
  return p.fd >= 0 && poll(&p, 1, 0) == 1;
}

/* Rank 0 may answer control before it looks at data. */
static bool await_challenge(const meeting *m, int fd) {
  struct pollfd p[2] = {{.fd = fd, .events = POLLIN},
                        {.fd = m->h->rank ? m->h->control[0] : -1, .events = POLLIN}};
  return poll(p, 2, left_ms(m)) > 0 && p[0].revents;
}

typedef enum greeting { GREETED, ENDED, STRANGER, REFUSED } greeting;

/* Greets rank @rank at @fd. REFUSED: with the thread's last error. */
static greeting greet(meeting *m, uint32_t rank, uint32_t kind, int fd) {
  const ps__secret *s = &m->door->secret;
  ps__hello w = hello_of(m, kind, kind == PS__CONTROL && rank == 0 ? m->port : 0);
  ps__challenge c = {.rank = 0};
  uint8_t proof[PS__PROOF] = {0};
  if (ps__random(w.nonce, sizeof w.nonce) != PS_OK)
    return REFUSED;
  if (!send_all(fd, &w, sizeof w) || (rank == 0 && !await_challenge(m, fd)) ||
      !receive(m, fd, &c, sizeof c))
    return ENDED;
  if (memcmp(c.magic, ps__magic, sizeof c.magic) != 0)
    return STRANGER;
  ps__prove(s, true, &w, &c, proof);
  const bool proved = ps__same(proof, c.proof, sizeof proof), right = proved && c.rank == rank;
  memset(proof, 0, sizeof proof);
  if (right)
    ps__prove(s, false, &w, &c, proof);
  if (!send_all(fd, proof, sizeof proof) && right)
    return ENDED;
  char where[300] = "";
  if (rank == 0)
    snprintf(where, sizeof where, " at %.255s port %u", m->cfg->address, m->cfg->port);
  if (!proved)
    ps__fail(PS_EINVAL, "rank %u hung up on rank %u%s: %s", m->h->rank, rank, where,
             ps__other_secret(s->bytes > 0, c.has_secret != 0));
  else if (!right)
    ps__fail(PS_EINVAL, "rank %u reached rank %u in place of rank %u: start all tasks anew",
             m->h->rank, c.rank, rank);
  return right ? GREETED : REFUSED;
}

/* At the address that the connection @fd has here, which the others can reach too. */
static ps_status listen_beside(meeting *m, int fd) {
  struct sockaddr_storage own = {0};
  socklen_t bytes = sizeof own;
  if (m->port)
    return PS_OK;
  if (getsockname(fd, (struct sockaddr *)&own, &bytes) != 0)
    return ps__fail(PS_EIO, "rank %u cannot listen: %s", m->h->rank, strerror(errno));
  return ps__door_listen_at(m->door, (const struct sockaddr *)&own, bytes, &m->port);
}

/* The addresses of @name, which the caller frees. *out NULL: they cannot be known yet. */
static ps_status resolve(const meeting *m, const char *name, struct addrinfo **out) {
  const struct addrinfo want = {.ai_socktype = SOCK_STREAM};
  char service[16];
  snprintf(service, sizeof service, "%u", m->cfg->port);
  *out = NULL;
  const int unknown = getaddrinfo(name, service, &want, out);
  if (unknown && unknown != EAI_AGAIN)
    return ps__fail(PS_EINVAL, "the address of rank 0, %s, is not known here: %s", name,
                    gai_strerror(unknown));
  if (unknown)
    *out = NULL;
  return PS_OK;
}

/* One try to connect to rank 0; *out -1: nobody listens there yet. */
static ps_status try_first(meeting *m, int *out) {
  const ps_hosts_config *c = m->cfg;
  struct addrinfo *all;
  *out = -1;
  PS_TRY(resolve(m, c->address, &all));
  const ps_status st =
      all ? ps__guarded(c, &m->door->secret, c->address, ps__reach_of(c->address, all)) : PS_OK;
  for (struct addrinfo *a = all; st == PS_OK && a && *out < 0; a = a->ai_next)
    *out = try_connect(a->ai_addr, a->ai_addrlen, left_ms(m) < 2000 ? left_ms(m) : 2000);
  if (all)
    freeaddrinfo(all);
  return st;
}

static ps_status nobody(const meeting *m) {
  const ps_hosts_config *c = m->cfg;
  if (m->stranger)
    return ps__fail(PS_EIO,
                    "what answers at %s port %u is no task of penstock: give the address and port "
                    "of rank 0, or another MASTER_PORT",
                    c->address, c->port);
  return ps__fail(PS_EIO,
                  "nobody answers at %s port %u within %g s: rank 0 must run there and wait for "
                  "this task, and the port must be open",
                  c->address, c->port, c->wait_s);
}

/* Connects to rank 0, whose host or process may still be starting. Rank 0 may answer the first
 * connection before there is a second one, which then is not needed. */
static ps_status reach_first(meeting *m, uint32_t kind) {
  for (; left_ms(m) > 0 && !is_answered(m); pause_ms(100)) {
    int fd;
    say_wait(m);
    PS_TRY(try_first(m, &fd));
    if (fd < 0)
      continue;
    const ps_status st = listen_beside(m, fd);
    const greeting g = st == PS_OK ? greet(m, 0, kind, fd) : REFUSED;
    if (g == GREETED) {
      keep(m, 0, kind, fd);
      return PS_OK;
    }
    close(fd);
    m->stranger = g == STRANGER;
    if (g == REFUSED)
      return st == PS_OK ? PS_EINVAL : st;
  }
  return is_answered(m) ? PS_OK : nobody(m);
}

static ps_status reach(meeting *m, uint32_t rank, const struct sockaddr_storage *at) {
  const socklen_t bytes = at->ss_family == AF_INET    ? sizeof(struct sockaddr_in)
                          : at->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                                      : 0;
  for (uint32_t kind = 0; kind < PS__KINDS; kind++) {
    const int fd = bytes ? try_connect((const struct sockaddr *)at, bytes, left_ms(m)) : -1;
    const greeting g = fd < 0 ? ENDED : greet(m, rank, kind, fd);
    if (g != GREETED && fd >= 0)
      close(fd);
    if (g == REFUSED)
      return PS_EINVAL;
    if (g != GREETED)
      return ps__fail(PS_EIO,
                      "rank %u cannot connect to rank %u: their network must let all hosts "
                      "connect to each other",
                      m->h->rank, rank);
    keep(m, rank, kind, fd);
  }
  return PS_OK;
}

/* ---- who comes ------------------------------------------------------------------------------- */

typedef enum judgement { COMES, WRONG, ENDS_ALL } judgement;

/* @why: what is wrong with a task that says hello. */
static judgement judge(const meeting *m, const ps__hello *w, char why[256]) {
  const ps_hosts *h = m->h;
  const judgement trusted = h->rank == 0 && m->door->secret.bytes ? ENDS_ALL : WRONG;
  if (strncmp(w->version, ps_version(), sizeof w->version) != 0) {
    snprintf(why, 256, "rank %u is penstock %.31s, and rank 0 is %s: start the same on all hosts",
             w->rank, w->version, ps_version());
    return trusted;
  }
  if (w->n != h->n) {
    snprintf(why, 256, "rank %u was told of %u tasks, and rank 0 of %u: start all by one launcher",
             w->rank, w->n, h->n);
    return trusted;
  }
  if (w->rank <= h->rank || w->rank >= h->n || w->kind >= PS__KINDS) {
    snprintf(why, 256, "rank %u does not connect to rank %u: ranks %u to %u do", w->rank, h->rank,
             h->rank + 1, h->n - 1);
    return WRONG;
  }
  const int of[PS__KINDS] = {h->control[w->rank], h->data[w->rank]};
  const bool other = (of[0] >= 0 || of[1] >= 0) && memcmp(m->task[w->rank], w->task, PS__TASK) != 0;
  if (!other && of[w->kind] < 0)
    return COMES;
  snprintf(why, 256, "two tasks have rank %u: each needs a rank of its own, from 0 to %u", w->rank,
           h->n - 1);
  return WRONG;
}

/* The next stranger who is a task; false: none comes in time. */
static bool next_stranger(meeting *m, ps__stranger *out) {
  struct pollfd of[PS__DOOR_FDS];
  for (;;) {
    double until_s = ps__earlier(m->say_s, m->until_s);
    const uint32_t n = ps__door_poll(m->door, of, &until_s);
    if (left_ms(m) == 0)
      return false;
    const int ready = poll(of, n, ps__ms_until(until_s));
    say_wait(m);
    if (ready < 0)
      return false;
    if (ps__door_look(m->door, of, out))
      return true;
  }
}

static ps_status did_not_come(const meeting *m) {
  const char *refused = m->door->refused;
  uint32_t r = 0;
  (void)n_missing(m->h, &r);
  if (m->h->rank > 0)
    return ps__fail(PS_EIO, "rank %u did not connect to rank %u within %g s%s%s", r, m->h->rank,
                    m->cfg->wait_s, *refused ? "; " : "", refused);
  return ps__fail(
      PS_EIO, "rank %u did not come to %s port %u within %g s: %u tasks were to be started%s%s", r,
      m->cfg->address, m->cfg->port, m->cfg->wait_s, m->h->n, *refused ? "; " : "", refused);
}

/* Accepts both connections of @n ranks. @at: their addresses by rank, for rank 0, else NULL.
 * @why: what is wrong with *refused, who ends all, and whose socket the caller closes. */
static ps_status accept_all(meeting *m, uint32_t n, struct sockaddr_storage *at, char why[256],
                            ps__stranger *refused) {
  for (uint32_t i = 0; i < PS__KINDS * n;) {
    ps__stranger g;
    if (!next_stranger(m, &g))
      return did_not_come(m);
    const judgement is = judge(m, &g.said, why);
    if (is == ENDS_ALL) {
      *refused = g;
      return PS_OK;
    }
    if (is == WRONG) {
      ps__door_hang_up(m->door, &g, PS__DIFFERS, why);
      why[0] = 0;
      continue;
    }
    i++;
    keep(m, g.said.rank, g.said.kind, g.fd);
    memcpy(m->task[g.said.rank], g.said.task, PS__TASK);
    if (at && g.said.kind == PS__CONTROL) {
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

/* Tells stranger @g and all others that come within REFUSED_S why they are refused. It ends once
 * all have come that any of them knows of. A socket that is closed with unread bytes resets its
 * connection, and the other side may lose the answer: so each is read to its end. */
static void refuse(meeting *m, const ps__verdict *v, ps__stranger g) {
  int told[PS__KINDS * PS_MAX_HOSTS];
  uint32_t n_told = 0, came = n_came(m->h), tasks = m->h->n;
  const double until_s = ps__now_s() + REFUSED_S;
  char rest;
  m->until_s = ps__earlier(until_s, m->until_s);
  say_nothing_more(m);
  do {
    if (send(g.fd, v, sizeof *v, MSG_NOSIGNAL | MSG_DONTWAIT) > 0)
      shutdown(g.fd, SHUT_WR);
    told[n_told++] = g.fd;
    came += g.said.kind == PS__CONTROL;
    tasks = g.said.n > tasks ? g.said.n : tasks;
  } while (came + 1 < tasks && n_told < sizeof told / sizeof *told && next_stranger(m, &g));
  for (uint32_t i = 0; i < n_told; i++) {
    while (left_ms(m) > 0 && receive(m, told[i], &rest, 1))
      ;
    close(told[i]);
  }
}

/* ---- both sides ------------------------------------------------------------------------------ */

/* Rank 0 listens once its address is known. */
static ps_status open_door(meeting *m) {
  const char *given = m->cfg->listen ? m->cfg->listen : getenv("PENSTOCK_HOSTS_LISTEN"),
             *name = given && *given ? given : m->cfg->address;
  struct addrinfo *all = NULL;
  while (!all && left_ms(m) > 0) {
    PS_TRY(resolve(m, name, &all));
    if (!all)
      pause_ms(100);
  }
  if (!all)
    return ps__fail(PS_EIO, "the address of rank 0, %s, is not known within %g s", name,
                    m->cfg->wait_s);
  ps_status st = ps__guarded(m->cfg, &m->door->secret, name, ps__reach_of(name, all));
  if (st == PS_OK)
    st = ps__door_listen(m->door, name, all);
  freeaddrinfo(all);
  return st;
}

static ps_status lead(meeting *m) {
  ps_hosts *h = m->h;
  char why[256] = "";
  struct sockaddr_storage at[PS_MAX_HOSTS] = {0};
  ps__stranger refused = {.fd = -1};
  ps_status st = open_door(m);
  if (st == PS_OK)
    st = accept_all(m, h->n - 1, at, why, &refused);
  if (st == PS_OK && why[0])
    st = ps__fail(PS_EINVAL, "%s", why);
  ps__verdict v = {.status = st};
  snprintf(v.message, sizeof v.message, "%s", st == PS_OK ? "" : ps_last_error());
  for (uint32_t r = 1; r < h->n; r++) /* a task that is gone is noticed later */
    if (h->control[r] >= 0 && send_all(h->control[r], &v, sizeof v) && st == PS_OK)
      (void)send_all(h->control[r], at, sizeof at);
  if (refused.fd >= 0)
    refuse(m, &v, refused);
  return st;
}

/* Rank 0's answer. */
static ps_status read_answer(const meeting *m, struct sockaddr_storage at[PS_MAX_HOSTS]) {
  const int fd = m->h->control[0];
  ps__verdict v = {.status = PS_OK};
  const bool came = receive(m, fd, &v, sizeof v);
  if (came && v.status != PS_OK)
    return ps__fail(ps__status_of(v.status), "%.255s", v.message);
  if (came && receive(m, fd, at, PS_MAX_HOSTS * sizeof *at))
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
  char why[256] = "";
  struct sockaddr_storage at[PS_MAX_HOSTS];
  ps__stranger refused;
  for (uint32_t kind = 0; kind < PS__KINDS; kind++)
    PS_TRY(reach_first(m, kind));
  say_nothing_more(m); /* rank 0 says for whom all wait */
  PS_TRY(read_answer(m, at));
  for (uint32_t r = 1; r < h->rank; r++)
    PS_TRY(reach(m, r, &at[r]));
  return accept_all(m, h->n - 1 - h->rank, NULL, why, &refused);
}

ps_status ps__hosts_meet(ps_hosts *h, const ps_hosts_config *cfg) {
  meeting m = {.h = h, .cfg = cfg, .until_s = ps__now_s() + cfg->wait_s};
  m.say_s = ps__now_s() + SILENT_S;
  m.door = h->door = ps__calloc(1, sizeof *m.door);
  if (!m.door)
    return ps__fail(PS_ENOMEM, "out of memory for the tasks of other hosts");
  m.door->rank = h->rank;
  PS_TRY(ps__secret_find(&m.door->secret, cfg->secret));
  PS_TRY(ps__random(m.own, sizeof m.own));
  const ps_status st = h->rank == 0 ? lead(&m) : follow(&m);
  if (h->rank > 0)
    ps__door_shut(m.door);
  return st;
}
