from __future__ import annotations

import pytest

from tests.ops.triton.compiled import compiled

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
}
"""Registers of a thread and bytes of shared memory that a kernel may take, with room for other compilers."""


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(each, marks=pytest.mark.thorough) for each in (80, 86))]
)
def test_compiled_for_a_gpu(capability: int) -> None:
    """Nothing spills, and what a kernel takes leaves room for several blocks on a multiprocessor."""
    found = compiled("compiling_output", capability)
    assert found.keys() == MOST.keys()
    for name, (registers, shared) in MOST.items():
        (usage,) = found[name]
        assert usage["stack"] == 0, (name, usage)
        assert usage["registers"] <= registers, (name, usage)
        assert usage["shared"] <= shared, (name, usage)
