"""One LSTM layer in one direction from a zero state over full rows, the usual case, with all launches known beforehand.

It computes what `econmt_ops.lstm.triton` computes for layers of every kind, in as few calls of Python as possible: on
small layers they take longer than the GPU.

Shapes: B batch, T steps, I input size, I' its width in products, H hidden. Time comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_ops.core.alignment import even
from econmt_ops.core.chunks import outer
from econmt_ops.lstm.direct import LayerCall, no_second_derivative, plain_products

_INT32 = torch.int32


class StraightLayer:
    """Sizes and launches of a layer, by the shapes and types of its arguments.

    Args:
        call: the arguments that are not differentiable: one direction, no lengths, gates are kept.
        inputs: (B, T, I).
        weights: input weights (4H, I), recurrent weights (4H, H) and one or two biases (4H,).
        keep: True if a backward pass will follow.
    """

    def __init__(self, call: LayerCall, inputs: Tensor, weights: Sequence[Tensor], keep: bool) -> None:
        from econmt_ops.backends.triton import layer_kernels, persistent

        self.call, self.keep = call, keep
        self.dtype: torch.dtype = call.dtype
        self.products: torch.dtype = getattr(torch, call.products)
        self.batch, self.steps, self.size = inputs.shape
        self.hidden = hidden = weights[1].shape[1]
        self.inputs_type = inputs.dtype
        self.wide = even(self.size, self.dtype)
        self.casts_inputs = inputs.dtype != self.dtype or self.wide != self.size
        self.casts_weight = weights[0].dtype != self.dtype or self.wide != self.size
        self.casts_recurrent = weights[1].dtype != self.products
        self.biases = len(weights) - 2
        self.casts_bias = self.biases > 1 or weights[2].dtype != self.dtype
        self.ring = self.products != self.dtype
        self._types = [part.dtype for part in weights]
        ahead, back = call.partitions
        assert ahead is not None
        assert back is not None
        self._ahead, self._back = ahead, back
        self._zeros = persistent.counters_of(ahead, 1, self.batch, hidden)[1]
        self._groups, self._counters = persistent.counters_of(back, 1, self.batch, hidden)
        # After the counters of the walk stand one number for the largest gradient, and what sums of columns need.
        self._arrived = self._counters + 1
        self._zeros_back = self._arrived + layer_kernels.counters_of_sums(4 * hidden)
        self._partials = layer_kernels.PARTIALS * 4 * hidden
        self._team = (
            None
            if back.team == 1
            else (back.parts(hidden) * back.groups(self.batch), back.rows, back.team * back.units)
        )
        shape = 1, self.steps, self.batch, 4 * hidden
        self.walk, parts = persistent._forward_launch(
            ahead, shape, (self.dtype, self.products, self.dtype), call.reverse, (False, False, keep, keep)
        )
        self.parts = [(programs, (self.steps, self.batch, *part)) for programs, *part in parts]
        self._preparation = functools.cache(self._preparation_of)
        self._walk_back = functools.cache(self._walk_back_of)
        self._column_sums, self._largest = layer_kernels.column_sums, layer_kernels.largest

    def _preparation_of(self, reads: bool, back: bool) -> tuple[Any, int, tuple[int, ...], tuple[int, int]]:
        """Returns the launch of `prepare`, its programs and integers, and the strides of the weights."""
        from econmt_ops.backends.triton.layer_kernels import _preparation

        bias = self.casts_bias and not back
        types = (
            *((self.inputs_type, self.dtype) if reads else (_INT32, _INT32)),
            *((self._types[0], self.dtype) if self.casts_weight else (_INT32, _INT32)),
            *((self._types[1], self.products) if self.casts_recurrent else (_INT32, _INT32)),
            *((self._types[2], self._types[-1], self.dtype) if bias else (_INT32,) * 3),
            _INT32,
        )
        sized = reads or self.casts_weight
        zeros = self._zeros_back if back else self._zeros
        launch, programs, *ends = _preparation(
            (self.steps, self.batch, self.size) if reads else None,
            self.size if sized else 0,
            self.wide if sized else 0,
            self.hidden,
            (self.casts_weight, self.casts_recurrent),
            self.biases if bias else 0,
            zeros,
            types,
        )
        sizes = (self.steps, self.batch) if reads else (0, 0)
        strides = (
            self.size if self.casts_weight else 0,
            self.hidden if self.casts_recurrent else 0,
        )
        return launch, programs, (*sizes, zeros, *ends), strides

    def _walk_back_of(self, kind: torch.dtype, last_kind: torch.dtype, last_h: bool, last_c: bool) -> Any:
        """Returns the launches of the walk back for these types of gradients, and the arguments of each part."""
        from econmt_ops.backends.triton.persistent import _backward_launch

        shape = 1, self.steps, self.batch, 4 * self.hidden
        types = self.dtype, self.products, kind, last_kind
        launches, parts = _backward_launch(
            self._back, shape, types, self.call.reverse, (False, last_h, last_c)
        )
        ends = self._groups, self._counters
        return launches, [(programs, (self.steps, self.batch, *part, *ends)) for programs, *part in parts]

    def _prepare(
        self, inputs: Tensor | None, weights: Sequence[Tensor], back: bool
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
        """Returns inputs (T B, I'), both matrices and the bias as products read them, and a workspace."""
        device = weights[0].device
        size = self._zeros_back + self._partials if back else self._zeros
        workspace = torch.empty(size, dtype=_INT32, device=device)
        weight, recurrent, bias = weights[:3]
        matrix, square, made = weight, recurrent, bias
        tensors = [workspace] * 10
        rows: Tensor | None = None
        step = row = 0
        if inputs is not None:
            read = inputs.transpose(0, 1)
            if self.casts_inputs or not read.is_contiguous():
                if inputs.stride(2) != 1:
                    read = inputs.contiguous().transpose(0, 1)
                rows = torch.empty((self.steps * self.batch, self.wide), dtype=self.dtype, device=device)
                tensors[0], tensors[1] = read, rows
                step, row, _ = read.stride()
                reads = True
            else:
                rows, reads = read.view(-1, self.wide), False
        else:
            reads = False
        if self.casts_weight:
            matrix = torch.empty((4 * self.hidden, self.wide), dtype=self.dtype, device=device)
            tensors[2], tensors[3] = weight, matrix
        if self.casts_recurrent:
            square = torch.empty((4 * self.hidden, self.hidden), dtype=self.products, device=device)
            tensors[4], tensors[5] = recurrent, square
        if self.casts_bias and not back:
            made = torch.empty(4 * self.hidden, dtype=self.dtype, device=device)
            tensors[6:9] = bias, weights[-1], made
        launch, programs, integers, strides = self._preparation(reads, back)
        launch(programs, tensors, integers, (step, row, *strides))
        return rows, matrix, square, made, workspace

    def forward(self, inputs: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns outputs (B, T, H), last h and c (1, B, H), and what is kept: rows, cells and gates' sums."""
        batch, steps, hidden = self.batch, self.steps, self.hidden
        rows, matrix, square, bias, workspace = self._prepare(inputs, weights, back=False)
        assert rows is not None
        dtype, device = self.dtype, inputs.device
        sums = torch.empty((steps * batch, 4 * hidden), dtype=dtype, device=device)
        torch.addmm(bias, rows, matrix.t(), out=sums)
        # Time comes first in memory; what is returned is no view, so that it may be changed in place.
        outputs = torch.empty_strided(
            (batch, steps, hidden), (hidden, batch * hidden, 1), dtype=dtype, device=device
        )
        last_h = torch.empty((1, batch, hidden), dtype=dtype, device=device)
        last_c = torch.empty((1, batch, hidden), dtype=torch.float32, device=device)
        cells = (
            torch.empty((steps, batch, hidden), dtype=torch.float32, device=device) if self.keep else last_c
        )
        exchange = (
            torch.empty((2, batch, hidden), dtype=self.products, device=device) if self.ring else outputs
        )
        tensors = sums, square, exchange, outputs, cells, last_h, last_c, last_h, last_c, workspace, workspace
        for programs, integers in self.parts:
            self.walk(programs, tensors, integers)
        return outputs, last_h, last_c, rows, cells, sums

    def backward(
        self,
        incoming: Sequence[Tensor | None],
        inputs: Tensor | None,
        rows: Tensor | None,
        kept: Sequence[Tensor],
        weights: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """Returns the gradients of inputs and weights; None where ``needs`` is False.

        Args:
            incoming: gradients of outputs and last h and c.
            inputs: (B, T, I), if ``rows`` were not kept.
            rows: inputs as they were multiplied.
            kept: outputs, cells and gates' sums.
            weights: as in the forward pass.
            needs: True for inputs and for each weight whose gradient is asked for.
        """
        outputs, cells, sums = kept
        made, matrix, square, _, workspace = self._prepare(inputs, weights, back=True)
        rows = made if rows is None else rows
        assert rows is not None
        batch, hidden, device = self.batch, self.hidden, sums.device
        doutputs, last_h, last_c = incoming
        doutputs = torch.zeros_like(outputs) if doutputs is None else doutputs
        doutputs = doutputs.transpose(0, 1)
        if doutputs.stride(2) != 1:
            doutputs = doutputs.contiguous()
        last_h = None if last_h is None else last_h.contiguous()
        last_c = None if last_c is None else last_c.contiguous()
        dsums = torch.empty_like(sums)
        first_dc = torch.empty((1, batch, hidden), dtype=torch.float32, device=device)
        exchange = dsums
        if self.ring:
            exchange = torch.empty((2, batch, 4 * hidden), dtype=self.products, device=device)
            self._largest(doutputs, last_h, last_c, workspace, self._counters)
        partials = first_dc
        if self._team is not None:
            partials = torch.empty(self._team, dtype=torch.float32, device=device)
        launches, parts = self._walk_back(
            doutputs.dtype,
            doutputs.dtype if last_h is None else last_h.dtype,
            last_h is not None,
            last_c is not None,
        )
        tensors = (
            sums, square, exchange, partials, cells, doutputs, dsums, doutputs if last_h is None else last_h,
            first_dc if last_c is None else last_c, first_dc, workspace, workspace,
        )  # fmt: skip
        strides = doutputs.stride()[:2]
        for programs, integers in parts:
            for launch in launches:
                launch(programs, tensors, integers, strides)
        return self._products_of(dsums, rows, matrix, outputs, workspace, needs)

    def _products_of(
        self,
        dsums: Tensor,
        rows: Tensor,
        matrix: Tensor,
        outputs: Tensor,
        workspace: Tensor,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """Returns the gradients that are made of the gates' gradient."""
        batch, count = self.batch, self.steps * self.batch
        dinputs: Tensor | None = None
        if needs[0]:
            if self.inputs_type != self.dtype and self.inputs_type == torch.float32 and dsums.is_cuda:
                dinputs = torch.mm(dsums, matrix, out_dtype=torch.float32)
            else:
                dinputs = torch.mm(dsums, matrix).to(self.inputs_type)
            if self.wide != self.size:
                dinputs = dinputs[:, : self.size]
            dinputs = dinputs.view(self.steps, batch, self.size).transpose(0, 1)
        gradients: list[Tensor | None] = [dinputs, *([None] * (len(needs) - 1))]
        if needs[1]:
            gradients[1] = outer(dsums, rows, self._types[0], self.size)
        if needs[2]:
            h = outputs.transpose(0, 1).reshape(count, self.hidden)
            # Those of a step, and h before it.
            later, before = (0, batch) if self.call.reverse[0] else (batch, 0)
            size = count - batch
            gradients[2] = outer(dsums.narrow(0, later, size), h.narrow(0, before, size), self._types[1])
        if any(needs[3:]):
            bias = torch.empty(4 * self.hidden, dtype=self._types[2], device=dsums.device)
            self._column_sums(dsums, bias, workspace, self._arrived, self._zeros_back)
            for number, kind in enumerate(self._types[2:], 3):
                gradients[number] = bias if kind == bias.dtype else bias.to(kind)
        return gradients


class _StraightFunction(torch.autograd.Function):
    """Outputs (B, T, H) and last h and c (1, B, H) of a layer."""

    @staticmethod
    def forward(
        ctx: Any, layer: StraightLayer, inputs: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        with plain_products(inputs.device.type, layer.call):
            outputs, last_h, last_c, rows, cells, sums = layer.forward(inputs, weights)
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        # Inputs that were cast are kept as they were multiplied, which takes fewer bytes.
        cast = layer.inputs_type != layer.dtype
        ctx.save_for_backward(
            None if cast else inputs, rows if cast else None, outputs, cells, sums, *weights
        )
        return outputs, last_h, last_c

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return no_second_derivative(_StraightFunction.backward(ctx, *incoming))
        layer, needs = ctx.layer, ctx.needs_input_grad
        inputs, rows, outputs, cells, sums, *weights = ctx.saved_tensors
        if all(gradient is None for gradient in incoming):
            return (None,) * len(needs)
        with plain_products(outputs.device.type, layer.call):
            found = layer.backward(incoming, inputs, rows, (outputs, cells, sums), weights, needs[1:])
        return None, *found


def run_straight(
    layer: StraightLayer, inputs: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a layer, recorded by autograd if it keeps what a backward pass needs.

    Args:
        layer: made for such arguments.
        inputs, weights: see `StraightLayer`.

    Returns:
        Outputs (B, T, H), and h and c after the last step, (1, B, H).
    """
    # The kernels that read weights expect them to be contiguous.
    for weight in weights:
        if not weight.is_contiguous():
            weights = [part.contiguous() for part in weights]
            break
    if layer.keep:
        made: tuple[Tensor, Tensor, Tensor] = _StraightFunction.apply(  # type: ignore[no-untyped-call]
            layer, inputs, *weights
        )
        return made
    with plain_products(inputs.device.type, layer.call):
        outputs, last_h, last_c, *_ = layer.forward(inputs, weights)
    return outputs, last_h, last_c
