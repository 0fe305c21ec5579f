"""Reads and writes run directories: metrics.jsonl as it grows, plan.json, and whether the run goes
on. docs/watch.md lists the fields of metrics.jsonl."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from .files import DataError, open_input

FINISHED, RUNNING, CRASHED, STOPPED = "finished", "running", "crashed", "stopped"
_NEEDED = ("step", "loss", "lr", "grad_norm", "step_s", "tokens_per_s")
_COUNTS = {"step", "total_steps", "samples", "tokens", "valid_tokens", "consumed_samples"} | {
    *("consumed_tokens", "n_skipped", "val_tokens", "val_valid_tokens"),
    *("device_peak_bytes", "host_peak_bytes", "host_arena_peak_bytes", "n_gpus_read"),
}
# all that a training writes into its run directory
_FILES = ("checkpoints", "metrics.jsonl", "samples.jsonl", "plan.json", "run.toml", "summary.json")
_FILES += ("saved-model.txt", "timeline.json")
_LAST_SECOND = 253402300799  # of the year 9999


def _holds(pid: int, lock: Path) -> bool:
    """Whether the process has the lock's file open. The id alone says little: a process that began
    later may have it, above all in a container that was started again. A killed process whose
    parent has not asked for its exit code is in /proc, without files."""
    try:
        wanted = os.stat(lock)
        files = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return True  # of another user
    except OSError:
        return False
    for name in files:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                return True
    return False


class Metrics:
    """The objects of a metrics.jsonl that may still grow. rows has those read so far; null, which
    stands for a value that is not finite, is NaN."""

    def __init__(self, path):
        self.path, self.rows = Path(path), []
        self._inode, self._offset = None, 0

    def poll(self) -> int | None:
        """Read what is new. Returns the index of the first row that is new or has changed; None:
        nothing has. A resumed run replaces the file. DataError: a line is no step of a run."""
        try:
            file = open_input(self.path)
        except OSError as exc:
            raise DataError(f"{self.path} cannot be read: {exc.strerror}") from exc
        with file:
            known, sb = len(self.rows), os.fstat(file.fileno())
            old = None
            if sb.st_ino != self._inode or sb.st_size < self._offset:
                old, self.rows, self._offset, self._inode = self.rows, [], 0, sb.st_ino
            file.seek(self._offset)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        for line in text[:whole].split(b"\n")[:-1]:
            self.rows.append(self._parse(line))
        self._offset += whole
        if old is None:
            return known if len(self.rows) > known else None
        same = 0
        while same < min(len(old), len(self.rows)) and _same(old[same], self.rows[same]):
            same += 1
        return same if same < max(len(old), len(self.rows)) else None

    def _parse(self, line: bytes) -> dict:
        where = f"{self.path}: line {len(self.rows) + 1}"
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise DataError(f"{where} is not JSON: {exc}") from exc
        if not isinstance(row, dict):
            raise DataError(f"{where} is JSON, but no object: this is no metrics.jsonl")
        for key in _NEEDED:
            if key not in row:
                raise DataError(f"{where} has no {key}: this is no metrics.jsonl of penstock train")
        for key, value in row.items():
            row[key] = self._value(f"{where}: {key} is", key, value)
        return row

    @staticmethod
    def _value(what: str, key: str, value):
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            raise DataError(f"{what} no number")
        if key in _COUNTS and not (isinstance(value, int) and 0 <= value < 2**63):
            raise DataError(f"{what} {value}, and a whole number from 0 to 2^63 - 1 is needed")
        if value is None:
            return math.nan
        if not abs(value) < 2**1023:
            raise DataError(f"{what} too large for a number")
        if key == "time_s" and not 0 <= value <= _LAST_SECOND:
            raise DataError(f"{what} {value}, and seconds since 1970 are needed")
        return value


# What the commands read of plan.json and summary.json, whatever object it is in
_NUMBERS = frozenset(
    "predicted_step_s predicted_tokens_per_s seq_len tokens_per_step n_sequences n_rounds "
    "chunks_per_round chunk_tokens n_hosts device_used_bytes device_mem_bytes host_used_bytes "
    "host_mem_bytes n_threads n_ops elements busy wait seconds planned_seconds h2d_bytes_per_s "
    "d2h_bytes_per_s update_bytes_per_s other_work_percent".split()
)
_TEXTS = frozenset("recipe optimizer bottleneck_stream name device_name stream for from op".split())
_OBJECTS = frozenset(("stream_busy_s", "hardware", "while_busy"))
_LISTS = frozenset(("units", "layers", "streams", "stalls", "op_times"))


def _check_kinds(where: str, value, key: str = "", of: str = "") -> None:
    """DataError: a value of a run's object, or one inside it, is of another kind than the commands
    expect, or a number that is not finite. of: the key of the object that has it."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    for needed, fits, what in (
        (key in _NUMBERS or of == "stream_busy_s", number, "a number"),
        (key in _TEXTS, isinstance(value, str), "a text"),
        (key in _OBJECTS, isinstance(value, dict), "an object"),
        (key in _LISTS, isinstance(value, list), "a list"),
    ):
        if needed and not fits:
            raise DataError(f"{where}: {key} is {str(value)[:40]!r}, and {what} is needed")
    if number and not abs(value) < 2**1023:
        raise DataError(f"{where}: {key} is not finite, or too large for a number")
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_kinds(where, inner, name, key)
    if isinstance(value, list):
        for inner in value:
            _check_kinds(where, inner)


@contextlib.contextmanager
def shown(run: RunDirectory) -> Iterator[None]:
    """What shows a run's files knows of their objects by the keys that it needs."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as exc:
        raise DataError(f"{run.path}: plan.json or summary.json lacks a part: {exc!r}") from exc


# The machine's live figures: what it is called, field of metrics.jsonl, unit, factor to the unit
LIVE = (
    ("copies to the device", "h2d_bytes_per_s", "GB/s", 1e-9),
    ("copies to the host", "d2h_bytes_per_s", "GB/s", 1e-9),
    ("updates on the host", "update_bytes_per_s", "GB/s", 1e-9),
    ("GPU clock", "gpu_clock_mhz", "MHz", 1),
    ("GPU power", "gpu_power_w", "W", 1),
    ("GPU temperature", "gpu_temperature_c", "C", 1),
)
# What the sensors' figures are of several GPUs
_OF_SEVERAL = {
    "gpu_clock_mhz": "lowest",
    "gpu_power_w": "sum",
    "gpu_temperature_c": "highest",
    "gpu_energy_j": "sum",
}


def several(row: dict) -> str:
    """The factor before a figure of one GPU, such as "2 hosts x 8 x "; "" for one GPU."""
    hosts, gpus = row.get("hosts", 1), row.get("gpus", 1)
    return (f"{hosts} hosts x " if hosts > 1 else "") + (f"{gpus} x " if gpus > 1 else "")


def gpus_read(row: dict) -> int:
    """Of how many GPUs a row's sensors' figures are; 0: it has none. Versions that read the first GPU
    alone wrote no n_gpus_read."""
    return row.get("n_gpus_read", 1) if any(key in row for key in _OF_SEVERAL) else 0


def sensors(rows: list[dict], key: str) -> tuple[list[dict], str]:
    """The rows that can be compared in a sensors' figure, and which GPUs it is of, for its label: ""
    for one. Where a resumed run began to read all GPUs, the rows before are left out."""
    have = [row for row in rows if key in row]
    if not have:
        return [], ""
    gpus, read = have[-1].get("gpus", 1), gpus_read(have[-1])
    alike = [row for row in have if (row.get("gpus", 1), gpus_read(row)) == (gpus, read)]
    of = (
        "" if gpus == 1 else f", {_OF_SEVERAL[key]} of {gpus}" if read > 1 else f", first of {gpus}"
    )
    return alike, of


def live(rows: list[dict]) -> list[tuple[str, str, str, list[float]]]:
    """The live figures that are known of all rows: what, field, unit, values."""
    out = []
    for what, key, unit, factor in LIVE:
        of, among = "", rows
        if key in _OF_SEVERAL and all(key in row for row in rows):
            among, of = sensors(rows, key)
        values = [factor * row.get(key, 0) for row in among]
        if values and all(0 < v < float("inf") for v in values):
            out.append((what + of, key, unit, values))
    return out


def _same(a: dict, b: dict) -> bool:
    return (a["step"], a.get("time_s"), a["step_s"]) == (b["step"], b.get("time_s"), b["step_s"])


class RunDirectory:
    """A run directory of `penstock train` or of a RunLog. DataError: it is none."""

    def __init__(self, path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError(f"{self.path} is no directory: give the run directory of a training")
        if not (self.path / "metrics.jsonl").exists():
            raise DataError(
                f"{self.path} has no metrics.jsonl: give the run directory of a training "
                "(--run-dir, or --out)"
            )
        self.metrics = Metrics(self.path / "metrics.jsonl")
        self._lock_path = self.path / ".penstock.lock"
        self.plan, self._tokenizer = self._plan(), None

    def _plan(self) -> dict:
        return self._object("plan.json", "predicted_step_s") or {}

    def _object(self, name: str, needed: str) -> dict | None:
        """The object in a file, which has the key `needed`. None: there is no such file."""
        path = self.path / name
        try:
            with open_input(path, "r", encoding="utf-8") as file:
                value = json.load(file)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise DataError(f"{path} cannot be read: {exc.strerror}") from exc
        except ValueError as exc:
            raise DataError(f"{path} is not JSON: {exc}") from exc
        if not isinstance(value, dict) or needed not in value:
            raise DataError(f"{path} has no {needed}: penstock train did not write it")
        _check_kinds(str(path), value)
        return value

    def refresh(self) -> int | None:
        """Read what is new, as Metrics.poll(). A run that begins anew brings another plan."""
        changed = self.metrics.poll()
        if changed == 0:
            self.plan = self._plan()
        return changed

    def summary(self) -> dict | None:
        """What the training said at its end: `penstock train --json`. None: it has not ended so."""
        return self._object("summary.json", "streams")

    def samples(self) -> list[dict]:
        """The texts that the training has sampled: objects with step, prompt and text."""
        path, out = self.path / "samples.jsonl", []
        try:
            with open_input(path) as file:
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]  # a line after it may end inside a character
            lines = whole.decode().split("\n")[:-1]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as exc:
            raise DataError(f"{path} cannot be read: {exc}") from exc
        for number, line in enumerate(lines, 1):
            try:
                out.append(self._sample(json.loads(line)))
            except (ValueError, KeyError, TypeError, OverflowError) as exc:
                raise DataError(f"{path}: line {number} is no sample: {exc!r}") from exc
        return sorted(out, key=lambda row: row["step"])

    def _sample(self, row: dict) -> dict:
        """A line with its texts. The training writes token ids: it knows no tokenizer."""
        step = int(row["step"])
        if "text" in row:
            return {"step": step, "prompt": str(row["prompt"]), "text": str(row["text"])}
        head = self._decode(row["prompt_tokens"])
        whole = self._decode(row["prompt_tokens"] + row["tokens"])
        # together, as some tokenizers put a blank between tokens
        text = whole[len(head) :] if whole.startswith(head) else self._decode(row["tokens"])
        return {"step": step, "prompt": str(row.get("prompt", head)), "text": text}

    def _decode(self, ids: list[int]) -> str:
        """Text; the ids themselves where no tokenizer is found."""
        if self._tokenizer is None:
            self._tokenizer = self._find_tokenizer()
        if not self._tokenizer:
            return "".join(f"{int(i)} " for i in ids)
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _find_tokenizer(self):
        """That of the model, of the saved one, or of a checkpoint. False: there is none."""
        from .data import load_tokenizer

        named = re.search(r'^model = "(.*)"$', self._text("run.toml"), re.M)
        folders = [Path(named[1])] if named else []
        for folder in (*folders, self.path, *sorted(self.path.glob("checkpoints/step-*"))):
            if (folder / "tokenizer.json").exists():
                try:
                    return load_tokenizer(folder)
                except (DataError, ImportError):
                    pass
        return False

    def _text(self, name: str) -> str:
        try:
            with open_input(self.path / name, "r", encoding="utf-8") as file:
                return file.read()
        except (OSError, ValueError):
            return ""

    def process(self) -> int | None:
        """The process id that the lock of the directory names; None: it is not locked."""
        try:
            with open_input(self._lock_path) as file:
                return int(file.read(32) or 0)
        except (OSError, ValueError):
            return None

    def state(self) -> str:
        """running; finished; stopped (ended by its user, or by an error that it reported); crashed:
        the process is gone and its lock has stayed."""
        pid = self.process()
        if pid and _holds(pid, self._lock_path):
            return RUNNING
        if pid is not None and self.process() == pid:  # else it has ended meanwhile
            return CRASHED
        rows = self.metrics.rows
        done = rows and rows[-1]["step"] + 1 >= self.total_steps > 0
        return FINISHED if done else STOPPED

    @property
    def total_steps(self) -> int:
        """0: unknown."""
        rows = self.metrics.rows
        return int(rows[-1].get("total_steps", 0)) if rows else 0

    def last_time(self) -> float:
        """When the last step came, in seconds since 1970."""
        rows = self.metrics.rows
        if rows and "time_s" in rows[-1]:
            return rows[-1]["time_s"]
        return os.stat(self.metrics.path).st_mtime


def other_work(plan: dict) -> str:
    """Why the rates of a run's plan are too low; "": they are not, as far as is known."""
    percent = plan.get("hardware", {}).get("other_work_percent", 0)
    return f"other work took {percent}% of the CPUs when they were measured" if percent else ""


def column(rows: list[dict], key: str) -> tuple[list[int], list[float]]:
    """The steps, counted from 1, whose rows have the field, and its values."""
    have = [row for row in rows if key in row]
    return [row["step"] + 1 for row in have], [row[key] for row in have]


def thinned(steps: list, values: list, n: int) -> tuple[list, list]:
    """At most n points: means of neighbouring steps. NaN is left out of a mean."""
    if len(steps) <= n:
        return steps, values
    xs, ys = [], []
    for i in range(n):
        part = slice(i * len(steps) // n, (i + 1) * len(steps) // n)
        finite = [v for v in values[part] if v == v]
        xs.append(sum(steps[part]) / len(steps[part]))
        ys.append(sum(finite) / len(finite) if finite else float("nan"))
    return xs, ys


class RunLog:
    """Writes the run directory of a Trainer: metrics.jsonl and plan.json, which `penstock watch`,
    `report` and `log` read.

    with Trainer(...) as trainer, RunLog("run", trainer) as log:
        for metrics in trainer.steps(100):
            log.write(metrics)

    Of a resumed trainer the lines of the steps before it stay. DataError: another process writes
    the directory, or it has the metrics of another training. With force those files move into
    its folder earlier-N."""

    def __init__(self, folder, trainer, force: bool = False):
        self.path = Path(folder)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock_path = self.path / ".penstock.lock"
        self._lock = self._locked()
        try:
            if not trainer._first_step:
                self._begin_anew(force)
            self._open(trainer)
        except BaseException:
            self._unlock()
            raise

    def _begin_anew(self, force: bool) -> None:
        """Refuse another training's metrics, or move its files aside, as native/cli/earlier.c."""
        metrics = self.path / "metrics.jsonl"
        if not metrics.exists() or not metrics.stat().st_size:
            return
        if not force:
            raise DataError(
                f"{self.path} has metrics of another training: go on from its checkpoint with "
                "Trainer.resume(), give another folder, or force=True, which moves its files into "
                "a folder earlier-N there"
            )
        numbers = (n for n in range(1, 100000) if not (self.path / f"earlier-{n}").exists())
        earlier = self.path / f"earlier-{next(numbers)}"
        earlier.mkdir()
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError):
                os.rename(self.path / name, earlier / name)

    def _open(self, trainer) -> None:
        self._plan, self._total = trainer.plan.json(), trainer.total_steps
        self._figure = trainer.plan.model.figure
        self._started, self._first_step = time.monotonic(), trainer._first_step
        path, part = self.path / "metrics.jsonl", self.path / "metrics.jsonl.part"
        if 0 < self._total <= self._first_step and path.exists():  # all is done: nothing changes
            self._samples = self._tokens = 0
            self._file = open(path, "a", encoding="utf-8")
            return
        kept = self._before(path, trainer._first_step)
        with open(part, "w", encoding="utf-8") as file:
            file.writelines(kept)
        last = json.loads(kept[-1]) if kept else {}
        self._samples = last.get("consumed_samples", 0)
        self._tokens = last.get("consumed_tokens", 0)
        os.replace(part, path)
        self._file = open(path, "a", encoding="utf-8")
        self._keep_samples(trainer._first_step)
        (self.path / "plan.json").write_text(json.dumps(self._plan) + "\n", encoding="utf-8")

    def _locked(self):
        """The lock's file, as native/cli/outputs.c locks it: its holder removes it, and who has
        locked a file whose name is gone opens the name again."""
        while True:
            file = open(self._lock_path, "a+", encoding="ascii")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self._lock_path)):
                    break
            except BlockingIOError as exc:
                file.close()
                raise DataError(f"{self.path} is in use by another run: give another one") from exc
            except FileNotFoundError:
                pass
            file.close()
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        return file

    @staticmethod
    def _before(path: Path, first_step: int) -> list[str]:
        if not first_step or not path.exists():
            return []
        metrics = Metrics(path)
        metrics.poll()
        n = sum(row["step"] < first_step for row in metrics.rows)
        with open(path, encoding="utf-8") as file:
            return file.readlines()[:n]

    def _keep_samples(self, first_step: int) -> None:
        """Keep the texts of the steps before this run."""
        path, part = self.path / "samples.jsonl", self.path / "samples.jsonl.part"
        if not path.exists():
            return
        # as bytes: a run that was killed may have left a part of a line, and of a character
        with open(path, "rb") as file, open(part, "wb") as kept:
            for line in file:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    if 0 < json.loads(line)["step"] <= first_step and line.endswith(b"\n"):
                        kept.write(line)
        os.replace(part, path)

    def write(self, metrics, samples=()) -> None:
        """Append the line of a step. samples: pairs of a prompt and its text, which go into
        samples.jsonl."""
        if samples:
            with open(self.path / "samples.jsonl", "a", encoding="utf-8") as file:
                for prompt, text in samples:
                    row = {"step": metrics.step + 1, "prompt": prompt, "text": text}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        row = {k: v for k, v in asdict(metrics).items() if isinstance(v, (int, float))}
        del row["skipped"]  # n_skipped says it
        # 0: unknown, or nothing to say
        row = {k: v for k, v in row.items() if v or not k.startswith(("gpu_", "fp8_"))}
        if metrics.n_gpus_read < 2:
            del row["n_gpus_read"]
        validation = getattr(metrics, "validation", None)
        if validation is not None:
            row |= {f"val_{k}": v for k, v in asdict(validation).items()}
            row["val_s"] = row.pop("val_seconds")
        for prefix in ("", "val_"):  # under the name that the command writes
            right = row.pop(prefix + "right", None)
            if self._figure and right is not None:
                row[prefix + self._figure] = right
        elapsed = time.monotonic() - self._started
        done, left = metrics.step + 1 - self._first_step, self._total - metrics.step - 1
        self._tokens += metrics.tokens
        self._samples += metrics.tokens // self._plan["seq_len"]
        # of a batch ramp's step, the part that it is of the plan's
        flops = self._plan["model_flops"] * metrics.tokens / self._plan["tokens_per_step"]
        gpus = self._plan["n_devices"]
        row |= {
            "total_steps": self._total,
            "samples": metrics.tokens // self._plan["seq_len"],
            "consumed_samples": self._samples,
            "consumed_tokens": self._tokens,
            "elapsed_s": elapsed,
            "eta_s": elapsed / done * max(0, left),  # as cli_step_note() of the program
            "gpus": gpus,
            **({"hosts": hosts} if (hosts := self._plan.get("n_hosts", 1)) > 1 else {}),
            "tflops": flops / metrics.step_s * 1e-12 / gpus if metrics.step_s else 0,
            "time_s": time.time(),
        }
        finite = {k: v if abs(v) < float("inf") else None for k, v in row.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            self._unlock()

    def _unlock(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        self._lock.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
