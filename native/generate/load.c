/* load.c - a generator's weights: read from files, or drawn for a benchmark. */
#include "core/mix64.h"
#include "generate/generate.h"
#include "model/adapter.h"
#include <math.h>
#include <string.h>

enum { PIECE = 1 << 21 }; /* elements of a tensor that are loaded at a time */
enum { DRAWN = 1 << 18 }; /* random numbers that are drawn; then they come again */

typedef struct loader {
  const ps__gen_plan *plan;
  ps_engine *engine;
  const ps__gen_files *files;
  char *host;  /* the host space */
  char *piece; /* of PIECE elements, on its way to the device */
  /* init_weights: 2 x DRAWN numbers of this mean and deviation, the second half as the first */
  char *drawn;
  float mean, std;
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

/* ---- drawn weights --------------------------------------------------------------------------- */

/* Uniform of the parameter's mean and deviation. A large model must be there in seconds: so few
 * numbers are drawn, and a piece begins anywhere among them. */
static void draw(loader *l, const ps_param_info *p, uint64_t n, char *dst) {
  const ps_dtype dt = l->plan->model->dt;
  const size_t each = ps_dtype_bytes(dt);
  if (!l->n_pieces || l->mean != p->init_mean || l->std != p->init_std) {
    const float width = p->init_std * sqrtf(12.0f);
    for (uint64_t i = 0; i < DRAWN; i++) {
      const float u = (float)(ps__mix64((i + 1) * PS__MIX_GAMMA) >> 40) * 0x1p-24f,
                  x = p->init_mean + width * (u - 0.5f);
      ps__dtypes[dt].from_f32(l->drawn + i * each, &x, 1);
    }
    memcpy(l->drawn + DRAWN * each, l->drawn, DRAWN * each);
    l->mean = p->init_mean;
    l->std = p->init_std;
  }
  const uint64_t from = ps__mix64(++l->n_pieces) % DRAWN;
  for (uint64_t i = 0; i < n; i += DRAWN)
    memcpy(dst + i * each, l->drawn + from * each, (n - i < DRAWN ? n - i : DRAWN) * each);
}

/* ---- loading --------------------------------------------------------------------------------- */

/* Elements of @p as @layer reads them, through the piece where it is on the device. */
static ps_status load_param(loader *l, const ps_param_info *p, uint32_t layer) {
  const ps__gen_plan *plan = l->plan;
  const ps__storage w = ps__weight_storage(plan->model);
  uint64_t idx = UINT64_MAX;
  ps_tensor_file *f = l->drawn ? NULL : find_param(l, p, &idx);
  const ps__gen_at unit = ps__gen_streams(plan, layer, p->unit)
                              ? ps__gen_source(plan, layer, p->unit)
                              : ps__gen_weights(plan, layer, p->unit);
  const bool host = unit.space == plan->at->host;
  for (uint64_t first = 0; first < p->n; first += PIECE) {
    const uint64_t n = p->n - first < PIECE ? p->n - first : PIECE;
    const uint64_t at = unit.offset + ps__stored_at(w, p->offset + first),
                   bytes = ps__stored_bytes(w, n);
    char *dst = host ? l->host + at : l->piece;
    if (l->drawn)
      draw(l, p, n, dst);
    else if (idx == UINT64_MAX)
      memset(dst, 0, bytes);
    else
      PS_TRY(ps_tensors_read(f, idx, first, n, plan->model->dt, dst));
    if (!host)
      PS_TRY(ps__engine_write(l->engine, unit.space, at, l->piece, bytes));
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
  const bool draws = p->cfg.init_weights;
  loader l = {.plan = p,
              .engine = engine,
              .files = f,
              .host = ps_engine_space(engine, p->at->host),
              .piece = ps__malloc(ps__stored_bytes(ps__weight_storage(p->model), PIECE)),
              .drawn = draws ? ps__malloc(2ull * DRAWN * ps_dtype_bytes(p->model->dt)) : NULL};
  const ps_status st = l.piece && (l.drawn || !draws)
                           ? load_all(&l, progress, user)
                           : ps__fail(PS_ENOMEM, "out of memory for a piece of the weights");
  ps__free(l.piece);
  ps__free(l.drawn);
  return st;
}
