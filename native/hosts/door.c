/* door.c - a task listens, and lets those in who prove that they know the secret. Whoever says
 * something else, or nothing, is hung up on, and keeps nobody waiting. */
#include "hosts/greet.h"
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <unistd.h>

/* ---- listening ------------------------------------------------------------------------------- */

static bool same_address(int fd, const struct sockaddr *at, socklen_t bytes) {
  struct sockaddr_storage own = {0};
  socklen_t n = sizeof own;
  return getsockname(fd, (struct sockaddr *)&own, &n) == 0 && n == bytes &&
         memcmp(&own, at, bytes) == 0;
}

/* One more listener; its number of errno, 0: it listens. */
static int listen_one(ps__door *d, const struct sockaddr *at, socklen_t bytes) {
  const int on = 1, fd = socket(at->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0)
    return errno;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (at->sa_family == AF_INET6) /* IPv4 has listeners of its own */
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  if (bind(fd, at, bytes) == 0 && listen(fd, 2 * PS_MAX_HOSTS) == 0) {
    d->listener[d->n_listeners++] = fd;
    return 0;
  }
  const int error = errno;
  close(fd);
  return error;
}

static uint32_t port_of(const struct sockaddr *at) { /* at the same place in both kinds */
  return ntohs(((const struct sockaddr_in *)at)->sin_port);
}

static ps_status cannot_listen(const ps__door *d, uint32_t port, int error) {
  return ps__fail(PS_EIO, "rank %u cannot listen at port %u: %s: give another MASTER_PORT", d->rank,
                  port, strerror(error));
}

ps_status ps__door_listen_at(ps__door *d, const struct sockaddr *at, socklen_t bytes,
                             uint32_t *port) {
  struct sockaddr_storage any = {0}, got = {0};
  socklen_t n = sizeof got;
  memcpy(&any, at, bytes);
  ((struct sockaddr_in *)&any)->sin_port = htons((uint16_t)*port);
  const int error = listen_one(d, (const struct sockaddr *)&any, bytes);
  if (error)
    return cannot_listen(d, *port, error);
  (void)getsockname(d->listener[d->n_listeners - 1], (struct sockaddr *)&got, &n);
  *port = port_of((const struct sockaddr *)&got);
  return PS_OK;
}

/* Those of @all that are this host's; a name may have an address twice. */
static ps_status listen_to(ps__door *d, const struct addrinfo *all, bool *own) {
  for (const struct addrinfo *a = all; a && d->n_listeners < PS__LISTENERS; a = a->ai_next) {
    bool again = false;
    for (uint32_t i = 0; i < d->n_listeners; i++)
      again |= same_address(d->listener[i], a->ai_addr, a->ai_addrlen);
    const int error = again ? 0 : listen_one(d, a->ai_addr, a->ai_addrlen);
    *own |= error != EADDRNOTAVAIL && error != EAFNOSUPPORT;
    if (error && error != EADDRNOTAVAIL && error != EAFNOSUPPORT)
      return cannot_listen(d, port_of(a->ai_addr), error);
  }
  return PS_OK;
}

ps_status ps__door_listen(ps__door *d, const char *name, const struct addrinfo *all) {
  struct sockaddr_in6 six = {.sin6_family = AF_INET6};
  struct sockaddr_in four = {.sin_family = AF_INET};
  struct addrinfo any[2] = {
      {.ai_addr = (struct sockaddr *)&four, .ai_addrlen = sizeof four, .ai_next = &any[1]},
      {.ai_addr = (struct sockaddr *)&six, .ai_addrlen = sizeof six}};
  bool own = false;
  if (ps__reach_of(name, all) == PS__LOCAL_NAME) { /* which address others know is not known here */
    four.sin_port = six.sin6_port = htons((uint16_t)port_of(all->ai_addr));
    all = any;
  }
  PS_TRY(listen_to(d, all, &own));
  if (own)
    return PS_OK;
  return ps__fail(PS_EINVAL,
                  "MASTER_ADDR %.255s is no address of rank 0's host: give one that is, or set "
                  "PENSTOCK_HOSTS_LISTEN to the address at which rank 0 is to listen",
                  name);
}

/* ---- strangers ------------------------------------------------------------------------------- */

static void take_out(ps__door *d, uint32_t i, ps__stranger *out) {
  *out = d->stranger[i];
  memmove(&d->stranger[i], &d->stranger[i + 1], (--d->n_strangers - i) * sizeof *out);
}

void ps__door_hang_up(ps__door *d, ps__stranger *g, ps__reason reason, const char *why) {
  char text[sizeof d->refused], from[64];
  const bool stranger = reason == PS__STRANGER || reason == PS__SLOW;
  ps__address_text(&g->from, from);
  if (stranger)
    snprintf(text, sizeof text, "rank %u hung up on %s: %.200s", d->rank, from, why);
  else
    snprintf(text, sizeof text, "rank %u hung up on %s, which says that it is rank %u: %.200s",
             d->rank, from, g->said.rank, why);
  if (!stranger)
    memcpy(d->refused, text, sizeof text);
  if (reason == PS__DIFFERS && d->rank == 0) {
    ps__verdict v = {.status = PS_EINVAL};
    snprintf(v.message, sizeof v.message, "%s", why);
    const ssize_t sent = send(g->fd, &v, sizeof v, MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)sent; /* a new socket takes it */
  }
  if (!(d->logged >> reason & 1))
    ps__log(stranger ? PS_LOG_INFO : PS_LOG_WARN, "%s", text);
  d->logged |= 1u << reason;
  close(g->fd);
}

static void hang_up_on(ps__door *d, uint32_t i, ps__reason reason, const char *why) {
  ps__stranger g;
  take_out(d, i, &g);
  ps__door_hang_up(d, &g, reason, why);
}

/* Where there are too many, the oldest is hung up on. */
static void let_in(ps__door *d, int listener) {
  ps__stranger g = {.fd = -1, .until_s = ps__now_s() + ps__hosts_times.greeting_s};
  socklen_t bytes = sizeof g.from;
  g.fd = accept4(listener, (struct sockaddr *)&g.from, &bytes, SOCK_CLOEXEC);
  if (g.fd < 0)
    return;
  if (d->n_strangers == PS__STRANGERS)
    hang_up_on(d, 0, PS__SLOW, "too many others connect");
  d->stranger[d->n_strangers++] = g;
}

/* Answers a greeting, and proves that this task knows the secret. */
static bool challenge(const ps__door *d, ps__stranger *g) {
  ps__challenge *c = &g->asked;
  *c = (ps__challenge){.rank = d->rank, .has_secret = d->secret.bytes > 0};
  memcpy(c->magic, ps__magic, sizeof c->magic);
  if (ps__random(c->nonce, sizeof c->nonce) != PS_OK)
    return false;
  ps__prove(&d->secret, true, &g->said, c, c->proof);
  return send(g->fd, c, sizeof *c, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof *c;
}

static const char no_greeting[] = "it says nothing that a task says";

/* Reads what stranger @i says. True: all is there, and *out is a task. */
static bool hear(ps__door *d, uint32_t i, ps__stranger *out) {
  ps__stranger *g = &d->stranger[i];
  const size_t said = sizeof g->said, got = g->bytes;
  const bool proves = got >= said;
  void *to = proves ? (char *)g->proof + (got - said) : (char *)&g->said + got;
  const ssize_t n = recv(g->fd, to, proves ? said + PS__PROOF - got : said - got, MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
    return false;
  g->bytes += n > 0 ? (size_t)n : 0;
  const size_t known = g->bytes < PS__MAGIC ? g->bytes : PS__MAGIC;
  if (n <= 0 || memcmp(g->said.magic, ps__magic, known) != 0 ||
      (g->bytes == said && !challenge(d, g))) {
    hang_up_on(d, i, PS__STRANGER, no_greeting);
    return false;
  }
  if (g->bytes < said + PS__PROOF)
    return false;
  uint8_t proof[PS__PROOF];
  ps__prove(&d->secret, false, &g->said, &g->asked, proof);
  if (!ps__same(proof, g->proof, sizeof proof)) {
    hang_up_on(d, i, PS__SECRET, ps__other_secret(d->secret.bytes > 0, g->said.has_secret != 0));
    return false;
  }
  take_out(d, i, out);
  out->said.version[sizeof out->said.version - 1] = 0;
  return true;
}

uint32_t ps__door_poll(const ps__door *d, struct pollfd of[PS__DOOR_FDS], double *until_s) {
  for (uint32_t i = 0; i < d->n_strangers; i++) {
    of[i] = (struct pollfd){.fd = d->stranger[i].fd, .events = POLLIN};
    *until_s = ps__earlier(*until_s, d->stranger[i].until_s);
  }
  for (uint32_t i = 0; i < d->n_listeners; i++)
    of[d->n_strangers + i] = (struct pollfd){.fd = d->listener[i], .events = POLLIN};
  return d->n_strangers + d->n_listeners;
}

bool ps__door_look(ps__door *d, const struct pollfd *of, ps__stranger *out) {
  const uint32_t n = d->n_strangers;
  for (uint32_t i = 0; i < d->n_listeners; i++)
    if (of[n + i].revents && d->n_strangers == n) /* else the others' places have changed */
      let_in(d, d->listener[i]);
  for (uint32_t i = 0; i < n && i < d->n_strangers; i++)
    if (d->stranger[i].fd == of[i].fd && of[i].revents)
      return hear(d, i, out);
  while (d->n_strangers && d->stranger[0].until_s <= ps__now_s())
    hang_up_on(d, 0, PS__SLOW, "its greeting was not complete in time");
  return false;
}

void ps__door_shut(ps__door *d) {
  while (d->n_strangers)
    close(d->stranger[--d->n_strangers].fd);
  while (d->n_listeners)
    close(d->listener[--d->n_listeners]);
  explicit_bzero(&d->secret, sizeof d->secret);
}
