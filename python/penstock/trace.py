"""Reads a timeline.json: how each stream spent its time, and the timeline as a picture.

python -m penstock.trace timeline.json [--png timeline.png]
"""

import argparse
import json
import sys
from dataclasses import dataclass, field

import numpy as np

from .files import open_input
from .terminal import Printable, one_line, printable

EVENT_DTYPE = np.dtype(
    [
        ("step", "i8"),
        ("stream", "i4"),
        ("op_class", "U12"),
        ("name", "U32"),
        ("layer", "i4"),
        ("round", "i4"),
        ("chunk", "i4"),
        ("start_s", "f8"),
        ("end_s", "f8"),
        ("wait_s", "f8"),
    ]
)


@dataclass(frozen=True)
class Timeline:
    """Events (EVENT_DTYPE, in seconds since the run's start) and the streams' names. wait_s is the
    time for which the stream waited before the op could start. memory: of each arena the times at
    which the bytes in use change, in seconds, and the bytes from each time on."""

    events: np.ndarray
    streams: list[str]
    memory: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamTimes:
    """How a stream spent the counted period, as fractions: busy (an op ran), waiting (for an op of
    another stream), idle (it had no op to run)."""

    name: str
    n_ops: int
    busy_s: float
    busy: float
    waiting: float

    @property
    def idle(self) -> float:
        return max(0.0, 1.0 - self.busy - self.waiting)


def load(path) -> Timeline:
    """Read a timeline.json of penstock. ValueError: the file is something else."""
    try:
        with open_input(path, "r", encoding="utf-8") as file:
            records = json.load(file)["traceEvents"]
        names = {
            r["tid"]: r["args"]["name"]
            for r in records
            if r["ph"] == "M" and r["name"] == "thread_name"
        }
        rows = [
            (
                r["args"]["step"],
                r["tid"],
                r["cat"],
                r["name"],
                r["args"]["layer"],
                r["args"]["round"],
                r["args"]["chunk"],
                r["ts"] * 1e-6,
                (r["ts"] + r["dur"]) * 1e-6,
                r["args"]["wait_us"] * 1e-6,
            )
            for r in records
            if r["ph"] == "X"
        ]
        gauges: dict[str, list] = {}
        for r in records:
            if r["ph"] == "C":
                gauges.setdefault(r["name"], []).append((r["ts"] * 1e-6, r["args"]["bytes"]))
    except (KeyError, TypeError, json.JSONDecodeError) as exc:
        raise ValueError(f"{path}: not a trace written by penstock ({exc!r})") from exc
    memory = {
        name: (np.array([at for at, _ in values]), np.array([n for _, n in values], "i8"))
        for name, values in gauges.items()
    }
    return Timeline(np.array(rows, EVENT_DTYPE), [names[i] for i in sorted(names)], memory)


def step_boundaries(timeline: Timeline) -> np.ndarray:
    """The start of the first traced step and the end of each, in seconds, on the first stream,
    which is compute. Ops of several steps run at once; those of untraced steps are not in the
    trace."""
    mine = timeline.events[timeline.events["stream"] == 0]
    if not len(mine):
        return np.zeros(0)
    return np.array(
        [mine["start_s"].min()]
        + [mine["end_s"][mine["step"] == step].max() for step in np.unique(mine["step"])]
    )


def counted_period(timeline: Timeline) -> tuple[float, float]:
    """Start and end of the period that counts: all traced steps but the first, because the trace
    lacks the ops of the step before, which ran beside it. A single traced step counts itself."""
    at = step_boundaries(timeline)
    return (at[min(1, len(at) - 2)], at[-1]) if len(at) else (0.0, 0.0)


def _inside(period: tuple[float, float], start, end):
    """Seconds of each span from start to end that lie in the period."""
    return np.maximum(np.minimum(end, period[1]) - np.maximum(start, period[0]), 0)


def stream_times(timeline: Timeline) -> list[StreamTimes]:
    """How each stream spent the counted period. Ops are cut off at its ends."""
    events = timeline.events
    period = counted_period(timeline)
    window = max(period[1] - period[0], 1e-12)
    out = []
    for i, name in enumerate(timeline.streams):
        mine = events[events["stream"] == i]
        busy, waited = (
            _inside(period, mine["start_s"], mine["end_s"]),
            _inside(period, mine["start_s"] - mine["wait_s"], mine["start_s"]),
        )
        out.append(
            StreamTimes(
                name, int((busy > 0).sum()), busy.sum(), busy.sum() / window, waited.sum() / window
            )
        )
    return out


def largest_ops(timeline: Timeline, n: int = 8) -> list[tuple[str, str, float]]:
    """(stream, op name, seconds) of the n op names that took most of the counted period, the
    largest first. Ops are cut off at its ends."""
    events, totals = timeline.events, {}
    busy = _inside(counted_period(timeline), events["start_s"], events["end_s"])
    for stream, name, seconds in zip(events["stream"], events["name"], busy):
        key = (timeline.streams[stream], str(name))
        totals[key] = totals.get(key, 0.0) + seconds
    ranked = sorted(totals.items(), key=lambda item: -item[1])[:n]
    return [(stream, name, float(seconds)) for (stream, name), seconds in ranked]


def stream_table(timeline: Timeline):
    """stream_times() as a table for rich."""
    from rich.table import Table

    table = Table("stream", "ops", "busy", "waiting", "idle", title="where the time went")
    for column in table.columns[1:]:
        column.justify = "right"
    first, last = counted_period(timeline)
    table.caption = f"of {last - first:.3f} s of whole steps"
    for s in stream_times(timeline):
        table.add_row(
            s.name,
            str(s.n_ops),
            f"{100 * s.busy:.1f}%",
            f"{100 * s.waiting:.1f}%",
            f"{100 * s.idle:.1f}%",
        )
    return table


def _draw_memory(axes, name: str, at_s, used, last: float) -> None:
    """The bytes in use over time, as steps, up to the end of the trace."""
    unit, divisor = ("GiB", 2**30) if used.max() >= 2**30 else ("MiB", 2**20)
    axes.fill_between(
        np.append(at_s, last), np.append(used, used[-1]) / divisor, step="post", color="0.6"
    )
    axes.set_ylim(0, 1.3 * used.max() / divisor)
    axes.set_ylabel(f"{name},\n{unit}")
    axes.text(
        *(0.995, 0.93),
        f"at most {used.max() / divisor:.4g} {unit} in use",
        ha="right",
        va="top",
        fontsize=9,
        transform=axes.transAxes,
    )
    axes.grid(alpha=0.3)


def plot(timeline: Timeline, path, title: str = "") -> None:
    """Draw the timeline: a row for each stream, coloured by the kind of op, from the start of the
    first traced step on. Grey is time that a stream still spent on earlier steps. Beneath, where
    the trace has it: the memory of each arena that ops used. ValueError: the trace has no op."""
    if not len(timeline.events):
        raise ValueError("the trace has no op: there is nothing to draw")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {
        "gemm": "tab:blue",
        "attention": "tab:cyan",
        "elementwise": "tab:green",
        "copy": "tab:orange",
        "optimizer": "tab:red",
        "io": "tab:purple",
        "other": "tab:gray",
    }
    events, at = timeline.events, step_boundaries(timeline)
    first = at[0] if len(at) else events["start_s"].min()
    last = events["end_s"].max() - first
    streams_height = 1.6 + 0.6 * len(timeline.streams)
    figure, all_axes = plt.subplots(
        1 + len(timeline.memory),
        figsize=(14, streams_height + 1.6 * len(timeline.memory)),
        height_ratios=[streams_height] + [1.6] * len(timeline.memory),
        sharex=True,
        squeeze=False,
        constrained_layout=True,
    )
    axes = all_axes[0, 0]
    earlier = None
    for i in range(len(timeline.streams)):
        on_stream = events[events["stream"] == i]
        for op_class, colour in colours.items():
            mine = on_stream[(on_stream["op_class"] == op_class) & (on_stream["end_s"] > first)]
            start = np.maximum(mine["start_s"], first) - first
            axes.broken_barh(
                list(zip(start, mine["end_s"] - first - start)), (i - 0.4, 0.8), facecolors=colour
            )
        # until the stream came to its first traced op
        before = (
            (on_stream["start_s"] - on_stream["wait_s"]).min() - first if len(on_stream) else 0.0
        )
        if before > 0:
            earlier = axes.broken_barh(
                [(0, before)], (i - 0.4, 0.8), facecolors="0.92", hatch="//", edgecolor="0.8"
            )
    for border in at - first:
        axes.axvline(border, color="black", linewidth=1, linestyle="--")
    for step, begin, end in zip(np.unique(events["step"]), at - first, at[1:] - first):
        axes.text((begin + end) / 2, -0.5, f"step {step + 1}", ha="center", va="bottom", fontsize=9)
    present = [c for c in colours if (events["op_class"] == c).any()]
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[c]) for c in present] + (
        [earlier] if earlier else []
    )
    figure.legend(
        handles=handles,
        labels=present + ["earlier steps, not traced"] * (earlier is not None),
        loc="outside lower center",
        ncols=max(1, len(handles)),
        frameon=False,
    )
    axes.set_xlim(0, last)
    axes.set_ylim(-0.5, len(timeline.streams) - 0.5)
    axes.set_yticks(range(len(timeline.streams)), timeline.streams)
    axes.invert_yaxis()
    for below, (name, (at_s, used)) in zip(all_axes[1:, 0], timeline.memory.items()):
        _draw_memory(below, name, at_s - first, used, last)
        for border in at - first:
            below.axvline(border, color="black", linewidth=1, linestyle="--")
    all_axes[-1, 0].set_xlabel("seconds")
    axes.set_title(title, loc="left", pad=18)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.trace",
        description="Print how each stream of a trace spent its time.",
    )
    parser.add_argument("timeline", help="a timeline.json")
    parser.add_argument("--png", metavar="FILE", help="write the timeline as a picture")
    args = parser.parse_args()
    try:
        timeline = load(args.timeline)
        if args.png:
            plot(timeline, args.png, args.timeline)
    except (OSError, ValueError) as exc:
        print(f"penstock.trace: {one_line(str(exc))}", file=sys.stderr)
        return 2
    from rich.console import Console

    Console().print(Printable(stream_table(timeline)))
    for stream, name, seconds in largest_ops(timeline):
        print(printable(f"{stream:10} {name:28} {seconds:8.3f} s"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
