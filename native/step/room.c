/* room.c - memories: their caps, what a program takes besides its arenas; its engine. */
#include "step/room.h"
#include "core/core.h"
#include "kernels/cuda/scratch.h"
#include <string.h>

ps__caps ps__caps_of(const ps_hardware *hw, uint64_t device_mem_bytes, uint64_t host_mem_bytes,
                     uint64_t pinned_mem_bytes) {
  const uint64_t given[PS__N_MEMS] = {[PS__DEVICE_MEM] = device_mem_bytes,
                                      [PS__HOST_MEM] = host_mem_bytes,
                                      [PS__PINNED_MEM] = pinned_mem_bytes},
                 there[PS__N_MEMS] = {[PS__DEVICE_MEM] = hw->backend == PS_BACKEND_CUDA
                                                             ? hw->device_memory_bytes
                                                             : 0};
  ps__caps c;
  for (uint32_t i = 0; i < PS__N_MEMS; i++) {
    c.given[i] = given[i];
    c.holds[i] = there[i] && (!given[i] || there[i] < given[i]) ? there[i] : given[i];
  }
  return c;
}

/* Requests in flight each way: bench/LOG.md has the figures. */
enum { DISK_THREADS = 8 };

uint32_t ps__stream_threads(const ps_hardware *hw, const ps__places *at, uint32_t stream) {
  if (stream == at->io)
    return ps__io_threads(hw->n_threads);
  if (stream == at->disk_read || stream == at->disk_write)
    return DISK_THREADS;
  return stream == at->host_ops || (ps__is_compute(at, stream) && hw->backend == PS_BACKEND_CPU)
             ? hw->n_threads
             : 1;
}

uint64_t ps__page_table_bytes(const ps_hardware *hw, uint64_t pinned_bytes) {
  return hw->backend == PS_BACKEND_CUDA ? ps__cuda_table_bytes(ps__arena_round(pinned_bytes)) : 0;
}

/* The scratch of a stream and the products' workspace are one allocation
 * (native/backends/cuda/cuda.c), in the driver's units of 2 MiB. */
static uint64_t scratch_of(const ps_hardware *hw, const ps__places *at, const size_t *scratch_bytes,
                           uint32_t place) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < at->n_streams; i++) {
    const uint64_t blas =
        !ps__link_of(at, i) ? ps__cuda_workspace_bytes(hw->compute_capability) : 0;
    if (at->stream[i].place == place)
      bytes += ps__arena_round(scratch_bytes[i] + blas);
  }
  return bytes;
}

uint64_t ps__device_overhead(const ps_hardware *hw, bool fp8, const ps__places *at,
                             const size_t *scratch_bytes, uint64_t *scratch) {
  *scratch = 0;
  if (hw->backend != PS_BACKEND_CUDA)
    return 0;
  for (uint32_t d = 0; d < at->n_devices; d++) {
    const uint64_t bytes = scratch_of(hw, at, scratch_bytes, at->dev[d].place);
    if (bytes > *scratch)
      *scratch = bytes;
  }
  return *scratch + hw->device_overhead_bytes + (fp8 ? hw->fp8_overhead_bytes : 0);
}

uint64_t ps__host_scratch(const ps_hardware *hw, const ps__places *at,
                          const size_t *scratch_bytes) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < at->n_streams; i++)
    if (hw->backend == PS_BACKEND_CPU || ps__stream_on_host(at, i))
      bytes += (uint64_t)scratch_bytes[i] * ps__stream_threads(hw, at, i);
  return bytes;
}

void ps__engine_of(ps_engine_config *out, const ps_hardware *hw, const ps__places *at,
                   const uint64_t arena[PS_MAX_PLACES], uint64_t pageable,
                   const uint64_t cap[PS__N_MEMS], const uint64_t beside[PS__N_MEMS],
                   const size_t *scratch_bytes) {
  *out = (ps_engine_config){.struct_bytes = sizeof *out,
                            .n_places = at->n_places,
                            .n_links = at->n_links,
                            .n_spaces = at->n_places,
                            .n_streams = at->n_streams};
  memcpy(out->link, at->link, sizeof out->link);
  for (uint32_t i = 0; i < at->n_places; i++) {
    const bool device = at->kind[i] == PS_PLACE_DEVICE;
    out->space[i] = (ps_space_config){.bytes = ps__arena_round(arena[i]),
                                      .pageable_bytes = device ? 0 : ps__pageable_part(pageable),
                                      .place = i};
    out->place[i] = (ps_place){.kind = at->kind[i],
                               .backend = device ? hw->backend : PS_BACKEND_CPU,
                               .device = device ? hw->device + i : 0,
                               .cap_bytes = i == at->disk ? 0 : cap[ps__mem_of(at, i)],
                               .overhead_bytes = i == at->disk ? 0 : beside[ps__mem_of(at, i)]};
  }
  for (uint32_t i = 0; i < at->n_streams; i++) {
    ps_stream_config *s = &out->stream[i];
    *s = (ps_stream_config){.place = at->stream[i].place,
                            .n_threads = ps__stream_threads(hw, at, i),
                            .scratch_bytes = scratch_bytes[i]};
    memcpy(s->name, at->stream[i].name, sizeof s->name);
  }
}
