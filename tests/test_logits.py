"""A step's logits, which a Trainer gives to on_logits, against transformers'."""

import json

import families
import numpy as np
import pytest
import torch
from penstock import Hardware, InvalidError, ModelConfig, Plan
from penstock.compare import derive_logit_tolerance
from penstock.train import Trainer

SEQ, N = 32, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory, tokens, targets and the logits of transformers. All logits together take more
    memory than the whole step (below)."""
    cfg = families.gemma2(vocab_size=20000, hidden_size=24, intermediate_size=32)
    where, m = tmp_path_factory.mktemp("logits"), families.random_model(cfg)
    m.save_pretrained(where)
    (where / "config.json").write_text(json.dumps(cfg))
    tokens = np.random.default_rng(0).integers(0, 20000, (N, SEQ + 1), dtype=np.int32)
    with torch.no_grad():
        logits = m(torch.as_tensor(tokens[:, :-1]).long(), use_cache=False).logits
    return where, tokens[:, :-1], tokens[:, 1:], logits.flatten(0, 1).numpy()


def plan_of(where, **options):
    given = {"recipe": "fp32", "clip_norm": 0, "tokens_per_step": N * SEQ}
    hardware = Hardware.estimate(backend="cpu")
    return Plan(ModelConfig.read(where), seq_len=SEQ, hardware=hardware, **(given | options))


def logits_of(model, steps=1, **options):
    """Of the last step; each token's logits must come once. And the losses, and the plan."""
    where, tokens, targets, expected = model
    found = np.full_like(expected, np.nan)

    def note(step, token, logits):
        assert np.isnan(found[token]).all() if step == 0 else True
        found[token] = logits

    def batch(_):
        return tokens, targets

    plan = plan_of(where, on_logits=note, **options)
    with Trainer(where, plan, batch, lr=0.0) as trainer:
        losses = [m.loss for m in trainer.steps(steps)]
    return found, losses, plan


CUTS = {
    "whole": {"chunk_tokens": N * SEQ},
    "head slices": {"chunk_tokens": N * SEQ, "head_slice_tokens": 7},
    "rounds": {"chunk_tokens": SEQ, "chunks_per_round": 1, "head_slice_tokens": 9},
    "slices of a sequence": {"chunk_tokens": 12, "head_slice_tokens": 5},
    "forward only": {"forward_only": True},
}


@pytest.mark.parametrize("cut", CUTS)
def test_logits_are_those_of_transformers(model, cut):
    found, _, plan = logits_of(model, **CUTS[cut])
    tolerance = derive_logit_tolerance(plan.model, plan, "fp32").value
    error = np.linalg.norm(found - model[3]) / np.linalg.norm(model[3])
    assert 0 < error < tolerance


def test_no_tensor_of_all_logits(model):
    """Under the least device memory the logits are the same bits, and less than all of them."""
    options = {"chunk_tokens": SEQ, "head_slice_tokens": 8}
    least, _ = Plan.smallest(
        ModelConfig.read(model[0]),
        seq_len=SEQ,
        recipe="fp32",
        clip_norm=0,
        on_logits=print,
        tokens_per_step=N * SEQ,
        hardware=Hardware.estimate(backend="cpu"),
        **options,
    )
    assert least < model[3].nbytes
    assert np.array_equal(*(logits_of(model, device_mem=m, **options)[0] for m in (None, least)))


def test_nothing_else_of_a_step_changes(model):
    """The same losses with and without."""
    where, tokens, targets, _ = model
    options = {"chunk_tokens": SEQ, "head_slice_tokens": 8}
    _, with_logits, _ = logits_of(model, steps=2, **options)
    plan = plan_of(where, **options)
    with Trainer(where, plan, lambda _: (tokens, targets), lr=0.0) as trainer:
        assert [m.loss for m in trainer.steps(2)] == with_logits


def test_an_error_of_on_logits_stops_the_run(model):
    where, tokens, targets, _ = model

    def fail(_step, token, _logits):
        raise ZeroDivisionError(f"token {token}")

    plan = plan_of(where, on_logits=fail)
    with (
        Trainer(where, plan, lambda _: (tokens, targets)) as trainer,
        pytest.raises(ZeroDivisionError, match="token"),
    ):
        list(trainer.steps(1))


def test_a_step_has_fewer_tokens_than_a_kernel_counts(model):
    with pytest.raises(InvalidError, match="with logits_fn at most 4294967295 are possible"):
        plan_of(model[0], on_logits=print, tokens_per_step=2**33)
