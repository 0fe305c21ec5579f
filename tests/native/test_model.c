/* test_model.c - what descriptions of families give beside the math that tests/test_families.py
 * compares: constants, shared definitions, what a fresh model draws. */
#include "check.h"
#include "kernels/ops.h"
#include "model/attention.h"
#include "model/family.h"
#include "model/mlp.h"
#include "model/model.h"
#include <math.h>
#include <stdio.h>

enum { DIM = 72, LAYERS = 12 };

static uint32_t family_called(const char *name) {
  for (uint32_t i = 0; ps__family_at(i); i++)
    if (!strcmp(ps__family_at(i)->model_type, name))
      return i;
  CHECK(!"a family of this name");
  return 0;
}

static ps_model *create_fp8(const char *family, ps_dtype dt, float embedding_scale,
                            uint8_t odd_flags, const ps__fp8 *fp8) {
  ps_model_config c = {MODEL_DEFAULTS,
                       .family = family_called(family),
                       .vocab_size = 64,
                       .n_layers = LAYERS,
                       .dim = DIM,
                       .n_kv_heads = 2,
                       .n_heads = 2,
                       .head_dim = 16,
                       .ffn_dim = 32,
                       .n_experts = 4,
                       .n_experts_used = 2,
                       .expert_dim = 16,
                       .max_positions = 4096,
                       .window = 8,
                       .embedding_scale = embedding_scale,
                       .local_rope_theta = 1e4,
                       .rope = {.theta = 1e6}};
  ps_model *m;
  if (ps__family_at(c.family)->latent) {
    c.kv_rank = 8;
    c.value_dim = 12;
    c.rope.rotary_dim = 8;
  }
  if (strcmp(family, "gpt_oss") == 0)
    c.glu_limit = 7;
  for (uint32_t l = 1; l < LAYERS; l += 2)
    c.layer_flags[l] = odd_flags;
  CHECK(ps__model_create(&m, &c, dt, 64, 0, NULL, fp8, NULL) == PS_OK);
  return m;
}

static ps_model *create(const char *family, ps_dtype dt, float embedding_scale, uint8_t odd_flags) {
  return create_fp8(family, dt, embedding_scale, odd_flags, NULL);
}

static float embedding_scale(const char *family, ps_dtype dt) {
  ps_model *m = create(family, dt, sqrtf(DIM), 0);
  ps__args_embed args;
  memcpy(&args, ps__layer_of(m, 0)->fwd[0].args, sizeof args);
  ps_model_destroy(m);
  return args.scale;
}

/* sqrt(72) = 8.4853 is 8.5 in bf16, where numbers from 8 to 16 are 1/16 apart. */
static void test_gemma_rounds_the_scale_of_the_embedding(void) {
  CHECK(embedding_scale("gemma2", PS_BF16) == 8.5f);
  CHECK(embedding_scale("gemma3_text", PS_BF16) == 8.5f);
  CHECK(embedding_scale("gemma2", PS_F32) == sqrtf(DIM));
  CHECK(embedding_scale("granite", PS_BF16) == sqrtf(DIM));
  printf("ok Gemma rounds the scale of the embedding\n");
}

/* How many forward products of FP8 operands are among @n ops. They say @fast, and no other does. */
static uint32_t forward_products(const ps__op_def *op, uint32_t n, bool fast) {
  uint32_t found = 0;
  for (uint32_t i = 0; i < n; i++) {
    ps__args_gemm_fp8 args;
    memcpy(&args, op[i].args, sizeof args);
    if (op[i].kernel != &ps__k_gemm_fp8)
      continue;
    CHECK(args.fast == (fast && args.role == PS_GEMM_FORWARD));
    found += args.role == PS_GEMM_FORWARD;
  }
  return found;
}

/* q, k and v together, o, gate and up together, down; and the logits. */
static void test_fast_accumulation_reaches_the_forward_products(void) {
  for (int fast = 0; fast < 2; fast++) {
    const ps__fp8 fp8 = {.on = true, .head = true, .fast = fast};
    ps_model *m = create_fp8("llama", PS_BF16, 0, 0, &fp8);
    const ps__layer_def *block = ps__layer_of(m, 1), *head = ps__layer_of(m, LAYERS + 1);
    CHECK(forward_products(block->fwd, block->n_fwd, fast) == 4);
    CHECK(forward_products(block->bwd, block->n_bwd, fast) == 0);
    CHECK(forward_products(head->fwd, head->n_fwd, fast) == 1);
    ps_model_destroy(m);
  }
  printf("ok fast accumulation reaches the forward products alone\n");
}

/* Embedding, head, and a block for each set of flags. */
static void test_layers_that_are_alike_share_a_definition(void) {
  const struct {
    const char *family;
    uint8_t flags;
    uint32_t n_defs;
  } cases[] = {{"mistral", 0, 3},
               {"gemma2", PS_LAYER_WINDOW, 4},
               {"gemma3_text", PS_LAYER_WINDOW | PS_LAYER_LOCAL_ROPE, 4},
               {"smollm3", PS_LAYER_NO_ROPE, 4}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    ps_model *m = create(cases[i].family, PS_BF16, 0, cases[i].flags);
    CHECK(m->n_defs == cases[i].n_defs);
    CHECK(ps__layer_of(m, 1) == ps__layer_of(m, 3));
    CHECK((ps__layer_of(m, 1) == ps__layer_of(m, 2)) == !cases[i].flags);
    ps_model_destroy(m);
  }
  printf("ok layers that are alike share a definition\n");
}

/* Where norms multiply by 1 + w, w begins at 0. */
static void test_a_fresh_norm_multiplies_by_one(void) {
  for (uint32_t f = 0; ps__family_at(f); f++) {
    const char *name = ps__family_at(f)->model_type;
    const bool offset = (!strncmp(name, "gemma", 5) && strncmp(name, "gemma4", 6) != 0) ||
                        !strncmp(name, "qwen3_5", 7) || !strcmp(name, "qwen3_next");
    ps_model *m = create(name, PS_BF16, 0, 0);
    uint32_t norms = 0;
    for (uint32_t i = 0; i < ps_model_n_params(m); i++) {
      ps_param_info p;
      CHECK(ps_model_param(m, i, &p) == PS_OK);
      norms += p.role == PS_PARAM_NORM;
      CHECK(p.role != PS_PARAM_NORM || (p.init_mean == (offset ? 0.0f : 1.0f) && p.init_std == 0));
    }
    CHECK(norms >= 2 * LAYERS + 1);
    ps_model_destroy(m);
  }
  printf("ok a fresh norm multiplies by one\n");
}

static bool has(const ps_model *m, uint32_t layer, const char *name) {
  char whole[64];
  snprintf(whole, sizeof whole, "model.layers.%u.%s", layer, name);
  return ps_model_find(m, whole) != UINT32_MAX;
}

/* Layers with the flags of a list's first entry have that half, the others the last one; and the
 * adapters of its targets. */
static void test_a_layer_has_the_halves_of_its_flags(void) {
  static const ps__mlp_names fused = {.gate = "fused", .down = "fused_down"};
  static const ps__half_use attention = {.kind = &ps__attention,
                                         .names = &ps__attention_usual,
                                         .norm = "norm1"},
                            mlp[] = {{PS_LAYER_WINDOW | PS_LAYER_NO_ROPE, &ps__mlp, &fused, NULL,
                                      "post"},
                                     {0, &ps__mlp, &ps__mlp_usual, "norm2", NULL}};
  static const ps__decoder decoder = {.half = {&attention, mlp}};
  ps_model *m, *of = create("llama", PS_BF16, 0, 0);
  ps_model_config c = of->cfg;
  c.layer_flags[1] = PS_LAYER_WINDOW;
  c.layer_flags[2] = c.layer_flags[3] = PS_LAYER_WINDOW | PS_LAYER_NO_ROPE;
  CHECK(ps__model_begin(&m, &c, PS_BF16, 64) == PS_OK);
  m->lora = (ps_lora){.rank = 4, .alpha = 8, .targets = PS_LORA_ALL};
  CHECK(ps__describe_decoder(m, &decoder) == PS_OK && ps__model_finish(&m) == PS_OK);
  for (uint32_t l = 0; l < LAYERS; l++) {
    const bool first = l == 2 || l == 3;
    CHECK(has(m, l, "norm1") && has(m, l, ps__attention_usual.o));
    CHECK(has(m, l, "fused") == first && has(m, l, "post") == first);
    CHECK(has(m, l, "mlp.gate_up_proj.lora_A.weight") == first);
    CHECK(has(m, l, "mlp.gate_proj.lora_A.weight") == !first);
    CHECK(has(m, l, "norm2") == !first && has(m, l, ps__mlp_usual.up) == !first);
  }
  CHECK(ps__layer_of(m, 3) == ps__layer_of(m, 4) && m->n_defs == 5);
  ps_model_destroy(m);
  ps_model_destroy(of);
  printf("ok a layer has the halves of its flags\n");
}

/* A chain of as many tensors as a definition may have. */
static void test_sets_of_all_tensors_of_a_definition(void) {
  const ps__args_glu args = {.ffn_dim = 8, .dt = PS_F32};
  ps_model *m, *of = create("llama", PS_BF16, 0, 0);
  ps__layer_def *d;
  CHECK(ps__model_begin(&m, &of->cfg, PS_BF16, 64) == PS_OK);
  CHECK(ps__model_add_def(m, &d) == PS_OK);
  for (uint32_t t = 0; t < PS__SET_BITS; t++)
    CHECK(ps__def_tensor(d, "t", PS__ROWS_TOKEN, 8, PS_F32) == t);
  for (uint32_t t = 0; t + 1 < PS__SET_BITS; t++)
    PS__FWD(d, ps__k_glu_fwd, args, PS__R((uint8_t)t), PS__W((uint8_t)(t + 1)));
  PS__BWD(d, ps__k_glu_bwd, args, PS__R(200), PS__RW(255));
  d->input = 0;
  CHECK(ps__def_finish(d) == PS_OK);
  for (uint32_t t = 0; t < PS__SET_BITS; t++)
    CHECK(ps__in(d->needs, t) == (t == 200 || t == 255) && ps__in(d->made, t));
  const ps__set ops = ps__recompute(d, ps__only(200), PS__UNION(ps__only(60), ps__only(201)));
  for (uint32_t i = 0; i < PS__SET_BITS; i++)
    CHECK(ps__in(ops, i) == (i >= 60 && i < 200));
  ps__def_tensor(d, "t", PS__ROWS_TOKEN, 8, PS_F32);
  CHECK(ps__def_finish(d) == PS_EINTERNAL && strstr(ps_last_error(), "more than 256 tensors"));
  ps_model_destroy(m);
  ps_model_destroy(of);
  printf("ok sets hold all tensors and ops of a definition\n");
}

int main(void) {
  const int64_t before = ps__live_allocations();
  test_gemma_rounds_the_scale_of_the_embedding();
  test_fast_accumulation_reaches_the_forward_products();
  test_layers_that_are_alike_share_a_definition();
  test_a_fresh_norm_multiplies_by_one();
  test_a_layer_has_the_halves_of_its_flags();
  test_sets_of_all_tensors_of_a_definition();
  CHECK(ps__live_allocations() == before);
  return 0;
}
