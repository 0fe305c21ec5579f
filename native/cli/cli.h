/* cli.h - what the files of the binary `penstock` share. It uses the public headers only.
 *
 * Exit codes: 0 done; 1 the machine failed (memory, device, I/O), or something in a run did (a
 * loss that is not finite, a bad token deep in a shard); 2 the input or the command line is
 * wrong, and nothing was written; 130 stopped by Ctrl-C. */
#ifndef PENSTOCK_CLI_H
#define PENSTOCK_CLI_H
#include <penstock/train.h>
#include <stdbool.h>
#include <stdio.h>

enum { CLI_OK = 0, CLI_FAILED = 1, CLI_REFUSED = 2, CLI_INTERRUPTED = 130 };

/* ---- messages (args.c) ----------------------------------------------------------------------- */

/* cli_fail() - "penstock: ..." on stderr; returns @code. cli_fail_status() - the same with
 * ps_last_error(), and the exit code that the status stands for; @starting: nothing was written
 * yet, so that what is wrong, what cannot be read and what the machine does not give are
 * refused. */
int cli_fail(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int cli_fail_status(ps_status status, bool starting);
const char *cli_bytes(char buf[32], uint64_t bytes);    /* "19.9 GiB" */
const char *cli_duration(char buf[32], double seconds); /* "1h02m", "3m20s", "12s" */

/* ---- command lines (args.c) ------------------------------------------------------------------ */

typedef enum cli_kind {
  CLI_FLAG,   /* bool */
  CLI_TEXT,   /* const char * */
  CLI_TEXTS,  /* cli_texts: one value or more, up to the next option; may be repeated */
  CLI_COUNT,  /* uint64_t, from .least to .most; 1000, 2e5 */
  CLI_ID,     /* int32_t, -1 or more */
  CLI_BYTES,  /* uint64_t: 20GiB, 512MiB, 2e9 */
  CLI_NUMBER, /* double, from .least to .most */
  CLI_CHOICE  /* uint32_t: index into .choices, which NULL ends */
} cli_kind;

typedef struct cli_texts {
  const char **item;
  uint32_t n;
} cli_texts;

/* cli_parse_size() - a memory cap such as "20GiB" or "2e9", in BYTES. CLI_REFUSED after a
 * message where
 * @text is no size, or has no unit and is below CLI_LEAST_SIZE: whoever wrote it forgot the
 * unit. */
enum { CLI_LEAST_SIZE = 1 << 20 };
int cli_parse_size(const char *option, const char *text, uint64_t *out);

typedef struct cli_option {
  const char *name; /* without the dashes */
  cli_kind kind;
  void *out; /* untouched when the option is not given: holds the default */
  const char *value, *help;
  /* of numbers; .most 0: 2^53 for a CLI_COUNT, 1e30 for a CLI_NUMBER, so that neither a double
   * nor fp32 alters it */
  double least, most;
  const char *const *choices;
  bool *given; /* may be NULL */
} cli_option;

typedef struct cli_command {
  const char *usage; /* "train --model DIR --data SHARDS ..." */
  const char *about; /* what it does, in a paragraph */
  const char *example;
  const cli_option *options; /* ended by a NULL name; --help is added */
  const char **positional;   /* n_positional texts, all needed */
  uint32_t n_positional;
} cli_command;

/* cli_parse() - CLI_OK; CLI_REFUSED after a message; or -1 when --help was printed. Values point
 * into @argv; the lists of CLI_TEXTS are the caller's, to be freed. */
int cli_parse(const cli_command *command, int argc, char **argv);

/* ---- JSON on a stream (json.c) --------------------------------------------------------------- */
typedef struct cli_json {
  FILE *out;
  bool comma;
} cli_json;
/* '{' or '['; key NULL inside arrays and at the root */
void cli_json_open(cli_json *j, const char *key, char bracket);
void cli_json_close(cli_json *j, char bracket);
void cli_json_text(cli_json *j, const char *key, const char *value);
void cli_json_count(cli_json *j, const char *key, uint64_t value);
/* what is not finite becomes null */
void cli_json_number(cli_json *j, const char *key, double value);
void cli_json_bool(cli_json *j, const char *key, bool value);

/* ---- output files (outputs.c) ---------------------------------------------------------------- */

typedef struct cli_progress cli_progress;
/* cli_folder_check() - can a file be written into @path, made when missing? Leaves nothing
 * behind. CLI_REFUSED after a message. cli_folder_make() - make it, parents included; 0 or an
 * errno. cli_folder_note() - say so where a parent will be made: the path may have a slip in it. */
int cli_folder_check(const char *path, const char *option);
void cli_folder_note(cli_progress *p, const char *path, const char *option);
/* cli_file_replace() - @path gets @text and a line end, NULL: nothing, in one step: made under a
 * random name, so that no link that somebody put there is followed, and renamed. @stays_open (or
 * NULL) gets the file, to be written on. CLI_FAILED after a message. */
int cli_file_replace(const char *path, const char *text, FILE **stays_open);
int cli_folder_make(const char *path);
int cli_folder_make_parent(const char *path); /* the folder that @path is to appear in */

/* cli_run_lock() - this run directory is ours until cli_run_unlock(): *fd, -1 at first, is of
 * the file .penstock.lock in it, which has our process id; still -1 where there is none and not
 * @make. CLI_REFUSED after a message where another run has it. Where the file system knows no
 * locks it says so. */
int cli_run_lock(const char *run_dir, bool make, int *fd);
void cli_run_unlock(const char *run_dir, int fd); /* -1 is a no-op */
/* the caller frees it; NULL when memory ran out */
char *cli_path_join(const char *folder, const char *name);

/* ---- hardware (hardware.c, rates.c) ---------------------------------------------------------- */

/* Which device, by the options --backend, --gpu, --threads, --peak-tflops. */
enum { CLI_BACKEND_AUTO = 0, CLI_BACKEND_CPU = 1, CLI_BACKEND_CUDA = 2 };
extern const char *const cli_backends[]; /* in this order; NULL ends it */
enum { CLI_MAX_GPU = 1023 };
typedef struct cli_device {
  uint32_t backend;
  bool gpu_given;
  uint64_t gpu, threads;
  double peak_tflops; /* 0: from the library's table */
} cli_device;

/* cli_hardware_get() - rates from the user's cache, measured (and cached) on first use; says so
 * on stderr unless @quiet. cli_hardware_measure() - measured now, by ps_hardware_profile() where
 * @full; @seconds 0: as long as the device needs. Both lower device->threads to the CPUs
 * there are, and say so; cli_bound_threads() is that, for @n_cpus. */
int cli_hardware_get(ps_hardware *out, cli_device *device, uint64_t host_bytes, bool quiet);
int cli_hardware_measure(ps_hardware *out, cli_device *device, bool full, double seconds,
                         char **cached_at);
void cli_bound_threads(cli_device *device, uint32_t n_cpus, bool quiet);
void cli_hardware_print(FILE *out, const ps_hardware *hw); /* a few lines */
/* every case with its share of the ceiling */
void cli_hardware_table(FILE *out, const ps_hardware *hw);
void cli_hardware_json(cli_json *j, const char *key, const ps_hardware *hw);

/* ---- a job: what train, plan and demo have in common (job.c) --------------------------------- */
typedef struct cli_job {
  const char *model, *out, *run_dir;
  cli_texts data;
  uint64_t device_mem, host_mem, seq_len, tokens_per_step, steps, chunk_tokens, chunks_per_round,
      first_round_chunks, head_slice_tokens;
  cli_device device;
  uint64_t warmup_steps, decay_steps, seed, trace_steps;
  double lr, min_lr, weight_decay, beta1, beta2, clip_norm;
  uint32_t recipe, lr_schedule, save_dtype;
  int32_t document_token, document_end_token;
  double save_wait; /* seconds that a save which fails is tried again for */
  bool force, shuffle, json, quiet, smallest, deterministic, init_weights;
  const char *hardware_file; /* plan only: the machine planned for */
  bool other_machine;        /* plan only: --host-mem may be more than this machine has */

  ps_model_config config; /* filled by cli_job_check() */
  ps_hardware hardware;   /* from here on: by cli_job_prepare() and cli_job_plan() */
  ps_plan_config plan_config;
  ps_plan *plan;
  ps_plan_report report;
} cli_job;

/* may a model be saved there: no other is replaced unasked, and there is room; exit code */
int cli_out_check(const cli_job *job, const char *path);
void cli_job_init(cli_job *job);
void cli_job_free(cli_job *job);

/* cli_job_options() - fill @options (room for CLI_MAX_OPTIONS) with the options that shape a
 * plan, and with @training also those of a training run. */
enum { CLI_MAX_OPTIONS = 48 };
void cli_job_options(cli_job *job, cli_option *options, bool training);

/* cli_job_check() - what must be given is, and the model's configuration can be read.
 * cli_job_prepare() - get the hardware, fill the plan's configuration. cli_job_plan() - that and
 * the search. Exit codes. */
int cli_job_check(cli_job *job);
int cli_job_prepare(cli_job *job);
int cli_job_plan(cli_job *job);

/* cli_plan_grid() - for a prepared job: predicted tokens per second under each pair of caps, as
 * a table or JSON (grid.c). */
int cli_plan_grid(cli_job *job, const cli_texts *devices, const cli_texts *hosts);

typedef struct cli_cell {
  uint64_t device_bytes, host_bytes; /* caps */
  /* tokens per second of the plan found under these caps; 0: none fits, or not searched yet */
  double searched;
  uint32_t idx_from; /* the cell whose plan this one shows */
} cli_cell;

/* cli_cells_choose() - let each of @n cells show the fastest plan found under its caps or under a
 * cell's that are no larger in either: its own where no other is faster. What is shown thus
 * never falls where both caps grow (cells.c). */
void cli_cells_choose(cli_cell *cell, uint32_t n);

/* ---- training (train.c, progress.c, summary.c) ----------------------------------------------- */
int cli_train_job(cli_job *job); /* job parsed; everything else is done here */
int cli_interrupts(void);        /* how often this run was asked to stop */
/* while the model is written the first Ctrl-C lets it finish, the second ends the process */
void cli_saving(bool now);

struct cli_progress {
  bool quiet, tty, line_open;
  uint64_t first_step, n_steps;
  uint64_t device_cap_bytes, host_cap_bytes;
  double started_s, printed_s;
  const char *loading; /* the stage of loading that was printed last */
};
double cli_now_s(void);
void cli_progress_begin(cli_progress *p, const cli_job *job);
void cli_progress_load(cli_progress *p, const char *what, uint64_t done_bytes,
                       uint64_t total_bytes);
void cli_progress_step(cli_progress *p, const ps_step_metrics *m, uint64_t n_done);
/* "plan 3 of 12, 8 s" */
void cli_progress_count(cli_progress *p, const char *what, uint64_t done, uint64_t total);
void cli_progress_note(cli_progress *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void cli_progress_end(cli_progress *p);   /* closes an open line */
void cli_progress_clear(cli_progress *p); /* takes it away */

/* What a run leaves for its report. */
/* warm-up: no step's time counts */
enum { CLI_MAX_STALLS = 64, CLI_RECENT_LOSSES = 50, CLI_WARMUP_STEPS = 2 };
typedef struct cli_run_result {
  uint64_t n_done, n_wanted, tokens;
  /* recent: step i at i modulo the room */
  double loss_first, loss_recent[CLI_RECENT_LOSSES], wall_s;
  /* median of the steps after the warm-up, or of all when there are no more */
  double step_s_median, predicted_step_s;
  uint64_t device_peak_bytes, host_peak_bytes;
  /* shares of the time that cli_stream_fractions() counts */
  double busy[PS_MAX_STREAMS], wait[PS_MAX_STREAMS];
  uint32_t n_streams;
  /* what streams waited for, of the trace and of the plan; the longest first in each stream */
  ps_stall stall[CLI_MAX_STALLS], planned_stall[CLI_MAX_STALLS];
  uint64_t n_stalls, n_planned_stalls;
  bool interrupted, saved;
  char *metrics_path, *plan_path, *timeline_path;
  char *other_out; /* where the model was saved instead of --out */
} cli_run_result;
/* cli_save() - the model into job->out. Where that cannot be written another place may be named
 * at a terminal; without one it is tried again for job->save_wait seconds (save.c). Exit code. */
int cli_save(cli_job *job, ps_trainer *t, cli_progress *p, cli_run_result *r);
void cli_stream_fractions(cli_run_result *r, const ps_trace_event *events, uint64_t n);
void cli_note_loss(cli_run_result *r, double loss);
/* fills both lists of stalls; exit code */
int cli_stalls(cli_run_result *r, const ps_plan *plan, const ps_trace_event *events, uint64_t n);
void cli_summary_print(FILE *out, const cli_job *job, const cli_run_result *r);
void cli_summary_json(FILE *out, const cli_job *job, const cli_run_result *r);

/* ---- subcommands: argv[0] is the subcommand -------------------------------------------------- */
int cli_train(int argc, char **argv);
int cli_plan(int argc, char **argv);
int cli_info(int argc, char **argv);
int cli_demo(int argc, char **argv);
int cli_profile(int argc, char **argv);
int cli_version(int argc, char **argv);

#endif
