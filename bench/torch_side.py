"""PyTorch's side of bench/compare_torch.py: trains a Llama shape from seeded weights, and prints
one JSON object.

    python3 bench/torch_side.py '{"config": "...", "seq_len": 8192, ...}'      (the fields of Ask)

A process of its own, so that the sides take turns with the whole GPU each, and one that runs out of
memory ends alone. Needs torch; the side with the optimizer on the CPU needs torchao.
"""

import contextlib
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent))
from torch_llama import Llama  # noqa: E402

LR, BETAS, EPS, DECAY, CLIP = 1e-5, (0.9, 0.95), 1e-8, 0.1, 1.0
WORSE = 1.03  # a larger micro-batch that is this much slower a token ends the search


@dataclass
class Ask:
    config: dict  # of config.json
    seq_len: int
    tokens_per_step: int
    shard: str  # token ids: the file that the other side reads
    recipe: str  # bf16: all in bf16. fp32-master: fp32 weights, autocast to bf16. fp32: all in fp32
    device: str = "cuda"
    threads: int = 0  # of the CPU; 0: torch's default
    compile: bool = True  # torch.compile of a block and of the head with the loss
    checkpoint: bool = False  # activation checkpointing of every block
    offload: bool = False  # torchao's CPUOffloadOptimizer, without clipping, which it cannot
    micro: int = 0  # sequences of a micro-batch; 0: the fastest
    steps: int = 5
    warm_up: int = 2

    @property
    def sequences(self) -> int:
        return self.tokens_per_step // self.seq_len


def shape(c: dict) -> SimpleNamespace:
    heads = c["num_attention_heads"]
    return SimpleNamespace(
        vocab=c["vocab_size"],
        n_layers=c["num_hidden_layers"],
        dim=c["hidden_size"],
        ffn=c["intermediate_size"],
        n_heads=heads,
        n_kv_heads=c.get("num_key_value_heads", heads),
        head_dim=c.get("head_dim") or c["hidden_size"] // heads,
        norm_eps=c["rms_norm_eps"],
        rope=SimpleNamespace(theta=c.get("rope_theta", 1e4)),
        tied_embeddings=c.get("tie_word_embeddings", False),
    )


def parameters(m, dtype, device) -> dict:
    """Weights N(0, 0.02), norms 1."""
    q, kv = m.n_heads * m.head_dim, m.n_kv_heads * m.head_dim
    sizes = {"model.embed_tokens": (m.vocab, m.dim), "model.norm": (m.dim,)}
    if not m.tied_embeddings:
        sizes["lm_head"] = (m.vocab, m.dim)
    for i in range(m.n_layers):
        at = f"model.layers.{i}"
        sizes |= {f"{at}.{norm}_layernorm": (m.dim,) for norm in ("input", "post_attention")}
        sizes |= {f"{at}.self_attn.q_proj": (q, m.dim), f"{at}.self_attn.o_proj": (m.dim, q)}
        sizes |= {f"{at}.self_attn.{p}_proj": (kv, m.dim) for p in "kv"}
        sizes |= {f"{at}.mlp.{p}_proj": (m.ffn, m.dim) for p in ("gate", "up")}
        sizes |= {f"{at}.mlp.down_proj": (m.dim, m.ffn)}
    generator = torch.Generator(device=device).manual_seed(0)
    made = {}
    for name, size in sizes.items():
        w = torch.empty(size, dtype=dtype, device=device)
        w = w.normal_(0, 0.02, generator=generator) if len(size) == 2 else w.fill_(1)
        made[f"{name}.weight"] = torch.nn.Parameter(w)
    return made


ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def fastest_attention(m, ask, dtype):
    """The name of the fastest attention at the shape, forward and backward; None on a CPU."""
    if ask.device == "cpu":
        return None
    times = {}
    for name, backend in ATTENTION.items():
        sizes = [(1, h, ask.seq_len, m.head_dim) for h in (m.n_heads, m.n_kv_heads, m.n_kv_heads)]
        q, k, v = (torch.randn(s, dtype=dtype, device="cuda", requires_grad=True) for s in sizes)
        taken = []
        try:
            for _ in range(4):
                torch.cuda.synchronize()
                began = time.perf_counter()
                with sdpa_kernel(backend):
                    out = torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=m.n_heads != m.n_kv_heads
                    )
                out.sum().backward()
                torch.cuda.synchronize()
                taken.append(time.perf_counter() - began)
        except RuntimeError:
            continue  # this PyTorch has no such kernel for the shape
        times[name] = min(taken)
    return min(times, key=times.get) if times else None


class Side:
    def __init__(self, ask: Ask):
        self.ask, self.m = ask, shape(ask.config)
        fp32 = ask.recipe != "bf16"
        compute = torch.float32 if ask.recipe == "fp32" else torch.bfloat16
        self.p = parameters(self.m, torch.float32 if fp32 else torch.bfloat16, ask.device)
        self.attention = fastest_attention(self.m, ask, compute)
        wrap = torch.compile if ask.compile else (lambda function: function)
        self.net = Llama(self.m, self.p, wrap)
        mixed = ask.recipe == "fp32-master"
        self.autocast = lambda: torch.autocast(ask.device, torch.bfloat16, enabled=mixed)
        groups = [
            {"params": [w for w in self.p.values() if w.dim() == d], "weight_decay": decay}
            for d, decay in ((2, DECAY), (1, 0.0))
        ]
        arguments = {"lr": LR, "betas": BETAS, "eps": EPS, "fused": True}
        if ask.offload:
            from torchao.optim import CPUOffloadOptimizer

            self.optimizer = CPUOffloadOptimizer(groups, torch.optim.AdamW, **arguments)
        else:
            self.optimizer = torch.optim.AdamW(groups, **arguments)
        header = np.fromfile(ask.shard, dtype=np.int32, count=3)
        self.tokens = np.memmap(ask.shard, dtype=np.uint32, mode="r", offset=1024, shape=header[2])

    def batch(self, step: int):
        a = self.ask
        at = step * a.tokens_per_step % max(1, len(self.tokens) - a.tokens_per_step)
        window = torch.from_numpy(self.tokens[at : at + a.tokens_per_step + 1].astype(np.int64))
        pair = window[:-1], window[1:]
        return [t.view(a.sequences, a.seq_len).to(a.device) for t in pair]

    def call(self, function, *arguments):
        if not self.ask.checkpoint:
            return function(*arguments)
        return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)

    def accumulate(self, ids, targets, micro: int):
        """Add the gradients of so many sequences. Returns their part of the loss."""
        with self.autocast():
            loss = self.net.loss(ids[:micro], targets[:micro], self.call)
        loss = loss / self.ask.tokens_per_step
        loss.backward()
        return loss.detach()

    def step(self, step: int, micro: int):
        """One update. Returns its seconds and its loss."""
        ids, targets = self.batch(step)
        self.wait()
        began = time.perf_counter()
        losses = [
            self.accumulate(ids[i:], targets[i:], micro)
            for i in range(0, self.ask.sequences, micro)
        ]
        if not self.ask.offload:
            torch.nn.utils.clip_grad_norm_(self.p.values(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.wait()
        return time.perf_counter() - began, sum(loss.item() for loss in losses)

    def wait(self):
        if self.ask.device == "cuda":
            torch.cuda.synchronize()

    def fastest_micro(self) -> int:
        """The micro-batch that takes the least time a token, among powers of two that divide the
        step. Gradients and the optimizer's state are there, as in every later step."""
        self.step(0, 1)
        ids, targets = self.batch(0)
        best, best_s, micro = 1, float("inf"), 1
        while micro <= self.ask.sequences and self.ask.sequences % micro == 0:
            taken = []
            try:
                for _ in range(4):
                    self.wait()
                    began = time.perf_counter()
                    self.accumulate(ids, targets, micro)
                    self.wait()
                    taken.append((time.perf_counter() - began) / micro)
            except torch.OutOfMemoryError:
                break
            a_sequence = statistics.median(taken[1:])
            if a_sequence < best_s:
                best, best_s = micro, a_sequence
            elif a_sequence > WORSE * best_s:
                break
            micro *= 2
        for w in self.p.values():
            w.grad = None
        if self.ask.device == "cuda":
            torch.cuda.empty_cache()
        return best


def run(ask: Ask) -> dict:
    if ask.threads:
        torch.set_num_threads(ask.threads)
    cuda = ask.device == "cuda"
    if cuda and not torch.cuda.is_available():
        return {
            "failed": "no CUDA device",
            "message": f"PyTorch {torch.__version__} finds no CUDA device: install its CUDA build "
            "and NVIDIA's driver, or give --device cpu",
        }
    side = Side(ask)
    with sdpa_kernel(ATTENTION[side.attention]) if side.attention else contextlib.nullcontext():
        micro = ask.micro or side.fastest_micro()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        done = [side.step(i, micro) for i in range(ask.warm_up + ask.steps)]
    free, total = torch.cuda.mem_get_info() if cuda else (0, 0)
    return {
        "step_s": [seconds for seconds, _ in done[ask.warm_up :]],
        "loss": [loss for _, loss in done],
        "micro": micro,
        "attention": side.attention,
        "device_peak_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
        "device_used_bytes": total - free,  # of the whole GPU: context and libraries too
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
    }


def main() -> int:
    try:
        ask = Ask(**json.loads(sys.argv[1]))
    except (IndexError, TypeError, ValueError):
        said = "this is a helper that bench/compare_torch.py starts: run that program instead"
        print(f"bench/torch_side.py: {said}", file=sys.stderr)
        return 2
    try:
        result = run(ask)
    except torch.OutOfMemoryError as exc:
        result = {"failed": "out of GPU memory", "message": str(exc).splitlines()[0]}
    except ImportError as exc:
        result = {"failed": f"not installed: {exc.name}", "message": str(exc)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
