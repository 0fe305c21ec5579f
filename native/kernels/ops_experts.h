/* ops_experts.h - the ops of experts: a part of ops.h, which includes it.
 *
 * A router chooses k of E experts for each token; every token is computed by all k (dropless).
 * T tokens, I an expert's ffn dim. R = k T routed rows: token t's choice j is row slot[t,j] of
 * tensors [R,..], sorted by (expert, token). Expert e has the rows
 * [offsets[e], offsets[e+1]); offsets[0] is 0 and offsets[E] is R, whatever the router says. Sizes
 * are static: offsets alone depend on data, kernels read them, and the host never does.
 *   - On CUDA a row's bits depend on the row and its expert's weights alone. On the CPU they depend
 *     on how many rows the expert has, too.
 *   - 1 <= k <= PS_MAX_EXPERTS_USED, k <= E <= PS_MAX_EXPERTS, R < 2^31. ids u16, all other
 *     integers i32.
 *   - n_experts is E, n_used is k, expert_dim is I. */
#ifndef PS_KERNELS_OPS_EXPERTS_H
#define PS_KERNELS_OPS_EXPERTS_H
#include <penstock/engine.h>

enum { PS_MAX_EXPERTS = 512, PS_MAX_EXPERTS_USED = 16 };
/* PS_EINVAL names @op, the number that is out of range and its value. */
ps_status ps__check_experts(uint32_t n_tokens, uint32_t n_experts, uint32_t n_used, const char *op);

typedef struct ps__args_moe_route {
  uint32_t n_tokens, n_experts, n_used;
  uint32_t renorm;                  /* the weights of a token are divided by their sum */
  uint32_t sigmoid, has_bias, dt;   /* dt: the bias's */
  uint32_t n_groups, n_groups_used; /* n_groups 0: experts are chosen from all */
  float scale;                      /* of the weights; 0 stands for 1 */
} ps__args_moe_route;
static inline float ps__route_scale(float scale) { return scale == 0.0f ? 1.0f : scale; }
/* moe_route            p = softmax(logits[t,:]), with the largest logit subtracted. ids[t,:]: the k
 *                      largest logits, largest first; of equal ones the lower index first. A NaN
 *                      counts as smaller than -inf. weights[t,j] = p[ids[t,j]], or with renorm that
 *                      over the sum over j. Where a logit is NaN or +inf, the row's weights are NaN
 *                      and its ids are still k different experts.
 *                      With sigmoid p = sigmoid(logits[t,:]), and the k largest are those of p +
 *                      bias (DeepSeek-V3, arXiv 2412.19437). The sum has 1e-20 added then.
 *                      With groups of E / n_groups experts in order, experts of the n_groups_used
 *                      best groups alone are chosen, the lower of equal groups first. A group is
 *                      worth its best logit or, with sigmoid, the sum of its two best p + bias.
 *                      Weights are multiplied by scale at the end.
 *                      ptr: R logits f32[T,E], W ids u16[T,k], W weights f32[T,k], then R bias[E]
 *                      of dt if has_bias.
 *                      In generation the positions are not asked: a row without a token is routed
 *                      like any other, and nothing reads what comes of it. */
/* moe_route_bwd        Gradient of the logits, from dweights and the terms of the loss that are the
 *                      router's. p and lse = logsumexp(logits[t,:]) are computed again.
 *                        dp[t,e]      = aux n[e] / (n_tokens step_tokens), with renorm 0 also +
 *                                       dweights[t,j] where e is ids[t,j]; n[e] = offsets[e+1] -
 *                                       offsets[e]
 *                        dlogits[t,e] = p[t,e] (dp[t,e] - sum_i p[t,i] dp[t,i] + 2 z_loss lse /
 *                                       step_tokens), with renorm 1 also + weights[t,j]
 *                                       (dweights[t,j] - sum_i weights[t,i] dweights[t,i]) where
 *                                       e is ids[t,j]
 *                      aux: alpha E / blocks, of aux = alpha E sum_e f_e P_e with f_e = n[e] /
 *                      n_tokens constant and P_e the mean of p over the chunk, each chunk weighted
 *                      by its part of the step's tokens. z_loss: beta / blocks, of beta mean lse^2.
 *                      With 0 a term is left out, whatever lse is. With a scale c dweights count c
 *                      times, and the sum over weights its c-th part. With sigmoid, of a chosen e
 *                      alone, S = sum_i p[t,ids[t,i]] + 1e-20, and aux and z_loss 0:
 *                        dlogits[t,e] = p (1 - p) c dweights[t,j], with renorm p (1 - p) (c
 *                                       dweights[t,j] - sum_i weights[t,i] dweights[t,i]) / S
 *                      count: n[e] is added to
 *                      counts[e].
 *                      ptr: R logits f32[T,E], R ids u16[T,k], R weights f32[T,k], R dweights
 *                      f32[T,k], R offsets i32[E+1], W dlogits[T,E] of dt, then RW counts u64[E] if
 *                      count. */
typedef struct ps__args_moe_route_bwd {
  uint32_t n_tokens, n_experts, n_used, renorm; /* as ps__args_moe_route */
  uint32_t dt, count;
  float aux, z_loss;
  uint32_t step_tokens; /* of all chunks, devices and hosts: ps__chunk_shape.step_tokens */
  uint32_t sigmoid;
  float scale;
} ps__args_moe_route_bwd;

/* moe_index            offsets and slot as above, a counting sort of ids, stable by (expert,
 *                      token).
 *                      ptr: R ids u16[T,k], W offsets i32[E+1], W slot i32[T,k]. An id of E or more
 *                      counts as 0. */
typedef struct ps__args_moe_index {
  uint32_t n_tokens, n_experts, n_used;
} ps__args_moe_index;

/* moe_gather           xr[slot[t,j],:] = x[t,:].  ptr: R x[T,D], R slot i32[T,k], W xr[R,D].
 *                      The input of experts, and in the backward pass the gradient of their
 *                      output.
 * moe_combine          y[t,:] = (accumulate ? y[t,:] : 0) + sum over j, in order, of
 *                      z[slot[t,j],:] (+ residual[t,:]), added in this order in fp32, with one
 *                      rounding.
 *                      ptr: R z[R,D], R slot i32[T,k], W|RW y[T,D], then R residual[T,D] if
 *                      has_residual, then R bias[E,D], R weights f32[T,k], R ids u16[T,k] if
 *                      has_bias: after the rows of z come the terms weights[t,j] bias[ids[t,j],:].
 *                      Forward it makes the output; backward, of the rows' gradients, that of the
 *                      experts' input. accumulate and has_residual exclude each other. */
typedef struct ps__args_moe_rows {
  uint32_t n_tokens, n_used, dim, dt;
  uint32_t accumulate, has_residual, has_bias; /* moe_combine alone */
} ps__args_moe_rows;

/* gemm_grouped         A product an expert: R = n_tokens * n_used rows, cut by offsets. N = n_out,
 *                      K = n_in. W[E,N,K], all operands row-major without gaps, of dt; fp32 inside,
 *                      one rounding at the store. role (PS_GEMM_*), for the rows r of expert e:
 *                        FORWARD  y[r,:]  = W[e] x[r,:]
 *                        DGRAD    dx[r,:] = dy[r,:] W[e]
 *                        WGRAD    dW[e]   = (dW[e] +) sum_r dy[r,:]^T x[r,:], with accumulate added
 *                                 to dW. Every element is written: an expert without rows gets 0,
 *                                 or with accumulate keeps what it has.
 *                      ptr:
 *                        FORWARD  R x[R,K],  R W[E,N,K], R offsets i32[E+1], W y[R,N]
 *                        DGRAD    R dy[R,N], R W[E,N,K], R offsets i32[E+1], W dx[R,K]
 *                        WGRAD    R dy[R,N], R x[R,K],   R offsets i32[E+1], W|RW dW[E,N,K]
 * gemm_grouped_rows    FORWARD for generation. On the CPU a row of y depends on no other row, nor
 *                      on their number. On CUDA it is gemm_grouped. */
typedef struct ps__args_gemm_grouped {
  uint32_t n_tokens, n_used, n_out, n_in, n_experts, dt, role, accumulate;
} ps__args_gemm_grouped;

/* Experts on demand: a cache has n_slots experts of a block, and a table says which. The table is
 * ps__fetch_words() numbers of u32, which are 0 at first:
 *   slot_of[E]      1 + the slot of an expert; 0: the cache has it not
 *   expert_of[S]    1 + the expert in a slot; 0: none
 *   used[S]         the launch that last wanted what is in the slot
 *   missing[S]      the experts that the last launch copied: n_missing of them
 *   launches, n_missing
 *
 * moe_fetch            Every expert that a token with pos[t] >= 0 has chosen is in the cache
 *                      afterwards. Those that are missing, in the order of their numbers, take the
 *                      slots that were used longest ago, of equal ones the first. bytes[i] are
 *                      copied from weights_i[e] to slots_i[slot]. counts[0] += the experts that
 *                      were wanted, counts[1] += those that were missing.
 *                      min(E, R) <= S <= E, so that every wanted expert has a slot. bytes[] are
 *                      multiples of 4.
 *                      ptr: R ids u16[T,k], R pos i32[T], RW table u32[], RW counts u64[2], then
 *                      for i = 0, 1: R weights_i[E], RW slots_i[S], of bytes[i] each. An id of E or
 *                      more counts as 0. weights_i may be memory of the host that the device reads.
 * gemm_grouped_slots   gemm_grouped_rows, with slots[slot_of[e] - 1] in the place of W[e] and its
 *                      bits. Of an expert without a slot the rows of y are any numbers.
 *                      ptr: R x[R,K], R slots[S,N,K], R offsets i32[E+1], W y[R,N], R slot_of
 *                      u32[E]. */
typedef struct ps__args_moe_fetch {
  uint32_t n_tokens, n_used, n_experts, n_slots;
  uint64_t bytes[2];
} ps__args_moe_fetch;
typedef struct ps__args_grouped_slots {
  ps__args_gemm_grouped product;
  uint32_t n_slots;
} ps__args_grouped_slots;
static inline uint64_t ps__fetch_words(uint32_t n_experts, uint32_t n_slots) {
  return n_experts + 3ull * n_slots + 2;
}

/* moe_glu              s[r,:] = w act(g) u, gu[R,2I]: g = gu[:, :I], u = gu[:, I:]; w =
 *                      weights[t,j] of the row's token and choice, r = slot[t,j]; one rounding.
 *                      ptr: R gu[R,2I], R weights f32[T,k], R slot i32[T,k], W s[R,I].
 * moe_glu_bwd          dweights[t,j] = sum_i ds[r,i] act(g) u; gu is replaced by its gradient, that
 *                      of w act(g) u, and then ds by s, with the bits of moe_glu's.
 *                      ptr: RW ds[R,I], RW gu[R,2I], R weights f32[T,k], R slot i32[T,k], W
 *                      dweights f32[T,k]. */
typedef struct ps__args_moe_glu {
  uint32_t n_tokens, n_used, expert_dim, dt, activation; /* activation: as ps__args_glu */
} ps__args_moe_glu;

/* A factor an expert, on the weights of its rows (Gemma 4).
 *
 * moe_scale            y[t,j] = w[t,j] scale[ids[t,j]].
 *                      ptr: R w f32[T,k], R ids u16[T,k], R scale[E] of dt, W y f32[T,k].
 * moe_scale_bwd        dscale[e] (+)= sum of dy[t,j] w[t,j] over the choices with ids[t,j] = e;
 *                      then dy[t,j] is replaced by dw[t,j] = dy[t,j] scale[e]. All of dscale is
 *                      written.
 *                      ptr: R w f32[T,k], R ids u16[T,k], R scale[E] of dt, RW dy f32[T,k], W|RW
 *                      dscale[E] of dt. */
typedef struct ps__args_moe_scale {
  uint32_t n_tokens, n_used, n_experts, dt;
  uint32_t accumulate; /* moe_scale_bwd alone */
} ps__args_moe_scale;

/* Experts with biases and gpt-oss's gate. Their gate_up has the rows of gate and up by turns, so
 * gu[r,2i] is gate's and gu[r,2i+1] up's.
 *
 * add_bias             x[r,c] += b[c], x in fp32: logits of a router.  ptr: RW x f32[rows,cols], R
 *                      b[cols] of dt.
 * moe_clamp_glu        s[r,i] = w (u + 1) g sigmoid(alpha g), with g = min(gu[r,2i] + bias[e,2i],
 *                      limit), u = gu[r,2i+1] + bias[e,2i+1] cut to -limit .. limit, e = ids[t,j],
 *                      w = weights[t,j] and r = slot[t,j]; one rounding.
 *                      ptr: R gu[R,2I], R bias[E,2I], R ids u16[T,k], R weights f32[T,k], R slot
 *                      i32[T,k], W s[R,I].
 * moe_clamp_glu_bwd    as moe_glu_bwd; a value that is cut has a gradient of 0.
 *                      ptr: RW ds[R,I], RW gu[R,2I], R bias, R ids, R weights, R slot, W dweights
 *                      f32[T,k].
 * moe_bias_dot         dweights[t,j] += sum_c dy[t,c] bias[ids[t,j],c]: what the bias of down is to
 *                      the weights. E is n_experts, cols the bias's length.
 *                      ptr: R dy[T,cols], R bias[E,cols], R ids u16[T,k], RW dweights f32[T,k].
 * moe_bias_sum         db[e,c] (+)= sum of x[slot[t,j],c], with weighted times weights[t,j], over
 *                      the choices of expert e: their rows are offsets[e] .. offsets[e+1] - 1. All
 *                      of db is written.
 *                      ptr: R x[R,cols], R offsets i32[E+1], R slot i32[T,k], R weights f32[T,k],
 *                      W|RW db[E,cols]. */
typedef struct ps__args_add_bias {
  uint32_t rows, cols, dt;
} ps__args_add_bias;
typedef struct ps__args_moe_clamp_glu {
  uint32_t n_tokens, n_used, n_experts, expert_dim, dt;
  float alpha, limit;
} ps__args_moe_clamp_glu;
typedef struct ps__args_moe_bias {
  uint32_t n_tokens, n_used, n_experts, cols, dt;
  uint32_t weighted, accumulate; /* moe_bias_sum alone */
} ps__args_moe_bias;

#endif
