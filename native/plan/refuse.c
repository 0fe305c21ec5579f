/* refuse.c - what is told where no plan fits: what is needed, what there is, and the way out. */
#include "plan/plan_impl.h"

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

/* The least host memory with one sequence a step on each device; 0: unknown. */
static uint64_t least_of_one_sequence(const ps_plan *p) {
  ps_plan_config c = p->cfg;
  ps_hardware hw = p->hw;
  ps_plan *one = NULL;
  ps__memos m = {0};
  ps__search_result r = {0};
  c.tokens_per_step = (uint64_t)c.seq_len * c.n_hosts * c.n_devices;
  c.host_mem_bytes = hw.host_memory_bytes = 0;
  c.n_ramp = 0;
  c.val_tokens = 0;
  c.sample_sequences = 0;
  /* on the CPU backend what leaves the host's arena lies in the host's memory all the same */
  if ((p->hw.backend == PS_BACKEND_CPU && !p->cfg.host_mem_bytes) ||
      c.tokens_per_step >= p->cfg.tokens_per_step ||
      ps__plan_new(&one, &p->model->cfg, &c, &hw) != PS_OK)
    return 0;
  if (ps__memos_create(&m) == PS_OK)
    (void)ps__find_smallest_in_layouts(one, &m, &r);
  ps__memos_destroy(&m);
  ps_plan_destroy(one);
  return r.smallest[PS__HOST_MEM];
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

/* ", or give optimizer lion or lora.rank or ...": what alone brings the host memory of the
 * smallest plan from @need down to @there; "" where nothing does. */
static const char *ways_out(char buf[256], const ps_plan *p, uint64_t need, uint64_t there) {
  const ps_plan_config *c = &p->cfg;
  const bool fp8 = ps__recipes[c->recipe].fp8;
  const uint32_t now = ps__plan_row(c),
                 lean = ps__row_of(fp8 ? PS_RECIPE_FP8 : PS_RECIPE_BF16, c->state_bits),
                 bits8 = ps__row_of(c->recipe, 8);
  const uint64_t n = c->forward_only ? 0 : p->model->n_trained,
                 over = need > there ? need - there : 1, all = with_weights(c, now, n),
                 leanest = with_weights(c, lean, n),
                 state = ps__state_bytes((ps_optimizer)c->optimizer, now, n),
                 lion = ps__state_bytes(PS_OPTIMIZER_LION, now, n),
                 small = ps__state_bytes((ps_optimizer)c->optimizer, bits8, n);
  const bool whole = !fp8 && !p->model->lora.rank;
  const struct {
    const char *field, *value;
    bool enough;
  } way[] = {
      {"state_bits", " 8", state > small && state - small >= over},
      {"optimizer", " lion", state > lion && state - lion >= over},
      {"recipe", fp8 ? " fp8" : " bf16", all > leanest && all - leanest >= over},
      {"lora.rank", "", whole && beside_weights(c, now, n) >= over},
      {"n_frozen_layers", "", whole && beside_weights(c, now, freezable(p)) >= over},
  };
  const uint64_t one = least_of_one_sequence(p);
  size_t at = 0;
  buf[0] = 0;
  if (one && one <= there)
    at += (size_t)snprintf(buf, 256, ", or lower %s", ps__field("tokens_per_step"));
  for (size_t i = 0, found = 0; i < sizeof way / sizeof *way; i++)
    if (way[i].enough)
      at += (size_t)snprintf(buf + at, 256 - at, "%s%s%s", found++ ? " or " : ", or give ",
                             ps__field(way[i].field), way[i].value);
  return buf;
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
  char dev[32], host[32], reserve[32], there[48] = "", has[32], ways[256], raise[96];
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
  return ps__fail(PS_EBUDGET,
                  "no plan fits: the nearest needs %s of device memory%s and %s of host memory%s, "
                  "of which %s is for the process itself%s: %s%s",
                  ps__format_bytes(dev, r->any[PS__DEVICE_MEM]), of.device,
                  ps__format_bytes(host, r->any[PS__HOST_MEM]), of.host,
                  ps__format_bytes(reserve, p->cfg.reserve_bytes), there,
                  too_small ? "take a machine with more host memory" : raise,
                  ways_out(ways, p, too_small ? taken : r->any[PS__HOST_MEM],
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
  char host[32], need[32], cap[32], lower[160], ways[256];
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
                    ways_out(ways, p, r->smallest[PS__HOST_MEM], c->host_mem_bytes),
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
  char need[32], there[32], ways[256];
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
                  need, of.host, there, ways_out(ways, p, host, machine), (unsigned long long)host);
}

ps_status ps__plan_refuse_guests(ps_plan *p, const ps__search_result *r) {
  const uint32_t device = PS__DEVICE_MEM, host = PS__HOST_MEM;
  const bool one = r->smallest[device] || r->smallest[host];
  p->report.device_used_bytes = one ? r->smallest[device] : r->any[device];
  p->report.host_used_bytes = r->smallest[device] ? 0 : one ? r->smallest[host] : r->any[host];
  PS_TRY(ps__plan_beside_check(p));
  return refuse(p, r); /* the machine's memory */
}
