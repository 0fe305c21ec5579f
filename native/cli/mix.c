/* mix.c - prints how much data a run has, and the shares of data that is mixed by weight. */
#include "cli/cli.h"
#include <inttypes.h>

void cli_print_mix(FILE *out, const ps_dataset *ds, uint64_t seq_len, uint64_t n_sequences) {
  char shown[512];
  for (uint32_t k = 0; k < ps_dataset_n_weighted(ds); k++) {
    ps_dataset_part part = {.struct_bytes = sizeof part};
    if (ps_dataset_weighted(ds, k, seq_len, &part) != PS_OK)
      return;
    fprintf(out, "%-18s%.1f%% %s", k ? "" : "data", 100 * part.share,
            ps_printable(shown, sizeof shown, part.path));
    if (n_sequences && part.n_sequences)
      fprintf(out, ", %.2f epochs", (double)n_sequences * part.share / (double)part.n_sequences);
    fprintf(out, "\n");
  }
}

void cli_print_data(FILE *out, const cli_job *job, const ps_dataset *ds) {
  const uint64_t of_run = ps_plan_sequences_before(job->plan, job->train_config.total_steps);
  const double epochs =
      (double)of_run / (double)ps_dataset_n_sequences(ds, job->plan_config.seq_len);
  if (ps_dataset_n_weighted(ds)) {
    cli_print_mix(out, ds, job->plan_config.seq_len, of_run);
    return;
  }
  fprintf(out, "%-18s%" PRIu64 " tokens, %.4g steps an epoch, %.4g epochs in the run\n", "data",
          ps_dataset_n_tokens(ds), (double)job->train_config.total_steps / epochs, epochs);
}
