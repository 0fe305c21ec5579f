/* tied.c - whether a directory whose config.json ties the head has another lm_head.weight. */
#include "core/core.h"
#include "model/model.h"
#include <string.h>

enum { PIECE = 1 << 18 }; /* elements compared at a time */

/* Both as @dtype, which holds the values of either exactly. */
static ps_status compare(ps_tensor_file *f, const uint64_t idx[2], uint64_t n, ps_dtype dtype,
                         bool *same) {
  const size_t e = ps_dtype_bytes(dtype);
  char *piece = ps__malloc(2 * PIECE * e);
  ps_status st = piece ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for a piece of the weights");
  *same = true;
  for (uint64_t at = 0; st == PS_OK && *same && at < n; at += PIECE) {
    const uint64_t m = n - at < PIECE ? n - at : PIECE;
    for (int k = 0; k < 2 && st == PS_OK; k++)
      st = ps_tensors_read(f, idx[k], at, m, dtype, piece + k * PIECE * e);
    *same = st == PS_OK && memcmp(piece, piece + PIECE * e, m * e) == 0;
  }
  ps__free(piece);
  return st;
}

static ps_status has_own_head(ps_tensor_file *f, bool *out) {
  const uint64_t idx[2] = {ps_tensors_find(f, "lm_head.weight"),
                           ps_tensors_find(f, "model.embed_tokens.weight")};
  ps_tensor_info head, embedding;
  bool same = false;
  *out = false;
  if (idx[0] == UINT64_MAX || idx[1] == UINT64_MAX)
    return PS_OK;
  PS_TRY(ps_tensors_info(f, idx[0], &head));
  PS_TRY(ps_tensors_info(f, idx[1], &embedding));
  const bool bf16 = !strcmp(head.dtype, "BF16") && !strcmp(embedding.dtype, "BF16");
  if (head.n == embedding.n)
    PS_TRY(compare(f, idx, head.n, bf16 ? PS_BF16 : PS_F32, &same));
  *out = !same;
  return PS_OK;
}

/* A directory without weights, or with weights that cannot be opened, has no head of its own:
 * config.json alone makes a plan. */
ps_status ps__model_own_head(const char *dir, bool *out) {
  ps_tensor_file *f;
  *out = false;
  ps_status st = ps_tensors_open(&f, dir);
  if (st != PS_OK)
    return st == PS_ENOMEM ? st : PS_OK;
  st = has_own_head(f, out);
  ps_tensors_close(f);
  return st;
}
