/* What the cells of `penstock plan`'s grids show, for random caps in random order and random
 * outcomes of the searches. */
#include "check.h"
#include "cli/cli.h"

enum { MAX_CELLS = 40 };

static bool fits(const cli_cell *from, const cli_cell *in) {
  return from->device_mem_bytes <= in->device_mem_bytes &&
         from->host_mem_bytes <= in->host_mem_bytes;
}

static void random_cells(uint64_t *state, cli_cell *cell, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) /* 0: no plan fits; few values, so that some are equal */
    cell[i] = (cli_cell){.device_mem_bytes = 1 + rnd_below(state, 6),
                         .host_mem_bytes = 1 + rnd_below(state, 6),
                         .searched = 100.0 * (double)rnd_below(state, 8),
                         .idx_from = UINT32_MAX};
  for (uint32_t i = 0; i < n; i++) /* the same caps are the same search */
    for (uint32_t j = 0; j < i; j++)
      if (fits(&cell[i], &cell[j]) && fits(&cell[j], &cell[i]))
        cell[i].searched = cell[j].searched;
}

static void check_cells(const cli_cell *cell, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    CHECK(cell[i].idx_from < n);
    const cli_cell *from = &cell[cell[i].idx_from];
    CHECK(fits(from, &cell[i]));
    /* its own plan, but for a faster one */
    CHECK(from == &cell[i] || from->searched > cell[i].searched);
    for (uint32_t j = 0; j < n; j++)
      if (fits(&cell[j], &cell[i])) {
        CHECK(cell[cell[j].idx_from].searched <= from->searched);
        CHECK(cell[j].searched <= from->searched);
      }
  }
}

/* Neither the order in which the caps were given nor rows that were not searched yet and have
 * more memory change it. */
static void check_order(uint64_t *state, const cli_cell *cell, uint32_t n) {
  cli_cell other[MAX_CELLS];
  uint32_t place[MAX_CELLS];
  const uint64_t host = 1 + rnd_below(state, 6); /* searched up to here */
  for (uint32_t i = 0; i < n; i++)
    place[i] = i;
  for (uint32_t i = n; i > 1; i--) {
    const uint32_t j = (uint32_t)rnd_below(state, i), k = place[i - 1];
    place[i - 1] = place[j];
    place[j] = k;
  }
  for (uint32_t i = 0; i < n; i++) {
    other[place[i]] = cell[i];
    if (cell[i].host_mem_bytes > host)
      other[place[i]].searched = 0;
  }
  cli_cells_choose(other, n);
  for (uint32_t i = 0; i < n; i++) {
    const cli_cell *a = &cell[cell[i].idx_from], *b = &other[other[place[i]].idx_from];
    if (cell[i].host_mem_bytes <= host)
      CHECK(a->searched == b->searched && a->device_mem_bytes == b->device_mem_bytes &&
            a->host_mem_bytes == b->host_mem_bytes);
  }
}

int main(void) {
  cli_cell cell[MAX_CELLS];
  uint64_t state = mix64(1);
  uint32_t n_taken = 0;
  for (int round = 0; round < 2000; round++) {
    const uint32_t n = 1 + (uint32_t)rnd_below(&state, MAX_CELLS);
    random_cells(&state, cell, n);
    cli_cells_choose(cell, n);
    check_cells(cell, n);
    check_order(&state, cell, n);
    for (uint32_t i = 0; i < n; i++)
      n_taken += cell[i].idx_from != i;
  }
  CHECK(n_taken > 1000);
  printf("ok 2000 grids: more memory never shows less, %u cells show the plan of another\n",
         n_taken);
  return 0;
}
