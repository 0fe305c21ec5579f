/* penstock/data.h - token shards: files of token ids.
 *
 * A shard has a header of 1,024 bytes, 256 little-endian int32 h[0] to h[255], then its tokens.
 * The header's first words say which format it is:
 *
 *   format                      first words                n         tokens
 *   llm.c gpt-2, modded-nanogpt h[0]=20240520 h[1]=1       h[2]      uint16
 *   llm.c llama-3               h[0]=20240801 h[1]=7       h[2]      uint32
 *   BIN.TOK (llmq, surogate)    "BIN.TOK\n" h[2]=1 or 2    h[4]      int32; h[3]=4
 *   Penstock                    h[0]=20261121 h[1]=1       h[4..5]   uint16 or uint32; h[2]=2 or 4
 *
 * BIN.TOK has the vocabulary's size in h[5] from version 2 on, Penstock in h[6].
 * BIN.TOK may have masks after its tokens, at byte 1024 + 4 n: a bit a token, the lowest bit first;
 * 0 says that the token is no target. h[6] is 1 where there are masks and 0 where there are none.
 * Another h[6], as llmq's first writer left it, says nothing: then the file's length decides.
 *
 * Beside a shard NAME.bin of any of these formats may lie a mask, NAME.mask: a header of 256
 * little-endian int32 m[0] to m[255], then a byte a token. m[0]=20261122, m[1]=1, m[4..5]=n,
 * m[6]=the CRC-32 of the first 1 MiB of NAME.bin, m[3]=the length of the rows in which documents
 * are packed, or 0. The byte's bit 0 says that the token is a target, bit 1 that it begins a
 * document. The other words and bits are 0. A shard has masks of its own or a mask file, not both.
 *
 * NAME.labels beside a shard has the labels of its documents, for models with a `score`
 * (ps_problem): a header l[0]=20261128, l[1]=1, l[2]=the problem, l[3]=the number of labels,
 * l[4..5]=n, l[6]=the CRC-32 as in a mask, then an int32 a token.
 *
 * A dataset is one shard or more, read as one stream of tokens. A folder stands for its *.bin
 * files, sorted by name. The target of a token is the next token of the same shard. Where paths
 * have weights, the dataset is a mix: its parts are read in turn, each by its share. */
#ifndef PENSTOCK_DATA_H
#define PENSTOCK_DATA_H
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_dataset ps_dataset;

/* ps_dataset_open() - open the shards.
 * @out         owned by the caller, released by ps_dataset_close().
 * @paths       1 or more files or folders, borrowed for the call. A path that does not exist and
 *              ends with a colon and a number is read as "A:0.7,B:0.3": parts with weights, which
 *              need not add up to 1. All paths have weights, or none has.
 * @vocab_size  every token id must be below it. The first 1 Mi tokens of each shard are checked
 *              here, all others when they are read.
 * Errors: PS_EIO. PS_EFORMAT names the shard and what is wrong with it, and of a bad token its
 *         offset in tokens. PS_EINVAL: no shard was found. PS_ENOMEM. */
PS_API ps_status ps_dataset_open(ps_dataset **out, const char *const *paths, uint32_t n_paths,
                                 uint32_t vocab_size);
/* ps_dataset_close() - close the shards. NULL is a no-op. Errors: PS_EBUSY: a trainer reads the
 * dataset, which then stays open. */
PS_API ps_status ps_dataset_close(ps_dataset *ds);
PS_API uint32_t ps_dataset_n_shards(const ps_dataset *ds);
PS_API uint64_t ps_dataset_n_tokens(const ps_dataset *ds);

/* ps_dataset_n_sequences() - how many training sequences of @seq_len tokens the shards hold. A
 * sequence needs one token more, its last target, and does not cross shards. 0: the data is too
 * short. */
PS_API uint64_t ps_dataset_n_sequences(const ps_dataset *ds, uint64_t seq_len);

/* One of the parts of a mix. */
typedef struct ps_dataset_part {
  uint32_t struct_bytes; /* sizeof(ps_dataset_part) */
  uint32_t reserved;
  const char *path; /* valid until ps_dataset_close() */
  double share;     /* of the sequences of a training: its weight, divided by the sum of all */
  uint64_t n_sequences;
} ps_dataset_part;

/* ps_dataset_n_weighted() - the parts of a mix; 0: the dataset has no weights.
 * ps_dataset_weighted() - part @k. Errors: PS_EINVAL: there is no such part.
 * ps_dataset_mix() - a number that tells mixes of other shares apart; 0: no weights. */
PS_API uint32_t ps_dataset_n_weighted(const ps_dataset *ds);
PS_API ps_status ps_dataset_weighted(const ps_dataset *ds, uint32_t k, uint64_t seq_len,
                                     ps_dataset_part *out);
PS_API uint64_t ps_dataset_mix(const ps_dataset *ds);

/* ps_dataset_marks_documents() - 1: masks of the dataset say where documents begin, and a plan must
 * not assume one document a sequence. 0: no shard has a mask file. */
PS_API int ps_dataset_marks_documents(const ps_dataset *ds);

/* ps_dataset_problem() - the ps_problem (model.h) that the shards' labels are for, and the most
 * labels of a shard (NULL: not asked). 0: there are no label files. */
PS_API uint32_t ps_dataset_problem(const ps_dataset *ds, uint32_t *n_labels);

/* ps_dataset_targets() - which part of the tokens are targets, by the masks. Reads all masks.
 * @share  on PS_OK 0 to 1; the last token of a shard, which is no target, counts as one.
 * Errors: PS_EIO. */
PS_API ps_status ps_dataset_targets(const ps_dataset *ds, double *share);

/* ps_dataset_check() - check that sequences of @seq_len tokens can be read: there is one, and none
 * cuts a row of packed documents. Errors: PS_EINVAL. */
PS_API ps_status ps_dataset_check(const ps_dataset *ds, uint64_t seq_len);

/* ps_dataset_read() - read sequence @idx, below ps_dataset_n_sequences().
 * @tokens, @targets  [seq_len] each. A masked target is -1. With labels the targets are those of
 *                    ps_problem.
 * @begins            [seq_len] or NULL. 1: the mask says that a document begins at this token.
 * Threads: any number of threads at once. Allocates nothing; 16 KiB of stack.
 * Errors: PS_EINVAL: @idx or @seq_len. PS_EFORMAT: a token id past the vocabulary; the message has
 *         shard and offset. PS_EIO: reading failed, or the shard was cut off after it was opened.
 *         Of more than 256 shards only 256 stay open: another one may also have been replaced. */
PS_API ps_status ps_dataset_read(ps_dataset *ds, uint64_t seq_len, uint64_t idx, int32_t *tokens,
                                 int32_t *targets, uint8_t *begins);

/* ps_dataset_order() - the sequence that is read at position @pos of a training. Epoch
 * pos / n_sequences reads each sequence once, in an order drawn from (@seed, epoch). The order is
 * computed without a table in O(1), and so a training resumes in O(1). @shuffle 0: the sequence is
 * pos modulo n_sequences. */
PS_API uint64_t ps_dataset_order(uint64_t n_sequences, uint64_t pos, uint64_t seed, int shuffle);
/* ps_dataset_at() - the sequence of the dataset at position @pos of a training, for
 * ps_dataset_read(). Without weights it is that of ps_dataset_order(). Of a mix, each part has
 * epochs of its own, and after any number of positions each part has had its share of them, to one
 * for each part before it. Computed in O(parts + shards) from the position alone. */
PS_API uint64_t ps_dataset_at(const ps_dataset *ds, uint64_t seq_len, uint64_t pos, uint64_t seed,
                              int shuffle);

#ifdef __cplusplus
}
#endif
#endif
