"""Steps of an LSTM layer with a factorised recurrent matrix, compiled eight at a time, products included.

The products are so small that calling them takes as long as computing them. The steps of a block that remain after the
last group of eight run like those of any other layer.

Sizes: B batch, H hidden, r rank, K steps of a block, k steps of a compiled function.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends.compiled import CompiledSteps, compile_step, fill_quarters, tanh
from econmt_ops.backends.eager import EagerSteps
from econmt_ops.cells import lstm
from econmt_ops.core.low_rank import few_rows_type
from econmt_ops.core.weights import LowRank

_TOGETHER = 8
"""Steps in one compiled function."""


def _forward(
    gates: Tensor, h: Tensor, c: Tensor, right: Tensor, left: Tensor, keep: bool, every_cell: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Runs k steps.

    Args:
        gates: (k, B, 4H), the share of the inputs and the bias; with ``keep`` overwritten by what the backward pass
            reads.
        h: (B, H). c: (B, H), in the accumulate type.
        right: (H, r) and left: (r, 4H), the transposed factors, in the type of the products.
        keep: see ``gates``. every_cell: True if each c is returned.

    Returns:
        h after each step, and c after each step or only after the last, (B, H) each.
    """
    outputs, cells = [], []
    for step_gates in gates.unbind(0):
        sums = step_gates.to(c.dtype) + torch.mm(torch.mm(h.to(right.dtype), right), left).to(c.dtype)
        activated = lstm.activate(sums, tanh)
        new_h, c = lstm.update_state(activated, c, tanh)
        h = new_h.to(gates.dtype)
        if keep:
            fill_quarters(step_gates, activated if step_gates.dtype == c.dtype else sums.chunk(4, 1))
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
    """Runs k steps backward.

    Args:
        gates: (k, B, 4H), as returned by the forward pass or `prepare_gates`.
        cells: (k + 1, B, H), from before the first step on.
        incoming: (k, B, H), the gradients of the outputs; or None. dh, dc: (B, H), gradients of the last h and c.
        left: (4H, r) and right: (r, H), the factors, in the type of the products.

    Returns:
        The gradients of the sums of each step (B, 4H), their products with ``left`` (B, r), and the gradients of h and
        c before the first step.
    """
    dgates, thin, exact = [], [], dc.dtype
    for step in reversed(range(len(gates))):
        step_gates = gates[step]
        activated = (
            step_gates.chunk(4, 1) if step_gates.dtype == exact else lstm.activate(step_gates.to(exact), tanh)
        )
        total_dh = dh.to(exact) if incoming is None else dh.to(exact) + incoming[step].to(exact)
        parts, dc = lstm.update_state_backward(activated, cells[step], cells[step + 1], total_dh, dc, tanh)
        dgates.append(torch.cat(parts, 1).to(dh.dtype))
        product = torch.mm(dgates[-1].to(left.dtype), left)
        thin.append(product.to(dh.dtype))
        dh = torch.mm(product, right).to(dh.dtype)
    return dgates[::-1], thin[::-1], dh, dc


class UnrolledSteps:
    """Compiled groups of steps of one call."""

    def __init__(self, hidden: LowRank) -> None:
        """Takes the recurrent matrix U, (4H, H), as factors."""
        self._hidden = hidden

    @staticmethod
    def serves(run: EagerSteps) -> bool:
        """Returns True if the backend of this call compiles its steps."""
        return isinstance(run, CompiledSteps)

    def grouped_steps(self, steps: int) -> int:
        """Returns the number of leading steps of a block that compiled functions run."""
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
        """Runs the leading steps of a block that fill whole groups, and returns their number.

        Args:
            gates: (K, B, 4H), the inputs' share; overwritten if ``keep``.
            h, c: (B, H) before the block.
            outputs: (K, B, H), is filled.
            cells: (K, B, H), is filled with c after each step; or None: ``last_c`` (B, H) is overwritten.
            last_c: see ``cells``.
            keep: True if the backward pass will read the gates.
        """
        done = self.grouped_steps(len(gates))
        left, right = (part.t().contiguous() for part in self._factors(gates.shape[1]))
        for begin in range(0, done, _TOGETHER):
            part = slice(begin, begin + _TOGETHER)
            results = compile_step(_forward)(gates[part], h, c, right, left, keep, cells is not None)
            hs, states = results
            torch.stack(hs, out=outputs[part])
            if cells is not None:
                torch.stack(states, out=cells[part])
            h, c = outputs[part.stop - 1], states[-1]
        if done and cells is None:
            last_c.copy_(c)
        return done

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
        """Runs these steps backward.

        Args:
            gates: (k, B, 4H), k a multiple of the steps in a function. states: c before them and after each.
            incoming: (K, B, H), the gradients of the outputs, or None. dh: (B, H), gradient of the last h.
            dc: (B, H), gradient of the last c; overwritten by that of the c before them.
            dgates: (K, B, 4H) and thin: (K, B, r), see `Direction`; their first k are filled.

        Returns:
            The gradient of h before them.
        """
        left, right = self._factors(gates.shape[1])
        state = dc
        for begin in reversed(range(0, len(gates), _TOGETHER)):
            part = slice(begin, begin + _TOGETHER)
            cells = torch.stack(tuple(states[begin : part.stop + 1]))
            doutputs = None if incoming is None else incoming[part]
            sums, thins, dh, state = compile_step(_backward)(
                gates[part], cells, doutputs, dh, state, left, right
            )
            torch.stack(sums, out=dgates[part])
            torch.stack(thins, out=thin[part])
        dc.copy_(state)
        return dh
