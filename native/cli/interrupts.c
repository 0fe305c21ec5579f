/* interrupts.c - what a signal means while a run goes on. The first Ctrl-C lets the steps in flight
 * or the save finish; the second stops at once. SIGTERM counts as Ctrl-C. SIGHUP counts as the
 * first Ctrl-C alone, because a closed terminal may send it more than once. */
#include "cli/cli.h"
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

static _Atomic(ps_trainer *) running; /* the trainer while it steps, else NULL */
static atomic_bool nothing_written = true;
static atomic_int n_interrupts;
static atomic_int saving; /* cli_saves: it may be ended anywhere, see ps_trainer_save() */
static const char *_Atomic first_words; /* printed at the first Ctrl-C; NULL: nothing */

int cli_interrupts(void) { return atomic_load(&n_interrupts); }
void cli_saving(cli_saves what) { atomic_store(&saving, (int)what); }
void cli_interrupts_say(const char *words) { atomic_store(&first_words, words); }
void cli_interrupts_written(void) { atomic_store(&nothing_written, false); }
void cli_interrupts_cancel(ps_trainer *t) { atomic_store(&running, t); }

static void on_interrupt(int signal_number) {
  if (atomic_load(&nothing_written))
    _exit(CLI_INTERRUPTED);
  if (signal_number == SIGHUP && atomic_load(&n_interrupts))
    return;
  int n = atomic_fetch_add(&n_interrupts, 1) + 1;
  const int what = atomic_load(&saving);
  if (what) {
    static const char *const said[][2] = {
        {"\npenstock: the model is being saved; Ctrl-C again stops at once\n",
         "\npenstock: stopped at once; --out has its old contents or the whole new model\n"},
        {"\npenstock: a checkpoint is being written; Ctrl-C again stops at once\n",
         "\npenstock: stopped at once; the checkpoints before this one are whole\n"},
        {"\npenstock: waiting until the other tasks have ended; Ctrl-C again ends this one at "
         "once\n",
         "\npenstock: ended before the other tasks\n"}};
    const char *words = said[what - 1][n > 1];
    const ssize_t heard = write(STDERR_FILENO, words, strlen(words));
    (void)heard; /* nobody reads stderr: nothing is lost */
    if (n > 1)
      _exit(CLI_INTERRUPTED);
    return;
  }
  ps_trainer *t = atomic_load(&running);
  const char *words = atomic_load(&first_words);
  if (n == 1 && t && words && write(STDERR_FILENO, words, strlen(words)) < 0)
    return; /* nobody reads stderr: nothing is lost */
  if (n > 1 && t)
    ps_trainer_cancel(t);
}

void cli_interrupts_catch(void) {
  struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  struct sigaction before;
  if (sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler != SIG_IGN) /* nohup */
    sigaction(SIGHUP, &action, NULL);
}
