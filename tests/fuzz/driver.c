/* driver.c - runs a fuzz target over a corpus and mutations of it: for compilers without libFuzzer.
 *
 *     fuzz_json CORPUS [SECONDS [SEED]]     every file of the folder CORPUS, then mutations of
 *     them for SECONDS (default 10)
 *     fuzz_json FILE                        one input, as an earlier run left it
 *
 * An input that ends the process is left in ./fuzz-crash, one that takes more than LIMIT_S of
 * CPU time in ./fuzz-slow. With clang the same targets are libFuzzer's, which knows what an
 * input reached and finds more:
 *     make CC=clang CUDA=0 BUILD=build/fuzz CFLAGS="-O1 -g -fsanitize=fuzzer-no-link"
 *     SAN=address,undefined build/fuzz/lib/libpenstock.a clang -g
 *     -fsanitize=fuzzer,address,undefined -Iinclude -Inative tests/fuzz/fuzz_json.c
 *     build/fuzz/lib/libpenstock.a -lm -ldl -o fuzz_json */
#include "fuzz.h"
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/time.h>
#include <time.h>

enum { MAX_BYTES = 1 << 16, MAX_FILES = 256, LIMIT_S = 60 };
typedef struct input {
  uint8_t *data;
  size_t bytes;
} input;
static input corpus[MAX_FILES];
static int n_files;
static uint8_t current[MAX_BYTES];
static size_t current_bytes;
static uint64_t state;

static void leave(const char *name) {
  int fd = open(name, O_CREAT | O_TRUNC | O_WRONLY, 0644);
  if (fd >= 0 && write(fd, current, current_bytes) == (ssize_t)current_bytes)
    close(fd);
}
static void on_death(void) { leave("fuzz-crash"); }
static void on_signal(int sig) {
  leave(sig == SIGPROF ? "fuzz-slow" : "fuzz-crash");
  if (sig == SIGPROF)
    dprintf(2, "fuzz: an input takes more than %d s of CPU time: fuzz-slow\n", LIMIT_S);
  _exit(3);
}
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

static uint64_t draw(uint64_t n) { /* splitmix64 */
  uint64_t z = state += 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull, z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return n ? (z ^ z >> 31) % n : 0;
}

static void replace(size_t at, size_t old, const void *with, size_t bytes) {
  if (current_bytes - old + bytes > MAX_BYTES)
    return;
  memmove(current + at + bytes, current + at + old, current_bytes - at - old);
  memcpy(current + at, with, bytes);
  current_bytes += bytes - old;
}

/* Numbers in text, and little-endian ones, at the edges of types and of limits. */
static const char *const words[] = {"0",
                                    "-1",
                                    "1",
                                    "1e308",
                                    "1e-320",
                                    "-0.0",
                                    "0.5",
                                    "2147483647",
                                    "2147483648",
                                    "4294967295",
                                    "4294967296",
                                    "9007199254740993",
                                    "9223372036854775807",
                                    "18446744073709551615",
                                    "18446744073709551616",
                                    "null",
                                    "true",
                                    "\"\"",
                                    "[]",
                                    "{}",
                                    "NaN"};
static const uint64_t edges[] = {0,          1,          2,          7,          8,
                                 255,        256,        65535,      65536,      1u << 20,
                                 INT32_MAX,  1ull << 31, UINT32_MAX, 1ull << 32, INT64_MAX,
                                 1ull << 63, UINT64_MAX};

static void mutate(void) {
  size_t at = (size_t)draw(current_bytes + 1), left = current_bytes - at;
  switch (draw(8)) {
  case 0:
    if (left)
      current[at] ^= (uint8_t)(1u << draw(8));
    break;
  case 1:
    if (left)
      current[at] = (uint8_t)draw(256);
    break;
  case 2: { /* a number of 1, 2, 4 or 8 bytes */
    size_t width = (size_t)1 << draw(4);
    uint64_t value = edges[draw(sizeof edges / sizeof *edges)];
    if (left >= width)
      memcpy(current + at, &value, width);
    break;
  }
  case 3: replace(at, (size_t)draw(left < 32 ? left + 1 : 32), "", 0); break;
  case 4: { /* a part of another file */
    const input *other = &corpus[draw((uint64_t)n_files)];
    size_t from = (size_t)draw(other->bytes + 1),
           n = (size_t)draw(other->bytes - from < 64 ? other->bytes - from + 1 : 64);
    replace(at, (size_t)draw(left < n ? left + 1 : n + 1), other->data + from, n);
    break;
  }
  case 5:
  case 6: { /* a number in text */
    size_t end;
    const char *word = words[draw(sizeof words / sizeof *words)];
    while (at < current_bytes && (current[at] < '0' || current[at] > '9'))
      at++;
    for (end = at; end < current_bytes && current[end] >= '0' && current[end] <= '9'; end++) {}
    if (end > at)
      replace(at, end - at, word, strlen(word));
    break;
  }
  default:
    if (draw(4) == 0)
      current_bytes = at; /* cut off */
  }
}

static void take(const input *file) { memcpy(current, file->data, current_bytes = file->bytes); }
static void run(void) {
  struct itimerval limit = {.it_value.tv_sec = LIMIT_S};
  setitimer(ITIMER_PROF, &limit, NULL); /* of CPU time: the machine may be busy */
  LLVMFuzzerTestOneInput(current, current_bytes);
  limit.it_value.tv_sec = 0;
  setitimer(ITIMER_PROF, &limit, NULL);
}

static void load(const char *path) {
  FILE *f = fopen(path, "rb");
  uint8_t *data = malloc(MAX_BYTES);
  if (!f || !data || n_files == MAX_FILES) {
    fprintf(stderr, "fuzz: %s cannot be read\n", path);
    exit(2);
  }
  corpus[n_files++] = (input){data, fread(data, 1, MAX_BYTES, f)};
  fclose(f);
}

int main(int argc, char **argv) {
  if (argc < 2) {
    fprintf(stderr, "use: %s CORPUS [SECONDS [SEED]], or %s FILE\n", argv[0], argv[0]);
    return 2;
  }
  struct dirent **names;
  int n = scandir(argv[1], &names, NULL, alphasort);
  if (n < 0)
    load(argv[1]);
  for (int i = 0; i < n; i++) {
    char path[4096];
    if (snprintf(path, sizeof path, "%s/%s", argv[1], names[i]->d_name) < (int)sizeof path &&
        names[i]->d_name[0] != '.')
      load(path);
    free(names[i]);
  }
  if (n >= 0)
    free(names);
  if (__sanitizer_set_death_callback)
    __sanitizer_set_death_callback(on_death);
  const int signals[] = {SIGPROF, SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
  /* sanitizers report the others */
  for (int i = 0; i < (__sanitizer_set_death_callback ? 2 : 6); i++)
    signal(signals[i], on_signal);
  for (int i = 0; i < n_files; i++)
    take(&corpus[i]), run();
  if (n < 0)
    return 0;
  if (!n_files) {
    fprintf(stderr, "fuzz: %s has no files\n", argv[1]);
    return 2;
  }
  time_t end = time(NULL) + (argc > 2 ? atoi(argv[2]) : 10);
  uint64_t inputs = (uint64_t)n_files;
  state = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
  for (; time(NULL) < end; inputs++) {
    take(&corpus[draw((uint64_t)n_files)]);
    for (uint64_t i = 1 + draw(4); i; i--)
      mutate();
    run();
  }
  printf("ok %s: %llu inputs\n", strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0],
         (unsigned long long)inputs);
  for (int i = 0; i < n_files; i++)
    free(corpus[i].data);
  return 0;
}
