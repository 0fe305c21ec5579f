/* test_cuda_attention.c - attention_fwd and attention_bwd on the GPU against the cpu backend's,
 * on the same bf16 inputs.
 *
 * Tolerance, element by element. bf16 has 8 significant bits, so a rounding errs by at most u =
 * 2^-8, relative. The GPU rounds P and dS to bf16 before products whose sums are fp32, dK and dV
 * once for each query head and once for their sum, and every bf16 output once; the cpu rounds
 * its bf16 outputs once and nothing else. With the same formula over absolute values as B
 * (bounds(), below), the errors are at most
 *   o   u B + 2 u |o|        dq  u B + 2 u |dq|        dk, dv  3 u B
 * and a quarter of u B more for fp32 arithmetic and the approximate exp2. lse: fp32 only, 1e-4
 * absolute. A key wrongly seen or left out among n changes B by about 1/n, so mistakes at a
 * document's begin, where rows see few keys, are far outside. The backward pass of both starts
 * from the cpu's o and lse. All of it with each library that is built in.
 * test_cuda_attention LIBRARY: with that one alone (cudnn, flash-attn, flash-attn-4).
 * test_cuda_attention short: only our own kernels that use shared memory, for a sanitizer. */
#include "check.h"
#include "kernels/cpu/cpu.h"
#include <math.h>
#ifndef PS_CUDA
int main(void) {
  printf("ok skipped: built without CUDA\n");
  return 0;
}
#else
#  include "attention_sample.h"

/* ---- the GPU --------------------------------------------------------------------------------- */

/* Queues the op with exactly the scratch it asks for, full of NaN and guarded; waits; the guard
 * is whole. */
static ps_status on_gpu(const ps_kernel *k, const ps__args_attention *a, void **ptr, uint32_t n) {
  size_t need = 0;
  ps_status st = k->info->prepare(a, &gpu, &need);
  if (st != PS_OK)
    return st;
  const ps__scratch_target target = {.cudnn_version = PS_CUDNN_LINEAR_DETERMINISTIC};
  const size_t bound = ps__op_scratch(k, PS_BACKEND_CUDA, a, &target);
  if (!gpu.deterministic && need > bound) {
    printf("FAIL %s T=%u row0=%u: %zu bytes of scratch, planned for %zu\n", library, a->n_tokens,
           a->row0, need, bound);
    failed++;
  }
  gpu.scratch = device(NULL, need + GUARD);
  gpu.scratch_bytes = need;
  /* the stream does not wait for the default one, which filled all this */
  CU(cudaDeviceSynchronize());
  const ps_launch l = {.args = a, .ptr = ptr, .n_ptr = n, .exec = &gpu};
  st = k->fn[PS_BACKEND_CUDA](&l);
  CU(cudaStreamSynchronize(gpu.stream));
  unsigned char guard[GUARD];
  CU(cudaMemcpy(guard, (char *)gpu.scratch + need, GUARD, cudaMemcpyDeviceToHost));
  for (int i = 0; i < GUARD; i++)
    CHECK(guard[i] == 0xff);
  cudaFree(gpu.scratch);
  return st;
}

static void upload(sample *s) {
  s->dev[0] = device(s->q, 2 * s->nq), s->dev[1] = device(s->kv, 2 * s->nkv),
  s->dev[2] = device(s->doc_start, 4 * (size_t)s->a.n_tokens);
  s->dev[3] = device(NULL, 2 * s->nq), s->dev[4] = device(NULL, 4 * s->nlse),
  s->dev[5] = device(s->d_o, 2 * s->nq);
  s->dev[6] = device(NULL, 2 * s->nq), s->dev[7] = device(NULL, 4 * s->nkv);
}
static void *download(const void *p, size_t bytes) {
  void *h = host(bytes);
  CU(cudaMemcpy(h, p, bytes, cudaMemcpyDeviceToHost));
  return h;
}

static bool forward_agrees(sample *s) {
  if (on_gpu(&ps__k_attention_fwd, &s->a, s->dev, 5) != PS_OK) {
    printf("  %s\n", ps_last_error());
    return false;
  }
  uint16_t *o = download(s->dev[3], 2 * s->nq);
  float *lse = download(s->dev[4], 4 * s->nlse);
  const double eo = worst_o(s, o), el = worst_lse(s, lse);
  free(o), free(lse);
  return eo <= 1 && el <= 1;
}

/* From the cpu's o and lse; with accumulate on top of what dkv holds. */
static bool backward_agrees(sample *s) {
  CU(cudaMemcpy(s->dev[3], s->o, 2 * s->nq, cudaMemcpyHostToDevice));
  CU(cudaMemcpy(s->dev[4], s->lse, 4 * s->nlse, cudaMemcpyHostToDevice));
  if (on_gpu(&ps__k_attention_bwd, &s->a, s->dev, 8) != PS_OK) {
    printf("  %s\n", ps_last_error());
    return false;
  }
  uint16_t *dq = download(s->dev[6], 2 * s->nq);
  float *dkv = download(s->dev[7], 4 * s->nkv);
  const double eq = worst_dq(s, dq), ek = worst_dkv(s, dkv);
  free(dq), free(dkv);
  return eq <= 1 && ek <= 1;
}

/* Why the library takes no such shape; NULL: it does, or the plain kernels take the few
 * rows or the wide heads. */
static const char *refused(const ps__args_attention *a) {
  const uint32_t n = ps__attention_documents(a), group = a->n_heads / a->n_kv_heads;
  if (!strcmp(library, "cudnn") || a->n_tokens <= 16 || a->head_dim > 256)
    return NULL;
  if (a->softcap > 0 ||
      (a->window && a->window < (n > 1 ? a->document_rows : a->row0 + a->n_tokens)))
    return "left to cuDNN";
  if (!strcmp(library, "flash-attn"))
    return a->head_dim != 64 && a->head_dim != 128 ? "head_dim is not 64 or 128" : NULL;
  if ((a->head_dim != 64 && a->head_dim != 128 && a->head_dim != 256) || (group > 8 && group != 16))
    return "not built for that head_dim, or for that many query heads a kv head";
  if (!n)
    return "documents must be of known, equal length";
  return n > 1 && a->document_rows < 128 ? "documents are shorter than 128 rows" : NULL;
}

static bool is_refused(const ps__args_attention *a) {
  size_t bytes;
  if (!refused(a))
    return false;
  CHECK_FAILS(ps__cuda_prepare_attention_fwd(a, &gpu, &bytes), PS_EDEVICE, refused(a));
  return true;
}

static const char *label(const ps__args_attention *a) {
  static char text[64];
  const uint32_t n = ps__attention_documents(a);
  const char *how = gpu.deterministic ? ", deterministic" : "";
  if (n > 1)
    snprintf(text, sizeof text, "%u documents%s", n, how);
  else
    snprintf(text, sizeof text, "%s%s", n ? "one document" : "documents found", how);
  return text;
}

static void check_case(ps__args_attention a, const int *lengths) {
  if (is_refused(&a))
    return;
  sample s = make(a, lengths, 1000u * a.n_tokens + a.row0);
  reference(&s);
  bounds(&s);
  upload(&s);
  const bool f = forward_agrees(&s), b = backward_agrees(&s);
  printf("%s %s T=%u row0=%u heads %u/%u d=%u %s%s\n", f && b ? "ok" : "FAIL", library, a.n_tokens,
         a.row0, a.n_heads, a.n_kv_heads, a.head_dim, label(&a), lengths ? " uneven" : "");
  failed += !(f && b);
  drop(&s);
}

static void shapes(void) {
  static const struct {
    uint32_t h, kv;
  } heads[] = {{1, 1}, {4, 2}, {8, 1}, {6, 2}};
  static const uint32_t rows[] = {1, 2, 17, 64, 127, 128, 129, 500, 1024, 2048},
                        dims[] = {64, 128, 96};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    for (int one = 0; one < 2; one++)
      check_case((ps__args_attention){rows[i], 0, heads[i % 4].h, heads[i % 4].kv, dims[i % 3],
                                      PS_BF16, 0, one ? ONE : FOUND, 0, 0, 0, 0},
                 NULL);
  static const int mixed[] = {7, 100, 1, 64, 150, 33, 0}, equal[] = {64, 0}, ones[] = {1, 0},
                   late[] = {290, 50, 0}, longer[] = {900, 151, 700, 2, 0};
  static const int *const lengths[] = {NULL, mixed, equal, ones, late, longer};
  static const uint32_t row0[] = {0, 64, 1000};
  for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
    for (size_t r = 0; r < 3; r++)
      check_case((ps__args_attention){201, row0[r], 4, 2, dims[(i + r) % 2], PS_BF16, 0, FOUND, 0,
                                      0, 0, 0},
                 lengths[i]);
  for (size_t r = 1; r < 3; r++)
    check_case((ps__args_attention){201, row0[r], 4, 2, 128, PS_BF16, 0, ONE, 0, 0, 0, 0}, NULL);
  check_case((ps__args_attention){2048, 1000, 8, 2, 128, PS_BF16, 0, FOUND, 0, 0, 0, 0}, longer);
  check_case((ps__args_attention){2048, 1000, 8, 2, 128, PS_BF16, 0, ONE, 0, 0, 0, 0}, NULL);
  check_case((ps__args_attention){512, 64, 4, 2, 256, PS_BF16, 0, ONE, 0, 0, 0, 0}, NULL);
  check_case((ps__args_attention){512, 64, 4, 2, 256, PS_BF16, 0, FOUND, 0, 0, 0, 0}, late);
  /* above 256 by the plain kernels alone */
  check_case((ps__args_attention){512, 64, 4, 2, 512, PS_BF16, 0, ONE, 0, 0, 0, 0}, NULL);
  check_case((ps__args_attention){512, 64, 4, 2, 512, PS_BF16, 0, FOUND, 0, 0, 1.0f, 0}, late);
}

/* Windows within a tile and across chunk and document borders, soft caps and a scale of its own:
 * known documents, documents found, after a prefix. */
static void windows_and_caps(void) {
  static const int mixed[] = {7, 100, 1, 64, 150, 33, 0};
  static const uint32_t window[] = {1, 5, 64, 100, 128, 300, 0}, row0[] = {0, 64, 1000};
  for (size_t w = 0; w < sizeof window / sizeof *window; w++)
    for (size_t r = 0; r < 3; r++) {
      ps__args_attention a = {.n_tokens = 201,
                              .row0 = row0[r],
                              .n_heads = 4,
                              .n_kv_heads = 2,
                              .head_dim = w % 2 ? 128 : 64,
                              .dt = PS_BF16,
                              .document_rows = ONE,
                              .window = window[w],
                              .scale = 0.11f};
      check_case(a, NULL);
      a.softcap = 2.0f;
      check_case(a, NULL);
      a.document_rows = FOUND;
      check_case(a, mixed);
      a.softcap = 0.0f;
      check_case(a, mixed);
    }
  ps__args_attention few = {.n_tokens = 16, /* of the plain kernels */
                            .row0 = 200,
                            .n_heads = 4,
                            .n_kv_heads = 2,
                            .head_dim = 64,
                            .dt = PS_BF16,
                            .window = 70,
                            .softcap = 3.0f};
  check_case(few, NULL);
  ps__args_attention four = {600, 0, 4, 2, 128, PS_BF16, 0, 150, .window = 70};
  check_case(four, NULL);
  four.softcap = 5.0f;
  check_case(four, NULL);
  gpu.deterministic = true;
  check_case(four, NULL);
  gpu.deterministic = false;
  ps__args_attention wide = {700, 300, 4, 2, 256, PS_BF16, 0, ONE, .window = 400, .softcap = 50.0f};
  check_case(wide, NULL);
  wide.window = 0;
  check_case(wide, NULL);
}

/* Every number of query heads a kv head, after a prefix and as documents: which kernel runs
 * depends on it. */
static void groups(bool deterministic) {
  static const uint32_t group[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16};
  gpu.deterministic = deterministic;
  for (size_t i = 0; i < sizeof group / sizeof *group; i++)
    for (uint32_t dim = 64; dim <= 256; dim *= 2) {
      check_case((ps__args_attention){201, 77, 2 * group[i], 2, dim, PS_BF16, 0, ONE, 0, 0, 0, 0},
                 NULL);
      check_case((ps__args_attention){300, 0, 2 * group[i], 2, dim, PS_BF16, 0, 150, 0, 0, 0, 0},
                 NULL);
    }
  gpu.deterministic = false;
}

/* n documents of d rows, known: forward and backward, and dkv added to what the first backward
 * left (twice the cpu's, at twice the tolerance). */
static void known_documents(uint32_t d, uint32_t n, uint32_t heads, uint32_t kv_heads,
                            uint32_t head_dim) {
  ps__args_attention a = {n * d, 0, heads, kv_heads, head_dim, PS_BF16, 0, d, 0, 0, 0, 0};
  CHECK(ps__attention_documents(&a) == n);
  if (is_refused(&a))
    return;
  sample s = make(a, NULL, 31 * d + n);
  reference(&s);
  bounds(&s);
  upload(&s);
  const bool f = forward_agrees(&s), b = backward_agrees(&s);
  double again = INFINITY;
  s.a.accumulate_dkv = 1;
  if (b && on_gpu(&ps__k_attention_bwd, &s.a, s.dev, 8) == PS_OK) {
    float *dkv = download(s.dev[7], 4 * s.nkv);
    for (size_t i = 0; i < s.nkv; i++)
      dkv[i] /= 2;
    again = worst_dkv(&s, dkv);
    free(dkv);
  }
  printf("%s %s %s of %u rows, heads %u/%u d=%u: accumulated %.2f of the tolerance\n",
         f && b && again <= 1 ? "ok" : "FAIL", library, label(&a), d, heads, kv_heads, head_dim,
         again);
  failed += !(f && b && again <= 1);
  drop(&s);
}

static void all_known_documents(void) {
  static const struct {
    uint32_t d, n;
  } cut[] = {{256, 2}, {129, 3}, {64, 8}, {129, 8}, {2, 40}, {1000, 2}, {128, 70}};
  for (size_t i = 0; i < sizeof cut / sizeof *cut; i++)
    for (uint32_t dim = 64; dim <= 256; dim *= 2)
      for (int deterministic = 0; deterministic < 2; deterministic++) {
        gpu.deterministic = deterministic;
        known_documents(cut[i].d, cut[i].n, 4, i % 2 ? 4 : 2, dim);
      }
  gpu.deterministic = false;
  known_documents(1, 24, 4, 2, 128); /* a batch of single rows: found */
  /* document_rows says nothing */
  check_case((ps__args_attention){201, 0, 4, 2, 64, PS_BF16, 0, 100, 0, 0, 0, 0},
             (const int[]){7, 100, 1, 0});
}

/* dkv summed over 4 chunks, last chunk first, against one pass on the cpu. */
static void four_chunks(const int *lengths, uint32_t document_rows, uint32_t head_dim) {
  enum { N = 4, ROWS = 512 };
  const ps__args_attention whole = {N * ROWS,      0, 4, 2, head_dim, PS_BF16, 0,
                                    document_rows, 0, 0, 0, 0};
  if (is_refused(&whole))
    return;
  sample s = make(whole, lengths, 7);
  reference(&s);
  bounds(&s);
  upload(&s);
  CU(cudaMemcpy(s.dev[3], s.o, 2 * s.nq, cudaMemcpyHostToDevice));
  CU(cudaMemcpy(s.dev[4], s.lse, 4 * s.nlse, cudaMemcpyHostToDevice));
  for (uint32_t c = N; c-- > 0;) {
    const size_t q = (size_t)c * ROWS * 4 * head_dim * 2, lse = (size_t)c * ROWS * 4 * 4,
                 doc = (size_t)c * ROWS * 4;
    ps__args_attention a = s.a;
    a.n_tokens = ROWS, a.row0 = c * ROWS, a.accumulate_dkv = c != N - 1;
    char **dev = (char **)s.dev;
    CHECK(on_gpu(&ps__k_attention_bwd, &a,
                 (void *[]){dev[0] + q, dev[1], dev[2] + doc, dev[3] + q, dev[4] + lse, dev[5] + q,
                            dev[6] + q, dev[7]},
                 8) == PS_OK);
  }
  uint16_t *dq = download(s.dev[6], 2 * s.nq);
  float *dkv = download(s.dev[7], 4 * s.nkv);
  const double eq = worst_dq(&s, dq), ek = worst_dkv(&s, dkv);
  printf("%s %s four_chunks %s d=%u: dq %.2f, dkv %.2f of the tolerance\n",
         eq <= 1 && ek <= 1 ? "ok" : "FAIL", library, label(&s.a), head_dim, eq, ek);
  failed += !(eq <= 1 && ek <= 1);
  free(dq), free(dkv);
  drop(&s);
}

/* Deterministic: the same bits twice. A library that cannot do it for packed documents refuses
 * and says what can. */
static void same_bits(uint32_t row0, const int *lengths, uint32_t document_rows,
                      uint32_t head_dim) {
  const ps__args_attention a = {2048, row0, 8, 2, head_dim, PS_BF16, 0, document_rows, 0, 0, 0, 0};
  if (is_refused(&a))
    return;
  sample s = make(a, lengths, 9);
  upload(&s);
  gpu.deterministic = true;
  CHECK(on_gpu(&ps__k_attention_fwd, &s.a, s.dev, 5) == PS_OK);
  ps_status st = on_gpu(&ps__k_attention_bwd, &s.a, s.dev, 8);
  if (st == PS_EDEVICE && document_rows == FOUND && !strcmp(library, "cudnn")) {
    printf("ok deterministic documents are refused: %s\n", ps_last_error());
  } else {
    CHECK(st == PS_OK);
    const size_t bytes[] = {2 * s.nq, 4 * s.nlse, 2 * s.nq, 4 * s.nkv}, idx[] = {3, 4, 6, 7};
    void *first[4];
    for (int i = 0; i < 4; i++)
      first[i] = download(s.dev[idx[i]], bytes[i]);
    bool same = true;
    for (int again = 0; again < 3; again++) {
      for (int i = 0; i < 4; i++)
        CU(cudaMemset(s.dev[idx[i]], 0xff, bytes[i]));
      CHECK(on_gpu(&ps__k_attention_fwd, &s.a, s.dev, 5) == PS_OK &&
            on_gpu(&ps__k_attention_bwd, &s.a, s.dev, 8) == PS_OK);
      for (int i = 0; i < 4; i++) {
        void *now = download(s.dev[idx[i]], bytes[i]);
        same = same && !memcmp(now, first[i], bytes[i]);
        free(now);
      }
    }
    for (int i = 0; i < 4; i++)
      free(first[i]);
    printf("%s %s %s: the same bits four times\n", same ? "ok" : "FAIL", library, label(&s.a));
    failed += !same;
  }
  gpu.deterministic = false;
  drop(&s);
}

static void refusals(void) {
  size_t bytes;
  ps__args_attention a = {64, 0, 4, 2, 64, PS_F32, 0, 0, 0, 0, 0, 0};
  CHECK_FAILS(ps__cuda_prepare_attention_fwd(&a, &gpu, &bytes), PS_EINVAL, "needs bf16");
  a.dt = PS_BF16;
  a.n_heads = 3;
  CHECK_FAILS(ps__k_attention_fwd.info->prepare(&a, &gpu, &bytes), PS_EINVAL, "no valid shape");
  a = (ps__args_attention){77, 5, 4, 2, 64, PS_BF16, 0, 0, 0, 0, 0, 0};
  CHECK_FAILS(ps__cuda_attention_fwd(&(ps_launch){.args = &a, .exec = &gpu}), PS_EINVAL,
              "not prepared");
  a.head_dim = 520;
  CHECK_FAILS(ps__cuda_prepare_attention_fwd(&a, &gpu, &bytes), PS_EDEVICE, "FLASH_ATTN=1");
  printf("ok refusals\n");
}

/* ---- our own kernels, counted by hand -------------------------------------------------------- */

/* Documents as attention_cuda.h says they are, in rows: of each document its query rows and its
 * keys, from its begin to its last row. */
static void found_documents(uint32_t n_tokens, uint32_t row0, const int *lengths) {
  const ps__args_attention a = {
      .n_tokens = n_tokens, .row0 = row0, .n_heads = 4, .n_kv_heads = 2, .head_dim = 64};
  const uint32_t max_documents = ps_att_max_documents(n_tokens);
  const size_t bytes = ps_att_documents_bytes(max_documents);
  int32_t *starts = host(4 * (size_t)n_tokens), *got = host(bytes);
  doc_starts(starts, &a, lengths);
  int32_t *dev_starts = device(starts, 4 * (size_t)n_tokens), *documents = device(NULL, bytes);
  CU(cudaDeviceSynchronize());
  ps_att_find_documents(gpu.stream, &a, dev_starts, max_documents, true, documents);
  CU(cudaStreamSynchronize(gpu.stream));
  CU(cudaMemcpy(got, documents, bytes, cudaMemcpyDeviceToHost));
  CHECK(got[PS_ATT_HEAD_FIRST_KEY] == starts[0]);
  uint32_t row = 0;
  for (uint32_t d = 0; d < max_documents; d++) {
    uint32_t end = row;
    while (end < n_tokens && starts[end] == starts[row])
      end++;
    const int32_t key = row < n_tokens ? starts[row] : (int32_t)(row0 + row);
    CHECK(ps_att_array(got, max_documents, PS_ATT_LEN_Q)[d] == (int32_t)(end - row) &&
          ps_att_array(got, max_documents, PS_ATT_OFF_Q)[d] == (int32_t)row);
    CHECK(ps_att_array(got, max_documents, PS_ATT_LEN_KV)[d] ==
          (end > row ? (int32_t)(row0 + end) - key : 0));
    CHECK(ps_att_array(got, max_documents, PS_ATT_OFF_KV)[d] == key &&
          ps_att_array(got, max_documents, PS_ATT_OFF_LSE)[d] == (int32_t)row);
    row = end;
  }
  CHECK(got[PS_ATT_HEAD_PLAIN_ROW] == (int32_t)row);
  cudaFree(dev_starts);
  cudaFree(documents);
  free(starts);
  free(got);
}

static void transposed(uint32_t n, uint32_t rows, uint32_t cols) {
  const size_t each = (size_t)rows * cols;
  float *src = host(4 * n * each), *got = host(4 * n * each);
  for (size_t i = 0; i < n * each; i++)
    src[i] = (float)i;
  float *from = device(src, 4 * n * each), *to = device(NULL, 4 * n * each);
  CU(cudaDeviceSynchronize());
  ps_att_transpose(gpu.stream, to, from, n, rows, cols);
  CU(cudaStreamSynchronize(gpu.stream));
  CU(cudaMemcpy(got, to, 4 * n * each, cudaMemcpyDeviceToHost));
  for (size_t i = 0; i < n; i++)
    for (size_t r = 0; r < rows; r++)
      for (size_t c = 0; c < cols; c++)
        CHECK(got[i * each + c * rows + r] == src[i * each + r * cols + c]);
  cudaFree(from);
  cudaFree(to);
  free(src);
  free(got);
}

static void our_kernels(void) {
  static const int several[] = {700, 900, 55, 300, 0}, many[] = {1, 2, 3, 0}, one[] = {1 << 20, 0};
  for (uint32_t row0 = 0; row0 <= 1500; row0 += 500) {
    found_documents(1, row0, one);
    found_documents(1023, row0, several);
    found_documents(2500, row0, several);
    found_documents(1025, row0, many); /* more documents than there are entries */
  }
  transposed(1, 1, 1);
  transposed(3, 70, 33);
  transposed(2, 1000, 32);
  printf("ok documents as counted by hand, transposed log-sum-exp\n");
}

static void everything(void) {
  static const int documents[] = {700, 900, 55, 300, 0};
  refusals();
  shapes();
  windows_and_caps();
  groups(false);
  all_known_documents();
  for (int i = 0; i < 4; i++)
    four_chunks(i == 1 ? documents : NULL, i > 1 ? ONE : FOUND, i == 3 ? 128 : 64);
  four_chunks(NULL, ONE, 256);
  groups(true);
  same_bits(1000, NULL, ONE, 128);
  same_bits(1000, documents, FOUND, 128);
  same_bits(0, NULL, 512, 128);
  same_bits(1000, NULL, ONE, 256);
}

int main(int argc, char **argv) {
  int n = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess || !n) {
    printf("ok skipped: no CUDA device\n");
    return 0;
  }
  CU(cudaSetDevice(0));
  CU(cudaDeviceGetAttribute(&gpu.n_sms, cudaDevAttrMultiProcessorCount, 0));
  CU(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
  CHECK(ps__pool_create(&cpu.pool, 8, "attention") == PS_OK);
  setvbuf(stdout, NULL, _IOLBF, 0);
  int n_used = 0;
  if (argc < 2 || strcmp(argv[1], "short") == 0)
    our_kernels();
  for (size_t i = 0; i < N_LIBRARIES; i++) {
    if (!use(libraries[i]))
      continue;
    n_used++;
    if (argc < 2 || strcmp(argv[1], libraries[i]) == 0)
      everything();
  }
  if (!n_used)
    printf("ok skipped: built without a library for this GPU\n");
  ps__pool_destroy(cpu.pool);
  return failed ? 1 : 0;
}
#endif
