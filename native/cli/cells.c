/* cells.c - what the cells of a grid of caps show: a plan for less memory is a plan for more. */
#include "cli/cli.h"

/* Whether @b's plan is the better one to show: the faster, of equally fast ones that under less
 * memory, whatever the order of the cells. */
static bool better(const cli_cell *a, const cli_cell *b) {
  if (a->searched != b->searched)
    return b->searched > a->searched;
  if (a->host_bytes != b->host_bytes)
    return b->host_bytes < a->host_bytes;
  return b->device_bytes < a->device_bytes;
}

void cli_cells_choose(cli_cell *cell, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    uint32_t best = i;
    for (uint32_t j = 0; j < n; j++) {
      const bool fits =
          cell[j].device_bytes <= cell[i].device_bytes && cell[j].host_bytes <= cell[i].host_bytes;
      if (fits && cell[j].searched > cell[i].searched && better(&cell[best], &cell[j]))
        best = j;
    }
    cell[i].idx_from = best;
  }
}
