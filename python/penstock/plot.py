"""The loss curve of a run as a picture: python -m penstock.plot metrics.jsonl loss.png"""
import json
import sys


def read_metrics(path) -> list[dict]:
    """The objects of a metrics.jsonl. ValueError names the line that is none."""
    out = []
    with open(path, encoding="utf-8") as file:
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


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        plot_loss(read_metrics(sys.argv[1]), sys.argv[2], sys.argv[1])
    except (OSError, ValueError, KeyError) as exc:
        print(f"penstock.plot: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
