/* job.c - the options that train, plan and demo share, and the plan that follows from them. */
#include "cli/cli.h"
#include <sys/stat.h>
#include <stdlib.h>
#include <string.h>

static const char *const recipes[] = {"fp32", "fp32-master", "bf16", NULL};
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

void cli_job_options(cli_job *j, cli_option *options, bool training) {
  const cli_option plan[] = {
      {.name = "model",
       .kind = CLI_TEXT,
       .out = &j->model,
       .value = "DIR",
       .help = "model directory in Hugging Face layout"},
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
       .help = "cap of device memory, all of the process's: 20GiB (default: what there is)"},
      {.name = "host-mem",
       .kind = CLI_BYTES,
       .out = &j->host_mem,
       .value = "SIZE",
       .help =
           "cap of the process's memory, device arena apart (default: what the machine allows)"},
      {.name = "tokens-per-step",
       .kind = CLI_COUNT,
       .out = &j->tokens_per_step,
       .value = "N",
       .least = 1,
       .most = PS_MAX_STEP_TOKENS,
       .help = "batch, rounded down to whole sequences (default: 8 sequences)"},
      {.name = "recipe",
       .kind = CLI_CHOICE,
       .out = &j->recipe,
       .value = "NAME",
       .choices = recipes,
       .help = "fp32, fp32-master (16 bytes a parameter at home) or bf16 (8; default)"},
      {.name = "chunk-tokens",
       .kind = CLI_COUNT,
       .out = &j->chunk_tokens,
       .value = "N",
       .least = 1,
       .most = PS_MAX_ROWS,
       .help = "pin the chunk: a multiple of --seq-len, or less than it (default: planned)"},
      {.name = "chunks-per-round",
       .kind = CLI_COUNT,
       .out = &j->chunks_per_round,
       .value = "N",
       .least = 1,
       .most = PS_MAX_CHUNKS,
       .help = "pin the round (default: planned)"},
      {.name = "first-round-chunks",
       .kind = CLI_COUNT,
       .out = &j->first_round_chunks,
       .value = "N",
       .least = 1,
       .most = PS_MAX_CHUNKS,
       .help = "pin the first round, which may be larger (default: planned; like the others where "
               "those are pinned)"},
      {.name = "head-slice-tokens",
       .kind = CLI_COUNT,
       .out = &j->head_slice_tokens,
       .value = "N",
       .least = 1,
       .most = PS_MAX_ROWS,
       .help = "tokens a slice of the head and loss (default: from the vocabulary)"},
      {.name = "clip-norm",
       .kind = CLI_NUMBER,
       .out = &j->clip_norm,
       .value = "X",
       .help = "global gradient norm limit, 0: none (default 1)"},
      {.name = "backend",
       .kind = CLI_CHOICE,
       .out = &j->device.backend,
       .value = "NAME",
       .choices = cli_backends,
       .help = "cuda, cpu or auto: cuda where there is a GPU (default)"},
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
       .help = "threads of host ops, on the cpu backend of compute too (default: all CPUs, beside "
               "a GPU two less)"},
      {.name = "deterministic",
       .kind = CLI_FLAG,
       .out = &j->deterministic,
       .help = "the same bits in every run on a GPU too, at some speed"},
      {.name = "peak-tflops",
       .kind = CLI_NUMBER,
       .out = &j->device.peak_tflops,
       .value = "X",
       .help = "dense bf16 peak for MFU (default: by the GPU's name)"},
      {.name = "trace-steps",
       .kind = CLI_COUNT,
       .out = &j->trace_steps,
       .value = "N",
       .most = PS_MAX_TRACE_STEPS,
       .help = "steps kept in the trace, 0: no timeline.json (default 2)"},
      {.name = "json", .kind = CLI_FLAG, .out = &j->json, .help = "one JSON object on stdout"},
      {.name = "quiet",
       .kind = CLI_FLAG,
       .out = &j->quiet,
       .help = "no progress and no summary, errors only"},
  };
  const cli_option train[] = {
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
       .help = "peak learning rate (default 3e-4)"},
      {.name = "min-lr",
       .kind = CLI_NUMBER,
       .out = &j->min_lr,
       .value = "X",
       .help = "its floor (default 0)"},
      {.name = "lr-schedule",
       .kind = CLI_CHOICE,
       .out = &j->lr_schedule,
       .value = "NAME",
       .choices = lr_schedules,
       .help = "constant (default), cosine, linear or wsd"},
      {.name = "warmup-steps",
       .kind = CLI_COUNT,
       .out = &j->warmup_steps,
       .value = "N",
       .most = PS_MAX_STEPS,
       .help = "linear warmup (default 0)"},
      {.name = "decay-steps",
       .kind = CLI_COUNT,
       .out = &j->decay_steps,
       .value = "N",
       .most = PS_MAX_STEPS,
       .help = "steps of wsd's decay at the end"},
      {.name = "weight-decay",
       .kind = CLI_NUMBER,
       .out = &j->weight_decay,
       .value = "X",
       .help = "on matrices only (default 0.1)"},
      {.name = "beta1",
       .kind = CLI_NUMBER,
       .out = &j->beta1,
       .value = "X",
       .help = "of AdamW (default 0.9)"},
      {.name = "beta2",
       .kind = CLI_NUMBER,
       .out = &j->beta2,
       .value = "X",
       .help = "of AdamW (default 0.95)"},
      {.name = "seed",
       .kind = CLI_COUNT,
       .out = &j->seed,
       .value = "N",
       .help = "of stochastic rounding and of --shuffle"},
      {.name = "init-weights",
       .kind = CLI_FLAG,
       .out = &j->init_weights,
       .help = "draw the weights from --seed instead of reading them: DIR needs config.json only"},
      {.name = "shuffle",
       .kind = CLI_FLAG,
       .out = &j->shuffle,
       .help = "visit the sequences in a seeded order"},
      {.name = "document-token",
       .kind = CLI_ID,
       .out = &j->document_token,
       .value = "ID",
       .help = "this token begins a document: attention does not cross, positions restart"},
      {.name = "document-end-token",
       .kind = CLI_ID,
       .out = &j->document_end_token,
       .value = "ID",
       .help = "the token after this one begins a document"},
      {.name = "out",
       .kind = CLI_TEXT,
       .out = &j->out,
       .value = "DIR",
       .help = "save the trained model here (default: it is not saved)"},
      {.name = "force",
       .kind = CLI_FLAG,
       .out = &j->force,
       .help = "replace the model that --out has"},
      {.name = "save-wait",
       .kind = CLI_NUMBER,
       .out = &j->save_wait,
       .value = "SECONDS",
       .most = 1e6,
       .help = "how long a failing save is repeated where no terminal can be asked (default 600)"},
      {.name = "save-dtype",
       .kind = CLI_CHOICE,
       .out = &j->save_dtype,
       .value = "NAME",
       .choices = dtypes,
       .help = "bf16 (default) or fp32"},
      {.name = "run-dir",
       .kind = CLI_TEXT,
       .out = &j->run_dir,
       .value = "DIR",
       .help = "metrics.jsonl, plan.json, timeline.json (default: --out, else .)"},
  };
  size_t n_plan = sizeof plan / sizeof plan[0], n_train = sizeof train / sizeof train[0], n = 0;
  for (size_t i = 0; i < n_plan; i++) {
    options[n++] = plan[i];
    /* --data and --steps right after --model */
    for (size_t k = 0; training && i == 0 && k < 2; k++)
      options[n++] = train[k];
  }
  for (size_t k = 2; training && k < n_train; k++)
    options[n++] = train[k];
  options[n] = (cli_option){.name = NULL};
}

int cli_job_check(cli_job *j) {
  if (!j->model)
    return cli_fail(CLI_REFUSED,
                    "--model is missing: give a model directory (models/init_model.py makes one)");
  if (!j->seq_len)
    return cli_fail(CLI_REFUSED, "--seq-len is missing: give the tokens a sequence");
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
    return cli_fail(
        CLI_REFUSED,
        "--%s is of this machine, and --hardware describes another: leave one of them out",
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
    j->hardware.host_memory_bytes = 0; /* the machine planned for has what was given */
  j->plan_config = (ps_plan_config){
      .struct_bytes = sizeof j->plan_config,
      .recipe = j->recipe,
      .device_bytes = j->device_mem,
      .host_bytes = j->host_mem,
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
