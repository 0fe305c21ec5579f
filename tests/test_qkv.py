"""qkv_split_fwd and qkv_split_bwd: RoPE and QK-norm against PyTorch in fp64 and against
transformers.

Tolerance. With u = 2^-24: sines and cosines are within 1.01 half ulps, so at most u off; a rotated
element a*c - b*s takes three roundings and two such factors: 4 u (|a c| + |b s|). A norm's mean of
n squares in 16 lanes errs by (n/16 + 5) u, its root by half of that, plus 4 roundings. Sums over n
rows for dw: 4 sqrt(n) u of the sum of absolute terms."""

import math
import struct

import numpy as np
import pytest
import torch
from kernel_calls import (
    BF16,
    F32,
    PAIRS,
    TORCH_DTYPE,
    U,
    poison,
    refusal,
    rope_table,
    rounding,
    run,
)

NONE, LINEAR, LLAMA3 = "default", "linear", "llama3"
EPS = 1e-6
HEAD, ROW = 1, 2  # qk_norm


class Case:
    def __init__(
        self,
        n_tokens=70,
        heads=(6, 2),
        d=64,
        dt=F32,
        norm=0,
        theta=1e4,
        scaling=NONE,
        factor=8.0,
        low=1.0,
        high=4.0,
        original=8192,
        rotary=None,
        by=1.0,
        offset=0.0,
        pos=None,
        seed=0,
    ):
        g = torch.Generator().manual_seed(seed)
        self.t, (self.h, self.kv_h), self.d, self.dt, self.norm = n_tokens, heads, d, dt, norm
        self.theta, self.scaling, self.factor, self.low, self.high, self.original = (
            theta,
            scaling,
            factor,
            low,
            high,
            original,
        )
        self.rotary, self.by, self.offset = d if rotary is None else rotary, by, offset
        normal = lambda *shape: torch.randn(*shape, generator=g).to(TORCH_DTYPE[dt])
        self.qkv, self.dq = (
            normal(n_tokens, (self.h + 2 * self.kv_h) * d),
            normal(n_tokens, self.h * d),
        )
        self.dkv = torch.randn(n_tokens, 2 * self.kv_h * d, generator=g)
        self.wq, self.wk = (normal(n * d if norm == ROW else d) for n in heads)
        self.pos = (
            torch.arange(n_tokens, dtype=torch.int32)
            if pos is None
            else torch.as_tensor(pos, dtype=torch.int32)
        )

    def args(self, accumulate=0):
        inv_freq, by = rope_table(
            self.scaling,
            self.rotary,
            theta=self.theta,
            factor=self.factor,
            low_freq_factor=self.low,
            high_freq_factor=self.high,
            original_positions=self.original,
        )
        assert by == 1.0
        return struct.pack(
            f"@8I3f{PAIRS}f",
            self.t,
            self.h,
            self.kv_h,
            self.d,
            self.dt,
            self.norm,
            accumulate,
            self.rotary,
            EPS,
            self.by,
            self.offset,
            *inv_freq,
            *[0.0] * (PAIRS - len(inv_freq)),
        )

    def forward(self, **kw):
        inputs = [(0, self.qkv), (1, self.pos)] + (
            [(4, self.wq), (5, self.wk)] if self.norm else []
        )
        dtype = self.qkv.dtype
        return run(
            "qkv_split_fwd",
            self.args(),
            inputs,
            [(2, poison(self.dq.shape, dtype)), (3, poison(self.dkv.shape, dtype))],
            **kw,
        )

    def backward(self, dw=None, **kw):
        inputs, outputs = (
            [(0, self.dq), (1, self.dkv), (2, self.pos)],
            [(3, poison(self.qkv.shape, self.qkv.dtype))],
        )
        if self.norm:
            inputs += [(4, self.qkv), (5, self.wq), (6, self.wk)]
            outputs += list(
                zip((7, 8), dw or [poison(w.shape, w.dtype) for w in (self.wq, self.wk)])
            )
        return run("qkv_split_bwd", self.args(int(dw is not None)), inputs, outputs, **kw)

    # ---- the oracle, fp64 but for inv_freq, which is transformers' own fp32 one
    # ----------------------------------------------
    def inv_freq(self):
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaling = {
            LINEAR: {"rope_type": "linear", "factor": self.factor},
            LLAMA3: {
                "rope_type": "llama3",
                "factor": self.factor,
                "low_freq_factor": self.low,
                "high_freq_factor": self.high,
                "original_max_position_embeddings": self.original,
            },
        }.get(self.scaling)
        cfg = LlamaConfig(
            hidden_size=self.rotary,
            num_attention_heads=1,
            head_dim=self.rotary,
            rope_theta=self.theta,
            rope_scaling=scaling,
            max_position_embeddings=131072,
        )
        if scaling is None:  # the default type has no entry of its own in every version
            return 1.0 / (
                self.theta ** (torch.arange(0, self.rotary, 2).float() / max(self.rotary, 1))
            )
        return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](cfg, "cpu")[0]

    def oracle(self, qkv, wq, wk):
        """q and kv in fp64 of fp64 leaves, without the storage roundings."""
        n_q, n_k = self.h * self.d, self.kv_h * self.d
        angle = self.pos.double()[:, None] * self.inv_freq().double()
        cos, sin = (self.by * torch.cat([f(angle)] * 2, 1)[:, None] for f in (torch.cos, torch.sin))
        r = self.rotary

        def turned(x, w):
            x = x.view(self.t, -1, self.d if self.norm == HEAD else x.shape[1])
            if self.norm:
                x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (w + self.offset)
            x = x.view(self.t, -1, self.d)
            half = torch.cat([-x[..., r // 2 : r], x[..., : r // 2]], -1)
            return torch.cat([x[..., :r] * cos + half * sin, x[..., r:]], -1).reshape(self.t, -1)

        return turned(qkv[:, :n_q], wq), torch.cat(
            [turned(qkv[:, n_q : n_q + n_k], wk), qkv[:, n_q + n_k :]], 1
        )


def close(got, want, scale, arithmetic, dt, roundings=1):
    """|got - want| <= arithmetic * scale + roundings of the storage. scale bounds the sum of
    absolute terms."""
    tolerance = arithmetic * scale + roundings * rounding(dt) * (
        want.abs() + scale * (roundings > 1)
    )
    worst = ((got.double() - want).abs() / tolerance).max().item()
    assert worst <= 1, f"{worst:.2f} times the tolerance"


def pair_norm(x, d, r=None):
    """For each of the first r elements of a head the size of its pair, sqrt(2) * |(a, b)| >=
    |a c| + |b s|; of the others, which RoPE does not turn, the same of their halves."""
    heads = x.view(*x.shape[:-1], -1, d)

    def of(part):
        p = part.reshape(*part.shape[:-1], 2, -1)
        size = math.sqrt(2) * p.square().sum(-2, keepdim=True).sqrt()
        return size.expand_as(p).reshape(part.shape)

    r = d if r is None else r
    parts = [of(part) for part in (heads[..., :r], heads[..., r:]) if part.shape[-1]]
    return torch.cat(parts, -1).reshape(x.shape)


SHAPES = [
    dict(n_tokens=1, heads=(1, 1), d=16),
    dict(n_tokens=33, heads=(4, 2), d=64),
    dict(n_tokens=70, heads=(6, 2), d=96),
    dict(n_tokens=130, heads=(8, 1), d=128),
    dict(n_tokens=65, heads=(2, 2), d=2),
    dict(n_tokens=40, heads=(3, 1), d=40),
]
ROPES = [dict(), dict(scaling=LINEAR, factor=4.0), dict(scaling=LLAMA3, theta=5e5)]
# partial rotary (whole and odd vectors), none, an attention factor
TURNS = [dict(rotary=0), dict(rotary=48, by=1.25), dict(rotary=38), dict(by=0.75)]


@pytest.mark.parametrize("dt", [F32, BF16])
@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward(shape, rope, norm, dt):
    check_against_torch(Case(dt=dt, norm=norm, **shape, **rope))


@pytest.mark.parametrize("dt", [F32, BF16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_over_the_row_and_an_offset(shape, offset, dt):
    check_against_torch(Case(dt=dt, norm=ROW, offset=offset, **shape))


@pytest.mark.parametrize("dt", [F32, BF16])
def test_norm_over_each_head_with_an_offset(dt):
    check_against_torch(Case(dt=dt, norm=HEAD, offset=1.0))


@pytest.mark.parametrize("dt", [F32, BF16])
@pytest.mark.parametrize("norm", [0, HEAD, ROW])
@pytest.mark.parametrize("turn", TURNS)
def test_partial_rotary_none_and_an_attention_factor(turn, norm, dt):
    check_against_torch(Case(n_tokens=70, d=64, dt=dt, norm=norm, **turn))


def check_against_torch(case):
    norm, dt = case.norm, case.dt
    leaves = [x.double().requires_grad_() for x in (case.qkv, case.wq, case.wk)]
    want = case.oracle(*leaves)
    n_q, n_k = case.h * case.d, case.kv_h * case.d
    # a norm's mean is over so many elements; at most 1 + offset / |w| more of w + offset
    mean = ((n_q if norm == ROW else case.d) / 16 + 5) / 2 + 5 if norm else 0
    inv_freq_error = (
        3 * U * case.t
    )  # powers differ by an ulp or two from torch's: times the largest position
    arithmetic = (4 + mean) * U + inv_freq_error
    for got, value in zip(case.forward(), want):
        close(
            got,
            value.detach(),
            pair_norm(value.detach(), case.d, case.rotary),
            arithmetic,
            dt,
            1 + (norm and dt == BF16),
        )
    grads = torch.autograd.grad(
        want, leaves, (case.dq.double(), case.dkv.double()), allow_unused=True
    )
    got = case.backward()
    x = case.qkv.double()
    dy = torch.cat([case.dq.double(), case.dkv.double()], 1)
    assert torch.equal(got[0][:, n_q + n_k :], case.dkv[:, n_k:].to(got[0].dtype))
    scale = max(case.by, 1.0) * pair_norm(dy, case.d, case.rotary)
    if norm:  # |dx| <= rstd (|g| + |xh| mean|g xh|), and |dy| is known to within its pair
        scales = []
        for i, w, part in ((1, case.wq, slice(0, n_q)), (2, case.wk, slice(n_q, n_q + n_k))):
            raw, dy = (v[:, part].reshape(case.t, -1, len(w)) for v in (x, scale))
            rstd = (raw.square().mean(-1, keepdim=True) + EPS).rsqrt()
            g, xh = dy * (w.double().abs() + case.offset), (raw * rstd).abs()
            terms = dy * xh
            scales.append((rstd * (g + xh * (g * xh).mean(-1, keepdim=True))).view(case.t, -1))
            n_terms = terms.shape[0] * terms.shape[1]
            close(got[i], grads[i], terms.sum((0, 1)), arithmetic + 4 * math.sqrt(n_terms) * U, dt)
        scale = torch.cat([*scales, scale[:, n_q + n_k :]], 1)
    close(got[0], grads[0], scale, arithmetic * (3 if norm else 1), dt)


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


@pytest.mark.parametrize("dt", [F32, BF16])
@pytest.mark.parametrize("norm", [HEAD, ROW])
def test_threads_and_addresses_do_not_change_bits(norm, dt):
    case = Case(n_tokens=333, d=80, dt=dt, norm=norm)
    first = case.forward(n_threads=1) + case.backward(n_threads=1)
    for n_threads, shift in ((2, 0), (3, 16)):
        again = case.forward(n_threads=n_threads, shift=shift) + case.backward(
            n_threads=n_threads, shift=shift
        )
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("norm", [HEAD, ROW])
def test_accumulate_adds_to_the_norms_gradients(norm):
    case = Case(norm=norm)
    base = [torch.randn(len(w)) for w in (case.wq, case.wk)]
    once, added = case.backward(), case.backward(base)
    assert torch.equal(once[0], added[0])
    for o, a, b in zip(once[1:], added[1:], base):
        assert torch.allclose(a, o + b, rtol=4 * U, atol=4 * U * 8)


def test_positions_restart_where_the_data_say():
    case = Case(n_tokens=60, pos=list(range(25)) + list(range(35)))
    case.qkv[25:50] = case.qkv[:25]
    q, kv = case.forward()
    assert torch.equal(q[25:50], q[:25]) and torch.equal(kv[25:50], kv[:25])


def test_arguments_out_of_range_are_refused_by_name():
    def message(**changed):
        case = Case(d=64)
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
        return refusal("qkv_split_fwd", bytes(args), (case.qkv, case.pos, case.dq, case.dkv))

    assert "head_dim is 63" in message(head_dim=63)
    assert "dt is 2" in message(dt=2)
    assert "rotary_dim is 31" in message(rotary_dim=31)
    assert "rotary_dim is 66" in message(rotary_dim=66) and "64" in message(rotary_dim=66)
    assert "rotary_dim is 258" in message(head_dim=512, rotary_dim=258)
    assert "attention_factor is 0" in message(attention_factor=0.0)
    assert "attention_factor is nan" in message(attention_factor=math.nan)
    assert "qk_norm is 3" in message(qk_norm=3)
    assert "norm_offset is inf" in message(norm_offset=math.inf)
