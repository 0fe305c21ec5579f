/* plan_impl.h - a plan from the inside, for the planner and the trainer. */
#ifndef PS_PLAN_IMPL_H
#define PS_PLAN_IMPL_H
#include "plan/guest.h"
#include "step/room.h"
#include "step/step.h"
#include <stdatomic.h>

/* The cut of the batch as the user gave it; 0: the planner's choice. */
typedef struct ps__asked_cut {
  uint64_t chunk_tokens, chunks_per_round, first_round_chunks, first_rounds, head_slice_tokens;
} ps__asked_cut;

/* The arenas of a plan that is made again (again.c): those that another plan has reserved. All
 * zero: arenas are as large as the plan needs.
 *   bytes, scratch  BYTES of each place's space, and of each stream's scratch
 *   used            BYTES by memory, of all that the caps count, of the plan that reserved them
 *   beside          host BYTES of that plan besides its arena
 *   spare           host BYTES that the cap leaves */
typedef struct ps__room {
  uint64_t bytes[PS_MAX_PLACES], scratch[PS_MAX_STREAMS];
  uint64_t used[PS__N_MEMS], beside, spare;
  bool given;
} ps__room;

struct ps_plan {
  ps_model *model;
  ps_plan_config cfg;    /* as given, defaults filled in */
  bool head_slice_given; /* by the user; else cfg has the least: ps__head_slice() */
  ps_hardware hw;
  const ps__places *at;
  ps__layout layout;
  ps__spec spec;
  ps__step_hooks hooks; /* filled by the trainer */
  ps__step step;
  ps_schedule *schedule;
  ps_plan_report report;
  double hfu_flops;  /* of a step: model FLOPs and all recomputation */
  ps__guests guests; /* cfg.ramp, cfg.val_tokens */
  /* cfg.sample_sequences: generation beside the training, which the trainer runs. NULL: none. */
  struct ps__gen_setup *sampling;
  uint8_t staging;    /* what candidates stage, where pinned memory is limited (pinned.c) */
  bool all_pinned;    /* the search goes on as if pinned memory were not limited */
  bool one_of_many;   /* of a table of caps: a refusal does not search for ways out */
  bool counts_guests; /* the search counts the memory of the guests (beside.c) */
  ps__asked_cut asked;
  ps__room room;
  /* with a disk: how many of PS__DISK_LEVELS parts of the state that it holds are there, and the
   * first unit whose state is; UINT32_MAX: none is (layouts.c) */
  uint32_t disk_level, disk_first;
  bool holds;            /* candidates may hold optimizer state on the device (held.c) */
  uint32_t most_workers; /* threads of a search; 0: one a CPU */
  /* of a search that another thread may end: it is not 0 any more. NULL: none may */
  const _Atomic uint32_t *abandon;
  char *text, *json;
  _Atomic uint32_t in_use; /* 1: a trainer has it */
};

static inline ps__caps ps__plan_caps(const ps_plan *p) {
  return ps__caps_of(&p->hw, p->cfg.device_mem_bytes, p->cfg.host_mem_bytes,
                     p->cfg.pinned_mem_bytes);
}
enum { PS__DISK_LEVELS = 8 };
/* ps__on_disk() - whether the plan has the unit's optimizer state on the disk.
 * ps__disk_level_set() - set disk_level and what follows from it (disk.c).
 * ps__disk_bytes() - BYTES of the state there. */
static inline bool ps__on_disk(const ps_plan *p, uint32_t unit) {
  return unit >= p->disk_first && !p->model->unit[unit].frozen;
}
void ps__disk_level_set(ps_plan *p, uint32_t level);
uint64_t ps__disk_bytes(const ps_plan *p);
/* ps__may_hold() - whether candidates can hold optimizer state on devices (held.c). */
bool ps__may_hold(const ps_plan *p);
/* ps__waits_for_norm() - whether updates wait for the norm of the whole gradient. */
static inline bool ps__waits_for_norm(const ps_plan *p) {
  return (p->cfg.clip_norm > 0 && p->cfg.clip_by == PS_CLIP_BY_STEP) ||
         p->cfg.non_finite == PS_NON_FINITE_SKIP;
}
/* ps__clips_by_previous() - whether the norm of the step before clips updates. */
static inline bool ps__clips_by_previous(const ps_plan *p) {
  return p->cfg.clip_norm > 0 && p->cfg.clip_by == PS_CLIP_BY_PREVIOUS;
}
/* ps__totals_on_host() - whether complete totals of gradients are on the host, and so are updates
 * of units that hold no state on a device: where several devices or hosts train together. */
static inline bool ps__totals_on_host(const ps_plan *p) {
  return p->at->n_devices > 1 || p->cfg.n_hosts > 1;
}

/* ps__is_ring() - layers are dealt to the devices, a block at a time.
 * ps__dealt_to() - the device that runs @layer in a ring; of the embedding and the head, device 0.
 * Without a ring 0: every device runs all layers, for its rounds. */
static inline bool ps__is_ring(const ps_plan *p) { return p->cfg.layout == PS_LAYOUT_RING; }
static inline uint32_t ps__dealt_to(const ps_plan *p, uint32_t layer) {
  return ps__is_ring(p) && ps__is_block(p->model, layer) ? (layer - 1) % p->at->n_devices : 0;
}

/* ---- the guests (guest.h) -------------------------------------------------------------------- */
/* What guests are built over: decisions of the plan, and their step, which is mapped and has all
 * its rounds. Arenas and scratch of the step widen where a guest needs more.
 * @run  make schedules and predict times; else guests tell their memory alone */
typedef struct ps__over {
  ps_plan *plan;
  const ps__layout *layout;
  const ps__spec *spec;
  ps__step *step;
  bool run;
} ps__over;
/* ps__plan_ramp() - check and build the stages of the plan's cfg (ramp.c).
 * ps__plan_validation() - build the validation that it asks for (validation.c).
 * ps__plan_guests() - all that it asks for (beside.c).
 * Errors: PS_EINVAL, PS_ENOMEM; what was built is left to ps__guests_free(). */
ps_status ps__plan_ramp(const ps__over *o, ps__guests *out);
ps_status ps__plan_validation(const ps__over *o, ps__guests *out);
ps_status ps__plan_guests(const ps__over *o, ps__guests *out);
/* ps__plan_beside_check() - PS_EBUDGET where the report of @p, which counts its guests, is past a
 * cap or past what the GPU has (beside.c). */
ps_status ps__plan_beside_check(const ps_plan *p);
/* ps__refuse_pinned() - PS_EBUDGET: so many BYTES must be pinned, which is past the cap (pinned.c).
 * ps__pinned_check() - the same where the report of @p is past it.
 * @with  "with samples ", or "" */
ps_status ps__refuse_pinned(const ps_plan *p, const char *with, uint64_t bytes);
ps_status ps__pinned_check(const ps_plan *p, const char *with);
static inline bool ps__plan_has_guests(const ps_plan *p) {
  return p->cfg.n_ramp || p->cfg.val_tokens;
}
/* ps__plan_beside_bytes() - BYTES by place, of all that the caps count, of a plan with decisions
 * @o, whose step stays as it is. *n_ops: of the guests. Any thread. Errors: PS_ENOMEM, PS_EINVAL
 * (beside.c). */
ps_status ps__plan_beside_bytes(const ps__over *o, uint64_t bytes[PS__N_MEMS], uint64_t *n_ops);

/* What a step of the training is made of: a stage's, or after the ramp the plan's own. Steps
 * [first_step, end_step) are alike. first_sequence: sequences that a host has read before
 * first_step. */
typedef struct ps__step_size {
  const ps__layout *layout;
  const ps__step *step;
  ps_schedule *schedule;
  uint64_t first_step, end_step, first_sequence;
  double step_s;
} ps__step_size;
ps__step_size ps__step_size_at(const ps_plan *p, uint64_t step);

/* ps__same_cut() - whether both cut a step alike: their trainings have the same bits (again.c). */
bool ps__same_cut(const ps_plan *a, const ps_plan *b);
/* ps__plan_reserved() - BYTES of a place's arena: of the room, where the plan is made again, else
 * those that its step takes. */
static inline uint64_t ps__plan_reserved(const ps_plan *p, uint32_t place) {
  return ps__arena_round(p->room.given ? p->room.bytes[place] : p->step.space_bytes[place]);
}
/* ps__plan_again() - ps_plan_again(), which ends with PS_ECANCELLED once *@abandon is not 0. */
ps_status ps__plan_again(ps_plan **out, const ps_plan *plan, const ps_hardware *rates,
                         bool other_cut, const _Atomic uint32_t *abandon);
/* ps__room_used() - what @bytes, of all that the caps count, are in the room of the plan: they fit
 * under room.used where arenas and scratch of the step fit (room.c). */
void ps__room_used(const ps_plan *p, const ps__step *s, const uint64_t arena[PS_MAX_PLACES],
                   uint64_t bytes[PS__N_MEMS]);

/* ps__plan_from_spec() - a plan of given decisions, without a search and without caps. @spec is
 * copied; it must be of the layout that its chunk_tokens and chunks_per_round give.
 * Errors: as ps_plan_create(), without PS_EBUDGET. */
ps_status ps__plan_from_spec(ps_plan **out, const ps_model_config *model, const ps_plan_config *cfg,
                             const ps_hardware *hw, const ps__spec *spec);

/* ps__plan_of_model() - as ps_plan_create(), for a model that no family describes. Its dtype must
 * be the recipe's, its sequence length the plan's. The plan owns it, and an error destroys it. */
ps_status ps__plan_of_model(ps_plan **out, ps_model *m, const ps_plan_config *cfg,
                            const ps_hardware *hw);

/* ps__plan_new() - a plan without decisions: its model, and the configuration with its defaults.
 * Errors: PS_EINVAL, PS_ENOMEM.
 * ps__plan_new_of() - the same of model @m, which is the plan's from here on, also after an error
 * (config.c). ps__plan_predict() - fill in the report's times of a compiled plan.
 * Errors: PS_ENOMEM. */
ps_status ps__plan_new(ps_plan **out, const ps_model_config *model, const ps_plan_config *cfg,
                       const ps_hardware *hw);
ps_status ps__plan_new_of(ps_plan **out, ps_model *m, const ps_plan_config *cfg,
                          const ps_hardware *hw);
/* The row of ps__recipes of a plan. */
static inline uint32_t ps__plan_row(const ps_plan_config *cfg) {
  return ps__row_of(cfg->recipe, cfg->state_bits);
}
/* The model of @cfg, whose recipe there is, owned by the caller. Errors: PS_EINVAL, PS_ENOMEM. */
ps_status ps__plan_model(ps_model **out, const ps_model_config *model, const ps_plan_config *cfg);
ps_status ps__plan_predict(ps_plan *p);
/* ps__plan_compile() - from a decided layout and spec to a plan that can run. @r: of the search.
 * ps__plan_undo() - back to a plan without decisions. Errors: PS_EBUSY. */
struct ps__search_result;
ps_status ps__plan_compile(ps_plan *p, const struct ps__search_result *r);
ps_status ps__plan_undo(ps_plan *p);

/* The host's rates over those measured, in what the search prefers and the report says. */
static const double PS__SLOW_HOST = 0.75;

/* ps__plan_check_events() - whether @events are whole steps of the plan, in order, each step's in
 * program order. Errors: PS_EINVAL names the event that is not (stalls.c). */
ps_status ps__plan_check_events(const ps_plan *p, const ps_trace_event *events, uint64_t n);

/* ---- sampling.c: text sampled beside a training ---------------------------------------------- */
/* ps__plan_sampling() - plan the generation that p->cfg asks for, past the persistent tensors of
 * the step of @p, which is mapped; widen the arenas of @p where it needs more. Errors: PS_ENOMEM,
 * PS_EINVAL.
 * ps__plan_sampling_ops() - ops of its programs.
 * ps__plan_sampling_check() - PS_EBUDGET where the report of @p is past a cap. */
ps_status ps__plan_sampling(ps_plan *p);
uint64_t ps__plan_sampling_ops(const ps_plan *p);
ps_status ps__plan_sampling_check(const ps_plan *p);
void ps__plan_sampling_free(ps_plan *p);

/* ps__plan_engine() - the engine that runs the plan: its places, links and streams. */
void ps__plan_engine(const ps_plan *p, ps_engine_config *out);

/* ---- cost.c: what an op costs, for the simulator --------------------------------------------- */
/* What ops of several streams share in the simulator: of each place its CPUs and its memory, and
 * what links share. */
static inline uint8_t ps__cpus_of(uint32_t place) { return (uint8_t)(2 * place); }
static inline uint8_t ps__memory_of(uint32_t place) { return (uint8_t)(2 * place + 1); }
static inline uint8_t ps__bus_of(const ps__places *at, uint32_t resource) {
  return (uint8_t)(2 * at->n_places + resource);
}
/* What a stream of links does: its copies' rate over an idle link, which bit of
 * ps_contention_rate.kinds they are, and what their link shares. */
typedef struct ps__copy_rate {
  bool copies; /* false: the stream runs ops */
  bool peers;  /* between devices */
  bool disk;   /* from or to the disk; both at once have duplex_bytes_per_s together */
  double duplex_bytes_per_s;
  uint8_t kind, bus;
  double bytes_per_s;
} ps__copy_rate;
typedef struct ps__cost_model {
  const ps_hardware *hw;
  const ps__places *at;
  uint32_t host; /* the place whose CPUs and memory host ops and copies use */
  ps__copy_rate copy[PS_MAX_STREAMS];
  uint32_t n_threads;
  /* speed of sums on the plan's threads for them, over that on all threads */
  double sum_speed;
  /* speed of products and attention while all devices compute, over their rates */
  double compute_speed;
  /* the fraction of its speed that attention of a sequence of 8,192 loses beside FP8 products; 0:
   * the model has none */
  double fp8_slows_attention;
  /* ps_sim_cost.slower, for copies to the device, to the host, sums and the optimizer; of products
   * none */
  double slower[PS_SIM_KINDS][1 << PS_SIM_KINDS];
  /* over NCCL alone: products slow exchanges, by this table (ps__cost_exchanges()) */
  bool over_nccl;
  double exchange_slower[1 << PS_SIM_KINDS];
} ps__cost_model;
/* ps__cost_model_of() - @fp8: the model's products have FP8 operands. @sum_threads: that sums run
 * on; 0: as many as @n_threads. */
ps__cost_model ps__cost_model_of(const ps_hardware *hw, bool fp8, const ps__places *at,
                                 uint32_t n_threads, uint32_t sum_threads);
/* ps__sum_threads() - the @i-th number of threads on which sums were measured; first all of the
 * host stream's. 0: there is none. ps__sum_speed() - how fast sums run alone on so many threads,
 * over that on all. */
uint32_t ps__sum_threads(const ps_hardware *hw, uint32_t i);
double ps__sum_speed(const ps_hardware *hw, uint32_t threads);
/* ps__contention_entry() - the entry of these kinds with sums on @sum_threads threads; 0: on as
 * many as the first entry of sums. NULL: none. */
const ps_contention_rate *ps__contention_entry(const ps_contention_rate *table, uint32_t kinds,
                                               uint32_t sum_threads);
/* ps__gpus_measured() - whether the contention of @n_devices GPUs that copy at once was measured.
 * ps__gpus_copies() - the rates of each of them while all copy both ways; NULL: not measured. */
/* ps__disk_ns() - of reading and writing so many bytes of a disk at once.
 * ps__disk_rate(), ps__disk_duplex() - of reads or writes alone, of both together; what a drive
 * usually has where none was measured. */
double ps__disk_ns(const ps_hardware *hw, uint64_t bytes);
double ps__disk_rate(const ps_hardware *hw, bool write);
double ps__disk_duplex(const ps_hardware *hw);
/* ps__delta_rates() - hw->delta, or one entry of estimates. @out may be hw->delta. */
void ps__delta_rates(const ps_hardware *hw, ps_delta_rate out[PS_MAX_DELTA_RATES]);
/* ps__plain_attention() - whether attention has the plain kernels' rate, ps__plain_rate(). */
double ps__plain_rate(const ps_hardware *hw, bool backward);
bool ps__plain_attention(const ps_hardware *hw, const ps__args_attention *a);
bool ps__gpus_measured(const ps_hardware *hw, uint32_t n_devices);
const ps_contention_rate *ps__gpus_copies(const ps_hardware *hw, uint32_t n_devices);
void ps__cost(void *model, const ps_op_view *op, ps_sim_cost *out); /* a ps_sim_cost_fn */
/* ps__cost_exchanges() - what exchanges over NCCL cost, once the costs of the step's compute ops
 * are in @out, [n_op]. */
void ps__cost_exchanges(ps__cost_model *m, const struct ps__step *s, ps_sim_cost *out);
/* ps__costs_by_threads() - whether costs on a stream depend on the number of threads for sums. */
bool ps__costs_by_threads(const ps__cost_model *m, uint32_t stream);
/* ps__cost_ns() - the same of a virtual op: ns alone on the machine. @args: the kernel's arguments,
 * read for products and attention. */
double ps__cost_ns(const ps__cost_model *m, const ps_kernel *kernel, uint32_t stream,
                   const void *args, ps_work work);

/* ---- facts.c: of a configuration and a step -------------------------------------------------- */
/* ps__head_slice() - tokens of a slice of the head and loss for chunks of @chunk_tokens: as the
 * user gave. By default, on a GPU, a chunk has at most PS__MOST_ADDITIONS slices (of up to 4096
 * tokens): then the lm_head's gradient leaves the device no more often than the blocks'. */
uint64_t ps__head_slice(const ps_plan *plan, uint64_t chunk_tokens);
/* What a training that plans again takes of the host: the marks of so many steps
 * (train/observed.c), and a search in the background, BYTES in all and for each op of a step
 * (train/replan.c).
 * ps__bytes_an_op() - what is kept for each op of a step, the trace among it. */
enum {
  PS__MARKED_STEPS = 3,
  PS__SEARCH_BYTES = 24 << 20,
  PS__SEARCH_BYTES_AN_OP = 5 << 10,
};
uint64_t ps__bytes_an_op(const ps_plan *plan);
/* ps__host_overhead() - host BYTES that a step and its guests take besides its arena, and two parts
 * of them.
 * ps__net_memory() - device BYTES for NCCL between hosts, where it may be used. */
uint64_t ps__net_memory(const ps_plan *plan);
uint64_t ps__host_overhead(const ps_plan *plan, const ps__step *s, const ps__guests *guests,
                           uint64_t *scratch, uint64_t *trace);
/* ps__largest_device() - the most BYTES of a device's space.
 * ps__used_bytes() - BYTES of the memories (PS__N_MEMS), of all that the caps count, of a step
 * whose arenas take @arena. */
uint64_t ps__largest_device(const ps__places *at, const uint64_t space[PS_MAX_PLACES]);
/* ps__pinned_bytes() - BYTES of a host's arena of @arena that are pinned, where @pageable need not
 * be. */
static inline uint64_t ps__pinned_bytes(uint64_t arena, uint64_t pageable) {
  return ps__arena_round(arena) - ps__pageable_part(pageable);
}
void ps__used_bytes(const ps_plan *plan, const ps__step *s, const ps__guests *guests,
                    const uint64_t arena[PS_MAX_PLACES], uint64_t out[PS__N_MEMS]);
/* ---- ladder.c -------------------------------------------------------------------------------- */
typedef struct ps__search_result {
  /* BYTES by place: the smallest cap that a plan fits in under the other places' caps; 0: none is
   * enough */
  uint64_t smallest[PS__N_MEMS];
  uint64_t any[PS__N_MEMS]; /* BYTES by place of the plan that misses the caps least */
  uint32_t n_candidates, n_feasible;
  double step_ns; /* of the fastest plan; 0: none */
  double
      all_pinned_ns; /* of the fastest plan if all could be pinned; 0: not asked for (pinned.c) */
} ps__search_result;
/* What is known of the candidates of a search space (memo.c). */
typedef struct ps__memo ps__memo;
ps_status ps__memo_create(ps__memo **out); /* PS_ENOMEM */
void ps__memo_destroy(ps__memo *memo);     /* NULL is a no-op */
/* Whether updates of the plan's optimizer may be made in two parts (ps__spec.update_split). */
static inline bool ps__may_split(const ps_plan *plan) {
  return ps__waits_for_norm(plan) && ps__optimizers[plan->cfg.optimizer].splits;
}
/* ps__find_plan() - the fastest plan under the caps, of plan->cfg.layout, which is not
 * PS_LAYOUT_AUTO. Needs plan->model, cfg and hw. Where out->step_ns > 0, plan->layout and
 * plan->spec are set.
 * @below_ns  0, or a step's time: the search leaves out most of what is not faster
 * ps__find_smallest() - the smallest caps: out->smallest and out->any. A candidate that it meets,
 * and that fits under both caps, is kept as the plan, as by ps__find_plan(): out->step_ns > 0.
 * Errors: PS_ENOMEM, PS_EINVAL, PS_EDEVICE (threads). */
ps_status ps__find_plan(ps_plan *plan, ps__memo *memo, double below_ns, ps__search_result *out);
ps_status ps__find_smallest(ps_plan *plan, ps__memo *memo, ps__search_result *out);
/* ---- layouts.c ------------------------------------------------------------------------------- */
/* What is known of candidates, by layout. ps__memos_create(): PS_ENOMEM. */
typedef struct ps__memos {
  ps__memo *of[PS_N_LAYOUTS]; /* NULL at PS_LAYOUT_AUTO */
} ps__memos;
ps_status ps__memos_create(ps__memos *out);
void ps__memos_destroy(ps__memos *memos);
/* What a search has found, while another one runs. ps__take_found() takes it out of the plan,
 * ps__keep_found() puts it there in place of what is there. */
typedef struct ps__found {
  ps__layout layout;
  ps__spec spec;
} ps__found;
ps__found ps__take_found(ps_plan *p);
void ps__free_found(ps__found f);
void ps__keep_found(ps_plan *p, ps__found f);
/* ps__find_in_layouts() - as ps__find_plan(), with p->staging. With PS_LAYOUT_AUTO the fastest plan
 * of the data-parallel layout, or of a ring where that is faster; p->cfg.layout is the layout then.
 * ps__find_with_disk() - as ps__find_staged(), with as much state on the disk as makes the plan
 * fastest, where the plan has a disk.
 * ps__find_smallest_in_layouts() - as ps__find_smallest(); with PS_LAYOUT_AUTO of either layout.
 * Where it keeps a plan, p->cfg.layout is that plan's. */
ps_status ps__find_in_layouts(ps_plan *p, const ps__memos *memos, double below_ns,
                              ps__search_result *out);
ps_status ps__find_with_disk(ps_plan *p, const ps__memos *memos, ps__search_result *out);
ps_status ps__find_smallest_in_layouts(ps_plan *p, const ps__memos *memos, ps__search_result *out);
/* ---- pinned.c, staging.c: what need not be pinned -------------------------------------------- */
/* What candidates stage, from the cheapest on (ps_plan.staging). PS__STAGE_ALL: the weights of all
 * units, too; those between, of some.
 * ps__stages_weights() - parts of PS__UNIT_PARTS of the units whose weights are staged.
 * ps__find_staged() - as ps__find_in_layouts(), with the least staging that has a plan, or with
 * more where that is faster; p->staging is that of the plan. Without pinned_mem_bytes nothing is
 * staged.
 * ps__most_staging() - the most that the plan may stage. */
enum { PS__STAGE_NONE, PS__STAGE_TOTALS, PS__STAGE_QUARTER, PS__STAGE_HALF, PS__STAGE_ALL };
uint32_t ps__stages_weights(const ps_plan *p);
uint8_t ps__most_staging(const ps_plan *p);
ps_status ps__find_staged(ps_plan *p, const ps__memos *memos, ps__search_result *out);
/* ---- refuse.c -------------------------------------------------------------------------------- */
/* ps__plan_refuse() - refuse what a search has not found; @r is of ps__find_smallest_in_layouts().
 * ps__plan_refuse_guests() - refuse a ramp or a validation: training alone would fit.
 * Both return PS_EBUDGET; the message says what is needed, what there is, and what to change.
 * ps__plan_least_host() - BYTES of the least host memory, of any machine, with which a plan fits
 * under the device's cap; 0: none. Errors: as ps__find_smallest(). */
ps_status ps__plan_refuse(ps_plan *p, const ps__memos *m, const ps__search_result *r);
ps_status ps__plan_refuse_guests(ps_plan *p, const ps__search_result *r);
ps_status ps__plan_least_host(ps_plan *p, const ps__memos *m, uint64_t *bytes);
/* ---- documents.c ----------------------------------------------------------------------------- */
/* ps__documents_lack() - NULL where attention of the plan's GPU takes the rows that it is made for,
 * else what rows with several documents lack there, and what to do, in @text.
 * @flash  compute capabilities that flash-attn is compiled for; NULL: those of this build */
enum { PS__DOCUMENTS_TEXT = 256 };
const char *ps__documents_lack(char text[PS__DOCUMENTS_TEXT], const ps_plan *p, const char *flash);
/* ---- predict.c: how long a step takes -------------------------------------------------------- */
/* Steps simulated, and the one that is the steady state: it has a step before it and one after it.
 * The last step's updates run beside nothing. */
enum { PS__SIM_STEPS = 3, PS__SIM_STEADY = 1 };
/* ps__step_costs() - what the step's ops cost, [n_op] in program order.
 * @again  @out has the costs for another number of threads for sums; only those that depend on that
 *         number are set
 * ps__step_predict() - ns of a step in the steady state. @events: NULL, or room for the events of
 * the steps up to the steady one. Errors: PS_EINVAL, PS_ENOMEM.
 * ps__simulate_steady() - as many steps as ps__steady_ns() needs, whose costs are set.
 * ps__steady_ns() - the same ns from the ends of these steps. */
void ps__step_costs(const ps__step *s, ps__cost_model *m, bool again, ps_sim_cost *out);
ps_status ps__step_predict(const ps__step *s, const ps_schedule *schedule, ps__cost_model *m,
                           ps_trace_event *events, double *out_ns);
struct ps__sim;
struct ps__sim_told;
ps_status ps__simulate_steady(const struct ps__sim *sim, const struct ps__sim_told *told);
double ps__steady_ns(const ps__step *s, const ps_sim_cost *cost,
                     const double end[PS__SIM_STEADY + 1]);
#endif
