"""Reads token shards. include/penstock/data.h describes their formats; penstock.data writes
them."""

import numpy as np

from ._handle import Handle, Owner
from ._lib import check, encode_path, ffi, lib, text


class Dataset(Owner):
    """One stream of tokens over shards. `paths`: files, or folders, which stand for their *.bin
    files sorted by name. Every token id must be below vocab_size.

    Raises FormatError (of a bad token it names shard and offset), InputOutputError, InvalidError
    (no shard was found).
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
        """How many training sequences of seq_len tokens the shards hold. Each needs one token more,
        its last target; none crosses shards."""
        return lib.ps_dataset_n_sequences(self._handle.ptr, seq_len)

    @property
    def marks_documents(self) -> bool:
        """Masks say where documents begin. A plan must not assume one document a sequence."""
        return bool(lib.ps_dataset_marks_documents(self._handle.ptr))

    @property
    def labels(self) -> tuple[str, int] | None:
        """The problem that the shards' labels are for, and how many labels there are, as
        ModelConfig.score() takes them; None: they have no labels."""
        n = ffi.new("uint32_t *")
        problem = lib.ps_dataset_problem(self._handle.ptr, n)
        return (text(lib.ps_problem_name(problem)), n[0]) if problem else None

    def read(self, seq_len: int, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets of sequence idx, int32 [seq_len] each. A masked target is -1."""
        tokens, targets = np.empty(seq_len, np.int32), np.empty(seq_len, np.int32)
        check(
            lib.ps_dataset_read(
                self._handle.ptr,
                seq_len,
                idx,
                ffi.from_buffer("int32_t[]", tokens),
                ffi.from_buffer("int32_t[]", targets),
                ffi.NULL,
            )
        )
        return tokens, targets
