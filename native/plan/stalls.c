/* stalls.c - what each stream waited for, from a trace of the plan's schedule, measured or
 * simulated.
 *
 * A stream stalls between the end of one op and the start of its next. The stall is put down to the
 * last op that the next one awaits, if that ended in the meantime. Time after that op's end counts
 * as launch and signals; so do stalls where nothing was awaited that long. What the first step of a
 * trace awaited of the step before is unknown: it counts only where the trace has no other step. */
#include "plan/plan_impl.h"
#include <stdlib.h>
#include <string.h>

typedef struct totals {
  ps_stall *stall;
  size_t n, cap;
} totals;

static ps_status add(totals *t, uint32_t stream, uint32_t awaited, const char *what, double ns) {
  size_t i = 0;
  while (i < t->n && (t->stall[i].stream != stream || t->stall[i].awaited_stream != awaited ||
                      strcmp(t->stall[i].what, what) != 0))
    i++;
  if (i == t->n) {
    if (!PS_GROW(t->stall, t->n, t->cap))
      return ps__fail(PS_ENOMEM, "out of memory for what %zu stalls are of", t->n);
    t->stall[t->n] = (ps_stall){.stream = stream, .awaited_stream = awaited};
    snprintf(t->stall[t->n++].what, sizeof t->stall->what, "%s", what);
  }
  t->stall[i].seconds += ns * 1e-9;
  return PS_OK;
}

static const char *incoming(const ps_tag *t) {
  if (t->chunk < 0)
    return t->layer < 0                   ? "the clip scale"
           : t->phase == PS__PHASE_UPDATE ? "optimizer state"
                                          : "parameters";
  return t->layer < 0                    ? "the batch"
         : t->phase == PS__PHASE_FORWARD ? "embedding rows"
                                         : "saved activations";
}

static const char *outgoing(const ps_tag *t) {
  if (t->phase == PS__PHASE_FORWARD)
    return "saved activations to leave";
  if (t->chunk >= 0)
    return "losses or rows to leave";
  return t->phase == PS__PHASE_UPDATE ? "new weights and state to leave" : "gradients to leave";
}

static const char *on_host(const ps__vop *op) {
  if (op->tag.phase != PS__PHASE_UPDATE)
    return "the loss";
  const ps__rate rate = ps__op_rate(op->kernel);
  return rate >= PS__RATE_ACCUMULATE  ? "sums of gradients"
         : rate >= PS__RATE_OPTIMIZER ? "the optimizer"
                                      : "the gradient norm";
}

static const char *label(const ps__places *at, const ps__vop *op) {
  if (ps__link_of(at, op->stream))
    switch (ps__direction(at, op->stream)) {
    case PS__TO_DEVICE: return incoming(&op->tag);
    case PS__TO_HOST: return outgoing(&op->tag);
    case PS__FROM_DISK: return "state from the disk";
    case PS__TO_DISK: return "state to the disk";
    default: return "other devices";
    }
  if (op->stream == at->net)
    return "other hosts";
  if (!op->kernel)
    return "copies to or from staging memory";
  if (op->stream == at->host_ops)
    return on_host(op);
  if (op->stream == at->io)
    return op->tag.layer < 0 ? "the next batch" : "embedding rows gathered";
  return "computation";
}

typedef struct lists {
  uint32_t *op[PS_MAX_STREAMS];
  uint32_t n[PS_MAX_STREAMS];
  uint32_t *memory;
} lists;

static ps_status list_streams(const ps_plan *p, lists *l) {
  const size_t n = p->step.n_op;
  memset(l, 0, sizeof *l);
  l->memory = ps__malloc((n + 1) * sizeof *l->memory);
  if (!l->memory)
    return ps__fail(PS_ENOMEM, "out of memory for the stalls of %zu ops", n);
  uint32_t *at = l->memory;
  for (uint32_t s = 0; s < p->at->n_streams; s++) {
    l->op[s] = at;
    for (size_t i = 0; i < n; i++)
      if (p->step.op[i].stream == s)
        *at++ = (uint32_t)i;
    l->n[s] = (uint32_t)(at - l->op[s]);
  }
  return PS_OK;
}

/* The op of the waits of @view that ended last, among the steps kept. */
static const ps_trace_event *last_awaited(const lists *l, const ps_op_view *view,
                                          const ps_trace_event *events, uint64_t n_ops,
                                          uint64_t step) {
  const ps_trace_event *last = NULL;
  for (uint32_t i = 0; i < view->n_wait; i++) {
    const ps_wait *w = &view->wait[i];
    if (w->steps_back > step)
      continue;
    const ps_trace_event *e =
        &events[(step - w->steps_back) * n_ops + l->op[w->stream][w->value - 1]];
    if (!last || e->end_ns > last->end_ns)
      last = e;
  }
  return last;
}

static ps_status stalls_of_stream(const ps_plan *p, const lists *l, const ps_trace_event *events,
                                  uint64_t n_steps, uint32_t s, totals *t) {
  const uint64_t n_ops = p->step.n_op, first = n_steps > 1;
  uint64_t before = 0;
  for (uint64_t k = 0; k < n_steps; k++)
    for (uint32_t i = 0; i < l->n[s]; i++) {
      const ps_trace_event *e = &events[k * n_ops + l->op[s][i]];
      ps_op_view view;
      PS_TRY(ps_schedule_op(p->schedule, l->op[s][i], &view));
      const ps_trace_event *awaited = last_awaited(l, &view, events, n_ops, k);
      if (k >= first && (k || i) && e->start_ns > before) {
        const bool blamed = awaited && awaited->end_ns > before;
        const uint64_t until =
            blamed ? (awaited->end_ns < e->start_ns ? awaited->end_ns : e->start_ns) : before;
        if (blamed)
          PS_TRY(add(t, s, awaited->stream, label(p->at, &p->step.op[awaited->op]),
                     (double)(until - before)));
        PS_TRY(add(t, s, s, "launch and signals", (double)(e->start_ns - until)));
      }
      if (e->end_ns > before)
        before = e->end_ns;
    }
  return PS_OK;
}

static int by_stream_and_time(const void *pa, const void *pb) {
  const ps_stall *a = pa, *b = pb;
  if (a->stream != b->stream)
    return a->stream < b->stream ? -1 : 1;
  return a->seconds > b->seconds ? -1 : a->seconds < b->seconds;
}

/* Each event is in its place, and of the step after the one before it: from here on the ops that
 * events name are used unchecked. */
ps_status ps__plan_check_events(const ps_plan *p, const ps_trace_event *events, uint64_t n) {
  const uint64_t n_ops = p->step.n_op;
  if (n == 0 || n % n_ops)
    return ps__fail(PS_EINVAL, "%llu events are no whole steps of %llu ops", (unsigned long long)n,
                    (unsigned long long)n_ops);
  for (uint64_t i = 0; i < n; i++) {
    const ps_trace_event *e = &events[i];
    if (e->op != i % n_ops || e->step != events[0].step + i / n_ops ||
        e->stream != p->step.op[e->op].stream || e->queued_ns > e->start_ns ||
        e->start_ns > e->end_ns)
      return ps__fail(PS_EINVAL,
                      "event %llu is not this plan's op %llu of step %llu: give a trace of this "
                      "plan, as it was made",
                      (unsigned long long)i, (unsigned long long)(i % n_ops),
                      (unsigned long long)(events[0].step + i / n_ops));
  }
  return PS_OK;
}

ps_status ps_plan_throughput(const ps_plan *plan, const ps_trace_event *events, uint64_t n,
                             ps_throughput *out) {
  enum { UPDATES = PS__N_DIRECTIONS, KINDS };
  double bytes[KINDS] = {0}, ns[KINDS] = {0};
  if (!plan || !events || !out)
    return ps__fail(PS_EINVAL, "ps_plan_throughput: plan, events and out must be given");
  PS_TRY(ps__plan_check_events(plan, events, n));
  for (uint64_t i = 0; i < n; i++) {
    const ps__vop *op = &plan->step.op[events[i].op];
    const bool update = ps__is_host_update(&plan->step, op);
    if (!update && !ps__link_of(plan->at, op->stream))
      continue;
    const int kind = update ? UPDATES : (int)ps__direction(plan->at, op->stream);
    bytes[kind] += op->work.bytes;
    ns[kind] += (double)(events[i].end_ns - events[i].start_ns);
  }
  *out = (ps_throughput){.struct_bytes = sizeof *out};
  out->h2d_bytes_per_s = ns[PS__TO_DEVICE] > 0 ? bytes[PS__TO_DEVICE] / ns[PS__TO_DEVICE] * 1e9 : 0;
  out->d2h_bytes_per_s = ns[PS__TO_HOST] > 0 ? bytes[PS__TO_HOST] / ns[PS__TO_HOST] * 1e9 : 0;
  out->update_bytes_per_s = ns[UPDATES] > 0 ? bytes[UPDATES] / ns[UPDATES] * 1e9 : 0;
  return PS_OK;
}

ps_status ps_plan_stalls(const ps_plan *plan, const ps_trace_event *events, uint64_t n,
                         ps_stall *stalls, uint64_t room, uint64_t *n_stalls) {
  if (!plan || !events || !n_stalls || (!stalls && room))
    return ps__fail(PS_EINVAL, "ps_plan_stalls: plan, events, stalls and n_stalls must be given");
  PS_TRY(ps__plan_check_events(plan, events, n));
  const uint64_t n_steps = n / plan->step.n_op;
  lists l;
  totals t = {.n = 0};
  PS_TRY(list_streams(plan, &l));
  ps_status st = PS_OK;
  for (uint32_t s = 0; st == PS_OK && s < plan->at->n_streams; s++)
    st = stalls_of_stream(plan, &l, events, n_steps, s, &t);
  ps__free(l.memory);
  if (t.n)
    qsort(t.stall, t.n, sizeof *t.stall, by_stream_and_time);
  for (size_t i = 0; i < t.n; i++)
    t.stall[i].seconds /= (double)(n_steps > 1 ? n_steps - 1 : 1);
  for (size_t i = 0; st == PS_OK && i < t.n && i < room; i++)
    stalls[i] = t.stall[i];
  if (st == PS_OK)
    *n_stalls = t.n;
  ps__free(t.stall);
  return st;
}
