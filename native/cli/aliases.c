/* aliases.c - names that other trainers have for options: Hugging Face's Trainer and TRL, axolotl,
 * LLaMA-Factory, torchtitan. An exact synonym is accepted. Another name is refused with a sentence
 * on what to give. docs/coming-from.md has the table: tests/test_docs.py compares it with this
 * one. */
#include "cli/cli.h"
#include <string.h>

/* Words are parted by blanks. A dash may be typed as an underscore. */
static const struct {
  const char *names;
  const char *option; /* the same option here */
} synonyms[] = {
    {"model-name-or-path base-model", "model"},
    {"max-length max-seq-length max-seq-len cutoff-len sequence-len training.seq-len", "seq-len"},
    {"max-steps training.steps", "steps"},
    {"num-train-epochs num-epochs", "epochs"},
    {"learning-rate optimizer.lr", "lr"},
    {"lr-scheduler-type lr-scheduler", "lr-schedule"},
    {"lr-scheduler.warmup-steps", "warmup-steps"},
    {"optimizer.weight-decay", "weight-decay"},
    {"adam-beta1 optimizer.beta1", "beta1"},
    {"adam-beta2 optimizer.beta2", "beta2"},
    {"adam-epsilon optimizer.eps", "eps"},
    {"max-grad-norm training.max-norm", "clip-norm"},
    {"label-smoothing-factor", "label-smoothing"},
    {"output-dir", "out"},
    {"overwrite-output-dir", "force"},
    {"save-steps checkpoint.interval", "checkpoint-every"},
    {"save-total-limit checkpoint.keep-latest-k", "keep"},
    {"resume-from-checkpoint", "resume"},
    {"lora-r", "lora-rank"},
    {"lora-target lora-target-modules", "lora-targets"},
    {"use-rslora", "lora-rslora"},
    {"adapter-name-or-path", "adapter"},
    {"eval-steps validation.freq", "val-every"},
    {"training.seed", "seed"},
    {"training.deterministic", "deterministic"},
};

static const struct {
  const char *names;
  const char *says; /* after "there is no option --name: " */
} answers[] = {
    {"per-device-train-batch-size gradient-accumulation-steps micro-batch-size train-batch-size "
     "batch-size global-batch-size training.local-batch-size training.global-batch-size "
     "auto-find-batch-size",
     "give --tokens-per-step, which is --seq-len times the sequences of a step: those of a device, "
     "times accumulation steps, times devices"},
    {"per-device-eval-batch-size eval-batch-size", "leave it out, as the planner decides it"},
    {"lr-scheduler.min-lr-factor min-lr-rate cosine-min-lr-ratio",
     "give --min-lr, which is the ratio times --lr"},
    {"optim optimizer.name", "give --optimizer adamw, lion or sgd"},
    {"bf16 pure-bf16", "leave it out, as --recipe is bf16 by default, and fp32-master with LoRA"},
    {"fp16 tf32 mixed-precision torch-dtype dtype training.mixed-precision-param",
     "give --recipe, which names the dtypes: bf16, fp24-master, fp32-master, fp32, fp8 or "
     "fp8-master"},
    {"gradient-checkpointing gradient-checkpointing-kwargs activation-checkpoint.mode "
     "activation-offloading use-cache",
     "leave it out, as the planner decides for each saved activation under --device-mem"},
    {"deepspeed fsdp fsdp-config fsdp-version accelerator-config training.enable-cpu-offload",
     "leave it out, as the planner offloads under --device-mem and --host-mem, and --gpus says how "
     "many GPUs train"},
    {"parallelism.data-parallel-shard-degree parallelism.data-parallel-replicate-degree "
     "parallelism.tensor-parallel-degree parallelism.pipeline-parallel-degree "
     "tensor-parallel-size pipeline-parallel-size",
     "give --gpus for the number of GPUs, and --layout for how they share a step"},
    {"attn-implementation flash-attn flash-attention use-flash-attention-2 sdp-attention "
     "xformers-attention",
     "leave it out, as attention takes the fastest kernels that the library was built with"},
    {"torch-compile compile.enable use-liger-kernel enable-liger-kernel dataloader-num-workers "
     "dataloader-pin-memory preprocessing-num-workers remove-unused-columns",
     "leave it out, as nothing takes its place"},
    {"load-in-4bit load-in-8bit quantization-bit quantization-method",
     "give --base-dtype nf4, or fp8 for 8 bits, beside --lora-rank: the base is quantized as it is "
     "read"},
    {"use-peft use-lora finetuning-type",
     "give --lora-rank for LoRA; without it the whole model is trained"},
    {"lora-dropout", "leave it out, as adapters are trained without dropout"},
    {"lora-target-linear", "leave it out, as --lora-targets is all-linear by default"},
    {"freeze-trainable-layers", "give --frozen-layers, which counts from the embedding"},
    {"dataset dataset-name dataset-dir dataset-path datasets train-file data-path "
     "training.dataset training.dataset-path",
     "give --data; penstock data writes its shards from text and conversations"},
    {"tokenizer tokenizer-name tokenizer-name-or-path tokenizer-path model.tokenizer-path",
     "give it to penstock data as --tokenizer"},
    {"template chat-template",
     "leave it out, as penstock data takes the chat template beside the tokenizer"},
    {"packing sample-packing neat-packing pad-to-sequence-len",
     "give penstock data --pack best-fit"},
    {"train-on-inputs train-on-prompt completion-only-loss assistant-only-loss",
     "give penstock data --targets: answers, last or all"},
    {"val-size val-set-size", "give penstock data --val-fraction"},
    {"validation-file eval-dataset test-datasets",
     "give --val; without it, validation data is what penstock data split off --data"},
    {"do-train do-eval do-predict stage",
     "leave it out, as train learns the next token, and validates where there is validation data"},
    {"eval-strategy evaluation-strategy evals-per-epoch", "give --val-every, in steps"},
    {"save-strategy saves-per-epoch", "give --checkpoint-every, in steps or as 30m; 0 writes none"},
    {"logging-steps logging-strategy logging-dir metrics.log-freq",
     "leave it out, as metrics.jsonl in --run-dir has every step"},
    {"report-to wandb-project use-wandb metrics.enable-wandb metrics.enable-tensorboard",
     "leave it out; penstock log writes a run for --wandb or --tensorboard"},
    {"data-seed", "give --seed, which is also that of --shuffle"},
    {"job.dump-folder", "give --run-dir for the run's files, and --out for the model"},
};

bool cli_among(const char *words, const char *name) {
  const size_t n = strlen(name);
  for (const char *at = words; *at; at += strcspn(at, " "), at += *at == ' ')
    if (strcspn(at, " ") == n && strncmp(at, name, n) == 0)
      return true;
  return false;
}

void cli_plain_name(char *name) {
  for (; *name; name++)
    if (*name == '_')
      *name = '-';
}

const char *cli_synonym(const char *name) {
  for (size_t i = 0; i < sizeof synonyms / sizeof *synonyms; i++)
    if (cli_among(synonyms[i].names, name))
      return synonyms[i].option;
  return NULL;
}

const char *cli_answer(const char *name) {
  for (size_t i = 0; i < sizeof answers / sizeof *answers; i++)
    if (cli_among(answers[i].names, name))
      return answers[i].says;
  return NULL;
}
