/* schedule.h - programs and schedules from the inside. */
#ifndef PS_ENGINE_SCHEDULE_H
#define PS_ENGINE_SCHEDULE_H
#include "core/core.h"
#include <penstock/engine.h>
#include <stdatomic.h>

/* An op as stored: arguments, accesses and waits lie in the owner's arrays, here is where. */
typedef struct ps__op {
  const ps_kernel *kernel;
  ps_work work;
  ps_tag tag;
  uint64_t args;     /* byte offset, a multiple of 16 */
  uint64_t access;   /* index of the first */
  uint64_t wait;     /* index of the first; schedules only */
  uint64_t position; /* in its stream's list */
  uint32_t args_bytes, n_access, n_wait, stream;
  uint64_t waiters; /* bit s: an op of stream s waits for this one; schedules only */
} ps__op;

/* What programs and schedules share. */
typedef struct ps__oplist {
  uint32_t n_spaces, n_streams;
  size_t n_ops, n_access, args_bytes;
  ps__op *ops;
  ps_access *access;
  char *args;
  uint64_t stream_n_ops[PS_MAX_STREAMS];
  uint64_t space_bytes[PS_MAX_SPACES]; /* end of the highest range */
} ps__oplist;

struct ps_program {
  ps__oplist list;
  size_t ops_cap, access_cap, args_cap;
  /* of ps__schedule_borrow() */
  uint32_t *clocks;
  size_t clocks_cap;
};

struct ps_schedule {
  ps__oplist list;
  ps_wait *waits;
  size_t n_waits;
  _Atomic uint32_t n_runs; /* runs that live */
  bool borrows;            /* list has a program's arrays */
  bool of_plan; /* its host ops belong to a trainer, which runs it on its own engine alone */
};

/* ps__program_reserve() - room for so many ops, accesses and BYTES of arguments in all, where each
 * op's arguments take a multiple of 16. A program grows without it too. Errors: PS_ENOMEM.
 * ps__program_clear() - no ops, these streams and spaces. The arrays stay. */
ps_status ps__program_reserve(ps_program *program, size_t n_ops, size_t n_access,
                              size_t args_bytes);
void ps__program_clear(ps_program *program, uint32_t n_spaces, uint32_t n_streams);

const char *ps__op_name(const ps__op *op); /* the kernel's name, or "copy" */

/* The intervals of a program: every space cut at every boundary of a declared range. Access i
 * covers intervals [first[i], end[i]); intervals of different spaces have different numbers. */
typedef struct ps__intervals {
  uint32_t *first, *end;
  size_t n_intervals;
} ps__intervals;
ps_status ps__intervals_cut(ps__intervals *out, const ps__oplist *list);
void ps__intervals_free(ps__intervals *intervals);

/* The rules that ps_schedule_compile() derives waits by. A test compiles without one and must
 * see programs go wrong. */
enum {
  PS__RULE_RAW = 1,        /* a read waits for the last write */
  PS__RULE_WAR = 2,        /* a write waits for the reads since the last write */
  PS__RULE_WAW = 4,        /* a write waits for the last write */
  PS__RULE_CROSS_STEP = 8, /* waits on the step before */
  PS__RULES_ALL = 15
};
ps_status ps__schedule_compile_masked(ps_schedule **out, const ps_program *program, unsigned rules);
/* ps__schedule_borrow() - as ps_schedule_compile(), of @program's own arrays in place of copies.
 * Until the schedule is destroyed, the program stays as it is, and nobody else compiles it. What a
 * compilation needs stays in the program for the next one. */
ps_status ps__schedule_borrow(ps_schedule **out, ps_program *program);

#endif
