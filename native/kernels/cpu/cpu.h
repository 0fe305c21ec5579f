/* cpu.h - what the cpu kernels share: loops over rows, loads and stores by dtype, OpenBLAS.
 *
 * Determinism: how a kernel cuts its work depends on shapes only, never on the number of threads.
 * Every sum has a fixed order: lanes of vec.h, then a fixed tree. The library is built with
 * -ffp-contract=off, so that the variants of PS_CLONES differ in speed and not in bits. */
#ifndef PS_KERNELS_CPU_H
#define PS_KERNELS_CPU_H
#include "core/core.h"
#include "core/dtype.h"
#include "kernels/ops.h"

/* The CPU functions of the op table, and the scratch of those that take any
 * (ps__op_info.scratch). */
#define PS__DECLARE_CPU(op)                                                                        \
  ps_status ps__cpu_##op(const ps_launch *l);                                                      \
  size_t ps__cpu_scratch_##op(const void *args, const ps__scratch_target *target);
PS__OPS(PS__DECLARE_CPU)
#undef PS__DECLARE_CPU

static inline size_t ps__round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }
static inline size_t ps__dt_bytes(uint32_t dt) { return ps__dtypes[dt].bytes; }
/* Address of element i of an array of dtype dt. */
static inline void *ps__elem(void *base, uint32_t dt, size_t i) {
  return (char *)base + i * ps__dt_bytes(dt);
}
static inline const void *ps__celem(const void *base, uint32_t dt, size_t i) {
  return (const char *)base + i * ps__dt_bytes(dt);
}
/* Scratch of a worker. */
static inline void *ps__scratch(const ps__cpu_exec *exec, uint32_t worker) {
  return exec->scratch + (size_t)worker * exec->scratch_bytes;
}

/* dst[0..n) = src[0..n) as fp32; dst[0..n) = src[0..n) rounded to dt. No overlap. */
static inline void ps__load_f32(float *dst, const void *src, uint32_t dt, size_t n) {
  ps__dtypes[dt].to_f32(dst, src, n);
}
static inline void ps__store_f32(void *dst, uint32_t dt, const float *src, size_t n) {
  ps__dtypes[dt].from_f32(dst, src, n);
}

/* Calls fn for [first, end) ranges of @block rows covering [0, n), on the pool (in place when
 * there is one range only). */
/* a usual @block */
static inline int64_t ps__block_rows(size_t cols) {
  return cols >= 16384 ? 1 : (int64_t)(16384 / (cols ? cols : 1));
}
typedef void (*ps__rows_fn)(void *arg, int64_t first, int64_t end, uint32_t worker);
/* Errors: PS_EINVAL where @doc_start[n] decreases or lies past its row; the message names @op. */
ps_status ps__cpu_check_documents(const int32_t *doc_start, uint32_t n, uint32_t row0,
                                  const char *op);
/* Whether row @t is of the same sequence as the row before it, which it follows. */
static inline bool ps__cpu_row_continues(const int32_t *sequence, const int32_t *pos, int64_t t) {
  return t && pos[t] > 0 && pos[t - 1] == pos[t] - 1 && sequence[t - 1] == sequence[t];
}
/* Errors: PS_EINVAL where a sequence or a position is none, or a row does not follow the row of the
 * same sequence before it; the message names @op. */
ps_status ps__cpu_check_rows_of_sequences(const int32_t *sequence, const int32_t *pos, uint32_t n,
                                          const char *op);
void ps__cpu_rows(const ps__cpu_exec *exec, int64_t n, int64_t block, ps__rows_fn fn, void *arg);

/* Sums over rows in a fixed order. The rows are cut in ps__n_row_tiles() tiles of
 * ps__row_tile_rows() rows. The kernel leaves each tile's fp32 partial sum in partial[tile*cols +
 * c]. ps__add_partials() adds the partial sums in order of tiles: out[c] = round(sum) or, when
 * accumulate, round(out[c] + sum). */
static inline int64_t ps__row_tile_rows(uint32_t rows) {
  return rows <= 64 * 64 ? 64 : (int64_t)(rows + 63) / 64;
}
static inline int64_t ps__n_row_tiles(uint32_t rows) {
  int64_t g = ps__row_tile_rows(rows);
  return (rows + g - 1) / g;
}
void ps__add_partials(const ps__cpu_exec *exec, void *out, uint32_t dt, const float *partial,
                      int64_t n_tiles, uint32_t cols, uint32_t accumulate);

/* RoPE of a row (qkv.c). Cosines and sines of pos * inv_freq[i], times @by; @n is a multiple of 16.
 * Then @half pairs of @x are turned by them, backwards with @sign -1. */
void ps__rope_angles(float *cosines, float *sines, const float *inv_freq, int32_t pos, float by,
                     size_t n);
void ps__rope_rotate(float *x, const float *cosines, const float *sines, size_t half, float sign,
                     bool interleaved);

/* The dot product in fp32 of two rows of @n elements of @dt (sink.c). */
float ps__cpu_dot(const void *x, const void *y, size_t n, uint32_t dt);

/* One single-threaded product on the calling thread, C = op(A) op(B) + beta*C, row-major fp32.
 * OpenBLAS is held to one thread. */
void ps__cpu_sgemm(bool trans_a, bool trans_b, int m, int n, int k, float alpha, const float *a,
                   int lda, const float *b, int ldb, float beta, float *c, int ldc);
/* A product C = op(A) op(B) (+ C) in tiles, for an op of many products: how many tiles @a has, by
 * its shape alone, and the one of them. A tile takes at most ps__cpu_gemm_tile_bytes() of the
 * worker's scratch. ps__cpu_blas_ready() comes first. */
int64_t ps__cpu_gemm_tiles(const ps__args_gemm *a);
void ps__cpu_gemm_tile(const ps__cpu_exec *exec, const ps__args_gemm *a, const void *x,
                       const void *y, void *c, int64_t tile, uint32_t worker);
static inline size_t ps__cpu_gemm_tile_bytes(uint32_t dt) {
  return dt == PS_F32 ? 0 : 3 * 512 * 512 * sizeof(float);
}
/* The same for C = op(A) op(B) with op(A) = A, of one dtype, where a row of C depends on the row of
 * A and on B alone: not on where the row lies, nor on how many there are (matmul_experts.c). No
 * OpenBLAS. */
int64_t ps__cpu_experts_tiles(const ps__args_gemm *a);
void ps__cpu_experts_tile(const ps__cpu_exec *exec, const ps__args_gemm *a, const void *x,
                          const void *w, void *y, int64_t tile, uint32_t worker);
size_t ps__cpu_experts_tile_bytes(void);
/* A row of gemm_rows: y[0..n) = x[0..k) W^T, W[n,k], all of @dt. */
void ps__cpu_gemm_row(void *y, const void *x, const void *w, uint32_t n, uint32_t k, uint32_t dt);
/* Opens OpenBLAS, limits it to one thread, and makes the buffers that @n_threads threads in
 * products hold, so that no product asks the system for memory. A second call costs nothing.
 * ps__cpu_sgemm() may be called only after this function; the gemm kernel calls it itself. Errors:
 * PS_ENOMEM; PS_EDEVICE where there is no OpenBLAS. */
ps_status ps__cpu_blas_ready(uint32_t n_threads);
/* ps__cpu_blas_hold() - the same in addition to all buffers that others hold, until
 * ps__cpu_blas_release(): the devices of one process multiply at once. Any thread. */
ps_status ps__cpu_blas_hold(uint32_t n_threads);
void ps__cpu_blas_release(uint32_t n_threads);

#endif
