"""Measured cases: one `penstock train` a case, from seeded weights, with clipping and the optimizer
in every step."""

import array
import json
import random
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from cases import Case, SweepError, vocabulary
from machine import ROOT, die_with_parent, gpu_columns
from predict import figures as planned
from predict import plan_of, short_reason
from results import FAILED, INFEASIBLE, OK

# unless the case's options say otherwise
DEFAULTS = {"clip-norm": "1", "lr": "1e-5", "warmup-steps": "100"}
MOST_TOKENS = 2**31 - 1  # of a shard, whose header has an int32 of them


def random_shard(path: Path, n_tokens: int, vocab: int) -> None:
    """A token shard (llm.c's llama-3 format) of seeded tokens, for the time of a step alone.
    SweepError: a shard cannot have as many."""
    if n_tokens > MOST_TOKENS:
        raise SweepError(
            f"{n_tokens} seeded tokens are needed, a shard has at most {MOST_TOKENS}: give fewer "
            "steps or tokens"
        )
    header = array.array("i", [0] * 256)
    header[:3] = array.array("i", [20240801, 7, n_tokens])
    drawn = random.Random(1)
    some = array.array("I", (drawn.randrange(vocab) for _ in range(min(n_tokens, 1 << 18))))
    with open(path, "wb") as file:
        header.tofile(file)
        for done in range(0, n_tokens, len(some)):
            some[: n_tokens - done].tofile(file)


def validation(metrics: list[dict], step_s: float) -> dict:
    """The median seconds of a validation, its tokens a second, and the part of the time that
    validations take at the run's interval. A run without validations has none of the three."""
    runs = [m for m in metrics if m.get("val_s")]
    if not runs:
        return {}
    val_s = statistics.median(m["val_s"] for m in runs)
    interval = runs[0]["step"] + 1  # steps count from 0, and the first validation ends an interval
    return {
        "val_s": val_s,
        "val_tokens_per_s": runs[0]["val_tokens"] / val_s,
        "val_share": val_s / (val_s + interval * step_s),
    }


def command_of(case: Case, binary, data: list[str], model: Path, run_dir: Path) -> list[str]:
    words = [str(binary), "train", "--no-save", "--model", str(model), "--init-weights"]
    words += ["--data", *data]
    words += ["--seq-len", str(case.seq_len), "--tokens-per-step", str(case.tokens_per_step)]
    words += ["--recipe", case.recipe, "--steps", str(case.steps)]
    words += ["--gpus", str(case.gpus)] if case.gpus > 1 else []
    words += ["--run-dir", str(run_dir), "--quiet", "--json"]
    for option, gib in (("--device-mem", case.device_gib), ("--host-mem", case.host_gib)):
        words += [option, f"{gib!r}GiB"] if gib else []
    for name, value in {**DEFAULTS, **dict(case.options)}.items():
        words += [f"--{name}", value] if value else [f"--{name}"]
    return words


def with_validation_data(case: Case, path: Path) -> Case:
    """The case itself, or, where its options ask for validations and name no data, with a shard of
    seeded tokens at @path. `penstock train` refuses a val-tokens that is no number."""
    options = dict(case.options)
    n_tokens = options.get("val-tokens", "")
    if not (n_tokens.isascii() and n_tokens.isdecimal()) or "val" in options:
        return case
    random_shard(path, int(n_tokens) + case.seq_len + 1, vocabulary(case.config))
    return replace(case, options=(*case.options, ("val", str(path))))


def _median(rows: list[dict], name: str):
    values = [r[name] for r in rows if isinstance(r.get(name), (int, float))]
    return statistics.median(values) if values else None


def figures(metrics: list[dict], plan: dict, warm_up: int) -> dict:
    timed, last = metrics[warm_up:], metrics[-1]
    step_s, planned_s = statistics.median(m["step_s"] for m in timed), plan["predicted_step_s"]

    def predicted(name):
        return last[name] * last["step_s"] / planned_s if last[name] is not None else None

    return {
        **planned(plan, predicted("mfu"), predicted("hfu")),
        "tokens_per_s": last["tokens"] / step_s,
        "step_s": step_s,
        "tflops": plan["model_flops"] / step_s * 1e-12,
        "mfu": _median(timed, "mfu"),
        "hfu": _median(timed, "hfu"),
        "measured_over_predicted": step_s / planned_s,
        "steps_timed": len(timed),
        "device_peak_gib": last["device_peak_bytes"] / 2**30,
        "host_peak_gib": last["host_peak_bytes"] / 2**30,
        **validation(metrics, step_s),
        "loss": [m["loss"] for m in metrics],
    }


def _failed(returncode: int, said: str) -> dict:
    message = said.splitlines()[-1].removeprefix("penstock: ") if said else ""
    reason = short_reason(message) if returncode == 2 else ""
    if reason:
        return {"status": INFEASIBLE, "reason": reason, "message": message}
    ended = f"exit {returncode}" if returncode >= 0 else f"signal {-returncode}"
    return {"status": FAILED, "reason": ended, "message": message or f"ended with {ended}"}


def run(case: Case, binary, data: list[str], keep: Path | None) -> dict:
    """Train the case and return its row. data: token shards; none: seeded tokens."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        run_dir = keep or work / "run"
        (work / "model").mkdir()
        run_dir.mkdir(parents=True, exist_ok=True)
        (work / "model/config.json").write_text(case.config)
        shards = data or [str(work / "random.bin")]
        try:
            if not data:
                n_tokens = case.tokens_per_step * case.steps + case.seq_len + 1
                random_shard(work / "random.bin", n_tokens, vocabulary(case.config))
            case = with_validation_data(case, work / "val.bin")
        except SweepError as exc:
            return {"status": FAILED, "reason": "refused", "message": str(exc)}
        command = command_of(case, binary, shards, work / "model", run_dir)
        (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=die_with_parent())
        shown = " ".join(command).replace(str(run_dir), "run")
        shown = shown.replace(f"{work}/", "").replace(f"{ROOT}/", "")
        row = {"wall_s": time.monotonic() - began, "command": shown}
        if done.returncode != 0:
            return {**_failed(done.returncode, done.stderr.strip()), **row}
        return {"status": OK, **_measured(case, run_dir, done.stdout), **row}


def _measured(case: Case, run_dir: Path, summary: str) -> dict:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    plan = json.loads((run_dir / "plan.json").read_text())
    waits = [
        {name: w[name] for name in ("stream", "for", "seconds", "planned_seconds")}
        for w in json.loads(summary).get("stalls", [])
        if w["stream"].startswith("compute")
    ]
    return {
        **figures(metrics, plan, case.warm_up),
        **gpu_columns(metrics[case.warm_up :]),
        "waits": waits[:4],
        "plan": plan_of(plan),
    }
