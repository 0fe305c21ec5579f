/* refuse.c - what is told where no plan fits: what is needed, what there is, and the way out. */
#include "plan/plan_impl.h"
#include <stdarg.h>
#include <stdio.h>

/* The fields whose lower value makes the smallest plan's device memory smaller: those that the
 * user gave, else the sequence length. */
static const char *what_to_lower(char buf[160], const ps_plan *p) {
  const ps_plan_config *c = &p->cfg;
  const struct {
    bool given;
    const char *name;
  } pinned[] = {{c->chunk_tokens != 0, ps__field("chunk_tokens")},
                {c->chunks_per_round != 0, ps__field("chunks_per_round")},
                {c->first_round_chunks != 0, ps__field("first_round_chunks")},
                {p->head_slice_given, ps__field("head_slice_tokens")}};
  size_t n = 0;
  for (size_t i = 0; i < sizeof pinned / sizeof *pinned; i++)
    if (pinned[i].given)
      n += (size_t)snprintf(buf + n, 160 - n, "%s%s", n ? " or " : "", pinned[i].name);
  if (!n)
    snprintf(buf, 160, "%s", ps__field("seq_len"));
  return buf;
}

/* BYTES: the least host memory of a configuration, and its state on the disk then. host 0: unknown,
 * or no plan fits the other caps. */
typedef struct least {
  uint64_t host, disk;
} least;

/* On the CPU backend what leaves the host's arena lies in the host's memory all the same. */
static least least_with(const ps_plan *p, ps_plan_config c) {
  ps_hardware hw = p->hw;
  ps_plan *other = NULL;
  ps__memos m = {0};
  ps__search_result r = {0};
  c.host_mem_bytes = hw.host_memory_bytes = 0;
  c.sample_sequences = 0;
  if ((p->hw.backend == PS_BACKEND_CPU && !p->cfg.host_mem_bytes) ||
      ps__plan_new(&other, &p->model->cfg, &c, &hw) != PS_OK)
    return (least){0};
  other->counts_guests = ps__plan_has_guests(other);
  ps__disk_level_set(other, PS__DISK_LEVELS);
  if (ps__memos_create(&m) == PS_OK)
    (void)ps__find_smallest_in_layouts(other, &m, &r);
  const least found = {r.smallest[PS__HOST_MEM], ps__disk_bytes(other)};
  ps__memos_destroy(&m);
  other->cfg.ramp = NULL; /* the caller's */
  ps_plan_destroy(other);
  return found;
}

/* The least host memory with one sequence a step on each device; 0: unknown. */
static uint64_t least_of_one_sequence(const ps_plan *p) {
  ps_plan_config c = p->cfg;
  c.tokens_per_step = (uint64_t)c.seq_len * c.n_hosts * c.n_devices;
  c.n_ramp = 0;
  c.val_tokens = 0;
  return c.tokens_per_step < p->cfg.tokens_per_step ? least_with(p, c).host : 0;
}

/* Parameters of the layers that may be frozen: all but one. */
static uint64_t freezable(const ps_plan *p) {
  const ps_model *m = p->model;
  uint64_t sum = 0, most = 0;
  for (uint32_t u = 0; u < m->n_units; u++) {
    const ps__unit *unit = &m->unit[u];
    if (unit->frozen || unit->adapter || unit->layer == 0 || unit->layer + 1 == m->n_layers)
      continue;
    sum += unit->n;
    most = unit->n > most ? unit->n : most;
  }
  return sum - most;
}

/* BYTES of master copy and optimizer state of @n parameters; of their weights too. */
static uint64_t beside_weights(const ps_plan_config *c, uint32_t recipe, uint64_t n) {
  return ps__master_bytes(recipe, n) + ps__state_bytes((ps_optimizer)c->optimizer, recipe, n);
}
static uint64_t with_weights(const ps_plan_config *c, uint32_t recipe, uint64_t n) {
  return ps__stored_bytes(ps__recipes[recipe].weights, n) + beside_weights(c, recipe, n);
}

/* What is told of ways out, from the first one on. */
enum { WAYS_BYTES = 512 };
typedef struct ways {
  char text[WAYS_BYTES];
  size_t at;
  uint32_t n;
} ways;

__attribute__((format(printf, 2, 3))) static void add_way(ways *w, const char *format, ...) {
  va_list args;
  const size_t left = WAYS_BYTES - w->at;
  int n = snprintf(w->text + w->at, left, "%s", w->n++ ? " or " : ", or give ");
  va_start(args, format);
  n += vsnprintf(w->text + w->at + n, left - (size_t)n, format, args);
  va_end(args);
  w->at += (size_t)n < left ? (size_t)n : left - 1;
}

/* What makes state and gradients smaller on the host, and changes neither model nor optimizer. */
enum { WAY_BITS = 1, WAY_CLIP = 2, WAY_DISK = 4, WAYS_ALL = 7 };

/* BYTES that each saves at most; 0: it is in use, or cannot be. */
static void most_saved(const ps_plan *p, uint64_t saved[WAYS_ALL + 1]) {
  const ps_plan_config *c = &p->cfg;
  const uint64_t n = c->forward_only ? 0 : p->model->n_trained;
  const uint32_t now = ps__plan_row(c), bits8 = ps__row_of(c->recipe, 8);
  const uint64_t state = ps__state_bytes((ps_optimizer)c->optimizer, now, n),
                 small = ps__state_bytes((ps_optimizer)c->optimizer, bits8, n),
                 there = ps__disk_bytes(p);
  const bool may_pass = c->clip_norm > 0 && c->clip_by == PS_CLIP_BY_STEP && !c->keep_grads &&
                        c->non_finite != PS_NON_FINITE_SKIP;
  saved[WAY_BITS] = state > small ? state - small : 0;
  saved[WAY_CLIP] = may_pass ? ps__stored_bytes(ps__weight_storage(p->model), n) : 0;
  saved[WAY_DISK] = state > there ? state - there : 0;
}

static ps_plan_config with_ways(const ps_plan *p, uint32_t which) {
  ps_plan_config c = p->cfg;
  c.state_bits = which & WAY_BITS ? 8 : c.state_bits;
  c.clip_by = which & WAY_CLIP ? PS_CLIP_BY_PREVIOUS : c.clip_by;
  c.disk_mem_bytes = which & WAY_DISK ? (uint64_t)1 << 60 : c.disk_mem_bytes;
  return c;
}

/* Adds @which where it is searched and found to be enough. */
static bool try_ways(ways *w, const ps_plan *p, uint32_t which, uint64_t there) {
  const least l = least_with(p, with_ways(p, which));
  char text[WAYS_BYTES] = "", needs[32];
  size_t at = 0;
  if (!l.host || l.host > there)
    return false;
  if (which & WAY_BITS)
    at += (size_t)snprintf(text, sizeof text, "%s 8", ps__field("state_bits"));
  if (which & WAY_CLIP)
    at += (size_t)snprintf(text + at, sizeof text - at, "%s%s previous", at ? " and " : "",
                           ps__field("clip_by"));
  if (which & WAY_DISK) {
    const uint32_t shift = l.disk >> 33 ? 30 : 20;
    snprintf(text + at, sizeof text - at, "%s%s DIR with %s %llu%s", at ? " and " : "",
             ps__field("disk"), ps__field("disk_mem_bytes"),
             (unsigned long long)((l.disk >> shift) + 1), shift == 30 ? "GiB" : "MiB");
  }
  add_way(w, "%s (needs %s)", text, ps__format_bytes(needs, l.host));
  return true;
}

/* Each that alone is enough; where none is, all together. */
static void add_searched(ways *w, const ps_plan *p, uint64_t over, uint64_t there) {
  uint64_t saved[WAYS_ALL + 1] = {0}, sum = 0;
  uint32_t all = 0;
  bool any = false;
  most_saved(p, saved);
  for (uint32_t way = WAY_BITS; way <= WAY_DISK; way *= 2) {
    all |= saved[way] ? way : 0;
    sum += saved[way];
    any |= saved[way] >= over && try_ways(w, p, way, there);
  }
  if (!any && all & (all - 1) && sum >= over)
    try_ways(w, p, all, there);
}

/* ", or give optimizer lion or lora.rank or ...": what brings the host memory of the smallest plan
 * from @need down to @there; "" where nothing does. */
static const char *ways_out(ways *w, const ps_plan *p, uint64_t need, uint64_t there) {
  const ps_plan_config *c = &p->cfg;
  const bool fp8 = ps__recipes[c->recipe].fp8;
  const uint32_t now = ps__plan_row(c),
                 lean = ps__row_of(fp8 ? PS_RECIPE_FP8 : PS_RECIPE_BF16, c->state_bits);
  const uint64_t n = c->forward_only ? 0 : p->model->n_trained,
                 over = need > there ? need - there : 1, all = with_weights(c, now, n),
                 leanest = with_weights(c, lean, n),
                 state = ps__state_bytes((ps_optimizer)c->optimizer, now, n),
                 lion = ps__state_bytes(PS_OPTIMIZER_LION, now, n);
  const bool whole = !p->model->lora.rank;
  const struct {
    const char *field, *value;
    bool enough;
  } way[] = {
      {"optimizer", " lion", state > lion && state - lion >= over},
      {"recipe", fp8 ? " fp8" : " bf16", all > leanest && all - leanest >= over},
      {"lora.rank", "", whole && beside_weights(c, now, n) >= over},
      {"n_frozen_layers", "", whole && beside_weights(c, now, freezable(p)) >= over},
  };
  const uint64_t one = least_of_one_sequence(p);
  *w = (ways){.at = 0};
  if (one && one <= there)
    w->at = (size_t)snprintf(w->text, WAYS_BYTES, ", or lower %s", ps__field("tokens_per_step"));
  if (!p->one_of_many && !c->sample_sequences) /* whose memory is not known before the plan */
    add_searched(w, p, over, there);
  for (size_t i = 0; i < sizeof way / sizeof *way; i++)
    if (way[i].enough)
      add_way(w, "%s%s", ps__field(way[i].field), way[i].value);
  return w->text;
}

/* Whose memory it is, after "of device memory" and "of host memory": empty where there is one. */
typedef struct whose {
  char device[48], host[48];
} whose;
static whose whose_memory(const ps_plan *p) {
  whose w = {"", ""};
  if (p->cfg.n_devices > 1)
    snprintf(w.device, sizeof w.device, " on each of %u devices", p->cfg.n_devices);
  if (p->cfg.n_hosts > 1)
    snprintf(w.host, sizeof w.host, " on each of %u hosts", p->cfg.n_hosts);
  return w;
}

/* Refuses where neither cap alone would be enough. */
static ps_status refuse_both(const ps_plan *p, const ps__search_result *r) {
  char dev[32], host[32], cap[32], reserve[32], there[48] = "", has[32], raise[96];
  ways out;
  const whose of = whose_memory(p);
  const uint64_t machine = p->hw.host_memory_bytes;
  const uint64_t taken =
      r->any[PS__HOST_MEM] +
      (p->hw.backend == PS_BACKEND_CPU ? p->at->n_devices * r->any[PS__DEVICE_MEM] : 0);
  const bool too_small = machine && taken > machine;
  if (machine)
    snprintf(there, sizeof there, "; the machine has %s in all", ps__format_bytes(has, machine));
  snprintf(raise, sizeof raise, "raise %s and %s to that", ps__field("device_mem_bytes"),
           ps__field("host_mem_bytes"));
  ps__format_bytes_apart(dev, r->any[PS__DEVICE_MEM], cap, p->cfg.device_mem_bytes);
  ps__format_bytes_apart(host, r->any[PS__HOST_MEM], cap, p->cfg.host_mem_bytes);
  return ps__fail(PS_EBUDGET,
                  "no plan fits: the nearest needs %s of device memory%s and %s of host memory%s, "
                  "of which %s is for the process itself%s: %s%s",
                  dev, of.device, host, of.host, ps__format_bytes(reserve, p->cfg.reserve_bytes),
                  there, too_small ? "take a machine with more host memory" : raise,
                  ways_out(&out, p, too_small ? taken : r->any[PS__HOST_MEM],
                           too_small ? machine : p->cfg.host_mem_bytes));
}

/* Whether raising the host's cap alone is the smaller step, in proportion, and the machine has that
 * much. */
static bool host_is_nearer(const ps_plan *p, const ps__search_result *r) {
  const ps__caps caps = ps__plan_caps(p);
  const double host = (double)caps.holds[PS__HOST_MEM], device = (double)caps.holds[PS__DEVICE_MEM];
  const bool there =
      !p->hw.host_memory_bytes || r->smallest[PS__HOST_MEM] <= p->hw.host_memory_bytes;
  return r->smallest[PS__HOST_MEM] && there && host > 0 && device > 0 &&
         (double)r->smallest[PS__HOST_MEM] / host < (double)r->smallest[PS__DEVICE_MEM] / device;
}

static ps_status refuse(const ps_plan *p, const ps__search_result *r) {
  char host[32], need[32], cap[32], lower[160];
  ways out;
  const ps_plan_config *c = &p->cfg;
  const ps__caps caps = ps__plan_caps(p);
  const uint64_t device = caps.holds[PS__DEVICE_MEM];
  const bool gpu = device != caps.given[PS__DEVICE_MEM];
  const bool of_device = r->smallest[PS__DEVICE_MEM] && !host_is_nearer(p, r);
  const whose of = whose_memory(p);
  if (r->smallest[PS__PINNED_MEM])
    return ps__refuse_pinned(p, "", r->smallest[PS__PINNED_MEM]);
  what_to_lower(lower, p);
  if (of_device)
    ps__format_bytes_apart(need, r->smallest[PS__DEVICE_MEM], cap, device);
  else if (r->smallest[PS__HOST_MEM])
    ps__format_bytes_apart(need, r->smallest[PS__HOST_MEM], cap, c->host_mem_bytes);
  if (of_device && gpu)
    return ps__fail(PS_EBUDGET,
                    "needs %s of device memory%s, this GPU has %s that nothing else uses: end what "
                    "else uses it, or lower %s "
                    "(the smallest plan takes %llu bytes)",
                    need, of.device, cap, lower, (unsigned long long)r->smallest[PS__DEVICE_MEM]);
  if (of_device && p->hw.host_memory_bytes && c->host_mem_bytes > p->hw.host_memory_bytes)
    return ps__fail(
        PS_EBUDGET,
        "%s of host memory given, the machine has %s, with which %s of device memory%s are needed: "
        "take a machine with more host memory, or raise "
        "%s (the smallest plan takes %llu bytes)",
        ps__format_bytes(host, c->host_mem_bytes), ps__format_bytes(cap, p->hw.host_memory_bytes),
        ps__format_bytes(need, r->smallest[PS__DEVICE_MEM]), of.device,
        ps__field("device_mem_bytes"), (unsigned long long)r->smallest[PS__DEVICE_MEM]);
  if (of_device)
    return ps__fail(PS_EBUDGET,
                    "needs %s of device memory%s, %s given: raise %s, or lower %s (the "
                    "smallest plan takes %llu bytes)",
                    need, of.device, cap, ps__field("device_mem_bytes"), lower,
                    (unsigned long long)r->smallest[PS__DEVICE_MEM]);
  if (r->smallest[PS__HOST_MEM])
    return ps__fail(PS_EBUDGET,
                    "needs %s of host memory%s, %s given: raise %s%s (the smallest plan "
                    "takes %llu bytes)",
                    need, of.host, cap, ps__field("host_mem_bytes"),
                    ways_out(&out, p, r->smallest[PS__HOST_MEM], c->host_mem_bytes),
                    (unsigned long long)r->smallest[PS__HOST_MEM]);
  return refuse_both(p, r);
}

/* On the CPU backend devices lie in the host's memory: no figure of the host alone helps there. */
ps_status ps__plan_least_host(ps_plan *p, const ps__memos *m, uint64_t *bytes) {
  ps__search_result r = {0};
  const uint64_t machine = p->hw.host_memory_bytes;
  const uint32_t given = p->cfg.layout;
  ps_status st = PS_OK;
  p->hw.host_memory_bytes = 0;
  if (p->hw.backend != PS_BACKEND_CPU)
    st = ps__find_smallest_in_layouts(p, m, &r);
  p->hw.host_memory_bytes = machine;
  p->cfg.layout = given;
  if (st == PS_OK)
    *bytes = r.smallest[PS__HOST_MEM];
  return st;
}

/* Where no cap of host memory is given, the machine's memory may be what is short. */
ps_status ps__plan_refuse(ps_plan *p, const ps__memos *m, const ps__search_result *r) {
  const uint64_t device = ps__plan_caps(p).holds[PS__DEVICE_MEM], machine = p->hw.host_memory_bytes,
                 need_device = r->smallest[PS__DEVICE_MEM];
  const whose of = whose_memory(p);
  uint64_t host = 0;
  char need[32], there[32];
  ways out;
  if (!p->cfg.host_mem_bytes && machine && !r->smallest[PS__HOST_MEM] &&
      !r->smallest[PS__PINNED_MEM])
    PS_TRY(ps__plan_least_host(p, m, &host));
  if (!host || (need_device && device &&
                (double)need_device / (double)device < (double)host / (double)machine))
    return refuse(p, r);
  ps__format_bytes_apart(need, host, there, machine);
  return ps__fail(PS_EBUDGET,
                  "needs %s of host memory%s, the machine has %s: take a machine with more host "
                  "memory%s (the smallest plan takes %llu bytes)",
                  need, of.host, there, ways_out(&out, p, host, machine), (unsigned long long)host);
}

ps_status ps__plan_refuse_guests(ps_plan *p, const ps__search_result *r) {
  const uint32_t device = PS__DEVICE_MEM, host = PS__HOST_MEM;
  const bool one = r->smallest[device] || r->smallest[host];
  p->report.device_used_bytes = one ? r->smallest[device] : r->any[device];
  p->report.host_used_bytes = r->smallest[device] ? 0 : one ? r->smallest[host] : r->any[host];
  PS_TRY(ps__plan_beside_check(p));
  return refuse(p, r); /* the machine's memory */
}
