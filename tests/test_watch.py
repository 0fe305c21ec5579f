"""What follows a run: penstock watch, report and log, and the RunLog that they read."""

import fcntl
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree
from importlib import import_module
from io import StringIO

import pytest
from conftest import BUILD, HANGS_S, ROOT, called
from penstock import Lora, ModelConfig, Plan, RunLog, Trainer, runs, watch
from penstock.__main__ import IN_PYTHON
from penstock.files import DataError
from rich.console import Console

STEPS, SEQ = 6, 64
HOSTILE = '"</pre><script>document.title = 1</script>&<img src=x onerror=alert(1)>'


def command(name, *args, **how):
    return called(import_module(f"penstock.{name}").main, *args, **how)


def program(name, *args, first_path=ROOT):
    return subprocess.run(
        [sys.executable, "-m", "penstock", name, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env={
            **os.environ,
            "PYTHONPATH": f"{first_path}:{ROOT / 'python'}",
            "PENSTOCK_BUILD": str(BUILD),
        },
    )


def refused(done, pattern):
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr.count("\n") == 1 and re.match("penstock[ :]", done.stderr), done.stderr
    assert re.search(pattern, done.stderr), done.stderr


@pytest.fixture(scope="module")
def trained(tiny_model, tiny_shard, tmp_path_factory):
    """The run directory of a training from Python, and its metrics."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    plan = Plan(ModelConfig.read(tiny_model), seq_len=SEQ, device_mem="5MiB")
    with (
        Trainer(tiny_model, plan, tiny_shard, lr=1e-3, total_steps=STEPS) as trainer,
        RunLog(folder, trainer) as log,
    ):
        steps = []
        for metrics in trainer.steps(STEPS):
            log.write(metrics)
            steps.append(metrics)
    return folder, steps


@pytest.fixture
def run(trained, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(trained[0], tmp_path / "run")


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def put(run, rows):
    """Replace metrics.jsonl, as a resumed run does."""
    part = run / "metrics.part"
    part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(part, run / "metrics.jsonl")


def dead_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


# ---- the run directory ---------------------------------------------------------------------------


def test_a_run_log_holds_every_step_and_what_was_consumed(trained):
    folder, steps = trained
    rows, plan = rows_of(folder), json.loads((folder / "plan.json").read_text())
    assert [(r["step"], r["loss"], r["lr"]) for r in rows] == [
        (m.step, m.loss, m.lr) for m in steps
    ]
    assert [r["consumed_tokens"] for r in rows] == [512 * (i + 1) for i in range(STEPS)]
    assert [r["consumed_samples"] for r in rows] == [8 * (i + 1) for i in range(STEPS)]
    fields = (ROOT / "docs/watch.md").read_text().split("## The fields of")[1].split("## ")[0]
    assert all(set(r) <= set(re.findall(r"`(\w+)`", fields)) for r in rows)
    for done, r in enumerate(rows, 1):  # the mean of the steps so far, as the binary has it
        assert r["eta_s"] == pytest.approx(r["elapsed_s"] / done * (STEPS - done))
    last = rows[-1]
    assert last["total_steps"] == STEPS and last["eta_s"] == 0 and last["samples"] == 8
    assert last["tflops"] == pytest.approx(plan["model_flops"] / last["step_s"] * 1e-12)
    for name in ("h2d", "d2h"):
        rate = plan[f"{name}_bytes"] / last["step_s"]
        assert last[f"{name}_bytes_per_s"] == pytest.approx(rate) and rate > 0
    assert last["update_bytes_per_s"] > 0 and not any(key.startswith("gpu_") for key in last)
    assert not (folder / ".penstock.lock").exists()


def test_a_run_log_of_a_resumed_trainer_goes_on(tiny_model, tiny_shard, tmp_path):
    plan = Plan(ModelConfig.read(tiny_model), seq_len=SEQ)
    for first in (0, 2):
        with (
            Trainer(tiny_model, plan, tiny_shard, first_step=first, total_steps=9) as trainer,
            RunLog(tmp_path / "run", trainer) as log,
        ):
            with pytest.raises(DataError, match="in use by another run"):
                RunLog(tmp_path / "run", trainer)
            for metrics in trainer.steps(3):
                log.write(metrics, [("a", "b")])
        for name in ("metrics", "samples"):
            with open(tmp_path / f"run/{name}.jsonl", "ab") as file:  # as a killed run leaves it
                file.write(b'{"step": 2, "prompt": "')
    metrics = runs.Metrics(tmp_path / "run/metrics.jsonl")
    metrics.poll()
    rows = metrics.rows
    assert [(r["step"], r["consumed_samples"]) for r in rows] == [(i, 8 * i + 8) for i in range(5)]
    assert [row["step"] for row in runs.RunDirectory(tmp_path / "run").samples()] == [1, 2, 3, 4, 5]


def test_a_run_log_moves_another_trainings_files_aside_with_force_alone(
    run, tiny_model, tiny_shard
):
    plan, before = Plan(ModelConfig.read(tiny_model), seq_len=SEQ), rows_of(run)
    with Trainer(tiny_model, plan, tiny_shard, total_steps=1) as trainer:
        with pytest.raises(DataError, match="metrics of another training: .*resume.*force=True"):
            RunLog(run, trainer)
        assert rows_of(run) == before
        with RunLog(run, trainer, force=True) as log:
            for metrics in trainer.steps(1):
                log.write(metrics)
    assert len(rows_of(run)) == 1 and rows_of(run / "earlier-1") == before
    assert (run / "earlier-1/plan.json").exists()
    kept = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    with Trainer(tiny_model, plan, tiny_shard, first_step=1, total_steps=1) as trainer:
        RunLog(run, trainer).close()  # nothing is left to train
    assert {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()} == kept


def test_a_run_log_that_cannot_begin_leaves_no_lock(tiny_model, tiny_shard, tmp_path):
    plan = Plan(ModelConfig.read(tiny_model), seq_len=SEQ)
    with Trainer(tiny_model, plan, tiny_shard, first_step=2, total_steps=9) as trainer:
        (tmp_path / "metrics.jsonl").write_text("7\n")
        with pytest.raises(DataError, match="line 1 is JSON, but no object"):
            RunLog(tmp_path, trainer)
        assert not (tmp_path / ".penstock.lock").exists()
        (tmp_path / "metrics.jsonl").unlink()
        RunLog(tmp_path, trainer).close()


def test_a_lock_whose_name_was_removed_meanwhile_is_taken_anew(run, monkeypatch):
    """The run before it ends between open() and flock(): the locked file has no name any more."""
    log, flock, calls = RunLog.__new__(RunLog), fcntl.flock, []
    log.path, log._lock_path = run, run / ".penstock.lock"

    def end_before(file, how):
        calls.append(how)
        if len(calls) == 1:
            log._lock_path.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", end_before)
    log._lock = log._locked()
    assert len(calls) == 2 and log._lock_path.read_text() == f"{os.getpid()}\n"
    log._unlock()


def test_metrics_are_read_as_they_grow_and_as_a_resumed_run_replaces_them(run):
    rows = rows_of(run)
    put(run, rows[:3])
    metrics = runs.Metrics(run / "metrics.jsonl")
    assert metrics.poll() == 0 and metrics.poll() is None and len(metrics.rows) == 3
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(rows[3])[:40])
        file.flush()
        assert metrics.poll() is None  # half a line
        file.write(json.dumps(rows[3])[40:] + "\n")
    assert metrics.poll() == 3 and metrics.rows == rows[:4]
    again = rows[:2] + [rows[2] | {"time_s": rows[2]["time_s"] + 100, "loss": None}]
    put(run, again)
    assert metrics.poll() == 2 and len(metrics.rows) == 3
    assert metrics.rows[2]["loss"] != metrics.rows[2]["loss"]  # null is NaN
    put(run, again)
    assert metrics.poll() is None


# ---- watch ---------------------------------------------------------------------------------------


def test_a_frame_shows_the_numbers_of_a_finished_run(run):
    rows = rows_of(run)
    put(
        run,
        rows[:-1] + [rows[-1] | {"val_loss": 4.3219, "n_skipped": 2, "expected_step_s": 0.1234}],
    )
    shown = command("watch", run, "--once").stdout
    for text in (
        r"state +finished: the last step ended at \d{4}-",
        rf"step +{STEPS} of {STEPS}, 100.0%",
        r"consumed +48 samples, 3,072 tokens",
        r"global batch +8 samples, 512 tokens",
        r"learning rate +1.000e-03",
        rf"loss +{rows[-1]['loss']:.4f}",
        r"validation +4.3219 at step 6, least 4.3219",
        r"skipped +2 steps that were not finite",
        r"step time +[\d.]+ s, predicted [\d.]+ s \([\d.]+x\)",
        r"0.123 s expected by the rates of this run",
        r"device .* [\d.]+ MiB of 5.0 MiB \(cap\)",
        r"host .* MiB \(plan\)",
        r"compute +\d+%",
    ):
        assert re.search(text, shown), (text, shown)
    assert any(0x2800 < ord(c) < 0x2900 for c in shown)
    assert max(map(len, shown.splitlines())) <= 140
    narrow = command("watch", run, "--once", columns=60).stdout
    assert max(map(len, narrow.splitlines())) <= 60 and "tokens/s" in narrow


GPU = {"gpu_clock_mhz": 1410, "gpu_power_w": 685.5, "gpu_temperature_c": 61, "gpu_energy_j": 7}
LINKS = {"h2d_bytes_per_s": 12.5e9, "d2h_bytes_per_s": 9.25e9, "update_bytes_per_s": 6e9}


def test_links_and_sensors_are_shown_where_they_are_known(run):
    rows = rows_of(run)
    assert "GPU" not in command("watch", run, "--once").stdout
    put(run, [row | LINKS | GPU for row in rows])
    shown = command("watch", run, "--once").stdout
    for text in (
        r"copies to the device +12.5 GB/s",
        r"copies to the host +9.25 GB/s",
        r"updates on the host +6 GB/s",
        r"GPU clock +1410 MHz",
        r"GPU power +685.5 W",
        r"GPU temperature +61 C",
    ):
        assert re.search(text, shown), (text, shown)


EVIL = "a\x1b[31m\x9bb"
LINES = f"{EVIL}\n\tc"


@pytest.mark.parametrize(
    "name, words",
    [
        ("watch", ["--once", "RUN"]),
        ("watch", ["--once", LINES]),
        ("report", ["RUN"]),
        ("report", ["--recipe-table", "RUN"]),
        ("report", [LINES]),
        ("log", ["RUN", LINES]),
        ("log", ["--tensorboard", LINES]),
        ("export", ["--model", "MODEL", "--to", "hf", "--out", EVIL]),
        ("export", ["--model", LINES, "--to", "hf", "--out", "o"]),
        ("merge", ["--model", LINES, "--adapter", LINES, "--out", LINES]),
        ("compare", [LINES, "--hf", LINES]),
        ("generate", ["--model", LINES, "--prompt", "x"]),
        ("generate", ["--model", "MODEL", "--prompt", "x", LINES]),
        ("data", ["--out", EVIL, "--train-tokenizer", "300", "--skip-bad", "bad.jsonl"]),
        ("data", ["--out", "o", "--train-tokenizer", "300", "bad.jsonl"]),
        ("data", ["--out", "o", "--train-tokenizer", "300", LINES]),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_no_name_sends_the_terminal_a_sequence(run, tiny_model, tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text(json.dumps({EVIL: 1}) + '\n{"text": "x"}')
    stream = {"name": EVIL, "busy": 1.0, "wait": 0.0}
    stall = {"stream": f"compute{EVIL}", "seconds": 1.0, "for": EVIL, "from": EVIL}
    (run / "summary.json").write_text(json.dumps({"streams": [stream], "stalls": [stall]}))
    os.rename(run, tmp_path / EVIL)
    of = {"RUN": EVIL, "MODEL": tiny_model}
    done = command(name, *(of.get(word, word) for word in words))
    text = done.stdout + done.stderr
    # Python escapes a character, the library its bytes
    assert re.search(r"\\x1b\[31m(\\xc2)?\\x9bb", text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    if LINES in words:
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


def page_of(run):
    out = run / "page.html"
    done = command("report", run, "-o", out)
    assert done.returncode == 0, done.stderr
    return out.read_text()


def test_sensors_of_several_gpus_are_named_for_what_they_are_of(run):
    rows = [row | GPU | {"gpus": 2} for row in rows_of(run)]
    read = [row | {"n_gpus_read": 2, "gpu_power_w": 1371} for row in rows]
    power = {"older": (rows, "first", "685.5"), "newer": (read, "sum", "1371"),
             # an older version's steps are no part of the median, nor of the curve
             "resumed": (rows[:-1] + read[-1:], "sum", "1371")}  # fmt: skip
    for seen, kind, watts in power.values():
        put(run, seen)
        shown = command("watch", run, "--once").stdout
        assert re.search(rf"GPU power, {kind} of 2 +{watts} W", shown), shown
        text = page_of(run)
        assert f'alt="GPU power, {kind} of 2, W"' in text
        assert f"<td>GPU power, {kind} of 2, W</td>" in text
        for what, of in (("clock, ", "lowest"), ("temperature, ", "highest")):
            name = what + ("first" if kind == "first" else of)
            assert f"GPU {name} of 2" in shown and f"GPU {name} of 2" in text
    assert 'class="n">1,371</td>' in text and ">685.5<" not in text


def test_a_run_that_crashed_says_since_when_nothing_came(run):
    pid, rows = dead_process(), rows_of(run)
    (run / ".penstock.lock").write_text(f"{pid}\n")
    put(run, rows[:3] + [rows[3] | {"time_s": time.time() - 200}])
    shown = command("watch", run, "--once").stdout
    assert re.search(
        rf"crashed: process {pid} is gone; nothing has come since .*, 3m2\ds ago", shown
    )


def test_a_killed_run_that_nobody_has_waited_for_has_crashed(run):
    """Its process stays in /proc, as it does in a container whose first process reaps none."""
    killed = subprocess.Popen(["sleep", "60"])
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    (run / ".penstock.lock").write_text(f"{killed.pid}\n")
    assert f"crashed: process {killed.pid} is gone" in command("watch", run, "--once").stdout
    killed.wait()


def test_a_process_that_has_the_id_of_a_killed_run_is_another_one(run):
    """As in a container that was started again, where ids are small and come again."""
    (run / ".penstock.lock").write_text(f"{os.getpid()}\n")
    assert f"crashed: process {os.getpid()} is gone" in command("watch", run, "--once").stdout


def test_a_run_that_ends_while_its_state_is_asked_for_has_not_crashed(run, monkeypatch):
    (run / ".penstock.lock").write_text(f"{dead_process()}\n")
    directory = runs.RunDirectory(run)
    directory.refresh()
    monkeypatch.setattr(runs, "_holds", lambda pid, lock: lock.unlink())
    assert directory.state() == runs.FINISHED


@pytest.fixture
def running(run):
    """The run directory as a running training has it."""
    with open(run / ".penstock.lock", "w") as file:
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield run


def test_a_run_that_hangs_is_seen(running):
    run = running
    rows = rows_of(run)
    put(run, rows[:3] + [rows[3] | {"time_s": time.time()}])
    assert re.search(r"state +running *│", command("watch", run, "--once").stdout)
    put(run, rows[:3] + [rows[3] | {"time_s": time.time() - 500}])
    shown = command("watch", run, "--once").stdout
    assert re.search(r"running: no step has ended since .*, 8m2\ds ago", shown)
    put(run, [])
    assert "running: no step has ended yet" in command("watch", run, "--once").stdout


def test_the_dashboard_follows_a_run_until_it_ends(running):
    run = running
    rows, lock, out = rows_of(run), run / ".penstock.lock", StringIO()
    put(run, rows[:2])
    console = Console(file=out, force_terminal=True, width=120, height=60)
    follower = threading.Thread(
        target=watch.follow, args=(runs.RunDirectory(run), console, 0.02), daemon=True
    )
    follower.start()

    def shows(text):
        end = time.monotonic() + HANGS_S
        while text not in out.getvalue() and time.monotonic() < end:
            time.sleep(0.02)
        assert text in out.getvalue()

    shows("2 of 6")
    with open(run / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows[2:5]))
    shows("5 of 6")
    put(run, rows)
    lock.unlink()
    follower.join(HANGS_S)
    assert not follower.is_alive()
    shows("finished")


def test_a_chart_draws_each_value_in_its_row():
    steps = list(range(1, 101))
    lines = watch.chart([(steps, [float(s) for s in steps], "cyan")], 60, 5).plain.splitlines()
    assert lines[0].startswith("      100 ") and lines[4].startswith("        1 ")
    drawn = [[c for c, mark in enumerate(line[10:]) if ord(mark) > 0x2800] for line in lines[:5]]
    assert drawn[0][-1] == 49 and drawn[4][0] == 0  # rises from left to right
    assert all(above[0] >= below[-1] for above, below in zip(drawn, drawn[1:]))
    nan = float("nan")
    assert watch.chart([([1], [nan], "")], 59, 5).plain == "no value yet"


# ---- report --------------------------------------------------------------------------------------


@pytest.fixture
def report(run):
    """A report whose run has validation losses, stalls and a hostile run.toml."""
    rows = rows_of(run)
    rows[2] |= {"loss": None, "n_skipped": 1}  # a skipped step
    put(
        run,
        [
            row | LINKS | GPU | {"val_loss": 5.0 - i / 10, "expected_step_s": 0.75}
            for i, row in enumerate(rows)
        ],
    )
    (run / "run.toml").write_text(f"# {HOSTILE}\n")
    stall = {"stream": "compute", "for": HOSTILE, "from": "h2d", "seconds": 0.25}
    summary = {
        "streams": [{"name": "compute", "busy": 0.75, "wait": 0.125}],
        "stalls": [stall | {"planned_seconds": 0.5}],
        "op_times": [stall | {"op": HOSTILE, "n_ops": 3, "planned_seconds": 0.125}],
        "while_busy": {"h2d_bytes_per_s": 48.5e9, "d2h_bytes_per_s": 0},
    }
    (run / "summary.json").write_text(json.dumps(summary))
    done = command("report", run)
    assert done.returncode == 0 and done.stdout == f"{run / 'report.html'}\n", done
    return run / "report.html"


SECTIONS = (
    *("summary", "curves", "predicted-and-measured", "links-and-gpu", "streams-and-stalls"),
    *("plan", "command", "machine-and-versions"),
)


def test_a_report_is_one_escaped_page_with_all_its_parts(report, run):
    text, plan = report.read_text(), json.loads((run / "plan.json").read_text())
    assert "<script" not in text and "onerror=alert" not in text.replace(html.escape(HOSTILE), "")
    assert text.count(html.escape(HOSTILE)) == 3
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert sources and all(source.startswith("data:") for source in sources)
    assert re.findall(r'<section id="([^"]*)"', text) == list(SECTIONS)
    step = f"{plan['predicted_step_s']:,.4g}"
    assert f'<td>step, seconds</td><td class="n">{step}</td><td class="n">0.75</td>' in text
    assert '<td class="n">0.5</td><td class="n">0.25</td>' in text  # the stall
    assert f"{plan['units'][-1]['elements']:,}" in text and "5.0 MiB" in text
    assert "4.5000 after step 6" in text
    numbers = "".join(f'<td class="n">{n}</td>' for n in ("12.5", "12.5", "12.5", "48.5"))
    assert f"<td>copies to the device, GB/s</td>{numbers}" in text
    assert "<td>GPU power, W</td>" in text and 'alt="GPU power, W"' in text


def test_pictures_of_a_run_are_svg_that_fetches_nothing(report, run, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    import run_pictures as pictures

    directory = runs.RunDirectory(run)
    directory.refresh()
    shown = watch.frame(directory, pictures.WATCH, time.time())
    screen = pictures.terminal(shown, pictures.WATCH, "penstock watch", "watch")
    charts = pictures.charts(report.read_text())
    for svg, words in ((screen, ["penstock", "tokens/s"]), (charts, [])):
        root = xml.etree.ElementTree.fromstring(svg)
        text = "".join(root.itertext()).replace("\xa0", " ")
        ids = re.findall(r'\bid="([^"]+)"', svg)
        used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
        assert len(ids) == len({*ids}) and used <= {*ids} and all(w in text for w in words)
        assert not re.findall(r'url\((?!#)|href="(?!#)', svg)
    inner = root.findall("{http://www.w3.org/2000/svg}svg")
    assert len(inner) == len(pictures.CHARTS)
    ends = [float(svg.get("y")) + float(svg.get("height")) for svg in inner]  # in no unit
    assert f"0 0 {inner[0].get('width')} {ends[-1]:g}" == root.get("viewBox")
    log = ["x", "machine  A", "predicted 2 s", "9 candidates, of which 2", "step 1", ""]
    log += ["step time   predicted 2 s  measured 3 s", "  run it anew", "device memory  measured 4"]
    assert pictures.printed("\n".join(log)).splitlines() == [*log[1:4], "...", log[6], log[8]]
    with pytest.raises(pictures.PictureError, match="0 of the charts"):
        pictures.charts("")


@pytest.mark.parametrize("width, height", [(80, 24), (40, 24), (100, 24), (80, 50), (200, 60)])
def test_a_live_frame_fits_the_terminal_and_has_the_figures(run, width, height):
    rows = [row | LINKS | GPU | {"tokens_per_s": 1234567.0} for row in rows_of(run)]
    put(run, rows[:-1] + [rows[-1] | {"val_loss": 4.3219}])
    text = "a line\n" * 50
    (run / "samples.jsonl").write_text(json.dumps({"step": 6, "prompt": text, "text": text}) + "\n")
    directory = runs.RunDirectory(run)
    directory.refresh()
    console = Console(width=width, height=height, file=StringIO(), highlight=False)
    console.print(watch.frame(directory, width, time.time(), height))
    shown = console.file.getvalue().splitlines()
    assert len(shown) <= height and max(map(len, shown)) <= width, "\n".join(shown)
    figures = [f"{rows[-1]['loss']:.4f}", "1,234,567", "4.3219", f"{STEPS} of {STEPS}", "step time"]
    assert all(figure in "".join(shown) for figure in figures), "\n".join(shown)
    assert sum(any(0x2800 <= ord(c) < 0x2900 for c in line) for line in shown) >= 2
    assert ("of 5.0 MiB" in "".join(shown)) == (width > 40)
    assert ("a line\u21b5a line" in "".join(shown)) == (height == 60)


def test_the_reports_charts_share_margins_and_steps_and_name_their_lines(run, monkeypatch):
    from matplotlib import pyplot

    # what this process took beside the arena depends on the tests before
    put(run, [row | {"host_peak_bytes": 7 << 20} for row in rows_of(run)])
    close, axes = pyplot.close, []
    monkeypatch.setattr(pyplot, "close", lambda figure: (axes.extend(figure.axes), close(figure)))
    assert command("report", run).returncode == 0
    assert len({(*a.get_position().intervalx, *a.get_xlim()) for a in axes}) == 1
    assert [t.get_text() for t in axes[0].get_legend().get_texts()] == [
        "each step",
        "mean of 5 steps",
    ]
    text = (run / "report.html").read_text()
    assert axes[-1].get_ylabel() == "memory, MiB" and "<td>device memory, MiB</td>" in text
    assert text.count("<table>") == text.count('<div class="wide"><table>')  # may scroll
    for words in ("sequence length, tokens", "gate and up of the MLP", "optimizer state"):
        assert re.search(rf"<t[dh]>{words}</t[dh]>", text), words


def test_rates_that_were_measured_beside_other_work_are_said_to_be_too_low(run):
    plan = json.loads((run / "plan.json").read_text())
    plan["hardware"]["other_work_percent"] = 45
    (run / "plan.json").write_text(json.dumps(plan))
    says = "other work took 45% of the CPUs"
    assert re.search(rf"rates +too low: {says}", command("watch", run, "--once").stdout)
    assert command("report", run).returncode == 0
    assert f"<td>rates</td><td>too low, as {says}" in (run / "report.html").read_text()


def test_a_report_of_a_run_that_trains_a_part_says_so(run, tiny_model):
    model = ModelConfig.read(tiny_model)
    for options in ({"lora": Lora(4)}, {"frozen_layers": 2}):
        plan = Plan(model, seq_len=SEQ, **options)
        (run / "plan.json").write_text(json.dumps(plan.json()))
        done = command("report", run)
        assert done.returncode == 0, done.stderr
        assert "<td>-</td><td>-</td><td>-</td></tr>" in (run / "report.html").read_text()


# ---- samples -------------------------------------------------------------------------------------

SAMPLES = (
    {"step": 2, "prompt": HOSTILE, "text": "first"},
    {"step": 4, "prompt": HOSTILE, "text": f"second {HOSTILE}"},
    {"step": 4, "prompt_tokens": [1, 2], "tokens": [3]},  # no tokenizer: the ids are shown
)


@pytest.fixture
def sampled(run):
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SAMPLES))
    return run


def test_texts_are_shown(sampled):
    shown = command("watch", sampled, "--once").stdout
    assert "sampled after step 4" in shown and "1 2 3" in shown
    assert command("report", sampled).returncode == 0
    text = (sampled / "report.html").read_text()
    assert text.count(f"<td>{html.escape(HOSTILE)}</td>") == 2
    assert f"<td>{html.escape(SAMPLES[1]['text'])}</td>" in text and "<td>1 2 </td>" in text
    with open(sampled / "samples.jsonl", "a") as file:
        file.write('{"step": 4, "prom')  # it is being written
    assert "1 2 3" in command("watch", sampled, "--once").stdout


def test_texts_are_read_whole_whatever_characters_they_have(run):
    """splitlines() divides at U+2028, and a line that is being written has no end yet, nor
    has its last character."""
    directory, texts = runs.RunDirectory(run), ["a\u2028b\x85", "\x1b[2Jc"]
    rows = [{"step": 2, "prompt": "p", "text": text} for text in texts]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    text = "".join(lines) + '{"step": 4, "prompt": "\u00e9'
    (run / "samples.jsonl").write_bytes(text.encode()[:-1])
    assert [row["text"] for row in directory.samples()] == texts
    shown = command("watch", run, "--once").stdout
    assert "\ufffd[2Jc" in shown and "\x1b" not in shown
    assert command("report", run).returncode == 0


@pytest.mark.parametrize("line", ["{}", "1", '{"step": 1, "tokens": [1]}', '{"step": "x"}'])
def test_texts_that_are_none_are_refused(run, line):
    (run / "samples.jsonl").write_text(line + "\n")
    refused(command("watch", run, "--once"), "samples.jsonl: line 1 is no sample")
    refused(command("report", run), "samples.jsonl: line 1 is no sample")


# ---- the commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted({*IN_PYTHON} - {"log"}))  # log imports none of these
def test_ctrl_c_while_modules_are_imported_is_no_traceback(name, tmp_path):
    for module in ("numpy", "cffi", "rich", "jinja2"):
        (tmp_path / f"{module}.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)")
    done = program(name, "--help", first_path=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("name", ["watch", "report", "log"])
def test_the_package_has_the_command(name):
    done = program(name, "--none")
    refused(done, rf"^penstock {name}: the following arguments are required: RUN$")
    native = subprocess.run([BUILD / "bin/penstock", name], capture_output=True, text=True)
    refused(native, f"make python installs it, as build/venv/bin/penstock {name}$")


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["watch", "report", "log"])
def test_a_run_that_is_none_is_refused_in_one_sentence(name, run, tmp_path):
    once = {"watch": ["--once"], "report": [], "log": ["--tensorboard"]}[name]
    refused(command(name), "required: RUN")
    refused(command(name, tmp_path / "none", *once), "none is no directory")
    refused(command(name, run / "plan.json", *once), "plan.json is no directory")
    refused(command(name, tmp_path, *once), "has no metrics.jsonl")
    rows = rows_of(run)
    for text, pattern in (
        ("{}\n", "line 1 has no step"),
        ("7\n", "line 1 is JSON, but no object"),
        ("\x00\n", "line 1 is not JSON"),
        (json.dumps(rows[0]) + "\n" + json.dumps(rows[1] | {"lr": "low"}) + "\n", "line 2: lr is"),
        (json.dumps(rows[0] | {"step": None}) + "\n", "line 1: step is None, and a whole number"),
        (json.dumps(rows[0] | {"total_steps": 0.5}) + "\n", "line 1: total_steps is 0.5, and a"),
        (json.dumps(rows[0] | {"time_s": 1e300}) + "\n", "line 1: time_s is 1e[+]300, and sec"),
        (json.dumps(rows[0] | {"lr": 10**400}) + "\n", "line 1: lr is too large for a number"),
        (json.dumps(rows[0])[:-1] + ', "mfu": 1e999}\n', "line 1: mfu is too large"),
    ):
        (run / "metrics.jsonl").write_text(text)
        refused(command(name, run, *once), pattern)
    put(run, rows)
    (run / "plan.json").write_text("[1]")
    refused(command(name, run, *once), "plan.json has no predicted_step_s")
    assert sorted(p.name for p in run.iterdir()) == ["metrics.jsonl", "plan.json"]


def places(value, path=()):
    """Where the values of an object lie, of a list the first one's."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, item in inner:
        yield (*path, key)
        if isinstance(item, (dict, list)):
            yield from places(item, (*path, key))


@pytest.mark.parametrize("name", ["plan.json", "summary.json"])
def test_no_value_of_a_run_is_a_traceback(name, report, run, monkeypatch):
    """Each value is a text, and a number without a size: refused in one sentence, or not read."""
    monkeypatch.setattr("penstock.report._svg", lambda *plot: "")
    table = (
        "--recipe-table" if name == "plan.json" else f"--output={run}/again.html"
    )  # the table reads no summary
    text = (run / name).read_text()
    for path in places(json.loads(text)):
        for junk in ("x", 10**400):
            value = inner = json.loads(text)
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = junk
            (run / name).write_text(json.dumps(value))
            for words in (["watch", run, "--once"], ["report", run], ["report", run, table]):
                done = command(*words)
                if done.returncode or junk != "x" or path[-1] in ("seq_len", "busy", "elements"):
                    refused(done, rf"{name}: .* needed|{name}: .* large|lacks a part")


def test_what_a_report_cannot_show_or_write_is_refused(run):
    refused(command("report", run, "-o", run), "is a directory")
    refused(command("report", run, "-o", run / "none/report.html"), "there is no directory .*none")
    (run / "plan.json").write_text('{"predicted_step_s": 1}')
    refused(command("report", run), "lacks a part")
    for text, says in (
        ('{"streams": 7}', "streams is '7', and a list"),
        ('{"streams": []}', "part"),
    ):
        (run / "summary.json").write_text(text)
        for name, *more in (["report"], ["watch", "--once"]):
            refused(command(name, run, *more), says)
    put(run, [])
    refused(command("report", run), "has completed no step")
