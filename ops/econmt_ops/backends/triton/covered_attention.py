"""Additive attention with coverage in Triton: kernels around those of `econmt_ops.backends.triton.attention`.

At each step the keys are those of the call plus the coverage's share. Sizes: B batch, S source positions, A attention
size, W width of the coverage, P numbers of each position. The equations are those of `econmt_ops.cells.coverage`; all
coverages and their gradients are float32.
"""

# mypy: disable-error-code="assignment,unreachable"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.backends.protocol import AttentionBackward, AttentionGradients, AttentionInputs, CoverageStep
from econmt_ops.backends.triton.attention import TritonAttention
from econmt_ops.backends.triton.cells import row_stride
from econmt_ops.backends.triton.pointwise import sigmoid, tanh, tanh_of
from econmt_ops.cells.attention import LAYER_NORM_EPSILON
from econmt_ops.core.weights import Coverage

_EPSILON: tl.constexpr = tl.constexpr(LAYER_NORM_EPSILON)
_TILE = 4096
"""Values of a tile of keys."""
_ROWS = 16
"""Rows of it at most."""


@triton.jit
def covered_keys(keys, key, coverage, covered, positions, A: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
                 SIZE: tl.constexpr):  # fmt: skip
    """Writes covered (B, S, A): keys plus coverage (B, S, W) times key (A, W), a tile of positions a program."""
    sentence = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    inside = (position < positions)[:, None] & (column < A)[None, :]
    row = sentence * positions + position
    total = tl.load(keys + row[:, None] * A + column[None, :], mask=inside, other=0.0).to(tl.float32)
    for w in range(W):
        c = tl.load(coverage + row * W + w, mask=position < positions, other=0.0)
        total += c[:, None] * tl.load(key + column * W + w, mask=column < A, other=0.0)[None, :]
    tl.store(covered + row[:, None] * A + column[None, :], total.to(covered.dtype.element_ty), mask=inside)


@triton.jit
def _read(shares, attention, state, row, there, weight, number, P: tl.constexpr):
    """Returns number ``number`` of P of what the positions read: shares, attention weight and stack's output."""
    share = tl.load(shares + row * P + number, mask=there, other=0.0)
    return share + tl.load(attention + number) * weight + tl.load(state + number).to(tl.float32)


@triton.jit
def _recurrent(before, recurrent, row, there, number, W: tl.constexpr):
    """Returns number ``number`` of the product of the coverage before the step."""
    total = tl.load(before + row * W, mask=there, other=0.0) * tl.load(recurrent + number * W)
    for w in range(1, W):
        total += tl.load(before + row * W + w, mask=there, other=0.0) * tl.load(recurrent + number * W + w)
    return total


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == "tanh":
        return tanh(x)
    elif KIND == "sigmoid":
        return sigmoid(x)
    elif KIND == "relu":
        return tl.maximum(x, 0.0)
    else:
        small = tl.exp(-tl.abs(x))
        return tl.maximum(x, 0.0) + tl.where(small < 1e-3, small * (1.0 - small * 0.5), tl.log(1.0 + small))


@triton.jit
def _slope(y, KIND: tl.constexpr):
    """Returns the derivative of an activation, given its value."""
    if KIND == "tanh":
        return 1.0 - y * y
    elif KIND == "sigmoid":
        return y * (1.0 - y)
    elif KIND == "relu":
        return tl.where(y > 0.0, 1.0, 0.0)
    else:
        return tl.where(y < 1e-3, y * (1.0 - y * 0.5), 1.0 - tl.exp(-y))


@triton.jit
def _places(lengths, positions, SPAN: tl.constexpr):
    """Returns the sentence of a program, its rows (S,) and a mask of its positions."""
    sentence = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, SPAN)
    length = positions
    if lengths is not None:
        length = tl.minimum(tl.load(lengths + sentence).to(tl.int32), positions)
    return sentence, sentence * positions + position, position, position < length


@triton.jit
def coverage_forward(before, after, weights, shares, attention, state, recurrent, lengths, positions, weights_row,
                     state_row, KIND: tl.constexpr, W: tl.constexpr, P: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """Writes the coverage after a step, a sentence a program; zero in its padding."""
    sentence, row, position, there = _places(lengths, positions, SPAN)
    weight = tl.load(weights + sentence * weights_row + position, mask=there, other=0.0).to(tl.float32)
    if KIND != "sum":
        state += sentence * state_row
    for w in range(W):
        c = tl.load(before + row * W + w, mask=there, other=0.0)
        if KIND == "sum":
            made = c + tl.load(shares + row, mask=there, other=0.0) * weight
        elif KIND == "gru":
            r = sigmoid(_read(shares, attention, state, row, there, weight, w, P)
                        + _recurrent(before, recurrent, row, there, w, W))  # fmt: skip
            z = sigmoid(_read(shares, attention, state, row, there, weight, W + w, P)
                        + _recurrent(before, recurrent, row, there, W + w, W))  # fmt: skip
            n = tanh(_read(shares, attention, state, row, there, weight, 2 * W + w, P)
                     + r * _recurrent(before, recurrent, row, there, 2 * W + w, W))  # fmt: skip
            made = n + z * (c - n)
        else:
            u = _read(shares, attention, state, row, there, weight, w, P)
            made = _activated(u + _recurrent(before, recurrent, row, there, w, W), KIND)
        tl.store(after + row * W + w, tl.where(there, made, 0.0), mask=position < positions)


@triton.jit
def _add_read(dshares, dattention, dstate, d, weight, row, there, number, P: tl.constexpr):
    """Adds the gradient ``d`` (S,) of a number of what the positions read, and stores that of the stack's output."""
    place = dshares + row * P + number
    tl.store(place, tl.load(place, mask=there, other=0.0) + d, mask=there)
    tl.store(dattention + number, tl.load(dattention + number) + tl.sum(d * weight, 0))
    tl.store(dstate + number, tl.sum(d, 0).to(dstate.dtype.element_ty))


@triton.jit
def coverage_backward(before, after, weights, shares, attention, state, recurrent, given, lengths, dafter, dbefore,
                      dweights, drecurrents, dshares, dattention, drecurrent, dstate, positions, weights_row,
                      state_row, given_row, dstate_row, KIND: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
                      SPAN: tl.constexpr):  # fmt: skip
    """Computes the gradients of :func:`coverage_forward`, a sentence a program.

    Written are dbefore (B, S, W), dweights (B, S), to which ``given`` (B, S) is added unless it is None, and dstate;
    added to are dshares (B, S, P), dattention (B, P) and drecurrent (B, P, W). drecurrents (B, S, P) is a workspace.
    """
    sentence, row, position, there = _places(lengths, positions, SPAN)
    weight = tl.load(weights + sentence * weights_row + position, mask=there, other=0.0).to(tl.float32)
    if KIND != "sum":
        state += sentence * state_row
        dstate += sentence * dstate_row
        dattention += sentence * P
        drecurrent += sentence * P * W
    dweight = tl.zeros((SPAN,), tl.float32)
    if given is not None:
        dweight += tl.load(given + sentence * given_row + position, mask=there, other=0.0).to(tl.float32)
    for w in range(W):
        d = tl.load(dafter + row * W + w, mask=there, other=0.0)
        through = d
        if KIND == "sum":
            dweight += d * tl.load(shares + row, mask=there, other=0.0)
            place = dshares + row
            tl.store(place, tl.load(place, mask=there, other=0.0) + d * weight, mask=there)
        elif KIND == "gru":
            v = _recurrent(before, recurrent, row, there, 2 * W + w, W)
            r = sigmoid(_read(shares, attention, state, row, there, weight, w, P)
                        + _recurrent(before, recurrent, row, there, w, W))  # fmt: skip
            z = sigmoid(_read(shares, attention, state, row, there, weight, W + w, P)
                        + _recurrent(before, recurrent, row, there, W + w, W))  # fmt: skip
            n = tanh(_read(shares, attention, state, row, there, weight, 2 * W + w, P) + r * v)
            c = tl.load(before + row * W + w, mask=there, other=0.0)
            dn = d * (1.0 - z) * (1.0 - n * n)
            dz = d * (c - n) * z * (1.0 - z)
            dr = dn * v * r * (1.0 - r)
            through = d * z
            _add_read(dshares, dattention, dstate, dr, weight, row, there, w, P)
            _add_read(dshares, dattention, dstate, dz, weight, row, there, W + w, P)
            _add_read(dshares, dattention, dstate, dn, weight, row, there, 2 * W + w, P)
            dweight += dr * tl.load(attention + w) + dz * tl.load(attention + W + w)
            dweight += dn * tl.load(attention + 2 * W + w)
            tl.store(drecurrents + row * P + w, dr, mask=there)
            tl.store(drecurrents + row * P + W + w, dz, mask=there)
            tl.store(drecurrents + row * P + 2 * W + w, dn * r, mask=there)
        else:
            d *= _slope(tl.load(after + row * W + w, mask=there, other=0.0), KIND)
            through = d * 0.0
            _add_read(dshares, dattention, dstate, d, weight, row, there, w, P)
            dweight += d * tl.load(attention + w)
            tl.store(drecurrents + row * P + w, d, mask=there)
        tl.store(dbefore + row * W + w, through, mask=position < positions)
    tl.store(dweights + sentence * positions + position, dweight, mask=position < positions)
    if KIND != "sum":
        tl.debug_barrier()
        for w in range(W):
            c = tl.load(before + row * W + w, mask=there, other=0.0)
            total = tl.load(dbefore + row * W + w, mask=there, other=0.0)
            for number in range(P):
                d = tl.load(drecurrents + row * P + number, mask=there, other=0.0)
                total += d * tl.load(recurrent + number * W + w)
                place = drecurrent + number * W + w
                tl.store(place, tl.load(place) + tl.sum(d * c, 0))
            tl.store(dbefore + row * W + w, total, mask=there)


@triton.jit
def covered_sum(query, dscores, covered, score, gain, shift, key, before, dkeys, parts, dkey, dbefore, positions,
                query_row, dscores_row, A: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
                FAST: tl.constexpr):  # fmt: skip
    """Adds a step's gradients, a tile of positions a program.

    Added to are dkeys (B, S, A), dbefore (B, S, W), and the program's own parts (1 or 3, A), of score, gain and shift,
    and dkey (W, A). ``gain`` may be None.
    """
    sentence = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    there, known = position < positions, column < A
    inside = there[:, None] & known[None, :]
    row = sentence * positions + position
    place = row[:, None] * A + column[None, :]
    q = tl.load(query + sentence * query_row + column, mask=known, other=0.0).to(tl.float32)[None, :]
    w = tl.load(score + column, mask=known, other=0.0).to(tl.float32)[None, :]
    de = tl.load(dscores + sentence * dscores_row + position, mask=there, other=0.0)[:, None]
    x = tl.load(covered + place, mask=inside, other=0.0).to(tl.float32) + q
    program = sentence * tl.num_programs(1) + tl.program_id(1)
    if gain is None:
        t = tanh_of(x, FAST)
        dk = de * w * (1.0 - t * t)
        part = parts + program * A + column
        tl.store(part, tl.load(part, mask=known, other=0.0) + tl.sum(de * t, 0), mask=known)
    else:
        stretch = tl.load(gain + column, mask=known, other=0.0).to(tl.float32)[None, :]
        offset = tl.load(shift + column, mask=known, other=0.0).to(tl.float32)[None, :]
        x = tl.where(known[None, :], x - tl.sum(tl.where(known[None, :], x, 0.0), 1)[:, None] / A, 0.0)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / A + _EPSILON)[:, None]
        x *= inverse
        t = tanh_of(x * stretch + offset, FAST)
        of_normed = de * w * (1.0 - t * t)
        part = parts + program * 3 * A + column
        tl.store(part, tl.load(part, mask=known, other=0.0) + tl.sum(de * t, 0), mask=known)
        tl.store(part + A, tl.load(part + A, mask=known, other=0.0) + tl.sum(of_normed * x, 0), mask=known)
        tl.store(
            part + 2 * A, tl.load(part + 2 * A, mask=known, other=0.0) + tl.sum(of_normed, 0), mask=known
        )
        of_normed *= stretch
        along = tl.sum(of_normed * x, 1)[:, None] / A
        dk = inverse * (of_normed - tl.sum(of_normed, 1)[:, None] / A - x * along)
    dk = tl.where(inside, dk, 0.0)
    tl.store(dkeys + place, tl.load(dkeys + place, mask=inside, other=0.0) + dk, mask=inside)
    for number in range(W):
        c = tl.load(before + row * W + number, mask=there, other=0.0)
        k = tl.load(key + column * W + number, mask=known, other=0.0)[None, :]
        at = dbefore + row * W + number
        tl.store(at, tl.load(at, mask=there, other=0.0) + tl.sum(dk * k, 1), mask=there)
        part = dkey + (program * W + number) * A + column
        tl.store(part, tl.load(part, mask=known, other=0.0) + tl.sum(dk * c[:, None], 0), mask=known)


class TritonCoveredAttention(TritonAttention):
    """`TritonAttention` with coverage.

    Args:
        inputs: Keys, values and weights; lengths on their device.
        coverage: Weights of the coverage.
    """

    def __init__(self, inputs: AttentionInputs, coverage: Coverage) -> None:
        self._keys = inputs.keys.contiguous()
        self._kind, key, shares, *others = coverage
        self._key, self._shares = key.contiguous(), shares.contiguous()
        self._attention, _, self._recurrent = (None if part is None else part.contiguous() for part in others)
        self._covered = torch.empty_like(self._keys)
        # Kernels read these keys, which change at each step, where they are: in float32 they are not narrowed.
        super().__init__(inputs._replace(keys=self._covered), narrows=False)
        self._width, self._numbers = key.shape[1], shares.shape[2]
        size = triton.next_power_of_2(self.size)
        rows = max(1, min(_ROWS, _TILE // size))
        self._grid = self.batch, triton.cdiv(self.positions, rows)
        self._tiles = {"A": self.size, "W": self._width, "ROWS": rows, "SIZE": size, "num_warps": 4}
        span = triton.next_power_of_2(self.positions)
        self._spans: dict[str, Any] = {
            "KIND": self._kind, "W": self._width, "P": self._numbers, "SPAN": span,
            "num_warps": max(1, min(8, span // 32)),
        }  # fmt: skip
        self._sums: dict[str, Tensor] = {}

    def _take_keys(self, before: Tensor) -> None:
        covered_keys[self._grid](self._keys, self._key, before, self._covered, self.positions, **self._tiles)

    def forward(
        self, both: Tensor, outputs: Sequence[Tensor], weights: Tensor, coverage: CoverageStep | None = None
    ) -> None:
        """Implements `EagerAttention.forward`."""
        assert coverage is not None
        before, after, state = coverage
        self._take_keys(before)
        super().forward(both, outputs, weights)
        coverage_forward[(self.batch,)](
            before, after, weights, self._shares, self._attention, state, self._recurrent, self.lengths,
            self.positions, row_stride(weights), row_stride(state), **self._spans,
        )  # fmt: skip

    def weights_of(self, queries: Tensor, coverage: Sequence[Tensor] | None = None) -> Tensor:
        """Implements `EagerAttention.weights_of`; a step at a time."""
        assert coverage is not None
        weights = queries.new_empty(*queries.shape[:2], self.positions)
        for step, query in enumerate(queries):
            self._take_keys(coverage[step])
            self.attend(query, None, weights[step])
        return weights

    def _begin_sums(self) -> None:
        zeros = self._covered.new_zeros
        batch, positions, numbers, width = self.batch, self.positions, self._numbers, self._width
        programs, size = self._grid[0] * self._grid[1], self.size
        shapes = {
            "keys": (batch, positions, size),
            "parts": (programs, 1 if self.gain is None else 3, size),
            "coverage_key": (programs, width, size),
            "coverage_shares": (batch, positions, numbers),
            "coverage_attention": (batch, numbers),
            "coverage_recurrent": (batch, numbers, width),
            "dweights": (batch, positions),
            "drecurrents": (batch, positions, numbers),
            "dbefore": (batch, positions, width),
        }
        self._sums = {name: zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}

    def backward(self, step: AttentionBackward) -> None:
        """Implements `EagerAttention.backward`, for one step."""
        assert step.coverage is not None
        assert step.dcoverage is not None
        if not self._sums:
            self._begin_sums()
        sums, (before, after, state) = self._sums, step.coverage
        coverage_backward[(self.batch,)](
            before, after, step.weights, self._shares, self._attention, state, self._recurrent, step.dweights,
            self.lengths, step.dcoverage, sums["dbefore"], sums["dweights"], sums["drecurrents"],
            sums["coverage_shares"], sums["coverage_attention"], sums["coverage_recurrent"], step.dstate,
            self.positions, *map(row_stride, (step.weights, state, step.dweights, step.dstate)), **self._spans,
        )  # fmt: skip
        self._take_keys(before)
        super().backward(step._replace(dweights=sums["dweights"], coverage=None))
        covered_sum[self._grid](
            step.query, step.dscores, self._covered, self.score, self.gain, self.shift, self._key, before,
            sums["keys"], sums["parts"], sums["coverage_key"], sums["dbefore"], self.positions,
            row_stride(step.query), row_stride(step.dscores), FAST=self.fast, **self._tiles,
        )  # fmt: skip
        step.dcoverage.copy_(sums["dbefore"])

    def coverage_gradients(self) -> dict[str, Tensor]:
        """Implements `EagerAttention.coverage_gradients`."""
        found = {
            "coverage_key": self._sums["coverage_key"].sum(0).t(),
            "coverage_shares": self._sums["coverage_shares"],
        }
        if self._kind != "sum":
            found |= {name: self._sums[name].sum(0) for name in ("coverage_attention", "coverage_recurrent")}
        return found

    def gradients(self, queries: Tensor, dscores: Tensor) -> AttentionGradients:  # noqa: ARG002 - summed already
        """Implements `EagerAttention.gradients`."""
        dscore, *dnorm = self._sums["parts"].sum(0).unbind(0)
        return AttentionGradients(self._sums["keys"], dscore, (dnorm[0], dnorm[1]) if dnorm else None)
