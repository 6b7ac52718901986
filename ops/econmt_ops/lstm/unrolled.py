"""Steps of an LSTM layer whose recurrent matrix is factorised, eight in one compiled function, products and all.

The products are so small that calling them takes as long as making them. What is left of a block's steps after the last
eight is made like the steps of any other layer.

B batch, H hidden, r rank, K steps of a block, k steps of a compiled function.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends.compiled import CompiledSteps, compile_step, fill_quarters, tanh
from econmt_ops.backends.protocol import StepKernels
from econmt_ops.cells import lstm
from econmt_ops.core.low_rank import few_rows_type
from econmt_ops.core.weights import LowRank

_TOGETHER = 8
"""Steps in one compiled function."""


def _forward(
    gates: Tensor, h: Tensor, c: Tensor, right: Tensor, left: Tensor, keep: bool, every_cell: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """k steps.

    Args:
        gates: (k, B, 4H), the share of the inputs and the bias; with ``keep`` they become what the way back reads.
        h: (B, H). c: (B, H), in the accumulate type.
        right: (H, r) and left: (r, 4H), the transposed factors, in the type of the products.
        keep: see ``gates``. every_cell: whether each c is returned.

    Returns:
        h after each step, and c after each step or only after the last, (B, H) each.
    """
    outputs, cells = [], []
    for given in gates.unbind(0):
        sums = given.to(c.dtype) + torch.mm(torch.mm(h.to(right.dtype), right), left).to(c.dtype)
        activated = lstm.activate(sums, tanh)
        made, c = lstm.update_state(activated, c, tanh)
        h = made.to(gates.dtype)
        if keep:
            fill_quarters(given, activated if given.dtype == c.dtype else sums.chunk(4, 1))
        outputs.append(h)
        cells.append(c)
    return outputs, cells if every_cell else cells[-1:]


def _backward(
    gates: Tensor,
    cells: Tensor,
    incoming: Tensor | None,
    dh: Tensor,
    dc: Tensor,
    left: Tensor,
    right: Tensor,
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Backward of k steps.

    Args:
        gates: (k, B, 4H), as the forward pass or `prepare_gates` gave them.
        cells: (k + 1, B, H), from before the first step on.
        incoming: (k, B, H), the gradients of the outputs; or None. dh, dc: (B, H), of the last h and c.
        left: (4H, r) and right: (r, H), the factors, in the type of the products.

    Returns:
        The gradients of the sums of each step (B, 4H), their products with ``left`` (B, r), and the gradients of h and
        c before the first step.
    """
    dgates, thin, exact = [], [], dc.dtype
    for step in reversed(range(len(gates))):
        own = gates[step]
        activated = own.chunk(4, 1) if own.dtype == exact else lstm.activate(own.to(exact), tanh)
        given = dh.to(exact) if incoming is None else dh.to(exact) + incoming[step].to(exact)
        parts, dc = lstm.update_state_backward(activated, cells[step], cells[step + 1], given, dc, tanh)
        dgates.append(torch.cat(parts, 1).to(dh.dtype))
        product = torch.mm(dgates[-1].to(left.dtype), left)
        thin.append(product.to(dh.dtype))
        dh = torch.mm(product, right).to(dh.dtype)
    return dgates[::-1], thin[::-1], dh, dc


class UnrolledSteps:
    """The steps of one call."""

    def __init__(self, hidden: LowRank) -> None:
        """``hidden``: U, (4H, H)."""
        self._hidden = hidden

    @staticmethod
    def serves(run: StepKernels) -> bool:
        """Whether steps are compiled in this call."""
        return isinstance(run, CompiledSteps)

    def whole(self, steps: int) -> int:
        """How many of a block's first steps compiled functions make."""
        return steps - steps % _TOGETHER

    def _factors(self, rows: int) -> LowRank:
        factors = self._hidden.to(few_rows_type(self._hidden.left, rows))
        return LowRank(*(part.contiguous() for part in factors))

    def forward(
        self,
        gates: Tensor,
        h: Tensor,
        c: Tensor,
        outputs: Tensor,
        cells: Tensor | None,
        last_c: Tensor,
        keep: bool,
    ) -> int:
        """Walks over as many of a block's steps as make whole functions, and says how many.

        Args:
            gates: (K, B, 4H), the inputs' share; overwritten if ``keep``.
            h, c: (B, H) before the block.
            outputs: (K, B, H), is filled.
            cells: (K, B, H), is filled with c after each step; or None: ``last_c`` (B, H) is overwritten.
            last_c: see ``cells``.
            keep: whether the gates will be read by the way back.
        """
        whole = self.whole(len(gates))
        left, right = (part.t().contiguous() for part in self._factors(gates.shape[1]))
        for begin in range(0, whole, _TOGETHER):
            part = slice(begin, begin + _TOGETHER)
            made = compile_step(_forward)(gates[part], h, c, right, left, keep, cells is not None)
            hs, states = made
            torch.stack(hs, out=outputs[part])
            if cells is not None:
                torch.stack(states, out=cells[part])
            h, c = outputs[part.stop - 1], states[-1]
        if whole and cells is None:
            last_c.copy_(c)
        return whole

    def backward(
        self,
        gates: Tensor,
        states: Sequence[Tensor],
        incoming: Tensor | None,
        dh: Tensor,
        dc: Tensor,
        dgates: Tensor,
        thin: Tensor,
    ) -> Tensor:
        """Walks back through these steps.

        Args:
            gates: (k, B, 4H), k a multiple of the steps in a function. states: c before them and after each.
            incoming: (K, B, H), the gradients of the outputs, or None. dh: (B, H), of the last h.
            dc: (B, H), of the last c; becomes that of the c before them.
            dgates: (K, B, 4H) and thin: (K, B, r), see `Direction`; their first k are filled.

        Returns:
            The gradient of h before them.
        """
        left, right = self._factors(gates.shape[1])
        state = dc
        for begin in reversed(range(0, len(gates), _TOGETHER)):
            part = slice(begin, begin + _TOGETHER)
            cells = torch.stack(tuple(states[begin : part.stop + 1]))
            given = None if incoming is None else incoming[part]
            sums, thins, dh, state = compile_step(_backward)(
                gates[part], cells, given, dh, state, left, right
            )
            torch.stack(sums, out=dgates[part])
            torch.stack(thins, out=thin[part])
        dc.copy_(state)
        return dh
