"""One TOML file holds a run: --config, what the command line overrides, the resolved run beside the
results, the same file from Python."""

import json
import os
import re
import shutil
import subprocess
import sys

import penstock as ps
import pytest
from conftest import ROOT
from penstock import Trainer, run_file
from penstock.run_file import tomllib
from test_cli import BINARY, penstock, refused, words

EXAMPLES = sorted((ROOT / "docs").glob("*.toml"))
HEADING = "# A run of penstock as it was resolved: every option with the value used.\n"


@pytest.fixture
def run(tiny_model, tiny_shard, tmp_path):
    """A run's file that works, and its text."""
    text = f"""# a run
[model]
model = "{tiny_model}"
recipe = "bf16"
[data]
data = ['{tiny_shard}']
seq-len = 64
tokens-per-step = 256
shuffle = true
[optimizer]
lr = 2e-3
[schedule]
lr-schedule = "cosine"
warmup-steps = 1
[memory]
device-mem = "20MiB"
[run]
steps = 4
seed = 7
run-dir = "run"
out = "trained"
"""
    (tmp_path / "my.toml").write_text(text)
    return text


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in lines]


def train(tmp_path, *args):
    done = penstock("train", "--quiet", *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# ---- reading -------------------------------------------------------------------------------------


def test_a_file_is_the_run_of_the_same_options(run, tiny_model, tiny_shard, tmp_path):
    train(tmp_path, "--config", "my.toml")
    options = {
        "--model": tiny_model,
        "--data": tiny_shard,
        "--seq-len": 64,
        "--tokens-per-step": 256,
        "--shuffle": None,
        "--lr": 2e-3,
        "--lr-schedule": "cosine",
        "--warmup-steps": 1,
        "--device-mem": "20MiB",
        "--steps": 4,
        "--seed": 7,
        "--run-dir": "other",
    }
    train(tmp_path, *words(options))
    assert len(metrics(tmp_path / "run")) == 4
    assert metrics(tmp_path / "run") == metrics(tmp_path / "other")


def test_the_command_line_overrides_the_file_wherever_it_stands(run, tmp_path):
    changes = ("--steps", "2", "--shuffle=false", "--run-dir=changed", "--out", "elsewhere")
    train(tmp_path, *changes, "--config=my.toml")
    resolved = tomllib.loads((tmp_path / "changed/run.toml").read_text())
    assert len(metrics(tmp_path / "changed")) == 2
    assert resolved["data"]["shuffle"] is False and resolved["run"]["seed"] == 7
    assert (tmp_path / "elsewhere").exists() and not (tmp_path / "trained").exists()


def test_a_list_on_the_command_line_replaces_the_files(run, tiny_shard, tmp_path):
    shutil.copy(tiny_shard, tmp_path / "b.bin")
    shutil.copy(tiny_shard, tmp_path / "c.bin")
    train(tmp_path, "--config", "my.toml", "--data", "b.bin", "--data", "c.bin")
    resolved = tomllib.loads((tmp_path / "run/run.toml").read_text())
    assert resolved["data"]["data"] == ["b.bin", "c.bin"]


def test_plan_and_eval_take_the_same_file(run, tmp_path):
    plan = json.loads(penstock("plan", "--config", "my.toml", "--json", cwd=tmp_path).stdout)
    assert plan["tokens_per_step"] == 256
    done = penstock("eval", "--config", "my.toml", "--json", cwd=tmp_path)
    # once through the data, and not the file's 4 steps
    assert json.loads(done.stdout)["tokens"] == 20000 // 256 * 256, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["my.toml"]


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("seq-len = 64", "seq_len = 64", r"my.toml:7: there is no key seq_len in \[data\]: did you"),
        ("lr = 2e-3", "seed = 1", r"my.toml:11: there is no key seed in \[optimizer\]: did you .*"
         r"seed in \[run\]\?"),
        ("lr = 2e-3", "learning_rate = 1", r"my.toml:11: there is no key learning_rate in "
         r"\[optimizer\]: did you mean lr in \[optimizer\]\?"),
        ("[optimizer]", "[optimiser]", r"my.toml:11: there is no key lr in \[optimiser\]"),
        ("lr = 2e-3", "frobnicate = 1", r"my.toml:11: there is no key frobnicate in \[optimizer\]: "
         "penstock train --help-all"),
        ("lr = 2e-3", "lr = '2e-3'", "my.toml:11: lr takes a number"),
        ("lr = 2e-3", "lr = [2e-3]", "my.toml:11: lr takes a number"),
        ("seq-len = 64", "seq-len = true", "my.toml:7: seq-len takes a number"),
        ("seq-len = 64", "seq-len = 6.5", "my.toml:7: seq-len 6.5: give a whole number from 1"),
        ("seq-len = 64", "seq-len = 0", "my.toml:7: seq-len 0: give a whole number from 1"),
        ("shuffle = true", "shuffle = 1", "my.toml:9: shuffle takes true or false"),
        ('recipe = "bf16"', "recipe = 'fp16'", "my.toml:4: recipe fp16: give fp32, fp32-master"),
        ('recipe = "bf16"', "recipe = 16", "my.toml:4: recipe takes a string"),
        ('"20MiB"', '"20Mi"', "my.toml:16: device-mem 20Mi is no size"),
        ('"20MiB"', "20", "my.toml:16: device-mem 20 is 20 bytes: write 20GiB"),
        ('"20MiB"', "true", "my.toml:16: device-mem takes a number or a string"),
        ("steps = 4", "steps = 4\nsteps = 5", r"my.toml:19: the key steps stands in \[run\] for the"),
        ("steps = 4", "steps 4", "my.toml:18: the key steps has no = after it"),
        ("steps = 4", 'config = "x"', r"my.toml:18: there is no key config in \[run\]: pen"),
        ('out = "trained"', 'out = ""', "my.toml:21: out is empty"),
        ("data = [", "data = [1, ", "my.toml:6: the array has values of two kinds"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_line_and_nothing_is_written(
    run, tmp_path, old, new, message
):
    (tmp_path / "my.toml").write_text(run.replace(old, new, 1))
    refused(penstock("train", "--config", "my.toml", cwd=tmp_path), message)
    # a key that the command does not take is checked all the same
    refused(penstock("plan", "--config", "my.toml", cwd=tmp_path), message)
    assert [p.name for p in tmp_path.iterdir()] == ["my.toml"]


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    refused(penstock("train", "--config", "no.toml", cwd=tmp_path), "--config no.toml cannot be")
    refused(penstock("train", "--config", ".", cwd=tmp_path), "--config . cannot be read: Is a dir")
    refused(penstock("train", "--config", cwd=tmp_path), "--config needs a value")


# ---- the resolved run ----------------------------------------------------------------------------


def test_the_resolved_run_has_every_option_and_gives_the_same_bits(run, tmp_path):
    train(tmp_path, "--config", "my.toml", "--tokens-per-step=2048", "--device-mem=3MiB")
    text = (tmp_path / "run/run.toml").read_text()
    named = {
        *(key for table in tomllib.loads(text).values() for key in table),
        *re.findall(r"^# (\S+) is not given$", text, re.M),
    }
    listed = set(re.findall(r"^  --(\S+)", penstock("train", "--help-all").stdout, re.M))
    keys = {f"fp8-{k}" for k in ("bf16-first", "bf16-last", "bf16-down", "head")}
    keys |= {f"sample-{k}" for k in ("tokens", "temperature", "top-k", "top-p", "seed")}
    keys |= {"fp8-fast-accumulation"}
    assert named == listed - {"help", "help-all", "config", "fp8", "sample"} | keys
    # without the cap another plan is faster: the cut of the batch is the first run's
    resolved = text.replace("device-mem = 3145728\n", "")
    assert resolved != text
    (tmp_path / "again.toml").write_text(resolved)
    train(tmp_path, "--config", "again.toml", "--run-dir", "run2", "--out", "trained2")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "run2")
    weights = "model.safetensors"
    assert (tmp_path / "trained" / weights).read_bytes() == (
        tmp_path / "trained2" / weights
    ).read_bytes()


def test_the_resolved_run_is_a_fixed_point(run, tmp_path):
    train(tmp_path, "--config", "my.toml")
    first = (tmp_path / "run/run.toml").read_text()
    train(tmp_path, "--config", "run/run.toml", "--force")
    assert first.startswith(HEADING)
    assert (tmp_path / "run/run.toml").read_text() == first  # --force is of one command


def test_texts_keep_their_characters(run, tmp_path):
    out = 'a "b"\\ü\t\x7f'
    train(tmp_path, "--config", "my.toml", "--steps", "1", "--out", out)
    assert tomllib.loads((tmp_path / "run/run.toml").read_text())["run"]["out"] == out


def test_a_text_that_is_not_utf8_is_left_out_in_words(run, tmp_path):
    done = subprocess.run(
        [BINARY, "train", "--config", "my.toml", "--quiet", "--steps=1", b"--out=a\xff"],
        cwd=tmp_path,
    )
    assert done.returncode == 0
    text = (tmp_path / "run/run.toml").read_text()
    assert "# out is not UTF-8: give it on the command line\n" in text
    assert json.loads((tmp_path / "run/summary.json").read_text())["model"] == "a\ufffd"


def test_a_run_toml_of_the_users_is_not_replaced(run, tmp_path):
    (tmp_path / "run.toml").write_text(run)
    pattern = "run.toml is no file that penstock wrote, and the resolved run would replace it"
    refused(penstock("train", "--config", "run.toml", "--run-dir", ".", cwd=tmp_path), pattern)
    assert (tmp_path / "run.toml").read_text() == run


# ---- Python --------------------------------------------------------------------------------------


def test_python_trains_the_same_run(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(tmp_path, "--config", "my.toml")
    with Trainer.from_file("my.toml") as trainer:
        ours = [(m.step, m.loss, m.grad_norm, m.lr) for m in trainer.steps(trainer.total_steps)]
    assert ours == metrics(tmp_path / "run")
    with Trainer.from_file("my.toml", steps=2, lr=1e-3, device_mem=None) as trainer:
        assert [m.lr for m in trainer.steps(2)] == [5e-4, 1e-3]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "train", "--config", "run/run.toml", "--quiet"]
        + ["--run-dir", "run2", "--out", "trained2"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
    )
    assert done.returncode == 0 and metrics(tmp_path / "run2") == ours


def test_python_measures_memory_where_the_command_does(run, tmp_path):
    (tmp_path / "my.toml").write_text(run)
    for replan in ("off", "auto"):
        settings = run_file.prepare(tmp_path / "my.toml", {"replan": replan})[-1]
        assert settings["trust_rates"] is (replan == "off")


def test_python_refuses_what_the_command_refuses(run, tmp_path):
    (tmp_path / "my.toml").write_text(run.replace("seed = 7", "seed = -7"))
    with pytest.raises(ps.InvalidError, match="my.toml:19: seed -7: give a whole number"):
        run_file.read(tmp_path / "my.toml")
    (tmp_path / "my.toml").write_text(run.replace("seq-len = 64", ""))
    with pytest.raises(ps.InvalidError, match="seq-len is missing"):
        Trainer.from_file(tmp_path / "my.toml")
    with pytest.raises(TypeError, match="'sed' is no option of a run"):
        Trainer.from_file(tmp_path / "my.toml", sed=1)


# ---- the examples --------------------------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_the_examples_train(example, tiny_model, tiny_shard, tmp_path):
    assert len(EXAMPLES) == 2
    small = {"--model": tiny_model, "--data": tiny_shard, "--seq-len": 64, "--steps": 2}
    small |= {"--tokens-per-step": 128, "--run-dir": "run", "--out": "out"}
    train(tmp_path, "--config", example, "--host-mem", "1GiB", *words(small))
    assert len(metrics(tmp_path / "run")) == 2
    ours = tomllib.loads(example.read_text())
    resolved = tomllib.loads((tmp_path / "run/run.toml").read_text())
    for table in ("optimizer", "schedule", "checkpoint"):
        for key, value in ours.get(table, {}).items():
            assert resolved[table][key] == value


def test_info_prints_the_file_with_every_option(run, tmp_path):
    done = penstock("info", "--config", "my.toml", cwd=tmp_path)
    shown = tomllib.loads(done.stdout)
    assert shown["data"]["seq-len"] == 64 and shown["optimizer"]["clip-norm"] == 1
    assert "# chunk-tokens is not given" in done.stdout
    refused(penstock("info", "--config", "my.toml", "--json", cwd=tmp_path), "--config is shown al")


def test_a_key_that_was_taken_out_is_read_where_it_is_off(tmp_path):
    for value, code in (("false", 0), ("true", 2)):
        (tmp_path / "run.toml").write_text(f"[model]\nfp8-saved-gate-up = {value}\n")
        done = penstock("info", "--config", tmp_path / "run.toml")
        assert done.returncode == code and ("was taken out" in done.stderr) == (code == 2)
