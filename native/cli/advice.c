/* advice.c - advice on a plan for several GPUs, as lines below what `penstock plan --gpus` prints.
 * Each line is arithmetic on the plan's shapes and names a loss; where nothing is lost there is no
 * line.
 *
 * Tiles. cuBLAS computes Y[M,N] in tiles of 128 x 256 or 256 x 128, one to an SM at a time (NVIDIA,
 * "Matrix Multiplication Background User's Guide", tile and wave quantization). The last tiles of a
 * row, and the last wave of tiles, are computed in full but used in part:
 *     idle = 1 - M N / (waves SMs 128 256), waves = ceil(ceil(M/128) ceil(N/256) / SMs)
 * Alignment. Tensor cores read rows of 128 bytes (the same guide): 64 elements of bf16. Megatron-LM
 * pads the vocabulary to a multiple of 128 for this (its --make-vocab-size-divisible-by).
 * Tensor parallelism. A block has two all-reduces of its output forward and two backward
 * (Megatron-LM, arXiv 1909.08053, section 3). Over N GPUs an all-reduce of B bytes sends
 * 2 B (N - 1) / N from each. */
#include "cli/cli.h"
#include <stdarg.h>
#include <string.h>

enum { TILE = 128, TILES = 2 * TILE, ALIGNED = 64 };
#define IDLE 0.1 /* a product gets a line from this part of unused time on */
/* Parameters of at most this part of the cap leave room for what else a GPU holds. */
#define FITS 0.5

static uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

__attribute__((format(printf, 2, 3))) static void add(cli_advice *a, const char *format, ...) {
  va_list args;
  if (a->n == sizeof a->line / sizeof *a->line)
    return;
  va_start(args, format);
  vsnprintf(a->line[a->n++], sizeof *a->line, format, args);
  va_end(args);
}

/* ---- products -------------------------------------------------------------------------------- */

static double idle_with(uint64_t m, uint64_t n, uint32_t n_sms, uint64_t rows, uint64_t cols) {
  const uint64_t tiles = ceil_div(m, rows) * ceil_div(n, cols), waves = ceil_div(tiles, n_sms);
  return 1 - (double)m * (double)n / ((double)(waves * n_sms) * (double)(rows * cols));
}

static double idle_of_tiles(uint64_t m, uint64_t n, uint32_t n_sms) {
  const double a = idle_with(m, n, n_sms, TILE, TILES), b = idle_with(m, n, n_sms, TILES, TILE);
  return a < b ? a : b;
}

typedef struct product {
  const char *name;
  uint64_t out, in, rows;
} product;

static void advise_tiles(cli_advice *a, const ps_model_config *m, const ps_hardware *hw,
                         const ps_plan_report *r) {
  const uint64_t chunk = r->chunk_tokens, heads = (uint64_t)m->n_heads * m->head_dim,
                 kv = (uint64_t)m->n_kv_heads * m->head_dim, f = m->ffn_dim, d = m->dim;
  const product p[] = {{"q, k, v", heads + 2 * kv, d, chunk},
                       {"attention's output", d, heads, chunk},
                       {"gate, up", 2 * f, d, chunk},
                       {"down", d, f, chunk},
                       {"head", m->vocab_size, d, r->head_slice_tokens}};
  for (size_t i = 0; hw->n_sms && i < sizeof p / sizeof *p; i++) {
    const struct {
      const char *name;
      uint64_t m, n;
    } of[] = {{"Y", p[i].rows, p[i].out}, {"dX", p[i].rows, p[i].in}, {"dW", p[i].out, p[i].in}};
    char text[200];
    size_t at = 0;
    for (size_t k = 0; k < sizeof of / sizeof *of; k++) {
      const double idle = idle_of_tiles(of[k].m, of[k].n, hw->n_sms);
      if (idle >= IDLE)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%s [%llu,%llu] %.0f%%",
                               at ? ", " : "", of[k].name, (unsigned long long)of[k].m,
                               (unsigned long long)of[k].n, 100 * idle);
    }
    if (at)
      add(a,
          "tiles of %s: the last wave of tiles is not full, so part of the time of %u SMs is "
          "unused: "
          "%s",
          p[i].name, hw->n_sms, text);
  }
}

static void advise_alignment(cli_advice *a, const ps_model_config *m) {
  const struct {
    const char *name;
    uint32_t n;
  } of[] = {{"vocab_size", m->vocab_size},
            {"hidden_size", m->dim},
            {"intermediate_size", m->ffn_dim},
            {"head_dim", m->head_dim}};
  for (size_t i = 0; i < sizeof of / sizeof *of; i++)
    if (of[i].n % ALIGNED) {
      const uint64_t padded = ceil_div(of[i].n, ALIGNED) * ALIGNED;
      add(a,
          "%s %u is no multiple of %d, so rows of its products are not aligned to 128 bytes: %llu "
          "would be, and is %.2f%% larger",
          of[i].name, of[i].n, ALIGNED, (unsigned long long)padded,
          100 * ((double)padded / of[i].n - 1));
    }
}

/* ---- layouts --------------------------------------------------------------------------------- */

/* Parameters of the blocks' products. */
static double block_parameters(const ps_model_config *m) {
  const double heads = (double)m->n_heads * m->head_dim, kv = (double)m->n_kv_heads * m->head_dim;
  return m->dim * (2 * heads + 2 * kv + 3.0 * m->ffn_dim);
}

/* The time in which N GPUs would send for a token of a block, over that of the block's products. */
static double tensor_parallel(const ps_model_config *m, const ps_hardware *hw, uint32_t n) {
  const double sent = 4 * 2 * 2.0 * m->dim * (n - 1) / n, flops = 6 * block_parameters(m) / n;
  return sent / hw->link[PS_LINK_PEER].bytes_per_s / (flops / hw->gemm_flops_per_s[PS_BF16]);
}

static void advise_layout(cli_advice *a, const ps_model_config *m, const ps_hardware *hw,
                          const ps_plan_config *cfg, const ps_plan_report *r, uint32_t n) {
  /* with --layout auto the plan took the faster one already */
  const bool ring = r->layout == PS_LAYOUT_RING, given = cfg->layout == PS_LAYOUT_DATA_PARALLEL;
  const bool few = r->n_rounds < n;
  const double bytes = 2 * block_parameters(m) * m->n_layers, cap = (double)cfg->device_mem_bytes;
  char all[32], dealt[32];
  if (n < 2)
    return;
  if (given && few && r->n_chunks >= n && m->n_layers >= n)
    add(a,
        "a step has %u round%s for %u GPUs: pipeline parallel, --layout ring, would keep all busy "
        "with its %u chunks",
        r->n_rounds, r->n_rounds == 1 ? "" : "s", n, r->n_chunks);
  else if (!ring && few)
    add(a,
        "a step has %u round%s for %u GPUs: raise --tokens-per-step, or lower --chunk-tokens or "
        "--chunks-per-round",
        r->n_rounds, r->n_rounds == 1 ? "" : "s", n);
  if (!ring && few && hw->link[PS_LINK_PEER].bytes_per_s > 0)
    add(a,
        "tensor parallel over %u GPUs, which Penstock does not have, would add %.0f%% of the "
        "products' time for sending",
        n, 100 * tensor_parallel(m, hw, n));
  if (given && cap > 0 && bytes > cap && bytes / n <= FITS * cap && m->n_layers >= n)
    add(a,
        "the blocks have %s of bf16 parameters, which is more than --device-mem; dealt to %u GPUs "
        "they are %s on each: --layout ring can keep them there",
        cli_bytes(all, (uint64_t)bytes), n, cli_bytes(dealt, (uint64_t)(bytes / n)));
  if (ring && m->n_layers % n)
    add(a,
        "%u blocks do not divide evenly among the %u GPUs of a ring: some GPUs have one block "
        "more, "
        "and the others wait for them",
        m->n_layers, n);
}

/* By words, in lines of at most 100 columns. */
static void print_line(const char *text) {
  enum { COLUMNS = 100, INDENT = 8 };
  int at = printf("advice:");
  while (*text) {
    const int n = (int)strcspn(text, " ");
    if (at + 1 + n > COLUMNS)
      at = printf("\n%*s", INDENT - 1, "") - 1;
    at += printf(" %.*s", n, text);
    text += n + (text[n] == ' ');
  }
  putchar('\n');
}

void cli_advice_print(const cli_advice *a) {
  for (uint32_t i = 0; i < a->n; i++)
    print_line(a->line[i]);
}

void cli_advise(cli_advice *a, const ps_model_config *m, const ps_hardware *hw,
                const ps_plan_config *cfg, const ps_plan_report *r, uint32_t n_gpus) {
  a->n = 0;
  advise_tiles(a, m, hw, r);
  advise_alignment(a, m);
  advise_layout(a, m, hw, cfg, r, n_gpus);
}
