/* core.h - the services that every layer of the library uses: errors, log, memory with fault
 * injection, files, threads, pools, the machine's limits, JSON. Internal. native/core includes no
 * CUDA header. */
#ifndef PS_CORE_H
#define PS_CORE_H
#include <penstock/status.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>

/* ---- errors and log: log once where it happened, return the code upward ---------------------- */
/* Set the thread's last error, and return @code. */
ps_status ps__fail(ps_status code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void ps__clear_error(void); /* ps_last_error() of this thread becomes "" */
void ps__log(ps_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
#define PS_TRY(expr)                                                                               \
  do {                                                                                             \
    ps_status st_ = (expr);                                                                        \
    if (st_ != PS_OK)                                                                              \
      return st_;                                                                                  \
  } while (0)

/* ps__fail_to_open() - PS_EIO for @path, which could not be opened; @failed: the errno. Of a
 * relative path that is not there, the message has the whole path. */
ps_status ps__fail_to_open(const char *path, int failed);

/* ps__field() - the name that a message shows of field @field of a public struct: what the shell
 * has given to ps_field_names_set(), else @field. "lora.rank": of a struct in a struct. */
const char *ps__field(const char *field);

/* "27.4 GiB", "512.0 MiB", "3 B": for messages. Writes into buf and returns it. */
const char *ps__format_bytes(char buf[32], uint64_t bytes);
/* Format two sizes for a comparison, with as many digits as tell them apart. */
void ps__format_bytes_apart(char a[32], uint64_t x, char b[32], uint64_t y);

/* ---- memory ---------------------------------------------------------------------------------- */
/* The library allocates by these alone, so that tests can count and fail them. */
/* NULL on failure, also an injected one; free with ps__free() */
void *ps__malloc(size_t bytes);
void *ps__calloc(size_t n, size_t bytes);
void *ps__realloc(void *p, size_t bytes);
void ps__free(void *p);
char *ps__strdup(const char *s);
/* Map zero pages, with huge pages where the system has some. Pages take no memory until they are
 * written. PS_ENOMEM names @what and the bytes. */
ps_status ps__map(void **out, size_t bytes, const char *what);
void ps__unmap(void *p, size_t bytes);
/* Make room for one more element in an array of @n elements and capacity *cap. False: no memory is
 * left. PS_GROW() - of an array of any type. */
bool ps__grow(void **items, size_t n, size_t *cap, size_t item_bytes);
#define PS_GROW(items, n, cap)                                                                     \
  ({                                                                                               \
    void *items_ = (items);                                                                        \
    const bool grown_ = ps__grow(&items_, n, &(cap), sizeof *(items));                             \
    (items) = items_;                                                                              \
    grown_;                                                                                        \
  })

/* ---- fault injection, exported for tests ----------------------------------------------------- */
/* Let the @nth call of a kind from now on fail; 0: none. */
typedef enum ps__fault {
  PS_FAULT_ALLOC = 0,
  PS_FAULT_READ = 1,
  PS_FAULT_WRITE = 2,
  PS_FAULT_THREAD = 3,
  PS_FAULT_KINDS = 4
} ps__fault;
PS_API void ps__fault_arm(int kind, int64_t nth);
PS_API int64_t ps__fault_count(int kind);  /* calls of the kind since ps__fault_arm() */
PS_API int64_t ps__live_allocations(void); /* allocations, maps and threads alive */
/* counts what is allocated outside memory.c */
void ps__live_add(int64_t n);
/* true: the call must fail. Code outside core asks this before it reads or writes. */
bool ps__fault_hit(ps__fault kind);

/* ---- files: whole reads and writes at an offset, errno in words, the file named -------------- */
struct stat;
/* Open an input file without waiting. All input files are opened by this function. A file that is
 * not regular, such as a pipe or a device, is PS_EIO, and the message says what it is. @sb: its
 * fstat(). The caller closes *fd. python/penstock/files.py does the same in Python, and so does
 * models/init_model.py, which stands alone. */
ps_status ps__open_input(int *fd, struct stat *sb, const char *path);
ps_status ps__pread_all(int fd, const char *path, void *dst, size_t bytes, uint64_t offset);
ps_status ps__write_all(int fd, const char *path, const void *src, size_t bytes);
/* Whether @path exists. PS_EIO: the disk failed; such a file is not taken for missing. */
ps_status ps__path_exists(const char *path, bool *exists);
/* The path of file @name of model directory @dir: in .penstock-new, where a save that was cut off
 * left the file (io/stage.c), else in @dir. The caller frees @out. PS_EIO, PS_ENOMEM. */
#define PS__MODEL_PENDING ".penstock-new"
ps_status ps__model_path(char **out, const char *dir, const char *name);
/* Write a file that replaces @path as a whole. ps__replace_begin() makes it beside @path under a
 * random name, so that no link is followed. ps__replace_end() closes it and renames it to @path, or
 * removes it where @st is an error. It returns @st, or its own error. @path need not exist; it must
 * not be anything but a regular file.
 * ps__replace_text() - both, with @bytes of @text. @text NULL, as ps__jsonw_text() may give:
 * PS_ENOMEM. */
ps_status ps__replace_begin(int *fd, char **temporary, const char *path);
ps_status ps__replace_end(int fd, char *temporary, const char *path, ps_status st);
ps_status ps__replace_text(const char *path, const char *text, size_t bytes);
/* ps__cache_write() - ps__replace_text() of a file of the cache (ps_cache_path()). Folders that are
 * missing are made. */
enum { PS__CACHE_PATH = 4096 };
ps_status ps__cache_write(const char *path, const char *text, size_t bytes);

/* ---- time ------------------------------------------------------------------------------------ */
uint64_t ps__now_ns(void); /* CLOCK_MONOTONIC */

/* ---- threads --------------------------------------------------------------------------------- */
typedef struct ps__thread ps__thread;
/* Returns when the thread has mapped the memory that its start takes, so that none is missing from
 * what is tried for OpenBLAS afterwards. PS_EDEVICE when refused. */
ps_status ps__thread_start(ps__thread **out, void (*fn)(void *), void *arg, const char *name);
void ps__thread_join(ps__thread *t); /* NULL is a no-op; frees t */
/* From now on the calling thread, and those that it starts, run where others leave time. */
void ps__thread_background(void);
/* True: no more threads are awake than there are CPUs, and spinning briefly takes no one's time. */
bool ps__cores_idle(void);

/* A counter that only grows, with waits for its values. A wait spins briefly where cores are idle,
 * then sleeps on a futex. A signal makes a system call only if a thread sleeps for that value. One
 * thread at a time signals; any number of threads wait. */
typedef struct ps__counter {
  _Alignas(64) _Atomic uint64_t value;
  /* the lowest value that a sleeping thread waits for; UINT64_MAX: none sleeps */
  _Atomic uint64_t next_wake;
  _Atomic uint32_t wake_word; /* the futex */
} ps__counter;
void ps__counter_init(ps__counter *t);
void ps__counter_signal(ps__counter *t, uint64_t value);
/* Wait until t->value >= value; false: *abort_flag became nonzero first. ps__counter_wake() wakes
 * all sleeping threads, which then check both again. */
bool ps__counter_wait(ps__counter *t, uint64_t value, const _Atomic uint32_t *abort_flag);
void ps__counter_wake(ps__counter *t);

/* A pool of threads for data-parallel loops. The caller of ps__pool_run() is worker 0. Nothing is
 * allocated between create and destroy. Workers take tasks 0 to n-1 as they become free; a task's
 * result must not depend on the worker. */
typedef struct ps__pool ps__pool;
ps_status ps__pool_create(ps__pool **out, uint32_t n_threads, const char *name);
void ps__pool_destroy(ps__pool *p);
uint32_t ps__pool_size(const ps__pool *p);
typedef void (*ps__task_fn)(void *arg, int64_t task, uint32_t worker);
void ps__pool_run(ps__pool *p, int64_t n_tasks, ps__task_fn fn, void *arg);
/* Run on @n_threads of the pool's threads, at least 1; 1 is the caller's. A thread that is late
 * from the run before may help. */
void ps__pool_run_some(ps__pool *p, uint32_t n_threads, int64_t n_tasks, ps__task_fn fn, void *arg);
/* A pool's threads may take tasks of another pool that are more urgent than their own.
 * ps__pool_share() - threads of others may help @p from now on: its tasks must ignore their
 * worker's number, and so have no scratch of their own. Called while @p runs nothing.
 * ps__pool_help() - run tasks of the job that @p runs, and of newer ones, until none is left to
 * take. Tasks that others took may still run. @p is shared; any thread but its own may call, at any
 * time.
 * ps__pool_help_first() - from now on @p's threads and its caller help @first before each task that
 * they take; NULL: they help none. So a job of @p may end later by a task of @first. Called while
 * @p runs nothing. @first must not help @p. It must outlive @p: a late thread may still look at
 * it. */
void ps__pool_share(ps__pool *p);
void ps__pool_help(ps__pool *p);
void ps__pool_help_first(ps__pool *p, ps__pool *first);
/* Threads of the io stream. It gathers the embedding's rows beside host ops on @n_threads, for some
 * milliseconds a round; a step's first forward pass waits for them. */
static inline uint32_t ps__io_threads(uint32_t n_threads) {
  return n_threads < 8 ? 1 : n_threads / 2;
}

/* The pool and the scratch that a CPU kernel runs with. Scratch is 64-byte aligned and reserved
 * before the first step; worker w's begins at scratch + w * scratch_bytes. */
typedef struct ps__cpu_exec {
  ps__pool *pool;
  char *scratch;
  size_t scratch_bytes; /* for each worker */
  uint32_t n_threads;   /* at most so many of the pool's; 0: all */
} ps__cpu_exec;

/* ---- what this process may use (machine.c) --------------------------------------------------- */
/* CPUs this process may use: affinity mask and cgroup quota */
uint32_t ps__n_cpus(void);
/* BYTES: the least of physical memory, the cgroup's limit (v1, v2) and SLURM_MEM_PER_NODE */
uint64_t ps__host_memory_limit(void);
/* BYTES that can be taken without swapping, as the system estimates them; at most the limit above
 * less what this process holds */
uint64_t ps__host_memory_free(void);
uint64_t ps__resident_bytes(void);      /* VmRSS of this process now */
uint64_t ps__process_bytes(void);       /* the same when this was first called; any thread */
uint64_t ps__resident_peak_bytes(void); /* VmHWM */
/* Count the peak of the whole process from now on, ru_maxrss too. The allocator's free memory is
 * returned to the system first. */
void ps__resident_peak_reset(void);

/* ---- JSON: a strict reader (RFC 8259, depth <= 64) with events or a tree; a writer ----------- */
typedef enum ps__json_kind {
  PS_JSON_NULL,
  PS_JSON_BOOL,
  PS_JSON_NUMBER,
  PS_JSON_STRING,
  PS_JSON_ARRAY,
  PS_JSON_OBJECT
} ps__json_kind;

/* A document as a sequence of events, one a value. The scan takes the memory of the longest key and
 * value, and does not find duplicate keys. */
typedef struct ps__json_scan ps__json_scan;
typedef struct ps__json_event {
  ps__json_kind kind; /* of a value; an array or object begins here */
  /* No value: the innermost array or object ends here. Outside of all, the document ends. */
  bool end;
  bool boolean; /* a bool's value */
  /* the key of an object's member, NUL-terminated; valid until the next call, as is text */
  const char *key;
  size_t key_bytes;
  const char *text; /* a string, or a number as it is written; NUL-terminated */
  size_t bytes;
} ps__json_event;
/* @bytes of a file from @offset on, read in pieces of 64 KiB; a key and its value have at most
 * @max_text bytes. @fd and @name are borrowed until the scan is closed. */
ps_status ps__json_scan_file(ps__json_scan **out, int fd, uint64_t offset, uint64_t bytes,
                             size_t max_text, const char *name);
/* both borrowed */
ps_status ps__json_scan_text(ps__json_scan **out, const char *text, size_t bytes, const char *name);
ps_status ps__json_scan_next(ps__json_scan *s, ps__json_event *e);
/* Skip the rest of the array or object that began with @begin, the last event. */
ps_status ps__json_scan_skip(ps__json_scan *s, const ps__json_event *begin);
/* PS_EFORMAT with the name and the line */
ps_status ps__json_scan_fail(const ps__json_scan *s, const char *what);
void ps__json_scan_close(ps__json_scan *s);
/* as ps__json_uint64() */
bool ps__json_text_uint64(const char *text, size_t bytes, uint64_t *out);

/* A tree. Duplicate keys are refused. */
enum { PS__MAX_CONFIG_BYTES = 1 << 20 }; /* of a config.json */
typedef struct ps__json ps__json;        /* a node; the tree is freed as a whole through its root */
/* Parse @bytes of UTF-8. @name is used in messages ("config.json: line 3: ..."). PS_EFORMAT,
 * PS_ENOMEM. */
ps_status ps__json_parse(ps__json **out, const char *text, size_t bytes, const char *name);
ps_status ps__json_read_file(ps__json **out, const char *path, size_t max_bytes);
void ps__json_free(ps__json *root);
ps__json_kind ps__json_type(const ps__json *j);
size_t ps__json_length(const ps__json *j);                /* array or object */
const ps__json *ps__json_at(const ps__json *j, size_t i); /* i-th element or value */
const char *ps__json_key(const ps__json *j, size_t i);    /* i-th key of an object */
/* NULL when absent or not an object */
const ps__json *ps__json_get(const ps__json *j, const char *key);
/* NULL unless a string; NUL-terminated too */
const char *ps__json_string(const ps__json *j, size_t *bytes);
double ps__json_number(const ps__json *j, double fallback);
/* as it is written; NULL unless a number */
const char *ps__json_number_text(const ps__json *j);
/* true when an exact non-negative integer */
bool ps__json_uint64(const ps__json *j, uint64_t *out);
bool ps__json_bool(const ps__json *j, bool fallback);

/* writer onto a FILE* or memory */
/* ps__utf8_length() - BYTES of the well-formed UTF-8 sequence at the NUL-terminated @s; 0: there is
 * none. A NUL never continues one. */
size_t ps__utf8_length(const unsigned char *s);

typedef struct ps__jsonw ps__jsonw;
ps_status ps__jsonw_create(ps__jsonw **out); /* into memory */
void ps__jsonw_free(ps__jsonw *w);
/* key NULL inside arrays and at the root */
void ps__jsonw_object(ps__jsonw *w, const char *key);
void ps__jsonw_array(ps__jsonw *w, const char *key);
void ps__jsonw_end(ps__jsonw *w);
void ps__jsonw_string(ps__jsonw *w, const char *key, const char *value);
void ps__jsonw_uint(ps__jsonw *w, const char *key, uint64_t value);
/* NaN and infinities become null */
void ps__jsonw_number(ps__jsonw *w, const char *key, double value);
/* a number as it was read, so that 4.0 stays 4.0: ps__json_number_text() */
void ps__jsonw_number_text(ps__jsonw *w, const char *key, const char *text);
void ps__jsonw_bool(ps__jsonw *w, const char *key, bool value);
/* NULL when memory ran out on the way */
const char *ps__jsonw_text(ps__jsonw *w, size_t *bytes);
/* ps__jsonw_replace() - ps__replace_text() with it; ps__jsonw_cache() - ps__cache_write(). Both
 * free @w. */
ps_status ps__jsonw_replace(ps__jsonw *w, const char *path);
ps_status ps__jsonw_cache(ps__jsonw *w, const char *path);

#endif
