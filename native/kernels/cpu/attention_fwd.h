/* attention_fwd.h - one query tile of one head, forward. A template, included after
 * attention_isa.h.
 *
 * Queries lie in lanes: S' = K Q' is made transposed, with a row for each key. So maximum and sum
 * over the keys are plain vector operations, K is read as it lies, and P' has the layout that the
 * product with V needs. Per key tile:
 *   S', the new maxima m, P' = 2^(S' - m), l = l * 2^(m_old - m) + sum P',
 *   O = O * 2^(m_old - m) + P V.
 * Scores are kept times log2(e); a soft cap is applied to S' before the maxima. */
typedef struct fwd_tile {
  const ps__att_job *j;
  /* [hp][TILE] scaled, [TILE][hp] x2, [key][query], [TILE][hp] */
  float *q_t, *k, *v, *s, *o;
  float m[ATT_TILE], l[ATT_TILE], shrink[ATT_TILE]; /* of each query */
  /* group row and first visible group row of each query */
  int32_t pos[ATT_TILE], start[ATT_TILE];
  int64_t key0, key1; /* the key tile: group rows key0 .. key1-1 */
} fwd_tile;

/* Keys of the tile that some query of q .. q+n-1 sees: [*a, *b), relative to key0. */
ATT_INLINE void fwd_range(const fwd_tile *t, int64_t q, int64_t n, int64_t *a, int64_t *b) {
  *a = att_max(t->start[q], t->key0) - t->key0;
  *b = att_min((int64_t)t->pos[q + n - 1] + 1, t->key1) - t->key0;
}

/* S' for every block of 4 keys and every vector of queries that sees one of them. */
ATT_FN void fwd_scores(fwd_tile *t, int64_t n_vec) {
  int64_t a[ATT_TILE / VL], b[ATT_TILE / VL], d = t->j->a.head_dim;
  for (int64_t v = 0; v < n_vec; v++)
    fwd_range(t, v * VL, VL, &a[v], &b[v]);
  int64_t v0 = 0, v1 = 0; /* both ends of the visible range only grow with the key */
  for (int64_t k = 0; k < t->key1 - t->key0; k += ATT_ROWS) {
    while (v0 < n_vec && b[v0] <= k)
      v0++;
    while (v1 < n_vec && a[v1] < k + ATT_ROWS)
      v1++;
    if (v1 > v0)
      mul_n((int)(v1 - v0), d, t->k + (size_t)k * t->j->hp, t->j->hp, t->q_t + v0 * VL, ATT_TILE,
            t->s + k * ATT_TILE + v0 * VL, ATT_TILE, NULL);
  }
}

/* m, l, shrink and P' for the VL queries of vector v. */
ATT_FN void fwd_softmax(fwd_tile *t, int64_t v) {
  int64_t q = v * VL, a, b;
  fwd_range(t, q, VL, &a, &b);
  const vi pos = v_load_i(t->pos + q), start = v_load_i(t->start + q);
  /* [a, whole0) and [whole1, b) hold keys that only some of the lanes see */
  int64_t whole0 = att_max(t->start[q + VL - 1], t->key0) - t->key0,
          whole1 = att_min((int64_t)t->pos[q] + 1, t->key1) - t->key0;
  float *s = t->s + q;
  if (t->j->cap2 > 0.0f)
    for (int64_t k = a; k < b; k++)
      v_store(s + k * ATT_TILE, v_tanh(v_load(s + k * ATT_TILE)) * v_set(t->j->cap2));
  vf old = v_load(t->m + q), m = old, m2 = old;
  for (int64_t k = a; k < b; k++) {
    if (k >= whole0 && k + 1 < whole1) {
      m = v_max(m, v_load(s + k * ATT_TILE));
      k++;
      m2 = v_max(m2, v_load(s + k * ATT_TILE));
      continue;
    }
    if (k < whole0 || k >= whole1)
      v_store(s + k * ATT_TILE,
              v_hide(v_load(s + k * ATT_TILE), (vi){0} + (int32_t)(t->key0 + k), start, pos));
    m = v_max(m, v_load(s + k * ATT_TILE));
  }
  m = v_max(m, m2);
  vf shrink = v_exp2(old - m), l = v_load(t->l + q) * shrink;
  for (int64_t k = a; k < b; k++) {
    vf p = v_exp2(v_load(s + k * ATT_TILE) - m);
    v_store(s + k * ATT_TILE, p);
    l = l + p;
  }
  v_store(t->m + q, m);
  v_store(t->l + q, l);
  v_store(t->shrink + q, shrink);
}

ATT_FN void fwd_begin(fwd_tile *t, float *scratch, const ps__att_job *j, int64_t q0, int64_t nq,
                      uint32_t head) {
  size_t n = ATT_TILE * j->hp;
  t->j = j;
  t->q_t = scratch, t->k = scratch + n, t->v = scratch + 2 * n, t->o = scratch + 3 * n,
  t->s = scratch + 4 * n;
  load_tile(t->k, j, j->q, j->ldq, (size_t)head * j->a.head_dim, q0, j->a.n_tokens);
  transpose(t->q_t, t->k, j->hp, j->hp, j->product_scale);
  /* rows past the last are like the last, with q = 0; they are never stored */
  for (int64_t i = 0; i < ATT_TILE; i++) {
    t->pos[i] = (int32_t)(j->a.row0 + q0 + i);
    t->start[i] = att_start(&j->a, j->doc_start, q0 + att_min(i, nq - 1));
    t->m[i] = -3.0e38f;
    t->l[i] = 0.0f;
  }
}

ATT_FN void fwd_task(void *arg, int64_t task, uint32_t worker) {
  const ps__att_job *j = arg;
  const ps__args_attention *a = &j->a;
  uint32_t head = (uint32_t)(task % a->n_heads), kv_head = head / (a->n_heads / a->n_kv_heads);
  int64_t q0 = (att_n_tiles(a) - 1 - task / a->n_heads) * ATT_TILE; /* the longest first */
  int64_t nq = att_min(ATT_TILE, (int64_t)a->n_tokens - q0), n_vec = (nq + VL - 1) / VL,
          diagonal = a->row0 + q0, end = diagonal + nq;
  fwd_tile t;
  fwd_begin(&t, ps__scratch(j->exec, worker), j, q0, nq, head);
  const float *shrink = NULL; /* of what earlier key tiles left in o */
  for (t.key0 = t.start[0]; t.key0 < end; t.key0 = t.key1, shrink = t.shrink) {
    t.key1 = t.key0 < diagonal ? diagonal - (diagonal - t.key0 - 1) / ATT_TILE * ATT_TILE : end;
    load_tile(t.k, j, j->kv, j->ldkv, (size_t)kv_head * a->head_dim, t.key0, t.key1);
    load_tile(t.v, j, j->kv, j->ldkv, (size_t)(a->n_kv_heads + kv_head) * a->head_dim, t.key0,
              t.key1);
    fwd_scores(&t, n_vec);
    for (int64_t v = 0; v < n_vec; v++)
      fwd_softmax(&t, v);
    for (int64_t r = 0, k0, k1; r < nq; r += ATT_ROWS) {
      fwd_range(&t, r, ATT_ROWS, &k0, &k1);
      mul_t((int)(j->hp / VL), att_max(k1 - k0, 0), t.s + k0 * ATT_TILE + r, ATT_TILE,
            t.v + (size_t)k0 * j->hp, j->hp, t.o + (size_t)r * j->hp, j->hp,
            shrink ? shrink + r : NULL);
    }
  }
  for (int64_t r = 0; r < nq; r++) {
    float *o = t.o + (size_t)r * j->hp, inv = 1.0f / t.l[r];
    for (size_t c = 0; c < j->hp; c += VL)
      v_store(o + c, v_load(o + c) * v_set(inv));
    ps__store_f32(ps__elem(j->out, a->dt, (size_t)(q0 + r) * j->ldq + (size_t)head * a->head_dim),
                  a->dt, o, a->head_dim);
    j->lse[(size_t)(q0 + r) * a->n_heads + head] = t.m[r] * 0.693147181f + logf(t.l[r]);
  }
}
