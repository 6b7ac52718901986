"""The LSTM by partial forward propagation: h is stashed, the gates are recomputed.

A layer saves its inputs and outputs, and c once per block of steps (more at higher stash levels). The backward pass
recomputes a block's gates by two large products and c by a scan, loops over the steps with only the gradients of h and
c in sequence, and computes the gradients of weights and inputs by large products afterwards.

At padded positions the gates are closed (see reference.py): c is unchanged, and h and all gradients are 0.
Sizes: B batch, T steps, I input size, H hidden, D directions, K steps of a block. Internally time is the first axis.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from econmt_ops.backends import steps_for
from econmt_ops.core.lengths import padding_mask
from econmt_ops.core.weights import AnyLSTMWeights, LSTMState
from econmt_ops.dispatch.registration import Gradients, Incoming
from econmt_ops.dispatch.traits import Traits
from econmt_ops.lstm.direction import (
    Direction,
    LSTMArguments,
    LSTMResults,
    empty_results,
    layer_operator,
    run_layer,
)
from econmt_ops.products.low_rank import layers_of_tensors
from econmt_ops.products.repeated import Inputs, expanded
from econmt_ops.products.stack import StackOptions, last_of, run_stack

TRAITS = Traits(recomputes=True, loops=True, takes_stash=True, casts=True)


def _directions(call: LSTMArguments) -> list[Direction]:
    steps = len(call.inputs if call.places is None else call.places)
    padding = padding_mask(call.lengths, steps, call.inputs.device, time_first=True)
    run = steps_for(call.inputs, call.backend)
    layers = layers_of_tensors(call.weights, call.recurrents, call.biases)
    return [Direction(call, number, layer, run, padding) for number, layer in enumerate(layers)]


def _forward(call: LSTMArguments, keep: bool) -> LSTMResults:
    directions, results = _directions(call), empty_results(call, keep)
    outputs = results.outputs.chunk(len(directions), 2)
    for number, (direction, part) in enumerate(zip(directions, outputs, strict=True)):
        if results.gates.shape[1]:
            shares = direction.products(direction.read(0, direction.steps), 0, direction.steps)
            if len(directions) == 1:
                results = results._replace(gates=shares.unsqueeze(0))
            else:
                results.gates[number].copy_(shares)
            del shares
        direction.forward(LSTMResults(part, *(each[number] for each in results[1:])), keep)
    return results


def _backward(call: LSTMArguments, results: LSTMResults, incoming: Incoming) -> Gradients:
    directions = _directions(call)
    dinputs = torch.empty_like(directions[0].inputs, memory_format=torch.contiguous_format)
    doutputs, dh, dc = incoming["outputs"], incoming["last_h"], incoming["last_c"]
    dh = torch.zeros_like(torch.stack(call.first_h)) if dh is None else dh
    dc = torch.zeros_like(torch.stack(call.first_c)) if dc is None else dc
    # With a gate-gradient tensor, the gates' gradients are returned instead of the weights' gradients, which the caller
    # derives from them.
    dgates = None
    if call.gate_gradient is not None:
        dgates = torch.empty_like(call.gate_gradient, memory_format=torch.contiguous_format)
    gradients, matrices = [], []
    for number, direction in enumerate(directions):
        part = slice(number * direction.hidden, (number + 1) * direction.hidden)
        gradient = direction.backward(
            None if doutputs is None else doutputs[..., part],
            dh[number],
            dc[number],
            results._replace(
                outputs=results.outputs[..., part], cells=results.cells[number], gates=results.gates[number]
            ),
            dinputs,
            add=number > 0,
            dgates=dgates,
        )
        gradients.append(gradient)
        if dgates is None:
            matrices.append(gradient.matrices())
    return {
        "inputs": dinputs,
        "gate_gradient": dgates,
        "weights": [part for read, _ in matrices for part in read],
        "recurrents": [part for _, recurrent in matrices for part in recurrent],
        "biases": [gradient.bias for gradient in gradients] if dgates is None else [],
        "first_h": [gradient.first_h for gradient in gradients],
        "first_c": [gradient.first_c for gradient in gradients],
    }


_layer = layer_operator("lstm_layer", _forward, _backward)


def lstm(
    inputs: Inputs,
    layers: tuple[AnyLSTMWeights, ...],
    state: LSTMState,
    options: StackOptions,
    *,
    stash: str = "outputs",
    backend: str = "eager",
) -> tuple[Tensor, LSTMState]:
    """Implements `econmt_ops.lstm` and `econmt_ops.bidirectional_lstm`; see also `LSTMArguments`.

    Arguments are checked and, except for the weights, cast.
    """
    lengths = options.lengths
    # Rows are reversed in memory only if an initial state has to pass the padding before it, where h is 0. For the same
    # reason the last h of a forward direction is taken from the outputs.
    in_memory = options.reverse and lengths is not None and not options.from_zero
    ways = [False, True] if options.both_ways else [options.reverse and not in_memory]
    count = len(ways)

    def run(number: int, read: Inputs) -> tuple[Tensor, LSTMState]:
        directions = slice(number * count, (number + 1) * count)
        first, weights = state[directions], layers[directions]
        outputs, last_h, last_c = run_layer(_layer, read, weights, first, options, ways, stash, backend)
        last = []
        for way, part in enumerate(outputs.chunk(2, 2) if count == 2 else (outputs,)):
            ends = lengths is not None and not ways[way]
            last.append((last_of(part, first[way][0], lengths) if ends else last_h[way], last_c[way]))
        return outputs, tuple(last)

    bottom = expanded(inputs) if in_memory else inputs
    outputs, last = run_stack(run, bottom, len(layers) // count, options, reverses=in_memory)
    return outputs, tuple(itertools.chain.from_iterable(last))
