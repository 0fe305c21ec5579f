"""Compares the loss curve of Penstock with PyTorch's.

    python3 bench/curve.py --data SHARDS [--steps 200] [--config FILE] [--backend cuda] [--fp32]
                           [--out bench/results/curve-NAME.json]
    python3 bench/curve.py --plot bench/results/curve-NAME.json    draws the picture beside the JSON

Both sides train the same Llama from the same weights on the same tokens in the same order.
Clipping, betas, eps, weight decay (of matrices alone) and each step's learning rate are the same.

Both keep fp32 master weights and fp32 moments, and compute in bf16 with weights rounded to bf16:
Penstock    by its recipe fp32-master
PyTorch     eager, with bf16 copies of fp32 parameters, a fused AdamW on these, and fp32 logits

--fp32 adds PyTorch with everything in fp32, which shows the effect of bf16 alone. The default model
has 12 layers of 768: 90 to 130 million parameters, by the data's vocabulary. Without matplotlib
only the JSON is written, and the picture can be drawn from it on another machine.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench")]

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
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0


def parse():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--data", nargs="+", help="token shards of real text")
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
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--fp32", action="store_true", help="train PyTorch in fp32 too")
    ap.add_argument("--commit", help="commit to record (default: git's)")
    ap.add_argument("--out", help="file of the result (default: bench/results/curve-DEVICE.json)")
    ap.add_argument("--plot", metavar="FILE", help="draw this result and stop")
    a = ap.parse_args()
    if not a.plot and not a.data:
        ap.error("--data or --plot is needed")
    return a


# ---- the model and the data of both sides --------------------------------------------------------


def make_model(a, folder):
    """Write the model directory with seeded weights."""
    from penstock import Dataset

    config = json.loads(Path(a.config).read_text()) if a.config else dict(LLAMA)
    if "vocab_size" not in config:
        data = Dataset(a.data, 1 << 16)
        largest = max(
            int(data.read(a.seq_len, i)[0].max()) for i in range(data.n_sequences(a.seq_len))
        )
        config["vocab_size"] = (largest + 256) // 256 * 256
    (folder / "in.json").write_text(json.dumps(config))
    subprocess.run(
        [
            sys.executable,
            ROOT / "models/init_model.py",
            folder / "in.json",
            folder / "model",
            "--seed",
            str(a.seed),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder / "model", config


class Batches:
    """batch(step) for both sides: each sequence of the data once, in a seeded order."""

    def __init__(self, a, vocab_size):
        from penstock import Dataset

        self.data, self.seq_len, self.n = (
            Dataset(a.data, vocab_size),
            a.seq_len,
            a.tokens // a.seq_len,
        )
        windows, wanted = self.data.n_sequences(a.seq_len), a.steps * self.n
        if windows < wanted:
            sys.exit(
                f"the data has {windows} sequences of {a.seq_len} tokens, {a.steps} steps need "
                f"{wanted}: fewer --steps or --tokens"
            )
        self.order = np.random.default_rng(a.seed).permutation(windows)

    def __call__(self, step):
        read = [
            self.data.read(self.seq_len, int(i))
            for i in self.order[step * self.n : (step + 1) * self.n]
        ]
        return np.stack([tokens for tokens, _ in read]), np.stack([targets for _, targets in read])


# ---- the two sides -------------------------------------------------------------------------------


def penstock_side(a, where, batches):
    """Train with Penstock. Returns the metrics of every step, the first weights, the plan's report
    and the model."""
    from penstock import Hardware, ModelConfig, Plan, Trainer

    hardware = Hardware.estimate(0, a.backend)
    model = ModelConfig.read(where)
    plan = Plan(
        model,
        seq_len=a.seq_len,
        tokens_per_step=a.tokens,
        recipe="fp32-master",
        device_mem=a.device_mem,
        hardware=hardware,
        threads=hardware.n_threads,
        one_document=True,
        keep_grads=False,
        trace_steps=0,
    )
    began = time.time()
    with Trainer(
        where,
        plan,
        batches,
        lr=a.lr,
        min_lr=a.lr / 10,
        lr_schedule="cosine",
        warmup_steps=a.steps // 10,
        total_steps=a.steps,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
        weight_decay=DECAY,
        clip_norm=CLIP,
    ) as trainer:
        weights = {n: trainer.read(n) for n in trainer.params}
        metrics = list(trainer.steps(a.steps))
    figures = {
        "loss": [m.loss for m in metrics],
        "grad_norm": [m.grad_norm for m in metrics],
        "seconds": time.time() - began,
        "device_peak_bytes": max(m.device_peak_bytes for m in metrics),
    }
    return figures, [m.lr for m in metrics], weights, plan


def torch_side(a, model, weights, lrs, batches, device, dtype):
    """Train the same steps with PyTorch eager: fp32 weights and moments, compute in `dtype`."""
    import torch
    import torch_llama

    f = torch.nn.functional
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    master = {
        n: torch.nn.Parameter(torch.from_numpy(w).to(device, copy=True)) for n, w in weights.items()
    }
    used = {n: w.detach().to(dtype, copy=True).requires_grad_() for n, w in master.items()}
    net = torch_llama.Llama(model, used)
    groups = [
        {"params": [w for w in master.values() if w.dim() == d], "weight_decay": decay}
        for d, decay in ((2, DECAY), (1, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=BETAS, eps=EPS, fused=True)
    losses, norms, began = [], [], time.time()
    for step, lr in enumerate(lrs):
        tokens, targets = (torch.from_numpy(x).long().to(device) for x in batches(step))
        n_valid = (targets >= 0).sum()
        total = torch.zeros((), dtype=torch.float64, device=device)
        for w in master.values():
            w.grad = torch.zeros_like(w)
        for i in range(0, len(tokens), a.micro):
            logits = net(tokens[i : i + a.micro]).float()
            loss = (
                f.cross_entropy(
                    logits.flatten(0, 1),
                    targets[i : i + a.micro].flatten(),
                    ignore_index=-1,
                    reduction="sum",
                )
                / n_valid
            )
            loss.backward()
            total += loss.detach()
            for n, w in used.items():
                master[n].grad += w.grad
                w.grad = None
        norms.append(torch.nn.utils.clip_grad_norm_(master.values(), CLIP))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        with torch.no_grad():
            for n, w in used.items():
                w.copy_(master[n])
        losses.append(total)
    return {
        "loss": [x.item() for x in losses],
        "grad_norm": [x.item() for x in norms],
        "seconds": time.time() - began,
    }


# ---- the result ----------------------------------------------------------------------------------


def gap(one, other):
    """The largest and the mean distance of two curves, in nats."""
    distance = np.abs(np.array(one["loss"]) - np.array(other["loss"]))
    return {
        "largest": float(distance.max()),
        "at_step": int(distance.argmax()),
        "mean": float(distance.mean()),
        "mean_of_last_tenth": float(distance[-max(1, len(distance) // 10) :].mean()),
    }


def device_name(plan):
    return plan.hardware.device_name or plan.hardware.name


def commit_of(a):
    try:
        git = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        git = ""
    return a.commit or git or None


def run(a):
    import torch

    with tempfile.TemporaryDirectory() as folder:
        where, config = make_model(a, Path(folder))
        batches = Batches(a, config["vocab_size"])
        curves = {}
        curves["Penstock, fp32-master"], lrs, weights, plan = penstock_side(a, where, batches)
        model, report = plan.model, plan.report
    device = "cuda" if plan.hardware.backend else "cpu"
    curves["PyTorch, bf16 from fp32 masters"] = torch_side(
        a, model, weights, lrs, batches, device, torch.bfloat16
    )
    gaps = {"Penstock - PyTorch": gap(*list(curves.values())[:2])}
    if a.fp32:
        curves["PyTorch, fp32"] = torch_side(a, model, weights, lrs, batches, device, torch.float32)
        gaps["PyTorch bf16 - fp32"] = gap(*list(curves.values())[1:3])
    return {
        "device": device_name(plan),
        "backend": device,
        "model": config,
        "n_parameters": model.n_elements,
        "steps": a.steps,
        "seq_len": a.seq_len,
        "tokens_per_step": report["tokens_per_step"],
        "lr": lrs,
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": DECAY,
        "clip_norm": CLIP,
        "seed": a.seed,
        "device_mem": a.device_mem,
        "planned_device_bytes": report["device_used_bytes"],
        "resident_param_units": report["resident_param_units"],
        "n_units": report["n_units"],
        "curves": curves,
        "gaps": gaps,
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "commit": commit_of(a),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["bench/curve.py", *sys.argv[1:]]),
    }


def sentence(result):
    g = result["gaps"]["Penstock - PyTorch"]
    text = f"largest gap {g['largest']:.4f} nats (step {g['at_step']}), mean {g['mean']:.4f}"
    if "PyTorch bf16 - fp32" in result["gaps"]:
        other = result["gaps"]["PyTorch bf16 - fp32"]
        text += (
            f"; PyTorch's bf16 against its fp32: {other['largest']:.4f}, mean {other['mean']:.4f}"
        )
    return text


def plot(path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = json.loads(path.read_text())
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for (name, curve), (width, style) in zip(
        result["curves"].items(), ((3.5, "-"), (1.2, "-"), (1, ":"))
    ):
        top.plot(curve["loss"], style, linewidth=width, alpha=0.6 if width > 3 else 1, label=name)
    names = list(result["curves"])
    for one, other in zip(names[:-1], names[1:]):
        bottom.plot(
            np.subtract(result["curves"][one]["loss"], result["curves"][other]["loss"]),
            linewidth=1,
            label=f"{one} − {other}",
        )
    top.set_ylabel("loss, nats")
    top.set_title(
        f"{result['n_parameters'] / 1e6:.0f} M parameters, {result['tokens_per_step']} tokens a "
        f"step, {result['device']}\n{sentence(result)}",
        fontsize=10,
    )
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    return path.with_suffix(".png")


def main():
    a = parse()
    if a.plot:
        print(plot(Path(a.plot)))
        return
    result = run(a)
    name = re.sub(r"[^a-z0-9]+", "-", result["device"].lower().replace("nvidia", "")).strip("-")
    out = Path(a.out) if a.out else ROOT / f"bench/results/curve-{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    seconds = ", ".join(
        f"{side} {curve['seconds']:.0f} s" for side, curve in result["curves"].items()
    )
    print(f"{result['n_parameters'] / 1e6:.1f} M parameters: {sentence(result)} ({seconds}); {out}")
    try:
        print(plot(out))
    except ImportError as e:
        print(f"no picture, as {e}: draw it on another machine with bench/curve.py --plot {out}")


if __name__ == "__main__":
    main()
