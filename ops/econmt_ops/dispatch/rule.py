"""Which implementation "auto" means where nothing is measured."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from econmt_ops.core.weights import tensors_of
from econmt_ops.dispatch.traits import Implementation, Traits, implementations_of


class Candidate(NamedTuple):
    """A way to run an op: an implementation, and options beside the op's arguments."""

    implementation: Implementation
    options: dict[str, str]

    @property
    def name(self) -> str:
        """Of the implementation."""
        return self.implementation.name

    @property
    def function(self) -> Any:
        """Of the implementation."""
        return self.implementation.function

    @property
    def traits(self) -> Traits:
        """Of the implementation."""
        return self.implementation.traits

    @property
    def label(self) -> str:
        """The name and the options' values: recompute/gates."""
        return "/".join((self.name, *self.options.values()))


class Problem(NamedTuple):
    """What a call of an op is about.

    Attributes:
        op: its name.
        arguments: that a gradient may be asked of, tensors in nested tuples; the first tensor's device is the op's.
        dtype: the compute type.
        sizes: by letter, as `Shapes` learns them.
        detail: what else changes the work: the number of layers, the kind of attention.
        is_light: whether the reference is known to be faster, and keeps little where memory is short.
    """

    op: str
    arguments: tuple[Any, ...]
    dtype: torch.dtype
    sizes: Mapping[str, int]
    detail: str = ""
    is_light: bool = False

    @property
    def device(self) -> torch.device:
        """Where the op runs."""
        return tensors_of(self.arguments)[0].device

    @property
    def device_type(self) -> str:
        """See `device_of`."""
        return device_of(tensors_of(self.arguments)[0])

    @property
    def keeps_gradients(self) -> bool:
        """Whether autograd will keep something for a backward pass."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of(self.arguments))

    @property
    def key(self) -> str:
        """Tells problems apart whose best candidates may differ."""
        letters = [f"{name}={int(size)}" for name, size in self.sizes.items() if "+" not in name]
        kind = "backward" if self.keeps_gradients else "forward"
        dtype = str(self.dtype).removeprefix("torch.")
        return " ".join((self.op, *letters, *([self.detail] if self.detail else []), dtype, kind))


class _Mode(threading.local):
    """Of this thread: whether measurements are left aside, whose rules hold, and whether the step is captured."""

    rules_only: bool = False
    device: str | None = None
    captured: bool = False


MODE = _Mode()


@contextmanager
def rules_only(device: str | None = None) -> Iterator[None]:
    """Within it, "auto" follows the rule whatever was measured: the same on every machine.

    Args:
        device: the type of device whose rule to follow, for those who tell what would happen there; None: that of the
            tensors.
    """
    before = MODE.rules_only, MODE.device
    MODE.rules_only, MODE.device = True, device
    try:
        yield
    finally:
        MODE.rules_only, MODE.device = before


@contextmanager
def captured(whether: bool = True) -> Iterator[None]:
    """Within it, steps run in a CUDA graph, where launching costs next to nothing, or are warmed up for one."""
    before = MODE.captured
    MODE.captured = whether
    try:
        yield
    finally:
        MODE.captured = before


def device_of(tensor: torch.Tensor) -> str:
    """The type of the device on which a tensor is, or of the one whose rules are followed; without values, the CPU."""
    kind = MODE.device or tensor.device.type
    return "cpu" if kind == "meta" else kind


def rule(
    op: str,
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    gradients: bool = True,
    among: Mapping[str, Implementation] | None = None,
    sizes: Mapping[str, int] | None = None,
    detail: str = "",
) -> str:
    """The name of the implementation that "auto" means where nothing is measured.

    Kernels go first. Elsewhere an op recomputes where a backward pass follows; but on a GPU its many small kernels take
    longer to launch than to run, so there an op that loops over steps does it only in a captured step.

    Args:
        op: its name.
        device: the type of the device, "cpu" or "cuda".
        dtype: the compute type.
        gradients: whether a backward pass will follow.
        among: the implementations by name; None: all that the op has.
        sizes, detail: of the problem; None: any.
    """
    found = implementations_of(op) if among is None else among
    served = [each for each in found.values() if can_run(each.traits, device, dtype)]
    for each in served:
        if each.traits.has_kernels and (sizes is None or each.traits.serves(sizes, detail)):
            return each.name
    first = next(iter(found.values()))
    for each in served if gradients or first.traits.is_last else ():
        launch_bound = device == "cuda" and each.traits.loops and not MODE.captured
        if (
            each.traits.recomputes
            and not each.traits.warms_up
            and not each.traits.has_kernels
            and not launch_bound
        ):
            return each.name
    return first.name


def leanest(op: str, device: str, dtype: torch.dtype = torch.float32) -> str:
    """The name of the implementation that keeps least for the backward pass without having to warm up."""
    with captured():
        return rule(op, device, dtype)


def can_run(traits: Traits, device: str, dtype: torch.dtype) -> bool:
    """Whether an implementation may be chosen for a type of device: of this machine, or of one that is stood in for."""
    if not traits.runs_on(device, dtype) or (MODE.captured and not traits.capturable):
        return False
    # What stands for another device only has to be followed.
    return traits.is_installed if MODE.device is not None else traits.is_available()


def ruled(
    problem: Problem,
    available: Mapping[str, Implementation],
    implementation: str,
    stash: str,
    options: Sequence[Mapping[str, str]],
) -> Candidate:
    """What runs where nothing is measured; arguments as those of `econmt_ops.dispatch.select.run`."""
    name = implementation
    if name == "auto":
        # What follows rules alone, a model's run or its estimate, has one implementation for all of its shapes.
        light = problem.is_light and stash == "auto" and not MODE.rules_only
        name = (
            next(iter(available))
            if light
            else rule(
                problem.op,
                problem.device_type,
                problem.dtype,
                gradients=problem.keeps_gradients,
                among=available,
                sizes=problem.sizes,
                detail=problem.detail,
            )
        )
    return with_stash(
        available[name], implementation, stash, options[0] if options else {}, problem.keeps_gradients
    )


def with_stash(
    chosen: Implementation, asked: str, stash: str, others: Mapping[str, str], gradients: bool
) -> Candidate:
    """The candidate of an implementation, with the level that it keeps.

    Args:
        chosen: the implementation.
        asked: that the call asked for: what is named keeps by itself what it keeps, "auto" what is fastest.
        stash: the level that the call asked for.
        others: options beside the level.
        gradients: whether a backward pass will follow; if not, nothing is kept.
    """
    level = stash
    if asked == stash == "auto" and gradients:
        # As with what is light: rules alone are followed by a model's run or its estimate.
        level = chosen.traits.model_stash if MODE.rules_only else "gates"
    if not chosen.traits.takes_stash or level == "auto":
        return Candidate(chosen, {**others})
    return Candidate(chosen, {**others, "stash": level})
