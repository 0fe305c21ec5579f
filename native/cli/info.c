/* info.c - `penstock info`: describes this machine, a model directory, token shards. */
#include "cli/cli.h"
#include <stdlib.h>

static uint32_t layers_with(const ps_model_config *cfg, uint32_t flag) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < cfg->n_layers; i++)
    n += (cfg->layer_flags[i] & flag) != 0;
  return n;
}

/* What sets layers apart, after the model's line. */
static void print_layers(const ps_model_config *cfg) {
  const uint32_t windows = layers_with(cfg, PS_LAYER_WINDOW),
                 no_rope = layers_with(cfg, PS_LAYER_NO_ROPE);
  if (windows)
    printf(", windows of %u tokens in %u layers", cfg->window, windows);
  if (no_rope)
    printf(", no RoPE in %u layers", no_rope);
  if (cfg->global_head_dim)
    printf(", %u/%u heads of %u in %u layers", cfg->n_heads, cfg->global_kv_heads,
           cfg->global_head_dim, layers_with(cfg, PS_LAYER_GLOBAL));
  if (cfg->n_experts)
    printf(", %u experts of %u in %u layers, %u a token", cfg->n_experts, cfg->expert_dim,
           layers_with(cfg, PS_LAYER_EXPERTS), cfg->n_experts_used);
  printf("\n");
}

static int show_model(cli_json *j, const char *path, uint64_t seq_len, ps_model_config *cfg) {
  char bytes[32], shown[8192];
  cfg->struct_bytes = sizeof *cfg;
  cli_warnings(true);
  ps_status st = ps_model_config_read(cfg, path);
  ps_model *m = NULL;
  ps_flops flops = {0};
  if (st != PS_OK)
    return cli_fail_given("--model", st);
  st = ps_model_create(&m, cfg);
  if (st == PS_OK && seq_len)
    st = ps_model_flops(m, seq_len, &flops);
  const uint64_t n = m ? ps_model_n_elements(m) : 0;
  ps_model_destroy(m);
  if (st != PS_OK)
    return cli_fail_status(st, true);
  if (j) {
    cli_json_open(j, "model", '{');
    cli_json_text(j, "architecture", ps_model_family_name(cfg->family));
    cli_json_count(j, "parameters", n);
    cli_json_count(j, "n_layers", cfg->n_layers);
    cli_json_count(j, "dim", cfg->dim);
    cli_json_count(j, "n_heads", cfg->n_heads);
    cli_json_count(j, "n_kv_heads", cfg->n_kv_heads);
    cli_json_count(j, "head_dim", cfg->head_dim);
    cli_json_count(j, "global_kv_heads", cfg->global_kv_heads);
    cli_json_count(j, "global_head_dim", cfg->global_head_dim);
    cli_json_count(j, "ffn_dim", cfg->ffn_dim);
    cli_json_count(j, "vocab_size", cfg->vocab_size);
    cli_json_count(j, "n_experts", cfg->n_experts);
    cli_json_count(j, "n_experts_used", cfg->n_experts_used);
    cli_json_count(j, "expert_dim", cfg->expert_dim);
    cli_json_count(j, "n_expert_layers", layers_with(cfg, PS_LAYER_EXPERTS));
    cli_json_count(j, "n_window_layers", layers_with(cfg, PS_LAYER_WINDOW));
    cli_json_count(j, "n_no_rope_layers", layers_with(cfg, PS_LAYER_NO_ROPE));
    if (seq_len)
      cli_json_number(j, "flops_per_token", flops.sequence / (double)seq_len);
    cli_json_close(j, '}');
    return CLI_OK;
  }
  printf("%s: %s, %llu parameters (%s in bf16), %u layers, dim %u, %u/%u heads of %u, ffn %u, "
         "vocabulary %u%s%s%s",
         ps_printable(shown, sizeof shown, path), ps_model_family_name(cfg->family),
         (unsigned long long)n, cli_bytes(bytes, 2 * n), cfg->n_layers, cfg->dim, cfg->n_heads,
         cfg->n_kv_heads, cfg->head_dim, cfg->ffn_dim, cfg->vocab_size,
         cfg->tied_embeddings ? ", tied embeddings" : "", cfg->qkv_bias ? ", qkv bias" : "",
         cfg->qk_norm ? ", qk norm" : "");
  print_layers(cfg);
  if (seq_len)
    printf("  %.3f GFLOP a token at %llu tokens a sequence\n",
           flops.sequence / (double)seq_len / 1e9, (unsigned long long)seq_len);
  return CLI_OK;
}

static int show_data(cli_json *j, const cli_texts *paths, uint32_t vocab_size, uint64_t seq_len) {
  ps_dataset *ds = NULL;
  ps_status st = ps_dataset_open(&ds, paths->item, paths->n, vocab_size);
  if (st != PS_OK)
    return cli_fail_given("--data", st);
  uint64_t n_tokens = ps_dataset_n_tokens(ds),
           n_sequences = seq_len ? ps_dataset_n_sequences(ds, seq_len) : 0;
  if (j) {
    cli_json_open(j, "data", '{');
    cli_json_count(j, "shards", ps_dataset_n_shards(ds));
    cli_json_count(j, "tokens", n_tokens);
    if (seq_len)
      cli_json_count(j, "sequences", n_sequences);
    cli_json_close(j, '}');
  } else {
    const uint32_t n = ps_dataset_n_shards(ds);
    printf("%u shard%s, %llu tokens\n", n, n == 1 ? "" : "s", (unsigned long long)n_tokens);
    if (seq_len)
      printf("  %llu sequences of %llu tokens\n", (unsigned long long)n_sequences,
             (unsigned long long)seq_len);
    cli_print_mix(stdout, ds, seq_len, 0);
  }
  ps_dataset_close(ds);
  return CLI_OK;
}

static int show_machine(cli_json *j) {
  ps_hardware hw = {.struct_bytes = sizeof hw};
  cli_device any = {0};
  int code = cli_hardware_get(&hw, &any, 0, 0, false, NULL, j != NULL);
  if (code != CLI_OK)
    return code;
  if (j) {
    cli_json_text(j, "version", ps_version());
    code = cli_hardware_json(j, "hardware", &hw);
  } else {
    printf("penstock %s, %s backend\n", ps_version(),
           hw.backend == PS_BACKEND_CUDA ? "CUDA" : "CPU");
    cli_hardware_table(stdout, &hw);
  }
  return code;
}

static int describe(const char *model, const cli_texts *data, uint64_t seq_len, bool as_json) {
  int code = CLI_OK;
  char *text = NULL; /* the JSON object is printed only when it is complete */
  size_t bytes = 0;
  cli_json json = {.out = as_json ? open_memstream(&text, &bytes) : NULL},
           *j = json.out ? &json : NULL;
  if (as_json && !j)
    code = cli_fail(CLI_FAILED, "out of memory");
  if (j)
    cli_json_open(j, NULL, '{');
  ps_model_config cfg = {.vocab_size = INT32_MAX}; /* without a model any token id is valid */
  if (code == CLI_OK && !model && !data->n)
    code = show_machine(j);
  if (code == CLI_OK && model)
    code = show_model(j, model, seq_len, &cfg);
  if (code == CLI_OK && data->n)
    code = show_data(j, data, cfg.vocab_size, seq_len);
  if (j) {
    cli_json_close(j, '}');
    fclose(json.out);
    if (code == CLI_OK)
      puts(text);
  }
  free(text);
  return code;
}

static const char about[] =
    "Describes this machine: its rates and its memory. With --model or --data it describes\n"
    "a model directory or token shards instead. With both, the first token ids of each\n"
    "shard are checked against the model's vocabulary. With --config it checks a run's TOML\n"
    "file and prints it with every option: its value, or the default.";

int cli_info(int argc, char **argv) {
  const char *model = NULL, *config = NULL;
  cli_texts data = {0};
  uint64_t seq_len = 0;
  bool as_json = false;
  const cli_option options[] = {
      CLI_OPTION(CLI_H_MODEL, &model, .name = "model", .kind = CLI_TEXT, .value = "DIR",
                 .help = "describe this model directory"),
      CLI_OPTION(CLI_H_MODEL, &data, .name = "data", .kind = CLI_TEXTS, .value = "SHARDS...",
                 .help = "describe these token shards"),
      CLI_OPTION(CLI_H_MODEL, &seq_len, .name = "seq-len", .kind = CLI_COUNT, .value = "N",
                 .least = 1, .most = PS_MAX_ROWS,
                 .help = "tokens a sequence: adds FLOPs a token and sequences in the data"),
      CLI_OPTION(CLI_H_MODEL, &config, .name = "config", .kind = CLI_TEXT, .value = "FILE",
                 .help = "check a run's TOML file and print it with every option, instead"),
      CLI_OPTION(CLI_H_OUTPUT, &as_json, .name = "json", .kind = CLI_FLAG,
                 .help = "print one JSON object on stdout"),
      {.name = NULL}};
  const cli_command command = {
      .usage = "info [--model DIR] [--data SHARDS...] [OPTIONS]",
      .about = about,
      .example = "penstock info --model my_8B_model --data shards/ --seq-len 4096",
      .options = options,
      .hint = cli_job_hint,
  };
  int code = cli_parse(&command, argc, argv);
  if (code == CLI_OK && config && (model || data.n || as_json))
    code = cli_fail(CLI_REFUSED, "--config is shown alone: leave --model, --data and --json out");
  else if (code == CLI_OK)
    code = config ? cli_run_file_show(config) : describe(model, &data, seq_len, as_json);
  free(data.item);
  return code < 0 ? CLI_OK : code;
}
