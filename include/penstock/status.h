/* penstock/status.h - status codes, the last error in words, the log function, version and sizes.
 *
 * A function of the library that can fail returns a ps_status: 0 on success, negative on failure.
 * Its outputs are written last, and stay untouched on failure. The library never prints, exits or
 * aborts. A failure's message is kept for the thread that made the call; see ps_last_error().
 * Handles, configs and outputs are not NULL, unless a function says what NULL stands for: such a
 * NULL is not looked for, and mostly ends the program.
 * A config begins with struct_bytes, its sizeof: the caller or an ..._init() function sets it.
 * A config of another size is PS_EINVAL. The call sets an output's struct_bytes, unless a function
 * says that the caller has set it. */
#ifndef PENSTOCK_STATUS_H
#define PENSTOCK_STATUS_H
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#  define PS_API __attribute__((visibility("default")))
#else
#  define PS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* A code says where the cause lies:
 *   the caller or the input   PS_EINVAL, PS_EFORMAT, PS_EBUDGET, PS_ENUMERIC
 *   the machine               PS_ENOMEM, PS_EIO, PS_EDEVICE
 *   the order of calls        PS_EBUSY, PS_ESTATE
 *   a request to stop         PS_ECANCELLED
 *   this library              PS_EINTERNAL */
typedef enum ps_status {
  PS_OK = 0,
  PS_EINVAL = -1, /* an argument or an option is wrong; the message names it */
  /* a file's contents are wrong; the message names file, field, value and limit */
  PS_EFORMAT = -2,
  /* a memory cap is too small; the message says what is needed and what fits */
  PS_EBUDGET = -3,
  PS_ENOMEM = -4, /* the machine refused memory */
  PS_EIO = -5,    /* reading or writing failed; the message has errno in words */
  /* an object opened from this one still lives, or another thread uses it */
  PS_EBUSY = -6,
  PS_ESTATE = -7,     /* called in the wrong order */
  PS_ECANCELLED = -8, /* stopped on request */
  PS_EDEVICE = -9,    /* the device or a thread failed; sticky on its run */
  /* a loss, a gradient or a logit is not finite, or a batch has no counted target; the message
   * names the step */
  PS_ENUMERIC = -10,
  PS_EINTERNAL = -11 /* a defect of this library */
} ps_status;

/* ps_status_name() - "PS_EINVAL" and so on; static storage, "PS_E?" for an unknown code. */
PS_API const char *ps_status_name(ps_status code);

/* ps_last_error() - what went wrong in the last failed call of the calling thread, one sentence
 * without a newline. Owned by the library, valid until the next failing call on this thread; ""
 * when nothing failed yet. */
PS_API const char *ps_last_error(void);

/* ps_error_set() - make @message the thread's ps_last_error(). It is for functions that the library
 * calls, such as a kernel: "return ps_error_set(PS_EDEVICE, why);".
 * @status   negative; it is returned.
 * @message  copied, in the form of the library's messages: one line of at most 1,023 BYTES. */
PS_API ps_status ps_error_set(ps_status status, const char *message);
/* The name under which a shell, such as a command line, knows a field of a public struct. */
typedef struct ps_field_name {
  const char *field; /* "seq_len"; "lora.rank" of a struct in a struct; NULL ends a table */
  const char *name;  /* "--seq-len": 1 to PS_MAX_FIELD_NAME bytes */
} ps_field_name;
enum { PS_MAX_FIELD_NAME = 31 };

/* ps_field_names_set() - let messages and log lines show @names in place of the fields' own, which
 * they show of a field that is not in @names, and of all with NULL, the default. For all threads.
 * @names  borrowed until the next call that succeeds, and by messages that are being written then.
 * Errors: PS_EINVAL names the field whose name is empty or too long; the names stay as they were.
 */
PS_API ps_status ps_field_names_set(const ps_field_name *names);

/* ps_printable() - copy @src to @dst in a form that is safe to print on a terminal. A control
 * character, or a byte that is not UTF-8, becomes "\x1b" and the like. The library's messages have
 * this form. @room is BYTES of @dst with the final NUL; the rest of a longer text is left out.
 * Returns @dst. */
PS_API char *ps_printable(char *dst, uint64_t room, const char *src);

typedef enum ps_log_level { PS_LOG_DEBUG = 0, PS_LOG_INFO = 1, PS_LOG_WARN = 2 } ps_log_level;
typedef void (*ps_log_fn)(void *user, ps_log_level level, const char *message);

/* ps_log_set() - give the library's log lines to @fn. NULL, the default, drops them.
 * Threads: any thread may call @fn, one call at a time. */
PS_API void ps_log_set(ps_log_fn fn, void *user);

/* ps_cache_path() - the path of file @name of the user's cache: $XDG_CACHE_HOME/penstock/NAME, else
 * ~/.cache/penstock/NAME. Nothing is made.
 * @room  BYTES of @out, which is untouched on error.
 * Errors: PS_ESTATE: neither XDG_CACHE_HOME nor HOME is set; PS_EINVAL: the path is longer. */
PS_API ps_status ps_cache_path(char *out, uint64_t room, const char *name);

/* ps_version() - "0.1.0"; static storage. */
PS_API const char *ps_version(void);

/* ps_abi_size() - sizeof of a public struct by its name, such as "ps_op"; 0: the name is unknown.
 * A caller in another language compares it with its own declaration when it loads the library, so
 * that a difference is an error and not a crash. */
PS_API size_t ps_abi_size(const char *struct_name);

#ifdef __cplusplus
}
#endif
#endif
