/* penstock/plan.h - the plan of a training step under two memory caps. A plan is made before any
 * model data is read and before any device memory is taken.
 *
 * A plan decides:
 *   - how a step's tokens are cut: into chunks, attention groups and rounds
 *     (docs/design/step.md, "Cutting").
 *     In a round all chunks pass one unit before the first chunk goes on to the next unit;
 *   - which units keep their parameters, gradients and optimizer state on the device;
 *   - the activation policy of each saved activation of each (layer, chunk);
 *   - how far ahead transfers are issued.
 * The step's program, the exact memory map of both arenas and, by simulation, the step time follow
 * from these decisions. */
#ifndef PENSTOCK_PLAN_H
#define PENSTOCK_PLAN_H
#include "hardware.h"
#include "hosts.h"
#include "optim.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_plan ps_plan;

/* Limits of a plan's configuration. A value past its limit is PS_EINVAL. */
enum {
  PS_MAX_ROWS = 1073741824, /* tokens of a sequence, of a chunk, of a slice of the head */
  PS_MAX_CHUNKS = 1048576,  /* of a step, of a round */
  PS_MAX_TRACE_STEPS = 1000000,
  PS_MAX_THREADS = 4096,
  PS_MAX_SEQUENCES = 1024 /* whose text is generated at once */
};
#define PS_MAX_STEP_TOKENS (1ull << 40)
#define PS_MAX_Z_LOSS      1e3
enum { PS_MAX_RAMP = 64, PS_MAX_RAMP_STEPS = 1000000000 }; /* stages; their steps in all */

/* A stage of a batch ramp: so many steps of so many tokens. */
typedef struct ps_ramp_stage {
  uint64_t tokens_per_step; /* from seq_len to ps_plan_config.tokens_per_step */
  uint64_t n_steps;         /* 1 at least */
} ps_ramp_stage;

/* ps_plan_progress_fn() - the caller's function that a search calls as it evaluates candidates. A
 * search has no known end: it ends where nothing better is left, or where its ops are spent.
 * @n_evaluated  evaluations so far, over all searches of the plan
 * @best_step_s  a step of the fastest plan so far that fits, predicted; 0: none yet
 * Called from the search's threads, one call at a time. It must not call the planner, and the
 * search waits while it runs. */
typedef void (*ps_plan_progress_fn)(void *user, uint64_t n_evaluated, double best_step_s);

/* How several devices share a step:
 *   PS_LAYOUT_AUTO           the planner takes the one that it predicts to be faster; with fewer
 *                            sequences a step than devices, the ring if there are enough blocks.
 *   PS_LAYOUT_DATA_PARALLEL  each runs all layers, for rounds of its own.
 *   PS_LAYOUT_RING           layers are dealt to them in turn. A chunk's activations go from device
 *                            to device, and each device fetches the parameters of its layers. */
typedef enum ps_plan_layout {
  PS_LAYOUT_AUTO = 0,
  PS_LAYOUT_DATA_PARALLEL = 1,
  PS_LAYOUT_RING = 2,
  PS_N_LAYOUTS = 3
} ps_plan_layout;
PS_API const char *ps_layout_name(ps_plan_layout layout); /* "auto", "data-parallel", "ring" */
/* ps_layout_parse() - a layout by its name. Errors: PS_EINVAL names the value. */
PS_API ps_status ps_layout_parse(ps_plan_layout *out, const char *name);

/* ps_logits_fn() - the caller's function that gets the logits of one token.
 * @step      0-based, ps_train_config.first_step included.
 * @token     of the step's tokens, sequence after sequence.
 * @logits    [vocab_size], with the model's soft cap where it has one; valid during the call.
 * Threads: a thread of the engine calls it, one call at a time: once for each token of a step, in
 *          any order, before the step's metrics. It may not call CUDA, as ps_batch_fn() may not.
 * Errors:  a negative return stops the run, and ps_trainer_wait() returns it. */
typedef ps_status (*ps_logits_fn)(void *user, uint64_t step, uint64_t token, const float *logits,
                                  uint64_t vocab_size);

/* What a trainer does with a step whose loss or gradient is not finite. */
typedef enum ps_non_finite {
  PS_NON_FINITE_STOP = 0, /* stops; where the step's norm clips, before anything is updated */
  /* Leaves weights and state as they are, and goes on with the next step's data: updates wait for
   * the norm, as with clip_norm. A skipped step counts in the schedule and in AdamW's bias
   * correction; a warning is logged that says why it was skipped. */
  PS_NON_FINITE_SKIP = 1
} ps_non_finite;

/* Whose norm clips a step's gradient. */
typedef enum ps_clip_by {
  PS_CLIP_BY_STEP = 0, /* its own, which is exact: updates wait for the whole gradient */
  /* That of the step before. Updates wait for nothing, so a step of one round needs no host memory
   * for whole gradients. The first step of a run that has no norm yet changes no weights and no
   * state, and counts in the schedule and in AdamW's bias correction as a skipped one does.
   * Needs clip_norm, and excludes PS_NON_FINITE_SKIP. */
  PS_CLIP_BY_PREVIOUS = 1
} ps_clip_by;

/* Of a uint32_t field that says so: its default, which other fields may decide. */
#define PS_DEFAULT UINT32_MAX

/* What a plan is asked for, and the trainer that runs it: each question is asked once. 0 leaves a
 * choice to the planner where a field says so. */
typedef struct ps_plan_config {
  uint32_t struct_bytes; /* sizeof(ps_plan_config) */
  uint32_t recipe;       /* ps_recipe; PS_DEFAULT: PS_RECIPE_BF16, with adapters _FP32_MASTER */
  /* Cap of device memory, BYTES. On CUDA it bounds all that the GPU loses to the process: context,
   * libraries, scratch, arena and page tables. On the CPU backend it bounds the device arena.
   * 0: on CUDA the memory that the device has, on the CPU backend no cap. */
  uint64_t device_mem_bytes;
  /* Cap of the process's resident memory, BYTES, without the CPU backend's device arena.
   * 0: what the machine allows. */
  uint64_t host_mem_bytes;
  /* Cap of the host memory that is pinned, BYTES: what the system lets this process pin (WSL2,
   * containers, ulimit -l). It is part of host_mem_bytes. Optimizer state that only the host
   * touches is then not pinned, at no cost. Where that is not enough, gradients' totals are not
   * either, then weights: they take another copy on the host. 0: all of the host's arena is
   * pinned. */
  uint64_t pinned_mem_bytes;
  uint64_t seq_len;         /* tokens of a sequence */
  uint64_t tokens_per_step; /* rounded down to whole sequences, at least one; 0: 8 sequences */
  /* Tokens of a chunk: a multiple of seq_len, or fewer than it. Fewer cut a sequence into slices,
   * the last one shorter. 0: the planner chooses. */
  uint64_t chunk_tokens;
  /* Chunks of a round. A long sequence's slices always stay in one round. 0: the planner
   * chooses. */
  uint64_t chunks_per_round;
  /* Chunks of each of the first rounds. 0: chunks_per_round where that is given, else the planner
   * chooses. */
  uint64_t first_round_chunks;
  /* How many rounds at the start of a step have first_round_chunks. 0: one round where
   * first_round_chunks is given, else one for each device. */
  uint64_t first_rounds;
  /* Tokens of a slice of the head and loss. 0: from the vocabulary and, on a GPU, from the
   * chunk. */
  uint64_t head_slice_tokens;
  /* The limit of the gradient's global norm. 0: gradients are not clipped. */
  double clip_norm;
  uint32_t clip_by;     /* ps_clip_by */
  uint32_t non_finite;  /* ps_non_finite */
  uint32_t n_threads;   /* compute threads; 0: those of the hardware description */
  uint32_t trace_steps; /* steps that the trace keeps; they count as host memory */
  /* CUDA, 1: the same bits in every run, at some cost in speed. The CPU backend always gives the
   * same bits. */
  uint32_t deterministic;
  /* Documents inside a sequence: attention does not cross their borders, and positions begin at 0
   * in each. Either the token that begins a document is given, or the token that ends one (such as
   * EOS); -1: none. Both together are PS_EINVAL. */
  int32_t document_token, document_end_token;
  /* 1: every sequence is one document. No document token is given then, and no mask of the data
   * marks documents. Attention on CUDA is then faster, and it runs on GPUs for which no library
   * finds documents. 0 is always right. */
  uint32_t one_document;
  /* 1: gradients are copied to the host even where the update runs on the device, so that
   * ps_trainer_read_grad() can read them. */
  uint32_t keep_grads;
  uint32_t optimizer; /* ps_optimizer: its state counts as memory, its updates as time */
  /* The first so many layers are frozen: the embedding, then the blocks. They have no gradient, no
   * optimizer state and no update, and the backward pass ends above them. With tied embeddings the
   * lm_head is frozen with the embedding. 0: none. */
  uint32_t n_frozen_layers;
  /* 1: no layer is trained, and a step computes the loss alone. n_frozen_layers, optimizer,
   * clip_norm, clip_by and non_finite do not count then. */
  uint32_t forward_only;
  /* NULL, or what a step gives its logits to. They are copied to the host, slice by slice of the
   * head. No other op changes. Borrowed while a trainer of the plan lives. */
  ps_logits_fn logits_fn;
  void *logits_user;
  /* Batch ramp: the training's first steps have fewer tokens, stage after stage; tokens_per_step is
   * that of all steps after the ramp. The plan is made for those: its decisions and its cut of
   * chunks and rounds hold in every stage. Borrowed for the call. */
  const ps_ramp_stage *ramp; /* [n_ramp] */
  uint32_t n_ramp;
  /* Devices that train the model together, at most PS_MAX_DEVICES; 0 counts as 1. The bits do not
   * depend on it, where chunks and rounds are the same. device_mem_bytes is the cap of each. */
  uint32_t n_devices;
  /* The tasks of the hosts that train the model together, after ps_hosts_choose(); NULL: a trainer
   * of the plan is alone. The plan is that of one host, and tokens_per_step is of all. Each has an
   * equal part of the step's sequences, so the step is rounded down to that. What steps report is
   * of all hosts. Borrowed while a trainer of the plan lives. */
  ps_hosts *hosts;
  /* Without hosts, to plan for some that are not here: how many, at most PS_MAX_HOSTS, 0 counts as
   * 1; and ps_transport: with CUDA, device memory for NCCL is counted, unless it is
   * PS_TRANSPORT_TCP. No trainer runs a plan for several that has no hosts. */
  uint32_t n_hosts, transport;
  /* ps_plan_layout: how several devices share a step. A ring needs two devices at least, and a
   * block for each of them. The bits do not depend on it either, where chunks and rounds are the
   * same. */
  uint32_t layout;
  /* Terms of the loss that is trained, beside the cross-entropy of each counted target. Both are 0
   * with forward_only.
   *   z_loss           z_loss * logsumexp(logits)^2 (PaLM, arXiv 2204.02311); at most PS_MAX_Z_LOSS
   *   label_smoothing  of the target's distribution this part is uniform over the vocabulary, as in
   *                    torch.nn.CrossEntropyLoss; below 1 */
  double z_loss, label_smoothing;
  /* Terms of the routers, in models with experts; each is a mean over the blocks that have them, at
   * most PS_MAX_ROUTER_LOSS. Both are 0 with forward_only, and where no block has experts. Neither
   * is in the loss that is reported.
   *   router_aux_loss  router_aux_loss E sum_e f_e P_e: f_e is the mean number of a chunk's tokens
   *                    that chose expert e, so that its sum is n_experts_used, and P_e the mean of
   *                    the softmax. A chunk counts by its part of the step's tokens. NAN: the
   *                    model's own, ps_model_config.router_aux_loss, and with adapters 0
   *   router_z_loss    router_z_loss times the mean of logsumexp(router logits)^2 */
  double router_aux_loss, router_z_loss;
  /* With a recipe of FP8; 0 with other recipes:
   *   fp8_bf16_first, fp8_bf16_last  how many of the first and of the last blocks compute in bf16;
   *                                  at least one block must be left. PS_DEFAULT: 1 of each
   *   fp8_bf16_down                  1: so do the down projections of all blocks
   *   fp8_head                       1: the head's products have FP8 operands too
   *   fp8_fast_accumulation          1: forward products sum with the GPU's fast accumulation. On
   *                                  compute capability 9.0 it keeps 14 bits of a sum, and these
   *                                  products are about 6% faster. 0: in fp32, as backward products
   *                                  always do, and all products on the CPU backend
   * FP8 needs sizes of the model, seq_len and chunk_tokens that are multiples of 16; fp8_head a
   * vocabulary and head_slice_tokens that are. */
  uint32_t fp8_bf16_first, fp8_bf16_last, fp8_bf16_down, fp8_head, fp8_fast_accumulation;
  /* Adapters. The model's own weights are frozen then, and n_frozen_layers must be 0. With
   * forward_only the adapters are frozen too, and count in the loss. */
  ps_lora lora;
  /* Bits of an element of the optimizer's state: 0: as the recipe says; 8: companded, in blocks of
   * 64 elements with an fp32 scale, 1.06 bytes of a state's element (docs/design/optimizers.md).
   * Parameters must begin at multiples of 64 elements of their unit. */
  uint32_t state_bits;
  uint32_t reserved;
  /* Host memory that the process takes besides arena, scratch and trace, BYTES. It counts against
   * host_mem_bytes. It holds the program and its libraries, stacks, buffers of OpenBLAS and of
   * loading, and on CUDA the driver. 0: computed from the resident set that the process had when it
   * first asked for a hardware description or a plan. Later allocations change no plan. */
  uint64_t reserve_bytes;
  /* Tokens of a validation (ps_trainer_validate()), rounded down to whole sequences. Its steps are
   * no larger than a step of training. It runs in the memory of training.
   * The plan is the same without it, unless only another plan holds it. 0: none. */
  uint64_t val_tokens;
  /* Text that is sampled beside training (ps_trainer_sample(), penstock/generate.h): prompts that
   * are computed at once, and the tokens that a prompt and its text may have together. It runs in
   * the memory of training, and the plan is the same without it. 0: none. */
  uint64_t sample_sequences; /* at most PS_MAX_SEQUENCES */
  uint64_t sample_context;
  /* 1: the training plans again (ps_train_config.replan), and what this takes of host memory beside
   * its steps counts: the marks of three steps, and a search. 0: it does not count. */
  uint32_t replan;
  /* BYTES that optimizer state may take of a disk, in the directories that the trainer is given
   * (ps_train_config.disk); 0: none. Of the units from the last one on, as many have their state
   * there as makes the step fastest. Their updates run on the host, and the bits are the same. The
   * embedding's state stays in memory. 0 with forward_only. */
  uint64_t disk_mem_bytes;
  /* TB (10^12 BYTES) that the drives together may be written in their life, as their maker rates
   * them; 0: not known. The plan says how long a training at its speed may go on. */
  double disk_tbw;
  ps_plan_progress_fn progress; /* or NULL */
  void *progress_user;
} ps_plan_config;

/* ps_plan_config_init() - fill in struct_bytes and the defaults: AdamW, clip_norm 1, no document
 * tokens, 2 traced steps, PS_DEFAULT for the recipe and the ends of FP8, NAN for lora.alpha and
 * router_aux_loss. The caller still has to set seq_len.
 * ps_plan_config_resolve() - fill in what PS_DEFAULT, lora.targets 0 and a lora.alpha of NAN stand
 * for. ps_plan_create() does the same with its own copy. */
PS_API void ps_plan_config_init(ps_plan_config *cfg);
PS_API void ps_plan_config_resolve(ps_plan_config *cfg);

/* The policy of a saved activation, between the forward and the backward pass of its chunk:
 *   PS_POLICY_DEVICE            it stays in device memory.
 *   PS_POLICY_HOST              it is copied to host memory and back.
 *   PS_POLICY_RECOMPUTE         it is dropped, and the backward pass computes it again.
 *   PS_POLICY_HOST_FIRST_ROUND  in a step's first rounds as PS_POLICY_HOST, in the other rounds as
 *                               PS_POLICY_RECOMPUTE. In round 0 of a step no gradient is on the
 *                               host yet, so the copy may use the gradients' host memory. */
enum {
  PS_POLICY_DEVICE = 0,
  PS_POLICY_HOST = 1,
  PS_POLICY_RECOMPUTE = 2,
  PS_POLICY_HOST_FIRST_ROUND = 3,
  PS_N_POLICIES = 4
};

/* Figures of a plan. Memory is in BYTES. */
typedef struct ps_plan_report {
  uint32_t struct_bytes;                         /* sizeof(ps_plan_report) */
  uint32_t n_rounds, chunks_per_round, n_chunks; /* n_chunks: of a step */
  /* The first first_rounds rounds, one for each device, may be larger, because the updates of the
   * step before run beside their forward passes. first_rounds is 1 where they are not larger. */
  uint32_t first_round_chunks, first_rounds;
  uint32_t n_devices, n_hosts;
  uint32_t layout; /* ps_plan_layout: the one that was taken */
  /* tokens_per_step and n_sequences are of all hosts, all else is of one */
  uint64_t chunk_tokens, tokens_per_step, n_sequences, head_slice_tokens;
  double exchange_bytes; /* that a host sends to the others in a step, and as many it receives */
  /* Of several devices, device figures are those of the one that takes the most. Used: arena +
   * scratch + overhead + tables; at most device_mem_bytes */
  uint64_t device_used_bytes;
  uint64_t device_arena_bytes, host_arena_bytes; /* exact: the memory map's peaks */
  /* CUDA: scratch and workspaces; context, kernels and libraries. CPU backend: 0. */
  uint64_t device_scratch_bytes, device_overhead_bytes;
  uint64_t device_tables_bytes; /* CUDA: the GPU's page tables of the host arena, at most */
  uint64_t host_used_bytes;     /* arena + scratch + trace + reserve; at most host_mem_bytes */
  uint64_t scratch_bytes, reserve_bytes, trace_bytes; /* of the host */
  uint64_t device_mem_bytes, host_mem_bytes;          /* the caps as given; 0: none */
  /* With pinned_mem_bytes, else 0: that cap; of the host's arena what is pinned, and what is not;
   * how many units' totals and weights reach the links by way of staging memory, and BYTES that the
   * host copies for that in a step */
  uint64_t pinned_mem_bytes, pinned_bytes, pageable_bytes;
  uint64_t staged_total_units, staged_weight_units, staged_bytes;
  /* SECONDS of a step of the fastest plan if all could be pinned, predicted */
  double all_pinned_step_s;
  /* Numbers of units:
   *   resident_param_units   their parameters are device-resident
   *   resident_grad_units    their totals of gradients are; a unit with one contribution has none.
   *                          Each of several devices keeps its piece until a total is complete
   *   resident_update_units  their optimizer state is, and the update runs on the device
   *   n_units                all units of the model */
  uint64_t resident_param_units, resident_grad_units, resident_update_units, n_units;
  /* The update runs on the device; the state comes from the host for it and goes back after it, but
   * for that of held_state_units. */
  uint64_t streamed_update_units;
  /* Units updated on the host in two parts: the weights first, the state after all weights. */
  uint64_t split_update_units;
  /* Units whose gradients have no memory of their own on the host: a total lives from its first
   * addition to its update. */
  uint64_t passing_grad_units;
  /* Blocks whose input is dropped in the forward pass: before their backward pass the block below
   * runs forward again. */
  uint64_t input_again_blocks;
  /* BYTES that all units have between two steps: weights with master copies, gradients, optimizer
   * state. Of several copies that on the host counts. */
  uint64_t weight_bytes, grad_bytes, state_bytes;
  /* Streamed units whose parameters are kept across rounds: from a round's backward pass to the
   * next round's forward pass. */
  uint64_t units_kept;
  /* BYTES of saved activations by policy, over all layers and chunks of the first round. A block's
   * input is recomputed in input_again_blocks alone. */
  uint64_t saved_device_bytes, saved_host_bytes, saved_recompute_bytes;
  uint64_t h2d_bytes, d2h_bytes; /* copied in a step */
  /* Of a step; recompute: FLOPs done a second time, attention's scores always among them. */
  double model_flops, recompute_flops;
  double step_s;                        /* SECONDS of a step, predicted, in the steady state */
  double stream_busy_s[PS_MAX_STREAMS]; /* SECONDS of such a step in which the stream runs ops */
  uint64_t n_ops, n_waits;              /* of a step */
  uint32_t n_candidates, n_feasible;    /* in the search space; evaluated and within the caps */
  uint32_t bottleneck_stream;           /* the busiest */
  /* of a validation, and of each of its steps; predicted seconds of a validation */
  uint64_t val_tokens, val_step_tokens;
  double val_s;
  /* SECONDS of a step, predicted, where host memory and its links to devices have three quarters of
   * their rates: what the plan loses on a machine that is slower than it was measured */
  double slow_host_step_s;
  /* With a disk: units whose optimizer state is there, BYTES of it, and BYTES read and written in a
   * step; else 0 */
  uint64_t disk_units, disk_arena_bytes, disk_mem_bytes, disk_read_bytes, disk_write_bytes;
  /* Of streamed_update_units: those whose optimizer state stays on a device, each on one. */
  uint64_t held_state_units;
} ps_plan_report;

/* ps_plan_create() - search for the fastest plan under both caps.
 * Every candidate is evaluated, or passed over because its bound is no better than the best plan.
 * For large models and steps the search stops after a number of ops, the same on every machine. The
 * result is deterministic.
 * Reads the process's memory once; reads no model data.
 * @out    on PS_OK a plan owned by the caller, released by ps_plan_destroy(); untouched on error.
 * Blocks: a few seconds for 8B on two cores; up to three times that where more memory gains little.
 * The ops that a search emits and simulates are limited for every input. Of 80 random models and
 * batches the longest search took 43 s of CPU and 1.5 GB, on a busy machine.
 * Memory: 1.3 KB an op of the step and thread, 2 GB at most.
 * Errors: PS_EINVAL names the field, or a step of more than 2^20 ops; PS_EBUDGET says what is
 *         needed and the nearest plan that fits; PS_ENOMEM. */
PS_API ps_status ps_plan_create(ps_plan **out, const ps_model_config *model,
                                const ps_plan_config *cfg, const ps_hardware *hw);
/* What searches learn of the candidates of one model, batch and machine: bytes and simulated time,
 * which do not depend on caps. One thread at a time uses it. */
typedef struct ps_evaluations ps_evaluations;
/* ps_evaluations_create() - none yet. Errors: PS_ENOMEM. Released by ps_evaluations_destroy(), for
 * which NULL is a no-op. */
PS_API ps_status ps_evaluations_create(ps_evaluations **out);
PS_API void ps_evaluations_destroy(ps_evaluations *shared);

/* ps_plan_create_sharing() - as ps_plan_create(), and with the same result. It does not repeat what
 * earlier calls with @shared evaluated: for plans under several caps, such as a grid.
 * @shared is borrowed for the call. Errors: as ps_plan_create(); PS_EINVAL where anything but the
 * caps differs from the first call with @shared. */
PS_API ps_status ps_plan_create_sharing(ps_plan **out, ps_evaluations *shared,
                                        const ps_model_config *model, const ps_plan_config *cfg,
                                        const ps_hardware *hw);
/* ps_plan_again() - the fastest plan for a training that goes on, at other rates: of the same
 * configuration, in the arenas and scratch that @plan reserves. Its steps are cut as those of
 * @plan, so that a training that goes on with it (ps_trainer_switch()) has the same bits.
 * @plan       may be in use, and stays as it is.
 * @rates      of the same machine: its memory, threads and overheads count as in @plan
 * @other_cut  1: steps may be cut otherwise, as far as the configuration of @plan left that to the
 *             planner. The bits change with the cut.
 * @out        as of ps_plan_create().
 * Blocks: as ps_plan_create(), on at most two threads.
 * Errors: as ps_plan_create(); PS_EBUDGET: no plan was found that fits.
 * ps_plan_step_at() - SECONDS of a step of @plan at such rates, predicted. Errors: PS_EINVAL,
 * PS_ENOMEM.
 * Threads: any, also while a trainer runs @plan, until it is destroyed. */
PS_API ps_status ps_plan_again(ps_plan **out, const ps_plan *plan, const ps_hardware *rates,
                               uint32_t other_cut);
PS_API ps_status ps_plan_step_at(const ps_plan *plan, const ps_hardware *rates, double *step_s);
/* ps_plan_enough_tokens() - the tokens of a step from which on a GPU runs near full speed.
 * @cfg  as for ps_plan_create(), its tokens_per_step apart.
 * @out  on PS_OK a power of two of sequences, at least 8 and one for each device of each host: the
 *       one nearest to 1.5 times the tokens whose forward pass takes as long as the updates on the
 *       host, and whose step as long as the copies of the weights for both passes, by @hw's rates.
 *       On a CPU, and where model and optimizer state fit the devices, it is the least one.
 * Blocks: no search, milliseconds. Errors: as ps_plan_create(), PS_EBUDGET apart. */
PS_API ps_status ps_plan_enough_tokens(const ps_model_config *model, const ps_plan_config *cfg,
                                       const ps_hardware *hw, uint64_t *out);
/* ps_plan_destroy() - release a plan; NULL is a no-op.
 * Errors: PS_EBUSY while a trainer or a run of its schedule lives; the plan then lives on. */
PS_API ps_status ps_plan_destroy(ps_plan *plan);
/* ps_plan_model() - the model as the plan trains it, with its adapters. Borrowed from the plan. */
PS_API const ps_model *ps_plan_model(const ps_plan *plan);
/* ps_plan_get_report() - copy the plan's figures to @out. Errors: PS_EINVAL. */
PS_API ps_status ps_plan_get_report(const ps_plan *plan, ps_plan_report *out);

/* ps_plan_sequences_before() - how many sequences a training has read before step @step, the batch
 * ramp's steps among them.
 * ps_plan_steps_of() - how many whole steps @n_sequences sequences are, from the first stage of the
 * batch ramp on. Errors: PS_EINVAL. */
PS_API uint64_t ps_plan_sequences_before(const ps_plan *plan, uint64_t step);
PS_API ps_status ps_plan_steps_of(const ps_plan *plan, uint64_t n_sequences, uint64_t *out);

/* ps_plan_smallest() - the smallest caps for which ps_plan_create() succeeds, in BYTES:
 * @device_mem_bytes under cfg->host_mem_bytes, @host_mem_bytes under cfg->device_mem_bytes, both
 * under cfg->pinned_mem_bytes.
 * 0 where no cap is enough. @host_mem_bytes may be more than the machine has: it is then for one
 * that has as much. Exact (one byte less is refused) where all candidates can be evaluated. For
 * large models and steps, the least of those evaluated in some seconds.
 * A batch ramp and a validation count.
 * Errors: as ps_plan_create(), without PS_EBUDGET; PS_EINVAL with sample_sequences. */
PS_API ps_status ps_plan_smallest(const ps_model_config *model, const ps_plan_config *cfg,
                                  const ps_hardware *hw, uint64_t *device_mem_bytes,
                                  uint64_t *host_mem_bytes);

/* ps_plan_text() - the plan in words and a small table, for a person.
 * ps_plan_json() - the whole plan for scripts: every unit, every saved activation.
 * Both texts are owned by the plan. NULL when memory is out (ps_last_error()). */
PS_API const char *ps_plan_text(ps_plan *plan);
PS_API const char *ps_plan_json(ps_plan *plan);

/* ps_plan_schedule() - the compiled step, to inspect, simulate and trace. Borrowed from the plan.
 * ps_run_create() refuses it: a trainer of the plan runs it. */
PS_API ps_schedule *ps_plan_schedule(ps_plan *plan);
/* ps_plan_stream_name() - of the schedule's streams: "compute", "h2d", "d2h" of each device, with
 * its number where there are several ("compute 1"); then "host", "io". Of several devices then
 * come "p2p 0" and so on, copies to other devices, and "sums 0", additions of what they send. Of
 * several hosts "net" comes then: exchanges with the other hosts. With a disk "disk read" and "disk
 * write" are the last. Static storage; NULL past the last. */
PS_API const char *ps_plan_stream_name(const ps_plan *plan, uint32_t stream);
/* ps_plan_simulate() - the predicted trace of @n_steps steps; arguments as ps_sim_run(). */
PS_API ps_status ps_plan_simulate(const ps_plan *plan, uint64_t n_steps, ps_trace_event *events,
                                  double *step_end_ns);

/* What a stream waited for. */
typedef struct ps_stall {
  uint32_t stream;         /* that waited */
  uint32_t awaited_stream; /* for whose op it waited; the stream itself: launch and signals */
  double seconds;          /* a step */
  char what[40];           /* "parameters", "saved activations", "the optimizer", ... */
} ps_stall;

/* ps_plan_stalls() - how long each stream waited for what between two of its ops, per step.
 * @events  @n events of the plan's schedule: a run's (ps_trainer_trace()) or simulated ones
 *          (ps_plan_simulate()). Whole steps, in order, each step's events in program order. Of
 *          several steps the first does not count: what it awaited of the step before is unknown.
 * @stalls  room for @room entries. Sorted by stream, the longest first; with too little room the
 *          first ones are written.
 * @n_stalls  how many there are.
 * Errors: PS_EINVAL names the event that is not the plan's; PS_ENOMEM. */
PS_API ps_status ps_plan_stalls(const ps_plan *plan, const ps_trace_event *events, uint64_t n,
                                ps_stall *stalls, uint64_t room, uint64_t *n_stalls);

/* How long a stream ran one kind of op. */
enum { PS_OP_NAME = 64 };
typedef struct ps_op_time {
  uint32_t stream, n_ops; /* that ran them; a step */
  double seconds;         /* a step, all of them together */
  char op[PS_OP_NAME];    /* "gemm gate_up": as timelines name them, and what they are of */
} ps_op_time;

/* ps_plan_op_times() - how long each stream ran which ops, per step. A simulated trace has the
 * times that the plan expects, so that both show which ops take longer than planned.
 * @events  as of ps_plan_stalls(); of several steps the first does not count.
 * @times   room for @room entries. Sorted by stream, the longest first; with too little room the
 *          first ones are written.
 * @n_times  how many there are.
 * Errors: PS_EINVAL names the event that is not the plan's; PS_ENOMEM. */
PS_API ps_status ps_plan_op_times(const ps_plan *plan, const ps_trace_event *events, uint64_t n,
                                  ps_op_time *times, uint64_t room, uint64_t *n_times);

/* BYTES a second while such ops run: copies to the device, copies to the host, the optimizer's
 * updates on the host (read plus written). 0: the plan has none, or they took no time. */
typedef struct ps_throughput {
  uint32_t struct_bytes, reserved; /* sizeof(ps_throughput) */
  double h2d_bytes_per_s, d2h_bytes_per_s, update_bytes_per_s;
} ps_throughput;

/* ps_plan_throughput() - the bytes of these ops over the sum of their times, of all events.
 * @events  as of ps_plan_stalls(). Errors: PS_EINVAL names the event that is not the plan's. */
PS_API ps_status ps_plan_throughput(const ps_plan *plan, const ps_trace_event *events, uint64_t n,
                                    ps_throughput *out);

/* ps_plan_memory() - BYTES of both arenas that were in use over time: gauges "device arena" and
 * "host arena", each with its values in the order of their times. A tensor is in use from the start
 * of the first op that touches it to the end of the last. What outlives steps is always in use.
 * @events  as ps_plan_stalls() takes them.
 * @gauges  room for @room entries; with too little room the first ones are written.
 * @n_gauges  how many there are: at most two for each tensor of the traced steps, and two.
 * Errors: PS_EINVAL names the event that is not the plan's; PS_ENOMEM. */
PS_API ps_status ps_plan_memory(const ps_plan *plan, const ps_trace_event *events, uint64_t n,
                                ps_trace_gauge *gauges, uint64_t room, uint64_t *n_gauges);

#ifdef __cplusplus
}
#endif
#endif
