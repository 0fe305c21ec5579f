/* routing.c - how a step's tokens were spread over experts. */
#include "train/routing.h"
#include <math.h>
#include <string.h>

enum { UNUSED_WARNS = 100 /* steps without a token */ };

ps_status ps__routing_create(ps_trainer *t) {
  const ps_model *m = t->plan->model;
  if (!ps__counts_routed(m))
    return PS_OK;
  t->unused = ps__calloc((size_t)m->n_layers * m->cfg.n_experts, sizeof *t->unused);
  return t->unused ? PS_OK : ps__fail(PS_ENOMEM, "out of memory for the counts of experts");
}

/* Tokens of expert @e of a layer, on all devices. */
static double tokens_of(const ps_trainer *t, const uint64_t *counter, uint32_t layer, uint32_t e) {
  const ps_model *m = t->plan->model;
  double n = 0;
  for (uint32_t d = 0; d < t->plan->at->n_devices; d++)
    n += (double)
        counter[((size_t)d * m->n_layers + layer) * ps__n_counters(m) + ps__routed_at(m) + e];
  return n;
}

static void report_layer(ps_trainer *t, const uint64_t *counter, uint32_t layer, ps__routing *r) {
  const uint32_t n = t->plan->model->cfg.n_experts;
  double all = 0, most = 0, entropy = 0;
  for (uint32_t e = 0; e < n; e++)
    all += tokens_of(t, counter, layer, e);
  for (uint32_t e = 0; e < n; e++) {
    const double part = tokens_of(t, counter, layer, e) / all;
    uint64_t *unused = &t->unused[(size_t)layer * n + e];
    *unused = part > 0 ? 0 : *unused + 1;
    r->n_unused += *unused > 0;
    entropy -= part > 0 ? part * log(part) : 0;
    most = part > most ? part : most;
    if (*unused > r->unused_steps)
      r->unused_steps = *unused, r->unused_layer = layer, r->unused_expert = e;
    if (part > r->most)
      r->most = part, r->most_layer = layer, r->most_expert = e;
  }
  r->load = most * n > r->load ? most * n : r->load;
  r->entropy += n > 1 ? entropy / log(n) : 1;
}

void ps__routing_report(ps_trainer *t, const uint64_t *counter, ps__step_record *out) {
  const ps_model *m = t->plan->model;
  ps__routing *r = &out->routing;
  uint32_t n_layers = 0;
  memset(r, 0, sizeof *r);
  for (uint32_t l = ps__first_trained(m); l < m->n_layers; l++)
    if (ps__layer_of(m, l)->counts_routed) {
      report_layer(t, counter, l, r);
      n_layers++;
    }
  r->entropy = n_layers ? r->entropy / n_layers : 0;
}

void ps__routing_say(ps_trainer *t, const ps__step_record *record) {
  const ps__routing *r = &record->routing;
  const unsigned long long step = t->cfg.first_step + t->n_reported + 1;
  if (!t->unused)
    return;
  if (r->unused_steps >= UNUSED_WARNS && r->unused_steps >= 2 * t->unused_said) {
    t->unused_said = r->unused_steps;
    ps__log(PS_LOG_WARN, "step %llu: expert %u of block %u got no token in %llu steps: raise %s",
            step, r->unused_expert, r->unused_layer - 1, (unsigned long long)r->unused_steps,
            ps__field("router_aux_loss"));
  }
  if (t->plan->model->cfg.n_experts > 2 && r->most > 0.5 && !t->most_said) {
    t->most_said = true;
    ps__log(PS_LOG_WARN, "step %llu: expert %u of block %u gets %.0f%% of all rows: raise %s", step,
            r->most_expert, r->most_layer - 1, 100 * r->most, ps__field("router_aux_loss"));
  }
}
