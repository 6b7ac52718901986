"""The ops of all cells but the LSTM: one set of rules, and a naive definition of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import econmt_ops
from econmt_ops import (
    GateWeights,
    GILRLSTMWeights,
    GRUWeights,
    LayerNormLSTMWeights,
    LayerNormPerGateLSTMWeights,
)
from econmt_ops.backends import c as native
from econmt_ops.layers.op import OPS
from econmt_ops.products.dropout import derive_seed
from tests.ops.helpers import (
    Make,
    assert_close,
    assert_gradcheck,
    assert_same_function,
    naive_normalise,
    padded_part,
    poisoned,
    scatter_strides,
    values_and_gradients,
)

State = tuple[Tensor, ...]


def _sru(x: Tensor, w: GateWeights, state: State) -> tuple[Tensor, State]:
    h = state[0].shape[0]
    u, f, r, *view = (w.input @ x + w.bias).split(h)
    c = f.sigmoid() * state[0] + (1 - f.sigmoid()) * u
    return r.sigmoid() * c.tanh() + (1 - r.sigmoid()) * (view[0] if view else x), (c,)


def _ssru(x: Tensor, w: GateWeights, state: State) -> tuple[Tensor, State]:
    u, f = (w.input @ x + w.bias).chunk(2)
    c = f.sigmoid() * state[0] + (1 - f.sigmoid()) * u
    return c.clamp(min=0), (c,)


def _qrnn(x: Tensor, w: GateWeights, state: State) -> tuple[Tensor, State]:
    read = x if len(state) == 1 else torch.cat([x, state[1]])
    z, f, o = (w.input @ read + w.bias).chunk(3)
    c = f.sigmoid() * state[0] + (1 - f.sigmoid()) * z.tanh()
    return o.sigmoid() * c, (c, x)[: len(state)]


def _min_gru(x: Tensor, w: GateWeights, state: State) -> tuple[Tensor, State]:
    u, f = (w.input @ x + w.bias).chunk(2)
    h = f.sigmoid() * state[0] + (1 - f.sigmoid()) * u
    return h, (h,)


def _min_lstm(x: Tensor, w: GateWeights, state: State) -> tuple[Tensor, State]:
    u, f, i = (w.input @ x + w.bias).chunk(3)
    f, i = f.sigmoid(), i.sigmoid()
    h = f / (f + i) * state[0] + i / (f + i) * u
    return h, (h,)


def _gilr_lstm(x: Tensor, w: GILRLSTMWeights, state: State) -> tuple[Tensor, State]:
    s, c = state
    j, g = (w.surrogate @ x + w.surrogate_bias).chunk(2)
    z, f, i, o = (w.input @ x + w.hidden @ s + w.bias).chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * z.tanh()
    return o.sigmoid() * c, (g.sigmoid() * s + (1 - g.sigmoid()) * j.tanh(), c)


def _gru(x: Tensor, w: GRUWeights, state: State) -> tuple[Tensor, State]:
    a, b, c = (w.input @ x + w.bias).chunk(3)
    d, e, f = (w.hidden @ state[0] + w.hidden_bias).chunk(3)
    r, z = (a + d).sigmoid(), (b + e).sigmoid()
    h = (1 - z) * (c + r * f).tanh() + z * state[0]
    return h, (h,)


def _normal(values: Tensor) -> Tensor:
    return naive_normalise(values, torch.ones_like(values), torch.zeros_like(values))


def _lnlstm(x: Tensor, w: Any, state: State) -> tuple[Tensor, State]:
    if isinstance(w, LayerNormLSTMWeights):
        sums = _normal(w.input @ x) * w.input_gain + _normal(w.hidden @ state[0]) * w.hidden_gain + w.bias
    else:
        raw = w.input @ x + w.hidden @ state[0] + w.bias
        sums = torch.cat([_normal(part) for part in raw.chunk(4)]) * w.gain + w.shift
    i, f, g, o = sums.chunk(4)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * naive_normalise(c, w.cell_gain, w.cell_bias).tanh()
    return h, (h, c)


class Case(NamedTuple):
    """An op, one step of a row, the shapes of a layer's weights for I and H, and the widths of its states."""

    op: Any
    step: Callable[[Tensor, Any, State], tuple[Tensor, State]]
    weights: Any
    shapes: Callable[[int, int], tuple[tuple[int, ...], ...]]
    states: Callable[[int, int], tuple[int, ...]] = lambda _, h: (h,)


def _gates(count: int, window: int = 1) -> Callable[[int, int], tuple[tuple[int, ...], ...]]:
    return lambda i, h: ((count * h, window * i), (count * h,))


def _of_sru(i: int, h: int) -> tuple[tuple[int, ...], ...]:
    return _gates(3 if i == h else 4)(i, h)


CASES = {
    "sru": Case(econmt_ops.sru, _sru, GateWeights, _of_sru),
    "ssru": Case(econmt_ops.ssru, _ssru, GateWeights, _gates(2)),
    "qrnn": Case(econmt_ops.qrnn, _qrnn, GateWeights, _gates(3)),
    "qrnn-2": Case(econmt_ops.qrnn, _qrnn, GateWeights, _gates(3, 2), lambda i, h: (h, i)),
    "min_gru": Case(econmt_ops.min_gru, _min_gru, GateWeights, _gates(2)),
    "min_lstm": Case(econmt_ops.min_lstm, _min_lstm, GateWeights, _gates(3)),
    "gilr_lstm": Case(
        econmt_ops.gilr_lstm,
        _gilr_lstm,
        GILRLSTMWeights,
        lambda i, h: ((2 * h, i), (2 * h,), (4 * h, i), (4 * h, h), (4 * h,)),
        lambda _, h: (h, h),
    ),
    "gru": Case(econmt_ops.gru, _gru, GRUWeights, lambda i, h: ((3 * h, i), (3 * h, h), (3 * h,), (3 * h,))),
    "lnlstm": Case(
        econmt_ops.lnlstm,
        _lnlstm,
        LayerNormLSTMWeights,
        lambda i, h: ((4 * h, i), (4 * h, h), *[(4 * h,)] * 3, *[(h,)] * 2),
        lambda _, h: (h, h),
    ),
    "lnlstm-per-gate": Case(
        econmt_ops.lnlstm,
        _lnlstm,
        LayerNormPerGateLSTMWeights,
        lambda i, h: ((4 * h, i), (4 * h, h), *[(4 * h,)] * 3, *[(h,)] * 2),
        lambda _, h: (h, h),
    ),
}
SCANS = [name for name in CASES if name not in ("gru", "lnlstm", "lnlstm-per-gate")]
each_case = pytest.mark.parametrize("name", list(CASES))
each_way = pytest.mark.parametrize("implementation", ["reference", "recompute"])
RAGGED = {"lengths": torch.tensor([4, 1, 0, 3])}


def arguments(
    case: Case, make: Make, batch: int = 4, steps: int = 4, size: int = 3, hidden: int = 5, count: int = 2
) -> dict[str, Any]:
    widths = [(size if k == 0 else hidden, hidden) for k in range(count)]
    return {
        "inputs": make(batch, steps, size),
        "layers": tuple(
            case.weights(*(make(*shape, scale=0.6) for shape in case.shapes(*width))) for width in widths
        ),
        "state": tuple(tuple(make(batch, each) for each in case.states(*width)) for width in widths),
    }


def naive(case: Case, masks: Sequence[Tensor | None] = (), **options: Any) -> Callable[..., Any]:
    """The definition, row by row and step by step, over exactly the positions that a row has."""
    lengths, reverse = options.get("lengths"), options.get("reverse", False)

    def function(inputs: Tensor, layers: Sequence[Any], state: Sequence[State]) -> Any:
        batch, steps, _ = inputs.shape
        rows, lasts = [], []
        for b in range(batch):
            length = steps if lengths is None else int(lengths[b])
            last = [tuple(part[b] for part in parts) for parts in state]
            row = [inputs.new_zeros(state[-1][0].shape[1])] * steps
            for t in range(length - 1, -1, -1) if reverse else range(length):
                x = inputs[b, t]
                for k, weights in enumerate(layers):
                    if k > 0 and masks:
                        x = x * masks[k][b, t if masks[k].shape[1] > 1 else 0]  # type: ignore[index]
                    h, last[k] = case.step(x, weights, last[k])
                    x = h + x if options.get("residual") and k > 0 else h
                row[t] = x
            rows.append(torch.stack(row))
            lasts.append(last)
        states = tuple(
            tuple(torch.stack([last[k][n] for last in lasts]) for n in range(len(state[k])))
            for k in range(len(layers))
        )
        return torch.stack(rows), states

    return function


@each_case
@each_way
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("lengths", [None, RAGGED["lengths"]], ids=["full", "ragged"])
def test_equals_definition(name: str, implementation: str, reverse: bool, lengths: Tensor | None) -> None:
    case = CASES[name]
    options = {"lengths": lengths, "reverse": reverse, "residual": True}

    def function(**tensors: Any) -> Any:
        return case.op(**tensors, **options, implementation=implementation)

    assert_same_function(function, naive(case, **options), arguments(case, Make("cpu")))


@each_case
@each_way
@pytest.mark.parametrize(
    "size", [(1, 1, 1, 1, 1), (2, 3, 4, 4, 1), (1, 7, 2, 1, 2)], ids=["tiny", "as-wide", "one-row"]
)
def test_odd_sizes(name: str, implementation: str, size: tuple[int, ...]) -> None:
    case = CASES[name]

    def function(**tensors: Any) -> Any:
        return case.op(**tensors, implementation=implementation)

    assert_same_function(function, naive(case), arguments(case, Make("cpu"), *size))


@pytest.mark.sampled(5)
@each_case
def test_gradcheck(name: str) -> None:
    case = CASES[name]

    def function(**tensors: Any) -> Any:
        return case.op(**tensors, lengths=torch.tensor([3, 1]), implementation="recompute")

    assert_gradcheck(function, arguments(case, Make("cpu"), 2, 3, 2, 2, 1))


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize(
    ("lengths", "block", "stash"),
    [
        (None, 64, "outputs"),
        (torch.tensor([7, 0, 3]), 64, "gates"),
        (None, 2_000, "gates"),
        (torch.tensor([7, 0, 3]), 2_000, "outputs"),
    ],
    ids=["steps", "steps-ragged-gates", "rows-gates", "rows-ragged"],
)
def test_blocks_change_nothing(
    name: str, lengths: Tensor | None, block: int, stash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("econmt_ops.layers.scanned._BLOCK_BYTES", block)
    case = CASES[name]

    def function(**tensors: Any) -> Any:
        return case.op(**tensors, lengths=lengths, stash=stash, implementation="recompute")

    given = arguments(case, Make("cpu"), 3, 7, 2, 3, 1)
    assert_same_function(function, naive(case, lengths=lengths), given)


@pytest.mark.parametrize("name", ["gru", "lnlstm", "lnlstm-per-gate"])
def test_blocks_of_steps_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("econmt_ops.core.chunks._BLOCK_BYTES", 3 * 3 * 4 * 5 * 8)  # of three steps

    def function(**tensors: Any) -> Any:
        return CASES[name].op(**tensors, lengths=lengths, implementation="recompute")

    lengths = torch.tensor([7, 0, 4])
    given = arguments(CASES[name], Make("cpu"), 3, 7, 2, 5, 1)
    assert_same_function(function, naive(CASES[name], lengths=lengths), given)


@each_case
@each_way
@pytest.mark.parametrize("variational", [False, True])
def test_dropout_belongs_to_positions(name: str, implementation: str, variational: bool) -> None:
    case = CASES[name]
    options = {"lengths": RAGGED["lengths"], "reverse": True}
    shape = (4, 1 if variational else 4, 5)
    mask = econmt_ops.dropout_mask(shape, 0.4, derive_seed(9, 1), torch.device("cpu"), torch.float64)

    def function(**tensors: Any) -> Any:
        return case.op(
            **tensors,
            **options,
            dropout=0.4,
            dropout_seed=9,
            variational=variational,
            implementation=implementation,
        )

    assert_same_function(function, naive(case, [None, mask], **options), arguments(case, Make("cpu")))


@each_case
@each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_precisions(name: str, implementation: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    options = {"lengths": torch.tensor([4, 1])}

    def function(**tensors: Any) -> Any:
        outputs, state = case.op(**tensors, **options, implementation=implementation)
        assert outputs.dtype == dtype
        assert {part.dtype for parts in state for part in parts} <= {dtype, torch.float32}
        return outputs, state

    # A seed for which no c is so near to 0 that max(c, 0) bends elsewhere after rounding.
    given = arguments(case, Make("cpu", seed=3), 2, 4, 4, 6, 2)
    assert_same_function(function, naive(case, **options), given, dtype)


@each_case
@each_way
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_padding_has_no_influence(name: str, implementation: str, reverse: bool) -> None:
    case, options = CASES[name], {**RAGGED, "reverse": reverse, "implementation": implementation}
    given = arguments(case, Make("cpu"))
    expected = values_and_gradients(lambda **tensors: case.op(**tensors, **options), given)
    given["inputs"] = poisoned(given["inputs"], RAGGED["lengths"])
    inputs = given["inputs"].requires_grad_()
    outputs, state = case.op(**given, **options)
    assert not padded_part(outputs, RAGGED["lengths"]).any()
    assert_close([outputs, *(part for parts in state for part in parts)], expected[0], 1e-14)
    # Nor have gradients of outputs that are always zero.
    marks = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(x.shape, generator=marks, dtype=x.dtype) for x in expected[0]]
    cotangents[0] = poisoned(cotangents[0], RAGGED["lengths"], float("inf"))
    flat = [outputs, *(part for parts in state for part in parts)]
    pairs = [(x, y) for x, y in zip(flat, cotangents, strict=True) if x.requires_grad]
    (found,) = torch.autograd.grad([x for x, _ in pairs], [inputs], [y for _, y in pairs])
    assert_close([found], expected[1][:1], 1e-14)


@each_case
@each_way
def test_state_goes_on_and_memory_may_lie_anyhow(name: str, implementation: str) -> None:
    case = CASES[name]
    given = scatter_strides(arguments(case, Make("cpu")))
    whole, last = case.op(**given, implementation=implementation)
    inputs, state, parts = given["inputs"], given["state"], []
    for begin, end in ((0, 1), (1, 4)):
        part, state = case.op(
            inputs[:, begin:end], given["layers"], state=state, implementation=implementation
        )
        parts.append(part)
    assert_close([torch.cat(parts, 1)], [whole], 1e-12)
    for actual, expected in zip(state, last, strict=True):
        assert_close(actual, expected, 1e-12)
    zeros = tuple(tuple(torch.zeros_like(part) for part in parts) for parts in given["state"])
    assert_close(
        [case.op(inputs, given["layers"], implementation=implementation)[0]],
        [case.op(inputs, given["layers"], state=zeros, implementation=implementation)[0]],
        0.0,
    )


@pytest.mark.parametrize("name", SCANS)
def test_stash_keeps_inputs_and_states_alone(name: str) -> None:
    case = CASES[name]
    given = arguments(case, Make("cpu", torch.float32), 4, 50, 16, 16, 1)
    given["inputs"].requires_grad_()
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        case.op(**given, implementation="recompute", stash="outputs")
    unit = 4 * 50 * 16 * 4
    weights = sum(part.numel() * 4 for layer in given["layers"] for part in layer)
    # The inputs and c; of a GILR-LSTM its surrogate too, which is kept as what is read and as a state.
    most = 4 if name == "gilr_lstm" else 2
    assert sum(kept.values()) <= most * unit + weights + 4 * 16 * 4 * 4


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gru", "lnlstm"])
def test_compiled_steps_equal_the_others(name: str) -> None:
    given = arguments(CASES[name], Make("cpu", torch.float32), 3, 4, 3, 8, 1)

    def found(way: str) -> tuple[list[Tensor], list[Tensor]]:
        def function(**tensors: Any) -> Any:
            return CASES[name].op(**tensors, lengths=torch.tensor([4, 2, 1]), implementation=way)

        return values_and_gradients(function, given)

    ways = found("recompute"), found("compiled")
    for actual, expected in zip(*ways, strict=True):
        assert_close(actual, expected, 1e-5)


def test_highway_of_inputs_of_another_width_has_a_matrix_of_its_own() -> None:
    make = Make("cpu")
    with pytest.raises(ValueError, match=r"sru: layers\[0\].input must be \(20, 3\) with I=3, H=5"):
        econmt_ops.sru(make(1, 2, 3), (GateWeights(make(15, 3), make(20)),))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"layers": GateWeights(torch.ones(4, 3), torch.ones(4))},
            r"ssru: layers must be .* write \(weights,\)",
        ),
        ({"layers": ()}, "ssru: layers is empty"),
        ({"layers": (torch.ones(4, 3),)}, r"ssru: layers\[0\] must be GateWeights, got a tensor"),
        ({"state": (torch.ones(2, 2),)}, r"ssru: state\[0\] must be \(c,\), got a tensor of shape \(2, 2\)"),
        ({"state": ()}, r"ssru: state must be a tuple of \(c,\), one for each of 1 layers"),
        (
            {"state": ((torch.ones(2, 3),),)},
            r"ssru: state\[0\] c must be \(B, H\) with B=2, H=2, got \(2, 3\)",
        ),
        ({"lengths": torch.ones(3, dtype=torch.int64)}, r"ssru: lengths must be \(B,\) with B=2"),
        ({"dropout": 0.5}, "ssru: dropout 0.5 needs dropout_seed"),
        ({"implementation": "none"}, "ssru: unknown implementation 'none'"),
        ({"stash": "none"}, "ssru: unknown stash level 'none'"),
    ],
)
def test_what_does_not_fit_is_told(given: dict[str, Any], message: str) -> None:
    fitting = {"inputs": torch.ones(2, 4, 3), "layers": (GateWeights(torch.ones(4, 3), torch.ones(4)),)}
    with pytest.raises(ValueError, match=message):
        econmt_ops.ssru(**{**fitting, **given})


def check_tiny_shares(implementation: str, device: str, dtype: torch.dtype, f: float, i: float) -> None:
    """Checks two steps of minLSTM, c = s c + (1 - s) u with u = 1, whose gates both are all but 0.

    Of two sums F and I far below 0, sigmoid(F) / (sigmoid(F) + sigmoid(I)) is sigmoid(F - I).
    """
    options = {"device": device, "requires_grad": True}
    bias = torch.tensor([1.0, f, i], dtype=dtype, **options)  # type: ignore[call-overload]
    exact = torch.promote_types(dtype, torch.float32)
    first = torch.full((1, 1), 0.25, dtype=exact, **options)  # type: ignore[call-overload]
    weights = GateWeights(torch.zeros(3, 1, dtype=dtype, device=device), bias)
    inputs = torch.ones(1, 2, 1, dtype=dtype, device=device)
    outputs, _ = econmt_ops.min_lstm(inputs, (weights,), state=((first,),), implementation=implementation)
    dbias, dfirst = torch.autograd.grad(outputs.sum(), (bias, first))

    share = 1 / (1 + math.exp(i - f))
    one = share * 0.25 + 1 - share
    two = share * one + 1 - share
    dshare = (one - 1 - 0.75 * share) - 0.75
    dsum = dshare * share * (1 - share)
    expected = [[one, two], [(1 - share) * (2 + share), dsum, -dsum], [share + share**2]]
    found = [part.flatten() for part in (outputs, dbias, dfirst)]
    wanted = [torch.tensor(part, dtype=torch.float64, device=device) for part in expected]
    assert_close(found, wanted, 1e-2 if dtype == torch.bfloat16 else 1e-6)


TINY_GATES = pytest.mark.parametrize(
    ("dtype", "f", "i"),
    [
        *((dtype, -80.0, -80.0) for dtype in (torch.float32, torch.bfloat16)),
        *((dtype, -95.0, -95.0) for dtype in (torch.float32, torch.bfloat16)),
        (torch.float32, -95.0, -94.0),
        (torch.float32, -70.5, -72.0),
        (torch.float32, -1e4, -1e4 - 2),
        (torch.float32, -1e13, -1e13),
        (torch.float64, -800.0, -799.0),
    ],
    ids=str,
)


@TINY_GATES
@pytest.mark.parametrize("implementation", ["reference", "recompute", "recompute without the C library"])
def test_min_lstm_divides_gates_too_small_for_a_float(
    implementation: str, dtype: torch.dtype, f: float, i: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, without = implementation.partition(" ")
    if without:
        monkeypatch.setattr(native, "serves", lambda _: False)
    check_tiny_shares(name, "cpu", dtype, f, i)


@pytest.mark.parametrize("implementation", ["reference", "recompute"])
def test_min_lstm_has_gates_that_are_closed_and_passes_nan_on(implementation: str) -> None:
    check_closed_gates(implementation, "cpu")


def check_closed_gates(implementation: str, device: str) -> None:
    """Checks minLSTM with sums of -inf, of very large numbers and of NaN under its gates."""
    inf = math.inf
    sums = torch.tensor(
        [[-inf, 0], [0, -inf], [-1e13, 2], [inf, inf], [-1e5, 1e5], [1e5, 1e5], [math.nan, 0], [0, math.nan]]
    )
    bias = torch.cat([torch.full((8, 1), 3.0), sums], 1).t().flatten().to(device)
    weights = GateWeights(torch.zeros(24, 1, device=device), bias)
    state = ((torch.full((1, 8), 5.0, device=device),),)
    inputs = torch.ones(1, 1, 1, device=device)
    outputs, _ = econmt_ops.min_lstm(inputs, (weights,), state=state, implementation=implementation)
    assert outputs.flatten()[:6].tolist() == [3, 5, 3, 4, 3, 4]
    assert outputs.flatten()[6:].isnan().all()


@each_case
@pytest.mark.parametrize(("inputs", "hidden"), [(6, 6), (5, 7)])
def test_sizes_of_a_cell(name: str, inputs: int, hidden: int) -> None:
    """Shapes of the weights, and two operations for each value of a matrix."""
    case = CASES[name]
    shapes = case.shapes(inputs, hidden)
    found = {
        tuple(cell.parameter_shapes(inputs, hidden).values()): cell.operations(inputs, hidden)
        for cell in case.op.cells
        if cell.weights is case.weights
    }
    assert found[shapes] == 2 * sum(math.prod(shape) for shape in shapes if len(shape) > 1)


def test_every_operation_has_a_case() -> None:
    assert {case.op for case in CASES.values()} == set(OPS.values())
