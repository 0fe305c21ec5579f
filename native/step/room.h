/* room.h - what a program takes of both memories besides its arenas, and its streams' threads. */
#ifndef PS_STEP_ROOM_H
#define PS_STEP_ROOM_H
#include "step/places.h"
#include <penstock/hardware.h>

/* The memories that caps limit. Devices are alike, and what is counted is that of the device that
 * takes the most. */
enum { PS__DEVICE_MEM, PS__HOST_MEM, PS__N_MEMS };

/* ps__device_overhead() - BYTES that a program takes of a device besides its arena: CUDA's scratch
 * with the products' workspace (@scratch), and its overhead. @fp8: products have FP8 operands.
 * ps__host_scratch() - host BYTES of scratch. @scratch_bytes: of each stream. */
uint64_t ps__device_overhead(const ps_hardware *hw, bool fp8, const ps__places *at,
                             const size_t *scratch_bytes, uint64_t *scratch);
/* ps__page_table_bytes() - device BYTES of the GPU's page tables of the host arena, which is
 * pinned. */
uint64_t ps__page_table_bytes(const ps_hardware *hw, uint64_t host_arena_bytes);
uint64_t ps__host_scratch(const ps_hardware *hw, const ps__places *at, const size_t *scratch_bytes);
static inline uint64_t ps__arena_round(uint64_t bytes) {
  return (bytes + (2u << 20) - 1) >> 21 << 21;
}
/* BYTES: the device cap that holds, which is the lesser of the user's and the GPU's memory that is
 * free; 0: none. */
static inline uint64_t ps__device_cap(const ps_hardware *hw, uint64_t given) {
  const uint64_t there = hw->backend == PS_BACKEND_CUDA ? hw->device_memory_bytes : 0;
  return there && (!given || there < given) ? there : given;
}
/* Threads that a stream's ops may use. */
uint32_t ps__stream_threads(const ps_hardware *hw, const ps__places *at, uint32_t stream);
#endif
