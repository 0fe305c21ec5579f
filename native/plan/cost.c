/* cost.c - time of an op from its work: a fixed cost plus work over the measured rate, and its share of CPUs, host memory and link. */
#include "plan_impl.h"

static double rate_ns(double work, double per_s) { return per_s > 0 ? work / per_s * 1e9 : 0; }
static double larger(double a, double b) { return a > b ? a : b; }

static uint32_t class_of(const ps_kernel *kernel) { return kernel ? kernel->op_class : PS_CLASS_COPY; }

/* A product takes its FLOPs' time or, where it has few rows, that of its operands on their way through memory. */
static double device_ns(const ps__cost_model *m, const ps_kernel *kernel, ps_work work) {
  const ps_hardware *hw = m->hw;
  const bool backward = kernel == &ps__k_attention_bwd;
  switch (class_of(kernel)) {
    case PS_CLASS_GEMM: return larger(rate_ns(work.flops, hw->gemm_flops_per_s[m->dt]), rate_ns(work.bytes, hw->elementwise_bytes_per_s));
    case PS_CLASS_ATTENTION: return rate_ns(work.flops, (backward ? hw->attention_bwd_flops_per_s : hw->attention_flops_per_s)[m->dt]);
    default: return rate_ns(work.bytes, hw->elementwise_bytes_per_s);
  }
}

/* Bytes/s that one thread of the io stream moves, read and written: a core's share, but no more than a core keeps in flight. Rows of 8 KiB gathered: 21 GB/s on a
 * Xeon of 2023, alone. */
static double io_rate(const ps_hardware *hw) { return hw->memory_bytes_per_s / 4 < 16e9 ? hw->memory_bytes_per_s / 4 : 16e9; }

double ps__cost_ns(const ps__cost_model *m, const ps_kernel *kernel, uint32_t stream, ps_work work) {
  const ps_hardware *hw = m->hw;
  switch (stream) {
    case PS__S_COMPUTE:
      /* on the CPU backend the optimizer's rate is also that of updates on the "device" */
      if (class_of(kernel) == PS_CLASS_OPTIMIZER && hw->backend == PS_BACKEND_CPU) return hw->op_ns + rate_ns(work.bytes, hw->optimizer_bytes_per_s);
      return hw->op_ns + device_ns(m, kernel, work);
    case PS__S_H2D: return hw->op_ns + rate_ns(work.bytes, hw->h2d_bytes_per_s);
    case PS__S_D2H: return hw->op_ns + rate_ns(work.bytes, hw->d2h_bytes_per_s);
    case PS__S_HOST: return hw->op_ns + rate_ns(work.bytes, hw->optimizer_bytes_per_s);
    default: return hw->op_ns + rate_ns(work.bytes, io_rate(hw));
  }
}

static double share(double part, double whole) { return whole > 0 && part < whole ? part / whole : 1.0; }

/* Copies draw on host memory as they read or write it: once on CUDA, twice (the device is there too) on the CPU backend. */
void ps__cost(void *model, const ps_op_view *op, ps_sim_cost *out) {
  const ps__cost_model *m = model;
  const ps_hardware *hw = m->hw;
  const bool cpu = hw->backend == PS_BACKEND_CPU;
  const double all = share(m->n_threads, hw->n_cpus), one = share(1, hw->n_cpus);
  *out = (ps_sim_cost){.ns = ps__cost_ns(m, op->kernel, op->stream, op->work)};
  const uint32_t class = class_of(op->kernel);
  if (op->stream == PS__S_H2D || op->stream == PS__S_D2H) {
    const double rate = op->stream == PS__S_H2D ? hw->h2d_bytes_per_s : hw->d2h_bytes_per_s;
    out->demand[PS__RES_MEMORY] = share((cpu ? 2 : 1) * rate, hw->memory_bytes_per_s);
    if (cpu) out->demand[PS__RES_CPUS] = one;
    else out->demand[PS__RES_LINK] = share(rate, 2 * hw->duplex_bytes_per_s);
  } else if (op->stream == PS__S_COMPUTE) {
    if (!cpu) return;
    out->demand[PS__RES_CPUS] = class == PS_CLASS_COPY || class == PS_CLASS_OTHER ? one : all;
    if (class == PS_CLASS_ELEMENTWISE) out->demand[PS__RES_MEMORY] = share(hw->elementwise_bytes_per_s, hw->memory_bytes_per_s);
    if (class == PS_CLASS_OPTIMIZER) out->demand[PS__RES_MEMORY] = share(hw->optimizer_bytes_per_s, hw->memory_bytes_per_s);
  } else {
    out->demand[PS__RES_CPUS] = class == PS_CLASS_OPTIMIZER ? all : one;
    if (class == PS_CLASS_OPTIMIZER) out->demand[PS__RES_MEMORY] = share(hw->optimizer_bytes_per_s, hw->memory_bytes_per_s);
    if (op->stream == PS__S_IO) out->demand[PS__RES_MEMORY] = share(io_rate(hw), hw->memory_bytes_per_s);
  }
}
