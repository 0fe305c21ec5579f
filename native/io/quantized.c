/* quantized.c - weights in FP8 with scales, as files of other programs have them.
 *
 *   W[r, c] = q[r, c] * s[r / R, c / C]      q in E4M3 or E5M2; s in F32, BF16, F16 or E8M0
 *
 * One fp32 product a weight, which the caller's dtype rounds once more. The scales of tensor NAME
 * are tensor NAME_scale_inv (DeepSeek, Qwen, Mistral) or NAME_scale (compressed-tensors, ModelOpt,
 * FBGEMM). Both are factors, in spite of the first name. Their shape says R and C: one scale, one a
 * row, or one a block of 128 x 128, whose last row and column of blocks may be cut. */
#include "core/blocks.h"
#include "core/core.h"
#include "core/dtype.h"
#include "io/tensor_file.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { MAX_NAME = 1024, BLOCK = 128, PIECE = 4096 /* elements */ };

static bool fp8_of(const tensor *t, uint32_t *dtype) {
  const bool e4m3 = !strcmp(t->info.dtype, "F8_E4M3"), e5m2 = !strcmp(t->info.dtype, "F8_E5M2");
  *dtype = e4m3 ? PS__E4M3 : PS__E5M2;
  return e4m3 || e5m2;
}

static bool is_e8m0(const tensor *t) { return !strcmp(t->info.dtype, "F8_E8M0"); }

/* ---- which tensor has the scales of which ---------------------------------------------------- */

/* Tensor @name with @end after it, or in place of its ".weight". */
static tensor *beside(ps_tensor_file *f, const char *name, const char *end, bool in_place) {
  char other[MAX_NAME];
  const size_t n = strlen(name), cut = strlen(".weight");
  if (in_place && (n < cut || strcmp(name + n - cut, ".weight")))
    return NULL;
  const int length =
      snprintf(other, sizeof other, "%.*s%s", (int)(in_place ? n - cut : n), name, end);
  const uint64_t idx = length < (int)sizeof other ? ps_tensors_find(f, other) : UINT64_MAX;
  return idx == UINT64_MAX ? NULL : &f->tensors[idx];
}

/* Sets the rows and columns that a scale of @s is of in @t; false: their shapes do not fit. */
static bool fits(tensor *t, const tensor *s) {
  const uint64_t rows = t->info.shape[0], cols = t->info.n_dims > 1 ? t->info.shape[1] : 1;
  const uint64_t down = s->info.n_dims ? s->info.shape[0] : 1,
                 across = s->info.n_dims > 1 ? s->info.shape[1] : 1;
  if (t->info.n_dims != 2 || s->info.n_dims > 2 || !t->info.n)
    return false;
  if (s->info.n == 1) {
    t->scale_rows = rows;
    t->scale_cols = cols;
    return true;
  }
  const bool rowwise = down == rows && across == 1;
  t->scale_rows = rowwise ? 1 : BLOCK;
  t->scale_cols = rowwise ? cols : BLOCK;
  return rowwise || (down == (rows + BLOCK - 1) / BLOCK && across == (cols + BLOCK - 1) / BLOCK);
}

static ps_status pair(ps_tensor_file *f, tensor *t) {
  /* scales of activations and of a cache of keys and values, which bf16 products do without */
  static const char *const unused[] = {".input_scale", ".activation_scale", ".output_scale",
                                       ".k_scale", ".v_scale"};
  tensor *inverse = beside(f, t->name, "_scale_inv", false),
         *s = inverse ? inverse : beside(f, t->name, "_scale", false);
  if (!s)
    return PS_OK; /* refused by ps__tensors_check_dtype() where it is read */
  if (!is_e8m0(s) && ps__dtype_of_file(s->info.dtype) == PS__N_FILE_DTYPES)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\": dtype is %s: scales are F32, BF16, F16 or E8M0",
                    f->files[s->file].path, s->name, s->info.dtype);
  if (!fits(t, s))
    return ps__fail(PS_EFORMAT,
                    "%s: tensor \"%s\": its shape [%" PRIu64 ", %" PRIu64
                    "] is neither one scale, one a row, nor one a block of 128 x 128 of \"%s\", "
                    "[%" PRIu64 ", %" PRIu64 "]",
                    f->files[s->file].path, s->name, s->info.n_dims ? s->info.shape[0] : 1,
                    s->info.n_dims > 1 ? s->info.shape[1] : 1, t->name, t->info.shape[0],
                    t->info.n_dims > 1 ? t->info.shape[1] : 1);
  t->scales = s;
  s->passed_over = true;
  for (size_t i = 0; i < sizeof unused / sizeof *unused; i++) {
    tensor *other = beside(f, t->name, unused[i], true);
    if (other)
      other->passed_over = true;
  }
  return PS_OK;
}

ps_status ps__tensors_pair(ps_tensor_file *f) {
  uint32_t dtype;
  for (size_t i = 0; i < f->n; i++)
    if (fp8_of(&f->tensors[i], &dtype))
      PS_TRY(pair(f, &f->tensors[i]));
    else if (ps__is_mxfp4(&f->tensors[i]))
      PS_TRY(ps__mxfp4_pair(f, &f->tensors[i]));
  return PS_OK;
}

bool ps__tensors_passed_over(const ps_tensor_file *f, uint64_t idx) {
  return f->tensors[idx].passed_over;
}

bool ps__tensors_has_scales(const ps_tensor_file *f, uint64_t idx) {
  return f->tensors[idx].scales != NULL;
}

bool ps__tensors_quantized(const ps_tensor_file *f) {
  bool any = false;
  for (size_t i = 0; i < f->n; i++)
    any |= f->tensors[i].scales && !ps__is_mxfp4(&f->tensors[i]);
  return any;
}

ps_status ps__tensors_check_dtype(const ps_tensor_file *f, uint64_t idx) {
  const tensor *t = &f->tensors[idx];
  uint32_t dtype;
  if (t->scales || ps__dtype_of_file(t->info.dtype) < PS__N_FILE_DTYPES)
    return PS_OK;
  if (fp8_of(t, &dtype))
    return ps__fail(PS_EFORMAT,
                    "%s: tensor \"%s\" is %s and has no scales: neither \"%s_scale_inv\" nor "
                    "\"%s_scale\" is there",
                    f->files[t->file].path, t->name, t->info.dtype, t->name, t->name);
  return ps__fail(PS_EFORMAT,
                  "%s: tensor \"%s\" is %s: F32, BF16, F16 and FP8 with scales are read, use the "
                  "model before quantization",
                  f->files[t->file].path, t->name, t->info.dtype);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* Scales [first, first + n) of @s as fp32. */
static ps_status read_scales(const ps_tensor_file *f, const tensor *s, uint64_t first, uint64_t n,
                             float *out) {
  const data_file *d = &f->files[s->file];
  const uint32_t kind = ps__dtype_of_file(s->info.dtype);
  const size_t bytes = is_e8m0(s) ? 1 : ps__dtypes[kind].bytes;
  char *raw = ps__malloc(n * bytes);
  if (!raw)
    return ps__fail(PS_ENOMEM, "%s: no memory left for the scales of a tensor", d->path);
  const ps_status st = ps__pread_all(d->fd, d->path, raw, n * bytes, s->begin + first * bytes);
  if (st == PS_OK && !is_e8m0(s))
    ps__convert(out, PS_F32, raw, kind, n);
  for (uint64_t i = 0; st == PS_OK && is_e8m0(s) && i < n; i++) {
    const uint32_t e = (unsigned char)raw[i]; /* 2^(e - 127); 255 is NaN */
    const uint32_t bits = e == 0 ? 1u << 22 : e == 255 ? 0x7fc00000u : e << 23;
    memcpy(&out[i], &bits, sizeof bits);
  }
  ps__free(raw);
  return st;
}

/* Elements [at, at + n) of row @r, as fp32 in @x, times their scales; @scale: those of the row. */
static void apply(const tensor *t, float *x, uint64_t at, uint64_t n, const float *scale) {
  for (uint64_t i = 0; i < n;) {
    const uint64_t k = (at + i) / t->scale_cols, end = (k + 1) * t->scale_cols - at;
    for (; i < n && i < end; i++)
      x[i] *= scale[k];
  }
}

ps_status ps__tensors_dequantize(const ps_tensor_file *f, const tensor *t, uint64_t first,
                                 uint64_t n, ps_dtype dtype, void *dst) {
  const data_file *d = &f->files[t->file];
  const uint64_t cols = t->info.shape[1], across = (cols + t->scale_cols - 1) / t->scale_cols;
  const size_t to = ps__dtypes[dtype].bytes;
  uint8_t q[PIECE];
  float x[PIECE];
  uint32_t kind;
  if (ps__is_mxfp4(t))
    return ps__mxfp4_read(f, t, first, n, dtype, dst);
  uint64_t have = UINT64_MAX; /* the row of scales in @scale */
  if (!fp8_of(t, &kind))
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\" is no FP8", d->path, t->name);
  float *scale = ps__malloc(across * sizeof *scale);
  ps_status st = scale ? PS_OK : ps__fail(PS_ENOMEM, "%s: no memory left for scales", d->path);
  for (uint64_t done = 0; st == PS_OK && done < n;) {
    const uint64_t r = (first + done) / cols, c = (first + done) % cols;
    uint64_t m = cols - c < n - done ? cols - c : n - done;
    m = m < PIECE ? m : PIECE;
    if (r / t->scale_rows != have) {
      have = r / t->scale_rows;
      st = read_scales(f, t->scales, have * across, across, scale);
    }
    if (st == PS_OK)
      st = ps__pread_all(d->fd, d->path, q, m, t->begin + first + done);
    if (st != PS_OK)
      break;
    ps__convert(x, PS_F32, q, kind, m);
    apply(t, x, c, m, scale);
    ps__convert((char *)dst + done * to, dtype, x, PS_F32, m);
    done += m;
  }
  ps__free(scale);
  return st;
}

/* ---- as blocks ------------------------------------------------------------------------------- */

bool ps__tensors_keep_blocks(const ps_tensor_file *f, uint64_t idx) {
  const tensor *t = &f->tensors[idx];
  const ps__storage as = ps__base_storage(PS_BASE_FP8, PS_BF16);
  uint32_t kind;
  return t->scales && fp8_of(t, &kind) && kind == PS__E4M3 && t->info.shape[1] % as.block == 0 &&
         t->scale_cols % as.block == 0;
}

ps_status ps__tensors_read_blocks(const ps_tensor_file *f, uint64_t idx, void *dst) {
  const tensor *t = &f->tensors[idx];
  const data_file *d = &f->files[t->file];
  const ps__storage as = ps__base_storage(PS_BASE_FP8, PS_BF16);
  const uint64_t cols = t->info.shape[1], across = (cols + t->scale_cols - 1) / t->scale_cols;
  float *scale = ps__malloc(across * sizeof *scale);
  uint8_t *q = ps__malloc(cols), *to = dst;
  ps_status st = scale && q ? PS_OK : ps__fail(PS_ENOMEM, "%s: no memory left for a row", d->path);
  for (uint64_t r = 0; st == PS_OK && r < t->info.shape[0]; r++) {
    if (r % t->scale_rows == 0)
      st = read_scales(f, t->scales, r / t->scale_rows * across, across, scale);
    if (st == PS_OK)
      st = ps__pread_all(d->fd, d->path, q, cols, t->begin + r * cols);
    for (uint64_t c = 0; st == PS_OK && c < cols; c += as.block, to += ps__block_bytes(as)) {
      memcpy(to, q + c, as.block);
      memcpy(to + as.block, &scale[c / t->scale_cols], sizeof *scale);
    }
  }
  ps__free(scale);
  ps__free(q);
  return st;
}
