"""config.json: what transformers reads we read alike, what would change the math is refused by
name, nothing crashes."""

import ctypes
import json
import os

import io_native as ps
import pytest
from hypothesis import strategies as st
from kernel_calls import rope_table
from penstock import Generator, Hardware, InvalidError, ModelConfig, Plan

os.environ.setdefault("HF_HUB_OFFLINE", "1")
LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    bos_token_id=1,
    eos_token_id=[2, 3],
)
QWEN2 = dict(LLAMA, architectures=["Qwen2ForCausalLM"], model_type="qwen2")
QWEN3 = dict(LLAMA, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=32)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def save(folder, cfg):
    (folder / "config.json").write_text(cfg if isinstance(cfg, str) else json.dumps(cfg))
    return folder


def without(cfg, *keys):
    return {k: v for k, v in cfg.items() if k not in keys}


def refused(folder, cfg, *parts, code=ps.EFORMAT):
    with pytest.raises(ps.Failed) as e:
        ps.read_config(save(folder, cfg))
    assert e.value.code == code
    ps.one_sentence(e.value.message, folder / "config.json", *parts)


def test_a_folder_and_the_file_itself_are_read_alike(tmp_path):
    a, b = ps.read_config(save(tmp_path, LLAMA)), ps.read_config(tmp_path / "config.json")
    assert bytes(a) == bytes(b)
    assert (
        a.struct_bytes,
        a.family,
        a.vocab_size,
        a.n_layers,
        a.dim,
        a.n_heads,
        a.n_kv_heads,
        a.head_dim,
        a.ffn_dim,
    ) == (ctypes.sizeof(ps.ModelConfig), 0, 512, 2, 128, 8, 2, 16, 352)
    assert (a.max_positions, a.bos_token_id, a.eos_token_id, a.rope.theta, a.rope.kind) == (
        2048,
        1,
        2,
        5e5,
        0,
    )


LONGROPE = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8)
PHI3 = dict(
    without(LLAMA, "rope_theta"), architectures=["Phi3ForCausalLM"], model_type="phi3",
    max_position_embeddings=128, original_max_position_embeddings=16,
)  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize(
    "cfg, kind",
    [
        (dict(LLAMA, rope_scaling={}), 0),
        (dict(LLAMA, rope_parameters={}), 0),
        (dict(LLAMA, rope_parameters={"rope_theta": 5e5, "rope_type": None}), 0),
        (dict(LLAMA, rope_scaling={}, rope_parameters={"rope_type": "linear", "factor": 2.0}), 1),
        (dict(LLAMA, rope_scaling=DYNAMIC), 5),
        (dict(LLAMA, rope_parameters=DYNAMIC), 5),
        (dict(PHI3, rope_parameters=dict(LONGROPE, type="yarn")), 4),
        (dict(PHI3, rope_parameters=dict(LONGROPE, type="su")), 4),
    ],
)
def test_rope_as_transformers_5_reads_and_writes_it(tmp_path, cfg, kind):
    """5.24 reads {} and a missing rope_type as no scaling, and writes longrope's old names beside
    the new one."""
    assert ps.read_config(save(tmp_path, cfg)).rope.kind == kind


def test_longrope_goes_by_the_version_of_transformers_that_wrote_it(tmp_path):
    """By the ratio of the lengths, 8, or by factor, 2. 5.24's LlamaRotaryEmbedding has the
    attention_scaling 1.118033988749895 on this config, 4.57.1's 1.3228756555322954."""
    cfg = dict(
        LLAMA, max_position_embeddings=128, original_max_position_embeddings=16,
        rope_scaling=dict(LONGROPE, factor=2.0),
    )  # fmt: skip

    def factor(**changes):
        rope = ps.read_config(save(tmp_path, dict(cfg, **changes))).rope
        fields = {k: getattr(rope, k) for k in ("factor", "attention_factor", "original_positions")}
        lists = dict(short_factor=[1.0] * 8, long_factor=[2.0] * 8)
        return rope_table("longrope", 16, 9, 128, theta=1e4, **fields, **lists)[1]

    old, new = 1.3228756555322954, 1.118033988749895
    for version, want in (("4.57.1", old), ("4.40.0.dev0", old), ("5.0.0", new), ("5.24.0", new)):
        assert factor(transformers_version=version) == ctypes.c_float(want).value
    for scaling in (dict(factor=8.0), dict(attention_factor=old, factor=2.0)):  # no disagreement
        assert factor(rope_scaling=dict(LONGROPE, **scaling)) == ctypes.c_float(old).value
    for version in (None, "", 5, "3.9", "main"):
        refused(tmp_path, dict(cfg, transformers_version=version), "is 2, but", "is 8: ")


def test_dynamic_rope_is_refused_where_it_would_change_something(tmp_path):
    cfg = dict(LLAMA, max_position_embeddings=64, rope_scaling=DYNAMIC)
    model, hw = ModelConfig.read(save(tmp_path, cfg)), Hardware.estimate(1, "cpu")
    Plan(model, seq_len=64, tokens_per_step=64, hardware=hw)
    with pytest.raises(InvalidError, match="longer than the model's max_position_embeddings 64"):
        Plan(model, seq_len=65, tokens_per_step=65, hardware=hw)
    says = "65 tokens, and the model's max_position_embeddings is 64"
    with pytest.raises(InvalidError, match=says):
        Generator(tmp_path, context=65, hardware=hw)


def test_dropout_is_refused_by_training_alone(tmp_path):
    hw = Hardware.estimate(1, "cpu")
    for key in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
        model = ModelConfig.read(save(tmp_path, dict(LLAMA, **{key: 0.125})))
        assert model.dropout == 0.125
        Plan(model, seq_len=8, tokens_per_step=8, forward_only=True, hardware=hw)
        with pytest.raises(InvalidError, match=f"dropout of 0.125.*{key}"):
            Plan(model, seq_len=8, tokens_per_step=8, hardware=hw)


@pytest.mark.parametrize(
    "change, parts",
    [
        (
            dict(architectures=["MambaForCausalLM"]),
            ["architectures", "MambaForCausalLM", "llama, qwen2"],
        ),
        (dict(architectures=["LlamaForCausalLM", "X"]), ["architectures"]),
        (dict(architectures=[]), ["architectures"]),
        (dict(architectures="LlamaForCausalLM"), ["architectures"]),
        (dict(model_type="qwen2"), ["model_type", "qwen2", "LlamaForCausalLM"]),
        (dict(architectures=None, model_type="gpt2"), ["model_type", "gpt2"]),
        (dict(architectures=None, model_type=None), ["architectures", "model_type", "missing"]),
        (dict(architectures=None, model_type=3), ["model_type"]),
        (dict(num_attention_heads=9), ["hidden_size", "128", "9"]),
        (dict(num_key_value_heads=3), ["num_attention_heads", "8", "3"]),
        (dict(num_key_value_heads=0), ["num_key_value_heads", "0"]),
        (dict(head_dim=15), ["head_dim", "15", "even"]),
        (dict(head_dim=0), ["head_dim"]),
        (dict(head_dim=4098), ["head_dim", "4098", "4096"]),
        (
            dict(num_attention_heads=16384, num_key_value_heads=1, head_dim=4096),
            ["num_attention_heads x head_dim"],
        ),
        (dict(hidden_act="gelu"), ["hidden_act", "gelu", "silu"]),
        (dict(hidden_act=1), ["hidden_act"]),
        (dict(attention_bias=True), ["attention_bias", "o_proj"]),
        (dict(attention_bias="no"), ["attention_bias"]),
        (dict(mlp_bias=True), ["mlp_bias"]),
        (dict(attention_dropout=1.5), ["attention_dropout", "1.5"]),
        (dict(num_experts=8), ["num_experts", "8"]),
        (dict(num_local_experts=8), ["num_local_experts"]),
        (dict(quantization_config={"bits": 4}), ["quantization_config"]),
        (dict(partial_rotary_factor=0.5), ["partial_rotary_factor", "0.5"]),
        (dict(rope_scaling={"rope_type": "ntk", "factor": 4.0}), ["rope_type", "ntk", "llama3"]),
        (dict(rope_scaling={"type": "dynamic"}), ["factor", "dynamic"]),
        (
            dict(rope_scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=None),
            ["max_position_embeddings", "dynamic"],
        ),
        (dict(rope_scaling={"factor": 4.0}), ["rope_type"]),
        (
            dict(rope_scaling={"rope_type": "linear", "type": "default", "factor": 4.0}),
            ['rope_type is "linear"', 'type is "default"', "agree"],
        ),
        (
            dict(rope_scaling={"rope_type": "linear", "type": 3, "factor": 4.0}),
            ['rope_type is "linear"', "type is a number"],
        ),
        (
            dict(rope_parameters=dict(LLAMA3, type="yarn")),
            ['rope_type is "llama3"', 'type is "yarn"'],
        ),
        (dict(rope_scaling={"type": "linear"}), ["factor", "missing"]),
        (dict(rope_scaling={"type": "linear", "factor": 0.5}), ["factor", "0.5"]),
        (dict(rope_scaling={"type": "linear", "factor": "2"}), ["factor"]),
        (dict(rope_scaling=3), ["rope_scaling"]),
        (dict(rope_scaling=without(LLAMA3, "low_freq_factor")), ["low_freq_factor", "missing"]),
        (
            dict(rope_scaling=without(LLAMA3, "original_max_position_embeddings")),
            ["original_max_position_embeddings", "missing"],
        ),
        (
            dict(rope_scaling=dict(LLAMA3, low_freq_factor=4.0)),
            ["low_freq_factor", "high_freq_factor", "4"],
        ),
        (
            dict(rope_scaling=dict(LLAMA3, original_max_position_embeddings=0)),
            ["original_max_position_embeddings", "0"],
        ),
        (dict(rope_scaling={"type": "default", "mrope_section": [1, 2]}), ["mrope_section"]),
        (
            dict(rope_scaling=LLAMA3, rope_parameters=dict(LLAMA3, factor=4.0)),
            ["rope_scaling", "rope_parameters"],
        ),
        (
            dict(rope_parameters=dict(rope_type="default", rope_theta=1e6)),
            ["rope_theta", "500000", "1e+06"],
        ),
        (
            dict(
                rope_parameters=dict(rope_type="default", rope_theta=5e5, partial_rotary_factor=0.5)
            ),
            ["partial_rotary_factor"],
        ),
        (dict(vocab_size=257.0), ["vocab_size is 257.0:", "point"]),
        (dict(hidden_size=1e30), ["hidden_size is 1e+30:"]),
        (dict(note="x" * 2**20), ["bytes", "at most 1048576"]),
        (dict(rope_theta=0), ["rope_theta", "0"]),
        (dict(rope_theta=1e300), ["rope_theta"]),
        (dict(rms_norm_eps=0), ["rms_norm_eps"]),
        (dict(rms_norm_eps=-1e-5), ["rms_norm_eps"]),
        (dict(rms_norm_eps=1e-60), ["rms_norm_eps"]),
        (dict(rms_norm_eps="1e-5"), ["rms_norm_eps"]),
        (
            dict(layer_types=["full_attention", "sliding_attention"]),
            ["layer_types[1]", "sliding_attention"],
        ),
        (dict(layer_types=["full_attention"]), ["layer_types", "1", "2"]),
        (dict(tie_word_embeddings="yes"), ["tie_word_embeddings"]),
        (dict(bos_token_id="<s>"), ["bos_token_id"]),
        (dict(max_position_embeddings=-5), ["max_position_embeddings"]),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path, change, parts):
    refused(tmp_path, dict(LLAMA, **change), *parts)


def test_sliding_windows_are_read_only_where_they_are_in_use(tmp_path):
    cfg = dict(QWEN2, use_sliding_window=True, sliding_window=64)
    assert ps.read_config(save(tmp_path, dict(cfg, max_window_layers=2))).window == 64
    off = ps.read_config(save(tmp_path, dict(cfg, use_sliding_window=False, max_window_layers=1)))
    assert (off.window, sum(off.layer_flags)) == (0, 0)
    on = ps.read_config(save(tmp_path, dict(cfg, max_window_layers=1)))
    assert (on.window, list(on.layer_flags[:2])) == (64, [0, 1])


def test_qwen3_with_biases_is_refused_and_qwen2_has_them_anyway(tmp_path):
    refused(tmp_path, dict(QWEN3, attention_bias=True), "attention_bias")
    assert ps.read_config(save(tmp_path, dict(QWEN2, attention_bias=True))).qkv_bias == 1


def test_how_pretraining_cut_its_products_does_not_matter(tmp_path):
    """transformers ignores it, and SmolLM3's published config says 2."""
    assert ps.read_config(save(tmp_path, dict(LLAMA, pretraining_tp=2))).n_layers == 2


def test_token_ids_past_the_vocabulary_count_as_none(tmp_path):
    c = ps.read_config(save(tmp_path, dict(LLAMA, bos_token_id=512, eos_token_id=None)))
    assert (c.bos_token_id, c.eos_token_id) == (-1, -1)


def test_what_is_no_config_is_refused(tmp_path):
    refused(tmp_path, "", "line 1")
    refused(tmp_path, "[]", "a list")
    refused(tmp_path, '{"vocab_size": 1, "vocab_size": 2}', "vocab_size", "twice")
    (tmp_path / "config.json").unlink()
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ps.Failed) as e:
            ps.read_config(path)
        assert e.value.code == ps.EIO
        ps.one_sentence(e.value.message, path, "No such file")


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.integers(0, 64),
    st.lists(st.text(max_size=3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


# ---- parameters ----------------------------------------------------------------------------------

# Without the families whose sinks, convolutions and decays have other roles and sizes.
MODELS = [
    p
    for p in sorted((ps.ROOT / "models").glob("*.json"))
    if json.loads(p.read_text())["model_type"] not in ("gpt_oss", "qwen3_5_text")
]


def params(c):
    m, out = ps.Model(c), []
    for i in range(ps.lib.ps_model_n_params(m)):
        p = ps.ParamInfo()
        ps.check(ps.lib.ps_model_param(m, i, ctypes.byref(p)))
        out.append(p)
    return out


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_units_are_laid_out_in_aligned_runs_without_overlap(path):
    c = ps.read_config(path)
    m = ps.Model(c)
    fused = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias", "up_proj.weight")
    at, last = 0, -1
    total = sum(p.n for p in params(c))
    for p in params(c):
        name = p.name.decode()
        if p.unit != last:
            assert p.unit == last + 1 and p.offset == 0
            if last >= 0:
                assert ps.lib.ps_model_unit_elements(m, last) == (at + 63) // 64 * 64
        elif name.endswith(fused):
            assert p.offset == at
        else:
            assert p.offset == (at + 63) // 64 * 64
        assert p.n == p.shape[0] * p.shape[1] and (p.n_dims == 2 or p.shape[1] == 1)
        assert p.role == (2 if name.endswith("bias") else 1 if "norm" in name else 0)
        at, last = p.offset + p.n, p.unit
    sparse = sum(flags & 8 > 0 for flags in c.layer_flags[: c.n_layers])
    assert last == c.n_layers + sparse + 1 == ps.lib.ps_model_n_units(m) - 1
    assert ps.lib.ps_model_unit_elements(m, last) == (at + 63) // 64 * 64
    assert total == ps.lib.ps_model_n_elements(m)
    assert ps.lib.ps_model_unit_elements(m, last + 1) == 0


@pytest.mark.parametrize(
    "path", [p for p in MODELS if p.stem.startswith(("tiny", "demo"))], ids=lambda p: p.stem
)
def test_names_and_shapes_are_those_of_transformers(path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    want = {k: tuple(v.shape) for k, v in model.named_parameters()}  # tied tensors once
    assert {
        p.name.decode(): tuple(p.shape[: p.n_dims]) for p in params(ps.read_config(path))
    } == want


@pytest.mark.parametrize(
    "name, billions", [("1b", 1.498), ("8b", 8.030), ("15b", 15.01), ("32b", 32.76)]
)
def test_shipped_sizes_are_the_published_ones(name, billions):
    m = ps.Model(ps.read_config(ps.ROOT / f"models/{name}.json"))
    assert ps.lib.ps_model_n_elements(m) / 1e9 == pytest.approx(billions, abs=0.005)


def test_flops_follow_the_formula_of_the_design():
    m, f = ps.Model(ps.read_config(ps.ROOT / "models/8b.json")), ps.Flops()
    ps.check(ps.lib.ps_model_flops(m, 4096, ctypes.byref(f)))
    s, d, a, k, ffn, v, n = 4096, 4096, 4096, 1024, 14336, 128256, 32
    matmul, fwd, bwd, head = (
        2 * s * (2 * d * a + 2 * d * k + 3 * d * ffn),
        2 * s * s * a,
        4 * s * s * a,
        6 * s * d * v,
    )
    assert (f.matmul, f.attn_fwd, f.attn_bwd, f.head) == (n * matmul, n * fwd, n * bwd, head)
    assert f.sequence == n * (3 * matmul + fwd + bwd) + head
    for seq_len in (0, 2**30 + 1):
        assert ps.lib.ps_model_flops(m, seq_len, ctypes.byref(f)) == ps.EINVAL


def test_parameters_are_found_by_name_and_by_index():
    m, p = ps.Model(ps.read_config(MODELS[0])), ps.ParamInfo()
    n = ps.lib.ps_model_n_params(m)
    for i in range(n):
        ps.check(ps.lib.ps_model_param(m, i, ctypes.byref(p)))
        assert ps.lib.ps_model_find(m, p.name) == i
    assert ps.lib.ps_model_find(m, b"model.layers.0") == 2**32 - 1
    assert ps.lib.ps_model_param(m, n, ctypes.byref(p)) == ps.EINVAL
