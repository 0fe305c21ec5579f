"""Generation on a GPU: the tokens of transformers in fp32, and the same tokens wherever blocks lie."""

import json

import numpy as np
import pytest

pytest.importorskip("transformers")  # a machine with a GPU may lack it
from families import CONFIGS, random_model  # noqa: E402
from penstock import Generator  # noqa: E402
from test_families import END_OF_TEXT, greedy  # noqa: E402

# products of fp32 may be taken in TF32, 11 bits: a relative error of 2^-11 a product, as if they
# added up over the 4 products and 3 layers; of logits of up to about 4, twice
GAP = 2 * 4 * 12 * 2.0**-11


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["phi3", "olmo2", "granite", "smollm3", "gemma2"])
def test_greedy_tokens_are_those_of_transformers(tmp_path, name):
    model, rng, prompts, expected = random_model(CONFIGS[name]), np.random.default_rng(0), [], []
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    for _ in range(60):
        ids = rng.integers(3, CONFIGS[name]["vocab_size"], 34 + 3 * len(prompts)).tolist()
        tokens, gap = greedy(model, ids, 3)
        if gap > GAP and len(prompts) < 3:
            prompts.append(ids)
            expected.append(tokens)
    assert prompts, "no prompt whose tokens are certain"
    with Generator(
        tmp_path, batch=2, context=48, dtype="fp32", prefill_tokens=25, backend="cuda"
    ) as generator:
        got = generator.run(prompts, max_new_tokens=3, stop_tokens=[END_OF_TEXT])
    assert got == expected
