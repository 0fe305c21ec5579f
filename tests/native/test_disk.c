/* test_disk.c - a disk beside a host, on the CPU backend: bytes that go there come back, over one
 * drive and several, whatever is cut short; what is refused; faults. A folder under TMPDIR must be
 * on a file system with direct I/O: elsewhere the test says so and checks what is refused alone. */
#include "engine/engine.h"
#include "random_specs.h"
#include "step/moves.h"
#include <sys/stat.h>
#include <unistd.h>

enum { HOST, DISK, N_PLACES };
enum { READ, WRITE, N_STREAMS };
enum { MIB = 1 << 20, HALF = 24 * MIB };

static char dirs[3][200];

static ps_engine_config config(uint32_t n_drives) {
  ps_engine_config cfg = {
      .struct_bytes = sizeof cfg,
      .n_places = N_PLACES,
      .n_links = 2,
      .n_spaces = N_PLACES,
      .n_streams = N_STREAMS,
      .n_drives = n_drives,
      .link = {{DISK, HOST, READ, 0}, {HOST, DISK, WRITE, 0}},
      .place = {[DISK] = {.kind = PS_PLACE_DISK}},
      .space = {
          [HOST] = {.bytes = 2 * HALF, .place = HOST}, [DISK] = {.bytes = HALF, .place = DISK}}};
  for (uint32_t i = 0; i < n_drives; i++)
    cfg.drive[i] = dirs[i];
  for (uint32_t i = 0; i < N_STREAMS; i++)
    cfg.stream[i] = (ps_stream_config){.place = HOST, .n_threads = 3};
  return cfg;
}

/* Copies half of the host's space to the disk, and back to its other half, in two pieces of which
 * the first ends inside a stripe. @at: of the second piece. */
static ps_status round_trip(ps_engine *e, uint64_t at) {
  ps_program *p;
  ps_schedule *s;
  ps_run *r = NULL;
  CHECK(ps_program_create(&p, N_PLACES, N_STREAMS) == PS_OK);
  for (uint32_t piece = 0; piece < 2; piece++)
    for (uint32_t stream = WRITE + 1; stream-- > READ;) {
      const uint64_t first = piece ? at : 0, n = piece ? HALF - at : at;
      const ps_access host = {HOST, stream == READ ? PS_WRITE : PS_READ,
                              first + (stream == READ ? HALF : 0), n},
                      disk = {DISK, stream == READ ? PS_READ : PS_WRITE, first, n},
                      access[2] = {stream == READ ? disk : host, stream == READ ? host : disk};
      const ps_op op = {.stream = stream, .access = access, .n_access = 2};
      CHECK(ps_program_add(p, &op, NULL) == PS_OK);
    }
  CHECK(ps_schedule_compile(&s, p) == PS_OK);
  ps_status st = ps_run_create(&r, e, s, &(ps_run_config){.struct_bytes = sizeof(ps_run_config)});
  if (st == PS_OK)
    st = ps_run_submit(r, 1);
  if (st == PS_OK)
    st = ps_run_wait(r, 1);
  char why[512];
  snprintf(why, sizeof why, "%s", ps_last_error());
  CHECK(ps_run_destroy(r) == PS_OK);
  CHECK(ps_schedule_destroy(s) == PS_OK);
  ps_program_destroy(p);
  return st == PS_OK ? PS_OK : ps__fail(st, "%s", why);
}

static void fill(unsigned char *memory, uint64_t seed) {
  for (uint64_t i = 0; i < HALF; i += 8)
    memcpy(memory + i, &(uint64_t){rnd(&seed)}, 8);
}

static void test_round_trips(uint32_t n_drives) {
  const ps_engine_config cfg = config(n_drives);
  ps_engine *e;
  CHECK(ps_engine_create(&e, &cfg) == PS_OK);
  unsigned char *host = ps_engine_space(e, HOST), some[10000], zeros[64] = {0};
  CHECK(ps_engine_space(e, DISK) == NULL && ps_engine_space_bytes(e, DISK) == HALF);
  CHECK(ps__engine_read(e, DISK, HALF - 64, some, 64) == PS_OK && !memcmp(some, zeros, 64));
  fill(host, n_drives);
  CHECK(round_trip(e, 9 * MIB + 4096) == PS_OK);
  CHECK(memcmp(host, host + HALF, HALF) == 0);
  /* any bytes, also across stripes and more than a buffer's */
  CHECK(ps__engine_read(e, DISK, 4 * MIB - 77, some, 10000) == PS_OK &&
        !memcmp(some, host + 4 * MIB - 77, 10000));
  CHECK(ps__engine_write(e, DISK, 777, host + 5 * MIB + 1, 3 * MIB) == PS_OK);
  memmove(host + 777, host + 5 * MIB + 1, 3 * MIB);
  CHECK(ps__engine_read(e, DISK, 0, host + HALF, HALF) == PS_OK);
  CHECK(memcmp(host, host + HALF, HALF) == 0);
  CHECK_FAILS(round_trip(e, 9 * MIB + 512), PS_EINVAL, "whole sectors of 4096 bytes");
  /* one run at a time in a directory; its files have no names */
  ps_engine *other;
  CHECK_FAILS(ps_engine_create(&other, &cfg), PS_EBUSY, "another run uses it");
  CHECK(rmdir(dirs[0]) == 0 && mkdir(dirs[0], 0700) == 0); /* it is empty */
  CHECK(ps_engine_close(e) == PS_OK);
}

/* The Nth read, write or reservation fails, until none does: one sentence, and nothing is left. */
static void test_faults(int kind) {
  const ps_engine_config cfg = config(2);
  int n_failed = 0;
  for (int64_t nth = 1;; nth++) {
    const int64_t live = ps__live_allocations();
    ps_engine *e;
    ps__fault_arm(kind, nth);
    ps_status st = ps_engine_create(&e, &cfg);
    if (st == PS_OK) {
      char one;
      st = kind == PS_FAULT_ALLOC ? ps__engine_read(e, DISK, 1, &one, 1) : round_trip(e, 8 * MIB);
      CHECK(ps_engine_close(e) == PS_OK);
    }
    const bool hit = ps__fault_count(kind) >= nth;
    ps__fault_arm(kind, 0);
    CHECK(ps__live_allocations() == live);
    if (!hit) {
      CHECK(st == PS_OK);
      break;
    }
    CHECK(st == (kind == PS_FAULT_ALLOC ? PS_ENOMEM : PS_EIO));
    CHECK(kind == PS_FAULT_ALLOC || strstr(ps_last_error(), dirs[0]) ||
          strstr(ps_last_error(), dirs[1]));
    n_failed++;
  }
  CHECK(n_failed >= 4); /* of reads and writes each stripe, and more */
}

static void test_refused(void) {
  ps_engine_config cfg = config(1);
  ps_engine *e;
  cfg.n_drives = 0;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "a disk has 1 to 8 directories");
  cfg = config(1);
  cfg.place[HOST].kind = PS_PLACE_DISK;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "2 disks with 2 spaces");
  cfg = config(1);
  cfg.drive[0] = "/nowhere/at/all";
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "cannot be used: No such file");
  cfg.drive[0] = "/dev/null";
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "is no directory");
  if (access("/dev/shm", W_OK) == 0) {
    cfg.drive[0] = "/dev/shm";
    CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "is in memory (tmpfs)");
  }
  cfg = config(2);
  cfg.drive[1] = dirs[0];
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EINVAL, "is given twice");
  cfg = config(1);
  cfg.space[DISK].bytes = (uint64_t)1 << 47;
  CHECK_FAILS(ps_engine_create(&e, &cfg), PS_EBUDGET, "128.0 TiB are needed there");
  const char *dir[PS_MAX_DRIVES];
  char *own;
  uint32_t n;
  CHECK(ps__disk_dirs("a,b/c", &own, dir, &n) == PS_OK && n == 2 && !strcmp(dir[1], "b/c"));
  ps__free(own);
  CHECK_FAILS(ps__disk_dirs("a,,b", &own, dir, &n), PS_EINVAL, "separated by commas");
  CHECK_FAILS(ps__disk_dirs("1,2,3,4,5,6,7,8,9", &own, dir, &n), PS_EINVAL, "1 to 8");
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* The state of a unit on the disk is read once and written once, in whole sectors, around its
 * update; that of no other unit is. The memory map holds. */
static void check_step(const ps__step *s) {
  CHECK(ps__step_valid(s));
  for (uint32_t space = 0; space < s->at->n_places; space++)
    CHECK(ps__memmap_valid(s->vt, s->n_vt, space, s->space_bytes[space]));
  uint64_t expected = 0, read = 0, written = 0;
  for (uint32_t u = 0; u < s->spec->n_units; u++)
    for (int k = 0; k < PS_MAX_STATES && s->unit_host[u].state[k] != PS__NO_VT; k++) {
      const ps__vt *v = &s->vt[s->unit_host[u].state[k]];
      CHECK((v->space == s->at->disk) == s->spec->state_on_disk[u]);
      expected += v->space == s->at->disk ? v->bytes : 0;
    }
  for (size_t i = 0; i < s->n_op; i++) {
    const ps__vaccess *a = &s->access[s->op[i].access];
    const bool from = s->op[i].stream == s->at->disk_read,
               to = s->op[i].stream == s->at->disk_write;
    read += from ? a[0].bytes : 0;
    written += to ? a[0].bytes : 0;
    for (int k = 0; k < 2 && (from || to); k++)
      CHECK((s->vt[a[k].vt].offset + a[k].offset) % 4096 == 0 && a[k].bytes % 4096 == 0);
  }
  CHECK(read == expected && written == expected && s->copied_bytes[PS__TO_DISK] == expected);
}

/* Random decisions, of which the planner would make few. A move to a plan with the same state on
 * the disk leaves it where it is. */
static void test_steps(model *m, uint64_t *state) {
  ps_plan_config cfg = {PLAN_DEFAULTS, .chunk_tokens = 32, .head_slice_tokens = 16};
  ps__layout layout;
  ps__step before = {0};
  ps__spec spec, of_before = {0};
  cfg.clip_norm = rnd_below(state, 2);
  CHECK(ps__layout_init(&layout, 32, 6, 32, 2, 0, 0) == PS_OK);
  for (int i = 0; i < 2; i++) {
    ps__step s;
    ps__moves moves;
    resident_spec(&spec, m, &cfg, &layout);
    randomize(&spec, m, &layout, state);
    spec.n_devices = 1;
    spec.ring_blocks = 0;
    memset(spec.in_pieces, 0, spec.n_units);
    spec.disk = true;
    spec.disk_lead = rnd_below(state, 4);
    for (uint32_t u = 1; u < spec.n_units; u++) {
      spec.state_on_disk[u] = i ? of_before.state_on_disk[u] : rnd_below(state, 2) != 0;
      if (spec.state_on_disk[u])
        spec.update_resident[u] = spec.update_streamed[u] = spec.state_held[u] =
            spec.update_split[u] = 0;
    }
    CHECK(ps__step_build(&s, m->made, &layout, &spec, NULL) == PS_OK);
    check_step(&s);
    if (i) {
      CHECK(ps__step_moves(&before, &s, &moves) == PS_OK);
      for (size_t k = 0; k < moves.n; k++)
        if (moves.move[k].from == s.at->disk || moves.move[k].to == s.at->disk)
          CHECK(moves.move[k].from == moves.move[k].to && moves.move[k].src == moves.move[k].dst);
      ps__moves_free(&moves);
      ps__step_free(&before);
      ps__spec_free(&of_before);
    }
    of_before = spec;
    before = s;
    before.spec = &of_before;
  }
  ps__step_free(&before);
  ps__spec_free(&of_before);
  ps__layout_free(&layout);
}

static void test_random_steps(const char *root) {
  uint64_t state = 7;
  for (int i = 0; i < 2; i++) {
    model *m = &models[i];
    make_model(m, root);
    CHECK(ps__model_create(&m->made, &m->cfg, PS_F32, 0, 0, NULL, NULL, NULL) == PS_OK);
    for (int k = 0; k < 100; k++)
      test_steps(m, &state);
    ps_model_destroy(m->made);
    remove_folder(m->dir);
  }
}

int main(void) {
  const char *tmp = getenv("TMPDIR");
  for (int i = 0; i < 3; i++) {
    snprintf(dirs[i], sizeof dirs[i], "%s/penstock-test-disk-XXXXXX", tmp ? tmp : "/tmp");
    CHECK(mkdtemp(dirs[i]));
  }
  test_refused();
  test_random_steps(dirs[2]);
  if (has_direct_io(dirs[0])) {
    test_round_trips(1);
    test_round_trips(3);
    test_faults(PS_FAULT_READ);
    test_faults(PS_FAULT_WRITE);
    test_faults(PS_FAULT_ALLOC);
  } else
    printf("ok refusals; %s has no direct I/O, and copies were not tested\n", dirs[0]);
  for (int i = 0; i < 3; i++)
    CHECK(rmdir(dirs[i]) == 0);
  printf("ok a disk: copies, refusals and faults\n");
  return 0;
}
