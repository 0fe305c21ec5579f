/* speeds_apply.c - the description of a machine whose speeds a run has told.
 *
 * A description says how fast each resource is alone, and by how much each set of what runs beside
 * slows it. A run tells how fast a resource was in each set. Alone it may never have run, and
 * several resources (sums that also square, sums that do not) share a table. So each resource's
 * speed alone and each set's slowdown are solved for together, such that their products are what
 * was seen. Were each scaled by itself, what is slow only beside others would be so twice: by its
 * rate, and by the table. */
#include "plan/speeds.h"
#include <math.h>
#include <string.h>

enum { ANY_SET = -1, ROUNDS = 50 };

/* Of resources @first to @last in a set, or in all: the mean by time. 0: none ran. */
static double mean_speed(const ps__speeds *s, int first, int last, int set) {
  double ns = 0, work = 0;
  for (int r = first; r <= last; r++)
    for (int k = 0; k < PS__SPEED_SETS; k++)
      if (set == ANY_SET || k == set) {
        ns += s->of[r][k].ns;
        work += s->of[r][k].ns * s->of[r][k].speed;
      }
  return ns > 0 ? work / ns : 0;
}

/* Of one resource in all sets; 1: it did not run. */
static double factor(const ps__speeds *s, int resource) {
  const double any = mean_speed(s, resource, resource, ANY_SET);
  return any > 0 ? any : 1;
}

/* ---- speeds alone, and beside others --------------------------------------------------------- */

/* Resources of one kind: a bit of PS_CONTENTION_*, a column of the tables. */
enum { H2D, D2H, SUMS, UPDATES, N_KINDS, MOST_OF_A_KIND = 3 };
typedef struct kind {
  uint32_t bit;
  int first, last;
} kind;
static const kind kinds[N_KINDS] = {
    {PS_CONTENTION_H2D, PS__SPEED_H2D, PS__SPEED_H2D},
    {PS_CONTENTION_D2H, PS__SPEED_D2H, PS__SPEED_D2H},
    {PS_CONTENTION_SUMS, PS__SPEED_ACCUMULATE, PS__SPEED_ACCUMULATE_SUMSQ},
    {PS_CONTENTION_OPTIMIZER, PS__SPEED_UPDATES, PS__SPEED_UPDATES_STATE}};
enum { COPIES = PS_CONTENTION_H2D | PS_CONTENTION_D2H };

/* What the description says of a kind, by set: how much longer than alone it takes; and whether the
 * description can say otherwise. */
typedef struct said {
  double slowed[PS__SPEED_SETS];
  bool free[PS__SPEED_SETS];
} said;

/* Over the description's: each resource's speed alone, and by set what remains of it. */
typedef struct found {
  double alone[MOST_OF_A_KIND];
  double together; /* alone, of all resources of the kind: the mean by time */
  double left[PS__SPEED_SETS];
} found;

/* No set makes a resource faster than alone. */
static void solve_left(const ps__speeds *s, const kind *k, const said *d, found *f) {
  for (uint32_t set = 0; set < PS__SPEED_SETS; set++) {
    double seen = 0, alone = 0;
    for (int r = k->first; r <= k->last; r++) {
      seen += s->of[r][set].ns * s->of[r][set].speed;
      alone += s->of[r][set].ns * f->alone[r - k->first];
    }
    if (d->free[set] && alone > 0)
      f->left[set] = fmin(seen / alone, d->slowed[set]);
  }
}

static void solve_alone(const ps__speeds *s, const kind *k, found *f) {
  for (int r = k->first; r <= k->last; r++) {
    double seen = 0, left = 0;
    for (uint32_t set = 0; set < PS__SPEED_SETS; set++) {
      seen += s->of[r][set].ns * s->of[r][set].speed;
      left += s->of[r][set].ns * f->left[set];
    }
    f->alone[r - k->first] = left > 0 ? seen / left : 0;
  }
}

/* Sets that none ran in take the mean. */
static void fill(const ps__speeds *s, const kind *k, const said *d, found *f) {
  double ns = 0, seen = 0, alone = 0;
  for (int r = k->first; r <= k->last; r++)
    for (uint32_t set = 0; set < PS__SPEED_SETS; set++) {
      const ps__speed *v = &s->of[r][set];
      ns += v->ns;
      seen += v->ns * v->speed;
      alone += v->ns * f->alone[r - k->first];
    }
  if (!(ns > 0))
    return;
  f->together = alone / ns;
  for (uint32_t set = 0; set < PS__SPEED_SETS; set++)
    if (d->free[set] && !(mean_speed(s, k->first, k->last, (int)set) > 0))
      f->left[set] = fmin(seen / alone, d->slowed[set]);
}

/* Where the table has an entry of the kind alone (copies of several GPUs), the rate alone is of
 * one GPU, and rises only where the table would be held back by it. */
static found find(const ps__speeds *s, const kind *k, const said *d) {
  found f = {.together = 1};
  const bool given = d->free[k->bit];
  for (int r = k->first; r <= k->last; r++) {
    const ps__speed *own = &s->of[r][k->bit];
    f.alone[r - k->first] = given ? 1 : own->ns > 0 ? own->speed : mean_speed(s, r, r, ANY_SET);
  }
  for (uint32_t set = 0; set < PS__SPEED_SETS; set++) {
    f.left[set] = 1;
    if (given)
      f.alone[0] = fmax(f.alone[0], mean_speed(s, k->first, k->last, (int)set) / d->slowed[set]);
  }
  solve_left(s, k, d, &f);
  for (int i = 0; i < ROUNDS && !given; i++) {
    solve_alone(s, k, &f);
    solve_left(s, k, d, &f);
  }
  fill(s, k, d, &f);
  for (int i = 0; i < MOST_OF_A_KIND; i++)
    f.alone[i] = f.alone[i] > 0 ? f.alone[i] : f.together; /* did not run: as its kind */
  return f;
}

/* ---- tables ---------------------------------------------------------------------------------- */

static double *column(ps_contention_rate *e, int k) {
  return k == H2D ? &e->h2d_bytes_per_s : k == D2H ? &e->d2h_bytes_per_s : &e->host_bytes_per_s;
}

static double rate_in(const ps_contention_rate *e, int k) {
  return k == H2D ? e->h2d_bytes_per_s : k == D2H ? e->d2h_bytes_per_s : e->host_bytes_per_s;
}

/* The rate that a kind has alone, of which a table's entry is a part. */
static double alone_of(const ps_hardware *hw, int k, const ps_contention_rate *e) {
  if (k == H2D || k == D2H)
    return hw->link[k == H2D ? PS_LINK_H2D : PS_LINK_D2H].bytes_per_s;
  for (const ps_contention_rate *a = hw->contention;
       a < hw->contention + PS_MAX_CONTENTION_RATES && a->kinds; a++)
    if (a->kinds == kinds[k].bit && (k == UPDATES || !e->threads || a->threads == e->threads))
      return a->host_bytes_per_s;
  return e->host_bytes_per_s;
}

static bool has_entry(const ps_contention_rate *table, uint32_t set) {
  for (const ps_contention_rate *e = table; e < table + PS_MAX_CONTENTION_RATES && e->kinds; e++)
    if (e->kinds == set)
      return true;
  return false;
}

/* How much longer than alone both copies take on their link. 1: they share none. */
static double on_the_link(const ps_hardware *hw) {
  const double both = hw->link[PS_LINK_H2D].bytes_per_s + hw->link[PS_LINK_D2H].bytes_per_s;
  return hw->backend == PS_BACKEND_CPU
             ? 1
             : fmax(1, both / (2 * hw->link[PS_LINK_H2D].duplex_bytes_per_s));
}

static said said_of(const ps_hardware *hw, const ps_contention_rate *table, uint32_t sum_threads,
                    int k) {
  said d;
  for (uint32_t set = 0; set < PS__SPEED_SETS; set++) {
    d.slowed[set] = 1;
    d.free[set] = false;
    if (!(set & kinds[k].bit))
      continue;
    const bool alone = set == kinds[k].bit && k >= SUMS;
    const ps_contention_rate *e = ps__contention_entry(table, set, sum_threads);
    d.free[set] = !alone && has_entry(table, set);
    if (e && !alone)
      d.slowed[set] = fmax(1, alone_of(hw, k, e) / rate_in(e, k));
    if (k < SUMS && (set & COPIES) == COPIES) {
      d.slowed[set] = fmax(d.slowed[set], on_the_link(hw));
      d.free[set] |= hw->backend != PS_BACKEND_CPU;
    }
  }
  return d;
}

/* Of the table that holds for as many devices as the run has: what is left of the rates that @hw
 * has alone. Sums on another number of threads lose as much. */
static void set_table(const ps_hardware *was, ps_hardware *hw, bool gpus, const said d[N_KINDS],
                      const found f[N_KINDS]) {
  const ps_contention_rate *w = gpus ? was->gpus_contention : was->contention;
  ps_contention_rate *e = gpus ? hw->gpus_contention : hw->contention;
  for (uint32_t i = 0; i < PS_MAX_CONTENTION_RATES && e->kinds; i++, e++, w++)
    for (int k = 0; k < N_KINDS; k++) {
      const double alone = alone_of(was, k, w);
      if (e->kinds & kinds[k].bit && d[k].free[e->kinds])
        *column(e, k) =
            alone_of(hw, k, e) * fmin(1, fmin(1, rate_in(w, k) / alone) * f[k].left[e->kinds]);
      else if (k < SUMS && !gpus && !(e->kinds & kinds[k].bit))
        *column(e, k) = alone_of(hw, k, e); /* as the table says of a copy that does not run */
    }
}

/* What the run says of the host's ops alone holds for both tables. */
static void scale_host(ps_contention_rate *table, const found f[N_KINDS]) {
  for (ps_contention_rate *e = table; e < table + PS_MAX_CONTENTION_RATES && e->kinds; e++)
    if (e->kinds & ~(uint32_t)COPIES)
      e->host_bytes_per_s *= f[e->kinds & PS_CONTENTION_SUMS ? SUMS : UPDATES].together;
}

/* Both copies at once share their link evenly, so it has what both have together. With several GPUs
 * the table has them, and the link must not be slower than the table. */
static void set_duplex(const ps__speeds *s, ps_hardware *hw, bool gpus, const said d[N_KINDS],
                       const found f[N_KINDS]) {
  double ns = 0, part = 0, most = 0;
  for (int k = H2D; k <= D2H; k++) {
    const double of = f[k].left[COPIES] / d[k].slowed[COPIES],
                 took = s->of[kinds[k].first][COPIES].ns + 1e-3;
    ns += took;
    part += took * of;
    most = fmax(most, of);
  }
  const double each = (hw->link[PS_LINK_H2D].bytes_per_s + hw->link[PS_LINK_D2H].bytes_per_s) / 2;
  double *duplex = &hw->link[PS_LINK_H2D].duplex_bytes_per_s;
  *duplex = gpus ? fmax(*duplex, each * most) : each * part / ns;
  hw->link[PS_LINK_D2H].duplex_bytes_per_s = *duplex;
}

static void set_alone(ps_hardware *hw, const found f[N_KINDS]) {
  hw->link[PS_LINK_H2D].bytes_per_s *= f[H2D].alone[0];
  hw->link[PS_LINK_D2H].bytes_per_s *= f[D2H].alone[0];
  hw->accumulate_bytes_per_s *= f[SUMS].alone[0];
  hw->sumsq_bytes_per_s *= f[SUMS].alone[1];
  hw->accumulate_sumsq_bytes_per_s *= f[SUMS].alone[2];
  hw->optimizer_bytes_per_s *= f[UPDATES].alone[0];
  hw->optimizer_weights_bytes_per_s *= f[UPDATES].alone[1];
  hw->optimizer_state_bytes_per_s *= f[UPDATES].alone[2];
}

static void apply_measured(ps_hardware *hw, const ps__speeds *s) {
  const bool gpus = ps__gpus_measured(hw, s->n_devices);
  const ps_hardware was = *hw;
  said d[N_KINDS];
  found f[N_KINDS];
  for (int k = 0; k < N_KINDS; k++) {
    d[k] = said_of(hw, gpus ? hw->gpus_contention : hw->contention, s->sum_threads, k);
    f[k] = find(s, &kinds[k], &d[k]);
  }
  set_alone(hw, f);
  scale_host(hw->contention, f);
  scale_host(hw->gpus_contention, f);
  set_table(&was, hw, gpus, d, f);
  set_duplex(s, hw, gpus, d, f);
  hw->elementwise_bytes_per_s *= factor(s, PS__SPEED_ELEMENTWISE);
  const double all = mean_speed(s, PS__SPEED_H2D, PS__SPEED_ACCUMULATE_SUMSQ, ANY_SET);
  hw->memory_bytes_per_s *= all > 0 ? all : 1;
}

/* ---- where no contention was measured -------------------------------------------------------- */

/* Ops demand the memory in proportion to their rates alone, and are slower where they demand more
 * than there is. So a set in which they are slow tells of the memory, and what is slow alone of the
 * resource. */

/* The part of the memory that a kind demands, by its usual resource. */
static double demand_of(const ps_hardware *hw, int k) {
  const double rate[] = {hw->link[PS_LINK_H2D].bytes_per_s, hw->link[PS_LINK_D2H].bytes_per_s,
                         hw->accumulate_bytes_per_s, hw->optimizer_bytes_per_s};
  const double bytes = hw->backend == PS_BACKEND_CPU && k < SUMS ? 2 * rate[k] : rate[k];
  return fmin(1, bytes / hw->memory_bytes_per_s);
}

/* Speeds where the memory has @speed: alone, by resource; of a kind's resources together. */
typedef struct shared {
  double speed, alone[PS__N_SPEEDS], of_kind[N_KINDS];
} shared;

static bool shares_memory(int r) {
  return r <= PS__SPEED_ACCUMULATE_SUMSQ || r == PS__SPEED_ELEMENTWISE;
}

/* How many times longer than alone what runs in a set takes. */
static double slowed_at(const ps_hardware *hw, const shared *m, const ps__speed *v, uint32_t set) {
  double demand = 0, rest = v->demand;
  for (int k = 0; k < N_KINDS; k++)
    if (set & kinds[k].bit) {
      demand += fmin(1, demand_of(hw, k) * m->of_kind[k] / m->speed);
      rest -= demand_of(hw, k);
    }
  return fmax(v->slowed_by_others, demand + fmax(rest, 0) / m->speed);
}

/* How far what @m says is from what was seen: the mean square of logarithms, by time. */
static double misfit(const ps_hardware *hw, const ps__speeds *s, const shared *m) {
  double sum = 0, ns = 0;
  for (int r = 0; r < PS__N_SPEEDS; r++)
    for (uint32_t set = 0; set < PS__SPEED_SETS && shares_memory(r); set++) {
      const ps__speed *v = &s->of[r][set];
      if (!(v->ns > 0))
        continue;
      const double seen = fmax(1, v->slowed * m->alone[r] / v->speed),
                   off = log(slowed_at(hw, m, v, set) / seen);
      sum += v->ns * off * off;
      ns += v->ns;
    }
  /* where all speeds fit, as nothing is slow, the description's */
  return ns > 0 ? sum / ns + 1e-6 * log(m->speed) * log(m->speed) : 0;
}

static void find_speed(const ps_hardware *hw, const ps__speeds *s, shared *m) {
  shared best = *m;
  double least = misfit(hw, s, m);
  for (double step = 1.1, from = 1; step > 1.001; step = sqrt(step), from = best.speed)
    for (int i = -30; i <= 30; i++) {
      m->speed = from * pow(step, i);
      const double off = misfit(hw, s, m);
      if (off < least) {
        least = off;
        best = *m;
      }
    }
  *m = best;
}

/* From all sets, as the memory is known. */
static void find_alone(const ps_hardware *hw, const ps__speeds *s, shared *m) {
  double alone[PS__N_SPEEDS];
  for (int r = 0; r < PS__N_SPEEDS; r++) {
    double ns = 0, work = 0;
    for (uint32_t set = 0; set < PS__SPEED_SETS; set++) {
      const ps__speed *v = &s->of[r][set];
      if (v->ns > 0)
        work += v->ns * v->speed * (shares_memory(r) ? slowed_at(hw, m, v, set) / v->slowed : 1);
      ns += v->ns;
    }
    alone[r] = ns > 0 ? work / ns : 1;
  }
  memcpy(m->alone, alone, sizeof alone);
}

static void find_kinds(const ps__speeds *s, shared *m) {
  for (int k = 0; k < N_KINDS; k++) {
    double ns = 0, alone = 0;
    for (int r = kinds[k].first; r <= kinds[k].last; r++)
      for (uint32_t set = 0; set < PS__SPEED_SETS; set++) {
        ns += s->of[r][set].ns;
        alone += s->of[r][set].ns * m->alone[r];
      }
    m->of_kind[k] = ns > 0 ? alone / ns : 1;
  }
}

/* What did not run has the speed of its kind. */
static void fill_kinds(const ps__speeds *s, shared *m) {
  for (int k = 0; k < N_KINDS; k++)
    for (int r = kinds[k].first; r <= kinds[k].last; r++)
      if (!(mean_speed(s, r, r, ANY_SET) > 0))
        m->alone[r] = m->of_kind[k];
}

/* At first what ran alone, or with what shares no memory, has its speed from that. */
static void begin_shared(const ps__speeds *s, shared *m) {
  m->speed = 1;
  for (int r = 0; r < PS__N_SPEEDS; r++) {
    uint32_t own = r == PS__SPEED_ELEMENTWISE ? PS__SPEED_WITH_ELEMENTWISE : 0;
    for (int k = 0; k < N_KINDS; k++)
      own = r >= kinds[k].first && r <= kinds[k].last ? kinds[k].bit : own;
    m->alone[r] = s->of[r][own].ns > 0 ? s->of[r][own].speed : factor(s, r);
  }
  find_kinds(s, m);
}

static void apply_shared_memory(ps_hardware *hw, const ps__speeds *s) {
  found f[N_KINDS];
  shared m;
  begin_shared(s, &m);
  for (int i = 0; i < 4; i++) {
    find_speed(hw, s, &m);
    find_alone(hw, s, &m);
    find_kinds(s, &m);
  }
  fill_kinds(s, &m);
  hw->memory_bytes_per_s *= m.speed;
  for (int k = 0; k < N_KINDS; k++)
    memcpy(f[k].alone, &m.alone[kinds[k].first],
           (size_t)(kinds[k].last - kinds[k].first + 1) * sizeof *m.alone);
  set_alone(hw, f);
  hw->link[PS_LINK_H2D].duplex_bytes_per_s *= (m.of_kind[H2D] + m.of_kind[D2H]) / 2;
  hw->elementwise_bytes_per_s *= m.alone[PS__SPEED_ELEMENTWISE];
}

/* ---- all ------------------------------------------------------------------------------------- */

static void apply_products(ps_hardware *hw, const ps__speeds *s) {
  const double gemm = factor(s, PS__SPEED_GEMM), fp8 = factor(s, PS__SPEED_GEMM_FP8),
               grouped = factor(s, PS__SPEED_GEMM_GROUPED),
               forward = factor(s, PS__SPEED_ATTENTION_FWD),
               backward = factor(s, PS__SPEED_ATTENTION_BWD);
  hw->gemm_flops_per_s[s->dt] *= gemm;
  hw->gemm_fp8_flops_per_s *= fp8;
  for (int i = 0; i < PS_MAX_GEMM_RATES; i++) {
    ps_gemm_rate *of[] = {&hw->gemm[s->dt][i], &hw->gemm_fp8[i], &hw->gemm_grouped[i]};
    const double by[] = {gemm, fp8, grouped};
    for (int k = 0; k < 3; k++) {
      of[k]->forward_flops_per_s *= by[k];
      of[k]->dgrad_flops_per_s *= by[k];
      of[k]->wgrad_flops_per_s *= by[k];
    }
  }
  hw->attention_flops_per_s[s->dt] *= forward;
  hw->attention_bwd_flops_per_s[s->dt] *= backward;
  for (int i = 0; i < PS_MAX_ATTENTION_RATES; i++) {
    hw->attention[s->dt][i].forward_flops_per_s *= forward;
    hw->attention[s->dt][i].backward_flops_per_s *= backward;
  }
}

/* Where the description has no rates, the estimates that plans take. */
static void apply_plain(ps_hardware *hw, const ps__speeds *s) {
  const double forward = ps__plain_rate(hw, false), backward = ps__plain_rate(hw, true);
  if (!(mean_speed(s, PS__SPEED_PLAIN_FWD, PS__SPEED_PLAIN_BWD, ANY_SET) > 0))
    return;
  hw->heads512_attention_flops_per_s = forward * factor(s, PS__SPEED_PLAIN_FWD);
  hw->heads512_attention_bwd_flops_per_s = backward * factor(s, PS__SPEED_PLAIN_BWD);
}

static void apply_delta(ps_hardware *hw, const ps__speeds *s) {
  const double forward = factor(s, PS__SPEED_DELTA_FWD), backward = factor(s, PS__SPEED_DELTA_BWD);
  if (!(mean_speed(s, PS__SPEED_DELTA_FWD, PS__SPEED_DELTA_BWD, ANY_SET) > 0))
    return;
  ps__delta_rates(hw, hw->delta);
  for (int i = 0; i < PS_MAX_DELTA_RATES; i++) {
    hw->delta[i].forward_elements_per_s *= forward;
    hw->delta[i].backward_elements_per_s *= backward;
  }
}

/* Both ways share the drive, whose rate for both together follows what they have as means. */
static void apply_disk(ps_hardware *hw, const ps__speeds *s) {
  const double both = mean_speed(s, PS__SPEED_DISK_READ, PS__SPEED_DISK_WRITE, ANY_SET);
  if (!(both > 0))
    return;
  ps_link_rate *read = &hw->link[PS_LINK_DISK_READ], *write = &hw->link[PS_LINK_DISK_WRITE];
  const double duplex = ps__disk_duplex(hw) * both;
  read->bytes_per_s = ps__disk_rate(hw, false) * factor(s, PS__SPEED_DISK_READ);
  write->bytes_per_s = ps__disk_rate(hw, true) * factor(s, PS__SPEED_DISK_WRITE);
  read->duplex_bytes_per_s = write->duplex_bytes_per_s = duplex;
}

void ps__speeds_apply(ps_hardware *hw, const ps__speeds *s) {
  apply_plain(hw, s); /* before the memory's rate changes, from which the estimate follows */
  apply_delta(hw, s);
  if (hw->contention[0].kinds)
    apply_measured(hw, s);
  else
    apply_shared_memory(hw, s);
  apply_products(hw, s);
  hw->gather_bytes_per_s *= factor(s, PS__SPEED_GATHER);
  hw->link[PS_LINK_PEER].bytes_per_s *= factor(s, PS__SPEED_PEERS);
  apply_disk(hw, s);
}
