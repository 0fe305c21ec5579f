"""Heatmaps of a sweep: a picture for each model and sequence length, with tokens/s, TFLOP/s, MFU
and HFU over the caps, measured beside predicted where a case was measured."""

import sys
from pathlib import Path

from machine import ROOT
from results import FAILED, INFEASIBLE, OK

# column, title, figures in the cells, factor
METRICS = (
    ("tokens_per_s", "tokens / s", "{:,.0f}", 1),
    ("tflops", "model TFLOP / s", "{:.3g}", 1),
    ("mfu", "MFU, %", "{:.1f}", 100),
    ("hfu", "HFU, %", "{:.1f}", 100),
)
# what a picture is of, and the part of its name
SUBJECT = ("machine", "model", "seq_len", "tokens_per_step", "recipe", "gpus", "options")
NO_DEVICE = "no GPU"


def device_of(row: dict) -> str:
    """The GPU of a row's machine."""
    return row.get("machine", "").split(";")[0].split(",")[0].strip() or NO_DEVICE


def subjects(rows: list[dict]) -> dict:
    """The rows of each picture."""
    found: dict = {}
    for row in rows:
        key = (device_of(row), *(row.get(name) for name in SUBJECT[1:]))
        found.setdefault(key, []).append(row)
    return found


def names(keys: list[tuple]) -> list[str]:
    """A file name for each picture: model and sequence, and whatever else tells pictures apart."""
    varies = [i for i in range(len(SUBJECT)) if len({key[i] for key in keys}) > 1]
    parts = sorted({1, 2, *varies}, key=lambda i: (i == 0, i))
    texts = ["-".join(str(key[i]) for i in parts if key[i]) for key in keys]
    return ["".join(c if c.isalnum() or c in "-." else "-" for c in text) for text in texts]


def cell_of(row: dict | None, column: str, form: str, factor: float) -> tuple:
    """A cell's value and text. No value: no plan fits, or the case failed."""
    if row is None:
        return None, ""
    if row["status"] == OK:
        value = row.get(column)
        return (None, "?") if value is None else (value * factor, form.format(value * factor))
    if row["status"] == FAILED:
        return None, "failed"
    return None, row.get("reason", "").replace(", ", "\n").replace(" ", "\n", 1)


def grid_of(rows: list[dict], column: str, form: str, factor: float) -> tuple:
    """The device caps, the host caps, and cells as penstock.plot.draw_cells() takes them."""
    columns, lines = (sorted({r[n] for r in rows}, key=lambda gib: gib or 1e9)
                      for n in ("device_gib", "host_gib"))  # fmt: skip
    at = {(r["device_gib"], r["host_gib"]): r for r in rows}
    cells = [[cell_of(at.get((d, h)), column, form, factor) for d in columns] for h in lines]
    return columns, lines, cells


def panels_of(rows: list[dict]) -> list[tuple]:
    """(title, prefix of the columns, rows) of each side: measured, predicted."""
    measured = [r for r in rows if r["mode"] == "measured"]
    planned = {(r["device_gib"], r["host_gib"]): r for r in measured}
    planned |= {(r["device_gib"], r["host_gib"]): r for r in rows if r["mode"] == "predicted"}
    sides = [("measured", "", measured)] if measured else []
    return [*sides, ("predicted", "predicted_", list(planned.values()))]


def draw(rows: list[dict], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from penstock.plot import draw_cells

    sides = panels_of(rows)
    columns, lines, _ = grid_of(rows, "mfu", "", 1)
    down = len(METRICS) // (1 if len(sides) == 2 else 2)
    size = (1.6 + 0.72 * len(columns), 1.2 + 0.42 * len(lines))
    figure, axes = plt.subplots(
        down,
        2,
        figsize=(max(8, 2 * size[0]), down * size[1] + 0.6),
        constrained_layout=True,
        squeeze=False,
    )
    flat = iter(axes.flat)
    for column, label, form, factor in METRICS:
        grids = [grid_of(side, prefix + column, form, factor) for _, prefix, side in sides]
        values = [v for _, _, cells in grids for line in cells for v, _ in line if v is not None]
        limits = (min(values), max(values)) if values else (0, 1)
        pair = [next(flat) for _ in sides]
        for at, (side, _, _), (device, host, cells) in zip(pair, sides, grids):
            image = draw_cells(at, device, host, cells, limits)
            at.set_title(f"{label}, {side}", fontsize=9)
            at.set_ylabel("host memory, GiB", fontsize=8)
        bar = figure.colorbar(image, ax=pair)
        bar.formatter.set_scientific(False)
        bar.formatter.set_useOffset(False)
        bar.ax.tick_params(labelsize=8)
    for at in axes[-1]:
        at.set_xlabel("device memory, GiB", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def title_of(key: tuple, rows: list[dict]) -> str:
    device, model, seq_len, tokens, recipe, gpus, options = key
    said = f"{device}: {model}, {seq_len:,} tokens a sequence, {tokens:,} a step, {recipe}"
    said += f", {gpus} GPUs" if gpus > 1 else ""
    said += f", {options}" if options else ""
    if any(r["status"] == INFEASIBLE for r in rows):
        said += "\ngrey: no plan fits, and the least memory with which one does"
    return said


def write(rows: list[dict], folder: Path) -> list[Path]:
    """A picture for each subject with two cells at least. ImportError: matplotlib or the package is
    missing here."""
    sys.path.insert(0, str(ROOT / "python"))
    found = {
        key: of
        for key, of in subjects(rows).items()
        if len({(r["device_gib"], r["host_gib"]) for r in of}) > 1
    }
    paths = [folder / f"{name}.png" for name in names(list(found))]
    for path, (key, of) in zip(paths, found.items()):
        draw(of, title_of(key, of), path)
    return paths
