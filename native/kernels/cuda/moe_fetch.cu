/* moe_fetch.cu - experts on demand: which experts of a block the cache must have, and the copy of
 * those that it has not. Weights are pinned memory of the host, which the copy reads with loads of
 * its own: so the host never learns what the router chose, and nothing waits for it. */
#include "kernels/cuda/cuda_common.cuh"

namespace {

enum { THREADS = PS_MAX_EXPERTS, WARPS = THREADS / 32 };
constexpr uint32_t ALL = 0xffffffffu;

/* One block. Thread i has expert i, and slot i. */
__global__ void __launch_bounds__(THREADS)
    choose_k(const uint16_t *ids, const int32_t *pos, uint32_t *table, uint64_t *counts,
             const ps__args_moe_fetch a) {
  __shared__ uint32_t wanted[PS_MAX_EXPERTS], used[PS_MAX_EXPERTS], victim[PS_MAX_EXPERTS];
  __shared__ uint32_t sums[2][WARPS], now;
  const uint32_t i = threadIdx.x, lane = i % 32, warp = i / 32, e_n = a.n_experts, s_n = a.n_slots;
  uint32_t *slot_of = table, *expert_of = table + e_n, *used_at = expert_of + s_n,
           *missing = used_at + s_n, *launches = missing + s_n, *n_missing = launches + 1;
  wanted[i] = 0;
  if (i < s_n)
    used[i] = used_at[i];
  if (i == 0)
    now = ++*launches;
  __syncthreads();
  for (uint32_t c = i; c < a.n_tokens * a.n_used; c += THREADS)
    if (pos[c / a.n_used] >= 0)
      wanted[ids[c] < e_n ? ids[c] : 0] = 1;
  __syncthreads();
  const uint32_t slot = i < e_n ? slot_of[i] : 0;
  if (wanted[i] && slot)
    used[slot - 1] = now;
  const bool lacks = i < e_n && wanted[i] && !slot;
  const uint32_t lacking = __ballot_sync(ALL, lacks), wanting = __ballot_sync(ALL, wanted[i]);
  if (lane == 0) {
    sums[0][warp] = __popc(lacking);
    sums[1][warp] = __popc(wanting);
  }
  __syncthreads();
  uint32_t before = __popc(lacking & ((1u << lane) - 1)), all = 0, n_wanted = 0;
  for (uint32_t w = 0; w < WARPS; w++) {
    before += w < warp ? sums[0][w] : 0;
    all += sums[0][w];
    n_wanted += sums[1][w];
  }
  /* a slot's rank among those that this launch does not use: by age, then by number */
  if (i < s_n && used[i] != now) {
    uint32_t rank = 0;
    for (uint32_t s = 0; s < s_n; s++)
      rank += used[s] != now && (used[s] < used[i] || (used[s] == used[i] && s < i));
    victim[rank] = i;
  }
  __syncthreads();
  if (lacks) {
    const uint32_t s = victim[before], old = expert_of[s];
    if (old)
      slot_of[old - 1] = 0; /* nothing wants it, so no other thread has it */
    expert_of[s] = i + 1;
    slot_of[i] = s + 1;
    used[s] = now;
    missing[before] = i;
  }
  __syncthreads();
  if (i < s_n)
    used_at[i] = used[i];
  if (i == 0) {
    *n_missing = all;
    counts[0] += n_wanted;
    counts[1] += all;
  }
}

struct copies {
  const char *from[2];
  char *to[2];
  uint64_t bytes[2];
};
enum { COPY_THREADS = 256, IN_FLIGHT = 8, BLOCKS_A_SM = 2 };

/* Pieces of IN_FLIGHT loads a thread; the missing experts' first parts and second parts are cut in
 * pieces each. */
template <typename V>
__global__ void __launch_bounds__(COPY_THREADS)
    copy_k(const uint32_t *table, uint32_t n_experts, uint32_t n_slots, copies c) {
  const uint32_t *missing = table + n_experts + 2 * (size_t)n_slots,
                 n_missing = table[n_experts + 3 * (size_t)n_slots + 1];
  constexpr uint64_t piece = (uint64_t)COPY_THREADS * IN_FLIGHT;
  const uint64_t n[2] = {c.bytes[0] / sizeof(V), c.bytes[1] / sizeof(V)};
  const uint64_t pieces[2] = {(n[0] + piece - 1) / piece, (n[1] + piece - 1) / piece},
                 each = pieces[0] + pieces[1];
  for (uint64_t at = blockIdx.x; at < n_missing * each; at += gridDim.x) {
    const uint32_t e = missing[at / each];
    const uint64_t in = at % each;
    const int part = in >= pieces[0];
    const uint64_t first = (in - (part ? pieces[0] : 0)) * piece + threadIdx.x;
    const V *from = (const V *)(c.from[part] + e * c.bytes[part]);
    V *to = (V *)(c.to[part] + (uint64_t)(table[e] - 1) * c.bytes[part]);
    V v[IN_FLIGHT];
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
      if (first + k * COPY_THREADS < n[part])
        v[k] = __ldcs(from + first + k * COPY_THREADS);
#pragma unroll
    for (int k = 0; k < IN_FLIGHT; k++)
      if (first + k * COPY_THREADS < n[part])
        to[first + k * COPY_THREADS] = v[k];
  }
}

} // namespace

/* moe_fetch
 * math    ops.h. The slots that are given up are the first by (launch of the last use, number)
 * bytes   those of the missing experts, over the link and into HBM. 2 blocks a multiprocessor have
 *         32 KiB each in flight
 * determinism  integers and copies.   reference  the cpu backend's, equal */
extern "C" ps_status ps__cuda_moe_fetch(const ps_launch *l) {
  const ps__args_moe_fetch *a = (const ps__args_moe_fetch *)l->args;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  const ps_status st = ps_check(l, "moe_fetch", 8, PS_F32, 0);
  if (st != PS_OK)
    return st;
  uint32_t *table = (uint32_t *)l->ptr[2];
  const copies c = {{(const char *)l->ptr[4], (const char *)l->ptr[6]},
                    {(char *)l->ptr[5], (char *)l->ptr[7]},
                    {a->bytes[0], a->bytes[1]}};
  bool whole = a->bytes[0] % 16 == 0 && a->bytes[1] % 16 == 0;
  for (uint32_t i = 4; i < 8; i++)
    whole = whole && ps_aligned(l->ptr[i]);
  choose_k<<<1, THREADS, 0, exec->stream>>>((const uint16_t *)l->ptr[0], (const int32_t *)l->ptr[1],
                                            table, (uint64_t *)l->ptr[3], *a);
  const uint32_t n_blocks = (uint32_t)exec->n_sms * BLOCKS_A_SM;
  if (whole)
    copy_k<uint4><<<n_blocks, COPY_THREADS, 0, exec->stream>>>(table, a->n_experts, a->n_slots, c);
  else
    copy_k<uint32_t>
        <<<n_blocks, COPY_THREADS, 0, exec->stream>>>(table, a->n_experts, a->n_slots, c);
  return ps_launched("moe_fetch", cudaSuccess);
}
