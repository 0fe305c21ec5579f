"""Architectures of llama.cpp that are more than a row of penstock.export_gguf's tables: what their
loaders want of names, shapes and keys beside what all have, and what their graphs cannot compute."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ._lib import lib
from .gguf_tensor import Tensor
from .model import ModelConfig, Parameter


def flags(model: ModelConfig, flag: int) -> list[bool]:
    return [bool(model.layer_flags[i] & flag) for i in range(model.n_layers)]


class Family:
    """Of an architecture that is its row. `names`: llama.cpp's name of a parameter, both within a
    layer, where the package gguf has none."""

    names: dict[str, str] = {}
    always_head = False  # llama.cpp reads output.weight also where it is the embedding
    betas = False  # its loader reads those of yarn
    rounds_range = False  # it is written although llama.cpp rounds the ends of yarn's range

    def refusal(self, model: ModelConfig, config: dict) -> str | None:
        """What llama.cpp's graph computes in another way than the model."""

    def note(self, model: ModelConfig) -> str | None:
        """What it computes nearly as the model, for the user."""

    def sizes(self, model: ModelConfig, config: dict) -> dict:
        """Keys, by the methods add_*() of gguf.GGUFWriter, or with a dot before their name."""
        return {}

    def place(self, model: ModelConfig, p: Parameter, name: str) -> list[tuple[str, dict]]:
        """What the file has of a layer's parameter, whose name there is `name`: names there, and
        fields of Tensor. Of an expert's parameter: what it has of one. []: all of it."""
        return []

    def yarn(self, model: ModelConfig, by: float) -> tuple[float, float | None]:
        """The keys attn_factor and yarn_log_multiplier with which cosines and sines are multiplied
        by `by`. llama.cpp multiplies by 1 + 0.1 ln(factor) itself."""
        return by / max(0.1 * math.log(model.rope.factor) + 1, 1.0), None


class GptOss(Family):
    names = {
        "self_attn.sinks": "attn_sinks.weight",
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    }
    always_head = True
    rounds_range = True

    def refusal(self, model, config):
        if (model.glu_alpha, model.glu_limit) != (np.float32(1.702), 7.0):
            return (
                f"swiglu_alpha is {model.glu_alpha:g} and swiglu_limit {model.glu_limit:g}: "
                "llama.cpp has 1.702 and 7"
            )

    def sizes(self, model, config):
        return _windows(model)

    def place(self, model, p, name):
        """A gate's row stands before its up's."""
        if name == "mlp.experts.gate_up_proj":
            rows, shape = np.arange(p.shape[0]), (p.shape[0] // 2, p.shape[1])
            pick = [dict(shape=shape, pick_rows=rows[i::2]) for i in (0, 1)]
            return list(zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), pick, strict=True))
        if name == "mlp.experts.gate_up_proj_bias":
            n = p.shape[1]
            same = dict(shape=(p.shape[0], n // 2), source_columns=n)
            pick = [dict(same, pick_columns=np.arange(i, n, 2)) for i in (0, 1)]
            return list(zip(("ffn_gate_exps.bias", "ffn_up_exps.bias"), pick, strict=True))
        return []


class DeepSeek(Family):
    """MLA as one key of kv_lora_rank + qk_rope_head_dim elements for all heads: kv_b_proj is cut in
    two, of which the keys' is transposed."""

    names = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
    # llama.cpp takes these for models whose q has one projection, by their layers and vocabulary.
    lite = ((26, None), (27, None), (48, 128256))

    def refusal(self, model, config):
        experts = flags(model, lib.PS_LAYER_EXPERTS)
        if not model.interleaved_rope:
            return "rope_interleave is false: llama.cpp's RoPE turns neighbours"
        if experts != sorted(experts):
            dense = [i for i, e in enumerate(experts) if not e]
            return f"layers {dense} have no experts: in llama.cpp the first layers alone have none"
        if model.n_experts and (not model.shared_dim or model.shared_dim % model.expert_dim):
            return (
                f"shared experts have {model.shared_dim} rows, and the others {model.expert_dim}: "
                "llama.cpp has a whole number of shared ones, at least one"
            )
        if self._groups(model) and not model.router_sigmoid:
            return (
                "topk_method is group_limited_greedy: llama.cpp chooses groups by their two "
                "best experts, and not by one"
            )
        if model.n_experts and model.n_expert_groups >= model.n_experts:
            return (
                f"n_group is {model.n_expert_groups} of {model.n_experts} experts: llama.cpp needs "
                "two or more in a group"
            )
        layers = (model.n_layers, None), (model.n_layers, model.vocab_size)
        if model.q_rank and any(of in self.lite for of in layers):
            return (
                f"q_lora_rank is {model.q_rank}: llama.cpp has none for {model.n_layers} layers"
                + (f" and vocab_size {model.vocab_size}" if model.n_layers == 48 else "")
            )

    def note(self, model):
        if abs(model.norm_eps / 1e-6 - 1) > 1e-5:
            return (
                f"rms_norm_eps is {model.norm_eps:g}, and llama.cpp has it in the norms of latents "
                "too, where the model has 1e-6: its logits differ a little"
            )

    @staticmethod
    def _groups(model) -> bool:
        return 0 < model.n_groups_used < model.n_expert_groups

    def sizes(self, model, config):
        key = model.kv_rank + model.rope.rotary_dim
        sizes = dict(
            head_count_kv=1,
            key_length=key,
            value_length=model.kv_rank,
            key_length_mla=model.head_dim,
            value_length_mla=model.value_dim,
            q_lora_rank=model.q_rank,
            kv_lora_rank=model.kv_rank,
            leading_dense_block_count=flags(model, lib.PS_LAYER_EXPERTS).count(False),
            expert_feed_forward_length=model.expert_dim or model.ffn_dim,
            expert_shared_count=model.shared_dim // model.expert_dim if model.n_experts else 0,
            expert_weights_scale=model.router_scale or 1.0,
            expert_weights_norm=bool(model.norm_topk_prob),
        )
        sizes[".expert_gating_func"] = 2 if model.router_sigmoid else 1  # sigmoid, softmax
        if self._groups(model):
            sizes["expert_group_count"] = model.n_expert_groups
            sizes["expert_group_used_count"] = model.n_groups_used
        return sizes

    def place(self, model, p, name):
        if name != "self_attn.kv_b_proj.weight":
            return []
        heads, rank, value = model.n_heads, model.kv_rank, model.value_dim
        key = p.shape[0] // heads - value
        rows = np.arange(p.shape[0]).reshape(heads, key + value)
        keys = dict(shape=(heads, rank, key), pick_rows=rows[:, :key], transposed=True)
        values = dict(shape=(heads, value, rank), pick_rows=rows[:, key:].ravel())
        return [
            ("attn_k_b.weight", dict(keys, parts=(p.name,) * heads)),
            ("attn_v_b.weight", values),
        ]

    def yarn(self, model, by):
        """With a multiplier m other than 0 llama.cpp's graph has cosines and sines times
        attn_factor, and scores times attn_factor^2 (1 + 0.1 m ln(factor))^2 / sqrt(head_dim). The
        file has 0.1 m."""
        log = 0.1 * math.log(model.rope.factor)
        scale = model.attention_scale * math.sqrt(model.head_dim) or 1.0
        by_key = math.sqrt(scale) / by - 1
        if abs(by_key) < 1e-7 or log <= 0:
            return super().yarn(model, by)
        return by, 0.1 * by_key / log


class Delta(Family):
    """Gated delta-nets. `tiled`: llama.cpp has head h of v with head h % key heads of q and k, and
    not with head h // (value heads / key heads)."""

    def __init__(self, tiled: bool, sections: bool):
        self.tiled, self.sections = tiled, sections

    names = {
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
        "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    }

    def refusal(self, model, config):
        dense = [i for i, e in enumerate(flags(model, lib.PS_LAYER_EXPERTS)) if not e]
        if model.n_experts and dense:
            return f"layers {dense} have no experts: llama.cpp has them in all layers"
        if model.n_experts and not model.norm_topk_prob:
            return "norm_topk_prob is False: llama.cpp has True"
        if model.linear_key_dim != model.linear_value_dim:
            return (
                f"linear_key_head_dim is {model.linear_key_dim} and linear_value_head_dim "
                f"{model.linear_value_dim}: llama.cpp has one for both"
            )
        if abs(model.norm_eps / 1e-6 - 1) > 1e-5:
            return (
                f"rms_norm_eps is {model.norm_eps:g}: llama.cpp has it in the norms of a delta-net's "
                "q and k too, where the model has 1e-6"
            )

    def sizes(self, model, config):
        linear = flags(model, lib.PS_LAYER_LINEAR)
        sizes = dict(
            ssm_conv_kernel=model.linear_conv_width,
            ssm_state_size=model.linear_key_dim,
            ssm_group_count=model.linear_key_heads,
            ssm_time_step_rank=model.linear_value_heads,
            ssm_inner_size=model.linear_value_dim * model.linear_value_heads,
        )
        sizes[".attention.recurrent_layers"] = linear
        for every in range(1, model.n_layers + 1):  # for a llama.cpp that has no such key yet
            if linear == [(i + 1) % every != 0 for i in range(model.n_layers)]:
                sizes["full_attention_interval"] = every
        if model.n_experts:
            sizes["expert_shared_feed_forward_length"] = model.shared_dim
        if self.sections:  # of text they all have the same positions
            rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
            n = (model.rope.rotary_dim or model.head_dim) // 2
            thirds = [(n + 2) // 3, (n + 1) // 3, n // 3]
            sizes["rope_dimension_sections"] = [*(rope.get("mrope_section") or thirds), 0]
        return sizes

    def _tiled(self, model, size: int) -> np.ndarray | None:
        """The order of the heads of v, which have so many rows."""
        keys, values = model.linear_key_heads, model.linear_value_heads
        if not self.tiled or keys == values:
            return None
        return np.arange(values * size).reshape(keys, -1, size).swapaxes(0, 1).ravel()

    def place(self, model, p, name):
        here = self.names.get(name)
        if p.role == "norm" and name != "linear_attn.norm.weight":
            return [("", dict(offset=1.0))]
        if here == "ffn_gate_inp_shexp.weight":
            return [(here, dict(shape=p.shape[1:]))]
        what = name.removeprefix("linear_attn.")
        if what == name:
            return []
        keys, size = model.linear_key_heads * model.linear_key_dim, model.linear_value_dim
        one, whole = self._tiled(model, 1), self._tiled(model, size)
        if what in ("in_proj_a.weight", "in_proj_b.weight"):
            return [("", dict(pick_rows=one))]
        if what == "A_log":
            return [(here, dict(pick_columns=one, change=lambda x: -np.exp(x)))]
        if what == "dt_bias":
            return [(here, dict(pick_columns=one))]
        if what == "in_proj_z.weight":
            return [("", dict(pick_rows=whole))]
        if what == "out_proj.weight":
            return [("", dict(pick_columns=whole))]
        if what == "in_proj_qkvz.weight":
            return _qkvz(model, p)
        if what in ("in_proj_qkv.weight", "conv1d.weight"):
            rows = None if whole is None else np.r_[: 2 * keys, 2 * keys + whole]
            return [("", dict(shape=(p.shape[0], p.shape[-1]), pick_rows=rows))]
        return []


def _qkvz(model: ModelConfig, p: Parameter) -> list[tuple[str, dict]]:
    """Qwen3-Next has q, k, v and z head by head of q; llama.cpp all of q, of k and of v, and z."""
    key, heads = model.linear_key_dim, model.linear_key_heads
    value = model.linear_value_dim * model.linear_value_heads // heads
    rows = np.arange(p.shape[0]).reshape(heads, -1)
    q, k, v, z = np.split(rows, np.cumsum([key, key, value]), 1)
    qkv, z = np.concatenate([x.ravel() for x in (q, k, v)]), z.ravel()
    return [
        (name, dict(shape=(len(rows), p.shape[1]), pick_rows=rows))
        for name, rows in (("attn_qkv.weight", qkv), ("attn_gate.weight", z))
    ]


class Gemma4(Family):
    names = {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_proj.weight": "ffn_gate_exps.weight",
        "experts.up_proj.weight": "ffn_up_exps.weight",
    }

    def refusal(self, model, config):
        window = flags(model, lib.PS_LAYER_WINDOW)
        own = model.n_layers - sum(flags(model, lib.PS_LAYER_SHARED_KV))
        if own < 2:
            return f"layers with their own keys and values: {own}, and llama.cpp needs two"
        for i in range(own, model.n_layers):
            last = max(j for j in range(own) if window[j] == window[i])
            if last != (there := own - (2 if window[i] else 1)):
                return (
                    f"layer {i} has the keys and values of layer {last}: llama.cpp takes those of "
                    f"layer {there}"
                )

    def sizes(self, model, config):
        whole = model.global_head_dim or model.head_dim
        shared = flags(model, lib.PS_LAYER_SHARED_KV)
        sizes = dict(
            shared_kv_layers=sum(shared),
            embedding_length_per_layer_input=model.per_layer_dim,
            key_length=whole,
            value_length=whole,
            key_length_swa=model.head_dim,
            value_length_swa=model.head_dim,
            rope_dimension_count=whole,
            rope_dimension_count_swa=model.head_dim,
            rope_freq_base_swa=model.local_rope_theta,
            final_logit_softcapping=model.logit_softcap,  # without the key llama.cpp has 30
        )
        if model.double_wide_mlp:
            sizes["feed_forward_length"] = [model.ffn_dim * (2 if s else 1) for s in shared]
        if model.global_kv_heads:
            wide = flags(model, lib.PS_LAYER_GLOBAL)
            sizes["head_count_kv"] = [
                model.global_kv_heads if w else model.n_kv_heads for w in wide
            ]
        return sizes | _windows(model)

    @staticmethod
    def factors(model: ModelConfig) -> Iterator[Tensor]:
        """What the frequencies of layers without windows are divided by. Proportional RoPE leaves
        the last pairs of a head as they are."""
        if not all(flags(model, lib.PS_LAYER_WINDOW)):
            n = (model.global_head_dim or model.head_dim) // 2
            turned = model.rope.rotary_dim // 2 if model.rope.rotary_dim else n
            values = np.full(n, 1e30, np.float32)
            values[:turned] = model.rope.factor or 1.0
            yield Tensor("rope_freqs.weight", values.shape, "F32", values=values)


class Mistral3(Family):
    betas = True

    def sizes(self, model, config):
        return dict(attn_temperature_scale=model.position_beta) if model.position_beta else {}


def _windows(model: ModelConfig) -> dict:
    """Loaders that want the length and the pattern also where no layer has a window."""
    has = flags(model, lib.PS_LAYER_WINDOW)
    return dict(sliding_window=model.window or model.max_positions, sliding_window_pattern=has)


ROW = Family()
FAMILIES = {
    "GPT_OSS": GptOss(),
    "DEEPSEEK2": DeepSeek(),
    "QWEN3NEXT": Delta(tiled=False, sections=False),
    "QWEN35": Delta(tiled=True, sections=True),
    "QWEN35MOE": Delta(tiled=True, sections=True),
    "GEMMA4": Gemma4(),
    "MISTRAL3": Mistral3(),
}


def family_of(arch: str) -> Family:
    return FAMILIES.get(arch, ROW)
