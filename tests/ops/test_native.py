"""The C library against plain computations in float64, over every instruction set that the machine has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import econmt_ops
from econmt_ops.backends import c as native
from econmt_ops.backends.c import library as loading
from econmt_ops.backends.protocol import CellStep, StepGradients
from econmt_ops.cells.attention import LAYER_NORM_EPSILON
from econmt_ops.cells.gru import GRU
from econmt_ops.products.repeated import add_repeated
from tests.ops.every_op import calls
from tests.ops.helpers import assert_close, scatter_strides, values_and_gradients
from tests.ops.test_surroundings import defaults

NAN = float("nan")
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
ROWS = (1, 3, 65)
POSITIONS = (1, 2, 9)
LEVELS = {0: "every-processor", 1: "avx2", 2: "avx512"}
Use = Callable[[int], None]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
each_size = pytest.mark.parametrize("size", [1, 17, 255, 256, 600])


PATH = native.library_path() or Path()
pytestmark = pytest.mark.skipif(
    native.library_path() is None, reason="econmt_ops was installed without its C library"
)


def test_the_library_is_of_these_sources() -> None:
    assert native.is_built(), "econmt must be installed again"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Sets how many threads work on a kernel, however small it is."""
    monkeypatch.setattr(native, "_FEW", 0)
    return torch.set_num_threads


class Random:
    """Random tensors, the same ones for the same seed."""

    def __init__(self, dtype: torch.dtype, seed: int = 1) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        """In the type under test."""
        return self.full(*shape, scale=scale).to(self.dtype)

    def full(self, *shape: int, scale: float = 1.0) -> Tensor:
        """In float32."""
        return torch.randn(shape, generator=self.generator) * scale

    def padding(self, rows: int, positions: int) -> Tensor:
        """The first row has nothing but padding, the last one none."""
        lengths = torch.randint(0, positions + 1, (rows,), generator=self.generator)
        lengths[0], lengths[-1] = 0, positions
        return torch.arange(positions) >= lengths.unsqueeze(1)


def framed(values: Tensor) -> Tensor:
    """Equal rows that are slices of wider ones, with NaN around them."""
    rows, size = values.shape
    frame = values.new_full((rows + 2, size + 7), NAN)
    frame[1:-1, 3:-4] = values
    return frame[1:-1, 3:-4]


def poison(dtype: torch.dtype, *shape: int) -> Tensor:
    """A place for results, in a frame, where nothing has been written yet."""
    return framed(torch.full(shape, NAN, dtype=dtype))


def assert_frame_untouched(*results: Tensor) -> None:
    for result in results:
        assert int(result._base.isnan().logical_not().sum()) == result.numel()


def columns(values: Tensor) -> Tensor:
    """Equal values whose columns follow each other in memory, not their rows."""
    return values.t().contiguous().t()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"plain": torch.clone, "framed": framed, "columns": columns}


def some_of(number: int, *axes: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
    """Every fifth of the axes' products, others for each of five numbers: what a loop around it counts meets them all."""
    return list(product(*axes))[number % 5 :: 5]


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype, sums: float = 1.0) -> None:
    """Equal but for one rounding to the type, and the roundings of float32 on the way.

    Args:
        sums: the size of what was added up.
    """
    assert found.dtype == dtype
    assert found.shape == expected.shape
    error = (found.double() - expected).abs()
    allowed = expected.abs() * ROUNDING[dtype] + 1.5e-6 * max(1.0, sums)
    assert bool((error <= allowed).all()), f"{float((error - allowed).max())} too much"


def definition_of_lstm(sums: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h, the cell state and the gates after their nonlinearities, from the gates before them."""
    i, f, g, o = sums.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * before + i * g
    return o * after.tanh(), after, torch.cat([i, f, g, o], 1)


@pytest.mark.sampled(5)
@dtypes
@each_size
def test_lstm_forward(size: int, dtype: torch.dtype, use: Use) -> None:
    for number, (rows, added) in enumerate(product(ROWS, [True, False])):
        make = Random(dtype)
        gates, recurrent = make(rows, 4 * size, scale=2.0), make(rows, 4 * size, scale=2.0)
        before = make.full(rows, size)
        sums = (gates.float() + recurrent.float() if added else gates.float()).to(dtype)
        expected_h, expected_after, expected_gates = definition_of_lstm(sums.double(), before.double())
        for level, lay, keep in some_of(number, LEVELS, LAYOUTS.values(), [True, False]):
            use(level)
            given = framed(gates) if added or keep else lay(gates)
            state = framed(before) if keep else lay(before)
            h, after = poison(dtype, rows, size), state if keep else poison(torch.float32, rows, size)
            native.lstm_forward(given, lay(recurrent) if added else None, state, after, h, keep)
            assert_near(h, expected_h, dtype)
            assert_near(after, expected_after, torch.float32)
            assert_frame_untouched(h, after)
            if keep and dtype == torch.float32:
                assert_near(given, expected_gates, torch.float32)
                assert_frame_untouched(given)
            else:
                assert given.equal(sums)


def gradients_of_lstm(sums: Tensor, before: Tensor, dh: Tensor, dc: Tensor) -> Sequence[Tensor]:
    """Those of the gates before their nonlinearities, and of the cell state before, in float64."""
    sums, before = sums.double().requires_grad_(), before.double().requires_grad_()
    h, after, _ = definition_of_lstm(sums, before)
    return torch.autograd.grad([h, after], [sums, before], [dh.double(), dc.double()])


@pytest.mark.sampled(7)
@dtypes
@each_size
def test_lstm_backward(size: int, dtype: torch.dtype, use: Use) -> None:
    for number, (rows, expand) in enumerate(product(ROWS, [True, False])):
        make = Random(dtype)
        sums, before = make(rows, 4 * size, scale=2.0), make.full(rows, size)
        dh, dc = make(rows, size), make.full(rows, size)
        incoming = make(rows, 1).expand(rows, size) if expand else make(rows, size)
        both = dh.double() + incoming.double()
        expected, expected_before = gradients_of_lstm(sums, before, both, dc)
        _, after, gates = definition_of_lstm(sums.double(), before.double())
        gates = gates.float() if dtype == torch.float32 else sums
        for level, lay, in_place in some_of(number, LEVELS, LAYOUTS.values(), [True, False]):
            use(level)
            given = framed(gates) if in_place else lay(gates)
            dgates = given if in_place else poison(dtype, rows, 4 * size)
            states, gradient = (lay(before), lay(after.float())), incoming if expand else lay(incoming)
            dbefore = dc.clone()
            native.lstm_backward(given, *states, lay(dh), gradient, dbefore, dgates)
            assert_near(dgates, expected, dtype, sums=4.0)
            assert_near(dbefore, expected_before, torch.float32, sums=4.0)
            assert_frame_untouched(dgates)


@pytest.mark.sampled(5)
@dtypes
@each_size
def test_steps_of_a_gru(size: int, dtype: torch.dtype, use: Use) -> None:
    for number, (rows, padded) in enumerate(product(ROWS, [True, False])):
        make = Random(dtype)
        read, recurrent = make(rows, 3 * size, scale=2.0), make(rows, 3 * size, scale=2.0)
        before, dh, incoming = make(rows, size), make(rows, size), make(rows, size)
        padding = make.padding(rows, 2)[:, 1].contiguous() if padded else None
        kept = torch.zeros(rows, 1, dtype=torch.bool) if padding is None else padding.unsqueeze(1)
        sums = [part.double().requires_grad_() for part in (read, recurrent, before)]
        after = GRU.forward(sums[0], sums[1], [sums[2]])[0]
        flow = torch.where(kept, 0.0, dh.double() + incoming.double())
        expected = torch.autograd.grad(after, sums, flow)
        dbefore = flow * torch.sigmoid((sums[0] + sums[1])[:, size : 2 * size].detach())
        for level, lay, one in some_of(number, LEVELS, LAYOUTS.values(), [True, False]):
            use(level)
            # Padded rows read nothing.
            given = [lay(part.masked_fill(kept, NAN)) for part in (read, recurrent)]
            step = CellStep(GRU, *given, [framed(before)], (), padding)
            output, state = poison(dtype, rows, size), step.before[0] if one else poison(dtype, rows, size)
            run = econmt_ops.backends.steps_for(read, "c")
            run._step_forward(step, [state], output)
            assert_near(state, torch.where(kept, before.double(), after.detach()), dtype)
            assert_near(output, torch.where(kept, 0.0, after.detach()), dtype)
            one = one and dtype == torch.float32  # else the sum of both gradients would be rounded
            begun = dh + incoming if one else dh
            step, total = step._replace(before=[lay(before)]), framed(begun)
            gradients = StepGradients(*(poison(dtype, rows, 3 * size) for _ in range(2)), ())
            run._step_backward(step, (), [total], None if one else lay(incoming), gradients)
            assert_near(gradients.read, expected[0], dtype, sums=4.0)
            assert_near(gradients.recurrent, expected[1], dtype, sums=4.0)
            assert_near(total, torch.where(kept, begun.double(), dbefore), dtype, sums=4.0)
            assert_frame_untouched(output, total, *gradients[:2])


def test_gates_far_from_zero_are_open_or_shut(level: None) -> None:
    far = torch.tensor([1e4, -1e4, math.inf, -math.inf, 100.0, -100.0]).repeat(50)
    open_or_shut = (far > 0).float()
    before, after = torch.randn(1, 300), torch.empty(1, 300)
    kept, h = far.repeat(4).unsqueeze(0), torch.empty(1, 300)
    native.lstm_forward(kept, None, before, after, h, True)
    i, f, g, o = kept.view(4, 300)
    assert all(gate.equal(open_or_shut) for gate in (i, f, o))
    assert g.equal(2 * open_or_shut - 1)
    assert after[0].equal(open_or_shut * (before[0] + 1))
    assert h[0][far < 0].equal(torch.zeros(150))
    output, zero = torch.empty(1, 300), torch.zeros(1, 1)
    native.combine_forward(far.unsqueeze(0), zero, torch.zeros(1, 1, 300), output)
    assert output[0].equal(2 * open_or_shut - 1)


def definition_of_attention(query: Tensor, keys: Tensor, score: Tensor, padding: Tensor | None) -> Tensor:
    """The weights, row by row and over the positions that a row has."""
    rows = []
    for b in range(len(keys)):
        there = torch.ones(keys.shape[1], dtype=torch.bool) if padding is None else ~padding[b]
        scores = torch.tanh(query[b] + keys[b, there]) @ score
        rows.append(keys.new_zeros(keys.shape[1]).masked_scatter(there, torch.softmax(scores, 0)))
    return torch.stack(rows)


def backward_of_attention(query: Tensor, keys: Tensor, *others: Tensor | None) -> None:
    names = ("score", "padding", "weights", "dweights", "dkeys", "dscore", "dquery")
    sizes = dict(zip(("rows", "positions", "size"), keys.shape, strict=True))
    tensors = dict(zip(names, others, strict=True))
    native.call("attention_backward", keys.numel(), **sizes, query=query, keys=keys, **tensors)


def for_attention(
    make: Random, rows: int, positions: int, size: int, padded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """A query, keys that are NaN where there is padding, the score and the padding."""
    padding = make.padding(rows, positions) if padded else None
    keys = make(rows, positions, size)
    if padding is not None:
        keys[padding] = NAN
    return make(rows, size), keys, make.full(size, scale=2.0 / math.sqrt(size)), padding


@pytest.mark.sampled(6)
@dtypes
@each_size
def test_attention_forward(size: int, dtype: torch.dtype, use: Use) -> None:
    for number, (rows, positions, padded) in enumerate(product(ROWS, POSITIONS, [True, False])):
        query, keys, score, padding = for_attention(Random(dtype), rows, positions, size, padded)
        expected = definition_of_attention(query.double(), keys.double(), score.double(), padding)
        for level, lay in some_of(number, LEVELS, LAYOUTS.values()):
            use(level)
            scattered = scatter_strides(score) if lay is columns else score
            turned = columns(padding) if padding is not None and lay is columns else padding
            weights = native.attention_forward(lay(query), keys, scattered, turned)
            assert_near(weights, expected, torch.float32)
            if padding is not None:
                assert weights[padding].equal(torch.zeros(int(padding.sum())))


@each_size
def test_attention_with_layer_normalization(size: int, use: Use) -> None:
    make = Random(torch.float32)
    for rows, positions in product(ROWS, POSITIONS):
        query, keys, score, padding = for_attention(make, rows, positions, size, padded=True)
        gain, shift = make.full(size), make.full(size)
        keys = keys + 3.0
        expected = torch.zeros(rows, positions, dtype=torch.float64)
        for row, place in (~padding).nonzero().tolist():
            total = (query[row] + keys[row, place]).double()
            norm = (size,), gain.double(), shift.double(), LAYER_NORM_EPSILON
            normal = torch.nn.functional.layer_norm(total, *norm)
            expected[row, place] = normal.tanh() @ score.double()
        expected = expected.masked_fill(padding, -math.inf).softmax(1).nan_to_num(0.0)
        for _ in map(use, LEVELS):
            weights = keys.new_empty(rows, positions)
            sizes = {"rows": rows, "positions": positions, "size": size}
            tensors = {"query": query, "keys": keys, "score": score, "padding": padding, "weights": weights}
            native.call("attention_forward", keys.numel(), **sizes, **tensors, gain=gain, shift=shift)
            torch.testing.assert_close(weights.double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.sampled(3)
@dtypes
@each_size
def test_attention_backward(size: int, dtype: torch.dtype, use: Use) -> None:
    for number, (rows, positions, padded) in enumerate(product(ROWS, POSITIONS, [True, False])):
        make = Random(dtype)
        query, keys, score, padding = for_attention(make, rows, positions, size, padded)
        leaves = [tensor.double().requires_grad_() for tensor in (query, keys, score)]
        weights, dweights = definition_of_attention(*leaves, padding), make.full(rows, positions)
        expected = torch.autograd.grad(weights, leaves, dweights.double())
        there = torch.ones(rows, positions, dtype=torch.bool) if padding is None else ~padding
        weights, dweights = weights.detach().float(), dweights.masked_fill(~there, NAN)
        for level, lay in some_of(number, LEVELS, LAYOUTS.values()):
            use(level)
            scattered = scatter_strides(score) if lay is columns else score
            dkeys, dscore = torch.full((rows, positions, size), 7.0), torch.full((size,), 5.0)
            dquery = poison(dtype, rows, size)
            given = lay(query), keys, scattered, padding, lay(weights), lay(dweights)
            backward_of_attention(*given, dkeys, dscore, dquery)
            assert_near(dquery, expected[0], dtype)
            assert_frame_untouched(dquery)
            found = (dkeys.double() - 7.0) * (4.0 * score.double())
            largest = float(score.abs().max())
            assert_near(found[there].float(), expected[1][there], torch.float32, sums=4 * largest)
            assert bool((dkeys[~there] == 7.0).all())
            assert_near(dscore, expected[2] + 5.0, torch.float32, sums=5.0 + math.sqrt(rows))


@dtypes
@each_size
def test_combine_forward(size: int, dtype: torch.dtype, use: Use) -> None:
    for number, (rows, positions) in enumerate(product(ROWS, POSITIONS)):
        make = Random(dtype)
        share, projected = make(rows, size), make(rows, positions, size)
        attention = torch.softmax(make.full(rows, positions), 1).to(dtype)
        total = share.double()
        for s in range(positions):
            total = total + attention[:, s : s + 1].double() * projected[:, s].double()
        for level, lay in some_of(number, LEVELS, LAYOUTS.values()):
            use(level)
            output = poison(dtype, rows, size)
            native.combine_forward(lay(share), lay(attention), projected, output)
            assert_near(output, total.tanh(), dtype)
            assert_frame_untouched(output)


@pytest.mark.sampled(6)
@dtypes
@each_size
def test_weight_gradient(size: int, dtype: torch.dtype, use: Use) -> None:
    every = product(ROWS, POSITIONS, [True, False], [True, False])
    for number, (rows, positions, padded, expand) in enumerate(every):
        make = Random(dtype)
        values, incoming = make(rows, positions, size), make(rows, positions)
        dcontext = make(rows, 1).expand(rows, size) if expand else make(rows, size)
        products = (values.double() * dcontext.double().unsqueeze(1)).sum(2)
        padding = make.padding(rows, positions) if padded else torch.zeros(rows, positions, dtype=torch.bool)
        values[padding], incoming[padding] = NAN, NAN
        for level, lay, more in some_of(number, LEVELS, LAYOUTS.values(), [True, False]):
            use(level)
            expected = (products + incoming.double() if more else products).masked_fill(padding, 0.0)
            laid = values.transpose(1, 2).contiguous().transpose(1, 2) if lay is columns else values
            laid = values.transpose(0, 1).contiguous().transpose(0, 1) if lay is framed else laid
            flow, added = dcontext if expand else lay(dcontext), lay(incoming) if more else None
            where = lay(padding) if padded and lay is not framed else padding if padded else None
            dweights = native.weight_gradient(laid, flow, added, where)
            assert_near(dweights, expected, torch.float32, sums=4.0 * math.sqrt(size))
            assert dweights[padding].equal(torch.zeros(int(padding.sum())))


@dtypes
@each_size
def test_losses(size: int, dtype: torch.dtype, use: Use) -> None:
    for rows, smoothing, weighted in product(ROWS, [0.0, 0.1, 1.0], [True, False]):
        make = Random(dtype)
        logits, factors = make(rows, size, scale=4.0), make.full(rows)
        targets = torch.randint(0, size, (rows,), generator=make.generator)
        leaf = logits.double().requires_grad_()
        logs = torch.log_softmax(leaf, 1)
        expected = -(1 - smoothing) * logs[torch.arange(rows), targets] - smoothing * logs.mean(1)
        weights = factors.double() if weighted else torch.ones(rows, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(expected, leaf, weights)
        factors, targets = (torch.stack([x, x], 1)[:, 1] for x in (factors, targets))
        for _ in map(use, LEVELS):
            given, dbias = framed(logits), torch.full((size,), 3.0)
            found = native.losses(given, targets, smoothing, factors if weighted else None, True, dbias)
            assert_near(found, expected.detach(), torch.float32, sums=16.0)
            assert_near(given, gradient, dtype)
            assert_frame_untouched(given)
            assert_near(dbias, gradient.sum(0) + 3.0, torch.float32, sums=3.0 + math.sqrt(rows))
            given = framed(logits)
            assert native.losses(given, targets, smoothing, None, False, None).equal(found)
            assert given.equal(logits)


@pytest.mark.parametrize("target", [-1, 7, -100, 2**40])
def test_losses_take_no_target_out_of_range(target: int, level: None) -> None:
    logits, dbias = torch.randn(3, 7), torch.zeros(7)
    given = logits.clone()
    with pytest.raises(IndexError, match="losses: index out of range"):
        native.losses(given, torch.tensor([0, target, 6]), 0.1, None, True, dbias)
    assert given.equal(logits)
    assert not dbias.any()


@dtypes
@each_size
def test_add_rows(size: int, dtype: torch.dtype, use: Use) -> None:
    for number, rows in enumerate(ROWS * 2):
        make = Random(dtype)
        values, vector, table = make(rows, size), make.full(size), make.full(4, size)
        places = torch.randint(0, 4, (2, rows), generator=make.generator).t()[:, 1]
        expected, expected_vector = table.double(), vector.double()
        for row, place in enumerate(places.tolist()):
            expected[place] += values[row].double()
            expected_vector += values[row].double()
        for level, lay in some_of(number, LEVELS, LAYOUTS.values()):
            use(level)
            given, total = framed(table), vector.clone()
            native.add_rows(given, lay(values), places)
            assert_near(given, expected, torch.float32, sums=math.sqrt(rows))
            assert_frame_untouched(given)
            native.add_rows(total, lay(values))
            assert_near(total, expected_vector, torch.float32, sums=math.sqrt(rows))


def bits_of(values: Tensor) -> Tensor:
    """The bits of bfloat16 values, with one pattern for all NaN."""
    return values.masked_fill(values.isnan(), NAN).view(torch.int16)


def test_bfloat16_is_rounded_to_nearest_even(level: None) -> None:
    generator = torch.Generator().manual_seed(3)
    any_bits = torch.randint(-(2**15), 2**15, (2, 4 * 20000), generator=generator).short()
    # The last bits of these sums lie at, just above and just below the middle of two numbers.
    near = any_bits.clone()
    near[1] = (near[0].int() - torch.randint(6 * 128, 10 * 128, near[0].shape, generator=generator)).short()
    near[1, ::3] &= ~127
    first, second = torch.cat([any_bits, near], 1).view(torch.bfloat16).reshape(2, 40, -1)
    exact = first.float() + second.float()
    expected = exact.to(torch.bfloat16)
    ties = (exact.view(torch.int32) & 0xFFFF) == 0x8000
    assert int(ties.sum()) > 1000
    assert bool((expected.isinf() & exact.isfinite()).any())
    assert bool(expected.isnan().any())
    gates, hidden = first.clone(), first.shape[1] // 4
    h, after = torch.empty(40, hidden, dtype=torch.bfloat16), torch.empty(40, hidden)
    native.lstm_forward(gates, second.contiguous(), torch.zeros(40, hidden), after, h, False)
    assert bits_of(gates).equal(bits_of(expected))


def test_a_nan_of_any_bits_is_one_in_bfloat16(level: None) -> None:
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    logits = torch.zeros(4, 20, dtype=torch.bfloat16)
    native.losses(logits, torch.zeros(4).long(), 0.1, bits.view(torch.float32), True, None)
    assert bool(logits.isnan().all())


@dtypes
def test_large_scores_and_logits_do_not_overflow(dtype: torch.dtype, level: None) -> None:
    make = Random(dtype)
    query, keys, _, padding = for_attention(make, 5, 9, 20, True)
    for sign in (-100.0, 100.0):
        score = sign * make.full(20).abs()
        expected = definition_of_attention(query.double(), keys.double(), score.double(), padding)
        found = native.attention_forward(query, keys, score, padding)
        assert_near(found, expected, torch.float32, sums=1000.0)
        logits, targets = make(5, 20, scale=20.0) + 5 * sign, torch.arange(5)
        logs = torch.log_softmax(logits.double(), 1)
        losses = native.losses(logits, targets, 0.0, None, False, None)
        assert_near(losses, -logs[targets, targets], torch.float32, sums=1000.0)


@dtypes
def test_nan_reaches_what_it_concerns_and_nothing_else(dtype: torch.dtype, level: None) -> None:
    make = Random(dtype)
    for quarter in range(4):
        gates, before = make(3, 4 * 20), make.full(3, 20)
        gates[1, quarter * 20 + 7] = NAN
        h, after = make(3, 20), make.full(3, 20)
        native.lstm_forward(gates, None, before, after, h, True)
        assert h.isnan().nonzero().tolist() == [[1, 7]]
        assert after.isnan().nonzero().tolist() == ([] if quarter == 3 else [[1, 7]])
        assert gates.isnan().nonzero().tolist() == [[1, quarter * 20 + 7]]
        dgates = make(3, 80)
        zero, none = make.full(3, 20, scale=0.0), make(3, 20, scale=0.0)
        dbefore = zero.clone()
        native.lstm_backward(gates, before, zero, make(3, 20), none, dbefore, dgates)
        assert dgates.isnan().nonzero()[:, 0].unique().tolist() == [1]
        assert dgates.isnan().nonzero()[:, 1].remainder(20).unique().tolist() == [7]
        assert dbefore.isnan().nonzero().tolist() == ([] if quarter in (0, 2) else [[1, 7]])
    padding = make.padding(3, 5)
    query, keys, score = make(3, 20), make(3, 5, 20), make.full(20)
    keys[2, 3, 4] = NAN
    weights = native.attention_forward(query, keys, score, padding)
    for some in (weights.isnan().all(1), weights.isnan().any(1)):
        assert some.tolist() == [False, False, True]
    projected, output = make(3, 5, 20), make(3, 20)
    projected[1, 2, 9] = NAN
    native.combine_forward(make(3, 20), make(3, 5), projected, output)
    assert output.isnan().nonzero().tolist() == [[1, 9]]
    dweights = native.weight_gradient(projected, make(3, 20), None, None)
    assert dweights.isnan().nonzero().tolist() == [[1, 2]]
    logits, dbias = make(3, 20), torch.zeros(20)
    logits[1, 19] = NAN
    losses = native.losses(logits, torch.tensor([1, 2, 3]), 0.1, None, True, dbias)
    for some in (losses.isnan(), logits.isnan().all(1), logits.isnan().any(1)):
        assert some.tolist() == [False, True, False]
    assert bool(dbias.isnan().all())


def everything(dtype: torch.dtype, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """What every kernel makes of random arguments: row by row, and sums over the rows."""
    make, size, positions = Random(dtype), 77, 4
    h, after = make(rows, size), make.full(rows, size)
    gates, before = make(rows, 4 * size), make.full(rows, size)
    native.lstm_forward(gates, make(rows, 4 * size), before, after, h, True)
    dgates = make(rows, 4 * size)
    incoming, dh, dbefore = make(rows, size), make(rows, size), make.full(rows, size)
    native.lstm_backward(gates, before, after, dh, incoming, dbefore, dgates)
    query, keys, score, padding = for_attention(make, rows, positions, size, True)
    weights = native.attention_forward(query, keys, score, padding)
    dweights = native.weight_gradient(keys, h, None, padding)
    dkeys, dscore, dquery = torch.zeros(rows, positions, size), torch.zeros(size), make(rows, size)
    backward_of_attention(query, keys, score, padding, weights, dweights, dkeys, dscore, dquery)
    output, logits, dbias = make(rows, size), make(rows, size), torch.zeros(size)
    native.combine_forward(h, weights.to(dtype), make(rows, positions, size), output)
    targets = torch.arange(rows) % size
    losses = native.losses(logits, targets, 0.1, None, True, dbias)
    total, table = torch.zeros(size), torch.zeros(rows, size)
    native.add_rows(total, h)
    native.add_rows(table, h, targets // 2)
    by_row = [gates, h, after, dgates, dbefore, weights, dweights, dkeys, dquery, output, losses, logits]
    return [*by_row, total, table], [dscore, dbias]


@dtypes
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_threads_gives_the_same(
    rows: int, dtype: torch.dtype, level: None, threads: Use
) -> None:
    threads(1)
    expected, expected_sums = everything(dtype, rows)
    for count in (2, 3):
        threads(count)
        found, sums = everything(dtype, rows)
        for number, (left, right) in enumerate(zip(found, expected, strict=True)):
            assert left.equal(right), number
        assert_close(sums, expected_sums, 1e-6)


def test_threads_are_given_only_what_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    used = native._library()

    def losses(structure: Any, threads: int) -> int:
        asked.append(threads)
        return 0

    monkeypatch.setitem(used.functions, "losses", losses)
    torch.set_num_threads(2)
    for rows in (1, 200):
        native.losses(torch.zeros(rows, 100), torch.zeros(rows).long(), 0.0, None, False, None)
    assert asked == [1, 2]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_defaults_of_the_process_do_not_matter(default: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = everything(torch.float32, 3)
    real = [native.attention_forward, native.weight_gradient, native.losses]

    def under(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            with defaults(default, "meta"):
                return function(*arguments)

        return call

    for function in real:
        monkeypatch.setattr(native, function.__name__, under(function))
    found = everything(torch.float32, 3)
    for left, right in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert left.equal(right)


def test_serves_only_what_the_kernels_can_do() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        assert native.serves(torch.empty(1, dtype=dtype)) == (dtype in ROUNDING)
    assert not native.serves(torch.empty(1, device="meta"))
    like = torch.empty(1)
    with TorchDispatchMode():
        assert not native.serves(like)


def test_a_library_of_another_version_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    load: Callable[[], object] = native._library.__wrapped__
    assert load() is not None
    monkeypatch.setattr(loading, "_VERSION", loading._VERSION + 1)
    with pytest.raises(ImportError, match="was built from sources of another version"):
        loading.Library(PATH)
    with pytest.warns(RuntimeWarning, match="was built from sources of another version; reinstall econmt"):
        assert load() is None


def test_a_library_with_other_structures_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = loading._HEADER.read_text(encoding="utf-8")
    monkeypatch.setattr(loading, "_HEADER", tmp_path / "kernels.h")
    more = text.replace("int64_t gradient; ", "int64_t gradient, more; ", 1)
    loading._HEADER.write_text(more, encoding="utf-8")
    assert "more" in dict(loading.structures()["losses"].kind._fields_)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="was built from sources of another version"):
        loading.Library(PATH)
    loading._HEADER.unlink()
    with pytest.raises(OSError, match="kernels"):
        loading.Library(PATH)


def test_what_is_no_library_or_lacks_a_structure_is_not_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = loading.structures()
    for name in found:
        more = {**found, f"{name}_twice": found[name]}
        monkeypatch.setattr(loading, "structures", lambda more=more: more)
        with pytest.raises(ImportError, match="was built from sources of another version"):
            loading.Library(PATH)
    load: Callable[[], object] = native._library.__wrapped__
    name = PATH.name
    monkeypatch.setattr(native, "_PATH", None)
    assert load() is None
    monkeypatch.setattr(native, "_PATH", tmp_path / name)
    (tmp_path / name).write_text("no library")
    with pytest.warns(RuntimeWarning, match="reinstall econmt"):
        assert load() is None


def test_a_structure_says_what_a_kernel_may_be_given() -> None:
    fields = loading.structures()["lstm_forward"].tensors
    assert fields["before"] == loading.TensorField((torch.float32,), False, False, ("before_stride",))
    assert fields["h"].is_written
    assert fields["h"].is_value
    columns = torch.ones(3, 4).t()
    assert fields["before"].in_layout(columns).equal(columns)
    assert fields["before"].in_layout(columns).is_contiguous()
    for tensor in (columns, torch.ones(3, 4, dtype=torch.float64)):
        with pytest.raises(AssertionError):
            fields["h"].in_layout(tensor)


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each kernel is called from now on."""
    counts = dict.fromkeys(loading.structures(), 0)
    real = native.call

    def call(name: str, *arguments: Any, **given: Any) -> None:
        counts[name] += 1
        real(name, *arguments, **given)

    monkeypatch.setattr(native, "call", call)
    return counts


OPS = {
    "additive_attention": {"attention_forward", "attention_backward"},
    "attentional_lstm": {
        *("lstm_forward", "lstm_backward", "attention_forward", "combine_forward"),
        *("attention_backward", "weight_gradient"),
    },
    "gru": {"gru_cell_forward", "gru_cell_backward"},
    "linear_cross_entropy": {"losses"},
    "lstm": {"lstm_backward"},
}
"""Kernels that an op calls at least; in float32 the forward pass of an LSTM may be torch's."""


@dtypes
@pytest.mark.parametrize("op", OPS)
def test_ops_call_the_kernels(op: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they compute is compared in test_definitions.py, with and without the library."""
    function, arguments, _ = calls("cpu", dtype)[op]
    arguments = {**arguments, **({"layer_norm": None} if op == "additive_attention" else {})}
    fixed = {name: arguments.pop(name) for name in ("targets", "lengths") if name in arguments}
    counts = counted(monkeypatch)
    values_and_gradients(lambda **given: function(**given, **fixed, implementation="recompute"), arguments)
    assert {name for name, count in counts.items() if count} >= OPS[op]


@dtypes
def test_repeated_rows_are_added_alike(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Random(dtype)
    values, places = make(2, 3, 5), torch.tensor([[0, 3, 0], [1, 0, 3]])
    with native.without():
        expected = torch.zeros(4, 5)
        add_repeated(expected, places, values)
    counts = counted(monkeypatch)
    found = torch.zeros(4, 5)
    add_repeated(found, places, values)
    assert counts["add_rows"] == 1
    assert_close([found], [expected], 1e-6)


@pytest.mark.parametrize("length", [-1, 1 << 40])
def test_lengths_of_a_recurrence_out_of_range_within_torch_compile(length: int) -> None:
    """torch.compile cannot ask for values; the C kernel, which writes by them, does."""
    torch.compiler.reset()
    compiled = torch.compile(econmt_ops.linear_recurrence, fullgraph=True, backend="aot_eager")
    tensors, lengths = (torch.ones(2, 3, 1), torch.ones(2, 3, 1)), torch.tensor([3, 2])
    assert compiled(*tensors, lengths=lengths, implementation="c")[:, :, 0].tolist() == [[1, 2, 3], [1, 2, 0]]
    with pytest.raises(ValueError, match=f"lengths must be from 0 to 3, got {length}"):
        compiled(*tensors, lengths=torch.tensor([3, length]), implementation="c")
