"""docs/tutorial.md, followed in a clean checkout: every shell block as it stands, in order, with a
check of what each step promises. Training and all after it take minutes."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import BUILD, HANGS_S, ROOT

PAGE = (ROOT / "docs/tutorial.md").read_text()
STEPS = {
    int(number): re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M)
    for number, text in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", PAGE, re.S | re.M)
}
long = pytest.mark.long


class Walk:
    """A user in the folder of a checkout, who has come up to a step."""

    def __init__(self, folder):
        self.folder, self.said = folder, {}
        # make prints what it would do: the tests run against what it has built
        self.env = {**os.environ, "MAKEFLAGS": "n", "PYTHONPATH": str(folder / "python")}
        self.env.update(PENSTOCK_BUILD=str(BUILD), COLUMNS="100", HF_HUB_OFFLINE="1")

    def shell(self, block):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", ". build/venv/bin/activate\n" + block],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANGS_S,
        )
        assert done.returncode == 0, f"{block}\nsaid:\n{done.stdout}"
        return done.stdout

    def step(self, number):
        """What the blocks of a step say. The steps before it are run first; none runs twice."""
        for n in range(1, number + 1):
            if n not in self.said:
                self.said[n] = "".join(map(self.shell, STEPS[n]))
        return self.said[number]

    def metrics(self, run):
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("tutorial") / "penstock"
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    programs = folder / "build/venv/bin"  # in place of what `make python` would install
    programs.mkdir(parents=True)
    for name, module in (("python", ""), ("penstock", "-m penstock "), ("pip", "-c pass ")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    return Walk(folder)


def test_the_page_has_its_steps_in_order_and_no_shell_block_outside_them():
    assert list(STEPS) == list(range(1, len(STEPS) + 1)) and all(STEPS.values())
    assert sum(map(len, STEPS.values())) == PAGE.count("```sh\n")


def test_the_targets_of_make_exist(walk):
    assert "pip" in walk.step(1) and "./python" in walk.step(1)


def test_text_becomes_token_shards_with_a_validation_split(walk):
    assert "0.0% of the tokens are padding" in walk.step(2)
    about = json.loads((walk.folder / "my_shards/dataset.json").read_text())
    assert 0.04 < about["val"]["tokens"] / about["tokens"] < 0.08


def test_a_fresh_model_has_the_size_that_the_page_names(walk):
    assert "5,475,584 parameters" in walk.step(3) and "5,475,584 parameters" in PAGE


def test_the_plan_streams_under_the_cap(walk):
    said = walk.step(4)
    assert re.search(r"^device memory +2[34]\.\d MiB of 24\.0 MiB", said, re.M)
    assert int(re.search(r"\((\d) of 8 units[,)]", said)[1]) < 8  # or ", 6 more kept ..."


@long
def test_a_kill_leaves_a_whole_checkpoint_and_watch_says_that_the_run_crashed(walk):
    assert "crashed" in walk.step(5)
    assert (walk.folder / "my_run/checkpoints/step-00000060/manifest.json").exists()
    assert not (walk.folder / "my_trained").exists()


@long
def test_the_resumed_run_has_the_bits_of_one_that_never_crashed(walk):
    assert "model saved in my_trained" in walk.step(6)
    walk.shell("penstock train --config my_run/run.toml --run-dir other_run --out other --quiet")
    resumed, whole = (
        [(m["step"], m["loss"], m["grad_norm"], m.get("val_loss")) for m in walk.metrics(run)]
        for run in ("my_run", "other_run")
    )
    assert resumed == whole and len(whole) == 200
    weights, others = (
        hashlib.sha256((walk.folder / out / "model.safetensors").read_bytes()).digest()
        for out in ("my_trained", "other")
    )
    assert weights == others


@long
def test_the_validation_loss_falls_and_the_report_is_written(walk):
    assert "perplexity" in walk.step(7)
    assert (walk.folder / "my_run/report.html").stat().st_size > 50_000
    losses = [m["val_loss"] for m in walk.metrics("my_run") if "val_loss" in m]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.8


@long
def test_the_model_and_a_checkpoint_say_something(walk):
    assert "decode 39 tokens" in walk.step(8) and "decode 19 tokens" in walk.step(8)


@long
def test_transformers_opens_the_model_and_says_the_same(walk):
    said = walk.step(9)
    greedy = walk.shell(
        "penstock generate --model my_trained --prompt 'def test_' --max-new-tokens 20 --dtype fp32 "
        "--quiet"
    )
    assert "def test_" + greedy.strip("\n") in said and "within tolerance" in said


@long
def test_the_adapter_learns_and_its_sum_with_the_model_answers(walk):
    assert "decode" in walk.step(10)
    about = json.loads((walk.folder / "my_chats/dataset.json").read_text())
    assert 0.3 < about["train"]["targets"] / about["train"]["tokens"] < 0.7
    assert (walk.folder / "my_adapter/adapter_model.safetensors").exists()
    losses = [m["val_loss"] for m in walk.metrics("my_adapter") if "val_loss" in m]
    assert losses[-1] < losses[0]


@long
def test_the_exports_open(walk):
    import gguf
    from transformers import AutoModelForCausalLM

    walk.step(11)
    assert len(gguf.GGUFReader(walk.folder / "my_tuned.gguf").tensors) == 57
    model = AutoModelForCausalLM.from_pretrained(walk.folder / "my_tuned_bf16", dtype="auto")
    assert str(model.dtype) == "torch.bfloat16"


@pytest.fixture(scope="module", autouse=True)
def what_was_said(walk):
    """With TUTORIAL_OUT=FILE, what every step said is written there, for the page."""
    yield
    if out := os.environ.get("TUTORIAL_OUT"):
        with open(out, "w") as file:
            for number, said in walk.said.items():
                print(f"== {number}\n{said}", file=file)
