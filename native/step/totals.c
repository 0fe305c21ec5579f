/* totals.c - totals of gradients: additions to them, their sums of squares, and what follows a
 * total that is complete on the host. */
#include "step/emit.h"
#include <assert.h>

uint32_t ps__sumsq_on_device(ps__builder *b, uint32_t unit, uint32_t grad) {
  ps__step *s = b->s;
  const ps__span_def *span = s->model->unit[unit].span;
  const uint32_t n = s->model->unit[unit].n_spans, slots = ps__norm_slots(s->model),
                 out = ps__vt_new(b, b->on->at.place, slots * 8);
  const ps__storage as = s->recipe->grad;
  const ps_tag tag = ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients");
  for (uint32_t i = 0; i < n; i++) {
    const ps__args_sumsq a = {.n = span[i].n, .dt = as.dtype};
    const ps__vaccess access[2] = {ps__elements(grad, PS_READ, as, span[i].offset, span[i].n),
                                   ps__part(out, PS_WRITE, i * 8, 8)};
    ps__emit(b, &ps__k_sumsq, b->on->at.compute, &a, sizeof a, access, 2, tag);
  }
  ps__emit_copy(b, b->on->at.to_host, ps__part(out, PS_READ, 0, n * 8),
                ps__part(s->norms, PS_WRITE, (uint64_t)unit * slots * 8, n * 8),
                ps__about(ps__unit_tag(b, unit, PS__PHASE_BACKWARD), "sums of squares"));
  return out;
}

/* How contribution i is added to the unit's total in @space. The first addition to a total with low
 * bytes makes them. */
static ps__args_accumulate addition(ps__builder *b, uint32_t unit, uint32_t i, uint32_t space) {
  ps__unit_progress *u = &b->unit[unit];
  const uint64_t n = b->s->unit_host[unit].n;
  const uint32_t mode = ps__sum_mode_of(b, unit, i);
  if ((mode & PS_LOW_WRITE) && u->low == PS__NO_VT)
    u->low = ps__vt_new(b, space, n);
  return (ps__args_accumulate){.n = n,
                               .dt = b->s->recipe->grad.dtype,
                               .n_threads = space == b->s->at->host ? b->s->spec->sum_threads : 0,
                               .mode = mode,
                               .index = i};
}

static void low_used(ps__builder *b, uint32_t unit, uint32_t mode) {
  if (!(mode & PS_LOW_WRITE))
    ps__vt_drop(b, &b->unit[unit].low, 0);
}

void ps__add_to_total(ps__builder *b, uint32_t unit, uint32_t i, uint32_t space, uint32_t grad,
                      uint32_t total, ps_tag tag) {
  const bool on_host = space == b->s->at->host;
  const ps__args_accumulate a = addition(b, unit, i, space);
  ps__vaccess access[3] = {ps__whole(b, grad, PS_READ), ps__whole(b, total, PS_READ_WRITE)};
  const bool low = b->unit[unit].low != PS__NO_VT;
  if (low)
    access[2] = ps__whole(b, b->unit[unit].low, ps__low_access(a.mode));
  ps__emit(b, on_host ? &ps__k_accumulate_host : &ps__k_accumulate,
           on_host ? b->s->at->host_ops : b->on->at.compute, &a, sizeof a, access, low ? 3 : 2,
           ps__about(tag, "gradients"));
  low_used(b, unit, a.mode);
}

void ps__sumsq_on_host(ps__builder *b, uint32_t unit, uint32_t i, uint32_t staging) {
  ps__step *s = b->s;
  const ps__span_def *span = s->model->unit[unit].span;
  const uint32_t n = s->model->unit[unit].n_spans, grad = s->unit_host[unit].grad;
  const ps__storage as = s->recipe->grad;
  const uint64_t at = (uint64_t)unit * ps__norm_slots(s->model) * 8;
  const bool add = staging != PS__NO_VT;
  ps__args_accumulate whole = {
      .dt = as.dtype, .n_threads = s->spec->sum_threads, .mode = PS_LOW_READ};
  if (add)
    whole = addition(b, unit, i, b->s->at->host);
  const bool low = b->unit[unit].low != PS__NO_VT;
  const ps_kernel *kernel = add   ? &ps__k_accumulate_sumsq_host
                            : low ? &ps__k_round_sumsq_host
                                  : &ps__k_sumsq_host;
  for (uint32_t k = 0; k < n; k++) {
    ps__args_accumulate part = whole;
    const ps__args_sumsq squares = {
        .n = span[k].n, .dt = as.dtype, .n_threads = s->spec->sum_threads};
    ps__vaccess access[4];
    uint32_t m = 0;
    part.n = span[k].n;
    part.first = span[k].offset;
    if (add)
      access[m++] = ps__elements(staging, PS_READ, as, part.first, part.n);
    access[m++] = ps__elements(grad, add || low ? PS_READ_WRITE : PS_READ, as, part.first, part.n);
    access[m++] = ps__part(s->norms, PS_WRITE, at + k * 8, 8);
    if (low)
      access[m++] = ps__part(b->unit[unit].low, PS_READ, span[k].offset, span[k].n);
    ps__emit(b, kernel, b->s->at->host_ops, add || low ? (const void *)&part : &squares,
             add || low ? sizeof part : sizeof squares, access, m,
             ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients"));
  }
  low_used(b, unit, 0);
}

/* The total of this host becomes that of all hosts. Low bytes are rounded away before. The op's
 * work: BYTES that the host sends, and as many it receives (hosts/hosts.h). */
static void exchange(ps__builder *b, uint32_t unit) {
  const ps__vaccess total = ps__whole(b, b->s->unit_host[unit].grad, PS_READ_WRITE);
  const double n = b->s->spec->n_hosts, sent = 2 * (n - 1) / n * (double)total.bytes;
  if (b->unit[unit].low != PS__NO_VT)
    ps__sumsq_on_host(b, unit, 0, PS__NO_VT);
  ps__emit_hook(b, PS__HOOK_EXCHANGE, unit, b->s->at->net, &total, 1, ps__bytes_work(sent),
                ps__about(ps__unit_tag(b, unit, PS__PHASE_UPDATE), "gradients"));
}

static void total_complete(ps__builder *b, uint32_t unit) {
  ps__sumsq_on_host(b, unit, 0, PS__NO_VT);
  ps__total_ready(b, unit);
}

static void exchange_over(ps__builder *b) {
  const uint32_t unit = b->exchanging;
  b->exchanging = PS__NO_UNIT;
  if (unit != PS__NO_UNIT)
    total_complete(b, unit);
}

static uint32_t next_to_exchange(ps__builder *b) {
  while (b->to_exchange && b->s->model->unit[b->to_exchange - 1].frozen)
    b->to_exchange--;
  return b->to_exchange ? b->to_exchange - 1 : PS__NO_UNIT;
}

void ps__total_on_host(ps__builder *b, uint32_t unit) {
  if (!ps__exchanges(b->s->spec)) {
    total_complete(b, unit);
    return;
  }
  b->unit[unit].complete = true;
  for (uint32_t next; (next = next_to_exchange(b)) != PS__NO_UNIT && b->unit[next].complete;) {
    exchange(b, next);
    exchange_over(b);
    b->exchanging = next;
    b->to_exchange = next;
  }
}

void ps__exchanges_end(ps__builder *b) {
  assert(!ps__exchanges(b->s->spec) || next_to_exchange(b) == PS__NO_UNIT);
  exchange_over(b);
}
