"""Compares the time of a Penstock step with PyTorch eager's, without caps and under the least caps.

    make all venv-test
    build/venv-test/bin/python bench/step_vs_torch.py [--config models/demo.json] [--seq-len 256]
                                                      [--tokens 4096] [--blocks 5]

Both sides train the same fp32 Llama in one process: the same weights, tokens and threads; forward,
backward, clipping by the exact global norm, AdamW. The sides take turns in blocks of steps. The
first step of a block does not count, and the median of the others does. PyTorch's side is eager:
F.linear, F.scaled_dot_product_attention, F.rms_norm, fused AdamW.

Prints a line of JSON for each side. --out appends the lines to a file, with machine and commit.
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

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench")]

import torch_llama  # noqa: E402


class TorchSide:
    """The same model and update in PyTorch eager."""

    def __init__(self, trainer, model, threads):
        import torch

        self.torch = torch
        torch.set_num_threads(threads)
        self.p = {n: torch.nn.Parameter(torch.from_numpy(trainer.read(n))) for n in trainer.params}
        matrices = [v for v in self.p.values() if v.dim() == 2]
        vectors = [v for v in self.p.values() if v.dim() == 1]
        self.opt = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=3e-4,
            betas=(0.9, 0.95),
            eps=1e-8,
            fused=True,
        )
        self.model = torch_llama.Llama(model, self.p)

    def step(self, ids, targets, micro):
        """One update, by gradient accumulation over `micro` sequences at a time."""
        t = self.torch
        begin = time.perf_counter()
        self.opt.zero_grad(set_to_none=True)
        total = 0.0
        for i in range(0, len(ids), micro):
            logits = self.model(t.from_numpy(ids[i : i + micro]).long())
            loss = t.nn.functional.cross_entropy(
                logits.flatten(0, 1),
                t.from_numpy(targets[i : i + micro]).long().flatten(),
                reduction="sum",
            )
            (loss / targets.size).backward()
            total += loss.item()
        t.nn.utils.clip_grad_norm_(self.p.values(), 1.0)
        self.opt.step()
        return time.perf_counter() - begin, total / targets.size


def parse():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--config", default=str(ROOT / "models/demo.json"))
    ap.add_argument("--seq-len", type=int, default=256)
    ap.add_argument("--tokens", type=int, default=4096)
    ap.add_argument(
        "--micro",
        type=int,
        default=0,
        help="sequences that PyTorch takes at a time; 0: the fastest of 1, 4 and all",
    )
    ap.add_argument("--blocks", type=int, default=5)
    ap.add_argument(
        "--steps", type=int, default=4, help="steps a block; the first one does not count"
    )
    ap.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    ap.add_argument("--out", help="append the rows to this file")
    return ap.parse_args()


def batches(vocab, a):
    """Token ids with the distribution of text (Zipf), the same for both sides."""
    rng = np.random.default_rng(0)

    ids = np.minimum(rng.zipf(1.2, a.tokens + 1) - 1, vocab - 1).astype(np.int32)
    return lambda _step: (ids[:-1], ids[1:])


def main():
    a = parse()
    if a.out:  # checked before the measurement, which takes minutes
        Path(a.out).parent.mkdir(parents=True, exist_ok=True)
        open(a.out, "a").close()
    from penstock.model import ModelConfig
    from penstock.plan import Hardware, Plan
    from penstock.train import Trainer

    with tempfile.TemporaryDirectory() as tmp:
        model_dir = Path(tmp) / "model"
        subprocess.run(
            [sys.executable, ROOT / "models/init_model.py", a.config, model_dir, "--dtype", "fp32"],
            check=True,
            stdout=2,
        )
        model = ModelConfig.read(model_dir)
        data = batches(model.vocab_size, a)
        common = {
            "seq_len": a.seq_len,
            "tokens_per_step": a.tokens,
            "recipe": "fp32",
            "threads": a.threads,
            "hardware": Hardware.measure(a.threads, 2.0),
        }
        free = Plan(model, **common)
        pinned = {
            "chunk_tokens": free.report["chunk_tokens"],
            "chunks_per_round": free.report["chunks_per_round"],
        }
        least, _ = Plan.smallest(model, **common)
        least_pinned, _ = Plan.smallest(model, **common, **pinned)
        plans = {
            "penstock uncapped": free,
            "penstock tightest, same chunks": Plan(
                model, device_mem=least_pinned, **common, **pinned
            ),
            "penstock tightest": Plan(model, device_mem=least, **common),
        }
        trainers = {name: Trainer(model_dir, plan, data) for name, plan in plans.items()}
        torch_side = TorchSide(trainers["penstock uncapped"], model, a.threads)
        ids, targets = (np.array(x).reshape(-1, a.seq_len) for x in data(0))
        micros = [a.micro] if a.micro else sorted({1, 4, len(ids)} & set(range(1, len(ids) + 1)))
        times = {
            **{name: [] for name in trainers},
            **{f"torch eager, {m} a time": [] for m in micros},
        }
        for _ in range(a.blocks):
            for name, trainer in trainers.items():
                times[name] += [s.step_s for s in trainer.steps(a.steps)][1:]
            for m in micros:
                times[f"torch eager, {m} a time"] += [
                    torch_side.step(ids, targets, m)[0] for _ in range(a.steps)
                ][1:]
        report(a, times, plans, trainers)


def report(a, times, plans, trainers):
    median = {name: statistics.median(t) for name, t in times.items()}
    torch_best = min(v for n, v in median.items() if n.startswith("torch"))
    free = median["penstock uncapped"]
    commit = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    rows = []
    for name, s in median.items():
        row = {
            "side": name,
            "step_s": round(s, 4),
            "tokens_per_s": round(a.tokens / s),
            "steps": len(times[name]),
            "of_torch": round(s / torch_best, 3),
        }
        if name in plans:
            r = plans[name].report
            busy = max(r["stream_busy_s"][1:]) / r["step_s"]
            row |= {
                "of_uncapped": round(s / free, 3),
                "device_used_bytes": r["device_used_bytes"],
                "chunk_tokens": r["chunk_tokens"],
                "chunks_per_round": r["chunks_per_round"],
                "n_rounds": r["n_rounds"],
                "recompute_fraction": round(r["recompute_flops"] / r["model_flops"], 4),
                "predicted_step_s": round(r["step_s"], 4),
                "measured_over_predicted": round(s / r["step_s"], 3),
                "busiest_transfer_fraction": round(busy, 3),
            }
        rows.append(
            {
                **row,
                "config": Path(a.config).name,
                "seq_len": a.seq_len,
                "tokens": a.tokens,
                "threads": a.threads,
                "machine": f"{platform.machine()} {next(iter(plans.values())).hardware.name}",
                "commit": commit,
            }
        )
    for row in rows:
        print(json.dumps(row))
    if a.out:
        with open(a.out, "a") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)
    for trainer in trainers.values():
        trainer.close()


if __name__ == "__main__":
    main()
