"""FP8 on a GPU, as far as a machine without one can tell."""

import json

import pytest
from conftest import ROOT
from penstock import Hardware, ModelConfig, Plan, Trainer

torch = pytest.importorskip("torch")
import reference as ref  # noqa: E402


def test_training_on_a_gpu_is_refused_until_one_has_run_the_kernels(tmp_path):
    config = json.loads((ROOT / "models/tiny-llama.json").read_text())
    directory = ref.write_directory(tmp_path / "m", config, ref.random_weights(config, seed=1))
    plan = Plan(
        ModelConfig.read(directory),
        seq_len=48,
        tokens_per_step=192,
        recipe="fp8",
        threads=2,
        hardware=Hardware.read(ROOT / "docs/hardware-h200.json"),
        clip=False,
    )
    with pytest.raises(ValueError, match="not been tested on a GPU yet.*--recipe bf16"):
        Trainer(directory, plan, lambda step: None, lr=0.0, clip_norm=0)
