/* data_record.c - which data a run reads, in its checkpoints: each shard's bytes and hash, in
 * order. Another run that goes on must read the same, wherever it lies. */
#include "train/resume.h"
#include <stdlib.h>
#include <string.h>

/* ---- of a trainer ---------------------------------------------------------------------------- */

static ps_status make_marks(ps_trainer *t) {
  const uint32_t n = ps_dataset_n_shards(t->cfg.dataset);
  if (t->data_marks)
    return PS_OK;
  ps__data_mark *marks = ps__calloc(n, sizeof *marks);
  if (!marks)
    return ps__fail(PS_ENOMEM, "no memory left for the record of %u shards", n);
  const ps_status st = ps__dataset_marks(t->cfg.dataset, marks);
  if (st == PS_OK)
    t->data_marks = marks;
  else
    ps__free(marks);
  return st;
}

ps_status ps__data_write(ps_trainer *t, ps__jsonw *w) {
  char hash[17];
  if (!t->cfg.dataset)
    return PS_OK;
  PS_TRY(make_marks(t));
  ps__jsonw_array(w, "data_hashes");
  for (uint32_t i = 0; i < ps_dataset_n_shards(t->cfg.dataset); i++) {
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)t->data_marks[i].hash);
    ps__jsonw_object(w, NULL);
    ps__jsonw_uint(w, "bytes", t->data_marks[i].bytes);
    ps__jsonw_string(w, "hash", hash);
    ps__jsonw_end(w);
  }
  ps__jsonw_end(w);
  return PS_OK;
}

/* ---- of a checkpoint ------------------------------------------------------------------------- */

static bool read_mark(ps__data_mark *out, const ps__json *j) {
  const ps__json *bytes = ps__json_get(j, "bytes");
  const char *hash = ps__json_string(ps__json_get(j, "hash"), NULL);
  if (!bytes || !ps__json_uint64(bytes, &out->bytes) || !hash || strlen(hash) != 16 ||
      strspn(hash, "0123456789abcdef") != 16)
    return false;
  out->hash = strtoull(hash, NULL, 16);
  return true;
}

ps_status ps__data_read(ps_checkpoint *c, const ps__json *manifest, const char *path) {
  const ps__json *list = ps__json_get(manifest, "data_hashes");
  if (!list) /* of an older version, or of a run without shards */
    return PS_OK;
  const size_t n = ps__json_type(list) == PS_JSON_ARRAY ? ps__json_length(list) : 0;
  c->data = ps__calloc(n, sizeof *c->data);
  if (!c->data)
    return ps__fail(PS_ENOMEM, "%s: no memory left to read it", path);
  for (c->n_data = 0; c->n_data < n; c->n_data++)
    if (!read_mark(&c->data[c->n_data], ps__json_at(list, c->n_data)))
      break;
  return n && c->n_data == n
             ? PS_OK
             : ps__fail(PS_EFORMAT,
                        "%s: \"data_hashes\" is no list of bytes and hashes: the manifest is "
                        "damaged",
                        path);
}

/* ---- are they the same? ---------------------------------------------------------------------- */

static bool same(const ps__data_mark *a, const ps__data_mark *b) {
  return a->bytes == b->bytes && a->hash == b->hash;
}

static ps_status refuse(const ps_trainer *t, const ps_checkpoint *c, uint64_t i) {
  const char *shard = ps__dataset_path(t->cfg.dataset, i),
             *with = ps__field(c->of.info.lora.rank ? "adapter_dir" : "model_dir");
  for (uint64_t k = 0; k < c->n_data; k++)
    if (same(&c->data[k], &t->data_marks[i]))
      return ps__fail(PS_EINVAL,
                      "%s was written with other data: %s is shard %llu now and was shard %llu: "
                      "give the shards in their old order, or begin a new run with %s %s",
                      c->dir, shard, (unsigned long long)i + 1, (unsigned long long)k + 1, with,
                      c->dir);
  return ps__fail(PS_EINVAL,
                  "%s was written with other data: shard %llu, %s, has other bytes than it had: "
                  "give the checkpoint's data, or begin a new run with %s %s",
                  c->dir, (unsigned long long)i + 1, shard, with, c->dir);
}

ps_status ps__data_check(ps_trainer *t, const ps_checkpoint *c) {
  if (!t->cfg.dataset)
    return PS_OK;
  if (!c->data) {
    ps__log(PS_LOG_WARN,
            "%s, of an older version, does not say which data it was written with: give the same",
            c->dir);
    return PS_OK;
  }
  const uint64_t n = ps_dataset_n_shards(t->cfg.dataset);
  if (n != c->n_data)
    return ps__fail(PS_EINVAL,
                    "%s was written with %llu shards, and this run has %llu: give the "
                    "checkpoint's data, or begin a new run with %s %s",
                    c->dir, (unsigned long long)c->n_data, (unsigned long long)n,
                    ps__field(c->of.info.lora.rank ? "adapter_dir" : "model_dir"), c->dir);
  PS_TRY(make_marks(t));
  for (uint64_t i = 0; i < n; i++)
    if (!same(&t->data_marks[i], &c->data[i]))
      return refuse(t, c, i);
  return PS_OK;
}
