"""The cell and attention kernels as they are compiled for GPUs, which needs none: what they take is held to a table."""

from __future__ import annotations

import pytest

from tests.ops.triton.compiled import CAPABILITIES, assert_fits, compiled

# By call, for each of its kernels: registers of a thread and bytes of shared memory, at most, by Triton 3.6 and 3.9.
TABLE = {
    "additive 512 bfloat16": [(128, 33000), (128, 33000), (64, 4200)],
    "norm 512 bfloat16": [(176, 8300), (204, 8300), (255, 8300)],
    "dot 512 bfloat16": [(112, 33000), (104, 33000)],
    "additive 512 float32": [(176, 16500), (192, 16500), (80, 1100)],
    "additive 1024 bfloat16": [(244, 33000), (232, 33000), (64, 4200)],
    "additive 1024 float32": [(184, 16500), (192, 16500), (80, 1100)],
    "additive 300 bfloat16": [(128, 33000), (128, 33000), (72, 1100)],
    "cell 512 bfloat16": [(48, 0), (72, 0), (136, 0)],
    "layer gradients bfloat16": [(104, 49152)],
    "adam 300": [(128, 2048)],
    "adam 512": [(128, 2048)],
    "adam 512 bfloat16": [(160, 2048)],
}
SPILLED = {"adam 512 bfloat16": 16}
"""Bytes of a thread's registers that may be kept in memory: capability 8.6 and 8.9 have registers for fewer threads."""


@pytest.mark.thorough
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_take_no_more_than_the_table_says(capability: int) -> None:
    found = compiled("compiling", capability)
    assert list(found) == list(TABLE)
    for name, kernels in found.items():
        assert_fits(capability, {name: kernels}, SPILLED.get(name, 0))
        assert len(kernels) == len(TABLE[name])
        for kernel, (registers, shared) in zip(kernels, TABLE[name], strict=True):
            assert kernel["registers"] <= registers, (name, kernels)
            assert kernel["shared"] <= shared, (name, kernels)
