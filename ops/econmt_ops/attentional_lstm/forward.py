"""The forward pass of the recomputing attentional LSTM."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from econmt_ops.attentional_lstm.problem import Problem
from econmt_ops.backends import c as native
from econmt_ops.backends.steps import EAGER, Workspace, activate, tanh_
from econmt_ops.core.chunks import reaches, split_blocks
from econmt_ops.core.precision import accumulate_dtype


class Result(NamedTuple):
    """What the forward pass returns; stashes that the level leaves out have no elements.

    Attributes:
        outputs: (T, B, H) o. attention: (T, B, S).
        h: (L, T, B, H) stash. c: (L, T, B, H) stash, or (L, number of blocks, B, H): before each block.
        gates: (L, T, B, 4H) stash: after their nonlinearities or, in 16 bits, the sums before them.
        last_h, last_c: (L, B, H) after the last step.
    """

    outputs: Tensor
    attention: Tensor
    h: Tensor
    c: Tensor
    gates: Tensor
    last_h: Tensor
    last_c: Tensor


def empty_result(
    inputs: Tensor, steps: int, keys: Tensor, hidden: int, layers: int, stash: str, keep: bool
) -> Result:
    """The result's tensors, their values not set, in the type of the inputs. keys (B, S, A)."""
    batch = len(keys)
    accumulate = accumulate_dtype(inputs.dtype)
    blocks = len(split_blocks(steps, batch, hidden, accumulate))
    cells = (steps if reaches(stash, "cells") else blocks) if keep else 0
    gates = steps if keep and reaches(stash, "gates") else 0
    return Result(
        inputs.new_empty(steps, batch, hidden),
        inputs.new_empty(steps, batch, keys.shape[1]),
        inputs.new_empty(layers, steps if keep else 0, batch, hidden),
        inputs.new_empty(layers, cells, batch, hidden, dtype=accumulate),
        inputs.new_empty(layers, gates, batch, 4 * hidden),
        inputs.new_empty(layers, batch, hidden),
        inputs.new_empty(layers, batch, hidden, dtype=accumulate),
    )


class _Combination:
    """From the stack's output to o: what does not depend on the step is made once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.projected = problem.projected()
        query, bias = problem.query, problem.combine_bias
        # One product gives the query and the stack's share of o.
        self.size = 0 if query is None else query.shape[0]
        weight = problem.from_top.contiguous() if query is None else torch.cat([query, problem.from_top])
        if bias is not None and query is not None:
            bias = torch.cat([bias.new_zeros(self.size), bias])
        self.product = problem.product(weight, bias)

    def __call__(self, top: Tensor, output: Tensor, attention: Tensor) -> None:
        """Write o (B, H) and the attention weights (B, S) for the stack's output ``top`` (B, H)."""
        both = self.product(top)
        query = both[:, : self.size] if self.size else top
        attention.copy_(self.problem.scores.weights(query))
        share = both[:, self.size :]
        if native.serves(output):
            native.combine_forward(share, attention, self.projected, output)
            return
        share = share.unsqueeze(1)
        share = torch.baddbmm(share, attention.unsqueeze(1), self.projected).squeeze(1)
        output.copy_(tanh_(share))


class _Cells:
    """The state of the layers, written where it is kept, if it is kept.

    Attributes:
        h, c: (B, H) a layer.
    """

    def __init__(
        self, problem: Problem, result: Result, first_h: list[Tensor], first_c: list[Tensor], keep: bool
    ) -> None:
        stash = problem.options.stash
        self.problem, self.result, self.keep = problem, result, keep
        self.h = list(first_h)
        self.c = [c.clone() for c in first_c]
        self.room = Workspace(self.c[0])
        self.every_cell = keep and reaches(stash, "cells")
        self.gates_too = keep and reaches(stash, "gates")

    def step(self, layer: int, step: int, gates: Tensor) -> None:
        """One step of one layer, from its gates (B, 4H) before their nonlinearities, which may be overwritten."""
        result, run = self.result, self.problem.run
        h = result.h[layer, step] if self.keep else torch.empty_like(self.h[layer])
        c = result.c[layer, step] if self.every_cell else self.c[layer]
        kept = result.gates[layer, step] if self.gates_too else None
        if kept is not None and not self.problem.keeps_activated:
            kept.copy_(gates)
            kept = None
        if run is EAGER and native.serves(h):
            native.lstm_forward(gates, None, self.c[layer], h, c, kept)
        elif run is EAGER:
            room = self.room.gates if kept is None else kept
            room.copy_(gates)
            self.room.advance(self.c[layer], h, c, room)
        else:
            if kept is not None:
                kept.copy_(activate(gates, self.problem.accumulate))
            new_h, new_c = run.cell_forward(gates, self.c[layer])
            h.copy_(new_h)
            c.copy_(new_c)
        self.h[layer], self.c[layer] = h, c


def run_forward(
    problem: Problem, first_h: list[Tensor], first_c: list[Tensor], first_output: Tensor, keep: bool
) -> Result:
    """Run all steps.

    Args:
        problem: the call.
        first_h, first_c: (B, H) a layer, the state before the first step. first_output: (B, H) o before it.
        keep: whether a backward pass will follow.
    """
    stash, layers = problem.options.stash, len(problem.layers)
    result = empty_result(problem.inputs, problem.steps, problem.values, problem.hidden, layers, stash, keep)
    cells = _Cells(problem, result, first_h, first_c, keep)
    combination = _Combination(problem)
    bottom = problem.product(problem.joint(0))
    upper = [problem.product(problem.joint(layer), problem.layers[layer].bias) for layer in range(1, layers)]
    fed = first_output
    for number, (begin, end) in enumerate(problem.blocks):
        products = problem.bottom_gates(problem.read(begin, end))
        if keep and not cells.every_cell:
            for layer in range(layers):
                result.c[layer, number] = cells.c[layer]
        for step in range(begin, end):
            cells.step(0, step, bottom.plus(products[step - begin], torch.cat([fed, cells.h[0]], 1)))
            top = cells.h[0]
            for layer, product in enumerate(upper, start=1):
                read = problem.drop(layer, top.unsqueeze(0), step, step + 1).squeeze(0)
                cells.step(layer, step, product(torch.cat([read, cells.h[layer]], 1)))
                top = cells.h[layer] + read if problem.options.residual else cells.h[layer]
            fed = result.outputs[step]
            combination(top, fed, result.attention[step])
    for layer in range(layers):
        result.last_h[layer] = cells.h[layer]
        result.last_c[layer] = cells.c[layer]
    return result
