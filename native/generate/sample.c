/* sample.c - the next token, drawn from logits.
 *
 * In this order, as transformers has it: temperature, the top_k likeliest, of those the likeliest
 * that have top_p together. Of equal weights the lower id is the likelier. The random number is a
 * function of seed and index, so a draw depends on nothing else. */
#include "core/mix64.h"
#include "generate/generate.h"
#include <math.h>
#include <stdlib.h>

/* In [0, 1): splitmix64 (Steele, Lea, Flood 2014) of the seed's stream. */
static double uniform(uint64_t seed, uint64_t index) {
  const uint64_t x = seed * 0xd1342543de82ef95u + (index + 1) * PS__MIX_GAMMA;
  return (double)(ps__mix64(ps__mix64(x)) >> 11) * 0x1p-53;
}

static int by_weight(const void *x, const void *y) {
  const ps__gen_candidate *a = x, *b = y;
  if (a->weight != b->weight)
    return a->weight < b->weight ? 1 : -1;
  return a->id < b->id ? -1 : 1;
}

static double mass(const ps__gen_candidate *c, uint64_t n) {
  double sum = 0;
  for (uint64_t i = 0; i < n; i++)
    sum += (double)c[i].weight;
  return sum;
}

/* weight = exp((logit - most) / temperature) */
static float weight_of(float logit, float most, double temperature) {
  return (float)exp(((double)logit - (double)most) / temperature);
}

/* The likeliest tokens, sorted: at least @k of them, and at least @p of the whole mass @all. Only
 * those above a threshold are sorted, which falls until there are enough. */
static uint64_t likeliest(ps__gen_candidate *c, const float *logits, uint32_t n, float most,
                          double temperature, uint64_t k, double p, double all) {
  for (int e = 0;; e += 6) {
    const float least = e > 126 ? 0.0f : ldexpf(1.0f, -e);
    uint64_t found = 0;
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
      const float w = weight_of(logits[i], most, temperature);
      if (w >= least) {
        c[found++] = (ps__gen_candidate){w, (int32_t)i};
        sum += (double)w;
      }
    }
    if (least > 0 && (found < k || sum < p * all))
      continue;
    qsort(c, found, sizeof *c, by_weight);
    return found;
  }
}

int32_t ps__gen_draw(const float *logits, uint32_t n, const ps_generate_request *r, uint64_t index,
                     ps__gen_candidate *c) {
  uint32_t best = 0;
  bool finite = true;
  for (uint32_t i = 0; i < n; i++) {
    finite &= isfinite(logits[i]) || logits[i] == -INFINITY;
    best = logits[i] > logits[best] ? i : best;
  }
  if (!finite || !isfinite(logits[best]))
    return -1;
  if (r->temperature == 0 || r->top_k == 1)
    return (int32_t)best;
  const double u = uniform(r->seed, index);
  const uint64_t k = r->top_k && r->top_k < n ? r->top_k : n;
  uint64_t kept = n;
  double all = 0;
  for (uint32_t i = 0; i < n; i++) {
    c[i] = (ps__gen_candidate){weight_of(logits[i], logits[best], r->temperature), (int32_t)i};
    all += (double)c[i].weight;
  }
  if (k < n || r->top_p < 1) {
    kept = likeliest(c, logits, n, logits[best], r->temperature, k < n ? k : 1,
                     k < n ? 0 : r->top_p, all);
    kept = kept < k ? kept : k;
    const double wanted = r->top_p * (k < n ? mass(c, kept) : all);
    uint64_t enough = 0;
    for (double sum = 0; enough < kept && (!enough || sum < wanted); enough++)
      sum += (double)c[enough].weight;
    kept = r->top_p < 1 ? enough : kept;
    all = mass(c, kept);
  }
  double left = u * all;
  uint64_t i = 0;
  while (i + 1 < kept && (left -= (double)c[i].weight) >= 0)
    i++;
  while (i > 0 && !(c[i].weight > 0)) /* rounding left the end of the sum */
    i--;
  return c[i].id;
}
