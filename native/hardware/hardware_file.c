/* hardware_file.c - a machine's rates and facts as JSON. */
#include "hardware/hardware_impl.h"
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

/* Layout of a measured file. An older file lacks rates, or measured them otherwise. */
enum { LAYOUT = 7 };

typedef struct rate_field {
  const char *name;
  size_t offset;
  bool optional;
} rate_field;
#define RATE(name, member) {name, offsetof(ps_hardware, member), false}
#define OPTIONAL(member)   {#member, offsetof(ps_hardware, member), true}
static const rate_field rates[] = {
    RATE("gemm_fp32_flops_per_s", gemm_flops_per_s[PS_F32]),
    RATE("gemm_bf16_flops_per_s", gemm_flops_per_s[PS_BF16]),
    RATE("attention_fp32_flops_per_s", attention_flops_per_s[PS_F32]),
    RATE("attention_bf16_flops_per_s", attention_flops_per_s[PS_BF16]),
    RATE("attention_bwd_fp32_flops_per_s", attention_bwd_flops_per_s[PS_F32]),
    RATE("attention_bwd_bf16_flops_per_s", attention_bwd_flops_per_s[PS_BF16]),
    RATE("elementwise_bytes_per_s", elementwise_bytes_per_s),
    RATE("h2d_bytes_per_s", h2d_bytes_per_s),
    RATE("d2h_bytes_per_s", d2h_bytes_per_s),
    RATE("duplex_bytes_per_s", duplex_bytes_per_s),
    RATE("optimizer_bytes_per_s", optimizer_bytes_per_s),
    RATE("memory_bytes_per_s", memory_bytes_per_s),
    RATE("op_ns", op_ns),
    OPTIONAL(accumulate_bytes_per_s),
    OPTIONAL(accumulate_sumsq_bytes_per_s),
    OPTIONAL(sumsq_bytes_per_s),
    OPTIONAL(gather_bytes_per_s),
    OPTIONAL(idle_gain),
    OPTIONAL(idle_most),
    OPTIONAL(first_touch_bytes_per_s),
    OPTIONAL(pin_bytes_per_s),
    OPTIONAL(pageable_h2d_bytes_per_s),
    OPTIONAL(pageable_d2h_bytes_per_s),
    OPTIONAL(loaded_h2d_bytes_per_s),
    OPTIONAL(loaded_d2h_bytes_per_s),
    OPTIONAL(loaded_gemm_flops_per_s)};
enum { N_RATES = sizeof rates / sizeof *rates };
static double *rate_at(ps_hardware *hw, int i) {
  return (double *)(void *)((char *)hw + rates[i].offset);
}

/* Facts that ps__hardware_facts() finds on this machine; of a machine that is only described, the
 * file has them. */
typedef struct fact_field {
  const char *name;
  size_t offset, bytes;
  bool optional;
} fact_field;
#define FACT(member, optional)                                                                     \
  {#member, offsetof(ps_hardware, member), sizeof((ps_hardware *)0)->member, optional}
static const fact_field facts[] = {FACT(backend, false),
                                   FACT(n_threads, false),
                                   FACT(n_cpus, false),
                                   FACT(compute_capability, false),
                                   FACT(n_sms, false),
                                   FACT(cudnn_version, false),
                                   FACT(driver_version, true),
                                   FACT(cublaslt_version, true),
                                   FACT(flash4_version, true),
                                   FACT(measured, true),
                                   FACT(host_memory_bytes, false),
                                   FACT(device_memory_bytes, false),
                                   FACT(device_overhead_bytes, false)};
enum { N_FACTS = sizeof facts / sizeof *facts };

static uint64_t fact(const ps_hardware *hw, int i) {
  const char *at = (const char *)hw + facts[i].offset;
  uint32_t small;
  uint64_t large;
  memcpy(&small, at, sizeof small);
  if (facts[i].bytes == sizeof small)
    return small;
  memcpy(&large, at, sizeof large);
  return large;
}

static void set_fact(ps_hardware *hw, int i, uint64_t value) {
  const uint32_t small = (uint32_t)value;
  memcpy((char *)hw + facts[i].offset,
         facts[i].bytes == sizeof small ? (const void *)&small : (const void *)&value,
         facts[i].bytes);
}

/* ---- tables: arrays of objects; an entry has its numbers in the order of its struct
 * ------------- */

typedef struct table {
  const char *name;
  size_t offset, entry_bytes;
  uint32_t max;
  /* leading uint32_t fields, NULL after the last; a first field of 0 ends the table */
  const char *count[4];
  const char
      *flag; /* uint32_t after them, 0 or 1, left out of the file where it is 0; NULL: none */
  const char *rate[4]; /* double fields after all these */
  size_t rates_offset; /* in the entry */
} table;
static const table tables[] = {{"gemm_bf16",
                                offsetof(ps_hardware, gemm),
                                sizeof(ps_gemm_rate),
                                PS_MAX_GEMM_RATES,
                                {"rows"},
                                NULL,
                                {"forward_flops_per_s", "dgrad_flops_per_s", "wgrad_flops_per_s"},
                                offsetof(ps_gemm_rate, forward_flops_per_s)},
                               {"attention_bf16",
                                offsetof(ps_hardware, attention),
                                sizeof(ps_attention_rate),
                                PS_MAX_ATTENTION_RATES,
                                {"rows", "kv_rows", "packed"},
                                "found",
                                {"forward_flops_per_s", "backward_flops_per_s"},
                                offsetof(ps_attention_rate, forward_flops_per_s)},
                               {"memory_shares",
                                offsetof(ps_hardware, contention),
                                sizeof(ps_contention_rate),
                                PS_MAX_CONTENTION_RATES,
                                {"kinds", "threads"},
                                NULL,
                                {"h2d_bytes_per_s", "d2h_bytes_per_s", "host_bytes_per_s"},
                                offsetof(ps_contention_rate, h2d_bytes_per_s)},
                               {"optimizer_by_threads",
                                offsetof(ps_hardware, optimizer_by_threads),
                                sizeof(ps_thread_rate),
                                PS_MAX_THREAD_RATES,
                                {"threads"},
                                NULL,
                                {"bytes_per_s"},
                                offsetof(ps_thread_rate, bytes_per_s)}};
enum { N_TABLES = sizeof tables / sizeof *tables };

static uint32_t *counts_of(ps_hardware *hw, const table *t, size_t i) {
  return (uint32_t *)(void *)((char *)hw + t->offset + i * t->entry_bytes);
}
static double *rates_of(ps_hardware *hw, const table *t, size_t i) {
  return (double *)(void *)((char *)hw + t->offset + i * t->entry_bytes + t->rates_offset);
}

static ps_status read_entry(ps_hardware *hw, const table *t, size_t i, const ps__json *j,
                            const char *path) {
  int k = 0;
  uint64_t value = 0;
  for (; t->count[k]; k++) {
    if (!ps__json_uint64(ps__json_get(j, t->count[k]), &value) || value == 0 || value > UINT32_MAX)
      return ps__fail(PS_EFORMAT, "%s: %s[%zu].%s is missing or no positive whole number", path,
                      t->name, i, t->count[k]);
    counts_of(hw, t, i)[k] = (uint32_t)value;
  }
  const ps__json *flag = t->flag ? ps__json_get(j, t->flag) : NULL;
  if (flag && (!ps__json_uint64(flag, &value) || value > 1))
    return ps__fail(PS_EFORMAT, "%s: %s[%zu].%s is neither 0 nor 1", path, t->name, i, t->flag);
  if (flag)
    counts_of(hw, t, i)[k] = (uint32_t)value;
  for (k = 0; t->rate[k]; k++) {
    double *rate = &rates_of(hw, t, i)[k];
    *rate = ps__json_number(ps__json_get(j, t->rate[k]), 0);
    if (!(*rate > 0))
      return ps__fail(PS_EFORMAT, "%s: %s[%zu].%s is missing or not positive", path, t->name, i,
                      t->rate[k]);
  }
  return PS_OK;
}

static ps_status read_tables(ps_hardware *hw, const ps__json *j, const char *path) {
  for (const table *t = tables; t < tables + N_TABLES; t++) {
    const ps__json *list = ps__json_get(j, t->name);
    if (!list)
      continue;
    if (ps__json_type(list) != PS_JSON_ARRAY || ps__json_length(list) > t->max)
      return ps__fail(PS_EFORMAT, "%s: %s must be a list of at most %u entries", path, t->name,
                      t->max);
    for (size_t i = 0; i < ps__json_length(list); i++)
      PS_TRY(read_entry(hw, t, i, ps__json_at(list, i), path));
  }
  for (const ps_contention_rate *s = hw->contention;
       s < hw->contention + PS_MAX_CONTENTION_RATES && s->kinds; s++)
    if (s->kinds < PS_CONTENTION_SUMS || s->kinds >= PS_CONTENTION_OPTIMIZER + PS_CONTENTION_SUMS)
      return ps__fail(PS_EFORMAT,
                      "%s: memory_shares[%zu].kinds %u: neither sums (4) nor the optimizer (8) "
                      "with copies to the device (1), to the host (2) or both",
                      path, (size_t)(s - hw->contention), s->kinds);
  bool whole = !hw->attention[0].rows;
  for (const ps_attention_rate *r = hw->attention;
       r < hw->attention + PS_MAX_ATTENTION_RATES && r->rows; r++) {
    if (r->kv_rows < r->rows || ((r->packed > 1 || r->found) && r->kv_rows > r->rows))
      return ps__fail(PS_EFORMAT,
                      "%s: attention_bf16[%zu]: %u kv_rows for %u rows, packed %u, found %u: none "
                      "of whole, packed, found and slice",
                      path, (size_t)(r - hw->attention), r->kv_rows, r->rows, r->packed, r->found);
    whole |= r->kv_rows == r->rows && r->packed == 1 && !r->found;
  }
  return whole ? PS_OK
               : ps__fail(PS_EFORMAT,
                          "%s: attention_bf16 needs an entry of a whole sequence (kv_rows as rows, "
                          "packed 1)",
                          path);
}

static void write_table(ps__jsonw *w, ps_hardware *hw, const table *t) {
  ps__jsonw_array(w, t->name);
  for (size_t i = 0; i < t->max && counts_of(hw, t, i)[0]; i++) {
    ps__jsonw_object(w, NULL);
    int k = 0;
    for (; t->count[k]; k++)
      ps__jsonw_uint(w, t->count[k], counts_of(hw, t, i)[k]);
    if (t->flag && counts_of(hw, t, i)[k])
      ps__jsonw_uint(w, t->flag, 1);
    for (k = 0; t->rate[k]; k++)
      ps__jsonw_number(w, t->rate[k], rates_of(hw, t, i)[k]);
    ps__jsonw_end(w);
  }
  ps__jsonw_end(w);
}

/* ---- a machine ------------------------------------------------------------------------------- */

static ps_status read_rates(ps_hardware *hw, const ps__json *j, const char *path) {
  for (int i = 0; i < N_RATES; i++) {
    const ps__json *value = ps__json_get(j, rates[i].name);
    *rate_at(hw, i) = ps__json_number(value, 0);
    if (rates[i].optional ? value && !(*rate_at(hw, i) >= 0) : !(*rate_at(hw, i) > 0))
      return ps__fail(PS_EFORMAT, "%s: %s is missing or not positive: run penstock profile", path,
                      rates[i].name);
  }
  PS_TRY(read_tables(hw, j, path));
  ps__hardware_complete(hw);
  return PS_OK;
}

ps_status ps_hardware_describe(ps_hardware *out, const char *path) {
  if (!out || !path)
    return ps__fail(PS_EINVAL, "ps_hardware_describe: out and path must be given");
  ps__json *j = NULL;
  PS_TRY(ps__json_read_file(&j, path, 1 << 20));
  ps_hardware hw = {.struct_bytes = sizeof hw, .measured = 1};
  ps_status st = read_rates(&hw, j, path);
  for (int i = 0; st == PS_OK && i < N_FACTS; i++) {
    uint64_t value = 0;
    const ps__json *given = ps__json_get(j, facts[i].name);
    if (!ps__json_uint64(given, &value) && (given || !facts[i].optional))
      st = ps__fail(PS_EFORMAT, "%s: %s is missing or no whole number", path, facts[i].name);
    if (given)
      set_fact(&hw, i, value);
  }
  const char *name = ps__json_string(ps__json_get(j, "name"), NULL),
             *device = ps__json_string(ps__json_get(j, "device_name"), NULL);
  snprintf(hw.name, sizeof hw.name, "%s", name ? name : "");
  snprintf(hw.device_name, sizeof hw.device_name, "%s", device ? device : "");
  hw.peak_flops_per_s = ps__json_number(ps__json_get(j, "peak_flops_per_s"), 0);
  hw.device_peak_bytes_per_s = ps__json_number(ps__json_get(j, "device_peak_bytes_per_s"), 0);
  hw.link_peak_bytes_per_s = ps__json_number(ps__json_get(j, "link_peak_bytes_per_s"), 0);
  if (st == PS_OK && hw.backend >= PS_N_BACKENDS)
    st = ps__fail(PS_EFORMAT, "%s: backend %u is unknown", path, hw.backend);
  ps__json_free(j);
  if (st == PS_OK)
    *out = hw;
  return st;
}

static bool same_number(const ps__json *j, const char *name, uint64_t here) {
  uint64_t value;
  return ps__json_uint64(ps__json_get(j, name), &value) && value == here;
}

/* Whether a file's rates are of this machine with the same libraries. */
static bool same_machine(const ps__json *j, const ps_hardware *hw) {
  const char *name = ps__json_string(ps__json_get(j, "name"), NULL),
             *device = ps__json_string(ps__json_get(j, "device_name"), NULL);
  return name && strcmp(name, hw->name) == 0 && device && strcmp(device, hw->device_name) == 0 &&
         same_number(j, "n_cpus", hw->n_cpus) && same_number(j, "n_threads", hw->n_threads) &&
         same_number(j, "driver_version", hw->driver_version) &&
         same_number(j, "cudnn_version", hw->cudnn_version) &&
         same_number(j, "cublaslt_version", hw->cublaslt_version) &&
         ps__json_number(ps__json_get(j, "flash4_version"), 0) == hw->flash4_version;
}

ps_status ps_hardware_read(ps_hardware *out, const char *path, uint32_t backend, uint32_t device,
                           uint32_t n_threads) {
  if (!out || !path)
    return ps__fail(PS_EINVAL, "ps_hardware_read: out and path must be given");
  ps__json *j = NULL;
  PS_TRY(ps__json_read_file(&j, path, 1 << 20));
  ps_hardware hw;
  ps_status st = ps__hardware_facts(&hw, backend, device, n_threads);
  if (st == PS_OK && !same_number(j, "layout", LAYOUT))
    st = ps__fail(PS_ESTATE, "%s: measured by another version of penstock: run penstock profile",
                  path);
  if (st == PS_OK && !same_machine(j, &hw))
    st = ps__fail(PS_ESTATE,
                  "%s: measured on another machine, with other threads or other libraries: run "
                  "penstock profile",
                  path);
  if (st == PS_OK)
    st = read_rates(&hw, j, path);
  if (st == PS_OK && backend == PS_BACKEND_CPU)
    hw.peak_flops_per_s = hw.gemm_flops_per_s[PS_F32];
  if (st == PS_OK && backend == PS_BACKEND_CUDA &&
      !ps__json_uint64(ps__json_get(j, "device_overhead_bytes"), &hw.device_overhead_bytes))
    st = ps__fail(PS_EFORMAT, "%s: device_overhead_bytes is missing: run penstock profile", path);
  hw.measured = same_number(j, "measured", PS_MEASURED_TIGHT) ? PS_MEASURED_TIGHT : PS_MEASURED;
  ps__json_free(j);
  if (st == PS_OK)
    *out = hw;
  return st;
}

static void write_members(ps__jsonw *w, ps_hardware *hw) {
  ps__jsonw_object(w, NULL);
  ps__jsonw_uint(w, "layout", LAYOUT);
  ps__jsonw_string(w, "name", hw->name);
  ps__jsonw_string(w, "device_name", hw->device_name);
  for (int i = 0; i < N_FACTS; i++)
    ps__jsonw_uint(w, facts[i].name, fact(hw, i));
  ps__jsonw_number(w, "peak_flops_per_s", hw->peak_flops_per_s);
  ps__jsonw_number(w, "device_peak_bytes_per_s", hw->device_peak_bytes_per_s);
  ps__jsonw_number(w, "link_peak_bytes_per_s", hw->link_peak_bytes_per_s);
  for (int i = 0; i < N_RATES; i++)
    ps__jsonw_number(w, rates[i].name, *rate_at(hw, i));
  for (int i = 0; i < N_TABLES; i++)
    write_table(w, hw, &tables[i]);
  ps__jsonw_end(w);
}

ps_status ps_hardware_write(const ps_hardware *hw, const char *path) {
  if (!hw || !path)
    return ps__fail(PS_EINVAL, "ps_hardware_write: hw and path must be given");
  ps__jsonw *w = NULL;
  PS_TRY(ps__jsonw_create(&w));
  ps_hardware copy = *hw;
  write_members(w, &copy);
  size_t n;
  const char *text = ps__jsonw_text(w, &n);
  char *temporary;
  int fd;
  ps_status st = text ? ps__replace_begin(&fd, &temporary, path)
                      : ps__fail(PS_ENOMEM, "out of memory for %s", path);
  if (st == PS_OK)
    st = ps__replace_end(fd, temporary, path, ps__write_all(fd, path, text, n));
  ps__jsonw_free(w);
  return st;
}
