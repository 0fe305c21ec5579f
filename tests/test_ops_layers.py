"""Embedding, norms and gated activations: what the cpu kernels do beside their formulas
(test_op_cases.py). op_runs.py says how a case runs, and what its tolerance is."""

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
    launch,
    run,
    same_bits,
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


# ---- embedding -----------------------------------------------------------------------------------


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


# ---- gated activations --------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("code", [0, 1], ids=["silu", "gelu_tanh"])
def test_saturated_gates_and_the_forward_pass_again_in_the_backward_one(code, dt):
    """An exponent of up to 90 is off by 6 u of itself: 4e-5. Sums cancel to 1e-4."""
    n, ffn = 70, 100
    gu, ds = torch.randn(n, 2 * ffn) * 4, torch.randn(n, ffn).to(dt)
    gu[:, 0] = torch.linspace(-120, 120, n)
    gu, args = gu.to(dt), Glu(n, ffn, CODE[dt], code)
    (forward,) = run("glu_fwd", args, [("r", gu), ("w", ds)])
    s, dgu = run("glu_bwd", args, [("rw", ds), ("rw", gu)])
    assert same_bits(s, forward)
    leaf = gu.double().requires_grad_()
    gelu = lambda g: torch.nn.functional.gelu(g, approximate="tanh")
    exact = (gelu if code else torch.nn.functional.silu)(leaf[:, :ffn]) * leaf[:, ffn:]
    exact.backward(ds.double())
    rtol = 2.0**-8 + 1e-4 if dt == BF16 else 1e-4
    for got, want in ((s, exact.detach()), (dgu, leaf.grad)):
        assert torch.allclose(got.double(), want, rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("name", ["glu_fwd", "glu_bwd"])
def test_glu_refuses_by_name(name):
    t = torch.zeros(4, 8)
    for args, words in (
        (Glu(4, 4, 0, 2), "activation is 2"),
        (Glu(4, 4, 2, 0), "dt is 2"),
    ):
        status, _ = launch(LIB, name, args, [t] * 2, 1)
        assert status == PS_EINVAL and words in LIB.ops_error().decode()
