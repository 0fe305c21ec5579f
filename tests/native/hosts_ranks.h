/* hosts_ranks.h - the tasks of several hosts as threads of one process, which meet on the
 * loopback. */
#ifndef PS_TESTS_HOSTS_RANKS_H
#define PS_TESTS_HOSTS_RANKS_H
#include "check.h"
#include "hosts/hosts.h"
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_RANKS = 5 };

typedef struct rank {
  uint32_t rank, n, port;
  void (*run)(struct rank *r, ps_hosts *h);
  ps_dtype dt;
  uint64_t count;
  pthread_t thread;
  pthread_barrier_t *together;
  double wait_s;
} rank;

static void *rank_main(void *arg) {
  rank *r = arg;
  ps_hosts *h = NULL;
  const ps_hosts_config cfg = {.struct_bytes = sizeof cfg,
                               .rank = r->rank,
                               .n_hosts = r->n,
                               .port = r->port,
                               .address = "127.0.0.1",
                               .wait_s = r->wait_s};
  CHECK(ps_hosts_open(&h, &cfg) == PS_OK);
  r->run(r, h);
  ps_hosts_close(h);
  return NULL;
}

/* Below the ports that the system gives to connections, one of which could take it meanwhile. */
static uint32_t free_port(void) {
  static uint32_t n;
  for (;;) {
    const uint32_t port = 20000 + ((uint32_t)getpid() * 97 + n++) % 12000;
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)port),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    const bool is_free = bind(fd, (struct sockaddr *)&a, sizeof a) == 0;
    close(fd);
    if (is_free)
      return port;
  }
}

/* Each of @n ranks runs @run in a thread. They wait for each other for @wait_s. */
static void run_waiting_ranks(double wait_s, uint32_t n, void (*run)(rank *, ps_hosts *),
                              ps_dtype dt, uint64_t count) {
  rank r[MAX_RANKS];
  pthread_barrier_t together;
  const uint32_t port = free_port();
  pthread_barrier_init(&together, NULL, n);
  for (uint32_t i = 0; i < n; i++) {
    r[i] = (rank){.rank = i,
                  .n = n,
                  .port = port,
                  .run = run,
                  .dt = dt,
                  .count = count,
                  .together = &together,
                  .wait_s = wait_s};
    CHECK(pthread_create(&r[i].thread, NULL, rank_main, &r[i]) == 0);
  }
  for (uint32_t i = 0; i < n; i++)
    pthread_join(r[i].thread, NULL);
  pthread_barrier_destroy(&together);
}

static inline void run_ranks(uint32_t n, void (*run)(rank *, ps_hosts *), ps_dtype dt,
                             uint64_t count) {
  run_waiting_ranks(900, n, run, dt, count); /* against hanging alone */
}

#endif
