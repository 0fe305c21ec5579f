/* rates.c - a machine's rates, as a table or as JSON. */
#include "cli/cli.h"

static void print_machine(FILE *out, const ps_hardware *hw) {
  char memory[32], overhead[32];
  if (hw->backend == PS_BACKEND_CUDA)
    fprintf(out,
            "%s, compute capability %u.%u, %u SMs, %s of memory, of which driver and libraries "
            "take %s; %s%s\n",
            hw->device_name, hw->compute_capability / 10, hw->compute_capability % 10, hw->n_sms,
            cli_bytes(memory, hw->device_memory_bytes),
            cli_bytes(overhead, hw->device_overhead_bytes),
            hw->flash4_version ? "with flash-attn-4, " : "",
            hw->cudnn_version ? "with cuDNN" : "no cuDNN was found");
  fprintf(out, "%s, %u threads of %u CPUs, %s of memory (%s)\n", hw->name, hw->n_threads,
          hw->n_cpus, cli_bytes(memory, hw->host_memory_bytes),
          hw->measured ? "rates measured" : "rates estimated");
  if (hw->moved_percent)
    fprintf(out, "  rates moved by up to %u%% while they were measured: their medians count\n",
            hw->moved_percent);
  if (hw->other_work_percent)
    fprintf(out,
            "  other work took %u%% of the CPUs while the rates were measured: they are those "
            "beside that work\n",
            hw->other_work_percent);
}

/* A line of the table: a case, its rate in units of @unit, and the percentage of the hardware's
 * @ceiling. A rate above that ceiling comes from a cache, and gets no percentage. */
static void line(FILE *out, const char *what, double rate, double unit, const char *unit_name,
                 double ceiling) {
  if (!(rate > 0))
    return;
  fprintf(out, "  %-44s %9.1f %-8s", what, rate / unit, unit_name);
  if (ceiling > 0 && rate <= ceiling)
    fprintf(out, " %5.1f%%", 100 * rate / ceiling);
  fputc('\n', out);
}

/* @list: PS_MAX_GEMM_RATES of them. */
static void products_of(FILE *out, const char *products, const ps_gemm_rate *list, double peak) {
  char what[64];
  for (const ps_gemm_rate *r = list; r < list + PS_MAX_GEMM_RATES && r->rows; r++) {
    snprintf(what, sizeof what, "%s, %u rows, forward", products, r->rows);
    line(out, what, r->forward_flops_per_s, 1e9, "GFLOP/s", peak);
    line(out, "    gradient of inputs", r->dgrad_flops_per_s, 1e9, "GFLOP/s", peak);
    line(out, "    gradient of weights", r->wgrad_flops_per_s, 1e9, "GFLOP/s", peak);
  }
}

static void products_lines(FILE *out, const ps_hardware *hw, double peak) {
  products_of(out, "matrix products", hw->gemm[PS_BF16], peak);
  /* FP8's peak is twice bf16's */
  products_of(out, "matrix products, FP8", hw->gemm_fp8, 2 * peak);
  line(out, "matrix products in fp32", hw->gemm_flops_per_s[PS_F32], 1e9, "GFLOP/s", 0);
}

static void attention_lines(FILE *out, const ps_hardware *hw, double peak) {
  char what[64];
  for (uint32_t i = 0; i < PS_MAX_ATTENTION_RATES && hw->attention[PS_BF16][i].rows; i++) {
    const ps_attention_rate *r = &hw->attention[PS_BF16][i];
    if (r->kv_rows > r->rows)
      snprintf(what, sizeof what, "attention, %u rows after %u, forward", r->rows,
               r->kv_rows - r->rows);
    else if (r->found)
      snprintf(what, sizeof what, "attention, %u documents of %u, forward", r->packed,
               r->rows / r->packed);
    else if (r->packed > 1)
      snprintf(what, sizeof what, "attention, %u sequences of %u, forward", r->packed,
               r->rows / r->packed);
    else
      snprintf(what, sizeof what, "attention, a sequence of %u, forward", r->rows);
    line(out, what, r->forward_flops_per_s, 1e9, "GFLOP/s", peak);
    line(out, "    backward", r->backward_flops_per_s, 1e9, "GFLOP/s", peak);
  }
  line(out, "attention, heads of 64 over heads of 128: a sequence of 8192, forward",
       hw->heads64_attention_speed, 0.01, "%", 0);
  line(out, "    backward", hw->heads64_attention_bwd_speed, 0.01, "%", 0);
  line(out, "    a sequence of 131072, forward", hw->heads64_long_attention_speed, 0.01, "%", 0);
  line(out, "    backward", hw->heads64_long_attention_bwd_speed, 0.01, "%", 0);
  line(out, "attention with heads of 512, forward", hw->heads512_attention_flops_per_s, 1e9,
       "GFLOP/s", peak);
  line(out, "    backward", hw->heads512_attention_bwd_flops_per_s, 1e9, "GFLOP/s", peak);
}

static void delta_lines(FILE *out, const ps_hardware *hw) {
  char what[64];
  for (const ps_delta_rate *r = hw->delta; r < hw->delta + PS_MAX_DELTA_RATES && r->heads; r++) {
    snprintf(what, sizeof what, "delta rule, %u value heads, forward", r->heads);
    line(out, what, r->forward_elements_per_s, 1e9, "Gelem/s", 0);
    line(out, "    backward", r->backward_elements_per_s, 1e9, "Gelem/s", 0);
  }
}

/* The rates of copies and of a host op that run at once. */
static void contention_lines(FILE *out, const ps_hardware *hw) {
  char what[64];
  for (const ps_contention_rate *s = hw->contention;
       s < hw->contention + PS_MAX_CONTENTION_RATES && s->kinds; s++) {
    const bool to_device = s->kinds & PS_CONTENTION_H2D, to_host = s->kinds & PS_CONTENTION_D2H;
    snprintf(what, sizeof what, "%s on %u threads%s",
             s->kinds & PS_CONTENTION_SUMS ? "sums" : "AdamW", s->threads,
             to_device && to_host ? ", copies both ways"
             : to_device          ? ", copies to the device"
             : to_host            ? ", copies to the host"
                                  : "");
    line(out, what, s->host_bytes_per_s, 1e9, "GB/s", 0);
    if (to_device)
      line(out, "    copies to the device", s->h2d_bytes_per_s, 1e9, "GB/s",
           hw->link_peak_bytes_per_s);
    if (to_host)
      line(out, "    copies to the host", s->d2h_bytes_per_s, 1e9, "GB/s",
           hw->link_peak_bytes_per_s);
  }
}

static void disk_lines(FILE *out, const ps_hardware *hw) {
  const ps_link_rate *read = &hw->link[PS_LINK_DISK_READ], *write = &hw->link[PS_LINK_DISK_WRITE];
  if (!(read->bytes_per_s > 0))
    return;
  line(out, "disk, read", read->bytes_per_s, 1e9, "GB/s", 0);
  line(out, "    written, past the drive's cache", write->bytes_per_s, 1e9, "GB/s", 0);
  line(out, "    both at once, together", read->duplex_bytes_per_s, 1e9, "GB/s", 0);
}

void cli_hardware_table(FILE *out, const ps_hardware *hw) {
  const bool gpu = hw->backend == PS_BACKEND_CUDA;
  const double peak = gpu ? hw->peak_flops_per_s : 0, link = hw->link_peak_bytes_per_s, gb = 1e9;
  print_machine(out, hw);
  fprintf(out, "  %-44s %9s %-8s %6s\n", "case (bf16; alone unless said)", "rate", "", "of peak");
  products_lines(out, hw, peak);
  attention_lines(out, hw, peak);
  delta_lines(out, hw);
  line(out, "norms and SwiGLU, read and written", hw->elementwise_bytes_per_s, gb, "GB/s",
       hw->device_peak_bytes_per_s);
  line(out, "copy to the device", hw->link[PS_LINK_H2D].bytes_per_s, gb, "GB/s", link);
  line(out, "copy to the host", hw->link[PS_LINK_D2H].bytes_per_s, gb, "GB/s", link);
  line(out, "copies both ways at once, each", hw->link[PS_LINK_H2D].duplex_bytes_per_s, gb, "GB/s",
       link);
  line(out, gpu ? "host memory, copies beside sums" : "host memory, copied by all threads",
       hw->memory_bytes_per_s, gb, "GB/s", 0);
  contention_lines(out, hw);
  line(out, "AdamW", hw->optimizer_bytes_per_s, gb, "GB/s", 0);
  line(out, "    weights alone", hw->optimizer_weights_bytes_per_s, gb, "GB/s", 0);
  line(out, "    state alone", hw->optimizer_state_bytes_per_s, gb, "GB/s", 0);
  line(out, "    moments in 8 bits", hw->optimizer_8_bits_bytes_per_s, gb, "GB/s", 0);
  line(out, "sums of gradients", hw->accumulate_bytes_per_s, gb, "GB/s", 0);
  line(out, "    and their squares", hw->accumulate_sumsq_bytes_per_s, gb, "GB/s", 0);
  line(out, "sums of squares", hw->sumsq_bytes_per_s, gb, "GB/s", 0);
  line(out, "gather of the embedding's rows", hw->gather_bytes_per_s, gb, "GB/s", 0);
  disk_lines(out, hw);
  line(out, "an op's fixed cost", hw->op_ns, 1e3, "us", 0);
  line(out, "peak of matrix products, for MFU", peak, 1e9, "GFLOP/s", 0);
  if (hw->idle_gain > 0)
    line(out, "gain where the GPU is idle for 10%", 0.1 * hw->idle_gain, 0.01, "%", 0);
  if (hw->idle_most > 0)
    line(out, "    the largest gain", hw->idle_most, 0.01, "%", 0);
  if (gpu && !(peak > 0))
    fprintf(out, "  the peak of this GPU is unknown: train reports MFU if --peak-tflops says it\n");
}

int cli_hardware_json(cli_json *j, const char *key, const ps_hardware *hw) {
  char text[PS_HARDWARE_JSON_BYTES];
  const ps_status st = ps_hardware_json(text, sizeof text, hw);
  if (st != PS_OK)
    return cli_fail_status(st, false);
  cli_json_raw(j, key, text);
  return CLI_OK;
}
