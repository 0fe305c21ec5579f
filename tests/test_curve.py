"""bench/curve.py on the CPU, small: both sides learn the same, and what is written says so."""

import csv
import json
import math
import re
import statistics
import subprocess
import sys
from types import SimpleNamespace

import families
import numpy as np
import pytest
import tolerance
import torch
from conftest import BUILD, HANGS_S, ROOT

sys.path[:0] = [str(ROOT / "bench")]
import curve  # noqa: E402
import torch_fp8  # noqa: E402

STEPS = 10


def run(out, data, *more, code=0):
    words = ["--data", data, "--config", ROOT / "models/tiny-llama.json", "--backend", "cpu"]
    words += ["--steps", STEPS, "--seq-len", 32, "--tokens", 256, "--lr", "1e-3", "--out", out]
    done = subprocess.run(
        [str(w) for w in (sys.executable, ROOT / "bench/curve.py", *words, *more)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def curves(tiny_shard, tmp_path_factory):
    """The recipes beside PyTorch from one seed, and then two of them from another one."""
    out = tmp_path_factory.mktemp("curve") / "made/rounding"
    first = run(
        out, tiny_shard, "--curves", "fp32-master", "bf16", "torch-nearest", "torch-masters"
    )
    before = json.loads(out.with_suffix(".json").read_text())
    more = run(out, tiny_shard, "--curves", "fp32-master", "bf16", "--seeds", 1, 2, "--jobs", 2)
    return out, before, json.loads(out.with_suffix(".json").read_text()), first, more


def test_the_gate_of_fp8_is_what_a_seed_of_rounding_moves():
    """By hand: the gaps over the last fifth, beside 0.01 nats and beside bf16~2's."""

    def gate(other, fp8, broken):
        losses = {"bf16": 1.0, "bf16~2": other, "fp8": fp8, "fp8-broken": broken, "fp32": 9.0}
        runs = [{"curve": c, "seed": 3, "loss": [0.0] * 4 + [x]} for c, x in losses.items()]
        return [
            (g["curve"], g["seed"], g["passes"]) for g in curve.gate_of({"steps": 5, "runs": runs})
        ]

    assert gate(1.001, 1.009, 1.011) == [("fp8", 3, True), ("fp8-broken", 3, False)]
    assert gate(0.98, 1.019, 1.021) == [("fp8", 3, True), ("fp8-broken", 3, False)]
    assert gate(1.0, 0.98, 1.0) == [("fp8", 3, False), ("fp8-broken", 3, True)]
    short = {"bf16": [0.0, 3.0, 9.0, 9.0], "bf16~2": [0.0, 3.5, 7.0, 7.0], "fp8-broken": [0.0, 3.4]}
    short["fp8"] = [0.0, 3.0, 9.0]  # ended early, and is not held against bf16
    assert len(short["fp8-broken"]) < len(short["fp8"]) < len(short["bf16"])
    runs = [{"curve": c, "seed": 1, "loss": x} for c, x in short.items()]
    (row,) = curve.gate_of({"steps": 4, "runs": runs})
    assert row == {"steps": 2, "passes": True} | {
        k: row[k] for k in ("curve", "seed", "gap", "allowed")
    }
    assert row["gap"] == pytest.approx(0.4) and row["allowed"] == pytest.approx(0.5)
    losses = {"bf16": 1.0, "bf16~2": 1.02, "bf16:8bit": 1.019, "fp8:8bit": 1.019, "fp32:8bit": 2.0}
    runs = [{"curve": c, "seed": 3, "loss": [x]} for c, x in losses.items()]
    (row,) = curve.gate_of({"steps": 1, "runs": runs})  # the others' own state has not run
    assert row["curve"] == "bf16:8bit" and row["passes"] and row["allowed"] == pytest.approx(0.02)
    runs[2]["loss"] = [1.021]
    assert not curve.gate_of({"steps": 1, "runs": runs})[0]["passes"]
    without = [{"curve": c, "seed": 1, "loss": [1.0]} for c in ("bf16", "fp8")]
    assert curve.gate_of({"steps": 1, "runs": without}) == []


def test_fp8_has_a_gate_and_its_broken_build_is_named(tiny_shard, tmp_path):
    out = tmp_path / "fp8"
    done = run(out, tiny_shard, "--curves", "bf16", "bf16~2", "fp8", "bf16:8bit")
    result = json.loads(out.with_suffix(".json").read_text())
    assert loss(result, "bf16")[0] == loss(result, "bf16~2")[0] == loss(result, "bf16:8bit")[0]
    assert loss(result, "bf16") != loss(result, "bf16~2") != loss(result, "fp8")
    assert loss(result, "bf16:8bit") not in (loss(result, "bf16"), loss(result, "bf16~2"))
    row, of_state = result["gate"]
    assert of_state["curve"] == "bf16:8bit"
    loss_of_fp8 = loss(result, "fp8")
    assert (
        row["curve"] == "fp8"
        and f"gate: fp8, seed 1, {'passes' if row['passes'] else 'FAILS'}" in done.stdout
    )
    more = ("--curves", "bf16", "bf16~2", "fp8-broken", "--broken-steps", 5)
    run(tmp_path / "short", tiny_shard, *more, "--broken-build", BUILD)
    result = json.loads((tmp_path / "short.json").read_text())
    assert loss(result, "fp8-broken") == loss_of_fp8[:5]  # the build is not broken here
    assert [row["steps"] for row in result["gate"]] == [5]
    with open(tmp_path / "short.csv") as file:
        column = [row["fp8-broken seed 1"] for row in csv.DictReader(file)]
    assert len(column) == STEPS and all(column[:5]) and not any(column[5:])


def test_a_name_that_is_no_curve_is_answered(tiny_shard, tmp_path):
    for name, said in {
        "fp8-broken": "give its --broken-build too",
        "bf16~": "give fp32, ",
        "torch-fp32~2": "give fp32, ",
        "fp9": "give fp32, ",
        "bf16:down": "only curves of FP8 have options, and recipes 8bit",
        "torch-masters:8bit": "only curves of FP8 have options",
        "fp8:first": "after the colon give first=N, last=N, down, head, fast, 8bit",
        "fp8:first=1,first=2": "give each option once",
        "torch-fp8:x,z": "after the colon give some of x, w, dy",
    }.items():
        asked = SimpleNamespace(curves=[name], broken_build=None)
        with pytest.raises(curve.Refused, match=re.escape(f"--curves {name}: {said}")):
            curve.check_curves(asked)
    done = run(tmp_path / "no", tiny_shard, "--curves", name, code=2)
    assert done.stderr.startswith(f"curve.py: --curves {name}: {said}")
    assert list(tmp_path.iterdir()) == []


def test_a_product_of_the_control_by_hand():
    """Scales are the least powers of two: 1 for 448 and 2 for 449. A number between two of e4m3
    goes to the nearer one, and to the even one in the middle."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    x = torch.tensor([448.0, 1.0, 1.0625, 1.1875, 17.5, 0.0])
    assert torch_fp8.rounded(x, e4m3).tolist() == [448, 1, 1, 1.25, 18, 0]
    assert torch_fp8.rounded(torch.tensor([449.0, 34.0, 35.0]), e4m3).tolist() == [448, 32, 36]
    assert torch_fp8.rounded(torch.tensor([57344.0, 1.125]), e5m2).tolist() == [57344, 1]
    assert torch_fp8.rounded(torch.zeros(3), e4m3).tolist() == [0, 0, 0]
    y = torch.tensor([[448.0, 17.5]], requires_grad=True)
    w = torch.tensor([[448.0, 1.0625]], requires_grad=True)
    d = torch.tensor([[1.125]])
    of = {}
    for operands in ((), ("x",), ("w",), ("dy",)):
        out = torch_fp8.Product.apply(y, w, operands)
        of[operands] = [t.tolist()[0] for t in (out, *torch.autograd.grad(out, (y, w), d))]
    plain = 448 * 448 + 17.5 * 1.0625
    assert of[()] == [[plain], [504, 1.1953125], [504, 19.6875]]
    assert of["x",] == [[448 * 448 + 18 * 1.0625], [504, 1.1953125], [504, 20.25]]
    assert of["w",] == [[448 * 448 + 17.5], [504, 1.125], [504, 19.6875]]
    assert of["dy",] == [[plain], [448, 1.0625], [448, 17.5]]


@pytest.mark.long
def test_options_of_fp8_and_its_control_in_pytorch(tiny_shard, tmp_path):
    """One block at each end in bf16 is the default, and the CPU backend's sums are exact. PyTorch's
    operands are rounded as ours, so FP8 moves both losses alike, step by step: on one machine and
    with three seeds the cosine of the two moves was 0.92 to 0.99. That of the second move and of
    what lies between the two sides without FP8 was 0.49."""
    names = ["bf16", "fp8", "fp8:first=1,last=1", "fp8:fast", "fp32-master", "fp8-master"]
    names += ["fp8:first=2", "fp8:last=2", "fp8:down", "fp8:head", "fp8:down~2"]
    names += ["torch-masters", "torch-fp8", "torch-fp8:x", "torch-fp8:w", "torch-fp8:dy"]
    run(tmp_path / "o", tiny_shard, "--end-after", 6, "--jobs", 2, "--curves", *names)
    result = json.loads((tmp_path / "o.json").read_text())
    of = {name: loss(result, name) for name in names}
    assert {len(x) for x in of.values()} == {6}
    assert len({tuple(x) for x in of.values()}) == len(names) - 2
    assert of["fp8:first=1,last=1"] == of["fp8:fast"] == of["fp8"]
    flushed = {r["curve"] for r in result["runs"] if "flushed_most" in r}
    assert flushed == {name for name in names if name.startswith("fp8")}
    assert len(result["data_sha256"]) == 1 and result["end_after"] == 6

    def moved(fp8, without):
        return np.subtract(of[fp8], of[without])

    ours, theirs = moved("fp8-master", "fp32-master"), moved("torch-fp8", "torch-masters")
    assert ours @ theirs > 0.75 * np.linalg.norm(ours) * np.linalg.norm(theirs), (ours, theirs)


def loss(result, name, seed=1):
    (of,) = (r for r in result["runs"] if (r["curve"], r["seed"]) == (name, seed))
    return of["loss"]


def test_penstock_and_pytorch_have_the_same_curve(curves):
    _, result, *_ = curves
    ours, theirs = loss(result, "fp32-master"), loss(result, "torch-masters")
    assert len(ours) == len(theirs) == STEPS and ours[-1] < ours[0] - 0.1
    # As test_parity.py derives it: noise of a loss in bf16 (4 layers, at most 8 chunks), and
    # updates whose elements below that noise go either way (a share delta of them, so kappa is
    # sqrt(delta)); both sides are off by as much, independently.
    delta = tolerance.delta("fp32-master", 4, 8, 512)
    (norms,) = (r["grad_norm"] for r in result["runs"] if r["curve"] == "torch-masters")
    walk, gaps = 0.0, [abs(a - b) for a, b in zip(ours, theirs)]
    for step, (lr, norm) in enumerate(zip(result["lr"], norms)):
        bound = math.sqrt(2) * math.hypot(
            tolerance.loss_noise(delta, 256), 3 * math.sqrt(delta) * norm * math.sqrt(walk)
        )
        assert gaps[step] < bound, f"step {step}: {gaps[step]:.2g}, bound {bound:.2g}"
        walk += lr * lr
    assert result["gaps"]["torch-masters - fp32-master"]["largest"] == max(gaps)


@pytest.mark.long
def test_with_experts_both_sides_have_the_same_curve_and_loads(tiny_shard, tmp_path):
    """In fp32, with a strong auxiliary loss. One token at another expert moves a load by 0.016."""
    cfg = families.olmoe(
        vocab_size=512, num_experts=8, num_hidden_layers=2, router_aux_loss_coef=1.0
    )
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    more = ("--config", tmp_path / "config.json", "--micro", 4, "--curves", "fp32", "torch-fp32")
    run(tmp_path / "moe", tiny_shard, *more)
    result = json.loads((tmp_path / "moe.json").read_text())
    ours, theirs = result["runs"]
    assert np.abs(np.subtract(ours["loss"], theirs["loss"])).max() < 1e-4
    assert ours["loss"][-1] < ours["loss"][0] - 0.1
    assert np.abs(np.subtract(ours["expert_load"], theirs["expert_load"])).max() < 0.05
    assert max(ours["expert_load"]) > 1.1 and (tmp_path / "moe.png").exists()


def test_all_curves_begin_with_the_same_weights_and_tokens(curves):
    _, _, result, *_ = curves
    ours, same, theirs, as_well = (loss(result, c)[0] for c in curve.list_of(result))
    assert ours == same and theirs == as_well  # all compute with the same weights, in bf16
    assert abs(ours - theirs) < 2 * tolerance.loss_noise(tolerance.delta("bf16", 4, 8, 512), 256)
    assert loss(result, "bf16", 2) != loss(result, "bf16", 1)


def test_the_gap_is_of_the_last_fifth_with_the_spread_of_seeds(curves):
    _, before, after, _, said = curves
    by_seed = [
        np.mean(loss(after, "bf16", s)[-2:]) - np.mean(loss(after, "fp32-master", s)[-2:])
        for s in (1, 2)
    ]
    gap = after["gaps"]["bf16 - fp32-master"]
    assert gap["by_seed"] == pytest.approx(by_seed) and gap["gap"] == pytest.approx(
        sum(by_seed) / 2
    )
    assert gap["spread"] == pytest.approx(statistics.stdev(by_seed))
    text = f"bf16 - fp32-master: {gap['gap']:+.4f} ± {gap['spread']:.4f} nats over the last fifth"
    assert text in said.stdout
    assert before["gaps"]["bf16 - fp32-master"]["spread"] is None


def test_the_same_command_goes_on_and_trains_only_what_is_missing(curves, tiny_shard, tmp_path):
    out, before, after, first, more = curves
    assert first.stdout.count(", seed 1: loss") == 4 and more.stdout.count(": loss") == 2
    assert [r for r in after["runs"] if r["seed"] == 1] == before["runs"]
    other = run(out, tiny_shard, "--lr", "2e-3", code=2)
    assert "whose peak_lr is 0.001, not 0.002: give another --out" in other.stderr
    assert json.loads(out.with_suffix(".json").read_text()) == after


def test_the_table_and_the_picture_are_there(curves):
    out, _, after, *_ = curves
    with open(out.with_suffix(".csv")) as file:
        rows = list(csv.DictReader(file))
    assert [float(r["fp32-master seed 2"]) for r in rows] == loss(after, "fp32-master", 2)
    assert [float(r["lr"]) for r in rows] == pytest.approx(after["lr"], rel=1e-5)
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "more,says",
    [
        (["--steps", 1000], "the data has 624 sequences of 32 tokens, 1000 steps need 8000"),
        (["--config", "none.json"], "none.json cannot be read: No such file or directory"),
        (["--config", ROOT / "README.md"], "README.md is not JSON: "),
        (["--data", "none.bin"], "none.bin: cannot be opened: No such file or directory"),
        (["--draw", "none"], "none.json cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_trained_is_a_sentence(tiny_shard, tmp_path, more, says):
    said = run(tmp_path / "c", tiny_shard, *more, code=2).stderr
    assert said.startswith("curve.py: ") and says in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


PASSES = {"fp8": True, "fp8:saved": True}
FAILS = {"fp8:fast": False, "fp8-broken": False, "fp8-broken:fast": False}


@pytest.mark.parametrize(
    "name, expected",  # a run that ended early has no gate
    [("fp8-seeds-h100", PASSES | FAILS), ("fp8-accumulation-h100", {}), ("fp8-saved-h100", {})],
)
def test_the_shipped_curves_of_fp8_say_what_the_gate_says(name, expected):
    result = json.loads((ROOT / f"bench/results/{name}.json").read_text())
    assert curve.gaps_of(result) == result["gaps"]
    assert curve.gate_of(result) == result["gate"]
    assert {row["curve"]: row["passes"] for row in result["gate"]} == expected


def test_the_shipped_result_can_be_drawn():
    result = json.loads((ROOT / "bench/results/curve-h200.json").read_text())
    gaps = {pair: {**gap, "steps": result["steps"]} for pair, gap in result["gaps"].items()}
    assert curve.gaps_of(result) == gaps
    assert result["lr"] == pytest.approx(curve.curve_sides.schedule(6e-4, 200))
