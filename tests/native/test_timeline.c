/* test_timeline.c - what a timeline shows beside the ops' times: names for profilers, and the bytes
 * of both arenas that ops used. */
#include "check.h"
#include "engine/ranges.h"
#include "plan/plan_impl.h"

/* ---- names ----------------------------------------------------------------------------------- */

static const ps_kernel k_gemm = {.name = "gemm"}, k_adamw = {.name = "adamw"},
                       k_load = {.name = "load_batch"};

static void is_named(ps__op op, const char *stream, const char *expected) {
  char text[PS__RANGE_TEXT];
  ps__range_op_name(text, &op, stream);
  if (strcmp(text, expected))
    printf("\"%s\", expected \"%s\"\n", text, expected);
  CHECK(strcmp(text, expected) == 0);
}

static void test_op_names(void) {
  const ps_tag in_chunk = {.layer = 3, .round = 1, .chunk = 2, .what = "qkv"},
               of_unit = {.layer = 3, .round = 1, .chunk = -1, .what = "weights"},
               whole = {.layer = -1, .round = -1, .chunk = -1};
  ps_tag plain = in_chunk, batch = {.layer = -1, .round = 0, .chunk = 5, .what = "the batch"};
  plain.what = NULL;
  is_named((ps__op){.kernel = &k_gemm, .tag = in_chunk}, "compute", "gemm qkv");
  is_named((ps__op){.kernel = &k_gemm, .tag = plain}, "compute", "gemm");
  is_named((ps__op){.kernel = &k_adamw, .tag = {.layer = 3, .round = 1, .chunk = -1}}, "host",
           "adamw of layer 3");
  is_named((ps__op){.kernel = &k_load, .tag = whole}, "io", "load_batch");
  is_named((ps__op){.tag = of_unit}, "h2d", "h2d weights of layer 3, round 1");
  is_named((ps__op){.tag = in_chunk}, "d2h", "d2h qkv of layer 3, round 1, chunk 2");
  is_named((ps__op){.tag = batch}, "h2d", "h2d the batch, round 0, chunk 5");
  is_named((ps__op){.tag = whole}, "h2d", "h2d copy");
  char long_name[300], text[PS__RANGE_TEXT];
  memset(long_name, 'x', sizeof long_name - 1);
  long_name[sizeof long_name - 1] = 0;
  ps__op copy = {.tag = in_chunk};
  ps__range_op_name(text, &copy, long_name);
  CHECK(strlen(text) == PS__RANGE_TEXT - 1);
  printf("ok ops have names, which are cut where they are too long\n");
}

static void test_paths(void) {
  ps__op op = {.kernel = &k_gemm, .tag = {.layer = 3, .round = 1, .chunk = 2}};
  const ps__range_path here = ps__range_path_of(&op, 12);
  static const char *const name[] = {"step 12", "round 1", "layer 3", "chunk 2"};
  char text[PS__RANGE_TEXT];
  CHECK(here.n == 4);
  for (uint32_t i = 0; i < 4; i++) {
    ps__range_name(text, &here, i);
    CHECK(strcmp(text, name[i]) == 0);
  }
  op.tag.chunk = 4;
  ps__range_path there = ps__range_path_of(&op, 12);
  CHECK(ps__range_common(&here, &there) == 3);
  op.tag.layer = 4;
  op.tag.chunk = 2; /* the same number in another layer is another chunk */
  there = ps__range_path_of(&op, 12);
  CHECK(ps__range_common(&here, &there) == 2);
  there = ps__range_path_of(&op, 13);
  CHECK(ps__range_common(&here, &there) == 0);
  op.kernel = NULL; /* a copy is submitted among another stream's ops */
  there = ps__range_path_of(&op, 12);
  CHECK(there.n == 1 && ps__range_common(&here, &there) == 1);
  printf("ok ops of a chunk lie in its step, round, layer and chunk, others in their step\n");
}

/* ---- memory ---------------------------------------------------------------------------------- */

static ps_plan *planned(uint64_t device_mem) {
  ps_model_config model = {.struct_bytes = sizeof model};
  ps_hardware hw = {.struct_bytes = sizeof hw};
  const ps_plan_config cfg = {
      PLAN_DEFAULTS,          .recipe = PS_RECIPE_BF16,       .seq_len = 64,
      .tokens_per_step = 512, .device_mem_bytes = device_mem, .clip_norm = 1};
  ps_plan *p = NULL;
  CHECK(ps_model_config_read(&model, "models/tiny-llama.json") == PS_OK);
  CHECK(ps_hardware_estimate(&hw, PS_BACKEND_CPU, 0, 2) == PS_OK);
  CHECK(ps_plan_create(&p, &model, &cfg, &hw) == PS_OK);
  return p;
}

static ps_trace_gauge *gauges_of(const ps_plan *p, const ps_trace_event *events, uint64_t n,
                                 uint64_t *n_gauges) {
  CHECK(ps_plan_memory(p, events, n, NULL, 0, n_gauges) == PS_OK);
  ps_trace_gauge *c = calloc(*n_gauges + 1, sizeof *c);
  c[*n_gauges].bytes = 77;
  CHECK(ps_plan_memory(p, events, n, c, *n_gauges, n_gauges) == PS_OK);
  CHECK(c[*n_gauges].bytes == 77);
  return c;
}

static const char *const names[] = {"device arena", "host arena"};

/* The value of a gauge at a time. */
static uint64_t value_at(const ps_trace_gauge *c, uint64_t n, const char *name, uint64_t ns) {
  uint64_t bytes = 0;
  for (uint64_t i = 0; i < n; i++)
    if (strcmp(c[i].name, name) == 0 && c[i].ns <= ns)
      bytes = c[i].bytes;
  return bytes;
}

/* Whether a tensor counts amid op @i of a step whose ops ran one after the other. */
static bool alive(const ps__step *s, uint32_t vt, size_t i) {
  bool before = false, after = false;
  if (s->vt[vt].alias_of)
    return false;
  for (size_t k = 0; k < s->n_op; k++)
    for (uint32_t a = s->op[k].access; a < s->op[k].access + s->op[k].n_access; a++)
      if (s->access[a].vt == vt) {
        before |= k <= i;
        after |= k >= i;
      }
  return s->vt[vt].persistent || (before && after);
}

/* One op after the other: the sum over the tensors that an op before and an op after touch. */
static void test_serial(const ps_plan *p) {
  const ps__step *s = &p->step;
  ps_trace_event *events = calloc(s->n_op, sizeof *events);
  uint64_t n;
  for (size_t i = 0; i < s->n_op; i++)
    events[i] = (ps_trace_event){.op = i,
                                 .stream = s->op[i].stream,
                                 .queued_ns = 10 * i,
                                 .start_ns = 10 * i + 1,
                                 .end_ns = 10 * i + 8};
  ps_trace_gauge *c = gauges_of(p, events, s->n_op, &n);
  for (size_t i = 0; i < s->n_op; i++)
    for (uint32_t space = 0; space < 2; space++) {
      uint64_t bytes = 0;
      for (uint32_t t = 0; t < s->n_vt; t++)
        bytes += s->vt[t].space == space && alive(s, t, i) ? s->vt[t].bytes : 0;
      CHECK(value_at(c, n, names[space == p->at->host], 10 * i + 4) == bytes);
    }
  free(c);
  free(events);
}

/* In simulated steps, whose ops overlap, no arena is ever exceeded; in the end what outlives steps
 * is left. */
static void test_overlapping(const ps_plan *p) {
  enum { STEPS = 3 };
  const uint64_t n_events = STEPS * p->step.n_op;
  ps_trace_event *events = calloc(n_events, sizeof *events);
  uint64_t n, most[2] = {0}, last_ns[2] = {0};
  CHECK(ps_plan_simulate(p, STEPS, events, NULL) == PS_OK);
  ps_trace_gauge *c = gauges_of(p, events, n_events, &n);
  for (uint64_t i = 0; i < n; i++) {
    const int which = strcmp(c[i].name, names[1]) == 0;
    CHECK(c[i].ns >= last_ns[which]);
    last_ns[which] = c[i].ns;
    most[which] = c[i].bytes > most[which] ? c[i].bytes : most[which];
  }
  for (uint32_t space = 0; space < 2; space++) {
    const int which = space == p->at->host;
    CHECK(most[which] > 0 && most[which] <= p->step.space_bytes[space]);
    CHECK(4 * most[which] > p->step.space_bytes[space]); /* it is what the arena is for */
    CHECK(value_at(c, n, names[which], 0) <= most[which]);
  }
  events[3].op = 5;
  CHECK_FAILS(ps_plan_memory(p, events, n_events, c, n, &n), PS_EINVAL, "event 3");
  CHECK_FAILS(ps_plan_memory(p, events, n_events - 1, c, n, &n), PS_EINVAL, "whole steps");
  CHECK_FAILS(ps_plan_memory(p, events, n_events, NULL, 1, &n), PS_EINVAL, "gauges");
  free(c);
  free(events);
}

int main(void) {
  const int64_t before = ps__live_allocations();
  test_op_names();
  test_paths();
  static const uint64_t caps[] = {0, 6 << 20, 4500 << 10};
  for (size_t i = 0; i < sizeof caps / sizeof *caps; i++) {
    ps_plan *p = planned(caps[i]);
    test_serial(p);
    test_overlapping(p);
    CHECK(ps_plan_destroy(p) == PS_OK);
  }
  printf("ok gauges are the sums of the tensors in use, and within the arenas\n");
  CHECK(ps__live_allocations() == before);
  return 0;
}
