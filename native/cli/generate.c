/* generate.c - `penstock generate` on token ids. Text is Python's part: the package's
 * penstock generate reads the tokenizer, and calls the same library. */
#include "cli/cli.h"
#include <errno.h>
#include <penstock/generate.h>
#include <stdlib.h>
#include <string.h>

static const char *const dtypes[] = {"fp32", "bf16", NULL};
static const uint32_t dtype_of[] = {PS_F32, PS_BF16};

static const char *const bases[] = {"bf16", "fp8", "nf4", "mxfp4", NULL}; /* ps_base */

static const char *const experts_of[] = {"auto", "whole", "on-demand", NULL};

typedef struct generation {
  const char *model, *adapter, *tokens, *prompts;
  uint32_t base; /* ps_base */
  cli_texts stop;
  uint64_t max_new, top_k, seed, context, batch, prefill;
  double temperature, top_p;
  uint64_t device_mem, host_mem;
  uint32_t dtype, experts;
  cli_device device;
  bool deterministic, init_weights, plan_only, json, quiet;
  ps_model_config config;
  ps_hardware hw;
  ps_generate_config cfg;
  cli_ids *prompt, *out, stops;
  uint64_t n, printed; /* prompts; tokens so far */
  const ps_generate_report *report;
} generation;

/* ---- input ----------------------------------------------------------------------------------- */

static int add_prompt(generation *g, const char *text, const char *where) {
  cli_ids *more = realloc(g->prompt, (g->n + 1) * sizeof *more);
  if (!more)
    return cli_fail(CLI_FAILED, "out of memory for %llu prompts", (unsigned long long)g->n);
  g->prompt = more;
  g->prompt[g->n] = (cli_ids){0};
  const int code = cli_ids_parse(text, where, &g->prompt[g->n++]);
  if (code == CLI_OK && !g->prompt[g->n - 1].n)
    return cli_fail(CLI_REFUSED, "%s: there is no token id: give at least one", where);
  return code;
}

static int read_prompts(generation *g) {
  if (!g->tokens == !g->prompts)
    return cli_fail(CLI_REFUSED, "give either --tokens IDS or --prompts FILE; for text run python "
                                 "-m penstock generate");
  if (g->tokens)
    return add_prompt(g, g->tokens, "--tokens");
  FILE *f = cli_input_open("prompts", g->prompts);
  if (!f)
    return CLI_REFUSED;
  char *line = NULL, where[4200];
  size_t room = 0;
  ssize_t n;
  int code = CLI_OK;
  for (uint64_t i = 1; code == CLI_OK && (n = getline(&line, &room, f)) >= 0; i++) {
    snprintf(where, sizeof where, "%.4000s: line %llu", g->prompts, (unsigned long long)i);
    code = strlen(line) == (size_t)n
               ? add_prompt(g, line, where)
               : cli_fail(CLI_REFUSED, "%s has a zero byte: give token ids as text", where);
  }
  if (code == CLI_OK && ferror(f))
    code = cli_fail(CLI_REFUSED, "--prompts %s cannot be read: %s", g->prompts, strerror(errno));
  else if (code == CLI_OK && !g->n)
    code = cli_fail(CLI_REFUSED, "--prompts %s: the file is empty: give a line of ids a prompt",
                    g->prompts);
  free(line);
  fclose(f);
  return code;
}

static int prepare(generation *g) {
  if (!g->model)
    return cli_fail(CLI_REFUSED, "--model DIR is missing");
  g->config.struct_bytes = sizeof g->config;
  cli_warnings(g->plan_only && !g->quiet); /* the generator reads it again */
  ps_status st = ps_model_config_read(&g->config, g->model);
  cli_warnings(!g->quiet);
  if (st != PS_OK)
    return cli_fail_given("--model", st);
  ps_lora lora = {0};
  if (g->adapter && (st = ps_adapter_read(&lora, g->adapter)) != PS_OK)
    return cli_fail_given("--adapter", st);
  if (g->base && !g->adapter)
    return cli_fail(CLI_REFUSED, "--base-dtype needs --adapter: give the adapter that was trained "
                                 "beside the quantized weights");
  lora.base = g->base;
  int code = read_prompts(g);
  for (uint32_t i = 0; i < g->stop.n && code == CLI_OK; i++)
    code = cli_ids_parse(g->stop.item[i], "--stop-tokens", &g->stops);
  if (code == CLI_OK && !g->stop.n && g->config.eos_token_id >= 0 &&
      !cli_ids_add(&g->stops, g->config.eos_token_id))
    code = cli_fail(CLI_FAILED, "out of memory for a stop token");
  uint64_t longest = 0;
  for (uint64_t i = 0; i < g->n; i++)
    longest = g->prompt[i].n > longest ? g->prompt[i].n : longest;
  g->cfg = (ps_generate_config){.struct_bytes = sizeof g->cfg,
                                .dtype = dtype_of[g->dtype],
                                .device_mem_bytes = g->device_mem,
                                .host_mem_bytes = g->host_mem,
                                .n_sequences = g->n < g->batch ? g->n : g->batch,
                                .context = g->context ? g->context : longest + g->max_new,
                                .prefill_tokens = g->prefill,
                                .deterministic = g->deterministic,
                                .experts = g->experts,
                                .init_weights = g->init_weights,
                                .lora = lora,
                                .adapter_dir = g->adapter};
  return code == CLI_OK ? cli_hardware_get(&g->hw, &g->device, g->device_mem, g->host_mem, false,
                                           NULL, g->quiet)
                        : code;
}

/* ---- output ---------------------------------------------------------------------------------- */

/* Bounds of the decode steps a second; 0: unknown, or no bound. */
static double memory_limit(const generation *g, const ps_generate_report *r) {
  return g->hw.device_peak_bytes_per_s / (double)r->weights_bytes;
}
static double link_limit(const generation *g, const ps_generate_report *r) {
  return r->streamed_bytes ? g->hw.link[PS_LINK_H2D].bytes_per_s / (double)r->streamed_bytes : 0;
}

/* The bounds of a decode step's time: what the link and the device's memory take for its bytes. */
static void show_plan(FILE *out, const generation *g, const ps_generate_report *r) {
  char device[32], host[32], cache[32], states[32], streamed[32], weights[32];
  fprintf(out,
          "device memory %s, host memory %s; %u of %u blocks resident; KV cache %s for %llu x %llu "
          "tokens\n",
          cli_bytes(device, r->device_used_bytes), cli_bytes(host, r->host_used_bytes),
          r->n_resident, r->n_blocks, cli_bytes(cache, r->cache_bytes),
          (unsigned long long)g->cfg.n_sequences, (unsigned long long)g->cfg.context);
  if (r->state_bytes)
    fprintf(out, "%s of the cache are states, whose size does not depend on the context\n",
            cli_bytes(states, r->state_bytes));
  if (r->n_slots)
    fprintf(out,
            "experts on demand: %u of %u of a block are on the device (%.0f%%); what a step copies "
            "is as "
            "routing is even\n",
            r->n_slots, r->n_experts, 100.0 * r->n_slots / r->n_experts);
  fprintf(out, "a decode step reads %s of weights", cli_bytes(weights, r->weights_bytes));
  if (memory_limit(g, r) > 0)
    fprintf(out, " (at most %.0f steps/s by the device's memory)", memory_limit(g, r));
  if (r->streamed_bytes)
    fprintf(out, " and copies %s over the link (at most %.2f steps/s at %.1f GB/s)",
            cli_bytes(streamed, r->streamed_bytes), link_limit(g, r),
            g->hw.link[PS_LINK_H2D].bytes_per_s * 1e-9);
  fputc('\n', out);
  if (r->n_slots && r->decode_s > 0)
    fprintf(out, "planned: %.2f tokens/s of decode, %.2f with whole blocks\n",
            (double)g->cfg.n_sequences / r->decode_s,
            (double)g->cfg.n_sequences / r->whole_decode_s);
}

/* Of the experts that steps on demand wanted, those that were there; 0: none was wanted. */
static double hit_rate(const ps_generate_stats *s) {
  return s->experts_wanted ? 1 - (double)s->experts_missed / (double)s->experts_wanted : 0;
}

static double rate(uint64_t tokens, double seconds) {
  return seconds > 0 ? (double)tokens / seconds : 0;
}

static void plan_json(cli_json *j, const generation *g, const ps_generate_report *r) {
  cli_json_number(j, "memory_steps_per_s", memory_limit(g, r));
  cli_json_number(j, "link_steps_per_s", link_limit(g, r));
  cli_json_count(j, "device_used_bytes", r->device_used_bytes);
  cli_json_count(j, "host_used_bytes", r->host_used_bytes);
  cli_json_count(j, "least_device_bytes", r->least_device_bytes);
  cli_json_count(j, "weights_bytes", r->weights_bytes);
  cli_json_count(j, "streamed_bytes", r->streamed_bytes);
  cli_json_count(j, "prefill_streamed_bytes", r->prefill_streamed_bytes);
  cli_json_count(j, "experts", r->n_experts);
  cli_json_count(j, "expert_slots", r->n_slots);
  cli_json_count(j, "expert_bytes", r->expert_bytes);
  cli_json_number(j, "planned_steps_per_s", rate(1, r->decode_s));
  cli_json_number(j, "planned_whole_steps_per_s", rate(1, r->whole_decode_s));
  cli_json_count(j, "cache_bytes", r->cache_bytes);
  cli_json_count(j, "state_bytes", r->state_bytes);
  cli_json_count(j, "blocks", r->n_blocks);
  cli_json_count(j, "resident_blocks", r->n_resident);
  cli_json_count(j, "prefill_rows", r->prefill_tokens);
}

static void show_json(const generation *g, const ps_generate_report *r,
                      const ps_generate_stats *s) {
  cli_json j = {.out = stdout};
  cli_json_open(&j, NULL, '{');
  for (uint64_t i = 0; s && i < g->n; i++) {
    if (i == 0)
      cli_json_open(&j, "tokens", '[');
    cli_json_open(&j, NULL, '[');
    for (uint64_t k = 0; k < g->out[i].n; k++)
      cli_json_count(&j, NULL, (uint64_t)g->out[i].id[k]);
    cli_json_close(&j, ']');
    if (i + 1 == g->n)
      cli_json_close(&j, ']');
  }
  if (s) {
    cli_json_count(&j, "prompt_tokens", s->prompt_tokens);
    cli_json_count(&j, "new_tokens", s->new_tokens);
    cli_json_number(&j, "prefill_tokens_per_s", rate(s->prompt_tokens, s->prefill_s));
    cli_json_number(&j, "decode_tokens_per_s", rate(s->decoded_tokens, s->decode_s));
    cli_json_number(&j, "prefill_s", s->prefill_s);
    cli_json_number(&j, "decode_s", s->decode_s);
    cli_json_count(&j, "decode_steps", s->decode_steps);
    cli_json_count(&j, "experts_wanted", s->experts_wanted);
    cli_json_count(&j, "experts_missed", s->experts_missed);
    cli_json_number(&j, "expert_hit_rate", hit_rate(s));
  }
  plan_json(&j, g, r);
  cli_json_close(&j, '}');
  putchar('\n');
}

static void show(const generation *g, const ps_generate_report *r, const ps_generate_stats *s) {
  if (g->json) {
    show_json(g, r, s);
    return;
  }
  for (uint64_t i = 0; i < g->n && g->n > 1; i++) {
    for (uint64_t k = 0; k < g->out[i].n; k++)
      printf("%s%d", k ? " " : "", g->out[i].id[k]);
    putchar('\n');
  }
  if (g->n == 1)
    putchar('\n');
  if (!g->quiet)
    fprintf(stderr, "prefill: %llu tokens, %.1f tokens/s; decode: %llu tokens, %.1f tokens/s\n",
            (unsigned long long)s->prompt_tokens, rate(s->prompt_tokens, s->prefill_s),
            (unsigned long long)s->decoded_tokens, rate(s->decoded_tokens, s->decode_s));
  if (!g->quiet && s->experts_wanted) {
    char copied[32];
    const uint64_t bytes = s->experts_missed * r->expert_bytes,
                   steps = s->decode_steps + (r->prefill_streamed_bytes ? 0 : s->prefill_steps);
    fprintf(stderr,
            "experts on demand: %.1f%% of %llu were on the device, %s a step copied; planned: "
            "%.2f tokens/s of decode\n",
            100 * hit_rate(s), (unsigned long long)s->experts_wanted,
            cli_bytes(copied, bytes / (steps ? steps : 1)),
            (double)g->cfg.n_sequences * rate(1, r->decode_s));
  }
}

/* The tokens of a single prompt are printed as they come. */
static int take_token(void *user, uint64_t request, int32_t token) {
  generation *g = user;
  if (!cli_ids_add(&g->out[request], token))
    return -1;
  if (!g->printed++ && !g->quiet && !g->json) /* by then no input is refused any more */
    show_plan(stderr, g, g->report);
  if (g->n == 1 && !g->json) {
    printf("%s%d", g->printed > 1 ? " " : "", token);
    fflush(stdout);
  }
  return 0;
}

static int run(generation *g) {
  ps_generator *gen = NULL;
  ps_generate_stats stats;
  ps_generate_request *request = calloc(g->n, sizeof *request);
  g->out = calloc(g->n, sizeof *g->out);
  if (!request || !g->out) {
    free(request);
    return cli_fail(CLI_FAILED, "out of memory for %llu prompts", (unsigned long long)g->n);
  }
  for (uint64_t i = 0; i < g->n; i++)
    request[i] = (ps_generate_request){.tokens = g->prompt[i].id,
                                       .n_tokens = g->prompt[i].n,
                                       .max_new_tokens = g->max_new,
                                       .temperature = g->temperature,
                                       .top_p = g->top_p,
                                       .top_k = g->top_k,
                                       .seed = g->seed,
                                       .stop_tokens = g->stops.id,
                                       .n_stop_tokens = g->stops.n};
  ps_status st = ps_generator_create(&gen, g->model, &g->cfg, &g->hw, NULL, NULL);
  g->report = st == PS_OK ? ps_generator_report(gen) : NULL;
  if (st == PS_OK)
    st = ps_generator_run(gen, request, g->n, take_token, g, &stats);
  const int code = st == PS_OK ? CLI_OK : cli_fail_status(st, !g->printed);
  if (code == CLI_OK)
    show(g, g->report, &stats);
  ps_generator_destroy(gen);
  free(request);
  return code;
}

static int plan_only(generation *g) {
  ps_generate_report r;
  const ps_status st = ps_generate_plan(&r, &g->config, &g->cfg, &g->hw);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  if (g->json)
    show_json(g, &r, NULL);
  else
    show_plan(stdout, g, &r);
  return CLI_OK;
}

/* Options of the Python command alone, which has a tokenizer. */
static bool hint_of_text(const cli_command *c, const char *typed, const char *name,
                         char says[512]) {
  if (!cli_among("prompt chat system stop", name))
    return cli_job_hint(c, typed, name, says);
  snprintf(says, 512,
           "--%s is an option of the Python command, which has a tokenizer: run python -m penstock "
           "generate, or give --tokens",
           name);
  return true;
}

int cli_generate(int argc, char **argv) {
  generation g = {.max_new = 128, .top_p = 1, .batch = 8, .dtype = 1};
  const cli_option options[] = {
      CLI_OPTION(CLI_H_MODEL, &g.model, .name = "model", .kind = CLI_TEXT, .value = "DIR",
                 .help = "model directory in Hugging Face layout"),
      CLI_OPTION(CLI_H_MODEL, &g.adapter, .name = "adapter", .kind = CLI_TEXT, .value = "DIR",
                 .help = "a LoRA adapter of the model, in PEFT's layout"),
      CLI_OPTION(CLI_H_MODEL, &g.base, .name = "base-dtype", .kind = CLI_CHOICE, .value = "NAME",
                 .choices = bases,
                 .help = "how the frozen matrices beside the adapter are kept and streamed: bf16 "
                         "(default), fp8, nf4 or mxfp4"),
      CLI_OPTION(CLI_H_TEXTS, &g.tokens, .name = "tokens", .kind = CLI_TEXT, .value = "IDS",
                 .help = "a prompt: token ids, such as 1,2,3"),
      CLI_OPTION(CLI_H_TEXTS, &g.prompts, .name = "prompts", .kind = CLI_TEXT, .value = "FILE",
                 .help = "prompts: a line of token ids each"),
      CLI_OPTION(CLI_H_TEXTS, &g.max_new, .name = "max-new-tokens", .kind = CLI_COUNT, .value = "N",
                 .least = 1, .most = PS_MAX_ROWS,
                 .help = "the most tokens to generate for a prompt (default 128)"),
      CLI_OPTION(
          CLI_H_TEXTS, &g.temperature, .name = "temperature", .kind = CLI_NUMBER, .value = "T",
          .most = 1e6,
          .help = "0: always the most likely token; 1: the model's own distribution (default 0)"),
      CLI_OPTION(CLI_H_TEXTS, &g.top_k, .name = "top-k", .kind = CLI_COUNT, .value = "N",
                 .help = "draw from the N likeliest tokens; 0: from all (default 0)"),
      CLI_OPTION(CLI_H_TEXTS, &g.top_p, .name = "top-p", .kind = CLI_NUMBER, .value = "P",
                 .least = 1e-9, .most = 1,
                 .help =
                     "draw from the likeliest tokens whose probabilities add up to P (default 1)"),
      CLI_OPTION(CLI_H_TEXTS, &g.seed, .name = "seed", .kind = CLI_COUNT, .value = "N",
                 .help = "seed of the draws (default 0)"),
      CLI_OPTION(CLI_H_TEXTS, &g.stop, .name = "stop-tokens", .kind = CLI_TEXTS, .value = "IDS",
                 .help = "tokens that end a text (default: eos_token_id of the model)"),
      CLI_OPTION(CLI_H_FINE, &g.batch, .name = "batch", .kind = CLI_COUNT, .value = "N", .least = 1,
                 .most = PS_MAX_SEQUENCES,
                 .help = "the most prompts that are computed at once (default 8)"),
      CLI_OPTION(CLI_H_TEXTS, &g.context, .name = "context", .kind = CLI_COUNT, .value = "N",
                 .least = 1, .most = PS_MAX_ROWS,
                 .help = "the most tokens of a prompt and its text together (default: what the "
                         "longest needs)"),
      CLI_OPTION(CLI_H_FINE, &g.prefill, .name = "prefill-tokens", .kind = CLI_COUNT, .value = "N",
                 .least = 1, .most = PS_MAX_ROWS,
                 .help =
                     "tokens of prompts that a step computes at once (default 128, on a GPU 1024)"),
      CLI_OPTION(CLI_H_MEMORY, &g.device_mem, .name = "device-mem", .kind = CLI_BYTES,
                 .value = "SIZE", .help = "cap of device memory (default: none)"),
      CLI_OPTION(CLI_H_MEMORY, &g.host_mem, .name = "host-mem", .kind = CLI_BYTES, .value = "SIZE",
                 .help = "cap of host memory (default: none)"),
      CLI_OPTION(CLI_H_MEMORY, &g.experts, .name = "experts", .kind = CLI_CHOICE, .value = "HOW",
                 .choices = experts_of,
                 .help = "how experts come to the device where not all fit: whole blocks in each "
                         "step, on-demand, or auto, the faster (default)"),
      CLI_OPTION(CLI_H_MEMORY | CLI_RARE, &g.init_weights, .name = "init-weights", .kind = CLI_FLAG,
                 .help = "draw the weights, for a benchmark: --model needs config.json alone"),
      CLI_OPTION(CLI_H_MEMORY, &g.dtype, .name = "dtype", .kind = CLI_CHOICE, .value = "NAME",
                 .choices = dtypes,
                 .help = "dtype of weights, activations and KV cache: fp32 or bf16 (default)"),
      CLI_OPTION(CLI_H_HARDWARE, &g.device.backend, .name = "backend", .kind = CLI_CHOICE,
                 .value = "NAME", .choices = cli_backends,
                 .help = "cuda, cpu or auto, which is cuda where there is a GPU (default)"),
      CLI_OPTION(CLI_H_HARDWARE, &g.device.gpu, .name = "gpu", .kind = CLI_COUNT, .value = "N",
                 .most = CLI_MAX_GPU, .given = &g.device.gpu_given,
                 .help = "which of the visible GPUs (default 0)"),
      CLI_OPTION(CLI_H_HARDWARE, &g.device.threads, .name = "threads", .kind = CLI_COUNT,
                 .value = "N", .least = 1, .most = PS_MAX_THREADS,
                 .help = "host threads (default: all CPUs)"),
      CLI_OPTION(CLI_H_HARDWARE | CLI_RARE, &g.deterministic, .name = "deterministic",
                 .kind = CLI_FLAG,
                 .help = "every run gives the same bits, on a GPU too; some kernels are slower"),
      CLI_OPTION(CLI_H_OUTPUT, &g.plan_only, .name = "plan", .kind = CLI_FLAG,
                 .help = "print the memory that generation takes and its limits, and stop"),
      CLI_OPTION(CLI_H_OUTPUT, &g.json, .name = "json", .kind = CLI_FLAG,
                 .help = "print one JSON object on stdout"),
      CLI_OPTION(CLI_H_OUTPUT, &g.quiet, .name = "quiet", .kind = CLI_FLAG,
                 .help = "print tokens alone"),
      {.name = NULL}};
  const cli_command command = {
      .usage = "generate --model DIR (--tokens IDS | --prompts FILE) [--device-mem SIZE] [OPTIONS]",
      .about = "Prints the token ids that follow each prompt. Blocks that do not fit under\n"
               "--device-mem are streamed. The tokens of a prompt do not depend on the others.\n"
               "For text, run penstock generate of the Python package, which reads the tokenizer.",
      .example = "penstock generate --model my_8B_model --tokens 1,2,3 --device-mem 6GiB",
      .options = options,
      .hint = hint_of_text,
  };
  int code = cli_parse(&command, argc, argv);
  if (code == CLI_OK)
    code = prepare(&g);
  if (code == CLI_OK)
    code = g.plan_only ? plan_only(&g) : run(&g);
  for (uint64_t i = 0; i < g.n; i++) {
    free(g.prompt[i].id);
    if (g.out)
      free(g.out[i].id);
  }
  free(g.prompt);
  free(g.out);
  free(g.stops.id);
  free(g.stop.item);
  return code < 0 ? CLI_OK : code;
}
