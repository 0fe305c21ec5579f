/* mxfp4.c - experts of gpt-oss in MXFP4 (OCP Microscaling Formats 1.0), and matrices that a file
 * has transposed.
 *
 *   W[r, 32 b + i] = q * 2^(scale[r, b] - 127),  q = sign * {0, 0.5, 1, 1.5, 2, 3, 4, 6}
 *
 * A block has 16 bytes; byte i has element 2i in its low four bits and 2i + 1 in the others, bit 3
 * is the sign. A byte of scale is E8M0; 255 is NaN. All of these numbers but those past 2^128 are
 * exact in bf16. */
#include "core/blocks.h"
#include "core/core.h"
#include "core/dtype.h"
#include "io/tensor_file.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAX_NAME = 1024, PIECE = 4096 /* blocks; elements of a column */, COLUMNS = 16 };

bool ps__is_mxfp4(const tensor *t) { return !strcmp(t->info.dtype, PS__MXFP4); }

bool ps__mxfp4_blocks(const tensor *t) {
  static const char end[] = "_proj_blocks";
  const size_t n = strlen(t->name), m = sizeof end - 1;
  return n > m && !strcmp(t->name + n - m, end) && t->info.n_dims == 4 &&
         t->info.shape[3] == PS__MXFP4_BYTES && !strcmp(t->info.dtype, "U8");
}

/* ---- a block --------------------------------------------------------------------------------- */

/* native/core/blocks.h has the elements and then the scale, files have them apart. */

void ps__mxfp4_decode(float *x, const uint8_t *q, uint8_t scale) {
  uint8_t block[PS__MXFP4_BYTES + 1];
  memcpy(block, q, PS__MXFP4_BYTES);
  block[PS__MXFP4_BYTES] = scale;
  ps__blocks_dequantize(x, ps__base_storage(PS_BASE_MXFP4, PS_F32), block, PS__MXFP4_BLOCK);
}

uint8_t ps__mxfp4_encode(const float *x, uint8_t *out) {
  uint8_t block[PS__MXFP4_BYTES + 1];
  ps__blocks_quantize(block, ps__base_storage(PS_BASE_MXFP4, PS_F32), x, PS__MXFP4_BLOCK);
  memcpy(out, block, PS__MXFP4_BYTES);
  return block[PS__MXFP4_BYTES];
}

ps_status ps_mxfp4_encode(const float *x, uint64_t n, uint8_t *elements, uint8_t *scales,
                          double error[2]) {
  float y[PS__MXFP4_BLOCK];
  if (!x || !elements || !scales || !error)
    return ps__fail(PS_EINVAL, "ps_mxfp4_encode: x, elements, scales and error must be given");
  if (n % PS__MXFP4_BLOCK)
    return ps__fail(PS_EINVAL, "ps_mxfp4_encode: %" PRIu64 " numbers are no multiple of %d", n,
                    PS__MXFP4_BLOCK);
  for (; n; n -= PS__MXFP4_BLOCK, x += PS__MXFP4_BLOCK, elements += PS__MXFP4_BYTES, scales++) {
    *scales = ps__mxfp4_encode(x, elements);
    ps__mxfp4_decode(y, elements, *scales);
    for (int k = 0; k < PS__MXFP4_BLOCK; k++) {
      error[0] += ((double)x[k] - y[k]) * ((double)x[k] - y[k]);
      error[1] += (double)x[k] * x[k];
    }
  }
  return PS_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* "...mlp.experts.3.down_proj" has its scales in "...mlp.experts.down_proj_scales". */
ps_status ps__mxfp4_pair(ps_tensor_file *f, tensor *t) {
  char name[MAX_NAME];
  const char *what = strrchr(t->name, '.'), *number = what;
  while (number > t->name && number[-1] != '.')
    number--;
  const uint64_t rows = t->info.shape[0], blocks = t->info.shape[1] / PS__MXFP4_BLOCK;
  const int n =
      snprintf(name, sizeof name, "%.*s%s_scales", (int)(number - t->name), t->name, what + 1);
  const uint64_t idx = n < (int)sizeof name ? ps_tensors_find(f, name) : UINT64_MAX;
  if (idx == UINT64_MAX)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\" is missing: the scales of experts in MXFP4",
                    f->files[t->file].path, name);
  tensor *s = &f->tensors[idx];
  if (strcmp(s->info.dtype, "U8") || s->info.n_dims != 3 || s->info.shape[0] <= t->expert ||
      s->info.shape[1] != rows || s->info.shape[2] != blocks)
    return ps__fail(PS_EFORMAT,
                    "%s: tensor \"%s\" is %s with %u dimensions ending [%" PRIu64 ", %" PRIu64
                    "]: the blocks of %s ask for U8 [experts, %" PRIu64 ", %" PRIu64 "]",
                    f->files[s->file].path, name, s->info.dtype, s->info.n_dims,
                    s->info.n_dims > 1 ? s->info.shape[s->info.n_dims - 2] : 1,
                    s->info.n_dims ? s->info.shape[s->info.n_dims - 1] : 1, what + 1, rows, blocks);
  t->scales = s;
  s->passed_over = true;
  return PS_OK;
}

ps_status ps__mxfp4_read(const ps_tensor_file *f, const tensor *t, uint64_t first, uint64_t n,
                         ps_dtype dtype, void *dst) {
  const data_file *d = &f->files[t->file], *of_scales = &f->files[t->scales->file];
  const uint64_t scales = t->scales->begin + t->expert * (t->info.n / PS__MXFP4_BLOCK);
  uint8_t *q = ps__malloc((PS__MXFP4_BYTES + 1) * (size_t)PIECE), *s = q + PS__MXFP4_BYTES * PIECE;
  float x[PS__MXFP4_BLOCK];
  ps_status st = q ? PS_OK : ps__fail(PS_ENOMEM, "%s: no memory left for MXFP4", d->path);
  for (uint64_t done = 0; st == PS_OK && done < n;) {
    const uint64_t b0 = (first + done) / PS__MXFP4_BLOCK,
                   b1 = (first + n + PS__MXFP4_BLOCK - 1) / PS__MXFP4_BLOCK,
                   m = b1 - b0 < PIECE ? b1 - b0 : PIECE;
    st = ps__pread_all(d->fd, d->path, q, m * PS__MXFP4_BYTES, t->begin + b0 * PS__MXFP4_BYTES);
    if (st == PS_OK)
      st = ps__pread_all(of_scales->fd, of_scales->path, s, m, scales + b0);
    for (uint64_t b = 0; st == PS_OK && b < m; b++) {
      const uint64_t skip = b0 + b == b0 ? (first + done) % PS__MXFP4_BLOCK : 0,
                     left = PS__MXFP4_BLOCK - skip, k = left < n - done ? left : n - done;
      ps__mxfp4_decode(x, q + b * PS__MXFP4_BYTES, s[b]);
      ps__convert((char *)dst + done * ps__dtypes[dtype].bytes, dtype, x + skip, PS_F32, k);
      done += k;
    }
  }
  ps__free(q);
  return st;
}

/* ---- transposed ------------------------------------------------------------------------------ */

typedef struct columns {
  const ps_tensor_file *f;
  const tensor *t;
  uint64_t first, end; /* elements that are wanted */
  ps_dtype dtype;
  char *dst;
  float *x, *row; /* COLUMNS * PIECE numbers; COLUMNS of them */
  char *raw;      /* PIECE of them in the file's dtype */
} columns;

/* Rows [r0, r0 + n) of columns [c0, c0 + m). The file has a column's rows side by side. */
static ps_status read_columns(const columns *j, uint64_t r0, uint64_t n, uint64_t c0, uint64_t m) {
  const tensor *t = j->t;
  const data_file *d = &j->f->files[t->file];
  const uint32_t kind = ps__dtype_of_file(t->info.dtype);
  const size_t from = ps__dtypes[kind].bytes, to = ps__dtypes[j->dtype].bytes;
  const uint64_t rows = t->info.shape[0], cols = t->info.shape[1];
  for (uint64_t c = 0; c < m; c++) {
    const uint64_t at = t->begin + ((c0 + c) * rows + r0) * from;
    PS_TRY(ps__pread_all(d->fd, d->path, j->raw, n * from, at));
    ps__convert(j->x + c * PIECE, PS_F32, j->raw, kind, n);
  }
  for (uint64_t r = 0; r < n; r++) {
    const uint64_t at = (r0 + r) * cols + c0, skip = at < j->first ? j->first - at : 0,
                   last = at + m > j->end ? j->end - at : m;
    if (at >= j->end || skip >= m)
      continue;
    for (uint64_t c = 0; c < m; c++)
      j->row[c] = j->x[c * PIECE + r];
    ps__convert(j->dst + (at + skip - j->first) * to, j->dtype, j->row + skip, PS_F32, last - skip);
  }
  return PS_OK;
}

ps_status ps__tensors_read_transposed(const ps_tensor_file *f, const tensor *t, uint64_t first,
                                      uint64_t n, ps_dtype dtype, void *dst) {
  const uint64_t cols = t->info.shape[1], r0 = first / cols, r1 = (first + n + cols - 1) / cols;
  columns j = {.f = f, .t = t, .first = first, .end = first + n, .dtype = dtype, .dst = dst};
  if (!n)
    return PS_OK;
  j.x = ps__malloc(((COLUMNS + 1) * (size_t)PIECE + COLUMNS) * sizeof *j.x);
  if (!j.x)
    return ps__fail(PS_ENOMEM, "%s: no memory left to transpose a tensor", f->files[t->file].path);
  j.raw = (char *)(j.x + COLUMNS * (size_t)PIECE);
  j.row = j.x + (COLUMNS + 1) * (size_t)PIECE;
  ps_status st = PS_OK;
  for (uint64_t r = r0; st == PS_OK && r < r1; r += PIECE)
    for (uint64_t c = 0; st == PS_OK && c < cols; c += COLUMNS)
      st = read_columns(&j, r, r1 - r < PIECE ? r1 - r : PIECE, c,
                        cols - c < COLUMNS ? cols - c : COLUMNS);
  ps__free(j.x);
  return st;
}
