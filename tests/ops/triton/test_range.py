"""Layers in float32 with products in float16 have the range of float32: values and gradients of any size keep their digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops.backends.triton import partition
from econmt_ops.backends.triton.partition import Partition
from econmt_ops.core.weights import LSTMWeights
from econmt_ops.lstm import reference, triton
from econmt_ops.products.stack import StackOptions

TOLERANCE = 8e-3
"""Of single rows whose other products are in TF32 on a GPU; cuDNN's own errors of whole tensors are 1e-3 and less."""


def _row_error(got: Tensor, want: Tensor) -> float:
    """The largest relative error of a row (last axis), beside rows of the same tensor that may be of any other size."""
    error = (got.double() - want).norm(dim=-1)
    return float((error / want.norm(dim=-1).clamp(min=1e-36)).max())


def _tensor_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp(min=1e-36))


class Case:
    """A layer, and the gradient of its outputs."""

    def __init__(self, device: str, steps: int = 4, hidden: int = 24, batch: int = 5, size: int = 7) -> None:
        torch.manual_seed(0)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, device=device) * scale).requires_grad_()

        self.inputs = draw(batch, steps, size)
        shapes = {0.4: (4 * hidden, size), 0.2: (4 * hidden, hidden), 0.1: (4 * hidden,)}
        self.weights = LSTMWeights(*(draw(*shape, scale=scale) for scale, shape in shapes.items()))
        self.state: tuple[Tensor, Tensor] | None = None
        self.lengths: Tensor | None = None
        self.doutputs = torch.randn(batch, steps, hidden, device=device)
        self.dlast: list[Tensor] | None = None
        self.reverse = False

    def scale(self, **factors: float) -> None:
        for name, factor in factors.items():
            owner = self.weights if name in LSTMWeights._fields else self
            getattr(owner, name).data.mul_(factor)

    def run(self, exact: bool) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Results (outputs, last h and c) and gradients (inputs, weights, state)."""
        kind = torch.float64 if exact else torch.float32
        leaves = [self.inputs, *self.weights, *(self.state or ())]
        leaves = [leaf.detach().to(kind).requires_grad_() for leaf in leaves]
        inputs, weights, state = leaves[0], LSTMWeights(*leaves[1:4]), leaves[4:]
        options = StackOptions(self.lengths, self.reverse)
        first: Any = [tuple(state)] if state else []
        if exact:
            zeros = inputs.new_zeros(len(inputs), weights.hidden.shape[1])
            outputs, (last,) = reference.lstm(inputs, (weights,), tuple(first) or ((zeros, zeros),), options)
        else:
            call = inputs, [weights], first, options._replace(reverse=False), [self.reverse], "gates"
            outputs, *last = triton._run_layer(*call, torch.float16)
            last = [part.squeeze(0) for part in last]
        results = [outputs, *last]
        given = [self.doutputs, *(self.dlast or [torch.zeros_like(part) for part in last])]
        gradients = torch.autograd.grad(results, leaves, [part.to(kind) for part in given])
        return [part.detach() for part in results], gradients

    def check(self, tolerance: float = TOLERANCE) -> None:
        (outputs, *last), (inputs, *weights) = self.run(exact=False)
        (want_outputs, *want_last), (want_inputs, *want_weights) = self.run(exact=True)
        assert _row_error(outputs, want_outputs) < tolerance
        assert _row_error(inputs, want_inputs) < tolerance
        others = zip([*last, *weights], [*want_last, *want_weights], strict=True)
        for number, (got, want) in enumerate(others):
            assert _tensor_error(got, want) < tolerance, number


def _last_step_only(case: Case) -> None:
    """Closed gates let the gradient fall by 1e-3 a step, to 1e-24 at the first."""
    case.doutputs[:, :-1] = 0
    case.scale(hidden=1e-2)
    case.weights.bias.data.fill_(-5.0)


def _growing(case: Case) -> None:
    case.scale(hidden=12.0)
    case.doutputs[:, :-1] = 0


def _rows_apart(case: Case) -> None:
    case.doutputs *= torch.logspace(-30, 30, len(case.doutputs), device=case.doutputs.device)[:, None, None]


def _steps_apart(case: Case) -> None:
    powers = torch.logspace(-25, 25, case.doutputs.shape[1], device=case.doutputs.device)
    case.doutputs *= powers[torch.randperm(len(powers))][:, None]


def _tiny_inputs(case: Case) -> None:
    case.scale(inputs=1e-30)
    case.weights.bias.data.zero_()


def _inputs_apart(case: Case) -> None:
    powers = torch.logspace(-28, 1, case.inputs.shape[1], device=case.inputs.device)
    case.inputs.data.mul_(powers[:, None])
    case.weights.bias.data.zero_()


def _states(case: Case) -> None:
    rows, hidden = len(case.inputs), case.weights.hidden.shape[1]
    h = torch.randn(rows, hidden, device=case.inputs.device)
    case.state = h * torch.logspace(-9, 1, rows, device=h.device)[:, None], torch.randn_like(h)
    case.dlast = [torch.randn_like(h) * 1e20, torch.randn_like(h) * 1e-10]
    case.lengths = torch.tensor([4, 1, 0, 2, 3], device=h.device).clamp(max=case.inputs.shape[1])


def _backwards(case: Case) -> None:
    case.reverse = True
    case.lengths = torch.tensor([2, 4, 1, 0, 3], device=case.inputs.device)
    h = torch.randn(len(case.inputs), case.weights.hidden.shape[1], device=case.inputs.device)
    case.dlast = [h * 1e-12, torch.randn_like(h) * 1e12]


CASES: dict[str, Callable[[Case], None]] = {
    "as they are": lambda _: None,
    "gradients 1e-30": lambda case: case.scale(doutputs=1e-30),
    "gradients 1e30": lambda case: case.scale(doutputs=1e30),
    "a gradient of the last step": _last_step_only,
    "growing gradients": _growing,
    "rows apart": _rows_apart,
    "steps apart": _steps_apart,
    "inputs 1e-30": _tiny_inputs,
    "inputs 1e5": lambda case: case.scale(inputs=1e5),
    "inputs apart": _inputs_apart,
    "weights 1e-20": lambda case: case.scale(hidden=1e-20),
    "weights 20": lambda case: case.scale(hidden=20.0),
    "weights 1e6": lambda case: case.scale(hidden=1e6, inputs=1e-4),
    "states": _states,
    "backwards": _backwards,
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_any_size(name: str, device: str) -> None:
    case = Case(device, 9 if name in ("a gradient of the last step", "growing gradients") else 4)
    CASES[name](case)
    if name in ("weights 20", "weights 1e6", "growing gradients", "inputs 1e5"):
        # Products this large leave no digits to what saturated gates make of them.
        results, gradients = case.run(exact=False)
        assert all(part.isfinite().all() for part in (*results, *gradients))
    else:
        case.check()


@pytest.mark.parametrize("name", ["rows apart", "inputs apart", "states"])
def test_teams(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = Partition(16, 16, 4, 32, 132)
    back = Partition(16, 8, 4, 32, 132, 2, False, team=2)
    monkeypatch.setattr(partition, "divide", lambda *_, back, ours=(ahead, back), **__: ours[back])
    case = Case(device, 2, hidden=35)
    CASES[name](case)
    case.check()


def test_values_that_are_no_numbers_stay_so(device: str) -> None:
    case = Case(device)
    case.doutputs[1, 2] = float("nan")
    _, (inputs, *_) = case.run(exact=False)
    assert inputs[1, :3].isnan().all()
    assert inputs[[0, 2, 3, 4]].isfinite().all()
