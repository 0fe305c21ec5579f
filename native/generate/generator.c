/* generator.c - a generator: its engine, its weights, and calls that generate. Beside a training,
 * engine and weights are the training's, and its run is paused during a call. */
#include "generate/generate.h"
#include <string.h>

enum { PREFILL = PS__GEN_PREFILL, DECODE = PS__GEN_DECODE };
enum { NOT_YET = -2, END = -1 }; /* in place of a token */
enum { IN_FLIGHT = 2 };          /* decode steps: one computes, one is queued */

/* A sequence of the group that is being generated. Host ops use it, but for given and open. */
typedef struct sequence {
  const ps_generate_request *request;
  uint64_t n_new;           /* tokens that were drawn */
  int32_t last;             /* the latest of them */
  bool finished;            /* it draws no more */
  bool draws;               /* in the running step */
  bool open;                /* the caller gets more of its tokens */
  uint64_t n_given;         /* tokens that the caller got */
  _Atomic uint32_t stopped; /* the caller wants no more */
} sequence;

struct ps_generator {
  ps__gen_setup *setup;     /* its own, or a training's */
  const ps__gen_plan *plan; /* of the setup */
  ps_engine *engine;        /* the same */
  ps__gen_setup own;
  char *host;       /* the host space */
  ps__turns *turns; /* its own, or a training's */
  ps__turns own_turns;
  ps_run *run[PS__GEN_PROGRAMS]; /* of the programs, made at first use */
  sequence *sequence;            /* [n_sequences] */
  /* in host memory of the arena: */
  _Atomic int32_t *token; /* [n_sequences][context]: what each drew, END, or NOT_YET */
  float *logits;          /* [threads][vocab] */
  ps__gen_candidate *candidates;
  uint32_t n; /* sequences of the group */
  /* of the prompts' next row: its sequence, its position */
  uint32_t at_sequence;
  uint64_t at_position;
  _Atomic uint32_t broken; /* 1 + the first sequence whose logits were not finite */
  bool warned;             /* of a text past max_position_embeddings */
};

static _Atomic int32_t *token_at(const ps_generator *g, uint32_t i, uint64_t number) {
  return &g->token[i * g->plan->cfg.context + number];
}

/* ---- a step's host ops ----------------------------------------------------------------------- */

typedef struct batch {
  int32_t *tokens, *sequence, *position, *out;
} batch;

static void set_row(const batch *b, uint32_t row, int32_t token, uint32_t sequence,
                    uint64_t position) {
  b->tokens[row] = token;
  b->sequence[row] = (int32_t)sequence;
  b->position[row] = (int32_t)position;
}

static void fill_prefill(ps_generator *g, const batch *b) {
  for (uint32_t row = 0; row < g->plan->rows[PREFILL] && g->at_sequence < g->n; row++) {
    sequence *s = &g->sequence[g->at_sequence];
    const uint64_t at = g->at_position++;
    set_row(b, row, s->request->tokens[at], g->at_sequence, at);
    if (at + 1 < s->request->n_tokens)
      continue;
    b->out[g->at_sequence] = (int32_t)row;
    s->draws = true;
    g->at_sequence++;
    g->at_position = 0;
  }
}

static void fill_decode(ps_generator *g, const batch *b) {
  for (uint32_t i = 0; i < g->n; i++) {
    sequence *s = &g->sequence[i];
    b->out[i] = (int32_t)i;
    s->draws = !s->finished && !atomic_load(&s->stopped);
    if (s->draws)
      set_row(b, i, s->last, i, s->request->n_tokens + s->n_new - 1);
  }
}

static ps_status fill(ps_generator *g, uint32_t program, char *memory) {
  const ps__gen_batch *at = &g->plan->map.batch;
  const batch b = {
      (int32_t *)(void *)(memory + at->tokens), (int32_t *)(void *)(memory + at->sequence),
      (int32_t *)(void *)(memory + at->position), (int32_t *)(void *)(memory + at->out)};
  memset(memory, 0, at->bytes);
  for (uint32_t row = 0; row < g->plan->rows[program]; row++)
    b.position[row] = -1;
  for (uint32_t i = 0; i < g->n; i++)
    g->sequence[i].draws = false;
  if (program == PREFILL)
    fill_prefill(g, &b);
  else
    fill_decode(g, &b);
  return PS_OK;
}

static bool stops(const ps_generate_request *r, int32_t token) {
  for (uint64_t i = 0; i < r->n_stop_tokens; i++)
    if (r->stop_tokens[i] == token)
      return true;
  return false;
}

typedef struct draw_job {
  ps_generator *g;
  const char *logits;
} draw_job;

static void draw(void *arg, int64_t task, uint32_t worker) {
  const draw_job *j = arg;
  ps_generator *g = j->g;
  sequence *s = &g->sequence[task];
  const ps_model *m = g->plan->model;
  const uint32_t v = m->cfg.vocab_size;
  float *z = g->logits + (size_t)worker * v;
  if (!s->draws)
    return;
  ps__logits_of(m, z, j->logits + (size_t)task * v * ps_dtype_bytes(m->dt));
  const int32_t id = ps__gen_draw(z, v, s->request, s->n_new, g->candidates + (size_t)worker * v);
  if (id < 0) {
    uint32_t none = 0;
    atomic_compare_exchange_strong(&g->broken, &none, (uint32_t)task + 1);
    s->finished = true;
    return;
  }
  const bool ends = stops(s->request, id);
  atomic_store(token_at(g, (uint32_t)task, s->n_new), ends ? END : id);
  s->last = id;
  s->finished = ends || ++s->n_new == s->request->max_new_tokens;
}

static ps_status hook(void *ctx, ps__gen_hook what, uint32_t program, const ps_launch *l) {
  ps_generator *g = ctx;
  if (what == PS__GEN_FILL)
    return fill(g, program, l->ptr[1]);
  draw_job job = {g, l->ptr[0]};
  ps__pool_run(((const ps__cpu_exec *)l->exec)->pool, g->n, draw, &job);
  return PS_OK;
}

/* ---- creating -------------------------------------------------------------------------------- */

/* All that generation has in host memory is copied to the device from there, so no part of it can
 * do without pinning. */
static ps_status refuse_to_pin(const ps_generator *g, ps_status st) {
  char most[32], all[32];
  const uint64_t could = ps_pinned_at_most();
  if (st != PS_EDEVICE || !could)
    return st;
  return ps__fail(st,
                  "%s of host memory could be pinned, generation takes %s there: raise the limit "
                  "(ulimit -l, the container's memlock, or its memory), or raise %s, so that more "
                  "blocks stay on the device; %s is of training alone",
                  ps__format_bytes(most, could),
                  ps__format_bytes(all, ps__arena_round(g->plan->map.host.bytes)),
                  ps__field("device_mem_bytes"), ps__field("pinned_mem_bytes"));
}

static ps_status open_engine(ps_generator *g) {
  const ps__gen_plan *p = g->plan;
  const ps__places *at = p->at;
  const ps__gen_map *map = &p->map;
  const ps_generate_report *r = &p->report;
  const ps__caps cap = ps__caps_of(&p->hw, p->cfg.device_mem_bytes, p->cfg.host_mem_bytes, 0);
  const uint64_t device = map->device.bytes, host = map->host.bytes,
                 beside[PS__N_MEMS] = {[PS__DEVICE_MEM] =
                                           r->device_used_bytes - ps__arena_round(device),
                                       [PS__HOST_MEM] = r->host_used_bytes - ps__arena_round(host)};
  uint64_t arena[PS_MAX_PLACES] = {0};
  ps_engine_config e;
  arena[at->dev[0].place] = device;
  arena[at->host] = host;
  ps__engine_of(&e, &p->hw, at, arena, 0, cap.given, beside, p->scratch_bytes);
  e.deterministic = p->cfg.deterministic;
  const ps_status st = ps_engine_create(&g->engine, &e);
  if (st != PS_OK)
    return refuse_to_pin(g, st);
  g->own_turns.engine = g->engine;
  g->turns = &g->own_turns;
  g->host = ps_engine_space(g->engine, at->host);
  return PS_OK;
}

/* No cache has an expert, and nothing is counted. */
static ps_status empty_caches(const ps_generator *g) {
  const ps__gen_map *m = &g->plan->map;
  const ps__gen_experts *x = &g->plan->experts;
  if (!x->n_slots)
    return PS_OK;
  const uint64_t n = 16ull * x->n_blocks, bytes = m->device.counts + n - m->device.tables;
  char *zeros = ps__calloc(1, bytes);
  if (!zeros)
    return ps__fail(PS_ENOMEM, "out of memory for the tables of experts");
  memset(g->host + m->host.counts, 0, n);
  const ps_status st =
      ps__engine_write(g->engine, g->plan->at->dev[0].place, m->device.tables, zeros, bytes);
  ps__free(zeros);
  return st;
}

/* The plan knows what kernels and libraries took when the machine was measured, not what they take
 * now. */
static ps_status note_memory(const ps_generator *g) {
  char used[32], cap[32];
  uint64_t now;
  const uint64_t given = g->plan->cfg.device_mem_bytes;
  PS_TRY(ps__engine_memory(g->engine, g->plan->at->dev[0].place, &now));
  if (!given || now <= given)
    return PS_OK;
  ps__format_bytes_apart(used, now, cap, given);
  ps__log(
      PS_LOG_WARN,
      "the memory in use of the GPU has grown by %s since this process began, which is more than "
      "the cap of %s: run penstock profile, which measures what driver and libraries take",
      used, cap);
  return PS_OK;
}

/* What calls need, on an engine that is there. */
static ps_status prepare(ps_generator *g) {
  const ps__gen_map *m = &g->plan->map;
  g->sequence = ps__calloc(g->plan->cfg.n_sequences, sizeof *g->sequence);
  if (!g->sequence)
    return ps__fail(PS_ENOMEM, "out of memory for a generator");
  g->setup->hooks = (ps__gen_hooks){g, hook};
  g->host = ps_engine_space(g->engine, g->plan->at->host);
  g->token = (_Atomic int32_t *)(void *)(g->host + m->host.drawn);
  g->logits = (float *)(void *)(g->host + m->host.values);
  g->candidates = (ps__gen_candidate *)(void *)(g->host + m->host.candidates);
  return PS_OK;
}

static ps_status reserve(ps_generator *g) {
  PS_TRY(ps__gen_compile(g->setup));
  PS_TRY(open_engine(g));
  PS_TRY(prepare(g));
  PS_TRY(ps__engine_warm(g->engine, g->setup->schedule[PREFILL]));
  PS_TRY(ps__engine_warm(g->engine, g->setup->schedule[DECODE]));
  return note_memory(g);
}

static ps_status create(ps_generator *g, const char *dir, const ps_generate_config *cfg,
                        const ps_hardware *hw, ps_progress_fn progress, void *user) {
  ps_model_config model;
  ps__gen_files f = {0};
  PS_TRY(ps_model_config_read(&model, dir));
  PS_TRY(ps__gen_plan_init(&g->own.plan, &model, cfg, hw));
  g->setup = &g->own;
  g->plan = &g->own.plan;
  ps_status st = ps__gen_files_open(g->plan, dir, &f);
  if (st == PS_OK)
    st = reserve(g);
  if (st == PS_OK)
    st = ps__gen_load(g->plan, g->engine, &f, progress, user);
  if (st == PS_OK)
    st = empty_caches(g);
  ps__gen_files_close(&f);
  g->own.plan.cfg.adapter_dir = NULL; /* the caller's */
  return st;
}

ps_status ps_generator_create(ps_generator **out, const char *model_dir,
                              const ps_generate_config *cfg, const ps_hardware *hw,
                              ps_progress_fn progress, void *progress_user) {
  if (!out || !model_dir || !cfg || !hw)
    return ps__fail(PS_EINVAL, "ps_generator_create: out, model_dir, cfg and hw must be given");
  ps_generator *g = ps__calloc(1, sizeof *g);
  if (!g)
    return ps__fail(PS_ENOMEM, "out of memory for a generator");
  const ps_status st = create(g, model_dir, cfg, hw, progress, progress_user);
  if (st != PS_OK)
    ps_generator_destroy(g);
  else
    *out = g;
  return st;
}

ps_status ps__generator_beside(ps_generator **out, ps__gen_setup *setup, ps__turns *turns) {
  ps_generator *g = ps__calloc(1, sizeof *g);
  if (!g)
    return ps__fail(PS_ENOMEM, "out of memory for a generator");
  g->setup = setup;
  g->plan = &setup->plan;
  g->turns = turns;
  g->engine = turns->engine;
  const ps_status st = prepare(g);
  if (st != PS_OK)
    ps_generator_destroy(g);
  else
    *out = g;
  return st;
}

void ps_generator_destroy(ps_generator *g) {
  if (!g)
    return;
  (void)ps__turns_close(&g->own_turns);
  if (g->setup == &g->own || !g->setup)
    (void)ps_engine_close(g->engine);
  else
    g->setup->hooks = (ps__gen_hooks){0};
  ps__gen_setup_free(&g->own);
  ps__free(g->sequence);
  ps__free(g);
}

const ps_generate_report *ps_generator_report(const ps_generator *g) {
  return g ? &g->plan->report : NULL;
}

/* ---- generating ------------------------------------------------------------------------------ */

static ps_status check_ids(const ps_generator *g, uint64_t request, const char *what,
                           const int32_t *id, uint64_t n) {
  const uint32_t v = g->plan->model->cfg.vocab_size;
  for (uint64_t i = 0; i < n; i++)
    if (id[i] < 0 || (uint32_t)id[i] >= v)
      return ps__fail(PS_EINVAL, "prompt %llu: %s %d is not in the vocabulary: 0 to %u are",
                      (unsigned long long)request + 1, what, id[i], v - 1);
  return PS_OK;
}

static ps_status check_request(const ps_generator *g, uint64_t i, const ps_generate_request *r) {
  const unsigned long long number = i + 1;
  const uint64_t context = g->plan->cfg.context;
  if (!r->n_tokens || !r->tokens)
    return ps__fail(PS_EINVAL, "prompt %llu has no token: give at least one", number);
  if (!r->max_new_tokens)
    return ps__fail(PS_EINVAL, "prompt %llu: max_new_tokens is 0: give at least 1", number);
  if (r->n_tokens > context || r->max_new_tokens > context - r->n_tokens)
    return ps__fail(PS_EINVAL,
                    "prompt %llu has %llu tokens, and %llu new ones were asked for: the context is "
                    "%llu",
                    number, (unsigned long long)r->n_tokens, (unsigned long long)r->max_new_tokens,
                    (unsigned long long)context);
  if (!(r->temperature >= 0 && r->temperature <= 1e6))
    return ps__fail(PS_EINVAL, "prompt %llu: temperature is %g: 0 to 1e6 are possible", number,
                    r->temperature);
  if (!(r->top_p > 0 && r->top_p <= 1))
    return ps__fail(PS_EINVAL, "prompt %llu: top_p is %g: it must be above 0, and at most 1",
                    number, r->top_p);
  PS_TRY(check_ids(g, i, "token", r->tokens, r->n_tokens));
  return check_ids(g, i, "stop token", r->stop_tokens, r->n_stop_tokens);
}

/* What a call of ps_generator_run() needs at each step. */
typedef struct call {
  ps_generator *g;
  uint64_t first; /* request of the group's sequence 0 */
  ps_token_fn fn;
  void *user;
  ps_generate_stats *stats;
} call;

/* Past max_position_embeddings, say so once. */
static void note_length(const call *c, uint64_t request, uint64_t n) {
  const uint32_t most = c->g->plan->model->cfg.max_positions;
  if (!most || n <= most || c->g->warned)
    return;
  c->g->warned = true;
  ps__log(PS_LOG_WARN,
          "prompt %llu with its text has %llu tokens, and the model's max_position_embeddings is "
          "%u: what follows may make no sense",
          (unsigned long long)request + 1, (unsigned long long)n, most);
}

/* Give the caller all tokens that have been drawn. *open: sequences that go on. */
static ps_status deliver(const call *c, uint32_t *open) {
  ps_generator *g = c->g;
  *open = 0;
  if (atomic_load(&g->broken))
    return ps__fail(PS_ENUMERIC,
                    "the logits of prompt %llu are not finite: the model is damaged, or needs "
                    "%s fp32",
                    (unsigned long long)(c->first + atomic_load(&g->broken)), ps__field("dtype"));
  for (uint32_t i = 0; i < g->n; i++) {
    sequence *s = &g->sequence[i];
    while (s->open && s->n_given < s->request->max_new_tokens) {
      const int32_t token = atomic_load(token_at(g, i, s->n_given));
      if (token == NOT_YET)
        break;
      const int said = token == END ? 1 : c->fn(c->user, c->first + i, token);
      if (said < 0)
        return ps__fail(PS_ECANCELLED, "generation was stopped by the caller");
      if (token != END) {
        c->stats->decoded_tokens += s->n_given > 0;
        c->stats->new_tokens++;
        s->n_given++;
        note_length(c, c->first + i, s->request->n_tokens + s->n_given);
      }
      s->open = !said;
    }
    s->open = s->open && s->n_given < s->request->max_new_tokens;
    atomic_store(&s->stopped, !s->open);
    *open += s->open;
  }
  return PS_OK;
}

static ps_status begin(ps_generator *g, uint32_t program) {
  return ps__turn_begin(g->turns, &g->run[program], g->setup->schedule[program], NULL);
}

/* Run a program for at most @n_steps steps, until no sequence goes on. */
static ps_status run_program(const call *c, uint32_t program, uint64_t n_steps, uint32_t *open) {
  ps_generator *g = c->g;
  uint64_t submitted = 0, done = 0;
  const uint64_t start = ps__now_ns();
  PS_TRY(begin(g, program));
  ps_run *run = g->run[program];
  const uint64_t before = ps__run_submitted(run);
  ps_status st = PS_OK;
  while (st == PS_OK && *open && done < n_steps) {
    const uint64_t wanted = done + IN_FLIGHT < n_steps ? done + IN_FLIGHT : n_steps;
    st = ps_run_submit(run, wanted - submitted);
    submitted = wanted;
    if (st == PS_OK)
      st = ps_run_wait(run, before + ++done);
    if (st == PS_OK)
      st = deliver(c, open);
  }
  const double seconds = (double)(ps__now_ns() - start) * 1e-9;
  *(program == PREFILL ? &c->stats->prefill_s : &c->stats->decode_s) += seconds;
  *(program == PREFILL ? &c->stats->prefill_steps : &c->stats->decode_steps) += done;
  return ps__turn_end(run, st);
}

/* Beside a training: brings the weights that stay on the device for this call. */
static ps_status bring_weights(ps_generator *g) {
  const uint32_t load = PS__GEN_LOAD;
  if (!g->setup->schedule[load])
    return PS_OK;
  if (g->plan->experts.n_slots) /* LOAD empties the counts on the device */
    memset(g->host + g->plan->map.host.counts, 0, 16ull * g->plan->experts.n_blocks);
  PS_TRY(begin(g, load));
  return ps__turn_end(g->run[load], ps__turn_steps(g->run[load], 1));
}

static ps_status run_group(const call *c, const ps_generate_request *requests, uint32_t n) {
  ps_generator *g = c->g;
  uint64_t prompts = 0, most_new = 0;
  uint32_t open = n;
  g->n = n;
  g->at_sequence = 0;
  g->at_position = 0;
  atomic_store(&g->broken, 0);
  for (uint32_t i = 0; i < n; i++) {
    sequence *s = &g->sequence[i];
    s->request = &requests[i];
    s->n_new = s->n_given = 0;
    s->finished = s->draws = false;
    s->open = true;
    atomic_store(&s->stopped, 0);
    for (uint64_t k = 0; k < requests[i].max_new_tokens; k++)
      atomic_store(token_at(g, i, k), NOT_YET);
    prompts += requests[i].n_tokens;
    most_new = requests[i].max_new_tokens > most_new ? requests[i].max_new_tokens : most_new;
  }
  c->stats->prompt_tokens += prompts;
  const uint64_t rows = g->plan->rows[PREFILL];
  PS_TRY(run_program(c, PREFILL, (prompts + rows - 1) / rows, &open));
  return open ? run_program(c, DECODE, most_new - 1, &open) : PS_OK;
}

/* The experts that steps have wanted and missed since the generator was made: on demand alone. */
static void count_experts(const ps_generator *g, uint64_t *wanted, uint64_t *missed) {
  const uint64_t *n = (const uint64_t *)(const void *)(g->host + g->plan->map.host.counts);
  *wanted = *missed = 0;
  for (uint32_t b = 0; g->plan->experts.n_slots && b < g->plan->experts.n_blocks; b++) {
    *wanted += n[2 * b];
    *missed += n[2 * b + 1];
  }
}

ps_status ps_generator_run(ps_generator *g, const ps_generate_request *requests, uint64_t n,
                           ps_token_fn fn, void *user, ps_generate_stats *stats) {
  ps_generate_stats own;
  if (!g || !requests || !fn)
    return ps__fail(PS_EINVAL, "ps_generator_run: generator, requests and fn must be given");
  for (uint64_t i = 0; i < n; i++)
    PS_TRY(check_request(g, i, &requests[i]));
  call c = {g, 0, fn, user, stats ? stats : &own};
  *c.stats = (ps_generate_stats){0};
  for (uint64_t i = 0; i < n; i++)
    note_length(&c, i, requests[i].n_tokens);
  PS_TRY(bring_weights(g));
  uint64_t wanted, missed;
  count_experts(g, &wanted, &missed);
  for (; c.first < n; c.first += g->n) {
    const uint64_t left = n - c.first, room = g->plan->cfg.n_sequences;
    PS_TRY(run_group(&c, requests + c.first, (uint32_t)(left < room ? left : room)));
  }
  count_experts(g, &c.stats->experts_wanted, &c.stats->experts_missed);
  c.stats->experts_wanted -= wanted;
  c.stats->experts_missed -= missed;
  return PS_OK;
}
