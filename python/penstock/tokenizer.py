"""Tokenizers of the package tokenizers: reading one from a file, training one, and calls of it.

The package's code is Rust. It may run for minutes, fail by a panic, and trust what a file says.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .documents import Reader, find_sources
from .files import DataError, open_input, rust_failure

EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
MOST_IDS = 2**31 - 1  # a token id is an int32 in plans and shards, and so is the vocabulary's size
WORD = 256  # characters of a word in training: each merge of a pair reads the whole word
PROBE = "Hello wörld, 12 tokens:\n\t世界"


def _in_thread(function: Callable, *args, **options):
    """function() in a thread of its own, so that Ctrl-C works while it runs."""
    result, errors, done = [], [], threading.Event()

    def work() -> None:
        try:
            result.append(function(*args, **options))
        except BaseException as e:
            errors.append(e)
        done.set()

    threading.Thread(target=work, daemon=True).start()
    done.wait()
    if errors:
        raise errors[0]
    return result[0]


def call(function: Callable, *args, **options):
    """function() of a tokenizer, which Ctrl-C ends. Its failures and panics are DataErrors."""
    try:
        with _silent_panic():
            return _in_thread(function, *args, **options)
    except BaseException as e:
        if failure := rust_failure(e):
            raise DataError(f"the tokenizer cannot encode the text: {failure}") from e
        raise


@contextlib.contextmanager
def _silent_panic() -> Iterator[None]:
    """What is written to stderr meanwhile comes at the end, without a panic's backtrace."""
    if sys.stderr is None:  # closed
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as e:
            panicked = type(e).__name__ == "PanicException"
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            kept.seek(0)
            text = kept.read()
            with contextlib.suppress(OSError):
                os.write(2, text.partition(b"\nthread '")[0] if panicked else text)


def _read(text: bytes):
    """The tokenizer, after it has encoded and decoded a text: a panic comes here."""
    from tokenizers import Tokenizer

    with _silent_panic():
        tokenizer = Tokenizer.from_buffer(text)
        tokenizer.no_truncation()  # documents are whole, as transformers' are by default
        tokenizer.no_padding()
        with contextlib.suppress(Exception):  # a vocabulary need not have every character
            tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=True).ids)
        return tokenizer


def load_tokenizer(path: str | os.PathLike):
    """Read a tokenizer.json, or the one in a folder."""
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
        tokenizer = _read(text)
    except BaseException as e:
        failure = str(e) if isinstance(e, ValueError) else rust_failure(e)
        if failure is None:
            raise
        raise DataError(f"{file}: cannot be read as a tokenizer: {failure}") from e
    try:
        vocabulary_size(tokenizer)
    except DataError as e:
        raise DataError(f"{file}: {e}") from e
    return tokenizer


def vocabulary_size(tokenizer) -> int:
    """One more than the highest id."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise DataError("the tokenizer has no token")
    token = max(vocab, key=vocab.get)
    if vocab[token] >= MOST_IDS:
        raise DataError(
            f"the token {token[:40]!r} has the id {vocab[token]}, above the largest id, "
            f"{MOST_IDS - 1}"
        )
    return vocab[token] + 1


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


def find_bos(tokenizer) -> list[int]:
    """The ids that the tokenizer's post-processor puts before a text, most often one or none."""
    for text in ("a", *tokenizer.get_vocab(with_added_tokens=False)):
        with contextlib.suppress(DataError):
            added = call(tokenizer.encode, text, add_special_tokens=True)
            if 0 in added.special_tokens_mask:
                return added.ids[: added.special_tokens_mask.index(0)]
    return []


# what may be one word: letters and digits, other visible characters, or blanks
_LONG = re.compile(rf"[^\W_]{{{WORD},}}|(?:[^\w\s]|_){{{WORD},}}|\s{{{WORD},}}")


def cut_words(text: str) -> Iterator[str]:
    """The text in parts, so that no word is longer than two WORDs. Most texts are one part, which a
    look at each WORD characters shows: they have a space, and other characters."""
    windows = (text[i : i + WORD] for i in range(0, len(text) - WORD + 1, WORD))
    start = 0
    if any(" " not in w or w.isspace() for w in windows):
        for run in _LONG.finditer(text):
            for at in range(run.start() + WORD, run.end(), WORD):
                yield text[start:at]
                start = at
    yield text[start:]


def train_tokenizer(
    files: Iterable[str | os.PathLike],
    vocab_size: int,
    field: str = "text",
    *,
    on_bytes: Callable[[int], None] = lambda n: None,
    skip_bad: bool = False,
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
    stopped = threading.Event()
    reader = Reader(find_sources(files), field, on_bytes, skip_bad=skip_bad)

    def texts() -> Iterator[str]:
        for piece in reader:
            if stopped.is_set():
                return
            for text in (piece.text, piece.completion):
                if text:
                    yield from cut_words(text)

    try:
        _in_thread(tokenizer.train_from_iterator, texts(), trainer)
    except KeyboardInterrupt:
        stopped.set()
        raise
    if reader.n_documents == 0:
        raise DataError("the input has no text to train a tokenizer on")
    return tokenizer
