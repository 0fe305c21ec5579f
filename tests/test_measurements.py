"""Programs of bench that are meant for a GPU and have no test of their own, on the CPU, small: they
run, and what they write has its figures, machine and commit."""

import json
import subprocess
import sys

import pytest
from conftest import BUILD, HANGS_S, ROOT

NOTE = {"machine", "versions", "commit", "date"}


def bench(name, *words):
    done = subprocess.run(
        [str(w) for w in (sys.executable, ROOT / "bench" / name, *words)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
