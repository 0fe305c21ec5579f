"""`penstock export --to gguf`: files read back by the package gguf and run by llama.cpp."""

import functools
import json
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
from families import OFFSET
from penstock import export
from safetensors.torch import load_file
from test_export import (  # noqa: F401 (directory is a fixture)
    CONFIGS,
    LLAMA3,
    TEMPLATE,
    TEXT,
    TURNED,
    binary,
    directory,
    model_of,
    run,
    to_gguf,
    tokenizer,
    write_model,
)

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
}
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


OTHER_NORMS = {
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4"), POST_NORMS),
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
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
    module, _, suffix = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{names[module]}.{suffix}"
    _, _, i, module = module.split(".", 3)
    return f"blk.{i}.{names[module]}.{suffix}"


def expected_values(name, x, cfg):
    """As llama.cpp wants them, in fp32: halves of a head turned into neighbours, norms plus 1."""
    if cfg["model_type"] in OFFSET and "norm" in name:
        return x + 1
    heads = {"q": cfg["num_attention_heads"], "k": cfg["num_key_value_heads"]}
    for c, n in heads.items():
        if cfg["model_type"] in TURNED and f"{c}_proj" in name:
            first, second = x.reshape(n, 2, -1, x.shape[1]).unbind(1)
            return torch.stack((first, second), 2).reshape(x.shape)
    return x


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


@pytest.mark.oldest
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "q8_0"])
def test_gguf_has_the_weights_bit_for_bit(directory, tmp_path, name, dtype, monkeypatch):
    cfg = CONFIGS[name]
    source = stacked(load_file(directory(name) / "model.safetensors"))
    monkeypatch.setattr(export, "PIECE_ELEMENTS", 700)  # several pieces a tensor
    found = {
        t.name: t for t in to_gguf(directory(name), tmp_path / "m.gguf", "--dtype", dtype).tensors
    }
    wanted = {expected_name(n, cfg): expected_values(n, x, cfg) for n, x in source.items()}
    if name == "olmo2-tied":  # llama.cpp's OLMo 2 always reads it
        wanted["output.weight"] = source["model.embed_tokens.weight"]
    extra = {n for n in found if n.startswith("rope_f")}
    assert set(found) - extra == set(wanted)
    assert extra == {
        "llama-tied-llama3": {"rope_freqs.weight"},
        "phi3": {"rope_factors_long.weight", "rope_factors_short.weight"},
    }.get(name, set())
    for n, x in wanted.items():
        got, kind = found[n], found[n].tensor_type.name
        assert [*got.shape] == [*x.shape][::-1]
        wide = x.dim() == 1 or "gate_inp" in n or (dtype == "q8_0" and x.shape[-1] % 32)
        if dtype == "fp32" or wide:
            assert kind == "F32" and got.data.tobytes() == x.numpy().tobytes(), n
        elif dtype == "bf16":
            assert kind == "BF16"
            assert got.data.tobytes() == x.bfloat16().view(torch.int16).numpy().tobytes(), n
        else:
            assert kind == "Q8_0" and got.data.tobytes() == q8_0(x).tobytes(), n


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


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_has_the_greedy_tokens_of_transformers(directory, tmp_path, name):
    """Logits within the roundings of fp32; Gemma's within those of fp16, as llama.cpp's GELU is a
    table in fp16."""
    if name not in ("llama", "qwen3", "gemma2") and without_llama():
        pytest.skip("llama-cpp-python is not installed: see the skips of llama, qwen3 and gemma2")
    to_gguf(directory(name), tmp_path / "m.gguf")
    got = greedy_of_llama(tmp_path / "m.gguf", TEXT)
    model, ids = model_of(name), tokenizer().encode(TEXT).ids
    assert got["tokens"] == ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].numpy()
        for _ in range(64):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    error = np.abs(np.array(got["logits"]) - logits).max()
    assert error < (4e-3 if CONFIGS[name]["model_type"] in OFFSET else 1e-5)
    assert got["greedy"] == ids[-64:]


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
