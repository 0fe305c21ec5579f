/* reduce.c - sums: gradients into totals, columns, squares; zero fill; and a copy. */
#include "kernels/cpu/total.h"
#if defined(__x86_64__)
#  include <immintrin.h>
#endif

/* ---- fill_zero, copy_bytes ------------------------------------------------------------------- */

static void fill_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  memset((char *)arg + first, 0, (size_t)(end - first));
}

/* fill_zero: dst[0..bytes) = 0. */
ps_status ps__cpu_fill_zero(const ps_launch *l) {
  const ps__args_fill *a = l->args;
  ps__cpu_rows(l->exec, (int64_t)a->bytes, 1 << 20, fill_task, l->ptr[0]);
  return PS_OK;
}

typedef struct copied {
  char *to;
  const char *from;
} copied;

static void copy_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const copied *c = arg;
  memcpy(c->to + first, c->from + first, (size_t)(end - first));
}

/* copy_bytes: dst[0..bytes) = src[0..bytes). */
ps_status ps__cpu_copy_bytes(const ps_launch *l) {
  const ps__args_fill *a = l->args;
  copied c = {l->ptr[1], l->ptr[0]};
  ps__cpu_rows(l->exec, (int64_t)a->bytes, 1 << 20, copy_task, &c);
  return PS_OK;
}

/* ---- accumulate ------------------------------------------------------------------------------ */

PS_CLONES static void reduce_add(const ps__total *t, size_t first, size_t end) {
  ps__total_range(t, first, end);
}
void ps__total_add(const ps__total *t, size_t first, size_t end) { reduce_add(t, first, end); }
static void add_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  reduce_add(arg, (size_t)first, (size_t)end);
}

static ps__cpu_exec with_threads(const ps__cpu_exec *exec, uint32_t n_threads) {
  ps__cpu_exec e = *exec;
  e.n_threads = n_threads;
  return e;
}

/* accumulate, accumulate_host
 * math    total[i] = round(total[i] + g[i]), the sum in fp32; dithered or with low bytes as
 *         ops.h says
 * bytes   3*n*sizeof(dt), and n for each of reading and writing low.   determinism  bitwise:
 *         elementwise */
ps_status ps__cpu_accumulate(const ps_launch *l) {
  const ps__args_accumulate *a = l->args;
  const ps__cpu_exec exec = with_threads(l->exec, a->n_threads);
  ps__total t = ps__total_of(a, l->ptr[0], l->ptr[1], l->n_ptr > 2 ? l->ptr[2] : NULL);
  ps__cpu_rows(&exec, (int64_t)a->n, 1 << 16, add_task, &t);
  return PS_OK;
}

/* ---- colsum ---------------------------------------------------------------------------------- */

typedef struct col_job {
  const ps__args_colsum *a;
  const char *dy;
  float *partial;
} col_job;

PS_VEC void col_rows(const col_job *j, int64_t first, int64_t end, float *sum, uint32_t dt) {
  size_t cols = j->a->cols;
  for (int64_t r = first; r < end; r++) {
    const char *row = ps__celem(j->dy, dt, (size_t)r * j->a->ld);
    for (size_t i = 0; i < cols; i += PS_LANES)
      ps__v_write(sum, PS_F32, i, cols,
                  ps__v_read(sum, PS_F32, i, cols, 0.0f) + ps__v_read(row, dt, i, cols, 0.0f));
  }
}
PS_CLONES static void reduce_cols(const col_job *j, int64_t first, int64_t end, float *sum) {
  PS__BY_DTYPE(j->a->dt, DT, col_rows(j, first, end, sum, DT));
}
static void col_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const col_job *j = arg;
  float *sum = j->partial + (size_t)(first / ps__row_tile_rows(j->a->rows)) * j->a->cols;
  memset(sum, 0, j->a->cols * sizeof *sum);
  reduce_cols(j, first, end, sum);
}

size_t ps__cpu_scratch_colsum(const void *args, const ps__scratch_target *target) {
  const ps__args_colsum *a = args;
  return ps__round_up((size_t)ps__n_row_tiles(a->rows) * a->cols * sizeof(float), 64);
}

/* colsum
 * math    db[c] (+)= sum_r dy[r,c]: rows added in order in tiles cut by shape (cpu.h), then the
 *         tiles in order, fp32
 * shapes  dy [rows, ld] of dt, the first cols of each row; db [cols] of dt
 * bytes   rows*cols*sizeof(dt); scratch: at most 64 tiles * cols fp32 */
ps_status ps__cpu_colsum(const ps_launch *l) {
  const ps__args_colsum *a = l->args;
  const ps__cpu_exec *exec = l->exec;
  col_job job = {a, l->ptr[0], ps__scratch(exec, 0)};
  ps__cpu_rows(exec, a->rows, ps__row_tile_rows(a->rows), col_task, &job);
  ps__add_partials(exec, l->ptr[1], a->dt, job.partial, ps__n_row_tiles(a->rows), a->cols,
                   a->accumulate);
  return PS_OK;
}

typedef struct partials_job {
  void *out;
  const float *partial;
  int64_t n_tiles;
  size_t cols;
  uint32_t dt;
  bool accumulate;
} partials_job;

PS_VEC void partials_cols(const partials_job *j, size_t first, size_t end, uint32_t dt) {
  for (size_t i = first; i < end; i += PS_LANES) {
    ps__v sum = {0};
    for (int64_t g = 0; g < j->n_tiles; g++)
      sum += ps__v_read(j->partial + (size_t)g * j->cols, PS_F32, i, end, 0.0f);
    if (j->accumulate)
      sum = ps__v_read(j->out, dt, i, end, 0.0f) + sum;
    ps__v_write(j->out, dt, i, end, sum);
  }
}
PS_CLONES static void partials_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const partials_job *j = arg;
  PS__BY_DTYPE(j->dt, DT, partials_cols(j, (size_t)first, (size_t)end, DT));
}

void ps__add_partials(const ps__cpu_exec *exec, void *out, uint32_t dt, const float *partial,
                      int64_t n_tiles, uint32_t cols, uint32_t accumulate) {
  partials_job job = {out, partial, n_tiles, cols, dt, accumulate != 0};
  ps__cpu_rows(exec, cols, 512, partials_task, &job);
}

/* ---- sumsq ----------------------------------------------------------------------------------- */

typedef struct sq_job {
  ps__total t; /* added, or rounded, first where @changes */
  bool changes;
  uint64_t n, tile;
  double sum[PS_SQ_TILES];
} sq_job;

/* lane[j] += the squares of elements j, j + 1024, ... of n_rows rows, in order. A register of
 * doubles takes N elements. Two bf16 stand in a word: each 2N elements give their even ones and
 * then their odd ones, so that nothing is shuffled. Rows are read from end to end, with a prefetch
 * of the memory @ahead bytes on; the lanes stay in the L1 cache. */
typedef struct sq_rows {
  void (*add)(const void *x, size_t n_rows, double *lane, size_t ahead);
  size_t n;
  bool pairs; /* even ones and then the odd ones */
} sq_rows;
enum { SQ_AHEAD = 4096 };
#define SQ_ROWS(NAME, TARGET, DT, N, WIDEN, ADD_SQUARE)                                            \
  TARGET static void NAME(const void *x, size_t n_rows, double *lane, size_t ahead) {              \
    typedef double vd __attribute__((vector_size(8 * N)));                                         \
    typedef float vf __attribute__((vector_size(4 * N)));                                          \
    typedef uint32_t vu __attribute__((vector_size(4 * N)));                                       \
    const char *at = x;                                                                            \
    for (size_t r = 0; r < n_rows; r++)                                                            \
      for (size_t j = 0; j < PS_SQ_LANES; j += 2 * N, at += 2 * N * ps__dt_bytes(DT)) {            \
        vf f0, f1;                                                                                 \
        vd acc0, acc1, d;                                                                          \
        __builtin_prefetch(at + ahead);                                                            \
        memcpy(&f0, at, sizeof f0), memcpy(&f1, at + (DT == PS_BF16 ? 0 : sizeof f0), sizeof f1);  \
        if (DT == PS_BF16)                                                                         \
          f0 = (vf)((vu)f0 << 16), f1 = (vf)((vu)f1 & 0xffff0000u);                                \
        memcpy(&acc0, lane + j, sizeof d), memcpy(&acc1, lane + j + N, sizeof d);                  \
        d = WIDEN(f0), acc0 = ADD_SQUARE(d, acc0);                                                 \
        d = WIDEN(f1), acc1 = ADD_SQUARE(d, acc1);                                                 \
        memcpy(lane + j, &acc0, sizeof d), memcpy(lane + j + N, &acc1, sizeof d);                  \
      }                                                                                            \
  }
/* gcc 12 widens by two instructions and a shuffle what one instruction does */
#define SQ_WIDEN(f)    __builtin_convertvector(f, vd)
#define SQ_ADD(d, acc) ((acc) + (d) * (d)) /* a product is exact, so that FMA changes nothing */
SQ_ROWS(sq_rows_bf16, , PS_BF16, 4, SQ_WIDEN, SQ_ADD)
SQ_ROWS(sq_rows_f32, , PS_F32, 4, SQ_WIDEN, SQ_ADD)
#if defined(__x86_64__) && !defined(PS_BASELINE)
#  define SQ_AVX2               __attribute__((target("avx2,fma")))
#  define SQ_AVX512             __attribute__((target("avx512f")))
#  define SQ_WIDEN_AVX2(f)      ((vd)_mm256_cvtps_pd((__m128)(f)))
#  define SQ_WIDEN_AVX512(f)    ((vd)_mm512_cvtps_pd((__m256)(f)))
#  define SQ_ADD_AVX2(d, acc)   ((vd)_mm256_fmadd_pd((__m256d)(d), (__m256d)(d), (__m256d)(acc)))
#  define SQ_ADD_AVX512(d, acc) ((vd)_mm512_fmadd_pd((__m512d)(d), (__m512d)(d), (__m512d)(acc)))
SQ_ROWS(sq_rows_bf16_avx2, SQ_AVX2, PS_BF16, 4, SQ_WIDEN_AVX2, SQ_ADD_AVX2)
SQ_ROWS(sq_rows_f32_avx2, SQ_AVX2, PS_F32, 4, SQ_WIDEN_AVX2, SQ_ADD_AVX2)
SQ_ROWS(sq_rows_bf16_avx512, SQ_AVX512, PS_BF16, 8, SQ_WIDEN_AVX512, SQ_ADD_AVX512)
SQ_ROWS(sq_rows_f32_avx512, SQ_AVX512, PS_F32, 8, SQ_WIDEN_AVX512, SQ_ADD_AVX512)
#endif
static sq_rows sq_rows_of(uint32_t dt) {
  static const sq_rows any[PS_N_DTYPES] = {
      [PS_F32] = {sq_rows_f32, 4, false}, [PS_BF16] = {sq_rows_bf16, 4, true}};
#if defined(__x86_64__) && !defined(PS_BASELINE)
  static const sq_rows avx2[PS_N_DTYPES] = {
      [PS_F32] = {sq_rows_f32_avx2, 4, false}, [PS_BF16] = {sq_rows_bf16_avx2, 4, true}};
  static const sq_rows avx512[PS_N_DTYPES] = {
      [PS_F32] = {sq_rows_f32_avx512, 8, false}, [PS_BF16] = {sq_rows_bf16_avx512, 8, true}};
  if (__builtin_cpu_supports("avx512f"))
    return avx512[dt];
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return avx2[dt];
#endif
  return any[dt];
}

/* The lanes of pairs in the elements' order again. */
PS_VEC void sq_order(double lane[PS_SQ_LANES], size_t n) {
  for (size_t j = 0; j < PS_SQ_LANES; j += 2 * n) {
    double was[16];
    memcpy(was, lane + j, 2 * n * sizeof *was);
    for (size_t i = 0; i < 2 * n; i++)
      lane[j + i] = was[i / 2 + i % 2 * n];
  }
}

/* Sum of squares of elements [first, end), one tile: lane[j] = those of elements j, j+1024, ...
 * in order, then the tree. */
PS_VEC double sq_tile(const sq_job *j, size_t first, size_t end, uint32_t dt) {
  double lane[PS_SQ_LANES] = {0};
  const size_t whole = (end - first) / PS_SQ_LANES;
  const sq_rows rows = sq_rows_of(dt);
  if (!j->changes)
    rows.add(ps__celem(j->t.total, dt, first), whole, lane, SQ_AHEAD);
  /* what was added is still in the first cache */
  for (size_t r = 0; j->changes && r < whole; r++) {
    const size_t base = first + r * PS_SQ_LANES;
    ps__total_range(&j->t, base, base + PS_SQ_LANES);
    /* copies would get less of the memory: see ps__total_range() */
    rows.add(ps__celem(j->t.total, dt, base), 1, lane, 0);
  }
  if (rows.pairs)
    sq_order(lane, rows.n);
  const size_t rest = first + whole * PS_SQ_LANES;
  if (j->changes)
    ps__total_range(&j->t, rest, end);
  for (size_t i = rest; i < end; i++) {
    const double d = (double)ps__load1_f32(j->t.total, dt, i);
    lane[i - rest] += d * d;
  }
  for (int w = PS_SQ_LANES / 2; w > 0; w /= 2)
    for (int i = 0; i < w; i++)
      lane[i] += lane[i + w];
  return lane[0];
}
PS_CLONES static double reduce_squares(const sq_job *j, size_t first, size_t end) {
  double sum = 0.0;
  PS__BY_DTYPE(j->t.dt, DT, sum = sq_tile(j, first, end, DT));
  return sum;
}
static void sq_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  sq_job *j = arg;
  for (int64_t k = first; k < end; k++) {
    const uint64_t from = (uint64_t)k * j->tile, left = j->n - from;
    j->sum[k] = reduce_squares(j, from, from + (left < j->tile ? left : j->tile));
  }
}

static ps_status sum_squares(const ps_launch *l, const ps__total *t, bool changes, uint64_t n,
                             uint32_t n_threads, double *out) {
  sq_job job = {.t = *t, .changes = changes, .n = n, .tile = ps__sumsq_tile(n)};
  const int64_t n_tiles = (int64_t)((n + job.tile - 1) / job.tile);
  const ps__cpu_exec exec = with_threads(l->exec, n_threads);
  ps__cpu_rows(&exec, n_tiles, 1, sq_task, &job);
  double sum = 0.0;
  for (int64_t k = 0; k < n_tiles; k++)
    sum += job.sum[k];
  memcpy(out, &sum, sizeof sum);
  return PS_OK;
}

/* sumsq, sumsq_host
 * math    sum of squares in fp64: tiles of ps__sumsq_tile(n) elements; in each 1024 lanes, lane j
 *         adds elements j, j+1024, ... in order, then j += j+512, 256, ... 1; then the tiles in
 *         order
 * shapes  g [n] of dt, out f64 [1]
 * bytes   n*sizeof(dt).   determinism  bitwise: tiles are cut by n only and each is one thread's;
 *         products of two fp32 are exact in fp64, so that FMA changes nothing */
ps_status ps__cpu_sumsq(const ps_launch *l) {
  const ps__args_sumsq *a = l->args;
  return sum_squares(l, &(ps__total){.total = l->ptr[0], .dt = a->dt}, false, a->n, a->n_threads,
                     l->ptr[1]);
}

/* accumulate_sumsq_host
 * math    accumulate, then sumsq of the total: the same bits as one after the other
 * shapes  g, total [n] of dt, out f64 [1], low u8 [n]
 * bytes   3*n*sizeof(dt), and n with low: what was added is squared while it is in the cache.
 *         determinism  bitwise: as the two */
ps_status ps__cpu_accumulate_sumsq_host(const ps_launch *l) {
  const ps__args_accumulate *a = l->args;
  const ps__total t = ps__total_of(a, l->ptr[0], l->ptr[1], l->n_ptr > 3 ? l->ptr[3] : NULL);
  return sum_squares(l, &t, true, a->n, a->n_threads, l->ptr[2]);
}

/* round_sumsq_host
 * math    total[i] = round(the number that total[i] and low[i] are), then sumsq of it
 * shapes  total bf16 [n], out f64 [1], low u8 [n].   bytes  5*n.   determinism  bitwise: as
 *         sumsq */
ps_status ps__cpu_round_sumsq_host(const ps_launch *l) {
  const ps__args_accumulate *a = l->args;
  const ps__total t = ps__total_of(a, NULL, l->ptr[0], l->ptr[2]);
  return sum_squares(l, &t, true, a->n, a->n_threads, l->ptr[1]);
}
