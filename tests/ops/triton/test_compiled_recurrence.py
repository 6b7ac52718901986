"""The kernels of the linear recurrence as they are compiled for GPUs: what they take is held to a table."""

from __future__ import annotations

import pytest

from tests.ops.triton.compiled import compiled

# By call, forward and backward: registers of a thread and bytes of shared memory, at most.
MOST = {
    "tiles float32": [(128, 0), (192, 0)],
    "walk float32": [(64, 0), (72, 0)],
    "tiles bfloat16 again": [(255, 0), (255, 0)],
    "walk bfloat16": [(64, 0), (72, 0)],
    "walk bfloat16 again": [(64, 0), (144, 0)],
    "tiles float64 again": [(255, 0), (255, 0)],
}
GLUON = ("gluon float32", "gluon float32 options", "gluon bfloat16", "gluon bfloat16 options")
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""KB of shared memory of a program, at most, by compute capability."""
REGISTERS = 128
SPILLED = 64
"""Bytes of a thread's registers that may be kept in memory: ptxas does so, now and then, where it need not."""


@pytest.mark.parametrize(
    ("capability", "names"),
    [
        (90, ["walk float32"]),
        # Kernels of which steps are written out take long to compile.
        *(pytest.param(each, list(MOST), marks=pytest.mark.thorough) for each in (80, 90)),
    ],
    ids=str,
)
def test_compiled_for_a_gpu(capability: int, names: list[str]) -> None:
    found = compiled("compiling_recurrence", capability, names)
    assert list(found) == names
    for name, kernels in found.items():
        assert len(kernels) == len(MOST[name])
        for kernel, (registers, shared) in zip(kernels, MOST[name], strict=True):
            assert kernel["registers"] <= registers, (name, kernels)
            assert kernel["shared"] <= shared, (name, kernels)
            assert kernel["stack"] <= SPILLED, (name, kernels)


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(each, marks=pytest.mark.thorough) for each in (80, 86, 89, 120))]
)
def test_gluon_compiled_for_a_gpu(capability: int) -> None:
    """What a thread keeps in memory is one pair of registers at most."""
    for name, kernels in compiled("compiling_recurrence", capability, GLUON).items():
        assert len(kernels) == 2
        for kernel in kernels:
            assert kernel["registers"] <= REGISTERS, (name, kernels)
            assert kernel["shared"] <= SHARED[capability] << 10, (name, kernels)
            assert kernel["stack"] <= 8, (name, kernels)
