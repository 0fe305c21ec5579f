/* net.h - gradients between hosts by way of a GPU's memory, moved by NCCL. Internal.
 *
 * NCCL moves bytes only. What adds is a kernel of the project, so the sums are those of TCP, bit
 * for bit. A backend gives the memory, the copies and that kernel (ps__net_device); nothing here
 * needs CUDA. */
#ifndef PS_HOSTS_NET_H
#define PS_HOSTS_NET_H
#include "core/core.h"
#include "hosts/nccl.h"
#include <penstock/hosts.h>
#include <penstock/model.h>

/* ---- what a backend gives -------------------------------------------------------------------- */

/* A lane is a queue of the device. What is queued on one lane runs in order. NCCL has one. */
enum { PS__LANE_IN, PS__LANE_NET, PS__LANE_ADD, PS__LANE_OUT, PS__N_LANES };
/* The sums of segment k are exchanged together with the data of segment k + 2; segment k + 1 is
 * added meanwhile. */
enum { PS__NET_BEHIND = 2 };
/* Buffers of segments in device memory. At a time segment k + 1 comes in, the data of k are
 * exchanged, this rank's slice of k - 1 is added, the sums of k - 2 are exchanged, and k - 3 is
 * copied out. */
enum { PS__NET_BUFFERS = 5 };
/* The marks of each buffer: its copy in has ended, the others' data are there, this rank's slice is
 * added, all sums are there, its copy out has ended. */
enum {
  PS__MARK_IN = 0,
  PS__MARK_DATA = PS__NET_BUFFERS,
  PS__MARK_ADDED = 2 * PS__NET_BUFFERS,
  PS__MARK_SUMS = 3 * PS__NET_BUFFERS,
  PS__MARK_OUT = 4 * PS__NET_BUFFERS,
  PS__N_MARKS = 5 * PS__NET_BUFFERS
};

/* mine[i] = round(sum of the hosts' i-th elements in the order of ranks), in fp32 with one rounding
 * to nearest even. @received: of the other ranks in their order, @stride_bytes apart. */
typedef struct ps__net_add {
  void *mine;
  const void *received;
  uint64_t stride_bytes, n; /* n: elements */
  uint32_t rank, n_hosts;
  ps_dtype dt;
} ps__net_add;

/* Calls come from one thread at a time, between enter() and leave() on that thread. None but
 * open(), close(), reserve() and release() blocks. Errors: PS_EDEVICE, PS_ENOMEM.
 *   reserve()  device memory, 256-byte aligned, or pinned memory, that close() releases
 *   release()  pinned memory, which nothing uses any more, before that
 *   stream()   the lane's CUDA stream, for NCCL
 *   copy()     between the device and host memory
 *   mark()     a point on the lane; the last one of that number counts
 *   after()    the lane goes on once the mark is passed
 *   passed()   whether it is; idle(): whether nothing is queued on any lane
 *   memory()   BYTES that the device has lost to this process
 *   close()    @at_rest: nothing uses the lanes any more. Else they are kept, and the device must
 *              not be waited for. Called without enter() */
typedef struct ps__net_device_api {
  ps_status (*enter)(void *user);
  void (*leave)(void *user);
  ps_status (*reserve)(void *user, bool on_host, uint64_t bytes, void **out);
  void (*release)(void *user, void *pinned);
  void *(*stream)(void *user, uint32_t lane);
  ps_status (*copy)(void *user, uint32_t lane, void *dst, const void *src, uint64_t bytes);
  ps_status (*add)(void *user, uint32_t lane, const ps__net_add *what);
  ps_status (*mark)(void *user, uint32_t lane, uint32_t mark);
  ps_status (*after)(void *user, uint32_t lane, uint32_t mark);
  ps_status (*passed)(void *user, uint32_t mark, bool *out);
  ps_status (*idle)(void *user, bool *out);
  ps_status (*memory)(void *user, uint64_t *out_bytes);
  void (*close)(void *user, bool at_rest);
} ps__net_device_api;

/* segment_bytes: the same for all tasks; 0: PS__NET_SEGMENT_BYTES, which plans count. */
typedef struct ps__net_device {
  const ps__net_device_api *api;
  void *user;
  uint64_t segment_bytes;
} ps__net_device;

/* ---- memory ---------------------------------------------------------------------------------- */

/* A segment: a slice for each host. Each costs a wait for a product to end. Larger ones have fewer
 * waits, take more memory, and fill the lanes later: alone, exchanges of 64 MiB had 27 GB/s where
 * those of 32 MiB had 30 (bench/log/2026-11-25-two-gpus.md). */
enum { PS__NET_SEGMENT_BYTES = 64 << 20 };
static inline uint64_t ps__net_slice_bytes(uint32_t n_hosts, uint64_t segment_bytes) {
  return segment_bytes / n_hosts / 256 * 256;
}
/* Of a buffer: the segment, and what the other hosts send of this host's slice. */
static inline uint64_t ps__net_buffer_bytes(uint32_t n_hosts, uint64_t segment_bytes) {
  return (2 * n_hosts - 1) * ps__net_slice_bytes(n_hosts, segment_bytes);
}
/* What NCCL itself takes of a GPU: its kernels, and for each peer and channel buffers of 4 MiB (the
 * default of NCCL_BUFFSIZE) and more. Two tasks on two H100s with NVLink took 592 MiB with the 8
 * channels of net.c, and 1,022 MiB with as many as NCCL takes by itself.
 * ps_hosts_transport_text() says what it was. */
#define PS__NCCL_BYTES ((uint64_t)1 << 30)
/* BYTES of device memory in all, for plans. */
static inline uint64_t ps__net_device_bytes(uint32_t n_hosts) {
  return PS__NCCL_BYTES + PS__NET_BUFFERS * ps__net_buffer_bytes(n_hosts, PS__NET_SEGMENT_BYTES);
}

/* ---- the transport --------------------------------------------------------------------------- */

typedef struct ps__net ps__net;

/* ps__hosts_open_net() - all tasks: sums go over NCCL from now on, if that was chosen. @d is taken:
 * also on an error it is closed. Ends with sums that are checked, so that later ones find all
 * connections made and all kernels loaded. Before any run, as NCCL waits for the device meanwhile.
 * ps__hosts_close_net() - no sum runs. What NCCL does not give back within seconds it keeps.
 * ps__hosts_net() - the lanes while they are open, else NULL. Borrowed until they are closed. */
ps_status ps__hosts_open_net(ps_hosts *h, const ps__net_device *d);
void ps__hosts_close_net(ps_hosts *h);
const ps__net_device *ps__hosts_net(const ps_hosts *h);
/* ps__hosts_wants_net() - whether NCCL was chosen. */
bool ps__hosts_wants_net(const ps_hosts *h);
#endif
