"""bench/gaps.py: the gaps of a timeline by what is copied beside them, what marks cost, and the
experiment on the CPU, small."""

import importlib.util
import json
import subprocess
import sys

import pytest
from conftest import BUILD, HANGS_S, ROOT, words_of_training

spec = importlib.util.spec_from_file_location("gaps", ROOT / "bench/gaps.py")
gaps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gaps)

NAMES = [
    {"ph": "M", "name": "thread_name", "tid": i, "args": {"name": name}}
    for i, name in enumerate(("compute", "h2d", "d2h", "host", "io"))
]


def event(tid, start, end, step=0):
    return {"ph": "X", "tid": tid, "ts": start, "dur": end - start, "args": {"step": step}}


def test_gaps_are_told_apart_by_what_is_copied_beside_them():
    compute = [(0, 10), (12, 20), (25, 30), (37, 40), (41, 50), (90, 100), (100, 110)]
    copies = [event(1, 20, 26), event(1, 35, 38), event(2, 30.5, 36), event(2, 40, 40.5)]
    timeline = {"traceEvents": NAMES + copies + [event(0, *op) for op in compute]}
    found, whole_us = gaps.gaps_of(timeline)
    # 12 - 10; 25 - 20; 37 - 30; 41 - 40; 90 - 50 is too long; 100 - 100
    assert found == {"none": [2, 0], "h2d": [5], "d2h": [1], "both": [7]}
    assert whole_us == 110
    assert gaps.gaps_of(timeline, 6)[0]["both"] == []
    lines = list(gaps.table(found, whole_us))
    assert len(lines) == 5 and lines[1].split()[:3] == ["none", "2", "1.00"]
    assert lines[-1].split()[-1] == f"{100 * 7 / 110:.2f}%"


def test_a_copy_that_ends_as_a_gap_begins_is_not_beside_it():
    copies = [(0.0, 10.0), (20.0, 30.0)]
    assert not gaps.overlaps(copies, 10, 12) and gaps.overlaps(copies, 9, 12)
    assert gaps.overlaps(copies, 12, 20) and not gaps.overlaps(copies, 31, 40)
    assert gaps.overlaps(copies, 22, 23) and not gaps.overlaps([], 0, 1)


def test_marks_cost_what_marked_steps_take_longer():
    metrics = [{"step": s, "step_s": 2.0 if s + 1 in gaps.MARKED else 1.5} for s in range(14)]
    metrics[7]["step_s"] = metrics[10]["step_s"] = 9.0  # steps 8 and 11 come after a standstill
    ops = [event(0, 0, 1, step) for step in (7, 8, 9) for _ in range(1000)]
    cost = gaps.marks_cost(metrics, {"traceEvents": NAMES + ops})
    assert cost == {
        "unmarked_step_s": 1.5,
        "marked_step_s": 2.0,
        "compute_ops": 1000,
        "us_an_op": pytest.approx(500),
    }


def test_profiled_steps_alone_are_traced_and_their_gaps_printed(tiny_model, tiny_shard, tmp_path):
    done = subprocess.run(
        [BUILD / "bin/penstock"]
        + words_of_training(tiny_model, tiny_shard, "--backend", "cpu", "--threads", 1)
        + ["--steps", "5", "--profile-steps", "2:3", "--run-dir", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    timeline = tmp_path / "timeline.json"
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {1, 2}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    done = subprocess.run(
        [sys.executable, ROOT / "bench/gaps.py", timeline], capture_output=True, text=True
    )
    assert done.returncode == 0 and "beside" in done.stdout, done.stderr


def test_the_experiment_runs(tiny_model, tiny_shard):
    options = words_of_training(tiny_model, tiny_shard, "--backend", "cpu", "--threads", 1)[1:]
    command = [sys.executable, ROOT / "bench/gaps.py", "--experiment", "--build", BUILD]
    done = subprocess.run(
        [str(w) for w in (*command, *(o for o in options if o != "--quiet"))],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    ways = [line.split()[:2] for line in done.stdout.splitlines()[1:13]]
    assert ways == [
        [launch, beside]
        for beside in ("none", "h2d", "d2h", "both")
        for launch in ("marks", "ops", "launches")
    ]
    assert "step without marks" in done.stdout


def test_what_is_no_timeline_is_refused(tmp_path):
    (tmp_path / "t.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    for words, message in (
        ([], "give a timeline.json, or --experiment"),
        ([tmp_path / "t.json"], "this is no timeline.json of penstock"),
        ([tmp_path / "missing.json"], "No such file"),
        (["--experiment", "--build"], "--build: which?"),
    ):
        done = subprocess.run(
            [str(w) for w in (sys.executable, ROOT / "bench/gaps.py", *words)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and message in done.stderr
    done = subprocess.run([BUILD / "bench/gaps", "tpu"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage: gaps [cuda | cpu]" in done.stderr
