from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from econmt_ops import linear_recurrence
from tests.ops import definitions
from tests.ops.cases import Sizes, recurrence
from tests.ops.helpers import Make, assert_same_function, each_implementation

pytestmark = each_implementation("linear_recurrence")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accumulates_in_float32(dtype: torch.dtype, implementation: str, device: str) -> None:
    # In bfloat16 a running sum of 1/512 stops at 1/2, in float16 one of 2^-12 at 1/2.
    step = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-12
    count = int(1 / step)
    inputs = torch.full((1, count, 1), step, dtype=dtype, device=device)
    outputs = linear_recurrence(torch.ones_like(inputs), inputs, implementation=implementation)
    assert float(outputs[0, -1, 0]) == 1.0


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("steps", [63, 64, 65, 130])
def test_blocks_of_steps(steps: int, reverse: bool, implementation: str, device: str) -> None:
    """As many steps as a block has, and neither more nor fewer; rows that end in the middle of one."""
    given = {"lengths": torch.tensor([steps, steps // 2]), "reverse": reverse}
    function = partial(linear_recurrence, **given, implementation=implementation)
    definition = partial(linear_recurrence, **given, implementation="reference")
    tensors = recurrence(Make(device), Sizes(2, steps, H=3))
    for dtype in torch.float64, torch.float32:
        assert_same_function(function, definition, tensors, dtype)


@pytest.mark.parametrize("shape", [(5,), (1, 1, 5), (1, 4, 5), (3, 1, 5), (3, 4, 1), (1, 1, 1)], ids=str)
def test_decay_that_is_the_same(shape: tuple[int, ...], implementation: str, device: str) -> None:
    make = Make(device)
    tensors = {"decay": make(*shape), "inputs": make(3, 4, 5)}

    def definition(decay: Tensor, inputs: Tensor) -> Tensor:
        return definitions.linear_recurrence(decay.expand(3, 4, 5), inputs)[0]

    function = partial(linear_recurrence, implementation=implementation)
    assert_same_function(function, definition, tensors)


@pytest.mark.parametrize("decay", [0.0, 1.0, -1.0, 1.0001, 4.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_extreme_decays(decay: float, dtype: torch.dtype, implementation: str, device: str) -> None:
    check_extreme_decay(decay, Make(device, dtype)(1, 600, 2), implementation)


def check_extreme_decay(decay: float, inputs: Tensor, implementation: str) -> None:
    """Nothing is divided, so no decay is special; products that overflow do no harm to a state that is zero."""
    if decay == 4.0:
        inputs[:, :-30] = 0
    given = torch.full_like(inputs, decay).requires_grad_()
    expected = linear_recurrence(given.detach().double(), inputs.double(), implementation="reference")
    found = linear_recurrence(given, inputs, implementation=implementation)
    assert found.isfinite().all()
    near = 1e-12 if inputs.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)
