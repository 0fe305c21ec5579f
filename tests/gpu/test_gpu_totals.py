"""tests/test_totals.py on a GPU: the same sequence 1 to 4,096 times, added up in chunks, rounds and
head slices."""

import functools

import pytest
import reference as ref
import test_totals as totals
from penstock import Hardware

pytestmark = pytest.mark.gpu
NAME = "head-dim-64"


@functools.cache
def hardware():
    hw = Hardware.estimate(0, "cuda")
    hw._ptr.device_overhead_bytes += (
        1 << 30
    )  # this process keeps what the tests before left in the libraries
    return hw


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    return ref.write_directory(
        tmp_path_factory.mktemp("totals") / "model", totals.config(NAME), totals.weights(NAME)
    )


@pytest.mark.parametrize("recipe", ["bf16", "fp32-master"])
@pytest.mark.parametrize(
    "layout", [*totals.LAYOUTS, *(pytest.param(n, marks=pytest.mark.long) for n in totals.LONG)]
)
def test_the_gradient_of_a_repeated_sequence(where, layout, recipe):
    copies, chunk, a_round = {**totals.LAYOUTS, **totals.LONG}[layout]
    assert (
        totals.check(where, NAME, recipe, hardware(), copies=copies, chunk=chunk, a_round=a_round)[
            "n_chunks"
        ]
        == copies // chunk
    )


def test_head_slices_add_up_as_chunks_do(where):
    totals.check(where, NAME, "bf16", hardware(), copies=32, chunk=16, slices=8)
