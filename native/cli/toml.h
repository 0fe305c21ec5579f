/* toml.h - a strict reader of the TOML that a run's file needs: a subset of TOML 1.0.
 *
 * Read:     comments; tables `[name]`; keys `name = value` in a table; basic and literal strings of
 *           one line; decimal integers and floats; booleans; arrays of one kind of them, also over
 *           several lines.
 * Refused:  keys outside a table, quoted and dotted keys, `[a.b]`, `[[a]]`, inline tables, nested
 *           and mixed arrays, strings of several lines, dates, inf, nan, numbers in hexadecimal,
 *           octal or binary, U+0000 in a string, and all that TOML refuses.
 * What is read has the value that TOML gives it: tests/test_toml.py compares with tomllib. */
#ifndef PENSTOCK_CLI_TOML_H
#define PENSTOCK_CLI_TOML_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CLI_TOML_MAX_BYTES = 1 << 16 }; /* of a text */

typedef enum cli_toml_kind {
  CLI_TOML_STRING = 0,
  CLI_TOML_NUMBER = 1,
  CLI_TOML_BOOL = 2,
  CLI_TOML_N_KINDS = 3
} cli_toml_kind;

/* A key and its value. Texts end in a NUL and live as long as @storage of cli_toml_read(). */
typedef struct cli_toml_item {
  const char *table, *key;
  uint32_t line;      /* of the key, from 1 */
  bool array;         /* the value is an array, which may be empty */
  cli_toml_kind kind; /* of every value */
  uint32_t n;         /* 1 without an array */
  /* [n] a string decoded; a number without underscores, as strtod() reads it; "true" or "false".
   * The list itself is borrowed for the call. */
  const char *const *value;
} cli_toml_item;

/* Takes the next item. A result other than 0 ends the reading. */
typedef int (*cli_toml_fn)(void *user, const cli_toml_item *item);

/* cli_toml_read() - call @take for each key of @text, in order.
 * @storage  gets the memory of all texts, which the caller frees, also after an error.
 * @error    what is wrong: "LINE: " and a sentence. Empty where @take ended the reading.
 * Returns 0, @take's result, or -1. */
int cli_toml_read(const char *text, size_t bytes, cli_toml_fn take, void *user, char **storage,
                  char error[256]);

/* The first byte of @at to @end that is not UTF-8; @end where all are. */
const char *cli_not_utf8(const char *at, const char *end);

#endif
