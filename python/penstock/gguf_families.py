"""The families that GGUF files have, for export and import: llama.cpp's architecture of each, and
what the loaders of some want of names, shapes and keys beside what all have. config() and
read_yarn() read what sizes() and yarn() write. place() lays tensors out for both."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ._lib import lib
from .files import DataError
from .gguf_tensor import NEGATIVE_EXP, Tensor
from .model import ModelConfig, Parameter

# Of each family: llama.cpp's architecture, and the class of transformers. Of several families with
# one architecture the first is what a file is taken for, unless Family.model_type() says otherwise.
# The models of "llama" have no windows there.
ARCHITECTURES = {
    "llama": ("LLAMA", "LlamaForCausalLM"),
    "mistral": ("LLAMA", "MistralForCausalLM"),
    "ministral": ("LLAMA", "MinistralForCausalLM"),
    "qwen2": ("QWEN2", "Qwen2ForCausalLM"),
    "qwen3": ("QWEN3", "Qwen3ForCausalLM"),
    "gemma2": ("GEMMA2", "Gemma2ForCausalLM"),
    "gemma3_text": ("GEMMA3", "Gemma3ForCausalLM"),
    "phi3": ("PHI3", "Phi3ForCausalLM"),
    "olmo2": ("OLMO2", "Olmo2ForCausalLM"),
    "olmo3": ("OLMO2", "Olmo3ForCausalLM"),
    "gemma": ("GEMMA", "GemmaForCausalLM"),
    "seed_oss": ("SEED_OSS", "SeedOssForCausalLM"),
    "exaone4": ("EXAONE4", "Exaone4ForCausalLM"),
    "hunyuan_v1_dense": ("HUNYUAN_DENSE", "HunYuanDenseV1ForCausalLM"),
    "glm4": ("GLM4", "Glm4ForCausalLM"),
    "granite": ("GRANITE", "GraniteForCausalLM"),
    "smollm3": ("SMOLLM3", "SmolLM3ForCausalLM"),
    "olmoe": ("OLMOE", "OlmoeForCausalLM"),
    "qwen3_moe": ("QWEN3MOE", "Qwen3MoeForCausalLM"),
    "mixtral": ("LLAMA", "MixtralForCausalLM"),
    "gpt_oss": ("GPT_OSS", "GptOssForCausalLM"),
    "deepseek_v2": ("DEEPSEEK2", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DEEPSEEK2", "DeepseekV3ForCausalLM"),
    "glm4_moe_lite": ("DEEPSEEK2", "Glm4MoeLiteForCausalLM"),
    "qwen3_next": ("QWEN3NEXT", "Qwen3NextForCausalLM"),
    "qwen3_5_text": ("QWEN35", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("QWEN35MOE", "Qwen3_5MoeForCausalLM"),
    "gemma4_text": ("GEMMA4", "Gemma4ForCausalLM"),
    "gemma4_unified_text": ("GEMMA4", "Gemma4UnifiedForCausalLM"),
    "ministral3": ("MISTRAL3", "Ministral3ForCausalLM"),
}


def flags(model: ModelConfig, flag: int) -> list[bool]:
    return [bool(model.layer_flags[i] & flag) for i in range(model.n_layers)]


class Family:
    """Of an architecture that is its row. `names`: llama.cpp's name of a parameter, both within a
    layer, where the package gguf has none."""

    names: dict[str, str] = {}
    always_head = False  # llama.cpp reads output.weight also where it is the embedding
    betas = False  # its loader reads those of yarn
    rounds_range = False  # it is written although llama.cpp rounds the ends of yarn's range
    # For import: what config() alone reads; RoPE on a part of a head, and by transformers 5's name
    has_experts = by_layer = own_heads = own_rope = False
    partial_rope = rope_parameters = False
    # Tensors of older converters, which are a parameter whole: of each tensor that they stand for.
    older: dict[str, str] = {}

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

    # ---- import ----------------------------------------------------------------------------------

    def model_type(self, keys, default: str) -> str:
        """transformers' model_type of the file's model. keys: import_config.Keys."""
        return default

    def config(self, keys, config: dict, notes: list[str]) -> None:
        """Add to config.json what the family has beside what all have; notes: for the user."""

    def read_yarn(self, keys, by: float, factor: float) -> dict:
        """What the file's attn_factor `by`, 1 where there is none, says in config.json."""
        usual = max(0.1 * math.log(max(factor, 1)) + 1, 1.0)
        return {} if abs(by - 1) < 1e-6 else {"attention_factor": by * usual}

    def unused(self, model: ModelConfig) -> set[str]:
        """Tensors that files may have and no layer reads."""
        return set()


class GptOss(Family):
    has_experts = True
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

    def config(self, keys, config, notes):
        """Alpha and limit of the gate are the graph's."""
        config |= _experts(keys, "num_local_experts", "intermediate_size")
        config["attention_bias"] = "blk.0.attn_q.bias" in keys.file.tensors
        config["swiglu_limit"] = 7.0
        config["sliding_window"] = keys.count("attention.sliding_window", 0) or None
        windows = bool(config["sliding_window"])
        config["layer_types"] = keys.layer_types(config["num_hidden_layers"], windows, 2)
        scaling = config["rope_scaling"] = config["rope_scaling"] or {"rope_type": "default"}
        if scaling.get("rope_type") == "yarn":
            config["rope_scaling"] = {"beta_fast": 32.0, "beta_slow": 1.0} | scaling
            config["rope_scaling"]["truncate"] = False
            notes.append("yarn's truncate is false, as gpt-oss has it: no key says so")

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
    has_experts = own_heads = own_rope = True
    older = dict.fromkeys(("attn_k_b.weight", "attn_v_b.weight"), "attn_kv_b.weight")
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

    def model_type(self, keys, default):
        """GLM-4.7-Flash computes what DeepSeek-V3 does. It has neither yarn nor groups. Without the
        key, the correction bias of sigmoid routing says it."""
        has_bias = any(name.endswith(".exp_probs_b.bias") for name in keys.file.tensors)
        if keys.count("expert_gating_func", 2 if has_bias else 1) != 2:
            return "deepseek_v2"
        plain = (keys.any("rope.scaling.type") or "none") == "none"
        plain &= keys.count("expert_group_count", 1) <= 1 and bool(self._q_rank(keys))
        return "glm4_moe_lite" if plain else "deepseek_v3"

    @staticmethod
    def _q_rank(keys) -> int | None:
        return keys.count("attention.q_lora_rank", 0) or None

    def config(self, keys, config, notes):
        kind, layers = config["model_type"], config["num_hidden_layers"]
        rope = keys.count("rope.dimension_count")
        key, value = (
            keys.count(f"attention.{x}_length_mla", 0) or keys.count(f"attention.{x}_length")
            for x in ("key", "value")
        )
        sparse = keys.layers_with("ffn_gate_inp.weight", layers)
        dense = (sparse + [True]).index(True)
        groups = keys.count("expert_group_count", 1), keys.count("expert_group_used_count", 1)
        config |= _experts(keys, "n_routed_experts", "moe_intermediate_size") | dict(
            num_key_value_heads=config["num_attention_heads"],
            attention_bias=False,
            q_lora_rank=self._q_rank(keys),
            kv_lora_rank=keys.count("attention.kv_lora_rank"),
            qk_nope_head_dim=key - rope,
            qk_rope_head_dim=rope,
            v_head_dim=value,
            n_shared_experts=keys.count("expert_shared_count"),
            n_group=groups[0],
            topk_group=groups[1],
            norm_topk_prob=keys.any("expert_weights_norm") is True,
            routed_scaling_factor=keys.number("expert_weights_scale", 0) or 1.0,
        )
        if kind == "glm4_moe_lite":
            config["mlp_layer_types"] = ["sparse" if s else "dense" for s in sparse]
            config["rope_parameters"] = dict(rope_type="default", rope_theta=keys.theta())
            notes.append(
                "it is taken for GLM-4.7-Flash, which the file does not tell from DeepSeek-V3"
            )
            return
        config |= dict(first_k_dense_replace=dense, rope_theta=keys.theta())
        config["rope_scaling"] = keys.scaling(config, rope)
        if kind == "deepseek_v2":
            grouped = 0 < groups[1] < groups[0]
            config["topk_method"] = "group_limited_greedy" if grouped else "greedy"

    def read_yarn(self, keys, by, factor):
        """yarn() the other way. Without both keys transformers' own factors hold."""
        log = 0.1 * math.log(max(factor, 1))
        multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0)
        whole = by * (1 + multiplier / 0.1 * log)
        if not multiplier and keys.any("rope.scaling.attn_factor") is None:
            return {}
        if not multiplier:
            by *= 1 + log
            whole = by
        if abs(whole - 1) < 1e-6 or log <= 0:
            return {"attention_factor": by} if abs(by - 1 - log) >= 1e-6 else {}
        mscales = [(x - 1) / log for x in (by * whole, whole)]
        return dict(zip(("mscale", "mscale_all_dim"), map(_decimal, mscales), strict=True))


class Delta(Family):
    """Gated delta-nets. `tiled`: llama.cpp has head h of v with head h % key heads of q and k, and
    not with head h // (value heads / key heads)."""

    def __init__(self, tiled: bool, sections: bool):
        self.tiled, self.sections = tiled, sections
        self.rope_parameters = sections  # of Qwen3.5
        self.older = (
            {}
            if sections
            else dict.fromkeys(("attn_qkv.weight", "attn_gate.weight"), "ssm_in.weight")
        )

    has_experts = partial_rope = True
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

    def config(self, keys, config, notes):
        """Which layers have delta-nets the tensors say: converters write full_attention_interval 4
        also where layer_types says otherwise."""
        values, types = keys.count("ssm.time_step_rank"), ("full_attention", "linear_attention")
        types = [types[has] for has in keys.layers_with("ssm_a", config["num_hidden_layers"])]
        config |= dict(
            layer_types=types,
            linear_conv_kernel_dim=keys.count("ssm.conv_kernel"),
            linear_num_key_heads=keys.count("ssm.group_count"),
            linear_num_value_heads=values,
            linear_key_head_dim=keys.count("ssm.state_size"),
            linear_value_head_dim=keys.count("ssm.inner_size") // max(values, 1),
        )
        if keys.count("expert_count", 0):
            config |= _experts(keys, "num_experts", "moe_intermediate_size")
            shared = keys.count("expert_shared_feed_forward_length")
            config["shared_expert_intermediate_size"] = shared
            if not self.sections:
                config |= dict(norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1)
        sections = keys.any("rope.dimension_sections")
        if (
            self.sections
            and isinstance(sections, list)
            and "factor" not in config["rope_parameters"]
        ):
            more = dict(mrope_section=sections[:3], mrope_interleaved=True)
            config["rope_parameters"] |= more

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
            return [(here, dict(pick_columns=one, change=NEGATIVE_EXP))]
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
    has_experts = by_layer = own_heads = own_rope = True
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

    def model_type(self, keys, default):
        """Both compute the same. Of models whose layers share keys, transformers 5.24 opens as the
        first only those with embeddings of each layer."""
        shares = keys.count("attention.shared_kv_layers", 0)
        plain = shares and not keys.count("embedding_length_per_layer_input", 0)
        unified = plain or "tokenizer.ggml.suppress_tokens" in keys.file.keys
        return "gemma4_unified_text" if unified else default

    def config(self, keys, config, notes):
        layers, stored = config["num_hidden_layers"], keys.file.tensors
        window = keys.count("attention.sliding_window", 0)
        types = keys.layer_types(layers, bool(window), 6)
        shared = keys.count("attention.shared_kv_layers", 0)
        full = [i for i in range(layers) if types[i] == "full_attention"]
        slides = [i for i in range(layers) if types[i] != "full_attention"]
        same_keys = any(
            i < layers - shared and f"blk.{i}.attn_v.weight" not in stored for i in full
        )
        whole = keys.count("attention.key_length")
        dim = keys.count("attention.key_length_swa", whole)
        widths = [keys.rows(f"blk.{i}.ffn_gate.weight") for i in (0, max(layers, 1) - 1)]

        def heads(of, width):
            """As the first of these layers has them, of which the key may say otherwise."""
            return keys.rows(f"blk.{of[0]}.attn_k.weight") // max(width, 1) if of else 0

        config |= dict(
            head_dim=dim,
            global_head_dim=whole,
            num_key_value_heads=heads(slides, dim) or heads(full, whole),
            num_global_key_value_heads=heads(full, whole) if same_keys else None,
            attention_k_eq_v=same_keys,
            num_kv_shared_layers=shared,
            intermediate_size=widths[0],
            use_double_wide_mlp=widths[0] != widths[1],
            hidden_size_per_layer_input=keys.count("embedding_length_per_layer_input", 0),
            sliding_window=window or None,
            layer_types=types,
            final_logit_softcapping=keys.number("final_logit_softcapping", 30.0) or None,
            enable_moe_block=keys.count("expert_count", 0) > 0,
        )
        if config["model_type"] == "gemma4_unified_text":
            del config["enable_moe_block"]
        if config["hidden_size_per_layer_input"]:
            table = stored.get("per_layer_token_embd.weight")
            config["vocab_size_per_layer_input"] = table.shape[0] if table else config["vocab_size"]
        if config.get("enable_moe_block"):
            config |= _experts(keys, "num_experts", "moe_intermediate_size", "top_k_experts")
        config["rope_parameters"] = dict(
            full_attention=self._read_factors(keys, whole),
            sliding_attention=dict(
                rope_type="default", rope_theta=keys.number("rope.freq_base_swa", 10000.0)
            ),
        )

    @staticmethod
    def _read_factors(keys, whole: int) -> dict:
        """factors() the other way."""
        freqs = keys.factors("rope_freqs.weight", whole) or [1.0] * (whole // 2)
        turned = sum(x < 1e20 for x in freqs)
        if not turned or freqs != [freqs[0]] * turned + [1e30] * (len(freqs) - turned):
            raise DataError(
                f"{keys.path}: tensor rope_freqs.weight is not one factor for the first pairs of a "
                "head and 1e30 for the others"
            )
        part = 2 * turned / whole
        if math.floor(part * whole / 2) < turned:  # by a rounding
            part = (2 * turned + 1) / whole
        rope = dict(rope_type="proportional", rope_theta=keys.theta(), partial_rotary_factor=part)
        return rope if freqs[0] == 1 else rope | {"factor": freqs[0]}

    def unused(self, model):
        """Files have keys and values of layers too that read those of others."""
        shared = [i for i, s in enumerate(flags(model, lib.PS_LAYER_SHARED_KV)) if s]
        names = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
        return {f"blk.{i}.{name}" for i in shared for name in names}

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

    def model_type(self, keys, default):
        """llama.cpp's converter writes Mistral Small 3.1 so, which has no such scale."""
        return default if self._beta(keys) else "mistral"

    @staticmethod
    def _beta(keys) -> float:
        return keys.number("attention.temperature_scale", 0)

    def config(self, keys, config, notes):
        config["sliding_window"] = None
        if config["model_type"] == "mistral":
            return
        rope = dict(rope_theta=config.pop("rope_theta"))
        rope |= config.pop("rope_scaling") or {"rope_type": "default"}
        original = keys.count("rope.scaling.original_context_length")
        rope |= dict(llama_4_scaling_beta=self._beta(keys))
        config["rope_parameters"] = rope | dict(original_max_position_embeddings=original)

    def read_yarn(self, keys, by, factor):
        """llama.cpp's converter writes mscale_all_dim, and mscale is 1."""
        over = keys.number("rope.scaling.yarn_log_multiplier", 0)
        if not over:
            return super().read_yarn(keys, by, factor)
        return dict(mscale=1.0, mscale_all_dim=over)


def _windows(model: ModelConfig) -> dict:
    """Loaders that want the length and the pattern also where no layer has a window."""
    has = flags(model, lib.PS_LAYER_WINDOW)
    return dict(sliding_window=model.window or model.max_positions, sliding_window_pattern=has)


def _experts(keys, count: str, dim: str, used: str = "num_experts_per_tok") -> dict:
    """Their numbers and width, by their names in config.json."""
    found = dict(expert_count=count, expert_used_count=used, expert_feed_forward_length=dim)
    return {name: keys.count(key) for key, name in found.items()}


def _decimal(x: float) -> float:
    """The shortest decimal near x, which comes from numbers in fp32."""
    for digits in range(1, 9):
        short = float(f"{x:.{digits}g}")
        if abs(short - x) <= 2e-6 * abs(x):
            break
    return short


class Partial(Family):
    partial_rope = True


ROW = Family()
FAMILIES = {
    "PHI3": Partial(),
    "GLM4": Partial(),
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
