"""Programs of bench that are meant for GPUs and have no test of their own, on the CPU, small: they
run, and what they write has its figures, machine and commit; what they refuse."""

import json
import os
import subprocess
import sys

import pytest
from conftest import BUILD, HANGS_S, ROOT

NOTE = {"machine", "versions", "commit", "date"}


def ended(*words, code=0, **env):
    done = subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env=os.environ | env,
    )
    assert done.returncode == code, done.stderr
    return done


def bench(name, *words, **how):
    return ended(sys.executable, ROOT / "bench" / name, *words, **how).stdout


ROWS = [
    row
    for row in map(json.loads, (ROOT / "bench/results/published.jsonl").read_text().splitlines())
    if "use" in row
]


def test_plans_for_gpus_by_name_are_as_fast_as_what_others_published():
    """As bench/described_gpus.py planned them. The shares of peaks are not fitted to the H100."""
    assert {row["gpu"] for row in ROWS if row["use"] == "fitted"} >= {
        "rtx3090",
        "rtx4090",
        "rtx5090",
    }
    assert {row["gpu"] for row in ROWS if row["use"] == "control"} == {"h100"}
    far = [r for r in ROWS if abs(r["planned_tokens_per_s"] / r["tokens_per_s"] - 1) > 0.1]
    assert far == []


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['gpu']}-{r['model']}-{r['seq_len']}")
def test_a_plan_for_a_gpu_by_name_is_the_one_on_record(row):
    sys.path.insert(0, str(ROOT / "bench"))
    from described_gpus import planned

    assert planned(BUILD / "bin/penstock", row) == pytest.approx(
        row["planned_tokens_per_s"], rel=1e-3
    )


def test_what_a_checkpoint_costs(tmp_path):
    run, out = tmp_path / "run", tmp_path / "rows.jsonl"
    shape = ("--model", "tiny-llama", "--seq-len", 64, "--tokens", 256)
    caps = ("--backend", "cpu", "--device-gib", 0.008, "--resume-gib", 0.004, "--host-gib", 0.0625)
    binary = ("--binary", BUILD / "bin/penstock", "--folder", run, "--out", out)
    said = bench("checkpoint.py", *shape, *caps, *binary, "--steps", 3)
    (row,) = map(json.loads, out.read_text().splitlines())
    assert NOTE <= set(row) and not run.exists()
    assert len(row["steps_s"]) == 5 and row["resumed_loss_gaps"] == [0, 0]
    assert row["host_peak_gib"] <= row["host_cap_gib"] == 0.0625
    least, most = row["durable_s"] - 0.05, row["durable_s"] + 0.05
    assert row["gb_per_s"] >= row["gb"] / most - 0.005
    assert least <= 0 or row["gb_per_s"] <= row["gb"] / least + 0.005
    assert row["lost_s"] == pytest.approx(sum(row["steps_s"][3:]) - 2 * row["step_s"])
    assert row["lost_at_20_steps"] == pytest.approx(row["lost_s"] / (20 * row["step_s"]))
    assert f"{row['gb_per_s']:.2f} GB/s" in said and "of 0.0625 GiB" in said


def test_generation_beside_its_limits(tmp_path):
    out = tmp_path / "rows.jsonl"
    size = ("--prompt-tokens", 12, "--new-tokens", 4, "--repeats", 3, "--build", BUILD)
    bench("generate.py", "--backend", "cpu", *size, "--out", out, "tiny-llama", "tiny-qwen3:1:2")
    one, two = map(json.loads, out.read_text().splitlines())
    assert NOTE <= set(one) and (one["batch"], two["batch"]) == (1, 2)
    assert (one["new_tokens"], two["new_tokens"], two["prompt_tokens"]) == (4, 8, 24)
    assert one["decode_tokens_per_s"] == sorted(one["decode_runs"])[1]


def test_two_tasks_of_hosts_train_and_leave_a_row(tmp_path):
    case = "tiny-llama:64:0.05:2:512:steps=3,warm-up=1"
    more = ("--backend", "cpu", "--transport", "tcp", "--out", tmp_path)
    said = bench("hosts.py", case, *more)
    row = json.loads((tmp_path / "row.json").read_text())
    assert round(row["tokens_per_s"] * row["step_s"]) == 512 and len(row["loss"]) == 3
    assert said.startswith("gradients go over TCP, as asked for\n2 tasks over tcp: ")


def test_what_hosts_refuses_is_a_sentence(tmp_path):
    cpu = ("--backend", "cpu", "--transport", "tcp")
    for words, says in (
        (["none:64:1:2:512"], "model 'none' is none of"),
        (["tiny-llama:64:0.05:2:512", "--tasks", 1], "--tasks is 1: at least 2"),
        (["tiny-llama:64:0.0001:2:512", *cpu], "rank 0 ended with 2 and said: penstock: "),
    ):
        done = ended(sys.executable, ROOT / "bench/hosts.py", *words, "--out", tmp_path, code=2)
        assert says in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_gpus_without_gpus_says_why_and_exits_with_77():
    done = ended(BUILD / "bench/gpus", code=77, CUDA_VISIBLE_DEVICES="")
    (line,) = done.stdout.splitlines()
    assert line.startswith("gpus: ") and "CUDA" in line and not done.stderr


def test_what_gpus_cannot_do_is_refused():
    for words in ("9", "0", "two", "2 0", "2 nan", "2 1 more"):
        done = ended(BUILD / "bench/gpus", *words.split(), code=2)
        assert "usage: gpus [N" in done.stderr and not done.stdout


def test_hog_copies_at_the_rate_asked_for():
    words = ["--threads", "2", "--mib", "8", "--gb-per-s"]
    run = [BUILD / "bench/hog", *words, "0.1", "--seconds", "0.5"]
    said = json.loads(subprocess.run(run, capture_output=True, check=True).stdout)
    assert said["threads"] == 2 and 0.02 < said["gb_per_s"] < 0.13
    done = subprocess.run([*run[:-4], "--gb-per-s", "-1"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "hog: --gb-per-s -1: give 0 to 1e+06\n"


def arena(*words):
    return subprocess.run(
        [BUILD / "bench/arena", "--backend", "cpu", "--threads", "1", *words],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )


def test_an_arena_is_measured_by_place():
    done = arena("--gib", "0.0625", "--places", "2", "--seconds", "0.02", "--json", "-")
    said = json.loads(done.stdout)
    assert said["arena_bytes"] == 64 << 20 and said["n_threads"] == 1
    assert [p["phase"] for p in said["phases"]] == ["round 1", "round 2"]
    rates = []
    for place, first in zip(said["phases"][1]["places"], (0, 32 << 20), strict=True):
        assert place["first_byte"] == first
        assert [r["kinds"] for r in place["rates"]] == [4, 8]  # sums, AdamW
        rates += [r["host_bytes_per_s"] for r in place["rates"]]
    # Beside other work a case of 20 ms may end nothing.
    assert max(rates) > 1e8 and all(0 <= r < 1e13 for r in rates), rates
    done = arena("--gib", "0.01", "--places", "1", "--seconds", "0.02")
    assert done.returncode == 1 and "takes 16.0 MiB" in done.stderr


def test_an_arena_with_wrong_words_is_refused():
    for words in (["--gib"], ["--places", "0"], ["--gib", "x"], ["--backend", "tpu"], ["now", "1"]):
        done = arena(*words)
        assert done.returncode == 2 and "usage: arena" in done.stderr and not done.stdout
