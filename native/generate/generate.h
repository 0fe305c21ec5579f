/* generate.h - generation from the inside: where everything lies, the program of a step, drawing
 * tokens.
 *
 * A step computes `rows` rows: row i is a token, its sequence and its position in it. A row without
 * a token has position -1. There are two programs, which differ in their rows alone:
 *   prefill   the tokens of prompts, one prompt after the other
 *   decode    one row a sequence, its last token
 * A step gives logits for one row of each sequence, which batch.out names. */
#ifndef PS_GENERATE_H
#define PS_GENERATE_H
#include "engine/turn.h"
#include "model/model.h"
#include "step/room.h"
#include <penstock/generate.h>
#include <stdatomic.h>

enum { PS__GEN_SLOTS = 2 }; /* streamed blocks on the device at once: one computes, one comes in */

/* Programs. LOAD runs once before a call that generates beside a training: it copies the weights
 * that stay on the device for that call. */
enum { PS__GEN_PREFILL, PS__GEN_DECODE, PS__GEN_LOAD, PS__GEN_PROGRAMS };

/* Offsets of a step's batch, BYTES from its start. What the device needs of it is one range. */
typedef struct ps__gen_batch {
  uint64_t tokens;             /* int32[rows]; on the device too where ops there look them up */
  uint64_t sequence, position; /* int32[rows] */
  uint64_t out;                /* int32[n_sequences]: the rows that logits are made of */
  uint64_t for_device, bytes;  /* where the device's range begins; all */
} ps__gen_batch;

/* Where everything lies: offsets in a space, in BYTES. */
typedef struct ps__gen_map {
  ps__gen_batch batch;
  struct {
    /* drawn: int32[n_sequences][context]; values: fp32[threads][vocab]; candidates: as many
     * ps__gen_candidate */
    uint64_t batch, tensors, logits, state, drawn, values, candidates, embedding, counts, streamed,
        bytes;
  } host;
  /* of experts on demand, block after block: tables: ps__fetch_words(); counts: u64[2]; slots:
   * those of gate and up, then those of down */
  struct {
    uint64_t batch, x[2], tensors, carried, cache, dense, head, resident, buffer, tables, counts,
        slots, bytes;
  } device;
  uint64_t x_bytes; /* of a residual stream's rows */
} ps__gen_map;

/* Where weights are: a space, and BYTES from its start. */
typedef struct ps__gen_at {
  uint32_t space;
  uint64_t offset;
} ps__gen_at;

/* A block streams its weights in each step, or they stay on the device for the call. index: among
 * the streamed blocks. stays: BYTES from map.device.resident to those of its weights that stay.
 * With experts on demand the streamed blocks are those with experts, and these alone move. */
typedef struct ps__gen_block {
  bool streamed;
  uint32_t index;
  uint64_t stays;
} ps__gen_block;

/* Experts on demand (experts.c). The device has everything but the experts, and of each block's
 * experts a cache of n_slots. A program either fetches what its rows chose and the cache lacks, or
 * streams each block's experts through two buffers, which lie over the first caches. */
typedef struct ps__gen_experts {
  uint32_t n_blocks;                             /* that have experts */
  uint32_t n_slots;                              /* 0: blocks are streamed whole */
  bool fetches[2];                               /* by program */
  uint64_t bytes[2];                             /* of an expert: gate and up; down */
  uint64_t unit_bytes, table_bytes, slots_bytes; /* of a block; its experts, its table, its cache */
} ps__gen_experts;

/* The memory of a training between two steps, by space. Generation has what lies past the first
 * @used bytes; @arena: BYTES that there are. @weights: where the training keeps those of each unit;
 * NULL: generation has memory of its own. Of several devices generation uses the first. */
typedef struct ps__gen_beside {
  const ps__places *at; /* the training's; NULL: one device */
  ps__gen_at *weights;  /* [n_units]; the plan owns it after ps__gen_plan_beside() */
  uint32_t n_units;
  uint64_t used[PS_MAX_PLACES], arena[PS_MAX_PLACES];
  bool pageable; /* not all of the host's memory is pinned: the device cannot read experts there */
} ps__gen_beside;

typedef struct ps__gen_plan {
  ps_model *model; /* owned */
  ps__gen_beside beside;
  ps__gen_block *block; /* [n_blocks], owned */
  uint32_t n_moved;     /* blocks with weights that are not on the device anyway */
  uint32_t n_kept;      /* of them, those that are not streamed */
  uint32_t n_ops;       /* of a step on the device, but for fetches */
  uint64_t dense_bytes; /* of all blocks' quantized weights, dequantized */
  ps__gen_experts experts;
  ps_generate_config cfg;
  ps_hardware hw;
  const ps__places *at;
  uint32_t rows[2]; /* of the prefill program, of the decode program */
  ps__gen_map map;
  size_t scratch_bytes[PS_MAX_STREAMS];
  ps_generate_report report;
} ps__gen_plan;

/* ---- where everything lies (memory.c) -------------------------------------------------------- */
/* ps__gen_plan_init() - the model's definitions, what it takes, which blocks are resident. On an
 * error nothing is left to free. ps__gen_plan_free() - the model. */
ps_status ps__gen_plan_init(ps__gen_plan *p, const ps_model_config *model,
                            const ps_generate_config *cfg, const ps_hardware *hw);
void ps__gen_plan_free(ps__gen_plan *p);
/* ps__gen_plan_beside() - the same in the memory of a training, under no cap: the caller compares
 * map.host.bytes and map.device.bytes with what there is. Takes @beside->weights, after an error
 * too. */
ps_status ps__gen_plan_beside(ps__gen_plan *p, const ps_model_config *model,
                              const ps_generate_config *cfg, const ps_hardware *hw,
                              const ps__gen_beside *beside);
/* Whether the embedding's rows are looked up on the device: a training's table is there. */
static inline bool ps__gen_looks_up_there(const ps__gen_plan *p) {
  return p->beside.weights && p->beside.weights[0].space == p->at->dev[0].place;
}
/* Whether a unit's weights must be copied before compute reads them. */
static inline bool ps__gen_is_moved(const ps__gen_plan *p, uint32_t unit) {
  return !p->beside.weights || p->beside.weights[unit].space != p->at->dev[0].place;
}
/* Where the weights of a layer's unit lie. A tied head reads the embedding's unit too.
 *   ps__gen_weights()  where ops read them, or what is dequantized for them
 *   ps__gen_source()   of a block's unit that is moved: where they are copied from in each step or,
 *                      beside a training, once a call */
ps__gen_at ps__gen_weights(const ps__gen_plan *p, uint32_t layer, uint32_t unit);
ps__gen_at ps__gen_source(const ps__gen_plan *p, uint32_t layer, uint32_t unit);
/* ps__gen_storage() - how a unit's weights lie there. Those of a quantized unit are dequantized
 * before their layer's ops, into memory that all layers share:
 * ps__gen_dense() - where ops read them; @unit is quantized.
 * ps__gen_dense_bytes() - BYTES of all of a layer's there. */
static inline ps__storage ps__gen_storage(const ps__gen_plan *p, uint32_t unit) {
  return ps__unit_storage(p->model, unit, ps__weight_storage(p->model));
}
ps__gen_at ps__gen_dense(const ps__gen_plan *p, uint32_t layer, uint32_t unit);
uint64_t ps__gen_dense_bytes(const ps__gen_plan *p, uint32_t layer);
/* Whether a unit's weights are copied to the device in each step that does not fetch them. */
bool ps__gen_streams(const ps__gen_plan *p, uint32_t layer, uint32_t unit);
/* A forward op as generation runs it: its kernel, and its arguments for @rows in @args, which has
 * room for PS__ARGS_BYTES. */
const ps_kernel *ps__gen_op(const ps__op_def *op, uint32_t rows, void *args);
/* Forward ops of a layer that a step runs: all but the head's loss. */
uint32_t ps__gen_n_ops(const ps__layer_def *d);
/* BYTES that a forward op of a block keeps of all sequences from step to step: keys and values, or
 * states. */
uint64_t ps__gen_cache_bytes(const ps__gen_plan *p, const ps__op_def *op);
/* BYTES from map.device.cache to the caches of block @layer. One with PS_LAYER_SHARED_KV has those
 * of the block whose keys and values it reads. */
uint64_t ps__gen_cache_offset(const ps__gen_plan *p, uint32_t layer);
/* BYTES from map.device.carried to a tensor that passes between blocks; of PS__N_CARRIED: to the
 * end. */
uint64_t ps__gen_carried_offset(const ps__gen_plan *p, uint32_t carried);
/* The arguments of the lookup that picks, out of @rows rows, those that logits are made of. */
ps__args_embed ps__gen_pick(const ps__gen_plan *p, uint32_t rows);
/* Where tensor @t of a layer lies from the layer's tensors on, and its BYTES. */
uint64_t ps__gen_tensor_offset(const ps__gen_plan *p, const ps__layer_def *d, uint32_t t);
uint64_t ps__gen_tensor_bytes(const ps__layer_def *d, uint32_t t, uint32_t rows);

/* ---- experts on demand (experts.c) ----------------------------------------------------------- */
/* The unit of a layer that has its experts; PS__GEN_NO_UNIT: it has none, or a training has them on
 * the device. */
enum { PS__GEN_NO_UNIT = UINT32_MAX };
uint32_t ps__gen_experts_unit(const ps__gen_plan *p, uint32_t layer);
/* ps__gen_count_experts() - n_blocks, bytes and unit_bytes of p->experts.
 * ps__gen_size_slots() - table_bytes and slots_bytes of @n_slots.
 * ps__gen_least_slots() - what a step of program @i may want of a block at once. */
void ps__gen_count_experts(ps__gen_plan *p);
void ps__gen_size_slots(ps__gen_experts *x, const ps__gen_plan *p, uint32_t n_slots);
uint32_t ps__gen_least_slots(const ps__gen_plan *p, uint32_t i);
/* BYTES at the start of the caches that a program which streams overwrites; 0: none does. */
uint64_t ps__gen_buffer_bytes(const ps__gen_plan *p);
/* Blocks whose caches such a program overwrites. */
uint32_t ps__gen_overwritten(const ps__gen_plan *p);
/* ps__gen_predict() - what a decode step reads and copies, and the time that takes, where routing
 * is even: a report's weights_bytes, streamed_bytes and decode_s. @n_slots: 0, or of a cache. */
typedef struct ps__gen_step {
  double read_bytes, copied_bytes, seconds;
} ps__gen_step;
ps__gen_step ps__gen_predict(const ps__gen_plan *p, uint32_t n_slots);
/* The span of weights that product @i of experts reads; NULL: the layer has no such product. */
const ps__span_def *ps__gen_experts_span(const ps__layer_def *d, uint32_t i);
/* Of product @i of a block, 0: gate and up, 1: down: where the host has the experts, and where the
 * device has the slots. */
ps__gen_at ps__gen_experts_at(const ps__gen_plan *p, uint32_t layer, uint32_t i);
uint64_t ps__gen_slots_at(const ps__gen_plan *p, uint32_t layer, uint32_t i);

/* ---- the program of a step (program.c) ------------------------------------------------------- */
typedef enum ps__gen_hook { PS__GEN_FILL, PS__GEN_SAMPLE } ps__gen_hook;
/* FILL writes the batch and reads the state, SAMPLE reads the logits and writes the state.
 * Pointers: R state, W batch; R logits, RW state. */
typedef struct ps__gen_hooks {
  void *ctx;
  ps_status (*fn)(void *ctx, ps__gen_hook what, uint32_t program, const ps_launch *launch);
} ps__gen_hooks;
/* @hooks: borrowed as long as schedules made from it live. Of LOAD, *out is NULL where there is
 * nothing to copy. */
ps_status ps__gen_program(ps_program **out, const ps__gen_plan *p, uint32_t program,
                          ps__gen_hooks *hooks);
/* A plan with its compiled programs. The hooks are those of the generator that runs them. */
typedef struct ps__gen_setup {
  ps__gen_plan plan;
  ps__gen_hooks hooks;
  ps_schedule *schedule[PS__GEN_PROGRAMS]; /* LOAD: or NULL */
} ps__gen_setup;
/* ps__gen_compile() - fill in the schedules of @s, whose plan is made. Errors: PS_ENOMEM.
 * ps__gen_setup_free() - schedules and plan; no generator runs them. */
ps_status ps__gen_compile(ps__gen_setup *s);
void ps__gen_setup_free(ps__gen_setup *s);

/* ---- weights (load.c) ------------------------------------------------------------------------ */
/* The model's tensors, and those of its adapters, or NULL; none where weights are drawn. */
typedef struct ps__gen_files {
  ps_tensor_file *model, *adapters;
} ps__gen_files;
/* ps__gen_files_open() - what a generator of @p reads in @dir. After an error too the files must be
 * closed.
 * ps__gen_load() - read or draw the weights to where the plan has them. */
ps_status ps__gen_files_open(const ps__gen_plan *p, const char *dir, ps__gen_files *f);
void ps__gen_files_close(ps__gen_files *f);
ps_status ps__gen_load(const ps__gen_plan *p, ps_engine *engine, const ps__gen_files *f,
                       ps_progress_fn progress, void *user);

/* ---- a generator beside a training (generator.c) --------------------------------------------- */
/* ps__generator_beside() - a generator of @setup that takes turns with a training. It runs while
 * the training's run is paused. Both are borrowed until destroy, before which @turns close.
 * Errors: PS_ENOMEM. */
ps_status ps__generator_beside(ps_generator **out, ps__gen_setup *setup, ps__turns *turns);

/* ---- drawing tokens (sample.c) --------------------------------------------------------------- */
typedef struct ps__gen_candidate {
  float weight;
  int32_t id;
} ps__gen_candidate;
/* ps__gen_draw() - the token of number @index after the prompt, of the request's distribution over
 * logits[n] (fp32). @scratch: n candidates. -1: a logit is not finite. */
int32_t ps__gen_draw(const float *logits, uint32_t n, const ps_generate_request *r, uint64_t index,
                     ps__gen_candidate *scratch);
#endif
