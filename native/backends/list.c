/* list.c - the table of backends, which an engine is made with. */
#include "backends/list.h"
#include "engine/engine.h"

const ps__backend *const ps__backends[PS_N_BACKENDS] = {
    [PS_BACKEND_CPU] = &ps__backend_cpu,
#ifdef PS_CUDA
    [PS_BACKEND_CUDA] = &ps__backend_cuda,
#endif
};

ps_status ps_engine_create(ps_engine **out, const ps_engine_config *cfg) {
  return ps__engine_create(out, cfg, ps__backends);
}

ps_status ps__backend_net(uint32_t backend, uint32_t number, struct ps__net_device *out) {
  const ps__backend *b = backend < PS_N_BACKENDS ? ps__backends[backend] : NULL;
  return b && b->net ? b->net(number, out)
                     : ps__fail(PS_EDEVICE, "NCCL needs GPUs, and a build with CUDA");
}
