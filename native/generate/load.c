/* load.c - a generator's weights: read from files, or drawn for a benchmark. */
#include "core/mix64.h"
#include "generate/generate.h"
#include "io/io.h"
#include "model/adapter.h"
#include <math.h>
#include <string.h>

enum { PIECE = 1 << 21 }; /* elements of a tensor that are loaded at a time */
enum { SPLIT = 1 << 12 }; /* of those, elements that a thread converts or quantizes at a time */
enum { DRAWN = 1 << 18 }; /* random numbers that are drawn; then they come again */
_Static_assert(DRAWN % SPLIT == 0, "drawn numbers are converted SPLIT at a time");

typedef struct loader {
  const ps__gen_plan *plan;
  ps_engine *engine;
  const ps__gen_files *files;
  char *host;  /* the host space */
  char *piece; /* of PIECE elements, on its way to the device */
  /* of a quantized base: PIECE elements that are to be quantized, and the threads for that */
  char *plain;
  ps__pool *pool;
  /* init_weights: 2 x DRAWN numbers of this mean and deviation, the second half as the first */
  char *drawn;
  float mean, std;
  ps_dtype dt; /* of the numbers */
  uint64_t n_pieces;
} loader;

/* ---- files ----------------------------------------------------------------------------------- */

ps_status ps__gen_files_open(const ps__gen_plan *p, const char *dir, ps__gen_files *f) {
  const ps_model *m = p->model;
  const char *adapter_dir = p->cfg.adapter_dir;
  ps__adapter_info what;
  if (!adapter_dir != !m->lora.rank)
    return ps__fail(PS_EINVAL,
                    "ps_generate_config: adapter_dir and lora belong together: ps_adapter_read() "
                    "says what an adapter's lora is");
  if (p->cfg.init_weights && adapter_dir)
    return ps__fail(PS_EINVAL, "%s with an adapter: an adapter is of a model that was read",
                    ps__field("init_weights"));
  if (p->cfg.init_weights)
    return PS_OK;
  PS_TRY(ps_tensors_open(&f->model, dir));
  PS_TRY(ps__model_check_tensors(m, f->model, dir, true));
  PS_TRY(ps__model_note_weights(m, f->model, dir));
  return adapter_dir ? ps__adapter_open_for(m, adapter_dir, dir, f->model, &f->adapters, &what)
                     : PS_OK;
}

void ps__gen_files_close(ps__gen_files *f) {
  ps_tensors_close(f->adapters);
  ps_tensors_close(f->model);
}

/* An adapter may have a tensor in place of the model's own, and lack some of its own, which are
 * zero: UINT64_MAX. */
static ps_tensor_file *find_param(const loader *l, const ps_param_info *p, uint64_t *idx) {
  const ps__gen_files *f = l->files;
  char name[PS__PEFT_NAME_BYTES];
  ps__peft_name(name, p->name);
  *idx = f->adapters ? ps_tensors_find(f->adapters, name) : UINT64_MAX;
  if (*idx != UINT64_MAX || l->plan->model->unit[p->unit].adapter)
    return f->adapters;
  *idx = ps_tensors_find(f->model, p->name);
  return f->model;
}

/* That of a parameter before it is quantized. */
static ps_dtype dtype_of(const loader *l, const ps_param_info *p) {
  return p->exact ? PS_F32 : l->plan->model->dt;
}

/* ---- drawn weights --------------------------------------------------------------------------- */

/* Uniform of the parameter's mean and deviation. A large model must be there in seconds: so few
 * numbers are drawn, and a piece begins anywhere among them. */
static void draw(loader *l, const ps_param_info *p, uint64_t n, char *dst) {
  const ps_dtype dt = dtype_of(l, p);
  const size_t each = ps_dtype_bytes(dt);
  if (!l->n_pieces || l->mean != p->init_mean || l->std != p->init_std || l->dt != dt) {
    const float width = p->init_std * sqrtf(12.0f);
    float x[SPLIT];
    for (uint64_t i = 0; i < DRAWN; i += SPLIT) {
      for (uint64_t k = 0; k < SPLIT; k++) {
        const float u = (float)(ps__mix64((i + k + 1) * PS__MIX_GAMMA) >> 40) * 0x1p-24f;
        x[k] = p->init_mean + width * (u - 0.5f);
      }
      ps__dtypes[dt].from_f32(l->drawn + i * each, x, SPLIT);
    }
    memcpy(l->drawn + DRAWN * each, l->drawn, DRAWN * each);
    l->mean = p->init_mean;
    l->std = p->init_std;
    l->dt = dt;
  }
  const uint64_t from = ps__mix64(++l->n_pieces) % DRAWN;
  for (uint64_t i = 0; i < n; i += DRAWN)
    memcpy(dst + i * each, l->drawn + from * each, (n - i < DRAWN ? n - i : DRAWN) * each);
}

/* ---- a quantized base ------------------------------------------------------------------------ */

typedef struct quantize_job {
  ps__storage as;
  ps_dtype dt;
  uint64_t n;
  const char *plain;
  char *dst;
} quantize_job;

static void quantize_part(void *arg, int64_t task, uint32_t worker) {
  const quantize_job *j = arg;
  float x[SPLIT];
  const uint64_t first = (uint64_t)task * SPLIT, n = j->n - first < SPLIT ? j->n - first : SPLIT;
  (void)worker;
  ps__convert(x, PS_F32, j->plain + first * ps_dtype_bytes(j->dt), j->dt, n);
  ps__blocks_quantize(j->dst + ps__stored_at(j->as, first), j->as, x, n);
}

/* @n elements of the loader's `plain`. */
static void quantize(const loader *l, ps__storage as, uint64_t n, char *dst) {
  quantize_job j = {as, l->plan->model->dt, n, l->plain, dst};
  ps__pool_run(l->pool, (int64_t)((n + SPLIT - 1) / SPLIT), quantize_part, &j);
}

/* Where a parameter lies: a space, BYTES from its start. */
static ps__gen_at place_of(const loader *l, const ps_param_info *p, uint32_t layer) {
  const ps__gen_plan *plan = l->plan;
  ps__gen_at at = ps__gen_streams(plan, layer, p->unit) ? ps__gen_source(plan, layer, p->unit)
                                                        : ps__gen_weights(plan, layer, p->unit);
  at.offset += ps__stored_at(ps__gen_storage(plan, p->unit), p->offset);
  return at;
}

/* The blocks that the file has, as they are. */
static ps_status load_blocks(loader *l, ps_tensor_file *f, uint64_t idx, const ps_param_info *p,
                             uint32_t layer) {
  const ps__gen_at at = place_of(l, p, layer);
  const uint64_t bytes = ps__stored_bytes(ps__gen_storage(l->plan, p->unit), p->n);
  if (at.space == l->plan->at->host)
    return ps__tensors_read_blocks(f, idx, l->host + at.offset);
  char *blocks = ps__malloc(bytes);
  if (!blocks)
    return ps__fail(PS_ENOMEM, "no memory left to read %s", p->name);
  ps_status st = ps__tensors_read_blocks(f, idx, blocks);
  if (st == PS_OK)
    st = ps__engine_write(l->engine, at.space, at.offset, blocks, bytes);
  ps__free(blocks);
  return st;
}

/* ---- loading --------------------------------------------------------------------------------- */

/* Elements of @p as @layer reads them, through the piece where it is on the device. */
static ps_status load_param(loader *l, const ps_param_info *p, uint32_t layer) {
  const ps__gen_plan *plan = l->plan;
  const uint32_t base = plan->model->unit[p->unit].base;
  const ps__storage as = ps__gen_storage(plan, p->unit);
  uint64_t idx = UINT64_MAX;
  ps_tensor_file *f = l->drawn ? NULL : find_param(l, p, &idx);
  if (base == PS_BASE_FP8 && f && ps__tensors_keep_blocks(f, idx))
    return load_blocks(l, f, idx, p, layer);
  const ps__gen_at to = place_of(l, p, layer);
  const bool host = to.space == plan->at->host;
  for (uint64_t first = 0; first < p->n; first += PIECE) {
    const uint64_t n = p->n - first < PIECE ? p->n - first : PIECE,
                   at = to.offset + ps__stored_at(as, first), bytes = ps__stored_bytes(as, n);
    char *dst = host ? l->host + at : l->piece, *plain = base ? l->plain : dst;
    if (l->drawn)
      draw(l, p, n, plain);
    else if (idx == UINT64_MAX)
      memset(plain, 0, n * ps_dtype_bytes(dtype_of(l, p)));
    else
      PS_TRY(ps_tensors_read(f, idx, first, n, dtype_of(l, p), plain));
    if (base)
      quantize(l, as, n, dst);
    if (!host)
      PS_TRY(ps__engine_write(l->engine, to.space, at, l->piece, bytes));
  }
  return PS_OK;
}

static ps_status load_all(loader *l, ps_progress_fn progress, void *user) {
  const ps_model *m = l->plan->model;
  const ps__storage w = ps__weight_storage(m);
  uint64_t done = 0;
  for (uint32_t i = 0; i < m->n_params; i++) {
    const ps_param_info *p = &m->param[i];
    PS_TRY(load_param(l, p, m->unit[p->unit].layer));
    if (p->unit == 0 && ps__tied(m))
      PS_TRY(load_param(l, p, ps__head_layer(m)));
    done += ps__stored_bytes(w, p->n);
    if (progress)
      progress(user, l->drawn ? "drawing weights" : "loading weights", done,
               ps__stored_bytes(w, m->n_elements));
  }
  return PS_OK;
}

ps_status ps__gen_load(const ps__gen_plan *p, ps_engine *engine, const ps__gen_files *f,
                       ps_progress_fn progress, void *user) {
  const bool draws = p->cfg.init_weights, quantizes = p->model->lora.base;
  const uint64_t bytes = (uint64_t)PIECE * sizeof(float);
  loader l = {.plan = p,
              .engine = engine,
              .files = f,
              .host = ps_engine_space(engine, p->at->host),
              .piece = ps__malloc(bytes),
              .plain = quantizes ? ps__malloc(bytes) : NULL,
              .drawn = draws ? ps__malloc(2ull * DRAWN * sizeof(float)) : NULL};
  ps_status st = l.piece && (l.drawn || !draws) && (l.plain || !quantizes)
                     ? PS_OK
                     : ps__fail(PS_ENOMEM, "out of memory for a piece of the weights");
  if (st == PS_OK && quantizes)
    st = ps__pool_create(&l.pool, ps__n_cpus(), "ps-quantize");
  if (st == PS_OK)
    st = load_all(&l, progress, user);
  if (l.pool)
    ps__pool_destroy(l.pool);
  ps__free(l.piece);
  ps__free(l.plain);
  ps__free(l.drawn);
  return st;
}
