"""Makes the values of a fresh model's tensors and writes them in shards, for init_model.py, which
says how values are drawn. It stands alone, as init_model.py does."""

import collections
import concurrent.futures
import hashlib
import json
import math
import os

import numpy as np

SLICE = 1 << 20
# in the files' metadata: the weights are fresh on purpose (native/io/safetensors.c)
INITIALISED = "penstock_initialised_by"
DTYPES = {"bf16": ("BF16", 2, "bfloat16"), "fp32": ("F32", 4, "float32")}

# kind: "ones", "zeros", or the standard deviation; pad: a row that is zero
Tensor = collections.namedtuple("Tensor", "name shape kind pad", defaults=[None])


def to_bf16(x):
    """The bf16 bits of fp32 values, rounded to nearest even. Overwrites x."""
    bits = x.view(np.uint32)
    odd = bits >> 16
    odd &= 1
    bits += odd
    bits += 0x7FFF
    bits >>= 16
    return bits.astype(np.uint16)


def make_slice(seed, tensor, k, n, dtype):
    """Bytes of elements [k * SLICE, k * SLICE + n) of the tensor."""
    if tensor.kind in ("ones", "zeros"):
        x = np.full(n, tensor.kind == "ones", dtype=np.float32)
    else:
        digest = hashlib.sha256(f"{seed}:{tensor.name}".encode()).digest()
        key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
        counter = np.array([0, 0, k, 0], dtype=np.uint64)
        x = np.random.Generator(np.random.Philox(key=key, counter=counter)).standard_normal(
            n, dtype=np.float32
        )
        x *= np.float32(tensor.kind)
        if tensor.pad is not None:
            dim = tensor.shape[1]
            at = tensor.pad * dim - k * SLICE
            x[max(at, 0) : max(at + dim, 0)] = 0
    return (
        to_bf16(x).astype("<u2", copy=False) if dtype == "bf16" else x.astype("<f4", copy=False)
    ).data


def slices(seed, tensors, dtype, workers):
    """The bytes of all tensors in order. Threads make them ahead of the writer."""
    jobs = (
        (t, k, min(SLICE, math.prod(t.shape) - k * SLICE))
        for t in tensors
        for k in range(-(-math.prod(t.shape) // SLICE))
    )
    pending = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for t, k, n in jobs:
            pending.append(pool.submit(make_slice, seed, t, k, n, dtype))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# ---- files ---------------------------------------------------------------------------------------


def cut_shards(tensors, element, limit):
    shards, room = [[]], limit
    for t in tensors:
        size = math.prod(t.shape) * element
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(t)
        room -= size
    return shards


def write_shard(path, shard, seed, dtype, workers, progress):
    name, element, _ = DTYPES[dtype]
    header, at = {"__metadata__": {"format": "pt", INITIALISED: "models/init_model.py"}}, 0
    for t in shard:
        end = at + math.prod(t.shape) * element
        header[t.name] = {"dtype": name, "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for piece in slices(seed, shard, dtype, workers):
            f.write(piece)
            progress(piece.nbytes)


def write_model(folder, tensors, args, progress):
    shards = cut_shards(tensors, DTYPES[args.dtype][1], args.max_shard_size)
    workers = min(4, os.cpu_count() or 1)
    files, weight_map = [], {}
    for i, shard in enumerate(shards):
        one = len(shards) == 1
        files.append(
            "model.safetensors" if one else f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        )
        write_shard(
            os.path.join(folder, files[-1]), shard, args.seed, args.dtype, workers, progress
        )
        weight_map.update((t.name, files[-1]) for t in shard)
    if len(shards) > 1:
        total = sum(math.prod(t.shape) for t in tensors) * DTYPES[args.dtype][1]
        write_json(
            os.path.join(folder, "model.safetensors.index.json"),
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
    return files


def write_json(path, value):
    with open(path, "x", encoding="utf-8") as f:
        json.dump(value, f, indent=2, ensure_ascii=False)
        f.write("\n")
