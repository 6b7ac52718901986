"""The kernels of the linear recurrence as they are compiled for GPUs: what they take is held to a table."""

from __future__ import annotations

import pytest

from tests.ops.triton.compiled import CAPABILITIES, assert_fits, compiled

# By call, forward and backward: registers of a thread and bytes of shared memory, at most, by Triton 3.6 and 3.9.
MOST = {
    "tiles float32": [(144, 0), (248, 0)],
    "walk float32": [(72, 0), (80, 0)],
    "tiles bfloat16 again": [(255, 0), (255, 0)],
    "walk bfloat16": [(64, 0), (80, 0)],
    "walk bfloat16 again": [(64, 0), (144, 0)],
    "tiles float64 again": [(255, 0), (255, 0)],
}
GLUON = ("gluon float32", "gluon float32 options", "gluon bfloat16", "gluon bfloat16 options")
REGISTERS = 128
SPILLED = {"tiles bfloat16 again": 48, "tiles float64 again": 48}
"""Bytes of a thread's registers that may be kept in memory, of tiles whose states are made again with all options."""


@pytest.mark.thorough
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_for_a_gpu(capability: int) -> None:
    found = compiled("compiling_recurrence", capability, MOST)
    assert list(found) == list(MOST)
    for name, kernels in found.items():
        assert_fits(capability, {name: kernels}, SPILLED.get(name, 0))
        assert len(kernels) == len(MOST[name])
        for kernel, (registers, shared) in zip(kernels, MOST[name], strict=True):
            assert kernel["registers"] <= registers, (name, kernels)
            assert kernel["shared"] <= shared, (name, kernels)


@pytest.mark.thorough
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_gluon_compiled_for_a_gpu(capability: int) -> None:
    found = compiled("compiling_recurrence", capability, GLUON)
    assert_fits(capability, found)
    for name, kernels in found.items():
        assert len(kernels) == 2
        for kernel in kernels:
            assert kernel["registers"] <= REGISTERS, (name, kernels)
