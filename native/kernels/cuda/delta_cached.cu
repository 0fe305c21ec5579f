/* delta_cached.cu - the gated delta rule of a step's rows, from the states that the sequences have
 * had so far: generation's linear attention. Row by row; delta.cu has the chunk form of training.
 *
 * math    of each sequence and value head, row by row: S <- e^g S, r = S^T k, d = beta (v - r),
 *         S <- S + k d^T, o = S^T q
 * shapes  qkv [T,2 nk dk + nv dv], ba [T,2 nv], o [T,nv dv] of dt; cache f32 [sequences,nv,dk,dv]
 * rate    bound by the memory of the states, which a row reads twice and writes once; those of a
 *         prompt's later rows come from L2
 * determinism  bitwise: a block has the rows of a sequence and a value head, in order
 * reference    the cpu backend's */
#include "kernels/cuda/cuda_common.cuh"

namespace {

enum { THREADS = PS_MAX_DELTA_DIM }; /* a thread an element of q and k, and a column of the state */

template <typename T> struct cached_job {
  ps__args_delta a;
  float scale;
  const T *qkv, *ba, *a_log, *dt_bias;
  const int32_t *sequence, *pos;
  T *o;
  float *cache;

  __device__ __forceinline__ bool continues(uint32_t t) const {
    return t && pos[t] > 0 && pos[t - 1] == pos[t] - 1 && sequence[t - 1] == sequence[t];
  }
};

struct cached_row {
  float q[THREADS], k[THREADS], sums[2][32];
  float beta, decay;
};

/* q and k of row @t normalized, and its gates. */
template <typename T>
__device__ void load_row(cached_row &s, const cached_job<T> &j, uint32_t t, uint32_t head) {
  const ps__args_delta &a = j.a;
  const uint32_t i = threadIdx.x, nv = a.n_value_heads, key = head / (nv / a.n_key_heads),
                 dk = a.key_dim;
  const T *row = j.qkv + t * (2 * (size_t)a.n_key_heads * dk + (size_t)nv * a.value_dim);
  float q = 0.0f, k = 0.0f;
  if (i < dk) {
    q = ps_to_f32(row[(size_t)key * dk + i]);
    k = ps_to_f32(row[((size_t)a.n_key_heads + key) * dk + i]);
  }
  float sum[2] = {q * q, k * k};
  ps_block_sum<2>(sum, s.sums);
  s.q[i] = q / sqrtf(sum[0] + 1e-6f) * j.scale;
  s.k[i] = k / sqrtf(sum[1] + 1e-6f);
  if (i == 0) {
    const size_t at = (size_t)t * 2 * nv + head;
    const double x = (double)ps_to_f32(j.ba[at + nv]) + (double)ps_to_f32(j.dt_bias[head]),
                 g = -exp((double)ps_to_f32(j.a_log[head])) * (x > 40 ? x : log1p(exp(x)));
    s.beta = (float)(1 / (1 + exp(-(double)ps_to_f32(j.ba[at]))));
    s.decay = (float)exp(g);
  }
  __syncthreads();
}

/* A block a row that begins a sequence's rows of the call, and a value head. */
template <typename T>
__global__ void __launch_bounds__(THREADS) delta_cached_k(const cached_job<T> j) {
  __shared__ cached_row s;
  const ps__args_delta &a = j.a;
  const uint32_t c = threadIdx.x, head = blockIdx.y, dk = a.key_dim, dv = a.value_dim;
  const size_t values = (size_t)a.n_value_heads * dv, at = (size_t)head * dv + c,
               keys = 2 * (size_t)a.n_key_heads * dk;
  uint32_t t = blockIdx.x;
  if (j.pos[t] < 0 && c < dv)
    j.o[t * values + at] = ps_from_f32<T>(0.0f);
  if (j.pos[t] < 0 || j.continues(t))
    return;
  float *state = j.cache + (j.sequence[t] * values + (size_t)head * dv) * dk + c;
  do {
    load_row(s, j, t, head);
    const float decay = s.decay;
    const bool first = j.pos[t] == 0; /* the state is that of another text */
    if (c < dv) {
      float r = 0.0f, out = 0.0f;
      for (uint32_t x = 0; x < dk && !first; x++)
        r = fmaf(state[(size_t)x * dv] * decay, s.k[x], r);
      const float d = (ps_to_f32(j.qkv[t * (keys + values) + keys + at]) - r) * s.beta;
      for (uint32_t x = 0; x < dk; x++) {
        const float now = fmaf(d, s.k[x], first ? 0.0f : state[(size_t)x * dv] * decay);
        state[(size_t)x * dv] = now;
        out = fmaf(now, s.q[x], out);
      }
      j.o[t * values + at] = ps_from_f32<T>(out);
    }
    __syncthreads(); /* before the next row takes the place of this one */
    t++;
  } while (t < a.n_tokens && j.continues(t));
}

template <typename T> cudaError_t run(const ps_launch *l) {
  const ps__args_delta *a = (const ps__args_delta *)l->args;
  const cached_job<T> j = {*a,
                           (float)(1 / sqrt((double)a->key_dim)),
                           (const T *)l->ptr[0],
                           (const T *)l->ptr[1],
                           (const T *)l->ptr[2],
                           (const T *)l->ptr[3],
                           (const int32_t *)l->ptr[4],
                           (const int32_t *)l->ptr[6],
                           (T *)l->ptr[5],
                           (float *)l->ptr[7]};
  const ps__cuda_exec *exec = (const ps__cuda_exec *)l->exec;
  delta_cached_k<T><<<dim3(a->n_tokens, a->n_value_heads), THREADS, 0, exec->stream>>>(j);
  return cudaGetLastError();
}

} // namespace

extern "C" ps_status ps__cuda_delta_cached(const ps_launch *l) {
  const ps__args_delta *a = (const ps__args_delta *)l->args;
  const ps_status st = ps_check(l, "delta_cached", 8, a->dt, 0);
  if (st != PS_OK)
    return st;
  cudaError_t e = cudaSuccess;
  PS_BY_TYPE(a->dt, e = run<T>(l));
  return ps_launched("delta_cached", e);
}
