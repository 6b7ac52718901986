"""Attention by our kernels: a step, all queries of a sentence at once, and the gradients that no step waits for.

Shapes: B batch, T target steps, K steps of a block, S source positions, A attention size, H width of the values; R rows
of queries, either K B, a step's sentences together, or B T, a sentence's steps together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from econmt_ops.backends.triton import attention_gluon, interpreted
from econmt_ops.backends.triton.cells import row_stride
from econmt_ops.backends.triton.pointwise import tanh_of
from econmt_ops.cells.attention import LAYER_NORM_EPSILON

_EPSILON: tl.constexpr = tl.constexpr(LAYER_NORM_EPSILON)


class Choice(NamedTuple):
    """How an attention kernel divides its work.

    Attributes:
        warps: of a program. across: how many of them share a row; Gluon only.
        gluon: whether the Gluon kernel runs, or the plain one.
    """

    warps: int
    across: int = 1
    gluon: bool = True


REGISTERS = {16: 128, 8: 255}
"""What a thread can have, by the warps of a program that shall fill a multiprocessor (65,536 registers)."""
TILES_HELD = 3
"""Tiles of keys and of values that a thread holds: one is used, two have been asked for."""
VECTORS_HELD = 2
"""Vectors as wide as the keys that it holds in float32 beside a sum: query and score."""
NORMED_HELD = 5
"""What layer normalisation adds to them, intermediate values included."""
OTHER_REGISTERS = 26
"""All else: addresses, masks, the loop. These four are read off the compiled kernels and hold within a tenth."""
PLAIN_TILE = 4096
"""Values of a plain kernel's tile."""
PLAIN_ROWS = 16
"""Rows of a plain kernel's tile, at most."""
MOST_ROWS = 32
"""Rows of a Gluon kernel's tile, at most; more where one warp takes more."""
SUM_TILE = (32, 64)
"""Positions and features that a program of the sum over steps takes; 4 warps."""
SUM_NORMED_VALUES = 4096
"""Values of its tile with layer normalisation, which needs whole rows; 8 warps."""


def _lanes(size: int, itemsize: int) -> tuple[int, int]:
    """The values of a row of ``size`` that a thread loads at once, 16 bytes at most, and the threads of a row."""
    at_once = min(16 // itemsize, size)
    return at_once, min(32, size // at_once)


def choose(size: int, hidden: int, itemsize: int, normed: bool) -> Choice:
    """The choice for tiles (., size) and (., hidden), powers of two, of values of ``itemsize`` bytes."""
    if interpreted():
        return Choice(8, gluon=False)
    for across in (1, 2, 4, 8):
        keys, values = (max(1, width // (_lanes(width, itemsize)[1] * across)) for width in (size, hidden))
        tiles = TILES_HELD * (keys + values) * itemsize // 4 + values
        need = tiles + keys * (VECTORS_HELD + NORMED_HELD * normed) + OTHER_REGISTERS
        for warps, limit in REGISTERS.items():
            if need <= limit:
                return Choice(_few(warps, across, size, itemsize), across)
    return Choice(8, gluon=False)


def _few(warps: int, across: int, size: int, itemsize: int) -> int:
    """As many warps as a tile of some rows can use."""
    rows = 32 // _lanes(size, itemsize)[1]
    while warps > max(4, across) and warps // across * rows > MOST_ROWS:
        warps //= 2
    return warps


def compiled_with(choice: Choice, keys: Tensor, values: Tensor | None, flat_size: int) -> dict[str, Any]:
    """What the step's kernels are compiled with.

    Args:
        choice: how they divide their work.
        keys: (B, S, A). values: (B, S, H), or None.
        flat_size: the width of the block that they sum over its rows.
    """
    positions, attention = keys.shape[1:]
    size = triton.next_power_of_2(attention)
    hidden = size if values is None else triton.next_power_of_2(values.shape[2])
    itemsize = keys.itemsize
    if choice.gluon:
        rows = choice.warps // choice.across * (32 // _lanes(size, itemsize)[1])
        layouts = {
            "KEYS": _tile(size, itemsize, choice),
            "VALUES": _tile(hidden, itemsize, choice),
            "FLAT": gl.BlockedLayout(
                [rows, max(1, flat_size // (32 * choice.warps))], [1, 32], [1, choice.warps], [1, 0]
            ),
            "WIDE": gl.BlockedLayout([1], [32], [choice.warps], [0]),
        }
    else:
        rows = max(1, min(PLAIN_ROWS, PLAIN_TILE // max(size, hidden)))
        layouts = dict.fromkeys(("KEYS", "VALUES", "FLAT", "WIDE"))
    return {
        "A": attention,
        "H": attention if values is None else values.shape[2],
        "SIZE": size,
        "HIDDEN": hidden,
        "ROWS": rows,
        "TILES": triton.next_power_of_2(triton.cdiv(positions, rows)),
        "FAST": keys.dtype != torch.float32 and not interpreted(),
        "num_warps": choice.warps,
        **layouts,
    }


def _tile(size: int, itemsize: int, choice: Choice) -> Any:
    """The layout of a tile: a warp, or as many as share a row, holds whole rows."""
    at_once, lanes = _lanes(size, itemsize)
    warps = [choice.warps // choice.across, choice.across]
    return gl.BlockedLayout([1, at_once], [32 // lanes, lanes], warps, [1, 0])


@triton.jit(do_not_specialize=["steps", "positions", "dscores_row"])
def _sum_kernel(
    query: tl.tensor,
    dscores: tl.tensor,
    keys: tl.tensor,
    score: tl.tensor,
    gain: tl.tensor,
    shift: tl.tensor,
    dkeys: tl.tensor,
    parts: tl.tensor,
    steps: tl.tensor,
    positions: tl.tensor,
    step_rows: tl.tensor,
    sentence_rows: tl.tensor,
    query_row: tl.tensor,
    dscores_row: tl.tensor,
    A: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """Adds to dkeys (B, S, A) and to parts (programs of a feature, 1 or 3, A): the gradients of score, gain and shift.

    One program: some positions of a sentence, some features, through all steps. ``gain`` may be None.
    """
    sentence = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    there, known = position < positions, column < A
    inside = there[:, None] & known[None, :]
    place = (sentence * positions + position)[:, None] * A + column[None, :]
    k = tl.load(keys + place, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(score + column, mask=known, other=0.0).to(tl.float32)[None, :]
    dk = tl.zeros([ROWS, WIDTH], tl.float32)
    dw = tl.zeros([ROWS, WIDTH], tl.float32)
    if gain is not None:
        stretch = tl.load(gain + column, mask=known, other=0.0).to(tl.float32)[None, :]
        offset = tl.load(shift + column, mask=known, other=0.0).to(tl.float32)[None, :]
        dgain = tl.zeros([ROWS, WIDTH], tl.float32)
        dshift = tl.zeros([ROWS, WIDTH], tl.float32)
    for step in range(steps):
        row = step * step_rows + sentence * sentence_rows
        de = tl.load(dscores + row * dscores_row + position, mask=there, other=0.0)[:, None]
        x = k + tl.load(query + row * query_row + column, mask=known, other=0.0).to(tl.float32)[None, :]
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
    dk += tl.load(dkeys + place, mask=inside, other=0.0)
    tl.store(dkeys + place, dk, mask=inside)
    number = sentence * tl.num_programs(1) + tl.program_id(1)
    if gain is None:
        part = parts + number * A + column
        tl.store(part, tl.load(part, mask=known) + tl.sum(dw, 0), mask=known)
    else:
        part = parts + number * 3 * A + column
        tl.store(part, tl.load(part, mask=known) + tl.sum(dw, 0), mask=known)
        tl.store(part + A, tl.load(part + A, mask=known) + tl.sum(dgain, 0), mask=known)
        tl.store(part + 2 * A, tl.load(part + 2 * A, mask=known) + tl.sum(dshift, 0), mask=known)


class Attention:
    """Keys, values and weights of one call, and the kernels on them.

    Args:
        keys: (B, S, A) and values: (B, S, H), zero at padded positions.
        score: (A,) of additive attention, or None: dot.
        norm: (gain (A,), bias (A,)) of the layer normalisation, or None.
        scale: of dot attention.
        lengths: (B,) int64 or int32, or None: all sentences have S positions. One of length 0 gets zero weights.
        choice: None: `choose`.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        score: Tensor | None,
        norm: tuple[Tensor, Tensor] | None = None,
        scale: float = 1.0,
        lengths: Tensor | None = None,
        choice: Choice | None = None,
    ) -> None:
        self.keys, self.values = keys.contiguous(), values.contiguous()
        self.score = None if score is None else score.contiguous()
        self.gain = None if norm is None else norm[0].contiguous()
        self.shift = None if norm is None else norm[1].contiguous()
        self.scale, self.lengths = scale, lengths
        self.batch, self.positions, self.size = keys.shape
        widths = triton.next_power_of_2(self.size), triton.next_power_of_2(values.shape[2])
        self.choice = choice or choose(*widths, keys.itemsize, norm is not None)
        kind = {"KIND": "dot" if score is None else "additive" if norm is None else "norm"}
        self._forward = kind | compiled_with(self.choice, self.keys, self.values, widths[1])
        self._alone = kind | compiled_with(self.choice, self.keys, None, widths[0])
        self._backward = kind | compiled_with(self.choice, self.keys, self.values, widths[0])

    def forward(
        self,
        query: Tensor,
        share: Tensor | None,
        weights: Tensor,
        outputs: Sequence[Tensor] = (),
        group: int = 1,
    ) -> None:
        """weights = softmax_s score(query, keys_s), context = sum_s weights_s values_s.

        Args:
            query: (R, A).
            share: (R, H), its rows as far apart as those of the query: the outputs are tanh(share + context); None:
                they are the contexts.
            weights: (R, S) is written.
            outputs: (R, H), one or two that are written; none: only the weights are made.
            group: how many rows in a row are of one sentence: 1 or T.
        """
        assert len(outputs) <= 2
        assert share is None or row_stride(share) == row_stride(query)
        first, second = (*outputs, None, None)[:2]
        kernel = attention_gluon.forward_kernel if self.choice.gluon else attention_gluon.plain_forward_kernel
        scratch = None if self.choice.gluon else torch.empty_like(weights, dtype=torch.float32)
        kernel[(len(query),)](
            query,
            share,
            self.keys,
            None if first is None else self.values,
            self.score,
            self.gain,
            self.shift,
            self.lengths,
            weights,
            first,
            second,
            None if scratch is None else scratch.contiguous(),
            self.scale,
            group,
            self.batch,
            self.positions,
            *(row_stride(rows) for rows in (query, weights, first, second)),
            SHARED=self.choice.gluon,
            **(self._alone if first is None else self._forward),
        )

    def backward(
        self,
        query: Tensor,
        weights: Tensor,
        context: Tensor | None,
        output: Tensor | None,
        doutputs: Sequence[Tensor],
        dweights: Tensor | None,
        dquery: Tensor,
        dshare: Tensor | None,
        dscores: Tensor,
        group: int = 1,
    ) -> None:
        """The gradients of queries and scores, and of the shares.

        Args:
            query: (R, A). weights: (R, S). context: (R, H). output: (R, H); None: the outputs are the contexts.
            doutputs: (R, H), one or two, which are added; or, with ``dweights``, none.
            dweights: (R, S), or None.
            dquery: (R, A) is written. dshare: (R, H), its rows as far apart as those of ``dquery``, is written if there
                is an ``output``.
            dscores: (R, S) float32 is written: weights (dweights - sum_s weights dweights), all of dweights.
            group: as for `forward`.
        """
        assert len(doutputs) <= 2
        assert dshare is None or row_stride(dshare) == row_stride(dquery)
        first, second = (*doutputs, None, None)[:2]
        kernel = (
            attention_gluon.backward_kernel if self.choice.gluon else attention_gluon.plain_backward_kernel
        )
        kernel[(len(query),)](
            query,
            self.keys,
            self.values,
            self.score,
            self.gain,
            self.shift,
            self.lengths,
            weights,
            context,
            output,
            first,
            second,
            dweights,
            dquery,
            dshare,
            dscores,
            self.scale,
            group,
            self.batch,
            self.positions,
            *(
                row_stride(rows)
                for rows in (query, weights, context, output, first, second, dweights, dquery, dscores)
            ),
            **self._backward,
        )


class KeyGradients:
    """The gradients of keys, score and normalisation of additive attention, summed over steps.

    Without atomic additions: a program has its own part of the sums over positions, so that results never vary.

    Attributes:
        keys: (B, S, A) float32.
    """

    def __init__(self, attention: Attention) -> None:
        assert attention.score is not None
        self.attention = attention
        self.keys = torch.zeros_like(attention.keys, dtype=torch.float32)
        size = triton.next_power_of_2(attention.size)
        if attention.gain is None:
            self._tile, self._warps = (SUM_TILE[0], min(SUM_TILE[1], size)), 4
        else:
            self._tile, self._warps = (max(1, min(16, SUM_NORMED_VALUES // size)), size), 8
        programs = attention.batch * triton.cdiv(attention.positions, self._tile[0])
        sums = 1 if attention.gain is None else 3
        self._parts = self.keys.new_zeros(programs, sums, attention.size)

    def add(self, query: Tensor, dscores: Tensor, group: int = 1) -> None:
        """Add what rows leave: query (R, A) and dscores (R, S) float32; ``group`` as for `Attention.forward`."""
        attention = self.attention
        batch, positions, size = attention.keys.shape
        steps = len(query) // batch
        rows, width = self._tile
        _sum_kernel[(batch, triton.cdiv(positions, rows), triton.cdiv(size, width))](
            query,
            dscores,
            attention.keys,
            attention.score,
            attention.gain,
            attention.shift,
            self.keys,
            self._parts,
            steps,
            positions,
            *((batch, 1) if group == 1 else (1, group)),
            row_stride(query),
            row_stride(dscores),
            A=size,
            ROWS=rows,
            WIDTH=width,
            FAST=query.dtype != torch.float32 and not interpreted(),
            num_warps=self._warps,
        )

    def vectors(self) -> list[Tensor]:
        """The gradients (A,) of the score and, with normalisation, of gain and bias."""
        return list(self._parts.sum(0).unbind(0))
