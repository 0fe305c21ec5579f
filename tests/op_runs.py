"""Runs a cpu kernel by its name, for the tests that compare kernels with fp64 references
(test_ops.py, test_ops_layers.py, test_ops_products.py and others).

Every case runs on 1, 2 and 3 threads, at different 16-byte alignments, and once more with the
kernels compiled for the baseline instruction set; all must give the same bits. Outputs are filled
with NaN before, bytes around every buffer and read-only inputs are checked after.

Tolerances: u = 2^-24 is fp32's unit roundoff. A sum of n products in any order is off by at most
n*u*sum|terms| (Higham, Accuracy and Stability, 3.1). Each test states its error bound e around the
exact value r; the stored result must then lie between round(r - e) and round(r + e), so that for
bf16 exactly one rounding at the store is allowed for.
"""

import ctypes
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
LOW_READ, LOW_WRITE, DITHER = 1, 2, 4


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
    kinds = {
        "I": ctypes.c_uint32,
        "i": ctypes.c_int32,
        "Q": ctypes.c_uint64,
        "B": ctypes.c_uint8,
        "f": ctypes.c_float,
    }
    return type(
        name,
        (ctypes.Structure,),
        {"_fields_": [(f, kinds[k]) for k, names in fields for f in names.split()]},
    )


Fill = struct("Fill", [("Q", "bytes")])
Accumulate = struct("Accumulate", [("Q", "n first"), ("I", "dt n_threads mode index")])
OF_EMBED = [("I", "n_tokens vocab dim dt accumulate"), ("f", "scale"), ("i", "pad")]
Embed = struct("Embed", OF_EMBED)
EmbedHost = struct(
    "EmbedHost",
    [
        *OF_EMBED,
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
ScoreLoss = struct("ScoreLoss", [("I", "rows cols dt problem")])
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
