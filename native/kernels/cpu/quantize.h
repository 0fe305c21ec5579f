/* quantize.h - what the CPU functions that quantize share (kernels/ops.h, "FP8"). A tensor is
 * computed twice, block of rows by block of rows: first for its amax, then to be written. */
#ifndef PS_KERNELS_CPU_QUANTIZE_H
#define PS_KERNELS_CPU_QUANTIZE_H
#include "kernels/cpu/cpu.h"
#include <stdatomic.h>

/* rows of a block: a run of the transpose is as long */
enum { PS__QUANTIZE_ROWS = 16 };

typedef struct ps__quantizer {
  uint32_t rows, cols, dt, dt_q; /* dt: of the values before */
  _Atomic uint32_t amax;         /* bits */
  float *scale;
  uint8_t *q, *qt;           /* NULL: that form is not wanted */
  _Atomic uint64_t *flushed; /* NULL: nobody counts */
} ps__quantizer;

/* ps__quantizer_of() - with the pointers from l->ptr[*next] on: scale, then the forms; *@next goes
 * past them. */
ps__quantizer ps__quantizer_of(const ps_launch *l, uint32_t *next, uint32_t rows, uint32_t cols,
                               uint32_t dt, uint32_t dt_q, uint32_t forms);
/* ps__flushed_of() - the counter of a tensor that an op quantizes, the op's last pointer being
 * l->ptr[@next]; NULL with @count 0. */
_Atomic uint64_t *ps__flushed_of(const ps_launch *l, uint32_t next, uint32_t count);
/* First pass: @n values count. Any thread. */
void ps__quantizer_see(ps__quantizer *z, const void *x, size_t n);
/* Between the passes: the scale, of amax times @headroom. */
void ps__quantizer_ready(ps__quantizer *z, float headroom);
/* Second pass: rows [@first, @first + @n) are written, n at most PS__QUANTIZE_ROWS. */
void ps__quantizer_put(const ps__quantizer *z, const void *x, int64_t first, int64_t n);

#endif
