/* memo.c - what is known of the candidates of a search space: a hash table behind a lock. */
#include "plan/evaluate.h"
#include <pthread.h>
#include <string.h>

/* What a candidate's step depends on; threads and what the search adds to a candidate are not. */
typedef struct memo_key {
  uint8_t byte[17];
} memo_key;

typedef struct entry {
  memo_key key;
  ps__known known; /* n_op 0: the entry is free */
} entry;

struct ps__memo {
  pthread_mutex_t lock;
  entry *entry; /* room of them, a power of two */
  size_t n, room;
};

enum { FIRST_ROOM = 1024 };

ps_status ps__memo_create(ps__memo **out) {
  ps__memo *memo = ps__calloc(1, sizeof *memo);
  if (!memo)
    return ps__fail(PS_ENOMEM, "out of memory for the search");
  pthread_mutex_init(&memo->lock, NULL);
  *out = memo;
  return PS_OK;
}

void ps__memo_destroy(ps__memo *memo) {
  if (!memo)
    return;
  pthread_mutex_destroy(&memo->lock);
  ps__free(memo->entry);
  ps__free(memo);
}

static memo_key key_of(const ps__candidate *m, bool whole) {
  return (memo_key){{m->microbatch, m->device, m->host, m->ahead, m->extra, m->streamed, m->held,
                     m->split, m->sums, m->from_host, m->keep.params, m->keep.grads, m->keep.head,
                     m->keep.state, m->keep.blocks, (uint8_t)(m->keep.passing | m->keep.again << 1),
                     (uint8_t)(whole | m->staging << 1 | m->disk << 4)}};
}

/* FNV-1a (Fowler, Noll, Vo), 64 bits. */
static uint64_t hash_of(const memo_key *k) {
  uint64_t h = 14695981039346656037ull;
  for (size_t i = 0; i < sizeof k->byte; i++)
    h = (h ^ k->byte[i]) * 1099511628211ull;
  return h;
}

/* Where @k is, or the free entry where it belongs. The table is never full. */
static entry *find(entry *table, size_t room, const memo_key *k) {
  size_t i = hash_of(k) & (room - 1);
  while (table[i].known.n_op && memcmp(&table[i].key, k, sizeof *k))
    i = (i + 1) & (room - 1);
  return &table[i];
}

static bool grow(ps__memo *memo) {
  const size_t room = memo->room ? 2 * memo->room : FIRST_ROOM;
  entry *table = ps__calloc(room, sizeof *table);
  if (!table)
    return false;
  for (size_t i = 0; i < memo->room; i++)
    if (memo->entry[i].known.n_op)
      *find(table, room, &memo->entry[i].key) = memo->entry[i];
  ps__free(memo->entry);
  memo->entry = table;
  memo->room = room;
  return true;
}

ps__known ps__memo_get(ps__memo *memo, const ps__candidate *m, bool whole) {
  const memo_key k = key_of(m, whole);
  ps__known known = {0};
  pthread_mutex_lock(&memo->lock);
  if (memo->room)
    known = find(memo->entry, memo->room, &k)->known;
  pthread_mutex_unlock(&memo->lock);
  return known;
}

void ps__memo_put(ps__memo *memo, const ps__candidate *m, bool whole, const ps__known *known) {
  const memo_key k = key_of(m, whole);
  pthread_mutex_lock(&memo->lock);
  if (2 * memo->n < memo->room || grow(memo)) {
    entry *e = find(memo->entry, memo->room, &k);
    memo->n += !e->known.n_op;
    if (!e->known.n_op || known->ns > 0 || (known->mapped && !(e->known.ns > 0)))
      *e = (entry){k, *known};
  }
  pthread_mutex_unlock(&memo->lock);
}
