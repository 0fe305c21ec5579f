/* embed.c - the embedding's passes. Its rows come from a table on the device; or they are gathered
 * from the table on the host, and their gradients are added there. */
#include "step/emit.h"

static bool on_host(const ps__builder *b) { return b->s->spec->embed_on_host; }

/* The lookup's arguments, and what its rows and its table take. */
static ps__args_embed embed_args(const ps__builder *b, uint32_t n_tokens, bool accumulate) {
  ps__args_embed a = *ps__embed_args_of(b->s->model);
  a.n_tokens = n_tokens;
  a.accumulate = accumulate;
  return a;
}
static uint64_t row_bytes(const ps__builder *b) {
  const ps__layer_def *d = ps__layer_of(b->s->model, 0);
  return d->tensor[d->output].row_bytes;
}
/* The whole table @vt of weights or gradients. */
static ps__vaccess table(const ps__builder *b, uint32_t vt, uint32_t mode, ps__storage as) {
  const ps__args_embed *a = ps__embed_args_of(b->s->model);
  return ps__elements(vt, mode, as, 0, (uint64_t)a->vocab * a->dim);
}

static ps_tag embed_tag(uint32_t round, uint32_t chunk, int phase) {
  return (ps_tag){.layer = 0, .round = (int32_t)round, .chunk = (int32_t)chunk, .phase = phase};
}

/* ---- on the host ----------------------------------------------------------------------------- */

/* Each device's first rows are gathered beside the update of a table that is trained. That takes as
 * long as three blocks' updates and would hold the step back, so rows that are gathered are updated
 * first. Half of the tokens are taken to be of rows that no token before them had.
 *
 * An update reads the gradient of the table, which the first round's contribution overwrites. */
static void gather_first(ps__builder *b, uint32_t chunk, uint32_t n, const ps__vaccess *token,
                         uint32_t rows, ps_tag tag) {
  const ps__step *s = b->s;
  const double update = ps__update_bytes(s->spec->optimizer, s->spec->recipe, PS_UPDATE_WHOLE);
  const ps__vaccess access[4] = {
      *token,
      s->spec->clip ? ps__part(s->stats, PS_READ, 64, 64)
                    : ps__part(s->norms, PS_READ, 0, ps__norm_slots(s->model) * 8),
      ps__whole(b, rows, PS_WRITE), ps__whole(b, s->unit_host[0].grad, PS_READ)};
  ps__emit_hook(b, PS__HOOK_GATHER, chunk, b->s->at->io, access, 4,
                ps__bytes_work(2.0 * (double)(n * row_bytes(b)) +
                               0.5 * update * n * ps__embed_args_of(s->model)->dim),
                tag);
}

/* Gathering runs on the io stream, which is idle once the batch is there. On the host stream the
 * next step's rows would queue after all updates, and a round's after the sums of gradients. Two
 * chunks are on their way at a time: one is gathered while the other crosses the link. */
void ps__gather_round(ps__builder *b, uint32_t round) {
  const ps__step *s = b->s;
  const ps__round *r = &s->layout->round[round];
  const ps__layer_def *first = ps__layer_of(s->model, 1);
  const uint32_t saved = (uint32_t)first->tensor[first->input].saved;
  uint32_t before = PS__NO_VT;
  for (uint32_t c = 0; c < r->n_chunks; c++) {
    const uint32_t i = r->first_chunk + c, n = s->layout->chunk[i].n_tokens;
    const ps__args_embed a = embed_args(b, n, false);
    const ps_tag tag = embed_tag(round, i, PS__PHASE_FORWARD);
    const uint32_t rows = ps__vt_new(b, b->s->at->host, n * row_bytes(b));
    const ps__vaccess access[3] = {
        ps__part(s->batch, PS_READ, s->batch_offset[i] + ps__batch_chunk_of(n).tokens, 4ull * n),
        table(b, s->unit_host[0].weights, PS_READ, s->recipe->weights),
        ps__whole(b, rows, PS_WRITE)};
    if (round < ps__n_devices(b) && !s->model->unit[0].frozen && !s->spec->checked)
      gather_first(b, i, n, &access[0], rows, tag);
    else
      ps__emit(b, &ps__k_embed_fwd, b->s->at->io, &a, sizeof a, access, 3, tag);
    b->gathered[i].x = ps__vt_new(b, b->on->at.place, n * row_bytes(b));
    ps__emit_copy(b, b->on->at.to_device, ps__whole(b, rows, PS_READ),
                  ps__whole(b, b->gathered[i].x, PS_WRITE), ps__about(tag, "embedding rows"));
    /* the rows stay where the first block's input is kept on the host anyway */
    const bool stays =
        b->first_trained <= 1 && *ps__spec_policy(s->spec, 0, c, saved) == PS_POLICY_HOST;
    ps__vt_free(b, before);
    b->gathered[i].host = stays ? rows : PS__NO_VT;
    before = stays ? PS__NO_VT : rows;
  }
  ps__vt_free(b, before);
}

/* The rows of the contribution that chunk c is in, as ps__k_embed_bwd_host takes them: ids, then
 * gradients, in the order of the backward pass. */
/* Tokens of the round, from end_token down. */
typedef struct contribution_rows {
  uint32_t n_tokens, skip_tokens, end_token;
  uint64_t ids_bytes, bytes;
} contribution_rows;

static contribution_rows rows_of(const ps__builder *b, uint32_t c) {
  const uint64_t round = ps__chunk_of(b, 0)->first_token;
  uint32_t from = c, to = c;
  while (!ps__contribution_begins(b, from))
    from++;
  while (!ps__contribution_ends(b, to))
    to--;
  const ps__chunk *last = ps__chunk_of(b, b->in->round->n_chunks - 1),
                  *begins = ps__chunk_of(b, from);
  contribution_rows r = {.end_token = (uint32_t)(begins->first_token + begins->n_tokens - round)};
  r.n_tokens = r.end_token - (uint32_t)(ps__chunk_of(b, to)->first_token - round);
  r.skip_tokens = (uint32_t)(last->first_token + last->n_tokens - round) - r.end_token;
  r.ids_bytes = (4ull * r.n_tokens + 63) / 64 * 64;
  r.bytes = r.ids_bytes + r.n_tokens * row_bytes(b);
  return r;
}

static void add_rows_on_host(ps__builder *b, const contribution_rows *r) {
  ps__step *s = b->s;
  ps__unit_progress *u = &b->unit[0];
  const ps__chunk *first = ps__chunk_of(b, 0), *last = ps__chunk_of(b, b->in->round->n_chunks - 1);
  const ps__attention_group *g = &s->layout->group[last->group];
  const uint32_t n = ps__unit_contributions(s->model, &s->sums, 0), i = u->contribution++;
  uint32_t mode = i ? ps__sum_mode_of(b, 0, i) : 0;
  /* the additions skip rows without a token: the sums of squares round all rows */
  if (mode == PS_LOW_READ)
    mode |= PS_LOW_WRITE;
  if (mode == PS_LOW_WRITE)
    u->low = ps__vt_new(b, b->s->at->host, s->unit_host[0].n);
  const bool low = u->low != PS__NO_VT;
  const ps__args_embed_host a = {
      .rows = embed_args(b, r->n_tokens, i > 0),
      .chunk_tokens = first->n_tokens,
      .short_tokens = last->n_tokens,
      .group_tokens = g->n_chunks > 1
                          ? g->n_rows
                          : (uint32_t)(last->first_token + last->n_tokens - first->first_token),
      .skip_tokens = r->skip_tokens,
      .mode = mode,
      .index = i};
  ps__vaccess access[4] = {
      ps__part(b->in->rows_host, PS_READ, 0, 4ull * r->n_tokens),
      ps__part(b->in->rows_host, PS_READ, r->ids_bytes, r->bytes - r->ids_bytes),
      table(b, s->unit_host[0].grad, i ? PS_READ_WRITE : PS_WRITE, s->recipe->grad)};
  if (low)
    access[3] = ps__whole(b, u->low, mode & PS_LOW_READ ? PS_READ_WRITE : PS_WRITE);
  ps__emit(b, &ps__k_embed_bwd_host, b->s->at->host_ops, &a, sizeof a, access, low ? 4 : 3,
           embed_tag(b->in->round_idx, b->in->round->first_chunk, PS__PHASE_UPDATE));
  ps__vt_free_late(b, b->in->rows_host, s->spec->sum_lag);
  if (i + 1 == n)
    ps__total_on_host(b, 0);
}

/* The ids come from the device's copy of the batch. Read on the host they would hold back the next
 * batch until the host stream has come so far. */
static void send_rows(ps__builder *b, uint32_t c) {
  const ps__chunk *k = ps__chunk_of(b, c);
  const contribution_rows r = rows_of(b, c);
  const ps_tag tag = embed_tag(b->in->round_idx, b->in->round->first_chunk + c, PS__PHASE_BACKWARD);
  /* later chunks come first */
  const uint64_t at =
      r.end_token - (k->first_token + k->n_tokens - ps__chunk_of(b, 0)->first_token);
  if (ps__contribution_begins(b, c))
    b->in->rows_host = ps__vt_new(b, b->s->at->host, r.bytes);
  ps__emit_copy(b, b->on->at.to_host,
                ps__part(*ps__batch_of(b, c), PS_READ, ps__batch_chunk_of(k->n_tokens).tokens,
                         4ull * k->n_tokens),
                ps__part(b->in->rows_host, PS_WRITE, 4 * at, 4ull * k->n_tokens),
                ps__about(tag, "token ids"));
  ps__emit_copy(b, b->on->at.to_host, ps__whole(b, b->in->dy[c], PS_READ),
                ps__part(b->in->rows_host, PS_WRITE, r.ids_bytes + at * row_bytes(b),
                         k->n_tokens * row_bytes(b)),
                ps__about(tag, "gradients of rows"));
  if (ps__contribution_ends(b, c))
    add_rows_on_host(b, &r);
}

/* ---- both ------------------------------------------------------------------------------------ */

void ps__embed_forward(ps__builder *b, uint32_t c) {
  if (on_host(b)) {
    const ps__gathered *g = &b->gathered[b->in->round->first_chunk + c];
    b->in->x[c] = g->x;
    *ps__saved_entry(b, b->in->away, 1, c, (uint32_t)ps__layer_of(b->s->model, 1)->input) = g->host;
  } else {
    ps__look_up(b, c);
    ps__send_input(b, 1, c);
  }
}

void ps__embed_backward(ps__builder *b, uint32_t c) {
  const uint32_t lag = on_host(b) ? b->s->spec->grad_lag : 0;
  if (on_host(b) && !b->s->model->unit[0].frozen && !b->s->spec->checked)
    send_rows(b, c);
  else if (!on_host(b))
    ps__add_rows(b, c);
  ps__vt_free_late(b, b->in->dy[c], lag);
  ps__free_batch(b, c, lag);
}
