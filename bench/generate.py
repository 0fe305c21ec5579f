"""Measures generation on a GPU: tokens a second, beside what the link and the device's memory allow.

    python3 bench/generate.py --out bench/results/h200-generate.jsonl 1b 8b 8b:6

A case is MODEL[:DEVICE_GIB[:BATCH]]. MODEL names a file of models/, which models/init_model.py fills
with random weights once, in --models. DEVICE_GIB 0 means no cap. A case prints one JSON object:

    decode_tokens_per_s   and of it the fraction of the lower of two limits, "of_limit":
    memory_limit          the weights' bytes at the device memory's peak, times the batch
    link_limit            the streamed weights' bytes at the link's measured rate, times the batch

Decode is all tokens but each prompt's first. The limits leave out the cache, which is read too. A
case is run --repeats times, and the run with the median of decode counts; decode_runs has all. The
program needs Python's standard library alone.
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


def model_of(name, folder):
    """The directory of a model with random weights."""
    config = ROOT / "models" / f"{name}.json"
    out = folder / name
    if not (out / "config.json").exists():
        said_by([sys.executable, ROOT / "models/init_model.py", config, out])
    return out, json.loads(config.read_text())


def measure(case, args, binary, folder):
    name, gib, batch = (
        (*case.split(":"), "0", str(args.batch))[:3]
        if ":" not in case
        else (case.split(":") + [str(args.batch)])[:3]
    )
    model, config = model_of(name, folder)
    draw = random.Random(1)
    with tempfile.NamedTemporaryFile("w", suffix=".ids") as prompts:
        for _ in range(int(batch)):
            ids = [draw.randrange(3, config["vocab_size"]) for _ in range(args.prompt_tokens)]
            prompts.write(json.dumps(ids) + "\n")
        prompts.flush()
        command = [binary, "generate", "--model", model, "--prompts", prompts.name, "--json"]
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
    p.add_argument("--models", metavar="DIR", help="where models stay (default: removed)")
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
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.models or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for case in args.case:
            line = json.dumps({**measure(case, args, binary, folder), **note})
            print(line, flush=True)
            if args.out:
                with open(args.out, "a", encoding="utf-8") as f:
                    f.write(line + "\n")


if __name__ == "__main__":
    main()
