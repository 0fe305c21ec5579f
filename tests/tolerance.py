"""penstock.tolerance, and its bounds as a test asserts them."""

import math

from penstock.tolerance import *  # noqa: F403
from penstock.tolerance import relative_error

# Of gated delta-nets transformers takes the rule in fp32, in an fp64 model too, and in chunks: it
# solves a triangular system of 64 rows, which multiplies rounding errors. Measured: up to 1.8 of 2.
DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
DELTA_NET = 6  # more roundings a layer than of attention: convolution, decay, a second norm


def of_oracle(model_type):
    """How many times our own error both sides together have in fp32."""
    return math.sqrt(2) * (2 if model_type in DELTA_NETS else 1)


def note_spread_of_delta_nets(grads, spread):
    """What is no module's is a sum over the same rows as its layer's products: their ratio of the
    terms to the sum serves."""
    own = ("A_log", "dt_bias", "conv1d.weight")
    for key in [k for k in grads if k.endswith(own)]:
        layer = key[: key.index("linear_attn.")] + "linear_attn.in_proj"
        ratio = max(s / grads[k].square().sum().item() for k, s in spread.items() if layer in k)
        spread[key] = ratio * grads[key].square().sum().item()


def check_gradients(found, expected, bound):
    """{name: array} against (loss, {name: gradient}, {name: spread}): every tensor, none too many;
    the worst share of the bound is what a failure shows."""
    _, grads, spread = expected
    assert set(found) == set(grads)
    share = {}
    for name, g in grads.items():
        share[name] = relative_error(found[name], g.numpy(), spread[name]) / bound
        assert g.norm().item() >= 0.1 * spread[name]  # the spread must not hide a tensor
    worst = max(share, key=share.get)
    assert share[worst] < 1, f"{worst}: error is {share[worst]:.3g} of the bound {bound:.3g}"
    assert all(math.isfinite(s) for s in share.values())
    return share[worst]
