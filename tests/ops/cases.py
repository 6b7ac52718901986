"""Ops with their tensors and definitions, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import econmt_ops
from econmt_ops import (
    AttentionalLSTMState,
    AttentionalLSTMWeights,
    ContextGate,
    Coverage,
    GateWeights,
    GILRLSTMWeights,
    GRUWeights,
    LayerNormLSTMWeights,
    LayerNormPerGateLSTMWeights,
    LSTMWeights,
)
from econmt_ops.dispatch.traits import implementations_of
from tests.ops import definitions
from tests.ops.helpers import Make

NONE: dict[str, Any] = {}
"""No options."""


class Sizes(NamedTuple):
    """Batch, steps, source positions, widths of inputs, h, keys and values, layers, rank and coverage."""

    B: int = 3
    T: int = 3
    S: int = 4
    I: int = 3  # noqa: E741
    H: int = 5
    A: int = 7
    E: int = 4
    L: int = 2
    R: int = 2
    W: int = 2


class Case(NamedTuple):
    """An op with a definition.

    Attributes:
        op: Function of econmt_ops.
        tensors: Returns the tensors of a call, with a state if the op takes one.
        definition: Function of `definitions` that takes the same tensors.
        options: Options of the calls of both.
    """

    op: Any
    tensors: Callable[[Make, Sizes], dict[str, Any]]
    definition: Callable[..., Any]
    options: dict[str, Any] = NONE

    def takes(self, option: str) -> bool:
        """True if the op has a parameter of that name."""
        return option in inspect.signature(self.op).parameters

    def implementations(self, device: str) -> list[str]:
        """Names of the implementations that this machine can run, but for those that compile for seconds."""
        found = implementations_of(self.op.__name__).values()
        return [
            each.name
            for each in found
            if device in each.traits.devices and each.traits.is_available() and not each.traits.warms_up
        ]


Shapes = Callable[[int, int], tuple[tuple[int, ...], ...]]


def gates(count: int, window: int = 1) -> Shapes:
    """Shapes of the weights of a cell whose gates read the input alone."""
    return lambda i, h: ((count * h, window * i), (count * h,))


def layer_normed(i: int, h: int) -> tuple[tuple[int, ...], ...]:
    return ((4 * h, i), (4 * h, h), *[(4 * h,)] * 3, *[(h,)] * 2)


class Cell(NamedTuple):
    """A cell: op, step, class and shapes of a layer's weights for I and H, and the widths of its states."""

    op: Any
    step: definitions.Step
    weights: Any
    shapes: Shapes
    states: Callable[[int, int], tuple[int, ...]] = lambda _, h: (h,)

    def layers(self, make: Make, inputs: int, hidden: int, count: int) -> tuple[Any, ...]:
        """Weights of a stack."""
        shapes = [self.shapes(hidden if k else inputs, hidden) for k in range(count)]
        return tuple(self.weights(*(make(*shape, scale=0.6) for shape in layer)) for layer in shapes)

    def tensors(self, make: Make, sizes: Sizes) -> dict[str, Any]:
        widths = [(sizes.H if k else sizes.I, sizes.H) for k in range(sizes.L)]
        return {
            "inputs": make(sizes.B, sizes.T, sizes.I),
            "layers": self.layers(make, sizes.I, sizes.H, sizes.L),
            "state": tuple(tuple(make(sizes.B, each) for each in self.states(*width)) for width in widths),
        }


CELLS = {
    "sru": Cell(
        econmt_ops.sru, definitions.sru_step, GateWeights, lambda i, h: gates(3 if i == h else 4)(i, h)
    ),
    "ssru": Cell(econmt_ops.ssru, definitions.ssru_step, GateWeights, gates(2)),
    "qrnn": Cell(econmt_ops.qrnn, definitions.qrnn_step, GateWeights, gates(3)),
    "qrnn-2": Cell(econmt_ops.qrnn, definitions.qrnn_step, GateWeights, gates(3, 2), lambda i, h: (h, i)),
    "min_gru": Cell(econmt_ops.min_gru, definitions.min_gru_step, GateWeights, gates(2)),
    "min_lstm": Cell(econmt_ops.min_lstm, definitions.min_lstm_step, GateWeights, gates(3)),
    "gilr_lstm": Cell(
        econmt_ops.gilr_lstm, definitions.gilr_lstm_step, GILRLSTMWeights,
        lambda i, h: ((2 * h, i), (2 * h,), (4 * h, i), (4 * h, h), (4 * h,)), lambda _, h: (h, h),
    ),
    "gru": Cell(
        econmt_ops.gru, definitions.gru_step, GRUWeights, lambda i, h: ((3 * h, i), (3 * h, h), (3 * h,), (3 * h,))
    ),
    "lnlstm": Cell(
        econmt_ops.lnlstm, definitions.lnlstm_step, LayerNormLSTMWeights, layer_normed, lambda _, h: (h, h)
    ),
    "lnlstm-per-gate": Cell(
        econmt_ops.lnlstm, definitions.lnlstm_step, LayerNormPerGateLSTMWeights, layer_normed, lambda _, h: (h, h)
    ),
    "lstm": Cell(
        econmt_ops.lstm, definitions.lstm_step, LSTMWeights, lambda i, h: ((4 * h, i), (4 * h, h), (4 * h,)),
        lambda _, h: (h, h),
    ),
}  # fmt: skip
SCANS = [name for name in CELLS if name not in ("gru", "lnlstm", "lnlstm-per-gate", "lstm")]
"""Cells whose states follow from a scan."""


def low_rank(make: Make, sizes: Sizes) -> dict[str, Any]:
    return CELLS["lstm"].tensors(make, sizes) | {
        "layers": make.low_rank_layers(sizes.I, sizes.H, sizes.L, sizes.R)
    }


def both_ways(make: Make, sizes: Sizes, *, factorised: bool) -> dict[str, Any]:
    if factorised:
        ways = [make.low_rank_layer(sizes.I, sizes.H, rank) for rank in (sizes.R, sizes.R + 1)]
    else:
        ways = [make.layer(sizes.I, sizes.H) for _ in range(2)]
    return {"inputs": make(sizes.B, sizes.T, sizes.I), "forward": ways[0], "backward": ways[1]}


def attention(make: Make, sizes: Sizes, *, normed: bool) -> dict[str, Any]:
    return {
        "query": make(sizes.B, sizes.T, sizes.A),
        "keys": make(sizes.B, sizes.S, sizes.A),
        "values": make(sizes.B, sizes.S, sizes.E),
        "score_weight": make(sizes.A),
        "layer_norm": (make(sizes.A), make(sizes.A)) if normed else None,
    }


def recurrence(make: Make, sizes: Sizes) -> dict[str, Any]:
    shape = sizes.B, sizes.T, sizes.H
    return {"decay": make(*shape).sigmoid(), "inputs": make(*shape), "initial": make(sizes.B, sizes.H)}


class Parts(NamedTuple):
    """Parts of a decoder.

    Attributes:
        cell: Cell of the layers: a name of `CELLS`, or "low-rank".
        coverage: Kind of the coverage, or "".
        attention: "additive", "layer_norm", "general" (a dot of a projected query) or "dot" (of h itself).
        unasked: True for an additive attention of h itself.
        normed: True for a normalisation of the output.
        gated: True for a context gate.
        feeds: True if the bottom layer reads the output of the step before.
        narrow: True for a coverage of one value.
    """

    cell: str = "lstm"
    coverage: str = ""
    attention: str = "additive"
    unasked: bool = False
    normed: bool = False
    gated: bool = False
    feeds: bool = True
    narrow: bool = False

    def __str__(self) -> str:
        values = self._asdict()
        words = [values.pop(name) for name in ("cell", "coverage", "attention")]
        words += [name if name != "feeds" else "" for name, value in values.items() if value]
        return "-".join(["attentional", *filter(None, words), *(["unfed"] if not self.feeds else [])])

    def coverage_of(self, make: Make, sizes: Sizes, a: int) -> Coverage | None:
        if not self.coverage:
            return None
        w = self.width(sizes)
        p = {"sum": 1, "gru": 3 * w}.get(self.coverage, w)
        further = (
            (None,) * 3 if self.coverage == "sum" else (make(p), make(p, sizes.H, scale=0.3), make(p, w))
        )
        return Coverage(self.coverage, make(a, w), make(sizes.B, sizes.S, p), *further)

    def width(self, sizes: Sizes) -> int:
        return 1 if self.narrow else sizes.W

    def tensors(self, make: Make, sizes: Sizes) -> dict[str, Any]:
        b, s, h, e = sizes.B, sizes.S, sizes.H, sizes.E
        without_query = self.attention == "dot" or self.unasked
        a = h if without_query else sizes.A
        bottom = sizes.I + h * self.feeds
        if self.cell == "low-rank":
            layers = make.low_rank_layers(bottom, h, sizes.L, sizes.R)
        else:
            layers = CELLS[self.cell].layers(make, bottom, h, sizes.L)
        coverage = self.coverage_of(make, sizes, a)
        weights = AttentionalLSTMWeights(
            layers,
            None if without_query else make(a, h, scale=0.5),
            make(a) if self.attention in ("additive", "layer_norm") else None,
            make(h, h + e, scale=0.3),
            make(h) if self.attention != "layer_norm" or self.gated else None,
            (make(h), make(h)) if self.normed else None,
            ContextGate(make(h, h + e, scale=0.5), make(h), make(h)) if self.gated else None,
            coverage,
        )
        states = 1 if self.cell == "gru" else 2
        first = tuple(tuple(make(b, h, scale=0.5) for _ in range(states)) for _ in range(sizes.L))
        covered = make(b, s, self.width(sizes)) if coverage else None
        return {
            "inputs": make(b, sizes.T, sizes.I),
            "keys": make(b, s, a),
            "values": make(b, s, e),
            "weights": weights,
            "state": AttentionalLSTMState(first, make(b, h, scale=0.5), covered),
            "layer_norm": (make(a), make(a)) if self.attention == "layer_norm" else None,
        }


DECODERS = [
    *(
        Parts(attention=kind, feeds=feeds)
        for kind in ("additive", "layer_norm", "general", "dot")
        for feeds in (True, False)
    ),
    *(Parts("low-rank", feeds=feeds) for feeds in (True, False)),
    *(Parts(cell, feeds=feeds) for cell in ("gru", "lnlstm", "lnlstm-per-gate") for feeds in (True, False)),
    Parts("gru", attention="dot"),
    Parts("gru", attention="layer_norm"),
    Parts(normed=True),
    Parts(gated=True, attention="dot"),
    Parts("gru", normed=True, gated=True),
    Parts(normed=True, gated=True, feeds=False),
    *(Parts(coverage=kind) for kind in ("sum", "tanh", "sigmoid", "relu", "softrelu", "gru")),
    Parts("lnlstm", "sum", normed=True, attention="layer_norm", narrow=True),
    Parts("gru", "tanh", gated=True, narrow=True),
    Parts(coverage="gru", unasked=True),
    Parts(coverage="tanh", gated=True, unasked=True),
    Parts("lnlstm-per-gate", "gru", attention="layer_norm"),
]


def decoder(parts: Parts) -> Case:
    options = {"input_feeding": parts.feeds, "scale": 0.7 if parts.attention in ("general", "dot") else 1.0}
    return Case(econmt_ops.attentional_lstm, parts.tensors, definitions.attentional_lstm, options)


CASES: dict[str, Case] = {
    **{
        name: Case(cell.op, cell.tensors, partial(definitions.recurrent, cell.step))
        for name, cell in CELLS.items()
    },
    "lstm-low-rank": Case(econmt_ops.lstm, low_rank, partial(definitions.recurrent, definitions.lstm_step)),
    "bidirectional": Case(
        econmt_ops.bidirectional_lstm, partial(both_ways, factorised=False), definitions.bidirectional_lstm
    ),
    "bidirectional-low-rank": Case(
        econmt_ops.bidirectional_lstm, partial(both_ways, factorised=True), definitions.bidirectional_lstm
    ),
    "additive_attention": Case(
        econmt_ops.additive_attention, partial(attention, normed=False), definitions.additive_attention
    ),
    "additive_attention-norm": Case(
        econmt_ops.additive_attention, partial(attention, normed=True), definitions.additive_attention
    ),
    "linear_recurrence": Case(econmt_ops.linear_recurrence, recurrence, definitions.linear_recurrence),
    **{str(parts): decoder(parts) for parts in DECODERS},
}
