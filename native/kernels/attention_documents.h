/* attention_documents.h - which attention library takes rows with several documents, by GPU. The
 * libraries' own files refuse by this (kernels/cuda), and plans for a GPU that is not here read
 * it. */
#ifndef PS_KERNELS_ATTENTION_DOCUMENTS_H
#define PS_KERNELS_ATTENTION_DOCUMENTS_H
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

/* cuDNN, where documents are found on the device. */
static inline bool ps__cudnn_finds_documents(uint32_t compute_capability) {
  return compute_capability / 10 == 9 || compute_capability / 10 == 10;
}

/* flash-attn, whatever the documents. */
static inline bool ps__flash_takes(uint32_t head_dim, bool window, bool softcap) {
  return !window && !softcap && (head_dim == 64 || head_dim == 128);
}

/* Whether code for the compute capabilities @built, such as "80 120", runs there: machine code on
 * its own major version, and that of the last one is translated for newer GPUs. "": there is none.
 */
static inline bool ps__flash_runs(const char *built, uint32_t compute_capability) {
  unsigned long last = 0;
  for (char *end; *built; built = end) {
    last = strtoul(built, &end, 10);
    if (last / 10 == compute_capability / 10 && last <= compute_capability)
      return true;
  }
  return last && last <= compute_capability;
}
#endif
