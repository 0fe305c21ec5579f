"""Predicts or measures training speed over caps, sequence lengths and models.

    python3 bench/sweep bench/sweep/rtx4090.toml --out DIR      predicted; needs no GPU
    python3 bench/sweep bench/sweep/h200.toml --out DIR         measured, on this machine's GPU
    python3 bench/sweep --out DIR 8b:8192:24:84:131072          one measured case

A CASE is MODEL:SEQ_LEN:DEVICE_GIB:HOST_GIB:TOKENS_PER_STEP[:MORE]. MORE are options such as
recipe=fp32-master,steps=6,warm-up=1; a cap of 0 is none. bench/README.md shows the keys of a
TOML file.

Each case appends a line to DIR/rows.jsonl. A sweep that was stopped, in whatever way, goes on with
the cases that are missing when the same command is given again. At the end DIR has sweep.csv and
sweep.json, and a heatmap for each model and sequence length. They are of the command's cases, or
after --draw of all cases: the newest row of each case, machine and commit. A case whose caps are
too small is a row with the reason. One that fails is a row with the error, and the exit code is 1
until --again failed has repeated it.

A measured case is one `penstock train` from seeded weights; its figures are medians over the steps
after the warm-up. The words of --data, and the number of tokens in its shards, tell a measured case
from one without --data or with another. The heatmaps need matplotlib, which build/venv/bin/python
has; all else needs Python's standard library alone.
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import cases
import measure
import pictures
import predict
import results
from cases import Case, SweepError
from machine import ROOT, commit, described, machine, versions

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 130


def arguments():
    p = argparse.ArgumentParser(
        prog="bench/sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("sources", nargs="*", metavar="TOML|CASE", help="files of cases, and cases")
    p.add_argument("--out", type=Path, required=True, help="folder of the results")
    p.add_argument("--data", nargs="+", default=[], help="token shards for measured cases "
                   "(default: seeded tokens, which give the same times)")  # fmt: skip
    p.add_argument("--limit-minutes", type=float, default=0.0, metavar="M",
                   help="start no case that would end later, as long as the longest so far of its "
                   "model; the same command goes on with the rest")  # fmt: skip
    p.add_argument("--again", choices=("failed", "all"), nargs="?", const="all",
                   help="repeat cases that have a row: all, or those that failed")  # fmt: skip
    p.add_argument("--draw", action="store_true",
                   help="write tables and heatmaps of the rows that are there, whatever their "
                   "commit, and run nothing")  # fmt: skip
    p.add_argument("--keep", type=Path, help="folder for each measured run's metrics, plan and "
                   "timeline")  # fmt: skip
    p.add_argument("--binary", type=Path, default=ROOT / "build/bin/penstock")
    p.add_argument("--commit", default=None, help="commit to record (default: the last one that "
                   "changed native/, include/ or the Makefile)")  # fmt: skip
    return p.parse_args()


class Progress:
    """The rows of one call of the sweep, and what has been said of them."""

    def __init__(self, args, rows: results.Rows, n: int):
        self.rows, self.n, self.n_done = rows, n, 0
        self.machine, self.versions = machine(), versions(args.binary)
        self.commit = args.commit or commit() or "unknown"
        self.began, self.limit_s = time.monotonic(), args.limit_minutes * 60
        self.longest_s: dict = {}

    def key(self, case: Case) -> str:
        return case.key(self.machine, self.commit)

    def statuses(self) -> dict:
        """The status of each key's newest row."""
        return {r.get("key"): r["status"] for r in self.rows.rows}

    def machine_of(self, case: Case) -> str:
        return self.machine if case.hardware == cases.THIS else described(case.hardware)

    def due(self, case: Case) -> bool:
        """Whether the case may still start: it would end in time if it took as long as the longest
        of its model and sequence so far, or, before there is one, as the longest of all."""
        if not self.limit_s:
            return True
        longest = self.longest_s.get((case.model, case.seq_len))
        if longest is None:
            longest = max(self.longest_s.values(), default=0)
        return time.monotonic() - self.began + longest <= self.limit_s

    def note(self, case: Case, row: dict) -> None:
        row = {
            "case": case.label(),
            **case.parameters(),
            "config": json.loads(case.config),
            "machine": self.machine_of(case),
            **row,
            "versions": self.versions,
            "commit": self.commit,
            "date": time.strftime("%Y-%m-%d"),
            "key": self.key(case),
        }
        self.rows.append(row)
        self.n_done += 1
        at = (case.model, case.seq_len)
        self.longest_s[at] = max(self.longest_s.get(at, 0), row.get("wall_s", 0))
        print(f"{self.n_done} of {self.n}  {case.label()}: {said(row)}", flush=True)


def said(row: dict) -> str:
    if row["status"] != results.OK:
        return f"{row['status']}: {row['message']}"
    planned = f"{row['predicted_tokens_per_s']:,.0f} tok/s predicted"
    if row["mode"] == "predicted":
        return planned
    return f"{row['tokens_per_s']:,.0f} tok/s, {planned}"


def read_cases(args) -> list[Case]:
    found = []
    for source in args.sources:
        if source.endswith(".toml"):
            found += cases.read(source, args.binary).cases
        else:
            found.append(cases.parse(source, args.binary))
    if not found and not args.draw:
        raise SweepError("no cases: give a TOML file, or MODEL:SEQ_LEN:DEVICE_GIB:HOST_GIB:TOKENS")
    if args.data:
        data = cases.data_of(args.data, args.binary)
        found = [replace(c, data=data) if c.mode == "measured" else c for c in found]
    return list(dict.fromkeys(found))


def missing(args, progress: Progress, chosen: list[Case]) -> list[Case]:
    known = progress.statuses()
    wanted = {"all": (), "failed": (results.OK, results.INFEASIBLE)}.get(
        args.again, (results.OK, results.INFEASIBLE, results.FAILED)
    )
    return [c for c in chosen if known.get(progress.key(c)) not in wanted]


def run_predicted(args, progress: Progress, todo: list[Case]) -> None:
    for group in predict.groups(todo):
        left = list(group)
        if not progress.due(left[0]):
            continue
        found = predict.run(group, args.binary)
        try:
            for case, row in found:
                progress.note(case, row)
                left.remove(case)
                if left and not progress.due(left[0]):
                    break
        except SweepError as exc:
            for case in left:
                progress.note(case, {"status": results.FAILED, "reason": "refused",
                                     "message": str(exc)})  # fmt: skip
        finally:
            found.close()


def run_measured(args, progress: Progress, todo: list[Case]) -> None:
    for case in todo:
        if progress.due(case):
            keep = args.keep and args.keep / progress.key(case)
            progress.note(case, measure.run(case, args.binary, args.data, keep))


def write(folder: Path, rows: list[dict], chosen: list[Case]) -> None:
    """Tables and heatmaps of the newest rows; of the chosen cases, if any."""
    wanted = {results.parameters_of(c.parameters()) for c in chosen}
    of = [r for r in results.newest(rows) if not wanted or results.parameters_of(r) in wanted]
    written = results.write_tables(of, folder)
    try:
        written += pictures.write(of, folder)
    except ImportError as exc:
        print(f"no heatmaps: {exc}: run again with build/venv/bin/python and --draw")
    print(f"{len(of)} rows: {', '.join(str(path) for path in written)}")


def sweep(args) -> int:
    if not args.limit_minutes >= 0:
        raise SweepError(f"--limit-minutes is {args.limit_minutes:g}: 0, for no limit, or more")
    if args.draw and not (args.out / "rows.jsonl").is_file():
        raise SweepError(f"--out {args.out} has no rows.jsonl to draw: give the folder of a sweep")
    chosen = read_cases(args)
    rows = results.Rows(args.out / "rows.jsonl")
    try:
        progress = Progress(args, rows, 0)
        todo = [] if args.draw else missing(args, progress, chosen)
        progress.n = len(todo)
        if len(todo) < len(chosen) and not args.draw:
            print(f"{len(chosen) - len(todo)} of {len(chosen)} cases have a row already")
        run_predicted(args, progress, [c for c in todo if c.mode == "predicted"])
        run_measured(args, progress, [c for c in todo if c.mode == "measured"])
        write(args.out, rows.rows, [] if args.draw else chosen)
    finally:
        rows.close()
    if progress.n_done < progress.n:
        print(f"{progress.n - progress.n_done} cases are left for the same command")
    if args.draw:
        return DONE
    known = progress.statuses()
    n_failed = sum(known.get(progress.key(c)) == results.FAILED for c in chosen)
    if n_failed:
        print(f"{n_failed} of {len(chosen)} cases failed: --again failed repeats them")
    return FAILED if n_failed else DONE


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return sweep(args)
    except SweepError as exc:
        print(f"bench/sweep: {exc}", file=sys.stderr)
        return REFUSED
    except OSError as exc:
        print(f"bench/sweep: {exc.filename or args.out}: {exc.strerror}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\nbench/sweep: stopped; the same command goes on with the rest", file=sys.stderr)
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
