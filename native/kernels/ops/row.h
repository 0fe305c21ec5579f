/* row.h - what the rows of ops are made of (kernels/ops.h, "how an op describes itself").
 *
 * native/kernels/ops/<family>.c has a family's rows: what its arguments may be, what a chunk
 * decides of them, its work, and the functions of both backends. kernels/cpu and kernels/cuda have
 * the arithmetic and the scratch that it takes, and need nothing of this folder. */
#ifndef PS_KERNELS_OPS_ROW_H
#define PS_KERNELS_OPS_ROW_H
#include "kernels/cpu/cpu.h"
#include "kernels/cuda/scratch.h"
#ifdef PS_CUDA
#  include "kernels/cuda/cuda_ops.h"
#endif

/* PS__ROW() - the row of @op: its CPU function and its CUDA function (NULL: none), then the fields
 * of its ps__op_info. */
#define PS__ROW(op, class, cpu, cuda, ...)                                                         \
  const ps_kernel ps__k_##op = {.name = #op,                                                       \
                                .op_class = class,                                                 \
                                .fn = {cpu, cuda},                                                 \
                                .info = &(const ps__op_info){__VA_ARGS__}}

/* PS__CHECKED() - @fn of a launch whose arguments pass @check(args, name of @op). */
#define PS__CHECKED(backend, op, check)                                                            \
  static ps_status backend##_##op(const ps_launch *l) {                                            \
    PS_TRY(check(l->args, #op));                                                                   \
    return ps__##backend##_##op(l);                                                                \
  }
#ifdef PS_CUDA
#  define PS__CHECKED_CUDA(op, check) PS__CHECKED(cuda, op, check)
#  define PS__CUDA_OF(op)             cuda_##op
#else
#  define PS__CHECKED_CUDA(op, check)
#  define PS__CUDA_OF(op) NULL
#endif

/* PS__OP() - the row of @op, whose functions ps__cpu_<op> and ps__cuda_<op> see no arguments that
 * @check refuses. PS__HOST_OP() - the same of an op for host streams alone. */
#define PS__OP(op, class, check, ...)                                                              \
  PS__CHECKED(cpu, op, check)                                                                      \
  PS__CHECKED_CUDA(op, check)                                                                      \
  PS__ROW(op, class, cpu_##op, PS__CUDA_OF(op), __VA_ARGS__)
#define PS__HOST_OP(op, check, ...) PS__CPU_OP(op, PS_CLASS_OPTIMIZER, check, __VA_ARGS__)
/* PS__CPU_OP() - the same of an op that has no CUDA function. */
#define PS__CPU_OP(op, class, check, ...)                                                          \
  PS__CHECKED(cpu, op, check)                                                                      \
  PS__ROW(op, class, cpu_##op, NULL, __VA_ARGS__)

/* PS__BIND_ROWS() - a bind() by which @field of the arguments is the chunk's rows.
 * PS__BIND_COUNTED() - and `count` is 0 where the op runs again.
 * PS__BIND_GRADIENT() - with @accumulate, set but in the first chunk that writes a gradient. */
#define PS__BIND_ROWS(bind, type, field)                                                           \
  static void bind(void *args, const ps__chunk_shape *chunk) {                                     \
    ((type *)args)->field = chunk->n_tokens;                                                       \
  }
#define PS__BIND_COUNTED(bind, type, field)                                                        \
  static void bind(void *args, const ps__chunk_shape *chunk) {                                     \
    ((type *)args)->field = chunk->n_tokens;                                                       \
    if (chunk->again)                                                                              \
      ((type *)args)->count = 0;                                                                   \
  }
#define PS__BIND_GRADIENT(bind, type, field, accumulate)                                           \
  static void bind(void *args, const ps__chunk_shape *chunk) {                                     \
    ((type *)args)->field = chunk->n_tokens;                                                       \
    ((type *)args)->accumulate = !chunk->first_grad;                                               \
  }

/* A dtype of storage. */
static inline ps_status ps__check_dt(uint32_t dt, const char *op) {
  return dt < PS_N_DTYPES ? PS_OK
                          : ps__fail(PS_EINVAL, "%s: dt is %u: neither fp32 nor bf16", op, dt);
}
/* An activation of a gate. */
static inline ps_status ps__check_activation(uint32_t activation, const char *op) {
  return activation <= PS_ACTIVATION_GELU_TANH
             ? PS_OK
             : ps__fail(PS_EINVAL, "%s: activation is %u: neither silu nor gelu_tanh", op,
                        activation);
}
/* What is quantized from @dt to @dt_q, in @forms (quantize.c). */
ps_status ps__check_forms(uint32_t dt, uint32_t dt_q, uint32_t forms, const char *op);

/* How many forms. */
static inline double ps__n_forms(uint32_t forms) { return (forms & 1) + (forms >> 1 & 1); }
#endif
