/* bits8.h - state in 8 bits: m as int8, v as uint8 of its square root, in blocks of
 * PS__STATE_BLOCK elements with an fp32 scale. Numbers and operations: steps.h; so all backends
 * have the same bits.
 *
 * With s the block's largest |m|, or largest sqrt(v), and x = |m| / s or sqrt(v) / s, an element
 * has the level q of N (127, 255)
 *   y = 8 N x / (1 + 7 x)     q = y rounded     x = q / (8 N - 7 q)
 * Levels are 8/N apart at x = 1 and 1/(8 N) at 0: of v's root 1.4 to 6% down to s/100, where linear
 * levels are 40% apart. The companding is that of FlashOptim (arXiv 2602.23349) with another
 * constant: it has 2 x / (1 + x) for m, and none for sqrt(v). Why 7: docs/design/optimizers.md.
 *   - Rounding is stochastic, with the state's 16 bits of the element: a moment that changes by
 *     less than a level in a step would otherwise stay where it is.
 *   - A v above 0 has level 1 at least. Else a weight whose v became 0 would move by m / eps. The
 *     lowest levels are 1/1009 of the largest m and 1/2033 of the largest root, so such a weight's
 *     m / sqrt(v) is at most about twice that of the block's largest.
 *   - An infinity or a NaN makes its block's elements NaN when they are read again. */

/* Fractions of the scale have 16 bits: what is added to round. */
enum { PS__LEVELS_M = 127, PS__LEVELS_V = 255 };

/* x of the levels @q >= 0. */
STEP REAL part_of_scale(float levels, REAL q) {
  return DIV(q, SUB(CONST(8.0f * levels), MUL(CONST(7.0f), q)));
}
STEP REAL read_m(REAL size, REAL scale) { return MUL(scale, part_of_scale(PS__LEVELS_M, size)); }
STEP REAL read_v(REAL q, REAL scale) {
  const REAL root = MUL(scale, part_of_scale(PS__LEVELS_V, q));
  return MUL(root, root);
}
/* y * 2^16, @size being |m| or sqrt(v): from 0 to N * 2^16 whatever it is, also of 0 / 0. */
STEP REAL fixed_level(float levels, REAL size, REAL scale) {
  const REAL y =
      DIV(MUL(size, CONST(8.0f * levels * 65536.0f)), ADD(scale, MUL(CONST(7.0f), size)));
  return LEAST(MOST(y, CONST(0.0f)), CONST(levels * 65536.0f));
}
