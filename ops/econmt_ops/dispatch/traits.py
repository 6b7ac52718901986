"""What an implementation of an op says of itself, and which implementations there are.

Every op has a package of its own, and each module of it that is named in `NAMES` and has a function of the op's name is
an implementation; its constant `TRAITS` says what it can do. Nothing else has to be told of it: the choice, recipes,
plans, estimates, prices and benches ask the traits and compare no names.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

NAMES = ("reference", "recompute", "chunk", "compiled", "c", "triton")
"""Modules that may hold an implementation, in the order in which they are named to people."""

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class Cost(NamedTuple):
    """What a call of an operator takes inside: bytes that it gives back, and floating point operations."""

    workspace: int = 0
    flops: int = 0


def _always(*_: object) -> bool:
    return True


@dataclass(frozen=True)
class Traits:
    """What an implementation can do; the defaults are those of plain PyTorch under autograd.

    Attributes:
        devices: types of devices on which it runs.
        dtypes: compute types that it takes.
        recomputes: it keeps less than autograd would and makes the rest again in the backward pass.
        loops: it launches kernels for every step, so that on a GPU it is for captured steps.
        takes_stash: it has the argument ``stash``, one of `econmt_ops.core.chunks.STASHES`.
        model_stash: the level of a model in training whose implementation and level are left to "auto". A call alone
            keeps "gates", the fastest level; of kernels that make gates again quickly a model keeps less.
        casts: it casts weights and looks repeated rows up inside, so that no copies are kept from the forward to the
            backward pass; others are given both made.
        capturable: its calls can be captured in a CUDA graph.
        warms_up: its first call takes seconds, since something is compiled: it is measured only if asked for.
        has_kernels: it has kernels of its own for its devices and goes before all others there.
        is_last: it runs where no other can, whether something will be kept or not: a loop of Python over many steps.
        needs: a module without which it cannot be imported; "" if there is none.
        is_available: whether this machine can run it.
        serves: whether it takes a problem, by sizes (letters as `Shapes` learns them) and detail; it is not asked for
            a call that names the implementation.
        stands_in: the implementation of the op that allocates the same bytes, if this one cannot be followed on
            tensors without values; "" if it can, which kernels can too: launches do nothing there.
        costs: by name of an operator of torch.library that cannot be followed, called with its arguments.
    """

    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[torch.dtype] = FLOATS
    recomputes: bool = False
    loops: bool = False
    takes_stash: bool = False
    model_stash: str = "gates"
    casts: bool = False
    capturable: bool = True
    warms_up: bool = False
    has_kernels: bool = False
    is_last: bool = False
    needs: str = ""
    is_available: Callable[[], bool] = _always
    serves: Callable[[Mapping[str, int], str], bool] = _always
    fake_implementation: str = ""
    costs: Mapping[str, Callable[..., Cost]] = field(default_factory=dict)

    def runs_on(self, device: str, dtype: torch.dtype) -> bool:
        """Whether it is made for this type of device and compute type."""
        return device in self.devices and dtype in self.dtypes

    @property
    def is_installed(self) -> bool:
        """Whether what it needs is installed, though the device may be missing."""
        return not self.needs or importlib.util.find_spec(self.needs) is not None


class Implementation(NamedTuple):
    """A way to compute an op: its name, its function and its traits."""

    name: str
    function: Callable[..., Any]
    traits: Traits = Traits()


_OPS: dict[str, dict[str, Implementation]] = {}
"""By op, by name, in the order of `NAMES`."""


def implementations(package: str, op: str) -> Mapping[str, Implementation]:
    """Collects the implementations of an op that a package holds.

    Args:
        package: the package's full name, `econmt_ops.lstm` for example.
        op: the op's name, which is the name of the function in every implementation.

    Returns:
        Them by name, in the order of `NAMES`; what `register` adds later appears in it.
    """
    _OPS[op] = {}
    for name in NAMES:
        if importlib.util.find_spec(f"{package}.{name}") is not None:
            module = importlib.import_module(f"{package}.{name}")
            if hasattr(module, op):
                register(op, name, getattr(module, op), module.TRAITS)
    return _OPS[op]


def register(op: str, name: str, function: Callable[..., Any], traits: Traits) -> None:
    """Adds an implementation of an op from outside, or replaces one.

    Args:
        op: "linear_cross_entropy", for example.
        name: under which calls and recipes ask for it.
        function: takes what the op's other implementations take.
        traits: what it can do.
    """
    found = _OPS[op]
    found[name] = Implementation(name, function, traits)
    ordered = sorted(found, key=lambda each: NAMES.index(each) if each in NAMES else len(NAMES))
    for each in ordered:
        found[each] = found.pop(each)


def unregister(op: str, name: str) -> None:
    """Takes an implementation of an op away."""
    del _OPS[op][name]


def implementations_of(op: str) -> Mapping[str, Implementation]:
    """The implementations of an op by name, those included that this machine cannot run."""
    return _OPS[op]


def names_of(*ops: str) -> list[str]:
    """The names under which every one of some ops has an implementation."""
    first, *others = (_OPS[op] for op in ops)
    return [name for name in first if all(name in other for other in others)]


def cost_of(operator: str) -> Callable[..., Cost] | None:
    """The cost that some implementation declares for an operator of torch.library; None: it can be followed."""
    for found in _OPS.values():
        for implementation in found.values():
            if operator in implementation.traits.costs:
                return implementation.traits.costs[operator]
    return None


def definition(op: str) -> Implementation:
    """The implementation that defines an op: the first one, plain PyTorch under autograd."""
    return next(iter(_OPS[op].values()))
