/* program.c - what one step does: ops in program order, checked as they are added. */
#include "engine/schedule.h"
#include <string.h>

const char *ps__op_name(const ps__op *op) { return op->kernel ? op->kernel->name : "copy"; }

ps_status ps_program_create(ps_program **out, uint32_t n_spaces, uint32_t n_streams) {
  if (n_spaces == 0 || n_spaces > PS_MAX_SPACES)
    return ps__fail(PS_EINVAL, "program: n_spaces %u is not in 1..%d", n_spaces, PS_MAX_SPACES);
  if (n_streams == 0 || n_streams > PS_MAX_STREAMS)
    return ps__fail(PS_EINVAL, "program: n_streams %u is not in 1..%d", n_streams, PS_MAX_STREAMS);
  ps_program *p = ps__calloc(1, sizeof *p);
  if (!p)
    return ps__fail(PS_ENOMEM, "program: out of memory");
  p->list.n_spaces = n_spaces;
  p->list.n_streams = n_streams;
  *out = p;
  return PS_OK;
}

void ps_program_destroy(ps_program *p) {
  if (!p)
    return;
  ps__free(p->list.ops);
  ps__free(p->list.access);
  ps__free(p->list.args);
  ps__free(p->clocks);
  ps__free(p);
}

uint64_t ps_program_n_ops(const ps_program *program) { return program->list.n_ops; }

static bool overlap(const ps_access *a, const ps_access *b) {
  return a->space == b->space && a->offset < b->offset + b->bytes &&
         b->offset < a->offset + a->bytes;
}

static ps_status check_access(const ps__oplist *l, const ps_op *op, uint32_t i, const char *name) {
  const ps_access *a = &op->access[i];
  if (a->space >= l->n_spaces)
    return ps__fail(PS_EINVAL, "op %zu (%s): access %u: space %u is not below %u", l->n_ops, name,
                    i, a->space, l->n_spaces);
  if (a->mode < PS_READ || a->mode > PS_READ_WRITE)
    return ps__fail(PS_EINVAL, "op %zu (%s): access %u: mode %u is not read, write or both",
                    l->n_ops, name, i, a->mode);
  if (a->bytes == 0)
    return ps__fail(PS_EINVAL, "op %zu (%s): access %u: bytes is 0", l->n_ops, name, i);
  if (a->offset > UINT64_MAX - a->bytes)
    return ps__fail(PS_EINVAL, "op %zu (%s): access %u: offset %llu + bytes %llu overflows",
                    l->n_ops, name, i, (unsigned long long)a->offset, (unsigned long long)a->bytes);
  for (uint32_t j = 0; j < i; j++)
    if (((a->mode | op->access[j].mode) & PS_WRITE) && overlap(a, &op->access[j]))
      return ps__fail(PS_EINVAL, "op %zu (%s): accesses %u and %u overlap and one of them writes",
                      l->n_ops, name, j, i);
  return PS_OK;
}

static ps_status check_op(const ps__oplist *l, const ps_op *op) {
  const char *name = op->kernel ? op->kernel->name : "copy";
  if (!name)
    return ps__fail(PS_EINVAL, "op %zu: the name of its kernel is NULL", l->n_ops);
  if (l->n_ops >= (size_t)1 << 30)
    return ps__fail(PS_EINVAL, "a program has at most %d ops", 1 << 30);
  if (op->stream >= l->n_streams)
    return ps__fail(PS_EINVAL, "op %zu (%s): stream %u is not below %u", l->n_ops, name, op->stream,
                    l->n_streams);
  if (op->n_access > PS_MAX_ACCESSES || (op->n_access && !op->access))
    return ps__fail(PS_EINVAL, "op %zu (%s): n_access %u is not in 0..%d, or access is NULL",
                    l->n_ops, name, op->n_access, PS_MAX_ACCESSES);
  if (op->args_bytes && !op->args)
    return ps__fail(PS_EINVAL, "op %zu (%s): args is NULL and args_bytes is %u", l->n_ops, name,
                    op->args_bytes);
  for (uint32_t i = 0; i < op->n_access; i++)
    PS_TRY(check_access(l, op, i, name));
  if (!op->kernel && (op->n_access != 2 || op->access[0].mode != PS_READ ||
                      op->access[1].mode != PS_WRITE || op->access[0].bytes != op->access[1].bytes))
    return ps__fail(
        PS_EINVAL, "op %zu (copy): access must be one read and one write of equal bytes", l->n_ops);
  return PS_OK;
}

/* Make room for @more items beside the @n that are there. */
static bool reserve(void **items, size_t n, size_t more, size_t *cap, size_t item_bytes) {
  if (n + more <= *cap)
    return true;
  size_t want = n + more + *cap / 2 + 64;
  void *p = want > SIZE_MAX / item_bytes ? NULL : ps__realloc(*items, want * item_bytes);
  if (!p)
    return false;
  *items = p;
  *cap = want;
  return true;
}

ps_status ps__program_reserve(ps_program *p, size_t n_ops, size_t n_access, size_t args_bytes) {
  ps__oplist *l = &p->list;
  if (!reserve((void **)&l->ops, 0, n_ops, &p->ops_cap, sizeof *l->ops) ||
      !reserve((void **)&l->access, 0, n_access, &p->access_cap, sizeof *l->access) ||
      !reserve((void **)&l->args, 0, args_bytes, &p->args_cap, 1))
    return ps__fail(PS_ENOMEM, "program: out of memory for %zu ops", n_ops);
  return PS_OK;
}

void ps__program_clear(ps_program *p, uint32_t n_spaces, uint32_t n_streams) {
  const ps__oplist old = p->list;
  p->list = (ps__oplist){.n_spaces = n_spaces,
                         .n_streams = n_streams,
                         .ops = old.ops,
                         .access = old.access,
                         .args = old.args};
}

ps_status ps_program_add(ps_program *p, const ps_op *op, uint64_t *idx) {
  ps__oplist *l = &p->list;
  PS_TRY(check_op(l, op));
  size_t args_room = ((size_t)op->args_bytes + 15) / 16 * 16;
  if (!reserve((void **)&l->ops, l->n_ops, 1, &p->ops_cap, sizeof *l->ops) ||
      !reserve((void **)&l->access, l->n_access, op->n_access, &p->access_cap, sizeof *l->access) ||
      !reserve((void **)&l->args, l->args_bytes, args_room, &p->args_cap, 1))
    return ps__fail(PS_ENOMEM, "program: out of memory at op %zu", l->n_ops);
  l->ops[l->n_ops] = (ps__op){.kernel = op->kernel,
                              .work = op->work,
                              .tag = op->tag,
                              .args = l->args_bytes,
                              .access = l->n_access,
                              .position = l->stream_n_ops[op->stream]++,
                              .args_bytes = op->args_bytes,
                              .n_access = op->n_access,
                              .stream = op->stream};
  if (args_room) {
    memset(l->args + l->args_bytes, 0, args_room);
    memcpy(l->args + l->args_bytes, op->args, op->args_bytes);
  }
  for (uint32_t i = 0; i < op->n_access; i++) {
    const ps_access *a = &op->access[i];
    l->access[l->n_access + i] = *a;
    if (a->offset + a->bytes > l->space_bytes[a->space])
      l->space_bytes[a->space] = a->offset + a->bytes;
  }
  l->n_access += op->n_access;
  l->args_bytes += args_room;
  if (idx)
    *idx = l->n_ops;
  l->n_ops++;
  return PS_OK;
}
