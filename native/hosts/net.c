/* net.c - sums over NCCL, by way of the device's memory.
 *
 * Segment k of the host's data takes this way, by the lanes that are named:
 *   in    copied to a buffer on the device
 *   net   slice r goes to rank r, and this rank's slice comes from all others
 *   add   the kernel adds this rank's slice, while the net lane exchanges the data of segment k + 1
 *   net   the sums go to all, beside the data of segment k + 2, and the others' sums come in
 *   out   copied back to the host
 * A product takes all SMs, so each kernel of a lane waits for the running product to end. Those of
 * the net and the add lane wait for the same one: a segment costs one such wait.
 * The calling thread is at most PS__NET_BUFFERS segments ahead of the last copy back. So it never
 * blocks inside the driver, and it sees failures between its looks at the device.
 *
 * After a failure NCCL's kernels wait for what will not come. ncclCommAbort() ends them at once,
 * and then releases memory, which may take long: the device may have to be at rest for it. So a
 * thread of its own calls ncclCommAbort(), and the op that failed does not wait for it. */
#include "hosts/net.h"
#include "hosts/hosts.h"
#include <stdatomic.h>
#include <string.h>
#include <time.h>

static const uint64_t LOOK_NS = 20000, SECOND_NS = 1000000000;
/* How long is waited: for all tasks' ncclCommInitRankConfig(), and for the first sum's connections;
 * for the device's lanes after an abort; for the abort itself, or the orderly end, at close. */
enum { CONNECT_S = 120, REST_S = 10, CLOSE_S = 10 };
/* Thread blocks of NCCL's kernels at most, each a channel with buffers of its own: 8 took 592 MiB
 * of an H100 where NCCL's own choice took 1,022. Fewer blocks leave more SMs to products. The
 * bandwidth of 8 is not measured. */
enum { MAX_CTAS = 8 };
/* Elements of the sums that check the way: slices of 16 KiB and more. */
enum { CHECKED = 1 << 19 };

struct ps__net {
  ps_hosts *h;
  ps__net_device dev;
  const ps__nccl *lib;
  ps__nccl_comm comm; /* NULL: none yet */
  char *buffer;       /* PS__NET_BUFFERS of ps__net_buffer_bytes() */
  uint64_t segment_bytes;
  uint64_t limit_s; /* of every wait, until the first sums have worked; then 0: none */
  bool broken;      /* nothing more is queued; NCCL was told to abort */
  bool stuck;       /* lanes did not come to rest: what they use is never released */
  bool has_aborter;
  pthread_t aborter;
  _Atomic bool aborted;
};

static void doze(void) { nanosleep(&(struct timespec){.tv_nsec = (long)LOOK_NS}, NULL); }

/* ---- waiting --------------------------------------------------------------------------------- */

static ps_status nccl_failed(ps__net *n, int error, const char *call) {
  const char *last = n->comm ? n->lib->GetLastError(n->comm) : NULL;
  return ps__fail(PS_EIO, "NCCL: %s: %s%s%.400s", call, n->lib->GetErrorString(error),
                  last && *last ? ": " : "", last && *last ? last : "");
}

/* Whether a wait since @since may go on. */
static ps_status may_wait(ps__net *n, uint64_t since, const char *call) {
  PS_TRY(ps__hosts_check(n->h));
  if (n->limit_s && ps__now_ns() - since > n->limit_s * SECOND_NS)
    return ps__fail(PS_EIO,
                    "NCCL: %s has not ended for %llu s: look at what NCCL_DEBUG=INFO prints, "
                    "name the network with NCCL_SOCKET_IFNAME, or give %s tcp",
                    call, (unsigned long long)n->limit_s, ps__field("transport"));
  doze();
  return PS_OK;
}

/* Until the call that returned @r is over, or a task has failed. */
static ps_status settled(ps__net *n, int r, const char *call) {
  const uint64_t since = ps__now_ns();
  while (r == PS__NCCL_IN_PROGRESS) {
    PS_TRY(may_wait(n, since, call));
    const int asked = n->lib->CommGetAsyncError(n->comm, &r);
    r = asked == PS__NCCL_OK ? r : asked;
  }
  return r == PS__NCCL_OK ? PS_OK : nccl_failed(n, r, call);
}

/* Until @mark is passed. */
static ps_status await(ps__net *n, uint32_t mark) {
  static const char what[] = "an exchange";
  const uint64_t since = ps__now_ns();
  for (;;) {
    bool passed = false;
    int error = PS__NCCL_OK;
    PS_TRY(n->dev.api->passed(n->dev.user, mark, &passed));
    if (passed)
      return PS_OK;
    const int asked = n->lib->CommGetAsyncError(n->comm, &error);
    if (asked != PS__NCCL_OK || (error != PS__NCCL_OK && error != PS__NCCL_IN_PROGRESS))
      return nccl_failed(n, asked != PS__NCCL_OK ? asked : error, what);
    PS_TRY(may_wait(n, since, what));
  }
}

/* ---- failures -------------------------------------------------------------------------------- */

static void *abort_main(void *arg) {
  ps__net *n = arg;
  (void)n->lib->CommAbort(n->comm);
  atomic_store(&n->aborted, true);
  return NULL;
}

/* Between enter() and leave(). Returns when no lane reads or writes the caller's data any more. */
static void give_up(ps__net *n) {
  const uint64_t since = ps__now_ns();
  bool idle = false;
  n->broken = true;
  if (n->comm && !n->has_aborter) {
    n->has_aborter = pthread_create(&n->aborter, NULL, abort_main, n) == 0;
    if (!n->has_aborter)
      abort_main(n);
  }
  while (n->dev.api->idle(n->dev.user, &idle) == PS_OK && !idle && !n->stuck) {
    n->stuck = ps__now_ns() - since > REST_S * SECOND_NS;
    doze();
  }
  if (n->stuck)
    ps__log(PS_LOG_WARN, "NCCL was aborted, and its kernels did not end within %d s", REST_S);
}

/* The failure of another task explains an error of NCCL, and may come a moment later. */
static ps_status explained(ps__net *n, ps_status st) {
  char own[PS__HOSTS_MESSAGE];
  snprintf(own, sizeof own, "%s", ps_last_error());
  for (int i = 0; st == PS_EIO && i < 200; i++) {
    const ps_status other = ps__hosts_check(n->h);
    if (other != PS_OK)
      return other;
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  }
  return ps__fail(st, "%s", own);
}

/* ---- a sum ----------------------------------------------------------------------------------- */

static char *buffer_of(const ps__net *n, uint64_t k) {
  return n->buffer + k % PS__NET_BUFFERS * ps__net_buffer_bytes(n->h->n, n->segment_bytes);
}

/* What rank @r sends of this rank's slice of segment @k. */
static char *received(const ps__net *n, const ps__cut *c, uint64_t k, uint32_t r) {
  const uint32_t place = r < n->h->rank ? r : r - 1;
  return buffer_of(n, k) + (c->n_hosts + place) * c->each * c->e;
}

/* Slice @r of segment @k in its buffer. */
static char *slice_of(const ps__net *n, const ps__cut *c, uint64_t k, uint32_t r, size_t *bytes) {
  (void)ps__cut_slice(c, k, r, bytes);
  return buffer_of(n, k) + r * c->each * c->e;
}

/* The host's bytes of segment @k. */
static uint64_t segment_at(const ps__cut *c, uint64_t k, uint64_t *bytes) {
  const uint64_t first = k * c->n_hosts * c->each, left = c->n - first, most = c->n_hosts * c->each;
  *bytes = (left < most ? left : most) * c->e;
  return first * c->e;
}

static int send_to(ps__net *n, uint32_t r, const void *data, size_t bytes, void *stream) {
  return bytes ? n->lib->Send(data, bytes, PS__NCCL_INT8, (int)r, n->comm, stream) : PS__NCCL_OK;
}
static int recv_from(ps__net *n, uint32_t r, void *data, size_t bytes, void *stream) {
  return bytes ? n->lib->Recv(data, bytes, PS__NCCL_INT8, (int)r, n->comm, stream) : PS__NCCL_OK;
}

/* The data of segment @k to those that add it, and the sums of segment @k - PS__NET_BEHIND to
 * all. */
static ps_status exchange_segment(ps__net *n, const ps__cut *c, uint64_t k) {
  void *stream = n->dev.api->stream(n->dev.user, PS__LANE_NET);
  int bad = n->lib->GroupStart();
  if (bad != PS__NCCL_OK)
    return nccl_failed(n, bad, "ncclGroupStart");
  for (uint32_t r = 0; r < n->h->n; r++) {
    size_t own, bytes;
    int call[4] = {0};
    if (r == n->h->rank)
      continue;
    if (k < c->n_segments) {
      const char *data = slice_of(n, c, k, r, &bytes);
      (void)slice_of(n, c, k, n->h->rank, &own);
      call[0] = send_to(n, r, data, bytes, stream);
      call[1] = recv_from(n, r, received(n, c, k, r), own, stream);
    }
    if (k >= PS__NET_BEHIND) {
      const char *sums = slice_of(n, c, k - PS__NET_BEHIND, n->h->rank, &own);
      char *others = slice_of(n, c, k - PS__NET_BEHIND, r, &bytes);
      call[2] = send_to(n, r, sums, own, stream);
      call[3] = recv_from(n, r, others, bytes, stream);
    }
    for (int i = 0; i < 4; i++)
      if (call[i] != PS__NCCL_OK && call[i] != PS__NCCL_IN_PROGRESS)
        bad = call[i];
  }
  const int end = n->lib->GroupEnd();
  if (bad != PS__NCCL_OK)
    return nccl_failed(n, bad, "ncclSend or ncclRecv");
  return settled(n, end, "ncclGroupEnd");
}

static ps_status queue_in(ps__net *n, const ps__cut *c, uint64_t k, const char *data) {
  const ps__net_device_api *api = n->dev.api;
  const uint32_t b = k % PS__NET_BUFFERS;
  uint64_t bytes, at = segment_at(c, k, &bytes);
  if (k >= PS__NET_BUFFERS)
    PS_TRY(await(n, PS__MARK_OUT + b));
  PS_TRY(api->copy(n->dev.user, PS__LANE_IN, buffer_of(n, k), data + at, bytes));
  PS_TRY(api->mark(n->dev.user, PS__LANE_IN, PS__MARK_IN + b));
  return api->after(n->dev.user, PS__LANE_NET, PS__MARK_IN + b);
}

static ps_status queue_out(ps__net *n, const ps__cut *c, uint64_t k, char *data) {
  const ps__net_device_api *api = n->dev.api;
  const uint32_t b = k % PS__NET_BUFFERS;
  uint64_t bytes, at = segment_at(c, k, &bytes);
  PS_TRY(api->mark(n->dev.user, PS__LANE_NET, PS__MARK_SUMS + b));
  PS_TRY(api->after(n->dev.user, PS__LANE_OUT, PS__MARK_SUMS + b));
  PS_TRY(api->copy(n->dev.user, PS__LANE_OUT, data + at, buffer_of(n, k), bytes));
  return api->mark(n->dev.user, PS__LANE_OUT, PS__MARK_OUT + b);
}

static ps_status queue_add(ps__net *n, const ps__cut *c, uint64_t k) {
  const ps__net_device_api *api = n->dev.api;
  const uint32_t b = k % PS__NET_BUFFERS;
  size_t bytes;
  char *mine = slice_of(n, c, k, n->h->rank, &bytes);
  const ps__net_add a = {.mine = mine,
                         .received = buffer_of(n, k) + c->n_hosts * c->each * c->e,
                         .stride_bytes = c->each * c->e,
                         .n = bytes / c->e,
                         .rank = n->h->rank,
                         .n_hosts = c->n_hosts,
                         .dt = c->dt};
  PS_TRY(api->mark(n->dev.user, PS__LANE_NET, PS__MARK_DATA + b));
  PS_TRY(api->after(n->dev.user, PS__LANE_ADD, PS__MARK_DATA + b));
  if (bytes)
    PS_TRY(api->add(n->dev.user, PS__LANE_ADD, &a));
  return api->mark(n->dev.user, PS__LANE_ADD, PS__MARK_ADDED + b);
}

/* The net lane goes on once segment @k is added. */
static ps_status after_added(ps__net *n, uint64_t k) {
  return n->dev.api->after(n->dev.user, PS__LANE_NET, PS__MARK_ADDED + k % PS__NET_BUFFERS);
}

static ps_status run_sum(ps__net *n, char *data, uint64_t count, ps_dtype dt) {
  const ps__cut c = ps__cut_of(n->h->n, count, dt, ps__net_slice_bytes(n->h->n, n->segment_bytes));
  for (uint64_t k = 0; k < c.n_segments + PS__NET_BEHIND; k++) {
    if (k < c.n_segments)
      PS_TRY(queue_in(n, &c, k, data));
    if (k >= PS__NET_BEHIND)
      PS_TRY(after_added(n, k - PS__NET_BEHIND));
    PS_TRY(exchange_segment(n, &c, k));
    if (k >= PS__NET_BEHIND)
      PS_TRY(queue_out(n, &c, k - PS__NET_BEHIND, data));
    if (k < c.n_segments)
      PS_TRY(queue_add(n, &c, k));
  }
  return c.n_segments ? await(n, PS__MARK_OUT + (c.n_segments - 1) % PS__NET_BUFFERS) : PS_OK;
}

/* After a failed call: gives the communicator up, and says why the call failed. */
static ps_status ended(ps__net *n, ps_status st) {
  char why[PS__HOSTS_MESSAGE];
  snprintf(why, sizeof why, "%s", ps_last_error());
  give_up(n);
  ps__fail(st, "%s", why);
  return explained(n, st);
}

static ps_status sum_entered(ps__net *n, void *data, uint64_t count, ps_dtype dt) {
  const ps_status st = run_sum(n, data, count, dt);
  return st == PS_OK ? st : ended(n, st);
}

ps_status ps__net_sum(ps__net *n, void *data, uint64_t count, ps_dtype dt) {
  if (n->broken)
    return ps__fail(PS_ECANCELLED, "this task has failed");
  PS_TRY(n->dev.api->enter(n->dev.user));
  const ps_status st = sum_entered(n, data, count, dt);
  n->dev.api->leave(n->dev.user);
  return st;
}

/* ---- opening and closing --------------------------------------------------------------------- */

/* Sums of ones, in both dtypes: every number of hosts is a bf16 number. */
static ps_status check_sums_in(ps__net *n, void *data) {
  static const ps_dtype dtypes[] = {PS_F32, PS_BF16};
  for (int d = 0; d < 2; d++) {
    float *f = data;
    uint16_t *b = data;
    const float expected = (float)n->h->n;
    uint32_t bits;
    memcpy(&bits, &expected, sizeof bits);
    for (uint32_t i = 0; i < CHECKED; i++)
      if (d == 0)
        f[i] = 1;
      else
        b[i] = 0x3f80;
    PS_TRY(sum_entered(n, data, CHECKED, dtypes[d]));
    for (uint32_t i = 0; i < CHECKED; i++)
      if (d == 0 ? f[i] != expected : b[i] != bits >> 16)
        return ps__fail(PS_EDEVICE, "NCCL: element %u of the first sum is wrong: give %s tcp", i,
                        ps__field("transport"));
  }
  return PS_OK;
}

/* After an error the lanes may still use the memory: it is kept until they are closed. */
static ps_status check_sums(ps__net *n) {
  void *data;
  PS_TRY(n->dev.api->reserve(n->dev.user, true, CHECKED * sizeof(float), &data));
  PS_TRY(check_sums_in(n, data));
  n->dev.api->release(n->dev.user, data);
  return PS_OK;
}

static ps_status connect_all(ps__net *n) {
  ps__nccl_id id = {{0}};
  ps__nccl_config config = PS__NCCL_CONFIG;
  config.max_ctas = MAX_CTAS;
  const int r = n->h->rank == 0 ? n->lib->GetUniqueId(&id) : PS__NCCL_OK;
  if (r != PS__NCCL_OK)
    return nccl_failed(n, r, "ncclGetUniqueId");
  PS_TRY(ps_hosts_share(n->h, &id, sizeof id));
  const int begun =
      n->lib->CommInitRankConfig(&n->comm, (int)n->h->n, id, (int)n->h->rank, &config);
  const ps_status st = settled(n, begun, "ncclCommInitRankConfig");
  return st == PS_OK ? check_sums(n) : ended(n, st);
}

static ps_status open_entered(ps__net *n) {
  const ps__net_device_api *api = n->dev.api;
  uint64_t before, between, after;
  void *buffer;
  PS_TRY(api->memory(n->dev.user, &before));
  PS_TRY(api->reserve(n->dev.user, false,
                      PS__NET_BUFFERS * ps__net_buffer_bytes(n->h->n, n->segment_bytes), &buffer));
  n->buffer = buffer;
  PS_TRY(api->memory(n->dev.user, &between));
  n->limit_s = CONNECT_S;
  PS_TRY(connect_all(n));
  n->limit_s = 0;
  PS_TRY(api->memory(n->dev.user, &after));
  char took[32], counted[32], staged[32];
  const size_t said = n->h->text_chosen;
  snprintf(n->h->transport_text + said, sizeof n->h->transport_text - said,
           "; it took %s of the GPU's memory, %s are planned for, and %s are staged there",
           ps__format_bytes(took, after > between ? after - between : 0),
           ps__format_bytes(counted, PS__NCCL_BYTES),
           ps__format_bytes(staged, between > before ? between - before : 0));
  return PS_OK;
}

/* After a finalize that succeeded nothing of the device is in use any more. */
static bool destroyed(ps__net *n) {
  const int r = n->lib->CommDestroy(n->comm);
  if (r != PS__NCCL_OK)
    ps__log(PS_LOG_WARN, "NCCL: ncclCommDestroy: %s", n->lib->GetErrorString(r));
  return true;
}

/* Ends the communicator; false: NCCL is still at it. */
static bool end_comm(ps__net *n) {
  if (!n->comm)
    return true;
  n->limit_s = CLOSE_S;
  if (!n->broken && ps__hosts_check(n->h) == PS_OK &&
      settled(n, n->lib->CommFinalize(n->comm), "ncclCommFinalize") == PS_OK)
    return destroyed(n);
  if (!n->broken)
    give_up(n);
  const uint64_t since = ps__now_ns();
  if (!n->has_aborter)
    return true; /* give_up() has waited for the abort */
  while (!atomic_load(&n->aborted) && ps__now_ns() - since < CLOSE_S * SECOND_NS)
    doze();
  const bool over = atomic_load(&n->aborted);
  if (over)
    pthread_join(n->aborter, NULL);
  else
    pthread_detach(n->aborter);
  bool idle = false;
  if (over && n->stuck && n->dev.api->idle(n->dev.user, &idle) == PS_OK)
    n->stuck = !idle; /* the lanes may have come to rest since */
  return over;
}

/* What NCCL or the device may still use is kept until the process ends. */
static void close_net(ps__net *n) {
  char last[PS__HOSTS_MESSAGE];
  snprintf(last, sizeof last, "%s", ps_last_error());
  const bool entered = n->dev.api->enter(n->dev.user) == PS_OK, over = end_comm(n) && !n->stuck;
  if (entered)
    n->dev.api->leave(n->dev.user);
  n->dev.api->close(n->dev.user, over);
  if (over)
    ps__free(n);
  else
    ps__log(PS_LOG_WARN,
            "NCCL did not end within %d s: what it has of the GPU stays taken until "
            "the process ends",
            CLOSE_S);
  if (*last)
    ps__fail(PS_EIO, "%s", last); /* the caller's words, not those of the end */
}

ps_status ps__hosts_open_net(ps_hosts *h, const ps__net_device *d) {
  const ps__nccl *lib = NULL;
  ps__net *n = NULL;
  ps_status st = ps__nccl_open(&lib);
  if (st == PS_OK && !(n = ps__calloc(1, sizeof *n)))
    st = ps__fail(PS_ENOMEM, "out of memory for NCCL's transport");
  if (st != PS_OK) {
    d->api->close(d->user, true);
    return st;
  }
  n->h = h;
  n->dev = *d;
  n->lib = lib;
  n->segment_bytes = d->segment_bytes ? d->segment_bytes : PS__NET_SEGMENT_BYTES;
  st = d->api->enter(d->user);
  if (st == PS_OK) {
    st = open_entered(n);
    d->api->leave(d->user);
  }
  if (st != PS_OK) {
    close_net(n);
    return st;
  }
  h->net = n;
  return PS_OK;
}

const ps__net_device *ps__hosts_net(const ps_hosts *h) { return h->net ? &h->net->dev : NULL; }

void ps__hosts_close_net(ps_hosts *h) {
  if (h->net)
    close_net(h->net);
  h->net = NULL;
}
