/* counts.c - counters of a step: what FP8 flushed, which experts tokens went to. */
#include "step/emit.h"

static uint64_t counter_bytes(const ps_model *m) { return 8ull * ps__n_counters(m) * m->n_layers; }

/* On the host the counters have memory of their own. The report reads them after the updates: what
 * had the same memory in the next step, such as its first embedding rows, would wait for it. */
void ps__counts_begin(ps__builder *b) {
  const ps__args_fill fill = {counter_bytes(b->s->model)};
  b->s->counters = PS__NO_VT;
  if (!ps__n_counters(b->s->model))
    return;
  b->s->counters = ps__vt_persistent(b, b->s->at->host, fill.bytes * ps__n_devices(b));
  for (uint32_t d = 0; d < ps__n_devices(b); d++) {
    b->on = &b->dev[d];
    b->on->counters = ps__vt_new(b, b->on->at.place, fill.bytes);
    const ps__vaccess zero = ps__whole(b, b->on->counters, PS_WRITE);
    ps__emit(b, &ps__k_fill_zero, b->on->at.compute, &fill, sizeof fill, &zero, 1,
             (ps_tag){.layer = -1, .round = -1, .chunk = -1, .phase = PS__PHASE_FORWARD});
  }
  b->on = b->dev;
}

void ps__counts_end(ps__builder *b) {
  const uint64_t bytes = counter_bytes(b->s->model);
  for (uint32_t d = 0; b->s->counters != PS__NO_VT && d < ps__n_devices(b); d++) {
    b->on = &b->dev[d];
    if (!b->s->spec->checked)
      ps__emit_copy(b, b->on->at.to_host, ps__whole(b, b->on->counters, PS_READ),
                    ps__part(b->s->counters, PS_WRITE, bytes * d, bytes),
                    (ps_tag){.layer = -1,
                             .round = -1,
                             .chunk = -1,
                             .phase = PS__PHASE_UPDATE,
                             .what = ps__counts_flushed(b->s->model) ? "counts of flushed values"
                                                                     : "counts of routed tokens"});
    ps__vt_free(b, b->on->counters);
  }
  b->on = b->dev;
}
