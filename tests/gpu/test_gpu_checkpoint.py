"""Checkpoints on a GPU: runs in deterministic mode that are killed at random moments, and while a
checkpoint is written beside the steps, and resumed under other caps, end with the bits of a run
that was not stopped. tests/test_checkpoint.py is the same on the CPU."""

import json

import numpy as np
import pytest
from test_checkpoint import kill_and_resume, same, train


def pytest_generate_tests(metafunc):
    cpu = ["cpu"] if metafunc.config.getoption("cpu_steps") else []
    metafunc.parametrize("backend", cpu + [pytest.param("cuda", marks=pytest.mark.gpu)])


def test_five_kills(backend, tiny_model, tiny_shard, tmp_path):
    most_s = 12.0 if backend == "cuda" else 1.2  # a process on a GPU takes some seconds to begin
    whole, kills, within = tmp_path / "whole", 0, 0
    more = ("--deterministic",)
    every = ("--steps", 12, "--checkpoint-every", 12)
    train(tiny_model, tiny_shard, whole, *more, *every, backend=backend)
    plan = json.loads((whole / "plan.json").read_text())
    fixed = plan["device_used_bytes"] - plan["device_arena_bytes"]
    # without a cap; with half of what that plan takes, where the state is on the host; in between
    caps = [()] + [
        ("--device-mem", str(fixed + int(plan["device_arena_bytes"] * part))) for part in (0.5, 0.7)
    ]
    rng = np.random.default_rng(3)
    for i in range(5):
        killed = kill_and_resume(
            *(tiny_model, tiny_shard, tmp_path / str(i), rng),
            inside=2,
            caps=caps,
            most_s=most_s,
            backend=backend,
            more=more,
        )
        kills, within = kills + killed[0], within + killed[1]
        same(tmp_path / str(i), whole)
        if kills >= 5 and within >= 2:
            break
    assert kills >= 5 and within >= 2, (kills, within)
