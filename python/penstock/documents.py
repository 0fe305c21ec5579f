"""Documents from text, .jsonl, .json and .parquet files, in the pieces that are encoded at once.

A text file is one document, and so is each record of the others. A record is a text, a prompt with
its completion, or a conversation. All but .parquet may be compressed (.gz). Text is read and
divided in pieces of about 64 Ki characters, so that memory is bounded whatever the size of a file.
An array of records (.json) is read as a whole."""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from .chat import ChatTemplate, is_alpaca
from .files import DataError, open_input
from .rendering import render_all
from .shards import READ_BYTES

PIECE_CHARS = 64 << 10  # a piece has at least so many characters, but for the last one
PIECE_MAX_CHARS = 1 << 20  # and at most so many, where it has no line end to be cut at
# of the files that are read from a folder
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Source:
    path: Path
    named: bool  # by the user; a file found in a folder or by a pattern may be passed over


def find_sources(files: Iterable[str | os.PathLike]) -> list[Source]:
    """The files to read. A folder stands for its files of TEXT_SUFFIXES at any depth, a pattern
    (also with **) for its matches; both are sorted by name. Each file is read once."""
    found: dict[Path, Source] = {}
    for item in files:
        item = os.fspath(item)
        path = Path(item)
        if path.is_dir():
            inside = [p for p in path.rglob("*") if _suffix(p) in TEXT_SUFFIXES and p.is_file()]
            if not inside:
                raise DataError(
                    f"{item}: the folder has no {', '.join(TEXT_SUFFIXES[:-1])} or "
                    f"{TEXT_SUFFIXES[-1]} file"
                )
            new = [Source(p, False) for p in sorted(inside)]
        elif path.exists():
            new = [Source(path, True)]
        else:
            new = [
                Source(Path(p), False)
                for p in sorted(glob.glob(item, recursive=True))
                if os.path.isfile(p)
            ]
            if not new:
                raise DataError(f"{item}: no file or folder has this name, and no file matches it")
        for s in new:
            found.setdefault(s.path.resolve(), s)
    return list(found.values())


_CUT = re.compile(r"\n(?=\S)")


def cut_pieces(chunks: Iterable[str]) -> Iterator[str]:
    """Divide text into pieces of about PIECE_CHARS, as the module's docstring says. All pieces
    together are the same text."""
    text = ""
    for chunk in chunks:
        text += chunk
        start = 0
        while len(text) - start > PIECE_CHARS:
            cut = _CUT.search(text, start + PIECE_CHARS - 1, start + PIECE_MAX_CHARS)
            if cut:
                at = cut.end()
            elif len(text) - start >= PIECE_MAX_CHARS:
                space = text.rfind(" ", start + PIECE_CHARS, start + PIECE_MAX_CHARS)
                at = space if space > 0 else start + PIECE_MAX_CHARS
            else:
                break
            yield text[start:at]
            start = at
        text = text[start:]
    if text:
        yield text


def _suffix(path: Path) -> str:
    """Of the file that a .gz file holds."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


@contextlib.contextmanager
def _open(path: Path, on_bytes: Callable[[int], None]) -> Iterator[tuple]:
    """The file, uncompressed, and a function to call now and then: it tells on_bytes() how many
    bytes of the disk were read since."""
    told = 0

    def tell() -> None:
        nonlocal told
        at = raw.tell()
        on_bytes(at - told)
        told = at

    with open_input(path) as raw:
        try:
            yield (gzip.open(raw) if path.suffix.lower() == ".gz" else raw), tell
        except (gzip.BadGzipFile, EOFError, zlib.error) as e:
            raise DataError(f"{path}: cannot be read as gzip: {e}") from e


def _read_text(path: Path, on_bytes: Callable[[int], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with _open(path, on_bytes) as (f, tell):
        while True:
            raw = f.read(READ_BYTES)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as e:
                raise DataError(f"{path}: is not UTF-8 text, near byte {done + e.start}") from e
            if text:
                yield text
            if not raw:
                return
            done += len(raw)
            tell()


def _read_jsonl(path: Path, on_bytes: Callable[[int], None]) -> Iterator[tuple[str, object]]:
    with _open(path, on_bytes) as (f, tell):
        for number, line in enumerate(f, 1):
            tell()
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as e:  # also text that is not UTF-8
                raise DataError(f"{path}: line {number} is not JSON ({e})") from e
            yield f"{path}: line {number}", record


def _read_json(path: Path, on_bytes: Callable[[int], None]) -> Iterator[tuple[str, object]]:
    """An array of records; or a record a line, as many .json files have."""
    with _open(path, lambda n: None) as (f, _):
        begin = f.read(4096).lstrip()
    if begin and begin[:1] not in b"[{":
        raise DataError(
            f"{path}: is neither an array of records nor a record a line: rename it to .txt to "
            "read it as text"
        )
    if begin[:1] != b"[":
        yield from _read_jsonl(path, on_bytes)
        return
    with _open(path, on_bytes) as (f, tell):
        try:
            records = json.load(f)
        except ValueError as e:
            raise DataError(f"{path}: is not JSON ({e})") from e
        tell()
    for number, record in enumerate(records, 1):
        yield f"{path}: record {number}", record


def _read_parquet(path: Path, on_bytes: Callable[[int], None]) -> Iterator[tuple[str, object]]:
    try:
        import pyarrow.parquet
    except ImportError as e:
        raise DataError(
            f"{path}: Parquet files need pyarrow: pip install pyarrow, or convert them to .jsonl"
        ) from e
    number, done, size = 0, 0, path.stat().st_size
    try:
        with open_input(path) as file, pyarrow.parquet.ParquetFile(file) as f:
            total = f.metadata.num_rows
            for batch in f.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", record
                on_bytes(size * number // max(total, 1) - done)
                done = size * number // max(total, 1)
    except (pyarrow.ArrowException, OSError) as e:
        text = " ".join(str(e).split())
        raise DataError(f"{path}: cannot be read as Parquet: {text}") from e


RECORD_READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def record_kind(record, field: str) -> str:
    """What a record has: "text" in `field`, a "chat" in messages, or a "pair"."""
    if isinstance(record, dict) and field not in record:
        if "messages" in record or "conversations" in record or is_alpaca(record):
            return "chat"
        if "prompt" in record and "completion" in record:
            return "pair"
    return "text"


def first_record(source: Source) -> object:
    """The first record of a file of records; None: a file of text, or an empty one."""
    read = RECORD_READERS.get(_suffix(source.path))
    try:
        for _, record in read(source.path, lambda n: None) if read else ():
            return record
    except OSError as e:
        raise DataError(f"{source.path}: {e.strerror}") from e
    return None


def has_conversations(source: Source, field: str) -> bool:
    """The first record is one, also as a prompt and a completion that are lists of messages."""
    record = first_record(source)
    kind = record_kind(record, field)
    return kind == "chat" or kind == "pair" and isinstance(record["prompt"], list)


@dataclass(frozen=True)
class Piece:
    """What is encoded at once: a part of a document's text, or a whole pair or conversation."""

    document: int  # its index
    kind: str  # "text", "pair" or "chat"
    text: str  # of a pair: the prompt
    completion: str = ""  # of a pair
    spans: tuple[tuple[int, int], ...] = ()  # of a conversation: the characters that are targets


def _text_of(record, field: str, what: str, hint: str = "") -> str:
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{what} has no text in field {field!r}{hint}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise DataError(f"{what} has half of a surrogate pair, which is no character") from e
    return text


class Reader:
    """Iterates over the pieces of all documents. Empty documents are passed over, and so are files
    of a folder or a pattern that are not UTF-8; .skipped lists those."""

    def __init__(
        self,
        sources: list[Source],
        field: str = "text",
        on_bytes: Callable[[int], None] = lambda n: None,
        template: ChatTemplate | None = None,
        targets: str = "answers",
        processes: int = 1,
    ):
        self.sources, self.field, self.on_bytes = sources, field, on_bytes
        self.template, self.targets, self.processes = template, targets, processes
        self.n_documents = 0
        self.skipped: list[Path] = []

    def __iter__(self) -> Iterator[Piece]:
        self.n_documents, self.skipped = 0, []
        for source in self.sources:
            try:
                for pieces in self._documents(source):
                    empty = True
                    for piece in pieces:
                        empty = False
                        yield piece
                    self.n_documents += not empty
            except OSError as e:
                raise DataError(f"{source.path}: {e.strerror}") from e

    def _documents(self, source: Source) -> Iterator[Iterable[Piece]]:
        read = RECORD_READERS.get(_suffix(source.path))
        if read:
            records = read(source.path, self.on_bytes)
            what, record = next(records, (None, None))
            if what is None:
                return
            kind, records = record_kind(record, self.field), chain([(what, record)], records)
            if kind == "chat" or kind == "pair" and isinstance(record["prompt"], list):
                yield from self._conversations(kind, records)
            else:
                for what, record in records:
                    yield self._record(kind, record, what)
        elif not source.named and not _is_utf8(source.path):
            self.skipped.append(source.path)
            self.on_bytes(source.path.stat().st_size)
        else:
            yield self._text(_read_text(source.path, self.on_bytes))

    def _text(self, chunks: Iterable[str]) -> Iterator[Piece]:
        return (Piece(self.n_documents, "text", piece) for piece in cut_pieces(chunks))

    def _record(self, kind: str, record, what: str) -> Iterable[Piece]:
        if kind == "text":
            return self._text([_text_of(record, self.field, what, ": name the field with --field")])
        prompt, completion = (_text_of(record, f, what) for f in ("prompt", "completion"))
        return [Piece(self.n_documents, "pair", prompt, completion)] if prompt + completion else []

    def _conversations(self, kind: str, records: Iterator[tuple]) -> Iterator[list[Piece]]:
        if self.template is None:
            raise DataError(
                f"{next(records)[0]} is a conversation: give the tokenizer of a chat model with "
                "--tokenizer"
            )
        jobs = ((kind, record, what) for what, record in records)
        for what, text, spans in render_all(self.template, self.targets, jobs, self.processes):
            _text_of({"text": text}, "text", what)
            yield [Piece(self.n_documents, "chat", text, spans=tuple(spans))]


def _is_utf8(path: Path) -> bool:
    try:
        for _ in _read_text(path, lambda n: None):
            pass
    except DataError:
        return False
    return True
