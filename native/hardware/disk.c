/* disk.c - the rates of drives: direct I/O of large pieces, as training has it. */
#include "engine/disk.h"
#include "hardware/hardware_impl.h"
#include <string.h>
#include <sys/statvfs.h>

enum { THREADS = 8 }; /* each way, as in a step (native/step/room.c) */
static const uint64_t PIECE = 64ull << 20, LEAST = 256ull << 20, QUICK = 8ull << 30,
                      MOST = 256ull << 30;

/* One direction: its threads and what they move. */
typedef struct way {
  ps__disk *disk;
  ps__cpu_exec exec;
  char *memory; /* PIECE */
  bool write;
  uint64_t bytes; /* of the space; it begins anew at its end */
  double seconds;
  double moved_s, late_s; /* SECONDS of all, of the second half of the time */
  double moved, late;     /* BYTES of them */
  ps_status st;
  char message[512];
} way;

/* Writes soon fill a drive's cache. What counts is the second half of the time. */
static void move(void *arg) {
  way *w = arg;
  const ps_launch threads = {.backend = PS_BACKEND_CPU, .exec = &w->exec};
  const double begin = (double)ps__now_ns() * 1e-9;
  double now = begin, half = begin;
  for (uint64_t at = 0; w->st == PS_OK && (now < begin + w->seconds || w->late <= 0);
       at = at + 2 * PIECE <= w->bytes ? at + PIECE : 0) {
    w->st = ps__disk_run(w->disk, w->write, at, w->memory, PIECE, &threads);
    now = (double)ps__now_ns() * 1e-9;
    w->moved += (double)PIECE;
    if (half > begin)
      w->late += (double)PIECE;
    else if (now >= begin + w->seconds / 2)
      half = now;
  }
  w->moved_s = now - begin;
  w->late_s = now - half;
  if (w->st != PS_OK)
    snprintf(w->message, sizeof w->message, "%s", ps_last_error());
}

static ps_status run(way *w, double seconds) {
  w->seconds = seconds;
  w->moved = w->late = 0;
  move(w);
  return w->st == PS_OK ? PS_OK : ps__fail(w->st, "%s", w->message);
}

static ps_status run_both(way w[2], double seconds, double *rate) {
  ps__thread *beside;
  for (int i = 0; i < 2; i++) {
    w[i].seconds = seconds;
    w[i].moved = w[i].late = 0;
  }
  PS_TRY(ps__thread_start(&beside, move, &w[1], "ps-disk"));
  move(&w[0]);
  ps__thread_join(beside);
  for (int i = 0; i < 2; i++)
    if (w[i].st != PS_OK)
      return ps__fail(w[i].st, "%s", w[i].message);
  *rate = w[0].late / w[0].late_s + w[1].late / w[1].late_s;
  return PS_OK;
}

/* Drives may compress what is all zeros. */
static void fill(char *memory) {
  uint64_t x = 0x9e3779b97f4a7c15u;
  for (uint64_t i = 0; i < PIECE; i += 8) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    memcpy(memory + i, &x, 8);
  }
}

/* Half of what is free on the fullest drive, for all of them. */
static uint64_t room_of(const char *const *dir, uint32_t n, uint64_t most) {
  for (uint32_t i = 0; i < n; i++) {
    struct statvfs fs;
    if (statvfs(dir[i], &fs) == 0 && (uint64_t)fs.f_bavail * fs.f_frsize / 2 * n < most)
      most = (uint64_t)fs.f_bavail * fs.f_frsize / 2 * n;
  }
  return most < LEAST ? LEAST : most / PIECE * PIECE;
}

static ps_status measure(ps_hardware *hw, way w[2], double seconds) {
  double both = 0;
  PS_TRY(run(&w[1], seconds / 2)); /* first the writes: what was never written reads as zeros */
  const double written = w[1].late / w[1].late_s;
  w[0].bytes = w[1].moved < (double)w[1].bytes ? (uint64_t)w[1].moved : w[1].bytes;
  PS_TRY(run(&w[0], seconds / 6));
  const double read = w[0].late / w[0].late_s;
  PS_TRY(run_both(w, seconds / 3, &both));
  hw->link[PS_LINK_DISK_READ].bytes_per_s = read;
  hw->link[PS_LINK_DISK_WRITE].bytes_per_s = written;
  hw->link[PS_LINK_DISK_READ].duplex_bytes_per_s = hw->link[PS_LINK_DISK_WRITE].duplex_bytes_per_s =
      both;
  return PS_OK;
}

static ps_status measure_on(ps_hardware *hw, ps__disk *disk, uint64_t bytes, double seconds) {
  way w[2] = {{.disk = disk, .bytes = bytes}, {.disk = disk, .bytes = bytes, .write = true}};
  ps_status st = PS_OK;
  for (int i = 0; st == PS_OK && i < 2; i++) {
    st = ps__map((void **)&w[i].memory, PIECE, "measuring the disk");
    if (st == PS_OK)
      fill(w[i].memory);
    if (st == PS_OK)
      st = ps__pool_create(&w[i].exec.pool, THREADS, "ps-disk");
  }
  if (st == PS_OK)
    st = measure(hw, w, seconds);
  for (int i = 0; i < 2; i++) {
    ps__pool_destroy(w[i].exec.pool);
    ps__unmap(w[i].memory, PIECE);
  }
  return st;
}

ps_status ps__hardware_disk(ps_hardware *hw, const ps_hardware_ask *ask) {
  const bool full = ask->how == PS_HARDWARE_IN_FULL;
  const char *dir[PS_MAX_DRIVES];
  ps__disk *disk = NULL;
  char *own;
  uint32_t n;
  if (hw->link[PS_LINK_DISK_READ].bytes_per_s > 0 && ask->how == PS_HARDWARE_ONCE)
    return PS_OK;
  PS_TRY(ps__disk_dirs(ask->disk, &own, dir, &n));
  const uint64_t bytes = room_of(dir, n, full ? MOST : QUICK);
  ps_status st = ps__disk_open(&disk, dir, n, bytes);
  if (st == PS_OK) {
    ps__hardware_note(ask, PS_HARDWARE_MEASURES, "measuring the disk at %s, which takes %d s",
                      ask->disk, full ? 20 : 3);
    st = measure_on(hw, disk, bytes, full ? 20 : 3);
  }
  ps__disk_close(disk);
  ps__free(own);
  return st;
}
