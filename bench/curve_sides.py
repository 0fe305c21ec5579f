"""One training of bench/curve.py: a recipe of Penstock, or PyTorch, from given weights on given
sequences. Both sides share clipping, betas, eps, weight decay (of matrices alone) and each step's
learning rate."""

import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench")]

BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
BROKEN = "fp8-broken"
# What PyTorch's AdamW updates, and what it computes with. The first two keep fp32 parameters and
# moments and compute with copies. The others have parameters and moments of one dtype, and what an
# update stores is rounded to nearest even: what an optimizer in bf16 does when nobody cares.
TORCH = {
    "torch-masters": ("float32", "bfloat16"),
    "torch-fp8": ("float32", "bfloat16"),
    "torch-nearest": ("bfloat16", "bfloat16"),
    "torch-fp32": ("float32", "float32"),
}


def schedule(peak, steps):
    """The learning rate of each step: 10% of them are warmup, then a cosine falls to a tenth."""
    warmup, least = steps // 10, peak / 10
    return [
        peak * (s + 1) / (warmup + 1)
        if s < warmup
        else least + (peak - least) * (1 + math.cos(math.pi * (s - warmup) / (steps - warmup))) / 2
        for s in range(steps)
    ]


# ---- the model and the data ----------------------------------------------------------------------


def make_model(config, folder, seed):
    """Write the model directory with seeded weights."""
    (folder / "in.json").write_text(json.dumps(config))
    words = [sys.executable, ROOT / "models/init_model.py", folder / "in.json", folder / "model"]
    subprocess.run([*words, "--seed", str(seed)], check=True, stdout=subprocess.DEVNULL)
    return folder / "model"


class Batches:
    """batch(step) for both sides: each sequence of the data once, in a seeded order."""

    def __init__(self, data, seq_len, tokens, vocab_size, seed):
        from penstock import Dataset

        self.data, self.seq_len, self.n = Dataset(data, vocab_size), seq_len, tokens // seq_len
        self.order = np.random.default_rng(seed).permutation(self.data.n_sequences(seq_len))

    def __call__(self, step):
        chosen = self.order[step * self.n : (step + 1) * self.n]
        read = [self.data.read(self.seq_len, int(i)) for i in chosen]
        return np.stack([tokens for tokens, _ in read]), np.stack([targets for _, targets in read])


# ---- the two sides -------------------------------------------------------------------------------


def said(metrics, steps):
    """After each twentieth of the @steps: their mean loss, for whoever waits."""
    n = max(1, steps // 20)
    if len(metrics) % n == 0:
        loss = statistics.fmean(m.loss for m in metrics[-n:])
        print(f"steps {len(metrics) - n} to {len(metrics) - 1}: {loss:.4f}", file=sys.stderr)


def penstock_side(recipe, options, a, where, batches, lrs, seed):
    from penstock import Hardware, ModelConfig, Plan, Trainer

    hardware, model = Hardware.estimate(0, a.backend), ModelConfig.read(where)
    if model.n_experts:  # their auxiliary loss is of a chunk: both sides have the same ones
        options = options | {"chunk_tokens": a.micro * a.seq_len}
    plan = Plan(
        model,
        seq_len=a.seq_len,
        tokens_per_step=a.tokens,
        recipe=recipe,
        device_mem=a.device_mem,
        hardware=hardware,
        threads=hardware.n_threads,
        clip_norm=CLIP,
        one_document=True,
        keep_grads=False,
        trace_steps=0,
        **options,
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
        seed=seed,
    ) as trainer:
        metrics = []
        for done in trainer.steps(len(lrs)):
            metrics.append(done)
            said(metrics, a.steps)
    if not np.allclose([m.lr for m in metrics], lrs, rtol=1e-9, atol=0):
        sys.exit("curve.py: the trainer had other learning rates than schedule() says")
    figures = {
        "loss": [m.loss for m in metrics],
        "grad_norm": [m.grad_norm for m in metrics],
        "seconds": time.time() - began,
        "device_peak_bytes": max(m.device_peak_bytes for m in metrics),
        "planned_device_bytes": plan.report["device_used_bytes"],
    }
    if recipe.startswith("fp8"):
        figures["flushed_most"] = [float(f"{m.fp8_flushed_most:.3g}") for m in metrics]
    if model.n_experts:
        figures["expert_load"] = [round(m.expert_load, 4) for m in metrics]
    return figures


def torch_side(name, options, a, where, batches, lrs):
    import torch
    import torch_fp8
    import torch_llama
    import torch_moe
    from penstock import ModelConfig
    from safetensors.torch import load_file

    f = torch.nn.functional
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    device = "cuda" if a.on_gpu else "cpu"
    stored, computed = (getattr(torch, dtype) for dtype in TORCH[name])
    shape, weights, experts = ModelConfig.read(where), {}, None
    for file in sorted(Path(where).glob("*.safetensors")):
        weights |= load_file(file)
    if shape.n_experts:
        experts = torch_moe.read(where)
        weights = dict(experts.named_parameters())
    master = {
        n: torch.nn.Parameter(w.detach().float().to(stored).to(device, copy=True))
        for n, w in weights.items()
    }
    used = {n: w.detach().to(computed, copy=True).requires_grad_() for n, w in master.items()}
    make = torch_fp8.Llama if name == "torch-fp8" else torch_llama.Llama
    net = torch_moe.Model(experts, used) if experts else make(shape, used, **options)
    groups = [
        {"params": [w for w in master.values() if (w.dim() > 1) == d], "weight_decay": decay}
        for d, decay in ((True, DECAY), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=BETAS, eps=EPS, fused=True)
    losses, norms, loads, began = [], [], [], time.time()
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
            total += loss.detach()
            if experts:
                loss = loss + net.router_loss() * (len(logits) / len(tokens))
            loss.backward()
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
        if experts:
            loads.append(net.load())
    return {
        "loss": [x.item() for x in losses],
        "grad_norm": [x.item() for x in norms],
        "seconds": time.time() - began,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if a.on_gpu else 0,
        "torch": torch.__version__,
    } | ({"expert_load": [round(x.item(), 4) for x in loads]} if experts else {})


class Curve:
    """What a curve's name says: NAME[:OPTION[=N],...][~SEED].

    name      a recipe, fp8-broken, or one of TORCH
    options   arguments of Plan, or of torch_fp8.Llama
    rounding  0, and for ~2 and on the number added to the seed of stochastic rounding
    held_to   the curve whose loss it should reach: that of the recipe's own state where this one
              has state of 8 bits, else bf16 where it is FP8, else None
    ValueError: no such curve; its text says which there are.
    """

    # of FP8's curves: an option, and its argument of Plan
    OPTIONS = {
        "first": "fp8_bf16_first",
        "last": "fp8_bf16_last",
        "down": "fp8_bf16_down",
        "head": "fp8_head",
        "fast": "fp8_fast_accumulation",
    }
    STATE = "8bit"  # of every recipe of Penstock: optimizer state in 8 bits
    GONE = "saved"  # of results before 2026-11-27: no curve can have it anew
    OPERANDS = ("x", "w", "dy")

    def __init__(self, text):
        from penstock.plan import RECIPES

        body, tilde, seed = text.partition("~")
        self.name, colon, options = body.partition(":")
        given = options.split(",") if colon else []
        if self.name not in (*RECIPES, BROKEN, *TORCH) or (
            tilde and (self.name not in RECIPES or not seed.isdecimal() or int(seed) < 2)
        ):
            names = ", ".join([*RECIPES, BROKEN, *TORCH])
            raise ValueError(f"give {names}, or a recipe with ~2")
        self.rounding = int(seed or 1) - 1
        self.is_torch = self.name in TORCH
        self.is_fp8 = not self.is_torch and self.name.startswith("fp8")
        self.options = {}
        if self.name == "torch-fp8":
            if not set(given) <= set(self.OPERANDS):
                raise ValueError(f"after the colon give some of {', '.join(self.OPERANDS)}")
            self.options = {"operands": given} if given else {}
        elif given and not self.is_fp8 and (self.is_torch or given != [self.STATE]):
            raise ValueError(f"only curves of FP8 have options, and recipes {self.STATE}")
        else:
            self.options = dict(map(self._option, given))
            if len(self.options) < len(given):
                raise ValueError("give each option once")
        self.held_to = "bf16" if self.is_fp8 else None
        if self.STATE in given:
            others = ",".join(x for x in given if x != self.STATE)
            self.held_to = f"{self.name}:{others}" if others else self.name

    def _option(self, text):
        if text == self.GONE:
            return text, True
        if text == self.STATE:
            return "state_bits", 8
        name, equals, number = text.partition("=")
        counted = name in ("first", "last")
        if name not in self.OPTIONS or counted != bool(equals) or counted != number.isdecimal():
            raise ValueError("after the colon give first=N, last=N, down, head, fast, 8bit")
        return self.OPTIONS[name], int(number) if counted else True


def train(name, seed, a, folder):
    """The losses and norms of curve @name, whose weights, order and rounding follow @seed."""
    where = make_model(a.model_config, folder, seed)
    vocab = a.model_config["vocab_size"]
    batches = Batches(a.data, a.seq_len, a.tokens, vocab, seed)
    curve = Curve(name)
    ends = [a.steps, a.end_after, a.broken_steps if curve.name == BROKEN else None]
    lrs = schedule(a.lr, a.steps)[: min(n for n in ends if n)]
    if curve.is_torch:
        return torch_side(curve.name, curve.options, a, where, batches, lrs)
    recipe = "fp8" if curve.name == BROKEN else curve.name
    return penstock_side(
        recipe, curve.options, a, where, batches, lrs, seed + 1000 * curve.rounding
    )
