"""Layers of cells whose gates read the h of the step before: one product for all inputs, then a loop over the steps.

`reference` is a loop of `StepCell.forward` under autograd, or torch's own GRU. `recompute` keeps inputs, outputs
and, of the states other than h, those before each block of steps. Its backward pass recomputes a block's products at
once and the other states by the cell alone; only the gradients of the states are computed step by step, those of the
weights by large products. On a GPU one launch runs all steps of a GRU, see `econmt_ops.lstm.triton.gru`.

At and after a row's length its states are carried through; rows begin at position 0. Inside the operator time comes
first. B batch, T steps, H hidden, G gates, K steps of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from econmt_ops.backends import steps_for
from econmt_ops.backends.eager import EagerSteps
from econmt_ops.backends.protocol import CellStep, StepGradients
from econmt_ops.backends.triton import on_kernels
from econmt_ops.cells.gru import GRU
from econmt_ops.cells.protocol import StepCell
from econmt_ops.cells.table import KINDS
from econmt_ops.core.chunks import previous, rows_of, split_blocks
from econmt_ops.core.lengths import padding_mask, padding_of, zero_padding
from econmt_ops.core.loops import steps_of
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.dispatch.registration import Gradients, Incoming, RecurrentOperator
from econmt_ops.dispatch.rule import needs_single_steps
from econmt_ops.dispatch.traits import Traits
from econmt_ops.lstm.cudnn import MOST_STEPS, cudnn_gru
from econmt_ops.lstm.reference import runs_by_torch
from econmt_ops.lstm.triton import gru, gru_products
from econmt_ops.products.gemm import Product, add_rows
from econmt_ops.products.outer import add_outer
from econmt_ops.products.stack import last_of

_RECOMPUTE = Traits(recomputes=True, loops=True, casts=True)


def reference(
    cell: StepCell, inputs: Tensor, weights: Any, state: Sequence[Tensor], lengths: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs one layer in plain PyTorch; see `econmt_ops.products.stack.run_cells`."""
    by_cudnn = inputs.is_cuda and not torch.compiler.is_compiling() and torch.cudnn_is_acceptable(inputs)
    padding = padding_of(inputs, lengths)
    inputs = zero_padding(inputs, padding)
    # In 16-bit types on a CPU torch would accumulate in them.
    by_torch = not needs_single_steps() if by_cudnn else runs_by_torch(inputs.dtype)
    if cell is GRU and by_torch and not (by_cudnn and isinstance(inputs, FakeTensor)):
        outputs = zero_padding(
            _gru(inputs, list(weights), state[0].unsqueeze(0).contiguous(), by_cudnn), padding
        )
        return outputs, (last_of(outputs, state[0], lengths),)
    parts = cell.split(weights)
    reads = functional.linear(inputs, parts.input, parts.read_bias)
    exact = accumulate_dtype(inputs.dtype)
    extra = [part.to(exact) for part in parts.extra]
    made = []
    for step, read in enumerate(reads.unbind(1)):
        recurrent = functional.linear(state[0], parts.hidden, parts.recurrent_bias)
        after = cell.forward(read, recurrent, state, extra)
        made.append(after[0])
        if padding is not None:  # rows that have ended keep their states
            ended = padding[:, step].unsqueeze(1)
            after = tuple(torch.where(ended, *pair) for pair in zip(state, after, strict=True))
        state = after
    return zero_padding(torch.stack(made, 1), padding), tuple(state)


def _gru(inputs: Tensor, weights: list[Tensor], h: Tensor, by_cudnn: bool) -> Tensor:
    """Returns the outputs of one GRU layer by torch or cuDNN, where h (1, B, H) is before the first step.

    Lengths cost nothing: rows begin at position 0, h is the only state, and values after a row's end become zeros.
    """
    training = torch.is_grad_enabled()
    if not by_cudnn:
        return torch.gru(inputs, h, weights, True, 1, 0.0, training, False, True)[0]
    parts = []
    for part in torch.split(inputs, MOST_STEPS, 1):
        parts.append(cudnn_gru(part, h, None, weights, training)[0])
        h = parts[-1][:, -1].unsqueeze(0)
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


class SteppedArguments(NamedTuple):
    """Arguments of one layer; all values are computed in the type of the inputs, whatever the type of the weights.

    Attributes:
        inputs: (T, B, I). input: (G H, I). hidden: (G H, H). read_bias, recurrent_bias: (G H,), or None.
        extra: See `econmt_ops.cells.protocol.Split`. first: Initial states, (B, H) each, h first.
        lengths: (B,), or None. cell: Name of the cell. backend: See `econmt_ops.backends.steps_for`.
    """

    inputs: Tensor
    input: Tensor
    hidden: Tensor
    read_bias: Tensor | None
    recurrent_bias: Tensor | None
    extra: list[Tensor]
    first: list[Tensor]
    lengths: Tensor | None
    cell: str
    backend: str


class SteppedResults(NamedTuple):
    """Results of a layer, and tensors kept if a backward pass follows.

    Attributes:
        outputs: (T, B, H), zero at padded positions. last_h: (B, H). last: (states beside h, B, H).
        kept: States beside h before each block, (states beside h, blocks, B, H).
    """

    outputs: Tensor
    last_h: Tensor
    last: Tensor
    kept: Tensor


def _blocks(call: SteppedArguments) -> list[tuple[int, int]]:
    """Returns the blocks of steps; see `split_blocks`."""
    steps, batch, _ = call.inputs.shape
    exact = accumulate_dtype(call.inputs.dtype)
    return split_blocks(steps, batch, call.hidden.shape[1], exact, large=call.backend == "triton")


class _SteppedCall:
    """Call divided into blocks of steps."""

    def __init__(self, call: SteppedArguments) -> None:
        self.call, self.cell = call, cast(StepCell, KINDS[call.cell])
        self.steps = call.inputs.shape[0]
        dtype = call.inputs.dtype
        self.exact = accumulate_dtype(dtype)
        self.blocks = _blocks(call)
        self.run = steps_for(call.inputs, call.backend)
        self.padding = padding_mask(call.lengths, self.steps, call.inputs.device, time_first=True)
        weights = call.input, call.hidden, call.read_bias, call.recurrent_bias, *call.extra
        casts: list[Any] = [None if part is None else part.to(dtype) for part in weights]
        self.input, self.hidden, *biases = casts
        self.read_product = Product(self.input, biases[0], calls=len(self.blocks))
        self.recurrent_product = Product(self.hidden, biases[1], calls=self.steps)
        # Rounded to the compute type, as all weights are.
        self.extra = [part.to(self.exact) for part in biases[2:]]

    def read(self, begin: int, end: int) -> Tensor:
        """Returns the inputs (K, B, I) of a block, with zeros at padded positions."""
        inputs = self.call.inputs[begin:end]
        if self.padding is None:
            return inputs.contiguous()
        copy = inputs.clone(memory_format=torch.contiguous_format)
        return copy.masked_fill_(self.padding[begin:end].unsqueeze(-1), 0.0)

    def step(self, number: int, read: Tensor, recurrent: Tensor, before: Sequence[Tensor]) -> CellStep:
        """Returns the arguments of a step from its input and recurrent products (B, G H) and its states."""
        padding = None if self.padding is None else self.padding[number]
        return CellStep(self.cell, read, recurrent, before, self.extra, padding)

    def step_at(
        self, begin: int, reads: Tensor, recurrents: Tensor, before: Tensor, number: int, others: Tensor
    ) -> CellStep:
        """Returns the arguments of a step of the block from ``begin`` on; ``others`` are the states beside h."""
        states = before[number], *others.unbind(0)
        return self.step(begin + number, reads[number], recurrents[number], states)


def _empty_results(call: SteppedArguments, keep: bool) -> SteppedResults:
    steps, batch, _ = call.inputs.shape
    hidden, others = call.hidden.shape[1], len(call.first) - 1
    exact = accumulate_dtype(call.inputs.dtype)
    blocks = len(_blocks(call)) if keep else 0
    return SteppedResults(
        call.inputs.new_empty(steps, batch, hidden),
        call.inputs.new_empty(batch, hidden),
        call.inputs.new_empty(others, batch, hidden, dtype=exact),
        call.inputs.new_empty(others, blocks, batch, hidden, dtype=exact),
    )


def _forward(call: SteppedArguments, keep: bool) -> SteppedResults:
    stepped, results = _SteppedCall(call), _empty_results(call, keep)
    results.last_h.copy_(call.first[0])
    for target, part in zip(results.last, call.first[1:], strict=True):
        target.copy_(part)
    state = (results.last_h, *results.last.unbind(0))
    for number in steps_of(range(len(stepped.blocks))):
        begin, end = stepped.blocks[number]
        if keep:
            for target, part in zip(results.kept, state[1:], strict=True):
                target[number] = part
        # Steps ignore what they read at padded positions.
        reads = stepped.read_product(call.inputs[begin:end].contiguous())
        for step in steps_of(range(end - begin)):
            arguments = stepped.step(begin + step, reads[step], stepped.recurrent_product(state[0]), state)
            stepped.run.step_forward_into(arguments, state, results.outputs[begin + step])
    return results


class _SteppedSums:
    """Gradients that are summed over all blocks."""

    def __init__(self, stepped: _SteppedCall) -> None:
        call = stepped.call
        exact = stepped.exact if len(stepped.blocks) > 1 else call.input.dtype
        self.input, self.hidden = (
            torch.empty_like(part, dtype=exact, memory_format=torch.contiguous_format)
            for part in (call.input, call.hidden)
        )
        self.read_bias, self.recurrent_bias = (
            stepped.input.new_empty(len(stepped.input), dtype=exact) for _ in range(2)
        )
        rows = stepped.run.rows_of_sums(stepped.call.inputs.shape[1])
        self.extra = [part.new_zeros(rows, part.shape[0]) for part in stepped.extra]
        self.inputs = torch.empty_like(stepped.call.inputs, memory_format=torch.contiguous_format)
        self._to_inputs = Product(stepped.input.t(), calls=len(stepped.blocks))
        self._fresh = True

    def add(
        self, dreads: Tensor, drecurrents: Tensor, read: Tensor, before: Tensor, begin: int, end: int
    ) -> None:
        """Adds a block's contribution: dreads and drecurrents (K, B, G H), read (K, B, I), before (K, B, H)."""
        add_outer(self.input, dreads, read, fresh=self._fresh)
        add_outer(self.hidden, drecurrents, before, fresh=self._fresh)
        for total, values in ((self.read_bias, dreads), (self.recurrent_bias, drecurrents)):
            total.copy_(add_rows(values)) if self._fresh else total.add_(add_rows(values))
        self._to_inputs.into(self.inputs[begin:end].flatten(0, 1), dreads.flatten(0, 1))
        self._fresh = False


def states_beside_h(
    run: EagerSteps, step_at: Callable[[int, Tensor], CellStep], before: Tensor, kept: Tensor
) -> Tensor:
    """Returns the states beside h before and after the steps of a block, (K + 1, ., B, H), from those before it.

    ``step_at`` returns the arguments of a step from the states beside h before it; ``before`` (K, B, H) is h.
    """
    states = kept.new_empty(len(before) + 1, *kept.shape)
    states[0] = kept
    if len(kept):
        unseen = torch.empty_like(before[0]), torch.empty_like(before[0])
        for number in steps_of(range(len(before))):
            after = unseen[0], *states[number + 1].unbind(0)
            run.step_forward_into(step_at(number, states[number]), after, unseen[1])
    return states


def _backward(call: SteppedArguments, results: SteppedResults, incoming: Incoming) -> Gradients:
    stepped = _SteppedCall(call)
    sums = _SteppedSums(stepped)
    to_h = Product(stepped.hidden.t(), calls=stepped.steps)
    doutputs, dlast = incoming["outputs"], incoming["last"]
    gradients = incoming["last_h"], *([None] * (len(call.first) - 1) if dlast is None else dlast.unbind(0))
    dstate = tuple(
        torch.zeros_like(part) if gradient is None else gradient.clone(memory_format=torch.contiguous_format)
        for part, gradient in zip(call.first, gradients, strict=True)
    )
    for number in steps_of(range(len(stepped.blocks))[::-1]):
        begin, end = stepped.blocks[number]
        read, before = stepped.read(begin, end), previous(results.outputs, call.first[0], begin, end)
        reads, recurrents = stepped.read_product(read), stepped.recurrent_product(before)
        step_at = functools.partial(stepped.step_at, begin, reads, recurrents, before)
        states = states_beside_h(stepped.run, step_at, before, results.kept[:, number])
        dreads, drecurrents = torch.empty_like(reads), torch.empty_like(recurrents)
        for step in steps_of(range(end - begin)[::-1]):
            stepped.run.step_backward_into(
                step_at(step, states[step]),
                (before[step], *states[step + 1].unbind(0)),
                dstate,
                None if doutputs is None else rows_of(doutputs[begin + step]),
                StepGradients(dreads[step], drecurrents[step], sums.extra),
            )
            dstate = (to_h.plus(dstate[0], drecurrents[step]), *dstate[1:])
        sums.add(dreads, drecurrents, read, before, begin, end)
    return {
        "inputs": sums.inputs,
        "input": sums.input,
        "hidden": sums.hidden,
        "read_bias": sums.read_bias,
        "recurrent_bias": sums.recurrent_bias,
        "extra": [total.sum(0) for total in sums.extra],
        "first": dstate,
    }


_layer = RecurrentOperator(
    "econmt_ops::stepped_layer",
    SteppedArguments,
    SteppedResults,
    forward=_forward,
    fake=_empty_results,
    backward=_backward,
    saves=lambda _: (*SteppedArguments._fields, "outputs", "kept"),
)


def recompute(
    cell: StepCell,
    inputs: Tensor,
    weights: Any,
    state: Sequence[Tensor],
    lengths: Tensor | None,
    *,
    backend: str = "eager",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Runs one layer that keeps less than `reference` and recomputes it; see the module."""
    if cell is GRU and backend == "triton":
        batch, steps, _ = inputs.shape
        products = gru_products(batch, steps, state[0].shape[1], inputs.dtype, inputs.device)
        if products is not None:
            return gru(inputs, weights, state[0], lengths, products)
    parts = cell.split(weights)
    results = _layer(
        SteppedArguments(
            inputs.transpose(0, 1), *parts[:4], [*parts.extra], [*state], lengths, cell.name, backend
        )
    )
    # torch.export cannot store a list of no tensors.
    others = results.last.unbind(0) if len(state) > 1 else ()
    return results.outputs.transpose(0, 1), (results.last_h, *others)


IMPLEMENTATIONS = {
    "reference": (reference, Traits()),
    "recompute": (recompute, _RECOMPUTE),
    "compiled": (
        functools.partial(recompute, backend="compiled"),
        replace(_RECOMPUTE, warms_up=True, fake_implementation="recompute"),
    ),
    "triton": on_kernels(recompute, _RECOMPUTE),
}
"""Functions that run one layer, and take the cell first, with the traits of stacks of them, by name."""
