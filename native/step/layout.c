/* layout.c - cutting a step's tokens. */
#include "step/layout.h"
#include "kernels/ops.h"
#include <string.h>

static void fill_packed(ps__layout *l, uint64_t seqs_per_chunk) {
  for (uint32_t i = 0; i < l->n_chunks; i++) {
    const uint64_t first = i * seqs_per_chunk, left = l->n_sequences - first;
    const uint64_t seqs = left < seqs_per_chunk ? left : seqs_per_chunk;
    l->chunk[i] = (ps__chunk){
        .first_token = first * l->seq_len, .n_tokens = (uint32_t)(seqs * l->seq_len), .group = i};
    l->group[i] =
        (ps__attention_group){.first_chunk = i, .n_chunks = 1, .n_rows = l->chunk[i].n_tokens};
  }
}

static void fill_sliced(ps__layout *l, uint64_t chunks_per_seq) {
  for (uint64_t s = 0; s < l->n_sequences; s++) {
    l->group[s] = (ps__attention_group){.first_chunk = (uint32_t)(s * chunks_per_seq),
                                        .n_chunks = (uint32_t)chunks_per_seq,
                                        .n_rows = (uint32_t)l->seq_len};
    for (uint64_t j = 0; j < chunks_per_seq; j++) {
      const uint64_t row0 = j * l->chunk_tokens, left = l->seq_len - row0,
                     n = left < l->chunk_tokens ? left : l->chunk_tokens;
      l->chunk[s * chunks_per_seq + j] = (ps__chunk){.first_token = s * l->seq_len + row0,
                                                     .n_tokens = (uint32_t)n,
                                                     .row0 = (uint32_t)row0,
                                                     .group = (uint32_t)s};
    }
  }
}

ps_status ps__layout_init(ps__layout *l, uint64_t seq_len, uint64_t n_sequences,
                          uint64_t chunk_tokens, uint64_t chunks_per_round,
                          uint64_t first_round_chunks, uint64_t first_rounds) {
  memset(l, 0, sizeof *l);
  const bool packed = chunk_tokens >= seq_len;
  if (seq_len == 0 || n_sequences == 0 || chunk_tokens == 0 || chunks_per_round == 0 ||
      (packed && chunk_tokens % seq_len))
    return ps__fail(
        PS_EINVAL,
        "chunk_tokens %llu: must be a multiple of the sequence length %llu, or less than it",
        (unsigned long long)chunk_tokens, (unsigned long long)seq_len);
  if (seq_len > PS_MAX_ROWS || chunk_tokens > PS_MAX_ROWS ||
      n_sequences > PS_MAX_STEP_TOKENS / seq_len)
    return ps__fail(PS_EINVAL,
                    "sequence length %llu, chunk %llu or step of %llu sequences is past the limits "
                    "2^30, 2^30 and 2^40 tokens",
                    (unsigned long long)seq_len, (unsigned long long)chunk_tokens,
                    (unsigned long long)n_sequences);
  const uint64_t seqs_per_chunk = packed ? chunk_tokens / seq_len : 1;
  const uint64_t chunks_per_seq = packed ? 1 : (seq_len + chunk_tokens - 1) / chunk_tokens;
  const uint64_t n_groups =
      packed ? (n_sequences + seqs_per_chunk - 1) / seqs_per_chunk : n_sequences;
  const uint64_t n_chunks = n_groups * chunks_per_seq;
  if (n_chunks > PS_MAX_CHUNKS)
    return ps__fail(PS_EINVAL, "a step of %llu chunks: at most 2^20", (unsigned long long)n_chunks);
  l->seq_len = seq_len;
  l->n_sequences = n_sequences;
  l->n_tokens = seq_len * n_sequences;
  l->chunk_tokens = chunk_tokens;
  l->n_groups = (uint32_t)n_groups;
  l->n_chunks = (uint32_t)n_chunks;
  uint64_t groups_per_round = chunks_per_round / chunks_per_seq;
  if (groups_per_round == 0)
    groups_per_round = 1;
  if (groups_per_round > n_groups)
    groups_per_round = n_groups;
  uint64_t first_groups = first_round_chunks / chunks_per_seq;
  if (first_groups < groups_per_round)
    first_groups = groups_per_round;
  if (first_groups > n_groups)
    first_groups = n_groups;
  const uint64_t most_firsts = (n_groups + first_groups - 1) / first_groups;
  if (first_rounds == 0 || first_groups == groups_per_round)
    first_rounds = 1;
  if (first_rounds > most_firsts)
    first_rounds = most_firsts;
  const uint64_t in_firsts = first_rounds * first_groups;
  const uint64_t left_groups = in_firsts < n_groups ? n_groups - in_firsts : 0;
  l->first_rounds = (uint32_t)first_rounds;
  l->n_rounds = (uint32_t)(first_rounds + (left_groups + groups_per_round - 1) / groups_per_round);
  l->chunks_per_round = (uint32_t)(groups_per_round * chunks_per_seq);
  l->first_round_chunks = l->max_round_chunks = (uint32_t)(first_groups * chunks_per_seq);
  l->chunk = ps__calloc(n_chunks, sizeof *l->chunk);
  l->group = ps__calloc(n_groups, sizeof *l->group);
  l->round = ps__calloc(l->n_rounds, sizeof *l->round);
  if (!l->chunk || !l->group || !l->round) {
    ps__layout_free(l);
    return ps__fail(PS_ENOMEM, "out of memory for a step of %llu chunks",
                    (unsigned long long)n_chunks);
  }
  if (packed)
    fill_packed(l, seqs_per_chunk);
  else
    fill_sliced(l, chunks_per_seq);
  for (uint32_t r = 0, first = 0; r < l->n_rounds; first += l->round[r++].n_chunks) {
    const uint32_t left = l->n_chunks - first,
                   size = r < l->first_rounds ? l->first_round_chunks : l->chunks_per_round;
    l->round[r] = (ps__round){first, left < size ? left : size};
  }
  for (uint32_t i = 0; i < l->n_chunks; i++)
    if (l->chunk[i].n_tokens > l->max_chunk_tokens)
      l->max_chunk_tokens = l->chunk[i].n_tokens;
  return PS_OK;
}

void ps__layout_free(ps__layout *l) {
  ps__free(l->chunk);
  ps__free(l->group);
  ps__free(l->round);
  memset(l, 0, sizeof *l);
}

static uint32_t parts(uint64_t n, uint32_t of) { return (uint32_t)(n / of + (n % of != 0)); }

ps__contributions ps__contributions_of(const ps__layout *l, uint64_t head_slice, ps_dtype dt,
                                       bool left_out) {
  ps__contributions c = {.additions = ps__dtypes[dt].low_bytes ? PS__MOST_ADDITIONS : UINT32_MAX};
  for (uint32_t r = 0; r < l->n_rounds; r++) {
    const ps__chunk *k = l->chunk + l->round[r].first_chunk;
    const uint32_t n = l->round[r].n_chunks,
                   rounds = left_out && r == l->first_rounds ? 1 + l->n_left_out : 1;
    uint64_t slices = 0;
    for (uint32_t i = 0; i < n; i++)
      slices += (k[i].n_tokens + head_slice - 1) / head_slice;
    c.by_chunk += rounds * parts(n, c.additions);
    c.by_slice += rounds * parts(slices, c.additions);
  }
  return c;
}

uint32_t ps__sum_mode(uint32_t i, uint32_t n, uint32_t of_step, ps_dtype dt) {
  if (!ps__dtypes[dt].low_bytes || of_step <= PS__MOST_NEAREST)
    return 0;
  if (of_step <= PS__MOST_DITHERED || n < 3)
    return PS_DITHER;
  return (i > 1 ? PS_LOW_READ : 0) | (i + 1 < n ? PS_LOW_WRITE : 0);
}

double ps__sum_bytes(double elements, uint32_t n, uint32_t of_step, ps_dtype dt) {
  const double plain = 3.0 * ps__stored_each(ps__plain(dt)) * (n - 1.0);
  const bool low = n > 2 && ps__sum_mode(1, n, of_step, dt) == PS_LOW_WRITE;
  /* the first addition writes low bytes, the last reads them, those between do both */
  return elements * (plain + (low ? 2.0 * (n - 2.0) : 0));
}
