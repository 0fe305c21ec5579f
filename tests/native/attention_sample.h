/* attention_sample.h - attention's operands at random, with the cpu's results and the bounds of an
 * error, for test_cuda_attention.c: its header says what the bounds are. */
#ifndef PS_TESTS_ATTENTION_SAMPLE_H
#define PS_TESTS_ATTENTION_SAMPLE_H
#include "check.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cuda/attention_cuda.h"
#include "kernels/cuda/scratch.h"
#include <cuda_runtime_api.h>

#define CU(call) CHECK((call) == cudaSuccess)
/* document_rows: a document is longer than any group here; documents are found on the device */
enum { GUARD = 4096, ONE = 1 << 30, FOUND = 0 };
static const float U = 0x1p-8f;

typedef struct sample {
  ps__args_attention a;
  /* of documents from group row 0, the last one repeated; NULL: as document_rows says, or one */
  const int *lengths;
  size_t nq, nkv, nlse, rows;
  uint16_t *q, *kv, *d_o, *o, *dq; /* o, lse, dq, dkv: the cpu's */
  int32_t *doc_start;
  float *lse, *dkv;
  float *bo, *bdq, *bdkv; /* bounds */
  void *dev[8];           /* q kv doc_start o lse d_o dq dkv */
} sample;

static ps__cpu_exec cpu;
static ps__cuda_exec gpu;
enum { N_LIBRARIES = 3 };
static const char *const libraries[N_LIBRARIES] = {"cudnn", "flash-attn-4", "flash-attn"};
static const char *library; /* the one under test */
static int failed;

/* Makes it the one under test, where it is built in and for this GPU. */
static inline bool use(const char *name) {
  int major = 0, minor = 0;
  CU(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CU(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  library = name;
  return (strcmp(name, "flash-attn-4") != 0 || 10 * major + minor == 90) &&
         ps__cuda_attention_only(name);
}

static inline void *host(size_t bytes) {
  void *p = calloc(bytes ? bytes : 1, 1);
  CHECK(p);
  return p;
}
static inline void *device(const void *from, size_t bytes) { /* from NULL: NaN */
  void *p = NULL;
  CU(cudaMalloc(&p, bytes));
  CU(from ? cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice) : cudaMemset(p, 0xff, bytes));
  return p;
}

/* About normal: the sum of 4 uniform numbers, scaled. */
static inline void random_bf16(uint16_t *x, size_t n, uint64_t seed) {
  for (size_t i = 0; i < n; i++) {
    const uint64_t r = rnd(&seed);
    const float s = (float)(r & 0xffff) + (float)(r >> 16 & 0xffff) + (float)(r >> 32 & 0xffff) +
                    (float)(r >> 48);
    x[i] = ps__f32_to_bf16((s / 65536.0f - 2.0f) * 1.7320508f);
  }
}

static inline void doc_starts(int32_t *out, const ps__args_attention *a, const int *lengths) {
  const uint32_t rows = a->document_rows ? a->document_rows : ONE;
  uint32_t at = 0, end = lengths ? (uint32_t)lengths[0] : rows;
  for (uint32_t row = 0, i = 0; row < a->row0 + a->n_tokens; row++) {
    if (row == end) {
      if (lengths && lengths[i + 1])
        i++;
      at = row;
      end += lengths ? (uint32_t)lengths[i] : rows;
    }
    if (row >= a->row0)
      out[row - a->row0] = (int32_t)at;
  }
}

static inline sample make(ps__args_attention a, const int *lengths, uint64_t seed) {
  sample s = {.a = a, .lengths = lengths, .rows = (size_t)a.row0 + a.n_tokens};
  s.a.dt = PS_BF16;
  s.nq = (size_t)a.n_tokens * a.n_heads * a.head_dim;
  s.nkv = s.rows * 2 * a.n_kv_heads * a.head_dim;
  s.nlse = (size_t)a.n_tokens * a.n_heads;
  s.q = host(2 * s.nq), s.kv = host(2 * s.nkv), s.d_o = host(2 * s.nq), s.o = host(2 * s.nq),
  s.dq = host(2 * s.nq);
  s.doc_start = host(4 * (size_t)a.n_tokens), s.lse = host(4 * s.nlse), s.dkv = host(4 * s.nkv);
  random_bf16(s.q, s.nq, seed);
  random_bf16(s.kv, s.nkv, seed + 1);
  random_bf16(s.d_o, s.nq, seed + 2);
  doc_starts(s.doc_start, &s.a, lengths);
  return s;
}

static inline void drop(sample *s) {
  void *all[] = {s->q,   s->kv,  s->d_o, s->o,   s->dq,  s->doc_start,
                 s->lse, s->dkv, s->bo,  s->bdq, s->bdkv};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    free(all[i]);
  for (int i = 0; i < 8; i++)
    cudaFree(s->dev[i]);
}

/* ---- the cpu's results and their bounds ------------------------------------------------------ */

static inline void on_cpu(const ps_kernel *k, const ps__args_attention *a, void **ptr, uint32_t n) {
  cpu.scratch_bytes = ps__round_up(ps__op_scratch(k, PS_BACKEND_CPU, a, NULL), 64);
  cpu.scratch = aligned_alloc(64, cpu.scratch_bytes * ps__pool_size(cpu.pool));
  CHECK(cpu.scratch && k->fn[PS_BACKEND_CPU](
                           &(ps_launch){.args = a, .ptr = ptr, .n_ptr = n, .exec = &cpu}) == PS_OK);
  free(cpu.scratch);
}

static inline void reference(sample *s) {
  ps__args_attention a = s->a;
  a.accumulate_dkv = 0;
  on_cpu(&ps__k_attention_fwd, &a, (void *[]){s->q, s->kv, s->doc_start, s->o, s->lse}, 5);
  on_cpu(&ps__k_attention_bwd, &a,
         (void *[]){s->q, s->kv, s->doc_start, s->o, s->lse, s->d_o, s->dq, s->dkv}, 8);
}

typedef struct job {
  sample *s;
  float *q, *kv, *d_o, *o;
} job;

static inline float dot(const float *x, const float *y, uint32_t d) {
  float s[8] = {0};
  for (uint32_t i = 0; i < d; i += 8)
    for (int e = 0; e < 8; e++)
      s[e] += x[i + e] * y[i + e];
  return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
}
static inline void add_abs(float *y, float by, const float *x, uint32_t d) {
  for (uint32_t i = 0; i < d; i++)
    y[i] += by * fabsf(x[i]);
}

/* Bounds of the heads of one kv head. */
static inline void bounds_of_head(void *arg, int64_t kh, uint32_t worker) {
  const job *j = arg;
  sample *s = j->s;
  const ps__args_attention *a = &s->a;
  const uint32_t d = a->head_dim, group = a->n_heads / a->n_kv_heads;
  const float scale = ps__attention_scale(a), cap = a->softcap;
  for (uint32_t row = 0; row < a->n_tokens; row++)
    for (uint32_t h = (uint32_t)kh * group; h < ((uint32_t)kh + 1) * group; h++) {
      const size_t at = ((size_t)row * a->n_heads + h) * d;
      const float delta = dot(j->d_o + at, j->o + at, d),
                  lse = s->lse[(size_t)row * a->n_heads + h];
      uint32_t key = (uint32_t)s->doc_start[row];
      if (a->window && a->row0 + row + 1 > key + a->window)
        key = a->row0 + row + 1 - a->window;
      for (; key <= a->row0 + row; key++) {
        const size_t k = ((size_t)key * 2 * a->n_kv_heads + (size_t)kh) * d,
                     v = k + (size_t)a->n_kv_heads * d;
        const float x = dot(j->q + at, j->kv + k, d) * scale, t = cap > 0 ? tanhf(x / cap) : 0;
        const float p = expf((cap > 0 ? cap * t : x) - lse);
        const float ds =
            p * scale * (1 - t * t) *
            (fabsf(dot(j->d_o + at, j->kv + v, d) - delta) + 0x1p-12f * sqrtf((float)d));
        add_abs(s->bo + at, p, j->kv + v, d);
        add_abs(s->bdq + at, ds, j->kv + k, d);
        add_abs(s->bdkv + k, ds, j->q + at, d);
        add_abs(s->bdkv + v, p, j->d_o + at, d);
      }
    }
}

static inline void bounds(sample *s) {
  job j = {s, host(4 * s->nq), host(4 * s->nkv), host(4 * s->nq), host(4 * s->nq)};
  ps__convert(j.q, PS_F32, s->q, PS_BF16, s->nq);
  ps__convert(j.kv, PS_F32, s->kv, PS_BF16, s->nkv);
  ps__convert(j.d_o, PS_F32, s->d_o, PS_BF16, s->nq);
  ps__convert(j.o, PS_F32, s->o, PS_BF16, s->nq);
  s->bo = host(4 * s->nq), s->bdq = host(4 * s->nq), s->bdkv = host(4 * s->nkv);
  ps__pool_run(cpu.pool, s->a.n_kv_heads, bounds_of_head, &j);
  free(j.q), free(j.kv), free(j.d_o), free(j.o);
}

/* Rows of a tensor, of @heads of @d elements, with their tolerance: by*|want| + over*bound +
 * least. */
typedef struct tensor {
  const char *name;
  bool bf16;
  size_t rows;
  uint32_t heads, d;
  const void *want;
  const float *bound;
  float over, by, least;
} tensor;

static inline double value(const tensor *t, const void *x, size_t i) {
  return t->bf16 ? ps__bf16_to_f32(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

/* The largest error over its tolerance; where that is above 1 it is said. */
static inline double worst(const tensor *t, const void *got) {
  const size_t width = (size_t)t->heads * t->d;
  double most = 0;
  size_t at = 0, n_wrong = 0;
  for (size_t i = 0; i < t->rows * width; i++) {
    const double w = value(t, t->want, i),
                 e = fabs(value(t, got, i) - w) /
                     (t->by * fabs(w) + t->over * (t->bound ? t->bound[i] : 0) + t->least);
    n_wrong += !(e <= 1);
    if (!(e <= most))
      most = isnan(e) ? INFINITY : e, at = i;
  }
  if (most > 1)
    printf("  %s of %s: %.2f times the tolerance at row %zu, head %zu of %u, element %zu: %g, the "
           "cpu has %g; %zu of %zu are wrong\n",
           t->name, library, most, at / width, at % width / t->d, t->heads, at % t->d,
           value(t, got, at), value(t, t->want, at), n_wrong, t->rows * width);
  return most;
}

static inline double worst_o(const sample *s, const void *got) {
  return worst(&(tensor){"o", true, s->a.n_tokens, s->a.n_heads, s->a.head_dim, s->o, s->bo,
                         1.25f * U, 2 * U, 1e-30f},
               got);
}
static inline double worst_lse(const sample *s, const void *got) {
  return worst(&(tensor){"lse", false, s->a.n_tokens, s->a.n_heads, 1, s->lse, NULL, 0, 0, 1e-4f},
               got);
}
static inline double worst_dq(const sample *s, const void *got) {
  return worst(&(tensor){"dq", true, s->a.n_tokens, s->a.n_heads, s->a.head_dim, s->dq, s->bdq,
                         1.25f * U, 2 * U, 1e-30f},
               got);
}
static inline double worst_dkv(const sample *s, const void *got) { /* heads of dk, then of dv */
  return worst(&(tensor){"dkv", false, s->rows, 2 * s->a.n_kv_heads, s->a.head_dim, s->dkv, s->bdkv,
                         3.25f * U, 0, 1e-30f},
               got);
}

#endif
