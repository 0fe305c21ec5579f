/* adamw.h - AdamW with decoupled decay and bias correction (Loshchilov & Hutter 2019, arXiv
 * 1711.05101); state m, v. Numbers and operations: steps.h.
 *   m' = beta1*m + (1-beta1)*g;   v' = beta2*v + (1-beta2)*(g*g)
 *   d  = (m' * c1) / (sqrt(v' * c2) + eps)
 *   w' = (w - (lr*decay)*w) - lr*d */
STEP void step_adamw(const STEP_K *k, REAL g, REAL *w, REAL *s) {
  const REAL m = ADD(MUL(k->beta1, s[0]), MUL(k->beta1_rest, g));
  const REAL v = ADD(MUL(k->beta2, s[1]), MUL(k->beta2_rest, MUL(g, g)));
  const REAL d = DIV(MUL(m, k->c1), ADD(SQRT(MUL(v, k->c2)), k->eps));
  *w = SUB(SUB(*w, MUL(k->lr_decay, *w)), MUL(k->lr, d));
  s[0] = m;
  s[1] = v;
}
