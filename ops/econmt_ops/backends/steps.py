"""What one step of the recurrent ops computes between its matrix products, forward and backward.

Everything here is pointwise work and reductions, written as pure functions of tensors so that torch.compile can
fuse each into one loop. Shapes: B batch, S source positions, H hidden, A attention size.
"""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

LAYER_NORM_EPSILON = 1e-5

sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
"""dy y (1 - y), from dy and y."""
tanh_backward = torch.ops.aten.tanh_backward.grad_input
"""dy (1 - y^2), from dy and y."""

_VARIANTS = 64
"""How often a step may be compiled anew."""


def cell_forward(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One LSTM step from its gates before their nonlinearities.

    Args:
        gates: (B, 4H) in the compute type, in the order i, f, g, o.
        c: (B, H) in the accumulate type.

    Returns:
        h (B, H) in the compute type, c (B, H) in the accumulate type.
    """
    i, f, g, o = gates.to(c.dtype).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return (torch.sigmoid(o) * torch.tanh(c)).to(gates.dtype), c


def cell_backward(gates: Tensor, before: Tensor, c: Tensor, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
    """Backward of :func:`cell_forward`.

    Args:
        gates: (B, 4H) after their nonlinearities, in the accumulate type.
        before: (B, H) the cell state before the step. c: (B, H) after it.
        dh: (B, H) gradient of h. dc: (B, H) gradient of c. All in the accumulate type.

    Returns:
        The gradients of the gates before their nonlinearities (B, 4H), and of ``before`` (B, H).
    """
    i, f, g, o = gates.chunk(4, 1)
    squashed = torch.tanh(c)
    total = dc + dh * o * (1 - squashed * squashed)
    parts = (
        total * g * i * (1 - i),
        total * before * f * (1 - f),
        total * i * (1 - g * g),
        dh * squashed * o * (1 - o),
    )
    return torch.cat(parts, 1), total * f


def tanh_(values: Tensor) -> Tensor:
    """tanh, in place. In float32 and float64 on the CPU as 2 sigmoid(2 x) - 1, which takes a third of the time."""
    if values.device.type != "cpu" or values.dtype not in (torch.float32, torch.float64):
        return values.tanh_()
    return values.add_(values).sigmoid_().mul_(2).sub_(1)


def activate_(gates: Tensor) -> Tensor:
    """The nonlinearities of the gates (..., 4H), in place: sigmoid, but tanh for g."""
    quarter = gates.shape[-1] // 4
    g = gates[..., 2 * quarter : 3 * quarter]
    g.add_(g)
    gates.sigmoid_()
    g.mul_(2).sub_(1)
    return gates


def activate(gates: Tensor, accumulate: torch.dtype) -> Tensor:
    """The nonlinearities of the gates (..., 4H), in the accumulate type; the gates themselves stay."""
    return activate_(gates.to(accumulate, copy=True))


def advance_cell(gates: Tensor, c: Tensor, h: Tensor, after: Tensor) -> None:
    """:func:`cell_forward` without copies: the gates get their nonlinearities in place.

    Args:
        gates: (B, 4H) and c: (B, H), both in the accumulate type.
        h: (B, H) is written. after: (B, H) gets the cell state after the step and may be ``c`` itself.
    """
    i, f, g, o = activate_(gates).chunk(4, 1)
    torch.mul(f, c, out=after)
    after.addcmul_(i, g)
    torch.mul(tanh_(after.clone()), o, out=h)


class Workspace:
    """The cell's steps on memory that is kept from one step to the next.

    Memory taken anew for each step would have been written by nobody and lie in no cache.

    Attributes:
        gates: (B, 4H) in the accumulate type, for the caller to fill.
    """

    def __init__(self, c: Tensor) -> None:
        """``c``: (B, H), in the accumulate type, as the cell states of the steps."""
        rows, hidden = c.shape
        self.gates = c.new_empty(rows, 4 * hidden)
        self._quarters = self.gates.chunk(4, 1)
        # Zeros, since a quarter is multiplied before it is first written, and odd values can be slow to multiply.
        self._made = c.new_zeros(rows, 4 * hidden)
        self._made_quarters = self._made.chunk(4, 1)
        self._squashed, self._dh, self._given, self._total = c.new_empty(4, rows, hidden).unbind(0)
        self._minus_one = torch.full((), -1.0, dtype=c.dtype)

    def fits(self, c: Tensor) -> bool:
        """Whether it is for steps with cell states like ``c``."""
        mine = self._total
        return mine.shape == c.shape and mine.dtype == c.dtype and mine.device == c.device

    def activate(self, gates: Tensor | None = None) -> Sequence[Tensor]:
        """The nonlinearities of ``gates`` (B, 4H), or of those of the workspace, in place; returns i, f, g and o."""
        quarters = self._quarters if gates is None else gates.chunk(4, 1)
        g = quarters[2]
        g.add_(g)
        (self.gates if gates is None else gates).sigmoid_()
        self._stretch_(g)
        return quarters

    def _stretch_(self, values: Tensor) -> Tensor:
        """2 x - 1, in place and in one pass, which a number in the first place would not allow."""
        return torch.add(self._minus_one, values, alpha=2, out=values)

    def _squash(self, c: Tensor) -> Tensor:
        """tanh c, (B, H), until the next step."""
        if c.device.type != "cpu":
            return torch.tanh(c, out=self._squashed)
        return self._stretch_(torch.add(c, c, out=self._squashed).sigmoid_())

    def advance(self, c: Tensor, h: Tensor, after: Tensor, gates: Tensor | None = None) -> None:
        """:func:`advance_cell`, without ``gates`` with those of the workspace."""
        i, f, g, o = self.activate(gates)
        torch.mul(f, c, out=after)
        after.addcmul_(i, g)
        torch.mul(self._squash(after), o, out=h)

    def retreat(
        self,
        before: Tensor,
        c: Tensor,
        incoming: Tensor,
        dh: Tensor,
        dc: Tensor,
        dgates: Tensor,
        gates: Tensor | None = None,
    ) -> Tensor:
        """:func:`cell_backward`.

        Args:
            before, c, dc: as there.
            incoming, dh: (B, H), two gradients of h, in any type.
            dgates: (B, 4H) is written, in any type; it may be ``gates`` itself.
            gates: (B, 4H) after their nonlinearities; None: those of the workspace.

        Returns:
            The gradient of ``before`` (B, H).
        """
        i, f, g, o = self._quarters if gates is None else gates.chunk(4, 1)
        if dh.dtype == incoming.dtype == c.dtype:
            dh = torch.add(dh, incoming, out=self._dh)
        else:
            # Given two types, an operator would make copies of its own.
            dh = self._dh.copy_(dh).add_(self._given.copy_(incoming))
        squashed, (di, df, dg, do) = self._squash(c), self._made_quarters
        total = torch.mul(dh, o, out=self._total)
        tanh_backward(total, squashed, grad_input=total)
        total.add_(dc)
        # Times x (1 - x) for the gate x, or 1 - x^2 for g, these are the gradients.
        torch.mul(total, g, out=di)
        torch.mul(total, before, out=df)
        torch.mul(dh, squashed, out=do)
        of_g = torch.mul(total, i, out=squashed)
        dbefore = total * f
        gates = self.gates if gates is None else gates
        at_once = dgates.dtype == c.dtype and not dgates.is_set_to(gates)
        made = dgates if at_once else self._made
        sigmoid_backward(self._made, gates, grad_input=made)
        tanh_backward(of_g, g, grad_input=made.chunk(4, 1)[2] if at_once else dg)
        if not at_once:
            dgates.copy_(made)
        return dbefore


def additive_forward(query: Tensor, keys: Tensor, score: Tensor) -> Tensor:
    """score . tanh(query + keys_s), up to a constant that no softmax over s feels.

    tanh x = 2 sigmoid(2 x) - 1, and the sum of -score is that constant; sigmoid is the cheaper function.

    Args:
        query: (B, A). keys: (B, S, A). score: (A,) in the accumulate type, in which all is computed.

    Returns:
        (B, S) in the accumulate type.
    """
    return torch.matmul(_halves(query, keys, score.dtype), score * 2)


def _halves(query: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """sigmoid(2 query + 2 keys_s), (B, S, A)."""
    return torch.add((query.to(dtype) * 2).unsqueeze(1), keys, alpha=2).sigmoid_()


def additive_backward(
    query: Tensor, keys: Tensor, score: Tensor, de: Tensor, dkeys: Tensor, dscore: Tensor
) -> Tensor:
    """Backward of :func:`additive_forward`, the feature maps recomputed in one workspace (B, S, A).

    With s = sigmoid(2 x): 1 - tanh^2 x = 4 (s - s^2), and as rows of ``de`` sum to zero, as gradients of a
    softmax's scores do, sum de tanh x = 2 sum de s.

    Args:
        de: (B, S) gradient of the scores, in the accumulate type.
        dkeys: (B, S, A) accumulates de_s (s - s^2), in place; the caller multiplies by 4 score, once for all steps.
        dscore: (A,) accumulates sum de_s tanh, in place.

    Returns:
        The gradient of the query (B, A), in the accumulate type.
    """
    hidden = _halves(query, keys, score.dtype)
    dscore.addmv_(hidden.view(-1, hidden.shape[2]).t(), de.reshape(-1), alpha=2)
    hidden.addcmul_(hidden, hidden, value=-1)
    dkeys.addcmul_(de.unsqueeze(2), hidden)
    return torch.bmm(de.unsqueeze(1), hidden).squeeze(1) * (score * 4)


def losses(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Cross entropies (C,) of logits (C, V), which become their softmaxes.

    loss = (1 - s)(lse - l_y) + s (lse - mean l) with targets y (C,) and smoothing s (Szegedy et al. 2016). The softmax
    of the largest logit is exp(max l - lse) and at least 1 / V, so its logarithm gives lse: exponentials are taken
    once, by the one kernel that goes row by row while the cache holds the row.
    """
    top = logits.amax(1)
    wanted = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
    mean = logits.mean(1) if smoothing else None
    torch.softmax(logits, 1, out=logits)
    loss = top - logits.amax(1).log() - (1.0 - smoothing) * wanted
    return loss if mean is None else loss - smoothing * mean


def logit_gradient(softmaxes: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The gradient of :func:`losses` in the logits, in the place of what it left: softmax - (1 - s) 1_y - s / V."""
    if smoothing:
        softmaxes -= smoothing / softmaxes.shape[1]
    row = targets.unsqueeze(1)
    return softmaxes.scatter_add_(1, row, softmaxes.new_full(row.shape, smoothing - 1.0))


class Steps(NamedTuple):
    """The step functions, eager or compiled."""

    cell_forward: Callable[..., Any]
    cell_backward: Callable[..., Any]
    additive_forward: Callable[..., Any]
    additive_backward: Callable[..., Any]
    losses: Callable[..., Any]
    logit_gradient: Callable[..., Any]


EAGER = Steps(cell_forward, cell_backward, additive_forward, additive_backward, losses, logit_gradient)


def has_compiler() -> bool:
    """Whether this machine has the C++ compiler that torch.compile calls."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl")
    return any(shutil.which(name) for name in names if name)


@functools.cache
def compiled() -> Steps:
    """The step functions compiled by torch.compile, for all sizes at once where it can.

    Without a C++ compiler it says so, once, and the eager ones run.
    """
    if not has_compiler():
        warnings.warn(
            "econmt_ops: no C++ compiler found, so 'compiled' runs as 'recompute'; install g++ or set CXX",
            RuntimeWarning,
            stacklevel=2,
        )
        return EAGER
    return Steps(*(compile_step(function, dynamic=True) for function in EAGER))


def compile_step(function: Callable[..., Any], *, dynamic: bool | None = None) -> Callable[..., Any]:
    """The function compiled by torch.compile, for tensors that are slices of others.

    A step is given slices of what is kept for all steps. Compiled code would be bound to the shapes and strides of the
    tensors that they are slices of, so it does not see them. It is also made anew for slices that begin where their
    tensor does, for sizes of one and for other types; torch.compile gives up after eight such variants, which the types
    and shapes of one process can exceed, so its limit is raised.

    Args:
        function: of tensors and numbers, run where autograd does not look.
        dynamic: as torch.compile takes it.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    made = torch.compile(function, dynamic=dynamic)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return made(*(part.data if isinstance(part, Tensor) else part for part in arguments))

    return call


def steps(compiled_ones: bool) -> Steps:
    """The compiled step functions, or the eager ones."""
    return compiled() if compiled_ones else EAGER
