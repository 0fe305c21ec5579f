"""Compares loss curves: recipes of Penstock with one another and with PyTorch.

    python3 bench/curve.py --data SHARDS --out bench/results/curve-NAME [--steps 200]
    python3 bench/curve.py --data SHARDS --out bench/results/rounding-NAME --steps 2000 \\
        --curves fp32-master bf16 torch-nearest torch-masters --seeds 1 2 3
    python3 bench/curve.py --data SHARDS --out bench/results/fp8-NAME --steps 1525 --tokens 65536 \\
        --seq-len 2048 --config bench/curve_0.3b.json --curves bf16 bf16~2 fp8 fp8-broken \\
        --broken-build DIR --broken-steps 305
    python3 bench/curve.py --data SHARDS --out bench/results/moe-NAME --steps 1373 --tokens 65536 \\
        --seq-len 2048 --config bench/curve_moe_0.3b.json --curves bf16 bf16~2 torch-masters
    python3 bench/curve.py --draw bench/results/curve-NAME    makes CSV and picture of its JSON

All curves of a seed train the same Llama, or model of --config with experts, from the same weights on the same tokens in the same
order. Clipping, betas, eps, weight decay (of matrices alone) and each step's learning rate are the
same. A curve is a recipe of Penstock, or one of:

RECIPE~2       the same recipe with another seed of stochastic rounding; its distance from RECIPE is
               what a single training may differ by
fp8-broken     recipe fp8 of --broken-build, whose scales are 2^14 times too large: `make BUILD=DIR
               CPPFLAGS=-DPS_FP8_COARSER=14 NVCCFLAGS=-DPS_FP8_COARSER=14`. It may end after
               --broken-steps, as one that is broken shows it soon
fp8:OPTIONS    some of first=N, last=N, down, head and fast, as the options --fp8 bf16-first
               and so on of `penstock train`: fp8:first=2,down
RECIPE:8bit    its optimizer state in 8 bits (--state-bits 8); fp8:8bit,down has both options
torch-masters  PyTorch eager: fused AdamW on fp32 parameters, bf16 copies of them in the products
torch-fp8      the same with FP8 operands and sums in fp32, of bench/torch_fp8.py; torch-fp8:x,w has
               but these in FP8 (x: activations, w: weights, dy: gradients of outputs)
torch-nearest  PyTorch eager: fused AdamW on bf16 parameters and moments, rounded to nearest even
torch-fp32     PyTorch eager: everything in fp32

With experts, PyTorch's side is transformers' model. Both sides have the auxiliary loss of each
--micro sequences, and the figures have each step's largest load of an expert over the mean.

So bf16 against fp32-master shows what stochastic rounding costs, and torch-nearest against
torch-masters what rounding to nearest does. fp32-master against torch-masters is the control.

With bf16 and bf16~2 there is a gate for recipes of FP8: in each seed the gap to bf16 may be 0.01
nats, or that of bf16~2 where it is larger. fp8-broken must fail it. RECIPE:8bit has the same gate,
beside RECIPE and RECIPE~2. Curves other than fp8-broken that --end-after ended have no gate.

The gap of two curves is the mean of their difference over the last fifth of the steps that both
have. It is stated as the mean over the seeds, with the standard deviation (n - 1) between them.

NAME.json gets every finished training: however the program was stopped, the same command goes on.
NAME.csv has a column of losses for each training. NAME.png is drawn where matplotlib is installed.
The default model has 12 layers of 768: 90 to 130 million parameters, by the data's vocabulary.
"""

import argparse
import concurrent.futures
import csv
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent / part) for part in ("", "sweep")]

import curve_sides  # noqa: E402
from curve_sides import BETAS, BROKEN, CLIP, DECAY, EPS, Curve  # noqa: E402
from machine import commit, die_with_parent, machine  # noqa: E402
from penstock.errors import PenstockError  # noqa: E402

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}


class Refused(Exception):
    """The input is wrong: a sentence for the user, and exit code 2."""


def parse():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--data", nargs="+", help="token shards of real text")
    ap.add_argument("--out", type=Path, help="the results' path, to which .json etc. is appended")
    ap.add_argument("--draw", type=Path, metavar="OUT", help="make CSV and picture, and stop")
    ap.add_argument("--curves", nargs="+", default=["fp32-master", "torch-masters"])
    ap.add_argument("--seeds", nargs="+", type=int, default=[1])
    ap.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    ap.add_argument(
        "--config", help="config.json of another model; without vocab_size it takes the data's"
    )
    ap.add_argument("--backend", default="auto", choices=["auto", "cpu", "cuda"])
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--seq-len", type=int, default=1024)
    ap.add_argument("--tokens", type=int, default=8192, help="tokens a step")
    ap.add_argument(
        "--lr",
        type=float,
        default=6e-4,
        help="peak learning rate; 10%% of the steps are warmup, then a cosine falls to a tenth",
    )
    ap.add_argument("--micro", type=int, default=8, help="sequences that PyTorch takes at a time")
    ap.add_argument("--device-mem", help="Penstock's cap of device memory, such as 2GiB")
    ap.add_argument("--broken-build", help="the build folder of fp8-broken")
    ap.add_argument(
        "--broken-steps", type=int, help="the steps after which fp8-broken ends (default: --steps)"
    )
    ap.add_argument("--commit", help="commit to record (default: git's)")
    ap.add_argument("--one", help=argparse.SUPPRESS)  # a training: the process of its own
    ap.add_argument(
        "--end-after",
        type=int,
        help="the steps after which all curves end; their learning rates stay those of --steps",
    )
    a = ap.parse_args()
    if not a.draw and not (a.data and a.out):
        ap.error("--data and --out are needed, or --draw")
    if a.jobs < 1 or a.steps < 5:
        ap.error("--jobs is at least 1, and --steps at least 5")
    for name, value in (("broken-steps", a.broken_steps), ("end-after", a.end_after)):
        if value is not None and not 5 <= value <= a.steps:
            ap.error(f"--{name} is at least 5 and at most --steps")
    return a


def check_curves(a):
    for text in a.curves:
        try:
            curve = Curve(text)
        except ValueError as e:
            raise Refused(f"--curves {text}: {e}") from e
        if curve.GONE in curve.options:
            raise Refused(f"--curves {text}: the option {curve.GONE} was taken out")
        if curve.name == BROKEN and not a.broken_build:
            raise Refused(f"--curves {text}: give its --broken-build too")


def read_json(path):
    try:
        return json.loads(Path(path).read_text())
    except OSError as e:
        raise Refused(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise Refused(f"{path} is not JSON: {e}") from e


# ---- the trainings -------------------------------------------------------------------------------


def config_of(a):
    from penstock import Dataset

    config = read_json(a.config) if a.config else dict(LLAMA)
    if "vocab_size" not in config:
        data = Dataset(a.data, 1 << 16)
        largest = max(
            int(data.read(a.seq_len, i)[0].max()) for i in range(data.n_sequences(a.seq_len))
        )
        config["vocab_size"] = (largest + 256) // 256 * 256
    return config


def sha256_of(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def settings_of(a):
    """What all trainings of a result share, and where they run. Refused: the data have too few
    sequences."""
    from penstock import Dataset, Hardware

    there = Dataset(a.data, 1 << 16).n_sequences(a.seq_len)
    wanted = a.steps * (a.tokens // a.seq_len)
    if there < wanted:
        raise Refused(
            f"the data has {there} sequences of {a.seq_len} tokens, {a.steps} steps need {wanted}: "
            "give more data, fewer --steps or fewer --tokens"
        )
    hardware = Hardware.estimate(0, a.backend)
    return {
        "model": config_of(a),
        "device": hardware.device_name or hardware.name,
        "backend": "cuda" if hardware.backend else "cpu",
        "steps": a.steps,
        "end_after": a.end_after,
        "broken_steps": a.broken_steps,
        "seq_len": a.seq_len,
        "tokens_per_step": a.tokens,
        "peak_lr": a.lr,
        "betas": list(BETAS),
        "eps": EPS,
        "weight_decay": DECAY,
        "clip_norm": CLIP,
        "device_mem": a.device_mem,
        "micro": a.micro,
        "data": [Path(d).name for d in a.data],
        "data_sha256": [sha256_of(d) for d in a.data],
        "data_sequences": there,
    }


def one_training(a):
    """The process of a training: prints its figures as JSON."""
    ask = json.loads(a.one)
    a.model_config, a.on_gpu = ask["model"], ask["backend"] == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(curve_sides.train(ask["curve"], ask["seed"], a, Path(folder))))


def training(name, seed, settings, broken_build):
    ask = {"curve": name, "seed": seed, "model": settings["model"], "backend": settings["backend"]}
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--one", json.dumps(ask)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent(),
        env=os.environ | ({"PENSTOCK_BUILD": broken_build} if Curve(name).name == BROKEN else {}),
    )
    if done.returncode:
        sys.exit(f"curve.py: {name}, seed {seed}: ended with exit code {done.returncode}")
    figures = json.loads(done.stdout.splitlines()[-1])
    for key in ("loss", "grad_norm"):
        figures[key] = [round(x, 6) for x in figures[key]]
    return {"curve": name, "seed": seed, **figures}


def read_or_begin(path, settings, a):
    """The result at @path, which must have the same settings, or a new one without trainings."""
    if not path.exists():
        return {
            **settings,
            "lr": curve_sides.schedule(a.lr, a.steps),
            "cpus": os.cpu_count(),
            "machine": machine(),
            "commit": a.commit or commit() or "unknown",
            "date": time.strftime("%Y-%m-%d"),
            "command": " ".join(["bench/curve.py", *sys.argv[1:]]),
            "runs": [],
        }
    result = read_json(path)
    for key, value in settings.items():
        if result.get(key) != value:
            raise Refused(
                f"{path} has trainings whose {key} is {result.get(key)}, not {value}: "
                "give another --out"
            )
    return result


def write(path, text):
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


def run(a):
    """Train what is missing, write the JSON after each training, and return the result."""
    check_curves(a)
    try:
        settings, path = settings_of(a), Path(f"{a.out}.json")
    except PenstockError as e:
        raise Refused(str(e)) from e
    if {"num_experts", "num_local_experts"} & settings["model"].keys():
        for text in a.curves:
            if Curve(text).name == "torch-fp8":
                raise Refused(f"--curves {text}: is no curve of models with experts")
    path.parent.mkdir(parents=True, exist_ok=True)
    result = read_or_begin(path, settings, a)
    there = {(r["curve"], r["seed"]) for r in result["runs"]}
    order = list(dict.fromkeys([*list_of(result), *a.curves]))
    missing = [(c, s) for s in a.seeds for c in a.curves if (c, s) not in there]
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        asked = [pool.submit(training, c, s, settings, a.broken_build) for c, s in missing]
        try:
            for future in concurrent.futures.as_completed(asked):
                done = future.result()
                runs = [*result["runs"], done]
                result["runs"] = sorted(runs, key=lambda r: (order.index(r["curve"]), r["seed"]))
                result["gaps"] = gaps_of(result)
                result["gate"] = gate_of(result)
                write(path, json.dumps(result) + "\n")
                print(
                    f"{done['curve']}, seed {done['seed']}: loss {last_fifth(done):.4f} "
                    f"({done['seconds']:.0f} s)",
                    flush=True,
                )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return result


# ---- the result ----------------------------------------------------------------------------------


def list_of(result):
    return list(dict.fromkeys(r["curve"] for r in result["runs"]))


def last_fifth(r, n_steps=None):
    """The mean loss over the last fifth of the first @n_steps, or of all."""
    losses = r["loss"][:n_steps]
    return statistics.fmean(losses[-max(1, len(losses) // 5) :])


def gap(one, other, n_steps=None):
    """The training @one minus @other, in nats, over the last fifth of the first @n_steps, or of
    those that both have, and the number of these steps."""
    n_steps = n_steps or min(len(one["loss"]), len(other["loss"]))
    return last_fifth(one, n_steps) - last_fifth(other, n_steps), n_steps


def gaps_of(result):
    """Of each pair of curves, in nats: the gap, the one minus the other, over the seeds that both
    have, and the largest and mean distance."""
    of = {(r["curve"], r["seed"]): r for r in result["runs"]}
    curves, gaps = list_of(result), {}
    for i, other in enumerate(curves):
        for one in curves[i + 1 :]:
            seeds = [s for c, s in of if c == one and (other, s) in of]
            if not seeds:
                continue
            by_seed, n_steps = zip(*(gap(of[one, s], of[other, s]) for s in seeds))
            distances = [
                (abs(x - y), step)
                for s in seeds
                for step, (x, y) in enumerate(zip(of[one, s]["loss"], of[other, s]["loss"]))
            ]
            largest, at_step = max(distances)
            gaps[f"{one} - {other}"] = {
                "gap": statistics.fmean(by_seed),
                "spread": statistics.stdev(by_seed) if len(seeds) > 1 else None,
                "seeds": seeds,
                "by_seed": list(by_seed),
                "steps": max(n_steps),
                "largest": largest,
                "at_step": at_step,
                "mean": statistics.fmean(d for d, _ in distances),
            }
    return gaps


def gate_of(result):
    """Of each curve in FP8 or with state of 8 bits, and seed: its gap to the curve that it is held
    to, in nats, what is allowed, and whether it passes. None where there is no second seed of
    rounding of that curve. A curve that --end-after ended has none: its loss still falls too fast.
    fp8-broken must fail it wherever it ended."""
    of = {(r["curve"], r["seed"]): r for r in result["runs"]}
    gate = []
    for (name, seed), r in of.items():
        curve = Curve(name)
        if not curve.held_to:
            continue
        same, other = of.get((curve.held_to, seed)), of.get((f"{curve.held_to}~2", seed))
        whole = len(r["loss"]) == result["steps"] or curve.name == BROKEN
        if not (same and other and whole):
            continue
        apart, n_steps = gap(r, same)
        allowed = max(0.01, abs(gap(other, same, n_steps)[0]))
        row = {"curve": name, "seed": seed, "steps": n_steps, "gap": apart, "allowed": allowed}
        gate.append(row | {"passes": abs(apart) <= allowed})
    return gate


def lines_of(result, other=""):
    """The gaps in words, of all pairs or of those with curve @other, and the gate."""
    for g in result.get("gate", []):
        yield (
            f"gate: {g['curve']}, seed {g['seed']}, {'passes' if g['passes'] else 'FAILS'}: "
            f"{g['gap']:+.4f} nats of {g['allowed']:.4f}, after {g['steps']} steps"
        )
    for pair, g in result["gaps"].items():
        if not pair.endswith(other and f" - {other}"):
            continue
        spread = f" ± {g['spread']:.4f}" if g["spread"] is not None else ""
        seeds = f"{len(g['seeds'])} seeds" if len(g["seeds"]) > 1 else "1 seed"
        yield (
            f"{pair}: {g['gap']:+.4f}{spread} nats over the last fifth of {g['steps']} steps ({seeds}); "
            f"largest distance "
            f"{g['largest']:.4f} (step {g['at_step']}), mean {g['mean']:.4f}"
        )


def write_csv(path, result):
    runs = result["runs"]
    with open(path, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["step", "lr", *(f"{r['curve']} seed {r['seed']}" for r in runs)])
        lr = result["lr"][: max(len(r["loss"]) for r in runs)]
        columns = itertools.zip_longest(lr, *(r["loss"] for r in runs), fillvalue="")
        out.writerows([step, f"{lr:.6g}", *losses] for step, (lr, *losses) in enumerate(columns))


def draw_loads(axes, runs, colours):
    for r in runs:
        axes.plot(r["expert_load"], color=colours[r["curve"]], linewidth=1, alpha=0.8)
    axes.set_ylabel("load, max / mean")
    axes.set_ylim(1, 4)


def draw(path, result):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from penstock.plot import smoothed

    routed = [r for r in result["runs"] if "expert_load" in r]
    ratios = (3, 2, 1.5) if routed else (3, 2)
    figure, (top, bottom, *loads) = pyplot.subplots(
        len(ratios), 1, figsize=(9, 8), sharex=True, height_ratios=ratios, layout="constrained"
    )
    curves = list_of(result)
    palette = pyplot.get_cmap("tab10" if len(curves) <= 10 else "tab20")
    colours = {c: palette(i) for i, c in enumerate(curves)}
    losses = {(r["curve"], r["seed"]): r["loss"] for r in result["runs"]}
    for (curve, seed), loss in losses.items():
        label = curve if seed == min(s for c, s in losses if c == curve) else None
        top.plot(smoothed(loss), color=colours[curve], linewidth=1, alpha=0.8, label=label)
        if curve == curves[0] or (curves[0], seed) not in losses:
            continue
        apart = [x - y for x, y in zip(loss, losses[curves[0], seed])]
        bottom.plot(smoothed(apart), color=colours[curve], linewidth=1, alpha=0.8)
    lowest = [sorted(x)[len(x) // 50] for x in losses.values()]
    highest = [sorted(x)[-1 - len(x) // 20] for x in losses.values()]
    top.set_ylim(min(lowest) - 0.05, max(highest) + 0.05)
    top.set_ylabel("loss, nats")
    top.set_title(
        textwrap.fill(
            f"{result['model']['hidden_size']} x {result['model']['num_hidden_layers']}, "
            f"{result['tokens_per_step']} tokens a step, {result['device']}, {result['commit']}",
            120,
        )
        + "\n"
        + "\n".join(line.split(" (")[0] for line in lines_of(result, curves[0])),
        fontsize=8,
    )
    bottom.axhline(0, color="black", linewidth=0.5)
    bottom.set_ylabel(f"minus {curves[0]}, nats")
    if routed:
        draw_loads(*loads, routed, colours)
    (loads or [bottom])[0].set_xlabel("step")
    top.legend(fontsize=8)  # of both
    for axes in (top, bottom, *loads):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main():
    a = parse()
    if a.one:
        return one_training(a)
    out = a.draw or a.out
    if a.draw:
        result = read_json(f"{out}.json")
        result |= {"gaps": gaps_of(result), "gate": gate_of(result)}
    else:
        result = run(a)
    print("\n".join(lines_of(result)))
    write_csv(f"{out}.csv", result)
    print(f"{out}.json\n{out}.csv")
    try:
        draw(f"{out}.png", result)
        print(f"{out}.png")
    except ImportError as e:
        print(f"no picture, as {e}: draw it on another machine with bench/curve.py --draw {out}")


if __name__ == "__main__":
    try:
        main()
    except Refused as e:
        print(f"curve.py: {e}", file=sys.stderr)
        sys.exit(2)
    except (PenstockError, OSError) as e:
        sys.exit(f"curve.py: {e}")
