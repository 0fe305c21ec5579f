/* Stands in for PyTorch's header of this name: flash-attn's parameters hold the state of a
 * random number generator, for dropout, which nothing here has. */
#ifndef PS_FLASH_GENERATOR
#define PS_FLASH_GENERATOR
namespace at {
struct PhiloxCudaState {};
} // namespace at
#endif
