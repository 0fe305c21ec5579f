/* job.c - the options of train, plan and demo, and the plan that follows from them. */
#include "cli/cli.h"
#include <sys/stat.h>
#include <stdlib.h>
#include <string.h>

static const char *const recipes[] = {"fp32", "fp32-master", "bf16", NULL};
static const char *const optimizers[] = {"adamw", "lion", "sgd", NULL};
static const char *const lr_schedules[] = {"constant", "cosine", "linear", "wsd", NULL};
static const char *const dtypes[] = {"fp32", "bf16", NULL};

void cli_job_init(cli_job *job) {
  ps_train_config defaults = {.struct_bytes = sizeof defaults};
  ps_train_config_init(&defaults);
  *job = (cli_job){
      .recipe = PS_RECIPE_BF16,
      .save_dtype = PS_BF16,
      .lr = defaults.lr,
      .min_lr = defaults.min_lr,
      .lr_schedule = defaults.lr_kind,
      .weight_decay = defaults.weight_decay,
      .beta1 = defaults.beta1,
      .beta2 = defaults.beta2,
      .eps = defaults.eps,
      .momentum = defaults.momentum,
      .clip_norm = defaults.clip_norm,
      .seed = defaults.seed,
      .document_token = -1,
      .document_end_token = -1,
      .trace_steps = 2,
      .save_wait = 600,
  };
}

void cli_job_free(cli_job *job) {
  ps_plan_destroy(job->plan);
  free(job->data.item);
}

/* Options that shape a plan. */
static uint32_t plan_options(cli_job *j, cli_option *options) {
  const cli_option table[] = {
      {.name = "model",
       .kind = CLI_TEXT,
       .out = &j->model,
       .value = "DIR",
       .help = "model directory in Hugging Face layout: config.json and safetensors"},
      {.name = "seq-len",
       .kind = CLI_COUNT,
       .out = &j->seq_len,
       .value = "N",
       .least = 1,
       .most = PS_MAX_ROWS,
       .help = "tokens a sequence"},
      {.name = "device-mem",
       .kind = CLI_BYTES,
       .out = &j->device_mem,
       .value = "SIZE",
       .help = "cap of the process's device memory, such as 20GiB (default: all there is)"},
      {.name = "host-mem",
       .kind = CLI_BYTES,
       .out = &j->host_mem,
       .value = "SIZE",
       .help =
           "cap of the process's host memory, such as 80GiB (default: what the machine allows)"},
      {.name = "tokens-per-step",
       .kind = CLI_COUNT,
       .out = &j->tokens_per_step,
       .value = "N",
       .least = 1,
       .most = PS_MAX_STEP_TOKENS,
       .help = "tokens of a step, rounded down to whole sequences (default: 8 sequences)"},
      {.name = "recipe",
       .kind = CLI_CHOICE,
       .out = &j->recipe,
       .value = "NAME",
       .choices = recipes,
       .help =
           "dtypes: fp32, fp32-master (16 bytes of host memory a parameter) or bf16 (8; default)"},
      {.name = "optimizer",
       .kind = CLI_CHOICE,
       .out = &j->optimizer,
       .value = "NAME",
       .choices = optimizers,
       .help = "adamw (default), lion or sgd; lion and sgd keep half of adamw's state"},
      {.name = "chunk-tokens",
       .kind = CLI_COUNT,
       .out = &j->chunk_tokens,
       .value = "N",
       .least = 1,
       .most = PS_MAX_ROWS,
       .help = "tokens a chunk: a multiple of --seq-len, or less than it (default: planned)"},
      {.name = "chunks-per-round",
       .kind = CLI_COUNT,
       .out = &j->chunks_per_round,
       .value = "N",
       .least = 1,
       .most = PS_MAX_CHUNKS,
       .help = "chunks a round (default: planned)"},
      {.name = "first-round-chunks",
       .kind = CLI_COUNT,
       .out = &j->first_round_chunks,
       .value = "N",
       .least = 1,
       .most = PS_MAX_CHUNKS,
       .help = "chunks of the first round, which may be larger (default: planned, or "
               "--chunks-per-round)"},
      {.name = "head-slice-tokens",
       .kind = CLI_COUNT,
       .out = &j->head_slice_tokens,
       .value = "N",
       .least = 1,
       .most = PS_MAX_ROWS,
       .help = "tokens for which head and loss run at once (default: from the vocabulary's size)"},
      {.name = "clip-norm",
       .kind = CLI_NUMBER,
       .out = &j->clip_norm,
       .value = "X",
       .help = "limit of the gradient's global norm; 0: none (default 1)"},
      {.name = "backend",
       .kind = CLI_CHOICE,
       .out = &j->device.backend,
       .value = "NAME",
       .choices = cli_backends,
       .help = "cuda, cpu or auto, which is cuda where there is a GPU (default)"},
      {.name = "gpu",
       .kind = CLI_COUNT,
       .out = &j->device.gpu,
       .given = &j->device.gpu_given,
       .value = "N",
       .most = CLI_MAX_GPU,
       .help = "which of the visible GPUs (default 0)"},
      {.name = "threads",
       .kind = CLI_COUNT,
       .out = &j->device.threads,
       .value = "N",
       .least = 1,
       .most = PS_MAX_THREADS,
       .help = "threads of host ops, and of compute on a CPU (default: all CPUs, two less with a "
               "GPU)"},
      {.name = "deterministic",
       .kind = CLI_FLAG,
       .out = &j->deterministic,
       .help = "every run gives the same bits, on a GPU too; some kernels are slower"},
      {.name = "peak-tflops",
       .kind = CLI_NUMBER,
       .out = &j->device.peak_tflops,
       .value = "X",
       .help = "the GPU's dense bf16 peak, for MFU (default: known by the GPU's name)"},
      {.name = "trace-steps",
       .kind = CLI_COUNT,
       .out = &j->trace_steps,
       .value = "N",
       .most = PS_MAX_TRACE_STEPS,
       .help = "how many of the last steps timeline.json shows; 0: no such file (default 2)"},
      {.name = "json",
       .kind = CLI_FLAG,
       .out = &j->json,
       .help = "print one JSON object on stdout"},
      {.name = "quiet",
       .kind = CLI_FLAG,
       .out = &j->quiet,
       .help = "print errors only, no progress and no summary"},
  };
  memcpy(options, table, sizeof table);
  return sizeof table / sizeof *table;
}

/* Options of a training run. */
static uint32_t train_options(cli_job *j, cli_option *options) {
  const cli_option table[] = {
      {.name = "data",
       .kind = CLI_TEXTS,
       .out = &j->data,
       .value = "SHARDS...",
       .help = "token shards: .bin files, or folders of them"},
      {.name = "steps",
       .kind = CLI_COUNT,
       .out = &j->steps,
       .value = "N",
       .least = 1,
       .most = PS_MAX_STEPS,
       .help = "steps to train (default: once through the data)"},
      {.name = "lr",
       .kind = CLI_NUMBER,
       .out = &j->lr,
       .value = "X",
       .help = "peak learning rate (default 3e-4; lion 1e-4, sgd 1e-3)"},
      {.name = "min-lr",
       .kind = CLI_NUMBER,
       .out = &j->min_lr,
       .value = "X",
       .help = "floor of the learning rate (default 0)"},
      {.name = "lr-schedule",
       .kind = CLI_CHOICE,
       .out = &j->lr_schedule,
       .value = "NAME",
       .choices = lr_schedules,
       .help = "constant (default), cosine, linear or wsd (warmup-stable-decay)"},
      {.name = "warmup-steps",
       .kind = CLI_COUNT,
       .out = &j->warmup_steps,
       .value = "N",
       .most = PS_MAX_STEPS,
       .help = "first steps, in which the learning rate rises linearly (default 0)"},
      {.name = "decay-steps",
       .kind = CLI_COUNT,
       .out = &j->decay_steps,
       .value = "N",
       .most = PS_MAX_STEPS,
       .help = "last steps, in which wsd lowers the learning rate"},
      {.name = "weight-decay",
       .kind = CLI_NUMBER,
       .out = &j->weight_decay,
       .value = "X",
       .help = "weight decay, of matrices alone (default 0.1; lion 0.3, sgd 0)"},
      {.name = "beta1",
       .kind = CLI_NUMBER,
       .out = &j->beta1,
       .value = "X",
       .help = "beta1 of adamw and lion (default 0.9)"},
      {.name = "beta2",
       .kind = CLI_NUMBER,
       .out = &j->beta2,
       .value = "X",
       .help = "beta2 of adamw (default 0.95) and lion (0.99)"},
      {.name = "eps",
       .kind = CLI_NUMBER,
       .out = &j->eps,
       .value = "X",
       .help = "eps of adamw (default 1e-8)"},
      {.name = "momentum",
       .kind = CLI_NUMBER,
       .out = &j->momentum,
       .value = "X",
       .help = "momentum of sgd (default 0.9)"},
      {.name = "nesterov",
       .kind = CLI_FLAG,
       .out = &j->nesterov,
       .help = "sgd with Nesterov's momentum"},
      {.name = "seed",
       .kind = CLI_COUNT,
       .out = &j->seed,
       .value = "N",
       .help = "seed of stochastic rounding, --shuffle and --init-weights (default 0)"},
      {.name = "init-weights",
       .kind = CLI_FLAG,
       .out = &j->init_weights,
       .help = "draw the weights from --seed; the model directory needs config.json alone"},
      {.name = "shuffle",
       .kind = CLI_FLAG,
       .out = &j->shuffle,
       .help = "read the sequences in an order drawn from --seed"},
      {.name = "document-token",
       .kind = CLI_ID,
       .out = &j->document_token,
       .value = "ID",
       .help = "this token begins a document: attention stays in it, positions restart"},
      {.name = "document-end-token",
       .kind = CLI_ID,
       .out = &j->document_end_token,
       .value = "ID",
       .help = "the token after this one begins a document"},
      {.name = "out",
       .kind = CLI_TEXT,
       .out = &j->out,
       .value = "DIR",
       .help = "save the trained model into this directory (default: it is not saved)"},
      {.name = "force",
       .kind = CLI_FLAG,
       .out = &j->force,
       .help = "replace a model that --out already has"},
      {.name = "save-wait",
       .kind = CLI_NUMBER,
       .out = &j->save_wait,
       .value = "SECONDS",
       .most = 1e6,
       .help = "how long to try a failing save again without a terminal (default 600)"},
      {.name = "save-dtype",
       .kind = CLI_CHOICE,
       .out = &j->save_dtype,
       .value = "NAME",
       .choices = dtypes,
       .help = "dtype of the saved model: bf16 (default) or fp32"},
      {.name = "run-dir",
       .kind = CLI_TEXT,
       .out = &j->run_dir,
       .value = "DIR",
       .help = "directory for metrics.jsonl, plan.json, timeline.json (default: --out, else .)"},
  };
  memcpy(options, table, sizeof table);
  return sizeof table / sizeof *table;
}

uint32_t cli_job_options(cli_job *j, cli_option *options, bool training) {
  enum { FIRST = 2 }; /* --data and --steps come right after --model */
  uint32_t n = plan_options(j, options);
  if (training) {
    cli_option more[CLI_MAX_OPTIONS];
    const uint32_t n_more = train_options(j, more);
    memmove(options + 1 + FIRST, options + 1, (n - 1) * sizeof *options);
    memcpy(options + 1, more, FIRST * sizeof *options);
    memcpy(options + n + FIRST, more + FIRST, (n_more - FIRST) * sizeof *options);
    n += n_more;
  }
  options[n] = (cli_option){.name = NULL};
  return n;
}

int cli_job_check(cli_job *j) {
  if (!j->model)
    return cli_fail(CLI_REFUSED,
                    "--model is missing: give a model directory (models/init_model.py makes one)");
  if (!j->seq_len)
    return cli_fail(CLI_REFUSED, "--seq-len is missing: give the number of tokens a sequence");
  struct stat sb;
  if (stat(j->model, &sb) == 0 && !S_ISDIR(sb.st_mode))
    return cli_fail(
        CLI_REFUSED,
        "--model %s is a file: give the model's directory, with config.json and safetensors in it",
        j->model);
  j->config.struct_bytes = sizeof j->config;
  ps_status st = ps_model_config_read(&j->config, j->model);
  return st == PS_OK ? CLI_OK : cli_fail_status(st, true);
}

static int get_hardware(cli_job *j) {
  if (!j->hardware_file)
    return cli_hardware_get(&j->hardware, &j->device, j->host_mem, j->quiet);
  if (j->device.gpu_given || j->device.backend != CLI_BACKEND_AUTO)
    return cli_fail(CLI_REFUSED,
                    "--%s chooses a device of this machine, but --hardware describes another "
                    "machine: leave one "
                    "of the two out",
                    j->device.gpu_given ? "gpu" : "backend");
  ps_status st = ps_hardware_describe(&j->hardware, j->hardware_file);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  cli_bound_threads(&j->device, j->hardware.n_cpus, j->quiet);
  return CLI_OK;
}

int cli_job_prepare(cli_job *j) {
  int code = get_hardware(j);
  if (code != CLI_OK)
    return code;
  if (j->other_machine && j->host_mem)
    j->hardware.host_memory_bytes = 0; /* not checked: the machine to plan for has what is given */
  j->plan_config = (ps_plan_config){
      .struct_bytes = sizeof j->plan_config,
      .recipe = j->recipe,
      .optimizer = j->optimizer,
      .device_mem_bytes = j->device_mem,
      .host_mem_bytes = j->host_mem,
      .seq_len = j->seq_len,
      .tokens_per_step = j->tokens_per_step,
      .chunk_tokens = j->chunk_tokens,
      .chunks_per_round = j->chunks_per_round,
      .first_round_chunks = j->first_round_chunks,
      .head_slice_tokens = j->head_slice_tokens,
      .clip = j->clip_norm > 0,
      .n_threads = (uint32_t)j->device.threads,
      .deterministic = j->deterministic,
      .one_document = j->document_token < 0 && j->document_end_token < 0,
      .trace_steps = (uint32_t)j->trace_steps,
  };
  return CLI_OK;
}

int cli_job_plan(cli_job *j) {
  int code = cli_job_prepare(j);
  if (code != CLI_OK)
    return code;
  ps_status st = ps_plan_create(&j->plan, &j->config, &j->plan_config, &j->hardware);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  j->report.struct_bytes = sizeof j->report;
  st = ps_plan_get_report(j->plan, &j->report);
  return st == PS_OK ? CLI_OK : cli_fail_status(st, true);
}
