/* attention_base.c - the tile functions of attention for any machine (4 lanes of the compiler's
 * vector extension). */
#include "cpu.h"
#define ATT_ISA 0
#include "attention_isa.h"
#include "attention_fwd.h"
#include "attention_bwd.h"

const ps__att_isa ps__att_base = {fwd_task, bwd_task, bwd_dq_task};
