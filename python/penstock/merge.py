"""`penstock merge`: a model with its LoRA adapter added to the weights, as a Hugging Face directory.

penstock merge --model DIR --adapter DIR --out DIR [--dtype fp32|bf16]

A projection becomes W + s B A, made in fp32 and rounded once. Tensors are read, added to and written
in pieces, so that memory does not grow with the model.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from pathlib import Path

import numpy as np

from . import hub
from ._lib import check, encode_path, lib, printed_warnings
from .command import OK, Parser, run
from .errors import FormatError, InputOutputError
from .export import Source, check_out, open_source, write_hf
from .files import DataError
from .lora import SCORE, Lora, scorer
from .model import TensorFile, bf16_bits

PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


class Merged:
    """The tensors of a model with an adapter, as TensorFile reads them."""

    def __init__(self, base: TensorFile, adapter: TensorFile, scale: float):
        self.base, self.adapter, self.scale = base, adapter, np.float32(scale)

    def __getattr__(self, name: str):
        """All else of the model's own: names, and the tensors that are carried over."""
        return getattr(self.base, name)

    def read_range(self, name: str, first: int, n: int, dtype: str) -> np.ndarray:
        """Whole rows: @first and @n are multiples of the columns."""
        module = PREFIX + name.removesuffix(".weight")
        if PREFIX + name in self.adapter:  # in place of the model's own
            return self.adapter.read_range(PREFIX + name, first, n, dtype)
        if module + A not in self.adapter:
            return self.base.read_range(name, first, n, dtype)
        a, b = self.adapter.read(module + A), self.adapter.read(module + B)
        w = self.base.read_range(name, first, n, "fp32").reshape(-1, a.shape[1])
        row = first // a.shape[1]
        w = w + self.scale * (b[row : row + len(w)] @ a)
        return bf16_bits(w) if dtype == "bf16" else w


def open_merged(model, adapter) -> Source:
    """The model with the adapter, which belongs to it."""
    source, lora, folder = open_source(model), Lora.read(adapter), Path(adapter)
    check(lib.ps_adapter_check(encode_path(adapter), encode_path(source.folder)))
    tensors = TensorFile(folder / "adapter_model.safetensors")
    if SCORE in tensors:
        source = dataclasses.replace(source, model=scorer(source.folder, adapter))
    scale = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
    return dataclasses.replace(source, tensors=Merged(source.tensors, tensors, scale))


def _parser() -> Parser:
    p = Parser(
        prog="penstock merge",
        description="Write a model with its LoRA adapter added to the weights, as a Hugging Face "
        "directory.",
        epilog="example: penstock merge --model my_model --adapter adapter --out merged",
    )
    p.add_argument("--model", required=True, metavar="DIR", help="the model that was trained with")
    p.add_argument("--adapter", required=True, metavar="DIR", help="an adapter in PEFT's layout")
    p.add_argument("--out", required=True, metavar="DIR", help="the new directory")
    p.add_argument("--dtype", choices=("fp32", "bf16"), help="default: as the model has it")
    p.add_argument("--quiet", action="store_true", help="print errors only")
    return p


def _merge(args) -> int:
    out = Path(os.path.abspath(args.out))
    try:
        check_out(out, 0)
        model = hub.find("--model", args.model, [hub.CONFIG, hub.WEIGHTS], args.quiet)
        with printed_warnings("penstock merge"):  # with --quiet too: of another model's adapter
            source = open_merged(model, args.adapter)
        dtype = args.dtype or source.dtype
        n = sum(math.prod(p.shape) for p in source.model.params())
        n_bytes = n * {"fp32": 4, "bf16": 2}[dtype]
        check_out(out, n_bytes)
    except (InputOutputError, OSError) as e:  # nothing was written yet
        raise DataError(str(e)) from e
    begun = time.monotonic()
    try:
        write_hf(source, dtype, out, lambda n: None)
    except FormatError as e:  # a directory changed meanwhile
        raise InputOutputError(str(e)) from e
    seconds = time.monotonic() - begun
    if not args.quiet:
        print(
            f"{args.out}: {n / 1e9:.3g} billion parameters, {dtype}, {n_bytes / 1e9:.2f} GB "
            f"in {seconds:.1f} s, on the disk"
        )
    return OK


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    with printed_warnings("penstock merge", args.quiet):
        return run("penstock merge", lambda: _merge(args))
