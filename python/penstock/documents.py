"""Documents from text, .jsonl, .json and .parquet files, in the pieces that are encoded at once.

A text file is one document, and so is each record of the others. A record is a text, a prompt with
its completion, or a conversation. All but .parquet may be compressed (.gz, .zst). Text is read and
divided in pieces of about 64 Ki characters, so that memory is bounded whatever the size of a file.
A line of a .jsonl file has a limit. An array of records (.json) is read as a whole."""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from .chat import ChatTemplate
from .conversation import Conversation, fields_of, is_conversation, read_conversation
from .files import COMPRESSED, TEXT_SUFFIXES, DataError, open_input
from .labels import Labels, is_chat, pair_of
from .rendering import render_all
from .shards import READ_BYTES

try:
    from compression import zstd  # Python 3.14 and newer
except ImportError:
    zstd = None

PIECE_CHARS = 64 << 10  # a piece has at least so many characters, but for the last one
PIECE_MAX_CHARS = 1 << 20  # and at most so many, where it has no line end to be cut at
MAX_RECORD_BYTES = 64 << 20  # of a line of .jsonl, and of a batch of Parquet rows
MAX_WHOLE_CHARS = 16 << 20  # of a document that is encoded whole
BOM = codecs.BOM_UTF8


@dataclass(frozen=True)
class Source:
    path: Path
    named: bool  # by the user; a file found in a folder or by a pattern may be passed over


def find_sources(
    files: Iterable[str | os.PathLike], not_read: list[Path] | None = None
) -> list[Source]:
    """The files to read. A folder stands for its files of TEXT_SUFFIXES at any depth, a pattern
    (also with **) for its matches; both are sorted by name. Each file is read once. not_read gets
    the other files of the folders."""
    found: dict[Path, Source] = {}
    for item in files:
        item = os.fspath(item)
        path = Path(item)
        if path.is_dir():
            every = sorted(p for p in path.rglob("*") if p.is_file())
            inside = [p for p in every if text_suffix(p) in TEXT_SUFFIXES]
            if not_read is not None:
                not_read += (p for p in every if text_suffix(p) not in TEXT_SUFFIXES)
            if not inside:
                raise DataError(
                    f"{item}: the folder has no {', '.join(TEXT_SUFFIXES[:-1])} or "
                    f"{TEXT_SUFFIXES[-1]} file"
                )
            new = [Source(p, False) for p in inside]
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
            _check_compression(s.path)
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


def text_suffix(path: Path) -> str:
    """Of the file that a compressed file holds."""
    path = Path(path.name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _check_compression(path: Path) -> None:
    """Refuse a compressed file that cannot be read: passing it over would lose its text."""
    suffix = path.suffix.lower()
    if suffix == ".gz" or suffix not in COMPRESSED or suffix == ".zst" and zstd:
        return
    why = "Python 3.14 and newer read .zst" if suffix == ".zst" else "of such files .gz is read"
    raise DataError(f"{path}: is compressed, and {why}: decompress it first")


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

    suffix = path.suffix.lower()
    opener = {".gz": gzip.open, ".zst": zstd and zstd.open}.get(suffix, lambda raw: raw)
    broken = (gzip.BadGzipFile, EOFError, zlib.error, *([zstd.ZstdError] if zstd else []))
    with open_input(path) as raw:
        try:
            yield opener(raw), tell
        except broken as e:
            name = "zstd" if suffix == ".zst" else "gzip"
            raise DataError(f"{path}: cannot be read as {name}: {e}") from e


def _read_text(path: Path, on_bytes: Callable[[int], None]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # without a BOM at the begin
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


Records = Iterator[tuple[str, object]]  # where a record is; the record, or the DataError of it


def _lines(f) -> Iterator[bytes | None]:
    """The lines of a file; None for one above MAX_RECORD_BYTES."""
    while line := f.readline(MAX_RECORD_BYTES + 1):
        if len(line) <= MAX_RECORD_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = f.readline(READ_BYTES)
        yield None


def _read_jsonl(path: Path, on_bytes: Callable[[int], None]) -> Records:
    with _open(path, on_bytes) as (f, tell):
        for number, line in enumerate(_lines(f), 1):
            tell()
            what = f"{path}: line {number}"
            if line is None:
                yield what, DataError(f"{what} has more than {MAX_RECORD_BYTES:,} bytes: divide it")
                continue
            if not (line.removeprefix(BOM) if number == 1 else line).strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as e:  # also text that is not UTF-8
                record = DataError(f"{what} is not JSON ({e})")
            except RecursionError:
                record = DataError(f"{what} has JSON that is nested too deeply: give flat records")
            yield what, record


def _read_json(path: Path, on_bytes: Callable[[int], None]) -> Records:
    """An array of records; or a record a line, as many .json files have."""
    with _open(path, lambda n: None) as (f, _):
        begin = f.read(4096).removeprefix(BOM).lstrip()
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


def _batch_rows(metadata) -> int:
    """Rows of a Parquet file that are read at once, by the size of its largest row group's rows."""
    groups = (metadata.row_group(i) for i in range(metadata.num_row_groups))
    row_bytes = max((g.total_byte_size // max(g.num_rows, 1) for g in groups), default=0)
    return min(1024, max(1, MAX_RECORD_BYTES // max(row_bytes, 1)))


def _read_parquet(path: Path, on_bytes: Callable[[int], None]) -> Records:
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
            for batch in f.iter_batches(batch_size=_batch_rows(f.metadata)):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", record
                on_bytes(size * number // max(total, 1) - done)
                done = size * number // max(total, 1)
    except (pyarrow.ArrowException, OSError) as e:
        text = " ".join(str(e).split())
        raise DataError(f"{path}: cannot be read as Parquet: {text}") from e


RECORD_READERS = {".json": _read_json, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def record_kind(record, field: str) -> str | None:
    """What a record has: "text" in `field`, a "chat" in messages, or a "pair". None: none of
    them."""
    if not isinstance(record, dict):
        return None
    if field in record:
        return "text"
    if is_conversation(record):
        return "chat"
    if "prompt" in record and "completion" in record:
        return "pair"
    return None


def is_rendered(kind: str, record) -> bool:
    """Also a prompt and a completion that are lists of messages."""
    return kind == "chat" or kind == "pair" and isinstance(record["prompt"], list)


def first_record(source: Source, field: str, skip_bad: bool = False) -> tuple[str, object]:
    """The first record of a file and its kind, which is the kind of all its records: a record that
    is read or, with skip_bad, the first one of a known kind. A file of text, or one without such a
    record, is ("text", None)."""
    read = RECORD_READERS.get(text_suffix(source.path))
    try:
        for _, record in read(source.path, lambda n: None) if read else ():
            kind = record_kind(record, field)
            if kind or not skip_bad:
                return kind or "text", record
    except OSError as e:
        raise DataError(f"{source.path}: {e.strerror}") from e
    return "text", None


@dataclass(frozen=True)
class Piece:
    """What is encoded at once: a part of a document's text, or a whole pair or conversation."""

    document: int  # its index
    kind: str  # "text", "pair", "chat", "labelled" or "judged"
    text: str  # of a pair: the prompt; of two judged answers: the chosen one
    completion: str = ""  # of a pair; the rejected one
    spans: tuple[tuple[int, int], ...] = ()  # of a conversation: the characters that are targets
    target: int = 0  # of a labelled text
    rendered: bool = False  # by the chat template, which writes what begins a text


def _text_of(record, field: str, what: str, hint: str = "") -> str:
    if not isinstance(record, dict):
        raise DataError(f"{what} is no object with fields")
    text = record.get(field)
    if not isinstance(text, str):
        found = fields_of(record) or "none"
        said = f"{what} has no text in field {field!r}"
        raise DataError(f"{said}; its fields are {found}{hint}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise DataError(f"{what} has half of a surrogate pair, which is no character") from e
    return text


HINT = ": name the text's field with --field, or call the fields messages, or prompt and completion"


def _check_whole(chars: int, what: str) -> None:
    if chars > MAX_WHOLE_CHARS:
        raise DataError(
            f"{what} has {chars:,} characters, and a conversation, or a prompt with its "
            f"completion, has at most {MAX_WHOLE_CHARS:,}: divide it"
        )


OTHER_REASONS = "other reasons"


class Reader:
    """Iterates over the pieces of all documents. Empty documents are passed over, and so are files
    of a folder or a pattern that are not UTF-8; .skipped lists those. With skip_bad, records that
    cannot be read are passed over too; .bad counts them by reason."""

    def __init__(
        self,
        sources: list[Source],
        field: str = "text",
        on_bytes: Callable[[int], None] = lambda n: None,
        template: ChatTemplate | None = None,
        targets: str = "answers",
        processes: int = 1,
        skip_bad: bool = False,
        labels: Labels | None = None,
    ):
        self.labels = labels
        self.sources, self.field, self.on_bytes = sources, field, on_bytes
        self.template, self.targets, self.processes = template, targets, processes
        self.skip_bad = skip_bad
        self.n_documents = self.n_records = 0  # n_records: documents that are a file's records
        self.skipped: list[Path] = []
        self.bad: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Piece]:
        self.n_documents, self.skipped, self.bad = 0, [], Counter()
        self.n_records = 0
        for source in self.sources:
            try:
                for pieces in self._documents(source):
                    empty = True
                    for piece in pieces:
                        empty = False
                        yield piece
                    self.n_documents += not empty
                    self.n_records += not empty and text_suffix(source.path) in RECORD_READERS
            except OSError as e:
                raise DataError(f"{source.path}: {e.strerror}") from e

    def _pass_over(self, what: str, error: DataError) -> None:
        """Count the bad record at `what`, or raise its error. Numbers make no reason another."""
        if not self.skip_bad:
            raise error
        reason = re.sub(r"\d+", "N", str(error).removeprefix(what).removesuffix(HINT).lstrip(": "))[
            :200
        ]
        known = reason in self.bad or len(self.bad) < 100
        self.bad[reason if known else OTHER_REASONS] += 1

    def _documents(self, source: Source) -> Iterator[Iterable[Piece]]:
        read = RECORD_READERS.get(text_suffix(source.path))
        if self.labels:
            if not read:
                raise DataError(
                    f"{source.path}: is text without labels: give records (.jsonl, .json, .parquet)"
                )
            for what, record in self._good(read(source.path, self.on_bytes)):
                try:
                    pieces = self._labelled(record, what)
                except DataError as e:
                    self._pass_over(what, e)
                else:
                    yield pieces
        elif read:
            records = self._good(read(source.path, self.on_bytes))
            kind, first = self._kind(records)
            records = chain([first] if first else [], records)
            if first and is_rendered(kind, first[1]):
                yield from self._conversations(kind, records)
                return
            for what, record in records:
                try:
                    pieces = self._record(kind, record, what)
                except DataError as e:
                    self._pass_over(what, e)
                else:
                    yield pieces
        elif not source.named and not _is_utf8(source.path):
            self.skipped.append(source.path)
            self.on_bytes(source.path.stat().st_size)
        else:
            yield self._text(_read_text(source.path, self.on_bytes))

    def _kind(self, records: Records) -> tuple[str, tuple[str, object] | None]:
        """What first_record() says. The records before that one are passed over."""
        for what, record in records:
            kind = record_kind(record, self.field)
            if kind or not self.skip_bad:
                return kind or "text", (what, record)
            try:
                _text_of(record, self.field, what, HINT)
            except DataError as e:
                self._pass_over(what, e)
        return "text", None

    def _good(self, records: Records) -> Records:
        for what, record in records:
            if isinstance(record, DataError):
                self._pass_over(what, record)
            else:
                yield what, record

    def _text(self, chunks: Iterable[str]) -> Iterator[Piece]:
        return (Piece(self.n_documents, "text", piece) for piece in cut_pieces(chunks))

    def _record(self, kind: str, record, what: str) -> Iterable[Piece]:
        if kind == "text":
            return self._text([_text_of(record, self.field, what, HINT)])
        prompt, completion = (_text_of(record, f, what) for f in ("prompt", "completion"))
        _check_whole(len(prompt) + len(completion), what)
        return [Piece(self.n_documents, "pair", prompt, completion)] if prompt + completion else []

    def _rendered(self, c: Conversation, what: str) -> str:
        if self.template is None:
            raise DataError(f"{what} is a conversation: give the tokenizer of a chat model")
        try:
            return self.template.render(c.messages, c.tools, variables=c.variables)
        except DataError as e:
            raise DataError(f"{what}: {e}") from e

    def _labelled(self, record, what: str) -> list[Piece]:
        """One text with its label, or two answers."""
        if self.labels.problem == "pairs":
            texts, chats = [], []
            for answer, chat in pair_of(record, what):
                messages = {**record, "messages": answer} if chat else None
                c = read_conversation(messages, what) if chat else None
                texts.append(self._rendered(c, what) if chat else answer)
                chats.append(chat)
            _check_whole(sum(map(len, texts)), what)
            for text in texts:
                _text_of({"text": text}, "text", what)
            if not all(texts):
                raise DataError(f"{what} has an empty answer")
            return [Piece(self.n_documents, "judged", *texts, rendered=all(chats))]
        chat = is_chat(record, self.labels.problem) and self.field not in record
        if chat:
            text = self._rendered(read_conversation(record, what), what)
        else:
            text = _text_of(record, self.field, what)
        _check_whole(len(text), what)
        target = self.labels.target(record, what)
        if not text:
            return []
        return [Piece(self.n_documents, "labelled", text, target=target, rendered=chat)]

    def _conversations(self, kind: str, records: Records) -> Iterator[list[Piece]]:
        if self.template is None:
            raise DataError(
                f"{next(records)[0]} is a conversation: give the tokenizer of a chat model with "
                "--tokenizer"
            )
        jobs = ((kind, record, what) for what, record in records)
        for what, text, spans in render_all(self.template, self.targets, jobs, self.processes):
            try:
                if isinstance(text, DataError):
                    raise text
                _text_of({"text": text}, "text", what)
                _check_whole(len(text), what)
            except DataError as e:
                self._pass_over(what, e)
            else:
                yield [Piece(self.n_documents, "chat", text, spans=tuple(spans))]


def _is_utf8(path: Path) -> bool:
    try:
        for _ in _read_text(path, lambda n: None):
            pass
    except DataError:
        return False
    return True
