/* cost.c - the time of an op from its work: a fixed cost plus work over the measured rate; and its
 * demands on CPUs, host memory and link. */
#include "hosts/net.h"
#include "plan/plan_impl.h"
#include <math.h>
#include <string.h>

static double rate_ns(double work, double per_s) { return per_s > 0 ? work / per_s * 1e9 : 0; }
static double larger(double a, double b) { return a > b ? a : b; }
static double smaller(double a, double b) { return a < b ? a : b; }

static uint32_t class_of(const ps_kernel *kernel) {
  return kernel ? kernel->op_class : PS_CLASS_COPY;
}

/* ---- rates by shape (penstock/hardware.h says how they are read) ----------------------------- */

typedef struct node {
  double x, rate;
} node;

/* The rate at x: linear in log x between the nodes around it, which come in any order; outside them
 * the nearest node's. */
static double rate_at(const node *n, uint32_t count, double x) {
  const node *below = NULL, *above = NULL;
  for (uint32_t i = 0; i < count; i++) {
    if (n[i].x <= x && (!below || n[i].x > below->x))
      below = &n[i];
    if (n[i].x >= x && (!above || n[i].x < above->x))
      above = &n[i];
  }
  if (!below || !above)
    return below ? below->rate : above ? above->rate : 0;
  if (below->x == above->x)
    return below->rate;
  return below->rate + log(x / below->x) / log(above->x / below->x) * (above->rate - below->rate);
}

/* Of a product of @role (PS_GEMM_*) and so many rows; @otherwise where the table is empty. */
static double product_rate(const ps_gemm_rate *table, uint32_t role, double rows,
                           double otherwise) {
  node n[PS_MAX_GEMM_RATES];
  uint32_t count = 0;
  for (const ps_gemm_rate *r = table; count < PS_MAX_GEMM_RATES && r->rows; r++)
    n[count++] = (node){r->rows, role == PS_GEMM_WGRAD     ? r->wgrad_flops_per_s
                                 : role == PS_GEMM_FORWARD ? r->forward_flops_per_s
                                                           : r->dgrad_flops_per_s};
  return count ? rate_at(n, count, rows) : otherwise;
}

static double gemm_rate(const ps_hardware *hw, const ps__args_gemm *g) {
  const uint32_t role = g->trans_a ? PS_GEMM_WGRAD : g->trans_b ? PS_GEMM_FORWARD : PS_GEMM_DGRAD;
  return product_rate(hw->gemm[g->dt_a], role, g->trans_a ? g->k : g->m,
                      hw->gemm_flops_per_s[g->dt_a]);
}

/* Rates are measured without fast accumulation. Plans with it have the same, and are some percent
 * too slow in the forward products. */
static double gemm_fp8_rate(const ps_hardware *hw, const ps__args_gemm_fp8 *g) {
  const double rows = g->role == PS_GEMM_WGRAD ? g->k : g->m, all = hw->gemm_fp8_flops_per_s,
               bf16 = hw->gemm_flops_per_s[PS_BF16];
  if (hw->gemm_fp8[0].rows)
    return product_rate(hw->gemm_fp8, g->role, rows, all);
  return product_rate(hw->gemm[PS_BF16], g->role, rows, bf16) * all / bf16;
}

/* By the rows that an expert has on average. Until it is measured: as a product of the same rows an
 * expert, less half a tile of 128 rows that each expert's last one lacks. */
static double grouped_rate(const ps_hardware *hw, const ps__args_gemm_grouped *a) {
  const double rows = (double)a->n_tokens * a->n_used, lost = 64.0 * a->n_experts,
               otherwise = hw->gemm_flops_per_s[a->dt];
  if (a->dt == PS_BF16 && hw->gemm_grouped[0].rows)
    return product_rate(hw->gemm_grouped, a->role, rows / a->n_experts, otherwise);
  return product_rate(hw->gemm[a->dt], a->role, rows / a->n_experts, otherwise) *
         (hw->backend == PS_BACKEND_CPU ? 1 : rows / (rows + lost));
}

/* An SM's seconds and the memory's bytes of an element of a state. Of an H200 with 32 heads of 128
 * by 128: 0.69 ms forward and 2.05 ms backward at 8,192 tokens, for which its memory moved 0.43 and
 * 2.5 GB (bench/log/2026-11-28-delta-kernels.md). Pieces of rows follow each other and wait for
 * each other, so the rest goes by SMs, not by the peak of products. */
static double delta_estimate_s(const ps_hardware *hw, double sm_s, double bytes) {
  return sm_s / larger(hw->n_sms, 1) + bytes / hw->elementwise_bytes_per_s;
}

/* Of a CPU, elements over FLOPs of products in fp32, as two threads of an EPYC with AVX-512 had
 * them (2026-11-28). */
static const double CPU_DELTA_FWD = 0.11, CPU_DELTA_BWD = 0.025;

void ps__delta_rates(const ps_hardware *hw, ps_delta_rate out[PS_MAX_DELTA_RATES]) {
  const double products = hw->gemm_flops_per_s[PS_F32];
  memmove(out, hw->delta, sizeof hw->delta);
  if (out[0].heads)
    return;
  out[0] =
      hw->backend == PS_BACKEND_CPU
          ? (ps_delta_rate){hw->n_threads, 0, CPU_DELTA_FWD * products, CPU_DELTA_BWD * products}
          : (ps_delta_rate){32, 0, 1 / delta_estimate_s(hw, 18e-12, 0.10),
                            1 / delta_estimate_s(hw, 44e-12, 0.58)};
}

/* On the CPU a task is a key head's: where these are no multiple of the threads, some wait. */
static double delta_busy(const ps_hardware *hw, const ps__args_delta *a) {
  const double threads = larger(hw->n_threads, 1);
  return hw->backend == PS_BACKEND_CPU ? a->n_key_heads / (ceil(a->n_key_heads / threads) * threads)
                                       : 1;
}

static double delta_ns(const ps__cost_model *m, const ps__args_delta *a, bool backward) {
  const ps_hardware *hw = m->hw;
  const double elements = (double)a->n_tokens * a->n_value_heads * a->key_dim * a->value_dim;
  ps_delta_rate table[PS_MAX_DELTA_RATES];
  node n[PS_MAX_DELTA_RATES];
  uint32_t count = 0;
  ps__delta_rates(hw, table);
  for (const ps_delta_rate *r = table; count < PS_MAX_DELTA_RATES && r->heads; r++)
    n[count++] =
        (node){r->heads, backward ? r->backward_elements_per_s : r->forward_elements_per_s};
  return rate_ns(elements,
                 m->compute_speed * delta_busy(hw, a) * rate_at(n, count, a->n_value_heads));
}

static bool is_slice(const ps_attention_rate *r) { return r->kv_rows > r->rows; }
static double rate_of(const ps_attention_rate *r, bool backward) {
  return backward ? r->backward_flops_per_s : r->forward_flops_per_s;
}

/* Kinds of entries without a prefix, by what is known of the documents. */
typedef enum kind { WHOLE, PACKED, FOUND } kind;
static kind kind_of(const ps_attention_rate *r) {
  return r->found ? FOUND : r->packed > 1 ? PACKED : WHOLE;
}
static kind kind_of_args(const ps__args_attention *a) {
  const uint32_t documents = ps__attention_documents(a);
  return !documents ? FOUND : documents > 1 ? PACKED : WHOLE;
}

/* Sequences of @length without a prefix. Where the table has none of the kind, the kind before it
 * serves. */
static double sequence_rate(const ps_attention_rate *table, double length, kind want,
                            bool backward) {
  for (int k = want; k >= WHOLE; k--) {
    node n[PS_MAX_ATTENTION_RATES];
    uint32_t count = 0;
    for (const ps_attention_rate *r = table; r < table + PS_MAX_ATTENTION_RATES && r->rows; r++)
      if (!is_slice(r) && (int)kind_of(r) == k)
        n[count++] = (node){(double)r->rows / r->packed, rate_of(r, backward)};
    if (count)
      return rate_at(n, count, length);
  }
  return 0;
}

static double slice_factor(const ps_attention_rate *table, double ratio, bool backward) {
  node n[PS_MAX_ATTENTION_RATES + 1] = {{1, 1}};
  uint32_t count = 1;
  for (const ps_attention_rate *r = table; r < table + PS_MAX_ATTENTION_RATES && r->rows; r++)
    if (is_slice(r))
      n[count++] = (node){(double)r->kv_rows / r->rows,
                          rate_of(r, backward) / sequence_rate(table, r->rows, WHOLE, backward)};
  return rate_at(n, count, ratio);
}

/* The pairs of a chunk tell how long its sequences are: n of length L have n L^2/2. */
static double attention_rate(const ps_hardware *hw, const ps__args_attention *a, double pairs,
                             bool backward) {
  const ps_attention_rate *table = hw->attention[a->dt];
  const double rows = a->n_tokens;
  if (!table->rows)
    return (backward ? hw->attention_bwd_flops_per_s : hw->attention_flops_per_s)[a->dt];
  if (a->row0 == 0)
    return sequence_rate(table, 2 * pairs / rows, kind_of_args(a), backward);
  return sequence_rate(table, rows, kind_of_args(a), backward) *
         slice_factor(table, (a->row0 + rows) / rows, backward);
}

/* Keys a row of sequences of 8,192 and of 131,072 tokens. */
static const double USUAL_KEYS = 4096, LONG_KEYS = 65536;

/* The table's rates are those of heads of 128. Between two lengths the speed of narrower heads
 * follows the logarithm of the keys a row; beyond them it is that of the nearer. */
static double heads_speed(const ps_hardware *hw, const ps__args_attention *a, double pairs,
                          bool backward) {
  const double usual = backward ? hw->heads64_attention_bwd_speed : hw->heads64_attention_speed,
               longer = backward ? hw->heads64_long_attention_bwd_speed
                                 : hw->heads64_long_attention_speed,
               keys = pairs / a->n_tokens;
  if (a->head_dim > 64 || !(usual > 0))
    return 1;
  if (keys <= USUAL_KEYS || !(longer > 0))
    return usual;
  return keys >= LONG_KEYS
             ? longer
             : usual + (longer - usual) * log(keys / USUAL_KEYS) / log(LONG_KEYS / USUAL_KEYS);
}

/* Of the plain kernels. Their estimate is the memory's rate: forward they read 4 head_dim bytes of
 * keys and values for as many FLOPs of a pair and head, backward 10 for 10, from a cache, and wait
 * for it. */
double ps__plain_rate(const ps_hardware *hw, bool backward) {
  const double measured =
      backward ? hw->heads512_attention_bwd_flops_per_s : hw->heads512_attention_flops_per_s;
  return measured > 0 ? measured : hw->elementwise_bytes_per_s;
}
bool ps__plain_attention(const ps_hardware *hw, const ps__args_attention *a) {
  return hw->backend == PS_BACKEND_CUDA && a->head_dim > 256;
}

/* fp8_attention_speed is measured with USUAL_KEYS keys a row. The clock follows the mean power.
 * With more keys a row attention takes more of the time, so products lower its clock by less. */
static double speed_beside_fp8(const ps__cost_model *m, const ps__args_attention *a, double pairs) {
  const double keys = pairs / a->n_tokens;
  return 1 - m->fp8_slows_attention * (keys > USUAL_KEYS ? USUAL_KEYS / keys : 1);
}

/* ---- ops ------------------------------------------------------------------------------------- */

/* A product takes its FLOPs' time or, where it has few rows, that of its operands on their way
 * through memory. */
static double device_ns(const ps__cost_model *m, const ps_kernel *kernel, const void *args,
                        ps_work work) {
  const ps_hardware *hw = m->hw;
  const ps__rate rate = ps__op_rate(kernel);
  const double bytes_ns = rate_ns(work.bytes, hw->elementwise_bytes_per_s);
  switch (rate) {
  case PS__RATE_GEMM_FP8:
    return larger(rate_ns(work.flops, m->compute_speed * gemm_fp8_rate(hw, args)), bytes_ns);
  case PS__RATE_GEMM_GROUPED:
    return larger(rate_ns(work.flops, m->compute_speed * grouped_rate(hw, args)), bytes_ns);
  case PS__RATE_GEMM:
    return larger(rate_ns(work.flops, m->compute_speed * gemm_rate(hw, args)), bytes_ns);
  case PS__RATE_ATTENTION_FWD:
  case PS__RATE_ATTENTION_BWD: {
    const ps__args_attention *a = args;
    const bool backward = rate == PS__RATE_ATTENTION_BWD;
    if (ps__plain_attention(hw, a))
      return rate_ns(work.flops, m->compute_speed * ps__plain_rate(hw, backward));
    const double pairs = work.flops / ((backward ? 10.0 : 4.0) * a->n_heads * a->head_dim);
    return rate_ns(work.flops, m->compute_speed * speed_beside_fp8(m, a, pairs) *
                                   heads_speed(hw, a, pairs, backward) *
                                   attention_rate(hw, a, pairs, backward));
  }
  case PS__RATE_DELTA_FWD: return delta_ns(m, args, false);
  case PS__RATE_DELTA_BWD: return delta_ns(m, args, true);
  default: return bytes_ns;
  }
}

static double host_rate(const ps_hardware *hw, const ps_kernel *kernel) {
  if (!kernel)
    return hw->accumulate_bytes_per_s;
  switch (ps__op_rate(kernel)) {
  case PS__RATE_OPTIMIZER_WEIGHTS: return hw->optimizer_weights_bytes_per_s;
  case PS__RATE_OPTIMIZER_STATE: return hw->optimizer_state_bytes_per_s;
  case PS__RATE_ACCUMULATE: return hw->accumulate_bytes_per_s;
  case PS__RATE_SUMSQ: return hw->sumsq_bytes_per_s;
  case PS__RATE_ACCUMULATE_SUMSQ: return hw->accumulate_sumsq_bytes_per_s;
  default: return hw->optimizer_bytes_per_s;
  }
}

/* A copy inside the host's memory takes as long as a sum of as many bytes. */
static bool is_sum(const ps_kernel *kernel) {
  return !kernel || ps__op_rate(kernel) >= PS__RATE_ACCUMULATE;
}

double ps__cost_ns(const ps__cost_model *m, const ps_kernel *kernel, uint32_t stream,
                   const void *args, ps_work work) {
  const ps_hardware *hw = m->hw;
  const ps__places *at = m->at;
  if (m->copy[stream].copies)
    return hw->op_ns + rate_ns(work.bytes, m->copy[stream].bytes_per_s);
  if (stream == at->net)
    return hw->op_ns + rate_ns(work.bytes, hw->link[PS_LINK_NETWORK].bytes_per_s);
  if (stream == at->io)
    return hw->op_ns + rate_ns(work.bytes, hw->gather_bytes_per_s);
  if (ps__stream_on_host(at, stream))
    return hw->op_ns +
           rate_ns(work.bytes, host_rate(hw, kernel) * (is_sum(kernel) ? m->sum_speed : 1));
  /* on the CPU backend the optimizer's rate is also that of updates on the "device" */
  if (class_of(kernel) == PS_CLASS_OPTIMIZER && hw->backend == PS_BACKEND_CPU)
    return hw->op_ns + rate_ns(work.bytes, hw->optimizer_bytes_per_s);
  return hw->op_ns + device_ns(m, kernel, args, work);
}

static double fraction(double part, double whole) {
  return whole > 0 && part < whole ? part / whole : 1.0;
}

/* ---- contention for the host's memory -------------------------------------------------------- */

/* Numbers of the bits of ps_contention_rate.kinds; then that of products, which slow exchanges. */
enum { H2D, D2H, SUMS, OPTIMIZER, PRODUCTS };

const ps_contention_rate *ps__contention_entry(const ps_contention_rate *table, uint32_t kinds,
                                               uint32_t sum_threads) {
  for (const ps_contention_rate *s = table; s < table + PS_MAX_CONTENTION_RATES && s->kinds; s++)
    if (s->kinds == kinds &&
        (!(kinds & PS_CONTENTION_SUMS) || !sum_threads || s->threads == sum_threads))
      return s;
  return NULL;
}

static const ps_contention_rate *contention_of(const ps_hardware *hw, uint32_t kinds,
                                               uint32_t sum_threads) {
  return ps__contention_entry(hw->contention, kinds, sum_threads);
}

uint32_t ps__sum_threads(const ps_hardware *hw, uint32_t i) {
  for (const ps_contention_rate *s = hw->contention;
       s < hw->contention + PS_MAX_CONTENTION_RATES && s->kinds; s++)
    if (s->kinds == PS_CONTENTION_SUMS && i-- == 0)
      return s->threads;
  return 0;
}

double ps__sum_speed(const ps_hardware *hw, uint32_t threads) {
  const ps_contention_rate *all = contention_of(hw, PS_CONTENTION_SUMS, 0),
                           *some = contention_of(hw, PS_CONTENTION_SUMS, threads);
  return all && some ? some->host_bytes_per_s / all->host_bytes_per_s : 1;
}

static double rate_in(const ps_contention_rate *s, int kind) {
  return kind == H2D ? s->h2d_bytes_per_s : kind == D2H ? s->d2h_bytes_per_s : s->host_bytes_per_s;
}

bool ps__gpus_measured(const ps_hardware *hw, uint32_t n_devices) {
  return n_devices > 1 && hw->n_gpus == n_devices;
}

const ps_contention_rate *ps__gpus_copies(const ps_hardware *hw, uint32_t n_devices) {
  return ps__gpus_measured(hw, n_devices)
             ? ps__contention_entry(hw->gpus_contention, PS_CONTENTION_H2D | PS_CONTENTION_D2H, 0)
             : NULL;
}

/* How much slower work of @kind is while @kinds run. Alone, a copy has the link's rate and a host
 * op its entry's. The GPUs of a step copy at the same times, so with several GPUs the rates are
 * those of all of them copying at once. */
static double slowdown(const ps_hardware *hw, bool gpus, int kind, uint32_t kinds,
                       uint32_t sum_threads) {
  kinds &= ~(1u << PRODUCTS);
  const ps_contention_rate *beside = ps__contention_entry(
                               gpus ? hw->gpus_contention : hw->contention, kinds, sum_threads),
                           *alone =
                               kind >= SUMS ? contention_of(hw, 1u << kind, sum_threads) : NULL;
  if (!(kinds >> kind & 1) || !beside || (kind >= SUMS && !alone))
    return 1;
  const double rate = kind >= SUMS ? alone->host_bytes_per_s
                                   : hw->link[kind == H2D ? PS_LINK_H2D : PS_LINK_D2H].bytes_per_s;
  return larger(1, rate / rate_in(beside, kind));
}

static double link_rate(const ps_hardware *hw, uint32_t from, uint32_t to) {
  for (const ps_link_rate *r = hw->link; r < hw->link + PS_N_LINKS; r++)
    if (r->from == from && r->to == to)
      return r->bytes_per_s;
  return 0;
}

/* Each alone, and both together, of a drive that was not measured: PCIe 4.0, past its cache. */
static const double DISK_READ = 5e9, DISK_WRITE = 1.5e9, DISK_DUPLEX = 3e9;

double ps__disk_rate(const ps_hardware *hw, bool write) {
  const double rate = hw->link[write ? PS_LINK_DISK_WRITE : PS_LINK_DISK_READ].bytes_per_s;
  return rate > 0 ? rate : write ? DISK_WRITE : DISK_READ;
}
double ps__disk_duplex(const ps_hardware *hw) {
  const double rate = hw->link[PS_LINK_DISK_READ].duplex_bytes_per_s;
  return rate > 0 ? rate : DISK_DUPLEX;
}

double ps__disk_ns(const ps_hardware *hw, uint64_t bytes) {
  const double n = (double)bytes;
  return larger(larger(n / ps__disk_rate(hw, false), n / ps__disk_rate(hw, true)),
                2 * n / ps__disk_duplex(hw)) *
         1e9;
}

/* Copies from a host read its memory, copies to one write it. Those between devices do neither. */
static ps__copy_rate copy_rate(const ps_hardware *hw, const ps__places *at, const ps_link *link) {
  const uint32_t from = at->kind[link->from], to = at->kind[link->to];
  const bool peers = from == to, disk = from == PS_PLACE_DISK || to == PS_PLACE_DISK;
  if (disk)
    return (ps__copy_rate){.copies = true,
                           .disk = true,
                           .bus = ps__bus_of(at, link->resource),
                           .bytes_per_s = ps__disk_rate(hw, to == PS_PLACE_DISK),
                           .duplex_bytes_per_s = ps__disk_duplex(hw)};
  return (ps__copy_rate){.copies = true,
                         .peers = peers,
                         .kind = from == PS_PLACE_HOST ? H2D : D2H,
                         .bus = peers ? 0 : ps__bus_of(at, link->resource),
                         .bytes_per_s = link_rate(hw, from, to)};
}

ps__cost_model ps__cost_model_of(const ps_hardware *hw, bool fp8, const ps__places *at,
                                 uint32_t n_threads, uint32_t sum_threads) {
  const bool beside_fp8 = fp8 && hw->fp8_attention_speed > 0,
             together = ps__gpus_measured(hw, at->n_devices);
  const double speed = together && hw->gpus_compute_speed > 0 ? hw->gpus_compute_speed : 1;
  ps__cost_model m = {.hw = hw,
                      .at = at,
                      .n_threads = n_threads,
                      .sum_speed = ps__sum_speed(hw, sum_threads),
                      .compute_speed = speed,
                      .fp8_slows_attention = beside_fp8 ? 1 - hw->fp8_attention_speed : 0};
  while (at->kind[m.host] != PS_PLACE_HOST)
    m.host++;
  for (uint32_t i = 0; i < at->n_links; i++)
    m.copy[at->link[i].stream] = copy_rate(hw, at, &at->link[i]);
  for (int kind = 0; kind < PS_SIM_KINDS; kind++)
    for (uint32_t kinds = 0; kinds < 1u << PS_SIM_KINDS; kinds++)
      m.slower[kind][kinds] = slowdown(hw, together, kind, kinds, sum_threads);
  return m;
}

static void add_demand(ps_sim_cost *out, uint8_t resource, double demand) {
  int d = 0;
  while (out->demand[d] > 0)
    d++;
  out->resource[d] = resource;
  out->demand[d] = demand;
}

/* By the measured contention where there is some; else each has a demand in proportion to its rate
 * alone. With several devices whose contention was not measured together, that of one device holds,
 * and each has that demand besides. */
static void add_memory_demand(const ps__cost_model *m, int kind, double rate, ps_sim_cost *out) {
  const bool measured = m->hw->contention[0].kinds;
  if (measured) {
    out->kind = 1u << kind;
    out->slower = m->slower[kind];
  }
  if (!measured || (m->at->n_devices > 1 && !ps__gpus_measured(m->hw, m->at->n_devices)))
    add_demand(out, ps__memory_of(m->host), fraction(rate, m->hw->memory_bytes_per_s));
}

/* Copies use host memory when they read or write it: once on CUDA, twice on the CPU backend,
 * whose devices are host memory too. */
static void copy_demands(const ps__cost_model *m, const ps__copy_rate *copy, ps_sim_cost *out) {
  const ps_hardware *hw = m->hw;
  const bool cpu = hw->backend == PS_BACKEND_CPU;
  if (copy->disk) { /* the drive reads and writes memory itself */
    add_demand(out, copy->bus, fraction(copy->bytes_per_s, copy->duplex_bytes_per_s));
    if (!hw->contention[0].kinds)
      add_demand(out, ps__memory_of(m->host), fraction(copy->bytes_per_s, hw->memory_bytes_per_s));
    return;
  }
  if (copy->peers) {
    if (cpu) {
      add_demand(out, ps__memory_of(m->host),
                 fraction(2 * copy->bytes_per_s, hw->memory_bytes_per_s));
      add_demand(out, ps__cpus_of(m->host), fraction(1, hw->n_cpus));
    }
    return;
  }
  add_memory_demand(m, copy->kind, (cpu ? 2 : 1) * copy->bytes_per_s, out);
  if (cpu)
    add_demand(out, ps__cpus_of(m->host), fraction(1, hw->n_cpus));
  else
    add_demand(out, copy->bus,
               fraction(copy->bytes_per_s, 2 * hw->link[PS_LINK_H2D].duplex_bytes_per_s));
}

static void host_op_demands(const ps__cost_model *m, const ps_op_view *op, ps_sim_cost *out) {
  const ps_hardware *hw = m->hw;
  const bool io = op->stream == m->at->io,
             optimizer = class_of(op->kernel) == PS_CLASS_OPTIMIZER || (!op->kernel && !io);
  if (op->stream == m->at->net)
    return;
  add_demand(out, ps__cpus_of(m->host),
             fraction(optimizer ? m->n_threads
                      : io      ? ps__io_threads(m->n_threads)
                                : 1,
                      hw->n_cpus));
  if (optimizer)
    add_memory_demand(m, is_sum(op->kernel) ? SUMS : OPTIMIZER, host_rate(hw, op->kernel), out);
  else if (!op->kernel) /* staged by the io stream: it slows what else uses memory as sums do */
    add_memory_demand(m, SUMS, hw->gather_bytes_per_s, out);
  else if (io && !hw->contention[0].kinds)
    add_demand(out, ps__memory_of(m->host),
               fraction(hw->gather_bytes_per_s, hw->memory_bytes_per_s));
}

/* A GPU runs the faster the more it rests. Where it has a second stream of kernels, the sums of
 * several devices, the compute stream loses all that this stream takes of the GPU. On two H100s a
 * product beside a sum took longer by 0.7 of the sum's time. The CPU backend's devices use the
 * host's CPUs and memory. */
static void device_op_demands(const ps__cost_model *m, const ps_op_view *op, ps_sim_cost *out) {
  const ps_hardware *hw = m->hw;
  const uint32_t class = class_of(op->kernel);
  if (hw->backend != PS_BACKEND_CPU) {
    if (class == PS_CLASS_GEMM || class == PS_CLASS_ATTENTION) {
      out->idle_gain = smaller(hw->idle_gain, 1);
      out->idle_most = smaller(hw->idle_most, 1);
      out->kind = m->over_nccl ? 1u << PRODUCTS : 0;
    }
    if (m->at->n_devices > 1)
      add_demand(out, ps__memory_of(m->at->stream[op->stream].place), 1);
    return;
  }
  const bool one = class == PS_CLASS_COPY || class == PS_CLASS_OTHER;
  add_demand(out, ps__cpus_of(m->host), fraction(one ? 1 : m->n_threads, hw->n_cpus));
  if (class == PS_CLASS_ELEMENTWISE || class == PS_CLASS_OPTIMIZER)
    add_demand(out, ps__memory_of(m->host),
               fraction(class == PS_CLASS_OPTIMIZER ? hw->optimizer_bytes_per_s
                                                    : hw->elementwise_bytes_per_s,
                        hw->memory_bytes_per_s));
}

/* ---- exchanges over NCCL --------------------------------------------------------------------- */

static double mean_product_ns(const ps__step *s, const ps_sim_cost *cost) {
  double ns = 0, n = 0;
  for (size_t i = 0; i < s->n_op; i++)
    if (cost[i].kind >> PRODUCTS & 1) {
      ns += cost[i].ns;
      n++;
    }
  return n > 0 ? ns / n : 0;
}

static bool is_exchange(const ps__step *s, const ps__vop *op) {
  return op->stream == s->at->net && op->work.bytes > 0;
}

/* BYTES that an exchange copies each way, of which a host sends 2 (n - 1) / n. */
static double copied_bytes(const ps__step *s, const ps__vop *op) {
  const double n = s->spec->n_hosts;
  return op->work.bytes * n / (2 * (n - 1));
}

static double waits_of(const ps__step *s, const ps__vop *op) {
  return ceil(copied_bytes(s, op) / PS__NET_SEGMENT_BYTES) + PS__NET_BEHIND;
}

/* How much longer an exchange takes than alone, beside copies and host ops of @kinds. */
static double beside_copies(const ps__cost_model *m, uint32_t kinds) {
  const uint32_t own = 1u << H2D | 1u << D2H;
  double most = 1;
  for (int way = H2D; way <= D2H; way++)
    most = larger(most, m->slower[way][kinds | own] / m->slower[way][own]);
  return most;
}

/* Totals come from the host and go back there, so an exchange is a copy both ways: it shares the
 * first device's link, and slows host ops as copies do, where contention was measured. Its rate was
 * measured with both copies. What else is on its way slows it as it slows the copy that is slowed
 * more.
 * Products take all SMs, so each segment waits for one to end (hosts/net.h). The next segment is
 * ready by then, and waits for the next product: so a wait is the mean product. On two H200s 27
 * kernels of an exchange, each with a wait of its own, took 75 ms beside products of 2.7 ms
 * (bench/log/2026-11-25-two-gpus.md). The waits of all exchanges are spread over them by their time
 * alone. Without a rate of the network exchanges take no time, and wait for nothing. */
void ps__cost_exchanges(ps__cost_model *m, const ps__step *s, ps_sim_cost *out) {
  const double wait_ns = mean_product_ns(s, out);
  double waits = 0, alone = 0;
  if (!(m->hw->link[PS_LINK_NETWORK].bytes_per_s > 0))
    return;
  for (size_t i = 0; i < s->n_op; i++)
    if (is_exchange(s, &s->op[i])) {
      waits += waits_of(s, &s->op[i]);
      alone += out[i].ns;
    }
  for (uint32_t kinds = 0; kinds < 1u << PS_SIM_KINDS; kinds++)
    m->exchange_slower[kinds] = beside_copies(m, kinds) +
                                (kinds >> PRODUCTS & 1 && alone > 0 ? waits * wait_ns / alone : 0);
  for (size_t i = 0; i < s->n_op; i++) {
    if (!is_exchange(s, &s->op[i]) || !(out[i].ns > 0))
      continue;
    out[i].kind = 1u << H2D | 1u << D2H;
    out[i].slower = m->exchange_slower;
    add_demand(&out[i], m->copy[m->at->dev[0].to_host].bus,
               fraction(copied_bytes(s, &s->op[i]) / (out[i].ns * 1e-9),
                        m->hw->link[PS_LINK_H2D].duplex_bytes_per_s));
  }
}

/* Sums have a speed by it, and copies and all ops on the host their contention. */
bool ps__costs_by_threads(const ps__cost_model *m, uint32_t stream) {
  return m->copy[stream].copies || ps__stream_on_host(m->at, stream);
}

void ps__cost(void *model, const ps_op_view *op, ps_sim_cost *out) {
  const ps__cost_model *m = model;
  *out = (ps_sim_cost){.ns = ps__cost_ns(m, op->kernel, op->stream, op->args, op->work)};
  if (m->copy[op->stream].copies)
    copy_demands(m, &m->copy[op->stream], out);
  else if (ps__stream_on_host(m->at, op->stream))
    host_op_demands(m, op, out);
  else
    device_op_demands(m, op, out);
}
