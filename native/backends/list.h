/* list.h - the backends that this library is built with. */
#ifndef PS_BACKENDS_LIST_H
#define PS_BACKENDS_LIST_H
#include "engine/backend.h"

extern const ps__backend ps__backend_cpu;
#ifdef PS_CUDA
extern const ps__backend ps__backend_cuda;
#endif

/* [PS_N_BACKENDS]; NULL: not built in */
extern const ps__backend *const ps__backends[];

/* ps__backend_net() - backend.h's net() of @backend. PS_EDEVICE: it has none. */
ps_status ps__backend_net(uint32_t backend, uint32_t number, struct ps__net_device *out);
#endif
