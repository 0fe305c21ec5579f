"""The results of a sweep: rows.jsonl, to which one line a case is appended, and the CSV and JSON
made from it. Also reads the rows of bench/rows.py, which the sweep replaced."""

import csv
import errno
import fcntl
import io
import json
import os
from pathlib import Path

from cases import SweepError

# The columns of the CSV. GiB are 2^30 bytes; predicted figures are the planner's, the others are
# measured: medians over the steps that count.
COLUMNS = (
    "mode model config_sha256 seq_len device_gib host_gib tokens_per_step recipe gpus hardware "
    "options steps warm_up data status reason "
    "tokens_per_s step_s tflops mfu hfu steps_timed "
    "predicted_tokens_per_s predicted_step_s predicted_tflops predicted_mfu predicted_hfu "
    "measured_over_predicted recompute_share val_s val_tokens_per_s val_share "
    "device_peak_gib planned_device_gib host_peak_gib planned_host_gib "
    "gpu_clock_mhz gpu_power_w gpu_temperature_c "
    "wall_s machine versions commit date message"
).split()
PARAMETERS = COLUMNS[: COLUMNS.index("status")]  # those of Case.parameters()
OK, INFEASIBLE, FAILED = "ok", "infeasible", "failed"


def make_folder(path: Path) -> None:
    """Make the folder of --out. SweepError: it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as exc:
        raise SweepError(f"--out {path} is a file: give a folder") from exc
    except OSError as exc:
        raise SweepError(f"--out {path} cannot be made ({exc.strerror}): give another") from exc


class Rows:
    """rows.jsonl, open for appending by one sweep at a time."""

    def __init__(self, path):
        self.path = Path(path)
        make_folder(self.path.parent)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._fd)
            raise SweepError(f"{path}: another sweep writes it: give another --out") from exc
        self._cut_torn_line()
        self.rows = read(self.path)

    def _cut_torn_line(self) -> None:
        """A killed sweep or a full disk may leave the start of a line."""
        text = self.path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.ftruncate(self._fd, whole)

    def append(self, row: dict) -> None:
        line = (json.dumps(row) + "\n").encode()
        if os.write(self._fd, line) != len(line):
            raise OSError(errno.ENOSPC, "the disk is full", str(self.path))
        os.fsync(self._fd)
        self.rows.append(row)

    def close(self) -> None:
        os.close(self._fd)


def read(path) -> list[dict]:
    """The rows of a file of results; a torn last line does not count."""
    try:
        text = Path(path).read_bytes()
    except OSError as exc:
        raise SweepError(f"{path} cannot be read: {exc.strerror}") from exc
    rows = []
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError as exc:
            raise SweepError(f"{path}: line {number} is not JSON: {exc}") from exc
        if not isinstance(row, dict) or not isinstance(row.get("case"), str):
            raise SweepError(f"{path}: line {number} is no row of a sweep: it has no case")
        rows.append(row if "mode" in row else upgraded(row, f"{path}: line {number}"))
    return rows


def upgraded(row: dict, where: str) -> dict:
    """A row of bench/rows.py: its case is MODEL:SEQ_LEN:DEVICE_GIB:HOST_GIB:TOKENS[:MORE]."""
    try:
        model, seq_len, device, host, tokens, *more = row["case"].split(":", 5)
        options = dict((o + "=").split("=", 1) for o in more[0].split(",")) if more else {}
        options = {name: value.rstrip("=") for name, value in options.items()}
        parameters = {
            "mode": "measured",
            "model": model,
            "seq_len": int(seq_len),
            "device_gib": float(device),
            "host_gib": float(host),
            "tokens_per_step": int(tokens),
            "recipe": options.pop("recipe", "bf16"),
            "gpus": 1,
            "hardware": "this",
            "steps": int(options.pop("steps", 5)),
            "warm_up": int(options.pop("warm-up", 2)),
            "options": ",".join(f"{n}={v}" if v else n for n, v in options.items()),
        }
    except ValueError as exc:
        raise SweepError(f"{where}: {row['case']!r} is no case of bench/rows.py") from exc
    failed = "failed" in row or row.get("exit", 0) != 0
    out = {**row, **parameters, "status": FAILED if failed else OK}
    if row.get("step_s") and row.get("predicted_step_s"):
        ratio = row["step_s"] / row["predicted_step_s"]
        out["predicted_tokens_per_s"] = row["tokens_per_s"] * ratio
        for name in ("mfu", "hfu"):
            out["predicted_" + name] = row[name] * ratio
        out["recompute_share"] = 1 - row["mfu"] / row["hfu"] if row["hfu"] else None
    return out


def parameters_of(row: dict) -> str:
    """What tells the row's case from another one, whatever the machine and the commit."""
    return json.dumps([row.get(name) for name in PARAMETERS])


def newest(rows: list[dict]) -> list[dict]:
    """The last row of each case, machine and commit: a later one repeats it."""

    def key(row):
        return row.get("key", (parameters_of(row), row.get("machine"), row.get("commit")))

    last = {key(row): row for row in rows}
    return list(last.values())


def csv_text(rows: list[dict]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow(
            [
                json.dumps(v) if isinstance(v, (dict, list)) else "" if v is None else v
                for v in (row.get(name) for name in COLUMNS)
            ]
        )
    return out.getvalue()


def write_tables(rows: list[dict], folder: Path) -> list[Path]:
    """sweep.csv and sweep.json in the folder, each replaced as a whole."""
    texts = {"sweep.csv": csv_text(rows), "sweep.json": json.dumps(rows, indent=1) + "\n"}
    for name, text in texts.items():
        new = folder / f".{name}.new"
        new.write_text(text)
        new.replace(folder / name)
    return [folder / name for name in texts]
