"""Steps of an LSTM layer with a factorised recurrent matrix, compiled eight at a time, products included.

The products are so small that calling them takes as long as computing them. The steps of a block that remain after the
last group of eight run like those of any other layer.

Sizes: B batch, H hidden, r rank, K steps of a block, k steps of a compiled function.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from econmt_ops.backends.compiled import compile_step
from econmt_ops.backends.eager import fill_quarters, tanh
from econmt_ops.cells import lstm
from econmt_ops.core.weights import LowRank
from econmt_ops.products.low_rank import few_rows_type

_TOGETHER = 8
"""Steps in one compiled function."""


def _forward(
    gates: Tensor, h: Tensor, c: Tensor, right: Tensor, left: Tensor, keep: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Runs k steps; returns h and c after each step, (B, H) each.

    ``gates`` (k, B, 4H) are the share of the inputs and the bias; with ``keep`` they are overwritten by what the
    backward pass reads. h and c are (B, H); the transposed factors are right (H, r) and left (r, 4H).
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
    return outputs, cells


def _backward(
    gates: Tensor, cells: Tensor, incoming: Tensor | None, dh: Tensor, dc: Tensor, left: Tensor, right: Tensor
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Runs k steps backward.

    Takes the gates (k, B, 4H) as left by the forward pass or `prepare_gates`, the cells (k + 1, B, H) from before the
    first step on, the gradients of the outputs (k, B, H), if any, and of the last h and c (B, H), and the factors.
    Returns the gradients of the sums of each step (B, 4H), their products with ``left`` (B, r), and the gradients of h
    and c before the first step.
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


def grouped_steps(steps: int) -> int:
    """Returns the number of leading steps of a block that compiled functions run."""
    return steps - steps % _TOGETHER


def _factors(hidden: LowRank, rows: int) -> tuple[Tensor, Tensor]:
    """Returns the factors of U (4H, H), contiguous and in the type of products of so many rows."""
    left, right = hidden.to(few_rows_type(hidden.left, rows))
    return left.contiguous(), right.contiguous()


def forward(
    hidden: LowRank, gates: Tensor, h: Tensor, c: Tensor, keep: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Runs the leading steps of a block that fill whole groups; returns h and c after each of them, (B, H) each.

    Takes U (4H, H), the inputs' share of the gates (K, B, 4H), which is overwritten if ``keep``, for a backward pass,
    and h and c (B, H) before the block.
    """
    left, right = (part.t().contiguous() for part in _factors(hidden, gates.shape[1]))
    outputs: list[Tensor] = []
    cells: list[Tensor] = []
    for begin in range(0, grouped_steps(len(gates)), _TOGETHER):
        group = gates[begin : begin + _TOGETHER]
        group_outputs, group_cells = compile_step(_forward)(group, h, c, right, left, keep)
        outputs += group_outputs
        cells += group_cells
        h, c = outputs[-1], cells[-1]
    return outputs, cells


def backward(
    hidden: LowRank,
    gates: Tensor,
    states: Sequence[Tensor],
    incoming: Tensor | None,
    dh: Tensor,
    dc: Tensor,
    dgates: Tensor,
    thin: Tensor,
) -> Tensor:
    """Runs these steps backward and returns the gradient of h before them.

    Takes the gates (k, B, 4H) of whole groups, c before them and after each, and the gradients of the outputs
    (K, B, H), if any, and of the last h and c (B, H). ``dc`` is overwritten by the gradient of the c before them;
    the first k of ``dgates`` (K, B, 4H) and ``thin`` (K, B, r) are filled, see `Direction`.
    """
    left, right = _factors(hidden, gates.shape[1])
    state = dc
    for begin in reversed(range(0, len(gates), _TOGETHER)):
        part = slice(begin, begin + _TOGETHER)
        cells = torch.stack(tuple(states[begin : part.stop + 1]))
        doutputs = None if incoming is None else incoming[part]
        sums, thins, dh, state = compile_step(_backward)(gates[part], cells, doutputs, dh, state, left, right)
        torch.stack(sums, out=dgates[part])
        torch.stack(thins, out=thin[part])
    dc.copy_(state)
    return dh
