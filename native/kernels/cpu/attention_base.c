/* attention_base.c - the tile functions of attention for any machine (4 lanes of the compiler's
 * vector extension). */
#include "kernels/cpu/cpu.h"
#define ATT_ISA 0
#include "kernels/cpu/attention_isa.h"
#include "kernels/cpu/attention_fwd.h"
#include "kernels/cpu/attention_bwd.h"

const ps__att_isa ps__att_base = {fwd_task, bwd_task, bwd_dq_task, VL, mul_n, transpose};
