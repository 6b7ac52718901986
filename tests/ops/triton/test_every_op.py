"""Kernels that are called with nothing, with tensors that lie in memory in any way, and in float16 under a loss scale."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from econmt_ops.core.chunks import STASHES
from econmt_ops.dispatch.traits import implementations_of
from econmt_ops.lstm import triton as lstm
from tests.ops.empty import check_empty_rows, check_nothing, thorough
from tests.ops.every_op import calls, each_op
from tests.ops.layouts import LAYOUTS, check_layouts, problems, variants
from tests.ops.test_loss_scale import HALF, check_in_float16
from tests.ops.triton.kernel_device import DEVICE

PROBLEMS = problems("cpu")
NAMES = [name for name, each in variants() if each == "triton"]


def options_of(problem: str) -> list[dict[str, str]]:
    """Returns the options of ways in which the kernels run: what they keep makes them others."""
    traits = implementations_of(PROBLEMS[problem].function.__name__)["triton"].traits
    return [{"stash": stash} for stash in STASHES[1::3]] if traits.takes_stash else [{}]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("problem", [thorough(name) for name in NAMES])
def test_nothing_is_computed_of_nothing(problem: str, device: str) -> None:
    for options in options_of(problem):
        check_nothing(problem, "triton", device, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "problem", [thorough(name) for name in NAMES if name.startswith(("lstm", "bidirectional_lstm", "gru"))]
)
def test_nothing_is_computed_of_nothing_step_by_step(
    problem: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU in IEEE float32, which no launch for a layer serves."""
    monkeypatch.setattr(lstm, "_products", lambda *_: None)
    for options in options_of(problem):
        check_nothing(problem, "triton", device, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "problem", [name for name in NAMES if PROBLEMS[name].arguments.get("lengths") is not None]
)
def test_rows_of_length_0(problem: str, device: str) -> None:
    for options in options_of(problem):
        check_empty_rows(problem, "triton", device, **options)


@pytest.mark.parametrize("problem", NAMES)
@pytest.mark.parametrize("shift", range(len(LAYOUTS)))
@pytest.mark.sampled(2)
def test_layouts_change_no_result(problem: str, shift: int, device: str) -> None:
    check_layouts(problem, "triton", shift, device)


def test_a_first_state_may_be_strided(device: str) -> None:
    check_layouts("attentional_lstm-state", "triton", 3, device)


@pytest.mark.sampled(2)
@each_op
def test_gradients_are_those_of_float64_or_show_an_overflow(op: str, device: str) -> None:
    call = calls(device, torch.float64)[op]
    implementation = implementations_of(op.partition("-")[0]).get("triton")
    if implementation is None or not implementation.traits.runs_on("cuda", HALF) or device != DEVICE:
        pytest.skip("no kernels")
    check_in_float16(call, [partial(call.function, implementation="triton")], device)
