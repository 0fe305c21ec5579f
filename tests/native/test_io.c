/* test_io.c - files under failure: the Nth allocation, read or write of every path fails, for
 * every N until the whole call succeeds. Each time: an error with a message, nothing leaked, no
 * file left under a final or a temporary name. */
#include "folder.h"
#include <fcntl.h>
#include <penstock/tensors.h>
#include <penstock/data.h>
#include <sys/stat.h>
#include <unistd.h>

enum { N_ROWS = 300, N_COLS = 7 };
static char root[256];

static const char *at(const char *name) {
  static char path[4][512];
  static int turn;
  char *p = path[turn++ % 4];
  snprintf(p, sizeof path[0], "%s/%s", root, name);
  return p;
}

/* Entries of a folder, or (hidden) those whose name starts with a dot: temporary files do. */
static int count_files(const char *folder, bool hidden) {
  DIR *d = opendir(folder);
  int n = 0;
  if (!d)
    return 0;
  for (struct dirent *e; (e = readdir(d));)
    n += strcmp(e->d_name, ".") && strcmp(e->d_name, "..") && (!hidden || e->d_name[0] == '.');
  closedir(d);
  return n;
}

static int n_files(const char *folder) { return count_files(folder, false); }

static void put_file(const char *path, const void *data, size_t bytes) {
  FILE *f = fopen(path, "wb");
  CHECK(f && fwrite(data, 1, bytes, f) == bytes && fclose(f) == 0);
}

/* ---- what is tried --------------------------------------------------------------------------- */

static ps_status save(const char *folder) {
  static const ps_tensor_spec specs[3] = {
      {.name = "a", .dtype = PS_F32, .n_dims = 2, .shape = {N_ROWS, N_COLS}},
      {.name = "b", .dtype = PS_BF16, .n_dims = 1, .shape = {N_ROWS}},
      {.name = "c", .dtype = PS_F32, .n_dims = 0, .shape = {0}}};
  static const char *const meta[] = {"step", "7"};
  static float data[N_ROWS * N_COLS];
  ps_tensor_writer *w = NULL;
  for (int i = 0; i < N_ROWS * N_COLS; i++)
    data[i] = (float)i;
  PS_TRY(ps_tensors_create(&w, folder, "model", specs, 3, N_ROWS * N_COLS * 4, meta, 1));
  ps_status st = ps_tensors_append(w, data, sizeof data / 2);
  if (st == PS_OK)
    st = ps_tensors_append(w, (char *)data + sizeof data / 2, sizeof data / 2);
  if (st == PS_OK)
    st = ps_tensors_append(w, data, N_ROWS * 2 + 4);
  if (st == PS_OK)
    return ps_tensors_finish(w);
  ps_tensors_abort(w);
  return st;
}

static ps_status try_save_new(void) { return save(at("new")); }
static ps_status try_save_again(void) { return save(at("again")); }

static ps_status try_load(void) {
  ps_tensor_file *f = NULL;
  static float a[N_ROWS * N_COLS];
  static uint16_t b[N_ROWS * N_COLS];
  PS_TRY(ps_tensors_open(&f, at("saved")));
  uint64_t idx = ps_tensors_find(f, "a");
  ps_status st = ps_tensors_read(f, idx, 0, N_ROWS * N_COLS, PS_F32, a);
  if (st == PS_OK)
    st = ps_tensors_read(f, idx, 0, N_ROWS * N_COLS, PS_BF16, b);
  if (st == PS_OK)
    CHECK(a[100] == 100.0f && b[1] == 0x3F80);
  ps_tensors_close(f);
  return st;
}

static ps_status try_config(void) {
  ps_model_config c;
  PS_TRY(ps_model_config_read(&c, root));
  CHECK(c.dim == 128);
  return PS_OK;
}

static ps_status try_shards(void) {
  ps_dataset *ds = NULL;
  int32_t tokens[16], targets[16];
  uint8_t begins[16];
  const char *paths[] = {at("shards"), at("shards/b.bin")};
  PS_TRY(ps_dataset_open(&ds, paths, 2, 512));
  CHECK(ps_dataset_n_shards(ds) == 3 && ps_dataset_n_tokens(ds) == 300);
  ps_status st = ps_dataset_read(ds, 16, 3, tokens, targets, NULL);
  if (st == PS_OK)
    CHECK(tokens[0] == 48 && targets[15] == 64);
  if (st == PS_OK) /* 6 sequences of a.bin come before */
    st = ps_dataset_read(ds, 16, 7, tokens, targets, begins);
  if (st == PS_OK)
    CHECK(tokens[0] == 16 && targets[3] == 20 && targets[4] == -1 && begins[4] && !begins[3]);
  ps_dataset_close(ds);
  return st;
}

static ps_status try_json(void) {
  char text[2048] = "{", *p = text + 1;
  ps__json *j = NULL;
  ps__jsonw *w = NULL;
  for (int i = 0; i < 40; i++)
    p += sprintf(p, "%s\"k%d\": [%d, {\"x\": \"\\u20ac\"}]", i ? ", " : "", i, i);
  sprintf(p, "}");
  PS_TRY(ps__json_parse(&j, text, strlen(text), "text"));
  uint64_t v = 0;
  CHECK(ps__json_uint64(ps__json_at(ps__json_get(j, "k39"), 0), &v) && v == 39);
  ps__json_free(j);
  PS_TRY(ps__jsonw_create(&w));
  ps__jsonw_array(w, NULL);
  for (int i = 0; i < 100; i++)
    ps__jsonw_number(w, NULL, i / 3.0);
  ps__jsonw_end(w);
  ps_status st =
      ps__jsonw_text(w, NULL) ? PS_OK : ps__fail(PS_ENOMEM, "the writer ran out of memory");
  ps__jsonw_free(w);
  return st;
}

/* ---- the loop -------------------------------------------------------------------------------- */

static int open_files(void) { return n_files("/proc/self/fd"); }

static int fail_each(const char *name, int kind, ps_status (*run)(void), void (*after)(ps_status)) {
  int64_t live = ps__live_allocations();
  int fds = open_files();
  for (int n = 1;; n++) {
    CHECK(n < 100000);
    ps__fault_arm(kind, n);
    ps_status st = run();
    bool hit = ps__fault_count(kind) >= n;
    ps__fault_arm(kind, 0);
    if (hit != (st != PS_OK))
      printf("%s: call %d of kind %d: status %d\n", name, n, kind, (int)st);
    CHECK(hit == (st != PS_OK));
    CHECK(!hit || (st == PS_ENOMEM || st == PS_EIO));
    CHECK(!hit || *ps_last_error());
    CHECK(ps__live_allocations() == live);
    CHECK(open_files() == fds);
    if (after)
      after(st);
    if (!hit)
      return n - 1;
  }
}

static void after_new(ps_status st) {
  const bool there = access(at("new"), F_OK) == 0,
             last_call = strstr(ps_last_error(), "bringing it to the disk") != NULL;
  CHECK(n_files(at("new")) == (there ? 3 : 0) && count_files(at("new"), true) == 0);
  CHECK(st == PS_OK ? there : !there || last_call);
  remove_folder(at("new"));
}

/* A save over an earlier one that fails: a reader finds a whole model. */
static void after_again(ps_status st) {
  ps_tensor_file *f = NULL;
  CHECK(ps_tensors_open(&f, at("again")) == PS_OK && ps_tensors_count(f) == 3 &&
        n_files(at("again")) == 3);
  CHECK(count_files(at("again"), true) == 0);
  ps_tensors_close(f);
}

static void prepare(void) {
  static const char config[] = "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 128, "
                               "\"intermediate_size\": 352, \"num_hidden_layers\": 2,"
                               " \"num_attention_heads\": 8, \"vocab_size\": 512, "
                               "\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}}";
  struct {
    uint32_t h[256];
    uint16_t tokens[100];
  } shard = {{20240520, 1, 100}, {0}};
  struct {
    uint32_t h[256];
    uint8_t flags[100];
  } mask = {{20261122, 1, 0, 0, 100, 0, 0x8D4455D4}, {0}}; /* the CRC-32 of b.bin */
  const char *tmp = getenv("TMPDIR");
  snprintf(root, sizeof root, "%s/penstock-test-io-XXXXXX", tmp && *tmp ? tmp : "/tmp");
  CHECK(mkdtemp(root));
  for (int i = 0; i < 100; i++)
    shard.tokens[i] = (uint16_t)i;
  CHECK(mkdir(at("shards"), 0777) == 0);
  put_file(at("shards/a.bin"), &shard, 1024 + 200);
  put_file(at("shards/b.bin"), &shard, 1024 + 200);
  mask.flags[20] = 3;
  put_file(at("shards/b.mask"), &mask, sizeof mask);
  put_file(at("config.json"), config, strlen(config));
  CHECK(save(at("saved")) == PS_OK && save(at("again")) == PS_OK);
}

int main(void) {
  static const struct {
    const char *name;
    ps_status (*run)(void);
    void (*after)(ps_status);
  } cases[] = {{"json", try_json, NULL},
               {"config", try_config, NULL},
               {"load", try_load, NULL},
               {"shards", try_shards, NULL},
               {"save_new", try_save_new, after_new},
               {"save_again", try_save_again, after_again}};
  static const int kinds[] = {PS_FAULT_ALLOC, PS_FAULT_READ, PS_FAULT_WRITE};
  prepare();
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    int n[3];
    for (int k = 0; k < 3; k++)
      n[k] = fail_each(cases[i].name, kinds[k], cases[i].run, cases[i].after);
    printf("ok %s: failed %d allocations, %d reads, %d writes\n", cases[i].name, n[0], n[1], n[2]);
  }
  remove_folder(at("saved"));
  remove_folder(at("again"));
  remove_folder(at("shards"));
  CHECK(unlink(at("config.json")) == 0 && rmdir(root) == 0);
  CHECK(ps__live_allocations() == 0);
  printf("ok nothing_left\n");
  return 0;
}
