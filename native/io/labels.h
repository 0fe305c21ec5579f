/* labels.h - the labels of a shard's documents, for models with a `score`: NAME.labels beside
 * NAME.bin (docs/data.md, "Labels"). */
#ifndef PS_IO_LABELS_H
#define PS_IO_LABELS_H
#include "io/input.h"

typedef struct ps__labels {
  ps__input file;             /* path NULL: there are none */
  uint32_t problem, n_labels; /* ps_problem */
} ps__labels;

/* ps__labels_open() - the labels of @shard, which is open and has @n_tokens, if they are there.
 * Errors: PS_EIO; PS_ENOMEM; PS_EFORMAT says what is wrong.
 * ps__labels_read() - the targets of tokens [first, first + n); where there are no labels they stay
 * as they are. Errors: PS_EIO.
 * ps__labels_close() - may be called twice. */
ps_status ps__labels_open(ps__labels *l, const ps__input *shard, uint64_t n_tokens);
ps_status ps__labels_read(const ps__labels *l, uint64_t first, uint64_t n, int32_t *targets);
void ps__labels_close(ps__labels *l);
#endif
