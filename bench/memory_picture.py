"""Draws README.md's picture: tokens/s over GPU memory, Penstock's beside PyTorch's.

    build/venv/bin/python bench/memory_picture.py bench/results/h200-43-memory.jsonl docs/memory.svg

The file has rows of bench/compare_torch.py and of bench/sweep, of one machine. Penstock's points
are at their cap of GPU memory, PyTorch's at what it took.
"""

import json
import sys
from pathlib import Path

NAMES = {
    "torch": "PyTorch, compiled, nothing offloaded",
    "torch, checkpointing": "PyTorch, compiled, checkpointing",
}


def points(rows: list[dict]) -> tuple[list, list]:
    """Penstock's (GiB, tokens/s), and PyTorch's (name, GiB, tokens/s)."""
    ours, theirs = [], []
    for row in rows:
        side = row.get("side", "")
        if side.startswith("torch"):
            theirs.append((NAMES[side], row["device_peak_bytes"] / 2**30, row["tokens_per_s"]))
        else:
            gib = float(side.split()[1]) if side else row["device_gib"]
            ours.append((gib, row["tokens_per_s"]))
    return sorted(ours), theirs


def draw(ours: list, theirs: list, title: str, path: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "penstock"  # the same file for the same rows
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    ax.plot(*zip(*ours, strict=True), "o-", color="#1f77b4", label="Penstock")
    for i, (gib, speed) in enumerate(ours):  # above and below in turn, as some are close
        ax.annotate(f"{speed:,.0f}", (gib, speed), (0, -14 if i % 2 else 7),
                    textcoords="offset points", ha="center", fontsize=8,
                    color="#1f77b4")  # fmt: skip
    for (name, gib, speed), mark in zip(theirs, "s^", strict=True):
        ax.plot(gib, speed, mark, color="#555555", label=name)
        ax.annotate(f"{speed:,.0f}", (gib, speed), (0, -14), textcoords="offset points",
                    ha="center", fontsize=8, color="#555555")  # fmt: skip
    ax.set(xlim=(0, 110), ylim=(0, 13500), xlabel="GPU memory, GiB", ylabel="tokens/s")
    ax.set_title(title, loc="left", fontsize=9)
    ax.legend(loc="lower center", fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    draw(*points(rows), "8B, bf16, sequences of 8,192, AdamW and clipping, one H200", sys.argv[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
