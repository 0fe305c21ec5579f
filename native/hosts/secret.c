/* secret.c - the secret that all tasks of a training know, and how a task proves that it does. */
#include "core/sha256.h"
#include "hosts/greet.h"
#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- where it comes from --------------------------------------------------------------------- */

static const char by_name[] = "PENSTOCK_HOSTS_SECRET", by_file[] = "PENSTOCK_HOSTS_SECRET_FILE";

static ps_status take(ps__secret *s, const char *text, size_t bytes, const char *whose) {
  if (bytes < PS__SECRET_LEAST || bytes > PS__SECRET_MOST)
    return ps__fail(PS_EINVAL,
                    "%s has %zu characters: give %d to %d, such as those that `openssl rand -hex "
                    "32` prints",
                    whose, bytes, PS__SECRET_LEAST, PS__SECRET_MOST);
  memcpy(s->key, text, bytes);
  s->bytes = bytes;
  return PS_OK;
}

/* White space at the end, such as a newline, does not count. */
static ps_status read_file(ps__secret *s, const char *path) {
  char text[PS__SECRET_MOST + 64], whose[300];
  struct stat sb;
  int fd;
  PS_TRY(ps__open_input(&fd, &sb, path));
  size_t bytes = (uint64_t)sb.st_size < sizeof text ? (size_t)sb.st_size : sizeof text;
  ps_status st = ps__pread_all(fd, path, text, bytes, 0);
  close(fd);
  while (st == PS_OK && bytes && isspace((unsigned char)text[bytes - 1]))
    bytes--;
  snprintf(whose, sizeof whose, "%s: %.240s", by_file, path);
  if (st == PS_OK)
    st = take(s, text, bytes, whose);
  explicit_bzero(text, sizeof text);
  return st;
}

ps_status ps__secret_find(ps__secret *out, const char *given) {
  const char *text = given ? given : getenv(by_name), *path = getenv(by_file);
  out->bytes = 0;
  if (text)
    return take(out, text, strlen(text), given ? "the secret" : by_name);
  return path ? read_file(out, path) : PS_OK;
}

/* ---- proofs ---------------------------------------------------------------------------------- */

static void end_sum(ps__sha256 *sum, uint8_t out[PS__PROOF]) {
  char hex[65];
  ps__sha256_end(sum, hex);
  for (int i = 0; i < PS__PROOF; i++) {
    const char high = hex[2 * i], low = hex[2 * i + 1];
    out[i] = (uint8_t)((high <= '9' ? high - '0' : high - 'a' + 10) << 4 |
                       (low <= '9' ? low - '0' : low - 'a' + 10));
  }
  explicit_bzero(hex, sizeof hex);
}

void ps__hmac_sha256(const void *key, size_t key_bytes, const ps__part *part, size_t n,
                     uint8_t out[PS__PROOF]) {
  enum { BLOCK = 64 };
  uint8_t pad[BLOCK] = {0};
  ps__sha256 sum;
  if (key_bytes > BLOCK) {
    ps__sha256_begin(&sum);
    ps__sha256_add(&sum, key, key_bytes);
    end_sum(&sum, pad);
  } else if (key_bytes)
    memcpy(pad, key, key_bytes);
  for (int i = 0; i < BLOCK; i++)
    pad[i] ^= 0x36;
  ps__sha256_begin(&sum);
  ps__sha256_add(&sum, pad, BLOCK);
  for (size_t i = 0; i < n; i++)
    ps__sha256_add(&sum, part[i].at, part[i].bytes);
  end_sum(&sum, out);
  for (int i = 0; i < BLOCK; i++)
    pad[i] ^= 0x36 ^ 0x5c;
  ps__sha256_begin(&sum);
  ps__sha256_add(&sum, pad, BLOCK);
  ps__sha256_add(&sum, out, PS__PROOF);
  end_sum(&sum, out);
  explicit_bzero(pad, sizeof pad);
  explicit_bzero(&sum, sizeof sum);
}

bool ps__same(const void *a, const void *b, size_t bytes) {
  const volatile uint8_t *x = a, *y = b;
  uint8_t differ = 0;
  for (size_t i = 0; i < bytes; i++)
    differ |= x[i] ^ y[i];
  return differ == 0;
}

ps_status ps__random(void *out, size_t bytes) {
  if (getrandom(out, bytes, 0) == (ssize_t)bytes)
    return PS_OK;
  return ps__fail(PS_EIO, "the system gives no random bytes to greet other tasks with");
}

const char ps__magic[] = "penstock tasks 2";

void ps__prove(const ps__secret *s, bool accepts, const ps__hello *w, const ps__challenge *c,
               uint8_t out[PS__PROOF]) {
  const ps__part parts[] = {{accepts ? "penstock accepts" : "penstock connect", 16},
                            {w, sizeof *w},
                            {c, offsetof(ps__challenge, proof)}};
  ps__hmac_sha256(s->key, s->bytes, parts, 3, out);
}

#define SET ": set PENSTOCK_HOSTS_SECRET to the same in all tasks"
const char *ps__other_secret(bool own_has, bool other_has) {
  if (own_has == other_has)
    return "its secret is another one" SET;
  return own_has ? "it has no secret, and this task has one" SET
                 : "it has a secret, and this task has none" SET;
}
