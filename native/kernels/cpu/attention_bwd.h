/* attention_bwd.h - one pair of a query tile and a key tile, backward. A template, included
 * after attention_isa.h.
 *
 * Keys lie in lanes: K and V are transposed once for all query heads of their group. With the
 * scale c, per head:
 *   S = Q K'  (times c log2(e)),  P = 2^(S - lse log2(e)),  dP = dO V',  D = rowsum(dO * O),
 *   dS = c P * (dP - D),  dV += P' dO,  dK += dS' Q,  dQ += dS K.
 * With a soft cap, t = tanh(Q K' c / softcap):
 *   S = t softcap log2(e),  dS = c P * (dP - D) (1 - t^2).
 * Blocks of 4 queries know the range of keys they see; what lies outside is neither computed nor
 * read. */
typedef struct bwd_tile {
  const ps__att_job *j;
  /* [TILE][hp], k_t and v_t [hp][TILE], k_t scaled */
  float *k, *v, *k_t, *v_t, *q, *d_o, *dq, *dk, *dv;
  float *p, *ds;                         /* [query][key] */
  float lse2[ATT_TILE], delta[ATT_TILE]; /* of each query: lse times log2(e), D */
  int32_t pos[ATT_TILE], start[ATT_TILE];
  /* chunk row of the first query; group row of the first key: may be < 0 */
  int64_t q0, nq, key0;
  /* vectors of keys that a block of queries sees */
  int64_t v0[ATT_TILE / ATT_ROWS], v1[ATT_TILE / ATT_ROWS];
} bwd_tile;

ATT_FN void bwd_begin(bwd_tile *t, float *scratch, const ps__att_job *j, int64_t tile) {
  size_t n = ATT_TILE * j->hp;
  float **part[] = {&t->k, &t->v, &t->k_t, &t->v_t, &t->q, &t->d_o, &t->dq, &t->dk, &t->dv, &t->p};
  for (size_t i = 0; i < sizeof part / sizeof *part; i++)
    *part[i] = scratch + i * n;
  t->ds = t->p + ATT_TILE * ATT_TILE;
  t->j = j;
  t->q0 = tile * ATT_TILE;
  t->nq = att_min(ATT_TILE, (int64_t)j->a.n_tokens - t->q0);
  for (int64_t i = 0; i < ATT_TILE; i++) {
    t->pos[i] = (int32_t)(j->a.row0 + t->q0 + i);
    t->start[i] = att_start(&j->a, j->doc_start, t->q0 + att_min(i, t->nq - 1));
  }
}

/* The key tile that lies @phase tiles before the diagonal one. False when no query of the tile
 * sees any of it. */
ATT_FN bool bwd_keys(bwd_tile *t, uint32_t kv_head, int64_t phase) {
  const ps__att_job *j = t->j;
  size_t d = j->a.head_dim;
  int64_t n_keys = (int64_t)j->a.row0 + j->a.n_tokens;
  t->key0 = t->pos[0] - phase * ATT_TILE;
  if (t->key0 + ATT_TILE <= t->start[0])
    return false;
  load_tile(t->k, j, j->kv, j->ldkv, kv_head * d, t->key0, n_keys);
  load_tile(t->v, j, j->kv, j->ldkv, (j->a.n_kv_heads + kv_head) * d, t->key0, n_keys);
  transpose(t->k_t, t->k, j->hp, j->hp, j->product_scale);
  transpose(t->v_t, t->v, j->hp, j->hp, 1.0f);
  for (int64_t r = 0; r < t->nq; r += ATT_ROWS) {
    int64_t a = att_min(att_max(t->start[r] - t->key0, 0), ATT_TILE),
            b = att_min(t->pos[r + ATT_ROWS - 1] + 1 - t->key0, ATT_TILE);
    t->v0[r / ATT_ROWS] = a / VL;
    t->v1[r / ATT_ROWS] = b > a ? (b + VL - 1) / VL : a / VL;
  }
  return true;
}

/* Q, dO, D and lse of a head. Rows past the last get lse = +inf, thus P = 0. */
ATT_FN void bwd_queries(bwd_tile *t, uint32_t head) {
  const ps__att_job *j = t->j;
  size_t col = (size_t)head * j->a.head_dim;
  load_tile(t->dq, j, j->o, j->ldq, col, t->q0, j->a.n_tokens);
  load_tile(t->q, j, j->q, j->ldq, col, t->q0, j->a.n_tokens);
  load_tile(t->d_o, j, j->d_o, j->ldq, col, t->q0, j->a.n_tokens);
  for (int64_t r = 0; r < ATT_TILE; r++) {
    const float *o = t->dq + (size_t)r * j->hp, *g = t->d_o + (size_t)r * j->hp;
    vf sum = v_set(0.0f);
    float lane[VL], d = 0.0f;
    for (size_t c = 0; c < j->hp; c += VL)
      sum = v_fma(v_load(o + c), v_load(g + c), sum);
    v_store(lane, sum);
    for (int i = 0; i < VL; i++)
      d += lane[i];
    t->delta[r] = d;
    t->lse2[r] =
        r < t->nq ? j->lse_in[(size_t)(t->q0 + r) * j->a.n_heads + head] * 1.44269504f : INFINITY;
  }
}

/* P and dS of query rows r .. r+3 over the key vectors that they see. */
ATT_FN void bwd_scores(bwd_tile *t, int64_t r) {
  const ps__att_job *j = t->j;
  int64_t v0 = t->v0[r / ATT_ROWS], v1 = t->v1[r / ATT_ROWS], d = j->a.head_dim,
          at = r * ATT_TILE + v0 * VL;
  mul_n((int)(v1 - v0), d, t->q + (size_t)r * j->hp, j->hp, t->k_t + v0 * VL, ATT_TILE, t->p + at,
        ATT_TILE, NULL);
  mul_n((int)(v1 - v0), d, t->d_o + (size_t)r * j->hp, j->hp, t->v_t + v0 * VL, ATT_TILE,
        t->ds + at, ATT_TILE, NULL);
  vi lane;
  for (int i = 0; i < VL; i++)
    lane[i] = i;
  const vf scale = v_set(j->scale);
  const float cap2 = j->cap2;
  for (int64_t i = r; i < r + ATT_ROWS; i++) {
    const vf lse2 = v_set(t->lse2[i]), delta = v_set(t->delta[i]);
    const vi start = (vi){0} + t->start[i], pos = (vi){0} + t->pos[i];
    for (int64_t v = v0; v < v1; v++) {
      float *p = t->p + i * ATT_TILE + v * VL, *ds = t->ds + i * ATT_TILE + v * VL;
      int64_t first = t->key0 + v * VL;
      vf x = v_load(p), slope = scale;
      if (cap2 > 0.0f) {
        x = v_tanh(x);
        slope = scale * (v_set(1.0f) - x * x);
        x = x * v_set(cap2);
      }
      x = x - lse2;
      if (first < t->start[i] || first + VL - 1 > t->pos[i])
        x = v_hide(x, lane + (int32_t)first, start, pos);
      x = v_exp2(x);
      v_store(p, x);
      v_store(ds, x * (v_load(ds) - delta) * slope);
    }
  }
}

/* dK and dV of the key tile (+)= this head's part. */
ATT_FN void bwd_dkv(bwd_tile *t, bool add) {
  size_t hp = t->j->hp;
  int nv = (int)(hp / VL);
  /* blocks of queries that see the keys: both ends grow */
  int64_t n_blocks = (t->nq + ATT_ROWS - 1) / ATT_ROWS, b0 = 0, b1 = 0;
  for (int64_t k = 0; k < ATT_TILE; k += ATT_ROWS) {
    while (b0 < n_blocks && t->v1[b0] <= k / VL)
      b0++;
    while (b1 < n_blocks && t->v0[b1] <= k / VL)
      b1++;
    int64_t q = b0 * ATT_ROWS, n = att_max(b1 - b0, 0) * ATT_ROWS;
    mul_t(nv, n, t->p + q * ATT_TILE + k, ATT_TILE, t->d_o + (size_t)q * hp, hp,
          t->dv + (size_t)k * hp, hp, att_keep(add));
    mul_t(nv, n, t->ds + q * ATT_TILE + k, ATT_TILE, t->q + (size_t)q * hp, hp,
          t->dk + (size_t)k * hp, hp, att_keep(add));
  }
}

ATT_FN void bwd_dq_rows(bwd_tile *t, bool add) {
  size_t hp = t->j->hp;
  for (int64_t r = 0; r < t->nq; r += ATT_ROWS) {
    int64_t k = t->v0[r / ATT_ROWS] * VL, n = t->v1[r / ATT_ROWS] * VL - k;
    mul_n((int)(hp / VL), n, t->ds + r * ATT_TILE + k, ATT_TILE, t->k + (size_t)k * hp, hp,
          t->dq + (size_t)r * hp, hp, att_keep(add));
  }
}

/* dst[i] = src[i], or += when add. */
ATT_INLINE void put_row(float *dst, const float *src, size_t n, bool add) {
  if (!add)
    memcpy(dst, src, n * sizeof *dst);
  else
    for (size_t i = 0; i < n; i++)
      dst[i] += src[i];
}

/* Phase p: query tile i meets the key tile p tiles before its diagonal. So no two tasks of a phase
 * share a row of dq or of dkv, and every row gets its parts in order of phases. Phase 0 covers each
 * of the chunk's own rows once: it writes, later phases add. */
ATT_FN void bwd_task(void *arg, int64_t task, uint32_t worker) {
  const ps__att_job *j = arg;
  const ps__args_attention *a = &j->a;
  uint32_t kv_head = (uint32_t)(task % a->n_kv_heads), group = a->n_heads / a->n_kv_heads;
  size_t d = a->head_dim;
  bwd_tile t;
  bwd_begin(&t, ps__scratch(j->exec, worker), j, task / a->n_kv_heads);
  if (!bwd_keys(&t, kv_head, j->phase))
    return;
  for (uint32_t h = 0; h < group; h++) {
    uint32_t head = kv_head * group + h;
    bwd_queries(&t, head);
    for (int64_t r = 0; r < t.nq; r += ATT_ROWS)
      bwd_scores(&t, r);
    bwd_dkv(&t, h > 0);
    if (!j->want_dq)
      continue;
    bwd_dq_rows(&t, false);
    for (int64_t r = 0; r < t.nq; r++)
      put_row((float *)j->out + (size_t)(t.q0 + r) * j->ldq + head * d, t.dq + (size_t)r * j->hp, d,
              j->phase > 0);
  }
  int64_t end = (int64_t)a->row0 + a->n_tokens;
  for (int64_t r = 0; r < ATT_TILE; r++) {
    if (t.key0 + r < 0 || t.key0 + r >= end)
      continue;
    float *row = j->dkv + (size_t)(t.key0 + r) * j->ldkv + kv_head * d;
    bool add = j->phase > 0 || a->accumulate_dkv;
    put_row(row, t.dk + (size_t)r * j->hp, d, add);
    put_row(row + a->n_kv_heads * d, t.dv + (size_t)r * j->hp, d, add);
  }
}

/* dq of a query tile of a head over all key tiles, kept in fp32 until the one rounding. */
ATT_FN void bwd_dq_task(void *arg, int64_t task, uint32_t worker) {
  const ps__att_job *j = arg;
  const ps__args_attention *a = &j->a;
  uint32_t head = (uint32_t)(task % a->n_heads);
  bwd_tile t;
  bwd_begin(&t, ps__scratch(j->exec, worker), j, att_n_tiles(a) - 1 - task / a->n_heads);
  bwd_queries(&t, head);
  for (int64_t phase = 0; bwd_keys(&t, head / (a->n_heads / a->n_kv_heads), phase); phase++) {
    for (int64_t r = 0; r < t.nq; r += ATT_ROWS)
      bwd_scores(&t, r);
    bwd_dq_rows(&t, phase > 0);
  }
  for (int64_t r = 0; r < t.nq; r++)
    ps__store_f32(ps__elem(j->out, a->dt, (size_t)(t.q0 + r) * j->ldq + (size_t)head * a->head_dim),
                  a->dt, t.dq + (size_t)r * j->hp, a->head_dim);
}
