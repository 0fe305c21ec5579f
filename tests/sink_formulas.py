"""The formulas of what only gpt-oss or Gemma 4 has (native/kernels/ops.h), for test_op_cases.py:
arguments and operands, in fp64 where they are numbers, to the written operands in order."""

import torch
from op_runs import struct

Sink = struct("Sink", [("I", "n_tokens n_heads head_dim dt accumulate")])
Scale = struct("Scale", [("I", "n_tokens n_used n_experts dt accumulate")])
AddBias = struct("AddBias", [("I", "rows cols dt")])
ClampGlu = struct(
    "ClampGlu", [("I", "n_tokens n_used n_experts expert_dim dt"), ("f", "alpha limit")]
)
Bias = struct("Bias", [("I", "n_tokens n_used n_experts cols dt weighted accumulate")])


def sink(a, o, lse, sink):
    """A softmax over all keys, as one of weight exp(lse), and the sink."""
    lse = lse.view(a.n_tokens, a.n_heads)
    both = torch.stack([lse, sink.expand_as(lse)], -1)
    keep = both.softmax(-1)[..., :1]
    return [o.view(a.n_tokens, a.n_heads, -1) * keep, both.logsumexp(-1)]


def sink_bwd(a, o, lse, d_o, sink, dsink):
    p = torch.exp(sink - lse.view(a.n_tokens, a.n_heads))
    d = (o * d_o).view(a.n_tokens, a.n_heads, -1).sum(-1)
    return [-(p * d).sum(0) + (dsink if a.accumulate else 0)]


def clamp_glu(a, gu, bias, ids, weights, slot, *_):
    """@gu's rows are sorted by expert; a row's expert is that of its choice."""
    of_row, expert = torch.zeros(len(slot), dtype=gu.dtype), torch.zeros(len(slot)).long()
    of_row = of_row.index_put((slot.long(),), weights)
    expert[slot.long()] = ids.long()
    gu = gu.view(len(slot), -1) + bias.view(a.n_experts, -1)[expert]
    g = gu[:, 0::2].clamp(max=a.limit)
    u = gu[:, 1::2].clamp(-a.limit, a.limit)
    return [(u + 1) * g * torch.sigmoid(a.alpha * g) * of_row[:, None]]


def clamp_glu_bwd(a, ds, gu, bias, ids, weights, slot, _):
    gu, weights = gu.requires_grad_(), weights.requires_grad_()
    (s,) = clamp_glu(a, gu, bias, ids, weights, slot)
    return [s.detach(), *torch.autograd.grad((s * ds.view_as(s)).sum(), [gu, weights])]


def bias_dot(a, dy, bias, ids, dweights):
    of_choice = dy.view(a.n_tokens, -1).repeat_interleave(a.n_used, 0)
    return [dweights + (of_choice * bias.view(a.n_experts, -1)[ids.long()]).sum(1)]


def bias_sum(a, x, offsets, slot, weights, db):
    of_row = torch.ones(len(slot), dtype=x.dtype)
    if a.weighted:
        of_row[slot.long()] = weights
    rows = x.view(len(slot), -1) * of_row[:, None]
    cut = zip(offsets.long().tolist(), offsets.long().tolist()[1:], strict=False)
    total = torch.stack([rows[first:end].sum(0) for first, end in cut])
    return [total + (db.view_as(total) if a.accumulate else 0)]


def scale_bwd(a, w, ids, scale, dy, dscale=None):
    total = torch.zeros(a.n_experts, dtype=w.dtype).index_add(0, ids.long(), dy * w)
    return [dy * scale[ids.long()], total + (dscale if a.accumulate else 0)]


FORMULAS = {
    "attention_sink": (Sink, sink),
    "attention_sink_bwd": (Sink, sink_bwd),
    "moe_scale": (Scale, lambda a, w, ids, scale, _: [w * scale[ids.long()]]),
    "moe_scale_bwd": (Scale, scale_bwd),
    "add_bias": (AddBias, lambda a, x, b: [x.view(a.rows, a.cols) + b]),
    "moe_clamp_glu": (ClampGlu, clamp_glu),
    "moe_clamp_glu_bwd": (ClampGlu, clamp_glu_bwd),
    "moe_bias_dot": (Bias, bias_dot),
    "moe_bias_sum": (Bias, bias_sum),
}
