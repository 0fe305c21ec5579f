/* test_cuda_optim.c - every optimizer on the device against ps__update_on_pool on the host, bit
 * for bit; its gate. Usage: test_cuda_optim [short | all [seed]], short for a sanitizer. Without a
 * GPU it says why and skips. */
#include "check.h"
#ifndef PS_CUDA
int main(void) {
  printf("ok skipped: built without CUDA\n");
  return 0;
}
#else
#  include "kernels/cuda/cuda_exec.h"
#  include "optim/optim.h"
#  include <cuda_runtime_api.h>
#  include <math.h>
#  include <time.h>

enum { W, M, V, GRAD, COPY, N_ARRAYS }; /* M, V: state[0], state[1] */
enum { ROOM = 64, MOST = 70000 };
typedef struct state {
  unsigned char a[N_ARRAYS][(MOST + 2 * ROOM) * 4];
} state;

static ps__cuda_exec exec;
static ps__pool *pool;
static uint64_t seed;
static state start, want, got;
static char *device[N_ARRAYS]; /* 256-byte aligned */
static struct {
  uint64_t step;
  float scale;
  uint32_t pad;
  double sumsq[16];
} gate, *device_gate;

static void need(cudaError_t e, const char *what) {
  if (e == cudaSuccess)
    return;
  printf("FAIL %s: %s\n", what, cudaGetErrorString(e));
  exit(1);
}

#  define ROW(NAME, ...) PS__ROW_##NAME,
static const uint32_t rows[] = {PS__EACH_ROW(ROW, )};
enum { N_ROWS = sizeof rows / sizeof *rows };

static ps__storage storage_of(uint32_t row, int array) {
  const ps__recipe *r = &ps__recipes[row];
  return array == COPY   ? r->weights
         : array == GRAD ? r->grad
         : array == W    ? r->updated
                         : r->state[array == V];
}
static size_t bytes_of(uint32_t row, int array) {
  return ps__dtypes[storage_of(row, array).dtype].bytes;
}
static bool in_blocks(uint32_t row) { return storage_of(row, M).block > 1; }

/* One value in @odd is a special one: zeros, denormals, the ends of the range, infinities, NaNs
 * of both kinds, halfway between bf16s. */
static const uint32_t special[] = {0,           0x80000000u, 1,           0x80000001u, 0x007fffffu,
                                   0x807fffffu, 0x00800000u, 0x7f7fffffu, 0xff7fffffu, 0x7f7f8000u,
                                   0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u, 0x7f810000u,
                                   0xff8f0000u, 0x7fc10000u, 0x7f800001u, 0x3f800000u, 0x3f808000u,
                                   0x3f818000u, 0x00010000u, 0x00000fffu, 0x5f000000u, 0x1f800000u};
static void fill(int array, size_t each, uint32_t odd, uint32_t lowest, uint32_t range) {
  for (size_t i = 0; i < MOST + 2 * ROOM; i++) {
    const uint64_t r = rnd(&seed);
    uint32_t u = ((uint32_t)r & 0x807fffffu) | ((lowest + (uint32_t)(r >> 32) % range) << 23);
    if (odd && rnd_below(&seed, odd) == 0)
      u = special[rnd_below(&seed, sizeof special / sizeof *special)];
    else if (array == V)
      u &= 0x7fffffffu;
    if (each == 2)
      u >>= 16;
    memcpy(start.a[array] + each * i, &u, each);
    /* bytes of a block, which has its scale at the end: as positive numbers are */
    if (each == 1 && array != W && i % PS__STATE_BLOCK == 0) {
      u &= 0x7fffffffu;
      memcpy(start.a[array] + i / PS__STATE_BLOCK * (PS__STATE_BLOCK + 4) + PS__STATE_BLOCK, &u, 4);
    }
  }
}
static void fill_all(uint32_t recipe, uint32_t odd, uint32_t lowest, uint32_t range) {
  for (int a = 0; a < N_ARRAYS; a++)
    fill(a, bytes_of(recipe, a), odd, lowest, range);
}

typedef struct update {
  const ps__segment *segments;
  uint32_t n_segments;
  uint64_t element0;
  uint32_t shift[N_ARRAYS]; /* where the unit begins, elements behind an aligned address */
  ps__update s;
} update;

static ps__arrays arrays_of(const update *u, char *const base[N_ARRAYS]) {
  char *p[N_ARRAYS];
  for (int a = 0; a < N_ARRAYS; a++)
    p[a] = base[a] + ps__stored_at(storage_of(u->s.recipe, a), u->shift[a]);
  return (ps__arrays){.w = p[W],
                      .copy = ps__has_master(u->s.recipe) ? p[COPY] : NULL,
                      .grad = p[GRAD],
                      .state = {p[M], p[V]}};
}
static void on_host(const update *u, state *x) {
  char *base[N_ARRAYS];
  for (int a = 0; a < N_ARRAYS; a++)
    base[a] = (char *)x->a[a];
  const ps__arrays a = arrays_of(u, base);
  ps__update_on_pool(pool, &u->s, u->segments, u->n_segments, &a, u->element0);
}
static ps_status on_device(const update *u, const ps__update_gate *g) {
  const ps__arrays a = arrays_of(u, device);
  return ps__update_unit[PS_BACKEND_CUDA](&exec, &u->s, u->segments, u->n_segments, &a, u->element0,
                                          g);
}
static void send(const state *x) {
  for (int a = 0; a < N_ARRAYS; a++)
    need(cudaMemcpy(device[a], x->a[a], sizeof x->a[a], cudaMemcpyHostToDevice), "state");
  need(cudaMemcpy(device_gate, &gate, sizeof gate, cudaMemcpyHostToDevice), "gate");
  need(cudaDeviceSynchronize(), "state"); /* the stream does not wait for the default one */
}
static void fetch(state *x) {
  need(cudaDeviceSynchronize(), "update");
  for (int a = 0; a < N_ARRAYS; a++)
    need(cudaMemcpy(x->a[a], device[a], sizeof x->a[a], cudaMemcpyDeviceToHost), "result");
}

static void same(const update *u, const char *what) {
  for (int a = 0; a < N_ARRAYS; a++) {
    const size_t each = bytes_of(u->s.recipe, a);
    for (size_t i = 0; i < (MOST + 2 * ROOM) * each; i++) {
      if (want.a[a][i] == got.a[a][i])
        continue;
      uint32_t w = 0, g = 0, before = 0;
      memcpy(&w, want.a[a] + i / each * each, each);
      memcpy(&g, got.a[a] + i / each * each, each);
      memcpy(&before, start.a[a] + i / each * each, each);
      printf(
          "FAIL %s: %s, recipe %d, step %d, array %d, element %zu of the unit: host %08x, device "
          "%08x, before all %08x\n",
          what, ps_optimizer_name(u->s.optimizer), (int)u->s.recipe, (int)u->s.step, a,
          i / each - u->shift[a], w, g, before);
      exit(1);
    }
  }
}

/* ---- the same bits --------------------------------------------------------------------------- */

/* 20 segments: more than a launch takes; with gaps, odd lengths and an empty one. */
static ps__segment many[20];
static void make_many(bool blocks) {
  uint64_t at = 0;
  for (uint32_t i = 0; i < 20; i++) {
    many[i] =
        (ps__segment){at, i == 7 ? 0 : 1 + rnd_below(&seed, 3400), i % 3 ? 0.1f * (float)i : 0.0f};
    at += many[i].n + rnd_below(&seed, 3);
    if (blocks)
      at = ps__span_round(at);
  }
  CHECK(at <= MOST - 64);
}

static void three_steps(update *u, uint32_t odd, uint32_t lowest, uint32_t range,
                        const char *what) {
  fill_all(u->s.recipe, odd, lowest, range);
  want = start;
  send(&start);
  const ps__update_gate g = {.step = &device_gate->step,
                             .expected = gate.step,
                             .scale = &device_gate->scale,
                             .sumsq = device_gate->sumsq,
                             .n_sumsq = 16};
  for (int i = 0; i < 3; i++) {
    u->s.step++;
    ps__update_correct(&u->s, u->s.step);
    u->s.grad_scale = gate.scale;
    on_host(u, &want);
    u->s.grad_scale = -5.0f; /* not looked at: the gate has one */
    CHECK(on_device(u, &g) == PS_OK);
    fetch(&got);
    same(u, what);
  }
}

static void same_bits(ps_optimizer optimizer, uint32_t recipe, uint64_t length, uint32_t i) {
  const bool blocks = in_blocks(recipe);
  update u = {.n_segments = 1, .element0 = rnd(&seed) >> 20};
  const ps__segment one = {blocks  ? i % 3 * PS__STATE_BLOCK
                           : i % 5 ? i % 5
                                   : 8,
                           blocks && length > MOST - 256 ? MOST - 256 : length, 0.1f};
  u.s = (ps__update){.optimizer = optimizer,
                     .recipe = recipe,
                     .lr = i % 7 ? 1e-3f : 1e30f,
                     .beta1 = i % 4 ? 0.9f : 0.0f,
                     .beta2 = 0.95f,
                     .eps = i % 3 ? 1e-8f : 1e-38f,
                     .momentum = i % 4 ? 0.9f : 0.0f,
                     .nesterov = i % 2,
                     .seed = rnd(&seed),
                     .step = rnd_below(&seed, 1000)};
  gate.scale = i % 2 ? 1.0f : (float)rnd_below(&seed, 1000) * 1e-3f;
  u.segments = &one;
  if (i % 5 == 0)
    u.element0 &= ~(uint64_t)7; /* aligned throughout, the vectors' case */
  else
    for (int a = 0; a < N_ARRAYS; a++)
      u.shift[a] = i % 5 == 1 || (blocks && (a == M || a == V)) ? 0 : rnd_below(&seed, 16);
  /* ordinary values; a third special ones; everything tiny (state and its squares denormal);
   * everything large */
  three_steps(&u, 0, 100, 40, "ordinary");
  three_steps(&u, 3, 100, 40, "special");
  three_steps(&u, 10, 0, 60, "tiny");
  three_steps(&u, 10, 180, 75, "large");
  make_many(blocks);
  u.segments = many, u.n_segments = 20;
  three_steps(&u, 4, 90, 70, "many segments");
}

static void test_same_bits(uint32_t stride) {
  static const uint64_t length[] = {1,    2,    7,    8,    9,     255,      1024,
                                    2047, 2048, 2049, 4096, 20001, MOST - 64};
  gate.step = 41;
  for (int optimizer = 0; optimizer < PS_N_OPTIMIZERS; optimizer++) {
    uint32_t cases = 0;
    for (int row = 0; row < N_ROWS; row++)
      for (uint32_t i = 0; i < 5 * sizeof length / sizeof *length; i += stride, cases += 5)
        same_bits((ps_optimizer)optimizer, rows[row], length[i / 5], i);
    printf("ok %s: the host's bits: %u cases of 3 steps, %d rows of recipes\n",
           ps_optimizer_name((ps_optimizer)optimizer), cases, N_ROWS);
  }
}

/* ---- the gate -------------------------------------------------------------------------------- */

static void test_gate(void) {
  const ps__segment one = {0, 5003, 0.1f};
  static const double bad[] = {INFINITY, NAN, -INFINITY};
  for (int i = 0; i < PS_N_OPTIMIZERS * N_ROWS; i++) {
    update u = {.segments = &one,
                .n_segments = 1,
                .s = {.optimizer = (ps_optimizer)(i / N_ROWS),
                      .recipe = rows[i % N_ROWS],
                      .lr = 1e-2f,
                      .beta1 = 0.9f,
                      .beta2 = 0.95f,
                      .eps = 1e-8f,
                      .momentum = 0.9f,
                      .c1 = 2,
                      .c2 = 3,
                      .grad_scale = 0.5f,
                      .seed = 3,
                      .step = 8}};
    ps__update_gate g = {.step = &device_gate->step, .expected = 9};
    /* 0-2: another step; 3: no sums; 4-14: sum c - 4 is not finite; 18: another step, and the gate
     * takes any */
    for (uint32_t c = 0; c < 20; c++) {
      const bool open = c == 3 || c >= 15;
      fill_all(u.s.recipe, 0, 110, 20);
      gate.step = c == 0 || c == 18 ? 8 : c == 1 ? 10 : c == 2 ? UINT64_MAX : 9;
      g.step = c == 18 ? NULL : &device_gate->step;
      g.sumsq = c > 3 ? device_gate->sumsq : NULL;
      g.n_sumsq = c > 3 ? 11 : 0;
      for (uint32_t k = 0; k < 16; k++)
        gate.sumsq[k] = c - 4 == k ? bad[c % 3] : 1e300;
      send(&start);
      want = start;
      if (open)
        on_host(&u, &want);
      CHECK(on_device(&u, &g) == PS_OK);
      fetch(&got);
      same(&u, "gate");
      CHECK(open == (memcmp(&got, &start, sizeof got) != 0));
    }
  }
  for (uint32_t k = 0; k < 16; k++)
    gate.sumsq[k] = 1.0;
  printf("ok an update of another step, or of gradients that are not finite, touches nothing\n");
}

static void test_refused(void) {
  const ps__segment one = {0, 8, 0.1f};
  update u = {.segments = &one, .n_segments = 1};
  ps__update_gate g = {.step = &device_gate->step};
  ps__arrays a = arrays_of(&u, device);
  const ps__update_unit_fn unit = ps__update_unit[PS_BACKEND_CUDA];
  u.s.recipe = PS_RECIPE_FP8;
  CHECK_FAILS(unit(&exec, &u.s, &one, 1, &a, 0, &g), PS_EINVAL, "recipe 4");
  u.s.recipe = PS_RECIPE_FP32;
  u.s.part = PS_UPDATE_WEIGHTS;
  CHECK_FAILS(unit(&exec, &u.s, &one, 1, &a, 0, &g), PS_EINVAL, "part 1");
  u.s.part = PS_UPDATE_WHOLE;
  a.w = device[W] + 2;
  CHECK_FAILS(unit(&exec, &u.s, &one, 1, &a, 0, &g), PS_EINVAL, "aligned");
  a.w = device[W];
  u.s.recipe = PS_RECIPE_FP32_MASTER;
  CHECK_FAILS(unit(&exec, &u.s, &one, 1, &a, 0, &g), PS_EINVAL, "missing");
  u.s.recipe = PS_RECIPE_FP32;
  g.sumsq = device_gate->sumsq;
  g.n_sumsq = 33;
  CHECK_FAILS(on_device(&u, &g), PS_EINVAL, "33 sums of squares");
  printf("ok what is wrong with the arguments is said\n");
}

int main(int argc, char **argv) {
  int n = 0;
  const cudaError_t e = cudaGetDeviceCount(&n);
  if (e != cudaSuccess || n == 0) {
    printf("ok skipped: no CUDA device: %s\n",
           e != cudaSuccess ? cudaGetErrorString(e) : "none found");
    return 0;
  }
  cudaStream_t stream;
  need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  exec.stream = stream;
  seed = argc > 2 ? strtoull(argv[2], NULL, 0) : (uint64_t)time(NULL);
  printf("seed %llu\n", (unsigned long long)seed);
  for (int a = 0; a < N_ARRAYS; a++)
    need(cudaMalloc((void **)&device[a], sizeof start.a[a]), "memory");
  need(cudaMalloc((void **)&device_gate, sizeof gate), "memory");
  for (uint32_t k = 0; k < 16; k++)
    gate.sumsq[k] = 1.0;
  CHECK(ps__pool_create(&pool, 2, "test") == PS_OK);
  /* 16 is prime to 5: all forms are met */
  test_same_bits(argc > 1 && strcmp(argv[1], "short") == 0 ? 16 : 1);
  test_gate();
  test_refused();
  ps__pool_destroy(pool);
  return 0;
}
#endif
