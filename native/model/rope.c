/* rope.c - inv_freq and the attention factor as transformers 4.57.1 computes them
 * (modeling_rope_utils.py, _compute_*_parameters).
 *
 * All is fp32 as in torch, which divides a number by a tensor as reciprocal times number; powers
 * are rounded from fp64 (torch's own are an ulp or two off). What transformers computes on
 * Python's numbers is fp64. */
#include "model/rope.h"
#include "core/core.h"
#include <math.h>
#include <string.h>

static const double TAU = 6.283185307179586;

static bool positive(double x) { return x > 0.0 && x < INFINITY; }

static ps_status needs(const char *field, double value) {
  if (positive(value))
    return PS_OK;
  return ps__fail(PS_EINVAL, "rope_scaling.%s is %g: it must be positive and finite", field, value);
}

/* @original, below: the length before any scaling, where max_position_embeddings stands in for
 * original_max_position_embeddings. */
static ps_status needs_length(uint32_t original) {
  return needs("original_max_position_embeddings", original);
}

static ps_status check_yarn(const ps_rope *r, uint32_t original) {
  PS_TRY(needs("factor", r->factor));
  if (r->beta_fast < 0.0 || r->beta_slow < 0.0)
    return ps__fail(PS_EINVAL, "rope_scaling.%s is %g: it must not be negative",
                    r->beta_fast < 0.0 ? "beta_fast" : "beta_slow",
                    r->beta_fast < 0.0 ? r->beta_fast : r->beta_slow);
  if (r->theta == 1.0)
    return ps__fail(PS_EINVAL, "rope_theta is 1: yarn divides by its logarithm");
  return needs_length(original);
}

static ps_status check_longrope(const ps_rope *r, uint32_t original) {
  const double *const list[] = {r->short_factor, r->long_factor};
  static const char *const name[] = {"short_factor", "long_factor"};
  for (int k = 0; k < 2; k++)
    for (uint32_t i = 0; i < r->rotary_dim / 2; i++)
      if (!positive(list[k][i]))
        return ps__fail(PS_EINVAL, "rope_scaling.%s[%u] is %g: it must be positive and finite",
                        name[k], i, list[k][i]);
  if (r->attention_factor == 0.0 && !r->original_positions)
    PS_TRY(needs("factor", r->factor));
  return needs_length(original);
}

static ps_status check(const ps_rope *r, uint32_t original) {
  if (r->rotary_dim % 2 || r->rotary_dim > 2 * PS_ROPE_PAIRS)
    return ps__fail(PS_EINVAL,
                    "RoPE would turn %u elements of a head (head_dim * partial_rotary_factor): "
                    "the number must be even and at most %d",
                    r->rotary_dim, 2 * PS_ROPE_PAIRS);
  if (!positive(r->theta))
    return ps__fail(PS_EINVAL, "rope_theta is %g: it must be positive and finite", r->theta);
  if (!(r->attention_factor >= 0.0 && r->attention_factor < INFINITY))
    return ps__fail(PS_EINVAL,
                    "rope_scaling.attention_factor is %g: it must be positive and finite",
                    r->attention_factor);
  switch (r->kind) {
  case PS_ROPE_NONE: return PS_OK;
  case PS_ROPE_PROPORTIONAL:
  case PS_ROPE_LINEAR: return needs("factor", r->factor);
  case PS_ROPE_LLAMA3:
    PS_TRY(needs("factor", r->factor));
    PS_TRY(needs("low_freq_factor", r->low_freq_factor));
    PS_TRY(needs("high_freq_factor", r->high_freq_factor));
    return needs_length(original);
  case PS_ROPE_YARN: return check_yarn(r, original);
  case PS_ROPE_LONGROPE: return check_longrope(r, original);
  case PS_ROPE_DYNAMIC: return PS_OK; /* its factor counts past max_positions alone */
  default: return ps__fail(PS_EINVAL, "rope_scaling has no kind %u", r->kind);
  }
}

/* theta^(2i/@dim); @dim: rotary_dim, of proportional RoPE head_dim */
static float power_at(const ps_rope *r, uint32_t i, uint32_t dim) {
  return (float)pow((float)r->theta, (float)(2 * i) / (float)dim);
}
static float power_of(const ps_rope *r, uint32_t i) { return power_at(r, i, r->rotary_dim); }

static float llama3(const ps_rope *r, float f) {
  const float original = (float)r->original_positions, low = (float)r->low_freq_factor,
              high = (float)r->high_freq_factor, factor = (float)r->factor;
  const float wavelen = 1.0f / f * (float)TAU,
              smooth = (1.0f / wavelen * original - low) / (high - low);
  if (wavelen > original / low)
    return f / factor;
  if (wavelen < original / high)
    return f;
  return (1.0f - smooth) * f / factor + smooth * f;
}

/* ---- yarn (Peng et al. 2023, arXiv 2309.00071) ----------------------------------------------- */

/* The pair whose angle makes @turns turns in the original length. */
static double yarn_pair(const ps_rope *r, uint32_t original, double turns) {
  return r->rotary_dim * log(original / (turns * TAU)) / (2.0 * log(r->theta));
}

/* Pairs below @from keep their frequency, those from @to on are divided by factor. */
static void yarn_range(const ps_rope *r, uint32_t original, double *from, double *to) {
  double low = yarn_pair(r, original, r->beta_fast > 0.0 ? r->beta_fast : 32.0),
         high = yarn_pair(r, original, r->beta_slow > 0.0 ? r->beta_slow : 1.0);
  if (!r->keep_fraction) {
    low = floor(low);
    high = ceil(high);
  }
  *from = fmax(low, 0.0);
  *to = fmin(high, r->rotary_dim - 1.0);
  if (*from == *to)
    *to += 0.001;
}

static float yarn(const ps_rope *r, uint32_t i, double from, double to) {
  const float power = power_of(r, i), kept = 1.0f / power,
              divided = 1.0f / ((float)r->factor * power);
  float ramp = ((float)i - (float)from) / (float)(to - from);
  ramp = ramp < 0.0f ? 0.0f : ramp > 1.0f ? 1.0f : ramp;
  const float keep = 1.0f - ramp;
  return divided * (1.0f - keep) + kept * keep;
}

static double yarn_scale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

double ps__longrope_attention_factor(double factor, uint32_t original) {
  return factor <= 1.0 ? 1.0 : sqrt(1.0 + log(factor) / log(original));
}

static double attention_factor(const ps_rope *r, uint32_t original, uint32_t max_positions) {
  if (r->kind != PS_ROPE_YARN && r->kind != PS_ROPE_LONGROPE)
    return 1.0;
  if (r->attention_factor > 0.0)
    return r->attention_factor;
  if (r->kind == PS_ROPE_YARN && r->mscale != 0.0 && r->mscale_all_dim != 0.0)
    return yarn_scale(r->factor, r->mscale) / yarn_scale(r->factor, r->mscale_all_dim);
  if (r->kind == PS_ROPE_YARN)
    return yarn_scale(r->factor, 1.0);
  /* longrope: the ratio of the lengths where config.json has both, as Phi-3's has, else factor */
  const double factor =
      r->original_positions ? (double)max_positions / r->original_positions : r->factor;
  return ps__longrope_attention_factor(factor, original);
}

static float longrope(const ps_rope *r, uint32_t i, bool is_long) {
  const double *factors = is_long ? r->long_factor : r->short_factor;
  return 1.0f / ((float)factors[i] * power_of(r, i));
}

ps_status ps__rope_table(ps__args_qkv *a, const ps_rope *r, uint32_t max_positions,
                         uint64_t seq_len) {
  const uint32_t original = r->original_positions ? r->original_positions : max_positions;
  double from = 0.0, to = 0.0;
  float inv_freq[PS_ROPE_PAIRS] = {0};
  if (r->kind == PS_ROPE_DYNAMIC && seq_len > max_positions)
    return ps__fail(PS_EINVAL,
                    "sequences have %llu tokens, and the model's max_position_embeddings is %u: "
                    "dynamic RoPE is supported up to it, where it changes nothing",
                    (unsigned long long)seq_len, max_positions);
  if (r->rotary_dim)
    PS_TRY(check(r, original));
  if (r->kind == PS_ROPE_YARN)
    yarn_range(r, original, &from, &to);
  for (uint32_t i = 0; i < r->rotary_dim / 2; i++) {
    const bool whole = r->kind == PS_ROPE_PROPORTIONAL;
    const float f = 1.0f / power_at(r, i, whole ? a->head_dim : r->rotary_dim);
    inv_freq[i] = r->kind == PS_ROPE_LINEAR || whole ? f / (float)r->factor
                  : r->kind == PS_ROPE_LLAMA3        ? llama3(r, f)
                  : r->kind == PS_ROPE_YARN          ? yarn(r, i, from, to)
                  : r->kind == PS_ROPE_LONGROPE      ? longrope(r, i, seq_len > original)
                                                     : f;
    if (!positive(inv_freq[i]))
      return ps__fail(PS_EINVAL,
                      "rope_theta %g gives pair %u of %u the frequency %g: it must be "
                      "positive and finite",
                      r->theta, i, r->rotary_dim / 2, (double)inv_freq[i]);
  }
  const double by = r->rotary_dim ? attention_factor(r, original, max_positions) : 1.0;
  if (!positive((float)by))
    return ps__fail(PS_EINVAL,
                    "rope_scaling gives the attention factor %g: it must be positive and "
                    "finite",
                    by);
  a->rotary_dim = r->rotary_dim;
  a->attention_factor = (float)by;
  memcpy(a->inv_freq, inv_freq, sizeof inv_freq);
  return PS_OK;
}
