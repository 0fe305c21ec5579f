"""Fills the tables of the pages from the rows of bench/results, so that no figure is typed twice.

    python3 bench/pages.py                         writes the pages
    python3 bench/pages.py --check                 writes nothing; says which pages differ, code 1
    python3 bench/pages.py --name h200-44 FILE     names the machine of FILE's rows without a name

A table stands between `<!-- rows: NAME -->` and `<!-- end -->`, and NAME is a function of TABLES.
Rows are the lines of the JSON Lines files: those of bench/sweep, of bench/compare_torch.py and of
bench/hosts.py, and in printed.jsonl figures that were printed and whose rows were not kept.
published.jsonl has what others published, machines.jsonl the machines by name.
"""

import argparse
import csv
import json
import re
import statistics
import sys
import textwrap
from pathlib import Path

BENCH = Path(__file__).resolve().parent
ROOT, RESULTS = BENCH.parent, BENCH / "results"
sys.path.insert(0, str(BENCH / "sweep"))
import results  # noqa: E402

PAGES = ("docs/performance.md", "docs/gpus.md", "bench/README.md", "bench/ROWS.md",
         "bench/log/MACHINES.md", "bench/results/described-gpus.md")  # fmt: skip
REGION = re.compile(r"(<!-- rows: (\S+) -->\n)(.*?)(<!-- end -->)", re.S)
# Before e9f285c sums of gradients took the bandwidth of copies, and no median counts these.
EARLY = {"h200", "h200-1", "h200-2", "h200-3"}
# Before e8ba924 --recipe fp8 was what --fp8 fast-accumulation is now.
FAST = {"256a4ac", "d8eeb2e", "8fb25c4"}
SIDES = {
    "torch": "PyTorch, nothing offloaded",
    "torch, checkpointing": "PyTorch, activation checkpointing",
    "torch, CPU optimizer": "PyTorch, optimizer on the CPU",
}
CARDS = {"h100": "H100", "a100": "A100 80 GB", "rtx3090": "RTX 3090", "rtx4090": "RTX 4090",
         "rtx5090": "RTX 5090"}  # fmt: skip


# ---- rows ----------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_side(row: dict) -> dict:
    """A row of bench/compare_torch.py, whose sides of ours begin with "penstock" and name caps."""
    if "seq_len" not in row:
        model, seq_len, tokens = row["case"].split(":")
        row |= {"model": model, "seq_len": int(seq_len), "tokens_per_step": int(tokens)}
    taken = row.get("device_peak_bytes")
    if row["side"].startswith("penstock"):
        caps = re.findall(r"(\d+) GiB", row["side"])
        row |= {"host_gib": float(caps[-1]), "device_gib": float(caps[0]) if caps[1:] else 0.0}
        row |= {"measured_over_predicted": row["step_s"] / row["predicted_step_s"], "side": ""}
    elif taken:
        row["device_gib"] = taken / 2**30
    return row


def of_tasks(row: dict) -> dict:
    """A row of bench/hosts.py: tasks of one machine, a GPU each."""
    model, seq_len, caps, tokens = row["case"].split()[:4]
    device, host = map(float, caps.split("/"))
    row |= {"model": model, "seq_len": int(seq_len), "tokens_per_step": int(tokens)}
    row |= {"device_gib": device, "host_gib": host, "gpus": row["tasks"], "recipe": "bf16"}
    row |= {"options": f"two tasks over {row['transport']}", "steps_timed": len(row["loss"]) - 1}
    return row | {"measured_over_predicted": row["step_s"] / row["predicted_step_s"]}


def of_steps(rows: list[dict]) -> dict:
    """The median of a run whose metrics.jsonl was kept, after its first step."""
    model, seq_len, caps, tokens, _, recipe = rows[0]["case"].split()
    device, host = map(float, caps.split("/"))
    median = sorted(rows[1:], key=lambda r: r["tokens_per_s"])[(len(rows) - 1) // 2]
    ratio = median["step_s"] / median["predicted_step_s"]
    return median | {"model": model, "seq_len": int(seq_len), "tokens_per_step": int(tokens),
                     "device_gib": device, "host_gib": host, "recipe": recipe, "gpus": 1,
                     "steps_timed": len(rows) - 1, "measured_over_predicted": ratio}  # fmt: skip


def measured() -> list[dict]:
    """Every measured row with a speed: of each file in its order, the newest last."""
    found = []
    for path in sorted(RESULTS.rglob("*.jsonl")):
        if path.stem in ("published", "machines", "step_vs_torch_cpu") or "-rtx" in str(path):
            continue
        rows = lines(path)
        if "step" in rows[0] and "case" in rows[0]:
            rows = [of_steps(rows)]
        for row in rows:
            if "side" in row:
                row = of_side(row)
            elif "tasks" in row:
                row = of_tasks(row)
            elif "tokens_per_s" in row and "mode" not in row and "step" not in row:
                row = results.upgraded(row, str(path))
            if row.get("tokens_per_s"):
                name = path.relative_to(RESULTS).with_suffix("").as_posix()
                row = {"side": "", "options": "", "gpus": 1, "file": name, **row}
                if row["recipe"] == "fp8" and row["commit"] in FAST:
                    row["options"] = "fp8-fast-accumulation"
                found.append(row)
    return sorted(found, key=lambda r: r["date"])


def predicted(card: str) -> list[dict]:
    rows = lines(RESULTS / f"sweep-{card}/rows.jsonl")
    return list(results.newest(rows))


# ---- tables --------------------------------------------------------------------------------------


def table(head: list[str], rows: list[list]) -> str:
    out = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    out += ["| " + " | ".join(str(c) for c in row) + " |" for row in rows]
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in out) + "\n"


def wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, 100) + "\n"


def caps(row: dict) -> str:
    return "/".join(f"{row[n]:g}" if row[n] else "none" for n in ("device_gib", "host_gib"))


def tok(value: float) -> str:
    return f"{value:,.0f}"


def longer(ratios: list[float]) -> str:
    """How much longer than planned, in %: from, to."""
    low, high = (round(100 * (f(ratios) - 1), 1) for f in (min, max))
    return f"{low:+.1f} to {high:+.1f}" if low != high else f"{low:+.1f}"


def plain(row: dict, **wanted) -> bool:
    """Whether the row is one of Penstock's, on one GPU, without options that change a step."""
    return (
        not row["side"] and row["gpus"] == 1
        and (not row["options"] or row["options"].startswith("val-every"))
        and all(row.get(name) == value for name, value in wanted.items())
    )  # fmt: skip


def memory() -> str:
    """8B under caps beside PyTorch, on one machine in one call."""
    rows = [r for r in measured() if r["file"] == "h200-43-memory"]
    best = next(r for r in rows if r["side"] == "torch")["tokens_per_s"]
    rows.sort(key=lambda r: (r["side"], r["device_gib"]))
    return torch_range() + "\n" + table(
        ["", "GPU memory, GiB", "tokens/s", "of PyTorch, %", "MFU, %"],
        [
            [SIDES.get(r["side"], "Penstock"), f"{r['device_gib']:.0f}", tok(r["tokens_per_s"]),
             f"{100 * r['tokens_per_s'] / best:.0f}", f"{100 * r['mfu']:.1f}"]
            for r in rows
        ],
    )  # fmt: skip


def newest_of_machines(**wanted) -> list[dict]:
    """The newest row of each single machine."""
    rows = [r for r in measured() if plain(r, **wanted) and r["machine_name"] not in EARLY]
    return list({r["machine_name"]: r for r in rows if "H100" not in r["machine"]}.values())


def machines_differ() -> str:
    """8B, sequences of 8,192, 131,072 tokens a step, on all H200s that ran it."""
    out = []
    for recipe in ("bf16", "fp8"):
        for device in (90, 24, 12):
            rows = newest_of_machines(recipe=recipe, device_gib=device, model="8b", seq_len=8192,
                                      tokens_per_step=131072)  # fmt: skip
            rows = [r for r in rows if r["host_gib"] >= 84]
            if not rows:
                continue
            speeds = [r["tokens_per_s"] for r in rows]
            ratios = [
                r["measured_over_predicted"] for r in rows if r.get("measured_over_predicted")
            ]
            out.append([recipe, device, len(rows), tok(statistics.median(speeds)),
                        f"{tok(min(speeds))} to {tok(max(speeds))}" if rows[1:] else "",
                        longer(ratios)])  # fmt: skip
    return table(["recipe", "GPU memory, GiB", "H200s", "median, tokens/s", "from, to",
                  "longer than planned, %"], out)  # fmt: skip


def sizes() -> str:
    """The sweep of 1B and 8B over caps and sequence lengths."""
    rows = [r for r in measured() if r["file"] == "sweep-h200/rows"]
    rows = [r for r in rows if r["host_gib"] not in (16, 70)]  # those have two caps each
    columns = sorted({r["device_gib"] for r in rows})
    keys = sorted({(r["model"], r["seq_len"], -r["host_gib"]) for r in rows},
                  key=lambda k: (k[0] != "8b", *k))  # fmt: skip
    at = {(r["model"], r["seq_len"], -r["host_gib"], r["device_gib"]): r for r in rows}
    body = [
        [f"{k[0].upper()}, {k[1]:,}", f"{-k[2]:g}"]
        + [tok(at[(*k, c)]["tokens_per_s"]) if (*k, c) in at else "" for c in columns]
        for k in keys
    ]
    return table(["model, sequence", "host, GiB", *(f"{c:g} GiB" for c in columns)], body)


LARGER = (  # model, tokens a sequence, recipe, part of the options
    ("32b", 8192, "bf16", ""),
    ("32b", 8192, "fp8", ""),
    ("32b", 8192, "bf16", "lora-rank=16"),
    ("8b", 262144, "bf16", "chunk-tokens=65536"),
    ("7b_1b", 4096, "bf16", ""),
    ("qwen3-30b-a3b", 4096, "bf16", ""),
    ("qwen3-30b-a3b-20", 4096, "bf16", ""),
    ("qwen3-30b-a3b", 4096, "bf16", "lora-rank=16"),
    ("gpt-oss-20b", 4096, "bf16", ""),
    ("qwen3.5-9b", 4096, "bf16", ""),
    ("qwen3.5-9b", 4096, "fp8", ""),
    ("70b", 8192, "fp8", "state-bits=8"),
    ("70b", 4096, "bf16", "base-dtype=nf4"),
)


def gpu_of(row: dict) -> str:
    return "H100" if row["machine_name"].startswith("h100") else "H200"


def larger() -> str:
    """Larger models and longer sequences: the newest row of each."""
    rows = [r for r in measured() if not r["side"]]
    out = []
    for model, seq_len, recipe, options in LARGER:
        r = [r for r in rows if (r["model"], r["seq_len"], r["recipe"], r["gpus"])
             == (model, seq_len, recipe, 1) and options in r["options"]
             and (options or not re.search("lora|state-bits", r["options"]))][-1]  # fmt: skip
        names = {"7b_1b": "7B with experts, 1B active", "qwen3.5-9b": "Qwen3.5-9B's shape",
                 "qwen3-30b-a3b": "Qwen3-30B-A3B's shape",
                 "qwen3-30b-a3b-20": "20 of Qwen3-30B-A3B's 48 blocks",
                 "gpt-oss-20b": "gpt-oss-20b's shape"}  # fmt: skip
        name = names.get(model, model.upper())
        what = f"{name}, {'LoRA' if 'lora' in r['options'] else recipe}"
        what += " over NF4" if "base-dtype=nf4" in options else ""
        what += " of its attention" if "lora-targets=q_proj,k_proj" in r["options"] else ""
        what += ", 8-bit state, `--clip-by previous`" if "state-bits=8" in options else ""
        out.append([what, f"{seq_len:,}", gpu_of(r), f"{r['device_gib']:g}", f"{r['host_gib']:g}",
                    f"{r['tokens_per_step']:,}", tok(r["tokens_per_s"])])  # fmt: skip
    return table(["model", "sequence", "GPU", "its GiB", "host, GiB", "tokens a step", "tokens/s"],
                 out)  # fmt: skip


def less_host() -> str:
    """What less host memory costs, with 8-bit state: each file's rows in its order."""
    out = []
    for r in lines(RESULTS / "h200-less-host.jsonl"):
        if r["model"] == "qwen3.5-9b":
            continue
        options = " ".join(f"--{o.replace('=', ' ')}" for o in r["options"].split())
        out.append([r["model"].upper(), f"{r['host_gib']:g}", f"{r['device_gib']:g}",
                    f"`{options}`" if options else "", f"{r['bytes_a_parameter']:.1f}",
                    f"{r['tokens_per_step']:,}", tok(r["tokens_per_s"])])  # fmt: skip
    return table(["model", "host, GiB", "GPU, GiB", "options", "bytes a parameter",
                  "tokens a step", "tokens/s"], out)  # fmt: skip


def several_gpus() -> str:
    """The newest row of each way to share a step, beside one GPU's with as many tokens a step; of
    four GPUs beside one GPU's with as many tokens a step as each of the four."""
    groups: dict = {}
    for r in measured():
        if r["file"] in ("h100-two-gpus", "h200-four-gpus"):
            tokens = r["tokens_per_step"] if gpu_of(r) == "H100" else 0
            key = (gpu_of(r), r["model"], r["seq_len"], r["device_gib"], r["host_gib"], tokens)
            ways = groups.setdefault(key, {})
            ways[r["gpus"], r["options"], r["tokens_per_step"]] = r
    out = []
    for key, ways in sorted(groups.items(), key=lambda g: (g[0][0], g[0][1] != "8b", g[0][2:])):
        one = next((r for (n, _, _), r in ways.items() if n == 1), None)
        if one is None or len(ways) < 2:
            continue
        for (n, options, tokens), r in sorted(ways.items()):
            way = ", by a ring" * ("layout=ring" in options) + f", {options}" * ("over" in options)
            name = f"{n} {key[0]}{'s' * (n > 1)}{way}"
            gib = f"{r['device_gib']:g}/{r['host_gib']:g}"
            mfu, mp = r.get("mfu"), r["measured_over_predicted"]
            out.append([name, r["model"].upper(), f"{r['seq_len']:,}",
                        gib, f"{tokens:,}", tok(r["tokens_per_s"]),
                        f"{r['tokens_per_s'] / one['tokens_per_s']:.3f}" if r is not one else "1",
                        f"{100 * mfu:.1f}" if mfu else "", f"{mp:.3f}"])  # fmt: skip
    return table(["GPUs", "model", "sequence", "caps", "tokens a step", "tokens/s", "of one",
                  "MFU, %", "m/p"], out)  # fmt: skip


def both_sides() -> list[tuple]:
    """(PyTorch's row, {cap: Penstock's tokens/s over it}) of machines on which both ran in one
    call, PyTorch with its fastest micro-batch."""
    out, rows = [], measured()
    for torch in [r for r in rows if r["side"] == "torch"]:
        names = ("model", "seq_len", "machine_name", "commit", "tokens_per_step")
        same = [r for r in rows if plain(r, **{n: torch[n] for n in names})]
        ratios = {r["device_gib"]: r["tokens_per_s"] / torch["tokens_per_s"] for r in same}
        if ratios:
            out.append((torch, ratios))
    return out


def beside_torch() -> str:
    out = []
    for torch, ratios in both_sides():
        of = [f"{ratios[gib]:.3f}" if gib in ratios else "" for gib in (24, 90, 0)]
        out.append([torch["model"].upper(), f"{torch['seq_len']:,}", torch["machine_name"],
                    tok(torch["tokens_per_s"]), *of])  # fmt: skip
    return table(["model", "sequence", "machine", "PyTorch, tokens/s", "24 GiB over it",
                  "90 GiB over it", "no cap over it"], out)  # fmt: skip


def torch_range() -> str:
    """beside_torch() of 8B in a sentence."""
    of = {gib: [ratios[gib] for torch, ratios in both_sides()
                if torch["model"] == "8b" and gib in ratios] for gib in (24, 90)}  # fmt: skip
    said = [f"under {gib} GiB {min(v):.3f} to {max(v):.3f} on {len(v)}" for gib, v in of.items()]
    return wrapped(
        "Penstock over PyTorch with nothing offloaded, each pair on one H200: "
        f"{said[0]} machines, {said[1]}."
    )


def fp8_gain() -> str:
    """FP8 over bf16 under the same caps, each pair of one machine and call."""
    rows, of = [r for r in measured() if plain(r, model="8b")], {}
    names = ("seq_len", "device_gib", "host_gib", "tokens_per_step", "machine_name", "commit")
    bf16 = {tuple(r[n] for n in names): r for r in rows if r["recipe"] == "bf16"}
    for r in [r for r in rows if r["recipe"] == "fp8"]:
        same = bf16.get(tuple(r[n] for n in names))
        if same:
            of.setdefault(r["seq_len"], []).append(r["tokens_per_s"] / same["tokens_per_s"])
    said = [f"at {n:,} tokens {min(v):.2f} to {max(v):.2f} in {len(v)} pairs" if v[1:]
            else f"at {n:,} tokens {v[0]:.2f}" for n, v in sorted(of.items())]  # fmt: skip
    return wrapped(
        f"Speed of 8B over that in bf16 under the same caps, on H200s: {', '.join(said)}."
    )


def fp8_loss() -> str:
    """What FP8 gains, and what it ended at above bf16."""
    gaps = json.loads((RESULTS / "fp8-seeds-h100.json").read_text())["gaps"]
    rows = [
        ("`--recipe fp8`", "fp8 - bf16"),
        ("the same with `--fp8 fast-accumulation`", "fp8:fast - bf16"),
        ("bf16, another seed of its rounding", "bf16~2 - bf16"),
        ("FP8 broken on purpose, after a fifth of the steps", "fp8-broken - bf16"),
    ]
    return fp8_gain() + "\n" + table(
        ["0.3B, 90 million tokens of code", "loss above bf16, nats"],
        [[what, f"{gaps[name]['gap']:+.3f}"] for what, name in rows],
    )  # fmt: skip


def rounding_loss() -> str:
    """What the rounding of bf16 weights costs: the mean of the gaps of three seeds."""
    gaps = json.loads((RESULTS / "rounding-h200.json").read_text())["gaps"]
    rows = [
        ("`--recipe fp32-master`", "fp32-master - bf16"),
        ("PyTorch with fp32 masters", "torch-masters - bf16"),
        ("PyTorch, bf16 parameters rounded to nearest", "torch-nearest - bf16"),
    ]
    return table(["curve", "above `--recipe bf16`, nats", "spread of the seeds"],
                 [[what, f"{gaps[name]['gap']:+.3f}", f"{gaps[name]['spread']:.3f}"]
                  for what, name in rows])  # fmt: skip


def cards() -> str:
    """8B in sequences of 8,192 by the plans of described GPUs, where the caps suffice."""
    rows = {card: [r for r in predicted(card) if (r["model"], r["seq_len"]) == ("8b", 8192)
                   and r["host_gib"] >= 64] for card in ("rtx4090", "rtx5090")}  # fmt: skip
    columns = sorted({r["device_gib"] for of in rows.values() for r in of})
    out = []
    for card, of in rows.items():
        for recipe, host in sorted({(r["recipe"], r["host_gib"]) for r in of}):
            at = {r["device_gib"]: r for r in of if (r["recipe"], r["host_gib"]) == (recipe, host)}
            out.append([CARDS[card], recipe, f"{host:g}", *(plan_cell(at.get(c)) for c in columns)])
    return table(["GPU", "recipe", "host, GiB", *(f"{c:g} GiB" for c in columns)], out)


def plan_cell(row: dict | None) -> str:
    """Tokens/s in italics, or the host memory that is needed."""
    if row is None:
        return ""
    if row["status"] == results.OK:
        return f"*{tok(row['predicted_tokens_per_s'])}*"
    return "needs " + row["reason"].removeprefix("host ").removesuffix(" GiB")


def ours_beside(row: dict) -> str:
    """What Penstock ran on that GPU within that memory, or the plan's tokens/s in italics."""
    same = [r for r in measured() if not r["side"] and gpu_of(r).lower() == row["gpu"]
            and r["gpus"] == 1 and r["options"] in ("", "chunk-tokens=65536")
            and (r["model"].upper(), r["seq_len"], r["recipe"])
            == (row["model"], row.get("seq_len"), row["recipe"])
            and r["device_gib"] <= row.get("device_gib", 0)]  # fmt: skip
    if same:
        most = max(r["device_gib"] for r in same)
        speeds = [r["tokens_per_s"] for r in same if r["device_gib"] == most]
        of = f", {len(speeds)} runs" if speeds[1:] else ""
        return f"{tok(statistics.median(speeds))} in {most:g} GiB{of}"
    planned = row.get("planned_tokens_per_s")
    return f"*{tok(planned)}*" if planned else ""


def published() -> str:
    """Those of the published rows that the page shows, within its 100 columns."""
    out = []
    for r in [r for r in lines(RESULTS / "published.jsonl") if r.get("page")]:
        speed = tok(r["tokens_per_s"])
        if "tokens_per_s_to" in r:
            speed += f" to {tok(r['tokens_per_s_to'])}"
        length = f"{r['seq_len']:,}" if "seq_len" in r else "not given"
        what = f"{r['model']}, {length}, {r['recipe']}"
        gib = f"{r['device_gib']:g} GiB" if "device_gib" in r else ""
        out.append([CARDS[r["gpu"]], what, f"{r['project']} {r['date']}", speed, gib,
                    ours_beside(r)])  # fmt: skip
    return table(["GPU", "model, sequence, recipe", "who, when", "tokens/s", "in", "Penstock"],
                 out)  # fmt: skip


def described() -> str:
    """Plans by --gpu-model beside published rows: the descriptions' fit and controls."""
    out = []
    for r in lines(RESULTS / "published.jsonl"):
        if "use" not in r:
            continue
        to = r.get("tokens_per_s_to", r["tokens_per_s"])
        speed = (r["tokens_per_s"] + to) / 2
        source = f"{r['project']}, {r['date']}"
        if to != r["tokens_per_s"]:
            source += f", of {tok(r['tokens_per_s'])} to {tok(to)}"
        out.append([r["gpu"], r["model"], f"{r['seq_len']:,}", r["recipe"], r["plan_device_gib"],
                    tok(r["planned_tokens_per_s"]), tok(speed),
                    f"{r['planned_tokens_per_s'] / speed:.3f}", source, r["use"]])  # fmt: skip
    return table(["GPU", "model", "sequence", "recipe", "GPU memory, GiB", "planned, tok/s",
                  "published", "ratio", "source", "use"], out)  # fmt: skip


# ---- for who reproduces --------------------------------------------------------------------------


def all_rows(choose) -> str:
    """Every row that choose() takes, with machine, commit and date."""
    out = []
    for r in measured():
        if not choose(r):
            continue
        says = [SIDES.get(r["side"], r["side"]) or "", r["options"] if not r["side"] else ""]
        says += [f"{r['gpus']} GPUs"] if r["gpus"] > 1 else []
        where = caps(r) if not r["side"] else f"{r['device_gib']:.0f}" if "device_gib" in r else ""
        mfu, mp = r.get("mfu"), r.get("measured_over_predicted")
        out.append([r["model"].upper(), f"{r['seq_len']:,}", where, f"{r['tokens_per_step']:,}",
                    r["recipe"], ", ".join(s for s in says if s), r["machine_name"],
                    f"{r['commit']}, {r['date']}".strip(", "), r.get("steps_timed", ""),
                    tok(r["tokens_per_s"]), f"{100 * mfu:.1f}" if mfu else "",
                    f"{mp:.3f}" if mp else ""])  # fmt: skip
    return table(["model", "sequence", "caps", "tokens a step", "recipe", "what else", "machine",
                  "commit, date", "steps", "tok/s", "MFU, %", "m/p"], out)  # fmt: skip


def kernels() -> str:
    """What the kernels of a step reach, by bench/limit.py."""
    runs = ("limit-h200-bf16-90", "limit-h200-fp8-90", "limit-h200-fp8-24",
            "limit-h200-1b-2048", "limit-h200-1b-8192")  # fmt: skip
    found: dict = {}
    for run in runs:
        with open(RESULTS / f"{run}.csv") as file:
            for row in csv.DictReader(file):
                found.setdefault(row["family"], {})[run] = row
    out = []
    for family, at in found.items():
        cells = []
        for run in runs:
            r = at.get(run)
            if not r:
                cells.append("")
                continue
            flops = float(r["tflops_per_s"] or 0)
            rate = f"{flops:.0f} TFLOP/s" if flops else f"{float(r['gb_per_s']):,.0f} GB/s"
            share = f", {float(r['of_ceiling']):.2f}" if r["of_ceiling"] else ""
            cells.append(rate + share)
        out.append([family, *cells])
    return table(["family", "bf16 90/100", "fp8 90/100", "fp8 24/100", "1B, 2,048", "1B, 8,192"],
                 out)  # fmt: skip


def heatmaps() -> str:
    out = []
    for folder in sorted(RESULTS.glob("sweep-*")):
        out.append(f"- {folder.name} ([table](results/{folder.name}/sweep.csv)):")
        out += [f"  - [{path.stem}](results/{folder.name}/{path.name})"
                for path in sorted(folder.glob("*.png"))]  # fmt: skip
    return "\n".join(out) + "\n"


def kinds_of_machines() -> str:
    rows = [r for r in lines(RESULTS / "machines.jsonl") if "kind" in r]
    return table(["name", "what it is", "cores", "memory", "driver", "where used"],
                 [[r.get(n, "") for n in ("kind", "what", "cores", "memory", "driver", "used")]
                  for r in rows])  # fmt: skip


def single_machines() -> str:
    n_rows: dict = {}
    for r in measured():
        n_rows[r["machine_name"]] = n_rows.get(r["machine_name"], 0) + 1
    rows = [r for r in lines(RESULTS / "machines.jsonl") if "name" in r]
    return table(["name", "ran at commit", "date", "rows", "host memory"],
                 [[r["name"], r.get("ran", ""), r["date"], n_rows.get(r["name"], ""),
                   r.get("says", "")] for r in rows])  # fmt: skip


def is_main(row: dict) -> bool:
    return (row["model"], row["seq_len"], row["gpus"]) == ("8b", 8192, 1) and not row["side"]


TABLES = {
    "memory": memory,
    "machines-differ": machines_differ,
    "sizes": sizes,
    "larger": larger,
    "less-host": less_host,
    "several-gpus": several_gpus,
    "beside-torch": beside_torch,
    "fp8": fp8_loss,
    "rounding-loss": rounding_loss,
    "cards": cards,
    "published": published,
    "described": described,
    "all-8b-bf16": lambda: all_rows(lambda r: is_main(r) and r["recipe"] != "fp8"),
    "all-8b-fp8": lambda: all_rows(lambda r: is_main(r) and r["recipe"] == "fp8"),
    "all-other": lambda: all_rows(lambda r: not is_main(r) and not r["side"] and r["gpus"] == 1),
    "all-several-gpus": lambda: all_rows(lambda r: r["gpus"] > 1),
    "all-others": lambda: all_rows(lambda r: r["side"]),
    "kernels": kernels,
    "heatmaps": heatmaps,
    "kinds": kinds_of_machines,
    "machines": single_machines,
}


# ---- pages ---------------------------------------------------------------------------------------


def filled(text: str) -> str:
    """The page with its tables. KeyError: a table that nobody makes."""
    return REGION.sub(lambda m: m[1] + TABLES[m[2]]() + m[4], text)


def differing() -> dict:
    """The pages that are not what this program writes, with what it writes."""
    pages = {ROOT / name: filled((ROOT / name).read_text()) for name in PAGES}
    return {page: text for page, text in pages.items() if text != page.read_text()}


def name_rows(name: str, path: Path) -> int:
    """Names the machine of the rows that have none. Lines keep their bytes otherwise."""
    new, n = [], 0
    for line in path.read_text().splitlines():
        if "machine_name" not in json.loads(line):
            line, n = (
                f"{line.rstrip()[:-1]}, {json.dumps('machine_name')}: {json.dumps(name)}}}",
                n + 1,
            )
        new.append(line + "\n")
    path.write_text("".join(new))
    return n


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--check", action="store_true", help="write nothing, say what differs")
    p.add_argument("--name", nargs=2, metavar=("MACHINE", "FILE"), help="name a machine")
    a = p.parse_args()
    if a.name:
        known = [r["name"] for r in lines(RESULTS / "machines.jsonl") if "name" in r]
        if a.name[0] not in known:
            p.error(
                f"{a.name[0]} is no machine of bench/results/machines.jsonl: add its line first"
            )
        print(f"{name_rows(a.name[0], Path(a.name[1]))} rows are of {a.name[0]}")
    pages = differing()
    for page, text in pages.items():
        print(f"{page.relative_to(ROOT)}: {'differs' if a.check else 'written'}")
        if not a.check:
            page.write_text(text)
    return 1 if a.check and pages else 0


if __name__ == "__main__":
    sys.exit(main())
