"""A batch ramp: the first steps have fewer tokens. Each step has the bits that a run of its size
would have; the data, the schedule and a resumed run go on as if nothing had changed."""

import json
import time
from pathlib import Path

import numpy as np
import penstock as ps
import pytest
from penstock import Checkpoint, Dataset, Hardware, ModelConfig, Plan, Trainer
from penstock._lib import check, lib
from penstock.run_file import tomllib
from test_cli import job, penstock, refused, words  # noqa: F401 (job is a fixture)

SEQ = 64
RAMP = [(SEQ, 3), (3 * SEQ, 2)]  # then 8 sequences a step
STEPS = 9
SETTINGS = {"lr": 1e-3, "lr_schedule": "cosine", "warmup_steps": 2, "total_steps": STEPS, "seed": 5}
# both: chunks and rounds as a plan would choose them under its caps
PLANS = {
    "whole": {"recipe": "fp32"},
    "rounds": {"recipe": "bf16", "chunk_tokens": 2 * SEQ, "chunks_per_round": 2},
    "slices": {"recipe": "fp32-master", "chunk_tokens": SEQ // 4, "chunks_per_round": 8},
    "small": {"recipe": "bf16", "chunk_tokens": 2 * SEQ, "device_mem": "3MiB"},
    "no-clip": {"recipe": "bf16", "chunk_tokens": 2 * SEQ, "clip_norm": 0.0, "keep_grads": False},
}


def make_plan(folder, tokens=8 * SEQ, **options):
    return Plan(
        ModelConfig.read(folder),
        seq_len=SEQ,
        tokens_per_step=tokens,
        hardware=Hardware.estimate(2, "cpu"),
        **options,
    )


def sizes():
    return [n for n, steps in RAMP for _ in range(steps)] + [8 * SEQ] * (STEPS - 5)


def weights(trainer):
    return {name: trainer.read(name) for name in trainer.params}


def figures(metrics):
    return [(m.step, m.tokens, m.loss, m.grad_norm, m.lr) for m in metrics]


@pytest.fixture(scope="module")
def ramps(tiny_model, tiny_shard):
    """name -> (the plan's options, figures, weights) of a run over the ramp, made once."""
    made = {}

    def run(name):
        if name not in made:
            options = PLANS[name]
            plan = make_plan(tiny_model, batch_ramp=RAMP, **options)
            settings = SETTINGS
            with Trainer(tiny_model, plan, str(tiny_shard), shuffle=True, **settings) as trainer:
                made[name] = plan.report, figures(trainer.steps(STEPS)), weights(trainer)
        return made[name]

    return run


def batches(data):
    """The sequences of a run over the ramp, in the order of seed 5."""
    starts = np.cumsum([0, *[n // SEQ for n in sizes()]])
    order = [lib.ps_dataset_order(data.n_sequences(SEQ), i, 5, 1) for i in range(starts[-1])]

    def batch(step):
        rows = [data.read(SEQ, order[i]) for i in range(starts[step], starts[step + 1])]
        return np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows])

    return batch


def as_of_another_size(path, tokens):
    """Let a run of other steps go on from the checkpoint."""
    manifest = Path(path) / "manifest.json"
    kept = json.loads(manifest.read_text())
    kept["batch"]["tokens_per_step"] = tokens
    kept["sequences_read"] = kept["step"] * (tokens // SEQ)
    manifest.write_text(json.dumps(kept))


@pytest.mark.parametrize("name", PLANS)
def test_each_step_has_the_bits_of_a_run_of_its_size(name, ramps, tiny_model, tiny_shard, tmp_path):
    """The reference has a plan and a trainer for each size. The next trainer goes on from the last
    one's checkpoint and gets the same sequences from a batch function."""
    report, found, last = ramps(name)
    assert [f[1] for f in found] == sizes()
    order = batches(Dataset(str(tiny_shard), 512))
    cut = ("chunk_tokens", "chunks_per_round", "first_round_chunks", "first_rounds")
    cut += ("head_slice_tokens",)
    options = {k: v for k, v in PLANS[name].items() if k != "device_mem"}
    options |= {k: report[k] for k in cut}
    settings, expected, path = SETTINGS, [], None
    for tokens, n in [*RAMP, (8 * SEQ, STEPS - 5)]:
        plan = make_plan(tiny_model, tokens, **options)
        if path:
            as_of_another_size(path, tokens)
            trainer = Trainer.resume(path, tiny_model, plan, order)
        else:
            trainer = Trainer(tiny_model, plan, order, shuffle=True, **settings)
        with trainer:
            expected += figures(trainer.steps(n))
            path, state = trainer.checkpoint(tmp_path), weights(trainer)
    assert found == expected
    assert all(np.array_equal(state[p], last[p]) for p in last)


@pytest.mark.parametrize("name", ["rounds", "slices", "no-clip"])
@pytest.mark.parametrize("at", [2, 3, 4, 5, 7])  # in a stage, at its end, after the ramp
def test_a_run_resumed_within_and_across_stages_has_the_same_bits(
    name, at, ramps, tiny_model, tiny_shard, tmp_path
):
    _, found, last = ramps(name)
    data, options = str(tiny_shard), PLANS[name]
    plan = make_plan(tiny_model, batch_ramp=RAMP, **options)
    with Trainer(tiny_model, plan, data, shuffle=True, **SETTINGS) as trainer:
        list(trainer.steps(at))
        path = trainer.checkpoint(tmp_path)
    checkpoint = Checkpoint(path)
    kept = {k: v for k, v in checkpoint.plan_options.items() if k != "seq_len"}
    kept["tokens"] = kept.pop("tokens_per_step")
    plan = make_plan(tiny_model, batch_ramp=RAMP, **options | kept)
    with Trainer.resume(checkpoint, tiny_model, plan, data) as trainer:
        assert figures(trainer.steps(STEPS - at)) == found[at:]
        assert all(np.array_equal(weights(trainer)[p], last[p]) for p in last)


def test_a_checkpoint_is_refused_with_another_ramp_behind_it(
    ramps, tiny_model, tiny_shard, tmp_path
):
    plan = make_plan(tiny_model, batch_ramp=RAMP, **PLANS["rounds"])
    with Trainer(tiny_model, plan, str(tiny_shard), **SETTINGS) as trainer:
        list(trainer.steps(4))
        path = trainer.checkpoint(tmp_path)
    other = make_plan(tiny_model, batch_ramp=[(SEQ, 4)], **PLANS["rounds"])
    pattern = (
        "was written after 6 sequences, .* step 4 ends after 4: give the checkpoint's batch_ramp"
    )
    with pytest.raises(ps.InvalidError, match=pattern):
        Trainer.resume(path, tiny_model, other, str(tiny_shard))


def test_steps_that_are_submitted_at_once_cross_the_stages(ramps, tiny_model, tiny_shard):
    _, found, _ = ramps("rounds")
    plan = make_plan(tiny_model, batch_ramp=RAMP, **PLANS["rounds"])
    with Trainer(tiny_model, plan, str(tiny_shard), shuffle=True, **SETTINGS) as trainer:
        check(lib.ps_trainer_submit(trainer._handle.ptr, STEPS))
        # steps of the second size begin in a call alone, so that a trainer can be destroyed
        while not lib.ps_trainer_at_rest(trainer._handle.ptr):
            time.sleep(0.001)
        assert figures(trainer.finish()) == found


def test_a_cancel_in_the_ramp_stops_the_run(tiny_model, tiny_shard):
    plan = make_plan(tiny_model, batch_ramp=RAMP, **PLANS["rounds"])
    with Trainer(tiny_model, plan, str(tiny_shard), **SETTINGS) as trainer:
        list(trainer.steps(4))
        trainer.cancel()
        with pytest.raises(ps.CancelledError):
            list(trainer.steps(1))


def test_the_command_trains_over_the_ramp_and_its_file_does_too(job, tmp_path):  # noqa: F811
    options = job | {"--tokens-per-step": 8 * SEQ, "--steps": 7, "--checkpoint-every": 4}
    stages = ("--batch-ramp", "64:3", "192:2")
    done = penstock("train", "--quiet", *words(options | {"--run-dir": "a"}), *stages, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    resolved = tomllib.loads((tmp_path / "a/run.toml").read_text())
    assert resolved["schedule"]["batch-ramp"] == ["64:3", "192:2"]
    found = read_metrics(tmp_path / "a")
    assert [tokens for tokens, _ in found] == [64] * 3 + [192] * 2 + [512] * 2
    again = ("--config", "a/run.toml", "--run-dir", "b", "--resume", "a/checkpoints/step-00000004")
    assert penstock("train", "--quiet", *again, cwd=tmp_path).returncode == 0
    assert read_metrics(tmp_path / "b") == found[4:]
    assert consumed(tmp_path / "a")[4:] == consumed(tmp_path / "b") == [576, 1088, 1600]
    text = penstock("plan", "--config", "a/run.toml", "--quiet=false", cwd=tmp_path).stdout
    assert "batch ramp       3 steps of 64 tokens: 1 round" in text
    plan = json.loads(penstock("plan", "--config", "a/run.toml", "--json", cwd=tmp_path).stdout)
    assert [s["tokens_per_step"] for s in plan["batch_ramp"]] == [64, 192]
    with Trainer.from_file(tmp_path / "a/run.toml", checkpoint_every=0) as trainer:
        ours = [(m.tokens, m.loss) for m in trainer.steps(7)]
    assert ours == found


def read_metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(m["tokens"], m["loss"]) for m in lines if "loss" in m]


def consumed(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [m["consumed_tokens"] for m in lines if "loss" in m]


def test_once_through_the_data_counts_the_ramp(tiny_model):
    plan = make_plan(tiny_model, batch_ramp=RAMP)
    # 9 sequences in 5 steps, then 8 a step
    for sequences, steps in ((0, 0), (2, 2), (5, 3), (6, 4), (9, 5), (16, 5), (17, 6), (33, 8)):
        assert plan.steps_of(sequences) == steps


@pytest.mark.parametrize(
    "stages,pattern",
    [
        (["64"], "--batch-ramp 64: give TOKENS:STEPS, such as 65536:1000"),
        (["64:"], "--batch-ramp 64:: give TOKENS:STEPS"),
        (["64:2x"], "--batch-ramp 64:2x: give TOKENS:STEPS"),
        (["64:-2"], "--batch-ramp 64:-2: give TOKENS:STEPS"),
        (["64:0"], "stage 1 of the batch ramp has 0 steps: give at least 1"),
        (["63:2"], "stage 1 of the batch ramp has 63 tokens a step: give from 64, one sequence"),
        (["64:2", "1024:1"], "stage 2 of the batch ramp has 1024 tokens a step: .* to 512"),
        (
            ["64:1000000001"],
            "stage 1 of the batch ramp has 1000000001 steps: .* at most 1000000000",
        ),
        (["64:1"] * 65, "--batch-ramp: 65 stages given, at most 64 are taken"),
    ],
)
def test_a_wrong_ramp_is_refused(job, tmp_path, stages, pattern):  # noqa: F811
    options = words(job | {"--run-dir": "r"})
    refused(penstock("train", *options, "--batch-ramp", *stages, cwd=tmp_path), pattern)
    assert list(tmp_path.iterdir()) == []
