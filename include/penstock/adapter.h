/* penstock/adapter.h - LoRA adapters on disk, in PEFT's layout.
 *
 * A directory holds adapter_config.json and adapter_model.safetensors. A tensor is named
 * base_model.model.model.layers.N.self_attn.q_proj.lora_A.weight, or lora_B. ps_trainer_save()
 * writes such a directory when the plan has adapters (ps_plan_config.lora). */
#ifndef PENSTOCK_ADAPTER_H
#define PENSTOCK_ADAPTER_H
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ps_adapter_read() - what a plan must be made with to train the adapter in @dir: rank, alpha and
 * targets.
 * @out   untouched on error.
 * Errors: PS_EIO. PS_EFORMAT names the file, the key and the value. Refused are keys that change
 *         the math in a way that is not supported: DoRA, biases, other ranks for some layers, a
 *         base model that the adapter's initialization changed. */
PS_API ps_status ps_adapter_read(ps_lora *out, const char *dir);

/* ps_adapter_check() - whether the adapter in @dir fits the model in @base_dir: shapes, and no
 * tensor that the model has no place for. An adapter that ps_trainer_save() wrote has a hash of its
 * base model, which must be this one's. Of any other adapter a base model of another name is a
 * warning in the log (ps_log_set()).
 * Errors: those of ps_adapter_read(); PS_EINVAL: the adapter is of another model. */
PS_API ps_status ps_adapter_check(const char *dir, const char *base_dir);

#ifdef __cplusplus
}
#endif
#endif
