"""bench/gpus.c where it cannot measure. What it measures needs GPUs."""

import os
import subprocess

from conftest import BUILD, HANGS_S


def gpus(*words):
    # a driver that is there shows no GPU then
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [BUILD / "bench/gpus", *words], capture_output=True, text=True, env=env, timeout=HANGS_S
    )


def test_without_gpus_it_says_why_and_exits_with_77():
    done = gpus()
    assert done.returncode == 77 and not done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("gpus: ") and "CUDA" in line


def test_what_it_cannot_do_is_refused():
    for words in (["9"], ["0"], ["two"], ["2", "0"], ["2", "nan"], ["2", "1", "more"]):
        done = gpus(*words)
        assert done.returncode == 2 and "usage: gpus [N" in done.stderr and not done.stdout
