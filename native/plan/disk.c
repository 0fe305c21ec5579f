/* disk.c - optimizer state on a disk: which units have it there, what that writes. */
#include "optim/optim.h"
#include "plan/plan_impl.h"

static uint64_t unit_bytes(const ps_plan *p, uint32_t unit) {
  const ps__recipe *r = &ps__recipes[ps__plan_row(&p->cfg)];
  uint64_t bytes = 0;
  if (unit == 0 || p->model->unit[unit].frozen)
    return 0;
  for (uint32_t k = 0; k < ps__optimizers[p->cfg.optimizer].n_states; k++)
    bytes += (ps__stored_bytes(r->state[k], p->model->unit[unit].n) + PS__SECTOR_BYTES - 1) /
             PS__SECTOR_BYTES * PS__SECTOR_BYTES;
  return bytes;
}

/* The last units whose state is at least that part of what the disk may hold. Their updates come
 * last in forward order, so their state has the most time to come. */
void ps__disk_level_set(ps_plan *p, uint32_t level) {
  uint64_t all = 0, taken = 0;
  p->disk_level = level;
  p->disk_first = UINT32_MAX;
  for (uint32_t u = p->model->n_units; u-- > 1 && all + unit_bytes(p, u) <= p->cfg.disk_mem_bytes;)
    all += unit_bytes(p, u);
  for (uint32_t u = p->model->n_units; u-- > 1 && taken < all * level / PS__DISK_LEVELS;) {
    taken += unit_bytes(p, u);
    p->disk_first = u;
  }
}

uint64_t ps__disk_bytes(const ps_plan *p) {
  uint64_t bytes = 0;
  for (uint32_t u = p->model->n_units; u-- > 1;)
    bytes += ps__on_disk(p, u) ? unit_bytes(p, u) : 0;
  return bytes;
}
