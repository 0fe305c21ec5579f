"""The formulas of the gated delta rule and of what is around it (native/kernels/ops.h), for
test_op_cases.py: arguments and operands in fp64 to the written operands in order. Gradients are
autograd's."""

import torch
from op_runs import struct

Conv = struct("Conv", [("I", "n_tokens row0 channels width dt accumulate_dw accumulate_carry")])
Delta = struct(
    "Delta",
    [
        ("I", "n_tokens row0 n_key_heads n_value_heads key_dim value_dim dt"),
        ("I", "accumulate_dw accumulate_carry"),
    ],
)
GatedNorm = struct("GatedNorm", [("I", "n_tokens n_heads head_dim dt accumulate_dw"), ("f", "eps")])
Heads = struct("Heads", [("I", "n_tokens n_groups w0 w1 w2 w3 n_first tail dt")])
SigmoidGate = struct("SigmoidGate", [("I", "n_tokens cols n_gates dt has_residual")])
silu = torch.nn.functional.silu


def gradients(outputs, given, leaves):
    """Of sum(outputs * given) by the leaves; 0 where a leaf is not used."""
    total = sum((o * g.view_as(o)).sum() for o, g in zip(outputs, given, strict=True))
    got = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(got, leaves, strict=True)]


def conv(a, x, w, doc_start, before, *_):
    """y, and the last rows of x with those before it."""
    w, tail = w.view(a.channels, a.width), a.width - 1
    before = before.view(tail, a.channels) * (1.0 if a.row0 else 0.0)
    rows = torch.cat([before, x.view(a.n_tokens, a.channels)])
    group_row = torch.arange(-tail, a.n_tokens) + a.row0
    out = []
    for t in range(a.n_tokens):
        seen = (group_row[t : t + a.width] >= doc_start[t]).double()
        out.append((rows[t : t + a.width] * seen[:, None] * w.T).sum(0))
    return [silu(torch.stack(out)), rows[len(rows) - tail :]]


def conv_bwd(a, x, w, doc_start, before, dy, carry, _dx, dw):
    x, w, before = (v.requires_grad_() for v in (x, w, before))
    carry = carry if a.accumulate_carry else torch.zeros_like(before)
    dx, g, before = gradients(conv(a, x, w, doc_start, before), [dy, carry], [x, w, before])
    return [before, dx, g + (dw if a.accumulate_dw else 0)]


def delta(a, qkv, ba, a_log, dt_bias, doc_start, before, *_):
    nk, nv, dk, dv = a.n_key_heads, a.n_value_heads, a.key_dim, a.value_dim
    q, k, v = qkv.view(a.n_tokens, -1).split([nk * dk, nk * dk, nv * dv], 1)
    q, k = (x.reshape(a.n_tokens, nk, dk) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(nv // nk, 1) for x in (q * dk**-0.5, k))
    v = v.reshape(a.n_tokens, nv, dv)
    b, s = ba.view(a.n_tokens, 2, nv).unbind(1)
    beta = torch.sigmoid(b)
    decay = torch.exp(-torch.exp(a_log) * torch.nn.functional.softplus(s + dt_bias, threshold=50))
    state = before.view(nv, dk, dv) * (1.0 if a.row0 else 0.0)
    out = []
    for t in range(a.n_tokens):
        state = state * decay[t][:, None, None] * float(doc_start[t] != a.row0 + t)
        d = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], d)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return [torch.stack(out), state]


def delta_bwd(a, qkv, ba, a_log, dt_bias, doc_start, before, d_o, carry, _dqkv, _dba, da, db):
    leaves = [x.requires_grad_() for x in (before, qkv, ba, a_log, dt_bias)]
    before, qkv, ba, a_log, dt_bias = leaves
    carry = carry if a.accumulate_carry else torch.zeros_like(before)
    out = delta(a, qkv, ba, a_log, dt_bias, doc_start, before)
    got = gradients(out, [d_o, carry], leaves)
    old = [da, db] if a.accumulate_dw else [0, 0]
    return [*got[:3], got[3] + old[0], got[4] + old[1]]


def conv_cached(a, x, w, sequence, _y, pos, cache):
    cache = cache.clone().view(-1, a.width - 1, a.channels)
    out, tail = torch.zeros(a.n_tokens, a.channels, dtype=torch.float64), a.width - 1
    for s in sequence[pos >= 0].unique().long().tolist():
        mine = (sequence == s) & (pos >= 0)
        rows = torch.cat([cache[s], x.view(a.n_tokens, -1)[mine]])
        at = torch.arange(len(rows)) - tail + int(pos[mine][0])  # positions
        seen = rows * (at >= 0).double()[:, None]
        out[mine] = silu((seen.unfold(0, a.width, 1) * w.view(a.channels, a.width)).sum(-1))
        cache[s] = rows[len(rows) - tail :]
    return [out, cache]


def delta_cached(a, qkv, ba, a_log, dt_bias, sequence, _o, pos, cache):
    cache = cache.clone().view(-1, a.n_value_heads, a.key_dim, a.value_dim)
    out = torch.zeros(a.n_tokens, a.n_value_heads, a.value_dim, dtype=torch.float64)
    of = Delta.from_buffer_copy(a)
    for s in sequence[pos >= 0].unique().long().tolist():
        mine = (sequence == s) & (pos >= 0)
        of.n_tokens, of.row0 = int(mine.sum()), int(pos[mine][0])
        rows = [x.view(a.n_tokens, -1)[mine].flatten() for x in (qkv, ba)]
        out[mine], cache[s] = delta(of, *rows, a_log, dt_bias, torch.zeros(of.n_tokens), cache[s])
    return [out, cache]


def gated_norm(a, x, z, w, *_):
    x, z = (v.view(a.n_tokens, a.n_heads, a.head_dim) for v in (x, z))
    return [x * torch.rsqrt((x * x).mean(-1, keepdim=True) + a.eps) * w * silu(z)]


def gated_norm_bwd(a, x, z, w, dy, _dx, _dz, dw):
    leaves = [v.requires_grad_() for v in (x, z, w)]
    dx, dz, g = gradients(gated_norm(a, *leaves), [dy], leaves)
    return [dx, dz, g + (dw if a.accumulate_dw else 0)]


def head_columns(a):
    """The columns of all that the first and the second tensor have, in order."""
    width = [a.w0, a.w1, a.w2, a.w3]
    of = torch.arange(a.n_groups * sum(width)).view(a.n_groups, -1).split(width, 1)
    first, second = (
        torch.cat([p.flatten() for p in x] or [torch.arange(0)])
        for x in (of[: a.n_first], of[a.n_first :])
    )
    tail = torch.arange(a.tail) + a.n_groups * sum(width)
    return torch.cat([first, tail]), second


def heads_split(a, x, *_):
    x = x.view(a.n_tokens, -1)
    return [x[:, columns] for columns in head_columns(a) if len(columns)]


def heads_join(a, *operands):
    columns = torch.cat(head_columns(a))
    parts = [x.view(a.n_tokens, -1) for x in operands[:-1]]
    out = torch.empty(a.n_tokens, len(columns), dtype=torch.float64)
    out[:, columns] = torch.cat(parts, 1)
    return [out]


def sigmoid_gate(a, x, g, _y, residual=None):
    x, g = x.view(a.n_tokens, a.n_gates, -1), g.view(a.n_tokens, a.n_gates, 1)
    y = x * torch.sigmoid(g)
    return [y if residual is None else y + residual.view_as(y)]


def sigmoid_gate_bwd(a, x, g, dy, *_):
    leaves = [v.requires_grad_() for v in (x, g)]
    return gradients(sigmoid_gate(a, *leaves, None), [dy], leaves)


FORMULAS = {
    "conv_fwd": (Conv, conv),
    "conv_bwd": (Conv, conv_bwd),
    "conv_cached": (Conv, conv_cached),
    "delta_fwd": (Delta, delta),
    "delta_bwd": (Delta, delta_bwd),
    "delta_cached": (Delta, delta_cached),
    "gated_norm_fwd": (GatedNorm, gated_norm),
    "gated_norm_bwd": (GatedNorm, gated_norm_bwd),
    "heads_split": (Heads, heads_split),
    "heads_join": (Heads, heads_join),
    "sigmoid_gate_fwd": (SigmoidGate, sigmoid_gate),
    "sigmoid_gate_bwd": (SigmoidGate, sigmoid_gate_bwd),
}
