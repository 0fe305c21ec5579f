"""Opening input files, the error of what is in them, and which files are a tokenizer's."""

from __future__ import annotations

import errno
import os
import stat

TOKENIZER_FILES = (  # those of native/io/model_files.c
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
)


class DataError(Exception):
    """The input is wrong. The text is one sentence for the user."""


def rust_failure(error: BaseException) -> str | None:
    """The sentence of an error of the package tokenizers, which raises Exception itself, and a
    PanicException that is no Exception; None: the error is another."""
    if type(error) is not Exception and type(error).__name__ != "PanicException":
        return None
    return " ".join(str(error).split())[:200]


def open_input(path: str | os.PathLike, mode: str = "rb", **options):
    """open() for reading that never waits, as ps__open_input() of the library. A file that is not
    regular, such as a named pipe, is an OSError that says so.

    models/init_model.py has the same function a second time, because it runs without this
    package."""

    def opener(name, flags):
        fd = os.open(name, flags | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", name)

    return open(path, mode, opener=opener, **options)
