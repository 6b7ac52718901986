"""Cross entropies of a chunk of logits, and their gradient in the logits' place.

With p = softmax(l), targets y and smoothing s (Szegedy et al. 2016): loss = (1 - s)(lse - l_y) + s (lse - mean l) and
dl = p - (1 - s) 1_y - s / V. C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, softmax

from econmt_ops.backends import c as library
from econmt_ops.backends.compiled import compile_step, is_available
from econmt_ops.core.precision import accumulate_dtype

_CACHED_BYTES = 8 << 20
"""Rows of this many bytes go through all pointwise passes one after the other, while a CPU's cache holds them. The same
on a GPU, where it costs some launches and saves workspace."""


class LossKernel(Protocol):
    """What is between the two products of a chunk."""

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        smoothing: float,
        factors: Tensor | None,
        gradient: bool,
        dbias: Tensor | None,
    ) -> Tensor:
        """The losses (C,), in the accumulate type.

        Args:
            logits: (C, V) in the compute type, which with ``gradient`` become their gradient.
            targets: (C,) int64.
            smoothing: of the labels.
            factors: (C,), of each row's gradient; or None: all are 1.
            gradient: whether it is wanted.
            dbias: (V,) in the accumulate type: the sum of the rows' gradients is added; or None.
        """


def losses(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Cross entropies (C,) of logits (C, V), which become their softmaxes.

    The softmax of the largest logit is exp(max l - lse) and at least 1 / V, so its logarithm gives lse: exponentials
    are taken once, by the one kernel that goes row by row while the cache holds the row.
    """
    top = logits.amax(1)
    wanted = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    mean = logits.mean(1) if smoothing else None
    softmax(logits, 1, out=logits)
    loss = top - logits.amax(1).log() - (1.0 - smoothing) * wanted
    return loss if mean is None else loss - smoothing * mean


def logit_gradient(softmaxes: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The gradient of :func:`losses` in the logits, in the place of what it left (C, V)."""
    if smoothing:
        softmaxes -= smoothing / softmaxes.shape[1]
    row = targets.unsqueeze(1)
    return softmaxes.scatter_add_(1, row, softmaxes.new_full(row.shape, smoothing - 1.0))


class EagerLosses:
    """`LossKernel` by PyTorch's operators, some rows at a time."""

    def __init__(self, compiled: bool) -> None:
        """``compiled``: whether torch.compile fuses them."""
        self._losses = compile_step(losses, dynamic=True) if compiled else losses
        self._gradient = compile_step(logit_gradient, dynamic=True) if compiled else logit_gradient

    def __call__(
        self,
        logits: Tensor,
        targets: Tensor,
        smoothing: float,
        factors: Tensor | None,
        gradient: bool,
        dbias: Tensor | None,
    ) -> Tensor:
        """See `LossKernel`."""
        accumulate = accumulate_dtype(logits.dtype)
        found = logits.new_empty(len(logits), dtype=accumulate)
        size = max(1, _CACHED_BYTES // (logits.shape[1] * accumulate.itemsize))
        for begin in range(0, len(logits), size):
            part = slice(begin, begin + size)
            values = logits[part].to(accumulate)
            found[part] = self._losses(values, targets[part], smoothing)
            if not gradient:
                continue
            made = self._gradient(values, targets[part], smoothing)
            if factors is not None:
                made *= factors[part].unsqueeze(1)
            if dbias is not None:
                # A product: on a GPU, a sum over the rows takes a workspace twice as large as the gradient.
                dbias.addmv_(made.t(), made.new_ones(len(made)))
            logits[part] = made
        return found


def losses_for(like: Tensor, backend: str = "eager") -> LossKernel:
    """The kernel of one call.

    Args:
        like: a tensor of the call's compute type, on its device.
        backend: "eager", for which the C library works where it can, or "compiled".
    """
    compiled = backend == "compiled" and is_available()
    return library.losses if library.serves(like) and not compiled else EagerLosses(compiled)
