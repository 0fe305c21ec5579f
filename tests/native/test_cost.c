/* test_cost.c - rates by shape: the tables' entries exactly, between two entries from one to the
 * other, outside them the nearest; each host op its own rate. */
#include "check.h"
#include "hardware/hardware_impl.h"
#include "plan/plan_impl.h"
#include <math.h>

enum { HEADS = 4, HEAD_DIM = 64, ROWS = 8192 };
static const ps_attention_rate shapes[] = {
    {2048, 2048, 1, 0, 0, 0},   {8192, 8192, 1, 0, 0, 0},   {32768, 32768, 1, 0, 0, 0},
    {16384, 16384, 2, 0, 0, 0}, {8192, 8192, 8, 0, 0, 0},   {8192, 16384, 1, 0, 0, 0},
    {8192, 65536, 1, 0, 0, 0},  {16384, 16384, 2, 1, 0, 0}, {8192, 8192, 8, 1, 0, 0}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };
static uint64_t state = 7;

static double random_rate(void) { return 1e12 * (1 + rnd_below(&state, 1000)); }

/* Rates in no order, so that nothing is monotone by luck. */
static ps_hardware random_machine(void) {
  ps_hardware hw = {.struct_bytes = sizeof hw,
                    .n_threads = 2,
                    .n_cpus = 2,
                    .optimizer_bytes_per_s = 1e9,
                    .optimizer_weights_bytes_per_s = 6e9,
                    .optimizer_state_bytes_per_s = 7e9,
                    .accumulate_bytes_per_s = 2e9,
                    .sumsq_bytes_per_s = 3e9,
                    .accumulate_sumsq_bytes_per_s = 5e9,
                    .gather_bytes_per_s = 4e9,
                    .elementwise_bytes_per_s = 1e30,
                    .memory_bytes_per_s = 8e9};
  const uint32_t rows[] = {4096, 256, 1024};
  for (int i = 0; i < 3; i++)
    hw.gemm[PS_BF16][i] = (ps_gemm_rate){rows[i], 0, random_rate(), random_rate(), random_rate()};
  for (int i = 0; i < N_SHAPES; i++) {
    hw.attention[PS_BF16][i] = shapes[(i + 3) % N_SHAPES];
    hw.attention[PS_BF16][i].forward_flops_per_s = random_rate();
    hw.attention[PS_BF16][i].backward_flops_per_s = random_rate();
  }
  hw.gemm_flops_per_s[PS_F32] = 5e12;
  hw.attention_flops_per_s[PS_F32] = 6e12;
  hw.attention_bwd_flops_per_s[PS_F32] = 7e12;
  return hw;
}

static double rate_of(const ps_hardware *hw, const ps_kernel *kernel, uint32_t stream,
                      const void *args, ps_work work) {
  const ps__cost_model m = ps__cost_model_of(hw, false, ps__places_of(1, 1), 2, 0);
  return (work.flops > 0 ? work.flops : work.bytes) / ps__cost_ns(&m, kernel, stream, args, work) *
         1e9;
}

static double attention(const ps_hardware *hw, uint32_t rows, uint32_t kv_rows, double length,
                        bool known, bool backward, uint32_t dt) {
  const ps__args_attention a = {.n_tokens = rows,
                                .row0 = kv_rows - rows,
                                .n_heads = HEADS,
                                .n_kv_heads = HEADS,
                                .head_dim = HEAD_DIM,
                                .dt = dt,
                                .document_rows = !known           ? 0
                                                 : kv_rows > rows ? kv_rows
                                                                  : (uint32_t)length};
  const double pairs = rows * (a.row0 + length / 2);
  return rate_of(hw, backward ? &ps__k_attention_bwd : &ps__k_attention_fwd,
                 ps__places_of(1, 1)->dev[0].compute, &a,
                 (ps_work){.flops = pairs * HEADS * HEAD_DIM * (backward ? 10 : 4)});
}

static double gemm(const ps_hardware *hw, uint32_t rows, bool ta, bool tb, uint8_t dt) {
  const ps__args_gemm g = {.m = ta ? 512 : rows,
                           .n = 512,
                           .k = ta ? rows : 512,
                           .trans_a = ta,
                           .trans_b = tb,
                           .dt_a = dt,
                           .dt_b = dt,
                           .dt_c = dt};
  return rate_of(hw, &ps__k_gemm, ps__places_of(1, 1)->dev[0].compute, &g,
                 (ps_work){.flops = 2.0 * g.m * g.n * g.k});
}

/* a few roundings */
static bool same(double a, double b) { return fabs(a - b) <= 1e-12 * fabs(b); }
static const ps_attention_rate *entry(const ps_hardware *hw, uint32_t rows, uint32_t kv_rows,
                                      uint32_t packed, uint32_t found) {
  const ps_attention_rate *r = hw->attention[PS_BF16];
  while (r->rows != rows || r->kv_rows != kv_rows || r->packed != packed || r->found != found)
    r++;
  return r;
}
static double of(const ps_attention_rate *r, bool backward) {
  return backward ? r->backward_flops_per_s : r->forward_flops_per_s;
}

static void entries_are_met(const ps_hardware *hw) {
  for (int i = 0; i < N_SHAPES; i++)
    for (int backward = 0; backward < 2; backward++) {
      const ps_attention_rate *r = &hw->attention[PS_BF16][i];
      CHECK(same(attention(hw, r->rows, r->kv_rows, (double)r->rows / r->packed, !r->found,
                           backward, PS_BF16),
                 of(r, backward)));
    }
  for (int i = 0; i < 3; i++) {
    const ps_gemm_rate *r = &hw->gemm[PS_BF16][i];
    CHECK(same(gemm(hw, r->rows, false, true, PS_BF16), r->forward_flops_per_s));
    CHECK(same(gemm(hw, r->rows, false, false, PS_BF16), r->dgrad_flops_per_s));
    CHECK(same(gemm(hw, r->rows, true, false, PS_BF16), r->wgrad_flops_per_s));
  }
}

/* @rate over x0 .. x1 goes from y0 to y1 without turning. */
static void goes(double (*rate)(const ps_hardware *, uint32_t, bool), const ps_hardware *hw,
                 bool backward, uint32_t x0, uint32_t x1, double y0, double y1) {
  double last = y0;
  for (uint32_t i = 0; i <= 64; i++) {
    const double y = rate(hw, x0 + (uint32_t)((double)(x1 - x0) * i / 64), backward);
    CHECK((y - last) * (y1 - y0) >= -1e-12 * (y0 * y0 + y1 * y1)); /* a few roundings */
    last = y;
  }
  CHECK(same(rate(hw, x0, backward), y0) && same(last, y1));
}
static double by_length(const ps_hardware *hw, uint32_t x, bool backward) {
  return attention(hw, x, x, x, true, backward, PS_BF16);
}
static double by_keys(const ps_hardware *hw, uint32_t x, bool backward) {
  return attention(hw, ROWS, x, ROWS, true, backward, PS_BF16);
}
static double by_packed_length(const ps_hardware *hw, uint32_t x, bool backward) {
  return attention(hw, 8 * x, 8 * x, x, true, backward, PS_BF16);
}
static double by_found_length(const ps_hardware *hw, uint32_t x, bool backward) {
  return attention(hw, 8 * x, 8 * x, x, false, backward, PS_BF16);
}

static void between_entries_rates_go_from_one_to_the_other(const ps_hardware *hw) {
  for (int b = 0; b < 2; b++) {
    const double whole = of(entry(hw, 8192, 8192, 1, 0), b),
                 slice = of(entry(hw, 8192, 16384, 1, 0), b),
                 far = of(entry(hw, 8192, 65536, 1, 0), b);
    goes(by_length, hw, b, 2048, 8192, of(entry(hw, 2048, 2048, 1, 0), b), whole);
    goes(by_length, hw, b, 8192, 32768, whole, of(entry(hw, 32768, 32768, 1, 0), b));
    goes(by_keys, hw, b, 8192, 16384, whole, slice);
    goes(by_keys, hw, b, 16384, 65536, slice, far);
    goes(by_packed_length, hw, b, 1024, 8192, of(entry(hw, 8192, 8192, 8, 0), b),
         of(entry(hw, 16384, 16384, 2, 0), b));
    goes(by_found_length, hw, b, 1024, 8192, of(entry(hw, 8192, 8192, 8, 1), b),
         of(entry(hw, 16384, 16384, 2, 1), b));
  }
}

/* A sequence alone and a slice count as found ones where their documents are not known. */
static void a_kind_without_entries_has_those_of_the_kind_before(const ps_hardware *hw) {
  ps_hardware some = *hw;
  for (int b = 0; b < 2; b++) {
    CHECK(same(attention(hw, 8192, 8192, 8192, false, b, PS_BF16),
               of(entry(hw, 16384, 16384, 2, 1), b)));
    const double factor = of(entry(hw, 8192, 16384, 1, 0), b) / of(entry(hw, 8192, 8192, 1, 0), b);
    CHECK(same(attention(hw, 8192, 16384, 8192, false, b, PS_BF16),
               factor * of(entry(hw, 16384, 16384, 2, 1), b)));
  }
  uint32_t n = 0;
  for (int i = 0; i < N_SHAPES; i++)
    if (!hw->attention[PS_BF16][i].found)
      some.attention[PS_BF16][n++] = hw->attention[PS_BF16][i];
  some.attention[PS_BF16][n].rows = 0;
  for (int b = 0; b < 2; b++)
    CHECK(same(by_found_length(&some, 1024, b), of(entry(hw, 8192, 8192, 8, 0), b)));
  n = 0;
  for (int i = 0; i < N_SHAPES; i++)
    if (!hw->attention[PS_BF16][i].found && hw->attention[PS_BF16][i].packed == 1)
      some.attention[PS_BF16][n++] = hw->attention[PS_BF16][i];
  some.attention[PS_BF16][n].rows = 0;
  for (int b = 0; b < 2; b++)
    CHECK(same(by_found_length(&some, 2048, b), of(entry(hw, 2048, 2048, 1, 0), b)) &&
          same(by_packed_length(&some, 2048, b), of(entry(hw, 2048, 2048, 1, 0), b)));
}

static void outside_entries_the_nearest_counts(const ps_hardware *hw) {
  for (int b = 0; b < 2; b++) {
    CHECK(same(by_length(hw, 16, b), of(entry(hw, 2048, 2048, 1, 0), b)) &&
          same(by_length(hw, 1 << 20, b), of(entry(hw, 32768, 32768, 1, 0), b)));
    CHECK(same(by_keys(hw, 1 << 20, b), of(entry(hw, 8192, 65536, 1, 0), b)));
    /* a shorter slice: that of a sequence of its rows, times the factor of as many keys a row */
    const double factor = of(entry(hw, 8192, 16384, 1, 0), b) / of(entry(hw, 8192, 8192, 1, 0), b);
    CHECK(same(attention(hw, 2048, 4096, 2048, true, b, PS_BF16),
               factor * of(entry(hw, 2048, 2048, 1, 0), b)));
  }
  CHECK(same(gemm(hw, 1, false, true, PS_BF16), gemm(hw, 256, false, true, PS_BF16)));
  CHECK(same(gemm(hw, 1 << 20, true, false, PS_BF16), gemm(hw, 4096, true, false, PS_BF16)));
}

static void fp32_has_one_rate(const ps_hardware *hw) {
  CHECK(same(gemm(hw, 300, true, false, PS_F32), 5e12) &&
        same(attention(hw, 100, 100, 100, true, false, PS_F32), 6e12));
  CHECK(same(attention(hw, 100, 4000, 100, false, true, PS_F32), 7e12));
}

static double demand_on(const ps_sim_cost *c, uint8_t resource) {
  double sum = 0;
  for (int d = 0; d < PS_SIM_DEMANDS && c->demand[d] > 0; d++)
    sum += c->resource[d] == resource ? c->demand[d] : 0;
  return sum;
}

static void host_ops_have_their_own_rates(const ps_hardware *hw) {
  const ps_work work = {.bytes = 1e6};
  const ps_kernel adamw = {.name = "adamw", .op_class = PS_CLASS_OPTIMIZER, .fn = {NULL, NULL}};
  const struct {
    ps__op_info info;
    double rate;
  } part[] = {{{.rate = PS__RATE_OPTIMIZER_WEIGHTS}, 6e9},
              {{.rate = PS__RATE_OPTIMIZER_STATE}, 7e9}};
  for (int i = 0; i < 2; i++) {
    ps_kernel of_part = adamw;
    of_part.info = &part[i].info;
    CHECK(same(rate_of(hw, &of_part, ps__places_of(1, 1)->host_ops, NULL, work), part[i].rate));
  }
  CHECK(same(rate_of(hw, &adamw, ps__places_of(1, 1)->host_ops, NULL, work), 1e9) &&
        same(rate_of(hw, &ps__k_accumulate_host, ps__places_of(1, 1)->host_ops, NULL, work), 2e9));
  CHECK(same(rate_of(hw, &ps__k_embed_bwd_host, ps__places_of(1, 1)->host_ops, NULL, work), 2e9) &&
        same(rate_of(hw, &ps__k_sumsq_host, ps__places_of(1, 1)->host_ops, NULL, work), 3e9));
  CHECK(same(rate_of(hw, &ps__k_accumulate_sumsq_host, ps__places_of(1, 1)->host_ops, NULL, work),
             5e9));
  CHECK(same(rate_of(hw, &ps__k_embed_fwd, ps__places_of(1, 1)->io, NULL, work), 4e9));
  ps__cost_model m = ps__cost_model_of(hw, false, ps__places_of(1, 1), 2, 0);
  ps_sim_cost cost;
  ps__cost(&m,
           &(ps_op_view){
               .kernel = &ps__k_sumsq_host, .stream = ps__places_of(1, 1)->host_ops, .work = work},
           &cost);
  CHECK(demand_on(&cost, ps__memory_of(ps__places_of(1, 1)->host)) == 3.0 / 8);
}

/* Sums alone, beside copies to the device, and beside copies both ways, on four threads and on
 * two; AdamW beside copies both ways. */
static void memory_is_divided_as_measured(const ps_hardware *of) {
  ps_hardware hw = *of;
  const uint32_t h2d = PS_CONTENTION_H2D, d2h = PS_CONTENTION_D2H, sums = PS_CONTENTION_SUMS,
                 adamw = PS_CONTENTION_OPTIMIZER;
  const ps_contention_rate is[] = {{sums, 4, 50e9, 50e9, 100e9},
                                   {sums | h2d, 4, 40e9, 50e9, 80e9},
                                   {sums | h2d | d2h, 4, 20e9, 40e9, 50e9},
                                   {sums, 2, 50e9, 50e9, 60e9},
                                   {sums | h2d | d2h, 2, 45e9, 48e9, 40e9},
                                   {adamw, 4, 50e9, 50e9, 90e9},
                                   {adamw | h2d | d2h, 4, 25e9, 60e9, 30e9}};
  memcpy(hw.contention, is, sizeof is);
  hw.backend = PS_BACKEND_CUDA;
  hw.link[PS_LINK_H2D] = (ps_link_rate){PS_PLACE_HOST, PS_PLACE_DEVICE, 50e9, 0};
  hw.link[PS_LINK_D2H] = (ps_link_rate){PS_PLACE_DEVICE, PS_PLACE_HOST, 50e9, 0};
  CHECK(ps__sum_threads(&hw, 0) == 4 && ps__sum_threads(&hw, 1) == 2 &&
        ps__sum_threads(&hw, 2) == 0 && ps__sum_threads(of, 0) == 0);
  CHECK(same(ps__sum_speed(&hw, 4), 1) && same(ps__sum_speed(&hw, 2), 0.6) &&
        same(ps__sum_speed(of, 2), 1));
  const ps_work work = {.bytes = 1e6};
  for (uint32_t threads = 2; threads <= 4; threads += 2) {
    ps__cost_model m = ps__cost_model_of(&hw, false, ps__places_of(1, 1), 4, threads);
    const struct {
      const ps_kernel *kernel;
      uint32_t stream, kind;
      double beside_sums_and_in, beside_sums, beside_adamw;
    } op[] = {{NULL, ps__places_of(1, 1)->dev[0].to_device, h2d, threads == 4 ? 50.0 / 40 : 1,
               threads == 4 ? 50.0 / 20 : 50.0 / 45, 2},
              /* never faster than alone */
              {NULL, ps__places_of(1, 1)->dev[0].to_host, d2h, 1,
               threads == 4 ? 50.0 / 40 : 50.0 / 48, 1},
              {&ps__k_accumulate_host, ps__places_of(1, 1)->host_ops, sums,
               threads == 4 ? 100.0 / 80 : 1, threads == 4 ? 2 : 60.0 / 40, 1}};
    for (size_t i = 0; i < sizeof op / sizeof *op; i++) {
      ps_sim_cost c;
      ps__cost(&m, &(ps_op_view){.kernel = op[i].kernel, .stream = op[i].stream, .work = work}, &c);
      CHECK(c.kind == op[i].kind && c.slower[c.kind] == 1 && c.slower[h2d | d2h] == 1 &&
            demand_on(&c, ps__memory_of(ps__places_of(1, 1)->host)) == 0);
      CHECK(same(c.slower[sums | h2d], op[i].beside_sums_and_in) &&
            same(c.slower[sums | h2d | d2h], op[i].beside_sums));
      CHECK(same(c.slower[adamw | h2d | d2h], op[i].beside_adamw));
    }
    const ps_kernel update = {.name = "adamw", .op_class = PS_CLASS_OPTIMIZER, .fn = {NULL, NULL}};
    ps_sim_cost c;
    ps__cost(
        &m, &(ps_op_view){.kernel = &update, .stream = ps__places_of(1, 1)->host_ops, .work = work},
        &c);
    CHECK(c.kind == adamw && same(c.slower[adamw | h2d | d2h], 3) && same(c.ns, 1e6 + hw.op_ns));
    ps__cost(&m,
             &(ps_op_view){.kernel = &ps__k_accumulate_host,
                           .stream = ps__places_of(1, 1)->host_ops,
                           .work = work},
             &c);
    CHECK(same(c.ns - hw.op_ns, 0.5e6 / (threads == 4 ? 1 : 0.6)));
  }
}

/* Two GPUs that copy both ways at once, beside AdamW: with rates measured of two GPUs together,
 * each has those, and they have no demand on memory besides. */
static void gpus_have_the_rates_measured_together(const ps_hardware *of) {
  ps_hardware hw = *of;
  const uint32_t h2d = PS_CONTENTION_H2D, d2h = PS_CONTENTION_D2H, adamw = PS_CONTENTION_OPTIMIZER;
  hw.backend = PS_BACKEND_CUDA;
  hw.link[PS_LINK_H2D] = (ps_link_rate){PS_PLACE_HOST, PS_PLACE_DEVICE, 50e9, 0};
  hw.link[PS_LINK_D2H] = (ps_link_rate){PS_PLACE_DEVICE, PS_PLACE_HOST, 50e9, 0};
  const ps_contention_rate one[] = {{adamw, 4, 50e9, 50e9, 90e9},
                                    {adamw | h2d | d2h, 4, 40e9, 45e9, 60e9}},
                           two[] = {{h2d | d2h, 0, 25e9, 40e9, 0},
                                    {adamw | h2d | d2h, 4, 20e9, 10e9, 30e9}};
  memcpy(hw.contention, one, sizeof one);
  memcpy(hw.gpus_contention, two, sizeof two);
  for (hw.n_gpus = 0; hw.n_gpus <= 3; hw.n_gpus++) {
    const ps__places *at = ps__places_of(2, 1);
    const ps__cost_model m = ps__cost_model_of(&hw, false, at, 4, 0);
    const bool together = hw.n_gpus == 2;
    CHECK((ps__gpus_copies(&hw, 2) != NULL) == together && !ps__gpus_copies(&hw, 1));
    for (uint32_t d = 0; d < 2; d++) {
      ps_sim_cost c;
      ps__cost((void *)(uintptr_t)&m,
               &(ps_op_view){.stream = at->dev[d].to_device, .work = {.bytes = 1e6}}, &c);
      CHECK(same(c.slower[h2d | d2h], together ? 2 : 1));
      CHECK(same(c.slower[adamw | h2d | d2h], together ? 2.5 : 1.25));
      CHECK((demand_on(&c, ps__memory_of(at->host)) > 0) == !together);
    }
  }
}

/* ns of a copy from the host to each of two devices at once, the buses of which have these numbers.
 * The host's memory is enough for both. */
static double two_copies(const ps_hardware *of, uint32_t bus_0, uint32_t bus_1) {
  ps_hardware hw = *of;
  hw.backend = PS_BACKEND_CUDA;
  /* one copy takes all of a bus */
  hw.link[PS_LINK_H2D] = (ps_link_rate){PS_PLACE_HOST, PS_PLACE_DEVICE, 50e9, 25e9};
  hw.memory_bytes_per_s = 200e9;
  enum { HOST, DEVICE_0, DEVICE_1, N_STREAMS = 2 };
  const ps__places at = {
      .n_places = 3,
      .kind = {[HOST] = PS_PLACE_HOST, [DEVICE_0] = PS_PLACE_DEVICE, [DEVICE_1] = PS_PLACE_DEVICE},
      .n_links = 2,
      .link = {{HOST, DEVICE_0, 0, bus_0}, {HOST, DEVICE_1, 1, bus_1}},
      .n_streams = N_STREAMS,
      .stream = {{"to 0", DEVICE_0}, {"to 1", DEVICE_1}},
      .host_ops = PS_MAX_STREAMS,
      .io = PS_MAX_STREAMS};
  ps__cost_model m = ps__cost_model_of(&hw, false, &at, 2, 0);
  ps_program *p;
  ps_schedule *s;
  double end;
  CHECK(ps_program_create(&p, at.n_places, N_STREAMS) == PS_OK);
  for (uint32_t i = 0; i < N_STREAMS; i++) {
    const ps_access access[] = {{HOST, PS_READ, 0, 8}, {DEVICE_0 + i, PS_WRITE, 0, 8}};
    const ps_op op = {.stream = i, .access = access, .n_access = 2, .work = {.bytes = 50e6}};
    CHECK(ps_program_add(p, &op, NULL) == PS_OK);
  }
  CHECK(ps_schedule_compile(&s, p) == PS_OK);
  CHECK(ps_sim_run(s, ps__cost, &m, 1, NULL, &end) == PS_OK);
  ps_program_destroy(p);
  CHECK(ps_schedule_destroy(s) == PS_OK);
  return end;
}

static void links_share_what_the_places_say(const ps_hardware *hw) {
  CHECK(same(two_copies(hw, 0, 1), 1e6) && same(two_copies(hw, 0, 0), 2e6));
}

/* Products and attention on a GPU gain where it idles; norms, which the memory bounds, copies
 * and host ops do not, nor does a CPU. */
static void idle_time_shortens_what_takes_power(const ps_hardware *hw) {
  const struct {
    const ps_kernel *kernel;
    uint32_t stream;
    double gain;
  } op[] = {{&ps__k_gemm, ps__places_of(1, 1)->dev[0].compute, 0.5},
            {&ps__k_attention_bwd, ps__places_of(1, 1)->dev[0].compute, 0.5},
            {&ps__k_rmsnorm_fwd, ps__places_of(1, 1)->dev[0].compute, 0},
            {NULL, ps__places_of(1, 1)->dev[0].to_device, 0},
            {&ps__k_sumsq_host, ps__places_of(1, 1)->host_ops, 0}};
  const ps__args_gemm g = {
      .m = 256, .n = 64, .k = 64, .dt_a = PS_BF16, .dt_b = PS_BF16, .dt_c = PS_BF16};
  const ps__args_attention a = {.n_tokens = 256,
                                .n_heads = 4,
                                .n_kv_heads = 2,
                                .head_dim = 64,
                                .dt = PS_BF16,
                                .document_rows = 256};
  for (uint32_t backend = PS_BACKEND_CPU; backend <= PS_BACKEND_CUDA; backend++) {
    ps_hardware some = *hw;
    some.backend = backend;
    some.idle_gain = 0.5;
    ps__cost_model m = ps__cost_model_of(&some, false, ps__places_of(1, 1), 2, 0);
    for (size_t i = 0; i < sizeof op / sizeof *op; i++) {
      ps_sim_cost cost;
      const void *args = i == 0 ? (const void *)&g : i == 1 ? (const void *)&a : NULL;
      ps__cost(&m,
               &(ps_op_view){.kernel = op[i].kernel,
                             .stream = op[i].stream,
                             .args = args,
                             .work = {.flops = 1e9, .bytes = 1e6}},
               &cost);
      CHECK(cost.idle_gain == (backend == PS_BACKEND_CUDA ? op[i].gain : 0));
    }
  }
}

/* Of several GPUs each is shared by the ops of its compute stream and the sums beside them. */
static void sums_take_time_from_their_gpu(const ps_hardware *hw) {
  ps_hardware gpu = *hw;
  gpu.backend = PS_BACKEND_CUDA;
  for (uint32_t n = 1; n <= 2; n++) {
    const ps__places *at = ps__places_of(n, 1);
    ps__cost_model m = ps__cost_model_of(&gpu, false, at, 2, 0);
    for (uint32_t d = 0; d < n; d++) {
      const uint32_t stream[2] = {at->dev[d].compute, at->dev[d].sums};
      for (uint32_t i = 0; i < n; i++) { /* one GPU has no stream of sums */
        ps_sim_cost cost;
        ps__cost(&m,
                 &(ps_op_view){
                     .kernel = &ps__k_rmsnorm_fwd, .stream = stream[i], .work = {.bytes = 1e6}},
                 &cost);
        CHECK(demand_on(&cost, ps__memory_of(at->dev[d].place)) == (n > 1));
      }
    }
  }
}

static const ps__args_gemm some_product = {
    .m = 256, .n = 64, .k = 64, .dt_a = PS_BF16, .dt_b = PS_BF16, .dt_c = PS_BF16};
static const ps__args_gemm_fp8 some_fp8_product = {.m = 256, .n = 64, .k = 64};
static const ps__args_attention some_attention = {.n_tokens = 256,
                                                  .n_heads = 4,
                                                  .n_kv_heads = 2,
                                                  .head_dim = 64,
                                                  .dt = PS_BF16,
                                                  .document_rows = 256};
static const ps__args_delta some_delta = {.n_tokens = 256,
                                          .n_key_heads = 2,
                                          .n_value_heads = 4,
                                          .key_dim = 16,
                                          .value_dim = 16,
                                          .dt = PS_BF16};
typedef struct speed_case {
  const ps_kernel *kernel;
  const void *args;
  bool slower;
} speed_case;

/* A product of FP8 operands has the measured rate of its role. */
static void fp8_products_have_the_rate_of_their_role(void) {
  const uint32_t compute = ps__places_of(1, 1)->dev[0].compute;
  const ps_work work = {.flops = 1e12, .bytes = 1};
  ps_hardware hw = {.backend = PS_BACKEND_CUDA, .elementwise_bytes_per_s = 1e12};
  hw.gemm_flops_per_s[PS_BF16] = 5e12;
  hw.gemm_fp8_flops_per_s = 9e12;
  hw.gemm_fp8[0] = (ps_gemm_rate){256, 0, 9e12, 8e12, 7e12};
  for (uint32_t role = 0; role < 3; role++) {
    const ps__args_gemm_fp8 g = {.m = 256, .n = 64, .k = 256, .role = (uint8_t)role};
    const double rate = rate_of(&hw, &ps__k_gemm_fp8, compute, &g, work);
    CHECK(same(rate, (role == 2 ? 7e12 : role == 1 ? 8e12 : 9e12)));
  }
}

/* Products of experts have the rate of their role and of the rows that an expert has on average;
 * without a table that of products, less half a tile of 128 rows an expert. */
static void grouped_products_have_the_rate_of_their_rows(void) {
  const uint32_t compute = ps__places_of(1, 1)->dev[0].compute;
  const ps_work work = {.flops = 1e12, .bytes = 1};
  ps_hardware hw = {.backend = PS_BACKEND_CUDA, .elementwise_bytes_per_s = 1e12};
  hw.gemm_flops_per_s[PS_BF16] = 5e12;
  for (uint32_t role = 0; role < 3; role++) {
    ps__args_gemm_grouped g = {.n_tokens = 1024,
                               .n_used = 8,
                               .n_out = 64,
                               .n_in = 64,
                               .n_experts = 128,
                               .dt = PS_BF16,
                               .role = role};
    hw.gemm_grouped[0].rows = 0;
    CHECK(same(rate_of(&hw, &ps__k_gemm_grouped, compute, &g, work), 2.5e12));
    hw.gemm_grouped[0] = (ps_gemm_rate){64, 0, 9e12, 8e12, 7e12};
    hw.gemm_grouped[1] = (ps_gemm_rate){256, 0, 19e12, 18e12, 17e12};
    CHECK(same(rate_of(&hw, &ps__k_gemm_grouped, compute, &g, work), (9 - role) * 1e12));
    g.n_tokens = 2048;
    CHECK(same(rate_of(&hw, &ps__k_gemm_grouped, compute, &g, work), (14 - role) * 1e12));
  }
}

static double delta_elements_per_s(const ps_hardware *hw, uint32_t keys, uint32_t values,
                                   bool backward) {
  const ps__cost_model m = ps__cost_model_of(hw, false, ps__places_of(1, 1), 2, 0);
  const ps__args_delta a = {.n_tokens = 8192,
                            .n_key_heads = keys,
                            .n_value_heads = values,
                            .key_dim = 128,
                            .value_dim = 128,
                            .dt = PS_BF16};
  return 1e9 * 8192 * values * 128 * 128 /
         ps__cost_ns(&m, backward ? &ps__k_delta_bwd : &ps__k_delta_fwd,
                     ps__places_of(1, 1)->dev[0].compute, &a, (ps_work){.flops = 1, .bytes = 1});
}

/* By value heads. Without a table what an H200 took, by SMs and memory; on the CPU a thread takes a
 * key head at a time. */
static void the_delta_rule_has_the_rate_of_its_heads(void) {
  const double h200[] = {8192.0 * 32 * 16384 / 0.69e-3, 8192.0 * 32 * 16384 / 2.05e-3};
  ps_hardware gpu = {.backend = PS_BACKEND_CUDA, .n_sms = 132, .elementwise_bytes_per_s = 3.87e12},
              slow = gpu, cpu = {.backend = PS_BACKEND_CPU, .n_threads = 4};
  slow.n_sms /= 2;
  slow.elementwise_bytes_per_s /= 2;
  cpu.gemm_flops_per_s[PS_F32] = 1e12;
  for (int backward = 0; backward < 2; backward++) {
    const double estimate = delta_elements_per_s(&gpu, 16, 32, backward),
                 all = delta_elements_per_s(&cpu, 4, 4, backward);
    CHECK(fabs(estimate / h200[backward] - 1) < 0.02);
    CHECK(same(delta_elements_per_s(&slow, 16, 64, backward), estimate / 2));
    CHECK(all > 1e10 && same(delta_elements_per_s(&cpu, 8, 32, backward), all));
    CHECK(same(delta_elements_per_s(&cpu, 5, 10, backward), all * 5 / 8));
  }
  gpu.delta[0] = (ps_delta_rate){32, 0, 5e12, 3e12};
  gpu.delta[1] = (ps_delta_rate){8, 0, 1e12, 1e11};
  const struct {
    uint32_t heads;
    double forward, backward;
  } is[] = {
      {4, 1e12, 1e11}, {8, 1e12, 1e11}, {16, 3e12, 1.55e12}, {32, 5e12, 3e12}, {64, 5e12, 3e12}};
  for (size_t i = 0; i < sizeof is / sizeof *is; i++) {
    CHECK(same(delta_elements_per_s(&gpu, 4, is[i].heads, false), is[i].forward));
    CHECK(same(delta_elements_per_s(&gpu, 4, is[i].heads, true), is[i].backward));
  }
}

/* Attention between FP8 products takes the time that its speed there says; nothing else does. */
static void fp8_slows_attention(const ps_hardware *hw) {
  const speed_case op[] = {{&ps__k_gemm, &some_product, false},
                           {&ps__k_attention_fwd, &some_attention, true},
                           {&ps__k_attention_bwd, &some_attention, true},
                           {&ps__k_rmsnorm_fwd, NULL, false}};
  const uint32_t compute = ps__places_of(1, 1)->dev[0].compute;
  const ps_work work = {.flops = 1e9, .bytes = 1e6};
  for (int known = 0; known < 2; known++) {
    ps_hardware some = *hw;
    some.fp8_attention_speed = known ? 0.8 : 0;
    const ps__cost_model in_bf16 = ps__cost_model_of(&some, false, ps__places_of(1, 1), 2, 0),
                         in_fp8 = ps__cost_model_of(&some, true, ps__places_of(1, 1), 2, 0);
    for (size_t i = 0; i < sizeof op / sizeof *op; i++)
      CHECK(same(ps__cost_ns(&in_fp8, op[i].kernel, compute, op[i].args, work),
                 ps__cost_ns(&in_bf16, op[i].kernel, compute, op[i].args, work) /
                     (known && op[i].slower ? 0.8 : 1)));
    /* 32,768 keys a row, 8 times those of the measurement */
    const ps_work longer = {.flops = 4.0 * 4 * 64 * 256 * 32768};
    CHECK(same(ps__cost_ns(&in_fp8, &ps__k_attention_fwd, compute, &some_attention, longer),
               ps__cost_ns(&in_bf16, &ps__k_attention_fwd, compute, &some_attention, longer) /
                   (known ? 1 - 0.2 / 8 : 1)));
  }
}

/* The speeds of heads of 64 hold for these and narrower ones, each way its own, by the length. */
static void narrow_heads_have_their_own_speed(const ps_hardware *hw) {
  static const struct {
    double keys, forward, backward;
  } by_length[] = {{1024, 0.6, 0.7},
                   {4096, 0.6, 0.7},
                   {16384, 0.7, 0.75},
                   {65536, 0.8, 0.8},
                   {1 << 17, 0.8, 0.8}};
  const uint32_t compute = ps__places_of(1, 1)->dev[0].compute;
  ps_hardware known = *hw;
  known.heads64_attention_speed = 0.6;
  known.heads64_attention_bwd_speed = 0.7;
  known.heads64_long_attention_speed = known.heads64_long_attention_bwd_speed = 0.8;
  ps_hardware short_alone = known;
  short_alone.heads64_long_attention_speed = 0;
  for (uint32_t dim = 32; dim <= 256; dim *= 2) {
    const ps__args_attention a = {.n_tokens = 4096,
                                  .n_heads = 4,
                                  .n_kv_heads = 2,
                                  .head_dim = dim,
                                  .dt = PS_BF16,
                                  .document_rows = 4096};
    const bool narrow = dim <= 64;
    for (size_t i = 0; i < sizeof by_length / sizeof *by_length; i++) {
      const double pairs = by_length[i].keys * a.n_tokens * a.n_heads * dim;
      const ps_work fwd = {.flops = 4 * pairs}, bwd = {.flops = 10 * pairs};
      CHECK(same(rate_of(&known, &ps__k_attention_fwd, compute, &a, fwd),
                 (narrow ? by_length[i].forward : 1) *
                     rate_of(hw, &ps__k_attention_fwd, compute, &a, fwd)));
      CHECK(same(rate_of(&short_alone, &ps__k_attention_fwd, compute, &a, fwd),
                 (narrow ? 0.6 : 1) * rate_of(hw, &ps__k_attention_fwd, compute, &a, fwd)));
      CHECK(same(rate_of(&known, &ps__k_attention_bwd, compute, &a, bwd),
                 (narrow ? by_length[i].backward : 1) *
                     rate_of(hw, &ps__k_attention_bwd, compute, &a, bwd)));
    }
  }
}

/* The plain kernels', on a GPU alone; until they are measured, the memory's. */
static void wide_heads_have_the_rate_of_plain_kernels(const ps_hardware *of) {
  const uint32_t compute = ps__places_of(1, 1)->dev[0].compute;
  const ps_work work = {.flops = 1e15};
  ps__args_attention a = some_attention;
  ps_hardware hw = *of;
  hw.elementwise_bytes_per_s = 3e12;
  for (int known = 0; known < 2; known++) {
    a.head_dim = 512;
    hw.backend = PS_BACKEND_CUDA;
    hw.heads512_attention_flops_per_s = known * 4e12;
    hw.heads512_attention_bwd_flops_per_s = known * 5e12;
    CHECK(same(rate_of(&hw, &ps__k_attention_fwd, compute, &a, work), known ? 4e12 : 3e12));
    CHECK(same(rate_of(&hw, &ps__k_attention_bwd, compute, &a, work), known ? 5e12 : 3e12));
    hw.backend = PS_BACKEND_CPU;
    CHECK(same(rate_of(&hw, &ps__k_attention_fwd, compute, &a, work),
               rate_of(of, &ps__k_attention_fwd, compute, &a, work)));
    hw.backend = PS_BACKEND_CUDA;
    a.head_dim = 256;
    CHECK(same(rate_of(&hw, &ps__k_attention_fwd, compute, &a, work),
               rate_of(of, &ps__k_attention_fwd, compute, &a, work)));
  }
}

/* Of as many GPUs as were measured at once, products and attention have the speed there. Norms do
 * not, nor does any op of fewer or more GPUs. */
static void gpus_that_compute_at_once_are_slower(const ps_hardware *of) {
  const speed_case op[] = {{&ps__k_gemm, &some_product, true},
                           {&ps__k_gemm_fp8, &some_fp8_product, true},
                           {&ps__k_attention_fwd, &some_attention, true},
                           {&ps__k_attention_bwd, &some_attention, true},
                           {&ps__k_delta_fwd, &some_delta, true},
                           {&ps__k_rmsnorm_fwd, NULL, false}};
  const ps_work work = {.flops = 1e9, .bytes = 1e6};
  ps_hardware hw = *of, known;
  hw.backend = PS_BACKEND_CUDA;
  hw.n_gpus = 2;
  hw.gemm_fp8_flops_per_s = 9e12;
  hw.gemm_flops_per_s[PS_BF16] = 5e12;
  known = hw;
  known.gpus_compute_speed = 0.75;
  for (uint32_t n = 1; n <= 3; n++) {
    const ps__places *at = ps__places_of(n, 1);
    const ps__cost_model all = ps__cost_model_of(&known, false, at, 4, 0),
                         one = ps__cost_model_of(&hw, false, at, 4, 0);
    for (size_t i = 0; i < sizeof op / sizeof *op; i++)
      CHECK(same(ps__cost_ns(&all, op[i].kernel, at->dev[0].compute, op[i].args, work),
                 ps__cost_ns(&one, op[i].kernel, at->dev[0].compute, op[i].args, work) /
                     (n == 2 && op[i].slower ? 0.75 : 1)));
  }
}

static void single_rates_fill_what_is_absent(void) {
  ps_hardware hw = {.struct_bytes = sizeof hw,
                    .optimizer_bytes_per_s = 1e9,
                    .memory_bytes_per_s = 8e9,
                    .elementwise_bytes_per_s = 1e30};
  hw.gemm_flops_per_s[PS_BF16] = 2e12;
  hw.attention_flops_per_s[PS_BF16] = 3e12;
  hw.attention_bwd_flops_per_s[PS_BF16] = 4e12;
  ps__hardware_complete(&hw);
  CHECK(same(gemm(&hw, 100, true, false, PS_BF16), 2e12) &&
        same(by_keys(&hw, 30000, false), 3e12) && same(by_packed_length(&hw, 100, true), 4e12) &&
        same(by_found_length(&hw, 100, true), 4e12));
  CHECK(hw.accumulate_bytes_per_s == 1e9 && hw.accumulate_sumsq_bytes_per_s == 1e9 &&
        hw.sumsq_bytes_per_s == 1e9 && hw.gather_bytes_per_s == 2e9);
  CHECK(hw.optimizer_weights_bytes_per_s == 1e9 && hw.optimizer_state_bytes_per_s == 1e9);
}

static void document_rows_count_where_they_divide_the_chunk(void) {
  const struct {
    uint32_t n_tokens, row0, document_rows, documents;
  } is[] = {{100, 0, 0, 0},
            {100, 0, 100, 1},
            {100, 0, 101, 1},
            {100, 0, 50, 2},
            {100, 0, 1, 100},
            {100, 0, 40, 0},
            {100, 50, 150, 1},
            {100, 50, 1u << 30, 1},
            {100, 50, 50, 0},
            {100, 50, 149, 0},
            {1, UINT32_MAX, UINT32_MAX, 0}};
  for (size_t i = 0; i < sizeof is / sizeof *is; i++)
    CHECK(ps__attention_documents(&(ps__args_attention){.n_tokens = is[i].n_tokens,
                                                        .row0 = is[i].row0,
                                                        .document_rows = is[i].document_rows}) ==
          is[i].documents);
}

int main(void) {
  for (int i = 0; i < 200; i++) {
    const ps_hardware hw = random_machine();
    entries_are_met(&hw);
    between_entries_rates_go_from_one_to_the_other(&hw);
    a_kind_without_entries_has_those_of_the_kind_before(&hw);
    outside_entries_the_nearest_counts(&hw);
    fp32_has_one_rate(&hw);
    host_ops_have_their_own_rates(&hw);
    links_share_what_the_places_say(&hw);
    memory_is_divided_as_measured(&hw);
    gpus_have_the_rates_measured_together(&hw);
    idle_time_shortens_what_takes_power(&hw);
    sums_take_time_from_their_gpu(&hw);
    fp8_slows_attention(&hw);
    narrow_heads_have_their_own_speed(&hw);
    wide_heads_have_the_rate_of_plain_kernels(&hw);
    gpus_that_compute_at_once_are_slower(&hw);
  }
  single_rates_fill_what_is_absent();
  fp8_products_have_the_rate_of_their_role();
  grouped_products_have_the_rate_of_their_rows();
  the_delta_rule_has_the_rate_of_its_heads();
  document_rows_count_where_they_divide_the_chunk();
  printf("ok rates by shape: 200 machines\n");
  return 0;
}
