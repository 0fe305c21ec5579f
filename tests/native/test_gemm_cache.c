/* test_gemm_cache.c - chosen algorithms on disk: what was saved comes back, and no file,
 * whatever is in it, does harm. */
#include "check.h"
#include "kernels/cuda/gemm_cache.h"
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { N = 40 };
static char root[256], folder[300], file[400];
static int n_logged;
static char logged[512];

static void on_log(void *user, ps_log_level level, const char *message) {
  if (level < PS_LOG_WARN)
    return; /* what failed, where it did: in ps_last_error() too */
  n_logged++;
  snprintf(logged, sizeof logged, "%s", message);
}

static ps__gemm_choice choice_of(uint64_t i) {
  uint64_t state = i * 1000 + 1;
  ps__gemm_choice c;
  memset(&c, 0, sizeof c);
  c.key.args = (ps__args_gemm){.m = (uint32_t)rnd(&state),
                               .n = (uint32_t)i,
                               .k = UINT32_MAX,
                               .lda = 1,
                               .ldb = 2,
                               .ldc = 3,
                               .trans_a = i & 1,
                               .accumulate = i >> 1 & 1,
                               .dt_a = 1,
                               .dt_b = 1,
                               .dt_c = i >> 2 & 1};
  c.key.fast_accumulation = i >> 3 & 1;
  for (int k = 0; k < 5; k++)
    c.key.align[k] = 1u << rnd_below(&state, 9);
  c.key.workspace_bytes = i % 3 ? 32u << 20 : 1ull << 40;
  for (int k = 0; k < PS_GEMM_ALGO_WORDS; k++)
    c.algo[k] = k % 3 ? rnd(&state) : 0;
  return c;
}

static ps__gemm_cache *open_cache(const char *in, const char *gpu, uint64_t version) {
  ps__gemm_cache *c;
  CHECK(ps__gemm_cache_open(&c, in, gpu, version) == PS_OK);
  return c;
}
static bool has(const ps__gemm_cache *c, uint64_t i) {
  const ps__gemm_choice want = choice_of(i), *got = ps__gemm_cache_find(c, &want.key);
  return got && memcmp(got, &want, sizeof want) == 0;
}
static void save_all(const char *in) {
  ps__gemm_cache *c = open_cache(in, "NVIDIA H200", 130100);
  /* replaced below */
  for (uint64_t i = 0; i < N; i++)
    CHECK(ps__gemm_cache_add(c, &(ps__gemm_choice){choice_of(i).key, {0}}) == PS_OK);
  for (uint64_t i = 0; i < N; i++) {
    const ps__gemm_choice x = choice_of(i);
    CHECK(ps__gemm_cache_add(c, &x) == PS_OK);
  }
  ps__gemm_cache_save(c);
  ps__gemm_cache_close(c);
}
static bool all_there(const char *in) {
  ps__gemm_cache *c = open_cache(in, "NVIDIA H200", 130100);
  bool all = true;
  for (uint64_t i = 0; i < N; i++)
    all = all && has(c, i);
  CHECK(!has(c, N));
  ps__gemm_cache_close(c);
  return all;
}

static void write_bytes(const char *path, const char *bytes, size_t n) {
  FILE *f = fopen(path, "wb");
  CHECK(f && fwrite(bytes, 1, n, f) == n && fclose(f) == 0);
}

static void test_round_trip(void) {
  n_logged = 0;
  save_all(folder);
  CHECK(access(file, R_OK) == 0 && all_there(folder) && n_logged == 0);
  /* another version has a file of its own */
  ps__gemm_cache *c = open_cache(folder, "NVIDIA H200", 130101);
  CHECK(!has(c, 0) && n_logged == 0);
  ps__gemm_cache_close(c);
  c = open_cache(folder, "NVIDIA H100 80GB HBM3", 130100);
  CHECK(!has(c, 0) && n_logged == 0);
  ps__gemm_cache_save(c); /* nothing new: nothing written */
  ps__gemm_cache_close(c);
  printf("ok what was saved comes back, by GPU and version\n");
}

static void test_damage(void) {
  static char text[1 << 20], other[1 << 20];
  FILE *f = fopen(file, "rb");
  const size_t n = f ? fread(text, 1, sizeof text, f) : 0;
  CHECK(n > 1000 && fclose(f) == 0);
  n_logged = 0;
  for (size_t cut = 0; cut + 2 < n; cut += 1 + n / 50) { /* all but the last line's end */
    write_bytes(file, text, cut);
    CHECK(!all_there(folder) && n_logged == 1 && strstr(logged, file));
    n_logged = 0;
  }
  save_all(folder); /* replaces it, with a last line in the log */
  CHECK(n_logged == 1 && all_there(folder) && n_logged == 1);
  uint64_t state = 7;
  /* any bytes changed: read as something or left out, never a crash */
  for (int i = 0; i < 2000; i++) {
    memcpy(other, text, n);
    for (int k = 0; k < 1 + i % 3; k++)
      other[rnd_below(&state, (uint32_t)n)] = (char)rnd(&state);
    write_bytes(file, other, n);
    ps__gemm_cache_close(open_cache(folder, "NVIDIA H200", 130100));
  }
  static const char foreign[] =
      "{\"format\":3,\"gpu\":\"NVIDIA H200\",\"cublaslt\":130099,\"algorithms\":[]}";
  write_bytes(file, foreign, sizeof foreign - 1);
  n_logged = 0;
  CHECK(!all_there(folder) && n_logged == 1 &&
        strstr(logged, "was not written for NVIDIA H200 with cuBLASLt 130100"));
  save_all(folder);
  n_logged = 0;
  CHECK(all_there(folder) && n_logged == 0);
  printf("ok a damaged or foreign file is left out with a line in the log, and replaced\n");
}

static void test_write_fails(void) {
  ps__gemm_cache *c = open_cache(folder, "NVIDIA H200", 130100);
  const ps__gemm_choice more = choice_of(N);
  CHECK(ps__gemm_cache_add(c, &more) == PS_OK);
  n_logged = 0;
  ps__fault_arm(PS_FAULT_WRITE, 1);
  ps__gemm_cache_save(c);
  ps__fault_arm(PS_FAULT_WRITE, 0);
  CHECK(n_logged == 1 && all_there(folder)); /* the old file is whole */
  ps__gemm_cache_save(c);                    /* and it can be tried again */
  ps__gemm_cache_close(c);
  c = open_cache(folder, "NVIDIA H200", 130100);
  CHECK(n_logged == 1 && has(c, N) && has(c, 0));
  ps__gemm_cache_close(c);
  char blocked[420];
  snprintf(blocked, sizeof blocked, "%s/below", file); /* a folder below a file */
  n_logged = 0;
  save_all(blocked);
  CHECK(n_logged == 1 && !all_there(blocked));
  printf("ok where writing fails the old file stands and the log says so\n");
}

static void test_where(void) {
  char path[400], want[500];
  const char *const name[3] = {"PENSTOCK_CACHE", "XDG_CACHE_HOME", "HOME"}, *const below[3] = {
                                                                                "", "/penstock",
                                                                                "/.cache/penstock"};
  for (int i = 0; i < 3; i++)
    CHECK(unsetenv(name[i]) == 0);
  n_logged = 0;
  save_all(NULL); /* nowhere */
  CHECK(!all_there(NULL) && n_logged == 0);
  for (int i = 2; i >= 0; i--) { /* the earlier goes before the later */
    snprintf(path, sizeof path, "%s/where%d/deep", root, i);
    snprintf(want, sizeof want, "%s%s/gemm-NVIDIA-H200-130100.json", path, below[i]);
    CHECK(setenv(name[i], path, 1) == 0 && !all_there(NULL));
    save_all(NULL);
    CHECK(access(want, R_OK) == 0 && all_there(NULL) && n_logged == 0);
  }
  printf("ok the file is in PENSTOCK_CACHE, XDG_CACHE_HOME/penstock or ~/.cache/penstock\n");
}

int main(void) {
  const char *tmp = getenv("TMPDIR");
  char command[400];
  snprintf(root, sizeof root, "%s/penstock-test-gemm-XXXXXX", tmp && *tmp ? tmp : "/tmp");
  CHECK(mkdtemp(root));
  snprintf(folder, sizeof folder, "%s/a/b", root);
  snprintf(file, sizeof file, "%s/gemm-NVIDIA-H200-130100.json", folder);
  ps_log_set(on_log, NULL);
  const int64_t live = ps__live_allocations();
  test_round_trip();
  test_damage();
  test_write_fails();
  test_where();
  CHECK(ps__live_allocations() == live);
  snprintf(command, sizeof command, "rm -r '%s'", root);
  CHECK(system(command) == 0);
  return 0;
}
