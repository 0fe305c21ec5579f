"""Heads with a `score` and quantized bases on a GPU: steps beside the CPU backend, and a base that
stays quantized beside one that has its values in bf16, bit for bit."""

import functools
import json

import numpy as np
import pytest
import safetensors.torch
import torch
from families import llama, qwen3_moe
from penstock import Dataset, Lora, ModelConfig, Plan, Trainer
from test_families_steps import draw
from test_quantized_base import BASES, is_quantized
from test_scores import LABELS, documents, write
from test_steps import hardware

ROW, SEQ, N_SEQ = 24, 64, 4
WIDTHS = dict(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=2)
CONFIGS = {
    "llama": llama(**WIDTHS),
    "experts": qwen3_moe(**WIDTHS, num_experts=4, moe_intermediate_size=128, mlp_only_layers=[]),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @functools.cache
    def make(name):
        where = tmp_path_factory.mktemp("halves") / name
        where.mkdir()
        (where / "config.json").write_text(json.dumps(CONFIGS[name]))
        params = ModelConfig.read(where).params()
        tensors = {p.name: draw(p.name, p.shape, False).to(torch.bfloat16) for p in params}
        safetensors.torch.save_file(tensors, where / "model.safetensors")
        return where

    return make


# ---- heads ---------------------------------------------------------------------------------------


def scored(where, problem, data, backend, recipe):
    """The first step's loss, what is right, and all gradients."""
    plan = Plan(
        ModelConfig.read(where).score(problem, LABELS[problem]),
        seq_len=ROW,
        tokens_per_step=Dataset(data, 512).n_sequences(ROW) * ROW,
        recipe=recipe,
        hardware=hardware(backend),
        threads=hardware(backend).n_threads,
    )
    with Trainer(where, plan, data=data, lr=0.0, seed=7) as trainer:
        (m,) = trainer.steps(1)
        return m.loss, m.right, {n: trainer.grad(n) for n in trainer.params}


@pytest.mark.gpu
@pytest.mark.parametrize("problem", LABELS)
def test_a_step_of_every_problem(directory, tmp_path, problem):
    """Errors as in test_families_steps; so few rows that chance makes them differ by 4."""
    where, data = directory("llama"), write(tmp_path, problem, documents(problem))
    exact, usual = (scored(where, problem, data, "cpu", recipe) for recipe in ("fp32", "bf16"))
    found = scored(where, problem, data, "cuda", "bf16")
    assert found[0] == pytest.approx(exact[0], rel=0.02)
    for key, g in exact[2].items():
        errors = [np.linalg.norm(of[2][key] - g) for of in (found, usual)]
        assert 0 < errors[0] < 4 * errors[1], key


# ---- quantized bases -----------------------------------------------------------------------------


def adapted(where, base, weights=None, backend="cuda", **more):
    """Losses and adapters after two steps, and the base before them."""
    plan = Plan(
        ModelConfig.read(where),
        seq_len=SEQ,
        tokens_per_step=SEQ * N_SEQ,
        chunk_tokens=SEQ,
        chunks_per_round=2,
        deterministic=True,
        one_document=True,
        lora=Lora(4, 12, "q_proj,o_proj", base=base),
        hardware=hardware(backend),
        threads=hardware(backend).n_threads,
        **more,
    )

    def batch(step):
        tokens = np.random.default_rng(step).integers(0, 512, (N_SEQ, SEQ + 1), dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:]

    with Trainer(where, plan, batch, lr=3e-3, seed=11) as trainer:
        for name, values in (weights or {}).items():
            trainer.write(name, values)
        read = {n: trainer.read(n) for n in trainer.params if "lora_" not in n}
        losses = [m.loss for m in trainer.steps(2)]
        after = {n: trainer.read(n).tobytes() for n in trainer.params if "lora_" in n}
    return losses, after, read


@pytest.mark.gpu
@pytest.mark.parametrize("name, base", [(n, b) for n in CONFIGS for b in BASES])
def test_a_quantized_base_is_its_dequantized_values(directory, name, base):
    where = directory(name)
    losses, after, read = adapted(where, base)
    dense = {n: v for n, v in read.items() if is_quantized(n)}
    assert len(dense) >= 14
    assert adapted(where, "bf16", dense)[:2] == (losses, after)
    assert adapted(where, "bf16")[0] != losses
    on_cpu = adapted(where, base, backend="cpu")
    assert all(np.array_equal(on_cpu[2][n], v) for n, v in read.items())
    assert losses == pytest.approx(on_cpu[0], rel=0.01)
