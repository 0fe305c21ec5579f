"""The cases of a sweep, from a TOML file or from words on the command line.

A file is checked as a whole before anything runs: SweepError says in one sentence what is wrong,
where, and what to write."""

import hashlib
import itertools
import json
import math
import re
import subprocess
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from machine import is_file

ROOT = Path(__file__).resolve().parent.parent.parent
MODES = ("predicted", "measured")
RECIPES = ("bf16", "fp32-master", "fp32", "fp8", "fp8-master")
STEPS, WARM_UP = 5, 2
THIS = "this"  # in place of a hardware file: the machine that the sweep runs on
# options that the sweep sets itself, with the key that says the same; None: there is none
TAKEN = {
    "model": "model",
    "seq-len": "seq-len",
    "device-mem": "device-gib",
    "host-mem": "host-gib",
    "tokens-per-step": "tokens-per-step",
    "recipe": "recipe",
    "hardware": "hardware",
    "gpus": "gpus",
    "steps": "steps",
    "data": None,
    "run-dir": None,
    "out": None,
    "init-weights": None,
    "json": None,
    "quiet": None,
    "config": None,
    "resume": None,
    "pairs": None,
    "grid-device": None,
    "grid-host": None,
    "smallest": None,
    "help": None,
    "help-all": None,
}


class SweepError(Exception):
    """A sentence for the user."""


@dataclass(frozen=True)
class Case:
    mode: str
    model: str  # what the file says, such as 8b
    config: str  # the model's config.json, as text
    seq_len: int
    device_gib: float  # caps; 0: none
    host_gib: float
    tokens_per_step: int
    recipe: str = "bf16"
    gpus: int = 1
    hardware: str = THIS  # or a file, or the name of a GPU that `penstock plan` knows
    options: tuple = ()  # further options of `penstock train` or `plan`: (name, value)
    steps: int = STEPS  # measured: steps of a run
    warm_up: int = WARM_UP  # measured: the first steps that do not count
    data: str = ""  # measured: what data_of() says of --data; "": seeded tokens

    def parameters(self) -> dict:
        """What tells the case from another one, as a row of the results has it."""
        shown = asdict(self)
        for name in ("steps", "warm_up") if self.mode == "predicted" else ():
            del shown[name]
        if not self.data:
            del shown["data"]
        shown["config_sha256"] = digest(shown.pop("config"))
        shown["hardware"] = self.hardware if self.hardware == THIS else Path(self.hardware).name
        shown["options"] = ",".join(f"{n}={v}" if v else n for n, v in self.options)
        return shown

    def key(self, machine: str, commit: str) -> str:
        """The identity of the case's result: its parameters, what was planned for, the commit."""
        known = self.parameters()
        known["machine"] = machine
        if is_file(self.hardware):
            known["machine"] = digest(read_text(self.hardware))
        return digest(json.dumps([known, commit], sort_keys=True))

    def label(self) -> str:
        more = [f"{self.gpus} GPUs"] if self.gpus > 1 else []
        more += [] if self.recipe == "bf16" else [self.recipe]
        more += [f"{n}={v}" if v else n for n, v in self.options]
        caps = "/".join(f"{gib:g}" if gib else "none" for gib in (self.device_gib, self.host_gib))
        return " ".join(
            [self.model, str(self.seq_len), caps, f"{self.tokens_per_step} tokens", *more]
        )


@dataclass
class Sweep:
    mode: str
    cases: list[Case] = field(default_factory=list)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_text(path) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise SweepError(f"{path} cannot be read: {getattr(exc, 'strerror', exc)}") from exc


def known_options(binary, mode: str) -> set:
    """The names of all options of the command that a case runs."""
    command = [str(binary), "train" if mode == "measured" else "plan", "--help-all"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise SweepError(f"{binary} does not run ({exc}): build it with make") from exc
    return set(re.findall(r"--([a-z][a-z0-9-]+)", done.stdout))


def data_of(words: list[str], binary) -> str:
    """What tells the shards of --data from others: their tokens, and a digest of the words of
    --data. SweepError: they cannot be opened."""
    command = [str(binary), "info", "--json", "--data", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SweepError(done.stderr.strip().removeprefix("penstock: "))
    return f"{json.loads(done.stdout)['data']['tokens']} tokens, {digest(json.dumps(words))}"


# ---- the model -----------------------------------------------------------------------------------


def config_of(model: str, seq_len: int, folder: Path, where: str) -> str:
    """The config.json of a model: models/MODEL.json, or a model directory, or a config file. Its
    longest sequence is raised to the case's: only the shape matters here."""
    named, given = ROOT / f"models/{model}.json", folder / model
    path = named if named.exists() else given / "config.json" if given.is_dir() else given
    if not path.is_file():
        shipped = sorted(p.stem for p in (ROOT / "models").glob("*.json"))
        raise SweepError(
            f"{where}: model {model!r} is none of {', '.join(shipped)}, and neither a model "
            f"directory nor a config file: {path} is missing"
        )
    try:
        config = json.loads(read_text(path))
    except json.JSONDecodeError as exc:
        raise SweepError(f"{where}: model {model!r}: {path} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise SweepError(f"{where}: model {model!r}: {path} is no JSON object")
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int):
        config["max_position_embeddings"] = max(seq_len, longest)
    return json.dumps(config)


def vocabulary(config: str) -> int:
    return int(json.loads(config).get("vocab_size", 0))


# ---- values --------------------------------------------------------------------------------------


def _count(least: int, most: int = 2**40):
    def check(value):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            return f"a whole number from {least} to {most} is needed"

    return check


def _gib(value):
    if isinstance(value, str):
        return "a number of GiB is needed, without quotes and unit, such as 24"
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (math.isfinite(value) and 0 <= value <= 2**20)
    ):
        return "a number of GiB is needed, such as 24; 0 is no cap"


def _recipe(value):
    return None if value in RECIPES else f"give one of {', '.join(RECIPES)}"


def _text(value):
    return None if isinstance(value, str) and value else "text is needed, in quotes"


def _options(value):
    if not isinstance(value, dict):
        return "a table is needed, such as { frozen-layers = 2 }"


CHECKS = {
    "model": _text,
    "seq-len": _count(1, 2**30),
    "device-gib": _gib,
    "host-gib": _gib,
    "tokens-per-step": _count(1),
    "recipe": _recipe,
    "gpus": _count(1, 8),
    "hardware": _text,
    "steps": _count(1, 10**6),
    "warm-up": _count(0, 10**6),
    "options": _options,
}
NEEDED = ("model", "seq-len", "device-gib", "host-gib")
EXCLUDED_BY = (*NEEDED, "tokens-per-step", "recipe", "gpus")
TOP = ("mode", "hardware", "tokens-per-step", "recipe", "gpus", "steps", "warm-up", "options")
MEASURED_ONLY = ("steps", "warm-up")


class _File:
    """The checks of one file. options: the names that the cases' command knows."""

    def __init__(self, path: Path, options):
        self.path, self.folder, self.options_of = path, path.resolve().parent, options

    def fail(self, where: str, text: str):
        raise SweepError(f"{self.path}: {where}{': ' if where else ''}{text}")

    def names(self, where: str, table: dict, allowed):
        for key in table:
            if key not in allowed:
                self.fail(where, f"{key} is no key here: {', '.join(allowed)} are")

    def value(self, where: str, key: str, value):
        wrong = CHECKS[key](value)
        if wrong:
            self.fail(where, f"{key} = {json.dumps(value, default=str)}: {wrong}")
        return value

    def values(self, where: str, key: str, value) -> list:
        """A list as it is, a single value as a list of it."""
        listed = value if isinstance(value, list) else [value]
        if not listed:
            self.fail(where, f"{key} is an empty list: give a value, or leave the key out")
        return [self.value(where, key, v) for v in listed]

    def options(self, where: str, table: dict) -> tuple:
        out = []
        for name, value in table.items():
            if name in TAKEN:
                instead = f"give {TAKEN[name]} instead" if TAKEN[name] else "the sweep sets it"
                self.fail(where, f"options: {name} cannot be given: {instead}")
            if name not in self.options_of:
                self.fail(where, f"options: --{name} is no option of the command that runs")
            if isinstance(value, (list, dict)) or value is False:
                self.fail(where, f"options: {name}: give text, a number or true")
            out.append((name, "" if value is True else str(value)))
        return tuple(sorted(out))

    def hardware(self, where: str, mode: str, value: str) -> str:
        if value == THIS:
            return THIS
        path = self.folder / value
        if mode == "measured":
            self.fail(
                where,
                f'hardware = "{value}": only this machine can be measured: leave the key out, or '
                'set mode = "predicted"',
            )
        if not is_file(value):
            return value  # a GPU's name, which the planner checks
        try:
            if not isinstance(json.loads(read_text(path)), dict):
                raise SweepError(f"{path} is no hardware file")
        except (SweepError, ValueError) as exc:
            self.fail(where, f'hardware = "{value}": {exc}: penstock profile writes such files')
        return str(path.resolve())

    def case(self, where: str, mode: str, chosen: dict) -> Case:
        seq_len = chosen["seq-len"]
        tokens = chosen.get("tokens-per-step", 8 * seq_len)
        steps, warm_up = chosen.get("steps", STEPS), chosen.get("warm-up", WARM_UP)
        if tokens < seq_len:
            self.fail(
                where,
                f"tokens-per-step = {tokens} is less than one sequence of seq-len = {seq_len}: "
                "raise it, or exclude the pair in a grid of its own",
            )
        if warm_up >= steps:
            self.fail(
                where,
                f"warm-up = {warm_up} leaves none of steps = {steps} to measure: raise steps",
            )
        return Case(
            mode,
            chosen["model"],
            config_of(chosen["model"], seq_len, self.folder, f"{self.path}: {where}"),
            seq_len,
            float(chosen["device-gib"]),
            float(chosen["host-gib"]),
            tokens,
            chosen.get("recipe", "bf16"),
            chosen.get("gpus", 1),
            self.hardware(where, mode, chosen.get("hardware", THIS)),
            self.options(where, chosen.get("options", {})),
            steps,
            warm_up,
        )

    def grid(self, where: str, mode: str, table: dict, common: dict) -> list[Case]:
        """Every combination of the table's lists. The caps vary fastest, device memory first."""
        if not isinstance(table, dict):
            self.fail(where, "a table is needed")
        self.names(where, table, CHECKS)
        merged = {**common, **table}
        for key in NEEDED:
            if key not in merged:
                self.fail(where, f"{key} is missing")
        for key in MEASURED_ONLY if mode == "predicted" else ():
            if key in table:
                self.fail(where, f'{key} is for mode = "measured": leave it out')
        order = sorted(merged, key=lambda k: {"host-gib": 1, "device-gib": 2}.get(k, 0))
        lists = [self.values(where, key, merged[key]) for key in order]
        return [
            self.case(where, mode, dict(zip(order, chosen))) for chosen in itertools.product(*lists)
        ]

    def exclude(self, where: str, table: dict, cases: list[Case]) -> list[Case]:
        """The cases that do not match every key of the table."""
        if not isinstance(table, dict) or not table:
            self.fail(where, "a table with a key at least is needed")
        self.names(where, table, EXCLUDED_BY)
        lists = {k.replace("-", "_"): self.values(where, k, v) for k, v in table.items()}
        kept = [c for c in cases if not all(getattr(c, k) in v for k, v in lists.items())]
        if len(kept) == len(cases):
            self.fail(where, "no case matches it: correct it, or take it out")
        return kept


def _tables(file: _File, content: dict, key: str) -> list:
    tables = content.get(key, [])
    if not isinstance(tables, list):
        file.fail("", f"{key} is written [[{key}]], with two brackets")
    return [(f"[[{key}]] {i}", table) for i, table in enumerate(tables, 1)]


def read(path, binary) -> Sweep:
    """The sweep of a TOML file. bench/README.md and the files of bench/sweep show the keys."""
    try:
        import tomllib
    except ImportError:
        try:
            import tomli as tomllib
        except ImportError as exc:
            raise SweepError(f"{path}: Python 3.11 or the package tomli is needed") from exc
    path = Path(path)
    try:
        content = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as exc:
        raise SweepError(f"{path}: {exc}") from exc
    mode = content.get("mode")
    if mode not in MODES:
        given = (
            f"mode = {json.dumps(mode, default=str)}" if "mode" in content else "mode is missing"
        )
        raise SweepError(f'{path}: {given}: give "{MODES[0]}", to plan, or "{MODES[1]}", to train')
    file = _File(path, known_options(binary, mode))
    file.names("", content, (*TOP, "grid", "case", "exclude"))
    for key in MEASURED_ONLY if mode == "predicted" else ():
        if key in content:
            file.fail("", f'{key} is for mode = "measured": leave it out')
    common = {key: content[key] for key in TOP[1:] if key in content}
    for key, value in common.items():
        file.values("", key, value)
    cases = []
    for where, table in _tables(file, content, "grid"):
        cases += file.grid(where, mode, table, common)
    extra = []
    for where, table in _tables(file, content, "case"):
        for key, value in table.items() if isinstance(table, dict) else ():
            if isinstance(value, list):
                file.fail(where, f"{key} is a list: a case has one value; lists are for [[grid]]")
        extra += file.grid(where, mode, table, common)
    for where, table in _tables(file, content, "exclude"):
        cases = file.exclude(where, table, cases)
    cases = list(dict.fromkeys(cases + extra))
    if not cases:
        file.fail("", "there is no case: give a [[grid]] or a [[case]]")
    return Sweep(mode, cases)


# ---- words ---------------------------------------------------------------------------------------


def _number(given, kind):
    """A number, or the text itself where it is none, which CHECKS refuse."""
    try:
        return kind(given)
    except ValueError:
        return given


def measured(word: str, parts: list, more: dict, binary) -> Case:
    """The case of @parts, which are MODEL, SEQ_LEN, DEVICE_GIB, HOST_GIB and TOKENS_PER_STEP, with
    options @more. Numbers may be text. Errors begin with @word, which the user wrote."""
    file = _File(Path(word), known_options(binary, "measured"))
    file.folder = Path.cwd()
    model, seq_len, device_gib, host_gib, tokens_per_step = parts
    chosen = {
        "model": model,
        "seq-len": _number(seq_len, int),
        "device-gib": _number(device_gib, float),
        "host-gib": _number(host_gib, float),
        "tokens-per-step": _number(tokens_per_step, int),
    }
    more = dict(more)
    chosen |= {n: _number(more.pop(n), int) for n in ("steps", "warm-up", "gpus") if n in more}
    if "recipe" in more:
        chosen["recipe"] = more.pop("recipe")
    for key, value in chosen.items():
        file.value("", key, value)
    case = file.case("", "measured", chosen)
    options = file.options("", {name: value or True for name, value in more.items()})
    return replace(case, options=options)


def parse(word: str, binary) -> Case:
    """A measured case MODEL:SEQ_LEN:DEVICE_GIB:HOST_GIB:TOKENS_PER_STEP[:MORE]. MORE are options
    such as recipe=fp32-master,steps=6,warm-up=1; DEVICE_GIB and HOST_GIB 0 mean no cap."""
    parts = word.split(":", 5)
    if len(parts) < 5:
        raise SweepError(
            f"{word}: a case is MODEL:SEQ_LEN:DEVICE_GIB:HOST_GIB:TOKENS_PER_STEP[:MORE], MORE as "
            "in recipe=fp32-master,steps=6"
        )
    more: dict = {}
    for option in parts[5].split(",") if parts[5:] else ():
        name, _, value = option.partition("=")
        if name in more:
            raise SweepError(f"{word}: {name} is given twice: give it once")
        more[name] = value
    return measured(word, parts[:5], more, binary)
