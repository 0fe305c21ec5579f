/* places.c - the places that a step may have: one device or several beside the host. */
#include "step/places.h"

/* Copies both ways between a device and the host share a bus, which has the device's number. */
enum { STREAMS_OF_DEVICE = 3, STREAMS_OF_HOST = 2 };
#define COMPUTE(d) (STREAMS_OF_DEVICE * (d))
#define H2D(d)     (STREAMS_OF_DEVICE * (d) + 1)
#define D2H(d)     (STREAMS_OF_DEVICE * (d) + 2)

/* Entries of device d of n. */
#define KIND(d, n) PS_PLACE_DEVICE
#define LINKS(d, n)                                                                                \
  {n, d, H2D(d), d}, { d, n, D2H(d), d }
#define NAMED(d, n)                                                                                \
  {"compute " #d, d}, {"h2d " #d, d}, { "d2h " #d, d }
#define ALONE(d, n)                                                                                \
  {"compute", d}, {"h2d", d}, { "d2h", d }
#define AT(d, n) {d, COMPUTE(d), H2D(d), D2H(d)}

/* The entries of all n devices. */
#define ENTRIES_1(ENTRY, n) ENTRY(0, n)
#define ENTRIES_2(ENTRY, n) ENTRIES_1(ENTRY, n), ENTRY(1, n)
#define ENTRIES_3(ENTRY, n) ENTRIES_2(ENTRY, n), ENTRY(2, n)
#define ENTRIES_4(ENTRY, n) ENTRIES_3(ENTRY, n), ENTRY(3, n)
#define ENTRIES_5(ENTRY, n) ENTRIES_4(ENTRY, n), ENTRY(4, n)
#define ENTRIES_6(ENTRY, n) ENTRIES_5(ENTRY, n), ENTRY(5, n)
#define ENTRIES_7(ENTRY, n) ENTRIES_6(ENTRY, n), ENTRY(6, n)
#define ENTRIES_8(ENTRY, n) ENTRIES_7(ENTRY, n), ENTRY(7, n)

#define PLACES(n, STREAMS)                                                                         \
  [n] = {.n_places = (n) + 1,                                                                      \
         .n_links = 2 * (n),                                                                       \
         .n_streams = STREAMS_OF_DEVICE * (n) + STREAMS_OF_HOST,                                   \
         .n_devices = n,                                                                           \
         .kind = {ENTRIES_##n(KIND, n), PS_PLACE_HOST},                                            \
         .link = {ENTRIES_##n(LINKS, n)},                                                          \
         .stream = {ENTRIES_##n(STREAMS, n), {"host", n}, {"io", n}},                              \
         .dev = {ENTRIES_##n(AT, n)},                                                              \
         .host = n,                                                                                \
         .host_ops = STREAMS_OF_DEVICE * (n),                                                      \
         .io = STREAMS_OF_DEVICE * (n) + 1}

static const ps__places places[PS_MAX_DEVICES + 1] = {
    PLACES(1, ALONE), PLACES(2, NAMED), PLACES(3, NAMED), PLACES(4, NAMED),
    PLACES(5, NAMED), PLACES(6, NAMED), PLACES(7, NAMED), PLACES(8, NAMED)};

const ps__places *ps__places_of(uint32_t n_devices) { return &places[n_devices]; }

_Static_assert(PS_MAX_DEVICES + 1 <= PS_MAX_PLACES && PS_MAX_DEVICES + 1 <= PS_MAX_SPACES &&
                   2 * PS_MAX_DEVICES <= PS_MAX_LINKS &&
                   STREAMS_OF_DEVICE * PS_MAX_DEVICES + STREAMS_OF_HOST <= PS_MAX_STREAMS,
               "an engine has too few places, links or streams for so many devices");
