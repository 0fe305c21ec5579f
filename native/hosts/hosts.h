/* hosts.h - what tasks on several hosts say to each other. Internal.
 *
 * Between each two tasks there are two connections. Control carries how a task ends: a thread of
 * each task (control.c) reads it all the time, so that a failure is known within seconds whatever
 * the task does. Data carries what steps exchange (exchange.c), in the order of the calls. Sums go
 * over NCCL instead where that was chosen (net.h). */
#ifndef PS_HOSTS_HOSTS_H
#define PS_HOSTS_HOSTS_H
#include "core/core.h"
#include <penstock/hosts.h>
#include <penstock/model.h>
#include <pthread.h>
#include <stdatomic.h>

enum { PS__HOSTS_MESSAGE = 1024, PS__HOSTS_WHAT = 160, PS__HOSTS_TEXT = 512 };

struct ps_hosts {
  uint32_t rank, n;
  int control[PS_MAX_HOSTS], data[PS_MAX_HOSTS]; /* sockets by rank; -1: none */
  int wake[2];                                   /* a pipe that ends the control thread */
  char *staging;                                 /* ps__hosts_staging_bytes() */
  _Atomic uint32_t in_use;                       /* 1: a trainer has it */
  ps_transport transport;                        /* that was chosen */
  char transport_text[PS__HOSTS_TEXT];
  size_t text_chosen;    /* characters of it that ps_hosts_choose() wrote; then what NCCL took */
  struct ps__net *net;   /* NULL: sums go over TCP */
  struct ps__door *door; /* of rank 0 also after the meeting: who comes late is told so */
  struct ps__peer *peer; /* what the control thread knows of each rank */
  double wait_s;         /* how long a task may say nothing until the first step */
  _Atomic bool trains;   /* the first step has begun */
  double network_bytes_per_s; /* as measured; 0: not yet */
  pthread_t thread;
  bool has_thread;
  pthread_mutex_t lock; /* of all below; and of what is sent on control */
  ps_status failed;     /* the first failure; PS_OK: none */
  bool here;            /* it was ps_hosts_fail() of this task */
  char message[PS__HOSTS_MESSAGE];
  char what[PS__HOSTS_WHAT]; /* the last call on data, or the one that runs */
  bool inside;
  bool torn[PS_MAX_HOSTS]; /* control has taken a part of a message: nothing more is sent */
  void (*on_failure)(void *user);
  void *user;
};

/* ps__hosts_gather() - @bytes of each task, by rank, in all[n * bytes]. @what names the call in
 * messages. */
ps_status ps__hosts_gather(ps_hosts *h, const char *what, const void *mine, void *all,
                           size_t bytes);
/* ps__hosts_sum() - data[n] of all tasks is added up: that of rank 0, rank 1 and so on, in fp32
 * with one rounding to nearest at the end. All tasks get the sum, the same bits. Each task adds the
 * elements of its slice and sends the sums to the others. So a task sends 2 (n - 1) / n times the
 * data's bytes, and receives as many. @dt: PS_F32 or PS_BF16. */
ps_status ps__hosts_sum(ps_hosts *h, const char *what, void *data, uint64_t n, ps_dtype dt);
/* the same over the data connections, inside a call on data (exchange.c) */
ps_status ps__hosts_sum_tcp(ps_hosts *h, void *data, uint64_t n, ps_dtype dt);
/* ps__hosts_slice_bytes() - the most of a slice that is under way at once.
 * ps__hosts_staging_bytes() - the memory that sums take beside their data. */
static inline uint64_t ps__hosts_slice_bytes(uint32_t n_hosts) {
  const uint64_t most = (32u << 20) / (n_hosts > 1 ? n_hosts - 1 : 1);
  return (most < 4u << 20 ? most : 4u << 20) / 256 * 256;
}
static inline uint64_t ps__hosts_staging_bytes(uint32_t n_hosts) {
  return (n_hosts - 1) * ps__hosts_slice_bytes(n_hosts);
}

/* How the data of a sum is cut: into segments, a segment into a slice for each rank, which adds it.
 * each: elements of a slice, at most; e: BYTES of an element. The bits of sums do not depend on it.
 * ps__cut_of() - with slices of at most @slice_bytes, a multiple of 256.
 * ps__cut_slice() - where slice @r of segment @k begins, in BYTES; *bytes 0 past the end. */
typedef struct ps__cut {
  uint64_t n, each, n_segments;
  size_t e;
  ps_dtype dt;
  uint32_t n_hosts;
} ps__cut;
static inline ps__cut ps__cut_of(uint32_t n_hosts, uint64_t n, ps_dtype dt, uint64_t slice_bytes) {
  const size_t e = ps_dtype_bytes(dt);
  const uint64_t most = slice_bytes / e, even = (n / n_hosts + 64) / 64 * 64,
                 each = even < most ? even : most, segment = each * n_hosts;
  return (ps__cut){.n = n,
                   .each = each,
                   .n_segments = (n + segment - 1) / segment,
                   .e = e,
                   .dt = dt,
                   .n_hosts = n_hosts};
}
static inline uint64_t ps__cut_slice(const ps__cut *c, uint64_t k, uint32_t r, size_t *bytes) {
  const uint64_t first = (k * c->n_hosts + r) * c->each, left = first < c->n ? c->n - first : 0;
  *bytes = (left < c->each ? left : c->each) * c->e;
  return (left ? first : 0) * c->e;
}

/* All tasks call these together and get the same (measure.c).
 * ps__hosts_known_rate() - BYTES per second that need not be measured: the least that a task gives
 * (@given; 0: none), else what was measured before, else 0.
 * @room_bytes: that this task may take. *most_bytes: of ps__hosts_measure(), 1 MiB at least.
 * ps__hosts_measure() - the rate of ps_hosts_measure(), by NCCL where it is open, else by TCP. */
ps_status ps__hosts_known_rate(ps_hosts *h, double given, uint64_t room_bytes, double *out,
                               uint64_t *most_bytes);
ps_status ps__hosts_measure(ps_hosts *h, uint64_t most_bytes, double *out);

/* ps__hosts_watch() - @failed is called once at a failure that is not this task's own, from any
 * thread, and not after ps__hosts_watch(h, NULL, NULL) has returned.
 * ps__hosts_failure() - such a failure as the thread's last error; PS_OK: there is none. */
void ps__hosts_watch(ps_hosts *h, void (*failed)(void *user), void *user);
ps_status ps__hosts_failure(ps_hosts *h);

/* ps__hosts_begin() - the first step begins: from now on a task that says nothing is waited for. */
void ps__hosts_begin(ps_hosts *h);

/* In seconds; tests shorten them.
 *   beat      between what each task says on control, whatever it does
 *   silent    after which a task that waits for another one logs that it says nothing
 *   greeting  until a greeting is complete */
typedef struct ps__times {
  double beat_s, silent_s, greeting_s;
} ps__times;
extern ps__times ps__hosts_times;

/* ---- the parts ------------------------------------------------------------------------------- */
/* ps__hosts_meet() - fill in the sockets and the door (meet.c). On an error some may be open.
 * ps__status_of() - a status that another task says: PS_EIO where it is none of an error. */
ps_status ps__hosts_meet(ps_hosts *h, const ps_hosts_config *cfg);
static inline ps_status ps__status_of(int32_t said) {
  return said < 0 && said >= PS_EINTERNAL ? (ps_status)said : PS_EIO;
}
/* ps__hosts_start() - the control thread begins (control.c). PS_EDEVICE.
 * ps__hosts_lost() - the data connection to @rank ended: waits for what control says of it, and
 * returns the failure. */
ps_status ps__hosts_start(ps_hosts *h);
ps_status ps__hosts_lost(ps_hosts *h, uint32_t rank);
/* ps__hosts_end() - tell the others that this task leaves, and end the thread. */
void ps__hosts_end(ps_hosts *h);
/* ps__hosts_check() - the first failure, also this task's own (PS_ECANCELLED); PS_OK: none.
 * ps__hosts_enter() - a call on data begins. Errors: the failure. ps__hosts_leave(): it ends. */
ps_status ps__hosts_check(ps_hosts *h);
ps_status ps__hosts_enter(ps_hosts *h, const char *what);
void ps__hosts_leave(ps_hosts *h);
/* ps__net_sum() - ps__hosts_sum() over NCCL, inside a call on data (net.c). */
ps_status ps__net_sum(struct ps__net *net, void *data, uint64_t n, ps_dtype dt);
#endif
