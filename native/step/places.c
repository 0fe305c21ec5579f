/* places.c - the places that a step may have: today one device beside the host. */
#include "step/step.h"

const ps__places ps__one_device = {
    .n_places = PS__N_SPACES,
    .kind = {[PS__SPACE_DEVICE] = PS_PLACE_DEVICE, [PS__SPACE_HOST] = PS_PLACE_HOST},
    /* copies both ways share the bus */
    .n_links = 2,
    .link = {{PS__SPACE_HOST, PS__SPACE_DEVICE, PS__S_H2D, 0},
             {PS__SPACE_DEVICE, PS__SPACE_HOST, PS__S_D2H, 0}},
    .n_streams = PS__N_STREAMS,
    .stream = {[PS__S_COMPUTE] = {"compute", PS__SPACE_DEVICE},
               [PS__S_H2D] = {"h2d", PS__SPACE_DEVICE},
               [PS__S_D2H] = {"d2h", PS__SPACE_DEVICE},
               [PS__S_HOST] = {"host", PS__SPACE_HOST},
               [PS__S_IO] = {"io", PS__SPACE_HOST}},
    .compute = PS__S_COMPUTE,
    .to_device = PS__S_H2D,
    .to_host = PS__S_D2H,
    .host_ops = PS__S_HOST,
    .io = PS__S_IO};
