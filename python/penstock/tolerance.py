"""How far losses and gradients may be from exact ones: for `penstock compare` and for the tests.

u is the unit roundoff: 2^-24 in fp32, 2^-8 in bf16. A gradient has passed about 18 roundings a
layer (8 forward, 10 backward: four products, two norms, RoPE, attention, SwiGLU and their
gradients), then one for each chunk that was added to it. They are independent and add in
quadrature. In bf16 a rounding is at most u. In fp32 the rounding that matters is the one inside a
product: K terms, each partial sum rounded, give a relative error of sqrt(K) u at most in the mean,
K being the longest sum. So with L layers and C chunks

    delta = u * sqrt(18 L + C)              bf16: L=4, C=5: 3.4e-2
    delta = u * sqrt(18 L + C) * sqrt(K)    fp32: L=4, C=5, K=512: 1.2e-5

A gradient g is a sum over tokens, g = sum_t a_t, and its SPREAD is sqrt(sum_t |a_t|^2), the size
that g would have if the terms were independent. Where they cancel, g is far smaller than its
spread, and rounding errors, which belong to the terms, are to be measured against the spread: g may
be wrong by delta * max(|g|, spread). A loss is a mean over T tokens of terms whose errors are those
of logits of unit size, delta each: it is wrong by 3 delta / sqrt(T) at most (3 sigma).

LOGITS have passed the forward roundings alone: 8 a layer, and the head's norm and product. K is the
longest sum of a forward pass.

    delta = u * sqrt(8 L + 2) [* sqrt(K) in fp32]

It bounds their relative error, over all tokens. A token's logits share the error of one vector, so
the error's size differs from token to token, by up to 3 (3 sigma). The largest of N normal errors
is sqrt(2 ln N) of them: an error is at most 3 sqrt(2 ln N) delta times the root mean square of the
token's logits. Errors e that do not depend on the probabilities p change the distribution by
KL = Var_p(e) / 2 at most: in the mean over tokens (delta |logits|)^2 / 2 nats, |logits| being their
root mean square.
"""

import functools
import math

import numpy as np

UNIT = {"fp32": 2.0**-24, "fp32-master": 2.0**-8, "bf16": 2.0**-8}
A_LAYER = 18
# A norm after attention and one after the MLP add two roundings each, one a direction.
POST_NORMS = 4
# More a layer on a GPU: probabilities, their gradients, dK and dV pass bf16 inside attention.
FUSED_ATTENTION = 4
# The same of the forward pass alone; and the head's own.
FORWARD_A_LAYER = 8
FORWARD_POST_NORMS = 2
FORWARD_FUSED_ATTENTION = 1
FORWARD_HEAD = 2
FAMILIES_WITH_POST_NORMS = ("olmo2", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text")


def delta(recipe, n_layers, n_chunks, longest_sum, a_layer=A_LAYER):
    return (
        UNIT[recipe]
        * math.sqrt(a_layer * n_layers + n_chunks)
        * (math.sqrt(longest_sum) if recipe == "fp32" else 1)
    )


def largest_of(n):
    """How many times their root mean square the largest of n logits' errors is."""
    return 3 * math.sqrt(2 * math.log(max(n, 2)))


def loss_noise(delta, n_valid):
    return 3 * delta / math.sqrt(n_valid)


def relative_error(found, expected, spread) -> float:
    """The error of a gradient, which delta bounds; both are arrays."""
    size = max(float(np.linalg.norm(expected)), spread)
    error = float(np.linalg.norm(np.subtract(found, expected, dtype=np.float64)))
    return error / size if size else math.inf if error else 0.0


def note_spread(model, spread):
    """Hooks in transformers' model that add, after each module's backward pass, the squares of its
    gradient's terms to spread[parameter]. Returns the hooks."""
    import torch

    def add(key, square):
        spread[key] = spread.get(key, 0.0) + square.sum().item()

    def on_forward(key, module, inputs, out):
        x = inputs[0].detach()
        routes = isinstance(out, tuple)  # logits first: a router of transformers 5
        if routes:
            x, out = x.reshape(-1, x.shape[-1]), out[0]

        def on_grad(g):
            if isinstance(module, torch.nn.Embedding):
                add(key, (g * getattr(module, "embed_scale", 1.0)).square())
            elif isinstance(module, torch.nn.Linear) or routes:
                add(key, g.square().sum(-1) * x.square().sum(-1))
                if getattr(module, "bias", None) is not None:
                    add(key.replace("weight", "bias"), g.square())
            else:
                eps = getattr(module, "eps", None) or module.variance_epsilon
                add(key, (g * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).square())

        out.register_hook(on_grad)

    # tied weights are one parameter, which named_parameters() has once
    names = {id(p): key for key, p in model.named_parameters()}
    return [
        module.register_forward_hook(functools.partial(on_forward, names[id(module.weight)]))
        for module in model.modules()
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter)
    ]
