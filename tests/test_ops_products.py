"""Cross-entropy and matrix products: what the cpu kernels do beside their formulas
(test_op_cases.py). op_runs.py says how a case runs, and what its tolerance is."""

import math
import os
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moe_formulas import Grouped  # noqa: E402
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
    ScoreLoss,
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


def gemm_case(m, n, k, ta=0, tb=0, acc=0, bias=0, residual=0, dts=(F32, F32, F32), pad=0):
    dt_a, dt_b, dt_c = dts
    a = torch.randn((k if ta else m), (m if ta else k) + pad).to(dt_a)
    b = torch.randn((n if tb else k), (k if tb else n) + 2 * pad).to(dt_b)
    c, add = torch.randn(m, n + 3 * pad).to(dt_c), torch.randn(m, n + 3 * pad).to(dt_c)
    row = torch.randn(n).to(dt_c)
    rows, flags = (a.shape[1], b.shape[1], c.shape[1]), (ta, tb, acc, bias, residual)
    args = Gemm(m, n, k, *rows, *flags, *(CODE[dt] for dt in dts))
    operands = (
        [("r", a), ("r", b), ("rw" if acc else "w", c)]
        + ([("r", row)] if bias else [])
        + ([("r", add)] if residual else [])
    )
    (out,) = run("gemm", args, operands)
    x, y = a[:, : m if ta else k].double(), b[:, : k if tb else n].double()
    x, y = (x.T if ta else x), (y.T if tb else y)
    ref, size = x @ y, x.abs() @ y.abs()
    for wanted, term in [(acc, c[:, :n]), (bias, row), (residual, add[:, :n])]:
        if wanted:
            ref, size = ref + term.double(), size + term.double().abs()
    assert_within(out[:, :n], ref, (k + 3) * U * size)
    gap = out[:, n:]
    assert same_bits(gap, c[:, n:]) if acc else torch.isnan(gap).all(), (
        "gemm wrote between the rows of C"
    )


@pytest.mark.parametrize(
    "dts",
    [(F32, BF16, BF16), (BF16, F32, F32), (F32, F32, BF16), (BF16, BF16, F32)],
    ids=lambda d: "".join("fb"[t is BF16] for t in d),
)
@pytest.mark.parametrize(
    "acc,bias,residual", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]
)
def test_gemm_dtypes_and_what_is_added(acc, bias, residual, dts):
    gemm_case(37, 65, 50, 0, 1, acc, bias, residual, dts)
    gemm_case(70, 90, 1030, 1, 0, acc, bias, residual, dts, pad=1)  # three blocks of K


@pytest.mark.parametrize("dts", [(F32, F32, F32), (BF16, BF16, BF16)], ids=["f32", "bf16"])
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
        ("score_loss", ScoreLoss(4, 2, 0, 3), "cols is 2: regression has one score"),
        ("score_loss", ScoreLoss(4, 32, 0, 2), "cols is 32: a target has 31 bits"),
        ("score_loss", ScoreLoss(4, 2, 0, 6), "problem is 6"),
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


@DTYPES
@pytest.mark.parametrize("role", [0, 1], ids=["forward", "dX"])
def test_a_row_of_an_experts_product_has_its_bits_wherever_it_lies(dt, role):
    """In whatever place of however many rows. The experts have the same weights."""
    counts, n, k = [1, 2, 0, 5, 64, 261], 71, 301
    rows, experts = sum(counts), len(counts)
    width, out = (k, n) if role == 0 else (n, k)
    w = torch.randn(1, n, k).to(dt).expand(experts, n, k).contiguous()
    offsets = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    x = torch.randn(rows, width).to(dt)
    same = torch.rand(rows) < 0.5
    same[:3] = True
    x[same] = x[0].clone()
    args = Grouped(rows, 1, n, k, experts, CODE[dt], role, 0)
    (y,) = run(
        "gemm_grouped",
        args,
        [("r", x), ("r", w), ("r", offsets), ("w", torch.empty(rows, out, dtype=dt))],
    )
    assert same_bits(y[same], y[:1].expand(int(same.sum()), out))
