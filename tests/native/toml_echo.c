/* toml_echo.c - for tests/test_toml.py: what native/cli/toml.c reads, as text. */
#include "cli/toml.c"

typedef struct echo {
  char *at, *end;
} echo;

static void put(echo *e, char separator, const char *text) {
  if ((size_t)(e->end - e->at) > strlen(text) + 2)
    e->at += sprintf(e->at, "%c%s", separator, text);
}

/* An item is 0x1e table 0x1f key 0x1f is-array kind 0x1f line, and 0x1f value of each. */
static int take(void *user, const cli_toml_item *item) {
  char kind[3] = {item->array ? '1' : '0', (char)('0' + item->kind), 0}, line[16];
  snprintf(line, sizeof line, "%u", item->line);
  put(user, 0x1e, item->table);
  put(user, 0x1f, item->key);
  put(user, 0x1f, kind);
  put(user, 0x1f, line);
  for (uint32_t i = 0; i < item->n; i++)
    put(user, 0x1f, item->value[i]);
  return 0;
}

/* 0 and the items in @out; -1 and the message in @out, which has room for 256 bytes at least. */
int t_toml_echo(const char *text, size_t bytes, char *out, size_t cap);
int t_toml_echo(const char *text, size_t bytes, char *out, size_t cap) {
  char *storage, error[256];
  echo e = {out, out + cap};
  out[0] = 0;
  const int st = cli_toml_read(text, bytes, take, &e, &storage, error);
  free(storage);
  if (st != 0)
    memcpy(out, error, sizeof error);
  return st;
}
