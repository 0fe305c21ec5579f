/* sliced.c - tensors that all layers of a model share, as the parts that each layer has: Gemma 4's
 * per-layer embeddings. On disk
 *
 *   model.embed_tokens_per_layer.weight      [V, L e]   layer l has columns [l e, (l+1) e)
 *   model.per_layer_model_projection.weight  [L e, D]   layer l has rows [l e, (l+1) e)
 *   model.per_layer_projection_norm.weight   [e]        is layer 0's here
 *
 * and here a layer's part has the name model.layers.l. and the rest. */
#include "io/tensor_file.h"
#include "core/core.h"
#include "core/dtype.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char TABLE[] = "embed_tokens_per_layer.weight",
                  CONTEXT[] = "per_layer_model_projection.weight",
                  NORM[] = "per_layer_projection_norm.weight", MODEL[] = "model.";
enum { MAX_NAME = 128 };

ps__slices ps__sliced_name(char *out, size_t bytes, const char *param) {
  static const struct {
    const char *name;
    ps__slices as;
  } of[] = {{TABLE, PS__SLICES_COLUMNS}, {CONTEXT, PS__SLICES_ROWS}, {NORM, PS__SLICES_WHOLE}};
  static const char layers[] = "model.layers.";
  const char *rest = strncmp(param, layers, sizeof layers - 1) ? NULL : param + sizeof layers - 1;
  rest = rest ? strchr(rest, '.') : NULL;
  for (size_t i = 0; rest && i < sizeof of / sizeof *of; i++)
    if (!strcmp(rest + 1, of[i].name)) {
      snprintf(out, bytes, "%s%s", MODEL, of[i].name);
      return of[i].as;
    }
  return PS__SLICES_NONE;
}

static size_t find(const ps_tensor_file *f, const char *rest) {
  char name[MAX_NAME];
  snprintf(name, sizeof name, "%s%s", MODEL, rest);
  size_t i = 0;
  while (i < f->n && strcmp(f->tensors[i].name, name))
    i++;
  return i;
}

static ps_status no_memory(const char *name) {
  return ps__fail(PS_ENOMEM, "no memory left for the layers of tensor %s", name);
}

static ps_status give_name(tensor *t, uint64_t layer, const char *rest) {
  char name[MAX_NAME];
  snprintf(name, sizeof name, "model.layers.%" PRIu64 ".%s", layer, rest);
  t->info.name = t->name = ps__strdup(name);
  return t->name ? PS_OK : no_memory(rest);
}

/* Part @i of @n of @of. */
static ps_status cut(tensor *out, const tensor *of, const char *rest, uint64_t i, uint64_t n) {
  const bool columns = rest == TABLE;
  *out = *of;
  out->info.shape[columns] = of->info.shape[columns] / n;
  out->info.n = of->info.n / n;
  out->info.bytes = of->info.bytes / n;
  if (columns) {
    out->row_stride = of->info.bytes / of->info.shape[0];
    out->begin += i * (out->row_stride / n);
  } else {
    out->begin += i * out->info.bytes;
  }
  return give_name(out, i, rest);
}

static ps_status split(ps_tensor_file *f, size_t at, const char *rest, uint64_t n) {
  const tensor of = f->tensors[at];
  for (uint64_t i = 0; i < n; i++) {
    tensor t;
    PS_TRY(cut(&t, &of, rest, i, n));
    PS_TRY(ps__tensors_part(f, at, i, &t));
  }
  ps__free(of.name);
  return PS_OK;
}

/* Parts of @e rows or columns of tensor @at; 0: it is not there, or is not made of such. */
static uint64_t parts_of(const ps_tensor_file *f, size_t at, uint32_t dim, uint64_t e) {
  const ps_tensor_info *t = at < f->n ? &f->tensors[at].info : NULL;
  return t && e && t->n && t->n_dims == 2 && t->shape[dim] % e == 0 ? t->shape[dim] / e : 0;
}

ps_status ps__tensors_slice(ps_tensor_file *f, size_t most, bool *any) {
  const size_t norm = find(f, NORM), table = find(f, TABLE), context = find(f, CONTEXT);
  const uint64_t e = norm < f->n && f->tensors[norm].info.n_dims == 1
                         ? f->tensors[norm].info.shape[0]
                         : 0,
                 n = parts_of(f, table, 1, e), m = parts_of(f, context, 0, e);
  *any = false;
  if (!n || m != n)
    return PS_OK; /* what the model lacks is then named */
  if (2 * n > most - f->n)
    return ps__fail(PS_EFORMAT, "%s: tensor \"%s\" is of %" PRIu64 " layers: too many",
                    f->files[f->tensors[table].file].path, f->tensors[table].name, n);
  *any = true;
  char *old = f->tensors[norm].name;
  const ps_status st = give_name(&f->tensors[norm], 0, NORM);
  if (st != PS_OK) {
    f->tensors[norm].info.name = f->tensors[norm].name = old;
    return st;
  }
  ps__free(old);
  PS_TRY(split(f, table, TABLE, n));
  return split(f, context, CONTEXT, n);
}

ps_status ps__tensors_read_strided(const ps_tensor_file *f, const tensor *t, uint64_t first,
                                   uint64_t n, ps_dtype dtype, void *dst) {
  const data_file *d = &f->files[t->file];
  const uint32_t kind = ps__dtype_of_file(t->info.dtype);
  const uint64_t cols = t->info.shape[1];
  const size_t from = ps__dtypes[kind].bytes, to = ps__dtypes[dtype].bytes;
  _Alignas(64) char piece[16384];
  for (uint64_t done = 0; done < n;) {
    const uint64_t row = (first + done) / cols, col = (first + done) % cols,
                   most = sizeof piece / from, left = cols - col < n - done ? cols - col : n - done,
                   m = left < most ? left : most;
    char *out = (char *)dst + done * to;
    PS_TRY(ps__pread_all(d->fd, d->path, kind == (uint32_t)dtype ? out : piece, m * from,
                         t->begin + row * t->row_stride + col * from));
    if (kind != (uint32_t)dtype)
      ps__convert(out, dtype, piece, kind, m);
    done += m;
  }
  return PS_OK;
}
