"""attention_fwd and attention_bwd against naive attention in fp64 with an explicit mask.

Tolerance. Inputs are exact (rounded to the storage dtype before the oracle sees them), so errors
are fp32 arithmetic and the one rounding at the store. With u = 2^-24 a dot product of n terms errs
by about sqrt(n) u times the sum of absolute terms (random signs of the roundings; 4 such sigmas are
allowed). A score errs by sqrt(head_dim) u A, A = max over pairs of sum |q k| / sqrt(head_dim), and
that is the relative error of P. So every output errs by at most 4 u (sqrt(head_dim) max(1, A) +
sqrt(n_keys) + 4) B, B being the same formula with absolute values of all terms, element by element.
One wrongly seen key among n changes a result by about 1/n of B: 100 times the tolerance at n =
1000."""

import math
import struct

import pytest
import torch
from kernel_calls import (
    BF16,
    EINVAL,
    F32,
    TORCH_DTYPE,
    Buffer,
    U,
    call,
    poison,
    refusal,
    rounding,
    run,
)

FLOOR = 2.0**-100  # probabilities under 2^-126 count as zero: far below what any sum here can show
HEADS = [(1, 1), (4, 2), (8, 1), (6, 2)]


def doc_starts(n_tokens, row0, lengths):
    """doc_start of rows row0.. when documents of the given lengths (the last one repeated) follow
    each other from group row 0."""
    starts, at, i = [], 0, 0
    while len(starts) < row0 + n_tokens:
        n = lengths[min(i, len(lengths) - 1)] if lengths else row0 + n_tokens
        starts += [at] * n
        at, i = at + n, i + 1
    return torch.tensor(starts[row0 : row0 + n_tokens], dtype=torch.int32)


class Case:
    def __init__(
        self,
        n_tokens,
        head_dim,
        heads,
        row0,
        dt,
        lengths,
        gain=1.0,
        seed=0,
        window=0,
        scale=0.0,
        softcap=0.0,
    ):
        self.window, self.scale, self.softcap = window, scale, softcap
        self.sink = None  # logits of the heads' sinks, fp32
        g = torch.Generator().manual_seed(seed)
        self.t, self.d, self.row0, self.dt, (self.h, self.kv_h) = (
            n_tokens,
            head_dim,
            row0,
            dt,
            heads,
        )
        normal = lambda *shape: torch.randn(*shape, generator=g)
        self.q = (normal(n_tokens, self.h * head_dim) * gain).to(TORCH_DTYPE[dt])
        self.kv = normal(row0 + n_tokens, 2 * self.kv_h * head_dim).to(TORCH_DTYPE[dt])
        self.d_o = normal(n_tokens, self.h * head_dim).to(TORCH_DTYPE[dt])
        self.doc_start = doc_starts(n_tokens, row0, lengths)

    def args(self, accumulate=0):
        return struct.pack(
            "10I2fI",
            self.t,
            self.row0,
            self.h,
            self.kv_h,
            self.d,
            self.dt,
            accumulate,
            0,
            0,
            self.window,
            self.scale,
            self.softcap,
            0,
        )

    def forward(self, **kw):
        out = [
            (3, poison(self.q.shape, self.q.dtype)),
            (4, poison((self.t, self.h), torch.float32)),
        ]
        return run(
            "attention_fwd",
            self.args(),
            [(0, self.q), (1, self.kv), (2, self.doc_start)],
            out,
            **kw,
        )

    def backward(self, o, lse, dkv=None, **kw):
        accumulate = dkv is not None
        dkv = dkv if accumulate else poison(self.kv.shape, torch.float32)
        inputs = list(enumerate([self.q, self.kv, self.doc_start, o, lse, self.d_o]))
        return run(
            "attention_bwd",
            self.args(int(accumulate)),
            inputs,
            [(6, poison(self.q.shape, self.q.dtype)), (7, dkv)],
            **kw,
        )

    # ---- the oracle, fp64
    # ----------------------------------------------------------------------------------------------
    def split(self):
        """q [H,T,d], k and v [H,rows,d] (expanded), mask [T,rows]."""
        q = self.q.double().view(self.t, self.h, self.d).transpose(0, 1)
        k, v = (
            self.kv.double()
            .view(-1, 2, self.kv_h, self.d)
            .permute(1, 2, 0, 3)
            .repeat_interleave(self.h // self.kv_h, dim=1)
        )
        row, key = torch.arange(self.t) + self.row0, torch.arange(self.row0 + self.t)
        first = self.doc_start
        if self.window:  # transformers' sliding window: key > query - window
            first = torch.maximum(first, row + 1 - self.window)
        return q, k, v, (key[None] <= row[:, None]) & (key[None] >= first[:, None])

    def capped(self, s):
        return torch.tanh(s / self.softcap) * self.softcap if self.softcap else s

    def heads_last(self, x):
        return x.transpose(0, 1).reshape(x.shape[1], -1)

    def fold(self, dk, dv):
        """Gradients of the expanded k, v as rows of dkv: the heads of a group add up."""
        add = lambda x: x.view(self.kv_h, -1, *x.shape[1:]).sum(1)
        return torch.cat([self.heads_last(add(dk)), self.heads_last(add(dv))], 1)

    def oracle(self, o_given):
        """(value, bound B) of o, lse, dq, dkv. D is taken from the o that the kernel is given,
        which in bf16 is rounded."""
        q, k, v, mask = self.split()
        c, g = (
            self.scale or 1 / math.sqrt(self.d),
            self.d_o.double().view(self.t, self.h, self.d).transpose(0, 1),
        )
        product = q @ k.mT * c
        s = self.capped(product).masked_fill(~mask, -math.inf)
        slope = 1 - torch.tanh(product / self.softcap) ** 2 if self.softcap else 1.0
        steep = 2.0 - slope if self.softcap else 1.0  # 1 + tanh^2: what 1 - tanh^2 is made of
        lse = s.logsumexp(-1)
        if self.sink is not None:
            lse = torch.logaddexp(lse, self.sink.double()[:, None])
        p, absolute = (s - lse[..., None]).exp(), q.abs() @ k.abs().mT * c
        o = p @ v
        self.amplify = (
            4
            * U
            * (
                math.sqrt(self.d) * max(1.0, (absolute * mask).max().item())
                + math.sqrt(self.row0 + self.t)
                + 4
            )
        )
        used = o_given.double().view(self.t, self.h, self.d).transpose(0, 1)
        ds = p * (g @ v.mT - (g * used).sum(-1, keepdim=True)) * c * slope
        ds_abs = p * (g.abs() @ v.abs().mT + (g * used).abs().sum(-1, keepdim=True)) * c * steep
        value = [self.heads_last(o), lse.T, self.heads_last(ds @ k), self.fold(ds.mT @ q, p.mT @ g)]
        bound = [
            self.heads_last(p @ v.abs()),
            torch.ones_like(lse.T),
            self.heads_last(ds_abs @ k.abs()),
            self.fold(ds_abs.mT @ q.abs(), p.mT @ g.abs()),
        ]
        return list(zip(value, bound))

    def check(self, name, got, value, bound, stored):
        assert got.isfinite().all(), f"{name} is not finite"
        tolerance = self.amplify * bound + rounding(stored) * value.abs()
        worst = ((got.double() - value).abs() / (tolerance + FLOOR)).max().item()
        assert worst <= 1, f"{name}: {worst:.2f} times the tolerance"


def check_all(case, **kw):
    o, lse = case.forward(**kw)
    oracle = case.oracle(o)
    dq, dkv = case.backward(o, lse, **kw)
    for name, got, (value, bound), stored in zip(
        ("o", "lse", "dq", "dkv"), (o, lse, dq, dkv), oracle, (case.dt, F32, case.dt, F32)
    ):
        case.check(name, got, value, bound, stored)
    return o, lse, dq, dkv


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
@pytest.mark.parametrize("n_tokens", [1, 2, 17, 64, 127, 128, 129, 500])
def test_one_document_is_exact(n_tokens, head_dim):
    """In fp32 and bf16 by turns."""
    dt = (F32, BF16)[(n_tokens + head_dim // 32) % 2]
    check_all(Case(n_tokens, head_dim, HEADS[(n_tokens + head_dim // 16) % 4], 0, dt, None))


@pytest.mark.parametrize("dt", [F32, BF16])
@pytest.mark.parametrize("lengths", [None, [7, 100, 1, 64, 150, 33], [64], [1], [290, 50]])
@pytest.mark.parametrize("row0", [0, 64, 300])
def test_chunk_with_prefix_and_documents(row0, lengths, dt):
    """Every number of heads with and without a prefix and documents."""
    for heads in HEADS[(row0 == 64) ^ (lengths is None) :: 2]:
        check_all(Case(201, 32, heads, row0, dt, lengths))


@pytest.mark.parametrize("head_dim", [2, 8, 40, 80, 256, 512])
def test_head_dims_that_are_no_multiple_of_a_vector(head_dim):
    check_all(Case(100, head_dim, (4, 2), 30, F32, [60, 45]))


# windows of one key, within a tile, of whole tiles, across chunk and document borders, past all
WINDOWS = [1, 5, 64, 100, 128, 200, 1000]


@pytest.mark.parametrize("lengths", [None, [7, 100, 1, 64, 150, 33]])
@pytest.mark.parametrize("row0", [0, 64, 300])
@pytest.mark.parametrize("window", WINDOWS)
def test_window(window, row0, lengths):
    """In fp32 and bf16 by turns."""
    dt = (F32, BF16)[(WINDOWS.index(window) + row0 // 64 + (lengths is None)) % 2]
    check_all(Case(201, 32, (4, 2), row0, dt, lengths, window=window))


@pytest.mark.parametrize("dt", [F32, BF16])
@pytest.mark.parametrize("lengths", [None, [7, 100, 1, 64, 150, 33]])
@pytest.mark.parametrize("softcap, gain", [(50.0, 1.0), (2.0, 1.0), (5.0, 40.0)])
@pytest.mark.parametrize("window", [0, 70])
def test_soft_cap_and_scale(window, softcap, gain, lengths, dt):
    case = dict(window=window, softcap=softcap, scale=0.11, gain=gain)
    check_all(Case(150, 48, (4, 2), 90, dt, lengths, **case))


def with_sinks(case, o, lse):
    args = struct.pack("5I", case.t, case.h, case.d, case.dt, 0)
    return run("attention_sink", args, [(2, case.sink)], [(0, o), (1, lse)])


@pytest.mark.parametrize("lengths", [None, [7, 100, 1, 64, 150, 33]])
@pytest.mark.parametrize("row0", [0, 300])
@pytest.mark.parametrize("window", [0, 5])
def test_a_sink_is_one_more_key_without_a_value(window, row0, lengths):
    """A correction of what attention without it gives; attention_bwd knows nothing of it. Sinks are
    below, among and far above the scores."""
    case = Case(201, 32, (4, 2), row0, F32, lengths, window=window)
    case.sink = torch.tensor([-3.0, 0.5, 4.0, 60.0])
    o, lse = with_sinks(case, *case.forward())
    oracle = case.oracle(o)
    dq, dkv = case.backward(o, lse)
    for name, got, (value, bound) in zip(("o", "lse", "dq", "dkv"), (o, lse, dq, dkv), oracle):
        case.check(name, got, value, bound + value.abs(), F32)
    value, lse = oracle[0][0].view(case.t, case.h, -1), oracle[1][0]
    terms = torch.exp(case.sink.double() - lse)[..., None] * value * case.d_o.view_as(value)
    args = struct.pack("5I", case.t, case.h, case.d, F32, 0)
    given = list(enumerate([o, oracle[1][0].float(), case.d_o, case.sink]))
    (dsink,) = run("attention_sink_bwd", args, given, [(4, poison((case.h,), torch.float32))])
    case.check("dsink", dsink, -terms.sum((0, 2)), terms.abs().sum((0, 2)), F32)


def test_scale_alone_and_its_default():
    check_all(Case(100, 64, (4, 2), 30, F32, [60], scale=0.3))
    default, given = (Case(100, 64, (4, 2), 0, F32, None, scale=s) for s in (0.0, 0.125))
    assert all(torch.equal(a, b) for a, b in zip(default.forward(), given.forward()))


def test_a_window_that_holds_all_keys_changes_no_bit():
    plain, wide = (Case(200, 32, (4, 2), 70, BF16, [90, 300], window=w) for w in (0, 270))
    first, second = plain.forward(), wide.forward()
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(torch.equal(a, b) for a, b in zip(plain.backward(*first), wide.backward(*second)))


@pytest.mark.parametrize(
    "changed, words",
    [
        (dict(scale=-1.0), "scale is -1"),
        (dict(scale=math.nan), "scale is nan"),
        (dict(softcap=-50.0), "softcap is -50"),
        (dict(softcap=math.inf), "softcap is inf"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(changed, words):
    case = Case(30, 16, (2, 1), 0, F32, None, **changed)
    out = poison(case.q.shape, case.q.dtype), poison((30, 2), torch.float32)
    assert words in refusal("attention_fwd", case.args(), [case.q, case.kv, case.doc_start, *out])


@pytest.mark.parametrize("extra", [{}, dict(window=75, softcap=4.0, scale=0.3)])
def test_oracle_agrees_with_autograd(extra):
    case = Case(130, 16, (4, 2), 70, F32, [90, 41, 200], **extra)
    q, kv = case.q.double().requires_grad_(), case.kv.double().requires_grad_()
    case.q, case.kv = q, kv
    qh, k, v, mask = case.split()
    s = case.capped(qh @ k.mT * (case.scale or 0.25)).masked_fill(~mask, -math.inf)
    o = case.heads_last(torch.softmax(s, -1) @ v)
    dq, dkv = torch.autograd.grad(o, (q, kv), case.d_o.double())
    case.q, case.kv = q.detach(), kv.detach()
    for (value, _), want in zip(case.oracle(o.detach()), (o.detach(), None, dq, dkv)):
        assert want is None or torch.allclose(value, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dt", [F32, BF16])
def test_threads_and_addresses_do_not_change_bits(dt):
    case = Case(333, 64, (6, 2), 100, dt, [70, 200, 90])
    o, lse = case.forward(n_threads=1)
    first = [o, lse, *case.backward(o, lse, n_threads=1)]
    for n_threads, shift in ((2, 0), (3, 16), (2, 48)):
        again = [
            *case.forward(n_threads=n_threads, shift=shift),
            *case.backward(o, lse, n_threads=n_threads, shift=shift),
        ]
        assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.parametrize("dt", [F32, BF16])
@pytest.mark.parametrize("lengths", [None, [130, 300, 55]])
@pytest.mark.parametrize("extra", [{}, dict(window=190, softcap=3.0)])
def test_four_chunks_equal_one_pass(extra, lengths, dt):
    """dK and dV add up over the chunks, last chunk first; the sums' order differs, so up to the
    tolerance."""
    n, rows = 4, 150
    whole = Case(n * rows, 48, (4, 2), 0, dt, lengths, **extra)
    o, lse = whole.forward()
    oracle = whole.oracle(o)
    dkv = poison(whole.kv.shape, torch.float32)
    for c in reversed(range(n)):
        part = Case(rows, 48, (4, 2), c * rows, dt, lengths, **extra)
        at = slice(c * rows, (c + 1) * rows)
        part.q, part.d_o, part.kv = whole.q[at], whole.d_o[at], whole.kv[: (c + 1) * rows]
        part_o, part_lse = part.forward()
        whole.check("o", part_o, oracle[0][0][at], oracle[0][1][at], dt)
        dq, dkv[: (c + 1) * rows] = part.backward(
            part_o, part_lse, None if c == n - 1 else dkv[: (c + 1) * rows]
        )
        if dt == F32:
            whole.check("dq", dq, oracle[2][0][at], oracle[2][1][at], dt)
    whole.check("dkv", dkv, *oracle[3], F32)


def test_accumulate_adds_to_every_row():
    case = Case(
        129, 64, (4, 2), 300, F32, [310, 60, 59]
    )  # most of the prefix is seen by the first document only
    o, lse = case.forward()
    dq, dkv = case.backward(o, lse)
    base = torch.randn(dkv.shape, generator=torch.Generator().manual_seed(1))
    dq2, total = case.backward(o, lse, base)
    assert torch.equal(dq, dq2)
    case.oracle(o)
    assert (
        (total.double() - base.double() - dkv.double()).abs()
        <= 8 * U * (base.abs() + total.abs() + dkv.abs())
    ).all()


def test_rows_that_nobody_sees_get_zeros():
    case = Case(70, 16, (2, 1), 200, F32, [200])  # the chunk is a document of its own
    o, lse = case.forward()
    assert (case.backward(o, lse)[1][:200] == 0).all()
    base = torch.randn(270, 32)
    assert torch.equal(case.backward(o, lse, base)[1][:200], base[:200])


@pytest.mark.parametrize("gain", [30.0, 3000.0])
def test_large_scores_do_not_overflow(gain):
    check_all(Case(150, 64, (2, 1), 10, F32, [90], gain=gain))


def test_nan_stays_in_the_rows_that_see_it():
    case = Case(100, 16, (2, 1), 0, F32, [40, 60])
    case.kv[50, :16] = math.nan  # a key
    o, lse = case.forward()
    bad = torch.zeros(100, dtype=torch.bool)
    bad[50:] = True
    assert (
        torch.equal(o.isnan().all(1), bad)
        and torch.equal(o.isnan().any(1), bad)
        and torch.equal(lse.isnan().all(1), bad)
    )


@pytest.mark.parametrize("row, value", [(5, 6), (7, -1), (20, 3)])
def test_bad_doc_start_is_refused_and_nothing_written(row, value):
    case = Case(30, 16, (2, 1), 0, F32, [4, 26])
    case.doc_start[row] = value
    out = [Buffer(poison(case.q.shape, case.q.dtype)), Buffer(poison((30, 2), torch.float32))]
    assert (
        call(
            "attention_fwd",
            case.args(),
            [Buffer(case.q), Buffer(case.kv), Buffer(case.doc_start), *out],
            2,
        )
        == EINVAL
    )
    assert all(b.unchanged() for b in out)
