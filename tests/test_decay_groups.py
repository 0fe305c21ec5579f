"""Which parameters get weight decay: --no-decay, no_decay of a Trainer, no-decay of a run's file."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from penstock import Checkpoint, Hardware, ModelConfig, Plan, Trainer
from penstock._lib import check, lib, struct
from penstock.run_file import tomllib
from test_cli import job, penstock, refused, words  # noqa: F401 (job is a fixture)

GROUPS = {"norm", "bias", "embedding"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model with biases, and one with tied embeddings. Norms and biases are drawn anew: at 1 and
    0 as fresh models have them, rounding could hide a decay."""
    out = {}
    for name in ("tiny-qwen2", "tiny-qwen3"):
        folder = tmp_path_factory.mktemp(name) / "model"
        config = json.loads((ROOT / f"models/{name}.json").read_text())
        config["tie_word_embeddings"] = name == "tiny-qwen3"
        folder.parent.joinpath("config.json").write_text(json.dumps(config))
        subprocess.run(
            [sys.executable, ROOT / "models/init_model.py", folder.parent / "config.json", folder],
            check=True,
            capture_output=True,
        )
        out[name] = folder
    return out


def make_plan(folder, recipe="fp32"):
    return Plan(
        ModelConfig.read(folder),
        seq_len=64,
        tokens_per_step=64,
        recipe=recipe,
        hardware=Hardware.estimate(2, "cpu"),
    )


def weights(folder, plan, data, **settings):
    rng = np.random.default_rng(5)
    with Trainer(folder, plan, data, lr=1e-2, seed=3, **settings) as trainer:
        for p in trainer.params.values():
            if len(p.shape) == 1:
                trainer.write(p.name, rng.uniform(0.5, 1.5, p.shape))
        list(trainer.steps(1))
        return {p: trainer.read(p) for p in trainer.params}, trainer.params


def group_of(param):
    if "embed_tokens" in param.name:
        return "embedding"
    return param.role if param.role in ("norm", "bias") else None


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_a_group_without_decay_has_the_bits_of_no_decay_and_the_others_those_of_decay(
    folders, tiny_shard, name, recipe
):
    """One step: its gradients do not depend on decay, so that each parameter's new weights are those
    of one of two runs, bit for bit."""
    run = {"plan": make_plan(folders[name], recipe), "data": str(tiny_shard)}
    with_decay, params = weights(folders[name], **run, weight_decay=0.5, no_decay=[])
    without, _ = weights(folders[name], **run, weight_decay=0.0)
    seen = set()
    for exempt in ([], ["norm"], ["bias"], ["embedding"], ["norm", "bias"], sorted(GROUPS)):
        got, _ = weights(folders[name], **run, weight_decay=0.5, no_decay=exempt)
        for p, param in params.items():
            assert not np.array_equal(with_decay[p], without[p]), p
            want = without if group_of(param) in exempt else with_decay
            assert np.array_equal(got[p], want[p]), (p, exempt)
            seen.add(group_of(param))
    assert seen == ({None, *GROUPS} if name == "tiny-qwen2" else {None, "norm", "embedding"})


def test_matrices_alone_decay_by_default(folders, tiny_shard):
    folder = folders["tiny-qwen2"]
    run = {
        "folder": folder,
        "plan": make_plan(folder),
        "data": str(tiny_shard),
        "weight_decay": 0.5,
    }
    default, _ = weights(**run)
    named, _ = weights(**run, no_decay=["bias", "norm"])
    assert all(np.array_equal(default[p], named[p]) for p in named)


def test_the_command_and_the_file_take_a_list_of_groups(job, tmp_path):  # noqa: F811
    (tmp_path / "a.toml").write_text('[optimizer]\nno-decay = ["bias", "embedding"]\n')
    cases = {
        "default": ((), ["norm", "bias"]),
        "commas": (("--no-decay", "norm,embedding"), ["norm", "embedding"]),
        "words": (("--no-decay", "norm", "embedding"), ["norm", "embedding"]),
        "none": (("--no-decay=none",), []),
        "file": (("--config", "a.toml"), ["bias", "embedding"]),
        "both": (("--config", "a.toml", "--no-decay", "norm"), ["norm"]),
    }
    for name, (options, want) in cases.items():
        done = penstock(
            "train", "--quiet", *words(job | {"--run-dir": name}), *options, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        resolved = tomllib.loads((tmp_path / name / "run.toml").read_text())
        assert resolved["optimizer"]["no-decay"] == want
    losses = [(tmp_path / n / "metrics.jsonl").read_text().count('"loss"') for n in cases]
    assert losses == [3] * len(cases)
    for bad in ("matrix", "norm,", "norms", ""):
        refused(
            penstock("train", *words(job), f"--no-decay={bad}"),
            f"--no-decay {bad}: give none, or some of norm, bias or embedding with commas",
        )


def test_bad_groups_are_refused_by_python_and_by_the_library(folders, tiny_shard):
    plan = make_plan(folders["tiny-qwen2"])
    for bad in ("norm", ["norms"]):
        with pytest.raises(ValueError, match="no_decay .*: give a list of some of norm, bias"):
            weights(folders["tiny-qwen2"], plan, str(tiny_shard), no_decay=bad)


def test_a_checkpoint_keeps_the_groups_and_an_older_one_has_the_default(
    folders, tiny_shard, tmp_path
):
    folder = folders["tiny-qwen2"]
    with Trainer(folder, make_plan(folder), str(tiny_shard), no_decay=["embedding"]) as trainer:
        list(trainer.steps(1))
        path = trainer.checkpoint(tmp_path)
    manifest = Path(path) / "manifest.json"
    kept = json.loads(manifest.read_text())
    assert kept["training"]["no_decay"] == 4
    del kept["training"]["no_decay"]
    manifest.write_text(json.dumps(kept))
    with Checkpoint(path) as older:
        cfg = struct("ps_train_config")
        check(lib.ps_checkpoint_config(older._handle.ptr, cfg))
        assert cfg.no_decay == 3
