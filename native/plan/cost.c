/* cost.c - time of an op from its work: a fixed cost plus work over the measured rate, and its share of CPUs and host memory. */
#include "plan_impl.h"

static double rate_ns(double work, double per_s) { return per_s > 0 ? work / per_s * 1e9 : 0; }

double ps__cost_ns(const ps__cost_model *m, const ps_kernel *kernel, ps_work work) {
  const ps_hardware *hw = m->hw;
  switch (kernel ? kernel->op_class : PS_CLASS_COPY) {
    case PS_CLASS_GEMM: return hw->op_ns + rate_ns(work.flops, hw->gemm_flops_per_s[m->dt]);
    case PS_CLASS_ATTENTION: return hw->op_ns + rate_ns(work.flops, hw->attention_flops_per_s[m->dt]);
    case PS_CLASS_ELEMENTWISE: return hw->op_ns + rate_ns(work.bytes, hw->elementwise_bytes_per_s);
    case PS_CLASS_COPY: return hw->op_ns + rate_ns(work.bytes, hw->copy_bytes_per_s);
    case PS_CLASS_OPTIMIZER: return hw->op_ns + rate_ns(work.bytes, hw->optimizer_bytes_per_s);
    case PS_CLASS_IO: return hw->op_ns + rate_ns(work.bytes, hw->copy_bytes_per_s / 4);
    default: return hw->op_ns + rate_ns(work.bytes, hw->elementwise_bytes_per_s);
  }
}

static double share(double part, double whole) { return whole > 0 && part < whole ? part / whole : 1.0; }

void ps__cost(void *model, const ps_op_view *op, ps_sim_cost *out) {
  const ps__cost_model *m = model;
  const ps_hardware *hw = m->hw;
  const double all = share(m->n_threads, hw->n_cpus), one = share(1, hw->n_cpus);
  const uint32_t class = op->kernel ? op->kernel->op_class : PS_CLASS_COPY;
  *out = (ps_sim_cost){.ns = ps__cost_ns(m, op->kernel, op->work)};
  out->demand[PS__RES_CPUS] = class == PS_CLASS_COPY || class == PS_CLASS_IO || class == PS_CLASS_OTHER ? one : all;
  if (class == PS_CLASS_COPY) out->demand[PS__RES_MEMORY] = share(2 * hw->copy_bytes_per_s, hw->memory_bytes_per_s);
  if (class == PS_CLASS_ELEMENTWISE) out->demand[PS__RES_MEMORY] = share(hw->elementwise_bytes_per_s, hw->memory_bytes_per_s);
  if (class == PS_CLASS_OPTIMIZER) out->demand[PS__RES_MEMORY] = share(hw->optimizer_bytes_per_s, hw->memory_bytes_per_s);
}
