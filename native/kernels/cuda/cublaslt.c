/* cublaslt.c - cuBLASLt, opened at run time: the functions of cublasLt.h that matmul.cu calls,
 * each handing on to the library's.
 *
 * So the library loads on machines without cuBLAS. They are hidden: a program that links
 * cuBLASLt itself keeps its own. Without the library every call says
 * CUBLAS_STATUS_NOT_INITIALIZED; ps__cublaslt_open() says why, and what to do. */
#include "kernels/cuda/cublaslt.h"
#include "core/core.h"
#include <cublasLt.h>
#include <dlfcn.h>
#include <pthread.h>

/* clang-format off */
#define CALLS(X)                                                                                  \
  X(Create) X(Destroy) X(GetStatusString) X(Matmul) X(MatmulAlgoGetHeuristic)                     \
  X(MatmulDescInit_internal) X(MatmulDescSetAttribute) X(MatmulPreferenceInit_internal)           \
  X(MatmulPreferenceSetAttribute) X(MatrixLayoutInit_internal) X(MatmulAlgoCheck) X(GetVersion)
/* clang-format on */
#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x)
#define LIBRARY  "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR)

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char why[256];
static struct {
#define FIELD(name) __typeof__(&cublasLt##name) name;
  CALLS(FIELD)
#undef FIELD
} lt; /* functions only; written once, all of them or none */

static void open_once(void) {
  void *lib = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL), *found[16];
  if (!lib) {
    snprintf(why, sizeof why, "%s", dlerror());
    return;
  }
  int n = 0;
#define FIND(name)                                                                                 \
  if (!(found[n++] = dlsym(lib, "cublasLt" #name)))                                                \
    snprintf(why, sizeof why, "%s lacks cublasLt%s", LIBRARY, #name);
  CALLS(FIND)
#undef FIND
  if (why[0])
    return;
  n = 0;
#define KEEP(name) *(void **)&lt.name = found[n++];
  CALLS(KEEP)
#undef KEEP
}

ps_status ps__cublaslt_open(void) {
  pthread_once(&once, open_once);
  if (!lt.Create)
    return ps__fail(PS_EDEVICE,
                    "no cuBLASLt (%s): install the CUDA toolkit's cuBLAS, or the wheel of "
                    "python/requirements-cuda%d.txt",
                    why, CUBLAS_VER_MAJOR);
  return PS_OK;
}

uint32_t ps__cublaslt_version(void) {
  pthread_once(&once, open_once);
  return (uint32_t)cublasLtGetVersion();
}

#define GIVE(name, ...) return lt.name ? lt.name(__VA_ARGS__) : CUBLAS_STATUS_NOT_INITIALIZED

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { GIVE(Create, handle); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { GIVE(Destroy, handle); }
const char *cublasLtGetStatusString(cublasStatus_t status) {
  return lt.GetStatusString ? lt.GetStatusString(status) : "cuBLASLt is not there";
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t la, const void *b,
                              cublasLtMatrixLayout_t lb, const void *beta, const void *c,
                              cublasLtMatrixLayout_t lc, void *d, cublasLtMatrixLayout_t ld,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes,
                              cudaStream_t stream) {
  GIVE(Matmul, handle, desc, alpha, a, la, b, lb, beta, c, lc, d, ld, algo, workspace, bytes,
       stream);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t la, cublasLtMatrixLayout_t lb,
                                              cublasLtMatrixLayout_t lc, cublasLtMatrixLayout_t ld,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t *results, int *n) {
  GIVE(MatmulAlgoGetHeuristic, handle, desc, la, lb, lc, ld, preference, wanted, results, n);
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
  GIVE(MatmulDescInit_internal, desc, size, compute, scale);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attr, const void *buf,
                                              size_t bytes) {
  GIVE(MatmulDescSetAttribute, desc, attr, buf, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference,
                                                     size_t size) {
  GIVE(MatmulPreferenceInit_internal, preference, size);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attr,
                                                    const void *buf, size_t bytes) {
  GIVE(MatmulPreferenceSetAttribute, preference, attr, buf, bytes);
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld) {
  GIVE(MatrixLayoutInit_internal, layout, size, type, rows, cols, ld);
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t la, cublasLtMatrixLayout_t lb,
                                       cublasLtMatrixLayout_t lc, cublasLtMatrixLayout_t ld,
                                       const cublasLtMatmulAlgo_t *algo,
                                       cublasLtMatmulHeuristicResult_t *result) {
  GIVE(MatmulAlgoCheck, handle, desc, la, lb, lc, ld, algo, result);
}

size_t cublasLtGetVersion(void) { return lt.GetVersion ? lt.GetVersion() : 0; }
