/* room.h - what a program may take of the memories and what it takes besides its arenas; its
 * streams' threads; the engine that it runs on. */
#ifndef PS_STEP_ROOM_H
#define PS_STEP_ROOM_H
#include "step/places.h"
#include <penstock/hardware.h>

/* The memories that caps limit. Devices are alike, and what is counted is that of the device that
 * takes the most. */
/* Pinned memory is that part of the host's which links copy from and to. */
enum { PS__DEVICE_MEM, PS__HOST_MEM, PS__PINNED_MEM, PS__N_MEMS };
/* ps__mem_of() - that of a place, which is not the disk: its bytes are counted apart. */
static inline uint32_t ps__mem_of(const ps__places *at, uint32_t place) {
  return at->kind[place] == PS_PLACE_HOST ? PS__HOST_MEM : PS__DEVICE_MEM;
}

/* Caps in BYTES by memory; 0: none. given: the user's. holds: those that hold; a GPU's is the
 * lesser of the user's and its memory that is free. */
typedef struct ps__caps {
  uint64_t given[PS__N_MEMS], holds[PS__N_MEMS];
} ps__caps;
ps__caps ps__caps_of(const ps_hardware *hw, uint64_t device_mem_bytes, uint64_t host_mem_bytes,
                     uint64_t pinned_mem_bytes);

/* ps__device_overhead() - BYTES that a program takes of a device besides its arena: CUDA's scratch
 * with the products' workspace (@scratch), and its overhead. @fp8: products have FP8 operands.
 * ps__host_scratch() - host BYTES of scratch. @scratch_bytes: of each stream. */
uint64_t ps__device_overhead(const ps_hardware *hw, bool fp8, const ps__places *at,
                             const size_t *scratch_bytes, uint64_t *scratch);
/* ps__page_table_bytes() - device BYTES of the GPU's page tables of host memory that is pinned. */
uint64_t ps__page_table_bytes(const ps_hardware *hw, uint64_t pinned_bytes);
/* ps__pageable_part() - BYTES at the beginning of a host's space that an engine does not pin, where
 * so many need not be. */
static inline uint64_t ps__pageable_part(uint64_t bytes) { return bytes >> 16 << 16; }
uint64_t ps__host_scratch(const ps_hardware *hw, const ps__places *at, const size_t *scratch_bytes);
static inline uint64_t ps__arena_round(uint64_t bytes) {
  return (bytes + (2u << 20) - 1) >> 21 << 21;
}
/* Threads that a stream's ops may use. */
uint32_t ps__stream_threads(const ps_hardware *hw, const ps__places *at, uint32_t stream);

/* ps__engine_of() - the engine of a program: its places and streams on this machine.
 * @arena          BYTES that are in use of each place's space
 * @pageable       BYTES at the beginning of the host's space that need not be pinned
 * @cap, @beside   BYTES by memory: the place's cap, and what the program takes besides its arena
 * @scratch_bytes  of each stream */
void ps__engine_of(ps_engine_config *out, const ps_hardware *hw, const ps__places *at,
                   const uint64_t arena[PS_MAX_PLACES], uint64_t pageable,
                   const uint64_t cap[PS__N_MEMS], const uint64_t beside[PS__N_MEMS],
                   const size_t *scratch_bytes);
#endif
