/* mla.c - latent attention's queries, keys and values by head, and its values' padding.
 *
 * math    ops.h. Rotated parts are turned as in qkv.c; the other elements are moved. dkr is the sum
 *         over the heads, in their order, turned back once.
 * shapes  x, y [T,H d], kvb, dkvb [T,H (dn+dv)], kr, dkr [T,dr] in dt; kv [T,2 H d] in dt, dkv
 *         likewise in fp32; pos i32 [T]
 * bytes   each operand once
 * determinism  a row is made by one worker.   reference  tests/test_op_cases.py */
#include "kernels/cpu/cpu.h"
#include <string.h>

typedef struct mla_job {
  const ps__args_mla *a;
  size_t d, each; /* of a head; each: bytes of an element */
  const char *from, *kr;
  const float *dkv;
  const int32_t *pos;
  char *to, *dkr;
} mla_job;

typedef struct mla_angles {
  float cos[PS_ROPE_PAIRS], sin[PS_ROPE_PAIRS];
} mla_angles;

static mla_job job_of(const ps__args_mla *a) {
  return (mla_job){.a = a, .d = (size_t)a->nope_dim + a->rotary_dim, .each = ps__dt_bytes(a->dt)};
}

static void angles_of(mla_angles *to, const mla_job *j, int64_t t) {
  const ps__args_mla *a = j->a;
  ps__rope_angles(to->cos, to->sin, a->inv_freq, j->pos[t], a->attention_factor,
                  ps__round_up(a->rotary_dim / 2, 16));
}

/* The rotated part of a head from @from to @to; backwards with sign -1. */
static void turn(const mla_job *j, const mla_angles *angles, char *to, const char *from,
                 float sign) {
  float x[2 * PS_ROPE_PAIRS];
  const uint32_t n = j->a->rotary_dim;
  ps__load_f32(x, from, j->a->dt, n);
  ps__rope_rotate(x, angles->cos, angles->sin, n / 2, sign, j->a->interleaved);
  ps__store_f32(to, j->a->dt, x, n);
}

static void turn_rows(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const mla_job *j = arg;
  const size_t bytes = j->d * j->each, nope = j->a->nope_dim * j->each;
  mla_angles angles;
  for (int64_t t = first; t < end; t++) {
    angles_of(&angles, j, t);
    for (uint32_t h = 0; h < j->a->n_heads; h++) {
      const size_t at = ((size_t)t * j->a->n_heads + h) * bytes;
      memcpy(j->to + at, j->from + at, nope);
      turn(j, &angles, j->to + at + nope, j->from + at + nope, j->a->inverse ? -1.0f : 1.0f);
    }
  }
}

ps_status ps__cpu_mla_turn(const ps_launch *l) {
  mla_job j = job_of(l->args);
  j.from = l->ptr[0];
  j.pos = l->ptr[1];
  j.to = l->ptr[2];
  ps__cpu_rows(l->exec, j.a->n_tokens, 32, turn_rows, &j);
  return PS_OK;
}

static void kv_fwd_rows(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const mla_job *j = arg;
  const ps__args_mla *a = j->a;
  const size_t bytes = j->d * j->each, nope = a->nope_dim * j->each, value = a->value_dim * j->each,
               rope = a->rotary_dim * j->each;
  mla_angles angles;
  for (int64_t t = first; t < end; t++) {
    char *key = j->to + (size_t)t * 2 * a->n_heads * bytes, *v = key + a->n_heads * bytes;
    const char *from = j->from + (size_t)t * a->n_heads * (nope + value),
               *turned = key + nope; /* the first head's, which the others copy */
    angles_of(&angles, j, t);
    turn(j, &angles, key + nope, j->kr + (size_t)t * rope, 1.0f);
    for (uint32_t h = 0; h < a->n_heads; h++, key += bytes, v += bytes, from += nope + value) {
      memcpy(key, from, nope);
      if (h)
        memcpy(key + nope, turned, rope);
      memcpy(v, from + nope, value);
      memset(v + value, 0, bytes - value);
    }
  }
}

ps_status ps__cpu_mla_kv_fwd(const ps_launch *l) {
  mla_job j = job_of(l->args);
  j.from = l->ptr[0];
  j.kr = l->ptr[1];
  j.pos = l->ptr[2];
  j.to = l->ptr[3];
  ps__cpu_rows(l->exec, j.a->n_tokens, 32, kv_fwd_rows, &j);
  return PS_OK;
}

static void kv_bwd_rows(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const mla_job *j = arg;
  const ps__args_mla *a = j->a;
  const size_t nope = a->nope_dim, value = a->value_dim, rope = a->rotary_dim;
  mla_angles angles;
  for (int64_t t = first; t < end; t++) {
    const float *dk = j->dkv + (size_t)t * 2 * a->n_heads * j->d, *dv = dk + a->n_heads * j->d;
    char *to = j->to + (size_t)t * a->n_heads * (nope + value) * j->each;
    float sum[2 * PS_ROPE_PAIRS] = {0};
    for (uint32_t h = 0; h < a->n_heads; h++, dk += j->d, dv += j->d) {
      ps__store_f32(to, a->dt, dk, nope);
      to += nope * j->each;
      ps__store_f32(to, a->dt, dv, value);
      to += value * j->each;
      for (size_t i = 0; i < rope; i++)
        sum[i] += dk[nope + i];
    }
    angles_of(&angles, j, t);
    ps__rope_rotate(sum, angles.cos, angles.sin, rope / 2, -1.0f, a->interleaved);
    ps__store_f32(j->dkr + (size_t)t * rope * j->each, a->dt, sum, rope);
  }
}

ps_status ps__cpu_mla_kv_bwd(const ps_launch *l) {
  mla_job j = job_of(l->args);
  j.dkv = l->ptr[0];
  j.pos = l->ptr[1];
  j.to = l->ptr[2];
  j.dkr = l->ptr[3];
  ps__cpu_rows(l->exec, j.a->n_tokens, 32, kv_bwd_rows, &j);
  return PS_OK;
}

/* ---- padding --------------------------------------------------------------------------------- */

typedef struct pad_job {
  const char *from;
  char *to;
  size_t n_from, n_to, n_heads; /* bytes of a head */
} pad_job;

static void pad_rows(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const pad_job *j = arg;
  const size_t n = j->n_from < j->n_to ? j->n_from : j->n_to;
  for (size_t i = (size_t)first * j->n_heads; i < (size_t)end * j->n_heads; i++) {
    memcpy(j->to + i * j->n_to, j->from + i * j->n_from, n);
    memset(j->to + i * j->n_to + n, 0, j->n_to - n);
  }
}

static ps_status change_width(const ps_launch *l, bool pad) {
  const mla_job of = job_of(l->args);
  const size_t d = of.d * of.each, value = of.a->value_dim * of.each;
  pad_job j = {.from = l->ptr[0],
               .to = l->ptr[1],
               .n_from = pad ? value : d,
               .n_to = pad ? d : value,
               .n_heads = of.a->n_heads};
  ps__cpu_rows(l->exec, of.a->n_tokens, 32, pad_rows, &j);
  return PS_OK;
}
ps_status ps__cpu_mla_cut(const ps_launch *l) { return change_width(l, false); }
ps_status ps__cpu_mla_pad(const ps_launch *l) { return change_width(l, true); }
