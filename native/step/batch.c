/* batch.c - the batch: where its parts lie, its tensors on the host, and its way to the devices. */
#include "step/emit.h"

ps__batch_chunk ps__batch_chunk_of(uint32_t n_tokens) {
  const uint64_t field = (4ull * n_tokens + 63) / 64 * 64;
  return (ps__batch_chunk){.tokens = 0,
                           .targets = field,
                           .doc_start = 2 * field,
                           .position = 3 * field,
                           .scale = 4 * field,
                           .bytes = 4 * field + 64};
}

void ps__make_batch(ps__builder *b) {
  ps__step *s = b->s;
  uint64_t at = sizeof(ps__batch_header);
  for (uint32_t i = 0; i < s->layout->n_chunks; i++) {
    s->batch_offset[i] = at;
    at += ps__batch_chunk_of(s->layout->chunk[i].n_tokens).bytes;
  }
  s->batch = ps__vt_persistent(b, b->s->at->host, at);
  s->row_loss =
      ps__vt_persistent(b, b->s->at->host, ps__loss_row_bytes(s->model) * s->layout->n_tokens);
  s->norms =
      ps__vt_persistent(b, b->s->at->host, 8ull * ps__norm_slots(s->model) * s->model->n_units);
  s->stats = ps__vt_persistent(b, b->s->at->host, sizeof(ps__step_stats));
  const ps__vaccess load = ps__whole(b, s->batch, PS_WRITE);
  ps__emit_hook(b, PS__HOOK_LOAD, 0, b->s->at->io, &load, 1, (ps_work){.bytes = (double)at},
                (ps_tag){.layer = -1, .round = -1, .chunk = -1, .phase = PS__PHASE_FORWARD});
  const ps__vaccess count = ps__whole(b, s->batch, PS_READ_WRITE);
  if (ps__exchanges(s->spec))
    ps__emit_hook(b, PS__HOOK_COUNT, 0, b->s->at->net, &count, 1, (ps_work){0},
                  (ps_tag){.layer = -1, .round = -1, .chunk = -1, .phase = PS__PHASE_FORWARD});
}

/* Whether device @on runs layers of the round that runs on device @home without a ring. */
static bool runs_round(const ps__builder *b, const ps__on_device *on, const ps__on_device *home) {
  return b->s->spec->ring_blocks || on == home;
}

static void copy_chunk(ps__builder *b, ps__on_device *to, uint32_t round, uint32_t i) {
  const uint64_t bytes = ps__batch_chunk_of(b->s->layout->chunk[i].n_tokens).bytes;
  to->batch[i] = ps__vt_new(b, to->at.place, bytes);
  ps__emit_copy(b, to->at.to_device, ps__part(b->s->batch, PS_READ, b->s->batch_offset[i], bytes),
                ps__whole(b, to->batch[i], PS_WRITE),
                (ps_tag){.layer = -1,
                         .round = (int32_t)round,
                         .chunk = (int32_t)i,
                         .phase = PS__PHASE_FORWARD,
                         .what = "the batch"});
}

void ps__copy_batch(ps__builder *b, uint32_t round) {
  const ps__round *r = &b->s->layout->round[round];
  for (uint32_t i = r->first_chunk; i < r->first_chunk + r->n_chunks; i++)
    for (uint32_t d = 0; d < ps__n_devices(b); d++)
      if (runs_round(b, &b->dev[d], b->on))
        copy_chunk(b, &b->dev[d], round, i);
}

void ps__free_batch(ps__builder *b, uint32_t c, uint32_t lag) {
  ps__on_device *home = b->on;
  for (uint32_t d = 0; d < ps__n_devices(b); d++) {
    b->on = &b->dev[d];
    if (runs_round(b, b->on, home))
      ps__vt_free_late(b, *ps__batch_of(b, c), lag);
  }
  b->on = home;
}
