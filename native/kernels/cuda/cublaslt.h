/* cublaslt.h - is cuBLASLt there? */
#ifndef PS_KERNELS_CUDA_CUBLASLT_H
#define PS_KERNELS_CUDA_CUBLASLT_H
#include <penstock/status.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Opens cuBLASLt's library, once a process, any thread: before any product. PS_EDEVICE says why
 * not and what to install. */
ps_status ps__cublaslt_open(void);

/* Its version as cublasLtGetVersion() gives it, 0 when there is none. Opens the library. */
uint32_t ps__cublaslt_version(void);

#ifdef __cplusplus
}
#endif
#endif
