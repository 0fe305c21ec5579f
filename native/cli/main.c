/* main.c - the binary `penstock`: calls the subcommand. */
#include "cli/cli.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* The command is written in Python; python/penstock/__main__.py runs it. */
static int in_python(int argc, char **argv) {
  (void)argc;
  return cli_fail(CLI_REFUSED,
                  "'%s' is a command of the Python package: make python installs it, as "
                  "build/venv/bin/penstock %s",
                  argv[0], argv[0]);
}

static const struct {
  const char *name;
  int (*run)(int argc, char **argv);
  const char *about;
} commands[] = {
    {"train", cli_train, "train a model directory under two memory caps"},
    {"eval", cli_eval, "compute a model's loss on data, without training"},
    {"generate", cli_generate, "print the tokens that follow prompts"},
    {"plan", cli_plan, "show what train would do, without training"},
    {"demo", cli_demo, "train for a few steps: demo HOST_GIB DEV_GIB SEQLEN MODEL_DIR"},
    {"info", cli_info, "describe this machine, a model directory, token shards"},
    {"profile", cli_profile, "measure this machine's rates and cache them"},
    {"data", in_python, "write token shards from text (Python package)"},
    {"import", in_python, "write a GGUF file's model as a directory (Python package)"},
    {"export", in_python, "write a GGUF file or a directory (Python package)"},
    {"compare", in_python, "compare with transformers (Python package)"},
    {"score", in_python, "print a classifier's scores of texts (Python package)"},
    {"embed", in_python, "write pooled embeddings of texts (Python package)"},
    {"merge", in_python, "add a LoRA adapter to a model's weights (Python package)"},
    {"watch", in_python, "follow a run in the terminal (Python package)"},
    {"report", in_python, "write a run as an HTML page (Python package)"},
    {"log", in_python, "write a run for TensorBoard, W&B (Python package)"},
    {"version", cli_version, "print the version"},
};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static void print_help(FILE *out) {
  fprintf(
      out,
      "penstock trains transformers that do not fit in the device's memory: it streams weights,\n"
      "gradients and activations between host and device, as a plan for two caps says.\n\n"
      "usage: penstock COMMAND [OPTIONS]      (penstock COMMAND --help lists its options)\n\n");
  for (size_t i = 0; i < N_COMMANDS; i++)
    fprintf(out, "  %-9s %s\n", commands[i].name, commands[i].about);
  fprintf(out, "\nexample:\n  penstock train --model my_8B_model --data shards/ --device-mem 20GiB "
               "--host-mem 80GiB --seq-len 4096\n");
}

int cli_version(int argc, char **argv) {
  (void)argc, (void)argv;
  printf("penstock %s\n", ps_version());
  return CLI_OK;
}

/* Opens the standard streams that are closed, so that no other file takes their numbers. Ignores
 * two signals: a closed pipe and a file at its size limit are then errors of write(). */
static void prepare_process(void) {
  while (true) {
    int fd = open("/dev/null", O_RDWR);
    if (fd > STDERR_FILENO)
      close(fd);
    if (fd < 0 || fd > STDERR_FILENO)
      break;
  }
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);
}

/* The limit is also the stack of a library's threads. The largest frame has 40 KiB. */
static int check_stack(void) {
  enum { LEAST_KIB = 96 };
  struct rlimit stack;
  if (getrlimit(RLIMIT_STACK, &stack) != 0 || stack.rlim_cur >= LEAST_KIB << 10)
    return CLI_OK;
  return cli_fail(CLI_REFUSED,
                  "the stack is limited to %llu KiB, and %d KiB are needed: run ulimit -s 8192 "
                  "first",
                  (unsigned long long)stack.rlim_cur >> 10, LEAST_KIB);
}

/* The command failed where its answer could not be written to stdout. */
static int finish(int code) {
  errno = 0;
  const bool failed = fflush(stdout) != 0 || ferror(stdout);
  if (failed)
    cli_fail(CLI_FAILED, "stdout cannot be written%s%s", errno ? ": " : "",
             errno ? strerror(errno) : "");
  return failed && code == CLI_OK ? CLI_FAILED : code;
}

static int run(int argc, char **argv) {
  if (argc < 2) {
    print_help(stderr);
    return CLI_REFUSED;
  }
  if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
      strcmp(argv[1], "--help-all") == 0 || strcmp(argv[1], "help") == 0) {
    print_help(stdout);
    return CLI_OK;
  }
  if (strcmp(argv[1], "--version") == 0)
    return cli_version(argc, argv);
  for (size_t i = 0; i < N_COMMANDS; i++)
    if (strcmp(argv[1], commands[i].name) == 0)
      return commands[i].run(argc - 1, argv + 1);
  cli_option names[N_COMMANDS + 1] = {0};
  for (size_t i = 0; i < N_COMMANDS; i++)
    names[i].name = commands[i].name;
  const cli_option *nearest = cli_nearest_option(names, argv[1]);
  if (nearest)
    return cli_fail(CLI_REFUSED, "there is no command '%s': did you mean %s?", argv[1],
                    nearest->name);
  return cli_fail(CLI_REFUSED, "there is no command '%s' (penstock --help lists them)", argv[1]);
}

/* A plan's reserve counts what the process holds when the library first looks. It looks here,
 * before a checkpoint or data is opened, so that a resumed run has the reserve of the run it goes
 * on with. */
static void note_what_is_held(void) {
  ps_hardware facts;
  (void)ps_hardware_estimate(&facts, PS_BACKEND_CPU, 0, 0);
}

int main(int argc, char **argv) {
  prepare_process();
  int code = check_stack();
  note_what_is_held();
  if (code == CLI_OK)
    code = cli_name_fields();
  return finish(code == CLI_OK ? run(argc, argv) : code);
}
