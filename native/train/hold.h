/* hold.h - what of the state a checkpoint still reads while training goes on. Internal.
 *
 * A checkpoint of n steps of the run is written out of the arrays that the trainer works on. Each
 * unit has two parts, its weights (the master copy where there is one) and its optimizer's states.
 * The writer may read a part after the part's update of step n - 1, and the part's update of step n
 * waits for the writer to have read it. Steps count from 0, the run's first.
 *
 * Who waits, and who says that an update is done:
 *   unit updated on the host      UPDATE, UPDATE_STATE: themselves
 *   embedding on the host         UPDATE, and a GATHER that updates rows
 *   unit updated on the device    UPDATE waits, on a GPU in the thread that submits: all that is
 *                                 submitted then runs without the writer. REPORT says that the
 *                                 updates are done, because it reads what is sent to the host last.
 *   state on the disk             UPDATE waits; REPORT says that it is there, as it waits for the
 *                                 last copy to the disk
 * Device-resident state is read by ps__engine_read() meanwhile.
 *
 * Where one of these waits, all updates of step n - 1 and its report are done: they come before on
 * the same stream, or the forward pass of step n has read their weights. So the writer goes on, and
 * the two never wait for each other. A failure of step n - 1 therefore finds nobody waiting.
 *
 * Threads: updates wait and report on the streams' threads; the writer's threads await and release;
 * the trainer's caller begins; any thread stops, also a signal handler. */
#ifndef PS_TRAIN_HOLD_H
#define PS_TRAIN_HOLD_H
#include "core/core.h"
#include <stdatomic.h>

enum { PS__PART_WEIGHTS, PS__PART_STATE, PS__N_PARTS };
typedef struct ps__hold ps__hold;

/* PS_ENOMEM. NULL is a no-op of destroy. */
ps_status ps__hold_create(ps__hold **out, uint32_t n_units);
void ps__hold_destroy(ps__hold *h);

/* ---- updates --------------------------------------------------------------------------------- */
/* Wait until the update of @step may write the part. PS_ECANCELLED: the hold was stopped by a
 * cancel meanwhile. Without a checkpoint this is one atomic load. */
ps_status ps__hold_wait(ps__hold *h, uint32_t unit, uint32_t part, uint64_t step);
/* The update of @step of the part is done. One thread at a time for each part. */
void ps__hold_made(ps__hold *h, uint32_t unit, uint32_t part, uint64_t step);
/* The report of @step ran. */
void ps__hold_reported(ps__hold *h, uint64_t step);
/* The caller has done what it does after the metrics of @n_steps steps: a checkpoint of them may
 * get its name. A run that goes on from it thus finds these steps in the caller's log. */
void ps__hold_seen(ps__hold *h, uint64_t n_steps);

/* ---- the writer ------------------------------------------------------------------------------ */
/* From now on hold the state after @n_steps steps, of which none after them is submitted yet. The
 * hold before has been released. */
void ps__hold_begin(ps__hold *h, uint64_t n_steps);
/* Wait for the part's update of the last of these steps; ps__hold_await_reported(): for its report;
 * ps__hold_await_seen(): for the caller to have seen that too. PS_ESTATE: it will not come.
 * PS_ECANCELLED. */
ps_status ps__hold_await(ps__hold *h, uint32_t unit, uint32_t part);
ps_status ps__hold_await_reported(ps__hold *h);
ps_status ps__hold_await_seen(ps__hold *h);
/* The part was read. One thread at a time for each part. */
void ps__hold_release(ps__hold *h, uint32_t unit, uint32_t part);
void ps__hold_release_all(ps__hold *h);
/* PS_ECANCELLED after a cancel, else PS_OK. */
ps_status ps__hold_check(const ps__hold *h);
/* Nanoseconds that updates have waited since ps__hold_begin(). */
uint64_t ps__hold_waited_ns(const ps__hold *h);

/* No step will go on. Parts whose updates were made can still be written, unless @cancel. */
void ps__hold_stop(ps__hold *h, bool cancel);
#endif
