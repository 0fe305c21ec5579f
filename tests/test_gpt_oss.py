"""gpt-oss beside what tests/test_families.py compares with transformers: MXFP4 in and out, exports,
other recipes and plans, and what is refused."""

import json
import re
import subprocess

import numpy as np
import pytest
import torch
from conftest import BUILD, write_shard
from families import gemma4_moe, gpt_oss, random_model
from penstock import (
    Checkpoint,
    FormatError,
    Generator,
    InvalidError,
    Lora,
    ModelConfig,
    Trainer,
    export,
)
from safetensors.torch import load_file, save_file
from test_experts import TOKENS, make_plan, state_of
from test_parity import SEQ, plain
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

CONFIG = gpt_oss(intermediate_size=96)
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FUSED = ("gate_up_proj", "down_proj")


def binary(*words, code=0):
    words = [str(w) for w in (BUILD / "bin/penstock", *words)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def shard(folder):
    return write_shard(folder / "a.bin", np.random.default_rng(0).integers(3, 512, 4 * TOKENS))


def write(folder, tensors, **changes):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """In bf16, in Hugging Face's files."""
    folder = tmp_path_factory.mktemp("gpt_oss") / "m"
    random_model(CONFIG).bfloat16().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


@pytest.fixture(scope="module")
def packed(model, tmp_path_factory):
    """(The model with experts of any blocks and scales, as they are published; those tensors)."""
    rng, tensors = np.random.default_rng(0), {}
    for key, x in load_file(model / "model.safetensors").items():
        if not key.endswith(FUSED):
            tensors[key] = x
            continue
        e, cols, rows = x.shape
        blocks = rng.integers(0, 256, (e, rows, cols // 32, 16), dtype=np.uint8)
        scales = rng.integers(116, 124, (e, rows, cols // 32), dtype=np.uint8)
        tensors[key + "_blocks"], tensors[key + "_scales"] = map(torch.tensor, (blocks, scales))
    tensors["model.layers.0.mlp.experts.down_proj_scales"][0, 0, 0] = 0  # subnormal in bf16
    folder = tmp_path_factory.mktemp("packed") / "m"
    return write(folder, tensors, **MXFP4), tensors


def by_the_book(tensors, key):
    """[E, rows, cols] in fp32."""
    q = tensors[key + "_blocks"].int()
    codes = torch.stack([q & 15, q >> 4], -1).flatten(-2)
    x = GRID[codes & 7] * torch.where(codes & 8 != 0, -1.0, 1.0)
    scale = torch.exp2(tensors[key + "_scales"].double() - 127)[..., None]
    return (x * scale).flatten(-2).float()


def exporting(model, out):
    return ["--model", str(model), "--to", "hf", "--out", str(out)]


def test_mxfp4_is_read_as_transformers_reads_it(packed, tmp_path, capsys):
    """And saved in bf16 exactly; saved in MXFP4 it has the same numbers again."""
    folder, tensors = packed
    with Trainer(folder, make_plan(folder, recipe="bf16"), plain, lr=0.0) as trainer:
        read = {n: torch.tensor(trainer.read(n)) for n in trainer.params}
        trainer.save(tmp_path / "bf16")
        trainer.save(tmp_path / "mxfp4", "mxfp4")
    saved, again = (load_file(tmp_path / d / "model.safetensors") for d in ("bf16", "mxfp4"))
    exported = [*exporting(tmp_path / "bf16", tmp_path / "exported"), "--dtype", "mxfp4"]
    assert export.main(exported) == 0
    theirs = load_file(tmp_path / "exported/model.safetensors")
    assert theirs.keys() == again.keys() and all(
        torch.equal(x, again[k]) for k, x in theirs.items()
    )
    configs = [
        json.loads((tmp_path / d / "config.json").read_text()) for d in ("exported", "mxfp4")
    ]
    assert configs[0] == configs[1] and "weights by 0.00% (root" in capsys.readouterr().out
    assert {k: x.shape for k, x in again.items()} == {k: x.shape for k, x in tensors.items()}
    for key in (k.removesuffix("_blocks") for k in tensors if k.endswith("_blocks")):
        theirs = convert_moe_packed_tensors(tensors[key + "_blocks"], tensors[key + "_scales"])
        want, (stem, what) = by_the_book(tensors, key), key.rsplit(".", 1)
        assert torch.equal(theirs.float().mT, want) and torch.equal(saved[key], theirs)
        assert torch.equal(by_the_book(again, key), want)
        for e, x in enumerate(want):
            assert torch.equal(read[f"{stem}.{e}.{what}"].view_as(x), x)
    others = [k for k in tensors if not k.endswith(("_blocks", "_scales"))]
    assert all(torch.equal(again[k], tensors[k]) for k in others)
    configs = [json.loads((tmp_path / d / "config.json").read_text()) for d in ("bf16", "mxfp4")]
    assert "quantization_config" not in configs[0]
    assert configs[1]["quantization_config"]["quant_method"] == "mxfp4"
    assert configs[1]["torch_dtype"] == "bfloat16"
    how = Mxfp4Config(dequantize=True)
    opened = AutoModelForCausalLM.from_pretrained(
        tmp_path / "mxfp4", quantization_config=how, dtype=torch.bfloat16
    ).state_dict()
    assert all(torch.equal(x, opened[k]) for k, x in saved.items())


def test_the_error_of_a_save_in_mxfp4_is_stated(model, tmp_path, capsys):
    """Trained by the command, whose model a second run reads."""
    data, out = shard(tmp_path), tmp_path / "out"
    words = ["--seq-len", SEQ, "--tokens-per-step", TOKENS, "--steps", 1, "--lr", 0, "--data", data]
    how = ["--out", out, "--save-dtype", "mxfp4", "--run-dir", tmp_path / "run"]
    done = binary("train", "--model", model, *words, *how)
    stated = float(re.search(r"changes their weights by ([\d.]+)%", done.stderr)[1])
    given = load_file(model / "model.safetensors")
    saved, wrong, size = load_file(out / "model.safetensors"), 0.0, 0.0
    for key in (k for k in given if k.endswith(FUSED)):
        was, now = given[key].mT.double(), by_the_book(saved, key).double()
        wrong, size = wrong + (now - was).square().sum(), size + was.square().sum()
        nearest = was.abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True)
        assert ((now - was).unflatten(-1, (-1, 32)).abs() <= nearest / 4).all()
    assert 0 < stated < 15 and abs(100 * (wrong / size).sqrt() - stated) < 0.006
    assert export.main([*exporting(model, tmp_path / "exported"), "--dtype", "mxfp4"]) == 0
    assert f"weights by {stated:.2f}% (root" in capsys.readouterr().out
    done = binary("eval", "--model", out, "--data", data, "--seq-len", SEQ, "--json")
    assert np.isfinite(json.loads(done.stdout)["loss"])


def test_a_checkpoint_goes_on_and_is_exported(model, tmp_path):
    """The same bits; as a model it opens in transformers with its experts fused again."""
    plan = make_plan(model, recipe="bf16")
    with Trainer(model, plan, plain, lr=1e-2) as trainer:
        list(trainer.steps(1))
        where = trainer.checkpoint(tmp_path / "c")
        trainer.save(tmp_path / "saved")
        list(trainer.steps(1))
        want = state_of(trainer)
    with Trainer.resume(Checkpoint(where), model, plan, plain) as trainer:
        list(trainer.steps(1))
        assert state_of(trainer) == want
    out = tmp_path / "out"
    assert export.main(["--model", where, "--to", "hf", "--out", str(out), "--quiet"]) == 0
    saved, exported = (load_file(d / "model.safetensors") for d in (tmp_path / "saved", out))
    assert set(saved) == set(exported)
    assert all(torch.equal(x, exported[k]) for k, x in saved.items())
    opened = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(x, opened[k]) for k, x in saved.items())


def test_the_same_bits_under_every_plan(model):
    from penstock import Hardware, Plan

    how = dict(recipe="bf16", chunk=2 * SEQ, clip_norm=1.0)
    sizes = dict(seq_len=SEQ, tokens_per_step=TOKENS, chunk_tokens=2 * SEQ, chunks_per_round=1)
    sizes |= dict(threads=2, hardware=Hardware.estimate(2, "cpu"), recipe="bf16")
    least, _ = Plan.smallest(ModelConfig.read(model), **sizes)
    bits = set()
    for more in (dict(device_mem=least), dict(gpus=2), dict(threads=1)):
        with Trainer(model, make_plan(model, **how | more), plain, lr=1e-2, seed=1) as trainer:
            list(trainer.steps(2))
            bits.add(state_of(trainer))
    assert len(bits) == 1


ON_DEMAND = [
    gpt_oss(intermediate_size=352, num_hidden_layers=4, num_local_experts=16),
    gemma4_moe(moe_intermediate_size=352, num_experts=16),
]


@pytest.mark.parametrize("cfg", ON_DEMAND, ids=lambda cfg: cfg["model_type"])
def test_experts_on_demand_give_the_same_tokens(tmp_path, cfg):
    """What is beside experts, biases or norms, is with the router, which is resident."""
    random_model(cfg).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(cfg))
    prompts = [np.random.default_rng(1).integers(3, 512, n).tolist() for n in (5, 17)]
    options, run = dict(batch=1, context=64, dtype="fp32"), dict(max_new_tokens=12)
    got, slots = [], []
    for _ in range(2):
        with Generator(tmp_path, **options) as generator:
            got.append(generator.run(prompts, temperature=1.0, seed=[1, 2], **run))
            slots.append(generator.report["n_slots"])
            options["device_mem"] = generator.report["least_device_bytes"] + (2 << 20)
            options["experts"] = "on-demand"
    assert got[0] == got[1] and not slots[0] and 3 <= slots[1] < 16


def test_adapters_and_fp8(model, tmp_path):
    """With either the loss of the first step is near that of bf16; only attention has FP8."""
    x = np.random.default_rng(0).integers(3, 512, (4, 49)).astype(np.int32)
    data, how = lambda step: (x[:, :-1].copy(), x[:, 1:].copy()), dict(seq_len=48, chunk=192)
    how["tokens_per_step"] = 192  # multiples of 16, for FP8
    losses = []
    for more in (
        dict(recipe="bf16"),
        dict(recipe="bf16", lora=Lora(rank=2, targets="q_proj,o_proj")),
        dict(recipe="fp8"),
    ):
        with Trainer(model, make_plan(model, **how, **more), data, lr=1e-2) as trainer:
            losses.append([m.loss for m in trainer.steps(2)])
            if "lora" in more:
                with pytest.raises(InvalidError, match="adapters are saved in bf16 or fp32"):
                    trainer.save(tmp_path / "out", "mxfp4")
    assert losses[0][0] == losses[1][0] and abs(losses[0][0] - losses[2][0]) < 0.02
    assert all(second < first for first, second in losses)


KEY = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop(KEY + "_scales"), f'"{KEY}_scales" is missing'),
        (lambda t: t.pop(KEY + "_blocks"), "down_proj_scales is not part of the model"),
        (lambda t: t.update({KEY + "_scales": t[KEY + "_scales"][:, 1:]}), f'"{KEY}_scales" is U8'),
        (lambda t: t.update({KEY: torch.zeros(7, 96, 64)}), r"experts.0.down_proj\" is also in"),
        (lambda t: t.pop("model.layers.0.self_attn.sinks"), "self_attn.sinks is missing"),
    ],
)
def test_what_a_file_may_not_have(packed, tmp_path, change, words):
    tensors = dict(packed[1])
    change(tensors)
    tensors = {k: x.contiguous() for k, x in tensors.items()}
    folder = write(tmp_path / "m", tensors, **MXFP4)
    with pytest.raises(FormatError, match=words):
        Trainer(folder, make_plan(folder), plain)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(swiglu_limit=0), "swiglu_limit is 0"),
        (dict(swiglu_alpha=-1), "swiglu_alpha is -1"),
        (dict(experts_per_token=2), "experts_per_token is 2 and num_experts_per_tok 3"),
        (dict(sliding_window=None), "sliding_window is null"),
        (dict(layer_types=["full_attention"]), "layer_types has 1 entries"),
        (dict(quantization_config={"quant_method": "awq"}), "quant_method is awq"),
        (dict(hidden_act="gelu"), "hidden_act is"),
        (dict(num_experts=8), "num_experts is 8 and num_local_experts 7"),
    ],
)
def test_what_a_config_may_not_say(tmp_path, changes, words):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(FormatError, match=words):
        ModelConfig.read(tmp_path)


def test_what_is_not_saved_in_mxfp4(model, tmp_path, capsys, tiny_model):
    random_model(gpt_oss(intermediate_size=40)).save_pretrained(tmp_path / "odd")
    (tmp_path / "odd/config.json").write_text(json.dumps(gpt_oss(intermediate_size=40)))
    for folder, words in (
        (tmp_path / "odd", "intermediate_size, 40"),
        (tiny_model, "gpt_oss alone"),
    ):
        with Trainer(folder, make_plan(folder), plain) as trainer:
            with pytest.raises(InvalidError, match=words):
                trainer.save(tmp_path / "out", "mxfp4")
    done = binary(
        "train", "--model", tiny_model, "--seq-len", SEQ, "--save-dtype", "mxfp4",
        "--data", shard(tmp_path), code=2,
    )  # fmt: skip
    assert "--save-dtype" in done.stderr and "gpt_oss alone" in done.stderr
    for folder, words in (
        (tmp_path / "odd", "intermediate_size, 40"),
        (tiny_model, "gpt_oss alone"),
    ):
        assert export.main([*exporting(folder, tmp_path / "x"), "--dtype", "mxfp4"]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_absent_keys_mean_what_transformers_means(tmp_path):
    """YaRN among them, where RoPE's parameters are absent."""
    least = dict(model_type="gpt_oss", vocab_size=64, hidden_size=64, num_hidden_layers=3)
    least |= dict(intermediate_size=32, num_attention_heads=8, max_position_embeddings=131072)
    (tmp_path / "config.json").write_text(json.dumps(least))
    c = ModelConfig.read(tmp_path)
    assert [c.layer_flags[i] & 1 for i in range(3)] == [1, 0, 1] and c.window == 128
    assert (c.rope.theta, c.rope.factor, c.rope.original_positions) == (150000, 32, 4096)
    assert c.rope.keep_fraction and (c.n_kv_heads, c.head_dim, c.n_experts) == (8, 64, 128)
    assert (c.n_experts_used, c.o_bias, c.router_aux_loss) == (4, 1, 0)
    assert np.isclose([c.glu_alpha, c.glu_limit], [1.702, 7]).all()
