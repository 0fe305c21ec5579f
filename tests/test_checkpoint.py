"""Checkpoints: what is in them, k + k steps are the bits of 2k under other caps, and what damage, a
full disk or a kill leave. tests/native/test_train.c has all recipes, optimizers and placements."""

import ctypes
import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import BUILD, ROOT
from penstock import Checkpoint, FormatError, Hardware, InvalidError, ModelConfig, Plan, Trainer
from safetensors.numpy import load_file

K = 2  # steps before the checkpoint, and after it
STATES = {"adamw": ["exp_avg", "exp_avg_sq"], "lion": ["exp_avg"], "sgd": ["momentum_buffer"]}
CUT = {"seq_len": 64, "tokens_per_step": 256, "chunk_tokens": 64, "chunks_per_round": 2}
# recipe, optimizer, clip, caps before, caps after: the first has all state on the device
CASES = {
    "fp32-adamw": ("fp32", "adamw", True, {}, {"device_mem": 4 << 20}),
    "master-lion": ("fp32-master", "lion", True, {"device_mem": 4 << 20}, {}),
    "bf16-adamw": ("bf16", "adamw", False, {}, {"device_mem": 4 << 20}),
    "bf16-sgd": ("bf16", "sgd", True, {"device_mem": 4 << 20}, {"device_mem": 6 << 20}),
}


def make_plan(model_dir, recipe="bf16", optimizer="adamw", clip=True, **more):
    model = ModelConfig.read(model_dir)
    hardware = Hardware.read(ROOT / "tests/golden/hardware-cpu.json")
    more = CUT | more
    return Plan(
        model, hardware=hardware, recipe=recipe, optimizer=optimizer, clip=clip, threads=2, **more
    )


def state_of(path):
    """SHA-256s of a checkpoint's weights and states."""
    return {
        f.name: hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(path.glob("*.safetensors"))
    }


def run(trainer, n):
    return [m.loss for m in trainer.steps(n)]


def test_sha256_is_hashlibs():
    lib = ctypes.CDLL(str(BUILD / "lib/libpenstock.so"))
    data = np.random.default_rng(0).bytes(5000)
    for n in (0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 4999):
        state, hexed = ctypes.create_string_buffer(8 * 4 + 8 + 64), ctypes.create_string_buffer(65)
        lib.ps__sha256_begin(state)
        for at in range(0, n, 37):
            lib.ps__sha256_add(state, data[at : min(n, at + 37)], ctypes.c_size_t(min(37, n - at)))
        lib.ps__sha256_end(state, hexed)
        assert hexed.value.decode() == hashlib.sha256(data[:n]).hexdigest(), n
    # blocks with the CPU's own instructions, where it has some, and without
    own, portable = ctypes.create_string_buffer(104), ctypes.create_string_buffer(104)
    for state in (own, portable):
        lib.ps__sha256_begin(state)
    lib.ps__sha256_add(own, data[:4992], ctypes.c_size_t(4992))
    lib.ps__sha256_blocks_portable(portable, data[:4992], ctypes.c_size_t(78))
    assert own.raw[:32] == portable.raw[:32]


@pytest.mark.parametrize("case", CASES)
def test_k_and_k_steps_are_the_bits_of_2k(case, tiny_model, tiny_shard, tmp_path):
    recipe, optimizer, clip, before, after = CASES[case]
    how = {"recipe": recipe, "optimizer": optimizer, "clip": clip}
    training = {
        "lr": 1e-3,
        "seed": 3,
        "shuffle": True,
        "clip_norm": float(clip),
        "lr_schedule": "cosine",
        "total_steps": 2 * K,
    }
    plan = make_plan(tiny_model, **how, **before)
    with Trainer(tiny_model, plan, tiny_shard, **training) as trainer:
        losses = run(trainer, K)
        path = trainer.checkpoint(tmp_path / "c")
        losses += run(trainer, K)  # training goes on after a checkpoint
        whole = state_of(Path(trainer.checkpoint(tmp_path / "whole")))
    checkpoint = Checkpoint(path)
    assert checkpoint.step == K and checkpoint.path == path
    options = checkpoint.plan_options
    assert options["recipe"] == recipe and options["optimizer"] == optimizer
    other = make_plan(tiny_model, **options, **after)
    keys = ("resident_param_units", "resident_update_units", "resident_grad_units")
    assert [plan.report[k] for k in keys] != [other.report[k] for k in keys]
    with Trainer.resume(checkpoint, tiny_model, other, tiny_shard) as trainer:
        assert losses[K:] == run(trainer, K)
        again = state_of(Path(trainer.checkpoint(tmp_path / "again")))
    assert again == whole and set(whole) == {
        f"{stem}.safetensors" for stem in ["model", *STATES[optimizer]]
    }


def test_any_tool_reads_a_checkpoint(tiny_model, tiny_shard, tmp_path):
    """Weights and moments under the parameters' names; AdamW's first moment after one step is
    (1 - beta1) times the clipped gradient."""
    plan = make_plan(tiny_model, recipe="fp32", keep_grads=True)
    with Trainer(tiny_model, plan, tiny_shard, lr=1e-3, beta1=0.5, clip_norm=1e9) as trainer:
        run(trainer, 1)
        path = Path(trainer.checkpoint(tmp_path))
        weights, moments = (
            load_file(path / "model.safetensors"),
            load_file(path / "exp_avg.safetensors"),
        )
        assert set(weights) == set(moments) == set(trainer.params)
        for name in trainer.params:
            assert (weights[name] == trainer.read(name)).all()
            assert (moments[name] == np.float32(0.5) * trainer.grad(name)).all()
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 1 and manifest["training"]["beta1"] == 0.5
    for file in manifest["files"]:
        data = (path / file["name"]).read_bytes()
        assert len(data) == file["bytes"] and hashlib.sha256(data).hexdigest() == file["sha256"]
    assert {f["name"] for f in manifest["files"]} | {"manifest.json"} == {
        f.name for f in path.iterdir()
    }
    Trainer(path, make_plan(path), tiny_shard).close()  # it is a model directory too


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "flipped byte": (flip, "exp_avg.safetensors", "SHA-256"),
    "missing file": (lambda p: p.unlink(), "model.safetensors", "is missing"),
    "cut file": (cut, "exp_avg_sq.safetensors", "bytes"),
    "cut manifest": (cut, "manifest.json", "line"),
    "missing manifest": (lambda p: p.unlink(), "manifest.json", "No such file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_newest_whole_one_is_found(
    damage, tiny_model, tiny_shard, tmp_path
):
    folder = tmp_path / "c"
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard) as trainer:
        paths = [trainer.checkpoint(folder) for _ in range(3) if run(trainer, 1)]
    assert Checkpoint.latest(folder).step == 3
    break_it, name, word = DAMAGES[damage]
    break_it(Path(paths[2]) / name)
    with pytest.raises(FormatError, match=f"(?s){name}.*{word}"):
        Checkpoint(paths[2])
    assert Checkpoint.latest(folder).step == 2
    for path in paths[:2]:
        break_it(Path(path) / name)
    with pytest.raises(FormatError, match="none of its 3 checkpoints is whole"):
        Checkpoint.latest(folder)
    assert Checkpoint.latest(tmp_path / "none") is None


def test_only_the_newest_are_kept(tiny_model, tiny_shard, tmp_path):
    left = tmp_path / ".step-00000001.penstock-save-0123456789abcdef"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"cut off")
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard) as trainer:
        for _ in range(3):
            run(trainer, 1)
            trainer.checkpoint(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_what_a_run_cannot_go_on_from_is_refused(tiny_model, tiny_shard, tmp_path):
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard, seed=1) as trainer:
        run(trainer, 1)
        checkpoint = Checkpoint(trainer.checkpoint(tmp_path))
    same = make_plan(tiny_model)
    for plan, changes, words in (
        (make_plan(tiny_model, recipe="fp32"), {}, "recipe bf16, and this run has fp32"),
        (
            make_plan(tiny_model, optimizer="lion"),
            {},
            "optimizer is adamw, but the plan was made for lion",
        ),
        (make_plan(tiny_model, tokens_per_step=128), {}, "tokens-per-step 256, and this run has"),
        (same, {"seed": 2}, "seed 1, and this run has 2"),
        (same, {"shuffle": True}, "shuffle 0, and this run has 1"),
        (same, {"first_step": 5}, "first_step 5"),
    ):
        with pytest.raises(InvalidError, match=words):
            Trainer.resume(checkpoint, tiny_model, plan, tiny_shard, **changes)
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(InvalidError, match="another model"):
        Trainer.resume(checkpoint, other, make_plan(other), tiny_shard)
    with pytest.raises(TypeError, match="'learning_rate' is no setting"):
        Trainer.resume(checkpoint, tiny_model, same, tiny_shard, learning_rate=1)
