"""Cells whose state is a linear recurrence, so that no matrix product depends on the previous step.

The products p = W x + b of all steps have these parts: a candidate u, the gates f (and i, o) and, if a highway
connection needs it, a projection of the input to H values.

    c_t = a_t c_{t-1} + b_t         a, b from u, f, i        the *recurrence*, one of those below
    h_t = output(c_t, o_t, x_t)                              the *output*, one of those below

    coupled     a = f           b = (1 - f) u       du = d (1 - f)      df = (e - d u) f (1 - f)
    gated       a = f           b = i u             du = d i            df = e f (1 - f)        di = d u i (1 - i)
    shared      a = s           b = (1 - s) u       du = d (1 - s)      ds = (e - d u) s (1 - s)
                                                    df = ds (1 - f)     di = -ds (1 - i)

    plain       h = c                               dc = dh
    relu        h = max(c, 0)                       dc = dh where c > 0
    gate        h = o c                             dc = dh o           do = dh c o (1 - o)
    highway     h = o tanh c + (1 - o) x            dc = dh o (1 - tanh^2 c)    do = dh (tanh c - x) o (1 - o)
                                                    dx = dh (1 - o)

In a shared recurrence s = f / (f + i) is computed from the sums F and I under the gates f = sigmoid(F) and
i = sigmoid(I), as sigmoid(log f - log i), in kernels as (1 + e^-I) / (2 + e^-F + e^-I), because the gates may
underflow while their ratio does not.

d is the gradient of b_t, which is the gradient of c_t including all later steps: d_t = dc_t + a_{t+1} d_{t+1}.
e = d_t c_{t-1} is the gradient of a_t.

Shapes: each part is (..., H), in the accumulate type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.cells.protocol import Cell
from econmt_ops.core.weights import GateWeights, GILRLSTMWeights

Parts = Sequence[Tensor]


def through_sigmoid(dgate: Tensor, gate: Tensor) -> Tensor:
    """Computes the gradient of a sigmoid's input from that of its output: dgate gate (1 - gate)."""
    gradient: Tensor = torch.ops.aten.sigmoid_backward(dgate, gate)
    return gradient


def _share(f: Tensor, i: Tensor) -> Tensor:
    """Computes sigmoid(f) / (sigmoid(f) + sigmoid(i)) without underflow."""
    return torch.sigmoid(functional.logsigmoid(f) - functional.logsigmoid(i))


class Formula(NamedTuple):
    """Recurrence or output of those above, with the number of gates that it reads."""

    name: str
    gates: int


COUPLED, GATED, SHARED = Formula("coupled", 1), Formula("gated", 2), Formula("shared", 2)
PLAIN, RELU, GATE, HIGHWAY = (
    Formula("plain", 0),
    Formula("relu", 0),
    Formula("gate", 1),
    Formula("highway", 1),
)


class ScanCell(NamedTuple):
    """Cell with one linear recurrence: its formulas, and whether the candidate u passes through tanh (``squashes``)."""

    name: str
    recurrence: Formula
    output: Formula
    squashes: bool = False

    @property
    def gates(self) -> int:
        """Number of H-wide parts of the products, without the input projection of a highway."""
        return 1 + self.recurrence.gates + self.output.gates

    def activate(self, products: Tensor, hidden: int) -> list[Tensor]:
        """Applies the nonlinearities to the parts of products (..., K H): u, f(, i)(, o)(, projection of the input).

        A shared recurrence gets f and i before their sigmoid.
        """
        u, *rest = torch.split(products, hidden, -1)
        count = self.recurrence.gates + self.output.gates
        if self.recurrence == SHARED:
            assert not self.squashes
            return [u, *rest[:2], *(o.sigmoid() for o in rest[2:count]), *rest[count:]]
        gates = torch.split(products[..., hidden : (1 + count) * hidden].sigmoid(), hidden, -1)
        return [torch.tanh(u) if self.squashes else u, *gates, *rest[count:]]

    def around(self, parts: Parts, read: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the output gate, and the highway's input: ``read``, or its projection among the parts."""
        o = parts[1 + self.recurrence.gates] if self.output.gates else None
        if self.output != HIGHWAY:
            return o, None
        return o, parts[-1] if len(parts) > self.gates else read.to(parts[0].dtype)

    def start(self, products: Tensor, hidden: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """Computes the activated parts, a and b."""
        parts = self.activate(products, hidden)
        u, f = parts[:2]
        if self.recurrence == GATED:
            return parts, f, parts[2] * u
        if self.recurrence == SHARED:
            f = _share(f, parts[2])
        return parts, f, torch.addcmul(u, f, u, value=-1.0)

    def finish(self, parts: Parts, c: Tensor, read: Tensor) -> Tensor:
        """Computes h from the activated parts, c and the input."""
        o, x = self.around(parts, read)
        if o is None:
            return c.relu() if self.output == RELU else c
        return o * c if x is None else torch.lerp(x, torch.tanh(c), o)

    def finish_back(
        self, parts: Parts, c: Tensor, read: Tensor, dh: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Computes the gradients of c, of the sum under the output gate, and of the highway's input."""
        o, x = self.around(parts, read)
        if o is None:
            return (dh * (c > 0) if self.output == RELU else dh), None, None
        if x is None:
            return dh * o, through_sigmoid(dh * c, o), None
        squashed, through = torch.tanh(c), dh * o
        dc: Tensor = torch.ops.aten.tanh_backward(through, squashed)
        return dc, through_sigmoid(dh * (squashed - x), o), dh - through

    def start_back(
        self, parts: Parts, ddecay: Tensor, delta: Tensor, rest: Sequence[Tensor], products: Tensor
    ) -> Tensor:
        """Writes the gradients of the products over ``products`` (..., K H).

        Those of a and b may be overwritten; ``rest`` are the gradients from `finish_back` of the parts that follow.
        """
        gradients = self._sums_back(parts, ddecay, delta)
        if self.squashes:
            gradients[0] = torch.ops.aten.tanh_backward(gradients[0], parts[0])
        for target, gradient in zip(
            torch.split(products, parts[0].shape[-1], -1), [*gradients, *rest], strict=True
        ):
            target.copy_(gradient)
        return products

    def _sums_back(self, parts: Parts, ddecay: Tensor, delta: Tensor) -> list[Tensor]:
        """Computes the gradients of u and of the gates' sums from those of a and b, which may be overwritten."""
        u, f = parts[:2]
        if self.recurrence == GATED:
            i = parts[2]
            return [delta * i, through_sigmoid(ddecay, f), through_sigmoid(delta * u, i)]
        dshare = ddecay.addcmul_(delta, u, value=-1.0)
        if self.recurrence == COUPLED:
            return [torch.addcmul(delta, delta, f, value=-1.0), through_sigmoid(dshare, f)]
        share = _share(f, parts[2])
        dsum = through_sigmoid(dshare, share)
        du = torch.addcmul(delta, delta, share, value=-1.0)
        return [du, dsum * torch.sigmoid(-f), -dsum * torch.sigmoid(-parts[2])]


CELLS: dict[str, ScanCell] = {}
"""Recurrences by name; a layer adds its own."""


class ScanInputs(NamedTuple):
    """Arguments of kernels for one recurrence, whose products exist already.

    Attributes:
        cell: Recurrence to run.
        products: (B, T, K H), contiguous.
        bias: (K H,), to be added to the products; None if they include it.
        read: (B, T, I), the input, which a highway reads if I is H.
        first: c before the first step, (B, H), in the accumulate type.
        lengths: (B,), or None.
    """

    cell: ScanCell
    products: Tensor
    bias: Tensor | None
    read: Tensor
    first: Tensor
    lengths: Tensor | None


class ScannedArguments(NamedTuple):
    """Arguments of one recurrence of a layer over whole sequences, in forward direction.

    All values are computed in the type of the sources, whatever the type of the weights, whose gradients have their own
    type.

    Attributes:
        sources: Inputs of the products, (B, T, .) each; a highway reads the first.
        weights: (K H, .) for each source. bias: (K H,). first: c before the first step, (B, H).
        cell: Name of the recurrence, as in `CELLS`.
        before: Value before the first step of the last source, (B, .), if it is read one step late; or None.
        lengths: (B,), or None. stash: Stash level, see `econmt_ops.core.chunks.STASHES`.
        backend: "triton" for the kernels of a GPU, or "".
    """

    sources: list[Tensor]
    weights: list[Tensor]
    bias: Tensor
    first: Tensor
    cell: str
    before: Tensor | None = None
    lengths: Tensor | None = None
    stash: str = "outputs"
    backend: str = ""


Stage = Callable[[ScannedArguments], tuple[Tensor, Tensor]]
"""Function that runs one recurrence: returns outputs (B, T, H) and the c (B, H) after each row's last step. It adds
lengths, stash level and backend to its arguments."""


class ScanLayer(Cell):
    """Layer of one recurrence, a `econmt_ops.cells.protocol.Cell` with that summary whose only state is c."""

    states: tuple[str, ...] = ("c",)
    weights: type[Any] = GateWeights
    shapes = {"input": "", "bias": ""}  # noqa: RUF012 - see `shapes_of`

    def __init__(self, cell: ScanCell, summary: str) -> None:
        self.name, self.cell, self.summary = cell.name, cell, summary
        CELLS[cell.name] = cell

    def gates(self, inputs: int, hidden: int) -> int:
        """Returns K, the number of parts of the products; a highway needs one more if I is not H."""
        return self.cell.gates + (self.cell.output.name == "highway" and inputs != hidden)

    def shapes_of(self, inputs: int, hidden: int) -> dict[str, str]:
        """See `Cell`."""
        rows = f"{self.gates(inputs, hidden)}H"
        return {**self.shapes, "input": f"{rows} I", "bias": rows}

    def hidden_size(self, weights: Any, inputs: int) -> int | None:
        """See `Cell`."""
        if not isinstance(weights.bias, Tensor):
            return None
        rows = weights.bias.numel()
        if self.gates(inputs, inputs) * inputs == rows:
            return inputs
        return rows // self.gates(inputs, -1)

    def run(
        self, stage: Stage, inputs: Tensor, weights: Any, state: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the outputs (B, T, H) and the c after each row's last step."""
        outputs, c = stage(
            ScannedArguments([inputs], [weights.input], weights.bias, state[0], self.cell.name)
        )
        return outputs, (c,)


class WindowLayer(ScanLayer):
    """Layer whose products also read the input of the step before; its states are c and that input, x (B, I)."""

    states: tuple[str, ...] = ("c", "x")

    def shapes_of(self, inputs: int, hidden: int) -> dict[str, str]:
        """See `Cell`."""
        shapes = super().shapes_of(inputs, hidden)
        return shapes | {"input": shapes["input"].replace("I", "2I")}

    def run(
        self, stage: Stage, inputs: Tensor, weights: Any, state: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns outputs and c as `ScanLayer` does, also for a window of one step; the caller adds the last input."""
        size = inputs.shape[-1]
        if weights.input.shape[1] == size:
            return super().run(stage, inputs, weights, state)
        matrices = [weights.input[:, :size], weights.input[:, size:]]
        c, before = state
        outputs, c = stage(
            ScannedArguments([inputs, inputs], matrices, weights.bias, c, self.cell.name, before)
        )
        return outputs, (c,)


class SurrogateLayer(ScanLayer):
    """LSTM whose gates read a linear surrogate s of h (Martin and Cundy 2018); its states are s and c."""

    states: tuple[str, ...] = ("s", "c")
    weights: type[Any] = GILRLSTMWeights
    shapes = {"surrogate": "2H I", "surrogate_bias": "2H", "input": "", "hidden": "4H H", "bias": ""}  # noqa: RUF012

    def __init__(self, surrogate: ScanCell, cell: ScanCell, summary: str) -> None:
        super().__init__(cell, summary)
        self.surrogate = CELLS[surrogate.name] = surrogate

    def run(
        self, stage: Stage, inputs: Tensor, weights: Any, state: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `ScanLayer`."""
        s, c = state
        before, matrices = s.to(inputs.dtype), [weights.input, weights.hidden]
        below = [weights.surrogate], weights.surrogate_bias
        seen, s = stage(ScannedArguments([inputs], *below, s, self.surrogate.name))
        outputs, c = stage(
            ScannedArguments([inputs, seen], matrices, weights.bias, c, self.cell.name, before)
        )
        return outputs, (s, c)


SRU = ScanLayer(
    ScanCell("sru", COUPLED, HIGHWAY),
    """Runs a stack of SRU layers over a batch of sequences (Lei, Zhang and Artzi 2017).

    `u = W x_t`, `f, r = sigmoid(W x_t + b)`, `c_t = f c_{t-1} + (1 - f) u` and `h_t = r tanh c_t + (1 - r) x_t`. The
    weights of a layer are `GateWeights(input (3H, I), bias (3H,))` with the rows u, f, r. If I is not H they are
    (4H, I) and (4H,); the last H rows project x_t to H values for h_t.""",
)
SSRU = ScanLayer(
    ScanCell("ssru", COUPLED, RELU),
    """Runs a stack of SSRU layers over a batch of sequences (Kim et al. 2019).

    `u = W x_t`, `f = sigmoid(W x_t + b)`, `c_t = f c_{t-1} + (1 - f) u` and `h_t = max(c_t, 0)`. The weights of a
    layer are `GateWeights(input (2H, I), bias (2H,))` with the rows u, f.""",
)
_QRNN = (
    ScanCell("qrnn", COUPLED, GATE, squashes=True),
    """Runs a stack of QRNN layers with fo-pooling over a batch of sequences (Bradbury et al. 2017).

    `z = tanh(W x_t + V x_{t-1} + b)`, `f, o = sigmoid(W x_t + V x_{t-1} + b)`, `c_t = f c_{t-1} + (1 - f) z` and
    `h_t = o c_t`. The weights of a layer are `GateWeights(input (3H, 2I), bias (3H,))` with the rows z, f, o and the
    columns of W before those of V; an input weight (3H, I) selects a window of one step, without V. With a window of
    two steps the states are c and x (B, I), the last input.""",
)
QRNN, QRNN_OF_TWO = ScanLayer(*_QRNN), WindowLayer(*_QRNN)
GILR_LSTM = SurrogateLayer(
    ScanCell("gilr", COUPLED, PLAIN, squashes=True),
    ScanCell("gilr_lstm", GATED, GATE, squashes=True),
    """Runs a stack of GILR-LSTM layers over a batch of sequences (Martin and Cundy 2018, section 3.3).

    `g = sigmoid(U x_t + d)`, `s_t = g s_{t-1} + (1 - g) tanh(U x_t + d)`, then from `W x_t + V s_{t-1} + b` the gates
    `f, i, o = sigmoid(.)` and `z = tanh(.)`, `c_t = f c_{t-1} + i z` and `h_t = o c_t`. The weights of a layer
    are `GILRLSTMWeights(surrogate (2H, I), surrogate_bias, input (4H, I), hidden (4H, H), bias)`. The surrogate's rows
    are its candidate, then g; those of the gates are z, f, i, o.""",
)
MIN_GRU = ScanLayer(
    ScanCell("min_gru", COUPLED, PLAIN),
    """Runs a stack of minGRU layers over a batch of sequences (Feng et al. 2024).

    `u = W x_t + b`, `f = sigmoid(W x_t + b)` and `h_t = c_t = f c_{t-1} + (1 - f) u`, where f is the paper's 1 - z. The
    weights of a layer are `GateWeights(input (2H, I), bias (2H,))` with the rows u, f.""",
)
MIN_LSTM = ScanLayer(
    ScanCell("min_lstm", SHARED, PLAIN),
    """Runs a stack of minLSTM layers over a batch of sequences (Feng et al. 2024).

    `u = W x_t + b`, `f, i = sigmoid(W x_t + b)` and `h_t = c_t = (f c_{t-1} + i u) / (f + i)`. The weights of
    a layer are `GateWeights(input (3H, I), bias (3H,))` with the rows u, f, i.""",
)
