"""`penstock export`: a model or a checkpoint as a GGUF file or as a Hugging Face directory.

penstock export --model DIR --to gguf|hf --out PATH [--dtype fp32|bf16|q8_0|mxfp4]

Tensors are read, converted and written in pieces, so that memory does not grow with the model. What
is written has a temporary name until it is complete and on the disk. GGUF needs the package gguf.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from . import hub
from ._lib import check, lib, printed_warnings, text
from .checkpoint import Checkpoint
from .command import OK, Parser, run
from .errors import FormatError, InputOutputError, PenstockError
from .export_gguf import describe, read_json, text_config
from .files import DataError, copy_tokenizer, write_record
from .gguf_tensor import KINDS, Tensor, of_all_layers
from .model import DTYPES, SAVE_DTYPES, ModelConfig, Parameter, TensorFile, mxfp4, write_tensors
from .terminal import progress

MAX_SHARD_BYTES = 5_000_000_000
PIECE_ELEMENTS = 8 << 20  # that are converted at once
PIECE_BYTES = 16 << 20  # that are copied at once
OVERHEAD_BYTES = 64 << 20  # of a file beside its tensors, at most: tokenizer, headers


# ---- the source ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A model directory, opened, and what its weights are."""

    folder: Path
    what: str
    model: ModelConfig
    tensors: TensorFile
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """In which no weight is rounded but those that stay fp32."""
        exact = ("BF16", "MXFP4")
        only_bf16 = all(p.exact or self.tensors.dtype(p.name) in exact for p in self.model.params())
        return "bf16" if only_bf16 else "fp32"


def _has_checkpoints(folder: Path) -> bool:
    return folder.is_dir() and any(p.is_dir() for p in folder.glob("step-*"))


def _find(path: Path) -> tuple[Path, str, tuple[str, ...]]:
    """The directory of the weights, what they are, and notes."""
    inner = path / "checkpoints"
    if (path / "manifest.json").exists():
        checkpoint = Checkpoint(path)
    elif (path / "config.json").exists():
        beside = (f"{inner} has checkpoints: name one to export it",)
        return path, "the model", beside if _has_checkpoints(inner) else ()
    elif _has_checkpoints(inner):
        checkpoint = Checkpoint.latest(inner)
    elif _has_checkpoints(path):
        checkpoint = Checkpoint.latest(path)
    else:
        raise DataError(
            f"--model {path}: is no model directory, no checkpoint and no run directory with "
            "checkpoints"
        )
    recipe = text(lib.ps_recipe_name(checkpoint._info.recipe))
    weights = {name: "the fp32 master copy" for name in ("fp32-master", "fp8-master")}
    weights |= {"fp32": "the fp32 weights", "fp24-master": "the 24-bit master copy"}
    what = f"{weights.get(recipe, 'the weights')} after step {checkpoint.step} (recipe {recipe})"
    return Path(checkpoint.path), what, ()


def open_source(path: str | os.PathLike) -> Source:
    """The model in a model directory, in a checkpoint, or in the newest whole checkpoint of a run
    directory. All tensors of the model are there, of the right shape."""
    path = Path(path)
    if not path.is_dir():
        try:
            ModelConfig.read(path)  # says what a path that does not exist may be
        except (FormatError, InputOutputError) as e:
            raise DataError(f"--model {e}") from e
        raise DataError(f"--model {path}: is a file: give the model's directory")
    if (path / ".penstock-new").exists():  # include/penstock/tensors.h
        raise DataError(
            f"--model {path}: a save into it was cut off: move the files of its .penstock-new into "
            "it, config.json last"
        )
    folder, what, notes = _find(path)
    model, tensors = ModelConfig.read(folder), TensorFile(folder)
    model.check(tensors, folder)
    return Source(folder, what, model, tensors, notes)


# ---- pieces --------------------------------------------------------------------------------------


RUN = 64  # rows that stand together: fewer are read with what stands between


def _rows_at_once(tensor: Tensor) -> int:
    """Rows of a piece; all of a matrix that is transposed."""
    if tensor.transposed:
        return tensor.shape[0]
    return max(1, PIECE_ELEMENTS // tensor.columns)


def _read(source: Source, tensor: Tensor, first: int, n: int, columns: int, dtype: str):
    """Rows `first` and n - 1 more of those that the tensor has of its parameter."""

    def read(row, n):
        data = source.tensors.read_range(tensor.source, row * columns, n * columns, dtype)
        return data.reshape(n, columns)

    if tensor.pick_rows is None:
        return read(first, n)
    rows = tensor.pick_rows[first : first + n]
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    if (len(cuts) + 1) * RUN <= len(rows) or not len(cuts):
        return np.concatenate([read(int(r[0]), len(r)) for r in np.split(rows, cuts)])
    low = int(rows.min())
    return read(low, int(rows.max()) + 1 - low)[rows - low]


def _convert(gguf, source: Source, tensor: Tensor, first_row: int, n_rows: int, error=None):
    """Rows of a tensor as they stand in the file. error: what MXFP4 changes is added to it."""
    if tensor.values is not None:
        return tensor.values
    dtype, columns = "bf16" if tensor.kind == "BF16" else "fp32", tensor.columns
    if tensor.beside:
        at = [n * columns // len(tensor.parts) for n in (first_row, n_rows)]
        parts = (source.tensors.read_range(part, *at, dtype) for part in tensor.parts)
        data = np.concatenate([x.reshape(n_rows, -1) for x in parts], 1)
    elif tensor.transposed:
        data = _read(source, tensor, 0, columns, n_rows, dtype).T
    else:
        width = tensor.source_columns or columns
        data = _read(source, tensor, first_row, n_rows, width, dtype)
    if tensor.pick_columns is not None:
        data = data[:, tensor.pick_columns]
    if tensor.offset:
        data = data + np.float32(tensor.offset)
    if tensor.change:
        data = tensor.change.there(data)
    if tensor.kind == "Q8_0":
        return gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
    if tensor.kind == "MXFP4":
        return _blocks(data, error)
    return np.ascontiguousarray(data)


def _blocks(data: np.ndarray, error: list) -> np.ndarray:
    """As llama.cpp has MXFP4: of 32 elements the scale, then elements i and i + 16 in one byte."""
    elements, scales, changed = mxfp4(data)
    error.append(changed)
    pairs = np.stack((elements & 15, elements >> 4), -1).reshape(*scales.shape, 2, 16)
    packed = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return np.concatenate((scales[:, :, None], packed), -1).reshape(len(data), -1)


class Pieces:
    """A tensor's data, converted piece by piece by the pool's threads while pieces before it are
    written. gguf.GGUFWriter asks an array for its nbytes and for tofile()."""

    def __init__(self, gguf, source: Source, tensor: Tensor, pool, on_bytes: Callable, error=None):
        self.gguf, self.source, self.tensor, self.error = gguf, source, tensor, error
        self.pool, self.on_bytes, self.nbytes = pool, on_bytes, tensor.n_bytes

    def __iter__(self) -> Iterator[np.ndarray]:
        waiting: deque = deque()
        for tensor in self.tensor.each():
            rows = math.prod(tensor.shape[:-1])
            step = _rows_at_once(tensor)
            for first in range(0, rows, step):
                n = min(step, rows - first)
                what = self.gguf, self.source, tensor, first, n, self.error
                waiting.append(self.pool.submit(_convert, *what))
                if len(waiting) > self.pool._max_workers:
                    yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting: deque) -> np.ndarray:
        piece = waiting.popleft().result()
        self.on_bytes(piece.nbytes)
        return piece

    def tofile(self, file) -> None:
        for piece in self:
            file.write(piece.data)  # unlike ndarray.tofile(), an error says why


# ---- writing -------------------------------------------------------------------------------------


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _work_folder(out: Path):
    """A folder beside `out` for what is being written. What a killed export left there is removed.
    A second export to `out` is refused."""
    work = out.parent / f".{out.name}.penstock-export"
    work.mkdir(exist_ok=True)
    fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise DataError(f"--out {out}: another export is writing it") from e
        try:
            for left in work.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield work
        except PenstockError:
            raise
        except OSError as e:
            raise e if e.filename else OSError(f"--out {out}: cannot be written: {e}") from e
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(fd)


def check_out(out: Path, n_bytes: int) -> None:
    """Refuse what cannot be written, before anything is."""
    if out.exists() or out.is_symlink():
        raise DataError(f"--out {out}: exists already: remove it, or give another name")
    if not out.parent.is_dir():
        raise DataError(f"--out {out}: there is no directory {out.parent}")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise DataError(f"--out {out}: the directory {out.parent} cannot be written")
    free, needed = shutil.disk_usage(out.parent).free, n_bytes + OVERHEAD_BYTES
    if free < needed:
        raise DataError(
            f"--out {out}: needs {needed / 1e9:.2f} GB of disk, and {free / 1e9:.2f} GB are free"
        )


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0))))


def write_gguf(gguf, source: Source, description, out: Path, on_bytes: Callable) -> float:
    """Returns by how much experts in MXFP4 are rounded, as write_hf()."""
    error: list = []
    with _work_folder(out) as work, _pool() as pool:
        file = work / out.name
        writer = gguf.GGUFWriter(file, description.architecture)
        try:
            description.write_metadata(writer)
            for t in description.tensors:
                kind = gguf.GGMLQuantizationType[t.kind]
                writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), t.n_bytes, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for t in description.tensors:
                writer.write_tensor_data(Pieces(gguf, source, t, pool, on_bytes, error))
            writer.flush()
        finally:
            writer.close()
        _sync(file)
        os.rename(file, out)
        _sync(out.parent)
    return _rounding(error)


def _rounding(errors: list) -> float:
    """Of sums of squares of what MXFP4 changes, and of the weights."""
    changed, whole = (sum(e[i] for e in errors) for i in (0, 1))
    return math.sqrt(changed / whole) if whole else 0.0


def _generation_config(source: Source, config: dict) -> bytes:
    """The model's own, or the token ids of config.json as transformers takes them."""
    path = source.folder / "generation_config.json"
    if path.exists():
        return path.read_bytes()
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {n: config[n] for n in names if config.get(n) is not None}
    return (json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n").encode()


def _carried(source: Source, names: list[str], on_bytes: Callable) -> Iterator[np.ndarray]:
    for name in names:
        n = source.tensors.n_bytes(name)
        for first in range(0, n, PIECE_BYTES):
            piece = source.tensors.read_bytes(name, first, min(PIECE_BYTES, n - first))
            on_bytes(piece.nbytes)
            yield piece


def write_hf(
    source: Source,
    dtype: str,
    out: Path,
    on_bytes: Callable,
    max_shard_bytes=MAX_SHARD_BYTES,
    text_alone=False,
) -> float:
    """text_alone: of a vision-language model the text model, in place of all of it. Returns by how
    much experts in MXFP4 are rounded: the root mean square error, relative to theirs."""
    config = text_config(read_json(source.folder / "config.json"))
    plain = dtype if dtype in DTYPES else "bf16"
    tensors = _tensors(source.model.params(), plain)
    packed = [t for t in tensors if t.parts] if plain != dtype else []
    tensors = [t for t in tensors if t not in packed]
    read, model = source.tensors, source.model.text_alone() if text_alone else source.model
    whole = model.multimodal == 1
    others = source.model.carried(read) if whole else []
    with _work_folder(out) as work, _pool() as pool:
        folder = work / out.name
        folder.mkdir()
        own = (p for t in tensors for p in Pieces(None, source, t, pool, on_bytes))
        blocks = _Blocks(source, packed, on_bytes)
        pieces = itertools.chain(own, blocks, _carried(source, others, on_bytes))
        names = {t.name: read.name_on_disk(t.name) if whole else t.name for t in tensors}
        specs = [(names[t.name], t.shape, DTYPE_OF[t.kind]) for t in tensors]
        raw = [(n, read.shape(n), read.dtype(n), read.n_bytes(n)) for n in others]
        write_tensors(folder, specs, pieces, max_shard_bytes, [*blocks.specs(), *raw])
        model.write(source.folder, dtype, folder / "config.json")
        (folder / "generation_config.json").write_bytes(_generation_config(source, config))
        copy_tokenizer(source.folder, folder)
        write_record(folder, text(lib.ps_version()))
        for path in (*folder.rglob("*"), folder):
            _sync(path)
        os.rename(folder, out)
        _sync(out.parent)
    return _rounding(blocks.errors)


class _Blocks:
    """gpt-oss's experts in MXFP4, as pieces: a layer's elements, then its scales."""

    def __init__(self, source: Source, tensors: list[Tensor], on_bytes: Callable):
        self.source, self.tensors, self.on_bytes = source, tensors, on_bytes
        self.errors: list = []

    def specs(self) -> Iterator[tuple]:
        for t in self.tensors:
            shape = (t.shape[0], t.shape[2], t.shape[1] // 32)
            n = math.prod(shape)
            yield f"{t.name}_blocks", (*shape, 16), "U8", 16 * n
            yield f"{t.name}_scales", shape, "U8", n

    def __iter__(self) -> Iterator[np.ndarray]:
        for t in self.tensors:
            scales = []
            for part in t.parts:  # an expert, whose rows are those that the file has as columns
                x = self.source.tensors.read_range(part, 0, math.prod(t.shape[1:]), "fp32")
                elements, of_them, error = mxfp4(x.reshape(t.shape[2], t.shape[1]))
                self.errors.append(error)
                scales.append(of_them)
                self.on_bytes(elements.nbytes)
                yield elements
            for of_them in scales:
                self.on_bytes(of_them.nbytes)
                yield of_them


DTYPE_OF = {"F32": "fp32", "BF16": "bf16"}  # of a Tensor's kind
# an expert's matrix, which files have with those of all experts: gpt-oss, transposed; Gemma 4
OF_GPT_OSS = re.compile(r"(.*\.experts\.)\d+\.((?:gate_up|down)_proj)")
OF_GEMMA = re.compile(r"(.*\.\d+\.experts\.)\d+\.((?:gate|up|down)_proj)\.weight")


def _tensors(parameters: list[Parameter], dtype: str) -> list[Tensor]:
    """As files have them; those that stay fp32 come first."""
    out, parts = [], {}
    layers, parameters = of_all_layers(parameters, KINDS[dtype])
    for p in sorted(parameters, key=lambda p: not p.exact):
        flipped, plain = OF_GPT_OSS.fullmatch(p.name), OF_GEMMA.fullmatch(p.name)
        found = flipped or plain
        if not found:
            kind = KINDS["fp32" if p.exact else dtype]
            out.append(Tensor(p.name, p.shape, kind, p.name))
            continue
        each = 2 if plain and found[2] != "down_proj" else 1  # gate, then up
        name = found[1] + ("gate_up_proj" if each == 2 else found[2])
        if name not in parts:
            parts[name] = []
            rows, cols = p.shape[::-1] if flipped else (each * p.shape[0], p.shape[1])
            out.append(Tensor(name, (rows, cols), KINDS[dtype], transposed=bool(flipped)))
        parts[name].append((p.name, each))
    return layers + [
        replace(
            t,
            shape=(len(parts[t.name]) // parts[t.name][0][1], *t.shape),
            parts=tuple(name for name, _ in parts[t.name]),
        )
        if t.name in parts
        else t
        for t in out
    ]


# ---- command line --------------------------------------------------------------------------------


def _parser() -> Parser:
    p = Parser(
        prog="penstock export",
        description="Write a model or a checkpoint as a GGUF file or a Hugging Face directory.",
        epilog="example: penstock export --model my_trained --to gguf --dtype q8_0 --out my.gguf",
    )
    p.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="model directory; or checkpoint; or run directory, whose newest whole checkpoint is "
        f"taken where it has no model; {hub.OR}",
    )
    p.add_argument("--to", required=True, choices=("gguf", "hf"), help="what is written")
    p.add_argument("--out", required=True, metavar="PATH", help="the new file or directory")
    p.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "q8_0", "mxfp4"),
        help="of the matrices (default: as DIR has them); q8_0 for GGUF alone; mxfp4, of gpt-oss: "
        "experts as published, the rest bf16",
    )
    p.add_argument(
        "--text-alone",
        action="store_true",
        help="of a vision-language model the text model, for --to hf (default: all of it)",
    )
    p.add_argument("--quiet", action="store_true", help="print errors only")
    return p


def import_gguf(what: str):
    """The package gguf, which `what` needs."""
    try:
        import gguf
    except ImportError as e:
        raise DataError(
            f"{what} needs the package gguf: pip install -r python/requirements-export.txt (or "
            "pip install gguf)"
        ) from e
    return gguf


def bytes_of(parameter: Parameter, dtype: str) -> int:
    n = math.prod(parameter.shape)
    if parameter.exact:
        return 4 * n
    if dtype == "mxfp4" and OF_GPT_OSS.fullmatch(parameter.name):
        return n // 32 * 17
    return n * {"fp32": 4, "bf16": 2, "mxfp4": 2}[dtype]


def _prepare(args) -> tuple[Source, str, Callable, int, int, list[str]]:
    """Everything that may be refused: (source, dtype, write(on_bytes), tensors, bytes, notes)."""
    if args.to == "hf" and args.dtype == "q8_0":
        raise DataError("--dtype q8_0 is for --to gguf alone: give fp32 or bf16")
    if args.to == "gguf" and args.text_alone:
        raise DataError("--text-alone is for --to hf: a GGUF file has the text model alone")
    if not args.out or args.out.endswith("/") and args.to == "gguf":
        raise DataError(f"--out {args.out!r}: is no name of a file")
    out = Path(os.path.abspath(args.out))
    gguf = import_gguf("--to gguf") if args.to == "gguf" else None
    check_out(out, 0)
    folder = hub.find("--model", args.model, [hub.CONFIG, hub.WEIGHTS], args.quiet)
    source = open_source(folder)
    name = source.folder.resolve().name
    if folder != args.model:  # a snapshot, whose own name is a commit
        name = hub.NAME.fullmatch(args.model)[2]
    dtype = args.dtype or source.dtype
    notes = list(source.notes)
    if dtype != "q8_0":
        check(lib.ps_model_config_saves_as(source.model._ptr, SAVE_DTYPES[dtype]))
    if gguf:
        d = describe(gguf, source.model, source.folder, dtype, name)
        notes += d.notes
        n_bytes = sum(t.n_bytes for t in d.tensors)
        n_tensors = len(d.tensors)

        def write(on_bytes):
            return write_gguf(gguf, source, d, out, on_bytes)
    else:
        if not (source.folder / "tokenizer.json").exists():
            notes.append(f"{source.folder} has no tokenizer.json: the export has no tokenizer")
        n_bytes = sum(bytes_of(p, dtype) for p in source.model.params())
        n_tensors = len(source.model.params())
        if args.text_alone and not source.model.multimodal:
            raise DataError(f"--text-alone: {source.folder} is a text model already: leave it out")
        if not args.text_alone:
            others = source.model.carried(source.tensors)
            n_bytes += sum(source.tensors.n_bytes(name) for name in others)
            n_tensors += len(others)

        def write(on_bytes):
            return write_hf(source, dtype, out, on_bytes, text_alone=args.text_alone)

    check_out(out, n_bytes)
    return source, dtype, write, n_tensors, n_bytes, notes


def _export(args) -> int:
    try:
        source, dtype, write, n_tensors, n_bytes, notes = _prepare(args)
    except (InputOutputError, OSError) as e:  # nothing was written yet
        raise DataError(str(e)) from e
    say = (lambda *_: None) if args.quiet else print
    say(f"{source.folder}: {source.what}")
    for note in notes:
        say(f"note: {note}")
    begun = time.monotonic()
    with progress(n_bytes, args.quiet) as bar:
        try:
            rounding = write(bar("writing"))
        except FormatError as e:  # the source changed meanwhile
            raise InputOutputError(str(e)) from e
    seconds = time.monotonic() - begun
    say(
        f"{args.out}: {n_tensors} tensors, {dtype}, {n_bytes / 1e9:.2f} GB in "
        f"{seconds:.1f} s ({n_bytes / 1e9 / seconds:.2f} GB/s), on the disk"
    )
    if dtype == "mxfp4":
        say(
            f"{args.out}: experts are in MXFP4, which changes their weights by {rounding:.2%} (root "
            "mean square, of theirs)"
        )
    return OK


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    with printed_warnings("penstock export", args.quiet):
        return run("penstock export", lambda: _export(args))
