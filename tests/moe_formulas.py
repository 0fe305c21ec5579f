"""The formulas of the ops of experts (native/kernels/ops.h), for test_op_cases.py: arguments and
operands, in fp64 where they are numbers, to the written operands in order."""

import torch
from op_runs import struct

Route = struct(
    "Route",
    [
        ("I", "n_tokens n_experts n_used renorm sigmoid has_bias dt n_groups n_groups_used"),
        ("f", "scale"),
    ],
)
RouteBwd = struct(
    "RouteBwd",
    [
        ("I", "n_tokens n_experts n_used renorm dt count"),
        ("f", "aux z_loss"),
        ("I", "step_tokens sigmoid"),
        ("f", "scale"),
    ],
)
Index = struct("Index", [("I", "n_tokens n_experts n_used")])
Rows = struct("Rows", [("I", "n_tokens n_used dim dt accumulate has_residual has_bias")])
Grouped = struct("Grouped", [("I", "n_tokens n_used n_out n_in n_experts dt role accumulate")])
Slots = struct("Slots", [("I", "n_tokens n_used n_out n_in n_experts dt role accumulate n_slots")])
Fetch = struct("Fetch", [("I", "n_tokens n_used n_experts n_slots"), ("Q", "bytes0 bytes1")])
MoeGlu = struct("MoeGlu", [("I", "n_tokens n_used expert_dim dt activation")])
FORWARD, DGRAD, WGRAD = 0, 1, 2


def chosen(p, ids, a):
    w = p.gather(1, ids)
    if a.renorm:
        w = w / (w.sum(1, keepdim=True) + (1e-20 if a.sigmoid else 0))
    return w * (a.scale or 1.0)


def in_order(x):
    """-inf before NaN."""
    return torch.where(x.isnan(), -2e300, x.clamp(-1e300, 1e300))


def best(x, n):
    """Equal ones in the order of their indices."""
    return in_order(x).sort(dim=1, descending=True, stable=True).indices[:, :n]


def closed(scores, a):
    """Which experts are outside the best groups."""
    groups = scores.view(a.n_tokens, a.n_groups, -1)
    two = in_order(groups).sort(dim=2, descending=True, stable=True).indices[:, :, : 1 + a.sigmoid]
    used = best(groups.gather(2, two).sum(2), a.n_groups_used)
    outside = torch.ones(a.n_tokens, a.n_groups, dtype=torch.bool).scatter(1, used, False)
    return outside.repeat_interleave(groups.shape[2], 1)


def route(a, logits, _ids, _weights, bias=0.0):
    x = logits.view(a.n_tokens, a.n_experts)
    # as the op does in fp32, where scores far out are equal
    p = x.float().sigmoid().double() if a.sigmoid else x.softmax(1)
    scores = (p.float() + torch.as_tensor(bias).float()).double() if a.sigmoid else x
    order = in_order(scores)
    if a.n_groups:
        order = torch.where(closed(scores, a), -3e300, order)
    ids = order.sort(dim=1, descending=True, stable=True).indices[:, : a.n_used]
    w = chosen(p, ids, a)
    if a.sigmoid:
        poison = (~(x < torch.inf)).any(1, keepdim=True)
        w = torch.where(poison, torch.nan, w)
    return [ids, w]


def route_bwd(a, logits, ids, _weights, dweights, offsets, _dlogits, counts=None):
    x = logits.view(a.n_tokens, a.n_experts).requires_grad_()
    ids, n = ids.view(a.n_tokens, a.n_used).long(), offsets.diff().double()
    p = x.sigmoid() if a.sigmoid else x.softmax(1)
    loss = (chosen(p, ids, a) * dweights.view_as(ids)).sum()
    loss = loss + a.aux * ((n / a.n_tokens) * x.softmax(1).sum(0) / a.step_tokens).sum()
    loss = loss + a.z_loss * (x.logsumexp(1) ** 2).sum() / a.step_tokens
    out = [torch.autograd.grad(loss, x)[0]]
    if a.count:
        out.append((counts.view(torch.int64) + n.long()).view(torch.float64))
    return out


def index(a, ids, *_):
    ids = torch.where(ids < a.n_experts, ids, 0).long()
    order = ids.sort(stable=True).indices
    offsets = torch.cat([torch.zeros(1), ids.bincount(minlength=a.n_experts).cumsum(0)])
    slot = torch.empty_like(order)
    slot[order] = torch.arange(len(order))
    return [offsets.double(), slot.double()]


def gather(a, x, slot, out):
    rows = torch.empty_like(out).view(-1, a.dim)
    rows[slot.long()] = x.view(a.n_tokens, a.dim).repeat_interleave(a.n_used, 0)
    return [rows]


def combine(a, z, slot, y, *more):
    rows = z.view(-1, a.dim)[slot.long()]
    if a.has_bias:
        bias, weights, ids = more[-3:]
        rows = rows + weights[:, None] * bias.view(-1, a.dim)[ids.long()]
    rows = rows.view(a.n_tokens, a.n_used, a.dim).sum(1)
    return [rows + (y if a.accumulate else more[0] if a.has_residual else 0 * y).view_as(rows)]


def grouped(a, x, w, offsets, y):
    out = []
    bounds = offsets.tolist()
    x = x.view(-1, a.n_in if a.role == FORWARD else a.n_out)
    w = w.view(-1, a.n_in) if a.role == WGRAD else w.view(a.n_experts, a.n_out, a.n_in)
    for e, (first, end) in enumerate(zip(bounds, bounds[1:])):
        rows = x[first:end]
        if a.role == WGRAD:
            out.append((rows.T @ w[first:end])[None])
        else:
            out.append(rows @ (w[e].T if a.role == FORWARD else w[e]))
    out = torch.cat(out)
    return [out + y.view_as(out) if a.accumulate else out]


def slots(a, x, w, offsets, y, slot_of):
    w = w.view(a.n_slots, a.n_out, a.n_in)
    of_experts = torch.stack([w[max(int(s) - 1, 0)] for s in slot_of])
    return grouped(a, x, of_experts, offsets, y)


def fetch(a, ids, pos, table, counts, w0, slots0, w1, slots1):
    """A cache by the book: what is wanted and not there takes the place of what was used longest
    ago."""
    e_n, s_n = a.n_experts, a.n_slots
    slot_of, expert_of, used, missing, (launches, _) = table.long().split([e_n, s_n, s_n, s_n, 2])
    launches += 1
    of_rows = ids.view(a.n_tokens, a.n_used)[pos >= 0].flatten().tolist()
    wanted = sorted({i if i < e_n else 0 for i in of_rows})
    lacking = [e for e in wanted if not slot_of[e]]
    for e in set(wanted) - set(lacking):
        used[slot_of[e] - 1] = launches
    for i, e in enumerate(lacking):
        free = [(int(u), s) for s, u in enumerate(used) if u != launches]
        at = min(free)[1]
        if expert_of[at]:
            slot_of[expert_of[at] - 1] = 0
        expert_of[at], slot_of[e], used[at], missing[i] = e + 1, at + 1, launches, e
        for w, cache in (w0, slots0), (w1, slots1):
            cache.view(s_n, -1)[at] = w.view(e_n, -1)[e]
    table = torch.cat(
        [slot_of, expert_of, used, missing, launches[None], torch.tensor([len(lacking)])]
    )
    counts = counts.view(torch.int64) + torch.tensor([len(wanted), len(lacking)])
    return [table.double(), counts.view(torch.float64), slots0, slots1]


def gate(a, gu, weights, slot, *_):
    g, u = gu.view(-1, 2 * a.expert_dim).split(a.expert_dim, 1)
    act = torch.nn.functional
    s = (act.gelu(g, approximate="tanh") if a.activation else act.silu(g)) * u
    of_row = torch.zeros(len(s), dtype=s.dtype).index_put((slot.long(),), weights)
    return [s * of_row[:, None]]


def gate_bwd(a, ds, gu, weights, slot, _):
    gu, weights = gu.requires_grad_(), weights.requires_grad_()
    (s,) = gate(a, gu, weights, slot)
    return [s.detach(), *torch.autograd.grad((s * ds.view_as(s)).sum(), [gu, weights])]


FORMULAS = {
    "moe_route": (Route, route),
    "moe_route_bwd": (RouteBwd, route_bwd),
    "moe_index": (Index, index),
    "moe_gather": (Rows, gather),
    "moe_combine": (Rows, combine),
    "gemm_grouped": (Grouped, grouped),
    "gemm_grouped_rows": (Grouped, grouped),
    "gemm_grouped_slots": (Slots, slots),
    "moe_fetch": (Fetch, fetch),
    "moe_glu": (MoeGlu, gate),
    "moe_glu_bwd": (MoeGlu, gate_bwd),
}
