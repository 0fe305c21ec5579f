/* choose.c - the tasks agree on what moves gradients between them. */
#include "hosts/hosts.h"
#include "hosts/net.h"
#include <string.h>

/* What a task can do; why: why not NCCL. */
typedef struct ability {
  uint32_t can;
  char version[32], why[320];
} ability;

static ability look(uint32_t wanted, bool on_gpu) {
  ability a = {0};
  const ps__nccl *lib = NULL;
  if (wanted == PS_TRANSPORT_TCP) {
    snprintf(a.why, sizeof a.why, "it was told to use TCP");
  } else if (!on_gpu) {
    snprintf(a.why, sizeof a.why, "it trains on a CPU");
  } else if (ps__nccl_open(&lib) != PS_OK) {
    snprintf(a.why, sizeof a.why, "%.300s", ps_last_error());
  } else {
    a.can = 1;
    snprintf(a.version, sizeof a.version, "%s", lib->version);
  }
  return a;
}

/* The first rank without NCCL, or with another one than rank 0's; @n: none. */
static uint32_t without(ability all[], uint32_t n) {
  for (uint32_t r = 0; r < n; r++) {
    if (!all[r].can)
      return r;
    if (strcmp(all[r].version, all[0].version) != 0) {
      snprintf(all[r].why, sizeof all[r].why, "it has NCCL %s, and rank 0 has %s", all[r].version,
               all[0].version);
      return r;
    }
  }
  return n;
}

ps_status ps_hosts_choose(ps_hosts *h, uint32_t wanted, int on_gpu, uint32_t *out) {
  if (!h || !out || wanted >= PS_N_TRANSPORTS)
    return ps__fail(PS_EINVAL, "ps_hosts_choose: hosts, out and a ps_transport must be given");
  const ability mine = look(wanted, on_gpu != 0);
  ability *all = ps__calloc(h->n, sizeof *all);
  if (!all)
    return ps__fail(PS_ENOMEM, "out of memory for what the tasks can do");
  ps_status st = ps__hosts_gather(h, "choosing what moves gradients", &mine, all, sizeof mine);
  for (uint32_t r = 0; r < h->n; r++) /* another task may say anything */
    all[r].version[sizeof all[r].version - 1] = all[r].why[sizeof all[r].why - 1] = 0;
  const uint32_t rank = st == PS_OK ? without(all, h->n) : 0;
  if (st == PS_OK && wanted == PS_TRANSPORT_TCP) {
    h->transport = PS_TRANSPORT_TCP;
    snprintf(h->transport_text, sizeof h->transport_text, "gradients go over TCP, as asked for");
  } else if (st == PS_OK && rank == h->n) {
    h->transport = PS_TRANSPORT_NCCL;
    snprintf(h->transport_text, sizeof h->transport_text,
             "gradients go over NCCL %s, which all %u tasks have", all[0].version, h->n);
  } else if (st == PS_OK && wanted == PS_TRANSPORT_NCCL) {
    st = ps__fail(PS_EINVAL,
                  "%s nccl: rank %u cannot use NCCL: %s; or give %s "
                  "tcp",
                  ps__field("transport"), rank, all[rank].why, ps__field("transport"));
  } else if (st == PS_OK) {
    h->transport = PS_TRANSPORT_TCP;
    snprintf(h->transport_text, sizeof h->transport_text,
             "gradients go over TCP, as rank %u cannot use NCCL: %s", rank, all[rank].why);
  }
  ps__free(all);
  h->text_chosen = strlen(h->transport_text);
  if (st == PS_OK)
    *out = h->transport;
  return st;
}

const char *ps_hosts_transport_text(const ps_hosts *h) { return h ? h->transport_text : ""; }

bool ps__hosts_wants_net(const ps_hosts *h) { return h && h->transport == PS_TRANSPORT_NCCL; }
