"""LSTM layer over chunks of time, with weights prepared once and their gradients computed once for all chunks.

With dz_t the gradient of z_t = W x_t + U h_{t-1} + b, the gradients of the weights are sums over all steps of all
chunks:

    dW = sum_t dz_t x_t^T      dU = sum_t dz_t h_{t-1}^T      db = sum_t dz_t

The backward pass of a chunk keeps its dz_t, through the gate-gradient argument of :func:`econmt_ops.lstm`; x_t and h_t
are kept anyway. After the last chunk each sum is one product. Computed per chunk, each would read and write the whole
gradient every time.

Sizes: B batch, C steps of a chunk, T steps of all chunks, I input size, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt_ops.core.precision import compute_dtype
from econmt_ops.core.weights import AnyLSTMWeights, LSTMWeights, cast_weights
from econmt_ops.dispatch.rule import device_of
from econmt_ops.lstm import lstm
from econmt_ops.products.gemm import Layouts, add_rows
from econmt_ops.products.outer import add_outer
from econmt_ops.products.reversal import reverse_rows


class _TimeChunk(NamedTuple):
    """Tensors (C, B, .) of a chunk that the gradients of the weights need, and h (B, H) before it."""

    gate_gradient: Tensor
    inputs: Tensor
    first_h: Tensor
    outputs: Tensor


class ChunkedLSTM:
    """One layer, called for one chunk after the other; then come the chunks' backward passes, then :meth:`backward`.

    The reference, whose torch.lstm does not expose dz_t, and factorised layers add to the gradients chunk by chunk.

    Args:
        weights: weights of the layer, unchanged until :meth:`backward`. If they are not leaves, for example after
            weight dropout, their gradient is propagated once.
    """

    def __init__(self, weights: AnyLSTMWeights) -> None:
        self._weights = weights
        self._leaves = weights
        if isinstance(weights, LSTMWeights):
            self._leaves = LSTMWeights(
                *(part if part.is_leaf else part.detach().requires_grad_() for part in weights)
            )
        self._cast: dict[torch.dtype, tuple[AnyLSTMWeights, Tensor]] = {}
        self._layouts: Layouts | None = None
        self._chunks: list[_TimeChunk] = []

    def __call__(
        self,
        inputs: Tensor,
        state: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | None = None,
        reverse: bool = False,
        stash: str = "auto",
        implementation: str = "auto",
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Runs a chunk; returns outputs (B, C, H) and the state (h, c) after it.

        Args:
            inputs: (B, C, I), finite at padded positions too.
            state: (h, c), each (B, H), after the previous chunk; zeros if None.
            lengths, reverse, stash, implementation: see :func:`econmt_ops.lstm`.
        """
        leaves = self._leaves
        how: dict[str, Any] = {"lengths": lengths, "stash": stash, "implementation": implementation}
        how["state"] = None if state is None else (state,)
        defers = isinstance(leaves, LSTMWeights) and torch.is_grad_enabled() and implementation != "reference"
        if not defers:
            outputs, (last,) = lstm(inputs, (leaves,), reverse=reverse, **how)
            return outputs, last
        dtype = compute_dtype(inputs)
        read = inputs.to(dtype)
        if reverse:
            read = reverse_rows(read, lengths)
        weights, zero = self._prepared(dtype, read)
        gate_gradient = zero.expand(read.shape[1], read.shape[0], len(leaves.bias)).requires_grad_()
        outputs, (last,) = lstm(read, (weights,), gate_gradient=gate_gradient, **how)
        hidden = leaves.hidden.shape[1]
        first_h = zero.expand(len(read), hidden) if state is None else state[0].detach().to(dtype)
        saved = read.detach().transpose(0, 1), first_h, outputs.detach().transpose(0, 1)
        self._chunks.append(_TimeChunk(gate_gradient, *saved))
        return reverse_rows(outputs, lengths) if reverse else outputs, last

    def _prepared(self, dtype: torch.dtype, like: Tensor) -> tuple[AnyLSTMWeights, Tensor]:
        """Returns the weights in the type of the products, without gradients, and a scalar zero."""
        if dtype not in self._cast:
            assert isinstance(self._leaves, LSTMWeights)
            cast = cast_weights(LSTMWeights(*(part.detach() for part in self._leaves)), dtype)
            self._cast[dtype] = cast, like.new_zeros(())
            self._layouts = Layouts([cast.input, cast.hidden])
        return self._cast[dtype]

    def forget(self) -> None:
        """Discards the chunks without adding their gradients to the weights."""
        self._chunks.clear()

    @torch.no_grad()
    def backward(self) -> None:
        """Adds the gradients over all chunks to the weights' gradients and discards the chunks."""
        chunks = [chunk for chunk in self._chunks if chunk.gate_gradient.grad is not None]
        self._chunks.clear()
        self._cast.clear()
        self._layouts = None
        if chunks:
            self._gather(chunks)
        pairs: Any = zip(self._weights, self._leaves, strict=True)
        for weight, leaf in pairs:
            if leaf is not weight and leaf.grad is not None:
                torch.autograd.backward(weight, leaf.grad)

    def _gather(self, chunks: Sequence[_TimeChunk]) -> None:
        """Computes the three sums over all chunks."""
        leaves = self._leaves
        assert isinstance(leaves, LSTMWeights)
        gradients = [chunk.gate_gradient.grad for chunk in chunks]
        dgates = _joined([part for part in gradients if part is not None])
        for chunk in chunks:
            chunk.gate_gradient.grad = None
        _add(leaves.input, dgates, _joined([chunk.inputs for chunk in chunks]))
        before = [part for chunk in chunks for part in (chunk.first_h.unsqueeze(0), chunk.outputs[:-1])]
        _add(leaves.hidden, dgates, torch.cat(before))
        if device_of(dgates) == "cuda":  # this product accumulates in a wider type than the gates
            _add(leaves.bias, dgates.new_ones(*dgates.shape[:2], 1), dgates)
        else:
            rows = add_rows(dgates).to(leaves.bias.dtype)
            leaves.bias.grad = rows if leaves.bias.grad is None else leaves.bias.grad.add_(rows)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _add(weight: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left^T right to a weight's gradient; on a GPU without rounding to a narrower type in between."""
    fresh = weight.grad is None
    if weight.grad is None:
        weight.grad = torch.empty_like(weight)
    add_outer(weight.grad.view(left.shape[2], -1), left, right, fresh)
