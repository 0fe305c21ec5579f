/* ring.c - what a device of a ring hands on: a chunk's activations to the next layer's device, and
 * its gradient to that of the layer below. */
#include "step/emit.h"
#include <assert.h>

/* The device of a ring that gets the head's next section: the one with the most time left between
 * its share of the head and its first backward pass. The device of the last block begins with
 * those, and each device before it begins one chunk later than the next (with one block in turn, as
 * plans have it). That is worth the head of two chunks: of several numbers none is clearly better
 * (bench/log/2026-11-26-rings.md).
 * @n_chunks  how many chunks each device has */
static uint32_t device_for_section(const ps__spec *spec, const uint32_t *n_chunks) {
  const uint32_t n = spec->n_devices, last = ps__device_of(spec, spec->n_layers, 0);
  uint32_t best = 0;
  int64_t least = INT64_MAX;
  for (uint32_t i = 1; i <= n; i++) {
    const uint32_t d = (last + i) % n;
    const int64_t late = (int64_t)n_chunks[d] - 2 * (int64_t)(n - i);
    if (late < least) {
      best = d;
      least = late;
    }
  }
  return best;
}

/* Whether the head adds to the gradient of a unit: of its own, or of a tied model's table. */
static bool head_has_gradients(const ps_model *m) {
  const ps__layer *head = &m->layer[ps__head_layer(m)];
  bool any = ps__tied(m) && m->unit[0].by_slice;
  for (uint32_t u = head->first_unit; u < head->first_unit + head->n_units; u++)
    any |= m->unit[u].by_slice || m->unit[u].by_chunk;
  return any;
}

/* The chunks come from the last to the first, as their backward passes do. */
ps_status ps__deal_head(ps__builder *b) {
  const ps__spec *spec = b->s->spec;
  const ps__layout *l = b->s->layout;
  const uint32_t n = l->round[0].n_chunks, additions = b->s->sums.additions;
  const bool tied = ps__tied(b->s->model), gradients = head_has_gradients(b->s->model);
  uint32_t n_chunks[PS_MAX_DEVICES] = {0}, device = 0;
  uint64_t slices = 0;
  if (spec->ring_blocks == 0 || l->n_rounds > 1)
    return PS_OK;
  b->head_at = ps__calloc(n, sizeof *b->head_at);
  if (!b->head_at)
    return ps__fail(PS_ENOMEM, "out of memory for a round of %u chunks", n);
  for (uint32_t c = n; c-- > 0;) {
    /* a tied model's final norm has contributions of chunks, and not of slices */
    const bool begins =
        !gradients || (slices % additions == 0 && (!tied || (n - 1 - c) % additions == 0));
    if (begins) {
      device = device_for_section(spec, n_chunks);
      b->has_head[device] = true;
    }
    b->head_at[c] = device;
    n_chunks[device]++;
    slices += (l->chunk[c].n_tokens + spec->head_slice - 1) / spec->head_slice;
  }
  return PS_OK;
}

bool ps__head_goes_on(const ps__builder *b, uint32_t c) {
  return b->head_at && b->head_at[c] != b->head_at[c + 1];
}

bool ps__is_handed_on(ps__builder *b, uint32_t layer, bool backward, uint32_t c) {
  return ps__at_chunk(b, b->in, backward ? layer + 1 : layer - 1, c) !=
         ps__at_chunk(b, b->in, layer, c);
}

/* Memory that ps__make_room() made on device @on for chunk @c. */
static uint32_t *room_of(const ps__builder *b, bool backward, const ps__on_device *on, uint32_t c) {
  uint32_t *room = backward ? b->in->next_dy : b->in->next_x;
  return &room[(size_t)(on - b->dev) * b->s->spec->n_chunks + c];
}

/* The block whose pass is the running device's next one that something is handed on to; 0: none. A
 * device may have several blocks in turn. */
static uint32_t next_block(ps__builder *b, uint32_t layer, bool backward) {
  const uint32_t first = b->first_trained > 1 ? b->first_trained : 1;
  do
    layer = backward ? layer - 1 : layer + 1;
  while (layer >= first && layer <= b->s->spec->n_layers &&
         !(ps__at_layer(b, b->in, layer) == b->on && ps__is_handed_on(b, layer, backward, 0)));
  return layer >= first && layer <= b->s->spec->n_layers ? layer : 0;
}

/* Whether the running device has chunk @c of a shared head, and another one hands it on. */
static bool awaits_head(ps__builder *b, uint32_t c) {
  return b->head_at && &b->dev[b->head_at[c]] == b->on &&
         ps__is_handed_on(b, ps__head_layer(b->s->model), false, c);
}

void ps__make_room(ps__builder *b, uint32_t layer, bool backward) {
  const ps__spec *spec = b->s->spec;
  const ps__layer_def *d = ps__layer_of(b->s->model, layer);
  const bool ahead =
      spec->ring_blocks && spec->saved_lag > 0 && b->s->layout->n_rounds < ps__n_devices(b);
  const bool block = ahead && next_block(b, layer, backward);
  for (uint32_t c = 0; ahead && c < b->in->round->n_chunks; c++) {
    uint32_t *room = room_of(b, backward, b->on, c);
    if (*room == PS__NO_VT && (block || (!backward && awaits_head(b, c))))
      *room = ps__vt_new(b, b->on->at.place,
                         d->tensor[d->input].row_bytes * ps__chunk_of(b, c)->n_tokens);
  }
}

static uint32_t take_room(ps__builder *b, bool backward, const ps__on_device *to, uint32_t c,
                          uint64_t bytes) {
  uint32_t *room = room_of(b, backward, to, c);
  const uint32_t there = *room;
  *room = PS__NO_VT;
  if (there == PS__NO_VT)
    return ps__vt_new(b, to->at.place, bytes);
  assert(b->s->vt[there].bytes == bytes);
  return there;
}

void ps__hand_on(ps__builder *b, uint32_t next, bool backward, uint32_t c, uint32_t lag,
                 ps_tag tag) {
  const ps__on_device *to = ps__at_chunk(b, b->in, next, c);
  uint32_t *vt = backward ? &b->in->dy[c] : &b->in->x[c];
  if (to == b->on || *vt == PS__NO_VT)
    return;
  const ps__vaccess from = ps__whole(b, *vt, PS_READ);
  const uint32_t there = take_room(b, backward, to, c, from.bytes);
  if (b->s->spec->ring_by_host) {
    const uint32_t host = ps__vt_new(b, b->s->at->host, from.bytes);
    ps__emit_copy(b, b->on->at.to_host, from, ps__whole(b, host, PS_WRITE), tag);
    ps__emit_copy(b, to->at.to_device, ps__whole(b, host, PS_READ), ps__whole(b, there, PS_WRITE),
                  tag);
    ps__vt_free(b, host);
  } else
    ps__emit_copy(b, b->on->at.to_peers, from, ps__whole(b, there, PS_WRITE), tag);
  ps__vt_free_late(b, *vt, lag);
  *vt = there;
}
