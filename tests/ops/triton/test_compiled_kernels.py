"""Kernels as they are compiled for GPUs, which needs none: they fit, nothing spills, and what they take is held to tables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from econmt_ops.backends import triton
from tests.ops.triton.compiled import CAPABILITIES, assert_fits, compiled

# By module and call, for each of its kernels: registers of a thread and bytes of shared memory, at most, by Triton 3.6
# and 3.9, with room for other compilers.
MOST: dict[str, dict[str, list[tuple[int, int]]]] = {
    "compiling": {
        "additive 512 bfloat16": [(128, 33000), (128, 33000), (64, 4200)],
        "norm 512 bfloat16": [(176, 8300), (204, 8300), (255, 8300)],
        "dot 512 bfloat16": [(112, 33000), (104, 33000)],
        "additive 512 float32": [(176, 16500), (192, 16500), (80, 1100)],
        "additive 1024 bfloat16": [(244, 33000), (232, 33000), (64, 4200)],
        "additive 1024 float32": [(184, 16500), (192, 16500), (80, 1100)],
        "additive 300 bfloat16": [(128, 33000), (128, 33000), (72, 1100)],
        "cell 512 bfloat16": [(48, 0), (72, 0), (136, 0)],
        "adam 300": [(128, 2048)],
        "adam 512": [(128, 2048)],
        "adam 512 bfloat16": [(160, 2048)],
    },
    "compiling_output": {
        "losses bfloat16": [(144, 64)],
        "losses float32": [(144, 64)],
        "losses of an odd vocabulary": [(192, 64)],
        "numbers of a slice": [(144, 64)],
        "gradient of a slice": [(144, 64)],
        "mask": [(48, 4096)],
        "dropout bfloat16": [(144, 4096)],
        "dropout float32": [(80, 4096)],
        "look-up": [(168, 8192)],  # sixteen rows of 512 columns at once
        "cell states": [(88, 0)],
        "table": [(32, 0)],
        "operands": [(64, 0)],
        "sums": [(64, 1024)],
        "search": [(128, 64), (128, 64)],
        "units": [(64, 64)],
        "reversal": [(48, 0)],
    },
    "compiling_recurrence": {
        f"recurrence {kind}": [(128, 1 << 20)] * 2
        for kind in ("float32", "float32 options", "bfloat16", "bfloat16 options")
    },
    "compiling_scan_cells": {
        "sru bfloat16": [(112, 0), (120, 0)],
        "sru view float32": [(120, 0), (120, 0)],
        "ssru bfloat16": [(80, 0), (80, 0)],
        "qrnn bfloat16": [(104, 0), (112, 0)],
        "gilr_lstm bfloat16": [(120, 0), (120, 0)],
        "gilr_lstm float32": [(120, 0), (120, 0)],
        "min_lstm float64": [(168, 0), (168, 0)],
        # What chunks make of a state comes first.
        "gilr_lstm float32 chunks": [(96, 0), (120, 0), (80, 0), (120, 0)],
        "gru bfloat16": [(32, 0), (56, 0)],
        "lnlstm bfloat16": [(88, 2048), (128, 2048)],  # sums over a row
        "lnlstm per gate bfloat16": [(64, 2048), (112, 2048)],
    },
}
SPILLED = {"adam 512 bfloat16": 16}
"""Bytes of a thread's registers that may be kept in memory: capability 8.6 and 8.9 have registers for fewer threads."""


def held(name: str, kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels of a call that are in the tables."""
    return [kernel for kernel in kernels if "chunks" not in name or "scan_cell" in kernel["name"]]


@pytest.mark.thorough
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("module", MOST)
def test_kernels_take_no_more_than_the_table_says(module: str, capability: int) -> None:
    found = compiled(capability, MOST[module])
    assert list(found) == list(MOST[module])
    for name, kernels in found.items():
        assert_fits(capability, {name: kernels}, SPILLED.get(name, 0))
        for kernel, (registers, shared) in zip(held(name, kernels), MOST[module][name], strict=True):
            assert kernel["registers"] <= registers, (name, kernels)
            assert kernel["shared"] <= shared, (name, kernels)


@pytest.mark.thorough
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_persistent_kernels_of_all_cards_fit_and_wait(capability: int) -> None:
    """They are divided for many cards."""
    found = compiled(capability)
    assert len(found) > 20
    assert_fits(capability, found, 0 if capability == 90 else 200)
    for name, kernels in found.items():
        (kernel,) = kernels
        assert kernel["wide products" if capability == 90 else "products"] > 0, (name, kernel)
        assert kernel["barriers between programs"] >= 2, (name, kernel)


def test_kernels_are_compiled_and_loaded_by_threads_and_launched_later() -> None:
    """And, in the same process, a kernel of each language fits a small card."""
    found = compiled(90, module="compiling_in_threads")
    kernels = found.pop("of a small card")
    assert list(kernels) == ["mask", "recurrence float32"]
    assert_fits(86, kernels)
    assert found == {
        "compiled": 4,
        "compiled after": 0,
        "loaded by others": 4,
        "launched": 0,
        "launched after": 3,
        "launched by another": 1,
        "error": "no kernel",
    }


NAMES = (
    "additive 512 bfloat16", "cell 512 bfloat16", "adam 300", "losses bfloat16", "numbers of a slice",
    "gradient of a slice", "scaling", "mask", "dropout bfloat16", "look-up", "cell states", "table", "operands", "sums",
    "decoder output", "coverage", "search", "units", "reversal", "ssru bfloat16", "gru bfloat16", "lnlstm bfloat16",
    "recurrence float32", "20 64x256 both", "20 32x128 back",
)  # fmt: skip
LOCAL = {"kernel", "_kernel", "compiled"}
"""Variables that stand for kernels at their launches."""
CHOSEN = {"attention_forward", "attention_backward"}
"""Kernels that are launched by such variables."""


@pytest.mark.slow
def test_every_kernel_fits_a_small_card() -> None:
    found = compiled(86, NAMES)
    assert list(found) == list(NAMES)
    assert_fits(86, found)
    sources = [file.read_text(encoding="utf-8") for file in Path(triton.__file__).parent.glob("*.py")]
    launches = r"\b(\w+)\[[^\]\n]*\]\(|\blaunch_of\(\s*(\w+)"
    launched = {name for text in sources for match in re.findall(launches, text) for name in match if name}
    compiled_names = {kernel["name"] for kernels in found.values() for kernel in kernels}
    assert compiled_names == launched - LOCAL | CHOSEN
