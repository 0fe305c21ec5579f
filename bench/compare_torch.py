"""Compares the time of a training step with PyTorch's, on one machine in one call.

    python3 bench/compare_torch.py --out DIR 8b:8192:131072 --caps 90:84 24:84
    python3 bench/compare_torch.py --out DIR demo:256:4096 --caps 0:0 least:0 --device cpu \\
        --recipe fp32 --eager

A CASE is MODEL:SEQ_LEN:TOKENS_PER_STEP, where MODEL is a file of models/, a model directory or a
config file of Llama's shape. Caps are DEVICE_GIB:HOST_GIB; 0 is none, and "least" is the least
device memory that a plan fits in. Both sides train the same shape on the same tokens, with
clipping by the exact global norm and AdamW in every step.

penstock              `penstock train` under each pair of caps
torch                 torch.compile of each block and of head and loss, the fastest attention of
                      this PyTorch, fused AdamW, the fastest micro-batch
torch, checkpointing  the same with activation checkpointing of every block
torch, CPU optimizer  the same with checkpointing and torchao's CPUOffloadOptimizer, which cannot
                      clip

Each side is a process of its own. The sides take turns, --repeats times. The first steps of a turn
do not count, and the median of all others does. A side that does not run, or does not fit, is a row
with the reason. Where no side of any case runs, the exit code is 1. DIR gets rows.jsonl, table.md
and, where matplotlib is installed, compare.png. A comparison that is stopped by Ctrl-C or SIGTERM
writes what its sides have measured, and ends with exit code 130.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parent / "sweep"),
]

import cases  # noqa: E402
import measure  # noqa: E402
from cases import Case, SweepError  # noqa: E402
from machine import ROOT, commit, die_with_parent, machine, versions  # noqa: E402
from results import make_folder  # noqa: E402

RECIPES = ("bf16", "fp32-master", "fp32")  # that both sides have
STOPPED = 130
TORCH_SIDE = Path(__file__).resolve().parent / "torch_side.py"
SIDES = {
    "torch": {},
    "torch, checkpointing": {"checkpoint": True},
    "torch, CPU optimizer": {"checkpoint": True, "offload": True},
}


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("cases", nargs="+", metavar="CASE", help="MODEL:SEQ_LEN:TOKENS_PER_STEP")
    p.add_argument("--caps", nargs="+", default=["0:0"], metavar="DEVICE_GIB:HOST_GIB")
    p.add_argument("--out", type=Path, required=True, help="folder of the results")
    p.add_argument("--recipe", default="bf16", choices=RECIPES)
    p.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    p.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--eager", action="store_true", help="PyTorch without torch.compile")
    p.add_argument("--micro", type=int, default=0, help="PyTorch's sequences of a micro-batch "
                   "(default: the fastest)")  # fmt: skip
    p.add_argument("--threads", type=int, default=0, help="CPU threads of both sides")
    p.add_argument("--steps", type=int, default=4, help="steps of a turn that count")
    p.add_argument("--warm-up", type=int, default=2, help="steps before them, which do not")
    p.add_argument("--repeats", type=int, default=2, help="turns of each side")
    p.add_argument("--python", default=sys.executable, help="the interpreter that has PyTorch")
    p.add_argument("--binary", type=Path, default=ROOT / "build/bin/penstock")
    p.add_argument("--keep", type=Path, help="folder for the run directories of Penstock's first "
                   "turns, of which bench/limit.py takes one as its --run")  # fmt: skip
    p.add_argument("--commit", default=None, help="commit to record (default: git's)")
    a = p.parse_args()
    for name in ("steps", "repeats"):
        if getattr(a, name) < 1:
            raise SweepError(f"--{name} is {getattr(a, name)}: at least 1")
    if min(a.warm_up, a.micro, a.threads) < 0:
        raise SweepError("--warm-up, --micro and --threads are 0 or more")
    return a


def caps_of(text: str, case: str, a, binary) -> tuple[float, float]:
    device, _, host = text.partition(":")
    try:
        host_gib = float(host)
        return (least(case, host_gib, a, binary) if device == "least" else float(device)), host_gib
    except ValueError:
        raise SweepError(
            f"--caps {text}: must be DEVICE_GIB:HOST_GIB, such as 24:84 or least:0"
        ) from None


def penstock_case(case: str, device_gib: float, host_gib: float, a) -> Case:
    model, seq_len, tokens = case.split(":")
    more = {"recipe": a.recipe, "steps": a.steps + a.warm_up, "warm-up": a.warm_up}
    more |= {"backend": a.device} | ({"threads": a.threads} if a.threads else {})
    return cases.measured(case, [model, seq_len, device_gib, host_gib, tokens], more, a.binary)


def least(case: str, host_gib: float, a, binary) -> float:
    """GiB of the least device memory."""
    parsed = penstock_case(case, 0, host_gib, a)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(parsed.config)
        words = [binary, "plan", "--smallest", "--json", "--model", folder]
        words += ["--seq-len", parsed.seq_len, "--tokens-per-step", parsed.tokens_per_step]
        words += ["--recipe", a.recipe, "--backend", a.device]
        words += ["--host-mem", f"{host_gib!r}GiB"] if host_gib else []
        done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode:
        raise SweepError(done.stderr.strip().splitlines()[-1].removeprefix("penstock: "))
    return json.loads(done.stdout)["smallest_device_bytes"] / 2**30


# ---- the turns -----------------------------------------------------------------------------------


def torch_turn(ask: dict, python: str) -> dict:
    done = subprocess.run(
        [python, str(TORCH_SIDE), json.dumps(ask)],
        capture_output=True,
        text=True,
        preexec_fn=die_with_parent(),
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines()
    return {"failed": f"exit {done.returncode}", "message": said[-1] if said else ""}


def penstock_turn(case: Case, shard: str, a, keep: Path) -> dict:
    row = measure.run(case, a.binary, [shard], keep)
    if row["status"] != "ok":
        return {"failed": row["reason"], "message": row["message"]}
    metrics = [json.loads(line) for line in (keep / "metrics.jsonl").read_text().splitlines()]
    return {
        "step_s": [m["step_s"] for m in metrics[case.warm_up :]],
        "loss": row["loss"],
        "device_peak_bytes": round(row["device_peak_gib"] * 2**30),
        "host_peak_bytes": round(row["host_peak_gib"] * 2**30),
        "predicted_step_s": row["predicted_step_s"],
        "flops_per_s": row["tflops"] * 1e12,
        "mfu": row["mfu"],
        "plan": row["plan"],
    }


def shown(gib: float) -> str:
    return f"{gib:.3g} GiB" if gib >= 1 else f"{gib * 1024:.3g} MiB" if gib else "all"


def sides_of(case: str, a) -> dict:
    """name -> a function that runs a turn."""
    model, seq_len, tokens = case.split(":")
    found, made = {}, {}
    for text in a.caps:
        device, host = caps_of(text, case, a, a.binary)
        made[text] = penstock_case(case, device, host, a)
        name = f"penstock, {shown(device)} of the device, {shown(host)} of the host"
        found[name] = lambda shard, keep, c=made[text]: penstock_turn(c, shard, a, keep)
    config = json.loads(next(iter(made.values())).config)
    if config.get("model_type") != "llama" or config.get("rope_scaling"):
        raise SweepError(
            f"{model}: PyTorch's side is Llama's shape without RoPE scaling: give such a config"
        )
    for name in a.sides:
        ask = {
            "config": config,
            "seq_len": int(seq_len),
            "tokens_per_step": int(tokens) // int(seq_len) * int(seq_len),
            "recipe": a.recipe,
            "device": a.device,
            "threads": a.threads,
            "compile": not a.eager,
            "micro": a.micro,
            "steps": a.steps,
            "warm_up": a.warm_up,
            **SIDES[name],
        }

        # the micro-batch that the first turn found is used in the later ones
        def turn(shard, _keep, ask=ask):
            result = torch_turn({**ask, "shard": shard}, a.python)
            ask["micro"] = result.get("micro", ask["micro"])
            return result

        found[name] = turn
    return found


def reason(failed: dict) -> str:
    """Why a side did not run, in two lines of a terminal at most."""
    said = ": ".join(text for text in (failed["failed"], failed["message"]) if text)
    return textwrap.shorten(said, 200, placeholder=" ...")


def compare(case: str, a, results: dict) -> None:
    """Run all turns of a case. results: side -> what its turns gave, which gets them one by one."""
    sides = sides_of(case, a)
    results |= {name: [] for name in sides}
    _, seq_len, tokens = case.split(":")
    n_tokens = n_tokens_of(case)
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads(penstock_case(case, 0, 0, a).config)
        shard = Path(folder) / "tokens.bin"
        many = n_tokens * (a.steps + a.warm_up + 1) + int(seq_len) + 1
        measure.random_shard(shard, many, config["vocab_size"])
        for turn in range(a.repeats):
            for i, (name, run) in enumerate(sides.items()):
                if results[name] and "failed" in results[name][-1]:
                    continue
                began = time.monotonic()
                kept = a.keep and turn == 0
                keep = Path(folder) / "run"
                if kept:
                    keep = a.keep / f"{Path(case.split(':')[0]).name}-{seq_len}-{tokens}-{i}"
                result = run(str(shard), keep)
                results[name].append(result)
                what = (
                    reason(result)
                    if "failed" in result
                    else f"{statistics.median(result['step_s']):.3f} s a step"
                )
                print(
                    f"{case}  turn {turn + 1}  {name}: {what} ({time.monotonic() - began:.0f} s)",
                    flush=True,
                )


def n_tokens_of(case: str) -> int:
    """Tokens of a step: whole sequences."""
    _, seq_len, tokens = case.split(":")
    return int(tokens) // int(seq_len) * int(seq_len)


def rows_of(case: str, n_tokens: int, results: dict, note: dict) -> list[dict]:
    """A row a side that had a turn. MFU counts the FLOPs that Penstock's plan counts, and the same
    peak."""
    known = [t for turns in results.values() for t in turns if t.get("flops_per_s")]
    rows = []
    for name, turns in results.items():
        if not turns:
            continue
        row = {"case": case, "side": name, "tokens": n_tokens, **note}
        last = turns[-1]
        if "failed" in last:
            rows.append({**row, "failed": last["failed"], "message": last["message"]})
            continue
        steps = [s for t in turns for s in t["step_s"]]
        step_s = statistics.median(steps)
        row |= {
            "step_s": step_s,
            "tokens_per_s": n_tokens / step_s,
            "steps_timed": len(steps),
            "spread": (max(steps) - min(steps)) / step_s,
            "device_peak_bytes": max(t["device_peak_bytes"] for t in turns),
            "loss": last["loss"],
        }
        if known:
            t = known[0]
            flops = t["flops_per_s"] * statistics.median(t["step_s"])  # of a step
            row["tflops"] = flops / step_s * 1e-12
            if t["mfu"]:
                row["mfu"] = t["mfu"] * row["tflops"] * 1e12 / t["flops_per_s"]
        kept = ("micro", "attention", "versions", "predicted_step_s", "host_peak_bytes", "plan")
        rows.append({**row, **{k: last[k] for k in kept if last.get(k) is not None}})
    best = min((r["step_s"] for r in rows if r["side"] == "torch" and "step_s" in r), default=None)
    return [{**r, "of_torch": best / r["step_s"]} if best and "step_s" in r else r for r in rows]


# ---- the results ---------------------------------------------------------------------------------


def table(rows: list[dict]) -> str:
    out = []
    for case in dict.fromkeys(r["case"] for r in rows):
        out += [f"{case}, tokens/s of the median step", ""]
        out += ["| side | tokens/s | of torch | MFU | device memory | micro-batch |"]
        out += ["|---|---|---|---|---|---|"]
        of = [r for r in rows if r["case"] == case]
        for r in of:
            if "failed" in r:
                out.append(f"| {r['side']} | {r['failed']} | | | | |")
                continue
            of_torch = f"{r['of_torch']:.2f}" if "of_torch" in r else ""
            mfu = f"{100 * r['mfu']:.1f}%" if "mfu" in r else ""
            gib = f"{r['device_peak_bytes'] / 2**30:.1f} GiB" if r["device_peak_bytes"] else ""
            out.append(
                f"| {r['side']} | {r['tokens_per_s']:,.0f} | {of_torch} | {mfu} | {gib} | "
                f"{r.get('micro', '')} |"
            )
        out += ["", *(f"- {r['side']}: {reason(r)}" for r in of if "failed" in r), ""]
    return "\n".join(out)


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    named = list(dict.fromkeys(r["case"] for r in rows))
    heights = [sum(r["case"] == case for r in rows) for case in named]
    figure, axes = plt.subplots(
        len(named),
        1,
        figsize=(9, 1.2 + 0.42 * sum(heights) + 0.6 * len(named)),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
        layout="constrained",
    )
    for case, ax in zip(named, axes[:, 0], strict=True):
        of = [r for r in rows if r["case"] == case][::-1]
        colours = ["#1f77b4" if r["side"].startswith("penstock") else "#999999" for r in of]
        bars = ax.barh(
            [r["side"] for r in of], [r.get("tokens_per_s", 0) for r in of], color=colours
        )
        for bar, r in zip(bars, of, strict=True):
            memory = r.get("device_peak_bytes", 0) / 2**30
            gib = f", {memory:.1f} GiB" if memory else ""
            text = r.get("failed") or f"{r['tokens_per_s']:,.0f}{gib}"
            ax.text(bar.get_width(), bar.get_y() + bar.get_height() / 2, f" {text}", va="center")
        ax.set_title(case, loc="left")
        ax.margins(x=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("tokens/s")
    figure.suptitle(rows[0]["machine"], fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        a = arguments()
        for case in a.cases:
            if len(case.split(":")) != 3:
                raise SweepError(f"{case}: a case is MODEL:SEQ_LEN:TOKENS_PER_STEP")
            for text in a.caps:
                device, host = caps_of(text.replace("least", "0"), case, a, a.binary)
                penstock_case(case, device, host, a)  # checked before minutes of measuring
        make_folder(a.out)
        note = {
            "machine": machine(),
            "commit": a.commit or commit() or "unknown",
            "versions": versions(a.binary),
            "date": time.strftime("%Y-%m-%d"),
            "recipe": a.recipe,
            "settings": {k: v for k, v in vars(a).items() if k in ("steps", "warm_up", "repeats")},
        }
        rows, stopped = [], False
        for case in a.cases:
            results: dict = {}
            try:
                compare(case, a, results)
            except KeyboardInterrupt:
                stopped = True
            rows += rows_of(case, n_tokens_of(case), results, note)
            with open(a.out / "rows.jsonl", "a") as out:
                out.writelines(json.dumps(r) + "\n" for r in rows if r["case"] == case)
            if stopped:
                break
        text = table(rows)
        (a.out / "table.md").write_text(text)
        print("\n" + text)
        if stopped:
            print(
                f"bench/compare_torch.py: stopped: {a.out} has {len(rows)} sides", file=sys.stderr
            )
            return STOPPED
        if all("failed" in r for r in rows):
            print("bench/compare_torch.py: no side ran: the table has the reasons", file=sys.stderr)
            return 1
        try:
            draw(rows, a.out / "compare.png")
        except ImportError:
            print("no picture: matplotlib is not installed")
    except SweepError as exc:
        print(f"bench/compare_torch.py: {exc}", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"bench/compare_torch.py: {exc.filename}: {exc.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
