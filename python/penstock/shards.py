"""Token shards and their masks as files: headers, reading, writing. The reference of the formats is
include/penstock/data.h."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .files import DataError, open_input

HEADER_BYTES = 1024
READ_BYTES = 1 << 20
IS_TARGET, BEGINS_DOCUMENT = 1, 2  # what a byte of a mask says of its token


@dataclass(frozen=True)
class ShardHeader:
    format: str  # "penstock", "llmc-gpt2", "llmc-llama3" or "bin.tok"
    n_tokens: int
    dtype: np.dtype  # of a token on disk
    vocab_size: int  # 0 when the format does not say
    has_masks: bool = False

    @property
    def file_bytes(self) -> int:
        masks = (self.n_tokens + 7) // 8 if self.has_masks else 0
        return HEADER_BYTES + self.n_tokens * self.dtype.itemsize + masks


# name: magic, version, the largest count of tokens in a shard
WRITABLE = {
    "penstock": (20261121, 1, 2**63 - 1),
    "llmc-gpt2": (20240520, 1, 2**31 - 1),
    "llmc-llama3": (20240801, 7, 2**31 - 1),
}


def token_dtype(format: str, vocab_size: int) -> np.dtype:
    """The type of a token on disk: two bytes where all ids fit."""
    if format == "llmc-gpt2" and vocab_size > 65536:
        raise DataError(
            f"format llmc-gpt2 has two bytes a token, but the vocabulary of {vocab_size} needs "
            "four: use penstock or llmc-llama3"
        )
    if format == "llmc-gpt2" or (format == "penstock" and vocab_size <= 65536):
        return np.dtype("<u2")
    return np.dtype("<u4")


def pack_header(format: str, n_tokens: int, vocab_size: int) -> bytes:
    magic, version, _ = WRITABLE[format]
    h = np.zeros(HEADER_BYTES // 4, dtype="<u4")
    h[0], h[1] = magic, version
    if format == "penstock":
        h[2], h[4], h[5], h[6] = (
            token_dtype(format, vocab_size).itemsize,
            n_tokens & 0xFFFFFFFF,
            n_tokens >> 32,
            vocab_size,
        )
    else:
        h[2] = n_tokens
    return h.tobytes()


def read_header(path: str | os.PathLike) -> ShardHeader:
    """The header of a shard of any of the four formats. DataError: the file is no shard, or its
    size is not what its header says."""
    try:
        with open_input(path) as f:
            raw = f.read(HEADER_BYTES)
            size = os.fstat(f.fileno()).st_size
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}") from e
    if len(raw) < HEADER_BYTES:
        raise DataError(
            f"{path}: has {len(raw)} bytes, but the header of a token shard alone has "
            f"{HEADER_BYTES}"
        )
    h = [int(x) for x in np.frombuffer(raw, dtype="<u4")]
    u2, i4, u4 = np.dtype("<u2"), np.dtype("<i4"), np.dtype("<u4")
    if raw[:8] == b"BIN.TOK\n":
        if h[2] not in (1, 2) or h[3] != 4:
            raise DataError(
                f"{path}: is BIN.TOK version {h[2]} with {h[3]} bytes a token: versions 1 and 2 "
                "with 4 bytes are read"
            )
        header = ShardHeader("bin.tok", h[4], i4, h[5] if h[2] == 2 else 0, h[6] == 1)
        masked = dataclasses.replace(header, has_masks=True)
        # llmq's first writer left no flag in h[6]: the file's length decides
        if h[6] > 1 and size == masked.file_bytes:
            header = masked
    elif h[:2] == [20240520, 1]:
        header = ShardHeader("llmc-gpt2", h[2], u2, 0)
    elif h[:2] == [20240801, 7]:
        header = ShardHeader("llmc-llama3", h[2], u4, 0)
    elif h[:2] == [20261121, 1]:
        if h[2] not in (2, 4):
            raise DataError(f"{path}: its header says {h[2]} bytes a token: 2 or 4 are read")
        header = ShardHeader("penstock", h[4] | h[5] << 32, u2 if h[2] == 2 else u4, h[6])
    else:
        raise DataError(
            f"{path}: no known format of token shards begins with the words {h[0]}, {h[1]}"
        )
    if size != header.file_bytes:
        either = (
            f", with masks {masked.file_bytes}" if header.format == "bin.tok" and h[6] > 1 else ""
        )
        raise DataError(
            f"{path}: has {size} bytes, but its header's {header.n_tokens} tokens take "
            f"{header.file_bytes}{either}"
        )
    return header


def read_shard(path: str | os.PathLike) -> np.ndarray:
    """The tokens of a shard of any format as a read-only memory map."""
    h = read_header(path)
    if h.n_tokens == 0:
        return np.zeros(0, dtype=h.dtype)
    return np.memmap(path, dtype=h.dtype, mode="r", offset=HEADER_BYTES, shape=(h.n_tokens,))


MASK_CRC_BYTES = 1 << 20  # of the shard, which its mask's header knows


def mask_path(shard: str | os.PathLike) -> Path:
    """NAME.mask of NAME.bin."""
    return Path(shard).with_suffix(".mask")


def write_mask(shard: str | os.PathLike, flags: np.ndarray, row_tokens: int = 0) -> None:
    """Write the mask of a shard that is on disk. flags: IS_TARGET and BEGINS_DOCUMENT of each
    token. row_tokens: the length of the rows in which documents are packed, if they are."""
    with open(shard, "rb") as f:
        header = _mask_header(f, len(flags), row_tokens)
    mask_path(shard).write_bytes(header + np.asarray(flags, np.uint8).tobytes())


def label_path(shard: str | os.PathLike) -> Path:
    """NAME.labels of NAME.bin."""
    return Path(shard).with_suffix(".labels")


def _label_header(shard, n_tokens: int, labels) -> bytes:
    shard.seek(0)
    crc = zlib.crc32(shard.read(MASK_CRC_BYTES))
    h = np.zeros(HEADER_BYTES // 4, dtype="<u4")
    h[:7] = 20261128, 1, labels.number, labels.n, n_tokens & 0xFFFFFFFF, n_tokens >> 32, crc
    return h.tobytes()


def _mask_header(shard, n_tokens: int, row_tokens: int) -> bytes:
    shard.seek(0)
    crc = zlib.crc32(shard.read(MASK_CRC_BYTES))
    h = np.zeros(HEADER_BYTES // 4, dtype="<u4")
    h[:7] = 20261122, 1, 0, row_tokens, n_tokens & 0xFFFFFFFF, n_tokens >> 32, crc
    return h.tobytes()


class ShardWriter:
    """Appends tokens to shards PREFIX-00000.bin, PREFIX-00001.bin, ... of shard_tokens each, and
    their flags to masks beside them, if there are masks.

    row_tokens: tokens come in rows. A shard then has as many whole rows as it holds, and one more
    token, `pad`, which the last sequence needs.

    labels: a labels.Labels; then each token's target is written too."""

    def __init__(
        self,
        folder: Path,
        prefix: str,
        format: str,
        vocab_size: int,
        shard_tokens: int,
        masks: bool = False,
        row_tokens: int = 0,
        pad: int = 0,
        labels=None,
    ):
        self.folder, self.prefix, self.format, self.vocab_size = folder, prefix, format, vocab_size
        self.masks, self.row_tokens, self.pad = masks, row_tokens, pad
        self.shard_tokens = shard_tokens
        if row_tokens:
            self.shard_tokens = (shard_tokens - 1) // row_tokens * row_tokens
        self.dtype = token_dtype(format, vocab_size)
        self.shards: list[dict] = []  # {"file", "tokens", "sha256"} of each finished shard
        self.n_tokens = self.n_targets = 0
        self._file, self._mask, self._in_shard = None, None, 0
        self.labels, self._targets = labels, None

    def append(
        self, ids: np.ndarray, flags: np.ndarray | None = None, targets: np.ndarray | None = None
    ) -> None:
        """flags: of each token; None where there are no masks."""
        while len(ids):
            if self._file is None:
                self._open()
            n = min(len(ids), self.shard_tokens - self._in_shard)
            self._file.write(ids[:n].astype(self.dtype).tobytes())
            if self.masks:
                self._mask.write(flags[:n].tobytes())
                self.n_targets += int(np.count_nonzero(flags[:n] & IS_TARGET))
                flags = flags[n:]
            else:
                self.n_targets += n
            if self.labels:
                self._targets.write(targets[:n].astype("<i4").tobytes())
                targets = targets[n:]
            self._in_shard += n
            self.n_tokens += n
            ids = ids[n:]
            if self._in_shard == self.shard_tokens:
                self.close()

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.prefix}-{len(self.shards):05d}.bin"
        self._file = open(path, "w+b")
        self._file.write(bytes(HEADER_BYTES))
        if self.masks:
            self._mask = open(mask_path(path), "w+b")
            self._mask.write(bytes(HEADER_BYTES))
        if self.labels:
            self._targets = open(label_path(path), "w+b")
            self._targets.write(bytes(HEADER_BYTES))

    def close(self) -> None:
        """Finish the shard that is being written, if there is one."""
        if self._file is None:
            return
        if self.row_tokens:
            self._file.write(np.array([self.pad], self.dtype).tobytes())
            self._mask.write(bytes([BEGINS_DOCUMENT]))
            if self.labels:
                self._targets.write(np.array([-1], "<i4").tobytes())
            self._in_shard += 1
            self.n_tokens += 1
        self._file.seek(0)
        self._file.write(pack_header(self.format, self._in_shard, self.vocab_size))
        shard = {"file": os.path.basename(self._file.name), "tokens": self._in_shard}
        shard["sha256"] = _sha256(self._file)
        if self.masks:
            self._mask.seek(0)
            self._mask.write(_mask_header(self._file, self._in_shard, self.row_tokens))
            shard["mask"] = os.path.basename(self._mask.name)
            shard["mask_sha256"] = _sha256(self._mask)
        if self.labels:
            self._targets.seek(0)
            self._targets.write(_label_header(self._file, self._in_shard, self.labels))
            shard["labels"] = os.path.basename(self._targets.name)
            shard["labels_sha256"] = _sha256(self._targets)
        self.shards.append(shard)
        self.abandon()

    def abandon(self) -> None:
        for f in (self._file, self._mask, self._targets):
            if f is not None:
                f.close()
        self._file, self._mask, self._targets, self._in_shard = None, None, None, 0


def _sha256(f) -> str:
    digest = hashlib.sha256()
    f.seek(0)
    while piece := f.read(READ_BYTES):
        digest.update(piece)
    return digest.hexdigest()
