"""`penstock export --to gguf`: files read back by the package gguf and run by llama.cpp."""

import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from conftest import ROOT
from families import DELTA, GEMMA4, OFFSET
from penstock import export
from penstock.model import mxfp4
from safetensors.torch import load_file
from test_export import (  # noqa: F401 (directory is a fixture)
    CONFIGS,
    ONE_WAY,
    TEMPLATE,
    TEXT,
    TURNED,
    WRITTEN,
    binary,
    directory,
    model_of,
    run,
    to_gguf,
    tokenizer,
    write_model,
)
from tokenizers import Tokenizer

# ---- GGUF: tensors -------------------------------------------------------------------------------

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.router": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "layer_scalar": "layer_output_scale.weight",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "self_attn.sinks": "attn_sinks.weight",
    **{
        f"mlp.{here}.{what}_proj": f"ffn_{what}_shexp"
        for here in ("shared_expert", "shared_experts")
        for what in ("gate", "up", "down")
    },
}
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


POST = {"post_attention_layernorm": "post_attention_norm"}
OTHER_NORMS = {
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4", *GEMMA4), POST_NORMS),
    **dict.fromkeys(("seed_oss", "gpt_oss", *DELTA), POST),
    "hunyuan_v1_dense": {
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
    },
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
}


def expected_name(name, cfg):
    names = {**NAMES, **OTHER_NORMS.get(cfg["model_type"], {})}
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    before, name = (f"blk.{layer[1]}.", layer[2]) if layer else ("", name)
    if name in names:  # its suffix is another there
        return before + names[name]
    module, _, suffix = name.rpartition(".")
    return f"{before}{names[module]}.{suffix}"


def expected_values(name, x, cfg):
    """As llama.cpp wants them, in fp32: halves of a head turned into neighbours, norms plus 1."""
    if cfg["model_type"] in OFFSET and "norm" in name and "linear_attn" not in name:
        return x + 1
    if cfg["model_type"] in DELTA and ("linear_attn" in name or "shared_expert_gate" in name):
        return expected_of_delta(name.split(".", 4)[-1], x, cfg)
    if "embed_tokens_per_layer" in name:
        return x[: cfg["vocab_size"]]
    heads = {"q": cfg["num_attention_heads"], "k": cfg["num_key_value_heads"]}
    for c, n in heads.items():
        if cfg["model_type"] in TURNED and f"{c}_proj" in name:
            first, second = x.reshape(n, 2, -1, x.shape[1]).unbind(1)
            return torch.stack((first, second), 2).reshape(x.shape)
    return x


def expected_of_delta(name, x, cfg):
    """Value heads 0 1 2 3 of two key heads as 0 2 1 3, but of Qwen3-Next."""
    x = -x.exp() if name == "A_log" else x.squeeze()
    swapped = slice(None) if cfg["model_type"] == "qwen3_next" else [0, 2, 1, 3]
    if name == "out_proj.weight":
        return x.reshape(len(x), 4, -1)[:, swapped].reshape(x.shape)
    if name in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat((x[:64], x[64:].reshape(4, 16, -1)[swapped].reshape(64, -1)))
    if name in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        return x.reshape(4, -1)[swapped].reshape(x.shape)
    return x


def cut(source, cfg):
    """The tensors of a file, those that llama.cpp has in two cut in two."""
    out = dict(source)
    for name, x in source.items():
        base, two = name.rpartition(".")[0], {}
        if name.endswith("kv_b_proj.weight"):
            k = cfg["qk_nope_head_dim"]
            heads = x.reshape(cfg["num_attention_heads"], k + cfg["v_head_dim"], -1)
            two = {"attn_k_b.weight": heads[:, :k].mT, "attn_v_b.weight": heads[:, k:]}
        elif name.endswith("in_proj_qkvz.weight"):
            q, k, v, z = x.reshape(2, -1, x.shape[1]).split((16, 16, 32, 32), 1)
            qkv = torch.cat([t.reshape(-1, x.shape[1]) for t in (q, k, v)])
            two = {"attn_qkv.weight": qkv, "attn_gate.weight": z.reshape(64, -1)}
        elif name.endswith("experts.gate_up_proj") and cfg["model_type"] == "gpt_oss":
            two = {f"ffn_{g}_exps.weight": x.mT[:, i::2] for i, g in enumerate(("gate", "up"))}
        elif name.endswith("experts.gate_up_proj_bias"):
            two = {f"ffn_{g}_exps.bias": x[:, i::2] for i, g in enumerate(("gate", "up"))}
        elif name.endswith("experts.gate_up_proj"):
            two = {f"ffn_{g}_exps.weight": y for g, y in zip(("gate", "up"), x.chunk(2, 1))}
        elif name.endswith("experts.down_proj"):
            two = {"ffn_down_exps.weight": x.mT if cfg["model_type"] == "gpt_oss" else x}
        elif name.endswith("experts.down_proj_bias"):
            two = {"ffn_down_exps.bias": x}
        if two:
            del out[name]
            out |= {f"blk.{base.split('.')[2]}.{key}": y for key, y in two.items()}
    return out


def stacked(source):
    """The tensors of a file, those of experts as one, in the order of the experts."""
    out, experts = {}, {}
    for name, x in source.items():
        key = re.sub(r"experts\.\d+\.", "experts.", name)
        if key == name:
            out[name] = x
        else:
            experts.setdefault(key, {})[int(re.search(r"experts\.(\d+)", name)[1])] = x
    return out | {key: torch.stack([x[e] for e in range(len(x))]) for key, x in experts.items()}


def q8_0(x):
    """Blocks of 32: a scale d = max|x| / 127 in fp16, and 32 signed bytes, x / d rounded."""
    blocks = x.reshape(-1, 32).numpy()
    d = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, d, out=np.zeros_like(d), where=d != 0)
    scaled = blocks * inverse
    q = np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))
    return np.hstack([d.astype(np.float16).view(np.uint8), q.astype(np.int8).view(np.uint8)])


def through_mxfp4(x):
    """The numbers that MXFP4 has of rows: of a byte the low half comes first, then the high one."""
    elements, scales, _ = mxfp4(x.reshape(-1, x.shape[-1]).numpy())
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    pairs = np.stack((elements & 15, elements >> 4), -1).reshape(*scales.shape, 32)
    signed = np.concatenate((numbers, -numbers))[pairs]
    return (signed * np.exp2(scales.astype(np.float32) - 127)[..., None]).reshape(x.shape)


CASES = [
    *((name, dtype) for name in CONFIGS for dtype in ("fp32", "bf16", "q8_0")),
    *((name, "fp32") for name in ONE_WAY),
    *(("gpt_oss", dtype) for dtype in ("bf16", "q8_0", "mxfp4")),
    *((name, "q8_0") for name in ("deepseek_v3", "qwen3_5_moe", "gemma4-e2b")),
]
F32 = ("gate_inp", "ssm_conv1d", "bias")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(*c, marks=[pytest.mark.oldest] if c[0] in CONFIGS else []) for c in CASES],
)
def test_gguf_has_the_weights_bit_for_bit(directory, tmp_path, name, dtype, monkeypatch):
    cfg = WRITTEN[name]
    source = cut(stacked(load_file(directory(name) / "model.safetensors")), cfg)
    monkeypatch.setattr(export, "PIECE_ELEMENTS", 700)  # several pieces a tensor
    found = {
        t.name: t for t in to_gguf(directory(name), tmp_path / "m.gguf", "--dtype", dtype).tensors
    }
    wanted = {
        n if n.startswith("blk.") else expected_name(n, cfg): expected_values(n, x, cfg)
        for n, x in source.items()
    }
    if name == "olmo2-tied":  # llama.cpp's OLMo 2 always reads it
        wanted["output.weight"] = source["model.embed_tokens.weight"]
    extra = {n for n in found if n.startswith("rope_f")}
    assert set(found) - extra == set(wanted)
    assert extra == {
        "llama-tied-llama3": {"rope_freqs.weight"},
        "phi3": {"rope_factors_long.weight", "rope_factors_short.weight"},
        "gemma4": {"rope_freqs.weight"},
        "gemma4-moe": {"rope_freqs.weight"},
        "gemma4-shared": {"rope_freqs.weight"},
        "gemma4-e2b": {"rope_freqs.weight"},
    }.get(name, set())
    for n, x in wanted.items():
        got, kind = found[n], found[n].tensor_type.name
        assert [*got.shape] == [*x.shape][::-1]
        wide = x.dim() == 1 or any(w in n for w in F32) or (dtype == "q8_0" and x.shape[-1] % 32)
        x = x.contiguous()
        if n.endswith("ssm_a"):  # torch's exp is not numpy's to the bit
            assert np.allclose(got.data, x, rtol=3e-7)
        elif dtype == "fp32" or wide:
            assert kind == "F32" and got.data.tobytes() == x.numpy().tobytes(), n
        elif dtype == "q8_0":
            assert kind == "Q8_0" and got.data.tobytes() == q8_0(x).tobytes(), n
        elif dtype == "mxfp4" and "_exps" in n:
            assert kind == "MXFP4"
            assert np.array_equal(
                gguf.quants.dequantize(got.data, got.tensor_type), through_mxfp4(x)
            )
        else:
            assert kind == "BF16"
            assert got.data.tobytes() == x.bfloat16().view(torch.int16).numpy().tobytes(), n


MSCALE = math.log(4) / 10  # of yarn by 4
KEYS = {  # after the architecture's name; llama.cpp's tests below run what they say
    "gpt_oss": {
        "attention.sliding_window": 9,
        "attention.sliding_window_pattern": [True, False, True],
        "expert_feed_forward_length": 96,
        "rope.scaling.attn_factor": 1.0,
    },
    "deepseek_v3": {
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 24,
        "attention.key_length_mla": 20,
        "attention.value_length_mla": 10,
        "rope.dimension_count": 8,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_group_used_count": 1,
        "rope.scaling.attn_factor": (1 + 0.7 * MSCALE) / (1 + 0.4 * MSCALE),
        "rope.scaling.yarn_log_multiplier": 0.1
        * ((1 + 0.4 * MSCALE) ** 2 / (1 + 0.7 * MSCALE) - 1)
        / MSCALE,
    },
    "qwen3_5_moe": {
        "ssm.inner_size": 64,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "attention.recurrent_layers": [True, True, False],
        "full_attention_interval": 3,
        "rope.dimension_sections": [1, 1, 1, 0],
        "expert_shared_feed_forward_length": 28,
    },
    "gemma4-moe": {
        "attention.head_count_kv": [1, 2, 1],
        "attention.key_length": 40,
        "attention.key_length_swa": 24,
        "rope.freq_base_swa": 300.0,
        "embedding_length_per_layer_input": 0,
    },
    "gemma4": {"final_logit_softcapping": 0.0},
    "gemma4-e2b": {
        "attention.shared_kv_layers": 2,
        "embedding_length_per_layer_input": 16,
        "feed_forward_length": [96, 96, 96, 96, 192, 192],
    },
    "ministral3": {"attention.temperature_scale": 0.3, "rope.scaling.yarn_beta_fast": 32.0},
}


@pytest.mark.parametrize("name", KEYS)
def test_gguf_has_the_keys_of_the_architecture(directory, tmp_path, name):
    fields = to_gguf(directory(name), tmp_path / "m.gguf").fields
    arch = fields["general.architecture"].contents()
    for key, value in KEYS[name].items():
        found = fields[f"{arch}.{key}"].contents()
        assert found == pytest.approx(value, rel=1e-6) and type(found) is type(value), key


@pytest.mark.oldest
def test_gguf_has_the_tokenizer(directory, tmp_path):
    fields = to_gguf(directory("qwen3"), tmp_path / "m.gguf").fields
    value = {name.removeprefix("tokenizer."): f.contents() for name, f in fields.items()}
    content = json.loads((directory("qwen3") / "tokenizer.json").read_text())
    assert value["ggml.model"] == "gpt2" and value["ggml.pre"] == "gpt-2"
    assert value["ggml.tokens"] == sorted(
        content["model"]["vocab"], key=content["model"]["vocab"].get
    )
    assert [m.split(" ") for m in value["ggml.merges"]] == content["model"]["merges"]
    assert value["ggml.token_type"] == [3] + [1] * (len(value["ggml.tokens"]) - 1)
    assert value["ggml.eos_token_id"] == 0 and value["chat_template"] == TEMPLATE


def test_gguf_stops_where_generate_does_or_says_that_it_does_not(directory, tmp_path, capsys):
    """The template's end of turn is the file's. Another eos_token_id of the model is noted."""
    folder = shutil.copytree(directory("qwen3"), tmp_path / "m")
    content = json.loads((folder / "tokenizer.json").read_text())
    turn = {**content["added_tokens"][0], "id": 511, "content": "<|turn|>"}
    content["added_tokens"].append(turn)
    last = next(t for t, i in content["model"]["vocab"].items() if i == 511)
    del content["model"]["vocab"][last]
    content["model"]["merges"] = [m for m in content["model"]["merges"] if "".join(m) != last]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    template = TEMPLATE.replace("{{ m.content }}", "{{ m.content }}<|turn|>")
    (folder / "chat_template.jinja").write_text(template)
    for ids, noted in ((0, False), ([2, 0], False), ([511, 3], True)):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        out = tmp_path / f"{noted}{ids}.gguf"
        assert run("--model", folder, "--to", "gguf", "--out", out) == 0
        fields = gguf.GGUFReader(out).fields
        ends = [fields[f"tokenizer.ggml.{n}_token_id"].contents() for n in ("eos", "eot")]
        assert ends == [0, 511]
        said = "note: the file's end of text is '<|endoftext|>', the tokenizer's eos_token, but"
        assert (said in capsys.readouterr().out) == noted


# ---- GGUF: llama.cpp -----------------------------------------------------------------------------

LLAMA_PYTHON = os.environ.get("LLAMA_PYTHON", sys.executable)


@functools.cache
def without_llama():
    done = subprocess.run([LLAMA_PYTHON, "-c", "import llama_cpp"], capture_output=True)
    return done.returncode != 0


def greedy_of_llama(file, text, n=64):
    if without_llama():
        pytest.skip(
            "llama-cpp-python is not installed (LLAMA_PYTHON names an interpreter that has it)"
        )
    done = subprocess.run(
        [LLAMA_PYTHON, ROOT / "tests/llama_greedy.py"],
        input=json.dumps({"file": str(file), "text": text, "n": n}),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", WRITTEN)
def test_llama_cpp_has_the_greedy_tokens_of_transformers(directory, tmp_path, name):
    """Logits within the roundings of fp32; Gemma's within those of fp16, as llama.cpp's GELU is a
    table in fp16."""
    if name not in ("llama", "qwen3", "gemma2") and without_llama():
        pytest.skip("llama-cpp-python is not installed: see the skips of llama, qwen3 and gemma2")
    to_gguf(directory(name), tmp_path / "m.gguf")
    got = greedy_of_llama(tmp_path / "m.gguf", TEXT)
    model, ids = model_of(name), tokenizer().encode(TEXT).ids
    assert got["tokens"] == ids
    with torch.no_grad():  # the greedy tokens are those that follow themselves
        logits = model(torch.tensor([ids + got["greedy"]])).logits[0, len(ids) - 1 :]
    error = np.abs(np.array(got["logits"]) - logits[0].numpy()).max()
    assert error < (4e-3 if "gemma" in WRITTEN[name]["model_type"] else 1e-5)
    assert got["greedy"] == logits[:-1].argmax(1).tolist()


CUTS = {  # by llama.cpp's name of them: as published tokenizers have them
    "seed-coder": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "qwen35": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ],
}


@pytest.mark.parametrize("name", CUTS)
def test_text_is_cut_as_published_tokenizers_cut_it(directory, tmp_path, name):
    folder = shutil.copytree(directory("llama"), tmp_path / "m")
    content = json.loads((folder / "tokenizer.json").read_text())
    steps = [
        dict(type="Split", pattern=dict(Regex=regex), behavior="Isolated", invert=False)
        for regex in CUTS[name]
    ]
    last = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    content["pre_tokenizer"] = dict(type="Sequence", pretokenizers=[*steps, last])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    fields = to_gguf(folder, tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == name
    text = "It'S 12345 plans, #plan-them\n\n  \u0915\u093f 日本カナ."
    ids = Tokenizer.from_str(json.dumps(content)).encode(text).ids
    assert greedy_of_llama(tmp_path / "m.gguf", text, 1)["tokens"] == ids


def sentencepiece_like():
    """Merges as SentencePiece's converters make them: every two tokens whose union is a token."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    t = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    t.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special, show_progress=False)
    words = (ROOT / "docs/usage.md").read_text().split()
    t.train_from_iterator(words, trainer)
    content = json.loads(t.to_str())
    vocab, normal = content["model"]["vocab"], {}
    normal = {w: i for w, i in vocab.items() if w not in special}
    rank = {"".join(m): i for i, m in reversed([*enumerate(content["model"]["merges"])])}
    merges = [
        (rank[w], k, [w[:k], w[k:]])
        for w in normal
        for k in range(1, len(w))
        if w in rank and w[:k] in normal and w[k:] in normal
    ]
    content["model"]["merges"] = [m for _, _, m in sorted(merges)]
    # bytes are normal tokens of the model, as SentencePiece's converters leave them
    content["added_tokens"] = content["added_tokens"][:3]
    t = Tokenizer.from_str(json.dumps(content))
    t.decoder = decoders.ByteFallback()
    return t, content


@pytest.mark.oldest
def test_sentencepiece_vocabularies(directory, tmp_path):
    folder = write_model(tmp_path / "m", CONFIGS["llama"], model_of("llama"))
    t, content = sentencepiece_like()
    t.save(str(folder / "tokenizer.json"))
    fields = to_gguf(folder, tmp_path / "m.gguf").fields
    value = {name.removeprefix("tokenizer.ggml."): f.contents() for name, f in fields.items()}
    assert value["model"] == "llama" and value["add_space_prefix"] is True
    assert value["token_type"][:4] == [2, 3, 3, 6] and value["token_type"][480:] == [5] * 32
    best = max(
        range(480),
        key=lambda i: (
            (value["token_type"][i] == 1 and value["scores"][i] < 0) * (1e9 + value["scores"][i])
        ),
    )
    assert value["tokens"][best] == "".join(content["model"]["merges"][0])
    text = "The planner's plan: 12 é 🚀 steps,  two spaces"
    assert greedy_of_llama(tmp_path / "m.gguf", text, 1)["tokens"] == t.encode(text).ids
