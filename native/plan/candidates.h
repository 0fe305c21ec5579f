/* candidates.h - the search space: the plans that the planner considers. It does not depend on the
 * caps.
 *
 * There is one exception: a small search space has candidates that keep the gradients of blocks on
 * the device (ps__residency.blocks), and candidates whose totals have no memory of their own on the
 * host (ps__residency.passing), only where host memory is short.
 * A candidate has:
 *   - a micro-batch configuration: tokens of a chunk, chunks of a round;
 *   - how many parts of the saved bytes stay on the device, and how many are offloaded;
 *   - a residency: which units stay on the device;
 *   - the prefetch distance.
 * Whether the embedding is on the host follows from configuration and residency: where that is
 * less traffic and optimizer state is not on the device. Each candidate has bounds of its time
 * and memory, which cost microseconds, and an estimate of its time, in whose order the search
 * evaluates. */
#ifndef PS_PLAN_CANDIDATES_H
#define PS_PLAN_CANDIDATES_H
#include "plan/plan_impl.h"

/* Saved bytes are divided in 96 parts, the units in 32. */
enum { PS__SAVED_PARTS = 96, PS__UNIT_PARTS = 32 };
/* The search space has every so many parts on the device, and offloaded. The local search varies
 * both part by part. */
enum { PS__DEVICE_GRID = 4, PS__HOST_GRID = 8 };
enum { PS__MAX_MICROBATCHES = 160, PS__N_AHEADS = 3, PS__N_RESIDENCIES = 26 };

/* Residency: how many parts of the units, spread evenly over the model, have their parameters and
 * their gradients on the device.
 *   head   the head's parameters stay there in any case. A plan takes the most memory at the
 *          forward/backward boundary, where they are on the device anyway; so this often costs
 *          nothing.
 *   state  all units have their optimizer state there too.
 *   blocks  how many parts of the trained blocks, the first ones, are updated on the device with
 *          their state on the host, and have their gradients on the device from the first
 *          contribution to the update. The host then has no memory for these gradients.
 *   passing  totals on the host live until their updates (ps__spec.passing_grads). For plans whose
 *            updates do not wait for the norm, and one round a device.
 *   again  how many parts of the pairs of blocks have the input of the upper one made again
 *          (ps__input_again()). Goes with passing. */
typedef struct ps__residency {
  uint8_t params, grads, head, state, blocks, passing, again;
} ps__residency;
/* Candidates of each kind are searched apart from the others. The last two take the least host
 * memory. */
enum { PS__KIND_USUAL, PS__KIND_BLOCKS, PS__KIND_PASSING, PS__N_KINDS };
static inline int ps__kind_of(const ps__residency *r) {
  return r->passing ? PS__KIND_PASSING : r->blocks ? PS__KIND_BLOCKS : PS__KIND_USUAL;
}
extern const ps__residency ps__residencies[PS__N_RESIDENCIES]; /* of the search space */

typedef struct ps__candidate {
  double bound_ns, estimate_ns;
  uint64_t bytes[PS__N_MEMS]; /* bounds of all that the caps count */
  ps__residency keep;
  /* number of its configuration; parts that stay on the device; parts that are offloaded; number
   * of its prefetch distance */
  uint8_t microbatch, device, host, ahead;
  /* parts that the first round offloads beyond what every round does: parts of what its additional
   * chunks save (0: their block inputs alone). Without additional chunks: parts of what the other
   * rounds recompute. */
  uint8_t extra;
  /* the first so many blocks are updated on the device with their state on the host. The next
   * forward pass needs these blocks first, and the host gets a start with the others' updates.
   * 0 in the search space, but for ps__residency.blocks; the local search varies it */
  uint8_t streamed;
  /* the first so many blocks are updated on the device and their state stays there
   * (ps__spec.state_held), where the plan holds state; 0 in the search space */
  uint8_t held;
  /* so many units, the head and the first blocks after those updated on the device, have their
   * update split (ps__spec.update_split); 0 in the search space */
  uint8_t split;
  /* chunk passes, beyond ahead, for which contributions may wait on the host to be added; 0 in the
   * search space */
  uint8_t sums;
  /* parts of the units that several devices fetch whole from the host, although they could take
   * them in pieces (ps__takes_pieces()); in the search space ps__from_host_first(); then varied */
  uint8_t from_host;
  /* which number of threads adds gradients on the host (ps__sum_threads()): with fewer, copies get
   * more of the host's memory. The simulation of a step sets it; it changes time alone */
  uint8_t threads;
  uint8_t staging;   /* the plan's (pinned.c): the same in all candidates of a search */
  uint8_t disk;      /* ps_plan.disk_level of its search */
  uint8_t residency; /* place in ps__residencies of keep, or of what the local search varied */
} ps__candidate;

/* What all candidates of a configuration have in common, by whether the embedding is on the host.
 * It is taken from the candidate that keeps every saved activation on the device. */
typedef struct ps__microbatch_base {
  double compute_ns;    /* of the compute stream, without recomputation */
  double forward_ns[2]; /* of forward passes alone: of a step, of the first round */
  uint64_t batch_bytes; /* copied to the device in a step */
  /* that every candidate takes, besides saved activations and units: on the device in the head of
   * the first round; with one device, in that of the second; on the host */
  uint64_t device_bytes[2], host_bytes;
} ps__microbatch_base;

typedef struct ps__microbatch {
  ps__layout layout;
  /* the same with n_left_out rounds fewer, all alike (ps__search_space_shorten()); empty where
   * n_left_out is 0 */
  ps__layout shorter;
  uint32_t n_left_out;
  size_t n_ops; /* of a step, about */
  /* [whether the embedding is on the host]; tied models have [0] alone */
  ps__microbatch_base base[2];
  /* the grids are three times as coarse: the step has very many ops, or ops with so little work
   * that their fixed cost decides */
  bool coarse;
} ps__microbatch;

/* What the saved activations of all (layer, chunk) cost, for given parts on the device and host. */
typedef struct ps__saved_sums {
  double recompute_ns;      /* of a step, at least */
  uint64_t device_bytes;    /* of the first round, at least */
  uint64_t second_bytes;    /* of the second round, with one device, at least */
  uint64_t host_bytes;      /* of the round that takes the most, at least */
  uint64_t unaliased_bytes; /* the same on the host, where gradients lend them no memory */
  double offloaded_bytes;   /* copied to the host, and back, in a step */
  double room_bytes; /* on all devices in a round, as ps__decide() counts it for blocks_kept */
} ps__saved_sums;

typedef struct ps__search_space {
  const ps_plan *plan;
  ps__cost_model cost;
  uint32_t n_microbatches;
  ps__microbatch microbatch[PS__MAX_MICROBATCHES];
  ps__candidate *candidate;
  size_t n_candidates, cap_candidates;
} ps__search_space;

/* ps__search_space_init() - all candidates with their bounds and estimates, in no order. Needs
 * plan->model, cfg and hw; @hooks as for ps__step_emit(). @host_bytes: what the host has; where the
 * usual ones need nearly as much, a small search space has candidates of the other kinds too.
 * Errors: PS_ENOMEM, PS_EINVAL. Freed by ps__search_space_free(), also after an error. */
ps_status ps__search_space_init(ps__search_space *sp, const ps_plan *plan, uint64_t host_bytes,
                                ps__step_hooks *hooks);
void ps__search_space_free(ps__search_space *sp);
/* ps__search_space_is_large() - whether there are too many usual candidates to evaluate all, or
 * evaluating them is not enough. Steps are evaluated with fewer of their rounds then, and the local
 * search follows. */
bool ps__search_space_is_large(const ps__search_space *sp);
/* ps__add_microbatches() - the configurations of @sp, whose plan is set, without their bases
 * (microbatches.c). Errors: PS_ENOMEM; PS_EINVAL where a step has too many ops. */
ps_status ps__add_microbatches(ps__search_space *sp);
/* ps__search_space_workers() - how many of @n steps are evaluated at once: one a CPU, fewer where
 * the memory of steps with many ops adds up. */
uint32_t ps__search_space_workers(const ps__search_space *sp, uint32_t n);
/* ps__search_space_shorten() - for each configuration with more than PS__ROUNDS_EVALUATED rounds a
 * device, a layout with so many: the first, the last and some between. The rounds left out take as
 * long as those between. Errors: PS_ENOMEM. */
enum { PS__ROUNDS_EVALUATED = 5 };
ps_status ps__search_space_shorten(ps__search_space *sp);
static inline const ps__layout *ps__microbatch_layout(const ps__microbatch *mb) {
  return mb->n_left_out ? &mb->shorter : &mb->layout;
}
/* ps__candidate_spec() - the decisions of a candidate for a layout of its configuration, whole or
 * shortened. Errors: PS_ENOMEM. @out freed by ps__spec_free(). */
ps_status ps__candidate_spec(const ps__search_space *sp, const ps__candidate *m,
                             const ps__layout *l, ps__spec *out);
/* ps__unit_bytes() - BYTES of a unit's parameters. */
static inline uint64_t ps__unit_bytes(const ps__search_space *sp, uint32_t unit) {
  const ps_model *m = sp->plan->model;
  return ps__stored_bytes(ps__unit_storage(m, unit, ps__weight_storage(m)), m->unit[unit].n);
}
/* ps__saved_part_bytes() - BYTES of device memory of one part of the saved bytes;
 * ps__offloaded_part_bytes() - of the host's memory that one part takes where it is offloaded.
 * ps__unit_part_bytes() - of one part of the units' parameters.
 * ps__total_part_bytes() - of one part of the units' totals, where these stay on the device. Of
 * totals in pieces that is one device's piece with its low bytes. */
double ps__saved_part_bytes(const ps__search_space *sp, const ps__candidate *m);
double ps__offloaded_part_bytes(const ps__search_space *sp, const ps__candidate *m);
double ps__unit_part_bytes(const ps__search_space *sp);
double ps__total_part_bytes(const ps__search_space *sp, const ps__candidate *m);

/* ---- what is saved (saved.c) ----------------------------------------------------------------- */
/* How many rounds run at once. */
static inline uint32_t ps__rounds_at_once(const ps__search_space *sp, const ps__layout *l) {
  const uint32_t n = sp->plan->at->n_devices;
  return l->n_rounds < n ? l->n_rounds : n;
}
/* What a block recomputes, by what is saved: one for each shape of a chunk and each definition.
 * ps__recompute_tables() - those of a configuration, and for each chunk the place of its first one.
 * Errors: PS_ENOMEM. The caller frees both, also after an error.
 * ps__sum_saved() - of a candidate of which keep.again, device, host and extra are set. The
 * candidate takes each sum or more; but of room_bytes, which a bound subtracts, it has as much or
 * less.
 * ps__saved_of_round() - BYTES of all that may be saved of a round. */
typedef struct ps__recompute_table ps__recompute_table;
ps_status ps__recompute_tables(const ps__search_space *sp, const ps__microbatch *mb,
                               ps__recompute_table **table, uint32_t **of_chunk);
void ps__sum_saved(const ps__search_space *sp, const ps__microbatch *mb, const ps__candidate *m,
                   const ps__recompute_table *table, const uint32_t *of_chunk, ps__saved_sums *out);
uint64_t ps__saved_of_round(const ps__search_space *sp, const ps__layout *l, uint32_t round);

/* ---- what a residency takes (residency.c) ---------------------------------------------------- */
/* ps__unit_state_bytes() - BYTES of optimizer state and master weights of a unit.
 * ps__staying_bytes() - device BYTES of the units' parameters and state that stay there, at least.
 * *totals: of the totals that are there too, from the first round's backward pass on.
 * ps__host_state_bytes() - host BYTES of parameters, optimizer state and gradients, at least.
 * ps__pageable_bytes() - what of the host's arena need not be pinned, at most. */
uint64_t ps__unit_state_bytes(const ps__search_space *sp, uint32_t unit);
uint64_t ps__staying_bytes(const ps__search_space *sp, const ps__layout *l, const ps__residency *r,
                           uint64_t *totals);
uint64_t ps__host_state_bytes(const ps__search_space *sp, const ps__layout *l,
                              const ps__residency *r);
uint64_t ps__pageable_bytes(const ps__search_space *sp, const ps__layout *l,
                            const ps__residency *r);

/* ---- decisions (policy.c) -------------------------------------------------------------------- */
/* The policy allocator gives the saved activations of a round's (layer, chunk) cells their
 * policies, cell by cell in forward order. It has an allowance for the host, one for the device
 * and one for the first round. An allowance grows with the bytes seen, by its fraction of them,
 * and shrinks by the bytes placed. A set is offloaded as soon as the host's budget allows, else
 * kept as soon as the device's does. So both are used evenly over the pass, and the link is busy
 * from the first layer to the last. What remains is offloaded in the first round alone where
 * that budget allows, which grows by its fraction of what remains; else it is recomputed. The
 * block's input is where it is made again, and never else. device, host, extra: the budgets, in
 * BYTES. *_fraction: by which they grow. extras: the first round has more chunks than the others.
 * In a ring each device has an allocator for its own layers. With one for all, a large activation
 * of every second layer would stay on one of two devices. */
typedef struct ps__policy_allocator {
  double device, host, extra, device_fraction, host_fraction, extra_fraction;
  bool extras;
} ps__policy_allocator;
/* ps__policy_allocators_of() - of each device; without a ring the first is that of all. */
void ps__policy_allocators_of(const ps__layout *l, const ps__candidate *m,
                              ps__policy_allocator out[PS_MAX_DEVICES]);
/* ps__allocate_policies() - the policies of one cell, and the budgets after it.
 * @policy    [n_saved] of the layer
 * @extra     the cell is of a chunk that only the first round has.
 * @boundary  the backward pass begins with the cell (ps__at_boundary()). What it saves is on the
 *            device then in any case, and stays there.
 * @again     the cell's input is made again: it counts in no budget, and the host's does not grow
 * ps__drops_input() - whether the input of block @layer, from 0, is made again. The blocks that may
 * save are paired from the first one on; the pairs are spread evenly. */
void ps__allocate_policies(ps__policy_allocator *d, const ps__layer_def *layer, uint32_t n_tokens,
                           bool extra, bool boundary, bool again, uint8_t *policy);
bool ps__drops_input(const ps__search_space *sp, const ps__residency *r, uint32_t layer);
/* Whether the backward pass begins with this cell, in a round of the usual size or the first. layer
 * from 0. */
bool ps__at_boundary(const ps__search_space *sp, const ps__layout *l, uint32_t layer, uint32_t c);
/* Whether @unit is among @parts of PS__UNIT_PARTS, spread evenly; in a ring over the blocks of each
 * device. A layer's units go together. */
bool ps__among(const ps__search_space *sp, uint32_t unit, uint32_t parts);
bool ps__params_stay(const ps__search_space *sp, const ps__residency *r, uint32_t unit);
/* ps__blocks_of() - the last block that is among ps__residency.blocks, counted from 1; frozen
 * blocks before it do not count as parts. 0: there is none. */
uint32_t ps__blocks_of(const ps__search_space *sp, const ps__residency *r);
/* ps__lookup_bytes() - BYTES of all embedding rows that a step looks up. ps__table_bytes() - BYTES
 * of the embedding's table.
 * The embedding is on the host where its rows, once to the device and once back, are fewer bytes
 * than its table in all layer passes. */
double ps__lookup_bytes(const ps__search_space *sp, const ps__layout *l);
double ps__table_bytes(const ps__search_space *sp);
bool ps__embed_on_host(const ps__search_space *sp, const ps__layout *l, const ps__residency *r);
/* ps__may_take_pieces() - several devices can copy to each other. */
static inline bool ps__may_take_pieces(const ps_plan *plan) {
  return plan->at->n_devices > 1 && plan->hw.link[PS_LINK_PEER].bytes_per_s > 0;
}
/* Whether several devices take the unit in pieces, unless it is an embedding on the host: they can
 * copy to each other. The embedding of a tied model has contributions of the head, too. */
bool ps__takes_pieces(const ps_plan *plan, uint32_t unit);
/* ps__from_host_first() - ps__candidate.from_host in the search space: all parts where a device's
 * link to the host is faster than the one to the other devices, else none. */
uint8_t ps__from_host_first(const ps_plan *plan);
/* ps__totals_may_stay() - whether the pieces of several devices' totals may stay on their devices
 * (ps__spec.grad_resident). Not in a ring, whose head alone is in pieces. In candidates of the
 * search space no total in pieces stays. */
static inline bool ps__totals_may_stay(const ps_plan *plan) {
  return ps__may_take_pieces(plan) && !ps__is_ring(plan) && !ps__from_host_first(plan);
}
/* All decisions of a candidate. Errors: PS_ENOMEM. @out freed by ps__spec_free(). */
ps_status ps__decide(const ps__search_space *sp, const ps__layout *layout, const ps__candidate *m,
                     bool embed_on_host, ps__spec *out);
#endif
