from __future__ import annotations

import pytest

from tests.ops.triton.compiled import CAPABILITIES, assert_fits, compiled

MOST = {
    "losses bfloat16": (144, 64),
    "losses float32": (144, 64),
    "losses of an odd vocabulary": (192, 64),
    "numbers of a slice": (144, 64),
    "gradient of a slice": (144, 64),
    "bias": (72, 2048),
    "mask": (48, 4096),
    "dropout bfloat16": (144, 4096),
    "dropout float32": (80, 4096),
    "look-up": (168, 8192),  # sixteen rows of 512 columns at once
    "cell states": (88, 0),
    "reversal": (48, 0),
    "table": (32, 0),
    "operands": (64, 0),
    "sums": (64, 1024),
    "gradients bfloat16": (128, 49_152),
    "gradients float32": (128, 49_152),
    "largest": (64, 64),
    "search": (128, 64),
}
"""Registers of a thread and bytes of shared memory that a kernel may take, with room for other compilers."""


@pytest.mark.thorough
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_for_a_gpu(capability: int) -> None:
    """Nothing spills, and what a kernel takes leaves room for several blocks on a multiprocessor."""
    found = compiled("compiling_output", capability)
    assert found.keys() == MOST.keys()
    assert_fits(capability, found)
    for name, (registers, shared) in MOST.items():
        for usage in found[name]:
            assert usage["registers"] <= registers, (name, usage)
            assert usage["shared"] <= shared, (name, usage)
