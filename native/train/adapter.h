/* adapter.h - a trainer's LoRA adapters. Internal. */
#ifndef PS_TRAIN_ADAPTER_H
#define PS_TRAIN_ADAPTER_H
#include "io/io.h"
#include "model/adapter.h"
#include "train/trainer.h"

/* Whether the model has adapters. */
static inline bool ps__has_adapters(const ps_trainer *t) { return t->plan->model->lora.rank > 0; }
/* Open adapter @dir, and note the mark of the base model in @weights, which an adapter that this
 * trainer saves has. @dir NULL: only note it. @weights NULL: no model was read. @base: the weights
 * for ps__adapter_open_for(), or NULL. */
ps_status ps__adapter_open(ps_trainer *t, const char *dir, ps_tensor_file *base,
                           ps_tensor_file *weights, ps_tensor_file **out);
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
