"""The demo on a little text and few steps: every file it promises, and its one-sentence
refusals."""

import json
import os
import subprocess
import sys

import pytest
from conftest import BUILD, ROOT
from penstock import demo_chat


def demo(tmp_path, *args, module="demo"):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            f"penstock.{module}",
            "--build",
            BUILD,
            "--out",
            tmp_path / "demo",
            *map(str, args),
        ],
        text=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "python", "PENSTOCK_BUILD": str(BUILD)},
    )


def test_a_short_demo_leaves_everything_it_promises(tmp_path):
    done = demo(
        tmp_path, "--steps", 4, "--text", ROOT / "docs/design/planner.md", ROOT / "README.md"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "demo"
    assert {p.name for p in out.iterdir()} == set(
        (
            "data init model metrics.jsonl plan.json run.toml summary.json loss.png "
            "timeline.json timeline.png report.txt samples.txt"
        ).split()
    )
    assert all((out / name).read_bytes()[:4] == b"\x89PNG" for name in ("loss.png", "timeline.png"))
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0]
    plan = json.loads((out / "plan.json").read_text())
    assert (
        plan["device_used_bytes"] <= plan["device_mem_bytes"]
        and 0 < plan["host_used_bytes"] <= plan["host_mem_bytes"]
    )
    assert plan["resident_param_units"] < plan["n_units"]  # the caps force streaming
    report, samples = ((out / name).read_text() for name in ("report.txt", "samples.txt"))
    assert (
        "predicted and measured" in report
        and "where the time went" in report
        and f"loss {losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last" in report
    )
    assert (
        all(words in done.stdout.replace("\n", "") for words in report.splitlines()[0].split("; "))
        and "\x1b" not in report + samples
    )
    assert (
        samples.count("-" * 40) == 3
        and samples.startswith("def __init__(self")
        and samples.splitlines()[0] in done.stdout
    )
    assert (
        "where the time went" in done.stdout
        and "def __init__(self" in done.stdout
        and "step 4/4" in done.stderr
    )


@pytest.mark.parametrize(
    "text,pattern", [(["nowhere.txt"], "nowhere.txt"), (["LICENSE/none"], "LICENSE/none")]
)
def test_text_that_is_not_there_is_refused_in_one_sentence(tmp_path, text, pattern):
    done = demo(tmp_path, "--text", *text)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and pattern in done.stderr


def test_a_chat_demo_refuses_before_it_fetches(tmp_path):
    for words in (["--chats", "nowhere.jsonl"], ["--build", tmp_path]):
        done = demo(tmp_path, *words, module="demo_chat")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert not [*tmp_path.iterdir()]


def test_the_conversations_of_the_chat_demo_leave_out_what_it_asks():
    lines = [json.loads(line) for line in demo_chat.CHATS.read_text().splitlines()]
    answers = [turns["messages"][1]["content"] for turns in lines]
    assert len({*answers}) == len(lines) > 80 and all(a.startswith("Arr! ") for a in answers)
    asked = [q.rpartition(" ")[2].strip("?") for q in demo_chat.QUESTIONS]
    assert not any(word in str(turns) for turns in lines for word in asked)
