/* decoder.c - the decoder as layer definitions: the embedding, the blocks, the head. */
#include "model/decoder.h"
#include "core/core.h"
#include "model/block.h"
#include <stdio.h>

static ps_status describe_embedding(ps_model *m, const ps__decoder *decoder) {
  const ps_model_config *c = &m->cfg;
  float scale = c->embedding_scale, stored;
  if (decoder->rounds_embedding_scale) { /* to the dtype of activations */
    ps__convert(&stored, m->dt, &scale, PS_F32, 1);
    ps__convert(&scale, PS_F32, &stored, m->dt, 1);
  }
  const ps__args_embed args = {
      .vocab = c->vocab_size, .dim = c->dim, .dt = m->dt, .scale = scale, .pad = c->pad_token_id};
  ps__layer_def *d;
  PS_TRY(ps__model_add_def(m, &d));
  ps__def_unit(d, ps__base_is_frozen(m));
  const uint8_t y = ps__def_tensor(d, "y", PS__ROWS_TOKEN, c->dim, m->dt),
                dy = ps__def_tensor(d, "dy", PS__ROWS_TOKEN, c->dim, m->dt);
  const uint16_t table =
      ps__def_param(d, "embed_tokens.weight", PS_PARAM_MATRIX, c->vocab_size, c->dim);
  d->output = y;
  d->grad = dy;
  PS__FWD(d, ps__k_embed_fwd, args, PS__B(PS__BATCH_TOKENS), PS__P(table), PS__W(y));
  PS__BWD(d, ps__k_embed_bwd, args, PS__B(PS__BATCH_TOKENS), PS__R(dy), PS__G(table));
  return ps__model_add_layer(m, d, "model.");
}

/* A target is there where a block has it. In a model with experts those of the first halves are,
 * and they are named. */
static ps_status resolve_targets(ps_model *m, const ps__decoder *decoder) {
  const uint32_t mlp =
      PS_LORA_GATE_PROJ | PS_LORA_UP_PROJ | PS_LORA_DOWN_PROJ | PS_LORA_GATE_UP_PROJ;
  bool seen[PS_LAYER_FLAGS + 1] = {false}; /* what more a block is changes no target */
  uint32_t there = 0;
  char names[PS_LORA_NAMES_BYTES];
  for (uint32_t l = 0; l < m->cfg.n_layers; l++) {
    const uint32_t flags = m->cfg.layer_flags[l];
    if (!seen[flags])
      PS_TRY(ps__block_targets(m, decoder, flags, &there));
    seen[flags] = true;
  }
  if (ps__n_sparse(&m->cfg) && m->lora.targets & mlp) {
    (void)ps_lora_targets_text(names, sizeof names, there & ~mlp);
    return ps__fail(PS_EINVAL, "LoRA of experts and their router is not supported: give %s %s",
                    ps__field("lora.targets"), names);
  }
  return ps__lora_resolve(m, there);
}

/* The definition of an earlier block that is like block @l; NULL: none is. */
static ps__layer_def *alike(const ps_model *m, uint32_t l, bool fp8) {
  const uint32_t flags = ps__block_flags(&m->cfg, l);
  for (uint32_t i = l; i-- > 0;)
    if (ps__block_flags(&m->cfg, i) == flags && (i + 1 < m->n_frozen) == ps__is_frozen(m) &&
        ps__fp8_block(&m->fp8, i, m->cfg.n_layers) == fp8)
      return m->def[m->layer[i + 1].def_idx];
  return NULL;
}

ps_status ps__describe_decoder(ps_model *m, const ps__decoder *decoder) {
  if (m->lora.rank)
    PS_TRY(resolve_targets(m, decoder));
  PS_TRY(describe_embedding(m, decoder));
  for (uint32_t l = 0; l < m->cfg.n_layers; l++) {
    const bool fp8 = ps__fp8_block(&m->fp8, l, m->cfg.n_layers);
    ps__layer_def *def = alike(m, l, fp8);
    char prefix[32];
    snprintf(prefix, sizeof prefix, "model.layers.%u.", l);
    if (!def)
      PS_TRY(ps__describe_block(m, decoder, ps__block_flags(&m->cfg, l), fp8, &def));
    PS_TRY(ps__model_add_layer(m, def, prefix));
  }
  return ps__describe_head(m, decoder);
}
