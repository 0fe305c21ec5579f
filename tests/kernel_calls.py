"""Calls a cpu kernel from Python through tests/native/ops_shim.c, and watches what it touches.

Buffers lie between guard bytes; outputs start as NaN (0xff bytes) unless given; inputs must come
back unchanged."""

import ctypes

import numpy as np
import op_runs
import torch

U = 2.0**-24  # unit roundoff of fp32
EINVAL = -1
F32, BF16 = 0, 1
TORCH_DTYPE = {F32: torch.float32, BF16: torch.bfloat16}


def library():
    return op_runs.LIB


class Buffer(op_runs.Buffer):
    """At an address that is a multiple of 64 plus @shift, which is one of 16."""

    def __init__(self, tensor, shift=0):
        super().__init__(tensor, shift // 16)
        self.before = self.raw.copy()

    def unchanged(self):
        return (self.raw == self.before).all()


def poison(shape, dtype):
    n = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    return torch.full((n,), 0xFF, dtype=torch.uint8).view(dtype).reshape(shape)


def call(name, args, buffers, n_threads):
    """The status of kernel `name` over an argument block and tensors (inputs and outputs), and the
    tensors after it."""
    pointers = (ctypes.c_void_p * len(buffers))(*[b.address for b in buffers])
    block = ctypes.create_string_buffer(args, len(args))
    return library().ops_run(name.encode(), block, pointers, len(buffers), n_threads)


def run(name, args, inputs, outputs, n_threads=2, shift=0):
    """Run a kernel whose accesses are `inputs` (read only) and `outputs`; see `order` in the
    callers. Each is a list of (position among the accesses, tensor). Returns the outputs."""
    buffers = {i: Buffer(t, shift) for i, t in inputs + outputs}
    status = call(name, args, [buffers[i] for i in range(len(buffers))], n_threads)
    assert status == 0, f"{name} returned {status}"
    for b in buffers.values():
        b.check_guards(name)
    assert all(buffers[i].unchanged() for i, _ in inputs), f"{name} changed an input"
    return [buffers[i].tensor() for i, _ in outputs]


def rounding(dt):
    """Relative error of the one rounding at a store: 2^-24 for fp32, 2^-8 (8 significant bits: half
    an ulp) for bf16."""
    return U if dt == F32 else 2.0**-8


def refusal(name, args, tensors):
    """The message with which kernel `name` refuses an argument block."""
    assert call(name, args, [Buffer(t) for t in tensors], 1) == EINVAL
    return library().ops_error().decode()


PAIRS = 128


class Rope(ctypes.Structure):
    """ps_rope of include/penstock/model.h."""

    KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")
    _fields_ = (
        [
            (name, ctypes.c_uint32)
            for name in ("kind", "rotary_dim", "original_positions", "keep_fraction")
        ]
        + [
            (name, ctypes.c_double)
            for name in (
                "theta",
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
            )
        ]
        + [(name, ctypes.c_double * PAIRS) for name in ("short_factor", "long_factor")]
    )


def rope_table(kind, rotary_dim, seq_len=1, max_positions=0, **fields):
    """inv_freq and the attention factor as native/model/rope.c computes them; a refusal is a
    ValueError with its message."""
    lists = {k: (ctypes.c_double * PAIRS)(*v) for k, v in fields.items() if isinstance(v, list)}
    rope = Rope(kind=Rope.KINDS.index(kind), rotary_dim=rotary_dim, **{**fields, **lists})
    # ps__args_qkv: 8 integers, eps, attention_factor, norm_offset, inv_freq
    out = np.full(11 + PAIRS, np.nan, np.float32)
    shim = library()
    shim.ops_rope_table.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(Rope),
        ctypes.c_uint32,
        ctypes.c_uint64,
    ]
    if shim.ops_rope_table(out.ctypes.data, ctypes.byref(rope), max_positions, seq_len) != 0:
        raise ValueError(shim.ops_error().decode())
    assert out.view(np.uint32)[7] == rotary_dim and not out[11 + rotary_dim // 2 :].any()
    return out[11 : 11 + rotary_dim // 2], out[9]
