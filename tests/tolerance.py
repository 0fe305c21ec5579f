"""penstock.tolerance, and its bounds as a test asserts them."""

import math

from penstock.tolerance import *  # noqa: F403
from penstock.tolerance import relative_error


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
