/* cuda_exec.h - what ps_launch.exec points to on the CUDA backend, and the cuBLASLt state that
 * the products share.
 *
 * Plain C, and no header of CUDA: the engine's side includes it too. */
#ifndef PS_KERNELS_CUDA_EXEC_H
#define PS_KERNELS_CUDA_EXEC_H
#include <penstock/status.h>
#include <stdbool.h>
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;
typedef struct ps__cuda_blas ps__cuda_blas;

/* Everything is borrowed for the call; scratch and the workspace of blas are used until the op
 * is done on the stream, so two streams must not share them. */
typedef struct ps__cuda_exec {
  struct CUstream_st *stream;
  /* device memory, 256-byte aligned, at least what every op that runs needs (ps__op_info) */
  void *scratch;
  size_t scratch_bytes;
  ps__cuda_blas *blas; /* NULL where no product runs */
  int device;          /* CUDA ordinal; the caller has made its primary context current */
  int n_sms;
  /* the same bits in every run: products take the first algorithm instead of the fastest timed */
  bool deterministic;
  /* shared memory that a block may have at most, where that is less than the device's: tests run
   * the kernels of smaller GPUs so; 0: the device's */
  size_t shared_bytes;
} ps__cuda_exec;

/* ps__cuda_blas_create() - a cuBLASLt handle for the current device; products use @workspace,
 * @workspace_bytes of device memory (256-byte aligned; 32 MiB is what Hopper's kernels like, 4
 * MiB others), borrowed until destroyed. Allocates no device memory itself beyond what loading
 * cuBLASLt's modules takes. Errors: PS_ENOMEM; PS_EDEVICE. */
ps_status ps__cuda_blas_create(ps__cuda_blas **out, void *workspace, size_t workspace_bytes);
void ps__cuda_blas_destroy(ps__cuda_blas *blas);

#ifdef __cplusplus
}
#endif
#endif
