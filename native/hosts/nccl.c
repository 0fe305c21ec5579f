/* nccl.c - opens NCCL at run time. */
#include "hosts/nccl.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

ps_status ps__nccl_load(ps__nccl *out, const char *path) {
  ps__nccl l = {0};
  int version = 0;
  void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!lib)
    return ps__fail(PS_EDEVICE,
                    "NCCL is not there (%s): install NVIDIA's wheel nvidia-nccl-cu13 or "
                    "nvidia-nccl-cu12, or set PENSTOCK_NCCL to the path of libnccl.so.2",
                    dlerror());
  const struct {
    const char *name;
    void *at;
  } function[] = {{"ncclGetVersion", &l.GetVersion},
                  {"ncclGetUniqueId", &l.GetUniqueId},
                  {"ncclCommInitRankConfig", &l.CommInitRankConfig},
                  {"ncclCommGetAsyncError", &l.CommGetAsyncError},
                  {"ncclCommFinalize", &l.CommFinalize},
                  {"ncclCommDestroy", &l.CommDestroy},
                  {"ncclCommAbort", &l.CommAbort},
                  {"ncclGetErrorString", &l.GetErrorString},
                  {"ncclGetLastError", &l.GetLastError},
                  {"ncclGroupStart", &l.GroupStart},
                  {"ncclGroupEnd", &l.GroupEnd},
                  {"ncclSend", &l.Send},
                  {"ncclRecv", &l.Recv}};
  for (size_t i = 0; i < sizeof function / sizeof *function; i++) {
    void *symbol = dlsym(lib, function[i].name);
    if (!symbol)
      return ps__fail(PS_EDEVICE, "%s has no %s: give NCCL 2.19 or newer (PENSTOCK_NCCL)", path,
                      function[i].name);
    memcpy(function[i].at, &symbol, sizeof symbol);
  }
  const int r = l.GetVersion(&version);
  if (r != PS__NCCL_OK || version < PS__NCCL_LEAST)
    return ps__fail(PS_EDEVICE,
                    "%s is NCCL %d.%d.%d: 2.19 or newer is needed, set PENSTOCK_NCCL to its path",
                    path, version / 10000, version % 10000 / 100, version % 100);
  snprintf(l.version, sizeof l.version, "%d.%d.%d", version / 10000, version % 10000 / 100,
           version % 100);
  *out = l;
  return PS_OK;
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
static ps__nccl library; /* written once */
static ps_status opened;
static char why[512];

static void open_once(void) {
  const char *given = getenv("PENSTOCK_NCCL"), *blocking = getenv("NCCL_COMM_BLOCKING");
  if (blocking && strcmp(blocking, "1") == 0) {
    snprintf(why, sizeof why,
             "NCCL_COMM_BLOCKING is 1: unset it, a failure could not end its calls");
    opened = PS_EDEVICE;
    return;
  }
  opened = ps__nccl_load(&library, given && *given ? given : "libnccl.so.2");
  if (opened != PS_OK)
    snprintf(why, sizeof why, "%s", ps_last_error());
}

ps_status ps__nccl_open(const ps__nccl **out) {
  pthread_once(&once, open_once);
  if (opened != PS_OK)
    return ps__fail(opened, "%s", why);
  *out = &library;
  return PS_OK;
}
