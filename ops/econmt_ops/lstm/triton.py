"""The LSTM on a GPU with persistent kernels: one launch runs all steps of a layer, with its weights kept on chip.

The inputs' share of the gates is one product before the launch; the gradients of weights and inputs are a few large
products after it. Gates and cell states that the stash level omits are recomputed by one product and a scan. Layers
that no persistent kernel supports (factorised, float64, IEEE float32, more than 1,600 units, a device too small) run
step by step as in `recompute`. Large products use matrices of `even` width.

Sizes: D directions, B batch, T steps, I input size, H hidden. Internally time is the first axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from econmt_ops.backends.triton import MOST_UNITS, interpreted, serves, with_kernels
from econmt_ops.core.alignment import widened
from econmt_ops.core.chunks import reaches
from econmt_ops.core.dropout import Seed
from econmt_ops.core.dropout import dropout as drop_units
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.repeated import Inputs, UniqueRows, clean_rows, values_of
from econmt_ops.core.weights import AnyLSTMWeights, LSTMState, LSTMWeights
from econmt_ops.dispatch.registration import Gradients, Incoming, Operator
from econmt_ops.lstm import recompute
from econmt_ops.lstm.persistent_layer import CastWeights, PersistentLayer, sizes

if TYPE_CHECKING:
    from econmt_ops.backends.triton.persistent import Partition

TRAITS = with_kernels(
    recompute.TRAITS, model_stash="attention", serves=lambda sizes, _: sizes["H"] <= MOST_UNITS
)


class _Walked(NamedTuple):
    """Results of a layer and tensors saved for the backward pass, which are empty if the stash level omits them."""

    outputs: Tensor
    """(T, B, D H)"""
    last_h: Tensor
    """(D, B, H)"""
    last_c: Tensor
    """(D, B, H) float32"""
    cells: Tensor
    """(D, T, B, H) float32, c before the step at each position."""
    sums: Tensor
    """(D, T, B, 4H), the gates before their nonlinearities."""


def _empty(layer: PersistentLayer, keep: bool) -> _Walked:
    directions, steps, batch, hidden = sizes(layer)
    new = layer.inputs.new_empty
    cells = steps if keep and reaches(layer.stash, "cells") else 0
    sums = steps if keep and reaches(layer.stash, "gates") else 0
    return _Walked(
        new(steps, batch, directions * hidden),
        new(directions, batch, hidden),
        new(directions, batch, hidden, dtype=torch.float32),
        new(directions, cells, batch, hidden, dtype=torch.float32),
        new(directions, sums, batch, 4 * hidden),
    )


def _partition(layer: PersistentLayer, back: bool) -> Partition:
    from econmt_ops.backends.triton.persistent import limits_of, plan

    directions, _, batch, hidden = sizes(layer)
    together = {"yes": True, "no": False, "auto": None}[layer.together]
    products = getattr(torch, layer.products)
    limits = limits_of(layer.inputs.device)
    found = plan(batch, hidden, products, limits, back=back, directions=directions, together=together)
    assert found is not None, "no launch of the persistent kernel supports this layer"
    return found


def _first(given: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Returns initial states (D, B, H) in a type; None: zeros."""
    if len(given) == 1:
        return given[0].to(dtype).contiguous().unsqueeze(0)
    return torch.stack([part.to(dtype) for part in given]) if given else None


def _rows(layer: PersistentLayer) -> Tensor:
    """Returns the rows that multiply the input weights: inputs (T B, I) with zero padding, or the unique rows."""
    inputs = layer.inputs
    if layer.places is None:
        if layer.lengths is not None:
            inputs = inputs.masked_fill(_padding(layer).unsqueeze(2), 0.0)
        return widened(inputs.reshape(-1, inputs.shape[2]))
    return widened(clean_rows(inputs, layer.places, None if layer.lengths is None else _padding(layer)))


def _padding(layer: PersistentLayer) -> Tensor:
    """Returns a mask (T, B), True at padded positions."""
    assert layer.lengths is not None
    _, steps, _, _ = sizes(layer)
    return padding_mask(layer.lengths, steps, layer.inputs.device).t()


def _input_shares(cast: CastWeights, rows: Tensor, sums: Tensor) -> None:
    """Writes the inputs' share of the gates to sums (D, T, B, 4H)."""
    layer = cast.layer
    dtype = layer.inputs.dtype
    for number, (share, bias) in enumerate(zip(sums.unbind(0), layer.biases, strict=True)):
        flat = share.view(-1, share.shape[2])
        transposed = cast.input(number).t()
        if layer.places is None:
            torch.addmm(bias.to(dtype), rows, transposed, out=flat)
        else:
            table = torch.addmm(bias.to(dtype), rows, transposed)
            torch.index_select(table, 0, layer.places.reshape(-1), out=flat)


def _add_first_shares(cast: CastWeights, sums: Tensor) -> None:
    """Adds the share of the initial h to the gates' sums (D, T, B, 4H) at the first step of each walk."""
    layer = cast.layer
    dtype = layer.inputs.dtype
    for number, h in enumerate(layer.first_h):
        at, recurrent = _begins(layer, number), cast.recurrent(number).t()
        if isinstance(at, int):
            sums[number][at].addmm_(h.to(dtype), recurrent)
        else:
            sums[number][at] += h.to(dtype) @ recurrent


def _begins(layer: PersistentLayer, number: int) -> tuple[Tensor, Tensor] | int:
    """Returns the index, into (T, B), of the first position of each row in a direction's walk."""
    _, steps, batch, _ = sizes(layer)
    if not layer.reverse[number]:
        return 0
    if layer.lengths is None:
        return steps - 1
    rows = torch.arange(batch, device=layer.inputs.device)
    return (layer.lengths - 1).clamp(min=0), rows


def _neighbours(layer: PersistentLayer, number: int, later: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Returns as rows ``later`` (T, B, M) without a walk's first step, and ``before`` (T, B, N) without its last."""
    if layer.reverse[number]:
        later, before = later[:-1], before[1:]
    else:
        later, before = later[1:], before[:-1]
    # Both are views, because the steps and rows of a direction's outputs have uniform strides.
    return later.flatten(0, 1), before.flatten(0, 1)


def _forward(layer: PersistentLayer, keep: bool) -> _Walked:
    from econmt_ops.backends.triton.persistent import walk_forward

    directions, steps, batch, hidden = sizes(layer)
    result = _empty(layer, keep)
    kept = result.sums.shape[1] > 0
    sums = result.sums if kept else result.sums.new_empty(directions, steps, batch, 4 * hidden)
    # Padding may hold any values: rows of a product are independent, and the kernel ignores padded positions.
    rows = widened(layer.inputs.reshape(-1, layer.inputs.shape[-1]))
    cast = CastWeights(layer)
    _input_shares(cast, rows, sums)
    if (
        cast.recurrents.dtype != layer.inputs.dtype
    ):  # otherwise the kernel adds the product with the initial h itself
        _add_first_shares(cast, sums)
    del rows
    first_h, first_c = _first(layer.first_h, layer.inputs.dtype), _first(layer.first_c, torch.float32)
    walk_forward(
        _partition(layer, back=False),
        sums,
        cast.recurrents,
        result.outputs,
        result.cells if result.cells.shape[1] else None,
        None if first_h is None or first_c is None else (first_h, first_c),
        (result.last_h, result.last_c),
        layer.lengths,
        tuple(layer.reverse),
        keep_sums=kept,
    )
    return result


def _backward(layer: PersistentLayer, result: _Walked, incoming: Incoming) -> Gradients:
    from econmt_ops.backends.triton.persistent import walk_backward

    rows, cast = _rows(layer), CastWeights(layer)
    sums, cells = _kept(cast, result, rows)
    dsums = torch.empty_like(sums) if reaches(layer.stash, "gates") else sums
    doutputs = incoming["outputs"]
    if doutputs is None:
        doutputs = torch.zeros_like(result.outputs)
    doutputs = doutputs if doutputs.stride(2) == 1 else doutputs.contiguous()
    dlast = [None if part is None else part.contiguous() for part in (incoming["last_h"], incoming["last_c"])]
    directions, _, batch, hidden = sizes(layer)
    dfirst_c = sums.new_empty(directions, batch, hidden, dtype=torch.float32)
    walk_backward(
        _partition(layer, back=True),
        sums,
        cast.recurrents,
        cells,
        doutputs,
        dsums,
        dlast[0],
        dlast[1],
        dfirst_c,
        layer.lengths,
        tuple(layer.reverse),
    )
    return {
        "gate_gradient": None if layer.gate_gradient is None else dsums[0],
        **_gradients_of_recurrents(cast, result.outputs, dsums, dlast[0]),
        **_gradients_of_inputs(cast, rows, dsums),
        "first_c": dfirst_c.unbind(0) if layer.first_c else [],
    }


def _kept(cast: CastWeights, result: _Walked, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gates' sums and the cell states, from the stash or recomputed."""
    from econmt_ops.backends.triton.persistent import walk_cells

    layer = cast.layer
    directions, steps, batch, hidden = sizes(layer)
    sums, cells = result.sums, result.cells
    if not reaches(layer.stash, "gates"):
        sums = sums.new_empty(directions, steps, batch, 4 * hidden)
        _input_shares(cast, rows, sums)
        _add_first_shares(cast, sums)
        for number, h in enumerate(result.outputs.chunk(directions, 2)):
            later, before = _neighbours(layer, number, sums[number], h)
            later.addmm_(widened(before), widened(cast.recurrent(number)).t())
    if not reaches(layer.stash, "cells"):
        cells = cells.new_empty(directions, steps, batch, hidden)
        walk_cells(sums, _first(layer.first_c, torch.float32), cells, layer.lengths, tuple(layer.reverse))
    return sums, cells


def _gradients_of_recurrents(
    cast: CastWeights, outputs: Tensor, dsums: Tensor, dlast_h: Tensor | None
) -> Gradients:
    """Returns the gradients of recurrent matrices, biases and initial h."""
    layer = cast.layer
    recurrents, biases, first_h = [], [], []
    directions = len(layer.recurrents)
    ones = dsums.new_ones(1, 1).expand(dsums[0, ..., 0].numel(), 1)
    for number, (own, h) in enumerate(zip(dsums.unbind(0), outputs.chunk(directions, 2), strict=True)):
        weight = layer.recurrents[number]
        begin = own[_begins(layer, number)] if layer.first_h else None
        if begin is not None:
            dh = begin @ cast.recurrent(number)
            if layer.lengths is not None:
                passed = dh.new_zeros(()) if dlast_h is None else dlast_h[number].to(dh.dtype)
                dh = torch.where((layer.lengths > 0).unsqueeze(1), dh, passed)
            first_h.append(dh)
        if layer.gate_gradient is not None:
            continue
        gradient = _outer(*_neighbours(layer, number, own, h), weight.dtype)
        if begin is not None:
            gradient += _outer(begin, layer.first_h[number].to(own.dtype), weight.dtype)
        recurrents.append(gradient)
        biases.append(_outer(ones, own.flatten(0, 1), weight.dtype).view(-1))
    return {"recurrents": recurrents, "biases": biases, "first_h": first_h}


def _gradients_of_inputs(cast: CastWeights, rows: Tensor, dsums: Tensor) -> Gradients:
    """Returns the gradients of inputs and input matrices."""
    from econmt_ops.backends.triton.embedding import gradient

    layer, weights = cast.layer, []
    width = layer.inputs.shape[-1]
    dinputs = torch.empty_like(rows)
    for number, (own, weight) in enumerate(zip(dsums.flatten(1, 2).unbind(0), layer.weights, strict=True)):
        if layer.places is not None:
            own = gradient(own, layer.places.flatten(), len(rows), -1)
        if layer.gate_gradient is None:
            weights.append(_outer(own, rows, weight.dtype, width))
        if number == 0:
            torch.mm(own, cast.input(number), out=dinputs)
        else:
            dinputs.addmm_(own, cast.input(number))
    return {"inputs": dinputs[:, :width].view(layer.inputs.shape), "weights": weights}


def _outer(left: Tensor, right: Tensor, dtype: torch.dtype, width: int | None = None) -> Tensor:
    """Returns left^T right, for left (N, M) and right (N, K), in a type at least as wide, without rounding in between.

    ``width`` is K if ``right`` has been padded to an aligned width.
    """
    width = right.shape[1] if width is None else width
    right = widened(right)
    if left.is_cuda and left.dtype != dtype == torch.float32:
        product: Tensor = torch.mm(left.t(), right, out_dtype=torch.float32)
    else:
        product = (left.t() @ right).to(dtype)
    return product[:, :width].contiguous()


def _saves(_layer: PersistentLayer) -> set[str]:
    """Returns the names of the tensors that the backward pass reads: all but the last states."""
    return {*PersistentLayer._fields, "outputs", "cells", "sums"}


_operator = Operator(
    "econmt_ops::persistent_lstm_layer",
    PersistentLayer,
    _Walked,
    forward=_forward,
    fake=_empty,
    backward=_backward,
    saves=_saves,
    constants=lambda layer: () if layer.gate_gradient is None else ("weights", "recurrents", "biases"),
)


def products_type(inputs: Tensor) -> torch.dtype | None:
    """Returns the type of the products in a layer's recurrence, or None if no persistent kernel supports the inputs.

    float32 is supported where TF32 is allowed, with products in float16, which has TF32's precision in half the space;
    gradients are scaled into its range. Where TF32 is not allowed, float32 products have to be exact.
    """
    if inputs.dtype in (torch.bfloat16, torch.float16):
        return inputs.dtype
    if inputs.dtype != torch.float32:
        return None
    if interpreted():
        return torch.float32
    return torch.float16 if torch.backends.cuda.matmul.allow_tf32 else None


def _products(inputs: Inputs, layers: Sequence[AnyLSTMWeights]) -> torch.dtype | None:
    """Returns `products_type`, or None also if no launch fits the device."""
    from econmt_ops.backends.triton.persistent import limits_of, plan

    values = values_of(inputs)
    products = products_type(values)
    if products is None or not all(isinstance(layer, LSTMWeights) for layer in layers):
        return None
    batch = len(inputs.places if isinstance(inputs, UniqueRows) else inputs)
    limits = limits_of(values.device)
    fits = (plan(batch, layers[0].hidden.shape[1], products, limits, back=back) for back in (False, True))
    return products if all(partition is not None for partition in fits) else None


def _steps(inputs: Inputs) -> str:
    """Returns the backend of layers that run step by step."""
    return "triton" if serves(values_of(inputs)) else "eager"


def _run_layer(
    inputs: Inputs,
    layers: Sequence[AnyLSTMWeights],
    state: Sequence[tuple[Tensor, Tensor]],
    lengths: Tensor | None,
    reverse: Sequence[bool],
    stash: str,
    products: torch.dtype,
    together: str = "auto",
    gate_gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one layer; returns outputs (B, T, D H), and h and c (D, B, H) after each row's last step."""
    values = values_of(inputs)
    if lengths is not None:
        lengths = lengths.to(values.device, non_blocking=True)
    result = _operator(
        PersistentLayer(
            values if isinstance(inputs, UniqueRows) else values.transpose(0, 1),
            [layer.input for layer in layers if isinstance(layer, LSTMWeights)],
            [layer.hidden for layer in layers if isinstance(layer, LSTMWeights)],
            [layer.bias for layer in layers],
            [h for h, _ in state],
            [c for _, c in state],
            lengths,
            inputs.places.t() if isinstance(inputs, UniqueRows) else None,
            list(reverse),
            stash,
            str(products).removeprefix("torch."),
            together,
            gate_gradient,
        )
    )
    return result.outputs.transpose(0, 1), result.last_h, result.last_c


def lstm(
    inputs: Inputs,
    layers: tuple[AnyLSTMWeights, ...],
    *,
    state: LSTMState,
    lengths: Tensor | None,
    reverse: bool,
    residual: bool,
    dropout: float,
    dropout_seed: Seed | None,
    variational: bool,
    gate_gradient: Tensor | None = None,
    from_zero: bool = False,
    stash: str = "gates",
) -> tuple[Tensor, LSTMState]:
    """Implements `econmt_ops.lstm` for checked arguments, cast except for the weights.

    ``from_zero``: True if all of ``state`` is zero.
    """
    products = _products(inputs, layers)
    if products is None:
        return recompute.lstm(
            inputs,
            layers,
            state=state,
            lengths=lengths,
            reverse=reverse,
            residual=residual,
            dropout=dropout,
            dropout_seed=dropout_seed,
            variational=variational,
            gate_gradient=gate_gradient,
            from_zero=from_zero,
            stash=stash,
            backend=_steps(inputs),
        )
    read = inputs
    last: list[tuple[Tensor, Tensor]] = []
    for number, layer in enumerate(layers):
        if number > 0 and dropout > 0.0:
            assert dropout_seed is not None
            assert isinstance(read, Tensor)
            read = drop_units(read, dropout, dropout_seed, variational, index=number)
        first = [] if from_zero else [state[number]]
        outputs, last_h, last_c = _run_layer(
            read, [layer], first, lengths, [reverse], stash, products, gate_gradient=gate_gradient
        )
        last.append((last_h.squeeze(0), last_c.squeeze(0)))  # squeeze: its backward launches no kernel
        if residual and number > 0:
            assert isinstance(read, Tensor)
            outputs = outputs + read
        read = outputs
    assert isinstance(read, Tensor)
    return read, tuple(last)


def bidirectional_lstm(
    inputs: Inputs,
    forward: AnyLSTMWeights,
    backward: AnyLSTMWeights,
    *,
    lengths: Tensor | None,
    stash: str = "gates",
    together: str = "auto",
) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Implements `econmt_ops.bidirectional_lstm` for checked arguments, cast except for the weights.

    ``together``: "yes" or "no", whether both directions share a launch, or "auto".
    """
    layers = [forward, backward]
    products = _products(inputs, layers)
    if products is None:
        return recompute.bidirectional_lstm(
            inputs, forward, backward, lengths=lengths, stash=stash, backend=_steps(inputs)
        )
    outputs, h, c = _run_layer(inputs, layers, [], lengths, [False, True], stash, products, together)
    return outputs, ((h[0], c[0]), (h[1], c[1]))
