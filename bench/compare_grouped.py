"""Times PyTorch's grouped product at the shapes of bench/moe_probe.cu, one line a shape.

usage: python3 compare_grouped.py

Rows as there: TFLOP/s of gate-up, down, the gradients of s and x, and those of both weights, as they
are and added to others; then the first six together, and for some shapes in turn for two seconds.
"""

import torch

PRODUCTS = ("gate-up", "down", "ds", "dx", "dW_dn", "dW_gu", "+dW_dn", "+dW_gu")
# name, experts, experts a token, dim, expert dim, tokens, skew, sustained
SHAPES = (
    ("qwen3-30b", 128, 8, 2048, 768, 8192, 0.0, False),
    ("qwen3-30b", 128, 8, 2048, 768, 8192, 1.0, False),
    ("qwen3-30b", 128, 8, 2048, 768, 16384, 0.0, True),
    ("qwen3-30b", 128, 8, 2048, 768, 16384, 1.0, False),
    ("qwen3-30b", 128, 8, 2048, 768, 32768, 0.0, True),
    ("qwen3-30b", 128, 8, 2048, 768, 32768, 1.0, False),
    ("olmoe", 64, 8, 2048, 1024, 32768, 0.0, True),
    ("gpt-oss-20b", 32, 4, 2880, 2880, 32768, 0.0, False),
    ("20b_1b", 128, 4, 3072, 1024, 8192, 0.0, False),
)


def drawn(*shape, scale=1.0):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def time_of(call, n=9):
    """Milliseconds: the median of n after two."""
    times = []
    for i in range(n + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end))
    return sorted(times)[n // 2]


def products(experts, used, dim, ffn, tokens, skew):
    logits = torch.randn(tokens, experts, device="cuda")
    logits += skew * torch.randn(experts, device="cuda")
    counts = torch.bincount(logits.topk(used).indices.flatten(), minlength=experts)
    offs = counts.cumsum(0).to(torch.int32)
    rows = tokens * used
    x, gu, s, z = (drawn(rows, n) for n in (dim, 2 * ffn, ffn, dim))
    up, down = drawn(experts, 2 * ffn, dim, scale=0.02), drawn(experts, dim, ffn, scale=0.02)
    d_up, d_down = torch.zeros_like(up), torch.zeros_like(down)
    calls = (
        lambda: torch._grouped_mm(x, up.transpose(1, 2), offs=offs),
        lambda: torch._grouped_mm(s, down.transpose(1, 2), offs=offs),
        lambda: torch._grouped_mm(z, down, offs=offs),
        lambda: torch._grouped_mm(gu, up, offs=offs),
        lambda: torch._grouped_mm(z.t(), s, offs=offs),
        lambda: torch._grouped_mm(gu.t(), x, offs=offs),
        lambda: d_down.add_(torch._grouped_mm(z.t(), s, offs=offs)),
        lambda: d_up.add_(torch._grouped_mm(gu.t(), x, offs=offs)),
    )
    flops = [2 * rows * dim * ffn * n for n in (2, 1, 1, 2, 1, 2, 1, 2)]
    return calls, flops, counts


def sustained(calls, ms, flops, head):
    n = int(1000 / sum(ms)) + 1
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for half in range(2):
        marks[half].record()
        for _ in range(n):
            for call in calls:
                call()
    marks[2].record()
    marks[2].synchronize()
    both, last = marks[0].elapsed_time(marks[2]), marks[1].elapsed_time(marks[2])
    print(
        f"{head}, all six in turn for {both / 1e3:.1f} s: {2 * n * sum(flops) / both / 1e9:.0f} "
        f"TFLOP/s, second half {n * sum(flops) / last / 1e9:.0f}",
        flush=True,
    )


def main():
    torch.manual_seed(0)
    print(torch.__version__, torch.cuda.get_device_name())
    for name, *shape, skew, long in SHAPES:
        calls, flops, counts = products(*shape, skew)
        ms = [time_of(call) for call in calls]
        rates = [f"{p} {f / t / 1e9:.0f}" for p, f, t in zip(PRODUCTS, flops, ms, strict=True)]
        head = f"torch {name:11} {shape[4]:6} tokens"
        print(
            f"{head}, rows {counts.min():5} to {counts.max():5}: {' '.join(rates)}; "
            f"all six {sum(flops[:6]) / sum(ms[:6]) / 1e9:.0f}",
            flush=True,
        )
        if long:
            sustained(calls[:6], ms[:6], flops[:6], head)
        del calls
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
