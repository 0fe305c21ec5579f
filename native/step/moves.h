/* moves.h - from the memory map of one step to that of another: in which order tensors are copied,
 * so that none is overwritten before it was read, and what lies free in both maps serves where that
 * needs a third place. Pure. */
#ifndef PS_STEP_MOVES_H
#define PS_STEP_MOVES_H
#include "step/step.h"

/* BYTES at @src of space @from, that are to be at @dst of space @to. */
typedef struct ps__move {
  uint32_t from, to;
  uint64_t src, dst, bytes;
} ps__move;

typedef struct ps__moves {
  ps__move *move;
  size_t n, cap;
} ps__moves;
void ps__moves_free(ps__moves *m);

/* BYTES of a copy, at most: all threads of a host have their part of it. */
#define PS__PIECE_BYTES ((uint64_t)32 << 20)

/* ps__moves_order() - copies, one after the other, that carry out all of @all at once. Source and
 * destination of a copy do not overlap, and a copy has at most @piece BYTES.
 * @all    destinations are apart from each other, sources need not be. One whose source is its
 *         destination keeps its bytes. No move goes from one device to another one.
 * @space  BYTES of each of @at's spaces. What is neither a source nor a destination of @all may be
 *         overwritten.
 * @out    freed by the caller.
 * Errors: PS_ENOMEM. PS_EBUDGET: nothing is free that the copies could go through. */
ps_status ps__moves_order(const ps__moves *all, const ps__places *at,
                          const uint64_t space[PS_MAX_PLACES], uint64_t piece, ps__moves *out);

/* ps__step_moves() - what outlives a step, from where step @from has it to where step @to does.
 * Both are mapped and of one model, and no step is under way. It is all of a unit's state; the
 * weights on each device where they stay; the norm; gradients where steps keep them.
 * ps__moves_program() - the copies as a program of @at. Errors: PS_ENOMEM. */
ps_status ps__step_moves(const ps__step *from, const ps__step *to, ps__moves *out);
ps_status ps__moves_program(const ps__moves *copies, const ps__places *at, ps_program **out);
#endif
