"""Several GPUs in one process: the weights of 10 deterministic steps are the same bits on one GPU and
on two, in each layout and with one long sequence. Skips where there are not two
GPUs of one model."""

import hashlib
import json

import pytest
from conftest import words_of_training
from penstock import Hardware
from penstock._lib import lib
from test_cli import penstock

pytestmark = pytest.mark.gpu
SEQ = 64
BACKEND = "cuda"


@pytest.fixture(scope="module")
def two():
    n = lib.ps_hardware_n_gpus()
    if n < 2:
        pytest.skip(f"{n} GPU here: two of one model are needed")
    if lib.ps_hardware_gpus_check(0, 2) != 0:
        pytest.skip("the first two GPUs are of different models")


def weights_after(steps, gpus, model, shard, folder, *more):
    words = words_of_training(model, shard, "--steps", steps, "--backend", BACKEND)
    more = ("--gpus", gpus, "--recipe", "bf16", "--deterministic", *more)
    done = penstock(*words, *more, "--out", folder, "--json", cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256()
    paths = sorted(folder.glob("*.safetensors"))
    assert paths
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest(), json.loads(done.stdout)["gpus"]


ROUNDS = ("--chunk-tokens", SEQ, "--chunks-per-round", 1)
SLICES = ("--seq-len", 4 * SEQ, "--tokens-per-step", 4 * SEQ, "--chunk-tokens", SEQ)
# a chunk has 8 slices of the head: a contribution, so the GPUs share the head
SHARED = (*SLICES, "--head-slice-tokens", SEQ // 8)


@pytest.mark.parametrize(
    "cut,layout",
    [(ROUNDS, "data-parallel"), (ROUNDS, "ring"), (SLICES, "ring"), (SHARED, "ring")],
    ids=["rounds", "ring", "one sequence in a ring", "one sequence and a shared head"],
)
def test_the_weights_are_the_same_bits_on_one_gpu_and_on_two(
    cut, layout, two, tiny_model, tiny_shard, tmp_path
):
    one, n_one = weights_after(10, 1, tiny_model, tiny_shard, tmp_path / "one", *cut)
    more = (*cut, "--layout", layout)
    both, n_both = weights_after(10, 2, tiny_model, tiny_shard, tmp_path / "two", *more)
    assert (n_one, n_both) == (1, 2) and one == both


def test_two_gpus_at_once_are_measured_once(two):
    """Products on both are a little slower than on one. What was measured is kept."""
    hw = Hardware.cached(gpus=2)
    assert hw.n_gpus == 2 and 0.7 < hw.gpus_compute_speed <= 1
    assert Hardware.cached(gpus=2).as_dict() == Hardware.cached().as_dict() == hw.as_dict()
