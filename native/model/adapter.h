/* adapter.h - LoRA adapters on disk, in PEFT's layout: reading, and whether they are a model's. */
#ifndef PS_MODEL_ADAPTER_H
#define PS_MODEL_ADAPTER_H
#include "model/model.h"
#include <penstock/adapter.h>

/* The name of a parameter in an adapter's file is this and the model's own name. */
#define PS__PEFT_PREFIX "base_model.model."
enum { PS__PEFT_NAME_BYTES = PS_PARAM_NAME_BYTES + sizeof PS__PEFT_PREFIX };
void ps__peft_name(char out[PS__PEFT_NAME_BYTES], const char *name);

/* ps__adapter_open_for() - open the tensors of the adapter in @dir, which the caller closes, and
 * check that they are the adapters of @m: rank, alpha, targets, shapes, and no other tensor.
 * @dropout  of its config; nothing here has dropout.
 * Errors: those of ps_adapter_read(); PS_EINVAL: the adapter is of another model. */
ps_status ps__adapter_open_for(const ps_model *m, const char *dir, ps_tensor_file **out,
                               double *dropout);
#endif
