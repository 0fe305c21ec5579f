"""Whether a training that plans again is as fast as one that is freshly planned: quiet, beside a
program that copies host memory, and quiet again.

    make bench-programs
    python3 bench/heal.py --out DIR --model DIR --caps 24/84 --seq-len 8192 --tokens-per-step 131072

The training begins by the rates of the quiet machine, which `penstock profile` measures first. Once
step --hog-from - 1 has ended bench/hog.c begins, and it ends with step --hog-to - 1. The steps of
each part are compared with those of a training that is planned for that part alone and does not
plan again: by the quiet machine's rates, and by rates that `profile` measured beside the hog. Words
after -- go to all trainings.

A part's tokens/s are those of its median step, and of its last third: before a switch, steps take
what they take. The goal is 0.97 of the fresh plan, and measured over planned of 1.03. DIR gets the
runs, DIR/heal.json all figures. Needs Python's standard library alone, and $PENSTOCK or build/bin.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from array import array
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent / "sweep"))

from machine import ROOT, commit, die_with_parent, machine  # noqa: E402

BUILD = ROOT / os.environ.get("PENSTOCK_BUILD", "build")
PENSTOCK = os.environ.get("PENSTOCK", BUILD / "bin/penstock")
SETTLES = 1  # the first steps of a training that do not count


def random_shard(path: Path, n_tokens: int, vocab: int) -> Path:
    """Tokens as the shards of llm.c have them: 256 int32, then uint16, or uint32 of a large
    vocabulary."""
    random, wide = Random(1), vocab > 1 << 16
    head = array("i", [20240801 if wide else 20240520, 7 if wide else 1, n_tokens] + [0] * 253)
    block = array("I" if wide else "H", (random.randrange(vocab) for _ in range(1 << 16)))
    with open(path, "wb") as file:
        head.tofile(file)
        for at in range(0, n_tokens, len(block)):
            block[: min(len(block), n_tokens - at)].tofile(file)
    return path


class Hog:
    """The other work, while the `with` block runs."""

    def __init__(self, args):
        words = ["--threads", args.hog_threads, "--gb-per-s", args.hog_gb_per_s]
        self.command = [str(w) for w in (BUILD / "bench/hog", *words, "--mib", args.hog_mib)]
        self.reached = None

    def __enter__(self):
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent()
        )
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.reached = json.loads(self.process.communicate()[0])


def environment(cache: Path) -> dict:
    return {**os.environ, "XDG_CACHE_HOME": str(cache)}


def profile(args, cache: Path) -> None:
    words = [PENSTOCK, "profile", *args.profile]
    if args.backend:
        words += ["--backend", args.backend]
    with open(args.out / f"{cache.name}.txt", "w") as said:
        subprocess.run(words, env=environment(cache), stdout=said, stderr=said, check=True)


def command(args, name: str, steps: int, replan: str) -> list[str]:
    device, host = args.caps.split("/")
    words = [PENSTOCK, "train", "--model", args.model, "--init-weights", "--data", args.data]
    words += ["--seq-len", args.seq_len, "--tokens-per-step", args.tokens_per_step]
    words += ["--device-mem", f"{device}GiB", "--host-mem", f"{host}GiB", "--recipe", args.recipe]
    words += ["--steps", steps, "--replan", replan, "--run-dir", args.out / name, "--no-save"]
    words += ["--lr", "1e-5", "--warmup-steps", 1]
    if args.backend:
        words += ["--backend", args.backend]
    return [str(word) for word in words + args.more]


def rows(args, name: str) -> list[dict]:
    """Whole lines: the last one may be half written."""
    path = args.out / name / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in found if "step_s" in row]


def train(args, name: str, rates: Path, steps: int, replan: str, at=None) -> list[dict]:
    """@at: called with the number of steps that have ended, until the training has. A training
    remembers rates, so each has the profile's in a cache of its own."""
    cache = args.out / f"cache-{name}"
    shutil.copytree(rates, cache)
    with open(args.out / f"{name}.txt", "w") as said:
        process = subprocess.Popen(
            command(args, name, steps, replan),
            env=environment(cache),
            stdout=said,
            stderr=said,
            preexec_fn=die_with_parent(),
        )
        while process.poll() is None:
            if at:
                at(len(rows(args, name)))
            time.sleep(0.02)
    if process.returncode:
        sys.exit(f"{name} failed: see {args.out / name}.txt")
    return rows(args, name)


def train_healing(args, cache: Path) -> tuple[list[dict], dict]:
    hog = Hog(args)
    begun = []

    def at(n_done: int) -> None:
        if n_done >= args.hog_from - 1 and not begun:
            begun.append(hog.__enter__())
        if n_done >= args.hog_to - 1 and hog.reached is None and begun:
            hog.__exit__()

    healed = train(args, "healed", cache, args.steps, "auto", at)
    if begun and hog.reached is None:
        hog.__exit__()
    return healed, hog.reached


def figures(part: list[dict]) -> dict:
    """Of a part's steps: the median, and that of the last third; and over the plan."""
    last = part[-max(1, len(part) // 3) :]
    return {
        "steps": [part[0]["step"] + 1, part[-1]["step"] + 1],
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in part),
        "last_tokens_per_s": statistics.median(row["tokens_per_s"] for row in last),
        "over_planned": statistics.median(r["step_s"] / r["predicted_step_s"] for r in last),
    }


def compare(args, healed: list[dict], fresh: dict) -> list[dict]:
    edges = [SETTLES, args.hog_from - 1, args.hog_to - 1, len(healed)]
    out = []
    for name, begin, end in zip(("quiet", "hog", "gone"), edges, edges[1:], strict=False):
        beside = figures(fresh["hog" if name == "hog" else "quiet"][SETTLES:])
        own = figures(healed[begin:end])
        ratio = own["last_tokens_per_s"] / beside["tokens_per_s"]
        out.append({"part": name, **own, "fresh": beside, "over_fresh": ratio})
    return out


def table(parts: list[dict]) -> str:
    head = "part    steps    tok/s  last third   fresh  last/fresh  m/p  fresh m/p"
    lines = [
        f"{p['part']:7} {p['steps'][0]:>2}-{p['steps'][1]:<3} {p['tokens_per_s']:>8,.0f}"
        f" {p['last_tokens_per_s']:>11,.0f} {p['fresh']['tokens_per_s']:>7,.0f}"
        f" {p['over_fresh']:>11.3f} {p['over_planned']:>5.3f} {p['fresh']['over_planned']:>6.3f}"
        for p in parts
    ]
    return "\n".join([head, *lines])


def parse(words):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="folder, which must not have a run yet")
    p.add_argument("--model", required=True, help="directory of the model")
    p.add_argument("--caps", required=True, help="GiB of device/host, such as 24/84")
    p.add_argument("--seq-len", type=int, required=True)
    p.add_argument("--tokens-per-step", type=int, required=True)
    p.add_argument("--recipe", default="bf16")
    p.add_argument("--data", help="token shards (default: random tokens)")
    p.add_argument("--backend", help="cpu or cuda (default: the command's)")
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--hog-from", type=int, default=6, help="the first step beside it")
    p.add_argument("--hog-to", type=int, default=16, help="the first step without it")
    p.add_argument("--fresh-steps", type=int, default=5, help="of each fresh plan's training")
    p.add_argument("--hog-threads", type=int, default=3)
    p.add_argument("--hog-gb-per-s", type=float, default=38)
    p.add_argument("--hog-mib", type=int, default=256)
    p.add_argument("--profile", default="", help="options of `penstock profile`, in one word")
    own, _, more = (words, None, []) if "--" not in words else split(words)
    args = p.parse_args(own)
    args.more, args.profile = more, args.profile.split()
    if not 1 + SETTLES < args.hog_from < args.hog_to <= args.steps or args.fresh_steps <= SETTLES:
        p.error("give steps with 2 < --hog-from < --hog-to <= --steps, and --fresh-steps above 1")
    return args


def split(words):
    at = words.index("--")
    return words[:at], None, words[at + 1 :]


def main(words):
    args = parse(words)
    args.out.mkdir(parents=True, exist_ok=True)
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    if not args.data:
        n = min(args.tokens_per_step * (args.steps + 1), 1 << 24) + 1
        args.data = random_shard(args.out / "random.bin", n, vocab)
    quiet, busy = args.out / "rates-quiet", args.out / "rates-hog"
    profile(args, quiet)
    fresh = {"quiet": train(args, "fresh-quiet", quiet, args.fresh_steps, "off")}
    with Hog(args) as hog:
        profile(args, busy)
        fresh["hog"] = train(args, "fresh-hog", busy, args.fresh_steps, "off")
    healed, reached = train_healing(args, quiet)
    parts = compare(args, healed, fresh)
    # a row has the switches until it; rows without the field have none
    n_switches = max(row.get("n_switches", 0) for row in healed)
    switch_s = sum(row.get("switch_s", 0) for row in healed)
    result = {
        "commit": commit(),
        "machine": machine(),
        "model": str(args.model),
        "caps": args.caps,
        "recipe": args.recipe,
        "hog": {"beside the training": reached, "beside the fresh plan": hog.reached},
        "n_switches": n_switches,
        "switch_s": switch_s,
        "switched": n_switches > 0,
        "parts": parts,
    }
    (args.out / "heal.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(parts))
    print(
        f"hog: {reached['gb_per_s']:.1f} GB/s copied beside the training" if reached else "no hog"
    )
    print(f"{n_switches} switches, {switch_s:.3g} s in all")


if __name__ == "__main__":
    main(sys.argv[1:])
