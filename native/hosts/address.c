/* address.c - which addresses strangers may reach. */
#include "hosts/greet.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <string.h>

static bool is_loopback(const struct sockaddr *a) {
  const struct sockaddr_in6 *six = (const void *)a;
  const struct sockaddr_in *four = (const void *)a;
  if (a->sa_family == AF_INET)
    return ntohl(four->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&six->sin6_addr);
}

ps__reach ps__reach_of(const char *name, const struct addrinfo *all) {
  struct in6_addr number;
  const bool fixed = inet_pton(AF_INET, name, &number) == 1 ||
                     inet_pton(AF_INET6, name, &number) == 1 || strcmp(name, "localhost") == 0;
  for (; all; all = all->ai_next)
    if (!is_loopback(all->ai_addr))
      return PS__NETWORK;
  return fixed ? PS__LOCAL : PS__LOCAL_NAME;
}

ps_status ps__guarded(const ps_hosts_config *c, const ps__secret *s, const char *name,
                      ps__reach reach) {
  if (reach == PS__LOCAL || s->bytes || c->insecure)
    return PS_OK;
  return ps__fail(PS_EINVAL,
                  "there is no secret, and others than the tasks may reach rank 0 at %.255s: set "
                  "PENSTOCK_HOSTS_SECRET to the same in all tasks, such as `openssl rand -hex 32` "
                  "prints, or give %s on a network that nobody else reaches",
                  name, ps__field("insecure"));
}

const char *ps__address_text(const struct sockaddr_storage *a, char out[64]) {
  if (getnameinfo((const struct sockaddr *)a, sizeof *a, out, 64, NULL, 0, NI_NUMERICHOST) != 0)
    snprintf(out, 64, "an unknown address");
  return out;
}
