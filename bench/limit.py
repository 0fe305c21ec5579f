"""How fast a step could be, and how fast it is: times every distinct kernel call of a plan's step
alone under sustained load, and adds them up.

    make bench-programs
    python3 bench/limit.py --model DIR --seq-len 8192 --device-mem 24GiB --host-mem 84GiB \\
        --train SHARDS --csv limit.csv --json limit.json

All options but those below say the plan. They are those of `penstock plan` without --data,
--gpu-model, --gpus, --grid-device, --grid-host, --hardware, --hosts, --pairs and --smallest. The
sum of kernels is the time of a step whose compute stream never waits and whose kernels have no gaps
between them. With a training (--train, or --run of one that ended), its step is compared with the
sum:

    achieved / limit    the sum of kernels over the measured step
    no kernel           the part of the measured step in which the compute stream ran no op

The ceilings are the hardware profile's: its rate of large products for products and attention, its
rate of norms for everything else. bench/limit.c says how calls are timed. The program needs
Python's standard library alone.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "sweep"))

from machine import ROOT, commit, die_with_parent, machine, versions  # noqa: E402

# family: kernel and, for products, what they multiply with
FAMILIES = {
    ("gemm", "qkv"): "qkv product",
    ("gemm", "o"): "o product",
    ("gemm", "gate_up"): "gate-up product",
    ("gemm", "down"): "down product",
    ("gemm", "head"): "head product",
    ("gemm", "adapter"): "adapter products",
    ("gemm_fp8", "qkv"): "qkv product, FP8",
    ("gemm_fp8", "o"): "o product, FP8",
    ("gemm_fp8", "gate_up"): "gate-up product, FP8",
    ("gemm_fp8", "down"): "down product, FP8",
    "attention_fwd": "attention forward",
    "attention_bwd": "attention backward",
    "rmsnorm_fwd": "norms",
    "rmsnorm_bwd": "norms",
    "qkv_split_fwd": "rope and split",
    "qkv_split_bwd": "rope and split",
    "glu_fwd": "swiglu",
    "glu_bwd": "swiglu",
    "quantize": "quantization",
    "fp8_scale": "quantization",
    "rmsnorm_quantize": "norms",
    "glu_quantize": "swiglu",
    "glu_bwd_quantize": "swiglu",
    "embed_fwd": "embedding",
    "embed_bwd": "embedding",
    "cross_entropy": "cross entropy",
    "accumulate": "sums",
    "sumsq": "sums",
    "colsum": "sums",
    "fill_zero": "sums",
    "copy_bytes": "sums",
}
COLUMNS = (
    "family",
    "calls",
    "ms",
    "share",
    "recomputed_ms",
    "flops",
    "bytes",
    "tflops_per_s",
    "gb_per_s",
    "of_ceiling",
)


def family_of(call):
    """The op family of a call of bench/limit.c. KeyError: this program does not know the kernel."""
    if call["class"] == "optimizer":
        return "optimizer on device"
    kernel = call["kernel"]
    return FAMILIES[kernel] if kernel in FAMILIES else FAMILIES[(kernel, call["what"])]


def add_up(limit):
    """A row for each family, in the order of FAMILIES, and one of their sum."""
    families = list(dict.fromkeys(FAMILIES.values())) + ["optimizer on device"]
    rows = {name: dict.fromkeys(COLUMNS[1:], 0.0) for name in families + ["sum of kernels"]}
    least = {name: 0.0 for name in rows}  # seconds at the ceilings
    for call in limit["calls"]:
        computes = call["class"] in ("gemm", "attention")
        products = "gemm_fp8_flops_per_s" if call["kernel"] == "gemm_fp8" else "gemm_flops_per_s"
        ceiling = (
            call["flops"] / limit[products]
            if computes
            else call["bytes"] / limit["memory_bytes_per_s"]
        )
        for name in (family_of(call), "sum of kernels"):
            row = rows[name]
            row["calls"] += call["calls"]
            row["ms"] += 1e3 * call["calls"] * call["seconds"]
            row["recomputed_ms"] += 1e3 * call["recomputed_calls"] * call["seconds"]
            row["flops"] += call["calls"] * call["flops"]
            row["bytes"] += call["calls"] * call["bytes"]
            least[name] += call["calls"] * ceiling
    total = rows["sum of kernels"]["ms"]
    for name, row in rows.items():
        if row["calls"]:
            row["share"] = row["ms"] / total
            row["tflops_per_s"] = row["flops"] / row["ms"] * 1e-9
            row["gb_per_s"] = row["bytes"] / row["ms"] * 1e-6
            row["of_ceiling"] = least[name] / (row["ms"] * 1e-3)
    return [{"family": name, **row} for name, row in rows.items() if row["calls"]]


def busy_of(timeline):
    """Seconds of the last traced step, and seconds in which its compute stream ran an op. Two
    traced steps are needed: a step is from the end of compute's ops of the step before to the end
    of its own. ValueError: there are fewer, or this is no timeline.json."""
    try:
        events = [
            (e["args"]["step"], e["ts"], e["ts"] + e["dur"])
            for e in timeline["traceEvents"]
            if e["ph"] == "X" and e["tid"] == 0
        ]
    except (KeyError, TypeError) as exc:
        raise ValueError(f"this is no timeline.json of penstock ({exc!r})") from exc
    steps = sorted({step for step, _, _ in events})
    if len(steps) < 2:
        raise ValueError(
            f"the timeline has {len(steps)} steps, two are needed: train with --trace-steps 2"
        )
    first, last = (max(end for s, _, end in events if s == step) for step in steps[-2:])
    busy = sum(max(0.0, min(end, last) - max(start, first)) for _, start, end in events)
    return (last - first) * 1e-6, busy * 1e-6


def measured(run_dir, limit, warm_up):
    """What the training in @run_dir reached in its steps after the first @warm_up. ValueError: it is
    no training of the limit's plan, or has no step that counts."""
    run_dir = Path(run_dir)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    if len(metrics) <= warm_up:
        raise ValueError(
            f"{run_dir} has {len(metrics)} steps: more than --warm-up {warm_up} are needed"
        )
    tokens = metrics[-1]["tokens"]
    if tokens != limit["plan"]["tokens_per_step"]:
        raise ValueError(
            f"{run_dir} has {tokens} tokens a step, the plan "
            f"{limit['plan']['tokens_per_step']}: give the options that the training had"
        )
    step_s = statistics.median(m["step_s"] for m in metrics[warm_up:])
    traced_s, busy_s = busy_of(json.loads((run_dir / "timeline.json").read_text()))
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "steps_timed": len(metrics) - warm_up,
        "achieved_over_limit": limit["sum_s"] / step_s,
        "traced_step_s": traced_s,
        "no_kernel": 1 - busy_s / traced_s,
        "compute_ops_over_limit": limit["sum_s"] / busy_s,
    }


def print_table(rows, limit, found, out):
    print(
        f"{'family':20} {'calls':>7} {'ms a step':>10} {'share':>7} {'TFLOP/s':>8} {'GB/s':>8} "
        f"{'of ceiling':>10}",
        file=out,
    )
    for r in rows:
        print(
            f"{r['family']:20} {r['calls']:7.0f} {r['ms']:10.2f} {100 * r['share']:6.1f}% "
            f"{r['tflops_per_s']:8.3g} {r['gb_per_s']:8.3g} {100 * r['of_ceiling']:9.1f}%",
            file=out,
        )
    plan, total = limit["plan"], rows[-1]
    print(
        f"ceilings: {limit['gemm_flops_per_s'] * 1e-12:.4g} TFLOP/s of products, "
        f"{limit['memory_bytes_per_s'] * 1e-9:.0f} GB/s of memory\n"
        f"sum of kernels   {limit['sum_s']:.4f} s: "
        f"{plan['tokens_per_step'] / limit['sum_s']:,.0f} tok/s at best; recomputation "
        f"{100 * total['recomputed_ms'] / total['ms']:.1f}% of it",
        file=out,
    )
    if found:
        print(
            f"measured step    {found['step_s']:.4f} s: {found['tokens_per_s']:,.0f} tok/s\n"
            f"achieved / limit {found['achieved_over_limit']:.3f}\n"
            f"no kernel        {100 * found['no_kernel']:.2f}% of the step; while ops ran they "
            f"were at {found['compute_ops_over_limit']:.3f} of the limit",
            file=out,
        )


def run(command):
    """A program's output. Its messages go to stderr; where it fails, this program ends with its
    exit code. When this program is killed, that one ends too."""
    done = subprocess.run(
        [str(c) for c in command],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def check_files(args):
    """Before minutes of measuring. ValueError: a table cannot be written, or --run lacks a file."""
    for name, path in (("--csv", args.csv), ("--json", args.json)):
        if path and not path.parent.is_dir():
            raise ValueError(f"{name} {path}: there is no folder {path.parent}: make it first")
        if path and path.is_dir():
            raise ValueError(f"{name} {path} is a folder: give a file")
    for name in ("metrics.jsonl", "timeline.json"):
        if args.run and not (args.run / name).is_file():
            raise ValueError(
                f"--run {args.run} has no {name}: give the run directory of a training with "
                "--trace-steps 2"
            )


def train(args, options, run_dir):
    run(
        [args.build / "bin/penstock", "train", *options, "--init-weights", "--data", *args.train]
        + ["--steps", args.steps, "--lr", "1e-5", "--trace-steps", "2", "--run-dir", run_dir]
        + ["--quiet", "--no-save"]
    )


def main():
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--build", type=Path, default=ROOT / "build", help="what make built")
    p.add_argument("--seconds", type=float, default=30, help="load and timing of all calls")
    p.add_argument("--train", nargs="+", metavar="SHARDS", help="train the plan for --steps steps")
    p.add_argument("--steps", type=int, default=5, help="of --train")
    p.add_argument("--warm-up", type=int, default=2, help="steps of a training that do not count; "
                   "the 1 of bench/sweep's cases for a --run that its --keep kept")  # fmt: skip
    p.add_argument("--run", type=Path, metavar="DIR", help="a training's run directory")
    p.add_argument("--csv", type=Path, help="write the families as a table")
    p.add_argument("--json", type=Path, help="write everything, the calls too")
    p.add_argument("--commit", help="commit to record (default: git's)")
    args, options = p.parse_known_args()
    if args.train and args.run:
        p.error("--train and --run exclude each other: --run is of a training that has ended")
    if args.warm_up < 0:
        p.error(f"--warm-up {args.warm_up}: 0 or more")
    if args.steps <= args.warm_up:
        p.error(f"--steps {args.steps}: more than --warm-up {args.warm_up} are needed")
    try:
        check_files(args)
    except ValueError as exc:
        print(f"limit.py: {exc}", file=sys.stderr)
        return 2
    limit = json.loads(run([args.build / "bench/limit", *options, "--seconds", args.seconds]))
    limit |= {
        "command": ["bench/limit.py", *sys.argv[1:]],
        "machine": machine(),
        "versions": versions(args.build / "bin/penstock"),
        "commit": args.commit or commit() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }
    rows, found = add_up(limit), None
    try:
        if args.train:
            with tempfile.TemporaryDirectory() as run_dir:
                train(args, options, run_dir)
                found = measured(run_dir, limit, args.warm_up)
        elif args.run:
            found = measured(args.run, limit, args.warm_up)
    except (OSError, ValueError) as exc:
        print(f"limit.py: {exc}", file=sys.stderr)
        return 2
    print_table(rows, limit, found, sys.stdout)
    if args.csv:
        with open(args.csv, "w", newline="") as f:
            writer = csv.DictWriter(f, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    if args.json:
        args.json.write_text(json.dumps({**limit, "families": rows, "measured": found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
