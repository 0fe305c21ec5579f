"""corpus.py OUT - the fuzz targets' first inputs: OUT/<target> has small valid files of every kind,
and some that are nearly valid."""

import json
import random
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from families import CONFIGS  # noqa: E402


def safetensors(tensors, meta=None):
    header, at, body = ({"__metadata__": meta} if meta else {}), 0, b""
    for name, (dtype, width, shape) in tensors.items():
        n = width
        for s in shape:
            n *= s
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n]}
        at, body = at + n, body + bytes(n)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def shard(words, tokens, form):
    return struct.pack("<256i", *words, *[0] * (256 - len(words))) + struct.pack(
        f"<{len(tokens)}{form}", *tokens
    )


def main():
    out = Path(sys.argv[1])
    configs = [p.read_bytes() for p in sorted((ROOT / "models").glob("*.json"))]
    families = [json.dumps(c).encode() for c in CONFIGS.values()]
    scaled = json.loads(configs[0]) | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    }
    tokens = [i % 999 for i in range(300)]
    hardware = [p.read_bytes() for p in sorted((ROOT / "docs").glob("hardware-*.json"))]
    random.seed(0)
    inputs = {
        "json": configs
        + hardware[:1]
        + [
            b'{"a":[1,-2.5e3,"\\u00e9\\ud83d\\ude00",{"b":null,"c":[true,false]}]}',
            b"[" * 60 + b"]" * 60,
            b'"\xc3\xa9"',
            b"0",
        ],
        "config": configs + families + [json.dumps(scaled).encode()],
        "safetensors": [
            safetensors(
                {"a": ("F32", 4, [3, 2]), "b": ("BF16", 2, [4]), "c": ("F16", 2, [])},
                {"format": "pt"},
            ),
            safetensors({"empty": ("F32", 4, [0, 5]), "x": ("I64", 8, [2])}),
            safetensors({}),
        ],
        "shards": [
            shard([20240520, 1, 300], tokens, "H"),
            shard([20240801, 7, 300], tokens, "I"),
            struct.pack("<300H", *tokens),
            b"BIN.TOK\n"
            + struct.pack("<6i", 1, 4, 300, 1000, 0, 0)
            + bytes(1024 - 32)
            + struct.pack("<300i", *tokens),
        ],
        "toml": [p.read_bytes() for p in sorted((ROOT / "models").glob("*.toml"))]
        + [b"[a]\nb = [1, 2e5, # c\n ]\r\nc = 'x'\n[d]\ne = \"\\u00e9\\n\"\nf = true\n"],
        "hardware": hardware,
        "plan": [bytes(random.randrange(256) for _ in range(48)) for _ in range(6)],
    }
    for target, files in inputs.items():
        (out / target).mkdir(parents=True, exist_ok=True)
        for i, data in enumerate(files):
            (out / target / f"{i:02}").write_bytes(data)


main()
