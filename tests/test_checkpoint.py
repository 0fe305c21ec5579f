"""Checkpoints: what is in them, k + k steps are the bits of 2k under other caps, and what damage, a
full disk or a kill leave. tests/native/test_train_beside.c has all recipes, optimizers and
placements."""

import ctypes
import errno
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BUILD, HANGS_S, ROOT, preload, write_shard
from penstock import (
    Checkpoint,
    FormatError,
    Hardware,
    InvalidError,
    ModelConfig,
    Plan,
    StateError,
    Trainer,
)
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file

K = 2  # steps before the checkpoint, and after it
STATES = {"adamw": ["exp_avg", "exp_avg_sq"], "lion": ["exp_avg"], "sgd": ["momentum_buffer"]}
CUT = {"seq_len": 64, "tokens_per_step": 256, "chunk_tokens": 64, "chunks_per_round": 2}
# recipe, optimizer, clip, caps before, caps after: the first has all state on the device
CASES = {
    "fp32-previous": (
        "fp32",
        "adamw",
        {"clip_norm": 0.5, "clip_by": "previous"},
        {},
        {"device_mem": 4 << 20},
    ),
    "fp32-adamw": ("fp32", "adamw", True, {}, {"device_mem": 4 << 20}),
    "master-lion": ("fp32-master", "lion", True, {"device_mem": 4 << 20}, {}),
    "bf16-adamw": ("bf16", "adamw", False, {}, {"device_mem": 4 << 20}),
    "bf16-sgd": ("bf16", "sgd", True, {"device_mem": 4 << 20}, {"device_mem": 6 << 20}),
    "fp24-8-adamw": (
        "fp24-master",
        "adamw",
        True,
        {"state_bits": 8},
        {"device_mem": 4 << 20},
    ),
}


def make_plan(model_dir, recipe="bf16", optimizer="adamw", **more):
    model = ModelConfig.read(model_dir)
    hardware = Hardware.read(ROOT / "tests/golden/hardware-cpu.json")
    more = CUT | more
    return Plan(model, hardware=hardware, recipe=recipe, optimizer=optimizer, threads=2, **more)


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
    clip = clip if isinstance(clip, dict) else {"clip_norm": float(clip)}
    how = {"recipe": recipe, "optimizer": optimizer} | clip
    training = {
        "lr": 1e-3,
        "seed": 3,
        "shuffle": True,
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


@pytest.mark.parametrize(
    "before,after",
    [
        ({"recipe": "fp32-master"}, {"recipe": "bf16", "state_bits": 8}),
        ({"recipe": "fp24-master", "state_bits": 8}, {"recipe": "fp32-master"}),
        ({"recipe": "bf16"}, {"recipe": "fp24-master"}),
        ({"recipe": "bf16", "state_bits": 8}, {"recipe": "fp24-master", "state_bits": 8}),
    ],
)
def test_state_is_converted_where_that_is_asked_for(
    before, after, tiny_model, tiny_shard, tmp_path
):
    """Otherwise refused in one sentence that names it. Weights and state go over to what the wider
    of both holds: moments in 8 bits within half a level, 1/32 of theirs at most above s/50."""
    plan = make_plan(tiny_model, **before)
    with Trainer(tiny_model, plan, tiny_shard, lr=1e-3) as trainer:
        run(trainer, K)
        path = Path(trainer.checkpoint(tmp_path / "c"))
        weights = {name: trainer.read(name) for name in trainer.params}
        losses = run(trainer, 1)
    other = make_plan(tiny_model, **after)
    with pytest.raises(InvalidError, match=f"recipe {before['recipe']}.*convert_state"):
        Trainer.resume(path, tiny_model, other, tiny_shard)
    with Trainer.resume(path, tiny_model, other, tiny_shard, convert_state=True) as trainer:
        for name, x in weights.items():
            rel = (
                2.0**-8
                if after["recipe"] == "bf16"
                else 0
                if before["recipe"] == "bf16"
                else 2**-16
            )
            assert np.abs(trainer.read(name) - x).max() <= rel * np.abs(x).max(), name
        path = Path(trainer.checkpoint(tmp_path / "d"))
        again = run(trainer, 1)
    assert abs(again[0] - losses[0]) < 2e-3
    if after.get("state_bits"):
        assert load_torch(path / "exp_avg.safetensors")["model.norm.weight"].dtype == (torch.uint8)


def test_any_tool_reads_a_checkpoint(tiny_model, tiny_shard, tmp_path):
    """Weights and moments under the parameters' names; AdamW's first moment after one step is
    (1 - beta1) times the clipped gradient."""
    plan = make_plan(tiny_model, recipe="fp32", clip_norm=1e9)
    with Trainer(tiny_model, plan, tiny_shard, lr=1e-3, beta1=0.5) as trainer:
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
    assert manifest["data"] == [str(tiny_shard)]
    assert manifest["run"] == shlex.join(sys.orig_argv)
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


def rewrite(path, change):
    """Change the manifest of a checkpoint, and make its sums right again."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(path, manifest)
    for file in manifest["files"]:
        data = (path / file["name"]).read_bytes()
        file |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


def keep_listed(*names):
    def change(path, manifest):
        manifest["files"] = [f for f in manifest["files"] if f["name"] in names]

    return change


def as_fp32(path, manifest):
    name = path / "exp_avg.safetensors"
    save_file(
        {n: torch.ones_like(t, dtype=torch.float32) for n, t in load_torch(name).items()}, name
    )


def put_there(path, manifest):
    """Shards in place of a file, where the file is listed and the shards are not."""
    name = "exp_avg.safetensors"
    weight_map = dict.fromkeys(load_torch(path / name), "stray.safetensors")
    (path / name).rename(path / "stray.safetensors")
    (path / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    keep_listed(*(f["name"] for f in manifest["files"] if f["name"] != name))(path, manifest)


WRONG = {
    "config.json alone": (keep_listed("config.json"), "does not list model.safetensors"),
    "no config.json": (
        keep_listed("model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors"),
        "does not list config.json",
    ),
    "no updates": (lambda p, m: m.update(n_updates=0), '"n_updates" is 0 after 1 steps'),
    "2^64 - 1 updates": (lambda p, m: m.update(n_updates=2**64 - 1), "18446744073709551615"),
    "moments in fp32": (as_fp32, "of exp_avg is F32, and .* recipe bf16 has BF16"),
    "a stray file": (put_there, "does not list stray.safetensors"),
    "no data": (lambda p, m: m.update(data_hashes=[]), "data_hashes"),
    "bad data": (lambda p, m: m.update(data_hashes=[{"bytes": 1, "hash": "x"}]), "data_hashes"),
}


def test_a_wrong_manifest_with_right_sums_is_refused(tiny_model, tiny_shard, tmp_path):
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard) as trainer:
        run(trainer, 1)
        path = Path(trainer.checkpoint(tmp_path / "c"))
    for n, (name, (change, words)) in enumerate(WRONG.items()):
        copy = tmp_path / str(n)
        shutil.copytree(path, copy)
        rewrite(copy, change)
        with pytest.raises(FormatError, match=words):
            Checkpoint(copy)
            pytest.fail(name)


def test_a_run_goes_on_with_its_own_data_alone(tiny_model, tmp_path):
    a, b = np.arange(3000) % 200, np.arange(3000) % 199
    data, moved = [tmp_path / "data" / n for n in "ab"], [tmp_path / "moved" / n for n in "xy"]
    for paths in (data, moved):
        paths[0].parent.mkdir()
        for path, tokens in zip(paths, (a, b), strict=True):
            write_shard(path, tokens)
    plan = make_plan(tiny_model)
    with Trainer(tiny_model, plan, data) as trainer:
        run(trainer, 1)
        path = Path(trainer.checkpoint(tmp_path / "c"))
    checkpoint = Checkpoint(path)
    Trainer.resume(checkpoint, tiny_model, plan, moved).close()
    with pytest.raises(InvalidError, match="y is shard 1 now and was shard 2"):
        Trainer.resume(checkpoint, tiny_model, plan, moved[::-1])
    tokens = b.copy()
    tokens[-1] ^= 1
    write_shard(moved[1], tokens)
    with pytest.raises(InvalidError, match="shard 2, .*moved/y, has other bytes .* model_dir"):
        Trainer.resume(checkpoint, tiny_model, plan, moved)
    one = write_shard(tmp_path / "one", np.arange(2 * (2999 // 64) * 64 + 1) % 200)
    with pytest.raises(InvalidError, match="written with 2 shards, and this run has 1"):
        Trainer.resume(checkpoint, tiny_model, plan, one)


def test_only_the_newest_are_kept(tiny_model, tiny_shard, tmp_path):
    left = tmp_path / ".step-00000001.penstock-save-0123456789abcdef"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"cut off")
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard) as trainer:
        for _ in range(3):
            run(trainer, 1)
            trainer.checkpoint(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def names(folder):
    return sorted(p.name for p in Path(folder).iterdir())


def test_newest_is_the_one_written_last(tiny_model, tiny_shard, tmp_path):
    """A run that goes on from an older checkpoint leaves the later steps of another run behind."""
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard) as trainer:
        paths = [trainer.checkpoint(tmp_path) for _ in range(4) if run(trainer, 1)]
    with Trainer.resume(
        paths[0], tiny_model, make_plan(tiny_model), tiny_shard, lr=1e-2
    ) as trainer:
        run(trainer, 1)
        trainer.checkpoint(tmp_path)
    serial = {
        p.name: json.loads((p / "manifest.json").read_text())["serial"] for p in tmp_path.iterdir()
    }
    assert serial == {f"step-{i:08}": s for i, s in ((1, 1), (2, 5), (3, 3), (4, 4))}
    newest = Checkpoint.latest(tmp_path)
    assert newest.step == 2
    # a folder of its own goes on counting from the checkpoint that the run began from
    with Trainer.resume(newest, tiny_model, make_plan(tiny_model), tiny_shard) as trainer:
        path = Path(trainer.checkpoint(tmp_path / "other"))
        assert json.loads((path / "manifest.json").read_text())["serial"] == 6
        shutil.rmtree(path)
        path.parent.rmdir()
        run(trainer, 3)
        trainer.checkpoint(tmp_path, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000005"]


def test_no_training_touches_what_another_wrote(tiny_model, tiny_shard, tmp_path):
    """Neither by --keep nor by a checkpoint of the same step. One that goes on is the same one."""
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard) as trainer:
        paths = [trainer.checkpoint(tmp_path) for _ in range(2) if run(trainer, 1)]
    (tmp_path / "step-00000009").mkdir()  # nobody knows whose
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard) as trainer:
        with pytest.raises(InvalidError, match="step-0000000[12] is a checkpoint of another run"):
            next(trainer.steps(1, tmp_path, checkpoint_every=1))
        run(trainer, 2)
        with pytest.raises(InvalidError, match="step-00000002 is a checkpoint of another run"):
            trainer.checkpoint(tmp_path, keep=1)
        for _ in range(2):
            run(trainer, 1)
            trainer.checkpoint(tmp_path, keep=1)
    assert names(tmp_path) == [f"step-{i:08}" for i in (1, 2, 4, 9)]
    with Trainer.resume(paths[0], tiny_model, make_plan(tiny_model), tiny_shard) as trainer:
        run(trainer, 2)
        trainer.checkpoint(tmp_path, keep=1)
    assert names(tmp_path) == [f"step-{i:08}" for i in (3, 4, 9)]


def test_checkpoints_beside_steps_in_python(tiny_model, tiny_shard, tmp_path):
    """Begun after every other step, or after a time, while steps run: what resumes from each is the
    state of that step. A failure is a warning."""
    how = {"lr": 1e-2, "seed": 5}
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard, **how) as trainer:
        metrics = list(trainer.steps(6, tmp_path / "c", checkpoint_every=2, keep=9))
        whole = state_of(Path(trainer.checkpoint(tmp_path / "whole")))
    assert names(tmp_path / "c") == [f"step-{i:08}" for i in (2, 4, 6)]
    assert state_of(tmp_path / "c/step-00000006") == whole
    for step in (2, 4):
        plan = make_plan(tiny_model, device_mem=4 << 20)
        with Trainer.resume(
            tmp_path / f"c/step-{step:08}", tiny_model, plan, tiny_shard
        ) as trainer:
            assert run(trainer, 6 - step) == [m.loss for m in metrics[step:]]
            assert state_of(Path(trainer.checkpoint(tmp_path / "again"))) == whole
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard, **how) as trainer:
        steps = trainer.steps(6, tmp_path / "t", checkpoint_every="0.0001m")
        assert [m.loss for m in steps] == [m.loss for m in metrics]
        assert 1 <= len([Checkpoint(p) for p in (tmp_path / "t").iterdir()]) <= 2
        (tmp_path / "file").write_text("")
        with pytest.warns(UserWarning, match="training goes on.*file"):
            assert len(list(trainer.steps(2, tmp_path / "file", checkpoint_every=1))) == 2
        for bad in (0, -1, "0m", "m", "1.5", "3d", 1.5):
            with pytest.raises(ValueError, match="is no interval"):
                next(trainer.steps(1, tmp_path, checkpoint_every=bad))


def test_a_checkpoint_has_no_name_before_its_steps_are_reported(tiny_model, tiny_shard, tmp_path):
    """Also where the next one is due at once: a kill leaves no checkpoint whose steps the caller
    has not seen."""
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard, lr=1e-2) as trainer:
        for m in trainer.steps(4, checkpoints=tmp_path, checkpoint_every=1, keep=9):
            named = sorted(p.name for p in tmp_path.glob("step-*"))
            assert named == [f"step-{k:08}" for k in range(1, m.step + 1)][: len(named)]
    assert len(list(tmp_path.glob("step-*"))) == 4


def test_a_checkpoint_beside_steps_is_ended_once(tiny_model, tiny_shard, tmp_path):
    with Trainer(tiny_model, make_plan(tiny_model), tiny_shard) as trainer:
        assert trainer.finish_checkpoint() is None
        steps = trainer.steps(4)
        next(steps)  # another step is in flight
        with pytest.raises(StateError, match="in flight"):
            trainer.checkpoint(tmp_path)
        path = trainer.checkpoint(tmp_path, wait=False)
        assert path.endswith(f"step-{trainer.steps_submitted:08}") and trainer.steps_submitted > 1
        with pytest.raises(StateError, match="being written"):
            list(steps) and trainer.write(
                "model.norm.weight", np.ones(trainer.params["model.norm.weight"].shape)
            )
        report = trainer.finish_checkpoint()
        assert report.path == path and report.n_bytes == Checkpoint(path).n_bytes
        assert 0 < report.held_s <= report.durable_s
        last = trainer.checkpoint(tmp_path / "last")
        trainer.checkpoint(tmp_path / "pending", wait=False)
    # close() completed it
    assert state_of(tmp_path / "pending" / Path(last).name) == state_of(Path(last))


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
            "optimizer adamw, and this run has lion",
        ),
        (make_plan(tiny_model, tokens_per_step=128), {}, "tokens-per-step 256, and this run has"),
        (same, {"seed": 2}, "seed 1, and this run has 2"),
        (same, {"shuffle": True}, "shuffle false, and this run has true"),
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


# ---- the command ---------------------------------------------------------------------------------

SHIM = BUILD / "tests/libdisk_shim.so"
CAPS = ((), ("--device-mem", "4MiB"), ("--device-mem", "6MiB"))


def words(model, shard, out, *more, caps=(), backend="cpu"):
    fixed = f"--seq-len 64 --tokens-per-step 256 --backend {backend} --threads 2 --lr 1e-2 --seed 3"
    files = ("--model", model, "--data", shard, "--out", out)
    fixed += " --shuffle --lr-schedule constant"
    words = (BUILD / "bin/penstock", "train", *files, *fixed.split(), *caps, *more)
    return [str(word) for word in words]


def train(*args, env=None, rc=0, **caps):
    done = subprocess.run(
        words(*args, **caps),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env=os.environ | (env or {}),
    )
    assert done.returncode == rc, done.stderr
    return done.stderr


def metrics(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines], [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def whole(tiny_model, tiny_shard, tmp_path_factory):
    """A run of 12 steps that was never stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(tiny_model, tiny_shard, out, "--steps", 12, "--checkpoint-every", 12)
    return out


def same(out, whole):
    newest = "checkpoints/step-00000012"
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert state_of(out / newest) == state_of(whole / newest)
    assert metrics(out) == metrics(whole)
    Checkpoint(out / newest).close()


def slow(folder, ms=15, write_ms=0):
    """The environment in which writing a checkpoint takes its time, and reads the state late."""
    return {
        "LD_PRELOAD": preload(SHIM),
        "DISK_SHIM_FAIL": "0",
        "DISK_SHIM_FSYNC_MS": str(ms),
        "DISK_SHIM_WRITE_MS": str(write_ms),
        "DISK_SHIM_UNDER": str(folder),
    }


def kill_and_resume(model, shard, out, rng, inside, caps=CAPS, most_s=1.2, backend="cpu", more=()):
    """Runs that are killed at random, or (the first `inside`) while a checkpoint is written beside
    the steps, until one comes to its end. Returns how many kills there were, and how many inside a
    write."""
    folder, kills, within = out / "checkpoints", 0, 0
    env = os.environ | slow(folder, write_ms=1)
    more += ("--steps", 12, "--checkpoint-every", 2, "--resume", "auto", "--force", "--quiet")
    while True:
        command = words(model, shard, out, *more, caps=caps[kills % 3], backend=backend)
        run = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + rng.uniform(most_s / 4, most_s)
        left = set(folder.glob(".step-*"))
        while run.poll() is None and (within < inside or time.monotonic() < end):
            if within < inside and set(folder.glob(".step-*")) - left:
                time.sleep(rng.uniform(0, 0.1))
                break
            time.sleep(0.001)
        run.kill()
        error = run.communicate()[1]
        if run.returncode != -9:
            assert run.returncode == 0, error
            return kills, within
        kills += 1
        within += bool(set(folder.glob(".step-*")) - left)


def test_killed_runs_resume_to_the_same_bits(whole, tiny_model, tiny_shard, tmp_path):
    kills, within = kill_and_resume(
        tiny_model, tiny_shard, tmp_path / "out", np.random.default_rng(1), inside=3
    )
    assert kills >= 3 and within >= 3
    same(tmp_path / "out", whole)


@pytest.mark.long
def test_30_kills(whole, tiny_model, tiny_shard, tmp_path):
    rng, kills, within = np.random.default_rng(2), 0, 0
    for i in range(30):
        more = kill_and_resume(tiny_model, tiny_shard, tmp_path / str(i), rng, inside=2)
        kills, within = kills + more[0], within + more[1]
        same(tmp_path / str(i), whole)
        if kills >= 30 and within >= 10:
            break
    assert kills >= 30 and within >= 10, (kills, within)


def test_steps_go_on_while_a_slow_checkpoint_is_written(whole, tiny_model, tiny_shard, tmp_path):
    """Updates wait for the writers, and both results have the bits of a run without checkpoints in
    the middle. The log says how long they waited."""
    for name, caps in enumerate(CAPS):
        out = tmp_path / str(name)
        every = ("--steps", 12, "--checkpoint-every", 3, "--keep", 9)
        text = train(
            tiny_model, tiny_shard, out, *every, caps=caps, env=slow(out / "checkpoints", 1, 3)
        )
        assert text.count(" on the disk after ") == 4 and "GB/s), for which updates waited" in text
        waited = [float(line.split()[-2]) for line in text.splitlines() if "updates waited" in line]
        assert sum(waited) > 0
        same(out, whole)
        train(
            *(tiny_model, tiny_shard, out, "--steps", 12, "--checkpoint-every", 12, "--force"),
            *("--keep", 9, "--resume", out / "checkpoints/step-00000003"),
        )
        same(out, whole)


def test_metrics_have_a_line_before_its_checkpoint_has_a_name(tiny_model, tiny_shard, tmp_path):
    """In the order of the disk's calls, so that a run which is killed at any of them and resumed
    has a line for every step."""
    out, log = tmp_path / "out", tmp_path / "calls"
    env = slow(out, ms=0) | {"DISK_SHIM_LOG": str(log)}
    train(tiny_model, tiny_shard, out, "--steps", 6, "--checkpoint-every", 1, env=env)
    lines = written = 0
    for call in log.read_text().splitlines():
        name, path = call.split(" ", 1)
        lines += name == "fflush" and path.endswith("/metrics.jsonl")
        if name.startswith("rename") and "/checkpoints/.step-" in path:  # to its name
            written += 1
            assert lines >= written
    assert (lines, written) == (6, 6)


def test_validations_beside_a_slow_checkpoint(whole, tiny_model, tiny_shard, tmp_path):
    """A validation runs in the memory of the paused steps, of which the writers read the state."""
    out = tmp_path / "out"
    more = ("--steps", 12, "--checkpoint-every", 3, "--keep", 9, "--val", tiny_shard)
    more += ("--val-every", 3, "--val-tokens", 512)
    text = train(tiny_model, tiny_shard, out, *more, env=slow(out / "checkpoints", 1, 3))
    assert text.count(" on the disk after ") == 4
    newest = "checkpoints/step-00000012"
    assert state_of(out / newest) == state_of(whole / newest)
    train(
        *(tiny_model, tiny_shard, out, "--steps", 12, "--checkpoint-every", 12, "--force"),
        *("--keep", 9, "--resume", out / "checkpoints/step-00000006"),
    )
    assert state_of(out / newest) == state_of(whole / newest)


def test_a_stop_while_a_checkpoint_is_written(whole, tiny_model, tiny_shard, tmp_path):
    """SIGTERM completes it, and leaves one of the last step. A second one ends the process, and
    leaves nothing that is taken for a checkpoint."""
    for n in (1, 2):
        out = tmp_path / str(n)
        folder = out / "checkpoints"
        more = ("--steps", 12, "--checkpoint-every", 4)
        command = words(tiny_model, tiny_shard, out, *more)
        env = os.environ | slow(folder, 15, 5)
        run = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        while run.poll() is None and not list(folder.glob(".step-*")):
            time.sleep(0.001)
        for _ in range(n):
            run.terminate()
            time.sleep(0.05)
        error = run.communicate(timeout=HANGS_S)[1]
        assert run.returncode == 130, error
        found = Checkpoint.latest(folder)
        assert n == 2 or found.step == len(metrics(out)[0]) < 12, error
        assert n == 2 or not list(folder.glob(".step-*"))
        train(tiny_model, tiny_shard, out, *more, "--resume", "auto", "--force")
        assert state_of(folder / "step-00000012") == state_of(whole / "checkpoints/step-00000012")
        assert not list(folder.glob(".step-*"))


def test_checkpoints_by_time(whole, tiny_model, tiny_shard, tmp_path):
    """The manifest has the resolved run, which runs, and the data."""
    out = tmp_path / "out"
    more = ("--steps", 12, "--keep", 99, "--checkpoint-every")
    train(tiny_model, tiny_shard, out, *more, "0.0005m")
    paths = sorted((out / "checkpoints").iterdir())
    assert 1 <= len(paths) <= 12  # none begins while one is written, which a slow disk makes longer
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    manifest = json.loads((paths[0] / "manifest.json").read_text())
    assert manifest["data"] == [str(tiny_shard)]
    assert 'checkpoint-every = "0.0005m"' in manifest["run"]
    assert manifest["run"] == (out / "run.toml").read_text()
    (tmp_path / "again.toml").write_text(manifest["run"])
    command = [BUILD / "bin/penstock", "train", "--config", tmp_path / "again.toml", "--force"]
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for bad in ("0.5", "true", '"x"', '["30m"]'):
        text = manifest["run"].replace('"0.0005m"', bad)
        (tmp_path / "again.toml").write_text(text)
        again = subprocess.run(command, capture_output=True, text=True)
        assert again.returncode == 2 and "again.toml:" in again.stderr
    train(tiny_model, tiny_shard, tmp_path / "h", *more, "5h")
    assert not (tmp_path / "h/checkpoints").exists()


def test_a_stopped_run_goes_on_from_any_checkpoint(whole, tiny_model, tiny_shard, tmp_path):
    out = tmp_path / "out"
    train(tiny_model, tiny_shard, out, "--steps", 8, "--checkpoint-every", 3, "--keep", 9)
    names = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000006"]
    rewrite(out / "checkpoints" / names[0], lambda p, m: m.pop("data_hashes"))  # an older one
    text = train(
        *(tiny_model, tiny_shard, out, "--steps", 12, "--checkpoint-every", 12, "--force"),
        *("--keep", 9, "--resume", out / "checkpoints/step-00000003"),
        caps=CAPS[1],
    )
    assert "step 12/12" in text
    same(out, whole)
    assert "other bits" not in text
    assert text.count("does not say which data it was written with") == 1
    text = train(
        *(tiny_model, tiny_shard, out, "--steps", 12, "--lr", 2e-2, "--chunk-tokens", 128),
        *("--lr-schedule", "linear", "--no-decay", "norm,bias,embedding"),
        *("--force", "--resume", out / "checkpoints/step-00000003"),
    )
    assert "with lr 0.01, and this run has 0.02" in text
    assert "with lr-schedule constant, and this run has linear" in text
    assert "with no-decay norm,bias, and this run has norm,bias,embedding" in text
    assert "with chunk-tokens " in text and "loss" in text
    assert metrics(out)[0] == metrics(whole)[0] and metrics(out)[1] != metrics(whole)[1]
    # nothing is left to train: the model is saved all the same
    (out / "model.safetensors").unlink()
    train(tiny_model, tiny_shard, out, "--steps", 12, "--resume", "latest", "--force")
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_run_that_will_write_no_checkpoint_says_so(tiny_model, tiny_shard, tmp_path):
    for n, (options, said) in enumerate(
        (
            (["--resume", "auto"], " before it is stopped"),
            (["--keep", 3], " before it is stopped"),
            (["--keep", 3, "--checkpoint-every", 0], ""),
            (["--keep", 3, "--checkpoint-every", 9], None),
            ([], None),
        )
    ):
        text = train(tiny_model, tiny_shard, tmp_path / str(n), "--steps", 1, *options)
        for when in (" before it is stopped", ""):
            sentence = f"writes no checkpoint{when}: --checkpoint-every N says"
            assert (sentence in text) == (when == said), text


def test_bad_input_is_refused_and_nothing_is_written(whole, tiny_model, tiny_shard, tmp_path):
    out, good = tmp_path / "out", whole / "checkpoints/step-00000012"
    damaged = tmp_path / "damaged"
    shutil.copytree(good, damaged)
    flip(damaged / "exp_avg.safetensors")
    for options, message in (
        (("--resume", "latest"), "has no checkpoint"),
        (("--resume", tmp_path / "none"), "No such file"),
        (("--resume", tiny_model), "manifest.json"),
        (("--resume", damaged), "exp_avg.safetensors: its bytes are damaged"),
        (("--resume", good, "--steps", 5), "past --steps 5"),
        (("--resume", good, "--steps", 13, "--seed", 4), "seed 3, and this run has 4"),
        (("--resume", good, "--steps", 13, "--recipe", "fp32"), "recipe bf16"),
        (("--checkpoint-every", "1.5"), "a whole number of steps"),
        (("--checkpoint-every", "-3h"), "a time such as 30m"),
        (("--checkpoint-every", "30x"), "or 0 for never"),
        (("--keep", 0), "a whole number from 1"),
    ):
        text = train(tiny_model, tiny_shard, out, *options, rc=2)
        assert message in text and text.count("penstock:") == 1, text
        assert not out.exists()


def test_a_checkpoint_that_cannot_be_written_is_a_warning(whole, tiny_model, tiny_shard, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "checkpoints").write_text("a file in the way")
    text = train(tiny_model, tiny_shard, out, "--steps", 12, "--checkpoint-every", 6)
    assert "checkpoints cannot be made: Not a directory" in text
    assert "no checkpoint of step 6 was written: " in text and text.count("goes on") == 2
    assert "the run goes on, without any checkpoint so far" in text
    assert metrics(out) == metrics(whole)
    # a file system that became read-only
    out = tmp_path / "read-only"
    text = train(
        *(tiny_model, tiny_shard, out, "--steps", 12, "--checkpoint-every", 6, "--keep", 9),
        env=slow(out / "checkpoints", 0)
        | {"DISK_SHIM_FAIL": "4", "DISK_SHIM_ERRNO": str(errno.EROFS)},  # behind three looks
    )
    assert "no checkpoint of step 6 was written: " in text and "Read-only file system" in text
    assert names(out / "checkpoints") == ["step-00000012"]
    # a full disk, in the middle of the second of three
    out, failed = tmp_path / "full", 0
    for call in (25, 40, 55):
        text = train(
            *(tiny_model, tiny_shard, out, "--steps", 12, "--checkpoint-every", 4, "--force"),
            env={
                "LD_PRELOAD": preload(SHIM),
                "DISK_SHIM_UNDER": str(out / "checkpoints"),
                "DISK_SHIM_FAIL": str(call),
                "DISK_SHIM_ERRNO": str(errno.ENOSPC),
            },
        )
        warned = "was written: " in text and "; the run goes on, " in text
        failed += warned and "No space left on device" in text
        if "step 8 was" in text:
            assert f"the newest checkpoint is {out}/checkpoints/step-00000004" in text
        same(out, whole) if "step 12 was" not in text else None
        assert not list((out / "checkpoints").glob(".step*"))
    assert failed >= 1, text
