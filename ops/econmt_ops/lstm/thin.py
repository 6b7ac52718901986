"""The steps of an LSTM layer whose recurrent matrix is factorised: two thin products and the pointwise work.

The products are so small that calling them takes as long as making them. So where there is a compiler, several steps
are compiled into one function, products and all; elsewhere the second product adds straight into the gates.

B batch, H hidden, r rank, K steps of a block, k steps of a compiled function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from econmt_ops.backends import c as native
from econmt_ops.backends import steps as step_functions
from econmt_ops.core.weights import LowRank
from econmt_ops.lstm.cells import cells as cell_functions

_TOGETHER = 8
"""Steps in one compiled function. The rest of a block's steps run in place."""

_FEW_ROWS = 32
"""On the CPU the products of 16-bit types with no more rows than this are made in float32: there the libraries take
longer to begin a 16-bit product than to make this one. Measured with H 256 and ranks 8 to 128: at 16 rows and rank 32
both take 23 us against 50, at 64 rows 77 against 52."""


def _tanh(values: Tensor) -> Tensor:
    # On the CPU the sigmoid costs a third of tanh.
    return 2.0 * torch.sigmoid(2.0 * values) - 1.0


def _forward_steps(
    gates: Tensor, h: Tensor, c: Tensor, right: Tensor, left: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """k steps, written for a compiler.

    Args:
        gates: (k, B, 4H), the share of the inputs and the bias. h: (B, H). c: (B, H), in the accumulate type.
        right: (H, r) and left: (r, 4H), the transposed factors, in the type of the products.

    Returns:
        The gates before their nonlinearities, h and c after each step.
    """
    sums, outputs, cells = [], [], []
    for given in gates.unbind(0):
        total = given.to(c.dtype) + torch.mm(torch.mm(h.to(right.dtype), right), left).to(c.dtype)
        i, f, g, o = total.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * _tanh(g)
        h = (torch.sigmoid(o) * _tanh(c)).to(gates.dtype)
        sums.append(total.to(gates.dtype))
        outputs.append(h)
        cells.append(c)
    return torch.stack(sums), torch.stack(outputs), torch.stack(cells)


def _forward_steps_alone(
    gates: Tensor, h: Tensor, c: Tensor, right: Tensor, left: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`_forward_steps`; returns h after each step and the last c."""
    _, outputs, cells = _forward_steps(gates, h, c, right, left)
    return outputs, cells[-1]


def _backward_steps(
    gates: Tensor,
    cells: Tensor,
    incoming: Tensor,
    dh: Tensor,
    dc: Tensor,
    left: Tensor,
    right: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward of k steps, written for a compiler.

    Args:
        gates: (k, B, 4H) after their nonlinearities. cells: (k + 1, B, H), from before the first step on.
        incoming: (k, B, H), the gradients of the outputs. dh, dc: (B, H), of the last h and c.
        left: (4H, r) and right: (r, H), the factors, in the type of the products.
        dtype: the compute type.

    Returns:
        The gradients of the gates before their nonlinearities (k, B, 4H), their products with ``left`` (k, B, r), and
        the gradients of h and c before the first step.
    """
    dgates, thins = [], []
    for step in reversed(range(len(gates))):
        i, f, g, o = gates[step].chunk(4, 1)
        squashed, given = _tanh(cells[step + 1]), dh.to(dc.dtype) + incoming[step]
        total = dc + given * o * (1.0 - squashed * squashed)
        parts = (
            total * g * i * (1.0 - i),
            total * cells[step] * f * (1.0 - f),
            total * i * (1.0 - g * g),
            given * squashed * o * (1.0 - o),
        )
        dgates.append(torch.cat(parts, 1).to(dtype))
        thins.append(torch.mm(dgates[-1].to(left.dtype), left))
        dh = torch.mm(thins[-1], right).to(dtype)
        dc = total * f
    return torch.stack(dgates[::-1]), torch.stack(thins[::-1]).to(dtype), dh, dc


@functools.cache
def _compiled(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    return step_functions.compile_step(function)


class ThinSteps:
    """The steps of one call.

    Args:
        hidden: U, (4H, H).
        pointwise: of the schedule: "in-place" or "compiled"; in place where there is no compiler, which is said once.
        rows: B.
    """

    def __init__(self, hidden: LowRank, pointwise: str, rows: int) -> None:
        self._rank, self._dtype = hidden.rank, hidden.left.dtype
        self._compiles = pointwise == "compiled" and step_functions.compiled() is not step_functions.EAGER
        few = hidden.left.device.type == "cpu" and rows <= _FEW_ROWS
        wide = few and self._dtype in (torch.bfloat16, torch.float16)
        self._factors = hidden.to(torch.float32) if wide else LowRank(*(part.contiguous() for part in hidden))
        self._turned = LowRank(*(part.t().contiguous() for part in self._factors))

    def _compiled_steps(self, steps: int) -> int:
        """How many of a block's steps compiled functions make."""
        return steps - steps % _TOGETHER if self._compiles else 0

    def forward(
        self, gates: Tensor, h: Tensor, c: Tensor, outputs: Tensor, cells: Tensor | None, keep_gates: bool
    ) -> tuple[Tensor, Tensor]:
        """Walks over a block.

        Args:
            gates: (K, B, 4H), the inputs' share; overwritten, with the sums if ``keep_gates``.
            h, c: (B, H) before the block.
            outputs: (K, B, H), is filled. cells: (K, B, H), is filled with c after each step; or None.
            keep_gates: see ``gates``.

        Returns:
            h and c after the block.
        """
        whole = self._compiled_steps(len(gates))
        for begin in range(0, whole, _TOGETHER):
            part = slice(begin, begin + _TOGETHER)
            arguments = (gates[part], h, c, self._turned.right, self._turned.left)
            if cells is None and not keep_gates:
                outputs[part], c = _compiled(_forward_steps_alone)(*arguments)
            else:
                sums, outputs[part], states = _compiled(_forward_steps)(*arguments)
                c = states[-1]
                if keep_gates:
                    gates[part] = sums
                if cells is not None:
                    cells[part] = states
            h = outputs[part.stop - 1]
        kept = None if cells is None else cells[whole:]
        return self._forward_in_place(gates[whole:], h, c, outputs[whole:], kept, keep_gates)

    def _forward_in_place(
        self, gates: Tensor, h: Tensor, c: Tensor, outputs: Tensor, cells: Tensor | None, keep_gates: bool
    ) -> tuple[Tensor, Tensor]:
        spare = (torch.empty_like(c), torch.empty_like(c))
        right, left = self._turned.right, self._turned.left
        same = right.dtype == gates.dtype
        for step, total in enumerate(gates.unbind(0)):
            if same:
                total.addmm_(torch.mm(h, right), left)
            else:
                total += torch.mm(torch.mm(h.to(right.dtype), right), left)
            after = spare[step % 2] if cells is None else cells[step]
            h = outputs[step]
            if total.dtype == h.dtype and native.serves(h):
                native.lstm_forward(total, None, c, h, after, None)
            else:
                step_functions.advance_cell(total.to(c.dtype, copy=keep_gates), c, h, after)
            c = after
        return h, c

    def backward(
        self,
        gates: Tensor,
        states: Sequence[Tensor],
        incoming: Tensor | None,
        dh: Tensor,
        dc: Tensor,
        dgates: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Walks back through a block.

        Args:
            gates: (K, B, 4H) after their nonlinearities. states: c before the block and after each of its steps.
            incoming: (K, B, H), the gradients of the outputs, or None. dh, dc: (B, H), of h and c after the block.
            dgates: (K, B, 4H), is filled with the gradients of the gates before their nonlinearities.

        Returns:
            The gradients of h and c before the block, and the products of ``dgates`` with the left factor (K, B, r).
        """
        thins = dgates.new_empty(*dgates.shape[:2], self._rank)
        left, right = self._factors
        whole = self._compiled_steps(len(gates))
        run, nothing = cell_functions("in-place"), torch.zeros_like(dh)
        for step in reversed(range(whole, len(gates))):
            given = nothing if incoming is None else incoming[step]
            dc = run.backward(gates[step], states[step], states[step + 1], given, dh, dc, dgates[step])
            thin = torch.mm(dgates[step].to(left.dtype), left)
            thins[step] = thin
            dh = torch.mm(thin, right).to(self._dtype)
        if whole and incoming is None:
            incoming = dgates.new_zeros(1, 1, 1).expand(*dgates.shape[:2], dh.shape[1])
        for begin in reversed(range(0, whole, _TOGETHER)):
            part = slice(begin, begin + _TOGETHER)
            assert incoming is not None
            before = torch.stack(tuple(states[begin : part.stop + 1]))
            dgates[part], thins[part], dh, dc = _compiled(_backward_steps)(
                gates[part], before, incoming[part], dh, dc, left, right, self._dtype
            )
        return dh, dc, thins
