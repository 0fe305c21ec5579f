/* labels.c - reads the label files beside token shards: a header, and a target for each token. */
#include "io/labels.h"
#include <penstock/model.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

enum { HEADER_BYTES = 1024, MAGIC = 20261128 };

static uint32_t le32(const void *p) {
  const uint8_t *b = p;
  return b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

/* A header's problem and its labels. */
static ps_status check_problem(ps__labels *l, uint32_t problem, uint32_t n) {
  const bool one = problem == PS_PROBLEM_REGRESSION || problem == PS_PROBLEM_PAIRS;
  const uint32_t most = one                                 ? 1
                        : problem == PS_PROBLEM_MULTI_LABEL ? PS_MAX_LABEL_BITS
                                                            : PS_MAX_LABELS;
  if (problem == PS_PROBLEM_LANGUAGE || problem > PS_PROBLEM_PAIRS)
    return ps__fail(PS_EFORMAT, "%s: its labels are for problem %u: 1 to %d are known",
                    l->file.path, problem, PS_PROBLEM_PAIRS);
  if (n == 0 || n > most)
    return ps__fail(PS_EFORMAT, "%s: has %u labels: 1 to %u are possible for %s", l->file.path, n,
                    most, ps_problem_name(problem));
  l->problem = problem;
  l->n_labels = n;
  return PS_OK;
}

static ps_status check_file(ps__labels *l, const ps__input *shard, uint64_t n_tokens, int fd) {
  const char *path = l->file.path;
  unsigned char raw[HEADER_BYTES];
  uint32_t crc;
  if (l->file.bytes < HEADER_BYTES)
    return ps__fail(PS_EFORMAT, "%s: has %" PRIu64 " bytes: labels start with a header of %d", path,
                    l->file.bytes, HEADER_BYTES);
  PS_TRY(ps__pread_all(fd, path, raw, sizeof raw, 0));
  const uint64_t n = le32(raw + 16) | (uint64_t)le32(raw + 20) << 32;
  if (le32(raw) != MAGIC || le32(raw + 4) != 1)
    return ps__fail(PS_EFORMAT,
                    "%s: begins with the words %u and %u, labels of a token shard with %d and 1: "
                    "write it again, or remove it",
                    path, le32(raw), le32(raw + 4), MAGIC);
  if (n != n_tokens || (l->file.bytes - HEADER_BYTES) / 4 != n || l->file.bytes % 4)
    return ps__fail(PS_EFORMAT,
                    "%s: has %" PRIu64 " bytes for %" PRIu64 " tokens, and the shard has %" PRIu64
                    " tokens of 4 bytes each here: write both again",
                    path, l->file.bytes - HEADER_BYTES, n, n_tokens);
  PS_TRY(ps__input_crc(shard, &crc));
  if (crc != le32(raw + 24))
    return ps__fail(PS_EFORMAT,
                    "%s: was made for another shard: its header has the CRC %08x, the shard's "
                    "first %d bytes have %08x: write both again",
                    path, le32(raw + 24), PS__INPUT_CRC_BYTES, crc);
  return check_problem(l, le32(raw + 8), le32(raw + 12));
}

ps_status ps__labels_open(ps__labels *l, const ps__input *shard, uint64_t n_tokens) {
  static const char suffix[] = ".labels", bin[] = ".bin";
  struct stat sb;
  const size_t k = strlen(shard->path), b = sizeof bin - 1,
               stem = k > b && !strcmp(shard->path + k - b, bin) ? k - b : k;
  char *name = ps__calloc(stem + sizeof suffix, 1);
  if (!name)
    return ps__fail(PS_ENOMEM, "%s: no memory left to open it", shard->path);
  *l = (ps__labels){.file.fd = -1};
  memcpy(name, shard->path, stem);
  memcpy(name + stem, suffix, sizeof suffix);
  if (stat(name, &sb) != 0 && errno == ENOENT) {
    ps__free(name);
    return PS_OK;
  }
  l->file.path = name;
  int fd;
  PS_TRY(ps__open_input(&fd, &sb, name));
  ps__input_identify(&l->file, &sb);
  return ps__input_leave(&l->file, fd, check_file(l, shard, n_tokens, fd));
}

ps_status ps__labels_read(const ps__labels *l, uint64_t first, uint64_t n, int32_t *targets) {
  int fd;
  if (!l->file.path)
    return PS_OK;
  PS_TRY(ps__input_take(&l->file, &fd));
  ps_status st = ps__pread_all(fd, l->file.path, targets, n * 4, HEADER_BYTES + first * 4);
  for (uint64_t i = 0; st == PS_OK && i < n; i++)
    targets[i] = (int32_t)le32(&targets[i]);
  return ps__input_leave(&l->file, fd, st);
}

void ps__labels_close(ps__labels *l) {
  ps__free(l->file.path);
  l->file.path = NULL;
}
