/* hardware_file.c - a machine's rates and facts as JSON: one table of fields, which the reader and
 * the writer walk. */
#include "hardware/hardware_impl.h"
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Layout of a measured file. An older file lacks rates, or measured them otherwise. */
enum { LAYOUT = 11 };

/* ---- the table ------------------------------------------------------------------------------- */

/* TEXT: char[max]. REAL: double. LIST: structs of entry_bytes, whose first member is a U32; a first
 * member of 0 ends the list. */
typedef enum field_type { TEXT, U32, U64, REAL, LIST } field_type;

enum {
  REQUIRED = 1, /* every file has it, a REAL is positive; else it may be missing, or 0 */
  MACHINE = 2,  /* ps_hardware_read() takes it from the machine, not from the file */
  SAME = 4,     /* ps_hardware_read() refuses a file whose value is not the machine's */
  BACKEND = 8,  /* ps_hardware_json() has its name */
  BOOL = 16,    /* ps_hardware_json() has true or false */
  OTHERS = 32, /* depends on other machines, or on directories, and is not kept with measurements */
  FACT = MACHINE | REQUIRED,
  KEPT = MACHINE | SAME
};

typedef struct field {
  const char *key; /* the unit of a value is in its key */
  size_t offset;   /* in ps_hardware, or in the entry of a list */
  field_type type;
  uint32_t flags;
  uint64_t min, max; /* of a whole number; of a TEXT's BYTES; of a LIST's entries */
  const struct field *entry;
  size_t entry_bytes;
} field;
#define END {.key = NULL}

#define WHOLE(of, member, least, most, how)                                                        \
  {.key = #member,                                                                                 \
   .offset = offsetof(of, member),                                                                 \
   .type = U32,                                                                                    \
   .flags = how,                                                                                   \
   .min = least,                                                                                   \
   .max = most}
#define POSITIVE(of, member) WHOLE(of, member, 1, UINT32_MAX, REQUIRED)
#define NUMBER(of, member, how)                                                                    \
  {.key = #member, .offset = offsetof(of, member), .type = REAL, .flags = how}
#define RATE(of, member) NUMBER(of, member, REQUIRED)

static const field gemm_entry[] = {
    POSITIVE(ps_gemm_rate, rows), RATE(ps_gemm_rate, forward_flops_per_s),
    RATE(ps_gemm_rate, dgrad_flops_per_s), RATE(ps_gemm_rate, wgrad_flops_per_s), END};
static const field attention_entry[] = {POSITIVE(ps_attention_rate, rows),
                                        POSITIVE(ps_attention_rate, kv_rows),
                                        POSITIVE(ps_attention_rate, packed),
                                        WHOLE(ps_attention_rate, found, 0, 1, 0),
                                        RATE(ps_attention_rate, forward_flops_per_s),
                                        RATE(ps_attention_rate, backward_flops_per_s),
                                        END};
static const field delta_entry[] = {POSITIVE(ps_delta_rate, heads),
                                    RATE(ps_delta_rate, forward_elements_per_s),
                                    RATE(ps_delta_rate, backward_elements_per_s), END};
static const field contention_entry[] = {
    POSITIVE(ps_contention_rate, kinds),        POSITIVE(ps_contention_rate, threads),
    RATE(ps_contention_rate, h2d_bytes_per_s),  RATE(ps_contention_rate, d2h_bytes_per_s),
    RATE(ps_contention_rate, host_bytes_per_s), END};
static const field gpus_contention_entry[] = {POSITIVE(ps_contention_rate, kinds),
                                              WHOLE(ps_contention_rate, threads, 0, UINT32_MAX, 0),
                                              RATE(ps_contention_rate, h2d_bytes_per_s),
                                              RATE(ps_contention_rate, d2h_bytes_per_s),
                                              NUMBER(ps_contention_rate, host_bytes_per_s, 0),
                                              END};

#define AT(member) offsetof(ps_hardware, member)
#define NAME(member, how)                                                                          \
  {.key = #member,                                                                                 \
   .offset = AT(member),                                                                           \
   .type = TEXT,                                                                                   \
   .flags = how,                                                                                   \
   .max = sizeof((ps_hardware *)0)->member}
#define COUNT(member, how) WHOLE(ps_hardware, member, 0, UINT32_MAX, how)
#define BYTES(member, how)                                                                         \
  {.key = #member, .offset = AT(member), .type = U64, .flags = how, .max = UINT64_MAX}
#define REAL_AS(name, member, how) {.key = name, .offset = AT(member), .type = REAL, .flags = how}
#define REAL_OF(member, how)       REAL_AS(#member, member, how)
#define LIST_OF(name, member, list, most)                                                          \
  {.key = name,                                                                                    \
   .offset = AT(member),                                                                           \
   .type = LIST,                                                                                   \
   .max = most,                                                                                    \
   .entry = list,                                                                                  \
   .entry_bytes = sizeof *((ps_hardware *)0)->member}
static const field fields[] = {
    NAME(name, KEPT),
    NAME(device_name, KEPT),
    WHOLE(ps_hardware, backend, 0, PS_N_BACKENDS - 1, FACT | BACKEND),
    COUNT(n_threads, FACT | SAME),
    COUNT(n_cpus, FACT | SAME),
    COUNT(compute_capability, FACT),
    COUNT(n_sms, FACT),
    COUNT(cudnn_version, FACT | SAME),
    COUNT(driver_version, KEPT),
    COUNT(cublaslt_version, KEPT),
    COUNT(flash4_version, KEPT),
    WHOLE(ps_hardware, measured, PS_ESTIMATED, PS_MEASURED_TIGHT, BOOL),
    WHOLE(ps_hardware, other_work_percent, 0, 100, 0),
    COUNT(moved_percent, 0),
    BYTES(host_memory_bytes, FACT),
    BYTES(device_memory_bytes, FACT),
    BYTES(device_overhead_bytes, REQUIRED),
    BYTES(fp8_overhead_bytes, 0),
    REAL_OF(peak_flops_per_s, MACHINE),
    REAL_OF(device_peak_bytes_per_s, MACHINE),
    REAL_OF(link_peak_bytes_per_s, MACHINE),
    REAL_AS("gemm_fp32_flops_per_s", gemm_flops_per_s[PS_F32], REQUIRED),
    REAL_AS("gemm_bf16_flops_per_s", gemm_flops_per_s[PS_BF16], REQUIRED),
    REAL_AS("attention_fp32_flops_per_s", attention_flops_per_s[PS_F32], REQUIRED),
    REAL_AS("attention_bf16_flops_per_s", attention_flops_per_s[PS_BF16], REQUIRED),
    REAL_AS("attention_bwd_fp32_flops_per_s", attention_bwd_flops_per_s[PS_F32], REQUIRED),
    REAL_AS("attention_bwd_bf16_flops_per_s", attention_bwd_flops_per_s[PS_BF16], REQUIRED),
    REAL_OF(elementwise_bytes_per_s, REQUIRED),
    REAL_AS("h2d_bytes_per_s", link[PS_LINK_H2D].bytes_per_s, REQUIRED),
    REAL_AS("d2h_bytes_per_s", link[PS_LINK_D2H].bytes_per_s, REQUIRED),
    REAL_AS("duplex_bytes_per_s", link[PS_LINK_H2D].duplex_bytes_per_s, REQUIRED),
    REAL_AS("peer_bytes_per_s", link[PS_LINK_PEER].bytes_per_s, 0),
    REAL_AS("network_bytes_per_s", link[PS_LINK_NETWORK].bytes_per_s, OTHERS),
    REAL_AS("disk_read_bytes_per_s", link[PS_LINK_DISK_READ].bytes_per_s, OTHERS),
    REAL_AS("disk_write_bytes_per_s", link[PS_LINK_DISK_WRITE].bytes_per_s, OTHERS),
    REAL_AS("disk_duplex_bytes_per_s", link[PS_LINK_DISK_READ].duplex_bytes_per_s, OTHERS),
    REAL_OF(optimizer_bytes_per_s, REQUIRED),
    REAL_OF(memory_bytes_per_s, REQUIRED),
    REAL_OF(op_ns, REQUIRED),
    REAL_OF(gemm_fp8_flops_per_s, 0),
    REAL_OF(fp8_attention_speed, 0),
    REAL_OF(heads64_attention_speed, 0),
    REAL_OF(heads64_attention_bwd_speed, 0),
    REAL_OF(heads64_long_attention_speed, 0),
    REAL_OF(heads64_long_attention_bwd_speed, 0),
    REAL_OF(heads512_attention_flops_per_s, 0),
    REAL_OF(heads512_attention_bwd_flops_per_s, 0),
    REAL_OF(accumulate_bytes_per_s, 0),
    REAL_OF(accumulate_sumsq_bytes_per_s, 0),
    REAL_OF(sumsq_bytes_per_s, 0),
    REAL_OF(gather_bytes_per_s, 0),
    REAL_OF(optimizer_weights_bytes_per_s, 0),
    REAL_OF(optimizer_state_bytes_per_s, 0),
    REAL_OF(optimizer_8_bits_bytes_per_s, 0),
    REAL_OF(idle_gain, 0),
    REAL_OF(idle_most, 0),
    LIST_OF("gemm_fp32", gemm[PS_F32], gemm_entry, PS_MAX_GEMM_RATES),
    LIST_OF("gemm_bf16", gemm[PS_BF16], gemm_entry, PS_MAX_GEMM_RATES),
    LIST_OF("gemm_fp8", gemm_fp8, gemm_entry, PS_MAX_GEMM_RATES),
    LIST_OF("gemm_grouped", gemm_grouped, gemm_entry, PS_MAX_GEMM_RATES),
    LIST_OF("delta_rule", delta, delta_entry, PS_MAX_DELTA_RATES),
    LIST_OF("attention_fp32", attention[PS_F32], attention_entry, PS_MAX_ATTENTION_RATES),
    LIST_OF("attention_bf16", attention[PS_BF16], attention_entry, PS_MAX_ATTENTION_RATES),
    LIST_OF("memory_shares", contention, contention_entry, PS_MAX_CONTENTION_RATES),
    WHOLE(ps_hardware, n_gpus, 0, PS_MAX_DEVICES, 0),
    REAL_OF(gpus_compute_speed, 0),
    LIST_OF("memory_shares_of_gpus", gpus_contention, gpus_contention_entry,
            PS_MAX_CONTENTION_RATES),
    END};

static const char *const rates_of[PS_N_RATES_OF] = {"quiet", "arena", "run"};

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct source {
  const char *path;
  uint32_t without; /* fields with one of these flags are left as they are */
  bool rates;       /* rates alone, as a measurement has them: any may be missing */
} source;

/* What a measurement measures. */
static bool is_rate(const field *f) {
  return (f->type == REAL || f->type == LIST) && !(f->flags & (MACHINE | OTHERS));
}

static uint32_t u32_at(const char *at) {
  uint32_t value;
  memcpy(&value, at, sizeof value);
  return value;
}
static uint64_t u64_at(const char *at) {
  uint64_t value;
  memcpy(&value, at, sizeof value);
  return value;
}
static double real_at(const char *at) {
  double value;
  memcpy(&value, at, sizeof value);
  return value;
}

static ps_status read_whole(char *at, const field *f, const ps__json *j, const source *s,
                            const char *entry) {
  uint64_t value;
  if (!ps__json_uint64(j, &value) || value < f->min || value > f->max)
    return f->max < UINT32_MAX
               ? ps__fail(PS_EFORMAT, "%s: %s%s is no whole number from %llu to %llu", s->path,
                          entry, f->key, (unsigned long long)f->min, (unsigned long long)f->max)
               : ps__fail(PS_EFORMAT, "%s: %s%s is missing or no %swhole number", s->path, entry,
                          f->key, f->min ? "positive " : "");
  const uint32_t small = (uint32_t)value;
  memcpy(at, f->type == U32 ? (const void *)&small : (const void *)&value,
         f->type == U32 ? sizeof small : sizeof value);
  return PS_OK;
}

static ps_status read_fields(char *base, const field *f, const ps__json *j, const source *s,
                             const char *entry);

static ps_status read_list(char *at, const field *f, const ps__json *j, const source *s) {
  if (ps__json_type(j) != PS_JSON_ARRAY || ps__json_length(j) > f->max)
    return ps__fail(PS_EFORMAT, "%s: %s must be a list of at most %llu entries", s->path, f->key,
                    (unsigned long long)f->max);
  for (size_t i = 0; i < ps__json_length(j); i++) {
    char entry[64];
    snprintf(entry, sizeof entry, "%s[%zu].", f->key, i);
    PS_TRY(read_fields(at + i * f->entry_bytes, f->entry, ps__json_at(j, i), s, entry));
  }
  return PS_OK;
}

static ps_status read_value(char *at, const field *f, const ps__json *j, const source *s,
                            const char *entry) {
  const bool required = f->flags & REQUIRED;
  double real;
  const char *text;
  switch (f->type) {
  case TEXT:
    text = ps__json_string(j, NULL);
    if (!text)
      return ps__fail(PS_EFORMAT, "%s: %s is no text", s->path, f->key);
    snprintf(at, f->max, "%s", text);
    return PS_OK;
  case REAL:
    real = ps__json_number(j, -1);
    if (required ? !(real > 0) : !(real >= 0))
      return ps__fail(PS_EFORMAT, "%s: %s%s is missing or not positive", s->path, entry, f->key);
    memcpy(at, &real, sizeof real);
    return PS_OK;
  case LIST: return read_list(at, f, j, s);
  default: return read_whole(at, f, j, s, entry);
  }
}

/* @entry  "gemm_bf16[1]." before the keys in messages; "" outside lists. */
static ps_status read_fields(char *base, const field *f, const ps__json *j, const source *s,
                             const char *entry) {
  for (; f->key; f++) {
    const ps__json *value = ps__json_get(j, f->key);
    if (s->rates && !entry[0] && (!value || !is_rate(f)))
      continue;
    if (!(f->flags & s->without) && (value || f->flags & REQUIRED))
      PS_TRY(read_value(base + f->offset, f, value, s, entry));
  }
  return PS_OK;
}

static ps_status check_contention(const ps_hardware *hw, const char *path) {
  for (const ps_contention_rate *s = hw->contention;
       s < hw->contention + PS_MAX_CONTENTION_RATES && s->kinds; s++)
    if (s->kinds < PS_CONTENTION_SUMS || s->kinds >= PS_CONTENTION_OPTIMIZER + PS_CONTENTION_SUMS)
      return ps__fail(PS_EFORMAT,
                      "%s: memory_shares[%zu].kinds %u: neither sums (4) nor the optimizer (8) "
                      "with copies to the device (1), to the host (2) or both",
                      path, (size_t)(s - hw->contention), s->kinds);
  const uint32_t copies = PS_CONTENTION_H2D | PS_CONTENTION_D2H,
                 host = PS_CONTENTION_SUMS | PS_CONTENTION_OPTIMIZER;
  for (const ps_contention_rate *s = hw->gpus_contention;
       s < hw->gpus_contention + PS_MAX_CONTENTION_RATES && s->kinds; s++)
    if (!(s->kinds & copies) || (s->kinds & host) == host || s->kinds > (copies | host) ||
        ((s->kinds & host) != 0) != (s->threads > 0 && s->host_bytes_per_s > 0))
      return ps__fail(PS_EFORMAT,
                      "%s: memory_shares_of_gpus[%zu].kinds %u: no copies to the device (1) or to "
                      "the host (2), alone or beside sums (4) or the optimizer (8) with their "
                      "threads and rate",
                      path, (size_t)(s - hw->gpus_contention), s->kinds);
  return PS_OK;
}

static ps_status check_attention(const ps_attention_rate *list, const char *dtype,
                                 const char *path) {
  bool whole = !list[0].rows;
  for (const ps_attention_rate *r = list; r < list + PS_MAX_ATTENTION_RATES && r->rows; r++) {
    if (r->kv_rows < r->rows || ((r->packed > 1 || r->found) && r->kv_rows > r->rows))
      return ps__fail(PS_EFORMAT,
                      "%s: attention_%s[%zu]: %u kv_rows for %u rows, packed %u, found %u: none "
                      "of whole, packed, found and slice",
                      path, dtype, (size_t)(r - list), r->kv_rows, r->rows, r->packed, r->found);
    whole |= r->kv_rows == r->rows && r->packed == 1 && !r->found;
  }
  return whole ? PS_OK
               : ps__fail(PS_EFORMAT,
                          "%s: attention_%s needs an entry of a whole sequence (kv_rows as rows, "
                          "packed 1)",
                          path, dtype);
}

/* The fields of @j but for those with one of the flags @without. */
static ps_status read_machine(ps_hardware *hw, const ps__json *j, const char *path,
                              uint32_t without) {
  const source s = {.path = path, .without = without};
  PS_TRY(read_fields((char *)hw, fields, j, &s, ""));
  PS_TRY(check_contention(hw, path));
  PS_TRY(check_attention(hw->attention[PS_F32], "fp32", path));
  PS_TRY(check_attention(hw->attention[PS_BF16], "bf16", path));
  ps__hardware_complete(hw);
  return PS_OK;
}

ps_status ps_hardware_describe(ps_hardware *out, const char *path) {
  if (!out || !path)
    return ps__fail(PS_EINVAL, "ps_hardware_describe: out and path must be given");
  ps__json *j = NULL;
  PS_TRY(ps__json_read_file(&j, path, 1 << 20));
  ps_hardware hw = {.struct_bytes = sizeof hw, .measured = PS_MEASURED};
  const ps_status st = read_machine(&hw, j, path, 0);
  ps__json_free(j);
  if (st == PS_OK)
    *out = hw;
  return st;
}

/* Whether a file's rates are of this machine with the same libraries; what a file lacks is 0. */
static bool same_machine(const ps__json *j, const ps_hardware *hw) {
  for (const field *f = fields; f->key; f++) {
    const char *at = (const char *)hw + f->offset;
    const ps__json *value = ps__json_get(j, f->key);
    const char *text = ps__json_string(value, NULL);
    if (f->flags & SAME && (f->type == TEXT ? strcmp(text ? text : "", at) != 0
                                            : ps__json_number(value, 0) != u32_at(at)))
      return false;
  }
  return true;
}

ps_status ps_hardware_read(ps_hardware *out, const char *path, uint32_t backend, uint32_t device,
                           uint32_t n_threads) {
  if (!out || !path)
    return ps__fail(PS_EINVAL, "ps_hardware_read: out and path must be given");
  ps__json *j = NULL;
  PS_TRY(ps__json_read_file(&j, path, 1 << 20));
  ps_hardware hw;
  ps_status st = ps__hardware_facts(&hw, backend, device, n_threads);
  if (st == PS_OK && ps__json_number(ps__json_get(j, "layout"), 0) != LAYOUT)
    st = ps__fail(PS_ESTATE, "%s: measured by another version of penstock: run penstock profile",
                  path);
  if (st == PS_OK && !same_machine(j, &hw))
    st = ps__fail(PS_ESTATE,
                  "%s: measured on another machine, with other threads or other libraries: run "
                  "penstock profile",
                  path);
  if (st == PS_OK) {
    hw.measured = PS_MEASURED;
    st = read_machine(&hw, j, path, MACHINE);
  }
  ps__json_free(j);
  if (st == PS_OK)
    *out = hw;
  return st;
}

/* ---- measurements ---------------------------------------------------------------------------- */

static bool read_measurement(ps__measurement *m, const ps__json *j, const char *path) {
  const source s = {.path = path, .rates = true};
  const char *of = ps__json_string(ps__json_get(j, "of"), NULL);
  *m = (ps__measurement){.of = PS_N_RATES_OF};
  for (int i = 0; i < PS_N_RATES_OF; i++)
    if (of && strcmp(of, rates_of[i]) == 0)
      m->of = (ps_rates_of)i;
  return m->of < PS_N_RATES_OF && ps__json_uint64(ps__json_get(j, "unix_s"), &m->unix_s) &&
         read_fields((char *)&m->hw, fields, j, &s, "") == PS_OK;
}

uint32_t ps__hardware_kept(ps__kept *out, const char *path) {
  ps__json *j = NULL;
  out->n = 0;
  if (ps__json_read_file(&j, path, 1 << 20) != PS_OK)
    return 0;
  const ps__json *list = ps__json_get(j, "measurements");
  const bool fits =
      list && ps__json_type(list) == PS_JSON_ARRAY && ps__json_length(list) <= PS__KEPT;
  for (size_t i = 0; fits && i < ps__json_length(list); i++)
    out->n += read_measurement(&out->entry[out->n], ps__json_at(list, i), path);
  ps__json_free(j);
  return out->n;
}

static int by_rate(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

/* The rate at @offset of all measurements that know it; else as it is. */
static void median_at(ps_hardware *hw, const ps_hardware *const *of, uint32_t n, size_t offset) {
  double known[PS__KEPT], median;
  uint32_t m = 0;
  for (uint32_t i = 0; i < n && m < PS__KEPT; i++)
    if (real_at((const char *)of[i] + offset) > 0)
      known[m++] = real_at((const char *)of[i] + offset);
  if (!m)
    return;
  qsort(known, m, sizeof *known, by_rate);
  median = 0.5 * (known[(m - 1) / 2] + known[m / 2]);
  memcpy((char *)hw + offset, &median, sizeof median);
}

/* Whether two tables have the same shapes: equal but for their rates. */
static bool same_shapes(const char *a, const char *b, const field *list) {
  for (uint64_t i = 0; i < list->max; i++)
    for (const field *f = list->entry; f->key; f++) {
      const size_t at = i * list->entry_bytes + f->offset;
      if (f->type == U32 && u32_at(a + at) != u32_at(b + at))
        return false;
    }
  return true;
}

static void median_of_list(ps_hardware *hw, const ps_hardware *const *of, uint32_t n,
                           const field *list) {
  const ps_hardware *alike[PS__KEPT];
  uint32_t m = 0;
  for (uint32_t i = 0; i < n && m < PS__KEPT; i++)
    if (same_shapes((const char *)hw + list->offset, (const char *)of[i] + list->offset, list))
      alike[m++] = of[i];
  for (uint64_t i = 0; i < list->max; i++)
    for (const field *f = list->entry; f->key; f++)
      if (f->type == REAL)
        median_at(hw, alike, m, list->offset + i * list->entry_bytes + f->offset);
}

/* The largest less the smallest of the rates at @offset, over that of @hw; 0: one is unknown. */
static double moved_at(const ps_hardware *hw, const ps_hardware *of, uint32_t n, size_t offset) {
  const double median = real_at((const char *)hw + offset);
  double least = median, most = median;
  for (uint32_t i = 0; i < n; i++) {
    const double rate = real_at((const char *)&of[i] + offset);
    if (!(rate > 0))
      return 0;
    least = rate < least ? rate : least;
    most = rate > most ? rate : most;
  }
  return median > 0 ? (most - least) / median : 0;
}

double ps__hardware_moved(const ps_hardware *hw, const ps_hardware *of, uint32_t n,
                          const char **key) {
  double moved = 0;
  for (const field *f = fields; f->key; f++) {
    const uint64_t n_entries = f->type == LIST ? f->max : 1;
    for (uint64_t i = 0; is_rate(f) && i < n_entries; i++) {
      const size_t at = f->offset + i * f->entry_bytes;
      double most = 0;
      if (f->type == REAL)
        most = moved_at(hw, of, n, at);
      for (const field *e = f->entry; f->type == LIST && e->key; e++)
        if (e->type == REAL && moved_at(hw, of, n, at + e->offset) > most)
          most = moved_at(hw, of, n, at + e->offset);
      if (most > moved) {
        moved = most;
        *key = f->key;
      }
    }
  }
  return moved;
}

void ps__hardware_median(ps_hardware *hw, const ps_hardware *const *of, uint32_t n) {
  for (const field *f = fields; f->key; f++)
    if (is_rate(f) && f->type == LIST)
      median_of_list(hw, of, n, f);
    else if (is_rate(f))
      median_at(hw, of, n, f->offset);
  ps__hardware_complete(hw);
}

/* ---- writing --------------------------------------------------------------------------------- */

static void write_fields(ps__jsonw *w, const char *base, const field *f, bool in_words);

static void write_list(ps__jsonw *w, const char *at, const field *f) {
  ps__jsonw_array(w, f->key);
  for (uint64_t i = 0; i < f->max && u32_at(at + i * f->entry_bytes); i++) {
    ps__jsonw_object(w, NULL);
    write_fields(w, at + i * f->entry_bytes, f->entry, false);
    ps__jsonw_end(w);
  }
  ps__jsonw_end(w);
}

static void write_u32(ps__jsonw *w, const field *f, uint32_t value, bool in_words) {
  if (in_words && f->flags & BACKEND)
    ps__jsonw_string(w, f->key, value == PS_BACKEND_CUDA ? "cuda" : "cpu");
  else if (in_words && f->flags & BOOL)
    ps__jsonw_bool(w, f->key, value != 0);
  else
    ps__jsonw_uint(w, f->key, value);
}

/* @in_words: as ps_hardware_json() has it. */
static void write_field(ps__jsonw *w, const char *at, const field *f, bool in_words) {
  switch (f->type) {
  case TEXT: ps__jsonw_string(w, f->key, at); break;
  case U32: write_u32(w, f, u32_at(at), in_words); break;
  case U64: ps__jsonw_uint(w, f->key, u64_at(at)); break;
  case REAL: ps__jsonw_number(w, f->key, real_at(at)); break;
  case LIST: write_list(w, at, f); break;
  }
}
static void write_fields(ps__jsonw *w, const char *base, const field *f, bool in_words) {
  for (; f->key; f++)
    write_field(w, base + f->offset, f, in_words);
}

static void write_kept(ps__jsonw *w, const ps__kept *k) {
  ps__jsonw_array(w, "measurements");
  for (uint32_t i = 0; i < k->n; i++) {
    ps__jsonw_object(w, NULL);
    ps__jsonw_uint(w, "unix_s", k->entry[i].unix_s);
    ps__jsonw_string(w, "of", rates_of[k->entry[i].of]);
    for (const field *f = fields; f->key; f++)
      if (is_rate(f))
        write_field(w, (const char *)&k->entry[i].hw + f->offset, f, false);
    ps__jsonw_end(w);
  }
  ps__jsonw_end(w);
}

ps_status ps__hardware_text(ps__jsonw **out, const ps_hardware *hw, const ps__kept *kept) {
  PS_TRY(ps__jsonw_create(out));
  ps__jsonw_object(*out, NULL);
  ps__jsonw_uint(*out, "layout", LAYOUT);
  write_fields(*out, (const char *)hw, fields, false);
  if (kept && kept->n)
    write_kept(*out, kept);
  ps__jsonw_end(*out);
  return PS_OK;
}

ps_status ps_hardware_write(const ps_hardware *hw, const char *path) {
  if (!hw || !path)
    return ps__fail(PS_EINVAL, "ps_hardware_write: hw and path must be given");
  ps__jsonw *w = NULL;
  PS_TRY(ps__hardware_text(&w, hw, NULL));
  return ps__jsonw_replace(w, path);
}

ps_status ps_hardware_json(char *out, uint64_t room, const ps_hardware *hw) {
  if (!hw || !out)
    return ps__fail(PS_EINVAL, "ps_hardware_json: hw and out must be given");
  ps__jsonw *w = NULL;
  PS_TRY(ps__jsonw_create(&w));
  ps__jsonw_object(w, NULL);
  write_fields(w, (const char *)hw, fields, true);
  ps__jsonw_end(w);
  size_t n = 0;
  const char *text = ps__jsonw_text(w, &n);
  ps_status st = PS_OK;
  if (!text)
    st = ps__fail(PS_ENOMEM, "out of memory for a machine as JSON");
  else if (n >= room)
    st = ps__fail(PS_EINVAL, "a machine as JSON takes %zu bytes, there is room for %llu", n + 1,
                  (unsigned long long)room);
  else
    memcpy(out, text, n + 1);
  ps__jsonw_free(w);
  return st;
}
