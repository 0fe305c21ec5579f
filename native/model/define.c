/* define.c - making and reading layer definitions. */
#include "model/define.h"
#include "core/core.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static void note(ps__layer_def *d, ps_status st) {
  if (d->status == PS_OK)
    d->status = st;
}

/* Room for one more element; false where there was an error before or memory is out. */
static bool grow(ps__layer_def *d, void **list, size_t n, size_t *cap, size_t each) {
  if (d->status != PS_OK)
    return false;
  if (!ps__grow(list, n, cap, each))
    note(d, ps__fail(PS_ENOMEM, "out of memory for a layer's definition"));
  return d->status == PS_OK;
}

uint8_t ps__def_tensor(ps__layer_def *d, const char *name, ps__row_kind rows, uint64_t cols,
                       uint32_t dt) {
  if (d->n_tensors == PS__SET_BITS) {
    note(d, ps__fail(PS_EINTERNAL, "a layer has more than %d tensors", PS__SET_BITS));
    return 0;
  }
  if (d->n_tensors == 0)
    d->input = d->output = d->grad = d->loss = d->logits = d->expert_ids = PS__NONE;
  d->tensor[d->n_tensors] = (ps__tensor_def){.name = name,
                                             .row_bytes = cols * ps__dtypes[dt].bytes,
                                             .rows = rows,
                                             .dt = dt,
                                             .saved = PS__NONE};
  return (uint8_t)d->n_tensors++;
}

void ps__def_saved(ps__layer_def *d, uint8_t tensor, const char *name, uint32_t rank) {
  uint32_t i = 0;
  while (i < d->n_saved && strcmp(d->saved[i].name, name))
    i++;
  if (i == PS__MAX_SAVED) {
    note(d, ps__fail(PS_EINTERNAL, "a layer saves more than %d activations", PS__MAX_SAVED));
    return;
  }
  if (i == d->n_saved)
    d->saved[d->n_saved++] = (ps__saved_def){.name = name, .rank = rank};
  if (d->tensor[tensor].rows == PS__ROWS_STATE)
    d->saved[i].state_bytes += d->tensor[tensor].row_bytes;
  else
    d->saved[i].row_bytes += d->tensor[tensor].row_bytes;
  d->tensor[tensor].saved = (int)i;
}

void ps__def_carried(ps__layer_def *d, uint8_t tensor, ps__carried as) {
  d->tensor[tensor].carried = as;
}

uint32_t ps__def_counted(ps__layer_def *d, uint8_t tensor, const char *what) {
  if (d->n_counted == PS__MAX_COUNTED) {
    note(d, ps__fail(PS_EINTERNAL, "a layer counts flushed values of more than %d tensors",
                     PS__MAX_COUNTED));
    return 0;
  }
  d->counted[d->n_counted] = (ps__counted){what, tensor};
  return ++d->n_counted;
}

static void add_param(ps__layer_def *d, const char *name, ps_param_role role, uint64_t rows,
                      uint64_t cols, uint64_t offset) {
  if (!grow(d, (void **)&d->param, d->n_params, &d->cap_params, sizeof *d->param))
    return;
  d->param[d->n_params++] =
      (ps__param_def){.name = name,
                      .role = role,
                      .n_dims = cols ? 2 : 1,
                      .rows = rows,
                      .cols = cols ? cols : 1,
                      .offset = offset,
                      .init_mean = role == PS_PARAM_NORM || role == PS_PARAM_CONSTANT ? 1.0f : 0.0f,
                      .init_std = role == PS_PARAM_MATRIX ? 0.02f : 0.0f};
}

const char *ps__def_name(ps__layer_def *d, const char *format, uint32_t i) {
  char name[PS_PARAM_NAME_BYTES];
  snprintf(name, sizeof name, format, i);
  if (!grow(d, (void **)&d->name, d->n_names, &d->cap_names, sizeof *d->name))
    return "";
  char *own = ps__strdup(name);
  if (!own) {
    note(d, ps__fail(PS_ENOMEM, "out of memory for a layer's definition"));
    return "";
  }
  return d->name[d->n_names++] = own;
}

void ps__def_what(ps__layer_def *d, const char *what) {
  if (d->n_spans && d->status == PS_OK)
    d->span[d->n_spans - 1].what = what;
}

void ps__def_init(ps__layer_def *d, double mean, double std) {
  if (d->n_params == 0 || d->status != PS_OK)
    return;
  d->param[d->n_params - 1].init_mean = (float)mean;
  d->param[d->n_params - 1].init_std = (float)std;
}

void ps__def_init_uniform(ps__layer_def *d, double limit) {
  ps__def_init(d, 0, limit / sqrt(3.0)); /* the standard deviation of that distribution */
  if (d->n_params && d->status == PS_OK)
    d->param[d->n_params - 1].init_uniform = true;
}

static uint16_t add_span(ps__layer_def *d, ps__span_def span) {
  if (d->n_spans > UINT16_MAX)
    note(d, ps__fail(PS_EINTERNAL, "a layer has more than 65536 spans of parameters"));
  if (!grow(d, (void **)&d->span, d->n_spans, &d->cap_spans, sizeof *d->span))
    return 0;
  d->span[d->n_spans] = span;
  return (uint16_t)d->n_spans++;
}

void ps__def_unit(ps__layer_def *d, bool frozen) {
  if (!grow(d, (void **)&d->unit, d->n_units, &d->cap_units, sizeof *d->unit))
    return;
  d->unit[d->n_units++] =
      (ps__unit_def){.first_span = d->n_spans, .first_param = d->n_params, .frozen = frozen};
}

void ps__def_adapter_unit(ps__layer_def *d, bool frozen) {
  ps__def_unit(d, frozen);
  if (d->status == PS_OK)
    d->unit[d->n_units - 1].adapter = true;
}

void ps__def_exact_unit(ps__layer_def *d) {
  ps__def_unit(d, true);
  if (d->status == PS_OK)
    d->unit[d->n_units - 1].exact = true;
}

void ps__def_base(ps__layer_def *d, uint32_t base) { d->base = base; }

/* The unit of the next parameter: the last one or, where that is kept otherwise, a new one. */
static ps__unit_def *unit_of(ps__layer_def *d, const char *name, bool quantizes, uint64_t cols) {
  if (d->n_units == 0)
    ps__def_unit(d, false);
  if (d->status != PS_OK)
    return NULL;
  ps__unit_def *u = &d->unit[d->n_units - 1];
  const uint32_t base = u->frozen && !u->adapter && quantizes ? d->base : 0;
  if (base && cols % PS__SPAN_ALIGN)
    note(d, ps__fail(PS_EINVAL,
                     "%s has %llu columns, and a quantized base has multiples of %d: leave %s out",
                     name, (unsigned long long)cols, PS__SPAN_ALIGN, ps__field("lora.base")));
  if (u->n_params && u->base != base)
    ps__def_unit(d, u->frozen);
  if (d->status != PS_OK)
    return NULL;
  u = &d->unit[d->n_units - 1];
  u->base = base;
  return u;
}

/* @channels: on disk there is a dimension of 1 between its two. */
static uint16_t new_span(ps__layer_def *d, const char *name, ps_param_role role, uint64_t rows,
                         uint64_t cols, bool channels) {
  ps__unit_def *u = unit_of(d, name, role == PS_PARAM_MATRIX && !channels, cols);
  if (!u)
    return 0;
  const uint64_t n = rows * (cols ? cols : 1);
  const uint16_t span = add_span(
      d, (ps__span_def){.offset = u->n, .n = n, .unit = d->n_units - 1, .frozen = u->frozen});
  add_param(d, name, role, rows, cols, u->n);
  if (channels && d->status == PS_OK)
    d->param[d->n_params - 1].n_dims = 3;
  u->n_spans++;
  u->n_params++;
  u->n = ps__span_round(u->n + n);
  return span;
}

uint16_t ps__def_param(ps__layer_def *d, const char *name, ps_param_role role, uint64_t rows,
                       uint64_t cols) {
  return new_span(d, name, role, rows, cols, false);
}

uint16_t ps__def_channels(ps__layer_def *d, const char *name, uint64_t rows, uint64_t cols) {
  return new_span(d, name, PS_PARAM_MATRIX, rows, cols, true);
}

void ps__def_param_after(ps__layer_def *d, const char *name, ps_param_role role, uint64_t rows,
                         uint64_t cols) {
  if (d->n_spans == 0 || d->status != PS_OK)
    return;
  ps__unit_def *u = &d->unit[d->n_units - 1];
  ps__span_def *s = &d->span[d->n_spans - 1];
  add_param(d, name, role, rows, cols, s->offset + s->n);
  s->n += rows * (cols ? cols : 1);
  u->n_params++;
  u->n = ps__span_round(s->offset + s->n);
}

uint16_t ps__def_split(ps__layer_def *d, uint64_t n) {
  if (d->n_spans == 0 || d->status != PS_OK)
    return 0;
  ps__span_def rest = d->span[d->n_spans - 1];
  if (n % PS__SPAN_ALIGN || n >= rest.n) {
    note(d, ps__fail(PS_EINTERNAL, "a span of %llu elements is cut at %llu",
                     (unsigned long long)rest.n, (unsigned long long)n));
    return 0;
  }
  d->span[d->n_spans - 1].n = n;
  d->unit[d->n_units - 1].n_spans++;
  rest.offset += n;
  rest.n -= n;
  return add_span(d, rest);
}

uint16_t ps__def_tied(ps__layer_def *d, uint64_t n, bool frozen) {
  return add_span(d, (ps__span_def){.n = n, .of_embedding = true, .frozen = frozen});
}

static bool is_frozen(const ps__layer_def *d, ps__sym y) {
  return y.kind == PS__SYM_GRAD && d->span[y.id].frozen;
}

/* Whether all that the op writes are gradients of frozen parameters. */
static bool is_idle(const ps__layer_def *d, const ps__sym *sym, size_t n_syms) {
  size_t frozen = 0, writes = 0;
  for (size_t i = 0; i < n_syms; i++) {
    writes += (sym[i].mode & PS_WRITE) != 0;
    frozen += is_frozen(d, sym[i]);
  }
  return frozen && frozen == writes;
}

/* A tensor in the place of a frozen span's gradient, the @k-th one of an op. Ops share them: a
 * definition has as many as one of its ops writes, each as large as the largest span asks for. */
static ps__sym unread(ps__layer_def *d, ps__sym y, uint32_t k) {
  const uint64_t n = d->span[y.id].n, bytes = n * ps_dtype_bytes(d->dt);
  for (uint32_t t = 0; t < d->n_tensors; t++)
    if (strcmp(d->tensor[t].name, "unread") == 0 && k-- == 0) {
      if (d->tensor[t].row_bytes < bytes)
        d->tensor[t].row_bytes = bytes;
      return PS__W((uint8_t)t);
    }
  return PS__W(ps__def_tensor(d, "unread", PS__ROWS_ONE, n, d->dt));
}

static ps__op_def op_def(ps__layer_def *d, const ps_kernel *kernel, const void *args,
                         size_t args_bytes, const ps__sym *sym, size_t n_syms) {
  ps__op_def op = {.kernel = kernel, .args_bytes = (uint16_t)args_bytes};
  uint32_t n_unread = 0;
  for (size_t i = 0; i < n_syms; i++)
    if (sym[i].mode && op.n_syms < PS__OP_MAX_SYMS) {
      if (!op.what && (sym[i].kind == PS__SYM_PARAM || sym[i].kind == PS__SYM_GRAD))
        op.what = d->span[sym[i].id].what;
      op.has_unread |= is_frozen(d, sym[i]);
      op.sym[op.n_syms++] = is_frozen(d, sym[i]) ? unread(d, sym[i], n_unread++) : sym[i];
    }
  memcpy(op.args, args, args_bytes);
  return op;
}

void ps__def_op(ps__layer_def *d, bool backward, bool sliced, const ps_kernel *kernel,
                const void *args, size_t args_bytes, const ps__sym *sym, size_t n_syms) {
  ps__op_def **list = backward ? &d->bwd : &d->fwd;
  uint32_t *n = backward ? &d->n_bwd : &d->n_fwd;
  if (d->status != PS_OK || is_idle(d, sym, n_syms))
    return;
  if (args_bytes > PS__ARGS_BYTES || *n == PS__SET_BITS)
    note(d, ps__fail(PS_EINTERNAL, "op %s of a layer: %zu bytes of arguments, op %u of the pass",
                     kernel->name, args_bytes, *n));
  if (!grow(d, (void **)list, *n, backward ? &d->cap_bwd : &d->cap_fwd, sizeof **list))
    return;
  ps__op_def *op = &(*list)[(*n)++];
  *op = op_def(d, kernel, args, args_bytes, sym, n_syms);
  op->sliced = sliced;
  for (size_t i = 0; i < n_syms; i++)
    d->counts_routed |= sym[i].mode && sym[i].kind == PS__SYM_ROUTED;
}

/* ---- derived --------------------------------------------------------------------------------- */

/* Adds the tensors that @op accesses in @mode. */
static void add_accessed(ps__set *set, const ps__op_def *op, uint32_t mode) {
  for (uint32_t i = 0; i < op->n_syms; i++)
    if (ps__sym_is_tensor(op->sym[i]) && (op->sym[i].mode & mode))
      ps__put(set, op->sym[i].id);
}

/* Whether the op writes a tensor of the set. */
static bool writes_any(const ps__op_def *op, const ps__set *set) {
  for (uint32_t i = 0; i < op->n_syms; i++)
    if (ps__sym_is_tensor(op->sym[i]) && (op->sym[i].mode & PS_WRITE) &&
        ps__in(*set, op->sym[i].id))
      return true;
  return false;
}

/* Sets are numbered by rank. */
static ps_status number_sets(ps__layer_def *d) {
  d->n_sets = 0;
  for (uint32_t i = 0; i < d->n_saved; i++) {
    uint32_t below = 0;
    for (uint32_t j = 0; j < d->n_saved; j++) {
      bool counted = d->saved[j].rank >= d->saved[i].rank;
      for (uint32_t k = 0; k < j; k++)
        counted |= d->saved[k].rank == d->saved[j].rank;
      below += !counted;
    }
    d->saved[i].set = below;
    if (below + 1 > d->n_sets)
      d->n_sets = below + 1;
  }
  if (d->n_sets > PS__MAX_SAVED_SETS)
    return ps__fail(PS_EINTERNAL, "a layer saves %u sets of activations: at most %d", d->n_sets,
                    PS__MAX_SAVED_SETS);
  if (d->n_saved && (d->input == PS__NONE || d->tensor[d->input].saved == PS__NONE ||
                     d->saved[d->tensor[d->input].saved].set != 0))
    return ps__fail(PS_EINTERNAL, "a layer that saves activations must save its input first");
  return PS_OK;
}

/* Sets by the tensors' rows. */
static void derive_rows(ps__layer_def *d, ps__set written, ps__set grads) {
  for (uint32_t t = 0; t < d->n_tensors; t++) {
    const uint32_t rows = d->tensor[t].rows;
    if (d->tensor[t].carried) {
      ps__put(&d->carried, t);
      if (ps__in(grads, t))
        ps__put(&d->grad_carried, t);
    } else if (ps__rows_of_group(rows) && ps__in(written, t))
      ps__put(&d->group, t);
    else if (ps__rows_of_group(rows) && ps__in(grads, t))
      ps__put(&d->grad_group, t);
    else if (rows == PS__ROWS_PASS)
      ps__put(&d->of_pass, t);
    else if (rows == PS__ROWS_STEP)
      ps__put(&d->of_step, t);
  }
  d->group_sources = d->group;
  for (uint32_t i = d->n_fwd; i-- > 0;)
    if (writes_any(&d->fwd[i], &d->group_sources))
      add_accessed(&d->group_sources, &d->fwd[i], PS_READ);
  d->group_sources = ps__without(d->group_sources, d->group);
}

ps_status ps__def_finish(ps__layer_def *d) {
  ps__set written = {{0}}, read = {{0}}, grads = {{0}};
  if (d->status != PS_OK)
    return d->status;
  PS_TRY(number_sets(d));
  for (uint32_t i = 0; i < d->n_fwd; i++)
    add_accessed(&written, &d->fwd[i], PS_WRITE);
  for (uint32_t i = 0; i < d->n_bwd; i++) {
    add_accessed(&read, &d->bwd[i], PS_READ);
    add_accessed(&grads, &d->bwd[i], PS_WRITE);
  }
  d->made = written;
  if (d->input != PS__NONE)
    ps__put(&d->made, (uint32_t)d->input);
  d->needs = ps__common(read, d->made);
  derive_rows(d, written, grads);
  return PS_OK;
}

void ps__def_free(ps__layer_def *d) {
  if (!d)
    return;
  for (uint32_t i = 0; i < d->n_names; i++)
    ps__free(d->name[i]);
  ps__free(d->name);
  ps__free(d->param);
  ps__free(d->span);
  ps__free(d->unit);
  ps__free(d->fwd);
  ps__free(d->bwd);
  ps__free(d);
}

/* ---- reading --------------------------------------------------------------------------------- */

void ps__op_args(const ps__op_def *op, const ps__chunk_shape *c, void *args) {
  memcpy(args, op->args, op->args_bytes);
  op->kernel->info->bind(args, c);
}

bool ps__op_of_pass(const ps__layer_def *d, const ps__op_def *op) {
  return writes_any(op, &d->of_pass) || writes_any(op, &d->of_step);
}

ps__set ps__recompute(const ps__layer_def *d, ps__set need, ps__set have) {
  ps__set ops = {{0}};
  need = ps__without(need, have);
  for (uint32_t i = d->n_fwd; i-- > 0;) {
    if (!writes_any(&d->fwd[i], &need))
      continue;
    ps__put(&ops, i);
    add_accessed(&need, &d->fwd[i], PS_READ);
    need = ps__without(need, have);
  }
  return ops;
}

uint64_t ps__saved_set_bytes(const ps__layer_def *d, uint32_t set, uint32_t n_tokens) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < d->n_saved; i++)
    if (d->saved[i].set == set)
      bytes += ps__saved_bytes(&d->saved[i], n_tokens);
  return bytes;
}
