"""A Llama in PyTorch whose products have FP8 operands: a control of Penstock's recipe fp8, for any
device. Each operand is rounded to FP8 and back, and multiplied in bf16. Every number of e4m3 and
e5m2 times a power of two is one of bf16, so such a product has the operands of an FP8 product.

Its sums are in fp32, as those of Penstock are without the option fp8_fast_accumulation. It differs
in its scales: each weight and each gradient has one of its own, where Penstock has one for q, k and
v together and one for gate and up; a scale is of what PyTorch computes at once, Penstock's is of a
chunk.
"""

import torch
import torch_llama
from torch.nn import functional as f


def rounded(x, dtype):
    """@x rounded to @dtype and back. One scale for the tensor: the least power of two with which
    its largest number does not saturate."""
    ratio = x.abs().amax().float() / torch.finfo(dtype).max
    fraction, exponent = torch.frexp(ratio)  # fraction is 0, or in [0.5, 1)
    scale = torch.ldexp(torch.ones_like(ratio), exponent - (fraction == 0.5).int())
    return ((x.float() / scale).to(dtype).float() * scale).to(x.dtype)


class Product(torch.autograd.Function):
    """y [..., k], w [n, k] -> y w^T [..., n], where the named operands are FP8."""

    @staticmethod
    def forward(ctx, y, w, operands):
        y = rounded(y, torch.float8_e4m3fn) if "x" in operands else y
        w = rounded(w, torch.float8_e4m3fn) if "w" in operands else w
        ctx.save_for_backward(y, w)
        ctx.operands = operands
        return f.linear(y, w)

    @staticmethod
    def backward(ctx, d):
        y, w = ctx.saved_tensors
        d = rounded(d, torch.float8_e5m2) if "dy" in ctx.operands else d
        return d @ w, d.flatten(0, -2).T @ y.flatten(0, -2), None


class Llama(torch_llama.Llama):
    """As torch_llama.Llama. All blocks but the first and the last have FP8 products.

    operands  those that are FP8: x, activations, and w, weights, in e4m3; dy, gradients of outputs,
              in e5m2. The others stay as they are.
    """

    def __init__(self, m, params, operands=("x", "w", "dy")):
        super().__init__(m, params)
        inner = range(1, m.n_layers - 1)
        self.operands = operands
        self.fp8 = {
            id(params[f"model.layers.{i}.{part}.weight"])
            for i in inner
            for part in torch_llama.PARTS
        }

    def _linear(self, y, w):
        return Product.apply(y, w, self.operands) if id(w) in self.fp8 else f.linear(y, w)
