/* cells.c - chooses the plan that each cell of a grid of caps shows. A plan found under smaller
 * caps also fits larger ones. */
#include "cli/cli.h"

/* @b's plan is better than @a's: it is faster, or as fast under smaller caps. The order of the
 * cells does not matter. */
static bool better(const cli_cell *a, const cli_cell *b) {
  if (a->searched != b->searched)
    return b->searched > a->searched;
  if (a->host_mem_bytes != b->host_mem_bytes)
    return b->host_mem_bytes < a->host_mem_bytes;
  return b->device_mem_bytes < a->device_mem_bytes;
}

void cli_cells_choose(cli_cell *cell, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    uint32_t best = i;
    for (uint32_t j = 0; j < n; j++) {
      const bool fits = cell[j].device_mem_bytes <= cell[i].device_mem_bytes &&
                        cell[j].host_mem_bytes <= cell[i].host_mem_bytes;
      if (fits && cell[j].searched > cell[i].searched && better(&cell[best], &cell[j]))
        best = j;
    }
    cell[i].idx_from = best;
  }
}
