"""Updates during the backward pass, which free each gradient as soon as its parameter is updated.

After Lv et al. (2023, "Full parameter fine-tuning for large language models with limited resources", LOMO), with any
optimizer of this package. Autograd adds up the gradients of all uses of a parameter before it sets ``.grad``, so that a
parameter with several uses, such as a tied embedding, is updated once, from their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor

from econmt_ops.optimizers.fused import FusedOptimizer

GROUP_BYTES = 4 << 20
"""Bytes of gradients that are collected before an update, so that small parameters share its launches."""


class BackwardUpdates:
    """Updates of an optimizer's parameters during one backward pass, with the results of `clip_and_step` after it.

    Parameters, state and norm are equal to those of `FusedOptimizer.clip_and_step` to the bit. That excludes clipping
    by norm and loss scaling, which need all gradients before the first update.

    Args:
        optimizer: Optimizer without a loss scale; on a GPU, `FusedOptimizer.prepare` was called.
        kind: "value" to clip each value of the gradients, or "none".
        threshold: Largest absolute value.

    Attributes:
        started: True if a backward pass has updated parameters and `finish` was not called since.
        watch: Called with each parameter whose gradient is complete, before the update; or None.

    Raises:
        ValueError: If gradients are clipped by norm; in `running` also if the optimizer has a loss scale.
    """

    def __init__(self, optimizer: FusedOptimizer, kind: str, threshold: float) -> None:
        if kind not in ("value", "none"):
            raise ValueError(
                f"BackwardUpdates: kind must be value or none, got {kind!r}; the norm is known after the last gradient"
            )
        self._optimizer, self._kind, self._threshold = optimizer, kind, threshold
        self._pending: list[Tensor] = []
        self._parts: dict[Tensor, Tensor] = {}
        self.started = False
        self.watch: Callable[[Tensor], object] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Updates parameters in the one backward pass that runs within the context; call `finish` after it.

        A second gradient of a parameter before `finish` raises RuntimeError in the backward pass.
        """
        if self._optimizer.loss_scale is not None:
            raise ValueError("BackwardUpdates: a loss scale needs all gradients before the first update")
        self.started = False
        with self._called(self._arrived):
            try:
                yield
            except BaseException:
                self._pending.clear()
                self._parts.clear()
                raise

    def discarding(self) -> AbstractContextManager[None]:
        """Context in which a backward pass drops each gradient and updates nothing, with the memory of `running`."""
        return self._called(_drop)

    @contextmanager
    def _called(self, function: Callable[[Tensor], object]) -> Iterator[None]:
        """Calls a function with each parameter whose gradient is complete within the context."""
        with ExitStack() as hooks:
            for parameter in self._optimizer.param_groups[0]["params"]:
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook(function)
                    hooks.callback(hook.remove)
            yield

    def finish(self) -> Tensor:
        """Updates the parameters that are left; returns the norm of all gradients before clipping, a scalar."""
        self._flush()
        self.started = False
        parameters = self._optimizer.param_groups[0]["params"]
        parts = [self._parts.pop(parameter) for parameter in parameters if parameter in self._parts]
        return self._optimizer.norm_of_parts(parts)

    def _arrived(self, parameter: Tensor) -> None:
        """Collects a parameter whose gradient is complete, and updates those collected if they are large."""
        if parameter in self._parts or any(each is parameter for each in self._pending):
            raise RuntimeError(
                f"BackwardUpdates: a parameter of shape {tuple(parameter.shape)} got a second gradient before "
                "finish(); run one backward pass within running()"
            )
        if self.watch is not None:
            self.watch(parameter)
        self._pending.append(parameter)
        if sum(each.nbytes for each in self._pending) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        self.started = True
        parts = self._optimizer.clip_and_step_parts(self._kind, self._threshold, self._pending)
        self._parts.update(zip(self._pending, parts, strict=True))
        for parameter in self._pending:
            parameter.grad = None
        self._pending.clear()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
