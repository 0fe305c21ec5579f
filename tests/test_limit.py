"""bench/limit.py on the CPU, small: the calls that it times are the step's, it adds them up by
family, and it compares them with a training."""

import csv
import importlib.util
import json
import re
import subprocess
import sys

import pytest
from conftest import BUILD, HANGS_S, ROOT

SEQ, VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 512, 128, 4, 8, 2, 16, 352
TOKENS = 8 * SEQ  # of a step


def module():
    spec = importlib.util.spec_from_file_location("limit", ROOT / "bench/limit.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def limit(*words):
    command = [sys.executable, ROOT / "bench/limit.py", "--build", BUILD, "--quiet"]
    return subprocess.run(
        [str(w) for w in (*command, "--backend", "cpu", "--threads", 1, "--seq-len", SEQ, *words)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )


@pytest.fixture(scope="module")
def result(tiny_model, tiny_shard, tmp_path_factory):
    out = tmp_path_factory.mktemp("limit")
    files = ("--csv", out / "limit.csv", "--json", out / "limit.json")
    done = limit(
        "--model", tiny_model, "--train", tiny_shard, "--steps", 4, "--seconds", 0.5, *files
    )
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(open(out / "limit.csv")))
    assert {"machine", "versions", "commit", "date"} <= set(
        json.loads((out / "limit.json").read_text())
    )
    return done.stdout, rows, json.loads((out / "limit.json").read_text())


def test_products_have_the_flops_of_their_shapes(result):
    _, rows, _ = result
    flops = {r["family"]: float(r["flops"]) for r in rows}
    # forward, gradient of inputs and gradient of weights; the plan recomputes none of them
    a, k = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    assert flops["qkv product"] == 6 * TOKENS * DIM * (a + 2 * k) * LAYERS
    assert flops["o product"] == 6 * TOKENS * a * DIM * LAYERS
    assert flops["gate-up product"] == 6 * TOKENS * DIM * 2 * FFN * LAYERS
    assert flops["down product"] == 6 * TOKENS * FFN * DIM * LAYERS
    assert flops["head product"] == 6 * TOKENS * DIM * VOCAB
    assert flops["norms"] == 0


def test_calls_are_the_plans(result):
    _, rows, found = result
    plan, calls = found["plan"], found["calls"]
    assert plan["tokens_per_step"] == TOKENS
    assert sum(c["calls"] * c["flops"] for c in calls) == pytest.approx(
        plan["model_flops"] + plan["recompute_flops"]
    )
    of = {r["family"]: float(r["calls"]) for r in rows}
    chunks = of["attention forward"] / LAYERS
    assert chunks == int(chunks) > 0 and of["attention backward"] == LAYERS * chunks
    assert of["qkv product"] == 3 * LAYERS * chunks
    assert of["sum of kernels"] == sum(v for k, v in of.items() if k != "sum of kernels")
    assert all(c["seconds"] > 0 and c["burst"] > 0 and c["sets"] > 1 for c in calls)


def test_families_add_up_to_the_sum(result):
    _, rows, found = result
    ms = {r["family"]: float(r["ms"]) for r in rows}
    total = ms.pop("sum of kernels")
    assert sum(ms.values()) == pytest.approx(total) == pytest.approx(1e3 * found["sum_s"])
    assert sum(c["calls"] * c["seconds"] for c in found["calls"]) == pytest.approx(found["sum_s"])
    row = next(r for r in rows if r["family"] == "gate-up product")
    assert float(row["of_ceiling"]) == pytest.approx(
        float(row["flops"]) / found["gemm_flops_per_s"] / (float(row["ms"]) * 1e-3)
    )


def test_a_training_of_the_plan_is_compared_with_the_sum(result):
    printed, _, found = result
    m = found["measured"]
    assert m["steps_timed"] == 2 and m["tokens_per_s"] == pytest.approx(TOKENS / m["step_s"])
    assert m["achieved_over_limit"] == pytest.approx(found["sum_s"] / m["step_s"])
    assert 0 <= m["no_kernel"] < 1
    assert "achieved / limit" in printed and "no kernel" in printed


def test_recomputed_calls_are_told_apart(result):
    """Norm outputs before a product are never saved (docs/design/block.md, "Saved activations")."""
    _, rows, found = result
    chunks = next(float(r["calls"]) for r in rows if r["family"] == "attention forward") / LAYERS
    for what in ("attention norm", "mlp norm"):
        norm = [c for c in found["calls"] if (c["kernel"], c["what"]) == ("rmsnorm_fwd", what)]
        assert sum(c["recomputed_calls"] for c in norm) == LAYERS * chunks
        assert sum(c["calls"] for c in norm) == 2 * LAYERS * chunks
    final = next(c for c in found["calls"] if c["what"] == "final norm")
    assert final["recomputed_calls"] == 0
    norms = next(r for r in rows if r["family"] == "norms")
    assert 0 < float(norms["recomputed_ms"]) < float(norms["ms"])


def test_fp8_products_and_quantization_are_families(tiny_model, tmp_path):
    """The first and the last of 4 blocks are in bf16."""
    options = ("--recipe", "fp8", "--seconds", 0.1, "--csv", tmp_path / "limit.csv")
    done = limit("--model", tiny_model, *options)
    assert done.returncode == 0, done.stderr
    rows = {r["family"]: r for r in csv.DictReader(open(tmp_path / "limit.csv"))}
    flops = {name: float(r["flops"]) for name, r in rows.items()}
    for name in ("gate-up product", "down product"):
        n = 2 * FFN if name[0] == "g" else FFN
        assert flops[name] == flops[name + ", FP8"] == 6 * TOKENS * DIM * n * 2
    assert float(rows["quantization"]["bytes"]) > 0 == flops["quantization"]


def event(step, start, dur, tid=0):
    return {"ph": "X", "tid": tid, "ts": start, "dur": dur, "args": {"step": step}}


def test_no_kernel_is_what_compute_leaves_of_the_last_step():
    # step 1 ends at 100 us; step 2 at 300, of which ops take 50 + 120
    events = [event(1, 0, 100), event(2, 110, 50), event(2, 180, 120), event(2, 100, 900, tid=1)]
    step_s, busy_s = module().busy_of({"traceEvents": [{"ph": "M"}, *events]})
    assert (step_s, busy_s) == pytest.approx((200e-6, 170e-6))


@pytest.mark.parametrize("warm_up, step_s", [(0, 3.5), (1, 3), (2, 3.5)])
def test_steps_of_the_warm_up_do_not_count(warm_up, step_s, tmp_path):
    lines = [json.dumps({"tokens": TOKENS, "step_s": s}) for s in (9, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    timeline = {"traceEvents": [event(1, 0, 100), event(2, 110, 50)]}
    (tmp_path / "timeline.json").write_text(json.dumps(timeline))
    limit = {"plan": {"tokens_per_step": TOKENS}, "sum_s": 2}
    found = module().measured(tmp_path, limit, warm_up)
    assert (found["step_s"], found["steps_timed"]) == (step_s, 4 - warm_up)
    assert found["achieved_over_limit"] == 2 / step_s


def test_what_cannot_be_compared_is_refused(tiny_model, tmp_path):
    limits = module()
    with pytest.raises(ValueError, match="1 steps, two are needed"):
        limits.busy_of({"traceEvents": [event(1, 0, 100)]})
    with pytest.raises(ValueError, match="no timeline.json"):
        limits.busy_of({"traceEvents": [{"ph": "X"}]})
    (tmp_path / "metrics.jsonl").write_text('{"tokens": 64, "step_s": 1}\n' * 3)
    with pytest.raises(ValueError, match="64 tokens a step, the plan 512: give the options"):
        limits.measured(tmp_path, {"plan": {"tokens_per_step": TOKENS}, "sum_s": 1}, 2)
    (tmp_path / "metrics.jsonl").write_text('{"tokens": 64, "step_s": 1}\n')
    with pytest.raises(ValueError, match="1 steps: more than --warm-up 2 are needed"):
        limits.measured(tmp_path, {"plan": {"tokens_per_step": TOKENS}, "sum_s": 1}, 2)
    done = limit("--model", tiny_model, "--seconds", "0.01")
    assert done.returncode == 2 and "--seconds" in done.stderr
    done = limit("--model", tiny_model, "--sead", "1")
    assert done.returncode == 2 and "--sead" in done.stderr


@pytest.mark.parametrize(
    "words,said",
    [
        (["--csv", "none/x.csv"], "--csv none/x.csv: there is no folder none: make it first"),
        (["--json", "none/x.json"], "--json none/x.json: there is no folder none: make it first"),
        (["--json", "."], "--json . is a folder: give a file"),
        (["--run", "none"], "--run none has no metrics.jsonl: give the run directory of a"),
    ],
)
def test_files_are_checked_before_anything_is_measured(tiny_model, words, said):
    done = limit("--model", tiny_model, "--seconds", 0.01, *words)  # which bench/limit refuses
    assert done.returncode == 2 and done.stderr.startswith(f"limit.py: {said}")
    assert done.stderr.count("\n") == 1


def test_the_help_says_which_options_of_plan_are_none():
    helps = [
        subprocess.run(
            [BUILD / program, *words, "--help-all"], capture_output=True, text=True
        ).stdout
        for program, words in (("bin/penstock", ["plan"]), ("bench/limit", []))
    ]
    plan, here = (set(re.findall(r"^  (--[a-z0-9-]+)", text, re.M)) for text in helps)
    without = module().__doc__.split("penstock plan` without")[1].split(".")[0]
    assert set(re.findall(r"--[a-z-]+", without)) == plan - here


def test_every_op_of_the_table_has_a_family():
    """A new kernel of compute gets a family, and bench/limit.c says what its operands hold."""
    ops = (ROOT / "native/kernels/ops.h").read_text()
    table = ops[ops.index("#define PS__OPS(X)") : ops.index("#define PS__DECLARE_OP")]
    here = {
        n
        for n in re.findall(r" X\((\w+)\)", table)
        if not n.endswith(("_host", "_cached", "_rows"))
        # what operands of experts hold follows from the routing: such models are refused
        and not n.startswith(("moe_", "gemm_grouped"))
        # the program has no model with sinks, biases, latent attention, a score, a quantized base or
        # gated delta-nets
        and not n.startswith(("attention_sink", "mla_", "layer_scale_"))
        and not n.startswith(("conv_", "delta_", "gated_norm_", "heads_", "sigmoid_gate_"))
        and n not in ("add_bias", "dequantize", "score_loss")
    }
    families = {k[0] if isinstance(k, tuple) else k for k in module().FAMILIES}
    assert here == families
    source = (ROOT / "bench/limit.c").read_text()
    assert all(f'"{n}"' in source for n in here - {"gemm"})
