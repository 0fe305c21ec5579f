"""A forward-only plan computes the loss alone: `penstock eval`, Plan(forward_only=True)."""

import json
import math
import subprocess

import numpy as np
import pytest
import torch
from conftest import BUILD, write_shard
from penstock import Hardware, ModelConfig, Plan, Trainer
from penstock.shards import IS_TARGET, write_mask
from test_budget import LONG_ROUNDS, PACKED_ROUNDS, batch_of, model_dir  # noqa: F401
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def hardware():
    return Hardware.estimate(2, "cpu")


def losses(folder, plan, n):
    with Trainer(folder, plan, batch_of(plan), lr=1e-3, seed=5) as t:
        before = {name: t.read(name).tobytes() for name in t.params}
        out = [m.loss for m in t.steps(n)]
        return out, all(t.read(name).tobytes() == before[name] for name in t.params)


MODELS = ["llama", "qwen2-tied", "qwen3-tied"]
RECIPES = ["fp32", "fp32-master", "bf16"]


# Each model, and each recipe; all pairs with the long ones.
@pytest.mark.parametrize(
    "name, recipe",
    [
        pytest.param(n, r, marks=() if MODELS.index(n) == RECIPES.index(r) else pytest.mark.long)
        for n in MODELS
        for r in RECIPES
    ],
)
def test_the_loss_is_the_trainings_first_under_any_cap(name, recipe, model_dir, hardware):  # noqa: F811
    cut = PACKED_ROUNDS if name == "llama" else LONG_ROUNDS
    folder = model_dir(name)
    model = ModelConfig.read(folder)
    kw = {"recipe": recipe, "clip_norm": 0, "threads": 2, "hardware": hardware} | cut
    full = Plan(model, **kw)
    want, _ = losses(folder, full, 1)
    plan = Plan(model, forward_only=True, **kw)
    least, _ = Plan.smallest(model, forward_only=True, **kw)
    small = Plan(model, forward_only=True, device_mem=least, **kw)
    for p in (plan, small):
        got, same_weights = losses(folder, p, 2)
        assert got[0] == want[0] and got[1] != got[0] and same_weights
    for key in ("device_used_bytes", "host_used_bytes"):
        assert plan.report[key] < full.report[key]
    # every product and attention has twice its forward FLOPs in the backward pass
    assert 3 * plan.report["model_flops"] == full.report["model_flops"]
    assert plan.report["recompute_flops"] == 0


def test_the_command_prints_the_mean_over_all_targets(tiny_model, tiny_shard):
    tokens = np.fromfile(tiny_shard, np.uint16, offset=1024).astype(np.int64)
    seq_len, steps = 64, 3
    words = ["--model", tiny_model, "--data", tiny_shard, "--seq-len", seq_len, "--recipe", "fp32"]
    words += ["--tokens-per-step", 4 * seq_len, "--steps", steps, "--json", "--quiet"]
    run = subprocess.run(
        [BUILD / "bin/penstock", "eval", *map(str, words)], check=True, capture_output=True
    )
    got = json.loads(run.stdout)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    n = 4 * steps
    ids = torch.from_numpy(
        np.stack([tokens[i * seq_len : (i + 1) * seq_len + 1] for i in range(n)])
    )
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    # a row's loss is rounded to fp32, its logits are sums of 128 products in fp32
    assert got["loss"] == pytest.approx(want, rel=1e-5)
    assert got["perplexity"] == pytest.approx(math.exp(got["loss"]), rel=1e-12)
    assert (got["tokens"], got["valid_tokens"], got["steps"]) == (n * seq_len, n * seq_len, steps)


def mean_loss(folder, tokens, seq_len, targets=None):
    """transformers' mean over the targets of all whole sequences, and their number."""
    n = (len(tokens) - 1) // seq_len
    ids = torch.from_numpy(tokens[: n * seq_len + 1].astype(np.int64))
    wanted = ids[1:].clone()
    if targets is not None:
        wanted[~torch.from_numpy(targets[1 : n * seq_len + 1])] = -100
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(ids[:-1].view(n, seq_len)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted)
    return loss.item(), int((wanted >= 0).sum())


def command(*words):
    words = [BUILD / "bin/penstock", *words, "--quiet"]
    return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout


def test_every_target_counts_once_however_the_data_is_cut(tiny_model, tmp_path):
    """3, 12 and 20 sequences: of a step, of one and a half, and of two and a half."""
    rng = np.random.default_rng(3)
    words = ["eval", "--model", tiny_model, "--seq-len", 64, "--recipe", "fp32", "--json"]
    for n, rest, cuts in ((3, 40, ([],)), (12, 0, ([], [5], [12])), (20, 1, ([], [7]))):
        path, tokens = tmp_path / f"{n}.bin", rng.integers(0, 512, n * 64 + 1 + rest)
        write_shard(path, tokens)
        want, targets = mean_loss(tiny_model, tokens, 64)
        assert targets == n * 64
        for cut in cuts:
            more = ["--tokens-per-step", 64 * cut[0]] if cut else []
            got = json.loads(command(*words, "--data", path, *more))
            assert got["loss"] == pytest.approx(want, rel=1e-5)
            assert (got["tokens"], got["valid_tokens"]) == (n * 64, n * 64)
            assert got["left_out_tokens"] == rest
            assert got["steps"] == -(-n // (cut or [8])[0])
    # masks: the second of three steps has no target; and a part of the data, then some of it twice
    flags = np.zeros(len(tokens), np.uint8)
    flags[1 : 7 * 64], flags[15 * 64 :: 3] = IS_TARGET, IS_TARGET
    write_mask(path, flags)
    words += ["--data", path, "--tokens-per-step", 7 * 64]
    want, targets = mean_loss(tiny_model, tokens, 64, flags > 0)
    got = json.loads(command(*words))
    assert got["loss"] == pytest.approx(want, rel=1e-5) and got["valid_tokens"] == targets
    part = json.loads(command(*words, "--steps", 1))
    assert (part["tokens"], part["left_out_tokens"]) == (7 * 64, 13 * 64 + 1)
    again = json.loads(command(*words, "--steps", 6))
    assert (again["tokens"], again["valid_tokens"]) == (40 * 64, 2 * targets)
    assert again["loss"] == pytest.approx(got["loss"], rel=1e-12)
    words.remove("--json")
    assert command(*words).splitlines()[1].startswith("left out: 1 tokens of the data")


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_trainer_counts_what_is_left_for_the_last_step(tiny_model, tmp_path, gpus):
    """On several devices, and shuffled: each sequence once in a pass."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 512, 13 * 64 + 1)
    write_shard(tmp_path / "d.bin", tokens)
    want, _ = mean_loss(tiny_model, tokens, 64)
    plan = Plan(
        ModelConfig.read(tiny_model),
        seq_len=64,
        tokens_per_step=8 * 64,
        forward_only=True,
        recipe="fp32",
        gpus=gpus,
        hardware=Hardware.estimate(2, "cpu"),
    )
    for shuffle in (False, True):
        with Trainer(tiny_model, plan, tmp_path / "d.bin", shuffle=shuffle) as trainer:
            steps = [(m.loss, m.valid_tokens) for m in trainer.steps(4)]
        assert [v for _, v in steps] == [8 * 64, 5 * 64] * 2
        for one in (steps[:2], steps[2:]):
            got = sum(loss * v for loss, v in one) / (13 * 64)
            assert got == pytest.approx(want, rel=1e-5)
