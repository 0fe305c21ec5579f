"""Measures generation on a GPU: tokens a second, beside what the link and the device's memory allow.

    python3 bench/generate.py --out bench/results/h200-generate.jsonl 1b 8b 8b:6
    python3 bench/generate.py --new-tokens 200 qwen3-30b-a3b:24:1:whole qwen3-30b-a3b:24:1:on-demand

A case is MODEL[:DEVICE_GIB[:BATCH[:EXPERTS]]]. MODEL names a file of models/. The binary draws the
weights, in memory. EXPERTS is --experts. DEVICE_GIB 0 means no cap. Tokens are drawn at temperature
1: greedy ones of random weights repeat, and then experts would too. A case prints one JSON object:

    decode_tokens_per_s   and of it the fraction of the lower of two limits, "of_limit":
    memory_limit          the weights' bytes at the device memory's peak, times the batch
    link_limit            the streamed weights' bytes at the link's measured rate, times the batch

Decode is all tokens but each prompt's first. The limits leave out the cache, which is read too. A
case is run --repeats times, and the run with the median of decode counts; decode_runs has all.
With experts on demand expert_hit_rate is measured, and planned_steps_per_s is what the plan says,
beside planned_whole_steps_per_s. The program needs Python's standard library alone.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "sweep"))

from machine import ROOT, commit, machine, versions  # noqa: E402


def said_by(command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"generate: {' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


def measure(case, args, binary):
    name, gib, batch, experts = (
        *case.split(":"),
        *("0", str(args.batch), "auto")[case.count(":") :],
    )
    config = json.loads((ROOT / "models" / f"{name}.json").read_text())
    draw = random.Random(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.NamedTemporaryFile("w", suffix=".ids") as prompts,
    ):
        for _ in range(int(batch)):
            ids = [draw.randrange(3, config["vocab_size"]) for _ in range(args.prompt_tokens)]
            prompts.write(json.dumps(ids) + "\n")
        prompts.flush()
        (Path(folder) / "config.json").write_text(json.dumps(config))
        command = [binary, "generate", "--model", folder, "--prompts", prompts.name, "--json"]
        command += ["--init-weights", "--temperature", 1, "--experts", experts]
        command += ["--quiet", "--max-new-tokens", args.new_tokens, "--batch", batch]
        command += ["--stop-tokens", config["vocab_size"] - 1]
        command += [
            "--backend",
            args.backend,
            *(["--device-mem", f"{gib}GiB"] if float(gib) else []),
        ]
        runs = [json.loads(said_by(command)) for _ in range(args.repeats)]
    runs.sort(key=lambda r: r["decode_tokens_per_s"])
    found = runs[len(runs) // 2]
    found.pop("tokens")
    limits = [found[k] * int(batch) for k in ("memory_steps_per_s", "link_steps_per_s") if found[k]]
    row = {
        "case": case,
        "batch": int(batch),
        "prompt_tokens_each": args.prompt_tokens,
        "memory_limit": found["memory_steps_per_s"] and found["memory_steps_per_s"] * int(batch),
        "link_limit": found["link_steps_per_s"] and found["link_steps_per_s"] * int(batch),
        "of_limit": found["decode_tokens_per_s"] / min(limits) if limits else None,
        **found,
        "decode_runs": [r["decode_tokens_per_s"] for r in runs],
    }
    return row


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("case", nargs="+")
    p.add_argument("--build", default=os.environ.get("PENSTOCK_BUILD", "build"), metavar="DIR")
    p.add_argument("--out", metavar="FILE", help="append the JSON objects")
    p.add_argument("--backend", default="cuda")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--prompt-tokens", type=int, default=512)
    p.add_argument("--new-tokens", type=int, default=64)
    p.add_argument("--repeats", type=int, default=3, help="runs of a case")
    p.add_argument("--commit", help="commit to record (default: git's)")
    args = p.parse_args()
    if args.repeats < 1:
        p.error(f"--repeats {args.repeats}: at least 1")
    binary = Path(args.build) / "bin" / "penstock"
    note = {
        "machine": machine(),
        "versions": versions(binary),
        "commit": args.commit or commit() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }
    for case in args.case:
        line = json.dumps({**measure(case, args, binary), **note})
        print(line, flush=True)
        if args.out:
            with open(args.out, "a", encoding="utf-8") as f:
                f.write(line + "\n")


if __name__ == "__main__":
    main()
