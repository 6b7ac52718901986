"""The gradients of an LSTM layer on a GPU that are made of the gates' gradient, for all steps at once.

Shapes: D directions, B batch, T steps, I input size, H hidden. Time comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt_ops.core.chunks import outer
from econmt_ops.dispatch.registration import Gradients
from econmt_ops.lstm.persistent_layer import PersistentLayer, Prepared, WorkspaceOfBiases, sizes


def begins(layer: PersistentLayer, number: int) -> tuple[Tensor, Tensor] | int:
    """The index, into (T, B), of the position of each row where a direction's walk begins."""
    _, steps, batch, _ = sizes(layer)
    if not layer.reverse[number]:
        return 0
    if layer.lengths is None:
        return steps - 1
    rows = torch.arange(batch, device=layer.inputs.device)
    return (layer.lengths - 1).clamp(min=0), rows


def neighbours(layer: PersistentLayer, number: int, later: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of ``later`` (T, B, M) at all positions but a walk's first, and of ``before`` (T, B, N) one step earlier."""
    if layer.reverse[number]:
        later, before = later[:-1], before[1:]
    else:
        later, before = later[1:], before[:-1]
    # Both are views: the steps and rows of a direction's outputs lie evenly apart.
    return later.flatten(0, 1), before.flatten(0, 1)


def gradients_of_recurrents(
    ready: Prepared, outputs: Tensor, dsums: Tensor, dlast_h: Tensor | None, places: WorkspaceOfBiases
) -> Gradients:
    """Computes the gradients of recurrent matrices, biases and initial h."""
    from econmt_ops.backends.triton.layer_kernels import column_sums

    layer = ready.layer
    recurrents, biases, first_h = [], [], []
    directions = len(layer.recurrents)
    for number, (own, h) in enumerate(zip(dsums.unbind(0), outputs.chunk(directions, 2), strict=True)):
        weight = layer.recurrents[number]
        begin = own[begins(layer, number)] if layer.first_h else None
        if begin is not None:
            dh = begin @ ready.recurrent(number)
            if layer.lengths is not None:
                passed = dh.new_zeros(()) if dlast_h is None else dlast_h[number].to(dh.dtype)
                dh = torch.where((layer.lengths > 0).unsqueeze(1), dh, passed)
            first_h.append(dh)
        if not places.needed:
            continue
        gradient = outer(*neighbours(layer, number, own, h), weight.dtype)
        if begin is not None:
            gradient += outer(begin, layer.first_h[number].to(own.dtype), weight.dtype)
        recurrents.append(gradient)
        bias = weight.new_empty(own.shape[2])
        column_sums(own.view(-1, own.shape[2]), bias, ready.workspace, *places.place(number))
        biases.append(bias)
    return {"recurrents": recurrents, "biases": biases, "first_h": first_h}


def gradients_of_inputs(ready: Prepared, dsums: Tensor, inputs_have: bool, weights_have: bool) -> Gradients:
    """Computes the gradients of inputs and input matrices."""
    from econmt_ops.backends.triton.embedding import gradient

    layer, rows = ready.layer, ready.rows
    width = layer.inputs.shape[-1]
    weights: list[Tensor] = []
    dinputs: Tensor | None = None
    for number, (own, weight) in enumerate(zip(dsums.flatten(1, 2).unbind(0), layer.weights, strict=True)):
        if layer.places is not None:
            own = gradient(own, layer.places.flatten(), len(rows), -1)
        if weights_have:
            weights.append(outer(own, rows, weight.dtype, width))
        if not inputs_have:
            continue
        if dinputs is not None:
            dinputs.addmm_(own, ready.weights[number])
        elif len(layer.weights) == 1 and own.is_cuda and own.dtype != layer.inputs.dtype == torch.float32:
            dinputs = torch.mm(own, ready.weights[number], out_dtype=torch.float32)
        else:
            dinputs = own @ ready.weights[number]
    if dinputs is None:
        return {"inputs": None, "weights": weights}
    if dinputs.shape[1] != width:
        dinputs = dinputs[:, :width]
    return {"inputs": dinputs.to(layer.inputs.dtype).view(layer.inputs.shape), "weights": weights}
