/* block.h - a block as data: its tensors, its forward ops and its backward ops.
 *
 * An op is a kernel and a list of symbolic accesses in the order of the kernel's pointers. The step
 * builder (native/step) binds the symbols to memory, derives lifetimes from first and last use, and
 * derives what to recompute. Nothing here knows where a tensor lies, so another kind of block is
 * another table. */
#ifndef PS_MODEL_BLOCK_H
#define PS_MODEL_BLOCK_H
#include "kernels/ops.h"
#include <stdbool.h>

/* Tensors of a block for one chunk of T tokens. A group tensor has the rows of the chunk's whole
 * attention group (docs/glossary.md). */
typedef enum ps__tensor {
  PS__T_X,    /* [T,D]      block input */
  PS__T_N1,   /* [T,D]      first norm's output */
  PS__T_QKV,  /* [T,A+2K]   fused product */
  PS__T_Q,    /* [T,A]      after RoPE (and QK-norm) */
  PS__T_KV,   /* [group,2K] keys and values after RoPE */
  PS__T_O,    /* [T,A]      attention output */
  PS__T_LSE,  /* [T,heads]  fp32 log-sum-exp */
  PS__T_H,    /* [T,D]      post-attention residual */
  PS__T_N2,   /* [T,D]      second norm's output */
  PS__T_GU,   /* [T,2F]     gate and up; the backward pass overwrites it with its gradient */
  PS__T_S,    /* [T,F]      SwiGLU product */
  PS__T_Y,    /* [T,D]      block output */
  PS__T_DY,   /* [T,D]      gradient of the residual stream: dY, overwritten with dX */
  PS__T_DS,   /* [T,F]      gradient of the SwiGLU product, then overwritten with the product */
  PS__T_DN2,  /* [T,D] */
  PS__T_DO,   /* [T,A] */
  PS__T_DQ,   /* [T,A] */
  PS__T_DKV,  /* [group,2K] fp32; the chunks of the group add to it */
  PS__T_DQKV, /* [T,A+2K] */
  PS__T_DN1,  /* [T,D] */
  PS__N_TENSORS
} ps__tensor;

/* Saved activations: each has a policy of its own. */
typedef enum ps__saved {
  PS__SAVED_X,
  PS__SAVED_QKV,
  PS__SAVED_Q,
  PS__SAVED_KV,
  PS__SAVED_O,
  PS__SAVED_H,
  PS__SAVED_GU,
  PS__N_SAVED
} ps__saved;
extern const char *const ps__saved_name[PS__N_SAVED];

/* Spans of a block's unit: parameters that lie one after the other and are one operand. */
typedef enum ps__param_span {
  PS__P_NORM1,
  PS__P_WQKV,
  PS__P_BQKV,
  PS__P_QNORM,
  PS__P_KNORM,
  PS__P_WO,
  PS__P_NORM2,
  PS__P_WGU,
  PS__P_WDOWN,
  PS__N_SPANS
} ps__param_span;

typedef struct ps__tensor_info {
  const char *name;
  uint64_t row_bytes; /* BYTES a token; of a group tensor, a row of the group */
  bool group;
  int saved; /* ps__saved that it belongs to; -1: never saved */
} ps__tensor_info;

/* A span in its unit, in ELEMENTS. n 0: the block has no such span. */
typedef struct ps__span_info {
  uint64_t offset, n;
} ps__span_info;

/* What an access of an op stands for. */
typedef enum ps__sym_kind {
  PS__SYM_TENSOR, /* a tensor: the chunk's own rows */
  PS__SYM_PREFIX, /* a group tensor: rows 0 .. row0+T */
  PS__SYM_PARAM,  /* a span of parameters */
  PS__SYM_GRAD,   /* its gradient: a contribution's first chunk writes it, later chunks add to it */
  PS__SYM_DOC,
  PS__SYM_POS /* the batch's doc_start and position, int32[T] */
} ps__sym_kind;
typedef struct ps__sym {
  uint8_t kind, id, mode;
} ps__sym;

enum { PS__OP_MAX_SYMS = 10, PS__ARGS_BYTES = 640 };
typedef struct ps__block_op {
  const ps_kernel *kernel;
  uint8_t n_syms;
  uint16_t args_bytes;
  ps__sym sym[PS__OP_MAX_SYMS];
  _Alignas(16) char args[PS__ARGS_BYTES]; /* but for what ps__op_info.bind fills in */
} ps__block_op;

enum { PS__MAX_FWD = 12, PS__MAX_BWD = 24 };
typedef struct ps__block {
  ps_model_config cfg;
  uint32_t dt; /* device dtype */
  ps__tensor_info tensor[PS__N_TENSORS];
  ps__span_info span[PS__N_SPANS];
  bool has_saved[PS__N_SAVED];
  uint64_t saved_row_bytes[PS__N_SAVED];
  ps__block_op fwd[PS__MAX_FWD], bwd[PS__MAX_BWD];
  uint32_t n_fwd, n_bwd;
} ps__block;

/* ps__block_init() - the block of @cfg with storage dtype @dt, trained on sequences of @seq_len
 * tokens. Errors: PS_EINTERNAL where the family's parameters lack one that the ops need; PS_EINVAL
 * names what ps__rope_table() refuses. */
ps_status ps__block_init(ps__block *b, const ps_model_config *cfg, ps_dtype dt, uint64_t seq_len);
/* ps__block_op_args() - the arguments of @op on a chunk, into @args, which has room for
 * PS__ARGS_BYTES. */
void ps__block_op_args(const ps__block_op *op, const ps__chunk_shape *c, void *args);
/* ps__block_recompute() - the forward ops that must run again so that all tensors of @need exist.
 * @need and @have are bit sets of tensors; returns a bit set of indices into fwd[]. Goes back from
 * what is needed to the ops that make it, and stops at what is there. */
uint32_t ps__block_recompute(const ps__block *b, uint32_t need, uint32_t have);
/* ps__block_backward_needs() - tensors (a bit set) that the backward ops read and the forward pass
 * makes. */
uint32_t ps__block_backward_needs(const ps__block *b);

/* ps__gemm_args() - C[m,n] = op(A) op(B), without gaps between rows. */
ps__args_gemm ps__gemm_args(uint32_t m, uint32_t n, uint32_t k, bool trans_a, bool trans_b,
                            uint32_t dt);
#endif
