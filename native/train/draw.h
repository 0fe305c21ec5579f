/* draw.h - random numbers for weights that are drawn. Internal. */
#ifndef PS_TRAIN_DRAW_H
#define PS_TRAIN_DRAW_H
#include <penstock/model.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct ps__draw {
  uint64_t seed;
  float mean, std;
  bool uniform; /* else normal */
} ps__draw;

/* ps__draw_numbers() - @n numbers into @dst, [n] of @dt (PS_F32 or PS_BF16), borrowed. Numbers 2k
 * and 2k + 1 come from the word of splitmix64 that d->seed and @first + 2k give. With its upper 24
 * bits a and lower 24 bits b, a normal distribution has, by Box and Muller's transform (1958),
 *   u = (a + 1) / 2^24    r = std sqrt(-2 ln u)    mean + r cos(2 pi b / 2^24), mean + r sin(...)
 * and a uniform one mean + 2 sqrt(3) std ((a - 2^23 + 1/2) / 2^24), and the same of b.
 * A normal number is within 5.8 std of the mean. Error: 2e-6 std and the rounding to @dt. The bits
 * are the same with every instruction set. Threads: any. */
void ps__draw_numbers(const ps__draw *d, uint64_t first, uint64_t n, void *dst, ps_dtype dt);
#endif
