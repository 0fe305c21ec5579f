"""`penstock import`: the model in a GGUF file as a Hugging Face directory.

penstock import FILE.gguf --out DIR [--dtype fp32|bf16] [--no-tokenizer]

Tensors are read, dequantized and written in pieces, so that memory does not grow with the model. The
directory has a temporary name until it is complete and on the disk. Needs the package gguf."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from ._lib import printed_warnings
from .command import OK, Parser, run
from .errors import FormatError, InputOutputError
from .export import Source, check_out, import_gguf, write_hf
from .export_gguf import ARCHITECTURES, parameters
from .files import DataError
from .gguf_file import GgufFile
from .gguf_tensor import Tensor
from .import_config import FACTORS, make_config
from .import_tokenizer import Tokenizer, write_templates
from .model import ModelConfig, bf16_bits


class Imported:
    """The tensors of the file under their Hugging Face names, as TensorFile reads them."""

    def __init__(self, file: GgufFile, tensors: list[Tensor]):
        self.file, self.tensors = file, {}  # a parameter's tensor, and its first row there
        for tensor in tensors:  # the first of two that are one is the parameter's own
            for e, part in enumerate(tensor.each()):
                self.tensors.setdefault(part.source, (part, e * part.shape[0]))

    def read_range(self, name: str, first: int, n: int, dtype: str) -> np.ndarray:
        """Whole rows: @first and @n are multiples of the columns."""
        tensor, first_row = self.tensors[name]
        stored, columns = self.file.tensors[tensor.name], tensor.columns
        rows = np.arange(first // columns, (first + n) // columns)
        if tensor.pick_rows is not None:
            rows = np.argsort(tensor.pick_rows)[rows]
        elif len(rows):
            rows = slice(first_row + rows[0], first_row + rows[-1] + 1)
        data = self.file.rows(stored, rows).ravel()
        if tensor.offset:
            data = data - np.float32(tensor.offset)
        return bf16_bits(np.ascontiguousarray(data)) if dtype == "bf16" else data


def _check_tensors(file: GgufFile, tensors: list[Tensor]) -> None:
    """Every tensor of the model is there, of its shape and of a type that can be read, and none is
    left over."""
    for tensor in tensors:
        stored = file.tensors.get(tensor.name)
        if stored is None:
            raise DataError(f"{file.path}: tensor {tensor.name} is missing")
        if stored.shape != tuple(tensor.shape):
            raise DataError(
                f"{file.path}: tensor {tensor.name} has shape {[*stored.shape]}, and the model "
                f"needs {[*tensor.shape]}"
            )
        file.check_kind(stored)
    known = {t.name for t in tensors} | {*FACTORS}
    left = sorted(file.tensors.keys() - known - {"output.weight"})
    if left:
        raise DataError(
            f"{file.path}: tensor {left[0][:80]} is not part of the model, and {len(left)} in all "
            "are not"
        )


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
    config, notes = make_config(file)
    _write_small_files(file, config, folder, tokenizer)
    try:
        model = ModelConfig.read(folder)
        family = model.architecture
    except FormatError as e:  # what it says of config.json, the file says
        raise DataError(str(e).replace(f"{folder}/config.json", str(path))) from e
    tensors = parameters(gguf, model, ARCHITECTURES[family], "fp32")
    _check_tensors(file, tensors)
    what = f"{family}, {_kinds(file)}"
    return Source(folder, what, model, Imported(file, tensors)), notes


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
    p.add_argument("file", metavar="FILE.gguf", help="the file; quantized weights are dequantized")
    p.add_argument("--out", required=True, metavar="DIR", help="the new directory")
    p.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        help="of the weights (default: bf16; fp32 where the matrices are F32 or F16)",
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
        n_bytes = source.model.n_elements * {"fp32": 4, "bf16": 2}[dtype]
        check_out(out, n_bytes)
    except (InputOutputError, OSError) as e:  # nothing was written yet
        raise DataError(str(e)) from e
    say(f"{args.file}: {source.what}")
    for note in notes:
        say(f"note: {note}")
    begun = time.monotonic()
    write_hf(source, dtype, out, lambda n: None)
    n = source.model.n_elements
    say(
        f"{args.out}: {n / 1e6:.1f} million parameters, {dtype}, {n_bytes / 1e9:.2f} GB in "
        f"{time.monotonic() - begun:.1f} s, on the disk"
    )
    return OK


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    with printed_warnings("penstock import", args.quiet), tempfile.TemporaryDirectory() as folder:
        return run("penstock import", lambda: _import(args, Path(folder)))
