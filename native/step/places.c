/* places.c - the places that a step may have: one device or several beside the host. */
#include "step/places.h"

/* Copies both ways between a device and the host share a bus, which has the device's number. All
 * copies from a device to other devices are of one stream. */
enum { STREAMS_OF_DEVICE = 3, STREAMS_OF_HOST = 2 }; /* beside those between devices */
#define COMPUTE(d) (STREAMS_OF_DEVICE * (d))
#define H2D(d)     (STREAMS_OF_DEVICE * (d) + 1)
#define D2H(d)     (STREAMS_OF_DEVICE * (d) + 2)
#define P2P(d, n)  (STREAMS_OF_DEVICE * (n) + STREAMS_OF_HOST + (d))
#define SUMS(d, n) (STREAMS_OF_DEVICE * (n) + STREAMS_OF_HOST + (n) + (d))

/* Entries of device d of n. */
#define KIND(d, n) PS_PLACE_DEVICE
#define LINKS(d, n)                                                                                \
  {n, d, H2D(d), d}, { d, n, D2H(d), d }
#define NAMED(d, n)                                                                                \
  {"compute " #d, d}, {"h2d " #d, d}, { "d2h " #d, d }
#define ALONE(d, n)                                                                                \
  {"compute", d}, {"h2d", d}, { "d2h", d }
#define AT(d, n)   {d, COMPUTE(d), H2D(d), D2H(d), P2P(d, n), SUMS(d, n)}
#define PEER(d, n) {"p2p " #d, d}
#define SUM(d, n)  {"sums " #d, d}

/* The entries of all n devices. */
#define ENTRIES_1(ENTRY, n) ENTRY(0, n)
#define ENTRIES_2(ENTRY, n) ENTRIES_1(ENTRY, n), ENTRY(1, n)
#define ENTRIES_3(ENTRY, n) ENTRIES_2(ENTRY, n), ENTRY(2, n)
#define ENTRIES_4(ENTRY, n) ENTRIES_3(ENTRY, n), ENTRY(3, n)
#define ENTRIES_5(ENTRY, n) ENTRIES_4(ENTRY, n), ENTRY(4, n)
#define ENTRIES_6(ENTRY, n) ENTRIES_5(ENTRY, n), ENTRY(5, n)
#define ENTRIES_7(ENTRY, n) ENTRIES_6(ENTRY, n), ENTRY(6, n)
#define ENTRIES_8(ENTRY, n) ENTRIES_7(ENTRY, n), ENTRY(7, n)

/* The links between all pairs of n devices. */
#define PAIR(a, b, n)                                                                              \
  , {a, b, P2P(a, n), (n) + (a)}, { b, a, P2P(b, n), (n) + (b) }
#define PAIRS_1(n)
#define PAIRS_2(n) PAIR(0, 1, n)
#define PAIRS_3(n) PAIRS_2(n) PAIR(0, 2, n) PAIR(1, 2, n)
#define PAIRS_4(n) PAIRS_3(n) PAIR(0, 3, n) PAIR(1, 3, n) PAIR(2, 3, n)
#define PAIRS_5(n) PAIRS_4(n) PAIR(0, 4, n) PAIR(1, 4, n) PAIR(2, 4, n) PAIR(3, 4, n)
#define PAIRS_6(n) PAIRS_5(n) PAIR(0, 5, n) PAIR(1, 5, n) PAIR(2, 5, n) PAIR(3, 5, n) PAIR(4, 5, n)
#define PAIRS_7(n)                                                                                 \
  PAIRS_6(n) PAIR(0, 6, n) PAIR(1, 6, n) PAIR(2, 6, n) PAIR(3, 6, n) PAIR(4, 6, n) PAIR(5, 6, n)
#define PAIRS_8(n)                                                                                 \
  PAIRS_7(n)                                                                                       \
  PAIR(0, 7, n) PAIR(1, 7, n) PAIR(2, 7, n) PAIR(3, 7, n) PAIR(4, 7, n) PAIR(5, 7, n) PAIR(6, 7, n)

/* The streams that n devices have beside those of one. */
#define PEERS_1(n)
#define PEERS_2(n) , ENTRIES_2(PEER, n), ENTRIES_2(SUM, n)
#define PEERS_3(n) , ENTRIES_3(PEER, n), ENTRIES_3(SUM, n)
#define PEERS_4(n) , ENTRIES_4(PEER, n), ENTRIES_4(SUM, n)
#define PEERS_5(n) , ENTRIES_5(PEER, n), ENTRIES_5(SUM, n)
#define PEERS_6(n) , ENTRIES_6(PEER, n), ENTRIES_6(SUM, n)
#define PEERS_7(n) , ENTRIES_7(PEER, n), ENTRIES_7(SUM, n)
#define PEERS_8(n) , ENTRIES_8(PEER, n), ENTRIES_8(SUM, n)

/* NO_NET, NET: what a step of one host and of several has. */
#define NO_NET(n)
#define NET(n)                                                                                     \
  , { "net", n }
#define STREAMS_OF(n) (STREAMS_OF_DEVICE * (n) + STREAMS_OF_HOST + ((n) > 1 ? 2 * (n) : 0))

#define PLACES(n, STREAMS, OTHERS, n_others)                                                       \
  [n] = {.n_places = (n) + 1,                                                                      \
         .n_links = 2 * (n) + (n) * ((n) - 1),                                                     \
         .n_streams = STREAMS_OF(n) + (n_others),                                                  \
         .n_devices = n,                                                                           \
         .kind = {ENTRIES_##n(KIND, n), PS_PLACE_HOST},                                            \
         .link = {ENTRIES_##n(LINKS, n) PAIRS_##n(n)},                                             \
         .stream = {ENTRIES_##n(STREAMS, n), {"host", n}, {"io", n} PEERS_##n(n) OTHERS(n)},       \
         .dev = {ENTRIES_##n(AT, n)},                                                              \
         .host = n,                                                                                \
         .host_ops = STREAMS_OF_DEVICE * (n),                                                      \
         .io = STREAMS_OF_DEVICE * (n) + 1,                                                        \
         .net = STREAMS_OF(n)}

#define PLACES_OF(OTHERS, n_others)                                                                \
  {PLACES(1, ALONE, OTHERS, n_others), PLACES(2, NAMED, OTHERS, n_others),                         \
   PLACES(3, NAMED, OTHERS, n_others), PLACES(4, NAMED, OTHERS, n_others),                         \
   PLACES(5, NAMED, OTHERS, n_others), PLACES(6, NAMED, OTHERS, n_others),                         \
   PLACES(7, NAMED, OTHERS, n_others), PLACES(8, NAMED, OTHERS, n_others)}

static const ps__places one_host[PS_MAX_DEVICES + 1] = PLACES_OF(NO_NET, 0);
static const ps__places of_several[PS_MAX_DEVICES + 1] = PLACES_OF(NET, 1);

const ps__places *ps__places_of(uint32_t n_devices, uint32_t n_hosts) {
  return n_hosts > 1 ? &of_several[n_devices] : &one_host[n_devices];
}

_Static_assert(PS_MAX_DEVICES + 1 <= PS_MAX_PLACES && PS_MAX_DEVICES + 1 <= PS_MAX_SPACES &&
                   PS_MAX_DEVICES * (PS_MAX_DEVICES + 1) <= PS_MAX_LINKS &&
                   STREAMS_OF(PS_MAX_DEVICES) + 1 <= PS_MAX_STREAMS,
               "an engine has too few places, links or streams for so many devices");
