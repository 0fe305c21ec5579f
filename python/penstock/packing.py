"""Best-fit packing: whole documents in rows of one length.

Documents are sorted by length, the longest first. Each goes into the row with the least room that
holds it, or else begins a row ("Fewer Truncations Improve Language Modeling", Ding et al. 2024).
What a row has left is padding, which is no target and a document of its own."""

from __future__ import annotations

import bisect

import numpy as np

from .labels import NONE
from .shards import BEGINS_DOCUMENT, IS_TARGET

BUFFER_TOKENS = 16 << 20  # documents of so many tokens are packed at once
LONG = ("divide", "drop")


def best_fit(lengths: list[int], row_tokens: int) -> list[list[int]]:
    """Rows as lists of documents, each in ascending order, and so are the rows by their first
    document. Every length is 1 to row_tokens."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # sorted: what a row has left, the row
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(room, (lengths[i], 0))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(i)
        if left > lengths[i]:
            bisect.insort(room, (left - lengths[i], row))
    return sorted(sorted(row) for row in rows)


class Packer:
    """Takes tokens and flags as a ShardWriter does, and appends rows to one. Memory: one buffer of
    documents and their rows. Two judged answers are one document here, and so in one row.

    long: a document that is longer than a row is divided into rows and a rest, each a document, or
    it is dropped. A document without a target is dropped, so that every row has a target."""

    masks = True

    def __init__(self, writer, row_tokens: int, pad: int, long: str = "divide"):
        self.writer, self.row_tokens, self.pad, self.long = writer, row_tokens, pad, long
        self.n_tokens = 0  # of documents
        self.n_padding = self.n_long = self.n_dropped_tokens = 0
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []  # of the document that is arriving
        self._size = 0
        self._is_long = False
        self._documents: list[tuple[np.ndarray, np.ndarray]] = []
        self._buffered = 0

    def append(self, ids: np.ndarray, flags: np.ndarray, *labels: np.ndarray) -> None:
        if len(flags) and flags[0] & BEGINS_DOCUMENT:
            self._finish()
        self.n_tokens += len(ids)
        self._parts.append((ids, flags, *labels))
        self._size += len(ids)
        if self._size > self.row_tokens:
            self._divide()

    def end(self) -> None:
        """Write what is buffered."""
        self._finish()
        self._write()

    def _divide(self) -> None:
        self.n_long += not self._is_long
        self._is_long = True
        arrays = [np.concatenate(a) for a in zip(*self._parts)]
        ids = arrays[0]
        n = (len(ids) - 1) // self.row_tokens * self.row_tokens
        if self.long == "drop":
            n = len(ids)
            self._drop(n)
        else:
            for i in range(0, n, self.row_tokens):
                self._keep(*(a[i : i + self.row_tokens] for a in arrays))
        self._parts, self._size = [tuple(a[n:] for a in arrays)], len(ids) - n

    def _drop(self, n: int) -> None:
        self.n_dropped_tokens += n
        self.n_tokens -= n

    def _finish(self) -> None:
        if self._size and self._is_long and self.long == "drop":
            self._drop(self._size)
        elif self._size:
            self._keep(*(np.concatenate(a) for a in zip(*self._parts)))
        self._parts, self._size, self._is_long = [], 0, False

    def _keep(self, ids: np.ndarray, flags: np.ndarray, *labels: np.ndarray) -> None:
        """A part of a long document is a document too: its first token has nothing before it. A label
        may stand at the first one."""
        flags = flags.copy()
        flags[0] = BEGINS_DOCUMENT | (flags[0] if labels else 0)
        if not (flags & IS_TARGET).any():
            self._drop(len(ids))
            return
        self._documents.append((ids, flags, *labels))
        self._buffered += len(ids)
        if self._buffered >= BUFFER_TOKENS:
            self._write()

    def _write(self) -> None:
        for row in best_fit([len(d[0]) for d in self._documents], self.row_tokens):
            ids, flags, *labels = (
                np.concatenate(a) for a in zip(*(self._documents[i] for i in row))
            )
            left = self.row_tokens - len(ids)
            self.n_padding += left
            padding = np.zeros(left, np.uint8)
            padding[:1] = BEGINS_DOCUMENT
            self.writer.append(
                np.concatenate([ids, np.full(left, self.pad, np.uint32)]),
                np.concatenate([flags, padding]),
                *(np.concatenate([x, np.full(left, NONE, np.int32)]) for x in labels),
            )
        self._documents, self._buffered = [], 0
