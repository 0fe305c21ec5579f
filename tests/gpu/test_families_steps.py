"""A step of every family on a GPU beside the CPU backend, in bf16: windows, soft caps, scales, norms
after, fused tensors. tests/test_families.py holds the CPU backend against transformers.

The weights are bf16 numbers, so the fp32 recipe on the CPU has the exact loss and gradients of the
same model. All experts are used there (families.wide). A gradient's error in bf16 is a random vector of many elements. Its length on the GPU
and on the CPU differs by what attention rounds more (tolerance.py: 22 roundings a layer, not 18)
and by chance, together less than a factor of 2. Of few elements chance does more: a vector of the 4
sinks of a layer is once in a thousand times more than 7 times as long as another.
"""

import functools
import json
import zlib

import numpy as np
import pytest
import safetensors.torch
import torch
from families import CONFIGS, DELTA_NETS, EXPERTS, GEMMA4, OFFSET, wide
from penstock import ModelConfig
from test_steps import BEGIN, SLICED, WHOLE, batch, bound, first_step, make_plan
from tolerance import loss_noise

NAMES = [
    *("mistral", "ministral", "phi3", "phi3-window", "olmo2", "gemma2", "gemma3", "granite"),
    *("smollm3", "smollm3-window", "qwen3-window", "llama-yarn"),
]
ON_GPU = [  # on the CPU tests/test_families.py and tests/test_experts.py slice their sequences
    *("gemma", "gemma4", "gemma4-values", "gemma4-e2b", "olmo3", "seed_oss", "exaone4"),
    *("hunyuan", "glm4", "ministral3", *EXPERTS, *DELTA_NETS),
]
LAYOUTS = {"whole": WHOLE, "sliced": SLICED}
CASES = [
    pytest.param(name, backend, layout, id=f"{name}-{backend}-{how}", marks=marks)
    for backend, names, marks in (
        ("cpu", NAMES, []),
        ("cuda", NAMES + ON_GPU, [pytest.mark.gpu]),
    )
    for name in names
    for how, layout in LAYOUTS.items()
    if backend == "cuda" or how == "sliced"
]


def draw(name, shape, offset):
    """bf16 numbers that use every part, as reference.random_weights()."""
    x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:
        x = 0.2 * x + (not offset or "linear_attn" in name)
    elif len(shape) > 1 and "bias" not in name:
        x = x * (0.1 if "embed" in name else shape[-1] ** -0.5)
    return torch.from_numpy(x).bfloat16().float()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @functools.cache
    def make(name):
        where, cfg = (
            tmp_path_factory.mktemp("families") / name,
            wide({**CONFIGS, **EXPERTS, **DELTA_NETS}[name]),
        )
        where.mkdir()
        (where / "config.json").write_text(json.dumps(cfg))
        offset, gemma4 = cfg["model_type"] in OFFSET, cfg["model_type"] in GEMMA4
        tensors = {p.name: draw(p.name, p.shape, offset) for p in ModelConfig.read(where).params()}
        for name, x in tensors.items():
            # Gemma 4's scores are q . k, with no factor: of 512 elements they would leave one key
            # to the softmax, and roundings would say which.
            if gemma4 and ("q_norm" in name or "k_norm" in name):
                tensors[name] = (x * x.numel() ** -0.25).bfloat16().float()
        safetensors.torch.save_file(tensors, where / "model.safetensors")
        return where

    return make


@functools.cache
def on_cpu(where, recipe):
    return step(where, "cpu", recipe, WHOLE)


def step(where, backend, recipe, layout):
    plan = make_plan(where, backend, recipe, layout, document_token=BEGIN)
    return first_step(where, plan, lambda s: batch(s, 50))


@pytest.mark.parametrize("name, backend, layout", CASES)
def test_a_step_of_every_family(directory, backend, name, layout):
    where = directory(name)
    exact, other = on_cpu(where, "fp32"), on_cpu(where, "bf16")
    found = step(where, backend, "bf16", layout)
    noise = loss_noise(bound(backend, "bf16", found.n_chunks), found.n_valid)
    assert abs(found.loss - exact.loss) < noise
    for key, g in exact.grads.items():
        error, usual = (np.linalg.norm(f.grads[key] - g) for f in (found, other))
        if key.endswith("layer_scalar"):  # a constant
            assert error == 0, key
        else:
            assert 0 < error < (2 if g.size >= 64 else 8) * usual, key
