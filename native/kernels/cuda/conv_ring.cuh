/* conv_ring.cuh - the rows that a convolution's kernels read (conv.cu): AHEAD at a time, loaded
 * before they are needed, by a ring in shared memory where a thread's part of a row is 16 bytes. */
#ifndef PS_KERNELS_CUDA_CONV_RING_CUH
#define PS_KERNELS_CUDA_CONV_RING_CUH
#include "kernels/cuda/cuda_common.cuh"

namespace {

/* AHEAD: the rows of a group, which are computed one after the other. */
enum { THREADS = 256, AHEAD = 4 };

template <typename T> struct conv_job {
  const T *x, *w, *before, *dy;
  const int32_t *doc_start;
  const float *carry;
  T *y, *dx;
  float *partial;
  uint32_t rows, row0, channels, width, tile;
};

/* Begins to copy BYTES to shared memory, which the thread alone reads. */
template <int BYTES> __device__ __forceinline__ void copy_own(void *shared, const void *from) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
      "l"(from), "n"(BYTES)
      : "memory");
}

/* V channels from c on of the rows @begin .. @end-1; DY: with the gradients of their outputs.
 * math    Group g is AHEAD rows, from begin + g*AHEAD on. The g-th advance(), from 0, makes it
 *         `now` and asks for a later one. Where whole() is true each row of `now` sees W rows, and
 *         sums need no conditions. A row sees fewer where its document begins less than W-1 rows
 *         before.
 * layout  RING is 1 where a thread's part of a row is 16 bytes: 8 channels of bf16 or 4 of fp32;
 *         with DY 4 of bf16, first x's, then dy's. The ring is uint4 [GROUPS][AHEAD][THREADS] in
 *         shared memory, and group g is at place g % GROUPS. A thread reads what it copied itself,
 *         so there is no barrier. A copy goes to the place of the group before `now`, which the
 *         thread has read. Without RING `next` is in registers.
 * bytes   RING: 48 KiB of shared memory a block, the most that a kernel may declare. Two groups are
 *         on their way while one is computed, 32 KiB a block. Without RING one group is.
 *         HBM: each row once, PART bytes a thread, with DY twice as many. */
template <typename T, int V, int W, bool DY> struct conv_rows {
  enum { PART = (int)sizeof(T) * V, RING = PART * (DY ? 2 : 1) == 16, GROUPS = RING ? 3 : 2 };
  struct group {
    ps_vec<T, V> x[AHEAD], dy[DY ? AHEAD : 1];
    int32_t doc[AHEAD];
  } now, next;    /* RING: of next the doc alone */
  uint4 *ring;    /* the thread's part of the first row */
  int32_t at;     /* next's first row */
  uint32_t place; /* of next in the ring */

  __device__ __forceinline__ conv_rows(const conv_job<T> &j, int32_t begin, int32_t end, uint32_t c)
      : at(begin), place(0) {
    if constexpr (RING) {
      __shared__ uint4 shared[GROUPS * AHEAD * THREADS];
      ring = shared + threadIdx.x;
#pragma unroll
      for (int i = 0; i + 1 < GROUPS; i++)
        copy(j, begin + i * AHEAD, end, c, i);
    }
    load(j, end, c);
  }
  __device__ __forceinline__ void copy(const conv_job<T> &j, int32_t begin, int32_t end, uint32_t c,
                                       uint32_t to) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (begin + i < end) {
        const size_t at = (size_t)(begin + i) * j.channels + c;
        uint4 *const row = ring + (to * AHEAD + i) * THREADS;
        copy_own<PART>(row, j.x + at);
        if (DY)
          copy_own<PART>((char *)row + PART, j.dy + at);
      }
    ps_copy_commit();
  }
  __device__ __forceinline__ void load(const conv_job<T> &j, int32_t end, uint32_t c) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      if (at + i < end) {
        if constexpr (!RING) {
          const size_t from = (size_t)(at + i) * j.channels + c;
          next.x[i] = ps_load<T, V>(j.x + from);
          if (DY)
            next.dy[i] = ps_load<T, V>(j.dy + from);
        }
        next.doc[i] = __ldg(j.doc_start + at + i);
      }
  }
  /* The next rows become those of now. */
  __device__ __forceinline__ void advance(const conv_job<T> &j, int32_t end, uint32_t c) {
    now = next;
    if constexpr (RING) {
      copy(j, at + (GROUPS - 1) * AHEAD, end, c, place ? place - 1 : GROUPS - 1);
      ps_copy_wait<GROUPS - 1>();
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const T *const row = (const T *)(ring + (place * AHEAD + i) * THREADS);
        now.x[i] = ps_load<T, V>(row);
        if (DY)
          now.dy[i] = ps_load<T, V>(row + V);
      }
      place = place + 1 == GROUPS ? 0 : place + 1;
    }
    at += AHEAD;
    load(j, end, c);
  }
  /* Are all of now's rows before @end, and does each see W rows? */
  __device__ __forceinline__ bool whole(const conv_job<T> &j, int32_t end) const {
    bool all = (int)j.width == W && at <= end;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      all = all && at - AHEAD + i + (int32_t)j.row0 - (W - 1) >= now.doc[i];
    return all;
  }
};

} // namespace
#endif
