/* over.c - a step in the memory of another one, while none of that step runs. */
#include "step/step.h"
#include <string.h>

uint64_t ps__step_persistent_bytes(const ps__step *t, uint32_t space) {
  uint64_t end = 0;
  for (size_t i = 0; i < t->n_vt; i++)
    if (t->vt[i].persistent && !t->vt[i].alias_of && t->vt[i].space == space &&
        t->vt[i].offset + t->vt[i].bytes > end)
      end = t->vt[i].offset + t->vt[i].bytes;
  return end;
}

/* Tensor @vt of @s lies where tensor @there of @t does. @block: the index of the persistent tensors
 * of @t in the tensors of @s, for space 0. */
static bool lie_over(ps__step *s, uint32_t vt, const ps__step *t, uint32_t there, uint32_t block) {
  ps__vt *v = &s->vt[vt];
  if (there == PS__NO_VT || v->bytes > t->vt[there].bytes || v->space != t->vt[there].space ||
      (t->vt[there].pageable && !v->pageable))
    return false;
  v->pageable = false; /* the owner's matter */
  v->alias_of = block + v->space + 1;
  v->offset = t->vt[there].offset;
  return true;
}

static bool lie_over_unit(ps__step *s, uint32_t unit, const ps__step *t, uint32_t block) {
  enum { ALONE = 4 + PS_MAX_STATES, MOST = ALONE + PS_MAX_DEVICES };
  const ps__unit_host *of[2] = {&s->unit_host[unit], &t->unit_host[unit]};
  const uint32_t n = ALONE + s->at->n_devices;
  uint32_t vt[2][MOST];
  for (int i = 0; i < 2; i++) {
    const uint32_t one[4] = {of[i]->weights, of[i]->master, of[i]->grad, of[i]->device_master};
    memcpy(vt[i], one, sizeof one);
    memcpy(vt[i] + 4, of[i]->state, sizeof of[i]->state);
    memcpy(vt[i] + ALONE, of[i]->device_weights, sizeof of[i]->device_weights);
  }
  bool fits = of[0]->n == of[1]->n;
  for (uint32_t i = 0; fits && i < n; i++)
    fits = vt[0][i] == PS__NO_VT || lie_over(s, vt[0][i], t, vt[1][i], block);
  return fits;
}

ps_status ps__step_map_over(ps__step *s, const ps__step *t) {
  const uint32_t n = s->at->n_places, block = (uint32_t)s->n_vt;
  bool fits = s->spec->n_units == t->spec->n_units && s->at == t->at;
  for (uint32_t space = 0; space < n; space++) {
    if (!PS_GROW(s->vt, s->n_vt, s->cap_vt))
      return ps__fail(PS_ENOMEM, "out of memory for the step's tables");
    s->vt[s->n_vt++] = (ps__vt){.bytes = ps__step_persistent_bytes(t, space),
                                .last = UINT32_MAX,
                                .space = (uint8_t)space,
                                .persistent = true};
  }
  for (uint32_t u = 0; fits && u < s->spec->n_units; u++)
    fits = lie_over_unit(s, u, t, block);
  fits = fits && lie_over(s, s->batch, t, t->batch, block) &&
         lie_over(s, s->row_loss, t, t->row_loss, block) &&
         lie_over(s, s->norms, t, t->norms, block) && lie_over(s, s->stats, t, t->stats, block) &&
         (s->counters == PS__NO_VT || lie_over(s, s->counters, t, t->counters, block));
  for (uint32_t i = 0; fits && i < block; i++)
    fits = !s->vt[i].persistent || s->vt[i].alias_of;
  return fits ? ps__step_map(s)
              : ps__fail(PS_EINTERNAL, "a step has persistent tensors that the other one lacks");
}

void ps__step_widen(ps__step *s, const ps__step *by) {
  for (uint32_t i = 0; i < s->at->n_places; i++)
    if (by->space_bytes[i] > s->space_bytes[i])
      s->space_bytes[i] = by->space_bytes[i];
  for (uint32_t i = 0; i < s->at->n_streams; i++)
    if (by->scratch_bytes[i] > s->scratch_bytes[i])
      s->scratch_bytes[i] = by->scratch_bytes[i];
}
