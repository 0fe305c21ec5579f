"""Models by their names on the Hugging Face hub: ORG/NAME, or ORG/NAME@REVISION.

A directory of that relative path comes first, then the hub's own cache on this machine, which other
tools fill too, then a download by the package huggingface_hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from .files import TEMPLATES, TOKENIZER_FILES, DataError
from .sandbox import sentence

NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?:@([\w./+-]+))?")
# what a command needs of a model
CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
SMALL = (CONFIG, "generation_config.json", *TOKENIZER_FILES, f"{TEMPLATES}/*")
ALL = (CONFIG, TOKENIZER, WEIGHTS)
UNREACHABLE = {"LocalEntryNotFoundError", "ConnectionError", "ConnectError"}  # exceptions
OR = "or ORG/NAME of a model on the Hugging Face hub"  # in texts of --help
LARGE = (WEIGHTS, "model-*.safetensors", INDEX)


def may_name(text: str) -> bool:
    """A name of the hub, and no path that exists."""
    return NAME.fullmatch(text) is not None and not os.path.lexists(text)


def cache() -> Path:
    """The hub's cache, where huggingface_hub has it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expanduser(os.environ[variable]))
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return Path(os.path.expanduser(home)) / "hub"


def _snapshot(org: str, name: str, revision: str) -> Path | None:
    """The directory of a revision in the cache: a branch, a tag or a commit."""
    folder = cache() / f"models--{org}--{name}"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    found = folder / "snapshots" / commit
    return found if "/" not in commit and found.is_dir() else None


def _missing(folder: Path, needs: Iterable[str]) -> str | None:
    """A file that is needed and that the directory lacks: a download may have been cut off, or
    another tool has read some files alone. A link whose file is gone is no file."""
    for file in (f for f in (CONFIG, TOKENIZER) if f in needs):
        if not (folder / file).exists():
            return file
    if WEIGHTS not in needs or (folder / WEIGHTS).exists():
        return None
    try:
        files = sorted({*json.loads((folder / INDEX).read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return WEIGHTS
    return next((f for f in files if not (folder / f).exists()), None)


def _offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE") for n in names)


def _download(repository: str, revision: str, needs: Iterable[str], quiet: bool) -> Path:
    """The directory with what a model needs. DataError says why there is none."""
    if _offline():
        raise DataError("the hub is switched off by HF_HUB_OFFLINE")
    try:
        import huggingface_hub
    except ImportError as e:
        raise DataError("a download needs the package huggingface_hub") from e
    try:
        if quiet:
            from huggingface_hub.utils import disable_progress_bars

            disable_progress_bars()
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                cache_dir=str(cache()),
                allow_patterns=[*SMALL, *(LARGE if WEIGHTS in needs else ())],
            )
        )
    except Exception as e:  # of the network, of the hub, of the disk
        if {c.__name__ for c in type(e).__mro__} & UNREACHABLE:
            raise DataError("the hub cannot be reached") from e
        raise DataError(f"the download fails: {sentence(e).rstrip('.')}") from e


def find(option: str, model: str, needs: Iterable[str], quiet: bool = False) -> str:
    """The directory of `model`, which `option` gives: itself, unless it is a name of the hub. needs: of CONFIG, TOKENIZER
    and WEIGHTS. DataError: it is nowhere."""
    if not may_name(model):
        return model
    org, name, revision = NAME.fullmatch(model).groups()
    repository, revision = f"{org}/{name}", revision or "main"
    found = _snapshot(org, name, revision)
    lacks = _missing(found, needs) if found else None
    if found and not lacks:
        return str(found)
    if not found and os.path.isdir(org):
        return model  # a path that was mistyped, rather than a name
    here = f"has {model} without {lacks}" if found else f"has no {model}"
    try:
        found = _download(repository, revision, needs, quiet)
        if lacks := _missing(found, needs):
            raise DataError(f"the hub has no {lacks} of it")
    except DataError as e:
        at = f" --revision {revision}" if revision != "main" else ""
        raise DataError(
            f"{option}{option and ' '}{model}: there is no such directory, the Hugging Face hub's cache "
            f"{cache()} {here}, and {e}: where there is a network, type hf download "
            f"{repository}{at} --local-dir {name}, and give {option} {name}"
        ) from e
    return str(found)
