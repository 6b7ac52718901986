"""An LSTM layer on a GPU by persistent kernels: what its launches need, by the shapes and types of its arguments.

The inputs' share of the gates is one product before the launch; the gradients of weights and inputs are a few large
products after it. Gates and cell states that the stash level omits are recomputed by one product and a scan.

Launches are looked up once and kept with the plan of a layer, because on small layers the host takes longer than the
GPU: the usual case, one direction from a zero state over full rows, runs in as few calls of Python as possible.

Sizes: D directions, B batch, T steps, I input size, I' its width in products, H hidden, N distinct rows. Internally
time is the first axis.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from econmt_ops.backends.triton import interpreted
from econmt_ops.core.alignment import widened
from econmt_ops.core.chunks import previous, reaches, rows_of
from econmt_ops.core.lengths import padding_mask
from econmt_ops.dispatch.device_limits import limits_of
from econmt_ops.dispatch.plans import Plans
from econmt_ops.lstm.direction import LSTMResults
from econmt_ops.lstm.persistent_operands import LayerOperands, LayerSettings, LayerTensors, OperandMaker
from econmt_ops.products.outer import outer
from econmt_ops.products.repeated import clean_rows

_MOST_KEPT = 1 << 20
"""Bytes of operands up to which a layer keeps them for the backward pass."""


class LayerGradients(NamedTuple):
    """Gradients of a layer; None where none is needed.

    Attributes:
        inputs: In the type of the inputs. weights: In the order of `LayerTensors.weights`.
        first_h: (B, H) of each direction. first_c: (D, B, H) float32; both only if there is a first state.
        sums: (D T B, 4H), those of the gates' sums.
    """

    inputs: Tensor | None
    weights: list[Tensor | None]
    first_h: list[Tensor]
    first_c: Tensor
    sums: Tensor


class LayerPlan:
    """Sizes and launches of a layer; of its tensors only shapes, types and devices matter.

    Attributes:
        types: Types of the weights.
        keeps_rows: True if the backward pass gets inputs that were cast as they were multiplied, which are smaller.
        keeps_cells, keeps_sums: True if it gets these tensors.
        keeps_operands: True if it gets the operands of the forward pass, because they are small: the host then has one
            launch and some allocations less.
    """

    def __init__(self, settings: LayerSettings, tensors: LayerTensors, keep: bool) -> None:
        from econmt_ops.backends.triton import layer_kernels, partition, persistent

        inputs, weights, state, lengths, places, resets = tensors
        assert inputs is not None
        self.settings, self.keep = settings, keep
        self.has_lengths, self.has_resets = lengths is not None, resets is not None
        self.dtype, self.products = dtype, products = settings.dtype, settings.products
        self.steps, self.batch = steps, batch = (inputs if places is None else places).shape[:2]
        self.hidden = hidden = weights[1].shape[1]
        self.directions = directions = len(settings.reverse)
        self._inputs_shape, self.inputs_type = shape, kind = inputs.shape, inputs.dtype
        self.size = shape[-1]
        self.types = types = tuple([weight.dtype for weight in weights])
        self._each = len(types) // directions
        self._operands_of = OperandMaker(settings, (shape, kind), types, hidden)
        self._ring = products != dtype
        self.keeps_rows = kind != dtype and lengths is None
        self.keeps_cells = keep and reaches(settings.stash, "cells")
        self.keeps_sums = keep and reaches(settings.stash, "gates")
        limits = limits_of(inputs.device)
        ahead, back = (
            partition.divide(batch, hidden, products, limits, back=back, directions=directions)
            for back in (False, True)
        )
        assert ahead is not None, "a layer that no launch can serve"
        assert back is not None, "a layer that no launch can serve"
        self._back = back
        zeros = persistent.counters_of(ahead, directions, batch, hidden)[1]
        self._groups, self._counters = persistent.counters_of(self._back, directions, batch, hidden)
        # After the counters of a walk come its slots, with a ring, and then what sums of columns need.
        slots = directions * (steps + 1) * batch if self._ring else 0
        self._first_slot, zeros = zeros, zeros + slots
        self._arrived = self._counters + slots
        self._each_sum = layer_kernels.counters_of_sums(4 * hidden)
        self._partials_at = self._arrived + directions * self._each_sum
        partials_end = self._partials_at + layer_kernels.PARTIALS * 4 * hidden
        self._workspace, self._workspace_back = (zeros, zeros), (partials_end, self._partials_at)
        kept = self._operands_of.copied + (0 if self.keeps_rows else self._operands_of.rows_bytes)
        self.keeps_operands = keep and lengths is None and kept <= _MOST_KEPT
        self._first_zeros = 0
        if self.keeps_operands:  # counters of both passes, and then what only the backward pass needs
            self._first_zeros = zeros
            self._workspace = zeros + partials_end, zeros + self._partials_at
        self._team = None
        if self._back.team > 1:
            programs = self._back.parts(hidden) * directions * self._back.groups(batch)
            self._team = programs, self._back.rows, self._back.team * self._back.units
        # Launches of single steps hand c on there.
        self._last_c_type = torch.float32 if interpreted() else settings.cells
        (self._walk,), parts = persistent.walk_launches(
            ahead,
            (directions, steps, batch, 4 * hidden),
            (dtype, products, dtype, self._last_c_type),
            settings.reverse,
            back=False,
            HAS_FIRST=state is not None,
            HAS_LENGTHS=self.has_lengths,
            HAS_RESETS=self.has_resets,
            KEEP_CELLS=self.keeps_cells,
            KEEP_SUMS=self.keeps_sums,
            GRU=settings.gru,
        )
        self._parts = [(programs, (steps, batch, *part, self._first_slot)) for programs, *part in parts]
        self._walk_back = functools.cache(self._walk_back_of)
        self._column_sums = layer_kernels.column_sums

    def operands_for_backward(self, operands: LayerOperands) -> LayerOperands:
        """Returns the operands of the forward pass with the zeros for one backward pass, if `keeps_operands`."""
        return operands._replace(workspace=operands.workspace[self._first_zeros :])

    def _walk_back_of(
        self, kind: torch.dtype, h_kind: torch.dtype, c_kind: torch.dtype, last_h: bool, last_c: bool
    ) -> Any:
        """Returns the launches of the walk back for these types of gradients, and the arguments of each part."""
        from econmt_ops.backends.triton.persistent import walk_launches

        launches, parts = walk_launches(
            self._back,
            (self.directions, self.steps, self.batch, 4 * self.hidden),
            (self.dtype, self.products, kind, h_kind, c_kind),
            self.settings.reverse,
            back=True,
            HAS_LENGTHS=self.has_lengths,
            HAS_RESETS=self.has_resets,
            HAS_LAST_H=last_h,
            HAS_LAST_C=last_c,
            GRU=self.settings.gru,
        )
        ends = self._groups, self._counters
        return launches, [(programs, (self.steps, self.batch, *part, *ends)) for programs, *part in parts]

    def _direction(self, stacked: Tensor, number: int) -> Tensor:
        """Returns the rows of a direction of a tensor (D N, M), whose directions follow each other."""
        if self.directions == 1:
            return stacked
        count = len(stacked) // self.directions
        return stacked.narrow(0, number * count, count)

    def _input_shares(self, operands: LayerOperands, sums: Tensor, places: Tensor | None) -> None:
        """Writes the inputs' share of the gates to sums (D T B, 4H)."""
        for number, (matrix, bias) in enumerate(zip(operands.matrices, operands.biases, strict=True)):
            shares = self._direction(sums, number)
            if places is None:
                torch.addmm(bias, operands.rows, matrix.t(), out=shares)
            else:
                table = torch.addmm(bias, operands.rows, matrix.t())
                torch.index_select(table, 0, places.reshape(-1), out=shares)

    def _recurrent(self, operands: LayerOperands, weights: Sequence[Tensor], number: int) -> Tensor:
        """Returns the recurrent weights of a direction (4H, H) in the compute type."""
        if self._ring:
            return weights[number * self._each + 1].to(self.dtype)
        return self._direction(operands.recurrents, number)

    def _first_position(self, number: int, lengths: Tensor | None) -> tuple[Tensor, Tensor] | int:
        """Returns the index, into (T, B), of each row's position where a direction's walk begins."""
        if not self.settings.reverse[number]:
            return 0
        if lengths is None:
            return self.steps - 1
        return (lengths - 1).clamp(min=0), torch.arange(self.batch, device=lengths.device)

    def _add_first_shares(self, tensors: LayerTensors, operands: LayerOperands, sums: Tensor) -> None:
        """Adds the first h's share of the gates to sums (D T B, 4H), where a walk begins."""
        if tensors.state is None:
            return
        for number, h in enumerate(tensors.state[0].to(sums.dtype)):
            at = self._first_position(number, tensors.lengths)
            recurrent = self._recurrent(operands, tensors.weights, number).t()
            gates = self._direction(sums, number).view(self.steps, self.batch, 4 * self.hidden)
            if isinstance(at, int):
                gates[at].addmm_(h, recurrent)
            else:
                gates[at] += h @ recurrent

    def forward(self, tensors: LayerTensors, outputs: Tensor) -> tuple[LSTMResults, LayerOperands]:
        """Runs the layer; ``outputs`` (T, B, D H), in this order in memory, is written.

        Returns the results and the operands. Cells (D, T, B, H) are c before the step at each
        position, gates (D T B, 4H) the sums before the nonlinearities; instead of what is not kept stands any tensor.
        """
        # Padding may hold anything: no row's product is another's, and the walk does not look at it.
        operands = self._operands_of(tensors.inputs, None, tensors.weights, self._workspace, bias=True)
        directions, steps, batch, hidden = self.directions, self.steps, self.batch, self.hidden
        dtype, device = self.dtype, outputs.device
        sums = torch.empty((directions * steps * batch, 4 * hidden), dtype=dtype, device=device)
        self._input_shares(operands, sums, tensors.places)
        last_h = first_h = torch.empty((directions, batch, hidden), dtype=dtype, device=device)
        last_c = first_c = torch.empty((directions, batch, hidden), dtype=self._last_c_type, device=device)
        if tensors.state is not None:
            first_h, first_c = (
                part.to(kind).contiguous()
                for part, kind in zip(tensors.state, (dtype, torch.float32), strict=True)
            )
            if self._ring:  # otherwise the walk multiplies with the first h itself
                self._add_first_shares(tensors, operands, sums)
        cells = last_c
        if self.keeps_cells:
            cells = torch.empty((directions, steps, batch, hidden), dtype=torch.float32, device=device)
        exchange = outputs
        if self._ring:
            exchange = torch.empty((directions, 2, batch, hidden), dtype=self.products, device=device)
        counters = operands.workspace
        arguments = (
            sums, operands.recurrents, exchange, outputs, cells, first_h, first_c, last_h, last_c,
            counters if tensors.lengths is None else tensors.lengths,
            counters if tensors.resets is None else tensors.resets, counters, operands.factors,
        )  # fmt: skip
        for programs, integers in self._parts:
            self._walk(programs, arguments, integers)
        kept = sums if self.keeps_sums else last_h
        return LSTMResults(outputs, cells, kept, last_h, last_c.to(self.settings.cells)), operands

    def _recomputed(
        self, tensors: LayerTensors, operands: LayerOperands, results: LSTMResults
    ) -> tuple[Tensor, Tensor]:
        """Returns the gates' sums and the cell states (of a GRU h), as they were kept or made again."""
        from econmt_ops.backends.triton.persistent import walk_cells

        sums, cells, reverse = results.gates, results.cells, self.settings.reverse
        if not self.keeps_sums:
            sums = operands.rows.new_empty(self.directions * self.steps * self.batch, 4 * self.hidden)
            self._input_shares(operands, sums, tensors.places)
            self._add_first_shares(tensors, operands, sums)
            for number in range(self.directions):
                later, before = self._neighbours(number, sums, results.outputs, tensors.resets)
                recurrent = self._recurrent(operands, tensors.weights, number)
                later.addmm_(widened(before), widened(recurrent).t())
        if self.settings.gru:
            first_h = results.outputs.new_zeros(self.batch, self.hidden)
            cells = previous(
                results.outputs, first_h if tensors.state is None else tensors.state[0][0], 0, self.steps
            )
        elif not self.keeps_cells:
            cells = cells.new_empty(self.directions, self.steps, self.batch, self.hidden)
            first_c = None if tensors.state is None else tensors.state[1].float().contiguous()
            shape = self.directions, self.steps, self.batch, 4 * self.hidden
            walk_cells(sums.view(shape), first_c, cells, tensors.lengths, reverse, tensors.resets)
        return sums, cells

    def _neighbours(
        self, number: int, sums: Tensor, outputs: Tensor, resets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns a direction's rows of sums (D T B, 4H) at all steps but its first, and h before these steps."""
        sums, batch = self._direction(sums, number), self.batch
        states = outputs.view(-1, self.directions * self.hidden)
        if self.directions > 1:
            states = states.narrow(1, number * self.hidden, self.hidden)
        later, before = sums[batch:], states[:-batch]
        if self.settings.reverse[number]:
            later, before = sums[:-batch], states[batch:]
        return later, before if resets is None else before.masked_fill(resets[1:].view(-1, 1), 0.0)

    def _clean_operands(self, tensors: LayerTensors, rows: Tensor | None, bias: bool) -> LayerOperands:
        """Makes the operands for the backward pass, with zeros in the padding, whose values may be anything."""
        inputs, lengths = tensors.inputs, tensors.lengths
        if rows is not None or inputs is None:
            inputs = lengths = None
        elif lengths is not None and tensors.places is not None:
            padding = padding_mask(lengths, self.steps, inputs.device, time_first=True)
            inputs, lengths = clean_rows(inputs, tensors.places, padding), None
        return self._operands_of(inputs, rows, tensors.weights, self._workspace_back, bias, lengths)

    def backward(
        self,
        tensors: LayerTensors,
        results: LSTMResults,
        incoming: Sequence[Tensor | None],
        needs: Sequence[bool],
        rows: Tensor | None = None,
        operands: LayerOperands | None = None,
    ) -> LayerGradients:
        """Runs the backward pass.

        Args:
            tensors, results: Arguments and results of `forward`; the last states are not read.
            incoming: Gradients of outputs (T, B, D H), last h and last c.
            needs: True for the inputs and for each weight that needs a gradient.
            rows: Inputs as they were multiplied, if they were kept.
            operands: As `operands_for_backward` returned them, for the first backward pass; None: they are made again.
        """
        again = not self.keeps_sums  # the products that make the gates again need the biases
        if operands is None:
            operands = self._clean_operands(tensors, rows, again)
        sums, cells = results.gates, results.cells
        if again or not self.keeps_cells:
            sums, cells = self._recomputed(tensors, operands, results)
        directions, batch, hidden, device = self.directions, self.batch, self.hidden, sums.device
        doutputs, last_h, last_c = incoming
        doutputs = torch.zeros_like(results.outputs) if doutputs is None else rows_of(doutputs)
        last_h = None if last_h is None else last_h.contiguous()
        last_c = None if last_c is None else last_c.contiguous()
        dsums = sums if again else torch.empty_like(sums)
        first_dc = torch.empty((directions, batch, hidden), dtype=torch.float32, device=device)
        exchange, counters = dsums, operands.workspace
        if self._ring:
            exchange = torch.empty((directions, 2, batch, 4 * hidden), dtype=self.products, device=device)
        partials = first_dc
        if self._team is not None:
            partials = torch.empty(self._team, dtype=torch.float32, device=device)
        launches, parts = self._walk_back(
            doutputs.dtype,
            doutputs.dtype if last_h is None else last_h.dtype,
            torch.float32 if last_c is None else last_c.dtype,
            last_h is not None,
            last_c is not None,
        )
        arguments = (
            sums, operands.recurrents, exchange, partials, cells, doutputs, dsums,
            doutputs if last_h is None else last_h, first_dc if last_c is None else last_c, first_dc,
            counters if tensors.lengths is None else tensors.lengths,
            counters if tensors.resets is None else tensors.resets, counters, operands.factors,
        )  # fmt: skip
        strides = doutputs.stride()[:2]
        for programs, integers in parts:
            for launch in launches:
                launch(programs, arguments, integers, strides)
        dinputs, weights, first_h = self._gradients(tensors, operands, results.outputs, dsums, last_h, needs)
        return LayerGradients(dinputs, weights, first_h, first_dc, dsums)

    def _gradients(
        self,
        tensors: LayerTensors,
        operands: LayerOperands,
        outputs: Tensor,
        dsums: Tensor,
        last_h: Tensor | None,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, list[Tensor | None], list[Tensor]]:
        """Returns the gradients of inputs, weights and first h from those of the gates' sums and of the last h."""
        dinputs: Tensor | None = None
        weights: list[Tensor | None] = [None] * len(self.types)
        first_h = []
        for number, matrix in enumerate(operands.matrices):
            at, gates = number * self._each, self._direction(dsums, number)
            if tensors.state is not None:
                first_h.append(self._first_gradient(tensors, operands, number, gates, last_h))
            if needs[1 + at + 1]:
                weights[at + 1] = self._recurrent_gradient(tensors, number, dsums, outputs)
            if any(needs[1 + at + 2 : 1 + at + self._each]):
                bias = torch.empty(4 * self.hidden, dtype=self.types[at + 2], device=gates.device)
                arrived = self._arrived + number * self._each_sum
                self._column_sums(gates, bias, operands.workspace, arrived, self._partials_at)
                for other in range(at + 2, at + self._each):
                    weights[other] = bias if self.types[other] == bias.dtype else bias.to(self.types[other])
            if tensors.places is not None:
                from econmt_ops.backends.triton.embedding import gradient

                gates = gradient(gates, tensors.places.flatten(), len(operands.rows), -1)
            if needs[1 + at]:
                weights[at] = outer(gates, operands.rows, self.types[at], self.size)
            if not needs[0]:
                continue
            if dinputs is not None:
                dinputs.addmm_(gates, matrix)
            elif self.directions == 1 and gates.is_cuda and gates.dtype != self.inputs_type == torch.float32:
                dinputs = torch.mm(gates, matrix, out_dtype=torch.float32)
            else:
                dinputs = torch.mm(gates, matrix)
        if dinputs is not None:
            if dinputs.shape[1] != self.size:
                dinputs = dinputs[:, : self.size]
            dinputs = dinputs.to(self.inputs_type).view(self._inputs_shape)
        return dinputs, weights, first_h

    def _first_gates(self, tensors: LayerTensors, number: int, gates: Tensor) -> Tensor:
        """Returns the rows (B, 4H) of a direction's gates (T B, 4H) where its walk begins."""
        steps = gates.view(self.steps, self.batch, 4 * self.hidden)
        return steps[self._first_position(number, tensors.lengths)]

    def _first_gradient(
        self,
        tensors: LayerTensors,
        operands: LayerOperands,
        number: int,
        gates: Tensor,
        last_h: Tensor | None,
    ) -> Tensor:
        """Returns the gradient (B, H) of a direction's first h."""
        dh = self._first_gates(tensors, number, gates) @ self._recurrent(operands, tensors.weights, number)
        if tensors.lengths is None:
            return dh
        # A row without steps passes on the gradient of its last h.
        passed = dh.new_zeros(()) if last_h is None else last_h[number].to(dh.dtype)
        return torch.where((tensors.lengths > 0).unsqueeze(1), dh, passed)

    def _recurrent_gradient(
        self, tensors: LayerTensors, number: int, dsums: Tensor, outputs: Tensor
    ) -> Tensor:
        """Returns the gradient (4H, H) of a direction's recurrent weights."""
        kind = self.types[number * self._each + 1]
        gradient = outer(*self._neighbours(number, dsums, outputs, tensors.resets), kind)
        if tensors.state is not None:
            gates = self._first_gates(tensors, number, self._direction(dsums, number))
            gradient += outer(gates, tensors.state[0][number].to(dsums.dtype), kind)
        return gradient


_PLANS: Plans[LayerPlan] = Plans()


def plan_of(settings: LayerSettings, tensors: LayerTensors, keep: bool) -> LayerPlan:
    """Returns the plan of a layer whose arguments have these shapes; ``keep``: a backward pass will follow."""
    inputs, weights, state, lengths, places, resets = tensors
    assert inputs is not None
    shapes = inputs.shape, weights[1].shape, None if places is None else places.shape
    types = inputs.dtype, *[weight.dtype for weight in weights]
    key = settings, shapes, types, inputs.device, state is None, lengths is None, resets is None, keep
    plan = _PLANS.get(key)
    if plan is None:
        plan = LayerPlan(settings, tensors, keep)
        _PLANS.add(key, plan)
    return plan
