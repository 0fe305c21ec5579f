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
#include "engine/engine.h"
#include "plan/plan_impl.h"
#include <penstock/generate.h>
#include <stdatomic.h>

enum { PS__GEN_SLOTS = 2 }; /* streamed blocks on the device at once: one computes, one comes in */

/* Offsets of a step's batch, BYTES from its start. What the device needs of it is one range. */
typedef struct ps__gen_batch {
  uint64_t tokens;             /* int32[rows], on the host alone */
  uint64_t sequence, position; /* int32[rows] */
  uint64_t out;                /* int32[n_sequences]: the rows that logits are made of */
  uint64_t for_device, bytes;  /* where the device's range begins; all */
} ps__gen_batch;

/* Where everything lies: offsets in a space, in BYTES. */
typedef struct ps__gen_map {
  ps__gen_batch batch;
  struct {
    uint64_t batch, tensors, logits, state, embedding, streamed, bytes;
  } host;
  struct {
    uint64_t batch, x[2], tensors, cache, head, resident, slot, bytes;
  } device;
  uint64_t x_bytes; /* of a residual stream's rows */
} ps__gen_map;

typedef struct ps__gen_plan {
  ps_model *model; /* owned */
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
/* Blocks that are resident are spread evenly. @block: from 0. ps__gen_before() - how many of the
 * blocks before @block are. */
static inline uint32_t ps__gen_before(const ps__gen_plan *p, uint32_t block) {
  return (uint32_t)((uint64_t)block * p->report.n_resident / p->report.n_blocks);
}
static inline bool ps__gen_is_resident(const ps__gen_plan *p, uint32_t block) {
  return ps__gen_before(p, block + 1) > ps__gen_before(p, block);
}
/* Where the weights of a layer's unit lie from the layer's first byte on. A tied head has the
 * embedding's unit after its own. */
uint64_t ps__gen_unit_offset(const ps__gen_plan *p, uint32_t layer, uint32_t unit);
/* Where a layer's weights lie: *space, and the offset. A streamed block's are on the host. */
uint64_t ps__gen_layer_at(const ps__gen_plan *p, uint32_t layer, uint32_t *space);
/* A forward op as generation runs it: its kernel, and its arguments for @rows in @args, which has
 * room for PS__ARGS_BYTES. */
const ps_kernel *ps__gen_op(const ps__op_def *op, uint32_t rows, void *args);
/* Forward ops of a layer that a step runs: all but the head's loss. */
uint32_t ps__gen_n_ops(const ps__layer_def *d);
/* The arguments of the lookup that picks, out of @rows rows, those that logits are made of. */
ps__args_embed ps__gen_pick(const ps__gen_plan *p, uint32_t rows);
/* Where tensor @t of a layer lies from the layer's tensors on, and its BYTES. */
uint64_t ps__gen_tensor_offset(const ps__gen_plan *p, const ps__layer_def *d, uint32_t t);
uint64_t ps__gen_tensor_bytes(const ps__layer_def *d, uint32_t t, uint32_t rows);

/* ---- the program of a step (program.c) ------------------------------------------------------- */
typedef enum ps__gen_hook { PS__GEN_FILL, PS__GEN_SAMPLE } ps__gen_hook;
/* FILL writes the batch and reads the state, SAMPLE reads the logits and writes the state.
 * Pointers: R state, W batch; R logits, RW state. */
typedef struct ps__gen_hooks {
  void *ctx;
  ps_status (*fn)(void *ctx, ps__gen_hook what, uint32_t program, const ps_launch *launch);
} ps__gen_hooks;
/* @program: 0 prefill, 1 decode. @hooks: borrowed as long as schedules made from it live. */
ps_status ps__gen_program(ps_program **out, const ps__gen_plan *p, uint32_t program,
                          ps__gen_hooks *hooks);

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
