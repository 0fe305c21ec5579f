/* gpus_flows.c - what bench/gpus.c measures: copies and products on streams of several GPUs at
 * once, beside an op of the host. */
#include "gpus.h"
#include "kernels/cpu/cpu.h"
#include "optim/optim.h"
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

enum { ROWS = 8192, WIDE = 14336, DIM = 4096 };
static const double FLOPS = 2.0 * ROWS * WIDE * DIM;
static const uint64_t PART = PART_MIB * MIB;
static const double PATIENCE_S = 10; /* the longest time without the end of a copy or product */

/* ---- the host's ops -------------------------------------------------------------------------- */

static double load_bytes(const load *l) {
  const double n = (double)PART / 2;
  return n * (l->adamw ? ps__update_bytes(PS_OPTIMIZER_ADAMW, PS_RECIPE_BF16, PS_UPDATE_WHOLE) : 6);
}

/* Each call takes a part of the arrays, in turn, so that no cache holds it. */
static void load_main(void *arg) {
  load *l = arg;
  const ps__cpu_exec exec = {.pool = l->pool};
  const ps__args_accumulate sum = {.n = PART / 2, .dt = PS_BF16};
  const ps__segment all = {0, PART / 2, 0.1f};
  ps__update u = {.optimizer = PS_OPTIMIZER_ADAMW,
                  .recipe = PS_RECIPE_BF16,
                  .lr = 1e-4f,
                  .beta1 = 0.9f,
                  .beta2 = 0.95f,
                  .eps = 1e-8f,
                  .grad_scale = 1,
                  .seed = 1};
  ps__update_correct(&u, 1);
  for (uint64_t n = 0; !atomic_load(&l->stop); n++) {
    const uint64_t at = n % (ARRAY_MIB / PART_MIB) * PART;
    const ps__arrays a = {.w = bench.array[0] + at,
                          .grad = bench.array[1] + at,
                          .state = {bench.array[2] + at, bench.array[3] + at}};
    void *ptr[2] = {bench.array[1] + at, bench.array[0] + at};
    if (l->adamw)
      ps__update_on_pool(l->pool, &u, &all, 1, &a, 0);
    else if (ps__k_accumulate_host.fn[PS_BACKEND_CPU](&(ps_launch){
                 .args = &sum, .ptr = ptr, .n_ptr = 2, .exec = (void *)&exec}) != PS_OK)
      return;
    atomic_fetch_add(&l->n, 1);
  }
}

static ps_status load_start(load *l) {
  atomic_store(&l->stop, 0);
  atomic_store(&l->n, 0);
  PS_TRY(ps__pool_create(&l->pool, l->n_threads, "load"));
  const ps_status st = ps__thread_start(&l->thread, load_main, l, "load");
  if (st != PS_OK)
    ps__pool_destroy(l->pool);
  for (const uint64_t t0 = ps__now_ns(); st == PS_OK && !atomic_load(&l->n) && since(t0) < 5;)
    sched_yield(); /* until its threads are at work */
  return st;
}

static void load_stop(load *l) {
  atomic_store(&l->stop, 1);
  ps__thread_join(l->thread);
  ps__pool_destroy(l->pool);
}

/* bf16, about +-0.03 */
static void fill_task(void *arg, int64_t task, uint32_t worker) {
  uint32_t *word = (uint32_t *)(void *)((char *)arg + (uint64_t)task * PART);
  uint32_t x = (uint32_t)task * 2654435761u + 1;
  (void)worker;
  for (uint64_t i = 0; i < PART / 4; i++) {
    x = x * 1664525u + 1013904223u;
    word[i] = 0x10001u * ps__f32_to_bf16(((float)(x >> 8) / 16777216.0f - 0.5f) * 0.07f);
  }
}
void bench_fill(ps__pool *pool, char *p, uint64_t bytes) {
  ps__pool_run(pool, (int64_t)(bytes / PART), fill_task, p);
}

/* ---- what flows ------------------------------------------------------------------------------ */

/* Copies or products on a stream of a GPU: IN_FLIGHT batches are queued at any time. A batch of
 * copies is 64 MiB in all, one of products a single product. */
typedef struct flow {
  uint32_t kind, gpu, from, to; /* from, to: of SEND and RECEIVE */
  uint64_t bytes;               /* of a copy */
  uint64_t n_issued, n_done, at_half;
  double rate; /* FLOPs/s or BYTES/s */
} flow;

static uint64_t batch(const flow *f) { return f->kind == COMPUTE ? 1 : 64 * MIB / f->bytes; }

ps_status bench_multiply(const gpu *g) {
  const ps__args_gemm args = ps__gemm_args(ROWS, WIDE, DIM, false, true, PS_BF16);
  char *m = (char *)(uintptr_t)g->memory;
  if (!g->exec.blas)
    return ps__fail(PS_EDEVICE, "cuBLASLt did not start");
  void *ptr[3] = {m + A * MIB, m + B * MIB, m + C * MIB};
  return ps__k_gemm.fn[PS_BACKEND_CUDA](
      &(ps_launch){.args = &args, .ptr = ptr, .n_ptr = 3, .exec = (void *)&g->exec});
}

static CUdeviceptr in_area(uint32_t i, uint64_t at_mib, const flow *f, uint64_t n) {
  return bench.gpu[i].memory + at_mib * MIB + n % (AREA_MIB * MIB / f->bytes) * f->bytes;
}

static ps_status copy(const flow *f, uint64_t n) {
  const gpu *g = &bench.gpu[f->gpu];
  const uint64_t half = bench_host_mib() / 2 * MIB;
  char *place = g->host + (f->kind == D2H ? half : 0) + n % (half / f->bytes) * f->bytes;
  CUdeviceptr dst, src;
  if (f->kind == H2D)
    dst = in_area(f->gpu, IN, f, n), src = (CUdeviceptr)(uintptr_t)place;
  else if (f->kind == D2H)
    dst = (CUdeviceptr)(uintptr_t)place, src = in_area(f->gpu, OUT, f, n);
  else
    dst = in_area(f->to, RECEIVED, f, n), src = in_area(f->from, SENT, f, n);
  PS__CUDA_TRY(bench.cu, MemcpyAsync(dst, src, f->bytes, g->stream[f->kind]));
  return PS_OK;
}

static ps_status keep_flowing(flow *f) {
  const gpu *g = &bench.gpu[f->gpu];
  const CUevent *event = g->event[f->kind];
  PS_TRY(bench_turn_to(f->gpu));
  for (; f->n_done < f->n_issued; f->n_done++) {
    const CUresult r = bench.cu->EventQuery(event[f->n_done % IN_FLIGHT]);
    if (r == CUDA_ERROR_NOT_READY)
      break;
    if (r != CUDA_SUCCESS)
      return ps__cuda_fail(bench.cu, r, "cuEventQuery");
  }
  for (; f->n_issued < f->n_done + IN_FLIGHT; f->n_issued++) {
    for (uint64_t i = 0, n = batch(f); i < n; i++)
      PS_TRY(f->kind == COMPUTE ? bench_multiply(g) : copy(f, f->n_issued * n + i));
    PS__CUDA_TRY(bench.cu, EventRecord(event[f->n_issued % IN_FLIGHT], g->stream[f->kind]));
  }
  return PS_OK;
}

ps_status bench_settle(void) {
  const uint64_t begin = ps__now_ns();
  for (uint32_t i = 0; i < bench.n_gpus; i++) {
    PS_TRY(bench_turn_to(i));
    for (int k = 0; k < N_KINDS;) {
      const CUresult r = bench.cu->StreamQuery(bench.gpu[i].stream[k]);
      if (r != CUDA_SUCCESS && r != CUDA_ERROR_NOT_READY)
        return ps__cuda_fail(bench.cu, r, "cuStreamQuery");
      if (r == CUDA_ERROR_NOT_READY && since(begin) > PATIENCE_S) {
        bench.stuck = true;
        return ps__fail(PS_EDEVICE, "GPU %u is still busy after %g s", i, PATIENCE_S);
      }
      k += r == CUDA_SUCCESS;
    }
  }
  return PS_OK;
}

/* Each flow has its own rate, counted over the second half of the time. @host_rate: that of @l. */
static ps_status flow_for(flow *f, uint32_t n, const load *l, double time, double *host_rate) {
  uint64_t half = 0, calls = 0;
  for (const uint64_t begin = ps__now_ns();;) {
    bool enough = half && since(begin) >= time && (!l || atomic_load(&l->n) >= calls + 4);
    for (uint32_t i = 0; i < n; i++) {
      PS_TRY(keep_flowing(&f[i]));
      enough &= f[i].n_done >= f[i].at_half + 4;
    }
    if (enough)
      break;
    if (since(begin) > time + PATIENCE_S)
      return ps__fail(PS_EDEVICE, "%g s were not enough for four batches of each flow",
                      time + PATIENCE_S);
    if (half || since(begin) < time / 2)
      continue;
    half = ps__now_ns();
    calls = l ? atomic_load(&l->n) : 0;
    for (uint32_t i = 0; i < n; i++)
      f[i].at_half = f[i].n_done;
  }
  const double s = since(half);
  for (uint32_t i = 0; i < n; i++)
    f[i].rate = (double)((f[i].n_done - f[i].at_half) * batch(&f[i])) / s *
                (f[i].kind == COMPUTE ? FLOPS : (double)f[i].bytes);
  *host_rate = l ? load_bytes(l) * (double)(atomic_load(&l->n) - calls) / s : 0;
  return PS_OK;
}

/* ---- cases ----------------------------------------------------------------------------------- */

typedef struct row {
  char title[96];
  double mean[N_KINDS], host_rate; /* of the flows of a kind */
} row;
static row rows[24];
static uint32_t n_rows;

static uint32_t flows_of(const spec *s, flow *f) {
  const uint32_t kind = s->by_receiver ? RECEIVE : SEND,
                 n_pairs = s->peers == RING ? bench.n_gpus : s->peers == PAIR;
  uint32_t n = 0;
  for (uint32_t i = 0; i < n_pairs; i++) {
    const uint32_t from = s->peers == RING ? i : s->from,
                   to = s->peers == RING ? (i + 1) % bench.n_gpus : s->to;
    f[n++] = (flow){.kind = kind,
                    .gpu = s->by_receiver ? to : from,
                    .from = from,
                    .to = to,
                    .bytes = s->copy_mib * MIB};
  }
  for (uint32_t i = 0; i < s->n_host; i++)
    for (uint32_t way = H2D; way <= D2H; way++)
      if (s->ways >> way & 1)
        f[n++] = (flow){.kind = way, .gpu = i, .bytes = 64 * MIB};
  for (uint32_t i = 0; i < s->n_product; i++)
    f[n++] = (flow){.kind = COMPUTE, .gpu = i};
  return n;
}

static void title_of(const spec *s, char *out, size_t room) {
  static const char *const way[] = {"", "h2d", "d2h", "duplex"};
  const char *stream = s->by_receiver ? "receiver" : "sender";
  char part[4][48] = {""};
  if (s->peers == PAIR)
    snprintf(part[0], sizeof *part, "GPU %u to %u, %u MiB, %s's stream", s->from, s->to,
             s->copy_mib, stream);
  if (s->peers == RING)
    snprintf(part[0], sizeof *part, "%s, %s's stream",
             bench.n_gpus == 2 ? "both ways" : "each to the next", stream);
  if (s->n_host)
    snprintf(part[1], sizeof *part, "%s %u GPU%s", way[s->ways], s->n_host,
             s->n_host == 1 ? "" : "s");
  if (s->n_product)
    snprintf(part[2], sizeof *part, "products %u GPU%s", s->n_product,
             s->n_product == 1 ? "" : "s");
  if (s->load)
    snprintf(part[3], sizeof *part, "%s, %u thread%s", s->load->name, s->load->n_threads,
             s->load->n_threads == 1 ? "" : "s");
  *out = 0;
  for (size_t i = 0, n = 0; i < 4; i++)
    if (*part[i] && n < room)
      n += (size_t)snprintf(out + n, room - n, "%s%s", n ? " + " : "", part[i]);
}

static void report(const char *title, const spec *s, const flow *f, uint32_t n, double host_rate) {
  static const char *const name[] = {"h2d", "d2h", "peer copy", "peer copy", "products"};
  uint32_t count[N_KINDS] = {0};
  row r = {.host_rate = host_rate};
  snprintf(r.title, sizeof r.title, "%s", title);
  printf("{\"case\": \"%s\", \"seconds\": %.3g, \"flows\": [", title, s->time * bench.seconds);
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t kind = f[i].kind == RECEIVE ? SEND : f[i].kind;
    r.mean[kind] += (f[i].rate - r.mean[kind]) / ++count[kind];
    printf("%s{\"what\": \"%s\", \"stream_of_gpu\": %u", i ? ", " : "", name[kind], f[i].gpu);
    if (kind == SEND)
      printf(", \"from\": %u, \"to\": %u", f[i].from, f[i].to);
    if (kind != COMPUTE)
      printf(", \"copy_bytes\": %llu", (unsigned long long)f[i].bytes);
    printf(", \"%s_per_s\": %.4g}", kind == COMPUTE ? "flops" : "bytes", f[i].rate);
  }
  printf("]");
  if (s->load)
    printf(", \"host_op\": {\"what\": \"%s\", \"threads\": %u, \"bytes_per_s\": %.4g}",
           s->load->name, s->load->n_threads, host_rate);
  printf("}\n");
  fflush(stdout);
  if (s->in_table && n_rows < sizeof rows / sizeof *rows)
    rows[n_rows++] = r;
}

static ps_status measure(const spec *s, const char *title) {
  flow f[4 * PS_MAX_DEVICES];
  const uint32_t n = flows_of(s, f);
  double host_rate = 0;
  if (s->n_host && !bench.pinned)
    return ps__fail(PS_EDEVICE, "the host memory is not pinned");
  if (s->load)
    PS_TRY(load_start(s->load));
  ps_status st = flow_for(f, n, s->load, s->time * bench.seconds, &host_rate);
  if (s->load)
    load_stop(s->load);
  if (st == PS_OK)
    st = bench_settle();
  else if (!bench.stuck)
    bench.stuck = bench_settle() != PS_OK;
  if (st == PS_OK)
    report(title, s, f, n, host_rate);
  return st;
}

void bench_case(spec s) {
  char title[96];
  s.copy_mib = s.copy_mib ? s.copy_mib : 64;
  title_of(&s, title, sizeof title);
  if (!bench.stuck && measure(&s, title) != PS_OK)
    bench_failed(title);
}

/* Means over the flows of a kind, in GB/s and TFLOP/s. */
void bench_table(void) {
  printf("\n%-62s %6s %6s %6s %8s %6s\n", "GB/s a GPU; host: read + written", "peer", "h2d", "d2h",
         "TFLOP/s", "host");
  for (uint32_t i = 0; i < n_rows; i++) {
    const row *r = &rows[i];
    const double v[5] = {r->mean[SEND] / 1e9, r->mean[H2D] / 1e9, r->mean[D2H] / 1e9,
                         r->mean[COMPUTE] / 1e12, r->host_rate / 1e9};
    printf("%-62s", r->title);
    for (int k = 0; k < 5; k++)
      if (v[k] > 0)
        printf(" %*.1f", k == 3 ? 8 : 6, v[k]);
      else
        printf(" %*s", k == 3 ? 8 : 6, "");
    printf("\n");
  }
}
