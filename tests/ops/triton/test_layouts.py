"""Results of the kernels do not depend on how the arguments and the incoming gradients lie in memory."""

from __future__ import annotations

import pytest

from tests.ops.layouts import LAYOUTS, check_layouts, variants


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shift", range(len(LAYOUTS)))
@pytest.mark.parametrize("problem", [name for name, each in variants() if each == "triton"])
def test_layouts_change_no_result(problem: str, shift: int, device: str) -> None:
    check_layouts(problem, "triton", shift, device)


@pytest.mark.parametrize(
    ("problem", "shift"), [pytest.param("lnlstm", 0, marks=pytest.mark.slow), ("attentional_lstm-state", 3)]
)
def test_vectors_and_first_states_may_be_strided(problem: str, shift: int, device: str) -> None:
    check_layouts(problem, "triton", shift, device)
