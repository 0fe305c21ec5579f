/* exchange.c - calls that all tasks make in the same order, over the data connections. */
#include "core/dtype.h"
#include "hosts/hosts.h"
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

/* ---- bytes to and from all others at once ---------------------------------------------------- */

enum { PARTS = 2 };
/* What goes to one rank and comes from it: PARTS pieces, one after the other. */
typedef struct traffic {
  struct {
    char *at;
    size_t bytes;
  } to[PARTS], from[PARTS];
} traffic;

static bool flows(const traffic *t, bool out) {
  for (int i = 0; i < PARTS; i++)
    if (out ? t->to[i].bytes : t->from[i].bytes)
      return true;
  return false;
}

/* Moves what the socket takes or has; false: the connection has ended. */
static bool move(int fd, traffic *t, bool out) {
  for (int i = 0; i < PARTS; i++) {
    char **at = out ? &t->to[i].at : &t->from[i].at;
    size_t *bytes = out ? &t->to[i].bytes : &t->from[i].bytes;
    while (*bytes) {
      const ssize_t n = out ? send(fd, *at, *bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                            : recv(fd, *at, *bytes, MSG_DONTWAIT);
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return true;
      if (n <= 0)
        return false;
      *at += n;
      *bytes -= (size_t)n;
    }
  }
  return true;
}

/* @t: by rank. Empty when it returns. */
static ps_status transfer(ps_hosts *h, traffic *t) {
  for (;;) {
    struct pollfd of[PS_MAX_HOSTS];
    bool any = false;
    for (uint32_t r = 0; r < h->n; r++) {
      const short events =
          (short)((flows(&t[r], true) ? POLLOUT : 0) | (flows(&t[r], false) ? POLLIN : 0));
      of[r] = (struct pollfd){.fd = events ? h->data[r] : -1, .events = events};
      any |= events != 0;
    }
    if (!any)
      return PS_OK;
    if (poll(of, h->n, -1) < 0 && errno != EINTR)
      return ps__fail(PS_EIO, "the tasks of other hosts: poll: %s", strerror(errno));
    for (uint32_t r = 0; r < h->n; r++)
      if (of[r].fd >= 0 && of[r].revents &&
          (!move(h->data[r], &t[r], true) || !move(h->data[r], &t[r], false)))
        return ps__hosts_lost(h, r);
  }
}

ps_status ps__hosts_gather(ps_hosts *h, const char *what, const void *mine, void *all,
                           size_t bytes) {
  traffic t[PS_MAX_HOSTS] = {0};
  PS_TRY(ps__hosts_enter(h, what));
  memcpy((char *)all + h->rank * bytes, mine, bytes);
  for (uint32_t r = 0; r < h->n; r++)
    if (r != h->rank) {
      t[r].to[0].at = (char *)all + h->rank * bytes;
      t[r].from[0].at = (char *)all + r * bytes;
      t[r].to[0].bytes = t[r].from[0].bytes = bytes;
    }
  PS_TRY(transfer(h, t));
  ps__hosts_leave(h);
  return PS_OK;
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* While the sums of one segment go out, the next segment's data comes in. */
typedef struct sum {
  char *data;
  ps__cut cut;
} sum;

static char *slice_of(const sum *s, uint64_t k, uint32_t r, size_t *bytes) {
  return s->data + ps__cut_slice(&s->cut, k, r, bytes);
}

/* What rank @r sends of this rank's slice. */
static char *staged(const ps_hosts *h, const sum *s, uint32_t r) {
  return h->staging + (r < h->rank ? r : r - 1) * s->cut.each * s->cut.e;
}

/* Adds slice @h->rank of segment @k: rank 0's, rank 1's and so on. */
static void add(const ps_hosts *h, const sum *s, uint64_t k) {
  enum { AT_ONCE = 1024 };
  float total[AT_ONCE], term[AT_ONCE];
  const size_t e = s->cut.e;
  size_t bytes;
  char *mine = slice_of(s, k, h->rank, &bytes);
  const uint64_t n = bytes / e;
  for (uint64_t i = 0; i < n; i += AT_ONCE) {
    const size_t m = n - i < AT_ONCE ? n - i : AT_ONCE;
    for (uint32_t r = 0; r < h->n; r++) {
      const char *from = r == h->rank ? mine : staged(h, s, r);
      ps__dtypes[s->cut.dt].to_f32(r ? term : total, from + i * e, m);
      for (size_t j = 0; r && j < m; j++)
        total[j] += term[j];
    }
    ps__dtypes[s->cut.dt].from_f32(mine + i * e, total, m);
  }
}

/* The sums of segment @k - 1 go out, the data of segment @k comes in. */
static ps_status move_segment(ps_hosts *h, const sum *s, uint64_t k) {
  traffic t[PS_MAX_HOSTS] = {0};
  for (uint32_t r = 0; r < h->n; r++) {
    if (r == h->rank)
      continue;
    if (k > 0) {
      t[r].to[0].at = slice_of(s, k - 1, h->rank, &t[r].to[0].bytes);
      t[r].from[0].at = slice_of(s, k - 1, r, &t[r].from[0].bytes);
    }
    if (k < s->cut.n_segments) {
      t[r].to[1].at = slice_of(s, k, r, &t[r].to[1].bytes);
      (void)slice_of(s, k, h->rank, &t[r].from[1].bytes);
      t[r].from[1].at = staged(h, s, r);
    }
  }
  return transfer(h, t);
}

ps_status ps__hosts_sum_tcp(ps_hosts *h, void *data, uint64_t n, ps_dtype dt) {
  const sum s = {.data = data, .cut = ps__cut_of(h->n, n, dt, ps__hosts_slice_bytes(h->n))};
  for (uint64_t k = 0; k <= s.cut.n_segments; k++) {
    PS_TRY(move_segment(h, &s, k));
    if (k < s.cut.n_segments)
      add(h, &s, k);
  }
  return PS_OK;
}
