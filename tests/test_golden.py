"""What no refactoring may change: plans, compiled schedules, and the bits of trained weights,
against the files of tests/golden.

CASE.plan.json is plan.json but for slow_host_tokens_per_s: decisions, the exact predicted step
time, and how many candidates the search evaluated. CASE.schedule.json has SHA-256 sums of the compiled step, column by
column (tests/native/golden.c prints them): all ops in program order, prologue first.
CASE.weights.json has losses, gradient norms and the SHA-256 of all weights after three steps on the
CPU backend.

`make golden` writes them anew. A change of them is a commit of its own that says why.
"""

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import families
import pytest
from conftest import BUILD, HANGS_S, ROOT

GOLDEN = Path(__file__).resolve().parent / "golden"
MIB, GIB = 1 << 20, 1 << 30
CPU, H200, RTX4090, RTX5090 = (
    GOLDEN / "hardware-cpu.json",
    ROOT / "docs/hardware-h200.json",
    GOLDEN / "hardware-rtx4090.json",
    GOLDEN / "hardware-rtx5090.json",
)

DEEP = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
}
QWEN2_500M = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
QWEN3_LONG = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
GEMMA3_LARGE = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
}


def row(hardware, model, recipe, seq_len, tokens=0, changed=(), device=0, host=0, **more):
    """What of the arguments is not 0, and a clip norm of 1 where no other is given."""
    of = {"recipe": recipe, "seq_len": seq_len, "tokens_per_step": tokens}
    of |= {"device_mem_bytes": device, "host_mem_bytes": host}
    return (
        hardware,
        model,
        dict(changed),
        {k: v for k, v in of.items() if v} | {"clip_norm": 1} | more,
    )


# name: (hardware, config.json of models/ or of families.py, what is changed in it, fields of
# ps_plan_config)
PLANS = {
    "cpu-2-layers-fp32": row(
        CPU, "tiny-llama", "fp32", 64, changed={"num_hidden_layers": 2}, clip_norm=0
    ),
    "cpu-tied-bias-bf16": row(CPU, "tiny-qwen2", "bf16", 128, 2048, device=4 * MIB),
    "cpu-qk-norm-slices-master": row(
        CPU, "tiny-qwen3", "fp32-master", 2048, 4096, device=16 * MIB, chunk_tokens=500
    ),
    "cpu-host-cap-bf16": row(CPU, "demo", "bf16", 256, device=48 * MIB, host=380 * MIB),
    "cpu-fp8": row(
        CPU, "tiny-llama", "fp8", 64, 512, device=6 * MIB, fp8_bf16_first=1, fp8_bf16_last=1
    ),
    "cpu-2-devices-tied-bf16": row(
        CPU, "tiny-qwen2", "bf16", 128, 2048, device=4 * MIB, n_devices=2
    ),
    "cpu-ring-of-3-devices-tied-bf16": row(
        CPU,
        "tiny-qwen2",
        "bf16",
        128,
        2048,
        changed={"num_hidden_layers": 7},
        device=4 * MIB,
        n_devices=3,
        layout=2,
    ),
    "h200-1b-ring-of-4-devices-bf16": row(
        H200, "1b", "bf16", 8192, 262144, device=8 * GIB, host=64 * GIB, n_devices=4, layout=2
    ),
    "h200-1b-4-devices-bf16": row(
        H200, "1b", "bf16", 8192, 262144, device=16 * GIB, host=64 * GIB, n_devices=4
    ),
    "h200-1b-uncapped-bf16": row(H200, "1b", "bf16", 4096, 16384),
    "h200-1b-deterministic-fp32": row(
        H200,
        "1b",
        "fp32",
        4096,
        16384,
        device=20 * GIB,
        host=60 * GIB,
        chunk_tokens=4096,
        deterministic=1,
        keep_grads=1,
    ),
    "h200-1b-fp8": row(
        H200,
        "1b",
        "fp8",
        8192,
        65536,
        device=10 * GIB,
        host=40 * GIB,
        fp8_bf16_first=1,
        fp8_bf16_last=1,
    ),
    "h200-8b-rounds-bf16": row(
        H200,
        "8b",
        "bf16",
        8192,
        32768,
        device=24 * GIB,
        host=84 * GIB,
        chunk_tokens=8192,
        chunks_per_round=2,
        one_document=1,
    ),
    "rtx4090-tied-bias-24-layers-master": row(
        RTX4090,
        "tiny-qwen2",
        "fp32-master",
        2048,
        16384,
        changed=QWEN2_500M,
        device=6 * GIB,
        host=24 * GIB,
        chunk_tokens=4096,
        clip_norm=0,
    ),
    "rtx4090-1b-no-clip-bf16": row(
        RTX4090, "1b", "bf16", 2048, 16384, device=6 * GIB, host=16 * GIB, clip_norm=0
    ),
    "rtx4090-qk-norm-long-bf16": row(
        RTX4090,
        "tiny-qwen3",
        "bf16",
        32768,
        65536,
        changed=QWEN3_LONG,
        device=4 * GIB,
        host=16 * GIB,
        chunk_tokens=8192,
    ),
    "rtx5090-64-layers-rounds-master": row(
        RTX5090,
        "32b",
        "fp32-master",
        4096,
        16384,
        changed=DEEP,
        device=4 * GIB,
        host=40 * GIB,
        chunk_tokens=8192,
        chunks_per_round=1,
    ),
    "rtx5090-64-layers-split-master": row(
        RTX5090, "32b", "fp32-master", 4096, 8192, changed=DEEP, device=6 * GIB, host=40 * GIB
    ),
    "rtx5090-windows-post-norms-frozen-bf16": row(
        RTX5090,
        "gemma3-deep",
        "bf16",
        8192,
        32768,
        changed=GEMMA3_LARGE,
        device=5 * GIB,
        host=24 * GIB,
        chunk_tokens=4096,
        n_frozen_layers=3,
    ),
}
LONG_PLANS = {
    "h200-8b-24-84-bf16": row(H200, "8b", "bf16", 8192, 65536, device=24 * GIB, host=84 * GIB),
    "h200-8b-90-84-bf16": row(H200, "8b", "bf16", 8192, 65536, device=90 * GIB, host=84 * GIB),
    "rtx5090-64-layers-master": row(
        RTX5090, "32b", "fp32-master", 4096, 16384, changed=DEEP, device=6 * GIB, host=40 * GIB
    ),
}

# name: (config.json of models/ or of families.py, what is changed in it, arguments of Plan)
LARGE_VOCABULARY = {"vocab_size": 4096}
SLICES = dict(
    seq_len=64,
    tokens_per_step=512,
    chunk_tokens=24,
    chunks_per_round=6,
    device_mem=3 * MIB,
    clip_norm=1,
)
WEIGHTS = {
    "train-fp32": ("tiny-llama", {}, dict(recipe="fp32", seq_len=64, clip_norm=1)),
    "train-master": ("tiny-llama", {}, dict(recipe="fp32-master", seq_len=64, clip_norm=1)),
    "train-bf16-no-clip": ("tiny-llama", {}, dict(recipe="bf16", seq_len=64, clip_norm=0)),
    "train-lion-bf16": (
        "tiny-llama",
        {},
        dict(recipe="bf16", optimizer="lion", seq_len=64, clip_norm=1),
    ),
    "train-sgd-master": (
        "tiny-llama",
        {},
        dict(recipe="fp32-master", optimizer="sgd", seq_len=64, clip_norm=0),
    ),
    "train-tied-bias-bf16": ("tiny-qwen2", {}, dict(recipe="bf16", seq_len=64, clip_norm=1)),
    "train-tied-qk-norm-master": (
        "tiny-qwen3",
        {"tie_word_embeddings": True},
        dict(recipe="fp32-master", seq_len=64, clip_norm=1),
    ),
    "train-rounds-of-slices-fp32": (
        "tiny-qwen3",
        {"tie_word_embeddings": False},
        dict(
            recipe="fp32",
            seq_len=160,
            tokens_per_step=640,
            chunk_tokens=64,
            chunks_per_round=3,
            device_mem=4 * MIB,
            clip_norm=1,
        ),
    ),
    "train-embedding-on-host-master": (
        "tiny-llama",
        LARGE_VOCABULARY,
        dict(
            recipe="fp32-master",
            seq_len=64,
            tokens_per_step=512,
            chunk_tokens=64,
            chunks_per_round=2,
            device_mem=6 * MIB,
            clip_norm=1,
        ),
    ),
    "train-embedding-on-host-bf16": (
        "tiny-qwen3",
        LARGE_VOCABULARY | {"tie_word_embeddings": False},
        dict(
            recipe="bf16",
            seq_len=256,
            tokens_per_step=1024,
            chunk_tokens=64,
            chunks_per_round=4,
            device_mem=6 * MIB,
            clip_norm=1,
        ),
    ),
    "train-soft-caps-windows-bf16": ("gemma2-deep", {}, dict(recipe="bf16") | SLICES),
    "train-post-norms-master": ("olmo2-deep", {}, dict(recipe="fp32-master") | SLICES),
    "train-longrope-fp32": ("phi3-deep", {}, dict(recipe="fp32") | SLICES),
    "train-multipliers-frozen-bf16": (
        "granite-untied",
        {},
        dict(recipe="bf16", seq_len=64, clip_norm=0, frozen_layers=2),
    ),
}
OPENBLAS = BUILD / "lib/libscipy_openblas.so"
RESERVE = 256 * MIB  # else it is the process's own


# ---- comparing -----------------------------------------------------------------------------------


@pytest.fixture
def writing(request):
    return request.config.getoption("--write-golden")


def layout(value, indent=0):
    """JSON, indented; a short object of plain values, as a unit or a chunk's policies, on one line."""
    inside = "\n" + " " * (indent + 1)
    if isinstance(value, dict) and (
        indent == 0
        or len(json.dumps(value)) > 200
        or any(isinstance(v, (dict, list)) for v in value.values())
    ):
        return (
            "{"
            + ",".join(
                f"{inside}{json.dumps(k)}: {layout(v, indent + 1)}" for k, v in value.items()
            )
            + "\n"
            + " " * indent
            + "}"
        )
    if isinstance(value, list) and value:
        return (
            "["
            + ",".join(inside + layout(v, indent + 1) for v in value)
            + "\n"
            + " " * indent
            + "]"
        )
    return json.dumps(value)


def differences(golden, now, path=""):
    """["key: golden -> now"] of all that differs."""
    if type(golden) is type(now) and isinstance(golden, (dict, list)):
        keys = (
            list(dict.fromkeys([*golden, *now]))
            if isinstance(golden, dict)
            else range(max(len(golden), len(now)))
        )
        has = (lambda v, k: k in v) if isinstance(golden, dict) else (lambda v, k: k < len(v))
        found = []
        for k in keys:
            name = f"{path}[{k}]" if isinstance(golden, list) else f"{path}.{k}" if path else k
            found += differences(*(v[k] if has(v, k) else "(missing)" for v in (golden, now)), name)
        return found
    return (
        []
        if golden == now and type(golden) is type(now)
        else [f"{path}: {json.dumps(golden)} -> {json.dumps(now)}"]
    )


def compare(name, now, writing, hint=""):
    """now: what the golden file `name` should hold."""
    path = GOLDEN / name
    if writing:
        path.write_text(layout(now) + "\n")
    elif not path.exists():
        pytest.fail(f"tests/golden/{name} is missing: `make golden` writes it", pytrace=False)
    elif found := differences(json.loads(path.read_text()), now):
        more = f"\n  and {len(found) - 20} more" if len(found) > 20 else ""
        pytest.fail(
            f"tests/golden/{name} differs in {len(found)} keys (golden -> now):\n  "
            + "\n  ".join(found[:20])
            + more
            + hint
            + "\nIf this is meant, `make golden` writes the files anew: commit them by themselves, and say why.",
            pytrace=False,
        )


def built(name):
    """A product of `make native-tests`."""
    if not (BUILD / name).exists():
        pytest.fail(f"{BUILD / name} is not built: make native-tests", pytrace=False)
    return BUILD / name


def config(base, changes):
    if base in families.ALL:
        return families.ALL[base] | {"pad_token_id": None} | changes
    return json.loads((ROOT / f"models/{base}.json").read_text()) | changes


# ---- plans and schedules -------------------------------------------------------------------------

COLUMNS = ("kernels", "streams", "labels", "arguments", "ranges", "work", "waits")


def summary(lines):
    """SHA-256 sums of the ops' columns, and of all; how many ops of each stream and kernel.

    The names of arguments and of work are for people and no part of the sums: what they name in C
    may be renamed.
    """
    ops = [re.sub(r"[\w.]+=", "", line).split("\t") for line in lines]
    assert all(len(op) == len(COLUMNS) for op in ops)
    of = {
        name: hashlib.sha256("\n".join(op[i] for op in ops).encode()).hexdigest()
        for i, name in enumerate(COLUMNS)
    }
    count = lambda i: dict(sorted(Counter(op[i] for op in ops).items()))
    return {
        "n_ops": len(ops),
        "sha256": hashlib.sha256("\n".join(map("\t".join, ops)).encode()).hexdigest(),
        "sha256_of_columns": of,
        "ops_of_stream": count(1),
        "ops_of_kernel": count(0),
    }


def check_plan(case, tmp_path, writing):
    hardware, base, changes, fields = {**PLANS, **LONG_PLANS}[case]
    (tmp_path / "config.json").write_text(json.dumps(config(base, changes)))
    words = [
        BUILD / "tests/golden",
        tmp_path / "config.json",
        hardware,
        *(f"{k}={v}" for k, v in (fields | {"reserve_bytes": RESERVE, "trace_steps": 2}).items()),
    ]
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr + done.stdout[-1000:]
    plan, *ops = done.stdout.splitlines()
    (tmp_path / "ops.txt").write_text("\n".join(ops) + "\n")
    plan = json.loads(plan)
    assert 0 < plan.pop("slow_host_tokens_per_s") <= plan["predicted_tokens_per_s"]
    compare(f"{case}.plan.json", plan, writing)
    command = " ".join(str(w) for w in words)
    compare(
        f"{case}.schedule.json",
        summary(ops),
        writing,
        f"\nThe ops are in {tmp_path}/ops.txt; to see which, compare them with those of the commit before:\n  {command}",
    )


# Large ones: h200-1b-ring-of-4-devices and cpu-fp8 are such plans too.
SLOW = ("h200-1b-4-devices-bf16", "h200-1b-fp8")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.long if c in SLOW else ()) for c in PLANS]
)
def test_a_plan_and_its_schedule_are_as_ever(case, tmp_path, writing):
    check_plan(case, tmp_path, writing)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG_PLANS)
def test_a_large_plan_and_its_schedule_are_as_ever(case, tmp_path, writing):
    check_plan(case, tmp_path, writing)


# ---- weights -------------------------------------------------------------------------------------


@functools.cache
def why_no_weights():
    """Why this machine's bits may be others; None where they may not."""
    flags = next(
        (
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("flags")
        ),
        "",
    ).split()
    if not {"avx2", "fma"} <= set(flags):
        return "the golden weights are of kernels for AVX2 and FMA, which this CPU lacks"
    if not OPENBLAS.exists():
        return "built with the system's OpenBLAS: the golden weights are of the pinned wheel's"
    return None


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{case: results} of golden_train.py; on the kernels of one kind of CPU, whatever this one
    is."""
    if why_no_weights():
        pytest.skip(why_no_weights())
    cases = {
        name: {
            "config": config(base, changes),
            "hardware": str(CPU),
            "ask": ask | {"threads": 2, "reserve": RESERVE},
        }
        for name, (base, changes, ask) in WEIGHTS.items()
    }
    env = os.environ | {
        "OPENBLAS_CORETYPE": "Haswell",
        "PENSTOCK_BUILD": str(built("tests/avx2/lib/libpenstock.so").parent.parent),
        "PYTHONPATH": str(ROOT / "python"),
    }
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "tests/golden_train.py",
            tmp_path_factory.mktemp("golden"),
            OPENBLAS,
        ],
        input=json.dumps(cases),
        env=env,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", WEIGHTS)
def test_trained_weights_are_the_same_bits_as_ever(case, trained, writing):
    compare(f"{case}.weights.json", trained[case], writing)


def test_there_is_no_golden_file_without_a_case():
    wanted = {
        f"{case}.{what}.json" for case in [*PLANS, *LONG_PLANS] for what in ("plan", "schedule")
    } | {f"{case}.weights.json" for case in WEIGHTS}
    assert {p.name for p in GOLDEN.iterdir()} == wanted | {f.name for f in (CPU, RTX4090, RTX5090)}


def test_a_difference_is_told_by_case_and_key():
    golden = {"a": 1, "units": [{"update": "host"}, {"update": "host"}], "gone": 0}
    now = {"a": 1, "units": [{"update": "host"}, {"update": "device"}], "new": [1]}
    assert differences(golden, now) == [
        'units[1].update: "host" -> "device"',
        'gone: 0 -> "(missing)"',
        'new: "(missing)" -> [1]',
    ]
    assert differences(golden, json.loads(layout(golden))) == [] and differences(
        {"a": 1}, {"a": 1.0}
    ) == ["a: 1 -> 1.0"]
