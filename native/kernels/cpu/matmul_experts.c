/* matmul_experts.c - products of experts' rows. Which row of an expert a token's is, and how many
 * rows the expert has, follow from the other tokens. OpenBLAS's bits depend on both, because other
 * kernels compute the last rows. Here all rows are computed in fours by one function, the missing
 * ones of the last four being zeros, and every element is one chain of additions in the order of
 * K. */
#include "kernels/cpu/attention_job.h"
#include <string.h>

/* A tile of C, and the depth that is packed at once: W's part is to stay in a core's cache. */
enum { TILE_ROWS = 256, TILE_COLS = ATT_TILE, DEPTH = 256 };

/* A worker's scratch. */
typedef struct experts_scratch {
  float c[TILE_ROWS * TILE_COLS], w[DEPTH * TILE_COLS];
  float wide[TILE_COLS * DEPTH]; /* what of W is transposed next, in fp32 */
  float rows[ATT_ROWS * DEPTH];
} experts_scratch;

static uint32_t least(size_t a, size_t b) { return (uint32_t)(a < b ? a : b); }
static uint32_t n_panels(const ps__args_gemm *a) { return (a->n + TILE_COLS - 1) / TILE_COLS; }

size_t ps__cpu_experts_tile_bytes(void) { return sizeof(experts_scratch); }
int64_t ps__cpu_experts_tiles(const ps__args_gemm *a) {
  return (int64_t)((a->m + TILE_ROWS - 1) / TILE_ROWS) * n_panels(a);
}

/* n rows of cols elements of @dt, as fp32; zeros past both. */
static void widen(float *to, size_t ld_to, uint32_t n_to, const void *from, size_t ld, uint32_t dt,
                  uint32_t n, uint32_t cols) {
  for (uint32_t r = 0; r < n_to; r++) {
    const uint32_t has = r < n ? cols : 0;
    if (has)
      ps__load_f32(to + r * ld_to, ps__celem(from, dt, r * ld), dt, has);
    memset(to + r * ld_to + has, 0, (ld_to - has) * sizeof *to);
  }
}

/* w[k][j] = op(W)[k0 + k][j0 + j]. */
static void pack(experts_scratch *s, const ps__att_isa *isa, const ps__args_gemm *a, const void *w,
                 uint32_t j0, uint32_t k0, uint32_t depth) {
  const uint32_t cols = least(TILE_COLS, a->n - j0);
  if (!a->trans_b) {
    widen(s->w, TILE_COLS, depth, ps__celem(w, a->dt_b, (size_t)k0 * a->ldb + j0), a->ldb, a->dt_b,
          depth, cols);
    return;
  }
  const void *from = ps__celem(w, a->dt_b, (size_t)j0 * a->ldb + k0);
  const size_t deep = ps__round_up(depth, 4);
  if (a->dt_b == PS_F32 && cols == TILE_COLS && depth == deep) {
    isa->transpose(s->w, from, a->ldb, deep, 1.0f);
    return;
  }
  widen(s->wide, deep, TILE_COLS, from, a->ldb, a->dt_b, cols, depth);
  isa->transpose(s->w, s->wide, deep, deep, 1.0f);
}

void ps__cpu_experts_tile(const ps__cpu_exec *exec, const ps__args_gemm *a, const void *x,
                          const void *w, void *y, int64_t tile, uint32_t worker) {
  static const float ones[ATT_ROWS] = {1.0f, 1.0f, 1.0f, 1.0f};
  const ps__att_isa *isa = ps__att_of_this_cpu();
  experts_scratch *s = ps__scratch(exec, worker);
  const uint32_t i0 = (uint32_t)(tile / n_panels(a)) * TILE_ROWS,
                 j0 = (uint32_t)(tile % n_panels(a)) * TILE_COLS, m = least(TILE_ROWS, a->m - i0),
                 n = least(TILE_COLS, a->n - j0), vectors = (n + isa->lanes - 1) / isa->lanes;
  for (uint32_t k0 = 0, depth; k0 < a->k; k0 += depth) {
    depth = least(DEPTH, a->k - k0);
    pack(s, isa, a, w, j0, k0, depth);
    for (uint32_t r = 0; r < m; r += ATT_ROWS) {
      const void *from = ps__celem(x, a->dt_a, (size_t)(i0 + r) * a->lda + k0);
      const bool as_it_is = a->dt_a == PS_F32 && m - r >= ATT_ROWS;
      if (!as_it_is)
        widen(s->rows, DEPTH, ATT_ROWS, from, a->lda, a->dt_a, least(ATT_ROWS, m - r), depth);
      isa->mul((int)vectors, depth, as_it_is ? from : s->rows, as_it_is ? a->lda : DEPTH, s->w,
               TILE_COLS, s->c + r * TILE_COLS, TILE_COLS, k0 ? ones : NULL);
    }
  }
  for (uint32_t r = 0; r < m; r++)
    ps__store_f32(ps__elem(y, a->dt_c, (size_t)(i0 + r) * a->ldc + j0), a->dt_c,
                  s->c + r * TILE_COLS, n);
}
