/* share.c - what rank 0 chose goes to all tasks; settings that must be the same are compared. */
#include "hosts/hosts.h"
#include <string.h>

ps_status ps_hosts_share(ps_hosts *h, void *data, uint64_t bytes) {
  char *all = h ? ps__malloc(h->n * bytes + 1) : NULL;
  if (!all)
    return h ? ps__fail(PS_ENOMEM, "out of memory for what rank 0 shares")
             : ps__fail(PS_EINVAL, "ps_hosts_share: hosts must be given");
  const ps_status st = ps__hosts_gather(h, "sharing what rank 0 chose", data, all, bytes);
  if (st == PS_OK)
    memcpy(data, all, bytes);
  ps__free(all);
  return st;
}

/* TEXT_MOST: more than any options take; another task may say any length. */
enum { LINE = 160, TEXT_MOST = 1 << 20 };
typedef struct line {
  uint32_t differs;
  char mine[LINE], first[LINE]; /* of this rank, of rank 0 */
} line;

static size_t line_length(const char *text) { return strcspn(text, "\n"); }

/* The first line in which @mine differs from @first. */
static line compare(const char *mine, const char *first) {
  line l = {0};
  for (;;) {
    const size_t a = line_length(mine), b = line_length(first);
    if (a != b || memcmp(mine, first, a) != 0) {
      l.differs = 1;
      snprintf(l.mine, LINE, "%.*s", (int)(a < LINE ? a : LINE), mine);
      snprintf(l.first, LINE, "%.*s", (int)(b < LINE ? b : LINE), first);
      return l;
    }
    if (!mine[a] && !first[b])
      return l;
    mine += a + (mine[a] != 0);
    first += b + (first[b] != 0);
  }
}

ps_status ps_hosts_agree(ps_hosts *h, const char *text) {
  static const char what[] = "comparing the tasks";
  if (!h || !text)
    return ps__fail(PS_EINVAL, "ps_hosts_agree: hosts and text must be given");
  uint64_t bytes[PS_MAX_HOSTS], mine = strlen(text) + 1;
  line own, all[PS_MAX_HOSTS];
  PS_TRY(ps__hosts_gather(h, what, &mine, bytes, sizeof mine));
  if (bytes[0] == 0 || bytes[0] > TEXT_MOST)
    return ps__fail(PS_EINVAL, "rank 0 compares %llu bytes of settings: up to %d are possible",
                    (unsigned long long)bytes[0], TEXT_MOST);
  char *first = ps__calloc(bytes[0] + 1, 1);
  if (!first)
    return ps__fail(PS_ENOMEM, "out of memory for what the tasks agree on");
  if (h->rank == 0)
    memcpy(first, text, bytes[0]);
  ps_status st = ps_hosts_share(h, first, bytes[0]);
  first[bytes[0]] = 0;
  own = compare(text, first);
  ps__free(first);
  if (st == PS_OK)
    st = ps__hosts_gather(h, what, &own, all, sizeof own);
  PS_TRY(st);
  for (uint32_t r = 1; r < h->n; r++)
    if (all[r].differs)
      return ps__fail(PS_EINVAL, "the tasks disagree: rank %u has %.*s, and rank 0 has %.*s", r,
                      LINE - 1, all[r].mine, LINE - 1, all[r].first);
  return PS_OK;
}
