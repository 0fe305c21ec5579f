"""Where the time went, counted between the borders of steps; the pictures, and files that are none
of theirs."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
from conftest import BUILD, ROOT, called
from penstock import plot, trace
from test_cli import job, penstock, words  # noqa: F401 (job is a fixture)


def timeline(rows):
    """Rows of (step, stream, start, end, waited)."""
    return trace.Timeline(
        np.array(
            [
                (step, stream, "gemm", "op", 0, 0, 0, start, end, waited)
                for step, stream, start, end, waited in rows
            ],
            trace.EVENT_DTYPE,
        ),
        ["compute", "h2d", "host"],
    )


# Steps of 1 s, of which compute works 0.9; what step k needs is fetched half a step ahead, and its
# update runs into the first tenths of step k + 1.
PERIODIC = [
    row
    for k in (7, 8)
    for row in (
        (k, 1, k - 0.5, k - 0.25, 0.1),
        (k, 0, k + 0.1, k + 0.6, 0.1),
        (k, 0, k + 0.6, k + 1.0, 0.0),
        (k, 2, k + 0.9, k + 1.2, 0.7),
    )
]


def test_time_counts_between_the_borders_of_steps_and_not_from_a_prefetch():
    t = timeline(PERIODIC)
    assert trace.step_boundaries(t).tolist() == pytest.approx(
        [7.1, 8.0, 9.0]
    ) and trace.counted_period(t) == pytest.approx((8.0, 9.0))
    compute, h2d, host = trace.stream_times(t)
    assert (compute.busy, compute.waiting, compute.idle) == pytest.approx(
        (0.9, 0.1, 0.0), abs=1e-9
    )  # from the prefetch on it was 0.67
    assert (host.busy, h2d.busy) == pytest.approx(
        (0.3, 0.0)
    )  # 0.2 of the step before's update, 0.1 of its own; no step came whose parameters were fetched
    assert [s.n_ops for s in (compute, h2d, host)] == [2, 0, 2]
    alone = trace.stream_times(timeline([row for row in PERIODIC if row[0] == 7]))
    assert alone[0].busy == pytest.approx(1.0)  # one step: from its first op's start


def test_the_largest_ops_are_those_of_the_counted_period():
    t = timeline([*PERIODIC, (8, 1, 8.2, 8.3, 0.0)])
    assert trace.largest_ops(t) == [
        ("compute", "op", pytest.approx(0.9)),
        ("host", "op", pytest.approx(0.3)),
        ("h2d", "op", pytest.approx(0.1)),  # not the prefetches: they ran before the period
    ]


def test_the_summary_counts_as_the_trace_does(job, tmp_path):
    done = penstock(
        "train",
        *words(job | {"--steps": 5, "--device-mem": "5MiB", "--run-dir": tmp_path, "--json": None}),
    )
    summary = json.loads(done.stdout)
    for s, here in zip(
        summary["streams"], trace.stream_times(trace.load(tmp_path / "timeline.json"))
    ):
        assert (s["name"], s["busy"], s["wait"]) == (
            here.name,
            pytest.approx(here.busy, abs=1e-4),
            pytest.approx(here.waiting, abs=1e-4),
        )
    assert 0.3 < summary["streams"][0]["busy"] + summary["streams"][0]["wait"] <= 1.001


def test_the_summarys_loss_is_a_mean_of_the_last_steps_and_says_of_how_many(job, tmp_path):
    run = words(job | {"--steps": 40, "--run-dir": tmp_path})
    summary = json.loads(penstock("train", *run, "--json").stdout)
    losses = [
        json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert summary["loss_mean_steps"] == 4 and summary["loss_mean_last"] == pytest.approx(
        np.mean(losses[-4:]), rel=1e-12
    )
    assert summary["loss_first"] == losses[0] and summary["loss_last"] == losses[-1]
    text = penstock("train", *run, "--force").stdout
    assert (
        f"{losses[0]:.4f} in the first step, {np.mean(losses[-4:]):.4f} in the last 4 (mean)"
        in text
    )


def test_a_timeline_starts_at_its_first_steps_border_and_shows_all(tmp_path, monkeypatch):
    import matplotlib.pyplot

    figures = []
    monkeypatch.setattr(matplotlib.pyplot, "close", figures.append)
    trace.plot(timeline(PERIODIC), tmp_path / "t.png")
    (axes,) = figures[0].axes
    assert axes.get_xlim() == pytest.approx((0, 2.1))
    assert [line.get_xdata()[0] for line in axes.lines] == pytest.approx([0, 0.9, 1.9])
    assert [text.get_text() for text in axes.texts] == ["step 8", "step 9"]


@pytest.fixture(scope="module")
def profiled(tiny_model, tiny_shard, tmp_path_factory):
    """What bench/profile.sh makes of steps 2 and 3."""
    out = tmp_path_factory.mktemp("profile")
    env = {**os.environ, "BUILD": str(BUILD), "OUT": str(out), "PYTHON": sys.executable}
    done = subprocess.run(
        [str(w) for w in (ROOT / "bench/profile.sh", 1, 0.005, 64, tiny_model)]
        + ["--data", str(tiny_shard), "--backend", "cpu", "--threads", "1", "--recipe", "bf16"],
        capture_output=True,
        text=True,
        env={**env, "STEPS": "2:3"},
    )
    assert done.returncode == 0, done.stderr
    return out, done


def test_the_profile_script_makes_a_timeline_and_a_picture(profiled):
    out, done = profiled
    assert "no report of Nsight Systems" in done.stderr and not list(out.glob("*.nsys-rep"))
    assert done.stdout.splitlines()[-2:] == [f"{out}/timeline.json", f"{out}/timeline.png"]
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("steps", ["a", "3:2"])
def test_the_profile_script_says_what_steps_may_be(tiny_model, tmp_path, steps):
    done = subprocess.run(
        [str(w) for w in (ROOT / "bench/profile.sh", 1, 0.005, 64, tiny_model)],
        capture_output=True,
        text=True,
        env={**os.environ, "BUILD": str(BUILD), "OUT": str(tmp_path / "out"), "STEPS": steps},
    )
    said = f"profile.sh: STEPS is '{steps}': give the first and the last step as A:B, such as 4:5\n"
    assert (done.returncode, done.stderr) == (2, said) and not (tmp_path / "out").exists()


def test_the_timeline_shows_the_profiled_steps_and_names_what_moves(profiled):
    events = [
        e
        for e in json.loads((profiled[0] / "timeline.json").read_text())["traceEvents"]
        if e["ph"] == "X"
    ]
    assert {e["args"]["step"] for e in events} == {1, 2}
    what = {(e["name"], e["args"].get("what")) for e in events}
    assert {("gemm", w) for w in ("qkv", "o", "gate_up", "down", "head")} <= what
    assert {("copy", "weights"), ("copy", "gradients"), ("copy", "the batch")} <= what
    assert ("copy", None) not in what and ("gemm", None) not in what


def test_memory_in_use_stays_within_the_arenas(profiled):
    plan = json.loads((profiled[0] / "plan.json").read_text())
    memory = trace.load(profiled[0] / "timeline.json").memory
    assert set(memory) == {"device arena", "host arena"}
    for name, (at_s, used) in memory.items():
        arena = plan[name.split()[0] + "_arena_bytes"]
        assert (np.diff(at_s) >= 0).all() and 0 <= used.min() < used.max() <= arena


def test_memory_is_drawn_beneath_the_streams(tmp_path, monkeypatch):
    import matplotlib.pyplot

    figures = []
    monkeypatch.setattr(matplotlib.pyplot, "close", figures.append)
    memory = {
        "device arena": (np.array([7.1, 7.6, 8.0]), np.array([2, 6, 2]) << 20),
        "host arena": (np.array([7.1]), np.array([3 << 30])),
    }
    made = timeline(PERIODIC)
    trace.plot(trace.Timeline(made.events, made.streams, memory), tmp_path / "t.png")
    streams, device, host = figures[0].axes
    assert [a.get_ylabel() for a in (device, host)] == ["device arena,\nMiB", "host arena,\nGiB"]
    assert device.texts[0].get_text() == "at most 6 MiB in use"
    assert device.get_xlim() == streams.get_xlim()
    (area,) = device.collections
    corners = area.get_paths()[0].vertices
    assert corners[:, 1].max() == 6 and corners[:, 0].min() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "steps, message",
    [
        ("4", "'4': give the first and the last step as A:B"),
        ("3:2", "'3:2': give the first"),
        ("0:2", "'0:2': give the first"),
        ("2:9", "2:9: the training has 3 steps: give earlier ones, or raise --steps"),
    ],
)
def test_profiled_steps_that_a_run_has_not_are_refused(job, tmp_path, steps, message):
    done = penstock("train", *words(job), "--profile-steps", steps, "--run-dir", tmp_path / "run")
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "run").exists()


def test_a_grid_says_of_what_it_is(tiny_model, tmp_path):
    described = ROOT / "tests/golden/hardware-rtx4090.json"
    done = penstock(
        "plan",
        "--model",
        f"{tiny_model}/",
        "--seq-len",
        64,
        "--hardware",
        described,
        *"--grid-device 2GiB --grid-host 2GiB 4GiB --json".split(),
    )
    grid = json.loads(done.stdout)
    assert (grid["model"], grid["machine"], grid["seq_len"]) == (
        tiny_model.name,
        "NVIDIA GeForce RTX 4090",
        64,
    )
    assert plot.subject(grid) == f"{tiny_model.name}, NVIDIA GeForce RTX 4090\n64 tokens a sequence"
    plot.plot_grid(grid, tmp_path / "grid.png", plot.subject(grid))
    assert (tmp_path / "grid.png").stat().st_size > 1000


def test_a_smoothed_curve_neither_lags_nor_loses_its_ends():
    straight = [float(i) for i in range(200)]
    assert plot.smoothed(straight) == pytest.approx(straight) and plot.window(200) == 11
    assert plot.smoothed([0.0, 9.0, 0.0, 9.0, 0.0]) == pytest.approx([3.6] * 5)
    level = plot.smoothed([1.0] * 19 + [6.0])  # the last step alone is high
    assert level[:10] == pytest.approx([1.0] * 10) and level[-1] == pytest.approx(4.0)
    assert [plot.smoothed(values) for values in ([], [2.0], [2.0, 5.0])] == [[], [2.0], [2.0, 5.0]]


STEP = {"step": 0, "loss": 1.0, "lr": 1e-3, "tokens_per_s": 5.0}


@pytest.mark.parametrize(
    "content,pattern",
    [
        (b"", "empty"),
        (b"\n", "line 1 is not JSON"),
        (b"[1, 2]\n", "not an object"),
        (b"7\n", "not an object"),
        (b"{}\n", "no number step"),
        (b"\x89PNG\r\n\x1a\n\xff", "codec|JSON"),
        (json.dumps(STEP | {"loss": "low"}).encode(), "no number loss"),
        (json.dumps({"traceEvents": []}).encode(), "no number step"),
        (json.dumps({"tokens_per_s": [[1]]}).encode(), "grid needs device_mem_bytes"),
        (
            json.dumps(
                {"tokens_per_s": [[1], [2]], "device_mem_bytes": [1], "host_mem_bytes": [1]}
            ).encode(),
            "grid needs",
        ),
        (
            json.dumps(
                {"tokens_per_s": [["fast"]], "device_mem_bytes": [1], "host_mem_bytes": [1]}
            ).encode(),
            "grid needs",
        ),
    ],
)
def test_plot_refuses_what_is_no_metrics_in_one_sentence(tmp_path, content, pattern):
    (tmp_path / "x").write_bytes(content)
    done = run("penstock.plot", tmp_path / "x", tmp_path / "x.png")
    assert (
        done.returncode == 2
        and done.stderr.count("\n") == 1
        and done.stderr.startswith("penstock.plot: ")
    ), done.stderr
    assert re.search(pattern, done.stderr) and not (tmp_path / "x.png").exists()


def run(module, *args):
    return called(import_module(module).main, *args)


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "m.jsonl").write_text(json.dumps(STEP | {"loss": None}) + "\n")
    assert (
        run("penstock.plot", tmp_path / "m.jsonl", tmp_path / "m.png").returncode == 0
    )  # a loss that was not finite is a gap
    op = {
        "ph": "X",
        "tid": 0,
        "cat": "gemm",
        "name": "op",
        "ts": 0,
        "dur": 5,
        "args": {"step": 0, "layer": 0, "round": 0, "chunk": 0, "wait_us": 0},
    }
    (tmp_path / "t.json").write_text(
        json.dumps(
            {
                "traceEvents": [
                    {"ph": "M", "name": "thread_name", "tid": 0, "args": {"name": "compute"}},
                    op,
                ]
            }
        )
    )
    (tmp_path / "none.json").write_text('{"traceEvents": []}')
    assert run("penstock.trace", tmp_path / "t.json", "--png", tmp_path / "t.png").returncode == 0
    assert (
        run("penstock.trace", tmp_path / "none.json", "--png", tmp_path / "n.png").stderr
        == "penstock.trace: the trace has no op: there is nothing to draw\n"
    )
    for module, source, options in (
        ("penstock.plot", "m.jsonl", []),
        ("penstock.trace", "t.json", ["--png"]),
    ):
        for target in ("none/x.png", "x.alien"):
            done = run(module, tmp_path / source, *options, tmp_path / target)
            assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
