"""Gradients between hosts over NCCL: two tasks of this machine share its first GPU, which NCCL
takes for GPUs of two hosts, because each task has a NCCL_HOSTID of its own. The weights are TCP's,
bit for bit; the network is measured over what moves the gradients; a task that is killed ends the
other; what cannot be had is refused.

It needs no more than numpy, pytest and libnccl.so.2: PENSTOCK_NCCL's, or that of NVIDIA's wheel."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import HANGS_S, write_shard
from test_cli import BINARY
from test_hosts import await_steps, end, environment, free_port, result

pytestmark = pytest.mark.gpu
SEQ = 256
TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}


def find_nccl():
    given = os.environ.get("PENSTOCK_NCCL")
    found = [Path(p) / "nvidia/nccl/lib/libnccl.so.2" for p in sys.path]
    return given or next((str(p) for p in found if p.exists()), None)


@pytest.fixture(scope="module")
def nccl():
    return find_nccl() or pytest.skip("no libnccl.so.2: install nvidia-nccl-cu13, or PENSTOCK_NCCL")


def model_of(folder, sizes, layers):
    """A model directory with config.json alone: --init-weights draws the weights."""
    heads = sizes["hidden_size"] // 64
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **sizes,
        "num_hidden_layers": layers,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return model_of(tmp_path_factory.mktemp("hosts") / "tiny", TINY, 4)


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    tokens = np.random.default_rng(0).integers(0, 500, 400000)
    return write_shard(tmp_path_factory.mktemp("data") / "a.bin", tokens)


def words(model, shard, folder, *more):
    given = ("--model", model, "--init-weights", "--data", shard, "--seq-len", SEQ)
    cut = ("--chunk-tokens", SEQ, "--chunks-per-round", 1, "--tokens-per-step", 4 * SEQ)
    rest = ("--backend", "cuda", "--deterministic", "--threads", 4, "--hosts-wait", 60)
    caps = ("--host-mem", "16GiB", "--trace-steps", 0, "--val", "none", "--run-dir", folder)
    return [str(w) for w in (BINARY, "train", *given, *cut, *rest, *caps, *more)]


@pytest.fixture(scope="module")
def measured(tiny, shard, tmp_path_factory):
    """The machine's rates, measured and cached by one task alone."""
    folder = tmp_path_factory.mktemp("measured")
    given = words(tiny, shard, folder, "--steps", 1, "--device-mem", "12GiB")
    done = subprocess.run(given, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr


def start(nccl, model, shard, folder, *more):
    port = free_port()
    alone = {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return [
        subprocess.Popen(
            words(model, shard, folder, *more),
            env=environment(
                rank=rank,
                port=port,
                **alone,
                PENSTOCK_NCCL=nccl,
                NCCL_HOSTID=f"penstock-test-{rank}",
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


def trained(nccl, model, shard, folder, *more, seconds=HANGS_S):
    """result() of two tasks, and what rank 0 said."""
    out = ("--out", folder / "out", "--steps", 4, "--device-mem", "12GiB")
    codes, said = end(start(nccl, model, shard, folder, *out, *more), seconds)
    assert codes == [0, 0], said
    return result(folder), said[0]


@pytest.mark.parametrize("recipe", ["bf16", "fp32-master"])
def test_the_weights_are_the_bits_of_tcp(recipe, measured, nccl, tiny, shard, tmp_path):
    seen = {}
    for name, says in (
        ("tcp", "gradients go over TCP, as asked for"),
        ("nccl", "gradients go over NCCL "),
        ("auto", "gradients go over NCCL "),
    ):
        more = ("--recipe", recipe, "--hosts-transport", name)
        seen[name], said = trained(nccl, tiny, shard, tmp_path / name, *more)
        assert said.count(says) == 1, said
    assert seen["nccl"] == seen["tcp"] == seen["auto"]
    assert len(set(seen["tcp"][1][0])) == 4


def test_the_network_is_measured_over_what_moves_gradients(measured, nccl, tiny, shard, tmp_path):
    """NCCL is opened once, before the plan, or by the trainer where the rate was kept: what it took
    is said once. Memory stays under the cap."""
    cache, rates = Path(os.environ["XDG_CACHE_HOME"]) / "penstock", {}
    for file in cache.glob("network-*.json"):
        file.unlink()
    for name, start_of in itertools.product(("tcp", "nccl"), ("first", "second")):
        folder, since = tmp_path / name / start_of, time.monotonic()
        _, said = trained(nccl, tiny, shard, folder, "--hosts-transport", name)
        took = time.monotonic() - since
        rate = json.loads((folder / "plan.json").read_text())["network_bytes_per_s"]
        print(f"\n{name}, {start_of} start: {rate / 1e9:.2f} GB/s each way; all took {took:.1f} s")
        assert rates.setdefault(name, rate) == rate
        assert len(list(cache.glob(f"network-*-{name}.json"))) == 1
        line = re.search(r"GB a step each way at (\S+) GB/s: ", said)
        assert float(line[1]) == pytest.approx(rate * 1e-9, rel=5e-3) and 1e7 < rate < 1e13
        assert said.count("of the GPU's memory") == (name == "nccl"), said
        steps = [json.loads(m) for m in (folder / "metrics.jsonl").read_text().splitlines()]
        assert all(m["device_peak_bytes"] <= 12 * 2**30 for m in steps)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_other(killed, measured, nccl, tiny, shard, tmp_path):
    more = ("--steps", 100000, "--device-mem", "12GiB", "--hosts-transport", "nccl", "--quiet")
    tasks = start(nccl, tiny, shard, tmp_path, *more)
    try:
        await_steps(tmp_path)
        since = time.monotonic()
        tasks[killed].kill()
        codes, said = end(tasks, 40)
    finally:
        for task in tasks:
            task.kill()
    took = time.monotonic() - since
    print(f"\nkilled rank {killed}: the other ended after {took:.1f} s: {said[1 - killed].strip()}")
    assert took < 30 and codes[1 - killed] == 1, said
    assert f"rank {killed} is gone" in said[1 - killed] and " of step " in said[1 - killed]


def test_an_op_that_fails_ends_both_with_its_name(measured, nccl, tiny, shard, tmp_path):
    """Both ranks lose their data, and the first to notice says so."""
    own = tmp_path / "own.bin"
    own.write_bytes(shard.read_bytes())
    more = ("--steps", 100000, "--device-mem", "12GiB", "--hosts-transport", "nccl", "--quiet")
    tasks = start(nccl, tiny, own, tmp_path, *more)
    try:
        await_steps(tmp_path)
        os.truncate(own, 1024)
        codes, said = end(tasks, 30)
    finally:
        for task in tasks:
            task.kill()
    assert codes == [1, 1] and "load_batch" in said[0] and "load_batch" in said[1], said


def test_nccl_that_is_not_there(measured, tiny, shard, tmp_path):
    folder = tmp_path / "run"
    more = ("--steps", 2, "--device-mem", "12GiB", "--hosts-transport")
    codes, said = end(start("/nowhere/libnccl.so.2", tiny, shard, folder, *more, "nccl"), 120)
    assert codes == [2, 2] and not folder.exists()
    for text in said:
        assert "rank 0 cannot use NCCL: NCCL is not there" in text and "PENSTOCK_NCCL" in text
    codes, said = end(start("/nowhere/libnccl.so.2", tiny, shard, folder, *more, "auto"), 120)
    assert codes == [0, 0] and "gradients go over TCP, as rank 0 cannot use NCCL" in said[0], said
