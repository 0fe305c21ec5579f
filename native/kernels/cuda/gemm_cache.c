/* gemm_cache.c - the file of chosen algorithms: JSON, one entry a shape. Contract: gemm_cache.h. */
#include "kernels/cuda/gemm_cache.h"
#include "core/core.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FORMAT = 3, MAX_PATH = 4096, MAX_FILE = 16 << 20, GPU_BYTES = 256 };

struct ps__gemm_cache {
  char path[MAX_PATH]; /* "" where there is no folder */
  char gpu[GPU_BYTES];
  uint64_t version;
  ps__gemm_choice *choice;
  size_t n, cap;
  bool changed;
};

/* ---- where ----------------------------------------------------------------------------------- */

static bool folder_of(char path[MAX_PATH], const char *folder) {
  const char *own = getenv("PENSTOCK_CACHE"), *xdg = getenv("XDG_CACHE_HOME"),
             *home = getenv("HOME");
  int n = -1;
  if (folder || (own && own[0]))
    n = snprintf(path, MAX_PATH, "%s", folder ? folder : own);
  else if (xdg && xdg[0])
    n = snprintf(path, MAX_PATH, "%s/penstock", xdg);
  else if (home && home[0])
    n = snprintf(path, MAX_PATH, "%s/.cache/penstock", home);
  return n > 0 && n < MAX_PATH;
}

/* FOLDER/gemm-NVIDIA-H200-130100.json */
static void set_path(ps__gemm_cache *c, const char *folder) {
  char base[MAX_PATH], name[GPU_BYTES];
  size_t n = 0;
  if (!folder_of(base, folder))
    return;
  for (const char *g = c->gpu; *g && n < 64; g++)
    name[n++] = isalnum((unsigned char)*g) ? *g : '-';
  name[n] = 0;
  if (snprintf(c->path, sizeof c->path, "%s/gemm-%s-%llu.json", base, name,
               (unsigned long long)c->version) >= MAX_PATH)
    c->path[0] = 0;
}

/* The folder of @path, and those above it. */
static void make_folders(const char *path) {
  char part[MAX_PATH];
  for (const char *s = strchr(path + 1, '/'); s; s = strchr(s + 1, '/')) {
    memcpy(part, path, (size_t)(s - path));
    part[s - path] = 0;
    (void)mkdir(part, 0777); /* most are there; what is missing shows when the file is made */
  }
}

/* ---- an entry as JSON ------------------------------------------------------------------------ */

static const char *const number_name[] = {"m",
                                          "n",
                                          "k",
                                          "lda",
                                          "ldb",
                                          "ldc",
                                          "trans_a",
                                          "trans_b",
                                          "accumulate",
                                          "has_bias",
                                          "has_residual",
                                          "dt_a",
                                          "dt_b",
                                          "dt_c",
                                          "align_a",
                                          "align_b",
                                          "align_c",
                                          "align_bias",
                                          "align_residual",
                                          "fast_accumulation",
                                          "workspace_bytes"};
enum { N_NUMBERS = sizeof number_name / sizeof *number_name, N_U32 = 6, N_FLAGS = 8 };

static void numbers_of(uint64_t x[N_NUMBERS], const ps__gemm_key *k) {
  const ps__args_gemm *a = &k->args;
  const uint64_t args[N_U32 + N_FLAGS] = {
      a->m,       a->n,          a->k,        a->lda,          a->ldb,  a->ldc,  a->trans_a,
      a->trans_b, a->accumulate, a->has_bias, a->has_residual, a->dt_a, a->dt_b, a->dt_c};
  memcpy(x, args, sizeof args);
  for (int i = 0; i < 5; i++)
    x[N_U32 + N_FLAGS + i] = k->align[i];
  x[N_NUMBERS - 2] = k->fast_accumulation;
  x[N_NUMBERS - 1] = k->workspace_bytes;
}

static void key_of(ps__gemm_key *k, const uint64_t x[N_NUMBERS]) {
  memset(k, 0, sizeof *k);
  ps__args_gemm *a = &k->args;
  uint32_t *const wide[N_U32] = {&a->m, &a->n, &a->k, &a->lda, &a->ldb, &a->ldc};
  uint8_t *const flag[N_FLAGS] = {&a->trans_a,      &a->trans_b, &a->accumulate, &a->has_bias,
                                  &a->has_residual, &a->dt_a,    &a->dt_b,       &a->dt_c};
  for (int i = 0; i < N_U32; i++)
    *wide[i] = (uint32_t)x[i];
  for (int i = 0; i < N_FLAGS; i++)
    *flag[i] = (uint8_t)x[N_U32 + i];
  for (int i = 0; i < 5; i++)
    k->align[i] = (uint32_t)x[N_U32 + N_FLAGS + i];
  k->fast_accumulation = (uint32_t)x[N_NUMBERS - 2];
  k->workspace_bytes = x[N_NUMBERS - 1];
}

static bool read_hex(uint64_t word[PS_GEMM_ALGO_WORDS], const char *text) {
  if (!text || strlen(text) != 16 * PS_GEMM_ALGO_WORDS ||
      strspn(text, "0123456789abcdef") != 16 * PS_GEMM_ALGO_WORDS)
    return false;
  for (int i = 0; i < PS_GEMM_ALGO_WORDS; i++) {
    char one[17] = {0};
    memcpy(one, text + 16 * i, 16);
    word[i] = strtoull(one, NULL, 16);
  }
  return true;
}

static bool read_choice(ps__gemm_choice *out, const ps__json *j) {
  uint64_t x[N_NUMBERS], back[N_NUMBERS];
  for (int i = 0; i < N_NUMBERS; i++)
    if (!ps__json_uint64(ps__json_get(j, number_name[i]), &x[i]))
      return false;
  key_of(&out->key, x);
  numbers_of(back, &out->key);
  return memcmp(x, back, sizeof x) == 0 &&
         read_hex(out->algo, ps__json_string(ps__json_get(j, "algorithm"), NULL));
}

static void write_choice(ps__jsonw *w, const ps__gemm_choice *c) {
  uint64_t x[N_NUMBERS];
  char text[16 * PS_GEMM_ALGO_WORDS + 1];
  numbers_of(x, &c->key);
  for (int i = 0; i < PS_GEMM_ALGO_WORDS; i++)
    snprintf(text + 16 * i, 17, "%016llx", (unsigned long long)c->algo[i]);
  ps__jsonw_object(w, NULL);
  for (int i = 0; i < N_NUMBERS; i++)
    ps__jsonw_uint(w, number_name[i], x[i]);
  ps__jsonw_string(w, "algorithm", text);
  ps__jsonw_end(w);
}

/* ---- the file -------------------------------------------------------------------------------- */

static ps_status read_choices(ps__gemm_cache *c, const ps__json *j) {
  const ps__json *list = ps__json_get(j, "algorithms");
  const char *gpu = ps__json_string(ps__json_get(j, "gpu"), NULL);
  uint64_t format, version;
  if (!ps__json_uint64(ps__json_get(j, "format"), &format) || format != FORMAT || !gpu ||
      strcmp(gpu, c->gpu) != 0 || !ps__json_uint64(ps__json_get(j, "cublaslt"), &version) ||
      version != c->version)
    return ps__fail(PS_EFORMAT, "%s: was not written for %s with cuBLASLt %llu", c->path, c->gpu,
                    (unsigned long long)c->version);
  for (size_t i = 0; i < ps__json_length(list); i++) {
    ps__gemm_choice choice;
    if (!read_choice(&choice, ps__json_at(list, i)))
      return ps__fail(PS_EFORMAT, "%s: entry %zu is damaged", c->path, i);
    PS_TRY(ps__gemm_cache_add(c, &choice));
  }
  return PS_OK;
}

static ps_status read_file(ps__gemm_cache *c) {
  ps__json *j = NULL;
  if (!c->path[0] || access(c->path, F_OK) != 0)
    return PS_OK;
  ps_status st = ps__json_read_file(&j, c->path, MAX_FILE);
  if (st == PS_OK)
    st = read_choices(c, j);
  ps__json_free(j);
  c->changed = false;
  if (st == PS_OK || st == PS_ENOMEM)
    return st;
  ps__log(PS_LOG_WARN, "%s; it is left out, and matrix products are timed again", ps_last_error());
  ps__clear_error();
  c->n = 0;
  return PS_OK;
}

ps_status ps__gemm_cache_open(ps__gemm_cache **out, const char *folder, const char *gpu,
                              uint64_t version) {
  ps__gemm_cache *c = ps__calloc(1, sizeof *c);
  if (!c)
    return ps__fail(PS_ENOMEM, "out of memory for the cache of matrix algorithms");
  snprintf(c->gpu, sizeof c->gpu, "%s", gpu);
  c->version = version;
  set_path(c, folder);
  const ps_status st = read_file(c);
  if (st != PS_OK)
    ps__gemm_cache_close(c);
  else
    *out = c;
  return st;
}

void ps__gemm_cache_close(ps__gemm_cache *c) {
  if (!c)
    return;
  ps__free(c->choice);
  ps__free(c);
}

const ps__gemm_choice *ps__gemm_cache_find(const ps__gemm_cache *c, const ps__gemm_key *key) {
  for (size_t i = 0; i < c->n; i++)
    if (memcmp(&c->choice[i].key, key, sizeof *key) == 0)
      return &c->choice[i];
  return NULL;
}

ps_status ps__gemm_cache_add(ps__gemm_cache *c, const ps__gemm_choice *choice) {
  ps__gemm_choice *old = (ps__gemm_choice *)ps__gemm_cache_find(c, &choice->key);
  if (!old && !PS_GROW(c->choice, c->n, c->cap))
    return ps__fail(PS_ENOMEM, "out of memory for %zu matrix algorithms", c->n + 1);
  if (!old)
    old = &c->choice[c->n++];
  *old = *choice;
  c->changed = true;
  return PS_OK;
}

static ps_status write_file(const ps__gemm_cache *c, const char *text, size_t bytes) {
  make_folders(c->path);
  return ps__replace_text(c->path, text, bytes);
}

void ps__gemm_cache_save(ps__gemm_cache *c) {
  ps__jsonw *w = NULL;
  if (!c->changed || !c->path[0])
    return;
  ps_status st = ps__jsonw_create(&w);
  if (st == PS_OK) {
    ps__jsonw_object(w, NULL);
    ps__jsonw_uint(w, "format", FORMAT);
    ps__jsonw_string(w, "gpu", c->gpu);
    ps__jsonw_uint(w, "cublaslt", c->version);
    ps__jsonw_array(w, "algorithms");
    for (size_t i = 0; i < c->n; i++)
      write_choice(w, &c->choice[i]);
    ps__jsonw_end(w);
    ps__jsonw_end(w);
    size_t bytes;
    const char *text = ps__jsonw_text(w, &bytes);
    st = text ? write_file(c, text, bytes) : ps__fail(PS_ENOMEM, "%s: out of memory", c->path);
  }
  ps__jsonw_free(w);
  if (st == PS_OK) {
    c->changed = false;
    return;
  }
  ps__log(PS_LOG_WARN, "%s; matrix products will be timed again next time", ps_last_error());
  ps__clear_error();
}
