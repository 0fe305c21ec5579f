/* op_cases_mla.c - the cases of latent attention's queries, keys and values. */
#include "model/rope.h"
#include "op_families.h"

/* T, heads, dn, dr, dv */
static const uint32_t mla_test[][5] = {{1, 1, 1, 2, 1},     {5, 4, 12, 8, 10},
                                       {33, 2, 16, 16, 32}, {70, 16, 128, 64, 128},
                                       {9, 3, 24, 6, 30},   {40, 5, 7, 256, 9}},
                      mla_bench[][5] = {{2048, 16, 128, 64, 128}};

static ps__args_mla mla_args(const uint32_t *s, size_t i, uint32_t dt) {
  ps__args_qkv table = {0};
  const ps_rope rope = {.rotary_dim = s[3], .theta = 1e4};
  ps__args_mla a = {.n_tokens = s[0],
                    .n_heads = s[1],
                    .nope_dim = s[2],
                    .rotary_dim = s[3],
                    .value_dim = s[4],
                    .dt = dt,
                    .interleaved = i % 2 == 0,
                    .attention_factor = i % 2 ? 1.25f : 1.0f};
  if (ps__rope_table(&table, &rope, 8192, 1) != PS_OK)
    abort();
  memcpy(a.inv_freq, table.inv_freq, sizeof a.inv_freq);
  return a;
}

/* cos and sin within an ulp on either side: of the pair */
static op_tolerance of_pair(uint32_t dt) {
  return dt != PS_F32 ? (op_tolerance){1, 0, 1e-6} : (op_tolerance){0, 0, 5e-7};
}

void op_mla_turn(visit *v, uint32_t dt) {
  EACH(s, v, mla_test, mla_bench)
  for (uint32_t inverse = 0; inverse < 2; inverse++) {
    ps__args_mla a = mla_args(s, s_i, dt);
    const uint64_t n = (uint64_t)s[0] * s[1] * (s[2] + s[3]);
    a.inverse = inverse;
    const op_operand o[] = {in(dt, n, 1), op_ints(s[0], 0, 1048576, false),
                            out(dt, n, of_pair(dt))};
    CASE(v, &a, 3, o, "T%u heads %u of %u+%u, inverse %u", s[0], s[1], s[2], s[3], inverse);
  }
}

void op_mla_kv_fwd(visit *v, uint32_t dt) {
  EACH(s, v, mla_test, mla_bench) {
    const ps__args_mla a = mla_args(s, s_i, dt);
    const uint64_t heads = (uint64_t)s[0] * s[1];
    const op_operand o[] = {in(dt, heads * (s[2] + s[4]), 1), in(dt, (uint64_t)s[0] * s[3], 1),
                            op_ints(s[0], 0, 1048576, false),
                            out(dt, 2 * heads * (s[2] + s[3]), of_pair(dt))};
    CASE(v, &a, 4, o, "T%u heads %u of %u+%u, %u", s[0], s[1], s[2], s[3], s[4]);
  }
}

/* dkr is a sum of as many terms as there are heads. */
void op_mla_kv_bwd(visit *v, uint32_t dt) {
  EACH(s, v, mla_test, mla_bench) {
    const ps__args_mla a = mla_args(s, s_i, dt);
    const uint64_t heads = (uint64_t)s[0] * s[1];
    const op_operand o[] = {in(PS_F32, 2 * heads * (s[2] + s[3]), 1),
                            op_ints(s[0], 0, 1048576, false), out(dt, heads * (s[2] + s[4]), exact),
                            out(dt, (uint64_t)s[0] * s[3], (op_tolerance){dt != PS_F32, 0, 4e-6})};
    CASE(v, &a, 4, o, "T%u heads %u of %u+%u, %u", s[0], s[1], s[2], s[3], s[4]);
  }
}

static void width(visit *v, uint32_t dt, bool pad) {
  EACH(s, v, mla_test, mla_bench) {
    const ps__args_mla a = mla_args(s, s_i, dt);
    const uint64_t heads = (uint64_t)s[0] * s[1], d = s[2] + s[3];
    const op_operand o[] = {in(dt, heads * (pad ? s[4] : d), 1),
                            out(dt, heads * (pad ? d : s[4]), exact)};
    CASE(v, &a, 2, o, "T%u heads %u of %u+%u, %u", s[0], s[1], s[2], s[3], s[4]);
  }
}
void op_mla_cut(visit *v, uint32_t dt) { width(v, dt, false); }
void op_mla_pad(visit *v, uint32_t dt) { width(v, dt, true); }
