"""Reading a GGUF file, or the files that one is split into: its keys, and where its tensors are.

The whole header is checked against the file's size before anything is made of it, so that a cut or
damaged file costs neither memory nor time. Data stay in the file, which is mapped."""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass

import numpy as np

from .files import DataError, open_input

MAGIC = b"GGUF"
MOST_DIMS = 4
_NUMBERS = dict(enumerate("u1 i1 u2 i2 u4 i4 f4 ? - - u8 i8 f8".split()))  # numpy's, by GGUF's type
_STRING, _ARRAY = 8, 9
LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8  # of its description
PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf", re.DOTALL)  # the name of one of several files


@dataclass(frozen=True)
class Stored:
    """A tensor of the file."""

    name: str
    shape: tuple  # rows first, as numpy has it
    kind: object  # gguf.GGMLQuantizationType
    data: np.ndarray  # bytes, a row of the file each


class _Cut(Exception):
    """The file ends within what is read."""


class GgufFile:
    """A GGUF file, opened. keys: {name: value}. tensors: {name: Stored}. DataError: it is none.
    alone: without the other files, where it is one of several."""

    def __init__(self, gguf, path: str | os.PathLike, alone: bool = False):
        self.path, self._gguf, self._at = path, gguf, 0
        try:
            with open_input(path) as f:
                size = os.fstat(f.fileno()).st_size
                self._bytes = np.memmap(f, np.uint8, "r") if size else np.empty(0, np.uint8)
        except OSError as e:
            raise DataError(f"{path}: cannot be opened: {e.strerror}") from e
        self._view = memoryview(self._bytes)
        try:
            n_keys, n_tensors = self._read_start()
            self.keys = dict(self._key() for _ in range(n_keys))
            self.tensors = self._read_tensors(n_tensors)
        except _Cut as e:
            raise DataError(
                f"{path}: ends in the middle of its header, at {len(self._bytes):,} bytes: fetch "
                "it again"
            ) from e
        except UnicodeDecodeError as e:
            raise DataError(f"{path}: a name in it is not UTF-8: fetch it again") from e
        if not alone:
            self._join_others()

    def _join_others(self) -> None:
        """The tensors of all files that the model is split into, and the keys of the first."""
        n, no = self.keys.get("split.count", 1), self.keys.get("split.no", 0)
        if n in (0, 1):
            return
        name = PART.fullmatch(os.fspath(self.path))
        if not name or (int(name[2]) - 1, int(name[3])) != (no, n):
            raise DataError(
                f"{self.path}: says that it is file {no} of {n}, from 0 on: the names of all must "
                "end as -00001-of-00002.gguf does, where 00001 is the first file and 00002 the last"
            )
        files = [f"{name[1]}{i:05d}-of-{name[3]}.gguf" for i in range(1, n + 1)]
        parts = [self if i == no else self._other(f, i, n) for i, f in enumerate(files)]
        tensors = {}
        for part in parts:
            if twice := tensors.keys() & part.tensors.keys():
                raise DataError(
                    f"{part.path}: has tensor {min(twice)[:80]}, as a file before it has"
                )
            tensors |= part.tensors
        self.keys, self.tensors = parts[0].keys, tensors
        if self.keys.get("split.tensors.count", len(tensors)) != len(tensors):
            raise DataError(
                f"{self.path}: says that its {n} files have {self.keys['split.tensors.count']} "
                f"tensors, and they have {len(tensors)}"
            )

    def _other(self, path: str, i: int, n: int) -> GgufFile:
        if not os.path.exists(path):
            raise DataError(
                f"{self.path}: is one of {n} files, of which {path} is missing: fetch it"
            )
        part = GgufFile(self._gguf, path, alone=True)
        if (part.keys.get("split.no"), part.keys.get("split.count")) != (i, n):
            raise DataError(
                f"{path}: says that it is another file than number {i}, from 0 on, of {n}"
            )
        return part

    def _take(self, n: int) -> memoryview:
        if n > len(self._view) - self._at:
            raise _Cut
        self._at += n
        return self._view[self._at - n : self._at]

    def _number(self, form: str) -> int:
        return struct.unpack("<" + form, self._take(struct.calcsize(form)))[0]

    def _text(self) -> str:
        return str(self._take(self._number("Q")), "utf-8")

    def _read_start(self) -> tuple[int, int]:
        if bytes(self._view[:4]) != MAGIC:
            raise DataError(f"{self.path}: is no GGUF file: it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise DataError(
                f"{self.path}: is GGUF of version {version}: versions 2 and 3 are read, little "
                "endian"
            )
        n_tensors, n_keys = self._number("Q"), self._number("Q")
        left = len(self._view) - self._at
        if n_tensors > left // LEAST_TENSOR_BYTES or n_keys > left // (8 + 4 + 1):
            raise DataError(
                f"{self.path}: says that it has {n_tensors:,} tensors and {n_keys:,} keys, more "
                f"than fit into its {len(self._view):,} bytes"
            )
        return n_keys, n_tensors

    # ---- keys ------------------------------------------------------------------------------------

    def _key(self) -> tuple[str, object]:
        name = self._text()
        return name, self._value(name, self._number("I"))

    def _value(self, name: str, kind: int, n: int | None = None):
        """One value, or a list of n."""
        if kind == _STRING:
            if n is None:
                return self._text()
            if n > (len(self._view) - self._at) // 8:
                raise _Cut
            return [self._text() for _ in range(n)]
        if kind == _ARRAY and n is None:
            kind = self._number("I")
            return self._value(name, kind, self._number("Q"))
        if _NUMBERS.get(kind, "-") == "-":
            raise DataError(f"{self.path}: the key {name[:80]} has type {kind}, which GGUF has not")
        dtype = np.dtype(_NUMBERS[kind])
        data = np.frombuffer(self._take((1 if n is None else n) * dtype.itemsize), dtype)
        return data.tolist() if n is not None else self._scalar(data[0])

    @staticmethod
    def _scalar(value):
        """A number of Python's. A float32 becomes the shortest decimal that is rounded to it."""
        return float(str(value)) if isinstance(value, np.float32) else value.item()

    # ---- tensors ---------------------------------------------------------------------------------

    def _read_tensors(self, n: int) -> dict[str, Stored]:
        described = [self._description() for _ in range(n)]
        align = self.keys.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1 or align & (align - 1) or align > 1 << 20:
            raise DataError(f"{self.path}: general.alignment is {align}: it must be a power of 2")
        begin = -(-self._at // align) * align
        tensors = {}
        for name, shape, kind, offset in described:
            if name in tensors:
                raise DataError(f"{self.path}: has two tensors {name[:80]}")
            per_block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
            if shape[-1] % per_block:
                raise DataError(
                    f"{self.path}: tensor {name[:80]} is {kind.name}, but its rows of {shape[-1]} "
                    f"elements are no multiple of {per_block}"
                )
            row_bytes = shape[-1] // per_block * block_bytes
            first, rows = begin + offset, math.prod(shape[:-1])
            if first + rows * row_bytes > len(self._bytes):
                raise DataError(
                    f"{self.path}: tensor {name[:80]} ends at byte {first + rows * row_bytes:,}, "
                    f"and the file has {len(self._bytes):,}: fetch it again"
                )
            data = self._bytes[first : first + rows * row_bytes].reshape(rows, row_bytes)
            tensors[name] = Stored(name, shape, kind, data)
        return tensors

    def _description(self) -> tuple:
        name, n_dims = self._text(), self._number("I")
        if not 1 <= n_dims <= MOST_DIMS:
            raise DataError(
                f"{self.path}: tensor {name[:80]} has {n_dims} dimensions: 1 to {MOST_DIMS} are read"
            )
        shape = tuple(self._number("Q") for _ in range(n_dims))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        if 0 in shape:
            raise DataError(f"{self.path}: tensor {name[:80]} has no elements")
        try:
            kind = self._gguf.GGMLQuantizationType(kind)
        except ValueError as e:
            raise DataError(
                f"{self.path}: tensor {name[:80]} has type {kind}, which the package gguf does not "
                "know"
            ) from e
        return name, shape, kind, offset

    def architecture_name(self, name: str) -> str | None:
        """llama.cpp's name of an architecture of the package gguf; None: it knows none."""
        arch = self._gguf.MODEL_ARCH.__members__.get(name)
        return self._gguf.MODEL_ARCH_NAMES[arch] if arch is not None else None

    # ---- values ----------------------------------------------------------------------------------

    def rows(self, tensor: Stored, which, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Rows of a tensor in fp32. which: a slice or indices. columns: the first of them, and the
        one after the last; None: all."""
        first, last = columns or (0, tensor.shape[-1])
        per_block, block_bytes = self._gguf.GGML_QUANT_SIZES[tensor.kind]
        begin, end = first // per_block, -(-last // per_block)  # whole blocks
        data = tensor.data[which, begin * block_bytes : end * block_bytes]
        data, kind = np.ascontiguousarray(data), self._gguf.GGMLQuantizationType
        if tensor.kind == kind.F32:
            return data.view(np.float32)
        data = self._gguf.quants.dequantize(data, tensor.kind).astype(np.float32, copy=False)
        return data[:, first - begin * per_block : last - begin * per_block]

    def check_kind(self, tensor: Stored) -> None:
        """Refuse a type whose values cannot be had."""
        kinds = self._gguf.GGMLQuantizationType
        if tensor.kind in (kinds.F32, kinds.F16, kinds.BF16):
            return
        if tensor.kind not in self._gguf.quants._type_traits:
            raise DataError(
                f"{self.path}: tensor {tensor.name} is {tensor.kind.name}, which the package gguf "
                "cannot turn into numbers: take a file in F16, BF16, Q8_0 or a K-quant"
            )
