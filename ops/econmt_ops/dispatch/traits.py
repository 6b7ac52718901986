"""Traits and registry of the implementations of each op.

An implementation is a module of the op's package with a name from `NAMES`: a function with the op's name, and, unless
it is plain PyTorch with autograd, a constant `TRAITS` that describes it. "compiled" has no module: it is "recompute"
with ``backend="compiled"``. The choice of an implementation, recipes, plans, estimates and benchmarks read the traits
instead of comparing names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch

from econmt_ops.core.precision import recurrent_tf32
from econmt_ops.dispatch.plans import forget_plans

NAMES = ("reference", "recompute", "chunk", "compiled", "c", "triton")
"""Names of implementations, in the order in which they are listed for users."""

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class Cost(NamedTuple):
    """Cost of a call of an operator: temporary memory in bytes, and floating point operations."""

    workspace: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Traits:
    """Capabilities of an implementation; the defaults are those of plain PyTorch with autograd.

    Attributes:
        devices: Supported device types.
        dtypes: Supported compute types.
        recomputes: True if it keeps less than autograd would and recomputes the rest in the backward pass.
        loops: True if it launches kernels for every step, so that on a GPU it suits captured steps only.
        takes_stash: True if it has the argument ``stash``, one of `econmt_ops.core.chunks.STASHES`.
        model_stash: Stash level for a model in training; see `stash_in_model`. Kernels that recompute gates quickly
            keep less than "gates", the fastest level.
        casts: True if it casts weights and looks up repeated rows itself, so that no copies are kept until the backward
            pass; other implementations get both done.
        warms_up: True if its first call compiles for seconds; it is then measured on request only.
        has_kernels: True if it has kernels of its own for its devices, where it then precedes all other
            implementations.
        is_last: True if it is used only where no other can run, with or without gradients: a Python loop over many
            steps.
        is_available: Returns True if this machine can run it or, in an estimate, the device that it is for.
        fake_implementation: Implementation of the op that allocates the same bytes, to trace instead of this one on
            tensors without values; "" if this one can be traced, as kernels can: their launches do nothing there.
        costs: Costs of operators of torch.library that cannot be traced, by name; called with the operator's arguments.
    """

    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[torch.dtype] = FLOATS
    recomputes: bool = False
    loops: bool = False
    takes_stash: bool = False
    model_stash: str = "gates"
    casts: bool = False
    warms_up: bool = False
    has_kernels: bool = False
    is_last: bool = False
    is_available: Callable[[], bool] = lambda: True
    fake_implementation: str = ""
    costs: Mapping[str, Callable[..., Cost]] = field(default_factory=dict)

    def runs_on(self, device: str, dtype: torch.dtype) -> bool:
        """Returns True if it supports this device type and compute type."""
        return device in self.devices and dtype in self.dtypes

    def stash_in_model(self, dtype: torch.dtype) -> str:
        """Returns the stash level for a model in training if implementation and level are "auto".

        Without tensor cores making the gates again takes a seventh of a step.
        """
        narrow = dtype.itemsize <= 2 or (dtype == torch.float32 and recurrent_tf32())
        return self.model_stash if narrow else "gates"


class Candidate(NamedTuple):
    """Implementation of an op: its name, function and traits; and options such as a stash level."""

    name: str
    function: Callable[..., Any]
    traits: Traits = Traits()
    options: Mapping[str, str] = MappingProxyType({})

    @property
    def label(self) -> str:
        """Name and values of the options, such as "recompute/gates"."""
        return "/".join((self.name, *self.options.values()))


_OPS: dict[str, dict[str, Candidate]] = {}
"""Implementations by op and name, in the order of `NAMES`."""


def implementations(
    op: str, *modules: ModuleType, **others: tuple[Callable[..., Any], Traits]
) -> Mapping[str, Candidate]:
    """Collects the implementations of an op.

    Args:
        op: Name of the op, which is the name of the function in every implementation.
        modules: Modules with a name from `NAMES`, the function and its `TRAITS`, by default `Traits`().
        others: Functions and traits of further implementations by name.

    A recomputing function that takes ``backend`` (see `econmt_ops.backends.steps_for`) is also the implementation
    "compiled", with steps compiled by torch.compile.

    Returns:
        The implementations by name, in the order of `NAMES`; later calls of `register` add to it.
    """
    made = {
        module.__name__.rpartition(".")[2]: (getattr(module, op), getattr(module, "TRAITS", Traits()))
        for module in modules
    }
    made |= others
    if "recompute" in made and "backend" in inspect.signature(made["recompute"][0]).parameters:
        function, traits = made["recompute"]
        traits = replace(traits, warms_up=True, fake_implementation="recompute")
        made["compiled"] = functools.partial(function, backend="compiled"), traits
    _OPS[op] = {}
    for name, (function, traits) in made.items():
        register(op, name, function, traits)
    return _OPS[op]


def register(op: str, name: str, function: Callable[..., Any], traits: Traits) -> None:
    """Adds an implementation of an op from outside, or replaces one.

    Calls and recipes select it by ``name``; the function has the arguments of the op's other implementations.
    """
    forget_plans()
    registered = _OPS[op]
    registered[name] = Candidate(name, function, traits)
    ordered = sorted(registered, key=lambda each: NAMES.index(each) if each in NAMES else len(NAMES))
    for each in ordered:
        registered[each] = registered.pop(each)


def implementations_of(op: str) -> Mapping[str, Candidate]:
    """Returns the implementations of an op by name, including those that this machine cannot run."""
    return _OPS[op]


def names_of(*ops: str) -> list[str]:
    """Returns the names under which all given ops have an implementation."""
    first, *others = (_OPS[op] for op in ops)
    return [name for name in first if all(name in other for other in others)]


def cost_of(operator: str) -> Callable[..., Cost] | None:
    """Returns the declared cost function of an operator of torch.library, or None if the operator can be traced."""
    for registered in _OPS.values():
        for implementation in registered.values():
            if operator in implementation.traits.costs:
                return implementation.traits.costs[operator]
    return None


def definition(op: str) -> Candidate:
    """Returns the implementation that defines an op: the first one, plain PyTorch with autograd."""
    return next(iter(_OPS[op].values()))
