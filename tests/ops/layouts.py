"""Every op called with tensors that lie in memory in every way, for the tests that the way changes no result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import econmt_ops
from econmt_ops import UniqueRows
from econmt_ops.core.chunks import STASHES
from econmt_ops.dispatch.traits import implementations_of
from econmt_ops.layers.op import LayerOp
from tests.ops.every_op import Call, calls
from tests.ops.helpers import Make, assert_close, differentiable

TOLERANCE = 1e-2
"""Largest relative error of float32 results, whose products may be summed in another order.

Layer normalisation of equal values magnifies rounding by 1 / sqrt(1e-5). A wrong stride gives NaN or other numbers.
"""

_PLAIN = {"bool", "int", "float", "str", "Seed | None"}
"""Annotations of parameters that hold no tensors with strides."""


def _gaps(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory of NaN, or of an integer that is no length, index or target."""
    return torch.full(shape, torch.nan if like.is_floating_point() else 1 << 40, dtype=like.dtype).to(
        like.device
    )


def _strided(x: Tensor) -> Tensor:
    memory = _gaps((*x.shape, 2), x)
    memory[..., 1] = x
    return memory[..., 1]


def _offset(x: Tensor) -> Tensor:
    memory = _gaps((*x.shape[:-1], x.shape[-1] + 3), x)
    memory[..., 1:-2] = x
    return memory[..., 1:-2]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else _strided(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": _strided,
    "offset": _offset,
    "transposed": _transposed,
    "expanded-rows": lambda x: _strided(x)[:1].expand_as(x),
    "expanded-columns": lambda x: _strided(x)[..., :1].expand_as(x),
    "one-value": lambda x: _strided(x)[(slice(0, 1),) * x.dim()].expand_as(x),
}
"""Tensors of the same shape; the expanded ones repeat some of the values, as those that ``sum`` passes back do."""


def ops() -> dict[str, Callable[..., Any]]:
    """The public functions that have implementations, by name."""
    public = {name: getattr(econmt_ops, name) for name in econmt_ops.__all__}
    return {
        name: each
        for name, each in public.items()
        if isinstance(each, LayerOp)
        or (inspect.isfunction(each) and "implementation" in inspect.signature(each).parameters)
    }


def tensor_parameters(function: Callable[..., Any]) -> set[str]:
    """The names of an op's parameters that hold tensors."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if str(each.annotation) not in _PLAIN}


@functools.cache
def problems(device: str) -> dict[str, Call]:
    """The calls of `calls` by name, also with a state, `UniqueRows` inputs or a probe where the op takes one."""
    dtype, found = torch.float32, {}
    for name, call in calls(device, dtype).items():
        arguments = dict(call.arguments)
        parameters = inspect.signature(call.function).parameters
        found[name] = call
        if "state" in parameters:
            last = call.function(**arguments, implementation="reference")[-1]
            arguments["state"] = tree_map(lambda x: x if x is None else x.detach().clone(), last)
            found[f"{name}-state"] = call._replace(arguments=arguments)
        if "inputs" in parameters and parameters["inputs"].annotation == "Inputs":
            inputs = arguments["inputs"]
            places = torch.tensor([[0, 1, 4, 2], [2, 2, 3, 0], [1, 4, 4, 3]])[:, : inputs.shape[1]]
            repeated = UniqueRows(inputs.flatten(0, 1)[:5].clone(), places.to(device))
            found[f"{name}-repeated"] = call._replace(arguments={**arguments, "inputs": repeated})
    alone = calls(device, dtype)["lstm"]
    gate_gradient = torch.zeros(4, 3, 32, dtype=dtype, device=device)
    more = {"layers": alone.arguments["layers"][:1], "gate_gradient": gate_gradient}
    return {**found, "lstm-probe": alone._replace(arguments={**alone.arguments, **more})}


def variants() -> list[tuple[str, str]]:
    """Every problem with each implementation of its op, also those that this machine cannot run."""
    return [
        (name, each)
        for name, call in problems("cpu").items()
        for each in implementations_of(call.function.__name__)
    ]


def check_layouts(name: str, implementation: str, shift: int, device: str) -> None:
    """Compares a problem's values and gradients to those of contiguous arguments and cotangents.

    The layout of each tensor is the next one of `LAYOUTS`, the first tensor's that of number ``shift``: so as many
    shifts as there are layouts try every tensor with every layout.
    """
    call = problems(device)[name]
    leaves, structure = tree_flatten(call.arguments)
    ways = list(LAYOUTS.values())
    options = {"implementation": implementation}
    if implementations_of(call.function.__name__)[implementation].traits.takes_stash:
        options["stash"] = STASHES[shift % len(STASHES)]

    def lay(tensors: list[Any]) -> list[Any]:
        return [
            ways[(number + shift) % len(ways)](x) if isinstance(x, Tensor) and x.dim() > 0 else x
            for number, x in enumerate(tensors)
        ]

    def run(given: list[Any], cotangents: list[Tensor]) -> list[Tensor]:
        """The results and the gradients of all floating point arguments; no cotangents: random ones, which it fills."""
        given = differentiable(given)
        results = tree_leaves(call.function(**tree_unflatten(given, structure), **options))
        results = [x for x in results if isinstance(x, Tensor)]
        if not cotangents:
            cotangents += lay([make(*x.shape).to(x.dtype) for x in results])
        pairs = [(x, y) for x, y in zip(results, cotangents, strict=True) if x.requires_grad]
        wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        gradients = torch.autograd.grad(
            [x for x, _ in pairs], wanted, [y for _, y in pairs], allow_unused=True, materialize_grads=True
        )
        return [*(x.detach() for x in results), *gradients]

    make = Make(device, torch.float32, seed=7)
    laid = lay(leaves)
    cotangents: list[Tensor] = []
    found = run(laid, cotangents)
    plain = [x.contiguous().clone() if isinstance(x, Tensor) else x for x in laid]
    wanted = run(plain, [x.contiguous().clone() for x in cotangents])
    assert all(x.isfinite().all() for x in wanted)
    assert_close(found, wanted, TOLERANCE)
