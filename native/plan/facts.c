/* facts.c - what follows from a plan's configuration and its step: the head's slice, and the bytes
 * that the caps count. */
#include "hosts/hosts.h"
#include "hosts/net.h"
#include "plan/plan_impl.h"

uint64_t ps__head_slice(const ps_plan *plan, uint64_t chunk_tokens) {
  uint64_t rows = plan->cfg.head_slice_tokens;
  const uint32_t problem = plan->model->cfg.problem;
  /* a pair may be anywhere in a chunk; without a product nothing is made slice by slice */
  if (problem == PS_PROBLEM_PAIRS || problem == PS_PROBLEM_EMBEDDING)
    return chunk_tokens;
  if (plan->head_slice_given || plan->hw.backend != PS_BACKEND_CUDA)
    return rows;
  while (rows < 4096 && rows * PS__MOST_ADDITIONS < chunk_tokens)
    rows *= 2;
  return rows;
}

static bool plans_again(const ps_plan *plan) { return plan->cfg.replan && !plan->cfg.forward_only; }

/* 512: what the program, the schedule and the run keep. */
uint64_t ps__bytes_an_op(const ps_plan *plan) {
  const uint64_t steps = plan->cfg.trace_steps + (plans_again(plan) ? PS__MARKED_STEPS : 0);
  return steps * sizeof(ps_trace_event) + 512 + (plans_again(plan) ? PS__SEARCH_BYTES_AN_OP : 0);
}

uint64_t ps__host_overhead(const ps_plan *plan, const ps__step *s, const ps__guests *guests,
                           uint64_t *scratch, uint64_t *trace) {
  *scratch = ps__host_scratch(&plan->hw, s->at, s->scratch_bytes);
  *trace = s->n_op * ps__bytes_an_op(plan) + (plans_again(plan) ? PS__SEARCH_BYTES : 0) +
           (ps__guests_ops(guests) + ps__plan_sampling_ops(plan)) * 512;
  /* tokens and targets of a batch as the source fills them; and which rows of an embedding on the
   * host are updated */
  const uint64_t rows = s->spec->embed_on_host ? 4ull * plan->model->cfg.vocab_size : 0;
  /* a token's logits in fp32 */
  const uint64_t logits = plan->cfg.logits_fn ? 4ull * ps__head_columns(&plan->model->cfg) : 0;
  const uint64_t net = ps__exchanges(s->spec) ? ps__hosts_staging_bytes(s->spec->n_hosts) : 0;
  return *scratch + *trace + plan->cfg.reserve_bytes + 8 * s->layout->n_tokens + rows + logits +
         net;
}

uint64_t ps__net_memory(const ps_plan *plan) {
  return plan->cfg.n_hosts > 1 && plan->hw.backend == PS_BACKEND_CUDA &&
                 plan->cfg.transport != PS_TRANSPORT_TCP
             ? ps__net_device_bytes(plan->cfg.n_hosts)
             : 0;
}

uint64_t ps__largest_device(const ps__places *at, const uint64_t space[PS_MAX_PLACES]) {
  uint64_t most = 0;
  for (uint32_t d = 0; d < at->n_devices; d++)
    if (space[at->dev[d].place] > most)
      most = space[at->dev[d].place];
  return most;
}

void ps__used_bytes(const ps_plan *plan, const ps__step *s, const ps__guests *guests,
                    const uint64_t arena[PS_MAX_PLACES], uint64_t out[PS__N_MEMS]) {
  const uint64_t host = arena[s->at->host], pinned = ps__pinned_bytes(host, s->pageable_bytes);
  uint64_t scratch, trace;
  out[PS__DEVICE_MEM] =
      ps__arena_round(ps__largest_device(s->at, arena)) +
      ps__device_overhead(&plan->hw, plan->model->fp8.on, s->at, s->scratch_bytes, &scratch) +
      ps__net_memory(plan) + ps__page_table_bytes(&plan->hw, pinned);
  out[PS__HOST_MEM] = ps__arena_round(host) + ps__host_overhead(plan, s, guests, &scratch, &trace);
  out[PS__PINNED_MEM] = pinned;
  if (plan->room.given)
    ps__room_used(plan, s, arena, out);
}
