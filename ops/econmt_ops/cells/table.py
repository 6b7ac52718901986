"""Table of all recurrent cells by name, and of the operations that run stacks of them."""

from __future__ import annotations

from typing import NamedTuple

from econmt_ops.cells.gru import GRU
from econmt_ops.cells.lnlstm import LNLSTM, LNLSTM_PER_GATE
from econmt_ops.cells.lstm import LSTM
from econmt_ops.cells.protocol import Cell
from econmt_ops.cells.scan import GILR_LSTM, MIN_GRU, MIN_LSTM, QRNN, QRNN_OF_TWO, SRU, SSRU


class LayerOpEntry(NamedTuple):
    """Operation over stacks of one cell.

    Attributes:
        cells: Cells whose weights it takes, one for each kind of weights.
        summary: Beginning of its documentation, with the equations.
    """

    cells: tuple[Cell, ...]
    summary: str


LAYER_OPS = {
    "lnlstm": LayerOpEntry(
        (LNLSTM, LNLSTM_PER_GATE),
        """Runs a stack of LSTM layers with layer normalization over a batch of sequences (Ba, Kiros and Hinton 2016).

    The equations are those of `lstm` with other sums under the gates: `N(W x_t) + N(U h_{t-1}) + b` for
    `LayerNormLSTMWeights`, or `N_k((W x_t + U h_{t-1} + b)_k)` for each gate k of `LayerNormPerGateLSTMWeights`; and
    `h_t = o tanh(N(c_t))` with the output gate o.""",
    ),
    "gru": LayerOpEntry(
        (GRU,),
        """Runs a stack of GRU layers, as `torch.nn.GRU`, over a batch of sequences (Cho et al. 2014).

    With `s = W x_t + b` and `v = U h_{t-1} + b'`: `r, z = sigmoid(s + v)`, `n = tanh(s + r v)` and
    `h_t = (1 - z) n + z h_{t-1}`. The weights of a layer are `GRUWeights` with the rows r, z, n. h is stored in the
    compute type between steps.""",
    ),
    "sru": LayerOpEntry(
        (SRU,),
        """Runs a stack of SRU layers over a batch of sequences (Lei, Zhang and Artzi 2017).

    `u = W x_t`, `f, r = sigmoid(W x_t + b)`, `c_t = f c_{t-1} + (1 - f) u` and `h_t = r tanh c_t + (1 - r) x_t`. The
    weights of a layer are `GateWeights(input (3H, I), bias (3H,))` with the rows u, f, r. If I is not H they are
    (4H, I) and (4H,); the last H rows project x_t to H values for h_t.""",
    ),
    "ssru": LayerOpEntry(
        (SSRU,),
        """Runs a stack of SSRU layers over a batch of sequences (Kim et al. 2019).

    `u = W x_t`, `f = sigmoid(W x_t + b)`, `c_t = f c_{t-1} + (1 - f) u` and `h_t = max(c_t, 0)`. The weights of a
    layer are `GateWeights(input (2H, I), bias (2H,))` with the rows u, f.""",
    ),
    "qrnn": LayerOpEntry(
        (QRNN, QRNN_OF_TWO),
        """Runs a stack of QRNN layers with fo-pooling over a batch of sequences (Bradbury et al. 2017).

    `z = tanh(W x_t + V x_{t-1} + b)`, `f, o = sigmoid(W x_t + V x_{t-1} + b)`, `c_t = f c_{t-1} + (1 - f) z` and
    `h_t = o c_t`. The weights of a layer are `GateWeights(input (3H, 2I), bias (3H,))` with the rows z, f, o and the
    columns of W before those of V; an input weight (3H, I) selects a window of one step, without V. With a window of
    two steps the states are c and x (B, I), the last input.""",
    ),
    "gilr_lstm": LayerOpEntry(
        (GILR_LSTM,),
        """Runs a stack of GILR-LSTM layers over a batch of sequences (Martin and Cundy 2018, section 3.3).

    `g = sigmoid(U x_t + d)`, `s_t = g s_{t-1} + (1 - g) tanh(U x_t + d)`, then from `W x_t + V s_{t-1} + b` the gates
    `f, i, o = sigmoid(.)` and `z = tanh(.)`, `c_t = f c_{t-1} + i z` and `h_t = o c_t`. The weights of a layer
    are `GILRLSTMWeights(surrogate (2H, I), surrogate_bias, input (4H, I), hidden (4H, H), bias)`. The surrogate's rows
    are its candidate, then g; those of the gates are z, f, i, o.""",
    ),
    "min_gru": LayerOpEntry(
        (MIN_GRU,),
        """Runs a stack of minGRU layers over a batch of sequences (Feng et al. 2024).

    `u = W x_t + b`, `f = sigmoid(W x_t + b)` and `h_t = c_t = f c_{t-1} + (1 - f) u`, where f is the paper's 1 - z. The
    weights of a layer are `GateWeights(input (2H, I), bias (2H,))` with the rows u, f.""",
    ),
    "min_lstm": LayerOpEntry(
        (MIN_LSTM,),
        """Runs a stack of minLSTM layers over a batch of sequences (Feng et al. 2024).

    `u = W x_t + b`, `f, i = sigmoid(W x_t + b)` and `h_t = c_t = (f c_{t-1} + i u) / (f + i)`. The weights of
    a layer are `GateWeights(input (3H, I), bias (3H,))` with the rows u, f, i.""",
    ),
}
"""Operations by name; that of the LSTM, `econmt_ops.lstm`, has kernels of its own."""

CELLS: dict[str, Cell] = {"lstm": LSTM, **{name: entry.cells[0] for name, entry in LAYER_OPS.items()}}
"""Cells by name; for a cell with several kinds of weights the first kind (gates normalized together, a window of one
step)."""
