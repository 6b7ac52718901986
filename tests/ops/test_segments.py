"""Empty steps before resets, beside a loop over each row."""

from __future__ import annotations

import pytest
import torch

from econmt_ops.modules.resets import Segments, first_states


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 9, 12])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_each_reset_within_a_row_gets_an_empty_step(steps: int, share: float, with_lengths: bool) -> None:
    """None is at the first step or past the row's length; there is room for a multiple of eight, or for one a step."""
    torch.manual_seed(steps)
    resets = torch.rand(5, steps) < share
    lengths = torch.tensor([0, 1, steps // 2, steps - 1, steps]) if with_lengths else None
    segments, rows = Segments(resets, lengths, torch.device("cpu")), torch.rand(5, steps, 3) + 1.0
    expected, used = list[list[torch.Tensor]](), list[list[float]]()
    for number, row in enumerate(rows):
        length = steps if lengths is None else int(lengths[number])
        expected.append([])
        used.append([])
        for step in range(steps):
            if step and step < length and resets[number, step]:
                expected[-1].append(torch.zeros(3))
                used[-1].append(0.0)
            expected[-1].append(row[step])
            used[-1].append(1.0)
        assert int(segments.lengths[number]) == length + used[-1].count(0.0)
    most = max(row.count(0.0) for row in used)
    assert segments.steps == steps + min(-(-most // 8) * 8, steps - 1)
    spread = segments.spread(rows)
    for found, row in zip(spread, expected, strict=True):
        assert torch.equal(found, torch.stack(row + [torch.zeros(3)] * (segments.steps - len(row))))
    assert torch.equal(segments.collect(spread), rows)


@pytest.mark.parametrize("directions", [1, 2])
def test_states_before_a_reset_at_the_first_step_are_forgotten(directions: int) -> None:
    """Only forwards, and not of a row without steps."""
    resets = torch.tensor([[True, False], [False, True], [True, True]])
    state = torch.ones(2 * directions, 3, 4), torch.full((2 * directions, 3, 4), 2.0)
    for lengths, begins in ((None, [0, 2]), (torch.tensor([1, 2, 0]), [0])):
        for before, after in zip(state, first_states(resets, lengths, state, directions), strict=True):
            expected = before.clone()
            expected[::directions, begins] = 0.0
            assert torch.equal(after, expected)
