"""The budget never changes the math, and never is exceeded.

With chunk and round size pinned, every budget from all-resident down to the smallest feasible must
give the same bits: the sums are the same sums in the same order, wherever their terms were kept.
What is measured of memory must be what was planned."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import BUILD, ROOT, words_of_training, write_shard
from penstock import BudgetError, Hardware, ModelConfig, Plan, StateError, Trainer

MIB = 1 << 20
UNIT = 2 * MIB  # arenas are whole units
STEPS = 6
VOCAB = 1536
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "initializer_range": 0.05,
}
MODELS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
    },
    "qwen2-tied": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "qwen3-tied": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "head_dim": 48,
        "attention_bias": False,
        "use_sliding_window": False,
    },
}
ONE = {"seq_len": 128, "tokens_per_step": 512, "chunk_tokens": 128, "chunks_per_round": 4}
PACKED_ROUNDS = {
    "seq_len": 64,
    "tokens_per_step": 640,
    "chunk_tokens": 128,
    "chunks_per_round": 2,
}  # five chunks: an uneven last round
LONG = {
    "seq_len": 256,
    "tokens_per_step": 512,
    "chunk_tokens": 64,
    "chunks_per_round": 8,
}  # a sequence is four chunks
LONG_ROUNDS = LONG | {"chunks_per_round": 4}
CASES = {
    "llama-fp32-clip-packed-rounds": ("llama", "fp32", True, PACKED_ROUNDS),
    "llama-bf16-one-round": ("llama", "bf16", False, ONE),
    "llama-fp32-master-long-rounds": (
        "llama",
        "fp32-master",
        False,
        LONG_ROUNDS | {"seq_len": 512, "tokens_per_step": 1024, "chunk_tokens": 128},
    ),
    "qwen2-fp32-master-clip-packed-rounds": (
        "qwen2-tied",
        "fp32-master",
        True,
        PACKED_ROUNDS | {"tokens_per_step": 1280, "chunk_tokens": 256},
    ),
    "qwen2-fp32-long": ("qwen2-tied", "fp32", False, LONG),
    "qwen3-bf16-clip-long-rounds": ("qwen3-tied", "bf16", True, LONG_ROUNDS),
    "qwen3-fp32-clip-one-round": ("qwen3-tied", "fp32", True, ONE),
    "llama-bf16-clip-lion": ("llama", "bf16", True, PACKED_ROUNDS | {"optimizer": "lion"}),
    "llama-fp32-master-sgd": ("llama", "fp32-master", False, ONE | {"optimizer": "sgd"}),
}
# Each recipe, model and cut, with clipping or without, is met by those that are not long.
LONG_CASES = (
    "llama-fp32-clip-packed-rounds",
    "llama-bf16-one-round",
    "llama-fp32-master-long-rounds",
    "llama-bf16-clip-lion",
    "qwen3-fp32-clip-one-round",
)


def cases(long=LONG_CASES):
    return [pytest.param(c, marks=pytest.mark.long if c in long else ()) for c in CASES]


@pytest.fixture(scope="module")
def hardware():
    return Hardware.estimate(2, "cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            (folder / "in.json").write_text(json.dumps(COMMON | MODELS[name]))
            subprocess.run(
                [
                    sys.executable,
                    ROOT / "models/init_model.py",
                    *f"{folder}/in.json {folder}/model --seed 3".split(),
                ],
                check=True,
                capture_output=True,
            )
            made[name] = folder / "model"
        return made[name]

    return make


def batch_of(plan):
    n = plan.report["tokens_per_step"]

    def batch(step):
        rng = np.random.default_rng(step)
        targets = rng.integers(0, VOCAB, n)
        targets[rng.random(n) < 0.1] = -1
        return rng.integers(0, VOCAB, n), targets

    return batch


def run(folder, plan, steps=STEPS):
    with Trainer(
        folder,
        plan,
        batch_of(plan),
        lr=3e-3,
        seed=11,
    ) as trainer:
        metrics = list(trainer.steps(steps))
        weights = {name: trainer.read(name).tobytes() for name in trainer.params}
    return metrics, weights


def within_a_unit(measured, planned):
    """Arenas are mapped in units; the plan's last byte lies in the last of them and is touched."""
    return planned - UNIT < measured <= planned


def decisions(plan):
    d = plan.json()
    return json.dumps([d["units"], d["layers"]])


def different_plans(model, hardware, kw):
    """Under caps of device memory from all that a plan can use down to the smallest feasible,
    eight of them evenly spaced; then under ever smaller caps of host memory, so that less is sent
    there and more is recomputed. One plan for each set of decisions."""
    most = Plan(model, hardware=hardware, **kw).report["device_used_bytes"]
    least, _ = Plan.smallest(model, hardware=hardware, **kw)
    plans = {}
    for i in reversed(range(8)):
        cap = least + (most - least) * i // 7
        plan = Plan(model, hardware=hardware, device_mem=cap, **kw)
        assert plan.report["device_used_bytes"] <= cap
        plans.setdefault(decisions(plan), plan)
    for device in (least, most):
        plan = Plan(model, hardware=hardware, device_mem=device, **kw)
        for _ in range(3):
            cap = plan.report["host_used_bytes"] - 1
            try:
                plan = Plan(model, hardware=hardware, device_mem=device, host_mem=cap, **kw)
            except BudgetError:
                break
            assert plan.report["host_used_bytes"] <= cap
            plans.setdefault(decisions(plan), plan)
    return list(plans.values())


@pytest.mark.parametrize("case", cases())
def test_every_budget_gives_the_same_bits(case, model_dir, hardware):
    name, recipe, clip, cut = CASES[case]
    folder = model_dir(name)
    model = ModelConfig.read(folder)
    kw = {"recipe": recipe, "clip_norm": float(clip), "document_token": 7, "threads": 2} | cut
    plans = different_plans(model, hardware, kw)
    reports = [p.report for p in plans]
    assert (
        len(plans) >= 6
        and reports[0]["resident_param_units"] + plans[0].json()["embed_on_host"]
        == reports[0]["n_units"]
    )
    assert any(r["resident_param_units"] <= 1 for r in reports) and any(
        r["saved_host_bytes"] for r in reports
    )  # at most the head is there to stay
    assert any(r["saved_recompute_bytes"] for r in reports)
    expected = None
    for i in sorted(
        {round(i * (len(plans) - 1) / 4) for i in range(5)}
    ):  # five of them, both ends among them
        plan = plans[i]
        metrics, weights = run(folder, plan)
        seen = [(m.loss, m.grad_norm) for m in metrics], weights
        expected = expected or seen
        assert seen[0] == expected[0]
        for key, value in weights.items():
            assert value == expected[1][key], key
        assert within_a_unit(metrics[-1].device_peak_bytes, plan.report["device_used_bytes"])
        assert within_a_unit(metrics[-1].host_arena_peak_bytes, plan.report["host_arena_bytes"])
    losses = [loss for loss, _ in expected[0]]
    assert len(set(losses)) == STEPS and all(np.isfinite(losses))


# of CASES
PINNED = ("llama-bf16-one-round", "qwen2-fp32-master-clip-packed-rounds")


@pytest.mark.parametrize("case", [pytest.param(PINNED[0], marks=pytest.mark.long), PINNED[1]])
def test_every_limit_of_pinned_memory_gives_the_same_bits(case, model_dir, hardware):
    name, recipe, clip, cut = CASES[case]
    folder = model_dir(name)
    model = ModelConfig.read(folder)
    kw = {"recipe": recipe, "clip_norm": float(clip), "document_token": 7, "threads": 2} | cut
    kw |= {"hardware": hardware, "device_mem": 6 * MIB, "val_tokens": cut["seq_len"]}
    whole = Plan(model, **kw)
    arena = whole.report["host_arena_bytes"]
    with pytest.raises(
        BudgetError, match=r"must be pinned, 64.0 KiB can be: raise pinned_mem"
    ) as why:
        Plan(model, pinned_mem="64KiB", **kw)
    least = int(re.search(r"plan pins (\d+) bytes", str(why.value))[1])
    expected = run(folder, whole, 3)
    staged = set()
    for limit in (arena - 1, (least + arena) // 2, least):
        plan = Plan(model, pinned_mem=f"{limit}B", **kw)
        r = plan.report
        assert r["pinned_bytes"] <= limit and r["pageable_bytes"] > 0
        staged.add((r["staged_total_units"] > 0, r["staged_weight_units"] > 0))
        metrics, weights = run(folder, plan, 3)
        assert [(m.loss, m.grad_norm) for m in metrics] == [
            (m.loss, m.grad_norm) for m in expected[0]
        ]
        assert weights == expected[1]
    assert {(False, False), (True, True)} <= staged


PIN_SHIM = """
#include <stdint.h>
#include <stdlib.h>
__attribute__((weak)) void ps__pin_limit(uint64_t bytes);
__attribute__((constructor)) static void limit(void) {
  if (ps__pin_limit)
    ps__pin_limit(strtoull(getenv("PIN_LIMIT"), NULL, 10));
}
"""


def test_a_training_plans_again_with_what_could_be_pinned(model_dir, tmp_path):
    folder, limit = model_dir("llama"), 6 * MIB
    shard = write_shard(tmp_path / "a.bin", np.random.default_rng(5).integers(0, VOCAB, 40000))
    (tmp_path / "pin.c").write_text(PIN_SHIM)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", tmp_path / "pin.so", tmp_path / "pin.c"], check=True
    )
    command = [BUILD / "bin/penstock", "train", "--model", folder, "--data", shard, "--threads"]
    command += ["2", "--seq-len=64", "--tokens-per-step=512", "--steps=2", "--recipe=fp32-master"]
    command += ["--device-mem=6MiB"]
    losses = {}
    for name, env in (
        ("free", {}),
        ("less", {"LD_PRELOAD": str(tmp_path / "pin.so"), "PIN_LIMIT": str(limit)}),
    ):
        done = subprocess.run(
            [*command, "--run-dir", tmp_path / name],
            capture_output=True,
            text=True,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | env,
        )
        assert done.returncode == 0, done.stderr
        plan = json.loads((tmp_path / name / "plan.json").read_text())
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = find(json.loads(lines[-1]), "loss")
    assert find(plan, "pinned_bytes") <= limit < find(plan, "host_arena_bytes")
    assert f"another plan is made, as with --pinned-mem {limit}" in " ".join(done.stderr.split())
    assert losses["free"] == pytest.approx(losses["less"], rel=1e-4)  # the cut may be another


SMALL = {"seq_len": 32, "tokens_per_step": 128, "chunk_tokens": 32, "chunks_per_round": 4}
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
PREVIOUS = {"clip_norm": 0.5, "clip_by": "previous"}
NO_HOMES = {
    "bf16-unclipped": ("llama", {"recipe": "bf16", "clip_norm": 0.0}),
    "tied-fp32-master-previous": ("qwen2-tied", {"recipe": "fp32-master"} | PREVIOUS),
    "two-devices-previous": (
        "llama",
        {"recipe": "bf16", "gpus": 2, "chunks_per_round": 2, "layout": "data-parallel"} | PREVIOUS,
    ),
    "ring": (
        "llama",
        {"recipe": "bf16", "gpus": 2, "layout": "ring", "clip_norm": 0.0, "optimizer": "lion"},
    ),
}


@pytest.mark.parametrize("case", NO_HOMES)
def test_gradients_without_a_home_train_where_others_are_refused(case, tmp_path, hardware):
    """A host cap under which gradients with memory of their own do not fit: the same bits, and the
    plan's count of bytes."""
    name, more = NO_HOMES[case]
    (tmp_path / "in.json").write_text(json.dumps(COMMON | MODELS[name] | WIDE))
    init = [sys.executable, ROOT / "models/init_model.py", tmp_path / "in.json", tmp_path / "model"]
    subprocess.run(init, check=True, capture_output=True)
    model = ModelConfig.read(tmp_path / "model")
    kw = SMALL | {"hardware": hardware, "threads": 2, "reserve": MIB, "device_mem": 8 * MIB} | more
    with_home = Plan(model, **kw)
    least = Plan.smallest(model, **kw)[1], Plan.smallest(model, keep_grads=False, **kw)[1]
    report = with_home.report
    elements = report["grad_bytes"] / 2
    assert elements > 4e6 and report["passing_grad_units"] == 0
    assert least[0] - least[1] > elements  # the rest is under way: totals, and contributions
    with pytest.raises(BudgetError, match="of host memory"):
        Plan(model, host_mem=least[1], **kw)
    plan = Plan(model, host_mem=least[1], keep_grads=False, **kw)
    got = plan.report
    assert got["host_used_bytes"] <= least[1] and got["n_rounds"] == report["n_rounds"]
    assert got["passing_grad_units"] + plan.json()["embed_on_host"] == got["n_units"]
    assert got["weight_bytes"] == report["weight_bytes"] and got["grad_bytes"] < elements
    wanted, weights = run(tmp_path / "model", with_home, 3)
    metrics, others = run(tmp_path / "model", plan, 3)
    assert [(m.loss, m.grad_norm) for m in metrics] == [(m.loss, m.grad_norm) for m in wanted]
    assert others == weights
    assert within_a_unit(metrics[-1].host_arena_peak_bytes, got["host_arena_bytes"])
    with (
        Trainer(tmp_path / "model", plan, batch_of(plan)) as trainer,
        pytest.raises(StateError, match="gone after its update: make the plan with keep_grads"),
    ):
        trainer.grad("model.norm.weight")


def test_inputs_are_made_again_where_saved_ones_do_not_fit(tmp_path, hardware):
    (tmp_path / "in.json").write_text(json.dumps(COMMON | MODELS["llama"] | WIDE))
    init = [sys.executable, ROOT / "models/init_model.py", tmp_path / "in.json", tmp_path / "model"]
    subprocess.run(init, check=True, capture_output=True)
    model = ModelConfig.read(tmp_path / "model")
    kw = {"seq_len": 32, "chunk_tokens": 128, "chunks_per_round": 16, "tokens_per_step": 2048}
    kw |= {"hardware": hardware, "threads": 2, "reserve": MIB, "recipe": "bf16", "clip_norm": 0.0}
    kw |= {"keep_grads": False}
    wide = Plan(model, **kw)
    least = Plan.smallest(model, device_mem=8 * MIB, **kw)[1]
    plan = Plan(model, device_mem=8 * MIB, host_mem=least, **kw)
    assert plan.report["input_again_blocks"] == 2 and wide.report["input_again_blocks"] == 0
    assert "inputs of 2 blocks are not saved" in str(plan)
    wanted, weights = run(tmp_path / "model", wide, 2)
    metrics, others = run(tmp_path / "model", plan, 2)
    assert [(m.loss, m.grad_norm) for m in metrics] == [(m.loss, m.grad_norm) for m in wanted]
    assert others == weights


def virtual_bytes():
    return int(re.search(r"VmSize:\s*(\d+)", Path("/proc/self/status").read_text())[1]) << 10


@pytest.mark.parametrize("case", cases([*LONG_CASES, "qwen2-fp32-long", "llama-fp32-master-sgd"]))
def test_a_byte_less_than_the_smallest_is_refused_before_anything_is_mapped(
    case, tmp_path, hardware
):
    name, recipe, _, cut = CASES[case]
    (tmp_path / "config.json").write_text(
        json.dumps(COMMON | MODELS[name] | {"vocab_size": 16384})
    )  # a plan needs no weights
    model = ModelConfig.read(tmp_path)
    kw = {"recipe": recipe} | cut
    # the process's own memory is given, so that a cap can be exact
    kw |= {"hardware": hardware, "reserve": 64 * MIB, "threads": 2}
    least = dict(zip(("device", "host"), Plan.smallest(model, **kw), strict=True))
    assert least["device"] > 2 * UNIT
    for what, cap in least.items():
        Plan(model, **{f"{what}_mem": cap}, **kw)
        mapped = []
        for _ in range(3):  # the allocator and the search's threads may map some once
            before = virtual_bytes()
            with pytest.raises(BudgetError) as refusal:
                Plan(model, **{f"{what}_mem": cap - 1}, **kw)
            mapped.append(virtual_bytes() - before)
        text = str(refusal.value)
        assert f"of {what} memory" in text and f"{what}_mem" in text and "\n" not in text
        assert str(cap) in text
        assert min(mapped) < UNIT, "no arena was mapped"


HELD = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
sys.stdout.write(json.dumps([done.returncode, done.stderr, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024]))
"""


def native_run(folder, shard, run_dir, cache, threads, *options):
    """Train by the native binary; its plan, the last step's metrics, and the peak of its memory as
    the kernel tells its parent."""
    command = [
        BUILD / "bin/penstock",
        *words_of_training(folder, shard, "--run-dir", run_dir, "--threads", threads),
        *"--tokens-per-step 512 --steps 5 --recipe fp32".split(),
        *options,
    ]
    out = subprocess.run(
        [sys.executable, "-c", HELD, *map(str, command)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )
    code, err, peak = json.loads(out.stdout)
    if code:
        return code, err, None, None
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return code, peak, json.loads((run_dir / "plan.json").read_text()), metrics[-1]


def find(tree, key):
    """The first value under a key, at any depth."""
    if isinstance(tree, dict):
        return (
            tree[key]
            if key in tree
            else next((v for v in (find(t, key) for t in tree.values()) if v is not None), None)
        )
    return None


@pytest.mark.parametrize(
    "threads",
    [
        pytest.param(n, marks=() if n == 2 else pytest.mark.long)
        for n in (1, 2, 4)
        if n <= max(2, len(os.sched_getaffinity(0)))
    ],
)
def test_the_process_stays_under_its_host_cap(threads, model_dir, tmp_path):
    folder, cache = model_dir("llama"), tmp_path / "cache"
    alone = ("--replan", "off")  # no search takes its memory beside so few steps
    shard = write_shard(tmp_path / "a.bin", np.random.default_rng(5).integers(0, VOCAB, 40000))
    # rates are cached first: measuring them takes memory of its own, once, before a run
    subprocess.run(
        [BUILD / "bin/penstock", "profile", "--quick", "--threads", str(threads)],
        check=True,
        capture_output=True,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )
    code, err, _, _ = native_run(
        folder, shard, tmp_path / "none", cache, threads, "--host-mem", "1MiB", *alone
    )
    assert code == 2 and "host memory" in err and not (tmp_path / "none").exists()
    smallest = int(re.search(r"smallest plan takes (\d+) bytes", err)[1])
    for i, cap in enumerate((smallest + 8 * MIB, smallest + 32 * MIB, 0)):
        options = ["--host-mem", str(cap)] if cap else []
        code, peak, plan, last = native_run(
            folder, shard, tmp_path / str(i), cache, threads, *options, *alone
        )
        assert code == 0, peak
        planned = find(plan, "host_used_bytes")
        assert planned <= cap or not cap
        assert last["host_peak_bytes"] <= planned
        # the whole process, from start to end, as the kernel counted it
        assert peak - last["device_peak_bytes"] <= planned
        # not wasteful either: at most 12 MiB and 6 MiB a thread are set aside in vain
        assert planned - last["host_peak_bytes"] <= (12 + 8 + 6 * threads) * MIB
        assert within_a_unit(last["device_peak_bytes"], find(plan, "device_used_bytes"))
        assert within_a_unit(last["host_arena_peak_bytes"], find(plan, "host_arena_bytes"))


def test_a_python_process_stays_under_its_host_cap_whatever_it_did_before(model_dir):
    """A great allocation before the training, given back, is not this run's peak; what is held all
    along is."""
    script = f"""
import sys, json
sys.path.insert(0, {str(ROOT / "python")!r})
import numpy as np
from penstock import Hardware, ModelConfig, Plan, Trainer
gone = np.ones(64 << 20, np.uint8); del gone
held = np.ones(16 << 20, np.uint8)
folder = sys.argv[1]
plan = Plan(ModelConfig.read(folder), seq_len=64, tokens_per_step=512, recipe="fp32", hardware=Hardware.estimate(2, "cpu"), threads=2)
rng = np.random.default_rng(0)
with Trainer(folder, plan, lambda step: (rng.integers(0, {VOCAB}, 512), rng.integers(0, {VOCAB}, 512))) as trainer:
    last = list(trainer.steps(5))[-1]
print(json.dumps([last.host_peak_bytes, plan.report["host_used_bytes"], plan.report["host_arena_bytes"]]))
"""
    out = subprocess.run(
        [sys.executable, "-c", script, str(model_dir("llama"))],
        capture_output=True,
        text=True,
        check=True,
    )
    peak, planned, arena = json.loads(out.stdout)
    assert arena + 16 * MIB < peak <= planned <= peak + 32 * MIB
