"""A frozen base that stays quantized under LoRA (--base-dtype): its values against formulas in
numpy, its training against one whose bf16 base has these values, bit for bit."""

import functools
import json
import re
import subprocess

import numpy as np
import pytest
import torch
from conftest import BUILD
from families import llama, qwen3_5, qwen3_moe, random_model
from penstock import Generator, Hardware, InvalidError, Lora, ModelConfig, Plan, Trainer
from safetensors.torch import load_file, save_file

SEQ, N_SEQ, STEPS = 32, 4, 2
BASES = ("fp8", "nf4", "mxfp4")
SCALES = {"fp8": (64, 4, 1), "nf4": (64, 2, 0.5), "mxfp4": (32, 1, 0.5)}  # block, bytes, a weight
# arXiv 2305.14314, appendix E
NF4 = np.float32(
    "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 "
    "0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 "
    "0.7229568362236023 1".split()
)
E2M1 = np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def bf16(x):
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(torch.bfloat16).float().numpy()


def fp8_values(x):
    scale = (np.abs(x).max(1, keepdims=True) / np.float32(448)).astype(np.float32)
    q = torch.from_numpy((x / scale).astype(np.float32)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q.float().numpy() * scale


def nf4_values(x):
    scale = np.abs(x).max(1, keepdims=True)
    of = (x / scale).astype(np.float64)
    return NF4[np.abs(of[..., None] - NF4.astype(np.float64)).argmin(-1)] * scale


def mxfp4_values(x):
    def with_scale(scale):
        distance = np.abs(np.abs(x / scale)[..., None] - E2M1)
        distance += 1e-9 * (np.arange(8) % 2)  # ties to even codes
        return np.sign(x) * E2M1[distance.argmin(-1)] * scale

    scale = 2.0 ** (np.floor(np.log2(np.abs(x).max(1, keepdims=True).astype(np.float64))) - 2)
    one, two = with_scale(scale), with_scale(2 * scale)
    errors = [np.square(x - y).sum(1, keepdims=True) for y in (one, two)]
    assert 0.05 < (errors[1] < errors[0]).mean() < 0.5  # both occur
    return np.where(errors[1] < errors[0], two, one)


VALUES = {"fp8": fp8_values, "nf4": nf4_values, "mxfp4": mxfp4_values}


def dequantized(base, w):
    return bf16(VALUES[base](w.reshape(-1, SCALES[base][0])).reshape(w.shape))


def is_quantized(name):
    return re.fullmatch(r"model\.layers\..*_proj\w*\.weight", name)


def plan_of(where, base, targets="all-linear", **more):
    kw = dict(chunk_tokens=SEQ, chunks_per_round=2, threads=2) | more
    return Plan(
        ModelConfig.read(where),
        seq_len=SEQ,
        tokens_per_step=SEQ * N_SEQ,
        hardware=Hardware.estimate(2, "cpu"),
        lora=Lora(4, 12, targets, base=base),
        **kw,
    )


def batch(step):
    generator = np.random.default_rng(step)
    tokens = generator.integers(0, 211, (N_SEQ, SEQ + 1), dtype=np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def save_model(cfg, where):
    random_model(cfg).save_pretrained(where)
    (where / "config.json").write_text(json.dumps(cfg))


WIDTHS = dict(hidden_size=128, intermediate_size=192, head_dim=32, vocab_size=211)
WIDTHS |= dict(num_attention_heads=4, num_key_value_heads=2)
DEEP = dict(num_hidden_layers=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers, of widths that are multiples of 64."""
    where = tmp_path_factory.mktemp("model")
    save_model(llama(**WIDTHS, num_hidden_layers=2), where)
    tensors = load_file(where / "model.safetensors")
    save_file({n: t.to(torch.bfloat16) for n, t in tensors.items()}, where / "model.safetensors")
    return where


def adapters(trainer):
    return [n for n in trainer.params if "lora_" in n]


def train(where, plan, weights=None):
    """Losses, the last gradients and the adapters; and the base, read beforehand."""
    with Trainer(where, plan, batch, lr=3e-3, seed=11) as trainer:
        for name, values in (weights or {}).items():
            trainer.write(name, values)
        base = {n: trainer.read(n) for n in trainer.params if "lora_" not in n}
        losses = [m.loss for m in trainer.steps(STEPS)]
        of = adapters(trainer)
        grads, after = ({n: f(n).tobytes() for n in of} for f in (trainer.grad, trainer.read))
    return losses, grads, after, base


MOE = dict(WIDTHS, num_hidden_layers=1, num_experts=4, moe_intermediate_size=64)
MOE = qwen3_moe(**MOE, mlp_only_layers=[])
NET = dict(WIDTHS, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
NET = qwen3_5(**NET, linear_key_head_dim=8, linear_value_head_dim=16)


@pytest.mark.parametrize(
    "base, cfg, targets, n_dense",
    [
        ("nf4", MOE, "q_proj,o_proj", 4 + 4 * 3),
        ("mxfp4", MOE, "q_proj,o_proj", 4 + 4 * 3),
        ("nf4", NET, "all-linear", 5 + 4 + 2 * 3),
    ],
    ids=["nf4-experts", "mxfp4-experts", "nf4-delta-net"],
)
def test_matrices_of_a_quantized_base_are_their_dequantized_values(
    base, cfg, targets, n_dense, tmp_path
):
    random_model(cfg).to(torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    plan = lambda base: plan_of(tmp_path, base, targets)
    losses, grads, after, read = train(tmp_path, plan(base))
    dense = {n: v for n, v in read.items() if is_quantized(n)}
    assert len(dense) == n_dense
    plain = train(tmp_path, plan("bf16"))
    assert all(np.array_equal(v, dequantized(base, plain[3][n])) for n, v in dense.items())
    assert all(np.array_equal(v, plain[3][n]) for n, v in read.items() if n not in dense)
    assert train(tmp_path, plan("bf16"), dense)[:3] == (losses, grads, after)
    with Trainer(tmp_path, plan("bf16"), batch, seed=11, lr=0.05) as trainer:
        list(trainer.steps(2))
        trainer.save(tmp_path / "adapter")
    if cfg is MOE:
        with pytest.raises(InvalidError, match="experts of a quantized base .* give auto"):
            generated(tmp_path, tmp_path / "adapter", base, experts="on-demand")
    found = generated(tmp_path, tmp_path / "adapter", base)
    assert found == generated(plain_copy(tmp_path, dense), strip(tmp_path / "adapter"))


def generated(where, adapter, base="bf16", **more):
    """Tokens after prompts of several lengths; and what the generator takes."""
    with Generator(where, adapter=adapter, base=base, batch=2, context=32, **more) as generator:
        return generator.run(PROMPTS, max_new_tokens=12)


PROMPTS = [[5, 9, 200, 31, 7], [3], list(range(40, 54))]


def strip(adapter):
    """Without the hash of the base, so that it is read beside another."""
    weights = adapter / "adapter_model.safetensors"
    save_file(load_file(weights), weights)
    return adapter


def plain_copy(where, dense):
    """The model with the weights `dense` in place of its own."""
    out = where / "dense"
    out.mkdir()
    (out / "config.json").write_bytes((where / "config.json").read_bytes())
    tensors = load_file(where / "model.safetensors")
    tensors |= {n: torch.from_numpy(v).to(torch.bfloat16) for n, v in dense.items()}
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    "base", [pytest.param(b, marks=pytest.mark.long if b == "fp8" else ()) for b in BASES]
)
def test_text_of_a_quantized_base_is_that_of_its_dequantized_values(tmp_path, base):
    """By a generator, with blocks that stay and that are streamed, and beside the training."""
    wide = WIDTHS | dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    save_model(llama(**wide), tmp_path)
    room = dict(sample_sequences=2, sample_context=32)
    how = dict(max_new_tokens=12)
    with Trainer(tmp_path, plan_of(tmp_path, base, **room), batch, lr=0.05, seed=11) as trainer:
        list(trainer.steps(1))
        trainer.save(tmp_path / "adapter")
        dense = {n: trainer.read(n) for n in trainer.params if is_quantized(n)}
        sampled = trainer.sample(PROMPTS, **how)
    adapter = strip(tmp_path / "adapter")
    want = generated(plain_copy(tmp_path, dense), adapter)
    assert sampled == want == generated(tmp_path, adapter, base) != generated(tmp_path, adapter)
    words = [
        *f"generate --model {tmp_path} --adapter {adapter} --tokens 1 --plan --json".split(),
        *"--max-new-tokens 12 --backend cpu --base-dtype".split(),
    ]
    plans = [json.loads(command(*words, b)[1]) for b in ("bf16", base)]
    n = sum(v.size for v in dense.values())
    block, scale, each = SCALES[base]
    assert plans[0]["weights_bytes"] - plans[1]["weights_bytes"] == 2 * n - n // block * (
        block * each + scale
    )
    with Generator(tmp_path, adapter=adapter, base=base, batch=2, context=32) as generator:
        least = generator.report["least_device_bytes"]
        assert least < generator.report["device_used_bytes"]
    assert generated(tmp_path, adapter, base, device_mem=least) == want


FP8 = dict(recipe="fp8-master", fp8_bf16_first=0)


@pytest.mark.parametrize(
    "base, recipe",
    [*((base, {}) for base in BASES), ("nf4", FP8)],
    ids=[*BASES, "nf4-fp8-products"],
)
def test_a_quantized_base_is_its_dequantized_values(model, base, recipe):
    tensors = load_file(model / "model.safetensors")
    plan_with = functools.partial(plan_of, model, **recipe)
    losses, grads, after, read = train(model, plan_with(base))
    for name, w in tensors.items():
        w = w.float().numpy()
        want = dequantized(base, w) if is_quantized(name) else w
        assert np.array_equal(read[name], want), name
    dense = {n: v for n, v in read.items() if is_quantized(n)}
    assert len(dense) == 14
    again = train(model, plan_with("bf16"), dense)
    assert again[:3] == (losses, grads, after)
    assert train(model, plan_with("bf16"))[0] != losses


def test_every_plan_of_a_quantized_base_has_the_same_bits(tmp_path):
    save_model(llama(**WIDTHS | dict(hidden_size=256, intermediate_size=768), **DEEP), tmp_path)
    kw = dict(seq_len=SEQ, tokens_per_step=SEQ * N_SEQ, hardware=Hardware.estimate(2, "cpu"))
    kw |= dict(chunk_tokens=SEQ, chunks_per_round=2, threads=2, lora=Lora(4, 12, base="nf4"))
    least, _ = Plan.smallest(ModelConfig.read(tmp_path), **kw)
    plans = [plan_of(tmp_path, "nf4", **more) for more in ({}, {"device_mem": least})]
    resident = [plan.report["resident_param_units"] for plan in plans]
    assert resident[0] > resident[1]
    runs = [train(tmp_path, plan)[:3] for plan in plans]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("base", BASES)
def test_a_quantized_base_takes_the_bytes_that_its_blocks_take(model, base):
    tensors = load_file(model / "model.safetensors")
    n = sum(t.numel() for name, t in tensors.items() if is_quantized(name))
    block, scale, each = SCALES[base]
    of = {b: plan_of(model, b).report["weight_bytes"] for b in ("bf16", base)}
    assert of["bf16"] - of[base] == n * 2 - n // block * (block * each + scale)


@pytest.mark.parametrize("scales", ["blocks", "tensor", "rows"])
def test_a_checkpoint_in_fp8_is_kept_as_it_is(model, tmp_path, scales):
    tensors = load_file(model / "model.safetensors")
    for name in [n for n in tensors if is_quantized(n)]:
        w = tensors[name].float()
        tall, wide = [(n + 127) // 128 for n in w.shape]
        shape = {"blocks": (tall, wide), "tensor": (), "rows": (w.shape[0], 1)}[scales]
        s = torch.rand(shape, generator=torch.Generator().manual_seed(3)) * 1e-3 + 1e-3
        tensors[name] = (w / 1e-3).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = s
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    kept, plain = (
        train(tmp_path, plan_of(tmp_path, "fp8")),
        train(tmp_path, plan_of(tmp_path, "bf16")),
    )
    assert all(np.array_equal(kept[3][n], plain[3][n]) for n in plain[3])
    assert kept[:3] == plain[:3]
    with Trainer(tmp_path, plan_of(tmp_path, "fp8"), batch, seed=11) as trainer:
        trainer.save(tmp_path / "adapter")
    texts = [generated(tmp_path, tmp_path / "adapter", base) for base in ("fp8", "bf16")]
    assert texts[0] == texts[1]


def test_what_was_mxfp4_stays_what_it_is(model):
    dense = {
        n: dequantized("mxfp4", t.float().numpy())
        for n, t in load_file(model / "model.safetensors").items()
        if is_quantized(n)
    }
    read = train(model, plan_of(model, "mxfp4"), dense)[3]
    assert all(np.array_equal(read[n], v) for n, v in dense.items())


def command(*words):
    done = subprocess.run(
        [BUILD / "bin/penstock", *map(str, words)], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_the_command_trains_resumes_and_evaluates_beside_a_quantized_base(
    model, tiny_shard, tmp_path
):
    run, cut = tmp_path / "run", ["--seq-len", 32, "--tokens-per-step", 128, "--backend", "cpu"]
    words = ["train", "--model", model, "--data", tiny_shard, *cut, "--threads", 2]
    lora = ["--lora-rank", 4, "--base-dtype", "nf4", "--run-dir", run, "--checkpoint-every", 1]
    code, said = command(*words, *lora, "--steps", 2)
    assert code == 0, said
    assert "nf4: 4.25 bits a weight" in said
    resumed = command(
        *words, "--lora-rank", 4, "--run-dir", run, "--resume", "latest", "--steps", 3
    )
    assert resumed[0] == 2, resumed
    assert "with base-dtype nf4, and this run has bf16: give" in resumed[1], resumed
    code, said = command(*words, *lora, "--resume", "latest", "--steps", 3)
    assert code == 0, said
    evaluate = ["eval", "--model", model, "--data", tiny_shard, *cut[:2], "--threads", 2]
    losses = {
        base: command(*evaluate, "--adapter", run / "model", "--base-dtype", base)
        for base in ("bf16", "nf4")
    }
    assert all(code == 0 for code, _ in losses.values()), losses
    assert losses["bf16"][1] != losses["nf4"][1]
    assert "was trained beside a base in nf4, and is used beside one in bf16" in losses["bf16"][1]
    assert "was trained beside" not in losses["nf4"][1]


def test_bad_bases_are_refused_in_one_sentence(model, tmp_path, tiny_shard):
    plan = ["plan", "--model", model, "--seq-len", 32, "--backend", "cpu", "--base-dtype"]
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    (narrow / "config.json").write_text(json.dumps(llama()))
    for words, said in [
        (["nf4"], "--base-dtype is given without LoRA.*give --lora-rank"),
        (["int8", "--lora-rank", 4], "--base-dtype int8: give bf16, fp8, nf4 or mxfp4"),
        (["nf4", "--lora-rank", 4, "--model", narrow], "columns.*multiples of 64.*--base-dtype"),
    ]:
        code, text = command(*plan, *words)
        assert code == 2, text
        (line,) = text.strip().splitlines()
        assert re.search(said, line), line
    with pytest.raises(InvalidError, match="'int4' is unknown: give bf16, fp8, nf4 or mxfp4"):
        plan_of(model, "int4")
