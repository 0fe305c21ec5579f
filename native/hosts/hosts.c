/* hosts.c - opens and closes the connections to the tasks of other hosts. */
#include "hosts/greet.h"
#include "hosts/net.h"
#include <unistd.h>

/* ---- opening --------------------------------------------------------------------------------- */

static ps_status check(const ps_hosts_config *c) {
  if (!c || c->struct_bytes != sizeof *c || !c->address)
    return ps__fail(PS_EINVAL, "ps_hosts_open: cfg must be given, with struct_bytes and address");
  if (c->n_hosts < 2 || c->n_hosts > PS_MAX_HOSTS)
    return ps__fail(PS_EINVAL, "%u tasks: 2 to %d are possible, one a host", c->n_hosts,
                    PS_MAX_HOSTS);
  if (c->rank >= c->n_hosts)
    return ps__fail(PS_EINVAL, "rank %u: %u tasks have the ranks 0 to %u", c->rank, c->n_hosts,
                    c->n_hosts - 1);
  if (c->port == 0 || c->port > 65535)
    return ps__fail(PS_EINVAL, "port %u: give one from 1 to 65535", c->port);
  if (!(c->wait_s > 0 && c->wait_s <= 1e6))
    return ps__fail(PS_EINVAL, "the time to wait for other tasks is %g s: give up to 1e6",
                    c->wait_s);
  return PS_OK;
}

static void close_socket(int fd) {
  if (fd >= 0)
    close(fd);
}

void ps_hosts_close(ps_hosts *h) {
  if (!h)
    return;
  ps__hosts_close_net(h);
  ps__hosts_end(h);
  for (uint32_t r = 0; r < h->n; r++) {
    close_socket(h->data[r]);
    close_socket(h->control[r]);
  }
  close_socket(h->wake[0]);
  close_socket(h->wake[1]);
  pthread_mutex_destroy(&h->lock);
  if (h->door)
    ps__door_shut(h->door);
  ps__free(h->door);
  ps__free(h->peer);
  ps__free(h->staging);
  ps__free(h);
}

ps_status ps_hosts_open(ps_hosts **out, const ps_hosts_config *cfg) {
  PS_TRY(check(cfg));
  ps_hosts *h = ps__calloc(1, sizeof *h);
  if (!h)
    return ps__fail(PS_ENOMEM, "out of memory for the tasks of other hosts");
  h->rank = cfg->rank;
  h->n = cfg->n_hosts;
  h->wait_s = cfg->wait_s > ps__hosts_times.silent_s ? cfg->wait_s : ps__hosts_times.silent_s;
  h->wake[0] = h->wake[1] = -1;
  for (uint32_t r = 0; r < PS_MAX_HOSTS; r++)
    h->control[r] = h->data[r] = -1;
  pthread_mutex_init(&h->lock, NULL);
  snprintf(h->what, sizeof h->what, "the tasks met");
  h->transport = PS_TRANSPORT_TCP;
  snprintf(h->transport_text, sizeof h->transport_text, "gradients go over TCP");
  h->staging = ps__malloc(ps__hosts_staging_bytes(h->n));
  ps_status st = h->staging ? ps__hosts_meet(h, cfg)
                            : ps__fail(PS_ENOMEM, "out of memory for the tasks of other hosts");
  if (st == PS_OK)
    st = ps__hosts_start(h);
  if (st != PS_OK)
    ps_hosts_close(h);
  else
    *out = h;
  return st;
}
