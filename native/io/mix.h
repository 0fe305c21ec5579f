/* mix.h - datasets that are read in turn, by weight. */
#ifndef PS_IO_MIX_H
#define PS_IO_MIX_H
#include "io/io.h"

/* A file or a folder of shards with its weight. */
typedef struct ps__source {
  char *path; /* owned */
  double weight;
  size_t first_shard, n_shards;
} ps__source;

typedef struct ps__sources {
  ps__source *item;
  size_t n, cap;
} ps__sources;

/* ps__mix_parse() - append the sources of @text: one for each "PATH:WEIGHT", with commas between
 * them. A path that exists as it stands is one source of weight 0, which stands for none. The
 * caller calls ps__mix_free(), on failure too. Errors: PS_EINVAL, PS_ENOMEM. */
ps_status ps__mix_parse(const char *text, ps__sources *s);
void ps__mix_free(ps__sources *s);

/* ps__mix_check() - all sources have a weight, or none has. Errors: PS_EINVAL. */
ps_status ps__mix_check(const ps__sources *s);

/* ps__mix_at() - which source is read at position @pos, and how often it was read before.
 *
 * The first source gets floor(pos Q + phase) of the first pos positions, Q being its share of the
 * weights; the others share the rest in the same way, one after the other. So after any number of
 * positions each source has its share, to one sequence for each source before it. @phase is drawn
 * from the seed, 0 where @shuffle is 0. Time: O(n). */
size_t ps__mix_at(const ps__sources *s, uint64_t pos, uint64_t seed, int shuffle, uint64_t *count);
#endif
