/* golden.c - plans one case and prints what the golden files of tests/golden hold: plan.json on
 * the first line, then one line an op.
 *
 *   golden CONFIG HARDWARE FIELD=VALUE...    FIELD: the recipe, or a size, count or flag of
 *   ps_plan_config
 *
 * A line has tab-separated columns: kernel, stream and place in the model; arguments; ranges;
 * work; waits. Everything goes by name and number, never by a struct's bytes, so that the text
 * outlives a change of the structs. A kernel that args[] does not list is an error: it would go
 * unwatched. */
#include "plan/plan_impl.h"
#include "check.h"
#include <inttypes.h>
#include <stddef.h>

/* ---- arguments ------------------------------------------------------------------------------- */

typedef enum kind { U32, U8, U64, F32, PAIRS, DTYPE, DTYPE8 } kind;
typedef struct arg {
  const char *name;
  size_t offset;
  kind kind;
} arg;
#define ARG(type, kind, member) {#member, offsetof(ps__args_##type, member), kind}
enum { MOST_ARGS = 18 };
static const struct args {
  const char *kernels;
  arg arg[MOST_ARGS];
} args[] = {
    {" fill_zero copy_bytes ", {ARG(fill, U64, bytes)}},
    {" accumulate accumulate_host accumulate_sumsq_host round_sumsq_host ",
     {ARG(accumulate, U64, n), ARG(accumulate, U64, first), ARG(accumulate, DTYPE, dt),
      ARG(accumulate, U32, n_threads), ARG(accumulate, U32, mode), ARG(accumulate, U32, index)}},
    {" embed_fwd embed_bwd ",
     {ARG(embed, U32, n_tokens), ARG(embed, U32, vocab), ARG(embed, U32, dim),
      ARG(embed, DTYPE, dt), ARG(embed, U32, accumulate), ARG(embed, F32, scale)}},
    {" embed_bwd_host ",
     {ARG(embed_host, U32, rows.n_tokens), ARG(embed_host, U32, rows.vocab),
      ARG(embed_host, U32, rows.dim), ARG(embed_host, DTYPE, rows.dt),
      ARG(embed_host, U32, rows.accumulate), ARG(embed_host, F32, rows.scale),
      ARG(embed_host, U32, chunk_tokens), ARG(embed_host, U32, short_tokens),
      ARG(embed_host, U32, group_tokens), ARG(embed_host, U32, skip_tokens),
      ARG(embed_host, U32, mode), ARG(embed_host, U32, index)}},
    {" rmsnorm_fwd rmsnorm_bwd ",
     {ARG(rmsnorm, U32, rows), ARG(rmsnorm, U32, cols), ARG(rmsnorm, DTYPE, dt),
      ARG(rmsnorm, U32, accumulate_dw), ARG(rmsnorm, U32, add_dx), ARG(rmsnorm, F32, eps),
      ARG(rmsnorm, F32, weight_offset), ARG(rmsnorm, U32, has_residual)}},
    {" gemm ",
     {ARG(gemm, U32, m), ARG(gemm, U32, n), ARG(gemm, U32, k), ARG(gemm, U32, lda),
      ARG(gemm, U32, ldb), ARG(gemm, U32, ldc), ARG(gemm, U8, trans_a), ARG(gemm, U8, trans_b),
      ARG(gemm, U8, accumulate), ARG(gemm, U8, has_bias), ARG(gemm, U8, has_residual),
      ARG(gemm, DTYPE8, dt_a), ARG(gemm, DTYPE8, dt_b), ARG(gemm, DTYPE8, dt_c),
      ARG(gemm, F32, alpha)}},
    {" gemm_fp8 ",
     {ARG(gemm_fp8, U32, m), ARG(gemm_fp8, U32, n), ARG(gemm_fp8, U32, k), ARG(gemm_fp8, U8, role),
      ARG(gemm_fp8, U8, accumulate), ARG(gemm_fp8, U8, has_bias), ARG(gemm_fp8, U8, has_residual),
      ARG(gemm_fp8, U8, dt_a), ARG(gemm_fp8, U8, dt_b), ARG(gemm_fp8, DTYPE8, dt_c),
      ARG(gemm_fp8, F32, alpha)}},
    {" fp8_scale ",
     {ARG(fp8_scale, U32, rows), ARG(fp8_scale, U32, cols), ARG(fp8_scale, DTYPE, dt),
      ARG(fp8_scale, U32, dt_q), ARG(fp8_scale, F32, headroom)}},
    {" quantize ",
     {ARG(quantize, U32, rows), ARG(quantize, U32, cols), ARG(quantize, DTYPE, dt),
      ARG(quantize, U32, dt_q), ARG(quantize, U32, forms), ARG(quantize, U32, given),
      ARG(quantize, U32, count)}},
    {" rmsnorm_quantize ",
     {ARG(rmsnorm_quantize, U32, norm.rows), ARG(rmsnorm_quantize, U32, norm.cols),
      ARG(rmsnorm_quantize, DTYPE, norm.dt), ARG(rmsnorm_quantize, F32, norm.eps),
      ARG(rmsnorm_quantize, F32, norm.weight_offset), ARG(rmsnorm_quantize, U32, dt_q),
      ARG(rmsnorm_quantize, U32, forms), ARG(rmsnorm_quantize, U32, count)}},
    {" glu_quantize glu_bwd_quantize ",
     {ARG(glu_quantize, U32, n_tokens), ARG(glu_quantize, U32, ffn_dim),
      ARG(glu_quantize, DTYPE, dt), ARG(glu_quantize, U32, activation),
      ARG(glu_quantize, U32, dt_q), ARG(glu_quantize, U32, forms), ARG(glu_quantize, U32, count)}},
    {" qkv_split_fwd qkv_split_bwd ",
     {ARG(qkv, U32, n_tokens), ARG(qkv, U32, n_heads), ARG(qkv, U32, n_kv_heads),
      ARG(qkv, U32, head_dim), ARG(qkv, DTYPE, dt), ARG(qkv, U32, qk_norm),
      ARG(qkv, U32, accumulate_dw), ARG(qkv, U32, rotary_dim), ARG(qkv, F32, eps),
      ARG(qkv, F32, attention_factor), ARG(qkv, F32, norm_offset), ARG(qkv, PAIRS, inv_freq)}},
    {" attention_fwd attention_bwd ",
     {ARG(attention, U32, n_tokens), ARG(attention, U32, row0), ARG(attention, U32, n_heads),
      ARG(attention, U32, n_kv_heads), ARG(attention, U32, head_dim), ARG(attention, DTYPE, dt),
      ARG(attention, U32, accumulate_dkv), ARG(attention, U32, document_rows),
      ARG(attention, U32, sequence_rows), ARG(attention, U32, window), ARG(attention, F32, scale),
      ARG(attention, F32, softcap)}},
    {" layer_scale_fwd layer_scale_bwd ",
     {ARG(layer_scale, U32, rows), ARG(layer_scale, U32, cols), ARG(layer_scale, DTYPE, dt),
      ARG(layer_scale, U32, accumulate_ds)}},
    {" glu_fwd glu_bwd ",
     {ARG(glu, U32, n_tokens), ARG(glu, U32, ffn_dim), ARG(glu, DTYPE, dt),
      ARG(glu, U32, activation)}},
    {" colsum ",
     {ARG(colsum, U32, rows), ARG(colsum, U32, cols), ARG(colsum, U32, ld), ARG(colsum, DTYPE, dt),
      ARG(colsum, U32, accumulate)}},
    {" cross_entropy ",
     {ARG(cross_entropy, U32, rows), ARG(cross_entropy, U32, vocab), ARG(cross_entropy, DTYPE, dt),
      ARG(cross_entropy, F32, softcap)}},
    {" sumsq sumsq_host ", {ARG(sumsq, U64, n), ARG(sumsq, DTYPE, dt), ARG(sumsq, U32, n_threads)}},
    {" load_batch loss grad_norm adamw adamw_moments lion lion_state sgd embed_gather report ",
     {ARG(hook, U32, unit)}},
};

static uint64_t whole(const void *at, size_t bytes) {
  uint64_t value = 0;
  memcpy(&value, at, bytes); /* little-endian, as everything here */
  return value;
}

static const char *dtype_name(uint64_t dtype) {
  CHECK(dtype < PS_N_DTYPES);
  return ps__dtypes[dtype].name;
}

static void print_arg(const arg *a, const char *block) {
  const void *at = block + a->offset;
  float f, pairs[PS_ROPE_PAIRS];
  printf("%s=", a->name);
  switch (a->kind) {
  case U8: printf("%" PRIu64, whole(at, 1)); break;
  case U32: printf("%" PRIu64, whole(at, 4)); break;
  case U64: printf("%" PRIu64, whole(at, 8)); break;
  case F32:
    memcpy(&f, at, sizeof f);
    printf("%.9g", (double)f);
    break;
  case PAIRS:
    memcpy(pairs, at, sizeof pairs);
    for (int i = 0; i < PS_ROPE_PAIRS && pairs[i] != 0.0f; i++)
      printf("%s%.9g", i ? "," : "", (double)pairs[i]);
    break;
  case DTYPE: printf("%s", dtype_name(whole(at, 4))); break;
  case DTYPE8: printf("%s", dtype_name(whole(at, 1))); break;
  }
  putchar(' ');
}

static void print_args(const ps_op_view *op) {
  if (!op->kernel)
    return;
  char name[64];
  snprintf(name, sizeof name, " %s ", op->kernel->name);
  for (size_t i = 0; i < sizeof args / sizeof *args; i++)
    if (strstr(args[i].kernels, name)) {
      for (const arg *a = args[i].arg; a < args[i].arg + MOST_ARGS && a->name; a++)
        print_arg(a, op->args);
      return;
    }
  fprintf(stderr, "golden: kernel %s has no entry in args[] of tests/native/golden.c\n",
          op->kernel->name);
  exit(1);
}

/* ---- ops ------------------------------------------------------------------------------------- */

static void print_op(const ps_plan *plan, const ps_op_view *op) {
  static const char *const phase[] = {[PS__PHASE_FORWARD] = "forward",
                                      [PS__PHASE_HEAD] = "head",
                                      [PS__PHASE_BACKWARD] = "backward",
                                      [PS__PHASE_UPDATE] = "update",
                                      [PS__PHASE_RECOMPUTE] = "recompute"};
  static const char *const mode[] = {[PS_READ] = "R", [PS_WRITE] = "W", [PS_READ_WRITE] = "RW"};
  const ps_tag *tag = &op->tag;
  CHECK((size_t)tag->phase < sizeof phase / sizeof *phase);
  printf("%s\t%s\tlayer=%d round=%d chunk=%d phase=%s\t", op->kernel ? op->kernel->name : "copy",
         ps_plan_stream_name(plan, op->stream), tag->layer, tag->round, tag->chunk,
         phase[tag->phase]);
  print_args(op);
  putchar('\t');
  for (uint32_t i = 0; i < op->n_access; i++) {
    const bool host = op->access[i].space == plan->at->host;
    printf("%s:%s", mode[op->access[i].mode], host ? "host" : "device");
    if (!host && plan->at->n_devices > 1)
      printf(" %u", op->access[i].space);
    printf(":%" PRIu64 "+%" PRIu64 " ", op->access[i].offset, op->access[i].bytes);
  }
  printf("\tflops=%.17g bytes=%.17g model_flops=%.17g\t", op->work.flops, op->work.bytes,
         op->work.model_flops);
  for (uint32_t i = 0; i < op->n_wait; i++)
    printf("%s:%" PRIu64 "-%u ", ps_plan_stream_name(plan, op->wait[i].stream), op->wait[i].value,
           op->wait[i].steps_back);
  putchar('\n');
}

static void print_schedule(const ps_plan *plan, const ps_schedule *schedule) {
  for (uint64_t i = 0; i < ps_schedule_n_ops(schedule); i++) {
    ps_op_view op;
    CHECK(ps_schedule_op(schedule, i, &op) == PS_OK);
    print_op(plan, &op);
  }
}

static void print_prologue(const ps_plan *plan) {
  ps_program *program = NULL;
  ps_schedule *schedule = NULL;
  CHECK(ps__step_prologue(&plan->step, true, &program) == PS_OK);
  if (!program)
    return;
  CHECK(ps_schedule_compile(&schedule, program) == PS_OK);
  ps_program_destroy(program);
  print_schedule(plan, schedule);
  CHECK(ps_schedule_destroy(schedule) == PS_OK);
}

/* ---- the case -------------------------------------------------------------------------------- */

static void set_field(ps_plan_config *c, char *word) {
  const struct {
    const char *name;
    uint64_t *large;
    uint32_t *small;
  } field[] = {{"device_mem_bytes", &c->device_mem_bytes, NULL},
               {"host_mem_bytes", &c->host_mem_bytes, NULL},
               {"seq_len", &c->seq_len, NULL},
               {"tokens_per_step", &c->tokens_per_step, NULL},
               {"chunk_tokens", &c->chunk_tokens, NULL},
               {"chunks_per_round", &c->chunks_per_round, NULL},
               {"first_round_chunks", &c->first_round_chunks, NULL},
               {"first_rounds", &c->first_rounds, NULL},
               {"head_slice_tokens", &c->head_slice_tokens, NULL},
               {"reserve_bytes", &c->reserve_bytes, NULL},
               {"n_threads", NULL, &c->n_threads},
               {"trace_steps", NULL, &c->trace_steps},
               {"deterministic", NULL, &c->deterministic},
               {"one_document", NULL, &c->one_document},
               {"keep_grads", NULL, &c->keep_grads},
               {"n_frozen_layers", NULL, &c->n_frozen_layers},
               {"fp8_bf16_first", NULL, &c->fp8_bf16_first},
               {"fp8_bf16_last", NULL, &c->fp8_bf16_last},
               {"n_devices", NULL, &c->n_devices},
               {"layout", NULL, &c->layout}};
  char *value = strchr(word, '=');
  CHECK(value);
  *value++ = 0;
  if (strcmp(word, "clip_norm") == 0) {
    c->clip_norm = strtod(value, NULL);
    return;
  }
  if (strcmp(word, "recipe") == 0) {
    ps_recipe recipe;
    CHECK(ps_recipe_parse(&recipe, value) == PS_OK);
    c->recipe = recipe;
    return;
  }
  for (size_t i = 0; i < sizeof field / sizeof *field; i++)
    if (strcmp(word, field[i].name) == 0) {
      const uint64_t number = strtoull(value, NULL, 10);
      if (field[i].large)
        *field[i].large = number;
      else
        *field[i].small = (uint32_t)number;
      return;
    }
  fprintf(stderr, "golden: %s is no field of a case\n", word);
  exit(1);
}

int main(int argc, char **argv) {
  ps_model_config model = {.struct_bytes = sizeof model};
  ps_hardware hw = {.struct_bytes = sizeof hw};
  ps_plan_config cfg = {PLAN_DEFAULTS};
  ps_plan *plan = NULL;
  if (argc < 3)
    return 2;
  if (ps_model_config_read(&model, argv[1]) != PS_OK || ps_hardware_describe(&hw, argv[2]) != PS_OK)
    goto failed;
  for (int i = 3; i < argc; i++)
    set_field(&cfg, argv[i]);
  if (ps_plan_create(&plan, &model, &cfg, &hw) != PS_OK)
    goto failed;
  const char *json = ps_plan_json(plan);
  if (!json)
    goto failed;
  puts(json);
  print_prologue(plan);
  print_schedule(plan, ps_plan_schedule(plan));
  CHECK(ps_plan_destroy(plan) == PS_OK);
  return 0;
failed:
  fprintf(stderr, "golden: %s\n", ps_last_error());
  return 1;
}
