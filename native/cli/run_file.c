/* run_file.c - the TOML file of a run: read by --config, and written beside the results as it was
 * resolved. Tables, keys, types and limits are those of the option table (job.c). */
#include "cli/cli.h"
#include "cli/toml.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct reading {
  const cli_command *command;
  const char *path;
  cli_job unused; /* gets the values that the command does not take */
  cli_option options[CLI_MAX_OPTIONS];
  int code;
} reading;

static bool takes(cli_kind kind, const cli_toml_item *item) {
  switch (kind) {
  case CLI_FLAG: return !item->array && item->kind == CLI_TOML_BOOL;
  case CLI_TEXT:
  case CLI_CHOICE: return !item->array && item->kind == CLI_TOML_STRING;
  case CLI_TEXTS:
  case CLI_SET: return item->kind == CLI_TOML_STRING;
  case CLI_BYTES:
  case CLI_EVERY: return !item->array && item->kind != CLI_TOML_BOOL;
  default: return !item->array && item->kind == CLI_TOML_NUMBER;
  }
}

static const char *const wanted[] = {
    [CLI_FLAG] = "true or false",
    [CLI_TEXT] = "a string",
    [CLI_TEXTS] = "a string or an array of strings",
    [CLI_COUNT] = "a number",
    [CLI_ID] = "a number",
    [CLI_BYTES] = "a number or a string such as \"20GiB\"",
    [CLI_NUMBER] = "a number",
    [CLI_EVERY] = "a number of steps or a string such as \"30m\"",
    [CLI_CHOICE] = "a string",
    [CLI_SET] = "a string or an array of strings",
};

static int refuse_key(const reading *r, const cli_toml_item *item) {
  char name[64];
  snprintf(name, sizeof name, "%s", item->key);
  cli_plain_name(name);
  const char *synonym = cli_synonym(name);
  const cli_option *nearest =
      synonym ? cli_find_option(r->options, synonym) : cli_nearest_option(r->options, item->key);
  const bool known = nearest && nearest->table[0];
  return cli_fail(CLI_REFUSED, "%s:%u: there is no key %s in [%s]%s%s%s%s%s", r->path, item->line,
                  item->key, item->table, known ? ": did you mean " : "",
                  known ? nearest->name : "", known ? " in [" : "", known ? nearest->table : "",
                  known ? "]?"
                        : ": penstock train --help-all lists the options, which are the keys");
}

static int take_item(void *user, const cli_toml_item *item) {
  reading *r = user;
  char label[1024];
  const cli_option *o = cli_find_option(r->options, item->key);
  if (strcmp(item->key, "fp8-saved-gate-up") == 0 && strcmp(item->table, "model") == 0) {
    if (item->n && strcmp(item->value[0], "false") == 0) /* written by older versions */
      return CLI_OK;
    return r->code =
               cli_fail(CLI_REFUSED,
                        "%s:%u: fp8-saved-gate-up was taken out, as it raised the loss: leave "
                        "it out",
                        r->path, item->line);
  }
  if (!o || strcmp(o->table, item->table) != 0)
    return r->code = refuse_key(r, item);
  if (!takes(o->kind, item))
    return r->code = cli_fail(CLI_REFUSED, "%s:%u: %s takes %s", r->path, item->line, o->name,
                              wanted[o->kind]);
  const cli_option *own = cli_find_option(r->command->options, item->key);
  const cli_option *set = own && own->table && own->table[0] ? own : o;
  snprintf(label, sizeof label, "%s:%u: %s", r->path, item->line, o->name);
  cli_clear_list(set);
  for (uint32_t i = 0; i < item->n && r->code == CLI_OK; i++)
    r->code = cli_set_value(set, label, item->value[i]);
  return r->code;
}

/* The file's text, which the caller frees; NULL after a message. */
static char *read_text(const char *path, size_t *bytes) {
  FILE *f = cli_input_open("config", path);
  char *text = f ? malloc(CLI_TOML_MAX_BYTES + 1) : NULL;
  *bytes = text ? fread(text, 1, CLI_TOML_MAX_BYTES + 1, f) : 0;
  if (f && (!text || ferror(f))) {
    cli_fail(CLI_REFUSED, "--config %s cannot be read: %s", path, strerror(text ? errno : ENOMEM));
    free(text);
    text = NULL;
  }
  if (f)
    fclose(f);
  return text;
}

int cli_run_file_read(const cli_command *command, const char *path) {
  size_t bytes;
  char error[256], *text = read_text(path, &bytes);
  if (!text)
    return CLI_REFUSED;
  reading r = {.command = command, .path = path, .code = CLI_OK};
  cli_job_init(&r.unused);
  cli_job_options(&r.unused, r.options, true);
  const int st = cli_toml_read(text, bytes, take_item, &r, &command->job->run_text, error);
  cli_job_free(&r.unused);
  free(text);
  return st < 0 ? cli_fail(CLI_REFUSED, "%s:%s", path, error) : r.code;
}

/* The file of the last --config. */
static const char *run_file_of(int argc, char **argv) {
  static const char config[] = "--config=";
  const char *path = NULL;
  for (int i = 1; i < argc; i++)
    if (strncmp(argv[i], config, sizeof config - 1) == 0)
      path = argv[i] + sizeof config - 1;
    else if (strncmp(argv[i], config, sizeof config - 2) == 0 && !argv[i][sizeof config - 2])
      path = i + 1 < argc ? argv[i + 1] : NULL; /* a missing one is refused later */
  return path;
}

/* Of two options that exclude each other, the command line's holds, and not the file's. */
static void override(cli_job *now, const cli_job *then) {
  if (then->train_config.total_steps && !isnan(now->epochs) && isnan(then->epochs))
    now->train_config.total_steps = 0;
  if (!isnan(then->epochs) && now->train_config.total_steps && !then->train_config.total_steps)
    now->epochs = NAN;
  if (then->warmup_given && !isnan(now->warmup_ratio) && isnan(then->warmup_ratio))
    now->warmup_given = false;
  if (!isnan(then->warmup_ratio) && now->warmup_given && !then->warmup_given)
    now->warmup_ratio = NAN;
  if (then->out && now->no_save && !then->no_save)
    now->out = NULL;
  if (then->no_save && now->out && !then->out)
    now->no_save = now->no_save_given = false;
}

int cli_job_parse(const cli_command *c, int argc, char **argv) {
  const char *path = cli_help_asked(argc, argv) ? NULL : run_file_of(argc, argv);
  int code = path ? cli_run_file_read(c, path) : CLI_OK;
  const cli_job file = *c->job;
  if (code == CLI_OK)
    code = cli_parse(c, argc, argv);
  override(c->job, &file);
  return code;
}

/* ---- writing --------------------------------------------------------------------------------- */

static const char first_line[] = "# A run of penstock as it was resolved: every option with the "
                                 "value used.\n";

int cli_run_file_check(const cli_job *job) {
  char line[sizeof first_line] = "", *path = cli_path_join(job->run_dir, "run.toml");
  FILE *f = path ? fopen(path, "rb") : NULL;
  const bool ours = f && fgets(line, sizeof line, f) && strcmp(line, first_line) == 0;
  int code = CLI_OK;
  if (!path)
    code = cli_fail(CLI_FAILED, "out of memory");
  else if ((f && !ours) || (!f && errno != ENOENT && errno != ENOTDIR))
    code = cli_fail(CLI_REFUSED,
                    "%s is no file that penstock wrote, and the resolved run would replace it: "
                    "give another --run-dir, or --out",
                    path);
  if (f)
    fclose(f);
  free(path);
  return code;
}

/* A basic string of UTF-8. */
static void put_string(FILE *f, const char *text) {
  putc('"', f);
  for (const unsigned char *c = (const unsigned char *)text; *c; c++)
    if (*c == '"' || *c == '\\')
      fprintf(f, "\\%c", *c);
    else if (*c < ' ' || *c == 0x7f)
      fprintf(f, "\\u%04X", *c);
    else
      putc(*c, f);
  putc('"', f);
}

/* The shortest of 15 to 17 digits that reads back as @value. */
static void put_number(FILE *f, double value) {
  char text[40];
  for (int digits = 15; digits <= 17; digits++) {
    snprintf(text, sizeof text, "%.*g", digits, value);
    if (strtod(text, NULL) == value)
      break;
  }
  fputs(text, f);
}

/* Whether the option has a value: it was given, or its default is one. */
static bool has_value(const cli_option *o) {
  switch (o->kind) {
  case CLI_TEXT: return *(const char **)o->out != NULL;
  case CLI_TEXTS: return ((const cli_texts *)o->out)->n > 0;
  case CLI_BYTES: return *(const uint64_t *)o->out > 0;
  case CLI_COUNT:
    return (double)cli_count_of(o) >= o->least && (!o->given || *o->given) &&
           !(o->bytes == sizeof(uint32_t) && cli_count_of(o) == PS_DEFAULT);
  case CLI_NUMBER: return !isnan(*(const double *)o->out) && (!o->given || *o->given);
  case CLI_EVERY: return o->given && *o->given;
  case CLI_CHOICE: return *(const uint32_t *)o->out != PS_DEFAULT && (!o->given || *o->given);
  case CLI_GROUP: return false; /* its keys are options */
  case CLI_FLAG: return !o->given || *o->given;
  default: return true;
  }
}

static bool is_utf8(const char *text) { return !*cli_not_utf8(text, text + strlen(text)); }

/* A TOML file can hold the option's value. */
static bool can_hold(const cli_option *o) {
  const cli_texts *texts = o->out;
  bool all = o->kind != CLI_TEXT || is_utf8(*(const char **)o->out);
  for (uint32_t i = 0; o->kind == CLI_TEXTS && i < texts->n; i++)
    all = all && is_utf8(texts->item[i]);
  return all;
}

static void put_every(FILE *f, const cli_every *every) {
  if (every->steps) {
    fprintf(f, "%llu", (unsigned long long)every->steps);
    return;
  }
  putc('"', f);
  put_number(f, every->seconds / 60);
  fputs("m\"", f);
}

static void put_value(FILE *f, const cli_option *o) {
  switch (o->kind) {
  case CLI_FLAG: fputs(cli_flag_of(o) ? "true" : "false", f); break;
  case CLI_TEXT: put_string(f, *(const char **)o->out); break;
  case CLI_TEXTS: {
    const cli_texts *texts = o->out;
    for (uint32_t i = 0; i < texts->n; i++) {
      fputs(i ? ", " : "[", f);
      put_string(f, texts->item[i]);
    }
    putc(']', f);
    break;
  }
  case CLI_ID: fprintf(f, "%d", *(const int32_t *)o->out); break;
  case CLI_NUMBER: put_number(f, *(const double *)o->out); break;
  case CLI_EVERY: put_every(f, o->out); break;
  case CLI_CHOICE: put_string(f, o->choices[*(const uint32_t *)o->out]); break;
  case CLI_SET: {
    const uint32_t bits = *(const uint32_t *)o->out;
    putc('[', f);
    for (uint32_t i = 0; o->choices[i]; i++)
      if (bits >> i & 1) {
        fputs(bits & ((1u << i) - 1) ? ", " : "", f);
        put_string(f, o->choices[i]);
      }
    putc(']', f);
    break;
  }
  case CLI_BYTES: fprintf(f, "%llu", (unsigned long long)*(const uint64_t *)o->out); break;
  default: fprintf(f, "%llu", (unsigned long long)cli_count_of(o));
  }
}

/* Every table in the order of its first option, and in it the options in theirs. */
static void write_options(FILE *f, const cli_option *options) {
  for (const cli_option *t = options; t->name; t++) {
    const cli_option *first = options;
    while (strcmp(first->table, t->table) != 0)
      first++;
    if (first != t || !t->table[0])
      continue;
    fprintf(f, "\n[%s]\n", t->table);
    for (const cli_option *o = t; o->name; o++) {
      if (strcmp(o->table, t->table) != 0)
        continue;
      if (!has_value(o)) {
        fprintf(f, "# %s is not given\n", o->name);
      } else if (!can_hold(o)) {
        fprintf(f, "# %s is not UTF-8: give it on the command line\n", o->name);
      } else {
        fprintf(f, "%s = ", o->name);
        put_value(f, o);
        putc('\n', f);
      }
    }
  }
}

char *cli_options_text(cli_job *job, const char *without) {
  cli_option options[CLI_MAX_OPTIONS];
  char *text = NULL;
  size_t bytes;
  FILE *f = open_memstream(&text, &bytes);
  if (!f)
    return NULL;
  cli_job_options(job, options, true);
  for (const cli_option *o = options; o->name; o++) {
    if (cli_among(without, o->name))
      continue;
    fprintf(f, "--%s ", o->name);
    if (has_value(o))
      put_value(f, o);
    else
      fputs("not given", f);
    putc('\n', f);
  }
  if (fclose(f) == 0)
    return text;
  free(text);
  return NULL;
}

int cli_run_file_show(const char *path) {
  cli_job job;
  cli_option options[CLI_MAX_OPTIONS];
  cli_job_init(&job);
  cli_job_options(&job, options, true);
  const cli_command command = {.options = options, .job = &job};
  const int code = cli_run_file_read(&command, path);
  if (code == CLI_OK)
    write_options(stdout, options);
  cli_job_free(&job);
  return code;
}

/* What the plan and the optimizer chose where the user did not. */
static void resolve(cli_job *job) {
  ps_plan_config *c = &job->plan_config;
  const ps_plan_report *plan = &job->report;
  double *const hyper[PS_N_HYPERS] = {[PS_HYPER_LR] = &job->train_config.lr,
                                      [PS_HYPER_BETA1] = &job->train_config.beta1,
                                      [PS_HYPER_BETA2] = &job->train_config.beta2,
                                      [PS_HYPER_EPS] = &job->train_config.eps,
                                      [PS_HYPER_MOMENTUM] = &job->train_config.momentum,
                                      [PS_HYPER_WEIGHT_DECAY] = &job->train_config.weight_decay};
  for (int h = 0; h < PS_N_HYPERS; h++)
    if (hyper[h] && isnan(*hyper[h]))
      *hyper[h] = ps_optimizer_default((ps_optimizer)c->optimizer, (ps_hyper)h);
  c->tokens_per_step = plan->tokens_per_step;
  c->chunk_tokens = plan->chunk_tokens;
  c->chunks_per_round = plan->chunks_per_round;
  c->first_round_chunks = plan->first_round_chunks;
  c->first_rounds = plan->first_rounds;
  c->head_slice_tokens = plan->head_slice_tokens;
  job->lr_schedule_given = job->min_lr_given = job->warmup_given = job->shuffle_given = true;
  job->no_save_given = job->no_save;
  job->out = job->default_out ? NULL : job->out; /* it follows --run-dir */
  job->checkpoint_given |= job->checkpoint_chosen;
  job->epochs = job->warmup_ratio = NAN; /* steps and warmup-steps have them */
  const bool fp8 = c->recipe == PS_RECIPE_FP8 || c->recipe == PS_RECIPE_FP8_MASTER;
  if (!fp8) /* else the file would speak of FP8 */
    c->fp8_bf16_first = c->fp8_bf16_last = PS_DEFAULT;
  if (!c->lora.rank)
    c->lora.alpha = NAN;
}

/* The tokens that the steps of a stage train: whole sequences, equally many on each host. */
static void resolve_ramp(cli_job *job, char stage[PS_MAX_RAMP][64],
                         const char *stages[PS_MAX_RAMP]) {
  const ps_plan_config *c = &job->plan_config;
  const uint64_t unit = c->n_hosts * c->seq_len;
  for (uint32_t i = 0; i < job->batch_ramp.n; i++) {
    snprintf(stage[i], sizeof stage[i], "%llu:%llu",
             (unsigned long long)(job->ramp[i].tokens_per_step / unit * unit),
             (unsigned long long)job->ramp[i].n_steps);
    stages[i] = stage[i];
  }
  if (job->batch_ramp.n)
    job->batch_ramp.item = stages;
}

char *cli_run_file_text(const cli_job *job) {
  cli_job resolved = *job;
  cli_option options[CLI_MAX_OPTIONS];
  char *text = NULL;
  size_t bytes;
  FILE *f = open_memstream(&text, &bytes);
  if (!f)
    return NULL;
  resolve(&resolved);
  resolved.force = false; /* consent is of one command, not of the run's file */
  char stage[PS_MAX_RAMP][64];
  const char *stages[PS_MAX_RAMP];
  resolve_ramp(&resolved, stage, stages);
  cli_job_options(&resolved, options, true);
  fputs(first_line, f);
  write_options(f, options);
  const bool whole = !ferror(f);
  if (fclose(f) == 0 && whole)
    return text;
  free(text);
  return NULL;
}

int cli_run_file_write(const cli_job *job) {
  char *text = cli_run_file_text(job), *path = cli_path_join(job->run_dir, "run.toml");
  int code = text && path ? CLI_OK : cli_fail(CLI_FAILED, "out of memory for run.toml");
  if (code == CLI_OK) {
    text[strlen(text) - 1] = 0; /* cli_file_replace() ends the last line */
    code = cli_file_replace(path, text, NULL);
  }
  free(text);
  free(path);
  return code;
}
