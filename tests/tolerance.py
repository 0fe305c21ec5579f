"""penstock.tolerance, and its bounds as a test asserts them."""

import math

from penstock.tolerance import *  # noqa: F403
from penstock.tolerance import relative_error


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
