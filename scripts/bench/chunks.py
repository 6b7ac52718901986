"""Times an LSTM layer whose steps are divided into chunks.

    OMP_NUM_THREADS=1 python -m scripts.bench chunks --size 1024

The gradients of the weights are computed in each chunk ("each") or once after the last ("once"). A row for each number
of chunks has the milliseconds of both passes over all steps with stash "gates", the least processor time of several
turns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from econmt.bench.rows import Row
from econmt_ops import LSTMWeights, lstm
from econmt_ops.lstm.chunked import ChunkedLSTM
from scripts.bench.frame import CPU, Bench, in_turns
from scripts.bench.layers import lstm_weights

ROWS, STEPS = 32, 35
STASHES = {"reference": "auto", "recompute": "gates"}
"""Implementations to time, and what they keep; the first cannot leave its gradients for the end."""


def passes(weights: LSTMWeights, inputs: Tensor, length: int, how: str, once: bool) -> None:
    """Runs both passes of all chunks in the order of a pipeline's rank, and gives the weights new gradients."""
    for weight in weights:
        weight.grad = None
    rows, hidden = len(inputs), len(weights.bias) // 4
    layer, parts, stash = ChunkedLSTM(weights), [], STASHES[how]
    state = inputs.new_zeros(rows, hidden), inputs.new_zeros(rows, hidden, dtype=torch.float32)
    for part in torch.split(inputs, length, 1):
        read = part.detach().requires_grad_()
        first = state[0].detach().requires_grad_(), state[1].detach().requires_grad_()
        if once:
            outputs, state = layer(read, first, stash=stash, implementation=how)
        else:
            outputs, (state,) = lstm(read, (weights,), state=(first,), stash=stash, implementation=how)
        parts.append((first, [outputs, *state]))
    gradients: list[Tensor | None] = [None, None]
    for first, made in reversed(parts):
        incoming = [
            torch.ones_like(each) if gradient is None else gradient
            for each, gradient in zip(made, [None, *gradients], strict=True)
        ]
        torch.autograd.backward(made, incoming)
        gradients = [part.grad for part in first]
    layer.backward()


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, turns=5)
    bench.add_argument("--size", type=int, default=512, help="units of the layer (%(default)s)")
    given = bench.begin(words)
    torch.manual_seed(0)
    weights = lstm_weights(given.size, torch.float32, CPU)
    inputs = torch.randn(ROWS, STEPS, given.size)
    ways = [(how, once) for how in STASHES for once in (False, True) if STASHES[how] != "auto" or not once]

    def rows() -> Iterator[Row]:
        for chunks in (1, 2, 4, 7, 12, 18):
            length = -(-STEPS // chunks)
            runs = {
                f"{how} {'once' if once else 'each'}": partial(passes, weights, inputs, length, how, once)
                for how, once in ways
            }
            timings = in_turns(runs, CPU, turns=given.turns, clock=time.process_time)
            best = {name: 1e3 * min(timing.samples) for name, timing in timings.items()}
            yield {"chunks": -(-STEPS // length), **best}

    bench.report(rows(), "milliseconds of both passes")
