/* bench_copies.c - rates of norms, of copies, and of copies beside the host's work. */
#include "backends/cuda/bench.h"

/* ---- memory and link ------------------------------------------------------------------------- */

/* One place after another, so that no cache of the GPU holds what is read next. */
enum { N_NORMS = 3, FFN_DIM = 14336 };
static const double NORMS_BYTES = N_NORMS * 4.0 * TOKENS * DIM + 6.0 * TOKENS * FFN_DIM;
static ps_status run_norms(ps__bench *b, const void *arg, uint32_t part) {
  const ps__args_rmsnorm a = {.rows = TOKENS, .cols = DIM, .dt = PS_BF16, .eps = 1e-5f};
  const ps__args_glu g = {.n_tokens = TOKENS, .ffn_dim = FFN_DIM, .dt = PS_BF16};
  for (int i = 0; i < N_NORMS; i++) {
    void *ptr[3] = {value(b, X + 128 * i), value(b, W), value(b, OUT + 128 * i)};
    PS_TRY(ps__bench_launch(b, &ps__k_rmsnorm_fwd, &a, ptr, 3));
  }
  return ps__bench_launch(b, &ps__k_glu_fwd, &g, (void *[]){value(b, X), value(b, OUT)}, 2);
}
static ps_status case_small(ps__bench *b) {
  const ps__args_rmsnorm a = {.rows = 1, .cols = 1024, .dt = PS_BF16, .eps = 1e-5f};
  void *ptr[3] = {value(b, X), value(b, W), value(b, OUT)};
  for (int i = 0; i < 100; i++)
    PS_TRY(ps__bench_launch(b, &ps__k_rmsnorm_fwd, &a, ptr, 3));
  return PS_OK;
}

ps_status ps__bench_fill_values(ps__bench *b) {
  for (uint64_t at = 0; at < VALUES; at += COPY)
    PS_TRY(ps__bench_copy(b, b->exec.stream, b->values + at, place(b, 0)));
  return ps__bench_settle(b);
}

ps_status ps__bench_bandwidths(ps__bench *b, double seconds) {
  ps_hardware *hw = b->hw;
  double s[MAX_PARTS];
  PS_TRY(ps__bench_time_parts(b, &(ps__timed){.part = run_norms, .n_parts = 1}, seconds, s));
  hw->elementwise_bytes_per_s = NORMS_BYTES / s[0];
  PS_TRY(ps__bench_time_case(b, case_small, seconds / 2, s));
  hw->op_ns = s[0] * 1e7;
  PS_TRY(ps__bench_time_case(b, ps__bench_copy_in, seconds, s));
  hw->link[PS_LINK_H2D].bytes_per_s = (double)COPY / s[0];
  PS_TRY(ps__bench_time_case(b, ps__bench_copy_out, seconds, s));
  hw->link[PS_LINK_D2H].bytes_per_s = (double)COPY / s[0];
  PS_TRY(ps__bench_time_case(b, ps__bench_copy_both, seconds, s));
  hw->link[PS_LINK_H2D].duplex_bytes_per_s = (double)COPY / s[0];
  return PS_OK;
}

ps_status ps__bench_keep_flowing(const ps__cuda_driver *cu, ps__flow *f) {
  if (f->ctx) /* between the calls other GPUs' flows turn to their contexts */
    PS__CUDA_TRY(cu, CtxSetCurrent(f->ctx));
  while (f->n_done < f->n_issued) {
    const CUresult r = cu->EventQuery(f->event[f->n_done % IN_FLIGHT]);
    if (r == CUDA_ERROR_NOT_READY)
      break;
    if (r != CUDA_SUCCESS)
      return ps__cuda_fail(cu, r, "cuEventQuery");
    f->n_done++;
  }
  for (; f->n_issued < f->n_done + IN_FLIGHT; f->n_issued++) {
    const ps__host_places *at = f->places;
    char *host = at->first + f->n_issued % at->n * at->stride + (f->to_host ? COPY : 0);
    const CUdeviceptr h = (CUdeviceptr)(uintptr_t)host, d = (CUdeviceptr)(uintptr_t)f->device;
    PS__CUDA_TRY(cu, MemcpyAsync(f->to_host ? h : d, f->to_host ? d : h, COPY, f->stream));
    if (f->onward)
      PS__CUDA_TRY(cu, MemcpyAsync((CUdeviceptr)(uintptr_t)f->onward, d, COPY, f->stream));
    PS__CUDA_TRY(cu, EventRecord(f->event[f->n_issued % IN_FLIGHT], f->stream));
  }
  return PS_OK;
}

ps_status ps__bench_share(const ps__cuda_driver *cu, double seconds, const ps__host_load *load,
                          ps__flow *flow, uint32_t n, double *host_bytes_per_s) {
  uint64_t half = 0;
  double host = 0;
  ps_status st = PS_OK;
  for (uint32_t i = 0; i < n; i++)
    flow[i].n_issued = flow[i].n_done = flow[i].at_half = 0;
  if (load)
    PS_TRY(load->start(load->arg));
  for (const uint64_t begin = ps__now_ns(); st == PS_OK;) {
    bool enough = half && seconds_since(begin) >= seconds;
    for (uint32_t i = 0; st == PS_OK && i < n; i++) {
      st = ps__bench_keep_flowing(cu, &flow[i]);
      enough &= flow[i].n_done >= flow[i].at_half + 8;
    }
    if (enough)
      break;
    if (half || seconds_since(begin) < seconds / 2)
      continue;
    half = ps__now_ns();
    host = load ? load->bytes(load->arg) : 0;
    for (uint32_t i = 0; i < n; i++)
      flow[i].at_half = flow[i].n_done;
  }
  const double s = seconds_since(half);
  *host_bytes_per_s = load ? (load->bytes(load->arg) - host) / s : 0;
  if (load)
    load->stop(load->arg);
  for (uint32_t i = 0; i < n; i++)
    flow[i].bytes_per_s = (double)((flow[i].n_done - flow[i].at_half) * COPY) / s;
  return st;
}

/* What a host op and @copies get of the host's memory bandwidth while all of them run. Each flows
 * at its own rate, counted over the second half of the time. */
static ps_status measure_share(ps__bench *b, double seconds, const ps__host_load *load,
                               uint32_t copies, ps_contention_rate *out) {
  ps__flow flow[2];
  uint32_t n = 0;
  double host;
  if (copies & PS_CONTENTION_H2D)
    flow[n++] = (ps__flow){.stream = b->in,
                           .event = b->event[0],
                           .device = value(b, COPIED),
                           .places = &b->host->places};
  if (copies & PS_CONTENTION_D2H)
    flow[n++] = (ps__flow){.stream = b->out,
                           .event = b->event[1],
                           .device = value(b, Y),
                           .places = &b->host->places,
                           .to_host = true};
  PS_TRY(ps__bench_share(b->cu, seconds, load, flow, n, &host));
  PS_TRY(ps__bench_settle(b));
  *out = ps__bench_rates(b->hw, copies | load->kind, load, flow, n, host);
  return PS_OK;
}

ps_contention_rate ps__bench_rates(const ps_hardware *hw, uint32_t kinds, const ps__host_load *load,
                                   const ps__flow *flow, uint32_t n, double host_bytes_per_s) {
  double rate[2] = {0}, flows[2] = {0};
  for (uint32_t i = 0; i < n; i++) {
    rate[flow[i].to_host] += flow[i].bytes_per_s;
    flows[flow[i].to_host]++;
  }
  return (ps_contention_rate){
      .kinds = kinds,
      .threads = load ? load->threads : 0,
      .h2d_bytes_per_s = flows[0] > 0 ? rate[0] / flows[0] : hw->link[PS_LINK_H2D].bytes_per_s,
      .d2h_bytes_per_s = flows[1] > 0 ? rate[1] / flows[1] : hw->link[PS_LINK_D2H].bytes_per_s,
      .host_bytes_per_s = host_bytes_per_s};
}

/* Each load alone and beside every set of copies. */
ps_status ps__bench_memory(ps__bench *b, double seconds) {
  static const uint32_t copies[PS__CUDA_CASES_A_LOAD] = {0, PS_CONTENTION_H2D, PS_CONTENTION_D2H,
                                                         PS_CONTENTION_H2D | PS_CONTENTION_D2H};
  ps_contention_rate *s = b->hw->contention;
  for (uint32_t i = 0;
       i < b->host->n_loads && (i + 1) * PS__CUDA_CASES_A_LOAD <= PS_MAX_CONTENTION_RATES; i++)
    for (int k = 0; k < PS__CUDA_CASES_A_LOAD; k++)
      PS_TRY(measure_share(b, seconds, &b->host->load[i], copies[k], s++));
  const ps_contention_rate *all = &b->hw->contention[PS__CUDA_CASES_A_LOAD - 1];
  b->hw->memory_bytes_per_s = all->h2d_bytes_per_s + all->d2h_bytes_per_s + all->host_bytes_per_s;
  return PS_OK;
}
