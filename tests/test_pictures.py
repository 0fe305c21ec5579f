"""Where the time went, counted between the borders of steps; the pictures, and files that are none
of theirs."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import BUILD, ROOT
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
    text = penstock("train", *run).stdout
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


def test_a_grid_says_of_what_it_is(tiny_model, tmp_path):
    described = ROOT / "docs/hardware-rtx4090.json"
    done = penstock(
        "plan",
        "--model",
        f"{tiny_model}/",
        "--seq-len",
        64,
        "--hardware",
        described,
        "--grid-device",
        "2GiB",
        "--grid-host",
        "2GiB",
        "4GiB",
        "--json",
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
    assert plot.smoothed([0.0, 9.0, 0.0, 9.0, 0.0]) == pytest.approx([0, 3, 3.6, 3, 0])


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
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "PENSTOCK_BUILD": str(BUILD)},
    )


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
