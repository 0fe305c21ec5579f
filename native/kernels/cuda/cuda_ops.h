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

#define PS__DECLARE_CUDA(op) ps_status ps__cuda_##op(const ps_launch *l);
PS__OPS(PS__DECLARE_CUDA)
#undef PS__DECLARE_CUDA

/* cuDNN's version as cudnnGetVersion() gives it; 0 when there is none that serves. Opens the
 * library. */
uint32_t ps__cuda_cudnn_version(void);

/* flash-attn-4's version, 40000036 for 4.0.0b36; 0 where it is not built in. */
uint32_t ps__cuda_flash4_version(void);

/* The prepare() of attention's descriptions: chooses the provider for the shape @args and builds
 * its plan, kept for the process's life. Takes 0.1 to 0.5 s a shape, before the first step. A
 * launch of a shape that was not prepared with the same exec->deterministic is refused. @exec: a
 * ps__cuda_exec, of which `deterministic` is read. @scratch_bytes: what the plan takes. The caller
 * has made the device's context current. Threads: any, one at a time. Errors: PS_EINVAL the shape;
 * PS_EDEVICE no provider takes it, with each one's reason; PS_ENOMEM. */
ps_status ps__cuda_prepare_attention_fwd(const void *args, void *exec, size_t *scratch_bytes);
ps_status ps__cuda_prepare_attention_bwd(const void *args, void *exec, size_t *scratch_bytes);

/* ps__cuda_attention_only() - for tests: attention is prepared with no other library than
 * @provider ("flash-attn-4", "cudnn", "flash-attn"; NULL: any), and every plan made so far is
 * forgotten. False where it is not built in; nothing changes then. */
bool ps__cuda_attention_only(const char *provider);

/* The tune() of products' descriptions: times cuBLASLt's candidates for the launch's shape on its
 * stream, and keeps the fastest for later launches of that shape. For a long product (0.2 ms) that
 * is the fastest under load, which takes a second to find. The operands are device memory of the
 * launch's sizes and alignments (up to 256 bytes), filled with realistic values; C is overwritten.
 * A tuned shape is not timed again. Before the first step only: waits for the stream. A shape that
 * was not tuned takes the first candidate, and so does every shape where exec->deterministic is
 * set. Errors: PS_EINVAL as the launch; PS_EDEVICE; PS_ENOMEM. */
ps_status ps__cuda_tune_gemm(const ps_launch *l);

/* The same of FP8 products, with one difference: where the shape is to be timed, it first fills the
 * operands and their scales with ps__cuda_draw_fp8(), because values of bf16 are no FP8 codes. */
ps_status ps__cuda_tune_gemm_fp8(const ps_launch *l);

/* ps__cuda_draw_fp8() - @n codes of @dt (PS__E4M3, PS__E5M2) as a quantized tensor has them, about
 * N(0, 1/16 of the largest number), into device memory at @q, in order on exec->stream. @n: a
 * multiple of 4; @q: of 16. Errors: PS_EINTERNAL the arguments; PS_EDEVICE. */
ps_status ps__cuda_draw_fp8(const ps__cuda_exec *exec, void *q, uint64_t n, uint32_t dt);

/* The tuned() of products' descriptions: true where ps__cuda_tune_gemm() has nothing to time,
 * because the shape was tuned, or the cache has its algorithm, or exec->deterministic is set. The
 * operands are addresses only. */
bool ps__cuda_gemm_tuned(const ps_launch *l);
bool ps__cuda_gemm_fp8_tuned(const ps_launch *l);

/* ps__cuda_blas_use_cache() - tuning on @blas uses the choices of earlier processes on this GPU
 * with this cuBLASLt, and records its own, in a file in @folder; NULL: in the user's cache folder
 * (gemm_cache.h). The device's context is current. Errors: PS_EDEVICE; PS_ENOMEM.
 * ps__cuda_blas_save_cache() - write the file where something new was chosen: after the last
 * tuning. A failure is logged. */
ps_status ps__cuda_blas_use_cache(ps__cuda_blas *blas, const char *folder);
void ps__cuda_blas_save_cache(ps__cuda_blas *blas);

#ifdef __cplusplus
}
#endif
#endif
