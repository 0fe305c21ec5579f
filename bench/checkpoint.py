"""Measures what a checkpoint beside the steps costs: two runs of `penstock train`, one JSON object.

    python3 bench/checkpoint.py --folder /scratch/run --out bench/results/ckpt.jsonl
    python3 bench/checkpoint.py --model tiny-llama --backend cpu --device-gib 0 --host-gib 0 \\
        --seq-len 64 --tokens 256 --folder /tmp/run --out /tmp/ckpt.jsonl

The first run has 2 N - 1 steps and one checkpoint, after N of them (--steps N). The median of steps
2 to N, of which the first is left out, is the time of a step without a checkpoint. What the steps
after N take more than that is the time lost. It says what an interval of 20 steps and one of 30
minutes would cost.

The second run resumes from the checkpoint, under --resume-gib where that is given, and trains two
steps. Seconds to resume are from its start to its first step: planning, checking all SHA-256s,
reserving memory and reading. resumed_loss_gaps has how far the losses of these steps are from the
first run's. They are 0 with --deterministic, and on the CPU backend.

--folder gets the run, with one checkpoint: 48 GB for 8B. It must not exist, and is removed. Without
--data the tokens are random ones. The program needs Python's standard library alone.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "sweep"))

from machine import ROOT, commit, machine, versions  # noqa: E402
from measure import random_shard  # noqa: E402

LINE = re.compile(r"checkpoint \S+: .* after ([\d.]+) s \(([\d.]+) GB/s\).*waited ([\d.]+) s")


def command_of(args, model, steps, device_gib, more):
    command = [str(args.binary), "train", "--no-save", "--model", str(model), "--data", *args.data]
    options = {
        "seq-len": args.seq_len,
        "tokens-per-step": args.tokens,
        "steps": steps,
        "recipe": args.recipe,
        "backend": args.backend,
        "lr": "1e-5",
        "lr-schedule": "constant",
        "run-dir": args.folder,
    }
    if device_gib:
        options["device-mem"] = f"{device_gib:g}GiB"
    if args.host_gib:
        options["host-mem"] = f"{args.host_gib:g}GiB"
    if args.deterministic:
        command.append("--deterministic")
    return command + [str(word) for k, v in options.items() for word in (f"--{k}", v)] + more


def run(command, metrics_path, first=0):
    """What the run said, its metrics, and the seconds from its start to the begin of its first
    step."""
    began, told, seconds = time.monotonic(), None, 0.0
    done = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    said = []
    for line in done.stderr:
        said.append(line)
        if told is None and (told := re.match(r"step (\d+)/", line)):
            seconds = time.monotonic() - began
    if done.wait() != 0:
        sys.exit(f"{' '.join(command)}\n{''.join(said)}")
    metrics = [json.loads(line) for line in open(metrics_path)]
    trained = [m["step_s"] for m in metrics if first <= m["step"] < int(told[1])]
    return "".join(said), metrics, seconds - sum(trained)


def measure(args, model):
    n, metrics_path = args.steps, args.folder / "metrics.jsonl"
    writes = ["--init-weights", "--checkpoint-every", str(n)]
    said, metrics, _ = run(
        command_of(args, model, 2 * n - 1, args.device_gib, writes), metrics_path
    )
    found = LINE.search(said) or sys.exit(f"no checkpoint was written:\n{said}")
    durable_s, gb_per_s, waited_s = map(float, found.groups())
    steps = [m["step_s"] for m in metrics]
    step_s = statistics.median(steps[1:n])
    lost_s = sum(steps[n:]) - step_s * (n - 1)
    (path,) = (args.folder / "checkpoints").iterdir()
    manifest = json.loads((path / "manifest.json").read_text())
    n_bytes = sum(f["bytes"] for f in manifest["files"])
    plan = json.loads((args.folder / "plan.json").read_text())
    _, after, resume_s = run(
        command_of(args, model, n + 2, args.resume_gib or args.device_gib, ["--resume", str(path)]),
        metrics_path,
        n,
    )
    peak = max(m["host_peak_bytes"] for m in metrics)
    gaps = [abs(a["loss"] - b["loss"]) for a, b in zip(after[n:], metrics[n:])]
    return {
        "step_s": step_s,
        "steps_s": steps,
        "lost_s": lost_s,
        "waited_s": waited_s,
        "lost_at_20_steps": lost_s / (20 * step_s),
        "lost_at_30_min": lost_s / 1800,
        "gb": n_bytes / 1e9,
        "n_files": len(manifest["files"]),
        "durable_s": durable_s,
        "gb_per_s": gb_per_s,  # of seconds that are not rounded, as durable_s is
        "resume_s": resume_s,
        "resumed_loss_gaps": gaps,
        "host_peak_gib": peak / 2**30,
        "host_cap_gib": args.host_gib,
        "planned_host_gib": plan["host_used_bytes"] / 2**30,
        "device_peak_gib": metrics[-1]["device_peak_bytes"] / 2**30,
    }


def sentence(row):
    cap = f" of {row['host_cap_gib']:g}" if row["host_cap_gib"] else ""
    return (
        f"A checkpoint of {row['gb']:.3g} GB was durable after {row['durable_s']:.1f} s "
        f"({row['gb_per_s']:.2f} GB/s). It cost {row['lost_s']:.2f} s beside steps of "
        f"{row['step_s']:.2f} s: {100 * row['lost_at_20_steps']:.2f}% of the time at an interval "
        f"of 20 steps, {100 * row['lost_at_30_min']:.2f}% at one of 30 minutes. To resume took "
        f"{row['resume_s']:.1f} s. Host memory peaked at {row['host_peak_gib']:.2f}{cap} GiB."
    )


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--binary", type=Path, default=ROOT / "build/bin/penstock")
    p.add_argument("--model", default="8b", help="a file of models/ (default 8b)")
    p.add_argument("--data", nargs="+", help="token shards (default: random tokens)")
    p.add_argument("--folder", type=Path, required=True, help="for the run; is removed")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--backend", default="cuda")
    p.add_argument("--recipe", default="bf16")
    p.add_argument("--device-gib", type=float, default=24, help="0: no cap")
    p.add_argument("--resume-gib", type=float, default=0, help="of the run that resumes")
    p.add_argument("--host-gib", type=float, default=80, help="0: no cap")
    p.add_argument("--seq-len", type=int, default=4096)
    p.add_argument("--tokens", type=int, default=65536, help="a step")
    p.add_argument("--steps", type=int, default=7, help="before the checkpoint; at least 3")
    p.add_argument("--deterministic", action="store_true", help="both runs, for equal losses")
    p.add_argument("--commit", help="commit to record (default: git's)")
    args = p.parse_args()
    if args.folder.exists():
        p.error(f"{args.folder} exists: give a folder that does not")
    if args.steps < 3:
        p.error(f"--steps {args.steps}: at least 3, as two are compared after the checkpoint")
    with tempfile.TemporaryDirectory() as work:
        config = json.loads((ROOT / f"models/{args.model}.json").read_text())
        # only the shape matters here, not what the model was trained for
        config["max_position_embeddings"] = max(args.seq_len, config["max_position_embeddings"])
        (Path(work) / "config.json").write_text(json.dumps(config))
        if not args.data:
            args.data = [str(Path(work) / "random.bin")]
            n_tokens = 2 * args.steps * args.tokens + args.seq_len + 1
            random_shard(Path(args.data[0]), n_tokens, config["vocab_size"])
        try:
            row = measure(args, Path(work))
        finally:
            shutil.rmtree(args.folder, ignore_errors=True)
    row |= {
        "model": args.model,
        "recipe": args.recipe,
        "seq_len": args.seq_len,
        "tokens": args.tokens,
        "machine": machine(),
        "versions": versions(args.binary),
        "commit": args.commit or commit() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }
    with open(args.out, "a") as f:
        f.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))
    print(sentence(row))


if __name__ == "__main__":
    main()
