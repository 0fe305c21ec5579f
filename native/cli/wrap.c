/* wrap.c - text for a terminal: lines that it is too narrow for wrap at words. */
#include "cli/cli.h"
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* Where the rest of a line goes: below its value, which two blanks part from its name. A line
 * without a name goes on where it began. */
static size_t indent_of(const char *line, size_t n, size_t columns) {
  const size_t name = strspn(line, " ");
  size_t at = name;
  if (name > 8)
    return name <= columns / 2 ? name : 2;
  while (at + 1 < n && !(line[at] == ' ' && line[at + 1] == ' '))
    at++;
  while (at < n && line[at] == ' ')
    at++;
  return at < n && at <= columns / 2 ? at : name + 2;
}

static void wrap_line(FILE *out, const char *line, size_t n, size_t columns) {
  const size_t indent = indent_of(line, n, columns);
  size_t room = columns;
  while (n > room) {
    size_t end = room;
    while (end > 0 && line[end] != ' ')
      end--;
    while (end > 0 && line[end - 1] == ' ')
      end--;
    if (end == 0 || (room == columns && end <= indent)) /* a word that no line has room for */
      break;
    fprintf(out, "%.*s\n%*s", (int)end, line, (int)indent, "");
    end += strspn(line + end, " ");
    line += end;
    n -= end;
    room = columns - indent;
  }
  fprintf(out, "%.*s\n", (int)n, line);
}

void cli_put_lines(FILE *out, const char *text) {
  struct winsize w;
  const bool terminal = isatty(fileno(out)) && ioctl(fileno(out), TIOCGWINSZ, &w) == 0;
  if (!terminal || w.ws_col < 20) {
    fprintf(out, "%s\n", text);
    return;
  }
  for (;;) {
    const size_t n = strcspn(text, "\n");
    wrap_line(out, text, n, w.ws_col);
    if (!text[n])
      break;
    text += n + 1;
  }
}
