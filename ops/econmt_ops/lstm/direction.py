"""One direction of a layer of the recomputing LSTM: its forward loop over the steps and its backward loop.

Sizes: B batch, T steps, I input size, H hidden, K steps of a block. Time is the first axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends.compiled import CompiledSteps
from econmt_ops.backends.eager import EagerSteps
from econmt_ops.core.chunks import reaches, split_blocks
from econmt_ops.core.loops import steps_of
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.weights import AnyLSTMWeights, LowRank, LSTMWeights, cast_weights
from econmt_ops.dispatch.registration import Incoming, RecurrentOperator
from econmt_ops.lstm import unrolled
from econmt_ops.lstm.reference import closed_gates, layer_by_torch, runs_by_torch
from econmt_ops.products.gemm import add_rows
from econmt_ops.products.low_rank import (
    AnyProduct,
    add_gradient,
    gradient_of,
    product_of,
    tensors_of_layers,
    tensors_of_matrices,
)
from econmt_ops.products.repeated import Inputs, UniqueRows, add_repeated, clean_rows, values_of
from econmt_ops.products.stack import StackOptions


class LSTMArguments(NamedTuple):
    """Arguments of one layer that runs forwards, backwards, or in both directions into one output.

    Weights may have another type than the inputs, whose type is used for the computation; each gradient has the type of
    its argument.

    Attributes:
        inputs: (T, B, I); with ``places`` distinct rows (N, I).
        weights, recurrents: per direction (4H, I) and (4H, H); factorised matrices as left, then right factor.
        biases: (4H,) each. first_h, first_c: (B, H) each, before the walk of each direction.
        lengths: (B,), or None. places: (T, B), row index of each position; or None.
        reverse: per direction, True to walk from the last step to the first.
        gate_gradient: (T, B, 4H), or None; see `econmt_ops.lstm`. It requires one direction and no ``places``.
        stash: the level, see `econmt_ops.core.chunks.STASHES`.
        backend: see `econmt_ops.backends.steps_for`; or "persistent", whose first states are empty lists for zeros.
        products: type of the products in the recurrence of persistent kernels.
        gru: see `econmt_ops.lstm.persistent_operands.LayerSettings`.
    """

    inputs: Tensor
    weights: list[Tensor]
    recurrents: list[Tensor]
    biases: list[Tensor]
    first_h: list[Tensor]
    first_c: list[Tensor]
    lengths: Tensor | None
    places: Tensor | None
    reverse: list[bool]
    gate_gradient: Tensor | None
    stash: str
    backend: str
    products: torch.dtype
    gru: bool

    def blocks(self) -> list[tuple[int, int]]:
        """Returns the blocks of steps; see `split_blocks`."""
        steps, batch = (self.inputs if self.places is None else self.places).shape[:2]
        hidden, dtype = self.biases[0].shape[0] // 4, accumulate_dtype(self.inputs.dtype)
        return split_blocks(steps, batch, hidden, dtype, self.backend == "triton", self.stash)


class LSTMResults(NamedTuple):
    """Results of a layer, including the tensors saved if a backward pass follows; or those of one of its directions.

    Attributes:
        outputs: (T, B, D H).
        cells: (D, T, B, H), c after each step of a walk, or (D, blocks, B, H) before each block; of persistent kernels
            c before the step at each position, or no steps.
        gates: (D, T, B, 4H) in the order of the walks, if the stash level includes them; else no steps.
        last_h, last_c: (D, B, H), after each walk's last step.
    """

    outputs: Tensor
    cells: Tensor
    gates: Tensor
    last_h: Tensor
    last_c: Tensor


def empty_results(call: LSTMArguments, keep: bool) -> LSTMResults:
    """Allocates the results; tensors that are not kept have no steps."""
    inputs, directions, hidden = call.inputs, len(call.biases), call.biases[0].shape[0] // 4
    steps, batch = (inputs if call.places is None else call.places).shape[:2]
    accumulate = accumulate_dtype(inputs.dtype)
    blocks = 0 if call.backend == "persistent" else len(call.blocks())
    cells = (steps if reaches(call.stash, "cells") else blocks) if keep else 0
    gates = steps if keep and reaches(call.stash, "gates") else 0
    return LSTMResults(
        inputs.new_empty(steps, batch, directions * hidden),
        inputs.new_empty(directions, cells, batch, hidden, dtype=accumulate),
        inputs.new_empty(directions, gates, batch, 4 * hidden),
        inputs.new_empty(directions, batch, hidden),
        inputs.new_empty(directions, batch, hidden, dtype=accumulate),
    )


def layer_operator(
    name: str,
    forward: Callable[[LSTMArguments, bool], LSTMResults],
    backward: Callable[[LSTMArguments, LSTMResults, Incoming], Mapping[str, Any]],
) -> RecurrentOperator[LSTMArguments, LSTMResults]:
    """Registers the operator of a layer. With a gate gradient its weights, which get none, are constants."""
    return RecurrentOperator(
        f"econmt_ops::{name}",
        LSTMArguments,
        LSTMResults,
        forward=forward,
        fake=empty_results,
        backward=backward,
        saves=lambda _: (*LSTMArguments._fields, "outputs", "cells", "gates"),
        constants=lambda call: () if call.gate_gradient is None else ("weights", "recurrents", "biases"),
    )


def run_layer(
    operator: RecurrentOperator[LSTMArguments, LSTMResults],
    inputs: Inputs,
    weights: Sequence[AnyLSTMWeights],
    first: Sequence[tuple[Tensor, Tensor]],
    options: StackOptions,
    reverse: Sequence[bool],
    stash: str,
    backend: str,
    products: torch.dtype | None = None,
    gru: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one layer in D directions; returns outputs (B, T, D H), and h and c (D, B, H) after each walk's last step.

    At padded positions h is 0.
    """
    matrices, recurrents, biases = tensors_of_layers(weights)
    results = operator(
        LSTMArguments(
            inputs.rows if isinstance(inputs, UniqueRows) else inputs.transpose(0, 1),
            matrices,
            recurrents,
            biases,
            [h for h, _ in first],
            [c for _, c in first],
            options.lengths,
            inputs.places.t() if isinstance(inputs, UniqueRows) else None,
            list(reverse),
            options.gate_gradient,
            stash,
            backend,
            products or values_of(inputs).dtype,
            gru,
        )
    )
    return results.outputs.transpose(0, 1), results.last_h, results.last_c


class Direction:
    """One direction of a layer. Slices of its tensors are in its processing order of the steps, called its walk.

    Attributes:
        steps, batch, hidden: T, B and H.
        blocks: (begin, end) of each block, in steps of the walk.
        weights: in the type of the inputs.
    """

    def __init__(
        self,
        call: LSTMArguments,
        number: int,
        weights: AnyLSTMWeights,
        run: EagerSteps,
        padding: Tensor | None,
    ) -> None:
        """Prepares the tensors of a direction by its number; ``padding`` is (T, B) bool, or None.

        The weights may have any type; they are cast here, so that no copy is kept between the two passes.
        """
        self.places = None
        self.inputs = inputs = call.inputs
        places = call.places
        self.steps = len(inputs if places is None else places)
        if places is not None:
            # Padded positions read an extra row that `table` appends.
            self.places = places if padding is None else places.masked_fill(padding, len(inputs))
            self.inputs = clean_rows(inputs, places, padding)
        self.hidden = weights.hidden.shape[1]
        self.weights = weights = cast_weights(weights, inputs.dtype)
        self.first_h, self.first_c = call.first_h[number], call.first_c[number]
        self.run, self.padding, self.reverse = run, padding, call.reverse[number]
        self.stash = call.stash
        self.accumulate = accumulate_dtype(inputs.dtype)
        self.blocks = call.blocks()
        self.is_compiled = isinstance(run, CompiledSteps)

    def walk(self, sequence: Tensor, begin: int, end: int) -> Tensor:
        """Returns a sequence (T, B, .) at steps begin to end of the walk, in its order."""
        if not self.reverse:
            return sequence[begin:end]
        return sequence[self.steps - end : self.steps - begin].flip(0)

    def put(self, sequence: Tensor, begin: int, end: int, part: Tensor, add: bool = False) -> None:
        """Writes, or adds, the results of steps begin to end of the walk to their positions in a sequence."""
        if self.reverse:
            begin, end, part = self.steps - end, self.steps - begin, part.flip(0)
        if add:
            sequence[begin:end] += part
        else:
            sequence[begin:end] = part

    def read(self, begin: int, end: int) -> Tensor:
        """Returns the inputs (K, B, I) of a block, zero at padded positions; or the row indices (K, B)."""
        if self.places is not None:
            return self.walk(self.places, begin, end)
        inputs = self.walk(self.inputs, begin, end).contiguous()
        if self.padding is None:
            return inputs
        return inputs.masked_fill(self.walk(self.padding, begin, end).unsqueeze(2), 0.0)

    def products(self, inputs: Tensor, begin: int, end: int) -> Tensor:
        """Returns the inputs' share of a block's gates, a new tensor (K, B, 4H), with closed gates at padded positions.

        ``inputs`` are what :meth:`read` returned.
        """
        if self.places is not None:
            return functional.embedding(inputs, self.table)
        products = self.read_product(inputs)
        if self.padding is None:
            return products
        padding = self.walk(self.padding, begin, end).unsqueeze(2)
        return torch.where(padding, closed_gates(self.weights), products)

    @functools.cached_property
    def read_product(self) -> AnyProduct:
        """Product x W^T + b."""
        return product_of(self.weights.input, self.weights.bias, calls=len(self.blocks))

    @functools.cached_property
    def table(self) -> Tensor:
        """Share of each distinct row in the gates, plus a row for padding, which closes them: (N + 1, 4H)."""
        shares = self.read_product(self.inputs)
        if self.padding is None:
            return shares
        return torch.cat([shares, closed_gates(self.weights).unsqueeze(0)])

    @functools.cached_property
    def recurrent_product(self) -> AnyProduct:
        """Product h U^T."""
        return product_of(self.weights.hidden, None, calls=self.steps)

    @functools.cached_property
    def to_h(self) -> AnyProduct:
        """Product dz U."""
        return product_of(self.weights.hidden.t(), None, calls=self.steps)

    def previous(self, outputs: Tensor, begin: int, end: int) -> Tensor:
        """Returns h of the previous step for steps begin to end of the walk, (K, B, H)."""
        if begin > 0:
            return self.walk(outputs, begin - 1, end - 1)
        return torch.cat([self.first_h.unsqueeze(0), self.walk(outputs, 0, end - 1)], 0)

    def forward(self, results: LSTMResults, keep: bool) -> None:
        """Runs the forward loop and fills the results of this direction; ``keep``: a backward pass will follow.

        Gates, if there are any, hold the inputs' share and are overwritten by what the backward pass reads.
        """
        outputs, cells, gates, last_h, last_c = results
        keeps_gates = len(gates) > 0
        h, c = self.first_h, last_c.copy_(self.first_c)
        every_cell = keep and reaches(self.stash, "cells")
        # torch.lstm is the fastest forward pass, but it keeps c in the type of the inputs and returns only the last c.
        by_torch = isinstance(self.weights, LSTMWeights) and runs_by_torch(h.dtype) and not every_cell
        for number in steps_of(range(len(self.blocks))):
            begin, end = self.blocks[number]
            if keep and not every_cell:
                cells[number] = c
            if by_torch:
                h = self._walk_by_torch(begin, end, h, c, outputs)
                continue
            shares = gates[begin:end] if keeps_gates else self.products(self.read(begin, end), begin, end)
            h = self._walk_cells(shares, begin, h, c, outputs, cells if every_cell else None, keeps_gates)
        last_h.copy_(h)
        if every_cell:
            last_c.copy_(cells[-1])

    def _walk_by_torch(self, begin: int, end: int, h: Tensor, c: Tensor, outputs: Tensor) -> Tensor:
        """Runs a block by torch.lstm from h and c; returns the last h and overwrites c."""
        weights, inputs = self.weights, self.read(begin, end)
        assert isinstance(weights, LSTMWeights)
        if self.places is not None:
            # torch.lstm needs the expanded inputs; padded positions read an appended row of zeros.
            inputs = functional.embedding(inputs, functional.pad(self.inputs, (0, 0, 0, 1)))
        padding = None if self.padding is None else self.walk(self.padding, begin, end).t()
        state = h.unsqueeze(0), c.unsqueeze(0)
        block_outputs, last_h, last_c = layer_by_torch(inputs.transpose(0, 1), [weights], *state, padding)
        self.put(outputs, begin, end, block_outputs.transpose(0, 1))
        c.copy_(last_c.squeeze(0))
        return last_h.squeeze(0)

    def _walk_cells(
        self,
        gates: Tensor,
        begin: int,
        h: Tensor,
        c: Tensor,
        outputs: Tensor,
        cells: Tensor | None,
        keep: bool,
    ) -> Tensor:
        """Runs a block step by step, given gates (K, B, 4H) that hold the inputs' share; returns the last h.

        ``c`` (B, H) is overwritten, unless each c is written to ``cells`` (T, B, H).
        """
        done, before, hidden = 0, c if cells is None or begin == 0 else cells[begin - 1], self.weights.hidden
        if self.is_compiled and isinstance(hidden, LowRank):
            made, states = unrolled.forward(hidden, gates, h, before, keep)
            done = len(made)
            if done:
                h, before = made[-1], states[-1]
                first = self.steps - begin - done if self.reverse else begin
                torch.stack(made[::-1] if self.reverse else made, out=outputs[first : first + done])
                if cells is None:
                    before = c.copy_(before)
                else:
                    torch.stack(states, out=cells[begin : begin + done])
        totals = gates.unbind(0)
        for number in steps_of(range(done, len(gates))):
            step, total = begin + number, totals[number]
            after = c if cells is None else cells[step]
            recurrent = self.recurrent_product.share(total, h)
            h = outputs[self.steps - 1 - step if self.reverse else step]
            self.run.cell_forward(total, before, after, [h], keep=keep, recurrent=recurrent)
            before = after
        return h

    def backward(
        self,
        doutputs: Tensor | None,
        dh: Tensor,
        dc: Tensor,
        results: LSTMResults,
        dinputs: Tensor,
        add: bool,
        dgates: Tensor | None = None,
    ) -> Gradients:
        """Runs the backward loop.

        Args:
            doutputs: (T, B, H), or None. dh, dc: (B, H), the gradients of the last state.
            results: as filled by :meth:`forward`.
            dinputs: shaped like the inputs, is written, or added to if ``add``.
            dgates: (T, B, 4H), is filled with the gradients of the gates' sums, and the weights get no gradients; or
                None.
        """
        outputs, cells, gates, _, _ = results
        gradients = Gradients(self, dinputs, add, with_weights=dgates is None)
        dc = dc.to(self.accumulate, copy=True)
        for number in steps_of(range(len(self.blocks))[::-1]):
            begin, end = self.blocks[number]
            inputs, before = self.read(begin, end), self.previous(outputs, begin, end)
            if len(gates):
                block_gates, sums = gates[begin:end], torch.empty_like(gates[begin:end])
            else:
                sums = self.products(inputs, begin, end)
                sums += self.recurrent_product(before)
                block_gates = self.run.prepare_gates(sums)
            block_dgates = sums if dgates is None else dgates[begin:end]
            states = self._states(cells, number, block_gates)
            incoming = None if doutputs is None else self.walk(doutputs, begin, end)
            dh, thin = self._walk_back(block_gates, states, incoming, dh, dc, block_dgates)
            gradients.add(begin, end, block_dgates, inputs, before, thin)
        gradients.first_h, gradients.first_c = dh, dc
        return gradients

    def _states(self, cells: Tensor, number: int, gates: Tensor) -> Sequence[Tensor]:
        """Returns c before a block of steps and after each of them, from the stash."""
        begin, end = self.blocks[number]
        if not reaches(self.stash, "cells"):
            return self.run.scan_cells(gates, cells[number]).unbind(0)
        return (cells[begin - 1] if begin > 0 else self.first_c, *cells[begin:end].unbind(0))

    def _walk_back(
        self,
        gates: Tensor,
        states: Sequence[Tensor],
        incoming: Tensor | None,
        dh: Tensor,
        dc: Tensor,
        dgates: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs a block backward, given its gates (K, B, 4H); writes their gradients and ``dc``.

        Returns the gradient of h before the block and, if U is factorised, the products of the gates' gradients with
        its left factor, (K, B, r).
        """
        hidden = self.weights.hidden
        thin = dgates.new_empty(*dgates.shape[:2], hidden.rank) if isinstance(hidden, LowRank) else None
        done = unrolled.grouped_steps(len(gates)) if self.is_compiled and thin is not None else 0
        for step in steps_of(range(done, len(gates))[::-1]):
            step_dh = [dh] if incoming is None else [incoming[step], dh]
            self.run.cell_backward(gates[step], states[step], states[step + 1], step_dh, dc, dgates[step])
            dh = self.to_h(dgates[step], None if thin is None else thin[step])
        if done and isinstance(hidden, LowRank) and thin is not None:
            dh = unrolled.backward(hidden, gates[:done], states, incoming, dh, dc, dgates, thin)
        return dh, thin


class Gradients:
    """Gradients of inputs and weights, computed by large products after the steps of each block.

    Attributes:
        first_h, first_c: (B, H), the gradients of the state before the walk.
    """

    first_h: Tensor
    first_c: Tensor

    def __init__(self, direction: Direction, dinputs: Tensor, add: bool, with_weights: bool = True) -> None:
        """Allocates the sums; ``dinputs`` (T, B, I), or distinct rows (N, I), is written, or added to if ``add``."""
        self._direction, self._dinputs, self._add, self._with_weights = direction, dinputs, add, with_weights
        weights, blocks = direction.weights, len(direction.blocks)
        self._to_inputs = product_of(weights.input.t(), None, calls=blocks)
        self._table = None
        if not with_weights:
            return
        # The gradient of a single block is one product, rounded once in either case; several are summed in a wider
        # type.
        sums = direction.accumulate if blocks > 1 else direction.inputs.dtype
        self._input, self._hidden = (gradient_of(part, sums) for part in (weights.input, weights.hidden))
        self.bias = torch.zeros_like(weights.bias, dtype=sums)
        self._fresh = True
        if direction.places is not None:
            # One extra row for padding.
            rows, width = len(direction.inputs) + 1, len(weights.bias)
            self._table = self.bias.new_zeros(rows, width, dtype=direction.accumulate)

    def add(
        self, begin: int, end: int, dgates: Tensor, inputs: Tensor, before: Tensor, thin: Tensor | None
    ) -> None:
        """Adds the gradients of a block: dgates (K, B, 4H), the inputs as read, and h of the previous step (K, B, H).

        ``thin`` (K, B, r) is the product of ``dgates`` with the left factor of U; or None.
        """
        weights = self._direction.weights
        if not self._with_weights:
            self._direction.put(self._dinputs, begin, end, self._to_inputs(dgates), self._add)
            return
        add_gradient(self._hidden, weights.hidden, dgates, before, thin, fresh=self._fresh)
        self.bias += add_rows(dgates)
        if self._table is not None:
            add_repeated(self._table, inputs, dgates)
        else:
            add_gradient(self._input, weights.input, dgates, inputs, fresh=self._fresh)
            self._direction.put(self._dinputs, begin, end, self._to_inputs(dgates), self._add)
        self._fresh = False

    def matrices(self) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the gradients of input and recurrent matrix, or of their factors; called once, at the end."""
        if self._table is not None:
            rows = self._direction.inputs
            table = self._table[: len(rows)].to(rows.dtype)
            read = self._direction.weights.input
            add_gradient(self._input, read, table.unsqueeze(0), rows.unsqueeze(0), fresh=True)
            dinputs = self._to_inputs(table)
            self._dinputs.copy_(self._dinputs + dinputs if self._add else dinputs)
        return tensors_of_matrices([self._input]), tensors_of_matrices([self._hidden])
