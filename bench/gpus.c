/* gpus.c - measures how the GPUs of one machine slow each other: copies between GPUs and with the
 * host, alone, at once, and beside products and host ops; memory of contexts; pinning.
 *
 * usage: gpus [N [SECONDS]]      (default: 2 GPUs, 1 second a case; about 40 s in all)
 *
 * Takes 9 GiB of host memory and 5 GiB of each GPU. Prints a JSON object for each measurement as
 * soon as it is made, and at the end a table.
 *   rates     bytes/s and FLOPs/s, of each flow of copies or products. A host op's bytes are read
 *             plus written.
 *   time      the second half of a case's time counts. Cases of copies alone take a quarter or a
 *             half of SECONDS.
 *   copies    64 MiB where nothing else is said. The sender's stream is a stream of the GPU whose
 *             memory is read. The engine uses that one.
 *   products  bf16, 8192 x 14336 x 4096, by cuBLASLt's first choice
 * A case that fails prints its error, and the next one follows. Exit status: 0; 1 where a case
 * failed; 77, with the reason, where fewer than N GPUs can be used. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static int usage(void) {
  fprintf(stderr, "usage: gpus [N, 1 to 8 [SECONDS, 0.1 to 60]]\n");
  return 2;
}
static int not_here(const char *why) {
  printf("gpus: %s\n", why);
  return 77;
}

#ifdef PS_CUDA
#  include "gpus.h"
#  include "kernels/cuda/scratch.h"
#  include "backends/cuda/probe.h"
#  include <signal.h>
#  include <string.h>
#  include <unistd.h>

struct bench bench;
static uint32_t n_cpus;

double since(uint64_t t) { return (double)(ps__now_ns() - t) * 1e-9; }
ps_status bench_turn_to(uint32_t i) {
  PS__CUDA_TRY(bench.cu, CtxSetCurrent(bench.gpu[i].ctx));
  return PS_OK;
}

static void done(void) {
  printf("}\n");
  fflush(stdout);
}

void bench_failed(const char *what) {
  printf("{\"case\": \"%s\", \"error\": \"", what);
  for (const char *p = ps_last_error(); *p; p++)
    putchar(*p == '"' || *p == '\\' || (unsigned char)*p < ' ' ? '\'' : *p);
  printf("\"");
  done();
  bench.n_failed++;
}

/* Whatever waits for ever in the driver ends here. */
static void too_late(int signal) {
  static const char line[] =
      "\n{\"case\": \"all\", \"error\": \"the time for all cases is over\"}\n";
  (void)signal;
  (void)!write(STDOUT_FILENO, line, sizeof line - 1);
  _exit(1);
}

/* ---- facts ----------------------------------------------------------------------------------- */

static void print_machine(void) {
  int version = 0;
  (void)bench.cu->DriverGetVersion(&version);
  printf("{\"case\": \"machine\", \"cpus\": %u, \"driver\": \"CUDA %d.%d\", \"gpus\": [", n_cpus,
         version / 1000, version % 1000 / 10);
  for (uint32_t i = 0; i < bench.n_gpus; i++) {
    char name[64] = "?";
    (void)bench.cu->DeviceGetName(name, sizeof name, bench.gpu[i].dev);
    printf("%s{\"name\": \"%s\", \"numa_node\": %d}", i ? ", " : "", name,
           ps__cuda_numa_node(bench.cu, bench.gpu[i].dev));
  }
  printf("]");
  done();
}

static ps_status print_access(uint32_t from, uint32_t to) {
  const CUdevice a = bench.gpu[from].dev, b = bench.gpu[to].dev;
  int can = 0, rank = -1, atomics = -1;
  PS__CUDA_TRY(bench.cu, DeviceCanAccessPeer(&can, a, b));
  (void)bench.cu->DeviceGetP2PAttribute(&rank, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, a, b);
  (void)bench.cu->DeviceGetP2PAttribute(&atomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
                                        a, b);
  printf("{\"case\": \"peer access\", \"gpu\": %u, \"to_memory_of\": %u, \"can\": %d, "
         "\"performance_rank\": %d, \"native_atomics\": %d",
         from, to, can, rank, atomics);
  done();
  return PS_OK;
}

/* When the memory in use is read, with the table's heads. */
enum { START, ONE, PIN_ONE, ALL, PIN_ALL, PEERS, ALLOCATED, COPIED, PINNED, PRODUCT, N_STAGES };
static const char *const stage_name[N_STAGES][2] = {
    {"before contexts", "start"},
    {"context of GPU 0", "1 ctx"},
    {"4 GiB pinned, one context", "pinned"},
    {"contexts of all, nothing pinned", "N ctx"},
    {"4 GiB pinned, contexts of all", "pinned"},
    {"peer access enabled, nothing pinned", "peers"},
    {"streams, events, 4 GiB of GPU memory", "4 GiB"},
    {"first copies between GPUs", "copied"},
    {"4 GiB pinned, peer access enabled", "pinned"},
    {"first product", "product"}};
static uint64_t lost[PS_MAX_DEVICES][N_STAGES];

/* What the driver and NVML say of each GPU; null where one of them does not know. */
static void look(int stage) {
  printf("{\"case\": \"memory\", \"when\": \"%s\", \"gpus\": [", stage_name[stage][0]);
  for (uint32_t i = 0; i < bench.n_gpus; i++) {
    const gpu *g = &bench.gpu[i];
    size_t free_bytes = 0, total = 0;
    ps__nvml_memory m = {0};
    const bool driver = g->ctx && bench_turn_to(i) == PS_OK &&
                        bench.cu->MemGetInfo(&free_bytes, &total) == CUDA_SUCCESS,
               nvml = g->nvml && ps__nvml_memory_of(g->nvml, &m);
    printf("%s{\"driver_free_bytes\": ", i ? ", " : "");
    printf(driver ? "%zu" : "null", free_bytes);
    printf(", \"nvml_used_bytes\": ");
    printf(nvml ? "%llu" : "null", (unsigned long long)m.used);
    printf(", \"nvml_process_bytes\": ");
    printf(nvml && m.listed ? "%llu" : "null", (unsigned long long)m.own);
    if (nvml || g->ctx)
      (void)!ps__cuda_memory_used(i, &lost[i][stage]);
    printf(", \"lost_bytes\": %llu}", (unsigned long long)lost[i][stage]);
  }
  printf("]");
  done();
}

/* ---- pinning --------------------------------------------------------------------------------- */

static const uint64_t PIN_BYTES = 1024 * MIB;

static ps_status unpin(uint64_t bytes) {
  CUresult r = CUDA_SUCCESS;
  for (uint64_t at = 0; at < bytes; at += PIN_BYTES) {
    const CUresult one = bench.cu->MemHostUnregister(bench.host + at);
    r = r == CUDA_SUCCESS ? one : r;
  }
  bench.pinned = false;
  return r == CUDA_SUCCESS ? PS_OK : ps__cuda_fail(bench.cu, r, "cuMemHostUnregister");
}

static ps_status pin(void) {
  for (uint64_t at = 0; at < PINNED_MIB * MIB; at += PIN_BYTES) {
    const CUresult r = bench.cu->MemHostRegister(
        bench.host + at, PIN_BYTES, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (r == CUDA_SUCCESS)
      continue;
    (void)unpin(at);
    return ps__cuda_fail(bench.cu, r, "cuMemHostRegister");
  }
  bench.pinned = true;
  return PS_OK;
}

static double pin_s[N_STAGES];

/* In ranges as large as the engine's, for all contexts of the process. */
static ps_status time_pinning(int stage, uint32_t n_contexts, bool keep) {
  PS_TRY(bench_turn_to(0));
  uint64_t t0 = ps__now_ns();
  PS_TRY(pin());
  pin_s[stage] = since(t0);
  printf("{\"case\": \"pinning\", \"when\": \"%s\", \"contexts\": %u, \"bytes\": %llu, "
         "\"register_s\": %.4f",
         stage_name[stage][0], n_contexts, (unsigned long long)(PINNED_MIB * MIB), pin_s[stage]);
  done();
  look(stage);
  if (keep)
    return PS_OK;
  PS_TRY(bench_turn_to(0));
  t0 = ps__now_ns();
  PS_TRY(unpin(PINNED_MIB * MIB));
  printf("{\"case\": \"unpinning\", \"contexts\": %u, \"bytes\": %llu, \"unregister_s\": %.4f",
         n_contexts, (unsigned long long)(PINNED_MIB * MIB), since(t0));
  done();
  return PS_OK;
}

static void touch_task(void *arg, int64_t task, uint32_t worker) {
  char *p = (char *)arg + (uint64_t)task * PART_MIB * MIB;
  (void)worker;
  for (uint64_t at = 0; at < PART_MIB * MIB; at += 4096)
    *(volatile char *)(p + at) = 0;
}

/* Maps host memory as the engine maps its host spaces. The moments of AdamW stay zeros. */
static ps_status map_host(void) {
  const uint64_t bytes = PINNED_MIB * MIB;
  ps__device near = {.cu = bench.cu, .n_gpus = bench.n_gpus};
  ps__pool *pool;
  for (uint32_t i = 0; i < bench.n_gpus; i++)
    near.gpu[i].dev = bench.gpu[i].dev;
  PS_TRY(ps__map((void **)&bench.host, bytes, "copies"));
  ps__cuda_prefer_nodes(&near, bench.host, bytes);
  for (int i = 0; i < N_ARRAYS; i++) {
    PS_TRY(ps__map((void **)&bench.array[i], ARRAY_MIB * MIB, "the host's ops"));
    ps__cuda_prefer_nodes(&near, bench.array[i], ARRAY_MIB * MIB);
  }
  PS_TRY(ps__pool_create(&pool, n_cpus > 64 ? 64 : n_cpus, "touch"));
  const uint64_t t0 = ps__now_ns();
  ps__pool_run(pool, PINNED_MIB / PART_MIB, touch_task, bench.host);
  printf("{\"case\": \"first touch of host memory\", \"bytes\": %llu, \"touch_s\": %.4f",
         (unsigned long long)bytes, since(t0));
  done();
  bench_fill(pool, bench.host, bytes);
  for (int i = 0; i < N_ARRAYS; i++)
    if (i < 2)
      bench_fill(pool, bench.array[i], ARRAY_MIB * MIB);
    else
      ps__pool_run(pool, ARRAY_MIB / PART_MIB, touch_task, bench.array[i]);
  ps__pool_destroy(pool);
  return PS_OK;
}

/* ---- the GPUs -------------------------------------------------------------------------------- */

static ps_status find_gpus(void) {
  int visible = 0;
  PS_TRY(ps__cuda_driver_open(&bench.cu));
  PS__CUDA_TRY(bench.cu, DeviceGetCount(&visible));
  if ((uint32_t)visible < bench.n_gpus)
    return ps__fail(PS_EDEVICE, "%u GPUs are asked for, and %d are visible: give fewer",
                    bench.n_gpus, visible);
  for (uint32_t i = 0; i < bench.n_gpus; i++) {
    char id[32] = "";
    uint64_t others;
    PS__CUDA_TRY(bench.cu, DeviceGet(&bench.gpu[i].dev, (int)i));
    PS_TRY(ps__cuda_supported(bench.cu, bench.gpu[i].dev, i));
    (void)ps__cuda_usage_begin(bench.cu, i, &others);
    PS__CUDA_TRY(bench.cu, DeviceGetPCIBusId(id, sizeof id, bench.gpu[i].dev));
    bench.gpu[i].nvml = ps__nvml_gpu_at(id);
  }
  const uint64_t need = (PINNED_MIB + N_ARRAYS * ARRAY_MIB + 1024) * MIB;
  char want[32], have[32];
  if (ps__host_memory_free() < need)
    return ps__fail(PS_ENOMEM, "%s of host memory are needed, and %s are free",
                    ps__format_bytes(want, need), ps__format_bytes(have, ps__host_memory_free()));
  return PS_OK;
}

static ps_status open_context(uint32_t i) {
  CUcontext ctx;
  PS__CUDA_TRY(bench.cu, DevicePrimaryCtxRetain(&ctx, bench.gpu[i].dev));
  bench.gpu[i].ctx = ctx;
  return bench_turn_to(i);
}

static ps_status enable(uint32_t from, uint32_t to) {
  int can = 0;
  PS__CUDA_TRY(bench.cu, DeviceCanAccessPeer(&can, bench.gpu[from].dev, bench.gpu[to].dev));
  PS_TRY(bench_turn_to(from));
  if (can)
    PS__CUDA_TRY(bench.cu, CtxEnablePeerAccess(bench.gpu[to].ctx, 0));
  return PS_OK;
}

static ps_status allocate(uint32_t i) {
  gpu *g = &bench.gpu[i];
  PS_TRY(bench_turn_to(i));
  PS__CUDA_TRY(bench.cu, MemAlloc(&g->memory, DEVICE_MIB * MIB));
  for (int k = 0; k < N_KINDS; k++) {
    PS__CUDA_TRY(bench.cu, StreamCreate(&g->stream[k], CU_STREAM_NON_BLOCKING));
    for (int e = 0; e < IN_FLIGHT; e++)
      PS__CUDA_TRY(bench.cu, EventCreate(&g->event[k][e], CU_EVENT_DISABLE_TIMING));
  }
  g->host = bench.host + bench_host_mib() * MIB * i;
  return PS_OK;
}

static ps_status first_copy(uint32_t from, uint32_t to) {
  PS_TRY(bench_turn_to(from));
  PS__CUDA_TRY(bench.cu,
               MemcpyAsync(bench.gpu[to].memory + RECEIVED * MIB,
                           bench.gpu[from].memory + SENT * MIB, MIB, bench.gpu[from].stream[SEND]));
  return bench_settle();
}

static ps_status first_product(uint32_t i) {
  gpu *g = &bench.gpu[i];
  int sms = 0, major = 0;
  PS_TRY(bench_turn_to(i));
  PS__CUDA_TRY(bench.cu,
               DeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, g->dev));
  PS__CUDA_TRY(bench.cu,
               DeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, g->dev));
  g->exec = (ps__cuda_exec){.stream = g->stream[COMPUTE], .device = (int)i, .n_sms = sms};
  PS_TRY(ps__cuda_blas_create(&g->exec.blas, (void *)(uintptr_t)(g->memory + WORK * MIB),
                              ps__cuda_workspace_bytes(10u * (uint32_t)major)));
  for (uint64_t at = 0; at < WORK; at += PART_MIB)
    PS__CUDA_TRY(bench.cu, MemcpyAsync(g->memory + at * MIB, (CUdeviceptr)(uintptr_t)g->host,
                                       PART_MIB * MIB, g->stream[COMPUTE]));
  PS_TRY(bench_multiply(g));
  return bench_settle();
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void try_each(ps_status (*fn)(uint32_t), const char *what, uint32_t first) {
  for (uint32_t i = first; i < bench.n_gpus && !bench.stuck; i++)
    if (fn(i) != PS_OK)
      bench_failed(what);
}
static void try_pairs(ps_status (*fn)(uint32_t, uint32_t), const char *what) {
  for (uint32_t i = 0; i < bench.n_gpus; i++)
    for (uint32_t k = 0; k < bench.n_gpus && !bench.stuck; k++)
      if (i != k && fn(i, k) != PS_OK)
        bench_failed(what);
}
static void try_pinning(int stage, uint32_t n_contexts, bool keep) {
  if (time_pinning(stage, n_contexts, keep) != PS_OK)
    bench_failed("pinning");
}

/* In the engine's order, except that memory is pinned twice before peer access is enabled. */
static void set_up(void) {
  print_machine();
  try_pairs(print_access, "peer access");
  look(START);
  if (map_host() != PS_OK) {
    bench_failed("host memory");
    bench.stuck = true;
    return;
  }
  if (open_context(0) != PS_OK)
    bench_failed("context");
  look(ONE);
  try_pinning(PIN_ONE, 1, false);
  try_each(open_context, "context", 1);
  look(ALL);
  try_pinning(PIN_ALL, bench.n_gpus, false);
  try_pairs(enable, "peer access");
  look(PEERS);
  const uint32_t before = bench.n_failed;
  try_each(allocate, "GPU memory", 0);
  look(ALLOCATED);
  bench.stuck = bench.n_failed > before; /* no case can run without this memory */
  try_pairs(first_copy, "first copies between GPUs");
  look(COPIED);
  try_pinning(PINNED, bench.n_gpus, true);
  try_each(first_product, "first product", 0);
  look(PRODUCT);
}

enum { TO = 1 << H2D, FROM = 1 << D2H, DUPLEX = TO | FROM };

static void peer_cases(void) {
  const uint32_t n = bench.n_gpus;
  for (uint32_t i = 0; i < n; i++)
    for (uint32_t k = 0; k < n; k++)
      for (int by = 0; by < 2 && i != k; by++)
        for (uint32_t mib = 64; mib && (mib == 64 || i + k == 1); mib = mib == 64 ? 16 : mib / 16)
          bench_case((spec){.time = 0.25,
                            .peers = PAIR,
                            .from = i,
                            .to = k,
                            .copy_mib = mib,
                            .by_receiver = by,
                            .in_table = i == 0 && k == 1 && mib == 64});
  bench_case((spec){.time = 1, .n_product = n, .in_table = true});
  for (uint32_t c = 0; c < 3 && n > 1; c++) { /* 0 to 1, 1 to 0, all */
    const spec s = {.time = 0.5,
                    .peers = c < 2 ? PAIR : RING,
                    .from = c == 1,
                    .to = c == 0,
                    .in_table = c == 2};
    spec host = s, products = s, both = s;
    if (c == 2) {
      bench_case(s);
      spec by_receiver = s;
      by_receiver.by_receiver = true;
      by_receiver.in_table = false;
      bench_case(by_receiver);
    }
    host.ways = both.ways = DUPLEX;
    host.n_host = both.n_host = products.n_product = both.n_product = n;
    products.time = both.time = 1;
    bench_case(host);
    bench_case(products);
    if (c == 2)
      bench_case(both);
  }
  bench_case((spec){.time = 1, .ways = DUPLEX, .n_host = n, .n_product = n, .in_table = true});
  bench_case((spec){.time = 1, .n_product = n}); /* again, warm */
}

static void host_cases(void) {
  const uint32_t n = bench.n_gpus, all = n_cpus >= 4 ? n_cpus - 2 : n_cpus; /* as a training has */
  for (uint32_t k = 1; k <= n; k += n > 1 ? n - 1 : 1)
    for (uint32_t ways = TO; ways <= DUPLEX; ways++)
      bench_case(
          (spec){.time = 0.5, .ways = ways, .n_host = k, .in_table = k == 1 || ways == DUPLEX});
  for (int adamw = 0; adamw < 2; adamw++)
    for (uint32_t threads = all, half = 0; half < 2; half++, threads = (all + 1) / 2) {
      load l = {.name = adamw ? "AdamW" : "sums", .adamw = adamw, .n_threads = threads};
      for (uint32_t k = 0; k <= n; k = k ? k + (n > 1 ? n - 1 : 1) : 1)
        bench_case((spec){
            .time = 1, .ways = DUPLEX, .n_host = k, .load = &l, .in_table = !half || k == n});
    }
}

/* MiB of each GPU's memory that this process has taken. */
static void memory_table(void) {
  printf("\n%-24s", "MiB lost to this process");
  for (int s = 0; s < N_STAGES; s++)
    printf(" %7s", stage_name[s][1]);
  for (uint32_t i = 0; i < bench.n_gpus; i++) {
    printf("\nGPU %-20u", i);
    for (int s = 0; s < N_STAGES; s++)
      printf(" %7.0f", (double)lost[i][s] / (double)MIB);
  }
  printf("\n%-24s", "seconds to pin 4 GiB");
  for (int s = 0; s < N_STAGES; s++)
    printf(pin_s[s] > 0 ? " %7.2f" : "        ", pin_s[s]);
  printf("\n");
}

int main(int argc, char **argv) {
  const long n = argc > 1 ? strtol(argv[1], NULL, 10) : 2;
  bench.seconds = argc > 2 ? strtod(argv[2], NULL) : 1;
  if (argc > 3 || n < 1 || n > PS_MAX_DEVICES || !(bench.seconds >= 0.1 && bench.seconds <= 60))
    return usage();
  bench.n_gpus = (uint32_t)n;
  n_cpus = ps__n_cpus();
  if (find_gpus() != PS_OK)
    return not_here(ps_last_error());
  signal(SIGALRM, too_late);
  alarm(30 + (unsigned)(bench.seconds * (40 + (double)(n * n))));
  set_up();
  peer_cases();
  host_cases();
  bench_table();
  memory_table();
  fflush(stdout);
  _exit(bench.n_failed != 0); /* what is queued on a GPU that is stuck is not waited for */
}
#else
int main(int argc, char **argv) {
  const long n = argc > 1 ? strtol(argv[1], NULL, 10) : 2;
  const double seconds = argc > 2 ? strtod(argv[2], NULL) : 1;
  if (argc > 3 || n < 1 || n > 8 || !(seconds >= 0.1 && seconds <= 60))
    return usage();
  return not_here("this build has no CUDA: build with CUDA=1");
}
#endif
