/* disk.c - optimizer state on the disk: it comes to the host before the unit's update, and goes
 * back after it. What is under way is in host memory that lives as long as that takes. */
#include "step/emit.h"

static uint32_t n_states(const ps__builder *b) {
  return ps__optimizers[b->s->spec->optimizer].n_states;
}

static ps_tag tag_of(const ps__builder *b, uint32_t unit) {
  return ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "optimizer state");
}

/* Nothing where it was read before. */
static void read_state(ps__builder *b, uint32_t unit) {
  const ps__step *s = b->s;
  uint32_t *here = b->unit[unit].updated.state;
  if (here[0] != PS__NO_VT)
    return;
  for (uint32_t k = 0; k < n_states(b); k++) {
    const ps__vaccess from = ps__whole(b, s->unit_host[unit].state[k], PS_READ);
    here[k] = ps__vt_new(b, s->at->host, from.bytes);
    if (here[k] == PS__NO_VT)
      return;
    /* high: what is low is what the next forward pass needs first */
    s->vt[here[k]].high = s->vt[here[k]].sectors = true;
    ps__emit_copy(b, s->at->disk_read, from, ps__whole(b, here[k], PS_WRITE), tag_of(b, unit));
  }
}

/* Where updates wait for the norm, units are updated in forward order. Else layers are in backward
 * order, and the units of each in forward order. PS__NO_UNIT: it is the last one. */
static uint32_t updated_after(const ps__builder *b, uint32_t unit) {
  const ps_model *m = b->s->model;
  const ps__layer *l = &m->layer[m->unit[unit].layer];
  if (b->s->spec->clip || unit + 1 < l->first_unit + l->n_units)
    return unit + 1 < m->n_units ? unit + 1 : PS__NO_UNIT;
  return m->unit[unit].layer ? m->layer[m->unit[unit].layer - 1].first_unit : PS__NO_UNIT;
}

void ps__disk_read_ahead(ps__builder *b, uint32_t unit) {
  const ps__spec *spec = b->s->spec;
  if (!spec->disk || spec->checked)
    return;
  uint32_t n = spec->disk_lead + spec->state_on_disk[unit];
  for (uint32_t u = unit; u != PS__NO_UNIT && n > 0; u = updated_after(b, u))
    if (spec->state_on_disk[u]) {
      read_state(b, u);
      n--;
    }
}

void ps__disk_take(ps__builder *b, uint32_t unit, uint32_t state[PS_MAX_STATES]) {
  for (uint32_t k = 0; k < n_states(b); k++)
    state[k] = b->unit[unit].updated.state[k];
}

/* The step's report waits for the last copy by writing what it reads: the stream is in order. */
void ps__disk_store(ps__builder *b, uint32_t unit) {
  const ps__step *s = b->s;
  const uint32_t *here = b->unit[unit].updated.state;
  b->n_stored++;
  for (uint32_t k = 0; k < n_states(b) && !s->out_of_memory; k++) {
    ps__emit_copy(b, s->at->disk_write, ps__whole(b, here[k], PS_READ),
                  ps__whole(b, s->unit_host[unit].state[k], PS_WRITE), tag_of(b, unit));
    if (b->n_stored == b->n_on_disk && k + 1 == n_states(b))
      b->last_stored = here[k]; /* until the report */
    else
      ps__vt_free(b, here[k]);
  }
}
