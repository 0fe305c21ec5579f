"""What a command of the program is given that it does not read itself: a model by its name on the
hub, text in place of token shards, prompts. All become paths and token ids before the program
starts.

Text is encoded with the model's own tokenizer and kept as shards in a cache (penstock.data_cache).
Where its records are conversations, or prompts with completions, they are packed in rows of
--seq-len tokens."""

from __future__ import annotations

import argparse
import glob
import hashlib
import os
import re
import sys
from pathlib import Path

from .files import COMPRESSED, SHARD_MAGIC, TEXT_SUFFIXES, DataError
from .hub import CONFIG, TOKENIZER, WEIGHTS, may_name
from .hub import find as find_model
from .terminal import progress
from .words import Words

# what each command needs of a model
NEEDS = {
    "train": (CONFIG, WEIGHTS),
    "eval": (CONFIG, WEIGHTS),
    "generate": (CONFIG, WEIGHTS),
    "plan": (CONFIG,),
    "info": (CONFIG,),
}
DATA = {"train": ("--data", "--val"), "eval": ("--data",), "plan": ("--data",)}
TEXT_ENDS = tuple(text + packed for text in TEXT_SUFFIXES for packed in ("", *COMPRESSED))
PROMPTS = {"--sample-prompt", "--sample-prompts"}
# those of add_text_options() and the cache's
OF_TEXT = frozenset(
    "--eos --field --no-bos --skip-bad --targets --chat-template-kwargs --date --pack --long "
    "--val-fraction --data-cache --problem --label-field --labels".split()
)


# ---- what is text --------------------------------------------------------------------------------


def _is_shard(path: str) -> bool:
    """A named file is a shard by its name or by its first bytes."""
    if path.endswith(".bin"):
        return True
    try:
        with open(path, "rb") as f:
            head = f.read(8)
    except OSError:
        return True  # the program says what is wrong
    return head == b"BIN.TOK\n" or int.from_bytes(head[:4], "little") in SHARD_MAGIC


def _is_text(path: str) -> bool:
    """Not token shards, and nothing that the program would refuse: a file, a folder with text and
    without shards, or a pattern with matches."""
    if os.path.isdir(path):
        has_shards = any(n.endswith(".bin") and n[0] != "." for n in os.listdir(path))
        every = (name.lower() for _, _, names in os.walk(path) for name in names)
        return not has_shards and any(name.endswith(TEXT_ENDS) for name in every)
    if os.path.lexists(path):
        return os.path.isfile(path) and not _is_shard(path)
    return any(not n.endswith(".bin") for n in glob.glob(path, recursive=True))


_WEIGHT = re.compile(r"(.+):([0-9.eE+-]+)", re.S)


def _parts(value: str) -> list[tuple[str, str]]:
    """A value of --data as paths with their weights, as native/io/mix.c reads it: "" is none."""
    found = [_WEIGHT.fullmatch(part) for part in value.split(",")]
    if os.path.lexists(value) or not all(found):
        return [(value, "")]
    return [(m[1], m[2]) for m in found]


def _paths(values: list[str]) -> list[str]:
    return [path for value in values for path, _ in _parts(value)]


def _is_gone(path: str) -> bool:
    """An entry of the cache that is no more: the run.toml of a run names entries."""
    name = os.path.basename(path)
    is_entry = re.fullmatch(r"[0-9a-f]{32}", name) and os.path.isabs(path)
    return bool(is_entry and not os.path.lexists(path))


def _any_text(values: list[str]) -> bool:
    return any(map(_is_text, _paths(values)))


def needed(command: str, words: list[str]) -> bool:
    """prepare() has something to do. Asked at each start of the program, so without packages."""
    if command not in NEEDS:
        return False
    w = Words(words)
    options = DATA.get(command, ())
    return bool(
        may_name(w.last("--model") or "")
        or any(_is_text(p) or _is_gone(p) for o in options for p in _paths(w.values(o)))
        or options
        and w.names & {"--config", *OF_TEXT}
        or command == "train"
        and w.names & PROMPTS
    )


# ---- the options of text -------------------------------------------------------------------------


def text_parser(command: str):
    from .command import Parser
    from .data import add_text_options

    p = Parser(prog=f"penstock {command}", usage=argparse.SUPPRESS, allow_abbrev=False)
    p._optionals.title = (
        "--data, --val: files of text and conversations, or folders of them, in place of token "
        "shards"
    )
    p._actions[0].help = argparse.SUPPRESS  # --help
    add_text_options(p, "best-fit for conversations and prompts with completions, else none")
    p.add_argument(
        "--data-cache",
        metavar="DIR",
        help="where their token shards are kept (default: $XDG_CACHE_HOME/penstock/data or "
        "~/.cache/penstock/data)",
    )
    return p


def help_of_text(command: str) -> str:
    """What the program's own --help does not know; "": nothing."""
    return text_parser(command).format_help() if command in DATA else ""


# ---- preparing -----------------------------------------------------------------------------------


def prepare(command: str, words: list[str]) -> list[str]:
    """The words that the program reads. DataError: something cannot be found, read or kept."""
    from . import run_file
    from .errors import InvalidError

    w, of_file = Words(words), {}
    if command in DATA and w.last("--config"):
        try:
            of_file = run_file.read(w.last("--config"))
        except InvalidError:
            return words  # the program says the same
    quiet = "--quiet" in w.names
    model = w.last("--model") or of_file.get("model")
    own = text_parser(command).parse_args(w.take(OF_TEXT)) if command in DATA else None
    options = {o: w.values(o) for o in DATA.get(command, ())}
    if command != "plan":  # which takes no data of a run's file
        options = {o: values or of_file.get(o[2:]) or [] for o, values in options.items()}
    for option, values in options.items():
        if gone := next(filter(_is_gone, _paths(values)), None):
            raise DataError(
                f"{option} {gone}: is no longer in the data cache: give {option} the files that it "
                "was made of"
            )
    texts = [o for o, values in options.items() if _any_text(values)]
    if given := [n for n in Words(words).names & OF_TEXT if not texts]:
        raise DataError(
            f"{min(given)} says how text becomes tokens, and neither --data nor --val is text: leave "
            "it out, or give it to penstock data"
        )
    if model and may_name(model):
        needs = {*NEEDS[command]} - ({WEIGHTS} if "--init-weights" in w.names else {*()})
        needs |= {TOKENIZER} if texts or w.names & PROMPTS else {*()}
        model = find_model("--model", model, needs, quiet)
        w.set("--model", model)
    seq_len = _seq_len(w.last("--seq-len") or of_file.get("seq_len"))
    if texts and model and os.path.isdir(model) and seq_len:  # else the program refuses
        for option in texts:
            paths = _Encoder(option, Path(model), seq_len, own, quiet).replace(options[option])
            w.set_list(option, paths)
    if command == "train":
        from . import prompts

        prompts.encode_options(w, of_file)
    return [*w]


def _seq_len(value) -> int | None:
    """None: there is none, or a wrong one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if number >= 1 and number == number // 1 < 2**31 else None


class _Encoder:
    """Makes shards of the text that `option` gives."""

    def __init__(self, option: str, model: Path, seq_len: int, own, quiet: bool):
        from .data_cache import Cache, default_root

        self.option, self.model, self.seq_len, self.quiet = option, model, seq_len, quiet
        self.own = own
        if option == "--val":
            self.own = argparse.Namespace(**{**vars(own), "val_fraction": 0.0})
        self.cache = Cache(Path(own.data_cache) if own.data_cache else default_root(), self.say)

    def say(self, text: str) -> None:
        if not self.quiet:
            print(f"penstock: {text}", file=sys.stderr)

    def replace(self, values: list[str]) -> list[str]:
        """The values with folders of shards in place of text. Text without weights is one data set."""
        new, together = [], []
        for value in values:
            parts = _parts(value)
            if parts[0][1]:
                new.append(",".join(self._part(path, weight) for path, weight in parts))
            elif not _is_text(value):
                new.append(value)
            else:
                if not together:
                    new.append("")
                    at = len(new) - 1
                together.append(value)
        if together:
            new[at] = self._shards(together)
        return new

    def _part(self, path: str, weight: str) -> str:
        shards = self._shards([path]) if _is_text(path) else path
        if "," in shards:
            raise DataError(f"{self.option} {shards}: data with a weight has no comma in its path")
        return f"{shards}:{weight}"

    def _shards(self, files: list[str]) -> str:
        try:
            return os.path.abspath(self._open(files))
        except DataError as e:
            raise DataError(f"{self.option}: {e}") from e

    def _open(self, files: list[str]) -> Path:
        from . import data
        from .data_cache import size
        from .documents import find_sources, first_record

        not_read: list[Path] = []
        sources = find_sources(files, not_read)
        _check_names(sources)
        firsts = [first_record(s, self.own.field, self.own.skip_bad) for s in sources]
        packs = self.own.pack == "best-fit"
        if self.own.problem:
            packs = True
        elif self.own.pack is None:
            packs = any(kind != "text" for kind, _ in firsts)
        encoding = data.read_encoding("--model", self.model, self.own, firsts)
        settings = data.text_settings(self.own) | {"seq_len": self.seq_len if packs else 0}
        total = sum(s.path.stat().st_size for s in sources)
        with progress(total, self.quiet) as bar:
            read, before = bar("reading"), _states(sources)
            inputs = {
                "files": [[s.path.suffix, s.named, _sha256(s.path, read)] for s in sources],
                "tokenizer": _hashes(self.model, encoding),
                "settings": settings
                | {
                    "eos": self.own.eos,
                    "chat_template_kwargs": self.own.chat_template_kwargs,
                    "date": self.own.date and self.own.date.isoformat(),
                },
            }

            def make(folder: Path) -> dict:
                summary = data.write_shards(
                    files,
                    folder,
                    **vars(encoding),
                    **settings,
                    on_bytes=bar("writing shards"),
                    processes=len(os.sched_getaffinity(0)),
                )
                for source, old, now in zip(sources, before, _states(sources), strict=True):
                    if old != now:
                        raise DataError(f"{source.path}: was changed while it was read: try again")
                return summary

            entry, summary, made = self.cache.open(inputs, make)
        if not self.quiet:
            name = " ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
            data.say_left_out("penstock", summary | {"not_read": not_read})
            self.say(f"{self.option} {name}: {data.summary_line(summary)}")
            rows = f"packed by best fit in rows of {self.seq_len} tokens, " if packs else ""
            self.say(
                f"{rows}{'written to' if made else 'found in'} {entry} ({_bytes(size(entry))}; the "
                f"cache has {_bytes(size(self.cache.root))})"
            )
        return entry


def _check_names(sources) -> None:
    """A named file may be anything: what it is must be seen by its name."""
    from .documents import RECORD_READERS, text_suffix

    known = sorted({*TEXT_SUFFIXES, *RECORD_READERS})
    for s in sources:
        if text_suffix(s.path) not in known:
            raise DataError(
                f"{s.path}: its name does not say what it is: token shards are .bin, text and "
                f"records {', '.join(known)}; rename it, or write shards with penstock data, which "
                "reads any file of text"
            )


def _states(sources) -> list[tuple[int, int]]:
    """What tells that a file was written to."""
    states = (os.stat(s.path) if os.path.exists(s.path) else None for s in sources)
    return [(s.st_size, s.st_mtime_ns) if s else (0, 0) for s in states]


def _sha256(path: Path, on_bytes=lambda n: None) -> str:
    from .data_cache import sha256

    try:
        return sha256(path, on_bytes)
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}") from e


def _hashes(model: Path, encoding) -> dict[str, str]:
    """Those of the tokenizer's files."""
    files = {n: hashlib.sha256(b).hexdigest() for n, b in encoding.extra_files.items()}
    return {"tokenizer.json": _sha256(model / "tokenizer.json"), **files}


def _bytes(n: int) -> str:
    if n < 1024:
        return f"{n} B"
    power = min(4, (n.bit_length() - 1) // 10)
    return f"{n / 1024**power:.1f} {' KMGT'[power]}iB"
