"""What an RTX 4090 trains with little host memory, as a table.

    python3 bench/small_hosts.py

A cell is what `penstock plan` predicts for an RTX 4090 by its name, with and without one NVMe drive
that writes 1.5 GB/s for long and reads 5, the planner's assumption: tokens/s, or the GiB of RAM
that it needs. The operating system keeps 4 GiB of the RAM, and a screen 2 GiB of the GPU's 24.
Sequences of 4,096 tokens, 65,536 tokens a step, AdamW in bf16 with --state-bits 8 and --clip-by
previous.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RAM = [32, 48, 64, 96]  # GiB
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
LLAMA_70B |= {"num_attention_heads": 64, "num_key_value_heads": 8}
# name in the table, file of models/, what differs from it
MODELS = [
    ("8B", "8b", {}),
    ("15B", "15b", {}),
    ("32B", "32b", {}),
    ("70B", "8b", LLAMA_70B),
]
DRIVE = ["--disk-mem", "1TiB"]


def cell(binary: Path, model: tuple, ram_gib: int, options: list[str]) -> str:
    _, name, differs = model
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((ROOT / f"models/{name}.json").read_text()) | differs
        Path(folder, "config.json").write_text(json.dumps(config))
        words = [binary, "plan", "--model", folder, "--gpu-model", "rtx4090", "--seq-len", 4096]
        words += ["--tokens-per-step", 65536, "--device-mem", "22GiB"]
        words += ["--host-mem", f"{ram_gib - 4}GiB", "--state-bits", 8, "--clip-by", "previous"]
        done = subprocess.run([str(w) for w in words + options], capture_output=True, text=True)
    if done.returncode == 0:
        speed = int(re.search(r", (\d+) tokens/s", done.stdout)[1])
        return f"*{speed:,}*"
    needs = re.search(r"needs ([\d.]+) GiB of host memory", done.stderr)
    if not needs:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    return f"needs {float(needs[1]) + 4:.0f} GiB"


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--binary", type=Path, default=ROOT / "build/bin/penstock")
    a = p.parse_args()
    print("| model | drive | " + " | ".join(f"{r} GiB" for r in RAM) + " |")
    print("|---|---|" + "---|" * len(RAM))
    for model in MODELS:
        for drive, options in (("none", []), ("one", DRIVE)):
            cells = [cell(a.binary, model, r, options) for r in RAM]
            print(f"| {model[0]} | {drive} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
