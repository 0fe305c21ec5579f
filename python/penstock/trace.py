"""Traces: reading a timeline.json, where each stream's time went, and the timeline as a picture.

python -m penstock.trace timeline.json [--png timeline.png]
"""
import argparse
import json
import sys
from dataclasses import dataclass

import numpy as np

from .files import open_input

EVENT_DTYPE = np.dtype([("step", "i8"), ("stream", "i4"), ("op_class", "U12"), ("name", "U32"), ("layer", "i4"), ("round", "i4"),
                        ("chunk", "i4"), ("start_s", "f8"), ("end_s", "f8"), ("wait_s", "f8")])


@dataclass(frozen=True)
class Timeline:
    """Events (EVENT_DTYPE, seconds since the run's start; wait_s is how long the stream stood before the op could start) and the
    streams' names."""
    events: np.ndarray
    streams: list[str]


@dataclass(frozen=True)
class StreamShare:
    """Of the traced time: busy (an op runs), waiting (for another stream), idle (nothing to do)."""
    name: str
    n_ops: int
    busy_s: float
    busy: float
    waiting: float

    @property
    def idle(self) -> float:
        return max(0.0, 1.0 - self.busy - self.waiting)


def load(path) -> Timeline:
    """A trace that penstock wrote. ValueError when the file is none."""
    try:
        with open_input(path, "r", encoding="utf-8") as file:
            records = json.load(file)["traceEvents"]
        names = {r["tid"]: r["args"]["name"] for r in records if r["ph"] == "M" and r["name"] == "thread_name"}
        rows = [(r["args"]["step"], r["tid"], r["cat"], r["name"], r["args"]["layer"], r["args"]["round"], r["args"]["chunk"],
                 r["ts"] * 1e-6, (r["ts"] + r["dur"]) * 1e-6, r["args"]["wait_us"] * 1e-6) for r in records if r["ph"] == "X"]
    except (KeyError, TypeError, json.JSONDecodeError) as exc:
        raise ValueError(f"{path}: not a trace written by penstock ({exc!r})") from exc
    return Timeline(np.array(rows, EVENT_DTYPE), [names[i] for i in sorted(names)])


def shares(timeline: Timeline) -> list[StreamShare]:
    """Each stream's share of the time between the first start and the last end."""
    events = timeline.events
    if not len(events):
        return [StreamShare(name, 0, 0.0, 0.0, 0.0) for name in timeline.streams]
    first, last = events["start_s"].min(), events["end_s"].max()
    window = max(last - first, 1e-12)
    out = []
    for i, name in enumerate(timeline.streams):
        mine = events[events["stream"] == i]
        busy = (mine["end_s"] - mine["start_s"]).sum()
        waited = (mine["start_s"] - np.maximum(mine["start_s"] - mine["wait_s"], first)).sum()
        out.append(StreamShare(name, len(mine), busy, busy / window, waited / window))
    return out


def largest_ops(timeline: Timeline, n: int = 8) -> list[tuple[str, str, float]]:
    """(stream, op name, seconds) of the op names that took most time, largest first."""
    events, totals = timeline.events, {}
    for stream, name, seconds in zip(events["stream"], events["name"], events["end_s"] - events["start_s"]):
        key = (timeline.streams[stream], str(name))
        totals[key] = totals.get(key, 0.0) + seconds
    ranked = sorted(totals.items(), key=lambda item: -item[1])[:n]
    return [(stream, name, float(seconds)) for (stream, name), seconds in ranked]


def print_shares(timeline: Timeline, console=None) -> None:
    """A table of the streams' time."""
    from rich.console import Console
    from rich.table import Table

    table = Table("stream", "ops", "busy", "waiting", "idle", title="where the time went")
    for column in table.columns[1:]:
        column.justify = "right"
    for s in shares(timeline):
        table.add_row(s.name, str(s.n_ops), f"{100 * s.busy:.1f}%", f"{100 * s.waiting:.1f}%", f"{100 * s.idle:.1f}%")
    (console or Console()).print(table)


def plot(timeline: Timeline, path, title: str = "") -> None:
    """The timeline as a picture: a row a stream, coloured by kind of op."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"gemm": "tab:blue", "attention": "tab:cyan", "elementwise": "tab:green", "copy": "tab:orange", "optimizer": "tab:red",
               "io": "tab:purple", "other": "tab:gray"}
    events = timeline.events
    first = events["start_s"].min() if len(events) else 0.0
    figure, axes = plt.subplots(figsize=(14, 1.2 + 0.6 * len(timeline.streams)), constrained_layout=True)
    for op_class, colour in colours.items():
        for i in range(len(timeline.streams)):
            mine = events[(events["stream"] == i) & (events["op_class"] == op_class)]
            if len(mine):
                axes.broken_barh(list(zip(mine["start_s"] - first, mine["end_s"] - mine["start_s"])), (i - 0.4, 0.8), facecolors=colour)
    present = [c for c in colours if (events["op_class"] == c).any()]
    figure.legend(handles=[plt.Rectangle((0, 0), 1, 1, color=colours[c]) for c in present], labels=present, loc="outside upper right",
                  ncols=max(1, len(present)), frameon=False)
    axes.set_yticks(range(len(timeline.streams)), timeline.streams)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.trace", description="where the time of a trace went, by stream")
    parser.add_argument("timeline", help="a timeline.json")
    parser.add_argument("--png", metavar="FILE", help="write the timeline as a picture")
    args = parser.parse_args()
    try:
        timeline = load(args.timeline)
    except (OSError, ValueError) as exc:
        print(f"penstock.trace: {exc}", file=sys.stderr)
        return 2
    print_shares(timeline)
    for stream, name, seconds in largest_ops(timeline):
        print(f"{stream:10} {name:28} {seconds:8.3f} s")
    if args.png:
        plot(timeline, args.png, args.timeline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
