/* mxfp4.c - experts of gpt-oss in MXFP4 (OCP Microscaling Formats 1.0), and matrices that a file
 * has transposed.
 *
 *   W[r, 32 b + i] = q * 2^(scale[r, b] - 127),  q = sign * {0, 0.5, 1, 1.5, 2, 3, 4, 6}
 *
 * A block has 16 bytes; byte i has element 2i in its low four bits and 2i + 1 in the others, bit 3
 * is the sign. A byte of scale is E8M0; 255 is NaN. All of these numbers but those past 2^128 are
 * exact in bf16. */
#include "core/core.h"
#include "core/dtype.h"
#include "io/tensor_file.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_NAME = 1024, PIECE = 4096 /* blocks; elements of a column */, COLUMNS = 16 };

static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

bool ps__is_mxfp4(const tensor *t) { return !strcmp(t->info.dtype, PS__MXFP4); }

bool ps__mxfp4_blocks(const tensor *t) {
  static const char end[] = "_proj_blocks";
  const size_t n = strlen(t->name), m = sizeof end - 1;
  return n > m && !strcmp(t->name + n - m, end) && t->info.n_dims == 4 &&
         t->info.shape[3] == PS__MXFP4_BYTES && !strcmp(t->info.dtype, "U8");
}

/* ---- a block --------------------------------------------------------------------------------- */

static float scale_of(uint8_t e) { return e == 255 ? NAN : ldexpf(1.0f, (int)e - 127); }

void ps__mxfp4_decode(float *x, const uint8_t *q, uint8_t scale) {
  const float s = scale_of(scale);
  for (size_t i = 0; i < PS__MXFP4_BLOCK; i++) {
    const uint32_t code = i % 2 ? q[i / 2] >> 4 : q[i / 2] & 15;
    const float v = values[code & 7] * s;
    x[i] = code & 8 ? -v : v;
  }
}

/* To the nearest of the eight; between two to that with an even code. */
static uint32_t code_of(float x) {
  static const float half[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  uint32_t code = 0;
  while (code < 7 && (x > half[code] || (x == half[code] && code % 2)))
    code++;
  return code;
}

static double error_with(const float *x, int e) {
  double sum = 0;
  for (size_t i = 0; i < PS__MXFP4_BLOCK; i++) {
    const float y = fabsf(ldexpf(x[i], -e));
    const double d = ldexp((double)y - values[code_of(y)], e);
    sum += d * d;
  }
  return sum;
}

/* Of the scales by which the largest number is 4 to 8 or 2 to 4, that with the smaller error: with
 * the first one, which the standard has, numbers above 6 are cut. A block that was read gives its
 * numbers again: with the larger scale they are exact, or with the smaller. */
uint8_t ps__mxfp4_encode(const float *x, uint8_t *out) {
  float max = 0;
  int e;
  bool finite = true;
  for (size_t i = 0; i < PS__MXFP4_BLOCK; i++) {
    finite = finite && isfinite(x[i]);
    max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
  }
  memset(out, 0, PS__MXFP4_BYTES);
  if (!finite)
    return 255;
  if (max == 0)
    return 0;
  frexpf(max, &e); /* max = 0.5 .. 1 * 2^e */
  e -= 3;          /* max / 2^e = 4 .. 8 */
  if (error_with(x, e + 1) < error_with(x, e))
    e++;
  e = e < -127 ? -127 : e > 127 ? 127 : e;
  for (size_t i = 0; i < PS__MXFP4_BLOCK; i++) {
    const float y = ldexpf(x[i], -e);
    const uint32_t code = code_of(fabsf(y)) | (signbit(y) ? 8u : 0);
    out[i / 2] |= (uint8_t)(code << (i % 2 ? 4 : 0));
  }
  return (uint8_t)(e + 127);
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
