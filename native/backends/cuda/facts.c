/* facts.c - what a GPU is, as the driver and the libraries say. */
#include "backends/cuda/driver.h"
#include "backends/cuda/probe.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/cuda_ops.h"
#include <ctype.h>

uint32_t ps__cuda_n_devices(void) {
  const ps__cuda_driver *cu;
  int n = 0;
  if (ps__cuda_driver_open(&cu) != PS_OK)
    return 0;
  if (cu->DeviceGetCount(&n) != CUDA_SUCCESS || n <= 0) {
    (void)ps__fail(PS_EDEVICE, "the CUDA driver shows no GPU: look at nvidia-smi and "
                               "CUDA_VISIBLE_DEVICES, or use the cpu backend");
    return 0;
  }
  return (uint32_t)n;
}

/* Two transfers a clock over the whole width: 3201 MHz and 6144 bits of an H200 are 4.92 TB/s.
 * Virtual GPUs tell no clock. */
static double memory_peak(const ps__cuda_driver *cu, CUdevice dev) {
  int khz = 0, bits = 0;
  if (cu->DeviceGetAttribute(&khz, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, dev) != CUDA_SUCCESS ||
      khz < 1000 ||
      cu->DeviceGetAttribute(&bits, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, dev) !=
          CUDA_SUCCESS ||
      bits < 8)
    return 0;
  return 2e3 * khz * bits / 8;
}

int ps__cuda_numa_node(const ps__cuda_driver *cu, CUdevice dev) {
  char id[32] = "", path[96];
  int node = -1;
  if (cu->DeviceGetPCIBusId(id, sizeof id, dev) != CUDA_SUCCESS)
    return -1;
  for (char *c = id; *c; c++)
    *c = (char)tolower((unsigned char)*c);
  snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", id);
  FILE *f = fopen(path, "re");
  if (f && fscanf(f, "%d", &node) != 1)
    node = -1;
  if (f)
    fclose(f);
  return node;
}

ps_status ps__cuda_facts(ps_hardware *hw) {
  const ps__cuda_driver *cu;
  CUdevice dev;
  int n = 0, major = 0, minor = 0, sms = 0, version = 0;
  size_t total = 0;
  uint64_t others = 0;
  PS_TRY(ps__cuda_driver_open(&cu));
  if (cu->DeviceGetCount(&n) != CUDA_SUCCESS || hw->device >= (uint32_t)n)
    return ps__fail(PS_EDEVICE,
                    "GPU %u is asked for, %d visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES",
                    hw->device, n);
  CUresult r = cu->DeviceGet(&dev, (int)hw->device);
  if (r == CUDA_SUCCESS)
    r = cu->DeviceGetName(hw->device_name, sizeof hw->device_name, dev);
  if (r == CUDA_SUCCESS)
    r = cu->DeviceTotalMem(&total, dev);
  if (r == CUDA_SUCCESS)
    r = cu->DeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, dev);
  if (r == CUDA_SUCCESS)
    r = cu->DeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, dev);
  if (r == CUDA_SUCCESS)
    r = cu->DeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, dev);
  if (r == CUDA_SUCCESS)
    r = cu->DriverGetVersion(&version);
  if (r != CUDA_SUCCESS)
    return ps__cuda_fail(cu, r, "cuDeviceGetAttribute");
  PS_TRY(ps__cuda_supported(cu, dev, hw->device));
  ps__cuda_usage_begin(cu, hw->device, &others);
  hw->compute_capability = (uint32_t)(10 * major + minor);
  hw->n_sms = (uint32_t)sms;
  hw->driver_version = (uint32_t)version;
  hw->device_memory_bytes = total > others ? total - others : 0;
  hw->cudnn_version = ps__cuda_cudnn_version();
  hw->flash4_version = ps__cuda_flash4_version();
  hw->cublaslt_version = ps__cublaslt_version();
  hw->device_peak_bytes_per_s = memory_peak(cu, dev);
  hw->link_peak_bytes_per_s = ps__cuda_link_bytes_per_s(cu, hw->device);
  return PS_OK;
}
