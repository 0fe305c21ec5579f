/* status.c - status names, the last error of each thread, the log function, the version. */
#include "core/core.h"
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { MESSAGE_BYTES = 1024 };

static _Thread_local char last_error[MESSAGE_BYTES];
/* so that a log function which calls the library, and fails there, is not called again */
static _Thread_local bool inside_log_fn;

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static ps_log_fn log_fn;
static void *log_user;
static atomic_bool log_fn_set; /* without a log function logging costs one load */

const char *ps_status_name(ps_status code) {
  switch (code) {
  case PS_OK: return "PS_OK";
  case PS_EINVAL: return "PS_EINVAL";
  case PS_EFORMAT: return "PS_EFORMAT";
  case PS_EBUDGET: return "PS_EBUDGET";
  case PS_ENOMEM: return "PS_ENOMEM";
  case PS_EIO: return "PS_EIO";
  case PS_EBUSY: return "PS_EBUSY";
  case PS_ESTATE: return "PS_ESTATE";
  case PS_ECANCELLED: return "PS_ECANCELLED";
  case PS_EDEVICE: return "PS_EDEVICE";
  case PS_ENUMERIC: return "PS_ENUMERIC";
  case PS_EINTERNAL: return "PS_EINTERNAL";
  }
  return "PS_E?";
}

const char *ps_last_error(void) { return last_error; }
void ps__clear_error(void) { last_error[0] = 0; }
const char *ps_version(void) { return "0.1.0"; }

void ps_log_set(ps_log_fn fn, void *user) {
  pthread_mutex_lock(&log_lock);
  log_fn = fn;
  log_user = user;
  atomic_store(&log_fn_set, fn != NULL);
  pthread_mutex_unlock(&log_lock);
}

static void emit(ps_log_level level, const char *message) {
  if (inside_log_fn)
    return;
  inside_log_fn = true;
  pthread_mutex_lock(&log_lock);
  if (log_fn)
    log_fn(log_user, level, message);
  pthread_mutex_unlock(&log_lock);
  inside_log_fn = false;
}

size_t ps__utf8_length(const unsigned char *s) {
  if (s[0] < 0x80)
    return 1;
  if (s[0] < 0xC2 || s[0] > 0xF4)
    return 0;
  size_t n = s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4;
  for (size_t i = 1; i < n; i++)
    if ((s[i] & 0xC0) != 0x80)
      return 0;
  if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F))
    return 0;
  if ((s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F))
    return 0;
  return n;
}

/* Bytes of the UTF-8 character at @c; 0 where there is none, and for the control characters,
 * U+0080 to U+009F among them. */
static size_t printable_bytes(const unsigned char *c) {
  const bool control = *c < 0x20 || *c == 0x7f || (*c == 0xc2 && c[1] < 0xa0);
  return control ? 0 : ps__utf8_length(c);
}

char *ps_printable(char *dst, uint64_t room, const char *src) {
  uint64_t used = 0;
  for (const unsigned char *c = (const unsigned char *)src; *c;) {
    char escape[8];
    size_t n = printable_bytes(c), taken = n ? n : 1;
    if (!n)
      n = (size_t)snprintf(escape, sizeof escape, "\\x%02x", *c);
    if (used + n >= room)
      break;
    memcpy(dst + used, taken == n ? (const char *)c : escape, n);
    used += n;
    c += taken;
  }
  if (room)
    dst[used] = 0;
  return dst;
}

/* Format one line: newlines and carriage returns become spaces, and control characters, which names
 * from files may contain, become readable. */
static void format_line(char out[MESSAGE_BYTES], const char *fmt, va_list ap) {
  char line[MESSAGE_BYTES];
  vsnprintf(line, MESSAGE_BYTES, fmt, ap);
  for (char *c = line; *c; c++)
    if (*c == '\n' || *c == '\r')
      *c = ' ';
  ps_printable(out, MESSAGE_BYTES, line);
}

void ps__log(ps_log_level level, const char *fmt, ...) {
  if (!atomic_load_explicit(&log_fn_set, memory_order_relaxed))
    return;
  char line[MESSAGE_BYTES];
  va_list ap;
  va_start(ap, fmt);
  format_line(line, fmt, ap);
  va_end(ap);
  emit(level, line);
}

ps_status ps__fail(ps_status code, const char *fmt, ...) {
  char line[MESSAGE_BYTES]; /* not last_error, which may be one of the arguments */
  va_list ap;
  va_start(ap, fmt);
  format_line(line, fmt, ap);
  va_end(ap);
  memcpy(last_error, line, strlen(line) + 1);
  if (atomic_load_explicit(&log_fn_set, memory_order_relaxed))
    emit(PS_LOG_DEBUG, line);
  return code;
}

ps_status ps_error_set(ps_status status, const char *message) {
  return ps__fail(status, "%s", message);
}

static _Atomic(const ps_field_name *) field_names;

ps_status ps_field_names_set(const ps_field_name *names) {
  for (const ps_field_name *n = names; n && n->field; n++)
    if (!n->name || !n->name[0] || strlen(n->name) > PS_MAX_FIELD_NAME)
      return ps__fail(PS_EINVAL, "the field %s has the name '%.40s': give 1 to %d bytes", n->field,
                      n->name ? n->name : "", PS_MAX_FIELD_NAME);
  atomic_store(&field_names, names);
  return PS_OK;
}

const char *ps__field(const char *field) {
  const ps_field_name *n = atomic_load(&field_names);
  while (n && n->field && strcmp(n->field, field) != 0)
    n++;
  return n && n->field ? n->name : field;
}

static const char *format_digits(char buf[32], uint64_t bytes, int digits) {
  static const char *const unit[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) {
    snprintf(buf, 32, "%u B", (unsigned)bytes);
    return buf;
  }
  double v = (double)bytes / 1024;
  int i = 0;
  while (v >= 1023.95 && i < 5) {
    v /= 1024;
    i++;
  }
  snprintf(buf, 32, "%.*f %s", digits, v, unit[i]);
  return buf;
}

const char *ps__format_bytes(char buf[32], uint64_t bytes) { return format_digits(buf, bytes, 1); }

void ps__format_bytes_apart(char a[32], uint64_t x, char b[32], uint64_t y) {
  for (int digits = 1; digits <= 4; digits++)
    if (strcmp(format_digits(a, x, digits), format_digits(b, y, digits)) != 0 || x == y)
      return;
  snprintf(a, 32, "%llu B", (unsigned long long)x);
  snprintf(b, 32, "%llu B", (unsigned long long)y);
}
