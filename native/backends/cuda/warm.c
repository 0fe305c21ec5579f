/* warm.c - before the first step, everything that device ops would load, build or choose on their
 * first launch: attention plans, kernels' modules, the fastest algorithm of each product's shape.
 * So the first step is like the others, and the driver's figure of memory is final.
 *
 * Each distinct op (kernel, arguments and stream) runs once, at the addresses of its first
 * occurrence. Of several GPUs each has streams of its own, so each loads, builds and chooses. The
 * first one's choices of algorithms are read by the others:
 * 1. All of them run on zeros, which are valid ids, positions, documents and offsets. What an op
 *    reads is zeroed before it runs, because an op before it may have left other numbers there.
 * 2. Products whose algorithm was never chosen on this GPU are timed on values as in a model, since
 *    zeros flatter. The choices are kept on disk.
 * 3. The device spaces are zeroed again. */
#include "backends/cuda/device.h"
#include "kernels/cuda/cuda_ops.h"
#include <string.h>

enum { PATTERN = 64 << 20 };

typedef struct distinct {
  uint32_t *op;
  uint32_t n;
} distinct; /* indices of ops */

static uint64_t hash_of(const ps_schedule *s, const ps__op *op) {
  const unsigned char *p = (const unsigned char *)s->list.args + op->args;
  uint64_t h = 1469598103934665603ull ^ (uint64_t)(uintptr_t)op->kernel ^ op->stream;
  for (uint32_t i = 0; i < op->args_bytes; i++)
    h = (h ^ p[i]) * 1099511628211ull;
  return h;
}

/* The first op of each kind among the device streams' kernels. Ops that have one function for the
 * host and the device (hooks) are left to the caller. */
static ps_status find_distinct(const ps__device *dev, const ps_schedule *s, distinct *d) {
  const size_t n = s->list.n_ops;
  size_t room = 1;
  while (room < 2 * n + 2)
    room *= 2;
  uint32_t *table = ps__calloc(room, sizeof *table); /* index + 1 */
  *d = (distinct){.op = ps__malloc((n + 1) * sizeof *d->op)};
  if (!table || !d->op) {
    ps__free(table);
    return ps__fail(PS_ENOMEM, "out of memory for a list of %zu ops", n);
  }
  for (size_t i = 0; i < n; i++) {
    const ps__op *op = &s->list.ops[i];
    if (!op->kernel || ps__runs_on_host(&dev->cfg, op->stream) ||
        op->kernel->fn[PS_BACKEND_CUDA] == op->kernel->fn[PS_BACKEND_CPU])
      continue;
    size_t at = hash_of(s, op) & (room - 1);
    for (; table[at]; at = (at + 1) & (room - 1)) {
      const ps__op *o = &s->list.ops[table[at] - 1];
      if (o->kernel == op->kernel && o->stream == op->stream && o->args_bytes == op->args_bytes &&
          memcmp((const char *)s->list.args + o->args, (const char *)s->list.args + op->args,
                 op->args_bytes) == 0)
        break;
    }
    if (table[at])
      continue;
    table[at] = (uint32_t)i + 1;
    d->op[d->n++] = (uint32_t)i;
  }
  ps__free(table);
  return PS_OK;
}

/* ps_launch of op @idx at the spaces' addresses. Its GPU's context becomes current. */
static ps_launch launch_of(ps__device *dev, const ps_schedule *s, uint32_t idx, void **ptr) {
  const ps__op *op = &s->list.ops[idx];
  ps__cuda_turn_to(dev, dev->stream[op->stream].gpu);
  for (uint32_t a = 0; a < op->n_access; a++) {
    const ps_access *access = &s->list.access[op->access + a];
    ptr[a] = (char *)dev->space[access->space].addr + access->offset;
  }
  return (ps_launch){.args = (const char *)s->list.args + op->args,
                     .ptr = ptr,
                     .n_ptr = op->n_access,
                     .stream = op->stream,
                     .op = idx,
                     .backend = PS_BACKEND_CUDA,
                     .exec = &dev->stream[op->stream].exec};
}

static ps_status settle(ps__device *dev) {
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    if (dev->stream[i].stream)
      PS__CUDA_TRY(dev->cu, StreamSynchronize(dev->stream[i].stream));
  return PS_OK;
}

/* What op @idx touches of a device's memory. */
static ps_status zero_operands(ps__device *dev, const ps_schedule *s, uint32_t idx,
                               const ps_launch *l) {
  const ps_access *access = &s->list.access[s->list.ops[idx].access];
  for (uint32_t a = 0; a < l->n_ptr; a++)
    if (ps__space_place(&dev->cfg, access[a].space)->kind == PS_PLACE_DEVICE)
      PS__CUDA_TRY(dev->cu, MemsetD8Async((CUdeviceptr)(uintptr_t)l->ptr[a], 0, access[a].bytes,
                                          dev->stream[l->stream].stream));
  return PS_OK;
}

static ps_status run_once(ps__device *dev, const ps_schedule *s, const distinct *d) {
  for (uint32_t i = 0; i < d->n; i++) {
    void *ptr[PS_MAX_ACCESSES];
    const ps_launch l = launch_of(dev, s, d->op[i], ptr);
    PS_TRY(zero_operands(dev, s, d->op[i], &l));
    PS_TRY(s->list.ops[d->op[i]].kernel->fn[PS_BACKEND_CUDA](&l));
    CUresult r = dev->cu->StreamSynchronize(dev->stream[l.stream].stream);
    if (r != CUDA_SUCCESS)
      return ps__fail(PS_EDEVICE, "%s failed on its first run: %s",
                      ps__op_name(&s->list.ops[d->op[i]]),
                      (ps__cuda_fail(dev->cu, r, "warm-up"), ps_last_error()));
  }
  return PS_OK;
}

static ps_status zero_spaces(ps__device *dev) {
  for (uint32_t i = 0; i < dev->cfg.n_spaces; i++)
    if (ps__space_place(&dev->cfg, i)->kind == PS_PLACE_DEVICE && dev->space[i].bytes) {
      ps__cuda_turn_to(dev, ps__cuda_gpu_at(dev, dev->cfg.space[i].place));
      PS_TRY(
          ps__cuda_zero(dev->cu, (CUdeviceptr)(uintptr_t)dev->space[i].addr, dev->space[i].bytes));
    }
  return PS_OK;
}

/* bf16 values of about N(0, 0.02) over a device space: a pattern, and copies of it. */
static ps_status fill_space(ps__device *dev, uint32_t space, const uint16_t *pattern) {
  const ps__mapping *m = &dev->space[space];
  const ps__cuda_gpu *gpu = ps__cuda_gpu_at(dev, dev->cfg.space[space].place);
  const CUdeviceptr p = (CUdeviceptr)(uintptr_t)m->addr;
  CUstream stream = NULL;
  for (uint32_t i = 0; i < dev->cfg.n_streams && !stream; i++)
    stream = dev->stream[i].gpu == gpu ? dev->stream[i].stream : NULL;
  ps__cuda_turn_to(dev, gpu);
  for (uint64_t at = 0; at < m->bytes;) {
    uint64_t n = at ? at : PATTERN;
    if (n > m->bytes - at)
      n = m->bytes - at;
    PS__CUDA_TRY(dev->cu, MemcpyAsync(p + at, at ? p : (CUdeviceptr)(uintptr_t)pattern, n, stream));
    at += n;
  }
  return settle(dev);
}

static ps_status fill_spaces(ps__device *dev) {
  void *pattern = NULL;
  PS_TRY(ps__map(&pattern, PATTERN, "tuning products"));
  uint64_t x = 88172645463325252ull;
  for (uint64_t i = 0; i < PATTERN / 2; i++) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    const float sum =
        (float)((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48)) / 65536.0f -
        2.0f;
    ((uint16_t *)pattern)[i] = ps__f32_to_bf16(0.035f * sum);
  }
  ps_status st = PS_OK;
  for (uint32_t i = 0; i < dev->cfg.n_spaces && st == PS_OK; i++)
    if (ps__space_place(&dev->cfg, i)->kind == PS_PLACE_DEVICE && dev->space[i].bytes)
      st = fill_space(dev, i, pattern);
  ps__unmap(pattern, PATTERN);
  return st;
}

static ps_status tune(ps__device *dev, const ps_schedule *s, const distinct *d) {
  for (uint32_t i = 0; i < d->n; i++) {
    void *ptr[PS_MAX_ACCESSES];
    const ps_launch l = launch_of(dev, s, d->op[i], ptr);
    PS_TRY(s->list.ops[d->op[i]].kernel->info->tune(&l));
  }
  return PS_OK;
}

/* Keeps of the distinct ops those that have algorithms left to time, and returns their number. */
static uint32_t keep_untuned(ps__device *dev, const ps_schedule *s, distinct *d) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < d->n; i++) {
    const ps__op_info *info = s->list.ops[d->op[i]].kernel->info;
    void *ptr[PS_MAX_ACCESSES];
    const ps_launch l = launch_of(dev, s, d->op[i], ptr);
    if (info && info->tune && !info->tuned(&l))
      d->op[n++] = d->op[i];
  }
  return d->n = n;
}

/* Of the distinct ops, those of one GPU. */
static void keep_of_gpu(const ps__device *dev, const ps_schedule *s, const ps__cuda_gpu *gpu,
                        const distinct *all, distinct *d) {
  d->n = 0;
  for (uint32_t i = 0; i < all->n; i++)
    if (dev->stream[s->list.ops[all->op[i]].stream].gpu == gpu)
      d->op[d->n++] = all->op[i];
}

/* On one GPU: those that an earlier GPU chose are in the cache. */
static ps_status choose_on(ps__device *dev, const ps_schedule *s, const ps__cuda_gpu *gpu,
                           distinct *d) {
  ps__cuda_turn_to(dev, gpu);
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    if (dev->stream[i].gpu == gpu && dev->stream[i].exec.blas)
      PS_TRY(ps__cuda_blas_use_cache(dev->stream[i].exec.blas, NULL));
  if (dev->cfg.deterministic || !keep_untuned(dev, s, d))
    return PS_OK;
  PS_TRY(fill_spaces(dev));
  PS_TRY(tune(dev, s, d));
  PS_TRY(settle(dev));
  for (uint32_t i = 0; i < dev->cfg.n_streams; i++)
    if (dev->stream[i].gpu == gpu && dev->stream[i].exec.blas)
      ps__cuda_blas_save_cache(dev->stream[i].exec.blas);
  return PS_OK;
}

static ps_status choose_algorithms(ps__device *dev, const ps_schedule *s, const distinct *all) {
  distinct d = {.op = ps__malloc((all->n + 1) * sizeof *d.op)};
  ps_status st = d.op ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for a list of %u ops", all->n);
  for (uint32_t i = 0; i < dev->n_gpus && st == PS_OK; i++) {
    keep_of_gpu(dev, s, &dev->gpu[i], all, &d);
    st = choose_on(dev, s, &dev->gpu[i], &d);
  }
  ps__free(d.op);
  return st;
}

ps_status ps__cuda_prepare_ops(ps__device *dev, const ps_schedule *s) {
  for (size_t i = 0; i < s->list.n_ops; i++) {
    const ps__op *op = &s->list.ops[i];
    const ps__op_info *info = op->kernel ? op->kernel->info : NULL;
    if (!info || !info->prepare || ps__runs_on_host(&dev->cfg, op->stream))
      continue;
    ps__cuda_exec *exec = &dev->stream[op->stream].exec;
    char need[32], have[32];
    size_t bytes = 0;
    ps__cuda_turn_to(dev, dev->stream[op->stream].gpu);
    PS_TRY(info->prepare(s->list.args + op->args, exec, &bytes));
    if (bytes > exec->scratch_bytes)
      return ps__fail(PS_EINVAL,
                      "op %zu (%s): its library needs %s of scratch, stream %u has %s: raise "
                      "scratch_bytes of the stream",
                      i, ps__op_name(op), ps__format_bytes(need, bytes), op->stream,
                      ps__format_bytes(have, exec->scratch_bytes));
  }
  return PS_OK;
}

ps_status ps__cuda_warm(ps__device *dev, const ps_schedule *s) {
  distinct d = {0};
  PS_TRY(ps__cuda_push(dev, &dev->gpu[0]));
  ps_status st = ps__cuda_prepare_ops(dev, s);
  if (st == PS_OK)
    st = find_distinct(dev, s, &d);
  if (st == PS_OK)
    st = run_once(dev, s, &d);
  if (st == PS_OK)
    st = choose_algorithms(dev, s, &d);
  if (st == PS_OK)
    st = zero_spaces(dev);
  ps__cuda_pop(dev);
  ps__free(d.op);
  return st;
}
