"""The planner: more memory is never slower, the same question has the same answer, and its numbers
add up."""

import functools
import json
import re

import numpy as np
import pytest
from conftest import ROOT
from families import gemma4, qwen3_5
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from penstock import BudgetError, Hardware, InvalidError, Lora, ModelConfig, Plan
from penstock._lib import lib

MIB = 1 << 20
SLOW = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
}


def config(folder, **change):
    (folder / "config.json").write_text(json.dumps(LLAMA | change))
    return ModelConfig.read(folder)


def rates(**change):
    hardware = Hardware.estimate(2, "cpu")
    if "copy" in change:  # both ways, also at once
        rate = change.pop("copy")
        for kind in (lib.PS_LINK_H2D, lib.PS_LINK_D2H):
            link = hardware._ptr.link[kind]
            link.bytes_per_s = link.duplex_bytes_per_s = rate
    for name, value in change.items():
        setattr(hardware._ptr, name, value)
    return hardware


@st.composite
def questions(draw):
    """A model, a batch and a machine; the link from one that hides nothing to one that hides
    all."""
    heads = draw(st.sampled_from([2, 4]))
    model = {
        "num_hidden_layers": draw(st.integers(1, 6)),
        "hidden_size": 64 * draw(st.integers(1, 4)),
        "vocab_size": draw(st.sampled_from([256, 4096])),
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([1, 2])),
        "intermediate_size": 64 * draw(st.integers(1, 8)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    seq_len = draw(st.sampled_from([64, 128, 512]))
    ask = {
        "seq_len": seq_len,
        "tokens_per_step": seq_len * draw(st.integers(1, 6)),
        "recipe": draw(st.sampled_from(["fp32", "fp32-master", "bf16"])),
        "clip_norm": draw(st.sampled_from([0, 1])),
    }
    return (
        model,
        ask,
        rates(
            copy=draw(st.sampled_from([2e8, 5e9, 5e11])),
            optimizer_bytes_per_s=draw(st.sampled_from([1e9, 1e11])),
        ),
    )


def plan_or_none(model, hardware, ask, **caps):
    """A plan under caps in bytes, given with their unit: a small number without one is refused."""
    try:
        return Plan(model, hardware=hardware, **ask, **{k: f"{v}B" for k, v in caps.items()})
    except BudgetError:
        return None


# Arenas of a model so small are mostly what they are rounded up by.
SMALL = (
    {"num_hidden_layers": 2, "hidden_size": 192, "vocab_size": 256, "intermediate_size": 64}
    | {"num_attention_heads": 2, "num_key_value_heads": 2},
    {"seq_len": 64, "tokens_per_step": 256, "recipe": "fp32-master", "clip_norm": 0},
    rates(copy=2e8, optimizer_bytes_per_s=1e9),
)


@settings(max_examples=5, **SLOW)
@given(question=questions())
@example(question=SMALL)
def test_more_memory_is_never_slower(question, tmp_path):
    change, ask, hardware = question
    model = config(tmp_path, **change)
    ask["reserve"] = (
        256 * MIB
    )  # this process grows from plan to plan, and its own size would count against the cap
    free = Plan(model, hardware=hardware, **ask).report
    # to refuse a plan takes ten times as long as to make one: few of these caps are too small
    of_device, of_host = (
        (range(1, 8), range(1, 7)) if question is SMALL else ((3, 4, 5, 7), (2, 4, 6))
    )
    device = [free["device_used_bytes"] * i // 6 for i in of_device]
    host = [
        free["reserve_bytes"] + (free["host_used_bytes"] * 2 - free["reserve_bytes"]) * i // 6
        for i in of_host
    ]
    step = np.array(
        [
            [
                p.report["step_s"]
                if (p := plan_or_none(model, hardware, ask, device_mem=d, host_mem=h))
                else np.inf
                for h in host
            ]
            for d in device
        ]
    )
    assert (step[1:] <= step[:-1]).all(), "more device memory"
    assert (step[:, 1:] <= step[:, :-1]).all(), "more host memory"
    assert np.isfinite(step).any() and step.min() >= free["step_s"]


@settings(max_examples=6, **SLOW)
@given(question=questions(), share=st.floats(0, 1))
def test_a_report_is_consistent_and_the_plan_the_same_when_asked_again(question, share, tmp_path):
    change, ask, hardware = question
    model = config(tmp_path, **change)
    ask["reserve"] = 256 * MIB  # as above
    most = Plan(model, hardware=hardware, **ask).report["device_used_bytes"]
    least, _ = Plan.smallest(model, hardware=hardware, **ask)
    cap = int(least + share * (most - least))
    plan, again = (Plan(model, hardware=hardware, device_mem=cap, **ask) for _ in range(2))
    r = plan.report
    assert plan.json() == again.json() and str(plan) == str(again)
    assert (
        r["device_used_bytes"] <= cap
        and r["device_used_bytes"] % (2 * MIB) == r["host_arena_bytes"] % (2 * MIB) == 0
    )
    assert (
        r["host_used_bytes"]
        >= r["host_arena_bytes"] + r["scratch_bytes"] + r["trace_bytes"] + r["reserve_bytes"]
    )
    assert (
        r["n_chunks"] * r["chunk_tokens"] >= r["tokens_per_step"]
        and r["n_rounds"] * r["chunks_per_round"] >= r["n_chunks"]
    )
    assert r["resident_param_units"] + r["units_kept"] <= r["n_units"] and (
        r["n_rounds"] > 1 or not r["units_kept"]
    )
    d = plan.json()
    policies = [
        policy.split()[0] for layer in d["layers"] for chunk in layer for policy in chunk.values()
    ]  # host in the first round: host
    for policy in ("device", "host", "recompute"):
        assert (r[f"saved_{policy}_bytes"] > 0) == (policy in policies)
    events, ends = plan.simulate(3)
    check_trace(plan, events, ends)
    busy = np.zeros(5)
    steady = events[events["step"] == 1]
    np.add.at(busy, steady["stream"], (steady["end_ns"] - steady["start_ns"]) * 1e-9)
    assert np.allclose(busy, r["stream_busy_s"][:5], rtol=1e-9) and r["step_s"] > 0
    assert r["bottleneck_stream"] == int(np.argmax(busy))


def check_trace(plan, events, ends):
    """Streams run one op at a time, in order; an op starts after the ops that it awaits."""
    assert len(events) == 3 * plan.schedule.n_ops and (np.diff(ends) > 0).all()
    assert (
        (events["queued_ns"] <= events["start_ns"]) & (events["start_ns"] <= events["end_ns"])
    ).all()
    for stream in range(plan.schedule.n_streams):
        mine = events[events["stream"] == stream]
        assert (mine["start_ns"][1:] >= mine["end_ns"][:-1]).all()
    assert abs(events["end_ns"].max() - ends[-1]) <= 1


def test_transfers_and_recomputation_are_those_counted_by_hand(tmp_path):
    """Everything resident: parameters travel once, gradients once (of an embedding on the host its
    rows, and ids), batch in, losses out, norms. Nothing but scores is recomputed."""
    model = config(tmp_path)
    tokens, layers, heads, width, chunk = 512, 4, 4, 64, 128
    ask = {
        "seq_len": 128,
        "tokens_per_step": tokens,
        "recipe": "fp32",
        "chunk_tokens": chunk,
        "chunks_per_round": 4,
    }
    hardware = rates(copy=1e7)  # so slow a link that whatever can stay, stays
    plan = Plan(model, hardware=hardware, **ask)
    r, on_host = plan.report, plan.json()["embed_on_host"]
    padded = {}
    for p in model.params():
        padded[p.unit] = max(padded.get(p.unit, 0), p.offset + int(np.prod(p.shape)))
    elements = sum(-(-n // 64) * 64 for n in padded.values())
    batch = (tokens // chunk) * (4 * 4 * chunk + 64)
    norms = 8 * (
        1 + layers * 6 + 2
    )  # a sum of squares for each run: the table; norm1, qkv, o, norm2, gate-up, down; norm, head
    row = 4 * (
        64 + 64 + 2 * 32 + 64 + heads + 64 + 2 * 256
    )  # x, q, k and v, attention output and its log-sum-exp, h, gate and up
    assert (
        r["saved_device_bytes"] == layers * tokens * row
        and r["saved_host_bytes"] == r["saved_recompute_bytes"] == 0
    )
    for cap in range(2 * MIB, r["device_used_bytes"], 2 * MIB):
        if p := plan_or_none(model, hardware, ask, device_mem=cap):
            assert (
                sum(p.report[f"saved_{policy}_bytes"] for policy in ("device", "host", "recompute"))
                == layers * tokens * row
            )
    if r[
        "resident_update_units"
        # weights stay; the clip scale goes in; gradients come for Trainer.grad(), and the weights
        # follow every step
    ]:
        assert r["h2d_bytes"] == batch + 64
        assert r["d2h_bytes"] == 2 * elements * 4 + tokens * 4 + norms
    else:
        table, rows = 4 * padded[0], 4 * width * tokens
        assert r["h2d_bytes"] == batch + elements * 4 - on_host * (table - rows)
        assert r["d2h_bytes"] == elements * 4 + tokens * 4 + norms - on_host * (
            table + 8 - rows - tokens * 4
        )
    pairs = tokens // 128 * 128 * 128 / 2
    assert (
        r["recompute_flops"] == layers * pairs * width * 2
    )  # the score product, once more in the backward pass
    flops = model.flops(128)["sequence"] * (tokens // 128)
    assert r["model_flops"] == pytest.approx(flops, rel=1e-12)


def test_an_embedding_at_home_costs_its_rows_on_the_link(tmp_path):
    """Where tokens are few and the vocabulary is large: rows to the device, their gradients and ids
    to the host, whatever else the plan decides."""
    model = config(tmp_path, vocab_size=16384)
    tokens, width, chunk = 512, 64, 128
    ask = {
        "seq_len": chunk,
        "tokens_per_step": tokens,
        "recipe": "fp32",
        "chunk_tokens": chunk,
        "chunks_per_round": 1,
    }
    hardware = rates(copy=1e7)
    least, _ = Plan.smallest(model, hardware=hardware, **ask)
    plan = Plan(model, hardware=hardware, device_mem=least, **ask)
    r, d = plan.report, plan.json()
    assert (
        d["embed_on_host"]
        and d["units"][0]["parameters"] == d["units"][0]["gradients"] == "host"
        and "gathered on the host" in str(plan)
    )
    table, logits = 4 * 16384 * width, 4 * chunk * 16384
    assert (
        least < 2 * table + logits + table
    )  # the head and its gradient, and no room for another table
    rounds, row, n_last = tokens // chunk, 4 * width, len(d["units"]) - 1
    home = [sum(c["x"] == "host" for c in layer) for layer in d["layers"]]
    assert (
        r["saved_host_bytes"] == sum(home) * chunk * row
    )  # nothing but block inputs is worth a copy on this link
    to_device = rounds * (4 * 4 * chunk + 64) + tokens * row + rounds * sum(home) * chunk * row
    to_host = (
        tokens * (row + 4) + tokens * 4 + rounds * sum(home[1:]) * chunk * row
    )  # the first block's input is on the host already
    for i, u in enumerate(d["units"][1:], 1):
        to_device += (
            4
            * u["elements"]
            * (1 if u["parameters"] == "resident" else rounds if i == n_last else 2 * rounds)
        )
        to_host += 4 * u["elements"] * (1 if u["gradients"] == "resident" else rounds) + (
            8 * 6 if u["gradients"] == "resident" else 0
        )
    assert r["d2h_bytes"] == to_host
    at_the_turn = (
        rounds * 4 * sum(u["elements"] for u in d["units"][1:-1])
    )  # blocks still there from their forward visits: at most this is not fetched twice
    assert to_device - at_the_turn <= r["h2d_bytes"] <= to_device and at_the_turn < table * rounds


def test_an_embedding_of_2_to_the_32_elements_stays_at_home(tmp_path):
    """Its elements do not fit 32 bits."""
    model = config(
        tmp_path, vocab_size=1 << 18, hidden_size=1 << 14, num_hidden_layers=1, head_dim=64
    )
    ask = {"seq_len": 256, "tokens_per_step": 512, "chunk_tokens": 256, "chunks_per_round": 1}
    ask["hardware"] = rates(copy=1e9, host_memory_bytes=1 << 40)
    least, _ = Plan.smallest(model, **ask)
    assert Plan(model, device_mem=least, **ask).json()["embed_on_host"]


def test_a_plan_does_not_depend_on_what_the_process_did_since_the_first(tmp_path):
    model, ask = config(tmp_path), {"seq_len": 64, "hardware": rates()}
    first = Plan(model, host_mem="16GiB", **ask)
    held = np.ones(64 * MIB // 8)
    assert Plan(model, host_mem="16GiB", **ask).json() == first.json() and held.all()


def over_a_slow_link(folder):
    """A plan under the least device memory."""
    batch = dict(seq_len=128, tokens_per_step=512)
    least, _ = Plan.smallest(config(folder), hardware=rates(), **batch)
    return Plan(config(folder), hardware=rates(copy=5e7), device_mem=least, **batch)


def test_stalls_are_the_gaps_of_each_stream(tmp_path):
    """Over a slow link compute waits for what comes over it above all; what the stalls of a stream
    add up to is what lies between its ops."""
    plan = over_a_slow_link(tmp_path)
    events, _ = plan.simulate(3)
    stalls = plan.stalls(events)
    for stream in range(5):
        own = np.sort(events[events["stream"] == stream], order=["step", "op"])
        gaps = np.maximum(
            own["start_ns"][1:].astype(np.int64)
            - np.maximum.accumulate(own["end_ns"][:-1]).astype(np.int64),
            0,
        )[own["step"][1:] > 0].sum()
        assert sum(s["seconds"] for s in stalls if s["stream"] == stream) == pytest.approx(
            gaps / 2 * 1e-9, rel=1e-9, abs=1e-12
        )
    alone = plan.stalls(events[: len(events) // 3])  # a trace of one step has no other to count
    assert sum(s["seconds"] for s in alone if s["stream"] == 0) > 0
    compute = [s for s in stalls if s["stream"] == 0]
    assert (
        compute[0]["what"] in ("parameters", "embedding rows")
        and compute[0]["awaited_stream"] == 1
        and compute == sorted(compute, key=lambda s: -s["seconds"])
    )
    with pytest.raises(InvalidError):
        plan.stalls(events[:-1])


def test_op_times_are_those_of_each_kind_of_op(tmp_path):
    """They add up to what a stream ran after the first step. Where one op takes longer than
    planned, its kind says by how much and no other does."""
    plan = over_a_slow_link(tmp_path)
    events, _ = plan.simulate(3)
    planned = plan.op_times(events)
    took = (events["end_ns"] - events["start_ns"]).astype(np.int64)
    for stream in range(5):
        own = took[(events["stream"] == stream) & (events["step"] > 0)].sum()
        times = [t for t in planned if t["stream"] == stream]
        assert sum(t["seconds"] for t in times) == pytest.approx(own / 2 * 1e-9, rel=1e-9)
        assert times == sorted(times, key=lambda t: -t["seconds"])
    assert sum(t["n_ops"] for t in planned) == plan.schedule.n_ops
    assert {"gemm gate_up", "attention_bwd"} <= {t["op"] for t in planned if t["stream"] == 0}
    slow = events.copy()
    op = next(i for i in range(plan.schedule.n_ops) if plan.schedule.op(i)["name"] == "glu_fwd")
    slow["end_ns"][2 * plan.schedule.n_ops + op] += 4_000_000
    off = {
        t["op"]: t["seconds"] - p["seconds"]
        for t, p in zip(by_name(plan.op_times(slow)), by_name(planned), strict=True)
    }
    assert off.pop("glu_fwd") == pytest.approx(2e-3)
    assert not any(off.values())
    with pytest.raises(InvalidError):
        plan.op_times(events[:-1])


def by_name(times: list[dict]) -> list[dict]:
    return sorted(times, key=lambda t: (t["stream"], t["op"]))


def test_device_memory_counts_the_page_tables_of_pinned_host_memory(tmp_path):
    """8 bytes a page of 4 KiB and 16 each 2 MiB, in whole 2 MiB; nothing where nothing is pinned."""
    question = dict(seq_len=128, tokens_per_step=512)
    gpu = Hardware.read(ROOT / "docs/hardware-h200.json")
    for hardware, cuda in ((gpu, True), (rates(), False)):
        least = Plan.smallest(config(tmp_path), hardware=hardware, **question)[0]
        plan = Plan(config(tmp_path), hardware=hardware, device_mem=least, **question).json()
        pages = plan["host_arena_bytes"] // 4096
        tables = -(-(8 * pages + 16 * (pages // 512)) // (2 << 20)) * (2 << 20)
        assert plan["device_tables_bytes"] == (tables if cuda else 0)
        parts = ("arena", "scratch", "overhead", "tables")
        assert plan["device_used_bytes"] == sum(plan[f"device_{part}_bytes"] for part in parts)
        assert plan["device_used_bytes"] <= least
        with pytest.raises(BudgetError):
            Plan(config(tmp_path), hardware=hardware, device_mem=least - 1, **question)


@pytest.mark.long
def test_gradients_of_blocks_leave_a_host_whose_memory_is_short():
    """8B with AdamW has 8 bytes a parameter on the host. Where that does not fit, the first blocks
    have 6: their gradients stay on the GPU, which updates them."""
    question = dict(seq_len=8192, tokens_per_step=65536, device_mem="22GiB", keep_grads=False)
    model = ModelConfig.read(ROOT / "models" / "8b.json")
    gpu = Hardware.read(ROOT / "tests/golden/hardware-rtx4090.json")
    short, ample = (Plan(model, hardware=gpu, host_mem=m, **question) for m in ("54GiB", "80GiB"))
    all_bytes = 8 * sum(u["elements"] for u in short.json()["units"])
    on_gpu = [u for u in short.json()["units"] if u["update"].startswith("device")]
    saved = 2 * sum(u["elements"] for u in on_gpu)
    assert short.report["host_used_bytes"] <= 54 << 30 < all_bytes
    assert all_bytes - saved <= short.report["host_arena_bytes"] < all_bytes
    assert short.report["step_s"] > ample.report["step_s"]
    held = Plan(model, hardware=gpu, host_mem="47GiB", **question)  # not without state on the GPU
    assert held.report["held_state_units"] > short.report["held_state_units"] == 0
    with pytest.raises(BudgetError, match="host memory"):
        Plan(model, hardware=gpu, host_mem="36GiB", **question)


def test_throughput_is_the_plans_bytes_over_the_time_of_their_ops(tmp_path):
    plan = over_a_slow_link(tmp_path)
    events, _ = plan.simulate(3)
    took = (events["end_ns"] - events["start_ns"]).astype(float) * 1e-9
    seen, report = plan.throughput(events), plan.json()
    for name, stream in (("h2d", 1), ("d2h", 2)):
        seconds = took[events["stream"] == stream].sum()
        assert seen[f"{name}_bytes_per_s"] == pytest.approx(3 * report[f"{name}_bytes"] / seconds)
        assert 0 < seen[f"{name}_bytes_per_s"] <= 5e7 * (1 + 1e-9)
    names = np.array([plan.schedule.op(i)["name"] for i in range(plan.schedule.n_ops)])
    adamw = np.isin(names[events["op"]], ("adamw", "adamw_moments"))
    updates = took[(events["stream"] == 3) & adamw]
    assert len(updates) and report["resident_update_units"] == 0
    # bf16: AdamW reads weight, gradient, m and v, and writes all but the gradient; in two parts
    # both read the gradient, m and v
    moved = sum(
        u["elements"] * {"host": 14, "host, weights first": 20}[u["update"]]
        for u in report["units"]
    )
    assert seen["update_bytes_per_s"] == pytest.approx(3 * moved / updates.sum())
    with pytest.raises(InvalidError, match="whole steps"):
        plan.throughput(events[:-1])


def test_recomputing_costs_the_products_of_what_is_not_saved(tmp_path):
    """Whatever a plan saves: q and k and v, attention, o, gate and up run again where their results
    were not kept; down never does."""
    model = config(tmp_path)
    tokens, dim, width, kv, ffn, seq = 512, 64, 64, 32, 256, 128
    ask = {
        "seq_len": seq,
        "tokens_per_step": tokens,
        "recipe": "fp32",
        "chunk_tokens": seq,
        "chunks_per_round": 1,
        "clip_norm": 0,
    }
    again = {
        "kv": 2 * tokens * dim * (width + 2 * kv),
        "attn_out": 4 * tokens * seq / 2 * width,
        "h": 2 * tokens * width * dim,
        "gate_up": 2 * tokens * dim * 2 * ffn,
    }
    plans, cap = [], None
    for _ in range(40):
        try:
            plans.append(
                Plan(
                    model,
                    hardware=rates(copy=1e6),
                    device_mem=Plan.smallest(model, hardware=rates(), **ask)[0],
                    host_mem=cap,
                    **ask,
                )
            )
        except BudgetError:
            break
        cap = plans[-1].report["host_used_bytes"] - 1
    seen = set()
    for plan in plans:
        recomputed = [
            item
            for layer in plan.json()["layers"]
            for (cell,) in [layer]
            for item in again
            if cell[item] == "recompute"
        ]
        seen.update(recomputed)
        scores = 4 * tokens * seq / 2 * width * 2
        assert plan.report["recompute_flops"] == pytest.approx(
            sum(again[item] for item in recomputed) + scores, rel=1e-12
        )
    assert {"kv", "gate_up"} <= seen


@pytest.mark.parametrize(
    "name,tflops",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA RTX A1000", 0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 D", 0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 3090", 71.2),
        ("some GPU", 0),
    ],
)
def test_the_peak_is_that_of_the_whole_name(name, tflops):
    assert lib.ps_hardware_peak(name.encode()) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "ask,advice",
    [
        ({"device_mem": "1MiB"}, "raise device_mem, or lower seq_len ("),
        (
            {"device_mem": "1MiB", "chunk_tokens": 64},
            "raise device_mem, or lower chunk_tokens (",
        ),
        (
            {"device_mem": "1MiB", "chunks_per_round": 2, "head_slice_tokens": 64},
            "raise device_mem, or lower chunks_per_round or head_slice_tokens (",
        ),
        ({"host_mem": "4MiB"}, "raise host_mem ("),  # the process itself takes more
        (
            {"host_mem": "4MiB", "chunk_tokens": 64, "tokens_per_step": 64},
            "raise host_mem (",
        ),
        (
            {"device_mem": "1MiB", "host_mem": "4MiB"},
            "; the machine has 8.0 GiB in all: raise device_mem and host_mem to that",
        ),
        (
            {"machine": 4 << 20},
            "; the machine has 4.0 MiB in all: take a machine with more host memory",
        ),
    ],
)
def test_what_is_advised_lowers_what_the_plan_needs(tmp_path, ask, advice):
    """An argument is named where it was given, or has a default that can be lowered."""
    hardware = rates(host_memory_bytes=ask.pop("machine", 1 << 33))
    with pytest.raises(BudgetError, match=re.escape(advice)):
        Plan(config(tmp_path), seq_len=64, hardware=hardware, **ask)


LOWER = {
    "state_bits 8": {"state_bits": 8},
    "clip_by previous": {"clip_by": "previous"},
    "disk DIR": {"disk_mem": "1TiB"},
    "optimizer lion": {"optimizer": "lion"},
    "recipe bf16": {"recipe": "bf16"},
    "lora.rank": {"lora": Lora(8)},
    "frozen_layers": {"frozen_layers": 16},
    "tokens_per_step": {"tokens_per_step": 512},
}


@pytest.mark.parametrize(
    "gib, ask, ways",
    [
        (
            9.5,
            {},
            ", or give state_bits 8 or disk DIR with disk_mem 4715MiB or optimizer lion or lora.rank "
            "or frozen_layers",
        ),
        pytest.param(
            9.7,
            {"keep_grads": False},
            ", or give state_bits 8 or clip_by previous or disk DIR with disk_mem 4715MiB or "
            "optimizer lion or lora.rank or frozen_layers",
            marks=pytest.mark.long,
        ),
        (
            5.4,
            {"keep_grads": False},
            ", or give state_bits 8 and clip_by previous and disk DIR with disk_mem 2505MiB or "
            "lora.rank",
        ),
        pytest.param(
            11.42,
            {"tokens_per_step": 65536},
            ", or lower tokens_per_step, or give state_bits 8 or disk DIR with disk_mem 4715MiB or "
            "optimizer lion or lora.rank or frozen_layers",
            marks=pytest.mark.long,
        ),
        (12, {"recipe": "fp32-master"}, ", or give recipe bf16 or lora.rank"),
        (2, {}, ""),  # less than the weights take
    ],
)
def test_the_ways_out_of_too_little_host_memory_are_ways(gib, ask, ways):
    hardware = Hardware.read(ROOT / "tests/golden/hardware-rtx4090.json")
    hardware._ptr.host_memory_bytes = 1 << 40
    model, cap = ModelConfig.read(ROOT / "models/1b.json"), round(gib * 2**30)
    given = dict(seq_len=512, tokens_per_step=1024, hardware=hardware, reserve=1 << 28) | ask
    given |= {"device_mem": "3GiB"}
    with pytest.raises(BudgetError) as refusal:
        Plan(model, host_mem=cap, **given)
    said = re.search(r"given: raise host_mem(.*) \(the smallest", str(refusal.value))[1]
    assert re.sub(r" \(needs [^)]*\)", "", said) == ways
    for of in re.split(" or |, or give ", said):
        more = [LOWER[w] for w in re.findall("|".join(map(re.escape, LOWER)), of)]
        least = Plan.smallest(model, **functools.reduce(dict.__or__, more, given))[1] if more else 0
        assert least <= cap, of
        for figure in re.findall(r"needs ([\d.]+) GiB", of):
            assert abs(least / 2**30 - float(figure)) < 0.06


def test_a_host_cap_beyond_the_machine_is_said_to_be_one():
    """The least device memory is then what holds the optimizer state too, which alone would say
    nothing of why."""
    with pytest.raises(
        BudgetError,
        match=r"400.0 GiB of host memory given, the machine has 96.0 GiB, with which .* of device memory are needed",
    ):
        Plan(
            ModelConfig.read(ROOT / "models/15b.json"),
            seq_len=4096,
            tokens_per_step=4096,
            recipe="bf16",
            device_mem="24GiB",
            host_mem="400GiB",
            hardware=Hardware.read(ROOT / "tests/golden/hardware-rtx4090.json"),
            reserve=1 << 30,
        )


def test_updates_of_8_bit_state_take_the_measured_rate_or_the_plan_says_what_it_takes():
    hardware = Hardware.read(ROOT / "tests/golden/hardware-rtx4090.json")
    model, seconds = ModelConfig.read(ROOT / "models/1b.json"), []
    hardware._ptr.measured = lib.PS_MEASURED
    for rate in (0, 4e9, 2e9):
        hardware._ptr.optimizer_8_bits_bytes_per_s = rate
        plan = Plan(
            model,
            hardware=hardware,
            seq_len=512,
            tokens_per_step=1024,
            chunk_tokens=512,
            chunks_per_round=2,
            first_round_chunks=2,
            device_mem="3GiB",
            state_bits=8,
        )
        assert ("updates are is assumed: penstock profile measures it" in str(plan)) == (not rate)
        seconds.append(plan.json()["stream_busy_s"]["host"])
    assert 1.6 < seconds[2] / seconds[1] < 2.1 and seconds[1] > 3 * seconds[0]


@pytest.mark.parametrize(
    "of,cfg",
    [
        ("their delta rule", qwen3_5(max_position_embeddings=512)),
        ("heads above 256", gemma4(max_position_embeddings=512, global_head_dim=512)),
    ],
    ids=["delta-nets", "heads-of-512"],
)
def test_what_some_models_have_takes_the_measured_rate_or_the_plan_says_what(of, cfg, tmp_path):
    hardware = Hardware.read(ROOT / "tests/golden/hardware-rtx4090.json")
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    model, seconds, hw = ModelConfig.read(tmp_path), [], hardware._ptr
    hw.measured = lib.PS_MEASURED
    for rate in (0, 1e8):
        delta = hw.delta[0]
        delta.heads = 4 if rate else 0
        delta.forward_elements_per_s = delta.backward_elements_per_s = rate
        hw.heads512_attention_flops_per_s = hw.heads512_attention_bwd_flops_per_s = rate
        plan = Plan(
            model,
            hardware=hardware,
            seq_len=512,
            tokens_per_step=512,
            chunk_tokens=512,
            chunks_per_round=1,
            first_round_chunks=1,
            device_mem="3GiB",
        )
        said = f"the rate of {of} is an estimate: penstock profile measures it"
        assert (said in str(plan)) == (not rate)
        seconds.append(plan.json()["stream_busy_s"]["compute"])
    assert seconds[1] > 2 * seconds[0]
