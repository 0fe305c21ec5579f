"""What a GGUF file says of a model: llama.cpp's names, metadata and tokenizer.

describe() gives the file's tensors and a function that writes the metadata. What llama.cpp computes
in another way than the model is refused with a DataError. penstock.export writes the file, with the
package gguf."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ._lib import lib
from .chat import ChatTemplate
from .files import DataError, open_input
from .generate import stop_tokens
from .gguf_families import ARCHITECTURES, Gemma4, family_of, flags
from .gguf_tensor import BLOCK, Tensor, halves_as_neighbours, kind_of, of_all_layers
from .model import ModelConfig, Parameter

GEMMA = ("GEMMA2", "GEMMA3")
OFFSET = ("GEMMA", *GEMMA)  # norms multiply by what is 1 + w in the model
# RoPE turns neighbours there, (2i, 2i + 1), and not (i, i + head_dim/2) as Hugging Face's layout.
TURNS_NEIGHBOURS = ("LLAMA", "GRANITE", "SMOLLM3", "MISTRAL3")
HAS_WINDOWS = (*GEMMA, "EXAONE4", "OLMO2", "GPT_OSS", "GEMMA4")
EVERY = 4  # layers of EXAONE 4 and OLMo 3: the last of so many has no window
NO_ROPE_EVERY = 4  # SmolLM3's layers without RoPE, which llama.cpp counts itself
# The scalings that each architecture's graph applies, beside none.
SCALINGS = {
    "LLAMA": {"linear", "llama3", "yarn", "longrope"},
    "GRANITE": {"linear", "llama3", "yarn", "longrope"},
    "PHI3": {"linear", "yarn", "longrope"},
    "QWEN2": {"linear", "yarn"},
    "QWEN3": {"linear", "yarn"},
    "OLMO2": {"linear", "yarn"},
    "SMOLLM3": {"linear", "yarn"},
    "GEMMA": {"linear", "yarn"},
    "SEED_OSS": {"linear", "yarn"},
    "EXAONE4": {"linear", "llama3", "yarn"},
    "HUNYUAN_DENSE": {"linear", "yarn"},
    "GLM4": {"linear", "yarn"},
    "OLMOE": {"linear", "yarn"},
    "QWEN3MOE": {"linear", "yarn"},
    "GEMMA2": {"linear", "yarn"},
    "GEMMA3": {"linear"},  # the layers with windows would be scaled too
    "GPT_OSS": {"linear", "yarn"},
    "DEEPSEEK2": {"yarn"},  # its graph takes any other for yarn
    "QWEN3NEXT": {"linear", "yarn"},
    "QWEN35": {"linear", "yarn"},
    "QWEN35MOE": {"linear", "yarn"},
    "GEMMA4": {"proportional"},
    "MISTRAL3": {"linear", "llama3", "yarn", "longrope"},
}
SCALING_NAMES = {
    lib.PS_ROPE_LINEAR: "linear",
    lib.PS_ROPE_LLAMA3: "llama3",
    lib.PS_ROPE_YARN: "yarn",
    lib.PS_ROPE_LONGROPE: "longrope",
    lib.PS_ROPE_PROPORTIONAL: "proportional",
}
EXPERT = re.compile(r"\.experts\.(\d+)\.")
OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
FILE_TYPES = {
    "fp32": "ALL_F32",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "mxfp4": "MOSTLY_MXFP4_MOE",
}


@dataclass
class Description:
    architecture: str
    tensors: list[Tensor]
    write_metadata: Callable  # (gguf.GGUFWriter) -> None
    notes: list[str] = field(default_factory=list)  # for the user


def describe(gguf, model: ModelConfig, folder: Path, dtype: str, name: str) -> Description:
    """The file of the model whose config.json and tokenizer lie in `folder`. gguf: the package.
    dtype: "fp32", "bf16" or "q8_0", of the matrices, or "mxfp4", of gpt-oss's experts beside bf16;
    all else is F32."""
    family = model.architecture
    if family not in ARCHITECTURES:
        raise DataError(f"{folder}: no GGUF is written of the family {family}: export --to hf")
    if model.n_labels:
        raise DataError(f"{folder}: is a classifier or a reward model, of which no GGUF is written")
    arch = ARCHITECTURES[family][0]
    if arch not in gguf.MODEL_ARCH.__members__:
        raise DataError(f"{folder}: this package gguf knows no {arch}: pip install -U gguf")
    config = text_config(read_json(folder / "config.json"))
    _check_shape(folder, model, arch)
    if reason := family_of(arch).refusal(model, config):
        raise DataError(f"{folder}: {reason}")
    notes = [note] if (note := family_of(arch).note(model)) else []
    context = _context(folder, model, arch, notes)
    scaling, factors = _rope(folder, model, arch, notes)
    notes += _special_ids(folder, config, model.vocab_size)
    tokenizer = _tokenizer(gguf, folder, model.vocab_size, notes)
    tensors = parameters(gguf, model, arch, dtype) + factors
    # those that bf16 would not leave in F32
    whole = [t.name for t in tensors if t.kind == "F32" != kind_of(t.name, t.shape, "bf16")]
    if dtype == "q8_0" and whole:
        notes.append(
            f"{len(whole)} matrices stay F32, because their rows are no multiple of {BLOCK} "
            f"elements: {whole[0]} and alike"
        )

    def write_metadata(writer) -> None:
        writer.add_type("model")
        # By "phi-3" and "phi3" in a name llama.cpp expects Phi-3's own special tokens.
        text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        writer.add_name(re.sub("phi-?3", "Phi 3", text, flags=re.IGNORECASE))
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
        if dtype in ("q8_0", "mxfp4"):
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        _write_sizes(writer, model, arch, context, config)
        scaling(gguf, writer)
        tokenizer(writer)

    return Description(gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[arch]], tensors, write_metadata, notes)


def read_json(path: Path) -> dict:
    try:
        with open_input(path) as f:
            content = json.loads(f.read())
    except OSError as e:
        raise DataError(f"{path}: cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise DataError(f"{path}: is not JSON: {e}") from e
    if not isinstance(content, dict):
        raise DataError(f"{path}: is no JSON object")
    return content


def text_config(config: dict) -> dict:
    """What config.json says of the text model, which in a vision-language model has a place of its
    own."""
    return {**config, **(config.get("text_config") or {})}


# ---- what the architecture has -------------------------------------------------------------------


def _check_shape(folder: Path, model: ModelConfig, arch: str) -> None:
    """Refuse what llama.cpp's graph of the architecture computes differently."""
    heads, head_dim = model.n_heads, model.head_dim
    if arch in ("PHI3", "OLMO2", "OLMOE") and heads * head_dim != model.dim:
        raise DataError(
            f"{folder}: {heads} heads of {head_dim} elements are not hidden_size {model.dim}, as "
            f"llama.cpp's {arch.lower()} needs"
        )
    if arch in GEMMA:
        largest = 46 if arch == "GEMMA2" else 62  # the 27B models scale in another way
        width = model.dim // heads if model.n_layers == largest else head_dim
        if abs(model.attention_scale * math.sqrt(width) - 1) > 1e-6:
            raise DataError(
                f"{folder}: query_pre_attn_scalar is {model.attention_scale**-2:g}: llama.cpp has "
                f"{width} for {model.n_layers} layers and heads of {head_dim} elements, and no key "
                "says otherwise"
            )
    if arch == "GEMMA" and not model.tied_embeddings:
        raise DataError(
            f"{folder}: lm_head.weight is not the embedding: llama.cpp takes Gemma's embedding as "
            "its lm_head"
        )
    if arch == "GEMMA2":
        if not (model.attention_softcap and model.logit_softcap):
            raise DataError(
                f"{folder}: a soft cap of Gemma 2 is null: llama.cpp always caps its scores and "
                "logits"
            )
        if not model.tied_embeddings:
            raise DataError(
                f"{folder}: lm_head.weight is not the embedding: llama.cpp takes Gemma 2's embedding "
                "as its lm_head"
            )
    _check_experts(folder, model, arch)
    if arch in ("EXAONE4", "OLMO2"):
        _check_windows(folder, model, arch)
    without = [i for i in range(model.n_layers) if model.layer_flags[i] & lib.PS_LAYER_NO_ROPE]
    if arch == "SMOLLM3" and without != [*range(3, model.n_layers, NO_ROPE_EVERY)]:
        raise DataError(
            f"{folder}: no_rope_layers leaves layers {without} without RoPE: llama.cpp does so "
            f"with every {NO_ROPE_EVERY}th layer"
        )


def _check_windows(folder: Path, model: ModelConfig, arch: str) -> None:
    """llama.cpp has no key for which layers have windows, and takes EXAONE 4 32B by its depth."""
    has = _windowed(model)
    if not any(has):
        return
    if has != [(i + 1) % EVERY != 0 for i in range(model.n_layers)]:
        raise DataError(
            f"{folder}: layers {[i for i, w in enumerate(has) if not w]} have no window: llama.cpp "
            f"takes it from every {EVERY}th layer"
        )
    if arch == "EXAONE4" and (model.n_layers, model.window) != (64, 4096):
        raise DataError(
            f"{folder}: {model.n_layers} layers have windows of {model.window}: llama.cpp has them "
            "with 64 layers and 4096 alone"
        )
    if arch == "OLMO2" and model.local_rope_theta != model.rope.theta:
        raise DataError(
            f"{folder}: rope_theta is {model.local_rope_theta:g} in layers with windows and "
            f"{model.rope.theta:g} in the others: llama.cpp has one for both"
        )


def _check_experts(folder: Path, model: ModelConfig, arch: str) -> None:
    if arch == "OLMOE" and model.n_kv_heads != model.n_heads:
        raise DataError(
            f"{folder}: num_key_value_heads is {model.n_kv_heads} of {model.n_heads} heads: "
            "llama.cpp's olmoe has as many keys as queries"
        )
    dense = [i for i in range(model.n_layers) if not model.layer_flags[i] & lib.PS_LAYER_EXPERTS]
    if arch == "QWEN3MOE" and dense:
        raise DataError(
            f"{folder}: layers {dense} have no experts: llama.cpp's {arch.lower()} has them in all"
        )
    if arch in ("QWEN3MOE", "OLMOE") and bool(model.norm_topk_prob) != (arch == "QWEN3MOE"):
        raise DataError(
            f"{folder}: norm_topk_prob is {bool(model.norm_topk_prob)}: llama.cpp's "
            f"{arch.lower()} has {arch == 'QWEN3MOE'}"
        )


def _windowed(model: ModelConfig) -> list[bool]:
    return flags(model, lib.PS_LAYER_WINDOW)


def _context(folder: Path, model: ModelConfig, arch: str, notes: list[str]) -> int:
    """The context length. Where llama.cpp's graph has no windows, a context within the window
    gives the same attention."""
    if not model.max_positions:
        raise DataError(f"{folder}: config.json has no max_position_embeddings, which GGUF needs")
    if not any(_windowed(model)) or arch in HAS_WINDOWS or model.window >= model.max_positions:
        return model.max_positions
    notes.append(
        f"the context length is {model.window} tokens, the sliding window, because llama.cpp has "
        f"no windows for {model.architecture}; attention over more would differ"
    )
    return model.window


def _write_sizes(writer, model: ModelConfig, arch: str, context: int, config: dict) -> None:
    sizes = dict(
        vocab_size=model.vocab_size,
        context_length=context,
        embedding_length=model.dim,
        block_count=model.n_layers,
        feed_forward_length=model.ffn_dim,
        head_count=model.n_heads,
        head_count_kv=model.n_kv_heads,
        key_length=model.head_dim,
        value_length=model.head_dim,
        layer_norm_rms_eps=model.norm_eps,
        rope_dimension_count=model.rope.rotary_dim or model.head_dim,
    )
    if model.n_experts:
        sizes["expert_count"] = model.n_experts
        sizes["expert_used_count"] = model.n_experts_used
        sizes["expert_feed_forward_length"] = model.expert_dim
    if arch in HAS_WINDOWS and any(_windowed(model)):
        sizes["sliding_window"] = model.window
        sizes["sliding_window_pattern"] = _windowed(model)
    if arch == "GEMMA3":
        sizes["rope_freq_base_swa"] = model.local_rope_theta
    if arch == "GEMMA2":
        sizes["attn_logit_softcapping"] = model.attention_softcap
    if model.logit_softcap:
        sizes["final_logit_softcapping"] = model.logit_softcap
    if arch == "GRANITE":
        sizes["embedding_scale"] = model.embedding_scale
        sizes["residual_scale"] = model.residual_scale
        sizes["attention_scale"] = model.attention_scale
        sizes["logit_scale"] = config.get("logits_scaling", 1)
    for name, value in (sizes | family_of(arch).sizes(model, config)).items():
        if not name.startswith("."):
            getattr(writer, f"add_{name}")(value)
        elif isinstance(value, list):
            writer.add_array(writer.arch + name, value)
        else:
            writer.add_uint32(writer.arch + name, value)


def parameters(gguf, model: ModelConfig, arch: str, dtype: str) -> list[Tensor]:
    """The model's own tensors as the file has them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], model.n_layers)
    layers, others = of_all_layers(model.params(), "")
    out = [_of_vocabulary(names, model, t) for t in layers]
    experts: dict[str, tuple] = {}  # of each tensor an expert's part of it, and (expert, parameter)
    for p in others:
        expert = EXPERT.search(p.name)
        for tensor in _placed(names, model, arch, p):
            if expert:
                parts = experts.setdefault(tensor.name, (tensor, []))[1]
                parts.append((int(expert[1]), p.name))
            else:
                out.append(tensor)
    for tensor, parts in experts.values():
        shape = (len(parts), *tensor.shape)
        out.append(replace(tensor, shape=shape, parts=tuple(name for _, name in sorted(parts))))
    if (arch == "OLMO2" or family_of(arch).always_head) and model.tied_embeddings:
        embedding = next(t for t in out if t.name == "token_embd.weight")
        out.append(replace(embedding, name="output.weight"))
    return [replace(t, kind=kind_of(t.name, t.shape, dtype)) for t in out]


def _of_vocabulary(names, model: ModelConfig, tensor: Tensor) -> Tensor:
    """A tensor for all layers by llama.cpp's name. Tables of more rows than tokens lose the others,
    which no token reads."""
    shape = (model.vocab_size, tensor.columns) if tensor.beside else tensor.shape
    return replace(tensor, name=names.get_name(tensor.name, try_suffixes=(".weight",)), shape=shape)


def _placed(names, model: ModelConfig, arch: str, p: Parameter) -> list[Tensor]:
    """What the file has of a parameter. Of an expert's: what it has of one."""
    key, family = EXPERT.sub(".experts.", p.name), family_of(arch)
    layer, places = OF_LAYER.fullmatch(key), []
    if layer:
        places = family.place(model, p, layer[2])
    elif p.role == "norm":
        places = family.place(model, p, p.name)
    own = f"blk.{layer[1]}.{family.names[layer[2]]}" if layer and layer[2] in family.names else None
    if not own and not any(here for here, _ in places):
        own = names.get_name(_name_of_experts(key), try_suffixes=(".weight", ".bias"))
        if own is None:
            raise DataError(f"GGUF has no name for the tensor {p.name}")
    plain = Tensor(
        own or "", p.shape, "", p.name, offset=float(arch in OFFSET and p.role == "norm")
    )
    if arch in TURNS_NEIGHBOURS and len(p.shape) == 2:
        heads = {"q": model.n_heads, "k": model.n_kv_heads}
        for which, n in heads.items():
            if f".self_attn.{which}_proj." in p.name:
                plain = replace(plain, pick_rows=halves_as_neighbours(p.shape[0], n))
    return [
        replace(plain, name=f"blk.{layer[1]}.{here}" if here else own, **changes)
        for here, changes in places or [("", {})]
    ]


def _name_of_experts(key: str) -> str:
    """gguf knows Mixtral's experts by the names of its converter."""
    return re.sub(r"model\.layers\.(\d+)\.block_sparse_moe", r"layers.\1.feed_forward", key)


# ---- RoPE ----------------------------------------------------------------------------------------


def llama3_factors(theta, factor, low, high, original, head_dim: int) -> np.ndarray:
    """What each frequency is divided by (native/model/rope.c has the formula)."""
    pairs = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequency = theta**-pairs
    turns = original * frequency / (2 * math.pi)
    smooth = (turns - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(turns > high, 1, np.where(turns < low, factor, between))
    return factors.astype(np.float32)


def _attention_factor(rope, original: int, max_positions: int) -> float:
    """As native/model/rope.c, for yarn and longrope."""

    def of_yarn(mscale):
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1

    if rope.attention_factor > 0:
        return rope.attention_factor
    if rope.kind == lib.PS_ROPE_YARN and rope.mscale and rope.mscale_all_dim:
        return of_yarn(rope.mscale) / of_yarn(rope.mscale_all_dim)
    if rope.kind == lib.PS_ROPE_YARN:
        return of_yarn(1.0)
    factor = max_positions / rope.original_positions if rope.original_positions else rope.factor
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_ramps(rope, rotary: int, original: int) -> tuple[np.ndarray, np.ndarray]:
    """By how much of itself each frequency is divided by factor, in the model and in llama.cpp,
    which rounds the ends of the range (native/model/rope.c has the formula)."""
    low, high = (
        rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast or 32, rope.beta_slow or 1)
    )
    pairs = np.arange(rotary // 2)

    def ramp(low, high):
        low, high = max(low, 0.0), min(high, rotary - 1.0)
        return np.clip((pairs - low) / max(high - low, 0.001), 0, 1)

    return ramp(low, high), ramp(math.floor(low), math.ceil(high))


def _check_yarn(folder: Path, model: ModelConfig, arch: str, notes: list[str]) -> None:
    """Refuse what llama.cpp computes in another way, or note it."""
    rope, family = model.rope, family_of(arch)
    fast, slow = rope.beta_fast or 32, rope.beta_slow or 1
    otherwise = (fast, slow) != (32, 1) and not family.betas
    if otherwise or rope.keep_fraction and not family.rounds_range:
        raise DataError(
            f"{folder}: yarn with beta_fast {fast:g}, beta_slow {slow:g}, truncate "
            f"{not rope.keep_fraction}: llama.cpp has 32, 1 and true"
        )
    if rope.keep_fraction:
        original = rope.original_positions or model.max_positions
        ramps = _yarn_ramps(rope, rope.rotary_dim or model.head_dim, original)
        own, theirs = (ramp / rope.factor + 1 - ramp for ramp in ramps)
        most = int(np.argmax(np.abs(theirs / own - 1)))
        if abs(theirs[most] / own[most] - 1) > 1e-6:
            notes.append(
                "yarn's truncate is false, and llama.cpp rounds the ends of its range all the same: "
                f"the frequency of pair {most} is {theirs[most] / own[most]:.2f} times the model's "
                "there, and other pairs differ less"
            )


def _rope(
    folder: Path, model: ModelConfig, arch: str, notes: list[str]
) -> tuple[Callable, list[Tensor]]:
    """A function that writes the RoPE keys, and the tensors of factors."""
    rope = model.rope
    rotary = rope.rotary_dim or model.head_dim
    original = rope.original_positions or model.max_positions
    kind = SCALING_NAMES.get(rope.kind)
    if kind and kind not in SCALINGS[arch]:
        raise DataError(
            f"{folder}: rope_type {kind} has no place in llama.cpp's architecture {arch.lower()}"
        )
    if kind == "yarn":
        _check_yarn(folder, model, arch, notes)
    factors = {}
    if kind == "llama3":
        factors["rope_freqs.weight"] = llama3_factors(
            rope.theta,
            rope.factor,
            rope.low_freq_factor,
            rope.high_freq_factor,
            original,
            model.head_dim,
        )
    if kind == "longrope":
        for name in ("long", "short"):
            values = getattr(rope, f"{name}_factor")
            factors[f"rope_factors_{name}.weight"] = np.array(
                [values[i] for i in range(rotary // 2)], np.float32
            )
    tensors = [Tensor(n, v.shape, "F32", values=v) for n, v in factors.items()]
    if arch == "GEMMA4":
        tensors += Gemma4.factors(model)

    def write(gguf, writer) -> None:
        writer.add_rope_freq_base(rope.theta)
        if kind in ("linear", "yarn", "longrope"):
            writer.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
        if kind in ("linear", "yarn"):
            writer.add_rope_scaling_factor(rope.factor)
        if kind in ("yarn", "longrope") or model.position_beta:
            writer.add_rope_scaling_orig_ctx_len(original)
        if kind in ("yarn", "longrope"):
            by, log = _attention_factor(rope, original, model.max_positions), None
            if kind == "yarn":
                by, log = family_of(arch).yarn(model, by)
            writer.add_rope_scaling_attn_factors(by)
            if log is not None:
                writer.add_rope_scaling_yarn_log_mul(log)
        if kind == "yarn" and family_of(arch).betas:
            writer.add_rope_scaling_yarn_beta_fast(rope.beta_fast or 32)
            writer.add_rope_scaling_yarn_beta_slow(rope.beta_slow or 1)

    return write, tensors


# ---- tokenizer -----------------------------------------------------------------------------------

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{ending}|[^\r\n\p{{L}}\p{{N}}]?"
    r"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ending}"
    r"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKS = (  # letters with marks after them, as Qwen3.5 has them
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# How text is cut before merging, and whether a word of the vocabulary is taken as it is
# (ignore_merges): llama.cpp's name of it. None: of either kind.
CUTS = {
    ("bytes",): {None: "gpt-2"},
    ("digits", "bytes"): {None: "smollm"},
    (_GPT2,): {None: "gpt-2"},
    (_CL100K.format(digits=r"\p{N}{1,3}"),): {True: "llama-bpe", False: "dbrx"},
    (_CL100K.format(digits=r"\p{N}"),): {False: "qwen2"},
    (_MARKS,): {False: "qwen35"},
    _DEEPSEEK: {False: "deepseek-v3"},
    (_SEED,): {False: "seed-coder"},
    (_CASED.format(digits=r"\p{N}", ending=""),): {True: "tekken"},
    (_CASED.format(digits=r"\p{N}{1,3}", ending=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),): {
        False: "gpt-4o"
    },
}


def _tokenizer(gguf, folder: Path, vocab_size: int, notes: list[str]) -> Callable:
    """A function that writes the tokenizer of tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise DataError(f"{folder}: there is no tokenizer.json, which a GGUF file includes")
    content = read_json(path)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            read_json(folder / name)
    try:
        return _tokenizer_of(gguf, path, content, vocab_size, notes)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
        raise DataError(f"{path}: is not as a tokenizer.json is: {e!r}") from e


def _tokenizer_of(gguf, path: Path, content: dict, vocab_size: int, notes: list[str]) -> Callable:
    model = content.get("model") or {}
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise DataError(
            f"{path}: is a tokenizer of type {kind}: only BPE is exported, byte-level or as "
            "SentencePiece has it"
        )
    tokens, types = _vocabulary(path, content, vocab_size)
    if model.get("byte_fallback"):
        pre, scores = "default", _scores(path, model, tokens, types)
        prefix = _space_prefix(path, content)
    else:
        pre, scores, prefix = _cut_name(path, content), None, None

    special = gguf.SpecialVocab(path.parent, load_merges=scores is None, n_vocab=vocab_size)
    for name in ("bos", "eos"):
        special.add_special_token.setdefault(name, False)
    _set_ends(special, path.parent, tokens, content, notes)

    def write(writer) -> None:
        writer.add_tokenizer_model("gpt2" if scores is None else "llama")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        if scores is not None:
            writer.add_token_scores(scores)
            writer.add_add_space_prefix(prefix)
        special.add_to_gguf(writer, quiet=True)

    return write


def _set_ends(special, folder: Path, tokens: list[str], content: dict, notes: list[str]) -> None:
    """The chat template's end of turn becomes the file's, as `penstock generate --chat` stops there.
    What the file and `penstock generate` call the end of text may differ: that is noted."""
    ids = special.special_token_ids
    try:
        added = {t["content"]: t["id"] for t in content.get("added_tokens") or []}
        turn = ChatTemplate(folder).end_of_turn(added)
    except DataError:  # there is no template
        turn = None
    if turn is not None and turn != ids.get("eos"):
        ids.setdefault("eot", turn)
    eos, stops = ids.get("eos"), stop_tokens(folder)
    if eos is not None and stops and eos not in stops:
        named = ", ".join(repr(tokens[i]) for i in stops if i < len(tokens))
        notes.append(
            f"the file's end of text is {tokens[eos]!r}, the tokenizer's eos_token, but the model's "
            f"eos_token_id is {stops}{f' ({named})' if named else ''}, where penstock generate stops"
        )


def _special_ids(folder: Path, config: dict, vocab_size: int) -> list[str]:
    """Notes on the ids of config.json that are no token's: they are not written."""
    notes = []
    for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
        i = config.get(f"{name}_token_id")
        if not isinstance(i, int) or isinstance(i, bool) or 0 <= i < vocab_size:
            continue
        what = f"{folder / 'config.json'}: {name}_token_id is {i}, and vocab_size is {vocab_size}"
        if i < 0:  # the package gguf does not take it
            raise DataError(f"{what}: set it to null, or to a token's id")
        notes.append(f"{what}: the file has no {name} token by it")
    return notes


def _vocabulary(path: Path, content: dict, vocab_size: int) -> tuple[list[str], list[int]]:
    """The text and the llama.cpp type of each token id. Ids without a token are unused."""
    normal, unknown, control, user_defined, unused, byte = 1, 2, 3, 4, 5, 6
    model = content["model"]
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [unused] * vocab_size
    added = {t["id"]: t for t in content.get("added_tokens") or []}
    ids = [*model["vocab"].values(), *added]
    if not all(isinstance(i, int) and i >= 0 for i in ids) or not ids:
        raise DataError(f"{path}: has no token, or one whose id is no number from 0")
    largest = max(ids)
    if largest >= vocab_size:
        raise DataError(
            f"{path}: has a token of id {largest}, but config.json's vocab_size is {vocab_size}"
        )
    for token, i in model["vocab"].items():
        tokens[i], types[i] = token, normal
        if model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
            types[i] = byte
    for i, token in added.items():
        special = token.get("special")
        tokens[i], types[i] = token["content"], control if special else user_defined
        if not special:  # llama.cpp finds these in the text as it was given
            tokens[i] = tokens[i].replace("\u2581", " ")
    if model.get("byte_fallback") and model.get("unk_token") in model["vocab"]:
        types[model["vocab"][model["unk_token"]]] = unknown
    return tokens, types


def _pairs(model: dict) -> list[tuple[str, str]]:
    return [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]


def _scores(path: Path, model: dict, tokens: list[str], types: list[int]) -> list[float]:
    """llama.cpp merges the two neighbours whose union has the highest score, tokenizer.json the two
    whose merge stands first. A token's score is therefore the negative position of its merge. Both
    are the same where all merges of a token stand together, and where every two tokens whose union
    is a token have a merge: as in tokenizers that come from SentencePiece."""
    scores, position, last = [0.0] * len(tokens), {}, None
    pairs = _pairs(model)
    for left, right in pairs:
        union = left + right
        if union != last and union in position:
            raise DataError(
                f"{path}: the merges of {union!r} do not stand together: GGUF's SentencePiece "
                "vocabularies cannot express that"
            )
        position.setdefault(union, len(position))
        last = union
    given, vocab = set(pairs), model["vocab"]
    special = {i for i, t in enumerate(types) if t in (2, 3, 4, 6)}
    for token, i in vocab.items():
        if i in special:
            continue
        scores[i] = -float(position.get(token, -1) + 1)
        for k in range(1, len(token)):
            left, right = token[:k], token[k:]
            if (
                vocab.get(left, i) not in special
                and left in vocab
                and right in vocab
                and vocab[right] not in special
                and (left, right) not in given
            ):
                raise DataError(
                    f"{path}: {left!r} and {right!r} are tokens, and {token!r} is one without "
                    "their merge: GGUF's SentencePiece vocabularies would merge them"
                )
    missing = [b for b in range(256) if f"<0x{b:02X}>" not in vocab]
    if missing:
        raise DataError(
            f"{path}: has byte_fallback, but no token <0x{missing[0]:02X}>: llama.cpp needs all 256"
        )
    return scores


def _steps(part: dict | None) -> list[dict]:
    """The members of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        members = part.get("normalizers") or part.get("pretokenizers") or []
        return [step for member in members for step in _steps(member)]
    return [part]


def _unknown_step(path: Path, what: str, step: dict) -> DataError:
    return DataError(
        f"{path}: the {what} {step.get('type')} {json.dumps(step)[:120]} is not known in GGUF"
    )


def _space_prefix(path: Path, content: dict) -> bool:
    """Whether a space is put before the text."""
    prefix = False
    for step in _steps(content.get("normalizer")):
        if step["type"] == "Prepend" and step.get("prepend") == "\u2581":
            prefix = True
        elif (step["type"], step.get("pattern"), step.get("content")) != (
            "Replace",
            {"String": " "},
            "\u2581",
        ):
            raise _unknown_step(path, "normalizer", step)
    for step in _steps(content.get("pre_tokenizer")):
        if step["type"] == "Metaspace" and step.get("replacement") == "\u2581":
            scheme = step.get("prepend_scheme")
            prefix |= scheme != "never" if scheme else step.get("add_prefix_space", True)
        elif step["type"] != "Split" or step.get("pattern") != {"String": " "}:
            raise _unknown_step(path, "pre-tokenizer", step)
    return prefix


def _cut_name(path: Path, content: dict) -> str:
    """llama.cpp's name of how a byte-level tokenizer cuts text. A normalizer to NFC is left out, as
    llama.cpp has none."""
    for step in _steps(content.get("normalizer")):
        if step["type"] != "NFC":
            raise _unknown_step(path, "normalizer", step)
    cuts, bytes_seen = [], False
    for step in _steps(content.get("pre_tokenizer")):
        if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
            bytes_seen = True
            cuts += ["bytes"] if step.get("use_regex", True) else []
        elif step["type"] == "Digits" and step.get("individual_digits"):
            cuts.append("digits")
        elif step["type"] == "Split" and "Regex" in (step.get("pattern") or {}):
            cuts.append(step["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n"))
        else:
            raise _unknown_step(path, "pre-tokenizer", step)
    if not bytes_seen:
        raise DataError(
            f"{path}: is a BPE tokenizer neither of bytes nor with byte_fallback, unlike GGUF's"
        )
    whole = bool(content["model"].get("ignore_merges"))
    by_kind = CUTS.get(tuple(cuts), {})
    name = by_kind.get(None, by_kind.get(whole))
    if name is None:
        raise DataError(
            f"{path}: cuts text by {', '.join(cuts) or 'nothing'} with ignore_merges {whole}, "
            "which is not known to be one of llama.cpp's pre-tokenizers"
        )
    return name
