/* fp8_tile.h - which values of a tile each thread of a block quantizes, and where they lie in
 * shared memory on their way to the tile's transpose. Plain C too: tests/native/test_fp8_tile.c
 * runs it on the host.
 *
 * A tile is 128 x 128 elements, the work of a block of 256 threads.
 *   - A thread takes two parts of 4 rows x 8 columns. Half a warp reads 128 columns of a row, 256
 *     bytes of bf16, and writes 128 bytes of the form ROWS.
 *   - The codes of 4 rows of a column are a word. The tile is 128 columns of 32 words in shared
 *     memory. The place of a word in its column is turned by the column, so that neither the stores
 *     of a part nor the loads of a run meet in a bank.
 *   - A run is 16 rows of a column: 16 bytes of the form COLS. Eight threads write 128 bytes of a
 *     row of the transpose. */
#ifndef PS_KERNELS_CUDA_FP8_TILE_H
#define PS_KERNELS_CUDA_FP8_TILE_H
#include "core/fp8.h"

enum {
  PS__TILE = 128, /* elements a side */
  PS__TILE_THREADS = 256,
  PS__TILE_PARTS = 2, /* of a thread */
  PS__TILE_RUNS = 4,  /* of a thread */
  PS__PART_ROWS = 4,
  PS__PART_COLS = 8,
  PS__RUN_ROWS = 16,
  PS__TILE_WORDS = PS__TILE * PS__TILE / 4
};

/* Bits of 1/s from those of a scale s (ps__fp8_scale_bits()), which are at most 2^120. */
PS__HD uint32_t ps__fp8_inverse_bits(uint32_t scale) {
  return scale > 0x7f800000u ? scale : 0x7f000000u - scale;
}

/* First row and first column, in the tile, of part @i of @thread. */
PS__HD uint32_t ps__part_row(uint32_t thread, uint32_t i) {
  return (i * (PS__TILE_THREADS / 16) + thread / 16) * PS__PART_ROWS;
}
PS__HD uint32_t ps__part_col(uint32_t thread) { return thread % 16 * PS__PART_COLS; }

/* Column, first row and the place (in 16 bytes) of run @i of @thread. Where the run is turned, its
 * words 0, 1 and 2, 3 lie in each other's place. */
PS__HD uint32_t ps__run_col(uint32_t thread, uint32_t i) {
  return (i * PS__TILE_THREADS + thread) / 8;
}
PS__HD uint32_t ps__run_row(uint32_t thread) { return thread % 8 * PS__RUN_ROWS; }
PS__HD uint32_t ps__run_place(uint32_t col, uint32_t row) {
  return col * 8 + (row / PS__RUN_ROWS ^ col / 16 % 8);
}
PS__HD int ps__run_turned(uint32_t col) { return col / 8 % 2 != 0; }

/* Place of the word of rows [@row, @row + 4) of @col. */
PS__HD uint32_t ps__tile_place(uint32_t col, uint32_t row) {
  return col * 32 + (row / 4 ^ col / 8 % 16 * 2);
}

/* Four of the bytes of @x (0 to 3) and @y (4 to 7), which the nibbles of @which name, the lowest
 * first. */
PS__HD uint32_t ps__bytes(uint32_t x, uint32_t y, uint32_t which) {
#ifdef __CUDA_ARCH__
  return __byte_perm(x, y, which);
#else
  const uint64_t both = (uint64_t)y << 32 | x;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++)
    out |= (uint32_t)(both >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return out;
#endif
}

/* 4 x 4 bytes, a row a word, to a column a word. */
PS__HD void ps__bytes_transpose(uint32_t w[4]) {
  const uint32_t a = ps__bytes(w[0], w[1], 0x5140), b = ps__bytes(w[2], w[3], 0x5140),
                 c = ps__bytes(w[0], w[1], 0x7362), d = ps__bytes(w[2], w[3], 0x7362);
  w[0] = ps__bytes(a, b, 0x5410);
  w[1] = ps__bytes(a, b, 0x7632);
  w[2] = ps__bytes(c, d, 0x5410);
  w[3] = ps__bytes(c, d, 0x7632);
}

/* Stores a part's codes into the tile. @code: of row @i the first four columns at [i], the others
 * at [4 + i]. */
PS__HD void ps__part_keep(uint32_t *tile, uint32_t row, uint32_t col, uint32_t code[8]) {
  ps__bytes_transpose(code);
  ps__bytes_transpose(code + 4);
  for (uint32_t i = 0; i < 8; i++)
    tile[ps__tile_place(col + i, row)] = code[i];
}

#endif
