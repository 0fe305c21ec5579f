/* penstock/generate.h - text from a model: tokens that follow prompts, with a KV cache (keys and
 * values of earlier tokens), under the same device cap as training.
 *
 * A generator owns an engine with two spaces, device and host. The blocks' weights are
 * device-resident as far as the cap allows; the other blocks are streamed for each step. The head
 * and the KV cache are always on the device, the embedding is always on the host.
 *
 *   ps_generate_config cfg = {.struct_bytes = sizeof cfg, .n_sequences = 4, .context = 2048};
 *   ps_generator_create(&g, "model", &cfg, &hw, NULL, NULL);
 *   ps_generator_run(g, requests, n, on_token, user, &stats);
 *   ps_generator_destroy(g);
 *
 * On the CPU backend the tokens of a request are a function of the model, its adapters, the dtype,
 * the context of a model with longrope, and the request. Caps, threads and the other requests do
 * not change them.
 *
 * Threads: one thread at a time calls the functions of a generator. */
#ifndef PENSTOCK_GENERATE_H
#define PENSTOCK_GENERATE_H
#include "hardware.h"
#include "model.h"
#include "train.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_generator ps_generator;

/* How the blocks of a mixture of experts come to the device where not all fit.
 *   AUTO       on demand where a decode step is predicted to be faster so
 *   WHOLE      a block's weights are copied in each step, but for those of resident blocks
 *   ON_DEMAND  everything but the experts is device-resident, and a part of each block's experts,
 *              in as many slots as the cap allows. A decode step copies the experts that its tokens
 *              choose and that are in no slot; they take the slots that were used longest ago. */
typedef enum ps_generate_experts {
  PS_EXPERTS_AUTO = 0,
  PS_EXPERTS_WHOLE = 1,
  PS_EXPERTS_ON_DEMAND = 2
} ps_generate_experts;

typedef struct ps_generate_config {
  uint32_t struct_bytes; /* sizeof(ps_generate_config) */
  uint32_t dtype;        /* ps_dtype of weights, activations and KV cache */
  /* Caps in BYTES; 0: none. On CUDA the device's memory is a cap too. */
  uint64_t device_mem_bytes, host_mem_bytes;
  uint64_t n_sequences; /* requests that are computed at once; 1 to PS_MAX_SEQUENCES */
  /* Tokens that a sequence may have, its prompt among them. A model with longrope has its long
   * factors where the context exceeds the original one. */
  uint64_t context;
  uint64_t prefill_tokens; /* of prompts that a step computes at once; 0: 128, on CUDA 1024 */
  uint32_t deterministic;  /* CUDA: 1 for the same bits in every run */
  uint32_t experts;        /* ps_generate_experts */
  /* 1: weights are drawn, fast and badly, for benchmarks. The model directory then needs
   * config.json alone. */
  uint32_t init_weights;
  uint32_t reserved;
  /* The adapters of a LoRA: what ps_adapter_read() says of adapter_dir; rank 0: none. They are
   * computed as in training, beside the weights, which lora.base quantizes as in training: they
   * stay so on the device, and are dequantized before each block's ops. */
  ps_lora lora;
  /* Their directory, in PEFT's layout (penstock/adapter.h): given with lora, else NULL. Borrowed
   * for ps_generator_create(), which reads it. */
  const char *adapter_dir;
} ps_generate_config;

/* What a generator takes, in BYTES, and what it does with the blocks. */
typedef struct ps_generate_report {
  uint64_t device_used_bytes, host_used_bytes;
  /* Weights that a decode step reads on the device, and that it copies there first. Of experts, as
   * many as even routing chooses on average. Of blocks that are streamed whole all are copied. */
  uint64_t weights_bytes, streamed_bytes;
  uint64_t prefill_streamed_bytes; /* that a prefill step copies */
  /* Of all sequences together: keys and values, and states of gated delta-nets. */
  uint64_t cache_bytes;
  uint64_t block_bytes; /* the largest block's weights */
  uint64_t head_bytes;
  uint64_t activation_bytes;     /* device memory of a step's tensors and batch */
  uint64_t overhead_bytes;       /* on the device: kernels, libraries, scratch, page tables */
  uint64_t least_device_bytes;   /* the smallest cap that does: two blocks at a time */
  uint64_t prefill_tokens;       /* as used */
  uint32_t n_blocks, n_resident; /* blocks, and those of them that are device-resident */
  uint32_t n_experts;            /* of a block; 0: none has any */
  uint32_t n_slots;      /* on demand: of a block's experts on the device; 0: not on demand */
  uint64_t expert_bytes; /* of an expert of a block */
  /* Seconds of a decode step by the link, the device's memory and the fixed cost of ops, as
   * planned, and with blocks streamed whole; 0: no rate is known. */
  double decode_s, whole_decode_s;
  uint64_t dense_bytes; /* on the device: a block's dequantized weights; 0: none are quantized */
  uint64_t state_bytes; /* of cache_bytes what does not grow with the context */
} ps_generate_report;

/* ps_generate_plan() - what a generator of this configuration takes on machine @hw. Pure.
 * Errors: PS_EINVAL, PS_EFORMAT name the field; PS_EBUDGET names the cap and what it must hold. */
PS_API ps_status ps_generate_plan(ps_generate_report *out, const ps_model_config *model,
                                  const ps_generate_config *cfg, const ps_hardware *hw);

/* ps_generator_create() - reserve memory by ps_generate_plan(), and load the weights of
 * @model_dir. @cfg and @hw are borrowed for the call.
 * @out       on PS_OK a generator that the caller owns and ps_generator_destroy() releases.
 * @progress  as in ps_trainer_create(), or NULL.
 * Blocks: while memory is reserved and weights are read.
 * Errors: those of ps_generate_plan(); PS_EFORMAT, PS_EIO name a tensor or a file; PS_EINVAL: the
 *         adapter is of another model; PS_ENOMEM; PS_EDEVICE. */
PS_API ps_status ps_generator_create(ps_generator **out, const char *model_dir,
                                     const ps_generate_config *cfg, const ps_hardware *hw,
                                     ps_progress_fn progress, void *progress_user);
/* ps_generator_destroy() - NULL is a no-op. */
PS_API void ps_generator_destroy(ps_generator *g);
/* ps_generator_report() - what it takes; valid until destroy. */
PS_API const ps_generate_report *ps_generator_report(const ps_generator *g);

/* A prompt and how its tokens are drawn. */
typedef struct ps_generate_request {
  const int32_t *tokens; /* the prompt */
  uint64_t n_tokens;     /* at least 1 */
  uint64_t max_new_tokens;
  double temperature; /* 0: the most likely token, of equal ones the lowest id */
  double top_p;       /* 0 < top_p <= 1: the likeliest tokens that have this much together */
  uint64_t top_k;     /* only the k likeliest tokens; 0: all */
  uint64_t seed;      /* equal seeds draw equal tokens */
  const int32_t *stop_tokens; /* each ends the request and is not given to the caller */
  uint64_t n_stop_tokens;
} ps_generate_request;

/* ps_token_fn() - the caller's function that gets each new token, on the thread of
 * ps_generator_run(). Tokens of one request come in order.
 * Returns 0 to go on; 1 to end this request; a negative value to end the call with
 * PS_ECANCELLED. */
typedef int (*ps_token_fn)(void *user, uint64_t request, int32_t token);

/* Tokens and seconds of a call. Prefill: from the prompts to each request's first token. Decode:
 * all later tokens. */
typedef struct ps_generate_stats {
  uint64_t prompt_tokens, new_tokens, decoded_tokens; /* decoded: new, but for each first one */
  uint64_t prefill_steps, decode_steps;
  double prefill_s, decode_s;
  /* Experts that the tokens of steps on demand chose, each once a step and block; of them, those
   * that were copied to the device. */
  uint64_t experts_wanted, experts_missed;
} ps_generate_stats;

/* ps_generator_run() - generate for @n requests, n_sequences of them at a time, in their order.
 * @requests, what they point to, and @fn are borrowed for the call. @stats may be NULL.
 * Errors: PS_EINVAL names the request, the field and the limit, before any token. Messages count
 *         requests from 1, @fn from 0. PS_ENUMERIC: logits are not finite. PS_ECANCELLED: @fn said
 *         so. PS_EDEVICE. After PS_EINVAL and PS_ECANCELLED the generator may be used again. */
PS_API ps_status ps_generator_run(ps_generator *g, const ps_generate_request *requests, uint64_t n,
                                  ps_token_fn fn, void *user, ps_generate_stats *stats);

/* ps_trainer_sample() - the same with the weights of a training as they are between two steps, in
 * its memory: @n requests, ps_plan_config.sample_sequences of them at a time. A prompt and its text
 * have at most sample_context tokens. A training gives the same bits with and without samples. On
 * the CPU backend the tokens are those of a generator of the saved weights, of the recipe's dtype.
 * Blocks: until the texts are complete.
 * Errors that stop the trainer, as those of wait do: PS_ECANCELLED by ps_trainer_cancel(),
 *         PS_EDEVICE, PS_ENOMEM. The weights are those of the last step.
 * Errors that do not: PS_EINVAL: a request, or the plan is made without samples; PS_ENUMERIC:
 *         logits are not finite; PS_ECANCELLED: @fn said so; PS_ESTATE: steps are in flight, or the
 *         call is made inside the trainer's own batch function. */
PS_API ps_status ps_trainer_sample(ps_trainer *t, const ps_generate_request *requests, uint64_t n,
                                   ps_token_fn fn, void *user, ps_generate_stats *stats);

#ifdef __cplusplus
}
#endif
#endif
