/* op_times.c - how long each stream ran which kinds of op, from a trace of the plan's schedule,
 * measured or simulated. */
#include "plan/plan_impl.h"
#include <stdlib.h>
#include <string.h>

typedef struct totals {
  ps_op_time *of;
  size_t n, cap;
} totals;

/* "gemm_fp8 gate_up": the op's name as timelines have it, and what it is of. */
static void name_of(const ps_op_view *op, char out[PS_OP_NAME]) {
  const char *what = op->tag.what;
  snprintf(out, PS_OP_NAME, "%s%s%s", op->kernel ? op->kernel->name : "copy", what ? " " : "",
           what ? what : "");
}

static ps_status add(totals *t, const ps_op_view *op, double ns) {
  char name[PS_OP_NAME];
  size_t i = 0;
  name_of(op, name);
  while (i < t->n && (t->of[i].stream != op->stream || strcmp(t->of[i].op, name) != 0))
    i++;
  if (i == t->n) {
    if (!PS_GROW(t->of, t->n, t->cap))
      return ps__fail(PS_ENOMEM, "out of memory for the times of %zu kinds of op", t->n);
    t->of[t->n] = (ps_op_time){.stream = op->stream};
    memcpy(t->of[t->n++].op, name, sizeof name);
  }
  t->of[i].seconds += ns * 1e-9;
  t->of[i].n_ops++;
  return PS_OK;
}

static int by_stream_and_time(const void *pa, const void *pb) {
  const ps_op_time *a = pa, *b = pb;
  if (a->stream != b->stream)
    return a->stream < b->stream ? -1 : 1;
  return a->seconds > b->seconds ? -1 : a->seconds < b->seconds;
}

ps_status ps_plan_op_times(const ps_plan *plan, const ps_trace_event *events, uint64_t n,
                           ps_op_time *times, uint64_t room, uint64_t *n_times) {
  if (!plan || !events || !n_times || (!times && room))
    return ps__fail(PS_EINVAL, "ps_plan_op_times: plan, events, times and n_times must be given");
  PS_TRY(ps__plan_check_events(plan, events, n));
  const uint64_t n_ops = plan->step.n_op, n_steps = n / n_ops, first = n_steps > 1;
  totals t = {.n = 0};
  ps_status st = PS_OK;
  for (uint64_t i = 0; st == PS_OK && i < n_ops; i++) {
    ps_op_view op;
    double ns = 0;
    st = ps_schedule_op(plan->schedule, i, &op);
    for (uint64_t k = first; k < n_steps; k++)
      ns += (double)(events[k * n_ops + i].end_ns - events[k * n_ops + i].start_ns);
    if (st == PS_OK)
      st = add(&t, &op, ns / (double)(n_steps - first));
  }
  if (t.n)
    qsort(t.of, t.n, sizeof *t.of, by_stream_and_time);
  for (size_t i = 0; st == PS_OK && i < t.n && i < room; i++)
    times[i] = t.of[i];
  if (st == PS_OK)
    *n_times = t.n;
  ps__free(t.of);
  return st;
}
