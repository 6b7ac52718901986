"""The implementations of the linear recurrence that scan, where a loop over the steps would take too long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from econmt_ops import linear_recurrence
from econmt_ops.backends import c as library
from econmt_ops.dispatch.rule import rule
from tests.ops.helpers import Make, assert_close, values_and_gradients


@pytest.mark.parametrize("implementation", ["chunk", "c"] if library.is_built() else ["chunk"])
def test_long_sequence(implementation: str, device: str) -> None:
    """A hundred thousand steps in float32 against float64."""
    make = Make(device, torch.float32)
    decay, inputs = 1 - 0.01 * make(1, 100_000, 2).abs(), make(1, 100_000, 2)
    tensors = {"decay": decay, "inputs": inputs}
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    found = values_and_gradients(partial(linear_recurrence, implementation=implementation), tensors)
    wanted = values_and_gradients(partial(linear_recurrence, implementation="chunk"), exact, found[0])
    for actual, expected in zip(found, wanted, strict=True):
        assert_close(actual, expected, 2e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_whose_decays_overflow_do_no_harm_to_a_state_that_is_zero(reverse: bool) -> None:
    """1e4 to the power of the 25 steps of a chunk is no number of float32."""
    inputs = torch.zeros(1, 600, 2)
    inputs[:, 2 if reverse else -3] = 1.0
    decay = torch.full_like(inputs, 1e4)
    found = linear_recurrence(decay, inputs, reverse=reverse, implementation="chunk")
    expected = linear_recurrence(decay.double(), inputs.double(), reverse=reverse, implementation="reference")
    assert_close([found], [expected], 1e-4)


@pytest.mark.sampled(1)
@pytest.mark.skipif(not library.is_built(), reason="econmt_ops was installed without its C library")
@pytest.mark.parametrize(("hidden", "level"), [(64, 2), (64, 1), (65, 2)])
def test_results_larger_than_caches(hidden: int, level: int, use: Callable[[int], None]) -> None:
    """They are written past the caches where lines are whole."""
    use(level)
    make = Make("cpu", torch.float32)
    steps = (1 << 23) // 128
    given = [make(1, steps, hidden).sigmoid(), make(1, steps, hidden)]
    given = [each.repeat(2, 1, 1).requires_grad_() for each in given]
    incoming, lengths = make(1, steps, hidden).repeat(2, 1, 1), torch.tensor([steps, steps - 3])
    found = linear_recurrence(*given, lengths=lengths, reverse=True, implementation="c")
    gradients = torch.autograd.grad(found, given, incoming)
    expected = linear_recurrence(*given, lengths=lengths, reverse=True, implementation="chunk")
    wanted = torch.autograd.grad(expected, given, incoming)
    assert_close([found, *gradients], [expected, *wanted], 1e-5)


def test_a_loop_of_python_is_the_last_resort() -> None:
    """Whether a gradient will be asked for or not."""
    for gradients in False, True:
        assert rule("linear_recurrence", "cpu", torch.float64, gradients=gradients) == "chunk"
        assert rule("linear_recurrence", "cpu", torch.float32, gradients=gradients) in ("c", "chunk")
