/* qkv.c - the fused q, k, v product split by use: optional RMSNorm over each head (Qwen3) or over
 * all heads together (OLMo 2), RoPE, and the backward pass.
 *
 * math    y = round(x * rstd * (w + norm_offset)), rstd = 1/sqrt(mean(x^2) + eps) (with qk_norm,
 *         else y = x); at angle a = pos * inv_freq[i], c = attention_factor * cos a,
 *         s = attention_factor * sin a:
 *         out[i] = y[i] c - y[i+h] s,  out[i+h] = y[i+h] c + y[i] s,  i < h = rotary_dim/2;
 *         out[i] = y[i] for i >= rotary_dim. Interleaved, the pair is 2i and 2i+1. With
 *         PS_QK_NORM_LATE the norm is of what RoPE gives. With position_beta q is multiplied by
 *         1 + position_beta ln(1 + floor(pos / position_original)) at the end. With whole_head h is
 *         head_dim/2. With value_norm v = x * rstd; with shared_keys it is of k's x.
 *         Backward: dy by the inverse rotation; xh = x*rstd, g = dy*(w + norm_offset),
 *         dx = rstd*(g - xh*mean(g*xh)), dw = sum of dy*xh over rows, and over heads where they
 *         share a weight.
 * shapes  qkv [T, A+2K], with shared_keys [T, A+K]; q [T,A], kv [T,2K] in dt; dkv [T,2K] fp32;
 *         pos i32 [T]; wq, wk [head_dim], with PS_QK_NORM_ROW [A] and [K].
 * bytes   forward reads and writes qkv once; backward reads dq, dkv (and qkv with qk_norm) and
 *         writes dqkv.
 * determinism  a row is made by one worker; dw: partial sums of fixed tiles of rows (cpu.h),
 *              added in order.
 * reference    tests/test_qkv.py: PyTorch in fp64, transformers' LlamaRotaryEmbedding */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"
#include <math.h>

enum { ROPE_ROWS = 32 }; /* rows that share one filling of the table of sines */

/* Scratch of a worker. Of worker 0's, all use the partial sums. */
typedef struct qkv_scratch {
  float *cos, *sin, *row, *x;   /* [ROPE_ROWS][half] twice, [at once] twice */
  float *v;                     /* [head_dim], with value_norm in the backward pass */
  float *partial_q, *partial_k; /* [tiles][weights], with qk_norm in the backward pass */
} qkv_scratch;

typedef struct qkv_job {
  ps__args_qkv a;
  const ps__cpu_exec *exec;
  const void *qkv, *dq, *wq, *wk;
  const float *dkv;
  const int32_t *pos;
  void *q, *kv, *dqkv;
  float *w; /* both norms' weights as fp32, q's first, in worker 0's scratch */
} qkv_job;

static size_t half_padded(const ps__args_qkv *a) { return ps__round_up(a->rotary_dim / 2, 16); }

/* Elements of a row that are worked on at once, a head or all heads, in whole vectors. */
static size_t at_once(const ps__args_qkv *a) {
  const size_t q = ps__q_norm_elements(a), k = ps__k_norm_elements(a);
  return ps__round_up(q > k ? q : k, 16);
}

static size_t scratch_floats(const ps__args_qkv *a) {
  return 2 * ROPE_ROWS * half_padded(a) + (a->value_norm ? 5 : 4) * at_once(a);
}

size_t ps__cpu_scratch_qkv_split_fwd(const void *args, const ps__scratch_target *target) {
  return ps__round_up(scratch_floats(args) * sizeof(float), 64);
}

size_t ps__cpu_scratch_qkv_split_bwd(const void *args, const ps__scratch_target *target) {
  const ps__args_qkv *a = args;
  const size_t weights = (size_t)ps__q_norm_elements(a) + ps__k_norm_elements(a),
               partial = a->qk_norm ? (size_t)ps__n_row_tiles(a->n_tokens) * weights : 0;
  return ps__round_up((scratch_floats(a) + partial) * sizeof(float), 64);
}

static qkv_scratch scratch_of(const qkv_job *j, uint32_t worker) {
  const ps__args_qkv *a = &j->a;
  size_t h = half_padded(a), d = at_once(a);
  float *p = ps__scratch(j->exec, worker), *first = ps__scratch(j->exec, 0),
        *sums = first + scratch_floats(a);
  return (qkv_scratch){.cos = p,
                       .sin = p + ROPE_ROWS * h,
                       .row = p + 2 * ROPE_ROWS * h,
                       .x = p + 2 * ROPE_ROWS * h + d,
                       .v = p + 2 * ROPE_ROWS * h + 4 * d,
                       .partial_q = sums,
                       .partial_k =
                           sums + (size_t)ps__n_row_tiles(a->n_tokens) * ps__q_norm_elements(a)};
}

/* cosines and sines of pos * inv_freq[i], times @by; n is a multiple of 16. The product and its
 * reduction by multiples of pi/2 are in fp64. pi/2 has two parts, the first of 33 bits: n*hi is
 * exact up to n = 2^20, and beyond as good as the product itself. Taylor's polynomials up to r^11
 * and r^10 leave (pi/4)^12/12! = 1.2e-10, far under half an ulp of fp32 (3e-8). */
PS_CLONES static void rope_angles(float *restrict cosines, float *restrict sines,
                                  const float *inv_freq, int32_t pos, float by, size_t n) {
  typedef double vd __attribute__((vector_size(64)));
  typedef int64_t vl __attribute__((vector_size(64)));
  typedef float vf8 __attribute__((vector_size(32)));
  /* 1.5 * 2^52: adding it rounds to an integer, kept in the low bits */
  const double magic = 6755399441055744.0;
  for (size_t i = 0; i < n; i += 8) {
    vf8 f;
    memcpy(&f, inv_freq + i, sizeof f);
    vd x = __builtin_convertvector(f, vd) * (double)pos;
    vd t = x * 0.63661977236758134 + magic, k = t - magic;
    vd r = (x - k * 1.57079632673412561417) - k * 6.07710050650619224932e-11, z = r * r;
    vd s = z * (-1.0 / 39916800) + 1.0 / 362880;
    s = ((((s * z - 1.0 / 5040) * z + 1.0 / 120) * z - 1.0 / 6) * z) * r + r;
    vd c = z * (-1.0 / 3628800) + 1.0 / 40320;
    c = (((c * z - 1.0 / 720) * z + 1.0 / 24) * z - 0.5) * z + 1.0;
    vl quadrant = (vl)t, swap = -(quadrant & 1), si = ((vl)c & swap) | ((vl)s & ~swap),
       ci = ((vl)s & swap) | ((vl)c & ~swap);
    vf8 sf = __builtin_convertvector((vd)(si ^ ((quadrant & 2) << 62)), vf8);
    vf8 cf = __builtin_convertvector((vd)(ci ^ (((quadrant + 1) & 2) << 62)), vf8);
    sf *= by;
    cf *= by;
    memcpy(sines + i, &sf, sizeof sf);
    memcpy(cosines + i, &cf, sizeof cf);
  }
}

static void fill_table(const qkv_job *j, const qkv_scratch *s, int64_t first, int64_t end) {
  size_t h = half_padded(&j->a);
  for (int64_t t = first; t < end; t++)
    rope_angles(s->cos + (size_t)(t - first) * h, s->sin + (size_t)(t - first) * h, j->a.inv_freq,
                j->pos[t], j->a.attention_factor, h);
}

/* x of one head turned by the angles, @half pairs that are @apart; backwards with sign -1. */
PS_CLONES static void rotate(float *restrict x, const float *cosines, const float *sines,
                             size_t half, size_t apart, float sign) {
  float *lo = x, *hi = x + apart;
  size_t i = 0;
  for (; i + PS_LANES <= half; i += PS_LANES) {
    ps__v a = ps__v_load(lo + i), b = ps__v_load(hi + i), c = ps__v_load(cosines + i),
          s = ps__v_load(sines + i) * sign;
    ps__v_store(lo + i, a * c - b * s);
    ps__v_store(hi + i, b * c + a * s);
  }
  for (; i < half; i++) {
    float a = lo[i], b = hi[i], c = cosines[i], s = sines[i] * sign;
    lo[i] = a * c - b * s;
    hi[i] = b * c + a * s;
  }
}

/* The same of neighbours. */
PS_CLONES static void rotate_neighbours(float *restrict x, const float *cosines, const float *sines,
                                        size_t half, size_t apart, float sign) {
  for (size_t i = 0; i < half; i++) {
    float a = x[2 * i], b = x[2 * i + 1], c = cosines[i], s = sines[i] * sign;
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = b * c + a * s;
  }
}

void ps__rope_angles(float *cosines, float *sines, const float *inv_freq, int32_t pos, float by,
                     size_t n) {
  rope_angles(cosines, sines, inv_freq, pos, by, n);
}

void ps__rope_rotate(float *x, const float *cosines, const float *sines, size_t half, float sign,
                     bool interleaved) {
  if (interleaved)
    rotate_neighbours(x, cosines, sines, half, half, sign);
  else
    rotate(x, cosines, sines, half, half, sign);
}

/* What q of the token is multiplied by. */
static float position_scale(const qkv_job *j, int64_t t) {
  const ps__args_qkv *a = &j->a;
  if (!(a->position_beta > 0.0f))
    return 1.0f;
  return 1.0f +
         a->position_beta * logf(1.0f + floorf((float)j->pos[t] / (float)a->position_original));
}

static void scale_row(float *x, size_t n, float by) {
  for (size_t i = 0; by != 1.0f && i < n; i++)
    x[i] *= by;
}

/* sum of a[i]*b[i]: 16 lanes, then their tree. */
PS_VEC float dot(const float *a, const float *b, size_t n) {
  ps__v sum = ps__v_set(0.0f);
  for (size_t i = 0; i < n; i += PS_LANES)
    sum += ps__v_read(a, PS_F32, i, n, 0.0f) * ps__v_read(b, PS_F32, i, n, 0.0f);
  return ps__v_sum(sum);
}

/* @w NULL: without weights. */
PS_CLONES static void norm_row(float *restrict x, const float *w, size_t d, float eps) {
  float rstd = 1.0f / sqrtf(dot(x, x, d) / (float)d + eps);
  size_t i = 0;
  for (; !w && i < d; i++)
    x[i] *= rstd;
  for (; i + PS_LANES <= d; i += PS_LANES)
    ps__v_store(x + i, ps__v_load(x + i) * rstd * ps__v_load(w + i));
  for (; i < d; i++)
    x[i] = x[i] * rstd * w[i];
}

/* dy becomes dx; dw += dy * xh; x becomes xh. */
PS_CLONES static void norm_row_bwd(float *restrict dy, float *restrict x, const float *w,
                                   float *restrict dw, size_t d, float eps) {
  float rstd = 1.0f / sqrtf(dot(x, x, d) / (float)d + eps);
  size_t i = 0;
  for (; i + PS_LANES <= d; i += PS_LANES) {
    ps__v xh = ps__v_load(x + i) * rstd, g = ps__v_load(dy + i);
    ps__v_store(x + i, xh);
    ps__v_store(dw + i, ps__v_load(dw + i) + g * xh);
    ps__v_store(dy + i, g * ps__v_load(w + i));
  }
  for (; i < d; i++) {
    x[i] *= rstd;
    dw[i] += dy[i] * x[i];
    dy[i] *= w[i];
  }
  float mean = dot(dy, x, d) / (float)d;
  for (i = 0; i + PS_LANES <= d; i += PS_LANES)
    ps__v_store(dy + i, (ps__v_load(dy + i) - ps__v_load(x + i) * mean) * rstd);
  for (; i < d; i++)
    dy[i] = (dy[i] - x[i] * mean) * rstd;
}

/* Every head of a row of n elements turned; backwards with sign -1. */
static void rotate_heads(const qkv_job *j, const qkv_scratch *s, float *row, size_t n, int64_t slot,
                         float sign) {
  const size_t h = half_padded(&j->a), half = j->a.rotary_dim / 2,
               apart = j->a.whole_head ? j->a.head_dim / 2 : half;
  void (*turn)(float *restrict, const float *, const float *, size_t, size_t, float) =
      j->a.interleaved ? rotate_neighbours : rotate;
  for (size_t c = 0; c < n; c += j->a.head_dim)
    turn(row + c, s->cos + (size_t)slot * h, s->sin + (size_t)slot * h, half, apart, sign);
}

/* A row rounded to the dtype of the activations. */
static void round_row(const qkv_job *j, void *room, float *row, size_t n) {
  if (j->a.dt == PS_F32)
    return;
  ps__store_f32(room, j->a.dt, row, n);
  ps__load_f32(row, room, j->a.dt, n);
}

/* Norm and RoPE of q's or k's elements of a row. */
static void fwd_row(const qkv_job *j, const qkv_scratch *s, const float *w, size_t d,
                    int64_t slot) {
  const bool late = j->a.qk_norm == PS_QK_NORM_LATE;
  if (late) {
    rotate_heads(j, s, s->row, d, slot, 1.0f);
    round_row(j, s->x, s->row, d);
  }
  if (j->a.qk_norm)
    norm_row(s->row, w, d, j->a.eps);
  if (late)
    return;
  if (j->a.qk_norm)
    round_row(j, s->x, s->row, d);
  rotate_heads(j, s, s->row, d, slot, 1.0f);
}

/* v of a row from its columns @v of qkv. */
static void fwd_values(const qkv_job *j, const qkv_scratch *s, const void *v, void *to, size_t n) {
  const size_t d = j->a.head_dim;
  const uint32_t dt = j->a.dt;
  if (!j->a.value_norm) {
    memcpy(to, v, n * ps__dt_bytes(dt));
    return;
  }
  for (size_t c = 0; c < n; c += d) {
    ps__load_f32(s->row, ps__celem(v, dt, c), dt, d);
    norm_row(s->row, NULL, d, j->a.eps);
    ps__store_f32(ps__elem(to, dt, c), dt, s->row, d);
  }
}

static void fwd_rows(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const qkv_job *j = arg;
  const ps__args_qkv *a = &j->a;
  qkv_scratch s = scratch_of(j, worker);
  const size_t n_q = (size_t)a->n_heads * a->head_dim, n_k = (size_t)a->n_kv_heads * a->head_dim,
               w_q = ps__q_norm_elements(a), w_k = ps__k_norm_elements(a),
               width = ps__qkv_elements(a);
  fill_table(j, &s, first, end);
  for (int64_t t = first; t < end; t++) {
    for (size_t c = 0, d; c < n_q + n_k; c += d) {
      d = c < n_q ? w_q : w_k;
      ps__load_f32(s.row, ps__celem(j->qkv, a->dt, (size_t)t * width + c), a->dt, d);
      fwd_row(j, &s, c < n_q ? j->w : j->w + w_q, d, t - first);
      if (c < n_q)
        scale_row(s.row, d, position_scale(j, t));
      void *to = c < n_q ? ps__elem(j->q, a->dt, (size_t)t * n_q + c)
                         : ps__elem(j->kv, a->dt, (size_t)t * 2 * n_k + c - n_q);
      ps__store_f32(to, a->dt, s.row, d);
    }
    fwd_values(j, &s, ps__celem(j->qkv, a->dt, (size_t)t * width + width - n_k),
               ps__elem(j->kv, a->dt, (size_t)t * 2 * n_k + n_k), n_k);
  }
}

/* dx of v's norm, in @g: x becomes xh. */
PS_CLONES static void value_norm_bwd(float *restrict g, float *restrict x, size_t d, float eps) {
  const float rstd = 1.0f / sqrtf(dot(x, x, d) / (float)d + eps);
  for (size_t i = 0; i < d; i++)
    x[i] *= rstd;
  const float mean = dot(g, x, d) / (float)d;
  for (size_t i = 0; i < d; i++)
    g[i] = (g[i] - x[i] * mean) * rstd;
}

/* dx of v, element @at of qkv on, in s->v. */
static void bwd_value(const qkv_job *j, const qkv_scratch *s, const float *dv, size_t at) {
  const size_t d = j->a.head_dim;
  memcpy(s->v, dv, d * sizeof(float));
  ps__load_f32(s->x, ps__celem(j->qkv, j->a.dt, at), j->a.dt, d);
  value_norm_bwd(s->v, s->x, d, j->a.eps);
}

/* dqkv of row t; the norms' partial sums are those of the row's tile. */
static void bwd_row(const qkv_job *j, const qkv_scratch *s, int64_t t, int64_t slot, float *dwq,
                    float *dwk) {
  const ps__args_qkv *a = &j->a;
  const size_t n_q = (size_t)a->n_heads * a->head_dim, n_k = (size_t)a->n_kv_heads * a->head_dim,
               w_q = ps__q_norm_elements(a), w_k = ps__k_norm_elements(a),
               at = (size_t)t * ps__qkv_elements(a);
  const float *dkv = j->dkv + (size_t)t * 2 * n_k;
  const bool late = a->qk_norm == PS_QK_NORM_LATE;
  for (size_t c = 0, d; c < n_q + n_k; c += d) {
    d = c < n_q ? w_q : w_k;
    if (c < n_q)
      ps__load_f32(s->row, ps__celem(j->dq, a->dt, (size_t)t * n_q + c), a->dt, d);
    else
      memcpy(s->row, dkv + c - n_q, d * sizeof(float));
    if (c < n_q)
      scale_row(s->row, d, position_scale(j, t));
    if (!late)
      rotate_heads(j, s, s->row, d, slot, -1.0f);
    if (a->qk_norm) {
      ps__load_f32(s->x, ps__celem(j->qkv, a->dt, at + c), a->dt, d);
      if (late)
        rotate_heads(j, s, s->x, d, slot, 1.0f);
      norm_row_bwd(s->row, s->x, c < n_q ? j->w : j->w + w_q, c < n_q ? dwq : dwk, d, a->eps);
    }
    if (late)
      rotate_heads(j, s, s->row, d, slot, -1.0f);
    if (c >= n_q && a->shared_keys) {
      bwd_value(j, s, dkv + n_k + c - n_q, at + c);
      for (size_t i = 0; i < d; i++)
        s->row[i] += s->v[i];
    }
    ps__store_f32(ps__elem(j->dqkv, a->dt, at + c), a->dt, s->row, d);
  }
  if (!a->value_norm)
    ps__store_f32(ps__elem(j->dqkv, a->dt, at + n_q + n_k), a->dt, dkv + n_k, n_k);
  for (size_t c = 0; a->value_norm && !a->shared_keys && c < n_k; c += a->head_dim) {
    bwd_value(j, s, dkv + n_k + c, at + n_q + n_k + c);
    ps__store_f32(ps__elem(j->dqkv, a->dt, at + n_q + n_k + c), a->dt, s->v, a->head_dim);
  }
}

static void bwd_rows(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const qkv_job *j = arg;
  qkv_scratch s = scratch_of(j, worker);
  const size_t w_q = ps__q_norm_elements(&j->a), w_k = ps__k_norm_elements(&j->a),
               tile = (size_t)(first / ps__row_tile_rows(j->a.n_tokens));
  float *dwq = s.partial_q + tile * w_q, *dwk = s.partial_k + tile * w_k;
  if (j->a.qk_norm) {
    memset(dwq, 0, w_q * sizeof(float));
    memset(dwk, 0, w_k * sizeof(float));
  }
  for (int64_t t = first; t < end; t++) {
    int64_t slot = (t - first) % ROPE_ROWS;
    if (slot == 0)
      fill_table(j, &s, t, t + ROPE_ROWS < end ? t + ROPE_ROWS : end);
    bwd_row(j, &s, t, slot, dwq, dwk);
  }
}

static void start(qkv_job *j, const ps_launch *l, const void *wq, const void *wk) {
  const ps__args_qkv *a = l->args;
  j->a = *a;
  j->exec = l->exec;
  qkv_scratch s = scratch_of(j, 0);
  const size_t w_q = ps__q_norm_elements(a), w_k = ps__k_norm_elements(a);
  j->w = s.x + at_once(a);
  if (a->qk_norm) {
    ps__load_f32(j->w, wq, a->dt, w_q);
    ps__load_f32(j->w + w_q, wk ? wk : wq, a->dt, w_k);
    for (size_t i = 0; i < w_q + w_k && a->norm_offset != 0.0f; i++)
      j->w[i] += a->norm_offset;
  }
}

ps_status ps__cpu_qkv_split_fwd(const ps_launch *l) {
  const ps__args_qkv *a = l->args;
  const uint32_t w = a->n_kv_heads ? 4 : 3; /* without keys and values q stands in for them */
  qkv_job j = {.qkv = l->ptr[0], .pos = l->ptr[1], .q = l->ptr[2], .kv = l->ptr[w - 1]};
  start(&j, l, a->qk_norm ? l->ptr[w] : NULL, a->qk_norm && a->n_kv_heads ? l->ptr[w + 1] : NULL);
  ps__cpu_rows(j.exec, a->n_tokens, ROPE_ROWS, fwd_rows, &j);
  return PS_OK;
}

ps_status ps__cpu_qkv_split_bwd(const ps_launch *l) {
  const ps__args_qkv *a = l->args;
  const uint32_t kv = a->n_kv_heads ? 1 : 0; /* without keys and values dq stands in for theirs */
  qkv_job j = {.dq = l->ptr[0], .dkv = l->ptr[kv], .pos = l->ptr[kv + 1], .dqkv = l->ptr[kv + 2]};
  if (a->qk_norm)
    j.qkv = l->ptr[kv + 3];
  start(&j, l, a->qk_norm ? l->ptr[kv + 4] : NULL, a->qk_norm && kv ? l->ptr[kv + 5] : NULL);
  ps__cpu_rows(j.exec, a->n_tokens, ps__row_tile_rows(a->n_tokens), bwd_rows, &j);
  if (a->qk_norm) {
    qkv_scratch s = scratch_of(&j, 0);
    int64_t tiles = ps__n_row_tiles(a->n_tokens);
    ps__add_partials(j.exec, l->ptr[kv ? 7 : 5], a->dt, s.partial_q, tiles, ps__q_norm_elements(a),
                     a->accumulate_dw);
    if (kv)
      ps__add_partials(j.exec, l->ptr[8], a->dt, s.partial_k, tiles, ps__k_norm_elements(a),
                       a->accumulate_dw);
  }
  return PS_OK;
}
