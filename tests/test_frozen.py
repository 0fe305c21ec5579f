"""Frozen layers have no gradient, no optimizer state and no update, and change nothing else.

The oracle is a training of all layers by the same engine: without clipping, the trained layers of a
step get the bits that they get there, because a gradient depends on nothing below it. That the
gradients themselves are right is what tests/test_parity.py shows."""

import subprocess

import numpy as np
import pytest
from conftest import BUILD, words_of_training
from penstock import Hardware, InvalidError, ModelConfig, Plan, StateError, TensorFile, Trainer
from test_budget import LONG_ROUNDS, PACKED_ROUNDS, batch_of, decisions, model_dir  # noqa: F401

STEPS = 3
CASES = {
    "embedding": ("llama", "fp32", PACKED_ROUNDS, 1),
    "embedding-and-blocks": ("llama", "bf16", LONG_ROUNDS, 4),
    "all-but-the-head": ("qwen3-tied", "fp32-master", PACKED_ROUNDS, 7),
    "tied-and-biases": ("qwen2-tied", "bf16", LONG_ROUNDS, 3),
}


@pytest.fixture(scope="module")
def hardware():
    return Hardware.estimate(2, "cpu")


def train(folder, plan, steps):
    """Losses, weights before and after, and the gradients of the last step."""
    with Trainer(folder, plan, batch_of(plan), lr=3e-3, seed=11) as t:
        before = {name: t.read(name).tobytes() for name in t.params}
        losses, grads = [metrics.loss for metrics in t.steps(steps)], {}
        for name in t.params:
            try:
                grads[name] = t.grad(name).tobytes()
            except StateError as refused:
                assert name in str(refused) and "frozen" in str(refused)
        return losses, before, {name: t.read(name).tobytes() for name in t.params}, grads


@pytest.mark.parametrize("case", CASES)
def test_trained_layers_get_the_gradients_of_a_training_of_all(case, model_dir, hardware):  # noqa: F811
    name, recipe, cut, n = CASES[case]
    folder = model_dir(name)
    model = ModelConfig.read(folder)
    kw = {"recipe": recipe, "clip_norm": 0, "threads": 2, "hardware": hardware} | cut
    _, _, _, want = train(folder, Plan(model, **kw), 1)
    _, before, after, got = train(folder, Plan(model, frozen_layers=n, **kw), 1)
    frozen = {p.name for p in model.params() if p.unit < n}
    assert set(got) == set(want) - frozen and frozen
    # with tied embeddings the lm_head, which is the table, has no gradient: nothing else changes
    assert all(got[k] == want[k] for k in got)
    assert all((before[k] == after[k]) == (k in frozen) for k in before)


# with all blocks frozen there is one plan for all caps
@pytest.mark.parametrize("case", [c for c in CASES if c != "all-but-the-head"])
def test_caps_do_not_change_a_frozen_training(case, model_dir, hardware):  # noqa: F811
    name, recipe, cut, n = CASES[case]
    folder = model_dir(name)
    model = ModelConfig.read(folder)
    kw = {"recipe": recipe, "threads": 2, "hardware": hardware, "frozen_layers": n} | cut
    all_of_it = Plan(model, **kw)
    least, _ = Plan.smallest(model, **kw)
    most = all_of_it.report["device_used_bytes"]
    plans = {decisions(all_of_it): all_of_it}
    for i in range(4):
        plan = Plan(model, device_mem=least + (most - least) * i // 4, **kw)
        plans.setdefault(decisions(plan), plan)
    runs = [train(folder, plan, STEPS) for plan in plans.values()]
    assert len(runs) >= 2
    assert all(run[0] == runs[0][0] and run[2] == runs[0][2] for run in runs)


def test_a_frozen_training_takes_less_memory_and_fewer_flops(model_dir, hardware):  # noqa: F811
    model = ModelConfig.read(model_dir("llama"))
    kw = {"recipe": "fp32-master", "threads": 2, "hardware": hardware} | PACKED_ROUNDS
    full, half = (Plan(model, frozen_layers=n, **kw).report for n in (0, 4))
    n_frozen = sum(int(np.prod(p.shape)) for p in model.params() if p.unit < 4)
    # the master copy, two states and the gradient of what is frozen
    saved = n_frozen * (4 + 8 + 2)
    assert full["host_used_bytes"] - half["host_used_bytes"] > saved * 0.9
    assert half["model_flops"] < full["model_flops"]


def test_freezing_all_layers_is_refused(model_dir, hardware):  # noqa: F811
    model = ModelConfig.read(model_dir("llama"))
    with pytest.raises(InvalidError, match="8 layers would be frozen.*has 8"):
        Plan(model, seq_len=64, frozen_layers=8, hardware=hardware)


def test_the_command_freezes_too(tiny_model, tiny_shard, tmp_path):
    options = ["--recipe", "fp32", "--save-dtype", "fp32", "--frozen-layers", "2"]
    words = words_of_training(tiny_model, tiny_shard, "--steps", 2, "--out", tmp_path / "out")
    subprocess.run([BUILD / "bin/penstock", *words, *options], check=True)
    model = ModelConfig.read(tiny_model)
    before, after = TensorFile(tiny_model), TensorFile(tmp_path / "out")
    for p in model.params():
        assert np.array_equal(before.read(p.name), after.read(p.name)) == (p.unit < 2), p.name
