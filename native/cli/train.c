/* train.c - `penstock train`: refuses bad input before anything is written, then trains, reports
 * and saves. */
#include "cli/cli.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- before the run -------------------------------------------------------------------------- */

/* Whether --out has a model is checked later, once it is known from what the run goes on. */
static int check_outputs(const cli_job *job) {
  struct stat in, out;
  if (job->out && stat(job->model, &in) != 0)
    return cli_fail(CLI_REFUSED, "--model %s cannot be read: %s", job->model, strerror(errno));
  const bool exists = job->out && stat(job->out, &out) == 0;
  if (job->out && !exists && errno != ENOENT && errno != ENOTDIR)
    return cli_fail(CLI_REFUSED, "--out %s cannot be read: %s", job->out, strerror(errno));
  if (exists && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
    return cli_fail(CLI_REFUSED,
                    job->default_out
                        ? "the trained model would be saved in %s, which is the model directory "
                          "itself: give --out DIR or another --run-dir, or --no-save"
                        : "--out %s is the model directory itself: give another one",
                    job->out);
  int code = CLI_OK;
  if (job->default_out) /* below the run directory, which the user named */
    code = cli_folder_check(job->run_dir, "run-dir");
  if (code == CLI_OK && job->out)
    code = cli_out_check(job, job->out);
  if (code == CLI_OK && !job->default_out)
    code = cli_folder_check(job->run_dir, "run-dir");
  return code == CLI_OK ? cli_run_file_check(job) : code;
}

/* A run that goes on from its newest checkpoint replaces the model that it saved before. */
static int check_out_model(cli_job *job, const ps_checkpoint *from) {
  cli_saved_model own;
  if (!job->out)
    return CLI_OK;
  const int code = cli_out_note_seen(job);
  if (code != CLI_OK ||
      (from && (strcmp(job->resume, "auto") == 0 || strcmp(job->resume, "latest") == 0) &&
       cli_out_is_own(job, &own)))
    return code;
  return cli_out_check_empty(job, job->out);
}

/* The checkpoint that the run goes on from leaves no step to train, and --out has its model. */
static bool is_finished(const cli_job *job) {
  static const char *const dtypes[] = {
      [PS_F32] = "fp32", [PS_BF16] = "bf16", [CLI_MXFP4] = "mxfp4"};
  cli_saved_model m;
  if (!job->checkpoints.newest || !job->train_config.total_steps ||
      job->first_step != job->train_config.total_steps)
    return false;
  return !job->out || (cli_out_is_own(job, &m) && m.step == job->train_config.total_steps &&
                       strcmp(m.dtype, dtypes[job->save_dtype]) == 0);
}

int cli_open_data(cli_job *job, ps_dataset **out) {
  if (!job->data.n)
    return cli_fail(CLI_REFUSED,
                    "--data is missing: give token shards, or text to the Python command");
  ps_dataset *ds = NULL;
  ps_status st = ps_dataset_open(&ds, job->data.item, job->data.n, job->config.vocab_size);
  if (st != PS_OK)
    return cli_fail_given("--data", st);
  if ((st = ps_dataset_check(ds, job->plan_config.seq_len)) != PS_OK) {
    int code = cli_fail_status(st, true);
    ps_dataset_close(ds);
    return code;
  }
  const int code = cli_take_labels(job, ds, "--data");
  if (code != CLI_OK) {
    ps_dataset_close(ds);
    return code;
  }
  job->data_marks_documents = ps_dataset_marks_documents(ds) != 0;
  *out = ds;
  return CLI_OK;
}

ps_train_config cli_train_config(const cli_job *job, ps_dataset *ds, ps_dataset *val,
                                 bool resumed) {
  ps_train_config cfg = job->train_config;
  cfg.trust_rates = cfg.replan == PS_REPLAN_OFF;
  cfg.trace_from = job->profile_steps ? job->profile_first - 1 : 0;
  cfg.trace_to = job->profile_last;
  cfg.init_weights = cfg.init_weights && (!resumed || job->plan_config.lora.rank);
  if (resumed)
    cfg.adapter_dir = NULL;
  cfg.dataset = ds;
  cfg.val_dataset = val;
  return cfg;
}

/* ---- output files ---------------------------------------------------------------------------- */

/* Makes and locks the run directory, and moves another run's files aside. A directory that it made
 * is removed where that fails. Where steps are left, writes plan.json, run.toml and a metrics.jsonl
 * with the steps before this run, of which a new run has none; removes the summary of the steps
 * before. */
static int open_outputs(cli_job *job, cli_progress *p, cli_run_result *r, FILE **metrics,
                        int *lock) {
  struct stat st;
  const bool makes = stat(job->run_dir, &st) != 0 && errno == ENOENT;
  int failed = cli_folder_make(job->run_dir);
  if (failed)
    return cli_fail(CLI_FAILED, "%s cannot be made: %s", job->run_dir, strerror(failed));
  int code = cli_run_lock(job->run_dir, true, lock);
  if (code == CLI_OK)
    code = cli_earlier_move(job, p);
  if (code != CLI_OK && makes) {
    cli_run_unlock(job->run_dir, *lock);
    *lock = -1;
    (void)rmdir(job->run_dir); /* where it is empty */
  }
  if (code != CLI_OK)
    return code;
  cli_leftovers_clear(job, true);
  if (job->out && cli_out_seen_pending(job) && (code = cli_out_note_seen(job)) != CLI_OK)
    return code;
  r->metrics_path = cli_path_join(job->run_dir, "metrics.jsonl");
  r->plan_path = cli_path_join(job->run_dir, "plan.json");
  if (!r->metrics_path || !r->plan_path)
    return cli_fail(CLI_FAILED, "out of memory");
  if (!r->n_wanted)
    return CLI_OK;
  cli_summary_remove(job);
  code = cli_file_replace(r->plan_path, ps_plan_json(job->plan), NULL);
  if (code == CLI_OK)
    code = cli_run_file_write(job);
  if (code == CLI_OK)
    code = cli_samples_begin(job);
  return code == CLI_OK ? cli_metrics_keep(r->metrics_path, job->first_step, metrics) : code;
}

/* ---- the run --------------------------------------------------------------------------------- */

/* Writes timeline.json: the events, and what of both arenas they used. */
static ps_status write_timeline(const cli_job *job, const cli_run_result *r,
                                const ps_trace_event *events, uint64_t n) {
  const char *names[PS_MAX_STREAMS];
  uint64_t n_gauges = 0;
  for (uint32_t s = 0; s < r->n_streams; s++)
    names[s] = ps_plan_stream_name(job->plan, s);
  ps_status st = ps_plan_memory(job->plan, events, n, NULL, 0, &n_gauges);
  ps_trace_gauge *gauges = st == PS_OK ? malloc((n_gauges + 1) * sizeof *gauges) : NULL;
  if (gauges)
    st = ps_plan_memory(job->plan, events, n, gauges, n_gauges, &n_gauges);
  if (st == PS_OK) /* without memory for them, without gauges */
    st = ps_trace_write_json(r->timeline_path, ps_plan_schedule(job->plan), events, n, names,
                             gauges, gauges ? n_gauges : 0);
  free(gauges);
  return st;
}

/* Writes timeline.json from the traced steps, and fills in the streams' fractions and stalls. */
static int report_trace(const cli_job *job, ps_trainer *t, cli_run_result *r) {
  uint64_t n = 0;
  r->n_streams = ps_schedule_n_streams(ps_plan_schedule(job->plan));
  ps_status st = ps_trainer_trace(t, NULL, 0, &n);
  ps_trace_event *events = st == PS_OK && n ? malloc(n * sizeof *events) : NULL;
  if (st == PS_OK && n && !events)
    return cli_fail(CLI_FAILED, "out of memory for the trace of %llu ops", (unsigned long long)n);
  if (events)
    st = ps_trainer_trace(t, events, n, &n);
  if (st == PS_OK && events) {
    cli_stream_fractions(r, events, n);
    if (cli_beside_plan(r, job->plan, events, n) != CLI_OK) {
      free(events);
      return CLI_FAILED;
    }
    r->timeline_path = cli_path_join(job->run_dir, "timeline.json");
    st = r->timeline_path ? write_timeline(job, r, events, n) : PS_OK;
  }
  free(events);
  return st == PS_OK ? CLI_OK : cli_fail_status(st, false);
}

static void say_finished(const cli_job *job, cli_progress *p) {
  cli_progress_note(p, "all %llu steps are done, and nothing is changed",
                    (unsigned long long)job->train_config.total_steps);
  if (job->checkpoints.newest)
    cli_progress_note(p, "the run is that of %s: another training takes another --run-dir",
                      job->checkpoints.newest);
}

/* The run of a training whose steps are all done: its model may not be saved yet. The files of the
 * run stay as they are. */
static int save_alone(cli_job *job, ps_trainer *t, cli_progress *p, cli_run_result *r) {
  int code = CLI_OK;
  cli_interrupts_cancel(NULL);
  if (!job->out || is_finished(job))
    say_finished(job, p);
  else {
    cli_progress_note(p, "all %llu steps are done: the model alone is saved",
                      (unsigned long long)job->train_config.total_steps);
    code = cli_save(job, t, p, r);
  }
  if (code == CLI_OK && job->json)
    code = cli_summary_show(job, r);
  if (code == CLI_OK && cli_interrupts())
    return CLI_INTERRUPTED;
  return code == CLI_OK && r->beside ? CLI_FAILED : code;
}

/* Another rank than 0 and --checkpoint-every 0 write none. */
static bool writes_at_stop(const cli_job *job) {
  return !job->checkpoint_given || job->checkpoint_every.steps || job->checkpoint_every.seconds > 0;
}

static int run_and_save(cli_job *job, ps_trainer *t, cli_progress *p, cli_run_result *r,
                        int *lock) {
  FILE *metrics = NULL;
  if (!job->out)
    cli_progress_note(p, "the trained model will not be saved: --no-save was given");
  if (!job->quiet) {
    static char words[160]; /* static: the signal handler may read it at any time */
    char step[32];
    snprintf(
        words, sizeof words,
        "\npenstock: stopping after the steps in flight (%s a step predicted)%s%s; Ctrl-C again "
        "stops at once\n",
        cli_duration(step, job->report.step_s), writes_at_stop(job) ? ", then a checkpoint" : "",
        job->out ? ", then saving" : "");
    cli_interrupts_say(words);
  }
  cli_interrupts_written();
  cli_interrupts_cancel(t);
  const bool writes = job->task.rank == 0;
  int code = writes ? open_outputs(job, p, r, &metrics, lock) : CLI_OK;
  if (code != CLI_OK)
    return code;
  if (writes && !r->n_wanted)
    return save_alone(job, t, p, r);
  double started = p->started_s = cli_now_s();
  job->checkpoints.due_s = started + job->checkpoint_every.seconds;
  code = cli_run_steps(job, t, p, metrics, r);
  cli_interrupts_cancel(NULL);
  r->wall_s = cli_now_s() - started;
  if (metrics && fclose(metrics) != 0 && code == CLI_OK)
    code = cli_fail(CLI_FAILED, "%s cannot be written: %s", r->metrics_path, strerror(errno));
  if (code == CLI_OK && r->n_done && writes)
    code = report_trace(job, t, r);
  if (job->out && (r->n_done || job->first_step) && code != CLI_INTERRUPTED) {
    /* After an error too. Its message says where some weights may be a step ahead of the others. */
    int kept = cli_save(job, t, p, r);
    code = code == CLI_OK ? kept : code;
    r->interrupted = r->interrupted || cli_interrupts();
  }
  if (code == CLI_OK && !job->json && !job->quiet)
    cli_summary_print(stdout, job, r);
  if (code == CLI_OK && writes)
    code = cli_summary_write(job, r);
  if (code == CLI_OK && r->interrupted)
    return CLI_INTERRUPTED;
  return code == CLI_OK && r->beside ? CLI_FAILED : code;
}

/* Prints the plan before memory is reserved and weights are loaded, which may take minutes. */
static void show_plan(const cli_job *job, cli_progress *p) {
  const double long_s = 180;
  char time[32];
  cli_progress_note(p, "plan");
  if (!p->quiet)
    cli_put_lines(stderr, ps_plan_text(job->plan));
  if (job->report.step_s > long_s)
    cli_progress_note(p,
                      "the first step is predicted to take %s: lower --%s (%llu now), or take a "
                      "smaller model or a faster device",
                      cli_duration(time, job->report.step_s),
                      job->report.n_sequences > 1 ? "tokens-per-step" : "seq-len",
                      (unsigned long long)job->report.tokens_per_step);
  if (job->out && !job->default_out)
    cli_folder_note(p, job->out, "out");
  if (!job->out || strcmp(job->out, job->run_dir) != 0)
    cli_folder_note(p, job->run_dir, "run-dir");
  cli_val_note(job, p);
  cli_samples_note(job, p);
}

typedef struct opening {
  const cli_job *job;
  cli_progress *p;
} opening;

/* The trainer's first call comes after it has checked the model directory. */
static void on_progress(void *user, const char *what, uint64_t done_bytes, uint64_t total_bytes) {
  opening *o = user;
  if (!o->p->loading)
    show_plan(o->job, o->p);
  cli_progress_load(o->p, what, done_bytes, total_bytes);
}

static ps_status open_trainer(cli_job *job, const ps_train_config *cfg, const ps_checkpoint *from,
                              cli_progress *p, ps_trainer **t) {
  opening o = {job, p};
  cli_progress_begin(p, job);
  const ps_status st = from
                           ? ps_trainer_resume(t, job->model, job->plan, cfg, from, on_progress, &o)
                           : ps_trainer_create(t, job->model, job->plan, cfg, on_progress, &o);
  cli_progress_end(p);
  return st;
}

enum { FINISHED = -1 }; /* of train(): nothing is left to do */

static int train(cli_job *job, ps_checkpoint **from, int *lock) {
  ps_dataset *ds = NULL, *val = NULL;
  ps_status st;
  int code = cli_defaults_check(job);
  if (code == CLI_OK)
    code = cli_defaults_out(job);
  if (code == CLI_OK)
    code = cli_gpus_check(&job->device);
  if (code == CLI_OK)
    code = cli_task_meet(job);
  cli_task_follow(job);
  const bool first = job->task.rank == 0;
  if (code == CLI_OK)
    code = cli_job_check(job);
  if (code == CLI_OK)
    code = cli_profile_parse(job);
  if (code == CLI_OK && first)
    code = check_outputs(job);
  if (code == CLI_OK && first)
    code = cli_run_lock(job->run_dir, false, lock);
  cli_interrupts_catch();
  if (code == CLI_OK)
    code = cli_open_data(job, &ds);
  if (code == CLI_OK && job->resume) {
    cli_warnings(true); /* also with --quiet: a damaged checkpoint is passed over */
    code = cli_resume_open(job, from);
    cli_warnings(false); /* the settings are checked twice, and their warnings printed once */
  }
  if (code == CLI_OK)
    code = cli_defaults_read(job, *from);
  if (code == CLI_OK && !job->hosts && is_finished(job))
    code = FINISHED;
  if (code == CLI_OK && first && job->default_out) /* another run there says more */
    code = cli_earlier_check(job);
  if (code == CLI_OK && first)
    code = check_out_model(job, *from);
  if (code == CLI_OK && first)
    code = cli_earlier_check(job);
  if (code == CLI_OK && first)
    code = cli_val_open(job, ds, &val);
  if (code == CLI_OK)
    code = cli_samples_open(job);
  ps_train_config cfg = cli_train_config(job, ds, val, *from != NULL);
  /* checked before the search, which takes longer */
  if (code == CLI_OK &&
      (st = ps_train_config_check(&cfg, (ps_optimizer)job->plan_config.optimizer)) != PS_OK)
    code = cli_fail_status(st, true);
  if (code == CLI_OK)
    code = cli_task_measure(job);
  if (code == CLI_OK && first)
    code = cli_defaults_tokens(job, ds);
  if (code == CLI_OK && val)
    cli_val_choose(job, cli_expected_steps(job, ds), val);
  if (!first)
    code = cli_task_share_plan(job, code);
  if (code == CLI_OK)
    code = cli_job_plan(job);
  if (first)
    code = cli_task_share_plan(job, code);
  if (code == CLI_OK)
    code = cli_defaults_run(job, ds);
  if (code == CLI_OK)
    code = !job->hosts && is_finished(job) ? FINISHED : cli_profile_check(job);
  if (code != CLI_OK) {
    ps_dataset_close(ds);
    ps_dataset_close(val);
    return code;
  }
  cli_progress p;
  ps_trainer *t = NULL;
  char *run = cli_run_file_text(job); /* NULL, without memory: the manifests lack it */
  cfg.run = run;
  cfg.total_steps = job->train_config.total_steps;
  cfg.warmup_steps = job->train_config.warmup_steps;
  cli_warnings(!job->quiet);
  if (job->follows_aloud) /* those lines name the task that they are of */
    cli_warnings_of("rank ");
  st = open_trainer(job, &cfg, *from, &p, &t);
  if (st != PS_OK && cli_job_pins_less(job)) {
    code = cli_job_plan_pinned(job);
    if (code == CLI_OK)
      st = open_trainer(job, &cfg, *from, &p, &t);
  }
  free(run);
  if (st == PS_OK) {
    ps_train_config defaults = {.struct_bytes = sizeof defaults};
    ps_train_config_init(&defaults);
    if (!job->quiet)
      cli_print_data(stderr, job, ds);
    if (job->hosts)
      cli_progress_note(&p, "%s", ps_hosts_transport_text(job->hosts));
    if (*from)
      cli_progress_note(&p, "goes on from %s, after step %llu", ps_checkpoint_dir(*from),
                        (unsigned long long)job->first_step);
    cli_arena_note(t, &p);
    cli_defaults_note(job, &p);
    cli_checkpoint_note(job, &p);
    if (job->train_config.max_skips != defaults.max_skips &&
        job->plan_config.non_finite != PS_NON_FINITE_SKIP)
      cli_progress_note(&p, "--max-skips counts nothing here: only --non-finite skip skips steps");
    if (job->train_config.convert_state && !*from)
      cli_progress_note(&p, "--convert-state converts nothing here: this run begins anew");
  }
  cli_run_result r = {.n_wanted = job->train_config.total_steps - job->first_step};
  ps_plan *const first_plan = job->plan;
  if (code == CLI_OK)
    code = st == PS_OK ? run_and_save(job, t, &p, &r, lock) : cli_fail_status(st, true);
  if (st == PS_OK)
    cli_rates_remember(t);
  job->plan = first_plan;
  ps_trainer_destroy(t);
  ps_dataset_close(ds);
  ps_dataset_close(val);
  free(r.metrics_path);
  free(r.plan_path);
  free(r.timeline_path);
  free(r.op_time);
  free(r.planned_op_time);
  free(r.other_out);
  return code;
}

/* Of a training that has ended. */
static int end_finished(const cli_job *job, bool locked) {
  cli_progress p;
  const cli_run_result r = {.saved = job->out != NULL};
  cli_progress_begin(&p, job);
  cli_leftovers_clear(job, locked);
  say_finished(job, &p);
  return job->json ? cli_summary_show(job, &r) : CLI_OK;
}

int cli_train_job(cli_job *job) {
  int lock = -1;
  ps_checkpoint *from = NULL;
  int code = train(job, &from, &lock);
  if (code == FINISHED)
    code = end_finished(job, lock >= 0);
  code = cli_task_end(job, code);
  ps_checkpoint_close(from);
  if (lock >= 0)
    cli_run_unlock(job->run_dir, lock);
  return code;
}

int cli_train(int argc, char **argv) {
  static cli_job job; /* the stack may be small */
  static cli_option options[CLI_MAX_OPTIONS];
  cli_job_init(&job);
  cli_job_options(&job, options, true);
  const cli_command command = {
      .usage = "train --model DIR --data SHARDS... --seq-len N [--device-mem SIZE] [--host-mem "
               "SIZE] [OPTIONS]",
      .about =
          "Trains the model under both memory caps: plans the step, streams what does not fit,\n"
          "and writes metrics.jsonl (an object a step), run.toml, plan.json, summary.json and\n"
          "timeline.json.\n"
          "Caps that are too small and bad input are refused before anything is written, with\n"
          "exit code 2.\n"
          "The first Ctrl-C lets the steps in flight finish, writes a checkpoint and saves the\n"
          "model. The second one stops at once. SIGTERM does the same, SIGHUP only the first.\n"
          "Where the model cannot be saved at the end, the terminal asks for another directory;\n"
          "without a terminal the save is tried again for --save-wait seconds. A failure to\n"
          "write progress or metrics never loses the model.",
      .example = "penstock train --model my_8B_model --data shards/ --device-mem 20GiB --host-mem "
                 "80GiB --seq-len 4096 --steps 1000 "
                 "--lr 2e-5 --lr-schedule cosine --warmup-steps 50 --out trained",
      .options = options,
      .job = &job,
      .hint = cli_job_hint,
  };
  int code = cli_job_parse(&command, argc, argv);
  if (code == CLI_OK)
    code = cli_task_read(&job.task);
  if (code == CLI_OK)
    code = cli_train_job(&job);
  cli_job_free(&job);
  return code < 0 ? CLI_OK : code;
}
