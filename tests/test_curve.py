"""bench/curve.py on the CPU, small: both sides learn the same, and what is written says so."""

import json
import math
import subprocess
import sys

import tolerance
from conftest import ROOT


def test_penstock_and_pytorch_have_the_same_curve(tiny_shard, tmp_path):
    out = tmp_path / "curve.json"
    words = [
        "--data",
        tiny_shard,
        "--config",
        ROOT / "models/tiny-llama.json",
        "--backend",
        "cpu",
        "--steps",
        10,
        "--seq-len",
        32,
        "--tokens",
        256,
        "--lr",
        "1e-3",
        "--out",
        out,
    ]
    done = subprocess.run(
        [str(w) for w in (sys.executable, ROOT / "bench/curve.py", *words)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    ours, theirs = result["curves"].values()
    assert (
        len(ours["loss"]) == len(theirs["loss"]) == 10 and ours["loss"][-1] < ours["loss"][0] - 0.1
    )
    # As test_parity.py derives it: noise of a loss in bf16 (4 layers, at most 8 chunks), and
    # updates whose elements below that noise go either way (a share delta of them, so kappa is
    # sqrt(delta)); both sides are off by as much, independently.
    delta = tolerance.delta("fp32-master", 4, 8, 512)
    walk, gaps = 0.0, [abs(a - b) for a, b in zip(ours["loss"], theirs["loss"])]
    for step, (lr, norm) in enumerate(zip(result["lr"], theirs["grad_norm"])):
        bound = math.sqrt(2) * math.hypot(
            tolerance.loss_noise(delta, 256), 3 * math.sqrt(delta) * norm * math.sqrt(walk)
        )
        assert gaps[step] < bound, f"step {step}: {gaps[step]:.2g}, bound {bound:.2g}"
        walk += lr * lr
    assert result["gaps"]["Penstock - PyTorch"]["largest"] == max(gaps)
    assert f"largest gap {max(gaps):.4f} nats" in done.stdout
