"""config.json of every family: it reads as transformers' AutoConfig reads it, with keys missing
too; what is out of range, of another family or not computed is refused by the field's name."""

import copy
import ctypes
import json
import math
import os
import subprocess

import families
import io_native as ps
import pytest
from conftest import BUILD
from families import (
    ALTERNATING,
    CONFIGS,
    FAMILIES,
    GEMMA4,
    GEMMA4_ROPE,
    YARN,
    gemma3,
    gemma4,
    longrope,
    phi3,
    rope_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from penstock import ModelConfig
from test_config import junk

os.environ.setdefault("HF_HUB_OFFLINE", "1")
WINDOW, NO_ROPE, LOCAL_ROPE, GLOBAL, SHARED_KV = 1, 2, 4, 16, 64
# without transformers' default here: a model of a default's size is nobody's model
REQUIRED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
]
# model_type: without it transformers reads nothing; max_position_embeddings: ours stays unknown
EXCEPTED = ("architectures", "model_type", "max_position_embeddings")
GELU = ("gemma", "gemma2", "gemma3_text", *GEMMA4)
QK_NORM = {"qwen3": 1, "gemma3_text": 1, "olmo2": 2, "olmo3": 2, "exaone4": 1}
QK_NORM |= dict.fromkeys(GEMMA4, 1) | {"hunyuan_v1_dense": 3}
LOCAL = ("gemma3_text", "olmo3", *GEMMA4)
KINDS = {"default": 0, "linear": 1, "llama3": 2, "yarn": 3, "longrope": 4, "dynamic": 5}
KINDS["proportional"] = 6


def save(folder, cfg):
    (folder / "config.json").write_text(json.dumps(cfg))
    return folder


def without(cfg, *keys):
    return {k: v for k, v in cfg.items() if k not in keys}


def refused(folder, cfg, *parts):
    with pytest.raises(ps.Failed) as e:
        ps.read_config(save(folder, cfg))
    assert e.value.code == ps.EFORMAT
    ps.one_sentence(e.value.message, folder / "config.json", *parts)


def f32(x):
    return ctypes.c_float(x).value


# ---- as transformers reads it --------------------------------------------------------------------


def flags_of(t):
    """The flags of a layer, by transformers' modeling files."""
    types = getattr(t, "layer_types", None)
    window = getattr(t, "sliding_window", None)
    if t.model_type in ("smollm3", "qwen2", "qwen3") and not t.use_sliding_window:
        window = None
    out = []
    for i in range(t.num_hidden_layers):
        slides = window is not None and (types is None or types[i] == "sliding_attention")
        flags = WINDOW if slides else 0
        if t.model_type in LOCAL and slides:
            flags |= LOCAL_ROPE
        if t.model_type == "smollm3" and not t.no_rope_layers[i]:
            flags |= NO_ROPE
        if t.model_type == "exaone4" and window is not None and not slides:
            flags |= NO_ROPE
        if t.model_type in GEMMA4 and not slides:
            flags |= GLOBAL
        if i >= t.num_hidden_layers - (getattr(t, "num_kv_shared_layers", None) or 0):
            flags |= SHARED_KV
        out.append(flags)
    return out


def scales_of(t):
    """(embedding, attention, residual, logits, cap of the scores, cap of the logits); 0: none."""
    if t.model_type == "gemma":
        return (math.sqrt(t.hidden_size), 0, 0, 0, 0, 0)
    if t.model_type in GELU:
        caps = (
            t.attn_logit_softcapping if t.model_type == "gemma2" else None,
            t.final_logit_softcapping,
        )
        return (
            math.sqrt(t.hidden_size),
            1.0 if t.model_type in GEMMA4 else t.query_pre_attn_scalar**-0.5,
            0,
            0,
            *(c or 0 for c in caps),
        )
    if t.model_type == "granite":
        return (
            t.embedding_multiplier,
            t.attention_multiplier,
            t.residual_multiplier,
            1 / t.logits_scaling,
            0,
            0,
        )
    return (0,) * 6


def pad_of(t):
    """nn.Embedding's padding_idx, which the class passes on. A default past the vocabulary counts
    as none here, where nn.Embedding refuses it."""
    pad, n = t.pad_token_id, t.vocab_size
    return -1 if pad is None or not -n <= pad < n else pad % n


def check_rope(c, t):
    s, local = rope_of(t)
    kind, partial = s["rope_type"], s.get("partial_rotary_factor", 1.0)
    if kind == "dynamic" and s.get("alpha"):
        larger = s["rope_theta"] * s["alpha"] ** (c.head_dim / (c.head_dim - 2))
        assert c.rope.theta == pytest.approx(larger, rel=1e-14) and c.rope.kind == 0
        return
    assert (c.rope.theta, c.rope.kind) == (s["rope_theta"], KINDS[kind])
    if kind == "proportional":
        assert c.rope.rotary_dim == int(c.global_head_dim * partial // 2) * 2
        assert c.rope.factor == s.get("factor", 1)
    else:
        assert (c.rope.rotary_dim or c.head_dim) == int(c.head_dim * partial)
        assert c.rope.factor == s.get("factor", 0)
    if kind == "longrope":
        n = len(s["short_factor"])
        assert list(c.rope.short_factor[:n]) == s["short_factor"]
        assert list(c.rope.long_factor[:n]) == s["long_factor"]
        assert c.rope.original_positions == s["original_max_position_embeddings"]
    if kind == "yarn":
        assert c.rope.original_positions == s.get("original_max_position_embeddings", 0)
        for key in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            assert getattr(c.rope, key) == s.get(key, 0)
    if t.model_type in LOCAL:
        assert c.local_rope_theta == local["rope_theta"]


def check_alike(folder, cfg):
    """False: transformers does not take this config, and then neither do we."""
    from transformers import AutoConfig

    try:
        t = AutoConfig.from_pretrained(save(folder, cfg))
    except Exception:
        with pytest.raises(ps.Failed) as e:
            ps.read_config(folder)
        ps.one_sentence(e.value.message, folder / "config.json")
        return False
    c = ps.read_config(folder)
    usual = t
    if t.model_type in GEMMA4:  # which of the layers it is has to be said
        usual = t.per_layer_config[t.layer_types.index("sliding_attention")]
    head_dim = getattr(usual, "head_dim", None) or t.hidden_size // t.num_attention_heads
    assert ps.lib.ps_model_family_name(c.family).decode() == (cfg.get("model_type") or t.model_type)
    assert (c.n_kv_heads, c.head_dim) == (usual.num_key_value_heads, head_dim)
    assert (c.vocab_size, c.dim, c.ffn_dim) == (t.vocab_size, t.hidden_size, t.intermediate_size)
    if t.model_type in GEMMA4:
        last = t.per_layer_config[t.num_hidden_layers - 1]
        heads = c.global_head_dim, c.global_kv_heads, c.shared_keys
        assert heads == (last.head_dim, last.num_key_value_heads, t.attention_k_eq_v)
        e = getattr(t, "hidden_size_per_layer_input", 0)
        assert (c.per_layer_dim, c.per_layer_vocab) == (e, e and t.vocab_size_per_layer_input)
        assert c.double_wide_mlp == (t.use_double_wide_mlp and t.num_kv_shared_layers > 0)
    assert c.norm_eps == f32(t.rms_norm_eps)
    assert bool(c.tied_embeddings) == t.tie_word_embeddings
    assert c.pad_token_id == pad_of(t)
    assert c.activation == (t.model_type in GELU)
    assert c.qk_norm == QK_NORM.get(t.model_type, 0)
    assert c.interleaved_rope == (t.model_type == "glm4")
    flags = flags_of(t)
    assert list(c.layer_flags[: c.n_layers]) == flags
    if any(f & WINDOW for f in flags):
        assert c.window == t.sliding_window
    found = (
        c.embedding_scale,
        c.attention_scale,
        c.residual_scale,
        c.logit_scale,
        c.attention_softcap,
        c.logit_softcap,
    )
    assert found == tuple(f32(x) for x in scales_of(t))
    check_rope(c, t)
    return True


@pytest.mark.oldest
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_reads_as_transformers_reads_it(tmp_path, name):
    assert check_alike(tmp_path, CONFIGS[name])


@pytest.mark.oldest
@pytest.mark.parametrize("full", [False, True], ids=["diff", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_reads_alike(tmp_path, name, full):
    from transformers import AutoConfig

    mine = bytes(ps.read_config(save(tmp_path, CONFIGS[name])))
    t = AutoConfig.for_model(**copy.deepcopy(CONFIGS[name]))
    t.to_json_file(tmp_path / "config.json", use_diff=not full)
    assert bytes(ps.read_config(tmp_path)) == mine


@pytest.mark.parametrize("name", CONFIGS)
def test_a_missing_field_is_transformers_default_or_named(tmp_path, name):
    cfg = dict(CONFIGS[name])
    if cfg["model_type"] not in ("phi3", "olmo2", "granite", "llama", "hunyuan_v1_dense"):
        # multiples of the default of num_key_value_heads
        cfg.update(num_attention_heads=32, hidden_size=64)
    alike = 0
    for key in cfg:
        if key in REQUIRED:
            refused(tmp_path, without(cfg, key), f"{key} is missing")
        elif key not in EXCEPTED and (name, key) not in (
            ("qwen3-window", "use_sliding_window"),
            ("exaone4-full", "layer_types"),  # transformers divides by zero
            ("gemma4-shared", "layer_types"),  # its model then fails
            ("gemma4-e2b", "layer_types"),
        ):
            alike += check_alike(tmp_path, without(cfg, key))
    assert alike >= 9
    refused(tmp_path, without(cfg, "model_type", "architectures"), "architectures", "model_type")
    n_layers = cfg["num_hidden_layers"]
    assert ps.read_config(save(tmp_path, without(cfg, "architectures"))).n_layers == n_layers


@pytest.mark.parametrize("name", CONFIGS)
def test_null_is_read_as_transformers_reads_it(tmp_path, name):
    for key in (
        "sliding_window",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "rope_scaling",
        "layer_types",
        "no_rope_layers",
    ):
        if key in CONFIGS[name] and (name, key) not in (
            # transformers reads these, and its model then fails: a window is needed
            ("gemma2", "sliding_window"),
            ("gemma2-plain", "sliding_window"),
            ("gemma3", "sliding_window"),
            ("gemma3-linear", "sliding_window"),
            ("gemma4", "sliding_window"),
            ("gemma4-values", "sliding_window"),
            ("gemma4-shared", "sliding_window"),
            ("gemma4-e2b", "sliding_window"),
            ("gemma4-shared", "layer_types"),  # the last layer is then the only full one
            ("gemma4-e2b", "layer_types"),
            ("ministral", "sliding_window"),
            ("qwen3-window", "sliding_window"),
            ("olmo3", "sliding_window"),
            ("exaone4", "sliding_window"),
            ("exaone4-full", "layer_types"),  # transformers divides by zero
        ):
            assert check_alike(tmp_path, dict(CONFIGS[name], **{key: None}))


def test_a_pad_token_counts_from_the_end_or_is_refused(tmp_path):
    """As nn.Embedding counts, which takes -V to V - 1."""
    for pad, row in ((511, 511), (-1, 511), (-512, 0), (None, -1)):
        assert check_alike(tmp_path, gemma3(pad_token_id=pad))
        assert ps.read_config(tmp_path).pad_token_id == row
    for pad in (512, -513, 2**64, 1.0):
        cfg = gemma3(pad_token_id=pad)
        refused(tmp_path, cfg, f"pad_token_id is {pad}", "below vocab_size, 512", "null")
    refused(tmp_path, gemma3(pad_token_id=True), "pad_token_id is true or false")
    refused(tmp_path, gemma3(pad_token_id=[1]), "pad_token_id is a list")


FULL, SLIDING = GEMMA4_ROPE["full_attention"], GEMMA4_ROPE["sliding_attention"]
HEADS = dict(head_dim=40, num_key_value_heads=1)


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            dict(model_type="gemma4_unified_text", architecture="Gemma4UnifiedForCausalLM")
            | dict(hidden_size_per_layer_input=8),
            ["hidden_size_per_layer_input is 8"],
        ),
        (
            dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=511),
            ["vocab_size_per_layer_input is 511", "vocab_size, 512"],
        ),
        (dict(num_kv_shared_layers=3), ["num_kv_shared_layers is 3", "num_hidden_layers, 3"]),
        (dict(num_kv_shared_layers=2), ["num_kv_shared_layers: layer 1", "of the same type"]),
        (
            dict(num_kv_shared_layers=1, use_double_wide_mlp=True, enable_moe_block=True)
            | dict(num_experts=7, top_k_experts=3, moe_intermediate_size=40),
            ["use_double_wide_mlp is true", "without experts"],
        ),
        (
            dict(model_type="gemma4_unified_text", architecture="Gemma4UnifiedForCausalLM")
            | dict(enable_moe_block=True),
            ["enable_moe_block is true"],
        ),
        (dict(use_bidirectional_attention="all"), ['use_bidirectional_attention is "all"']),
        (dict(global_head_dim=41), ["global_head_dim is 41", "even"]),
        (dict(num_global_key_value_heads=3), ["num_global_key_value_heads, 3"]),
        (dict(rope_scaling=YARN), ["rope_scaling is set"]),
        (dict(rope_parameters=dict(full_attention=FULL)), ["sliding_attention"]),
        (
            dict(rope_parameters=dict(GEMMA4_ROPE, full_attention=FULL | dict(rope_type="yarn"))),
            ["full_attention", '"yarn"'],
        ),
        (
            dict(global_head_dim=1024, num_attention_heads=4),
            ["partial_rotary_factor is 0.35", "179 pairs", "1024"],
        ),
        (dict(per_layer_config={"0": HEADS}), ["per_layer_config", '"0"']),
        (dict(per_layer_config={"1": dict(sliding_window=3)}), ["per_layer_config.1"]),
        (
            dict(layer_types=["sliding_attention"] + ["full_attention"] * 2)
            | dict(per_layer_config={"1": HEADS, "2": dict(HEADS, head_dim=24)}),
            ["per_layer_config.2", "alike"],
        ),
        (
            dict(layer_types=["sliding_attention"] + ["full_attention"] * 2)
            | dict(per_layer_config={"2": HEADS}),
            ["per_layer_config has 1 layers", "2 have full_attention"],
        ),
    ],
)
def test_what_a_gemma4_cannot_be_is_refused_by_its_field(tmp_path, changes, words):
    changes = dict(dict(layer_types=["sliding_attention", *["full_attention"] * 2]), **changes)
    refused(tmp_path, gemma4(**changes), *words)


def test_the_defaults_of_gemma3(tmp_path):
    """Every sixth layer has no window, as the published models have it."""
    cfg = dict(without(gemma3(), "sliding_window_pattern"), num_hidden_layers=13)
    assert check_alike(tmp_path, cfg)
    flags = ps.read_config(tmp_path).layer_flags[:13]
    assert [i for i in range(13) if not flags[i]] == [5, 11]


def test_rope_parameters_of_transformers_5(tmp_path):
    nested = dict(
        full_attention=dict(rope_type="linear", factor=8.0, rope_theta=7e5),
        sliding_attention=dict(rope_type="default", rope_theta=2e4),
    )
    cfg = without(gemma3(), "rope_theta", "rope_scaling", "rope_local_base_freq")
    c = ps.read_config(save(tmp_path, dict(cfg, rope_parameters=nested)))
    assert (c.rope.theta, c.rope.kind, c.rope.factor, c.local_rope_theta) == (7e5, 1, 8, 2e4)
    refused(
        tmp_path,
        dict(cfg, rope_parameters=nested, rope_local_base_freq=1e4),
        "rope_local_base_freq is 10000",
        "20000",
    )
    nested["sliding_attention"]["rope_type"] = "linear"
    refused(tmp_path, dict(cfg, rope_parameters=nested), "sliding_attention", "linear", "default")

    cfg = without(
        phi3(), "rope_theta", "rope_scaling", "partial_rotary_factor",
        "original_max_position_embeddings",
    )  # fmt: skip
    inner = dict(
        without(longrope(6), "type"),
        rope_type="longrope",
        rope_theta=9e3,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=20,
    )
    c = ps.read_config(save(tmp_path, dict(cfg, rope_parameters=inner)))
    assert (c.rope.theta, c.rope.kind, c.rope.rotary_dim, c.rope.original_positions) == (
        9e3,
        4,
        12,
        20,
    )
    refused(
        tmp_path,
        dict(cfg, rope_parameters=inner, original_max_position_embeddings=16),
        "original_max_position_embeddings is 20",
        "16",
    )


def test_yarn_in_full(tmp_path):
    yarn = dict(
        YARN, beta_fast=16.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.5, attention_factor=1.1
    )
    cfg = dict(CONFIGS["llama-yarn"], rope_scaling=yarn)
    assert check_alike(tmp_path, cfg)
    assert ps.read_config(tmp_path).rope.keep_fraction == 0
    assert ps.read_config(
        save(tmp_path, dict(cfg, rope_scaling=dict(yarn, truncate=False)))
    ).rope.keep_fraction


def as_5_writes(cfg):
    """cfg in transformers 5's layout."""
    if "rope_parameters" in cfg:
        return cfg
    rope = cfg.get("rope_scaling") or {"rope_type": "default"}
    rope = {"rope_type": rope.get("type"), "rope_theta": cfg["rope_theta"]} | rope
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if key in cfg:
            rope[key] = cfg[key]
    if cfg["model_type"] in LOCAL:
        local = {"rope_type": "default", "rope_theta": cfg.get("rope_local_base_freq", 7e5)}
        rope = {"full_attention": rope, "sliding_attention": local}
    old = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")
    return dict(without(cfg, *old), rope_parameters=rope)


@pytest.mark.oldest
@pytest.mark.parametrize("layout", [copy.deepcopy, as_5_writes], ids=["4", "5"])
@pytest.mark.parametrize("name", CONFIGS)
def test_what_we_write_opens_in_transformers_4_and_5(tmp_path, name, layout):
    written = rewrite(tmp_path, layout(CONFIGS[name]))
    c, d = ps.read_config(tmp_path), ps.read_config(tmp_path / "out")
    assert bytes(c) == bytes(d) and written["torch_dtype"] == "bfloat16"
    check_rope(c, transformers_config(tmp_path / "out"))


def rewrite(folder, cfg):
    (folder / "out").mkdir(exist_ok=True)
    out = folder / "out/config.json"
    ModelConfig.read(save(folder, cfg)).write(folder, "bf16", out)
    return json.loads(out.read_text())


def transformers_config(folder):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


@pytest.mark.oldest
@pytest.mark.parametrize("layout", [copy.deepcopy, as_5_writes], ids=["4", "5"])
@pytest.mark.parametrize("version, by", [("4.57.1", 8.0), ("5.24.0", 2.0)])
def test_a_written_longrope_is_one_in_transformers_4_and_5(tmp_path, layout, version, by):
    """They would take the ratio of the lengths, 8, and factor, 2."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(longrope(8), factor=2.0, rope_type="longrope")
    cfg = dict(families.llama(rope_scaling=scaling), max_position_embeddings=128)
    cfg.update(transformers_version=version, original_max_position_embeddings=16)
    written = rewrite(tmp_path, layout(cfg))
    want = math.sqrt(1 + math.log(by) / math.log(16))
    assert written["rope_scaling"]["attention_factor"] == pytest.approx(want, rel=1e-15)
    theirs = transformers_config(tmp_path / "out")
    assert ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", 8)[1] == pytest.approx(want, rel=1e-15)
    assert ps.read_config(tmp_path / "out").rope.attention_factor == pytest.approx(want, rel=1e-15)


def test_both_layouts_in_one_file_agree_or_are_refused(tmp_path):
    cfg = rewrite(tmp_path, as_5_writes(families.llama(rope_scaling=YARN)))
    assert ps.read_config(tmp_path / "out").rope.factor == YARN["factor"]
    cfg["rope_scaling"]["factor"] += 1
    refused(tmp_path, cfg, "rope_scaling and rope_parameters", "disagree", "keep one")
    cfg["rope_theta"] += 1
    refused(tmp_path, cfg, "rope_theta is 5001", "5000")


@pytest.mark.oldest
def test_the_old_names_of_longrope(tmp_path):
    """transformers 5.24 refuses them. What is written has the new one."""
    for old in ("su", "yarn"):
        rewrite(tmp_path, phi3(rope_scaling=dict(longrope(6), type=old)))
        assert ps.read_config(tmp_path).rope.kind == KINDS["longrope"]
        check_rope(ps.read_config(tmp_path), transformers_config(tmp_path / "out"))


def test_a_mistral_with_layer_types_is_a_ministral(tmp_path):
    from transformers import AutoConfig

    cfg = dict(CONFIGS["mistral"], layer_types=ALTERNATING)
    assert AutoConfig.from_pretrained(save(tmp_path, cfg)).model_type == "ministral"
    assert list(ps.read_config(tmp_path).layer_flags[:3]) == [WINDOW, 0, WINDOW]


PUBLISHED = {
    # vocabulary, dim, ffn, layers, heads, kv heads; what else; parameters; layers with windows,
    # layers without RoPE
    "mistral": ((32000, 4096, 14336, 32, 32, 8), {}, 7_241_732_096, 32, 0),
    "phi3": ((100352, 5120, 17920, 40, 40, 10), {}, 14_659_507_200, 0, 0),
    "olmo2": ((100352, 4096, 11008, 32, 32, 32), {}, 7_298_617_344, 0, 0),
    "gemma2": ((256000, 3584, 14336, 42, 16, 8), {}, 9_241_705_984, 21, 0),
    "gemma3": ((262144, 1152, 6912, 26, 4, 1), dict(sliding_window=512), 999_885_952, 22, 0),
    "granite": (
        (49155, 4096, 12800, 40, 32, 8),
        dict(tie_word_embeddings=True),
        8_170_848_256,
        0,
        0,
    ),
    "smollm3": ((128256, 2048, 11008, 36, 16, 4), {}, 3_075_098_624, 0, 9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters(tmp_path, name):
    """Mistral 7B, Phi-4, OLMo 2 7B, Gemma 2 9B, Gemma 3 1B, Granite 3.1 8B, SmolLM3 3B."""
    sizes, more, n, windows, no_rope = PUBLISHED[name]
    keys = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names = [*keys.split(), "num_key_value_heads"]
    family = {k: FAMILIES[name][k] for k in ("model_type", "architectures")}
    save(tmp_path, dict(zip(names, sizes, strict=True), **family, **more))
    done = subprocess.run(
        [BUILD / "bin/penstock", "info", "--model", "config.json", "--json"],
        capture_output=True,
        cwd=tmp_path,
        check=True,
    )
    found = json.loads(done.stdout)["model"]
    assert (found["parameters"], found["n_window_layers"]) == (n, windows)
    assert found["n_no_rope_layers"] == no_rope


# ---- refused -------------------------------------------------------------------------------------

ABSURD = [-1, 1.5, 2**31, 2**64, 1e300, "8", True, [], {}]
WITH_WINDOW = ("mistral", "ministral", "phi3-window", "gemma2", "gemma3", "qwen2-window")
OUT_OF_RANGE = (
    [(n, key, v) for n in FAMILIES for key in REQUIRED for v in (0, *ABSURD)]
    + [(n, "sliding_window", v) for n in WITH_WINDOW for v in (0, *ABSURD)]
    + [(n, "rms_norm_eps", v) for n in FAMILIES for v in (0, -1e-6, 1e-60, 2, "1")]
    + [(n, "rope_theta", v) for n in FAMILIES for v in (0, 1e300, "x")]
    + [(n, "head_dim", v) for n in FAMILIES for v in (0, 15, 4098)]
    + [(n, "num_key_value_heads", v) for n in FAMILIES for v in (0, 3, "2")]
    + [(n, "tie_word_embeddings", "yes") for n in FAMILIES]
    + [
        ("granite", key, v)
        for key in (
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        )
        for v in (0, -1, 1e7, "1", [])
    ]
    + [("granite", "logits_scaling", 1e-7)]
    + [
        (n, key, v)
        for n, key in (
            ("gemma2", "query_pre_attn_scalar"),
            ("gemma3", "query_pre_attn_scalar"),
            ("gemma2", "attn_logit_softcapping"),
            ("gemma2", "final_logit_softcapping"),
            ("gemma3", "final_logit_softcapping"),
        )
        for v in (0, -1, 1e7, "1", [])
    ]
    + [("gemma3", "sliding_window_pattern", v) for v in (0, -1, 1.5, "6")]
    + [("gemma3", "rope_local_base_freq", v) for v in (0, 1e300, "x")]
    + [("smollm3", "no_rope_layer_interval", v) for v in (0, -1, 1.5, "4")]
    + [
        ("smollm3", "no_rope_layers", v)
        for v in ("all", [1, 1], [1, 2, 1], [1, True, 1], [1, "0", 1], {})
    ]
    + [
        (n, "layer_types", v)
        for n in ("mistral", "ministral", "gemma2", "gemma3", "smollm3", "qwen3-window")
        for v in ("sliding_attention", ALTERNATING[:2], ["chunked_attention"] * 3, [1, 2, 3])
    ]
    + [(n, "layer_types", ALTERNATING) for n in ("phi3", "olmo2", "granite", "llama-yarn")]
    + [("phi3", "partial_rotary_factor", v) for v in (0, -1, 1.5, 0.01, "1")]
    + [("phi3", "original_max_position_embeddings", v) for v in ABSURD]
)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_value_out_of_range_is_named(tmp_path, name):
    for which, key, value in OUT_OF_RANGE:
        if which == name:
            refused(tmp_path, dict(CONFIGS[name], **{key: value}), key)


def test_every_family_has_values_out_of_range():
    assert {n for n, _, _ in OUT_OF_RANGE} >= set(FAMILIES)


OWN_KEYS = {
    "sliding_window": (
        9,
        "mistral ministral ministral3 phi3 gemma2 gemma3 smollm3 olmo3 exaone4 gemma4",
    ),
    "use_sliding_window": (True, "smollm3"),
    "sliding_window_pattern": (2, "gemma3 exaone4"),
    "no_rope_layers": ([1, 0, 1], "smollm3"),
    "no_rope_layer_interval": (4, "smollm3"),
    "rope_local_base_freq": (1e4, "gemma3"),
    "query_pre_attn_scalar": (256, "gemma2 gemma3"),
    "attn_logit_softcapping": (50.0, "gemma2"),
    "final_logit_softcapping": (30.0, "gemma2 gemma3 gemma4"),
    "use_bidirectional_attention": (True, "gemma4"),
    "clip_qkv": (8.0, ""),
    "embedding_multiplier": (12.0, "granite"),
    "attention_multiplier": (0.1, "granite"),
    "residual_multiplier": (0.2, "granite"),
    "logits_scaling": (8.0, "granite"),
}


@pytest.mark.parametrize("name", [*FAMILIES, "llama-yarn", "qwen2-window"])
def test_a_field_of_another_family_is_named(tmp_path, name):
    cfg, family = CONFIGS[name], name.split("-")[0]
    for key, (value, owners) in OWN_KEYS.items():
        if family not in owners.split() and not (family == "qwen2" and "sliding_window" in key):
            refused(tmp_path, dict(cfg, **{key: value}), f"{key} is ", cfg["model_type"])
            ps.read_config(save(tmp_path, dict(cfg, **{key: None})))
    for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        ps.read_config(save(tmp_path, dict(cfg, **{key: 1})))


NOT_COMPUTED = [
    (dict(attention_bias=True), ["attention_bias"]),
    (dict(mlp_bias=True), ["mlp_bias"]),
    (dict(attention_dropout=-0.1), ["attention_dropout", "-0.1"]),
    (dict(resid_pdrop=1.1), ["resid_pdrop", "1.1"]),
    (dict(embd_pdrop="0.1"), ["embd_pdrop", "a string"]),
    (dict(num_experts=8), ["num_experts", "8"]),
    (dict(num_local_experts=8), ["num_local_experts", "8"]),
    (dict(quantization_config={"bits": 4}), ["quantization_config"]),
    (dict(vision_config={"hidden_size": 8}), ["vision_config", "random weights"]),
    (dict(text_config={"hidden_size": 8}), ["text_config", "docs/models.md"]),
    (dict(rope_scaling={"rope_type": "ntk", "factor": 2.0}), ["rope_type", "ntk"]),
    (dict(architectures=["LlamaForCausalLM"]), ["model_type", "LlamaForCausalLM"]),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_not_computed_is_refused_by_name(tmp_path, name):
    for change, parts in NOT_COMPUTED:
        if name == "gemma4" and change.keys() & {"rope_scaling", "num_experts"}:
            continue  # test_what_a_gemma4_cannot_be_is_refused_by_its_field; enable_moe_block says
        if "rope_scaling" in change and "rope_parameters" in CONFIGS[name]:
            change = {"rope_parameters": change["rope_scaling"]}
        if "attention_bias" not in change or name not in ("seed_oss", "glm4"):
            refused(tmp_path, dict(CONFIGS[name], **change), *parts)
    key = "hidden_activation" if name in ("gemma2", "gemma3", "gemma4") else "hidden_act"
    wrong = "silu" if name.startswith("gemma") else "gelu_pytorch_tanh"
    for act in (wrong, "gelu", "relu", 1):
        if (name, act) != ("gemma", "gelu"):  # its older name of the tanh approximation
            refused(tmp_path, dict(CONFIGS[name], **{key: act}), key)
    if name not in ("phi3", "glm4"):
        refused(tmp_path, dict(CONFIGS[name], partial_rotary_factor=0.5), "partial_rotary_factor")


@pytest.mark.parametrize(
    "name, change, parts",
    [
        ("phi3", dict(rope_scaling=longrope(5)), ["short_factor", "5", "6"]),
        ("phi3", dict(rope_scaling=dict(longrope(6), long_factor=3)), ["long_factor", "number"]),
        (
            "phi3",
            dict(rope_scaling=dict(longrope(6), long_factor=[1, 1, 0, 1, 1, 1])),
            ["long_factor[2]", "0"],
        ),
        (
            "phi3",
            dict(rope_scaling=dict(longrope(6), short_factor=[1, 1, "x", 1, 1, 1])),
            ["short_factor[2]", "string"],
        ),
        (
            "phi3",
            dict(rope_scaling=without(longrope(6), "long_factor")),
            ["long_factor", "missing"],
        ),
        ("phi3", dict(max_position_embeddings=None), ["max_position_embeddings", "missing"]),
        ("phi3", dict(head_dim=600, partial_rotary_factor=1.0), ["short_factor"]),
        ("llama-yarn", dict(rope_scaling=without(YARN, "factor")), ["factor", "missing"]),
        ("llama-yarn", dict(rope_scaling=dict(YARN, factor=0.5)), ["factor", "0.5"]),
        ("llama-yarn", dict(rope_scaling=dict(YARN, beta_fast=-1)), ["beta_fast", "-1"]),
        ("llama-yarn", dict(rope_scaling=dict(YARN, truncate=1)), ["truncate"]),
        ("llama-yarn", dict(rope_theta=1), ["rope_theta is 1"]),
        (
            "llama-yarn",
            dict(
                rope_scaling=without(YARN, "original_max_position_embeddings"),
                max_position_embeddings=None,
            ),
            ["max_position_embeddings", "missing"],
        ),
        ("gemma2", dict(sliding_window=None), ["sliding_window is null", "2 layers"]),
        ("ministral", dict(sliding_window=None), ["sliding_window is null", "layer_types"]),
        (
            "qwen3-window",
            dict(use_sliding_window=False),
            ["use_sliding_window is false", "layer_types"],
        ),
        (
            "smollm3",
            dict(sliding_window=9, layer_types=ALTERNATING),
            ["use_sliding_window is false", "layer_types"],
        ),
        (
            "gemma3",
            dict(model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"]),
            ["text_config is missing"],
        ),
    ],
)
def test_fields_that_do_not_go_together_are_refused(tmp_path, name, change, parts):
    refused(tmp_path, dict(CONFIGS[name], **change), *parts)


@settings(
    max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_mutated_configs_are_read_or_refused_in_one_sentence(tmp_path, name, data):
    cfg = copy.deepcopy(CONFIGS[name])
    for _ in range(data.draw(st.integers(1, 3))):
        scaling = cfg.get("rope_scaling")
        at = scaling if isinstance(scaling, dict) and scaling and data.draw(st.booleans()) else cfg
        if not at:
            continue
        key = data.draw(st.sampled_from(sorted(at)))
        if data.draw(st.integers(0, 3)) == 0:
            at.pop(key)
        else:
            at[key] = data.draw(junk)
    c = ps.read_or_refused(save(tmp_path, cfg))
    if c is None:
        return
    try:
        assert ps.lib.ps_model_n_elements(ps.Model(c)) > 0
    except ps.Failed as e:
        assert e.code == ps.EINVAL
        ps.one_sentence(e.message)
