/* penstock/data.h - token shards: tokens at byte 1024 of a .bin file.
 *
 * Read by magic, little-endian, header of 256 int32:
 *   llm.c gpt-2 / modded-nanogpt  h[0]=20240520 h[1]=1 h[2]=n      uint16 llm.c llama-3
 *   h[0]=20240801 h[1]=7 h[2]=n      uint32 BIN.TOK (llmq / surogate)     bytes "BIN.TOK\n",
 *   h[2]=1|2, h[3]=4, h[4]=n, h[5]=vocab (v2), h[6]=has_masks; int32,
 *                                 then with masks n bits LSB first at 1024+4n: 0 means this
 *                                 token is no target; h[6] that is neither 0 nor 1 (llmq's first
 *                                 writer): the file's length says it
 *   Penstock                      h[0]=20261121 h[1]=1 h[2]=bytes a token (2|4) h[4..5]=n as u64
 *                                 h[6]=vocab     u16|u32
 * A DATASET is one or more shards (files, or folders taken as their *.bin sorted by name) read
 * as one stream of tokens. Position p of the stream gives a training pair: input token[p],
 * target token[p+1] in the same shard. */
#ifndef PENSTOCK_DATA_H
#define PENSTOCK_DATA_H
#include "status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ps_dataset ps_dataset;

/* ps_dataset_open() - open the shards. @paths borrowed for the call, @n_paths >= 1 files or
 * folders. @vocab_size: token ids must be below it; ids are checked when they are read, and at
 * open for the first 1 Mi tokens of each shard. @out owned by the caller, released by
 * ps_dataset_close(). Errors: PS_EIO; PS_EFORMAT names the shard and what is wrong with it (a
 * token past the vocabulary: with its offset in tokens); PS_EINVAL no shard found. */
PS_API ps_status ps_dataset_open(ps_dataset **out, const char *const *paths, uint32_t n_paths,
                                 uint32_t vocab_size);
/* ps_dataset_close() - unmap the shards. NULL is a no-op. PS_EBUSY while a trainer reads it: it
 * then stays open. */
PS_API ps_status ps_dataset_close(ps_dataset *ds);
PS_API uint32_t ps_dataset_n_shards(const ps_dataset *ds);
PS_API uint64_t ps_dataset_n_tokens(const ps_dataset *ds);

/* ps_dataset_n_sequences() - windows of seq_len+1 tokens that advance by seq_len, never across a
 * shard; 0 when the data is too short. */
PS_API uint64_t ps_dataset_n_sequences(const ps_dataset *ds, uint64_t seq_len);

/* ps_dataset_read() - window number @idx (modulo nothing: idx < n_sequences): @tokens[i] and
 * @targets[i], seq_len int32 each; a target that is not counted (a masked one) is -1. Reads with
 * pread through 16 KiB of stack, and takes no other memory. Thread-safe. Errors: PS_EINVAL;
 * PS_EFORMAT a token past the vocabulary, with shard and offset; PS_EIO reading failed, also
 * where the shard was cut off after it was opened (past the 256th shard: or replaced). */
PS_API ps_status ps_dataset_read(ps_dataset *ds, uint64_t seq_len, uint64_t idx, int32_t *tokens,
                                 int32_t *targets);

/* ps_dataset_order() - the window that position @pos of epoch pos / n_sequences visits: a
 * permutation of 0..n-1 for each (seed, epoch), computed in O(1) without a table, so that a
 * resume is O(1). @shuffle 0 gives pos modulo n. */
PS_API uint64_t ps_dataset_order(uint64_t n_sequences, uint64_t pos, uint64_t seed, int shuffle);

#ifdef __cplusplus
}
#endif
#endif
