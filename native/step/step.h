/* step.h - a training step as a program. Decisions (a spec) become ops over tensors with lifetimes,
 * then a memory map, then a ps_program. Every candidate that the planner evaluates has one. Pure.
 *
 * Tensors here are virtual: a space, a size and a lifetime in program order [first op, last op).
 * The memory map gives each an offset such that tensors alive at the same time never overlap. The
 * engine derives the hazards of the shared memory. */
#ifndef PS_STEP_STEP_H
#define PS_STEP_STEP_H
#include "model/model.h"
#include "optim/optim.h"
#include "step/layout.h"
#include "step/places.h"
#include <penstock/plan.h>

enum {
  PS__PHASE_FORWARD = 0,
  PS__PHASE_HEAD = 1,
  PS__PHASE_BACKWARD = 2,
  PS__PHASE_UPDATE = 3,
  PS__PHASE_RECOMPUTE = 4
};

/* ---- decisions ------------------------------------------------------------------------------- */
typedef struct ps__spec {
  const ps_model *model; /* borrowed */
  uint32_t recipe;       /* a row of ps__recipes */
  ps_optimizer optimizer;
  uint32_t backend, cudnn_version;  /* of the device streams: for scratch */
  bool deterministic, one_document; /* one_document: every sequence is one document */
  uint64_t chunk_tokens, chunks_per_round, first_round_chunks, first_rounds, head_slice;
  bool clip; /* updates wait for the norm */
  /* Updates are clipped by the norm of the step before. Excludes clip. */
  bool clip_previous;
  /* No trained unit has memory of its own for its total on the host, but an embedding on the host:
   * ps__grad_passes(). Needs that no update waits for the norm; excludes keep_grads. */
  bool passing_grads;
  /* In program order; 0: none.
   *   param_lead  layer passes by which parameters are fetched ahead; across the end of a round,
   *               four times as many
   *   saved_lead  chunk passes by which saved activations are fetched ahead
   *   saved_lag, grad_lag  chunk passes for which device memory stays reserved while its contents
   *               go to the host */
  uint32_t param_lead, saved_lead, saved_lag, grad_lag;
  /* Chunk passes for which host memory of contributions stays reserved until they are added. The
   * host stream may thus fall behind in a backward pass and catch up in the next forward pass. */
  uint32_t sum_lag;
  /* Chunk passes after a unit's update for which the memory of its total stays reserved, where that
   * passes: by so many the updates may fall behind the backward pass. */
  uint32_t update_lag;
  uint32_t sum_threads; /* that add gradients on the host; 0: all of the host stream's */
  /* Streamed blocks among the first so many keep their parameters across rounds: from a round's
   * backward pass to the next round's forward pass. There the memory of saved activations is
   * free. */
  uint32_t blocks_kept;
  /* n_layers: blocks; n_chunks: chunks of the largest round; n_saved: the most that a layer may
   * save */
  uint32_t n_units, n_layers, n_chunks, n_saved;
  /* n_devices rounds run at once. All devices fetch from the host, where contributions are added in
   * the order of the rounds, and totals are complete. Updates are on the host, or each on one of
   * the devices (ps__updater()), to which the total then comes. */
  uint32_t n_devices;
  /* 0: round r runs on device r mod n_devices. Else layers are dealt to the devices in a ring, so
   * many consecutive blocks at a time: ps__device_of(). A chunk's activations go from device to
   * device, and so do their gradients; with ring_by_host through host memory. */
  uint32_t ring_blocks;
  bool ring_by_host;
  /* Hosts that train together, each with a part of the step's sequences: the program is that of one
   * of them. Totals and updates are on the host. A unit's total is complete when those of all hosts
   * are added to each other (EXCHANGE).
   * over_nccl: by way of the first device's memory (hosts/net.h), which costs depend on alone */
  uint32_t n_hosts;
  bool over_nccl;
  /* [n_units], with several devices: each of them fetches a piece of the unit from the host and
   * sends it to the others; and each adds the contributions to a piece of the unit's total, which
   * crosses its link to the host and back once for all rounds that run at once. All sums are those
   * of the host, in its order. Not the embedding of a tied model, nor one on the host
   * (pieces.c). In a ring the head's alone, which all devices have. */
  uint8_t *in_pieces;
  /* [n_units]. grad_resident: the total is on the device from its first contribution to the last.
   * With several devices only units in pieces may have it: their pieces stay on their devices. */
  uint8_t *param_resident, *grad_resident;
  /* [n_units]: optimizer state is device-resident and the update runs on the device. Needs
   * param_resident, and grad_resident where the total has several contributions. Excludes several
   * devices. */
  uint8_t *update_resident;
  /* [n_units]: optimizer state is on the host, the update runs on the device. The state comes to
   * the device for the update and goes back after it. It comes as soon as the unit's total is
   * complete where param_lead is not 0, else right before the update. The gradient stays on the
   * device from its last contribution on; with several devices it comes from the host with the
   * state (ps__total_on_device()). Excludes update_resident. */
  uint8_t *update_streamed;
  /* [n_units], with update_streamed: optimizer state stays on the device, so that weights and a
   * master copy alone come and go. */
  uint8_t *state_held;
  /* [n_units]: the update on the host runs in two parts, so that the next step's first forward pass
   * waits for less. The weights' part runs in forward order among the other updates; the state's
   * parts run after all of these, from the last unit to the first. Until then the unit's gradient
   * stays, and no saved activation is an alias of it. Needs clipping, an update on the host and
   * an optimizer that splits (not SGD); excludes an embedding on the host. */
  uint8_t *update_split;
  /* Host memory that is not pinned whole (docs/design/memory.md, "What need not be pinned").
   *   pageable        tensors of the host that no link touches come first in its memory map:
   *                   ps__step.pageable_bytes
   *   stage_totals    the first contribution to a total, too, comes into staging memory; the host
   *                   copies it. No saved activation lies in a gradient's memory
   *   stage_weights   [n_units] parameters are fetched by way of staging memory
   *   pinned_weights  weights are pinned although the step may not fetch them: text is sampled
   *                   beside it */
  bool pageable, stage_totals, pinned_weights;
  uint8_t *stage_weights;
  /* [n_units]: optimizer state is on the disk. It comes to the host for the update, which runs
   * there, and goes back after it (disk.c). Needs `disk`: the places of the step have a disk.
   * Excludes update_resident, update_streamed and update_split, and unit 0: the rows of an
   * embedding on the host are updated wherever they are looked up.
   *   disk_lead  how many units' state is read ahead */
  uint8_t *state_on_disk;
  uint32_t disk_lead;
  bool disk;
  /* The embedding's table is never on the device: its rows are gathered on the host, and their
   * gradients are added there. Untied models only; unit 0 is then device-resident in no way and
   * updated on the host. */
  bool embed_on_host;
  /* gradients are copied to the host even where the update does not need them there */
  bool keep_grads;
  /* logits are copied to the host for a LOGITS hook */
  bool keep_logits;
  /* The step looks for values that are not finite (train/replay.c). What each op of a layer writes
   * is checked, no gradient leaves the device, and nothing is updated. Needs clipping. */
  bool checked;
  /* [n_layers: blocks from 0][n_chunks][n_saved], PS_POLICY_*. A block's input may be
   * PS_POLICY_RECOMPUTE in all its chunks: ps__input_again() */
  uint8_t *policy;
} ps__spec;
static inline uint8_t *ps__spec_policy(const ps__spec *s, uint32_t layer, uint32_t chunk,
                                       uint32_t saved) {
  return &s->policy[((size_t)layer * s->n_chunks + chunk) * s->n_saved + saved];
}
static inline bool ps__updated_on_device(const ps__spec *s, uint32_t unit) {
  return s->update_resident[unit] || s->update_streamed[unit];
}
/* ps__updater() - the device that updates the unit, where a device does. Layers are dealt to the
 * devices one at a time, so that each holds the state of as many. In a ring of single blocks
 * (ring_blocks 1) it is the device that runs the block. It depends on the number of devices alone,
 * so that state stays where it is when a training goes on with another plan.
 * ps__updater_of_layer() - the same by the unit's layer. */
static inline uint32_t ps__updater_of_layer(uint32_t layer, uint32_t n_devices) {
  return layer ? (layer - 1) % n_devices : 0;
}
static inline uint32_t ps__updater(const ps__spec *s, uint32_t unit) {
  return ps__updater_of_layer(s->model->unit[unit].layer, s->n_devices);
}
/* ps__total_on_device() - whether the unit's total is complete on the device that updates it. With
 * several devices it is complete on the host in any case. */
static inline bool ps__total_on_device(const ps__spec *s, uint32_t unit) {
  return ps__updated_on_device(s, unit) && s->n_devices == 1;
}
/* ps__state_on_device() - whether the unit's optimizer state outlives steps there. */
static inline bool ps__state_on_device(const ps__spec *s, uint32_t unit) {
  return s->update_resident[unit] || s->state_held[unit];
}
/* ps__input_again() - whether the input of @block, counted from 1, is dropped in the forward pass.
 * Before the block's backward pass the block below runs forward again, from its own saved input,
 * which thus is not dropped. Not in a ring, where the block below may be on another device. */
static inline bool ps__input_again(const ps__spec *s, uint32_t block) {
  const ps__layer_def *d = ps__layer_of(s->model, block);
  return block >= ps__first_trained(s->model) &&
         *ps__spec_policy(s, block - 1, 0, (uint32_t)d->tensor[d->input].saved) ==
             PS_POLICY_RECOMPUTE;
}
/* ps__stages_total() - whether no contribution to the unit's total on the host is copied to it: its
 * update reads the total there, and so do other hosts by TCP alone. */
static inline bool ps__stages_total(const ps__spec *s, uint32_t unit) {
  return s->stage_totals && !ps__updated_on_device(s, unit) && !s->in_pieces[unit] && !s->over_nccl;
}
/* ps__grad_passes() - whether the unit's total on the host is alive from its first contribution to
 * its update alone. */
static inline bool ps__grad_passes(const ps__spec *s, uint32_t unit) {
  return s->passing_grads && !(unit == 0 && s->embed_on_host);
}
/* ps__weights_stay() - whether the unit's weights are on the device from the prologue on and are
 * never fetched: they are resident, and either frozen or updated on the device. Of several devices
 * all fetch what one of them has updated. */
static inline bool ps__weights_stay(const ps__spec *s, uint32_t unit) {
  return s->param_resident[unit] && (ps__total_on_device(s, unit) || s->model->unit[unit].frozen);
}
/* ps__device_of() - the device that runs @layer for a round r, where @at is r mod n_devices. In a
 * ring a device runs its blocks for all rounds, the one of the first block the embedding too, and
 * the head is dealt by rounds; of one round by sections (ps__deal_head()).
 * ps__may_read() - whether device @d runs a layer that reads the unit's parameters. */
static inline uint32_t ps__device_of(const ps__spec *s, uint32_t layer, uint32_t at) {
  if (s->ring_blocks == 0 || layer == ps__head_layer(s->model))
    return at;
  return layer == 0 ? 0 : (layer - 1) / s->ring_blocks % s->n_devices;
}
static inline bool ps__may_read(const ps__spec *s, uint32_t unit, uint32_t d) {
  return ps__device_of(s, s->model->unit[unit].layer, d) == d || (unit == 0 && ps__tied(s->model));
}
/* ps__exchanges() - whether the step talks to other hosts: it trains. */
static inline bool ps__exchanges(const ps__spec *s) {
  return s->n_hosts > 1 && !s->checked && s->model->n_trained > 0;
}
/* ps__counts_flushed() - whether a step of the model counts what FP8 flushes: it has a backward
 * pass through its blocks. */
static inline bool ps__counts_flushed(const ps_model *m) {
  return m->fp8.on && m->n_frozen < m->n_layers;
}
/* ps__counts_routed() - whether it counts the tokens of each expert, likewise.
 * ps__n_flushed() - counters of a layer, u64, of flushed values: a multiple of 8.
 * ps__n_counters() - these, where they are counted, then one for each expert.
 * ps__routed_at() - the first of those. */
static inline bool ps__counts_routed(const ps_model *m) {
  return m->cfg.n_experts && m->n_frozen < m->n_layers;
}
static inline uint32_t ps__n_flushed(const ps_model *m) { return (m->max_counted + 7) / 8 * 8; }
static inline uint32_t ps__routed_at(const ps_model *m) {
  return ps__counts_flushed(m) ? ps__n_flushed(m) : 0;
}
static inline uint32_t ps__n_counters(const ps_model *m) {
  return ps__routed_at(m) + (ps__counts_routed(m) ? m->cfg.n_experts : 0);
}
/* ps__first_saving() - the first block, from 0, that saves activations. */
static inline uint32_t ps__first_saving(const ps_model *m) {
  const uint32_t first = ps__first_trained(m);
  return first ? first - 1 : 0;
}
/* What UPDATE makes of the unit's update; UPDATE_STATE makes the rest. */
static inline ps__update_part ps__update_part_of(const ps__spec *s, uint32_t unit) {
  return s->update_split[unit] ? PS_UPDATE_WEIGHTS : PS_UPDATE_WHOLE;
}
/* ps__spec_init() - everything recomputed but the blocks' inputs, nothing device-resident.
 * Errors: PS_ENOMEM. Freed by ps__spec_free(). */
ps_status ps__spec_init(ps__spec *s, const ps_model *m, const ps__layout *l);
/* ps__spec_init_beside() - the same, for a step that takes turns with that of @of: its recipe,
 * optimizer, machine and slices of the head, and where its embedding is. Errors: PS_ENOMEM. */
ps_status ps__spec_init_beside(ps__spec *s, const ps_model *m, const ps__layout *l,
                               const ps__spec *of);
/* ps__spec_copy() - a copy that owns its arrays. Errors: PS_ENOMEM. */
ps_status ps__spec_copy(ps__spec *dst, const ps__spec *src);
void ps__spec_free(ps__spec *s);

/* ---- host ops: what the trainer does inside the program -------------------------------------- */
/* One function serves all hooks. Pointers, by what:
 *   LOAD    W batch (the whole host batch)
 *   COUNT   with several hosts: RW batch. LOAD has put this host's valid targets into the header;
 *           COUNT replaces them by those of all hosts, and the chunks' scales by theirs
 *   LOGITS  R logits of a head slice. Its `unit` is the slice's first token of the step. After it
 *           the slice's memory on the host is reused.
 *   LOSS    R batch, R row_loss f32[step tokens, columns], W stats.loss to valid_tokens
 *   EXCHANGE  with several hosts: RW the unit's total, which becomes that of all hosts
 *   NORM    R norms f64[n_units][ps__norm_slots()], W the second half of stats: its step last,
 *           and on success only
 *   UPDATE  the operands of ps__update_operands() (optim/optim.h). The gate is, with clipping, the
 *           second half of stats; without, the unit's norms and, on the device, the batch header.
 *           With clip_previous, on the device, a last pointer more: R the second half of stats,
 *           which is of the step before.
 *           Runs on the host stream, or on compute over device memory. On a GPU every pointer is to
 *           device memory. Writes nothing when the step in stats is not its own (on the device
 *           without clipping: in the batch header): the host then gave its step up
 *           (engine/backend.h).
 *   UPDATE_STATE  the state's part of a split update, of which UPDATE is the weights' part. On the
 *           host stream.
 *   GATHER  R token ids of a chunk; R the second half of stats (without clipping: the embedding's
 *           norms); W the tokens' rows of the table; R the table's gradient. Its `unit` is the
 *           step's chunk. The previous step's UPDATE of an embedding on the host runs at the same
 *           time: the trainer orders the two row by row (train/rows.c). That UPDATE ends before
 *           this step's next op on the table or its gradient, which comes after the chunk's
 *           backward pass.
 *   REPORT  R stats; where something is counted, R the counters
 *           u64[n_devices][n_layers][ps__n_counters()] of the model's layers; where units are
 *           updated on the device, R what is copied to the host last. Of a checked step: R
 *           f64[n_checks], a sum of squares for each check */
typedef enum ps__hook {
  PS__HOOK_LOAD,
  PS__HOOK_COUNT,
  PS__HOOK_LOGITS,
  PS__HOOK_LOSS,
  PS__HOOK_EXCHANGE,
  PS__HOOK_NORM,
  PS__HOOK_UPDATE,
  PS__HOOK_UPDATE_STATE,
  PS__HOOK_GATHER,
  PS__HOOK_REPORT
} ps__hook;
typedef struct ps__step_hooks {
  void *ctx;
  ps_status (*fn)(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch);
} ps__step_hooks;
/* Arguments of a host op. what: ps__hook. */
typedef struct ps__args_hook {
  ps__step_hooks *hooks;
  uint32_t what, unit;
} ps__args_hook;
/* ps__norm_slots() - sums of squares that are reserved for each unit: one for each of its spans,
 * rounded up to 16, 128 bytes, so that units share no cache line. */
static inline uint32_t ps__norm_slots(const ps_model *m) { return (m->max_spans + 15) / 16 * 16; }
/* Different ops write the two halves, so each has 64 bytes of its own. */
typedef struct ps__step_stats {
  double loss;
  double z_loss, objective; /* of ps_step_metrics */
  /* the batch has it too, but a late reader of the batch would hold back the next one */
  uint64_t valid_tokens;
  double right; /* of ps_step_metrics */
  uint64_t pad0[3];
  double norm;
  float clip_scale;
  uint32_t pad1;
  uint64_t step; /* 1 + the run's step that norm and clip_scale are of */
  uint64_t pad2[5];
} ps__step_stats;

/* The batch: a 64-byte header, then for each chunk
 *   tokens, targets, doc_start, position   int32[T] each, 64-byte aligned
 *   scale                                  float 1/valid tokens, in 64 bytes
 * A chunk's part is copied to the device as it is. */
typedef struct ps__batch_header {
  uint64_t valid_tokens;
  /* 1 + the run's step that the batch is of; LOAD writes it last, and on success only */
  uint64_t step;
  uint64_t pad[6];
} ps__batch_header;
/* Offsets in a chunk's part of the batch, BYTES. */
typedef struct ps__batch_chunk {
  uint64_t tokens, targets, doc_start, position, scale, bytes;
} ps__batch_chunk;
ps__batch_chunk ps__batch_chunk_of(uint32_t n_tokens);

/* ---- the step -------------------------------------------------------------------------------- */
/* A virtual tensor, alive from op first to before op last; a persistent one always.
 *   high      where ps__memmap() places it
 *   pageable  of the host and persistent, and no link touches it: it need not be pinned
 *   sectors   its offset is a multiple of PS__SECTOR_BYTES, and so are its bytes: it is copied from
 *             or to the disk
 *   alias_of  not 0: the tensor is an alias of vt[alias_of - 1], its owner, and has no memory of
 *             its own. @offset is then in the owner, until ps__step_map() adds the owner's offset.
 * The owner may be an alias too, which then comes before its alias in vt. A chain has at most
 * PS__MAX_ALIAS_DEPTH aliases: a saved activation lies in a gradient, and the gradient of a step
 * that is mapped over another one lies in the memory of that step. */
enum { PS__MAX_ALIAS_DEPTH = 2, PS__SECTOR_BYTES = 4096 };
typedef struct ps__vt {
  uint64_t bytes, offset;
  uint32_t first, last, alias_of;
  uint8_t space;
  bool persistent, high, pageable, sectors;
} ps__vt;
typedef struct ps__vaccess {
  uint32_t vt, mode;
  uint64_t offset, bytes;
} ps__vaccess;
typedef struct ps__vop {
  const ps_kernel *kernel;
  /* args, access: indices into the step's pools */
  uint32_t stream, args, args_bytes, access, n_access;
  ps_work work;
  ps_tag tag;
} ps__vop;

enum { PS__NO_VT = UINT32_MAX };
/* Tensors of a unit, n elements each; PS__NO_VT: none.
 *   weights, master  on the host; master where the recipe has one and the unit is not frozen
 *   grad             on the host; none where no gradient is copied there, or where it passes
 *                    (ps__grad_passes()): it is one while ops are emitted, and none afterwards
 *   state            state[k] of the optimizer's states, PS__NO_VT past them: on the device that
 *                    updates the unit where ps__state_on_device(), on the disk where
 *                    state_on_disk[unit], else on the host
 *   device_weights   [n_devices] where parameters are device-resident, on devices that read them
 *   device_master    where the update is device-resident and there is a master
 * After every step the host has the unit's state: the master copy where there is one, else the
 * weights; and the states that are on the host. The weights beside a master copy do not
 * follow it where the device's weights stay (ps__weights_stay()): readers take the master copy
 * (PS__ARRAY_UPDATED). The prologue, which sends these weights, comes before the first update. */
typedef struct ps__unit_host {
  uint32_t weights, master, grad, state[PS_MAX_STATES];
  uint32_t device_weights[PS_MAX_DEVICES], device_master;
  uint64_t n;
} ps__unit_host;

/* What is checked: what an op with this tag writes. */
typedef struct ps__check {
  ps_tag tag;
  const ps_kernel *kernel;
} ps__check;

typedef struct ps__step {
  const ps_model *model;
  const ps__layout *layout;
  const ps__spec *spec;
  const ps__recipe *recipe;
  const ps__places *at; /* whose numbers spaces and streams have */
  ps_dtype dt;          /* recipe->weights: of parameters on the device, and of activations */
  /* the program: pools of tensors, ops, accesses and arguments */
  ps__vt *vt;
  ps__vop *op;
  ps__vaccess *access;
  char *args;
  size_t n_vt, cap_vt, n_op, cap_op, n_access, cap_access, n_args, cap_args;
  bool out_of_memory;
  /* sums: contributions of the layout. of_step: of the full step, where the layout leaves rounds
   * out (ps__search_space_shorten()). */
  ps__contributions sums, of_step;
  /* tensors on the host */
  ps__unit_host *unit_host; /* [n_units] */
  uint64_t *batch_offset;   /* [n_chunks] BYTES from the batch's start */
  uint32_t batch, row_loss, norms, stats;
  uint32_t counters; /* the counters of REPORT, or PS__NO_VT */
  ps__check *check;  /* [n_checks] of a checked step, in its order */
  size_t n_checks, cap_checks;
  /* results */
  uint64_t space_bytes[PS_MAX_PLACES];     /* the memory map's peaks */
  uint64_t pageable_bytes;                 /* the host's first so many need not be pinned */
  uint64_t staged_bytes;                   /* of a step: that the host copies for its links */
  uint64_t saved_bytes[PS_N_POLICIES];     /* by policy, of the largest round */
  uint64_t copied_bytes[PS__N_DIRECTIONS]; /* of a step */
  double update_bytes;                     /* of a step: what updates on the host read and write */
  double model_flops, recompute_flops;
  size_t scratch_bytes[PS_MAX_STREAMS];
} ps__step;

/* ps__step_emit() - emit the step of @spec; memory is not mapped yet. model, layout and spec are
 * borrowed as long as the step lives, hooks as long as schedules made from it live.
 * Errors: PS_ENOMEM, PS_EINTERNAL. Freed by ps__step_free(). */
ps_status ps__step_emit(ps__step *s, const ps_model *model, const ps__layout *layout,
                        const ps__spec *spec, ps__step_hooks *hooks);
/* ps__step_emit_in() - the same in the arrays of an earlier step: a search emits hundreds of steps.
 * It takes the arrays out of @arrays, also where it fails.
 * ps__step_leave() - ps__step_free(), which leaves the arrays in @arrays. Those there are freed.
 * ps__step_arrays_free() - free them. Empty ones are all zero. */
typedef struct ps__step_arrays {
  ps__vt *vt;
  ps__vop *op;
  ps__vaccess *access;
  char *args;
  size_t cap_vt, cap_op, cap_access, cap_args;
} ps__step_arrays;
ps_status ps__step_emit_in(ps__step *s, ps__step_arrays *arrays, const ps_model *model,
                           const ps__layout *layout, const ps__spec *spec, ps__step_hooks *hooks);
void ps__step_leave(ps__step *s, ps__step_arrays *arrays);
void ps__step_arrays_free(ps__step_arrays *arrays);
/* ps__step_map() - give the tensors their offsets; fill space_bytes. Errors: PS_ENOMEM. */
ps_status ps__step_map(ps__step *s);
/* ps__step_map_over() - map the emitted step @s so that it may run whenever no step of @t, which is
 * mapped, is in flight: weights, state, batch, losses and stats lie where those of @t do, and all
 * else lies past the persistent tensors of @t. @s must have no more tokens than @t, the same units,
 * and of a unit no persistent tensor that @t lacks. It is a forward-only or a checked step, or
 * has the spec of @t. space_bytes counts the tensors of @t that persist.
 * Errors: PS_ENOMEM, PS_EINTERNAL.
 * ps__step_persistent_bytes() - BYTES of the space's persistent tensors, which come first in its
 * map: past them everything is free between two steps.
 * ps__step_widen() - let arenas and scratch of @s be large enough for @by too. */
ps_status ps__step_map_over(ps__step *s, const ps__step *t);
uint64_t ps__step_persistent_bytes(const ps__step *t, uint32_t space);
void ps__step_widen(ps__step *s, const ps__step *by);
/* ps__step_build() - emit and map. On an error nothing is left to free. */
ps_status ps__step_build(ps__step *s, const ps_model *model, const ps__layout *layout,
                         const ps__spec *spec, ps__step_hooks *hooks);
void ps__step_free(ps__step *s);
/* ps__step_program() - the step as a program of the engine, with addresses. Errors: PS_ENOMEM.
 * ps__step_bare_program() - replaces @p's ops by the step's, without their arguments: what must
 * wait for what does not depend on them. It cannot be executed. */
ps_status ps__step_program(const ps__step *s, ps_program **out);
ps_status ps__step_bare_program(const ps__step *s, ps_program *p);
/* ps__is_host_update() - whether an op of the step is an optimizer's update on the host. */
bool ps__is_host_update(const ps__step *s, const ps__vop *op);

/* ps__step_prologue() - the program that runs once before the first step. It copies weights that
 * stay on the device. Where optimizer state is device-resident it copies the master copy too, and
 * with @new_state it sets the states to zero. @out NULL where there is nothing to do. Errors:
 * PS_ENOMEM. */
ps_status ps__step_prologue(const ps__step *s, bool new_state, ps_program **out);
/* ps__memmap() - give every tensor of a space its offset; returns the peak in BYTES, or UINT64_MAX
 * when memory is out.
 * Persistent tensors come first, pageable ones before the others. Then the longest-lived tensor
 * comes first. Each gets the lowest offset where it overlaps nothing alive
 * at the same time. One marked high gets the highest offset below the size that the map will have,
 * estimated. Parameters kept across rounds are high: their lifetimes are nested around the boundary
 * of two rounds, those of saved activations around the forward/backward boundary. So two stacks
 * grow from the two ends of the memory. */
uint64_t ps__memmap(ps__vt *vt, size_t n, uint32_t space);
/* ps__memmap_aligned() - BYTES that a tensor of so many takes of a map. */
static inline uint64_t ps__memmap_aligned(uint64_t bytes) { return (bytes + 255) / 256 * 256; }
/* ps__memmap_bound() - the most BYTES alive at once: no map of the space is smaller. UINT64_MAX
 * when memory is out. */
uint64_t ps__memmap_bound(const ps__vt *vt, size_t n, uint32_t n_ops, uint32_t space);
/* ps__memmap_valid() - whether a space's map of @bytes holds: no two tensors of the same alias
 * depth that are alive at the same time overlap, all lie within @bytes, and an alias lies within
 * its owner and its owner's life. For asserts and tests; offsets as ps__step_map() leaves them.
 * Time: O(n log n). Errors: none. */
bool ps__memmap_valid(const ps__vt *vt, size_t n, uint32_t space, uint64_t bytes);
/* ps__step_valid() - whether an emitted step holds, mapped or not:
 *   - every access lies within its tensor and its tensor's lifetime;
 *   - no op reads a tensor that no earlier op wrote, persistent ones apart;
 *   - no op uses a tensor while an alias has its memory;
 *   - every tensor is freed, fetched parameters among them;
 *   - a copy moves as many bytes as it reads, along the link of its stream or, on a stream of the
 *     host, inside its memory; along a link it touches nothing that is pageable;
 *   - the tensors of any other op are at its stream's place;
 *   - every total has all its contributions, added in their order.
 * For asserts and tests. Time: O(ops). Errors: none. */
bool ps__step_valid(const ps__step *s);
#endif
