/* places.c - the places that a step may have: today one device beside the host. */
#include "step/places.h"

enum { DEVICE, HOST, N_PLACES };
enum { COMPUTE, TO_DEVICE, TO_HOST, HOST_OPS, IO, N_STREAMS };

const ps__places ps__one_device = {
    .n_places = N_PLACES,
    .kind = {[DEVICE] = PS_PLACE_DEVICE, [HOST] = PS_PLACE_HOST},
    /* copies both ways share the bus */
    .n_links = 2,
    .link = {{HOST, DEVICE, TO_DEVICE, 0}, {DEVICE, HOST, TO_HOST, 0}},
    .n_streams = N_STREAMS,
    .stream = {[COMPUTE] = {"compute", DEVICE},
               [TO_DEVICE] = {"h2d", DEVICE},
               [TO_HOST] = {"d2h", DEVICE},
               [HOST_OPS] = {"host", HOST},
               [IO] = {"io", HOST}},
    .device = DEVICE,
    .host = HOST,
    .compute = COMPUTE,
    .to_device = TO_DEVICE,
    .to_host = TO_HOST,
    .host_ops = HOST_OPS,
    .io = IO};
_Static_assert((int)N_PLACES <= (int)PS__MAX_PLACES, "arrays by place are too short");
