"""FP8 products of a GPU beside those of the CPU backend, which tests/test_fp8.py holds against
PyTorch."""

import functools
import json

import families
import numpy as np
import pytest
import reference as ref
import safetensors.torch
import torch
from penstock import Hardware, Lora, ModelConfig, Trainer
from test_families_steps import draw
from test_fp8 import DELTA_NET, LATENT
from test_steps import (
    LR,
    ONE_DOCUMENT,
    SAME_BITS,
    batch,
    config,
    first_step,
    make_plan,
    smallest,
    weights,
)

pytestmark = pytest.mark.gpu
ROWS = 96  # of a sequence: FP8 products take multiples of 16
SHORT = {"seq": ROWS, "tokens_per_step": 4 * ROWS, "layout": (ROWS, 2)}
FP8 = {"recipe": "fp8", "fp8_bf16_first": 0, "fp8_bf16_last": 0}


OTHERS = {"qwen3_5": families.qwen3_5(**DELTA_NET), "deepseek_v3": families.deepseek_v3(**LATENT)}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    @functools.cache
    def make(name):
        where = tmp_path_factory.mktemp("fp8") / name
        if name == "llama":
            return ref.write_directory(where, config("llama", 64), weights("llama", 64))
        where.mkdir()
        (where / "config.json").write_text(json.dumps(OTHERS[name]))
        tensors = {p.name: draw(p.name, p.shape, False) for p in ModelConfig.read(where).params()}
        safetensors.torch.save_file(tensors, where / "model.safetensors")
        return where

    return make


@pytest.fixture
def directory(directories):
    return directories("llama")


def data(step):
    tokens, targets = batch(step)
    return tokens[:, :ROWS].copy(), targets[:, :ROWS].copy()


@functools.cache
def gradients(where, backend, recipe):
    options = FP8 if recipe == "fp8" else {"recipe": recipe}
    plan = make_plan(where, backend, **(SHORT | options | ONE_DOCUMENT))
    return first_step(where, plan, data)


def trained(where, plan):
    """Losses, norms and the bytes of every weight after four steps."""
    with Trainer(where, plan, data, lr=LR, seed=5) as trainer:
        figures = [(m.loss, m.grad_norm) for m in trainer.steps(4)]
        return figures, {n: trainer.read(n).tobytes() for n in trainer.params}


@functools.cache
def adapter_gradients(where, backend, recipe, targets):
    options = FP8 if recipe == "fp8" else {"recipe": recipe}
    lora = Lora(4, 12, targets)
    plan = make_plan(where, backend, lora=lora, **(SHORT | options | ONE_DOCUMENT))
    with Trainer(where, plan, data, lr=0.0) as trainer:
        adapters = [p for p in trainer.params if "lora_" in p]
        for name in adapters:  # B of a fresh adapter is 0
            values = draw(name, trainer.read(name).shape, False).numpy()
            trainer.write(name, np.float32(0.1 if "lora_B" in name else 1) * values)
        (m,) = trainer.steps(1)
        return m.loss, m.fp8_flushed, {name: trainer.grad(name) for name in adapters}


def distance(a, b):
    """|a - b| / |b|"""
    a, b = (torch.as_tensor(x).double() for x in (a, b))
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


@pytest.mark.parametrize("name", ["llama", *OTHERS])
def test_gradients_are_nearer_to_the_cpu_than_fp8_is_to_bf16(directories, name):
    """Both quantise alike but for values that other roundings to bf16 take over a boundary of FP8.
    Quantising otherwise, as by another scale, would give errors of their own: root 2 farther."""
    where = directories(name)
    gpu, cpu, bf16 = (
        gradients(where, *of) for of in (("cuda", "fp8"), ("cpu", "fp8"), ("cpu", "bf16"))
    )
    shares = {}
    for param, exact in bf16.grads.items():
        fp8 = distance(cpu.grads[param], exact)
        assert fp8 > 0.01, param  # products were in FP8
        shares[param] = distance(gpu.grads[param], cpu.grads[param]) / fp8
    print("GPU - CPU, as a share of FP8 - bf16:", {n: round(s, 2) for n, s in shares.items()})
    print("losses:", gpu.loss, cpu.loss, bf16.loss)
    assert max(shares.values()) < 1


@pytest.mark.parametrize(
    "name, targets",
    [
        ("llama", "all-linear"),
        ("llama", "q_proj,v_proj"),
        ("qwen3_5", "all-linear"),
        ("deepseek_v3", "q_a_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"),
    ],
)
def test_gradients_of_adapters_are_nearer_to_the_cpu_than_fp8_is_to_bf16(
    directories, name, targets
):
    """As above, beside frozen weights. What is flushed is counted in the forward pass: some hundred
    values, of which independent ones would differ by less than a tenth."""
    where = directories(name)
    gpu, cpu, bf16 = (
        adapter_gradients(where, *of, targets)
        for of in (("cuda", "fp8"), ("cpu", "fp8"), ("cpu", "bf16"))
    )
    shares = {}
    for param, exact in bf16[2].items():
        fp8 = distance(cpu[2][param], exact)
        assert fp8 > 0.01, param  # products were in FP8
        shares[param] = distance(gpu[2][param], cpu[2][param]) / fp8
    print("GPU - CPU, as a share of FP8 - bf16:", {n: round(s, 2) for n, s in shares.items()})
    print("losses:", gpu[0], cpu[0], bf16[0], "flushed:", gpu[1], cpu[1])
    assert max(shares.values()) < 1
    assert gpu[1] > 0 and abs(gpu[1] / cpu[1] - 1) < 0.5


def test_fast_accumulation_changes_sums(directory):
    """On compute capability 9.0 it keeps fewer bits of a sum. Two runs without it are the same."""
    if Hardware.cached().as_dict()["compute_capability"] != 90:
        pytest.skip("fast accumulation has fewer bits on compute capability 9.0 alone")
    losses = []
    for fast in (False, False, True):
        options = SHORT | FP8 | ONE_DOCUMENT | {"deterministic": True}
        losses.append(
            first_step(
                directory, make_plan(directory, "cuda", fp8_fast_accumulation=fast, **options), data
            ).loss
        )
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("recipe", ["fp8", "fp8-master"])
def test_caps_give_the_same_bits(directory, recipe):
    options = SHORT | FP8 | {"recipe": recipe} | SAME_BITS
    most = make_plan(directory, "cuda", **options)
    least = smallest(
        directory, "cuda", **{k: v for k, v in options.items() if k != "seq"}, seq_len=ROWS
    )
    middle = (most.report["device_used_bytes"] + least) // 2
    expected = trained(directory, most)
    for cap in (least, middle):
        plan = make_plan(directory, "cuda", device_mem=cap, **options)
        assert plan.report["device_used_bytes"] <= cap
        assert trained(directory, plan) == expected, plan.report
