/* trace.c - what ran when: copy a run's events out, write events for Chrome's and Perfetto's
 * viewers. */
#include "engine/engine.h"
#include <errno.h>
#include <string.h>
#include <unistd.h>

static uint64_t after_start(const ps_run *r, uint64_t ns) {
  return ns > r->start_ns ? ns - r->start_ns : 0;
}

ps_status ps_run_trace(const ps_run *r, ps_trace_event *events, uint64_t room, uint64_t *n) {
  if (!ps_run_at_rest(r))
    return ps__fail(PS_ESTATE, "trace: steps are in flight");
  if (r->trace_steps && !atomic_load(&r->paused))
    r->engine->backend->settle(r->engine->device, r->events);
  uint64_t n_ops = r->schedule->list.n_ops, last = 0, found = 0;
  for (uint64_t i = 0; i < n_ops * r->trace_steps; i++)
    if (r->events[i].end_ns && r->events[i].step > last)
      last = r->events[i].step;
  uint64_t first = last + 1 > r->trace_steps ? last + 1 - r->trace_steps : 0;
  for (int copying = 0; copying <= (events != NULL); copying++) {
    found = 0;
    for (uint64_t step = first; r->trace_steps && step <= last; step++)
      for (uint64_t op = 0; op < n_ops; op++) {
        const ps_trace_event *e = &r->events[step % r->trace_steps * n_ops + op];
        if (e->step != step || !e->end_ns)
          continue; /* after an error: never executed, or overwritten by a stream that was ahead */
        if (copying) {
          events[found] = *e;
          events[found].queued_ns = after_start(r, e->queued_ns);
          events[found].start_ns = after_start(r, e->start_ns);
          events[found].end_ns = after_start(r, e->end_ns);
        }
        found++;
      }
    if (events && found > room)
      return ps__fail(PS_EINVAL, "trace: room for %llu events, %llu are kept",
                      (unsigned long long)room, (unsigned long long)found);
  }
  *n = found;
  return PS_OK;
}

ps_status ps__run_marks(ps_run *r, uint64_t step, ps_trace_event *events) {
  const uint64_t n_ops = r->schedule->list.n_ops;
  if (!r->trace_steps || step < r->trace_from || step >= r->trace_to ||
      ps__run_submitted(r) > step + r->trace_steps)
    return ps__fail(PS_ESTATE, "trace: step %llu is not kept", (unsigned long long)step);
  memcpy(events, r->events + step % r->trace_steps * n_ops, n_ops * sizeof *events);
  if (!atomic_load(&r->paused) && r->engine->backend->marks)
    PS_TRY(r->engine->backend->marks(r->engine->device, events));
  for (uint64_t i = 0; i < n_ops; i++) {
    if (events[i].step != step || !events[i].end_ns)
      return ps__fail(PS_ESTATE, "trace: step %llu lacks ops", (unsigned long long)step);
    events[i].queued_ns = after_start(r, events[i].queued_ns);
    events[i].start_ns = after_start(r, events[i].start_ns);
    events[i].end_ns = after_start(r, events[i].end_ns);
  }
  return PS_OK;
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void put_string(FILE *f, const char *s) {
  fputc('"', f);
  for (size_t n; *s; s += n ? n : 1) {
    const unsigned char c = (unsigned char)*s;
    n = ps__utf8_length((const unsigned char *)s);
    if (n == 0)
      fputs("\\ufffd", f);
    else if (c == '"' || c == '\\')
      fprintf(f, "\\%c", c);
    else if (c < 0x20)
      fprintf(f, "\\u%04x", c);
    else
      fwrite(s, 1, n, f);
  }
  fputc('"', f);
}

static void put_us(FILE *f, uint64_t ns) {
  fprintf(f, "%llu.%03u", (unsigned long long)(ns / 1000), (unsigned)(ns % 1000));
}

static void put_event(FILE *f, const ps_schedule *s, const ps_trace_event *e) {
  static const char *const class_name[PS_N_CLASSES] = {
      "other", "gemm", "attention", "elementwise", "copy", "optimizer", "io"};
  const ps__op *op = &s->list.ops[e->op];
  uint32_t op_class = op->kernel ? op->kernel->op_class : PS_CLASS_COPY;
  fputs(",\n{\"name\":", f);
  put_string(f, ps__op_name(op));
  fprintf(f, ",\"cat\":\"%s\",\"ph\":\"X\",\"pid\":0,\"tid\":%u,\"ts\":",
          class_name[op_class < PS_N_CLASSES ? op_class : 0], e->stream);
  put_us(f, e->start_ns);
  fputs(",\"dur\":", f);
  put_us(f, e->end_ns - e->start_ns);
  fprintf(f,
          ",\"args\":{\"step\":%llu,\"op\":%llu,\"layer\":%d,\"round\":%d,\"chunk\":%d,\"phase\":%"
          "d,\"wait_us\":",
          (unsigned long long)e->step, (unsigned long long)e->op, op->tag.layer, op->tag.round,
          op->tag.chunk, op->tag.phase);
  put_us(f, e->start_ns - e->queued_ns);
  if (op->tag.what) {
    fputs(",\"what\":", f);
    put_string(f, op->tag.what);
  }
  fputs("}}", f);
}

static void put_gauge(FILE *f, const ps_trace_gauge *c) {
  fputs(",\n{\"name\":", f);
  put_string(f, c->name);
  fputs(",\"ph\":\"C\",\"pid\":0,\"ts\":", f);
  put_us(f, c->ns);
  fprintf(f, ",\"args\":{\"bytes\":%llu}}", (unsigned long long)c->bytes);
}

static ps_status check_events(const ps_schedule *s, const ps_trace_event *events, uint64_t n) {
  for (uint64_t i = 0; i < n; i++)
    if (events[i].op >= s->list.n_ops || events[i].stream >= s->list.n_streams ||
        events[i].queued_ns > events[i].start_ns || events[i].start_ns > events[i].end_ns)
      return ps__fail(PS_EINVAL, "trace: event %llu is not one of this schedule",
                      (unsigned long long)i);
  return PS_OK;
}

ps_status ps_trace_write_json(const char *path, const ps_schedule *s, const ps_trace_event *events,
                              uint64_t n, const char *const *stream_names,
                              const ps_trace_gauge *gauges, uint64_t n_gauges) {
  PS_TRY(check_events(s, events, n));
  char *temporary;
  int fd, why;
  PS_TRY(ps__replace_begin(&fd, &temporary, path));
  const int copy = dup(fd); /* closed with the stream */
  FILE *f = copy >= 0 ? fdopen(copy, "w") : NULL;
  bool ok = f != NULL;
  why = errno;
  if (f) {
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
          "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":0,\"args\":{\"name\":\"penstock\"}}",
          f);
    for (uint32_t i = 0; i < s->list.n_streams; i++) {
      fprintf(
          f,
          ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":0,\"tid\":%u,\"args\":{\"name\":", i);
      put_string(f, stream_names[i]);
      fprintf(f,
              "}},\n{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":0,\"tid\":%u,\"args\":{"
              "\"sort_index\":%u}}",
              i, i);
    }
    for (uint64_t i = 0; i < n; i++)
      put_event(f, s, &events[i]);
    for (uint64_t i = 0; i < n_gauges; i++)
      put_gauge(f, &gauges[i]);
    fputs("\n]}\n", f);
    ok = !ferror(f);
    ok = fclose(f) == 0 && ok;
    why = errno;
  } else if (copy >= 0) {
    close(copy);
  }
  return ps__replace_end(
      fd, temporary, path,
      ok ? PS_OK : ps__fail(PS_EIO, "%s: writing the trace failed: %s", path, strerror(why)));
}
