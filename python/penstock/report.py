"""The command `penstock report`: a run as one HTML page that needs no other file and no network, or
several runs as the rows of a recipe table.

penstock report RUN [-o report.html]
penstock report --recipe-table RUN... [--window A:B | --last N] [--csv FILE] [--json FILE]

RUN is a run directory of `penstock train` or of a RunLog.
"""

from __future__ import annotations

import base64
import io
import os
import platform
import time
from collections import Counter
from html import escape
from pathlib import Path
from statistics import median

from . import command, recipe_table
from ._lib import version
from .files import DataError, open_input
from .plot import smoothed, window
from .runs import RunDirectory, column, live, other_work, sensors, several, shown, thinned
from .watch import duration, size

POINTS, SAMPLES = 2000, 50  # of a curve; newest sampled texts
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin-top: 2.5rem }
table { border-collapse: collapse } th { text-align: left; font-weight: 600 }
th, td { padding: .15rem 1.2rem .15rem 0; border-bottom: 1px solid #ddd; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto } img { width: 100%; height: auto } pre { background: #f5f5f5; padding: .8rem; overflow-x: auto }
@media (max-width: 40rem) { th, td { padding-right: .5rem } }
"""


def _svg(draw, height: float, steps: tuple[float, float]) -> str:
    """An <img> of the figure that draw(axes) fills, over `steps`. As a data URL it shares no ids with others."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, height))
    # inches of margin, the same for all charts, so that their steps lie below one another
    figure.subplots_adjust(0.9 / 9, 0.55 / height, 1 - 0.2 / 9, 1 - 0.15 / height)
    title = draw(axes)
    axes.set_xlim(*steps)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    plt.close(figure)
    data = base64.b64encode(out.getvalue()).decode()
    return f'<img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'


def _curve(rows, key: str, label: str, colour: str):
    def draw(axes):
        finite = [row for row in rows if abs(row.get(key, 0)) < float("inf")]
        steps, values = thinned(*column(finite, key), POINTS)
        axes.plot(steps, values, color=colour, linewidth=1)
        axes.set_ylim(bottom=min([0.0, *values]), top=None if any(values) else 1)
        axes.set_ylabel(label)
        return label

    return draw


def _loss(rows):
    def draw(axes):
        finite = [row for row in rows if abs(row["loss"]) < float("inf")]
        steps, values = thinned(*column(finite, "loss"), POINTS)
        each = "each step" if len(finite) == len(values) else "means of neighbouring steps"
        axes.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1, label=each)
        label = f"mean of {window(len(values)) * max(1, len(finite) // POINTS)} steps"
        axes.plot(steps, smoothed(values), color="tab:blue", linewidth=2, label=label)
        steps, values = column(rows, "val_loss")
        if values:
            axes.plot(steps, values, color="tab:red", marker="o", markersize=3, label="validation")
        axes.set_ylabel("loss, nats a token")
        axes.legend(frameon=False)
        return "loss and validation loss" if values else "loss"

    return draw


def _unit(n_bytes: float) -> tuple[str, int]:
    """The unit that suits so many bytes, and its size."""
    return ("GiB", 2**30) if n_bytes >= 2**30 else ("MiB", 2**20)


def _memory(rows, plan: dict):
    def draw(axes):
        names = ("device", "host")
        peaks = {name: thinned(*column(rows, f"{name}_peak_bytes"), POINTS) for name in names}
        caps = {name: plan.get(f"{name}_mem_bytes") or 0 for name in names}
        unit, size = _unit(max([*caps.values(), *(max(v, default=0) for _, v in peaks.values())]))
        for name, colour in zip(names, ("tab:orange", "tab:purple")):
            steps, values = peaks[name]
            axes.plot(steps, [v / size for v in values], color=colour, label=f"{name}, peak so far")
            if caps[name]:
                cap = caps[name] / size
                axes.axhline(cap, color=colour, linestyle="--", label=f"{name}, cap")
        axes.set_ylabel(f"memory, {unit}")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="center right")
        return "memory"

    return draw


def _table(rows, header=()) -> str:
    """Cells that are not text are numbers, and stand on the right."""

    def cell(value):
        if isinstance(value, str):
            return f"<td>{escape(value)}</td>"
        whole = isinstance(value, int) or abs(value) >= 1000
        text = f"{value:,.0f}" if whole else f"{value:.4g}"
        return f'<td class="n">{text}</td>'

    head = "".join(f"<th>{escape(h)}</th>" for h in header)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    table = f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"
    return f'<div class="wide">{table}</div>'


def _section(name: str, *parts: str) -> str:
    anchor = name.lower().replace(" ", "-")
    return f'<section id="{anchor}"><h2>{escape(name)}</h2>{"".join(parts)}</section>'


def _summary(run: RunDirectory) -> str:
    rows, last = run.metrics.rows, run.metrics.rows[-1]
    of = f" of {run.total_steps:,}" if run.total_steps else ""
    ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.last_time()))
    out = [
        ("state", f"{run.state()}; the last step ended at {ended}"),
        ("steps", f"{last['step'] + 1:,}{of}"),
        ("loss", f"{rows[0]['loss']:.4f} in the first step, {last['loss']:.4f} in the last"),
    ]
    steps, values = column(rows, "val_loss")
    if values:
        out.append(("validation loss", f"{values[-1]:.4f} after step {steps[-1]:,}"))
    if "consumed_tokens" in last:
        consumed = f"{last['consumed_samples']:,} samples, {last['consumed_tokens']:,} tokens"
        out.append(("consumed", consumed))
    if "elapsed_s" in last:
        out.append(("elapsed", f"{duration(last['elapsed_s'])} since the last start"))
    if "tflops" in last:
        usual = rows[2:] or rows
        tflops = median(r.get("tflops", 0) for r in usual)
        mfu = 100 * median(r.get("mfu", 0) for r in usual)
        speed = (
            f"{median(r['tokens_per_s'] for r in usual):,.0f} tokens/s, {several(last)}{tflops:.4g}"
        )
        out.append(("speed", f"{speed} TFLOP/s" + (f", MFU {mfu:.1f}%" if mfu else "")))
    if why := other_work(run.plan):
        out.append(
            ("rates", f"too low, as {why}: predictions are too slow, and MFU may be too high")
        )
    if "n_skipped" in last:
        out.append(
            ("skipped", f"{last['n_skipped']:,} steps, whose loss or gradient was not finite")
        )
    if "fp8_flushed_most" in last:
        most, all_ = (f"{100 * last[k]:.3g}%" for k in ("fp8_flushed_most", "fp8_flushed"))
        out.append(("FP8", f"{all_} of the values became 0, of one tensor {most}"))
    if "expert_load" in last:
        spread = f"load {last['expert_load']:.2f} of the mean in the worst block"
        out.append(
            ("experts", f"{spread}, {last['experts_unused']:,} without a token in the last step")
        )
    return _table(out)


def _samples(run: RunDirectory) -> str:
    body = [(f"{row['step']:,}", row["prompt"], row["text"]) for row in run.samples()[-SAMPLES:]]
    return _table(body, ("after step", "prompt", "text"))


def _predicted(run: RunDirectory) -> str:
    rows, plan = run.metrics.rows, run.plan
    usual = rows[2:] or rows  # the first steps warm caches up
    step, speed = median(r["step_s"] for r in usual), median(r["tokens_per_s"] for r in usual)
    pairs = [
        ("step, seconds", plan.get("predicted_step_s"), step),
        ("tokens/s", plan.get("predicted_tokens_per_s"), speed),
    ]
    for name in ("device", "host"):
        used, peak = plan.get(f"{name}_used_bytes", 0), rows[-1].get(f"{name}_peak_bytes", 0)
        unit, bytes_ = _unit(max(used, peak))
        pairs.append((f"{name} memory, {unit}", used / bytes_, peak / bytes_))
    expected = {"step, seconds": rows[-1].get("expected_step_s", "-")}
    body = [
        (n, p, expected.get(n, "-"), m, m / p if p else "-") for n, p, m in pairs if p is not None
    ]
    note = (
        "<p>Times are medians of the steps after the first two; memory is the peak. What is "
        "expected is simulated with the rates that the run had at its end.</p>"
    )
    return _table(body, ("", "predicted", "expected", "measured", "ratio")) + note


def _live(run: RunDirectory) -> str:
    """What the machine did while the steps ran; while_busy is of the traced steps."""
    usual = run.metrics.rows[2:] or run.metrics.rows
    busy = (run.summary() or {}).get("while_busy", {})
    body = []
    for what, key, unit, values in live(usual):
        ran = busy.get(key, 0)
        body.append((f"{what}, {unit}", median(values), min(values), max(values)))
        body[-1] += (ran * 1e-9 if ran else "-",)
    if not body:
        return "<p>The run has no such figures.</p>"
    note = (
        "<p>Of the steps after the first two. Bytes are those of the plan, over the time of the "
        "whole step; in the last column over the time in which such ops ran, in the traced "
        "steps.</p>"
    )
    return _table(body, ("", "median", "least", "most", "while they ran")) + note


def _stalls(run: RunDirectory) -> str:
    summary, plan = run.summary(), run.plan
    step, busy = plan.get("predicted_step_s") or 1, plan.get("stream_busy_s", {})
    predicted = {name: 100 * seconds / step for name, seconds in busy.items()}
    if summary is None:
        return (
            "<p>The training has not ended by itself, so that nothing was measured.</p>"
            + _table(predicted.items(), ("stream", "busy, %, predicted"))
        )
    streams = [
        (s["name"], predicted.get(s["name"], 0.0), 100 * s["busy"], 100 * s["wait"])
        for s in summary["streams"]
    ]
    stalls = [
        (s["stream"], s["for"], s["from"], s["planned_seconds"], s["seconds"])
        for s in summary["stalls"]
    ]
    ops = [  # runs of earlier versions have none
        (t["stream"], t["op"], t["n_ops"], t["planned_seconds"], t["seconds"])
        for t in summary.get("op_times", [])
        if t["stream"].startswith("compute")
    ]
    computed = "<p>What the devices computed, in seconds a step:</p>" + _table(
        ops, ("stream", "op", "ops a step", "predicted", "measured")
    )
    return (
        _table(streams, ("stream", "busy, %, predicted", "busy, %", "waiting, %"))
        + "<p>What the streams waited for, in seconds a step:</p>"
        + _table(stalls, ("stream", "for", "from", "predicted", "measured"))
        + (computed if ops else "")
    )


# What keys of plan.json are called
_NAMES = {
    "seq_len": "sequence length, tokens",
    "tokens_per_step": "tokens a step",
    "n_sequences": "sequences a step",
    "n_rounds": "rounds a step",
    "chunks_per_round": "chunks a round",
    "chunk_tokens": "tokens a chunk",
    "bottleneck_stream": "busiest stream",
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "update": "update",
    "x": "input of the layer",
    "qkv": "queries, keys and values before QK-norm",
    "q": "queries",
    "kv": "keys and values",
    "attn_out": "output of attention",
    "attn_proj": "output projection of attention",
    "h": "input of the MLP",
    "gate_up": "gate and up of the MLP",
    "mlp_out": "output of the MLP",
}


def _plan(plan: dict) -> str:
    def runs(units):
        """Neighbouring units that are placed alike, as one line."""
        first = 0
        for i in range(1, len(units) + 1):
            if i == len(units) or units[i] != units[first]:
                unit = units[first]
                names = f"{first}" if i - first == 1 else f"{first} to {i - 1}"
                # frozen units have no gradient, no state and no update
                yield (names, unit["elements"], *(unit.get(k, "-") for k in kinds))
                first = i

    kinds = ("parameters", "gradients", "optimizer_state", "update")
    caps = [
        (
            name,
            size(cap) if (cap := plan[f"{name}_mem_bytes"]) else "none",
            size(plan[f"{name}_used_bytes"]),
        )
        for name in ("device", "host")
    ]
    cut = [
        (_NAMES.get(key, key), plan[key])
        for key in ("seq_len", "tokens_per_step", "n_sequences", "n_rounds", "chunks_per_round")
        + ("chunk_tokens", "recipe", "optimizer", "bottleneck_stream")
    ]
    saved = Counter()
    for chunks in plan["layers"]:
        for chunk in chunks:
            saved.update((name, where) for name, where in chunk.items())
    policies = [(_NAMES.get(name, name), where, n) for (name, where), n in sorted(saved.items())]
    return (
        _table(caps, ("memory", "cap", "the plan takes"))
        + "<h3>Batch</h3>"
        + _table(cut)
        + "<h3>Placement by unit</h3>"
        + _table(runs(plan["units"]), ("units", "elements of each", *(_NAMES[k] for k in kinds)))
        + "<h3>Saved activations</h3>"
        + _table(policies, ("tensor", "place", "of layers and chunks"))
    )


def _machine(plan: dict) -> str:
    import matplotlib

    hardware = plan.get("hardware", {})
    why = f"; {why}" if (why := other_work(plan)) else ""
    return _table(
        [
            ("trained on", hardware.get("name", "unknown")),
            ("device", hardware.get("device_name") or "no GPU"),
            ("threads", hardware.get("n_threads", 0)),
            ("rates", f"{'measured' if hardware.get('measured') else 'estimated'}{why}"),
            ("report written by", f"Penstock {version()}, Python {platform.python_version()}, "
             f"matplotlib {matplotlib.__version__} on {platform.platform()}"),
        ]
    )  # fmt: skip


def _command(run: RunDirectory) -> str:
    path = run.path / "run.toml"
    try:
        with open_input(path, "r", encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return "<p>The training was started from Python.</p>"
    except (OSError, ValueError) as exc:
        raise DataError(f"{path} cannot be read: {exc}") from exc
    line = f"penstock train --config {path}"
    return f"<pre>{escape(line)}</pre><p>The file:</p><pre>{escape(text)}</pre>"


def page(run: RunDirectory) -> str:
    """The page. DataError: the run has no step yet, or plan.json lacks a part."""
    rows = run.metrics.rows
    if not rows:
        raise DataError(f"{run.metrics.path} is empty: the run has completed no step")
    plots = [(_loss(rows), 4)] + [
        (_curve(rows, *curve), 2.2)
        for curve in (
            ("grad_norm", "gradient norm", "tab:brown"),
            ("lr", "learning rate", "tab:orange"),
            ("tokens_per_s", "tokens / s", "tab:green"),
        )
    ]
    powered, of = sensors(rows, "gpu_power_w")
    if powered:
        plots.append((_curve(powered, "gpu_power_w", f"GPU power{of}, W", "tab:red"), 2.2))
    plots.append((_memory(rows, run.plan), 2.6))
    first, last = rows[0]["step"] + 1, rows[-1]["step"] + 1
    edge = max(0.5, 0.01 * (last - first))
    steps = first - edge, last + edge
    with shown(run):
        sections = [
            _section("Summary", _summary(run)),
            _section("Curves", *(_svg(*plot, steps) for plot in plots)),
            *([_section("Samples", _samples(run))] if run.samples() else []),
            _section("Predicted and measured", _predicted(run)),
            _section("Links and GPU", _live(run)),
            _section("Streams and stalls", _stalls(run)),
            _section("Plan", _plan(run.plan) if run.plan else "<p>There is no plan.json.</p>"),
            _section("Command", _command(run)),
            _section("Machine and versions", _machine(run.plan)),
        ]
    name = escape(str(run.path.resolve().name))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>{name}</title><style>{_STYLE}</style></head>'
        f"<body><h1>{name}</h1>{''.join(sections)}</body></html>\n"
    )


def _replace(out: Path, text: str, option: str) -> None:
    """Write a file as a whole, or leave what is there. DataError, OSError."""
    if out.is_dir():
        raise DataError(f"{option} {out} is a directory: give a file")
    if not out.parent.is_dir():
        raise DataError(f"{option} {out}: there is no directory {out.parent}")
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="replace")
        os.replace(part, out)
    except OSError as exc:
        part.unlink(missing_ok=True)
        raise OSError(f"{out} cannot be written: {exc.strerror}") from exc


def _page(args) -> int:
    if len(args.run) > 1:
        raise DataError(f"a page shows one run, {len(args.run)} given: give one, or --recipe-table")
    for option in ("window", "last", "csv", "json"):
        if getattr(args, option) is not None:
            raise DataError(f"--{option} goes with --recipe-table")
    run = RunDirectory(args.run[0])
    run.refresh()
    out = Path(args.output) if args.output else run.path / "report.html"
    _replace(out, page(run), "--output")
    print(out)
    return command.OK


def _recipe_table(args) -> int:
    if args.output:
        raise DataError("--output is the page's: --recipe-table writes --csv FILE and --json FILE")
    if args.last is not None and args.last < 1:
        raise DataError(f"--last {args.last}: give 1 or more steps")
    window = recipe_table.parse_window(args.window) if args.window is not None else None
    rows = []
    for path in args.run:
        run = RunDirectory(path)
        run.refresh()
        with shown(run):
            rows.append(recipe_table.row_of(run, window, args.last))
    for option, text_of in (("csv", recipe_table.csv_of), ("json", recipe_table.json_of)):
        if getattr(args, option) is not None:
            _replace(Path(getattr(args, option)), text_of(rows), f"--{option}")
    print(recipe_table.text_of(rows, window is None and args.last is None))
    return command.OK


def main(argv: list[str]) -> int:
    parser = command.Parser(
        prog="penstock report",
        description="Write a run as one self-contained HTML page, or print several runs as the "
        "rows of a recipe table.",
    )
    parser.add_argument(
        "run", metavar="RUN", nargs="+", help="the run directory (--run-dir, or --out)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="default: RUN/report.html")
    parser.add_argument(
        "--recipe-table",
        action="store_true",
        help="print speed, its deviation, days to 10^12 tokens and energy a token; no page",
    )
    window = parser.add_mutually_exclusive_group()
    window.add_argument(
        "--window",
        metavar="A:B",
        help="of --recipe-table: the steps that count, from 1, both included (default: all but "
        f"the first {recipe_table.WARM_UP} of each start)",
    )
    window.add_argument("--last", metavar="N", type=int, help="the last N steps count")
    parser.add_argument("--csv", metavar="FILE", help="write the table's figures as CSV too")
    parser.add_argument("--json", metavar="FILE", help="write them as JSON too")
    args = parser.parse_args(argv)
    return command.run(
        "penstock report", lambda: _recipe_table(args) if args.recipe_table else _page(args)
    )
