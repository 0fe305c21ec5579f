/* mix64.h - splitmix64 (Steele, Lea & Flood 2014), from which all random numbers come: of the order
 * of sequences, of drawn weights and tokens, of stochastic rounding. On the device too.
 *
 * splitmix64's sequence from x on is ps__mix64(x + PS__MIX_GAMMA), ps__mix64(x + 2 *
 * PS__MIX_GAMMA), ... */
#ifndef PS_MIX64_H
#define PS_MIX64_H
#include <stdint.h>

/* the Weyl increment, and the finalizer's two multipliers */
#define PS__MIX_GAMMA UINT64_C(0x9e3779b97f4a7c15)
#define PS__MIX_MUL1  UINT64_C(0xbf58476d1ce4e5b9)
#define PS__MIX_MUL2  UINT64_C(0x94d049bb133111eb)
#ifdef __CUDACC__
#  define PS__ANYWHERE __host__ __device__ constexpr /* CUDA: for the device too */
#else
#  define PS__ANYWHERE
#endif

/* The finalizer: a bijection in which every bit of x changes every bit of the result. */
PS__ANYWHERE static inline uint64_t ps__mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * PS__MIX_MUL1;
  x = (x ^ (x >> 27)) * PS__MIX_MUL2;
  return x ^ (x >> 31);
}

#endif
