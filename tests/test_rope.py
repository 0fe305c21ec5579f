"""The frequencies of RoPE (native/model/rope.c) against transformers' modeling_rope_utils.

Bit for bit where transformers takes its powers as rope.c does, rounded from fp64; torch's own fp32
powers are an ulp or two off, so against transformers as it is every frequency has 4 ulps."""

import numpy as np
import pytest
import torch
from kernel_calls import rope_table
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

pytestmark = pytest.mark.oldest


class Base(float):
    """A rope_theta whose power by a tensor is rounded from fp64."""

    def __pow__(self, x):
        return torch.pow(torch.tensor(np.float32(self)).double(), x.double()).float()


LONG = [1.0 + 0.37 * i for i in range(48)]
SHORT = [1.0 + 0.01 * i for i in range(48)]
# kind, rotary_dim, rope_theta, rope_scaling, what the config has beside it
CASES = {
    "default": ("default", 128, 1e4, {}, {}),
    "default, 2": ("default", 2, 1e4, {}, {}),
    "default, 256 at 1e6": ("default", 256, 1e6, {}, {}),
    "linear": ("linear", 64, 1e4, {"factor": 3.7}, {}),
    "llama3": (
        "llama3",
        128,
        5e5,
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {},
    ),
    "yarn": ("yarn", 128, 1e6, {"factor": 4.0, "original_max_position_embeddings": 32768}, {}),
    "yarn, its length from max": ("yarn", 128, 1e4, {"factor": 16.0}, {"max": 4096}),
    "yarn, factor under 1": ("yarn", 64, 1e4, {"factor": 0.5}, {"max": 2048}),
    "yarn, one pair": ("yarn", 2, 1e4, {"factor": 4.0}, {"max": 2048}),
    "yarn, mscale": (
        "yarn",
        64,
        1e4,
        {
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        {},
    ),
    "yarn, fractions kept": (
        "yarn",
        64,
        150000.0,
        {
            "factor": 32.0,
            "beta_fast": 24.0,
            "beta_slow": 2.5,
            "truncate": False,
            "attention_factor": 1.375,
            "original_max_position_embeddings": 4096,
        },
        {},
    ),
    "dynamic, up to max_position_embeddings": (
        "dynamic",
        64,
        5e5,
        {"factor": 4.0},
        {"max": 2048, "seq_len": 2048},
    ),
    "longrope, short": (
        "longrope",
        96,
        1e4,
        {"short_factor": SHORT, "long_factor": LONG},
        {"max": 131072, "original": 4096, "seq_len": 4096},
    ),
    "longrope, long": (
        "longrope",
        96,
        1e4,
        {"short_factor": SHORT, "long_factor": LONG},
        {"max": 131072, "original": 4096, "seq_len": 4097},
    ),
    "longrope, factor": (
        "longrope",
        96,
        1e4,
        {"short_factor": SHORT, "long_factor": LONG, "factor": 16.0},
        {"max": 8192, "seq_len": 9000},
    ),
    "longrope, attention factor": (
        "longrope",
        96,
        1e4,
        {"short_factor": SHORT, "long_factor": LONG, "attention_factor": 1.25, "factor": 2.0},
        {"max": 8192, "seq_len": 100},
    ),
}
OURS = {"original_max_position_embeddings": "original_positions", "truncate": "keep_fraction"}


def ours(case):
    kind, rotary, theta, scaling, beside = case
    fields = {OURS.get(k, k): (not v if k == "truncate" else v) for k, v in scaling.items()}
    if "original" in beside:
        fields["original_positions"] = beside["original"]
    return rope_table(
        kind,
        rotary,
        beside.get("seq_len", 1),
        theta=theta,
        max_positions=beside.get("max", 131072),
        **fields,
    )


def theirs(case, base):
    kind, rotary, theta, scaling, beside = case
    cfg = LlamaConfig(
        hidden_size=rotary,
        num_attention_heads=1,
        head_dim=rotary,
        max_position_embeddings=beside.get("max", 131072),
    )
    cfg.rope_theta, cfg.rope_scaling = base(theta), {"rope_type": kind, **scaling}
    if "original" in beside:
        cfg.original_max_position_embeddings = beside["original"]
    if kind == "default":  # has no entry of its own in every version
        return 1.0 / (cfg.rope_theta ** (torch.arange(0, rotary, 2).float() / rotary)), 1.0
    return ROPE_INIT_FUNCTIONS[kind](cfg, "cpu", seq_len=beside.get("seq_len"))


@pytest.mark.parametrize("name", CASES)
def test_bits_of_transformers(name):
    got, by = ours(CASES[name])
    want, want_by = theirs(CASES[name], Base)
    assert np.array_equal(got.view(np.uint32), want.numpy().view(np.uint32))
    assert by == np.float32(want_by)
    plain = theirs(CASES[name], float)[0].numpy()
    assert (np.abs(got - plain) <= 4 * np.spacing(plain)).all()


def test_none_has_no_frequencies():
    inv_freq, by = rope_table("default", 0)
    assert len(inv_freq) == 0 and by == 1.0


YARN = dict(theta=1e4, factor=4.0, original_positions=4096)


@pytest.mark.parametrize(
    "kind, rotary, fields, words",
    [
        ("default", 63, dict(theta=1e4), ["63", "even"]),
        ("default", 258, dict(theta=1e4), ["258", "256"]),
        ("default", 64, dict(theta=0.0), ["rope_theta", "0"]),
        ("default", 64, dict(theta=float("inf")), ["rope_theta", "inf"]),
        ("linear", 64, dict(theta=1e4, factor=0.0), ["factor", "0"]),
        ("llama3", 64, dict(YARN, low_freq_factor=1.0), ["high_freq_factor"]),
        ("yarn", 64, dict(YARN, beta_slow=-1.0), ["beta_slow", "-1"]),
        ("yarn", 64, dict(YARN, theta=1.0), ["rope_theta"]),
        ("yarn", 64, dict(YARN, attention_factor=-2.0), ["attention_factor", "-2"]),
        ("yarn", 64, dict(YARN, original_positions=0), ["original_max_position_embeddings"]),
        ("dynamic", 64, dict(theta=1e4, factor=4.0, max_positions=32, seq_len=33), ["33", "32"]),
        ("longrope", 96, dict(YARN, short_factor=SHORT), ["long_factor[0]", "0"]),
        (
            "longrope",
            96,
            dict(YARN, short_factor=SHORT, long_factor=[0.0] * 48),
            ["long_factor[0]", "0"],
        ),
    ],
)
def test_refused_by_name(kind, rotary, fields, words):
    with pytest.raises(ValueError) as refused:
        rope_table(kind, rotary, **fields)
    assert all(word in str(refused.value) for word in words), refused.value
