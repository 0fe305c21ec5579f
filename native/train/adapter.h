/* adapter.h - LoRA adapters on disk and in a trainer. Internal. */
#ifndef PS_TRAIN_ADAPTER_H
#define PS_TRAIN_ADAPTER_H
#include "io/io.h"
#include "train/trainer.h"
#include <penstock/adapter.h>

/* The name of a parameter in an adapter's file is this and the model's own name. */
#define PS__PEFT_PREFIX "base_model.model."
enum { PS__PEFT_NAME_BYTES = PS_PARAM_NAME_BYTES + sizeof PS__PEFT_PREFIX };
void ps__peft_name(char out[PS__PEFT_NAME_BYTES], const char *name);

/* Open an adapter's directory: what its config says, and its tensors, which the caller closes. */
ps_status ps__adapter_open(ps_lora *lora, ps_tensor_file **out, const char *dir);
/* Check that the file has the adapters of @m, and nothing else. PS_EINVAL. */
ps_status ps__adapter_check(const ps_model *m, const ps_lora *lora, const ps_tensor_file *f,
                            const char *dir);
/* Whether the model has adapters. */
static inline bool ps__has_adapters(const ps_trainer *t) { return t->plan->model->lora.rank > 0; }
/* Open @dir, and check that it is of the plan's model, rank, alpha and targets. */
ps_status ps__adapter_open_for(const ps_trainer *t, const char *dir, ps_tensor_file **out);
/* Read the adapters into the host space. */
ps_status ps__adapter_load(ps_trainer *t, ps_tensor_file *f);
/* The stem of the files that weights are saved in. */
static inline const char *ps__weights_stem(const ps_trainer *t) {
  return ps__has_adapters(t) ? "adapter_model" : "model";
}
/* Write adapter_config.json into @stage. */
ps_status ps__adapter_write_config(const ps_trainer *t, const ps__stage *stage, const char *dir);
/* The SHA-256 of the frozen weights in host memory, which does not change in a run: computed once,
 * and beside the steps in a run's first checkpoint. A checkpoint names the weights that it lacks by
 * it. */
ps_status ps__base_hash(ps_trainer *t, char hex[65]);
#endif
