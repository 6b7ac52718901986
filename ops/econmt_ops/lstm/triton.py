"""The LSTM on a GPU with persistent kernels: one launch runs all steps of a layer, with its weights kept on chip.

The inputs' share of the gates is one product before the launch; the gradients of weights and inputs are a few large
products after it. Gates and cell states that the stash level omits are recomputed by one product and a scan. Layers
that no persistent kernel supports (factorised, float64, IEEE float32, more than 1,600 units, a device too small) run
step by step as in `recompute`. Large products use matrices of `even` width.

Sizes: D directions, B batch, T steps, I input size, H hidden. Internally time is the first axis.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from econmt_ops.backends.triton import MOST_UNITS, interpreted, serves, with_kernels
from econmt_ops.core.alignment import widened
from econmt_ops.core.chunks import reaches
from econmt_ops.core.dropout import Seed
from econmt_ops.core.dropout import dropout as drop_units
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.precision import recurrent_tf32
from econmt_ops.core.repeated import Inputs, UniqueRows, clean_rows, values_of
from econmt_ops.core.weights import AnyLSTMWeights, LSTMState, LSTMWeights
from econmt_ops.dispatch.registration import Gradients, Incoming, Operator
from econmt_ops.lstm import direct, recompute
from econmt_ops.lstm.persistent_gradients import (
    begins,
    gradients_of_inputs,
    gradients_of_recurrents,
    neighbours,
)
from econmt_ops.lstm.persistent_layer import PersistentLayer, Prepared, WorkspaceOfBiases, sizes

if TYPE_CHECKING:
    from econmt_ops.backends.triton.persistent import Partition

TRAITS = with_kernels(
    recompute.TRAITS, model_stash="attention", serves=lambda sizes, _: sizes["H"] <= MOST_UNITS
)


class Walked(NamedTuple):
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


def _empty(
    layer: PersistentLayer, keep: bool, dtype: torch.dtype | None = None, outputs: Tensor | None = None
) -> Walked:
    directions, steps, batch, hidden = sizes(layer)
    dtype = layer.inputs.dtype if dtype is None else dtype
    new = functools.partial(layer.inputs.new_empty, dtype=dtype)
    cells = steps if keep and reaches(layer.stash, "cells") else 0
    sums = steps if keep and reaches(layer.stash, "gates") else 0
    return Walked(
        new(steps, batch, directions * hidden) if outputs is None else outputs,
        new(directions, batch, hidden),
        new(directions, batch, hidden, dtype=torch.float32),
        new(directions, cells, batch, hidden, dtype=torch.float32),
        new(directions, sums, batch, 4 * hidden),
    )


def _partition(layer: PersistentLayer, back: bool) -> Partition:
    directions, _, batch, hidden = sizes(layer)
    products = getattr(torch, layer.products)
    return partition_of(batch, hidden, products, layer.inputs.device, directions, layer.together, back)


def partition_of(
    batch: int,
    hidden: int,
    products: torch.dtype,
    device: torch.device,
    directions: int,
    together: str,
    back: bool,
) -> Partition:
    """Returns how a walk forward, or back, is parted; other arguments as in `Layer`."""
    from econmt_ops.backends.triton.persistent import limits_of, plan

    limits = limits_of(device)
    found = plan(
        batch,
        hidden,
        products,
        limits,
        back=back,
        directions=directions,
        together={"yes": True, "no": False, "auto": None}[together],
    )
    assert found is not None, "a layer that no launch can serve"
    return found


def _first(given: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Returns initial states (D, B, H) in a type; None: zeros."""
    if len(given) == 1:
        return given[0].to(dtype).contiguous().unsqueeze(0)
    return torch.stack([part.to(dtype) for part in given]) if given else None


def _padding(layer: PersistentLayer) -> Tensor:
    """Returns a mask (T, B), True at padded positions."""
    assert layer.lengths is not None
    _, steps, _, _ = sizes(layer)
    return padding_mask(layer.lengths, steps, layer.inputs.device).t()


def _input_shares(ready: Prepared, sums: Tensor) -> None:
    """Writes the inputs' share of the gates to sums (D, T, B, 4H)."""
    layer = ready.layer
    for number, share in enumerate(sums.unbind(0)):
        flat = share.view(-1, share.shape[2])
        transposed = ready.weights[number].t()
        if layer.places is None:
            torch.addmm(ready.biases[number], ready.rows, transposed, out=flat)
        else:
            table = torch.addmm(ready.biases[number], ready.rows, transposed)
            torch.index_select(table, 0, layer.places.reshape(-1), out=flat)


def _add_first_shares(ready: Prepared, sums: Tensor) -> None:
    """Adds the first h's share of the gates to sums (D, T, B, 4H), where a walk begins."""
    layer = ready.layer
    for number, h in enumerate(layer.first_h):
        at, recurrent = begins(layer, number), ready.recurrent(number).t()
        h = h.to(sums.dtype)
        if isinstance(at, int):
            sums[number][at].addmm_(h, recurrent)
        else:
            sums[number][at] += h @ recurrent


def _forward(layer: PersistentLayer, keep: bool) -> Walked:
    return run_forward(layer, keep, layer.inputs.dtype)[0]


def run_forward(
    layer: PersistentLayer,
    keep: bool,
    dtype: torch.dtype,
    other_biases: Sequence[Tensor] = (),
    outputs: Tensor | None = None,
    partition: Partition | None = None,
) -> tuple[Walked, Tensor]:
    """Runs a layer.

    Args:
        layer: the arguments; inputs may have another type than ``dtype``.
        keep: True if a backward pass will follow.
        dtype: compute type.
        other_biases: second biases, (4H,) each, one a direction or none.
        outputs: (T, B, D H), contiguous, in which the outputs are written; made if None.
        partition: of the walk, if it is known.

    Returns:
        The results, and the inputs as they were multiplied, (T B, I').
    """
    from econmt_ops.backends.triton.persistent import counters_of, walk_forward

    directions, steps, batch, hidden = sizes(layer)
    result = _empty(layer, keep, dtype, outputs)
    kept = result.sums.shape[1] > 0
    sums = result.sums if kept else result.sums.new_empty(directions, steps, batch, 4 * hidden)
    partition = _partition(layer, back=False) if partition is None else partition
    # Padding may hold anything: no row's product is another's, and the walk does not look at it.
    ready = Prepared(
        layer, dtype, counters_of(partition, directions, batch, hidden)[1], other_biases=other_biases
    )
    _input_shares(ready, sums)
    if ready.recurrents.dtype != dtype:  # or the walk multiplies with the first h itself
        _add_first_shares(ready, sums)
    first_h, first_c = _first(layer.first_h, dtype), _first(layer.first_c, torch.float32)
    walk_forward(
        partition,
        sums,
        ready.recurrents,
        result.outputs,
        result.cells if result.cells.shape[1] else None,
        None if first_h is None or first_c is None else (first_h, first_c),
        (result.last_h, result.last_c),
        layer.lengths,
        tuple(layer.reverse),
        kept,
        ready.workspace,
    )
    return result, ready.rows


def _backward(layer: PersistentLayer, result: Walked, incoming: Incoming) -> Gradients:
    return run_backward(layer, result, incoming, layer.inputs.dtype)


def run_backward(
    layer: PersistentLayer,
    result: Walked,
    incoming: Incoming,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    inputs_have: bool = True,
    weights_have: bool = True,
    partition: Partition | None = None,
) -> Gradients:
    """Runs the backward pass of a layer.

    Args:
        layer: the arguments.
        result: what `run_forward` returned.
        incoming: gradients of the results by name.
        dtype: compute type.
        rows: the inputs as they were multiplied, if they were kept.
        inputs_have: True if the gradient of the inputs is asked for.
        weights_have: True if those of weights and biases are.
        partition: of the walk, if it is known.

    Returns:
        Gradients by name; the inputs' gradient has the type of ``layer.inputs``.
    """
    from econmt_ops.backends.triton.persistent import counters_of, walk_backward

    directions, _, batch, hidden = sizes(layer)
    partition = _partition(layer, back=True) if partition is None else partition
    counters = counters_of(partition, directions, batch, hidden)[1] + 1
    weights_have = weights_have and layer.gate_gradient is None
    biases = WorkspaceOfBiases(counters, directions, 4 * hidden, weights_have)
    cleaned = layer
    if layer.lengths is not None and rows is None:
        cleaned = layer._replace(inputs=_cleaned(layer))
    # Where gates have to be made again their products need the biases.
    again = not reaches(layer.stash, "gates")
    ready = Prepared(cleaned, dtype, biases.zeros, biases.more, rows=rows, back=not again)
    sums, cells = _kept(ready, result)
    dsums = sums if again else torch.empty_like(sums)
    doutputs = incoming["outputs"]
    if doutputs is None:
        doutputs = torch.zeros_like(result.outputs)
    doutputs = doutputs if doutputs.stride(2) == 1 else doutputs.contiguous()
    dlast = [None if part is None else part.contiguous() for part in (incoming["last_h"], incoming["last_c"])]
    dfirst_c = sums.new_empty(directions, batch, hidden, dtype=torch.float32)
    walk_backward(
        partition,
        sums,
        ready.recurrents,
        cells,
        doutputs,
        dsums,
        dlast[0],
        dlast[1],
        dfirst_c,
        layer.lengths,
        tuple(layer.reverse),
        ready.workspace,
    )
    return {
        "gate_gradient": None if layer.gate_gradient is None else dsums[0],
        **gradients_of_recurrents(ready, result.outputs, dsums, dlast[0], biases),
        **gradients_of_inputs(ready, dsums, inputs_have, weights_have),
        "first_c": dfirst_c.unbind(0) if layer.first_c else [],
    }


def _cleaned(layer: PersistentLayer) -> Tensor:
    """Returns the inputs, zero in the padding, whose values may be anything."""
    if layer.places is None:
        return layer.inputs.masked_fill(_padding(layer).unsqueeze(2), 0.0)
    return clean_rows(layer.inputs, layer.places, _padding(layer))


def _kept(ready: Prepared, result: Walked) -> tuple[Tensor, Tensor]:
    """The gates before their nonlinearities and the cell states, as they were kept or made again."""
    from econmt_ops.backends.triton.persistent import walk_cells

    layer = ready.layer
    directions, steps, batch, hidden = sizes(layer)
    sums, cells = result.sums, result.cells
    if not reaches(layer.stash, "gates"):
        sums = sums.new_empty(directions, steps, batch, 4 * hidden)
        _input_shares(ready, sums)
        _add_first_shares(ready, sums)
        for number, h in enumerate(result.outputs.chunk(directions, 2)):
            later, before = neighbours(layer, number, sums[number], h)
            later.addmm_(widened(before), widened(ready.recurrent(number)).t())
    if not reaches(layer.stash, "cells"):
        cells = cells.new_empty(directions, steps, batch, hidden)
        walk_cells(sums, _first(layer.first_c, torch.float32), cells, layer.lengths, tuple(layer.reverse))
    return sums, cells


def _saves(_layer: PersistentLayer) -> set[str]:
    """Returns the names of the tensors that the backward pass reads: all but the last states."""
    return {*PersistentLayer._fields, "outputs", "cells", "sums"}


_operator = Operator(
    "econmt_ops::persistent_lstm_layer",
    PersistentLayer,
    Walked,
    forward=_forward,
    fake=_empty,
    backward=_backward,
    saves=_saves,
    constants=lambda layer: () if layer.gate_gradient is None else ("weights", "recurrents", "biases"),
    is_recurrent=True,
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
    return torch.float16 if recurrent_tf32() else None


def products_of(inputs: Inputs, layers: Sequence[AnyLSTMWeights]) -> torch.dtype | None:
    """Returns `products_type`, or None if no launch fits the device."""
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
        lengths = lengths.to(values.device, non_blocking=True).contiguous()
    weights: list[Any] = [part for layer in layers for part in layer]
    firsts = [part for pair in state for part in pair]
    if isinstance(inputs, Tensor) and gate_gradient is None and direct.is_plain([inputs, *weights, *firsts]):
        name = str(products).removeprefix("torch.")
        call = direct.LayerCall(inputs.dtype, name, stash, tuple(reverse), together, lengths, 1)
        h, c = (torch.stack(parts) for parts in zip(*state, strict=True)) if state else (None, None)
        return direct.run_layer(call, inputs, h, c, weights)
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
    products = products_of(inputs, layers)
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
    products = products_of(inputs, layers)
    if products is None:
        return recompute.bidirectional_lstm(
            inputs, forward, backward, lengths=lengths, stash=stash, backend=_steps(inputs)
        )
    outputs, h, c = _run_layer(inputs, layers, [], lengths, [False, True], stash, products, together)
    return outputs, ((h[0], c[0]), (h[1], c[1]))
