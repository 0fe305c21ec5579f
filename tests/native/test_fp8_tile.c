/* test_fp8_tile.c - what the CUDA kernels that quantize do with numbers and places, run on the
 * host: the tile's way to its transpose (fp8_tile.h) against the CPU backend's `quantize`, its
 * accesses of shared memory, and, with CUDA's headers, the conversion that they call. */
#include "check.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cuda/fp8_tile.h"
#include <math.h>
#ifdef PS_CUDA
#  include <cuda_fp8.h>
#endif

enum { WORKERS = 2 };
static ps__cpu_exec g_cpu;

/* ---- a tensor by its tiles ------------------------------------------------------------------- */

/* As ps_put_k of quantize.cuh, thread after thread; @seen counts the stores to each byte of the
 * transpose. */
static void put_tile(const uint8_t *q, uint8_t *qt, uint8_t *seen, uint32_t rows, uint32_t cols,
                     uint32_t row0, uint32_t col0) {
  static uint32_t tile[PS__TILE_WORDS];
  memset(tile, 0xcd, sizeof tile);
  for (uint32_t t = 0; t < PS__TILE_THREADS; t++)
    for (uint32_t i = 0; i < PS__TILE_PARTS; i++) {
      const uint32_t row = ps__part_row(t, i), col = ps__part_col(t);
      uint32_t code[8];
      if (row0 + row >= rows || col0 + col >= cols)
        continue;
      for (uint32_t k = 0; k < PS__PART_ROWS; k++) {
        const uint8_t *at = q + (size_t)(row0 + row + k) * cols + col0 + col;
        memcpy(&code[k], at, 4);
        memcpy(&code[4 + k], at + 4, 4);
      }
      ps__part_keep(tile, row, col, code);
    }
  for (uint32_t t = 0; t < PS__TILE_THREADS; t++)
    for (uint32_t i = 0; i < PS__TILE_RUNS; i++) {
      const uint32_t row = ps__run_row(t), col = ps__run_col(t, i);
      if (row0 + row >= rows || col0 + col >= cols)
        continue;
      const uint32_t *v = tile + 4 * (size_t)ps__run_place(col, row),
                     turn = ps__run_turned(col) * 2;
      const size_t at = (size_t)(col0 + col) * rows + row0 + row;
      for (uint32_t k = 0; k < 4; k++)
        memcpy(qt + at + 4 * k, &v[k ^ turn], 4);
      for (uint32_t k = 0; k < PS__RUN_ROWS; k++)
        seen[at + k]++;
    }
}

static void check_transpose(uint32_t rows, uint32_t cols, uint64_t seed) {
  const size_t n = (size_t)rows * cols;
  float *x = malloc(n * sizeof *x), scale[2];
  uint8_t *q = malloc(n), *want = malloc(n), *qt = malloc(n), *seen = calloc(n, 1);
  CHECK(x && q && want && qt && seen);
  for (size_t i = 0; i < n; i++)
    x[i] = (float)(int32_t)rnd(&seed) * 0x1p-20f;
  const ps__args_quantize a = {.rows = rows,
                               .cols = cols,
                               .dt = PS_F32,
                               .dt_q = PS__E4M3,
                               .forms = PS_FORM_ROWS | PS_FORM_COLS};
  void *ptr[] = {x, scale, q, want};
  CHECK(ps__k_quantize.fn[PS_BACKEND_CPU](
            &(ps_launch){.args = &a, .ptr = ptr, .n_ptr = 4, .exec = &g_cpu}) == PS_OK);
  for (uint32_t r = 0; r < rows; r += PS__TILE)
    for (uint32_t c = 0; c < cols; c += PS__TILE)
      put_tile(q, qt, seen, rows, cols, r, c);
  for (size_t i = 0; i < n; i++)
    CHECK(seen[i] == 1);
  CHECK(memcmp(qt, want, n) == 0);
  free(x), free(q), free(want), free(qt), free(seen);
}

static void test_transpose(void) {
  static const uint32_t shape[][2] = {{16, 16},  {128, 128}, {16, 4096}, {4112, 16},
                                      {48, 272}, {144, 112}, {256, 384}, {400, 1040}};
  for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
    check_transpose(shape[i][0], shape[i][1], i);
  printf("ok tiles make the transpose of the CPU backend\n");
}

/* ---- shared memory: 32 banks of 4 bytes ------------------------------------------------------ */

/* A warp stores 32 words at a time; it loads 16 bytes a thread, eight threads at a time. */
static void test_banks(void) {
  for (uint32_t warp = 0; warp < PS__TILE_THREADS / 32; warp++) {
    for (uint32_t i = 0; i < PS__TILE_PARTS; i++)
      for (uint32_t k = 0; k < PS__PART_COLS; k++) {
        uint32_t banks = 0;
        for (uint32_t t = 32 * warp; t < 32 * warp + 32; t++)
          banks |= 1u << ps__tile_place(ps__part_col(t) + k, ps__part_row(t, i)) % 32;
        CHECK(banks == UINT32_MAX);
      }
    for (uint32_t i = 0; i < PS__TILE_RUNS; i++)
      for (uint32_t first = 32 * warp; first < 32 * warp + 32; first += 8) {
        uint32_t groups = 0;
        for (uint32_t t = first; t < first + 8; t++)
          groups |= 1u << ps__run_place(ps__run_col(t, i), ps__run_row(t)) % 8;
        CHECK(groups == 255);
      }
  }
  printf("ok no two threads of a warp meet in a bank\n");
}

/* ---- rounding -------------------------------------------------------------------------------- */

static void test_bytes(void) {
  CHECK(ps__bytes(0x33221100, 0x77665544, 0x7362) == 0x77336622);
  uint32_t w[4] = {0x03020100, 0x13121110, 0x23222120, 0x33323130};
  ps__bytes_transpose(w);
  for (uint32_t i = 0; i < 4; i++)
    CHECK(w[i] == (0x30201000 | 0x01010101 * i));
}

static void test_inverse(void) {
  for (uint32_t dt = PS__E4M3; dt <= PS__E5M2; dt++)
    for (uint32_t i = 0; i < 0x8000; i++) {
      const uint32_t scale = ps__fp8_scale_bits(i << 16, dt), inverse = ps__fp8_inverse_bits(scale);
      const float want = 1.0f / ps__bits_float(scale), got = ps__bits_float(inverse);
      CHECK(isnan(want) ? isnan(got) : got == want);
    }
}

#ifdef PS_CUDA
/* Every bf16 value times powers of two, and fp32 values about the codes. The host's code of
 * NVIDIA's header stands for the instruction, which the header calls on a GPU. */
static void check_conversion(float x, uint32_t dt, __nv_fp8_interpretation_t kind) {
  uint8_t want;
  ps__dtypes[dt].from_f32(&want, &x, 1);
  CHECK(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, kind) == want);
  CHECK(ps__fp8_encode(x, dt) == want);
  const float2 two = {x, 1.0f};
  CHECK((__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, kind) & 0xff) == want);
}
static void test_conversion(void) {
  for (uint32_t dt = PS__E4M3; dt <= PS__E5M2; dt++) {
    const __nv_fp8_interpretation_t kind = dt == PS__E4M3 ? __NV_E4M3 : __NV_E5M2;
    for (uint32_t i = 0; i < 65536; i++)
      for (int e = -24; e <= 24; e += 6)
        check_conversion(ldexpf(ps__bf16_to_f32((uint16_t)i), e), dt, kind);
    for (uint32_t i = 0; i < 256; i++) {
      const uint8_t code = (uint8_t)i, next = (uint8_t)(i + 1);
      float x, y;
      ps__dtypes[dt].to_f32(&x, &code, 1);
      ps__dtypes[dt].to_f32(&y, &next, 1);
      const float tie = (x + y) / 2, about[] = {x, tie, nextafterf(tie, x), nextafterf(tie, y)};
      for (int k = 0; k < 4; k++)
        check_conversion(about[k], dt, kind);
    }
  }
  printf("ok CUDA's conversion is the CPU backend's\n");
}
#endif

int main(void) {
  CHECK(ps__pool_create(&g_cpu.pool, WORKERS, "test") == PS_OK);
  test_bytes();
  test_transpose();
  test_banks();
  test_inverse();
#ifdef PS_CUDA
  test_conversion();
#endif
  ps__pool_destroy(g_cpu.pool);
  return 0;
}
