"""The persistent kernels as they are compiled and divided for many cards: they fit, nothing spills, and they wait."""

from __future__ import annotations

import pytest

from tests.ops.triton.compiled import CAPABILITIES, assert_fits, compiled


@pytest.mark.thorough
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_of_all_cards_fit(capability: int) -> None:
    found = compiled("compiling_persistent", capability)
    assert len(found) > 20
    assert_fits(capability, found)
    for name, kernels in found.items():
        (kernel,) = kernels
        assert kernel["wide products" if capability == 90 else "products"] > 0, (name, kernel)
        assert kernel["barriers between programs"] >= 2, (name, kernel)
