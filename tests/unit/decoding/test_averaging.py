"""Averages of parameters."""

from __future__ import annotations

import pytest
import torch

from econmt.cli.average import average_tensors, choose_checkpoints
from econmt.errors import InputError


def test_sums_are_float64() -> None:
    # In float32 the small number is lost beside the large one, and in bfloat16 almost everything is.
    values = [1e8, 1.0, -1e8, 1.0]
    found = average_tensors([(str(i), {"a": torch.tensor([v])}) for i, v in enumerate(values)])
    assert found["a"].tolist() == [0.5]
    lean = average_tensors(
        [(str(i), {"a": torch.tensor([v], dtype=torch.bfloat16)}) for i, v in enumerate(values)]
    )
    assert lean["a"].tolist() == [0.5]
    assert lean["a"].dtype == torch.bfloat16


def test_one_file_is_itself_to_the_last_bit() -> None:
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(average_tensors([("f", {"a": tensor})])["a"], tensor)


def test_the_inputs_are_left_as_they_are() -> None:
    tensor = torch.ones(2, dtype=torch.float64)
    average_tensors([("f", {"a": tensor}), ("g", {"a": tensor * 3})])
    assert tensor.tolist() == [1.0, 1.0]


def test_other_shapes_or_names_are_refused_by_name() -> None:
    first = ("f", {"a": torch.zeros(2)})
    with pytest.raises(InputError, match=r"g: parameter 'a' has shape \(3,\), in f it has \(2,\)"):
        average_tensors([first, ("g", {"a": torch.zeros(3)})])
    with pytest.raises(InputError, match="g: parameter 'b' is not in both this file and f"):
        average_tensors([first, ("g", {"a": torch.zeros(2), "b": torch.zeros(1)})])
    with pytest.raises(InputError, match="g: parameter 'a' is not in both"):
        average_tensors([first, ("g", {})])


def test_the_best_checkpoints_are_chosen_by_score() -> None:
    scores = {1: 3.0, 2: 9.0, 3: float("nan"), 4: 5.0, 5: 9.0}
    assert choose_checkpoints([1, 2, 3, 4, 5, 6], scores, 2) == [2, 5]
    assert choose_checkpoints([1, 2, 3, 4, 5, 6], scores, 3) == [2, 4, 5]
    assert choose_checkpoints([6, 3], scores, 3) == []
    assert choose_checkpoints([1, 2], scores, 9) == [1, 2]


def test_the_last_checkpoints() -> None:
    assert choose_checkpoints([30, 10, 20], None, 2) == [20, 30]
