"""The forward pass of the recomputing attentional LSTM."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.attentional_lstm.problem import Problem
from econmt_ops.blocks import reaches, split_blocks
from econmt_ops.precision import accumulate_dtype
from econmt_ops.steps import activate


class Result(NamedTuple):
    """What the forward pass returns; stashes that the level leaves out have no elements.

    Attributes:
        outputs: (T, B, H) o. attention: (T, B, S).
        h: (L, T, B, H) stash. c: (L, T, B, H) stash, or (L, number of blocks, B, H): before each block.
        gates: (L, T, B, 4H) stash, after their nonlinearities.
        last_h, last_c: (L, B, H) after the last step.
    """

    outputs: Tensor
    attention: Tensor
    h: Tensor
    c: Tensor
    gates: Tensor
    last_h: Tensor
    last_c: Tensor


def empty_result(inputs: Tensor, keys: Tensor, hidden: int, layers: int, stash: str, keep: bool) -> Result:
    """The result's tensors, their values not set. inputs (B, T, I), keys (B, S, A)."""
    batch, steps, _ = inputs.shape
    accumulate = accumulate_dtype(inputs.dtype)
    blocks = len(split_blocks(steps, batch, hidden, accumulate))
    cells = (steps if reaches(stash, "cells") else blocks) if keep else 0
    gates = steps if keep and reaches(stash, "gates") else 0
    return Result(
        inputs.new_empty(steps, batch, hidden),
        inputs.new_empty(steps, batch, keys.shape[1]),
        inputs.new_empty(layers, steps if keep else 0, batch, hidden),
        inputs.new_empty(layers, cells, batch, hidden, dtype=accumulate),
        inputs.new_empty(layers, gates, batch, 4 * hidden, dtype=accumulate),
        inputs.new_empty(layers, batch, hidden),
        inputs.new_empty(layers, batch, hidden, dtype=accumulate),
    )


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
    result = empty_result(problem.inputs.transpose(0, 1), problem.values, problem.hidden, layers, stash, keep)
    h, c, fed = list(first_h), list(first_c), first_output
    bottom = problem.recurrent.t()
    upper = [torch.cat([layer.input, layer.hidden], 1).t() for layer in problem.layers[1:]]
    every_cell, gates_too = reaches(stash, "cells"), reaches(stash, "gates")
    for number, (begin, end) in enumerate(problem.blocks):
        products = functional.linear(problem.inputs[begin:end], problem.input_weight, problem.layers[0].bias)
        if keep and not every_cell:
            for layer, before in enumerate(c):
                result.c[layer, number] = before
        for step in range(begin, end):
            gates = torch.addmm(products[step - begin], torch.cat([fed, h[0]], 1), bottom)
            top = fed
            for layer, parameters in enumerate(problem.layers):
                read = top
                if layer > 0:
                    read = problem.drop(layer, top.unsqueeze(0), step, step + 1).squeeze(0)
                    gates = torch.addmm(parameters.bias, torch.cat([read, h[layer]], 1), upper[layer - 1])
                h[layer], c[layer] = problem.run.cell_forward(gates, c[layer])
                top = h[layer] + read if layer > 0 and problem.options.residual else h[layer]
                if keep:
                    result.h[layer, step] = h[layer]
                    if every_cell:
                        result.c[layer, step] = c[layer]
                    if gates_too:
                        result.gates[layer, step] = activate(gates, problem.accumulate)
            fed = result.outputs[step]
            result.attention[step] = _attend(problem, top, fed)
    for layer in range(layers):
        result.last_h[layer] = h[layer]
        result.last_c[layer] = c[layer]
    return result


def _attend(problem: Problem, top: Tensor, output: Tensor) -> Tensor:
    """Write o (B, H) for the top layer's ``top`` (B, H) into ``output``; return the attention (B, S)."""
    both = functional.linear(top, problem.after)
    query, share = problem.split_after(both, top)
    attention = problem.scores.weights(query).to(top.dtype)
    share = torch.baddbmm(share.unsqueeze(1), attention.unsqueeze(1), problem.projected).squeeze(1)
    if problem.combine_bias is not None:
        share += problem.combine_bias
    torch.tanh(share, out=output)
    return attention
