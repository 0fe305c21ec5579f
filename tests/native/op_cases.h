/* op_cases.h - one table of op cases. Four programs read it: the CPU test against PyTorch
 * (tests/test_op_cases.py, through ops_shim.c), which checks gradients too, the CUDA test against
 * the CPU (test_cuda_ops.c) and the benchmark (bench/kernels.c). A new op is a function in its
 * family's file (op_families.h), one entry in op_cases.c and one reference in
 * tests/test_op_cases.py. */
#ifndef PS_TESTS_OP_CASES_H
#define PS_TESTS_OP_CASES_H
#include "kernels/ops.h"

enum { OP_I32 = 10, OP_F64 = 11, OP_U16 = 12 };     /* dtypes of operands besides ps_dtype's */
enum { OP_MAX_OPERANDS = 12, OP_ARGS_BYTES = 640 }; /* of a case */

/* Besides the one rounding at the store:
 * |result - exact| <= ulps * ulp(dtype, exact) + rel * |exact| + of_max * max|exact|. ulps is 1
 * for bf16: two fp32 results that differ a little round to neighbours at worst. The others come
 * from the depth of sums times 2^-24, as said beside each. */
typedef struct op_tolerance {
  double ulps, rel, of_max;
} op_tolerance;

typedef struct op_operand {
  uint32_t mode; /* ps_access_mode; what is written alone is poisoned before */
  uint32_t dt;   /* ps_dtype, OP_I32, OP_F64 or OP_U16 */
  uint64_t n;    /* elements */
  void *init;    /* its values before the launch; NULL: PS_WRITE */
  op_tolerance tolerance;
} op_operand;

typedef struct op_case {
  const ps_kernel *kernel;
  char name[96]; /* dtype and shape */
  uint32_t args_bytes, n_operands;
  _Alignas(16) char args[OP_ARGS_BYTES];
  op_operand operand[OP_MAX_OPERANDS]; /* in the order of the kernel's accesses */
} op_case;

typedef enum op_sizes { OP_SMALL, OP_ALL, OP_BENCH } op_sizes;

/* Gets one case after the other; the case and its operands are freed when it returns. */
typedef void (*op_visit)(void *user, const op_case *c);

struct op_table_visit;
typedef struct op_entry {
  const ps_kernel *kernel;
  /* Draws each case of storage dtype @dt and visits it. */
  void (*cases)(struct op_table_visit *v, uint32_t dt);
  /* The backends give the same bits, fp32 and bf16: the tolerance is that of the exact value. */
  bool same_bits;
  /* The op whose gradient this one computes, NULL: none. Its reference is differentiated. */
  const ps_kernel *gradient_of;
} op_entry;
extern const op_entry op_table[];
extern const uint32_t n_op_table;

/* op_cases() - visits the cases of entry @i: OP_SMALL leaves out those of more than 300,000
 * elements an operand, OP_BENCH visits one realistic size alone. The same @seed draws the same
 * values. */
void op_cases(uint32_t i, uint32_t dt, op_sizes sizes, uint64_t seed, op_visit visit, void *user);

size_t op_dtype_bytes(uint32_t dt);
double op_value(const void *values, uint32_t dt, uint64_t i);
double op_ulp(double value, uint32_t dt);
/* N(0, 1) about, from the seed of the last op_cases() */
float op_normal(void);
#endif
