"""Forward and backward passes of an LSTM layer by persistent kernels.

The inputs' share of the gates is one product before the launch; the gradients of weights and inputs are a few large
products after it. Gates and cell states that the stash level omits are recomputed by one product and a scan.

Sizes: D directions, B batch, T steps, I input size, H hidden. Internally time is the first axis.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from econmt_ops.core.alignment import widened
from econmt_ops.core.chunks import reaches
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.repeated import clean_rows
from econmt_ops.dispatch.registration import Gradients, Incoming
from econmt_ops.lstm.persistent_gradients import (
    begins,
    gradients_of_inputs,
    gradients_of_recurrents,
    neighbours,
)
from econmt_ops.lstm.persistent_layer import PersistentLayer, Prepared, WorkspaceOfBiases, sizes

if TYPE_CHECKING:
    from econmt_ops.backends.triton.persistent import Partition


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


def empty_results(
    layer: PersistentLayer, keep: bool, dtype: torch.dtype | None = None, outputs: Tensor | None = None
) -> Walked:
    """Returns results whose values are not set.

    Args:
        layer: the arguments.
        keep: True if a backward pass will follow.
        dtype: compute type; that of the inputs if None.
        outputs: (T, B, D H); made if None.
    """
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
    result = empty_results(layer, keep, dtype, outputs)
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
