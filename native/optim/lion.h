/* lion.h - Lion with decoupled decay (Chen et al. 2023, arXiv 2302.06675); state m. Numbers and
 * operations: steps.h.
 *   c  = beta1*m + (1-beta1)*g;   m' = beta2*m + (1-beta2)*g
 *   w' = (w - (lr*decay)*w) - lr*sign(c),  sign(0) = 0 */
STEP void step_lion(const STEP_K *k, REAL g, REAL *w, REAL *s) {
  const REAL c = ADD(MUL(k->beta1, s[0]), MUL(k->beta1_rest, g));
  *w = SUB(SUB(*w, MUL(k->lr_decay, *w)), MUL(k->lr, SIGN(c)));
  s[0] = ADD(MUL(k->beta2, s[0]), MUL(k->beta2_rest, g));
}
