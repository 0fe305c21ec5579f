/* fuzz_plan.c - the planner: the input's bytes are a small model, a configuration and caps. What
 * is planned keeps them. */
#include "fuzz.h"
#include <penstock/plan.h>

typedef struct bytes {
  const uint8_t *at, *end;
} bytes;
static uint64_t word(bytes *b, int n) {
  uint64_t x = 0;
  for (; n && b->at < b->end; n--)
    x = x << 8 | *b->at++;
  return x;
}

static void describe(ps_hardware *hw, bytes *b) {
  *hw = (ps_hardware){.struct_bytes = sizeof *hw,
                      .backend = PS_BACKEND_CPU,
                      .n_threads = 2,
                      .n_cpus = 2,
                      .name = "fuzz",
                      .op_ns = 1000,
                      .host_memory_bytes = 64ull << 30,
                      .device_memory_bytes = 0};
  double slow = 1.0 + (double)word(b, 1), link = 1.0 + (double)word(b, 2);
  for (int d = 0; d < PS_N_DTYPES; d++)
    hw->gemm_flops_per_s[d] = hw->attention_flops_per_s[d] = hw->attention_bwd_flops_per_s[d] =
        1e12 / slow;
  hw->link[PS_LINK_H2D] = (ps_link_rate){PS_PLACE_HOST, PS_PLACE_DEVICE, 1e10 / link, 1e10 / link};
  hw->link[PS_LINK_D2H] = (ps_link_rate){PS_PLACE_DEVICE, PS_PLACE_HOST, 1e10 / link, 1e10 / link};
  hw->elementwise_bytes_per_s = hw->memory_bytes_per_s = hw->optimizer_bytes_per_s =
      hw->accumulate_bytes_per_s = 2e10;
  hw->accumulate_sumsq_bytes_per_s = hw->sumsq_bytes_per_s = hw->gather_bytes_per_s = 2e10;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  bytes b = {data, data + n};
  ps_model_config m = {.struct_bytes = sizeof m,
                       .family = (uint32_t)word(&b, 1) % 3,
                       .bos_token_id = -1,
                       .eos_token_id = -1,
                       .pad_token_id = -1,
                       .norm_eps = 1e-5f,
                       .rope = {.theta = 10000}};
  m.n_kv_heads = 1 + (uint32_t)word(&b, 1) % 4;
  m.n_heads = m.n_kv_heads * (1 + (uint32_t)word(&b, 1) % 4);
  m.head_dim = 2 * (1 + (uint32_t)word(&b, 1) % 64);
  m.dim = 8 * (1 + (uint32_t)word(&b, 1));
  m.ffn_dim = 1 + (uint32_t)word(&b, 2) % 8192;
  m.n_layers = 1 + (uint32_t)word(&b, 1) % 3;
  m.vocab_size = 2 + (uint32_t)word(&b, 2);
  m.tied_embeddings = (uint32_t)word(&b, 1) & 1;
  m.qkv_bias = m.family == 1;
  m.qk_norm = m.family == 2;
  ps_plan_config c = {.struct_bytes = sizeof c,
                      .document_token = -1,
                      .document_end_token = -1,
                      .recipe = (uint32_t)word(&b, 1) % PS_N_RECIPES,
                      .reserve_bytes = 1 << 20};
  c.seq_len = 1 + word(&b, 2) % 256;
  c.tokens_per_step = c.seq_len * (1 + word(&b, 1) % 4);
  const uint8_t pins = (uint8_t)word(&b, 1);
  if (pins & 1)
    c.chunk_tokens = 1 + word(&b, 2);
  if (pins & 2)
    c.chunks_per_round = 1 + word(&b, 1);
  if (pins & 4)
    c.head_slice_tokens = 1 + word(&b, 2);
  if (pins & 8)
    c.first_round_chunks = 1 + word(&b, 1);
  if (pins & 128)
    c.first_rounds = 1 + word(&b, 1);
  c.clip_norm = pins >> 4 & 1, c.keep_grads = pins >> 5 & 1, c.one_document = pins >> 6 & 1;
  c.device_mem_bytes = word(&b, 4);
  c.host_mem_bytes = word(&b, 5);
  ps_hardware hw;
  describe(&hw, &b);
  ps_plan *plan = NULL;
  ps_status st = ps_plan_create(&plan, &m, &c, &hw);
  fuzz_check(st);
  ps_plan_report r = {.struct_bytes = sizeof r};
  if (st == PS_OK) {
    if (ps_plan_get_report(plan, &r) != PS_OK || !(r.step_s > 0))
      abort();
    if ((c.device_mem_bytes && r.device_used_bytes > c.device_mem_bytes) ||
        (c.host_mem_bytes && r.host_used_bytes > c.host_mem_bytes))
      abort();
  }
  ps_plan_destroy(plan);
  return 0;
}
