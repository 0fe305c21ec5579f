/* demo.c - `penstock demo HOST_GIB DEV_GIB SEQLEN MODEL_DIR`: the short form of train, for a first
 * run on a machine. */
#include "cli/cli.h"
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { DEMO_STEPS = 10 };

/* "80" or "1.5" is a number of GiB. */
static int parse_gib(const char *text, const char *what, uint64_t *out) {
  char *end;
  double value = strtod(text, &end);
  if (end == text || *end || !(value > 0) || value > 1e6)
    return cli_fail(CLI_REFUSED, "%s '%s': give a number of GiB above 0", what, text);
  *out = (uint64_t)(value * 1073741824.0);
  return CLI_OK;
}

static int parse_seq_len(const char *text, uint64_t *out) {
  char *end;
  unsigned long long value = strtoull(text, &end, 10); /* ULLONG_MAX where the text's is larger */
  if (end == text || *end || text[0] == '-' || !value || value > PS_MAX_ROWS)
    return cli_fail(CLI_REFUSED, "SEQLEN '%s': give a whole number from 1 to %d", text,
                    PS_MAX_ROWS);
  *out = value;
  return CLI_OK;
}

/* Without --data: the shards in MODEL_DIR/data. */
static int find_data(cli_job *job, char **folder) {
  struct stat st;
  if (job->data.n)
    return CLI_OK;
  *folder = cli_path_join(job->model, "data");
  job->data.item = malloc(sizeof *job->data.item);
  if (!*folder || !job->data.item)
    return cli_fail(CLI_FAILED, "out of memory");
  if (stat(*folder, &st) != 0 || !S_ISDIR(st.st_mode))
    return cli_fail(CLI_REFUSED,
                    "no token shards: give --data SHARDS, or put them in %s (python -m "
                    "penstock data makes them from text)",
                    *folder);
  job->data.item[0] = *folder;
  job->data.n = 1;
  return CLI_OK;
}

int cli_demo(int argc, char **argv) {
  cli_job job;
  cli_option options[CLI_MAX_OPTIONS];
  const char *positional[4] = {NULL};
  char *folder = NULL;
  cli_job_init(&job);
  job.train_config.total_steps = DEMO_STEPS;
  job.no_save = true;
  cli_job_options(&job, options, true);
  size_t n = 0; /* four options are given by position instead */
  for (size_t i = 0; options[i].name; i++)
    if (strcmp(options[i].name, "model") && strcmp(options[i].name, "host-mem") &&
        strcmp(options[i].name, "device-mem") && strcmp(options[i].name, "seq-len")) {
      options[n] = options[i];
      if (strcmp(options[n].name, "steps") == 0)
        options[n].help = "steps to train (default 10)";
      if (strcmp(options[n].name, "data") == 0)
        options[n].help = "token shards (default: MODEL_DIR/data)";
      n++;
    }
  options[n] = (cli_option){.name = NULL};
  const cli_command command = {
      .usage = "demo HOST_GIB DEV_GIB SEQLEN MODEL_DIR [OPTIONS]",
      .about =
          "Trains for some steps under both memory caps and reports the measured throughput\n"
          "beside the predicted one. It is the short form of train. Token shards are those of\n"
          "--data, or the *.bin files in MODEL_DIR/data.",
      .example = "penstock demo 80 20 4096 my_8B_model --data shards/",
      .options = options,
      .job = &job,
      .hint = cli_job_hint,
      .positional = positional,
      .n_positional = 4,
  };
  int code = cli_job_parse(&command, argc, argv);
  if (code == CLI_OK)
    code = parse_gib(positional[0], "HOST_GIB", &job.plan_config.host_mem_bytes);
  if (code == CLI_OK)
    code = parse_gib(positional[1], "DEV_GIB", &job.plan_config.device_mem_bytes);
  if (code == CLI_OK)
    code = parse_seq_len(positional[2], &job.plan_config.seq_len);
  job.model = positional[3];
  job.model_option = "MODEL_DIR";
  if (code == CLI_OK)
    code = find_data(&job, &folder);
  if (code == CLI_OK)
    code = cli_train_job(&job);
  cli_job_free(&job);
  free(folder);
  return code < 0 ? CLI_OK : code;
}
