/* abi.c - sizes of the public structs by name, for callers in other languages. */
#include <penstock/tensors.h>
#include <penstock/data.h>
#include <penstock/engine.h>
#include <penstock/generate.h>
#include <penstock/hardware.h>
#include <penstock/hosts.h>
#include <penstock/model.h>
#include <penstock/plan.h>
#include <penstock/checkpoint.h>
#include <penstock/status.h>
#include <penstock/train.h>
#include <string.h>

#define ENTRY(type) {#type, sizeof(type)}
static const struct {
  const char *name;
  size_t bytes;
} table[] = {
    ENTRY(ps_field_name),
    ENTRY(ps_access),
    ENTRY(ps_launch),
    ENTRY(ps_work),
    ENTRY(ps_kernel),
    ENTRY(ps_tag),
    ENTRY(ps_op),
    ENTRY(ps_wait),
    ENTRY(ps_op_view),
    ENTRY(ps_place),
    ENTRY(ps_link),
    ENTRY(ps_space_config),
    ENTRY(ps_stream_config),
    ENTRY(ps_engine_config),
    ENTRY(ps_run_config),
    ENTRY(ps_trace_event),
    ENTRY(ps_trace_gauge),
    ENTRY(ps_sim_cost),
    ENTRY(ps_tensor_info),
    ENTRY(ps_tensor_spec),
    ENTRY(ps_model_config),
    ENTRY(ps_rope),
    ENTRY(ps_param_info),
    ENTRY(ps_flops),
    ENTRY(ps_lora),
    ENTRY(ps_gemm_rate),
    ENTRY(ps_attention_rate),
    ENTRY(ps_delta_rate),
    ENTRY(ps_contention_rate),
    ENTRY(ps_link_rate),
    ENTRY(ps_rate_difference),
    ENTRY(ps_hardware),
    ENTRY(ps_hardware_ask),
    ENTRY(ps_gpu_state),
    ENTRY(ps_plan_config),
    ENTRY(ps_ramp_stage),
    ENTRY(ps_plan_report),
    ENTRY(ps_stall),
    ENTRY(ps_op_time),
    ENTRY(ps_throughput),
    ENTRY(ps_train_config),
    ENTRY(ps_step_metrics),
    ENTRY(ps_validation),
    ENTRY(ps_checkpoint_info),
    ENTRY(ps_checkpoint_report),
    ENTRY(ps_generate_config),
    ENTRY(ps_generate_report),
    ENTRY(ps_generate_request),
    ENTRY(ps_generate_stats),
    ENTRY(ps_dataset_part),
    ENTRY(ps_hosts_config),
    ENTRY(ps_hosts_task),
};

size_t ps_abi_size(const char *struct_name) {
  if (struct_name)
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
      if (strcmp(table[i].name, struct_name) == 0)
        return table[i].bytes;
  return 0;
}
