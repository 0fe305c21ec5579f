"""What the binary says while it works and when it is done: a progress line that fits the terminal,
the plan before the weights, a slow step, the summary."""

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import termios

import pytest
from conftest import ROOT
from test_cli import BINARY, edit_config, job, penstock, refused, words  # noqa: F401 (job is a fixture)


def on_terminal(columns, *args, env=None):
    """Run with stderr on a terminal of so many columns; what came there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [str(a) for a in (BINARY, *args)],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        seen += piece
    os.close(ours)
    assert process.wait() == 0, seen
    return seen.decode()


def test_a_plans_lines_wrap_at_words_on_a_terminal_alone(job, tmp_path):  # noqa: F811
    """Behind a line's name the rest goes below its value."""
    seen = on_terminal(80, "train", *words(job | {"--run-dir": tmp_path, "--steps": 1}))
    shown = seen.replace("\r", "").split("penstock: plan\n")[1].split("\n\n")[0].splitlines()
    assert max(map(len, shown)) <= 80, shown
    rest = [line for line in shown if line.startswith(" " * 17)]
    assert rest and all(line[17] != " " for line in rest), shown
    del job["--data"], job["--steps"]
    plain = penstock("plan", *words(job)).stdout
    assert max(map(len, plain.splitlines())) > 80
    planned = re.sub(r"\d[\d.e+]*", "0", plain)  # candidates and times depend on the run's data
    for line in ("work", "step", "parameters"):
        words_of = re.search(rf"^{line} .*?(?=^\w)", planned, re.M | re.S)[0].split()
        assert " ".join(words_of) in " ".join(re.sub(r"\d[\d.e+]*", "0", "\n".join(shown)).split())


# ---- the progress line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns,says",
    [
        (
            200,
            r"step 40/40  loss [\d.]+  grad norm [\d.e-]+  lr [\d.e-]+  \d+ tok/s  [\d.e-]+ TFLOP/s  MFU [\d.]+%  ETA 0s  "
            r"320 samples, 20.5k tokens  batch 8x64  elapsed \d+s  device [\d.]+/[\d.]+ \wiB  host [\d.]+/[\d.]+ \wiB",
        ),
        (
            80,
            r"step 40/40  loss [\d.]+(  grad norm [\d.e-]+)?  \d+ tok/s  ETA 0s  device \d+%  host \d+%",
        ),
        (40, r"step 40/40  loss [\d.]+  ETA 0s"),
        (12, r"step 40/40"),
    ],
)
def test_the_progress_line_fits_the_terminal_and_is_redrawn_in_place(job, tmp_path, columns, says):
    seen = on_terminal(
        columns, "train", *words(job | {"--steps": 40, "--lr": "1e-2", "--run-dir": tmp_path})
    )
    # the machine is not as quiet as it was when it was measured
    seen = re.sub(r"\r\npenstock: step \d+: steps take [^\n]*\n", "", seen)
    drawn = re.findall(r"\r\x1b\[K([^\r]*)", seen)
    steps = [text for text in drawn if text.startswith("step ")]
    assert len(steps) > 1 and re.fullmatch(says, steps[-1].strip("\n")), steps
    assert all(len(text.strip("\r\n")) < columns for text in drawn)
    assert not any("\n" in text for text in steps[:-1])


def test_a_grid_shows_which_plan_it_is_at_and_leaves_no_line_behind(tiny_model):
    devices, hosts = (
        [f"{4 * i}MiB" for i in range(1, 9)],
        [f"{i}GiB" for i in range(1, 5)],
    )  # a line is drawn after 0.1 s: four plans may be done before
    seen = on_terminal(
        80,
        *f"plan --model {tiny_model} --seq-len 64 --grid-device".split(),
        *devices,
        "--grid-host",
        *hosts,
    )
    drawn = re.findall(r"\r\x1b\[K([^\r]*)", seen)
    assert any(re.fullmatch(r"plan \d+ of 32, \d s", text) for text in drawn) and drawn[-1] == "", (
        seen
    )


# ---- before the first step -----------------------------------------------------------------------


def test_the_plan_is_shown_before_anything_is_reserved_or_loaded(job, tmp_path):
    """A machine that refuses the arenas is told after the plan: a limit of address space stands for
    it."""
    penstock("plan", "--model", job["--model"], "--seq-len", 64)  # rates are measured
    limited = [
        "bash",
        "-c",
        'ulimit -v $((1 << 20)); exec "$@"',
        "_",
        BINARY,
        "train",
        *words(
            job
            | {
                "--tokens-per-step": 64 * 2048,
                "--chunk-tokens": 64 * 2048,
                "--device-mem": "100GiB",
                "--host-mem": "1GiB",
                "--run-dir": tmp_path,
            }
        ),
    ]
    done = subprocess.run(
        [str(w) for w in limited],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 2 and re.match(
        r"penstock: plan\n.*GiB of memory refused: [^:]*: lower --device-mem", done.stderr, re.S
    ), done.stderr


def test_a_tensor_of_another_shape_is_refused_before_the_plan_is_shown(job, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    edit_config(tmp_path / "model", intermediate_size=400)
    given = words(job | {"--model": tmp_path / "model"})
    refused(
        penstock("train", *given, cwd=tmp_path), "saved in ./model, which is the model directory"
    )
    refused(penstock("train", *given, "--no-save", cwd=tmp_path), "mlp")


def test_a_step_of_minutes_is_said_before_it_begins(job, tiny_model, tmp_path):
    """Rates a millionth of this machine's foretell a step of minutes, which then takes none."""
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    penstock("plan", "--model", tiny_model, "--seq-len", 64, env=cache)
    (file,) = (tmp_path / "cache/penstock").iterdir()
    rates = json.loads(
        file.read_text(),
        parse_float=lambda number: float(number) * (1e-6 if float(number) > 1e8 else 1),
    )
    file.write_text(json.dumps(rates))
    done = penstock("train", *words(job | {"--run-dir": tmp_path / "run"}), env=cache)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"penstock: the first step is predicted to take \d+[mh]\d\d[sm]: lower --tokens-per-step \(512 now\), or take a smaller model or a faster device",
        done.stderr,
    ), done.stderr
    assert (
        "predicted to take"
        not in penstock("train", *words(job | {"--run-dir": tmp_path / "run"})).stderr
    )


@pytest.mark.parametrize("factor,how", [(1e-6, "less"), (1e3, "more")])
def test_a_prediction_far_off_points_to_profile(job, tiny_model, tmp_path, factor, how):
    """Rates that are not this machine's: only a run longer than its warm-up tells."""
    cache, threads = (
        {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        ("--backend", "cpu", "--threads", 1),
    )
    penstock("plan", "--model", tiny_model, "--seq-len", 64, *threads, env=cache)
    (file,) = (tmp_path / "cache/penstock").iterdir()
    file.write_text(
        json.dumps(
            json.loads(
                file.read_text(),
                parse_float=lambda number: float(number) * (factor if float(number) > 1e8 else 1),
            )
        )
    )
    for steps in (2, 3):
        done = penstock(
            "train",
            *words(job | {"--run-dir": tmp_path / f"run{steps}", "--steps": steps}),
            *threads,
            env=cache,
        )
        points = re.search(
            rf"a step took \d+% {how} time than predicted: .*\n +penstock profile --backend cpu --threads 1\n",
            done.stdout,
        )
        assert done.returncode == 0 and (points is not None) == (steps == 3), done.stdout


def test_a_prediction_that_is_met_points_nowhere(job, tmp_path):
    done = penstock("train", *words(job | {"--run-dir": tmp_path / "run", "--steps": 6}))
    ratio = float(re.search(r"ratio ([\d.]+)", done.stdout)[1])
    assert ("penstock profile" in done.stdout) == (abs(ratio - 1) > 0.15) or abs(
        abs(ratio - 1) - 0.15
    ) < 0.011, done.stdout


# ---- weights that are not finite -----------------------------------------------------------------


def test_a_search_of_seconds_shows_its_progress_on_a_terminal_and_leaves_no_trace(tmp_path):
    shutil.copy(ROOT / "models/8b.json", tmp_path / "config.json")
    asked = ["plan", "--model", tmp_path, "--seq-len", 8192, "--tokens-per-step", 24576]
    asked += ["--device-mem", "24GiB", "--host-mem", "84GiB"]
    asked += ["--hardware", ROOT / "docs/hardware-h200.json"]
    shown = on_terminal(80, *asked)
    line = r"searching a plan, \d+ s:  \d+ evaluated  (none fits yet|best \d+ tokens/s)"
    assert re.search(line, shown) and shown.endswith("\r\033[K")
    assert all(len(x.removeprefix("\033[K")) < 80 for x in shown.split("\r"))
