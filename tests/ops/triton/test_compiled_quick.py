"""Kernels compiled for a small card: they have room there and nothing spills. Other tests do so for more of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from econmt_ops.backends import triton
from tests.ops.triton.compiled import assert_fits, compiled

NAMES = (
    "additive 512 bfloat16", "cell 512 bfloat16", "adam 300", "losses bfloat16", "numbers of a slice",
    "gradient of a slice", "mask", "dropout bfloat16", "look-up", "cell states", "table", "operands", "sums",
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
