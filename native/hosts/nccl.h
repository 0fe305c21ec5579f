/* nccl.h - NCCL's functions, found at run time. Internal.
 *
 * The declarations are the project's own, of NCCL 2.19 and later, and need no header of NCCL's: its
 * functions and structs keep their layout (a struct says its size and version). */
#ifndef PS_HOSTS_NCCL_H
#define PS_HOSTS_NCCL_H
#include "core/core.h"
#include <limits.h>

enum { PS__NCCL_OK = 0, PS__NCCL_IN_PROGRESS = 7, PS__NCCL_INT8 = 0 };
/* From 2.19 on ncclCommAbort() may come from another thread than a call that has not ended. */
enum { PS__NCCL_LEAST = 21900, PS__NCCL_CONFIG_OF = 21700 };
enum { PS__NCCL_ID_BYTES = 128 };
typedef struct ps__nccl_id {
  char internal[PS__NCCL_ID_BYTES];
} ps__nccl_id;

/* As of 2.17. What is undefined is left to NCCL. */
typedef struct ps__nccl_config {
  size_t size;
  unsigned int magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
  int split_share;
} ps__nccl_config;
#define PS__NCCL_CONFIG                                                                            \
  {.size = sizeof(ps__nccl_config),                                                                \
   .magic = 0xcafebeef,                                                                            \
   .version = PS__NCCL_CONFIG_OF,                                                                  \
   .blocking = 0,                                                                                  \
   .cga_cluster_size = INT_MIN,                                                                    \
   .min_ctas = INT_MIN,                                                                            \
   .max_ctas = INT_MIN,                                                                            \
   .net_name = NULL,                                                                               \
   .split_share = INT_MIN}

typedef void *ps__nccl_comm;

/* Each returns PS__NCCL_OK, an error, or of communicators that do not block PS__NCCL_IN_PROGRESS:
 * CommGetAsyncError() then says when it is over. */
typedef struct ps__nccl {
  int (*GetVersion)(int *version);
  int (*GetUniqueId)(ps__nccl_id *id);
  int (*CommInitRankConfig)(ps__nccl_comm *comm, int n, ps__nccl_id id, int rank,
                            ps__nccl_config *config);
  int (*CommGetAsyncError)(ps__nccl_comm comm, int *error);
  int (*CommFinalize)(ps__nccl_comm comm);
  int (*CommDestroy)(ps__nccl_comm comm);
  int (*CommAbort)(ps__nccl_comm comm);
  const char *(*GetErrorString)(int error);
  const char *(*GetLastError)(ps__nccl_comm comm);
  int (*GroupStart)(void);
  int (*GroupEnd)(void);
  int (*Send)(const void *data, size_t n, int type, int peer, ps__nccl_comm comm, void *stream);
  int (*Recv)(void *data, size_t n, int type, int peer, ps__nccl_comm comm, void *stream);
  char version[32]; /* "2.29.7" */
} ps__nccl;

/* ps__nccl_load() - open the library @path. It stays open: its threads may outlive a communicator.
 * Errors: PS_EDEVICE says what is missing, and what to do.
 * ps__nccl_open() - the same once a process, of PENSTOCK_NCCL or else of libnccl.so.2. */
ps_status ps__nccl_load(ps__nccl *out, const char *path);
ps_status ps__nccl_open(const ps__nccl **out);
#endif
