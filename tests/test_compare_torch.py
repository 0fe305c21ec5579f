"""bench/compare_torch.py: its arithmetic, its refusals, and PyTorch's side of it."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import BUILD, HANGS_S, ROOT

sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench/sweep")]

import compare_torch  # noqa: E402
import measure  # noqa: E402
import torch_side  # noqa: E402

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def asked(tmp_path, **more):
    shard = tmp_path / "tokens.bin"
    measure.random_shard(shard, 1000, TINY["vocab_size"])
    base = {"config": TINY, "seq_len": 16, "tokens_per_step": 64, "shard": str(shard)}
    base |= {"recipe": "fp32", "device": "cpu", "compile": False, "steps": 2, "warm_up": 1}
    return torch_side.Ask(**(base | more))


def test_pytorchs_losses_do_not_depend_on_how_its_step_is_cut(tmp_path):
    sides = [torch_side.run(asked(tmp_path, micro=micro)) for micro in (1, 4)]
    sides.append(torch_side.run(asked(tmp_path, micro=2, checkpoint=True)))
    for side in sides:
        assert len(side["step_s"]) == 2 and len(side["loss"]) == 3
        # fp32 sums of 64 losses in another order
        assert side["loss"] == pytest.approx(sides[0]["loss"], rel=1e-5)
    # nearly uniform at weights of N(0, 0.02); the variance of the logits, 32 * 0.02^2, adds 0.006
    assert sides[0]["loss"][0] == pytest.approx(math.log(64), abs=0.02)
    assert torch_side.run(asked(tmp_path))["micro"] in (1, 2, 4)


def test_a_step_is_adamw_on_the_clipped_gradient_of_the_whole_batch(tmp_path, monkeypatch):
    """One step of two micro-batches against fp64 without any: the first moment is a tenth of the
    clipped gradient."""
    monkeypatch.setattr(torch_side, "CLIP", 0.05)
    side = torch_side.Side(asked(tmp_path, micro=2))
    plain = {n: w.detach().double().requires_grad_() for n, w in side.p.items()}
    ids, targets = side.batch(0)
    (torch_side.Llama(side.m, plain).loss(ids, targets) / 64).backward()
    norm = math.sqrt(sum(w.grad.pow(2).sum().item() for w in plain.values()))
    assert norm > 0.1
    side.step(0, 2)
    for name, w in plain.items():
        moment = side.optimizer.state[side.p[name]]["exp_avg"].double()
        # fp32 through two blocks: about 30 roundings of 6e-8, of the largest gradient
        most = 2e-6 * w.grad.abs().max().item()
        assert torch.allclose(moment, 0.1 * w.grad * 0.05 / norm, rtol=0, atol=most), name


def test_rows_are_medians_over_all_turns_in_one_unit():
    plan = {"flops_per_s": 2e12, "mfu": 0.5, "device_peak_bytes": 2**30, "loss": [4.0]}
    turns = {
        "penstock, all": [plan | {"step_s": [1.0, 1.2]}, plan | {"step_s": [1.1]}],
        "torch": [{"step_s": [2.2, 2.0, 9.0], "loss": [4.0], "device_peak_bytes": 0, "micro": 2}],
        "torch, checkpointing": [{"failed": "out of GPU memory", "message": "CUDA out of memory"}],
    }
    ours, theirs, failed = compare_torch.rows_of("1b:8:1000", 1000, turns, {"machine": "m"})
    assert ours["step_s"] == 1.1 and ours["tokens_per_s"] == pytest.approx(1000 / 1.1)
    assert theirs["step_s"] == 2.2 and theirs["of_torch"] == 1
    assert ours["of_torch"] == pytest.approx(2)
    # the plan's FLOPs a step are those of its first turn: 2e12 a second for 1.1 s
    assert theirs["tflops"] == pytest.approx(1.0) and theirs["mfu"] == pytest.approx(0.25)
    text = compare_torch.table([ours, theirs, failed])
    assert "| torch | 455 | 1.00 | 25.0% |  | 2 |" in text
    assert "| torch, checkpointing | out of GPU memory |" in text
    assert "\n- torch, checkpointing: out of GPU memory: CUDA out of memory\n" in text
    long = compare_torch.table([failed | {"message": "too long " * 99}])
    assert max(map(len, long.splitlines())) < 240


@pytest.mark.parametrize(
    "words,says",
    [
        (["8b:8192"], "8b:8192: a case is MODEL:SEQ_LEN:TOKENS_PER_STEP"),
        (["8b:8192:131072", "--caps", "24"], "--caps 24: must be DEVICE_GIB:HOST_GIB"),
        (["none:8192:131072"], "model 'none' is none of"),
        (["8b:8192:131072", "--steps", "0"], "--steps is 0: at least 1"),
        (["32b-qwen3:64:64"], "model '32b-qwen3'"),
        (["1b:512:x"], 'py: 1b:512:x: tokens-per-step = "x": a whole number'),
        (["1b:many:512"], 'py: 1b:many:512: seq-len = "many": a whole number'),
    ],
)
def test_wrong_words_are_one_sentence(tmp_path, words, says):
    command = [sys.executable, ROOT / "bench/compare_torch.py", "--out", tmp_path / "out", *words]
    command += ["--binary", BUILD / "bin/penstock"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_where_no_side_runs_the_reasons_are_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 64}))
    command = [sys.executable, ROOT / "bench/compare_torch.py", f"{tmp_path}:16:64"]
    command += ["--out", tmp_path / "out", "--sides", "torch", "--binary", BUILD / "bin/penstock"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and "no side ran: the table has the reasons" in done.stderr
    why = f"no CUDA device: PyTorch {torch.__version__} finds no CUDA device: install"
    table = (tmp_path / "out/table.md").read_text()
    assert f"turn 1  torch: {why}" in done.stdout and f"\n- torch: {why}" in table
    assert table.count("\n- penstock, all of the device, all of the host: exit ") == 1
    assert not (tmp_path / "out/compare.png").exists()


def test_what_was_measured_stays_where_the_comparison_is_stopped(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 64}))
    command = [sys.executable, ROOT / "bench/compare_torch.py", f"{tmp_path}:16:64"]
    command += ["--out", tmp_path / "out", "--device", "cpu", "--recipe", "fp32", "--eager"]
    command += ["--binary", BUILD / "bin/penstock", "--caps", "0:0", "--threads", 1]
    command += ["--sides", "torch", "--steps", 2, "--warm-up", 1, "--repeats", 99, "--micro", 1]
    words = [str(c) for c in command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert "turn 1  penstock" in p.stdout.readline()
        p.terminate()
        _, said = p.communicate(timeout=HANGS_S)
    assert p.returncode == 130 and said.splitlines()[-1].endswith("/out has 1 sides")
    (row,) = (json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines())
    assert row["side"].startswith("penstock") and row["tokens_per_s"] > 0
    assert (tmp_path / "out/table.md").read_text().count("| penstock") == 1


@pytest.mark.parametrize("words", [[], ["--help"], ["5"]])
def test_pytorchs_side_says_that_it_is_a_helper(words):
    command = [sys.executable, ROOT / "bench/torch_side.py", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "a helper that bench/compare_torch.py starts" in done.stderr


def test_both_sides_run_on_a_cpu(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 64}))
    command = [sys.executable, ROOT / "bench/compare_torch.py", f"{tmp_path}:16:64"]
    command += ["--out", tmp_path / "out", "--device", "cpu", "--recipe", "fp32", "--eager"]
    command += ["--binary", BUILD / "bin/penstock", "--caps", "0:0", "least:0", "--threads", 1]
    command += ["--sides", "torch", "--steps", 2, "--warm-up", 1, "--repeats", 1, "--micro", 1]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    assert [r["side"].split(",")[0] for r in rows] == ["penstock", "penstock", "torch"]
    assert all(r["tokens_per_s"] > 0 and r["steps_timed"] == 2 for r in rows)
    assert rows[0]["loss"] == rows[1]["loss"]  # caps do not change the math
    assert rows[1]["device_peak_bytes"] <= rows[0]["device_peak_bytes"]
    assert (tmp_path / "out/table.md").read_text().count("| penstock") == 2
    assert (tmp_path / "out/compare.png").stat().st_size > 5000
