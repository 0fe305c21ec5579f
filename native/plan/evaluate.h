/* evaluate.h - the evaluation of a candidate: its ops, its memory, its time by simulation; and the
 * state of a search. */
#ifndef PS_PLAN_EVALUATE_H
#define PS_PLAN_EVALUATE_H
#include "plan/candidates.h"
#include <pthread.h>

enum { PS__N_BEST = 8 };
typedef struct ps__fastest {
  double ns;
  ps__candidate candidate;
} ps__fastest; /* ns 0: none */

/* What the caller's progress function is told. The searches of a plan share it, and run at once. */
typedef struct ps__search_watch {
  pthread_mutex_t lock;
  ps_plan_progress_fn fn; /* NULL: nobody watches */
  void *user;
  uint64_t n_evaluated;
  double best_ns; /* 0: none fits so far */
} ps__search_watch;

/* The arrays of the last evaluation, for the next one: a search has hundreds of evaluations. All
 * zero: there are none. */
typedef struct ps__evaluation_arrays {
  ps__step_arrays step;
  ps_program *bare_program; /* ps__step_bare_program() */
  ps_sim_cost *cost;        /* [n_cost] */
  size_t n_cost;
} ps__evaluation_arrays;
void ps__evaluation_arrays_free(ps__evaluation_arrays *arrays);

typedef struct ps__search {
  ps_plan *plan;
  ps__memo *memo; /* shared by searches of one model, batch and machine, whatever their caps */
  ps__search_result *out;
  ps__search_watch *watch;
  ps__search_space space;
  ps__fastest best[PS__N_BEST]; /* of all evaluated, the fastest first */
  /* of each configuration two, far apart: the fastest that streams all blocks' parameters, and the
   * fastest that keeps some on the device */
  ps__fastest fastest[2 * PS__MAX_MICROBATCHES];
  uint64_t cap[PS__N_MEMS], machine; /* BYTES by place; the machine's host memory */
  double below_ns;                   /* 0, or the time that a plan must be faster than */
  uint64_t best_miss;                /* BYTES by which the nearest candidate misses the caps */
  uint64_t n_ops;                    /* emitted and simulated so far */
  uint8_t *evaluated;                /* [space.n_candidates] 1: evaluated */
  ps__evaluation_arrays arrays;      /* each search's own */
  /* evaluate steps with all their rounds, although shorter ones tell nearly the same */
  bool whole;
  /* BYTES of the optimizer state of the first so many blocks: of all, and of those that one device
   * holds, the one that holds the most (held.c) */
  uint64_t held_bytes[256], held_there[256];
  uint64_t held_totals[256];           /* BYTES of totals that these blocks may lack on the host */
  int kind;                            /* of the candidates: ps__kind_of() */
  bool large;                          /* not all candidates can be evaluated */
  bool prune;                          /* skip by the slack below, and what is evaluated */
  bool winners_only;                   /* what cannot be faster than the best is not simulated */
  double factor[PS__MAX_MICROBATCHES]; /* simulated time over estimate, by configuration */
  /* the least that evaluated candidates took beyond their bounds, BYTES; 0: none evaluated */
  uint64_t slack[PS__MAX_MICROBATCHES][PS__N_RESIDENCIES][PS__N_AHEADS][PS__N_MEMS];
  /* that no step goes below, whatever it saves (ps__known.least_ns); 0: not known */
  double least_ns[PS__MAX_MICROBATCHES][PS__N_RESIDENCIES][PS__N_AHEADS];
} ps__search;

/* What evaluating a candidate gives, as far as it went. */
typedef struct ps__known {
  uint64_t n_op;                 /* of the step's ops; 0: nothing is known */
  uint64_t at_least[PS__N_MEMS]; /* BYTES that no memory map goes below */
  uint64_t bytes[PS__N_MEMS];    /* exact, where mapped */
  double least_ns;               /* that no simulated step goes below; 0 in a large search space */
  double ns;                     /* a simulated step, where > 0 */
  bool mapped;
  uint8_t threads; /* ps__candidate.threads with which a step takes ns */
} ps__known;

/* A candidate under evaluation. Its ops are emitted when something is not known yet. */
typedef struct ps__evaluation {
  ps__candidate candidate;
  ps__known known;
  uint64_t bytes[PS__N_MEMS]; /* all that the caps count: at least; once mapped, exactly */
  bool mapped;                /* bytes are exact */
  /* of the emitted step */
  ps__spec spec;
  ps__step step;
  uint64_t missing;    /* host BYTES that a step with all its rounds takes more; in bytes already */
  uint32_t n_left_out; /* rounds that the step lacks */
  bool emitted, step_mapped;
} ps__evaluation;

/* ---- memo.c: what is known of candidates ----------------------------------------------------- */
/* Neither the bytes nor the time of a candidate depend on caps. So searches under different caps
 * share them: the searches of one plan, and those of a grid (ps__memo_create() is in plan_impl.h).
 * A search finds the same and counts the same work with and without a memo. Any thread. */
/* ps__memo_get() - what is known of @m; @whole: of its step with all rounds. */
ps__known ps__memo_get(ps__memo *memo, const ps__candidate *m, bool whole);
/* ps__memo_put() - @known is kept where it says more than what is there; forgotten where memory
 * runs out. */
void ps__memo_put(ps__memo *memo, const ps__candidate *m, bool whole, const ps__known *known);

/* ---- evaluate.c ------------------------------------------------------------------------------ */
/* ps__budget() - the ops to spend, where @ops are spent for a model of up to 32 layers. A deeper
 * model gets more in proportion, as each of its evaluations costs more, up to PS__BUDGET_LAYERS. */
enum { PS__BUDGET_LAYERS = 64 };
uint64_t ps__budget(const ps__search *s, uint64_t ops);
/* ps__fits() - whether so many bytes are within both caps and the machine's memory.
 * ps__fits_under() - the same under other caps.
 * ps__host_taken() - the part of them that is the machine's host memory. On the CPU backend that is
 * all of them: its device is an arena in host memory. */
bool ps__fits(const ps__search *s, const uint64_t bytes[PS__N_MEMS]);
bool ps__fits_under(const ps__search *s, const uint64_t cap[PS__N_MEMS],
                    const uint64_t bytes[PS__N_MEMS]);
uint64_t ps__host_taken(const ps__search *s, const uint64_t bytes[PS__N_MEMS]);
/* ps__evaluate_begin() - in bytes what no map of the candidate goes below. ps__evaluate_map() - the
 * bytes exactly. Errors: PS_ENOMEM. ps__evaluation_end() - release it, and tell who watches. */
ps_status ps__evaluate_begin(ps__search *s, const ps__candidate *m, ps__evaluation *e);
ps_status ps__evaluate_map(ps__search *s, ps__evaluation *e);
void ps__evaluation_end(ps__search *s, ps__evaluation *e);
/* ps__evaluate_time() - map the candidate where it may fit. Where it fits, simulate it with each
 * number of threads for sums, keep the best number, and note the candidate among the best.
 * @out_ns  of a step; 0 where the candidate does not fit or, with s->winners_only, cannot be faster
 *          than the best. Errors: PS_ENOMEM. */
ps_status ps__evaluate_time(ps__search *s, ps__candidate *m, ps__evaluation *e, double *out_ns);
/* ps__least_ns() - ns that no simulation of an emitted step goes below: what the busiest of its
 * streams and shared resources works, with the best number of threads for sums. Errors: PS_ENOMEM.
 * ps__evaluate_on() - ns of a step of @m, with its number of threads for sums, on a machine with
 * other rates. Errors: PS_ENOMEM. */
ps_status ps__evaluate_on(ps__search *s, const ps__candidate *m, const ps_hardware *hw,
                          double *out_ns);
ps_status ps__least_ns(const ps_hardware *hw, const ps__step *step, ps__evaluation_arrays *arrays,
                       double *out_ns);
void ps__note_best(ps__search *s, double ns, const ps__candidate *m);

/* ps__fill_device() - give @m as many parts on the device as fit, as far as a few evaluations tell,
 * and note it as ps__evaluate_time() does. Begins with the number that should fit if a step like it
 * took @taken device bytes. Where the host's memory is exceeded, fewer parts are offloaded.
 * (local_search.c)
 * @out_ns     of a step; 0: nothing fits
 * @out_taken  device BYTES of the last one evaluated; unchanged where none was
 * Errors: PS_ENOMEM. */
ps_status ps__fill_device(ps__search *s, ps__candidate *m, uint64_t taken, double *out_ns,
                          uint64_t *out_taken);

/* ps__local_search() - vary up to eight of the fastest candidates, within 15% of the best and at
 * most two of a number of tokens a round; results in s->best. Errors: PS_ENOMEM, PS_EDEVICE
 * (threads). */
ps_status ps__local_search(ps__search *s);

/* ---- search.c: one search under the caps of @s ----------------------------------------------- */
/* ps__sort_by_estimate() - the candidates, the one first that is estimated to be the fastest.
 * ps__find_candidates() - the fastest candidates under the caps, in s->best.
 * ps__find_near() - from those to the fastest plan near them, in s->best.
 * ps__find_smallest_under() - in s->out->smallest the smallest cap at each place, each with a
 * budget of its own: it is not spent on candidates that another place's cap rules out. Where there
 * is none, in s->out->any the nearest to all caps.
 * Errors: PS_ENOMEM; PS_EDEVICE (threads). */
void ps__sort_by_estimate(ps__search *s);
ps_status ps__find_candidates(ps__search *s);
ps_status ps__find_near(ps__search *s);
ps_status ps__find_smallest_under(ps__search *s);

/* ---- held.c: state of blocks on the device, where the plan holds state ----------------------- */
/* ps__held_init() - set s->held_bytes, s->held_there and s->held_totals. Needs the plan.
 * ps__blocks_to_hold() - how many blocks a candidate that takes @bytes with @held blocks holds
 * rather: as few as the host's cap asks for, and none fewer. @held where the plan holds no state.
 * ps__hold_all_that_fit() - from the bounds @bytes of @m, which holds no state, to bytes that the
 * same candidate does not go below, however many blocks it holds within the device's cap.
 * ps__without_held() - from the bytes of @m to bytes that the same candidate takes where it holds
 * none, or more: totals that it lacks because of held state are not added. */
void ps__held_init(ps__search *s);
uint8_t ps__blocks_to_hold(const ps__search *s, uint8_t held, const uint64_t bytes[PS__N_MEMS]);
void ps__hold_all_that_fit(const ps__search *s, const ps__candidate *m, uint64_t bytes[PS__N_MEMS],
                           bool likely);
void ps__without_held(const ps__search *s, const ps__candidate *m, uint64_t bytes[PS__N_MEMS]);
/* ps__evaluate_holding() - ps__evaluate_begin() of @m with as many blocks held as the host's cap
 * asks for. */
ps_status ps__evaluate_holding(ps__search *s, ps__candidate *m, ps__evaluation *e);

#endif
