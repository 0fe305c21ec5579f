/* cli.h - what the files of the binary `penstock` share. It uses the public headers only.
 *
 * Exit codes:
 *   0    done
 *   1    the machine failed (memory, device, disk), or the run did (a loss that is not finite, a
 *        bad token late in a shard), or the model was saved elsewhere than in --out
 *   2    the input or the command line is wrong; nothing was written
 *   130  stopped by Ctrl-C */
#ifndef PENSTOCK_CLI_H
#define PENSTOCK_CLI_H
#include <penstock/adapter.h>
#include <penstock/generate.h>
#include <penstock/hosts.h>
#include <penstock/checkpoint.h>
#include <stdbool.h>
#include <stdio.h>

enum { CLI_OK = 0, CLI_FAILED = 1, CLI_REFUSED = 2, CLI_INTERRUPTED = 130 };

/* ---- messages (args.c) ----------------------------------------------------------------------- */

/* cli_fail() - print "penstock: ..." on stderr and return @code.
 * cli_fail_status() - print ps_last_error() and return the status's exit code. @starting: nothing
 * was written yet, so that bad input, an unreadable file and missing memory are CLI_REFUSED. */
int cli_fail(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int cli_fail_status(ps_status status, bool starting);
/* cli_fail_given() - as cli_fail_status() before anything was written, with @option in front: the
 * user sees which option a path came from, as in "--model nowhere: cannot be opened: ...". */
int cli_fail_given(const char *option, ps_status status);
/* cli_warnings() - print the library's warnings on stderr from now on, or drop them again.
 * cli_warnings_of() - print those that begin with @begin, a literal, and drop all others. */
void cli_warnings(bool print);
void cli_warnings_of(const char *begin);
const char *cli_last_words(void); /* of the last cli_fail(); "" when there was none */
const char *cli_bytes(char buf[32], uint64_t bytes);    /* "19.9 GiB" */
const char *cli_rate(char buf[32], double bytes_per_s); /* "48.2 GB/s" */
const char *cli_duration(char buf[32], double seconds); /* "1h02m", "3m20s", "12s" */

/* ---- command lines (args.c) ------------------------------------------------------------------ */

typedef enum cli_kind {
  CLI_FLAG,   /* bool, or uint32_t: --name, --name=false */
  CLI_TEXT,   /* const char * */
  CLI_TEXTS,  /* cli_texts: one value or more, up to the next option; may be repeated */
  CLI_COUNT,  /* uint64_t, or uint32_t, from .least to .most: 1000, 2e5 */
  CLI_ID,     /* int32_t: a token id, or -1 */
  CLI_BYTES,  /* uint64_t: 20GiB, 512MiB, 2e9 */
  CLI_NUMBER, /* double, from .least to .most */
  CLI_EVERY,  /* cli_every: 200 steps, 30m, 2h */
  CLI_CHOICE, /* uint32_t: index into .choices, which NULL ends; PS_DEFAULT: not given */
  CLI_SET,    /* uint32_t: bit i for .choices[i]; "a,b", "a b" or "none" */
  CLI_GROUP   /* "KEY=VALUE,...": sets the options NAME-KEY that are .grouped */
} cli_kind;

typedef struct cli_texts {
  const char **item;
  uint32_t n;
} cli_texts;

/* An interval: steps or seconds; the other one is 0. Both are 0 where none was given. */
enum { CLI_KEEP = 2 };

typedef struct cli_every {
  uint64_t steps;
  double seconds;
} cli_every;

/* cli_parse_size() - parse a memory cap such as "20GiB" or "2e9" to BYTES. Where @text is no size
 * the result is CLI_REFUSED, after a message that begins with @label, such as "--host-mem". A
 * number below CLI_LEAST_SIZE without a unit is refused too, because its unit was forgotten. */
enum { CLI_LEAST_SIZE = 1 << 20 };
int cli_parse_size(const char *label, const char *text, uint64_t *out);

/* Token ids (ids.c). cli_ids_parse() - append those of @text, between commas, blanks or brackets:
 * "1, 2, 3" and "[1, 2, 3]". @where begins the message. Exit code. cli_ids_add() - false: out of
 * memory. */
typedef struct cli_ids {
  int32_t *id;
  uint64_t n, room;
} cli_ids;
int cli_ids_parse(const char *text, const char *where, cli_ids *out);
bool cli_ids_add(cli_ids *a, int32_t id);

/* The heading of an option in --help (help.c). --help leaves out an option that has CLI_RARE or
 * stands under a heading from CLI_H_OPTIMIZER on; --help-all shows it. */
typedef enum cli_heading {
  CLI_H_NONE, /* no option has it */
  CLI_H_MODEL,
  CLI_H_MEMORY,
  CLI_H_BATCH,
  CLI_H_TRAINING,
  CLI_H_SAVING,
  CLI_H_LORA,
  CLI_H_TEXTS,
  CLI_H_FOLLOWING,
  CLI_H_MACHINE,
  CLI_H_TABLES,
  CLI_H_HARDWARE,
  CLI_H_MEASURING,
  CLI_H_OUTPUT,
  CLI_H_OPTIMIZER,
  CLI_H_DOCUMENTS,
  CLI_H_SAMPLES,
  CLI_H_FP8,
  CLI_H_HOSTS,
  CLI_H_PROFILING,
  CLI_H_FINE,
  CLI_N_HEADINGS
} cli_heading;
enum { CLI_RARE = 64 };

typedef struct cli_option {
  const char *name; /* without the dashes */
  unsigned heading; /* a cli_heading, and perhaps CLI_RARE */
  cli_kind kind;
  void *out; /* holds the default; written when the option is given */
  /* Of a CLI_COUNT or CLI_FLAG: BYTES of *out, 4 for a uint32_t. 0: as the kind says. */
  uint32_t bytes;
  const char *value, *help;
  /* The range of a number. most 0 stands for 2^53 (CLI_COUNT), which a double holds exactly, or for
   * 1e30 (CLI_NUMBER), which fp32 holds. */
  double least, most;
  const char *const *choices;
  bool *given; /* may be NULL */
  /* On the command line it is a key of a CLI_GROUP; in a run's file it has its own name. */
  bool grouped;
  /* The table of a run's file in which the option is a key; "": the option is no key. */
  const char *table;
} cli_option;
enum { CLI_MAX_OPTIONS = 128 }; /* of a command */
/* An option under a heading, whose value goes to @to; then its other fields. */
#define CLI_OPTION(under, to, ...) {.heading = (under), .out = (to), __VA_ARGS__}

/* cli_set_value() - set an option to @text. A message begins with @label: "--lr", or the file, the
 * line and the key. The text is borrowed while the option's value is used. CLI_OK or CLI_REFUSED.
 * cli_count_of(), cli_flag_of() - the value of a CLI_COUNT, of a CLI_FLAG.
 * cli_clear_list() - let the next value of a list or a set replace those before.
 * cli_find_option() - an option by its name; cli_nearest_option() - one whose name is similar.
 * NULL: there is none. */
int cli_set_value(const cli_option *option, const char *label, const char *text);
uint64_t cli_count_of(const cli_option *option);
bool cli_flag_of(const cli_option *option);
void cli_clear_list(const cli_option *option);
const cli_option *cli_find_option(const cli_option *options, const char *name);
const cli_option *cli_nearest_option(const cli_option *options, const char *name);

typedef struct cli_job cli_job;

typedef struct cli_command cli_command;
/* What to say of @typed, which is no option of the command. @name: it with dashes, and the synonym
 * in its place where there is one. False: nothing but what cli_nearest_option() has. */
typedef bool (*cli_hint_fn)(const cli_command *command, const char *typed, const char *name,
                            char says[512]);

struct cli_command {
  const char *usage; /* "train --model DIR --data SHARDS ..." */
  const char *about; /* a paragraph on what it does; lines end in a newline */
  const char *example;
  const cli_option *options; /* ended by a NULL name; --help, --help-all are added */
  const char **positional;   /* n_positional texts, all needed */
  uint32_t n_positional;
  cli_job *job; /* of a command that takes --config; else NULL */
  cli_hint_fn hint;
};

/* Names that other trainers have for options (aliases.c). @name has dashes in place of underscores,
 * which cli_plain_name() replaces.
 * cli_synonym() - what the option is called here; cli_answer() - what to give in its place, for a
 * name without a synonym, after "there is no option --name: ". NULL: no such name.
 * cli_among() - whether @name is one of @words, which are parted by blanks. */
bool cli_among(const char *words, const char *name);
void cli_plain_name(char *name);
const char *cli_synonym(const char *name);
const char *cli_answer(const char *name);

/* cli_help_asked() - the word of @argv that asks for help; NULL: none does.
 * cli_parse() - parse @argv. Returns CLI_OK, CLI_REFUSED after a message, or -1 after --help or
 * --help-all was printed. Texts point into @argv. The caller frees the lists of CLI_TEXTS. */
const char *cli_help_asked(int argc, char **argv);
int cli_parse(const cli_command *command, int argc, char **argv);

/* cli_print_help() - print the options that most people need, or all of them (help.c). */
void cli_print_help(const cli_command *command, bool all);

/* ---- text for people (wrap.c) ---------------------------------------------------------------- */

/* cli_put_lines() - @text and a line's end. On a terminal, long lines wrap at words. */
void cli_put_lines(FILE *out, const char *text);

/* ---- JSON on a stream (json.c) --------------------------------------------------------------- */
typedef struct cli_json {
  FILE *out;
  bool comma;
} cli_json;
/* @bracket is '{' or '['. @key is NULL inside arrays and at the root. */
void cli_json_open(cli_json *j, const char *key, char bracket);
void cli_json_close(cli_json *j, char bracket);
void cli_json_text(cli_json *j, const char *key, const char *value);
void cli_json_count(cli_json *j, const char *key, uint64_t value);
/* A value that is not finite becomes null. */
void cli_json_number(cli_json *j, const char *key, double value);
void cli_json_raw(cli_json *j, const char *key, const char *json); /* a value as it is */
void cli_json_bool(cli_json *j, const char *key, bool value);

/* ---- output files (outputs.c) ---------------------------------------------------------------- */

/* cli_input_open() - open the regular file of --@option for reading. NULL after a message: the exit
 * code is CLI_REFUSED. */
FILE *cli_input_open(const char *option, const char *path);

typedef struct cli_progress cli_progress;
/* cli_folder_check() - check that a file can be written into folder @path, which need not exist
 * yet. Nothing stays of the check. CLI_REFUSED after a message that names --@option. */
int cli_folder_check(const char *path, const char *option);
/* cli_folder_note() - say which parent of @path will be made, as its name may be mistyped. */
void cli_folder_note(cli_progress *p, const char *path, const char *option);
/* cli_folder_make() - make @path and its parents; cli_folder_make_parent() - make the folder that
 * @path lies in. 0, or an errno. */
int cli_folder_make(const char *path);
int cli_folder_make_parent(const char *path);
/* cli_file_replace() - write @text and a line end to @path (NULL: an empty file). The file gets a
 * random name first and is then renamed: readers see it whole, and no link is followed.
 * @stays_open, if not NULL, gets the file opened for writing. CLI_FAILED after a message. */
int cli_file_replace(const char *path, const char *text, FILE **stays_open);

/* cli_run_lock() - lock the run directory until cli_run_unlock().
 * @fd    -1 before the first call; then the descriptor of the file .penstock.lock in the directory,
 *        which holds this process's id. It stays -1 where the file does not exist and @make is
 *        false.
 * CLI_REFUSED after a message where another run holds the lock. A file system without locks gets a
 * warning. */
int cli_run_lock(const char *run_dir, bool make, int *fd);
void cli_run_unlock(const char *run_dir, int fd); /* -1 is a no-op */
/* cli_disk_free() - BYTES that are free on the file system of @path, or of its nearest parent that
 * exists. UINT64_MAX: the file system does not say. CLI_FAILED after a message. */
int cli_disk_free(const char *path, uint64_t *bytes);
/* cli_path_join() - FOLDER/NAME. The caller frees it; NULL when memory ran out. */
char *cli_path_join(const char *folder, const char *name);

/* ---- hardware (hardware.c, rates.c) ---------------------------------------------------------- */

/* What --backend, --gpu, --gpus, --threads and --peak-tflops choose. */
enum { CLI_BACKEND_AUTO = 0, CLI_BACKEND_CPU = 1, CLI_BACKEND_CUDA = 2 };
extern const char *const cli_backends[]; /* their names in this order; NULL ends the list */
enum { CLI_MAX_GPU = 1023 };
typedef struct cli_device {
  uint32_t backend;
  bool gpu_given;
  uint64_t gpu, threads;
  uint64_t n_gpus;    /* GPUs from gpu on; on the CPU backend arenas */
  double peak_tflops; /* 0: from the library's table */
  const char *disk;   /* directories whose rates are needed, or NULL */
} cli_device;

/* cli_hardware_get() - read the machine's rates from the user's cache. On first use measure and
 * cache them, and say so on stderr unless @quiet. @device_bytes, @host_bytes: caps meanwhile, 0:
 * none. @fp8: those of FP8 products too. @model: those that it needs (ps_hardware_ask); or NULL.
 * cli_hardware_measure() - measure the rates now and cache them. @full: by ps_hardware_profile().
 * @seconds 0: as long as the device needs. *kept: whether the cache has them.
 * cli_bound_threads() - lower device->threads to @n_cpus, and say so. cli_hardware_get() and
 * cli_hardware_measure() call it.
 * cli_gpus_check() - whether a training or an evaluation can run on device->n_gpus. Exit code.
 * cli_on_gpu() - whether it runs on a GPU. */
int cli_hardware_get(ps_hardware *out, cli_device *device, uint64_t device_bytes,
                     uint64_t host_bytes, bool fp8, const ps_model_config *model, bool quiet);
int cli_hardware_measure(ps_hardware *out, cli_device *device, bool full, double seconds,
                         bool *kept);
void cli_bound_threads(cli_device *device, uint32_t n_cpus, bool quiet);
bool cli_on_gpu(const cli_device *device);
int cli_gpus_check(const cli_device *device);
/* every measured rate, and its fraction of the hardware's peak */
void cli_hardware_table(FILE *out, const ps_hardware *hw);
/* as ps_hardware_json() has it; exit code */
int cli_hardware_json(cli_json *j, const char *key, const ps_hardware *hw);

/* What a run has of checkpoints (checkpoints.c). */
typedef struct cli_checkpoints {
  char *newest, *writing; /* paths, or NULL */
  uint64_t begun;         /* the step of the last one that was begun; 0: none */
  double due_s;           /* when the next is due, of an interval in seconds */
  bool run_over;          /* no step follows */
} cli_checkpoints;

/* ---- several hosts (launcher.c) -------------------------------------------------------------- */
/* cli_task_read() - ps_hosts_task_find(). Exit code.
 * cli_task_meet() - meet the other tasks, if there are some, compare the options, and choose what
 * moves gradients. Exit code.
 * cli_task_follow() - a task that is not rank 0 writes nothing but errors: it validates, samples
 * and saves nothing.
 * cli_task_measure() - where there are other tasks: get the machine's rates and the network's. The
 * latter is what a description states, else what rank 0 kept of an earlier start, else measured now
 * and kept. Exit code.
 * cli_task_share_plan() - all take the cut of rank 0's plan; @code is that of rank 0's plan.
 * cli_task_end() - with @code CLI_OK or CLI_INTERRUPTED wait for rank 0, then leave the other
 * tasks; else end them. Exit code: @code, or CLI_FAILED where another task has failed. */
int cli_task_read(ps_hosts_task *t);
int cli_task_meet(cli_job *job);
void cli_task_follow(cli_job *job);
int cli_task_measure(cli_job *job);
int cli_task_share_plan(cli_job *job, int code);
int cli_task_end(cli_job *job, int code);

/* ---- a job: options and plan of train, plan and demo (job.c) --------------------------------- */
struct cli_job {
  const char *model, *out, *run_dir;
  /* The models in --out when the run began and, once a save was tried, that of the run, as saved.c
   * describes them; NULL: none. */
  char *out_seen, *out_tried;
  const char *model_option; /* how the command line names the model: "--model" */
  const char *run_file;     /* of --config, or NULL */
  char *run_text;           /* holds the texts of that file */
  cli_texts data, batch_ramp;
  ps_ramp_stage ramp[PS_MAX_RAMP]; /* of batch_ramp; set by cli_ramp_parse() */
  cli_texts val;                   /* validation data; "none" */
  bool val_found;                  /* val is what the data tool split off, and owns its items */
  uint64_t val_every;              /* 0: by cli_val_open(), as val_tokens */
  struct cli_samples *samples;     /* set by cli_samples_open(); NULL: no texts are sampled */
  cli_texts sample_prompt, sample_ids;
  const char *sample_prompts; /* a file, which the Python package reads */
  uint64_t sample_every, sample_tokens, sample_top_k, sample_seed;
  double sample_temperature, sample_top_p;
  cli_device device;
  double epochs, warmup_ratio; /* NAN: not given */
  bool lr_schedule_given, min_lr_given, warmup_given, shuffle_given, checkpoint_given,
      no_save_given;
  /* Set by cli_defaults_*(): the data's masks mark documents; --steps was not given; so was the
   * interval of checkpoints, and is the default; what the default of --lr is for, or NULL. */
  bool records, steps_chosen, checkpoint_chosen;
  const char *lr_of;
  char *default_out; /* the default of --out; NULL: it was given */
  cli_every checkpoint_every;
  uint64_t keep;             /* how many checkpoints stay; CLI_KEEP by default */
  const char *resume;        /* a checkpoint's directory, "latest" or "auto"; NULL: none */
  uint64_t first_step;       /* of this run; set by cli_resume_open() */
  const char *profile_steps; /* "A:B", or NULL */
  uint64_t profile_first, profile_last; /* counted from 1; set by cli_profile_parse() */
  cli_checkpoints checkpoints;
  uint32_t save_dtype; /* ps_dtype or CLI_MXFP4; PS_DEFAULT until cli_job_check(), if not given */
  bool data_marks_documents; /* masks of the data say where documents begin */
  double save_wait;          /* seconds for which a failing save is tried again */
  bool hosts_insecure;       /* they need no secret */
  bool follows_aloud;        /* not rank 0, without --quiet: prints warnings of other tasks alone */
  double hosts_wait;         /* seconds for which the tasks of other hosts are awaited */
  uint32_t chosen_transport; /* where there are hosts; set by cli_task_meet() */
  ps_hosts_task task;        /* its n_hosts is also of `penstock plan --hosts`; 0 counts as 1 */
  ps_hosts *hosts;           /* set by cli_task_meet(); NULL: this is the only host */
  bool force, no_save, json, quiet, smallest;
  /* of `penstock plan`, one of the two at most: the machine to plan for, or its GPU's name */
  const char *hardware_file, *gpu_model;
  bool other_machine; /* of `penstock plan`: --host-mem may exceed this machine's memory */

  const char *lora_targets; /* NULL: not given */

  /* What options say of the plan and of the training: the option table writes into them. Defaults
   * that follow from other fields come by cli_job_check(), what follows from the machine, the data
   * and the hosts by cli_job_prepare(). */
  ps_plan_config plan_config;
  ps_train_config train_config;
  ps_model_config config; /* set by cli_job_check() */
  ps_hardware hardware;   /* set by cli_job_machine() */
  bool knows_machine;
  ps_plan *plan;         /* set by cli_job_plan(); the trainer's while it has another one */
  ps_plan_report report; /* set by cli_job_plan() */
};
enum { CLI_MXFP4 = PS_N_DTYPES }; /* among the names of --save-dtype */
static inline ps_dtype cli_save_dtype(const cli_job *j) {
  return j->save_dtype == CLI_MXFP4 ? (ps_dtype)PS_SAVE_MXFP4 : (ps_dtype)j->save_dtype;
}

/* cli_out_check() - check that the model can be saved into @path, whose disk has room. Exit code.
 * cli_out_check_empty() - check that @path has no data set, and no model or tokenizer yet, or
 * --force is given. Exit code. */
/* cli_model_elements() - of --model. Exit code. */
int cli_model_elements(const cli_job *job, uint64_t *n);
int cli_out_check(const cli_job *job, const char *path);
int cli_out_check_empty(const cli_job *job, const char *path);
/* What is in --out (saved.c).
 * cli_is_model_file() - a file of a model. So is .penstock-new, which a cut-off save leaves.
 * cli_out_note_seen() - keep in job->out_seen which model is there now. Exit code.
 * cli_out_seen_pending() - a save into it was cut off, and the next one completes it.
 * cli_out_is_other() - *is: @dir has another model than that, and not this run's. 0, or an errno.
 * cli_out_is_own() - whether it is a model that this run, or the one before it in the run
 * directory, has saved, and which.
 * cli_out_note() - note that the model in directory @from, of step @step, will be that of @dir. A
 * failure is only printed. */
typedef struct cli_saved_model {
  uint64_t step; /* UINT64_MAX: unknown */
  char dtype[8];
} cli_saved_model;
bool cli_is_model_file(const char *name);
int cli_out_note_seen(cli_job *job);
bool cli_out_seen_pending(const cli_job *job);
int cli_out_is_other(const cli_job *job, const char *dir, bool *is);
bool cli_out_is_own(const cli_job *job, cli_saved_model *m);
void cli_out_note(cli_job *job, const char *from, const char *dir, uint64_t step);
void cli_job_init(cli_job *job);
void cli_job_free(cli_job *job);

/* cli_job_options() - fill @options, which has room for CLI_MAX_OPTIONS, with the options of a plan
 * and, where @training, those of a training run. Returns how many; a NULL name follows the last. */
uint32_t cli_job_options(cli_job *job, cli_option *options, bool training);

/* cli_name_fields() - let the library's messages name options in place of fields. Exit code. */
int cli_name_fields(void);
/* cli_job_hint() - a cli_hint_fn: the option is one of train, or another trainer's name has an
 * answer. */
bool cli_job_hint(const cli_command *command, const char *typed, const char *name, char says[512]);

extern const char *const cli_lr_schedules[]; /* by ps_lr_kind; NULL ends the list */

/* cli_lora_resolve() - set what the options and the adapter say of LoRA, and the defaults that
 * follow from it: of the plan, and the dtype in which weights are saved (lora.c). Exit code. */
int cli_lora_resolve(cli_job *job);
/* cli_job_check() - check that required options are given, and read the model's configuration.
 * cli_job_machine() - get the machine's rates, once.
 * cli_job_prepare() - the same, and complete the plan's configuration.
 * cli_job_plan() - prepare, and search a plan that gives each GPU work.
 * All return exit codes. */
int cli_job_check(cli_job *job);
int cli_job_machine(cli_job *job);
int cli_job_prepare(cli_job *job);
int cli_job_plan(cli_job *job);
/* cli_job_pins_less() - whether a trainer was refused because less host memory can be pinned than
 * its plan takes. cli_job_plan_pinned() - another plan, of what can be pinned, in its place. */
bool cli_job_pins_less(const cli_job *job);
int cli_job_plan_pinned(cli_job *job);
/* cli_too_few_sequences() - whether a GPU would never have work: without a ring each takes whole
 * sequences. @why: what the user can do.
 * cli_note_left_out() - say which sequences of a step hosts do not train, as each has equally many.
 * After cli_job_prepare(). */
bool cli_too_few_sequences(const cli_job *job, const ps_plan_report *report, char why[512]);
void cli_note_left_out(const cli_job *job, cli_progress *p);

/* cli_ramp_parse() - the stages of --batch-ramp (ramp.c). Exit code. */
int cli_ramp_parse(cli_job *job);

/* ---- profiled steps (profiling.c) ------------------------------------------------------------ */
/* cli_profile_parse() - set the job's profiled steps and trace_steps by --profile-steps; before the
 * plan is made. cli_profile_check() - whether the run has these steps. Exit codes.
 * cli_profile_next() - the next step after @step at which a recording begins or ends, when none may
 * be in flight; UINT64_MAX: none.
 * cli_profile_at() - @step steps are done, and none is in flight: begin or end what begins or ends
 * here. */
int cli_profile_parse(cli_job *job);
int cli_profile_check(const cli_job *job);
uint64_t cli_profile_next(const cli_job *job, uint64_t step);
ps_status cli_profile_at(const cli_job *job, ps_trainer *t, uint64_t step);

/* ---- a run's file (run_file.c) --------------------------------------------------------------- */
/* cli_run_file_read() - set options by the TOML file of --config. Its keys are the options that a
 * training has. One that this command has not, or that means something else there, is checked and
 * left out. Exit code.
 * cli_run_file_show() - print the file with every option: its value or its default. Exit code.
 * cli_run_file_check() - check that run.toml in the run directory may be written: only one that
 * penstock wrote is replaced. Exit code.
 * cli_run_file_text() - the run as it was resolved, as such a file. The caller frees it; NULL when
 * memory ran out.
 * cli_run_file_write() - write the run as it was resolved: every option with the value used. */
/* cli_job_parse() - read the file of --config, and cli_parse() @argv, which overrides it. Texts
 * point into job->run_text too. */
int cli_job_parse(const cli_command *command, int argc, char **argv);
int cli_run_file_read(const cli_command *command, const char *path);
int cli_run_file_show(const char *path);
int cli_run_file_check(const cli_job *job);
char *cli_run_file_text(const cli_job *job);
/* cli_options_text() - a line for each option of train but those among @without, words; NULL: no
 * memory. */
char *cli_options_text(cli_job *job, const char *without);
int cli_run_file_write(const cli_job *job);

/* cli_plan_grid() - print the predicted tokens per second of a prepared job under each pair of
 * caps, as a table or as JSON (grid.c). Exit code. */
int cli_plan_grid(cli_job *job, const cli_texts *devices, const cli_texts *hosts);
/* cli_gpus_parse() - the numbers of plan's --gpus, between commas or blanks, into @out, which has
 * room for CLI_MAX_GPU_ROWS. cli_plan_gpus() - print a prepared job's plan for each number of GPUs,
 * as a table or as JSON (gpus.c). Exit codes.
 * cli_step_tokens() - the tokens of a step as ps_plan_config says.
 * cli_subject_json() - the model and the machine of predicted figures (grid.c). */
enum { CLI_MAX_GPU_ROWS = 16 };
int cli_gpus_parse(const cli_texts *texts, uint32_t *out, uint32_t *n);
int cli_plan_gpus(cli_job *job, const uint32_t *n_gpus, uint32_t n);

/* advice.c */

/* cli_advise() - lines about the shapes of the plan for @n_gpus that @r reports, for people.
 * cli_advice_print() - print them, in lines of at most 100 columns. */
typedef struct cli_advice {
  char line[12][400];
  uint32_t n;
} cli_advice;
void cli_advise(cli_advice *out, const ps_model_config *m, const ps_hardware *hw,
                const ps_plan_config *cfg, const ps_plan_report *r, uint32_t n_gpus);
void cli_advice_print(const cli_advice *a);
uint64_t cli_step_tokens(const ps_plan_config *c);
void cli_subject_json(cli_json *j, const cli_job *job);
/* cli_plan_pairs() - print the plan of a prepared job under each of @pairs, "DEVICE:HOST", as a
 * JSON object a line (pairs.c). Exit code.
 * cli_plan_under() - search a plan under these caps, BYTES; 0: none. *out is the caller's, and
 * untouched where no plan fits (PS_EBUDGET). @shared is borrowed, or NULL. */
int cli_plan_pairs(cli_job *job, const cli_texts *pairs);
ps_status cli_plan_under(const cli_job *job, ps_evaluations *shared, uint64_t device_mem,
                         uint64_t host_mem, ps_plan **out, ps_plan_report *report);

typedef struct cli_cell {
  uint64_t device_mem_bytes, host_mem_bytes; /* the caps */
  /* tokens per second of the plan found under these caps; 0: none fits, or not searched yet */
  double searched;
  uint32_t idx_from; /* the cell whose plan this one shows */
} cli_cell;

/* cli_cells_choose() - let each of @n cells show the fastest of two kinds of plans: the one found
 * under its own caps, and those of cells whose caps are no larger. So the shown speed never falls
 * where caps grow (cells.c). */
void cli_cells_choose(cli_cell *cell, uint32_t n);

/* ---- interrupts (interrupts.c) --------------------------------------------------------------- */
/* While the model or a checkpoint is waited for, the first Ctrl-C lets it finish. The second one
 * ends the process. */
typedef enum cli_saves {
  CLI_SAVES_NOTHING,
  CLI_SAVES_MODEL,
  CLI_SAVES_CHECKPOINT,
  CLI_SAVES_ELSEWHERE /* this task has ended, and waits until the others have */
} cli_saves;
/* cli_interrupts() - how often this run was asked to stop.
 * cli_interrupts_catch() - catch Ctrl-C, SIGTERM and SIGHUP, which end the process until
 * cli_interrupts_written(), after which something was written.
 * cli_interrupts_say() - print @words, borrowed for good, at the first one.
 * cli_interrupts_cancel() - cancel @t at the second one; NULL: there is nothing to cancel. */
int cli_interrupts(void);
void cli_saving(cli_saves what);
void cli_interrupts_catch(void);
void cli_interrupts_written(void);
void cli_interrupts_say(const char *words);
void cli_interrupts_cancel(ps_trainer *t);

/* ---- defaults of a training (defaults.c) ----------------------------------------------------- */
/* In this order:
 * cli_defaults_check() - refuse options that exclude one another.
 * cli_defaults_out() - the run directory and where the model is saved.
 * cli_defaults_read() - after the data is open: what the checkpoint @from has, or NULL; else the
 * order of reading and the learning rate.
 * cli_defaults_tokens() - the tokens of a step, by the machine's rates. @ds NULL: the run's length
 * is no limit.
 * cli_defaults_run() - after the plan: steps, warm-up, checkpoints.
 * cli_defaults_note() - say what the run has.
 * cli_expected_steps() - about how many steps the run has, before there is a plan.
 * Those that return an int: exit codes. */
int cli_defaults_check(const cli_job *job);
int cli_defaults_out(cli_job *job);
int cli_defaults_read(cli_job *job, const ps_checkpoint *from);
int cli_defaults_tokens(cli_job *job, const ps_dataset *ds);
int cli_defaults_run(cli_job *job, const ps_dataset *ds);
void cli_defaults_note(const cli_job *job, cli_progress *p);
uint64_t cli_expected_steps(const cli_job *job, const ps_dataset *ds);

/* ---- checkpoints (checkpoints.c) ------------------------------------------------------------- */
/* cli_resume_open() - open the checkpoint that --resume means, and take from it how the batch is
 * cut. *out is NULL where the run begins anew. The caller closes it. Exit code.
 * cli_checkpoint_room() - how many of @n steps may be submitted after @step, up to the next
 * checkpoint. The begin of that one ends the one that is written, which then gets its name. So 0
 * where that would come before metrics.jsonl has the steps of the latter; @noted: the last step
 * that it has.
 * cli_checkpoint_note() - say how often checkpoints are written by default, and that none is where
 * the options are about some. Without room on the disk there is no default.
 * cli_checkpoint_due() - @step steps are submitted: begin a checkpoint where one is due, or where
 * @now, as the run stops. A failure is only printed, here and below.
 * cli_checkpoint_end() - end a checkpoint that is written, and remove the oldest. Where @wait is
 * false, one that is not complete yet goes on. */
int cli_resume_open(cli_job *job, ps_checkpoint **out);
void cli_checkpoint_note(cli_job *job, cli_progress *p);
uint64_t cli_checkpoint_room(const cli_job *job, uint64_t step, uint64_t noted, uint64_t n);
void cli_checkpoint_due(cli_job *job, ps_trainer *t, cli_progress *p, uint64_t step, bool now);
void cli_checkpoint_end(cli_job *job, ps_trainer *t, cli_progress *p, bool wait);

/* ---- an earlier run in the run directory (earlier.c) ----------------------------------------- */
/* cli_earlier_check() - refuse a run directory with checkpoints or metrics of another run, unless
 * --force is given. A run that goes on from a checkpoint there, or was asked to, is no other run.
 * Exit code.
 * cli_earlier_move() - the same again, with the directory locked; then move another run's files
 * into RUN_DIR/earlier-N. Exit code.
 * cli_leftovers_clear() - remove what kills have left in the run directory, and of --out.
 * @locked: no other run writes there. */
int cli_earlier_check(const cli_job *job);
int cli_earlier_move(const cli_job *job, cli_progress *p);
void cli_leftovers_clear(const cli_job *job, bool locked);

/* ---- metrics.jsonl (metrics.c) --------------------------------------------------------------- */
/* What the log and metrics.jsonl say of a step beside its own figures. docs/watch.md
 * explains each field. */
typedef struct cli_step {
  uint64_t total_steps, samples, consumed_samples, consumed_tokens;
  uint32_t n_gpus, n_hosts;                /* n_gpus: of each host */
  double elapsed_s, eta_s, tflops, time_s; /* tflops: a GPU */
} cli_step;
/* cli_step_note() - fill in @s, which is zeros before the first of the run's @n_done steps. */
void cli_step_note(cli_step *s, const cli_job *job, const ps_step_metrics *m, double elapsed_s,
                   uint64_t n_done);

/* cli_metrics_keep() - replace the file by its lines before @first_step, and open it for writing.
 * cli_metrics_write() - append a line. Where that fails, the file keeps its whole lines. @v: the
 * validation after the step; NULL: none.
 * Both return exit codes. */
int cli_metrics_keep(const char *path, uint64_t first_step, FILE **out);
int cli_metrics_write(const cli_job *job, FILE *f, const char *path, const ps_step_metrics *m,
                      const cli_step *s, const ps_validation *v);

/* ---- validation (validation.c) --------------------------------------------------------------- */
/* cli_val_open() - open the validation data of --val or, by default, what the data tool split off.
 * *out is NULL where there is no validation. The caller closes it, after an error too. Exit code.
 * cli_val_choose() - fill in val_every and val_tokens for a run of about @steps steps, once the
 * tokens of a step are known.
 * cli_val_note() - say what is validated, and how often.
 * cli_val_next() - the next step after @step that validations follow; cli_val_due() - whether one
 * follows step @step, counted from 1.
 * cli_validate() - validate now. Exit code.
 * cli_val_metrics() - the fields of a line of metrics.jsonl. */
typedef struct cli_run_result cli_run_result;
int cli_val_open(cli_job *job, const ps_dataset *train, ps_dataset **out);
void cli_val_choose(cli_job *job, uint64_t steps, const ps_dataset *val);
void cli_val_free(cli_job *job);
void cli_val_note(const cli_job *job, cli_progress *p);
uint64_t cli_val_next(const cli_job *job, uint64_t step);
bool cli_val_due(const cli_job *job, uint64_t step);
int cli_validate(const cli_job *job, ps_trainer *t, cli_progress *p, cli_run_result *r,
                 uint64_t step, ps_validation *out);
void cli_val_metrics(const cli_job *job, cli_json *j, const ps_validation *v);
void cli_val_summary_print(const cli_job *job, FILE *out, const cli_run_result *r);
void cli_val_summary_json(const cli_job *job, cli_json *j, const cli_run_result *r);

/* ---- samples (samples.c) --------------------------------------------------------------------- */
/* cli_samples_open() - the prompts of --sample-ids, checked; job->samples stays NULL where no text
 * is asked for. Exit code. cli_samples_free() - NULL is fine.
 * cli_samples_begin() - keep the lines of samples.jsonl up to job->first_step steps. Exit code.
 * cli_samples_next(), cli_samples_due() - as cli_val_next() and cli_val_due().
 * cli_sample() - sample now, and write the texts. Exit code; logits that are not finite are only
 * said.
 * cli_samples_summary_*() - how many texts, and their seconds. */
int cli_samples_open(cli_job *job);
void cli_samples_free(cli_job *job);
int cli_samples_begin(cli_job *job);
void cli_samples_plan(const cli_job *job, ps_plan_config *cfg); /* what the plan keeps room for */
void cli_samples_note(const cli_job *job, cli_progress *p);
uint64_t cli_samples_next(const cli_job *job, uint64_t step);
bool cli_samples_due(const cli_job *job, uint64_t step);
int cli_sample(cli_job *job, ps_trainer *t, cli_progress *p, uint64_t step);
void cli_samples_summary_print(FILE *out, const cli_job *job, double wall_s);
void cli_samples_summary_json(cli_json *j, const cli_job *job, double wall_s);

/* ---- training (train.c, loop.c, progress.c, summary.c) --------------------------------------- */
/* cli_open_data() - the token shards of --data, checked. cli_train_config() - the job's options for
 * a trainer that reads them. */
int cli_open_data(cli_job *job, ps_dataset **out);
/* cli_take_labels() - the model gets the head that the labels of @ds, which @option gives, are for.
 * cli_right() - what ps_step_metrics.right is called in JSON; NULL: the model has no `score`.
 * cli_right_text() - it as text; of a language model its perplexity (labels.c). */
int cli_take_labels(cli_job *job, const ps_dataset *ds, const char *option);
const char *cli_right(const cli_job *job);
const char *cli_right_text(const cli_job *job, double right, double loss, char text[96]);
/* The shares of a mix, a line each, and how many epochs of each part @n_sequences are (0: left
 * out). Prints nothing where the data has no weights. */
void cli_print_mix(FILE *out, const ps_dataset *ds, uint64_t seq_len, uint64_t n_sequences);
/* The tokens of a run's data, steps an epoch and epochs in the run; of a mix its shares. */
void cli_print_data(FILE *out, const cli_job *job, const ps_dataset *ds);
/* cli_arena_note() - say where the run's own host memory is more than 5% off the plan's rates. The
 * machine's file keeps what was measured, and the next run is planned with it.
 * cli_rates_remember() - the machine's file keeps the rates that the steps had, for later runs. */
void cli_arena_note(ps_trainer *t, cli_progress *p);
void cli_rates_remember(const ps_trainer *t);
ps_train_config cli_train_config(const cli_job *job, ps_dataset *ds, ps_dataset *val, bool resumed);
int cli_train_job(cli_job *job); /* all of a training after its options are parsed; exit code */
struct cli_progress {
  bool quiet, tty, line_open;
  uint64_t first_step;
  uint64_t device_mem_bytes, host_mem_bytes; /* the caps or, without one, what the plan takes */
  double started_s, printed_s;
  const char *loading; /* the last printed stage of loading */
  double val_loss;     /* the last validation's; NAN: none */
};
double cli_now_s(void);
void cli_progress_begin(cli_progress *p, const cli_job *job);
void cli_progress_load(cli_progress *p, const char *what, uint64_t done_bytes,
                       uint64_t total_bytes);
void cli_progress_step(cli_progress *p, const ps_step_metrics *m, const cli_step *s);
/* "searching a plan, 8 s: 1242 evaluated, best 11402 tokens/s". On a terminal after half a second,
 * elsewhere a line after each 5 s: most searches are shorter. @best 0: no plan fits so far. */
void cli_progress_search(cli_progress *p, uint64_t n_evaluated, double best_tokens_per_s);
/* "plan 3 of 12, 8 s" */
void cli_progress_count(cli_progress *p, const char *what, uint64_t done, uint64_t total);
void cli_progress_note(cli_progress *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* cli_warnings(), but below an open line; until the next call of cli_warnings(). */
void cli_warnings_over(cli_progress *p);
void cli_progress_end(cli_progress *p);   /* ends an open line */
void cli_progress_clear(cli_progress *p); /* removes an open line from the terminal */

/* The times of the first CLI_WARMUP_STEPS steps do not count in the median. */
enum { CLI_MAX_STALLS = 256, CLI_RECENT_LOSSES = 50, CLI_WARMUP_STEPS = 2 };
/* The results of a run, for its summary. */
struct cli_run_result {
  uint64_t n_done, n_wanted, tokens;
  /* loss_recent: a ring; step i is at i modulo CLI_RECENT_LOSSES */
  double loss_first, loss_recent[CLI_RECENT_LOSSES], wall_s;
  /* the median of the steps after the warm-up; of all steps where there are no more */
  double step_s_median, predicted_step_s;
  uint64_t device_peak_bytes, host_peak_bytes;
  /* set by cli_stream_fractions() */
  double busy[PS_MAX_STREAMS], wait[PS_MAX_STREAMS];
  uint32_t n_streams;
  /* what streams waited for, measured and predicted; the longest wait of a stream comes first */
  ps_stall stall[CLI_MAX_STALLS], planned_stall[CLI_MAX_STALLS];
  uint64_t n_stalls, n_planned_stalls;
  /* how long streams ran which ops, measured and predicted, the longest of a stream first; owned,
   * NULL without a trace */
  ps_op_time *op_time, *planned_op_time;
  uint64_t n_op_times, n_planned_op_times;
  ps_throughput throughput;        /* zeros without a trace */
  bool interrupted, saved, failed; /* failed: the trainer stopped with an error */
  bool beside; /* the model is not in --out, which has got another one meanwhile */
  char *metrics_path, *plan_path, *timeline_path;
  char *other_out; /* where the model was saved instead of --out */
  /* validations: how many, their seconds, the last one and the steps before it */
  uint64_t n_skipped; /* steps of this training, also before a resume */
  uint64_t n_validations, val_step;
  double val_s;
  ps_validation val_last;
};
/* cli_save() - save the model into job->out (save.c). Where that fails the user is asked for
 * another directory. Without a terminal the save is tried again for job->save_wait seconds. Exit
 * code. */
int cli_save(cli_job *job, ps_trainer *t, cli_progress *p, cli_run_result *r);
/* cli_stream_fractions() - the fractions of the traced time in which each stream was busy and in
 * which it waited for another stream (summary.c). */
void cli_stream_fractions(cli_run_result *r, const ps_trace_event *events, uint64_t n);
void cli_note_loss(cli_run_result *r, double loss);
/* cli_run_steps() - train, with two steps in flight (loop.c). After Ctrl-C, or when metrics cannot
 * be written, no further step is submitted, and those in flight are waited for, so that the model
 * can be saved. Exit code. */
int cli_run_steps(cli_job *job, ps_trainer *t, cli_progress *p, FILE *metrics, cli_run_result *r);
/* cli_beside_plan() - fill in the stalls and the ops' times, each measured and predicted, and the
 * throughput. Exit code. */
int cli_beside_plan(cli_run_result *r, const ps_plan *plan, const ps_trace_event *events,
                    uint64_t n);
void cli_summary_print(FILE *out, const cli_job *job, const cli_run_result *r);
/* cli_summary_write() - write summary.json into the run directory and, with --json, to stdout. */
void cli_summary_remove(const cli_job *job); /* that of an earlier run */
int cli_summary_write(const cli_job *job, const cli_run_result *r);
/* cli_summary_show() - print summary.json as it is or, without one, that of @r. Exit code. */
int cli_summary_show(const cli_job *job, const cli_run_result *r);

/* ---- subcommands: argv[0] is the subcommand -------------------------------------------------- */
int cli_train(int argc, char **argv);
int cli_plan(int argc, char **argv);
int cli_eval(int argc, char **argv);
int cli_generate(int argc, char **argv);
int cli_info(int argc, char **argv);
int cli_demo(int argc, char **argv);
int cli_profile(int argc, char **argv);
int cli_version(int argc, char **argv);

#endif
