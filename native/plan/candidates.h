/* candidates.h - the search space: the plans that the planner considers, whatever the caps are.
 *
 * A member is a size (tokens a chunk, chunks a round), the shares of the saved bytes that stay
 * on the device and that go home, which units stay on the device, and how far ahead transfers
 * are issued. Whether the embedding is at home follows from size and residency: where that is
 * less traffic. For every member there are bounds that cost microseconds (it cannot take less
 * time or memory) and an estimate of its time, by which the search goes. */
#ifndef PS_PLAN_CANDIDATES_H
#define PS_PLAN_CANDIDATES_H
#include "plan/plan_impl.h"

/* shares are so many parts of the saved bytes; residency is so many parts of the units */
enum { PS__SAVED_PARTS = 96, PS__UNIT_PARTS = 32 };
/* the family's grids of both shares: every so many parts. Between them the search refines */
enum { PS__DEVICE_GRID = 4, PS__HOST_GRID = 8 };
enum { PS__MAX_MICROBATCHES = 160, PS__N_AHEADS = 3, PS__N_RESIDENCIES = 10 };

/* How many parts of the units have their parameters and gradients on the device, spread evenly
 * over the model; whether the head's parameters are there in any case: where a plan takes the
 * most memory, at the turn from forward to backward, they are there anyway, so that it often
 * costs nothing; and whether all units have their optimizer state there too. */
typedef struct ps__residency {
  uint8_t params, grads, head, state;
} ps__residency;
extern const ps__residency ps__residencies[PS__N_RESIDENCIES]; /* the family's */

typedef struct ps__candidate {
  double bound_ns, estimate_ns;
  uint64_t bytes[PS__N_SPACES]; /* that it takes at least, all of what the caps count */
  ps__residency keep;
  uint8_t microbatch, device, host, ahead;
  /* share that goes home in the first round beyond what does in each: of what its additional
   * chunks save (0: their block inputs alone) or, where it has none, of what the other rounds
   * do again */
  uint8_t extra;
  /* so many blocks from the first on are updated on the device, their moments streamed: the
   * next forward pass needs them first, and the host's updates of the others get a start; 0 in
   * the family */
  uint8_t streamed;
  /* so many units, the head and the first blocks behind those, have their update split
   * (ps__spec.update_split); 0 in the family */
  uint8_t split;
  /* chunk steps beyond ahead for which contributions may wait at home to be added; 0 in the
   * family */
  uint8_t sums;
  /* which of the numbers of threads sums run on (ps__sum_threads()): on fewer, copies get more
   * of the host's memory. Set where a step's time is looked at, which is all that it changes */
  uint8_t threads;
  uint8_t residency; /* of the family's, what keep is, or is refined from */
} ps__candidate;

/* What all members of a size that have the embedding on the device, or all that have it at home,
 * have in common: from the one that keeps every saved tensor on the device. */
typedef struct ps__microbatch_base {
  double compute_ns;    /* of the compute stream without recomputation */
  double forward_ns[2]; /* of its forward passes, of a step and of the first round */
  uint64_t batch_bytes; /* copied to the device in a step */
  /* that no member goes without, saved tensors and units apart */
  uint64_t device_bytes, host_bytes;
} ps__microbatch_base;

typedef struct ps__microbatch {
  ps__layout layout;
  /* what ps__search_space_shorten() made of it: n_left_out of its rounds, all alike, are missing;
   * empty where none is */
  ps__layout shorter;
  uint32_t n_left_out;
  size_t n_ops;                /* of a step, about */
  ps__microbatch_base base[2]; /* [the embedding is at home]: of untied models both */
  /* only every third share is looked at: the step has very many ops, or its ops so little work
   * that their fixed cost decides */
  bool coarse;
} ps__microbatch;

/* Sums over the cells of a round for a pair of shares. */
typedef struct ps__saved_sums {
  double recompute_ns;               /* of a step, at least */
  uint64_t device_bytes, host_bytes; /* of the round that takes the most; at the host at least */
  double offloaded_bytes;            /* sent home, and fetched again, in a step */
} ps__saved_sums;

typedef struct ps__search_space {
  const ps_plan *plan;
  ps__cost_model cost;
  ps__block block;
  uint32_t n_microbatches;
  ps__microbatch microbatch[PS__MAX_MICROBATCHES];
  ps__candidate *candidate;
  size_t n_candidates, cap_candidates;
} ps__search_space;

/* ps__search_space_init() - all members with their time bounds, in no order. plan->model, cfg and
 * hw are set; @hooks as for ps__step_emit(). Errors: PS_ENOMEM, PS_EINVAL. Freed by
 * ps__search_space_free(), also after an error. */
ps_status ps__search_space_init(ps__search_space *sp, const ps_plan *plan, ps__step_hooks *hooks);
void ps__search_space_free(ps__search_space *sp);
/* ps__search_space_workers() - how many of @n steps to look at side by side: one a CPU, fewer where
 * steps have so many ops that their memory adds up. */
uint32_t ps__search_space_workers(const ps__search_space *sp, uint32_t n);
/* ps__search_space_shorten() - a layout with at most PS__ROUNDS_EVALUATED rounds for each size that
 * has more: the first, the last and some of those between, whose time the others take too.
 * Errors: PS_ENOMEM. */
enum { PS__ROUNDS_EVALUATED = 5 };
ps_status ps__search_space_shorten(ps__search_space *sp);
static inline const ps__layout *ps__microbatch_layout(const ps__microbatch *mb) {
  return mb->n_left_out ? &mb->shorter : &mb->layout;
}
/* ps__candidate_spec() - the decisions of a member, of the family or refined from one, for its
 * size's layout or the shorter one; freed by ps__spec_free(). */
ps_status ps__candidate_spec(const ps__search_space *sp, const ps__candidate *m,
                             const ps__layout *l, ps__spec *out);
/* ps__saved_part_bytes(), _unit_part_bytes() - BYTES of device memory of one part of the
 * shares, and of one of the units' parameters. */
double ps__saved_part_bytes(const ps__search_space *sp, const ps__candidate *m);
double ps__unit_part_bytes(const ps__search_space *sp);

/* ---- decisions (policy.c) -------------------------------------------------------------------- */
/* Saved items in the order in which they are worth their bytes, two where one without the other
 * saves nothing (else PS__N_SAVED). */
enum { PS__N_SAVED_SETS = 6 };
extern const uint8_t ps__saved_set[PS__N_SAVED_SETS][2];
/* in a cell of so many tokens */
uint64_t ps__saved_set_bytes(const ps__block *b, int group, uint32_t n_tokens);
/* Deals a round's cells their fates in forward order: what goes home first, then what stays,
 * each as soon as its share of the bytes seen so far allows, so that both are spread evenly over
 * the pass and the link is kept busy from the first layer to the last; of the rest what goes
 * home in the first round alone. @extra: a chunk that the first round has more than the others.
 * @turn: the cell that the backward pass comes to first: what it saved is on the device then in
 * any case, and stays there. */
/* extras: the first round has additional chunks */
typedef struct ps__policy_allocator {
  double device, host, extra, device_fraction, host_fraction, extra_fraction;
  bool extras;
} ps__policy_allocator;
ps__policy_allocator ps__policy_allocator_of(const ps__layout *l, const ps__candidate *m);
void ps__allocate_policies(ps__policy_allocator *d, const ps__block *b, uint32_t n_tokens,
                           bool extra, bool turn, uint8_t policy[PS__N_SAVED]);
/* of a round as large as most, or of the first; layer from 0 */
bool ps__at_boundary(const ps__search_space *sp, const ps__layout *l, uint32_t layer, uint32_t c);
bool ps__among(uint32_t unit, uint32_t parts); /* @parts of PS__UNIT_PARTS, spread evenly */
bool ps__params_stay(const ps__search_space *sp, const ps__residency *r, uint32_t unit);
/* Bytes of all rows of the embedding that a step looks up; of its table; and whether it is at
 * home: where its rows, once to the device and once back, are fewer bytes than the visits of its
 * table. */
double ps__lookup_bytes(const ps__search_space *sp, const ps__layout *l);
double ps__table_bytes(const ps__search_space *sp);
bool ps__embed_on_host(const ps__search_space *sp, const ps__layout *l, const ps__residency *r);
/* All of a member's decisions for a layout; @out freed by ps__spec_free(). */
ps_status ps__decide(const ps__search_space *sp, const ps__layout *layout, const ps__candidate *m,
                     bool embed_on_host, ps__spec *out);
#endif
