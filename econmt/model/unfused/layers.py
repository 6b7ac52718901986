"""LSTM layers that compute one time step at a time, with dropout within steps, zoneout and LHUC.

Shapes: B batch, T positions, I input size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from econmt.config import recipe
from econmt.model.cell_steps import LayerProduct, layer_step
from econmt.model.layers import LSTMLayer, RecurrentLayer, draw_seed
from econmt_ops.core.dropout import Seed, apply_dropout, keep_mask
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.precision import accumulate_dtype

LSTMState = tuple[Tensor, Tensor]
"""h and c, (B, H) each."""


class StepDropout(NamedTuple):
    """Dropout and zoneout probabilities within the steps of a layer, as in a recipe's ``model.dropout``."""

    states: float
    recurrent: float
    zoneout_hidden: float
    zoneout_cell: float

    @classmethod
    def of(cls, dropout: recipe.Dropout) -> StepDropout:
        """Returns the dropout probabilities of a recipe."""
        return cls(*(getattr(dropout, name) for name in cls._fields))

    def draw(self) -> tuple[Seed | None, ...]:
        """Draws the seeds of a forward pass over a layer; None where nothing is dropped."""
        return tuple(draw_seed() if probability > 0.0 else None for probability in self)

    def masks(
        self, seeds: tuple[Seed | None, ...], rows: int, steps: int, size: int, device: torch.device
    ) -> Masks:
        """Draws a layer's masks, True where a value is kept: (B, 1, H) for states, else (B, T, H)."""
        lengths = (1, steps, steps, steps)
        return Masks(
            *(
                None if seed is None else keep_mask((rows, length, size), probability, seed, device)
                for probability, seed, length in zip(self, seeds, lengths, strict=True)
            )
        )


class Masks(NamedTuple):
    """Masks of the steps of a layer from :meth:`StepDropout.masks`; None where nothing is dropped."""

    states: Tensor | None = None
    recurrent: Tensor | None = None
    zoneout_hidden: Tensor | None = None
    zoneout_cell: Tensor | None = None

    def at(self, step: int) -> Masks:
        """Returns the masks of one step, (B, H)."""
        return Masks(*(None if mask is None else mask[:, step if mask.shape[1] > 1 else 0] for mask in self))


def lstm_step(
    shares: Tensor,
    hidden: Tensor,
    state: LSTMState,
    dropout: StepDropout,
    masks: Masks | None,
    lhuc: Tensor | None = None,
) -> LSTMState:
    """Computes one step of an LSTM layer, gates in the order i, f, g, o.

    Args:
        shares: share of the inputs in the pre-activations, including the bias, (B, 4H). hidden: (4H, H).
        state: state before the step.
        dropout: probabilities. masks: masks of this step; None: evaluation, where zoneout gives expected states.
        lhuc: logits of unit scales, which are twice their sigmoid, (H,); None: no scaling.

    Returns:
        h, in the type of products, and c after the step.
    """
    before, c_before = state
    read = before if masks is None else apply_dropout(before, masks.states, dropout.states)
    gates = (shares + functional.linear(read, hidden)).to(accumulate_dtype(shares.dtype))
    i, f, g, o = gates.chunk(4, dim=1)
    g = torch.tanh(g)
    if masks is not None:
        g = apply_dropout(g, masks.recurrent, dropout.recurrent)
    c = torch.sigmoid(f) * c_before + torch.sigmoid(i) * g
    h = torch.sigmoid(o) * torch.tanh(c)
    if lhuc is not None:
        h = h * (2.0 * torch.sigmoid(lhuc)).to(h.dtype)
    keep_h, keep_c = (None, None) if masks is None else (masks.zoneout_hidden, masks.zoneout_cell)
    h = _zoned_out(h, before.to(h.dtype), dropout.zoneout_hidden, keep_h)
    c = _zoned_out(c, c_before, dropout.zoneout_cell, keep_c)
    return h.to(shares.dtype), c


def _zoned_out(after: Tensor, before: Tensor, probability: float, keep: Tensor | None) -> Tensor:
    """Applies zoneout: keeps old values by a mask, or without one interpolates with the probability."""
    if probability == 0.0:
        return after
    if keep is not None:
        return torch.where(keep, after, before)
    return torch.lerp(after, before, probability)


Step = Callable[..., tuple[Tensor, ...]]
"""Function from tensors to tensors that computes a step."""


class _Recomputed(torch.autograd.Function):
    """Step of which autograd keeps only the inputs, and which the backward pass computes again.

    Used instead of ``torch.utils.checkpoint``, whose first call loads torch's compiler: seconds, and 70 MB.
    """

    @staticmethod
    def forward(
        ctx: Any, step: Step, parameters: tuple[Tensor, ...], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = tensors[:count]
        ctx.save_for_backward(*inputs)
        ctx.step, ctx.parameters = step, parameters
        kind = inputs[0].device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return step(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        kind, dtype, enabled = ctx.autocast
        inputs = [
            part.detach().requires_grad_(needs)
            for part, needs in zip(ctx.saved_tensors, needed, strict=False)
        ]
        with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
            outputs = ctx.step(*inputs)
        pairs = [
            (part, gradient)
            for part, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and part.requires_grad
        ]
        sources = [part for part, needs in zip((*inputs, *ctx.parameters), needed, strict=True) if needs]
        results = iter(
            torch.autograd.grad(
                [part for part, _ in pairs], sources, [gradient for _, gradient in pairs], allow_unused=True
            )
        )
        return (None, None, None, *(next(results) if needs else None for needs in needed))


def run_step(
    step: Step, recompute: bool, parameters: Iterable[Tensor], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Calls a step with ``tensors``; if ``recompute``, autograd keeps only these and computes it again.

    The step is differentiable in them and in the parameters that it reads, and draws no random numbers.
    """
    if not (recompute and torch.is_grad_enabled()):
        return step(*tensors)
    read = tuple(parameters)
    outputs: tuple[Tensor, ...] = _Recomputed.apply(step, read, len(tensors), *tensors, *read)  # type: ignore[no-untyped-call]
    return outputs


class UnfusedLayer(LSTMLayer):
    """LSTM layer that computes one time step at a time; ``lhuc`` scales units by learnt factors, which start at 1."""

    def __init__(self, input_size: int, hidden_size: int, dropout: StepDropout, *, lhuc: bool) -> None:
        super().__init__(input_size, hidden_size)
        self.step_dropout = dropout
        self.lhuc = nn.Parameter(torch.zeros(hidden_size)) if lhuc else None

    def draw_masks(self, rows: int, steps: int, device: torch.device) -> Masks | None:
        """Draws the masks of all steps of a batch; None in evaluation mode."""
        if not self.training:
            return None
        size = self.bias.shape[0] // 4
        return self.step_dropout.masks(self.step_dropout.draw(), rows, steps, size, device)

    def advance(
        self, inputs: Tensor, state: tuple[Tensor, ...], masks: Masks | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes h (B, H) and the states after a step from inputs (B, I) and the states before it."""
        after = self.step(self.shares(inputs), cast(LSTMState, state), masks)
        return after[0], after

    def step(self, shares: Tensor, state: LSTMState, masks: Masks | None) -> LSTMState:
        """See :func:`lstm_step`."""
        assert isinstance(self.hidden, nn.Parameter)
        return lstm_step(shares, self.hidden, state, self.step_dropout, masks, self.lhuc)

    def shares(self, inputs: Tensor) -> Tensor:
        """Computes the share of inputs (..., I) in the pre-activations, including the bias."""
        assert isinstance(self.input, nn.Parameter)
        return functional.linear(inputs, self.input, self.bias)

    def forward(
        self, inputs: Tensor, lengths: Tensor, *, reverse: bool, recompute: bool
    ) -> tuple[Tensor, Tensor]:
        """Runs the layer over a batch of sentences.

        Args:
            inputs: (B, T, I). lengths: (B,).
            reverse: True starts at the last position of each row.
            recompute: True keeps only the state before each step for the backward pass.

        Returns:
            Outputs (B, T, H), zero past a row's length, and h after the last step (B, H).
        """
        rows, steps, _ = inputs.shape
        shares = self.shares(inputs)
        masks = self.draw_masks(rows, steps, inputs.device)
        valid = ~padding_mask(lengths, steps, inputs.device)
        h = shares.new_zeros(rows, shares.shape[2] // 4)
        c = h.to(accumulate_dtype(h.dtype))
        outputs: list[Tensor] = [h] * steps
        for position in reversed(range(steps)) if reverse else range(steps):
            step_masks = None if masks is None else masks.at(position)
            inside = valid[:, position, None]

            def step(
                share: Tensor, h: Tensor, c: Tensor, masks: Masks | None = step_masks
            ) -> tuple[Tensor, ...]:
                return self.step(share, (h, c), masks)

            after, cell = run_step(step, recompute, self.parameters(), (shares[:, position], h, c))
            # The state does not change at padded positions.
            h, c = torch.where(inside, after, h), torch.where(inside, cell, c)
            outputs[position] = torch.where(inside, after, 0.0)
        return torch.stack(outputs, dim=1), h


class UnfusedCellLayer(RecurrentLayer):
    """Layer of any other cell that computes one time step at a time, as :class:`UnfusedLayer`, without its dropout."""

    def draw_masks(self, rows: int, steps: int, device: torch.device) -> None:
        """Returns None: such layers have no masks within steps."""

    def advance(
        self,
        inputs: Tensor,
        state: tuple[Tensor, ...],
        masks: Masks | None,  # noqa: ARG002  always None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :meth:`UnfusedLayer.advance`."""
        step = layer_step(self.cell, self.weights, _product)
        return step(step.read(inputs), inputs, state)


def _product(matrix: Tensor, bias: Tensor | None) -> LayerProduct:
    def call(inputs: Tensor, *, start: Tensor | None = None) -> Tensor:
        made = functional.linear(inputs, matrix, bias)
        return made if start is None else start + made

    return call
