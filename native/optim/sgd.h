/* sgd.h - SGD with momentum, as torch.optim.SGD with dampening 0: the decay is part of the
 * gradient, so new state depends on weights; state m, PyTorch's momentum_buffer. Numbers and
 * operations: steps.h.
 *   d  = g + decay*w;   m' = momentum*m + d
 *   w' = w - lr*m',  with nesterov w - lr*(d + momentum*m') */
STEP void step_sgd(const STEP_K *k, REAL g, REAL *w, REAL *s) {
  const REAL d = ADD(g, MUL(k->decay, *w));
  const REAL m = ADD(MUL(k->momentum, s[0]), d);
  *w = SUB(*w, MUL(k->lr, k->nesterov ? ADD(d, MUL(k->momentum, m)) : m));
  s[0] = m;
}
