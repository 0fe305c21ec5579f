"""The rows that published training recipes have, of finished and of running runs: `penstock report
--recipe-table`. docs/watch.md defines each figure."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from statistics import fmean, stdev

from .files import DataError
from .runs import RunDirectory, gpus_read, several

WARM_UP = 2  # steps of each start of a training that the default window leaves out
TRILLION = 1e12
COUNTER, READINGS = "energy counter", "power readings"
FIRST_GPU = " of the first GPU"  # of several, whose other sensors older versions did not read
ONE_HOST = " of rank 0's host"  # of several, whose tokens all count
# the steps' means and standard deviations: name of the columns, field of metrics.jsonl, factor
_SPREAD = (
    ("step_s", "step_s", 1),
    ("tokens_per_s", "tokens_per_s", 1),
    ("tflops_per_gpu", "tflops", 1),
    ("mfu_percent", "mfu", 100),
    ("hfu_percent", "hfu", 100),
    ("gpu_clock_mhz", "gpu_clock_mhz", 1),
    ("gpu_power_w", "gpu_power_w", 1),
    ("gpu_temperature_c", "gpu_temperature_c", 1),
)


def parse_window(text: str) -> tuple[int, int]:
    """A:B, steps counted from 1, both included. DataError."""
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    first, last = (int(part) for part in found.groups()) if found else (0, 0)
    if not 1 <= first <= last:
        raise DataError(
            f"--window {text}: give the first and the last step as A:B, counted from 1, with A at "
            "most B"
        )
    return first, last


def _usual(rows: list[dict]) -> list[dict]:
    """The rows without the first WARM_UP steps of each start. elapsed_s begins anew with a start.
    Where the training began in an earlier process, the first row does too."""
    kept, since, before = [], 0, -math.inf
    for row in rows:
        elapsed = row.get("elapsed_s", math.nan)
        since = 1 if elapsed < before else since + 1
        before = elapsed
        if since > WARM_UP:
            kept.append(row)
    return kept


def choose(run: RunDirectory, window: tuple[int, int] | None, last: int | None) -> list[dict]:
    """The rows that count. DataError: the run lacks steps of the window."""
    rows, where = run.metrics.rows, run.metrics.path
    if not rows:
        raise DataError(f"{where} is empty: the run has completed no step")
    end = rows[-1]["step"] + 1
    if last is not None:
        if last > len(rows):
            raise DataError(f"--last {last}: {where} has {len(rows)} steps: give fewer")
        chosen = rows[-last:]
    elif window is None:
        chosen = _usual(rows)
        if not chosen:
            raise DataError(
                f"{where} has {len(rows)} steps, and the first {WARM_UP} of each start do not "
                f"count: train longer, or give --window {rows[0]['step'] + 1}:{end}"
            )
    else:
        first, final = window
        chosen = [row for row in rows if first <= row["step"] + 1 <= final]
        if len(chosen) != final - first + 1:
            raise DataError(
                f"--window {first}:{final}: {where} has the steps {rows[0]['step'] + 1} to {end}: "
                "give a window inside them"
            )
    if not all("tokens" in row for row in chosen):
        raise DataError(f"{where} has lines without tokens: an older version wrote it")
    counts = {row.get("gpus", 1) for row in chosen}
    if len(counts) > 1:
        raise DataError(
            f"{where}: the steps of the window ran on {min(counts)} to {max(counts)} GPUs: give "
            "--window with steps of one number"
        )
    hosts = {row.get("hosts", 1) for row in chosen}
    if len(hosts) > 1:
        raise DataError(
            f"{where}: the steps of the window ran on {min(hosts)} to {max(hosts)} hosts: give "
            "--window with steps of one number"
        )
    read = {gpus_read(row) for row in chosen} - {0}
    if len(read) > 1:
        raise DataError(
            f"{where}: power and energy are of {min(read)} GPU in some steps of the window and of "
            f"{max(read)} in others (an older version read the first alone): give --window with "
            "steps of one kind"
        )
    sizes = {row["tokens"] for row in chosen}
    if len(sizes) > 1:
        raise DataError(
            f"{where}: the steps of the window have from {min(sizes):,.0f} to {max(sizes):,.0f} "
            "tokens (a batch ramp): give --window with steps of one size"
        )
    return chosen


def _known(rows: list[dict], key: str) -> list[float] | None:
    """A field of all rows. None: one has it not, or 0, which stands for unknown."""
    values = [row.get(key, 0) for row in rows]
    return values if all(math.isfinite(v) and v > 0 for v in values) else None


def energy(rows: list[dict], before: dict | None) -> tuple[float, str] | tuple[None, None]:
    """Joules of the steps of @rows, and what they are from. @before: the step before them.

    The GPU's energy counter is a sum already. Power readings are taken at the end of each step;
    between two of them power is linear in time (trapezoids). The first step of a window that has
    no step before it takes its own reading."""
    counted = _known(rows, "gpu_energy_j")
    if counted:
        return sum(counted), COUNTER
    readings = _known(rows, "gpu_power_w")
    if not readings:
        return None, None
    first = (_known([before], "gpu_power_w") if before else None) or readings
    starts = [first[0], *readings]
    for i in range(1, len(rows)):
        if rows[i]["step"] != rows[i - 1]["step"] + 1:  # a start lies between
            starts[i] = readings[i]
    return sum((a + b) / 2 * row["step_s"] for a, b, row in zip(starts, readings, rows)), READINGS


def row_of(run: RunDirectory, window: tuple[int, int] | None = None, last: int | None = None):
    """The figures of a run as a dict; None: unknown."""
    rows, plan = choose(run, window, last), run.plan
    gpus, hosts = rows[0].get("gpus", 1), rows[0].get("hosts", plan.get("n_hosts", 1))
    at = run.metrics.rows.index(rows[0])
    before = run.metrics.rows[at - 1] if at else None
    read = max(map(gpus_read, rows))
    if before and gpus_read(before) != read:
        before = None  # its power is of other GPUs
    seconds, tokens = sum(r["step_s"] for r in rows), sum(r["tokens"] for r in rows)
    if not (math.isfinite(seconds) and seconds > 0 and tokens > 0):
        raise DataError(f"{run.metrics.path}: the steps of the window have no time or no tokens")
    out = {
        "run": run.path.resolve().name,
        "device": plan.get("hardware", {}).get("device_name") or plan.get("hardware", {}).get("name"),
        "gpus": gpus,
        "hosts": hosts,
        "seq_len": plan.get("seq_len"),
        "tokens_per_step": rows[0]["tokens"],  # not the plan's: a batch ramp has smaller steps
        "recipe": plan.get("recipe"),
        "optimizer": plan.get("optimizer"),
        "device_cap_bytes": plan.get("device_mem_bytes") or None,
        "host_cap_bytes": plan.get("host_mem_bytes") or None,
        "first_step": rows[0]["step"] + 1,
        "last_step": rows[-1]["step"] + 1,
        "steps": len(rows),
        "left_out": rows[-1]["step"] - rows[0]["step"] + 1 - len(rows),
    }  # fmt: skip
    for name, key, factor in _SPREAD:
        values = _known(rows, key)
        out[f"{name}_mean"] = factor * fmean(values) if values else None
        out[f"{name}_std"] = factor * stdev(values) if values and len(values) > 1 else None
    predicted = _known(rows, "predicted_step_s")
    joules, source = energy(rows, before)
    if source:
        source += FIRST_GPU * (read < gpus) + ONE_HOST * (hosts > 1)
    return out | {
        "predicted_step_s": fmean(predicted) if predicted else None,
        "days_per_trillion_tokens": TRILLION / (tokens / seconds) / 86400,
        "joules_per_token": joules / tokens if joules else None,
        "energy_from": source,
    }


# ---- for people ----------------------------------------------------------------------------------


def _number(value: float | None, digits: int = 4) -> str:
    """With @digits significant digits, and no fewer than its whole part has."""
    if value is None:
        return "-"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(places, 8)}f}"


def _pair(row: dict, name: str) -> str:
    mean, std = row[f"{name}_mean"], row[f"{name}_std"]
    return _number(mean) + (f" ± {_number(std, 2)}" if std is not None else "")


def _gib(value: int | None) -> str:
    return "none" if value is None else f"{value / 2**30:.4g}"


def _aligned(header: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *body)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in (header, *body)
    ]


def text_of(rows: list[dict], default_window: bool) -> str:
    """Two tables and what their figures mean."""
    what = [
        (
            r["run"],
            several(r) + (r["device"] or "-"),
            *("-" if r[key] is None else f"{r[key]:,}" for key in ("seq_len", "tokens_per_step")),
            r["recipe"] or "-",
            r["optimizer"] or "-",
            f"{_gib(r['device_cap_bytes'])}/{_gib(r['host_cap_bytes'])}" if r["recipe"] else "-",
        )
        for r in rows
    ]
    figures = [
        (
            r["run"],
            f"{r['first_step']}-{r['last_step']}",
            *(_pair(r, n) for n in ("step_s", "tokens_per_s", "tflops_per_gpu", "mfu_percent")),
            _number(r["days_per_trillion_tokens"]),
            _number(r["joules_per_token"], 3),
        )
        for r in rows
    ]
    notes = [
        "Mean ± standard deviation (n - 1) over the steps. A step's time counts from the end of the"
        " step\nbefore: validations do not count. Caps are device/host, in GiB.",
    ]
    if default_window:
        notes.append(
            f"The first {WARM_UP} steps of each start are left out; --window and --last choose."
        )
    notes.append("days/T: days for 10^12 tokens at the window's tokens / seconds.")

    def named(part: str) -> str:
        return ", ".join(r["run"] for r in rows if part in (r["energy_from"] or ""))

    if named(COUNTER):
        notes.append("J/token: the GPUs' energy counters over the steps, without the host.")
    if named(READINGS):
        notes.append(
            "J/token: power readings at the steps' ends, integrated by trapezoids, without the host:"
            f"\n{named(READINGS)}."
        )
    if named(FIRST_GPU):
        notes.append(f"J/token is of the first GPU alone: {named(FIRST_GPU)}.")
    if named(ONE_HOST):
        notes.append(f"J/token is of rank 0's host alone: {named(ONE_HOST)}.")
    header = ("run", "steps", "step, s", "tokens/s", "TFLOP/s a GPU", "MFU, %", "days/T", "J/token")
    return "\n".join(
        _aligned(("run", "device", "seq", "tokens a step", "recipe", "optimizer", "caps"), what)
        + [""]
        + _aligned(header, figures)
        + [""]
        + notes
    )


def csv_of(rows: list[dict]) -> str:
    """A header and a line a run; an empty cell: unknown."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def json_of(rows: list[dict]) -> str:
    return json.dumps({"runs": rows}, indent=1) + "\n"
