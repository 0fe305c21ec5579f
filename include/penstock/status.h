/* penstock/status.h - status codes, the last error in words, the log hook, version and sizes.
 *
 * Convention of every function in the library: the result is a ps_status, 0 on success and
 * negative on failure. Outputs are written last and are untouched on failure. The library never
 * prints, exits or aborts; a message for a person is kept per thread and read by
 * ps_last_error(). */
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

/* Whose fault it is: EINVAL, EFORMAT, ERANGE_ and EBUDGET are the caller's or the input's;
 * ENOMEM, EIO and EDEVICE the machine's; EBUSY and ESTATE the order of calls; ECANCELLED a
 * request to stop; EINTERNAL ours. */
typedef enum ps_status {
  PS_OK = 0,
  PS_EINVAL = -1, /* an argument or an option is wrong; the message names it */
  /* a file is not what it should be; the message names file, field, value and limit */
  PS_EFORMAT = -2,
  /* a memory cap is too small; the message has the arithmetic and the nearest plan that fits */
  PS_EBUDGET = -3,
  PS_ENOMEM = -4, /* the machine refused memory */
  PS_EIO = -5,    /* reading or writing failed; the message has errno in words */
  /* something that was opened from this object still lives, or another thread drives it */
  PS_EBUSY = -6,
  PS_ESTATE = -7,     /* called in the wrong order */
  PS_ECANCELLED = -8, /* stopped on request */
  PS_EDEVICE = -9,    /* the device or a thread failed; sticky on its run */
  PS_ENUMERIC = -10,  /* a loss or a gradient is not finite; the message names step and tensor */
  PS_EINTERNAL = -11  /* a defect of this library */
} ps_status;

/* ps_status_name() - "PS_EINVAL" and so on; static storage, "PS_E?" for an unknown code. */
PS_API const char *ps_status_name(ps_status code);

/* ps_last_error() - what went wrong in the last failed call of the calling thread, one sentence
 * without a newline. Owned by the library, valid until the next failing call on this thread; ""
 * when nothing failed yet. */
PS_API const char *ps_last_error(void);

/* ps_printable() - copy @src to @dst as a terminal may have it: control characters and what is
 * no UTF-8 become "\x1b" and the like.
 * @room is BYTES of @dst, the ending NUL among them; what does not fit is left out. Returns
 * @dst. Messages of the library went through it. */
PS_API char *ps_printable(char *dst, uint64_t room, const char *src);

typedef enum ps_log_level { PS_LOG_DEBUG = 0, PS_LOG_INFO = 1, PS_LOG_WARN = 2 } ps_log_level;
typedef void (*ps_log_fn)(void *user, ps_log_level level, const char *message);

/* ps_log_set() - receive the library's log lines. @fn NULL drops them (the default). The hook
 * may be called from any thread, one call at a time. */
PS_API void ps_log_set(ps_log_fn fn, void *user);

/* ps_version() - "0.1.0"; static storage. */
PS_API const char *ps_version(void);

/* ps_abi_size() - sizeof of a public struct by name ("ps_op", "ps_engine_config", ...), 0 when
 * unknown. Callers in other languages compare it with their own declaration at load, so that a
 * drift is an error and not a crash. */
PS_API size_t ps_abi_size(const char *struct_name);

#ifdef __cplusplus
}
#endif
#endif
