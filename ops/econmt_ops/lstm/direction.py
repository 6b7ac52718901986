"""One direction of a layer of the recomputing LSTM: its walk over the steps, and the way back.

B batch, T steps, I input size, H hidden, K steps of a block. Time comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends.protocol import StepKernels
from econmt_ops.core.chunks import reaches, split_blocks
from econmt_ops.core.gemm import add_rows
from econmt_ops.core.loops import steps_of
from econmt_ops.core.low_rank import AnyProduct, add_gradient, gradient_of, product_of, tensors_of_matrices
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.repeated import add_repeated, clean_rows, look_up
from econmt_ops.core.weights import AnyLSTMWeights, LowRank, LSTMWeights, cast_weights
from econmt_ops.lstm.reference import STEPWISE, closed_gates, layer_by_torch
from econmt_ops.lstm.unrolled import UnrolledSteps


class Direction:
    """One direction of a layer: its tensors, of which it makes those of each block in the order of its walk.

    Attributes:
        steps, batch, hidden: T, B and H.
        blocks: (begin, end) of each block, in steps of the walk.
        weights: in the type of the inputs.
    """

    def __init__(
        self,
        inputs: Tensor,
        weights: AnyLSTMWeights,
        first_h: Tensor,
        first_c: Tensor,
        *,
        run: StepKernels,
        padding: Tensor | None,
        places: Tensor | None,
        reverse: bool,
        stash: str,
        layout: str,
    ) -> None:
        """Takes the arguments of a call.

        Args:
            inputs: (T, B, I); or, where places are given, the distinct rows (N, I).
            weights: in any type, so that nobody keeps a copy of them from one pass to the other.
            first_h, first_c: (B, H), the state before the walk.
            run: what a step computes between its products.
            padding: (T, B) bool, or None.
            places: (T, B), which row stands where; or None.
            reverse: whether it walks from the last step to the first.
            stash: the level. layout: of the weights, see `econmt_ops.core.gemm`.
        """
        self.places = None
        self.inputs = inputs
        self.steps, self.batch = inputs.shape[:2] if places is None else places.shape
        if places is not None:
            # Padded positions read one row more, which `table` adds.
            self.places = places if padding is None else places.masked_fill(padding, len(inputs))
            self.inputs = clean_rows(inputs, places, padding)
        self.hidden = weights.hidden.shape[1]
        self.weights = weights = cast_weights(weights, inputs.dtype)
        self.first_h, self.first_c = first_h, first_c
        self.run, self.padding, self.reverse, self.stash, self.layout = run, padding, reverse, stash, layout
        self.accumulate = accumulate_dtype(inputs.dtype)
        self.blocks = split_blocks(self.steps, self.batch, self.hidden, self.accumulate)
        self.unrolled = None
        if isinstance(weights.hidden, LowRank) and UnrolledSteps.serves(run):
            self.unrolled = UnrolledSteps(weights.hidden)

    def walk(self, sequence: Tensor, begin: int, end: int) -> Tensor:
        """What the walk meets of a sequence (T, B, .) in its steps begin to end."""
        if not self.reverse:
            return sequence[begin:end]
        return sequence[self.steps - end : self.steps - begin].flip(0)

    def put(self, sequence: Tensor, begin: int, end: int, part: Tensor, add: bool = False) -> None:
        """Puts, or adds, what the walk made in its steps begin to end where it belongs."""
        if self.reverse:
            begin, end, part = self.steps - end, self.steps - begin, part.flip(0)
        if add:
            sequence[begin:end] += part
        else:
            sequence[begin:end] = part

    def read(self, begin: int, end: int) -> Tensor:
        """Inputs (K, B, I) of a block, zero at padded positions; or the places (K, B)."""
        if self.places is not None:
            return self.walk(self.places, begin, end)
        inputs = self.walk(self.inputs, begin, end).contiguous()
        if self.padding is None:
            return inputs
        return inputs.masked_fill(self.walk(self.padding, begin, end).unsqueeze(2), 0.0)

    def products(self, inputs: Tensor, begin: int, end: int) -> Tensor:
        """The share of a block's inputs in the gates (K, B, 4H), a new tensor; padded positions close their gates.

        Args:
            inputs: as :meth:`read` gives them. begin, end: the block.
        """
        if self.places is not None:
            return look_up(self.table, inputs)
        products = self.read_product(inputs)
        if self.padding is None:
            return products
        padding = self.walk(self.padding, begin, end).unsqueeze(2)
        return torch.where(padding, closed_gates(self.weights), products)

    @functools.cached_property
    def read_product(self) -> AnyProduct:
        """x W^T + b."""
        return product_of(self.weights.input, self.weights.bias, self.layout, len(self.blocks))

    @functools.cached_property
    def table(self) -> Tensor:
        """The share of each distinct row in the gates, and that of padding, which closes them: (N + 1, 4H)."""
        shares = self.read_product(self.inputs)
        if self.padding is None:
            return shares
        return torch.cat([shares, closed_gates(self.weights).unsqueeze(0)])

    @functools.cached_property
    def recurrent_product(self) -> AnyProduct:
        """h U^T."""
        return product_of(self.weights.hidden, None, self.layout, self.steps)

    @functools.cached_property
    def to_h(self) -> AnyProduct:
        """dz U."""
        return product_of(self.weights.hidden.t(), None, self.layout, self.steps)

    def previous(self, outputs: Tensor, begin: int, end: int) -> Tensor:
        """h of the step before for the walk's steps begin to end, (K, B, H)."""
        if begin > 0:
            return self.walk(outputs, begin - 1, end - 1)
        return torch.cat([self.first_h.unsqueeze(0), self.walk(outputs, 0, end - 1)], 0)

    def forward(
        self,
        outputs: Tensor,
        cells: Tensor,
        gates: Tensor | None,
        last_h: Tensor,
        last_c: Tensor,
        keep: bool,
    ) -> None:
        """Walks.

        Args:
            outputs: (T, B, H), is filled.
            cells: is filled if ``keep``: (T, B, H) c after each step of the walk, or (blocks, B, H) before each block.
            gates: (T, B, 4H), the inputs' share in the order of the walk, becomes what the way back reads; or None.
            last_h, last_c: (B, H), are filled with the state after the walk.
            keep: whether a backward pass will follow.
        """
        h, c = self.first_h, last_c.copy_(self.first_c)
        every_cell = keep and reaches(self.stash, "cells")
        # torch's own LSTM is the fastest forward pass, but keeps c in the type of the inputs and tells only the last.
        weights = self.weights
        by_torch = isinstance(weights, LSTMWeights) and h.dtype not in STEPWISE and not every_cell
        for number in steps_of(range(len(self.blocks))):
            begin, end = self.blocks[number]
            if keep and not every_cell:
                cells[number] = c
            if by_torch and isinstance(weights, LSTMWeights):
                h = self._walk_by_torch(weights, begin, end, h, c, outputs)
                continue
            given = self.products(self.read(begin, end), begin, end) if gates is None else gates[begin:end]
            h = self._walk_cells(
                given, begin, h, c, outputs, cells if every_cell else None, gates is not None
            )
        last_h.copy_(h)
        if every_cell:
            last_c.copy_(cells[-1])

    def _walk_by_torch(
        self, weights: LSTMWeights, begin: int, end: int, h: Tensor, c: Tensor, outputs: Tensor
    ) -> Tensor:
        """Walks a block from h and c, and gives the last h; c is overwritten."""
        inputs = self.read(begin, end)
        if self.places is not None:
            # torch's LSTM reads inputs written out; at padded positions a row of zeros.
            inputs = look_up(functional.pad(self.inputs, (0, 0, 0, 1)), inputs)
        padding = None if self.padding is None else self.walk(self.padding, begin, end).t()
        made, h, last_c = layer_by_torch(inputs.transpose(0, 1), weights, h, c, padding)
        self.put(outputs, begin, end, made.transpose(0, 1))
        c.copy_(last_c)
        return h

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
        """Walks a block whose gates (K, B, 4H) hold the inputs' share, and gives the last h.

        ``c`` (B, H) is overwritten, unless each c goes to ``cells`` (T, B, H).
        """
        done, before = 0, c if cells is None or begin == 0 else cells[begin - 1]
        if self.unrolled is not None:
            end = begin + len(gates)
            made = torch.empty_like(outputs[begin:end]) if self.reverse else outputs[begin:end]
            kept = None if cells is None else cells[begin:end]
            done = self.unrolled.forward(gates, h, before, made, kept, c, keep)
            if done:
                h, before = made[done - 1], c if kept is None else kept[done - 1]
                if self.reverse:
                    self.put(outputs, begin, begin + done, made[:done])
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
        outputs: Tensor,
        cells: Tensor,
        gates: Tensor | None,
        dinputs: Tensor,
        add: bool,
        dgates: Tensor | None = None,
    ) -> Gradients:
        """Walks back.

        Args:
            doutputs: (T, B, H), or None. dh, dc: (B, H), the gradients of the last state.
            outputs, cells, gates: what :meth:`forward` filled.
            dinputs: as the inputs, is written, or added to with ``add``.
            add: see ``dinputs``.
            dgates: (T, B, 4H), is filled with the gradients of the gates' sums, and no weight gets one; or None.
        """
        found = Gradients(self, dinputs, add, whole=dgates is None)
        dc = dc.to(self.accumulate, copy=True)
        for number in steps_of(range(len(self.blocks))[::-1]):
            begin, end = self.blocks[number]
            inputs, before = self.read(begin, end), self.previous(outputs, begin, end)
            if gates is None:
                sums = self.products(inputs, begin, end)
                sums += self.recurrent_product(before)
                made = self.run.prepare_gates(sums)
            else:
                made, sums = gates[begin:end], torch.empty_like(gates[begin:end])
            own = sums if dgates is None else dgates[begin:end]
            states = self._states(cells, number, made)
            incoming = None if doutputs is None else self.walk(doutputs, begin, end)
            dh, thin = self._walk_back(made, states, incoming, dh, dc, own)
            found.add(begin, end, own, inputs, before, thin)
        found.first_h, found.first_c = dh, dc
        return found

    def _states(self, cells: Tensor, number: int, gates: Tensor) -> Sequence[Tensor]:
        """c before a block of steps and after each of them, from what is kept."""
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
        """Walks back through a block whose gates (K, B, 4H) are given, and writes their gradients and ``dc``.

        Returns:
            The gradient of h before the block, and, if U is factorised, the products of the gates' gradients with its
            left factor, (K, B, r).
        """
        hidden = self.weights.hidden
        thin = dgates.new_empty(*dgates.shape[:2], hidden.rank) if isinstance(hidden, LowRank) else None
        done = 0 if self.unrolled is None else self.unrolled.whole(len(gates))
        for step in steps_of(range(done, len(gates))[::-1]):
            given = [dh] if incoming is None else [incoming[step], dh]
            self.run.cell_backward(gates[step], states[step], states[step + 1], given, dc, dgates[step])
            dh = self.to_h(dgates[step], None if thin is None else thin[step])
        if self.unrolled is not None and thin is not None and done:
            dh = self.unrolled.backward(gates[:done], states, incoming, dh, dc, dgates, thin)
        return dh, thin


class Gradients:
    """What large products after the steps of a block leave: the gradients of inputs and weights.

    Attributes:
        first_h, first_c: (B, H), the gradients of the state before the walk.
    """

    first_h: Tensor
    first_c: Tensor

    def __init__(self, direction: Direction, dinputs: Tensor, add: bool, whole: bool = True) -> None:
        """Begins.

        Args:
            direction: whose. dinputs: (T, B, I), or (N, I) of distinct rows; is written, or added to with ``add``.
            add: see ``dinputs``.
            whole: whether weights get gradients, too.
        """
        self._direction, self._dinputs, self._add, self._whole = direction, dinputs, add, whole
        weights, blocks = direction.weights, len(direction.blocks)
        self._to_inputs = product_of(weights.input.t(), None, direction.layout, blocks)
        self._table = None
        if not whole:
            return
        # A block's gradient is one product, rounded once either way; several are summed in a wider type.
        sums = direction.accumulate if blocks > 1 else direction.inputs.dtype
        self._input, self._hidden = (gradient_of(part, sums) for part in (weights.input, weights.hidden))
        self.bias = torch.zeros_like(weights.bias, dtype=sums)
        self._fresh = True
        if direction.places is not None:
            # One row more, for padding.
            rows, width = len(direction.inputs) + 1, len(weights.bias)
            self._table = self.bias.new_zeros(rows, width, dtype=direction.accumulate)

    def add(
        self, begin: int, end: int, dgates: Tensor, inputs: Tensor, before: Tensor, thin: Tensor | None
    ) -> None:
        """Adds a block's share.

        Args:
            begin, end: the block, in steps of the walk.
            dgates: (K, B, 4H).
            inputs: as `Direction.read` gives them. before: (K, B, H), h of the step before.
            thin: (K, B, r), the product of ``dgates`` with the left factor of U; or None.
        """
        weights = self._direction.weights
        if not self._whole:
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
        """Of the input's and the recurrent matrix, or of their factors; to be called once, at the end."""
        if self._table is not None:
            rows = self._direction.inputs
            table = self._table[: len(rows)].to(rows.dtype)
            read = self._direction.weights.input
            add_gradient(self._input, read, table.unsqueeze(0), rows.unsqueeze(0), fresh=True)
            given = self._to_inputs(table)
            self._dinputs.copy_(self._dinputs + given if self._add else given)
        return tensors_of_matrices([self._input]), tensors_of_matrices([self._hidden])
