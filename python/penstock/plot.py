"""The loss curve of a run, or the grid of `penstock plan --grid-device ... --grid-host ... --json`, as a picture:
python -m penstock.plot metrics.jsonl loss.png;  python -m penstock.plot grid.json grid.png"""
import json
import sys

from .files import open_input


def read_metrics(path) -> list[dict]:
    """The objects of a metrics.jsonl. ValueError names the line that is none."""
    out = []
    with open_input(path, "r", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                out.append(json.loads(line))
            except json.JSONDecodeError as exc:
                raise ValueError(f"{path}: line {number} is not JSON: {exc}") from exc
    return out


def plot_loss(metrics: list[dict], path, title: str = "") -> None:
    """Loss (nats a token) over steps, with tokens per second beneath."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [m["step"] + 1 for m in metrics]
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=[3, 1], constrained_layout=True)
    upper.plot(steps, [m["loss"] for m in metrics])
    upper.set_ylabel("loss, nats a token")
    upper.set_title(title)
    upper.grid(alpha=0.3)
    lower.plot(steps, [m["tokens_per_s"] for m in metrics], color="tab:green")
    lower.set_ylabel("tokens / s")
    lower.set_xlabel("step")
    lower.set_ylim(bottom=0)
    lower.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_grid(grid: dict, path, title: str = "") -> None:
    """Predicted tokens per second over caps of device (across) and host memory (up); empty where no plan fits."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rate = [[value or float("nan") for value in row] for row in grid["tokens_per_s"]]
    figure, axes = plt.subplots(figsize=(1.5 + 0.9 * len(grid["device_bytes"]), 1.5 + 0.6 * len(grid["host_bytes"])), constrained_layout=True)
    image = axes.imshow(rate, origin="lower", aspect="auto")
    axes.set_xticks(range(len(grid["device_bytes"])), [f"{b / 2**30:g}" for b in grid["device_bytes"]])
    axes.set_yticks(range(len(grid["host_bytes"])), [f"{b / 2**30:g}" for b in grid["host_bytes"]])
    axes.set(xlabel="device memory, GiB", ylabel="host memory, GiB", title=title)
    for y, row in enumerate(rate):
        for x, value in enumerate(row):
            axes.text(x, y, f"{value:,.0f}" if value == value else "-", ha="center", va="center", fontsize=8, color="white" if value == value else "black")
    figure.colorbar(image, label="tokens / s, predicted")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot(source, path) -> None:
    """What the file holds: a grid is one object, metrics are one a line."""
    objects = read_metrics(source)
    if len(objects) == 1 and isinstance(objects[0].get("tokens_per_s"), list):
        plot_grid(objects[0], path, "predicted")
    else:
        plot_loss(objects, path, str(source))


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        plot(sys.argv[1], sys.argv[2])
    except (OSError, ValueError, KeyError) as exc:
        print(f"penstock.plot: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
