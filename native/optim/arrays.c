/* arrays.c - a parameter's arrays from an element on. */
#include "optim/optim.h"

ps__arrays ps__arrays_from(const ps__arrays *a, uint32_t recipe, uint64_t first) {
  const ps__recipe *r = &ps__recipes[recipe];
  ps__arrays from = {
      .w = a->w ? (char *)a->w + ps__stored_at(r->updated, first) : NULL,
      .copy = a->copy ? (char *)a->copy + ps__stored_at(r->weights, first) : NULL,
      .grad = (const char *)a->grad + ps__stored_at(r->grad, first),
  };
  for (int i = 0; i < PS_MAX_STATES; i++)
    from.state[i] = a->state[i] ? (char *)a->state[i] + ps__stored_at(r->state[i], first) : NULL;
  return from;
}
