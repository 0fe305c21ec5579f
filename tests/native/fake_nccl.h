/* fake_nccl.h - what stands for a CUDA stream between test_hosts_net and its libfake_nccl. */
#ifndef PS_TESTS_FAKE_NCCL_H
#define PS_TESTS_FAKE_NCCL_H
#include <stddef.h>
#include <stdint.h>

typedef struct fake_lane fake_lane;
struct fake_lane {
  void (*queue)(fake_lane *lane, void (*run)(void *arg), void *arg);
};
#endif
