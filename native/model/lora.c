/* lora.c - adapters as parameters and ops of a layer's definition; their targets by name. */
#include "model/lora.h"
#include "core/core.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* By bit. Names on disk are PEFT's, after the layer's prefix. */
#define TARGET(part, name) {#name, part "." #name ".lora_A.weight", part "." #name ".lora_B.weight"}
static const struct {
  const char *name, *a, *b;
} target[PS_N_LORA_TARGETS] = {
    TARGET("self_attn", q_proj),
    TARGET("self_attn", k_proj),
    TARGET("self_attn", v_proj),
    TARGET("self_attn", o_proj),
    TARGET("mlp", gate_proj),
    TARGET("mlp", up_proj),
    TARGET("mlp", down_proj),
    TARGET("self_attn", qkv_proj),
    TARGET("mlp", gate_up_proj),
    TARGET("self_attn", q_a_proj),
    TARGET("self_attn", q_b_proj),
    TARGET("self_attn", kv_a_proj_with_mqa),
    TARGET("self_attn", kv_b_proj),
    TARGET("linear_attn", in_proj_qkv),
    TARGET("linear_attn", in_proj_z),
    TARGET("linear_attn", in_proj_b),
    TARGET("linear_attn", in_proj_a),
    TARGET("linear_attn", out_proj),
    TARGET("linear_attn", in_proj_qkvz),
    TARGET("linear_attn", in_proj_ba),
};

const char *ps__lora_target_name(uint32_t i) {
  return i < PS_N_LORA_TARGETS ? target[i].name : NULL;
}

static const char *const base_names[PS_N_BASES] = {"bf16", "fp8", "nf4", "mxfp4"};

const char *ps_base_name(ps_base base) {
  return (unsigned)base < PS_N_BASES ? base_names[base] : "";
}

ps_status ps_base_parse(uint32_t *out, const char *name) {
  if (!out || !name)
    return ps__fail(PS_EINVAL, "ps_base_parse: out and name must be given");
  for (uint32_t i = 0; i < PS_N_BASES; i++)
    if (strcmp(name, base_names[i]) == 0) {
      *out = i;
      return PS_OK;
    }
  return ps__fail(PS_EINVAL, "the base's dtype '%.60s' is unknown: give bf16, fp8, nf4 or mxfp4",
                  name);
}

/* ---- checks ---------------------------------------------------------------------------------- */

/* "q_proj, k_proj" of a bit set. */
static const char *list_names(char *buf, size_t bytes, uint32_t targets) {
  size_t n = 0;
  buf[0] = 0;
  for (uint32_t i = 0; i < PS_N_LORA_TARGETS; i++)
    if (targets >> i & 1 && n < bytes)
      n += (size_t)snprintf(buf + n, bytes - n, "%s%s", n ? ", " : "", target[i].name);
  return buf;
}

ps_status ps_lora_targets_parse(uint32_t *out, const char *names) {
  uint32_t targets = 0;
  char known[PS_LORA_NAMES_BYTES];
  if (!out || !names)
    return ps__fail(PS_EINVAL, "ps_lora_targets_parse: out and names must be given");
  if (strcmp(names, "all-linear") == 0) {
    *out = PS_LORA_ALL;
    return PS_OK;
  }
  for (const char *at = names; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
    const size_t n = strcspn(at, ",");
    uint32_t i = 0;
    while (i < PS_N_LORA_TARGETS && (strlen(target[i].name) != n || memcmp(target[i].name, at, n)))
      i++;
    if (i == PS_N_LORA_TARGETS)
      return ps__fail(PS_EINVAL,
                      "LoRA target '%.*s' is unknown: give all-linear, or a list with commas of %s",
                      n < 60 ? (int)n : 60, at, list_names(known, sizeof known, PS_LORA_ALL));
    targets |= 1u << i;
  }
  *out = targets;
  return PS_OK;
}

ps_status ps_lora_targets_text(char *buf, uint64_t bytes, uint32_t targets) {
  uint64_t need = 1;
  for (uint32_t i = 0; i < PS_N_LORA_TARGETS; i++)
    if (targets >> i & 1)
      need += strlen(target[i].name) + 1;
  if (!buf || bytes < need)
    return ps__fail(PS_EINVAL, "ps_lora_targets_text: %llu bytes are too few, %llu are needed",
                    (unsigned long long)bytes, (unsigned long long)need);
  buf[0] = 0;
  for (uint32_t i = 0; i < PS_N_LORA_TARGETS; i++)
    if (targets >> i & 1) {
      if (buf[0])
        strcat(buf, ",");
      strcat(buf, target[i].name);
    }
  return PS_OK;
}

ps_status ps__lora_check(const ps_lora *l) {
  if (!l->rank && l->base)
    return ps__fail(PS_EINVAL,
                    "%s is given without LoRA, and weights are only quantized beside adapters: "
                    "leave it out, or give %s or an adapter",
                    ps__field("lora.base"), ps__field("lora.rank"));
  if (!l->rank)
    return l->targets || l->alpha != 0 || l->rslora
               ? ps__fail(PS_EINVAL, "the LoRA rank is 0, but alpha or targets are given: give a "
                                     "rank of at least 1")
               : PS_OK;
  if (l->rank > PS_MAX_LORA_RANK)
    return ps__fail(PS_EINVAL, "the LoRA rank is %u: at most %u is needed", l->rank,
                    PS_MAX_LORA_RANK);
  if (!(l->alpha > 0) || !(l->alpha <= PS_MAX_LORA_ALPHA))
    return ps__fail(PS_EINVAL, "the LoRA alpha is %g: a number above 0 and up to %g is needed",
                    l->alpha, PS_MAX_LORA_ALPHA);
  if (!l->targets || l->targets & ~(uint32_t)PS_LORA_ALL)
    return ps__fail(PS_EINVAL, "the LoRA targets are 0x%x: bits of PS_LORA_ALL (0x%x) are needed",
                    l->targets, PS_LORA_ALL);
  if (l->rslora > 1)
    return ps__fail(PS_EINVAL, "rslora is %u: 0 or 1 is needed", l->rslora);
  if (l->base >= PS_N_BASES)
    return ps__fail(PS_EINVAL, "%s is %u: a ps_base is needed", ps__field("lora.base"), l->base);
  return PS_OK;
}

ps_status ps__lora_resolve(ps_model *m, uint32_t there) {
  char missing[PS_LORA_NAMES_BYTES], has[PS_LORA_NAMES_BYTES];
  if (m->lora.targets == PS_LORA_ALL)
    m->lora.targets = there;
  if (m->lora.targets & ~there)
    return ps__fail(PS_EINVAL, "a %s block has no LoRA target %s: it has %s", m->family,
                    list_names(missing, sizeof missing, m->lora.targets & ~there),
                    list_names(has, sizeof has, there));
  return PS_OK;
}

/* ---- definitions ----------------------------------------------------------------------------- */

static float scale_of(const ps_lora *l, float scale) {
  const double s = l->alpha / (l->rslora ? sqrt(l->rank) : l->rank);
  return (float)(s * (scale == 0.0f ? 1.0f : scale));
}

void ps__lora_define(const ps_model *m, ps__layer_def *d, uint32_t i, uint32_t n_out, uint32_t n_in,
                     uint32_t cut, ps__adapter *out) {
  const uint32_t rank = m->lora.rank;
  *out = (ps__adapter){0};
  if (!(m->lora.targets >> i & 1))
    return;
  *out = (ps__adapter){.n_out = n_out, .n_in = n_in, .rank = rank, .cut = cut};
  out->a = ps__def_param(d, target[i].a, PS_PARAM_MATRIX, rank, n_in);
  ps__def_what(d, "adapter");
  ps__def_init_uniform(d, 1 / sqrt(n_in));
  out->b = ps__def_param(d, target[i].b, PS_PARAM_MATRIX, n_out, rank);
  ps__def_what(d, "adapter");
  ps__def_init(d, 0, 0);
  if (cut)
    out->b_rest = ps__def_split(d, (uint64_t)cut * rank);
  out->z = ps__def_tensor(d, "lora_z", PS__ROWS_TOKEN, rank, m->dt);
  out->dz = ps__def_tensor(d, "lora_dz", PS__ROWS_TOKEN, rank, m->dt);
}

static uint32_t skip_of(const ps_model *m, ps__columns c) {
  return c.first * (uint32_t)ps_dtype_bytes(m->dt);
}

static void make_z(const ps_model *m, ps__layer_def *d, const ps__adapter *a, bool backward,
                   uint8_t x, uint8_t z) {
  const ps__args_gemm g = ps__gemm_args(0, a->rank, a->n_in, false, true, m->dt);
  PS__DEF_OP(d, backward, false, ps__k_gemm, g, PS__R(x), PS__P(a->a), PS__W(z));
}

/* y += scale s z B^T of @n rows of B, the span @w. */
static void add_output(const ps_model *m, ps__layer_def *d, const ps__adapter *a, uint16_t w,
                       uint32_t n, ps__columns y, float scale) {
  ps__args_gemm g = ps__gemm_args(0, n, a->rank, false, true, m->dt);
  g.ldc = y.cols;
  g.accumulate = true;
  g.alpha = scale_of(&m->lora, scale);
  PS__FWD(d, ps__k_gemm, g, PS__R(a->z), PS__P(w), PS__RW_FROM(y.tensor, skip_of(m, y)));
}

void ps__lora_forward(const ps_model *m, ps__layer_def *d, const ps__adapter *a, uint8_t x,
                      ps__columns y, float scale) {
  if (!a->n_out)
    return;
  make_z(m, d, a, false, x, a->z);
  add_output(m, d, a, a->b, a->n_out, y, scale);
}

void ps__lora_forward_cut(const ps_model *m, ps__layer_def *d, const ps__adapter *a, uint8_t x,
                          ps__columns y, ps__columns rest) {
  if (!a->n_out)
    return;
  make_z(m, d, a, false, x, a->z);
  add_output(m, d, a, a->b, a->cut, y, 0);
  add_output(m, d, a, a->b_rest, a->n_out - a->cut, rest, 0);
}

/* dz (+)= scale s dY B of @n rows of B, the span @w. */
static void make_dz(const ps_model *m, ps__layer_def *d, const ps__adapter *a, uint16_t w,
                    uint32_t n, ps__columns dy, float scale, bool adds) {
  ps__args_gemm g = ps__gemm_args(0, a->rank, n, false, false, m->dt);
  g.lda = dy.cols;
  g.accumulate = adds;
  g.alpha = scale_of(&m->lora, scale);
  PS__BWD(d, ps__k_gemm, g, PS__R_FROM(dy.tensor, skip_of(m, dy)), PS__P(w),
          adds ? PS__RW(a->dz) : PS__W(a->dz));
}

/* dX += dz A */
static void add_input_grad(const ps_model *m, ps__layer_def *d, const ps__adapter *a, uint8_t dx) {
  ps__args_gemm g = ps__gemm_args(0, a->n_in, a->rank, false, false, m->dt);
  g.accumulate = true;
  PS__BWD(d, ps__k_gemm, g, PS__R(a->dz), PS__P(a->a), PS__RW(dx));
}

void ps__lora_input_grad(const ps_model *m, ps__layer_def *d, const ps__adapter *a, ps__columns dy,
                         float scale, uint8_t dx) {
  if (!a->n_out)
    return;
  make_dz(m, d, a, a->b, a->n_out, dy, scale, false);
  add_input_grad(m, d, a, dx);
}

/* dB (+)= scale s dY^T z of @n rows of B, the span @w. */
static void b_grad(const ps_model *m, ps__layer_def *d, const ps__adapter *a, uint16_t w,
                   uint32_t n, ps__columns dy, float scale, uint8_t z) {
  ps__args_gemm g = ps__gemm_args(n, a->rank, 0, true, false, m->dt);
  g.lda = dy.cols;
  g.alpha = scale_of(&m->lora, scale);
  PS__BWD(d, ps__k_gemm, g, PS__R_FROM(dy.tensor, skip_of(m, dy)), PS__R(z), PS__G(w));
}

/* dA (+)= dz^T x */
static void a_grad(const ps_model *m, ps__layer_def *d, const ps__adapter *a, uint8_t x) {
  const ps__args_gemm g = ps__gemm_args(a->rank, a->n_in, 0, true, false, m->dt);
  PS__BWD(d, ps__k_gemm, g, PS__R(a->dz), PS__R(x), PS__G(a->a));
}

static void weight_grads(const ps_model *m, ps__layer_def *d, const ps__adapter *a, ps__columns dy,
                         float scale, uint8_t x, uint8_t z) {
  b_grad(m, d, a, a->b, a->n_out, dy, scale, z);
  a_grad(m, d, a, x);
}

void ps__lora_backward_cut(const ps_model *m, ps__layer_def *d, const ps__adapter *a, uint8_t x,
                           ps__columns dy, ps__columns rest, uint8_t dx) {
  if (!a->n_out)
    return;
  make_dz(m, d, a, a->b, a->cut, dy, 0, false);
  make_dz(m, d, a, a->b_rest, a->n_out - a->cut, rest, 0, true);
  add_input_grad(m, d, a, dx);
  b_grad(m, d, a, a->b, a->cut, dy, 0, a->z);
  b_grad(m, d, a, a->b_rest, a->n_out - a->cut, rest, 0, a->z);
  a_grad(m, d, a, x);
}

void ps__lora_weight_grads(const ps_model *m, ps__layer_def *d, const ps__adapter *a,
                           ps__columns dy, float scale, uint8_t x) {
  if (a->n_out)
    weight_grads(m, d, a, dy, scale, x, a->z);
}

void ps__lora_weight_grads_late(const ps_model *m, ps__layer_def *d, const ps__adapter *a,
                                ps__columns dy, float scale, uint8_t x) {
  if (!a->n_out)
    return;
  const uint8_t z = ps__def_tensor(d, "lora_z", PS__ROWS_TOKEN, a->rank, m->dt);
  make_z(m, d, a, true, x, z);
  weight_grads(m, d, a, dy, scale, x, z);
}

static ps__columns columns_of(const ps__shared *s, uint32_t i) {
  return (ps__columns){s->tensor, s->cols, s->part[i].first};
}

void ps__lora_forward_shared(const ps_model *m, ps__layer_def *d, uint8_t x, const ps__shared *y) {
  for (uint32_t i = 0; i < y->n; i++)
    ps__lora_forward(m, d, y->part[i].adapter, x, columns_of(y, i), 1);
}

void ps__lora_backward_shared(const ps_model *m, ps__layer_def *d, uint8_t x, const ps__shared *dy,
                              uint8_t dx) {
  for (uint32_t i = 0; i < dy->n; i++) {
    const ps__adapter *a = dy->part[i].adapter;
    ps__lora_input_grad(m, d, a, columns_of(dy, i), 1, dx);
    ps__lora_weight_grads(m, d, a, columns_of(dy, i), 1, x);
  }
}
