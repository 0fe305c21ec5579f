"""`penstock export`: directories opened in transformers, checkpoints, refusals, and exports that are
cut off. test_gguf.py has the files of llama.cpp."""

import ast
import copy
import functools
import json
import os
import re
import resource
import shutil
import subprocess
import sys

import families
import gguf
import numpy as np
import pytest
import torch
from conftest import BUILD, ROOT, write_shard
from families import LLAMA3, random_model
from penstock import Hardware, ModelConfig, Plan, Trainer, compare, data, export
from penstock._lib import as_dict
from penstock.files import TOKENIZER_FILES
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

TEXT = "The planner searches for the fastest step: 1,234 candidates, isn't that much?\n\n  Yes."


def gemma(make, **changes):
    """With the scale of attention that llama.cpp has."""
    return make(query_pre_attn_scalar=24, **changes)


# What GGUF can express, of every family.
CONFIGS = {
    "llama": families.llama(),
    "llama-tied-llama3": families.llama(rope_scaling=LLAMA3, tie_word_embeddings=True),
    "llama-yarn": families.llama(rope_scaling=families.YARN),
    "mistral": families.mistral() | {"sliding_window": 128},
    "ministral": families.ministral() | {"sliding_window": 128},
    "qwen2": families.qwen2(),
    "qwen3": families.qwen3(),
    "gemma2": gemma(families.gemma2),
    "gemma3": gemma(families.gemma3),
    "gemma3-linear": gemma(families.gemma3, rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "phi3": families.phi3(),
    "olmo2": families.olmo2(),
    "olmo2-linear": families.CONFIGS["olmo2-linear"],
    "olmo2-tied": families.olmo2(tie_word_embeddings=True),
    "olmo3": families.olmo3(
        num_hidden_layers=5,
        layer_types=["full_attention" if i == 3 else "sliding_attention" for i in range(5)],
        rope_theta=500000.0,
    ),
    "gemma": families.gemma(),
    "seed_oss": families.seed_oss(),
    "exaone4": families.CONFIGS["exaone4-full"],
    "hunyuan": families.hunyuan(),
    "glm4": families.glm4(),
    "granite": families.granite(),
    "smollm3": families.smollm3(no_rope_layer_interval=4, num_hidden_layers=5),
    "olmoe": families.olmoe(num_key_value_heads=4),
    "qwen3_moe": families.qwen3_moe(mlp_only_layers=[], moe_intermediate_size=32),
    "mixtral": families.mixtral() | {"sliding_window": None},
}
DELTA = dict(rms_norm_eps=1e-6, linear_key_head_dim=16, linear_value_head_dim=16)
# What it can express of families that are not imported.
ONE_WAY = {
    "gpt_oss": families.gpt_oss(swiglu_alpha=1.702, swiglu_limit=7.0),
    "deepseek_v2": families.deepseek_v2(topk_method="greedy", rms_norm_eps=1e-6),
    "deepseek_v3": families.deepseek_v3(rms_norm_eps=1e-6),
    "glm4_moe_lite": families.glm4_moe_lite(
        mlp_layer_types=["dense", "sparse", "sparse"], rms_norm_eps=1e-6
    ),
    "qwen3_next": families.qwen3_next(mlp_only_layers=[], **DELTA),
    "qwen3_5": families.qwen3_5(**DELTA),
    "qwen3_5_moe": families.qwen3_5_moe(**DELTA),
    "gemma4": families.CONFIGS["gemma4-values"],
    "gemma4-moe": families.gemma4_moe(),
    "gemma4-shared": families.CONFIGS["gemma4-shared"],
    "gemma4-e2b": families.gemma4_e2b(
        num_kv_shared_layers=2, hidden_size=64, hidden_size_per_layer_input=16
    ),
    "ministral3": families.ministral3(),
}
WRITTEN = CONFIGS | ONE_WAY
# of these the rows of q and k
TURNED = ("llama", "mistral", "ministral", "granite", "smollm3", "mixtral", "ministral3")
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


@functools.cache
def tokenizer():
    return data.train_tokenizer(
        [ROOT / "docs/usage.md", *sorted((ROOT / "docs/design").glob("*.md"))], 512
    )


@functools.cache
def model_of(name):
    return random_model(WRITTEN[name])


def write_model(folder, cfg, model):
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(cfg))
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    @functools.cache
    def make(name):
        return write_model(tmp_path_factory.mktemp("export") / name, WRITTEN[name], model_of(name))

    return make


def binary(*words, code=0):
    words = [str(w) for w in (BUILD / "bin/penstock", *words)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def run(*words):
    return export.main([str(w) for w in words])


def to_gguf(model, out, *more):
    assert run("--model", model, "--to", "gguf", "--out", out, "--quiet", *more) == 0
    return gguf.GGUFReader(out)


# ---- Hugging Face directories --------------------------------------------------------------------


def logits_of(model, ids=None):
    ids = torch.arange(40)[None] if ids is None else ids
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.oldest
@pytest.mark.parametrize("name", families.CONFIGS)
def test_a_directory_has_the_same_logits_in_transformers_both_ways(tmp_path, name):
    """Penstock -> transformers -> Penstock, for all that a config may say."""
    cfg = families.CONFIGS[name]
    model = random_model(cfg)
    source = write_model(tmp_path / "source", cfg, model)
    assert run("--model", source, "--to", "hf", "--out", tmp_path / "out", "--quiet") == 0
    opened, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    assert opened.dtype == torch.float32 and torch.equal(logits_of(opened), logits_of(model))
    opened.save_pretrained(tmp_path / "again")
    assert (
        run("--model", tmp_path / "again", "--to", "hf", "--out", tmp_path / "back", "--quiet") == 0
    )
    first, last = (load_file(tmp_path / d / "model.safetensors") for d in ("source", "back"))
    assert first.keys() == last.keys() and all(torch.equal(first[k], last[k]) for k in first)
    assert ("lm_head.weight" in last) != cfg["tie_word_embeddings"]
    before, after = (as_dict(ModelConfig.read(tmp_path / d)._ptr) for d in ("source", "back"))
    assert before == after


def test_a_directory_is_complete(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(export.write_hf, "__defaults__", (100_000, False))
    out = tmp_path / "out"
    assert run("--model", directory("qwen3"), "--to", "hf", "--dtype", "bf16", "--out", out) == 0
    names = {p.name for p in out.iterdir()}
    shards = {n for n in names if n.endswith(".safetensors")}
    assert len(shards) > 2 and names - shards == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "penstock.json",  # which of the others the next export into this directory may remove
        "tokenizer.json",
        "tokenizer_config.json",
    }
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16 and model.generation_config.eos_token_id == 2
    for key, x in model_of("qwen3").state_dict().items():
        assert torch.equal(model.state_dict()[key], x.bfloat16())
    ids = AutoTokenizer.from_pretrained(out)(TEXT).input_ids
    assert ids == tokenizer().encode(TEXT).ids
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def with_head(folder, cfg, model, head):
    """The model's directory with @head as its lm_head.weight, whatever config.json says."""
    write_model(folder, cfg, model)
    weights = load_file(folder / "model.safetensors") | {"lm_head.weight": head}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def loss_of(model, ids):
    logits = logits_of(model, ids[:, :-1])
    return torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).item()


def test_a_head_that_the_config_ties_counts_where_it_differs(tmp_path, capsys):
    """As in transformers 5.24; transformers 4 would drop it, so what is written says that it is not
    tied."""
    cfg = families.llama(tie_word_embeddings=True)
    model, shard = random_model(cfg), write_shard(tmp_path / "a.bin", np.arange(3, 68))
    embedding = model.model.embed_tokens.weight.detach()
    head = embedding + 0.3 * torch.randn_like(embedding)
    equal = with_head(tmp_path / "equal", cfg, model, embedding.clone())
    own = with_head(tmp_path / "own", cfg, model, head)
    ids, words = torch.arange(3, 68)[None], ["--recipe", "fp32", "--seq-len", "64"]
    for folder, tied in ((equal, True), (own, False)):
        config = AutoConfig.from_pretrained(folder, tie_word_embeddings=tied)
        theirs = AutoModelForCausalLM.from_pretrained(folder, config=config)
        want = loss_of(theirs, ids)
        in_bf16 = copy.deepcopy(theirs)  # as a trained model is saved
        for weight in in_bf16.parameters():
            weight.data = weight.data.bfloat16().float()
        rounded = loss_of(in_bf16, ids)
        out, trained = tmp_path / f"{folder.name}-hf", tmp_path / f"{folder.name}-trained"
        assert run("--model", folder, "--to", "hf", "--out", out, "--quiet") == 0
        train = ["--steps", "1", "--lr", "0", "--weight-decay", "0", "--out", trained]
        for command, where, more, warned in (
            ("eval", folder, [], not tied),
            ("train", folder, [*train, "--run-dir", trained], not tied),
            ("eval", out, [], False),
            ("eval", trained, [], False),
        ):
            more = [*words, *more, "--data", shard, "--tokens-per-step", "64"]
            done = binary(command, "--model", where, *more)
            assert done.stderr.count("lm_head.weight differs") == warned, done.stderr
            if command == "eval":
                assert float(done.stdout.split()[1].strip(",")) == pytest.approx(
                    rounded if where == trained else want, abs=2e-6
                )
        for saved in (out, trained):
            assert json.loads((saved / "config.json").read_text())["tie_word_embeddings"] == tied
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(out)), logits_of(theirs))
        done = binary(
            "generate", "--model", folder, "--tokens", "1,2,3", "--max-new-tokens", "8",
            "--dtype", "fp32",
        )  # fmt: skip
        assert done.stderr.count("lm_head.weight differs") == (not tied)
        prompt = torch.tensor([[1, 2, 3]])  # 1 is the pad token, which no mask leaves out here
        greedy = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
        )
        assert [int(x) for x in done.stdout.split()] == greedy[0, 3:].tolist()
        assert compare.main([str(folder), "--hf"]) == 0
        assert capsys.readouterr().err.count("lm_head.weight differs") == (not tied)


def quantized(folder, cfg, model, rows_of_scale):
    """The model with projections in FP8, one scale of each so many rows; the weights so rounded."""
    weights = dict(model.state_dict())
    for name in [k for k in weights if k.endswith("_proj.weight")]:
        w = weights[name]
        rows = rows_of_scale or w.shape[0]
        each = w.reshape(-1, rows * w.shape[1])
        scale = each.abs().amax(1, keepdim=True) / 448
        q = (each / scale).to(torch.float8_e4m3fn)
        weights[name] = q.reshape(w.shape)
        weights[name + "_scale"] = scale if rows_of_scale else scale[0]
        w.copy_((q.float() * scale).reshape(w.shape))
    write_model(folder, cfg, model)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    how = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    return model


@pytest.mark.parametrize("rows_of_scale", [1, None])
def test_a_model_in_fp8_is_the_model_of_its_rounded_weights(tmp_path, rows_of_scale):
    with torch.no_grad():
        theirs = quantized(
            tmp_path / "m", CONFIGS["qwen3"], copy.deepcopy(model_of("qwen3")), rows_of_scale
        )
    out = tmp_path / "out"
    assert run("--model", tmp_path / "m", "--to", "hf", "--out", out, "--quiet") == 0
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    opened = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(x, opened[k]) for k, x in theirs.state_dict().items())
    shard = write_shard(tmp_path / "a.bin", np.arange(65))
    done = binary("eval", "--model", tmp_path / "m", "--data", shard, "--seq-len", "64", "--json")
    assert "rounds by at most 0.2%" in done.stderr
    ids = torch.arange(65)[None]
    want = torch.nn.functional.cross_entropy(logits_of(theirs, ids[:, :-1])[0], ids[0, 1:])
    assert json.loads(done.stdout)["loss"] == pytest.approx(want.item(), rel=2e-3)


STRAY = "model.layers.0.self_attn.o_proj.bias"
UP = "model.layers.1.mlp.up_proj.weight"
OTHER_TENSORS = {
    "stray": ({STRAY: torch.zeros(64)}, f"tensor {STRAY} is not part of the model"),
    "fp8": (
        {UP: torch.ones(96, 64, dtype=torch.float8_e4m3fn)},
        f'tensor "{UP}" is F8_E4M3 and has no scales',
    ),
    "missing": ({UP: None}, f"tensor {UP} is missing"),
    "shape": ({UP: torch.zeros(95, 64)}, f"tensor {UP} has 2 dimensions beginning [95, 64]"),
}


@pytest.mark.parametrize("case", OTHER_TENSORS)
def test_tensors_of_another_model_are_refused_by_all_commands_alike(tmp_path, capsys, case):
    changes, words = OTHER_TENSORS[case]
    model = write_model(tmp_path / "m", CONFIGS["llama"], model_of("llama"))
    weights = load_file(model / "model.safetensors") | changes
    weights = {k: x for k, x in weights.items() if x is not None}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    shard = write_shard(tmp_path / "a.bin", np.arange(65))
    said = set()
    for command, *more in (
        ["eval", "--data", shard, "--seq-len", "64"],
        ["train", "--data", shard, "--seq-len", "64", "--run-dir", tmp_path / "run"],
        ["generate", "--tokens", "1,2"],
    ):
        done = binary(command, "--model", model, *more, "--quiet", code=2)
        said.add(done.stderr.removeprefix("penstock: "))
    for to in ("hf", "gguf"):
        assert run("--model", model, "--to", to, "--out", tmp_path / "out") == 2
        said.add(capsys.readouterr().err.removeprefix("penstock export: "))
    (message,) = said
    assert words in message and not (tmp_path / "out").exists()


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fp32-master", "fp8-master"])
def run_directory(directory, tmp_path_factory, request):
    """A run with an fp32 master copy and checkpoints of two steps; the weights of each."""
    where, weights = tmp_path_factory.mktemp("run"), {}
    model = ModelConfig.read(directory("llama"))
    plan = Plan(
        model, seq_len=32, tokens_per_step=64, recipe=request.param, threads=1,
        hardware=Hardware.estimate(1, "cpu"),
    )  # fmt: skip
    batch = np.arange(64) % 500
    with Trainer(directory("llama"), plan, lambda step: (batch, batch + 1), lr=1e-2) as trainer:
        for step in (1, 2):
            list(trainer.steps(1))
            trainer.checkpoint(where / "checkpoints")
            weights[step] = {n: trainer.read(n) for n in trainer.params}
    return where, weights, request.param


def weights_at(out):
    return {k: x.numpy() for k, x in load_file(out / "model.safetensors").items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def test_the_newest_checkpoint_of_a_run_is_taken_with_its_master_copy(
    run_directory, tmp_path, capsys
):
    where, weights, recipe = run_directory
    newest, first = tmp_path / "newest", tmp_path / "first"
    assert run("--model", where, "--to", "hf", "--out", newest) == 0
    assert f"the fp32 master copy after step 2 (recipe {recipe})" in capsys.readouterr().out
    assert same(weights_at(newest), weights[2])
    named = where / "checkpoints/step-00000001"
    assert run("--model", named, "--to", "hf", "--out", first, "--quiet") == 0
    assert same(weights_at(first), weights[1])
    tensors = {t.name: t.data for t in to_gguf(where, tmp_path / "m.gguf").tensors}
    assert np.array_equal(
        tensors["blk.1.ffn_up.weight"], weights[2]["model.layers.1.mlp.up_proj.weight"]
    )


def test_a_damaged_checkpoint_is_passed_over_or_refused(run_directory, tmp_path, capsys):
    where, weights, _ = run_directory
    shutil.copytree(where, tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-00000002"
    raw = bytearray((newest / "model.safetensors").read_bytes())
    raw[-100] ^= 1
    (newest / "model.safetensors").write_bytes(raw)
    out = tmp_path / "out"
    assert run("--model", tmp_path / "run", "--to", "hf", "--out", out, "--quiet") == 0
    assert same(weights_at(out), weights[1])
    capsys.readouterr()
    assert run("--model", newest, "--to", "hf", "--out", tmp_path / "no", "--quiet") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "model.safetensors" in error
    assert not (tmp_path / "no").exists()


# ---- refusals, and exports that are cut off ------------------------------------------------------

REFUSED = {
    "--model": ("--model nowhere --to hf --out o", "--model nowhere: cannot be opened"),
    "hub id": (
        "--model owner/name --to hf --out o",
        "type hf download owner/name --local-dir name",
    ),
    "no model": ("--model . --to hf --out o", "no model directory, no checkpoint"),
    "--to": ("--model M --to onnx --out o", "invalid choice: 'onnx'"),
    "no --out": ("--model M --to hf", "--out"),
    "--out": ("--model M --to hf --out M", "exists already: remove it"),
    "parent": ("--model M --to hf --out a/b", "there is no directory"),
    "--dtype": ("--model M --to hf --dtype q8_0 --out o", "--dtype q8_0 is for --to gguf alone"),
    "dtype": ("--model M --to gguf --dtype q4 --out o", "invalid choice: 'q4'"),
    "option": ("--model M --to hf --out o --force", "unrecognized arguments: --force"),
    "file": ("--model M --to gguf --out o/", "is no name of a file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_options_are_refused(directory, tmp_path, monkeypatch, capsys, case):
    words, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    words = [str(directory("llama")) if w == "M" else w for w in words.split()]
    try:
        code = run(*words)
    except SystemExit as e:
        code = e.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and message in error
    assert not [*tmp_path.iterdir()]


INEXPRESSIBLE = {
    "qwen3 llama3": (families.qwen3(rope_scaling=LLAMA3), "rope_type llama3 has no place"),
    "gemma2 scale": (families.gemma2(), "query_pre_attn_scalar is 20: llama.cpp has 24"),
    "gemma2 caps": (gemma(families.gemma2) | {"attn_logit_softcapping": None}, "soft cap"),
    "gemma2 head": (
        gemma(families.gemma2, tie_word_embeddings=False),
        "lm_head.weight is not the embedding",
    ),
    "gemma3 yarn": (gemma(families.gemma3, rope_scaling=families.YARN), "rope_type yarn"),
    "smollm3": (families.smollm3(), "leaves layers [1] without RoPE"),
    "yarn": (families.llama(rope_scaling=families.YARN | {"beta_fast": 16}), "beta_fast 16"),
    "qwen3_moe dense": (families.qwen3_moe(), "layers [1] have no experts"),
    "qwen3_moe sum": (
        families.qwen3_moe(mlp_only_layers=[], norm_topk_prob=False),
        "norm_topk_prob is False",
    ),
    "olmoe sum": (
        families.olmoe(num_key_value_heads=4, norm_topk_prob=True),
        "norm_topk_prob is True",
    ),
    "olmoe heads": (families.olmoe(), "num_key_value_heads is 2 of 4 heads"),
    "gemma head": (families.gemma(tie_word_embeddings=False), "lm_head.weight is not the"),
    "exaone4 windows": (families.exaone4(), "layers [1] have no window: llama.cpp takes it from"),
    "gpt_oss": (
        families.gpt_oss(),
        "swiglu_alpha is 1.3 and swiglu_limit 0.8: llama.cpp has 1.702",
    ),
    "deepseek_v2": (families.deepseek_v2(), "topk_method is group_limited_greedy"),
    "deepseek_v3": (
        families.deepseek_v3(rope_interleave=False),
        "rope_interleave is false: llama.cpp's RoPE turns neighbours",
    ),
    "deepseek lite": (
        families.deepseek_v3(num_hidden_layers=26),
        "q_lora_rank is 20: llama.cpp has none for 26 layers",
    ),
    "deepseek linear": (
        families.deepseek_v3(rope_scaling=dict(type="linear", factor=4.0)),
        "rope_type linear has no place",
    ),
    "glm4_moe_lite": (families.glm4_moe_lite(), "layers [1] have no experts"),
    "qwen3_next": (families.qwen3_next(**DELTA), "layers [1] have no experts"),
    "qwen3_5 heads": (families.qwen3_5(), "linear_key_head_dim is 12 and linear_value_head_dim 20"),
    "qwen3_5 eps": (families.qwen3_5(**DELTA | {"rms_norm_eps": 1e-5}), "rms_norm_eps is 1e-05"),
    "olmo2": (families.olmo2(head_dim=24), "4 heads of 24 elements are not hidden_size 64"),
    "gemma4 keys": (
        families.gemma4_e2b(),
        "layer 3 has the keys and values of layer 1: llama.cpp takes those of layer 2",
    ),
    "gemma4 one layer": (
        families.gemma4(num_hidden_layers=1, layer_types=["full_attention"]),
        "layers with their own keys and values: 1, and llama.cpp needs two",
    ),
}


@pytest.mark.parametrize("case", INEXPRESSIBLE)
def test_what_gguf_cannot_express_is_refused(tmp_path, capsys, case):
    cfg, message = INEXPRESSIBLE[case]
    folder = write_model(tmp_path / "m", cfg, random_model(cfg))
    assert run("--model", folder, "--to", "gguf", "--out", tmp_path / "o.gguf") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


NOTED = {
    "gpt_oss": (
        ONE_WAY["gpt_oss"] | {"rope_scaling": None},  # transformers' default, as published
        "yarn's truncate is false, and llama.cpp rounds the ends of its range all the same: the "
        "frequency of pair 9 is 3.38 times the model's there",
    ),
    "glm4_moe_lite": (
        ONE_WAY["glm4_moe_lite"] | {"rms_norm_eps": 1e-5},
        "rms_norm_eps is 1e-05, and llama.cpp has it in the norms of latents too",
    ),
}


@pytest.mark.parametrize("case", NOTED)
def test_what_llama_cpp_computes_nearly_is_noted(tmp_path, capsys, case):
    cfg, message = NOTED[case]
    folder = write_model(tmp_path / "m", cfg, random_model(cfg))
    assert run("--model", folder, "--to", "gguf", "--out", tmp_path / "o.gguf") == 0
    assert f"note: {message}" in capsys.readouterr().out


def test_a_window_that_llama_cpp_has_not_is_the_context(tmp_path, capsys):
    cfg = families.mistral()
    folder = write_model(tmp_path / "m", cfg, random_model(cfg))
    assert run("--model", folder, "--to", "gguf", "--out", tmp_path / "o.gguf") == 0
    assert "the context length is 9 tokens, the sliding window" in capsys.readouterr().out
    fields = gguf.GGUFReader(tmp_path / "o.gguf").fields
    assert fields["llama.context_length"].contents() == 9


def test_special_ids_past_the_vocabulary_are_named(directory, tmp_path, capsys):
    folder, out = shutil.copytree(directory("llama"), tmp_path / "m"), tmp_path / "o.gguf"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 999}))
    assert run("--model", folder, "--to", "gguf", "--out", out) == 0
    said = capsys.readouterr().out
    assert f"note: {folder}/config.json: bos_token_id is 999, and vocab_size is 512" in said
    assert "tokenizer.ggml.bos_token_id" not in gguf.GGUFReader(out).fields
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": -1}))
    assert run("--model", folder, "--to", "gguf", "--out", tmp_path / "no") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pad_token_id is -1, and vocab_size is 512: set it" in error


TOKENIZERS = {
    "missing": (None, "there is no tokenizer.json"),
    "kind": ({"model": {"type": "Unigram", "vocab": []}}, "of type Unigram"),
    "cut": ({"pre_tokenizer": {"type": "Whitespace"}}, "the pre-tokenizer Whitespace"),
    "normalizer": ({"normalizer": {"type": "Lowercase"}}, "the normalizer Lowercase"),
    "size": ({"added_tokens": [{"id": 512, "content": "x"}]}, "vocab_size is 512"),
    "json": ("{", "is not JSON"),
    "model": ({"model": 7}, "is not as a tokenizer.json is"),
    "no vocab": ({"model": {"type": "BPE", "merges": []}}, "is not as a tokenizer.json is"),
    "empty": ({"model": {"type": "BPE", "vocab": {}}, "added_tokens": []}, "has no token"),
    "negative": ({"added_tokens": [{"id": -1, "content": "x"}]}, "whose id is no number"),
    "added": ({"added_tokens": [{}]}, "is not as a tokenizer.json is: KeyError('id')"),
    "steps": ({"pre_tokenizer": "ByteLevel"}, "is not as a tokenizer.json is"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers_that_gguf_has_not_are_refused(directory, tmp_path, capsys, case):
    change, message = TOKENIZERS[case]
    shutil.copytree(directory("llama"), tmp_path / "m")
    path = tmp_path / "m/tokenizer.json"
    content = json.loads(path.read_text())
    if isinstance(change, dict):
        path.write_text(json.dumps({**content, **change}))
    else:
        path.write_text(change) if change else path.unlink()
    assert run("--model", tmp_path / "m", "--to", "gguf", "--out", tmp_path / "o") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_a_broken_tokenizer_config_is_refused_before_anything_is_written(
    directory, tmp_path, capsys
):
    shutil.copytree(directory("llama"), tmp_path / "m")
    (tmp_path / "m/tokenizer_config.json").write_text("{")
    assert run("--model", tmp_path / "m", "--to", "gguf", "--out", tmp_path / "o") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "tokenizer_config.json: is not JSON" in error


def test_a_directory_whose_name_is_not_utf8_is_exported(directory, tmp_path):
    folder = shutil.copytree(directory("llama"), tmp_path / os.fsdecode(b"m\xff"))
    fields = to_gguf(folder, tmp_path / "o.gguf").fields
    assert fields["general.name"].contents() == "m\ufffd"


def test_a_name_that_stdout_cannot_have_is_no_error(directory, tmp_path):
    """A locale such as en_US.UTF-8 makes stdout strict."""
    folder = shutil.copytree(directory("llama"), tmp_path / os.fsdecode(b"m\xff"))
    words = ["--model", folder, "--to", "hf", "--out", tmp_path / "o"]
    env = {"PYTHONPATH": str(ROOT / "python"), "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "export", *words],
        env={**os.environ, **env},
        capture_output=True,
    )
    assert done.returncode == 0 and b"m\\udcff: the model" in done.stdout, done


@pytest.mark.parametrize("words", ["--to gguf", "--to hf"])
def test_an_export_on_a_full_disk_names_the_output(directory, tmp_path, words):
    words = [*words.split(), "--model", directory("llama"), "--out", tmp_path / "o", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "export", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert str(tmp_path) in done.stderr and "File too large" in done.stderr
    assert not [*tmp_path.iterdir()]


def test_without_gguf_the_command_for_it_is_named(directory, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert run("--model", directory("llama"), "--to", "gguf", "--out", tmp_path / "o") == 2
    assert "pip install -r python/requirements-export.txt" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["gguf", "hf"])
def test_an_export_that_fails_leaves_nothing(directory, tmp_path, monkeypatch, capsys, to):
    """Nor does one that was killed: its folder is removed by the next."""
    left = tmp_path / ".o.penstock-export"
    (left / "o").mkdir(parents=True)
    (left / "o/model.safetensors").write_bytes(b"half")
    words = ("--model", directory("llama"), "--to", to, "--out", tmp_path / "o", "--quiet")
    convert, calls = export._convert, []

    def fail(*args):
        calls.append(args)
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        return convert(*args)

    monkeypatch.setattr(export, "_convert", fail)
    assert run(*words) == 1 and "No space left" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
    monkeypatch.undo()
    assert run(*words) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["o"]


def test_two_exports_to_one_name_do_not_mix(directory, tmp_path, capsys):
    with export._work_folder(tmp_path / "o"):
        assert run("--model", directory("llama"), "--to", "hf", "--out", tmp_path / "o") == 2
    assert "another export is writing it" in capsys.readouterr().err


def test_the_command_runs(directory, tmp_path):
    words = ["--model", directory("llama"), "--to", "hf", "--out", tmp_path / "o"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "export", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "GB/s" in done.stdout and (tmp_path / "o/config.json").exists()


def test_the_three_lists_of_tokenizer_files_agree():
    """The library's, the package's, and that of model_dir.py, which imports nothing of penstock."""
    source = (ROOT / "native/io/model_files.c").read_text()
    listed = re.search(r"ps__tokenizer_files\[\] = \{(.*?)NULL\}", source, re.DOTALL)[1]
    names = tuple(re.findall(r'"([^"]+)"', listed))
    tree = ast.parse((ROOT / "models/model_dir.py").read_text())
    values = {
        t.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for t in node.targets
        if isinstance(t, ast.Name)
    }
    assert "tokenizer.json" in names
    assert names == TOKENIZER_FILES == ast.literal_eval(values["TOKENIZER"])
