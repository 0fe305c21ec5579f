/* heads.c - columns by head, and gates of a sigmoid: what is around attention with a gate and the
 * gated delta rule. */
#include "kernels/cpu/cpu.h"
#include "core/vec.h"

/* ---- columns --------------------------------------------------------------------------------- */

typedef struct heads_job {
  ps__args_heads a;
  char *all, *first, *second;
} heads_job;

/* Part @p of group @g: bytes [*at, *at + returned) of a row of all, and *to of the other tensor. */
static size_t part_of(const ps__args_heads *a, uint32_t p, uint32_t g, size_t *at, size_t *to) {
  const size_t each = ps__dt_bytes(a->dt);
  size_t group = 0, before = 0, others = 0;
  for (uint32_t i = 0; i < PS_HEAD_PARTS; i++) {
    group += a->width[i];
    before += i < p ? a->width[i] : 0;
    others += i < p && (i < a->n_first) == (p < a->n_first) ? a->width[i] : 0;
  }
  *at = (g * group + before) * each;
  *to = (others * a->n_groups + (size_t)g * a->width[p]) * each;
  return a->width[p] * each;
}

static void move_row(const heads_job *j, int64_t t, bool join) {
  const ps__args_heads *a = &j->a;
  const size_t each = ps__dt_bytes(a->dt), tail = a->tail * each,
               n_all = ps__heads_columns(a, 0, PS_HEAD_PARTS) * each + tail,
               n_first = ps__heads_columns(a, 0, a->n_first) * each + tail,
               n_second = n_all - n_first;
  char *all = j->all + (size_t)t * n_all, *first = j->first + (size_t)t * n_first,
       *second = j->second + (size_t)t * n_second;
  for (uint32_t p = 0; p < PS_HEAD_PARTS; p++)
    for (uint32_t g = 0; g < a->n_groups && a->width[p]; g++) {
      size_t at, to;
      const size_t n = part_of(a, p, g, &at, &to);
      char *other = (p < a->n_first ? first : second) + to;
      memcpy(join ? all + at : other, join ? other : all + at, n);
    }
  if (tail)
    memcpy(join ? all + n_all - tail : first + n_first - tail,
           join ? first + n_first - tail : all + n_all - tail, tail);
}

static void split_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  for (int64_t t = first; t < end; t++)
    move_row(arg, t, false);
}
static void join_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  for (int64_t t = first; t < end; t++)
    move_row(arg, t, true);
}

static void move_rows(const ps_launch *l, uint32_t all, uint32_t first, ps__rows_fn task) {
  const ps__args_heads *a = l->args;
  const uint64_t n = ps__heads_columns(a, 0, PS_HEAD_PARTS);
  const bool has_second = ps__heads_columns(a, 0, a->n_first) < n;
  heads_job j = {*a, l->ptr[all], l->ptr[first], has_second ? l->ptr[first + 1] : NULL};
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(n + a->tail), task, &j);
}

/* heads_split, heads_join
 * math    none: columns of a row change places
 * bytes   2*T*columns*sizeof(dt).   determinism  bitwise */
ps_status ps__cpu_heads_split(const ps_launch *l) {
  move_rows(l, 0, 1, split_task);
  return PS_OK;
}
ps_status ps__cpu_heads_join(const ps_launch *l) {
  const ps__args_heads *a = l->args;
  const bool has_second =
      ps__heads_columns(a, 0, a->n_first) < ps__heads_columns(a, 0, PS_HEAD_PARTS);
  move_rows(l, has_second ? 2 : 1, 0, join_task);
  return PS_OK;
}

/* ---- gates ----------------------------------------------------------------------------------- */

typedef struct gate_job {
  ps__args_sigmoid_gate a;
  const char *x, *g, *dy, *residual;
  char *y, *dx, *dg;
} gate_job;

#define sigmoid_of(x) (1.0f / (1.0f + ps__v_exp(-(x))))

/* With a gate for each column lanes are gates; else the columns of one gate. */
PS_VEC void gate_fwd_rows(const gate_job *j, int64_t first, int64_t end, uint32_t dt) {
  const size_t n = j->a.cols, m = j->a.n_gates, each = n / m, b = ps__dt_bytes(dt);
  for (int64_t t = first; t < end; t++)
    for (size_t k = 0; k < (each == 1 ? 1 : m); k++) {
      const size_t at = (size_t)t * n + k * each, width = each == 1 ? n : each;
      const ps__v one = sigmoid_of(ps__v_set(ps__load1_f32(j->g, dt, (size_t)t * m + k)));
      for (size_t i = 0; i < width; i += PS_LANES) {
        ps__v s = one;
        if (each == 1)
          s = sigmoid_of(ps__v_read(j->g + at * b, dt, i, width, 0.0f));
        s *= ps__v_read(j->x + at * b, dt, i, width, 0.0f);
        if (j->a.has_residual)
          s += ps__v_read(j->residual + at * b, dt, i, width, 0.0f);
        ps__v_write(j->y + at * b, dt, i, width, s);
      }
    }
}

PS_VEC void gate_bwd_rows(const gate_job *j, int64_t first, int64_t end, uint32_t dt) {
  const size_t n = j->a.cols, m = j->a.n_gates, each = n / m, b = ps__dt_bytes(dt);
  for (int64_t t = first; t < end; t++)
    for (size_t k = 0; k < (each == 1 ? 1 : m); k++) {
      const size_t at = (size_t)t * n + k * each, width = each == 1 ? n : each;
      const ps__v gate = ps__v_set(ps__load1_f32(j->g, dt, (size_t)t * m + k)),
                  one = sigmoid_of(gate);
      ps__v sum = {0};
      for (size_t i = 0; i < width; i += PS_LANES) {
        const ps__v x = ps__v_read(j->x + at * b, dt, i, width, 0.0f),
                    d = ps__v_read(j->dy + at * b, dt, i, width, 0.0f);
        ps__v s = one;
        if (each == 1) {
          const ps__v g = ps__v_read(j->g + at * b, dt, i, width, 0.0f);
          s = sigmoid_of(g);
          ps__v_write(j->dg + at * b, dt, i, width, d * x * s * sigmoid_of(-g));
        }
        sum += d * x;
        ps__v_write(j->dx + at * b, dt, i, width, d * s);
      }
      if (each > 1)
        ps__store1_f32(j->dg, dt, (size_t)t * m + k,
                       ps__v_sum(sum) * one[0] * sigmoid_of(-gate)[0]);
    }
}

PS_CLONES static void gate_fwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const gate_job *j = arg;
  PS__BY_DTYPE(j->a.dt, DT, gate_fwd_rows(j, first, end, DT));
}
PS_CLONES static void gate_bwd_task(void *arg, int64_t first, int64_t end, uint32_t worker) {
  const gate_job *j = arg;
  PS__BY_DTYPE(j->a.dt, DT, gate_bwd_rows(j, first, end, DT));
}

/* sigmoid_gate_fwd
 * math    y = x sigmoid(g) (+ residual); fp32 inside, one rounding at the store
 * bytes   3*T*n*sizeof(dt).   determinism  bitwise: each element alone */
ps_status ps__cpu_sigmoid_gate_fwd(const ps_launch *l) {
  const ps__args_sigmoid_gate *a = l->args;
  gate_job j = {.a = *a, .x = l->ptr[0], .g = l->ptr[1], .y = l->ptr[2]};
  if (a->has_residual)
    j.residual = l->ptr[3];
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(a->cols), gate_fwd_task, &j);
  return PS_OK;
}

/* sigmoid_gate_bwd
 * math    dx = dy sigmoid(g); dg = sigmoid(g) sigmoid(-g) times the sum of dy x over the gate's
 *         columns: 1 - sigmoid(g) would cancel at large g
 * bytes   5*T*n*sizeof(dt).   determinism  bitwise: a row is one thread's */
ps_status ps__cpu_sigmoid_gate_bwd(const ps_launch *l) {
  const ps__args_sigmoid_gate *a = l->args;
  gate_job j = {
      .a = *a, .x = l->ptr[0], .g = l->ptr[1], .dy = l->ptr[2], .dx = l->ptr[3], .dg = l->ptr[4]};
  ps__cpu_rows(l->exec, a->n_tokens, ps__block_rows(a->cols), gate_bwd_task, &j);
  return PS_OK;
}
