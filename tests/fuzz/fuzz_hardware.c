/* fuzz_hardware.c - a file that describes a machine, read as this one's and as another's. */
#include "fuzz.h"
#include <penstock/hardware.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  const char *path = fuzz_file("hardware.json", data, bytes);
  ps_hardware hw = {.struct_bytes = sizeof hw};
  fuzz_check(ps_hardware_describe(&hw, path));
  hw = (ps_hardware){.struct_bytes = sizeof hw};
  fuzz_check(ps_hardware_read(&hw, path, PS_BACKEND_CPU, 0, 2));
  return 0;
}
