"""The kernels around scans and of steps as they are compiled for GPUs: what they take is held to a table."""

from __future__ import annotations

import pytest

from tests.ops.triton.compiled import CAPABILITIES, assert_fits, compiled

# By call, the registers of a thread at most, forward and backward; of chunks each first finds what they make of a state.
MOST = {
    "sru bfloat16": (112, 120),
    "sru view float32": (120, 120),
    "ssru bfloat16": (80, 80),
    "qrnn bfloat16": (104, 112),
    "gilr_lstm bfloat16": (120, 120),
    "gilr_lstm float32": (120, 120),
    "min_lstm float64": (168, 168),
    "gilr_lstm float32 chunks": (96, 120, 80, 120),
    "gru bfloat16": (32, 56),
    "lnlstm bfloat16": (88, 128),
    "lnlstm per gate bfloat16": (64, 112),
}


@pytest.mark.thorough
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_for_a_gpu(capability: int) -> None:
    found = compiled("compiling_scan_cells", capability)
    assert list(found) == list(MOST)
    assert_fits(capability, found)
    for name, kernels in found.items():
        held = [kernel for kernel in kernels if "chunks" not in name or "scan_cell" in kernel["name"]]
        most = 2048 if "lnlstm" in name else 0  # sums over a row
        assert max(kernel["shared"] for kernel in held) <= most, (name, kernels)
        for kernel, registers in zip(held, MOST[name], strict=True):
            assert kernel["registers"] <= registers, (name, kernels)
