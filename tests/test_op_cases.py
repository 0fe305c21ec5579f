"""Every op of the table of cases (tests/native/op_cases.c) on the CPU against PyTorch in fp64.

The table gives arguments, operands and tolerances. Here is what it cannot say in C: the formula. FORWARD has it for each op that is no gradient; a gradient op's reference is
autograd over the formula of the op that the table says it belongs to. run() of op_runs.py sees to
threads, alignment, guards and instruction sets.
"""

import ctypes
import functools
import math

import pytest

torch = pytest.importorskip("torch")
from delta_formulas import FORMULAS as OF_DELTA  # noqa: E402
from moe_formulas import FORMULAS as OF_EXPERTS  # noqa: E402
from op_runs import (  # noqa: E402
    LIB,
    Accumulate,
    Colsum,
    CrossEntropy,
    Embed,
    Fill,
    Gemm,
    GemmFp8,
    Glu,
    Quantize,
    Rmsnorm,
    ScoreLoss,
    Sumsq,
    run,
)
from sink_formulas import FORMULAS as OF_SINKS  # noqa: E402
from test_fp8_ops import (  # noqa: E402
    COLS,
    ROWS,
    GluQuantize,
    NormQuantize,
)
from test_fp8_ops import Scale as Fp8Scale  # noqa: E402
from test_quantized_base import E2M1, NF4  # noqa: E402


class Qkv(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in "n_tokens n_heads n_kv_heads head_dim dt".split()),
        *((name, ctypes.c_uint32) for name in "qk_norm accumulate_dw rotary_dim".split()),
        *((name, ctypes.c_float) for name in "eps attention_factor norm_offset".split()),
        ("inv_freq", ctypes.c_float * 128),
        ("interleaved", ctypes.c_uint32),
        ("position_original", ctypes.c_uint32),
        ("position_beta", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in "whole_head value_norm shared_keys".split()),
    ]


class LayerScale(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in "rows cols dt accumulate_ds".split()]


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in "n_tokens row0 n_heads n_kv_heads head_dim".split()),
        *((name, ctypes.c_uint32) for name in "dt accumulate_dkv document_rows".split()),
        *((name, ctypes.c_uint32) for name in "sequence_rows window".split()),
        *((name, ctypes.c_float) for name in "scale softcap".split()),
        ("value_dim", ctypes.c_uint32),
    ]


class Mla(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in "n_tokens n_heads nope_dim rotary_dim".split()),
        *((name, ctypes.c_uint32) for name in "value_dim dt interleaved inverse".split()),
        ("attention_factor", ctypes.c_float),
        ("inv_freq", ctypes.c_float * 128),
    ]


READ, WRITE = 1, 2
F32, BF16, I32, F64, U16 = 0, 1, 10, 11, 12
E4M3, E5M2 = 3, 4
TORCH = {F32: torch.float32, BF16: torch.bfloat16, I32: torch.int32, F64: torch.float64}
TORCH |= {U16: torch.int16}  # of ids, which are small
TORCH |= {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
SIGNIFICAND = {F32: 24, BF16: 8, E4M3: 4, E5M2: 3, F64: 53, I32: 31, U16: 16}
SMALL, SEED = 0, 11


class Operand(ctypes.Structure):
    _fields_ = [
        ("mode", ctypes.c_uint32),
        ("dt", ctypes.c_uint32),
        ("n", ctypes.c_uint64),
        ("init", ctypes.c_void_p),
        ("ulps", ctypes.c_double),
        ("rel", ctypes.c_double),
        ("of_max", ctypes.c_double),
    ]

    def tensor(self):
        dtype = TORCH[self.dt]
        if not self.init or not self.n:
            return torch.zeros(self.n, dtype=dtype)
        n_bytes = self.n * dtype.itemsize
        raw = bytearray(ctypes.string_at(self.init, n_bytes))
        return torch.frombuffer(raw, dtype=dtype).clone()


VISIT = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
    ctypes.POINTER(Operand),
    ctypes.c_uint32,
)
LIB.ops_entry.restype = LIB.ops_name.restype = ctypes.c_char_p
LIB.ops_entry_gradient_of.restype = ctypes.c_char_p


def entries():
    """(place in the table, kernel's name) of each."""
    i = 0
    while name := LIB.ops_entry(i):
        yield i, name.decode()
        i += 1


def cases(entry, dt):
    found = []

    def visit(name, args, args_bytes, operands, n):
        found.append(
            (
                name.decode(),
                ctypes.string_at(args, args_bytes),
                [(o.mode, o.dt, o.tensor(), (o.ulps, o.rel, o.of_max)) for o in operands[:n]],
            )
        )

    LIB.ops_cases(entry, dt, SMALL, ctypes.c_uint64(SEED), VISIT(visit))
    return found


# ---- formulas: arguments and operands (fp64 where they are numbers) to the written operands, in order


def rmsnorm(a, x, w, _, residual=None):
    x = x.view(a.rows, a.cols)
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + a.eps) * (w + a.weight_offset)
    return [y if residual is None else y + residual.view_as(y)]


def glu(a, gu, *_):
    g, u = gu.view(a.n_tokens, 2 * a.ffn_dim).split(a.ffn_dim, 1)
    gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    return [(gelu if a.activation else torch.nn.functional.silu)(g) * u]


def embedding(a, ids, table, *_):
    pad = None if a.pad < 0 else a.pad
    rows = torch.nn.functional.embedding(ids.long(), table.view(a.vocab, a.dim), padding_idx=pad)
    return [(a.scale or 1.0) * rows]


def normed(x, w, a):
    """An RMSNorm over each head (1, 3) or over all of them (2)."""
    y = x.reshape((a.n_tokens, 1, -1) if a.qk_norm == 2 else (a.n_tokens, -1, a.head_dim))
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + a.eps) * (w + a.norm_offset)
    return y.reshape(x.shape)


def turned(x, w, a, pos):
    """RoPE at @pos of the first rotary_dim elements of each head, after or (3) before an optional
    norm."""
    if a.qk_norm == 3:
        return normed(roped(x, a, pos), w, a)
    return roped(normed(x, w, a) if a.qk_norm else x, a, pos)


def roped(x, a, pos):
    r = a.head_dim if getattr(a, "whole_head", 0) else a.rotary_dim
    inv_freq = torch.zeros(r // 2, dtype=torch.float64)
    n = a.rotary_dim // 2
    inv_freq[:n] = torch.tensor(list(a.inv_freq[:n]), dtype=torch.float64)
    angle = pos.double()[:, None] * inv_freq
    factor = torch.ones(r // 2, dtype=torch.float64)
    factor[:n] = a.attention_factor  # of the pairs that are turned
    cos, sin = (torch.cat([f(angle) * factor] * 2, 1)[:, None] for f in (torch.cos, torch.sin))
    x, rest = x.reshape(a.n_tokens, -1, a.head_dim).split([r, a.head_dim - r], -1)
    if a.interleaved:
        neighbours = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        cos, sin = (torch.repeat_interleave(c[..., : r // 2], 2, -1) for c in (cos, sin))
        return torch.cat([x * cos + neighbours * sin, rest], -1).reshape(a.n_tokens, -1)
    half = torch.cat([-x[..., r // 2 :], x[..., : r // 2]], -1)
    return torch.cat([x * cos + half * sin, rest], -1).reshape(a.n_tokens, -1)


def qkv_split(a, qkv, pos, _q, _kv=None, wq=None, wk=None):
    n_q, n_k = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
    if not n_k:  # in the place of kv stands wq
        q = turned(qkv.view(a.n_tokens, -1), _kv, a, pos)
        if a.position_beta:
            q = (
                q
                * (1 + a.position_beta * torch.log1p(pos.double() // a.position_original))[:, None]
            )
        return [q]
    q, k, *v = qkv.view(a.n_tokens, -1).split([n_q] + [n_k] * (1 if a.shared_keys else 2), 1)
    v = v[0] if v else k
    if a.value_norm:
        v = v.reshape(a.n_tokens, -1, a.head_dim)
        v = (v * torch.rsqrt((v * v).mean(-1, keepdim=True) + a.eps)).reshape(a.n_tokens, -1)
    q = turned(q, wq, a, pos)
    if a.position_beta:
        q = q * (1 + a.position_beta * torch.log1p(pos.double() // a.position_original))[:, None]
    return [q, torch.cat([turned(k, wk, a, pos), v], 1)]


def mla_roped(a, x, pos, inverse=False):
    """RoPE of rows of heads of rotary_dim elements; its transpose turns back."""
    a.head_dim = a.rotary_dim
    return roped(x, a, -pos.double() if inverse else pos)


def mla_turn(a, x, pos, _):
    nope, rope = x.view(a.n_tokens, a.n_heads, -1).split([a.nope_dim, a.rotary_dim], 2)
    rope = mla_roped(a, rope, pos, a.inverse).view_as(rope)
    return [torch.cat([nope, rope], 2)]


def mla_kv_fwd(a, kvb, kr, pos, _):
    nope, value = kvb.view(a.n_tokens, a.n_heads, -1).split([a.nope_dim, a.value_dim], 2)
    rope = mla_roped(a, kr, pos).view(a.n_tokens, 1, -1).expand(-1, a.n_heads, -1)
    value = torch.nn.functional.pad(value, (0, a.nope_dim + a.rotary_dim - a.value_dim))
    return [torch.stack([torch.cat([nope, rope], 2), value], 1)]


def mla_kv_bwd(a, dkv, pos, _dkvb, _dkr):
    dk, dv = dkv.view(a.n_tokens, 2, a.n_heads, -1).unbind(1)
    dkvb = torch.cat([dk[..., : a.nope_dim], dv[..., : a.value_dim]], 2)
    return [dkvb, mla_roped(a, dk[..., a.nope_dim :].sum(1), pos, True)]


def mla_cut(a, x, _):
    return [x.view(a.n_tokens, a.n_heads, -1)[..., : a.value_dim]]


def mla_pad(a, x, _):
    more = a.nope_dim + a.rotary_dim - a.value_dim
    return [torch.nn.functional.pad(x.view(a.n_tokens, a.n_heads, -1), (0, more))]


def cross_entropy(a, z, target, scale, _):
    z = z.view(a.rows, a.vocab).requires_grad_()
    y = a.softcap * torch.tanh(z / a.softcap) if a.softcap else z
    ce = {"ignore_index": -1, "reduction": "none"}
    loss = torch.nn.functional.cross_entropy(y, target.long(), **ce)
    if not a.z_loss and not a.label_smoothing:
        (loss.sum() * scale).backward()
        return [z.grad, loss.detach()]
    counted = (target >= 0).double()
    lse, mean = y.logsumexp(-1), y.mean(-1)
    smoothed = torch.nn.functional.cross_entropy(
        y, target.long(), label_smoothing=a.label_smoothing, **ce
    )
    ((smoothed + a.z_loss * lse**2 * counted).sum() * scale).backward()
    # a mean of -inf is none that anyone counts
    terms = [loss, lse**2 * counted, torch.where(target >= 0, lse - mean, 0.0)]
    return [z.grad, torch.stack(terms, 1).detach()]


def score_loss(a, z, target, scale, _, *dz):
    """problem: 1 labels, 2 bits, 3 numbers, 4 pairs, 5 none."""
    f = torch.nn.functional
    z = z.view(a.rows, a.cols).requires_grad_()
    loss, right, target = torch.zeros(a.rows), torch.zeros(a.rows), target.long()
    rows = torch.nonzero(target > 0 if a.problem == 4 else target != -1)[:, 0]
    t = target[rows]
    if a.problem == 1:
        each, good = f.cross_entropy(z[rows], t, reduction="none"), z[rows].argmax(1) == t
    elif a.problem == 2:
        y = (t[:, None] >> torch.arange(a.cols) & 1).double()
        each = f.binary_cross_entropy_with_logits(z[rows], y, reduction="none").mean(1)
        good = ((z[rows] > 0) == (y > 0)).double().mean(1)
    elif a.problem == 3:
        error = z[rows, 0] - t.int().view(torch.float32).double()
        each, good = error**2, error.abs()
    elif a.problem == 4:
        margin = z[rows - t, 0] - z[rows, 0]
        each, good = -f.logsigmoid(margin), margin > 0
    else:
        return [torch.stack([loss, right], 1)]
    (each.sum() * scale).backward()
    loss = loss.double().index_put((rows,), each.detach())
    right = right.double().index_put((rows,), good.detach().double())
    return [torch.stack([loss, right], 1), z.grad]


def gemm(a, x, y, c, *added):
    m, n, k, added = a.m, a.n, a.k, list(added)
    x = x.view(-1, a.lda)[:, : m if a.trans_a else k]
    y = y.view(-1, a.ldb)[:, : k if a.trans_b else n]
    c = c.view(m, a.ldc)
    out = (a.alpha or 1.0) * ((x.T if a.trans_a else x) @ (y.T if a.trans_b else y))
    if a.accumulate:
        out = out + c[:, :n]
    if a.has_bias:
        out = out + added.pop(0)
    if a.has_residual:
        out = out + added.pop(0).view(m, a.ldc)[:, :n]
    return [torch.cat([out, c[:, n:]], 1)]


FP8 = {E4M3: (448, TORCH[E4M3]), E5M2: (57344, TORCH[E5M2])}


def scale_of(amax, dt_q):
    """The least power of two by which amax fits."""
    fraction, exponent = math.frexp(amax / FP8[dt_q][0])
    return 2.0 ** (exponent - (fraction == 0.5))


def codes(x, dt_q, forms, scale=None):
    """[{scale, amax}, the forms], and how many values that are not 0 have a code of 0."""
    amax = x.abs().max().item()
    scales = torch.tensor([scale_of(amax, dt_q), amax], dtype=torch.float64)
    largest, fp8 = FP8[dt_q]
    q = (x / (scales if scale is None else scale)[0]).clamp(-largest, largest)
    q = q.float().to(fp8).double()
    out = ([q] if forms & ROWS else []) + ([q.T] if forms & COLS else [])
    flushed = ((x != 0) & (q == 0)).sum().item()
    return ([scales] if scale is None else []) + [o.flatten() for o in out], flushed


def counted(counters, *flushed):
    """u64 in the bits of fp64: each number added to one of the last counters."""
    n = counters.view(torch.int64).clone()
    n[-len(flushed) :] += torch.tensor(flushed)
    return n.view(torch.float64)


def stored(x, dt):
    return x.to(TORCH[dt]).double()


def quantize(a, x, scale, *rest):
    out, flushed = codes(x.view(a.rows, a.cols), a.dt_q, a.forms, scale if a.given else None)
    return [*out, counted(rest[-1], flushed)] if a.count else out


def fp8_scale(a, x, _):
    amax = x.abs().max().item()
    scale = scale_of(amax * (a.headroom or 1.0), a.dt_q)
    return [torch.tensor([scale, amax], dtype=torch.float64)]


def rmsnorm_quantize(a, x, w, _, *rest):
    out, flushed = codes(stored(rmsnorm(a, x, w, None)[0], a.dt), a.dt_q, a.forms)
    return [*out, counted(rest[-1], flushed)] if a.count else out


def glu_quantize(a, gu, _, *rest):
    out, flushed = codes(stored(glu(a, gu)[0], a.dt), a.dt_q, a.forms)
    if a.count:
        out.append(torch.cat([counted(rest[-1][:1], flushed), rest[-1][1:]]))
    return out


def glu_bwd_quantize(a, ds, gu, *rest):
    (dgu,) = derivative(glu, a, (gu,), [ds], (0,))
    dgu = stored(dgu.view(a.n_tokens, -1), a.dt)
    of_gu, n_gu = codes(dgu, a.dt_q, ROWS | COLS)
    of_s, n_s = codes(stored(glu(a, gu)[0], a.dt), E4M3, COLS)
    return [*of_gu, *of_s, *([counted(rest[-1], n_gu, n_s)] if a.count else [])]


def gemm_fp8(a, x, x_scale, w, w_scale, c, *added):
    out = x.view(a.m, a.k) @ w.view(a.n, a.k).T * ((a.alpha or 1.0) * x_scale[0] * w_scale[0])
    if a.accumulate:
        out = out + c.view_as(out)
    return [out + (added[0] if a.has_bias else added[0].view_as(out) if added else 0)]


def attention_cached(a, q, kv, sequence, _o, _lse, pos, cache):
    cache = cache.clone().view(-1, a.sequence_rows, 2, a.n_kv_heads, a.head_dim)
    there = pos >= 0
    cache[sequence[there].long(), pos[there].long()] = kv.view(-1, *cache.shape[2:])[there]
    q = q.view(a.n_tokens, a.n_kv_heads, -1, a.head_dim)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3], dtype=q.dtype)
    for i in there.nonzero().flatten().tolist():
        end = int(pos[i]) + 1
        keys, values = cache[int(sequence[i]), max(0, end - (a.window or end)) : end].unbind(1)
        score = torch.einsum("hgd,khd->hgk", q[i], keys) * (a.scale or a.head_dim**-0.5)
        score = a.softcap * torch.tanh(score / a.softcap) if a.softcap else score
        out[i] = torch.einsum("hgk,khd->hgd", score.softmax(-1), values)
        lse[i] = score.logsumexp(-1)
    return [out, lse, cache]


class Dequantize(ctypes.Structure):
    _fields_ = [("n", ctypes.c_uint64), ("base", ctypes.c_uint32), ("dt", ctypes.c_uint32)]


def dequantize(a, words, _):
    """Blocks of elements and their scale: e4m3 and fp32, NF4 and bf16, e2m1 and e8m0."""
    block, scale, dtype = {
        1: (64, 4, torch.float32),
        2: (64, 2, torch.bfloat16),
        3: (32, 1, torch.uint8),
    }[a.base]
    raw = words.to(torch.int16).view(torch.uint8).view(a.n // block, -1)
    q, s = raw[:, :-scale], raw[:, -scale:].contiguous().view(dtype).double()
    s = 2.0 ** (s - 127) if a.base == 3 else s
    nibbles = torch.stack([q & 15, q >> 4], -1).flatten(1).long()
    if a.base == 1:
        x = q.contiguous().view(torch.float8_e4m3fn).double()
    elif a.base == 2:
        x = torch.from_numpy(NF4).double()[nibbles]
    else:
        size = torch.tensor(E2M1, dtype=torch.float64)
        x = torch.cat([size, -size])[nibbles]
    return [(x * s).flatten().float().to(TORCH[a.dt]).double()]


FORWARD = {
    "fill_zero": (Fill, lambda a, x: [torch.zeros_like(x)]),
    "copy_bytes": (Fill, lambda a, x, _: [x]),
    "dequantize": (Dequantize, dequantize),
    "accumulate": (Accumulate, lambda a, g, total, low=None: [g + total, low]),
    "accumulate_sumsq_host": (
        Accumulate,
        lambda a, g, total, _: [g + total, ((g + total) ** 2).sum().view(1)],
    ),
    "sumsq": (Sumsq, lambda a, g, _: [(g * g).sum().view(1)]),
    "colsum": (
        Colsum,
        lambda a, dy, db: [dy.view(a.rows, a.ld)[:, : a.cols].sum(0) + (db if a.accumulate else 0)],
    ),
    "embed_fwd": (Embed, embedding),
    "rmsnorm_fwd": (Rmsnorm, rmsnorm),
    "qkv_split_fwd": (Qkv, qkv_split),
    "mla_turn": (Mla, mla_turn),
    "mla_kv_fwd": (Mla, mla_kv_fwd),
    "mla_kv_bwd": (Mla, mla_kv_bwd),
    "mla_cut": (Mla, mla_cut),
    "mla_pad": (Mla, mla_pad),
    "layer_scale_fwd": (LayerScale, lambda a, x, s: [x * s]),
    "layer_scale_bwd": (
        LayerScale,
        lambda a, dx, s, ds: [dx * s, ds if a.accumulate_ds else torch.zeros_like(ds)],
    ),
    "glu_fwd": (Glu, glu),
    "cross_entropy": (CrossEntropy, cross_entropy),
    "score_loss": (ScoreLoss, score_loss),
    "gemm": (Gemm, gemm),
    "gemm_rows": (Gemm, gemm),
    "quantize": (Quantize, quantize),
    "fp8_scale": (Fp8Scale, fp8_scale),
    "rmsnorm_quantize": (NormQuantize, rmsnorm_quantize),
    "glu_quantize": (GluQuantize, glu_quantize),
    "glu_bwd_quantize": (GluQuantize, glu_bwd_quantize),
    "gemm_fp8": (GemmFp8, gemm_fp8),
    "attention_cached": (Attention, attention_cached),
    **OF_EXPERTS,
    **OF_DELTA,
    **OF_SINKS,
}


def derivative(formula, a, inputs, dy, leaves):
    """Gradients of sum(formula * dy) by the inputs at places @leaves."""
    inputs = list(inputs)
    for i in leaves:
        inputs[i] = inputs[i].clone().requires_grad_()
    out = formula(a, *inputs)
    return torch.autograd.grad(
        out, [inputs[i] for i in leaves], [d.view_as(o) for d, o in zip(dy, out, strict=True)]
    )


def rmsnorm_bwd(formula, a, x, w, dy, dx, dw):
    got = derivative(formula, a, (x, w, None), [dy], (0, 1))
    return [got[0] + (dx if a.add_dx else 0), got[1] + (dw if a.accumulate_dw else 0)]


def qkv_split_bwd(formula, a, dq, *more):
    return (
        q_split_bwd(formula, a, dq, *more) if not a.n_kv_heads else qkv_bwd(formula, a, dq, *more)
    )


def q_split_bwd(formula, a, dq, pos, dqkv, x=None, wq=None, dwq=None):
    """Without keys and values."""
    if not a.qk_norm:
        return derivative(formula, a, (dqkv, pos, None), [dq], (0,))
    dx, gq = derivative(formula, a, (x, pos, None, wq), [dq], (0, 3))
    return [dx, gq + (dwq if a.accumulate_dw else 0)]


def qkv_bwd(formula, a, dq, dkv, pos, dqkv, x=None, wq=None, wk=None, dwq=None, dwk=None):
    if not a.qk_norm:
        return derivative(formula, a, (dqkv, pos, None, None), [dq, dkv], (0,))
    dx, gq, gk = derivative(formula, a, (x, pos, None, None, wq, wk), [dq, dkv], (0, 4, 5))
    return [dx, gq + (dwq if a.accumulate_dw else 0), gk + (dwk if a.accumulate_dw else 0)]


# How a gradient op's operands are those of its formula.
GRADIENT = {
    "embed_bwd": lambda formula, a, ids, dx, table: [
        derivative(formula, a, (ids, table), [dx], (1,))[0] + (table if a.accumulate else 0)
    ],
    "rmsnorm_bwd": rmsnorm_bwd,
    "qkv_split_bwd": qkv_split_bwd,
    "glu_bwd": lambda formula, a, ds, gu: [
        *formula(a, gu),
        *derivative(formula, a, (gu,), [ds], (0,)),
    ],
}


def exact(entry, name, raw, operands):
    values = [t.double() if t.is_floating_point() else t for t in operands]
    of = LIB.ops_entry_gradient_of(entry)
    kind, formula = FORWARD[of.decode() if of else name]
    args = kind.from_buffer_copy(raw)
    return GRADIENT[name](formula, args, *values) if of else formula(args, *values)


def assert_close(got, want, dt, tolerance, what):
    ulps, rel, of_max = tolerance
    if of_max == float("inf"):  # bits that are no number
        return
    got, want = got.double().flatten(), want.flatten()
    same = (got == want) | (got.isnan() & want.isnan())
    finite = torch.where(want.isfinite(), want, 0.0).abs()
    ulp = torch.exp2(
        torch.frexp(torch.maximum(finite, got.abs().nan_to_num(0)))[1] - SIGNIFICAND[dt]
    )
    # one rounding at the store: half an ulp; the smallest numbers have no smaller neighbour
    limit = (ulps + 0.5) * ulp.double() + rel * finite + of_max * finite.max() + 1e-37
    bad = ~(same | ((got - want).abs() <= limit))
    assert not bad.any(), (
        f"{what}: {int(bad.sum())} of {bad.numel()} off, first {got[bad][0].item()} "
        f"for {want[bad][0].item()}, limit {limit[bad][0].item()}"
    )


@pytest.mark.parametrize("dt", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("entry,name", list(entries()), ids=[n for _, n in entries()])
def test_an_op_is_its_formula(entry, name, dt):
    found = cases(entry, dt)
    assert found or dt == BF16 and name in ("fill_zero", "moe_route", "moe_index")  # of no dtype
    for shape, raw, operands in found:
        modes = {READ: "r", WRITE: "w", READ | WRITE: "rw"}
        args = ctypes.create_string_buffer(raw, len(raw))
        got = run(name, args, [(modes[m], t) for m, _, t, _ in operands])
        want = exact(entry, name, raw, [t for _, _, t, _ in operands])
        written = [(d, tolerance) for m, d, _, tolerance in operands if m & WRITE]
        for i, (g, (d, tolerance)) in enumerate(zip(got, written, strict=True)):
            assert_close(g, want[i], d, tolerance, f"{name} {shape}, output {i}")


def test_every_op_has_cases():
    """But attention (tests/test_attention.py) and host sums (tests/test_ops.py, test_totals.py)."""
    without = {"attention_fwd", "attention_bwd", "accumulate_host", "sumsq_host"}
    without |= {"round_sumsq_host", "embed_bwd_host"}
    ops, i = set(), 0
    while name := LIB.ops_name(i):
        ops.add(name.decode())
        i += 1
    assert ops - {name for _, name in entries()} == without


@pytest.mark.parametrize("dt", [F32, BF16], ids=["fp32", "bf16"])
def test_a_row_of_gemm_rows_does_not_depend_on_the_others(dt):
    """OpenBLAS's products do on some CPUs, so there the test fails with `gemm` in its place."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, 2048).to(TORCH[dt]) for n in (64, 1000))

    def product(rows):
        a = Gemm(m=len(rows), n=1000, k=2048, lda=2048, ldb=2048, ldc=1000)
        a.trans_b, a.dt_a, a.dt_b, a.dt_c = 1, dt, dt, dt
        out = torch.zeros(len(rows), 1000, dtype=x.dtype)
        return run("gemm_rows", a, [("r", x[rows].contiguous()), ("r", w), ("w", out)])[0]

    row = product(list(range(64)))[5]
    for rows in [[5], [0, 5], [5, 1, 2], list(range(6)), list(range(5, 38))]:
        assert torch.equal(product(rows)[rows.index(5)], row), rows
