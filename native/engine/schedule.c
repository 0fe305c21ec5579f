/* schedule.c - derive the hazards of a program that is repeated step after step
 * (docs/design/engine.md, "Hazards").
 *
 * The program is walked twice. A TIME is a value of a stream's counter in that double walk: op i of
 * a stream with n ops has time walk * n + i + 1. A CLOCK holds for each stream the latest time that
 * is known to have passed. Every op keeps the clock that it ran under. So a stream that waits for
 * an op also knows all that the op waited for.
 *
 * The second walk may be replayed for every step, the first included, for two reasons:
 * - All orderings point forward in program order. Those between two ops of one step therefore arise
 *   inside that step, and are the same in both walks.
 * - A conflict over two steps or more is covered by the stream's own order between an op and the
 *   same op one step later.
 *
 * Neighbouring intervals in one state are a STRETCH, and an access reads the stretches that it
 * covers. A write makes its intervals one stretch. An access that begins or ends inside of a
 * stretch divides it. So a tensor that others have divided into a hundred intervals costs as much
 * as one of a single interval. */
#include "engine/schedule.h"
#include <string.h>

/* A stretch's last writer, and the streams that have read it since: bit s is stream s. */
typedef struct stretch {
  uint32_t time, stream;
  uint64_t readers;
} stretch;
_Static_assert(PS_MAX_STREAMS <= 64, "a set of streams is a word");

typedef struct compiler {
  const ps__oplist *list;
  unsigned rules;
  uint32_t n_streams;
  ps__intervals intervals;
  /* by interval, of those that begin a stretch: n_intervals; n_intervals x n_streams, the times of
   * stretch.readers */
  stretch *state;
  uint32_t *readings;
  uint64_t *begins; /* a bit an interval: it begins a stretch */
  /* 2 walks x n_ops x n_streams, by time: the clock of each op; stream s starts at
   * clock_first[s] */
  uint32_t *clocks;
  uint64_t clock_first[PS_MAX_STREAMS];
  uint32_t now[PS_MAX_STREAMS][PS_MAX_STREAMS]; /* each stream's clock */
  ps_schedule *out;
  size_t waits_cap;
} compiler;

static uint32_t *clock_of(const compiler *c, uint32_t stream, uint32_t time) {
  return c->clocks + (c->clock_first[stream] + time - 1) * c->n_streams;
}

/* The waits of an op: the time of each stream of a set. */
typedef struct needs {
  uint64_t streams; /* bit s: time[s] is set */
  uint32_t time[PS_MAX_STREAMS];
} needs;

static void later(needs *n, uint32_t stream, uint32_t time) {
  if (n->streams >> stream & 1 && n->time[stream] >= time)
    return;
  n->streams |= 1ull << stream;
  n->time[stream] = time;
}

/* Takes the lowest stream out of a set that is not empty. */
static uint32_t take(uint64_t *set) {
  const uint32_t s = (uint32_t)__builtin_ctzll(*set);
  *set &= *set - 1;
  return s;
}

/* The last interval up to @i that begins a stretch. Interval 0 does. */
static uint32_t stretch_of(const compiler *c, uint32_t i) {
  uint32_t word = i / 64;
  uint64_t bits = c->begins[word] << (63 - i % 64);
  if (bits)
    return i - (uint32_t)__builtin_clzll(bits);
  while (!c->begins[--word])
    ;
  return word * 64 + 63 - (uint32_t)__builtin_clzll(c->begins[word]);
}

/* The next interval from @i on that begins a stretch; @end: none below it. */
static uint32_t next_stretch(const compiler *c, uint32_t i, uint32_t end) {
  for (uint32_t word = i / 64; i < end; i = ++word * 64) {
    const uint64_t bits = c->begins[word] >> i % 64;
    if (bits)
      return i + (uint32_t)__builtin_ctzll(bits) < end ? i + (uint32_t)__builtin_ctzll(bits) : end;
  }
  return end;
}

/* Interval @i begins a stretch from here on. */
static void divide(const compiler *c, uint32_t i) {
  if (i == c->intervals.n_intervals || c->begins[i / 64] >> i % 64 & 1)
    return;
  const uint32_t of = stretch_of(c, i);
  c->begins[i / 64] |= 1ull << i % 64;
  c->state[i] = c->state[of];
  for (uint64_t set = c->state[of].readers; set;) {
    const uint32_t s = take(&set);
    c->readings[(size_t)i * c->n_streams + s] = c->readings[(size_t)of * c->n_streams + s];
  }
}

/* What the stretches of an access ask to wait for. */
static void collect(const compiler *c, size_t access, uint32_t mode, needs *need) {
  const uint32_t first = c->intervals.first[access], end = c->intervals.end[access];
  const bool behind_writer = ((mode & PS_READ) && (c->rules & PS__RULE_RAW)) ||
                             ((mode & PS_WRITE) && (c->rules & PS__RULE_WAW)),
             behind_readers = (mode & PS_WRITE) && (c->rules & PS__RULE_WAR);
  for (uint32_t i = stretch_of(c, first); i < end; i = next_stretch(c, i + 1, end)) {
    const stretch *at = &c->state[i];
    if (behind_writer && at->time)
      later(need, at->stream, at->time);
    const uint32_t *time = c->readings + (size_t)i * c->n_streams;
    for (uint64_t set = behind_readers ? at->readers : 0; set;) {
      const uint32_t s = take(&set);
      later(need, s, time[s]);
    }
  }
}

static void mark(const compiler *c, size_t access, uint32_t mode, uint32_t stream, uint32_t time) {
  const uint32_t first = c->intervals.first[access], end = c->intervals.end[access];
  divide(c, first);
  divide(c, end);
  if (mode & PS_WRITE) {
    for (uint32_t i = next_stretch(c, first + 1, end); i < end; i = next_stretch(c, i + 1, end))
      c->begins[i / 64] &= ~(1ull << i % 64);
    c->state[first] = (stretch){.time = time, .stream = stream};
    return;
  }
  for (uint32_t i = first; i < end; i = next_stretch(c, i + 1, end)) {
    c->state[i].readers |= 1ull << stream;
    c->readings[(size_t)i * c->n_streams + stream] = time;
  }
}

/* Drop what the stream has seen, and what another of the waits implies. Being implied is an
 * order without cycles, so that what is left at its ends implies all that was dropped. */
static void reduce(const compiler *c, uint32_t stream, needs *need) {
  uint64_t implied = 0;
  for (uint64_t set = need->streams; set;) {
    const uint32_t s = take(&set);
    if (need->time[s] <= c->now[stream][s])
      need->streams &= ~(1ull << s);
  }
  for (uint64_t set = need->streams; set;) {
    const uint32_t i = take(&set), *seen = clock_of(c, i, need->time[i]);
    for (uint64_t others = need->streams & ~(1ull << i); others;) {
      const uint32_t j = take(&others);
      if (seen[j] >= need->time[j])
        implied |= 1ull << j;
    }
  }
  need->streams &= ~implied;
}

static ps_status emit(compiler *c, size_t op, const needs *need) {
  ps_schedule *sch = c->out;
  sch->list.ops[op].wait = sch->n_waits;
  for (uint64_t set = need->streams; set;) {
    const uint32_t s = take(&set), time = need->time[s];
    const uint64_t n = c->list->stream_n_ops[s];
    const bool before = time <= n;
    if (before && !(c->rules & PS__RULE_CROSS_STEP))
      continue;
    if (!PS_GROW(sch->waits, sch->n_waits, c->waits_cap))
      return ps__fail(PS_ENOMEM, "schedule: out of memory at wait %zu", sch->n_waits);
    sch->waits[sch->n_waits++] =
        (ps_wait){.stream = s, .steps_back = before, .value = before ? time : time - n};
    sch->list.ops[op].n_wait++;
  }
  return PS_OK;
}

static ps_status walk_op(compiler *c, size_t idx, uint32_t walk) {
  const ps__op *op = &c->list->ops[idx];
  needs need;
  uint32_t *now = c->now[op->stream];
  uint32_t time = (uint32_t)(walk * c->list->stream_n_ops[op->stream] + op->position + 1);
  need.streams = 0; /* its times are read where they are set */
  for (uint32_t i = 0; i < op->n_access; i++)
    collect(c, op->access + i, c->list->access[op->access + i].mode, &need);
  reduce(c, op->stream, &need);
  if (walk == 1)
    PS_TRY(emit(c, idx, &need));
  for (uint64_t set = need.streams; set;) {
    const uint32_t s = take(&set), *seen = clock_of(c, s, need.time[s]);
    for (uint32_t t = 0; t < c->n_streams; t++)
      now[t] = now[t] < seen[t] ? seen[t] : now[t];
  }
  now[op->stream] = time;
  memcpy(clock_of(c, op->stream, time), now, c->n_streams * sizeof *now);
  for (uint32_t i = 0; i < op->n_access; i++)
    mark(c, op->access + i, c->list->access[op->access + i].mode, op->stream, time);
  return PS_OK;
}

static void *copy_of(const void *from, size_t bytes) {
  void *p = ps__malloc(bytes);
  if (p && bytes)
    memcpy(p, from, bytes);
  return p;
}

/* Room for the clocks of a compilation: @lender's, where there is one. */
static uint32_t *clocks_of(ps_program *lender, size_t n) {
  if (!lender)
    return ps__malloc(n * sizeof(uint32_t));
  if (n > lender->clocks_cap) {
    ps__free(lender->clocks);
    lender->clocks = ps__malloc(n * sizeof(uint32_t));
    lender->clocks_cap = lender->clocks ? n : 0;
  }
  return lender->clocks;
}

/* @lender: NULL, or the program of @l, whose arrays the schedule has */
static ps_status compiler_init(compiler *c, const ps__oplist *l, unsigned rules,
                               ps_program *lender) {
  *c = (compiler){.list = l, .rules = rules, .n_streams = l->n_streams};
  uint64_t first = 0;
  for (uint32_t s = 0; s < l->n_streams; s++) {
    c->clock_first[s] = first;
    first += 2 * l->stream_n_ops[s];
  }
  PS_TRY(ps__intervals_cut(&c->intervals, l));
  c->state = ps__calloc(c->intervals.n_intervals, sizeof *c->state);
  c->begins = ps__calloc(c->intervals.n_intervals / 64 + 1, sizeof *c->begins);
  c->readings = ps__malloc(c->intervals.n_intervals * c->n_streams * sizeof *c->readings);
  c->clocks = clocks_of(lender, first * l->n_streams);
  ps_schedule *s = c->out = ps__calloc(1, sizeof *c->out);
  if (s) {
    s->list = *l;
    s->borrows = lender != NULL;
  }
  if (s && !lender) {
    s->list.ops = copy_of(l->ops, l->n_ops * sizeof *l->ops);
    s->list.access = copy_of(l->access, l->n_access * sizeof *l->access);
    s->list.args = copy_of(l->args, l->args_bytes);
  }
  if (!c->state || !c->begins || !c->readings || !c->clocks || !s ||
      (!lender && (!s->list.ops || !s->list.access || !s->list.args)))
    return ps__fail(PS_ENOMEM, "schedule: out of memory for %zu ops, %zu intervals", l->n_ops,
                    c->intervals.n_intervals);
  c->begins[0] = 1;
  return PS_OK;
}

/* Note at each awaited op the streams that wait for it: a backend need not signal an op that no
 * stream awaits. */
static ps_status mark_waiters(ps_schedule *s) {
  ps__oplist *l = &s->list;
  uint64_t first[PS_MAX_STREAMS], n = 0;
  uint32_t *at = ps__malloc(l->n_ops * sizeof *at); /* op by stream and position */
  if (!at)
    return ps__fail(PS_ENOMEM, "schedule: out of memory for %zu ops", l->n_ops);
  for (uint32_t i = 0; i < l->n_streams; i++) {
    first[i] = n;
    n += l->stream_n_ops[i];
  }
  for (size_t i = 0; i < l->n_ops; i++)
    at[first[l->ops[i].stream] + l->ops[i].position] = (uint32_t)i;
  for (size_t i = 0; i < l->n_ops; i++)
    for (uint32_t w = 0; w < l->ops[i].n_wait; w++) {
      const ps_wait *wait = &s->waits[l->ops[i].wait + w];
      l->ops[at[first[wait->stream] + wait->value - 1]].waiters |= 1ull << l->ops[i].stream;
    }
  ps__free(at);
  return PS_OK;
}

static ps_status compile(ps_schedule **out, const ps__oplist *l, unsigned rules,
                         ps_program *lender) {
  compiler c;
  ps_status st = compiler_init(&c, l, rules, lender);
  for (uint32_t walk = 0; walk < 2; walk++)
    for (size_t i = 0; st == PS_OK && i < l->n_ops; i++)
      st = walk_op(&c, i, walk);
  ps__intervals_free(&c.intervals);
  ps__free(c.state);
  ps__free(c.begins);
  ps__free(c.readings);
  if (!lender)
    ps__free(c.clocks);
  if (st == PS_OK)
    st = mark_waiters(c.out);
  if (st == PS_OK)
    *out = c.out;
  else
    ps_schedule_destroy(c.out);
  return st;
}

ps_status ps__schedule_compile_masked(ps_schedule **out, const ps_program *program,
                                      unsigned rules) {
  return compile(out, &program->list, rules, NULL);
}

ps_status ps_schedule_compile(ps_schedule **out, const ps_program *program) {
  return ps__schedule_compile_masked(out, program, PS__RULES_ALL);
}

ps_status ps__schedule_borrow(ps_schedule **out, ps_program *program) {
  return compile(out, &program->list, PS__RULES_ALL, program);
}

ps_status ps_schedule_destroy(ps_schedule *s) {
  if (!s)
    return PS_OK;
  uint32_t n = atomic_load(&s->n_runs);
  if (n)
    return ps__fail(PS_EBUSY, "schedule: %u run(s) of it still live", n);
  if (!s->borrows) {
    ps__free(s->list.ops);
    ps__free(s->list.access);
    ps__free(s->list.args);
  }
  ps__free(s->waits);
  ps__free(s);
  return PS_OK;
}

uint32_t ps_schedule_n_streams(const ps_schedule *s) { return s->list.n_streams; }
uint32_t ps_schedule_n_spaces(const ps_schedule *s) { return s->list.n_spaces; }
uint64_t ps_schedule_n_ops(const ps_schedule *s) { return s->list.n_ops; }
uint64_t ps_schedule_n_waits(const ps_schedule *s) { return s->n_waits; }

uint64_t ps_schedule_stream_n_ops(const ps_schedule *s, uint32_t stream) {
  return stream < s->list.n_streams ? s->list.stream_n_ops[stream] : 0;
}

uint64_t ps_schedule_space_bytes(const ps_schedule *s, uint32_t space) {
  return space < s->list.n_spaces ? s->list.space_bytes[space] : 0;
}

ps_status ps_schedule_op(const ps_schedule *s, uint64_t idx, ps_op_view *out) {
  if (idx >= s->list.n_ops)
    return ps__fail(PS_EINVAL, "schedule: op %llu is not below %zu", (unsigned long long)idx,
                    s->list.n_ops);
  const ps__op *op = &s->list.ops[idx];
  *out = (ps_op_view){.kernel = op->kernel,
                      .args = s->list.args + op->args,
                      .access = s->list.access + op->access,
                      .wait = op->n_wait ? s->waits + op->wait : NULL,
                      .n_access = op->n_access,
                      .n_wait = op->n_wait,
                      .stream = op->stream,
                      .args_bytes = op->args_bytes,
                      .position = op->position,
                      .work = op->work,
                      .tag = op->tag};
  return PS_OK;
}
