/* tensor_file.c - what is in open safetensors files. */
#include "io/tensor_file.h"
#include "core/core.h"
#include <inttypes.h>
#include <string.h>

const char *ps__tensors_path(const ps_tensor_file *f, uint64_t k) {
  return k < f->n_files ? f->files[k].path : NULL;
}

uint64_t ps_tensors_count(const ps_tensor_file *f) { return f->n; }

int ps_tensors_initialised(const ps_tensor_file *f) { return f && f->initialised; }

ps_status ps_tensors_info(const ps_tensor_file *f, uint64_t idx, ps_tensor_info *out) {
  if (idx >= f->n)
    return ps__fail(PS_EINVAL, "tensor %" PRIu64 " was asked for: %s has %zu", idx,
                    f->files[0].path, f->n);
  *out = f->tensors[idx].info;
  return PS_OK;
}

uint64_t ps_tensors_find(const ps_tensor_file *f, const char *name) {
  size_t lo = 0, hi = f->n;
  while (lo < hi) {
    size_t mid = lo + (hi - lo) / 2;
    int c = strcmp(name, f->tensors[f->by_name[mid]].name);
    if (c == 0)
      return f->by_name[mid];
    if (c < 0)
      hi = mid;
    else
      lo = mid + 1;
  }
  return UINT64_MAX;
}

bool ps__tensors_transposed(const ps_tensor_file *f, uint64_t idx) {
  return f->tensors[idx].transposed;
}

bool ps__tensors_fused(const ps_tensor_file *f) { return f->fused; }
