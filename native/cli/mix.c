/* mix.c - prints the shares of data that is mixed by weight. */
#include "cli/cli.h"

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
