/* leave.c - how a run's streams come to rest.
 *
 * After an error or a cancel, submitted device ops wait for host ops that will not run. The last
 * host stream to give up lets them go, for two reasons. No host op may still read what they write.
 * And the copies to the host of the steps before must be complete before the given-up step reads
 * that memory and copies it again; no host stream waits for the given-up step. They are let go in
 * program order (engine/release.h).
 *
 * After a GPU has failed, what waits for it would wait for ever. The other GPUs are let go all at
 * once then, by the thread that found the failure. What they do is in no order. Where all updates
 * are on the host it is copied to gradients and activations alone. Else it may be copied to
 * weights, which are not read any more (train/state.c). */
#include "backends/cuda/device.h"
#include "engine/release.h"
#include <stdatomic.h>
#include <time.h>

static const uint64_t GIVEN_UP = INT64_MAX; /* at least any value, by the sign of the difference */
static const uint64_t LOOK_NS = 20000;
/* after a GPU has failed: how long the others may take to come to their end */
static const uint64_t PATIENCE_NS = 5000000000;

static void doze(void) { nanosleep(&(struct timespec){.tv_nsec = (long)LOOK_NS}, NULL); }

static bool failed(const ps__device *dev) { return atomic_load(&dev->error) != CUDA_SUCCESS; }

static uint32_t n_host_streams(const ps__device *dev) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    n += !dev->stream[i].stream;
  return n;
}

uint64_t ps__cuda_reached(const ps__cuda_stream *s) {
  const uint64_t word = atomic_load_explicit(s->word, memory_order_acquire);
  return word == GIVEN_UP ? atomic_load(&s->kept) : word;
}

static void give_up(ps__device *dev, bool devices_too) {
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++) {
    ps__cuda_stream *s = &dev->stream[i];
    if (s->stream && !devices_too)
      continue;
    /* a GPU that lives may write its word meanwhile: the store is repeated until all is over */
    atomic_store(&s->kept, ps__cuda_reached(s));
    atomic_store_explicit(s->word, GIVEN_UP, memory_order_release);
  }
}

void ps__cuda_let_others_go(ps__device *dev) {
  if (dev->n_gpus > 1 && atomic_load(&dev->n_left) >= n_host_streams(dev))
    give_up(dev, true);
}

/* ---- engine/release.h ------------------------------------------------------------------------ */

static bool on_host(void *user, uint32_t stream) {
  const ps__device *dev = user;
  return !dev->stream[stream].stream;
}

static uint64_t reached(void *user, uint32_t stream) {
  const ps__device *dev = user;
  return atomic_load_explicit(dev->stream[stream].word, memory_order_acquire);
}

static bool needed(void *user, uint64_t number) {
  ps__device *dev = user;
  for (; !failed(dev); doze()) {
    const bool submits = atomic_load(&dev->submits);
    if (atomic_load(&dev->n_begun) > number)
      return true;
    if (!submits)
      return false;
  }
  return false;
}

static bool await(void *user, uint32_t stream, uint64_t value) {
  ps__device *dev = user;
  const ps__cuda_stream *s = &dev->stream[stream];
  for (; !failed(dev); doze()) {
    const bool submits = atomic_load(&dev->submits);
    if (ps__cuda_reached(s) >= value)
      return true;
    if (!submits && atomic_load(&s->n_submitted) < value)
      return false;
  }
  return false;
}

static void let_go(void *user, uint32_t stream, uint64_t value) {
  ps__device *dev = user;
  atomic_store_explicit(dev->stream[stream].word, value, memory_order_release);
}

/* ---- leave ----------------------------------------------------------------------------------- */

static void leave_host(ps__device *dev) {
  const uint32_t n = n_host_streams(dev);
  if (atomic_fetch_add(&dev->n_left, 1) + 1 < n || n == dev->cfg.n_streams)
    return;
  ps__release_in_order(&(ps__release){.schedule = dev->schedule,
                                      .user = dev,
                                      .on_host = on_host,
                                      .reached = reached,
                                      .needed = needed,
                                      .await = await,
                                      .let_go = let_go});
  if (failed(dev))
    give_up(dev, false);
}

/* Until the stream is at rest. On several GPUs without blocking: another GPU may fail. */
static void settle(ps__device *dev, const ps__cuda_stream *s, uint64_t *patience_ns) {
  uint64_t since = 0;
  CUresult r;
  if (dev->n_gpus == 1) {
    r = dev->cu->StreamSynchronize(s->stream);
  } else {
    while ((r = dev->cu->StreamQuery(s->stream)) == CUDA_ERROR_NOT_READY) {
      const uint64_t now = ps__now_ns();
      since = failed(dev) && !since ? now : since;
      if (since && now - since > *patience_ns) {
        dev->stuck = true;
        *patience_ns = 0;
        return;
      }
      doze();
    }
  }
  if (r != CUDA_SUCCESS)
    ps__cuda_note_error(dev, s->gpu, r, "cuStreamSynchronize");
}

void ps__cuda_leave(ps__device *dev, uint32_t driver) {
  uint64_t patience_ns = PATIENCE_NS;
  if (!dev->stream[driver].stream) {
    leave_host(dev);
    return;
  }
  atomic_store(&dev->submits, false);
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    if (dev->stream[i].stream)
      settle(dev, &dev->stream[i], &patience_ns);
}
