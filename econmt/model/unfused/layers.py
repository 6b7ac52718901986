"""LSTM layers a step at a time in plain PyTorch, with what no fused operation has.

Dropout of states and of what a step adds to the cell, zoneout, and LHUC. Shapes: B batch, T positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from econmt.config import recipe
from econmt.model.layers import LSTMLayer, draw_seed
from econmt_ops.core.dropout import Seed, apply_dropout, keep_mask
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.precision import accumulate_dtype

LSTMState = tuple[Tensor, Tensor]
"""h and c, (B, H) each."""


class StepDropout(NamedTuple):
    """Probabilities of what is dropped within the steps of a layer: see the recipe's section."""

    states: float
    recurrent: float
    zoneout_hidden: float
    zoneout_cell: float

    @classmethod
    def of(cls, dropout: recipe.Dropout) -> StepDropout:
        """Returns the dropout probabilities of a recipe."""
        return cls(*(getattr(dropout, name) for name in cls._fields))

    def draw(self) -> tuple[Seed | None, ...]:
        """Seeds for a forward pass over a layer; None where nothing is dropped."""
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
    """See :meth:`StepDropout.masks`; None: nothing is dropped."""

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
    """One step of an LSTM layer, gates in the order i, f, g, o.

    Args:
        shares: (B, 4H) what the layer reads adds to the gates, bias included. hidden: (4H, H).
        state: before the step.
        dropout: probabilities. masks: of this step; None: not in training, zoneout gives expected states.
        lhuc: (H,) of which units are scaled by twice the sigmoid; None: they are not.

    Returns:
        h, in the type of products, and c, after the step.
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
    """Values after a step, of which some stay as before: by a mask, else by the share that is expected to."""
    if probability == 0.0:
        return after
    if keep is not None:
        return torch.where(keep, after, before)
    return torch.lerp(after, before, probability)


Step = Callable[..., tuple[Tensor, ...]]
"""A step of anything: tensors to tensors."""


class _Recomputed(torch.autograd.Function):
    """A step that keeps what it gets for the backward pass, and is computed again there.

    As `torch.utils.checkpoint`, which loads torch's compiler when it is first called: seconds, and 70 MB.
    """

    @staticmethod
    def forward(
        ctx: Any, step: Step, parameters: tuple[Tensor, ...], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        given = tensors[:count]
        ctx.save_for_backward(*given)
        ctx.step, ctx.parameters = step, parameters
        kind = given[0].device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return step(*given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        kind, dtype, enabled = ctx.autocast
        given = [
            part.detach().requires_grad_(needed)
            for part, needed in zip(ctx.saved_tensors, wanted, strict=False)
        ]
        with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
            made = ctx.step(*given)
        pairs = [
            (part, gradient)
            for part, gradient in zip(made, gradients, strict=True)
            if gradient is not None and part.requires_grad
        ]
        sources = [part for part, needed in zip((*given, *ctx.parameters), wanted, strict=True) if needed]
        found = iter(
            torch.autograd.grad(
                [part for part, _ in pairs], sources, [gradient for _, gradient in pairs], allow_unused=True
            )
        )
        return (None, None, None, *(next(found) if needed else None for needed in wanted))


def stepped(
    step: Step, recompute: bool, parameters: Iterable[Tensor], tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Calls a step, which keeps what it gets for the backward pass and nothing else if ``recompute``.

    Args:
        step: differentiable in its tensors and in the parameters; it draws nothing.
        recompute: see above.
        parameters: that it reads.
        tensors: that it is given.
    """
    if not (recompute and torch.is_grad_enabled()):
        return step(*tensors)
    read = tuple(parameters)
    found: tuple[Tensor, ...] = _Recomputed.apply(step, read, len(tensors), *tensors, *read)  # type: ignore[no-untyped-call]
    return found


class UnfusedLayer(LSTMLayer):
    """An LSTM layer that walks step by step.

    Args:
        input_size, hidden_size: widths.
        dropout: within steps.
        lhuc: whether its units are scaled.
    """

    def __init__(self, input_size: int, hidden_size: int, dropout: StepDropout, *, lhuc: bool) -> None:
        super().__init__(input_size, hidden_size)
        self.step_dropout = dropout
        self.lhuc = nn.Parameter(torch.zeros(hidden_size)) if lhuc else None

    def draw_masks(self, rows: int, steps: int, device: torch.device) -> Masks | None:
        """Draws the masks of a batch's steps; None outside of training."""
        if not self.training:
            return None
        size = self.bias.shape[0] // 4
        return self.step_dropout.masks(self.step_dropout.draw(), rows, steps, size, device)

    def step(self, shares: Tensor, state: LSTMState, masks: Masks | None) -> LSTMState:
        """See :func:`lstm_step`."""
        assert isinstance(self.hidden, nn.Parameter)
        return lstm_step(shares, self.hidden, state, self.step_dropout, masks, self.lhuc)

    def shares(self, inputs: Tensor) -> Tensor:
        """Computes the share of inputs (..., I) in the gates, with the bias."""
        assert isinstance(self.input, nn.Parameter)
        return functional.linear(inputs, self.input, self.bias)

    def forward(
        self, inputs: Tensor, lengths: Tensor, *, reverse: bool, recompute: bool
    ) -> tuple[Tensor, Tensor]:
        """Walks over sentences from their beginning, or from their end.

        Args:
            inputs: (B, T, I). lengths: (B,) positions of each row.
            reverse: begin at the last position of each row.
            recompute: keep the state before each step and no more.

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
        for place in reversed(range(steps)) if reverse else range(steps):
            own = None if masks is None else masks.at(place)
            there = valid[:, place, None]

            def step(share: Tensor, h: Tensor, c: Tensor, own: Masks | None = own) -> tuple[Tensor, ...]:
                return self.step(share, (h, c), own)

            after, cell = stepped(step, recompute, self.parameters(), (shares[:, place], h, c))
            # Past its end a row's state waits.
            h, c = torch.where(there, after, h), torch.where(there, cell, c)
            outputs[place] = torch.where(there, after, 0.0)
        return torch.stack(outputs, dim=1), h
