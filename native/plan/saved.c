/* saved.c - what the saved activations of a candidate cost: recomputation, memory, transfers. */
#include "plan/candidates.h"
#include <string.h>

/* ---- recomputation --------------------------------------------------------------------------- */

enum { MAX_MASKS = 1 << PS__MAX_SAVED_SETS };
/* ns of recomputation in a block, by the sets of saved activations that are there: of its backward
 * pass; again: of its output alone */
struct ps__recompute_table {
  double ns[MAX_MASKS], again[MAX_MASKS];
};

static ps__set tensors_of(const ps__layer_def *d, uint32_t mask) {
  ps__set have = {{0}};
  for (uint32_t t = 0; t < d->n_tensors; t++)
    if (d->tensor[t].saved != PS__NONE && (mask >> d->saved[d->tensor[t].saved].set & 1))
      ps__put(&have, t);
  return have;
}

static void fill_recompute(const ps__search_space *sp, const ps__layer_def *d, const ps__chunk *k,
                           uint32_t document_rows, ps__recompute_table *out) {
  const ps__chunk_shape shape = {
      .n_tokens = k->n_tokens, .row0 = k->row0, .document_rows = document_rows};
  double op_ns[PS__SET_BITS];
  for (uint32_t i = 0; i < d->n_fwd; i++) {
    _Alignas(16) char args[PS__ARGS_BYTES];
    ps__op_args(&d->fwd[i], &shape, args);
    /* what runs once a layer pass is left out: the bound stays one */
    op_ns[i] = ps__op_of_pass(d, &d->fwd[i])
                   ? 0
                   : ps__cost_ns(&sp->cost, d->fwd[i].kernel, sp->plan->at->dev[0].compute, args,
                                 d->fwd[i].kernel->info->work(args));
  }
  const uint32_t n_masks = 1u << d->n_sets;
  const ps__set x = PS__UNION(tensors_of(d, 1), d->carried), /* the input; what is there anyway */
      always = ps__recompute(d, d->needs, PS__UNION(tensors_of(d, n_masks - 1), x));
  for (uint32_t mask = 0; mask < n_masks; mask++) {
    const ps__set ops = ps__recompute(d, d->needs, PS__UNION(tensors_of(d, mask), x));
    const ps__set again =
        ps__recompute(d, ps__only((uint32_t)d->output), PS__UNION(tensors_of(d, mask), x));
    out->ns[mask] = out->again[mask] = 0;
    for (uint32_t i = 0; i < d->n_fwd; i++) {
      /* what every mask recomputes, such as norms, is in the base already */
      if (ps__in(ops, i) && !ps__in(always, i))
        out->ns[mask] += op_ns[i];
      if (ps__in(again, i))
        out->again[mask] += op_ns[i];
    }
  }
}

/* Chunks of one shape have one table: there are as many shapes as slices of a sequence. */
static bool same_shape(const ps__chunk *a, const ps__chunk *b) {
  return a->n_tokens == b->n_tokens && a->row0 == b->row0;
}

/* The chunk of the first group at the same place; @c itself where the last chunk is shorter. */
static uint32_t like_chunk(const ps__layout *l, uint32_t c) {
  const uint32_t same = c % l->group[0].n_chunks;
  return same_shape(&l->chunk[same], &l->chunk[c]) ? same : c;
}

/* The tables of a chunk's shape follow each other, one for each of the model's definitions. */
ps_status ps__recompute_tables(const ps__search_space *sp, const ps__microbatch *mb,
                               ps__recompute_table **table, uint32_t **of_chunk) {
  const ps__layout *l = &mb->layout;
  const ps_model *m = sp->plan->model;
  uint32_t n = 0;
  *table = ps__calloc((size_t)l->n_chunks * m->n_defs, sizeof **table);
  *of_chunk = ps__malloc(l->n_chunks * sizeof **of_chunk);
  if (!*table || !*of_chunk)
    return ps__fail(PS_ENOMEM, "out of memory for %u chunks", l->n_chunks);
  for (uint32_t c = 0; c < l->n_chunks; c++) {
    const uint32_t same = like_chunk(l, c);
    (*of_chunk)[c] = same < c ? (*of_chunk)[same] : n;
    if (same < c)
      continue;
    for (uint32_t d = 0; d < m->n_defs; d++, n++)
      if (m->def[d]->n_saved)
        fill_recompute(sp, m->def[d], &l->chunk[c],
                       sp->plan->cfg.one_document ? (uint32_t)l->seq_len : 0, &(*table)[n]);
  }
  return PS_OK;
}

/* The most bytes that saved activations take of gradients on the host in the first round: a block's
 * largest unit lends them, unless it is frozen and has no gradient (host_of_saved() in passes.c).
 * Where updates are split there is no alias either, but which are is decided after this bound. */
static uint64_t aliasable_bytes(const ps__search_space *sp) {
  const ps_model *m = sp->plan->model;
  uint64_t bytes = 0;
  for (uint32_t layer = 1; layer < ps__head_layer(m); layer++) {
    const uint32_t unit = ps__lending_unit(m, layer);
    if (!m->unit[unit].frozen)
      bytes += ps__unit_bytes(sp, unit);
  }
  return bytes;
}

/* Whether the last round has all that the first one has. */
static bool last_is_whole(const ps__layout *l) {
  const ps__round *last = &l->round[l->n_rounds - 1];
  if (last->n_chunks < l->round[0].n_chunks)
    return false;
  for (uint32_t c = 0; c < l->round[0].n_chunks; c++)
    if (l->chunk[last->first_chunk + c].n_tokens < l->chunk[c].n_tokens)
      return false;
  return true;
}

/* Adds what a block saves of a chunk to the BYTES of each policy, and to *mask the sets of which
 * something is there. @policy is the chunk's. What the chunks of an attention group share, such as
 * keys and values, has the policy of the group's first chunk, @group_policy, as policy_of() in
 * step/passes.c has it. The group's chunks together have the bytes of what they share, or fewer. */
static void add_saved_bytes(const ps__layer_def *d, const ps__chunk *k, bool several,
                            const uint8_t *policy, const uint8_t *group_policy,
                            uint64_t bytes[PS_N_POLICIES], uint32_t *mask) {
  for (uint32_t t = 0; t < d->n_tensors; t++) {
    const ps__tensor_def *of = &d->tensor[t];
    if (of->saved == PS__NONE)
      continue;
    const bool state = of->rows == PS__ROWS_STATE;
    const uint8_t to = (ps__rows_of_group(of->rows) ? group_policy : policy)[of->saved];
    if (to != PS_POLICY_RECOMPUTE)
      *mask |= 1u << d->saved[of->saved].set;
    bytes[to] += of->row_bytes * (state ? several : k->n_tokens);
  }
}

/* BYTES of all that may be saved of a round. */
uint64_t ps__saved_of_round(const ps__search_space *sp, const ps__layout *l, uint32_t round) {
  const ps__round *r = &l->round[round];
  uint8_t policy[PS__MAX_SAVED];
  uint64_t bytes[PS_N_POLICIES] = {0};
  uint32_t mask = 0;
  memset(policy, PS_POLICY_DEVICE, sizeof policy);
  for (uint32_t layer = ps__first_saving(sp->plan->model) + 1;
       layer < ps__head_layer(sp->plan->model); layer++)
    for (uint32_t c = r->first_chunk; c < r->first_chunk + r->n_chunks; c++)
      add_saved_bytes(ps__layer_of(sp->plan->model, layer), &l->chunk[c],
                      l->group[l->chunk[c].group].n_chunks > 1, policy, policy, bytes, &mask);
  return bytes[PS_POLICY_DEVICE];
}

/* BYTES that a round offloads to the host. */
typedef struct offloaded_bytes {
  uint64_t first;           /* one of the first rounds */
  uint64_t other;           /* one after the first rounds */
  uint64_t last;            /* the step's last round, which may have fewer chunks */
  uint64_t last_two_layers; /* of one of the first rounds, what these layers offload */
} offloaded_bytes;

/* BYTES on the host of the rounds from @from on that run at once, after the last one's forward
 * pass. In a ring the others have begun to fetch by then: as far ahead as two chunk passes. */
static uint64_t offloaded_at_once(const ps__search_space *sp, const ps__layout *l, uint32_t from,
                                  const offloaded_bytes *round) {
  const uint64_t fetched = ps__is_ring(sp->plan) ? round->last_two_layers : 0;
  const uint32_t at_once = ps__rounds_at_once(sp, l);
  uint64_t bytes = 0, n = 0;
  for (uint32_t r = from; r < from + at_once && r < l->n_rounds; r++, n++)
    bytes += r + 1 == l->n_rounds ? round->last : r < l->first_rounds ? round->first : round->other;
  const uint64_t less = n > 1 ? (n - 1) * fetched : 0;
  return bytes > less ? bytes - less : 0;
}

/* All rounds give their chunks the same policies by position, as ps__spec holds them. What is
 * device 0's is that of its rounds, or in a ring of its layers. */
void ps__sum_saved(const ps__search_space *sp, const ps__microbatch *mb, const ps__candidate *m,
                   const ps__recompute_table *table, const uint32_t *of_chunk,
                   ps__saved_sums *out) {
  const ps__layout *l = &mb->layout;
  ps__policy_allocator of_device[PS_MAX_DEVICES];
  ps__policy_allocators_of(l, m, of_device);
  offloaded_bytes round = {0};
  uint64_t kept = 0; /* BYTES that device 0 keeps of a round after the first rounds */
  const uint32_t next = ps__is_ring(sp->plan) ? 1 : sp->plan->at->n_devices;
  *out = (ps__saved_sums){0};
  for (uint32_t layer = ps__first_saving(sp->plan->model); layer < sp->plan->model->cfg.n_layers;
       layer++) {
    const ps__layer *of = &sp->plan->model->layer[layer + 1];
    const ps__layer_def *def = of->def;
    const uint32_t device = ps__dealt_to(sp->plan, layer + 1);
    const bool here = device == 0, again = ps__drops_input(sp, &m->keep, layer),
               runs_again = ps__drops_input(sp, &m->keep, layer + 1) &&
                            layer + 1 < sp->plan->model->cfg.n_layers;
    uint8_t group_policy[PS__MAX_SAVED]; /* of the group's first chunk */
    for (uint32_t c = 0; c < l->round[0].n_chunks; c++) {
      const ps__chunk *k = &l->chunk[c];
      uint8_t policy[PS__MAX_SAVED];
      uint32_t mask = 0;
      uint64_t bytes[PS_N_POLICIES] = {0};
      ps__allocate_policies(&of_device[device], def, k->n_tokens, c >= l->chunks_per_round,
                            ps__at_boundary(sp, l, layer, c), again, policy);
      if (k->row0 == 0)
        memcpy(group_policy, policy, sizeof group_policy);
      for (uint32_t i = 0; i < def->n_saved && c < l->chunks_per_round; i++)
        if (policy[i] == PS_POLICY_DEVICE)
          out->room_bytes += (double)ps__saved_bytes(&def->saved[i], k->n_tokens);
      add_saved_bytes(def, k, l->group[k->group].n_chunks > 1, policy, group_policy, bytes, &mask);
      const uint64_t offloaded = bytes[PS_POLICY_HOST];
      if (here && l->n_rounds > 1 && c < l->round[1].n_chunks) {
        const ps__chunk *second = &l->chunk[l->round[1].first_chunk + c];
        out->second_bytes += bytes[PS_POLICY_DEVICE] * second->n_tokens / k->n_tokens;
      }
      if (here) {
        out->device_bytes += bytes[PS_POLICY_DEVICE];
        kept += c < l->chunks_per_round ? bytes[PS_POLICY_DEVICE] : 0;
      }
      const ps__round *last = &l->round[l->n_rounds - 1];
      round.first += offloaded;
      round.other += c < l->chunks_per_round ? offloaded : 0;
      round.last += c < last->n_chunks
                        ? offloaded * l->chunk[last->first_chunk + c].n_tokens / k->n_tokens
                        : 0;
      round.last_two_layers += layer + 2 >= sp->plan->model->cfg.n_layers ? offloaded : 0;
      for (uint32_t r = 0; here && r < l->n_rounds; r += next) {
        if (c >= l->round[r].n_chunks)
          continue;
        const uint32_t i = l->round[r].first_chunk + c;
        const ps__recompute_table *t = &table[of_chunk[i] + of->def_idx];
        out->recompute_ns += t->ns[mask] + (runs_again ? t->again[mask] : 0);
        out->offloaded_bytes += (double)offloaded * l->chunk[i].n_tokens / k->n_tokens;
      }
    }
  }
  const uint64_t aliased = aliasable_bytes(sp);
  const uint32_t at_once = ps__rounds_at_once(sp, l);
  if (ps__is_ring(sp->plan)) {
    const uint32_t whole = at_once - (at_once == l->n_rounds && !last_is_whole(l)),
                   firsts = l->first_rounds < whole ? l->first_rounds : whole;
    out->device_bytes = firsts * out->device_bytes + (whole - firsts) * kept;
  }
  const uint64_t before = offloaded_at_once(sp, l, 0, &round),
                 after = offloaded_at_once(sp, l, at_once, &round);
  out->unaliased_bytes = before;
  out->host_bytes = before > aliased ? before - aliased : 0;
  out->host_bytes = after > out->host_bytes ? after : out->host_bytes;
}
