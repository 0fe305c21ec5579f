/* score_loss.cu - loss and gradient of documents' scores. */
#include "kernels/cuda/cuda_common.cuh"
#include <penstock/model.h>

enum { THREADS = 128 };

__device__ __forceinline__ double softplus(double x) {
  return (x > 0 ? x : 0) + log1p(exp(-fabs(x)));
}
__device__ __forceinline__ double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}

/* The block's sum, in every thread, by a fixed tree. */
__device__ double sum_block(double x) {
  __shared__ double part[THREADS];
  part[threadIdx.x] = x;
  __syncthreads();
  for (int n = THREADS / 2; n > 0; n /= 2) {
    if (threadIdx.x < n)
      part[threadIdx.x] += part[threadIdx.x + n];
    __syncthreads();
  }
  const double sum = part[0];
  __syncthreads();
  return sum;
}

/* The largest of the block's scores and its column, of equal ones the first. */
__device__ void largest_of_block(double &max, uint32_t &best) {
  __shared__ double of[THREADS];
  __shared__ uint32_t at[THREADS];
  of[threadIdx.x] = max;
  at[threadIdx.x] = best;
  __syncthreads();
  for (int n = THREADS / 2; n > 0; n /= 2) {
    const int i = threadIdx.x;
    if (i < n && (of[i + n] > of[i] || (of[i + n] == of[i] && at[i + n] < at[i]))) {
      of[i] = of[i + n];
      at[i] = at[i + n];
    }
    __syncthreads();
  }
  max = of[0];
  best = at[0];
}

template <typename T>
__device__ void single_label(const T *z, T *dz, float *loss, uint32_t cols, uint32_t label,
                             double scale) {
  double max = -INFINITY, sum = 0;
  uint32_t best = UINT32_MAX;
  for (uint32_t v = threadIdx.x; v < cols; v += THREADS)
    if ((double)ps_to_f32(z[v]) > max) {
      max = ps_to_f32(z[v]);
      best = v;
    }
  largest_of_block(max, best);
  for (uint32_t v = threadIdx.x; v < cols; v += THREADS)
    sum += exp((double)ps_to_f32(z[v]) - max);
  sum = sum_block(sum);
  for (uint32_t v = threadIdx.x; v < cols; v += THREADS) {
    const double e = exp((double)ps_to_f32(z[v]) - max);
    dz[v] = ps_from_f32<T>((float)((v == label ? e - sum : e) / sum * scale));
  }
  if (threadIdx.x == 0) {
    loss[0] = (float)(log(sum) + (max - (double)ps_to_f32(z[label])));
    loss[1] = best == label;
  }
}

template <typename T>
__device__ void multi_label(const T *z, T *dz, float *loss, uint32_t cols, uint32_t labels,
                            double scale) {
  double sum = 0, right = 0;
  for (uint32_t v = threadIdx.x; v < cols; v += THREADS) {
    const double x = ps_to_f32(z[v]);
    const bool y = labels >> v & 1;
    sum += softplus(y ? -x : x);
    right += (x > 0) == y;
    dz[v] = ps_from_f32<T>((float)((y ? -sigmoid(-x) : sigmoid(x)) / cols * scale));
  }
  sum = sum_block(sum);
  right = sum_block(right);
  if (threadIdx.x == 0) {
    loss[0] = (float)(sum / cols);
    loss[1] = (float)(right / cols);
  }
}

template <typename T>
__device__ void one_score(const T *z, T *dz, float *loss, uint32_t row, int32_t t, bool pairs,
                          double scale) {
  const double own = ps_to_f32(z[row]);
  if (threadIdx.x)
    return;
  if (!pairs) {
    const double error = own - (double)__int_as_float(t);
    dz[row] = ps_from_f32<T>((float)(2 * error * scale));
    loss[0] = (float)(error * error);
    loss[1] = (float)fabs(error);
    return;
  }
  const bool rejected = t > 0;
  const double other = ps_to_f32(z[rejected ? row - t : row - 1 - t]),
               margin = rejected ? other - own : own - other, pull = sigmoid(-margin) * scale;
  dz[row] = ps_from_f32<T>((float)(rejected ? pull : -pull));
  loss[0] = rejected ? (float)softplus(-margin) : 0.0f;
  loss[1] = rejected && margin > 0;
}

__device__ __forceinline__ bool fits(uint32_t rows, uint32_t cols, uint32_t problem, uint32_t row,
                                     int32_t t) {
  switch (problem) {
  case PS_PROBLEM_SINGLE_LABEL: return t >= 0 && (uint32_t)t < cols;
  case PS_PROBLEM_MULTI_LABEL: return t >= 0 && (int64_t)t >> cols == 0;
  case PS_PROBLEM_PAIRS:
    return t > 0 ? (uint32_t)t <= row : t < -1 && (int64_t)row - 1 - t < (int64_t)rows;
  default: return true;
  }
}

/* A block a row: most rows are no document's last, and all that is done there is to write zeros. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    score_loss_k(const T *z, const int32_t *target, const float *scale, float *losses, T *dz,
                 uint32_t rows, uint32_t cols, uint32_t problem) {
  const uint32_t row = blockIdx.x;
  const int32_t t = target[row];
  const size_t at = (size_t)row * cols;
  float *loss = losses + 2 * (size_t)row;
  if (problem == PS_PROBLEM_EMBEDDING || t == -1 || !fits(rows, cols, problem, row, t)) {
    const bool counted = problem != PS_PROBLEM_EMBEDDING && t != -1;
    if (threadIdx.x < 2)
      loss[threadIdx.x] = counted ? __int_as_float(0x7fc00000) : 0.0f;
    for (uint32_t v = threadIdx.x; problem != PS_PROBLEM_EMBEDDING && v < cols; v += THREADS)
      dz[at + v] = ps_from_f32<T>(0.0f);
    return;
  }
  if (problem == PS_PROBLEM_SINGLE_LABEL)
    single_label(z + at, dz + at, loss, cols, (uint32_t)t, (double)*scale);
  else if (problem == PS_PROBLEM_MULTI_LABEL)
    multi_label(z + at, dz + at, loss, cols, (uint32_t)t, (double)*scale);
  else
    one_score(z, dz, loss, row, t, problem == PS_PROBLEM_PAIRS, (double)*scale);
}

/* score_loss: ops.h.
 * shapes  z, dz [rows,cols] of dt, no alias; target i32 [rows]; scale f32 [1] = 1 / documents, or
 *         pairs, of the step; loss f32 [rows,2]. A target that is none of the problem's: loss NaN,
 *         gradient 0
 * bytes   rows * (12 + cols * sizeof(dt)), and the scores of the rows with a target
 * determinism  bitwise: one block has a row; a thread's columns in order, then a fixed tree
 * reference    the cpu backend's: gradient 1 ulp, loss within 1e-6 of 1 + |loss| */
extern "C" ps_status ps__cuda_score_loss(const ps_launch *l) {
  const ps__args_score_loss *a = (const ps__args_score_loss *)l->args;
  const bool trained = a->problem != PS_PROBLEM_EMBEDDING;
  const ps_status st = ps_check(l, "score_loss", trained ? 5 : 4, a->dt, 0);
  if (st != PS_OK || !a->rows || !a->cols)
    return st;
  cudaStream_t stream = ((const ps__cuda_exec *)l->exec)->stream;
  if (a->dt == PS_F32)
    score_loss_k<<<a->rows, THREADS, 0, stream>>>(
        (const float *)l->ptr[0], (const int32_t *)l->ptr[1], (const float *)l->ptr[2],
        (float *)l->ptr[3], trained ? (float *)l->ptr[4] : NULL, a->rows, a->cols, a->problem);
  else
    score_loss_k<<<a->rows, THREADS, 0, stream>>>(
        (const __nv_bfloat16 *)l->ptr[0], (const int32_t *)l->ptr[1], (const float *)l->ptr[2],
        (float *)l->ptr[3], trained ? (__nv_bfloat16 *)l->ptr[4] : NULL, a->rows, a->cols,
        a->problem);
  return ps_launched("score_loss", cudaSuccess);
}
