/* attention_avx2.c - the tile functions of attention for AVX2 with FMA. */
#include "kernels/cpu/cpu.h"
#if defined(__x86_64__)
#  define ATT_ISA 2
#  include "kernels/cpu/attention_isa.h"
#  include "kernels/cpu/attention_fwd.h"
#  include "kernels/cpu/attention_bwd.h"

const ps__att_isa ps__att_avx2 = {fwd_task, bwd_task, bwd_dq_task, VL, mul_n, transpose};
#endif
