"""One step of attention, forward and backward, as Gluon kernels with one program per query.

The bandwidth of keys and values from the L2 cache bounds a step. So each warp holds whole rows, which keeps sums over a
row within the warp; tiles of rows are prefetched two tiles ahead; each row of a tile keeps its own running softmax, so
that warps synchronise only after the last tile; and the final reduction uses all threads.

Layouts: KEYS and VALUES for tiles (ROWS, SIZE) and (ROWS, HIDDEN); KEPT for the scores of all tiles, with rows placed
like those of the keys; FLAT for a block that is summed over its rows; WIDE for the positions of a sentence. SIZE and
HIDDEN are the next powers of two of A and H, the widths of keys and values. Queries and related tensors are rows
(R, .); row r belongs to sentence r // group % batch, backward to r % batch. Scores and softmax are in base 2, because
GPUs have an exp2 instruction.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from econmt_ops.backends.triton import portable
from econmt_ops.backends.triton.pointwise import tanh, tanh_of
from econmt_ops.cells.attention import LAYER_NORM_EPSILON

_EPSILON = gl.constexpr(LAYER_NORM_EPSILON)
_LOG2_E = gl.constexpr(1.4426950408889634)
_BOUND = gl.constexpr(100.0)
"""Exponent bound: exp2 of anything below it, summed over the positions, is a finite float32, and so is its inverse."""
_LOWEST = gl.constexpr(-1e30)
"""Finite value below every score; differences of infinities would be NaN."""


@gluon.jit
def _inside(rows, column, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Returns the mask of a tile: valid rows (ROWS,), and columns below WIDTH."""
    if WIDTH == PADDED:
        return gl.expand_dims(rows, 1)
    else:
        return gl.expand_dims(rows, 1) & gl.expand_dims(column < WIDTH, 0)


@gluon.jit
def _column(values, LAYOUT: tl.constexpr):
    """Converts one value per row (ROWS,) to a column (ROWS, 1) of a layout."""
    return gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def _load_tile(tile, begin, end, place, column, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Loads the rows of a sentence from ``begin`` on, below ``end``; ``tile`` points to the first tile."""
    mask = _inside(begin + place < end, column, WIDTH, PADDED)
    return gl.load(tile + begin * WIDTH, mask=mask, other=0.0)


@gluon.jit
def _vector(pointer, column, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Loads a vector (WIDTH,) as a row (1, PADDED) in float32, zero beyond its width."""
    if WIDTH == PADDED:
        return gl.expand_dims(gl.load(pointer + column).to(gl.float32), 0)
    else:
        return gl.expand_dims(gl.load(pointer + column, mask=column < WIDTH, other=0.0).to(gl.float32), 0)


@gluon.jit
def _store(pointer, index, values, end):
    """Stores the values at indices below ``end``, cast to the pointer's type."""
    gl.store(pointer + index, values.to(pointer.dtype.element_ty), mask=index < end)


@gluon.jit
def _store_twice(first, second, row, first_row, second_row, index, values, end):
    """Stores values in a row of two tensors, of which the second may be None; see `_store`."""
    _store(first + row * first_row, index, values, end)
    if second is not None:
        _store(second + row * second_row, index, values, end)


@gluon.jit
def _length(lengths, sentence, positions):
    """Returns the number of positions of a sentence."""
    if lengths is None:
        return positions
    else:
        return gl.minimum(gl.load(lengths + sentence).to(gl.int32), positions)


@gluon.jit
def _unit_of(units, sentence):
    """Returns the number by which a sentence's keys or values are multiplied where they are used."""
    if units is None:
        return 1.0
    else:
        return gl.load(units + sentence)


@gluon.jit
def _normalise(x, column, A: tl.constexpr, SIZE: tl.constexpr):
    """Returns rows (ROWS, SIZE) with mean 0 and variance 1 over A columns, zero beyond, and 1 / deviation (ROWS, 1)."""
    x -= gl.expand_dims(gl.sum(x, 1), 1) / A
    if A != SIZE:
        x = gl.where(gl.expand_dims(column < A, 0), x, 0.0)
    inverse = gl.expand_dims(gl.rsqrt(gl.sum(x * x, 1) / A + _EPSILON), 1)
    return x * inverse, inverse


@gluon.jit
def _scores(
    k, key_unit, vectors, column, KIND: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr, FAST: tl.constexpr
):
    """Returns the scores (ROWS,) of keys k (ROWS, SIZE) for the query, which for dot has their unit.

    ``vectors``, (1, SIZE): the query, the score's weight, and gain and shift of the normalisation.
    """
    q, w, stretch, offset = vectors
    if KIND == "dot":
        return gl.sum(k.to(gl.float32) * q, 1)
    else:
        x = k.to(gl.float32) * key_unit + q
        if KIND == "norm":
            x, _ = _normalise(x, column, A, SIZE)
            x = x * stretch + offset
        return gl.sum(tanh_of(x, FAST) * w, 1)


@gluon.jit(do_not_specialize=["batch", "positions", "weights_row"])
def attention_forward(
    query, share, keys, values, key_units, value_units, score, gain, shift, lengths, weights, first, second, scale,
    group, batch, positions, query_row, weights_row, first_row, second_row, KIND: tl.constexpr, A: tl.constexpr,
    H: tl.constexpr, SIZE: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    FAST: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, FLAT: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Computes weights (R, S) and, with ``values``, contexts or, with ``share``, tanh(share + context), (R, H).

    KIND ("additive", "norm", "dot") decides whether ``score`` and ``gain`` are used. ``lengths`` None: all sentences
    have S positions. ``second`` may be None. ``key_units`` and ``value_units`` (B,): keys and values of a sentence are
    multiplied by its number; None: they are what they stand for.
    """
    row = gl.program_id(0).to(gl.int64)
    sentence = row // group % batch
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, KEYS))
    place = gl.arange(0, ROWS, layout=gl.SliceLayout(1, KEYS))
    unit = gl.arange(0, HIDDEN, layout=gl.SliceLayout(0, VALUES))
    spot = gl.arange(0, ROWS, layout=gl.SliceLayout(1, VALUES))
    tile = keys + sentence * positions * A + gl.expand_dims(place, 1) * A + gl.expand_dims(column, 0)
    k_next = _load_tile(tile, 0, positions, place, column, A, SIZE)
    if values is not None:
        pane = values + sentence * positions * H + gl.expand_dims(spot, 1) * H + gl.expand_dims(unit, 0)
        v_next = _load_tile(pane, 0, positions, spot, unit, H, HIDDEN)
    q = _vector(query + row * query_row, column, A, SIZE)
    w, stretch, offset, key_unit = q, q, q, _unit_of(key_units, sentence)
    if KIND == "dot":
        q *= scale * _LOG2_E * key_unit
    else:
        w = _vector(score, column, A, SIZE) * _LOG2_E
    if KIND == "norm":
        stretch, offset = _vector(gain, column, A, SIZE), _vector(shift, column, A, SIZE)
    vectors = q, w, stretch, offset
    length = _length(lengths, sentence, positions)
    k_later = _load_tile(tile, ROWS, positions, place, column, A, SIZE)
    if values is not None:
        v_later = _load_tile(pane, ROWS, positions, spot, unit, H, HIDDEN)
        context = gl.full([ROWS, HIDDEN], 0.0, gl.float32, layout=VALUES)
    flat = gl.arange(0, HIDDEN, layout=gl.SliceLayout(0, FLAT))
    if share is not None:
        added = gl.load(share + row * query_row + flat, mask=flat < H, other=0.0).to(gl.float32)
    number = gl.expand_dims(gl.arange(0, TILES, layout=gl.SliceLayout(0, KEPT)), 0)
    kept = gl.full([ROWS, TILES], _LOWEST, gl.float32, layout=KEPT)
    # A score of additive attention is at most sum |w|: if exp2 of that is finite, no running maximum is needed.
    running = length > 0
    if KIND != "dot":
        running = gl.sum(gl.sum(gl.abs(w), 1), 0) > _BOUND
    top = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, KEYS))
    if running:
        top += _LOWEST
    total = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, KEYS))
    for begin in range(0, length, ROWS):
        later = begin + 2 * ROWS
        k, k_next = k_next, k_later
        k_later = _load_tile(tile, later, length, place, column, A, SIZE)
        if values is not None:
            v, v_next = v_next, v_later
            v_later = _load_tile(pane, later, length, spot, unit, H, HIDDEN)
        there = begin + place < length
        scores = gl.where(there, _scores(k, key_unit, vectors, column, KIND, A, SIZE, FAST), _LOWEST)
        kept = gl.where(number == begin // ROWS, _column(scores, KEPT), kept)
        if running:
            higher = gl.maximum(top, scores)
            shrink = gl.exp2(top - higher)
            total *= shrink
            top = higher
            if values is not None:
                context *= _column(shrink, VALUES)
        part = gl.where(there, gl.exp2(scores - top), 0.0)
        total += part
        if values is not None:
            context += _column(part, VALUES) * v.to(gl.float32)
    highest = gl.max(top, 0)
    rest = gl.exp2(top - highest)
    inverse = gl.where(length > 0, 1.0, 0.0) / gl.where(length > 0, gl.sum(total * rest, 0), 1.0)
    position = number * ROWS + _column(gl.arange(0, ROWS, layout=gl.SliceLayout(1, KEYS)), KEPT)
    weight = gl.where(position < length, gl.exp2(kept - highest) * inverse, 0.0)
    _store(weights + row * weights_row, position, weight, positions)
    if values is not None:
        rest *= inverse * _unit_of(value_units, sentence)
        result = gl.sum(gl.convert_layout(context * _column(rest, VALUES), FLAT), 0)
        if share is not None:
            result = tanh(result + added)
        _store_twice(first, second, row, first_row, second_row, flat, result, H)


@gluon.jit
def _weighted(alphas, values, position, length):
    """Returns the sum over a sentence's positions of weights times values."""
    there = position < length
    alpha = gl.load(alphas + position, mask=there, other=0.0).to(gl.float32)
    return gl.sum(alpha * gl.load(values + position, mask=there, other=0.0).to(gl.float32), 0)


@gluon.jit
def _query_gradient(de, k, key_unit, vectors, column, KIND: tl.constexpr, A: tl.constexpr, SIZE: tl.constexpr,
                    FAST: tl.constexpr):  # fmt: skip
    """Returns the part of each key k (ROWS, SIZE) in the query's gradient, given the score's gradient de (ROWS, 1).

    The factor that all keys share, score weight or scale, is applied by the caller. ``vectors`` as in `_scores`.
    """
    q, w, stretch, offset = vectors
    if KIND == "dot":
        return de * k.to(gl.float32)
    else:
        x = k.to(gl.float32) * key_unit + q
        if KIND == "additive":
            t = tanh_of(x, FAST)
            return de * (1.0 - t * t)
        else:
            x, inverse = _normalise(x, column, A, SIZE)
            t = tanh_of(x * stretch + offset, FAST)
            dx = de * inverse * (1.0 - t * t) * w * stretch
            along = gl.expand_dims(gl.sum(dx * x, 1), 1) / A
            dx -= gl.expand_dims(gl.sum(dx, 1), 1) / A + x * along
            if A != SIZE:
                dx = gl.where(gl.expand_dims(column < A, 0), dx, 0.0)
            return dx


@gluon.jit(do_not_specialize=["batch", "positions", "weights_row", "dweights_row", "dscores_row"])
def attention_backward(
    query, keys, values, key_units, value_units, score, gain, shift, lengths, weights, context, output, first, second,
    dweights, dquery, dshare, dscores, scale, batch, positions, query_row, weights_row, context_row, output_row,
    first_row, second_row, dweights_row, dquery_row, dscores_row, KIND: tl.constexpr, A: tl.constexpr, H: tl.constexpr,
    SIZE: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, FAST: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of queries (R, A), scores (R, S) and, with ``output``, of the input of tanh (R, H).

    ``first`` (R, H) and ``second``, which may be None, are gradients of the outputs or, if ``output`` is None, of the
    contexts. If ``first`` is None, ``dweights`` (R, S), otherwise optional, is the only gradient. ``dquery`` and
    ``dshare`` have the same row stride.
    """
    row = gl.program_id(0).to(gl.int64)
    sentence = row % batch
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, KEYS))
    place = gl.arange(0, ROWS, layout=gl.SliceLayout(1, KEYS))
    unit = gl.arange(0, HIDDEN, layout=gl.SliceLayout(0, VALUES))
    spot = gl.arange(0, ROWS, layout=gl.SliceLayout(1, VALUES))
    tile = keys + sentence * positions * A + gl.expand_dims(place, 1) * A + gl.expand_dims(column, 0)
    alphas = weights + row * weights_row
    if first is not None:
        pane = values + sentence * positions * H + gl.expand_dims(spot, 1) * H + gl.expand_dims(unit, 0)
        v_next = _load_tile(pane, 0, positions, spot, unit, H, HIDDEN)
    k_next = _load_tile(tile, 0, positions, place, column, A, SIZE)
    length = _length(lengths, sentence, positions)
    key_unit = _unit_of(key_units, sentence)
    q = _vector(query + row * query_row, column, A, SIZE)
    alpha_next = gl.load(alphas + spot, mask=spot < positions, other=0.0)
    delta = 0.0
    if first is not None:
        da = _vector(first + row * first_row, unit, H, HIDDEN)
        if second is not None:
            da += _vector(second + row * second_row, unit, H, HIDDEN)
        if output is not None:
            o = _vector(output + row * output_row, unit, H, HIDDEN)
            da *= 1.0 - o * o
            _store(dshare + row * dquery_row, gl.expand_dims(unit, 0), da, H)
        delta = gl.sum(gl.sum(da * _vector(context + row * context_row, unit, H, HIDDEN), 1), 0)
        da *= _unit_of(value_units, sentence)
        v_later = _load_tile(pane, ROWS, positions, spot, unit, H, HIDDEN)
    k_later = _load_tile(tile, ROWS, positions, place, column, A, SIZE)
    alpha_later = gl.load(alphas + ROWS + spot, mask=ROWS + spot < positions, other=0.0)
    position = gl.arange(0, TILES * ROWS, layout=WIDE)
    if dweights is not None:
        delta += _weighted(alphas, dweights + row * dweights_row, position, length)
    w, stretch, offset = q, q, q
    if KIND == "norm":
        w, stretch = _vector(score, column, A, SIZE), _vector(gain, column, A, SIZE)
        offset = _vector(shift, column, A, SIZE)
    dq = gl.full([ROWS, SIZE], 0.0, gl.float32, layout=KEYS)
    for begin in range(0, length, ROWS):
        later = begin + 2 * ROWS
        k, k_next = k_next, k_later
        k_later = _load_tile(tile, later, length, place, column, A, SIZE)
        alpha, alpha_next = alpha_next.to(gl.float32), alpha_later
        alpha_later = gl.load(alphas + later + spot, mask=later + spot < length, other=0.0)
        there = begin + spot < length
        dalpha = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, VALUES))
        if first is not None:
            v, v_next = v_next, v_later
            v_later = _load_tile(pane, later, length, spot, unit, H, HIDDEN)
            dalpha += gl.sum(v.to(gl.float32) * da, 1)
        if dweights is not None:
            given = gl.load(dweights + row * dweights_row + begin + spot, mask=there, other=0.0)
            dalpha += given.to(gl.float32)
        de = gl.where(there, alpha * (dalpha - delta), 0.0)
        gl.store(dscores + row * dscores_row + begin + spot, de, mask=there)
        dq += _query_gradient(
            _column(de, KEYS), k, key_unit, (q, w, stretch, offset), column, KIND, A, SIZE, FAST
        )
    total = gl.sum(gl.convert_layout(dq, FLAT), 0)
    feature = gl.arange(0, SIZE, layout=gl.SliceLayout(0, FLAT))
    if KIND == "dot":
        total *= scale * key_unit
    if KIND == "additive":
        total *= gl.load(score + feature, mask=feature < A, other=0.0).to(gl.float32)
    _store(dquery + row * dquery_row, feature, total, A)
    beyond = (position >= length) & (position < positions)
    nothing = gl.full([TILES * ROWS], 0.0, gl.float32, layout=WIDE)
    gl.store(dscores + row * dscores_row + position, nothing, mask=beyond)


def _plain() -> tuple[Any, Any]:
    """Returns the two kernels in plain Triton, with the functions above that they call."""
    names: dict[str, Any] = {"gl": portable}
    for name, function in [*globals().items()]:
        if isinstance(function, type(attention_forward)):
            names[name] = portable.twin(function, names)
    return names["attention_forward"], names["attention_backward"]


plain_attention_forward, plain_attention_backward = _plain()
