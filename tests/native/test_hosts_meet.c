/* test_hosts_meet.c - how tasks greet each other, and what those may do who are let in: proofs, who
 * may reach an address, a door with a slow stranger, a task that says nothing, one that says too
 * much. tests/test_hosts_meet.py has whole meetings. */
#include "hosts/greet.h"
#include "hosts_ranks.h"
#include <netinet/in.h>
#include <stdatomic.h>
#include <time.h>

static void doze_s(double s) {
  nanosleep(&(struct timespec){.tv_sec = (time_t)s, .tv_nsec = (long)((s - (time_t)s) * 1e9)},
            NULL);
}

/* ---- proofs ---------------------------------------------------------------------------------- */

/* RFC 4231: cases 1, 2 and 6, whose key is longer than a block. The data is given in two parts. */
static void test_hmac(void) {
  char first[20], sixth[131];
  memset(first, 0x0b, sizeof first);
  memset(sixth, 0xaa, sizeof sixth);
  const struct {
    const char *key, *data, *hex;
    size_t bytes;
  } of[] = {
      {first, "Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7", 20},
      {"Jefe", "what do ya want for nothing?",
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843", 4},
      {sixth, "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54", 131}};
  for (int i = 0; i < 3; i++) {
    uint8_t proof[PS__PROOF];
    char hex[65];
    const ps__part parts[] = {{of[i].data, 3}, {of[i].data + 3, strlen(of[i].data) - 3}};
    ps__hmac_sha256(of[i].key, of[i].bytes, parts, 2, proof);
    for (int k = 0; k < PS__PROOF; k++)
      snprintf(hex + 2 * k, 3, "%02x", proof[k]);
    CHECK(strcmp(hex, of[i].hex) == 0);
    uint8_t other[PS__PROOF];
    for (int k = 0; k < PS__PROOF; k++) {
      memcpy(other, proof, sizeof other);
      CHECK(ps__same(proof, other, sizeof proof));
      other[k] ^= 0x80;
      CHECK(!ps__same(proof, other, sizeof proof));
    }
  }
}

/* Each side's proof depends on every field, and on the side. */
static void test_proofs(void) {
  ps__secret s = {.bytes = 16, .key = "0123456789abcdef"};
  ps__hello w = {.rank = 1};
  ps__challenge c = {.rank = 0};
  uint8_t first[PS__PROOF], proof[PS__PROOF];
  ps__prove(&s, true, &w, &c, first);
  ps__prove(&s, false, &w, &c, proof);
  CHECK(memcmp(first, proof, sizeof proof) != 0);
  for (size_t i = 0; i < sizeof w + offsetof(ps__challenge, proof) + s.bytes; i++) {
    const size_t k = i < sizeof w ? i : i - sizeof w, of_c = offsetof(ps__challenge, proof);
    char *at = i < sizeof w ? (char *)&w + k : k < of_c ? (char *)&c + k : s.key + (k - of_c);
    *at ^= 1;
    ps__prove(&s, true, &w, &c, proof);
    CHECK(memcmp(first, proof, sizeof proof) != 0);
    *at ^= 1;
  }
}

/* ---- addresses ------------------------------------------------------------------------------- */

static ps__reach reach_of(const char *name, const char *number) {
  struct sockaddr_storage at = {0};
  struct sockaddr_in *four = (void *)&at;
  struct sockaddr_in6 *six = (void *)&at;
  const struct addrinfo one = {.ai_addr = (struct sockaddr *)&at};
  if (inet_pton(AF_INET, number, &four->sin_addr) == 1) {
    at.ss_family = AF_INET;
  } else {
    CHECK(inet_pton(AF_INET6, number, &six->sin6_addr) == 1);
    at.ss_family = AF_INET6;
  }
  return ps__reach_of(name, &one);
}

static void test_reach(void) {
  const ps_hosts_config c = {0}, careless = {.insecure = 1};
  const ps__secret none = {0}, some = {.bytes = 16};
  CHECK(reach_of("127.0.0.1", "127.0.0.1") == PS__LOCAL && reach_of("::1", "::1") == PS__LOCAL);
  CHECK(reach_of("127.9.9.9", "127.9.9.9") == PS__LOCAL);
  CHECK(reach_of("localhost", "::1") == PS__LOCAL);
  CHECK(reach_of("node1", "127.0.1.1") == PS__LOCAL_NAME); /* as Debian has it */
  CHECK(reach_of("node1", "10.0.0.1") == PS__NETWORK);
  CHECK(reach_of("localhost", "10.0.0.1") == PS__NETWORK);
  CHECK(reach_of("0.0.0.0", "0.0.0.0") == PS__NETWORK && reach_of("::", "::") == PS__NETWORK);
  CHECK(reach_of("::ffff:127.0.0.1", "::ffff:127.0.0.1") == PS__NETWORK);
  for (ps__reach r = PS__LOCAL; r <= PS__NETWORK; r++) {
    CHECK(ps__guarded(&c, &some, "node1", r) == PS_OK);
    CHECK(ps__guarded(&careless, &none, "node1", r) == PS_OK);
    CHECK((ps__guarded(&c, &none, "node1", r) == PS_OK) == (r == PS__LOCAL));
  }
  CHECK_FAILS(ps__guarded(&c, &none, "node1", PS__NETWORK), PS_EINVAL,
              "reach rank 0 at node1: set");
}

/* ---- a door ---------------------------------------------------------------------------------- */

static int connected(uint32_t host, uint32_t port) {
  const struct sockaddr_in at = {.sin_family = AF_INET,
                                 .sin_port = htons((uint16_t)port),
                                 .sin_addr.s_addr = htonl(0x7f000000 | host)};
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(fd >= 0);
  if (connect(fd, (const struct sockaddr *)&at, sizeof at) == 0)
    return fd;
  close(fd);
  return -1;
}

/* Until the stranger is hung up on. */
static void look_until_alone(ps__door *d) {
  struct pollfd of[PS__DOOR_FDS];
  ps__stranger g;
  do {
    double until_s = ps__now_s() + 10;
    const uint32_t n = ps__door_poll(d, of, &until_s);
    CHECK(poll(of, n, ps__ms_until(until_s)) >= 0 && !ps__door_look(d, of, &g));
  } while (d->n_strangers);
}

/* A stranger who says a part of a greeting is hung up on in time. A host's name that is the
 * loopback has a door at all addresses. */
static void test_door(void) {
  ps__door *d = calloc(1, sizeof *d);
  struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  uint32_t port = 0;
  char said[100] = "penstock tasks 2";
  CHECK(ps__door_listen_at(d, (struct sockaddr *)&here, sizeof here, &port) == PS_OK && port);
  CHECK(connected(2, port) < 0);
  const int fd = connected(1, port);
  CHECK(fd >= 0 && send(fd, said, sizeof said, 0) == sizeof said);
  ps__hosts_times.greeting_s = 0.2;
  const double since = ps__now_s();
  look_until_alone(d);
  CHECK(ps__now_s() - since > 0.15 && recv(fd, said, 1, 0) == 0);
  ps__hosts_times.greeting_s = 10;
  close(fd);
  ps__door_shut(d);
  CHECK(d->n_listeners == 0 && connected(1, port) < 0);

  struct addrinfo name = {.ai_addr = (struct sockaddr *)&here, .ai_addrlen = sizeof here};
  port = free_port();
  here.sin_port = htons((uint16_t)port);
  CHECK(ps__door_listen(d, "127.0.0.1", &name) == PS_OK && connected(2, port) < 0);
  CHECK_FAILS(ps__door_listen(d, "node1", &name), PS_EIO, "cannot listen at port");
  ps__door_shut(d);
  CHECK(ps__door_listen(d, "node1", &name) == PS_OK);
  const int other = connected(2, port);
  CHECK(other >= 0);
  close(other);
  ps__door_shut(d);
  free(d);
}

/* ---- silence --------------------------------------------------------------------------------- */

static _Atomic int n_warnings;
static char warning[1024];
static void keep_warning(void *user, ps_log_level level, const char *line) {
  (void)user;
  if (level >= PS_LOG_WARN && strstr(line, "has said nothing")) {
    snprintf(warning, sizeof warning, "%s", line);
    atomic_fetch_add(&n_warnings, 1);
  }
}

/* Rank 1 is as if stopped: its control thread waits for the lock. */
static void stop_for(ps_hosts *h, double s) {
  pthread_mutex_lock(&h->lock);
  doze_s(s);
  pthread_mutex_unlock(&h->lock);
}

/* Before the first step it ends all. */
static void says_nothing(rank *r, ps_hosts *h) {
  if (r->rank == 1)
    stop_for(h, r->wait_s + 1);
  else
    CHECK_FAILS(ps_hosts_agree(h, "a = 1\n"), PS_EIO,
                r->rank == 0 ? "rank 1 has said nothing for" : " comparing the tasks: its process");
  pthread_barrier_wait(r->together);
}

/* Later it is waited for, and a line says so, once. */
static void is_stopped(rank *r, ps_hosts *h) {
  ps__hosts_begin(h);
  if (r->rank == 1)
    stop_for(h, r->wait_s + 0.5);
  CHECK(ps_hosts_agree(h, "a = 1\n") == PS_OK);
}

/* A task that works says that it lives. */
static void is_busy(rank *r, ps_hosts *h) {
  if (r->rank == 1)
    doze_s(r->wait_s + 0.5);
  CHECK(ps_hosts_agree(h, "a = 1\n") == PS_OK);
}

static void test_silence(void) {
  ps__hosts_times.beat_s = 0.1;
  ps__hosts_times.silent_s = 1;
  ps_log_set(keep_warning, NULL);
  run_waiting_ranks(2, 3, says_nothing, PS_F32, 0);
  CHECK(atomic_exchange(&n_warnings, 0) >= 1);
  run_waiting_ranks(2, 2, is_busy, PS_F32, 0);
  CHECK(atomic_load(&n_warnings) == 0);
  run_waiting_ranks(2, 3, is_stopped, PS_F32, 0);
  CHECK(atomic_load(&n_warnings) == 1);
  CHECK(strstr(warning, "s, and rank 0 waits for it during comparing the tasks"));
  ps_log_set(NULL, NULL);
  ps__hosts_times.beat_s = 2;
  ps__hosts_times.silent_s = 10;
}

/* ---- what a task may say --------------------------------------------------------------------- */

/* Rank 0 says a length of 2^60 where the others tell how long their settings are. */
static void says_any_length(rank *r, ps_hosts *h) {
  uint64_t all[MAX_RANKS], length = r->count;
  if (r->rank == 0)
    CHECK(ps__hosts_gather(h, "lengths", &length, all, sizeof length) == PS_OK);
  else
    CHECK_FAILS(ps_hosts_agree(h, "a = 1\n"), PS_EINVAL, "bytes of settings");
}

/* Rank 1's lines do not end. */
static void says_no_end(rank *r, ps_hosts *h) {
  char text[] = "a = 1\n", any[356], all[2 * sizeof any];
  uint64_t lengths[2], length = sizeof text;
  uint32_t chosen = 9;
  if (r->rank == 0) {
    CHECK_FAILS(ps_hosts_agree(h, text), PS_EINVAL, "the tasks disagree: rank 1 has xxx");
    CHECK(strspn(strchr(ps_last_error(), 'x'), "x") == 159);
    CHECK(ps_hosts_choose(h, PS_TRANSPORT_AUTO, 0, &chosen) == PS_OK);
    return;
  }
  memset(any, 'x', sizeof any);
  CHECK(ps__hosts_gather(h, "lengths", &length, lengths, sizeof length) == PS_OK);
  CHECK(ps__hosts_gather(h, "texts", text, all, sizeof text) == PS_OK);
  CHECK(ps__hosts_gather(h, "lines", any, all, 4 + 2 * 160) == PS_OK);
  CHECK(ps__hosts_gather(h, "abilities", any, all, 4 + 32 + 320) == PS_OK);
}

/* Rank 1 says that it fails, without a status of an error, and half of another message. */
static void fails_without_reason(rank *r, ps_hosts *h) {
  struct {
    uint32_t kind;
    int32_t status;
    char message[PS__HOSTS_MESSAGE];
  } f = {.kind = 2, .status = (int32_t)r->count};
  memset(f.message, 'x', sizeof f.message);
  if (r->rank == 0) {
    CHECK_FAILS(ps_hosts_agree(h, "a = 1\n"), PS_EIO, "xxx");
  } else {
    pthread_mutex_lock(&h->lock);
    CHECK(send(h->control[0], &f, sizeof f, 0) == sizeof f && send(h->control[0], &f, 9, 0) == 9);
    pthread_mutex_unlock(&h->lock);
  }
  pthread_barrier_wait(r->together);
}

int main(void) {
  unsetenv("PENSTOCK_HOSTS_SECRET");
  test_hmac();
  test_proofs();
  test_reach();
  test_door();
  test_silence();
  run_ranks(2, says_any_length, PS_F32, 1ull << 60);
  run_ranks(2, says_any_length, PS_F32, 0);
  run_ranks(2, says_no_end, PS_F32, 0);
  run_ranks(2, fails_without_reason, PS_F32, 0);
  run_ranks(2, fails_without_reason, PS_F32, 7);
  puts("ok how tasks meet");
  return 0;
}
