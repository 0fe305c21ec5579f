/* shards.c - reads token shards of several formats, sequence by sequence.
 *
 * Sequences are read by pread() in small pieces on the stack. A dataset of any size thus costs no
 * memory, in whatever order it is read. (A mapping cannot promise that: a page fault maps as much
 * of the page cache as the kernel decides.) Where a shard is cut off while it is in use, only
 * reading a missing sequence fails. */
#include <penstock/data.h>

#include "core/hash64.h"
#include "io/input.h"
#include "io/labels.h"
#include "io/mix.h"
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
  HEADER_BYTES = 1024,
  CHECK_TOKENS = 1 << 20,
  PIECE_BYTES = PS__INPUT_PIECE,
  /* Shards that stay open with their masks, of the 1,024 files that a process may have. Others are
   * opened for each sequence. */
  KEPT_OPEN = 256,
  MASK_MAGIC = 20261122
};

/* What a byte of a mask file says of its token. */
enum { IS_TARGET = 1, BEGINS_DOCUMENT = 2 };

typedef struct token_shard {
  ps__input file;
  ps__input mask; /* the mask file beside it */
  ps__labels labels;
  uint64_t n_tokens;
  uint32_t token_bytes; /* 2 or 4 */
  bool signed_ids;      /* the format's tokens are int32; for messages */
  uint32_t row_tokens;  /* documents are packed in rows of so many tokens; 0: the mask names none */
  uint64_t mask_at;     /* the byte of the file where masks of one bit begin; 0: it has none */
} token_shard;

struct ps_dataset {
  token_shard *shards;
  size_t n, cap;
  ps__sources sources; /* in the order of their shards */
  uint64_t n_tokens;
  uint32_t vocab_size;
  bool marks_documents;       /* a shard has a mask file */
  uint32_t problem, n_labels; /* of the shards' labels; 0: they have none */
  _Atomic uint32_t n_users;   /* trainers that read it */
};

static ps_status no_memory(const char *path) {
  return ps__fail(PS_ENOMEM, "%s: no memory left to open it", path);
}

static bool ends_in_bin(const char *path) {
  const size_t k = strlen(path);
  return k > 4 && !strcmp(path + k - 4, ".bin");
}

#define READS_TEXT                                                                                 \
  "the command penstock of the Python package reads text and conversations, and penstock data "    \
  "writes token shards of them"

static ps_status no_shard(const char *path) {
  return ps__fail(PS_EFORMAT, "%s: no format of token shards begins like this file: " READS_TEXT,
                  path);
}

static uint32_t le32(const void *p) {
  const uint8_t *b = p;
  return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

/* ---- headers --------------------------------------------------------------------------------- */

static ps_status expect_version(const char *path, const char *producer, uint32_t version,
                                uint32_t lo, uint32_t hi) {
  if (version >= lo && version <= hi)
    return PS_OK;
  return ps__fail(PS_EFORMAT, "%s: is a token shard of %s, version %u: version %s%u is read", path,
                  producer, version, lo < hi ? "1 or " : "", hi);
}

static ps_status parse_penstock(token_shard *s, const uint32_t h[16]) {
  PS_TRY(expect_version(s->file.path, "Penstock", h[1], 1, 1));
  if (h[2] != 2 && h[2] != 4)
    return ps__fail(PS_EFORMAT, "%s: header word 2 is %u: a token has 2 or 4 bytes", s->file.path,
                    h[2]);
  s->token_bytes = h[2];
  s->n_tokens = h[4] | (uint64_t)h[5] << 32;
  return PS_OK;
}

/* What word 6 of a BIN.TOK header says of masks. MASKS_UNSAID: llmq's first writer left no flag. */
typedef enum masks { MASKS_NONE = 0, MASKS = 1, MASKS_UNSAID = 2 } masks;

static ps_status parse_bintok(token_shard *s, const uint32_t h[16], masks *m) {
  PS_TRY(expect_version(s->file.path, "BIN.TOK", h[2], 1, 2));
  if (h[3] != 4)
    return ps__fail(PS_EFORMAT, "%s: header word 3 is %u: a BIN.TOK token has 4 bytes",
                    s->file.path, h[3]);
  s->token_bytes = 4;
  s->signed_ids = true;
  s->n_tokens = h[4];
  *m = h[6] < MASKS_UNSAID ? (masks)h[6] : MASKS_UNSAID;
  return PS_OK;
}

static ps_status parse_header(token_shard *s, const unsigned char raw[HEADER_BYTES], masks *m) {
  uint32_t h[16];
  for (int i = 0; i < 16; i++)
    h[i] = le32(raw + 4 * i);
  *m = MASKS_NONE;
  if (!memcmp(raw, "BIN.TOK\n", 8)) {
    PS_TRY(parse_bintok(s, h, m));
  } else if (h[0] == 20261121) {
    return parse_penstock(s, h);
  } else if (h[0] == 20240520) {
    PS_TRY(expect_version(s->file.path, "llm.c", h[1], 1, 1));
    s->token_bytes = 2;
    s->n_tokens = h[2];
  } else if (h[0] == 20240801) {
    PS_TRY(expect_version(s->file.path, "llm.c llama-3", h[1], 7, 7));
    s->token_bytes = 4;
    s->n_tokens = h[2];
  } else if (h[0] == 20240522) {
    return ps__fail(PS_EFORMAT,
                    "%s: is an llm.c evaluation file (HellaSwag, MMLU): token shards are needed",
                    s->file.path);
  } else {
    return no_shard(s->file.path);
  }
  if (s->n_tokens > INT32_MAX)
    return ps__fail(PS_EFORMAT,
                    "%s: its header claims %" PRIu64
                    " tokens: below 2^31 are allowed in this format",
                    s->file.path, s->n_tokens);
  return PS_OK;
}

/* The file's length must be what the header says. Where the header does not say whether there are
 * masks, the length decides. */
static ps_status check_length(token_shard *s, masks m) {
  uint64_t plain, masked;
  if (__builtin_mul_overflow(s->n_tokens, (uint64_t)s->token_bytes, &plain) ||
      __builtin_add_overflow(plain, HEADER_BYTES, &plain) ||
      __builtin_add_overflow(plain, s->n_tokens / 8 + (s->n_tokens % 8 != 0), &masked))
    plain = masked = UINT64_MAX;
  if (m != MASKS && s->file.bytes == plain)
    return PS_OK;
  if (m != MASKS_NONE && s->file.bytes == masked) {
    s->mask_at = plain;
    return PS_OK;
  }
  if (m == MASKS_UNSAID)
    return ps__fail(PS_EFORMAT,
                    "%s: its header claims %" PRIu64 " tokens of %u bytes, which makes %" PRIu64
                    " bytes, with masks %" PRIu64 ", but the file has %" PRIu64 ": write it again",
                    s->file.path, s->n_tokens, s->token_bytes, plain, masked, s->file.bytes);
  const uint64_t need = m == MASKS ? masked : plain;
  return ps__fail(PS_EFORMAT,
                  "%s: its header claims %" PRIu64 " tokens of %u bytes%s, which makes %" PRIu64
                  " bytes, but the file has %" PRIu64 ": %s, write it again",
                  s->file.path, s->n_tokens, s->token_bytes, m == MASKS ? " and masks" : "", need,
                  s->file.bytes,
                  s->file.bytes < need ? "it may be truncated" : "something was appended to it");
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static ps_status past_vocabulary(const ps_dataset *ds, const token_shard *s, uint64_t i,
                                 uint32_t id) {
  if (s->signed_ids && id > INT32_MAX)
    return ps__fail(
        PS_EFORMAT,
        "%s: token %" PRIu64
        " of the shard is %d: a token id is not negative (tokens that are no targets are masked)",
        s->file.path, i, (int32_t)id);
  return ps__fail(
      PS_EFORMAT,
      "%s: token %" PRIu64
      " of the shard is %u: the model's vocabulary has %u; use the tokenizer of this model",
      s->file.path, i, id, ds->vocab_size);
}

/* Reads and checks tokens [first, first + n). The i-th of them goes to @tokens[i] and, for i > 0,
 * to
 * @targets[i - 1]. Both are NULL, or have room for n - 1. */
static ps_status read_tokens(const ps_dataset *ds, const token_shard *s, int fd, uint64_t first,
                             uint64_t n, int32_t *tokens, int32_t *targets) {
  uint8_t piece[PIECE_BYTES];
  const uint32_t width = s->token_bytes, whole = PIECE_BYTES / width;
  for (uint64_t done = 0; done < n;) {
    const uint64_t m = n - done < whole ? n - done : whole;
    PS_TRY(
        ps__pread_all(fd, s->file.path, piece, m * width, HEADER_BYTES + (first + done) * width));
    for (uint64_t i = 0; i < m; i++) {
      const uint8_t *p = piece + i * width;
      const uint32_t id = width == 2 ? p[0] | (uint32_t)p[1] << 8 : le32(p);
      if (id >= ds->vocab_size)
        return past_vocabulary(ds, s, first + done + i, id);
      if (tokens && done + i + 1 < n)
        tokens[done + i] = (int32_t)id;
      if (targets && done + i)
        targets[done + i - 1] = (int32_t)id;
    }
    done += m;
  }
  return PS_OK;
}

/* Sets the targets of those of tokens [first, first + n) that are masked to -1: from the bits after
 * the tokens. */
static ps_status read_bits(const token_shard *s, int fd, uint64_t first, uint64_t n,
                           int32_t *targets) {
  uint8_t piece[PIECE_BYTES];
  for (uint64_t done = 0; done < n;) {
    const uint64_t byte = (first + done) / 8, end = (first + n - 1) / 8 + 1,
                   m = end - byte < PIECE_BYTES ? end - byte : PIECE_BYTES;
    PS_TRY(ps__pread_all(fd, s->file.path, piece, m, s->mask_at + byte));
    for (; done < n && (first + done) / 8 < byte + m; done++)
      if (!(piece[(first + done) / 8 - byte] >> (first + done) % 8 & 1))
        targets[done] = -1;
  }
  return PS_OK;
}

/* Tokens [first, first + n] of the mask file. Sets targets that are masked to -1, and of the first
 * n tokens @begins, unless it is NULL. */
static ps_status read_mask(const token_shard *s, int fd, uint64_t first, uint64_t n,
                           int32_t *targets, uint8_t *begins) {
  uint8_t piece[PIECE_BYTES];
  for (uint64_t done = 0; done <= n;) {
    const uint64_t m = n + 1 - done < PIECE_BYTES ? n + 1 - done : PIECE_BYTES;
    PS_TRY(ps__pread_all(fd, s->mask.path, piece, m, HEADER_BYTES + first + done));
    for (uint64_t i = 0; i < m; i++) {
      if (done + i && !(piece[i] & IS_TARGET))
        targets[done + i - 1] = -1;
      if (begins && done + i < n)
        begins[done + i] = (piece[i] & BEGINS_DOCUMENT) != 0;
    }
    done += m;
  }
  return PS_OK;
}

/* ---- opening --------------------------------------------------------------------------------- */

static ps_status check_shard(const ps_dataset *ds, token_shard *s, const struct stat *sb) {
  unsigned char raw[HEADER_BYTES];
  masks m;
  ps__input_identify(&s->file, sb);
  if (s->file.bytes < HEADER_BYTES && !ends_in_bin(s->file.path))
    return no_shard(s->file.path);
  if (s->file.bytes < HEADER_BYTES)
    return ps__fail(PS_EFORMAT,
                    "%s: has %" PRIu64 " bytes: a token shard starts with a header of %d",
                    s->file.path, s->file.bytes, HEADER_BYTES);
  PS_TRY(ps__pread_all(s->file.fd, s->file.path, raw, sizeof raw, 0));
  PS_TRY(parse_header(s, raw, &m));
  PS_TRY(check_length(s, m));
  return read_tokens(ds, s, s->file.fd, 0, s->n_tokens < CHECK_TOKENS ? s->n_tokens : CHECK_TOKENS,
                     NULL, NULL);
}

/* The mask file that lies open beside its shard. */
static ps_status check_mask(token_shard *s) {
  const char *path = s->mask.path;
  unsigned char raw[HEADER_BYTES];
  uint32_t crc;
  if (s->mask.bytes < HEADER_BYTES)
    return ps__fail(PS_EFORMAT, "%s: has %" PRIu64 " bytes: a mask starts with a header of %d",
                    path, s->mask.bytes, HEADER_BYTES);
  PS_TRY(ps__pread_all(s->mask.fd, path, raw, sizeof raw, 0));
  const uint32_t magic = le32(raw), version = le32(raw + 4);
  const uint64_t n = le32(raw + 16) | (uint64_t)le32(raw + 20) << 32;
  if (magic != MASK_MAGIC || version != 1)
    return ps__fail(PS_EFORMAT,
                    "%s: begins with the words %u and %u, a mask of a token shard with %u and 1: "
                    "write it again, or remove it",
                    path, magic, version, (uint32_t)MASK_MAGIC);
  if (s->mask_at)
    return ps__fail(PS_EFORMAT, "%s: the shard has masks of its own: remove this file", path);
  if (n != s->n_tokens)
    return ps__fail(PS_EFORMAT,
                    "%s: masks %" PRIu64 " tokens, but the shard has %" PRIu64 ": write both again",
                    path, n, s->n_tokens);
  if (s->mask.bytes - HEADER_BYTES != n)
    return ps__fail(PS_EFORMAT,
                    "%s: has %" PRIu64 " bytes, but its %" PRIu64 " tokens take %d and as many: "
                    "write it again",
                    path, s->mask.bytes, n, HEADER_BYTES);
  PS_TRY(ps__input_crc(&s->file, &crc));
  if (crc != le32(raw + 24))
    return ps__fail(PS_EFORMAT,
                    "%s: was made for another shard: its header has the CRC %08x, the shard's "
                    "first %d bytes have %08x: write both again",
                    path, le32(raw + 24), PS__INPUT_CRC_BYTES, crc);
  s->row_tokens = le32(raw + 12);
  return PS_OK;
}

/* Open NAME.mask beside NAME.bin, if it is there. */
static ps_status add_mask(token_shard *s) {
  static const char suffix[] = ".mask";
  struct stat sb;
  const char *path = s->file.path;
  const size_t k = strlen(path), stem = ends_in_bin(path) ? k - 4 : k;
  char *name = ps__calloc(stem + sizeof suffix, 1);
  if (!name)
    return no_memory(path);
  memcpy(name, path, stem);
  memcpy(name + stem, suffix, sizeof suffix);
  if (stat(name, &sb) != 0 && errno == ENOENT) {
    ps__free(name);
    return PS_OK;
  }
  s->mask.path = name;
  PS_TRY(ps__open_input(&s->mask.fd, &sb, name));
  ps__input_identify(&s->mask, &sb);
  return check_mask(s);
}

/* Frees @path or keeps it, on failure too. */
static ps_status add_shard(ps_dataset *ds, char *path) {
  if (!PS_GROW(ds->shards, ds->n, ds->cap)) {
    ps_status st = no_memory(path);
    ps__free(path);
    return st;
  }
  token_shard *s = &ds->shards[ds->n++];
  *s = (token_shard){.file = {.path = path, .fd = -1}, .mask = {.fd = -1}};
  struct stat sb;
  PS_TRY(ps__open_input(&s->file.fd, &sb, path));
  PS_TRY(check_shard(ds, s, &sb));
  PS_TRY(add_mask(s));
  PS_TRY(ps__labels_open(&s->labels, &s->file, s->n_tokens));
  if (ds->n > 1 && s->labels.problem != ds->problem)
    return ps__fail(
        PS_EFORMAT,
        "%s: its labels are for %s, those of the shards before for %s: data sets of one "
        "problem go together",
        s->file.path, ps_problem_name(s->labels.problem), ps_problem_name(ds->problem));
  ds->problem = s->labels.problem;
  if (s->labels.n_labels > ds->n_labels)
    ds->n_labels = s->labels.n_labels;
  ds->n_tokens += s->n_tokens;
  ds->marks_documents |= s->mask.path != NULL;
  if (ds->n > KEPT_OPEN) {
    ps__input_shut(&s->file);
    ps__input_shut(&s->mask);
  }
  return PS_OK;
}

static int by_text(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Lists the *.bin files of a folder, sorted by name. The caller frees the names, on failure too. */
static ps_status list_folder(const char *folder, char ***names, size_t *n) {
  size_t cap = 0;
  DIR *d = opendir(folder);
  if (!d)
    return ps__fail(PS_EIO, "%s: cannot be opened: %s", folder, strerror(errno));
  ps_status st = PS_OK;
  while (st == PS_OK) {
    errno = 0;
    const struct dirent *e = readdir(d);
    if (!e && errno)
      st = ps__fail(PS_EIO, "%s: listing it failed: %s", folder, strerror(errno));
    if (!e)
      break;
    if (!ends_in_bin(e->d_name) || e->d_name[0] == '.')
      continue;
    char *path = PS_GROW(*names, *n, cap) ? ps__path_join(folder, e->d_name) : NULL;
    if (path)
      (*names)[(*n)++] = path;
    else
      st = no_memory(folder);
  }
  closedir(d);
  if (st == PS_OK && *n == 0)
    return ps__fail(PS_EINVAL, "%s: no token shard (*.bin) lies in this folder: " READS_TEXT,
                    folder);
  if (st == PS_OK)
    qsort(*names, *n, sizeof **names, by_text);
  return st;
}

static ps_status add_path(ps_dataset *ds, const char *path) {
  struct stat sb;
  if (stat(path, &sb) != 0)
    return ps__fail_to_open(path, errno);
  if (!S_ISDIR(sb.st_mode)) {
    char *copy = ps__strdup(path);
    return copy ? add_shard(ds, copy) : no_memory(path);
  }
  char **names = NULL;
  size_t n = 0, taken = 0;
  ps_status st = list_folder(path, &names, &n);
  while (st == PS_OK && taken < n)
    st = add_shard(ds, names[taken++]);
  while (taken < n)
    ps__free(names[taken++]);
  ps__free(names);
  return st;
}

ps_status ps_dataset_open(ps_dataset **out, const char *const *paths, uint32_t n_paths,
                          uint32_t vocab_size) {
  if (!out || !paths || n_paths == 0)
    return ps__fail(PS_EINVAL, "no token shard was given: name files or folders of *.bin");
  if (vocab_size == 0 || vocab_size > INT32_MAX)
    return ps__fail(PS_EINVAL, "vocab_size is %u: it must be 1 to %d", vocab_size, INT32_MAX);
  ps_dataset *ds = ps__calloc(1, sizeof *ds);
  if (!ds)
    return no_memory("token shards");
  ds->vocab_size = vocab_size;
  ps_status st = PS_OK;
  for (uint32_t i = 0; i < n_paths && st == PS_OK; i++)
    st = paths[i] ? ps__mix_parse(paths[i], &ds->sources)
                  : ps__fail(PS_EINVAL, "path %u of the token shards is NULL", i);
  if (st == PS_OK)
    st = ps__mix_check(&ds->sources);
  for (size_t i = 0; i < ds->sources.n && st == PS_OK; i++) {
    ps__source *s = &ds->sources.item[i];
    s->first_shard = ds->n;
    st = add_path(ds, s->path);
    s->n_shards = ds->n - s->first_shard;
  }
  if (st != PS_OK) {
    ps_dataset_close(ds);
    return st;
  }
  *out = ds;
  return PS_OK;
}

const char *ps__dataset_path(const ps_dataset *ds, uint64_t i) {
  return ds && i < ds->n ? ds->shards[i].file.path : NULL;
}

void ps__dataset_use(ps_dataset *ds) {
  if (ds)
    atomic_fetch_add(&ds->n_users, 1);
}

void ps__dataset_leave(ps_dataset *ds) {
  if (ds)
    atomic_fetch_sub(&ds->n_users, 1);
}

ps_status ps_dataset_close(ps_dataset *ds) {
  if (!ds)
    return PS_OK;
  const uint32_t n = atomic_load(&ds->n_users);
  if (n)
    return ps__fail(PS_EBUSY, "dataset: %" PRIu32 " trainer(s) still read it: destroy them first",
                    n);
  for (size_t i = 0; i < ds->n; i++) {
    ps__input_shut(&ds->shards[i].file);
    ps__input_shut(&ds->shards[i].mask);
    ps__free(ds->shards[i].file.path);
    ps__free(ds->shards[i].mask.path);
    ps__labels_close(&ds->shards[i].labels);
  }
  ps__mix_free(&ds->sources);
  ps__free(ds->shards);
  ps__free(ds);
  return PS_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

uint32_t ps_dataset_n_shards(const ps_dataset *ds) { return (uint32_t)ds->n; }
uint64_t ps_dataset_n_tokens(const ps_dataset *ds) { return ds->n_tokens; }

int ps_dataset_marks_documents(const ps_dataset *ds) { return ds->marks_documents; }

uint32_t ps_dataset_problem(const ps_dataset *ds, uint32_t *n_labels) {
  if (n_labels)
    *n_labels = ds->n_labels;
  return ds->problem;
}

ps_status ps_dataset_check(const ps_dataset *ds, uint64_t seq_len) {
  for (size_t i = 0; i < ds->n; i++) {
    const token_shard *s = &ds->shards[i];
    if (s->row_tokens && seq_len % s->row_tokens)
      return ps__fail(PS_EINVAL,
                      "%s: its documents are packed in rows of %u tokens, which sequences of "
                      "%" PRIu64 " would cut: train with %s %u, or pack the data anew",
                      s->file.path, s->row_tokens, seq_len, ps__field("seq_len"), s->row_tokens);
  }
  ps_dataset_part part;
  for (uint32_t k = 0; k < ps_dataset_n_weighted(ds); k++) {
    PS_TRY(ps_dataset_weighted(ds, k, seq_len, &part));
    if (!part.n_sequences)
      return ps__fail(PS_EINVAL,
                      "%s: has no shard with the %" PRIu64 " tokens that a sequence of %s %" PRIu64
                      " needs: lower %s, or leave it out of the mix",
                      part.path, seq_len + 1, ps__field("seq_len"), seq_len, ps__field("seq_len"));
  }
  if (ps_dataset_n_sequences(ds, seq_len))
    return PS_OK;
  return ps__fail(PS_EINVAL,
                  "the data has %" PRIu64 " tokens in %" PRIu32
                  " shard%s, but a sequence of %s %" PRIu64 " needs %" PRIu64
                  " tokens in one shard: lower %s, or give more data",
                  ds->n_tokens, ps_dataset_n_shards(ds), ps_dataset_n_shards(ds) == 1 ? "" : "s",
                  ps__field("seq_len"), seq_len, seq_len + 1, ps__field("seq_len"));
}

static uint64_t windows(const token_shard *s, uint64_t seq_len) {
  return s->n_tokens ? (s->n_tokens - 1) / seq_len : 0;
}

static uint64_t windows_of(const ps_dataset *ds, size_t first, size_t n, uint64_t seq_len) {
  uint64_t sum = 0;
  for (size_t i = first; seq_len && i < first + n; i++)
    sum += windows(&ds->shards[i], seq_len);
  return sum;
}

uint64_t ps_dataset_n_sequences(const ps_dataset *ds, uint64_t seq_len) {
  return windows_of(ds, 0, ds->n, seq_len);
}

/* ---- mixes ----------------------------------------------------------------------------------- */

static bool is_mix(const ps_dataset *ds) { return ds->sources.item[0].weight > 0; }

uint32_t ps_dataset_n_weighted(const ps_dataset *ds) {
  return is_mix(ds) ? (uint32_t)ds->sources.n : 0;
}

static double share_of(const ps_dataset *ds, uint32_t k) {
  double sum = 0;
  for (size_t i = 0; i < ds->sources.n; i++)
    sum += ds->sources.item[i].weight;
  return ds->sources.item[k].weight / sum;
}

ps_status ps_dataset_weighted(const ps_dataset *ds, uint32_t k, uint64_t seq_len,
                              ps_dataset_part *out) {
  if (k >= ps_dataset_n_weighted(ds))
    return ps__fail(PS_EINVAL, "part %u of the data was asked for: it has %u with weights", k,
                    ps_dataset_n_weighted(ds));
  const ps__source *s = &ds->sources.item[k];
  *out = (ps_dataset_part){.struct_bytes = sizeof *out,
                           .path = s->path,
                           .share = share_of(ds, k),
                           .n_sequences = windows_of(ds, s->first_shard, s->n_shards, seq_len)};
  return PS_OK;
}

/* FNV-1a of the shares. */
uint64_t ps_dataset_mix(const ps_dataset *ds) {
  uint64_t h = 0xCBF29CE484222325u;
  for (uint32_t k = 0; k < ps_dataset_n_weighted(ds); k++) {
    const double share = share_of(ds, k);
    uint8_t bytes[sizeof share];
    memcpy(bytes, &share, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++)
      h = (h ^ bytes[i]) * 0x100000001B3u;
  }
  return is_mix(ds) ? h : 0;
}

uint64_t ps_dataset_at(const ps_dataset *ds, uint64_t seq_len, uint64_t pos, uint64_t seed,
                       int shuffle) {
  if (!is_mix(ds))
    return ps_dataset_order(ps_dataset_n_sequences(ds, seq_len), pos, seed, shuffle);
  uint64_t count;
  const size_t k = ps__mix_at(&ds->sources, pos, seed, shuffle, &count);
  const ps__source *s = &ds->sources.item[k];
  return windows_of(ds, 0, s->first_shard, seq_len) +
         ps_dataset_order(windows_of(ds, s->first_shard, s->n_shards, seq_len), count, seed + k,
                          shuffle);
}

static ps_status read_shard(const ps_dataset *ds, const token_shard *s, uint64_t first, uint64_t n,
                            int32_t *tokens, int32_t *targets) {
  int fd;
  PS_TRY(ps__input_take(&s->file, &fd));
  ps_status st = read_tokens(ds, s, fd, first, n + 1, tokens, targets);
  if (st == PS_OK && s->mask_at)
    st = read_bits(s, fd, first + 1, n, targets);
  return ps__input_leave(&s->file, fd, st);
}

ps_status ps_dataset_read(ps_dataset *ds, uint64_t seq_len, uint64_t idx, int32_t *tokens,
                          int32_t *targets, uint8_t *begins) {
  uint64_t left = idx;
  size_t k = 0;
  if (seq_len == 0)
    return ps__fail(PS_EINVAL, "seq_len is 0: it must be at least 1");
  while (k < ds->n && left >= windows(&ds->shards[k], seq_len))
    left -= windows(&ds->shards[k++], seq_len);
  if (k == ds->n)
    return ps__fail(PS_EINVAL,
                    "sequence %" PRIu64 " does not exist: the data has %" PRIu64
                    " sequences of %" PRIu64 " tokens",
                    idx, ps_dataset_n_sequences(ds, seq_len), seq_len);
  const token_shard *s = &ds->shards[k];
  PS_TRY(read_shard(ds, s, left * seq_len, seq_len, tokens, targets));
  if (begins)
    memset(begins, 0, seq_len);
  if (s->mask.path) {
    int fd;
    PS_TRY(ps__input_take(&s->mask, &fd));
    PS_TRY(
        ps__input_leave(&s->mask, fd, read_mask(s, fd, left * seq_len, seq_len, targets, begins)));
  }
  return ps__labels_read(&s->labels, left * seq_len, seq_len, targets);
}

/* ---- targets --------------------------------------------------------------------------------- */

/* Adds the targets among bytes [from, end) of a file: bytes of a mask file, or bits. */
static ps_status count_targets(const ps__input *f, uint64_t from, uint64_t end, bool bits,
                               uint64_t *n) {
  uint8_t piece[PIECE_BYTES];
  int fd;
  PS_TRY(ps__input_take(f, &fd));
  ps_status st = PS_OK;
  while (st == PS_OK && from < end) {
    const uint64_t m = end - from < PIECE_BYTES ? end - from : PIECE_BYTES;
    st = ps__pread_all(fd, f->path, piece, m, from);
    for (uint64_t i = 0; st == PS_OK && i < m; i++)
      *n += bits ? (uint64_t)__builtin_popcount(piece[i]) : piece[i] & IS_TARGET;
    from += m;
  }
  return ps__input_leave(f, fd, st);
}

ps_status ps_dataset_targets(const ps_dataset *ds, double *share) {
  uint64_t n = 0;
  for (size_t i = 0; i < ds->n; i++) {
    const token_shard *s = &ds->shards[i];
    if (s->mask.path)
      PS_TRY(count_targets(&s->mask, HEADER_BYTES, s->mask.bytes, false, &n));
    else if (s->mask_at)
      PS_TRY(count_targets(&s->file, s->mask_at, s->file.bytes, true, &n));
    else
      n += s->n_tokens;
  }
  *share = ds->n_tokens ? (double)n / (double)ds->n_tokens : 0;
  return PS_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* 4 GiB are as much as the weights of a 2B model in bf16, which each host reads and hashes too. Of
 * more data each piece may cost a seek or a round trip to a server, so there are few. */
static const uint64_t HASHED_WHOLE = UINT64_C(4) << 30, HASHED_PIECES = 4096;

/* The record of a checkpoint is made beside the steps, and at the start of a resumed run. 1,024
 * seeks take a disk ten seconds. */
static const uint64_t MARKED_WHOLE = UINT64_C(256) << 20, MARKED_PIECES = 1024;

/* Every @stride-th piece of the file, and its last one. */
static ps_status hash_file(const ps__input *f, uint64_t stride, uint64_t *h) {
  uint8_t piece[PIECE_BYTES];
  const uint64_t n = (f->bytes + PIECE_BYTES - 1) / PIECE_BYTES;
  int fd;
  *h = ps__hash64(*h, &f->bytes, sizeof f->bytes);
  PS_TRY(ps__input_take(f, &fd));
  ps_status st = PS_OK;
  for (uint64_t i = 0; st == PS_OK && i < n;) {
    const uint64_t at = i * PIECE_BYTES, left = f->bytes - at,
                   m = left < PIECE_BYTES ? left : PIECE_BYTES;
    st = ps__pread_all(fd, f->path, piece, m, at);
    if (st == PS_OK)
      *h = ps__hash64(*h, piece, m);
    i = i + stride < n || i == n - 1 ? i + stride : n - 1;
  }
  return ps__input_leave(f, fd, st);
}

static uint64_t bytes_of(const token_shard *s) {
  return s->file.bytes + s->mask.bytes + s->labels.file.bytes;
}

/* How far apart the pieces are that are hashed. */
static uint64_t stride_of(const ps_dataset *ds, uint64_t whole, uint64_t pieces, uint64_t *all) {
  *all = 0;
  for (size_t i = 0; i < ds->n; i++)
    *all += bytes_of(&ds->shards[i]);
  return *all <= whole ? 1 : *all / (pieces * PIECE_BYTES);
}

static ps_status hash_shard(const token_shard *s, uint64_t stride, uint64_t *h) {
  PS_TRY(hash_file(&s->file, stride, h));
  if (s->mask.path)
    PS_TRY(hash_file(&s->mask, stride, h));
  return s->labels.file.path ? hash_file(&s->labels.file, stride, h) : PS_OK;
}

ps_status ps__dataset_hash(const ps_dataset *ds, uint64_t *hash, uint64_t *bytes) {
  uint64_t all, h = ps_dataset_mix(ds);
  const uint64_t stride = stride_of(ds, HASHED_WHOLE, HASHED_PIECES, &all);
  for (uint32_t k = 0; k < ps_dataset_n_weighted(ds); k++)
    h = ps__hash64(h, &ds->sources.item[k].n_shards, sizeof ds->sources.item[k].n_shards);
  for (size_t i = 0; i < ds->n; i++)
    PS_TRY(hash_shard(&ds->shards[i], stride, &h));
  *hash = h;
  *bytes = all;
  return PS_OK;
}

ps_status ps__dataset_marks(const ps_dataset *ds, ps__data_mark *out) {
  uint64_t all;
  const uint64_t stride = stride_of(ds, MARKED_WHOLE, MARKED_PIECES, &all);
  for (size_t i = 0; i < ds->n; i++) {
    const token_shard *s = &ds->shards[i];
    out[i] = (ps__data_mark){.bytes = bytes_of(s)};
    PS_TRY(hash_shard(s, stride, &out[i].hash));
  }
  return PS_OK;
}
