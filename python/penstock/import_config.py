"""The config.json of the model in a GGUF file: what penstock.export_gguf writes, read back, and what
llama.cpp's converter writes."""

from __future__ import annotations

import math

import numpy as np

from .export_gguf import EVERY, NO_ROPE_EVERY, OFFSET, llama3_factors
from .files import DataError
from .gguf_families import ARCHITECTURES, ROW, family_of
from .gguf_file import GgufFile

# Text models of vision-language models, whose images need another file: on text they compute what
# these architectures do.
TEXT_OF = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
OLMO3 = "olmo3"  # "olmo2" with windows
MIXTRAL = "mixtral"  # "llama" with experts
WITH_EXPERTS = ("llama", "olmoe", "qwen3moe")  # beside those of families of their own
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_PATTERN = {
    "gemma2": 2,
    "gemma3": 6,
    "exaone4": EVERY,
    "olmo2": EVERY,
}  # each so manieth layer has no window, where no key says
_LLAMA3_LENGTHS = [8192, *(1 << i for i in range(4, 21) if i != 13)]


class Keys:
    """The keys of the file's architecture, each of the kind that is wanted. arch: llama.cpp's name
    of it, prefix: what the file's keys begin with, architecture: the name in ARCHITECTURES."""

    def __init__(self, file: GgufFile):
        self.file, self.path = file, file.path
        self.prefix = file.keys.get("general.architecture")
        text = isinstance(self.prefix, str)
        self.arch = TEXT_OF.get(self.prefix, self.prefix) if text else None
        known = {file.architecture_name(arch): arch for arch, _ in ARCHITECTURES.values()}
        known.pop(None, None)  # those that this package gguf does not know
        if self.arch not in known:
            raise DataError(
                f"{self.path}: general.architecture is {str(self.prefix)[:40]!r}: what is imported "
                f"is {', '.join([*known, *TEXT_OF])}"
            )
        self.architecture = known[self.arch]
        self.family = family_of(self.architecture)

    def number(self, name: str, default=None, kinds=(int, float)):
        key = f"{self.prefix}.{name}"
        value = self.file.keys.get(key, default)
        if value is None:
            raise DataError(f"{self.path}: the key {key} is missing")
        if isinstance(value, list) and value and (value == value[:1] * len(value)):
            value = value[0]  # a number a layer, all the same
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            raise DataError(f"{self.path}: the key {key} is {str(value)[:60]}: a number is needed")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default, (int,))
        if value < 0:
            raise DataError(f"{self.path}: the key {self.prefix}.{name} is {value}: it is negative")
        return value

    def any(self, name: str):
        return self.file.keys.get(f"{self.prefix}.{name}")

    def layer_types(self, layers: int, windows: bool, every: int) -> list[str]:
        """every: each so manieth layer has no window, where no key says."""
        name = "attention.sliding_window_pattern"
        pattern = self.any(name)
        pattern = every if pattern is None else pattern
        if isinstance(pattern, int) and not isinstance(pattern, bool) and 0 < pattern:
            pattern = [(i + 1) % pattern != 0 for i in range(min(layers, 1 << 16))]
        if not isinstance(pattern, list) or len(pattern) != layers:
            raise DataError(
                f"{self.path}: {self.prefix}.{name} does not say of {layers} layers which have a "
                "window"
            )
        return ["sliding_attention" if w and windows else "full_attention" for w in pattern]

    def layers_with(self, name: str, layers: int) -> list[bool]:
        """Which layers have a tensor of that name."""
        stored = self.file.tensors
        return [f"blk.{i}.{name}" in stored for i in range(min(layers, 1 << 16))]

    def rows(self, name: str) -> int:
        """Of a matrix of the file."""
        if name not in self.file.tensors:
            raise DataError(f"{self.path}: tensor {name} is missing")
        return self.file.tensors[name].shape[0]

    def theta(self) -> float:
        return self.number("rope.freq_base", 10000.0)

    def scaling(self, config: dict, turned: int) -> dict | None:
        """rope_scaling of config.json. turned: elements of a head that RoPE turns."""
        return _scaling(self, config, turned)

    def factors(self, name: str, turned: int) -> list[float] | None:
        return _factors(self, name, turned)


def make_config(file: GgufFile) -> tuple[dict, list[str], str]:
    """config.json's content, notes, and the architecture in ARCHITECTURES. What is out of range
    ps_model_config_read refuses."""
    keys = Keys(file)
    family, notes = keys.family, []
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise DataError(f"{file.path}: tensor token_embd.weight is missing")
    n_experts = keys.count("expert_count", 0)
    if n_experts and keys.arch not in WITH_EXPERTS and not family.has_experts:
        raise DataError(
            f"{file.path}: has {n_experts} experts: of {keys.arch} they are not supported"
        )
    model_type = _model_type(keys, bool(n_experts))
    dim, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    gelu = keys.architecture in (*OFFSET, "GEMMA4")
    config = {
        "architectures": [ARCHITECTURES[model_type][1]],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": dim,
        "num_hidden_layers": _layers(keys, notes),
        "num_attention_heads": heads,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation" if gelu else "hidden_act": "gelu_pytorch_tanh" if gelu else "silu",
        "tie_word_embeddings": _is_tied(file),
        "attention_dropout": 0.0,
    }
    if not family.by_layer:  # else config() reads them
        narrow = keys.any("expert_feed_forward_length") if family.has_experts else None
        config["intermediate_size"] = keys.count("feed_forward_length", narrow)
        config["num_key_value_heads"] = keys.count("attention.head_count_kv", heads)
    head_dim = 0 if family.own_heads else _add_heads(keys, config, gelu or family is not ROW)
    if (n_experts or keys.arch in ("olmoe", "qwen3moe")) and not family.has_experts:
        _add_experts(keys, config)
    if family is ROW or keys.arch in ("phi3", "glm4"):
        _add_family(keys, config, head_dim, notes)
    if not family.own_rope:
        _add_rope(keys, config, head_dim)
    _add_ids(file, config)
    family.config(keys, config, notes)
    return config, notes, keys.architecture


def _model_type(keys: Keys, has_experts: bool) -> str:
    if has_experts and keys.arch == "llama":
        return MIXTRAL
    if keys.arch == "olmo2" and keys.count("attention.sliding_window", 0):
        return OLMO3
    first = next(kind for kind, (arch, _) in ARCHITECTURES.items() if arch == keys.architecture)
    return keys.family.model_type(keys, first)


def _layers(keys: Keys, notes: list[str]) -> int:
    """Without those that predict further tokens, which come last."""
    layers, more = keys.count("block_count"), keys.count("nextn_predict_layers", 0)
    if more:
        notes.append(
            f"layers that predict further tokens are left out: the last {more} of {layers}"
        )
    if more >= layers > 0:
        raise DataError(
            f"{keys.path}: {keys.prefix}.nextn_predict_layers is {more}, and block_count {layers}: "
            "no layer is left"
        )
    return layers - more


def _add_heads(keys: Keys, config: dict, always: bool) -> int:
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = keys.count("attention.key_length", dim // max(heads, 1))
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise DataError(f"{keys.path}: keys and values of a head have different lengths")
    own = ("qwen3", "qwen3moe", "seed_oss", "hunyuan-dense", "glm4")  # with a default of their own
    if (always and keys.arch != "phi3") or keys.arch in own or head_dim * heads != dim:
        config["head_dim"] = head_dim
    return head_dim


def _is_tied(file: GgufFile) -> bool:
    """The head is not in the file, or it is the embedding once more, as OLMo 2 has it there."""
    head, embedding = file.tensors.get("output.weight"), file.tensors["token_embd.weight"]
    if head is None:
        return True
    same = head.kind == embedding.kind and head.shape == embedding.shape
    return same and np.array_equal(head.data, embedding.data)


def _add_family(keys: Keys, config: dict, head_dim: int, notes: list[str]) -> None:
    layers, arch = config["num_hidden_layers"], keys.arch
    window = keys.count("attention.sliding_window", 0)
    if arch in ("gemma2", "gemma3"):
        config["layer_types"] = keys.layer_types(layers, bool(window), _PATTERN[arch])
        config["sliding_window"] = window or None
        largest = layers == (46 if arch == "gemma2" else 62)  # as export_gguf._check_shape()
        width = config["hidden_size"] // max(config["num_attention_heads"], 1)
        config["query_pre_attn_scalar"] = width if largest else head_dim
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        for name, default in zip(caps, (50.0, 30.0), strict=True):
            cap = keys.number(name, default if arch == "gemma2" else 0)
            config[name] = cap or None
    elif arch == "exaone4" or (arch == "olmo2" and window):
        config["layer_types"] = keys.layer_types(layers, bool(window), _PATTERN[arch])
        config["sliding_window"] = window or None
    elif arch == "phi3" and window:
        config["sliding_window"] = window
    elif arch == "phi3":
        config["sliding_window"] = None
    elif window:
        notes.append(
            f"{keys.prefix}.attention.sliding_window is {window}: left out, as llama.cpp does"
        )
    if arch == "gemma3":
        config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10000.0)
    if arch in ("seed_oss", "glm4"):
        config["attention_bias"] = "blk.0.attn_q.bias" in keys.file.tensors
    if arch == "seed_oss":
        config |= {"attention_out_bias": False, "residual_dropout": 0.0}
    if arch == "granite":
        for name, key in (
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("attention_multiplier", "attention.scale"),
            ("logits_scaling", "logit_scale"),
        ):
            config[name] = keys.number(key)
    if arch == "smollm3" and layers <= 1 << 16:
        config["no_rope_layers"] = [int((i + 1) % NO_ROPE_EVERY != 0) for i in range(layers)]
        config["no_rope_layer_interval"] = NO_ROPE_EVERY


def _add_experts(keys: Keys, config: dict) -> None:
    """llama.cpp's graph of an architecture says whether weights are divided by their sum."""
    qwen, mixtral = keys.arch == "qwen3moe", keys.arch == "llama"
    config["num_experts_per_tok"] = keys.count("expert_used_count")
    config["num_local_experts" if mixtral else "num_experts"] = keys.count("expert_count")
    dim = keys.count("expert_feed_forward_length", None if qwen else config["intermediate_size"])
    config["moe_intermediate_size" if qwen else "intermediate_size"] = dim
    if not mixtral:
        config["norm_topk_prob"] = qwen


def _add_ids(file: GgufFile, config: dict) -> None:
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        i = file.keys.get(f"tokenizer.ggml.{key}_token_id")
        whole = isinstance(i, int) and not isinstance(i, bool) and 0 <= i < config["vocab_size"]
        config[f"{name}_token_id"] = i if whole else None


# ---- RoPE ----------------------------------------------------------------------------------------


def _add_rope(keys: Keys, config: dict, head_dim: int) -> None:
    config["rope_theta"] = keys.theta()
    turned = keys.count("rope.dimension_count", head_dim)
    if keys.family.partial_rope and 0 < turned < head_dim:
        config["partial_rotary_factor"] = turned / head_dim
    elif turned != head_dim:
        raise DataError(
            f"{keys.path}: {keys.prefix}.rope.dimension_count is {turned}, and a head has "
            f"{head_dim} elements: RoPE must turn all of them"
        )
    config["rope_scaling"] = _scaling(keys, config, turned)
    if keys.family.rope_parameters:
        rope = config.pop("rope_scaling") or {"rope_type": "default"}
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in config:
                rope[name] = config.pop(name)
        config["rope_parameters"] = rope


def _scaling(keys: Keys, config: dict, turned: int) -> dict | None:
    kind = keys.any("rope.scaling.type") or "none"
    freqs, long, short = (_factors(keys, name, turned) for name in FACTORS)
    if freqs is not None:
        return _llama3(keys, config, freqs)
    by = keys.number("rope.scaling.attn_factor", 1.0)
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    if long is not None and short is not None:
        config["original_max_position_embeddings"] = original
        scaling = {"type": "longrope", "short_factor": short, "long_factor": long}
        ratio = config["max_position_embeddings"] / max(original, 1)
        usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 < original else 1
        return scaling if abs(by / usual - 1) < 1e-6 else scaling | {"attention_factor": by}
    if kind in ("none", "linear") and not keys.any("rope.scaling.factor"):
        return None
    if kind == "linear":
        name = "type" if keys.arch == "olmo2" else "rope_type"  # all that transformers 4.57 takes
        return {name: "linear", "factor": float(keys.number("rope.scaling.factor"))}
    if kind == "yarn":
        factor = float(keys.number("rope.scaling.factor"))
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if keys.any(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = float(keys.number(f"rope.scaling.yarn_{name}"))
        if keys.any("rope.scaling.yarn_attn_factor") is not None:
            scaling["attention_factor"] = keys.number("rope.scaling.yarn_attn_factor")
            return scaling
        return scaling | keys.family.read_yarn(keys, by, factor)
    if kind == "none":
        return None
    raise DataError(
        f"{keys.path}: {keys.prefix}.rope.scaling.type is {str(kind)[:40]!r}, which is not "
        "supported"
    )


def _factors(keys: Keys, name: str, turned: int) -> list[float] | None:
    tensor = keys.file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.shape != (turned // 2,) or tensor.kind.name != "F32":
        raise DataError(
            f"{keys.path}: tensor {name} is {tensor.kind.name} of shape {[*tensor.shape]}: F32 of "
            f"shape [{turned // 2}] is needed"
        )
    return [float(str(x)) for x in keys.file.rows(tensor, slice(None)).ravel()]


def _llama3(keys: Keys, config: dict, freqs: list[float]) -> dict:
    """The parameters that give these factors, to the bit or nearly. A file has the factors alone."""
    given, factor = np.array(freqs, np.float32), max(freqs)
    for original in _LLAMA3_LENGTHS:
        made = llama3_factors(config["rope_theta"], factor, 1.0, 4.0, original, 2 * len(freqs))
        if np.allclose(made, given, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise DataError(
        f"{keys.path}: the factors of {FACTORS[0]} are those of no llama3 scaling with "
        "low_freq_factor 1 and high_freq_factor 4"
    )
