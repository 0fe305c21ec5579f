/* pace.h - trainers whose steps take the time that their plan's description says, on a clock of
 * their own, on a machine that becomes slower and fast again: for tests alone. */
#ifndef PS_TRAIN_PACE_H
#define PS_TRAIN_PACE_H
#include "train/trainer.h"

/* How many times longer the work of ops takes in steps [from, to) of the training, which count from
 * 0. */
typedef struct ps__slow {
  double h2d, d2h; /* copies */
  double host;     /* sums of gradients on the host, and updates, also those of a device's arena */
  uint64_t from, to;
  /* Or another machine in these steps, borrowed until the trainer is destroyed; NULL: as above.
   * Then ops that run together slow each other, by the description, in all steps: each takes what
   * it takes in the simulation of a steady step. */
  const ps_hardware *other;
  double scatter; /* copies and host ops take up to so much longer or shorter, as a fraction */
  double disk;    /* reads and writes of the disk; 0: as fast as before */
} ps__slow;

/* ps__trainer_pace() - trainers created from now on are paced; NULL: no more. On the CPU backend
 * alone. Without another machine, ops that run together do not slow each other: give the planner a
 * description with more memory bandwidth and CPUs than they ask for, and it plans the times that
 * are measured. */
PS_API void ps__trainer_pace(const ps__slow *slow);

/* ps__pace_attach() - pace the trainer's engine, which has had no run, if that was asked for. The
 * machine is that of the plan which the trainer was created with. PS_ENOMEM.
 * ps__pace_free() - after the engine. */
ps_status ps__pace_attach(ps_trainer *t);
void ps__pace_free(ps_trainer *t);
#endif
