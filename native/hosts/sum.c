/* sum.c - a sum over all tasks: by NCCL where it is open, else over the data connections. */
#include "hosts/hosts.h"

ps_status ps__hosts_sum(ps_hosts *h, const char *what, void *data, uint64_t n, ps_dtype dt) {
  PS_TRY(ps__hosts_enter(h, what));
  PS_TRY(h->net ? ps__net_sum(h->net, data, n, dt) : ps__hosts_sum_tcp(h, data, n, dt));
  ps__hosts_leave(h);
  return PS_OK;
}
