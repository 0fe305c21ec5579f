/* emit.h - the step builder's own parts. Each part names those below it alone, in the order of the
 * files: emit; batch, counts, ring, disk, updates; totals; pieces; grads; passes; head; embed;
 * units; step. */
#ifndef PS_STEP_EMIT_H
#define PS_STEP_EMIT_H
#include "step/step.h"

/* A layer pass: all chunks of a round pass the layer before the next layer pass begins. */
typedef enum ps__pass_kind {
  PS__PASS_EMBED,
  PS__PASS_BLOCK,
  PS__PASS_HEAD,
  PS__PASS_BLOCK_BACK,
  PS__PASS_EMBED_BACK
} ps__pass_kind;
/* Passes are emitted by their slots; those of one round have one after the other. */
typedef struct ps__pass {
  uint32_t kind, round, layer, slot;
} ps__pass;

/* The tensors that an update works on beside the gradient. */
typedef struct ps__update_tensors {
  uint32_t weights, master, state[PS_MAX_STATES];
} ps__update_tensors;

/* A unit's gradient and update, wherever they are. */
typedef struct ps__unit_progress {
  /* device tensor of the step's total, where gradients are device-resident or the update runs on
   * the device: on that device */
  uint32_t total;
  uint32_t low; /* the total's low bytes, in its space; PS__NO_VT: it has none */
  /* device tensor of the total's sums of squares, until an update on the device without clipping */
  uint32_t sums;
  ps__update_tensors updated; /* on the device, for an update that runs there; else PS__NO_VT */
  uint32_t contribution;      /* contributions that were added */
  bool complete;              /* its total is on the host, for the other hosts to add to */
  /* BYTES of its gradient on the host that aliases of the first round take */
  uint64_t alias_bytes;
  /* Of a unit in pieces, while rounds run that add to it: each device's piece of the total and of
   * its low bytes. Device 0's may be the gradient of the first contribution, of which it is the
   * beginning. */
  uint32_t piece[PS_MAX_DEVICES], low_piece[PS_MAX_DEVICES];
} ps__unit_progress;

/* A unit on one device. */
typedef struct ps__unit_copy {
  uint32_t weights; /* PS__NO_VT while it is not fetched */
  uint32_t dense;   /* of a quantized unit in a layer pass: its weights as ops read them */
  uint32_t pins;    /* layer passes that it was fetched for and that have not ended */
  bool fetched;     /* device-resident: this step's copy was issued */
  uint32_t grad;    /* of the running contribution */
} ps__unit_copy;

/* A chunk's embedding rows, gathered on the host. x: on the device. host: on the host, where they
 * stay as the first block's saved input; else PS__NO_VT. */
typedef struct ps__gathered {
  uint32_t x, host;
} ps__gathered;

/* A unit whose state is on its way to the device, and the chunk pass from which on it is
 * updated. */
typedef struct ps__coming {
  uint32_t unit, when;
} ps__coming;

typedef struct ps__late_free {
  uint32_t vt, when;
} ps__late_free;

/* A contribution on the host that others are added before: its tensor there, and the lag with which
 * that is freed. */
typedef struct ps__waiting {
  uint32_t vt, lag;
} ps__waiting;

/* What is under way on one device. */
typedef struct ps__on_device {
  ps__device_at at;
  ps__unit_copy *unit; /* [n_units] */
  uint32_t clock;      /* chunk passes emitted so far: the time of late frees */
  ps__late_free *late;
  size_t n_late, cap_late;
  /* for updates there, PS__NO_VT before the first: copies of the batch header (without clipping),
   * of the norm of the step before (where that clips), and of the norm's half of stats */
  uint32_t header, last_norm, clip_scale;
  /* what the stream to the host wrote last of weights or state on the host; PS__NO_VT: nothing */
  uint32_t last_sent;
  uint32_t *batch;   /* [chunks of the step]: parts of the batch, device tensors */
  uint32_t counters; /* ps__n_counters() of each layer, a device tensor */
  uint32_t *of_step; /* [the model's layers][max_tensors]: tensors of the step */
  /* tensors of the running layer pass, PS__NO_VT: not made yet. [1]: of the block below, where that
   * runs forward again beside the pass */
  uint32_t of_pass[2][PS__SET_BITS];
} ps__on_device;

/* One of the rounds that run at once, and those that follow it, layer pass by layer pass: rounds i,
 * i + n, i + 2n and so on of the step, where n run at once. */
typedef struct ps__in_flight {
  ps__pass *pass;      /* of its rounds */
  const ps__pass *now; /* the running layer pass */
  uint32_t n_passes, n_done;
  ps__waiting *waiting; /* contributions of the running round to the table of a tied model */
  size_t n_waiting, cap_waiting;
  uint64_t head_slices; /* slices of the head in the running round so far */
  /* gradients of the head's ops that run once a chunk, the final norm's, are in the running
   * contribution of the head's unit */
  bool head_norm;
  /* of the embedding's running contribution on the host: token ids and gradient rows */
  uint32_t rows_host;
  /* of the running round, by chunk of the round: */
  const ps__round *round;
  uint32_t round_idx;
  uint32_t *x, *dy; /* device tensors [n_chunks], on the device whose layer reads them next */
  /* [n_devices][n_chunks]: memory for what a device's next layer pass receives, forward and
   * backward; PS__NO_VT: none (ps__make_room()) */
  uint32_t *next_x, *next_dy;
  /* saved activations [n_layers][n_chunks][max_tensors]: on the device, on the host; on the device
   * for a block that runs forward again, of which those on the host stay there */
  uint32_t *kept, *away, *again;
  uint32_t *carried; /* [PS__N_CARRIED][n_chunks]: what passes between blocks, on the device */
} ps__in_flight;

enum { PS__NO_UNIT = UINT32_MAX };

typedef struct ps__builder {
  ps__step *s;
  ps__step_hooks *hooks;
  ps__on_device dev[PS_MAX_DEVICES];    /* [n_devices] */
  ps__in_flight flight[PS_MAX_DEVICES]; /* [n_devices]: as many rounds run at once */
  ps__on_device *on;                    /* device and round of the ops that are emitted now */
  ps__in_flight *in;
  /* of a ring's step of one round: the device of each chunk's head, [chunks of the round], and
   * which devices run the head of a chunk. NULL: a round's head is on one device
   * (ps__deal_head()) */
  uint32_t *head_at;
  bool has_head[PS_MAX_DEVICES];
  uint32_t embedded;                   /* rounds whose embedding's contributions were added */
  ps__unit_progress *unit;             /* [n_units] */
  uint32_t next_fetch;                 /* the first layer pass that nothing was fetched for */
  uint32_t first_trained;              /* ps__first_trained() */
  uint32_t carried_end[PS__N_CARRIED]; /* the last layer whose pass needs it (ps__carried_init()) */
  uint32_t checks;                     /* of a checked step: the sums of squares, a device tensor */
  uint32_t staged;                     /* memory of the last staged parameters, or PS__NO_VT */
  /* [n_units], without clipping: in the order in which totals were complete */
  ps__coming *coming;
  uint32_t n_coming, n_updated;
  /* [n_units]: those whose pieces of the total are complete and go to the host next */
  uint32_t *leaving;
  uint32_t n_leaving;
  /* units whose state goes to the disk, those whose copies there are emitted, and the last of what
   * these read (disk.c) */
  uint32_t n_on_disk, n_stored, last_stored;
  /* the unit whose exchange is issued, and whose sums of squares are not; PS__NO_UNIT: none */
  uint32_t exchanging;
  uint32_t to_exchange;   /* 1 + the unit whose exchange is next; 0: all are issued */
  ps__gathered *gathered; /* [chunks of the step] */
} ps__builder;

static inline uint32_t ps__n_devices(const ps__builder *b) { return b->s->at->n_devices; }
/* ps__n_running() - how many of the rounds that run at once have layer pass @idx: the first
 * ones. */
static inline uint32_t ps__n_running(const ps__builder *b, uint32_t idx) {
  uint32_t n = 0;
  while (n < ps__n_devices(b) && idx < b->flight[n].n_passes)
    n++;
  return n;
}
/* ps__at_layer() - the device that runs @layer for round @in. */
static inline ps__on_device *ps__at_layer(ps__builder *b, const ps__in_flight *in, uint32_t layer) {
  return &b->dev[ps__device_of(b->s->spec, layer, (uint32_t)(in - b->flight))];
}
/* ps__is_shared() - whether the devices of a ring share the layer pass: it is the head of one
 * round. */
static inline bool ps__is_shared(const ps__builder *b, const ps__pass *v) {
  return b->head_at && v->kind == PS__PASS_HEAD;
}
/* ps__at_chunk() - the same as ps__at_layer() for chunk @c of the round. */
static inline ps__on_device *ps__at_chunk(ps__builder *b, const ps__in_flight *in, uint32_t layer,
                                          uint32_t c) {
  if (b->head_at && layer == ps__head_layer(b->s->model))
    return &b->dev[b->head_at[c]];
  return ps__at_layer(b, in, layer);
}
/* ps__layer_again() - the block that runs forward again beside layer pass @v, for the input of the
 * pass's block (ps__input_again()); 0: none. */
static inline uint32_t ps__layer_again(const ps__builder *b, const ps__pass *v) {
  return v->kind == PS__PASS_BLOCK_BACK && ps__input_again(b->s->spec, v->layer) ? v->layer - 1 : 0;
}
/* ps__batch_of() - the running device's part of the batch for chunk @c of the running round. */
static inline uint32_t *ps__batch_of(const ps__builder *b, uint32_t c) {
  return &b->on->batch[b->in->round->first_chunk + c];
}

/* ---- tensors --------------------------------------------------------------------------------- */
/* ps__vt_new() - a tensor that is alive from the next op on, until ps__vt_free().
 * ps__vt_persistent() - one that is always alive. PS__NO_VT when memory is out. */
uint32_t ps__vt_new(ps__builder *b, uint32_t space, uint64_t bytes);
uint32_t ps__vt_persistent(ps__builder *b, uint32_t space, uint64_t bytes);
/* ps__vt_alias() - BYTES of @by from @offset on, while the contents of @by are not needed. */
uint32_t ps__vt_alias(ps__builder *b, uint32_t by, uint64_t offset, uint64_t bytes);
/* ps__vt_free() - the last op emitted is the last of its life; PS__NO_VT is a no-op. */
void ps__vt_free(ps__builder *b, uint32_t vt);
/* ps__vt_free_late() - the same after so many more chunk passes. */
void ps__vt_free_late(ps__builder *b, uint32_t vt, uint32_t chunk_passes);
/* ps__vt_drop() - the same, and *vt becomes PS__NO_VT. */
static inline void ps__vt_drop(ps__builder *b, uint32_t *vt, uint32_t chunk_passes) {
  ps__vt_free_late(b, *vt, chunk_passes);
  *vt = PS__NO_VT;
}
/* ps__tick() - a chunk pass has ended on the running device. ps__flush_late() - all late frees of
 * all devices are due now. */
void ps__tick(ps__builder *b);
void ps__flush_late(ps__builder *b);

/* ---- ops ------------------------------------------------------------------------------------- */
/* ps__about() - the tag of an op that works on @what or moves it. */
static inline ps_tag ps__about(ps_tag tag, const char *what) {
  tag.what = what;
  return tag;
}
ps__vaccess ps__whole(const ps__builder *b, uint32_t vt, uint32_t mode);
ps__vaccess ps__part(uint32_t vt, uint32_t mode, uint64_t offset, uint64_t bytes);
/* ps__elements() - elements [first, first + n) of a tensor that is stored as @as; a block begins
 * with @first. */
static inline ps__vaccess ps__elements(uint32_t vt, uint32_t mode, ps__storage as, uint64_t first,
                                       uint64_t n) {
  return ps__part(vt, mode, ps__stored_at(as, first), ps__stored_bytes(as, n));
}
/* ps__emit() - an op, whose description says its work. Memory that is out is noted in the step and
 * makes it a no-op. */
void ps__emit(ps__builder *b, const ps_kernel *kernel, uint32_t stream, const void *args,
              uint32_t args_bytes, const ps__vaccess *access, uint32_t n_access, ps_tag tag);
void ps__emit_copy(ps__builder *b, uint32_t stream, ps__vaccess from, ps__vaccess to, ps_tag tag);
void ps__emit_hook(ps__builder *b, ps__hook what, uint32_t unit, uint32_t stream,
                   const ps__vaccess *access, uint32_t n_access, ps_work work, ps_tag tag);

/* ps__stage() - a copy inside the host's memory, on one of its streams: of what a link brings, or
 * for a link to take. */
void ps__stage(ps__builder *b, uint32_t stream, ps__vaccess from, ps__vaccess to, ps_tag tag);

/* ps__bring() - a new device tensor, and the copy of host tensor @host to it. */
uint32_t ps__bring(ps__builder *b, uint32_t host, ps_tag tag);

/* ps__host_total() - the unit's total on the host. One that passes is made here.
 * ps__end_host_total() - what read it last is emitted: one that passes is free after @lag more
 * chunk passes. */
uint32_t ps__host_total(ps__builder *b, uint32_t unit);
void ps__end_host_total(ps__builder *b, uint32_t unit, uint32_t lag);

/* ---- where the builder is -------------------------------------------------------------------- */
/* ps__chunk_of() - chunk @c of the running round. */
const ps__chunk *ps__chunk_of(const ps__builder *b, uint32_t c);
/* ps__unit_tag() - the tag of an op that is about unit @unit: its layer; chunk -1 for the layer's
 * first unit, -2 for its second, and so on. */
ps_tag ps__unit_tag(const ps__builder *b, uint32_t unit, int phase);
/* ps__unit_bytes() - BYTES of the unit's elements where they are stored as @as. */
static inline uint64_t ps__unit_bytes(const ps__builder *b, uint32_t unit, ps__storage as) {
  return ps__stored_bytes(as, b->s->unit_host[unit].n);
}
/* ps__weights_as() - how the unit's weights lie on the host, on links and where they stay. */
static inline ps__storage ps__weights_as(const ps__builder *b, uint32_t unit) {
  return ps__unit_storage(b->s->model, unit, b->s->recipe->weights);
}
/* ps__n_contributions() - that the unit's total has in the step. */
static inline uint32_t ps__n_contributions(const ps__builder *b, uint32_t unit) {
  return ps__unit_contributions(b->s->model, &b->s->sums, unit);
}
/* Backward, the chunks of a round pass from the last one down to chunk 0. Whether chunk @c is the
 * first of a contribution, the last of one. */
bool ps__contribution_begins(const ps__builder *b, uint32_t c);
bool ps__contribution_ends(const ps__builder *b, uint32_t c);
/* ps__sum_mode() of the unit's contribution @i > 0, counted from 0 */
uint32_t ps__sum_mode_of(const ps__builder *b, uint32_t unit, uint32_t i);
/* ps__low_access() - how an addition of this mode accesses the total's low bytes */
static inline uint32_t ps__low_access(uint32_t mode) {
  return (mode & PS_LOW_READ ? PS_READ : 0) | (mode & PS_LOW_WRITE ? PS_WRITE : 0);
}

/* ---- the batch (batch.c) --------------------------------------------------------------------- */
/* ps__make_batch() - the host's tensors of the batch and of what a step reports; the ops that load
 * it.
 * ps__copy_batch() - the round's parts of the batch are copied to the devices that run it, which
 * are the running one or, in a ring, all. ps__free_batch() - those of chunk @c are free there. */
void ps__make_batch(ps__builder *b);
void ps__copy_batch(ps__builder *b, uint32_t round);
void ps__free_batch(ps__builder *b, uint32_t c, uint32_t lag);

/* ---- parameters (units.c) -------------------------------------------------------------------- */
/* ps__units_init() - the units' host and device-resident tensors, the layer passes of each device.
 * Errors: PS_ENOMEM. */
ps_status ps__units_init(ps__builder *b);
/* ps__fetch_ahead() - issue the copies for this layer pass of all devices that have it, and for
 * those within the prefetch distance.
 * ps__dequantize() - what is quantized of the parameters that the running device's pass reads.
 * ps__pass_done() - free the parameters that no later pass was fetched for. */
void ps__fetch_ahead(ps__builder *b, uint32_t pass_idx);
void ps__dequantize(ps__builder *b, uint32_t pass_idx);
void ps__pass_done(ps__builder *b, uint32_t pass_idx);

/* ---- gradients (grads.c) --------------------------------------------------------------------- */
/* ps__grad_begin() - a contribution begins: memory for it. */
void ps__grad_begin(ps__builder *b, uint32_t unit);
/* ps__grad_end() - the contribution is complete: it is added to the total, or copied to the host to
 * be added there. @more: another one of the same round follows at once and reuses its memory. */
void ps__grad_end(ps__builder *b, uint32_t unit, bool more);
/* ps__add_waiting() - add the contributions of the running round that waited for the embedding's of
 * the round before. */
void ps__add_waiting(ps__builder *b);
/* The same for all units of a layer that have a gradient of their own layer's ops. */
void ps__layer_grads_begin(ps__builder *b, uint32_t layer);
void ps__layer_grads_end(ps__builder *b, uint32_t layer, bool more);
/* ps__fetch_total() - the host's total comes to the device, where the running contribution ends
 * there and it has not come yet. */
void ps__fetch_total(ps__builder *b, uint32_t unit);

/* ---- totals (totals.c) ----------------------------------------------------------------------- */
/* ps__add_to_total() - total += grad, contribution @i, both in @space. The caller frees @grad.
 * ps__sumsq_on_device() - sums of squares of the unit's spans. Returns the device tensor that holds
 * them; the caller frees it.
 * ps__sumsq_on_host() - the same of the unit's total on the host, span by span: padding between
 * spans is not counted.
 * @staging  contribution @i, which is added to the total first, in the same pass. PS__NO_VT: none;
 *           low bytes that the total still has are rounded away here */
void ps__add_to_total(ps__builder *b, uint32_t unit, uint32_t i, uint32_t space, uint32_t grad,
                      uint32_t total, ps_tag tag);
uint32_t ps__sumsq_on_device(ps__builder *b, uint32_t unit, uint32_t grad);
void ps__sumsq_on_host(ps__builder *b, uint32_t unit, uint32_t i, uint32_t staging);
/* ps__total_on_host() - the unit's total is complete on the host: sums of squares and, without
 * clipping, the update. Where other hosts add to the total, both come after the next unit's
 * exchange is issued: the host's stream then sums up the next unit's contributions during this
 * unit's exchange. Exchanges go from the last unit to the first, whatever this host's plan: a total
 * that is complete before its turn waits for it.
 * ps__exchanges_end() - all totals are complete: both for the unit of the last exchange. */
void ps__total_on_host(ps__builder *b, uint32_t unit);
void ps__exchanges_end(ps__builder *b);

/* ---- units in pieces (pieces.c) -------------------------------------------------------------- */
/* ps__fetch_pieces() - fetch a unit to the first @n_running devices, whose tensors of it are made:
 * from the host to each its piece, and from each to the others.
 * ps__begin_pieces() - a contribution begins on the running device: the first of the rounds that
 * run at once fetches the total's pieces, where there is a total.
 * ps__add_pieces() - add the complete contribution of the running device to the total's pieces.
 * @last: of the rounds that run at once; the pieces then wait for ps__send_pieces().
 * ps__send_pieces() - the first @n units' complete pieces go to the host. It comes one layer pass
 * after the sums, which wait for other devices: what leaves a device after them need not wait so
 * long. */
void ps__fetch_pieces(ps__builder *b, uint32_t unit, uint32_t n_running);
void ps__begin_pieces(ps__builder *b, uint32_t unit);
void ps__add_pieces(ps__builder *b, uint32_t unit, bool last);
void ps__send_pieces(ps__builder *b, uint32_t n);

/* ---- updates (updates.c) --------------------------------------------------------------------- */
/* ps__total_ready() - the unit's total and its sums of squares are complete: its state is brought
 * where it is streamed and, without clipping, the unit is updated. */
void ps__total_ready(ps__builder *b, uint32_t unit);
/* ps__emit_updates() - the norm; with clipping, all units in forward order, an embedding on the
 * host last; the report; the state of split updates. */
void ps__emit_updates(ps__builder *b);

/* ---- state on the disk (disk.c) -------------------------------------------------------------- */
/* ps__disk_read_ahead() - copies of the state of trained units that is on the disk, to new tensors
 * on the host: of @unit, which has its state there or not, and of the disk_lead units that are
 * updated next and have it there.
 * ps__disk_take() - the state of @unit on the host, in @state.
 * ps__disk_store() - after its update: it goes back. */
void ps__disk_read_ahead(ps__builder *b, uint32_t unit);
void ps__disk_take(ps__builder *b, uint32_t unit, uint32_t state[PS_MAX_STATES]);
void ps__disk_store(ps__builder *b, uint32_t unit);

/* ---- the embedding (embed.c) ----------------------------------------------------------------- */
/* ps__gather_round() - with embed_on_host: the round's rows are gathered and copied to the
 * device. */
void ps__gather_round(ps__builder *b, uint32_t round);
void ps__embed_forward(ps__builder *b, uint32_t c);
void ps__embed_backward(ps__builder *b, uint32_t c);

/* ---- a ring (ring.c) ------------------------------------------------------------------------- */
/* ps__deal_head() - sets @head_at. A device gets sections of consecutive chunks. A section is the
 * fewest chunks after which the running contributions of all units that the head adds to are
 * complete. So the contributions are those of one device, and in the same order. Errors: PS_ENOMEM.
 * ps__head_goes_on() - whether the head of chunk @c is on another device than that of chunk c + 1,
 * which comes before it.
 * ps__is_handed_on() - whether another device than that of chunk @c's layer @layer makes what it
 * reads: its activations, or (backward) its gradient. Without a ring never.
 * ps__hand_on() - what the running device made of chunk @c goes to the device of layer @next, if
 * that is another one: in->x[c] or, backward, in->dy[c] becomes a copy there.
 * @lag  chunk passes after which the running device's own is free
 * ps__make_room() - at the start of block @layer's pass: memory for what the running device is
 * handed next, for a block or for its share of the head. It must not be memory of the running pass:
 * what sends it may be ahead by some chunks, and would wait for this pass to end. In a ring of
 * fewer rounds than devices; with as many rounds the order of passes does it. */
ps_status ps__deal_head(ps__builder *b);
bool ps__head_goes_on(const ps__builder *b, uint32_t c);
bool ps__is_handed_on(ps__builder *b, uint32_t layer, bool backward, uint32_t c);
void ps__hand_on(ps__builder *b, uint32_t next, bool backward, uint32_t c, uint32_t lag,
                 ps_tag tag);
void ps__make_room(ps__builder *b, uint32_t layer, bool backward);

/* ---- counters (counts.c) --------------------------------------------------------------------- */
/* ps__counts_begin() - the counters of all layers, 0 on all devices; none where nothing is counted.
 * ps__counts_end() - they go to the host, to ps__step.counters; a checked step's are dropped. */
void ps__counts_begin(ps__builder *b);
void ps__counts_end(ps__builder *b);

/* ---- layers (passes.c) ----------------------------------------------------------------------- */
void ps__forward_chunk(ps__builder *b, uint32_t layer, uint32_t c);
void ps__backward_chunk(ps__builder *b, uint32_t layer, uint32_t c);
/* ps__fetch_saved() - issue the copies for the round's backward chunk pass number @pass_idx, and
 * for what of the block below runs forward again before it. */
void ps__fetch_saved(ps__builder *b, uint32_t pass_idx);
void ps__head_chunk(ps__builder *b, uint32_t c);
/* ps__carried_init() - of each tensor that passes between blocks, where its life ends. */
void ps__carried_init(ps__builder *b);
/* ps__end_layer_pass() - free the layer pass's tensors (PS__ROWS_PASS).
 * ps__end_rounds() - free the step's on all devices (PS__ROWS_STEP). */
void ps__end_layer_pass(ps__builder *b);
void ps__end_rounds(ps__builder *b);
/* ps__send_saved() - copy a saved activation to the host, where that is its policy. */
void ps__send_saved(ps__builder *b, uint32_t layer, uint32_t c, uint32_t tensor, uint32_t vt);
/* ps__send_input() - the same of the chunk's input of @layer, by the running device; nothing where
 * that is the head. An input that is handed on is sent in the chunk's own pass: before it, inputs
 * of later chunks would come late and hold up the copies that follow on the device's stream. */
void ps__send_input(ps__builder *b, uint32_t layer, uint32_t c);
/* ps__look_up(), ps__add_rows() - the embedding's passes over a table on the device. */
void ps__look_up(ps__builder *b, uint32_t c);
void ps__add_rows(ps__builder *b, uint32_t c);
uint32_t *ps__saved_entry(ps__builder *b, uint32_t *table, uint32_t layer, uint32_t c,
                          uint32_t tensor);
#endif
