"""The command `penstock watch`: a run in the terminal, live.

penstock watch RUN          until Ctrl-C, or until the run ends
penstock watch RUN --once   one frame

RUN is a run directory of `penstock train` or of a RunLog.
"""

from __future__ import annotations

import io
import re
import sys
import time
from statistics import median

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from . import command
from .runs import (
    CRASHED,
    FINISHED,
    RUNNING,
    RunDirectory,
    column,
    live,
    other_work,
    several,
    shown,
    thinned,
)
from .terminal import Printable, raw

RECENT = 50  # steps whose median speed is shown
SLOW = 10  # a step that takes so many times the usual time is reported
_STYLE = {RUNNING: "green", FINISHED: "blue", CRASHED: "red"}


def duration(seconds: float) -> str:
    """As the log line writes it: 1h02m, 3m20s, 12s."""
    if not abs(seconds) < float("inf"):
        return "?"
    s = max(0, round(seconds))
    if s >= 86400:
        return f"{s // 86400}d{s % 86400 // 3600:02}h"
    if s >= 3600:
        return f"{s // 3600}h{s % 3600 // 60:02}m"
    return f"{s // 60}m{s % 60:02}s" if s >= 60 else f"{s}s"


def size(n_bytes: float) -> str:
    """As the log line writes it: 24.0 MiB."""
    unit = 0
    while n_bytes >= 1024 and unit < 4:
        n_bytes, unit = n_bytes / 1024, unit + 1
    return f"{n_bytes:.{1 if unit else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def chart(curves, width: int, height: int) -> Text:
    """A diagram of curves (steps, values, style) in Braille dots, 2 by 4 a character; a later curve
    covers an earlier one. rich has no diagrams."""
    label = 9  # characters, as of 1.235e+06
    n = max(4, 2 * (width - label - 1))
    finite = []
    for xs, ys, style in curves:
        xs, ys = np.array(thinned(xs, ys, n), float)
        if np.isfinite(ys).any():
            finite.append((xs[np.isfinite(ys)], ys[np.isfinite(ys)], style))
    if not finite:
        return Text("no value yet", style="dim")
    x0, x1 = min(xs[0] for xs, _, _ in finite), max(xs[-1] for xs, _, _ in finite)
    y0, y1 = min(ys.min() for _, ys, _ in finite), max(ys.max() for _, ys, _ in finite)
    bits = np.array([[0x01, 0x02, 0x04, 0x40], [0x08, 0x10, 0x20, 0x80]])
    masks, styles = np.zeros((height, n // 2), int), {}
    for xs, ys, style in finite:
        at = x0 + (x1 - x0) * np.arange(n) / (n - 1)
        ends = np.searchsorted(at, [xs[0], xs[-1]])  # a single value has its dot too
        drawn = np.arange(min(ends[0], n - 1), min(max(ends[1], ends[0]), n - 1) + 1)
        scaled = (y1 - np.interp(at, xs, ys)) / (y1 - y0 or 1) * (4 * height - 1)
        rows = np.rint(scaled[drawn]).astype(int)
        for c, row, before in zip(drawn, rows, [rows[0], *rows]):
            for r in range(min(row, before), max(row, before) + 1):
                masks[r // 4, c // 2] |= bits[c % 2, r % 4]
                styles[r // 4, c // 2] = style
    out = Text(no_wrap=True)
    for r, line in enumerate(masks):
        value = {0: f"{y1:.4g}", height - 1: f"{y0:.4g}"}.get(r, "")
        out.append(f"{value:>{label}} ", style="dim")
        for c, mask in enumerate(line):
            out.append(chr(0x2800 + mask), style=styles.get((r, c), ""))
        out.append("\n")
    left, right = f"{x0:.0f}", f"step {x1:.0f}"
    out.append(f"{' ' * (label + 1)}{left}{right:>{max(0, n // 2 - len(left))}}", style="dim")
    return out


def _printable(text: str) -> str:
    """Without what a terminal obeys: a model may have learned any character."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    return grid


def _state(run: RunDirectory, now: float, short: bool = False) -> Text:
    state, rows, last = run.state(), run.metrics.rows, run.last_time()
    text = Text(state, style=f"bold {_STYLE.get(state, 'yellow')}")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last))
    passed = duration(now - last)
    since = f"for {passed}" if short else f"since {when}, {passed} ago"
    if state == CRASHED:
        text.append(f": process {run.process()} is gone; nothing has come {since}", "default")
    elif state == RUNNING and not rows:
        text.append(": no step has ended yet", "default")
    elif state == RUNNING:
        usual = median(row["step_s"] for row in rows[-RECENT:])
        if now - last > max(30, SLOW * usual):
            text.append(f": no step has ended {since}", "bold red")
    else:
        ended = f"{passed} ago" if short else f"at {when}, {passed} ago"
        text.append(f": the last step ended {ended}", "default")
    return text


def _progress(run: RunDirectory, row: dict, now: float, width: int, short: bool) -> Table:
    """short: without what the other lines and the figures imply."""
    grid, total, done = _grid(), run.total_steps, row["step"] + 1
    grid.add_row("state", _state(run, now, short))
    line = f"{done:,} of {total:,}, {100 * done / total:.1f}%" if total else f"{done:,}"
    grid.add_row("step", line)
    if total and not short:
        bar = max(8, min(50, width - 22))
        grid.add_row("", ProgressBar(total=total, completed=done, width=bar))
    times = f"elapsed {duration(row['elapsed_s'])}" if "elapsed_s" in row else ""
    if "eta_s" in row and run.state() == RUNNING:
        times += f", ETA {duration(row['eta_s'])}"
    if times:
        grid.add_row("time", times)
    if "consumed_tokens" in row and not short:
        consumed = f"{row['consumed_samples']:,} samples, {row['consumed_tokens']:,} tokens"
        grid.add_row("consumed", consumed)
        grid.add_row("global batch", f"{row['samples']:,} samples, {row['tokens']:,} tokens")
    grid.add_row("learning rate", f"{row['lr']:.3e}")
    return grid


def _numbers(run: RunDirectory, rows: list[dict], short: bool, width: int) -> Table:
    """The last step's numbers, and medians of the last steps' times. short: without the machine's."""
    grid, row, recent = _grid(), rows[-1], rows[-RECENT:]
    grid.add_row("loss", f"{row['loss']:.4f}")
    steps, values = column(rows, "val_loss")
    if values:
        least = "" if short and width < 50 else f", least {min(values):.4f}"
        grid.add_row("validation", f"{values[-1]:.4f} at step {steps[-1]}{least}")
    grid.add_row("grad norm", f"{row['grad_norm']:.4g}")
    if "expert_load" in row:
        unused = row["experts_unused"]
        grid.add_row("experts", f"load {row['expert_load']:.2f} of the mean, {unused:,} unused")
    if row.get("n_skipped"):
        grid.add_row("skipped", f"{row['n_skipped']:,} steps that were not finite")
    grid.add_row("tokens/s", f"{median(r['tokens_per_s'] for r in recent):,.0f}")
    if "tflops" in row:
        grid.add_row("TFLOP/s", f"{several(row)}{median(r.get('tflops', 0) for r in recent):.4g}")
    if row.get("mfu"):
        grid.add_row("MFU", f"{100 * median(r.get('mfu', 0) for r in recent):.1f}%")
    measured = median(r["step_s"] for r in recent)
    predicted = row.get("predicted_step_s") or run.plan.get("predicted_step_s")
    text = f"{measured:.3f} s"
    if predicted:
        ratio = f"{measured / predicted:.2f}"
        narrow = short and width < 50
        text += f", {ratio}x predicted" if narrow else f", predicted {predicted:.3f} s ({ratio}x)"
    grid.add_row("step time", text)
    if not short and (expected := row.get("expected_step_s")):
        grid.add_row("", f"{expected:.3f} s expected by the rates of this run")
    if not (short and width < 50) and (why := other_work(run.plan)):
        grid.add_row("rates", f"too low: {why}")
    for what, _, unit, values in [] if short else live(recent):
        grid.add_row(what, f"{median(values):.4g} {unit}")
    return grid


def _memory(run: RunDirectory, row: dict, width: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name in ("device", "host"):
        used = row.get(f"{name}_peak_bytes")
        if used is None:
            continue
        planned = run.plan.get(f"{name}_used_bytes", 0)
        cap = run.plan.get(f"{name}_mem_bytes", 0)
        most = cap or planned or used or 1
        bar = ProgressBar(
            total=most,
            completed=min(used, most),
            width=16,
            complete_style="red" if used > most else "cyan",
            finished_style="cyan",
        )
        kind = " (cap)" if cap else " (plan)" if planned else ""
        text = f"{size(used)} of {size(most)}{kind}"
        grid.add_row(*(Text(name, "dim"), bar, text) if width >= 60 else (Text(name, "dim"), text))
    return grid


def _streams(run: RunDirectory) -> tuple:
    """What the streams did at the end of the run; what the plan predicts until then."""
    summary, grid = run.summary(), Table.grid(padding=(0, 2))
    if summary:
        grid.add_row(*(Text(t, "dim") for t in ("stream", "busy", "waiting")))
        for s in summary["streams"]:
            grid.add_row(Text(s["name"]), f"{100 * s['busy']:.0f}%", f"{100 * s['wait']:.0f}%")
        stalls = [s for s in summary["stalls"] if s["stream"].startswith("compute")]
        stalls.sort(key=lambda s: -s["seconds"])
        waits = [
            Text(f"{s['stream']} waits {s['seconds']:.3f} s a step for {s['for']}")
            for s in stalls[:3]
        ]
        return Group(grid, *waits), "streams: measured"
    step, busy = run.plan.get("predicted_step_s") or 1, run.plan.get("stream_busy_s", {})
    grid.add_row(*(Text(t, "dim") for t in ("stream", "busy")))
    for name, seconds in busy.items():
        grid.add_row(Text(name), f"{100 * seconds / step:.0f}%")
    return grid, "streams: predicted"


def frame(run: RunDirectory, width: int, now: float, height: int | None = None):
    """The dashboard of the rows that were read, in at most height lines; None: with every part.
    DataError: a file of the run lacks a part."""
    with shown(run):
        return _frame(run, width, now, height)


def _panel(content, title, width: int) -> Panel:
    return Panel(content, title=title, title_align="left", width=width)


def _lines(block, width: int) -> int:
    return len(Console(width=width, file=io.StringIO()).render_lines(block))


def _curves(rows: list[dict], width: int, lines: int) -> list[Panel]:
    """The charts that fit into so many lines: loss in 2 to 10, and tokens/s in 4."""
    out, edge = [], 3  # lines of a chart's border and axis
    loss = [(*column(rows, "loss"), "cyan")]
    validation = column(rows, "val_loss")
    if validation[0]:
        loss.append((*validation, "bold yellow"))
    title = "loss" + ", validation loss (yellow)" * bool(validation[0])
    speed = 4 + edge if lines >= 2 * edge + 4 + 6 else 0
    if (rows_of_loss := min(10, lines - speed - edge)) >= 2:
        out.append(_panel(chart(loss, width - 4, rows_of_loss), title, width))
    if speed:
        values = [(*column(rows, "tokens_per_s"), "green")]
        out.append(_panel(chart(values, width - 4, 4), "tokens/s", width))
    return out


def _fitting(blocks: list[Panel], width: int, lines: int) -> tuple[list[Panel], int]:
    """The first blocks that fit into so many lines, and the lines that are left."""
    kept = []
    for block in blocks:
        takes = _lines(block, width)
        if takes > lines:
            break
        kept.append(block)
        lines -= takes
    return kept, lines


def _samples(run: RunDirectory, width: int) -> list[Panel]:
    out = []
    for row in run.samples()[-1:]:
        prompt, text = row["prompt"][-200:], row["text"][:400]
        parts = (_printable(part.replace("\n", "\u21b5")) for part in (prompt, text))
        shown = Text.assemble((next(parts), "dim"), next(parts))
        out.append(_panel(shown, f"sampled after step {row['step']}", width))
    return out


LEAST_CHART = 6  # lines that figures but the first leave to the curve


def _frame(run: RunDirectory, width: int, now: float, height: int | None):
    rows, name = run.metrics.rows, Text(str(run.path))
    if not rows:
        return _panel(_state(run, now), name, width)
    short, wide = height is not None and height < 30, width >= 100
    left = min(width // 2, 90) if wide else width
    right = width - left if wide else width
    top = _panel(_progress(run, rows[-1], now, width, short), name, width)
    recent = f"last {min(RECENT, len(rows))} steps"
    beside = short and not wide and width >= 78  # memory is
    if beside:
        right = 50  # fits what the step took beside the prediction
    numbers = _panel(_numbers(run, rows, short, right), recent, right)
    streams, label = _streams(run)
    memory = width - right if beside else right
    more = [
        _panel(_memory(run, rows[-1], memory), "memory at its peak", memory),
        _panel(streams, label, width if beside else right),
    ]
    free = (height or 10**6) - _lines(top, width)
    if wide:
        body, curves = Table.grid(), _curves(rows, left, free)
        tables = [numbers, *_fitting(more, right, free - _lines(numbers, right))[0]]
        body.add_row(Group(*curves), Group(*tables))
        free -= _lines(body, width)
        parts = [body]
    else:
        if beside:
            pair = Table.grid()
            pair.add_row(numbers, more.pop(0))
            numbers = pair
        free -= _lines(numbers, width)
        tables, free = _fitting(more, width, free - LEAST_CHART)
        curves = _curves(rows, width, free + LEAST_CHART)
        free += LEAST_CHART - sum(_lines(curve, width) for curve in curves)
        parts = [numbers, *tables, *curves]
    return Group(top, *parts, *_fitting(_samples(run, width), width, free)[0])


def follow(run: RunDirectory, console: Console, every_s: float) -> None:
    """Draw until the run ends."""
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        going = True
        while going:
            going = run.state() == RUNNING  # asked first: the last rows are then read
            run.refresh()
            shown_frame = frame(run, console.width, time.time(), console.height)
            live.update(Printable(shown_frame), refresh=True)
            time.sleep(every_s if going else 0)


def main(argv: list[str]) -> int:
    parser = command.Parser(
        prog="penstock watch", description="Show a run in the terminal while it trains."
    )
    parser.add_argument("run", metavar="RUN", help="the run directory (--run-dir, or --out)")
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    args = parser.parse_args(argv)

    def work() -> int:
        run = RunDirectory(args.run)
        run.refresh()
        console = Console(file=raw(sys.stdout), highlight=False)
        if args.once:
            console.print(Printable(frame(run, console.width, time.time())))
            return command.OK
        try:
            follow(run, console, 1.0)
        except KeyboardInterrupt:  # the way to leave the dashboard
            pass
        return command.OK

    return command.run("penstock watch", work)
