/* delta_probe.cu - times the CUDA kernels of the gated delta rule at Qwen3.5-9B's sizes, in bf16.
 * The table of op cases has their checks (tests/native/test_cuda_ops.c).
 *
 * build: nvcc -std=c++17 -O3 -Iinclude -Inative -D_GNU_SOURCE with
 *        -gencode arch=compute_90,code=sm_90, of this file, of native/kernels/cuda/delta*.cu but
 *        delta_cached.cu, and of native/core/dtype.c
 * usage: delta_probe [once] [small] [tokens]...     nothing: 8192 32768
 *
 * Prints the best and the median of 7 runs of each op. once: each runs once, for a profiler.
 * small: the kernels for GPUs whose blocks have 99 KB of shared memory. */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/scratch.h"
#include "probe.cuh"
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

static void *zeros(size_t bytes) {
  void *p;
  MUST(cudaMalloc(&p, bytes));
  MUST(cudaMemset(p, 0, bytes));
  return p;
}
/* A sample of normal numbers, over and over: the host would take seconds for all. */
static void *normals(size_t n, double scale) {
  const size_t sample = std::min(n, (size_t)1 << 20);
  std::vector<bf16> v(sample);
  for (auto &x : v)
    x = __float2bfloat16((float)(scale * normal()));
  bf16 *p = (bf16 *)zeros(n * sizeof(bf16));
  for (size_t at = 0; at < n; at += sample)
    MUST(cudaMemcpy(p + at, v.data(), std::min(sample, n - at) * sizeof(bf16),
                    cudaMemcpyHostToDevice));
  return p;
}

static void time_op(const char *name, ps_status (*op)(const ps_launch *), const ps_launch &l,
                    uint32_t tokens, bool once) {
  enum { WARM = 2, RUNS = 7 };
  cudaStream_t stream = ((const ps__cuda_exec *)l.exec)->stream;
  std::vector<float> ms;
  cudaEvent_t from, to;
  MUST(cudaEventCreate(&from));
  MUST(cudaEventCreate(&to));
  for (int i = once ? WARM : 0; i < WARM + (once ? 1 : RUNS); i++) {
    float each = 0;
    MUST(cudaEventRecord(from, stream));
    if (op(&l) != PS_OK)
      exit(1);
    MUST(cudaEventRecord(to, stream));
    MUST(cudaEventSynchronize(to));
    MUST(cudaEventElapsedTime(&each, from, to));
    if (i >= WARM)
      ms.push_back(each);
  }
  std::sort(ms.begin(), ms.end());
  printf("%s, %u tokens: best %.3f ms, median %.3f ms\n", name, tokens, ms[0], ms[ms.size() / 2]);
  fflush(stdout);
}

static void time_tokens(uint32_t tokens, bool once, bool small) {
  const ps__args_delta a = {.n_tokens = tokens,
                            .row0 = 0,
                            .n_key_heads = 16,
                            .n_value_heads = 32,
                            .key_dim = 128,
                            .value_dim = 128,
                            .dt = PS_BF16,
                            .accumulate_dw = 0,
                            .accumulate_carry = 0};
  const size_t t = tokens, c = 2 * a.n_key_heads * a.key_dim + a.n_value_heads * a.value_dim,
               values = t * a.n_value_heads * a.value_dim,
               state = sizeof(float) * a.n_value_heads * a.key_dim * a.value_dim;
  ps__cuda_exec exec = {};
  MUST(cudaStreamCreateWithFlags(&exec.stream, cudaStreamNonBlocking));
  exec.scratch_bytes = std::max(ps_scratch_delta_fwd(&a, NULL), ps_scratch_delta_bwd(&a, NULL));
  exec.scratch = zeros(exec.scratch_bytes);
  exec.shared_bytes = small ? 99 << 10 : 0;
  void *qkv = normals(t * c, 1), *ba = normals(t * 2 * a.n_value_heads, 1),
       *a_log = normals(a.n_value_heads, 0.5), *dt_bias = normals(a.n_value_heads, 1),
       *doc = zeros(t * sizeof(int32_t)), *before = zeros(state), *after = zeros(state),
       *o = zeros(values * 2), *d_o = normals(values, 1), *dqkv = zeros(t * c * 2),
       *dba = zeros(t * 2 * a.n_value_heads * 2), *weights = zeros(4096);
  void *fwd[] = {qkv, ba, a_log, dt_bias, doc, before, o, after};
  void *bwd[] = {qkv, ba,    a_log, dt_bias, doc,     before,
                 d_o, after, dqkv,  dba,     weights, (char *)weights + 2048};
  MUST(cudaDeviceSynchronize());
  ps_launch l = {};
  l.args = &a;
  l.exec = &exec;
  l.ptr = fwd;
  l.n_ptr = 8;
  time_op("delta_fwd", ps__cuda_delta_fwd, l, tokens, once);
  l.ptr = bwd;
  l.n_ptr = 12;
  time_op("delta_bwd", ps__cuda_delta_bwd, l, tokens, once);
  for (void *p :
       {qkv, ba, a_log, dt_bias, doc, before, after, o, d_o, dqkv, dba, weights, exec.scratch})
    MUST(cudaFree(p));
}

int main(int argc, char **argv) {
  bool once = false, small = false;
  std::vector<uint32_t> tokens;
  for (int i = 1; i < argc; i++)
    if (strcmp(argv[i], "once") == 0)
      once = true;
    else if (strcmp(argv[i], "small") == 0)
      small = true;
    else
      tokens.push_back((uint32_t)atoi(argv[i]));
  if (tokens.empty())
    tokens = {8192, 32768};
  for (uint32_t n : tokens)
    time_tokens(n, once, small);
  return 0;
}
