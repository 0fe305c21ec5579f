/* conv.c - short causal convolutions over rows, and the norm with a gate: what is around the gated
 * delta rule (delta.c). */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"
#include <math.h>

typedef struct conv_job {
  ps__args_conv a;
  const char *x, *w, *before, *dy;
  const int32_t *doc_start; /* NULL: one document, from group row 0 on */
  char *y, *dx, *dw;
  float *carry;
} conv_job;

#define silu_sig(x) (1.0f / (1.0f + ps__v_exp(-(x))))

/* w[c .. c+16, tap] */
PS_VEC void conv_taps(ps__v *tap, const conv_job *j, size_t c, uint32_t dt) {
  const size_t channels = j->a.channels, width = j->a.width;
  for (size_t k = 0; k < width; k++) {
    float t[PS_LANES] = {0};
    for (size_t i = 0; i < PS_LANES && c + i < channels; i++)
      t[i] = ps__load1_f32(j->w, dt, (c + i) * width + k);
    tap[k] = ps__v_load(t);
  }
}

/* Channels c .. c+16 of x at the chunk's row @t, which may be negative. */
PS_VEC void conv_x(ps__v *v, const conv_job *j, int64_t t, size_t c, uint32_t dt) {
  const size_t n = j->a.channels, bytes = n * ps__dt_bytes(dt);
  const char *row =
      t >= 0 ? j->x + (size_t)t * bytes : j->before + (size_t)(t + (int64_t)j->a.width - 1) * bytes;
  *v = ps__v_read(row, dt, c, n, 0.0f);
}

/* Whether the row that tap @k of row @t takes is of the same document. */
static inline bool conv_sees(const conv_job *j, int64_t t, uint32_t k) {
  return t - (int64_t)(j->a.width - 1) + k + j->a.row0 >= (j->doc_start ? j->doc_start[t] : 0);
}

PS_VEC void conv_sum(ps__v *p, const conv_job *j, const ps__v *tap, int64_t t, size_t c,
                     uint32_t dt) {
  const uint32_t width = j->a.width;
  *p = ps__v_set(0.0f);
  for (uint32_t k = 0; k < width; k++)
    if (conv_sees(j, t, k)) {
      ps__v x;
      conv_x(&x, j, t - (int64_t)(width - 1) + k, c, dt);
      *p += tap[k] * x;
    }
}

PS_VEC void conv_fwd_rows(const conv_job *j, int64_t first, int64_t end, uint32_t dt) {
  const size_t n = j->a.channels, bytes = n * ps__dt_bytes(dt);
  for (size_t c = 0; c < n; c += PS_LANES) {
    ps__v tap[PS_MAX_CONV], p;
    conv_taps(tap, j, c, dt);
    for (int64_t t = first; t < end; t++) {
      conv_sum(&p, j, tap, t, c, dt);
      ps__v_write(j->y + (size_t)t * bytes, dt, c, n, p * silu_sig(p));
    }
  }
}

PS_CLONES static void conv_fwd_run(const conv_job *j, int64_t first, int64_t end) {
  PS__BY_DTYPE(j->a.dt, DT, conv_fwd_rows(j, first, end, DT));
}
static void conv_fwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  conv_fwd_run(arg, first, end);
}

static conv_job conv_job_of(const ps_launch *l) {
  return (conv_job){.a = *(const ps__args_conv *)l->args,
                    .x = l->ptr[0],
                    .w = l->ptr[1],
                    .doc_start = l->ptr[2],
                    .before = l->ptr[3]};
}

/* conv_fwd
 * math    p[t,c] = sum_k w[c,k] x[t-(W-1)+k,c], k ascending; y = p / (1 + exp(-p)); fp32 inside,
 *         one rounding at the store
 * shapes  x, y [T,C], w [C,W], before and after [W-1,C], all of dt
 * bytes   2*T*C*sizeof(dt).   determinism  bitwise: each element alone */
ps_status ps__cpu_conv_fwd(const ps_launch *l) {
  conv_job j = conv_job_of(l);
  const size_t bytes = j.a.channels * ps__dt_bytes(j.a.dt);
  PS_TRY(ps__cpu_check_documents(j.doc_start, j.a.n_tokens, j.a.row0, "conv_fwd"));
  j.y = l->ptr[4];
  ps__cpu_rows(l->exec, j.a.n_tokens, ps__block_rows(j.a.channels), conv_fwd_task, &j);
  char *after = l->ptr[5];
  for (int64_t i = 0; i < (int64_t)j.a.width - 1; i++) { /* group row row0 + t */
    const int64_t t = (int64_t)j.a.n_tokens - (j.a.width - 1) + i;
    if (t >= 0)
      memcpy(after + (size_t)i * bytes, j.x + (size_t)t * bytes, bytes);
    else if (j.a.row0)
      memcpy(after + (size_t)i * bytes, j.before + (size_t)(i + j.a.n_tokens) * bytes, bytes);
    else
      memset(after + (size_t)i * bytes, 0, bytes);
  }
  return PS_OK;
}

/* ---- of several sequences -------------------------------------------------------------------- */

typedef struct conv_cached_job {
  conv_job all; /* of all rows */
  const int32_t *sequence, *pos;
  char *cache;
} conv_cached_job;

/* The cache of row @t's sequence. */
static char *conv_cache(const conv_cached_job *j, int64_t t) {
  const ps__args_conv *a = &j->all.a;
  return j->cache + (size_t)j->sequence[t] * (a->width - 1) * a->channels * ps__dt_bytes(a->dt);
}

static void conv_cached_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const conv_cached_job *j = arg;
  const size_t bytes = j->all.a.channels * ps__dt_bytes(j->all.a.dt);
  for (int64_t t = first, last; t < end; t = last) {
    int64_t start = t;
    while (ps__cpu_row_continues(j->sequence, j->pos, start))
      start--;
    for (last = t + 1; last < end && ps__cpu_row_continues(j->sequence, j->pos, last); last++)
      ;
    if (j->pos[t] < 0) {
      memset(j->all.y + (size_t)t * bytes, 0, bytes);
      continue;
    }
    conv_job of = j->all;
    of.a.row0 = (uint32_t)j->pos[start];
    of.x += (size_t)start * bytes;
    of.y += (size_t)start * bytes;
    of.before = conv_cache(j, t);
    conv_fwd_run(&of, t - start, last - start);
  }
}

/* conv_cached
 * math    conv_fwd's of each sequence's rows, the rows before them from its cache
 * shapes  x, y [T,C], w [C,W], cache [sequences,W-1,C], all of dt
 * bytes   2*T*C*sizeof(dt) and the cache of each sequence
 * determinism  bitwise: each element alone, with conv_fwd's bits however rows are cut in calls */
ps_status ps__cpu_conv_cached(const ps_launch *l) {
  const ps__args_conv *a = l->args;
  const size_t bytes = a->channels * ps__dt_bytes(a->dt), tail = a->width - 1;
  conv_cached_job j = {.all = {.a = *a, .x = l->ptr[0], .w = l->ptr[1], .y = l->ptr[3]},
                       .sequence = l->ptr[2],
                       .pos = l->ptr[4],
                       .cache = l->ptr[5]};
  PS_TRY(ps__cpu_check_rows_of_sequences(j.sequence, j.pos, a->n_tokens, "conv_cached"));
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(a->channels), conv_cached_task, &j);
  for (int64_t t = 0; t < a->n_tokens; t++) { /* row after row enters, but for those that leave */
    size_t more = 0;
    while (more < tail && t + 1 + (int64_t)more < a->n_tokens &&
           ps__cpu_row_continues(j.sequence, j.pos, t + 1 + (int64_t)more))
      more++;
    if (j.pos[t] < 0 || more == tail)
      continue;
    char *cache = conv_cache(&j, t);
    memmove(cache, cache + bytes, (tail - 1) * bytes);
    memcpy(cache + (tail - 1) * bytes, j.all.x + (size_t)t * bytes, bytes);
  }
  return PS_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* The gradient of row t + W-1-k passes to row t by tap k. Rows are taken from the last to the
 * first: ds[u % 8] is the gradient of p of row u, kept for the W rows from t on. */
PS_VEC void conv_bwd_channels(const conv_job *j, size_t c, uint32_t dt) {
  const size_t n = j->a.channels, bytes = n * ps__dt_bytes(dt);
  const int64_t width = j->a.width, rows = j->a.n_tokens;
  ps__v tap[PS_MAX_CONV], ds[PS_MAX_CONV], dw[PS_MAX_CONV] = {{0}}, part[PS_MAX_CONV] = {{0}};
  ps__v in[PS_MAX_CONV], x;
  conv_taps(tap, j, c, dt);
  for (int64_t i = 0; i < width - 1; i++)
    in[i] = j->a.accumulate_carry ? ps__v_read(j->carry + (size_t)i * n, PS_F32, c, n, 0.0f)
                                  : ps__v_set(0.0f);
  for (int64_t t = rows - 1; t >= 1 - width; t--) {
    const int64_t from_next = t - (rows - (width - 1)); /* its row of the next chunk's carry */
    ps__v d = from_next >= 0 ? in[from_next] : ps__v_set(0.0f);
    if (t >= 0) {
      ps__v p, sig;
      conv_sum(&p, j, tap, t, c, dt);
      sig = silu_sig(p);
      ds[t % PS_MAX_CONV] =
          ps__v_read(j->dy + (size_t)t * bytes, dt, c, n, 0.0f) * sig * (1.0f + p * (1.0f - sig));
      for (uint32_t k = 0; k < width; k++)
        if (conv_sees(j, t, k)) {
          conv_x(&x, j, t - (width - 1) + k, c, dt);
          part[k] += ds[t % PS_MAX_CONV] * x;
        }
      if (t % 64 == 0)
        for (int64_t k = 0; k < width; k++) {
          dw[k] += part[k];
          part[k] = ps__v_set(0.0f);
        }
    }
    for (int64_t k = 0; k < width; k++) {
      const int64_t u = t + (width - 1) - k;
      if (u >= 0 && u < rows && conv_sees(j, u, (uint32_t)k))
        d += tap[k] * ds[u % PS_MAX_CONV];
    }
    if (t >= 0)
      ps__v_write(j->dx + (size_t)t * bytes, dt, c, n, d);
    else
      ps__v_write(j->carry + (size_t)(t + width - 1) * n, PS_F32, c, n, d);
  }
  for (size_t i = 0; i < PS_LANES && c + i < n; i++)
    for (int64_t k = 0; k < width; k++) {
      const size_t at = (c + i) * (size_t)width + (size_t)k;
      const float old = j->a.accumulate_dw ? ps__load1_f32(j->dw, dt, at) : 0.0f;
      ps__store1_f32(j->dw, dt, at, old + dw[k][i]);
    }
}

PS_CLONES static void conv_bwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const conv_job *j = arg;
  for (int64_t i = first; i < end; i++)
    PS__BY_DTYPE(j->a.dt, DT, conv_bwd_channels(j, (size_t)i * PS_LANES, DT));
}

/* conv_bwd
 * math    dp = dy sig (1 + p (1 - sig)), p as in conv_fwd; dx[t] = sum_k w[k] dp[t+(W-1)-k] over
 *         rows that see t, those of the next chunk in carry; dw[k] (+)= sum_t dp[t] x[t-(W-1)+k]
 * shapes  as conv_fwd; carry f32 [W-1,C]
 * bytes   3*T*C*sizeof(dt)
 * determinism  bitwise: a channel is one thread's; sums of dw are of 64 rows, then of those */
ps_status ps__cpu_conv_bwd(const ps_launch *l) {
  conv_job j = conv_job_of(l);
  PS_TRY(ps__cpu_check_documents(j.doc_start, j.a.n_tokens, j.a.row0, "conv_bwd"));
  j.dy = l->ptr[4];
  j.carry = l->ptr[5];
  j.dx = l->ptr[6];
  j.dw = l->ptr[7];
  ps__cpu_rows(l->exec, (j.a.channels + PS_LANES - 1) / PS_LANES, 1, conv_bwd_task, &j);
  return PS_OK;
}

/* ---- the norm with a gate -------------------------------------------------------------------- */

typedef struct gate_job {
  ps__args_gated_norm a;
  const char *x, *z, *w, *dy;
  char *y, *dx, *dz;
  float *partial; /* [tiles, d]: dw of each tile of rows */
} gate_job;

PS_VEC float gate_rstd(const char *x, size_t d, uint32_t dt, float eps) {
  ps__v sum = {0};
  for (size_t i = 0; i < d; i += PS_LANES) {
    const ps__v v = ps__v_read(x, dt, i, d, 0.0f);
    sum += v * v;
  }
  return 1.0f / sqrtf(ps__v_sum(sum) / (float)d + eps);
}

/* Heads [first, end) of all rows, one after the other. */
PS_VEC void gate_fwd_heads(const gate_job *j, int64_t first, int64_t end, uint32_t dt) {
  const size_t d = j->a.head_dim, bytes = d * ps__dt_bytes(dt);
  for (int64_t h = first; h < end; h++) {
    const char *x = j->x + (size_t)h * bytes, *z = j->z + (size_t)h * bytes;
    const float rstd = gate_rstd(x, d, dt, j->a.eps);
    for (size_t i = 0; i < d; i += PS_LANES) {
      const ps__v g = ps__v_read(z, dt, i, d, 0.0f);
      ps__v_write(j->y + (size_t)h * bytes, dt, i, d,
                  ps__v_read(x, dt, i, d, 0.0f) * rstd * ps__v_read(j->w, dt, i, d, 0.0f) *
                      (g * silu_sig(g)));
    }
  }
}

PS_VEC void gate_bwd_heads(const gate_job *j, int64_t first, int64_t end, float *dw, uint32_t dt) {
  const size_t d = j->a.head_dim, bytes = d * ps__dt_bytes(dt);
  for (int64_t h = first; h < end; h++) {
    const char *x = j->x + (size_t)h * bytes, *z = j->z + (size_t)h * bytes,
               *dy = j->dy + (size_t)h * bytes;
    const float rstd = gate_rstd(x, d, dt, j->a.eps);
    ps__v dot = {0};
    for (size_t i = 0; i < d; i += PS_LANES) {
      const ps__v g = ps__v_read(z, dt, i, d, 0.0f), s = g * silu_sig(g);
      dot += ps__v_read(dy, dt, i, d, 0.0f) * s * ps__v_read(j->w, dt, i, d, 0.0f) *
             (ps__v_read(x, dt, i, d, 0.0f) * rstd);
    }
    const float mean = ps__v_sum(dot) / (float)d;
    for (size_t i = 0; i < d; i += PS_LANES) {
      const ps__v g = ps__v_read(z, dt, i, d, 0.0f), sig = silu_sig(g),
                  e = ps__v_read(dy, dt, i, d, 0.0f), w = ps__v_read(j->w, dt, i, d, 0.0f),
                  n = ps__v_read(x, dt, i, d, 0.0f) * rstd;
      ps__v_write(j->dx + (size_t)h * bytes, dt, i, d, (e * (g * sig) * w - n * mean) * rstd);
      ps__v_write(j->dz + (size_t)h * bytes, dt, i, d, e * w * n * sig * (1.0f + g * (1.0f - sig)));
      ps__v_write(dw, PS_F32, i, d, ps__v_read(dw, PS_F32, i, d, 0.0f) + e * n * (g * sig));
    }
  }
}

PS_CLONES static void gate_fwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const gate_job *j = arg;
  PS__BY_DTYPE(j->a.dt, DT, gate_fwd_heads(j, first, end, DT));
}
PS_CLONES static void gate_bwd_run(const gate_job *j, int64_t first, int64_t end, float *dw) {
  PS__BY_DTYPE(j->a.dt, DT, gate_bwd_heads(j, first, end, dw, DT));
}
static uint32_t gate_rows(const ps__args_gated_norm *a) { return a->n_tokens * a->n_heads; }
static void gate_bwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const gate_job *j = arg;
  float *dw = j->partial + (size_t)(first / ps__row_tile_rows(gate_rows(&j->a))) * j->a.head_dim;
  memset(dw, 0, j->a.head_dim * sizeof *dw);
  gate_bwd_run(j, first, end, dw);
}

/* gated_norm_fwd
 * math    y = x rstd w silu(z) over each head, rstd = 1/sqrt(mean(x^2) + eps); fp32 inside, one
 *         rounding at the store
 * shapes  x, z, y [T,n_heads*d], w [d], all of dt
 * bytes   3*T*n_heads*d*sizeof(dt).   determinism  bitwise: a head's sum has 16 lanes and a tree */
ps_status ps__cpu_gated_norm_fwd(const ps_launch *l) {
  gate_job j = {*(const ps__args_gated_norm *)l->args, .x = l->ptr[0], .z = l->ptr[1],
                .w = l->ptr[2], .y = l->ptr[3]};
  ps__cpu_rows(l->exec, gate_rows(&j.a), ps__block_rows(j.a.head_dim), gate_fwd_task, &j);
  return PS_OK;
}

/* Partial sums of all tiles lie in worker 0's scratch. */
size_t ps__cpu_scratch_gated_norm_bwd(const void *args, const ps__scratch_target *target) {
  const ps__args_gated_norm *a = args;
  return ps__round_up((size_t)ps__n_row_tiles(gate_rows(a)) * a->head_dim * sizeof(float), 64);
}

/* gated_norm_bwd
 * math    n = x rstd, s = silu(z), e = dy s w: dx = rstd (e - n mean(e n)); dz = dy w n silu'(z);
 *         dw (+)= sum over rows and heads of dy n s
 * shapes  as gated_norm_fwd
 * bytes   5*T*n_heads*d*sizeof(dt); scratch: at most 64 tiles * d fp32
 * determinism  bitwise: heads of rows are cut in tiles by shape, as rmsnorm_bwd's rows are */
ps_status ps__cpu_gated_norm_bwd(const ps_launch *l) {
  gate_job j = {*(const ps__args_gated_norm *)l->args,
                .x = l->ptr[0],
                .z = l->ptr[1],
                .w = l->ptr[2],
                .dy = l->ptr[3],
                .dx = l->ptr[4],
                .dz = l->ptr[5],
                .partial = ps__scratch(l->exec, 0)};
  const uint32_t rows = gate_rows(&j.a);
  ps__cpu_rows(l->exec, rows, ps__row_tile_rows(rows), gate_bwd_task, &j);
  ps__add_partials(l->exec, l->ptr[6], j.a.dt, j.partial, ps__n_row_tiles(rows), j.a.head_dim,
                   j.a.accumulate_dw);
  return PS_OK;
}
