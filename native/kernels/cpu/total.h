/* total.h - adding to a total in each of the modes of ops.h, for the kernels that add. */
#ifndef PS_KERNELS_TOTAL_H
#define PS_KERNELS_TOTAL_H
#include "kernels/cpu/cpu.h"
#include "core/vec.h"

/* total[i] += g[i]; mode: of ops.h. g NULL: nothing is added, a total with low bytes (mode
 * PS_LOW_READ) is rounded. */
typedef struct ps__total {
  const void *g;
  void *total;
  uint8_t *low;
  uint64_t first; /* of element 0 in its unit */
  uint32_t dt, mode, index;
} ps__total;

static inline ps__total ps__total_of(const ps__args_accumulate *a, const void *g, void *total,
                                     void *low) {
  return (ps__total){.g = g,
                     .total = total,
                     .low = low,
                     .first = a->first,
                     .dt = a->dt,
                     .mode = a->mode,
                     .index = a->index};
}

/* 32 elements of bf16 from i on, those at even places and those at odd ones: a word holds one of
 * each, so that nothing is shuffled. @mode and @add are constants. */
PS_VEC void ps__total_words(const ps__total *t, size_t i, uint32_t mode, bool add) {
  static const ps__vu place = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  uint16_t *total = (uint16_t *)t->total + i;
  ps__vu w, even, odd;
  ps__vh h;
  memcpy(&w, total, sizeof w);
  even = w << 16, odd = w & 0xffff0000u;
  if (mode & PS_LOW_READ) {
    memcpy(&h, t->low + i, sizeof h);
    const ps__vu low = __builtin_convertvector(h, ps__vu);
    even |= (low & 0xffu) << 8, odd |= low & 0xff00u;
  }
  if (add) {
    ps__vu x;
    memcpy(&x, (const uint16_t *)t->g + i, sizeof x);
    even = (ps__vu)((ps__v)even + (ps__v)(x << 16)),
    odd = (ps__vu)((ps__v)odd + (ps__v)(x & 0xffff0000u));
    if (mode) {
      const ps__vu at = (place + (uint32_t)(t->first + i)) * PS_DITHER_ELEMENT +
                        t->index * PS_DITHER_INDEX,
                   next = at + PS_DITHER_ELEMENT;
      const uint32_t shift = mode == PS_DITHER ? 0 : 8,
                     kept = mode == PS_DITHER ? 0xffff0000u : ~255u;
      even = (even + ((at & 0xffffu) >> shift)) & kept,
      odd = (odd + ((next & 0xffffu) >> shift)) & kept;
    }
  }
  if (mode & PS_LOW_WRITE) {
    const ps__vu low = (even >> 8 & 0xffu) | (odd & 0xff00u);
    h = __builtin_convertvector(low, ps__vh);
    memcpy(t->low + i, &h, sizeof h);
    w = even >> 16 | (odd & 0xffff0000u);
  } else if (mode == PS_DITHER)
    w = even >> 16 | odd;
  else {
    const ps__v f[2] = {(ps__v)even, (ps__v)odd};
    ps__v_bf16_of(&even, &f[0]);
    ps__v_bf16_of(&odd, &f[1]);
    w = even | odd << 16;
  }
  memcpy(total, &w, sizeof w);
}

PS_VEC void ps__total_one(const ps__total *t, size_t i, uint32_t mode, bool add) {
  uint16_t *total = (uint16_t *)t->total + i;
  uint32_t bits = (uint32_t)*total << 16 | (mode & PS_LOW_READ ? (uint32_t)t->low[i] << 8 : 0);
  float f;
  if (add) {
    memcpy(&f, &bits, sizeof f);
    f += ps__bf16_to_f32(((const uint16_t *)t->g)[i]);
    memcpy(&bits, &f, sizeof bits);
    /* no carry into the sign: NaN's low bits are 0 here, as bf16 has none */
    const uint32_t dither = ps__dither(t->first + i, t->index);
    if (mode)
      bits = mode == PS_DITHER ? (bits + dither) & 0xffff0000u : (bits + (dither >> 8)) & ~255u;
  }
  if (mode & PS_LOW_WRITE) {
    t->low[i] = (uint8_t)(bits >> 8);
    *total = (uint16_t)(bits >> 16);
  } else {
    memcpy(&f, &bits, sizeof f);
    *total = ps__f32_to_bf16(f);
  }
}

PS_VEC void ps__total_bf16(const ps__total *t, size_t first, size_t end, uint32_t mode, bool add) {
  size_t i = first;
  for (; i + 2 * PS_LANES <= end; i += 2 * PS_LANES)
    ps__total_words(t, i, mode, add);
  for (; i < end; i++)
    ps__total_one(t, i, mode, add);
}

PS_VEC void ps__total_plain(const ps__total *t, size_t first, size_t end, uint32_t dt) {
  for (size_t i = first; i < end; i += PS_LANES)
    ps__v_write(t->total, dt, i, end,
                ps__v_read(t->total, dt, i, end, 0.0f) + ps__v_read(t->g, dt, i, end, 0.0f));
}

/* Elements [first, end). There is no prefetch, though sums alone would be faster by a quarter with
 * one: copies to the device, which backward passes wait for, would then get 25 to 31 GB/s of the
 * host's memory beside the sums instead of 43 to 46 (bench/LOG.md, 2026-11-22). */
PS_VEC void ps__total_range(const ps__total *t, size_t first, size_t end) {
  if (!ps__dtypes[t->dt].low_bytes)
    PS__BY_DTYPE(t->dt, DT, ps__total_plain(t, first, end, DT));
  else if (!t->g)
    ps__total_bf16(t, first, end, PS_LOW_READ, false);
  else if (t->mode == 0)
    ps__total_bf16(t, first, end, 0, true);
  else if (t->mode == PS_DITHER)
    ps__total_bf16(t, first, end, PS_DITHER, true);
  else if (t->mode == PS_LOW_WRITE)
    ps__total_bf16(t, first, end, PS_LOW_WRITE, true);
  else if (t->mode == PS_LOW_READ)
    ps__total_bf16(t, first, end, PS_LOW_READ, true);
  else
    ps__total_bf16(t, first, end, PS_LOW_READ | PS_LOW_WRITE, true);
}

/* The same as a function of its own (reduce.c). */
void ps__total_add(const ps__total *t, size_t first, size_t end);
#endif
