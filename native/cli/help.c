/* help.c - the help of a command: its options under headings, in 80 columns. */
#include "cli/cli.h"
#include <string.h>

enum { COLUMNS = 80, HELP_AT = 29 };

/* In the order of --help. Under the further headings are options that few people need. */
static const char *const headings[CLI_N_HEADINGS] = {
    [CLI_H_MODEL] = "Model and data",
    [CLI_H_MEMORY] = "Memory",
    [CLI_H_BATCH] = "Batch",
    [CLI_H_TRAINING] = "Training",
    [CLI_H_SAVING] = "Saving and resuming",
    [CLI_H_LORA] = "LoRA",
    [CLI_H_TEXTS] = "Texts",
    [CLI_H_FOLLOWING] = "Following a run",
    [CLI_H_MACHINE] = "Another machine",
    [CLI_H_TABLES] = "Tables of plans",
    [CLI_H_HARDWARE] = "Hardware",
    [CLI_H_MEASURING] = "Measurement",
    [CLI_H_OUTPUT] = "Output",
    [CLI_H_OPTIMIZER] = "Optimizer and loss",
    [CLI_H_DOCUMENTS] = "Several documents in a sequence",
    [CLI_H_SAMPLES] = "Samples",
    [CLI_H_FP8] = "FP8",
    [CLI_H_HOSTS] = "Several GPUs and hosts",
    [CLI_H_PROFILING] = "Profiling",
    [CLI_H_FINE] = "Fine control of the plan",
    [CLI_H_NONE] = "Other", /* no option is under it: tests/test_cli_options.py */
};

static unsigned heading_of(const cli_option *o) { return o->heading & ~(unsigned)CLI_RARE; }

static bool is_rare(const cli_option *o) {
  return o->heading & CLI_RARE || heading_of(o) >= CLI_H_OPTIMIZER;
}

/* Prints words from column @at on. A line breaks before a word that begins with a letter of
 * @before, or before any where that is NULL; it then ends with @end, and the next one begins at
 * @indent. */
static void put_words(const char *text, int at, int indent, const char *before, const char *end) {
  const int room = COLUMNS - (int)strlen(end);
  for (bool first = true; *text; first = false) {
    size_t n = strcspn(text, " \n");
    while (before && text[n] && !strchr(before, text[n + 1]))
      n += 1 + strcspn(text + n + 1, " \n");
    if (!first && at + 1 + (int)n > room) {
      printf("%s\n%*s", end, indent, "");
      at = indent;
    } else if (!first) {
      putchar(' ');
      at++;
    }
    printf("%.*s", (int)n, text);
    at += (int)n;
    text += n + (text[n] != 0);
  }
  putchar('\n');
}

static void put_option(const char *left, const char *help) {
  if ((int)strlen(left) > HELP_AT - 3)
    printf("  %s\n%*s", left, HELP_AT, "");
  else
    printf("  %-*s", HELP_AT - 2, left);
  put_words(help, HELP_AT, HELP_AT, NULL, "");
}

/* Returns how many of the options under @heading are left out. */
static unsigned put_heading(const cli_option *options, unsigned heading, bool all) {
  unsigned n = 0, left_out = 0;
  for (const cli_option *o = options; o->name; o++) {
    char left[80];
    if (heading_of(o) != heading || o->grouped)
      continue;
    if (is_rare(o) && !all) {
      left_out++;
      continue;
    }
    if (n++ == 0)
      printf("%s:\n", headings[heading]);
    snprintf(left, sizeof left, "--%s%s%s", o->name, o->kind == CLI_FLAG ? "" : " ",
             o->kind == CLI_FLAG ? "" : o->value);
    put_option(left, o->help);
  }
  if (n)
    putchar('\n');
  return left_out;
}

static bool has_rare(const cli_option *o) {
  while (o->name && !is_rare(o))
    o++;
  return o->name != NULL;
}

void cli_print_help(const cli_command *c, bool all) {
  unsigned left_out = 0;
  printf("usage: ");
  char usage[256];
  snprintf(usage, sizeof usage, "penstock %s", c->usage);
  put_words(usage, 7, 9, "-[(", "");
  putchar('\n');
  put_words(c->about, 0, 0, NULL, "");
  putchar('\n');
  for (unsigned h = 1; h < CLI_N_HEADINGS; h++)
    left_out += put_heading(c->options, h, all);
  left_out += put_heading(c->options, CLI_H_NONE, all);
  puts("Help:");
  put_option("--help", "print this text");
  if (has_rare(c->options))
    put_option("--help-all", "print all options");
  printf("\nexample:\n  ");
  put_words(c->example, 2, 4, "-", " \\");
  if (left_out)
    printf("\n%u more options are shown by penstock %.*s --help-all\n", left_out,
           (int)strcspn(c->usage, " "), c->usage);
}
