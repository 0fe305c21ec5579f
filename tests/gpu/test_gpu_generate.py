"""Generation on a GPU: the tokens of transformers in fp32, and the same tokens wherever blocks lie."""

import json

import numpy as np
import pytest

pytest.importorskip("transformers")  # a machine with a GPU may lack it
from families import CONFIGS, qwen3_moe, random_model  # noqa: E402
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_experts_on_demand_give_the_tokens_of_whole_blocks(tmp_path, dtype):
    """64 experts of 1.5 MiB in bf16 a block, of which few fit: their products are the same kernels, of other
    addresses. Prompts are streamed whole."""
    cfg = qwen3_moe(num_hidden_layers=8, hidden_size=512, moe_intermediate_size=512)
    cfg |= dict(num_experts=64, num_experts_per_tok=4)
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    random_model(cfg).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, cfg["vocab_size"], n).tolist() for n in (30, 3, 11)]
    options = dict(batch=2, context=96, dtype=dtype, backend="cuda", deterministic=True)
    run = dict(max_new_tokens=60, temperature=1.0, seed=[1, 2, 3])
    with Generator(tmp_path, **options) as generator:
        resident, used = generator.run(prompts, **run), generator.report["device_used_bytes"]
    blocks = 7 * 64 * 3 * 512 * 512 * (2 if dtype == "bf16" else 4)
    for cap in (used - blocks // 2, used - blocks // 4):
        got = {}
        for experts in ("whole", "on-demand"):
            with Generator(tmp_path, device_mem=cap, experts=experts, **options) as generator:
                got[experts] = generator.run(prompts, **run)
                stats, report = generator.stats, generator.report
        assert got["whole"] == got["on-demand"] == resident
        assert 8 <= report["n_slots"] < 64 and report["device_used_bytes"] <= cap
        assert 0 < stats["experts_missed"] < stats["experts_wanted"]
