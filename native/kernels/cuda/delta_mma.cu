/* delta_mma.cu - the gated delta rule on the tensor cores: bf16, heads of at most 128 columns of
 * keys (delta.cu has the math, and the kernels for all else). Of a group of pieces:
 *   mma_prepare_k   a block for each piece and key head: (1 + L)^-1, P, gates and norms
 * and of each of its segments:
 *   mma_chain_k     a block for each value head and 32 columns, piece after piece: D, S; with O
 *   mma_reverse_k   the same from the last piece to the first: dY, dS
 *   mma_gradient_k  a block for each piece and key head: dqkv, dba
 * Unlike there, the chains have no U and W: they take D = (1 + L)^-1 beta (V - start K S) as it
 * stands, whose factors but (1 + L)^-1 and S are bf16 as they come. Numbers that are not bf16 are
 * products' factors as two that are (fragment.cuh).
 *
 * A block may have 99 KB of shared memory with compute capability 8.6, 8.9 and 12.0: there SMALL
 * kernels run, which load less of what comes next. The others take 154 KB or more. Sums have the
 * same order in both, so that on one GPU the bits are the same. */
#include "kernels/cuda/delta_mma.h"
#include "kernels/cuda/delta_mma_chain.cuh"
#include "kernels/cuda/delta_mma_gradient.cuh"

namespace {

/* Shared memory that a block of the launch's device may have. */
size_t shared_bytes(const ps_launch *l) {
  int bytes = 0;
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, exec->device) !=
      cudaSuccess)
    return 0;
  return exec->shared_bytes && exec->shared_bytes < (size_t)bytes ? exec->shared_bytes
                                                                  : (size_t)bytes;
}

constexpr size_t most(size_t x, size_t y) { return x > y ? x : y; }
/* What the largest blocks take on all GPUs. */
constexpr size_t small_bytes = most(chain_small_bytes, sizeof(gradient_shared<true>));
static_assert(small_bytes <= 99 << 10 && sizeof(prepare_shared) < small_bytes,
              "a block has 99 KB with compute capability 8.6, 8.9 and 12.0");

mma_job job_of(const ps_launch *l, const ps_delta_mma_scratch &at) {
  mma_job j = {};
  char *scratch = (char *)((const ps__cuda_exec *)l->exec)->scratch;
  fill_rows(j, l);
  j.pairs = (piece_pairs *)(scratch + at.pairs);
  j.terms = (piece_terms *)(scratch + at.terms);
  /* what is on its way does not change bits */
  const size_t bytes = shared_bytes(l);
  j.small = bytes < chain_bytes(CHAIN_MAX_RING - 1);
  j.small_gradient = bytes < sizeof(gradient_shared<false>);
  j.ring = bytes < chain_bytes(CHAIN_MAX_RING) ? CHAIN_MAX_RING - 1 : CHAIN_MAX_RING;
  return j;
}

cudaError_t prepare(const mma_job &j, cudaStream_t stream) {
  return launch(mma_prepare_k, j, j.n_pieces, j.a.n_key_heads, TILE_THREADS, sizeof(prepare_shared),
                stream);
}
cudaError_t chain(mma_job &j, void (*small)(const mma_job), void (*large)(const mma_job),
                  const float *from, float *to, cudaStream_t stream) {
  j.from = from;
  j.to = to;
  return launch(j.small ? small : large, j, ps_ceil_div(j.a.value_dim, COLUMNS), j.a.n_value_heads,
                CHAIN_THREADS, j.small ? chain_small_bytes : chain_bytes(j.ring), stream);
}
template <chain_kind KIND>
cudaError_t forward(mma_job &j, const float *from, float *to, cudaStream_t stream) {
  return chain(j, mma_chain_k<KIND, true>, mma_chain_k<KIND, false>, from, to, stream);
}

/* What the backward pass prepares: groups of pieces, whose segments then take it from there. */
struct prepared_group {
  enum : uint32_t { SEGMENTS = PS_DELTA_MMA_SEGMENT / PS_DELTA_SEGMENT, NONE = UINT32_MAX };
  static_assert(PS_DELTA_MMA_SEGMENT % PS_DELTA_SEGMENT == 0, "whole segments");
  piece_pairs *pairs;
  piece_terms *terms;
  uint32_t group = NONE;

  explicit prepared_group(const mma_job &j) : pairs(j.pairs), terms(j.terms) {}

  /* @j becomes segment @i, whose group is prepared where the last segment was of another. */
  cudaError_t enter_segment(mma_job &j, uint32_t i, cudaStream_t stream) {
    if (group != i / SEGMENTS) {
      group = i / SEGMENTS;
      j.pairs = pairs, j.terms = terms;
      enter(j, group, PS_DELTA_MMA_SEGMENT);
      const cudaError_t e = prepare(j, stream);
      if (e != cudaSuccess)
        return e;
    }
    const size_t at = (size_t)(i % SEGMENTS) * PS_DELTA_SEGMENT * j.a.n_value_heads;
    j.pairs = pairs + at, j.terms = terms + at;
    enter(j, i, PS_DELTA_SEGMENT);
    return cudaSuccess;
  }
};

} // namespace

bool ps_delta_mma_takes(const ps_launch *l, bool backward) {
  return ps_delta_on_mma((const ps__args_delta *)l->args) && ps_aligned(l->ptr[0]) &&
         (!backward || ps_aligned(l->ptr[6])) && shared_bytes(l) >= small_bytes;
}

cudaError_t ps_delta_mma_fwd(const ps_launch *l) {
  mma_job j = job_of(l, ps_delta_mma_layout((const ps__args_delta *)l->args, false));
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  float *const before = j.a.row0 ? (float *)l->ptr[5] : nullptr, *const after = (float *)l->ptr[7];
  cudaError_t e = cudaSuccess;
  j.o = (bf16 *)l->ptr[6];
  for (uint32_t i = 0; i < n_segments(j.a, PS_DELTA_MMA_SEGMENT) && e == cudaSuccess; i++) {
    enter(j, i, PS_DELTA_MMA_SEGMENT);
    e = prepare(j, stream);
    if (e == cudaSuccess)
      e = forward<CHAIN_OUTPUT>(j, i ? after : before, after, stream);
  }
  return e;
}

cudaError_t ps_delta_mma_bwd(const ps_launch *l) {
  const ps_delta_mma_scratch at = ps_delta_mma_layout((const ps__args_delta *)l->args, true);
  mma_job j = job_of(l, at);
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  char *scratch = (char *)((const ps__cuda_exec *)l->exec)->scratch;
  float *const carry = (float *)l->ptr[7];
  j.d_o = (const bf16 *)l->ptr[6];
  j.dqkv = (bf16 *)l->ptr[8];
  j.dba = (bf16 *)l->ptr[9];
  j.weights = (double *)(scratch + at.weights);
  j.d = (value_rows *)(scratch + at.d);
  j.dy = (value_rows *)(scratch + at.dy);
  j.states = (value_state *)(scratch + at.states);
  j.dstates = (value_state *)(scratch + at.dstates);
  j.sums = (float4 *)(scratch + at.sums);
  prepared_group prepared(j);
  const cudaError_t e = run_segments(
      j, l, (float *)(scratch + at.borders),
      [&](uint32_t i, const float *from, float *to) {
        const cudaError_t of = prepared.enter_segment(j, i, stream);
        return of != cudaSuccess ? of : forward<CHAIN_STATE>(j, from, to, stream);
      },
      [&](uint32_t i, const float *from, bool has_carry) {
        cudaError_t of = prepared.enter_segment(j, i, stream);
        if (of == cudaSuccess)
          of = forward<CHAIN_KEEP>(j, from, nullptr, stream);
        if (of == cudaSuccess)
          of = chain(j, mma_reverse_k<true>, mma_reverse_k<false>, has_carry ? carry : nullptr,
                     carry, stream);
        if (of == cudaSuccess)
          of = launch(j.small_gradient ? mma_gradient_k<true> : mma_gradient_k<false>, j,
                      j.n_pieces, j.a.n_key_heads, GRADIENT_THREADS,
                      j.small_gradient ? sizeof(gradient_shared<true>)
                                       : sizeof(gradient_shared<false>),
                      stream);
        return of;
      });
  return e != cudaSuccess ? e : add_weights(j, l, stream);
}
