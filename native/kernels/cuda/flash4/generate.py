"""Compiles flash-attn-4's kernels for compute capability 9.0 into a static library: generate.py OUT

Run by the Makefile (FLASH_ATTN=4) in an environment with the wheels of
python/requirements-flash4*.txt; needs no GPU and no PyTorch. OUT gets
  libflash4.a                          the kernels: host functions with the GPU's code inside
  libcuda_dialect_runtime_static.a     NVIDIA's, which those call
  flash4_table.h                       PS_FLASH4_KERNELS(X): X(kind, head_dim, group, name, run) of
                                       each kernel; PS_FLASH4_TILES(X): X(head_dim, rows, keys) of a
                                       block backward. attention_flash4.cu includes it
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)  # query heads for each kv head, a constant of the kernels


class Tiles(NamedTuple):
    """Rows of queries and of keys that a block has at a time, (queries, keys)."""

    forward: tuple
    backward: tuple
    # Of the backward pass: whether S, and whether dK and dV, are computed as transposes.
    swap_s: bool
    swap_dkv: bool
    stages: int  # of dO and of dS


# By head_dim. With 256, the buffers of the backward pass fit only where a block has fewer keys.
TILES = {
    64: Tiles((192, 128), (128, 128), True, False, 2),
    128: Tiles((128, 128), (64, 128), True, False, 2),
    256: Tiles((128, 80), (64, 48), False, True, 1),
}
# The host's code for any x86-64, not for the CPU that builds.
OPTIONS = "--gpu-arch sm_90a --host-target 'llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64'"


# ---- imports without PyTorch, which the packages name in annotations and tables of types ---------


class Anything(type):
    """A class that has every attribute, each a class of that kind."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def stand_in(name):
    module = types.ModuleType(name)
    module.__path__ = []
    module.__getattr__ = lambda attribute: getattr(Anything(name, (), {}), attribute)
    sys.modules[name] = module


def without_init(package):
    """A package whose __init__ is not run: it would import what only PyTorch's users need."""
    module = types.ModuleType(package)
    module.__path__ = list(importlib.util.find_spec(package).submodule_search_locations)
    sys.modules[package] = module


os.environ["CUTE_DSL_ARCH"] = "sm_90a"
for name in ("torch", "torch._subclasses", "torch._subclasses.fake_tensor"):
    stand_in(name)
for name in ("quack", "flash_attn.cute"):
    without_init(name)

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import quack.dsl  # noqa: E402, F401 (what it adds to the language is used by the kernels)
from cutlass import BFloat16, Float32, Int32  # noqa: E402
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor  # noqa: E402
from flash_attn.cute.flash_bwd_postprocess import FlashAttentionBackwardPostprocess  # noqa: E402
from flash_attn.cute.flash_bwd_preprocess import FlashAttentionBackwardPreprocess  # noqa: E402
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90  # noqa: E402
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90  # noqa: E402

Tensor, Stream = cute.Tensor, cuda.CUstream


# ---- arguments: placeholders whose sizes and strides (in elements) are given at each launch ------


def sizes(n):
    return [cute.sym_int() for _ in range(n)]


def strides(n, divisible):
    return [cute.sym_int64(divisibility=divisible) for _ in range(n)]


def heads(d):
    """q, k, v, o and their gradients: [batch, rows, heads, d]."""
    return make_fake_tensor(BFloat16, (*sizes(3), d), (*strides(3, 8), 1), assumed_align=16)


def lse():
    """[batch, heads, rows] with the heads of a row side by side, as Penstock keeps it."""
    batch, row = strides(2, 1)
    return make_fake_tensor(Float32, tuple(sizes(3)), (batch, 1, row), assumed_align=4)


def scratch():
    """Statistics and sums: [batch, heads, rows or rows * d], rows rounded up to tiles."""
    return make_fake_tensor(Float32, tuple(sizes(3)), (*strides(2, 4), 1), assumed_align=16)


def semaphores(n):
    return make_fake_tensor(Int32, (*sizes(3), n), (*strides(3, 1), 1), assumed_align=4)


# ---- kernels: (kind, group, function, arguments); group 0 serves all -----------------------------


def forward(d, group):
    tile, keys = TILES[d].forward
    # Packed, a block takes the heads of a group together, and its rows come by TMA only where the
    # group divides the tile.
    kernel = FlashAttentionForwardSm90(
        BFloat16,
        d,
        d,
        group,
        is_causal=True,
        is_local=False,
        pack_gqa=group > 1 and tile % group == 0,
        tile_m=tile,
        tile_n=keys,
        num_stages=2,
        num_threads=384,
        Q_in_regs=False,
        intra_wg_overlap=True,
        mma_pv_is_rs=True,
    )

    @cute.jit
    def run(
        q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: Float32, stream: Stream
    ):
        kernel(q, k, v, o, lse, scale, stream=stream)

    return "FWD", group, run, (heads(d), heads(d), heads(d), heads(d), lse(), Float32(1.0))


def backward(d, group, deterministic):
    tiles = TILES[d]
    tile, keys = tiles.backward
    kernel = FlashAttentionBackwardSm90(
        BFloat16,
        d,
        d,
        group,
        is_causal=True,
        is_local=False,
        deterministic=deterministic,
        tile_m=tile,
        tile_n=keys,
        Q_stage=2,
        dO_stage=tiles.stages,
        PdS_stage=tiles.stages,
        SdP_swapAB=tiles.swap_s,
        dKV_swapAB=tiles.swap_dkv,
        dQ_swapAB=False,
        AtomLayoutMSdP=1,
        AtomLayoutNdKV=1 if tiles.swap_dkv else 2,
        AtomLayoutMdQ=tile // 64,
        num_threads=384,
    )
    sums = (
        (lambda: heads(d)) if group == 1 else scratch
    )  # dk, dv: of one head bf16 and final, of a group's fp32 and added
    arguments = (
        heads(d),
        heads(d),
        heads(d),
        heads(d),
        scratch(),
        scratch(),
        scratch(),
        sums(),
        sums(),
        Float32(1.0),
    )

    @cute.jit
    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        d_o: Tensor,
        lse2: Tensor,
        delta: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        scale: Float32,
        stream: Stream,
    ):
        kernel(q, k, v, d_o, lse2, delta, dq, dk, dv, scale, stream=stream)

    @cute.jit
    def run_in_order(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        d_o: Tensor,
        lse2: Tensor,
        delta: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        scale: Float32,
        dq_turn: Tensor,
        dk_turn: Tensor,
        dv_turn: Tensor,
        stream: Stream,
    ):
        kernel(
            q,
            k,
            v,
            d_o,
            lse2,
            delta,
            dq,
            dk,
            dv,
            scale,
            mdQ_semaphore=dq_turn,
            mdK_semaphore=dk_turn,
            mdV_semaphore=dv_turn,
            stream=stream,
        )

    if deterministic:
        return (
            "BWD_IN_ORDER",
            group,
            run_in_order,
            (*arguments, semaphores(1), semaphores(2), semaphores(2)),
        )
    return "BWD", group, run, arguments


def before(d):
    """delta = rowsum(o d_o), lse2 = lse / ln 2, dq = 0."""
    kernel = FlashAttentionBackwardPreprocess(
        BFloat16, d, d, TILES[d].backward[0], hdim_multiple_of=32
    )

    @cute.jit
    def run(
        o: Tensor, d_o: Tensor, delta: Tensor, lse: Tensor, lse2: Tensor, dq: Tensor, stream: Stream
    ):
        kernel(
            o,
            d_o,
            delta,
            lse,
            lse2,
            dq,
            None,
            None,
            None,
            None,
            None,
            Float32(1.0),
            None,
            None,
            stream,
        )

    return "PRE", 0, run, (heads(d), heads(d), scratch(), lse(), scratch(), scratch())


def after(d):
    """dq in bf16 from its sums."""
    tile = TILES[d].backward[0]
    kernel = FlashAttentionBackwardPostprocess(
        BFloat16, d, 90, tile, 256, tile // 64, False, hdim_multiple_of=32
    )

    @cute.jit
    def run(sums: Tensor, dq: Tensor, scale: Float32, stream: Stream):
        kernel(sums, dq, scale, None, None, None, None, stream)

    return "POST", 0, run, (scratch(), heads(d), Float32(1.0))


def kernels(d):
    yield before(d)
    yield after(d)
    for group in GROUPS:
        yield forward(d, group)
        yield backward(d, group, False)
        yield backward(d, group, True)


# ---- output --------------------------------------------------------------------------------------


def compile_one(work, d, kind, group, function, arguments):
    """An object in @work; its line of the table."""
    name = f"ps_flash4_{kind.lower()}_d{d}" + (f"_g{group}" if group else "")
    cute.compile(function, *arguments, make_fake_stream(), options=OPTIONS).export_to_c(
        str(work), name
    )
    header = (work / f"{name}.h").read_text()
    run = re.search(r"void (\w+)\(void \*\*args, int32_t num_args\);", header).group(1)
    # attention_flash4.cu hands over every tensor as one struct with room for three strides.
    tensors = re.findall(
        r"void \*data;\s+int32_t dynamic_shapes\[(\d)\];\s+int64_t dynamic_strides\[([23])\];",
        header,
    )
    if [shape for shape, _ in tensors] != ["3"] * header.count("void *data;"):
        sys.exit(
            f"generate.py: {name} takes tensors that attention_flash4.cu does not know: was nvidia-cutlass-dsl changed?"
        )
    return f"  X({kind}, {d}, {group}, {name}, {run})"


def version_number():
    """4.0.0b36 as 40000036."""
    return "{}{:02d}{:02d}{:03d}".format(
        *map(int, re.fullmatch(r"(\d+)\.(\d+)\.(\d+)b(\d+)", version("flash-attn-4")).groups())
    )


def main():
    out = Path(sys.argv[1])
    import nvidia_cutlass_dsl

    runtime = next(
        Path(nvidia_cutlass_dsl.__path__[0]).glob("cu1?/lib/libcuda_dialect_runtime_static.a")
    )
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        lines = [compile_one(work, d, *kernel) for d in TILES for kernel in kernels(d)]
        (out / "libflash4.a").unlink(missing_ok=True)
        subprocess.run(["ar", "rcs", out / "libflash4.a", *sorted(work.glob("*.o"))], check=True)
    shutil.copyfile(runtime, out / runtime.name)
    (out / "flash4_table.h").write_text(
        "/* Made by native/kernels/cuda/flash4/generate.py. */\n"
        f"#define PS_FLASH4_VERSION {version_number()}u\n#define PS_FLASH4_KERNELS(X) \\\n"
        + " \\\n".join(lines)
        + "\n#define PS_FLASH4_TILES(X) \\\n"
        + " \\\n".join(f"  X({d}, {t.backward[0]}, {t.backward[1]})" for d, t in TILES.items())
        + "\n"
    )
    print(f"flash-attn-4: {len(lines)} kernels in {out / 'libflash4.a'}")


main()
