"""A loss or gradient that is not finite: the run stops, or the step is skipped. All recipes,
optimizers and placements are in tests/native/test_train.c."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from conftest import BUILD, words_of_training, write_shard
from penstock import Hardware, ModelConfig, Plan, Trainer
from penstock._lib import ffi, lib
from safetensors.numpy import load_file, save_file

TOKEN, BAD_STEP = 7, 2  # its embedding is infinite; it comes in this step alone


@pytest.fixture(scope="module")
def spoiled(tiny_model, tmp_path_factory):
    """A model and data of five steps of two sequences, the third of which has an infinite loss."""
    folder = tmp_path_factory.mktemp("spoiled")
    shutil.copytree(tiny_model, folder / "model")
    (file,) = (folder / "model").glob("*.safetensors")
    tensors = {name: np.array(x) for name, x in load_file(file).items()}
    tensors["model.embed_tokens.weight"][TOKEN] = np.inf
    save_file(tensors, file)
    tokens = np.random.default_rng(1).integers(8, 512, 5 * 128 + 1)
    tokens[BAD_STEP * 128 + 70] = TOKEN
    return folder / "model", write_shard(folder / "data.bin", tokens)


def train(spoiled, *more, code=0):
    words = words_of_training(*spoiled, "--recipe", "fp32", "--tokens-per-step", 128, *more)
    words.remove("--quiet")
    run = subprocess.run([BUILD / "bin/penstock", *words], capture_output=True, text=True)
    assert run.returncode == code, run.stderr
    return run


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_skipped_step_is_told_and_counted(spoiled, tmp_path):
    words = ["--non-finite", "skip", "--clip-norm", 0, "--lr-schedule", "constant", "--run-dir"]
    run = train(spoiled, *words, tmp_path / "all", "--steps", 5)
    says = r"step 3 is skipped: the loss is not a number, first in chunk 0 \(sequence 1, position \d\); 1 "
    assert len(re.findall(says + "skipped so far\n", run.stderr)) == 1
    assert "skipped         1 step," in run.stdout
    # the first step's line, and the last one's
    assert not re.search(r"^step 1/5 .* skipped ", run.stderr, re.M)
    assert re.search(r"^step 5/5  loss \S+  1 skipped  grad norm ", run.stderr, re.M)
    all_steps = metrics(tmp_path / "all")
    assert [m["n_skipped"] for m in all_steps] == [0, 0, 1, 1, 1]
    assert [m["loss"] is None for m in all_steps] == [False, False, True, False, False]
    train(spoiled, *words, tmp_path / "part", "--steps", 4, "--checkpoint-every", 4)
    train(spoiled, *words, tmp_path / "part", "--steps", 5, "--resume", "latest")
    parts = metrics(tmp_path / "part")
    for key in ("loss", "n_skipped"):
        assert [m[key] for m in parts] == [m[key] for m in all_steps]


def test_stopping_is_the_default_with_exit_code_1(spoiled, tmp_path):
    words = ["--steps", 5, "--max-skips", 3]
    run = train(spoiled, *words, "--run-dir", tmp_path, code=1)
    assert f"step {BAD_STEP + 1}: " in run.stderr and "not finite" in run.stderr
    assert run.stderr.count("--max-skips counts nothing here: only --non-finite skip") == 1
    assert len(metrics(tmp_path)) == BAD_STEP


def test_what_is_refused(spoiled, tmp_path):
    for more, says in (
        (["--non-finite", "ignore"], "stop or skip"),
        (["--max-skips", 0], "--max-skips 0"),
        (["--clip-by", "previous", "--non-finite", "skip"], "--non-finite skip needs it"),
        (["--clip-by", "previous", "--clip-norm", 0], "--clip-norm, which is 0"),
        (["--clip-by", "previous", "--steps", 1], "a run of 1 step has none: raise --steps"),
    ):
        run = train(spoiled, *more, "--run-dir", tmp_path / "r", code=2)
        assert says in run.stderr and run.stderr.count("\n") == 1
    assert not (tmp_path / "r").exists()


# ---- which chunk ---------------------------------------------------------------------------------

LAYER, DIM, NEURON = 2, 5, 3


@pytest.fixture(scope="module")
def planted(tiny_model, tmp_path_factory):
    """A model whose loss is finite, but not its gradient where TOKEN comes. DIM of the residual
    stream is 1 for TOKEN and 0 for all others, and opens the gate of one neuron of a layer to 1e15.
    Its other factor is 0, so the forward pass does not see it. In the backward pass the gradient of
    that factor is the gate times what comes through a down_proj of 1e30: past fp32."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("planted") / "model")
    (file,) = folder.glob("*.safetensors")
    w = {name: np.array(x) for name, x in load_file(file).items()}
    w["model.embed_tokens.weight"][:, DIM] = 0
    w["model.embed_tokens.weight"][TOKEN, DIM] = 1
    for layer in range(4):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            w[f"model.layers.{layer}.{name}.weight"][DIM] = 0
    mlp = f"model.layers.{LAYER}.mlp."
    w[f"{mlp}gate_proj.weight"][NEURON] = 0
    w[f"{mlp}gate_proj.weight"][NEURON, DIM] = 1e15
    w[f"{mlp}up_proj.weight"][NEURON] = 0
    w[f"{mlp}down_proj.weight"][:, NEURON] = 1e30
    w[f"{mlp}down_proj.weight"][DIM, NEURON] = 0
    save_file(w, file)
    return folder


PACKED = ["--seq-len", 64, "--chunk-tokens", 128]
SLICES = ["--seq-len", 256, "--chunk-tokens", 64]
CHUNKS = {
    "packed": (PACKED, 5 * 64 + 9, "chunk 2 (sequences 4 to 5)"),
    "packed-uneven": (
        [*PACKED, "--chunks-per-round", 2, "--tokens-per-step", 448],
        6 * 64 + 9,
        "chunk 3 (sequences 5 to 6)",
    ),
    "slices": (SLICES, 256 + 130, "chunk 6 (sequence 1, positions 128 to 191)"),
    "frozen": ([*PACKED, "--frozen-layers", 2], 9, "chunk 0 (sequences 0 to 1)"),
    "lora": ([*SLICES, "--lora-rank", 2], 256 + 130, "chunk 6 (sequence 1, positions 128 to 191)"),
    "no-clip": ([*PACKED, "--clip-norm", 0], 7 * 64, "chunk 3 (sequences 6 to 7)"),
}


def plant(tmp_path, at, n=512):
    """Data of three steps, of which the second has TOKEN."""
    tokens = np.random.default_rng(1).integers(8, 512, 3 * n + 1)
    tokens[n + at] = TOKEN
    return write_shard(tmp_path / "data.bin", tokens)


@pytest.mark.parametrize(
    "case, cap", [*((case, None) for case in CHUNKS), ("packed", "tight"), ("slices", "tight")]
)
def test_a_gradient_that_is_not_finite_names_its_chunk(planted, tmp_path, case, cap):
    words, at, chunk = CHUNKS[case]
    n = words[-1] if "--tokens-per-step" in words else 512
    words = ["--tokens-per-step", n, "--lr", 0, *words]
    if cap:
        plan = [*words, "--model", planted, "--recipe", "fp32", "--smallest", "--json"]
        plan = [BUILD / "bin/penstock", "plan", *drop(list(map(str, plan)), "--lr")]
        least = subprocess.run(plan, check=True, capture_output=True, text=True).stdout
        words += ["--device-mem", json.loads(least)["smallest_device_bytes"]]
    words += ["--run-dir", tmp_path / "r"]
    run = train((planted, plant(tmp_path, at, n)), *words, "--steps", 3, code=1)
    said = next(line for line in run.stderr.splitlines() if "step 2: the gradient" in line)
    assert f"step 2: the gradient of layer {LAYER} is not finite, first in " in said, said
    says = (
        f"the first value that is not finite is of {chunk}, in the backward pass of layer {LAYER}"
    )
    assert says in said, said
    assert len(metrics(tmp_path / "r")) == 1


@pytest.mark.parametrize("layout", ["data-parallel", "ring"])
@pytest.mark.parametrize("case", ["packed", "slices"])
def test_several_devices_say_what_one_says(planted, tmp_path, case, layout):
    """The chunk is another device's than the first; the step runs again on the first."""
    words, at, chunk = CHUNKS[case]
    data = plant(tmp_path, at)
    words = ["--tokens-per-step", 512, "--lr", 0, *words, "--chunks-per-round", 1, "--steps", 3]
    gpus = 2 if (case, layout) == ("slices", "data-parallel") else 3  # a step has two sequences
    said, several = [], ["--gpus", gpus, "--layout", layout, "--backend", "cpu"]
    for name, more in (("one", []), ("several", several)):
        run = train((planted, data), *words, *more, "--run-dir", tmp_path / name, code=1)
        said += [line for line in run.stderr.splitlines() if "step 2: the gradient" in line]
    said = [re.sub(r"op \d+, grad_norm(, stream host)?, ", "", line) for line in said]
    assert len(said) == 2 and said[0] == said[1] and chunk in said[0], said
    skip = ["--non-finite", "skip", "--run-dir", tmp_path / "skip"]
    run = train((planted, data), *words, *several, *skip)
    assert run.stderr.count("step 2 is skipped") == 1 and chunk in run.stderr
    assert [m["n_skipped"] for m in metrics(tmp_path / "skip")] == [0, 1, 1]


def drop(words, option):
    at = words.index(option)
    return words[:at] + words[at + 2 :]


# ---- in a batch ramp -----------------------------------------------------------------------------

# two steps of one sequence, two of six, then eight sequences a step; chunks of two sequences
RAMP = [*PACKED, "--tokens-per-step", 512, "--batch-ramp", "64:2", "384:2"]


def planted_at(tmp_path, *at):
    """Data for the ramp and two steps more, with TOKEN at these places."""
    tokens = np.random.default_rng(1).integers(8, 512, (2 + 2 * 6 + 2 * 8) * 64 + 1)
    tokens[list(at)] = TOKEN
    return write_shard(tmp_path / "data.bin", tokens)


def test_each_skipped_step_of_a_ramp_names_its_chunk(planted, tmp_path):
    """The second step, then in the fourth sequence 3, which is the second of a chunk, and in the
    sixth sequence 7. A step run again begins with the smallest of all steps."""
    fourth, sixth = (2 + 6) * 64, (2 + 2 * 6 + 8) * 64
    data = planted_at(tmp_path, 64 + 20, fourth + 3 * 64 + 5, sixth + 7 * 64 + 2)
    words = ["--lr", 0, *RAMP, "--steps", 6, "--non-finite", "skip", "--run-dir", tmp_path / "r"]
    run = train((planted, data), *words)
    said = [line for line in run.stderr.splitlines() if " is skipped: " in line]
    where = ("chunk 0 (sequence 0)", "chunk 1 (sequence 3)", "chunk 3 (sequence 7)")
    assert len(said) == 3
    for line, step, chunk in zip(said, (2, 4, 6), where):
        assert f"step {step} is skipped: the gradient of layer {LAYER} " in line, line
        assert f"the first value that is not finite is of {chunk}, in the backward" in line, line
    assert [m["n_skipped"] for m in metrics(tmp_path / "r")] == [0, 1, 1, 2, 2, 3]


def test_a_ramp_that_gets_smaller_names_chunks_too(planted, tmp_path):
    """Two steps of six sequences and two of one: the first step run again is a larger one."""
    data = planted_at(tmp_path, 3 * 64 + 5, 2 * 6 * 64 + 9)
    words = ["--lr", 0, *PACKED, "--tokens-per-step", 512, "--batch-ramp", "384:2", "64:2"]
    words += ["--steps", 5, "--non-finite", "skip", "--run-dir", tmp_path / "r"]
    said = train((planted, data), *words).stderr
    assert "step 1 is skipped" in said and "is of chunk 1 (sequence 3), in the" in said
    assert "step 3 is skipped" in said and "is of chunk 0 (sequence 0), in the" in said


def test_a_loss_in_a_smaller_step_names_its_place(spoiled, tmp_path):
    """The data's TOKEN is in sequence 5: in the third step, of three sequences, the third one."""
    words = ["--tokens-per-step", 256, "--chunk-tokens", 128, "--batch-ramp", "64:1", "128:1"]
    words += ["192:1", "--steps", 4]
    run = train(spoiled, *words, "--non-finite", "skip", "--run-dir", tmp_path / "r")
    place = r"first in chunk 1 \(sequence 2, position \d\)"
    assert re.search(rf"step 3 is skipped: the loss is not a number, {place}", run.stderr)


def test_a_damaged_model_is_named_whatever_the_options(tiny_model, tiny_shard, tmp_path):
    """After skipped steps too no step has changed a weight, so no learning rate is to blame.
    Without clipping the updates of the step may have done it."""
    damaged, name = shutil.copytree(tiny_model, tmp_path / "damaged"), "model.norm.weight"
    tensors = {key: np.array(x) for key, x in load_file(damaged / "model.safetensors").items()}
    tensors[name][3] = np.inf
    save_file(tensors, damaged / "model.safetensors")
    given, run = (damaged, tiny_shard), ("--run-dir", tmp_path / "r", "--force")
    skip = ("--non-finite", "skip", "--max-skips", 2)
    said = train(given, *run, *skip, "--steps", 9, code=1).stderr
    assert f"{name} had weights that are not finite before training: this model is damaged" in said
    said = train(given, *run, "--clip-norm", 0, code=1).stderr
    assert f"{name} has weights that are not finite: the model was damaged before training" in said
    done = train(given, *run, *skip, "--steps", 2)
    assert "loss            nan in the first step, nan in the last step" in done.stdout


def test_a_trainer_is_not_at_rest_while_a_step_runs_again(planted):
    """Steps call the batch function, and the second step once more when it is run again."""
    tokens = np.random.default_rng(1).integers(8, 512, (3, 4, 65)).astype(np.int32)
    tokens[1, 2, 9] = TOKEN
    calls = []

    def batch(step):
        text = ffi.new("char[4096]")
        ptr = trainer._handle.ptr
        lib.ps_trainer_where(ptr, text, len(text))
        calls.append((step, lib.ps_trainer_at_rest(ptr), ffi.string(text) != b""))
        return tokens[step, :, :-1], tokens[step, :, 1:]

    plan = Plan(ModelConfig.read(planted), seq_len=64, tokens_per_step=256, recipe="fp32",
                chunk_tokens=128, non_finite="skip", hardware=Hardware.estimate(2, "cpu"))  # fmt: skip
    with Trainer(planted, plan, batch, lr=0.0) as trainer:
        assert [m.skipped for m in trainer.steps(3)] == [False, True, False]
        assert sorted(calls) == [(step, 0, True) for step in (0, 1, 1, 2)]
        assert lib.ps_trainer_at_rest(trainer._handle.ptr)
