"""A tensor of a GGUF file or of a directory that penstock.export writes: where its numbers come
from, and what is done to them on the way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .model import Parameter, bf16_bits

BLOCK = 32  # elements that share a scale, in Q8_0 and MXFP4
BLOCK_BYTES = {"Q8_0": 34, "MXFP4": 17}
ELEMENT_BYTES = {"F32": 4, "BF16": 2}
# GGUF's names of a --dtype, of which mxfp4 is that of gpt-oss's experts alone.
KINDS = {"fp32": "F32", "bf16": "BF16", "q8_0": "Q8_0", "mxfp4": "BF16"}
# Matrices that llama.cpp reads in F32: routers, convolutions, gates of one row.
ALWAYS_F32 = (".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight", ".ssm_conv1d.weight")

# a layer's part of what is one tensor for all layers (native/io/sliced.c): Gemma 4
OF_LAYERS = re.compile(
    r"model\.layers\.\d+\.(embed_tokens_per_layer|per_layer_model_projection"
    r"|per_layer_projection_norm)\.weight"
)


@dataclass(frozen=True)
class Change:
    """What is done to each element, and what undoes it."""

    there: Callable
    back: Callable


def _logarithm(y: np.ndarray) -> np.ndarray:
    """x of y = -exp(x) in fp32: what bf16 has, where its y is the same within a rounding, else the
    nearest in fp32."""
    with np.errstate(invalid="ignore", divide="ignore"):
        x = np.log(-y.astype(np.float64))
    near = (bf16_bits(x.astype(np.float32)).astype(np.uint32) << 16).view(np.float32)
    same = np.abs(near - x) <= 2.0**-22.5  # exp's rounding and that of y: below 2^-23 each
    return np.where(same, near, x.astype(np.float32))


NEGATIVE_EXP = Change(lambda x: -np.exp(x), _logarithm)


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file to be written. Of its parameter, `source`, it has the rows `pick_rows`,
    in that order, and of these the columns `pick_columns`; None: all. `values`: its data where it is
    no parameter's."""

    name: str
    shape: tuple
    kind: str  # "F32", "BF16", "Q8_0" or "MXFP4"
    source: str = ""  # the parameter's name
    pick_rows: np.ndarray | None = None  # of a tensor with parts: one row of it a part
    pick_columns: np.ndarray | None = None
    source_columns: int = 0  # 0: as many as the tensor has
    offset: float = 0.0  # added to each element
    change: Change | None = None
    values: np.ndarray | None = None
    # the parameters' names, one an expert or a layer, in the place of source
    parts: tuple = ()
    beside: bool = False  # the parts stand side by side, not one after the other
    transposed: bool = False  # the parameter has the shape of the other order

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def n_bytes(self) -> int:
        n = math.prod(self.shape)
        if self.kind in BLOCK_BYTES:
            return n // BLOCK * BLOCK_BYTES[self.kind]
        return n * ELEMENT_BYTES[self.kind]

    def each(self) -> list[Tensor]:
        """The tensors of two dimensions that it is made of, one after the other."""
        if not self.parts or self.beside:
            return [self]
        n, columns = len(self.parts), self.shape[2:] if len(self.shape) > 2 else self.shape[1:]
        shape = (math.prod(self.shape) // math.prod(columns) // n, *columns)
        own = [self.pick_rows] * n
        if self.pick_rows is not None and self.pick_rows.ndim == 2:
            own = self.pick_rows
        return [
            replace(self, shape=shape, source=p, parts=(), pick_rows=r)
            for p, r in zip(self.parts, own, strict=True)
        ]


def kind_of(name: str, shape: tuple, dtype: str) -> str:
    """In which kind the file has a tensor of that name."""
    if len(shape) < 2 or name.endswith(ALWAYS_F32) or not name.endswith(".weight"):
        return "F32"
    kind = "MXFP4" if dtype == "mxfp4" and "_exps." in name else KINDS[dtype]
    return "F32" if kind in BLOCK_BYTES and shape[-1] % BLOCK else kind


def of_all_layers(parameters: list[Parameter], kind: str) -> tuple[list[Tensor], list[Parameter]]:
    """The tensors that files have for all layers and parameters have by layer; and the other
    parameters."""
    out, layers, others = [], {}, []
    for p in parameters:
        shared = OF_LAYERS.fullmatch(p.name)
        (layers.setdefault(f"model.{shared[1]}.weight", []) if shared else others).append(p)
    for name, of in layers.items():
        names, (rows, *columns) = tuple(p.name for p in of), of[0].shape
        if "embed" in name:
            out.append(Tensor(name, (rows, len(of) * columns[0]), kind, parts=names, beside=True))
        elif columns:
            out.append(Tensor(name, (len(of) * rows, *columns), kind, parts=names))
        else:
            out.append(Tensor(name, (rows,), kind, names[0]))
    return out, others


def halves_as_neighbours(n_rows: int, heads: int) -> np.ndarray:
    """Rows in the order in which element i of a head's second half follows element i of its first,
    for RoPE that turns neighbours."""
    return np.arange(n_rows).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
