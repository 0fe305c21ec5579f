/* greet.h - how tasks greet each other, and who may come in. Internal. meet.c has the bytes. */
#ifndef PS_HOSTS_GREET_H
#define PS_HOSTS_GREET_H
#include "hosts/hosts.h"
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

/* ---- the secret (secret.c) ------------------------------------------------------------------- */

enum { PS__PROOF = 32, PS__NONCE = 32, PS__SECRET_LEAST = 16, PS__SECRET_MOST = 1024 };

typedef struct ps__secret {
  size_t bytes; /* 0: none */
  char key[PS__SECRET_MOST + 1];
} ps__secret;

/* ps__secret_find() - @given, or where it is NULL what the environment says. Messages never have
 * it. PS_EINVAL: too short or too long; PS_EIO: the file. @out has no secret after an error.
 * ps__hmac_sha256() - RFC 2104, of @n parts one after the other.
 * ps__same() - takes a time that does not depend on where the bytes differ.
 * ps__random() - from the kernel. PS_EIO. */
typedef struct ps__part {
  const void *at;
  size_t bytes;
} ps__part;
ps_status ps__secret_find(ps__secret *out, const char *given);
void ps__hmac_sha256(const void *key, size_t key_bytes, const ps__part *part, size_t n,
                     uint8_t out[PS__PROOF]);
bool ps__same(const void *a, const void *b, size_t bytes);
ps_status ps__random(void *out, size_t bytes);

/* ---- what is said ---------------------------------------------------------------------------- */

enum { PS__CONTROL, PS__DATA, PS__KINDS };
enum { PS__MAGIC = 16, PS__TASK = 16, PS__VERSION = 32 };
extern const char ps__magic[PS__MAGIC + 1];

typedef struct ps__hello {
  char magic[PS__MAGIC], version[PS__VERSION];
  uint32_t rank, n, kind, port, has_secret;
  uint8_t task[PS__TASK], nonce[PS__NONCE];
} ps__hello;

typedef struct ps__challenge {
  char magic[PS__MAGIC];
  uint32_t rank, has_secret;
  uint8_t nonce[PS__NONCE], proof[PS__PROOF];
} ps__challenge;

/* What rank 0 answers to each task: that it may come, and then where all are; or why not. */
typedef struct ps__verdict {
  int32_t status;
  char message[256];
} ps__verdict;

/* ps__prove() - what the side that @accepts, or the one that connects, proves of a connection.
 * ps__other_secret() - how the other side's secret differs from this task's. */
void ps__prove(const ps__secret *s, bool accepts, const ps__hello *w, const ps__challenge *c,
               uint8_t out[PS__PROOF]);
const char *ps__other_secret(bool own_has, bool other_has);

/* ---- addresses (address.c) ------------------------------------------------------------------- */

/* ps__reach_of() - who may reach @all, the addresses of @name.
 *   LOCAL       this host alone, wherever the name is used
 *   LOCAL_NAME  a host's name that is the loopback on that host, as some systems have it in
 *               /etc/hosts, and another address elsewhere
 *   NETWORK     others
 * ps__guarded() - PS_EINVAL: strangers may reach @name, and nothing keeps them out.
 * ps__address_text() - its number, without the port. */
typedef enum ps__reach { PS__LOCAL, PS__LOCAL_NAME, PS__NETWORK } ps__reach;
ps__reach ps__reach_of(const char *name, const struct addrinfo *all);
ps_status ps__guarded(const ps_hosts_config *c, const ps__secret *s, const char *name,
                      ps__reach reach);
const char *ps__address_text(const struct sockaddr_storage *a, char out[64]);

/* ---- the door (door.c) ----------------------------------------------------------------------- */

/* STRANGERS: twice as many as all tasks' connections, so those who say nothing keep no task
 * out. */
enum { PS__LISTENERS = 8, PS__STRANGERS = 2 * PS__KINDS * PS_MAX_HOSTS };
enum { PS__DOOR_FDS = PS__LISTENERS + PS__STRANGERS };

/* Somebody who has connected, until the proof is there. */
typedef struct ps__stranger {
  int fd;
  size_t bytes; /* of said, then of proof */
  ps__hello said;
  ps__challenge asked;
  uint8_t proof[PS__PROOF];
  double until_s;
  struct sockaddr_storage from;
} ps__stranger;

/* Why somebody is hung up on. Each reason is logged once, those of strangers at PS_LOG_INFO. */
typedef enum ps__reason { PS__STRANGER, PS__SLOW, PS__SECRET, PS__DIFFERS } ps__reason;

typedef struct ps__door {
  uint32_t rank;
  ps__secret secret;
  uint32_t n_listeners, n_strangers;
  int listener[PS__LISTENERS];
  uint32_t logged;                      /* bits by ps__reason */
  char refused[320];                    /* the last task that was hung up on: a sentence, or "" */
  ps__stranger stranger[PS__STRANGERS]; /* the oldest first */
} ps__door;

/* ps__door_listen() - at the addresses of @name that are this host's. PS_EINVAL: none is.
 * ps__door_listen_at() - at one; *port 0: any port, which is put there. PS_EIO. */
ps_status ps__door_listen(ps__door *d, const char *name, const struct addrinfo *all);
ps_status ps__door_listen_at(ps__door *d, const struct sockaddr *at, socklen_t bytes,
                             uint32_t *port);
/* ps__door_poll() - what poll() is to wait for; returns how many. *until_s becomes the time of the
 * next call of ps__door_look(), where that is earlier.
 * ps__door_look() - after poll(). True: *out has proved that it knows the secret, and the caller
 * closes its socket. Others are hung up on where they are no tasks, or too slow.
 * ps__door_hang_up() - close the stranger's socket; @why: a sentence, which rank 0 says to it.
 * ps__door_shut() - stop to listen, and hang up on all strangers. */
uint32_t ps__door_poll(const ps__door *d, struct pollfd of[PS__DOOR_FDS], double *until_s);
bool ps__door_look(ps__door *d, const struct pollfd *of, ps__stranger *out);
void ps__door_hang_up(ps__door *d, ps__stranger *g, ps__reason reason, const char *why);
void ps__door_shut(ps__door *d);

static inline double ps__now_s(void) { return 1e-9 * (double)ps__now_ns(); }
static inline int ps__ms_until(double then_s) {
  const double s = then_s - ps__now_s();
  return s > 0 ? (int)(s * 1000) + 1 : 0;
}
static inline double ps__earlier(double a, double b) { return a < b ? a : b; }
#endif
