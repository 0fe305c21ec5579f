"""`penstock import`: exported GGUF files come back bit for bit, quantized ones as the package gguf has
them, tokenizers encode alike, and files that are damaged or of other models are refused."""

import functools
import json
import os
import resource
import struct
import subprocess
import sys
import types

import gguf
import numpy as np
import pytest
import torch
from conftest import ROOT
from families import named_constants, random_model
from penstock import ModelConfig, export, gguf_file, import_gguf, import_tokenizer
from penstock._lib import as_dict
from penstock.model import TensorFile
from safetensors.torch import load_file
from test_export import CONFIGS, ONE_WAY, TEXT, WRITTEN, tokenizer, write_model
from test_gguf import sentencepiece_like
from tokenizers import Tokenizer, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer


def run(*words):
    return import_gguf.main([str(w) for w in words])


@functools.cache
def model_of(name):
    """Weights that bf16 has, as most models' are: Gemma's norms are then exact in the file."""
    model = random_model(WRITTEN[name])
    with torch.no_grad():
        for p in (*model.parameters(), *(x for _, x in named_constants(model))):
            p.copy_(p.bfloat16().float())
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(directory, GGUF file) of a model."""

    @functools.cache
    def make(name, dtype="fp32"):
        where = tmp_path_factory.mktemp("import")
        folder, file = where / "m", where / "m.gguf"
        write_model(folder, WRITTEN[name], model_of(name))
        words = ["--model", folder, "--to", "gguf", "--dtype", dtype, "--out", file, "--quiet"]
        assert export.main([str(w) for w in words]) == 0
        return folder, file

    return make


# What the file does not say: a family beside llama, and windows, whose length is its context; which
# Gemma 4; the two numbers of which Ministral 3's attention_factor is made.
WINDOWS = ("family", "window", "max_positions", "layer_flags", "rope")
NOT_SAID = {
    "mistral": WINDOWS,
    "ministral": WINDOWS,
    "gemma4_unified_text": ("family",),
    "gemma4_text": ("per_layer_vocab",),
    "ministral3": ("rope",),
}


def config_of(folder):
    """What is computed. The factors of longrope are fp32 in the file."""
    config = as_dict(ModelConfig.read(folder)._ptr)
    for name in ("long_factor", "short_factor"):
        config["rope"][name] = [float(np.float32(x)) for x in config["rope"][name]]
    return config


def comes_back(exported, tmp_path, name, dtype):
    folder, file = exported(name, dtype)
    assert run(file, "--out", tmp_path / "back", "--quiet") == 0
    first, back = (load_file(d / "model.safetensors") for d in (folder, tmp_path / "back"))
    assert first.keys() == back.keys()
    for key, x in first.items():
        if "embed_tokens_per_layer" in key:  # rows that no token reads
            x = x[: WRITTEN[name]["vocab_size"]]
        assert back[key].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        assert torch.equal(back[key].float(), x), key
    before, after = config_of(folder), config_of(tmp_path / "back")
    before["rope"]["theta"] = float(str(np.float32(before["rope"]["theta"])))  # as a file has it
    not_said = ["eos_token_id", "router_aux_loss"]  # the tokenizer's; the family's default
    not_said += NOT_SAID.get(WRITTEN[name]["model_type"], ())
    for key in before.keys() - not_said:
        assert after[key] == before[key], key


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.oldest) for n in CONFIGS), *ONE_WAY]
)
def test_an_exported_file_comes_back_to_the_bit(exported, tmp_path, monkeypatch, name):
    exported(name)
    if name in ONE_WAY:
        monkeypatch.setattr(export, "PIECE_ELEMENTS", 700)  # several pieces, which cut heads
    comes_back(exported, tmp_path, name, "fp32")


@pytest.mark.parametrize(
    "name",
    "llama gemma2 qwen3_moe gpt_oss qwen3_5 gemma4-e2b".split(),
)
def test_so_does_one_in_bf16(exported, tmp_path, name):
    comes_back(exported, tmp_path, name, "bf16")


LOGITS = ("gemma3-linear", "olmo2-linear", "phi3", "mixtral")
LOGITS_5 = (
    "gpt_oss deepseek_v2 glm4_moe_lite qwen3_next qwen3_5_moe gemma4-shared gemma4-e2b ministral3"
)


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, marks=pytest.mark.oldest) for n in LOGITS), *LOGITS_5.split()],
)
def test_transformers_computes_the_same(exported, tmp_path, name):
    assert run(exported(name)[1], "--out", tmp_path / "back", "--quiet") == 0
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    ids = torch.arange(40)[None]
    with torch.no_grad():
        error = (theirs.eval()(ids).logits - model_of(name)(ids).logits).abs().max()
    assert error < 1e-5  # factors of RoPE are fp32 in the file


QUANTIZED = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 F16 BF16 Q2_K Q3_K Q4_K Q5_K Q6_K".split()


def rewritten(
    file, out, kinds=lambda name: None, keys=(), change=lambda t: t, rename=None, **split
):
    """The file once more, with other tensors and keys: `change` makes {name: data} of that of the
    file; keys: {name: value}, of the architecture, None leaves it out. kinds: the types of which
    tensors have random blocks. rename: another architecture."""
    reader, keys = gguf.GGUFReader(file), dict(keys)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, rename or arch, **split)
    for field in reader.fields.values():
        name = field.name.removeprefix(f"{arch}.")
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        types, value = field.types, keys.get(name, field.contents())
        sub = types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None
        if value is not None:
            to = field.name.replace(f"{arch}.", f"{rename or arch}.")
            writer.add_key_value(to, value, types[0], sub_type=sub)
    for name in keys.keys() - {f.removeprefix(f"{arch}.") for f in reader.fields}:
        writer.add_uint32(f"{arch}.{name}", keys[name])
    rng, values = np.random.default_rng(3), {}
    for name, data in change({t.name: np.array(t.data) for t in reader.tensors}).items():
        kind = kinds(name)
        if kind is not None:
            per, size = gguf.GGML_QUANT_SIZES[kind]
            *rows, columns = data.shape
            data = rng.integers(0, 60, (*rows, columns // per * size), np.uint8)
            values[name] = gguf.quants.dequantize(data, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def another(name, x):
    return lambda t: {**t, name: np.array(x, np.float32)}


def without(name):
    return lambda t: {n: x for n, x in t.items() if n != name}


def kv_b_whole(t):
    for i in range(3):
        k, v = (t.pop(f"blk.{i}.attn_{x}_b.weight") for x in "kv")
        t[f"blk.{i}.attn_kv_b.weight"] = np.concatenate((k.swapaxes(1, 2), v), 1).reshape(-1, 24)
    return t


def gates_with_ups(t):
    for i in range(3):
        two = [t.pop(f"blk.{i}.ffn_{x}_exps.weight") for x in ("gate", "up")]
        t[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate(two, 1)
    return t


def experts_one_by_one(t):
    for name in [n for n in t if "_exps." in n]:
        for e, x in enumerate(t.pop(name)):
            t[name.replace("_exps.", f".{e}.")] = x
    return t


def qkvz_whole(t):
    """Of two heads of q: its q, k, v and z."""
    for i in range(2):
        qkv, z = (t.pop(f"blk.{i}.attn_{x}.weight") for x in ("qkv", "gate"))
        parts = [x.reshape(2, -1, 64) for x in (qkv[:32], qkv[32:64], qkv[64:], z)]
        t[f"blk.{i}.ssm_in.weight"] = np.concatenate(parts, 1).reshape(-1, 64)
    return t


def with_a_layer_more(t):
    return {**t, "blk.3.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)}


def with_all_rows(t):
    """Of the table of per-layer embeddings, those that no token reads too."""
    name = "per_layer_token_embd.weight"
    return {**t, name: np.pad(t[name], ((0, 5), (0, 0)))}


OF_MTP = {"block_count": 4, "nextn_predict_layers": 1, "attention.recurrent_layers": None}
OF_MTP["full_attention_interval"] = 4  # which is not the model's
OTHERS = {  # as converters of llama.cpp write or wrote them
    "kv_b whole": (
        "deepseek_v3",
        kv_b_whole,
        {"attention.key_length_mla": None, "attention.value_length_mla": None}
        | {"attention.key_length": 20, "attention.value_length": 10}
        | {"expert_gating_func": None, "leading_dense_block_count": 0},
    ),
    "gates with ups": ("gemma4-moe", gates_with_ups, {"attention.head_count_kv": [2, 2, 2]}),
    "all rows": ("gemma4-e2b", with_all_rows, {}),
    "head": ("olmo2-tied", without("output.weight"), {}),
    "experts one by one": ("mixtral", experts_one_by_one, {}),
    "qkvz whole": ("qwen3_next", qkvz_whole, {"attention.recurrent_layers": None}),
    "mtp": ("qwen3_5", with_a_layer_more, OF_MTP),
}


@pytest.mark.parametrize("case", OTHERS)
def test_tensors_of_other_converters(exported, tmp_path, case):
    name, change, keys = OTHERS[case]
    folder, file = exported(name)
    rewritten(file, tmp_path / "m.gguf", change=change, keys=keys)
    assert run(tmp_path / "m.gguf", "--out", tmp_path / "back", "--quiet") == 0
    first, back = (load_file(d / "model.safetensors") for d in (folder, tmp_path / "back"))
    table = first.get("model.embed_tokens_per_layer.weight")
    if table is not None:
        table[512:] = 0
    assert first.keys() == back.keys() and all(torch.equal(back[k], x) for k, x in first.items())
    assert config_of(tmp_path / "back") == config_of(folder) | dict(
        eos_token_id=0, router_aux_loss=config_of(tmp_path / "back")["router_aux_loss"]
    )


def test_text_of_a_vision_language_model(exported, tmp_path):
    folder, file = exported("qwen3")
    rewritten(file, tmp_path / "m.gguf", rename="qwen3vl")
    assert run(tmp_path / "m.gguf", "--out", tmp_path / "back", "--quiet") == 0
    assert config_of(tmp_path / "back") == config_of(folder) | dict(eos_token_id=0)


@pytest.fixture(scope="module")
def split(exported, tmp_path_factory):
    """Three files of a model."""
    where = tmp_path_factory.mktemp("split")
    rewritten(exported("qwen3")[1], where / "m.gguf", split_max_tensors=14)
    return sorted(where.iterdir())


def test_a_split_model_is_read_from_any_of_its_files(exported, split, tmp_path):
    assert [p.name for p in split] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    first = load_file(exported("qwen3")[0] / "model.safetensors")
    for i in (0, 2):
        assert run(split[i], "--out", tmp_path / f"o{i}", "--quiet") == 0
        back = load_file(tmp_path / f"o{i}/model.safetensors")
        assert first.keys() == back.keys()
        assert all(torch.equal(back[k], x) for k, x in first.items())
        assert (tmp_path / f"o{i}/tokenizer.json").exists()


SPLITS = {
    "missing": ({0: 0, 2: 2}, "is one of 3 files, of which", "m-00002-of-00003.gguf is missing"),
    "name": ({0: None}, "says that it is file 0 of 3, from 0 on: the names of all must end as"),
    "twice": (
        {0: 0, 1: 0, 2: 2},
        "m-00002-of-00003.gguf: says that it is another file than number 1",
    ),
}


@pytest.mark.parametrize("case", SPLITS)
def test_split_files_that_are_refused(split, tmp_path, capsys, case):
    files, *messages = SPLITS[case]
    for to, source in files.items():
        name = "other.gguf" if source is None else split[to].name
        (tmp_path / name).write_bytes(split[source or 0].read_bytes())
    before = sorted(tmp_path.iterdir())
    assert run(before[0], "--out", tmp_path / "o") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(m in error for m in messages), error
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.oldest
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_quantized_tensors_are_what_the_package_gguf_makes_of_them(tmp_path, monkeypatch, name):
    """One type a tensor; rows of q and k are moved after dequantization, experts are taken apart."""
    cfg = CONFIGS[name] | dict(hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    folder = write_model(tmp_path / "m", cfg, random_model(cfg))
    words = ["--model", folder, "--to", "gguf", "--out", tmp_path / "m.gguf", "--quiet"]
    assert export.main([str(w) for w in words]) == 0
    names = [t.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if len(t.shape) > 1]
    kinds = {n: gguf.GGMLQuantizationType[QUANTIZED[i % 12]] for i, n in enumerate(names)}
    assert len(names) >= 12
    values = rewritten(tmp_path / "m.gguf", tmp_path / "q.gguf", kinds.get)
    monkeypatch.setattr(export, "PIECE_ELEMENTS", 5000)  # several pieces, which cut heads
    assert run(tmp_path / "q.gguf", "--out", tmp_path / "o", "--dtype", "fp32", "--quiet") == 0
    back = load_file(tmp_path / "o/model.safetensors")
    for i in range(2):
        for part, theirs in (("q_proj", "attn_q"), ("o_proj", "attn_output")):
            want = torch.tensor(values[f"blk.{i}.{theirs}.weight"])
            if part == "q_proj":
                want = want.reshape(4, -1, 2, 256).transpose(1, 2).reshape(256, 256)
            assert torch.equal(back[f"model.layers.{i}.self_attn.{part}.weight"], want), theirs
        for k, theirs in enumerate(("ffn_gate", "ffn_down", "ffn_up")):
            if name == "llama":
                got = back[f"model.layers.{i}.mlp.{theirs[4:]}_proj.weight"]
            else:
                theirs += "_exps"
                experts = f"model.layers.{i}.block_sparse_moe.experts"
                got = torch.stack([back[f"{experts}.{e}.w{k + 1}.weight"] for e in range(4)])
            assert torch.equal(got, torch.tensor(values[f"blk.{i}.{theirs}.weight"])), theirs


OF_32 = "Q8_0 Q4_0 Q5_1 MXFP4 Q4_1 Q5_0".split()  # blocks of 32


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5", "gemma4-e2b"])
def test_quantized_tensors_are_laid_out_as_others(exported, tmp_path, monkeypatch, name):
    """The file with blocks comes out as the file with the numbers that the package gguf makes of
    them."""
    file = exported(name)[1]
    wide = [t for t in gguf.GGUFReader(file).tensors if len(t.shape) > 1 and t.shape[0] % 32 == 0]
    kinds = {t.name: OF_32[i % 6] for i, t in enumerate(wide) if t.name.endswith(".weight")}
    kinds = {n: gguf.GGMLQuantizationType[kind] for n, kind in kinds.items()}
    values = rewritten(file, tmp_path / "q.gguf", kinds.get)
    rewritten(file, tmp_path / "f.gguf", change=lambda t: t | values)
    monkeypatch.setattr(export, "PIECE_ELEMENTS", 700)  # several pieces, which cut heads
    for which in "qf":
        words = [tmp_path / f"{which}.gguf", "--out", tmp_path / which, "--dtype", "fp32"]
        assert run(*words, "--quiet") == 0
    blocks, numbers = (load_file(tmp_path / w / "model.safetensors") for w in "qf")
    assert blocks.keys() == numbers.keys() and len(values) > 10
    assert all(torch.equal(x, blocks[key]) for key, x in numbers.items())


def test_experts_in_mxfp4_stay_as_they_are(exported, tmp_path, capsys):
    """gpt-oss as it is published: the blocks of a file in MXFP4 come back as blocks."""
    file = exported("gpt_oss", "mxfp4")[1]
    for dtype in ("mxfp4", "bf16"):
        assert run(file, "--out", tmp_path / dtype, "--dtype", dtype) == 0
    assert "changes their weights by 0.00%" in capsys.readouterr().out
    config = json.loads((tmp_path / "mxfp4/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    on_disk = load_file(tmp_path / "mxfp4/model.safetensors")
    assert "model.layers.0.mlp.experts.down_proj_blocks" in on_disk
    packed, plain = (TensorFile(tmp_path / d) for d in ("mxfp4", "bf16"))
    assert all(np.array_equal(packed.read(name), plain.read(name)) for name in plain.names)
    assert run(exported("llama")[1], "--out", tmp_path / "o", "--dtype", "mxfp4") == 2
    assert "mxfp4" in capsys.readouterr().err


# ---- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.oldest
def test_the_tokenizer_and_the_template_come_back(exported, tmp_path):
    folder, file = exported("qwen3")
    assert run(file, "--out", tmp_path / "o", "--quiet") == 0
    ours = AutoTokenizer.from_pretrained(tmp_path / "o")
    assert ours(TEXT).input_ids == tokenizer().encode(TEXT).ids
    assert ours.decode(ours(TEXT).input_ids) == TEXT and ours.eos_token == "<|endoftext|>"
    marked = TEXT + "<|endoftext|>" + TEXT
    assert ours(marked).input_ids == tokenizer().encode(marked).ids
    turns = [{"role": "user", "content": "Ahoy"}]
    assert ours.apply_chat_template(turns, tokenize=False) == "<|user|>Ahoy"
    again = tmp_path / "again.gguf"
    words = ["--model", tmp_path / "o", "--to", "gguf", "--out", again, "--quiet"]
    assert export.main([str(w) for w in words]) == 0
    first, second = (gguf.GGUFReader(f).fields for f in (file, again))
    for name in first:
        if name.startswith("tokenizer."):
            assert first[name].contents() == second[name].contents(), name


@pytest.mark.oldest
def test_a_sentencepiece_vocabulary_comes_back(tmp_path):
    cfg = CONFIGS["llama"]
    folder = write_model(tmp_path / "m", cfg, random_model(cfg))
    t, content = sentencepiece_like()
    t.save(str(folder / "tokenizer.json"))
    words = ["--model", folder, "--to", "gguf", "--out", tmp_path / "m.gguf", "--quiet"]
    assert export.main([str(w) for w in words]) == 0
    assert run(tmp_path / "m.gguf", "--out", tmp_path / "o", "--quiet") == 0
    back = Tokenizer.from_file(str(tmp_path / "o/tokenizer.json"))
    texts = (TEXT, "The planner's plan: 12 é 🚀 steps,  two spaces", " x", "")
    for text in texts:
        ids = back.encode(text, add_special_tokens=False).ids
        assert ids == t.encode(text).ids and back.decode(ids) == text
    # the same with merges, as llama.cpp's converter writes Gemma 4's
    keys = gguf_file.GgufFile(gguf, tmp_path / "m.gguf").keys
    more = dict(model="gemma4", add_space_prefix=False)
    more["merges"] = [" ".join(m) for m in content["model"]["merges"]]
    keys |= {f"tokenizer.ggml.{name}": value for name, value in more.items()}
    file = types.SimpleNamespace(path="m.gguf", keys=keys)
    back = Tokenizer.from_str(json.dumps(import_tokenizer.Tokenizer(file, 512).content()))
    t.normalizer = normalizers.Replace(" ", "\u2581")
    for text in texts:
        ids = back.encode(text, add_special_tokens=False).ids
        assert ids == t.encode(text).ids and back.decode(ids) == text


ALIASES = {"glm4": "dbrx", "hunyuan-dense": "deepseek-v3", "exaone4": "gpt-2"}


@pytest.mark.parametrize("name", ALIASES)
def test_cuts_that_llama_cpp_names_twice(exported, name):
    """gpt-2 is that of the exported file, and CUTS has the others."""
    keys = gguf_file.GgufFile(gguf, exported("qwen3")[1]).keys
    made = []
    for pre in (name, ALIASES[name]):
        file = types.SimpleNamespace(path="m.gguf", keys=keys | {"tokenizer.ggml.pre": pre})
        made.append(import_tokenizer.Tokenizer(file, 512).content())
    assert made[0] == made[1]


# ---- refusals ------------------------------------------------------------------------------------

REFUSED = {
    "no gguf": (lambda b: b"PK" + b[2:], "is no GGUF file"),
    "empty": (lambda b: b"", "is no GGUF file"),
    "magic alone": (lambda b: b[:4], "ends in the middle of its header"),
    "version": (lambda b: b[:4] + struct.pack("<I", 9) + b[8:], "is GGUF of version 9"),
    "big endian": (lambda b: b[:4] + struct.pack(">I", 3) + b[8:], "is GGUF of version"),
    "header cut": (lambda b: b[:900], "ends in the middle of its header"),
    "data cut": (lambda b: b[:-70], "fetch it again"),
    "tensors": (lambda b: b[:8] + struct.pack("<Q", 1 << 60) + b[16:], "more than fit into"),
    "keys": (lambda b: b[:16] + struct.pack("<Q", 1 << 60) + b[24:], "more than fit into"),
    "list": (
        lambda b: after(b, b"tokenizer.ggml.tokens", 8, struct.pack("<Q", 1 << 60)),
        "ends in the middle of its header",
    ),
    "key type": (lambda b: after(b, b"llama.block_count", 0, struct.pack("<I", 99)), "type 99"),
    "architecture": (lambda b: b.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba"), "'mamba'"),
    "tensor type": (
        lambda b: after(b, b"blk.0.ffn_up.weight", 20, struct.pack("<I", 77)),
        "tensor blk.0.ffn_up.weight has type 77, which the package gguf does not know",
    ),
    "dimensions": (
        lambda b: after(b, b"blk.0.ffn_up.weight", 0, struct.pack("<I", 1 << 30)),
        "has 1073741824 dimensions",
    ),
    "huge": (
        lambda b: after(b, b"blk.0.ffn_up.weight", 4, struct.pack("<Q", 1 << 62)),
        "fetch it again",
    ),
    "missing": (lambda b: b.replace(b"blk.0.ffn_up.weight", b"blk.9.ffn_up.weight"), "ffn_up.weight is missing"),
    "shape": (
        lambda b: after(b, b"blk.0.ffn_up.weight", 4, struct.pack("<Q", 32)),
        "tensor blk.0.ffn_up.weight has shape [96, 32], and the model needs [96, 64]",
    ),
    "key missing": (lambda b: b.replace(b"llama.block_count", b"llama.blocc_count"), "block_count is missing"),
    "layers": (lambda b: after(b, b"llama.block_count", 4, struct.pack("<I", 1 << 31)), "num_hidden_layers"),
    "pre-tokenizer": (lambda b: b.replace(b"\5\0\0\0\0\0\0\0gpt-2", b"\5\0\0\0\0\0\0\0other"), "'other', which is not known: give --no-tokenizer"),
}  # fmt: skip


def after(data, name, at, new):
    """The file with `new` at so many bytes after the first `name`."""
    begin = data.index(name) + len(name) + at
    return data[:begin] + new + data[begin + len(new) :]


@pytest.mark.parametrize("case", REFUSED)
def test_bad_files_are_refused(exported, tmp_path, capsys, case):
    change, message = REFUSED[case]
    file = tmp_path / "bad.gguf"
    file.write_bytes(change(exported("llama")[1].read_bytes()))
    assert run(file, "--out", tmp_path / "o") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error and "bad.gguf" in error, error
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


OPTIONS = {
    "nowhere": ("nowhere.gguf --out o", "nowhere.gguf: cannot be opened"),
    "directory": (". --out o", "cannot be opened"),
    "exists": ("F --out F", "exists already: remove it"),
    "parent": ("F --out a/b", "there is no directory"),
    "dtype": ("F --out o --dtype q8_0", "invalid choice: 'q8_0'"),
    "no --out": ("F", "--out"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_options_are_refused(exported, tmp_path, monkeypatch, capsys, case):
    words, message = OPTIONS[case]
    monkeypatch.chdir(tmp_path)
    try:
        code = run(*(exported("llama")[1] if w == "F" else w for w in words.split()))
    except SystemExit as e:
        code = e.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and message in error
    assert not [*tmp_path.iterdir()]


def test_without_its_tokenizer_a_file_is_imported(exported, tmp_path):
    file = tmp_path / "m.gguf"
    content = exported("llama")[1].read_bytes()
    file.write_bytes(content.replace(b"\5\0\0\0\0\0\0\0gpt-2", b"\5\0\0\0\0\0\0\0other"))
    assert run(file, "--out", tmp_path / "o", "--no-tokenizer", "--quiet") == 0
    names = {p.name for p in (tmp_path / "o").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}


def test_a_full_disk_leaves_nothing(exported, tmp_path):
    words = [exported("llama")[1], "--out", tmp_path / "o", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "import", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "File too large" in done.stderr and not [*tmp_path.iterdir()]


# ---- experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["olmoe", "mixtral"])
def test_the_width_of_experts_may_be_feed_forward_length(exported, tmp_path, name):
    """As llama.cpp's converter writes these families."""
    folder, file = exported(name)
    other = tmp_path / "m.gguf"
    other.write_bytes(file.read_bytes().replace(b"expert_feed_forward_l", b"expert_feed_forward_x"))
    assert run(other, "--out", tmp_path / "back", "--quiet") == 0
    assert config_of(tmp_path / "back")["expert_dim"] == config_of(folder)["expert_dim"] == 96


OF_FAMILIES = {  # the model, other keys, other tensors, and what is said
    "rank": ("deepseek_v3", {"attention.kv_lora_rank": None}, None, "kv_lora_rank is missing"),
    "k_b": (
        "deepseek_v3",
        {},
        without("blk.1.attn_k_b.weight"),
        "blk.1.attn_k_b.weight is missing",
    ),
    "rope": ("deepseek_v3", {"rope.dimension_count": 22}, None, "qk_nope_head_dim is -2"),
    "keys": (
        "gemma4-moe",
        {},
        another("blk.2.attn_k.weight", np.zeros((80, 72))),
        "tensor blk.2.attn_k.weight has shape [80, 72], and the model needs [40, 72]",
    ),
    "factors": ("gemma4-moe", {}, another("rope_freqs.weight", range(20)), "is not one factor for"),
    "pattern": (
        "gemma4-moe",
        {"attention.sliding_window_pattern": [True]},
        None,
        "sliding_window_pattern does not say of 3 layers which have a window",
    ),
    "decay": (
        "qwen3_5",
        {},
        another("blk.0.ssm_a", [-1, -1, 2, -1]),
        "tensor blk.0.ssm_a has a number that is not below 0",
    ),
    "no decay": ("qwen3_5", {}, without("blk.0.ssm_a"), "blk.0.attn_q.weight is missing"),
    "all mtp": ("qwen3_5", {"nextn_predict_layers": 3}, None, "no layer is left"),
    "state": ("qwen3_next", {"ssm.state_size": None}, None, "ssm.state_size is missing"),
    "sinks": ("gpt_oss", {}, without("blk.0.attn_sinks.weight"), "attn_sinks.weight is missing"),
}


@pytest.mark.parametrize("case", OF_FAMILIES)
def test_files_of_families_that_are_refused(exported, tmp_path, capsys, case):
    name, keys, change, message = OF_FAMILIES[case]
    file = tmp_path / "m.gguf"
    rewritten(exported(name)[1], file, keys=keys, change=change or (lambda t: t))
    assert run(file, "--out", tmp_path / "back", "--no-tokenizer", "--quiet") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and [*tmp_path.iterdir()] == [file], error


@pytest.mark.parametrize(
    "old, new, message",
    [
        (b"llama", b"qwen2", "has 4 experts: of qwen2 they are not supported"),
        (b"expert_used_count", b"expert_used_cound", "llama.expert_used_count is missing"),
        (b"ffn_up_exps", b"ffn_up_expz", "tensor blk.0.ffn_up_exps.weight is missing"),
    ],
    ids=str,
)
def test_files_with_experts_that_are_refused(exported, tmp_path, capsys, old, new, message):
    other = tmp_path / "m.gguf"
    other.write_bytes(exported("mixtral")[1].read_bytes().replace(old, new))
    assert run(other, "--out", tmp_path / "back", "--no-tokenizer", "--quiet") == 2
    assert message in capsys.readouterr().err and [*tmp_path.iterdir()] == [other]
