/* room.c - what a program takes of both memories besides its arenas. */
#include "step/room.h"
#include "core/core.h"
#include "kernels/cuda/scratch.h"

uint32_t ps__stream_threads(const ps_hardware *hw, const ps__places *at, uint32_t stream) {
  if (stream == at->io)
    return ps__io_threads(hw->n_threads);
  return stream == at->host_ops || (ps__is_compute(at, stream) && hw->backend == PS_BACKEND_CPU)
             ? hw->n_threads
             : 1;
}

uint64_t ps__page_table_bytes(const ps_hardware *hw, uint64_t host_arena_bytes) {
  return hw->backend == PS_BACKEND_CUDA ? ps__cuda_table_bytes(ps__arena_round(host_arena_bytes))
                                        : 0;
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
