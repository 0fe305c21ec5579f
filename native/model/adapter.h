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
 * check that they are the adapters of @m: rank, alpha, targets, shapes, and no other tensor. Where
 * the config says that not all layers have the same modules, tensors of a parameter may be missing
 * in pairs: that parameter is zero. The others are LoRA's, or take the place of the model's own
 * (PEFT's modules_to_save): under the name that ps__peft_name() gives.
 * @base, @base_dir  the model's own tensors, whose ps__base_mark() is compared with the one that
 *                   the adapter has; NULL: they are not compared
 * @what             what the caller may have to say of it
 * Errors: those of ps_adapter_read(); PS_EINVAL: the adapter is of another model. */
typedef struct ps__adapter_info {
  double dropout;   /* of its config; nothing here has dropout */
  uint64_t n_saved; /* tensors that take the place of the model's own */
} ps__adapter_info;
ps_status ps__adapter_open_for(const ps_model *m, const char *dir, const char *base_dir,
                               ps_tensor_file *base, ps_tensor_file **out, ps__adapter_info *what);

/* The key under which the metadata of adapter_model.safetensors has ps__base_mark(). */
#define PS__BASE_MARK "penstock_base"
/* The same for the name of the ps_base that the adapter was trained beside; none: PS_BASE_PLAIN. */
#define PS__BASE_DTYPE "penstock_base_dtype"
/* A SHA-256 of samples of the base model's tensors in @f, rounded to bf16: it is the same for all
 * copies of a model, also in another dtype. PS_EIO, PS_ENOMEM. */
ps_status ps__base_mark(const ps_model *m, ps_tensor_file *f, char hex[65]);
#endif
