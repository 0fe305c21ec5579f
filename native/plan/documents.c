/* documents.c - whether a GPU and this build have attention for rows with several documents. */
#include "kernels/attention_documents.h"
#include "plan/plan_impl.h"

#ifndef PS_FLASH_ARCH
#  define PS_FLASH_ARCH ""
#endif

const char *ps__documents_lack(char text[PS__DOCUMENTS_TEXT], const ps_plan *p, const char *flash) {
  const ps_model_config *m = &p->model->cfg;
  const uint32_t sm = p->hw.compute_capability;
  if (p->hw.backend != PS_BACKEND_CUDA || p->cfg.one_document || !sm ||
      ps__cudnn_finds_documents(sm))
    return NULL;
  bool window = false;
  uint32_t head_dim = m->head_dim;
  for (uint32_t i = 0; i < m->n_layers; i++) {
    window |= (m->layer_flags[i] & PS_LAYER_WINDOW) && m->window < p->cfg.seq_len;
    head_dim = m->layer_flags[i] & PS_LAYER_GLOBAL ? m->global_head_dim : head_dim;
  }
  if (!ps__flash_takes(head_dim, window, m->attention_softcap > 0))
    snprintf(text, PS__DOCUMENTS_TEXT,
             "no attention library takes several documents a row on compute capability %u.%u with "
             "this model's %s: train on one document a sequence",
             sm / 10, sm % 10,
             window                     ? "windows"
             : m->attention_softcap > 0 ? "soft cap"
                                        : "head_dim");
  else if (!ps__flash_runs(flash ? flash : PS_FLASH_ARCH, sm))
    snprintf(text, PS__DOCUMENTS_TEXT,
             "attention over several documents a row needs flash-attn on compute capability "
             "%u.%u, and this build lacks it: build with FLASH_ATTN=1 (make does where it finds "
             "the GPU)",
             sm / 10, sm % 10);
  else
    return NULL;
  return text;
}
