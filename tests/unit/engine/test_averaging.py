"""The mean of a run's parameters: when it begins, and that it leaves the parameters as they were."""

from __future__ import annotations

import pytest
import torch

from econmt.engine.parameters import ParameterAverage, begins
from tests.unit.engine.test_step import make_step, make_task
from tests.unit.engine.toy import assert_same_bits, parameters


def test_an_error_in_the_context_puts_the_parameters_back() -> None:
    step = make_step(make_task())
    before = parameters(step.model)
    average = ParameterAverage(step.optimizer)
    with pytest.raises(KeyboardInterrupt), average.in_place():
        raise KeyboardInterrupt
    assert_same_bits(parameters(step.model), before)
    with average.in_place():
        assert all(not value.any() for value in parameters(step.model).values())


def test_the_newest_is_compared_with_the_best_of_those_before_the_interval() -> None:
    for perplexities in ([], [5.0], [5.0, 5.0]):
        assert not begins(perplexities, 0)
    assert begins([5.0, 6.0], 0)
    for perplexities in ([4.0, 5.0], [5.0, 4.0, 4.5], [3.0, 9.0, 8.0, 2.0]):
        assert not begins(perplexities, 1)
    for perplexities in ([4.0, 5.0, 4.5], [3.0, 9.0, 8.0, 4.0]):
        assert begins(perplexities, 1)


def test_the_mean_of_updates() -> None:
    step = make_step(make_task())
    average = ParameterAverage(step.optimizer)
    first = parameters(step.model)
    average.add(1)
    with torch.no_grad():
        for parameter in step.model.parameters():
            parameter.add_(2.0)
    average.add(2)
    with average.in_place():
        for name, value in parameters(step.model).items():
            torch.testing.assert_close(value, first[name] + 1.0)
