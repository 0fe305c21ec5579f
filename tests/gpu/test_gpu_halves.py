"""Heads with a `score` and quantized bases on a GPU: steps beside transformers, and a base that
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
from test_scores import LABELS, TYPES, documents, expected, write
from test_steps import hardware
from tolerance import (
    A_LAYER,
    FORWARD_A_LAYER,
    FORWARD_FUSED_ATTENTION,
    FORWARD_HEAD,
    FUSED_ATTENTION,
    check_gradients,
    delta,
    loss_noise,
)

ROW, SEQ, N_SEQ = 24, 64, 4
WIDTHS = dict(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=2)
CONFIGS = {
    "llama": llama(**WIDTHS),
    "experts": qwen3_moe(**WIDTHS, num_experts=4, moe_intermediate_size=128, mlp_only_layers=[]),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @functools.cache
    def make(name, problem=None):
        where, cfg = tmp_path_factory.mktemp("halves") / name, CONFIGS[name]
        where.mkdir()
        if problem:
            cfg = dict(cfg, num_labels=LABELS[problem], problem_type=TYPES[problem])
            cfg["architectures"] = ["LlamaForSequenceClassification"]
        (where / "config.json").write_text(json.dumps(cfg))
        model = ModelConfig.read(where)
        params = (model.score(problem, LABELS[problem]) if problem else model).params()
        tensors = {p.name: draw(p.name, p.shape, False).to(torch.bfloat16) for p in params}
        safetensors.torch.save_file(tensors, where / "model.safetensors")
        return where

    return make


# ---- heads ---------------------------------------------------------------------------------------


def scored(where, problem, data, backend):
    """The first step's loss and all gradients in bf16."""
    plan = Plan(
        ModelConfig.read(where).score(problem, LABELS[problem]),
        seq_len=ROW,
        tokens_per_step=Dataset(data, 512).n_sequences(ROW) * ROW,
        recipe="bf16",
        clip_norm=0.0,
        hardware=hardware(backend),
        threads=hardware(backend).n_threads,
    )
    with Trainer(where, plan, data=data, lr=0.0) as trainer:
        (m,) = trainer.steps(1)
        return m.loss, {n: trainer.grad(n) for n in trainer.params}


@pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("problem", LABELS)
def test_a_step_of_every_problem(directory, tmp_path, problem, backend):
    """Beside transformers in fp64, within penstock.tolerance's bounds: roundings of two layers, of
    the head's norm and product in both directions, and of one chunk. The loss's slope by a
    document's scores is 2 |z - y| of a square, else a vector of at most sqrt(2)."""
    where, docs, spread = directory("llama", problem), documents(problem), {}
    loss, _, z, grads = expected(where, problem, docs, spread)
    found = scored(where, problem, write(tmp_path, problem, docs), backend)
    more, n = backend == "cuda", WIDTHS["num_hidden_layers"]
    bound = delta("bf16", n, 1 + 2 * FORWARD_HEAD, 0, A_LAYER + more * FUSED_ATTENTION)
    of_z = delta("bf16", n, FORWARD_HEAD, 0, FORWARD_A_LAYER + more * FORWARD_FUSED_ATTENTION)
    slope = 2 * loss**0.5 if problem == "regression" else 2**0.5
    assert abs(found[0] - loss) < slope * loss_noise(of_z * (z**2).mean() ** 0.5, len(docs))
    exact = {name: torch.from_numpy(g) for name, g in grads.items()}
    check_gradients(found[1], (loss, exact, {k: s**0.5 for k, s in spread.items()}), bound)


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
