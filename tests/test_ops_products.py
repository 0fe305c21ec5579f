"""Cross-entropy and matrix products: the cpu kernels against fp64 references. op_runs.py says how a
case runs, and what its tolerance is."""

import math
import os
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from op_runs import (  # noqa: E402
    BF16,
    CODE,
    DTYPES,
    F32,
    LIB,
    PS_EFORMAT,
    PS_EINVAL,
    CrossEntropy,
    Embed,
    EmbedHost,
    Gemm,
    U,
    assert_within,
    launch,
    run,
    same_bits,
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


# ---- cross-entropy -------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(
    "rows,vocab,spread",
    [(1, 1, 1), (3, 15, 1), (64, 64, 5), (33, 1000, 10), (5, 50257, 3), (2, 256000, 30)],
)
@pytest.mark.parametrize("cap", [0.0, 30.0, 1.5])
def test_cross_entropy_against_autograd(rows, vocab, spread, cap, dt):
    z, target = (
        (torch.randn(rows, vocab) * spread).to(dt),
        torch.randint(vocab, (rows,), dtype=torch.int32),
    )
    if rows > 2:
        target[1] = -1
    scale = torch.tensor([1 / 37], dtype=F32)
    dz, loss = run(
        "cross_entropy",
        CrossEntropy(rows, vocab, CODE[dt], cap),
        [("rw", z), ("r", target), ("r", scale), ("w", torch.empty(rows))],
    )
    Z = z.double().requires_grad_()
    Y = cap * torch.tanh(Z / cap) if cap else Z
    ref = torch.nn.functional.cross_entropy(Y, target.long(), ignore_index=-1, reduction="none")
    (ref.sum() * scale.double()).backward()
    y = Y.detach()
    # y - max is rounded before exp: u*reach relative; a capped y is 5u of itself off
    reach = (y.amax(1) - y.amin(1)).clamp(max=104) + (10 * y.abs().amax(1) if cap else 0)
    rel = (vocab / 64 + 7 + 8 + reach)[:, None] * U
    # 1 - t^2 is off by 12u absolute, and never more than 1
    slope = 1 - (y / cap) ** 2 + 12 * U / rel if cap else 1.0
    assert_within(loss, ref.detach(), rel[:, 0] + U * ref.detach().abs())
    p = torch.softmax(y, 1) * scale.double()
    hot = torch.zeros_like(p)
    valid = target >= 0
    hot[valid, target[valid].long()] = scale.double()
    assert_within(dz, Z.grad, rel * (p + hot) * slope * valid[:, None] + 1e-37)
    assert not dz[~valid].any() and not loss[~valid].any()


def test_cross_entropy_of_huge_and_infinite_logits():
    z = torch.tensor([[3e38, -3e38, 0.0], [-float("inf"), 1.0, 2.0], [1.0, float("nan"), 0.0]])
    dz, loss = run(
        "cross_entropy",
        CrossEntropy(3, 3, 0),
        [
            ("rw", z),
            ("r", torch.tensor([0, 2, 0], dtype=torch.int32)),
            ("r", torch.ones(1)),
            ("w", torch.empty(3)),
        ],
    )
    assert loss[0] == 0 and dz[0].tolist() == [0, 0, 0]
    assert dz[1, 0] == 0 and loss[1].item() == pytest.approx(np.log1p(np.exp(-1)), rel=4e-7)
    assert torch.isnan(loss[2])  # a NaN must show


@pytest.mark.parametrize("bad", [-2, 100])
def test_a_target_out_of_range_is_refused_and_nothing_is_written(bad):
    z, target = torch.randn(4, 100), torch.tensor([1, -1, bad, 0], dtype=torch.int32)
    status, after = launch(
        LIB,
        "cross_entropy",
        CrossEntropy(4, 100, 0),
        [z, target, torch.ones(1), torch.full((4,), 9.0)],
        2,
    )
    assert status == PS_EFORMAT and same_bits(after[0], z) and (after[3] == 9).all()
    assert f"target {bad} of token 2 " in LIB.ops_error().decode()


# ---- gemm ----------------------------------------------------------------------------------------


def gemm_case(
    m, n, k, ta=0, tb=0, acc=0, bias=0, residual=0, dts=(F32, F32, F32), pad=0, alpha=0.0
):
    dt_a, dt_b, dt_c = dts
    a = torch.randn((k if ta else m), (m if ta else k) + pad).to(dt_a)
    b = torch.randn((n if tb else k), (k if tb else n) + 2 * pad).to(dt_b)
    c, add = torch.randn(m, n + 3 * pad).to(dt_c), torch.randn(m, n + 3 * pad).to(dt_c)
    row = torch.randn(n).to(dt_c)
    args = Gemm(
        m,
        n,
        k,
        a.shape[1],
        b.shape[1],
        c.shape[1],
        ta,
        tb,
        acc,
        bias,
        residual,
        CODE[dt_a],
        CODE[dt_b],
        CODE[dt_c],
        alpha,
    )
    operands = (
        [("r", a), ("r", b), ("rw" if acc else "w", c)]
        + ([("r", row)] if bias else [])
        + ([("r", add)] if residual else [])
    )
    (out,) = run("gemm", args, operands)
    x, y = a[:, : m if ta else k].double(), b[:, : k if tb else n].double()
    x, y = (x.T if ta else x), (y.T if tb else y)
    factor = np.float32(alpha or 1.0).item()
    ref, size = factor * (x @ y), abs(factor) * (x.abs() @ y.abs())
    for wanted, term in [(acc, c[:, :n]), (bias, row), (residual, add[:, :n])]:
        if wanted:
            ref, size = ref + term.double(), size + term.double().abs()
    assert_within(out[:, :n], ref, (k + 3 + (alpha != 0)) * U * size)
    gap = out[:, n:]
    assert same_bits(gap, c[:, n:]) if acc else torch.isnan(gap).all(), (
        "gemm wrote between the rows of C"
    )


@pytest.mark.parametrize("ta,tb", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize(
    "m,n,k", [(1, 1, 1), (1, 200, 77), (200, 1, 77), (17, 33, 5), (64, 96, 128), (130, 257, 31)]
)
def test_gemm_transposes_and_shapes(m, n, k, ta, tb):
    gemm_case(m, n, k, ta, tb)
    gemm_case(m, n, k, ta, tb, pad=3)


@pytest.mark.parametrize(
    "dts",
    [(a, b, c) for a in (F32, BF16) for b in (F32, BF16) for c in (F32, BF16)],
    ids=lambda d: "".join("fb"[t is BF16] for t in d),
)
@pytest.mark.parametrize(
    "acc,bias,residual", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]
)
def test_gemm_dtypes_and_what_is_added(acc, bias, residual, dts):
    gemm_case(37, 65, 50, 0, 1, acc, bias, residual, dts)
    gemm_case(70, 90, 1030, 1, 0, acc, bias, residual, dts, pad=1)  # three blocks of K


@pytest.mark.parametrize("alpha", [0.22, -3.0])
@pytest.mark.parametrize("dts", [(F32, F32, F32), (BF16, BF16, BF16)], ids=["f32", "bf16"])
@pytest.mark.parametrize("acc,bias,residual", [(0, 0, 0), (1, 0, 0), (0, 1, 1)])
def test_gemm_times_alpha(acc, bias, residual, dts, alpha):
    """alpha multiplies the product and nothing that is added to it."""
    gemm_case(37, 65, 50, 0, 1, acc, bias, residual, dts, alpha=alpha)
    gemm_case(70, 90, 1030, 1, 0, acc, bias, residual, dts, pad=1, alpha=alpha)


def test_gemm_alpha_of_0_stands_for_1():
    a, b, c = torch.randn(70, 300), torch.randn(300, 90), torch.empty(70, 90)
    outs = [
        run("gemm", Gemm(70, 90, 300, 300, 90, 90, alpha=x), [("r", a), ("r", b), ("w", c)])[0]
        for x in (0.0, 1.0)
    ]
    assert same_bits(*outs)


@pytest.mark.parametrize(
    "dts",
    [(F32, F32, F32), (BF16, BF16, BF16), (BF16, BF16, F32)],
    ids=["f32", "bf16", "bf16-to-f32"],
)
@pytest.mark.parametrize(
    "m,n,k",
    [
        (64, 4096, 256),
        (1100, 1030, 70),
        (2100, 40, 520),
        (1, 20000, 300),
        (3000, 1, 900),
        (1025, 1025, 300),
    ],
)
def test_gemm_of_several_tiles(m, n, k, dts):
    gemm_case(m, n, k, 0, 1, dts=dts, residual=1)
    gemm_case(m, n, k, 1, 0, dts=dts, acc=1)


def test_gemm_refuses_rows_that_do_not_fit():
    t = torch.zeros(4, 4)
    for args in (
        Gemm(4, 4, 4, 3, 4, 4),
        Gemm(4, 4, 4, 4, 3, 4),
        Gemm(4, 4, 4, 4, 4, 3),
        Gemm(4, 0, 4, 4, 4, 4),
    ):
        status, after = launch(LIB, "gemm", args, [t, t, t], 1)
        assert status == PS_EINVAL and "gemm" in LIB.ops_error().decode() and same_bits(after[2], t)


@pytest.mark.parametrize(
    "name, args, words",
    [
        ("gemm", Gemm(4, 4, 4, 4, 4, 4, alpha=math.nan), "alpha is nan"),
        ("embed_fwd", Embed(4, 4, 4, 0, 0, -2.0, -1), "scale is -2"),
        ("embed_bwd", Embed(4, 4, 4, 0, 0, math.inf, -1), "scale is inf"),
        ("embed_bwd_host", EmbedHost(4, 4, 4, 0, 0, math.nan, 4, 4, 4), "scale is nan"),
        ("embed_fwd", Embed(4, 4, 4, 2, 0), "dt is 2"),
        ("embed_bwd", Embed(4, 4, 4, 0, 0, 0, 4), "pad is 4"),
        ("cross_entropy", CrossEntropy(4, 4, 0, -30.0), "softcap is -30"),
        ("cross_entropy", CrossEntropy(4, 4, 2), "dt is 2"),
        ("cross_entropy", CrossEntropy(4, 4, 0, 0, -1.0), "z_loss is -1"),
        ("cross_entropy", CrossEntropy(4, 4, 0, 0, float("inf")), "z_loss is inf"),
        ("cross_entropy", CrossEntropy(4, 4, 0, 0, 0, 1.5), "label_smoothing is 1.5"),
        ("cross_entropy", CrossEntropy(4, 4, 0, 0, 0, float("nan")), "label_smoothing is nan"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(name, args, words):
    tensors = [torch.zeros(4, 4) for _ in range(4)]
    status, after = launch(LIB, name, args, tensors, 1)
    assert status == PS_EINVAL and words in LIB.ops_error().decode()
    assert all(same_bits(a, b) for a, b in zip(tensors, after))


def mapped_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_products_of_as_many_threads_as_were_announced_map_nothing():
    before, held = LIB.ops_live(), mapped_bytes()
    assert LIB.ops_blas_ready(6) == 0
    assert LIB.ops_live() == before
    ready = mapped_bytes()
    assert ready - held <= 6 * (33 << 20) + (
        96 << 20
    )  # what matmul.c asks for before OpenBLAS does
    assert LIB.ops_blas_ready(6) == 0 and mapped_bytes() == ready
