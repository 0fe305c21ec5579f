/* attention_cuda.h - attention on CUDA: the providers of one op, and what they share
 * (attention_plain.cu). Host code, C and C++; no device code.
 *
 * A provider is a kept library, or our own plain kernels. Each says which shapes it takes, builds a
 * plan for a shape before the first step, and then launches without waiting or allocating.
 * Providers are asked in an order that depends on the GPU (attention.cu). The first provider that
 * takes a shape gets it. */
#ifndef PS_KERNELS_CUDA_ATTENTION_CUDA_H
#define PS_KERNELS_CUDA_ATTENTION_CUDA_H
#include "kernels/cuda/cuda_ops.h"
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

ps_status ps__fail(ps_status code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* A shape to plan: accumulate_dkv of args does not matter. */
typedef struct ps_att_shape {
  ps__args_attention args;
  bool backward, deterministic;
  int device, sm; /* compute capability as 10*major + minor */
} ps_att_shape;

/* The window where it hides a key of some row, else 0. */
static inline uint32_t ps_att_window(const ps__args_attention *a) {
  const uint32_t keys = ps__attention_documents(a) > 1 ? a->document_rows : a->row0 + a->n_tokens;
  return a->window < keys ? a->window : 0;
}

typedef struct ps_att_provider {
  const char *name;
  /* NULL where the provider takes the shape, else why not (one clause, static or thread-local). */
  const char *(*refuses)(const ps_att_shape *s);
  /* Builds the plan: @plan is handed to launch (never released: plans live as long as the
   * process), @scratch_bytes of device memory. */
  ps_status (*prepare)(const ps_att_shape *s, void **plan, size_t *scratch_bytes);
  /* Queues the op; l as in ops.h, checked by the caller. */
  ps_status (*launch)(const ps_launch *l, const ps_att_shape *s, void *plan);
} ps_att_provider;

extern const ps_att_provider ps_att_plain;
#ifdef PS_CUDNN
extern const ps_att_provider ps_att_cudnn;
uint32_t ps_att_cudnn_version(void); /* 0: none that serves */
#endif
#ifdef PS_FLASH_ATTN
extern const ps_att_provider ps_att_flash;
#endif
#ifdef PS_FLASH4
extern const ps_att_provider ps_att_flash4;
uint32_t ps_att_flash4_version(void);
#endif

/* ---- documents, found on the device -------------------------------------------------------------
 * Entry d of each array is the d-th document of the chunk: its query rows, and its keys from the
 * document's begin (in the prefix for the first one) to its last query row, so that causal masks
 * align at the bottom right. Entries after the last document are empty. A chunk may have more than
 * max_documents documents: the plain kernels take those from row plain_row on. */
static inline uint32_t ps_att_max_documents(uint32_t n_tokens) {
  const uint32_t n = n_tokens / 128;
  return n < 8 ? 8 : n > 64 ? 64 : n;
}
static inline uint32_t ps_att_documents_stride(uint32_t max_documents) {
  return (max_documents + 1 + 31) / 32 * 32;
}
/* int32 arrays of ps_att_documents_stride() entries each, in this order, after a header of 32
 * int32. */
enum {
  PS_ATT_LEN_Q,
  PS_ATT_LEN_KV,
  PS_ATT_OFF_Q,
  PS_ATT_OFF_KV,
  PS_ATT_OFF_DKV,
  PS_ATT_OFF_LSE,
  PS_ATT_N_ARRAYS
};
enum { PS_ATT_HEAD_PLAIN_ROW, PS_ATT_HEAD_FIRST_KEY, PS_ATT_HEADER = 32 };
static inline size_t ps_att_documents_bytes(uint32_t max_documents) {
  return (PS_ATT_HEADER + PS_ATT_N_ARRAYS * (size_t)ps_att_documents_stride(max_documents)) * 4;
}
static inline int32_t *ps_att_array(int32_t *documents, uint32_t max_documents, int which) {
  return documents + PS_ATT_HEADER + (size_t)which * ps_att_documents_stride(max_documents);
}
/* Offsets in elements of q, kv, dkv [row0+T, K] and log-sum-exp [T, heads], or with @in_rows in
 * rows of them. */
void ps_att_find_documents(cudaStream_t stream, const ps__args_attention *a,
                           const int32_t *doc_start, uint32_t max_documents, bool in_rows,
                           int32_t *documents);

/* dst[i][c][r] = src[i][r][c] for @n matrices, fp32: a document's log-sum-exp as [tokens, heads]
 * to [heads, tokens] and back. */
void ps_att_transpose(cudaStream_t stream, float *dst, const float *src, uint32_t n, uint32_t rows,
                      uint32_t cols);

/* dkv (+)= [dk | dv], both bf16 [rows, heads*head_dim], added over the heads of a group (@heads
 * is kv_heads or n_heads); rows before the first document's begin count as zeros, and so does
 * nothing from the plain kernels' rows on (they write there themselves). documents NULL: all
 * rows. */
void ps_att_finish_dkv(cudaStream_t stream, const ps__args_attention *a, const int32_t *documents,
                       const void *dk, const void *dv, uint32_t heads, float *dkv);

/* The plain kernels over rows from documents[PS_ATT_HEAD_PLAIN_ROW] on; nothing to do costs a
 * launch. */
void ps_att_plain_fwd(cudaStream_t stream, const ps_launch *l, const int32_t *documents, int n_sms);
void ps_att_plain_bwd(cudaStream_t stream, const ps_launch *l, const int32_t *documents, int n_sms);

static inline size_t ps_att_round(size_t n) { return (n + 255) / 256 * 256; }

#ifdef __cplusplus
}
#endif
#endif
