"""Rule that selects the implementation for "auto" where no measurements exist."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from econmt_ops.core.weights import tensors_of
from econmt_ops.dispatch.traits import Traits, implementations_of


class Problem(NamedTuple):
    """Description of one call of an op, by which its candidates are compared.

    Attributes:
        op: Name of the op.
        arguments: Differentiable arguments, tensors in nested tuples; the first is a tensor or begins with one.
        dtype: Compute type.
        sizes: Sizes by letter, as recorded by `Shapes`.
        detail: Further facts that change the work, such as the number of layers.
        is_light: True if the reference is known to be faster for a call this small.
    """

    op: str
    arguments: tuple[Any, ...]
    dtype: torch.dtype
    sizes: Mapping[str, int]
    detail: str = ""
    is_light: bool = False

    @property
    def like(self) -> torch.Tensor:
        """First tensor: its device is that of the op, and it is a fake one if any is."""
        return tensors_of(self.arguments[0])[0]

    @property
    def device(self) -> torch.device:
        """Device on which the op runs."""
        return self.like.device

    @property
    def keeps_gradients(self) -> bool:
        """True if autograd will keep tensors for a backward pass."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of(self.arguments))

    @property
    def key(self) -> str:
        """Key under which measurements are stored: problems with equal keys have the same best candidate."""
        letters = [f"{name}={int(size)}" for name, size in self.sizes.items() if "+" not in name]
        kind = "backward" if self.keeps_gradients else "forward"
        dtype = str(self.dtype).removeprefix("torch.")
        return " ".join((self.op, *letters, *([self.detail] if self.detail else []), dtype, kind))


class _Mode(threading.local):
    """State of this thread: ignore measurements, device type of the rules, in a captured step, only compile kernels."""

    rules_only: bool = False
    device: str | None = None
    captured: bool = False
    compiles_only: bool = False


MODE = _Mode()


@contextmanager
def _in_mode(**changes: Any) -> Iterator[None]:
    before = {name: getattr(MODE, name) for name in changes}
    MODE.__dict__.update(changes)
    try:
        yield
    finally:
        MODE.__dict__.update(before)


def rules_only(device: str | None = None) -> AbstractContextManager[None]:
    """Makes "auto" follow the rule and ignore measurements within the context, as on every machine.

    Args:
        device: Device type whose rule to follow, for estimates for another device; None: that of the tensors.
    """
    return _in_mode(rules_only=True, device=device)


def captured(whether: bool = True) -> AbstractContextManager[None]:
    """Marks the context as part of a CUDA graph, or its warm-up, where launching kernels costs almost nothing."""
    return _in_mode(captured=whether)


def is_forward_mode() -> bool:
    """Returns True inside forward-mode differentiation."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Returns True inside a transform of torch.func or forward-mode differentiation, which only references support."""
    return is_forward_mode() or torch._C._functorch.peek_interpreter_stack() is not None


def needs_single_steps() -> bool:
    """Returns True inside torch.vmap and forward-mode differentiation, which torch.lstm and torch.gru lack."""
    functorch = torch._C._functorch
    kinds = [transform.key() for transform in functorch.get_interpreter_stack() or ()]
    return is_forward_mode() or functorch.TransformType.Vmap in kinds


# torch.compile cannot trace the questions; it asks while it compiles, inside the same transforms.
for _question in (is_forward_mode, is_transformed, needs_single_steps):
    _question._dynamo_marked_constant = True  # type: ignore[attr-defined]


def device_of(tensor: torch.Tensor) -> str:
    """Returns a tensor's device type, or the type whose rules are followed; "cpu" for meta tensors."""
    kind = MODE.device or tensor.device.type
    return "cpu" if kind == "meta" else kind


def rule(op: str, device: str, dtype: torch.dtype = torch.float32, *, gradients: bool = True) -> str:
    """Returns the name of the implementation that "auto" selects where no measurements exist.

    Kernels come first. Otherwise an op recomputes if a backward pass follows (``gradients``). On a GPU the many small
    kernels of an op that loops over steps take longer to launch than to run, so there such an op recomputes only in a
    captured step.
    """
    available = implementations_of(op)
    served = [each for each in available.values() if can_run(each.traits, device, dtype)]
    for each in served:
        if each.traits.has_kernels:
            return each.name
    first = next(iter(available.values()))
    for each in served if gradients or first.traits.is_last else ():
        launch_bound = device == "cuda" and each.traits.loops and not MODE.captured
        if each.traits.recomputes and not each.traits.warms_up and not launch_bound:
            return each.name
    return first.name


def leanest(op: str, device: str) -> str:
    """Returns the name of the implementation that keeps least for the backward pass and needs no warm-up."""
    with captured():
        return rule(op, device)


def can_run(traits: Traits, device: str, dtype: torch.dtype) -> bool:
    """Returns True if an implementation may be selected for a device type: this machine's, or that of an estimate."""
    return traits.runs_on(device, dtype) and traits.is_available()
