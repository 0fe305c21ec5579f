/* ranges.h - names of ops for profilers such as Nsight Systems: NVTX ranges on the threads that run
 * ops or submit them.
 *
 * An op of a chunk lies in the ranges of its step, round, layer and chunk. All other ops, copies
 * among them, lie in their step's range alone and say the rest in their own name: a thread that
 * submits several streams' ops opens ranges of one stream between those of another.
 *
 * The CUDA backend tells the profiler. Where none is attached nothing is named, and an op costs one
 * comparison. */
#ifndef PS_ENGINE_RANGES_H
#define PS_ENGINE_RANGES_H
#include "engine/backend.h"
#include "engine/schedule.h"

enum { PS__RANGE_STEP, PS__RANGE_ROUND, PS__RANGE_LAYER, PS__RANGE_CHUNK, PS__RANGE_LEVELS };
enum { PS__RANGE_TEXT = 96 }; /* BYTES of a name, its end included */

/* The ranges that an op lies in, outermost first. */
typedef struct ps__range_path {
  uint64_t number[PS__RANGE_LEVELS];
  uint32_t n;
} ps__range_path;
ps__range_path ps__range_path_of(const ps__op *op, uint64_t step);
/* ps__range_common() - how many outermost ranges two paths share. */
uint32_t ps__range_common(const ps__range_path *a, const ps__range_path *b);
/* ps__range_name() - "step 12", "round 0", "layer 3" or "chunk 2".
 * ps__range_op_name() - "gemm qkv", "adamw of layer 3", or of a copy on stream @stream "h2d weights
 * of layer 3, round 0". */
void ps__range_name(char text[PS__RANGE_TEXT], const ps__range_path *path, uint32_t level);
void ps__range_op_name(char text[PS__RANGE_TEXT], const ps__op *op, const char *stream);

/* The open ranges of a thread that runs ops. */
typedef struct ps__ranges {
  const ps__backend *backend; /* NULL: no profiler is attached */
  ps__range_path open;
} ps__ranges;
void ps__ranges_begin(ps__ranges *r, const ps__backend *backend);
/* ps__ranges_enter() - leave and enter ranges so that @op lies in its own, and open that.
 * ps__ranges_leave() - close the op's own. ps__ranges_end() - close all. */
void ps__ranges_enter(ps__ranges *r, const ps__op *op, const char *stream, uint64_t step);
void ps__ranges_leave(ps__ranges *r);
void ps__ranges_end(ps__ranges *r);

#endif
