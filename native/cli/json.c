/* json.c - writes JSON to a stream. */
#include "cli/cli.h"
#include "cli/toml.h"
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A byte that is not UTF-8, as a file's name may have, becomes U+FFFD. */
static void quoted(FILE *out, const char *text) {
  const char *end = text + strlen(text), *wrong = cli_not_utf8(text, end);
  fputc('"', out);
  for (const char *c = text; c < end; c++)
    if (c == wrong) {
      fputs("\\ufffd", out);
      wrong = cli_not_utf8(c + 1, end);
    } else if (*c == '"' || *c == '\\')
      fprintf(out, "\\%c", *c);
    else if ((unsigned char)*c < 0x20)
      fprintf(out, "\\u%04x", (unsigned)*c);
    else
      fputc(*c, out);
  fputc('"', out);
}

static void begin(cli_json *j, const char *key) {
  if (j->comma)
    fputs(", ", j->out);
  j->comma = true;
  if (key) {
    quoted(j->out, key);
    fputs(": ", j->out);
  }
}

void cli_json_open(cli_json *j, const char *key, char bracket) {
  begin(j, key);
  fputc(bracket, j->out);
  j->comma = false;
}

void cli_json_close(cli_json *j, char bracket) {
  fputc(bracket, j->out);
  j->comma = true;
}

void cli_json_text(cli_json *j, const char *key, const char *value) {
  begin(j, key);
  quoted(j->out, value);
}

void cli_json_count(cli_json *j, const char *key, uint64_t value) {
  begin(j, key);
  fprintf(j->out, "%" PRIu64, value);
}

void cli_json_number(cli_json *j, const char *key, double value) {
  char text[32];
  snprintf(text, sizeof text, "%.15g", value);
  if (strtod(text, NULL) != value) /* 15 digits do not always give the same double back */
    snprintf(text, sizeof text, "%.17g", value);
  begin(j, key);
  fputs(isfinite(value) ? text : "null", j->out);
}

void cli_json_raw(cli_json *j, const char *key, const char *json) {
  begin(j, key);
  fputs(json, j->out);
}

void cli_json_bool(cli_json *j, const char *key, bool value) {
  begin(j, key);
  fputs(value ? "true" : "false", j->out);
}
