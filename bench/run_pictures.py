"""Draws pictures of a run for the README and the tutorial, from a training that it makes.

    make && build/venv/bin/python bench/run_pictures.py --out docs

The training is that of `make demo`, under the same two caps, but with validations and samples. It
takes about 3 minutes of 2 idle cores, and no GPU. The files:

    run-plan.svg      what `penstock train` prints: the plan, and predicted beside measured
    run-watch.svg     `penstock watch` in a terminal, when two thirds of the steps are done
    run-report.svg    the charts of `penstock report`
"""

import argparse
import base64
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from penstock import demo, report  # noqa: E402
from penstock.runs import RunDirectory  # noqa: E402
from penstock.watch import frame  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

WATCH, PLAN = 100, 122  # columns of the terminals
LARGEST = 60_000  # bytes of a picture
CHARTS = ("loss", "tokens / s", "memory")
# The fields are those of rich's export_svg(). No font is fetched.
TERMINAL = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class PictureError(Exception):
    """One sentence for the user."""


def write(path: Path, svg: str) -> None:
    if len(svg.encode()) > LARGEST:
        raise PictureError(f"{path} would have {len(svg.encode()):,} bytes, of {LARGEST:,} at most")
    path.write_text(svg)
    print(f"{path}: {len(svg.encode()):,} bytes", flush=True)


def terminal(content, width: int, title: str, name: str) -> str:
    """A terminal that shows the content, as an SVG."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True,
                      color_system="truecolor", highlight=False)  # fmt: skip
    console.print(content)
    svg = console.export_svg(title=title, code_format=TERMINAL, unique_id=name)
    svg = re.sub(
        r' clip-path="url\(#\w+-line-\d+\)"', "", svg
    )  # no line is wider than its terminal
    return re.sub(r"\s*\n\s*", "\n", svg)


def charts(page: str) -> str:
    """The charts of a report's page, below one another, as one SVG."""
    parts, top, width = [], 0.0, 0.0
    for name, data in re.findall(
        r'<img alt="([^"]+)" src="data:image/svg\+xml;base64,([^"]+)"', page
    ):
        if not name.startswith(CHARTS):
            continue
        svg = base64.b64decode(data).decode()
        svg = svg[svg.index("<svg") :]
        width, height = (
            float(v) for v in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()
        )
        svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
        svg = re.sub(r"\d+\.\d{2,}", lambda m: f"{float(m[0]):.1f}", svg)  # of 650 points
        mark = f"c{len(parts)}-"  # charts of one page share no id
        svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{mark}", svg)
        place = f'<svg y="{top:g}" width="{width:g}" height="{height:g}"'  # without the unit pt
        svg = re.sub(r'<svg (.*?)width="[^"]+" height="[^"]+"', rf"{place} \1", svg, count=1)
        parts.append(svg)
        top += height
    if len(parts) != len(CHARTS):
        raise PictureError(f"the page has {len(parts)} of the charts {', '.join(CHARTS)}")
    size = f'viewBox="0 0 {width:g} {top:g}"'
    ground = f'<rect width="{width:g}" height="{top:g}" fill="white"/>'
    return f'<svg {size} xmlns="http://www.w3.org/2000/svg">\n{ground}\n{"".join(parts)}</svg>\n'


def printed(log: str) -> str:
    """The plan of a log, and from its end predicted beside measured."""
    lines = log.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("machine "))
    end = next(i for i in range(first, len(lines)) if "candidates, of which" in lines[i])
    last = next(i for i, line in enumerate(lines) if line.startswith("step time "))
    after = [line for line in lines[last : last + 6] if "  measured " in line]
    return "\n".join([*lines[first : end + 1], "...", *after])


def prepared(folder: Path, binary: Path, steps: int) -> tuple[list[str], str]:
    """The demo's data and model, and the words of its training; the words for the picture."""
    words = ["--out", folder / "data", "--train-tokenizer", demo.VOCABULARY, "--quiet"]
    words += ["--val-fraction", "0.01"]
    demo.call(sys.executable, "-m", "penstock.data", *demo.standard_library(), *words)
    about = json.loads((folder / "data/dataset.json").read_text())
    demo.make_model(folder / "data", folder / "my_model")
    shape = ["--seq-len", str(demo.SEQ_LEN), "--tokens-per-step", str(demo.TOKENS_PER_STEP)]
    shape += ["--recipe", "bf16", "--model"]
    planned = [binary, "plan", *shape, folder / "my_model", "--json", "--quiet"]
    device, host, _ = demo.choose_caps(planned)
    caps = ["--device-mem", f"{device // demo.MIB}MiB", "--host-mem", f"{host // demo.MIB + 8}MiB"]
    more = [str(w) for w in demo.schedule("1e-3", "1e-4", steps)]
    more += ["--data", "data", "--document-end-token", str(about["eos_token_id"])]
    more += ["--val", "data/val", "--val-tokens", "4096", "--val-every", str(steps // 6)]
    more += ["--sample-every", str(steps // 3), "--sample-prompt", demo.PROMPTS[0]]
    more += ["--sample", "tokens=24,temperature=0.6"]
    shown = f"$ penstock train --model my_model --data my_data {' '.join(caps)} ..."
    return [*shape, "my_model", *caps, *more], shown


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the pictures")
    p.add_argument("--build", type=Path, default=ROOT / "build", help="the build folder")
    p.add_argument("--steps", type=int, default=180)
    a = p.parse_args()
    binary, out = (a.build / "bin/penstock").resolve(), a.out.resolve()
    if not binary.exists():
        raise PictureError(f"{binary} is missing: run make")
    os.environ["PENSTOCK_BUILD"] = str(a.build.resolve())
    os.environ["PYTHONPATH"] = str(ROOT / "python")
    with tempfile.TemporaryDirectory(prefix="penstock-pictures-") as name:
        folder = Path(name)
        os.chdir(folder)
        cache = demo.profile(binary)
        words, shown = prepared(folder, binary, a.steps)
        command = [sys.executable, "-m", "penstock", "train", *words, "--run-dir", "my_run"]
        command += ["--out", "my_tuned"]
        with open("log", "w") as log:
            training = subprocess.Popen(command, stdout=log, stderr=log)
            picture = during(training, a.steps)
        if training.returncode or picture is None:
            raise PictureError(f"the training failed:\n{Path('log').read_text()}")
        write(out / "run-watch.svg", terminal(picture, WATCH, "penstock watch my_run", "watch"))
        text = Text(f"{shown}\n{printed(Path('log').read_text())}")
        write(out / "run-plan.svg", terminal(text, PLAN, "penstock train", "plan"))
        run = RunDirectory("my_run")
        run.refresh()
        write(out / "run-report.svg", charts(small_text(run)))
        os.chdir(ROOT)
        cache.cleanup()
    return 0


def during(training: subprocess.Popen, steps: int):
    """The dashboard when two thirds of the steps are done; waits for the training's end."""
    picture = None
    while training.poll() is None:
        time.sleep(0.2)
        if picture is None and Path("my_run/metrics.jsonl").exists():
            run = RunDirectory("my_run")
            run.refresh()
            rows = run.metrics.rows
            if rows and rows[-1]["step"] + 1 >= 2 * steps // 3 and run.samples():
                picture = frame(run, WATCH, time.time())
    return picture


def small_text(run: RunDirectory) -> str:
    """The report's page, whose charts have text as text and the same ids every time."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"}):
        return report.page(run)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PictureError, demo.DemoError) as exc:
        sys.exit(f"bench/run_pictures.py: {exc}")
