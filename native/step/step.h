/* step.h - a training step as a program: from decisions (a spec) to ops over tensors with
 * lifetimes, to a memory map, to a ps_program. Built once for each plan that is looked at; pure.
 *
 * Tensors here are virtual: a space, a size and a lifetime in program order [first op, last op).
 * The memory map gives each an offset so that tensors alive at the same time never overlap;
 * hazards on the shared ranges are the engine's to derive. */
#ifndef PS_STEP_STEP_H
#define PS_STEP_STEP_H
#include "model/block.h"
#include "step/layout.h"
#include <penstock/plan.h>

enum { PS__SPACE_DEVICE = 0, PS__SPACE_HOST = 1, PS__N_SPACES = 2 };
enum {
  PS__S_COMPUTE = 0,
  PS__S_H2D = 1,
  PS__S_D2H = 2,
  PS__S_HOST = 3,
  PS__S_IO = 4,
  PS__N_STREAMS = 5
};
static inline bool ps__stream_on_host(uint32_t stream) { return stream >= PS__S_HOST; }
enum {
  PS__PHASE_FORWARD = 0,
  PS__PHASE_HEAD = 1,
  PS__PHASE_BACKWARD = 2,
  PS__PHASE_UPDATE = 3,
  PS__PHASE_RECOMPUTE = 4
};

/* ---- decisions ------------------------------------------------------------------------------- */
typedef struct ps__spec {
  ps_recipe recipe;
  uint32_t backend, cudnn_version;  /* who runs the device streams: for scratch */
  bool deterministic, one_document; /* one_document: every sequence is one document */
  uint64_t chunk_tokens, chunks_per_round, first_round_chunks, head_slice;
  bool clip;
  /* How far ahead transfers are issued, in program order: parameters by visits of a unit, saved
   * tensors by chunk steps; and how many chunk steps (visits for gradients) memory that is on
   * its way home stays reserved. 0 means just in time. */
  uint32_t param_lead, saved_lead, saved_lag, grad_lag;
  /* as grad_lag, at home: memory of contributions that are to be added, so that the host stream
   * may fall behind in a backward pass and catch up in the next forward pass */
  uint32_t sum_lag;
  /* that sums of gradients at home run on; 0: all of the host stream's */
  uint32_t sum_threads;
  /* the first so many blocks, as far as they are streamed, keep their parameters from a round's
   * backward visit to the next round's forward visit: the passes are a zigzag, and at its lower
   * turn the memory of the saved tensors is free */
  uint32_t blocks_kept;
  uint32_t n_units, n_layers, n_chunks;    /* n_chunks: chunks of the largest round */
  uint8_t *param_resident, *grad_resident; /* [n_units] */
  /* [n_units]: optimizer state on the device too, and the update runs there; needs
   * param_resident, and grad_resident where gradients have several contributions */
  uint8_t *update_resident;
  /* [n_units]: optimizer state at home, the update on the device: the moments (and a master)
   * come in for it and go home after it. They come as soon as the step's gradient is complete
   * where param_lead is not 0, else right before the update; the gradient stays on the device
   * from its last contribution on. Not with update_resident */
  uint8_t *update_streamed;
  /* [n_units]: the update at home is made in two parts: the weights', in forward order among
   * the other updates, and the moments' behind all of these, from the last unit to the first:
   * the next step's first forward pass waits for less. Meanwhile the unit's gradient stays, and
   * its home is not lent to saved tensors. With clipping only, with updates at home, and not of
   * an embedding at home */
  uint8_t *update_split;
  /* the table never needs the device: its rows are gathered at home, and their gradients added
   * there. Untied models only, with unit 0 resident in no way and updated at home */
  bool embed_on_host;
  /* gradients come home even where the update does not need them there */
  bool keep_grads;
  uint8_t *policy; /* [n_layers][n_chunks][PS__N_SAVED], PS_POLICY_* */
} ps__spec;
static inline uint8_t *ps__spec_policy(const ps__spec *s, uint32_t layer, uint32_t chunk,
                                       int saved) {
  return &s->policy[((size_t)layer * s->n_chunks + chunk) * PS__N_SAVED + (size_t)saved];
}
static inline bool ps__updated_on_device(const ps__spec *s, uint32_t unit) {
  return s->update_resident[unit] || s->update_streamed[unit];
}
/* Resident parameters that are updated in place are never fetched: they are on the device from
 * the prologue on. */
static inline bool ps__weights_stay(const ps__spec *s, uint32_t unit) {
  return s->param_resident[unit] && ps__updated_on_device(s, unit);
}
/* everything recomputed, nothing resident */
ps_status ps__spec_init(ps__spec *s, const ps_model_config *m, const ps__layout *l);
ps_status ps__spec_copy(ps__spec *dst, const ps__spec *src);
void ps__spec_free(ps__spec *s);

/* ---- host ops: what the trainer does inside the program -------------------------------------- */
/* One function serves all; ptr by what:
 *   LOAD    W batch (whole host batch)
 *   LOSS    R batch, R row_loss f32[step tokens], W stats.loss and valid_tokens
 *   NORM    R norms f64[n_units][PS__MAX_UNIT_SPANS], W the second half of stats, its step last and
 *           on success only
 *   ADAMW   RW weights (fp32-master: the master), RW m, RW v, R gradient, then fp32-master: W
 *           bf16 copy, then with clipping: R the second half
 *           of stats, without: R the unit's norms and, on the device, R the batch header. On the
 *           host stream, or on compute over device
 *           memory: the same function, in which on a GPU every pointer is to device memory. It
 *           touches nothing when the step in stats
 *           (without clipping on the device: in the batch header) is not its own: the host gave
 *           its step up (engine/backend.h).
 *           A unit whose update is split: RW weights, R m, R v, and the rest alike; MOMENTS does
 *           the others
 *   MOMENTS RW m, RW v, R gradient, R the second half of stats. On the host stream; touches
 *   nothing when the step in stats is not its own
 *   GATHER  R token ids of a chunk, R the second half of stats (without clipping: the
 *           embedding's norms), W the tokens' rows of the table. Unit: the step's chunk.
 *           Runs beside the ADAMW of the step before on an embedding at home, and is ordered
 *           with it row by row by the trainer (train/rows.c), not by accesses to the
 *           table: that ADAMW has ended before the step's next op on the table or its gradient,
 *           which are behind the chunk's backward pass
 *   REPORT  R stats, then where units are updated on the device: R what comes home last */
typedef enum ps__hook {
  PS__HOOK_LOAD,
  PS__HOOK_LOSS,
  PS__HOOK_NORM,
  PS__HOOK_ADAMW,
  PS__HOOK_MOMENTS,
  PS__HOOK_GATHER,
  PS__HOOK_REPORT
} ps__hook;
typedef struct ps__step_hooks {
  void *ctx;
  ps_status (*fn)(void *ctx, ps__hook what, uint32_t unit, const ps_launch *launch);
} ps__step_hooks;
/* of a host op; what: ps__hook */
typedef struct ps__args_hook {
  ps__step_hooks *hooks;
  uint32_t what, unit;
} ps__args_hook;
enum { PS__MAX_UNIT_SPANS = 16 };
/* Written by different ops, so each half has its own 64 bytes. */
typedef struct ps__step_stats {
  double loss;
  uint64_t valid_tokens; /* from the batch: who reads it later must not hold back the next batch */
  uint64_t pad0[6];
  double norm;
  float clip_scale;
  uint32_t pad1;
  uint64_t step; /* 1 + the run's step that norm and clip_scale are of */
  uint64_t pad2[5];
} ps__step_stats;

/* The batch: a 64-byte header, then a block a chunk with tokens, targets, doc_start and position
 * (int32[T] each, 64-byte aligned) and the scale 1/valid tokens (float in 64 bytes). The same
 * block is copied to the device. */
typedef struct ps__batch_header {
  uint64_t valid_tokens;
  /* 1 + the run's step that the batch is of; LOAD writes it last and on success only */
  uint64_t step;
  uint64_t pad[6];
} ps__batch_header;
/* BYTES from the block's start */
typedef struct ps__batch_chunk {
  uint64_t tokens, targets, doc_start, position, scale, bytes;
} ps__batch_chunk;
ps__batch_chunk ps__batch_chunk_of(uint32_t n_tokens);

/* ---- the step -------------------------------------------------------------------------------- */
/* high: see ps__memmap(). alias_of: where it is not 0, the tensor lies in vt[alias_of - 1], from
 * @offset on until ps__step_map() adds that one's own; the memory map passes it over. */
typedef struct ps__vt {
  uint64_t bytes, offset;
  uint32_t first, last, alias_of;
  uint8_t space;
  bool persistent, high;
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
/* Tensors of a unit, n elements. At the host: weights, master (fp32-master only), grad, and m
 * and v unless all state is on the device; grad is PS__NO_VT where no gradient comes home.
 * device_weights: where parameters are resident; device_master: where all state is. After every
 * step home has the truth: the master where there is one, else the weights, and m and v that are
 * there. The bf16 home beside a master does not follow where the device's weights stay
 * (ps__weights_stay): read the master (ps__master_at), and the prologue, which
 * sends the bf16 home, comes before the first update. */
typedef struct ps__unit_host {
  uint32_t weights, master, grad, m, v, device_weights, device_master;
  uint64_t n;
} ps__unit_host;

typedef struct ps__step {
  const ps_model_config *cfg;
  const ps__layout *layout;
  const ps__spec *spec;
  ps__block block;
  ps_dtype dt;
  /* what was emitted */
  ps__vt *vt;
  ps__vop *op;
  ps__vaccess *access;
  char *args;
  size_t n_vt, cap_vt, n_op, cap_op, n_access, cap_access, n_args, cap_args;
  bool out_of_memory;
  ps__contributions sums, of_step; /* of the layout; of the step that it stands for */
  /* at home */
  ps__unit_host *unit_host; /* [n_units] */
  uint64_t *batch_offset;   /* [n_chunks] BYTES from the batch's start */
  uint32_t batch, row_loss, norms, stats;
  /* results */
  uint64_t space_bytes[PS__N_SPACES];  /* memory map's peaks */
  uint64_t saved_bytes[PS_N_POLICIES]; /* of the largest round */
  uint64_t copied_bytes[2];            /* a step: to the device, to the host */
  double model_flops, recompute_flops;
  size_t scratch_bytes[PS__N_STREAMS];
} ps__step;

/* ps__step_emit() - emit the step of @spec, memory not mapped yet. cfg, layout, spec and hooks
 * are borrowed as long as the step (hooks as long as schedules made from it). Errors: PS_ENOMEM,
 * PS_EINTERNAL. Freed by ps__step_free(). */
ps_status ps__step_emit(ps__step *s, const ps_model_config *cfg, const ps__layout *layout,
                        const ps__spec *spec, ps__step_hooks *hooks);
/* ps__step_map() - give its tensors their offsets and fill space_bytes. Errors: PS_ENOMEM. */
ps_status ps__step_map(ps__step *s);
/* ps__step_build() - both; on an error nothing is left to free. */
ps_status ps__step_build(ps__step *s, const ps_model_config *cfg, const ps__layout *layout,
                         const ps__spec *spec, ps__step_hooks *hooks);
void ps__step_free(ps__step *s);
/* ps__step_program() - the same as a program of the engine, addresses in place. */
ps_status ps__step_program(const ps__step *s, ps_program **out);
/* ps__step_prologue() - what must run once before the first step: weights to the device where
 * they stay; master too and moments to zero where all state is there.
 * @out NULL when there is nothing to do. */
ps_status ps__step_prologue(const ps__step *s, ps_program **out);
/* ps__memmap() - give every tensor of a space its offset; returns the peak in BYTES, or
 * UINT64_MAX when memory is out. Longest-lived first, each at the lowest offset where it
 * overlaps nothing alive at the same time; those marked high at the highest below what the map
 * will need about. Parameters are: their lifetimes are nested around the lower turn between two
 * rounds and the saved tensors' around the upper one, so that two stacks share the memory from
 * its two ends. */
uint64_t ps__memmap(ps__vt *vt, size_t n, uint32_t space);
/* ps__memmap_bound() - BYTES alive at once at most: no map of the space is smaller. UINT64_MAX
 * when memory is out. */
uint64_t ps__memmap_bound(const ps__vt *vt, size_t n, uint32_t n_ops, uint32_t space);
/* ps__memmap_valid() - whether a space's map of @bytes holds: no two tensors that are alive at the
 * same time overlap, all lie within @bytes, and an alias lies within its owner. For asserts and
 * tests; offsets as ps__step_map() leaves them. Time: O(n log n). Errors: none. */
bool ps__memmap_valid(const ps__vt *vt, size_t n, uint32_t space, uint64_t bytes);
/* ps__step_valid() - whether an emitted step holds, mapped or not:
 *   - every access lies within its tensor and its tensor's lifetime;
 *   - no op reads a tensor that no earlier op wrote, persistent ones apart;
 *   - no op uses a tensor while an alias has its memory;
 *   - every tensor is freed, fetched parameters among them;
 *   - a copy moves as many bytes as it reads, between the two spaces;
 *   - every total has all its contributions, added in their order.
 * For asserts and tests. Time: O(ops). Errors: none. */
bool ps__step_valid(const ps__step *s);
/* Parameter runs of a unit, in order: what sums of squares are taken of. At most
 * PS__MAX_UNIT_SPANS. */
uint32_t ps__unit_spans(const ps__block *b, const ps_model_config *cfg, uint32_t unit,
                        ps__span_info out[PS__MAX_UNIT_SPANS]);
#endif
