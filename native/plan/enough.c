/* enough.c - the tokens of a step from which on a GPU runs near full speed. */
#include "optim/optim.h"
#include "plan/plan_impl.h"
#include <math.h>

/* Of the tokens with which a forward pass takes as long as what it hides. Plans of an 8B model say
 * why: with the tokens a step that follow, which are 32,768 on an RTX 4090 and 65,536 on an H200,
 * both have 97% of the speed of twice as many, and half as many have 92 and 95% of theirs. */
#define FACTOR 1.5
enum { LEAST = 8 }; /* sequences */

/* Whether weights, gradients and optimizer state leave a fifth of the device's memory. */
static bool fits(const ps_plan *p, uint64_t state) {
  const double given = (double)p->cfg.device_mem_bytes, has = (double)p->hw.device_memory_bytes,
               room = p->at->n_devices * (given > 0 && (given < has || has == 0) ? given : has);
  const ps__storage w = ps__weight_storage(p->model);
  const uint64_t bytes =
      ps__weights_bytes(p->model) + ps__stored_bytes(w, p->model->n_trained) + state;
  return (double)bytes <= 0.8 * room;
}

/* The tokens whose forward pass hides the updates on the host, and whose step the copies of the
 * weights to the device for both passes. 0: there is nothing to hide. */
static double tokens_needed(const ps_plan *p) {
  const ps_model *m = p->model;
  const ps_hardware *hw = &p->hw;
  const ps_optimizer optimizer = (ps_optimizer)p->cfg.optimizer;
  const uint32_t recipe = ps__plan_row(&p->cfg);
  const double all = (double)m->n_elements, trained = (double)m->n_trained,
               token = 2 * all / hw->gemm_flops_per_s[m->dt] / (m->fp8.on ? 2 : 1),
               update = trained * ps__update_bytes(optimizer, recipe, PS_UPDATE_WHOLE) /
                        hw->optimizer_bytes_per_s,
               copies = 2 * (double)ps__weights_bytes(m) / hw->link[PS_LINK_H2D].duplex_bytes_per_s;
  if (hw->backend == PS_BACKEND_CPU || fits(p, ps__state_bytes(optimizer, recipe, m->n_trained) +
                                                   ps__master_bytes(recipe, m->n_trained)))
    return 0;
  /* the updates hide beside the next forward pass, the copies beside both passes: twice a forward
   * pass at least */
  return FACTOR * fmax(update, copies / 2) / token * p->at->n_devices * p->cfg.n_hosts;
}

ps_status ps_plan_enough_tokens(const ps_model_config *model, const ps_plan_config *cfg,
                                const ps_hardware *hw, uint64_t *out) {
  ps_plan *p;
  if (!out)
    return ps__fail(PS_EINVAL, "ps_plan_enough_tokens: out must be given");
  ps_plan_config c = cfg ? *cfg : (ps_plan_config){0};
  c.tokens_per_step = LEAST * c.seq_len * (c.n_hosts > 1 ? c.n_hosts : 1);
  PS_TRY(ps__plan_new(&p, model, cfg ? &c : NULL, hw));
  const uint64_t each = (uint64_t)p->at->n_devices * p->cfg.n_hosts; /* a sequence at least */
  uint64_t n = LEAST;
  while (n < each)
    n *= 2;
  const double sequences = tokens_needed(p) / (double)p->cfg.seq_len;
  while (n * M_SQRT2 < sequences && 2 * n * p->cfg.seq_len <= PS_MAX_STEP_TOKENS)
    n *= 2;
  *out = n * p->cfg.seq_len;
  return ps_plan_destroy(p);
}
