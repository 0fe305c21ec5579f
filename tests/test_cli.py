"""The binary: what it refuses (one sentence, exit code 2, nothing written), Ctrl-C, its files and
its JSON."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import BUILD, HANGS_S, write_shard

BINARY = BUILD / "bin/penstock"
METRICS = {
    "step",
    "loss",
    "tokens",
    "valid_tokens",
    "step_s",
    "predicted_step_s",
    "tokens_per_s",
    "device_peak_bytes",
    "host_peak_bytes",
    "host_arena_peak_bytes",
    "grad_norm",
    "lr",
    "n_skipped",
    "mfu",
    "hfu",
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "update_bytes_per_s",
    "total_steps",
    "samples",
    "consumed_samples",
    "consumed_tokens",
    "elapsed_s",
    "eta_s",
    "gpus",
    "tflops",
    "time_s",
}


def penstock(*args, cwd=None, env=None):
    return subprocess.run(
        [str(a) for a in (BINARY, *args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=HANGS_S,
        env={**os.environ, **(env or {})},
    )


@pytest.fixture
def job(tiny_model, tiny_shard):
    """Options of a training run that works."""
    return {"--model": tiny_model, "--data": tiny_shard, "--seq-len": 64, "--steps": 3}


def words(options):
    return [
        w for name, value in options.items() for w in ((name,) if value is None else (name, value))
    ]


def refused(done, pattern, code=2):
    """Exit code, one sentence, nothing on stdout."""
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if "this machine" not in line]
    assert len(lines) == 1 and lines[0].startswith("penstock: "), done.stderr
    assert re.search(pattern, lines[0]), lines[0]
    assert done.stdout == ""


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change,pattern",
    [
        (
            {"--model": "nowhere"},
            r"--model nowhere: cannot be opened: No such file or directory \(relative to the working "
            r"directory: /.*/nowhere\)$",
        ),
        ({"--data": "nowhere.bin"}, "--data nowhere.bin: cannot be opened: No such file"),
        ({"--val": "nowhere"}, "--val nowhere: cannot be opened: No such file"),
        ({"--adapter": "nowhere"}, "--adapter nowhere/adapter_config.json: cannot be opened"),
        ({"--resume": "nowhere"}, "--resume nowhere: cannot be read: No such file"),
        ({"--seq-len": "0"}, r"--seq-len 0: give a whole number from 1 to"),
        ({"--seq-len": "-3"}, "--seq-len -3"),
        ({"--seq-len": "12x"}, "--seq-len 12x"),
        ({"--seq-len": "20000"}, r"the data has 20000 tokens in 1 shard, .* needs 20001"),
        ({"--device-mem": "64KiB"}, r"needs .* of device memory.*--device-mem"),
        ({"--host-mem": "1MiB"}, r"needs .* of host memory.*--host-mem"),
        ({"--device-mem": "20Gi"}, r"--device-mem 20Gi is no size: give one such as 20GiB"),
        ({"--host-mem": "lots"}, r"--host-mem lots is no size"),
        ({"--device-mem": "24"}, r"--device-mem 24 is 24 bytes: write 24GiB$"),
        ({"--host-mem": "8e3"}, r"--host-mem 8e3 is 8000 bytes: write 8e3MiB$"),
        ({"--device-mem": "0"}, r"--device-mem 0 is no size"),
        (
            {"--recipe": "fp16"},
            r"--recipe fp16: give fp32, fp32-master, bf16, fp24-master, fp8 or fp8-master",
        ),
        ({"--lr-schedule": "step"}, r"--lr-schedule step: give constant, cosine, linear or wsd"),
        ({"--lr": "nan"}, "--lr nan"),
        ({"--lr": "-1"}, "--lr -1"),
        ({"--steps": "0"}, "--steps 0"),
        ({"--chunk-tokens": "0"}, "--chunk-tokens 0: give a whole number from 1"),
        ({"--modle": "x"}, r"there is no option --modle: did you mean --model\?"),
        ({"--frobnicate": "x"}, r"there is no option --frobnicate \(--help-all lists"),
        ({"--shuffle=yes": None}, "--shuffle yes: give true or false"),
        ({"--out": None}, "--out needs a value"),
        ({"--document-token": "-2"}, "--document-token -2"),
        ({"--beta2": "1.5"}, "beta2"),
    ],
)
def test_a_bad_option_is_refused_in_one_sentence_and_nothing_is_written(
    job, tmp_path, change, pattern
):
    options = job | {"--run-dir": "run/deep"} | change
    refused(penstock("train", *words(options), cwd=tmp_path), pattern)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["--model", "--data", "--seq-len"])
def test_a_missing_option_is_named(job, tmp_path, missing):
    del job[missing]
    refused(penstock("train", *words(job), cwd=tmp_path), f"{missing} is missing")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", ["--checkpoint-every 5", "--lr=1e-3", "--save-dtype bf16"])
@pytest.mark.parametrize("command", ["plan", "eval"])
def test_an_option_of_train_alone_is_said_to_be_one(command, words):
    option = words.replace("=", " ").split()[0]
    refused(
        penstock(command, *words.split()),
        f"{option} is an option of penstock train, not of penstock {command}: leave it out",
    )


def test_a_stack_that_is_too_small_is_refused():
    limit = "ulimit -s 64 && exec"
    done = subprocess.run(
        ["bash", "-c", f'{limit} "{BINARY}" version'], capture_output=True, text=True
    )
    refused(done, "the stack is limited to 64 KiB, and 96 KiB are needed: run ulimit -s 8192 first")


@pytest.mark.parametrize(
    "said, meant", [("trian", "train"), ("evla", "eval"), ("logs", "log"), ("inference", None)]
)
def test_a_slip_in_a_commands_name_is_answered_with_the_name(said, meant):
    refused(
        penstock(said), f"there is no command '{said}'" + f": did you mean {meant}?" * bool(meant)
    )


@pytest.mark.parametrize("option", ["--prompt", "--chat"])
def test_options_of_text_are_said_to_be_those_of_python(option):
    says = f"{option} is an option of the Python command, which has a tokenizer: run python -m"
    refused(penstock("generate", "--model", "m", option, "x"), says)


def test_stray_words_and_unknown_commands_are_refused():
    refused(penstock("plan", "model"), "'model' is not expected here")
    refused(penstock("trian"), "there is no command 'trian'")
    refused(penstock("demo", "1", "1", "64"), "3 of 4 arguments given")
    assert penstock().returncode == 2


def edit_config(model, **changes):
    config = json.loads((model / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    (model / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "damage,pattern",
    [
        (lambda m: (m / "model.safetensors").unlink(), "model.safetensors"),
        (lambda m: (m / "config.json").write_text("{"), "config.json"),
        (lambda m: edit_config(m, intermediate_size=400), "mlp"),
    ],
    ids=["missing", "no-json", "shape"],
)
def test_a_damaged_model_directory_is_refused(tiny_model, job, tmp_path, damage, pattern):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    damage(model)
    refused(
        penstock(
            "train", *words(job | {"--model": model, "--out": tmp_path / "out"}), cwd=tmp_path
        ),
        pattern,
    )
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_token_past_the_vocabulary_is_refused_with_shard_and_offset(job, tmp_path):
    tokens = np.arange(3000) % 512
    tokens[1234] = 513
    shard = write_shard(tmp_path / "bad.bin", tokens)
    refused(
        penstock("train", *words(job | {"--data": shard, "--run-dir": tmp_path / "run"})),
        r"bad\.bin.*513.*1234|bad\.bin.*1234.*513",
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--out", "--run-dir"])
def test_an_unwritable_output_is_refused_before_training(job, tmp_path, option):
    (tmp_path / "file").write_text("here")
    refused(
        penstock("train", *words(job | {option: tmp_path / "file/under"}), cwd=tmp_path),
        rf"{option} .*file/under cannot be written: Not a directory",
    )
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_model_directory_is_no_output(tiny_model, job):
    refused(penstock("train", *words(job | {"--out": tiny_model})), "is the model directory itself")


def test_a_refused_run_leaves_an_earlier_ones_files_alone(job, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("kept")
    refused(
        penstock(
            "train", *words(job | {"--device-mem": "64KiB", "--run-dir": tmp_path}), "--force"
        ),
        "device memory",
    )
    assert (tmp_path / "metrics.jsonl").read_text() == "kept"


# ---- what it writes ------------------------------------------------------------------------------


def test_a_run_writes_metrics_plan_timeline_and_model(job, tmp_path):
    done = penstock(
        "train",
        *words(
            job | {"--steps": 5, "--out": tmp_path / "out", "--device-mem": "5MiB", "--json": None}
        ),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    metrics = [
        json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    ]
    assert [m["step"] for m in metrics] == list(range(5)) and all(
        set(m) - {"expected_step_s"} == METRICS for m in metrics
    )
    assert metrics[-1]["loss"] < metrics[0]["loss"] and all(m["tokens"] == 512 for m in metrics)
    assert (
        summary["steps"] == 5
        and summary["loss_last"] == metrics[-1]["loss"]
        and summary["interrupted"] is False
    )
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    assert summary["device_peak_bytes"] == plan["device_used_bytes"] <= 5 << 20
    assert json.loads((tmp_path / "out/summary.json").read_text()) == summary
    last = metrics[-1]
    assert (last["total_steps"], last["samples"], last["consumed_samples"]) == (5, 8, 40)
    assert [m["consumed_tokens"] for m in metrics] == [512 * i for i in range(1, 6)]
    assert last["tflops"] == pytest.approx(plan["model_flops"] / last["step_s"] * 1e-12)
    for way in ("h2d", "d2h"):
        moved = plan[f"{way}_bytes"] / last["step_s"]
        assert last[f"{way}_bytes_per_s"] == pytest.approx(moved)
        assert summary["while_busy"][f"{way}_bytes_per_s"] > 0
    assert last["eta_s"] == 0 and metrics[0]["eta_s"] > metrics[3]["eta_s"] > 0
    assert all(
        b["elapsed_s"] - a["elapsed_s"] == pytest.approx(b["time_s"] - a["time_s"], abs=0.05)
        for a, b in zip(metrics, metrics[1:])
    )
    assert summary["step_s_median"] == sorted(m["step_s"] for m in metrics[2:])[1]
    timeline = json.loads((tmp_path / "out/timeline.json").read_text())["traceEvents"]
    steps = {e["args"]["step"] for e in timeline if e["ph"] == "X"}
    assert steps == {3, 4}
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "metrics.jsonl",
        "plan.json",
        "timeline.json",
    }
    assert {s["name"] for s in summary["streams"]} >= {"compute", "h2d", "d2h", "host"}


def test_with_no_save_no_model_is_saved_and_quiet_says_nothing(job, tmp_path):
    done = penstock(
        "train",
        *words(job | {"--quiet": None, "--trace-steps": 0, "--run-dir": tmp_path / "run"}),
        "--no-save",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    files = ["metrics.jsonl", "plan.json", "run.toml", "summary.json"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == files


def test_option_forms_are_equivalent(job, tmp_path):
    losses = []
    for i, extra in enumerate(
        [["--device-mem", "5MiB", "--lr", "1e-3"], ["--device-mem=5242880", "--lr=0.001"]]
    ):
        run = tmp_path / str(i)
        assert penstock("train", *words(job | {"--run-dir": run}), *extra).returncode == 0
        losses.append(
            [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        )
    assert losses[0] == losses[1]


def test_progress_names_loss_speed_eta_and_both_memories(job, tmp_path):
    done = penstock("train", *words(job | {"--run-dir": tmp_path, "--device-mem": "5MiB"}))
    assert re.search(
        r"^step 3/3  loss \d\.\d{4}  .*  \d+ tok/s  .*  ETA 0s\n  .*  device [\d.]+/[\d.]+ \wiB  host [\d.]+/[\d.]+ \wiB\n"
        r"  step [\d.]+ s, [\d.]+ of predicted  h2d [\d.]+ \w?B/s  d2h [\d.]+ \w?B/s  updates [\d.]+ \w?B/s$",
        done.stderr,
        re.M,
    )
    assert (
        "predicted" in done.stdout
        and "measured" in done.stdout
        and re.search(r"compute +\d", done.stdout)
        and re.search(
            r"^while they ran  h2d [\d.]+ \w?B/s, d2h [\d.]+ \w?B/s, updates on the host [\d.]+ \w?B/s$",
            done.stdout,
            re.M,
        )
        and re.search(
            r"^compute ran [\d.]+ s a step \(planned [\d.]+\), furthest from the plan: [\d.]+ s of \w+[\w ]* \(planned [\d.]+\), ",
            done.stdout,
            re.M,
        )
    )
    # what ran and what waited make up the step
    summary = json.loads((tmp_path / "summary.json").read_text())
    ran = [t for t in summary["op_times"] if t["stream"] == "compute"]
    assert min(t["planned_seconds"] for t in ran) > 0
    waited = sum(s["seconds"] for s in summary["stalls"] if s["stream"] == "compute")
    busy = next(s["busy"] for s in summary["streams"] if s["name"] == "compute")
    seconds = sum(t["seconds"] for t in ran)
    assert seconds / (seconds + waited) == pytest.approx(busy, rel=0.05)


def test_demo_takes_the_reference_systems_positions(tiny_model, tiny_shard, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    refused(
        penstock("demo", 1, 0.1, 64, model, "--run-dir", tmp_path / "run"),
        "no token shards: give --data SHARDS, or put them in",
    )
    (model / "data").mkdir()
    shutil.copy(tiny_shard, model / "data/a.bin")
    done = penstock("demo", 1, 0.1, 64, model, "--steps", 2, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    refused(penstock("demo", 0, 1, 64, model), "HOST_GIB '0'")
    refused(penstock("demo", 1, 1, "long", model), "SEQLEN 'long'")


def test_plan_info_profile_and_version(tiny_model, tiny_shard, tmp_path):
    ask = ("plan", "--model", tiny_model, "--seq-len", 64)
    plan = json.loads(penstock(*ask, "--json").stdout)
    assert plan["predicted_step_s"] > 0 and plan["tokens_per_step"] == 512
    smallest = json.loads(penstock(*ask, "--smallest", "--json").stdout)["smallest_device_bytes"]
    assert penstock(*ask, f"--device-mem={smallest}").returncode == 0
    refused(penstock(*ask, f"--device-mem={smallest - 1}"), "device memory")
    said = [
        penstock(*ask, "--smallest", "--device-mem", cap).stdout.splitlines()
        for cap in ("1MiB", "3MiB")
    ]
    assert said[0] == [
        f"least --device-mem without --host-mem: {smallest} bytes (2.0 MiB)",
        "least --host-mem under --device-mem 1.0 MiB: no plan fits, whatever --host-mem is",
    ]
    assert said[1][0] == said[0][0] and re.fullmatch(
        r"least --host-mem under --device-mem 3.0 MiB: \d{8} bytes \(\d\d.\d MiB\)", said[1][1]
    )
    info = json.loads(
        penstock(
            "info", "--model", tiny_model, "--data", tiny_shard, "--seq-len", 64, "--json"
        ).stdout
    )
    assert info["model"]["parameters"] == 836736 and info["data"] == {
        "shards": 1,
        "tokens": 20000,
        "sequences": 312,
    }
    assert json.loads(penstock("info", "--json").stdout)["hardware"]["n_threads"] >= 1
    assert re.fullmatch(r"penstock \d+\.\d+\.\d+\n", penstock("version").stdout)
    cached = penstock("profile", "--quick", env={"XDG_CACHE_HOME": str(tmp_path)}).stdout
    assert Path(re.search(r"cached in (.*)", cached)[1]).parent == tmp_path / "penstock"
    here = penstock("info", env={"XDG_CACHE_HOME": str(tmp_path)}).stdout
    assert "  AdamW" in here and set(here.splitlines()[1:]) <= set(cached.splitlines())


@pytest.mark.parametrize("command", ["train", "plan", "demo", "info", "profile"])
def test_every_commands_help_teaches_with_an_example(command):
    done = penstock(command, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: penstock " + command)
    assert f"example:\n  penstock {command}" in done.stdout


# ---- Ctrl-C --------------------------------------------------------------------------------------


def start(options, wait_for):
    process = subprocess.Popen(
        [str(BINARY), "train", *map(str, words(options))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + HANGS_S
    while not (wait_for.exists() and wait_for.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.01)
    return process


def test_ctrl_c_finishes_what_is_in_flight_and_saves(job, tmp_path):
    out = tmp_path / "out"
    process = start(job | {"--steps": 100000, "--out": out}, out / "metrics.jsonl")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130 and "stopping after the steps in flight" in stderr
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert 1 <= len(metrics) < 100000 and f"{len(metrics)} of 100000 steps" in stdout
    assert penstock("info", "--model", out).returncode == 0 and (out / "model.safetensors").exists()


def test_a_second_ctrl_c_stops_at_once_and_saves_nothing(job, tmp_path):
    out = tmp_path / "out"
    slow = job | {
        "--steps": 1000,
        "--tokens-per-step": 4096,
        "--out": out,
    }  # steps of half a second, so that one is in flight
    process = start(slow, out / "metrics.jsonl")
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=HANGS_S)
    assert process.returncode == 130 and "stopped at once; nothing is saved" in stderr
    assert not (out / "model.safetensors").exists() and not (out / "config.json").exists()
    assert all(json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())


def test_pairs_of_caps_have_the_plans_that_are_found_alone(tiny_model):
    ask = ("plan", "--model", tiny_model, "--seq-len", 64, "--tokens-per-step", 512)
    done = penstock(*ask, "--pairs", "4MiB:4GiB", "1MiB:4GiB", "8MiB:none", "none:4GiB")
    fits, small, no_host, no_device = map(json.loads, done.stdout.splitlines())
    for line, caps in (
        (fits, ("--device-mem", "4MiB", "--host-mem", "4GiB")),
        (no_host, ("--device-mem", "8MiB")),
        (no_device, ("--host-mem", "4GiB")),
    ):
        assert line["plan"] == json.loads(penstock(*ask, *caps, "--json").stdout)
        assert line["predicted_hfu"] >= line["predicted_mfu"] > 0
    assert (small["device_mem_bytes"], small["host_mem_bytes"]) == (1 << 20, 4 << 30)
    refused = penstock(*ask, "--device-mem", "1MiB", "--host-mem", "4GiB").stderr
    assert small["refused"] == refused.removeprefix("penstock: ").strip() and "plan" not in small
    for wrong, said in (("4MiB", "DEVICE:HOST"), ("4MiB:much", "no size"), ("0:4GiB", "no size")):
        done = penstock(*ask, "--pairs", wrong)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr
        assert not done.stdout


def test_a_grid_of_caps_is_predicted_and_drawn(tiny_model, tmp_path):
    ask = ("plan", "--model", tiny_model, "--seq-len", 64, "--tokens-per-step", 512)
    sizes = ("--grid-device", "1KiB", "4MiB", "64MiB", "--grid-host", "1MiB", "4GiB")
    grid = json.loads(penstock(*ask, *sizes, "--json").stdout)
    (none, too), (small, fits, large) = grid["tokens_per_s"][0][:2], grid["tokens_per_s"][1]
    assert (
        grid["device_mem_bytes"] == [1024, 4 << 20, 64 << 20]
        and none == too == small == 0
        and 0 < fits <= large
    )
    (tmp_path / "grid.json").write_text(json.dumps(grid))
    subprocess.run(
        [sys.executable, "-m", "penstock.plot", tmp_path / "grid.json", tmp_path / "grid.png"],
        check=True,
    )
    assert (tmp_path / "grid.png").stat().st_size > 1000
    table = penstock(*ask, *sizes).stdout
    assert table.count("\n") == 4 and "-" in table and "4.0 GiB" in table
    assert grid["found_under"] == [
        [None] * 3,
        [None] + [{"device_mem_bytes": d, "host_mem_bytes": 4 << 30} for d in (4 << 20, 64 << 20)],
    ]  # every cell shows a plan
    turned = ("--grid-device", "64MiB", "1KiB", "4MiB", "--grid-host", "4GiB", "1MiB")
    other = json.loads(penstock(*ask, *turned, "--json").stdout)
    for key in ("tokens_per_s", "found_under"):
        assert other[key] == [[row[2], row[0], row[1]] for row in reversed(grid[key])]
    head, columns, large_row, small_row = penstock(*ask, *turned).stdout.splitlines()
    assert (
        large_row.split()[:2] == ["4.0", "GiB"]
        and small_row.split() == ["1.0", "MiB", "-", "-", "-"]
        and columns.split()[0] == "64.0"
    )
    for wrong in (sizes[:4], ("--grid-device", "many", "--grid-host", "1GiB")):
        done = penstock(*ask, *wrong)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "grid" in done.stderr
