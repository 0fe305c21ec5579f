"""Every family against transformers: loss and every gradient in fp32 and bf16, with several
documents in a sequence, chunks that cut windows, the least device memory, and directories in and
out.

The oracle is transformers' own model in fp64. transformers takes norms and RoPE in fp32 even there,
so in fp32 both sides are wrong by delta (penstock/tolerance.py) at most: sqrt(2) delta together.
"""

import functools
import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import reference as ref
import safetensors.torch
import tolerance
import torch
from families import (
    ALL,
    CONFIGS,
    DEEP,
    DEEP_DELTA,
    DELTA,
    DELTA_NETS,
    EXPERTS,
    FAMILIES,
    OFFSET,
    VARIANTS,
    as_on_disk,
    delta_rule_in_fp64,
    named_constants,
    random_model,
)
from penstock import Generator, InvalidError, Lora, Plan
from penstock.model import ModelConfig
from test_parity import (
    END,
    LAYOUTS,
    ROOT,
    batch,
    documented,
    gradients_of,
    make_plan,
    near,
    open_trainer,
    plain,
    run,
    smallest_plan,
    transformers_loss,
)
from tolerance import check_gradients, loss_noise, note_spread, note_spread_of_delta_nets


def delta(name, recipe, layout):
    cfg = ALL[name]
    exact = math.sqrt(2) if recipe == "fp32" else 1
    post_norms = cfg["model_type"] in tolerance.FAMILIES_WITH_POST_NORMS
    a_layer = tolerance.A_LAYER + tolerance.POST_NORMS * post_norms
    chunks = LAYOUTS[layout][3]
    return exact * tolerance.delta(recipe, cfg["num_hidden_layers"], chunks, 512, a_layer)


# ---- the other side ------------------------------------------------------------------------------


@functools.cache
def model_of(name):
    return random_model(ALL[name])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @functools.cache
    def make(name):
        where = tmp_path_factory.mktemp("families") / name
        model_of(name).save_pretrained(where)
        (where / "config.json").write_text(json.dumps(ALL[name]))
        return where

    return make


def positions(tokens, documents):
    """Restart after each token that ends a document: transformers then keeps documents apart."""
    at = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
    if documents:
        begins = np.zeros(tokens.shape, bool)
        begins[:, 1:] = tokens[:, :-1] == END
        at -= np.maximum.accumulate(np.where(begins, at, 0), 1)
    return torch.as_tensor(at)


def masks(at, cfg):
    """What transformers masks with, of documents by their positions @at, where it does not find
    them itself: gpt-oss."""
    at = torch.as_tensor(at)
    n, document = at.shape[1], (at == 0).cumsum(1)
    far = torch.arange(n)[:, None] - torch.arange(n)
    seen = (document[:, :, None] == document[:, None]) & (far >= 0)
    return {
        kind: torch.zeros(seen.shape, dtype=torch.float64).masked_fill(
            ~(seen & (far < window)), -1e30
        )[:, None]
        for kind, window in (("full_attention", n), ("sliding_attention", cfg["sliding_window"]))
    }


def logits_of(model, name, tokens, at, **more):
    """Of sequences with several documents; where states run on, each document is a sequence."""
    if ALL[name]["model_type"] not in DELTA:
        return model(tokens, position_ids=at, use_cache=False, **more).logits
    begins = (at == 0).flatten().nonzero()[1:, 0].tolist()
    parts = tokens.flatten().tensor_split(begins)
    padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=1)
    with delta_rule_in_fp64(model):
        logits = model(padded, use_cache=False).logits
    cut = [x[: len(p)] for x, p in zip(logits, parts, strict=True)]
    return torch.cat(cut).view(*tokens.shape, -1)


@functools.cache
def gradients(name, documents, rounded=False):
    """(loss, {name: gradient}, {name: spread}) of the first batch. rounded: of bf16 weights."""
    import copy

    model, (tokens, targets) = copy.deepcopy(model_of(name)), batch(0, documents)
    if rounded:
        model = model.bfloat16()
    model, spread = model.double(), {}
    hooks = note_spread(model, spread)
    at, more = positions(tokens, documents), {}
    if name == "gpt_oss":
        more["attention_mask"] = masks(at, ALL[name])
    logits = logits_of(model, name, torch.as_tensor(tokens).long(), at, **more)
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.as_tensor(targets).long().flatten(), ignore_index=-1
    )
    loss.backward()
    for hook in hooks:
        hook.remove()
    grads = {key: p.grad for key, p in model.named_parameters()}
    grads |= {key: torch.zeros_like(p) for key, p in named_constants(model)}
    grads, spread = (as_on_disk(x, ALL[name]["model_type"]) for x in (grads, spread))
    note_spread_of_delta_nets(grads, spread)
    # of experts the terms are not known: that of what they add up to serves
    spread = {
        key: math.sqrt(spread[key]) if key in spread else g.norm().item()
        for key, g in grads.items()
    }
    return loss.item(), grads, spread


# ---- loss and gradients --------------------------------------------------------------------------

LAYOUTS_OF_FAMILIES = ("one-a-chunk", "packed", "sliced-4", "uneven-slices")
CASES = [(n, layout, True) for n in FAMILIES for layout in LAYOUTS_OF_FAMILIES]
CASES += [(n, layout, False) for n in FAMILIES for layout in ("packed", "sliced-4")]
CASES += [(n, layout, True) for n in EXPERTS for layout in ("packed", "uneven-slices")]
CASES += [(n, "sliced-4", True) for n in DELTA_NETS]
CASES += [("qwen3_5", layout, True) for layout in ("packed", "uneven-slices")]
CASES += [(n, "uneven-slices", True) for n in VARIANTS] + [(n, "packed", False) for n in VARIANTS]


def check(name, layout, documents, recipe="fp32", **more):
    expected = gradients(name, documents, rounded=recipe != "fp32")
    bound = delta(name, recipe, layout)
    data = documented if documents else plain
    with open_trainer(more.pop("where"), layout, recipe, data=data, **more) as trainer:
        (first,) = run(trainer, 1)
        check_gradients(gradients_of(trainer), expected, bound)
    assert abs(first.loss - expected[0]) < loss_noise(bound, first.valid_tokens)


@pytest.mark.parametrize(
    "name, layout, documents",
    CASES,
    ids=[f"{n}-{layout}-{'documents' if d else 'plain'}" for n, layout, d in CASES],
)
def test_gradients_of_every_tensor(directory, name, layout, documents):
    check(name, layout, documents, where=directory(name))


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe"])
def test_an_expert_without_a_row_is_among_those_compared(name):
    grads = gradients(name, True)[1]
    assert {bool(g.any()) for key, g in grads.items() if ".experts.5." in key} == {False}
    assert all(g.any() for key, g in grads.items() if ".experts." in key and ".5." not in key)


@pytest.mark.parametrize("layout", ["one-a-chunk", "sliced-4"])
def test_states_of_a_document_do_not_see_the_one_before(directory, layout):
    """Bit for bit, of a sequence with another first document; and where it has none, they differ."""
    n, seen = 23, {}
    tokens, targets = batch(0, False)
    for case, first in (("one", 5), ("other", 9), ("open", 5), ("changed", 9)):
        row, logits = np.where(tokens == END, 3, tokens), np.empty((tokens.size, 512), np.float32)
        row[:, : n - 1], row[:, n - 1] = first, END if case in ("one", "other") else 7

        def keep(_step, token, found, logits=logits):
            logits[token] = found

        plan = make_plan(directory("qwen3_5"), layout, on_logits=keep)
        with open_trainer(directory("qwen3_5"), plan=plan, data=lambda _, r=row: (r, targets)) as t:
            run(t, 1)
        seen[case] = logits.reshape(*tokens.shape, -1)[:, n:]
    assert (seen["one"] == seen["other"]).all()
    assert not (seen["open"] == seen["changed"]).all(-1).any()


def test_layers_without_keys_of_their_own(directory, tmp_path):
    """Files may have keys and values that no layer reads; LoRA has no such targets there; a ring of
    layers is refused."""
    where, stem, kept = directory("gemma4-e2b"), "model.layers.4.self_attn.", []
    shutil.copytree(where, tmp_path / "m")
    plan = make_plan(where, lora=Lora(2, targets="q_proj,k_proj"))
    for unused in (
        {},
        {f"{stem}{n}.weight": torch.ones(3) for n in ("k_proj", "v_proj", "k_norm")},
    ):
        safetensors.torch.save_file(unused, tmp_path / "m/more.safetensors")
        names = safetensors.torch.load_file(where / "model.safetensors")
        files = {n: "model.safetensors" for n in names} | {n: "more.safetensors" for n in unused}
        index = {"metadata": {}, "weight_map": files}
        (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps(index))
        with open_trainer(tmp_path / "m", plan=plan) as trainer:
            kept.append([step.loss for step in run(trainer, 1)])
            adapted = {n.split(".")[2] for n in trainer.params if "k_proj.lora_A" in n}
    assert kept[0] == kept[1] and adapted == {"0", "1", "2"}
    with pytest.raises(InvalidError, match="layout ring .*num_kv_shared_layers"):
        Plan(ModelConfig.read(where), seq_len=48, tokens_per_step=96, gpus=2, layout="ring")


def test_the_batches_reach_past_windows_and_lengths():
    """Documents longer than the windows, and than Phi-3's length before scaling."""
    tokens, _ = batch(0, True)
    longest = positions(tokens, True).max().item() + 1
    windows = [c["sliding_window"] for c in CONFIGS.values() if c.get("sliding_window")]
    originals = [c.get("original_max_position_embeddings", 0) for c in CONFIGS.values()]
    assert max(windows) < longest < tokens.shape[1]
    assert any(0 < n < longest for n in originals) and any(n > tokens.shape[1] for n in originals)


@pytest.mark.parametrize("name", [*DEEP, "gemma2", "gemma3", *EXPERTS, *DEEP_DELTA])
def test_gradients_in_the_smallest_device(directory, name):
    """Units are streamed, activations fetched or made again: by the right forward ops."""
    where = directory(name)
    plan = smallest_plan(where, "sliced-4")
    fetched = plan.report["saved_host_bytes"]
    assert fetched + plan.report["saved_recompute_bytes"] > 0
    check(name, "sliced-4", True, where=where, plan=plan)


@pytest.mark.parametrize("recipe", ["bf16", pytest.param("fp32-master", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_in_bf16(directory, name, recipe):
    check(name, "uneven-slices", True, recipe, where=directory(name))


def test_gradients_of_delta_nets_in_bf16(directory):
    check("qwen3_5", "uneven-slices", True, "bf16", where=directory("qwen3_5"))


# ---- directories ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.oldest) for n in CONFIGS), *EXPERTS, *DELTA_NETS]
)
def test_a_trained_model_opens_in_transformers(directory, tmp_path, name):
    where = directory(name)
    with open_trainer(where, "packed", data=plain) as trainer:
        first = run(trainer, 2)[0]
        trainer.save(tmp_path / "saved", "fp32")
        (third,) = run(trainer, 1)  # its loss is that of the saved weights
    _, saved = ref.read_directory(tmp_path / "saved", torch.float32)
    _, given = ref.read_directory(where, torch.float32)
    assert {k: v.shape for k, v in saved.items()} == {k: v.shape for k, v in given.items()}
    kept = {k for k in given if torch.equal(saved[k], given[k])}
    # as the model has them
    assert kept == {k for k in given if k.endswith(("correction_bias", "layer_scalar"))}
    texts = [(d / "config.json").read_text() for d in (tmp_path / "saved", where)]
    # numbers as they stand: transformers takes 4.0 where it refuses 4
    assert len({str(json.loads(t, parse_float=str)) for t in texts}) == 1
    assert near(first.loss, transformers_loss(where, *plain(0)))
    assert near(third.loss, transformers_loss(tmp_path / "saved", *plain(2)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_saved_in_bf16_opens_in_transformers(directory, tmp_path, name):
    with open_trainer(directory(name), "packed", "bf16", data=plain) as trainer:
        run(trainer, 1)
        trainer.save(tmp_path / "saved", "bf16")
        (after,) = run(trainer, 1)
    loss = transformers_loss(tmp_path / "saved", *plain(1))
    bound = delta(name, "bf16", "packed")
    assert abs(after.loss - loss) < loss_noise(bound, after.valid_tokens)


@pytest.mark.parametrize("name", [*FAMILIES, "gemma4-e2b", *EXPERTS, *DELTA_NETS])
def test_a_fresh_model_opens_in_transformers(tmp_path, name):
    """models/init_model.py and init_weights: every parameter is there, norms multiply by 1, the pad
    token's row is zero as nn.Embedding's, and all is trained."""
    cfg = {k: v for k, v in ALL[name].items() if k != "tie_word_embeddings"}  # the default
    (tmp_path / "c.json").write_text(json.dumps(cfg))
    words = [sys.executable, ROOT / "models/init_model.py", tmp_path / "c.json", tmp_path / "m"]
    subprocess.run([*words, "--dtype", "fp32"], check=True, capture_output=True)
    loss = transformers_loss(tmp_path / "m", *plain(0))  # nothing is missing or left over
    for drawn in (True, False):
        with open_trainer(tmp_path / "m", "packed", data=plain, init_weights=drawn) as trainer:
            norm = {n: trainer.read(n) for n in trainer.params if "norm" in n}
            plain_norms = cfg["model_type"] not in OFFSET
            assert all((w == (plain_norms or "linear_attn" in n)).all() for n, w in norm.items())
            table = trainer.read("model.embed_tokens.weight")
            (first,) = run(trainer, 1)
        assert np.flatnonzero(~table.any(1)) == [cfg["pad_token_id"]]
    assert near(first.loss, loss)


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_is_counted_within_its_windows(directory, name):
    """A row has min(row, window) keys, as area."""
    c, s = ModelConfig.read(directory(name)), 40
    w = [c.window if c.layer_flags[i] & 1 else s for i in range(c.n_layers)]
    dim = [c.global_head_dim if c.layer_flags[i] & 16 else c.head_dim for i in range(c.n_layers)]
    pairs = sum((x * x / 2 + (s - x) * x) * d for x, d in zip(w, dim, strict=True))
    flops = c.flops(s)
    assert flops["attn_fwd"] == 4 * pairs * c.n_heads
    assert flops["attn_bwd"] == 8 * pairs * c.n_heads


# ---- generation ----------------------------------------------------------------------------------


def greedy(model, ids, n):
    """What transformers' generate() takes after @ids, and the smallest distance of its logits from
    the runner-up's."""
    out = model.generate(
        torch.tensor([ids]),
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.scores).topk(2).values
    new = out.sequences[0, len(ids) :].tolist()
    return [t for t in new if t != END_OF_TEXT], float((best[:, 0] - best[:, 1]).min())


END_OF_TEXT = 2  # COMMON's eos_token_id, where transformers stops


@pytest.mark.parametrize("name", [*CONFIGS, *EXPERTS, *DELTA_NETS])
def test_greedy_tokens_are_those_of_transformers(directory, name):
    """Prompts of several lengths at once, whose steps cut them. They are longer than longrope's
    original context, so that both sides have its long factors throughout."""
    model, rng, prompts, expected = model_of(name), np.random.default_rng(0), [], []
    # both in fp32, and logits of up to about 4: a relative error of delta each, twice
    bound = 2 * 4 * delta(name, "fp32", "one-a-chunk")
    while len(prompts) < 3:
        ids = rng.integers(3, ALL[name]["vocab_size"], 34 + 3 * len(prompts)).tolist()
        tokens, gap = greedy(model, ids, 8)
        if gap > bound:
            prompts.append(ids)
            expected.append(tokens)
    with Generator(
        directory(name), batch=2, context=48, dtype="fp32", prefill_tokens=25
    ) as generator:
        got = generator.run(prompts, max_new_tokens=8, stop_tokens=[END_OF_TEXT])
    assert got == expected


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_of_delta_nets_depend_on_their_sequence_alone(directory, dtype):
    """Prompts shorter than the convolution, of one piece and of several, after those of another
    batch; and texts beside a training, of the same weights."""
    where, rng = directory("qwen3_5"), np.random.default_rng(0)
    prompts = [rng.integers(3, 512, n).tolist() for n in (2, 30, 1, 17)]
    how = dict(max_new_tokens=12, temperature=1.0, seed=[5, 6, 7, 8])
    seen, sizes = [], []
    for n, prefill, context in (1, 64, 48), (4, 64, 48), (4, 7, 48), (2, 1, 96):
        options = dict(batch=n, prefill_tokens=prefill, context=context, dtype=dtype)
        with Generator(where, **options) as generator:
            seen.append(generator.run(prompts, **how))
            report = generator.report
            sizes.append([report["cache_bytes"], report["state_bytes"]])
    assert all(texts == seen[0] for texts in seen)
    states = sizes[0][1]
    keys = sizes[0][0] - states
    assert states and sizes[1:] == [[4 * keys + 4 * states, 4 * states]] * 2 + [
        [4 * keys + 2 * states, 2 * states]
    ]
    plan = make_plan(where, recipe=dtype, sample_sequences=4, sample_context=48)
    with open_trainer(where, plan=plan) as trainer:
        assert trainer.sample(prompts, **how) == seen[0]
