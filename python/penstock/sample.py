"""The command `penstock sample`: text from each checkpoint of a run, while the run goes on.

penstock sample RUN --prompt TEXT [OPTIONS OF penstock generate]

RUN is the run directory of a training with --checkpoint-every. Each checkpoint is sampled by a
process of its own, `penstock generate`, whose memory is not part of the training's caps. The texts
go to RUN/samples.jsonl, which `penstock watch` and `penstock report` show.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import command
from .chat import read_config
from .files import DataError
from .generate import read_prompts
from .runs import RUNNING, RunDirectory


def checkpoints(run: RunDirectory) -> dict[int, Path]:
    """The whole checkpoints by their steps."""
    found = (run.path / "checkpoints").glob("step-*")
    named = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in found)
    return {int(m[1]): path for m, path in named if m and (path / "manifest.json").exists()}


def model_words(folder: Path, base: str | None) -> list:
    """The options of `penstock generate` that name the model of a checkpoint. One of LoRA has the
    adapters alone: `base` is the directory of the model beside them; None: as it was trained."""
    config = folder / "adapter_config.json"
    if not config.exists():
        if base is not None:
            raise DataError(f"{folder} has all of its model's weights: leave --model out")
        return ["--model", folder]
    base = base or read_config(folder, "adapter_config.json").get("base_model_name_or_path")
    if not isinstance(base, str) or not Path(base).is_dir():
        raise DataError(f"{folder} has adapters of {base}, which is no directory: give --model DIR")
    return ["--model", base, "--adapter", folder]


def sample(folder: Path, base: str | None, prompts: list, options: list[str]) -> list[dict]:
    """What `penstock generate` makes of the prompts. DataError: it refused; OSError: it failed."""
    model = model_words(folder, base)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(
            json.dumps({"messages": p} if isinstance(p, list) else p) + "\n" for p in prompts
        )
        file.flush()
        program = [sys.executable, "-m", "penstock", "generate", "--quiet"]
        done = subprocess.run(
            [*program, *model, "--prompts", file.name, *options],
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it failed"]
        kind = DataError if done.returncode == command.REFUSED else OSError
        text = said[-1].removeprefix("penstock generate: ")
        raise kind(text if str(folder) in text else f"{folder}: {text}")
    return [json.loads(line) for line in done.stdout.split("\n")[:-1]]


def follow(
    run: RunDirectory, base: str | None, prompts: list, options: list[str], every_s: float
) -> int:
    """Sample each checkpoint that is not sampled yet until the run ends, the newest first. Returns
    how many."""
    n, going = 0, True
    while going:
        going = run.state() == RUNNING  # asked first: the last checkpoint is then seen
        have = {row["step"] for row in run.samples()}
        waiting = {step: path for step, path in checkpoints(run).items() if step not in have}
        if not waiting:
            time.sleep(every_s if going else 0)
            continue
        step, folder = max(waiting.items())
        try:
            texts = sample(folder, base, prompts, options)
        except (DataError, OSError):
            if folder.exists():
                raise
            continue  # the run has removed the checkpoint meanwhile
        command.put("".join(run.add_samples([{"step": step, **text} for text in texts])), end="")
        n, going = n + 1, True
    return n


def main(argv: list[str]) -> int:
    parser = command.Parser(
        prog="penstock sample",
        description="Generate text from each checkpoint of a run. Further options are those of "
        "penstock generate.",
    )
    parser.add_argument("run", metavar="RUN", help="the run directory (--run-dir, or --out)")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="of a run with LoRA: the model beside the adapters (default: as it was trained)",
    )
    parser.add_argument("--prompt", metavar="TEXT", help="a prompt")
    parser.add_argument("--prompts", metavar="FILE", help="prompts, as for penstock generate")
    args, options = parser.parse_known_args(argv)

    def work() -> int:
        if (args.prompt is None) == (args.prompts is None):
            raise DataError("give either --prompt TEXT or --prompts FILE")
        run = RunDirectory(args.run)
        run.refresh()
        prompts = [args.prompt] if args.prompts is None else read_prompts(Path(args.prompts))
        if run.state() != RUNNING and not checkpoints(run):
            raise DataError(
                f"{run.path} has no checkpoint to sample: train with --checkpoint-every N"
            )
        try:
            follow(run, args.model, prompts, options, 2.0)
        except KeyboardInterrupt:  # what was sampled is written
            pass
        return command.OK

    return command.run("penstock sample", work)
