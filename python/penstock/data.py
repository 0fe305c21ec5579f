"""Writes token shards from text.

python -m penstock.data --out DIR (--tokenizer FILE | --train-tokenizer SIZE) FILE...

Reads files of text, and of records: .jsonl, .json and .parquet. Encodes them with a Hugging Face
tokenizer.json, or with a byte-level BPE tokenizer that it first trains on the same text. Writes
what `penstock train --data DIR` reads:

  DIR/train-00000.bin ...      training tokens
  DIR/val/val-00000.bin ...    validation tokens, with --val-fraction
  DIR/*.mask, DIR/val/*.mask   their masks: with conversations, pairs, --pack
  DIR/tokenizer.json           the tokenizer (and its other files, where there are)
  DIR/dataset.json             tokens, targets, padding, documents, vocabulary, SHA-256 of each shard

- A text file is one document, and so is each record of the other files. A text ends with the
  end-of-text token.
- A record is a text, a prompt with its completion, or a conversation. For the last two, shards get
  masks (docs/data.md).
- With --pack best-fit, whole documents share rows of --seq-len tokens, and the rest of a row is
  padding. Otherwise documents follow one another.
- Text is read and encoded in pieces of about 64 Ki characters, so that memory is bounded whatever
  the size of a file. A piece ends at a line end before a line that begins with a visible character,
  where GPT-like tokenizers divide text too. All cores encode pieces.
- Validation takes a piece whenever it has less than its fraction. A document of one piece is never
  divided.
- Files get temporary names and are renamed at the end. A run that fails leaves nothing.
- The same input gives the same bytes.

This module needs numpy, tokenizers and rich, but not the native library. Conversations need jinja2,
Parquet files pyarrow.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .chat import TARGETS, ChatTemplate, special_tokens
from .command import OK, Parser, given, run
from .documents import Piece, Reader, find_sources, first_record, has_conversations, record_kind
from .files import TOKENIZER_FILES, DataError, open_input
from .packing import LONG, Packer
from .shards import BEGINS_DOCUMENT, IS_TARGET, WRITABLE, ShardWriter, token_dtype

BATCH_CHARS = 4 << 20  # of the pieces that are encoded at once
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
DEFAULT_SHARD_TOKENS = 100_000_000


# ---- tokenizers ----------------------------------------------------------------------------------


def train_tokenizer(
    files: Iterable[str | os.PathLike],
    vocab_size: int,
    field: str = "text",
    *,
    on_bytes: Callable[[int], None] = lambda n: None,
):
    """Train a byte-level BPE tokenizer on the files. It encodes any text without loss, and token 0
    is "<|endoftext|>". The vocabulary is smaller than vocab_size where the text has no more pairs
    to merge. The same text gives the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise DataError(
            f"a byte-level vocabulary of {vocab_size} is too small: 256 bytes and the end of text "
            "need 257"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_NAMES[0]],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    reader = Reader(find_sources(files), field, on_bytes)
    texts = (text for piece in reader for text in (piece.text, piece.completion) if text)
    tokenizer.train_from_iterator(texts, trainer)
    if reader.n_documents == 0:
        raise DataError("the input has no text to train a tokenizer on")
    return tokenizer


def load_tokenizer(path: str | os.PathLike):
    """Read a tokenizer.json, or the one in a folder."""
    from tokenizers import Tokenizer

    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        with open_input(file) as f:
            text = f.read()
    except OSError as e:
        raise DataError(
            f"{file}: {e.strerror}: give a Hugging Face tokenizer.json, or its folder"
        ) from e
    try:
        return Tokenizer.from_buffer(text)
    except Exception as e:  # the library raises plain Exception
        raise DataError(f"{file}: cannot be read as a tokenizer: {e}") from e


def find_eos(tokenizer, wanted: str | None = None) -> tuple[str, int]:
    """The end-of-text token and its id: `wanted`, or the first of the known names that the
    tokenizer has."""
    for name in (wanted,) if wanted else EOS_NAMES:
        idx = tokenizer.token_to_id(name)
        if idx is not None:
            return name, idx
    if wanted:
        raise DataError(f"the tokenizer has no token {wanted!r}: name another one with --eos")
    raise DataError("the tokenizer has no end-of-text token of a known name: name one with --eos")


# ---- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Encoded:
    document: int
    ids: np.ndarray
    is_target: np.ndarray  # of each token, bool
    open: bool  # the document may go on, and ends with eos; else these are all its tokens


class _Splitter:
    """Gives encoded pieces to training or validation. A text ends with eos, in both where its
    pieces are in both."""

    def __init__(self, writers: dict[str, ShardWriter | Packer], val_fraction: float, eos: int):
        self.writers, self.val_fraction, self.eos = writers, val_fraction, eos
        self.document, self.split, self.open = -1, "train", False

    def add(self, piece: _Encoded) -> None:
        train, val = self.writers["train"], self.writers["val"]
        split = (
            "val" if val.n_tokens < self.val_fraction * (train.n_tokens + val.n_tokens) else "train"
        )
        begins = piece.document != self.document or split != self.split
        if begins:
            self.end()
        self._append(split, piece.ids, piece.is_target, begins)
        self.document, self.split, self.open = piece.document, split, piece.open

    def end(self) -> None:
        if self.open:
            self._append(self.split, np.array([self.eos], np.uint32), np.array([True]), False)
        self.open = False

    def _append(self, split: str, ids: np.ndarray, is_target: np.ndarray, begins: bool) -> None:
        """The first token of a document is no target: nothing of the document stands before it."""
        writer = self.writers[split]
        if not writer.masks:
            writer.append(ids)
            return
        flags = is_target.astype(np.uint8) * IS_TARGET
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
    old = _existing(out)
    if old and not force:
        raise DataError(
            f"{out} already has a data set ({old[0].name}): choose another folder, or replace it "
            "with --force"
        )
    return old


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
    are written too, by name. Returns the contents of dataset.json, and under "skipped" the files
    that were passed over because they are not UTF-8."""
    out = Path(out)
    old = _check_options(out, format, shard_tokens, val_fraction, force, seq_len)
    eos_token, eos_id = find_eos(tokenizer, eos)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    token_dtype(format, vocab_size)
    sources = find_sources(files)
    pad_id = eos_id if pad is None else find_eos(tokenizer, pad)[1]
    masks = seq_len > 0 or any(record_kind(first_record(s), field) != "text" for s in sources)
    reader = Reader(sources, field, on_bytes, template, targets, processes)
    try:
        out.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".penstock-data-", dir=out))
    except OSError as e:
        raise DataError(f"{out}: cannot be written: {e.strerror}") from e
    writers = {
        name: ShardWriter(
            folder, name, format, vocab_size, shard_tokens, masks, row_tokens=seq_len, pad=pad_id
        )
        for name, folder in (("train", work), ("val", work / "val"))
    }
    takers: dict = writers
    if seq_len:
        takers = {name: Packer(w, seq_len, pad_id, long) for name, w in writers.items()}
    try:
        _encode_all(reader, tokenizer, eos_id, targets, _Splitter(takers, val_fraction, eos_id))
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
                "long_documents": sum(p.n_long for p in takers.values()),
                "dropped_tokens": sum(p.n_dropped_tokens for p in takers.values()),
            }
        summary = {
            "format": format,
            "bytes_per_token": writers["train"].dtype.itemsize,
            "vocab_size": vocab_size,
            "tokenizer": "tokenizer.json",
            "eos_token": eos_token,
            "eos_token_id": eos_id,
            "documents": reader.n_documents,
            "tokens": sum(w.n_tokens for w in writers.values()),
            **packing,
            **{
                name: {"tokens": w.n_tokens, "targets": w.n_targets, "shards": w.shards}
                for name, w in writers.items()
            },
        }
        tokenizer.save(str(work / "tokenizer.json"))
        for name, content in (extra_files or {}).items():
            (work / name).write_bytes(content)
        (work / "dataset.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        _move_into_place(work, out, old)
    except OSError as e:
        raise OSError(f"{out}: writing failed: {e.strerror or e}") from e
    finally:
        for w in writers.values():
            w.abandon()
        shutil.rmtree(work, ignore_errors=True)
    return {**summary, "skipped": [str(p) for p in reader.skipped]}


def _encode_all(reader: Reader, tokenizer, eos: int, targets: str, splitter: _Splitter) -> None:
    literal = tokenizer.encode_special_tokens
    try:
        for batch in _batches(reader):
            for piece in _encode(batch, tokenizer, eos, targets):
                splitter.add(piece)
    finally:
        tokenizer.encode_special_tokens = literal
    splitter.end()


def _encode(batch: list[Piece], tokenizer, eos: int, targets: str) -> Iterator[_Encoded]:
    """Encode pieces, each kind at once. "<|endoftext|>" inside a text is encoded as plain
    characters. In conversations and pairs special tokens are what they are."""
    by_kind = {k: [p for p in batch if p.kind == k] for k in ("text", "pair", "chat")}
    tokenizer.encode_special_tokens = True
    fast = tokenizer.encode_batch_fast
    texts = iter(fast([p.text for p in by_kind["text"]], add_special_tokens=False))
    tokenizer.encode_special_tokens = False
    prompts = iter(fast([p.text for p in by_kind["pair"]], add_special_tokens=True))
    completions = iter(fast([p.completion for p in by_kind["pair"]], add_special_tokens=False))
    chats = iter(
        tokenizer.encode_batch([p.text for p in by_kind["chat"]], add_special_tokens=False)
    )
    for p in batch:
        if p.kind == "text":
            ids = np.asarray(next(texts).ids, np.uint32)
            yield _Encoded(p.document, ids, np.ones(len(ids), bool), True)
        elif p.kind == "pair":
            prompt, completion = next(prompts).ids, next(completions).ids
            ids = np.asarray([*prompt, *completion, eos], np.uint32)
            learned = np.arange(len(ids)) >= (0 if targets == "all" else len(prompt))
            yield _Encoded(p.document, ids, learned, False)
        else:
            encoded = next(chats)
            begin = np.array([b for b, _ in encoded.offsets], np.int64)
            learned = np.zeros(len(begin), bool)
            for a, b in p.spans:
                learned |= (begin >= a) & (begin < b)
            yield _Encoded(p.document, np.asarray(encoded.ids, np.uint32), learned, False)


def _check_written(reader: Reader, writers: dict[str, ShardWriter], val_fraction: float) -> None:
    if reader.n_documents == 0:
        raise DataError("the input has no text: every document is empty")
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


def _existing(out: Path) -> list[Path]:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; --out takes a folder")
    patterns = ("*.bin", "val/*.bin", "*.mask", "val/*.mask", "dataset.json")
    return [p for pattern in patterns for p in sorted(out.glob(pattern))]


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
        help="Hugging Face tokenizer.json, or its folder",
    )
    which.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="SIZE",
        help="train a byte-level BPE tokenizer of SIZE entries on the text",
    )
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
        "--targets",
        choices=TARGETS,
        default="answers",
        help="what is learned of conversations and of prompts with completions: the answers "
        "(default), the last answer, or all",
    )
    p.add_argument(
        "--pack",
        choices=("none", "best-fit"),
        default="none",
        help="none (default): documents follow one another, and sequences cut them; best-fit: whole "
        "documents in rows of --seq-len tokens",
    )
    p.add_argument(
        "--seq-len", type=int, metavar="N", help="tokens a row, as `penstock train` is given"
    )
    p.add_argument(
        "--long",
        choices=LONG,
        default="divide",
        help="what --pack does with a document that is longer than a row (default: divide)",
    )
    p.add_argument(
        "--shard-tokens",
        type=int,
        default=DEFAULT_SHARD_TOKENS,
        metavar="N",
        help="tokens a shard (default: %(default)s)",
    )
    p.add_argument(
        "--val-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="fraction of the tokens for validation, in DIR/val (default: 0)",
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


def _run(args: argparse.Namespace) -> dict:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    if (args.pack == "none") != (args.seq_len is None):
        raise DataError("--pack best-fit and --seq-len belong together: give both or neither")
    if args.pack == "none" and args.long != "divide":
        raise DataError(f"--long {args.long} is for --pack best-fit alone")
    if _existing(Path(args.out)) and not args.force:  # checked before a tokenizer is trained
        raise DataError(
            f"{args.out} already has a data set: choose another folder, or replace it with --force"
        )
    total = sum(s.path.stat().st_size for s in find_sources(args.files))
    parent = Path(args.out).parent
    if not parent.exists() and not args.quiet:  # its name may be mistyped
        print(
            f"penstock data: --out {args.out}: its parent {parent} does not exist and will be made",
            file=sys.stderr,
        )
    console = Console(stderr=True, quiet=args.quiet or not sys.stderr.isatty())
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    extra, template, pad = {}, None, None
    with Progress(*columns, console=console, disable=console.quiet) as progress:

        def counter(what: str) -> Callable[[int], None]:
            task = progress.add_task(what, total=total)
            return lambda n: progress.advance(task, n)

        if args.tokenizer:
            path = Path(args.tokenizer)
            tokenizer = given("--tokenizer", load_tokenizer, path)
            folder = path if path.is_dir() else path.parent
            eos = args.eos or special_tokens(folder).get("eos_token")
            for name in TOKENIZER_FILES:
                if name != "tokenizer.json" and (folder / name).is_file():
                    extra[name] = (folder / name).read_bytes()
            pad = special_tokens(folder).get("pad_token")
            sources = find_sources(args.files)
            if any(has_conversations(s, args.field) for s in sources):
                template = ChatTemplate(folder)
        else:
            tokenizer = train_tokenizer(
                args.files, args.train_tokenizer, args.field, on_bytes=counter("training tokenizer")
            )
            eos = args.eos or EOS_NAMES[0]
            config = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": EOS_NAMES[0],
                "clean_up_tokenization_spaces": False,
                # what a model's forward() takes: transformers would add token_type_ids
                "model_input_names": ["input_ids", "attention_mask"],
            }
            extra["tokenizer_config.json"] = (json.dumps(config, indent=1) + "\n").encode()
        return write_shards(
            args.files,
            args.out,
            tokenizer,
            eos=eos,
            field=args.field,
            format=args.format,
            shard_tokens=args.shard_tokens,
            val_fraction=args.val_fraction,
            force=args.force,
            targets=args.targets,
            template=template,
            seq_len=args.seq_len or 0,
            long=args.long,
            pad=pad,
            extra_files=extra,
            on_bytes=counter("writing shards"),
            processes=len(os.sched_getaffinity(0)),
        )


def _write(args: argparse.Namespace) -> int:
    s = _run(args)
    if not args.quiet:
        left_out = f"; {len(s['skipped'])} files left out, not UTF-8" if s["skipped"] else ""
        val = f", {s['val']['tokens']:,} of them for validation" if s["val"]["tokens"] else ""
        shards = len(s["train"]["shards"]) + len(s["val"]["shards"])
        targets = s["train"]["targets"] + s["val"]["targets"]
        long = f", {s['long_documents']:,} longer than a row" if s.get("long_documents") else ""
        print(
            f"{args.out}: {s['tokens']:,} tokens{val}, {s['documents']:,} documents{long}, "
            f"vocabulary {s['vocab_size']:,}, "
            f"{shards} shard{'s' if shards != 1 else ''}{left_out}; "
            f"{s.get('padding', 0) / s['tokens']:.1%} of the tokens are padding, "
            f"{targets / s['tokens']:.1%} are targets"
        )
    return OK


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return run("penstock data", lambda: _write(args))


if __name__ == "__main__":
    sys.exit(main())
