/* define.h - a layer as data: its tensors, its parameters, its forward and backward ops.
 *
 * A model is a list of layers: the embedding, the blocks, the head. Each has a definition; blocks
 * that are alike share one. An op of a definition is a kernel, its arguments and a list of
 * symbols in the order of the kernel's pointers. The step builder (native/step) binds the symbols
 * to memory, derives lifetimes from first and last use, and derives what to recompute. Nothing here
 * knows where a tensor lies.
 *
 * The functions that make a definition note the first error in it and are no-ops from then on;
 * ps__model_add_layer() returns that error. So a description is a list of calls without checks. */
#ifndef PS_MODEL_DEFINE_H
#define PS_MODEL_DEFINE_H
#include "core/storage.h"
#include "kernels/ops.h"
#include <stdbool.h>

/* A definition has at most so many tensors, whose indices are bytes, and ops of a pass. */
enum { PS__SET_BITS = 256, PS__MAX_SAVED = 16, PS__MAX_SAVED_SETS = 8 };
/* A set of tensors or of forward ops of one definition, by index. {{0}} is the empty set. */
enum { PS__SET_WORDS = PS__SET_BITS / 64 };
typedef struct ps__set {
  uint64_t word[PS__SET_WORDS];
} ps__set;
static inline bool ps__in(ps__set set, uint32_t i) { return set.word[i / 64] >> i % 64 & 1; }
static inline void ps__put(ps__set *set, uint32_t i) { set->word[i / 64] |= (uint64_t)1 << i % 64; }
static inline ps__set ps__only(uint32_t i) {
  ps__set set = {{0}};
  ps__put(&set, i);
  return set;
}
static inline ps__set ps__union(const ps__set *list, size_t n) {
  ps__set all = {{0}};
  for (size_t k = 0; k < n; k++)
    for (uint32_t w = 0; w < PS__SET_WORDS; w++)
      all.word[w] |= list[k].word[w];
  return all;
}
#define PS__UNION(...)                                                                             \
  ps__union((const ps__set[]){__VA_ARGS__},                                                        \
            sizeof((const ps__set[]){__VA_ARGS__}) / sizeof(ps__set))
/* ps__common() - what is in both. ps__without() - what is in @a alone. */
static inline ps__set ps__common(ps__set a, ps__set b) {
  for (uint32_t w = 0; w < PS__SET_WORDS; w++)
    a.word[w] &= b.word[w];
  return a;
}
static inline ps__set ps__without(ps__set a, ps__set b) {
  for (uint32_t w = 0; w < PS__SET_WORDS; w++)
    a.word[w] &= ~b.word[w];
  return a;
}
static inline bool ps__is_empty(ps__set set) {
  uint64_t any = 0;
  for (uint32_t w = 0; w < PS__SET_WORDS; w++)
    any |= set.word[w];
  return !any;
}

/* How many rows a tensor has. One with several rows a token, such as what a router sends to each
 * of a token's experts, has rows of TOKEN and that many times the columns. */
typedef enum ps__row_kind {
  PS__ROWS_TOKEN, /* a row for each of the chunk's tokens */
  PS__ROWS_GROUP, /* for each token of the chunk's attention group (docs/design/step.md) */
  PS__ROWS_SLICE, /* for each token of a head slice: only in ops that run slice by slice */
  PS__ROWS_ONE,   /* one, for any chunk */
  PS__ROWS_PASS,  /* one, for all chunks of a layer pass: what an op makes of parameters alone, such
                   * as quantized weights. The op runs before its first reader of the layer pass */
  PS__ROWS_STEP,  /* the same for all layer passes of a step over the layer, such as a scale */
  /* What passes from a chunk of an attention group to the next. */
  PS__ROWS_STATE, /* forward: one for each chunk of the group, which the chunk's op writes and that
                   * of the chunk after it reads (PS__SYM_BEFORE), and one before them */
  PS__ROWS_CARRY  /* backward: one for the group, which its chunks overwrite, last chunk first */
} ps__row_kind;
/* Whether the chunks of an attention group share the tensor. */
static inline bool ps__rows_of_group(uint32_t rows) {
  return rows == PS__ROWS_GROUP || rows == PS__ROWS_STATE || rows == PS__ROWS_CARRY;
}

enum { PS__NONE = -1 };

/* A tensor that passes from block to block beside the residual stream, one for a chunk or its
 * attention group. Forward, the first block that has it makes it, and others read it. A gradient is
 * made in the backward pass: the last block that has it writes it, the others add to it, and the
 * first one reads the sum. */
typedef enum ps__carried {
  PS__CARRIED_NONE,
  PS__CARRIED_KV, /* keys and values that several blocks read, and those of PS_LAYER_GLOBAL */
  PS__CARRIED_DKV,
  PS__CARRIED_KV_GLOBAL,
  PS__CARRIED_DKV_GLOBAL,
  PS__CARRIED_X0, /* of per-layer embeddings: the first block's input, the norm's weights */
  PS__CARRIED_DX0,
  PS__CARRIED_NORM,
  PS__CARRIED_DNORM,
  PS__N_CARRIED
} ps__carried;

typedef struct ps__tensor_def {
  const char *name;
  uint64_t row_bytes; /* BYTES of a row */
  uint32_t rows;      /* ps__row_kind */
  uint32_t carried;   /* ps__carried */
  ps_dtype dt;
  int saved; /* index in ps__layer_def.saved; PS__NONE: never saved */
} ps__tensor_def;

/* A saved activation: tensors of the forward pass that the backward pass reads, with one policy.
 * Those of one rank are kept, offloaded or recomputed together, because one without the other saves
 * nothing. The lower the rank, the more recomputation a byte of it saves; the input has rank 0. */
typedef struct ps__saved_def {
  const char *name;
  uint64_t row_bytes, state_bytes; /* BYTES of a token, and beside them of a chunk */
  uint32_t rank, set; /* set: the rank's number among the definition's ranks, in order */
} ps__saved_def;

/* A parameter tensor under its name on disk, after the unit's prefix. */
typedef struct ps__param_def {
  const char *name;
  uint32_t role; /* ps_param_role */
  uint32_t n_dims;
  uint64_t rows, cols;       /* cols 1: a vector */
  uint64_t offset;           /* in its unit, in ELEMENTS */
  float init_mean, init_std; /* as in ps_param_info, as is init_uniform */
  bool init_uniform;
} ps__param_def;

/* A span: parameters of a unit that lie one after the other and are one operand. It starts at a
 * multiple of PS__SPAN_ALIGN elements (128 or 256 bytes), with zeros before it. In ELEMENTS. */
typedef struct ps__span_def {
  uint64_t offset, n;
  const char *what;  /* what its ops work on, for traces and reports; NULL: no name */
  uint32_t unit;     /* of the layer's units */
  bool of_embedding; /* the span is the embedding's first one (tied embeddings) */
  bool frozen;       /* has no gradient */
} ps__span_def;

/* A unit: parameters that move between host and device together, as spans that follow each other.
 * A layer has one or more, such as adapters beside what they adapt, or one for each expert. A
 * frozen unit has no gradient, no optimizer state and no update. It may be quantized: then it is
 * kept and moved in blocks, and dequantized on the device before a layer pass. */
typedef struct ps__unit_def {
  uint32_t first_span, n_spans, first_param, n_params;
  uint64_t n; /* elements with padding, a multiple of PS__SPAN_ALIGN */
  bool frozen;
  bool adapter;  /* lies in an adapter's files, not in the model's (native/model/lora.h) */
  uint32_t base; /* ps_base: how its weights are kept (native/core/blocks.h) */
  bool exact;    /* its weights are fp32, where ops read them too; it is frozen */
} ps__unit_def;

/* What an access of an op stands for. */
typedef enum ps__sym_kind {
  PS__SYM_TENSOR, /* a tensor: the chunk's own rows, or the head slice's */
  PS__SYM_PREFIX, /* a group tensor's rows [0, row0 + n_tokens) */
  PS__SYM_BEFORE, /* the row of PS__ROWS_STATE that the chunk before has written; in a group's first
                   * chunk any memory, which the op does not read */
  PS__SYM_PARAM,  /* a span of parameters */
  PS__SYM_GRAD,   /* its gradient: a contribution's first chunk writes it, later chunks add to it */
  PS__SYM_BATCH,  /* a field of the chunk's batch, ps__batch_field */
  PS__SYM_FLUSHED, /* the layer's counters of flushed values: u64[ps__n_flushed()] */
  PS__SYM_ROUTED   /* the layer's counts of tokens by expert: u64[n_experts] */
} ps__sym_kind;
typedef enum ps__batch_field {
  PS__BATCH_TOKENS,    /* int32[T] */
  PS__BATCH_TARGETS,   /* int32[T] */
  PS__BATCH_DOC_START, /* int32[T] */
  PS__BATCH_POSITION,  /* int32[T] */
  PS__BATCH_SCALE      /* float: 1 / valid tokens of the step */
} ps__batch_field;
typedef struct ps__sym {
  uint8_t kind, mode; /* mode: PS_READ, PS_WRITE */
  uint16_t id;        /* of the tensor, span or field */
  /* Of a tensor with rows of tokens: the access begins so many BYTES into it. A range of columns is
   * an operand that begins in the first row and has the leading dimension of the whole tensor. */
  uint32_t skip;
} ps__sym;

/* A tensor whose values that became zero when they were quantized are counted, over the step. The
 * op that writes @tensor runs once a chunk. */
enum { PS__MAX_COUNTED = 16 };
typedef struct ps__counted {
  const char *what; /* borrowed, as names are */
  uint8_t tensor;   /* has a row a token and a byte an element */
} ps__counted;

enum { PS__OP_MAX_SYMS = 12, PS__ARGS_BYTES = 640 };
typedef struct ps__op_def {
  const ps_kernel *kernel;
  const char *what; /* that of the first span among its symbols, as ps_tag.what; or NULL */
  uint8_t n_syms;
  bool sliced;     /* runs head slice by head slice of the chunk; such ops follow each other */
  bool has_unread; /* a frozen parameter's gradient goes to a tensor that no op reads: no sums */
  uint16_t args_bytes;
  ps__sym sym[PS__OP_MAX_SYMS];
  _Alignas(16) char args[PS__ARGS_BYTES]; /* but for what ps__op_info.bind fills in */
} ps__op_def;

/* Tensors with a role; PS__NONE: the layer has none.
 *   input, output
 *   grad   the gradient of the residual stream: on entry to the backward pass the output's, on exit
 *          the input's
 *   loss   fp32, ps__loss_columns() of a row, copied to the host
 *   logits what the loss is computed from: generation ends with the op that writes them
 *   expert_ids  u16, the experts that each token's row chose */
typedef struct ps__layer_def {
  ps__tensor_def tensor[PS__SET_BITS];
  ps__saved_def saved[PS__MAX_SAVED];
  ps__counted counted[PS__MAX_COUNTED];
  uint32_t n_tensors, n_saved, n_sets, n_counted;
  int input, output, grad, loss, logits, expert_ids;
  bool counts_routed; /* an op has PS__ROUTED */
  ps__param_def *param;
  ps__span_def *span;
  ps__unit_def *unit;
  ps__op_def *fwd, *bwd;
  char **name; /* names that the definition owns */
  uint32_t n_params, n_spans, n_units, n_fwd, n_bwd, n_names;
  size_t cap_params, cap_spans, cap_units, cap_fwd, cap_bwd, cap_names;
  uint32_t base; /* ps_base of frozen matrices that follow */
  /* derived: */
  ps_dtype dt;           /* of gradients of parameters, as kernels write them */
  ps__set made;          /* tensors that forward ops write, and the input */
  ps__set needs;         /* those of them that backward ops read */
  ps__set group;         /* group tensors that forward ops write */
  ps__set group_sources; /* what these are made from, directly or not */
  ps__set grad_group;    /* group tensors that only backward ops write */
  ps__set of_pass;       /* tensors of a layer pass */
  ps__set of_step;       /* tensors of a step */
  ps__set carried;       /* those that pass between blocks: in none of the sets of groups */
  ps__set grad_carried;  /* those of them that are gradients */
  ps_status status;
} ps__layer_def;

/* ---- describing a layer ---------------------------------------------------------------------- */
/* ps__def_tensor() - a tensor of @cols elements a row, of a ps_dtype or a ps__other_dtype; returns
 * its index. Names are borrowed and must outlive the definition. */
uint8_t ps__def_tensor(ps__layer_def *d, const char *name, ps__row_kind rows, uint64_t cols,
                       uint32_t dt);
/* ps__def_saved() - @tensor may be saved, under @name: with other tensors of that name. */
void ps__def_saved(ps__layer_def *d, uint8_t tensor, const char *name, uint32_t rank);
/* ps__def_carried() - @tensor passes between blocks; it is not saved. */
void ps__def_carried(ps__layer_def *d, uint8_t tensor, ps__carried as);
/* ps__def_counted() - flushed values of @tensor are counted. Returns the argument `count` of the op
 * that writes it (kernels/ops.h); the op's last symbol is PS__FLUSHED. */
uint32_t ps__def_counted(ps__layer_def *d, uint8_t tensor, const char *what);
/* ps__def_unit() - the parameters that follow are a unit of their own.
 * ps__def_adapter_unit() - the same of adapters' parameters.
 * ps__def_exact_unit() - the same of frozen parameters that stay fp32 whatever the recipe. */
void ps__def_unit(ps__layer_def *d, bool frozen);
void ps__def_exact_unit(ps__layer_def *d);
void ps__def_adapter_unit(ps__layer_def *d, bool frozen);
/* ps__def_param() - a tensor of parameters, which begins a span; returns the span's index.
 * @rows, @cols: its shape; cols 0: a vector of @rows.
 * ps__def_param_after() - one that follows the last without a gap, in the same span. */
uint16_t ps__def_param(ps__layer_def *d, const char *name, ps_param_role role, uint64_t rows,
                       uint64_t cols);
void ps__def_param_after(ps__layer_def *d, const char *name, ps_param_role role, uint64_t rows,
                         uint64_t cols);
/* ps__def_channels() - a matrix of @cols taps for each of @rows channels, which begins a span. On
 * disk it has a dimension of 1 between its two. No product reads it, and no base quantizes it. */
uint16_t ps__def_channels(ps__layer_def *d, const char *name, uint64_t rows, uint64_t cols);
/* ps__def_base() - frozen matrices that follow are kept as @base (ps_base), those of adapters not.
 * They and other parameters are units of their own. */
void ps__def_base(ps__layer_def *d, uint32_t base);
/* ps__def_name() - a name that the definition owns, of @format with @i in it; "" after an error. */
const char *ps__def_name(ps__layer_def *d, const char *format, uint32_t i);
/* ps__def_what() - the ops of the last span work on @what, as ps_tag.what. Borrowed like names. */
void ps__def_what(ps__layer_def *d, const char *what);
/* ps__def_init() - what the last parameter is drawn from, where that is not the usual: N(0, 0.02)
 * for matrices, 1 for norms and constants, 0 for biases. */
void ps__def_init(ps__layer_def *d, double mean, double std);
/* ps__def_init_uniform() - the last parameter is drawn from the uniform distribution over [-limit,
 * limit]. */
void ps__def_init_uniform(ps__layer_def *d, double limit);
/* ps__def_split() - the last span ends after @n elements, a multiple of PS__SPAN_ALIGN, and what
 * follows in it is a span of its own, whose index it returns: a matrix's rows as two operands. */
uint16_t ps__def_split(ps__layer_def *d, uint64_t n);
/* ps__def_tied() - a span that is the embedding's first, of @n elements. */
uint16_t ps__def_tied(ps__layer_def *d, uint64_t n, bool frozen);
/* ps__def_op() - append an op to the forward or backward pass. Use PS__FWD(), PS__BWD() or
 * PS__SLICE(). An op that writes gradients of frozen parameters alone is left out. Where it also
 * writes something else, the frozen gradient goes to a tensor that no op reads. */
void ps__def_op(ps__layer_def *d, bool backward, bool sliced, const ps_kernel *kernel,
                const void *args, size_t args_bytes, const ps__sym *sym, size_t n_syms);
#define PS__DEF_OP(d, backward, sliced, kernel, args, ...)                                         \
  do {                                                                                             \
    const ps__sym s_[] = {__VA_ARGS__};                                                            \
    ps__def_op(d, backward, sliced, &kernel, &args, sizeof args, s_, sizeof s_ / sizeof *s_);      \
  } while (0)
#define PS__FWD(d, kernel, args, ...)   PS__DEF_OP(d, false, false, kernel, args, __VA_ARGS__)
#define PS__BWD(d, kernel, args, ...)   PS__DEF_OP(d, true, false, kernel, args, __VA_ARGS__)
#define PS__SLICE(d, kernel, args, ...) PS__DEF_OP(d, false, true, kernel, args, __VA_ARGS__)
/* Symbols. PS__SYM_IF(): @symbol where @condition holds, else none: ps__def_op() leaves it out. */
#define PS__R(tensor)  ((ps__sym){PS__SYM_TENSOR, PS_READ, tensor, 0})
#define PS__W(tensor)  ((ps__sym){PS__SYM_TENSOR, PS_WRITE, tensor, 0})
#define PS__RW(tensor) ((ps__sym){PS__SYM_TENSOR, PS_READ_WRITE, tensor, 0})
/* A tensor from byte @skip of its first row on: ps__sym.skip. */
#define PS__R_FROM(t, skip)           ((ps__sym){PS__SYM_TENSOR, PS_READ, t, skip})
#define PS__RW_FROM(t, skip)          ((ps__sym){PS__SYM_TENSOR, PS_READ_WRITE, t, skip})
#define PS__PRE_R(t)                  ((ps__sym){PS__SYM_PREFIX, PS_READ, t, 0})
#define PS__PRE_W(t)                  ((ps__sym){PS__SYM_PREFIX, PS_WRITE, t, 0})
#define PS__BEFORE(t)                 ((ps__sym){PS__SYM_BEFORE, PS_READ, t, 0})
#define PS__P(span)                   ((ps__sym){PS__SYM_PARAM, PS_READ, span, 0})
#define PS__G(span)                   ((ps__sym){PS__SYM_GRAD, PS_WRITE, span, 0})
#define PS__B(field)                  ((ps__sym){PS__SYM_BATCH, PS_READ, field, 0})
#define PS__FLUSHED                   ((ps__sym){PS__SYM_FLUSHED, PS_READ_WRITE, 0, 0})
#define PS__ROUTED                    ((ps__sym){PS__SYM_ROUTED, PS_READ_WRITE, 0, 0})
#define PS__SYM_IF(condition, symbol) ((condition) ? (symbol) : (ps__sym){PS__SYM_BATCH, 0, 0, 0})

/* ps__def_finish() - derive what is derived. Errors: the first one noted; PS_EINTERNAL names what
 * is past a limit or missing. */
ps_status ps__def_finish(ps__layer_def *d);
void ps__def_free(ps__layer_def *d);

/* ---- reading a definition -------------------------------------------------------------------- */
static inline bool ps__sym_is_tensor(ps__sym y) {
  return y.kind == PS__SYM_TENSOR || y.kind == PS__SYM_PREFIX || y.kind == PS__SYM_BEFORE;
}
/* ps__uses() - whether @op accesses tensor @id in @mode, a bit or both; no op does PS__NONE. */
static inline bool ps__uses(const ps__op_def *op, int id, uint32_t mode) {
  for (uint32_t i = 0; i < op->n_syms; i++)
    if (ps__sym_is_tensor(op->sym[i]) && op->sym[i].id == id && op->sym[i].mode & mode)
      return true;
  return false;
}
/* ps__op_args() - the arguments of @op on a chunk or head slice, into @args, which has room for
 * PS__ARGS_BYTES. */
void ps__op_args(const ps__op_def *op, const ps__chunk_shape *c, void *args);
/* ps__op_of_pass() - whether the op runs once a layer pass, or once a step: what it writes are such
 * tensors. */
bool ps__op_of_pass(const ps__layer_def *d, const ps__op_def *op);
/* ps__recompute() - the forward ops that must run again so that all tensors of @need exist where
 * those of @have do. Goes back from what is needed to the ops that make it. */
ps__set ps__recompute(const ps__layer_def *d, ps__set need, ps__set have);
/* ps__saved_bytes() - BYTES of a saved activation for a chunk of @n_tokens. A state counts in a
 * group of one chunk too, where none is saved.
 * ps__saved_set_bytes() - the same of a set. */
static inline uint64_t ps__saved_bytes(const ps__saved_def *s, uint32_t n_tokens) {
  return s->row_bytes * n_tokens + s->state_bytes;
}
uint64_t ps__saved_set_bytes(const ps__layer_def *d, uint32_t set, uint32_t n_tokens);
#endif
