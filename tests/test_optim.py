"""The host optimizer against PyTorch's AdamW and, with narrow state, against fp64; its bf16 copy
against PyTorch's rounding, schedules against closed forms."""

import ctypes as c
import os
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FP32, MASTER, BF16, MASTER24, N_RECIPES = 0, 1, 2, 3, 6
ADAMW, LION = 0, 1
EIGHT = N_RECIPES  # of a recipe's row with state in 8 bits
BLOCK = 64
SIMD = {"scalar": 0, "avx2": 1, "avx512": 2}
EPS32 = 2.0**-24  # half an ulp, relative: the error of one rounding


class Update(c.Structure):
    """ps__update of native/optim/optim.h: whole updates, part 0."""

    _fields_ = (
        [(n, c.c_int) for n in ("optimizer", "recipe", "part")]
        + [(n, c.c_float) for n in ("lr", "beta1", "beta2", "eps", "momentum", "grad_scale")]
        + [("nesterov", c.c_bool)]
        + [(n, c.c_float) for n in ("c1", "c2")]
        + [("seed", c.c_uint64), ("step", c.c_uint64)]
    )


def at(a):
    return a.ctypes.data_as(c.c_void_p)


class Arrays(c.Structure):
    _fields_ = [(n, c.c_void_p) for n in ("w", "copy", "grad")] + [("state", c.c_void_p * 2)]


def arrays(w, grad, *state, copy=None):
    return Arrays(
        at(w), at(copy) if copy is not None else None, at(grad), (c.c_void_p * 2)(*map(at, state))
    )


class Schedule(c.Structure):
    _fields_ = [
        ("kind", c.c_uint32),
        ("warmup_steps", c.c_uint64),
        ("total_steps", c.c_uint64),
        ("decay_steps", c.c_uint64),
        ("peak_lr", c.c_double),
        ("min_lr", c.c_double),
    ]


@pytest.fixture(scope="module")
def lib():
    path = ROOT / os.environ.get("PENSTOCK_BUILD", "build") / "lib" / "libpenstock.so"
    lib = c.CDLL(str(path))
    lib.ps__update_elements.argtypes = [
        c.c_int,
        c.POINTER(Update),
        c.c_uint64,
        c.POINTER(Arrays),
        c.c_float,
        c.c_uint64,
    ]
    lib.ps__update_elements.restype = None
    lib.ps__update_correct.argtypes = [c.POINTER(Update), c.c_uint64]
    lib.ps__update_correct.restype = None
    lib.ps__lr_at.argtypes = [c.POINTER(Schedule), c.c_uint64]
    lib.ps__lr_at.restype = c.c_double
    return lib


def bf16_bits(x):
    return torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()


def from_bf16(h):
    return (h.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("recipe", [FP32, MASTER])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_ten_steps_follow_torch_adamw_in_fp64(lib, simd, recipe, decay):
    """Tolerance, to first order, with u = 2^-24 for one fp32 rounding. Both sides start from the
    same fp32 numbers; 1 - beta is exact (Sterbenz) and so is the gradient times 0.5. M is m with
    |g| in place of g.
      m   two roundings a step of terms that add up to M: 20 u M after ten steps
      v   three a step, all terms positive: 30 u relative; with c2 and the product 32 u; the root 17
      u; plus eps 18 u
      d   22 u M c1 / sqrt(v c2) (m, c1, product) + 19 u |d|, and M c1 / sqrt(v c2) <= 1.02 for ten
      steps of these betas
          (Cauchy-Schwarz on the two weighted means): 42 u; times lr, one more: 44 u lr
      w   two subtractions and the decay's product: 3 u |w|
    An error in w is carried on with a factor of at most 1: ten times (44 lr + 3 |w|) u."""
    rng = np.random.default_rng(1)
    n, lr, steps = 10_007, 1e-2, 10
    b1, b2 = (
        float(np.float32(0.9)),
        float(np.float32(0.95)),
    )  # the numbers that fp32 holds, on both sides
    lr, eps, decay = float(np.float32(lr)), float(np.float32(1e-8)), float(np.float32(decay))
    w = rng.standard_normal(n).astype(np.float32)
    m, v, copy = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.uint16)
    ref = torch.nn.Parameter(torch.from_numpy(w.astype(np.float64)))
    adamw = torch.optim.AdamW([ref], lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay)
    u = Update(
        optimizer=ADAMW, recipe=recipe, lr=lr, beta1=b1, beta2=b2, eps=eps, grad_scale=0.5, seed=1
    )
    for t in range(1, steps + 1):
        g = (rng.standard_normal(n) * 10.0 ** rng.uniform(-3, 1, n)).astype(np.float32)
        stored = bf16_bits(g) if recipe == MASTER else g
        exact = from_bf16(stored) if recipe == MASTER else g
        lib.ps__update_correct(c.byref(u), t)
        a = arrays(w, stored, m, v, copy=copy if recipe == MASTER else None)
        lib.ps__update_elements(SIMD[simd], c.byref(u), n, c.byref(a), decay, 0)
        ref.grad = torch.from_numpy(exact.astype(np.float64) * 0.5)
        adamw.step()
    size = np.maximum(np.abs(w), np.abs(ref.detach().numpy())) + steps * lr * 1.02
    tolerance = steps * (lr * 44 + 3 * size) * EPS32
    error = np.abs(w - ref.detach().numpy())
    assert (error <= tolerance).all(), (error / tolerance).max()
    assert error.max() > 0  # fp32 was used, and not the reference itself
    if recipe == MASTER:
        assert (copy == bf16_bits(w)).all()


def test_bf16_copy_rounds_to_nearest_even(lib):
    """With lr 0 the master is unchanged and its copy is torch's rounding: ties, overflow to
    infinity, denormals, NaN."""
    upper = np.repeat(np.arange(65536, dtype=np.uint32), 6) << 16
    w = (upper | np.tile(np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), 65536)).view(
        np.float32
    )
    w = w[np.isfinite(w) | np.isnan(w)]
    zeros, grad = np.zeros_like(w), np.zeros(len(w), np.uint16)
    u = Update(optimizer=ADAMW, recipe=MASTER, beta1=0.9, beta2=0.95, eps=1e-8, c1=1, c2=1)
    for simd in SIMD.values():
        got, copy, m, v = w.copy(), np.zeros(len(w), np.uint16), zeros.copy(), zeros.copy()
        a = arrays(got, grad, m, v, copy=copy)
        lib.ps__update_elements(simd, c.byref(u), len(w), c.byref(a), 0.0, 0)
        finite = np.isfinite(w)
        assert (got[finite] == w[finite]).all() and (copy[finite] == bf16_bits(got[finite])).all()
        assert (copy[~finite] == 0x7FC0).all() and (
            got.view(np.uint32)[~finite] == 0x7FC00000
        ).all()


def linear_8_bits(x, levels):
    """The broken control: levels in equal steps of the block's largest, rounded to nearest."""
    blocks = x.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(1, keepdims=True) / levels
    return (np.rint(blocks / np.where(scale > 0, scale, 1)) * scale).reshape(-1)


def exact_step(optimizer, w, m, v, g, t, lr, b1, b2, eps=1e-8):
    """adamw.h and lion.h without decay, in fp64."""
    if optimizer == LION:
        return w - lr * np.sign(b1 * m + (1 - b1) * g), b2 * m + (1 - b2) * g, v
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return w - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps), m, v


def gradients(rng, n, steps):
    """Each element has its own size, spread over a factor of 10 in a block, a mean that lasts, and
    noise with heavy tails; a tenth of them fade."""
    size = np.exp(0.6 * rng.standard_normal(n)) * 1e-3
    mean = 0.1 * size * rng.standard_normal(n)
    for t in range(steps):
        now = np.where(np.arange(n) % 10 == 0, np.exp(-3 * t / steps), 1) * size
        noise = rng.standard_normal(n) * np.exp(0.5 * rng.standard_normal(n))
        yield bf16_bits((mean + now * noise).astype(np.float32))


# optimizer, row, beta2, and how far the path may be from the exact one: twice what was measured
PATHS = {
    "adamw-fp32-8": (ADAMW, FP32 + EIGHT, 0.95, 0.03),
    "adamw-fp32-8-slow": (ADAMW, FP32 + EIGHT, 0.999, 0.09),
    "adamw-master-8": (ADAMW, MASTER + EIGHT, 0.95, 0.03),
    "adamw-fp24-8": (ADAMW, MASTER24 + EIGHT, 0.95, 0.03),
    "adamw-fp24": (ADAMW, MASTER24, 0.95, 0.004),
    "lion-fp24-8": (LION, MASTER24 + EIGHT, 0.99, 0.07),
    "adamw-bf16": (ADAMW, BF16, 0.95, 0.09),
    "adamw-bf16-8": (ADAMW, BF16 + EIGHT, 0.95, 0.09),
}


@pytest.mark.parametrize("case", PATHS)
def test_1000_steps_stay_near_fp64(lib, case):
    """The way that the weights went, against the same formula in fp64 from the same gradients; the
    same with linear levels, rounded to nearest, goes elsewhere: v becomes 0 beside larger ones."""
    optimizer, row, b2, most = PATHS[case]
    rng = np.random.default_rng(5)
    n, steps, b1 = 32 * BLOCK, 1000, float(np.float32(0.9))
    lr, b2 = float(np.float32(1e-3)), float(np.float32(b2))
    recipe, eight = row % N_RECIPES, row >= N_RECIPES
    first = from_bf16(bf16_bits((0.02 * rng.standard_normal(n)).astype(np.float32)))
    w, m, v = first.astype(np.float64), np.zeros(n), np.zeros(n)
    linear = [w, m, v]
    weights, copy = first.copy(), bf16_bits(first)
    if recipe == BF16:
        weights = bf16_bits(first)
    elif recipe == MASTER24:
        weights = np.zeros(n, np.int8)
    state = [np.zeros(n // BLOCK * (BLOCK + 4) if eight else 4 * n, np.uint8) for _ in range(2)]
    u = Update(optimizer=optimizer, recipe=row, lr=lr, beta1=b1, beta2=b2, eps=1e-8, grad_scale=1)
    for t, bits in enumerate(gradients(rng, n, steps), 1):
        g = from_bf16(bits)
        grad = g if recipe == FP32 else bits
        u.step, u.seed = t, 3
        lib.ps__update_correct(c.byref(u), t)
        a = arrays(weights, grad, *state, copy=copy if recipe in (MASTER, MASTER24) else None)
        lib.ps__update_elements(SIMD["avx512"], c.byref(u), n, c.byref(a), 0.0, 0)
        w, m, v = exact_step(optimizer, w, m, v, g.astype(np.float64), t, lr, b1, b2)
        if eight and recipe == FP32:
            wl, ml, vl = exact_step(optimizer, *linear, g.astype(np.float64), t, lr, b1, b2)
            linear = [wl, linear_8_bits(ml, 127), linear_8_bits(vl, 255)]
    got = {
        FP32: lambda: weights,
        MASTER: lambda: weights,
        BF16: lambda: from_bf16(weights),
        MASTER24: lambda: (
            (copy.astype(np.uint32) << 16) + (weights.astype(np.int32) << 8).astype(np.uint32)
        ).view(np.float32),
    }[recipe]()

    def off(x):
        return np.sqrt(np.mean((x - w) ** 2) / np.mean((w - first) ** 2))

    assert 0 < off(got) < most, off(got)
    if eight and recipe == FP32:
        assert off(linear[0]) > 5, off(linear[0])


@pytest.mark.parametrize("simd", SIMD)
def test_a_24_bit_master_moves_by_less_than_its_last_place(lib, simd):
    """Of 1.0 the last place is 2^-15, and a step 2^-20: to nearest the weights would stay. The mean
    of n walks of so many steps has a variance of at most steps * p (1 - p) places^2 / n."""
    n, steps, lr, place = 64 * BLOCK, 300, 2.0**-20, 2.0**-15
    weights, copy = np.zeros(n, np.int8), bf16_bits(np.ones(n, np.float32))
    grad, state = bf16_bits(np.full(n, -1, np.float32)), np.zeros(2 * n, np.uint8)
    u = Update(optimizer=LION, recipe=MASTER24, lr=lr, beta1=0.9, beta2=0.99, grad_scale=1, seed=1)
    for u.step in range(steps):
        a = arrays(weights, grad, state, state, copy=copy)
        lib.ps__update_elements(SIMD[simd], c.byref(u), n, c.byref(a), 0.0, 0)
    moved = from_bf16(copy).astype(np.float64) - 1 + weights * place
    sigma = place * np.sqrt(steps * lr / place / n)
    assert abs(moved.mean() - steps * lr) < 6 * sigma, (moved.mean(), steps * lr, sigma)


def rates(lib, n, **kw):
    s = Schedule(**kw)
    return [lib.ps__lr_at(c.byref(s), i) for i in range(n)]


def torch_rates(n, make):
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    sched, out = make(opt), []
    for _ in range(n):
        out.append(opt.param_groups[0]["lr"])
        opt.step()
        sched.step()
    return out


def with_warmup(opt, warmup, after):
    up = torch.optim.lr_scheduler.LinearLR(opt, start_factor=1 / (warmup + 1), total_iters=warmup)
    return torch.optim.lr_scheduler.SequentialLR(opt, [up, after], [warmup])


def test_schedules_are_torch_schedulers(lib):
    """torch computes by recurrences: 100 double roundings of relative 2^-53 and more by
    cancellation, so 1e-12 of the peak."""
    L, warmup, total, peak, low = torch.optim.lr_scheduler, 10, 100, 3e-4, 3e-5
    kw = dict(warmup_steps=warmup, total_steps=total, peak_lr=peak, min_lr=low)
    cases = {
        1: lambda o: with_warmup(o, warmup, L.CosineAnnealingLR(o, total - warmup, eta_min=low)),
        2: lambda o: with_warmup(
            o,
            warmup,
            L.LinearLR(o, start_factor=1, end_factor=low / peak, total_iters=total - warmup),
        ),
        0: lambda o: with_warmup(o, warmup, L.ConstantLR(o, factor=1, total_iters=0)),
    }
    for kind, make in cases.items():
        assert rates(lib, total + 1, kind=kind, **kw) == pytest.approx(
            torch_rates(total + 1, make), abs=1e-12 * peak
        ), kind


def test_wsd_is_flat_then_falls_to_the_minimum(lib):
    r = rates(
        lib, 130, kind=3, warmup_steps=10, total_steps=100, decay_steps=20, peak_lr=1.0, min_lr=0.1
    )
    assert r[:10] == pytest.approx([(i + 1) / 11 for i in range(10)], rel=1e-15)
    assert r[10:81] == [1.0] * 71
    assert r[80:101] == pytest.approx([1 - 0.9 * i / 20 for i in range(21)], rel=1e-15)
    assert r[100:] == [0.1] * 30


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "warmup,total,decay",
    [(0, 0, 0), (0, 1, 1), (5, 5, 5), (9, 3, 4), (0, 10, 99), (4, 10, 99), (0, 10, 0)],
)
def test_schedules_at_their_edges_stay_between_zero_and_peak(lib, kind, warmup, total, decay):
    r = rates(
        lib,
        30,
        kind=kind,
        warmup_steps=warmup,
        total_steps=total,
        decay_steps=decay,
        peak_lr=2.0,
        min_lr=0.5,
    )
    assert all(0 < x <= 2.0 for x in r)
    assert r[max(warmup, total) :] == pytest.approx(
        [2.0 if kind == 0 else 0.5] * (30 - max(warmup, total)), rel=1e-15
    )
