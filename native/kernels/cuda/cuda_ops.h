/* cuda_ops.h - the CUDA functions of the op table (ops.h says what each computes);
 * ps_launch.exec is a ps__cuda_exec.
 *
 * Every function queues its work on exec->stream and returns: none waits, none allocates. A
 * negative return means that nothing or only a part was queued; ps_last_error() says why. Ids
 * and targets are on the device, where a launch cannot look: a token id out of range gives a row
 * of NaN forward and is left out backward, a target out of range a NaN loss and a zero gradient. */
#ifndef PS_KERNELS_CUDA_OPS_H
#define PS_KERNELS_CUDA_OPS_H
#include "kernels/ops.h"
#include "kernels/cuda/cuda_exec.h"
#ifdef __cplusplus
extern "C" {
#endif

ps_status ps__cuda_fill_zero(const ps_launch *l);
ps_status ps__cuda_accumulate(const ps_launch *l);
ps_status ps__cuda_embed_fwd(const ps_launch *l);
ps_status ps__cuda_embed_bwd(const ps_launch *l);
ps_status ps__cuda_rmsnorm_fwd(const ps_launch *l);
ps_status ps__cuda_rmsnorm_bwd(const ps_launch *l);
ps_status ps__cuda_gemm(const ps_launch *l);
ps_status ps__cuda_qkv_split_fwd(const ps_launch *l);
ps_status ps__cuda_qkv_split_bwd(const ps_launch *l);
ps_status ps__cuda_attention_fwd(const ps_launch *l);
ps_status ps__cuda_attention_bwd(const ps_launch *l);
ps_status ps__cuda_swiglu_fwd(const ps_launch *l);
ps_status ps__cuda_swiglu_bwd(const ps_launch *l);
ps_status ps__cuda_colsum(const ps_launch *l);
ps_status ps__cuda_cross_entropy(const ps_launch *l);
ps_status ps__cuda_sumsq(const ps_launch *l);

/* BYTES of exec->scratch that an op needs, by kernel and argument block: 0 where it needs none.
 * Attention: of the plans prepared for the shape, 0 before. */
size_t ps__cuda_scratch_bytes(const ps_kernel *kernel, const void *args);

/* cuDNN's version as cudnnGetVersion() gives it; 0 when there is none that serves. Opens the
 * library. */
uint32_t ps__cuda_cudnn_version(void);

/* flash-attn-4's version, 40000036 for 4.0.0b36; 0 where it is not built in. */
uint32_t ps__cuda_flash4_version(void);

/* ps__cuda_attention_prepare() - chooses the provider for attention of the shape @args and
 * builds its plan, kept for the process's life; a launch of a shape that was not prepared with
 * the same @deterministic is refused. Before the first step: it takes 0.1 to 0.5 s a shape. The
 * caller has made the device's context current. @scratch_bytes (may be NULL): what
 * ps__cuda_scratch_bytes() gives for it from now on. Threads: any, one at a time. Errors:
 * PS_EINVAL the shape; PS_EDEVICE no provider takes it, with each one's reason; PS_ENOMEM. */
ps_status ps__cuda_attention_prepare(const ps_kernel *kernel, const ps__args_attention *args,
                                     bool deterministic, size_t *scratch_bytes);

/* ps__cuda_attention_only() - for tests: attention is prepared with no other library than
 * @provider ("flash-attn-4", "cudnn", "flash-attn"; NULL: any), and every plan made so far is
 * forgotten. False where it is not built in; nothing changes then. */
bool ps__cuda_attention_only(const char *provider);

/* ps__cuda_blas_tune() - times cuBLASLt's candidates for the shape @args on @exec's stream and
 * keeps the fastest for later launches of that shape, for a long one (0.2 ms) the fastest under
 * load, which takes a second; the operands are device memory of the launch's sizes and
 * alignments (up to 256 bytes), filled with realistic values (c is overwritten). A shape that is
 * settled is not timed again. Before the first step only: it waits for the stream. A shape that
 * was not tuned takes the first candidate, and so does every shape where exec->deterministic is
 * set. Errors: PS_EINVAL as the launch; PS_EDEVICE; PS_ENOMEM. */
ps_status ps__cuda_blas_tune(const ps__cuda_exec *exec, const ps__args_gemm *args, const void *a,
                             const void *b, void *c, const void *bias, const void *residual);

/* ps__cuda_blas_settled() - would ps__cuda_blas_tune() have nothing to time: because the shape
 * was tuned, or the cache has its algorithm, or exec->deterministic is set? The operands are
 * addresses only. */
bool ps__cuda_blas_settled(const ps__cuda_exec *exec, const ps__args_gemm *args, const void *a,
                           const void *b, const void *c, const void *bias, const void *residual);

/* ps__cuda_blas_use_cache() - tuning on @blas takes what an earlier process chose on this GPU
 * with this cuBLASLt, and remembers what it chooses: in a file in @folder, by NULL in the user's
 * (gemm_cache.h). The device's context is current. Errors: PS_EDEVICE; PS_ENOMEM.
 * ps__cuda_blas_save_cache() - write the file where something new was chosen: after the last
 * tuning. What fails is logged. */
ps_status ps__cuda_blas_use_cache(ps__cuda_blas *blas, const char *folder);
void ps__cuda_blas_save_cache(ps__cuda_blas *blas);

#ifdef __cplusplus
}
#endif
#endif
