"""How far losses and gradients may be from exact ones, for the tests that compare them.

u is the unit roundoff: 2^-24 in fp32, 2^-8 in bf16. A gradient has passed about 18 roundings a
layer (8 forward, 10 backward: four products, two norms, RoPE, attention, SwiGLU and their
gradients), then one for each chunk that was added to it. They are independent and add in
quadrature. In bf16 a rounding is at most u. In fp32 the rounding that matters is the one inside a
product: K terms, each partial sum rounded, give a relative error of sqrt(K) u at most in the mean,
K being the longest sum. So with L layers and C chunks

    delta = u * sqrt(18 L + C)              bf16: L=4, C=5: 3.4e-2
    delta = u * sqrt(18 L + C) * sqrt(K)    fp32: L=4, C=5, K=512: 1.2e-5

and a gradient g that is a sum of terms over tokens may be wrong by delta * max(|g|, spread), the
spread (reference.py) being the size of its terms where they cancel. A loss is a mean over T tokens
of terms whose errors are those of logits of unit size, delta each: it is wrong by 3 delta / sqrt(T)
at most (3 sigma).
"""

import math

import numpy as np

UNIT = {"fp32": 2.0**-24, "fp32-master": 2.0**-8, "bf16": 2.0**-8}
A_LAYER = 18
FUSED_ATTENTION = (
    4  # more a layer on a GPU: probabilities, their gradients, dK and dV pass bf16 inside attention
)


def delta(recipe, n_layers, n_chunks, longest_sum, a_layer=A_LAYER):
    return (
        UNIT[recipe]
        * math.sqrt(a_layer * n_layers + n_chunks)
        * (math.sqrt(longest_sum) if recipe == "fp32" else 1)
    )


def loss_noise(delta, n_valid):
    return 3 * delta / math.sqrt(n_valid)


def check_gradients(found, expected, bound):
    """{name: array} against (loss, {name: gradient}, {name: spread}): every tensor, none too many;
    the worst share of the bound is what a failure shows."""
    _, grads, spread = expected
    assert set(found) == set(grads)
    share = {}
    for name, g in grads.items():
        error = np.linalg.norm(found[name] - g.numpy())
        share[name] = error / (bound * max(g.norm().item(), spread[name]))
        assert g.norm().item() > 0.1 * spread[name]  # the spread must not hide a tensor
    worst = max(share, key=share.get)
    assert share[worst] < 1, f"{worst}: error is {share[worst]:.3g} of the bound {bound:.3g}"
    assert all(math.isfinite(s) for s in share.values())
    return share[worst]
