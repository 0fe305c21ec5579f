"""Makes README.md's table "Will it run on my machine?".

    python3 bench/will_it_run.py

A cell is what `penstock plan` predicts for the GPU by its name: tokens/s, or the GiB that lack. The
operating system keeps 4 GiB of the RAM, and a GPU that also drives a screen 2 GiB of its memory.
Sequences of 4,096 tokens, 65,536 tokens a step, AdamW and clipping included; LoRA of rank 16.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# name in the table, --gpu-model, GiB of GPU memory, GiB of RAM
MACHINES = [
    ("RTX 4090, 64 GiB", "rtx4090", 22, 64),
    ("RTX 4090, 96 GiB", "rtx4090", 22, 96),
    ("RTX 5090, 96 GiB", "rtx5090", 30, 96),
    ("A100 80 GB, 128 GiB", "a100", 78, 128),
    ("H100 80 GB, 128 GiB", "h100", 78, 128),
    ("H200, 128 GiB", "h200", 138, 128),
]
LORA = ["--lora-rank", "16"]
# name in the table, file of models/, options, whether the GPU must have FP8
COLUMNS = [
    ("1B", "1b", [], False),
    ("8B bf16", "8b", [], False),
    ("8B FP8", "8b", ["--recipe", "fp8"], True),
    ("8B LoRA", "8b", LORA, False),
    ("8B LoRA, FP8", "8b", [*LORA, "--recipe", "fp8-master"], True),
    ("32B LoRA", "32b", LORA, False),
]


def cell(binary: Path, machine: tuple, column: tuple) -> str:
    _, gpu, device_gib, ram_gib = machine
    _, model, options, fp8 = column
    if fp8 and gpu == "a100":
        return "no FP8"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text((ROOT / f"models/{model}.json").read_text())
        words = [binary, "plan", "--model", folder, "--gpu-model", gpu, "--seq-len", 4096]
        words += ["--tokens-per-step", 65536, "--device-mem", f"{device_gib}GiB"]
        words += ["--host-mem", f"{ram_gib - 4}GiB", *options]
        done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode == 0:
        speed = int(re.search(r", (\d+) tokens/s", done.stdout)[1])
        return f"*{speed:,}*"
    needs = re.search(r"needs ([\d.]+) GiB of host memory", done.stderr)
    if not needs:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    return f"needs {float(needs[1]) + 4:.0f} GiB of RAM"


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--binary", type=Path, default=ROOT / "build/bin/penstock")
    a = p.parse_args()
    print("| GPU, RAM | " + " | ".join(c[0] for c in COLUMNS) + " |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for machine in MACHINES:
        cells = [cell(a.binary, machine, column) for column in COLUMNS]
        print("| " + " | ".join([machine[0], *cells]) + " |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
