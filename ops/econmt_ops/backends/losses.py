"""Cross entropies of a chunk of logits, and their gradient, which overwrites the logits.

With p = softmax(l), targets y and smoothing s (Szegedy et al. 2016): loss = (1 - s)(lse - l_y) + s (lse - mean l) and
dl = p - (1 - s) 1_y - s / V. Sizes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, softmax

from econmt_ops.backends import c as library
from econmt_ops.backends.compiled import compile_step, is_available
from econmt_ops.core.precision import accumulate_dtype

_CACHED_BYTES = 8 << 20
"""Bytes of rows that go through all pointwise passes together, so that they stay in a CPU's cache. On a GPU the same
size costs a few launches and saves workspace."""


LossKernel = Callable[[Tensor, Tensor, float, Tensor | None, bool, Tensor | None], Tensor]
"""Function that does the pointwise work between the two products of a chunk, of logits (C, V).

It returns the losses (C,) of targets (C,) int64 with label smoothing. The fifth argument says whether the logits are
overwritten by their gradient, multiplied by the fourth, a factor for each row, if that is not None; the sum of its rows
is added to the last one, (V,), unless None."""


def losses(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Computes cross entropies (C,) of logits (C, V), and their softmax, which overwrites them unless it is compiled.

    The softmax of the largest logit is exp(max l - lse) and at least 1 / V, so its logarithm gives lse: exponentials
    are computed only once, by the softmax kernel, which works row by row within the cache.
    """
    top = logits.amax(1)
    target_logits = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    mean = logits.mean(1) if smoothing else None
    # Inductor's C++ cannot read what it has written in place: github.com/pytorch/pytorch/issues/196570.
    softmaxes = softmax(logits, 1, out=None if torch.compiler.is_compiling() else logits)
    loss = top - softmaxes.amax(1).log() - (1.0 - smoothing) * target_logits
    return loss if mean is None else loss - smoothing * mean, softmaxes


def logit_gradient(softmaxes: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Computes the gradient of :func:`losses` with respect to the logits, in place of the softmax (C, V)."""
    if smoothing:
        softmaxes -= smoothing / softmaxes.shape[1]
    row = targets.unsqueeze(1)
    return softmaxes.scatter_add_(1, row, softmaxes.new_full(row.shape, smoothing - 1.0))


def eager_losses(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    factors: Tensor | None,
    gradient: bool,
    dbias: Tensor | None,
    *,
    compiled: bool = False,
) -> Tensor:
    """Works as a `LossKernel` in any type, on a few rows at a time; with ``compiled`` by torch.compile."""
    functions: tuple[Callable[..., Any], ...] = losses, logit_gradient
    compute, differentiate = (compile_step(each, dynamic=True) if compiled else each for each in functions)
    accumulate = accumulate_dtype(logits.dtype)
    row_losses = logits.new_empty(len(logits), dtype=accumulate)
    size = max(1, _CACHED_BYTES // (logits.shape[1] * accumulate.itemsize))
    for begin in range(0, len(logits), size):
        part = slice(begin, begin + size)
        values = logits[part].to(accumulate)
        row_losses[part], softmaxes = compute(values, targets[part], smoothing)
        if not gradient:
            continue
        dlogits = differentiate(softmaxes, targets[part], smoothing)
        if factors is not None:
            dlogits *= factors[part].unsqueeze(1)
        if dbias is not None:
            # A product: on a GPU, a sum over the rows needs a workspace twice as large as the gradient.
            dbias.addmv_(dlogits.t(), dlogits.new_ones(len(dlogits)))
        logits[part] = dlogits
    return row_losses


def losses_for(like: Tensor, backend: str = "eager") -> LossKernel:
    """Returns the kernel of one call.

    Args:
        like: a tensor of the call's compute type, on its device.
        backend: "eager", which uses the C library where it can, or "compiled".
    """
    compiled = backend == "compiled" and is_available()
    if library.serves(like) and not compiled:
        return library.losses
    return functools.partial(eager_losses, compiled=compiled)
