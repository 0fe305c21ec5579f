"""bench/hosts.py: two tasks on the CPU backend, and what it refuses."""

import json
import subprocess
import sys

from conftest import HANGS_S, ROOT


def hosts(*words):
    command = [sys.executable, ROOT / "bench/hosts.py", *words]
    return subprocess.run(
        [str(w) for w in command], capture_output=True, text=True, timeout=HANGS_S
    )


def test_two_tasks_train_and_leave_a_row(tmp_path):
    case = "tiny-llama:64:0.05:2:512:steps=3,warm-up=1"
    more = ("--backend", "cpu", "--transport", "tcp", "--out", tmp_path)
    done = hosts(case, *more)
    assert done.returncode == 0, done.stderr
    row = json.loads((tmp_path / "row.json").read_text())
    assert round(row["tokens_per_s"] * row["step_s"]) == 512 and len(row["loss"]) == 3
    assert done.stdout.startswith("gradients go over TCP, as asked for\n2 tasks over tcp: ")


def test_what_is_refused_is_a_sentence(tmp_path):
    for words, says in (
        (("none:64:1:2:512",), "model 'none' is none of"),
        (("tiny-llama:64:0.05:2:512", "--tasks", 1), "--tasks is 1: at least 2"),
        (
            ("tiny-llama:64:0.0001:2:512", "--backend", "cpu", "--transport", "tcp"),
            "rank 0 ended with 2 and said: penstock: ",
        ),
    ):
        done = hosts(*words, "--out", tmp_path)
        assert done.returncode == 2 and says in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
