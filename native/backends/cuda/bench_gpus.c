/* bench_gpus.c - several GPUs at once. Copies, alone and beside the host's work: how they divide
 * the host's memory bandwidth. Products and attention: how much slower they are than on one GPU. */
#include "backends/cuda/bench.h"
#include <string.h>

enum { H2D, D2H };

typedef struct gpu {
  CUdevice dev;
  CUcontext ctx;
  CUdeviceptr memory; /* 2 * COPY: what comes, what goes */
  CUstream stream[2];
  CUevent event[2][IN_FLIGHT];
  ps__host_places places;
  /* products and attention */
  ps__host_work work;
  ps_hardware hw;
  ps__bench compute;
  char *next; /* where copies to this GPU go on to: a GPU that it can access; NULL: nowhere */
  uint64_t n_issued, n_done, n_counted; /* turns */
  double counted_s;
} gpu;

typedef struct bench {
  const ps__cuda_driver *cu;
  const ps__host_work *host;
  uint32_t n, n_pinned;
  bool computed; /* kernels were loaded into the contexts */
  gpu gpu[PS_MAX_DEVICES];
} bench;

static ps_status turn_to(const bench *b, const gpu *g) {
  PS__CUDA_TRY(b->cu, CtxSetCurrent(g->ctx));
  return PS_OK;
}

static ps_status make_context(const bench *b, uint32_t device, gpu *g) {
  uint64_t others;
  CUcontext ctx;
  PS__CUDA_TRY(b->cu, DeviceGet(&g->dev, (int)device));
  ps__cuda_usage_begin(b->cu, device, &others);
  PS__CUDA_TRY(b->cu, DevicePrimaryCtxRetain(&ctx, g->dev));
  g->ctx = ctx;
  return PS_OK;
}

static ps_status open_gpu(const bench *b, gpu *g) {
  PS_TRY(turn_to(b, g));
  PS__CUDA_TRY(b->cu, MemAlloc(&g->memory, 2 * COPY));
  for (int way = 0; way < 2; way++) {
    PS__CUDA_TRY(b->cu, StreamCreate(&g->stream[way], CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < IN_FLIGHT; i++)
      PS__CUDA_TRY(b->cu, EventCreate(&g->event[way][i], CU_EVENT_DEFAULT));
  }
  return PS_OK;
}

static void close_gpu(const bench *b, const gpu *g) {
  b->cu->CtxSetCurrent(g->ctx);
  for (int way = 0; way < 2; way++) {
    for (int i = 0; i < IN_FLIGHT; i++)
      if (g->event[way][i])
        b->cu->EventDestroy(g->event[way][i]);
    if (g->stream[way])
      b->cu->StreamDestroy(g->stream[way]);
  }
  if (g->memory)
    b->cu->MemFree(g->memory);
}

/* For all contexts that are there. False: the system refuses it. */
static bool pin(bench *b) {
  const ps__host_places *all = &b->host->places;
  CUresult r = b->cu->CtxSetCurrent(b->gpu[0].ctx);
  for (; r == CUDA_SUCCESS && b->n_pinned < all->n; b->n_pinned += r == CUDA_SUCCESS)
    r = b->cu->MemHostRegister(all->first + b->n_pinned * all->stride, 2 * COPY,
                               CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
  return r == CUDA_SUCCESS;
}

static ps__flow flow_of(const gpu *g, int way) {
  return (ps__flow){.ctx = g->ctx,
                    .stream = g->stream[way],
                    .event = g->event[way],
                    .device = (char *)(uintptr_t)g->memory + (way == D2H ? COPY : 0),
                    .places = &g->places,
                    .to_host = way == D2H};
}

/* ---- copies ---------------------------------------------------------------------------------- */

static ps_status measure_share(bench *b, const ps_hardware *hw, double seconds,
                               const ps__host_load *load, uint32_t copies,
                               ps_contention_rate *out) {
  ps__flow flow[2 * PS_MAX_DEVICES];
  uint32_t n = 0;
  double host;
  for (uint32_t i = 0; i < b->n; i++)
    for (int way = 0; way < 2; way++)
      if (copies & (way == D2H ? PS_CONTENTION_D2H : PS_CONTENTION_H2D))
        flow[n++] = flow_of(&b->gpu[i], way);
  ps_status st = ps__bench_share(b->cu, seconds, load, flow, n, &host);
  for (uint32_t i = 0; i < n; i++) { /* also after an error: what is in flight uses the memory */
    const CUresult r = b->cu->CtxSetCurrent(flow[i].ctx) == CUDA_SUCCESS
                           ? b->cu->StreamSynchronize(flow[i].stream)
                           : CUDA_ERROR_INVALID_CONTEXT;
    if (st == PS_OK && r != CUDA_SUCCESS)
      st = ps__cuda_fail(b->cu, r, "cuStreamSynchronize");
  }
  if (st == PS_OK)
    *out = ps__bench_rates(hw, copies | (load ? load->kind : 0), load, flow, n, host);
  return st;
}

static ps_status measure_copies(bench *b, ps_hardware *hw, double seconds) {
  const uint32_t both = PS_CONTENTION_H2D | PS_CONTENTION_D2H;
  ps_contention_rate found[PS_MAX_CONTENTION_RATES] = {{0}};
  uint32_t n = 0;
  for (uint32_t l = 0; l <= b->host->n_loads && n + both <= PS_MAX_CONTENTION_RATES; l++)
    for (uint32_t copies = PS_CONTENTION_H2D; copies <= both; copies++)
      PS_TRY(measure_share(b, hw, seconds, l ? &b->host->load[l - 1] : NULL, copies, &found[n++]));
  hw->n_gpus = b->n;
  hw->gpus_compute_speed = 0; /* what @hw had is of another number of GPUs */
  memcpy(hw->gpus_contention, found, sizeof found);
  return PS_OK;
}

/* ---- products and attention ------------------------------------------------------------------ */

/* Whether each GPU has enough memory free. Besides what is allocated some is for kernels and
 * libraries. */
static ps_status has_memory(const bench *b, const ps_hardware *hw, bool *out) {
  const uint64_t takes = ps__bench_memory_bytes(hw) + (512ull << 20);
  *out = true;
  for (uint32_t i = 0; i < b->n && *out; i++) {
    size_t left, total;
    char need[32], there[32];
    PS_TRY(turn_to(b, &b->gpu[i]));
    PS__CUDA_TRY(b->cu, MemGetInfo(&left, &total));
    *out = left >= takes;
    if (!*out)
      ps__log(
          PS_LOG_WARN,
          "measuring products on %u GPUs at once takes %s of each, %s of GPU %u are free: plans "
          "take the speed of one GPU; end what else uses it, and the next plan measures again",
          b->n, ps__format_bytes(need, takes), ps__format_bytes(there, left), hw->device + i);
  }
  return PS_OK;
}

static ps_status open_compute(bench *b, uint32_t i, const ps_hardware *hw) {
  gpu *g = &b->gpu[i];
  PS_TRY(turn_to(b, g));
  g->hw = *hw;
  g->hw.device = hw->device + i;
  g->work = (ps__host_work){.places = g->places};
  g->compute = (ps__bench){.cu = b->cu, .hw = &g->hw, .host = &g->work};
  PS_TRY(ps__bench_open(&g->compute));
  PS_TRY(ps__bench_fill_values(&g->compute));
  PS_TRY(ps__bench_prepare(&g->compute));
  return ps__bench_tune_usual(&g->compute);
}

/* As GPUs of a training do it: what one fetches from the host it passes on to the next one. */
static ps_status link_up(bench *b) {
  for (uint32_t i = 0; i < b->n; i++) {
    const gpu *next = &b->gpu[(i + 1) % b->n];
    bool access;
    PS_TRY(turn_to(b, &b->gpu[i]));
    PS_TRY(ps__cuda_reach(b->cu, b->gpu[i].dev, next->dev, next->ctx, &access));
    b->gpu[i].next = access ? value(&next->compute, COPIED) : NULL;
  }
  return PS_OK;
}

/* Two turns are queued at any time, so that the GPU never rests. */
enum { TURNS = 2 };
static ps_status keep_computing(const bench *b, gpu *g, bool counts) {
  CUevent(*event)[MAX_PARTS + 1] = g->compute.event;
  const CUstream stream = g->compute.exec.stream;
  PS_TRY(turn_to(b, g));
  for (; g->n_done < g->n_issued; g->n_done++) {
    const CUevent *e = event[g->n_done % TURNS];
    const CUresult r = b->cu->EventQuery(e[1]);
    if (r == CUDA_ERROR_NOT_READY)
      break;
    if (r != CUDA_SUCCESS)
      return ps__cuda_fail(b->cu, r, "cuEventQuery");
    if (counts)
      PS_TRY(ps__bench_add_elapsed(&g->compute, e[0], e[1], &g->counted_s));
    g->n_counted += counts;
  }
  for (; g->n_issued < g->n_done + TURNS; g->n_issued++) {
    const CUevent *e = event[g->n_issued % TURNS];
    PS__CUDA_TRY(b->cu, EventRecord(e[0], stream));
    PS_TRY(ps__bench_usual_turn(&g->compute));
    PS__CUDA_TRY(b->cu, EventRecord(e[1], stream));
  }
  return PS_OK;
}

static ps_status settle(const bench *b, const gpu *g) {
  PS_TRY(turn_to(b, g));
  PS__CUDA_TRY(b->cu, StreamSynchronize(g->compute.exec.stream));
  PS__CUDA_TRY(b->cu, StreamSynchronize(g->stream[H2D]));
  PS__CUDA_TRY(b->cu, StreamSynchronize(g->stream[D2H]));
  return PS_OK;
}

static ps_status compute_on(bench *b, uint32_t n, double seconds) {
  ps__flow flow[PS_MAX_DEVICES][2];
  bool enough = false;
  for (uint32_t i = 0; i < n; i++) {
    gpu *g = &b->gpu[i];
    g->n_issued = g->n_done = g->n_counted = 0;
    g->counted_s = 0;
    for (int way = 0; way < 2; way++)
      flow[i][way] = flow_of(g, way);
    flow[i][H2D].onward = n > 1 ? g->next : NULL;
  }
  for (const uint64_t begin = ps__now_ns(); !enough;) {
    const double s = seconds_since(begin);
    enough = s >= seconds;
    for (uint32_t i = 0; i < n; i++) {
      PS_TRY(keep_computing(b, &b->gpu[i], s >= seconds / 2));
      for (int way = 0; way < 2; way++)
        PS_TRY(ps__bench_keep_flowing(b->cu, &flow[i][way]));
      enough &= b->gpu[i].n_counted >= 2;
    }
  }
  return PS_OK;
}

/* @out: SECONDS of a turn on the slowest of the first @n GPUs, while each of them computes and
 * copies both ways, over the second half of the time. A step waits for its slowest GPU. */
static ps_status time_turns(bench *b, uint32_t n, double seconds, double *out) {
  ps_status st = compute_on(b, n, seconds);
  *out = 0;
  for (uint32_t i = 0; i < n; i++) { /* also after an error: what is in flight uses the memory */
    const gpu *g = &b->gpu[i];
    const ps_status settled = settle(b, g);
    if (st == PS_OK)
      st = settled;
    if (st == PS_OK && g->counted_s / (double)g->n_counted > *out)
      *out = g->counted_s / (double)g->n_counted;
  }
  return st;
}

/* First a load that does not count, because a GPU that is bound by its power keeps its highest
 * clock for some seconds. Then all GPUs, the first one alone, and all again: so a drift of the
 * clock cancels. */
static const double LOAD_S = 2.5, COUNTED_S = 0.8;
static ps_status compare(bench *b, double *speed) {
  double load, before, alone, after;
  PS_TRY(time_turns(b, b->n, LOAD_S, &load));
  PS_TRY(time_turns(b, b->n, COUNTED_S, &before));
  PS_TRY(time_turns(b, 1, COUNTED_S, &alone));
  PS_TRY(time_turns(b, b->n, COUNTED_S, &after));
  *speed = 2 * alone / (before + after);
  return PS_OK;
}

static ps_status measure_compute(bench *b, ps_hardware *hw) {
  double speed = 0;
  bool fits = false;
  ps_status st = has_memory(b, hw, &fits);
  if (st == PS_OK && !fits)
    return PS_OK;
  b->computed = st == PS_OK;
  for (uint32_t i = 0; st == PS_OK && i < b->n; i++)
    st = open_compute(b, i, hw);
  if (st == PS_OK)
    st = link_up(b);
  if (st == PS_OK)
    st = compare(b, &speed);
  for (uint32_t i = 0; i < b->n; i++)
    if (b->gpu[i].compute.cu && turn_to(b, &b->gpu[i]) == PS_OK)
      ps__bench_close(&b->gpu[i].compute);
  if (st == PS_OK)
    hw->gpus_compute_speed = speed < 1 ? speed : 1;
  if (st != PS_EDEVICE && st != PS_ENOMEM)
    return st;
  ps__log(PS_LOG_WARN,
          "products on %u GPUs at once are not measured, plans take the speed of one GPU: %s", b->n,
          ps_last_error());
  ps__clear_error();
  return PS_OK;
}

/* ---- both ------------------------------------------------------------------------------------ */

static ps_status measure(bench *b, ps_hardware *hw, double seconds) {
  for (uint32_t i = 0; i < b->n; i++)
    PS_TRY(open_gpu(b, &b->gpu[i]));
  if (!pin(b))
    return PS_OK; /* a training says why it cannot pin */
  if (hw->n_gpus != b->n)
    PS_TRY(measure_copies(b, hw, seconds));
  return measure_compute(b, hw);
}

ps_status ps__cuda_measure_gpus(ps_hardware *hw, uint32_t n, double seconds,
                                const ps__host_work *host) {
  bench b = {.host = host, .n = n};
  const ps__host_places *all = &host->places;
  CUcontext old;
  ps_status st = ps__cuda_driver_open(&b.cu);
  for (uint32_t i = 0; i < n && st == PS_OK; i++) {
    b.gpu[i].places =
        (ps__host_places){all->first + i * (all->n / n) * all->stride, all->stride, all->n / n};
    st = make_context(&b, hw->device + i, &b.gpu[i]);
  }
  if (st == PS_OK && b.cu->CtxPushCurrent(b.gpu[0].ctx) == CUDA_SUCCESS) {
    st = measure(&b, hw, seconds);
    b.cu->CtxSetCurrent(b.gpu[0].ctx);
    for (uint32_t i = 0; i < b.n_pinned; i++)
      b.cu->MemHostUnregister(all->first + i * all->stride);
    for (uint32_t i = 0; i < n; i++)
      close_gpu(&b, &b.gpu[i]);
    b.cu->CtxPopCurrent(&old);
  }
  /* with kernels in them contexts are kept: libraries hold handles of a context until the process
   * ends */
  for (uint32_t i = 0; i < n; i++)
    if (b.gpu[i].ctx && !b.computed)
      b.cu->DevicePrimaryCtxRelease(b.gpu[i].dev);
  return st;
}
