"""Predicted cases: one `penstock plan --pairs` for all cases that differ in their caps alone, so
that their searches share work. A row comes as soon as its plan is found."""

import json
import re
import subprocess
import tempfile
import time
from pathlib import Path

from cases import THIS, Case, SweepError
from machine import die_with_parent, is_file
from results import INFEASIBLE, OK

# What a row keeps of plan.json.
PLAN = (
    "n_sequences n_rounds chunks_per_round first_round_chunks first_rounds n_chunks chunk_tokens "
    "head_slice_tokens resident_param_units resident_grad_units resident_update_units "
    "streamed_update_units split_update_units units_kept n_units saved_device_bytes "
    "saved_host_bytes saved_recompute_bytes h2d_bytes d2h_bytes sum_threads embed_on_host n_ops "
    "model_flops recompute_flops bottleneck_stream stream_busy_s hardware"
).split()


def cap(gib: float) -> str:
    return f"{gib!r}GiB" if gib else "none"


def plan_of(plan: dict) -> dict:
    return {name: plan[name] for name in PLAN if name in plan}


def figures(plan: dict, mfu, hfu) -> dict:
    """The columns that a plan alone gives."""
    seconds, work = plan["predicted_step_s"], plan["model_flops"] + plan["recompute_flops"]
    return {
        "predicted_step_s": seconds,
        "predicted_tokens_per_s": plan["tokens_per_step"] / seconds,
        "predicted_tflops": plan["model_flops"] / seconds * 1e-12,
        "predicted_mfu": mfu,
        "predicted_hfu": hfu,
        "recompute_share": plan["recompute_flops"] / work,
        "planned_device_gib": plan["device_used_bytes"] / 2**30,
        "planned_host_gib": plan["host_used_bytes"] / 2**30,
    }


def short_reason(message: str) -> str:
    """Why no plan fits, for a cell: "device 12.3 GiB" is the device memory that the smallest plan
    needs under the other cap. "": the message is about something else."""
    size = r"([\d.]+ [KMGT]?i?B)"
    device = rf"{size} of device memory(?: on each of \d+ devices)?"
    both = re.search(f"nearest needs {device} and {size} of host memory", message)
    if both:
        return f"device {both[1]}, host {both[2]}"
    machine = re.search(f"{size} of host memory given, the machine has", message)
    if machine:
        return "machine's host memory"
    one = re.search(f"needs {size} of (device|host) memory", message)
    return f"{one[2]} {one[1]}" if one else ""


def groups(cases: list[Case]):
    """Runs of cases that differ in their caps alone."""
    found: dict = {}
    for case in cases:
        same = (case.model, case.config, case.seq_len, case.tokens_per_step, case.recipe)
        found.setdefault((*same, case.gpus, case.hardware, case.options), []).append(case)
    return list(found.values())


def _command(binary, cases: list[Case], model: Path) -> list[str]:
    case = cases[0]
    words = [str(binary), "plan", "--model", str(model), "--quiet"]
    words += ["--seq-len", str(case.seq_len), "--tokens-per-step", str(case.tokens_per_step)]
    words += ["--recipe", case.recipe, "--gpus", str(case.gpus)]
    if case.hardware != THIS:
        words += ["--hardware" if is_file(case.hardware) else "--gpu-model", case.hardware]
    for name, value in case.options:
        words += [f"--{name}", value] if value else [f"--{name}"]
    return [*words, "--pairs", *(f"{cap(c.device_gib)}:{cap(c.host_gib)}" for c in cases)]


def row_of(line: dict, seconds: float) -> dict:
    plan = line.get("plan")
    if plan is None:
        message = line["refused"]
        return {"status": INFEASIBLE, "reason": short_reason(message), "message": message}
    return {
        "status": OK,
        **figures(plan, line["predicted_mfu"], line["predicted_hfu"]),
        "wall_s": seconds,
        "plan": plan_of(plan),
    }


def run(cases: list[Case], binary):
    """Yields (case, row) for a group, in order. SweepError: the planner refused the group."""
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "config.json").write_text(cases[0].config)
        command = _command(binary, cases, Path(work))
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                preexec_fn=die_with_parent(),
            ) as process,
        ):
            began = time.monotonic()
            try:
                for case in cases:
                    line = process.stdout.readline()
                    if not line.endswith("\n"):
                        break
                    now = time.monotonic()
                    yield case, row_of(json.loads(line), now - began)
                    began = now
                else:
                    return
            finally:
                process.kill()
                process.wait()
            errors.seek(0)
            said = errors.read().strip().removeprefix("penstock: ")
    raise SweepError(said or f"penstock plan ended with {process.returncode}")
