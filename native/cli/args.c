/* args.c - parses command lines (--option VALUE, --option=VALUE), prints help and messages. */
#include "cli/cli.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- messages -------------------------------------------------------------------------------- */

int cli_fail(int code, const char *fmt, ...) {
  char text[4096], shown[8192];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  fprintf(stderr, "penstock: %s\n", ps_printable(shown, sizeof shown, text));
  return code;
}

int cli_fail_status(ps_status status, bool starting) {
  bool refused = starting && (status == PS_EINVAL || status == PS_EFORMAT || status == PS_EBUDGET ||
                              status == PS_EIO || status == PS_EDEVICE || status == PS_ENOMEM);
  const char *message = ps_last_error();
  return cli_fail(refused ? CLI_REFUSED : CLI_FAILED, "%s",
                  message[0] ? message : ps_status_name(status));
}

const char *cli_bytes(char buf[32], uint64_t bytes) {
  static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = (double)bytes;
  size_t u = 0;
  for (; value >= 1024 && u < 4; u++)
    value /= 1024;
  snprintf(buf, 32, u ? "%.1f %s" : "%.0f %s", value, unit[u]);
  return buf;
}

const char *cli_duration(char buf[32], double seconds) {
  uint64_t s = seconds > 0 ? (uint64_t)(seconds + 0.5) : 0;
  if (s >= 3600)
    snprintf(buf, 32, "%lluh%02llum", (unsigned long long)(s / 3600),
             (unsigned long long)(s / 60 % 60));
  else if (s >= 60)
    snprintf(buf, 32, "%llum%02llus", (unsigned long long)(s / 60), (unsigned long long)(s % 60));
  else
    snprintf(buf, 32, "%llus", (unsigned long long)s);
  return buf;
}

/* ---- values ---------------------------------------------------------------------------------- */

static bool parse_number(const char *text, double *out, const char **end) {
  char *stop;
  errno = 0;
  *out = strtod(text, &stop);
  *end = stop;
  return stop != text && errno == 0 && isfinite(*out) && strncasecmp(text, "0x", 2) != 0;
}

/* 20GiB, 512MiB, 1.5GiB, 2e9, 100MB. */
static bool parse_bytes(const char *text, uint64_t *out, bool *has_unit) {
  static const struct {
    const char *name;
    double bytes;
  } units[] = {{"", 1},
               {"B", 1},
               {"K", 1e3},
               {"KB", 1e3},
               {"M", 1e6},
               {"MB", 1e6},
               {"G", 1e9},
               {"GB", 1e9},
               {"T", 1e12},
               {"TB", 1e12},
               {"KiB", 1024},
               {"MiB", 1048576},
               {"GiB", 1073741824.0},
               {"TiB", 1099511627776.0}};
  double value;
  const char *unit;
  if (!parse_number(text, &value, &unit) || value < 0)
    return false;
  for (size_t i = 0; i < sizeof units / sizeof units[0]; i++)
    if (strcasecmp(unit, units[i].name) == 0 && value * units[i].bytes < 1e18) {
      *out = (uint64_t)(value * units[i].bytes);
      *has_unit = *unit != 0;
      return true;
    }
  return false;
}

int cli_parse_size(const char *option, const char *text, uint64_t *out) {
  uint64_t bytes;
  bool has_unit;
  if (!parse_bytes(text, &bytes, &has_unit) || bytes == 0)
    return cli_fail(CLI_REFUSED, "--%s %s is no size: give one such as 20GiB, 512MiB or 2e9",
                    option, text);
  if (!has_unit && bytes < CLI_LEAST_SIZE)
    return cli_fail(CLI_REFUSED, "--%s %s is %" PRIu64 " byte%s: write %s%s", option, text, bytes,
                    bytes == 1 ? "" : "s", text, bytes < 1024 ? "GiB" : "MiB");
  *out = bytes;
  return CLI_OK;
}

/* @text is a number of the option's range. @whole: a whole number, also written as 2e5. */
static bool in_range(const char *text, double least, double most, bool whole, double *out) {
  const char *end;
  return parse_number(text, out, &end) && *end == 0 && *out >= least && *out <= most &&
         (!whole || *out == floor(*out));
}

static int refuse_value(const cli_option *o, const char *text, const char *wanted) {
  return cli_fail(CLI_REFUSED, "--%s %s: give %s", o->name, text, wanted);
}

static int set_value(const cli_option *o, const char *text) {
  const bool whole = o->kind == CLI_COUNT;
  const double most = o->most > 0 ? o->most : whole ? 9007199254740992.0 : 1e30;
  double value;
  char wanted[96];
  switch (o->kind) {
  case CLI_FLAG: *(bool *)o->out = true; return CLI_OK;
  case CLI_TEXT:
    if (!text[0])
      return cli_fail(CLI_REFUSED, "--%s is empty", o->name);
    *(const char **)o->out = text;
    return CLI_OK;
  case CLI_TEXTS: {
    cli_texts *texts = o->out;
    const char **grown = realloc(texts->item, (texts->n + 1) * sizeof *grown);
    if (!grown)
      return cli_fail(CLI_FAILED, "out of memory");
    texts->item = grown;
    texts->item[texts->n++] = text;
    return CLI_OK;
  }
  case CLI_COUNT:
    snprintf(wanted, sizeof wanted, "a whole number from %.0f to %.0f", o->least, most);
    if (!in_range(text, o->least, most, whole, &value))
      return refuse_value(o, text, wanted);
    *(uint64_t *)o->out = (uint64_t)value;
    return CLI_OK;
  case CLI_ID:
    if (!in_range(text, -1, INT32_MAX, true, &value))
      return refuse_value(o, text, "a token id, or -1 for none");
    *(int32_t *)o->out = (int32_t)value;
    return CLI_OK;
  case CLI_BYTES: return cli_parse_size(o->name, text, o->out);
  case CLI_NUMBER:
    snprintf(wanted, sizeof wanted, "a number from %g to %g", o->least, most);
    if (!in_range(text, o->least, most, whole, &value))
      return refuse_value(o, text, wanted);
    *(double *)o->out = value;
    return CLI_OK;
  case CLI_CHOICE:
    wanted[0] = 0;
    for (uint32_t i = 0; o->choices[i]; i++) {
      if (strcmp(text, o->choices[i]) == 0) {
        *(uint32_t *)o->out = i;
        return CLI_OK;
      }
      size_t used = strlen(wanted);
      snprintf(wanted + used, sizeof wanted - used, "%s%s",
               !i                  ? ""
               : o->choices[i + 1] ? ", "
                                   : " or ",
               o->choices[i]);
    }
    return refuse_value(o, text, wanted);
  }
  return CLI_OK;
}

/* ---- options --------------------------------------------------------------------------------- */

/* How many edits (insert, delete, replace a letter) turn a into b. */
static unsigned distance(const char *a, const char *b) {
  enum { MOST = 48 };
  size_t na = strnlen(a, MOST - 1), nb = strnlen(b, MOST - 1);
  unsigned row[MOST];
  for (size_t j = 0; j <= nb; j++)
    row[j] = (unsigned)j;
  for (size_t i = 1; i <= na; i++) {
    unsigned diagonal = row[0];
    row[0] = (unsigned)i;
    for (size_t j = 1; j <= nb; j++) {
      unsigned best = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      if (row[j] + 1 < best)
        best = row[j] + 1;
      if (row[j - 1] + 1 < best)
        best = row[j - 1] + 1;
      row[j] = best;
    }
  }
  return row[nb];
}

static int refuse_option(const cli_command *c, const char *name) {
  const cli_option *nearest = NULL;
  unsigned least = 4; /* names that differ by 4 edits or more are no slip of the hand */
  for (const cli_option *o = c->options; o->name; o++)
    if (distance(name, o->name) < least) {
      least = distance(name, o->name);
      nearest = o;
    }
  if (nearest)
    return cli_fail(CLI_REFUSED, "there is no option --%s: did you mean --%s?", name,
                    nearest->name);
  return cli_fail(CLI_REFUSED, "there is no option --%s (--help lists them)", name);
}

/* Prints an option's help in a column of its own, broken at spaces before column 100. */
static void print_help(const char *left, const char *help) {
  enum { COLUMN = 29, WIDTH = 100 - COLUMN };
  printf("  %-26s ", left);
  while (strlen(help) > WIDTH) {
    int n = WIDTH;
    while (n > 1 && help[n] != ' ')
      n--;
    printf("%.*s\n%*s", n, help, COLUMN, "");
    help += n + 1;
  }
  puts(help);
}

static void print_options(const cli_command *c) {
  printf("usage: penstock %s\n\n%s\n\n", c->usage, c->about);
  for (const cli_option *o = c->options; o->name; o++) {
    char left[48];
    snprintf(left, sizeof left, "--%s%s%s", o->name, o->kind == CLI_FLAG ? "" : " ",
             o->kind == CLI_FLAG ? "" : o->value);
    print_help(left, o->help);
  }
  print_help("--help", "print this text");
  printf("\nexample:\n  %s\n", c->example);
}

/* Parses the option at argv[*i], and moves *i to its last word. */
static int parse_option(const cli_command *c, int argc, char **argv, int *i) {
  char name[64];
  const char *word = argv[*i] + 2, *equals = strchr(word, '=');
  snprintf(name, sizeof name, "%.*s", (int)(equals ? (size_t)(equals - word) : strlen(word)), word);
  const cli_option *o = c->options;
  while (o->name && strcmp(o->name, name) != 0)
    o++;
  if (!o->name)
    return refuse_option(c, name);
  if (o->given)
    *o->given = true;
  if (o->kind == CLI_FLAG)
    return equals ? cli_fail(CLI_REFUSED, "--%s takes no value", name) : set_value(o, NULL);
  if (equals)
    return set_value(o, equals + 1);
  if (*i + 1 >= argc || strncmp(argv[*i + 1], "--", 2) == 0)
    return cli_fail(CLI_REFUSED, "--%s needs a value: --%s %s", name, name, o->value);
  int code = CLI_OK;
  do
    code = set_value(o, argv[++*i]);
  while (code == CLI_OK && o->kind == CLI_TEXTS && *i + 1 < argc &&
         strncmp(argv[*i + 1], "--", 2) != 0);
  return code;
}

int cli_parse(const cli_command *c, int argc, char **argv) {
  uint32_t n_positional = 0;
  for (int i = 1; i < argc; i++)
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
      print_options(c);
      return -1;
    }
  for (int i = 1; i < argc; i++) {
    int code = CLI_OK;
    if (strncmp(argv[i], "--", 2) == 0)
      code = parse_option(c, argc, argv, &i);
    else if (n_positional < c->n_positional)
      c->positional[n_positional++] = argv[i];
    else
      code = cli_fail(CLI_REFUSED, "'%s' is not expected here: penstock %s", argv[i], c->usage);
    if (code != CLI_OK)
      return code;
  }
  if (n_positional < c->n_positional)
    return cli_fail(CLI_REFUSED, "%u of %u arguments given: penstock %s", n_positional,
                    c->n_positional, c->usage);
  return CLI_OK;
}
