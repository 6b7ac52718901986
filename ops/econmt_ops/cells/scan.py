"""Cells whose state is a linear recurrence, so that no product waits for a step: the mathematics of each.

With the products p = W x + b of all steps, whose parts are a candidate u, gates f (and i, o) and, where a highway needs
it, another view of the input:

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

Of a shared recurrence, s = f / (f + i) is computed from the sums F and I under the gates f = sigmoid(F) and i =
sigmoid(I), as sigmoid(log f - log i), in kernels as (1 + e^-I) / (2 + e^-F + e^-I): the gates may be too small for a
float, their share is not.

d is the gradient of b_t, which is that of c_t with all that flows back through the steps after t:
d_t = dc_t + a_{t+1} d_{t+1}; and e = d_t c_{t-1} that of a_t.

Shapes: (..., H) a part, in the accumulate type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.core.weights import GateWeights, GILRLSTMWeights

Parts = Sequence[Tensor]


def through_sigmoid(dgate: Tensor, gate: Tensor) -> Tensor:
    """The gradient of a sum, from that of the gate that is its sigmoid: dgate gate (1 - gate)."""
    made: Tensor = torch.ops.aten.sigmoid_backward(dgate, gate)
    return made


def _share(f: Tensor, i: Tensor) -> Tensor:
    """Returns sigmoid(f) / (sigmoid(f) + sigmoid(i)) of the sums under two gates, however small the gates are."""
    return torch.sigmoid(functional.logsigmoid(f) - functional.logsigmoid(i))


class Recurrence(NamedTuple):
    """How a and b come from the parts u and gates."""

    name: str
    gates: int

    def forward(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Returns a and b of the activated parts u, f(, i); a shared recurrence takes the sums under f and i."""
        u, f = parts[:2]
        if self.name == "gated":
            return f, parts[2] * u
        if self.name == "shared":
            f = _share(f, parts[2])
        return f, torch.addcmul(u, f, u, value=-1.0)

    def backward(self, parts: Parts, ddecay: Tensor, delta: Tensor) -> list[Tensor]:
        """The gradients of u and of the sums under the gates, from those of a and b, which may be overwritten."""
        u, f = parts[:2]
        if self.name == "gated":
            i = parts[2]
            return [delta * i, through_sigmoid(ddecay, f), through_sigmoid(delta * u, i)]
        of_share = ddecay.addcmul_(delta, u, value=-1.0)
        if self.name == "coupled":
            return [torch.addcmul(delta, delta, f, value=-1.0), through_sigmoid(of_share, f)]
        share = _share(f, parts[2])
        of_sum = through_sigmoid(of_share, share)
        du = torch.addcmul(delta, delta, share, value=-1.0)
        return [du, of_sum * torch.sigmoid(-f), -of_sum * torch.sigmoid(-parts[2])]


class Output(NamedTuple):
    """How h comes from c, a gate o and the input."""

    name: str
    gates: int

    def forward(self, c: Tensor, o: Tensor | None, x: Tensor | None) -> Tensor:
        """h."""
        if o is None:
            return c.relu() if self.name == "relu" else c
        if x is None:
            return o * c
        return torch.lerp(x, torch.tanh(c), o)

    def backward(
        self, c: Tensor, o: Tensor | None, x: Tensor | None, dh: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradients of c, of the sum under o, and of x."""
        if o is None:
            return (dh * (c > 0) if self.name == "relu" else dh), None, None
        if x is None:
            return dh * o, through_sigmoid(dh * c, o), None
        squashed, through = torch.tanh(c), dh * o
        dc: Tensor = torch.ops.aten.tanh_backward(through, squashed)
        return dc, through_sigmoid(dh * (squashed - x), o), dh - through


COUPLED, GATED, SHARED = Recurrence("coupled", 1), Recurrence("gated", 2), Recurrence("shared", 2)
PLAIN, RELU, GATE, HIGHWAY = Output("plain", 0), Output("relu", 0), Output("gate", 1), Output("highway", 1)


class ScanCell(NamedTuple):
    """One linear recurrence with what is around it.

    Attributes:
        name: of the cell.
        recurrence, output: see the module.
        squashes: whether the candidate u passes tanh.
    """

    name: str
    recurrence: Recurrence
    output: Output
    squashes: bool = False

    @property
    def gates(self) -> int:
        """How many parts of H the products have, but for a highway's view of inputs of another width."""
        return 1 + self.recurrence.gates + self.output.gates

    def activate(self, products: Tensor, hidden: int) -> list[Tensor]:
        """Returns the parts of products (..., K H) after their nonlinearities: u, f(, i)(, o)(, view of the input).

        A shared recurrence takes f and i as they are.
        """
        u, *rest = torch.split(products, hidden, -1)
        count = self.recurrence.gates + self.output.gates
        if self.recurrence.name == "shared":
            assert not self.squashes
            return [u, *rest[:2], *(o.sigmoid() for o in rest[2:count]), *rest[count:]]
        gates = torch.split(products[..., hidden : (1 + count) * hidden].sigmoid(), hidden, -1)
        return [torch.tanh(u) if self.squashes else u, *gates, *rest[count:]]

    def around(self, parts: Parts, read: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The output gate, and what a highway lets through: ``read``, or its view among the parts."""
        o = parts[1 + self.recurrence.gates] if self.output.gates else None
        if self.output.name != "highway":
            return o, None
        return o, parts[-1] if len(parts) > self.gates else read.to(parts[0].dtype)

    def start(self, products: Tensor, hidden: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """The activated parts, a and b."""
        parts = self.activate(products, hidden)
        return parts, *self.recurrence.forward(parts)

    def finish(self, parts: Parts, c: Tensor, read: Tensor) -> Tensor:
        """h from the activated parts, c and the input."""
        return self.output.forward(c, *self.around(parts, read))

    def finish_back(
        self, parts: Parts, c: Tensor, read: Tensor, dh: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradients of c, of the sum under the output gate, and of what a highway lets through."""
        return self.output.backward(c, *self.around(parts, read), dh)

    def start_back(
        self, parts: Parts, ddecay: Tensor, delta: Tensor, rest: Sequence[Tensor], products: Tensor
    ) -> Tensor:
        """Writes the gradients of the products over ``products`` (..., K H).

        Args:
            parts: activated. ddecay, delta: the gradients of a and b, which may be overwritten.
            rest: what `finish_back` has given of the parts behind the recurrence's, in their order.
            products: is overwritten.
        """
        made = self.recurrence.backward(parts, ddecay, delta)
        if self.squashes:
            made[0] = torch.ops.aten.tanh_backward(made[0], parts[0])
        for place, gradient in zip(
            torch.split(products, parts[0].shape[-1], -1), [*made, *rest], strict=True
        ):
            place.copy_(gradient)
        return products


class RunStage(Protocol):
    """Runs one recurrence over the whole sequences, forwards."""

    def __call__(
        self,
        cell: ScanCell,
        sources: Sequence[Tensor],
        weights: Sequence[Tensor],
        bias: Tensor,
        first: Tensor,
        before: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Outputs (B, T, H) and c (B, H) after each row's last step.

        Args:
            cell: see there.
            sources: (B, T, .), what is read; the first is what a highway lets through.
            weights: (K H, .) of each source. bias: (K H,).
            first: (B, H), c before the first step.
            before: (B, .), what stands before the last of the sources, which is then read one step late; or None.
        """


class ScanLayer:
    """A layer of one recurrence, a `econmt_ops.cells.protocol.Cell`; its only state is c.

    Args:
        cell: what it computes.
    """

    states: tuple[str, ...] = ("c",)
    weights: type[Any] = GateWeights

    def __init__(self, cell: ScanCell) -> None:
        self.name = cell.name
        self.cell = cell

    def gates(self, inputs: int, hidden: int) -> int:
        """K, the parts of the products; a highway needs one more where I is not H."""
        return self.cell.gates + (self.cell.output.name == "highway" and inputs != hidden)

    def parameter_shapes(self, inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """See `Cell`."""
        rows = self.gates(inputs, hidden) * hidden
        return {"input": (rows, inputs), "bias": (rows,)}

    def operations(self, inputs: int, hidden: int) -> int:
        """See `Cell`."""
        return 2 * self.gates(inputs, hidden) * hidden * inputs

    def hidden_size(self, weights: Any, inputs: int) -> int:
        """See `Cell`."""
        rows = int(weights.bias.numel())
        if self.gates(inputs, inputs) * inputs == rows:
            return inputs
        return rows // self.gates(inputs, -1)

    def run(
        self, stage: RunStage, inputs: Tensor, weights: Any, state: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs (B, T, H) and c after each row's last step."""
        outputs, c = stage(self.cell, [inputs], [weights.input], weights.bias, state[0])
        return outputs, (c,)


class WindowLayer(ScanLayer):
    """A layer whose products read the step before too; its states are c and that input, x (B, I)."""

    states: tuple[str, ...] = ("c", "x")

    def parameter_shapes(self, inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """See `Cell`."""
        rows = self.cell.gates * hidden
        return {"input": (rows, 2 * inputs), "bias": (rows,)}

    def operations(self, inputs: int, hidden: int) -> int:
        """See `Cell`."""
        return 2 * super().operations(inputs, hidden)

    def run(
        self, stage: RunStage, inputs: Tensor, weights: Any, state: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `ScanLayer`, of a window of one step too; the last input is left to who knows the lengths."""
        size = inputs.shape[-1]
        if weights.input.shape[1] == size:
            return super().run(stage, inputs, weights, state)
        matrices = [weights.input[:, :size], weights.input[:, size:]]
        outputs, c = stage(self.cell, [inputs, inputs], matrices, weights.bias, *state)
        return outputs, (c,)


class SurrogateLayer(ScanLayer):
    """An LSTM whose gates read a linear surrogate s of h (Martin and Cundy 2018); its states are s and c."""

    states: tuple[str, ...] = ("s", "c")
    weights: type[Any] = GILRLSTMWeights

    def __init__(self, surrogate: ScanCell, cell: ScanCell) -> None:
        super().__init__(cell)
        self.surrogate = surrogate

    def parameter_shapes(self, inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """See `Cell`."""
        below, rows = 2 * hidden, 4 * hidden
        return {
            "surrogate": (below, inputs),
            "surrogate_bias": (below,),
            "input": (rows, inputs),
            "hidden": (rows, hidden),
            "bias": (rows,),
        }

    def operations(self, inputs: int, hidden: int) -> int:
        """See `Cell`."""
        return 2 * hidden * (6 * inputs + 4 * hidden)

    def run(
        self, stage: RunStage, inputs: Tensor, weights: Any, state: Sequence[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `ScanLayer`."""
        first = state[0].to(inputs.dtype)
        seen, s = stage(self.surrogate, [inputs], [weights.surrogate], weights.surrogate_bias, state[0])
        matrices = [weights.input, weights.hidden]
        outputs, c = stage(self.cell, [inputs, seen], matrices, weights.bias, state[1], first)
        return outputs, (s, c)


CELLS = {
    cell.name: cell
    for cell in (
        ScanCell("sru", COUPLED, HIGHWAY),
        ScanCell("ssru", COUPLED, RELU),
        ScanCell("qrnn", COUPLED, GATE, squashes=True),
        ScanCell("min_gru", COUPLED, PLAIN),
        ScanCell("min_lstm", SHARED, PLAIN),
        ScanCell("gilr", COUPLED, PLAIN, squashes=True),
        ScanCell("gilr_lstm", GATED, GATE, squashes=True),
    )
}
"""Every recurrence by name."""

SRU, SSRU, QRNN = (ScanLayer(CELLS[name]) for name in ("sru", "ssru", "qrnn"))
QRNN_OF_TWO = WindowLayer(CELLS["qrnn"])
MIN_GRU, MIN_LSTM = ScanLayer(CELLS["min_gru"]), ScanLayer(CELLS["min_lstm"])
GILR_LSTM = SurrogateLayer(CELLS["gilr"], CELLS["gilr_lstm"])
