/* ids.c - token ids on command lines and in files. */
#include "cli/cli.h"
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

bool cli_ids_add(cli_ids *a, int32_t id) {
  if (a->n == a->room) {
    const uint64_t room = a->room ? 2 * a->room : 64;
    int32_t *more = realloc(a->id, room * sizeof *more);
    if (!more)
      return false;
    a->id = more;
    a->room = room;
  }
  a->id[a->n++] = id;
  return true;
}

int cli_ids_parse(const char *text, const char *where, cli_ids *out) {
  static const char between[] = " \t\r\n,[]";
  for (const char *at = text + strspn(text, between); *at; at += strspn(at, between)) {
    char *end;
    errno = 0;
    const long v = strtol(at, &end, 10);
    const size_t n = strcspn(at, between);
    if (end != at + n || errno || v < 0 || v > INT_MAX)
      return cli_fail(CLI_REFUSED,
                      "%s: '%.*s' is no token id: give ids such as 1,2,3; text is for python -m "
                      "penstock",
                      where, n < 20 ? (int)n : 20, at);
    if (!cli_ids_add(out, (int32_t)v))
      return cli_fail(CLI_FAILED, "out of memory for a prompt");
    at = end;
  }
  return CLI_OK;
}
