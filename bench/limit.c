/* limit.c - times every distinct kernel call of a plan's step alone, under sustained load.
 *
 * usage: limit [options of penstock plan] [--seconds X]      bench/limit.py calls it
 *
 * Prints one JSON object: the plan, the rates of the machine, and for each distinct call of the
 * compute stream how often a step makes it, what it works on, and its seconds.
 *
 * How it times. All distinct calls run in TURNS. In a turn each call has a burst: launches of it
 * in a row, as one op of the engine, whose trace has the times. A burst is as long as the call's
 * share of the step, and at least BURST_NS. So the mix of the load is that of the step, by which a
 * GPU that is bound by its power sets its clock. Turns of the first half of the time do not count;
 * on a GPU they take WARM_UP_S at least.
 *
 * Operands. A call has several sets of operands, which its launches use in turn: more bytes than
 * the caches hold. Values are drawn on the scale that a model has, and put back before each burst,
 * because an op that works in place would change them. Operands lie in one work area, since bursts
 * follow each other. */
#include "cli/cli.h"
#include "plan/plan_impl.h"
#include "engine/engine.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SETS = 32, COUNTED_TURNS = 16, MAX_REPEATS = 100000 };
static const double WARM_UP_S = 2.5, BURST_NS = 1e6;

/* ---- operands -------------------------------------------------------------------------------- */

/* What an operand holds. Values have the dtype of the call; F32 ones are fp32 whatever it is. */
typedef enum content {
  UNSET, /* is only written: whatever was there before */
  WEIGHTS,
  VALUES,
  GRADIENTS,
  GRADIENTS_F32,
  LSE,      /* log-sum-exp of some thousand scores of N(0, 1) */
  POSITIVE, /* an optimizer's state: second moments */
  POSITIVE_F32,
  MASTER, /* fp32 weights */
  SCALE,  /* one over some thousand tokens, or of a quantized tensor; fp32 */
  E4M3_VALUES,
  E5M2_VALUES, /* quantized */
  BYTES,       /* of any bits */
  IDS,         /* token ids; the small ones are frequent */
  POSITIONS,
  DOC_START,
  N_CONTENTS
} content;

/* What the operands of each kernel hold, in the order of its pointers (kernels/ops.h). */
static const struct {
  const char *kernel;
  content operand[10];
} contents[] = {
    {"fill_zero", {UNSET}},
    {"copy_bytes", {GRADIENTS, UNSET}},
    {"accumulate", {GRADIENTS, GRADIENTS, BYTES}},
    {"embed_fwd", {IDS, WEIGHTS, UNSET}},
    {"embed_bwd", {IDS, GRADIENTS, GRADIENTS}},
    {"rmsnorm_fwd", {VALUES, VALUES, UNSET, VALUES}},
    {"rmsnorm_bwd", {VALUES, VALUES, GRADIENTS, GRADIENTS, GRADIENTS}},
    {"qkv_split_fwd", {VALUES, POSITIONS, UNSET, UNSET, VALUES, VALUES}},
    {"qkv_split_bwd",
     {GRADIENTS, GRADIENTS_F32, POSITIONS, UNSET, VALUES, VALUES, VALUES, GRADIENTS, GRADIENTS}},
    {"attention_fwd", {VALUES, VALUES, DOC_START, UNSET, UNSET}},
    {"attention_bwd", {VALUES, VALUES, DOC_START, VALUES, LSE, GRADIENTS, UNSET, GRADIENTS_F32}},
    {"glu_fwd", {VALUES, UNSET}},
    {"glu_bwd", {GRADIENTS, VALUES}},
    {"fp8_scale", {VALUES, UNSET}},
    {"quantize", {VALUES, SCALE, UNSET, UNSET, UNSET}}, /* a given scale is read */
    {"rmsnorm_quantize", {VALUES, VALUES, UNSET, UNSET, UNSET}},
    {"glu_quantize", {VALUES, UNSET, UNSET, UNSET, UNSET, UNSET}},
    {"glu_bwd_quantize", {GRADIENTS, VALUES, UNSET, UNSET, UNSET, UNSET, UNSET}},
    {"gemm_fp8", {E4M3_VALUES, SCALE, E4M3_VALUES, SCALE, GRADIENTS, VALUES}},
    {"colsum", {GRADIENTS, GRADIENTS}},
    {"cross_entropy", {VALUES, IDS, SCALE, UNSET}},
    {"sumsq", {GRADIENTS, UNSET}},
};

typedef struct call {
  ps_op_view op; /* its first occurrence */
  uint64_t count, recomputed;
  uint64_t bytes;   /* of a set of operands */
  uint32_t n_sets;  /* in the work area, one after the other */
  uint32_t repeats; /* launches of a burst */
  uint64_t burst;   /* op of the burst in the program */
  content operand[PS_MAX_ACCESSES];
  double seconds; /* of a launch */
} call;

typedef struct limit {
  cli_job job;
  call *call;
  uint32_t n_calls;
  uint64_t pattern_bytes, first_work, work_bytes; /* in the device space */
  ps_engine *engine;
  ps_run *run;
  uint64_t n_turns; /* submitted */
} limit;

static limit l;

static uint64_t aligned(uint64_t bytes) { return (bytes + 255) / 256 * 256; }

static int failed(ps_status st) { return st == PS_OK ? CLI_OK : cli_fail_status(st, true); }

static bool is_update(const call *c) { return c->op.kernel->op_class == PS_CLASS_OPTIMIZER; }

/* Gradient products read a gradient first; those of weights read it and values. */
static content of_product(const ps__args_gemm *a, uint32_t i) {
  if (i == 2)
    return a->trans_a ? GRADIENTS : VALUES;
  if (i > 2)
    return VALUES;
  if (a->trans_a)
    return i ? VALUES : GRADIENTS;
  return i ? WEIGHTS : a->trans_b ? VALUES : GRADIENTS;
}

/* An update on the device: as ps__update_operands() lists them. */
static content of_update(const ps__operand_access *o, uint32_t i, ps_recipe recipe) {
  const uint32_t operand = o[i].operand;
  if (operand == PS_OPERAND_WEIGHTS)
    return ps__has_master(recipe) ? MASTER : WEIGHTS;
  if (operand == PS_OPERAND_GRAD)
    return GRADIENTS;
  if (operand >= PS_OPERAND_STATE && operand < PS_OPERAND_STATE + PS_MAX_STATES)
    return ps__recipes[recipe].state[operand - PS_OPERAND_STATE].dtype == PS_F32 ? POSITIVE_F32
                                                                                 : POSITIVE;
  return UNSET;
}

static uint32_t update_operands(ps__operand_access *out) {
  const ps_plan *p = l.job.plan;
  return ps__update_operands(p->spec.optimizer, p->spec.recipe, PS_UPDATE_WHOLE, !p->spec.clip,
                             out);
}

static int choose_contents(call *c) {
  ps__operand_access operands[PS_N_OPERANDS];
  if (is_update(c))
    update_operands(operands);
  size_t k = 0;
  while (k < sizeof contents / sizeof *contents &&
         strcmp(contents[k].kernel, c->op.kernel->name) != 0)
    k++;
  const bool listed = k < sizeof contents / sizeof *contents;
  if (!listed && !is_update(c) && c->op.kernel != &ps__k_gemm)
    return cli_fail(CLI_FAILED, "bench/limit.c does not say what the operands of %s hold",
                    c->op.kernel->name);
  for (uint32_t i = 0; i < c->op.n_access; i++)
    c->operand[i] = !(c->op.access[i].mode & PS_READ) ? UNSET
                    : is_update(c) ? of_update(operands, i, l.job.plan->spec.recipe)
                    : listed       ? contents[k].operand[i]
                                   : of_product(c->op.args, i);
  const ps__args_gemm_fp8 *product = c->op.args;
  if (c->op.kernel == &ps__k_gemm_fp8 && product->dt_a == PS__E5M2)
    c->operand[0] = E5M2_VALUES;
  return CLI_OK;
}

/* ---- patterns -------------------------------------------------------------------------------- */

static uint64_t random_bits(void) {
  static uint64_t x = 88172645463325252ull;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return x;
}
static float normal(void) {
  const uint64_t x = random_bits();
  return (float)(1.7320508 *
                 ((double)((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48)) /
                      65536.0 -
                  2.0));
}

static float draw(content what) {
  const float z = normal();
  switch (what) {
  case WEIGHTS:
  case MASTER: return 0.02f * z;
  case GRADIENTS:
  case GRADIENTS_F32: return 1e-3f * z;
  case LSE: return 9.0f + 0.1f * z;
  case POSITIVE:
  case POSITIVE_F32: return 1e-6f * z * z;
  case SCALE: return 1e-4f;
  case E4M3_VALUES:
  case E5M2_VALUES: return 100 * z;
  default: return z;
  }
}

static int32_t draw_int(content what, uint64_t i) {
  const ps_plan *p = l.job.plan;
  const double u = (double)(random_bits() >> 11) * 0x1p-53;
  switch (what) {
  case IDS: return (int32_t)(u * u * u * p->model->cfg.vocab_size);
  case POSITIONS: return (int32_t)(i % p->layout.seq_len);
  default: return (int32_t)(i / p->layout.seq_len * p->layout.seq_len);
  }
}

static uint32_t dtype_of(content what) {
  if (what == E4M3_VALUES || what == E5M2_VALUES)
    return what == E4M3_VALUES ? PS__E4M3 : PS__E5M2;
  return what == GRADIENTS_F32 || what == LSE || what == POSITIVE_F32 || what == MASTER ||
                 what == SCALE
             ? PS_F32
             : l.job.plan->step.dt;
}

/* Fills a pattern in host memory. Row i of a chunk is at place i of what counts rows. */
static void fill_pattern(char *to, content what, uint64_t bytes) {
  if (what == BYTES)
    for (uint64_t i = 0; i < bytes; i++)
      to[i] = (char)(random_bits() >> 17);
  else if (what >= IDS)
    for (uint64_t i = 0; i < bytes / 4; i++)
      ((int32_t *)(void *)to)[i] = draw_int(what, i);
  else
    for (uint64_t i = 0; i < bytes / ps__dtypes[dtype_of(what)].bytes; i++) {
      const ps__dtype *d = &ps__dtypes[dtype_of(what)];
      const float x = draw(what);
      d->from_f32(to + i * d->bytes, &x, 1);
    }
}

static int write_patterns(void) {
  void *memory;
  ps_status st = ps__map(&memory, l.pattern_bytes, "patterns");
  for (uint32_t k = UNSET + 1; st == PS_OK && k < N_CONTENTS; k++) {
    fill_pattern(memory, (content)k, l.pattern_bytes);
    st = ps__engine_write(l.engine, l.job.plan->at->dev[0].place, (k - 1) * l.pattern_bytes, memory,
                          l.pattern_bytes);
  }
  if (st == PS_OK)
    ps__unmap(memory, l.pattern_bytes);
  return failed(st);
}

/* ---- bursts ---------------------------------------------------------------------------------- */

typedef struct burst_args {
  call *c;
} burst_args;

static ps_status update_once(const ps_launch *launch, const call *c, uint32_t backend,
                             void *const *ptr) {
  const ps__spec *s = &l.job.plan->spec;
  ps__operand_access operands[PS_N_OPERANDS];
  const uint32_t n = update_operands(operands);
  const uint64_t elements =
      c->op.access[0].bytes / ps__dtypes[ps__recipes[s->recipe].updated.dtype].bytes;
  const ps__segment segment = {0, elements, 0.1f};
  const ps__arrays arrays = ps__arrays_of(operands, n, ptr);
  const ps__update_gate open = {0};
  ps__update u = {.optimizer = s->optimizer,
                  .recipe = ps__recipes[s->recipe].arrays,
                  .lr = 1e-6f,
                  .beta1 = 0.9f,
                  .beta2 = 0.95f,
                  .eps = 1e-8f,
                  .momentum = 0.9f,
                  .grad_scale = 1};
  ps__update_correct(&u, 100);
  return ps__update_unit[backend](launch->exec, &u, &segment, 1, &arrays, 0, &open);
}

/* One of a burst's launches: that on set @set of the operands. */
static ps_launch launch_on(const ps_launch *launch, const call *c, uint32_t set, void **ptr) {
  uint64_t at = set * c->bytes;
  for (uint32_t i = 0; i < c->op.n_access; i++) {
    ptr[i] = (char *)launch->ptr[0] + at;
    at += aligned(c->op.access[i].bytes);
  }
  return (ps_launch){.args = c->op.args,
                     .ptr = ptr,
                     .n_ptr = c->op.n_access,
                     .stream = launch->stream,
                     .exec = launch->exec};
}

/* The launches of a burst, over the sets of operands in turn. */
static ps_status burst(const ps_launch *launch, uint32_t backend) {
  const call *c = ((const burst_args *)launch->args)->c;
  for (uint32_t r = 0; r < c->repeats; r++) {
    void *ptr[PS_MAX_ACCESSES];
    const ps_launch once = launch_on(launch, c, r % c->n_sets, ptr);
    PS_TRY(is_update(c) ? update_once(launch, c, backend, ptr) : c->op.kernel->fn[backend](&once));
  }
  return PS_OK;
}
static ps_status burst_cpu(const ps_launch *launch) { return burst(launch, PS_BACKEND_CPU); }
static ps_status burst_cuda(const ps_launch *launch) { return burst(launch, PS_BACKEND_CUDA); }

/* What a backend asks before the first step is asked of the call's kernel. */
static const call *call_of(const void *args) { return ((const burst_args *)args)->c; }
static const ps__op_info *info_of(const void *args) { return call_of(args)->op.kernel->info; }
static ps_status prepare(const void *args, void *exec, size_t *scratch_bytes) {
  const ps__op_info *info = info_of(args);
  return info && info->prepare ? info->prepare(call_of(args)->op.args, exec, scratch_bytes) : PS_OK;
}
static bool tuned(const ps_launch *launch) {
  void *ptr[PS_MAX_ACCESSES];
  const ps_launch once = launch_on(launch, call_of(launch->args), 0, ptr);
  const ps__op_info *info = info_of(launch->args);
  return !info || !info->tuned || info->tuned(&once);
}
static ps_status tune(const ps_launch *launch) {
  void *ptr[PS_MAX_ACCESSES];
  const ps_launch once = launch_on(launch, call_of(launch->args), 0, ptr);
  return info_of(launch->args)->tune(&once);
}
static const ps__op_info burst_info = {
    .blas = true, .prepare = prepare, .tuned = tuned, .tune = tune};
static const ps_kernel burst_kernel = {.name = "burst",
                                       .op_class = PS_CLASS_OTHER,
                                       .fn = {burst_cpu, burst_cuda},
                                       .info = &burst_info};

/* ---- the distinct calls ---------------------------------------------------------------------- */

/* Updates differ by unit in their arguments, and are alike where their operands are. */
static bool alike(const ps_op_view *a, const ps_op_view *b) {
  if (a->kernel != b->kernel || a->n_access != b->n_access || a->tag.what != b->tag.what ||
      a->args_bytes != b->args_bytes)
    return false;
  for (uint32_t i = 0; i < a->n_access; i++)
    if (a->access[i].bytes != b->access[i].bytes || a->access[i].mode != b->access[i].mode)
      return false;
  return a->kernel->op_class == PS_CLASS_OPTIMIZER || memcmp(a->args, b->args, a->args_bytes) == 0;
}

static int list_calls(void) {
  const ps_plan *p = l.job.plan;
  const uint64_t n = ps_schedule_n_ops(p->schedule);
  size_t room = 0;
  for (uint64_t i = 0; i < n; i++) {
    ps_op_view op;
    ps_status st = ps_schedule_op(p->schedule, i, &op);
    if (st != PS_OK)
      return failed(st);
    if (op.stream != p->at->dev[0].compute || !op.kernel)
      continue;
    uint32_t k = 0;
    while (k < l.n_calls && !alike(&l.call[k].op, &op))
      k++;
    if (k == l.n_calls) {
      if (!ps__grow((void **)&l.call, l.n_calls, &room, sizeof *l.call))
        return cli_fail(CLI_FAILED, "out of memory for the calls of a step");
      l.call[l.n_calls++] = (call){.op = op};
      for (uint32_t a = 0; a < op.n_access; a++)
        l.call[k].bytes += aligned(op.access[a].bytes);
      const int code = choose_contents(&l.call[k]);
      if (code != CLI_OK)
        return code;
    }
    l.call[k].count++;
    l.call[k].recomputed += op.tag.phase == PS__PHASE_RECOMPUTE;
  }
  return CLI_OK;
}

/* Patterns, then the work area of the call that needs most. A set of operands comes again after
 * more bytes than any cache holds, or after MAX_SETS sets: calls that small do not count for
 * much. */
static void lay_out(void) {
  const bool gpu = l.job.hardware.backend == PS_BACKEND_CUDA;
  const uint64_t rotate = gpu ? 256ull << 20 : 64ull << 20;
  l.pattern_bytes = gpu ? 64ull << 20 : 2ull << 20;
  l.first_work = (N_CONTENTS - 1) * l.pattern_bytes;
  for (uint32_t k = 0; k < l.n_calls; k++) {
    call *c = &l.call[k];
    const uint64_t sets = rotate / c->bytes + 2;
    c->n_sets = sets < MAX_SETS ? (uint32_t)sets : MAX_SETS;
    c->repeats = c->n_sets;
    if (c->n_sets * c->bytes > l.work_bytes)
      l.work_bytes = c->n_sets * c->bytes;
  }
}

/* ---- the program ----------------------------------------------------------------------------- */

static ps_status add_fill(ps_program *p, content what, uint64_t at, uint64_t bytes) {
  const uint32_t space = l.job.plan->at->dev[0].place;
  for (uint64_t done = 0; done < bytes; done += l.pattern_bytes) {
    const uint64_t n = bytes - done < l.pattern_bytes ? bytes - done : l.pattern_bytes;
    const ps_access access[2] = {{space, PS_READ, (what - 1) * l.pattern_bytes, n},
                                 {space, PS_WRITE, l.first_work + at + done, n}};
    const ps_op op = {.stream = l.job.plan->at->dev[0].compute, .access = access, .n_access = 2};
    PS_TRY(ps_program_add(p, &op, NULL));
  }
  return PS_OK;
}

static ps_status add_burst(ps_program *p, call *c) {
  const burst_args args = {c};
  for (uint32_t s = 0; s < c->n_sets; s++) {
    uint64_t at = s * c->bytes;
    for (uint32_t i = 0; i < c->op.n_access; i++) {
      if (c->operand[i] != UNSET)
        PS_TRY(add_fill(p, c->operand[i], at, c->op.access[i].bytes));
      at += aligned(c->op.access[i].bytes);
    }
  }
  const ps_access all = {l.job.plan->at->dev[0].place, PS_READ_WRITE, l.first_work,
                         c->n_sets * c->bytes};
  const ps_op op = {.kernel = &burst_kernel,
                    .args = &args,
                    .args_bytes = sizeof args,
                    .stream = l.job.plan->at->dev[0].compute,
                    .access = &all,
                    .n_access = 1};
  return ps_program_add(p, &op, &c->burst);
}

static ps_status make_schedule(ps_schedule **out) {
  const ps__places *at = l.job.plan->at;
  ps_program *p = NULL;
  PS_TRY(ps_program_create(&p, at->n_places, at->n_streams));
  ps_status st = PS_OK;
  for (uint32_t k = 0; k < l.n_calls && st == PS_OK; k++)
    st = add_burst(p, &l.call[k]);
  if (st == PS_OK)
    st = ps_schedule_compile(out, p);
  ps_program_destroy(p);
  return st;
}

/* The plan's engine, with an arena of our own. */
static ps_status open_engine(void) {
  ps_engine_config e;
  const ps_plan *p = l.job.plan;
  ps__plan_engine(p, &e);
  for (uint32_t i = 0; i < e.n_places; i++) {
    e.space[i].bytes = i == p->at->dev[0].place ? l.first_work + l.work_bytes : 0;
    e.place[i].cap_bytes = e.place[i].overhead_bytes = 0;
  }
  return ps_engine_create(&l.engine, &e);
}

/* ---- turns ----------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

/* The seconds of each call's launch: the median of the turns that the trace holds. */
static ps_status read_times(void) {
  uint64_t n = 0;
  PS_TRY(ps_run_trace(l.run, NULL, 0, &n));
  ps_trace_event *event = ps__malloc(n * sizeof *event);
  if (!event)
    return ps__fail(PS_ENOMEM, "out of memory for a trace of %llu events", (unsigned long long)n);
  const ps_status st = ps_run_trace(l.run, event, n, &n);
  for (uint32_t k = 0; st == PS_OK && k < l.n_calls; k++) {
    double s[COUNTED_TURNS];
    uint32_t m = 0;
    for (uint64_t i = 0; i < n; i++)
      if (event[i].op == l.call[k].burst && m < COUNTED_TURNS)
        s[m++] = (double)(event[i].end_ns - event[i].start_ns) * 1e-9 / l.call[k].repeats;
    qsort(s, m, sizeof *s, by_value);
    l.call[k].seconds = m % 2 ? s[m / 2] : 0.5 * (s[m / 2 - 1] + s[m / 2]);
  }
  ps__free(event);
  return st;
}

static ps_status run_turns(uint64_t n) {
  PS_TRY(ps_run_submit(l.run, n));
  l.n_turns += n;
  return ps_run_wait(l.run, l.n_turns);
}

static double sum_of_step(void) {
  double s = 0;
  for (uint32_t k = 0; k < l.n_calls; k++)
    s += (double)l.call[k].count * l.call[k].seconds;
  return s;
}

/* A turn takes @turn_s; a call has its share of the step, in at least BURST_NS. */
static void choose_repeats(double turn_s) {
  const double step_s = sum_of_step();
  for (uint32_t k = 0; k < l.n_calls; k++) {
    call *c = &l.call[k];
    const double share = (double)c->count * turn_s / step_s, least = BURST_NS * 1e-9 / c->seconds,
                 n = share > least ? share : least;
    c->repeats = n < 1 ? 1 : n > MAX_REPEATS ? MAX_REPEATS : (uint32_t)(n + 0.5);
  }
}

/* Half of the time is load that does not count. */
static ps_status measure(double seconds) {
  const double least = l.job.hardware.backend == PS_BACKEND_CUDA ? WARM_UP_S : 0,
               half = 0.5 * seconds > least ? 0.5 * seconds : least;
  PS_TRY(run_turns(2)); /* the second of the two without first touches */
  PS_TRY(read_times());
  choose_repeats(half / COUNTED_TURNS);
  const uint64_t begin = ps__now_ns();
  do
    PS_TRY(run_turns(4));
  while ((double)(ps__now_ns() - begin) * 1e-9 < half);
  PS_TRY(read_times());
  choose_repeats(half / COUNTED_TURNS); /* by the load's clock */
  PS_TRY(run_turns(COUNTED_TURNS));
  return read_times();
}

/* ---- output ---------------------------------------------------------------------------------- */

static void describe(char *text, size_t bytes, const call *c) {
  if (c->op.kernel == &ps__k_gemm) {
    const ps__args_gemm *a = c->op.args;
    snprintf(text, bytes, "%ux%ux%u %c%c%s%s%s", a->m, a->n, a->k, a->trans_a ? 'T' : 'N',
             a->trans_b ? 'T' : 'N', a->accumulate ? " added" : "", a->has_bias ? " bias" : "",
             a->has_residual ? " residual" : "");
  } else if (c->op.kernel == &ps__k_gemm_fp8) {
    const ps__args_gemm_fp8 *a = c->op.args;
    snprintf(text, bytes, "%ux%ux%u%s%s%s%s", a->m, a->n, a->k, a->accumulate ? " added" : "",
             a->has_bias ? " bias" : "", a->has_residual ? " residual" : "",
             a->fast ? " fast accumulation" : "");
  } else if (c->op.kernel->op_class == PS_CLASS_ATTENTION) {
    const ps__args_attention *a = c->op.args;
    snprintf(text, bytes, "%u rows after %u, %u/%u heads of %u", a->n_tokens, a->row0, a->n_heads,
             a->n_kv_heads, a->head_dim);
  } else {
    snprintf(text, bytes, "%" PRIu64 " bytes", c->op.access[0].bytes);
  }
}

static void print_call(cli_json *j, const call *c) {
  static const char *const class_name[PS_N_CLASSES] = {
      "other", "gemm", "attention", "elementwise", "copy", "optimizer", "io"};
  char shape[96];
  describe(shape, sizeof shape, c);
  cli_json_open(j, NULL, '{');
  cli_json_text(j, "kernel", c->op.kernel->name);
  cli_json_text(j, "class", class_name[c->op.kernel->op_class]);
  cli_json_text(j, "what", c->op.tag.what ? c->op.tag.what : "");
  cli_json_text(j, "shape", shape);
  cli_json_count(j, "calls", c->count);
  cli_json_count(j, "recomputed_calls", c->recomputed);
  cli_json_number(j, "seconds", c->seconds);
  cli_json_number(j, "flops", c->op.work.flops);
  cli_json_number(j, "bytes", c->op.work.bytes);
  cli_json_count(j, "sets", c->n_sets);
  cli_json_count(j, "burst", c->repeats);
  cli_json_close(j, '}');
}

static void print(void) {
  const ps_plan *p = l.job.plan;
  const ps_plan_report *r = &l.job.report;
  cli_json j = {.out = stdout};
  cli_json_open(&j, NULL, '{');
  cli_json_open(&j, "plan", '{');
  cli_json_text(&j, "model", l.job.model);
  cli_json_count(&j, "seq_len", p->layout.seq_len);
  cli_json_text(&j, "recipe", ps_recipe_name(p->spec.recipe));
  cli_json_count(&j, "tokens_per_step", r->tokens_per_step);
  cli_json_count(&j, "n_ops", r->n_ops);
  cli_json_count(&j, "device_mem_bytes", r->device_mem_bytes);
  cli_json_count(&j, "host_mem_bytes", r->host_mem_bytes);
  cli_json_number(&j, "model_flops", r->model_flops);
  cli_json_number(&j, "recompute_flops", r->recompute_flops);
  cli_json_number(&j, "predicted_step_s", r->step_s);
  cli_json_number(&j, "predicted_compute_s", r->stream_busy_s[p->at->dev[0].compute]);
  cli_json_close(&j, '}');
  cli_json_number(&j, "gemm_flops_per_s", l.job.hardware.gemm_flops_per_s[p->step.dt]);
  cli_json_number(&j, "gemm_fp8_flops_per_s", p->hw.gemm_fp8_flops_per_s);
  cli_json_number(&j, "memory_bytes_per_s", l.job.hardware.elementwise_bytes_per_s);
  cli_hardware_json(&j, "hardware", &l.job.hardware);
  cli_json_number(&j, "sum_s", sum_of_step());
  cli_json_open(&j, "calls", '[');
  for (uint32_t k = 0; k < l.n_calls; k++)
    print_call(&j, &l.call[k]);
  cli_json_close(&j, ']');
  cli_json_close(&j, '}');
  putchar('\n');
}

/* ---- main ------------------------------------------------------------------------------------ */

static int time_calls(double seconds) {
  ps_schedule *s = NULL;
  const ps_run_config cfg = {.struct_bytes = sizeof cfg, .trace_steps = COUNTED_TURNS};
  ps_status st = make_schedule(&s);
  if (st == PS_OK)
    st = open_engine();
  if (st == PS_OK)
    st = ps__engine_warm(l.engine, s);
  int code = failed(st);
  if (code == CLI_OK)
    code = write_patterns();
  if (code == CLI_OK)
    code = failed(ps_run_create(&l.run, l.engine, s, &cfg));
  if (code == CLI_OK)
    code = failed(measure(seconds));
  ps_run_destroy(l.run);
  ps_engine_close(l.engine);
  ps_schedule_destroy(s);
  return code;
}

int main(int argc, char **argv) {
  double seconds = 30;
  cli_option options[CLI_MAX_OPTIONS];
  cli_job_init(&l.job);
  const uint32_t n = cli_job_options(&l.job, options, false);
  options[n] = (cli_option){.name = "seconds",
                            .heading = CLI_H_MEASURING,
                            .kind = CLI_NUMBER,
                            .out = &seconds,
                            .value = "X",
                            .least = 0.1,
                            .most = 3600,
                            .help = "load and timing together (default 30; 5 at least on a GPU)"};
  options[n + 1] = (cli_option){.name = NULL};
  const cli_command command = {
      .usage = "limit --model DIR --seq-len N [OPTIONS]",
      .about = "Times every distinct kernel call of the step that train would run, alone and\n"
               "under load, and prints one JSON object. bench/limit.py adds them up.\n",
      .example = "limit --model my_8B_model --seq-len 8192 --device-mem 24GiB --host-mem 84GiB",
      .options = options,
      .job = &l.job,
      .hint = cli_job_hint,
  };
  int code = cli_parse(&command, argc, argv);
  if (code == CLI_OK)
    code = cli_job_check(&l.job);
  if (code == CLI_OK)
    code = cli_job_plan(&l.job);
  if (code == CLI_OK)
    code = list_calls();
  if (code == CLI_OK) {
    lay_out();
    code = time_calls(seconds);
  }
  if (code == CLI_OK)
    print();
  ps__free(l.call);
  cli_job_free(&l.job);
  return code < 0 ? CLI_OK : code;
}
