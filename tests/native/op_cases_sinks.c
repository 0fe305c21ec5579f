/* op_cases_sinks.c - the cases of what only gpt-oss has: sinks in attention. */
#include "op_families.h"

/* T, heads, head_dim */
static const uint32_t sink_test[][3] = {{1, 1, 2},
                                        {7, 3, 24},
                                        {130, 8, 64},
                                        {33, 4, 40},
                                        {2100, 3, 20}},
                      sink_bench[][3] = {{8192, 64, 64}};

/* exp is 2 ulp off and its argument half an ulp of 20; the sum's terms have both signs */
static void sinks(visit *v, uint32_t dt, bool backward) {
  EACH(s, v, sink_test, sink_bench)
  for (uint32_t add = 0; add < (backward && v->sizes != OP_BENCH ? 2 : 1); add++) {
    const ps__args_sink a = {s[0], s[1], s[2], dt, add};
    const uint64_t rows = (uint64_t)s[0] * s[1], n = rows * s[2];
    const op_tolerance t = {dt != PS_F32, 4e-6, 1e-7};
    if (backward) {
      const op_operand o[] = {in(dt, n, 1), in(PS_F32, rows, 2), in(dt, n, 1), in(dt, s[1], 3),
                              sum(add, dt, s[1], row_sums(dt, 4.0 * n / s[1]))};
      CASE(v, &a, 5, o, "%u rows, %u heads of %u, add %u", s[0], s[1], s[2], add);
    } else {
      const op_operand o[] = {
          op_drawn(PS_READ_WRITE, dt, n, 1, t),
          op_drawn(PS_READ_WRITE, PS_F32, rows, 5, (op_tolerance){0, 1e-6, 1e-7}), in(dt, s[1], 5)};
      CASE(v, &a, 3, o, "%u rows, %u heads of %u", s[0], s[1], s[2]);
    }
  }
}
void op_attention_sink(visit *v, uint32_t dt) { sinks(v, dt, false); }
void op_attention_sink_bwd(visit *v, uint32_t dt) { sinks(v, dt, true); }
