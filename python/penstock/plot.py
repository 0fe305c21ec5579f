"""Draws the loss curve of a run, or a grid of plans.

python -m penstock.plot metrics.jsonl loss.png    a run directory's metrics.jsonl
python -m penstock.plot grid.json grid.png        what `penstock plan --grid-device ... --json`
                                                  prints
"""

import json
import sys

from .files import open_input
from .terminal import one_line


def read_metrics(path) -> list[dict]:
    """The objects of a metrics.jsonl, or the one object of a grid. ValueError names a line that is
    no object."""
    out = []
    with open_input(path, "r", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                out.append(json.loads(line))
            except json.JSONDecodeError as exc:
                raise ValueError(f"{path}: line {number} is not JSON: {exc}") from exc
            if not isinstance(out[-1], dict):
                raise ValueError(
                    f"{path}: line {number} is JSON, but not an object of a metrics.jsonl or a grid"
                )
    if not out:
        raise ValueError(f"{path} is empty: the run has completed no step")
    return out


def numbers(objects: list[dict], key: str, source) -> list[float]:
    """A field of every step. null, which stands for a value that is not finite, becomes NaN.
    ValueError names a step without the field."""
    for i, o in enumerate(objects):
        if (
            key not in o
            or isinstance(o[key], bool)
            or not isinstance(o[key], (int, float, type(None)))
            or (o[key] is not None and not abs(o[key]) < 2**1023)
        ):
            raise ValueError(
                f"{source}: line {i + 1} has no number {key}: this is no metrics.jsonl of penstock "
                "train"
            )
    return [float("nan") if o[key] is None else o[key] for o in objects]


def smoothed(values: list[float]) -> list[float]:
    """The mean over a window around each step. At both ends, where a window around the step would
    be smaller, the line that fits the first or last window best: it does not lag, and the curve
    does not end on one step's value."""
    n, w = len(values), min(window(len(values)), len(values))
    out = []
    for i in range(n):
        first = min(max(i - w // 2, 0), n - w)
        part, centre = values[first : first + w], (w - 1) / 2
        off = i - first - centre  # of the step from the window's middle; 0 but at the ends
        slope = 0.0
        if off:
            slope = sum((k - centre) * v for k, v in enumerate(part)) * 12 / (w * (w * w - 1))
        out.append(sum(part) / w + off * slope)
    return out


def window(n: int) -> int:
    """The window of smoothed() for n steps: a twentieth of them, at least 5, and odd."""
    return max(5, n // 20) | 1


def plot_loss(metrics: list[dict], path, title: str = "", source="metrics") -> None:
    """Draw the loss of each step in nats a token, and smoothed, and the loss of validations; below
    it the learning rate and the tokens per second."""
    steps, loss, rate, speed = (
        numbers(metrics, key, source) for key in ("step", "loss", "lr", "tokens_per_s")
    )
    validated = [m for m in metrics if "val_loss" in m]
    val_steps, val_loss = (numbers(validated, key, source) for key in ("step", "val_loss"))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [step + 1 for step in steps]
    figure, (upper, middle, lower) = plt.subplots(
        3, 1, figsize=(9, 7), sharex=True, height_ratios=[4, 1, 1], constrained_layout=True
    )
    upper.plot(steps, loss, color="tab:blue", alpha=0.35, linewidth=1, label="each step")
    upper.plot(
        steps,
        smoothed(loss),
        color="tab:blue",
        linewidth=2,
        label=f"mean of {window(len(loss))} steps",
    )
    if validated:
        upper.plot(
            [step + 1 for step in val_steps],
            val_loss,
            color="tab:red",
            marker="o",
            markersize=3,
            label="validation",
        )
    upper.set_ylabel("loss, nats a token")
    upper.set_title(title)
    upper.legend(frameon=False)
    middle.plot(steps, rate, color="tab:orange")
    middle.set_ylabel("learning rate")
    middle.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    lower.plot(steps, speed, color="tab:green")
    lower.set_ylabel("tokens / s")
    lower.set_xlabel("step")
    for axes in (middle, lower):
        axes.set_ylim(bottom=0)
    for axes in (upper, middle, lower):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_cells(axes, device_gib, host_gib, cells, limits):
    """Draw a heatmap over caps: device memory across, host memory up, in GiB; 0 is no cap. cells has
    a row for each of host_gib, of (value, text); a cell without a value is grey. limits are the
    ends of the colour scale. Returns the image, for a colour bar."""
    import matplotlib

    values = [[float("nan") if v is None else v for v, _ in row] for row in cells]
    scale = matplotlib.colors.Normalize(*limits)
    image = axes.imshow(values, origin="lower", aspect="auto", norm=scale)
    axes.set_facecolor("0.85")
    axes.set_xticks(range(len(device_gib)), [f"{gib:.4g}" if gib else "none" for gib in device_gib])
    axes.set_yticks(range(len(host_gib)), [f"{gib:.4g}" if gib else "none" for gib in host_gib])
    axes.tick_params(labelsize=8)
    for y, row in enumerate(cells):
        for x, (value, text) in enumerate(row):
            light = value is None or scale(value) > 0.6  # of the colour below the text
            axes.text(
                x,
                y,
                text,
                ha="center",
                va="center",
                fontsize=6 if value is None and len(text) > 1 else 8,
                color="black" if light else "white",
            )
    return image


def plot_grid(grid: dict, path, title: str = "") -> None:
    """Draw the predicted tokens per second over the caps of device memory (across) and host memory
    (up). A cell is empty where no plan fits. ValueError: this is no grid."""
    check_grid(grid)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    device, host = ([b / 2**30 for b in grid[k]] for k in ("device_mem_bytes", "host_mem_bytes"))
    cells = [[(v, f"{v:,.0f}") if v else (None, "-") for v in row] for row in grid["tokens_per_s"]]
    found = [v for row in cells for v, _ in row if v is not None]
    figure, axes = plt.subplots(
        figsize=(max(6, 1.5 + 0.9 * len(device)), 2 + 0.6 * len(host)), constrained_layout=True
    )
    image = draw_cells(axes, device, host, cells, (min(found), max(found)) if found else (0, 1))
    axes.set(xlabel="device memory, GiB", ylabel="host memory, GiB")
    axes.set_title(title, fontsize=10)
    figure.colorbar(image, label="tokens / s, predicted")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def check_grid(grid: dict) -> None:
    """Raise ValueError where a grid lacks a part, or its parts do not have the same size."""
    device, host, rate = (
        grid.get(key) for key in ("device_mem_bytes", "host_mem_bytes", "tokens_per_s")
    )
    sizes = all(
        isinstance(side, list) and side and all(isinstance(b, (int, float)) for b in side)
        for side in (device, host)
    )
    if (
        not sizes
        or not isinstance(rate, list)
        or len(rate) != len(host)
        or any(
            not isinstance(row, list)
            or len(row) != len(device)
            or any(not isinstance(v, (int, float, type(None))) for v in row)
            for row in rate
        )
    ):
        raise ValueError(
            "a grid needs device_mem_bytes, host_mem_bytes and a row of tokens_per_s for each of "
            "host_mem_bytes, as penstock plan --json writes them"
        )


def subject(grid: dict) -> str:
    """The model and the machine of a grid. Files of older versions do not have them."""
    named = [str(grid[key]) for key in ("model", "machine") if key in grid]
    return (
        "\n".join([", ".join(named), f"{grid['seq_len']:,} tokens a sequence"])
        if named and isinstance(grid.get("seq_len"), int)
        else "predicted"
    )


def plot(source, path) -> None:
    """Draw what the file holds: a grid is one object; metrics are an object a line."""
    objects = read_metrics(source)
    if len(objects) == 1 and isinstance(objects[0].get("tokens_per_s"), list):
        plot_grid(objects[0], path, subject(objects[0]))
    else:
        plot_loss(objects, path, str(source), source)


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        plot(sys.argv[1], sys.argv[2])
    except (OSError, ValueError) as exc:
        print(f"penstock.plot: {one_line(str(exc))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
