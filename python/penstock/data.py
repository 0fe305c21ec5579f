"""Writes token shards from text.

penstock data --out DIR (--tokenizer FILE | --train-tokenizer SIZE) FILE...

Reads files of text, and of records: .jsonl, .json and .parquet. Encodes them with a Hugging Face
tokenizer.json, or with a byte-level BPE tokenizer that it first trains on the same text. Writes
what `penstock train --data DIR` reads:

  DIR/train-00000.bin ...      training tokens
  DIR/val/val-00000.bin ...    validation tokens, with --val-fraction
  DIR/*.mask, DIR/val/*.mask   their masks: with conversations, pairs, --pack
  DIR/*.labels                 their labels, with --problem
  DIR/tokenizer.json           the tokenizer (and its other files, where there are)
  DIR/dataset.json             tokens, targets, padding, documents, vocabulary, SHA-256 of each shard

- A text file is one document, and so is each record of the other files. A text begins with the
  tokens that the tokenizer puts before one, and ends with the end-of-text token.
- A record is a text, a prompt with its completion, or a conversation. For the last two, shards get
  masks (docs/data.md).
- With --pack best-fit, whole documents share rows of --seq-len tokens, and the rest of a row is
  padding. Otherwise documents follow one another.
- Text is read and encoded in pieces of about 64 Ki characters, so that memory is bounded whatever
  the size of a file. A piece ends at a line end before a line that begins with a visible character,
  where GPT-like tokenizers divide text too. Tokenizers that put a blank before a text put none
  before its other pieces. All cores encode pieces.
- Validation takes a piece whenever it has less than its fraction. A document of one piece is never
  divided.
- Files get temporary names and are renamed at the end. A run that fails leaves nothing.
- The same input gives the same bytes.

This module needs numpy, tokenizers and rich, but not the native library. Conversations need jinja2,
Parquet files pyarrow.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .chat import TARGETS, ChatTemplate, special_tokens, template_files
from .command import OK, Parser, given, run
from .documents import Piece, Reader, find_sources, first_record, is_rendered
from .encode import Encoded, Encoder
from .files import TOKENIZER_FILES, DataError
from .hub import TOKENIZER
from .hub import find as find_model
from .labels import Labels, add_label_options, document, is_chat
from .packing import LONG, Packer
from .shards import BEGINS_DOCUMENT, IS_TARGET, WRITABLE, ShardWriter, token_dtype
from .terminal import progress
from .tokenizer import (
    EOS_NAMES,
    find_bos,
    find_eos,
    load_tokenizer,
    train_tokenizer,
    vocabulary_size,
)

BATCH_CHARS = 4 << 20  # of the pieces that are encoded at once
DEFAULT_SHARD_TOKENS = 100_000_000

OnBytes = Callable[[int], None]


# ---- writing -------------------------------------------------------------------------------------


class _Splitter:
    """Gives encoded pieces to training or validation. A text begins with bos and ends with eos,
    which is in both where its pieces are in both."""

    def __init__(
        self,
        writers: dict[str, ShardWriter | Packer],
        val_fraction: float,
        bos: list[int],
        eos: int,
    ):
        self.writers, self.val_fraction, self.eos = writers, val_fraction, eos
        self.bos = np.array(bos, np.uint32)
        self.document, self.split, self.open = -1, "train", False

    def add(self, piece: Encoded) -> None:
        train, val = self.writers["train"], self.writers["val"]
        split = (
            "val" if val.n_tokens < self.val_fraction * (train.n_tokens + val.n_tokens) else "train"
        )
        begins = piece.document != self.document or split != self.split
        if begins:
            self.end()
        ids, is_target = piece.ids, piece.is_target
        if piece.open and piece.document != self.document:
            ids = np.concatenate([self.bos, ids])
            is_target = np.ones(len(ids), bool)
        self._append(split, ids, is_target, begins, piece.targets, piece.starts)
        self.document, self.split, self.open = piece.document, split, piece.open

    def end(self) -> None:
        if self.open:
            self._append(self.split, np.array([self.eos], np.uint32), np.array([True]), False)
        self.open = False

    def _append(
        self,
        split: str,
        ids: np.ndarray,
        is_target: np.ndarray,
        begins: bool,
        targets: np.ndarray | None = None,
        starts: tuple[int, ...] = (),
    ) -> None:
        """The first token of a document is no target: nothing of the document stands before it. A
        label may be its."""
        writer = self.writers[split]
        if not writer.masks:
            writer.append(ids)
            return
        flags = is_target.astype(np.uint8) * IS_TARGET
        if targets is not None:
            flags[[0, *starts]] |= BEGINS_DOCUMENT
            writer.append(ids, flags, targets)
            return
        if begins:
            flags[:1] = BEGINS_DOCUMENT
        writer.append(ids, flags)


def _batches(reader: Reader) -> Iterator[list[Piece]]:
    batch, chars = [], 0
    for piece in reader:
        batch.append(piece)
        chars += len(piece.text) + len(piece.completion)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _check_options(
    out: Path, format: str, shard_tokens: int, val_fraction: float, force: bool, seq_len: int
) -> list[Path]:
    """Refuse options that are out of range. Returns the files of the data set that `out` has."""
    if format not in WRITABLE:
        raise DataError(f"format {format!r} is unknown: give one of {', '.join(WRITABLE)}")
    limit = WRITABLE[format][2]
    if not 2 <= shard_tokens <= limit:
        raise DataError(f"{shard_tokens} tokens a shard: give 2 to {limit}")
    if seq_len and not 2 <= seq_len < shard_tokens:
        raise DataError(
            f"rows of --seq-len {seq_len}: give 2 to {shard_tokens - 1}, one less than a shard's "
            "tokens"
        )
    if not 0.0 <= val_fraction < 1.0:
        raise DataError(f"the validation fraction {val_fraction} is not at least 0 and below 1")
    return _check_out(out, force)


def write_shards(
    files: Iterable[str | os.PathLike],
    out: str | os.PathLike,
    tokenizer,
    *,
    eos: str | None = None,
    field: str = "text",
    format: str = "penstock",
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    val_fraction: float = 0.0,
    force: bool = False,
    targets: str = "answers",
    template: ChatTemplate | None = None,
    seq_len: int = 0,
    long: str = "divide",
    pad: str | None = None,
    extra_files: dict[str, bytes] | None = None,
    on_bytes: Callable[[int], None] = lambda n: None,
    processes: int = 1,
    bos: bool = True,
    skip_bad: bool = False,
    problem: str | None = None,
    label_field: str = "label",
    n_labels: int = 0,
) -> dict:
    """Encode files with a tokenizers.Tokenizer, and write shards, tokenizer.json and dataset.json
    into the folder `out`.

    Conversations need the tokenizer's `template`; `targets` says what of them is learned: "answers",
    "last" or "all". Of pairs the completion is learned, with "all" the prompt too. Where there are
    conversations or pairs, shards get masks.

    seq_len: documents are packed in rows of so many tokens (best fit), with padding, and shards
    get masks; 0: they follow one another. long: what happens to a document that is longer, "divide"
    or "drop". pad: the token of the padding; None: the end of text.

    processes: how many of them render conversations. With more than 1, the caller's main module must
    be one that can be imported, as multiprocessing asks.

    force replaces a data set that `out` has; without force such a data set is an error. extra_files
    are written too, by name. bos: texts and prompts begin with what the tokenizer's post-processor
    puts before a text. skip_bad: records that cannot be read are left out and counted by reason;
    without it the first one is an error.

    problem: one of labels.PROBLEMS: records have a label in label_field, or two answers, and shards
    get label files. Needs seq_len. A text that is longer than a row is cut to it, unless long is
    "drop"; two answers that are longer are left out. n_labels: 0: what the data has.

    Returns the contents of dataset.json; under "skipped" the files that were passed over because
    they are not UTF-8, and under "not_read" the files of folders that are no text by their name."""
    out = Path(out)
    old = _check_options(out, format, shard_tokens, val_fraction, force, seq_len)
    eos_token, eos_id = find_eos(tokenizer, eos)
    bos_ids = find_bos(tokenizer) if bos else []
    vocab_size = vocabulary_size(tokenizer)
    token_dtype(format, vocab_size)
    not_read: list[Path] = []
    sources = find_sources(files, not_read)
    keeps_long = long != "drop"
    pad_id = eos_id if pad is None else find_eos(tokenizer, pad)[1]
    labels = Labels(problem, label_field, n_labels) if problem else None
    if labels and not seq_len:
        raise DataError("labelled texts are packed in rows: give --pack best-fit and --seq-len")
    masks = seq_len > 0 or any(first_record(s, field, skip_bad)[0] != "text" for s in sources)
    reader = Reader(sources, field, on_bytes, template, targets, processes, skip_bad, labels)
    stack = contextlib.ExitStack()
    work = stack.enter_context(_work_folder(out))
    writers = {
        name: ShardWriter(
            folder,
            name,
            format,
            vocab_size,
            shard_tokens,
            masks,
            row_tokens=seq_len,
            pad=pad_id,
            labels=labels,
        )
        for name, folder in (("train", work), ("val", work / "val"))
    }
    takers: dict = writers
    if seq_len:
        long = "drop" if labels else long
        takers = {name: Packer(w, seq_len, pad_id, long) for name, w in writers.items()}
    cut = seq_len if labels and keeps_long else 0
    splitter = _Splitter(takers, val_fraction, bos_ids, eos_id)
    try:
        if _existing(out) != old:
            raise DataError(f"{out}: another command wrote into it meanwhile")
        _encode_all(reader, tokenizer, bos_ids, eos_id, targets, splitter, cut)
        for packer in takers.values() if seq_len else ():
            packer.end()
        for w in writers.values():
            w.close()
        _check_written(reader, writers, val_fraction)
        packing = {"pack": "none"}
        if seq_len:
            packing = {
                "pack": "best-fit",
                "seq_len": seq_len,
                "padding": sum(p.n_padding for p in takers.values())
                + sum(len(w.shards) for w in writers.values()),
                "long_documents": sum(p.n_long for p in takers.values())
                + (labels.n_long if labels else 0),
                "dropped_tokens": sum(p.n_dropped_tokens for p in takers.values()),
            }
        summary = {
            "format": format,
            "bytes_per_token": writers["train"].dtype.itemsize,
            "vocab_size": vocab_size,
            "tokenizer": "tokenizer.json",
            "bos_token_ids": bos_ids,
            "eos_token": eos_token,
            "eos_token_id": eos_id,
            "documents": reader.n_documents,
            "records": reader.n_records,
            "bad_records": dict(reader.bad.most_common()),
            **(template.about if template else {}),
            **({"problem": problem, "labels": labels.n} if labels else {}),
            "tokens": sum(w.n_tokens for w in writers.values()),
            **packing,
            **{
                name: {"tokens": w.n_tokens, "targets": w.n_targets, "shards": w.shards}
                for name, w in writers.items()
            },
        }
        tokenizer.save(str(work / "tokenizer.json"))
        for name, content in (extra_files or {}).items():
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_bytes(content)
        (work / "dataset.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        _move_into_place(work, out, old)
    except OSError as e:
        raise OSError(f"{out}: writing failed: {e.strerror or e}") from e
    finally:
        for w in writers.values():
            w.abandon()
        stack.close()
    left_out = {"skipped": reader.skipped, "not_read": not_read}
    return {**summary, **{name: [str(p) for p in paths] for name, paths in left_out.items()}}


def _encode_all(
    reader: Reader,
    tokenizer,
    bos: list[int],
    eos: int,
    targets: str,
    splitter: _Splitter,
    cut: int,
) -> None:
    encoder, literal = Encoder(tokenizer, bos, eos, targets), tokenizer.encode_special_tokens
    try:
        for batch in _batches(reader):
            for piece in encoder.pieces(batch, splitter.document):
                if cut and piece.targets is not None and not piece.starts:
                    piece = _cut(piece, cut, reader.labels)
                splitter.add(piece)
    finally:
        with contextlib.suppress(RuntimeError):  # after Ctrl-C another thread still encodes
            tokenizer.encode_special_tokens = literal
    splitter.end()


def _cut(piece: Encoded, n: int, labels: Labels) -> Encoded:
    """The first n tokens of a labelled text, which keep its label."""
    if len(piece.ids) <= n:
        return piece
    labels.n_long += 1
    is_target, targets = document(piece.ids[:n], piece.targets[-1])
    return Encoded(piece.document, piece.ids[:n], is_target, False, targets)


def _check_written(reader: Reader, writers: dict[str, ShardWriter], val_fraction: float) -> None:
    if reader.n_documents == 0:
        bad = f", or one of {n:,} bad records" if (n := sum(reader.bad.values())) else ""
        first = f", first of all: {next(iter(reader.bad))}" if bad else ""
        raise DataError(f"the input has no text: every document is empty{bad}{first}")
    if writers["train"].n_tokens and not writers["train"].n_targets:
        raise DataError(
            f"none of the {writers['train'].n_tokens} tokens is a target: give conversations in "
            "which the assistant answers, or --targets all"
        )
    if not writers["train"].n_tokens and not writers["val"].n_tokens:
        raise DataError(
            "no document is left to pack, because each is longer than a row or has no target: "
            "raise --seq-len, or give other --long or --targets"
        )
    if val_fraction > 0 and writers["val"].n_tokens == 0:
        raise DataError(
            f"the input is one piece of {writers['train'].n_tokens} tokens, which cannot be "
            "divided into training and "
            "validation: give more text, or leave --val-fraction out"
        )


@contextlib.contextmanager
def _work_folder(out: Path) -> Iterator[Path]:
    """A folder in `out` for files until they are complete. What was made here and is empty at the
    end is removed, `out` too. `out` is locked meanwhile, and what killed commands left there is
    removed."""
    with contextlib.ExitStack() as stack:
        try:
            for p in reversed([p for p in (out, *out.parents) if not p.exists()]):
                stack.callback(_remove_empty, p)
            out.mkdir(parents=True, exist_ok=True)
            lock = os.open(out, os.O_RDONLY)
            stack.callback(os.close, lock)
            if _lock(lock, out):
                for left in out.glob(".penstock-data-*"):
                    shutil.rmtree(left, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=".penstock-data-", dir=out))
        except OSError as e:
            raise DataError(f"{out}: cannot be written: {e.strerror}") from e
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        yield work


def _lock(fd: int, out: Path) -> bool:
    """False: its file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        raise DataError(
            f"{out}: another `penstock data` writes into it: wait for it, or choose another folder"
        ) from e
    except OSError:
        return False
    return True


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _existing(out: Path) -> list[Path]:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; --out takes a folder")
    patterns = ("*.bin", "val/*.bin", "*.mask", "val/*.mask", "dataset.json")
    patterns += ("*.labels", "val/*.labels")
    return [p for pattern in patterns for p in sorted(out.glob(pattern))]


def _check_out(out: Path, force: bool) -> list[Path]:
    """Refuse a folder whose files would be replaced. Returns those of the data set that it has."""
    old = _existing(out)
    model = [*out.glob("config.json"), *out.glob("*.safetensors")]
    if model:  # whose tokenizer would be replaced
        raise DataError(f"{out} has a model ({model[0].name}): choose another folder")
    if force:
        return old
    if old:
        raise DataError(
            f"{out} already has a data set ({old[0].name}): choose another folder, or replace it "
            "with --force"
        )
    if (out / TOKENIZER).exists():
        raise DataError(
            f"{out} has a {TOKENIZER}, which the data set's would replace: choose another folder, "
            "or replace it with --force"
        )
    return old


def _move_into_place(work: Path, out: Path, old: list[Path]) -> None:
    """Remove dataset.json first and write it last: a folder that has one is complete."""
    for p in sorted(old, key=lambda p: p.name != "dataset.json"):
        p.unlink()
    new = sorted(
        (p for p in work.rglob("*") if p.is_file()),
        key=lambda p: (p.name == "dataset.json", str(p)),
    )
    for p in new:
        target = out / p.relative_to(work)
        target.parent.mkdir(exist_ok=True)
        os.replace(p, target)


# ---- command line --------------------------------------------------------------------------------


def add_text_options(p: Parser, pack: str) -> None:
    """How text becomes tokens: options of `penstock data`, and of the commands that take text as
    --data. pack: the default of --pack, in words."""
    p.add_argument(
        "--eos",
        metavar="TOKEN",
        help="token that ends every document (default: the tokenizer's end-of-text token)",
    )
    p.add_argument(
        "--field",
        default="text",
        help="field of a record that has the text (default: text)",
    )
    p.add_argument(
        "--no-bos",
        action="store_true",
        help="leave out the token that the tokenizer puts before a text, most often its BOS",
    )
    p.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out the records that cannot be read, and count them by reason",
    )
    p.add_argument(
        "--targets",
        choices=TARGETS,
        default="answers",
        help="what is learned of conversations and of prompts with completions: the answers "
        "(default), the last answer, or all",
    )
    add_label_options(p)
    p.template()
    p.add_argument(
        "--pack",
        choices=("none", "best-fit"),
        help="none: documents follow one another, and sequences cut them; best-fit: whole documents "
        f"in rows of --seq-len tokens (default: {pack})",
    )
    p.add_argument(
        "--long",
        choices=LONG,
        default="divide",
        help="what --pack does with a document that is longer than a row (default: divide)",
    )
    p.add_argument(
        "--val-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="fraction of the tokens for validation, in val of the shards' folder (default: 0)",
    )


def _parser() -> Parser:
    p = Parser(
        prog="penstock data",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write token shards for `penstock train --data DIR` from text and conversations.",
        epilog="example: penstock data --out data --train-tokenizer 8192 --val-fraction 0.01 "
        "book.txt notes/ 'dump/*.jsonl'",
    )
    p.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="file of text, or of records (.jsonl, .json, .parquet), also .gz; folder, of which "
        ".txt, .md, .py, .jsonl and .parquet are read; or pattern",
    )
    p.add_argument("--out", required=True, metavar="DIR", help="folder for the shards")
    which = p.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="Hugging Face tokenizer.json, or its folder, or ORG/NAME of a model on the hub",
    )
    which.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="SIZE",
        help="train a byte-level BPE tokenizer of SIZE entries on the text",
    )
    add_text_options(p, "none")
    p.add_argument(
        "--seq-len", type=int, metavar="N", help="tokens a row, as `penstock train` is given"
    )
    p.add_argument(
        "--shard-tokens",
        type=int,
        default=DEFAULT_SHARD_TOKENS,
        metavar="N",
        help="tokens a shard (default: %(default)s)",
    )
    p.add_argument(
        "--format",
        choices=sorted(WRITABLE),
        default="penstock",
        help="format of the shards (default: penstock)",
    )
    p.add_argument("--force", action="store_true", help="replace a data set that DIR already has")
    p.add_argument("--quiet", action="store_true", help="print no progress and no summary")
    return p


@dataclass(frozen=True)
class Encoding:
    """A tokenizer with what its directory says, for write_shards()."""

    tokenizer: object
    eos: str | None
    pad: str | None
    template: ChatTemplate | None  # where a file has conversations
    extra_files: dict[str, bytes]  # the tokenizer's other files, by name


def read_encoding(option: str, path: Path, args: argparse.Namespace, firsts: list) -> Encoding:
    """The tokenizer.json at `path`, which `option` gives, or the one in the folder `path`. firsts: the
    first_record() of each file."""
    tokenizer = given(option, load_tokenizer, path)
    folder = path if path.is_dir() else path.parent
    names = (*TOKENIZER_FILES, *template_files(folder))
    special = special_tokens(folder)
    template = None
    chats = [
        is_chat(first[1], args.problem) if args.problem else is_rendered(*first) for first in firsts
    ]
    if any(chats):
        template = ChatTemplate(folder, args.chat_template_kwargs, args.date)
    return Encoding(
        tokenizer,
        args.eos or special.get("eos_token"),
        special.get("pad_token"),
        template,
        {
            name: (folder / name).read_bytes()
            for name in names
            if name != "tokenizer.json" and (folder / name).is_file()
        },
    )


def text_settings(args: argparse.Namespace) -> dict:
    """What of add_text_options() write_shards() takes by the same name."""
    if not args.problem and (args.labels or args.label_field != "label"):
        raise DataError("--labels and --label-field are for labelled texts: give --problem too")
    scored = {"problem": args.problem, "label_field": args.label_field, "n_labels": args.labels}
    return {
        **(scored if args.problem else {}),
        "field": args.field,
        "val_fraction": args.val_fraction,
        "targets": args.targets,
        "long": args.long,
        "bos": not args.no_bos,
        "skip_bad": args.skip_bad,
    }


def _train_encoding(args: argparse.Namespace, on_bytes: OnBytes) -> Encoding:
    """A tokenizer that is trained on the files."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_NAMES[0],
        "clean_up_tokenization_spaces": False,
        # what a model's forward() takes: transformers would add token_type_ids
        "model_input_names": ["input_ids", "attention_mask"],
    }
    tokenizer = train_tokenizer(
        args.files, args.train_tokenizer, args.field, on_bytes=on_bytes, skip_bad=args.skip_bad
    )
    extra = {"tokenizer_config.json": (json.dumps(config, indent=1) + "\n").encode()}
    return Encoding(tokenizer, args.eos or EOS_NAMES[0], None, None, extra)


def _run(args: argparse.Namespace) -> dict:
    if (args.pack == "best-fit") != (args.seq_len is not None):
        raise DataError("--pack best-fit and --seq-len belong together: give both or neither")
    if args.problem and args.pack != "best-fit":
        raise DataError(
            "--problem needs whole documents: give --pack best-fit and --seq-len N, as many tokens "
            "as the longest text is to keep"
        )
    if args.pack != "best-fit" and args.long != "divide":
        raise DataError(f"--long {args.long} is for --pack best-fit alone")
    _check_out(Path(args.out), args.force)  # before a tokenizer is trained
    sources = find_sources(args.files)
    parent = Path(args.out).parent
    if not parent.exists() and not args.quiet:  # its name may be mistyped
        print(
            f"penstock data: --out {args.out}: its parent {parent} does not exist and will be made",
            file=sys.stderr,
        )
    with progress(sum(s.path.stat().st_size for s in sources), args.quiet) as bar:
        if args.tokenizer:
            tokenizer = find_model("--tokenizer", args.tokenizer, [TOKENIZER], args.quiet)
            firsts = [first_record(s, args.field, args.skip_bad) for s in sources]
            encoding = read_encoding("--tokenizer", Path(tokenizer), args, firsts)
        else:
            encoding = _train_encoding(args, bar("training tokenizer"))
        return write_shards(
            args.files,
            args.out,
            **vars(encoding),
            **text_settings(args),
            format=args.format,
            shard_tokens=args.shard_tokens,
            force=args.force,
            seq_len=args.seq_len or 0,
            on_bytes=bar("writing shards"),
            processes=len(os.sched_getaffinity(0)),
        )


def _count(n: int, what: str) -> str:
    return f"{n:,} {what} is" if n == 1 else f"{n:,} {what}s are"


def say_left_out(name: str, s: dict) -> None:
    """What was not read, on stderr."""
    ends = Counter(Path(p).suffix or "no suffix" for p in s["not_read"]).most_common(8)
    names = ", ".join(f"{name} {n:,}" for name, n in ends)
    for paths, why in (
        (s["not_read"], f"not read, being no text by name ({names})"),
        (s["skipped"], "left out: no UTF-8"),
    ):
        if paths:
            line = f"{_count(len(paths), 'file')} {why}, the first {paths[0]}"
            print(f"{name}: {line}", file=sys.stderr)
    for reason, n in s["bad_records"].items():
        print(f"{name}: {_count(n, 'record')} left out: {reason}", file=sys.stderr)


def summary_line(s: dict) -> str:
    """What write_shards() returns, in a line."""
    val = f", {s['val']['tokens']:,} of them for validation" if s["val"]["tokens"] else ""
    shards = len(s["train"]["shards"]) + len(s["val"]["shards"])
    documents = f"{s['documents']:,} document{'s' if s['documents'] != 1 else ''}"
    targets = s["train"]["targets"] + s["val"]["targets"]
    long = f", {s['long_documents']:,} longer than a row" if s.get("long_documents") else ""
    return (
        f"{s['tokens']:,} tokens{val}, {documents}{long}, "
        f"vocabulary {s['vocab_size']:,}, "
        f"{shards} shard{'s' if shards != 1 else ''}; "
        f"{s.get('padding', 0) / s['tokens']:.1%} of the tokens are padding, "
        f"{targets / s['tokens']:.1%} are targets"
    )


def _write(args: argparse.Namespace) -> int:
    s = _run(args)
    if not args.quiet:
        say_left_out("penstock data", s)
        print(f"{args.out}: {summary_line(s)}")
    return OK


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return run("penstock data", lambda: _write(args))


if __name__ == "__main__":
    sys.exit(main())
