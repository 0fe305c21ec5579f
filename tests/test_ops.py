"""The cpu kernels against fp64 references.

Every case runs on 1, 2 and 3 threads, at different 16-byte alignments, and once more with the
kernels compiled for the baseline instruction set; all must give the same bits. Outputs are filled
with NaN before, bytes around every buffer and read-only inputs are checked after.

Tolerances: u = 2^-24 is fp32's unit roundoff. A sum of n products in any order is off by at most
n*u*sum|terms| (Higham, Accuracy and Stability, 3.1). Each test states its error bound e around the
exact value r; the stored result must then lie between round(r - e) and round(r + e), so that for
bf16 exactly one rounding at the store is allowed for.
"""

import ctypes
import math
import os
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / os.environ.get("PENSTOCK_BUILD", "build")
U = 2.0**-24
F32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dt", [F32, BF16], ids=["f32", "bf16"])
CODE = {F32: 0, BF16: 1}
PS_EINVAL, PS_EFORMAT = -1, -2


def load(name):
    path = BUILD / "tests" / name
    if not path.exists():
        pytest.skip(f"{path} is not built: make native-tests", allow_module_level=True)
    lib = ctypes.CDLL(str(path))
    lib.ops_error.restype = ctypes.c_char_p
    lib.ops_exp1.restype = ctypes.c_float
    lib.ops_exp1.argtypes = [ctypes.c_float]
    lib.ops_f32_to_bf16_1.restype = ctypes.c_uint16
    lib.ops_f32_to_bf16_1.argtypes = [ctypes.c_float]
    lib.ops_live.restype = ctypes.c_int64
    return lib


LIB = load("libops_shim.so")
BASELINE = load("libops_shim_base.so")


def struct(name, fields):
    kinds = {"I": ctypes.c_uint32, "Q": ctypes.c_uint64, "B": ctypes.c_uint8, "f": ctypes.c_float}
    return type(
        name,
        (ctypes.Structure,),
        {"_fields_": [(f, kinds[k]) for k, names in fields for f in names.split()]},
    )


Fill = struct("Fill", [("Q", "bytes")])
Accumulate = struct("Accumulate", [("Q", "n first"), ("I", "dt n_threads mode index")])
Embed = struct("Embed", [("I", "n_tokens vocab dim dt accumulate"), ("f", "scale")])
EmbedHost = struct(
    "EmbedHost",
    [
        ("I", "n_tokens vocab dim dt accumulate"),
        ("f", "scale"),
        ("I", "chunk_tokens short_tokens group_tokens skip_tokens mode index"),
    ],
)
Rmsnorm = struct(
    "Rmsnorm",
    [
        ("I", "rows cols dt accumulate_dw add_dx"),
        ("f", "eps weight_offset"),
        ("I", "has_residual"),
    ],
)
Gemm = struct(
    "Gemm",
    [
        ("I", "m n k lda ldb ldc"),
        ("B", "trans_a trans_b accumulate has_bias has_residual dt_a dt_b dt_c"),
        ("f", "alpha"),
    ],
)
Quantize = struct("Quantize", [("I", "rows cols dt dt_q forms given count")])
GemmFp8 = struct(
    "GemmFp8",
    [
        ("I", "m n k"),
        ("B", "role accumulate has_bias has_residual dt_a dt_b dt_c reserved"),
        ("f", "alpha"),
    ],
)
Glu = struct("Glu", [("I", "n_tokens ffn_dim dt activation")])
Colsum = struct("Colsum", [("I", "rows cols ld dt accumulate")])
CrossEntropy = struct(
    "CrossEntropy", [("I", "rows vocab dt"), ("f", "softcap z_loss label_smoothing")]
)
Sumsq = struct("Sumsq", [("Q", "n"), ("I", "dt n_threads")])


class Buffer:
    """A copy of a tensor's bytes at 64k + 16*shift, with 256 guard bytes before and after it."""

    GUARD = 256

    def __init__(self, tensor, shift):
        data = (
            tensor.contiguous().view(torch.uint8).reshape(-1).numpy()
            if tensor.numel()
            else np.zeros(0, np.uint8)
        )
        self.like, self.n = tensor, data.size
        self.raw = np.full(self.n + 2 * self.GUARD + 128, 0xA5, np.uint8)
        self.at = self.GUARD + (-(self.raw.ctypes.data + self.GUARD)) % 64 + 16 * shift
        self.raw[self.at : self.at + self.n] = data

    @property
    def address(self):
        return self.raw.ctypes.data + self.at

    def tensor(self):
        return (
            torch.from_numpy(self.raw[self.at : self.at + self.n].copy())
            .view(self.like.dtype)
            .reshape(self.like.shape)
        )

    def check_guards(self, name):
        assert (self.raw[: self.at] == 0xA5).all(), f"{name} wrote before a buffer"
        assert (self.raw[self.at + self.n :] == 0xA5).all(), f"{name} wrote past a buffer"


def launch(lib, name, args, tensors, threads, shift=0):
    buffers = [Buffer(t, (shift + i * shift) % 4) for i, t in enumerate(tensors)]
    ptrs = (ctypes.c_void_p * len(buffers))(*[b.address for b in buffers])
    status = lib.ops_run(name.encode(), ctypes.byref(args), ptrs, len(buffers), threads)
    for b in buffers:
        b.check_guards(name)
    return status, [b.tensor() for b in buffers]


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def poison(t):
    return torch.full_like(t, float("nan")) if t.is_floating_point() else torch.full_like(t, -1)


def run(name, args, operands):
    """operands: (mode, tensor) in ptr order; a 'w' tensor gives shape and dtype. Returns what was
    written, in order."""
    tensors = [poison(t) if mode == "w" else t for mode, t in operands]
    results = []
    for lib, threads, shift in [(LIB, 1, 0), (LIB, 2, 1), (LIB, 3, 2), (BASELINE, 2, 3)]:
        status, after = launch(lib, name, args, tensors, threads, shift)
        assert status == 0, lib.ops_error().decode()
        for (mode, _), before, now in zip(operands, tensors, after):
            if mode == "r":
                assert same_bits(before, now), f"{name} wrote to an input"
        results.append([t for (mode, _), t in zip(operands, after) if mode != "r"])
    for other, what in zip(results[1:], ["2 threads", "3 threads", "the baseline instruction set"]):
        for a, b in zip(results[0], other):
            assert same_bits(a, b), f"{name} gives other bits on {what}"
    return results[0]


def assert_within(out, ref, err):
    """round(ref - err) <= out <= round(ref + err) in out's dtype; err gets 2u|ref| for the
    references' own narrowing."""
    err = err + 2 * U * ref.abs()
    low, high = (
        (ref - err).to(F32).to(out.dtype).double(),
        (ref + err).to(F32).to(out.dtype).double(),
    )
    out = out.double()
    bad = ~((low <= out) & (out <= high))
    if bad.any():
        i = bad.nonzero()[0].tolist()
        at = tuple(i)
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} out of bounds, first at {at}: {out[at].item()} not in "
            f"[{low[at].item()}, {high[at].item()}]"
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
    src = f32(
        [
            np.nan,
            np.inf,
            -np.inf,
            0.0,
            -0.0,
            1.0,
            -1.0,
            88.7,
            88.8,
            -87.5,
            -103.9,
            -104.5,
            1e-45,
            700.0,
            -700.0,
        ]
    )
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


@pytest.mark.parametrize("n", [1, 3, 4096, (1 << 20) + 5])
def test_fill_zero(n):
    (out,) = run("fill_zero", Fill(n), [("rw", torch.full((n,), 7, dtype=torch.uint8))])
    assert not out.any()


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
    for n_threads in (1, 2, 100):
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


LOW_READ, LOW_WRITE, DITHER = 1, 2, 4


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


@pytest.mark.parametrize("additions", [64, 256, 1024, 4096])
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


@DTYPES
@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize(
    "rows,cols,ld",
    [(1, 1, 1), (3, 17, 20), (64, 100, 100), (65, 33, 48), (1000, 515, 515), (5000, 40, 64)],
)
def test_colsum(rows, cols, ld, accumulate, dt):
    dy, db = torch.randn(rows, ld).to(dt), torch.randn(cols).to(dt)
    (out,) = run(
        "colsum",
        Colsum(rows, cols, ld, CODE[dt], accumulate),
        [("r", dy), ("rw" if accumulate else "w", db)],
    )
    used = dy[:, :cols].double()
    ref, size = used.sum(0), used.abs().sum(0)
    if accumulate:
        ref, size = ref + db.double(), size + db.double().abs()
    depth = (
        min(rows, 64 if rows <= 4096 else -(-rows // 64)) + 65
    )  # rows of a group in order, then at most 64 groups, then db
    assert_within(out, ref, depth * U * size)


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
        Embed(tokens, vocab, dim, CODE[dt], 0, scale),
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
@pytest.mark.parametrize("scale", [0.0, 45.254834])
def test_embed_bwd_adds_rows_in_order(tokens, vocab, dim, skew, scale, accumulate, dt):
    ids = (torch.rand(tokens) ** skew * vocab).to(torch.int32).clamp(max=vocab - 1)
    dx, old = torch.randn(tokens, dim).to(dt), torch.randn(vocab, dim).to(dt)
    (out,) = run(
        "embed_bwd",
        Embed(tokens, vocab, dim, CODE[dt], accumulate, scale),
        [("r", ids), ("r", dx), ("rw" if accumulate else "w", old)],
    )
    scale = scale or 1.0
    order = np.zeros(
        (vocab, dim), np.float32
    )  # the documented sum itself: fp32, in order of t, one rounding when added
    for t in range(tokens):
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
    assert_within(out, ref, (int(torch.bincount(ids).max()) + 3) * U * size)


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
    what is left of it behind its first chunk."""
    check_embed_host(vocab, dim, groups, short, chunk, n_full, skew, accumulate, dt, 0)
    if groups * (n_full + 1) > 1:
        check_embed_host(vocab, dim, groups, short, chunk, n_full, skew, accumulate, dt, short)


@pytest.mark.parametrize("scale", [0.0, 45.254834])
@pytest.mark.parametrize("mode", [0, LOW_WRITE, LOW_READ | LOW_WRITE, DITHER])
def test_embed_bwd_host_dithered_or_with_low_bytes(mode, scale):
    check_embed_host(300, 270, 1, 40, 64, 3, 1, 1, BF16, 40, mode, scale)


def check_embed_host(
    vocab, dim, groups, short, chunk, n_full, skew, accumulate, dt, skip, mode=0, scale=0.0
):
    sizes = ([short] + n_full * [chunk]) * groups
    a_group = sum(sizes) // groups
    sizes = sizes[1 if skip else 0 :]
    tokens = sum(sizes)
    ids = (torch.rand(tokens) ** skew * vocab).to(torch.int32).clamp(max=vocab - 1)
    dx, total = torch.randn(tokens, dim).to(dt), torch.randn(vocab, dim).to(dt)
    args = EmbedHost(
        tokens, vocab, dim, CODE[dt], accumulate, scale, chunk, short, a_group, skip, mode, 6
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
            Embed(n, vocab, dim, CODE[dt], i > 0, scale),
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
        EmbedHost(8, 50, 4, 0, 0, 0.0, 8, 8, 8, 0, 0, 0)
        if name == "embed_bwd_host"
        else Embed(8, 50, 4, 0, 0)
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
        ("embed_fwd", Embed(4, 4, 4, 0, 0, -2.0), "scale is -2"),
        ("embed_bwd", Embed(4, 4, 4, 0, 0, math.inf), "scale is inf"),
        ("embed_bwd_host", EmbedHost(4, 4, 4, 0, 0, math.nan, 4, 4, 4), "scale is nan"),
        ("embed_fwd", Embed(4, 4, 4, 2, 0), "dt is 2"),
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
