"""Measures training speed on a GPU: one `penstock train` a case, one JSON object a case.

    python3 bench/rows.py --data SHARDS --out bench/results/h200-8b.jsonl \\
        8b:8192:24:70:180224 8b:8192:90:70:180224

A case is MODEL:SEQ_LEN:DEVICE_GIB:HOST_GIB:TOKENS_PER_STEP[:MORE]. MODEL names a file of models/,
whose weights are drawn from a seed. DEVICE_GIB 0 means no cap. MORE are options such as
recipe=fp32-master,steps=6.

Every step includes clipping and the optimizer. The first two steps do not count in the median;
warm-up=N in MORE changes that. "waits" are the longest waits of the compute stream in the traced
step, in seconds, measured and planned. The program needs Python's standard library alone.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2


def text_of(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine():
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in open("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    gpus = text_of(
        ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    ).splitlines() or [""]
    return f"{gpus[0]}{f' (one of {len(gpus)})' if len(gpus) > 1 else ''}; {cpu}, {os.cpu_count()} CPUs"


def parse(case):
    model, seq_len, device, host, tokens, *more = case.split(":", 5)
    options = dict(o.split("=", 1) for o in more[0].split(",")) if more else {}
    return (
        model,
        int(seq_len),
        float(device),
        float(host),
        int(tokens),
        int(options.pop("warm-up", WARM_UP)),
        options,
    )


def command_of(case, args, folder, run_dir):
    model, seq_len, device, host, tokens, _, options = parse(case)
    folder.mkdir(parents=True)
    config = json.loads((ROOT / f"models/{model}.json").read_text())
    # only the shape matters here, not what the model was trained for
    config["max_position_embeddings"] = max(seq_len, config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config))
    options = {
        "steps": "5",
        "clip-norm": "1",
        "lr": "1e-5",
        "warmup-steps": "100",
        "trace-steps": "1",
        **options,
    }
    command = [
        str(args.binary),
        "train",
        "--model",
        str(folder),
        "--init-weights",
        "--data",
        *args.data,
        "--seq-len",
        str(seq_len),
        "--tokens-per-step",
        str(tokens),
        "--run-dir",
        str(run_dir),
        "--json",
    ]
    if device:
        command += ["--device-mem", f"{device:g}GiB"]
    if host:
        command += ["--host-mem", f"{host:g}GiB"]
    return command + [
        word
        for name, value in options.items()
        for word in (["--" + name] if value == "" else ["--" + name, value])
    ]


def row_of(case, metrics, plan, seconds):
    timed = metrics[parse(case)[5] :] or metrics
    step_s = statistics.median(m["step_s"] for m in timed)
    last = metrics[-1]
    return {
        "case": case,
        "tokens_per_s": last["tokens"] / step_s,
        "step_s": step_s,
        "predicted_step_s": last["predicted_step_s"],
        "measured_over_predicted": step_s / last["predicted_step_s"],
        "steps_timed": len(timed),
        "tokens": last["tokens"],
        "mfu": statistics.median(m["mfu"] for m in timed),
        "hfu": statistics.median(m["hfu"] for m in timed),
        "loss": [m["loss"] for m in metrics],
        "device_peak_gib": last["device_peak_bytes"] / 2**30,
        "host_peak_gib": last["host_peak_bytes"] / 2**30,
        "planned_device_gib": plan["device_used_bytes"] / 2**30,
        "planned_host_gib": plan["host_used_bytes"] / 2**30,
        "wall_s": seconds,
    }


def run(case, args, work, note):
    run_dir = (
        args.keep / case.replace(":", "_").replace(",", "_").replace("=", "_")
        if args.keep
        else work / "run"
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    command = command_of(case, args, work / "model", run_dir)
    began = time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    metrics_path = run_dir / "metrics.jsonl"
    metrics = (
        [json.loads(line) for line in metrics_path.read_text().splitlines()]
        if metrics_path.exists()
        else []
    )
    if not metrics:
        return {"case": case, "failed": done.returncode, **note}
    plan = json.loads((run_dir / "plan.json").read_text())
    summary = json.loads(done.stdout) if done.returncode == 0 else {}
    waits = [
        {k: w[k] for k in ("for", "seconds", "planned_seconds")}
        for w in summary.get("stalls", [])
        if w["stream"] == "compute"
    ][:4]
    shown = " ".join(command).replace(str(work) + "/", "").replace(str(ROOT) + "/", "")
    return {
        **row_of(case, metrics, plan, time.time() - began),
        "exit": done.returncode,
        "waits": waits,
        "command": shown,
        **note,
    }


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--binary", type=Path, default=ROOT / "build/bin/penstock")
    p.add_argument("--data", nargs="+", required=True, help="token shards")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--keep", type=Path, help="folder for each run's metrics, plan and timeline")
    p.add_argument("--commit", default=None, help="commit to record (default: git's)")
    p.add_argument("cases", nargs="+")
    args = p.parse_args()
    note = {
        "machine": machine(),
        "commit": args.commit or text_of(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]),
        "date": time.strftime("%Y-%m-%d"),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    for case in args.cases:
        with tempfile.TemporaryDirectory() as work:
            row = run(case, args, Path(work), note)
        failed += "failed" in row
        with open(args.out, "a") as f:
            f.write(json.dumps(row) + "\n")
        print(
            json.dumps({k: v for k, v in row.items() if k not in ("command", "machine", "loss")}),
            file=sys.stderr,
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
