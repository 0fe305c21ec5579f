/* moe.h - the CPU functions of the ops of experts (kernels/ops.h), for native/kernels/ops/moe.c. Each
 * takes arguments that have passed their check. */
#ifndef PS_KERNELS_CPU_MOE_H
#define PS_KERNELS_CPU_MOE_H
#include "kernels/cpu/cpu.h"

ps_status ps__cpu_moe_route(const ps_launch *l);
ps_status ps__cpu_moe_route_bwd(const ps_launch *l);
ps_status ps__cpu_moe_index(const ps_launch *l);
ps_status ps__cpu_moe_gather(const ps_launch *l);
ps_status ps__cpu_moe_combine(const ps_launch *l);
ps_status ps__cpu_gemm_grouped(const ps_launch *l);
ps_status ps__cpu_gemm_grouped_rows(const ps_launch *l);
ps_status ps__cpu_moe_glu(const ps_launch *l);
ps_status ps__cpu_moe_glu_bwd(const ps_launch *l);

#endif
