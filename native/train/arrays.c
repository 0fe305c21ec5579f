/* arrays.c - writes weights and optimizer states as safetensors, with several threads.
 *
 * A thread takes the next file, and writes and hashes the file's tensors out of the arrays that the
 * trainer works on. The state has no second copy: a thread's buffer has a piece of a tensor, where
 * the tensor is converted or comes from the device. */
#include "train/arrays.h"
#include "io/tower.h"
#include "train/adapter.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE_BYTES = 1 << 20, LEAST_THREADS = 2, MOST_THREADS = 8 };

/* One that is to be written. Files are ordered by phase and unit; see order_of(). */
typedef struct out_file {
  uint32_t array, phase, unit;
  uint64_t k; /* in the array's writer */
} out_file;

/* Of a vision-language model: the files that it was read from, and the tensors of its other parts,
 * which are written as they are there, those of the widest elements first. */
typedef struct carried {
  ps_tensor_file *f; /* NULL: the model is no such one */
  uint32_t *idx, n;
} carried;

typedef struct job {
  ps_trainer *t;
  ps__output *o;
  carried carried;
  ps_tensor_writer *writer[1 + PS_MAX_STATES];
  uint32_t *param[1 + PS_MAX_STATES]; /* [array][i]: the first parameter of the array's tensor i, */
  uint32_t *n_of[1 + PS_MAX_STATES];  /* and how many parameters are in it; 0: it is carried */
  uint8_t *form[1 + PS_MAX_STATES];   /* ps__form */
  double (*error)[2];                 /* of each file: ps__form_write() */
  out_file *file;
  _Atomic uint32_t *left;     /* [unit][part]: tensors that are not read yet */
  _Atomic uint32_t on_device; /* with held: so many of these are not in the host's memory */
  char *buffers;              /* PIECE_BYTES for each thread */
  _Atomic uint32_t failed;
  ps_status st; /* the first failure's, with its message */
  char message[1024];
} job;

static ps_status no_memory(const ps__output *o) {
  return ps__fail(PS_ENOMEM, "%s: no memory left to write it", o->dir);
}

static uint32_t part_of(const ps__array *a) {
  return a->what == PS__ARRAY_UPDATED ? PS__PART_WEIGHTS : PS__PART_STATE;
}

/* ---- preparing ------------------------------------------------------------------------------- */

/* Whether the array has the parameter. The weights of a model with adapters are theirs alone. */
static bool is_in(const job *j, const ps__array *array, const ps_param_info *p) {
  const ps__unit *u = &j->t->plan->model->unit[p->unit];
  if (array->what == PS__ARRAY_UPDATED)
    return u->adapter || !ps__has_adapters(j->t);
  return !u->frozen;
}

/* In files with fused experts: the tensor that begins with parameter @i, as @spec, with its name in
 * @name. How many parameters are in it. */
static uint32_t fuse(const ps_model *m, uint32_t i, char name[PS_PARAM_NAME_BYTES],
                     ps_tensor_spec *spec) {
  const ps_param_info *p = &m->param[i];
  const uint32_t each = ps__fused_name(name, PS_PARAM_NAME_BYTES, p->name);
  spec->name = name;
  if (!each)
    return 1;
  spec->n_dims = 3;
  spec->shape[2] = p->shape[1];
  spec->shape[1] = each * p->shape[0];
  spec->shape[0] = m->cfg.n_experts;
  return each * m->cfg.n_experts;
}

typedef char disk_name[PS__PEFT_NAME_BYTES + PS__TOWER_PREFIX_BYTES];

/* The specs of experts of gpt-oss, one or two, beginning with @spec: how many. */
static uint32_t form_specs(job *j, uint32_t a, ps_tensor_spec *spec, disk_name *name, uint32_t n) {
  const ps_param_info *p = &j->t->plan->model->param[j->param[a][n]];
  const ps__form forms[2] = {j->o->mxfp4 ? PS__FORM_BLOCKS : PS__FORM_TRANSPOSED, PS__FORM_SCALES};
  for (uint32_t i = 0; i < (j->o->mxfp4 ? 2u : 1u); i++) {
    if (i) {
      spec[i] = spec[0];
      memcpy(name[i], name[0], sizeof *name);
      name[i][strlen(name[i]) - strlen("_blocks")] = 0;
      j->param[a][n + i] = j->param[a][n];
      j->n_of[a][n + i] = j->n_of[a][n];
      spec[i].name = name[i];
    }
    ps__form_spec(&spec[i], forms[i], p, j->t->plan->model->cfg.n_experts, name[i], sizeof *name);
    j->form[a][n + i] = (uint8_t)forms[i];
  }
  return j->o->mxfp4 ? 2 : 1;
}

static int by_width(const void *x, const void *y, void *file) {
  ps_tensor_info a, b;
  const uint32_t i = *(const uint32_t *)x, k = *(const uint32_t *)y;
  if (ps_tensors_info(file, i, &a) != PS_OK || ps_tensors_info(file, k, &b) != PS_OK)
    return 0;
  const uint64_t wa = a.bytes / (a.n ? a.n : 1), wb = b.bytes / (b.n ? b.n : 1);
  return wa != wb ? (wa < wb ? 1 : -1) : (i > k) - (i < k);
}

/* Where weights are written; adapters have no other parts. */
static ps_status open_carried(job *j) {
  carried *c = &j->carried;
  ps_tensor_info info;
  if (!j->t->plan->model->cfg.multimodal || ps__has_adapters(j->t))
    return PS_OK;
  PS_TRY(ps_tensors_open(&c->f, j->t->model_dir));
  c->idx = ps__calloc(ps_tensors_count(c->f), sizeof *c->idx);
  if (!c->idx)
    return no_memory(j->o);
  for (uint32_t i = 0; i < ps_tensors_count(c->f); i++) {
    PS_TRY(ps_tensors_info(c->f, i, &info));
    if (ps_model_carries(j->t->plan->model, info.name))
      c->idx[c->n++] = i;
  }
  qsort_r(c->idx, c->n, sizeof *c->idx, by_width, c->f);
  return PS_OK;
}

/* In which parameter @p of the array is written. */
static ps_dtype dtype_of(const ps__array *a, const ps_param_info *p) {
  return p->exact && a->what == PS__ARRAY_UPDATED ? PS_F32 : a->dtype;
}

/* Where @p is a layer's part of a tensor that all share: that tensor as @spec, with its name in
 * @name, whose parts the first layer's stands for. False: it is another layer's. */
static bool merge(const ps_model *m, const ps_param_info *p, char name[PS_PARAM_NAME_BYTES],
                  ps_tensor_spec *spec, ps__form *form) {
  const ps__slices as = ps__sliced_name(name, PS_PARAM_NAME_BYTES, p->name);
  *form = as == PS__SLICES_ROWS      ? PS__FORM_ROWS
          : as == PS__SLICES_COLUMNS ? PS__FORM_COLUMNS
                                     : PS__FORM_PLAIN;
  if (as == PS__SLICES_NONE)
    return true;
  spec->name = name;
  if (as != PS__SLICES_WHOLE)
    spec->shape[as == PS__SLICES_COLUMNS] *= m->cfg.n_layers;
  return m->unit[p->unit].layer == 1;
}

/* The specs of the array's tensors, by the names that they have on disk: those that are exact, so
 * that they are aligned, or the others. */
static void fill_own(job *j, uint32_t a, bool exact, ps_tensor_spec *specs, disk_name *name,
                     uint32_t *n) {
  const ps_model *m = j->t->plan->model;
  const ps__array *array = &j->o->array[a];
  const bool weights = array->what == PS__ARRAY_UPDATED,
             adapter = weights && ps__has_adapters(j->t);
  const uint32_t layout = adapter && m->cfg.multimodal ? PS__NAMES_NEW
                          : weights && j->carried.f    ? ps__tensors_names(j->carried.f)
                                                       : PS__NAMES_PLAIN;
  for (uint32_t i = 0, of = 1; i < m->n_params; i += of, of = 1) {
    const ps_param_info *p = &m->param[i];
    char fused[PS_PARAM_NAME_BYTES], peft[PS__PEFT_NAME_BYTES];
    if (!is_in(j, array, p) || (p->exact != 0) != exact)
      continue;
    ps_tensor_spec *s = &specs[*n];
    *s = (ps_tensor_spec){.name = p->name,
                          .dtype = dtype_of(array, p),
                          .n_dims = p->n_dims,
                          .shape = {p->shape[0], p->shape[1], p->shape[2]}};
    if (adapter)
      ps__peft_name(peft, p->name);
    if (array->dtype == (ps_dtype)PS__U8) { /* blocks */
      s->n_dims = 1;
      s->shape[0] = ps__array_bytes(j->t, p->unit, array->what, p->n);
    }
    ps__form form = PS__FORM_PLAIN;
    if (j->o->fused)
      of = fuse(m, i, fused, s);
    if (j->o->merged && !merge(m, p, fused, s, &form))
      continue;
    j->form[a][*n] = (uint8_t)form;
    ps__name_on_disk(name[*n], sizeof *name, layout, adapter ? peft : s->name);
    s->name = name[*n];
    j->param[a][*n] = i;
    j->n_of[a][*n] = of;
    const uint32_t specs_of =
        j->o->fused && ps__fused_transposed(p->name) ? form_specs(j, a, s, &name[*n], *n) : 1;
    *n += specs_of;
    atomic_fetch_add(&j->left[p->unit * PS__N_PARTS + part_of(array)], of * specs_of);
    if (!ps__array_at(j->t, p->unit, array->what, 0))
      atomic_fetch_add(&j->on_device, of * specs_of);
  }
}

/* All of them; those that are carried come last. */
static ps_status fill_specs(job *j, uint32_t a, ps_tensor_spec *specs, ps_tensor_info *info,
                            disk_name *name, uint32_t *n) {
  const bool weights = j->o->array[a].what == PS__ARRAY_UPDATED;
  fill_own(j, a, true, specs, name, n);
  fill_own(j, a, false, specs, name, n);
  for (uint32_t i = 0; weights && i < j->carried.n; i++) {
    PS_TRY(ps_tensors_info(j->carried.f, j->carried.idx[i], &info[i]));
    j->param[a][*n] = i;
    specs[*n] = (ps_tensor_spec){.name = info[i].name,
                                 .n_dims = info[i].n_dims,
                                 .file_dtype = info[i].dtype,
                                 .bytes = info[i].bytes};
    memcpy(specs[(*n)++].shape, info[i].shape, sizeof info[i].shape);
  }
  return PS_OK;
}

/* An adapter's weights are one file, as PEFT reads them. */
static ps_status create_writer(job *j, uint32_t a) {
  const ps_model *m = j->t->plan->model;
  const uint32_t most = m->n_params + j->carried.n + 2 * m->cfg.n_layers; /* two of MXFP4 */
  const ps__array *array = &j->o->array[a];
  const bool adapter = array->what == PS__ARRAY_UPDATED && ps__has_adapters(j->t);
  ps_tensor_spec *specs = ps__calloc(most, sizeof *specs);
  ps_tensor_info *info = ps__calloc(j->carried.n ? j->carried.n : 1, sizeof *info);
  disk_name *name = ps__calloc(most, sizeof *name);
  uint32_t n = 0;
  j->param[a] = ps__calloc(most, sizeof *j->param[a]);
  j->n_of[a] = ps__calloc(most, sizeof *j->n_of[a]);
  j->form[a] = ps__calloc(most, sizeof *j->form[a]);
  ps_status st = specs && info && name && j->param[a] && j->n_of[a] && j->form[a]
                     ? fill_specs(j, a, specs, info, name, &n)
                     : no_memory(j->o);
  const ps_base base = (ps_base)j->t->plan->model->lora.base;
  const char *const meta[] = {PS__BASE_MARK, j->t->base_mark, PS__BASE_DTYPE, ps_base_name(base)};
  const uint32_t n_meta = !adapter || !j->t->base_mark[0] ? 0 : base ? 2 : 1;
  if (st == PS_OK)
    st = ps__tensors_create(&j->writer[a], j->o->stage, j->o->dir, array->stem, specs, n,
                            adapter ? 0 : j->o->max_file_bytes, meta, n_meta);
  ps__free(specs);
  ps__free(info);
  ps__free(name);
  return st;
}

/* Units that are updated on the device come first, then the others in the order of their updates,
 * which is that of the forward pass. State whose update comes after the report comes last. */
static void order_of(const job *j, uint32_t unit, uint32_t part, uint32_t *phase, uint32_t *at) {
  const ps__spec *spec = &j->t->plan->spec;
  const bool split =
      part == PS__PART_STATE && (spec->update_split[unit] || spec->state_on_disk[unit]);
  *phase = ps__updated_on_device(spec, unit) ? 0 : split ? 2 : 1;
  *at = spec->embed_on_host && unit == 0 ? spec->n_units : unit;
}

static void place_file(const job *j, out_file *f) {
  uint64_t first, n;
  ps__tensors_in_file(j->writer[f->array], f->k, &first, &n);
  f->unit = n ? UINT32_MAX : 0;
  for (uint64_t i = first; i < first + n; i++) {
    uint32_t phase, unit;
    if (!j->n_of[f->array][i])
      continue;
    order_of(j, j->t->plan->model->param[j->param[f->array][i]].unit,
             part_of(&j->o->array[f->array]), &phase, &unit);
    f->phase = phase > f->phase ? phase : f->phase;
    f->unit = unit < f->unit ? unit : f->unit;
  }
}

static int by_order(const void *x, const void *y) {
  const out_file *a = x, *b = y;
  if (a->phase != b->phase)
    return a->phase < b->phase ? -1 : 1;
  if (a->unit != b->unit)
    return a->unit < b->unit ? -1 : 1;
  if (a->k != b->k)
    return a->k < b->k ? -1 : 1;
  return (a->array > b->array) - (a->array < b->array);
}

static ps_status prepare(job *j, uint32_t n_threads) {
  ps__output *o = j->o;
  size_t n = 0;
  j->left = ps__calloc((size_t)j->t->plan->model->n_units * PS__N_PARTS, sizeof *j->left);
  j->buffers = ps__malloc((size_t)n_threads * PIECE_BYTES);
  if (!j->left || !j->buffers)
    return no_memory(o);
  PS_TRY(open_carried(j));
  for (uint32_t a = 0; a < o->n_arrays; a++) {
    PS_TRY(create_writer(j, a));
    n += ps__tensors_n_files(j->writer[a]);
  }
  j->file = ps__calloc(n, sizeof *j->file);
  o->hashed = ps__calloc(n, sizeof *o->hashed);
  j->error = ps__calloc(n, sizeof *j->error);
  if (!j->file || !o->hashed || !j->error)
    return no_memory(o);
  for (uint32_t a = 0; a < o->n_arrays; a++)
    for (uint64_t k = 0; k < ps__tensors_n_files(j->writer[a]); k++) {
      out_file *f = &j->file[o->n_hashed++];
      *f = (out_file){.array = a, .k = k};
      place_file(j, f);
    }
  qsort(j->file, n, sizeof *j->file, by_order);
  return PS_OK;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* @n elements of the tensor, from @first on: where they lie, or in @buffer. */
static ps_status fetch(const job *j, const ps__array *a, const ps_param_info *p, uint64_t first,
                       uint64_t n, void *buffer, const void **out) {
  *out = ps__array_at(j->t, p->unit, a->what, p->offset + first);
  if (*out)
    return PS_OK;
  *out = buffer;
  return ps__array_read(j->t, p->unit, a->what, p->offset + first, n, buffer);
}

static ps_status write_tensor(job *j, ps__tensors_file *f, const ps__array *a,
                              const ps_param_info *p, void *buffer) {
  const bool blocks = a->dtype == (ps_dtype)PS__U8;
  const ps_dtype from = ps__array_dtype(j->t, p->unit, a->what), to = dtype_of(a, p);
  const uint64_t piece = PIECE_BYTES / sizeof(float);
  for (uint64_t first = 0; first < p->n; first += piece) {
    const uint64_t n = p->n - first < piece ? p->n - first : piece;
    const void *data;
    if (atomic_load(&j->failed))
      return PS_ECANCELLED;
    if (j->o->held)
      PS_TRY(ps__hold_check(j->t->hold));
    if (!blocks && (uint32_t)from == PS__I8) {
      ps__updated_get(j->t, p->unit, p->offset + first, n, to, buffer);
      data = buffer;
    } else {
      PS_TRY(fetch(j, a, p, first, n, buffer, &data));
    }
    if (!blocks && (uint32_t)from != PS__I8 && to != from) {
      ps__convert(buffer, to, data, from, n);
      data = buffer;
    }
    PS_TRY(ps__tensors_put(
        f, data, blocks ? ps__array_bytes(j->t, p->unit, a->what, n) : n * ps_dtype_bytes(to)));
  }
  return PS_OK;
}

/* After the last one that is not in the host's memory no thread of the writer calls the driver:
 * host ops that wait for the writer may hold back a device again. A tensor that fails stays
 * counted. */
static void note_read(job *j, const ps__array *a, const ps_param_info *p) {
  if (!ps__array_at(j->t, p->unit, a->what, 0) && atomic_fetch_sub(&j->on_device, 1) == 1)
    ps__engine_awaited(j->t->engine, false);
}

static ps_status write_held_tensor(job *j, ps__tensors_file *f, const ps__array *a,
                                   const ps_param_info *p, void *buffer) {
  const uint32_t part = part_of(a);
  if (!j->o->held)
    return write_tensor(j, f, a, p, buffer);
  if (!j->t->plan->model->unit[p->unit].frozen)
    PS_TRY(ps__hold_await(j->t->hold, p->unit, part));
  PS_TRY(write_tensor(j, f, a, p, buffer));
  note_read(j, a, p);
  if (atomic_fetch_sub(&j->left[p->unit * PS__N_PARTS + part], 1) == 1)
    ps__hold_release(j->t->hold, p->unit, part);
  return PS_OK;
}

static ps_status copy_carried(job *j, ps__tensors_file *f, uint32_t i, void *buffer) {
  ps_tensor_info info;
  PS_TRY(ps_tensors_info(j->carried.f, j->carried.idx[i], &info));
  for (uint64_t first = 0; first < info.bytes; first += PIECE_BYTES) {
    const uint64_t n = info.bytes - first < PIECE_BYTES ? info.bytes - first : PIECE_BYTES;
    if (atomic_load(&j->failed))
      return PS_ECANCELLED;
    PS_TRY(ps_tensors_read_bytes(j->carried.f, j->carried.idx[i], first, n, buffer));
    PS_TRY(ps__tensors_put(f, buffer, n));
  }
  return PS_OK;
}

static ps_status write_file(job *j, const out_file *of, ps__hashed *hashed, void *buffer) {
  ps_tensor_writer *w = j->writer[of->array];
  const ps__array *array = &j->o->array[of->array];
  uint64_t first, n;
  ps__tensors_file f;
  ps__tensors_in_file(w, of->k, &first, &n);
  ps_status st = ps__tensors_begin(&f, w, of->k);
  for (uint64_t i = first; st == PS_OK && i < first + n; i++) {
    if (!j->n_of[of->array][i])
      st = copy_carried(j, &f, j->param[of->array][i], buffer);
    const ps_param_info *p = &j->t->plan->model->param[j->param[of->array][i]];
    const ps__form form = (ps__form)j->form[of->array][i];
    for (uint32_t k = 0; st == PS_OK && k < j->n_of[of->array][i]; k++)
      st = form == PS__FORM_PLAIN ? write_held_tensor(j, &f, array, p + k, buffer)
           : form == PS__FORM_ROWS || form == PS__FORM_COLUMNS
               ? ps__form_write_merged(j->t, &f, array, p, form, buffer,
                                       PIECE_BYTES / sizeof(float), &j->failed)
               : ps__form_write(j->t, &f, array, p + k, form, buffer, PIECE_BYTES / sizeof(float),
                                &j->failed, j->error[of - j->file]);
  }
  return ps__tensors_end(&f, st, hashed);
}

static void write_task(void *arg, int64_t task, uint32_t worker) {
  job *j = arg;
  if (atomic_load(&j->failed))
    return;
  const ps_status st =
      write_file(j, &j->file[task], &j->o->hashed[task], j->buffers + (size_t)worker * PIECE_BYTES);
  uint32_t none = 0;
  if (st != PS_OK && atomic_compare_exchange_strong(&j->failed, &none, 1)) {
    j->st = st;
    snprintf(j->message, sizeof j->message, "%s", ps_last_error());
  }
}

static ps_status write_files(job *j, uint32_t n_threads) {
  ps__pool *pool;
  const uint32_t n = j->o->n_hashed < n_threads ? (uint32_t)j->o->n_hashed : n_threads;
  PS_TRY(ps__pool_create(&pool, n, "ps-write"));
  ps__pool_run(pool, (int64_t)j->o->n_hashed, write_task, j);
  ps__pool_destroy(pool);
  return j->st == PS_OK ? PS_OK : ps__fail(j->st, "%s", j->message);
}

uint32_t ps__cpus_beside_training(void) {
  const uint32_t half = ps__n_cpus() / 2;
  return half ? half : 1;
}

/* Hashing bounds a thread. */
static uint32_t n_threads_of(void) {
  const uint32_t half = ps__cpus_beside_training();
  return half < LEAST_THREADS ? LEAST_THREADS : half > MOST_THREADS ? MOST_THREADS : half;
}

ps_status ps__trainer_write_arrays(ps_trainer *t, ps__output *o) {
  job j = {.t = t, .o = o};
  const uint32_t n_threads = n_threads_of();
  ps_status st = prepare(&j, n_threads);
  if (st == PS_OK)
    st = write_files(&j, n_threads);
  double sum[2] = {0, 0};
  for (size_t i = 0; st == PS_OK && i < o->n_hashed; i++)
    for (int k = 0; k < 2; k++)
      sum[k] += j.error[i][k];
  o->rounding = sum[1] > 0 ? sqrt(sum[0] / sum[1]) : 0;
  for (uint32_t a = 0; a < o->n_arrays; a++) {
    if (st == PS_OK)
      st = ps_tensors_finish(j.writer[a]);
    else
      ps_tensors_abort(j.writer[a]);
    ps__free(j.param[a]);
    ps__free(j.n_of[a]);
    ps__free(j.form[a]);
  }
  ps__free(j.error);
  ps_tensors_close(j.carried.f);
  ps__free(j.carried.idx);
  ps__free(j.file);
  ps__free((void *)j.left);
  ps__free(j.buffers);
  return st;
}
