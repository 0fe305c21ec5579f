/* moe_probe.cu - checks the products of experts against fp64 on the host, and times all CUDA
 * kernels of experts. The table of op cases has the other kernels' checks
 * (tests/native/test_cuda_ops.c).
 *
 * build: nvcc -std=c++17 -O3 -Iinclude -Inative -D_GNU_SOURCE with
 *        -gencode arch=compute_90a,code=sm_90a, of this file, of moe.cu, gemm_grouped.cu and
 *        gemm_grouped_90.cu of native/kernels/cuda, and of native/core/dtype.c
 * usage: moe_probe [check|time]...      nothing: both
 *
 * Each part runs in a process of its own, with a limit of time: a kernel that hangs or faults ends
 * its part alone. The shapes and the routing are those of bench/compare_grouped.py. */
#include "kernels/cuda/grouped.h"
#include "probe.cuh"
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sys/wait.h>
#include <vector>

static void well(ps_status st, int line) {
  if (st == PS_OK)
    return;
  printf("  FAILED: line %d\n", line);
  fflush(stdout);
  _exit(1);
}
#define WELL(call) well((call), __LINE__)

/* ---- what the kernels count on from the library ---------------------------------------------- */

extern "C" ps_status ps__check_moe(uint32_t, uint32_t, uint32_t, const char *) { return PS_OK; }
extern "C" ps_status ps__check_moe_route_bwd(const ps__args_moe_route_bwd *, const char *) {
  return PS_OK;
}
extern "C" ps_status ps__check_moe_rows(const ps__args_moe_rows *, const char *) { return PS_OK; }
extern "C" ps_status ps__check_moe_glu(const ps__args_moe_glu *, const char *) { return PS_OK; }
extern "C" ps_status ps__check_gemm_grouped(const ps__args_gemm_grouped *, const char *) {
  return PS_OK;
}

/* ---- memory and random numbers --------------------------------------------------------------- */

static ps__cuda_exec exec_;
static int bad_parts;

template <typename T> static T *gpu(size_t n) {
  void *p;
  MUST(cudaMalloc(&p, n * sizeof(T) + 256));
  MUST(cudaMemset(p, 0xee, n * sizeof(T) + 256));
  return (T *)p;
}
template <typename T> static T *gpu(const std::vector<T> &v) {
  T *p = gpu<T>(v.size());
  MUST(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
template <typename T> static std::vector<T> host(const T *p, size_t n) {
  std::vector<T> v(n);
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
  return v;
}
template <typename T> static T as(double x) { return (T)(float)x; }
template <> bf16 as<bf16>(double x) { return __float2bfloat16((float)x); }
static double value(float x) { return x; }
static double value(bf16 x) { return __bfloat162float(x); }
template <typename T> static std::vector<T> normals(size_t n, double scale) {
  std::vector<T> v(n);
  for (auto &x : v)
    x = as<T>(scale * normal());
  return v;
}

template <typename T>
__global__ void draw_k(T *p, size_t n, float scale, uint32_t salt, const float *bias,
                       uint32_t n_bias) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
       i += (size_t)gridDim.x * blockDim.x) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + salt * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 30, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 27, x *= 0x94d049bb133111ebull,
        x ^= x >> 31;
    const float u = ((uint32_t)x >> 8) * 0x1p-24f, v = (uint32_t)(x >> 40) * 0x1p-24f;
    p[i] = ps_from_f32<T>(scale * sqrtf(-2.0f * logf(1.0f - u)) * cospif(2.0f * v) +
                          (bias ? bias[i % n_bias] : 0.0f));
  }
}
static bf16 *drawn(size_t n, float scale, uint32_t salt) {
  bf16 *p = gpu<bf16>(n);
  draw_k<<<1024, 256>>>(p, n, scale, salt, NULL, 0);
  MUST(cudaDeviceSynchronize());
  return p;
}
/* A number that any bit changes. */
__global__ void hash_k(const uint32_t *p, size_t n, unsigned long long *out) {
  unsigned long long sum = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
       i += (size_t)gridDim.x * blockDim.x)
    sum += (p[i] + 1ull) * (2 * i + 1) * 0x9e3779b97f4a7c15ull;
  atomicAdd(out, sum);
}
static unsigned long long hash_of(const void *p, size_t bytes) {
  static unsigned long long *out = gpu<unsigned long long>(1);
  unsigned long long h;
  MUST(cudaMemset(out, 0, 8));
  hash_k<<<1024, 256>>>((const uint32_t *)p, bytes / 4, out);
  MUST(cudaMemcpy(&h, out, 8, cudaMemcpyDeviceToHost));
  return h;
}

template <typename A> static ps_launch launch_of(const A *args, std::vector<void *> &ptr) {
  ps_launch l = {};
  l.args = args;
  l.ptr = ptr.data();
  l.n_ptr = (uint32_t)ptr.size();
  l.exec = &exec_;
  return l;
}
template <typename A>
static void run(ps_status (*op)(const ps_launch *), const A &args, std::vector<void *> ptr) {
  const ps_launch l = launch_of(&args, ptr);
  WELL(op(&l));
}

/* Says how far @got is from @want; @tolerance of each element. */
static bool near(const char *what, const std::vector<double> &got, const std::vector<double> &want,
                 const std::vector<double> &tolerance, uint32_t cols) {
  size_t bad = 0, first = 0;
  double worst = 0;
  for (size_t i = 0; i < got.size(); i++) {
    const double d = std::fabs(got[i] - want[i]);
    if (!(d <= tolerance[i])) {
      if (!bad++)
        first = i;
    } else if (tolerance[i] > 0)
      worst = std::max(worst, d / tolerance[i]);
  }
  if (!bad) {
    printf("  ok   %-58s %.2f of its tolerance\n", what, worst);
    return true;
  }
  bad_parts++;
  printf("  BAD  %-58s %zu of %zu, first at row %zu, column %zu\n", what, bad, got.size(),
         first / cols, first % cols);
  for (int r = 0; r < 2; r++) {
    const size_t at = r ? first / cols * cols : first;
    printf("       got ");
    for (size_t i = at; i < at + 10 && i < got.size(); i++)
      printf(" %9.4g", got[i]);
    printf("\n       want");
    for (size_t i = at; i < at + 10 && i < got.size(); i++)
      printf(" %9.4g", want[i]);
    printf("\n");
  }
  /* which 64 x 64 parts of the first 256 x 512 are bad */
  for (size_t r = 0; r < 256 && r * cols < got.size(); r += 64) {
    printf("       bad by 64 columns, rows %3zu-:", r);
    for (size_t c = 0; c < 512 && c < cols; c += 64) {
      size_t n = 0;
      for (size_t i = r; i < r + 64 && i * cols < got.size(); i++)
        for (size_t j = c; j < c + 64 && j < cols; j++)
          n += !(std::fabs(got[i * cols + j] - want[i * cols + j]) <= tolerance[i * cols + j]);
      printf(" %5zu", n);
    }
    printf("\n");
  }
  return false;
}
static void says(const char *what, bool good) {
  printf("  %s %s\n", good ? "ok  " : "BAD ", what);
  bad_parts += !good;
}

/* ---- checks of products ---------------------------------------------------------------------- */

typedef ps_status (*product_fn)(const ps_grouped *g);
static ps_status by_90(const ps_grouped *g) {
  return ps_grouped_90(g, (uint32_t)exec_.n_sms, exec_.stream);
}
static ps_status by_80(const ps_grouped *g) { return ps_grouped_80(g, exec_.stream); }
static ps_status by_op_f32(const ps_grouped *g) {
  const ps__args_gemm_grouped a = {g->rows,      1,      g->n_out, g->n_in,
                                   g->n_experts, PS_F32, g->role,  g->accumulate};
  std::vector<void *> ptr = {(void *)g->a, (void *)g->b, (void *)g->offsets, g->c};
  const ps_launch l = launch_of(&a, ptr);
  return ps__cuda_gemm_grouped(&l);
}

struct product_case {
  std::vector<int> rows; /* of each expert */
  uint32_t n_out, n_in;
};

static const char *const roles[] = {"forward", "dgrad", "wgrad", "wgrad, added"};

/* role 3: WGRAD with accumulate. @poison: expert with NaN in its rows and weights, -1: none. */
template <typename T>
static void check_product(const char *name, product_fn fn, const product_case &c, uint32_t role,
                          int poison) {
  const uint32_t e_n = (uint32_t)c.rows.size(), n = c.n_out, k = c.n_in;
  const bool wgrad = role >= 2, added = role == 3, forward = role == 0;
  std::vector<int32_t> offsets(1, 0);
  for (int r : c.rows)
    offsets.push_back(offsets.back() + r);
  const uint32_t rows = (uint32_t)offsets.back(), cols_a = forward ? k : n,
                 cols_c = forward ? n : k;
  std::vector<T> a = normals<T>((size_t)rows * cols_a, 1.0),
                 b = normals<T>(wgrad ? (size_t)rows * k : (size_t)e_n * n * k, 1.0),
                 c0 = normals<T>(wgrad ? (size_t)e_n * n * k : (size_t)rows * cols_c, 10.0);
  if (poison >= 0) {
    for (size_t i = (size_t)offsets[poison] * cols_a; i < (size_t)offsets[poison + 1] * cols_a; i++)
      a[i] = as<T>(NAN);
    const size_t from = wgrad ? (size_t)offsets[poison] * k : (size_t)poison * n * k,
                 to = wgrad ? (size_t)offsets[poison + 1] * k : (size_t)(poison + 1) * n * k;
    for (size_t i = from; i < to; i++)
      b[i] = as<T>(NAN);
  }
  T *ga = gpu(a), *gb = gpu(b), *gc = gpu(c0);
  int32_t *go = gpu(offsets);
  const ps_grouped g = {ga, gb, gc, go, rows, n, k, e_n, wgrad ? 2 : role, added};
  WELL(fn(&g));
  const std::vector<T> out = host(gc, c0.size());
  const double ulp = sizeof(T) == 2 ? 0x1p-8 : 0x1p-22;
  std::vector<double> got, want, tolerance;
  for (uint32_t e = 0; e < e_n; e++) {
    if ((int)e == poison)
      continue;
    const uint32_t from = (uint32_t)offsets[e], to = (uint32_t)offsets[e + 1];
    const uint32_t m0 = wgrad ? 0 : from, m1 = wgrad ? n : to;
    for (uint32_t i = m0; i < m1; i++)
      for (uint32_t j = 0; j < cols_c; j++) {
        double sum = 0, size = 0;
        const uint32_t s0 = wgrad ? from : 0, s1 = wgrad ? to : forward ? k : n;
        for (uint32_t s = s0; s < s1; s++) {
          const double x = value(wgrad ? a[(size_t)s * n + i] : a[(size_t)i * cols_a + s]),
                       y = value(wgrad     ? b[(size_t)s * k + j]
                                 : forward ? b[((size_t)e * n + j) * k + s]
                                           : b[((size_t)e * n + s) * k + j]);
          sum += x * y, size += std::fabs(x * y);
        }
        const size_t at = (wgrad ? (size_t)e * n * k : 0) + (size_t)i * cols_c + j;
        if (added)
          sum += value(c0[at]);
        got.push_back(value(out[at]));
        want.push_back(sum);
        tolerance.push_back(std::fabs(sum) * ulp + size * (s1 - s0) * 0x1p-24 + 1e-30);
      }
  }
  char what[160];
  snprintf(what, sizeof what, "%s %s, %u x %u, %u experts, %u rows%s", name, roles[role], n, k, e_n,
           rows, poison >= 0 ? ", one of them NaN" : "");
  bool good = near(what, got, want, tolerance, cols_c);
  bool same = true;
  for (int i = 0; good && i < 100 && same; i++) {
    MUST(cudaMemcpy(gc, c0.data(), c0.size() * sizeof(T), cudaMemcpyHostToDevice));
    WELL(fn(&g));
    const std::vector<T> again = host(gc, c0.size());
    same = !memcmp(again.data(), out.data(), out.size() * sizeof(T));
  }
  if (!same)
    says("  ... 100 repeats have its bits", false);
  MUST(cudaFree(ga)), MUST(cudaFree(gb)), MUST(cudaFree(gc)), MUST(cudaFree(go));
}

static const product_case cases[] = {
    {{128}, 256, 64},                                       /* one tile, one slab */
    {{128}, 256, 256},                                      /* more slabs than the ring */
    {{128, 128}, 512, 128},                                 /* whole tiles of two experts */
    {{64, 0, 17, 1, 200, 0}, 264, 136},                     /* odd, empty experts, empty last */
    {{0, 0, 333, 0}, 96, 520},                              /* one expert has every row */
    {{3, 5, 2, 1, 9, 31, 33, 63, 65, 127, 129, 1}, 72, 40}, /* few rows each */
};

static void check_products(const char *name, product_fn fn, uint32_t role) {
  for (const product_case &c : cases)
    check_product<bf16>(name, fn, c, role, -1);
  check_product<bf16>(name, fn, {{70, 35, 150}, 128, 192}, role, 1);
}
/* Many tiles a block: the rows of a large product that are alone in their expert. */
static void check_large(const char *name, product_fn fn) {
  const uint32_t e_n = 16, n = 1536, k = 2048;
  std::vector<int32_t> offsets(1, 0);
  for (uint32_t e = 0; e < e_n; e++)
    offsets.push_back(offsets.back() + (e == 3 ? 0 : 300 + 37 * (int)e));
  const uint32_t rows = (uint32_t)offsets.back();
  bf16 *x = drawn((size_t)rows * k, 1.0f, 1), *w = drawn((size_t)e_n * n * k, 1.0f, 2),
       *dy = drawn((size_t)rows * n, 1.0f, 3), *out = gpu<bf16>((size_t)e_n * n * k);
  int32_t *go = gpu(offsets);
  const auto hx = host(x, (size_t)rows * k), hw = host(w, (size_t)e_n * n * k),
             hy = host(dy, (size_t)rows * n);
  for (uint32_t form = 0; form < 4; form++) {
    const uint32_t role = form < 3 ? form : 2;
    const ps_grouped g = {role ? dy : x, role == 2 ? x : w, out, go, rows, n, k, e_n,
                          role,          form == 3};
    const uint32_t cols = role ? k : n;
    const size_t size = role == 2 ? (size_t)e_n * n * k : (size_t)rows * cols;
    MUST(cudaMemcpy(out, w, size * 2, cudaMemcpyDeviceToDevice));
    WELL(fn(&g));
    const auto o = host(out, size);
    std::vector<double> got, want, tolerance;
    for (int i = 0; i < 20000; i++) {
      const size_t at = (size_t)(uniform() * (double)size);
      uint32_t e = 0;
      double sum = 0, abs = 0;
      if (role == 2) {
        e = (uint32_t)(at / ((size_t)n * k));
        for (int s = offsets[e]; s < offsets[e + 1]; s++) {
          const double t =
              value(hy[(size_t)s * n + at / k % n]) * value(hx[(size_t)s * k + at % k]);
          sum += t, abs += std::fabs(t);
        }
      } else {
        const size_t r = at / cols, c = at % cols;
        while (offsets[e + 1] <= (int)r)
          e++;
        for (uint32_t s = 0; s < (role ? n : k); s++) {
          const double t = role ? value(hy[r * n + s]) * value(hw[((size_t)e * n + s) * k + c])
                                : value(hx[r * k + s]) * value(hw[((size_t)e * n + c) * k + s]);
          sum += t, abs += std::fabs(t);
        }
      }
      sum += form == 3 ? value(hw[at]) : 0;
      got.push_back(value(o[at])), want.push_back(sum);
      tolerance.push_back(std::fabs(sum) * 0x1p-8 + abs * 4096 * 0x1p-24);
    }
    char what[100];
    snprintf(what, sizeof what, "%s %s, %u x %u, %u experts, %u rows, sampled", name, roles[form],
             n, k, e_n, rows);
    near(what, got, want, tolerance, 1000);
    const unsigned long long h = hash_of(out, size * 2);
    bool same = true;
    for (int i = 0; i < 100 && same; i++) {
      MUST(cudaMemcpy(out, w, size * 2, cudaMemcpyDeviceToDevice));
      WELL(fn(&g));
      same = hash_of(out, size * 2) == h;
    }
    says("  100 repeats have its bits", same);
  }
}

static void check_90_forward() { check_products("90", by_90, 0); }
static void check_90_dgrad() { check_products("90", by_90, 1); }
/* Experts beyond 256. */
static product_case many_experts() {
  product_case c = {{}, 24, 16};
  for (int e = 0; e < 300; e++)
    c.rows.push_back(e * 7 % 5 + (e == 290 ? 70 : 0));
  return c;
}
static void check_90_wgrad() {
  for (uint32_t role = 0; role < 4; role++)
    check_product<bf16>("90", by_90, many_experts(), role, -1);
  check_products("90", by_90, 2), check_products("90", by_90, 3);
}
static void check_90_large() { check_large("90", by_90); }
static void check_80() {
  for (uint32_t role = 0; role < 4; role++)
    check_products("80", by_80, role);
  check_large("80", by_80);
}
static void check_f32() {
  for (uint32_t role = 0; role < 4; role++)
    check_product<float>("fp32", by_op_f32, cases[3], role, -1);
}

/* ---- times ----------------------------------------------------------------------------------- */

/* Microseconds of a call: median of @n after two. */
static double time_of(const std::function<void()> &f, int n = 9) {
  std::vector<float> ms;
  cudaEvent_t from, to;
  MUST(cudaEventCreate(&from)), MUST(cudaEventCreate(&to));
  for (int i = -2; i < n; i++) {
    MUST(cudaEventRecord(from));
    f();
    MUST(cudaEventRecord(to));
    MUST(cudaEventSynchronize(to));
    float t;
    MUST(cudaEventElapsedTime(&t, from, to));
    if (i >= 0)
      ms.push_back(t);
  }
  std::sort(ms.begin(), ms.end());
  return 1e3 * ms[ms.size() / 2];
}

struct model {
  const char *name;
  uint32_t e, k, d, i;
};
static const model qwen = {"qwen3-30b", 128, 8, 2048, 768}, olmoe = {"olmoe", 64, 8, 2048, 1024},
                   oss = {"gpt-oss-20b", 32, 4, 2880, 2880},
                   seed20 = {"20b_1b", 128, 4, 3072, 1024};

struct setting {
  const model *m;
  uint32_t t;
  double skew;
  int32_t *offsets, *slot;
  uint16_t *ids;
  float *logits, *weights;
  int least, most;
  bf16 *x, *gu, *s, *z, *w1, *w2, *dw1, *dw2; /* [R,D], [R,2I], [R,I], [R,D] and weights */
};

/* Routing: logits N(0, 1), with skew plus skew N(0, 1) an expert. */
static setting set_up(const model *m, uint32_t t, double skew) {
  setting s = {m, t, skew};
  const size_t rows = (size_t)t * m->k;
  const size_t n_logits = (size_t)t * m->e;
  std::vector<float> bias(m->e);
  seed = 7;
  for (auto &b : bias)
    b = (float)(skew * normal());
  s.logits = gpu<float>(n_logits);
  float *biases = gpu(bias);
  draw_k<<<1024, 256>>>(s.logits, n_logits, 1.0f, 9, biases, m->e);
  MUST(cudaDeviceSynchronize());
  MUST(cudaFree(biases));
  s.weights = gpu<float>(rows);
  s.ids = gpu<uint16_t>(rows);
  s.offsets = gpu<int32_t>(m->e + 1), s.slot = gpu<int32_t>(rows);
  run(ps__cuda_moe_route, ps__args_moe_route{t, m->e, m->k, 1}, {s.logits, s.ids, s.weights});
  run(ps__cuda_moe_index, ps__args_moe_index{t, m->e, m->k}, {s.ids, s.offsets, s.slot});
  const auto o = host(s.offsets, m->e + 1);
  s.least = INT32_MAX;
  for (uint32_t e = 0; e < m->e; e++)
    s.least = std::min(s.least, o[e + 1] - o[e]), s.most = std::max(s.most, o[e + 1] - o[e]);
  const size_t n1 = (size_t)m->e * 2 * m->i * m->d, n2 = (size_t)m->e * m->d * m->i;
  s.x = drawn(rows * m->d, 1.0f, 1), s.gu = drawn(rows * 2 * m->i, 1.0f, 2);
  s.s = drawn(rows * m->i, 1.0f, 3), s.z = drawn(rows * m->d, 1.0f, 4);
  s.w1 = drawn(n1, 0.02f, 5), s.w2 = drawn(n2, 0.02f, 6);
  s.dw1 = drawn(n1, 0.02f, 7), s.dw2 = drawn(n2, 0.02f, 8);
  return s;
}
static void tear_down(const setting &s) {
  void *all[] = {s.offsets, s.slot, s.ids, s.logits, s.weights, s.x,  s.gu,
                 s.s,       s.z,    s.w1,  s.w2,     s.dw1,     s.dw2};
  for (void *p : all)
    MUST(cudaFree(p));
}
/* Product @i of: gate-up, down; gradients of s and x; of down's weights and gate-up's; the same
 * added. */
enum { N_PRODUCTS = 8 };
static const char *const product_names[N_PRODUCTS] = {"gate-up", "down",  "ds",     "dx",
                                                      "dW_dn",   "dW_gu", "+dW_dn", "+dW_gu"};
static ps_grouped product_of(const setting &s, int i) {
  const uint32_t rows = s.t * s.m->k, d = s.m->d, f = s.m->i, e = s.m->e;
  switch (i) {
  case 0: return {s.x, s.w1, s.gu, s.offsets, rows, 2 * f, d, e, PS_GEMM_FORWARD, 0};
  case 1: return {s.s, s.w2, s.z, s.offsets, rows, d, f, e, PS_GEMM_FORWARD, 0};
  case 2: return {s.z, s.w2, s.s, s.offsets, rows, d, f, e, PS_GEMM_DGRAD, 0};
  case 3: return {s.gu, s.w1, s.x, s.offsets, rows, 2 * f, d, e, PS_GEMM_DGRAD, 0};
  case 4:
  case 6: return {s.z, s.s, s.dw2, s.offsets, rows, d, f, e, PS_GEMM_WGRAD, i == 6};
  default: return {s.gu, s.x, s.dw1, s.offsets, rows, 2 * f, d, e, PS_GEMM_WGRAD, i == 7};
  }
}
static double flops_of(const ps_grouped &g) { return 2.0 * g.rows * g.n_out * g.n_in; }

static void time_products(const char *name, product_fn fn, const model *m, uint32_t t, double skew,
                          double seconds) {
  const setting s = set_up(m, t, skew);
  printf("%s %-11s %6u tokens, rows %5d to %5d:", name, m->name, t, s.least, s.most);
  double us[N_PRODUCTS];
  for (int i = 0; i < N_PRODUCTS; i++) {
    const ps_grouped g = product_of(s, i);
    us[i] = time_of([&] { WELL(fn(&g)); });
    printf(" %s %.0f", product_names[i], flops_of(g) / us[i] * 1e-6);
  }
  /* the mean of the roles: FLOPs of all over their time */
  double total = 0, time = 0;
  for (int i = 0; i < 6; i++)
    total += flops_of(product_of(s, i)), time += us[i];
  printf("; all six %.0f\n", total / time * 1e-6);
  fflush(stdout);
  if (seconds > 0) {
    const int n = (int)(seconds * 1e6 / time) + 1;
    cudaEvent_t at[3];
    for (auto &e : at)
      MUST(cudaEventCreate(&e));
    for (int half = 0; half < 2; half++) {
      MUST(cudaEventRecord(at[half]));
      for (int r = 0; r < (n + 1) / 2; r++)
        for (int i = 0; i < 6; i++) {
          const ps_grouped g = product_of(s, i);
          WELL(fn(&g));
        }
    }
    MUST(cudaEventRecord(at[2]));
    MUST(cudaEventSynchronize(at[2]));
    float first, second;
    MUST(cudaEventElapsedTime(&first, at[0], at[1]));
    MUST(cudaEventElapsedTime(&second, at[1], at[2]));
    printf("%s %-11s %6u tokens, all six in turn for %.1f s: %.0f TFLOP/s, second half %.0f\n",
           name, m->name, t, (first + second) * 1e-3,
           2 * total * ((n + 1) / 2) / (first + second) * 1e-9,
           total * ((n + 1) / 2) / second * 1e-9);
    fflush(stdout);
  }
  tear_down(s);
}

static void time_90() {
  time_products("90", by_90, &qwen, 8192, 0, 0);
  time_products("90", by_90, &qwen, 8192, 1.0, 0);
  time_products("90", by_90, &qwen, 16384, 0, 2);
  time_products("90", by_90, &qwen, 16384, 1.0, 0);
  time_products("90", by_90, &qwen, 32768, 0, 2);
  time_products("90", by_90, &qwen, 32768, 1.0, 0);
  time_products("90", by_90, &olmoe, 32768, 0, 2);
  time_products("90", by_90, &oss, 32768, 0, 0);
  time_products("90", by_90, &seed20, 8192, 0, 0);
}
static void time_80() {
  time_products("80", by_80, &qwen, 16384, 0, 0);
  time_products("80", by_80, &qwen, 32768, 0, 0);
  time_products("80", by_80, &olmoe, 32768, 0, 0);
}

static void bandwidth(const char *what, double bytes, const std::function<void()> &f) {
  const double us = time_of(f);
  printf("  %-14s %8.1f us, %6.0f GB/s of %.1f MB\n", what, us, bytes / us * 1e-3, bytes * 1e-6);
}
static void time_moe() {
  for (const model *m : {&qwen, &olmoe}) {
    const uint32_t t = 32768, e = m->e, k = m->k, d = m->d, f = m->i;
    setting s = set_up(m, t, 0);
    const double r = (double)t * k;
    bf16 *h = drawn((size_t)t * d, 1.0f, 9), *y = drawn((size_t)t * d, 1.0f, 10),
         *dl = drawn((size_t)t * e, 1.0f, 11);
    float *dw = gpu(normals<float>((size_t)t * k, 1));
    printf("%s, %u tokens\n", m->name, t);
    bandwidth("route", t * (4.0 * e + 6.0 * k), [&] {
      run(ps__cuda_moe_route, ps__args_moe_route{t, e, k, 1}, {s.logits, s.ids, s.weights});
    });
    bandwidth("index", 12 * r, [&] {
      run(ps__cuda_moe_index, ps__args_moe_index{t, e, k}, {s.ids, s.offsets, s.slot});
    });
    bandwidth("route_bwd", t * (6.0 * e + 10.0 * k), [&] {
      run(ps__cuda_moe_route_bwd,
          ps__args_moe_route_bwd{t, e, k, 1, PS_BF16, 0, 0.01f, 0.0f, 4 * t},
          {s.logits, s.ids, s.weights, dw, s.offsets, dl});
    });
    bandwidth("gather", 2.0 * d * (r + t), [&] {
      run(ps__cuda_moe_gather, ps__args_moe_rows{t, k, d, PS_BF16, 0, 0}, {h, s.slot, s.x});
    });
    bandwidth("combine", 2.0 * d * (r + 2 * t), [&] {
      run(ps__cuda_moe_combine, ps__args_moe_rows{t, k, d, PS_BF16, 0, 1}, {s.z, s.slot, y, h});
    });
    bandwidth("glu", 6.0 * r * f, [&] {
      run(ps__cuda_moe_glu, ps__args_moe_glu{t, k, f, PS_BF16, PS_ACTIVATION_SILU},
          {s.gu, s.weights, s.slot, s.s});
    });
    bandwidth("glu_bwd", 12.0 * r * f, [&] {
      run(ps__cuda_moe_glu_bwd, ps__args_moe_glu{t, k, f, PS_BF16, PS_ACTIVATION_SILU},
          {s.s, s.gu, s.weights, s.slot, dw});
    });
    bandwidth("device copy", 4.0 * r * d, [&] {
      MUST(cudaMemcpyAsync(s.z, s.x, 2 * (size_t)r * d, cudaMemcpyDeviceToDevice));
    });
    MUST(cudaFree(h)), MUST(cudaFree(y)), MUST(cudaFree(dl)), MUST(cudaFree(dw));
    tear_down(s);
  }
}

/* ---- parts ----------------------------------------------------------------------------------- */

static const struct {
  const char *kind, *name;
  void (*run)();
  unsigned seconds;
} parts[] = {
    {"check", "products of 90, forward", check_90_forward, 10},
    {"check", "products of 90, dgrad", check_90_dgrad, 10},
    {"check", "products of 90, wgrad", check_90_wgrad, 15},
    {"check", "products of 90, large", check_90_large, 15},
    {"check", "products of 80", check_80, 25},
    {"check", "products of fp32", check_f32, 10},
    {"time", "products of 90", time_90, 45},
    {"time", "the router, the index and rows", time_moe, 15},
    {"time", "products of 80", time_80, 15},
};

static void start() {
  cudaDeviceProp gpu_;
  MUST(cudaGetDeviceProperties(&gpu_, 0));
  exec_.n_sms = gpu_.multiProcessorCount;
  exec_.scratch_bytes = 16 << 20;
  exec_.scratch = gpu<uint8_t>(exec_.scratch_bytes);
  static bool told;
  if (!told)
    printf("  (%s)\n", gpu_.name);
  told = true;
}

int main(int argc, char **argv) {
  int failed = 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  for (const auto &part : parts) {
    bool wanted = argc < 2;
    for (int i = 1; i < argc; i++)
      wanted = wanted || !strcmp(argv[i], part.kind) || strstr(part.name, argv[i]);
    if (!wanted)
      continue;
    printf("%s: %s\n", part.kind, part.name);
    const pid_t child = fork();
    if (!child) {
      alarm(part.seconds);
      start();
      part.run();
      if (cudaDeviceSynchronize() != cudaSuccess)
        printf("  BAD  %s\n", cudaGetErrorString(cudaGetLastError())), bad_parts++;
      fflush(stdout);
      _exit(bad_parts != 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status))
      printf("  BAD  ended by signal %d (%d: longer than %u s)\n", WTERMSIG(status), SIGALRM,
             part.seconds);
    failed += status != 0;
  }
  printf("%d parts failed\n", failed);
  return failed != 0;
}
