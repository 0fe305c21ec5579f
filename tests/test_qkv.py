"""qkv_split_fwd: its angles at any position, RoPE against transformers, what is refused. Against its
formula, with QK-norm and the gradients: test_op_cases.py.

Tolerance. With u = 2^-24: sines and cosines are within 1.01 half ulps, so at most u off; a rotated
element a*c - b*s takes three roundings and two such factors: 4 u (|a c| + |b s|)."""

import math
import struct

import numpy as np
import pytest
import torch
from kernel_calls import F32, PAIRS, U, poison, refusal, rope_table, run

NONE, LINEAR, LLAMA3 = "default", "linear", "llama3"
EPS = 1e-6


class Case:
    """fp32, without norms, every element of a head turned."""

    factor, low, high, original = 8.0, 1.0, 4.0, 8192

    def __init__(self, n_tokens, heads, d, theta=1e4, scaling=NONE, factor=8.0, pos=None):
        g = torch.Generator().manual_seed(0)
        self.t, (self.h, self.kv_h), self.d = n_tokens, heads, d
        self.theta, self.scaling, self.factor = theta, scaling, factor
        self.qkv = torch.randn(n_tokens, (self.h + 2 * self.kv_h) * d, generator=g)
        self.q, self.kv = (
            poison((n_tokens, n * d), self.qkv.dtype) for n in (self.h, 2 * self.kv_h)
        )
        self.pos = torch.as_tensor(np.arange(n_tokens) if pos is None else pos).int()

    def args(self):
        inv_freq, by = rope_table(
            self.scaling,
            self.d,
            theta=self.theta,
            factor=self.factor,
            low_freq_factor=self.low,
            high_freq_factor=self.high,
            original_positions=self.original,
        )
        words = (self.t, self.h, self.kv_h, self.d, F32, 0, 0, self.d, EPS, by, 0.0)
        table = [*inv_freq, *[0.0] * (PAIRS - len(inv_freq))]
        return struct.pack(f"@8I3f{PAIRS}f2If3I", *words, *table, 0, 0, 0.0, 0, 0, 0)

    def forward(self):
        inputs, outputs = [(0, self.qkv), (1, self.pos)], [(2, self.q), (3, self.kv)]
        return run("qkv_split_fwd", self.args(), inputs, outputs)


def pair_norm(x, d):
    """For each element of a head the size of its pair, sqrt(2) * |(a, b)| >= |a c| + |b s|."""
    p = x.view(*x.shape[:-1], -1, 2, d // 2)
    size = math.sqrt(2) * p.square().sum(-2, keepdim=True).sqrt()
    return size.expand_as(p).reshape(x.shape)


ROPES = [dict(), dict(scaling=LINEAR, factor=4.0), dict(scaling=LLAMA3, theta=5e5)]


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_angles_at_positions_up_to_a_million_and_beyond(theta):
    """q = (1, 0) pairs show cos and sin themselves: |error| <= 2^-25 (half an ulp below 1) + 2e-10
    of the reduction and polynomial."""
    pos = np.unique(
        np.concatenate(
            [
                np.arange(50),
                np.random.default_rng(0).integers(0, 10**6, 400),
                [999_999, 1_000_000, 2**31 - 1],
            ]
        )
    )
    case = Case(n_tokens=len(pos), heads=(1, 1), d=128, theta=theta, pos=pos)
    case.qkv[:, :128] = torch.cat([torch.ones(64), torch.zeros(64)])
    q = case.forward()[0].double().numpy()
    import mpmath

    mpmath.mp.prec = 120
    inv = [
        float(v)
        for v in np.float32(1)
        / np.power(
            np.float64(np.float32(theta)),
            np.float64(np.arange(0, 128, 2, dtype=np.float32) / np.float32(128)),
        ).astype(np.float32)
    ]
    for row in list(range(0, len(pos), 29)) + [len(pos) - 2, len(pos) - 1]:
        for i in range(0, 64, 3):
            angle = mpmath.mpf(int(pos[row])) * mpmath.mpf(inv[i])
            bound = 2.0**-25 + 2e-10 + float(angle) * 2.0**-53
            assert (
                abs(q[row, i] - float(mpmath.cos(angle))) <= bound
                and abs(q[row, i + 64] - float(mpmath.sin(angle))) <= bound
            )


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("d", [64, 128])
def test_same_as_transformers_rotary_embedding(rope, d):
    """Its angles are products in fp32: off by u * angle, plus the last bits of inv_freq."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    case = Case(n_tokens=300, heads=(4, 2), d=d, **rope)
    scaling = {
        NONE: None,
        LINEAR: {"rope_type": "linear", "factor": case.factor},
        LLAMA3: {
            "rope_type": "llama3",
            "factor": case.factor,
            "low_freq_factor": case.low,
            "high_freq_factor": case.high,
            "original_max_position_embeddings": case.original,
        },
    }[case.scaling]
    cfg = LlamaConfig(
        hidden_size=4 * d,
        num_attention_heads=4,
        head_dim=d,
        rope_theta=case.theta,
        rope_scaling=scaling,
        max_position_embeddings=131072,
    )
    heads = lambda x: x.view(case.t, -1, d).transpose(0, 1)[None]
    q, k = heads(case.qkv[:, : 4 * d]), heads(case.qkv[:, 4 * d : 6 * d])
    cos, sin = LlamaRotaryEmbedding(cfg)(q, case.pos[None].long())
    want = [x[0].transpose(0, 1).reshape(case.t, -1) for x in apply_rotary_pos_emb(q, k, cos, sin)]
    got = case.forward()
    for g, w in zip((got[0], got[1][:, : 2 * d]), want):
        error = (4 + 5 * case.pos.double()[:, None]) * U * pair_norm(w.double(), d)
        assert ((g.double() - w.double()).abs() <= error).all()


def test_arguments_out_of_range_are_refused_by_name():
    def message(**changed):
        case = Case(70, (6, 2), 64)
        args = bytearray(case.args())
        for name, value in changed.items():
            kind, at = {
                "head_dim": ("I", 12),
                "dt": ("I", 16),
                "qk_norm": ("I", 20),
                "rotary_dim": ("I", 28),
                "attention_factor": ("f", 36),
                "norm_offset": ("f", 40),
            }[name]
            struct.pack_into(kind, args, at, value)
        return refusal("qkv_split_fwd", bytes(args), (case.qkv, case.pos, case.q, case.kv))

    assert "head_dim is 63" in message(head_dim=63)
    assert "dt is 2" in message(dt=2)
    assert "rotary_dim is 31" in message(rotary_dim=31)
    assert "rotary_dim is 66" in message(rotary_dim=66) and "64" in message(rotary_dim=66)
    assert "rotary_dim is 258" in message(head_dim=512, rotary_dim=258)
    assert "attention_factor is 0" in message(attention_factor=0.0)
    assert "attention_factor is nan" in message(attention_factor=math.nan)
    assert "qk_norm is 4" in message(qk_norm=4)
    assert "norm_offset is inf" in message(norm_offset=math.inf)
