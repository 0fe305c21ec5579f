"""`penstock import`: the model in a GGUF file as a Hugging Face directory.

penstock import FILE.gguf --out DIR [--dtype fp32|bf16|mxfp4] [--no-tokenizer]

Tensors are read, dequantized and written in pieces, so that memory does not grow with the model. The
directory has a temporary name until it is complete and on the disk. Needs the package gguf."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ._lib import check, lib, printed_warnings
from .command import OK, Parser, run
from .errors import FormatError, InputOutputError
from .export import Source, bytes_of, check_out, import_gguf, write_hf
from .export_gguf import parameters
from .files import DataError
from .gguf_families import family_of
from .gguf_file import GgufFile, Stored
from .gguf_tensor import Tensor
from .import_config import FACTORS, make_config
from .import_tokenizer import Tokenizer, write_templates
from .model import SAVE_DTYPES, ModelConfig, bf16_bits


@dataclass(frozen=True)
class Part:
    """What a tensor of the file has of a parameter. `tensor` has two dimensions or one. Its first
    row and its first column are where in the file's."""

    tensor: Tensor
    stored: Stored
    row: int
    column: int

    def fill(self, file: GgufFile, out: np.ndarray, first: int) -> None:
        """Put what it has of the parameter's rows from `first` on into out."""
        t, rows, here = self.tensor, slice(None), np.arange(first, first + len(out))
        if t.pick_rows is not None:
            here = np.flatnonzero((t.pick_rows >= first) & (t.pick_rows < first + len(out)))
            rows = t.pick_rows[here] - first
        if not len(here):
            return
        if t.transposed:
            whole = slice(self.row, self.row + t.shape[0])
            out[rows] = self._restored(file.rows(self.stored, whole, self._columns())[:, here]).T
            return
        at = here + self.row
        if at[-1] - at[0] == len(at) - 1 and np.all(np.diff(at) == 1):
            at = slice(at[0], at[-1] + 1)
        data = self._restored(file.rows(self.stored, at, self._columns()))
        if t.pick_columns is None:
            out[rows] = data
        else:
            out[:, t.pick_columns] = data

    def _columns(self) -> tuple[int, int]:
        return self.column, self.column + self.tensor.columns

    def _restored(self, data: np.ndarray) -> np.ndarray:
        if self.tensor.offset:
            data = data - np.float32(self.tensor.offset)
        return self.tensor.change.back(data) if self.tensor.change else data


class Imported:
    """The tensors of the file under their Hugging Face names, as TensorFile reads them."""

    def __init__(self, file: GgufFile, model: ModelConfig, tensors: list[Tensor]):
        self.file = file
        self.columns = {p.name: p.shape[-1] for p in model.params()}
        self.parts: dict[str, list[Part]] = {}
        for tensor in tensors:
            if tensor.values is None:
                for part in _parts(tensor, file.tensors[tensor.name]):
                    self._add(part)

    def _add(self, part: Part) -> None:
        """Of two tensors that are one, the first is the parameter's own."""
        parts = self.parts.setdefault(part.tensor.source, [])
        if not any(p.tensor.pick_rows is None and p.tensor.pick_columns is None for p in parts):
            parts.append(part)

    def read_range(self, name: str, first: int, n: int, dtype: str) -> np.ndarray:
        """Whole rows: @first and @n are multiples of the columns."""
        columns = self.columns[name]
        out = np.empty((n // columns, columns), np.float32)
        for part in self.parts[name]:
            part.fill(self.file, out, first // columns)
        if any(p.tensor.change for p in self.parts[name]) and not np.isfinite(out).all():
            stored = self.parts[name][0].stored.name
            raise DataError(f"{self.file.path}: tensor {stored} has a number that is not below 0")
        out = out.ravel()
        return bf16_bits(out) if dtype == "bf16" else out


def _parts(tensor: Tensor, stored: Stored) -> list[Part]:
    if tensor.beside:  # of each parameter some columns
        columns = tensor.columns // len(tensor.parts)
        one = replace(tensor, shape=(tensor.shape[0], columns), parts=(), beside=False)
        return [
            Part(replace(one, source=name), stored, 0, i * columns)
            for i, name in enumerate(tensor.parts)
        ]
    each = tensor.each()
    rows = math.prod(each[0].shape[:-1])
    return [Part(t, stored, i * rows, 0) for i, t in enumerate(each)]


def _as_stored(
    file: GgufFile, model: ModelConfig, arch: str, tensors: list[Tensor]
) -> list[Tensor]:
    """The tensors, with those in the place of others that only some converters write: a parameter
    whole that newer ones cut in two, a matrix of each expert, gates and ups of experts in one."""
    shapes, out = {p.name: p.shape for p in model.params()}, {}
    for t in tensors:
        if t.beside:  # with rows that no token reads, where the file has them
            t = replace(t, shape=(shapes[t.parts[0]][0], t.columns))
        layer, _, name = t.name.rpartition(".weight")[0].rpartition(".")
        pair = [f"{layer}.ffn_{x}_exps.weight" for x in ("gate", "up")]
        older = family_of(arch).older.get(f"{name}.weight", "")
        each, fused = f"{layer}.{name.removesuffix('_exps')}", f"{layer}.ffn_gate_up_exps.weight"
        if t.name in file.tensors or t.values is not None:
            out[t.name] = t
        elif t.name == "output.weight" and model.tied_embeddings:
            continue  # export writes it for some architectures even so
        elif f"{layer}.{older}" in file.tensors:
            source = t.source or t.parts[0]
            whole = Tensor(f"{layer}.{older}", shapes[source], "", source, offset=t.offset)
            out[whole.name] = whole
        elif t.name in pair and fused in file.tensors and not {*pair} & file.tensors.keys():
            n, rows, *columns = t.shape
            two = out.setdefault(fused, Tensor(fused, (n, 2 * rows, *columns), ""))
            parts = two.parts + t.parts  # gates, then ups; at last an expert's after each other
            if len(parts) == 2 * n:
                parts = tuple(x for both in zip(parts[:n], parts[n:], strict=True) for x in both)
            out[fused] = replace(two, parts=parts)
        elif name.endswith("_exps") and f"{each}.0.weight" in file.tensors:
            for e, source in enumerate(t.parts):
                one = f"{each}.{e}.weight"
                out[one] = Tensor(one, t.shape[1:], "", source)
        else:
            out[t.name] = t
    return [*out.values()]


def _check_tensors(file: GgufFile, model: ModelConfig, arch: str, tensors: list[Tensor]) -> None:
    """Every tensor of the model is there, of its shape and of a type that can be read, and none is
    left over."""
    for tensor in tensors:
        stored = file.tensors.get(tensor.name)
        if tensor.values is not None:
            continue
        if stored is None:
            raise DataError(f"{file.path}: tensor {tensor.name} is missing")
        if not _alike(stored.shape, tensor.shape):
            raise DataError(
                f"{file.path}: tensor {tensor.name} has shape {[*stored.shape]}, and the model "
                f"needs {[*tensor.shape]}"
            )
        file.check_kind(stored)
    known = {t.name for t in tensors} | {*FACTORS} | family_of(arch).unused(model)
    left = sorted(file.tensors.keys() - known - {"output.weight"})
    past = re.compile(r"blk\.(\d+)\.")  # layers that predict further tokens
    if file.keys.get(f"{file.keys['general.architecture']}.nextn_predict_layers"):
        left = [n for n in left if not (at := past.match(n)) or int(at[1]) < model.n_layers]
    if left:
        raise DataError(
            f"{file.path}: tensor {left[0][:80]} is not part of the model, and {len(left)} in all "
            "are not"
        )


def _alike(a: tuple, b: tuple) -> bool:
    """Dimensions of 1 are left out by some converters."""
    return a[-1:] == b[-1:] and [n for n in a if n != 1] == [n for n in b if n != 1]


def _stops(keys: dict, config: dict) -> list[int]:
    """The ids at which an answer ends: the file's end of text and end of turn."""
    names = ("eos", "eot")
    ids = [keys.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return [
        i
        for i in dict.fromkeys(ids)
        if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < config["vocab_size"]
    ]


def _write_small_files(file: GgufFile, config: dict, folder: Path, tokenizer: bool) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"_from_model_config": True}
    for name in ("bos", "pad"):
        if config[f"{name}_token_id"] is not None:
            generation[f"{name}_token_id"] = config[f"{name}_token_id"]
    if stops := _stops(file.keys, config):
        generation["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer:
        Tokenizer(file, config["vocab_size"]).write(folder)
        write_templates(file.keys, folder)


def _default_dtype(file: GgufFile) -> str:
    """In which no weight is rounded that has not been quantized."""
    kinds = {t.kind.name for t in file.tensors.values() if len(t.shape) > 1}
    return "fp32" if kinds and kinds <= {"F32", "F16"} else "bf16"


def open_gguf(gguf, path, folder: Path, tokenizer: bool) -> tuple[Source, list[str]]:
    """The file's model, whose small files are written into `folder`, and notes."""
    file = GgufFile(gguf, path)
    config, notes, arch = make_config(file)
    _write_small_files(file, config, folder, tokenizer)
    try:
        model = ModelConfig.read(folder)
        family = model.architecture
    except FormatError as e:  # what it says of config.json, the file says
        raise DataError(str(e).replace(f"{folder}/config.json", str(path))) from e
    tensors = _as_stored(file, model, arch, parameters(gguf, model, arch, "fp32"))
    _check_tensors(file, model, arch, tensors)
    what = f"{family}, {_kinds(file)}"
    return Source(folder, what, model, Imported(file, model, tensors)), notes


def _kinds(file: GgufFile) -> str:
    kinds = [t.kind.name for t in file.tensors.values() if len(t.shape) > 1]
    return " ".join(sorted(set(kinds), key=kinds.count, reverse=True))


# ---- command line --------------------------------------------------------------------------------


def _parser() -> Parser:
    p = Parser(
        prog="penstock import",
        description="Write the model in a GGUF file as a Hugging Face directory, to train or "
        "fine-tune it.",
        epilog="example: penstock import my.gguf --out my_model",
    )
    p.add_argument(
        "file",
        metavar="FILE.gguf",
        help="the file, or any of those that it is split into; quantized weights are dequantized",
    )
    p.add_argument("--out", required=True, metavar="DIR", help="the new directory")
    p.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "mxfp4"),
        help="of the weights (default: bf16; fp32 where the matrices are F32 or F16); mxfp4, of "
        "gpt-oss: experts in MXFP4, the rest in bf16",
    )
    p.add_argument(
        "--no-tokenizer",
        action="store_true",
        help="leave out the file's tokenizer and chat template",
    )
    p.add_argument("--quiet", action="store_true", help="print errors only")
    return p


def _import(args, folder: Path) -> int:
    out = Path(os.path.abspath(args.out))
    say = (lambda *_: None) if args.quiet else print
    try:
        if not args.out:
            raise DataError("--out '': is no name of a directory")
        gguf = import_gguf("penstock import")
        check_out(out, 0)
        source, notes = open_gguf(gguf, args.file, folder, not args.no_tokenizer)
        dtype = args.dtype or _default_dtype(source.tensors.file)
        check(lib.ps_model_config_saves_as(source.model._ptr, SAVE_DTYPES[dtype]))
        n_bytes = sum(bytes_of(p, dtype) for p in source.model.params())
        check_out(out, n_bytes)
    except (InputOutputError, OSError) as e:  # nothing was written yet
        raise DataError(str(e)) from e
    say(f"{args.file}: {source.what}")
    for note in notes:
        say(f"note: {note}")
    begun = time.monotonic()
    rounding = write_hf(source, dtype, out, lambda n: None)
    n = source.model.n_elements
    say(
        f"{args.out}: {n / 1e6:.1f} million parameters, {dtype}, {n_bytes / 1e9:.2f} GB in "
        f"{time.monotonic() - begun:.1f} s, on the disk"
    )
    if dtype == "mxfp4":
        say(
            f"{args.out}: experts are in MXFP4, which changes their weights by {rounding:.2%} "
            "(root mean square, of theirs)"
        )
    return OK


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    with printed_warnings("penstock import", args.quiet), tempfile.TemporaryDirectory() as folder:
        return run("penstock import", lambda: _import(args, Path(folder)))
