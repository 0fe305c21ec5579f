"""z-loss and label smoothing: gradients and figures of a step against PyTorch in fp64, what the
command reports, what is refused. The op alone: test_op_cases.py."""

import json

import penstock as ps
import pytest
from penstock import Checkpoint, Hardware, ModelConfig, Plan, Trainer
from penstock.run_file import tomllib
from test_cli import job, penstock, refused, words  # noqa: F401 (job is a fixture)
from test_parity import (
    batch,
    delta,
    directory,  # noqa: F401 (a fixture)
    gradients_of,
    loss_noise,
    make_plan,
    open_trainer,
    oracle,
    run,
)
from tolerance import check_gradients

# large, so that a wrong term shows
TERMS = [{"z_loss": 1e-2}, {"label_smoothing": 0.2}, {"z_loss": 3e-2, "label_smoothing": 0.1}]


@pytest.mark.parametrize("terms", TERMS, ids=lambda t: "-".join(t))
@pytest.mark.parametrize("name,layout", [("llama", "packed"), ("qwen2", "sliced-4")])
def test_gradients_and_figures_of_a_step_are_those_of_pytorch(directory, name, layout, terms):  # noqa: F811
    reference = oracle(name)
    reference.z_loss = terms.get("z_loss", 0.0)
    reference.label_smoothing = terms.get("label_smoothing", 0.0)
    expected = reference.gradients(*batch(0))
    plain = oracle(name)
    plain.z_loss = terms.get("z_loss", 0.0)
    without_smoothing = plain.gradients(*batch(0))[0]
    plan = make_plan(directory(name), layout, **terms, head_slice_tokens=7)
    with open_trainer(directory(name), layout, plan=plan) as trainer:
        (first,) = run(trainer, 1)
        check_gradients(gradients_of(trainer), expected, delta("fp32", layout))
    # logits are about 6 in size here: a z-loss of 3e-2 * 6^2 adds 0.36 of their error to a loss
    noise = 2 * loss_noise("fp32", layout, first.valid_tokens)
    assert abs(first.objective - expected[0]) < noise
    assert abs(first.loss - reference.cross_entropy) < noise
    assert abs(first.z_loss - (without_smoothing - plain.cross_entropy)) < noise
    assert first.valid_tokens < batch(0)[1].size  # some targets were masked


def test_without_them_the_objective_is_the_loss(directory):  # noqa: F811
    with open_trainer(directory("llama"), "packed") as trainer:
        (first,) = run(trainer, 1)
    assert first.objective == first.loss and first.z_loss == 0


def test_metrics_have_the_terms_that_are_on(job, tmp_path):  # noqa: F811
    cases = {
        "none": ({}, set()),
        "z": ({"--z-loss": 1e-3}, {"objective", "z_loss"}),
        "smooth": ({"--label-smoothing": 0.1}, {"objective"}),
        "both": ({"--z-loss": 1e-3, "--label-smoothing": 0.1}, {"objective", "z_loss"}),
    }
    first = {}
    for name, (options, want) in cases.items():
        done = penstock(
            "train", "--quiet", *words(job | options | {"--run-dir": name}), cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        first[name] = json.loads((tmp_path / name / "metrics.jsonl").read_text().split("\n")[0])
        assert {"objective", "z_loss"} & set(first[name]) == want
        assert first[name]["loss"] == first["none"]["loss"]  # the cross-entropy, whatever is on
    assert first["z"]["objective"] == pytest.approx(first["z"]["loss"] + first["z"]["z_loss"])
    both = tomllib.loads((tmp_path / "both/run.toml").read_text())["optimizer"]
    assert both["z-loss"] == 1e-3 and both["label-smoothing"] == 0.1
    done = penstock("eval", "--json", "--config", tmp_path / "both/run.toml")
    assert json.loads(done.stdout)["loss"] > 0, done.stderr


@pytest.mark.parametrize(
    "option,value,pattern",
    [
        ("--z-loss", "-1", "--z-loss -1: give a number from 0 to 1000"),
        ("--z-loss", "1e4", "--z-loss 1e4: give a number from 0 to 1000"),
        ("--label-smoothing", "1", "--label-smoothing 1: give a number from 0 to 0.999"),
        ("--label-smoothing", "nan", "--label-smoothing nan: give a number"),
    ],
)
def test_a_coefficient_out_of_range_is_refused(job, tmp_path, option, value, pattern):  # noqa: F811
    refused(
        penstock("train", *words(job | {option: value, "--run-dir": "r"}), cwd=tmp_path), pattern
    )
    assert list(tmp_path.iterdir()) == []
    cfg = {"seq_len": 64, "hardware": Hardware.estimate(2, "cpu")}
    with pytest.raises(ps.InvalidError, match=option[2:].replace("-", "_")):
        Plan(
            ModelConfig.read(job["--model"]), **cfg, **{option[2:].replace("-", "_"): float(value)}
        )


def test_a_plan_that_trains_nothing_has_none(tiny_model):
    with pytest.raises(ps.InvalidError, match="a plan that trains nothing has neither"):
        Plan(
            ModelConfig.read(tiny_model),
            seq_len=64,
            hardware=Hardware.estimate(2, "cpu"),
            forward_only=True,
            z_loss=1e-4,
        )


def test_a_checkpoint_keeps_them_and_a_resumed_run_has_the_same_bits(
    tiny_model, tiny_shard, tmp_path
):
    model, cpu = ModelConfig.read(tiny_model), Hardware.estimate(2, "cpu")
    options = {"seq_len": 64, "tokens_per_step": 256, "z_loss": 1e-3, "label_smoothing": 0.1}
    with Trainer(tiny_model, Plan(model, **options, hardware=cpu), str(tiny_shard)) as trainer:
        list(trainer.steps(2))
        path = trainer.checkpoint(tmp_path)
        want = [(m.loss, m.objective, m.z_loss) for m in trainer.steps(2)]
    checkpoint = Checkpoint(path)
    kept = checkpoint.plan_options
    assert kept["z_loss"] == 1e-3 and kept["label_smoothing"] == 0.1
    plan = Plan(model, **kept, hardware=cpu)
    with Trainer.resume(checkpoint, tiny_model, plan, str(tiny_shard)) as trainer:
        assert [(m.loss, m.objective, m.z_loss) for m in trainer.steps(2)] == want
