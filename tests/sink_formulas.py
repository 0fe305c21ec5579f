"""The formulas of what only gpt-oss has (native/kernels/ops.h), for test_op_cases.py: arguments and
operands, in fp64 where they are numbers, to the written operands in order."""

import torch
from op_runs import struct

Sink = struct("Sink", [("I", "n_tokens n_heads head_dim dt accumulate")])


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


FORMULAS = {"attention_sink": (Sink, sink), "attention_sink_bwd": (Sink, sink_bwd)}
