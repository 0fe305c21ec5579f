/* emit.h - what the step builder is made of: emitting ops and tensors, parameters on the device,
 * gradients on their way home. */
#ifndef PS_STEP_EMIT_H
#define PS_STEP_EMIT_H
#include "step/step.h"

/* A visit of a unit: all chunks of a round pass it before the next visit. */
typedef enum ps__pass_kind {
  PS__PASS_EMBED,
  PS__PASS_BLOCK,
  PS__PASS_HEAD,
  PS__PASS_BLOCK_BACK,
  PS__PASS_EMBED_BACK
} ps__pass_kind;
typedef struct ps__pass {
  uint32_t kind, round, unit;
} ps__pass;

/* What an update works on. */
typedef struct ps__optimizer_state {
  uint32_t weights, master, m, v;
} ps__optimizer_state;

typedef struct ps__unit_progress {
  uint32_t weights; /* device tensor, PS__NO_VT while not fetched */
  uint32_t pins;    /* visits fetched for and not over */
  bool fetched;     /* resident: this step's copy was issued */
  uint32_t grad;    /* device tensor of the running contribution */
  /* device tensor of the step's total, where gradients are resident or the update runs there */
  uint32_t total;
  uint32_t low; /* its low bytes, wherever the total is; PS__NO_VT where it has none */
  /* device tensor of its sums of squares, until an update there without clipping */
  uint32_t sums;
  ps__optimizer_state state; /* on the device, for an update that runs there; else PS__NO_VT */
  uint32_t contribution;     /* how many have ended */
  /* BYTES of its gradient's home that the first round's saved tensors have */
  uint64_t alias_bytes;
} ps__unit_progress;

/* A chunk's embedding rows, where they are gathered at home: on the device; at home, where they
 * stay as the first block's saved input. */
typedef struct ps__gathered {
  uint32_t x, host;
} ps__gathered;

/* A streamed unit whose moments come in, and the chunk step from which on it is updated. */
typedef struct ps__coming {
  uint32_t unit, when;
} ps__coming;

typedef struct ps__late_free {
  uint32_t vt, when;
} ps__late_free;

typedef struct ps__builder {
  ps__step *s;
  ps__step_hooks *hooks;
  ps__unit_progress *unit; /* [n_units] */
  ps__pass *pass;
  uint32_t n_passes, next_fetch;
  uint32_t clock; /* chunk steps emitted so far, for late frees */
  /* device copy of the batch header, which updates without clipping look at; PS__NO_VT before
   * the first */
  uint32_t header;
  /* weights or moments at home that the device-to-host stream wrote last */
  uint32_t last_sent;
  /* [n_units], without clipping: in the order in which their totals were ready */
  ps__coming *coming;
  uint32_t n_coming, n_updated;
  ps__late_free *late;
  size_t n_late, cap_late;
  ps__gathered *gathered; /* [n_chunks of the step] */
  uint32_t *step_batch;   /* the same: blocks of the batch, device tensors */
  uint64_t head_slices;   /* of the running round so far */
  /* the final norm's gradient is in the running contribution of the head's unit */
  bool head_norm;
  /* of the embedding's running contribution: token ids and gradient rows at home */
  uint32_t rows_host;
  /* of the running round; indexed by chunk of the round */
  const ps__round *round;
  uint32_t round_idx;
  /* device tensors [n_chunks]; batch is a place in step_batch */
  uint32_t *batch, *x, *dy;
  /* [n_layers][n_chunks][PS__N_TENSORS]: saved tensors on the device, at the host */
  uint32_t *kept, *away;
} ps__builder;

/* ---- tensors --------------------------------------------------------------------------------- */
/* alive from the next op on */
uint32_t ps__vt_new(ps__builder *b, uint32_t space, uint64_t bytes);
uint32_t ps__vt_persistent(ps__builder *b, uint32_t space, uint64_t bytes);
/* a part of another's memory, while its own contents are not needed */
uint32_t ps__vt_alias(ps__builder *b, uint32_t by, uint64_t offset, uint64_t bytes);
/* dead after the last op emitted; PS__NO_VT is a no-op */
void ps__vt_free(ps__builder *b, uint32_t vt);
/* after so many more chunk steps */
void ps__vt_free_late(ps__builder *b, uint32_t vt, uint32_t steps);
/* a chunk step is over */
void ps__tick(ps__builder *b);
void ps__flush_late(ps__builder *b);

/* ---- ops ------------------------------------------------------------------------------------- */
ps__vaccess ps__whole(const ps__builder *b, uint32_t vt, uint32_t mode);
ps__vaccess ps__part(uint32_t vt, uint32_t mode, uint64_t offset, uint64_t bytes);
void ps__emit(ps__builder *b, const ps_kernel *kernel, uint32_t stream, const void *args,
              uint32_t args_bytes, const ps__vaccess *access, uint32_t n_access, ps_work work,
              ps_tag tag);
void ps__emit_copy(ps__builder *b, uint32_t stream, ps__vaccess from, ps__vaccess to, ps_tag tag);
void ps__emit_hook(ps__builder *b, ps__hook what, uint32_t unit, uint32_t stream,
                   const ps__vaccess *access, uint32_t n_access, ps_work work, ps_tag tag);

/* ---- parameters and gradients (units.c) ------------------------------------------------------ */
ps_tag ps__unit_tag(const ps__builder *b, uint32_t unit, int phase);
ps_status ps__units_init(ps__builder *b); /* homes, residents, visits */
/* issue the copies of this visit and of those ahead */
void ps__fetch_ahead(ps__builder *b, uint32_t pass_idx);
void ps__pass_done(ps__builder *b, uint32_t pass_idx);
/* Chunks pass backwards, c from the round's last one down to 0. Is chunk c the first of a
 * contribution, the last of one? */
bool ps__contribution_begins(const ps__builder *b, uint32_t c);
bool ps__contribution_ends(const ps__builder *b, uint32_t c);
/* how the unit's contribution i, from 1 on, is added to its total: ps__sum_mode() */
uint32_t ps__sum_mode_of(const ps__builder *b, uint32_t unit, uint32_t i);
void ps__grad_begin(ps__builder *b, uint32_t unit);
/* ps__grad_end() - the contribution is complete: on its way home. @more: another one of the same
 * round follows at once, and reuses its memory. */
void ps__grad_end(ps__builder *b, uint32_t unit, bool more);
/* the step's gradient is complete at home: sums of squares and, without clipping, the update */
void ps__total_on_host(ps__builder *b, uint32_t unit);

/* ---- updates (updates.c) --------------------------------------------------------------------- */
/* a device tensor and the copy of @home to it */
uint32_t ps__bring(ps__builder *b, uint32_t host, ps_tag tag);
/* the unit's total and its sums of squares are there: moments come in; without clipping, the
 * update */
void ps__total_ready(ps__builder *b, uint32_t unit);
/* with clipping: norm, then all units in forward order; report; the moments of split updates */
void ps__emit_updates(ps__builder *b);

/* ---- the embedding (embed.c) ----------------------------------------------------------------- */
/* embed_on_host: the round's rows, gathered and on their way to the device */
void ps__gather_round(ps__builder *b, uint32_t round);
/* its blocks of the batch on their way to the device (step.c) */
void ps__copy_batch(ps__builder *b, uint32_t round);
void ps__embed_forward(ps__builder *b, uint32_t c);
void ps__embed_backward(ps__builder *b, uint32_t c);

/* ---- blocks and head (passes.c) -------------------------------------------------------------- */
void ps__forward_chunk(ps__builder *b, uint32_t layer, uint32_t c);
void ps__backward_chunk(ps__builder *b, uint32_t layer, uint32_t c);
/* issue the fetches of backward chunk step number step_idx */
void ps__fetch_saved(ps__builder *b, uint32_t step_idx);
void ps__head_chunk(ps__builder *b, uint32_t c);
/* when its fate is the host */
void ps__send_saved(ps__builder *b, uint32_t layer, uint32_t c, uint32_t tensor, uint32_t vt);
const ps__chunk *ps__chunk_of(const ps__builder *b, uint32_t c);
uint32_t *ps__saved_entry(ps__builder *b, uint32_t *table, uint32_t layer, uint32_t c,
                          uint32_t tensor);
#endif
