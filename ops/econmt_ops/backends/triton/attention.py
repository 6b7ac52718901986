"""Attention in Triton kernels: one step, all queries of a sentence at once, and the gradients summed over steps.

Sizes: B batch, T target steps, K steps of a block, S source positions, A attention size, H width of the values; R rows
of queries, either K B, ordered by step, or B T, ordered by sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from econmt_ops.backends.attention import EagerAttention
from econmt_ops.backends.protocol import AttentionBackward, AttentionGradients, AttentionInputs, CoverageStep
from econmt_ops.backends.triton import attention_gluon, interpreted
from econmt_ops.backends.triton.cells import row_stride
from econmt_ops.backends.triton.pointwise import tanh_of
from econmt_ops.backends.triton.units import in_units
from econmt_ops.cells.attention import LAYER_NORM_EPSILON
from econmt_ops.core.precision import matmul_tf32
from econmt_ops.dispatch.device_limits import on_gpu_of

_EPSILON: tl.constexpr = tl.constexpr(LAYER_NORM_EPSILON)


class Choice(NamedTuple):
    """Launch configuration of an attention kernel.

    Attributes:
        warps: warps per program. across: number of warps that share a row; Gluon only.
        gluon: True for the Gluon kernel, False for the plain Triton kernel.
    """

    warps: int
    across: int = 1
    gluon: bool = True


REGISTERS = {16: 128, 8: 255}
"""Registers available to a thread, by warps per program, when a program fills a multiprocessor (65,536 registers)."""
LONG = 64
"""Source positions above which more than 8 warps pay off."""
TILES_HELD = 3
"""Tiles of keys and of values held per thread: one in use, two being prefetched."""
VECTORS_HELD = 2
"""Vectors of the keys' width held in float32 beside a sum: query and score."""
NORMED_HELD = 5
"""Additional vectors with layer normalisation, intermediate values included."""
OTHER_REGISTERS = 26
"""Registers for everything else: addresses, masks, the loop. These four come from compiled kernels, within 10 %."""
PLAIN_TILE = 4096
"""Values in a tile of the plain kernel."""
PLAIN_ROWS = 16
"""Maximum rows in a tile of the plain kernel."""
MOST_ROWS = 32
"""Maximum rows in a tile of the Gluon kernel; exceeded where a single warp takes more."""
SUM_ROWS = (16, 32)
"""Source positions per program of the sum over steps."""
SUM_WIDTH = 64
"""Features per program of the sum over steps."""
SUM_OVERHEAD = 2.8
"""Fixed cost of a step in that kernel, per feature, in positions."""
SUM_NORMED_VALUES = 4096
"""Values in its tile with layer normalisation, which needs whole rows; 8 warps."""


def _lanes(size: int, itemsize: int) -> tuple[int, int]:
    """Returns the values that a thread loads at once, 16 bytes at most, and the threads of a row of ``size`` values."""
    at_once = min(16 // itemsize, size)
    return at_once, min(32, size // at_once)


def choose(size: int, hidden: int, itemsize: int, positions: int, normed: bool) -> Choice:
    """Returns the configuration for tiles (., size) and (., hidden), powers of two, of ``itemsize`` bytes per value."""
    if interpreted():
        return Choice(8, gluon=False)
    for across in (1, 2, 4, 8):
        keys, values = (max(1, width // (_lanes(width, itemsize)[1] * across)) for width in (size, hidden))
        tiles = TILES_HELD * (keys + values) * itemsize // 4 + values
        need = tiles + keys * (VECTORS_HELD + NORMED_HELD * normed) + OTHER_REGISTERS
        for warps, limit in REGISTERS.items():
            if need <= limit and (warps <= 8 or positions > LONG):
                return Choice(_few(warps, across, size, itemsize), across)
    return Choice(8, gluon=False)


def _few(warps: int, across: int, size: int, itemsize: int) -> int:
    """Returns the number of warps that a tile of a few rows can use."""
    rows = 32 // _lanes(size, itemsize)[1]
    while warps > max(4, across) and warps // across * rows > MOST_ROWS:
        warps //= 2
    return warps


def compiled_with(choice: Choice, keys: Tensor, values: Tensor | None, forward: bool) -> dict[str, Any]:
    """Returns the compile-time arguments of a step's kernel, for keys (B, S, A) and values (B, S, H) or None."""
    positions, attention = keys.shape[1:]
    size = triton.next_power_of_2(attention)
    hidden = size if values is None else triton.next_power_of_2(values.shape[2])
    itemsize = keys.itemsize
    if choice.gluon:
        rows = choice.warps // choice.across * (32 // _lanes(size, itemsize)[1])
        layouts = {
            "KEYS": _tile(size, itemsize, choice),
            "VALUES": _tile(hidden, itemsize, choice),
            # For a tile that is summed over its rows: each thread holds whole columns.
            "FLAT": gl.BlockedLayout(
                [rows, max(1, (hidden if forward else size) // (32 * choice.warps))],
                [1, 32],
                [1, choice.warps],
                [1, 0],
            ),
        }
        if forward:
            layouts["KEPT"] = _tile(size, itemsize, choice, 1)
        else:  # a vector spread over all threads
            layouts["WIDE"] = gl.BlockedLayout([1], [32], [choice.warps], [0])
    else:
        rows = max(1, min(PLAIN_ROWS, PLAIN_TILE // max(size, hidden)))
        layouts = dict.fromkeys(("KEYS", "VALUES", "FLAT", "KEPT" if forward else "WIDE"))
    return {
        "A": attention,
        "H": attention if values is None else values.shape[2],
        "SIZE": size,
        "HIDDEN": hidden,
        "ROWS": rows,
        "TILES": triton.next_power_of_2(triton.cdiv(positions, rows)),
        "num_warps": choice.warps,
        **layouts,
    }


def _tile(size: int, itemsize: int, choice: Choice, at_once: int | None = None) -> Any:
    """Returns the layout of a tile: a warp, or warps that share a row, hold whole rows, ``at_once`` values per load."""
    most, lanes = _lanes(size, itemsize)
    warps = [choice.warps // choice.across, choice.across]
    return gl.BlockedLayout([1, at_once or most], [32 // lanes, lanes], warps, [1, 0])


@triton.jit(do_not_specialize=["steps", "positions", "dscores_row"])
def attention_sum(
    query, dscores, keys, key_units, score, gain, shift, dkeys, parts, steps, positions, query_row,
    dscores_row, A: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Writes dkeys (B, S, A) and parts (programs of a feature, 1 or 3, A): gradients of score, gain and shift.

    One program handles a tile of positions of a sentence and a tile of features, for all steps. ``gain`` and
    ``key_units`` may be None.
    """
    sentence = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    there, known = position < positions, column < A
    inside = there[:, None] & known[None, :]
    place = (sentence * positions + position)[:, None] * A + column[None, :]
    k = tl.load(keys + place, mask=inside, other=0.0).to(tl.float32)
    if key_units is not None:
        k *= tl.load(key_units + sentence)
    w = tl.load(score + column, mask=known, other=0.0).to(tl.float32)[None, :]
    dk = tl.zeros([ROWS, WIDTH], tl.float32)
    dw = tl.zeros([ROWS, WIDTH], tl.float32)
    if gain is not None:
        stretch = tl.load(gain + column, mask=known, other=0.0).to(tl.float32)[None, :]
        offset = tl.load(shift + column, mask=known, other=0.0).to(tl.float32)[None, :]
        dgain = tl.zeros([ROWS, WIDTH], tl.float32)
        dshift = tl.zeros([ROWS, WIDTH], tl.float32)
    batch = tl.num_programs(0).to(tl.int64)  # rows of a step
    query += sentence * query_row + column
    dscores += sentence * dscores_row + position
    q_next = tl.load(query, mask=known, other=0.0)
    de_next = tl.load(dscores, mask=there, other=0.0)
    for step in range(steps):
        de, q = de_next[:, None], q_next.to(tl.float32)[None, :]
        # Prefetches the inputs of the next step.
        query += batch * query_row
        dscores += batch * dscores_row
        q_next = tl.load(query, mask=known & (step + 1 < steps), other=0.0)
        de_next = tl.load(dscores, mask=there & (step + 1 < steps), other=0.0)
        x = k + q
        if gain is None:
            t = tanh_of(x, FAST)
            dw += de * t
            dk += de * (1.0 - t * t)
        else:
            x = tl.where(known[None, :], x - tl.sum(x, 1)[:, None] / A, 0.0)
            inverse = tl.rsqrt(tl.sum(x * x, 1) / A + _EPSILON)[:, None]
            x *= inverse
            t = tanh_of(x * stretch + offset, FAST)
            dw += de * t
            of_normed = de * w * (1.0 - t * t)
            dgain += of_normed * x
            dshift += of_normed
            of_normed *= stretch
            along = tl.sum(of_normed * x, 1)[:, None] / A
            dk += inverse * (of_normed - tl.sum(of_normed, 1)[:, None] / A - x * along)
    if gain is None:
        dk *= w
    tl.store(dkeys + place, dk, mask=inside)
    number = sentence * tl.num_programs(1) + tl.program_id(1)
    if gain is None:
        tl.store(parts + number * A + column, tl.sum(dw, 0), mask=known)
    else:
        part = parts + number * 3 * A + column
        tl.store(part, tl.sum(dw, 0), mask=known)
        tl.store(part + A, tl.sum(dgain, 0), mask=known)
        tl.store(part + 2 * A, tl.sum(dshift, 0), mask=known)


def _rows(block: Tensor) -> Tensor:
    """Reshapes (K, B, .) or (B, .) to (R, .)."""
    return block.reshape(-1, block.shape[-1])


class TritonAttention(EagerAttention):
    """Keys, values and weights of one call, and the kernels that use them.

    Args:
        inputs: keys, values and weights; lengths on their device. A sentence of length 0 gets zero weights.
        choice: launch configuration; None: the result of `choose`.
        narrows: False to read float32 keys and values where they are, even where TF32 is allowed.

    Attributes:
        fast: True for 16-bit keys and values and the GPU's tanh instruction: for inputs of such types, and for float32
            where TF32 is allowed.
        keys, values: As they are read.
        key_units, value_units: (B,), numbers by which those of each sentence are multiplied; None: 1.
    """

    def __init__(self, inputs: AttentionInputs, choice: Choice | None = None, narrows: bool = True) -> None:
        keys, values, score, norm, scale, lengths, self._squashes = inputs
        self.fast = keys.dtype != torch.float32 or (narrows and matmul_tf32())
        self.key_units: Tensor | None = None
        self.value_units: Tensor | None = None
        if self.fast and keys.dtype == torch.float32:
            (keys, self.key_units), (values, self.value_units) = in_units(keys), in_units(values)
        self.keys, self.values = keys.contiguous(), values.contiguous()
        self.score = None if score is None else score.contiguous()
        self.gain = None if norm is None else norm[0].contiguous()
        self.shift = None if norm is None else norm[1].contiguous()
        self.scale, self.lengths = scale, lengths
        self.batch, self.positions, self.size = keys.shape
        widths = triton.next_power_of_2(self.size), triton.next_power_of_2(values.shape[2])
        self.choice = choice or choose(*widths, keys.itemsize, self.positions, norm is not None)
        kind: dict[str, Any] = {"KIND": "dot" if score is None else "additive" if norm is None else "norm"}
        kind["FAST"] = self.fast
        self._others = self.key_units, self.value_units, self.score, self.gain, self.shift, lengths
        self._kernels = (
            (attention_gluon.attention_forward, attention_gluon.attention_backward)
            if self.choice.gluon
            else (attention_gluon.plain_attention_forward, attention_gluon.plain_attention_backward)
        )
        self._forward = kind | compiled_with(self.choice, self.keys, self.values, forward=True)
        self._alone = kind | compiled_with(self.choice, self.keys, None, forward=True)
        self._backward = kind | compiled_with(self.choice, self.keys, self.values, forward=False)

    def attend(
        self,
        query: Tensor,
        share: Tensor | None,
        weights: Tensor,
        outputs: Sequence[Tensor] = (),
        group: int = 1,
    ) -> None:
        """Computes weights (R, S) = softmax_s score(query, keys_s) and context = sum_s weights_s values_s.

        Args:
            query: (R, A). share: (R, H), with the row stride of the query, or None.
            outputs: (R, H), one or two, tanh(share + context) or without a share the contexts; none: weights alone.
            group: number of consecutive rows that belong to one sentence: 1 or T.
        """
        assert len(outputs) <= 2
        assert share is None or row_stride(share) == row_stride(query)
        first, second = (*outputs, None, None)[:2]
        with on_gpu_of([query]):  # in a search, no operator has made it the current one
            self._kernels[0][(len(query),)](
                query, share, self.keys, None if first is None else self.values, *self._others, weights, first, second,
                self.scale, group, self.batch, self.positions,
                *(row_stride(rows) for rows in (query, weights, first, second)),
                **(self._alone if first is None else self._forward),
            )  # fmt: skip

    def backward(self, step: AttentionBackward) -> None:
        """Implements `EagerAttention.backward`, for one step or all steps of a block, in one launch.

        There are no gradients of outputs if there are ``dweights``.
        """
        assert step.coverage is None
        query, weights, context, dboth, dscores = map(
            _rows, (step.query, step.weights, step.context, step.dboth, step.dscores)
        )
        output = _rows(step.output) if self._squashes else None
        first, second = (*map(_rows, step.doutputs), None, None)[:2]
        gradients = first, second, None if step.dweights is None else _rows(step.dweights)
        dquery, dshare = dboth[:, : self.size], dboth[:, self.size :] if self._squashes else None
        self._kernels[1][(len(query),)](
            query, self.keys, self.values, *self._others, weights, context, output, *gradients, dquery, dshare,
            dscores, self.scale, self.batch, self.positions,
            *(row_stride(rows) for rows in (query, weights, context, output, *gradients, dquery, dscores)),
            **self._backward,
        )  # fmt: skip

    def key_gradients(
        self, query: Tensor, dscores: Tensor, dtype: torch.dtype = torch.float32
    ) -> list[Tensor]:
        """Returns the gradients of keys, score and, with normalisation, gain and bias, summed over all steps.

        There are no atomic additions: each program has its own partial sums over positions, so results are
        deterministic. Queries (R, A) and ``dscores`` (R, S) float32 are ordered by step; the gradient of the keys has
        the type ``dtype``, to which it is rounded once.
        """
        size, width, warps = triton.next_power_of_2(self.size), SUM_WIDTH, 4
        if self.gain is None:
            width, rows = min(width, size), SUM_ROWS[0]
            if self.fast:
                costs = {each: triton.cdiv(self.positions, each) * (each + SUM_OVERHEAD) for each in SUM_ROWS}
                rows = min(costs, key=costs.__getitem__)
        else:
            rows, width, warps = max(1, min(16, SUM_NORMED_VALUES // size)), size, 8
        dkeys = torch.empty_like(self.keys, dtype=dtype)
        programs = triton.cdiv(self.positions, rows)
        shape = self.batch, programs, 1 if self.gain is None else 3, self.size
        parts = dkeys.new_empty(shape, dtype=torch.float32)
        attention_sum[(self.batch, programs, triton.cdiv(self.size, width))](
            query, dscores, self.keys, self.key_units, self.score, self.gain, self.shift, dkeys, parts,
            len(query) // max(1, self.batch), self.positions, row_stride(query), row_stride(dscores), A=self.size,
            ROWS=rows, WIDTH=width, FAST=self.fast, num_warps=warps,
        )  # fmt: skip
        # In two steps: a single sum over so many programs has few columns to run in parallel.
        return [dkeys, *parts.sum(1).sum(0).unbind(0)]

    def forward(
        self, both: Tensor, outputs: Sequence[Tensor], weights: Tensor, coverage: CoverageStep | None = None
    ) -> None:
        """Implements `EagerAttention.forward`."""
        assert coverage is None
        share = both[:, self.size :] if self._squashes else None
        self.attend(both[:, : self.size], share, weights, outputs[:2])
        for other in outputs[2:]:
            other.copy_(outputs[0])

    def weights_of(self, queries: Tensor, coverage: Sequence[Tensor] | None = None) -> Tensor:
        """Implements `EagerAttention.weights_of`; all steps in one launch."""
        assert coverage is None
        weights = queries.new_empty(*queries.shape[:2], self.positions)
        self.attend(_rows(queries), None, _rows(weights))
        return weights

    def projected_gradient(self, weights: Tensor, da: Tensor) -> Tensor:
        """Implements `EagerAttention.projected_gradient`."""
        return torch.bmm(weights.permute(1, 2, 0), da.transpose(0, 1))

    def gradients(self, queries: Tensor, dscores: Tensor) -> AttentionGradients:
        """Implements `EagerAttention.gradients`; the sums over positions and steps in one launch."""
        if self.score is None:
            scaled = (dscores * self.scale).to(queries.dtype).permute(1, 2, 0)
            return AttentionGradients(torch.bmm(scaled, queries.transpose(0, 1)), None, None)
        dkeys, dscore, *dnorm = self.key_gradients(_rows(queries), _rows(dscores), queries.dtype)
        return AttentionGradients(dkeys, dscore, (dnorm[0], dnorm[1]) if dnorm else None)
