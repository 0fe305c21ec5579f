"""Opening input files, the error of what is in them, and which files are a tokenizer's."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path

TOKENIZER_FILES = (  # those of native/io/model_files.c
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
SHARD_MAGIC = (20261121, 20240520, 20240801, 20240522)  # or BIN.TOK: include/penstock/data.h
# of the files that are read from a folder
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lzma", ".lz4", ".br", ".zip", ".7z")
TEMPLATES = "additional_chat_templates"  # PS__TEMPLATES
RECORD = "penstock.json"  # PS__RECORD


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


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer that a directory has, its folder of chat templates too."""
    names = [n for n in TOKENIZER_FILES if (source / n).exists()]
    for path in sorted((source / TEMPLATES).glob("*")):
        if path.is_file() and not path.name.startswith("."):
            (target / TEMPLATES).mkdir(exist_ok=True)
            names.append(f"{TEMPLATES}/{path.name}")
    for name in names:
        shutil.copyfile(source / name, target / name)


def write_record(folder: Path, version: str) -> None:
    """Write which small files of a model were written, as ps__stage_write_record() does."""
    if not any((folder / name).exists() for name in (*TOKENIZER_FILES, TEMPLATES)):
        return  # no record is needed
    files = [
        {"name": str(path.relative_to(folder)), "bytes": len(data), "sha256": sha.hexdigest()}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".safetensors" not in path.name
        for data in (path.read_bytes(),)
        for sha in (hashlib.sha256(data),)
    ]
    record = {"format": "penstock model", "penstock": version, "files": files}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
