"""Decoders of every cell, output and coverage, as arguments of `econmt_ops.attentional_lstm`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from econmt_ops import (
    AttentionalLSTMState,
    AttentionalLSTMWeights,
    ContextGate,
    Coverage,
    GRUWeights,
    LayerNormLSTMWeights,
    LayerNormPerGateLSTMWeights,
    LSTMWeights,
)
from tests.ops.helpers import Make

CELLS = {
    "lstm": LSTMWeights,
    "gru": GRUWeights,
    "lnlstm": LayerNormLSTMWeights,
    "lnglstm": LayerNormPerGateLSTMWeights,
}


class Case(NamedTuple):
    """Parts of a decoder, and the options of the call."""

    cell: str = "lstm"
    coverage: str = ""
    normed: bool = False
    gated: bool = False
    layer_norm: bool = False
    dot: bool = False
    residual: bool = False
    dropout: float = 0.0
    feeds: bool = True
    asks: bool = True
    layers: int = 2
    width: int = 2
    full: bool = False

    def __str__(self) -> str:
        return (
            "-".join(
                str(value) if isinstance(value, str) else name
                for name, value in self._asdict().items()
                if value not in (False, 0.0, "", 2) and (name in ("feeds", "asks")) is not value
            )
            + ("" if self.feeds else "-unfed")
            + ("" if self.asks else "-unasked")
        )


def layer(make: Make, kind: type[Any], inputs: int, hidden: int) -> Any:
    rows = (3 if kind is GRUWeights else 4) * hidden
    sizes = {
        "input": (rows, inputs),
        "hidden": (rows, hidden),
        "cell_gain": (hidden,),
        "cell_bias": (hidden,),
    }
    return kind(*(make(*sizes.get(name, (rows,)), scale=0.5) for name in kind._fields))


def arguments(make: Make, case: Case, sizes: Any) -> dict[str, Any]:
    """The tensors of a call with sizes B, T, S, I, H, A, E; keys and values are NaN past the lengths."""
    b, t, s, i, h, a, e = (getattr(sizes, name) for name in "BTSIHAE")
    if case.dot or not case.asks:
        a = h
    bottom = i + h if case.feeds else i
    coverage = None
    if case.coverage:
        w = case.width
        p = {"sum": 1, "gru": 3 * w}.get(case.coverage, w)
        further = (None,) * 3 if case.coverage == "sum" else (make(p), make(p, h, scale=0.3), make(p, w))
        coverage = Coverage(case.coverage, make(a, w), make(b, s, p), *further)
    weights = AttentionalLSTMWeights(
        tuple(layer(make, CELLS[case.cell], h if k else bottom, h) for k in range(case.layers)),
        None if case.dot or not case.asks else make(a, h, scale=0.5),
        None if case.dot else make(a),
        make(h, h + e, scale=0.3),
        make(h),
        (make(h), make(h)) if case.normed else None,
        ContextGate(make(h, h + e, scale=0.5), make(h), make(h)) if case.gated else None,
        coverage,
    )
    states = 1 if case.cell == "gru" else 2
    first = tuple(tuple(make(b, h, scale=0.5) for _ in range(states)) for _ in range(case.layers))
    found = {
        "inputs": make(b, t, i),
        "keys": make(b, s, a),
        "values": make(b, s, e),
        "weights": weights,
        "state": AttentionalLSTMState(
            first, make(b, h, scale=0.5), make(b, s, case.width) if coverage else None
        ),
        "layer_norm": (make(a), make(a)) if case.layer_norm else None,
    }
    if not case.full:
        padding = torch.arange(s, device=make.device) >= lengths_of(case, sizes, make.device).unsqueeze(1)
        for name in ("keys", "values"):
            found[name][padding] = float("nan")
        if coverage:
            found["state"].coverage[padding] = 0.0
            coverage.shares[padding] = float("nan")
    return found


def lengths_of(case: Case, sizes: Any, device: str) -> Any:
    """Lengths of the sentences, from all positions down to none."""
    if case.full:
        return None
    return torch.linspace(sizes.S, 0, sizes.B, device=device).long()


def options(case: Case) -> dict[str, Any]:
    """The other options of the call."""
    return {
        "input_feeding": case.feeds,
        "residual": case.residual,
        "dropout": case.dropout,
        "dropout_seed": 5 if case.dropout else None,
        "scale": 0.7 if case.dot else 1.0,
    }


PARTS = [
    *(Case(cell) for cell in CELLS if cell != "lstm"),
    *(Case(cell, residual=True, dropout=0.3) for cell in CELLS if cell != "lstm"),
    *(Case(cell, feeds=False) for cell in CELLS if cell != "lstm"),
    Case("gru", dot=True),
    Case("gru", layer_norm=True, layers=1, full=True),
    Case("lstm", normed=True),
    Case("lstm", gated=True, dot=True),
    Case("gru", normed=True, gated=True, dropout=0.3),
    Case("lstm", normed=True, gated=True, feeds=False),
    *(Case("lstm", kind) for kind in ("sum", "tanh", "sigmoid", "relu", "softrelu", "gru")),
    Case("lnlstm", "sum", width=1, normed=True, layer_norm=True, layers=1),
    Case("gru", "tanh", width=1, gated=True),
    Case("lstm", "gru", asks=False),
    Case("lstm", "tanh", gated=True, asks=False),
    Case("lnglstm", "gru", layer_norm=True, residual=True, dropout=0.3, full=True),
]
