#!/usr/bin/env python3
"""Writes a freshly initialised model directory in Hugging Face layout.

    python models/init_model.py CONFIG OUT [--seed N] [--dtype bf16|fp32] [--tokenizer FILE]
                                           [--max-shard-size 5GB] [--overwrite]
    python models/init_model.py models/8b.json my_8B_model

Values, where L is num_hidden_layers:
    matrices             normal(0, initializer_range), which is 0.02 by default
    o_proj, down_proj    normal(0, initializer_range / sqrt(2 L)), so that the variance of the
                         residual stream does not grow with depth
    norms, biases        1, 0; where a family's norms multiply by 1 + w (Gemma), w is 0
    delta-nets           A_log and dt_bias 1, the convolution normal(0, 1 / sqrt(3 width))
    pad_token_id         its row of the embedding is 0, as in transformers

- Memory stays below 200 MB whatever the model's size: values are made in slices of 2^20 elements.
- A tensor's values depend on the seed and on its name alone. Philox is keyed by both, and each
  slice has its own counter. The number of threads, the shard size and the order of tensors change
  nothing.
- The directory appears under its name when it is complete. A model in it is replaced as a whole or
  not at all; other files in it stay.

Exit codes: 0 done, 1 the disk failed at the end, 2 bad input, 130 interrupted.

This script, model_dir.py and model_values.py beside it stand alone on purpose: they need Python and
numpy, but no build of Penstock. So they have their own copy of two things: open_input()
(python/penstock/files.py, native/core/file.c) and the replacement of a model directory
(native/io/stage.c). Change both copies together.
"""

import argparse
import errno
import json
import math
import os
import re
import shutil
import signal
import stat
import sys
import time

from model_dir import PENDING, SAVE, TOKENIZER, Halfway, Stage
from model_values import DTYPES, Tensor, write_json, write_model

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "GemmaForCausalLM": "gemma",
    "SeedOssForCausalLM": "seed_oss",
    "Exaone4ForCausalLM": "exaone4",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "Glm4ForCausalLM": "glm4",
    "Ministral3ForCausalLM": "ministral3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "OlmoeForCausalLM": "olmoe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "GptOssForCausalLM": "gpt_oss",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3NextForCausalLM": "qwen3_next",
}
GEMMA4 = ("gemma4_text", "gemma4_unified_text")
GEMMA = ("gemma", "gemma2", "gemma3_text")
DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")  # families with gated delta-nets
# what transformers takes for absent keys
KV_HEADS = dict(qwen2=32, qwen3=32, mistral=8, ministral=8, gemma2=4, gemma3_text=4, smollm3=4)
KV_HEADS |= dict(qwen3_moe=4, mixtral=8, gemma=16, seed_oss=8, exaone4=32, glm4=2, ministral3=8)
KV_HEADS |= dict(gpt_oss=8)
HEAD_DIM = dict(qwen3=128, gemma=256, gemma2=256, gemma3_text=256)
HEAD_DIM |= dict(seed_oss=128, glm4=128, ministral3=128, gpt_oss=64)
KV_HEADS |= dict.fromkeys(GEMMA4, 4)
HEAD_DIM |= dict.fromkeys(GEMMA4, 256)
HEAD_DIM |= dict.fromkeys(DELTA, 256)
KV_HEADS |= dict(qwen3_5_text=4, qwen3_5_moe_text=2, qwen3_next=2)
FFN = dict(qwen3_5_moe_text=512, qwen3_next=5632)
PAD = dict(phi3=32000, olmo2=1, gemma2=0, gemma3_text=0, smollm3=128004, olmoe=1)
PAD |= dict(olmo3=1, gemma=0, seed_oss=1, hunyuan_v1_dense=0, glm4=151329, ministral3=11)
PAD |= dict.fromkeys(GEMMA4, 0)
QKV_BIAS = ("qwen2", "seed_oss", "glm4", "gpt_oss")  # but for qwen2 unless attention_bias is false
TIED = (*GEMMA, *GEMMA4, "smollm3")
# a block's norms, before and after o_proj in the file
BEFORE = dict.fromkeys(("olmo2", "olmo3", "exaone4"), ())
AFTER = {
    **dict.fromkeys(BEFORE, ("post_attention", "post_feedforward")),
    **dict.fromkeys(GEMMA[1:] + GEMMA4, ("post_attention", "pre_feedforward", "post_feedforward")),
    "glm4": ("post_self_attn", "post_attention", "post_mlp"),
}
QK_NORM = ("qwen3", "gemma3_text", "olmo2", "olmo3", "exaone4", "olmoe", "qwen3_moe")
QK_NORM += (*GEMMA4, *DELTA)
# experts: how many, and an expert's parameters: the router's name, then gate, up and down
EXPERTS = dict(olmoe=64, qwen3_moe=128, mixtral=8, gpt_oss=128)
EXPERTS |= dict(qwen3_5_moe_text=256, qwen3_next=512)
EXPERT = dict(qwen3_moe=768, qwen3_5_moe_text=512, qwen3_next=512)  # others: intermediate_size
SHARED = DELTA[1:]  # families with an expert that all tokens have, and its gate
OF_EXPERTS = {
    **dict.fromkeys(
        ("olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", *SHARED),
        ("mlp", ("gate_proj", "up_proj", "down_proj")),
    ),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}
# latent attention: what transformers takes for absent keys
LATENT_KEYS = (
    "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim first_k_dense_replace "
    "n_shared_experts n_routed_experts moe_intermediate_size"
).split()
LATENT = dict(
    deepseek_v2=(512, 1536, 128, 64, 128, 0, 2, 64, 1407),
    deepseek_v3=(512, 1536, 128, 64, 128, 3, 1, 256, 2048),
    glm4_moe_lite=(512, 768, 192, 64, 256, 1, 1, 64, 1536),
)


class BadInput(Exception):
    pass


# ---- the config ----------------------------------------------------------------------------------


def regular(path, flags):
    """An opener that never waits, for example for a named pipe. See the note on copies above."""
    fd = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", path)


def load_json(path):
    try:
        with open(path, encoding="utf-8", opener=regular) as f:
            value = json.load(f)
    except OSError as e:
        raise BadInput(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{path}: is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: must be a JSON object")
    return value


def load_config(path):
    cfg = load_json(path)
    names = cfg.get("architectures")
    if names is None:
        names = [a for a, t in ARCHITECTURES.items() if t == cfg.get("model_type")]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        given = cfg.get("architectures") or cfg.get("model_type")
        raise BadInput(
            f"{path}: architectures is {json.dumps(given)}: one of {', '.join(ARCHITECTURES)} is "
            "needed"
        )
    cfg["architectures"], kind = names, ARCHITECTURES[names[0]]
    if cfg.setdefault("model_type", kind) != kind:
        raise BadInput(
            f"{path}: model_type is {json.dumps(cfg['model_type'])} but architectures says "
            f"{names[0]}"
        )
    sizes = read_sizes(path, cfg, kind)
    for key in ("attention_bias", "mlp_bias"):
        if cfg.get(key) and not (kind in QKV_BIAS and key == "attention_bias"):
            raise BadInput(
                f"{path}: {key} is {json.dumps(cfg[key])}: such biases are not supported, set it "
                "to false"
            )
    std = cfg.get("initializer_range", 0.02)
    if isinstance(std, bool) or not isinstance(std, (int, float)) or not 0 < std <= 10:
        raise BadInput(
            f"{path}: initializer_range is {json.dumps(std)}: a number above 0 and at most 10 is "
            "needed"
        )
    return cfg, sizes


def read_sizes(path, cfg, kind):
    def size(key, default=None, limit=1 << 24):
        value = cfg.get(key, default)
        value = default if value is None else value
        if value is None:
            raise BadInput(f"{path}: {key} is missing: the config must give it")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise BadInput(
                f"{path}: {key} is {json.dumps(value)}: a whole number from 1 to {limit} is needed"
            )
        return value

    s = argparse.Namespace(kind=kind)
    s.vocab, s.dim, s.ffn = (
        size("vocab_size"),
        size("hidden_size", limit=1 << 20),
        size("intermediate_size", FFN.get(kind), limit=1 << 22),
    )
    s.layers, s.heads = (
        size("num_hidden_layers", limit=4096),
        size("num_attention_heads", limit=1 << 14),
    )
    absent = s.heads if "num_key_value_heads" in cfg else KV_HEADS.get(kind, s.heads)
    s.kv_heads = size("num_key_value_heads", absent, limit=1 << 14)
    s.latent = read_latent(path, cfg, s, size) if kind in LATENT else None
    head_dim = None if "head_dim" in cfg else HEAD_DIM.get(kind)
    if s.latent:
        head_dim = s.latent["qk_rope_head_dim"]
    if head_dim is None and cfg.get("head_dim") is None:
        if s.dim % s.heads:
            raise BadInput(
                f"{path}: hidden_size is {s.dim}: without head_dim it must be a multiple of "
                f"num_attention_heads, {s.heads}"
            )
        head_dim = s.dim // s.heads
    s.head_dim = size("head_dim", head_dim, limit=4096)
    if s.heads % s.kv_heads:
        raise BadInput(
            f"{path}: num_attention_heads is {s.heads}: it must be a multiple of "
            f"num_key_value_heads, {s.kv_heads}"
        )
    if s.head_dim % 2:
        raise BadInput(f"{path}: head_dim is {s.head_dim}: it must be even, RoPE turns pairs")
    s.tied = cfg.get("tie_word_embeddings", kind in TIED)
    if not isinstance(s.tied, bool):
        raise BadInput(
            f"{path}: tie_word_embeddings is {json.dumps(s.tied)}: true or false is needed"
        )
    s.pad = read_pad(path, cfg, s)
    s.full, s.full_dim, s.full_kv, s.shared_keys = (), s.head_dim, s.kv_heads, False
    s.experts, s.sparse, s.sharing, s.wide, s.per_layer = 0, (), s.layers, 1, 0
    if kind in GEMMA4:
        read_full_layers(path, cfg, s, size)
    if kind in DELTA:
        s.linear = linear_layers(path, cfg, s)
        keys = "num_key_heads num_value_heads key_head_dim value_head_dim conv_kernel_dim".split()
        given = zip(keys, (16, 32, 128, 128, 4), strict=True)
        s.nk, s.nv, s.dk, s.dv, s.taps = (size(f"linear_{k}", n, limit=1 << 14) for k, n in given)
    if kind == "gemma4_text" and cfg.get("enable_moe_block"):
        s.experts, s.expert = size("num_experts", limit=512), size("moe_intermediate_size")
    if kind in EXPERTS:
        key = "num_local_experts" if cfg.get("num_local_experts") else "num_experts"
        s.experts = size(key, EXPERTS[kind], limit=512)
        s.expert = size("moe_intermediate_size", EXPERT[kind]) if kind in EXPERT else s.ffn
        s.shared = size("shared_expert_intermediate_size", 512) if kind in SHARED else 0
        s.sparse = sparse_layers(path, cfg, s)
    if s.latent:
        s.experts, s.expert = s.latent["n_routed_experts"], s.latent["moe_intermediate_size"]
        types = cfg.get("mlp_layer_types") if kind == "glm4_moe_lite" else None
        s.sparse = [
            i
            for i in range(s.layers)
            if (types[i] == "sparse" if types else i >= s.latent["first_k_dense_replace"])
        ]
    return s


def read_full_layers(path, cfg, s, size):
    """Heads of Gemma 4's full layers; native/model/families/gemma4.c says more of what is wrong."""
    types = cfg.get("layer_types") or ["sliding_attention"] * s.layers
    if cfg.get("layer_types") is None:
        types[5::6] = ["full_attention"] * (s.layers // 6)
    s.sharing = s.layers - (cfg.get("num_kv_shared_layers") or 0)
    s.wide = 1 + (cfg.get("use_double_wide_mlp") is True)
    if s.kind == "gemma4_text" and cfg.get("hidden_size_per_layer_input") != 0:
        s.per_layer = size("hidden_size_per_layer_input", 256)
        s.per_layer_vocab = size("vocab_size_per_layer_input", 262144, limit=1 << 24)
    s.full = [i for i, t in enumerate(types) if t == "full_attention" or i == s.layers - 1]
    s.shared_keys = cfg.get("attention_k_eq_v") is True
    s.full_dim = size("global_head_dim", 512, limit=4096)
    if s.shared_keys:
        s.full_kv = size("num_global_key_value_heads", s.kv_heads, limit=1 << 14)
    for entry in (cfg.get("per_layer_config") or {}).values():
        s.full_dim = entry.get("head_dim", s.head_dim)
        s.full_kv = entry.get("num_key_value_heads", s.kv_heads)


def read_latent(path, cfg, s, size):
    """The sizes of latent attention and its experts; native/model/config_latent.c says more of what
    is wrong. None: q has one projection."""
    out = dict(zip(LATENT_KEYS, LATENT[s.kind]))
    for key in LATENT_KEYS:
        if key == "q_lora_rank" and cfg.get(key, 1) is None:
            out[key] = None
        elif key in cfg and not (key == "first_k_dense_replace" and cfg[key] == 0):
            out[key] = size(key)
        elif key in cfg:
            out[key] = 0
    types = cfg.get("mlp_layer_types")
    if types is not None and not (isinstance(types, list) and len(types) == s.layers):
        raise BadInput(f"{path}: mlp_layer_types must be a list of num_hidden_layers, {s.layers}")
    return out


def linear_layers(path, cfg, s):
    """The layers with a delta-net; native/model/families/qwen3_5.c says more of what is wrong."""
    every, types = cfg.get("full_attention_interval", 4), cfg.get("layer_types")
    if not isinstance(every, int) or every < 1 or not isinstance(types or [], list):
        raise BadInput(
            f"{path}: full_attention_interval is {json.dumps(every)} and layer_types "
            f"{json.dumps(types)}: a positive whole number and a list are needed"
        )
    full = [t in ("full_attention", "attention") for t in types or ()]
    full = full or [(i + 1) % every == 0 for i in range(s.layers)]
    return [i for i, attends in enumerate(full) if not attends]


def sparse_layers(path, cfg, s):
    """The layers with experts; native/model/families/qwen3_moe.c says more of what is wrong."""
    if s.kind not in ("qwen3_moe", "qwen3_next"):
        return range(s.layers)
    every, dense = cfg.get("decoder_sparse_step", 1), cfg.get("mlp_only_layers") or []
    if not isinstance(every, int) or every < 1 or not isinstance(dense, list):
        raise BadInput(
            f"{path}: decoder_sparse_step is {json.dumps(every)} and mlp_only_layers "
            f"{json.dumps(dense)}: a positive whole number and a list are needed"
        )
    return [i for i in range(s.layers) if (i + 1) % every == 0 and i not in dense]


def read_pad(path, cfg, s):
    """As native/model/config_reader.c reads it."""
    if "pad_token_id" not in cfg:
        pad = PAD.get(s.kind, s.vocab)
        return pad if pad < s.vocab else None
    pad = cfg["pad_token_id"]
    if pad is None:
        return None
    if isinstance(pad, bool) or not isinstance(pad, int) or not -s.vocab <= pad < s.vocab:
        raise BadInput(
            f"{path}: pad_token_id is {json.dumps(pad)}: a token id below vocab_size, {s.vocab}, "
            "or null is needed"
        )
    return pad % s.vocab


def gpt_oss_experts(p, s, std, out):
    """In gpt-oss's files a layer's experts are one tensor, their matrices transposed."""
    yield Tensor(f"{p}mlp.router.weight", (s.experts, s.dim), std)
    yield Tensor(f"{p}mlp.router.bias", (s.experts,), "zeros")
    for name, n_in, n_out, by in (
        ("gate_up", s.dim, 2 * s.expert, std),
        ("down", s.expert, s.dim, out),
    ):
        yield Tensor(f"{p}mlp.experts.{name}_proj", (s.experts, n_in, n_out), by)
        yield Tensor(f"{p}mlp.experts.{name}_proj_bias", (s.experts, n_out), "zeros")


def gemma_experts(p, s, std, out):
    """In Gemma 4's files too; they stand beside the MLP."""
    for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
        yield Tensor(f"{p}{name}.weight", (s.dim,), "ones")
    yield Tensor(f"{p}pre_feedforward_layernorm_2.weight", (s.dim,), "ones")
    yield Tensor(f"{p}router.proj.weight", (s.experts, s.dim), std)
    yield Tensor(f"{p}router.scale", (s.dim,), "ones")
    yield Tensor(f"{p}router.per_expert_scale", (s.experts,), "ones")
    yield Tensor(f"{p}experts.gate_up_proj", (s.experts, 2 * s.expert, s.dim), std)
    yield Tensor(f"{p}experts.down_proj", (s.experts, s.dim, s.expert), out)


def per_layer_inputs(s, std):
    """Gemma 4 E2B and E4B: a table and a product for the layers together."""
    n = s.layers * s.per_layer
    table = "model.embed_tokens_per_layer.weight"
    yield Tensor(table, (s.per_layer_vocab, n), std, s.pad)
    yield Tensor("model.per_layer_model_projection.weight", (n, s.dim), std)
    yield Tensor("model.per_layer_projection_norm.weight", (s.per_layer,), "ones")


def list_latent(p, s, std, out):
    """Multi-head latent attention."""
    a = s.latent
    rank, q = a["q_lora_rank"], s.heads * (a["qk_nope_head_dim"] + a["qk_rope_head_dim"])
    if rank is None:
        yield Tensor(p + "q_proj.weight", (q, s.dim), std)
    else:
        yield Tensor(p + "q_a_proj.weight", (rank, s.dim), std)
        yield Tensor(p + "q_a_layernorm.weight", (rank,), "ones")
        yield Tensor(p + "q_b_proj.weight", (q, rank), std)
    latent, value = a["kv_lora_rank"], s.heads * a["v_head_dim"]
    kv = s.heads * a["qk_nope_head_dim"] + value
    yield Tensor(p + "kv_a_proj_with_mqa.weight", (latent + a["qk_rope_head_dim"], s.dim), std)
    yield Tensor(p + "kv_a_layernorm.weight", (latent,), "ones")
    yield Tensor(p + "kv_b_proj.weight", (kv, latent), std)
    yield Tensor(p + "o_proj.weight", (s.dim, value), out)


def list_delta_net(s, p, std, out):
    p, channels, values = p + "linear_attn.", 2 * s.nk * s.dk + s.nv * s.dv, s.nv * s.dv
    parts = (("qkv", channels), ("z", values), ("b", s.nv), ("a", s.nv))
    if s.kind == "qwen3_next":
        parts = (("qkvz", channels + values), ("ba", 2 * s.nv))
    for name, rows in parts:
        yield Tensor(f"{p}in_proj_{name}.weight", (rows, s.dim), std)
    yield Tensor(p + "conv1d.weight", (channels, 1, s.taps), (3 * s.taps) ** -0.5)
    yield Tensor(p + "A_log", (s.nv,), "ones")
    yield Tensor(p + "dt_bias", (s.nv,), "ones")
    yield Tensor(p + "norm.weight", (s.dv,), "ones")
    yield Tensor(p + "out_proj.weight", (s.dim, values), out)


def list_attention(cfg, s, i, p, one, std, out):
    full = i in s.full
    head_dim = s.full_dim if full else s.head_dim
    q, kv = s.heads * head_dim, (s.full_kv if full else s.kv_heads) * head_dim
    gated = 1 + (s.kind in DELTA)  # q_proj has a gate beside q
    parts = (("q", gated * q), ("k", kv), ("v", kv))
    if s.kind == "phi3":
        parts = [("qkv", q + 2 * kv)]
    for name, rows in parts:
        if (name == "v" and full and s.shared_keys) or (name != "q" and i >= s.sharing):
            continue
        yield Tensor(f"{p}self_attn.{name}_proj.weight", (rows, s.dim), std)
    if s.kind in QKV_BIAS and (s.kind == "qwen2" or cfg.get("attention_bias", True)):
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield Tensor(f"{p}self_attn.{name}_proj.bias", (rows,), "zeros")
    if s.kind in QK_NORM:
        for name, n in (("q", q), ("k", kv))[: 1 if i >= s.sharing else 2]:
            n = n if s.kind in ("olmo2", "olmo3", "olmoe") else head_dim
            yield Tensor(f"{p}self_attn.{name}_norm.weight", (n,), one)
    if s.kind == "hunyuan_v1_dense":
        for name in ("query", "key"):
            yield Tensor(f"{p}self_attn.{name}_layernorm.weight", (s.head_dim,), one)
    yield Tensor(p + "self_attn.o_proj.weight", (s.dim, q), out)
    if s.kind == "gpt_oss":
        if cfg.get("attention_bias", True):
            yield Tensor(p + "self_attn.o_proj.bias", (s.dim,), "zeros")
        yield Tensor(p + "self_attn.sinks", (s.heads,), std)


def list_shared_expert(s, p, std, out):
    for name in ("gate_proj", "up_proj"):
        yield Tensor(f"{p}.{name}.weight", (s.shared, s.dim), std)
    yield Tensor(p + ".down_proj.weight", (s.dim, s.shared), out)
    yield Tensor(p + "_gate.weight", (1, s.dim), std)


def list_tensors(cfg, s):
    std = float(cfg.get("initializer_range", 0.02))
    out = std / math.sqrt(2 * s.layers)
    one = "zeros" if s.kind in GEMMA + DELTA else "ones"  # their norms multiply by 1 + w
    yield Tensor("model.embed_tokens.weight", (s.vocab, s.dim), std, s.pad)
    for i in range(s.layers):
        p = f"model.layers.{i}."
        for name in BEFORE.get(s.kind, ("input",)):
            yield Tensor(f"{p}{name}_layernorm.weight", (s.dim,), one)
        if s.latent:
            yield from list_latent(p + "self_attn.", s, std, out)
        elif s.kind in DELTA and i in s.linear:
            yield from list_delta_net(s, p, std, out)
        else:
            yield from list_attention(cfg, s, i, p, one, std, out)
        for name in AFTER.get(s.kind, ("post_attention",)):
            yield Tensor(f"{p}{name}_layernorm.weight", (s.dim,), one)
        if s.kind in GEMMA4:
            yield Tensor(p + "layer_scalar", (1,), "ones")
            if s.experts:
                yield from gemma_experts(p, s, std, out)
            if s.per_layer:
                yield Tensor(p + "per_layer_input_gate.weight", (s.per_layer, s.dim), std)
                yield Tensor(p + "per_layer_projection.weight", (s.dim, s.per_layer), out)
                yield Tensor(p + "post_per_layer_input_norm.weight", (s.dim,), "ones")
        if s.kind == "gpt_oss":
            yield from gpt_oss_experts(p, s, std, out)
            continue
        if i in s.sparse:
            half, names = OF_EXPERTS[s.kind]
            yield Tensor(f"{p}{half}.gate.weight", (s.experts, s.dim), std)
            if s.latent and s.kind != "deepseek_v2":
                yield Tensor(f"{p}{half}.gate.e_score_correction_bias", (s.experts,), "zeros")
            if s.latent:
                n = s.expert * s.latent["n_shared_experts"]
                for name in names[:2]:
                    yield Tensor(f"{p}{half}.shared_experts.{name}.weight", (n, s.dim), std)
                yield Tensor(f"{p}{half}.shared_experts.{names[2]}.weight", (s.dim, n), out)
            if s.kind in SHARED:
                yield from list_shared_expert(s, f"{p}{half}.shared_expert", std, out)
            for e in range(s.experts):
                for name in names[:2]:
                    yield Tensor(f"{p}{half}.experts.{e}.{name}.weight", (s.expert, s.dim), std)
                yield Tensor(f"{p}{half}.experts.{e}.{names[2]}.weight", (s.dim, s.expert), out)
            continue
        ffn = s.ffn * (s.wide if i >= s.sharing else 1)
        for name, n in [("gate_up", 2)] if s.kind in ("phi3", "glm4") else (("gate", 1), ("up", 1)):
            yield Tensor(f"{p}mlp.{name}_proj.weight", (n * ffn, s.dim), std)
        yield Tensor(p + "mlp.down_proj.weight", (s.dim, ffn), out)
    if s.per_layer:
        yield from per_layer_inputs(s, std)
    yield Tensor("model.norm.weight", (s.dim,), one)
    if not s.tied:
        yield Tensor("lm_head.weight", (s.vocab, s.dim), std)


# ---- files ---------------------------------------------------------------------------------------


def token_names(path, tokenizer):
    """id -> token of a tokenizer.json. BPE and WordPiece have an object of tokens, Unigram a
    list."""
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocab, dict):
        names = {i: t for t, i in vocab.items()}
    elif isinstance(vocab, list):
        names = {i: entry[0] for i, entry in enumerate(vocab)}
    else:
        raise BadInput(f"{path}: model.vocab is missing: a Hugging Face tokenizer.json is needed")
    names.update((t["id"], t["content"]) for t in tokenizer.get("added_tokens") or [])
    if not names or not all(isinstance(i, int) for i in names):
        raise BadInput(f"{path}: model.vocab must map tokens to whole numbers")
    return names


def load_tokenizer(path, cfg):
    """The tokenizer_config.json that AutoTokenizer needs."""
    names = token_names(path, load_json(path))
    if max(names) >= cfg["vocab_size"]:
        raise BadInput(
            f"{path}: has token id {max(names)}: the config's vocab_size is {cfg['vocab_size']}, "
            f"raise it to {max(names) + 1} or more"
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # what a model's forward() takes: transformers would add token_type_ids
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if cfg.get("max_position_embeddings"):
        config["model_max_length"] = cfg["max_position_embeddings"]
    for which in ("bos", "eos"):
        token = cfg.get(f"{which}_token_id")
        token = token[0] if isinstance(token, list) and token else token
        if token in names:
            config[f"{which}_token"] = names[token]
    return config


def write_tokenizer(folder, path, config):
    shutil.copyfile(path, os.path.join(folder, "tokenizer.json"))
    write_json(os.path.join(folder, "tokenizer_config.json"), config)
    for name in TOKENIZER:  # files beside the given tokenizer replace the derived ones
        beside = os.path.join(os.path.dirname(os.path.abspath(path)), name)
        if name != "tokenizer.json" and os.path.isfile(beside):
            shutil.copyfile(beside, os.path.join(folder, name))


# ---- the command ---------------------------------------------------------------------------------


def shard_size(text):
    m = re.fullmatch(r"([0-9.]+)\s*(|[KMGT]i?B|B)", text, re.IGNORECASE)
    try:
        n = int(
            float(m[1])
            * (1024 if "I" in m[2].upper() else 1000)
            ** " KMGT".index((m[2].upper() + " ")[0].replace("B", " "))
        )
    except (TypeError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 5GB, 500MB or 2GiB") from None
    if n < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is too small: write 5GB, 500MB or 2GiB")
    return n


def parse_args(argv):
    p = argparse.ArgumentParser(
        description="Write a freshly initialised model directory in Hugging Face layout."
    )
    p.add_argument(
        "config", help="config.json of a family of docs/models.md, such as models/8b.json"
    )
    p.add_argument("out", help="directory to make")
    p.add_argument("--seed", type=int, default=0, help="seed of the values (default: 0)")
    p.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        help="dtype of the tensors (default: the config's torch_dtype, else bf16)",
    )
    p.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json to copy into the directory")
    p.add_argument(
        "--max-shard-size",
        type=shard_size,
        default="5GB",
        metavar="SIZE",
        help="largest file (default: 5GB)",
    )
    p.add_argument(
        "--overwrite", action="store_true", help="replace a model directory of this name"
    )
    return p.parse_args(argv)


def check_out(out, overwrite, need):
    parent = there = os.path.dirname(os.path.abspath(out))
    if os.path.lexists(out) and not os.path.isdir(out):
        raise BadInput(f"{out}: is a file: choose another name")
    if os.path.isdir(out) and any(not n.startswith(SAVE) for n in os.listdir(out)):
        if not overwrite:
            raise BadInput(
                f"{out}: is not empty: choose another name, or replace it with --overwrite"
            )
        if not any(
            os.path.isfile(os.path.join(out, p))
            for p in ("config.json", os.path.join(PENDING, "config.json"))
        ):
            raise BadInput(
                f"{out}: has no config.json and so is no model directory: choose another name"
            )
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    try:
        free = shutil.disk_usage(there).free
        if need > free:
            raise BadInput(
                f"{out}: needs {need / 1e9:.1f} GB of disk, and {free / 1e9:.1f} GB are free: free "
                "some, or choose another place"
            )
        os.makedirs(parent, exist_ok=True)
    except OSError as e:
        raise BadInput(f"{parent}: cannot be used: {e.strerror}") from None
    if there != parent:
        print(f"init_model: {out}: its parent {parent} did not exist and is made", file=sys.stderr)


def progress_printer(total):
    start, state = time.monotonic(), {"done": 0, "shown": time.monotonic()}
    live = sys.stderr.isatty()

    def progress(n):
        state["done"] += n
        now = time.monotonic()
        if now - state["shown"] >= (0.2 if live else 10) or (live and state["done"] == total):
            state["shown"] = now
            rate = state["done"] / max(now - start, 1e-9)
            left = (total - state["done"]) / max(rate, 1)
            line = f"  {state['done'] / 1e9:8.3f} of {total / 1e9:.3f} GB  {rate / 1e6:6.0f} MB/s  {left:5.0f} s left"
            print(
                ("\r" if live else "") + line, end="" if live else "\n", file=sys.stderr, flush=True
            )

    return progress, lambda: print(file=sys.stderr) if live else None


def run(args):
    cfg, sizes = load_config(args.config)
    if args.dtype is None:
        given = cfg.get("torch_dtype") or cfg.get("dtype")
        args.dtype = "fp32" if given == "float32" else "bf16"
    cfg.pop("dtype", None)
    cfg["torch_dtype"] = DTYPES[args.dtype][2]
    tokenizer = load_tokenizer(args.tokenizer, cfg) if args.tokenizer else None
    tensors = list(list_tensors(cfg, sizes))
    n = sum(math.prod(t.shape) for t in tensors)
    total = n * DTYPES[args.dtype][1]
    check_out(args.out, args.overwrite, total)
    try:
        stage = Stage(args.out)
    except OSError as e:
        raise BadInput(f"{args.out}: cannot be written: {e.strerror}") from None
    print(
        f"{args.out}: {cfg['architectures'][0]}, {n:,} parameters in {len(tensors)} tensors, "
        f"{args.dtype}, seed {args.seed}"
    )
    try:
        progress, end = progress_printer(total)
        files = write_model(stage.path, tensors, args, progress)
        end()
        write_json(os.path.join(stage.path, "config.json"), cfg)
        if args.tokenizer:
            write_tokenizer(stage.path, args.tokenizer, tokenizer)
        size = sum(e.stat().st_size for e in os.scandir(stage.path))
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the replacement is short: let it finish
        stage.commit()
    finally:
        stage.abort()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    print(
        f"{args.out}: {size:,} bytes in {len(files)} safetensors "
        f"file{'s' * (len(files) > 1)}{', with tokenizer' if tokenizer else ''}"
    )


SIGNALS = (signal.SIGINT, signal.SIGTERM)


def interrupted(signum, frame):
    raise KeyboardInterrupt


def main(argv=None):
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, interrupted)
    try:
        run(args)
    except BadInput as e:
        print(f"init_model: {e}", file=sys.stderr)
        return 2
    except Halfway as e:
        print(f"init_model: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(
            f"init_model: {e.filename or args.out}: {e.strerror or e}: no file was left",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("init_model: interrupted: no file was left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
