"""The speed of tasks that train together as on several hosts, here on the GPUs of one machine.

    python3 bench/hosts.py --out DIR 8b:8192:24:100:262144 [--tasks 2] [--transport nccl]

CASE is MODEL:SEQ_LEN:DEVICE_GIB:HOST_GIB:TOKENS_PER_STEP[:MORE], as in bench/sweep. Its caps are
those of a task, its tokens those of all tasks. Task k trains on GPU k, with an equal part of the
machine's CPUs. Before they start, `penstock profile --quick` measures the rates anew on all GPUs at
once, because the tasks share the memory of one host, which tasks of several hosts do not. All tasks
plan with the rates of the GPU that ends last.

Prints the tokens/s of the median step and what rank 0 says of the network. Writes DIR/row.json,
rank 0's run directory DIR/run-0, what each task said to DIR/rank-K.txt, and the rates.
For the speed of one GPU, run `python3 bench/sweep --out DIR` with the same case.
"""

import argparse
import json
import os
import re
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "sweep"))

import cases  # noqa: E402
import measure  # noqa: E402
from cases import Case, SweepError  # noqa: E402
from machine import ROOT, commit, die_with_parent, machine, versions  # noqa: E402


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("case", metavar="CASE")
    p.add_argument("--out", type=Path, required=True, help="folder of the result")
    p.add_argument("--tasks", type=int, default=2)
    p.add_argument("--transport", default="nccl", choices=("nccl", "tcp"))
    p.add_argument("--backend", default="cuda", choices=("cuda", "cpu"))
    p.add_argument("--limit-s", type=float, default=600, help="seconds after which all tasks end")
    p.add_argument("--binary", type=Path, default=ROOT / "build/bin/penstock")
    p.add_argument("--commit", default=None, help="commit to record (default: git's)")
    a = p.parse_args()
    if a.tasks < 2:
        raise SweepError(f"--tasks is {a.tasks}: at least 2")
    return a


def with_options(case: Case, **more) -> Case:
    return replace(case, options=(*case.options, *((k, str(v)) for k, v in more.items())))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def said_by(out: Path, rank: int) -> Path:
    return out / f"rank-{rank}.txt"


def new_cache(work: Path) -> dict:
    """The environment of a cache that has the algorithms of this machine's cache, and no rates."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    folder = work / "cache/penstock"
    folder.mkdir(parents=True)
    for path in user.glob("gemm-*.json"):
        shutil.copy(path, folder)
    return {"XDG_CACHE_HOME": str(folder.parent)}


PROFILE_S = "48"  # of all measurements; three times the default


def measure_rates(binary, backend: str, tasks: int, threads: int, env: dict) -> None:
    """Measures the rates on the GPUs of all tasks at once. Each phase lasts about a second, so that
    it lies beside the same phase of the others: they share one host's memory."""
    words = [str(binary), "profile", "--quick", "--backend", backend, "--threads", str(threads)]
    calls = [words]
    if backend == "cuda":
        calls = [[*words, "--seconds", PROFILE_S, "--gpu", str(k)] for k in range(tasks)]
    running = [
        subprocess.Popen(
            words,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent(),
        )
        for words in calls
    ]
    said = [process.communicate()[1] for process in running]
    for process, text in zip(running, said, strict=True):
        if process.returncode:
            raise SweepError(
                f"penstock profile ended with {process.returncode} and said: {last_line(text)}"
            )


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "nothing"


def start(a, case: Case, work: Path, port: int) -> list:
    """The tasks. Rank 0 alone writes into its run directory."""
    threads = max(1, (os.cpu_count() or a.tasks) // a.tasks - 2)
    common = {"backend": a.backend, "hosts-transport": a.transport, "threads": threads}
    own = [{**common, "gpu": k} if a.backend == "cuda" else common for k in range(a.tasks)]
    model, shards = work / "model", [str(work / "random.bin")]
    (a.out / "run-0/metrics.jsonl").unlink(missing_ok=True)  # of the measurement before
    words = [
        measure.command_of(with_options(case, **o), a.binary, shards, model, a.out / f"run-{k}")
        for k, o in enumerate(own)
    ]
    env = os.environ | new_cache(work)
    measure_rates(a.binary, a.backend, a.tasks, threads, env)
    for path in (work / "cache/penstock").glob("hardware-*.json"):
        shutil.copy(path, a.out)
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(a.tasks)}
    master["PENSTOCK_HOSTS_SECRET"] = secrets.token_hex(32)
    return [
        subprocess.Popen(
            [w for w in line if w != "--quiet"],
            env=env | master | {"RANK": str(k), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=open(said_by(a.out, k), "w"),
            preexec_fn=die_with_parent(),
        )
        for k, line in enumerate(words)
    ]


def end(tasks: list, limit_s: float, out: Path) -> list[str]:
    """What the tasks said. SweepError: one of them failed, or took too long."""
    until = time.monotonic() + limit_s
    try:
        for task in tasks:
            task.wait(timeout=max(1, until - time.monotonic()))
    except subprocess.TimeoutExpired as exc:
        raise SweepError(
            f"the tasks took more than {limit_s:.0f} s: {said_by(out, 0)} and the like have what "
            "they said"
        ) from exc
    finally:
        for task in tasks:
            task.kill()
    said = [said_by(out, rank).read_text() for rank in range(len(tasks))]
    for rank, (task, text) in enumerate(zip(tasks, said, strict=True)):
        if task.returncode:
            raise SweepError(
                f"rank {rank} ended with {task.returncode} and said: {last_line(text)}"
            )
    return said


def run(a) -> dict:
    case = cases.parse(a.case, a.binary)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "model").mkdir()
        (work / "model/config.json").write_text(case.config)
        n_tokens = case.tokens_per_step * case.steps + case.seq_len + 1
        measure.random_shard(work / "random.bin", n_tokens, cases.vocabulary(case.config))
        said = end(start(a, case, work, free_port()), a.limit_s, a.out)
        lines = (a.out / "run-0/metrics.jsonl").read_text().splitlines()
        plan = json.loads((a.out / "run-0/plan.json").read_text())
    metrics = [json.loads(line) for line in lines]
    step_s = statistics.median(m["step_s"] for m in metrics[case.warm_up :])
    return {
        "case": case.label(),
        "tasks": a.tasks,
        "transport": a.transport,
        "step_s": step_s,
        "tokens_per_s": case.tokens_per_step / step_s,
        "predicted_step_s": plan["predicted_step_s"],
        "network_bytes_per_s": plan["network_bytes_per_s"],
        "device_peak_gib": metrics[-1]["device_peak_bytes"] / 2**30,
        "host_peak_gib": metrics[-1]["host_peak_bytes"] / 2**30,
        "loss": [m["loss"] for m in metrics],
        "said": re.findall("(?:gradients go over|NCCL).*", said[0]),
        "machine": machine(),
        "versions": versions(a.binary),
        "commit": a.commit or commit() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> int:
    try:
        a = arguments()
        a.out.mkdir(parents=True, exist_ok=True)
        row = run(a)
    except SweepError as exc:
        print(f"bench/hosts.py: {exc}", file=sys.stderr)
        return 2
    (a.out / "row.json").write_text(json.dumps(row, indent=1) + "\n")
    print(*row["said"], sep="\n")
    print(
        f"{row['tasks']} tasks over {row['transport']}: {row['tokens_per_s']:,.0f} tokens/s, "
        f"{row['step_s']:.3f} s a step, {row['predicted_step_s']:.3f} s predicted with a network of "
        f"{row['network_bytes_per_s'] / 1e9:.2f} GB/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
