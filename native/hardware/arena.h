/* arena.h - the rates of the host's memory that a training uses, measured in place: on its arena,
 * which is all zeros before the training fills it and stays so. */
#ifndef PS_HARDWARE_ARENA_H
#define PS_HARDWARE_ARENA_H
#include <penstock/hardware.h>

typedef struct ps__arena {
  const ps_hardware *hw; /* backend, device and n_threads of the host ops */
  char *host;            /* zeros; page-aligned; on CUDA it is pinned, where copies are measured */
  uint64_t host_bytes;
  /* CUDA: PS__ARENA_DEVICE_BYTES of the GPU's memory, which are set to zero; NULL: no copies are
   * measured. */
  void *device;
  uint32_t n_places; /* parts of the arena that each case takes in turn */
} ps__arena;
enum { PS__ARENA_DEVICE_BYTES = 256 << 20 };

/* What ps__arena_measure() tells, in the order of its rows. The first two run without copies. */
enum { PS__ARENA_CASES = 11 };
extern const uint32_t ps__arena_case[PS__ARENA_CASES]; /* PS_CONTENTION_*; copies alone too */

/* ps__arena_measure() - what sums, AdamW and copies get of this memory, alone and together: a row
 * of @out for each of ps__arena_case, *n of them. Rates of what a row does not run are 0.
 * @seconds  of each row; its second half counts, and on CUDA at least 8 copies of 128 MiB each way
 * Takes pools of threads, 12 KiB a thread, and no memory besides @a's. Errors: PS_ENOMEM;
 * PS_EBUDGET where the arena is less than ps__arena_least_bytes(); PS_EDEVICE. */
ps_status ps__arena_measure(const ps__arena *a, double seconds,
                            ps_contention_rate out[PS__ARENA_CASES], uint32_t *n);
/* BYTES of the least arena that is measured in so many places. */
uint64_t ps__arena_least_bytes(const ps__arena *a);

/* ps__arena_known() - the rate that @hw has for work of @kind, one PS_CONTENTION_*, in a row of
 * @kinds, BYTES per second; 0: unknown.
 * ps__arena_differs() - the rate of @seen that is furthest from what @hw has for the same work. A
 * rate that @hw does not know does not count.
 * ps__arena_adopt() - the rates of @hw with those of @seen in their place. Rates of the same ops
 * that were not measured are scaled alike. */
double ps__arena_known(const ps_hardware *hw, uint32_t kinds, uint32_t kind);
ps_rate_difference ps__arena_differs(const ps_hardware *hw, const ps_contention_rate *seen,
                                     uint32_t n);
void ps__arena_adopt(ps_hardware *hw, const ps_contention_rate *seen, uint32_t n);
#endif
