"""Token shards of text that `penstock train --data` was given, kept in a cache by their content.

An entry is a folder as `penstock data` writes one, and cache.json: what it was made of, and the
SHA-256 of its files. Its name is a hash of the text, of the tokenizer with its chat template, and of
the options: the same text gives the same entry wherever it lies, and a resumed run finds the data
that it was trained on.

- An entry is written beside its place and renamed, so that there is no half of one. It is checked
  whole each time it is opened, and made again if it is damaged.
- A process that makes an entry locks it, and others wait. Where a file system has no locks, each
  makes its own, and the first rename counts.
- An entry that is there needs no write: the cache may be read-only then.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .files import DataError, open_input
from .shards import READ_BYTES

LAYOUT = 3  # of entries; another number where the same input gives other shards
RECORD = "cache.json"  # written last
OnBytes = Callable[[int], None]


def default_root() -> Path:
    """$XDG_CACHE_HOME/penstock/data or ~/.cache/penstock/data, as native/core/cache.c has it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "penstock" / "data"


def sha256(path: Path, on_bytes: OnBytes = lambda n: None) -> str:
    digest = hashlib.sha256()
    with open_input(path) as f:
        while piece := f.read(READ_BYTES):
            digest.update(piece)
            on_bytes(len(piece))
    return digest.hexdigest()


def size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it is removed meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


@dataclass
class Cache:
    root: Path
    say: Callable[[str], None] = lambda text: None  # takes a note

    def open(self, inputs: dict, make: Callable[[Path], dict]) -> tuple[Path, dict, bool]:
        """The entry that was made of `inputs`, which JSON can hold; what make() returned for it;
        whether it was made now. make(folder) writes shards into a folder. DataError: the entry can
        be neither read nor made."""
        inputs = {"layout": LAYOUT, **inputs}
        text = json.dumps(inputs, sort_keys=True, ensure_ascii=False)
        entry = self.root / hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        found = self._read(entry, inputs)
        if found is not None:
            return entry, found, False
        try:
            with self._lock(entry):
                found = self._read(entry, inputs)
                if found is not None:  # another process has made it
                    return entry, found, False
                return entry, self._make(entry, inputs, make), True
        except OSError as e:
            why = e.strerror or getattr(e.__cause__, "strerror", None) or str(e)
            state = ", and its entry is damaged" if entry.exists() else ""
            raise DataError(
                f"the data cache {self.root} cannot be written: {why}{state}: give --data-cache DIR "
                "with room, or set XDG_CACHE_HOME"
            ) from e

    def _read(self, entry: Path, inputs: dict) -> dict | None:
        """The summary of a whole entry; None: there is none."""
        try:
            record = json.loads((entry / RECORD).read_bytes())
            whole = record["inputs"] == inputs and all(
                (entry / name).stat().st_size == n and sha256(entry / name) == sha
                for name, (n, sha) in record["files"].items()
            )
            if whole:
                return record["summary"]
        except FileNotFoundError:
            if not entry.exists():
                return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        self.say(f"{entry} is damaged and will be made again")
        return None

    @contextlib.contextmanager
    def _lock(self, entry: Path) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
        byte = 1, int(entry.name[:15], 16)  # of the file, the entry's own
        with open(self.root / ".lock", "ab") as f:
            try:
                fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, *byte)
            except (BlockingIOError, PermissionError):
                self.say("another process writes the same data into the cache: waiting for it")
                fcntl.lockf(f, fcntl.LOCK_EX, *byte)
            except OSError:  # this file system has no locks
                yield
                return
            for left in self.root.glob(f".{entry.name}-*"):  # of killed processes
                shutil.rmtree(left, ignore_errors=True)
            yield

    def _make(self, entry: Path, inputs: dict, make: Callable[[Path], dict]) -> dict:
        work = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=self.root))
        try:
            new, old = work / "new", work / "old"
            summary = make(new)
            files = {
                str(p.relative_to(new)): [p.stat().st_size, sha256(p)]
                for p in sorted(new.rglob("*"))
                if p.is_file()
            }
            record = {"inputs": inputs, "files": files, "summary": summary}
            (new / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            with contextlib.suppress(FileNotFoundError):
                os.rename(entry, old)  # a damaged one
            try:
                os.rename(new, entry)
            except OSError:  # without locks, another process may have been faster
                if self._read(entry, inputs) is None:
                    raise
            return summary
        finally:
            shutil.rmtree(work, ignore_errors=True)
