/* test_hosts_net.c - sums over hosts by way of a device and NCCL (native/hosts/net.c), with threads
 * in place of the lanes of a GPU and fake_nccl.c in place of NCCL: the bits of TCP's, for several
 * numbers of hosts; what is chosen; the network's rate, which TCP's way has too, and whose it is;
 * failures. */
#include "check.h"
#include "core/dtype.h"
#include "fake_nccl.h"
#include "hosts/net.h"
#include "hosts_ranks.h"
#include <dlfcn.h>
#include <math.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#ifdef PS_SANITIZED
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

static char library[4096];

/* ---- a device of threads --------------------------------------------------------------------- */

enum { ROOM = 64, BLOCKS = 4 };
static uint64_t segment_bytes; /* of devices that are opened; 0: as the GPU's */
typedef struct device device;

typedef struct item {
  void (*run)(void *arg);
  void *arg; /* freed by run */
} item;

typedef struct lane {
  fake_lane base; /* what NCCL gets */
  device *d;
  pthread_t thread;
  item items[ROOM];
  uint64_t n_queued, n_done;
} lane;

struct device {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  lane lanes[PS__N_LANES];
  uint64_t marked[PS__N_MARKS], passed[PS__N_MARKS]; /* how often */
  void *block[BLOCKS];
  uint32_t n_blocks, entered;
  bool over;
};

/* Every item of this lane begins late, so that others overtake it where nothing makes them wait. */
static _Atomic int late = PS__N_LANES;

static void *lane_main(void *arg) {
  lane *l = arg;
  device *d = l->d;
  pthread_mutex_lock(&d->lock);
  for (;;) {
    while (l->n_done == l->n_queued && !d->over)
      pthread_cond_wait(&d->changed, &d->lock);
    if (l->n_done == l->n_queued)
      break;
    const item i = l->items[l->n_done % ROOM];
    pthread_mutex_unlock(&d->lock);
    if (l - d->lanes == atomic_load(&late))
      nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    i.run(i.arg);
    pthread_mutex_lock(&d->lock);
    l->n_done++;
    pthread_cond_broadcast(&d->changed);
  }
  pthread_mutex_unlock(&d->lock);
  return NULL;
}

static void queue_on(fake_lane *base, void (*run)(void *arg), void *arg) {
  lane *l = (lane *)base;
  pthread_mutex_lock(&l->d->lock);
  CHECK(l->n_queued - l->n_done < ROOM); /* the caller stays close */
  l->items[l->n_queued++ % ROOM] = (item){run, arg};
  pthread_cond_broadcast(&l->d->changed);
  pthread_mutex_unlock(&l->d->lock);
}

typedef struct work {
  device *d;
  void *dst;
  const void *src;
  uint64_t bytes, value;
  uint32_t mark;
  ps__net_add add;
} work;

static void queue(device *d, uint32_t number, void (*run)(void *), work w) {
  work *copy = malloc(sizeof *copy);
  *copy = w;
  copy->d = d;
  queue_on(&d->lanes[number].base, run, copy);
}

enum { SLOW_NS = 50000000 };
static _Atomic bool slow_copies;

static void run_copy(void *arg) {
  work *w = arg;
  if (atomic_load(&slow_copies))
    nanosleep(&(struct timespec){.tv_nsec = SLOW_NS}, NULL);
  memcpy(w->dst, w->src, w->bytes);
  free(w);
}

/* Numbers that are converted in one call. */
enum { AT_ONCE = 512 };
static uint64_t at_once(uint64_t left) { return left < AT_ONCE ? left : AT_ONCE; }

/* total += term, of @n elements; of the first term: total = term. */
static void add_term(float *total, const float *term, uint64_t n, bool first) {
  for (uint64_t i = 0; i < n; i++)
    total[i] = first ? term[i] : total[i] + term[i];
}

static void run_add(void *arg) {
  work *w = arg;
  const ps__net_add *a = &w->add;
  const size_t e = ps_dtype_bytes(a->dt);
  for (uint64_t i = 0, n; i < a->n; i += n) {
    float total[AT_ONCE], term[AT_ONCE];
    n = at_once(a->n - i);
    for (uint32_t r = 0; r < a->n_hosts; r++) {
      const char *from =
          r == a->rank ? (char *)a->mine
                       : (const char *)a->received + (r < a->rank ? r : r - 1) * a->stride_bytes;
      ps__dtypes[a->dt].to_f32(term, from + i * e, n);
      add_term(total, term, n, r == 0);
    }
    ps__dtypes[a->dt].from_f32((char *)a->mine + i * e, total, n);
  }
  free(w);
}

static void run_mark(void *arg) {
  work *w = arg;
  pthread_mutex_lock(&w->d->lock);
  w->d->passed[w->mark] = w->value;
  pthread_cond_broadcast(&w->d->changed);
  pthread_mutex_unlock(&w->d->lock);
  free(w);
}

static void run_after(void *arg) {
  work *w = arg;
  pthread_mutex_lock(&w->d->lock);
  while (w->d->passed[w->mark] < w->value)
    pthread_cond_wait(&w->d->changed, &w->d->lock);
  pthread_mutex_unlock(&w->d->lock);
  free(w);
}

static ps_status dev_enter(void *user) {
  CHECK(((device *)user)->entered++ == 0);
  return PS_OK;
}
static void dev_leave(void *user) { CHECK(((device *)user)->entered-- == 1); }
static ps_status dev_reserve(void *user, bool on_host, uint64_t bytes, void **out) {
  device *d = user;
  (void)on_host;
  CHECK(d->entered && d->n_blocks < BLOCKS);
  *out = d->block[d->n_blocks++] = aligned_alloc(256, (bytes + 255) / 256 * 256);
  return PS_OK;
}
static void *dev_stream(void *user, uint32_t number) {
  return &((device *)user)->lanes[number].base;
}
static ps_status dev_copy(void *user, uint32_t number, void *dst, const void *src, uint64_t n) {
  queue(user, number, run_copy, (work){.dst = dst, .src = src, .bytes = n});
  return PS_OK;
}
static ps_status dev_add(void *user, uint32_t number, const ps__net_add *a) {
  queue(user, number, run_add, (work){.add = *a});
  return PS_OK;
}
static ps_status dev_mark(void *user, uint32_t number, uint32_t mark) {
  device *d = user;
  queue(d, number, run_mark, (work){.mark = mark, .value = ++d->marked[mark]});
  return PS_OK;
}
static ps_status dev_after(void *user, uint32_t number, uint32_t mark) {
  device *d = user;
  queue(d, number, run_after, (work){.mark = mark, .value = d->marked[mark]});
  return PS_OK;
}
static ps_status dev_passed(void *user, uint32_t mark, bool *out) {
  device *d = user;
  pthread_mutex_lock(&d->lock);
  *out = d->passed[mark] >= d->marked[mark];
  pthread_mutex_unlock(&d->lock);
  return PS_OK;
}
static ps_status dev_idle(void *user, bool *out) {
  device *d = user;
  pthread_mutex_lock(&d->lock);
  *out = true;
  for (int i = 0; i < PS__N_LANES; i++)
    *out = *out && d->lanes[i].n_done == d->lanes[i].n_queued;
  pthread_mutex_unlock(&d->lock);
  return PS_OK;
}
static void dev_release(void *user, void *pinned) {
  device *d = user;
  uint32_t i = 0;
  while (i < d->n_blocks && d->block[i] != pinned)
    i++;
  CHECK(d->entered && i < d->n_blocks);
  free(pinned);
  d->block[i] = d->block[--d->n_blocks];
}
static ps_status dev_memory(void *user, uint64_t *out) {
  *out = ((device *)user)->n_blocks * (uint64_t)1048576;
  return PS_OK;
}
static void dev_close(void *user, bool at_rest) {
  device *d = user;
  CHECK(at_rest && d->entered == 0);
  pthread_mutex_lock(&d->lock);
  d->over = true;
  pthread_cond_broadcast(&d->changed);
  pthread_mutex_unlock(&d->lock);
  for (int i = 0; i < PS__N_LANES; i++)
    pthread_join(d->lanes[i].thread, NULL);
  for (uint32_t i = 0; i < d->n_blocks; i++)
    free(d->block[i]);
  free(d);
}

static const ps__net_device_api api = {.enter = dev_enter,
                                       .leave = dev_leave,
                                       .reserve = dev_reserve,
                                       .release = dev_release,
                                       .stream = dev_stream,
                                       .copy = dev_copy,
                                       .add = dev_add,
                                       .mark = dev_mark,
                                       .after = dev_after,
                                       .passed = dev_passed,
                                       .idle = dev_idle,
                                       .memory = dev_memory,
                                       .close = dev_close};

static ps__net_device device_open(void) {
  device *d = calloc(1, sizeof *d);
  pthread_mutex_init(&d->lock, NULL);
  pthread_cond_init(&d->changed, NULL);
  for (int i = 0; i < PS__N_LANES; i++) {
    d->lanes[i].base.queue = queue_on;
    d->lanes[i].d = d;
    CHECK(pthread_create(&d->lanes[i].thread, NULL, lane_main, &d->lanes[i]) == 0);
  }
  return (ps__net_device){.api = &api, .user = d, .segment_bytes = segment_bytes};
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static void open_net(ps_hosts *h) {
  uint32_t chosen = 0;
  const ps__net_device d = device_open();
  CHECK(ps_hosts_choose(h, PS_TRANSPORT_AUTO, 1, &chosen) == PS_OK);
  CHECK(chosen == PS_TRANSPORT_NCCL && ps__hosts_wants_net(h));
  CHECK(strstr(ps_hosts_transport_text(h), "over NCCL 2.29.7, which all"));
  CHECK(ps__hosts_open_net(h, &d) == PS_OK);
  CHECK(strstr(ps_hosts_transport_text(h), "of the GPU's memory"));
}

/* ---- bits ------------------------------------------------------------------------------------ */

static float value(uint32_t rank, uint64_t i) {
  const uint64_t x = mix64(i * 64 + rank);
  const float f = (float)(int32_t)(uint32_t)x * 0x1p-31f;
  return ldexpf(f, (int)(x >> 60) - 8);
}

/* Numbers @first to @first + @n - 1 of rank @k, in the rank's dtype. */
static void values(const rank *r, uint32_t k, uint64_t first, uint64_t n, void *out) {
  float f[AT_ONCE];
  for (uint64_t i = 0; i < n; i++)
    f[i] = value(k, first + i);
  ps__dtypes[r->dt].from_f32(out, f, n);
}

static void fill(const rank *r, void *data) {
  for (uint64_t i = 0, n; i < r->count; i += n) {
    n = at_once(r->count - i);
    values(r, r->rank, i, n, (char *)data + i * ps_dtype_bytes(r->dt));
  }
}

/* The contract, element by element. */
static void expect(const rank *r, const void *data) {
  const size_t e = ps_dtype_bytes(r->dt);
  for (uint64_t i = 0, n; i < r->count; i += n) {
    float total[AT_ONCE], term[AT_ONCE], bits[AT_ONCE];
    n = at_once(r->count - i);
    for (uint32_t k = 0; k < r->n; k++) {
      values(r, k, i, n, bits);
      ps__dtypes[r->dt].to_f32(term, bits, n);
      add_term(total, term, n, k == 0);
    }
    ps__dtypes[r->dt].from_f32(bits, total, n);
    CHECK(memcmp(bits, (const char *)data + i * e, n * e) == 0);
  }
}

static void sum_twice(rank *r, ps_hosts *h) {
  void *data = malloc(r->count * 4 + 4);
  if (r->count < 100000) { /* TCP's way has the same contract */
    fill(r, data);
    CHECK(ps__hosts_sum(h, "a sum", data, r->count, r->dt) == PS_OK);
    expect(r, data);
  }
  open_net(h);
  for (int i = 0; i < 2; i++) {
    fill(r, data);
    CHECK(ps__hosts_sum(h, "a sum", data, r->count, r->dt) == PS_OK);
    expect(r, data);
  }
  ps__hosts_close_net(h);
  free(data);
}

static void test_bits(void) {
  for (uint32_t n = 2; n <= MAX_RANKS; n += n == 3 ? 2 : 1)
    for (int d = 0; d < 2; d++) {
      const ps_dtype dt = d ? PS_BF16 : PS_F32;
      run_ranks(n, sum_twice, dt, 1);
      run_ranks(n, sum_twice, dt, 64 * n + 3);
      run_ranks(n, sum_twice, dt, 70001);
    }
  /* every number of segments up to more than there are buffers, the last one not whole, and in
   * turn each lane behind the others */
  segment_bytes = 1 << 16;
  for (int lane = 0; lane <= PS__N_LANES; lane++) {
    atomic_store(&late, lane);
    for (uint32_t k = 0; k < PS__NET_BUFFERS + 3; k += SANITIZED ? 2 : 1)
      run_ranks(2 + k % 2, sum_twice, PS_BF16, k * segment_bytes / sizeof(uint16_t) + 12345);
  }
  segment_bytes = 0;
}

/* ---- what is chosen -------------------------------------------------------------------------- */

static void choose(rank *r, ps_hosts *h) {
  uint32_t chosen = 9;
  CHECK(ps_hosts_choose(h, PS_TRANSPORT_TCP, 1, &chosen) == PS_OK && chosen == PS_TRANSPORT_TCP);
  CHECK(strstr(ps_hosts_transport_text(h), "TCP, as asked for"));
  CHECK(ps_hosts_choose(h, PS_TRANSPORT_AUTO, r->rank != 1, &chosen) == PS_OK);
  CHECK(chosen == PS_TRANSPORT_TCP && !ps__hosts_wants_net(h));
  CHECK(strstr(ps_hosts_transport_text(h), "TCP, as rank 1 cannot use NCCL: it trains on a CPU"));
  chosen = 9;
  CHECK_FAILS(ps_hosts_choose(h, PS_TRANSPORT_NCCL, r->rank != 1, &chosen), PS_EINVAL,
              "transport nccl: rank 1 cannot use NCCL: it trains on a CPU");
  CHECK(chosen == 9);
  CHECK_FAILS(ps_hosts_choose(h, PS_N_TRANSPORTS, 1, &chosen), PS_EINVAL, "ps_transport");
}

static void test_libraries(const char *other) {
  ps__nccl l;
  CHECK_FAILS(ps__nccl_load(&l, "/nowhere/libnccl.so.2"), PS_EDEVICE, "set PENSTOCK_NCCL");
  CHECK_FAILS(ps__nccl_load(&l, other), PS_EDEVICE, "has no ncclGetVersion");
  setenv("FAKE_NCCL_VERSION", "21604", 1);
  CHECK_FAILS(ps__nccl_load(&l, library), PS_EDEVICE, "is NCCL 2.16.4: 2.19 or newer");
  unsetenv("FAKE_NCCL_VERSION");
  CHECK(ps__nccl_load(&l, library) == PS_OK && strcmp(l.version, "2.29.7") == 0);
}

/* ---- the network's rate ---------------------------------------------------------------------- */

/* All ranks have the same rate, which is kept. */
static double measure_once(rank *r, ps_hosts *h) {
  double rate = 0, again = 0, all[MAX_RANKS];
  uint64_t room;
  CHECK(ps__hosts_known_rate(h, 0, 8 << 20, &rate, &room) == PS_OK && rate == 0);
  CHECK(room == 8 << 20);
  CHECK(ps__hosts_measure(h, room, &rate) == PS_OK && rate > 0);
  CHECK(ps__hosts_gather(h, "rates", &rate, all, sizeof rate) == PS_OK);
  for (uint32_t i = 0; i < r->n; i++)
    CHECK(all[i] == rate);
  CHECK(ps__hosts_known_rate(h, 0, 8 << 20, &again, &room) == PS_OK && again == rate);
  h->network_bytes_per_s = 0;
  return rate;
}

/* A sum of the least size then takes two slow copies, one after the other, and no larger one is
 * made. Other work may slow it down, so it gets several tries. Under a sanitizer the sums
 * themselves take longer than the copies. */
static void measure(rank *r, ps_hosts *h) {
  const double sent = 2.0 * (r->n - 1) / r->n * (1 << 20), most = sent / (2e-9 * SLOW_NS);
  double rate = 0;
  (void)measure_once(r, h); /* over TCP */
  open_net(h);
  pthread_barrier_wait(r->together);
  atomic_store(&slow_copies, true);
  for (int tries = 0; tries < (SANITIZED ? 1 : 20) && rate <= most / 4; tries++)
    rate = measure_once(r, h); /* the same in all ranks */
  CHECK(rate <= most && (SANITIZED || rate > most / 4));
  pthread_barrier_wait(r->together);
  atomic_store(&slow_copies, false);
  CHECK(ps__hosts_net(h)); /* ps_hosts_close() closes it */
}

/* The least stated rate counts, and the least room. */
static void state(rank *r, ps_hosts *h) {
  double rate = 0;
  uint64_t room = 0;
  const double stated = r->rank == 1 ? 3e9 : r->rank == 2 ? 2e9 : 0;
  CHECK(ps__hosts_known_rate(h, stated, (r->rank + 3) << 20, &rate, &room) == PS_OK);
  CHECK(rate == 2e9 && room == 2 << 20);
  CHECK(ps__hosts_known_rate(h, r->rank ? 0 : 1e6, r->rank == 1 ? 0 : 1u << 30, &rate, &room) ==
        PS_OK);
  CHECK(rate == 1e6 && room == 1 << 20);
  CHECK(ps__hosts_known_rate(h, 0, UINT64_MAX, &rate, &room) == PS_OK);
  CHECK(rate == 0 && room == 256 << 20);
  rate = stated;
  CHECK(ps_hosts_measure(h, 0, 0, &rate) == PS_OK && rate == 2e9 && !ps__hosts_net(h));
  const double bad[] = {-1, (double)NAN, (double)INFINITY};
  for (int i = 0; i < 3; i++) {
    rate = bad[i];
    CHECK_FAILS(ps_hosts_measure(h, 0, 0, &rate), PS_EINVAL, "bytes_per_s");
  }
  atomic_store(&h->in_use, 1); /* as a trainer does */
  rate = 0;
  CHECK_FAILS(ps_hosts_measure(h, 0, 0, &rate), PS_EBUSY, "a trainer uses these hosts");
  CHECK(rate == 0);
  atomic_store(&h->in_use, 0);
}

/* ---- whose network it is --------------------------------------------------------------------- */

/* In the C library's place: each rank is on a machine of its own. NULL: the system does not say. */
static _Thread_local const char *machine;
int gethostname(char *name, size_t bytes) {
  if (!machine)
    return -1;
  snprintf(name, bytes, "%s", machine);
  return 0;
}

static const char *machines[MAX_RANKS]; /* of the ranks */
static char ids[MAX_RANKS][PS_HOSTS_ID_BYTES];

static void identify(rank *r, ps_hosts *h) {
  machine = machines[r->rank];
  CHECK(ps_hosts_id(h, ids[r->rank]) == PS_OK);
  CHECK_FAILS(ps_hosts_id(h, NULL), PS_EINVAL, "out must be given");
}

/* The id of machines a, b and c, which is the same in all ranks. */
static const char *id_of(const char *a, const char *b, const char *c) {
  static char text[8][PS_HOSTS_ID_BYTES];
  static int n;
  machines[0] = a;
  machines[1] = b;
  machines[2] = c;
  run_ranks(3, identify, PS_F32, 1);
  CHECK(strcmp(ids[0], ids[1]) == 0 && strcmp(ids[0], ids[2]) == 0);
  return memcpy(text[n++], ids[0], sizeof *text);
}

/* printf 'node1\0node2\0node3\0' | sha256sum */
static void test_ids(void) {
  const char *const of[] = {id_of("node1", "node2", "node3"), id_of("node1", "node3", "node2"),
                            id_of("node2", "node1", "node3"), id_of("node1", "node2", "node4"),
                            id_of("node1", "node2n", "ode3"), id_of(NULL, "node2", "node3")};
  CHECK(strcmp(of[0], "7f0b1c1fcc45d13f") == 0);
  for (int i = 0; i < 6; i++)
    for (int k = 0; k < i; k++)
      CHECK(strcmp(of[i], of[k]) != 0);
  CHECK(strcmp(id_of("node1", "node2", "node3"), of[0]) == 0);
}

/* The file gives the same double back, whatever its digits. A write that fails leaves it. */
static void keep_rate(rank *r, ps_hosts *h) {
  char folder[] = "/tmp/penstock-rate-XXXXXX", path[sizeof folder + 8];
  double rate = 1e9 / 3, back = 0;
  if (r->rank)
    return;
  CHECK(mkdtemp(folder));
  snprintf(path, sizeof path, "%s/a.json", folder);
  for (int i = 0; i < 20; i++, rate *= 1.7) {
    CHECK(ps_hosts_rate_write(h, rate, path) == PS_OK);
    CHECK(ps_hosts_rate_read(&back, path) == PS_OK && back == rate);
  }
  const double bad[] = {0, -1, (double)NAN, (double)INFINITY};
  for (int i = 0; i < 4; i++)
    CHECK_FAILS(ps_hosts_rate_write(h, bad[i], path), PS_EINVAL, "a rate must be given");
  for (int nth = 1; nth <= 2; nth++) { /* the file is opened, and written */
    ps__fault_arm(PS_FAULT_WRITE, nth);
    CHECK_FAILS(ps_hosts_rate_write(h, 1, path), PS_EIO, path);
  }
  ps__fault_arm(PS_FAULT_WRITE, 0);
  CHECK(ps_hosts_rate_read(&rate, path) == PS_OK && rate == back);
  CHECK(unlink(path) == 0);
  CHECK_FAILS(ps_hosts_rate_read(&rate, path), PS_EIO, path);
  CHECK(rate == back && rmdir(folder) == 0); /* nothing else is left */
}

/* ---- failures -------------------------------------------------------------------------------- */

static void (*fail_sends)(int rank);
static uint64_t (*n_aborts)(void);

/* Rank 1 fails and never sends: what the others' lanes wait for is aborted. */
static void another_fails(rank *r, ps_hosts *h) {
  float *data = calloc(r->count, sizeof *data);
  const uint64_t since = ps__now_ns();
  open_net(h);
  pthread_barrier_wait(r->together);
  if (r->rank == 1) {
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    ps_hosts_fail(h, PS_ENUMERIC, "it was told to");
  } else {
    CHECK_FAILS(ps__hosts_sum(h, "a sum", data, r->count, PS_F32), PS_ENUMERIC,
                "rank 1 failed: it was told to");
  }
  CHECK_FAILS(ps__hosts_sum(h, "another sum", data, r->count, PS_F32),
              r->rank == 1 ? PS_ECANCELLED : PS_ENUMERIC, r->rank == 1 ? "this task" : "rank 1");
  free(data); /* nothing reads or writes it any more */
  ps__hosts_close_net(h);
  CHECK(ps__now_ns() - since < 300000000000);
  pthread_barrier_wait(r->together);
}

/* NCCL itself fails in rank 1, which tells the others. */
static void nccl_fails(rank *r, ps_hosts *h) {
  float *data = calloc(r->count, sizeof *data);
  open_net(h);
  pthread_barrier_wait(r->together);
  fail_sends(1);
  pthread_barrier_wait(r->together);
  const ps_status st = ps__hosts_sum(h, "a sum", data, r->count, PS_F32);
  CHECK(st == PS_EIO);
  if (r->rank == 1) {
    CHECK(strstr(ps_last_error(), "NCCL: ncclSend or ncclRecv: remote error: as it was told"));
    ps_hosts_fail(h, st, ps_last_error());
  } else {
    CHECK(strstr(ps_last_error(), "rank 1 failed: NCCL: ncclSend"));
  }
  free(data);
  ps__hosts_close_net(h);
  pthread_barrier_wait(r->together);
}

/* Rank 1 fails while the others measure; count: whether over NCCL. */
static void fails_while_measuring(rank *r, ps_hosts *h) {
  double rate = 5;
  if (r->count)
    open_net(h);
  pthread_barrier_wait(r->together);
  if (r->rank == 1) {
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    ps_hosts_fail(h, PS_ENUMERIC, "it was told to");
  } else {
    CHECK_FAILS(ps__hosts_measure(h, 8 << 20, &rate), PS_ENUMERIC, "rank 1 failed: it was told to");
  }
  CHECK(rate == 5 && h->network_bytes_per_s == 0);
  pthread_barrier_wait(r->together);
}

/* Rank 1 leaves without a word in the middle. A process that ends closes all its sockets before it
 * could say more. Here they are closed one after the other, slowly, as on a busy machine. So the
 * lock keeps rank 1's own control thread from telling rank 2 meanwhile that rank 0 is gone. */
static void ends_while_measuring(rank *r, ps_hosts *h) {
  double rate = 5;
  uint64_t room;
  CHECK(ps__hosts_known_rate(h, 0, UINT64_MAX, &rate, &room) == PS_OK);
  pthread_barrier_wait(r->together); /* none is inside that call any more */
  if (r->rank == 1) {
    pthread_mutex_lock(&h->lock);
    for (uint32_t i = 0; i < r->n; i++)
      if (i != 1) {
        shutdown(h->data[i], SHUT_RDWR);
        shutdown(h->control[i], SHUT_RDWR);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
      }
    pthread_mutex_unlock(&h->lock);
  } else {
    CHECK_FAILS(ps__hosts_measure(h, room, &rate), PS_EIO, "rank 1 is gone");
    CHECK(strstr(ps_last_error(), " measuring the network"));
  }
  pthread_barrier_wait(r->together);
}

static void test_failures(void) {
  void *lib = dlopen(library, RTLD_NOW);
  CHECK(lib);
  *(void **)&fail_sends = dlsym(lib, "fake_nccl_fail");
  *(void **)&n_aborts = dlsym(lib, "fake_nccl_aborts");
  CHECK(fail_sends && n_aborts && n_aborts() == 0);
  run_ranks(3, another_fails, PS_F32, 100000);
  CHECK(n_aborts() == 3);
  run_ranks(2, nccl_fails, PS_F32, 100000);
  CHECK(n_aborts() == 5);
  fail_sends(-1);
  run_ranks(3, fails_while_measuring, PS_F32, 0);
  CHECK(n_aborts() == 5);
  run_ranks(3, fails_while_measuring, PS_F32, 1);
  CHECK(n_aborts() == 8);
  run_ranks(3, ends_while_measuring, PS_F32, 1);
}

int main(void) {
  char other[sizeof library];
  const ssize_t n = readlink("/proc/self/exe", library, sizeof library - 64);
  CHECK(n > 0);
  library[n] = 0;
  *strrchr(library, '/') = 0;
  snprintf(other, sizeof other, "%.4000s/libdisk_shim.so", library);
  strcat(library, "/libfake_nccl.so");
  setenv("PENSTOCK_NCCL", library, 1);
  test_libraries(other);
  run_ranks(3, choose, PS_F32, 1);
  test_bits();
  run_ranks(2, measure, PS_F32, 1);
  run_ranks(5, measure, PS_F32, 1);
  run_ranks(3, state, PS_F32, 1);
  test_ids();
  run_ranks(2, keep_rate, PS_F32, 1);
  test_failures();
  puts("ok sums over hosts by way of a device");
  return 0;
}
