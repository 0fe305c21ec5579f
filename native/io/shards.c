/* shards.c - token shards of several producers, mapped and read window by window.
 *
 * The pages behind a window are dropped from the mapping once it has been copied out (they stay in the system's page cache),
 * so that a data set of any size costs next to no resident memory. A page of a mapped file that another process has cut off would
 * end this process with SIGBUS: each window looks at the file's length first (a system call of a microsecond), which leaves only
 * a file that is cut off while a window is being copied. */
#include <penstock/data.h>

#include "io.h"
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_BYTES = 1024, CHECK_TOKENS = 1 << 20, DROP_BYTES = 1 << 16 /* what one fault may map around itself */ };

typedef struct token_shard {
  char *path;
  char *map; /* the whole file */
  uint64_t file_bytes, n_tokens;
  dev_t device;            /* with the inode: whether the path still names the file that is mapped */
  ino_t inode;
  uint32_t token_bytes;    /* 2 or 4 */
  const uint8_t *mask;     /* one bit a token, 0: no target; NULL when there is none */
} token_shard;

struct ps_dataset {
  token_shard *shards;
  size_t n, cap;
  uint64_t n_tokens;
  uint32_t vocab_size;
};

static ps_status no_memory(const char *path) { return ps__fail(PS_ENOMEM, "%s: no memory left to open it", path); }

static uint32_t le32(const void *p) {
  const uint8_t *b = p;
  return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static uint32_t token_at(const token_shard *s, uint64_t i) {
  const uint8_t *p = (const uint8_t *)s->map + HEADER_BYTES + i * s->token_bytes;
  return s->token_bytes == 2 ? p[0] | (uint32_t)p[1] << 8 : le32(p);
}

/* Pages [begin, end) of the file leave this process. */
static void drop_pages(const token_shard *s, uint64_t begin, uint64_t end) {
  begin = begin / DROP_BYTES * DROP_BYTES;
  end = (end + DROP_BYTES - 1) / DROP_BYTES * DROP_BYTES;
  if (end > s->file_bytes) end = s->file_bytes;
  madvise(s->map + begin, end - begin, MADV_DONTNEED); /* a read-only file mapping: nothing is lost */
}

/* ---- headers ------------------------------------------------------------------------------------------------------------ */

static ps_status expect_version(const char *path, const char *producer, uint32_t version, uint32_t lo, uint32_t hi) {
  if (version >= lo && version <= hi) return PS_OK;
  return ps__fail(PS_EFORMAT, "%s: is a token shard of %s, version %u: version %s%u is read", path, producer, version,
                  lo < hi ? "1 or " : "", hi);
}

static ps_status parse_penstock(token_shard *s, const uint32_t h[16]) {
  PS_TRY(expect_version(s->path, "Penstock", h[1], 1, 1));
  if (h[2] != 2 && h[2] != 4) return ps__fail(PS_EFORMAT, "%s: header word 2 is %u: a token has 2 or 4 bytes", s->path, h[2]);
  s->token_bytes = h[2];
  s->n_tokens = h[4] | (uint64_t)h[5] << 32;
  return PS_OK;
}

static ps_status parse_bintok(token_shard *s, const uint32_t h[16], bool *masks) {
  PS_TRY(expect_version(s->path, "BIN.TOK", h[2], 1, 2));
  if (h[3] != 4) return ps__fail(PS_EFORMAT, "%s: header word 3 is %u: a BIN.TOK token has 4 bytes", s->path, h[3]);
  if (h[6] > 1) return ps__fail(PS_EFORMAT, "%s: header word 6 is %u: it says whether there are masks, 0 or 1", s->path, h[6]);
  s->token_bytes = 4;
  s->n_tokens = h[4];
  *masks = h[6];
  return PS_OK;
}

static ps_status parse_header(token_shard *s, const unsigned char raw[HEADER_BYTES], bool *masks) {
  uint32_t h[16];
  for (int i = 0; i < 16; i++) h[i] = le32(raw + 4 * i);
  *masks = false;
  if (!memcmp(raw, "BIN.TOK\n", 8)) {
    PS_TRY(parse_bintok(s, h, masks));
  } else if (h[0] == 20261121) {
    return parse_penstock(s, h);
  } else if (h[0] == 20240520) {
    PS_TRY(expect_version(s->path, "llm.c", h[1], 1, 1));
    s->token_bytes = 2;
    s->n_tokens = h[2];
  } else if (h[0] == 20240801) {
    PS_TRY(expect_version(s->path, "llm.c llama-3", h[1], 7, 7));
    s->token_bytes = 4;
    s->n_tokens = h[2];
  } else if (h[0] == 20240522) {
    return ps__fail(PS_EFORMAT, "%s: is an llm.c evaluation file (HellaSwag, MMLU): token shards are needed", s->path);
  } else {
    return ps__fail(PS_EFORMAT, "%s: its magic number is %u, which no known token shard has: write shards with python -m penstock.data",
                    s->path, h[0]);
  }
  if (s->n_tokens > INT32_MAX)
    return ps__fail(PS_EFORMAT, "%s: its header claims %" PRIu64 " tokens: below 2^31 are allowed in this format", s->path, s->n_tokens);
  return PS_OK;
}

/* The file's length must be what the header says. */
static ps_status check_length(token_shard *s, bool masks) {
  uint64_t need;
  if (__builtin_mul_overflow(s->n_tokens, (uint64_t)s->token_bytes, &need) ||
      __builtin_add_overflow(need, HEADER_BYTES + (masks ? (s->n_tokens + 7) / 8 : 0), &need))
    need = UINT64_MAX;
  if (need == s->file_bytes) return PS_OK;
  return ps__fail(PS_EFORMAT, "%s: its header claims %" PRIu64 " tokens of %u bytes%s, which makes %" PRIu64 " bytes, but the file has %" PRIu64
                  ": %s, write it again", s->path, s->n_tokens, s->token_bytes, masks ? " and masks" : "", need,
                  s->file_bytes, s->file_bytes < need ? "it may be truncated" : "something was appended to it");
}

/* ---- opening ------------------------------------------------------------------------------------------------------------ */

static ps_status past_vocabulary(const ps_dataset *ds, const token_shard *s, uint64_t i) {
  return ps__fail(PS_EFORMAT, "%s: token %" PRIu64 " of the shard is %u: the model's vocabulary has %u; use the tokenizer of this model",
                  s->path, i, token_at(s, i), ds->vocab_size);
}

static ps_status check_start(const ps_dataset *ds, const token_shard *s) {
  uint64_t n = s->n_tokens < CHECK_TOKENS ? s->n_tokens : CHECK_TOKENS;
  ps_status st = PS_OK;
  for (uint64_t i = 0; i < n && st == PS_OK; i++)
    if (token_at(s, i) >= ds->vocab_size) st = past_vocabulary(ds, s, i);
  drop_pages(s, 0, HEADER_BYTES + n * s->token_bytes);
  return st;
}

static ps_status map_shard(token_shard *s, int fd, const struct stat *sb) {
  unsigned char raw[HEADER_BYTES];
  bool masks;
  s->file_bytes = (uint64_t)sb->st_size;
  s->device = sb->st_dev;
  s->inode = sb->st_ino;
  if (s->file_bytes < HEADER_BYTES)
    return ps__fail(PS_EFORMAT, "%s: has %" PRIu64 " bytes: a token shard starts with a header of %d", s->path, s->file_bytes, HEADER_BYTES);
  PS_TRY(ps__pread_all(fd, s->path, raw, sizeof raw, 0));
  PS_TRY(parse_header(s, raw, &masks));
  PS_TRY(check_length(s, masks));
  errno = EIO;
  void *p = ps__fault_hit(PS_FAULT_READ) ? MAP_FAILED : mmap(NULL, s->file_bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) return ps__fail(PS_EIO, "%s: cannot be mapped into memory: %s", s->path, strerror(errno));
  s->map = p;
  if (masks) s->mask = (const uint8_t *)s->map + HEADER_BYTES + s->n_tokens * s->token_bytes;
  return PS_OK;
}

/* Takes @path over, also on failure. */
static ps_status add_shard(ps_dataset *ds, char *path) {
  void *shards = ds->shards;
  bool grown = ps__grow(&shards, ds->n, &ds->cap, sizeof *ds->shards);
  ds->shards = shards;
  if (!grown) {
    ps_status st = no_memory(path);
    ps__free(path);
    return st;
  }
  token_shard *s = &ds->shards[ds->n++];
  *s = (token_shard){.path = path};
  int fd;
  struct stat sb;
  PS_TRY(ps__open_input(&fd, &sb, path));
  ps_status st = map_shard(s, fd, &sb);
  close(fd);
  if (st == PS_OK) st = check_start(ds, s);
  ds->n_tokens += s->n_tokens;
  return st;
}

static int by_text(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* The *.bin of a folder, sorted by name; names freed by the caller, also on failure. */
static ps_status list_folder(const char *folder, char ***names, size_t *n) {
  size_t cap = 0;
  DIR *d = opendir(folder);
  if (!d) return ps__fail(PS_EIO, "%s: cannot be opened: %s", folder, strerror(errno));
  ps_status st = PS_OK;
  for (struct dirent *e; st == PS_OK && (e = readdir(d));) {
    size_t k = strlen(e->d_name);
    if (k <= 4 || strcmp(e->d_name + k - 4, ".bin") || e->d_name[0] == '.') continue;
    void *items = *names;
    bool grown = ps__grow(&items, *n, &cap, sizeof **names);
    *names = items;
    char *path = grown ? ps__path_join(folder, e->d_name) : NULL;
    if (path) (*names)[(*n)++] = path;
    else st = no_memory(folder);
  }
  closedir(d);
  if (st == PS_OK && *n == 0) return ps__fail(PS_EINVAL, "%s: no token shard (*.bin) lies in this folder", folder);
  if (st == PS_OK) qsort(*names, *n, sizeof **names, by_text);
  return st;
}

static ps_status add_path(ps_dataset *ds, const char *path) {
  struct stat sb;
  if (stat(path, &sb) != 0) return ps__fail(PS_EIO, "%s: cannot be opened: %s", path, strerror(errno));
  if (!S_ISDIR(sb.st_mode)) {
    char *copy = ps__strdup(path);
    return copy ? add_shard(ds, copy) : no_memory(path);
  }
  char **names = NULL;
  size_t n = 0, taken = 0;
  ps_status st = list_folder(path, &names, &n);
  while (st == PS_OK && taken < n) st = add_shard(ds, names[taken++]);
  while (taken < n) ps__free(names[taken++]);
  ps__free(names);
  return st;
}

ps_status ps_dataset_open(ps_dataset **out, const char *const *paths, uint32_t n_paths, uint32_t vocab_size) {
  if (!out || !paths || n_paths == 0) return ps__fail(PS_EINVAL, "no token shard was given: name files or folders of *.bin");
  if (vocab_size == 0 || vocab_size > INT32_MAX)
    return ps__fail(PS_EINVAL, "vocab_size is %u: it must be 1 to %d", vocab_size, INT32_MAX);
  ps_dataset *ds = ps__calloc(1, sizeof *ds);
  if (!ds) return no_memory("token shards");
  ds->vocab_size = vocab_size;
  ps_status st = PS_OK;
  for (uint32_t i = 0; i < n_paths && st == PS_OK; i++)
    st = paths[i] ? add_path(ds, paths[i]) : ps__fail(PS_EINVAL, "path %u of the token shards is NULL", i);
  if (st != PS_OK) {
    ps_dataset_close(ds);
    return st;
  }
  *out = ds;
  return PS_OK;
}

void ps_dataset_close(ps_dataset *ds) {
  if (!ds) return;
  for (size_t i = 0; i < ds->n; i++) {
    if (ds->shards[i].map) munmap(ds->shards[i].map, ds->shards[i].file_bytes);
    ps__free(ds->shards[i].path);
  }
  ps__free(ds->shards);
  ps__free(ds);
}

/* ---- reading ------------------------------------------------------------------------------------------------------------ */

uint32_t ps_dataset_n_shards(const ps_dataset *ds) { return (uint32_t)ds->n; }
uint64_t ps_dataset_n_tokens(const ps_dataset *ds) { return ds->n_tokens; }

static uint64_t windows(const token_shard *s, uint64_t seq_len) { return s->n_tokens ? (s->n_tokens - 1) / seq_len : 0; }

uint64_t ps_dataset_n_sequences(const ps_dataset *ds, uint64_t seq_len) {
  uint64_t sum = 0;
  for (size_t i = 0; seq_len && i < ds->n; i++) sum += windows(&ds->shards[i], seq_len);
  return sum;
}

/* Tokens [first, first + seq_len] of the shard: each is checked before it is used. */
static ps_status copy_window(const ps_dataset *ds, const token_shard *s, uint64_t first, uint64_t seq_len, int32_t *tokens,
                             int32_t *targets) {
  for (uint64_t i = 0; i <= seq_len; i++) {
    uint64_t at = first + i;
    uint32_t id = token_at(s, at);
    if (id >= ds->vocab_size) return past_vocabulary(ds, s, at);
    if (i < seq_len) tokens[i] = (int32_t)id;
    if (i > 0) targets[i - 1] = s->mask && !(s->mask[at / 8] >> at % 8 & 1) ? -1 : (int32_t)id;
  }
  return PS_OK;
}

/* A file that was replaced by another of its name is still mapped whole: only the mapped one may not shrink. */
static ps_status check_not_cut(const token_shard *s) {
  struct stat sb;
  if (stat(s->path, &sb) != 0 || sb.st_dev != s->device || sb.st_ino != s->inode || (uint64_t)sb.st_size >= s->file_bytes) return PS_OK;
  return ps__fail(PS_EIO, "%s: was cut from %" PRIu64 " to %" PRIu64 " bytes while it was in use: write it again", s->path, s->file_bytes,
                  (uint64_t)sb.st_size);
}

ps_status ps_dataset_read(ps_dataset *ds, uint64_t seq_len, uint64_t idx, int32_t *tokens, int32_t *targets) {
  uint64_t left = idx;
  size_t k = 0;
  if (seq_len == 0) return ps__fail(PS_EINVAL, "seq_len is 0: it must be at least 1");
  while (k < ds->n && left >= windows(&ds->shards[k], seq_len)) left -= windows(&ds->shards[k++], seq_len);
  if (k == ds->n)
    return ps__fail(PS_EINVAL, "sequence %" PRIu64 " was asked for: the data has %" PRIu64 " of %" PRIu64 " tokens", idx,
                    ps_dataset_n_sequences(ds, seq_len), seq_len);
  const token_shard *s = &ds->shards[k];
  if (ps__fault_hit(PS_FAULT_READ)) return ps__fail(PS_EIO, "%s: reading sequence %" PRIu64 " failed", s->path, idx);
  PS_TRY(check_not_cut(s));
  uint64_t first = left * seq_len, begin = HEADER_BYTES + first * s->token_bytes;
  ps_status st = copy_window(ds, s, first, seq_len, tokens, targets);
  drop_pages(s, begin, begin + (seq_len + 1) * s->token_bytes);
  if (s->mask) {
    uint64_t mask = (uint64_t)(s->mask - (const uint8_t *)s->map);
    drop_pages(s, mask + first / 8, mask + (first + seq_len) / 8 + 1);
  }
  return st;
}
