"""A step of every family on a GPU beside the CPU backend, in bf16: windows, soft caps, scales, norms
after, fused tensors. tests/test_families.py holds the CPU backend against transformers.

The weights are bf16 numbers, so the fp32 recipe on the CPU has the exact loss and gradients of the
same model. A gradient's error in bf16 is a random vector of many elements. Its length on the GPU
and on the CPU differs by what attention rounds more (tolerance.py: 22 roundings a layer, not 18)
and by chance, together less than a factor of 2.
"""

import functools
import json
import zlib

import numpy as np
import pytest
import safetensors.torch
import torch
from families import CONFIGS, wide
from penstock import ModelConfig
from test_steps import BEGIN, SLICED, WHOLE, batch, bound, first_step, make_plan
from tolerance import loss_noise

NAMES = [
    *("mistral", "ministral", "phi3", "phi3-window", "olmo2", "gemma2", "gemma3", "granite"),
    *("smollm3", "smollm3-window", "qwen3-window", "llama-yarn"),
]


RUNS = [
    pytest.param("cpu", SLICED, id="cpu-sliced"),
    pytest.param("cuda", WHOLE, id="cuda-whole", marks=pytest.mark.gpu),
    pytest.param("cuda", SLICED, id="cuda-sliced", marks=pytest.mark.gpu),
]


def draw(name, shape, offset):
    """bf16 numbers that use every part, as reference.random_weights()."""
    x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:
        x = 0.2 * x + (not offset)
    elif "bias" not in name:
        x = x * (0.1 if "embed" in name else shape[1] ** -0.5)
    return torch.from_numpy(x).bfloat16().float()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @functools.cache
    def make(name):
        where, cfg = tmp_path_factory.mktemp("families") / name, wide(CONFIGS[name])
        where.mkdir()
        (where / "config.json").write_text(json.dumps(cfg))
        offset = cfg["model_type"] in ("gemma2", "gemma3_text")
        tensors = {p.name: draw(p.name, p.shape, offset) for p in ModelConfig.read(where).params()}
        safetensors.torch.save_file(tensors, where / "model.safetensors")
        return where

    return make


@functools.cache
def on_cpu(where, recipe):
    return step(where, "cpu", recipe, WHOLE)


def step(where, backend, recipe, layout):
    plan = make_plan(where, backend, recipe, layout, document_token=BEGIN)
    return first_step(where, plan, lambda s: batch(s, 50))


@pytest.mark.parametrize("backend, layout", RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_every_family(directory, backend, name, layout):
    where = directory(name)
    exact, other = on_cpu(where, "fp32"), on_cpu(where, "bf16")
    found = step(where, backend, "bf16", layout)
    noise = loss_noise(bound(backend, "bf16", found.n_chunks), found.n_valid)
    assert abs(found.loss - exact.loss) < noise
    for key, g in exact.grads.items():
        error, usual = (np.linalg.norm(f.grads[key] - g) for f in (found, other))
        assert 0 < error < 2 * usual, key
