"""Whole steps on a GPU: gradients against PyTorch and against the CPU backend, chunks and
documents, the same bits under every budget, errors in the middle of a run, memory as the driver
reports it.

Every test runs with backend="cuda" where there is a GPU. Those marked cpu_too say something on the
CPU backend that the other tests do not, and run there in `make test`; all of them do with
--cpu-steps, which shows that they hold where nothing is new. PyTorch runs on the CPU, in fp64, so
that this process's device memory is Penstock's alone. Deterministic attention with documents needs
cuDNN 9.25, so the tests of bits have one document a sequence.
"""

import dataclasses
import functools
import json
import math
import re
import subprocess

import numpy as np
import pytest
import reference as ref
import tolerance
import torch
from conftest import BUILD, write_shard
from penstock import Hardware, ModelConfig, Plan, TensorFile, Trainer
from test_parity import gradients_of

SEQ, N_SEQ, VOCAB, LAYERS, BEGIN = 100, 4, 512, 4, 0  # BEGIN: the token that begins a document
CLIP, LR, SLACK = 1.0, 3e-3, 1 << 30
FAMILY = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "use_sliding_window": False,
    },
}
# tokens a chunk, chunks a round; a sequence has SEQ tokens
WHOLE, SLICED = (SEQ, 2), (SEQ // 4, 8)
ONE_DOCUMENT = {"one_document": True}
SAME_BITS = {
    "deterministic": True,
    "keep_grads": False,
    **ONE_DOCUMENT,
}  # gradients that need not come home: updates may be on the device


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        cpu = metafunc.definition.get_closest_marker("cpu_too") or metafunc.config.getoption(
            "cpu_steps"
        )
        metafunc.parametrize(
            "backend", (["cpu"] if cpu else []) + [pytest.param("cuda", marks=pytest.mark.gpu)]
        )


# ---- what is trained -----------------------------------------------------------------------------


def config(family, head_dim):
    heads = 256 // head_dim
    return FAMILY[family] | {
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "head_dim": head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }


@functools.cache
def weights(family, head_dim):
    return ref.random_weights(config(family, head_dim), seed=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @functools.cache
    def make(family, head_dim):
        return ref.write_directory(
            tmp_path_factory.mktemp("steps") / "model",
            config(family, head_dim),
            weights(family, head_dim),
        )

    return make


@functools.cache
def hardware(backend):
    """SLACK beside what a process takes on a GPU: this one keeps what the tests before left in the
    libraries. The host updates slowly, however many CPUs the machine has, so that a plan without a
    cap has AdamW on the GPU."""
    hw = Hardware.estimate(2 if backend == "cpu" else 0, backend)
    if backend == "cuda":
        hw._ptr.device_overhead_bytes += SLACK
        for part in ("optimizer", "optimizer_weights", "optimizer_state"):
            setattr(hw._ptr, part + "_bytes_per_s", 1e10)
    return hw


def plan_options(backend, recipe, layout, **more):
    chunk, a_round = layout
    return {
        "seq_len": SEQ,
        "tokens_per_step": SEQ * N_SEQ,
        "recipe": recipe,
        "chunk_tokens": chunk,
        "chunks_per_round": a_round,
        "clip_norm": CLIP,
        "threads": hardware(backend).n_threads,
        "hardware": hardware(backend),
        **more,
    }


def make_plan(where, backend, recipe="bf16", layout=WHOLE, seq=SEQ, **more):
    return Plan(
        ModelConfig.read(where), **plan_options(backend, recipe, layout, seq_len=seq, **more)
    )


def batch(step, document=0):
    """(tokens, targets) of a step, a tenth of the targets masked; with `document` a document begins
    every so many tokens."""
    r = np.random.default_rng([11, step])
    t = 1 + (VOCAB - 1) * r.random((N_SEQ, SEQ + 1)) ** 2
    t = np.minimum(t, VOCAB - 1).astype(np.int32)
    tokens, targets = t[:, :-1].copy(), t[:, 1:].copy()
    targets[r.random(targets.shape) < 0.1] = -1
    if document:
        tokens[:, ::document] = BEGIN
        targets[:, document - 1 :: document] = -1  # the last token of a document predicts nothing
    return tokens, targets


@dataclasses.dataclass(frozen=True)
class First:
    """What the first step gave."""

    loss: float
    grads: dict
    n_valid: int
    n_chunks: int


def first_step(where, plan, data=batch):
    with Trainer(where, plan, data) as trainer:
        (m,) = trainer.steps(1)
        return First(
            m.loss,
            gradients_of(trainer),
            m.valid_tokens,
            plan.report["n_chunks"],
        )


@functools.cache
def exact(family, head_dim, rounded, document=0):
    """Loss, gradients and spreads by PyTorch in fp64, from the weights as the recipe holds them."""
    w = (
        {k: v.bfloat16() for k, v in weights(family, head_dim).items()}
        if rounded
        else weights(family, head_dim)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, 4))
    try:
        return ref.Reference(
            config(family, head_dim), w, document_token=BEGIN if document else None
        ).gradients(*batch(0, document))
    finally:
        torch.set_num_threads(before)


def bound(backend, recipe, n_chunks):
    a_layer = tolerance.A_LAYER + (tolerance.FUSED_ATTENTION if backend == "cuda" else 0)
    return tolerance.delta(recipe, LAYERS, n_chunks, VOCAB, a_layer)


def check_exact(found, expected, delta):
    assert abs(found.loss - expected[0]) < tolerance.loss_noise(delta, found.n_valid)
    print(
        f"worst share of the bound {delta:.2g}: {tolerance.check_gradients(found.grads, expected, delta):.2f}"
    )


def check_pair(a, b, expected, delta):
    """Two whose errors are independent: `delta` is the root of both bounds' squares."""
    check_exact(
        a, (b.loss, {n: torch.from_numpy(g) for n, g in b.grads.items()}, expected[2]), delta
    )


# ---- losses and gradients ------------------------------------------------------------------------

MODELS = [
    ("llama", 64, "bf16"),
    ("llama", 128, "bf16"),
    ("qwen2", 64, "bf16"),
    ("qwen2", 128, "bf16"),
    ("qwen3", 64, "bf16"),
    ("qwen3", 128, "bf16"),
    ("llama", 128, "fp32-master"),
]


@pytest.mark.parametrize("family, head_dim, recipe", MODELS)
def test_loss_and_gradients_of_every_tensor(directory, backend, family, head_dim, recipe):
    where, expected = directory(family, head_dim), exact(family, head_dim, True)
    found = first_step(where, make_plan(where, backend, recipe, **ONE_DOCUMENT))
    delta = bound(backend, recipe, found.n_chunks)
    check_exact(found, expected, delta)
    if backend != "cpu":
        on_cpu = first_step(where, make_plan(where, "cpu", recipe, **ONE_DOCUMENT))
        check_pair(
            found, on_cpu, expected, math.hypot(delta, bound("cpu", recipe, on_cpu.n_chunks))
        )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family, head_dim", [("llama", 128), ("qwen3", 64)])
def test_a_sequence_over_four_chunks_is_as_one_chunk(
    directory, backend, family, head_dim, deterministic
):
    where, expected = directory(family, head_dim), exact(family, head_dim, True)
    whole, sliced = (
        first_step(
            where,
            make_plan(where, backend, layout=layout, deterministic=deterministic, **ONE_DOCUMENT),
        )
        for layout in (WHOLE, SLICED)
    )
    assert (whole.n_chunks, sliced.n_chunks) == (N_SEQ, 4 * N_SEQ)
    deltas = [bound(backend, "bf16", f.n_chunks) for f in (whole, sliced)]
    check_exact(sliced, expected, deltas[1])
    check_pair(sliced, whole, expected, math.hypot(*deltas))


DOCUMENT = SEQ // 4
# sequence length, layout, whether the data says where documents begin, whether the plan promises
# one a sequence
PACKINGS = {
    "documents-in-a-sequence": (SEQ, WHOLE, True, False),
    "documents-in-slices": (SEQ, (2 * DOCUMENT, 4), True, False),
    "documents-over-slices": (SEQ, (10, 20), True, False),
    "packed-sequences": (DOCUMENT, (SEQ, 2), False, True),
    "packed-sequences-found": (DOCUMENT, (SEQ, 2), False, False),
}


@pytest.mark.cpu_too
@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_documents_are_as_separate_sequences(directory, backend, packing):
    seq, layout, begins, known = PACKINGS[packing]
    recipe = "fp32" if backend == "cpu" else "bf16"  # attention on a GPU is in bf16
    where, expected = directory("llama", 64), exact("llama", 64, recipe != "fp32", DOCUMENT)

    def data(step):
        return batch(step, DOCUMENT)

    packed = first_step(
        where,
        make_plan(
            where,
            backend,
            recipe,
            layout,
            seq,
            one_document=known,
            document_token=BEGIN if begins else -1,
        ),  # fmt: skip
        data,
    )
    separate = first_step(
        where, make_plan(where, backend, recipe, (DOCUMENT, 4), DOCUMENT, **ONE_DOCUMENT), data
    )
    assert packed.n_valid == separate.n_valid
    deltas = [bound(backend, recipe, f.n_chunks) for f in (packed, separate)]
    check_exact(packed, expected, deltas[0])
    check_pair(packed, separate, expected, math.hypot(*deltas))


# ---- the same bits -------------------------------------------------------------------------------

STEPS = 4
BITS = {
    "bf16-clip": ("bf16", CLIP, WHOLE, {}),
    "fp32-master-slices": ("fp32-master", 0.0, SLICED, {}),
    "state-of-8-bits": ("bf16", CLIP, WHOLE, {"state_bits": 8}),
    "fp24-master": ("fp24-master", CLIP, WHOLE, {"state_bits": 8}),
    "no-gradients-at-home": ("bf16", CLIP, (SEQ, 4), {"clip_by": "previous"}),
}


def trained(where, plan, steps=STEPS):
    """Losses, norms and the bytes of every weight after so many steps."""
    with Trainer(where, plan, batch, lr=LR, seed=5) as trainer:
        figures = [(m.loss, m.grad_norm) for m in trainer.steps(steps)]
        return figures, {n: trainer.read(n).tobytes() for n in trainer.params}


def budgets(where, backend, recipe, clip, layout, more):
    """Plans from everything resident down to the smallest device, each unlike the others."""
    kw = {"recipe": recipe, "clip_norm": clip, "layout": layout, **SAME_BITS, **more}
    plans = [make_plan(where, backend, **kw)]
    most, least = plans[0].report["device_used_bytes"], smallest(where, backend, **kw)
    seen = {decisions(plans[0])}
    for i in reversed(range(8)):
        cap = least + (most - least) * i // 8
        plan = make_plan(where, backend, device_mem=cap, **kw)
        assert plan.report["device_used_bytes"] <= cap
        if decisions(plan) not in seen:
            seen.add(decisions(plan))
            plans.append(plan)
    return plans


def smallest(where, backend, recipe, layout, **more):
    options = plan_options(backend, recipe, layout, **more)
    return Plan.smallest(ModelConfig.read(where), **options)[0]


def decisions(plan):
    d = plan.json()
    return json.dumps([d["units"], d["layers"]])


@pytest.mark.parametrize("case", BITS)
def test_every_budget_gives_the_same_bits(directory, backend, case):
    where = directory("qwen3", 64)
    plans = budgets(where, backend, *BITS[case])
    reports = [p.report for p in plans]
    assert len(plans) >= 4
    assert any(r["resident_update_units"] == r["n_units"] for r in reports)  # AdamW on the device
    assert any(
        r["resident_update_units"] == 0 and r["resident_param_units"] <= 1 for r in reports
    )  # AdamW on the host, everything but perhaps the head streamed
    expected = trained(where, plans[0])
    assert len({loss for loss, _ in expected[0]}) == STEPS
    for plan in plans[1:] + plans[:1]:  # and the first once more: twice in a row
        figures, bits = trained(where, plan)
        assert figures == expected[0], plan.report
        assert [n for n in bits if bits[n] != expected[1][n]] == [], plan.report


# ---- errors in the middle of a run ---------------------------------------------------------------

FAILS_AT = 3


def fails(step):
    if step == FAILS_AT:
        raise LookupError("no more data")
    return batch(step)


def out_of_range(step):
    tokens, targets = batch(step)
    if step == FAILS_AT:
        tokens[1, 7] = VOCAB
    return tokens, targets


@pytest.mark.cpu_too
@pytest.mark.parametrize("least", [False, True], ids=["resident", "smallest"])
@pytest.mark.parametrize(
    "data, error, says",
    [
        (fails, LookupError, f"of the run's step {FAILS_AT + 1}"),
        (out_of_range, ValueError, f"step {FAILS_AT + 1}, sequence 1, position 7: token {VOCAB} "),
    ],
    ids=["batch-function", "token"],
)
def test_an_error_leaves_the_last_complete_step(
    directory, tmp_path, backend, data, error, says, least
):
    where = directory("llama", 64)
    kw = {"recipe": "bf16", "layout": WHOLE, **SAME_BITS}
    cap = {"device_mem": smallest(where, backend, **kw)} if least else {}
    figures, bits = trained(where, make_plan(where, backend, **kw, **cap), FAILS_AT)
    with Trainer(where, make_plan(where, backend, **kw, **cap), data, lr=LR, seed=5) as trainer:
        seen, sentences = [], []
        with pytest.raises(error) as raised:
            for m in trainer.steps(100):
                seen.append((m.loss, m.grad_norm))
        sentences.append(str(raised.value.__cause__ or raised.value))
        assert seen == figures and trainer.steps_done == FAILS_AT
        with pytest.raises(error) as raised:  # it is sticky
            list(trainer.steps(1))
        sentences.append(str(raised.value.__cause__ or raised.value))
        assert says in sentences[0] and sentences[0] == sentences[1] and "\n" not in sentences[0]
        assert {n: trainer.read(n).tobytes() for n in trainer.params} == bits
        trainer.save(tmp_path / "saved", "fp32")
    saved = TensorFile(tmp_path / "saved")
    assert {n: saved.read(n).tobytes() for n in bits} == bits


# ---- memory as the driver reports it -------------------------------------------------------------


def penstock(*words):
    return subprocess.run(
        [str(w) for w in (BUILD / "bin/penstock", *words)], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def profile():
    done = penstock("profile", "--backend", "cuda", "--quick", "--seconds", 2, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.gpu
def test_measured_rates_are_below_their_ceilings(profile):
    """Every case has a rate, and where a ceiling is known none passes it."""
    peak = profile["peak_flops_per_s"] or math.inf
    assert len(profile["gemm_bf16"]) == 4 and len(profile["attention_bf16"]) in (
        9,
        11,
    )  # without the two of found documents where no library takes them
    for case in profile["gemm_bf16"] + profile["attention_bf16"]:
        assert all(
            1e10 < rate < peak for name, rate in case.items() if name.endswith("flops_per_s")
        ), case
    for which in ("attention", "attention_bwd", "long_attention", "long_attention_bwd"):
        assert 0.3 < profile[f"heads64_{which}_speed"] < 1.3
    assert 0 <= profile["idle_gain"] <= 1 and 0 <= profile["idle_most"] <= 1
    assert (
        1e10 < profile["elementwise_bytes_per_s"] < (profile["device_peak_bytes_per_s"] or math.inf)
    )
    for name in ("h2d", "d2h", "duplex"):
        assert 1e8 < profile[f"{name}_bytes_per_s"] < (profile["link_peak_bytes_per_s"] or math.inf)
    for name in ("optimizer", "accumulate", "accumulate_sumsq", "sumsq", "gather", "memory"):
        assert profile[f"{name}_bytes_per_s"] > 1e8


@pytest.mark.gpu
def test_fp8_is_measured_with_the_first_plan_that_needs_it(profile):
    """Beside the rates in bf16, which stay as they are, and kept with them."""
    if profile["compute_capability"] < 89:
        pytest.skip("this GPU has no products of FP8")
    bf16 = Hardware.cached().as_dict()
    assert profile["gemm_fp8"] == [] and not bf16["gemm_fp8"][0]["rows"]
    both = Hardware.cached(fp8=True).as_dict()
    assert [e["rows"] for e in both["gemm_fp8"]].index(0) == 4
    assert 0.5 < both["fp8_attention_speed"] < 1.2
    assert both["gemm_fp8_flops_per_s"] > both["gemm_flops_per_s"][1]
    of_fp8 = ("gemm_fp8_flops_per_s", "gemm_fp8", "fp8_attention_speed", "fp8_overhead_bytes")
    assert both | {name: bf16[name] for name in of_fp8} == bf16
    assert Hardware.cached().as_dict() == both


@pytest.mark.gpu
def test_the_driver_reports_no_more_than_was_planned(profile, tmp_path):
    """In processes of their own, each after `profile`, as a user's would be: under the least device
    memory, some more, and no cap."""
    wide = config("llama", 128) | {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(wide))
    shard = write_shard(tmp_path / "a.bin", np.random.default_rng(5).integers(0, 32000, 50000))
    train = [
        *f"train --model {tmp_path}/model --init-weights --data {shard} --seq-len 1024".split(),
        *"--tokens-per-step 8192 --steps 3 --backend cuda --quiet --run-dir".split(),
    ]
    done = penstock(*train, tmp_path / "none", "--device-mem", "1MiB")
    assert done.returncode == 2 and "device memory" in done.stderr, done.stderr
    least = int(re.search(r"smallest plan takes (\d+) bytes", done.stderr)[1])
    for i, cap in enumerate((least, least + (512 << 20), 0)):
        run_dir = tmp_path / str(i)
        done = penstock(*train, run_dir, *(["--device-mem", cap] if cap else []))
        assert done.returncode == 0, done.stderr
        planned = json.loads((run_dir / "plan.json").read_text())["device_used_bytes"]
        peaks = [
            json.loads(line)["device_peak_bytes"]
            for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        ]
        print(f"cap {cap}, planned {planned}, reported {max(peaks)}")
        assert len(peaks) == 3 and max(peaks) <= planned <= (cap or planned)
        assert planned - max(peaks) <= 256 << 20  # nor is much set aside in vain
