"""Every op called with nothing, for the tests that each implementation does the same then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import econmt_ops
from econmt_ops import UniqueRows
from tests.ops.every_op import Call
from tests.ops.helpers import assert_close, differentiable
from tests.ops.layouts import problems

_AXES: dict[str, dict[str, int]] = {
    "batch": dict.fromkeys(
        ("inputs", "query", "keys", "values", "decay", "initial", "lengths", "state", "hidden", "targets"), 0
    )
    | {"gate_gradient": 1},
    "steps": {"inputs": 1, "query": 1, "decay": 1, "gate_gradient": 0},
    "positions": {"keys": 1, "values": 1},
}
"""The axes of arguments that have no entries, by what there is none of."""


def thorough(name: str, *values: str) -> Any:
    """Returns a variant of a test by the name of its problem; those of a state or repeated rows are thorough."""
    more = name.endswith(("-state", "-repeated"))
    return pytest.param(name, *values, marks=[pytest.mark.thorough] if more else [])


def without(call: Call, what: str) -> Call:
    """Returns the call with a batch, a number of steps or a number of source positions of 0."""

    def cut(name: str, value: Any) -> Any:
        if name == "lengths" and what != "batch":
            return torch.zeros_like(value)
        if name not in _AXES[what]:
            return value
        if isinstance(value, UniqueRows):
            return UniqueRows(value.rows, value.places.narrow(_AXES[what][name], 0, 0))
        return tree_map(lambda part: part if part is None else part.narrow(_AXES[what][name], 0, 0), value)

    return call._replace(arguments={name: cut(name, value) for name, value in call.arguments.items()})


def takes(call: Call, what: str) -> bool:
    """True if a call has arguments with such an axis."""
    return any(name in _AXES[what] for name in call.arguments)


def run(call: Call, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the results of a call and the gradients of their sums; memory that nobody writes holds NaN."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        given = differentiable(call.arguments)
        results = [x for x in tree_leaves(call.function(**given, **options)) if isinstance(x, Tensor)]
        wanted = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]
        sums = [x.sum() for x in results if x.requires_grad]
        gradients = torch.autograd.grad(sums, wanted, allow_unused=True, materialize_grads=True)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    return [x.detach() for x in results], list(gradients)


def check_nothing(name: str, implementation: str, device: str, **options: str) -> None:
    """Checks a problem with a batch of 0: results without values and gradients of 0; without positions: an error."""
    call = problems(device)[name]
    if call.function is econmt_ops.linear_cross_entropy:  # the mean of no losses is NaN
        call = call._replace(arguments={**call.arguments, "reduction": "sum"})
    options["implementation"] = implementation
    results, gradients = run(without(call, "batch"), **options)
    wanted, _ = run(without(call, "batch"), implementation="reference")
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in wanted]
    for number, value in enumerate([*results, *gradients]):
        assert not value.any(), f"tensor {number}: {value}"
    takes_no_steps = call.function in (econmt_ops.linear, econmt_ops.additive_attention)
    for what in ("steps", "positions")[takes_no_steps:]:
        if takes(call, what):
            with pytest.raises(ValueError, match="must have at least one position, got "):
                run(without(call, what), **options)


def check_empty_rows(name: str, implementation: str, device: str, **options: str) -> None:
    """Compares a problem whose rows all have length 0 with the reference."""
    call = problems(device)[name]
    call = call._replace(arguments={**call.arguments, "lengths": torch.zeros_like(call.arguments["lengths"])})
    options["implementation"] = implementation
    for found, expected in zip(run(call, **options), run(call, implementation="reference"), strict=True):
        assert_close(found, expected, 1e-5 if device == "cpu" else 3e-5)
