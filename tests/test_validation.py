"""Validation beside training: its loss, its memory, and that training does not see it."""

import json
import math
import subprocess

import numpy as np
import pytest
import torch
from conftest import BUILD, ROOT, words_of_training, write_shard
from penstock import (
    BudgetError,
    Dataset,
    Hardware,
    InvalidError,
    ModelConfig,
    Plan,
    StateError,
    Trainer,
)
from penstock.plot import plot
from penstock.shards import BEGINS_DOCUMENT, IS_TARGET, write_mask
from test_budget import LONG_ROUNDS, PACKED_ROUNDS, batch_of, model_dir  # noqa: F401
from transformers import AutoModelForCausalLM

STEPS = 3


@pytest.fixture(scope="module")
def hardware():
    return Hardware.read(ROOT / "tests/golden/hardware-cpu.json")


def write_val(path, n):
    """The first @n of 4,001 tokens of which some are no targets, and documents of 1 to 200."""
    rng = np.random.default_rng(8)
    flags = np.where(rng.random(4001) < 0.7, IS_TARGET, 0)
    flags[np.cumsum(rng.integers(1, 200, 60))[:30]] |= BEGINS_DOCUMENT
    write_shard(path, rng.integers(0, 1500, 4001)[:n])
    write_mask(path, flags[:n])
    return path


@pytest.fixture(scope="module")
def val_shard(tmp_path_factory):
    return write_val(tmp_path_factory.mktemp("val") / "val.bin", 4001)


def weights(trainer):
    return {name: trainer.read(name).tobytes() for name in trainer.params}


def trained(folder, plan, val, save=None):
    """Validation losses after each step, training losses, and the weights."""
    out, losses = [], []
    with Trainer(folder, plan, batch_of(plan), lr=1e-2, seed=5, val=val) as t:
        for m in t.steps(STEPS, validate_every=1 if val else 0):
            losses.append(m.loss)
            out.append(m.validation and (m.validation.loss, m.validation.valid_tokens))
        if save:
            t.save(*save)
        return out, losses, weights(t)


CASES = {
    "llama-master-clip": ("llama", "fp32-master", 1.0, PACKED_ROUNDS, 640 + 448),
    "llama-bf16": ("llama", "bf16", 0.0, PACKED_ROUNDS, 300),
    "qwen2-tied-fp32-clip": ("qwen2-tied", "fp32", 1.0, LONG_ROUNDS, 3 * 256),
    "qwen3-tied-bf16-clip": ("qwen3-tied", "bf16", 1.0, LONG_ROUNDS, 3900),
}


LONG = {"llama-bf16", "qwen2-tied-fp32-clip", "qwen3-tied-bf16-clip"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.long] if c in LONG else []) for c in CASES]
)
def test_same_bits_under_every_cap_and_as_eval_and_training_unchanged(
    case,
    model_dir,  # noqa: F811
    hardware,
    val_shard,
    tmp_path,
):
    name, recipe, clip, cut, tokens = CASES[case]
    folder = model_dir(name)
    model = ModelConfig.read(folder)
    kw = {"recipe": recipe, "clip_norm": clip, "threads": 2, "hardware": hardware} | cut
    least, _ = Plan.smallest(model, **kw)
    dtype = "fp32" if recipe == "fp32" else "bf16"
    want = None
    for cap in (None, least, least + (1 << 20), least + (4 << 20)):
        plan = Plan(model, device_mem=cap, val_tokens=tokens, **kw)
        without = Plan(model, device_mem=cap, **kw)
        for arena in ("device_arena_bytes", "host_arena_bytes"):
            assert plan.report[arena] == without.report[arena]
        val, losses, after = trained(
            folder, plan, val_shard, (tmp_path / "saved", dtype) if cap is None else None
        )
        if cap in (None, least):
            assert (losses, after) == trained(folder, without, None)[1:]
        want = want or (val, after)
        assert (val, after) == want
        assert len({loss for loss, _ in val}) == STEPS

    step, whole = plan.report["val_step_tokens"], tokens // cut["seq_len"] * cut["seq_len"]
    assert plan.report["val_tokens"] == whole
    cut = cut | {"tokens_per_step": step}
    plan = Plan(model, forward_only=True, **(kw | cut))
    split = write_val(tmp_path / "first.bin", whole + 1)
    with Trainer(tmp_path / "saved", plan, split) as t:
        steps = [(m.loss, m.valid_tokens) for m in t.steps(-(-whole // step))]
    total = sum(valid for _, valid in steps)
    nll = 0.0
    for loss, valid in steps:
        nll += loss * valid
    assert want[0][-1] == (nll / total, total)


def split_folder(path, train, val, flags=None):
    """What penstock data writes, as far as training reads it."""
    (path / "val").mkdir(parents=True)
    write_shard(path / "train-00000.bin", train)
    write_shard(path / "val/val-00000.bin", val)
    if flags is not None:
        write_mask(path / "val/val-00000.bin", flags)
        write_mask(path / "train-00000.bin", np.full(len(train), IS_TARGET))
    (path / "dataset.json").write_text("{}\n")
    return path


def train(*words, code=0, **kw):
    run = subprocess.run(
        [BUILD / "bin/penstock", *map(str, words)], capture_output=True, text=True, **kw
    )
    assert run.returncode == code, run.stderr
    return run


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    rng = np.random.default_rng(4)
    return split_folder(
        tmp_path_factory.mktemp("split") / "data",
        rng.integers(0, 512, 6000),
        rng.integers(0, 512, 850),
        np.where(rng.random(850) < 0.6, IS_TARGET, 0),
    )


CLI = ["--recipe", "fp32", "--save-dtype", "fp32", "--tokens-per-step", 512, "--lr", "1e-2"]
CLI += ["--chunk-tokens", 128, "--chunks-per-round", 2, "--lr-schedule", "constant"]


def test_the_split_is_used_and_its_loss_is_evals_and_transformers(tiny_model, split, tmp_path):
    words = [w for w in words_of_training(tiny_model, split, *CLI) if w != "--quiet"]
    run = train(*words, "--steps", 25, "--val-every", 10, "--val-tokens", 832, "--json",
                "--out", tmp_path / "out")  # fmt: skip
    assert run.stderr.count(f"validation on 832 tokens of {split}/val every 10 steps") == 1
    lines = metrics_of(tmp_path / "out")
    assert [m["step"] + 1 for m in lines if "val_loss" in m] == [10, 20, 25]
    last, total = lines[-1], json.loads(run.stdout)
    assert last["val_perplexity"] == pytest.approx(math.exp(last["val_loss"]), rel=1e-12)
    assert total["validations"] == 3 and total["val_step"] == 25
    assert total["val_loss"] == last["val_loss"]
    assert total["val_share"] == total["val_total_s"] / total["wall_s"] < 1
    assert total["val_total_s"] == pytest.approx(sum(m.get("val_s", 0) for m in lines), rel=1e-9)

    n = 832 // 64  # all 13 sequences, in steps of 7 and 6
    words = ["--model", tmp_path / "out", "--data", split / "val", "--seq-len", 64, "--quiet"]
    words += ["--recipe", "fp32", "--chunk-tokens", 128, "--chunks-per-round", 2, "--json"]
    got = json.loads(train("eval", *words, "--tokens-per-step", 448).stdout)
    assert last["val_tokens"] == got["tokens"] == 832 and got["steps"] == 2
    assert (last["val_loss"], last["val_valid_tokens"]) == (got["loss"], got["valid_tokens"])

    data = Dataset(split / "val", 512)
    read = [data.read(64, i) for i in range(n)]
    ids, targets = (torch.from_numpy(np.stack(x)).long() for x in zip(*read))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    with torch.no_grad():
        logits = model(ids).logits.flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-1).item()
    # a row's loss is rounded to fp32, its logits are sums of 128 products in fp32
    assert last["val_loss"] == pytest.approx(want, rel=1e-5)


def test_a_resumed_run_validates_at_the_same_steps(tiny_model, split, tmp_path):
    words = words_of_training(tiny_model, split, *CLI)
    words += ["--val-every", 3, "--checkpoint-every", 4, "--run-dir"]
    train(*words, tmp_path / "whole", "--steps", 10)
    want = metrics_of(tmp_path / "whole")
    assert [m["step"] + 1 for m in want if "val_loss" in m] == [3, 6, 9, 10]
    train(*words, tmp_path / "parts", "--steps", 5)
    train(*words, tmp_path / "parts", "--steps", 10, "--resume", "latest")
    got = metrics_of(tmp_path / "parts")
    for key in ("step", "loss", "val_loss"):
        assert [m.get(key) for m in got] == [m.get(key) for m in want]
    # without validation: the same losses, and no word of it
    run = train(*words, tmp_path / "none", "--steps", 10, "--val", "none", code=2)
    assert "--val-every is given without validation data" in run.stderr
    train(*words_of_training(tiny_model, split, *CLI, "--val", "none", "--steps", 10, "--run-dir"),
          tmp_path / "none")  # fmt: skip
    assert [m["loss"] for m in metrics_of(tmp_path / "none")] == [m["loss"] for m in want]
    assert not any("val_loss" in m for m in metrics_of(tmp_path / "none"))


def test_defaults_and_the_summary_for_people(tiny_model, tmp_path):
    rng = np.random.default_rng(5)
    folder = split_folder(tmp_path / "d", rng.integers(0, 512, 40000), rng.integers(0, 512, 3000))
    words = ["train", "--model", tiny_model, "--data", folder, "--seq-len", 64]
    words += ["--tokens-per-step", 128, "--steps", 40, "--run-dir", tmp_path / "run"]
    run = train(*words)
    # 40 steps: every 10; a sixteenth of 10 steps' tokens are less than a step's
    assert "validation on 128 tokens of" in run.stderr and "every 10 steps" in run.stderr
    assert "step 40: validation loss " in run.stderr and "  val " in run.stderr
    assert "4 validations took " in run.stdout and "% of the run" in run.stdout
    assert sum("val_loss" in m for m in metrics_of(tmp_path / "run")) == 4
    plot(tmp_path / "run/metrics.jsonl", tmp_path / "loss.png")


def test_what_is_refused(tiny_model, split, tmp_path):
    words = words_of_training(tiny_model, split, *CLI, "--steps", 2)
    missing = tmp_path / "missing"
    short = write_shard(tmp_path / "short.bin", np.arange(40))
    alone = words_of_training(tiny_model, split / "train-00000.bin", "--steps", 2)
    for more, says in (
        ([*words, "--val", missing], str(missing)),
        ([*words, "--val", short], "lower --seq-len"),
        ([*words, "--val-tokens", 5000], "lower --val-tokens"),
        ([*words, "--val-every", 0], "--val-every 0"),
        ([*alone, "--val-every", 1], "--val-every is given without validation data"),
        ([*alone, "--val-tokens", 64], "--val-tokens is given without validation data"),
        ([*alone, "--val", "none", "--val-tokens", 64], "--val-tokens is given without"),
    ):
        run = train(*more, code=2, cwd=tmp_path)
        assert says in run.stderr and run.stderr.count("\n") == 1, run.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["short.bin"]


def test_plan_counts_the_validations_memory(tiny_model, hardware):
    model = ModelConfig.read(tiny_model)
    kw = {"seq_len": 64, "tokens_per_step": 512, "threads": 2, "hardware": hardware}
    kw |= {"chunk_tokens": 64, "chunks_per_round": 2, "reserve": 64 << 20, "trace_steps": 0}
    without, plan = Plan(model, **kw), Plan(model, val_tokens=512, **kw)
    more = plan.report["host_used_bytes"] - without.report["host_used_bytes"]
    assert more > 0 and plan.report["val_s"] > 0 and without.report["val_tokens"] == 0
    assert "validation       512 tokens in 1 step of" in str(plan)
    assert plan.json()["val_tokens"] == 512 and "val_tokens" not in without.json()
    with pytest.raises(InvalidError, match="has no validation"):
        Plan(model, val_tokens=512, forward_only=True, **kw)


def test_validate_between_steps_alone_and_before_the_first(tiny_model, hardware, val_shard):
    model = ModelConfig.read(tiny_model)
    kw = {"seq_len": 64, "tokens_per_step": 128, "threads": 2, "hardware": hardware}
    tokens = np.arange(128) % 512

    def batch(step):
        return tokens, tokens

    val = write_shard(val_shard.with_name("small.bin"), np.arange(1000) % 512)
    with Trainer(tiny_model, Plan(model, val_tokens=300, **kw), batch, lr=0.0, val=val) as t:
        first = t.validate()
        assert (first.tokens, first.valid_tokens) == (256, 256)
        # the validation has copied the weights that stay on the device: a write would not reach them
        staying = "model.norm.weight"
        with pytest.raises(StateError, match="before the first validation"):
            t.write(staying, t.read(staying))
        for _ in t.steps(3):
            with pytest.raises(StateError, match="in flight"):
                t.validate()
            break
        assert t.validate().loss == first.loss  # lr is 0
    plan = Plan(model, **kw)
    with pytest.raises(InvalidError, match="without val_tokens"):
        Trainer(tiny_model, plan, batch, val=val)
    with Trainer(tiny_model, plan, batch) as t, pytest.raises(InvalidError, match="no val_dataset"):
        t.validate()


GUESTS = {"val_tokens": 512, "batch_ramp": [(64, 2), (256, 2)]}


def test_a_plan_holds_ramp_and_validation(tiny_model, hardware):
    """Caps from the least for training alone to the least for all of it: one byte less is refused
    with that figure, and the plan that is found is within its caps."""
    model = ModelConfig.read(tiny_model)
    kw = {"seq_len": 64, "tokens_per_step": 512, "threads": 2, "hardware": hardware}
    kw |= {"chunk_tokens": 64, "chunks_per_round": 2, "reserve": 64 << 20, "trace_steps": 0}
    alone, all_of_it = Plan.smallest(model, **kw), Plan.smallest(model, **kw, **GUESTS)
    free = Plan(model, **kw, **GUESTS)
    for at, (name, used) in enumerate((("device", "device_used"), ("host", "host_used"))):
        assert alone[at] < all_of_it[at] or name == "device"
        assert all_of_it[at] >= alone[at]
        plan = Plan(model, **{f"{name}_mem": all_of_it[at]}, **kw, **GUESTS)
        assert plan.report[f"{used}_bytes"] == all_of_it[at]
        Plan(model, **{f"{name}_mem": alone[at]}, **kw)
        with pytest.raises(BudgetError) as refused:
            Plan(model, **{f"{name}_mem": all_of_it[at] - 1}, **kw, **GUESTS)
        said = str(refused.value)
        assert f"of {name} memory" in said and f"raise {name}_mem" in said, said
        if all_of_it[at] > alone[at]:
            assert said.startswith("with "), said
        for cap in np.linspace(all_of_it[at], free.report[f"{used}_bytes"], 3).astype(int):
            plan = Plan(model, **{f"{name}_mem": int(cap)}, **kw, **GUESTS)
            assert plan.report[f"{used}_bytes"] <= cap
