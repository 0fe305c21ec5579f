/* memory.c - counted allocation, fault injection, page mappings. */
#include "core/core.h"
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static _Atomic int64_t live;
static _Atomic int64_t fault_calls[PS_FAULT_KINDS];
static _Atomic int64_t fault_nth[PS_FAULT_KINDS]; /* 0: disarmed */

void ps__fault_arm(int kind, int64_t nth) {
  if (kind < 0 || kind >= PS_FAULT_KINDS)
    return;
  atomic_store(&fault_nth[kind], 0);
  atomic_store(&fault_calls[kind], 0);
  atomic_store(&fault_nth[kind], nth);
}

int64_t ps__fault_count(int kind) {
  return kind >= 0 && kind < PS_FAULT_KINDS ? atomic_load(&fault_calls[kind]) : 0;
}

bool ps__fault_hit(ps__fault kind) {
  int64_t call = atomic_fetch_add_explicit(&fault_calls[kind], 1, memory_order_relaxed) + 1;
  return call == atomic_load_explicit(&fault_nth[kind], memory_order_relaxed);
}

int64_t ps__live_allocations(void) { return atomic_load(&live); }
void ps__live_add(int64_t n) { atomic_fetch_add_explicit(&live, n, memory_order_relaxed); }

void *ps__malloc(size_t bytes) {
  void *p = ps__fault_hit(PS_FAULT_ALLOC) ? NULL : malloc(bytes ? bytes : 1);
  if (p)
    ps__live_add(1);
  return p;
}

void *ps__calloc(size_t n, size_t bytes) {
  void *p = ps__fault_hit(PS_FAULT_ALLOC) ? NULL : calloc(n ? n : 1, bytes ? bytes : 1);
  if (p)
    ps__live_add(1);
  return p;
}

void *ps__realloc(void *p, size_t bytes) {
  void *q = ps__fault_hit(PS_FAULT_ALLOC) ? NULL : realloc(p, bytes ? bytes : 1);
  if (q && !p)
    ps__live_add(1);
  return q;
}

void ps__free(void *p) {
  if (!p)
    return;
  ps__live_add(-1);
  free(p);
}

char *ps__strdup(const char *s) {
  size_t bytes = strlen(s) + 1;
  char *copy = ps__malloc(bytes);
  return copy ? memcpy(copy, s, bytes) : NULL;
}

bool ps__grow(void **items, size_t n, size_t *cap, size_t item_bytes) {
  if (n < *cap)
    return true;
  size_t more = *cap < 8 ? 8 : *cap + *cap / 2;
  if (more > SIZE_MAX / item_bytes)
    return false;
  void *p = ps__realloc(*items, more * item_bytes);
  if (!p)
    return false;
  *items = p;
  *cap = more;
  return true;
}

static const size_t HUGE_BYTES = (size_t)2 << 20;

static size_t whole_pages(size_t bytes) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

/* A mapping that starts on a huge-page boundary: maps one huge page too much, and unmaps both
 * ends. */
static void *map_aligned(size_t bytes) {
  size_t slack = bytes >= HUGE_BYTES ? HUGE_BYTES : 0;
  if (bytes > SIZE_MAX - slack)
    return MAP_FAILED;
  char *p = mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED || !slack)
    return p;
  size_t head = (HUGE_BYTES - (uintptr_t)p % HUGE_BYTES) % HUGE_BYTES;
  if (head)
    munmap(p, head);
  if (slack > head)
    munmap(p + head + bytes, slack - head);
  return p + head;
}

ps_status ps__map(void **out, size_t bytes, const char *what) {
  if (bytes == 0) {
    *out = NULL;
    return PS_OK;
  }
  void *p = MAP_FAILED;
  errno = ENOMEM;
  if (!ps__fault_hit(PS_FAULT_ALLOC) && bytes <= SIZE_MAX / 2)
    p = map_aligned(whole_pages(bytes));
  if (p == MAP_FAILED) {
    char text[32];
    const char *why = strerror(errno);
    return ps__fail(PS_ENOMEM, "%s: %s of memory refused: %s", what, ps__format_bytes(text, bytes),
                    why);
  }
  madvise(p, whole_pages(bytes), MADV_HUGEPAGE); /* may fail: small pages serve too */
  ps__live_add(1);
  *out = p;
  return PS_OK;
}

void ps__unmap(void *p, size_t bytes) {
  if (!p)
    return;
  munmap(p, whole_pages(bytes));
  ps__live_add(-1);
}
