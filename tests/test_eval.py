"""A forward-only plan computes the loss alone: `penstock eval`, Plan(forward_only=True)."""

import json
import math
import subprocess

import numpy as np
import pytest
import torch
from conftest import BUILD
from penstock import Hardware, ModelConfig, Plan, Trainer
from test_budget import LONG_ROUNDS, PACKED_ROUNDS, batch_of, model_dir  # noqa: F401
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def hardware():
    return Hardware.estimate(2, "cpu")


def losses(folder, plan, n):
    with Trainer(folder, plan, batch_of(plan), lr=1e-3, clip_norm=0.0, seed=5) as t:
        before = {name: t.read(name).tobytes() for name in t.params}
        out = [m.loss for m in t.steps(n)]
        return out, all(t.read(name).tobytes() == before[name] for name in t.params)


@pytest.mark.parametrize("recipe", ["fp32", "fp32-master", "bf16"])
@pytest.mark.parametrize(
    "name, cut",
    [("llama", PACKED_ROUNDS), ("qwen2-tied", LONG_ROUNDS), ("qwen3-tied", LONG_ROUNDS)],
)
def test_the_loss_is_the_trainings_first_under_any_cap(name, cut, recipe, model_dir, hardware):  # noqa: F811
    folder = model_dir(name)
    model = ModelConfig.read(folder)
    kw = {"recipe": recipe, "clip": False, "threads": 2, "hardware": hardware} | cut
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


def test_the_command_refuses_what_training_refuses(tiny_model, tiny_shard, tmp_path):
    for words, says in (
        (["--data", tiny_shard, "--seq-len", 64], "--model is missing"),
        (["--model", tiny_model, "--seq-len", 64], "--data is missing"),
        (["--model", tiny_model, "--data", tiny_shard], "--seq-len is missing"),
        (["--model", tiny_model, "--data", tiny_shard, "--seq-len", 64, "--lr", 1], "--lr"),
    ):
        run = subprocess.run(
            [BUILD / "bin/penstock", "eval", *map(str, words)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 2 and says in run.stderr and run.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
