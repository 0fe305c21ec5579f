"""Conversions, exp and sums: the bits that the cpu kernels promise beside their formulas
(test_op_cases.py). op_runs.py says how a case runs."""

import ctypes
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from op_runs import (  # noqa: E402
    BASELINE,
    BF16,
    CODE,
    DITHER,
    DTYPES,
    LIB,
    LOW_READ,
    LOW_WRITE,
    Accumulate,
    Sumsq,
    launch,
    run,
    same_bits,
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


# ---- conversions and exp -------------------------------------------------------------------------


def f32(array):
    return np.ascontiguousarray(array, np.float32)


def test_every_bf16_widens_exactly():
    src = np.arange(65536, dtype=np.uint16)
    dst = np.empty(65536, np.float32)
    LIB.ops_bf16_to_f32(
        dst.ctypes.data_as(ctypes.c_void_p),
        src.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_size_t(65536),
    )
    assert (dst.view(np.uint32) == src.astype(np.uint32) << 16).all()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 1 << 20])
def test_narrowing_rounds_to_nearest_even_and_keeps_nan(n):
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32)
    bits[::5] = (bits[::5] & 0xFFFF0000) | 0x8000  # ties
    bits[: min(n, 6)] = [0x7F800001, 0xFF800000, 0x7F7FFFFF, 0x00000001, 0x80000000, 0xFFFFFFFF][
        : min(n, 6)
    ]
    src, dst = bits.view(np.float32), np.empty(n, np.uint16)
    for lib in (LIB, BASELINE):
        lib.ops_f32_to_bf16(
            dst.ctypes.data_as(ctypes.c_void_p),
            src.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(n),
        )
        nan = np.isnan(src)
        want = torch.from_numpy(src.copy()).to(BF16).view(torch.int16).numpy().view(np.uint16)
        assert (dst[~nan] == want[~nan]).all()
        assert ((dst[nan] & 0x7FC0) == 0x7FC0).all()
        assert (dst[nan] >> 15 == bits[nan] >> 31).all()
    for x, want in zip(src[:64], dst[:64]):
        if not np.isnan(x):  # ctypes may quieten a NaN on the way
            assert LIB.ops_f32_to_bf16_1(x) == want


def exp_of(lib, src):
    dst = np.empty_like(src)
    lib.ops_exp(
        dst.ctypes.data_as(ctypes.c_void_p),
        src.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_size_t(src.size),
    )
    return dst


def test_exp_is_within_2_ulp_over_the_whole_range():
    src = (
        np.arange(0, 1 << 32, 397, dtype=np.uint64).astype(np.uint32).view(np.float32)
    )  # 10.8 million of all patterns
    src = src[np.isfinite(src)]
    out = exp_of(LIB, src)
    with np.errstate(over="ignore"):
        exact = np.exp(src.astype(np.float64))
        inf = np.isinf(exact.astype(np.float32))
    assert np.isinf(out[inf]).all()
    exact, out = exact[~inf], out[~inf]
    ulp = np.maximum(np.exp2(np.floor(np.log2(np.maximum(exact, 1e-300))) - 23), 2.0**-149)
    assert (np.abs(out - exact) / ulp).max() <= 2.0


def test_exp_of_special_values_and_the_inline_form():
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]
    src = f32([*special, 88.7, 88.8, -87.5, -103.9, -104.5, 1e-45, 700.0, -700.0])
    out = exp_of(LIB, src)
    assert np.isnan(out[0]) and out[1] == np.inf and out[2] == 0.0 and out[3] == out[4] == 1.0
    assert (
        out[8] == np.inf
        and out[9] > 0
        and out[10] > 0
        and out[11] == 0.0
        and out[13] == np.inf
        and out[14] == 0.0
    )
    wide = f32(np.random.default_rng(1).uniform(-105, 89, 4099))
    out = exp_of(LIB, wide)
    assert (out.view(np.uint32) == exp_of(BASELINE, wide).view(np.uint32)).all()
    for i in range(0, wide.size, 37):
        assert LIB.ops_exp1(wide[i]) == out[i]


# ---- fill, accumulate, sums ----------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("name", ["accumulate", "accumulate_host"])
@pytest.mark.parametrize("n", [1, 15, 17, 65536, 200003])
def test_accumulate_is_one_rounding_of_the_sum(n, name, dt):
    g, total = torch.randn(n).to(dt), (torch.randn(n) * 3).to(dt)
    (out,) = run(name, Accumulate(n, 0, CODE[dt]), [("r", g), ("rw", total)])
    assert same_bits(out, (total.float() + g.float()).to(dt))


@DTYPES
@pytest.mark.parametrize("name", ["sumsq", "sumsq_host"])
@pytest.mark.parametrize("n", [1, 1023, 1024, 1025, 4096, 65537, 100003, 1 << 20, (1 << 24) + 4099])
def test_sumsq_is_the_documented_sum_bit_for_bit(n, name, dt):
    g = (torch.randn(n) * torch.exp(8 * torch.randn(n))).to(
        dt
        # so wide a range that sums of bf16's squares, of 16 bits each, are rounded in fp64 too: the
        # order shows
    )
    (out,) = run(name, Sumsq(n, CODE[dt]), [("r", g), ("w", torch.zeros(1, dtype=torch.float64))])
    group = max(65536, ((n + 255) // 256 + 1023) // 1024 * 1024)
    total = 0.0
    for first in range(0, n, group):
        part = g[first : first + group].double().numpy()
        x = np.zeros(-(-len(part) // 1024) * 1024)
        x[: len(part)] = part
        lane = np.zeros(1024)
        for row in x.reshape(-1, 1024):
            lane = lane + row * row
        width = 512
        while width:
            lane[:width] += lane[width : 2 * width]
            width //= 2
        total += lane[0]
    assert out.item() == total
    assert out.item() == pytest.approx((g.double() ** 2).sum().item(), rel=n * 2.0**-53)


@DTYPES
@pytest.mark.parametrize("n", [1, 1025, 16 * 1024, 65537 + 17 * 1024, (1 << 24) + 4099])
def test_accumulate_sumsq_leaves_the_bits_of_both(n, dt):
    g, total = torch.randn(n).to(dt), (torch.randn(n) * 3).to(dt)
    added, squares = run(
        "accumulate_sumsq_host",
        Accumulate(n, 0, CODE[dt]),
        [("r", g), ("rw", total), ("w", torch.zeros(1, dtype=torch.float64))],
    )
    (expected,) = run("accumulate_host", Accumulate(n, 0, CODE[dt]), [("r", g), ("rw", total)])
    (sums,) = run(
        "sumsq_host",
        Sumsq(n, CODE[dt]),
        [("r", expected), ("w", torch.zeros(1, dtype=torch.float64))],
    )
    assert same_bits(added, expected) and squares.item() == sums.item()
    for n_threads in (1, 2, 100) if n < 1 << 24 else ():
        again, as_before = run(
            "accumulate_sumsq_host",
            Accumulate(n, 0, CODE[dt], n_threads),
            [("r", g), ("rw", total), ("w", torch.zeros(1, dtype=torch.float64))],
        )
        (alone,) = run(
            "accumulate_host", Accumulate(n, 0, CODE[dt], n_threads), [("r", g), ("rw", total)]
        )
        assert (
            same_bits(again, expected)
            and same_bits(alone, expected)
            and as_before.item() == squares.item()
        )


def bits_of(x):
    return x.float().numpy().view(np.uint32).astype(np.uint64)


def low_sum(total, low, g, first, index, mode):
    """What ops.h says of dithers and low bytes, in integers: (total, low) after the addition."""
    before = bits_of(total) | (low.numpy().astype(np.uint64) << 8 if mode & LOW_READ else 0)
    f = before.astype(np.uint32).view(np.float32) + g.float().numpy()
    dither = ((first + np.arange(len(f), dtype=np.uint64)) * 37345 + index * 40503) & 0xFFFF
    bits = f.view(np.uint32).astype(np.uint64)
    after = (
        ((bits + dither) & 0xFFFF0000) if mode == DITHER else ((bits + (dither >> 8)) & 0xFFFFFF00)
    ).astype(np.uint32)
    if mode & LOW_WRITE:
        return torch.from_numpy((after >> 16).astype(np.uint16).view(np.int16)).view(
            BF16
        ), torch.from_numpy((after >> 8 & 255).astype(np.uint8))
    return torch.from_numpy(after.view(np.float32)).to(BF16), low


def low_total(n):
    """A total with low bytes, and what is added."""
    exact = torch.randn(n) * 3
    bits = torch.from_numpy((bits_of(exact) >> 16 << 16).astype(np.uint32).view(np.float32))
    return bits.to(BF16), torch.randint(256, (n,), dtype=torch.uint8), torch.randn(n).to(BF16)


@pytest.mark.parametrize("mode", [LOW_READ, LOW_WRITE, LOW_READ | LOW_WRITE, DITHER])
@pytest.mark.parametrize("name", ["accumulate", "accumulate_host"])
@pytest.mark.parametrize("n, first", [(1, 0), (31, 5), (65, 2**32 + 7), (200003, 1)])
def test_accumulate_dithered_or_with_low_bytes(n, first, name, mode):
    total, low, g = low_total(n)
    expected, expected_low = low_sum(total, low, g, first, 9, mode)
    buffers = [("r", g), ("rw", total)] + (
        [] if mode == DITHER else [("rw" if mode & LOW_WRITE else "r", low)]
    )
    out, *rest = run(name, Accumulate(n, first, CODE[BF16], 0, mode, 9), buffers)
    assert same_bits(out, expected)
    assert not rest or same_bits(rest[0], expected_low)


@pytest.mark.parametrize("n, first", [(1, 3), (1025, 0), (65537 + 17 * 1024, 77)])
def test_the_last_addition_to_a_total_with_low_bytes_and_its_squares(n, first):
    total, low, g = low_total(n)
    zero = torch.zeros(1, dtype=torch.float64)
    expected, _ = low_sum(total, low, g, first, 4, LOW_READ)
    added, squares = run(
        "accumulate_sumsq_host",
        Accumulate(n, first, CODE[BF16], 0, LOW_READ, 4),
        [("r", g), ("rw", total), ("w", zero), ("r", low)],
    )
    (sums,) = run("sumsq_host", Sumsq(n, CODE[BF16]), [("r", expected), ("w", zero)])
    assert same_bits(added, expected) and squares.item() == sums.item()
    # and where all additions were made before (an embedding on the host): rounded alone, to the same
    # bits
    upper, lower = low_sum(total, low, g, first, 4, LOW_READ | LOW_WRITE)
    rounded, squares = run(
        "round_sumsq_host",
        Accumulate(n, 0, CODE[BF16], 0, LOW_READ),
        [("rw", upper), ("w", zero), ("r", lower)],
    )
    assert same_bits(rounded, expected) and squares.item() == sums.item()


@pytest.mark.parametrize("additions", [64, 1024])
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "random"])
def test_the_error_of_a_total_does_not_grow_with_additions(additions, equal):
    """A total of 24 bits: 16 of significand. Each addition's error is at most 2^-15 of the total
    (an ulp of 16 bits); with dithers that cancel over consecutive additions equal terms leave a few
    ulps in all, random ones (independent errors, variance ulp^2/6) 2^-15 sqrt(additions / 6). The
    rounding to bf16 at the end, in the mean at most an ulp (2^-7) / sqrt(12), is what remains."""
    n = 4096
    total, low = torch.zeros(n, dtype=BF16), torch.zeros(n, dtype=torch.uint8)
    term, exact, size = (
        torch.randn(n).to(BF16),
        torch.zeros(n, dtype=torch.float64),
        torch.zeros(n, dtype=torch.float64),
    )
    for k in range(1, additions + 1):
        g = term if equal else torch.randn(n).to(BF16)
        exact += g.double()
        size = torch.maximum(size, exact.abs())
        mode = LOW_READ | LOW_WRITE if k < additions else LOW_READ
        status, (_, total, low) = launch(
            LIB, "accumulate_host", Accumulate(n, 0, CODE[BF16], 2, mode, k), [g, total, low], 2
        )
        assert status == 0
    error = (total.double() - exact).norm() / exact.norm()
    of_24_bits = (
        8 * 2.0**-15
        if equal
        else 2.0**-15 * math.sqrt(additions / 6) * (size.norm() / exact.norm()).item()
    )
    assert error < math.hypot(2.0**-7 / math.sqrt(12), of_24_bits)
