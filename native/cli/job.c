/* job.c - the options of train, plan and demo, and the plan that follows from them. */
#include "cli/cli.h"
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* The library's names, filled in by cli_job_options(); NULL ends each. */
static const char *recipes[PS_N_RECIPES + 1], *bases[PS_N_BASES + 1], *layouts[PS_N_LAYOUTS + 1],
    *optimizers[PS_N_OPTIMIZERS + 1];
static const char *const transports[] = {"auto", "nccl", "tcp", NULL};
static const char *const clip_by[] = {"step", "previous", NULL};
static const char *const non_finite[] = {"stop", "skip", NULL};
const char *const cli_lr_schedules[] = {"constant", "cosine", "linear", "wsd", NULL};
static const char *const replans[] = {"off", "auto", "cut", NULL}; /* as ps_replan */
static const char *const decay_groups[] = {"norm", "bias", "embedding", NULL};
static const char *const dtypes[] = {"fp32", "bf16", "mxfp4", NULL};

void cli_job_init(cli_job *job) {
  *job = (cli_job){
      .model_option = "--model",
      .device = {.n_gpus = 1},
      .save_dtype = PS_DEFAULT,
      .epochs = NAN,
      .warmup_ratio = NAN,
      .save_wait = 600,
      .hosts_wait = 300,
      .keep = CLI_KEEP,
      .sample_tokens = 64,
      .sample_top_p = 1,
  };
  ps_plan_config_init(&job->plan_config);
  ps_train_config_init(&job->train_config);
  job->train_config.replan = PS_REPLAN_AUTO;
}

void cli_job_free(cli_job *job) {
  ps_plan_destroy(job->plan);
  free(job->out_seen);
  free(job->out_tried);
  free(job->checkpoints.newest);
  free(job->checkpoints.writing);
  free(job->data.item);
  free(job->batch_ramp.item);
  cli_samples_free(job);
  free(job->sample_prompt.item);
  free(job->sample_ids.item);
  free(job->run_text);
  free(job->default_out);
  cli_val_free(job);
}

/* An option, and where in a cli_job its value goes: BYTES from the start. */
typedef struct job_option {
  enum { ALWAYS, TRAINING } when; /* TRAINING: of a training run alone */
  size_t at, given;               /* of the value; of whether it was given, 0: nobody asks */
  const char *field;              /* of a cli_job, such as "plan_config.seq_len" */
  cli_option option;
} job_option;
#define AT(field)    offsetof(cli_job, field)
#define BYTES(field) sizeof(((cli_job *)NULL)->field)
#define GIVEN(when, under, field, was, ...)                                                        \
  {                                                                                                \
    when, AT(field), AT(was), #field, { .heading = (under), .bytes = BYTES(field), __VA_ARGS__ }   \
  }
#define OPTION(when, under, field, ...)                                                            \
  {                                                                                                \
    when, AT(field), 0, #field, { .heading = (under), .bytes = BYTES(field), __VA_ARGS__ }         \
  }

/* In the order of run.toml and, under each heading, of --help. .table: of a run's file, "run" where
 * none is given. */
static const job_option job_options[] = {
    OPTION(ALWAYS, CLI_H_MODEL, model, .name = "model", .table = "model", .kind = CLI_TEXT,
           .value = "DIR",
           .help = "model directory in Hugging Face layout: config.json and safetensors"),
    OPTION(TRAINING, CLI_H_MODEL, data, .name = "data", .table = "data", .kind = CLI_TEXTS,
           .value = "SHARDS...",
           .help = "token shards (.bin), or folders of them; with the Python command also text; "
                   "A:0.7,B:0.3 mixes by weight"),
    OPTION(TRAINING, CLI_H_TRAINING, train_config.total_steps, .name = "steps", .kind = CLI_COUNT,
           .value = "N", .least = 1, .most = PS_MAX_STEPS,
           .help = "steps of the whole training, those before a resume included (default: by "
                   "--epochs)"),
    OPTION(TRAINING, CLI_H_TRAINING, epochs, .name = "epochs", .kind = CLI_NUMBER, .value = "N",
           .least = 1e-6, .most = 1e6,
           .help = "times through the data, in place of --steps; also a part, such as 0.5 (default "
                   "3 where masks mark documents, as in conversations; 1 for a stream)"),
    OPTION(ALWAYS, CLI_H_MODEL, plan_config.seq_len, .name = "seq-len", .table = "data",
           .kind = CLI_COUNT, .value = "N", .least = 1, .most = PS_MAX_ROWS,
           .help = "tokens in a sequence"),
    OPTION(ALWAYS, CLI_H_MEMORY, plan_config.device_mem_bytes, .name = "device-mem",
           .table = "memory", .kind = CLI_BYTES, .value = "SIZE",
           .help = "cap of the process's device memory, such as 20GiB (default: all there is)"),
    OPTION(
        ALWAYS, CLI_H_MEMORY, plan_config.host_mem_bytes, .name = "host-mem", .table = "memory",
        .kind = CLI_BYTES, .value = "SIZE",
        .help =
            "cap of the process's host memory, such as 80GiB (default: what the machine allows)"),
    OPTION(ALWAYS, CLI_H_MEMORY | CLI_RARE, plan_config.pinned_mem_bytes, .name = "pinned-mem",
           .table = "memory", .kind = CLI_BYTES, .value = "SIZE",
           .help = "how much host memory the system lets a process pin, such as 16GiB: WSL2, "
                   "containers, ulimit -l (default: all; train finds it where pinning is refused)"),
    OPTION(ALWAYS, CLI_H_MEMORY | CLI_RARE, train_config.disk, .name = "disk", .table = "memory",
           .kind = CLI_TEXT, .value = "DIR,DIR...",
           .help = "directories on NVMe drives of this machine, one a drive: optimizer state for "
                   "which host memory is too small lies there while the run goes on"),
    OPTION(ALWAYS, CLI_H_MEMORY | CLI_RARE, plan_config.disk_mem_bytes, .name = "disk-mem",
           .table = "memory", .kind = CLI_BYTES, .value = "SIZE",
           .help = "the most that --disk may take of the drives together, such as 200GiB"),
    OPTION(ALWAYS, CLI_H_MEMORY | CLI_RARE, plan_config.disk_tbw, .name = "disk-tbw",
           .table = "memory", .kind = CLI_NUMBER, .value = "TB", .least = 0, .most = 1e9,
           .help = "TB that the drives of --disk together are rated to be written: the plan says "
                   "how long they last"),
    OPTION(ALWAYS, CLI_H_MEMORY | CLI_RARE, train_config.replan, .name = "replan",
           .table = "memory", .kind = CLI_CHOICE, .value = "NAME", .choices = replans,
           .help = "where steps take another time than planned: auto (default) plans again beside "
                   "them and goes on by a faster plan with the same bits; cut also takes plans "
                   "that cut a step otherwise, which changes the bits; off"),
    OPTION(ALWAYS, CLI_H_BATCH, plan_config.tokens_per_step, .name = "tokens-per-step",
           .table = "data", .kind = CLI_COUNT, .value = "N", .least = 1, .most = PS_MAX_STEP_TOKENS,
           .help =
               "tokens of a step, rounded down to whole sequences (default: 8 sequences; on a GPU "
               "that streams the model as many as hide updates and copies, if 100 steps are left)"),
    OPTION(ALWAYS, CLI_H_BATCH | CLI_RARE, batch_ramp, .name = "batch-ramp", .table = "schedule",
           .kind = CLI_TEXTS, .value = "TOKENS:STEPS...",
           .help = "the first STEPS steps have TOKENS tokens, stage after stage; all later ones "
                   "--tokens-per-step"),
    OPTION(
        ALWAYS, CLI_H_MEMORY, plan_config.recipe, .name = "recipe", .table = "model",
        .kind = CLI_CHOICE, .value = "NAME", .choices = recipes,
        .help =
            "dtypes: bf16 (8 bytes of host memory a parameter with AdamW; default), fp24-master "
            "(9), fp32-master (16; "
            "default with LoRA), fp32 (16; on the CPU alone), or fp8 and fp8-master: as bf16 and "
            "fp32-master, with FP8 products"),
    OPTION(ALWAYS, CLI_H_MEMORY | CLI_RARE, plan_config.state_bits, .name = "state-bits",
           .table = "optimizer", .kind = CLI_COUNT, .value = "8", .least = 0, .most = 64,
           .help = "8: optimizer state in 8 bits, 2.1 bytes a parameter with AdamW instead of the "
                   "recipe's 4 or 8"),
    OPTION(
        ALWAYS, CLI_H_FP8, plan_config.recipe, .name = "fp8", .table = "", .kind = CLI_GROUP,
        .value = "KEY=N,KEY...",
        .help =
            "with FP8, with commas: bf16-first=N, bf16-last=N, the first and last N blocks compute "
            "in bf16 (default 1 each); bf16-down, the down projections of all blocks do; head, the "
            "head's products have FP8 operands too; fast-accumulation, forward products use the "
            "GPU's instead of sums in fp32: an H100 then keeps 14 bits of a sum"),
    OPTION(ALWAYS, CLI_H_FP8, plan_config.fp8_bf16_first, .name = "fp8-bf16-first", .grouped = true,
           .table = "model", .kind = CLI_COUNT, .value = "N", .most = PS_MAX_LAYERS),
    OPTION(ALWAYS, CLI_H_FP8, plan_config.fp8_bf16_last, .name = "fp8-bf16-last", .grouped = true,
           .table = "model", .kind = CLI_COUNT, .value = "N", .most = PS_MAX_LAYERS),
    OPTION(ALWAYS, CLI_H_FP8, plan_config.fp8_bf16_down, .name = "fp8-bf16-down", .grouped = true,
           .table = "model", .kind = CLI_FLAG),
    OPTION(ALWAYS, CLI_H_FP8, plan_config.fp8_head, .name = "fp8-head", .grouped = true,
           .table = "model", .kind = CLI_FLAG),
    OPTION(ALWAYS, CLI_H_FP8, plan_config.fp8_fast_accumulation, .name = "fp8-fast-accumulation",
           .grouped = true, .table = "model", .kind = CLI_FLAG),
    OPTION(ALWAYS, CLI_H_TRAINING, plan_config.optimizer, .name = "optimizer", .table = "optimizer",
           .kind = CLI_CHOICE, .value = "NAME", .choices = optimizers,
           .help = "adamw (default), lion or sgd; lion and sgd keep half of adamw's state"),
    OPTION(ALWAYS, CLI_H_FINE, plan_config.chunk_tokens, .name = "chunk-tokens", .table = "memory",
           .kind = CLI_COUNT, .value = "N", .least = 1, .most = PS_MAX_ROWS,
           .help =
               "tokens that one kernel call works on, a chunk: a multiple of --seq-len, or less "
               "than it (default: planned)"),
    OPTION(ALWAYS, CLI_H_FINE, plan_config.chunks_per_round, .name = "chunks-per-round",
           .table = "memory", .kind = CLI_COUNT, .value = "N", .least = 1, .most = PS_MAX_CHUNKS,
           .help =
               "chunks in a round, the micro-batch of gradient accumulation (default: planned)"),
    OPTION(ALWAYS, CLI_H_FINE, plan_config.first_round_chunks, .name = "first-round-chunks",
           .table = "memory", .kind = CLI_COUNT, .value = "N", .least = 1, .most = PS_MAX_CHUNKS,
           .help = "chunks of each of the first rounds, which may be larger (default: planned, or "
                   "--chunks-per-round)"),
    OPTION(ALWAYS, CLI_H_FINE, plan_config.first_rounds, .name = "first-rounds", .table = "memory",
           .kind = CLI_COUNT, .value = "N", .least = 1, .most = PS_MAX_CHUNKS,
           .help = "rounds at the start of a step that have --first-round-chunks (default: 1 where "
                   "those are given, else --gpus)"),
    OPTION(ALWAYS, CLI_H_FINE, plan_config.head_slice_tokens, .name = "head-slice-tokens",
           .table = "memory", .kind = CLI_COUNT, .value = "N", .least = 1, .most = PS_MAX_ROWS,
           .help =
               "tokens for which head and loss run at once (default: from the vocabulary's size)"),
    OPTION(ALWAYS, CLI_H_TRAINING | CLI_RARE, plan_config.n_frozen_layers, .name = "frozen-layers",
           .table = "model", .kind = CLI_COUNT, .value = "N", .most = PS_MAX_LAYERS + 1,
           .help = "train none of the first N layers: the embedding, then the blocks (default 0)"),
    OPTION(ALWAYS, CLI_H_LORA, plan_config.lora.rank, .name = "lora-rank", .table = "model",
           .kind = CLI_COUNT, .value = "R", .least = 1, .most = 1 << 20,
           .help = "train LoRA adapters of rank R beside the frozen model, without dropout"),
    OPTION(ALWAYS, CLI_H_LORA, plan_config.lora.alpha, .name = "lora-alpha", .table = "model",
           .kind = CLI_NUMBER, .value = "A", .most = PS_MAX_LORA_ALPHA,
           .help = "an adapter's product is scaled by A / R (default: twice the rank)"),
    OPTION(ALWAYS, CLI_H_LORA, lora_targets, .name = "lora-targets", .table = "model",
           .kind = CLI_TEXT, .value = "NAMES",
           .help = "the adapted projections, such as q_proj,v_proj, or all-linear (default)"),
    OPTION(ALWAYS, CLI_H_LORA | CLI_RARE, plan_config.lora.rslora, .name = "lora-rslora",
           .table = "model", .kind = CLI_FLAG,
           .help = "scale by A over the square root of R instead (rsLoRA)"),
    OPTION(ALWAYS, CLI_H_LORA | CLI_RARE, plan_config.lora.base, .name = "base-dtype",
           .table = "model", .kind = CLI_CHOICE, .value = "NAME", .choices = bases,
           .help = "how the frozen matrices of the blocks are kept and streamed: bf16 (default), "
                   "fp8 (1.06 bytes a weight), nf4 or mxfp4 (0.53)"),
    OPTION(ALWAYS, CLI_H_LORA, train_config.adapter_dir, .name = "adapter", .table = "model",
           .kind = CLI_TEXT, .value = "DIR",
           .help = "a LoRA adapter in PEFT's layout, which train goes on training"),
    OPTION(ALWAYS, CLI_H_OPTIMIZER, plan_config.z_loss, .name = "z-loss", .table = "optimizer",
           .kind = CLI_NUMBER, .value = "X", .most = PS_MAX_Z_LOSS,
           .help = "adds X * logsumexp(logits)^2 to the loss, such as 1e-4 (default 0: none)"),
    OPTION(ALWAYS, CLI_H_OPTIMIZER, plan_config.label_smoothing, .name = "label-smoothing",
           .table = "optimizer", .kind = CLI_NUMBER, .value = "X", .most = 0.999,
           .help = "spreads this part of each target, from 0 to 0.999, over the whole vocabulary "
                   "(default 0)"),
    OPTION(ALWAYS, CLI_H_OPTIMIZER, plan_config.router_aux_loss, .name = "router-aux-loss",
           .table = "optimizer", .kind = CLI_NUMBER, .value = "X", .most = PS_MAX_ROUTER_LOSS,
           .help = "coefficient of the experts' auxiliary loss (default: that of config.json, 0 "
                   "with LoRA)"),
    OPTION(ALWAYS, CLI_H_OPTIMIZER | CLI_RARE, plan_config.router_z_loss, .name = "router-z-loss",
           .table = "optimizer", .kind = CLI_NUMBER, .value = "X", .most = PS_MAX_ROUTER_LOSS,
           .help = "adds X times the mean of logsumexp(router logits)^2 to the loss (default 0)"),
    OPTION(ALWAYS, CLI_H_OPTIMIZER, plan_config.non_finite, .name = "non-finite",
           .table = "optimizer", .kind = CLI_CHOICE, .value = "NAME", .choices = non_finite,
           .help = "where a loss or gradient is not finite: stop (default), or skip the step's "
                   "update"),
    OPTION(TRAINING, CLI_H_OPTIMIZER, train_config.max_skips, .name = "max-skips",
           .table = "optimizer", .kind = CLI_COUNT, .value = "N", .least = 1, .most = PS_MAX_STEPS,
           .help = "stop after more than N skipped steps in a row (default 10)"),
    OPTION(ALWAYS, CLI_H_HARDWARE, device.backend, .name = "backend", .kind = CLI_CHOICE,
           .value = "NAME", .choices = cli_backends,
           .help = "cuda, cpu or auto, which is cuda where there is a GPU (default)"),
    GIVEN(ALWAYS, CLI_H_HARDWARE | CLI_RARE, device.gpu, device.gpu_given, .name = "gpu",
          .kind = CLI_COUNT, .value = "N", .most = CLI_MAX_GPU,
          .help = "which of the visible GPUs (default 0); not together with --gpus"),
    OPTION(TRAINING, CLI_H_HARDWARE, device.n_gpus, .name = "gpus", .kind = CLI_COUNT, .value = "N",
           .least = 1, .most = PS_MAX_DEVICES,
           .help = "train on the first N visible GPUs, which must be of one type (default 1); with "
                   "--backend cpu on an arena in place of each"),
    OPTION(ALWAYS, CLI_H_HOSTS, plan_config.layout, .name = "layout", .kind = CLI_CHOICE,
           .value = "NAME", .choices = layouts,
           .help = "how several GPUs share a step: data-parallel, each with rounds of its own; "
                   "ring, each with layers of its own; or auto, the one that is predicted to be "
                   "faster (default)"),
    OPTION(TRAINING, CLI_H_HOSTS, hosts_wait, .name = "hosts-wait", .kind = CLI_NUMBER,
           .value = "SECONDS", .least = 0.1, .most = 1e6,
           .help = "where torchrun, srun or mpirun start a task on each of several hosts: how long "
                   "to wait for the others (default 300)"),
    OPTION(TRAINING, CLI_H_HOSTS, hosts_insecure, .name = "hosts-insecure", .kind = CLI_FLAG,
           .help = "let tasks of other hosts meet without PENSTOCK_HOSTS_SECRET: whoever reaches "
                   "the port of rank 0 is taken for a task"),
    OPTION(ALWAYS, CLI_H_HOSTS, plan_config.transport, .name = "hosts-transport",
           .kind = CLI_CHOICE, .value = "NAME", .choices = transports,
           .help = "how gradients go between hosts: nccl, tcp, or auto, which is nccl where all "
                   "tasks train on GPUs and have NCCL (default)"),
    OPTION(ALWAYS, CLI_H_HARDWARE | CLI_RARE, device.threads, .name = "threads", .kind = CLI_COUNT,
           .value = "N", .least = 1, .most = PS_MAX_THREADS,
           .help =
               "threads of host ops, and of compute on a CPU (default: all CPUs, two less with a "
               "GPU)"),
    OPTION(ALWAYS, CLI_H_HARDWARE | CLI_RARE, plan_config.deterministic, .name = "deterministic",
           .kind = CLI_FLAG,
           .help = "every run gives the same bits, on a GPU too; some kernels are slower"),
    OPTION(ALWAYS, CLI_H_PROFILING, device.peak_tflops, .name = "peak-tflops", .kind = CLI_NUMBER,
           .value = "X",
           .help = "the GPU's dense bf16 peak in TFLOP/s, for MFU (default: known by the GPU's "
                   "name)"),
    OPTION(TRAINING, CLI_H_MODEL, val, .name = "val", .table = "data", .kind = CLI_TEXTS,
           .value = "SHARDS...",
           .help = "validation data, or none (default: what penstock data split off --data)"),
    OPTION(TRAINING, CLI_H_FOLLOWING | CLI_RARE, val_every, .name = "val-every", .table = "log",
           .kind = CLI_COUNT, .value = "N", .least = 1, .most = PS_MAX_STEPS,
           .help = "validate after every N steps, and at the end (default: about 20 times a run, "
                   "every 10 to 1000 steps)"),
    OPTION(ALWAYS, CLI_H_FOLLOWING | CLI_RARE, plan_config.val_tokens, .name = "val-tokens",
           .table = "log", .kind = CLI_COUNT, .value = "T", .least = 1, .most = PS_MAX_STEP_TOKENS,
           .help = "tokens of a validation, the same ones each time (default: about 2% of the "
                   "run's time; plan: no validation)"),
    OPTION(TRAINING, CLI_H_FOLLOWING, sample_every, .name = "sample-every", .table = "samples",
           .kind = CLI_COUNT, .value = "N", .least = 1, .most = PS_MAX_STEPS,
           .help = "write text after every N steps, and at the end, into samples.jsonl of the run "
                   "directory (default: never)"),
    OPTION(TRAINING, CLI_H_FOLLOWING, sample_prompt, .name = "sample-prompt", .table = "samples",
           .kind = CLI_TEXTS, .value = "TEXT...",
           .help = "texts to continue; the binary itself needs --sample-ids too"),
    OPTION(TRAINING, CLI_H_SAMPLES, sample_prompts, .name = "sample-prompts", .table = "samples",
           .kind = CLI_TEXT, .value = "FILE",
           .help = "a file of prompts, as for penstock generate, for the Python package alone"),
    OPTION(TRAINING, CLI_H_SAMPLES, sample_ids, .name = "sample-ids", .table = "samples",
           .kind = CLI_TEXTS, .value = "IDS...",
           .help = "the prompts' token ids, such as 1,2,3; the Python package makes them"),
    OPTION(
        TRAINING, CLI_H_SAMPLES, sample_tokens, .name = "sample", .table = "", .kind = CLI_GROUP,
        .value = "KEY=VALUE...",
        .help =
            "how texts are drawn, with commas: tokens=N, at most (default 64); temperature=T, 0 "
            "always the most likely token, 1 the model's own distribution (default 0); top-k=N, "
            "from the N likeliest, 0 from all (default 0); top-p=P, from the likeliest that add up "
            "to P (default 1); seed=N (default 0)"),
    OPTION(TRAINING, CLI_H_SAMPLES, sample_tokens, .name = "sample-tokens", .grouped = true,
           .table = "samples", .kind = CLI_COUNT, .value = "N", .least = 1, .most = PS_MAX_ROWS),
    OPTION(TRAINING, CLI_H_SAMPLES, sample_temperature, .name = "sample-temperature",
           .grouped = true, .table = "samples", .kind = CLI_NUMBER, .value = "T", .most = 1e6),
    OPTION(TRAINING, CLI_H_SAMPLES, sample_top_k, .name = "sample-top-k", .grouped = true,
           .table = "samples", .kind = CLI_COUNT, .value = "N"),
    OPTION(TRAINING, CLI_H_SAMPLES, sample_top_p, .name = "sample-top-p", .grouped = true,
           .table = "samples", .kind = CLI_NUMBER, .value = "P", .least = 1e-9, .most = 1),
    OPTION(TRAINING, CLI_H_SAMPLES, sample_seed, .name = "sample-seed", .grouped = true,
           .table = "samples", .kind = CLI_COUNT, .value = "N"),
    OPTION(ALWAYS, CLI_H_PROFILING, plan_config.trace_steps, .name = "trace-steps", .table = "log",
           .kind = CLI_COUNT, .value = "N", .most = PS_MAX_TRACE_STEPS,
           .help = "how many of the last steps timeline.json shows; 0: no such file (default 2)"),
    OPTION(ALWAYS, CLI_H_OUTPUT, json, .name = "json", .table = "log", .kind = CLI_FLAG,
           .help = "print one JSON object on stdout"),
    OPTION(ALWAYS, CLI_H_OUTPUT, quiet, .name = "quiet", .table = "log", .kind = CLI_FLAG,
           .help = "print errors only, no progress and no summary"),
    OPTION(TRAINING, CLI_H_TRAINING, train_config.lr, .name = "lr", .table = "optimizer",
           .kind = CLI_NUMBER, .value = "X",
           .help = "peak learning rate (default: all weights 1e-5, LoRA 2e-4, fresh "
                   "weights 3e-4; lion about a third of these, sgd 1e-3)"),
    GIVEN(TRAINING, CLI_H_TRAINING | CLI_RARE, train_config.min_lr, min_lr_given, .name = "min-lr",
          .table = "schedule", .kind = CLI_NUMBER, .value = "X",
          .help = "floor of the learning rate (default 0)"),
    GIVEN(TRAINING, CLI_H_TRAINING, train_config.lr_kind, lr_schedule_given, .name = "lr-schedule",
          .table = "schedule", .kind = CLI_CHOICE, .value = "NAME", .choices = cli_lr_schedules,
          .help = "cosine (default), constant, linear or wsd (warmup-stable-decay)"),
    GIVEN(TRAINING, CLI_H_TRAINING, train_config.warmup_steps, warmup_given, .name = "warmup-steps",
          .table = "schedule", .kind = CLI_COUNT, .value = "N", .most = PS_MAX_STEPS,
          .help = "first steps, in which the learning rate rises linearly (default: by "
                  "--warmup-ratio)"),
    OPTION(TRAINING, CLI_H_TRAINING | CLI_RARE, warmup_ratio, .name = "warmup-ratio",
           .table = "schedule", .kind = CLI_NUMBER, .value = "X", .most = 1,
           .help =
               "the same as a part of all steps, rounded up (default 0.03; 0 with --lr-schedule "
               "constant)"),
    OPTION(TRAINING, CLI_H_TRAINING | CLI_RARE, train_config.decay_steps, .name = "decay-steps",
           .table = "schedule", .kind = CLI_COUNT, .value = "N", .most = PS_MAX_STEPS,
           .help = "last steps, in which wsd lowers the learning rate"),
    OPTION(TRAINING, CLI_H_TRAINING, train_config.weight_decay, .name = "weight-decay",
           .table = "optimizer", .kind = CLI_NUMBER, .value = "X",
           .help = "weight decay (default 0.1; lion 0.3, sgd 0)"),
    OPTION(ALWAYS, CLI_H_TRAINING, plan_config.clip_norm, .name = "clip-norm", .table = "optimizer",
           .kind = CLI_NUMBER, .value = "X",
           .help = "limit of the gradient's global norm; 0: none (default 1)"),
    OPTION(ALWAYS, CLI_H_OPTIMIZER, plan_config.clip_by, .name = "clip-by", .table = "optimizer",
           .kind = CLI_CHOICE, .value = "NAME", .choices = clip_by,
           .help = "whose norm clips: that of the step itself (default), or of the one previous to "
                   "it, which saves host memory in steps of one round"),
    OPTION(TRAINING, CLI_H_OPTIMIZER, train_config.no_decay, .name = "no-decay",
           .table = "optimizer", .kind = CLI_SET, .value = "GROUPS", .choices = decay_groups,
           .help = "what gets no weight decay, of norm, bias and embedding (default norm,bias)"),
    OPTION(TRAINING, CLI_H_OPTIMIZER, train_config.beta1, .name = "beta1", .table = "optimizer",
           .kind = CLI_NUMBER, .value = "X", .help = "beta1 of adamw and lion (default 0.9)"),
    OPTION(TRAINING, CLI_H_OPTIMIZER, train_config.beta2, .name = "beta2", .table = "optimizer",
           .kind = CLI_NUMBER, .value = "X",
           .help = "beta2 of adamw (default 0.95) and lion (0.99)"),
    OPTION(TRAINING, CLI_H_OPTIMIZER, train_config.eps, .name = "eps", .table = "optimizer",
           .kind = CLI_NUMBER, .value = "X", .help = "eps of adamw (default 1e-8)"),
    OPTION(TRAINING, CLI_H_OPTIMIZER, train_config.momentum, .name = "momentum",
           .table = "optimizer", .kind = CLI_NUMBER, .value = "X",
           .help = "momentum of sgd (default 0.9)"),
    OPTION(TRAINING, CLI_H_OPTIMIZER, train_config.nesterov, .name = "nesterov",
           .table = "optimizer", .kind = CLI_FLAG, .help = "sgd with Nesterov's momentum"),
    OPTION(TRAINING, CLI_H_TRAINING | CLI_RARE, train_config.seed, .name = "seed",
           .kind = CLI_COUNT, .value = "N",
           .help = "seed of stochastic rounding, --shuffle and --init-weights (default 0)"),
    OPTION(TRAINING, CLI_H_MODEL, train_config.init_weights, .name = "init-weights",
           .table = "model", .kind = CLI_FLAG,
           .help = "draw the weights from --seed; the model directory needs config.json alone"),
    GIVEN(TRAINING, CLI_H_MODEL, train_config.shuffle, shuffle_given, .name = "shuffle",
          .table = "data", .kind = CLI_FLAG,
          .help = "read the sequences in an order drawn from --seed (default where masks mark "
                  "documents; else --shuffle=false)"),
    OPTION(ALWAYS, CLI_H_MODEL, run_file, .name = "config", .table = "", .kind = CLI_TEXT,
           .value = "FILE",
           .help = "a TOML file with the options of a run, which the command line overrides"),
    OPTION(TRAINING, CLI_H_DOCUMENTS, plan_config.document_token, .name = "document-token",
           .table = "data", .kind = CLI_ID, .value = "ID",
           .help = "this token begins a document: attention stays in it, positions restart"),
    OPTION(TRAINING, CLI_H_DOCUMENTS, plan_config.document_end_token, .name = "document-end-token",
           .table = "data", .kind = CLI_ID, .value = "ID",
           .help = "the token after this one begins a document"),
    OPTION(TRAINING, CLI_H_SAVING, out, .name = "out", .kind = CLI_TEXT, .value = "DIR",
           .help = "save the trained model into this directory (default: model in --run-dir)"),
    GIVEN(TRAINING, CLI_H_SAVING | CLI_RARE, no_save, no_save_given, .name = "no-save",
          .kind = CLI_FLAG, .help = "do not save the trained model"),
    OPTION(TRAINING, CLI_H_SAVING, force, .name = "force", .kind = CLI_FLAG,
           .help = "replace a model that --out already has, and begin anew in a run directory that "
                   "has another run, whose files move into its folder earlier-N"),
    OPTION(TRAINING, CLI_H_SAVING | CLI_RARE, save_wait, .name = "save-wait", .kind = CLI_NUMBER,
           .value = "SECONDS", .most = 1e6,
           .help = "how long to try a failing save again without a terminal (default 600)"),
    OPTION(TRAINING, CLI_H_SAVING | CLI_RARE, save_dtype, .name = "save-dtype", .kind = CLI_CHOICE,
           .value = "NAME", .choices = dtypes,
           .help = "dtype of the saved model: bf16 (default), fp32 (default of adapters) or, of "
                   "gpt-oss, mxfp4: experts as published, the rest bf16"),
    GIVEN(TRAINING, CLI_H_SAVING, checkpoint_every, checkpoint_given, .name = "checkpoint-every",
          .table = "checkpoint", .kind = CLI_EVERY, .value = "N", .most = PS_MAX_STEPS,
          .help = "write the complete state every N steps, or every 30m or 2h, and when the run "
                  "is stopped, into checkpoints/ of the run directory; 0: never (default: 30m in "
                  "runs that are predicted to last longer)"),
    OPTION(TRAINING, CLI_H_SAVING | CLI_RARE, keep, .name = "keep", .table = "checkpoint",
           .kind = CLI_COUNT, .value = "K", .least = 1, .most = PS_MAX_STEPS,
           .help = "how many of the run's newest checkpoints stay (default 2)"),
    OPTION(TRAINING, CLI_H_SAVING, resume, .name = "resume", .table = "checkpoint",
           .kind = CLI_TEXT, .value = "WHAT",
           .help = "go on from a checkpoint: its directory; or latest, the newest whole one of the "
                   "run directory; or auto, which begins anew where there is none"),
    OPTION(TRAINING, CLI_H_SAVING | CLI_RARE, train_config.convert_state, .name = "convert-state",
           .table = "checkpoint", .kind = CLI_FLAG,
           .help = "with --resume: convert the weights and the optimizer state of a checkpoint "
                   "that has another --recipe or --state-bits"),
    OPTION(TRAINING, CLI_H_PROFILING, profile_steps, .name = "profile-steps", .table = "log",
           .kind = CLI_TEXT, .value = "A:B",
           .help = "steps A to B, from 1, for an attached profiler (cudaProfilerApi) and "
                   "timeline.json; the steps before and after do not overlap with them"),
    OPTION(TRAINING, CLI_H_SAVING, run_dir, .name = "run-dir", .kind = CLI_TEXT, .value = "DIR",
           .help = "directory for metrics.jsonl, run.toml, plan.json, summary.json, timeline.json "
                   "and checkpoints/ (default: --out, else .)"),
};

_Static_assert(sizeof job_options / sizeof *job_options + 16 <= CLI_MAX_OPTIONS,
               "commands add some of their own");

uint32_t cli_job_options(cli_job *j, cli_option *options, bool training) {
  uint32_t n = 0;
  for (int i = 0; i < PS_N_RECIPES; i++)
    recipes[i] = ps_recipe_name((ps_recipe)i);
  for (uint32_t i = 0; i < PS_N_BASES; i++)
    bases[i] = ps_base_name((ps_base)i);
  for (int i = 0; i < PS_N_LAYOUTS; i++)
    layouts[i] = ps_layout_name((ps_plan_layout)i);
  for (int i = 0; i < PS_N_OPTIMIZERS; i++)
    optimizers[i] = ps_optimizer_name((ps_optimizer)i);
  for (size_t i = 0; i < sizeof job_options / sizeof *job_options; i++) {
    const job_option *o = &job_options[i];
    if (o->when == TRAINING && !training)
      continue;
    options[n] = o->option;
    options[n].out = (char *)j + o->at;
    options[n].table = o->option.table ? o->option.table : "run";
    options[n++].given = o->given ? (bool *)((char *)j + o->given) : NULL;
  }
  options[n] = (cli_option){.name = NULL};
  return n;
}

/* What messages call fields of the library that are no option's own place. */
static const ps_field_name other_fields[] = {
    {"context", "--context"},
    {"device", "--gpu"},
    {"dtype", "--dtype"},
    {"fp8_*", "--fp8"},
    {"hardware", "--hardware"},
    {"insecure", "--hosts-insecure"},
    {"lora.targets", "--lora-targets"},
    {"model_dir", "--model"},
    {"experts", "--experts"},
    {"n_devices", "--gpus"},
    {"n_sequences", "--batch"},
    {"n_threads", "--threads"},
    {"prefill_tokens", "--prefill-tokens"},
    {"ramp", "--batch-ramp"},
    {"sample_context", "--sample tokens"},
    {"sample_sequences", "--sample"},
    {"val_dataset", "--val"},
};

/* The field of the library's config that @o sets; NULL: it sets none. */
static const char *library_field(const job_option *o) {
  const size_t n = strcspn(o->field, ".");
  const bool config = strncmp(o->field, "plan_config.", n + 1) == 0 ||
                      strncmp(o->field, "train_config.", n + 1) == 0;
  return config && o->option.kind != CLI_GROUP ? o->field + n + 1 : NULL;
}

int cli_name_fields(void) {
  enum { N = sizeof job_options / sizeof *job_options };
  enum { N_OTHER = sizeof other_fields / sizeof *other_fields };
  static ps_field_name names[N + N_OTHER + 1];
  static char text[N][PS_MAX_FIELD_NAME + 1];
  memcpy(names, other_fields, sizeof other_fields);
  size_t n = N_OTHER;
  for (size_t i = 0; i < N; i++) {
    const cli_option *o = &job_options[i].option;
    const char *field = library_field(&job_options[i]);
    if (!field)
      continue;
    const int of_group = o->grouped ? (int)strcspn(o->name, "-") : 0; /* "fp8-head" is of --fp8 */
    snprintf(text[i], sizeof text[i], "--%.*s%s%s", of_group, o->name, of_group ? " " : "",
             o->name + of_group + (of_group > 0));
    names[n++] = (ps_field_name){field, text[i]};
  }
  const ps_status st = ps_field_names_set(names);
  return st == PS_OK ? CLI_OK : cli_fail_status(st, true);
}

/* Options of the Python command's train, eval and plan, which read text. */
static const char of_text[] = "eos field no-bos skip-bad pack targets date data-cache "
                              "chat-template-kwargs long val-fraction problem label-field labels";

bool cli_job_hint(const cli_command *c, const char *typed, const char *name, char says[512]) {
  static cli_job job; /* the stack may be small */
  static cli_option options[CLI_MAX_OPTIONS];
  cli_job_init(&job);
  cli_job_options(&job, options, true);
  const char *answer = c->job ? cli_answer(name) : NULL;
  if (c->job && cli_among(of_text, name))
    snprintf(says, 512,
             "--%s is an option of the Python command, which reads text and conversations: run the "
             "penstock that make python installs, or penstock data",
             name);
  else if (cli_find_option(options, name))
    snprintf(says, 512,
             "--%s is an option of penstock train, not of penstock %.*s: leave "
             "it out",
             name, (int)strcspn(c->usage, " "), c->usage);
  else if (answer)
    snprintf(says, 512, "there is no option --%s: %s", typed, answer);
  else
    return false;
  return true;
}

int cli_job_check(cli_job *j) {
  if (!j->model)
    return cli_fail(CLI_REFUSED,
                    "--model is missing: give a model directory (models/init_model.py makes one)");
  if (!j->plan_config.seq_len)
    return cli_fail(CLI_REFUSED, "--seq-len is missing: give the number of tokens a sequence");
  if (j->train_config.disk && !j->plan_config.disk_mem_bytes)
    return cli_fail(CLI_REFUSED,
                    "--disk %s needs --disk-mem: give the most that may be taken there",
                    j->train_config.disk);
  struct stat sb;
  if (stat(j->model, &sb) == 0 && !S_ISDIR(sb.st_mode))
    return cli_fail(
        CLI_REFUSED,
        "%s %s is a file: give the model's directory, with config.json and safetensors in it",
        j->model_option, j->model);
  j->config.struct_bytes = sizeof j->config;
  cli_warnings(!j->quiet);
  ps_status st = ps_model_config_read(&j->config, j->model);
  cli_warnings(false);
  return st == PS_OK ? cli_lora_resolve(j) : cli_fail_given(j->model_option, st);
}

static bool has_fp8(const cli_job *j) {
  return j->plan_config.recipe == PS_RECIPE_FP8 || j->plan_config.recipe == PS_RECIPE_FP8_MASTER;
}

static int get_hardware(cli_job *j) {
  j->device.disk = j->train_config.disk;
  const char *other = j->hardware_file ? "hardware" : j->gpu_model ? "gpu-model" : NULL;
  if (!other)
    return cli_hardware_get(&j->hardware, &j->device, j->plan_config.device_mem_bytes,
                            j->plan_config.host_mem_bytes, has_fp8(j), &j->config, j->quiet);
  if (j->hardware_file && j->gpu_model)
    return cli_fail(CLI_REFUSED,
                    "--hardware and --gpu-model both describe a machine: leave one out");
  if (j->device.gpu_given || j->device.backend != CLI_BACKEND_AUTO)
    return cli_fail(CLI_REFUSED,
                    "--%s chooses a device of this machine, but --%s describes another machine: "
                    "leave one of the two out",
                    j->device.gpu_given ? "gpu" : "backend", other);
  const ps_status st = j->gpu_model ? ps_hardware_of_gpu(&j->hardware, j->gpu_model)
                                    : ps_hardware_describe(&j->hardware, j->hardware_file);
  if (st != PS_OK)
    return cli_fail_given(j->gpu_model ? "--gpu-model" : "--hardware", st);
  cli_bound_threads(&j->device, j->hardware.n_cpus, j->quiet);
  return CLI_OK;
}

int cli_job_machine(cli_job *j) {
  const int code = j->knows_machine ? CLI_OK : get_hardware(j);
  j->knows_machine = code == CLI_OK;
  return code;
}

int cli_job_prepare(cli_job *j) {
  int code = cli_ramp_parse(j);
  if (code == CLI_OK)
    code = cli_job_machine(j);
  if (code != CLI_OK)
    return code;
  if (j->other_machine && j->plan_config.host_mem_bytes)
    j->hardware.host_memory_bytes = 0; /* not checked: the machine to plan for has what is given */
  ps_plan_config *c = &j->plan_config;
  c->ramp = j->ramp;
  c->n_ramp = j->batch_ramp.n;
  c->n_threads = (uint32_t)j->device.threads;
  c->n_devices = (uint32_t)j->device.n_gpus;
  c->hosts = j->hosts;
  c->n_hosts = j->task.n_hosts;
  c->one_document = c->document_token < 0 && c->document_end_token < 0 && !j->data_marks_documents;
  c->replan = j->train_config.replan != PS_REPLAN_OFF;
  cli_samples_plan(j, c);
  return CLI_OK;
}

typedef struct search_view {
  cli_progress progress;
  double tokens_per_step;
} search_view;

static void on_evaluated(void *user, uint64_t n_evaluated, double best_step_s) {
  search_view *v = user;
  cli_progress_search(&v->progress, n_evaluated,
                      best_step_s > 0 ? v->tokens_per_step / best_step_s : 0);
}

uint64_t cli_step_tokens(const ps_plan_config *c) {
  const uint64_t n = c->tokens_per_step ? c->tokens_per_step / c->seq_len : 8;
  return (n ? n : 1) * c->seq_len;
}

/* Round r of a step runs on device r modulo their number. The devices of a ring have all rounds,
 * and idle where these have fewer chunks than devices. */
static void note_idle(const cli_job *j, cli_progress *p) {
  const ps_plan_report *r = &j->report;
  const bool ring = r->layout == PS_LAYOUT_RING;
  if (ring && r->n_chunks < r->n_devices)
    cli_progress_note(p,
                      "--gpus %u in a ring: %u would idle at a time, as a step has %u chunk%s: "
                      "raise --tokens-per-step, or lower --chunk-tokens",
                      r->n_devices, r->n_devices - r->n_chunks, r->n_chunks,
                      r->n_chunks == 1 ? "" : "s");
  else if (!ring && r->n_rounds < r->n_devices)
    cli_progress_note(
        p,
        "--gpus %u: %u would idle, as a step has %u round%s: raise --tokens-per-step, "
        "or lower --chunk-tokens or --chunks-per-round",
        r->n_devices, r->n_devices - r->n_rounds, r->n_rounds, r->n_rounds == 1 ? "" : "s");
}

bool cli_too_few_sequences(const cli_job *j, const ps_plan_report *r, char why[512]) {
  const uint64_t n = r->n_sequences / r->n_hosts;
  if (r->layout == PS_LAYOUT_RING || n >= r->n_devices)
    return false;
  snprintf(why, 512,
           "--gpus %u: a step has %llu sequence%s%s, and each GPU takes whole ones: raise "
           "--tokens-per-step to %llu, or lower --gpus%s",
           r->n_devices, (unsigned long long)n, n == 1 ? "" : "s", r->n_hosts > 1 ? " a host" : "",
           (unsigned long long)(r->n_hosts * r->n_devices * j->plan_config.seq_len),
           j->config.n_layers >= r->n_devices ? ", or give --layout ring" : "");
  return true;
}

/* Hosts have equal parts of a step of @tokens, which @option gives. */
static void note_left_out(const cli_job *j, cli_progress *p, const char *option, uint64_t tokens) {
  const ps_plan_config *c = &j->plan_config;
  const uint64_t n = tokens / c->seq_len, left = c->n_hosts > 1 ? n % c->n_hosts : 0;
  if (left)
    cli_progress_note(
        p,
        "--%s %llu: a step trains %llu of its %llu sequences, as each of %u hosts has "
        "equally many: give a multiple of %llu tokens",
        option, (unsigned long long)tokens, (unsigned long long)(n - left), (unsigned long long)n,
        c->n_hosts, (unsigned long long)(c->n_hosts * c->seq_len));
}

/* On all but rank 0 the options of the cut, which the planner's words name, are rank 0's. */
static int refused(const cli_job *j, ps_status st) {
  if (st != PS_EBUDGET || !j->hosts || j->task.rank == 0)
    return cli_fail_status(st, true);
  return cli_fail(CLI_REFUSED,
                  "%s; the cut of a step is that of rank 0's plan (--chunk-tokens %llu, "
                  "--chunks-per-round %llu, --first-round-chunks %llu, --head-slice-tokens %llu): "
                  "give all tasks a smaller one",
                  ps_last_error(), (unsigned long long)j->plan_config.chunk_tokens,
                  (unsigned long long)j->plan_config.chunks_per_round,
                  (unsigned long long)j->plan_config.first_round_chunks,
                  (unsigned long long)j->plan_config.head_slice_tokens);
}

void cli_note_left_out(const cli_job *j, cli_progress *p) {
  note_left_out(j, p, "tokens-per-step", cli_step_tokens(&j->plan_config));
  for (uint32_t i = 0; i < j->plan_config.n_ramp; i++)
    note_left_out(j, p, "batch-ramp", j->ramp[i].tokens_per_step);
}

bool cli_job_pins_less(const cli_job *j) {
  return ps_pinned_at_most() > 0 && !j->plan_config.pinned_mem_bytes && !j->hosts;
}

int cli_job_plan_pinned(cli_job *j) {
  char all[32], most[32];
  cli_progress p;
  const uint64_t bytes = ps_pinned_at_most();
  cli_progress_begin(&p, j);
  cli_progress_note(&p,
                    "%s of the host memory that the plan takes, %s, can be pinned: another plan is "
                    "made, as with --pinned-mem %llu",
                    cli_bytes(most, bytes), cli_bytes(all, j->report.host_arena_bytes),
                    (unsigned long long)bytes);
  j->plan_config.pinned_mem_bytes = bytes;
  ps_plan_destroy(j->plan);
  j->plan = NULL;
  return cli_job_plan(j);
}

int cli_job_plan(cli_job *j) {
  char why[512];
  int code = cli_job_prepare(j);
  if (code != CLI_OK)
    return code;
  search_view view = {.tokens_per_step = (double)cli_step_tokens(&j->plan_config)};
  cli_progress_begin(&view.progress, j);
  ps_plan_config config = j->plan_config;
  config.progress = on_evaluated;
  config.progress_user = &view;
  ps_status st = ps_plan_create(&j->plan, &j->config, &config, &j->hardware);
  cli_progress_clear(&view.progress);
  if (st != PS_OK)
    return refused(j, st);
  j->report.struct_bytes = sizeof j->report;
  st = ps_plan_get_report(j->plan, &j->report);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  if (cli_too_few_sequences(j, &j->report, why))
    return cli_fail(CLI_REFUSED, "%s", why);
  note_idle(j, &view.progress);
  cli_note_left_out(j, &view.progress);
  return CLI_OK;
}
