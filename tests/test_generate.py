"""penstock.decode against transformers: same weights on disk, same logits, no code shared."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from penstock.decode import Decoder, generate
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
# fp32 on both sides, sums of at most 352 terms over 4 layers: relative error about depth *
# sqrt(terms) * 2^-24 = 4e-6 of logits of size about 1; ten times that.
TOLERANCE = 5e-5


def make_model(tmp_path, name, **changes):
    config = json.loads((ROOT / "models" / f"{name}.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "model"
    subprocess.run(
        [
            sys.executable,
            ROOT / "models/init_model.py",
            tmp_path / "config.json",
            out,
            "--dtype",
            "fp32",
            "--seed",
            "3",
        ],
        check=True,
        capture_output=True,
    )
    return out


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "name,changes",
    [
        ("tiny-llama", {}),
        ("tiny-qwen2", {}),
        ("tiny-qwen3", {}),
        ("tiny-llama", {"rope_scaling": LLAMA3_ROPE}),
        ("tiny-llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, name, changes):
    model_dir = make_model(tmp_path, name, **changes)
    reference = AutoModelForCausalLM.from_pretrained(
        model_dir, torch_dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = np.random.default_rng(0).integers(0, reference.config.vocab_size, 40)
    with torch.no_grad():
        expected = reference(torch.tensor(ids)[None]).logits[0].numpy()
    decoder = Decoder(model_dir)
    assert np.abs(decoder.feed(ids) - expected[-1]).max() < TOLERANCE
    decoder.reset()  # the same through the cache, in pieces
    for first, last in ((0, 7), (7, 8), (8, 39), (39, 40)):
        assert np.abs(decoder.feed(ids[first:last]) - expected[last - 1]).max() < TOLERANCE


def test_greedy_is_repeatable_and_sampling_follows_its_seed(tmp_path):
    decoder = Decoder(make_model(tmp_path, "tiny-llama"))
    assert generate(decoder, [1, 2, 3], 8, temperature=0) == generate(
        decoder, [1, 2, 3], 8, temperature=0, seed=9
    )
    assert generate(decoder, [1, 2, 3], 12, seed=1) == generate(decoder, [1, 2, 3], 12, seed=1)
    assert generate(decoder, [1, 2, 3], 12, temperature=2, seed=1) != generate(
        decoder, [1, 2, 3], 12, temperature=2, seed=2
    )


def test_generation_stops_at_the_end_token(tmp_path):
    decoder = Decoder(make_model(tmp_path, "tiny-llama"))
    tokens = generate(decoder, [5], 20, temperature=1, seed=4)
    assert (
        generate(decoder, [5], 20, temperature=1, seed=4, end_token=tokens[3])
        == tokens[: tokens.index(tokens[3])]
    )


def test_ids_past_the_vocabulary_are_refused(tmp_path):
    with pytest.raises(ValueError, match="token id, each from 0 to 511"):
        Decoder(make_model(tmp_path, "tiny-llama")).feed([512])
