"""Trains a small language model on real text under two memory caps that it does not fit into.

`make demo` runs these steps. All their files stay in BUILD/demo.

1. Read text: Python's standard library on this machine, or --text FILE...
2. Train a tokenizer on it and write token shards (penstock.data).
3. Initialise a model (models/init_model.py).
4. Choose caps below what the model would take without caps.
5. Train with the native binary.
6. Write report.txt, loss.png, timeline.png, and samples.txt from the trained model.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .terminal import one_line

ROOT = Path(__file__).resolve().parent.parent.parent
VOCABULARY, SEQ_LEN, TOKENS_PER_STEP = 2048, 256, 1024
TEXT_BYTES = 4 << 20
TRAINING_SECONDS, FEWEST_STEPS, MOST_STEPS = 70, 30, 300
SAMPLE_TOKENS, SAMPLE_LINES = 48, 4
PROMPTS = ("def __init__(self", "import ", "    for i in range(", "class ")
MIB = 1 << 20
console = Console(highlight=False, soft_wrap=True)


class DemoError(Exception):
    """One sentence for the user."""


def standard_library() -> list[Path]:
    """About TEXT_BYTES of sources of Python's standard library: modules first, then packages, by
    name."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"))
    names = "asyncio collections concurrent email http importlib json logging multiprocessing"
    names = f"{names} unittest urllib xml".split()
    packages = sorted(p for name in names for p in (folder / name).rglob("*.py"))
    out, total = [], 0
    for path in modules + packages:
        total += path.stat().st_size
        if total > TEXT_BYTES:
            break
        out.append(path)
    if not out:
        raise DemoError(
            f'{folder} has no Python sources: give your own text with make demo TEXT="FILE..."'
        )
    return out


def call(*command) -> str:
    """Run a program and return its output. The last line of its error message becomes the error."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise DemoError(
            (done.stderr.strip() or done.stdout.strip() or f"{command[0]} failed").splitlines()[-1]
        )
    return done.stdout


def make_data(files: list[Path], out: Path) -> dict:
    started = time.monotonic()
    command = [sys.executable, "-m", "penstock.data", *files, "--out", out]
    call(*command, "--train-tokenizer", VOCABULARY, "--force", "--quiet")
    about = json.loads((out / "dataset.json").read_text())
    size = sum(path.stat().st_size for path in files if path.is_file())
    console.print(
        f"{len(files)} files ({size / 1e6:.1f} MB) -> {about['tokens']:,} tokens of a vocabulary "
        f"of {about['vocab_size']:,}, "
        f"in {time.monotonic() - started:.0f} s"
    )
    return about


def make_model(data: Path, out: Path) -> None:
    call(
        sys.executable,
        ROOT / "models/init_model.py",
        ROOT / "models/demo.json",
        out,
        "--tokenizer",
        data / "tokenizer.json",
        "--overwrite",
    )


def choose_caps(plan_command: list) -> tuple[int, int, dict]:
    """The caps of the demo in bytes, and the plan under them. The device cap lies a quarter of the
    way from the smallest that a plan fits in to what a plan without caps takes. The host cap is a
    tenth above the smallest one under that device cap."""
    roomy = json.loads(call(*plan_command))
    smallest = json.loads(call(*plan_command, "--smallest"))
    least = smallest["smallest_device_bytes"]
    device = (least + (roomy["device_used_bytes"] - least) // 4) // MIB * MIB
    least_host = json.loads(call(*plan_command, "--smallest", f"--device-mem={device}"))[
        "smallest_host_bytes"
    ]
    host = (least_host + least_host // 10) // MIB * MIB
    plan = json.loads(call(*plan_command, f"--device-mem={device}", f"--host-mem={host}"))
    console.print(
        f"Without caps the plan takes {roomy['device_used_bytes'] / MIB:.0f} MiB of device memory; the "
        "smallest plan takes "
        f"{least / MIB:.0f}. Given: [bold]--device-mem {device // MIB}MiB --host-mem "
        f"{host // MIB}MiB[/]"
    )
    return device, host, plan


def keep(path: Path, *parts) -> None:
    """Print texts and tables, and write them to a file as plain text."""
    with path.open("w", encoding="utf-8") as file:
        for target in (console, Console(file=file, width=100, highlight=False)):
            for part in parts:
                target.print(part, **({"markup": False} if isinstance(part, str) else {}))


def report(out: Path, summary: dict) -> None:
    """Write report.txt (predicted and measured figures, how streams spent their time) and the two
    pictures."""
    from penstock import plot, trace

    table = Table("", "plan", "measured", "cap", title="predicted and measured")
    table.add_row(
        "step time", f"{summary['predicted_step_s']:.3f} s", f"{summary['step_s_median']:.3f} s", ""
    )
    for name in ("device", "host"):
        table.add_row(
            f"{name} memory",
            *(
                f"{summary[f'{name}_{kind}_bytes'] / MIB:.1f} MiB"
                for kind in ("used", "peak", "mem")
            ),
        )
    timeline = trace.load(out / "timeline.json")
    n = summary["loss_mean_steps"]
    keep(
        out / "report.txt",
        f"{summary['steps']} steps, {summary['tokens']:,} tokens in {summary['wall_s']:.0f} s, "
        f"{summary['tokens_per_s']:,.0f} tokens/s; loss "
        f"{summary['loss_first']:.3f} in the first step, {summary['loss_mean_last']:.3f} in the "
        f"last{f' {n} (mean)' if n > 1 else ' step'}",
        table,
        trace.stream_table(timeline),
    )
    trace.plot(timeline, out / "timeline.png", "the last traced steps, by stream")
    plot.plot_loss(plot.read_metrics(out / "metrics.jsonl"), out / "loss.png", "penstock demo")


def sample(model: Path, out: Path) -> None:
    """Write a few lines of the trained model to samples.txt."""
    from penstock import Generator
    from penstock.data import load_tokenizer
    from penstock.generate import stop_tokens

    tokenizer = load_tokenizer(model)
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    context = max(map(len, prompts)) + SAMPLE_TOKENS
    with Generator(model, batch=len(prompts), context=context) as generator:
        texts = generator.run(
            prompts,
            max_new_tokens=SAMPLE_TOKENS,
            temperature=0.6,
            seed=list(range(len(prompts))),
            stop_tokens=stop_tokens(model),
        )
    samples = []
    for prompt, new in zip(prompts, texts, strict=True):
        lines = [line for line in tokenizer.decode(prompt + new).splitlines() if line.strip()]
        text = "\n".join(lines[:SAMPLE_LINES])
        # a model that has learned little writes control characters, which a terminal would obey
        samples.append("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))
    keep(out, ("\n" + "-" * 40 + "\n").join(samples))


def train(binary: Path, *words) -> dict:
    """Train with the native binary. Returns its summary."""
    trained = subprocess.run(
        [str(w) for w in (binary, "train", *words, "--json")], stdout=subprocess.PIPE, text=True
    )
    if trained.returncode:
        raise SystemExit(trained.returncode)
    return json.loads(trained.stdout)


def schedule(lr: str, min_lr: str, steps: int) -> list:
    """The options of a short training that goes through its data in another order each time."""
    words = ["--steps", steps, "--lr", lr, "--min-lr", min_lr, "--lr-schedule", "cosine"]
    return [*words, "--warmup-steps", min(10, steps // 5), "--shuffle"]


def profile(binary: Path) -> tempfile.TemporaryDirectory:
    """Measure this machine for two seconds. The user's own rates, measured for longer, are kept."""
    cache = tempfile.TemporaryDirectory(prefix="penstock-demo-")
    os.environ["XDG_CACHE_HOME"] = cache.name
    call(binary, "profile", "--seconds", 2)
    return cache


def open_folders(args, name: str) -> tuple[Path, Path]:
    """The folder of all files, and the binary."""
    build = Path(args.build).resolve()
    binary = build / "bin" / "penstock"
    if not binary.exists():
        raise DemoError(f"{binary} is missing: run make")
    return Path(args.out).resolve() if args.out else build / name, binary


def shown(path: Path) -> Path:
    """As a user in this folder names it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def run(args) -> None:
    out, binary = open_folders(args, "demo")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    console.rule("1. text, tokenizer, shards")
    about = make_data([Path(p) for p in args.text] or standard_library(), out / "data")
    console.rule("2. a model")
    make_model(out / "data", out / "init")
    console.print(call(binary, "info", "--model", out / "init", "--seq-len", SEQ_LEN).strip())
    console.rule("3. two memory caps that are too small")
    cache = profile(binary)
    shape = ["--model", out / "init", "--seq-len", SEQ_LEN]
    shape += ["--tokens-per-step", TOKENS_PER_STEP, "--recipe", args.recipe]
    device, host, plan = choose_caps([binary, "plan", *shape, "--json", "--quiet"])
    console.rule("4. training")
    steps = args.steps or max(
        FEWEST_STEPS, min(MOST_STEPS, int(TRAINING_SECONDS / plan["predicted_step_s"]))
    )
    summary = train(
        binary,
        *shape,
        *schedule("1e-3", "1e-4", steps),
        *("--data", out / "data", "--document-end-token", about["eos_token_id"]),
        *(f"--device-mem={device}", f"--host-mem={host}"),
        *("--out", out / "model", "--force", "--run-dir", out),
    )
    cache.cleanup()
    console.rule("5. what happened")
    report(out, summary)
    console.rule("6. text from the trained model")
    sample(out / "model", out / "samples.txt")
    list_files(out)


def list_files(out: Path) -> None:
    names = sorted(p.name + ("/" if p.is_dir() else "") for p in out.iterdir())
    console.print(f"Everything is in {shown(out)}: {' '.join(names)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--build", default="build", metavar="DIR", help="the build folder")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder for all files, replaced if it exists (default: BUILD/demo)",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        default=[],
        metavar="FILE",
        help="text files (default: Python's standard library)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"training steps (default: as many as {TRAINING_SECONDS} seconds allow)",
    )
    parser.add_argument("--recipe", default="fp32-master", choices=("fp32", "fp32-master", "bf16"))
    args = parser.parse_args()
    return finish("penstock demo", lambda: run(args))


def finish(name: str, function) -> int:
    """The exit code of function(), whose DemoError becomes one sentence."""
    started = time.monotonic()
    try:
        function()
    except DemoError as exc:
        print(f"{name}: {one_line(str(exc))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    console.print(f"{time.monotonic() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
