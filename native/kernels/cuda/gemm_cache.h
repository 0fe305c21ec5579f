/* gemm_cache.h - the algorithms that were timed and chosen for matrix products, on disk: one
 * file a GPU and a version of cuBLASLt. Plain C without CUDA's headers. */
#ifndef PS_KERNELS_CUDA_GEMM_CACHE_H
#define PS_KERNELS_CUDA_GEMM_CACHE_H
#include "kernels/ops.h"
#ifdef __cplusplus
extern "C" {
#endif

/* What an algorithm is chosen for. All bytes count, padding too: zero the whole, then fill. */
typedef struct ps__gemm_key {
  ps__args_gemm args;         /* flags 0 or 1 */
  uint32_t align[5];          /* of A, B, C, bias, residual: BYTES, at most 256; 0 where absent */
  uint32_t fast_accumulation; /* 0 or 1, of FP8 operands */
  uint64_t workspace_bytes;   /* that it may use */
} ps__gemm_key;
/* cublasLtMatmulAlgo_t: may be stored for the same version of the library */
enum { PS_GEMM_ALGO_WORDS = 8 };
typedef struct ps__gemm_choice {
  ps__gemm_key key;
  uint64_t algo[PS_GEMM_ALGO_WORDS];
} ps__gemm_choice;

typedef struct ps__gemm_cache ps__gemm_cache;

/* ps__gemm_cache_open() - the choices saved for @gpu and @version in @folder. NULL: the folder
 * PENSTOCK_CACHE, else XDG_CACHE_HOME/penstock, else ~/.cache/penstock, else none, and then nothing
 * is saved. Without a file the cache is empty. A damaged file, or one for another GPU or version,
 * is not used: the log says so in a line, and the next save replaces the file. @out is owned by the
 * caller. Errors: PS_ENOMEM. */
PS_API ps_status ps__gemm_cache_open(ps__gemm_cache **out, const char *folder, const char *gpu,
                                     uint64_t version);
PS_API void ps__gemm_cache_close(ps__gemm_cache *c); /* NULL is a no-op; saves nothing */
/* NULL: none; until the next add */
PS_API const ps__gemm_choice *ps__gemm_cache_find(const ps__gemm_cache *c, const ps__gemm_key *key);
/* or replace. PS_ENOMEM */
PS_API ps_status ps__gemm_cache_add(ps__gemm_cache *c, const ps__gemm_choice *choice);
/* ps__gemm_cache_save() - write the file where something was added: whole under another name in
 * the folder, then renamed; of several processes that save, the last wins. A failure is a line
 * in the log: the choices are timed again next time. */
PS_API void ps__gemm_cache_save(ps__gemm_cache *c);

#ifdef __cplusplus
}
#endif
#endif
