"""What goes wrong in the middle of a run of the binary: one sentence, an exit code, whole files or
none."""

import json
import os
import re
import resource
import shutil
import subprocess
import time

import numpy as np
import pytest
from conftest import BUILD, HANGS_S, words_of_training, write_shard
from safetensors.torch import load_file, save_file

BINARY = BUILD / "bin/penstock"
CHECKED_AT_OPEN = 1 << 20  # tokens of a shard (data.h)


def train(model, data, *more, cwd, file_limit=None):
    def limit():  # writes past the limit then fail with EFBIG, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    words = [BINARY, *words_of_training(model, data, *more)]
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=HANGS_S,
        preexec_fn=limit if file_limit else None,
    )


def one_sentence(done, code, pattern):
    lines = done.stderr.splitlines()
    assert done.returncode == code and len(lines) == 1 and lines[0].startswith("penstock: "), (
        done.stderr
    )
    assert re.search(pattern, lines[0]), lines[0]


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", autouse=True)
def profiled(cache_of_this_run):
    subprocess.run([BINARY, "profile", "--quick"], check=True, capture_output=True)


def whole_model(path):
    return sorted(
        p.name
        for p in path.iterdir()
        if p.suffix != ".jsonl" and p.name not in ("plan.json", "timeline.json")
    ) == ["config.json", "model.safetensors"]


def test_a_file_is_no_model_directory(tiny_model, tiny_shard, tmp_path):
    for path in (tiny_shard, tiny_model / "config.json", tiny_model / "model.safetensors"):
        one_sentence(
            train(path, tiny_shard, "--run-dir", "run", cwd=tmp_path),
            2,
            "is a file: give the model's directory",
        )
    assert list(tmp_path.iterdir()) == []


def test_parents_of_out_and_of_the_run_directory_are_made_and_named(
    tiny_model, tiny_shard, tmp_path
):
    """A slip in a long path is seen before the first step; a directory whose parent is there is
    made without a word."""
    ask = [
        BINARY,
        *f"train --model {tiny_model} --data {tiny_shard} --seq-len 64 --steps 1".split(),
    ]
    for places, notes in (
        (["--run-dir", "run", "--out", "a/b/c/"], ["--out a/b/c/: its parent a/b"]),
        (["--run-dir", "x/run", "--out", "out"], ["--run-dir x/run: its parent x"]),
        (["--out", "d/out"], ["--out d/out: its parent d"]),
        (["--out", tmp_path / "e"], []),
    ):
        done = subprocess.run([*ask, *places], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if "its parent" in line]
        assert said == [f"penstock: {note} does not exist and will be made" for note in notes]
        assert done.stderr.find("its parent") < done.stderr.find("step 1/1")
    assert whole_model(tmp_path / "a/b/c") and [p.name for p in (tmp_path / "a/b").iterdir()] == [
        "c"
    ]


def test_a_token_past_the_vocabulary_deep_in_a_shard_ends_the_run_and_the_complete_steps_are_saved(
    tiny_model, tmp_path
):
    tokens = np.arange(CHECKED_AT_OPEN + 100_000) % 500
    tokens[CHECKED_AT_OPEN:] = 513  # a tenth of the sequences, met soon in a shuffled order
    shard = write_shard(tmp_path / "late.bin", tokens)
    done = train(
        tiny_model,
        shard,
        *"--shuffle --seed 3 --tokens-per-step 64 --steps 500 --run-dir run --out out".split(),
        cwd=tmp_path,
    )
    one_sentence(
        done, 1, r"late\.bin: token 1\d{6} of the shard is 513: the model's vocabulary has 512"
    )
    n = len(metrics(tmp_path / "run"))
    assert (
        1 <= n < 200
        and [m["step"] for m in metrics(tmp_path / "run")] == list(range(n))
        and whole_model(tmp_path / "out")
    )


def test_a_shard_that_is_cut_off_during_the_run_is_named(tiny_model, tmp_path):
    shard = write_shard(tmp_path / "cut.bin", np.arange(200_000) % 500)
    process = subprocess.Popen(
        [
            BINARY,
            *words_of_training(tiny_model, shard, "--run-dir", tmp_path / "run", "--steps", 10**6),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + HANGS_S
    while not ((tmp_path / "run/metrics.jsonl").exists() and metrics(tmp_path / "run")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.truncate(shard, 2000)
    _, stderr = process.communicate(timeout=HANGS_S)
    assert process.returncode == 1 and re.fullmatch(
        r"penstock: .*cut\.bin: was cut from 401024 to 2000 bytes while it was in use.*\n", stderr
    ), stderr


def test_weights_that_look_fresh_get_one_warning(tiny_model, tiny_shard, tmp_path):
    """As transformers saves them where no key of a directory matches; not those of init_model.py,
    and not where one norm was trained."""
    weights = load_file(tiny_model / "model.safetensors")
    models = [tiny_model, *(shutil.copytree(tiny_model, tmp_path / name) for name in "ab")]
    save_file(weights, models[1] / "model.safetensors", {"format": "pt"})
    weights["model.layers.3.post_attention_layernorm.weight"][-1] += 0.5
    save_file(weights, models[2] / "model.safetensors", {"format": "pt"})
    data = ["--data", tiny_shard, "--seq-len", "64"]
    for model, warned in zip(models, (False, True, False), strict=True):
        for words in (
            ["eval", *data, "--steps", "1"],
            ["train", *data, "--steps", "1", "--run-dir", "run"],
            ["generate", "--tokens", "1", "--max-new-tokens", "1"],
        ):
            done = subprocess.run(
                [BINARY, *words, "--model", model], cwd=tmp_path, capture_output=True, text=True
            )
            assert done.returncode == 0 and done.stderr.count("freshly initialised") == warned, (
                done.stderr
            )
            shutil.rmtree(tmp_path / "run", ignore_errors=True)


@pytest.mark.parametrize("command", ["train", "eval"])
def test_weights_that_are_not_finite_are_named(tiny_model, tiny_shard, tmp_path, command):
    model, name = shutil.copytree(tiny_model, tmp_path / "m"), "model.layers.2.mlp.up_proj.weight"
    weights = load_file(model / "model.safetensors")
    weights[name][3, 5] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    words = [BINARY, command, "--model", model, "--data", tiny_shard, "--seq-len", "64", "--quiet"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    one_sentence(
        done, 1, rf"step 1: {name} ha[sd] weights that are not finite.*: this model is damaged"
    )
    assert "--lr" not in done.stderr and "updates" not in done.stderr


def test_an_error_amid_updates_says_what_it_means_for_the_model(tiny_model, tiny_shard, tmp_path):
    """Without clipping units are updated while the step goes on: the model is of two steps."""
    given = ("--lr", "1e30", "--clip-norm", 0, "--out", "out", "--run-dir", "run", "--quiet=false")
    done = train(tiny_model, tiny_shard, *given, cwd=tmp_path)
    steps = len(metrics(tmp_path / "run"))
    why = (
        rf"penstock: step {steps + 1}: (.*); this was during a step's updates: some weights, also "
    )
    why += r"in a model that is saved now, may be one step ahead of the others\n"
    (what,) = re.findall(why, done.stderr)
    assert done.returncode == 1 and "since the step before" not in what
    many = "" if steps == 1 else "s"
    said = f"saving out, as the error left the model after {steps} complete step{many}\n"
    assert said in done.stderr and (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_leaves_no_half_written_model(tiny_model, tiny_shard, tmp_path, existing):
    if existing:
        assert (
            train(
                tiny_model,
                tiny_shard,
                *"--steps 1 --run-dir run --out out".split(),
                cwd=tmp_path,
            ).returncode
            == 0
        )
        before = (tmp_path / "out/model.safetensors").read_bytes()
    done = train(
        tiny_model,
        tiny_shard,
        *"--steps 2 --run-dir run --out out --force --save-wait 0".split(),
        cwd=tmp_path,
        file_limit=200_000,
    )
    one_sentence(done, 1, "out.*model.safetensors.*writing .* bytes failed: File too large")
    assert sorted(p.name for p in tmp_path.iterdir()) == (["out", "run"] if existing else ["run"])
    if existing:
        assert (
            whole_model(tmp_path / "out")
            and (tmp_path / "out/model.safetensors").read_bytes() == before
        )


def test_a_full_disk_cuts_no_line_of_metrics_and_no_plan(tiny_model, tiny_shard, tmp_path):
    done = train(
        tiny_model,
        tiny_shard,
        *"--steps 50 --trace-steps 0 --run-dir run --no-save".split(),
        cwd=tmp_path,
        file_limit=4000,
    )
    one_sentence(done, 1, "metrics.jsonl cannot be written: File too large")
    text = (tmp_path / "run/metrics.jsonl").read_text()
    assert text.endswith("}\n") and len(metrics(tmp_path / "run")) > 3
    more = ("--steps", 2, "--run-dir", "other", "--no-save")
    done = train(tiny_model, tiny_shard, *more, cwd=tmp_path, file_limit=1000)
    one_sentence(done, 1, "plan.json cannot be written: File too large")
    assert list((tmp_path / "other").iterdir()) == []
