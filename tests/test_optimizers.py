"""Lion and SGD with momentum in whole trainings: against PyTorch with the trainer's own gradients, and
what is refused."""

import json
import subprocess
import sys

import numpy as np
import penstock
import pytest
import torch
from conftest import BUILD, HANGS_S, ROOT
from penstock import Hardware, ModelConfig, Plan, Trainer

STEPS, LR = 100, 1e-3
U = 2.0**-24  # the error of one rounding, relative


def command(*args):
    words = [str(a) for a in (BUILD / "bin/penstock", *args)]
    return subprocess.run(words, capture_output=True, text=True, timeout=HANGS_S)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """Two layers of 32: a hundred steps in PyTorch beside it take seconds."""
    folder = tmp_path_factory.mktemp("optimizers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = json.loads((ROOT / "models/tiny-llama.json").read_text()) | sizes | heads
    (folder / "in.json").write_text(json.dumps(config))
    words = [ROOT / "models/init_model.py", folder / "in.json", folder / "model", "--seed", "1"]
    subprocess.run([sys.executable, *map(str, words)], check=True, capture_output=True)
    return folder / "model"


@pytest.fixture(scope="module")
def model(tiny_model):
    return ModelConfig.read(tiny_model)


def make_plan(model, optimizer, **kw):
    kw = {"recipe": "fp32", "clip_norm": 0, "tokens_per_step": 128, "chunk_tokens": 64} | kw
    return Plan(model, seq_len=64, optimizer=optimizer, hardware=Hardware.estimate(2, "cpu"), **kw)


def test_the_norm_of_the_step_before_clips(model, tiny_model, tiny_shard):
    """SGD without momentum and decay, element by element in fp32: the same bits."""
    clip, lr = np.float64(0.5), np.float32(LR)
    plan = make_plan(model, "sgd", clip_norm=clip, clip_by="previous")
    with Trainer(tiny_model, plan, tiny_shard, lr=LR, momentum=0.0, weight_decay=0.0) as trainer:
        before, scales = None, []
        for _ in range(5):
            old = {name: trainer.read(name) for name in trainer.params}
            norm = next(trainer.steps(1)).grad_norm
            # the first step changes nothing
            scale = np.float32(min(1.0, clip / (before + 1e-6)) if before else 0)
            scales.append(scale)
            for name, w in old.items():
                wanted = w - lr * (trainer.grad(name) * scale)
                assert np.array_equal(trainer.read(name), wanted), name
            before = norm
    assert scales[0] == 0 and len(set(scales)) == 5 and max(scales) < 1


def follow(model, folder, shard, optimizer, step, **hypers):
    """Trains STEPS steps in fp32 and hands each parameter's gradients to step(state, gradient); the
    trained weights and the states, by name."""
    plan = make_plan(model, optimizer)
    with Trainer(folder, plan, shard, lr=LR, seed=3, **hypers) as trainer:
        decays = {name: len(p.shape) == 2 for name, p in trainer.params.items()}
        states = {name: step(None, trainer.read(name), decays[name]) for name in trainer.params}
        losses = []
        for _ in range(STEPS):
            losses.append(next(trainer.steps(1)).loss)
            for name in trainer.params:
                states[name] = step(states[name], trainer.grad(name), decays[name])
        weights = {name: trainer.read(name) for name in trainer.params}
    assert all(np.isfinite(losses)) and losses[-1] < losses[0]
    return weights, states


@pytest.mark.parametrize("nesterov,decay", [(False, 0.0), (True, 0.1)])
def test_sgd_follows_torch_over_100_steps(model, tiny_model, tiny_shard, nesterov, decay):
    """torch.optim.SGD in fp64 with the gradients that the trainer had. The bound runs along, to first
    order: each operation adds U of the larger result (with |.|) and carries its operands' errors."""
    momentum, lr = float(np.float32(0.9)), float(np.float32(LR))
    decay = float(np.float32(decay))

    def step(state, x, decays):
        wd = decay if decays else 0.0
        if state is None:
            w = torch.nn.Parameter(torch.from_numpy(x.astype(np.float64)))
            kw = dict(lr=lr, momentum=momentum, weight_decay=wd, nesterov=nesterov)
            zero = torch.zeros_like(w.data)
            return w, torch.optim.SGD([w], **kw), [zero] * 3
        w, sgd, (e_w, e_m, m) = state
        before = w.detach().clone()
        w.grad = torch.from_numpy(x.astype(np.float64))
        d = w.grad + wd * before
        e_d = wd * (e_w + U * before.abs()) + U * d.abs()
        new = momentum * m + d
        e_m = momentum * (e_m + U * m.abs()) + e_d + U * new.abs()
        used = d + momentum * new if nesterov else new
        e_used = e_m
        if nesterov:
            e_used = e_d + momentum * (e_m + U * new.abs()) + U * used.abs()
        sgd.step()
        e_w = e_w + lr * (e_used + U * used.abs()) + U * w.detach().abs()
        return w, sgd, (e_w, e_m, new)

    weights, states = follow(
        model, tiny_model, tiny_shard, "sgd", step, nesterov=nesterov, weight_decay=decay
    )
    worst = 0
    for name, (w, sgd, (e_w, _, m)) in states.items():
        assert torch.allclose(sgd.state[w]["momentum_buffer"], m, rtol=1e-9, atol=1e-15), name
        error = np.abs(weights[name] - w.detach().numpy())
        bound = 1.01 * e_w.numpy() + 1e-45  # to first order; a denormal's last place
        assert (error <= bound).all(), (name, (error / bound).max())
        worst = max(worst, error.max())
    assert worst > 0  # fp32 was used, and not the reference itself


def test_lion_follows_the_papers_algorithm_over_100_steps(model, tiny_model, tiny_shard):
    """Chen et al. 2023, algorithm 2, in PyTorch: momentum and the sign's operand in fp32, one
    rounding an operation as here, so that no sign can differ; the weights in fp64, from which ours
    part by three roundings a step: lr * decay, and two subtractions."""
    b1, b2 = np.float32(0.9), np.float32(0.99)
    lr, decay = np.float32(LR), np.float32(0.3)

    def step(state, x, decays):
        x = torch.from_numpy(x.copy())
        if state is None:
            return x.double(), torch.zeros_like(x), torch.zeros(x.shape, dtype=torch.float64)
        w, m, bound = state
        c = float(b1) * m + float(np.float32(1) - b1) * x
        m = float(b2) * m + float(np.float32(1) - b2) * x
        wd = float(decay) if decays else 0.0
        w = w - float(lr) * (torch.sign(c).double() + wd * w)
        return w, m, bound + 3 * U * (w.abs() + float(lr))

    weights, states = follow(model, tiny_model, tiny_shard, "lion", step)
    worst = 0
    for name, (w, _, bound) in states.items():
        error = np.abs(weights[name] - w.numpy())
        assert (error <= 1.01 * bound.numpy()).all(), (name, (error / bound.numpy()).max())
        worst = max(worst, error.max())
    assert worst > 0


@pytest.mark.parametrize(
    "recipe,each,bits",
    [
        pytest.param("fp32", 4, 0, marks=pytest.mark.long),
        pytest.param("fp32-master", 4, 0, marks=pytest.mark.long),
        ("bf16", 2, 0),
        ("fp24-master", 1.0625, 8),
    ],
)
def test_plans_count_half_of_adamws_state(tiny_model, tmp_path, recipe, each, bits):
    """Both arenas together: a state less is its bytes less, to the units of 2 MiB that arenas are."""
    config = json.loads((tiny_model / "config.json").read_text()) | {"vocab_size": 1 << 18}
    (tmp_path / "config.json").write_text(json.dumps(config))  # a plan needs no weights
    model = ModelConfig.read(tmp_path)
    plans = {
        o: make_plan(model, o, recipe=recipe, state_bits=bits) for o in ("adamw", "lion", "sgd")
    }
    assert all(plan.json()["optimizer"] == o for o, plan in plans.items())
    adamw, lion, sgd = (
        p.report["device_arena_bytes"] + p.report["host_arena_bytes"] for p in plans.values()
    )
    assert abs(adamw - lion - each * model.n_elements) <= 4 << 20 < each * model.n_elements // 4
    assert lion == sgd
    assert f"lion: {each:.3g} bytes of state a parameter" in str(plans["lion"])
    if bits:
        assert "a parameter      takes 7.13 bytes: weights 3, gradients 2, " in str(plans["adamw"])
        with pytest.raises(penstock.InvalidError, match="state_bits is 4: give 8, or leave it out"):
            make_plan(model, "adamw", state_bits=4)


def test_a_model_whose_parameters_share_a_block_has_no_state_in_8_bits(tiny_model, tmp_path):
    sizes = {"hidden_size": 20, "num_attention_heads": 1, "head_dim": 6}  # q has 120 elements
    config = json.loads((tiny_model / "config.json").read_text()) | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    make_plan(ModelConfig.read(tmp_path), "adamw")
    with pytest.raises(penstock.InvalidError, match="k_proj.weight begins at element .* 64: leave"):
        make_plan(ModelConfig.read(tmp_path), "adamw", state_bits=8)


REFUSED = [
    ("adamw", {"momentum": 0.9}, "--momentum is of --optimizer sgd, and the optimizer is adamw"),
    ("adamw", {"nesterov": True}, "--nesterov is of --optimizer sgd, and the optimizer is adamw"),
    ("lion", {"eps": 1e-8}, "--eps is of --optimizer adamw, and the optimizer is lion"),
    ("sgd", {"beta1": 0.9}, "--beta1 is of --optimizer adamw and lion, and the optimizer is sgd"),
    ("sgd", {"momentum": 1.0}, "--momentum 1 of sgd must be at least 0 and below 1"),
    ("sgd", {"momentum": 0.0, "nesterov": True}, "--nesterov needs a --momentum above 0"),
    ("lion", {"beta2": 0.0}, "--beta2 0 of lion must be at least 1e-06 and below 1"),
    ("lion", {"beta1": 1.0}, "--beta1 1 of lion must be at least 0 and below 1"),
    ("adamw", {"beta2": 0.99999999999}, "--beta2 1 of adamw must be at least 0 and below 1"),
]


@pytest.mark.parametrize("optimizer,hypers,words", REFUSED)
def test_hyperparameters_of_another_optimizer_or_out_of_range_are_refused(
    model, tiny_model, tiny_shard, tmp_path, optimizer, hypers, words
):
    with pytest.raises(penstock.InvalidError, match=words.replace("--", "")):
        Trainer(tiny_model, make_plan(model, optimizer), tiny_shard, **hypers)
    options = []
    for name, value in hypers.items():
        options += [f"--{name}"] if value is True else [f"--{name}", f"{value:.17g}"]
    out = command(
        "train", "--model", tiny_model, "--data", tiny_shard, "--seq-len", 64, "--backend", "cpu",
        "--optimizer", optimizer, "--run-dir", tmp_path / "run", *options,
    )  # fmt: skip
    assert out.returncode == 2 and words in out.stderr and out.stderr.count("\n") == 1, out.stderr
    assert not (tmp_path / "run").exists()


def test_an_unknown_optimizer_a_nan_and_another_plans_optimizer_are_refused(
    model, tiny_model, tiny_shard
):
    with pytest.raises(penstock.InvalidError, match='"adam" is unknown: use adamw, lion or sgd'):
        make_plan(model, "adam")
    with pytest.raises(ValueError, match="momentum is nan"):
        Trainer(tiny_model, make_plan(model, "sgd"), tiny_shard, momentum=float("nan"))
    out = command("plan", "--model", tiny_model, "--seq-len", 64, "--optimizer", "adam")
    assert out.returncode == 2 and "--optimizer adam: give adamw, lion or sgd" in out.stderr


def test_the_command_plans_and_trains_with_each(tiny_model, tiny_shard, tmp_path):
    common = ("--model", tiny_model, "--seq-len", 64, "--backend", "cpu", "--threads", 2)
    losses = {}
    for optimizer, options in (
        ("adamw", ()),
        ("lion", ("--state-bits", 8, "--convert-state")),
        ("sgd", ("--nesterov",)),
    ):
        run = tmp_path / optimizer
        out = command(
            "train", *common, "--data", tiny_shard, "--steps", 4, "--optimizer", optimizer,
            "--run-dir", run, *options,
        )  # fmt: skip
        assert out.returncode == 0, out.stderr
        assert ("--convert-state converts nothing" in out.stderr) == (optimizer == "lion")
        lines = (run / "metrics.jsonl").read_text().splitlines()
        losses[optimizer] = [json.loads(line)["loss"] for line in lines]
        out = command("plan", *common, "--optimizer", optimizer)
        each = 4 if optimizer == "adamw" else 2
        assert f"{optimizer}: {each} bytes of state a parameter" in out.stdout
    first, *others = losses.values()
    assert all(o[0] == first[0] and o[2:] != first[2:] for o in others)
