"""The gaps between the ops of the compute stream, by what is copied beside them.

    python3 bench/gaps.py profile/timeline.json       of a training's timeline
    python3 bench/gaps.py --experiment --model DIR --data SHARDS --seq-len 8192 \\
        --device-mem 24GiB --host-mem 84GiB --tokens-per-step 65536 --init-weights

The experiment asks why gaps are longer beside copies to the device (bench/log, launch-gaps). All
options but those below are those of `penstock train`. It has two parts:

1. build/bench/gaps: kernels that note their own times, launched in five ways, beside no copies, to
   the device, to the host, both ways. Without marks between kernels.
2. A training of 14 steps, of which steps 8 to 10 are traced. The other steps have no marks: their
   time against that of steps 9 and 10 is what marks cost. Then the gaps of the traced steps.

The program needs Python's standard library alone.
"""

import argparse
import bisect
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("none", "h2d", "d2h", "both")
# steps count from 1. A step after a standstill is none of either kind.
STEPS, TRACED, MARKED, UNMARKED = 14, "8:10", (9, 10), (4, 5, 6, 7, 12, 13, 14)


def overlaps(intervals, start, end):
    """Whether one of the intervals, which are sorted and apart, has a part in [start, end]."""
    i = bisect.bisect_left(intervals, (start,))
    return (i < len(intervals) and intervals[i][0] <= end) or (
        i > 0 and intervals[i - 1][1] > start
    )


def gaps_of(timeline, longest_us=30.0):
    """The gaps below @longest_us between the ops of compute, in us, by what ran beside them; and
    the time of all traced ops of compute from the first to the last, in us. ValueError: this is no
    timeline.json."""
    try:
        streams = {
            e["args"]["name"]: e["tid"]
            for e in timeline["traceEvents"]
            if e["ph"] == "M" and e["name"] == "thread_name"
        }
        events = {
            name: sorted(
                (e["ts"], e["ts"] + e["dur"])
                for e in timeline["traceEvents"]
                if e["ph"] == "X" and e["tid"] == streams[name]
            )
            for name in ("compute", "h2d", "d2h")
        }
    except (KeyError, TypeError) as exc:
        raise ValueError(f"this is no timeline.json of penstock ({exc!r})") from exc
    found = {name: [] for name in BESIDE}
    compute = events["compute"]
    for (_, end), (start, _) in zip(compute, compute[1:]):
        if not 0 <= start - end < longest_us:
            continue
        beside = tuple(overlaps(events[name], end, start) for name in ("h2d", "d2h"))
        found[BESIDE[beside[0] + 2 * beside[1]]].append(start - end)
    return found, compute[-1][1] - compute[0][0] if compute else 0.0


def table(found, whole_us):
    """The lines of a table."""
    yield (
        f"{'beside':6} {'gaps':>7} {'mean us':>8} {'p10':>7} {'p50':>7} {'p90':>7} {'p99':>7} "
        f"{'ms in all':>10} {'of the time':>11}"
    )
    for beside, gaps in found.items():
        if gaps:
            g = sorted(gaps)
            at = [g[min(len(g) - 1, int(len(g) * q))] for q in (0.1, 0.5, 0.9, 0.99)]
            yield (
                f"{beside:6} {len(g):7} {statistics.fmean(g):8.2f} "
                + " ".join(f"{value:7.2f}" for value in at)
                + f" {sum(g) * 1e-3:10.2f} {100 * sum(g) / whole_us:10.2f}%"
            )


def marks_cost(metrics, timeline):
    """Seconds of a step without and with marks, and what a mark's op costs in us."""
    times = {m["step"] + 1: m["step_s"] for m in metrics}
    without, with_marks = (
        statistics.median(times[s] for s in steps) for steps in (UNMARKED, MARKED)
    )
    traced = [e for e in timeline["traceEvents"] if e["ph"] == "X" and e["tid"] == 0]
    ops = len(traced) / len({e["args"]["step"] for e in traced})
    return {
        "unmarked_step_s": without,
        "marked_step_s": with_marks,
        "compute_ops": ops,
        "us_an_op": (with_marks - without) * 1e6 / ops,
    }


def experiment(build, options):
    """Both parts; returns an exit code."""
    named = [word for i, word in enumerate(options) if options[i - 1 : i] == ["--backend"]]
    backend = [name for name in named if name != "auto"]
    done = subprocess.run([build / "bench/gaps", *backend], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    print(f"{'launch':10} {'beside':6} {'mean us':>8} {'p10':>7} {'p50':>7} {'p90':>7} {'p99':>7}")
    for row in map(json.loads, done.stdout.splitlines()):
        print(
            f"{row['launch']:10} {row['beside']:6} {row['mean_us']:8.2f} "
            + " ".join(f"{row[f'p{q}_us']:7.2f}" for q in (10, 50, 90, 99))
        )
    with tempfile.TemporaryDirectory() as run_dir:
        words = ["--steps", str(STEPS), "--profile-steps", TRACED, "--run-dir", run_dir]
        words += ["--no-save", "--quiet"]
        code = subprocess.run([build / "bin/penstock", "train", *options, *words]).returncode
        if code:
            return code
        lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
        timeline = json.loads((Path(run_dir) / "timeline.json").read_text())
    cost = marks_cost([json.loads(line) for line in lines], timeline)
    print(
        f"\nstep without marks {cost['unmarked_step_s']:.4f} s, with marks "
        f"{cost['marked_step_s']:.4f} s: {cost['us_an_op']:.2f} us for each of the "
        f"{cost['compute_ops']:.0f} ops of compute\n"
    )
    print("\n".join(table(*gaps_of(timeline))))
    return 0


def main():
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("timelines", nargs="*", type=Path, help="timeline.json files")
    p.add_argument("--experiment", action="store_true", help="measure, as said above")
    p.add_argument("--longest", type=float, default=30, metavar="US", help="gaps below (30 us)")
    p.add_argument("--build", type=Path, default=ROOT / "build", help="what make built")
    if "--experiment" in sys.argv[1:]:
        words = [w for w in sys.argv[1:] if w != "--experiment"]
        build = ROOT / "build"
        if "--build" in words:
            at = words.index("--build")
            build = Path(words[at + 1]) if at + 1 < len(words) else p.error("--build: which?")
            del words[at : at + 2]
        return experiment(build, words)
    args = p.parse_args()
    if not args.timelines:
        p.error("give a timeline.json, or --experiment")
    for path in args.timelines:
        try:
            found, whole_us = gaps_of(json.loads(path.read_text()), args.longest)
        except (OSError, ValueError) as exc:
            print(f"gaps.py: {path}: {exc}", file=sys.stderr)
            return 2
        print(path)
        print("\n".join(table(found, whole_us)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
