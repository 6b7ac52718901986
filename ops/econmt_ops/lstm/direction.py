"""One direction of a layer of the recomputing LSTM: its walk over the steps, and the way back.

B batch, T steps, I input size, H hidden, K steps of a block. Time comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.backends import steps as step_functions
from econmt_ops.core.chunks import reaches, scan_cells, split_blocks
from econmt_ops.core.gemm import add_rows
from econmt_ops.core.low_rank import add_gradient, gradient_of, product_of, tensors_of_matrices
from econmt_ops.core.precision import accumulate_dtype
from econmt_ops.core.repeated import add_repeated, clean_rows, look_up
from econmt_ops.core.weights import AnyLSTMWeights, LowRank, LSTMWeights, cast_weights
from econmt_ops.lstm.cells import cells as cell_functions
from econmt_ops.lstm.reference import STEPWISE, closed_gates, layer_by_torch
from econmt_ops.lstm.schedule import Schedule
from econmt_ops.lstm.thin import ThinSteps


class Direction:
    """One direction of a layer: its tensors in the order in which its walk meets them.

    Attributes:
        inputs: (T, B, I); or, where places are given, the distinct rows (N, I), zero where only padding reads them.
        places: (T, B), which row stands where, N at padded positions; or None.
        padding: (T, B) or None.
        weights: in the type of the inputs.
    """

    def __init__(
        self,
        inputs: Tensor,
        weights: AnyLSTMWeights,
        first_h: Tensor,
        first_c: Tensor,
        padding: Tensor | None,
        places: Tensor | None,
        reverse: bool,
        stash: str,
        schedule: str,
    ) -> None:
        self.places = None
        if places is None:
            self.inputs = inputs.transpose(0, 1)
            self.steps, self.batch, _ = self.inputs.shape
        else:
            self.places = places.t() if padding is None else places.t().masked_fill(padding, len(inputs))
            self.steps, self.batch = self.places.shape
            self.inputs = clean_rows(inputs, places.t(), padding)
        self.hidden = weights.hidden.shape[1]
        # They may come in another type, so that nobody keeps a copy of them from one pass to the other.
        self.weights = weights = cast_weights(weights, inputs.dtype)
        self.first_h, self.first_c = first_h, first_c
        self.padding, self.reverse, self.stash = padding, reverse, stash
        self.accumulate = accumulate_dtype(inputs.dtype)
        self.blocks = split_blocks(self.steps, self.batch, self.hidden, self.accumulate)
        self.schedule = Schedule.parse(schedule)
        self.run = cell_functions(self.schedule.pointwise)
        # In the accumulate type nothing is lost by keeping gates as the backward pass wants them.
        self.keeps_activated = self.accumulate == inputs.dtype and not isinstance(weights.hidden, LowRank)
        self.advance = self.run.activated if self.keeps_activated else self.run.forward

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

    def read(self, begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Inputs (K, B, I) of a block, zero where its padding (K, B) is, or the places (K, B); and the padding."""
        if self.places is not None:
            return self.walk(self.places, begin, end), None
        inputs = self.walk(self.inputs, begin, end).contiguous()
        if self.padding is None:
            return inputs, None
        padding = self.walk(self.padding, begin, end)
        return inputs.masked_fill(padding.unsqueeze(2), 0.0), padding

    def products(self, inputs: Tensor, padding: Tensor | None) -> Tensor:
        """The input's share of the gates (K, B, 4H), a new tensor; padded positions have their gates closed.

        Args:
            inputs, padding: of a block, as :meth:`read` gives them.
        """
        if self.places is not None:
            return look_up(self.table, inputs)
        products = self.read_product(inputs)
        if padding is None:
            return products
        return torch.where(padding.unsqueeze(2), closed_gates(self.weights), products)

    @functools.cached_property
    def read_product(self) -> Callable[[Tensor], Tensor]:
        """x W^T + b."""
        return product_of(self.weights.input, self.weights.bias, self.schedule.weights, len(self.blocks))

    @functools.cached_property
    def table(self) -> Tensor:
        """The share of each distinct row in the gates, and that of padding, which closes them: (N + 1, 4H)."""
        shares: Tensor = self.read_product(self.inputs)
        return (
            shares if self.padding is None else torch.cat([shares, closed_gates(self.weights).unsqueeze(0)])
        )

    @functools.cached_property
    def recurrent_product(self) -> Callable[[Tensor], Tensor]:
        """h U^T."""
        return product_of(self.weights.hidden, None, self.schedule.weights, self.steps)

    @functools.cached_property
    def to_h(self) -> Callable[[Tensor], Tensor]:
        """dz U."""
        return product_of(self.weights.hidden.t(), None, self.schedule.weights, self.steps)

    @functools.cached_property
    def thin(self) -> ThinSteps | None:
        """The steps if U is factorised."""
        hidden = self.weights.hidden
        if not isinstance(hidden, LowRank):
            return None
        return ThinSteps(hidden, self.schedule.pointwise, self.batch)

    def previous(self, outputs: Tensor, begin: int, end: int) -> Tensor:
        """h of the step before for the walk's steps begin to end, (K, B, H)."""
        if begin > 0:
            return self.walk(outputs, begin - 1, end - 1)
        return torch.cat([self.first_h.unsqueeze(0), self.walk(outputs, 0, end - 1)], 0)

    def forward(self, outputs: Tensor, cells: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Walks, fills outputs (T, B, H) and cells; returns the last h and c (B, H), and the gates if they are kept.

        The gates (T, B, 4H) are in the order of the walk: before their nonlinearities, but in the accumulate type, of
        whole matrices, after them.
        """
        h, c = self.first_h, self.first_c
        every_cell = keep and reaches(self.stash, "cells")
        if keep and reaches(self.stash, "gates"):
            gates = self.products(*self.read(0, self.steps))
            return (*self._walk_cells(gates, 0, h, c, outputs, cells, keep_gates=True), gates)
        # torch's own LSTM is the fastest forward pass, but keeps c in the type of the inputs and tells only the last.
        weights = self.weights
        by_torch = isinstance(weights, LSTMWeights) and h.dtype not in STEPWISE and not every_cell
        for number, (begin, end) in enumerate(self.blocks):
            if keep and not every_cell:
                cells[number] = c
            inputs, padding = self.read(begin, end)
            if by_torch and isinstance(weights, LSTMWeights):
                mask = None if self.padding is None else self.walk(self.padding, begin, end).t()
                if self.places is not None:
                    # torch's LSTM reads inputs written out; at padded positions a row of zeros.
                    inputs = look_up(functional.pad(self.inputs, (0, 0, 0, 1)), inputs)
                made, h, c = layer_by_torch(inputs.transpose(0, 1), weights, h, c, mask)
                self.put(outputs, begin, end, made.transpose(0, 1))
                continue
            kept = cells if every_cell else None
            h, c = self._walk_cells(self.products(inputs, padding), begin, h, c, outputs, kept)
        return h, c, None

    def _walk_cells(
        self,
        gates: Tensor,
        begin: int,
        h: Tensor,
        c: Tensor,
        outputs: Tensor,
        cells: Tensor | None,
        keep_gates: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Walks from step ``begin`` on; ``gates`` (K, B, 4H), the input's share, becomes the sum if it is kept."""
        if self.thin is not None:
            end = begin + len(gates)
            made = torch.empty_like(outputs[begin:end]) if self.reverse else outputs[begin:end]
            kept = None if cells is None else cells[begin:end]
            h, c = self.thin.forward(gates, h, c, made, kept, keep_gates)
            if self.reverse:
                self.put(outputs, begin, end, made)
            return h, c
        spare = (torch.empty_like(c), torch.empty_like(c))
        for step, total in enumerate(gates.unbind(0), start=begin):
            after = spare[step % 2] if cells is None else cells[step]
            recurrent = self.recurrent_product(h)
            h = outputs[self.steps - 1 - step if self.reverse else step]
            self.advance(total, recurrent, c, h, after)
            c = after
        return h, c

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
    ) -> tuple[list[Tensor], ...]:
        """Walks back, puts dinputs (T, B, I) or adds to it, and returns the gradients of weights and first state."""
        found = Gradients(self, dinputs, add)
        for number, (begin, end) in reversed(list(enumerate(self.blocks))):
            inputs, padding = self.read(begin, end)
            before = self.previous(outputs, begin, end)
            if gates is None:
                total = self.products(inputs, padding)
                total += self.recurrent_product(before)
                dgates = total
            else:
                total = gates[begin:end]
                dgates = torch.empty_like(total)
            incoming = None if doutputs is None else self.walk(doutputs, begin, end)
            sums = self.walks_sums(kept=gates is not None)
            walked = total if sums else self.activate(total, kept=gates is not None)
            states = self._states(cells, number, walked)
            dh, dc, thins = self._walk_back(walked, states, incoming, dh, dc, dgates, sums)
            found.add(begin, end, dgates, inputs, before, thins)
        return *found.weights(), [dh], [dc]

    def walks_sums(self, kept: bool) -> bool:
        """Whether the way back takes gates as sums, so that each step makes their nonlinearities while it has them.

        Args:
            kept: whether the gates were kept.
        """
        return self.thin is None and reaches(self.stash, "cells") and not (kept and self.keeps_activated)

    def activate(self, gates: Tensor, kept: bool) -> Tensor:
        """Gates (..., 4H) after their nonlinearities.

        Args:
            gates: as they were kept, or sums.
            kept: which of both.
        """
        if kept and self.keeps_activated:
            return gates
        return step_functions.activate(gates, self.accumulate)

    def _states(self, cells: Tensor, number: int, activated: Tensor) -> Sequence[Tensor]:
        """c before a block of steps and after each of them, from what is kept."""
        begin, end = self.blocks[number]
        if not reaches(self.stash, "cells"):
            return scan_cells(activated, cells[number]).unbind(0)
        return (cells[begin - 1] if begin > 0 else self.first_c, *cells[begin:end].unbind(0))

    def _walk_back(
        self,
        gates: Tensor,
        states: Sequence[Tensor],
        incoming: Tensor | None,
        dh: Tensor,
        dc: Tensor,
        dgates: Tensor,
        sums: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Walks back through a block whose gates (K, B, 4H) are given, and writes their gradients.

        ``sums``: the gates are before their nonlinearities, in the compute type.

        Returns:
            The gradients of h and c before the block, and what a factorised U leaves to the gradient of its factors.
        """
        if self.thin is not None:
            return self.thin.backward(gates, states, incoming, dh, dc, dgates)
        nothing = torch.zeros_like(dh)
        backward = self.run.backward_of_sums if sums else self.run.backward
        for step, (own, made) in reversed(
            list(enumerate(zip(gates.unbind(0), dgates.unbind(0), strict=True)))
        ):
            given = nothing if incoming is None else incoming[step]
            dc = backward(own, states[step], states[step + 1], given, dh, dc, made)
            dh = self.to_h(made)
        return dh, dc, None


class Gradients:
    """What large products after the steps of a block leave: the gradients of inputs and weights.

    Args:
        direction: of a layer.
        dinputs: (T, B, I), or (N, I) of distinct rows; receives the gradient of the inputs.
        add: or it is added to that.
    """

    def __init__(self, direction: Direction, dinputs: Tensor, add: bool) -> None:
        self._direction, self._dinputs, self._add = direction, dinputs, add
        weights, blocks = direction.weights, len(direction.blocks)
        self._to_inputs = product_of(weights.input.t(), None, direction.schedule.weights, blocks)
        # A block's gradient is one product, rounded once either way; several are summed in a wider type.
        sums = direction.accumulate if blocks > 1 else direction.inputs.dtype
        self._input, self._hidden = (gradient_of(part, sums) for part in (weights.input, weights.hidden))
        self._bias = torch.zeros_like(weights.bias, dtype=sums)
        self._fresh = True
        self._table = None
        if direction.places is not None:
            # One row more, for padding.
            self._table = torch.zeros(
                len(direction.inputs) + 1,
                len(weights.bias),
                dtype=direction.accumulate,
                device=weights.bias.device,
            )

    def add(
        self,
        begin: int,
        end: int,
        dgates: Tensor,
        inputs: Tensor,
        before: Tensor,
        thins: Tensor | None = None,
    ) -> None:
        """Adds a block's share.

        Args:
            begin, end: the block, in steps of the walk.
            dgates: (K, B, 4H).
            inputs: as `Direction.read` gives them. before: (K, B, H), h of the step before.
            thins: see `Direction`.
        """
        weights = self._direction.weights
        add_gradient(self._hidden, weights.hidden, dgates, before, thins, fresh=self._fresh)
        self._bias += add_rows(dgates)
        if self._table is not None:
            add_repeated(self._table, inputs, dgates)
        else:
            add_gradient(self._input, weights.input, dgates, inputs, fresh=self._fresh)
            self._direction.put(self._dinputs, begin, end, self._to_inputs(dgates), self._add)
        self._fresh = False

    def weights(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Of the input's and the recurrent matrix (or its factors) and of the bias; to be called once, at the end."""
        if self._table is not None:
            rows = self._direction.inputs
            table = self._table[: len(rows)].to(rows.dtype)
            add_gradient(
                self._input, self._direction.weights.input, table.unsqueeze(0), rows.unsqueeze(0), fresh=True
            )
            given = self._to_inputs(table)
            self._dinputs.copy_(self._dinputs + given if self._add else given)
        return tensors_of_matrices([self._input]), tensors_of_matrices([self._hidden]), [self._bias]
