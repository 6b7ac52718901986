"""An LSTM layer over chunks of time: its weights are prepared once, and their gradients made once, for all chunks.

With dz_t the gradient of z_t = W x_t + U h_{t-1} + b, those of the weights are sums over all steps of all chunks:

    dW = sum_t dz_t x_t^T      dU = sum_t dz_t h_{t-1}^T      db = sum_t dz_t

The backward pass of a chunk leaves its dz_t, by the probe of :func:`econmt_ops.lstm`; x_t and h_t are there anyway.
After the last chunk each sum is one product. Made chunk by chunk, each would read and write a whole gradient anew.

B batch, C steps of a chunk, T of all, I input size, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.core.chunks import add_outer
from econmt_ops.core.gemm import Layouts, add_rows
from econmt_ops.core.lengths import reverse_rows
from econmt_ops.core.precision import compute_dtype
from econmt_ops.core.weights import AnyLSTMWeights, LowRankLSTMWeights, LSTMWeights, cast_weights
from econmt_ops.dispatch.rule import MODE, device_of
from econmt_ops.lstm import lstm
from econmt_ops.lstm.reference import is_light


def leaves_gradients(implementation: str) -> bool:
    """Whether a layer by an implementation of `econmt_ops.lstm` tells dz_t: torch's own LSTM does not."""
    return implementation != "reference"


class _TimeChunk(NamedTuple):
    """What the gradients of the weights need of a chunk; time comes first.

    Attributes:
        probe: (C, B, 4H), whose gradient is that of the gates.
        inputs: (C, B, I). first_h: (B, H), before the chunk. outputs: (C, B, H).
    """

    gate_gradient: Tensor
    inputs: Tensor
    first_h: Tensor
    outputs: Tensor


class ChunkedLSTM:
    """One layer, called with one chunk after the other; then the chunks' backward passes, then :meth:`backward`.

    torch's own LSTM, the reference in float32 and float64, does not tell dz_t, nor do factorised layers: what runs by
    these adds to the gradients chunk by chunk.

    Args:
        weights: of the layer; none of them changes before :meth:`backward`. Those that were made of others, as by
            dropout, hand their gradient on to them once.
    """

    def __init__(self, weights: AnyLSTMWeights) -> None:
        self._weights = weights
        self._own = weights
        if isinstance(weights, LSTMWeights):
            self._own = LSTMWeights(
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
        """Outputs (B, C, H) of a chunk and the state (h, c) after it.

        Args:
            inputs: (B, C, I), finite in the padding, too.
            state: (h, c), each (B, H), after the chunk before; zeros if None.
            lengths, reverse, stash, implementation: see :func:`econmt_ops.lstm`.
        """
        own = self._own
        if not self._waits(inputs, stash, implementation):
            outputs, (last,) = lstm(
                inputs,
                (own,),
                state=None if state is None else (state,),
                lengths=lengths,
                reverse=reverse,
                stash=stash,
                implementation=implementation,
            )
            return outputs, last
        dtype = compute_dtype(inputs)
        read = inputs.to(dtype)
        if reverse:
            read = reverse_rows(read, lengths)
        weights, zero = self._prepared(dtype, read)
        gate_gradient = zero.expand(read.shape[1], read.shape[0], len(own.bias)).requires_grad_()
        outputs, (last,) = lstm(
            read,
            (weights,),
            state=None if state is None else (state,),
            lengths=lengths,
            gate_gradient=gate_gradient,
            stash=stash,
            implementation=implementation,
        )
        hidden = own.hidden.shape[1]
        first_h = zero.expand(len(read), hidden) if state is None else state[0].detach().to(dtype)
        kept = read.detach().transpose(0, 1), first_h, outputs.detach().transpose(0, 1)
        self._chunks.append(_TimeChunk(gate_gradient, *kept))
        return reverse_rows(outputs, lengths) if reverse else outputs, last

    def _waits(self, inputs: Tensor, stash: str, implementation: str) -> bool:
        """Whether the gradients of the weights are left to the end."""
        if isinstance(self._own, LowRankLSTMWeights) or not torch.is_grad_enabled():
            return False
        if implementation != "auto":
            return leaves_gradients(implementation)
        if stash != "auto" or MODE.rules_only:
            return True
        rows, steps = inputs.shape[:2]
        return not is_light(rows, steps, self._own.hidden.shape[1], compute_dtype(inputs), inputs.device)

    def _prepared(self, dtype: torch.dtype, like: Tensor) -> tuple[AnyLSTMWeights, Tensor]:
        """The weights in the type of the products, without gradients; and a zero."""
        if dtype not in self._cast:
            assert isinstance(self._own, LSTMWeights)
            detached = LSTMWeights(*(part.detach() for part in self._own))
            made = cast_weights(detached, dtype)
            assert isinstance(made, LSTMWeights)
            self._cast[dtype] = made, like.new_zeros(())
            self._layouts = Layouts([made.input, made.hidden])
        return self._cast[dtype]

    def forget(self) -> None:
        """Forgets the chunks, whose gradients of the weights nobody wants."""
        self._chunks.clear()

    @torch.no_grad()
    def backward(self) -> None:
        """Adds the gradients of the weights over all chunks to those that they have; the chunks are forgotten."""
        chunks = [chunk for chunk in self._chunks if chunk.gate_gradient.grad is not None]
        self._chunks.clear()
        self._cast.clear()
        self._layouts = None
        if chunks:
            self._gather(chunks)
        if not isinstance(self._own, LSTMWeights) or not isinstance(self._weights, LSTMWeights):
            return
        for weight, own in zip(self._weights, self._own, strict=True):
            if own is not weight and own.grad is not None:
                torch.autograd.backward(weight, own.grad)

    def _gather(self, chunks: Sequence[_TimeChunk]) -> None:
        """Makes the three sums."""
        own = self._own
        assert isinstance(own, LSTMWeights)
        dgates = _joined(
            [chunk.gate_gradient.grad for chunk in chunks if chunk.gate_gradient.grad is not None]
        )
        for chunk in chunks:
            chunk.gate_gradient.grad = None
        _add(own.input, dgates, _joined([chunk.inputs for chunk in chunks]))
        before = [part for chunk in chunks for part in (chunk.first_h.unsqueeze(0), chunk.outputs[:-1])]
        _add(own.hidden, dgates, torch.cat(before))
        if device_of(dgates) == "cuda":  # a product whose sum is not rounded to the type of the gates
            _add(own.bias, dgates.new_ones(*dgates.shape[:2], 1), dgates)
        else:
            rows = add_rows(dgates).to(own.bias.dtype)
            own.bias.grad = rows if own.bias.grad is None else own.bias.grad.add_(rows)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _add(weight: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left^T right to a weight's gradient; on a GPU it is not rounded on the way where that is wider."""
    fresh = weight.grad is None
    if weight.grad is None:
        weight.grad = torch.empty_like(weight)
    add_outer(weight.grad.view(left.shape[2], -1), left, right, fresh)
