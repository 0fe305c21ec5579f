/* penstock/plan.h - the plan of a training step under two memory caps, made before anything is
 * touched.
 *
 * A step's tokens are cut into GROUPS (one chunk that packs whole sequences, or the chunks of
 * one long sequence) and groups into ROUNDS; in a round every chunk passes a unit before the
 * first goes on to the next. The plan says the sizes, which units' parameters and gradients stay
 * on the device, and the fate of each saved tensor of each (layer, chunk). From it follow the
 * step's program, the exact memory map of both arenas, and by simulation the step time. */
#ifndef PENSTOCK_PLAN_H
#define PENSTOCK_PLAN_H
#include "hardware.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_plan ps_plan;

/* What a plan's configuration may ask for; what is past these limits is PS_EINVAL. */
enum {
  PS_MAX_ROWS = 1073741824, /* tokens of a sequence, a chunk, a slice of the head */
  PS_MAX_CHUNKS = 1048576,  /* a step, a round */
  PS_MAX_TRACE_STEPS = 1000000,
  PS_MAX_THREADS = 4096
};
#define PS_MAX_STEP_TOKENS (1ull << 40)

/* The optimizer, and what of it the plan depends on. */
typedef struct ps_plan_config {
  uint32_t struct_bytes; /* sizeof(ps_plan_config) */
  uint32_t recipe;       /* ps_recipe */
  /* cap of device memory, BYTES: on CUDA all that the driver reports for the process (context,
   * libraries, scratch and arena), on the CPU backend the device arena; 0: what the device has,
   * no cap on the CPU backend */
  uint64_t device_mem_bytes;
  /* cap of the process's resident memory, BYTES, the CPU backend's device arena apart; 0: what
   * the machine allows */
  uint64_t host_mem_bytes;
  uint64_t seq_len;         /* tokens a sequence */
  uint64_t tokens_per_step; /* rounded down to whole sequences, at least one; 0: 8 sequences */
  /* 0: the planner chooses; else pinned: a multiple of seq_len, or less (slices, the last one
   * shorter) */
  uint64_t chunk_tokens;
  /* 0: the planner chooses; else pinned; a long sequence's chunks are never split over rounds */
  uint64_t chunks_per_round;
  /* chunks of the first round; 0: as chunks_per_round where that is pinned, else the planner
   * chooses */
  uint64_t first_round_chunks;
  /* tokens a slice of the head and loss; 0: from the vocabulary and, on a GPU, the chunk */
  uint64_t head_slice_tokens;
  /* 1: exact global-norm clipping will be used (the optimizer then waits for the whole norm) */
  uint32_t clip;
  uint32_t n_threads;   /* compute threads; 0: those of the hardware */
  uint32_t trace_steps; /* steps kept by the trace, counted as host memory */
  /* CUDA: 1: the same bits in every run, at some speed; the CPU backend always is */
  uint32_t deterministic;
  /* 1: every sequence is one document (the trainer then refuses document tokens); attention on
   * CUDA is then faster, and there on GPUs on which no library finds documents. 0 is always
   * right */
  uint32_t one_document;
  /* 1: gradients come home also where the update runs on the device, for ps_trainer_read_grad() */
  uint32_t keep_grads;
  uint32_t reserved;
  /* Host memory that the process takes besides arena, scratch and trace, BYTES: program and
   * libraries, stacks, buffers of OpenBLAS and of loading, on CUDA the driver. It counts against
   * host_mem_bytes. 0: computed from the resident set that the process had when it first asked for
   * a hardware description or a plan; what the process allocates later changes no plan. */
  uint64_t reserve_bytes;
} ps_plan_config;

/* The policy of a saved activation, between the forward and the backward pass of its chunk:
 *   PS_POLICY_DEVICE            it stays in device memory.
 *   PS_POLICY_HOST              it is copied to host memory and back.
 *   PS_POLICY_RECOMPUTE         it is dropped, and the backward pass computes it again.
 *   PS_POLICY_HOST_FIRST_ROUND  in a step's first round as PS_POLICY_HOST, in the other rounds as
 *                               PS_POLICY_RECOMPUTE. In the first round no gradient has come home
 *                               yet, and the copy may use the gradients' host memory. */
enum {
  PS_POLICY_DEVICE = 0,
  PS_POLICY_HOST = 1,
  PS_POLICY_RECOMPUTE = 2,
  PS_POLICY_HOST_FIRST_ROUND = 3,
  PS_N_POLICIES = 4
};

/* Numbers of a plan. Shares are of saved bytes (x is always saved, the others as the plan says). */
typedef struct ps_plan_report {
  uint32_t struct_bytes;
  uint32_t n_rounds, chunks_per_round, n_chunks; /* n_chunks: a step */
  /* the first round may be larger: under its forward pass run the last step's updates */
  uint32_t first_round_chunks;
  uint64_t chunk_tokens, tokens_per_step, n_sequences, head_slice_tokens;
  /* arena + scratch + overhead: held against the device cap */
  uint64_t device_used_bytes;
  /* exact sizes of the arenas: the memory map's peaks */
  uint64_t device_arena_bytes, host_arena_bytes;
  /* CUDA: scratch and workspaces; context, kernels and libraries. CPU backend: 0 */
  uint64_t device_scratch_bytes, device_overhead_bytes;
  /* arena + scratch + trace + reserve: held against the host cap */
  uint64_t host_used_bytes;
  uint64_t scratch_bytes, reserve_bytes, trace_bytes;
  uint64_t device_mem_bytes, host_mem_bytes; /* as given; 0: none */
  /* update: optimizer state on the device too */
  uint64_t resident_param_units, resident_grad_units, resident_update_units, n_units;
  /* updated on the device, moments coming from home for it and going back */
  uint64_t streamed_update_units;
  /* updated at home in two parts: weights first, moments behind all weights */
  uint64_t split_update_units;
  /* streamed, but kept from a round's backward pass to the next round's forward pass */
  uint64_t units_kept;
  /* the first round, which may be larger; all layers and chunks */
  uint64_t saved_device_bytes, saved_host_bytes, saved_recompute_bytes;
  uint64_t h2d_bytes, d2h_bytes;        /* a step */
  double model_flops, recompute_flops;  /* a step; recompute is every FLOP done twice */
  double step_s;                        /* predicted, steady state */
  double stream_busy_s[PS_MAX_STREAMS]; /* predicted, a steady step */
  uint64_t n_ops, n_waits;
  uint32_t n_candidates, n_feasible; /* plans looked at */
  uint32_t bottleneck_stream;
} ps_plan_report;

/* ps_plan_create() - search for the fastest plan under both caps: of all in the family or, for
 * large models and steps, of those looked at within a budget of ops, which is the same on every
 * machine. Pure but for reading the process's memory once; touches no model data. Deterministic.
 * Time: a few seconds for 8B on two cores, where memory gains a step little up to three times
 * that; steps of more than 2^20 ops are refused (PS_EINVAL). Memory: 1.3 KB an op of the step
 * and thread, 2 GB at most. @out on PS_OK owned by the caller, released by ps_plan_destroy().
 * Errors: PS_EINVAL names the field; PS_EBUDGET says what is missing and the nearest plan that
 * fits; PS_ENOMEM. */
PS_API ps_status ps_plan_create(ps_plan **out, const ps_model_config *model,
                                const ps_plan_config *cfg, const ps_hardware *hw);
/* What searches learn of the candidates of one model, batch and machine: bytes and simulated time,
 * which do not depend on caps. One thread at a time uses it. */
typedef struct ps_evaluations ps_evaluations;
PS_API ps_status ps_evaluations_create(ps_evaluations **out); /* PS_ENOMEM */
PS_API void ps_evaluations_destroy(ps_evaluations *shared);   /* NULL is a no-op */

/* ps_plan_create_sharing() - as ps_plan_create(), with the same plan as the result, and without
 * the evaluations that earlier calls with @shared have made: for plans under several caps, such as
 * a grid. @shared is borrowed for the call. Errors: those of ps_plan_create(); PS_EINVAL where
 * anything but the caps differs from the first call with @shared. */
PS_API ps_status ps_plan_create_sharing(ps_plan **out, ps_evaluations *shared,
                                        const ps_model_config *model, const ps_plan_config *cfg,
                                        const ps_hardware *hw);
/* ps_plan_destroy() - NULL is a no-op. PS_EBUSY while a trainer, or a run of its schedule,
 * lives: the plan then lives on. */
PS_API ps_status ps_plan_destroy(ps_plan *plan);
PS_API ps_status ps_plan_get_report(const ps_plan *plan, ps_plan_report *out);

/* ps_plan_smallest() - the least device memory (under cfg->host_mem_bytes) and the least host
 * memory (under cfg->device_mem_bytes) for which ps_plan_create() succeeds, BYTES; 0 where none
 * does. Exact (1 byte less of cap is refused) where all plans of the family can be looked at; of
 * large models and steps the least of those looked at in some seconds. */
PS_API ps_status ps_plan_smallest(const ps_model_config *model, const ps_plan_config *cfg,
                                  const ps_hardware *hw, uint64_t *device_mem_bytes,
                                  uint64_t *host_mem_bytes);

/* ps_plan_text() - the plan in words and a small table, for a person; ps_plan_json() -
 * everything, unit by unit and fate by fate, for scripts. Owned by the plan. NULL when memory
 * ran out. */
PS_API const char *ps_plan_text(ps_plan *plan);
PS_API const char *ps_plan_json(ps_plan *plan);

/* The compiled step, for looking at, simulating and tracing; borrowed from the plan. */
PS_API ps_schedule *ps_plan_schedule(ps_plan *plan);
/* Names of the schedule's streams: "compute", "h2d", "d2h", "host", "io". Static storage; NULL
 * past the last. */
PS_API const char *ps_plan_stream_name(uint32_t stream);
/* ps_plan_simulate() - the predicted trace of @n_steps steps, as ps_sim_run(). */
PS_API ps_status ps_plan_simulate(const ps_plan *plan, uint64_t n_steps, ps_trace_event *events,
                                  double *step_end_ns);

/* What a stream waited for. */
typedef struct ps_stall {
  uint32_t stream, awaited_stream; /* the same: launch and signals */
  double seconds;                  /* a step */
  char what[40];                   /* "parameters", "saved tensors", "the optimizer", ... */
} ps_stall;

/* ps_plan_stalls() - from a trace of the plan's schedule, of a run (ps_trainer_trace) or
 * simulated (ps_plan_simulate): how long each stream waited for what between two of its ops, a
 * step. @events: @n of them, whole steps, steps in order and program order inside a step; of
 * several the first does not count, as what it awaited of the step before is not there. Sorted
 * by stream, the longest first. With @room too small the first are written; @n_stalls is how
 * many there are. Errors: PS_EINVAL names the event that is not the plan's; PS_ENOMEM. */
PS_API ps_status ps_plan_stalls(const ps_plan *plan, const ps_trace_event *events, uint64_t n,
                                ps_stall *stalls, uint64_t room, uint64_t *n_stalls);

#ifdef __cplusplus
}
#endif
#endif
