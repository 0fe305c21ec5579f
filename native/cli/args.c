/* args.c - parses command lines (--option VALUE, --option=VALUE), prints messages. */
#include "cli/cli.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- messages -------------------------------------------------------------------------------- */

static char last_words[1024];
const char *cli_last_words(void) { return last_words; }

int cli_fail(int code, const char *fmt, ...) {
  char text[4096], shown[8192];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  fprintf(stderr, "penstock: %s\n", ps_printable(shown, sizeof shown, text));
  snprintf(last_words, sizeof last_words, "%.1023s", text);
  return code;
}

static int code_of(ps_status status, bool starting) {
  const bool refused =
      starting &&
      (status == PS_EINVAL || status == PS_EFORMAT || status == PS_EBUDGET || status == PS_EIO ||
       status == PS_EDEVICE || status == PS_ENOMEM || status == PS_EBUSY);
  return refused ? CLI_REFUSED : CLI_FAILED;
}

static const char *words_of(ps_status status) {
  const char *message = ps_last_error();
  return message[0] ? message : ps_status_name(status);
}

int cli_fail_status(ps_status status, bool starting) {
  return cli_fail(code_of(status, starting), "%s", words_of(status));
}

int cli_fail_given(const char *option, ps_status status) {
  return cli_fail(code_of(status, true), "%s %s", option, words_of(status));
}

static void print_warning(void *user, ps_log_level level, const char *message) {
  const char *begin = user; /* of a line that is printed */
  if (level >= PS_LOG_WARN && strncmp(message, begin, strlen(begin)) == 0)
    fprintf(stderr, "penstock: %s\n", message);
}

void cli_warnings_of(const char *begin) { ps_log_set(print_warning, (void *)begin); }
void cli_warnings(bool print) { ps_log_set(print ? print_warning : NULL, ""); }

const char *cli_bytes(char buf[32], uint64_t bytes) {
  static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = (double)bytes;
  size_t u = 0;
  for (; value >= 1024 && u < 4; u++)
    value /= 1024;
  snprintf(buf, 32, u ? "%.1f %s" : "%.0f %s", value, unit[u]);
  return buf;
}

const char *cli_rate(char buf[32], double bytes_per_s) {
  static const char *const unit[] = {"B/s", "kB/s", "MB/s", "GB/s", "TB/s"};
  size_t u = 0;
  for (; bytes_per_s >= 1000 && u < 4; u++)
    bytes_per_s /= 1000;
  snprintf(buf, 32, "%.*f %s", bytes_per_s < 100 && u ? 1 : 0, bytes_per_s, unit[u]);
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

int cli_parse_size(const char *label, const char *text, uint64_t *out) {
  uint64_t bytes;
  bool has_unit;
  if (!parse_bytes(text, &bytes, &has_unit) || bytes == 0)
    return cli_fail(CLI_REFUSED, "%s %s is no size: give one such as 20GiB, 512MiB or 2e9", label,
                    text);
  if (!has_unit && bytes < CLI_LEAST_SIZE)
    return cli_fail(CLI_REFUSED, "%s %s is %" PRIu64 " byte%s: write %s%s", label, text, bytes,
                    bytes == 1 ? "" : "s", text, bytes < 1024 ? "GiB" : "MiB");
  *out = bytes;
  return CLI_OK;
}

/* 200, 30m, 1.5h; 0: never. */
static bool parse_every(const cli_option *o, const char *text, cli_every *out) {
  const char *unit;
  double value;
  if (!parse_number(text, &value, &unit) || !(value >= 0))
    return false;
  *out = (cli_every){0};
  if (strcmp(unit, "m") == 0 || strcmp(unit, "h") == 0)
    out->seconds = value * (*unit == 'm' ? 60 : 3600);
  else if (*unit || value > o->most || value != floor(value))
    return false;
  else
    out->steps = (uint64_t)value;
  return true;
}

/* @text is a number of the option's range. @whole: a whole number, also written as 2e5. */
static bool in_range(const char *text, double least, double most, bool whole, double *out) {
  const char *end;
  return parse_number(text, out, &end) && *end == 0 && *out >= least && *out <= most &&
         (!whole || *out == floor(*out));
}

void cli_clear_list(const cli_option *o) {
  if (o->kind == CLI_TEXTS)
    ((cli_texts *)o->out)->n = 0;
  if (o->kind == CLI_SET)
    *(uint32_t *)o->out = 0;
}

static bool is_list(const cli_option *o) { return o->kind == CLI_TEXTS || o->kind == CLI_SET; }

static int refuse_value(const char *label, const char *text, const char *wanted) {
  return cli_fail(CLI_REFUSED, "%s %s: give %s", label, text, wanted);
}

/* "fp32, fp32-master or bf16" */
static void list_choices(const char *const *choices, char *out, size_t room) {
  out[0] = 0;
  for (uint32_t i = 0; choices[i]; i++) {
    const size_t used = strlen(out);
    snprintf(out + used, room - used, "%s%s", !i ? "" : choices[i + 1] ? ", " : " or ", choices[i]);
  }
}

/* Adds the choices of @text, which commas separate. */
static int add_choices(const cli_option *o, const char *label, const char *text) {
  char wanted[96];
  uint32_t bits = 0;
  for (const char *at = text, *end; at; at = *end ? end + 1 : NULL) {
    end = at + strcspn(at, ",");
    const size_t n = (size_t)(end - at);
    uint32_t i = 0;
    while (o->choices[i] && (strlen(o->choices[i]) != n || strncmp(o->choices[i], at, n) != 0))
      i++;
    if (!o->choices[i] && (n != 4 || strncmp("none", at, n) != 0)) {
      list_choices(o->choices, wanted, sizeof wanted);
      return cli_fail(CLI_REFUSED, "%s %s: give none, or some of %s with commas between them",
                      label, text, wanted);
    }
    bits |= o->choices[i] ? 1u << i : 0;
  }
  *(uint32_t *)o->out |= bits;
  return CLI_OK;
}

/* @bytes: of the kind. */
static void set_number(const cli_option *o, size_t bytes, uint64_t value) {
  switch (o->bytes ? o->bytes : bytes) {
  case sizeof(bool): *(bool *)o->out = value != 0; break;
  case sizeof(uint32_t): *(uint32_t *)o->out = (uint32_t)value; break;
  default: *(uint64_t *)o->out = value;
  }
}

uint64_t cli_count_of(const cli_option *o) {
  return o->bytes == sizeof(uint32_t) ? *(const uint32_t *)o->out : *(const uint64_t *)o->out;
}

bool cli_flag_of(const cli_option *o) {
  return o->bytes == sizeof(uint32_t) ? *(const uint32_t *)o->out != 0 : *(const bool *)o->out;
}

int cli_set_value(const cli_option *o, const char *label, const char *text) {
  const bool whole = o->kind == CLI_COUNT;
  const double most = o->most > 0 ? o->most : whole ? 9007199254740992.0 : 1e30;
  double value;
  char wanted[96];
  if (o->given)
    *o->given = true;
  switch (o->kind) {
  case CLI_FLAG:
    if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
      return refuse_value(label, text, "true or false");
    set_number(o, sizeof(bool), text[0] == 't');
    return CLI_OK;
  case CLI_TEXT:
    if (!text[0])
      return cli_fail(CLI_REFUSED, "%s is empty", label);
    *(const char **)o->out = text;
    return CLI_OK;
  case CLI_TEXTS: {
    if (!text[0])
      return cli_fail(CLI_REFUSED, "%s is empty", label);
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
      return refuse_value(label, text, wanted);
    set_number(o, sizeof(uint64_t), (uint64_t)value);
    return CLI_OK;
  case CLI_ID:
    if (!in_range(text, -1, INT32_MAX, true, &value))
      return refuse_value(label, text, "a token id, or -1 for none");
    *(int32_t *)o->out = (int32_t)value;
    return CLI_OK;
  case CLI_BYTES: return cli_parse_size(label, text, o->out);
  case CLI_NUMBER:
    snprintf(wanted, sizeof wanted, "a number from %g to %g", o->least, most);
    if (!in_range(text, o->least, most, whole, &value))
      return refuse_value(label, text, wanted);
    *(double *)o->out = value;
    return CLI_OK;
  case CLI_EVERY:
    return parse_every(o, text, o->out)
               ? CLI_OK
               : refuse_value(label, text,
                              "a whole number of steps, a time such as 30m or 2h, or 0 for never");
  case CLI_CHOICE:
    for (uint32_t i = 0; o->choices[i]; i++)
      if (strcmp(text, o->choices[i]) == 0) {
        *(uint32_t *)o->out = i;
        return CLI_OK;
      }
    list_choices(o->choices, wanted, sizeof wanted);
    return refuse_value(label, text, wanted);
  case CLI_SET: return add_choices(o, label, text);
  case CLI_GROUP: break; /* set_group() */
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

const cli_option *cli_find_option(const cli_option *options, const char *name) {
  while (options->name && strcmp(options->name, name) != 0)
    options++;
  return options->name ? options : NULL;
}

const cli_option *cli_nearest_option(const cli_option *options, const char *name) {
  const cli_option *nearest = NULL;
  unsigned least = 4; /* names that differ by 4 edits or more are no slip of the hand */
  for (const cli_option *o = options; o->name; o++)
    if (distance(name, o->name) < least) {
      least = distance(name, o->name);
      nearest = o;
    }
  return nearest;
}

/* The option that the user means by @typed, and @name, its name here if it has one. */
static const cli_option *find_typed(const cli_command *c, const char *typed, char name[64]) {
  snprintf(name, 64, "%s", typed);
  cli_plain_name(name);
  const cli_option *o = cli_find_option(c->options, name);
  const char *synonym = o ? NULL : cli_synonym(name);
  if (synonym && (c->job || cli_find_option(c->options, synonym)))
    snprintf(name, 64, "%s", synonym);
  return o ? o : cli_find_option(c->options, name);
}

/* @name: as find_typed() gives it. */
static int refuse_option(const cli_command *c, const char *typed, const char *name) {
  char hint[512];
  if (c->hint(c, typed, name, hint))
    return cli_fail(CLI_REFUSED, "%s", hint);
  const cli_option *nearest = cli_nearest_option(c->options, name);
  if (nearest)
    return cli_fail(CLI_REFUSED, "there is no option --%s: did you mean --%s?", typed,
                    nearest->name);
  return cli_fail(CLI_REFUSED, "there is no option --%s (--help-all lists them)", typed);
}

/* The option of key @key of the group @o. */
static const cli_option *find_key(const cli_command *c, const cli_option *o, const char *key) {
  char name[128];
  snprintf(name, sizeof name, "%s-%s", o->name, key);
  cli_plain_name(name);
  const cli_option *found = cli_find_option(c->options, name);
  return found && found->grouped ? found : NULL;
}

/* "KEY=VALUE,KEY", the latter of a switch, which sets the text's memory to zeros at the commas. */
static int set_group(const cli_command *c, const cli_option *o, char *text) {
  int code = CLI_OK;
  for (char *key = text, *next; key && code == CLI_OK; key = next) {
    if ((next = strchr(key, ',')))
      *next++ = 0;
    char *value = strchr(key, '=');
    if (value)
      *value++ = 0;
    const cli_option *of = find_key(c, o, key);
    char label[128];
    snprintf(label, sizeof label, "--%s %s", o->name, key);
    if (!of)
      code = cli_fail(CLI_REFUSED, "--%s has no key %s: give %s", o->name, key, o->value);
    else if (!value && of->kind != CLI_FLAG)
      code = cli_fail(CLI_REFUSED, "%s needs a value: %s=%s", label, label, of->value);
    else
      code = cli_set_value(of, label, value ? value : "true");
  }
  return code;
}

/* Parses the option at argv[*i], and moves *i to its last word. The first words of a list replace
 * those of a run's file. */
static int parse_option(const cli_command *c, int argc, char **argv, int *i, bool *given) {
  char typed[64], name[64], label[72];
  const char *word = argv[*i] + 2, *equals = strchr(word, '=');
  snprintf(typed, sizeof typed, "%.*s", (int)(equals ? (size_t)(equals - word) : strlen(word)),
           word);
  const cli_option *o = find_typed(c, typed, name);
  if (!o)
    return refuse_option(c, typed, name);
  if (o->grouped) {
    const cli_option *group = c->options;
    while (group->name &&
           !(group->kind == CLI_GROUP && find_key(c, group, name + strlen(group->name) + 1) == o))
      group++;
    return cli_fail(CLI_REFUSED, "there is no option --%s: give --%s %s%s%s", typed, group->name,
                    name + strlen(group->name) + 1, o->kind == CLI_FLAG ? "" : "=",
                    o->kind == CLI_FLAG ? "" : o->value);
  }
  snprintf(label, sizeof label, "--%s", typed);
  if (o->kind == CLI_FLAG)
    return cli_set_value(o, label, equals ? equals + 1 : "true");
  if (!given[o - c->options])
    cli_clear_list(o);
  given[o - c->options] = true;
  if (equals)
    return o->kind == CLI_GROUP ? set_group(c, o, argv[*i] + (equals + 1 - argv[*i]))
                                : cli_set_value(o, label, equals + 1);
  if (*i + 1 >= argc || strncmp(argv[*i + 1], "--", 2) == 0)
    return cli_fail(CLI_REFUSED, "--%s needs a value: --%s %s", typed, typed, o->value);
  int code = CLI_OK;
  do
    code = o->kind == CLI_GROUP ? set_group(c, o, argv[++*i]) : cli_set_value(o, label, argv[++*i]);
  while (code == CLI_OK && is_list(o) && *i + 1 < argc && strncmp(argv[*i + 1], "--", 2) != 0);
  return code;
}

const char *cli_help_asked(int argc, char **argv) {
  for (int i = 1; i < argc; i++)
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0 ||
        strcmp(argv[i], "--help-all") == 0)
      return argv[i];
  return NULL;
}

int cli_parse(const cli_command *c, int argc, char **argv) {
  uint32_t n_positional = 0;
  bool given[CLI_MAX_OPTIONS] = {false};
  const char *help = cli_help_asked(argc, argv);
  if (help) {
    cli_print_help(c, strcmp(help, "--help-all") == 0);
    return -1;
  }
  int code = CLI_OK;
  for (int i = 1; i < argc; i++) {
    if (strncmp(argv[i], "--", 2) == 0)
      code = parse_option(c, argc, argv, &i, given);
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
