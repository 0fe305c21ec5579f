"""A loss or gradient that is not finite: the run stops, or the step is skipped. All recipes,
optimizers and placements are in tests/native/test_train.c."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from conftest import BUILD, words_of_training, write_shard
from safetensors.numpy import load_file, save_file

TOKEN, BAD_STEP = 7, 2  # its embedding is infinite; it comes in this step alone


@pytest.fixture(scope="module")
def spoiled(tiny_model, tmp_path_factory):
    """A model and data of five steps of two sequences, the third of which has an infinite loss."""
    folder = tmp_path_factory.mktemp("spoiled")
    shutil.copytree(tiny_model, folder / "model")
    (file,) = (folder / "model").glob("*.safetensors")
    tensors = {name: np.array(x) for name, x in load_file(file).items()}
    tensors["model.embed_tokens.weight"][TOKEN] = np.inf
    save_file(tensors, file)
    tokens = np.random.default_rng(1).integers(8, 512, 5 * 128 + 1)
    tokens[BAD_STEP * 128 + 70] = TOKEN
    return folder / "model", write_shard(folder / "data.bin", tokens)


def train(spoiled, *more, code=0):
    words = words_of_training(*spoiled, "--recipe", "fp32", "--tokens-per-step", 128, *more)
    words.remove("--quiet")
    run = subprocess.run([BUILD / "bin/penstock", *words], capture_output=True, text=True)
    assert run.returncode == code, run.stderr
    return run


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_skipped_step_is_told_and_counted(spoiled, tmp_path):
    words = ["--non-finite", "skip", "--clip-norm", 0, "--run-dir"]
    run = train(spoiled, *words, tmp_path / "all", "--steps", 5)
    assert run.stderr.count("step 3 is skipped: its loss is not finite; 1 skipped so far") == 1
    assert "skipped         1 step," in run.stdout
    # the first step's line, and the last one's
    assert not re.search(r"^step 1/5 .* skipped ", run.stderr, re.M)
    assert re.search(r"^step 5/5  loss \S+  1 skipped  grad norm ", run.stderr, re.M)
    all_steps = metrics(tmp_path / "all")
    assert [m["n_skipped"] for m in all_steps] == [0, 0, 1, 1, 1]
    assert [m["loss"] is None for m in all_steps] == [False, False, True, False, False]
    train(spoiled, *words, tmp_path / "part", "--steps", 4, "--checkpoint-every", 4)
    train(spoiled, *words, tmp_path / "part", "--steps", 5, "--resume", "latest")
    parts = metrics(tmp_path / "part")
    for key in ("loss", "n_skipped"):
        assert [m[key] for m in parts] == [m[key] for m in all_steps]


def test_stopping_is_the_default_with_exit_code_1(spoiled, tmp_path):
    run = train(spoiled, "--steps", 5, "--run-dir", tmp_path, code=1)
    assert f"step {BAD_STEP + 1}: " in run.stderr and "not finite" in run.stderr
    assert len(metrics(tmp_path)) == BAD_STEP


def test_what_is_refused(spoiled, tmp_path):
    for more, says in (
        (["--non-finite", "ignore"], "stop or skip"),
        (["--max-skips", 0], "--max-skips 0"),
    ):
        run = train(spoiled, *more, "--run-dir", tmp_path / "r", code=2)
        assert says in run.stderr and run.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()
