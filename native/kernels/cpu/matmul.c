/* matmul.c - matrix products by OpenBLAS, held to one thread, over tiles of C that the pool divides
 * among its threads. */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"
#include <cblas.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#ifdef PS_BLAS_WHEEL
#  define BLAS(name)   scipy_##name
#  define BLAS_LIBRARY "libscipy_openblas.so" /* beside our library */
#else
#  define BLAS(name)   name
#  define BLAS_LIBRARY "libopenblas.so.0"
#endif
#define NAME_OF_(name) #name
#define NAME_OF(name)  NAME_OF_(name)

/* ---- OpenBLAS -----------------------------------------------------------------------------------
 * OpenBLAS maps memory when it is loaded, and whenever a product finds all buffers in use. Where
 * the system refuses, OpenBLAS tries again for ever. So it is opened at first use and not linked: a
 * program without products never loads it. Before each mapping by OpenBLAS, as much memory is
 * mapped and unmapped here: a refusal is then an error like any other. */
enum {
  BLAS_BUFFER_BYTES = 33 << 20 /* what a thread in a product holds: 32 MiB and its rim */,
  BLAS_OPEN_BYTES = 96 << 20
};

static __typeof__(BLAS(cblas_sgemm)) *sgemm;
static void *(*buffer_alloc)(int);
static void (*buffer_free)(void *);
static pthread_mutex_t blas_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint32_t n_buffers; /* as many threads may multiply at once and each find one */
static uint32_t n_held;            /* threads of all devices that may multiply at once */

static ps_status try_memory(size_t bytes, const char *what) {
  void *p;
  if (ps__map(&p, bytes, what) != PS_OK)
    return ps__fail(PS_ENOMEM, "%s: raise the limit (ulimit -v, ulimit -d), or give fewer %s",
                    ps_last_error(), ps__field("n_threads"));
  ps__unmap(p, bytes);
  return PS_OK;
}

/* Runs on one CPU meanwhile: OpenBLAS starts a thread for every other CPU that it sees, and the
 * pool has all the threads that are needed. */
static void *open_on_one_cpu(void) {
  cpu_set_t all[8]; /* 8,192 CPUs */
  const int cpu = sched_getcpu();
  bool bound = false;
  if (cpu >= 0 && (size_t)cpu < 8 * sizeof all && sched_getaffinity(0, sizeof all, all) == 0) {
    cpu_set_t one[8];
    CPU_ZERO_S(sizeof one, one);
    CPU_SET_S((size_t)cpu, sizeof one, one);
    bound = sched_setaffinity(0, sizeof one, one) == 0;
  }
  void *library = dlopen(BLAS_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (bound)
    sched_setaffinity(0, sizeof all, all);
  return library;
}

static ps_status blas_open(void) {
  PS_TRY(try_memory(BLAS_OPEN_BYTES, "opening OpenBLAS"));
  void *library = open_on_one_cpu(); /* stays open for the life of the process */
  if (!library)
    return ps__fail(PS_EDEVICE, "OpenBLAS could not be opened: %s", dlerror());
  __typeof__(BLAS(openblas_set_num_threads)) *set_threads =
      dlsym(library, NAME_OF(BLAS(openblas_set_num_threads)));
  __typeof__(sgemm) product = dlsym(library, NAME_OF(BLAS(cblas_sgemm)));
  buffer_alloc = dlsym(library, "blas_memory_alloc");
  buffer_free = dlsym(library, "blas_memory_free");
  if (!set_threads || !product || !buffer_alloc || !buffer_free)
    return ps__fail(PS_EDEVICE, "%s is no OpenBLAS: %s", BLAS_LIBRARY, dlerror());
  set_threads(1);
  sgemm = product;
  return PS_OK;
}

void ps__cpu_sgemm(bool trans_a, bool trans_b, int m, int n, int k, float alpha, const float *a,
                   int lda, const float *b, int ldb, float beta, float *c, int ldc) {
  sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans, trans_b ? CblasTrans : CblasNoTrans, m,
        n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* Makes as many buffers at once as threads will multiply at once. A released buffer stays mapped
 * and serves the next product. */
static ps_status make_buffers(uint32_t n) {
  if (n_buffers >= n)
    return PS_OK;
  if (!sgemm)
    PS_TRY(blas_open());
  PS_TRY(try_memory((size_t)BLAS_BUFFER_BYTES * n, "OpenBLAS's buffers"));
  void **held = ps__calloc(n, sizeof *held);
  if (!held)
    return ps__fail(PS_ENOMEM, "out of memory for OpenBLAS's buffers");
  uint32_t got = 0;
  while (got < n && (held[got] = buffer_alloc(0)))
    got++;
  for (uint32_t i = 0; i < got; i++)
    buffer_free(held[i]);
  ps__free(held);
  if (got < n)
    return ps__fail(PS_ENOMEM, "OpenBLAS has buffers for %u threads, %u are wanted: give fewer %s",
                    got, n, ps__field("n_threads"));
  atomic_store(&n_buffers, n);
  return PS_OK;
}

ps_status ps__cpu_blas_ready(uint32_t n_threads) {
  if (atomic_load(&n_buffers) >= n_threads)
    return PS_OK;
  pthread_mutex_lock(&blas_lock);
  const ps_status st = make_buffers(n_threads);
  pthread_mutex_unlock(&blas_lock);
  return st;
}

ps_status ps__cpu_blas_hold(uint32_t n_threads) {
  pthread_mutex_lock(&blas_lock);
  const ps_status st = make_buffers(n_held + n_threads);
  if (st == PS_OK)
    n_held += n_threads;
  pthread_mutex_unlock(&blas_lock);
  return st;
}

void ps__cpu_blas_release(uint32_t n_threads) {
  pthread_mutex_lock(&blas_lock);
  n_held -= n_threads;
  pthread_mutex_unlock(&blas_lock);
}

/* ---- tiles ----------------------------------------------------------------------------------- */

/* How C is cut, by shape and dtypes only: parts_m x parts_n tiles of tile_m x tile_n, the last
 * ones smaller. */
typedef struct tiling {
  uint32_t tile_m, tile_n, parts_m, parts_n;
  /* K is taken in blocks of this where an operand is converted to fp32; else all at once */
  uint32_t block_k;
  size_t a_floats, b_floats, c_floats; /* scratch of a worker, in fp32 */
} tiling;

static uint32_t part_size(uint32_t n, uint32_t parts) {
  uint32_t size = (n + parts - 1) / parts;
  size = (uint32_t)ps__round_up(size, 32); /* whole micro-kernels inside */
  return size < n ? size : n;
}

/* Large products: tiles of at most 1024 a side, and up to 8 tiles while each has more than 2^30
 * FLOPs, where packing costs OpenBLAS under 5%. Small products: two tiles as soon as the work is
 * worth waking a thread. Where there are few tiles, their number is even. */
static tiling tile_product(const ps__args_gemm *a) {
  bool convert = a->dt_a != PS_F32 || a->dt_b != PS_F32 || a->dt_c != PS_F32;
  uint32_t side = convert ? 512 : 1024, pm = (a->m + side - 1) / side,
           pn = (a->n + side - 1) / side;
  double flops = 2.0 * a->m * a->n * a->k;
  for (;;) {
    uint32_t parts = pm * pn;
    if (parts >= 8 || flops / parts < (parts < 2 ? 0x1p22 : 0x1p31))
      break;
    if (a->m / pm >= a->n / pn)
      pm *= 2;
    else
      pn *= 2;
  }
  if ((pm * pn) % 2 && pm * pn > 1 && pm * pn < 16) { /* odd means both are odd */
    if (a->m / pm >= a->n / pn)
      pm++;
    else
      pn++;
  }
  tiling t = {.tile_m = part_size(a->m, pm), .tile_n = part_size(a->n, pn)};
  t.parts_m = (a->m + t.tile_m - 1) / t.tile_m;
  t.parts_n = (a->n + t.tile_n - 1) / t.tile_n;
  t.block_k = a->dt_a == PS_F32 && a->dt_b == PS_F32 ? a->k : a->k < 512 ? a->k : 512;
  if (a->dt_a != PS_F32)
    t.a_floats = ps__round_up((size_t)t.tile_m * t.block_k, 16);
  if (a->dt_b != PS_F32)
    t.b_floats = ps__round_up((size_t)t.tile_n * t.block_k, 16);
  if (a->dt_c != PS_F32)
    t.c_floats = ps__round_up((size_t)t.tile_m * t.tile_n, 16);
  return t;
}

size_t ps__cpu_scratch_gemm(const void *args, const ps__scratch_target *target) {
  const ps__args_gemm *a = args;
  if (!a->m || !a->n || !a->k)
    return 0; /* the launch refuses it */
  tiling t = tile_product(a);
  return (t.a_floats + t.b_floats + t.c_floats) * sizeof(float);
}

/* ---- one tile -------------------------------------------------------------------------------- */

typedef struct gemm_job {
  const ps__args_gemm *a;
  float alpha;
  const ps__cpu_exec *exec;
  tiling t;
  const void *pa, *pb, *bias, *residual;
  void *pc;
} gemm_job;

typedef struct operand {
  const float *p;
  int ld;
} operand;

/* rows x cols of an operand from element (row, col) on, as fp32: in place, or converted into
 * scratch. */
static operand fetch(const void *base, uint32_t dt, uint32_t ld, uint32_t row, uint32_t col,
                     uint32_t rows, uint32_t cols, float *scratch) {
  const void *p = ps__celem(base, dt, (size_t)row * ld + col);
  if (dt == PS_F32)
    return (operand){p, (int)ld};
  for (uint32_t r = 0; r < rows; r++)
    ps__load_f32(scratch + (size_t)r * cols, ps__celem(p, dt, (size_t)r * ld), dt, cols);
  return (operand){scratch, (int)cols};
}

/* c[i] = round(v[i] + bias[i] + residual[i]) for a row of n, added in this order. */
PS_VEC void finish_row(void *c, const float *v, const void *bias, const void *residual, size_t n,
                       uint32_t dt) {
  for (size_t i = 0; i < n; i += PS_LANES) {
    ps__v x = ps__v_read(v, PS_F32, i, n, 0.0f);
    if (bias)
      x += ps__v_read(bias, dt, i, n, 0.0f);
    if (residual)
      x += ps__v_read(residual, dt, i, n, 0.0f);
    ps__v_write(c, dt, i, n, x);
  }
}
PS_CLONES static void gemm_finish_row(void *c, const float *v, const void *bias,
                                      const void *residual, size_t n, uint32_t dt) {
  PS__BY_DTYPE(dt, DT, finish_row(c, v, bias, residual, n, DT));
}

static void gemm_tile(void *arg, int64_t task, uint32_t worker) {
  const gemm_job *j = arg;
  const ps__args_gemm *a = j->a;
  const tiling *t = &j->t;
  uint32_t i0 = (uint32_t)(task / t->parts_n) * t->tile_m,
           j0 = (uint32_t)(task % t->parts_n) * t->tile_n;
  uint32_t m = a->m - i0 < t->tile_m ? a->m - i0 : t->tile_m,
           n = a->n - j0 < t->tile_n ? a->n - j0 : t->tile_n;
  float *sa = t->a_floats + t->b_floats + t->c_floats ? ps__scratch(j->exec, worker) : NULL;
  float *sb = sa ? sa + t->a_floats : NULL;
  bool narrow = a->dt_c != PS_F32;
  void *c_out = ps__elem(j->pc, a->dt_c, (size_t)i0 * a->ldc + j0);
  float *c = narrow ? sb + t->b_floats : c_out;
  uint32_t ldc = narrow ? n : a->ldc;
  if (narrow && a->accumulate)
    for (uint32_t r = 0; r < m; r++)
      ps__load_f32(c + (size_t)r * n, ps__celem(c_out, a->dt_c, (size_t)r * a->ldc), a->dt_c, n);
  for (uint32_t k0 = 0; k0 < a->k; k0 += t->block_k) {
    uint32_t k = a->k - k0 < t->block_k ? a->k - k0 : t->block_k;
    operand x = a->trans_a ? fetch(j->pa, a->dt_a, a->lda, k0, i0, k, m, sa)
                           : fetch(j->pa, a->dt_a, a->lda, i0, k0, m, k, sa);
    operand y = a->trans_b ? fetch(j->pb, a->dt_b, a->ldb, j0, k0, n, k, sb)
                           : fetch(j->pb, a->dt_b, a->ldb, k0, j0, k, n, sb);
    ps__cpu_sgemm(a->trans_a, a->trans_b, (int)m, (int)n, (int)k, j->alpha, x.p, x.ld, y.p, y.ld,
                  k0 || a->accumulate ? 1.0f : 0.0f, c, (int)ldc);
  }
  if (!narrow && !j->bias && !j->residual)
    return;
  const void *bias = j->bias ? ps__celem(j->bias, a->dt_c, j0) : NULL;
  for (uint32_t r = 0; r < m; r++) {
    size_t at = (size_t)r * a->ldc;
    const void *residual =
        j->residual ? ps__celem(j->residual, a->dt_c, (size_t)i0 * a->ldc + j0 + at) : NULL;
    gemm_finish_row(ps__elem(c_out, a->dt_c, at), c + (size_t)r * ldc, bias, residual, n, a->dt_c);
  }
}

int64_t ps__cpu_gemm_tiles(const ps__args_gemm *a) {
  const tiling t = tile_product(a);
  return (int64_t)t.parts_m * t.parts_n;
}
void ps__cpu_gemm_tile(const ps__cpu_exec *exec, const ps__args_gemm *a, const void *x,
                       const void *y, void *c, int64_t tile, uint32_t worker) {
  const gemm_job job = {
      .a = a, .alpha = 1, .exec = exec, .t = tile_product(a), .pa = x, .pb = y, .pc = c};
  gemm_tile((void *)&job, tile, worker);
}

/* C = op(A) op(B) as gemm says, with this alpha.
 * @c  C, then the bias and the residual where there are such */
static ps_status multiply(const ps__cpu_exec *exec, const ps__args_gemm *a, float alpha,
                          const void *x, const void *y, void *const *c) {
  uint32_t cols_a = a->trans_a ? a->m : a->k, cols_b = a->trans_b ? a->k : a->n;
  if (!a->m || !a->n || !a->k || a->lda < cols_a || a->ldb < cols_b || a->ldc < a->n)
    return ps__fail(
        PS_EINVAL,
        "gemm %ux%ux%u with leading dimensions %u, %u, %u: sizes must be positive and rows fit",
        a->m, a->n, a->k, a->lda, a->ldb, a->ldc);
  PS_TRY(ps__cpu_blas_ready(ps__pool_size(exec->pool)));
  gemm_job job = {
      .a = a, .alpha = alpha, .exec = exec, .t = tile_product(a), .pa = x, .pb = y, .pc = *c++};
  if (a->has_bias)
    job.bias = *c++;
  if (a->has_residual)
    job.residual = *c++;
  int64_t n_tiles = (int64_t)job.t.parts_m * job.t.parts_n;
  if (n_tiles == 1)
    gemm_tile(&job, 0, 0);
  else
    ps__pool_run(job.exec->pool, n_tiles, gemm_tile, &job);
  return PS_OK;
}

/* gemm
 * math    C = round(((accumulate ? C : 0) + alpha op(A) op(B)) + bias + residual), fp32 inside,
 *         added in this order
 * shapes  op(A) [M,K] of dt_a, op(B) [K,N] of dt_b, C and residual [M,N] and bias [N] of dt_c, all
 *         row-major with leading dimensions in elements. C aliases nothing.
 * bytes   A*dt_a + B*dt_b + C*dt_c when tiles stay in cache
 * scratch only where bf16 is converted: at most (2*512*512 + 512*512) fp32 = 3 MiB a worker
 * determinism  bitwise: tiles and blocks of K follow from the shape, and each tile is one
 *              single-threaded OpenBLAS product. Other OpenBLAS builds or other CPUs may round
 *              differently: OpenBLAS picks its kernel when it is loaded. */
ps_status ps__cpu_gemm(const ps_launch *l) {
  const ps__args_gemm *a = l->args;
  return multiply(l->exec, a, ps__gemm_alpha(a), l->ptr[0], l->ptr[1], l->ptr + 2);
}

size_t ps__cpu_scratch_gemm_fp8(const void *args, const ps__scratch_target *target) {
  const ps__args_gemm g = ps__gemm_of_fp8(args);
  return ps__cpu_scratch_gemm(&g, target);
}

/* gemm_fp8
 * math    C = round(((accumulate ? C : 0) + alpha sA sB A B^T) + bias + residual): gemm of the
 *         operands as fp32, which is exact, as their products are
 * shapes  A [M,K] u8, B [N,K] u8, C and residual [M,N] and bias [N] of dt_c, no gaps, no aliasing
 * bytes   A + B + C*dt_c.   determinism  as gemm's
 * reference  tests/test_fp8.py: the same product in fp64 */
ps_status ps__cpu_gemm_fp8(const ps_launch *l) {
  const ps__args_gemm_fp8 *a = l->args;
  const ps__args_gemm g = ps__gemm_of_fp8(a);
  const float *scale_a = l->ptr[1], *scale_b = l->ptr[3];
  return multiply(l->exec, &g, (a->alpha == 0.0f ? 1.0f : a->alpha) * scale_a[0] * scale_b[0],
                  l->ptr[0], l->ptr[2], l->ptr + 4);
}
