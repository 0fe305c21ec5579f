/* forms.c - experts of gpt-oss as its files have them: transposed, or in MXFP4 (io/mxfp4.c). In
 * memory an expert's matrices are [2I,D] and [D,I], row after row. And tensors of which each layer
 * has a part (io/sliced.c). */
#include "train/arrays.h"
#include <stdio.h>
#include <string.h>

void ps__form_spec(ps_tensor_spec *spec, ps__form form, const ps_param_info *p, uint32_t n_experts,
                   char *name, size_t bytes) {
  const bool blocks = form == PS__FORM_BLOCKS;
  const size_t n = strlen(name);
  spec->shape[0] = n_experts;
  spec->shape[1] = p->shape[form == PS__FORM_TRANSPOSED ? 1 : 0];
  spec->shape[2] = form == PS__FORM_TRANSPOSED ? p->shape[0] : p->shape[1] / PS__MXFP4_BLOCK;
  spec->shape[3] = blocks ? PS__MXFP4_BYTES : 0;
  spec->n_dims = blocks ? 4 : 3;
  if (form == PS__FORM_TRANSPOSED)
    return;
  spec->dtype = (ps_dtype)PS__U8;
  snprintf(name + n, bytes - n, "%s", blocks ? "_blocks" : "_scales");
}

typedef struct source {
  const ps_trainer *t;
  const ps__array *a;
  const ps_param_info *p;
  void *whole; /* all of it, where it is on the device alone; else NULL */
} source;

static ps_status open_source(source *s) {
  if (ps__array_at(s->t, s->p->unit, s->a->what, s->p->offset))
    return PS_OK;
  s->whole = ps__malloc(ps__array_bytes(s->t, s->p->unit, s->a->what, s->p->n));
  return s->whole ? ps__array_read(s->t, s->p->unit, s->a->what, s->p->offset, s->p->n, s->whole)
                  : ps__fail(PS_ENOMEM, "no memory left to write %s", s->p->name);
}

/* Elements [first, first + n). */
static void numbers(const source *s, uint64_t first, uint64_t n, float *out) {
  const uint32_t from = ps__array_dtype(s->t, s->p->unit, s->a->what);
  const uint64_t at = s->p->offset + first;
  if (s->whole)
    ps__convert(out, PS_F32, (char *)s->whole + first * ps__dtypes[from].bytes, from, n);
  else
    ps__updated_get(s->t, s->p->unit, at, n, PS_F32, out);
}

/* Columns, as rows of the file; of rows that do not fit into the buffer a column in parts. */
static ps_status write_transposed(const source *s, ps__tensors_file *f, float *buffer,
                                  uint64_t room, const _Atomic uint32_t *failed) {
  enum { RUN = 64 };
  const uint64_t rows = s->p->shape[0], cols = s->p->shape[1],
                 whole = room / rows < RUN ? room / rows : RUN, m = whole ? whole : 1;
  float run[RUN];
  for (uint64_t c0 = 0; c0 < cols; c0 += m) {
    const uint64_t n = cols - c0 < m ? cols - c0 : m, most = whole ? rows : room;
    for (uint64_t r0 = 0; r0 < rows; r0 += most) {
      const uint64_t k = rows - r0 < most ? rows - r0 : most;
      if (atomic_load(failed))
        return PS_ECANCELLED;
      for (uint64_t r = 0; r < k; r++) {
        numbers(s, (r0 + r) * cols + c0, n, run);
        for (uint64_t c = 0; c < n; c++)
          buffer[c * k + r] = run[c];
      }
      if (s->a->dtype != PS_F32)
        ps__convert(buffer, s->a->dtype, buffer, PS_F32, n * k);
      PS_TRY(ps__tensors_put(f, buffer, n * k * ps_dtype_bytes(s->a->dtype)));
    }
  }
  return PS_OK;
}

/* What is written takes the place of numbers that were read: it is shorter. */
static ps_status write_mxfp4(const source *s, ps__tensors_file *f, bool blocks, float *buffer,
                             uint64_t room, const _Atomic uint32_t *failed, double error[2]) {
  const uint64_t piece = room / PS__MXFP4_BLOCK * PS__MXFP4_BLOCK,
                 each = blocks ? PS__MXFP4_BYTES : 1;
  for (uint64_t first = 0; first < s->p->n; first += piece) {
    const uint64_t n = s->p->n - first < piece ? s->p->n - first : piece;
    uint8_t *out = (uint8_t *)buffer;
    if (atomic_load(failed))
      return PS_ECANCELLED;
    numbers(s, first, n, buffer);
    for (uint64_t i = 0; i < n; i += PS__MXFP4_BLOCK, out += each) {
      uint8_t q[PS__MXFP4_BYTES], scale;
      double off[2] = {0};
      PS_TRY(ps_mxfp4_encode(buffer + i, PS__MXFP4_BLOCK, q, &scale, blocks ? error : off));
      memcpy(out, blocks ? q : &scale, each);
    }
    PS_TRY(ps__tensors_put(f, buffer, n / PS__MXFP4_BLOCK * each));
  }
  return PS_OK;
}

ps_status ps__form_write(const ps_trainer *t, ps__tensors_file *f, const ps__array *a,
                         const ps_param_info *p, ps__form form, float *buffer, uint64_t room,
                         const _Atomic uint32_t *failed, double error[2]) {
  source s = {.t = t, .a = a, .p = p};
  ps_status st = open_source(&s);
  if (st == PS_OK)
    st = form == PS__FORM_TRANSPOSED
             ? write_transposed(&s, f, buffer, room, failed)
             : write_mxfp4(&s, f, form == PS__FORM_BLOCKS, buffer, room, failed, error);
  ps__free(s.whole);
  return st;
}

/* ---- layers' parts --------------------------------------------------------------------------- */

static const ps_param_info *part_of_layer(const ps_model *m, const ps_param_info *first,
                                          uint32_t layer) {
  static const char of_first[] = "model.layers.0.";
  char name[PS_PARAM_NAME_BYTES];
  snprintf(name, sizeof name, "model.layers.%u.%s", layer, first->name + sizeof of_first - 1);
  return &m->param[ps_model_find(m, name)];
}

/* Elements [first, first + n) of @p as fp32, by way of @raw where they are on the device alone. */
static ps_status part_numbers(const ps_trainer *t, const ps__array *a, const ps_param_info *p,
                              uint64_t first, uint64_t n, void *raw, float *out) {
  if (ps__array_at(t, p->unit, a->what, p->offset)) {
    ps__updated_get(t, p->unit, p->offset + first, n, PS_F32, out);
    return PS_OK;
  }
  PS_TRY(ps__array_read(t, p->unit, a->what, p->offset + first, n, raw));
  ps__convert(out, PS_F32, raw, ps__array_dtype(t, p->unit, a->what), n);
  return PS_OK;
}

/* Rows [r0, r0 + k) of all layers' parts, side by side, in @all; @x has room for a part's. */
static ps_status gather_rows(const ps_trainer *t, const ps__array *a, const ps_param_info *p,
                             uint64_t r0, uint64_t k, float *all, float *x) {
  const uint32_t n = t->plan->model->cfg.n_layers;
  const uint64_t cols = p->shape[1];
  for (uint32_t l = 0; l < n; l++) {
    PS_TRY(part_numbers(t, a, part_of_layer(t->plan->model, p, l), r0 * cols, k * cols,
                        x + k * cols, x));
    for (uint64_t r = 0; r < k; r++)
      memcpy(all + (r * n + l) * cols, x + r * cols, cols * sizeof *x);
  }
  return PS_OK;
}

static ps_status put(ps__tensors_file *f, const ps__array *a, float *x, uint64_t n) {
  if (a->dtype != PS_F32)
    ps__convert(x, a->dtype, x, PS_F32, n);
  return ps__tensors_put(f, x, n * ps_dtype_bytes(a->dtype));
}

static ps_status write_columns(const ps_trainer *t, ps__tensors_file *f, const ps__array *a,
                               const ps_param_info *p, const _Atomic uint32_t *failed) {
  enum { ROWS = 64 };
  const uint64_t rows = p->shape[0], row = p->shape[1] * t->plan->model->cfg.n_layers;
  float *all = ps__malloc(ROWS * (row + 2 * p->shape[1]) * sizeof *all);
  ps_status st = all ? PS_OK : ps__fail(PS_ENOMEM, "no memory left to write %s", p->name);
  for (uint64_t r = 0; st == PS_OK && r < rows; r += ROWS) {
    const uint64_t k = rows - r < ROWS ? rows - r : ROWS;
    st = atomic_load(failed) ? PS_ECANCELLED : gather_rows(t, a, p, r, k, all, all + ROWS * row);
    if (st == PS_OK)
      st = put(f, a, all, k * row);
  }
  ps__free(all);
  return st;
}

ps_status ps__form_write_merged(const ps_trainer *t, ps__tensors_file *f, const ps__array *a,
                                const ps_param_info *p, ps__form form, float *buffer, uint64_t room,
                                const _Atomic uint32_t *failed) {
  const uint64_t piece = room / 2; /* the rest is for what comes from the device */
  if (form == PS__FORM_COLUMNS)
    return write_columns(t, f, a, p, failed);
  for (uint32_t l = 0; l < t->plan->model->cfg.n_layers; l++)
    for (uint64_t first = 0; first < p->n; first += piece) {
      const uint64_t n = p->n - first < piece ? p->n - first : piece;
      if (atomic_load(failed))
        return PS_ECANCELLED;
      PS_TRY(part_numbers(t, a, part_of_layer(t->plan->model, p, l), first, n, buffer + piece,
                          buffer));
      PS_TRY(put(f, a, buffer, n));
    }
  return PS_OK;
}
