"""FP8 on the CPU: the dtypes against PyTorch's, quantized tensors, products.

run() of op_runs.py sees to threads, alignment, guards and instruction sets.
"""

import ctypes
import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from op_runs import (  # noqa: E402
    BASELINE,
    BF16,
    F32,
    LIB,
    PS_EINVAL,
    GemmFp8,
    Quantize,
    launch,
    run,
    same_bits,
    struct,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CODE = {F32: 0, BF16: 1, E4M3: 3, E5M2: 4}  # ps_dtype, ps__other_dtype
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
ROWS, COLS = 1, 2
FORWARD, DGRAD, WGRAD = 0, 1, 2
FP8 = pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
STORED = pytest.mark.parametrize("dt", [F32, BF16], ids=["fp32", "bf16"])

NormQuantize = struct(
    "NormQuantize",
    [
        ("I", "rows cols dt accumulate_dw add_dx"),
        ("f", "eps weight_offset"),
        ("I", "has_residual dt_q forms count"),
    ],
)
Norm = struct(
    "Norm",
    [
        ("I", "rows cols dt accumulate_dw add_dx"),
        ("f", "eps weight_offset"),
        ("I", "has_residual"),
    ],
)
Glu = struct("Glu", [("I", "n_tokens ffn_dim dt activation")])
GluQuantize = struct("GluQuantize", [("I", "n_tokens ffn_dim dt activation dt_q forms count")])
Scale = struct("Scale", [("I", "rows cols dt dt_q"), ("f", "headroom")])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


# ---- the dtypes ----------------------------------------------------------------------------------


def converted(function, values, fp8, to):
    src, dst = values.numpy(), np.empty(values.numel(), to)
    pointers = (x.ctypes.data_as(ctypes.c_void_p) for x in (dst, src))
    function(CODE[fp8] - 3, *pointers, ctypes.c_size_t(src.size))
    return torch.from_numpy(dst)


def encoded(values, fp8, lib=LIB):
    return converted(lib.ops_f32_to_fp8, values, fp8, np.uint8)


def decoded(codes, fp8, lib=LIB):
    return converted(lib.ops_fp8_to_f32, codes, fp8, np.float32)


def check_encoding(values, fp8):
    """PyTorch's cast rounds as we do, but does not saturate."""
    clamped = values.clamp(-LARGEST[fp8], LARGEST[fp8])
    want, nan = clamped.to(fp8).view(torch.uint8), values.isnan()
    for lib in (LIB, BASELINE):
        got = encoded(values, fp8, lib)
        assert torch.equal(got[~nan], want[~nan])
        assert (got[nan] == 0x7F).all()


@FP8
def test_every_bf16_value_is_rounded_to_nearest_even_and_saturates(fp8):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(BF16).float()
    check_encoding(every, fp8)


@FP8
def test_fp32_values_around_every_boundary(fp8):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fp8).float()
    codes = codes[codes.isfinite()].sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    near = [torch.nextafter(ties, torch.tensor(side)) for side in (-math.inf, math.inf)]
    spread = torch.randn(100000) * torch.exp2(torch.randint(-30, 20, (100000,)))
    check_encoding(torch.cat([codes, ties, *near, spread]), fp8)


@FP8
def test_every_code_widens_exactly(fp8):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    want = codes.view(fp8).float()
    for lib in (LIB, BASELINE):
        got = decoded(codes, fp8, lib)
        assert torch.equal(got.isnan(), want.isnan())
        assert same_bits(got[~got.isnan()], want[~want.isnan()])


# ---- the scale -----------------------------------------------------------------------------------


def scale_of(amax, fp8):
    bits = LIB.ops_fp8_scale_bits(CODE[fp8] - 3, ctypes.c_uint32(np.float32(amax).view(np.uint32)))
    return float(np.uint32(bits & 0xFFFFFFFF).view(np.float32))


@FP8
def test_the_scale_is_the_least_power_of_two_that_fits(fp8):
    every = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(BF16).double()
    for amax in every.tolist()[::29]:
        s = scale_of(amax, fp8)
        assert math.frexp(s)[0] == 0.5 and amax / s <= LARGEST[fp8]
        assert amax / (s / 2) > LARGEST[fp8] or s == 2.0**-126
    assert scale_of(0.0, fp8) == 1.0
    assert math.isnan(scale_of(math.inf, fp8)) and math.isnan(scale_of(math.nan, fp8))


# ---- quantized tensors ---------------------------------------------------------------------------


def forms_of(shape, fp8, forms):
    out = [("w", torch.empty(2))]
    if forms & ROWS:
        out.append(("w", torch.empty(shape, dtype=fp8)))
    if forms & COLS:
        out.append(("w", torch.empty(shape[::-1], dtype=fp8)))
    return out


def quantize(x, fp8, forms=ROWS | COLS):
    rows, cols = x.shape
    args = Quantize(rows, cols, CODE[x.dtype], CODE[fp8], forms)
    return run("quantize", args, [("r", x), *forms_of((rows, cols), fp8, forms)])


def scale_alone(x, fp8, headroom=0.0):
    args = Scale(*x.shape, CODE[x.dtype], CODE[fp8], headroom)
    return run("fp8_scale", args, [("r", x), ("w", torch.empty(2))])[0]


def check_quantized(x, fp8, scale, q):
    amax = x.float().abs().max().item()
    assert scale[1].item() == amax and scale[0].item() == scale_of(amax, fp8)
    want = (x.float() / scale[0]).to(fp8)
    assert same_bits(q, want)


@FP8
def test_an_outlier_saturates_nothing(fp8):
    x = torch.randn(64, 256)
    x[11, 7] = -40000.0
    scale, q = quantize(x.to(BF16), fp8, ROWS)
    check_quantized(x.to(BF16), fp8, scale, q)
    error = (q.float() * scale[0] - x.to(BF16).float())[11, 7].abs() / 40000
    assert error <= (2.0**-4 if fp8 == E4M3 else 2.0**-3)


@FP8
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_tensor_that_is_not_finite_has_no_scale(bad, fp8):
    x = torch.randn(32, 64)
    x[3, 5] = bad
    scale, _ = quantize(x.to(BF16), fp8, ROWS)
    assert scale[0].isnan()


def test_zeros_have_scale_1():
    scale, q = quantize(torch.zeros(16, 32, dtype=BF16), E4M3, ROWS)
    assert scale.tolist() == [1.0, 0.0] and (q.view(torch.uint8) == 0).all()


def test_a_scale_of_what_is_not_finite_is_nan():
    for bad in (math.inf, -math.nan):
        assert scale_alone(torch.tensor([[1.0, bad]]), E4M3, 2.0)[0].isnan()


@STORED
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 64), (50, 272)])
def test_rmsnorm_quantize_is_rmsnorm_then_quantize(shape, offset, dt):
    rows, cols = shape
    x, w = (torch.randn(shape) * 3).to(dt), torch.randn(cols).to(dt)
    args = (rows, cols, CODE[dt], 0, 0, 1e-5, offset, 0)
    (y,) = run("rmsnorm_fwd", Norm(*args), [("r", x), ("r", w), ("w", torch.empty_like(x))])
    for forms in (ROWS, COLS, ROWS | COLS):
        got = run(
            "rmsnorm_quantize",
            NormQuantize(*args, CODE[E4M3], forms),
            [("r", x), ("r", w), *forms_of(shape, E4M3, forms)],
        )
        assert all(map(same_bits, got, quantize(y, E4M3, forms)))


@STORED
@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("shape", [(1, 16), (37, 304)])
def test_the_gated_product_and_its_gradients_quantized(shape, activation, dt):
    t, f = shape
    gu, ds = (torch.randn(t, n * f).to(dt) for n in (2, 1))
    args = (t, f, CODE[dt], activation)
    (s,) = run("glu_fwd", Glu(*args), [("r", gu), ("w", torch.empty_like(ds))])
    for forms in (ROWS, COLS, ROWS | COLS):
        got = run(
            "glu_quantize",
            GluQuantize(*args, CODE[E4M3], forms),
            [("r", gu), *forms_of(shape, E4M3, forms)],
        )
        assert all(map(same_bits, got, quantize(s, E4M3, forms)))
    s_again, dgu = run("glu_bwd", Glu(*args), [("rw", ds), ("rw", gu)])
    outputs = [*forms_of((t, 2 * f), E5M2, ROWS | COLS), *forms_of(shape, E4M3, COLS)]
    got = run(
        "glu_bwd_quantize",
        GluQuantize(*args, CODE[E5M2], 0),
        [("r", ds), ("r", gu), *outputs],
    )
    want = [*quantize(dgu, E5M2), *quantize(s_again, E4M3, COLS)]
    assert all(map(same_bits, got, want))


# ---- products ------------------------------------------------------------------------------------


def product(role, a, b, dt_c=BF16, alpha=0.0, c=None, bias=None, residual=None):
    """@a, @b: (scale, quantized tensor), each with the summed dimension last."""
    (sa, qa), (sb, qb) = a, b
    m, n = qa.shape[0], qb.shape[0]
    args = GemmFp8(
        m, n, qa.shape[1], role, c is not None, bias is not None, residual is not None,
        CODE[qa.dtype], CODE[qb.dtype], CODE[dt_c], 0, alpha,
    )  # fmt: skip
    out = ("w", torch.empty(m, n, dtype=dt_c)) if c is None else ("rw", c)
    operands = [("r", qa), ("r", sa), ("r", qb), ("r", sb), out]
    operands += [("r", t) for t in (bias, residual) if t is not None]
    return run("gemm_fp8", args, operands)[0]


def exact(a, b):
    (sa, qa), (sb, qb) = a, b
    return (qa.double() * sa[0].item()) @ (qb.double() * sb[0].item()).T


def rel_l2(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


T, N, K = 96, 208, 304


def operands():
    """X, W and dY of a layer, in bf16: a norm's output with some large columns, weights, a gradient
    of small and large rows."""
    x = torch.randn(T, K) * torch.exp(0.5 * torch.randn(K))
    dy = torch.randn(T, N) * 1e-5 * torch.exp(torch.randn(T, 1))
    return [t.to(BF16) for t in (x, 0.02 * torch.randn(N, K), dy)]


def three_products():
    """name: (role, A, B, fp64 of the tensors before they were quantized, gate)"""
    x, w, dy = operands()
    sx, qx, qxt = quantize(x, E4M3)
    sw, qw, qwt = quantize(w, E4M3)
    sy, qy, qyt = quantize(dy, E5M2)
    x, w, dy = x.double(), w.double(), dy.double()
    return {
        "forward": (FORWARD, (sx, qx), (sw, qw), x @ w.T, 0.045),
        "dX": (DGRAD, (sy, qy), (sw, qwt), dy @ w, 0.065),
        "dW": (WGRAD, (sy, qyt), (sx, qxt), dy.T @ x, 0.065),
    }


@STORED
def test_products_of_the_quantized_operands(dt):
    """Products are exact in fp32; sums of at most 304 terms are off by 304 * 2^-24 of the sum of
    their sizes at worst, and by a tenth of it as errors are random. Then one rounding to dt."""
    for role, a, b, _, _ in three_products().values():
        got, want = product(role, a, b, dt), exact(a, b)
        sizes = exact((a[0], a[1].float().abs()), (b[0], b[1].float().abs()))
        limit = 304 * 2.0**-24 * sizes + want.abs() * (2.0**-8 if dt == BF16 else 2.0**-24)
        assert ((got.double() - want).abs() <= limit).all()


@pytest.mark.parametrize("name", ["forward", "dX", "dW"])
def test_products_are_within_the_gate_of_those_of_bf16_operands(name):
    role, a, b, want, gate = three_products()[name]
    error = rel_l2(product(role, a, b, F32), want)
    assert gate / 4 < error < gate


@pytest.mark.parametrize("name", ["forward", "dX", "dW"])
@pytest.mark.parametrize("factor", [2.0**-3, 2.0**27], ids=["saturating", "flushing"])
def test_a_broken_scale_fails_the_gate(name, factor):
    """As with a scale that is too small by 2^3, where values saturate, and one far too large."""
    role, a, b, want, gate = three_products()[name]
    s, q = a
    fp8, x = q.dtype, q.float() * s[0]
    wrong = s * factor
    q = (x / wrong[0]).clamp(-LARGEST[fp8], LARGEST[fp8]).to(fp8)
    assert rel_l2(product(role, (wrong, q), b, F32), want) > gate


def test_terms_are_added_in_order():
    x, w, _ = operands()
    a, b = quantize(x, E4M3, ROWS), quantize(w, E4M3, ROWS)
    c, bias = torch.randn(T, N).to(BF16), torch.randn(N).to(BF16)
    p = exact(a, b)
    for alpha, addend in itertools.product((0.0, 0.25), ("c", "residual", None)):
        terms = {} if addend is None else {addend: c}
        got = product(FORWARD, a, b, alpha=alpha, bias=bias, **terms).double()
        want = (alpha or 1.0) * p + bias.double() + (c.double() if addend else 0.0)
        assert ((got - want).abs() <= 2.0**-8 * want.abs() + 1e-4).all()


def test_a_nan_scale_makes_every_element_nan():
    x, w, _ = operands()
    x[0, 0] = math.inf
    got = product(FORWARD, quantize(x, E4M3, ROWS), quantize(w, E4M3, ROWS))
    assert got.isnan().all()


GOOD = dict(m=16, n=16, k=16, role=0, dt_a=3, dt_b=3, dt_c=1)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"alpha": math.inf}, "alpha is inf"),
        ({"role": 3}, "role is 3"),
        ({"dt_a": 1}, "dtypes 1 x 3 -> 1"),
        ({"dt_b": 4}, "dtypes 3 x 4 -> 1"),
        ({"accumulate": 1, "has_residual": 1}, "one addend"),
        ({"m": 0}, "gemm 0x16x16"),
    ],
)
def test_a_product_that_is_none_is_refused(change, words):
    t = torch.zeros(256)
    status, _ = launch(LIB, "gemm_fp8", GemmFp8(**GOOD | change), [t] * 7, 1)
    assert status == PS_EINVAL and words in LIB.ops_error().decode()


@pytest.mark.parametrize(
    "change,words",
    [
        ({"dt": 3}, "dt is 3: neither fp32 nor bf16"),
        ({"dt_q": 1}, "dt_q is 1: neither e4m3 nor e5m2"),
        ({"forms": 0}, "forms is 0"),
        ({"forms": 4}, "forms is 4"),
        ({"cols": 0}, "4 x 0 elements"),
    ],
)
def test_what_cannot_be_quantized_is_refused(change, words):
    args = Quantize(**dict(rows=4, cols=4, dt=1, dt_q=3, forms=3) | change)
    status, _ = launch(LIB, "quantize", args, [torch.zeros(64)] * 4, 1)
    assert status == PS_EINVAL and words in LIB.ops_error().decode()
