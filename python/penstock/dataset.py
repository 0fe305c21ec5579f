"""Token shards for reading: one stream of tokens over .bin files (formats: include/penstock/data.h;
writing: penstock.data)."""

import numpy as np

from ._handle import Handle, Owner
from ._lib import check, encode_path, ffi, lib


class Dataset(Owner):
    """Shards (files, or folders taken as their *.bin sorted by name), token ids below vocab_size.

    Raises FormatError (a token past the vocabulary: with shard and offset), InputOutputError,
    InvalidError (no shard found).
    """

    def __init__(self, paths, vocab_size: int):
        paths = (
            [paths]
            if isinstance(paths, (str, bytes)) or hasattr(paths, "__fspath__")
            else list(paths)
        )
        names = [ffi.new("char[]", encode_path(path)) for path in paths]
        out = ffi.new("ps_dataset **")
        check(lib.ps_dataset_open(out, ffi.new("char *[]", names), len(names), vocab_size))
        self._handle = Handle("dataset", out[0], lib.ps_dataset_close)

    @property
    def n_tokens(self) -> int:
        return lib.ps_dataset_n_tokens(self._handle.ptr)

    @property
    def n_shards(self) -> int:
        return lib.ps_dataset_n_shards(self._handle.ptr)

    def n_sequences(self, seq_len: int) -> int:
        """Windows of seq_len + 1 tokens that advance by seq_len, never across a shard."""
        return lib.ps_dataset_n_sequences(self._handle.ptr, seq_len)

    def read(self, seq_len: int, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """Window idx: tokens and targets, int32 [seq_len] each; a masked target is -1."""
        tokens, targets = np.empty(seq_len, np.int32), np.empty(seq_len, np.int32)
        check(
            lib.ps_dataset_read(
                self._handle.ptr,
                seq_len,
                idx,
                ffi.from_buffer("int32_t[]", tokens),
                ffi.from_buffer("int32_t[]", targets),
            )
        )
        return tokens, targets
