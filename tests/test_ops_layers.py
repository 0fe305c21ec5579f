"""Embedding, norms and gated activations: the cpu kernels against fp64 references. op_runs.py says
how a case runs, and what its tolerance is."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from op_runs import (  # noqa: E402
    BF16,
    CODE,
    DITHER,
    DTYPES,
    LIB,
    LOW_READ,
    LOW_WRITE,
    PS_EFORMAT,
    PS_EINVAL,
    Accumulate,
    Embed,
    EmbedHost,
    Glu,
    Rmsnorm,
    U,
    assert_within,
    launch,
    run,
    same_bits,
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


# ---- embedding -----------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(
    "tokens,vocab,dim", [(1, 1, 1), (5, 7, 19), (64, 300, 256), (1000, 5000, 130)]
)
@pytest.mark.parametrize("scale", [0.0, 45.254834])
def test_embed_fwd_copies_rows_times_scale(tokens, vocab, dim, scale, dt):
    ids, table = torch.randint(vocab, (tokens,), dtype=torch.int32), torch.randn(vocab, dim).to(dt)
    (out,) = run(
        "embed_fwd",
        Embed(tokens, vocab, dim, CODE[dt], 0, scale, -1),
        [("r", ids), ("r", table), ("w", torch.empty(tokens, dim, dtype=dt))],
    )
    rows = table[ids.long()]
    # as torch multiplies a tensor by a number: in fp32, one rounding
    assert same_bits(out, (rows.float() * np.float32(scale).item()).to(dt) if scale else rows)


@DTYPES
@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize(
    "tokens,vocab,dim,skew",
    [(1, 1, 1, 1), (5, 7, 19, 1), (64, 300, 256, 1), (999, 257, 530, 3), (3000, 70000, 24, 6)],
)
@pytest.mark.parametrize("scale, pad", [(0.0, -1), (45.254834, -1), (45.254834, 0)])
def test_embed_bwd_adds_rows_in_order(tokens, vocab, dim, skew, scale, pad, accumulate, dt):
    ids = (torch.rand(tokens) ** skew * vocab).to(torch.int32).clamp(max=vocab - 1)
    dx, old = torch.randn(tokens, dim).to(dt), torch.randn(vocab, dim).to(dt)
    (out,) = run(
        "embed_bwd",
        Embed(tokens, vocab, dim, CODE[dt], accumulate, scale, pad),
        [("r", ids), ("r", dx), ("rw" if accumulate else "w", old)],
    )
    scale = scale or 1.0
    ids, dx = ids[ids != pad], dx[ids != pad]
    order = np.zeros(
        (vocab, dim), np.float32
    )  # the documented sum itself: fp32, in order of t, one rounding when added
    for t in range(len(ids)):
        order[ids[t]] += dx[t].float().numpy()
    want = torch.from_numpy(order * np.float32(scale))
    if accumulate:
        seen = torch.zeros(vocab, dtype=torch.bool)
        seen[ids.long()] = True
        want = torch.where(seen[:, None], old.float() + want, old.float())
    assert same_bits(out + 0.0, want.to(dt) + 0.0)  # + 0.0: -0 counts as 0
    sums = lambda x: torch.zeros(vocab, dim, dtype=torch.float64).index_add_(0, ids.long(), x)
    ref = scale * sums(dx.double()) + (old.double() if accumulate else 0)
    size = scale * sums(dx.double().abs()) + old.double().abs()
    assert_within(out, ref, (int(torch.bincount(ids, minlength=1).max()) + 3) * U * size)


@DTYPES
@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize(
    "vocab,dim,groups,short,chunk,n_full,skew",
    [
        (7, 19, 1, 5, 1, 0, 1),
        (300, 256, 1, 40, 64, 3, 1),
        (257, 530, 3, 30, 50, 4, 3),
        (70000, 24, 2, 500, 500, 2, 6),
        (12, 300, 4, 64, 64, 1, 1),
    ],
)
def test_embed_bwd_host_leaves_the_bits_of_a_round_on_the_device(
    vocab, dim, groups, short, chunk, n_full, skew, accumulate, dt
):
    """Chunk by chunk into a table, and the table added to the total; of the whole round, and of
    what is left of it behind its first chunk, there with a pad token."""
    check_embed_host(vocab, dim, groups, short, chunk, n_full, skew, accumulate, dt, 0)
    if groups * (n_full + 1) > 1:
        check_embed_host(
            vocab, dim, groups, short, chunk, n_full, skew, accumulate, dt, short, pad=3
        )


@pytest.mark.parametrize("scale, pad", [(0.0, -1), (45.254834, 7)])
@pytest.mark.parametrize("mode", [0, LOW_WRITE, LOW_READ | LOW_WRITE, DITHER])
def test_embed_bwd_host_dithered_or_with_low_bytes(mode, scale, pad):
    check_embed_host(300, 270, 1, 40, 64, 3, 1, 1, BF16, 40, mode, scale, pad)


def check_embed_host(
    vocab, dim, groups, short, chunk, n_full, skew, accumulate, dt, skip, mode=0, scale=0.0, pad=-1
):
    sizes = ([short] + n_full * [chunk]) * groups
    a_group = sum(sizes) // groups
    sizes = sizes[1 if skip else 0 :]
    tokens = sum(sizes)
    ids = (torch.rand(tokens) ** skew * vocab).to(torch.int32).clamp(max=vocab - 1)
    dx, total = torch.randn(tokens, dim).to(dt), torch.randn(vocab, dim).to(dt)
    args = EmbedHost(
        tokens, vocab, dim, CODE[dt], accumulate, scale, pad, chunk, short, a_group, skip, mode, 6
    )
    bytes_ = torch.randint(256, (vocab, dim), dtype=torch.uint8)
    of_low = [("rw" if mode & LOW_READ else "w", bytes_)] if mode & (LOW_READ | LOW_WRITE) else []
    out = run(
        "embed_bwd_host",
        args,
        [("r", ids), ("r", dx), ("rw" if accumulate else "w", total), *of_low],
    )
    table, at = torch.empty(vocab, dim, dtype=dt), 0
    for i, n in enumerate(sizes):
        (table,) = run(
            "embed_bwd",
            Embed(n, vocab, dim, CODE[dt], i > 0, scale, pad),
            [("r", ids[at : at + n]), ("r", dx[at : at + n]), ("rw" if i else "w", table)],
        )
        at += n
    table = [table]
    if accumulate:
        table = run(
            "accumulate",
            Accumulate(vocab * dim, 0, CODE[dt], 0, mode, 6),
            [("r", table[0]), ("rw", total), *of_low],
        )
    assert all(same_bits(a, b) for a, b in zip(out, table, strict=True))


@pytest.mark.parametrize(
    "name,bad,token",
    [
        ("embed_fwd", 50, 3),
        ("embed_bwd", 50, 3),
        ("embed_fwd", -1, 7),
        ("embed_bwd", -2147483648, 0),
        ("embed_bwd_host", 50, 5),
    ],
)
def test_an_id_out_of_range_is_refused_and_nothing_is_written(name, bad, token):
    ids = torch.zeros(8, dtype=torch.int32)
    ids[token] = bad
    out = torch.full((8 if name == "embed_fwd" else 50, 4), 5.0)
    args = (
        EmbedHost(8, 50, 4, 0, 0, 0.0, -1, 8, 8, 8, 0, 0, 0)
        if name == "embed_bwd_host"
        else Embed(8, 50, 4, 0, 0, 0.0, -1)
    )
    status, after = launch(LIB, name, args, [ids, torch.zeros(50, 4), out], 2)
    assert status == PS_EFORMAT and same_bits(after[2], out)
    assert f"id {bad} of token {token} " in LIB.ops_error().decode()


# ---- rmsnorm -------------------------------------------------------------------------------------

NORM_SHAPES = pytest.mark.parametrize(
    "rows,cols", [(1, 1), (1, 4096), (3, 15), (7, 64), (65, 100), (130, 1000), (4200, 48)]
)


def norm_reference(x, w, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w


# plain; Gemma's 1 + w; OLMo 2's norm before the residual; both
NORM_EXTRAS = pytest.mark.parametrize("offset,residual", [(0, 0), (1, 0), (0, 1), (-0.75, 1)])


@DTYPES
@NORM_EXTRAS
@NORM_SHAPES
def test_rmsnorm_fwd(rows, cols, offset, residual, dt):
    eps = 1e-5
    x, w = (
        (torch.randn(rows, cols) * torch.exp(torch.randn(rows, 1))).to(dt),
        torch.randn(cols).to(dt),
    )
    added = torch.randn(rows, cols).to(dt)
    (y,) = run(
        "rmsnorm_fwd",
        Rmsnorm(rows, cols, CODE[dt], 0, 0, eps, offset, residual),
        [("r", x), ("r", w), ("w", x)] + ([("r", added)] if residual else []),
    )
    ref = norm_reference(x.double(), w.double() + offset, eps)
    # sum of squares: cols/64 additions a lane, 6 levels; half of that through the root; 6 more
    # roundings, one of w + offset against |w| + |offset|, one of the sum with the residual
    size = norm_reference(x.double(), w.double().abs() + abs(offset), eps).abs()
    err = ((cols / 64 + 7) / 2 + 7) * U * size
    if residual:
        ref, err = ref + added.double(), err + U * added.double().abs()
    assert_within(y, ref, err)


def test_rmsnorm_without_an_offset_keeps_the_signs_of_zeros():
    """x * -0 is -0: adding an offset of +0 would turn it to +0."""
    x, w = torch.ones(1, 16), torch.full((16,), -0.0)
    (y,) = run("rmsnorm_fwd", Rmsnorm(1, 16, 0, 0, 0, 1e-5), [("r", x), ("r", w), ("w", x)])
    assert torch.signbit(y).all()


@pytest.mark.parametrize("name", ["rmsnorm_fwd", "rmsnorm_bwd"])
def test_rmsnorm_refuses_by_name(name):
    t = torch.zeros(4, 4)
    for args, words in (
        (Rmsnorm(4, 4, 0, 0, 0, 1e-5, math.inf), "weight_offset is inf"),
        (Rmsnorm(4, 4, 2, 0, 0, 1e-5), "dt is 2"),
    ):
        status, _ = launch(LIB, name, args, [t] * 5, 1)
        assert status == PS_EINVAL and words in LIB.ops_error().decode()


@DTYPES
@pytest.mark.parametrize("accumulate,add,offset", [(0, 0, 0), (1, 1, 0), (0, 1, 1)])
@NORM_SHAPES
def test_rmsnorm_bwd_against_autograd(rows, cols, accumulate, add, offset, dt):
    eps = 1e-5
    x, w, dy = (
        torch.randn(rows, cols).to(dt),
        torch.randn(cols).to(dt),
        torch.randn(rows, cols).to(dt),
    )
    dx, dw = torch.randn(rows, cols).to(dt), torch.randn(cols).to(dt)
    args = Rmsnorm(rows, cols, CODE[dt], accumulate, add, eps, offset)
    got_dx, got_dw = run(
        "rmsnorm_bwd",
        args,
        [
            ("r", x),
            ("r", w),
            ("r", dy),
            ("rw" if add else "w", dx),
            ("rw" if accumulate else "w", dw),
        ],
    )
    X, W = x.double().requires_grad_(), w.double().requires_grad_()
    norm_reference(X, W + offset, eps).backward(dy.double())
    x, w, dy = x.double(), w.double(), dy.double()
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    g, xh = dy.abs() * (w.abs() + offset), (x * rstd).abs()
    depth = cols / 64 + 7 + 13  # the longer of the two sums, then the roundings of d
    size = rstd * (g + xh * (g * xh).mean(-1, keepdim=True)) * 2
    assert_within(
        got_dx,
        X.grad + (dx.double() if add else 0),
        depth * U * (size + (dx.double().abs() if add else 0)),
    )
    depth = min(rows, 64 if rows <= 4096 else -(-rows // 64)) + 65 + (cols / 64 + 7) / 2 + 5
    size = (dy.abs() * xh).sum(0) + (dw.double().abs() if accumulate else 0)
    assert_within(got_dw, W.grad + (dw.double() if accumulate else 0), depth * U * size)


# ---- gated activations --------------------------------------------------------------------------------------

GLU_SHAPES = pytest.mark.parametrize(
    "tokens,ffn", [(1, 1), (3, 15), (5, 64), (70, 100), (9, 5632), (200, 333)]
)
# below exp(-80): where exp(-g) overflows the true value is smaller than this times the rest
TINY = 1e-35


def glu_inputs(tokens, ffn, dt):
    gu = torch.randn(tokens, 2 * ffn) * 4
    gu[:, 0] = torch.linspace(-120, 120, tokens)  # saturated gates
    return gu.to(dt)


# activation, torch's, k and k' of act(g) = g * sigmoid(k(g)), roundings in k
A, B = math.sqrt(8 / math.pi), 0.044715
ACTIVATIONS = pytest.mark.parametrize(
    "code,act,inner,slope,depth",
    [
        (0, torch.nn.functional.silu, lambda g: g, lambda g: torch.ones_like(g), 0),
        (
            1,
            lambda g: torch.nn.functional.gelu(g, approximate="tanh"),
            lambda g: A * (g + B * g**3),
            lambda g: A * (1 + 3 * B * g**2),
            5,
        ),
    ],
    ids=["silu", "gelu_tanh"],
)


@DTYPES
@ACTIVATIONS
@GLU_SHAPES
def test_glu_fwd(tokens, ffn, code, act, inner, slope, depth, dt):
    gu = glu_inputs(tokens, ffn, dt)
    (s,) = run(
        "glu_fwd",
        Glu(tokens, ffn, CODE[dt], code),
        [("r", gu), ("w", torch.empty(tokens, ffn, dtype=dt))],
    )
    g, u = gu.double().split(ffn, 1)
    k = inner(g)
    # torch's own 1 + tanh cancels in fp64 too; exp: 2 ulp = 4u and depth * |k|; 1 + exp, division,
    # product: 3u
    ref = act(g) * u
    exact = g * torch.sigmoid(k) * u
    assert ((ref - exact).abs() <= 1e-15 * (1 + g.abs()) * u.abs()).all()
    err = (8 + depth * k.abs() * torch.sigmoid(-k)) * U * exact.abs()
    assert_within(s, exact, err + TINY * (1 + u.abs()) * (1 + g.abs()))


@DTYPES
@ACTIVATIONS
@GLU_SHAPES
def test_glu_bwd_against_autograd(tokens, ffn, code, act, inner, slope, depth, dt):
    gu, ds = glu_inputs(tokens, ffn, dt), torch.randn(tokens, ffn).to(dt)
    args = Glu(tokens, ffn, CODE[dt], code)
    s, got = run("glu_bwd", args, [("rw", ds), ("rw", gu)])
    (forward,) = run("glu_fwd", args, [("r", gu), ("w", torch.empty(tokens, ffn, dtype=dt))])
    assert (s == forward).all()  # in ds's place, to the bit
    G = gu.double().requires_grad_()
    (act(G[:, :ffn]) * G[:, ffn:]).backward(ds.double())
    g, u = gu.double().split(ffn, 1)
    k, rise = inner(g), g.abs() * slope(g)
    sig, d = torch.sigmoid(k), ds.double()
    exact = torch.cat([d * u * sig * (1 + g * slope(g) * torch.sigmoid(-k)), d * g * sig], 1)
    d = d.abs()
    # where torch's 1 + tanh cancels
    slack = (1 + d * (1 + u.abs()) * (1 + rise)).repeat(1, 2) * 1e-14
    assert ((G.grad - exact).abs() <= slack).all()
    size = torch.cat([d * u.abs() * sig * (1 + rise * (1 + sig)), d * (g * sig).abs()], 1)
    # sig is off by 6u relative, 1 - sig by 6u*sig + u absolute, times g k'; then five roundings; k's
    # own roundings move sig by depth * |k| of itself at most
    roundings = 16 + depth * (1 + k.abs().clamp(max=90)).repeat(1, 2)
    tiny = TINY * (1 + u.abs().repeat(1, 2)) * (1 + d.repeat(1, 2)) * (1 + rise.repeat(1, 2))
    assert_within(got, exact, roundings * U * size + tiny)


@pytest.mark.parametrize("name", ["glu_fwd", "glu_bwd"])
def test_glu_refuses_by_name(name):
    t = torch.zeros(4, 8)
    for args, words in (
        (Glu(4, 4, 0, 2), "activation is 2"),
        (Glu(4, 4, 2, 0), "dt is 2"),
    ):
        status, _ = launch(LIB, name, args, [t] * 2, 1)
        assert status == PS_EINVAL and words in LIB.ops_error().decode()
