/* attention_avx512.c - the tile functions of attention for AVX-512. */
#include "kernels/cpu/cpu.h"
#if defined(__x86_64__)
#  define ATT_ISA 512
#  include "kernels/cpu/attention_isa.h"
#  include "kernels/cpu/attention_fwd.h"
#  include "kernels/cpu/attention_bwd.h"

const ps__att_isa ps__att_avx512 = {fwd_task, bwd_task, bwd_dq_task, VL, mul_n, transpose};
#endif
